"""Which replica a prompt goes to."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from penstock.kv.ledger.keys import block_keys, root_key
from penstock.server.fleet.routing import Affinity

ROOT, SIZE = root_key(b""), 4


def keys(*tokens: int) -> list[bytes]:
    return block_keys(ROOT, tokens, SIZE)


def fleet(*names: str, slack: int = 2, kept: int = 100) -> Affinity:
    affinity = Affinity(slack, kept)
    affinity.keep(names)
    return affinity


TALK = keys(*range(16))
LONGER = keys(*range(24))
BRANCH = keys(*range(8), *range(50, 66))
"""Its first two blocks are those of the talk."""


def test_a_prompt_goes_where_the_longest_beginning_of_it_is() -> None:
    affinity = fleet("a", "b", "c")
    affinity.note("b", TALK[:2])
    affinity.note("c", TALK)
    affinity.sent("c")
    assert affinity.ranked(LONGER) == ["c", "b", "a"]
    assert affinity.ranked(BRANCH)[:2] == ["b", "c"], "both hold two blocks of it, and b is idle"


def test_what_stands_elsewhere_in_a_prompt_is_not_its_beginning() -> None:
    affinity = fleet("a", "b")
    affinity.note("b", keys(9, 9, 9, 9, *range(16)))
    affinity.sent("b")
    assert affinity.ranked(TALK)[0] == "a"


def test_without_a_known_beginning_the_idlest_is_chosen_then_the_emptiest() -> None:
    affinity = fleet("a", "b", "c")
    affinity.sent("a")
    affinity.note("b", BRANCH[3:])
    assert affinity.ranked(keys(1, 2)) == ["c", "b", "a"]


def test_a_replica_that_is_far_busier_is_not_chosen_for_what_it_holds() -> None:
    affinity = fleet("a", "b", slack=2)
    affinity.note("b", TALK)
    for _ in range(2):
        affinity.sent("b")
    assert affinity.ranked(TALK)[0] == "b"
    affinity.sent("b")
    assert affinity.ranked(TALK)[0] == "a"
    affinity.ended("b")
    assert affinity.ranked(TALK)[0] == "b"


def test_a_replica_that_was_lost_is_the_last_choice_until_it_is_heard_of() -> None:
    affinity = fleet("a", "b")
    affinity.note("a", TALK)
    affinity.doubt("a")
    for _ in range(9):
        affinity.sent("b")
    assert affinity.ranked(TALK) == ["b", "a"]
    affinity.trust("a")
    assert affinity.ranked(TALK) == ["a", "b"], "which holds nothing, but is idle"


def test_a_replica_that_is_gone_is_forgotten_and_one_of_its_name_holds_nothing() -> None:
    affinity = fleet("a", "b")
    affinity.note("b", TALK)
    affinity.sent("b")
    affinity.keep(["a"])
    for nobody in (affinity.sent, affinity.ended, affinity.doubt, affinity.trust):
        nobody("b")
    affinity.note("b", TALK)
    assert affinity.replicas == ("a",)
    affinity.keep(["a", "b"])
    affinity.sent("b")
    assert affinity.ranked(TALK) == ["a", "b"]


def test_the_oldest_is_forgotten_first_and_of_a_prompt_its_end() -> None:
    affinity = fleet("a", "b", kept=6)
    affinity.note("b", TALK)
    affinity.note("b", BRANCH)
    affinity.sent("b")
    assert affinity.ranked(TALK)[0] == "b", "its first two blocks are the other's too"
    affinity.note("b", keys(*range(100, 124)))
    assert affinity.ranked(TALK)[0] == "a"
    affinity.note("b", keys(*range(200, 280)))
    assert affinity.ranked(keys(*range(200, 224)))[0] == "b", (
        "of a prompt larger than all room, the beginning is remembered"
    )


NAMES = "abc"


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["note", "sent", "ended", "doubt", "trust", "keep"]),
            st.sampled_from(NAMES),
            st.lists(st.integers(0, 1), max_size=24),
        ),
        max_size=40,
    ),
    st.lists(st.integers(0, 1), max_size=24),
)
def test_whatever_has_happened_all_replicas_are_ranked_and_no_more_is_remembered_than_asked(
    events: Sequence[tuple[str, str, list[int]]], prompt: list[int]
) -> None:
    affinity = fleet(*NAMES, kept=5)
    there = set(NAMES)
    for what, name, tokens in events:
        if what == "keep":
            there ^= {name}
            affinity.keep(there)
        elif what == "note":
            affinity.note(name, keys(*tokens))
        else:
            getattr(affinity, what)(name)
    assert sorted(affinity.ranked(keys(*prompt))) == sorted(there)
    assert all(load >= 0 for load in affinity.loads.values())
    assert all(len(replica.keys) <= 5 for replica in affinity._replicas.values())
