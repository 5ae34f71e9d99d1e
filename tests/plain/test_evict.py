"""What is given up: only what is idle, each block once, the least likely to return; and never far worse than
the least recently used."""

import os
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.bench.traces.simulation import (
    Clairvoyant,
    Fifo,
    Learned,
    LeastRecent,
    Offered,
    SecondUse,
    replay,
)
from penstock.bench.traces.workloads import generate
from penstock.kv.ledger.evict import Eviction, Lru
from penstock.kv.ledger.prospect import Prospect
from penstock.kv.ledger.returns import Returns
from penstock.kv.ledger.shadows import Expert, Shadows, _Fifo, _Lru, _SecondUse

THOROUGH = "PENSTOCK_THOROUGH" in os.environ
MAKES: list[Callable[[], Eviction[int]]] = [
    Lru,
    lambda: Prospect(8),
    lambda: Prospect(8, deep=2, remembered=3),
]


# -- what any order of giving up must keep
# ------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", MAKES)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["added", "found", "busy", "idle", "victim", "dropped"]), st.integers(0, 11)
        ),
        max_size=300,
    )
)
@settings(max_examples=150, deadline=None)
def test_only_what_is_idle_is_given_up(
    make: Callable[[], Eviction[int]], calls: list[tuple[str, int]]
) -> None:
    """Blocks are a tree: 0 and 1 are roots, each other continues the one of half its number. Calls that are
    not allowed are left out."""
    policy, there = make(), dict[int, bool]()
    for call, key in calls:
        idle = there.get(key)
        if call == "added" and idle is None:
            policy.added(key, key // 2 if key > 1 else None)
            there[key] = False
        elif call == "found" and idle is not None:
            policy.found(key)
        elif call == "busy" and idle:
            policy.busy(key)
            there[key] = False
        elif call == "idle" and idle is False:
            policy.idle(key)
            there[key] = True
        elif call == "dropped" and idle is not None:
            policy.dropped(key)
            del there[key]
        elif call == "victim" and any(there.values()):
            assert there.pop(policy.victim())
        assert len(policy) == sum(there.values())
    given_up = [policy.victim() for _ in range(len(policy))]
    assert sorted(given_up) == sorted(key for key, idle in there.items() if idle)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6)), min_size=1, max_size=60))
@settings(max_examples=100, deadline=None)
def test_no_block_is_given_up_before_those_that_continue_it(requests: list[tuple[int, int]]) -> None:
    policy, there = Prospect[tuple[int, int]](16), set[tuple[int, int]]()
    for one, length in requests:
        keys = [(one, depth) for depth in range(length)]
        come(policy, there, keys)
        while len(there) > 16:
            one, depth = policy.victim()
            there.remove((one, depth))
            assert (one, depth + 1) not in there


def come(
    policy: Eviction[tuple[int, int]], there: set[tuple[int, int]], keys: Sequence[tuple[int, int]]
) -> None:
    for parent, key in zip((None, *keys), keys, strict=False):
        if key in there:
            policy.found(key)
            policy.busy(key)
        else:
            policy.added(key, parent)
            there.add(key)
    for key in reversed(keys):
        policy.idle(key)


@given(
    st.lists(st.lists(st.integers(0, 39), max_size=25, unique=True), min_size=1, max_size=30),
    st.sets(st.integers(0, 39)),
    st.integers(1, 80),
)
@settings(max_examples=150, deadline=None)
def test_many_that_are_found_are_as_if_one_by_one(runs: list[list[int]], idle: set[int], blocks: int) -> None:
    """Also over the ends of epochs. Shadows are told of a run from its end, so they are left out."""
    together, apart = Prospect[int](blocks, mixed=False), Prospect[int](blocks, mixed=False)
    for policy in (together, apart):
        for key in range(40):
            policy.added(key, key - 1 if key % 10 else None)
        for key in sorted(idle, reverse=True):
            policy.idle(key)
    for run in runs:
        together.found_all(run)
        for key in run:
            apart.found(key)
        assert [together.worth(key) for key in range(40)] == [apart.worth(key) for key in range(40)]
    assert [together.victim() for _ in idle] == [apart.victim() for _ in idle]
    one, other = together._returns, apart._returns
    assert (one.epoch, one._unused, one._used, one._came) == (
        other.epoch,
        other._unused,
        other._used,
        other._came,
    )


@given(
    st.lists(
        st.tuples(st.sampled_from(["idle", "busy", "found", "added"]), st.integers(0, 59)), max_size=120
    ),
    st.lists(st.integers(1, 12), min_size=1, max_size=8),
    st.integers(1, 80),
)
@settings(max_examples=150, deadline=None)
def test_many_victims_are_as_if_one_by_one(
    calls: list[tuple[str, int]], counts: list[int], blocks: int
) -> None:
    """Of chains of ten, some of which are held in part, over the ends of epochs."""
    together, apart = Prospect[int](blocks), Prospect[int](blocks)
    there, idle = set(range(60)), set[int]()
    for key in range(60):
        for policy in (together, apart):
            policy.added(key, key - 1 if key % 10 else None)
    calls = [("idle", key) for key in reversed(range(60))] + calls
    for at, count in enumerate(counts):
        for what, key in calls[at :: len(counts)]:
            may = {
                "idle": key in there - idle,
                "busy": key in idle,
                "found": key in there,
                "added": key not in there,
            }
            if may[what]:
                for policy in (together, apart):
                    policy.added(key, key - 1 if key % 10 else None) if what == "added" else getattr(
                        policy, what
                    )(key)
                there.add(key)
                idle = idle | {key} if what == "idle" else idle - {key} if what == "busy" else idle
        many = min(count, len(idle))
        gone = together.victims(many)
        assert gone == [apart.victims(1)[0] for _ in range(many)]
        there.difference_update(gone)
        idle.difference_update(gone)
    assert len(together) == len(apart) == len(idle)


def test_lru_gives_up_the_longest_unused() -> None:
    policy = Lru[str]()
    for key in "abcd":
        policy.added(key, None)
        policy.idle(key)
    policy.found("a")
    policy.busy("b")
    policy.dropped("c")
    policy.idle("b")
    assert [policy.victim() for _ in range(len(policy))] == ["d", "a", "b"]


# -- what is learned
# ----------------------------------------------------------------------------------------------------------

Trace = list[list[int]]


def flat(keys: Iterator[int]) -> Trace:
    return [[key] for key in keys]


def loop() -> Trace:
    return flat(number % 300 for number in range(30_000))


def zipf() -> Trace:
    rng = random.Random(1)
    return flat(iter(rng.choices(range(4000), [1 / (rank + 1) for rank in range(4000)], k=30_000)))


def shifting() -> Trace:
    """What is popular changes every 3,000 requests."""
    rng = random.Random(2)
    weights = [1 / (rank + 1) for rank in range(1000)]
    return flat(
        chain.from_iterable(
            (10_000 * phase + key for key in rng.choices(range(1000), weights, k=3000)) for phase in range(10)
        )
    )


def scans() -> Trace:
    """A popular set, and every so often a run of blocks that never return."""
    rng, fresh = random.Random(3), iter(range(10_000, 100_000))
    trace: Trace = []
    while len(trace) < 30_000:
        trace += flat(iter(rng.choices(range(200), k=400)))
        trace += flat(islice(fresh, 300))
    return trace


def recent() -> Trace:
    """The longer unused, the less likely to return: nothing is better than LRU."""
    rng = random.Random(4)
    stack = list(range(3000))
    trace: Trace = []
    for _ in range(30_000):
        at = min(int(rng.expovariate(1 / 150)), len(stack) - 1)
        stack.append(stack.pop(-1 - at))
        trace.append([stack[-1]])
    return trace


def conversations() -> Trace:
    """Many ask once; some come back after a while and go on, each time with two more blocks."""
    rng, fresh = random.Random(5), iter(range(1, 1_000_000))
    due: dict[int, list[list[int]]] = {}
    trace: Trace = []
    for now in range(4000):
        for keys in (*due.pop(now, []), [0, *islice(fresh, 8)]):
            trace.append(keys)
            if rng.random() < (0.15 if len(keys) == 9 else 0.8):
                due.setdefault(now + rng.randint(20, 80), []).append([*keys, *islice(fresh, 2)])
    return trace


WORKLOADS = [loop, zipf, shifting, scans, recent, conversations]
ROOMS = [
    (workload, blocks)
    for turn, workload in enumerate(WORKLOADS)
    for blocks in ((64, 200) if THOROUGH else ((64, 200)[turn % 2],))
]


@pytest.mark.parametrize(("workload", "blocks"), ROOMS)
def test_it_is_never_far_worse_than_lru(workload: Callable[[], Trace], blocks: int) -> None:
    trace = workload()
    lru, learned = replay(trace, LeastRecent(), blocks), replay(trace, Learned(blocks), blocks)
    assert learned >= lru - 0.02


@pytest.mark.parametrize(("workload", "share"), [(loop, 0.5), (scans, 0.45), (conversations, 0.3)])
def test_where_recency_misleads_it_goes_far_toward_the_best(
    workload: Callable[[], Trace], share: float
) -> None:
    trace, blocks = workload(), 150
    lru, learned = replay(trace, LeastRecent(), blocks), replay(trace, Learned(blocks), blocks)
    assert learned - lru >= share * (replay(trace, Clairvoyant(trace), blocks) - lru) > 0


def test_an_age_that_few_have_passed_does_not_look_as_if_nothing_returned_at_it() -> None:
    """One block in five hundred returns in each epoch, whatever its age, so the gain is the same at all ages.
    The span from 128 to 192 epochs has been entered but not passed."""
    returns, unused = Returns(), dict[int, int]()
    for _ in range(160):
        for since, blocks in unused.items():
            returns.again(0, since, blocks // 500)
            unused[since] -= blocks // 500
        returns.use(0, 100_000)
        unused[returns.epoch] = 100_000
        returns.tick()
    young, old = (returns.gain(0, returns.epoch - age) for age in (40, 130))
    assert old == pytest.approx(young, rel=0.2)


def test_the_same_calls_give_the_same_victims() -> None:
    assert victims(conversations()[:1500]) == victims(conversations()[:1500])


def victims(trace: Trace) -> list[int]:
    policy, there, given_up = Prospect[int](150), set[int](), []
    for keys in trace:
        for parent, key in zip((None, *keys), keys, strict=False):
            if key in there:
                policy.found(key)
                policy.busy(key)
            else:
                policy.added(key, parent)
                there.add(key)
        for key in reversed(keys):
            policy.idle(key)
        while len(there) > 150:
            given_up.append(policy.victim())
            there.remove(given_up[-1])
    return given_up


def test_what_is_mixed_keeps_up_where_what_is_learned_misleads() -> None:
    """Whether what was used often or what was used lately returns alternates."""
    trace, blocks = [request.keys for request in generate("arc")], 282
    first = len(trace) // 2
    best = max(replay(trace, policy, blocks, first) for policy in (Fifo(), LeastRecent(), SecondUse()))
    alone, mixed = (replay(trace, Learned(blocks, mixed=mixed), blocks, first) for mixed in (False, True))
    assert alone < best - 0.02
    assert mixed >= best - 0.01


@pytest.mark.parametrize(
    ("leader", "simple"), [(Expert.LRU, LeastRecent), (Expert.SECOND_USE, SecondUse), (Expert.FIFO, Fifo)]
)
def test_who_leads_decides(leader: Expert, simple: Callable[[], Offered[int]]) -> None:
    policy = Learned[int](150, mixed=False)
    policy._lead(leader)
    trace = zipf()
    assert replay(trace, policy, 150) == pytest.approx(replay(trace, simple(), 150), abs=0.005)


def test_what_is_remembered_is_bounded() -> None:
    policy = Prospect[int](100, remembered=250)
    for key in range(5000):
        policy.added(key, None)
        policy.idle(key)
        if key >= 100:
            policy.victim()
        assert len(policy) <= 100
        assert len(policy._gone) == min(max(0, key - 99), 250)
    state = vars(policy)
    assert len(state["_there"]) == 100
    assert sum(map(len, state["_queues"].values())) == 100
    assert len(state["_heap"]) <= 100


def test_a_block_is_worth_a_write_if_its_kind_returns() -> None:
    policy, there = Prospect[tuple[int, int]](64), set[tuple[int, int]]()
    come(policy, there, [(0, 0)])
    assert policy.worth((0, 0)), "nothing is known yet"
    for number in range(1, 4000):
        come(policy, there, [(number, 0)])
        if number % 10 == 0:
            for _ in range(2):
                come(policy, there, [(number, 0)])
        while len(there) > 64:
            there.remove(policy.victim())
    come(policy, there, [(5000, 0)])
    assert not policy.worth((5000, 0)), "one in ten returns"
    come(policy, there, [(5000, 0)])
    assert policy.worth((5000, 0)), "what returned once does so again"


def test_a_block_used_once_has_to_be_likelier_to_return_than_one_used_twice() -> None:
    policy, there = Prospect[tuple[int, int]](64), set[tuple[int, int]]()
    for number in range(4000):
        for _ in range(4 if number % 2 else 1):
            come(policy, there, [(number, 0)])
        while len(there) > 64:
            there.remove(policy.victim())
    come(policy, there, [(5000, 0)])
    assert not policy.worth((5000, 0)), "one in two returns"
    come(policy, there, [(5000, 0)])
    assert policy.worth((5000, 0))


def test_what_the_simple_experts_hold() -> None:
    """Two blocks each: the last that were used, the last that came, the last that were used more than
    once."""
    lru, fifo, second = _Lru[int](2), _Fifo[int](2), _SecondUse[int](2)
    uses = [(1, False), (2, False), (1, True), (2, True), (1, True), (3, False), (1, True), (2, True)]
    assert [lru.use(*use) for use in uses] == [False, False, True, True, True, False, True, False]
    assert [fifo.use(*use) for use in uses] == [False, False, True, True, True, False, False, False]
    assert [second.use(*use) for use in uses] == [False, False, False, False, True, False, True, True]


def test_another_leads_only_when_it_is_ahead_by_what_the_change_costs() -> None:
    """Of a room of 64 blocks three tenths, however sure it is that it finds more."""
    shadows = Shadows[int](64, 1.0, lambda kind, since: 0.0)
    ahead = 0
    while shadows.leader is Expert.PROSPECT:
        shadows._counts[1 << Expert.LRU] = 2
        shadows.tick()
        ahead += 2
    assert shadows.leader is Expert.LRU
    assert 19 < ahead < 64
