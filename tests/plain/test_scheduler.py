"""Exact decisions of the scheduler in worlds of a few blocks, each small enough to follow by hand.

A world has five blocks of four tokens, sixteen tokens a step and four rows, unless a test says otherwise.
"""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from penstock.base.errors import RequestError
from penstock.kv.ledger.blocks import BlockLedger
from penstock.kv.ledger.host import HostLedger
from penstock.sched.rules import PrefixRule, SchedulerLimits
from penstock.sched.scheduler import Scheduler, Storage
from penstock.step.plan import Admission, Outcome, Plan, RequestId, Result, Share, ShareKind, TokenLogprob
from penstock.step.request import FinishReason
from worlds import ROOT, World, sampling

CHUNK = ShareKind.CHUNK
NINE = [0, 1, 2, 0, 1, 2, 0, 1, 2]
OTHER = [2, 2, 2, 2, 1, 1, 1, 1, 0]


def brief(plan: Plan) -> list[tuple[int, int, int, tuple[int, ...], bool]]:
    """Each share's row, start, stop, new blocks, and whether it samples."""
    return [(share.row, share.start, share.stop, share.new_blocks, share.sample) for share in plan.shares]


def parts(plan: Plan) -> dict[int, tuple[int, int]]:
    """Which positions each row computes."""
    return {share.row: (share.start, share.stop) for share in plan.shares}


def finished(world: World, *prompts: list[int]) -> None:
    """Serves the prompts one after the other, one token each."""
    for prompt in prompts:
        world.submit(prompt, 1)
        world.drain()


# -- one request
# ------------------------------------------------------------------------------------------------------------


def test_a_request_from_its_prompt_to_its_end() -> None:
    world = World()
    id = world.submit([0, 1, 2, 0, 1], 4)
    known = world.live[id]
    a, b, c, _ = known.expected
    admission = Admission(0, known.sampling, (0, 1, 2, 0, 1), ())
    assert world.step() == Plan((admission,), (Share(0, 0, (0, 1, 2, 0, 1), 0, (0, 1), True, 5, CHUNK),))
    assert world.step() == Plan((), (Share(0, 5, (a,), 2, (), True, 5),))
    assert world.step() == Plan((), (Share(0, 6, (b,), 2, (), True, 5),))
    assert world.step() == Plan((), (Share(0, 7, (c,), 2, (), True, 5),))
    assert world.step() == Plan((), ())
    assert (world.ledger.available, world.ledger.cached) == (5, 2)


def test_a_block_is_added_when_a_token_needs_it_and_not_before() -> None:
    world = World()
    world.submit([0, 1, 2], 3)
    assert brief(world.step()) == [(0, 0, 3, (0,), True)]
    assert brief(world.step()) == [(0, 3, 4, (), True)]
    assert brief(world.step()) == [(0, 4, 5, (1,), True)]


def test_a_request_may_fill_all_blocks_since_its_last_token_needs_no_place() -> None:
    world = World()
    world.submit([0] * 20, 1)
    assert brief(world.step()) == [(0, 0, 16, (0, 1, 2, 3), False)]
    assert brief(world.step()) == [(0, 16, 20, (4,), True)]
    world.submit([1], 20)
    world.drain()


def test_without_max_tokens_an_output_ends_with_the_room() -> None:
    world = World(max_length=12)
    id = world.submit([0] * 5)
    assert len(world.live[id].expected) == 7
    world.drain()
    assert world.ended[0].finish is FinishReason.LENGTH


@pytest.mark.parametrize(("min_tokens", "outputs"), [(0, [2]), (1, [2]), (2, [2, 2]), (3, [2, 2, 0, 2])])
def test_an_end_token_ends_the_output_once_there_are_enough(min_tokens: int, outputs: list[int]) -> None:
    scheduler = World().scheduler
    id = scheduler.submit([0], sampling(end=[2], min_tokens=min_tokens), 9)
    events = []
    for token in outputs:
        events += scheduler.commit(scheduler.plan(), Outcome((Result((token,)),)))
    assert [(event.request, event.token) for event in events] == [(id, token) for token in outputs]
    assert [event.finish for event in events] == [None] * (len(outputs) - 1) + [FinishReason.STOP]
    assert not scheduler.busy


def test_an_end_token_as_the_last_that_fits_is_a_stop() -> None:
    scheduler = World().scheduler
    scheduler.submit([0], sampling(end=[2]), 1)
    (event,) = scheduler.commit(scheduler.plan(), Outcome((Result((2,)),)))
    assert event.finish is FinishReason.STOP


def test_of_several_tokens_of_a_step_those_after_an_end_are_dropped() -> None:
    scheduler = World().scheduler
    scheduler.submit([0, 1], sampling(end=[2], min_tokens=2), 9)
    plan = scheduler.plan()
    logprobs = tuple(TokenLogprob(token, -0.5, 1, ()) for token in (2, 1, 2, 0))
    events = scheduler.commit(plan, Outcome((Result((2, 1, 2, 0), logprobs),)))
    assert [(event.token, event.logprob, event.finish) for event in events] == [
        (2, logprobs[0], None),
        (1, logprobs[1], None),
        (2, logprobs[2], FinishReason.STOP),
    ]
    assert not scheduler.busy
    scheduler.check()


def test_several_tokens_of_a_step_end_at_the_most_that_were_asked_for() -> None:
    scheduler = World().scheduler
    scheduler.submit([0, 1], sampling(), 2)
    events = scheduler.commit(scheduler.plan(), Outcome((Result((1, 1, 1)),)))
    assert [(event.token, event.finish) for event in events] == [(1, None), (1, FinishReason.LENGTH)]


@pytest.mark.parametrize("fault", ["broken", "wrong"])
def test_of_several_tokens_the_last_is_the_one_with_a_fault(fault: str) -> None:
    world = World()
    world.scheduler.submit([0, 1, 2, 0], sampling(), 9)
    result = Result((1, 2), broken=fault == "broken", wrong=fault == "wrong")
    events = world.scheduler.commit(world.scheduler.plan(), Outcome((result,)))
    assert [event.finish for event in events] == [None, FinishReason.ERROR]
    assert (world.ledger.cached, world.scheduler.wrong) == ((1, 0) if fault == "broken" else (0, 1))


# -- sharing
# ------------------------------------------------------------------------------------------------------------


def test_a_prompt_seen_before_skips_its_full_blocks() -> None:
    world = World()
    finished(world, NINE)
    world.submit(NINE, 1)
    assert brief(world.step()) == [(0, 8, 9, (0, 1, 2), True)]
    assert world.ended[-1].cached == 8


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    world = World()
    finished(world, NINE)
    world.submit(NINE[:8], 1)
    assert brief(world.step()) == [(0, 4, 8, (0, 2), True)]
    world.submit(NINE[:4], 1)
    assert brief(world.step()) == [(0, 0, 4, (2,), True)]


def test_equal_tokens_after_different_ones_are_not_shared() -> None:
    world = World()
    finished(world, NINE)
    world.submit([1, *NINE[1:]], 1)
    assert brief(world.step()) == [(0, 0, 9, (2, 3, 4), True)]


def test_two_running_requests_hold_a_block_together() -> None:
    world = World()
    first = world.submit(NINE, 5)
    assert brief(world.step()) == [(0, 0, 9, (0, 1, 2), True)]
    second = world.submit(NINE, 5, parity=1)
    assert brief(world.step()) == [(0, 9, 10, (), True), (1, 8, 9, (0, 1, 3), True)]
    world.stop(first)
    assert world.ledger.available == 2
    world.step()
    world.stop(second)
    assert (world.ledger.available, world.ledger.cached) == (5, 2)


def test_a_block_is_shared_in_the_very_step_that_computes_it() -> None:
    world = World(blocks=8)
    world.submit(NINE, 2)
    world.submit([*NINE[:8], 0], 2)
    world.submit([*NINE[:4], 2, 2], 2)
    assert brief(world.step()) == [
        (1, 8, 9, (0, 1, 3), True),
        (0, 0, 9, (0, 1, 2), True),
        (2, 4, 6, (0, 4), True),
    ]


def test_siblings_share_the_prompt_and_part_with_their_outputs() -> None:
    world = World(blocks=8)
    for parity in (0, 0, 1):
        world.submit(NINE, 5, parity=parity)
    plan = world.step()
    assert brief(plan) == [(1, 8, 9, (0, 1, 3), True), (2, 8, 9, (0, 1, 4), True), (0, 0, 9, (0, 1, 2), True)]
    assert plan.tokens == 11
    world.drain()
    assert [known.cached for known in world.ended] == [0, 8, 8]


def test_an_output_is_shared_with_the_prompt_that_continues_it() -> None:
    world = World(blocks=8)
    world.submit([0, 1, 2], 10)
    world.drain()
    talk = [*world.ended[0].prompt, *world.ended[0].output]
    world.submit([*talk, 1, 1], 1)
    assert brief(world.step()) == [(0, 12, 15, (0, 1, 2, 3), True)]


def test_a_prompt_in_chunks_finds_blocks_on_its_way() -> None:
    """Its first block is gone, its second is not: after the first has been computed the second is found."""
    world = World(max_step_tokens=4)
    world.submit(NINE[:4], 5)
    world.step()
    assert world.ledger.forget() == 0
    known = next(iter(world.live.values()))
    world.drain()
    world.submit([*NINE[:4], *known.output[:4], 0], 1)
    assert brief(world.step()) == [(0, 0, 4, (0,), False)]
    assert brief(world.step()) == [(0, 8, 9, (1, 2), True)]
    assert world.ended[-1].cached == 4


def test_forgotten_blocks_are_not_shared_even_while_they_are_held() -> None:
    world = World(blocks=8)
    world.submit(NINE, 4)
    world.step()
    assert world.ledger.forget() == 0
    world.submit(NINE, 1)
    assert brief(world.step()) == [(0, 9, 10, (), True), (1, 0, 9, (3, 4, 5), True)]
    world.drain()


def test_nothing_is_shared_or_kept_without_a_prefix_cache() -> None:
    world = World(blocks=8, share=False)
    world.submit(NINE, 2)
    world.submit(NINE, 2)
    assert brief(world.step()) == [(0, 0, 9, (0, 1, 2), True), (1, 0, 7, (3, 4), False)]
    world.drain()
    assert world.ledger.cached == 0


def test_long_prompts_share_only_with_equally_long_ones_where_length_matters() -> None:
    world = World(blocks=20, rope_from=9)
    ten = [*NINE, 0]
    finished(world, NINE, ten)
    assert [known.cached for known in world.ended] == [0, 0]
    finished(world, [*ten, 1], [*NINE[:8], 2, 2], NINE[:6], [*ten[:8], 2])
    assert [known.cached for known in world.ended[2:]] == [0, 8, 4, 8]


def test_a_long_prompt_does_not_take_a_short_one_for_its_length() -> None:
    """With blocks of one token, a token may equal a length."""
    world = World(block_size=1, blocks=8, rope_from=2)
    finished(world, [3, 1], [1, 1, 1])
    assert [known.cached for known in world.ended] == [0, 0]


# -- eviction
# ------------------------------------------------------------------------------------------------------------


def test_the_longest_unused_is_given_up_first_and_tails_before_heads() -> None:
    world = World(blocks=6)
    finished(world, NINE, OTHER, NINE)
    assert (world.ended[-1].cached, world.ledger.cached) == (8, 4)
    # Two blocks hold nothing; the third comes from OTHER, which was used before NINE was used again.
    finished(world, [1] * 9, NINE, OTHER)
    assert [known.cached for known in world.ended[3:]] == [0, 8, 4]


def test_a_waiting_prompt_never_loses_what_it_has_found_in_the_same_step() -> None:
    """The newcomer needs all five blocks: three it finds, and those it gives up must not be among them."""
    world = World(max_step_tokens=32)
    finished(world, [*NINE, 0, 0, 0], OTHER[:8])
    assert (world.ledger.available, world.ledger.cached) == (5, 5)
    world.submit([*NINE, 0, 0, 0, *OTHER[:8]], 1)
    assert brief(world.step()) == [(0, 12, 20, (0, 1, 2, 4, 3), True)]


# -- chunks and budget
# -------------------------------------------------------------------------------------------------------


def test_decodes_come_first_and_a_prompt_takes_what_is_left() -> None:
    world = World(blocks=11, max_step_tokens=6)
    world.submit([0], 8)
    world.submit([1], 8)
    assert brief(world.step()) == [(0, 0, 1, (0,), True), (1, 0, 1, (1,), True)]
    world.submit(NINE, 3)
    assert brief(world.step()) == [(0, 1, 2, (), True), (1, 1, 2, (), True), (2, 0, 4, (2,), False)]
    assert brief(world.step()) == [(0, 2, 3, (), True), (1, 2, 3, (), True), (2, 4, 8, (3,), False)]
    world.submit(OTHER, 1)
    plan = world.step()
    assert brief(plan) == [
        (0, 3, 4, (), True),
        (1, 3, 4, (), True),
        (2, 8, 9, (4,), True),
        (3, 0, 3, (5,), False),
    ]
    assert plan.tokens == 6
    world.drain()


def test_a_long_prompt_leaves_half_of_a_step_to_those_who_can_be_done_with_theirs() -> None:
    """First come, first served: who cannot holds up those behind."""
    world = World(blocks=20, max_step_tokens=8)
    world.submit([0] * 20, 1)
    world.submit([1] * 3, 1)
    world.submit([2], 2)
    world.submit([1, 2] * 3, 1)
    world.submit([2], 1)
    assert parts(world.step()) == {0: (0, 4), 1: (0, 3), 2: (0, 1)}
    assert parts(world.step()) == {0: (4, 11), 2: (1, 2)}, "six tokens are more than half of seven"
    assert parts(world.step()) == {0: (11, 19)}
    assert parts(world.step()) == {0: (19, 20), 1: (0, 1), 2: (0, 6)}
    world.drain()


def test_nothing_is_left_to_those_for_whom_there_is_no_room() -> None:
    world = World(blocks=6, max_step_tokens=8)
    world.submit([0] * 20, 2)
    world.submit([1] * 5, 1)
    assert parts(world.step()) == {0: (0, 8)}
    assert parts(world.step()) == {0: (8, 16)}
    world.drain()


def test_what_is_found_needs_no_tokens_of_the_step() -> None:
    """Sixteen tokens of a conversation so far, and two new ones, beside a long prompt."""
    world = World(blocks=30, max_step_tokens=8)
    finished(world, [1] * 16)
    world.submit([0] * 30, 1)
    world.submit([*[1] * 16, 2, 0], 1)
    assert parts(world.step()) == {0: (0, 6), 1: (16, 18)}
    world.drain()


def test_one_token_a_step_is_enough() -> None:
    world = World(max_step_tokens=1)
    world.submit([0, 1], 2)
    world.submit([1], 1)
    rows = [(share.row, share.start) for _ in range(4) for share in world.step().shares]
    assert rows == [(0, 0), (0, 1), (0, 2), (0, 0)]
    assert not world.scheduler.busy


def test_no_more_run_than_there_are_rows() -> None:
    world = World(max_sequences=2)
    for tokens in (1, 3, 1):
        world.submit([0], tokens)
    assert brief(world.step()) == [(0, 0, 1, (0,), True), (1, 0, 1, (1,), True)]
    assert (world.scheduler.running, world.scheduler.waiting) == (1, 1)
    assert [share.row for share in world.step().shares] == [1, 0]


# -- admission
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "admitted"), [(12, True), (13, False)])
def test_a_newcomer_leaves_a_block_for_everyone_who_runs(length: int, admitted: bool) -> None:
    world = World(max_step_tokens=32)
    world.submit([0], 2)
    world.step()
    world.submit([1] * length, 1)
    assert bool(world.step().admissions) == admitted
    world.drain()


def test_blocks_that_a_newcomer_finds_need_no_room() -> None:
    world = World()
    first = world.submit([*NINE, 0, 0, 0], 2)
    world.step()
    world.submit([*NINE, 0, 0, 1], 1)
    assert brief(world.step()) == [(0, 12, 13, (3,), True)], (
        "one to take and one to leave, and only one is there"
    )
    assert first not in world.live
    assert brief(world.step()) == [(0, 8, 12, (0, 1, 3), True)]


def test_a_small_request_does_not_overtake_a_large_one() -> None:
    world = World(max_step_tokens=32)
    world.submit([0], 3)
    world.step()
    world.submit([1] * 17, 1)
    world.submit([2], 1)
    assert [len(world.step().admissions) for _ in range(3)] == [0, 0, 1]
    assert [known.prompt[0] for known in world.ended] == [0, 1]
    world.drain()


# -- preemption
# ------------------------------------------------------------------------------------------------------------


def preempting() -> tuple[World, RequestId, RequestId]:
    """Two of two blocks each; the younger takes the fifth, the older needs one more in the next step."""
    world = World()
    old, young = world.submit(NINE[:7], 9), world.submit(OTHER[:8], 4)
    assert brief(world.step()) == [(0, 0, 7, (0, 1), True), (1, 0, 8, (2, 3), True)]
    assert brief(world.step()) == [(0, 7, 8, (), True), (1, 8, 9, (4,), True)]
    return world, old, young


def test_the_youngest_goes_when_an_older_one_needs_room() -> None:
    world, _, young = preempting()
    assert brief(world.step()) == [(0, 8, 9, (4,), True)]
    assert (world.scheduler.preemptions, world.scheduler.running, world.scheduler.waiting) == (1, 1, 1)
    assert len(world.live[young].output) == 2
    assert (world.ledger.available, world.ledger.cached) == (2, 2)


def test_of_several_the_youngest_goes_and_no_more_than_have_to() -> None:
    world = World(blocks=6)
    ids = [world.submit(prompt, 12) for prompt in ([0, 1, 2, 0, 1, 2], [1, 1, 1, 1], [2, 2, 2, 2])]
    for _ in range(3):
        world.step()
    assert world.ledger.available == 0
    assert brief(world.step())[0] == (0, 8, 9, (5,), True)
    assert [world.scheduler.is_waiting(id) for id in ids] == [False, False, True]
    world.drain()


def test_the_youngest_goes_by_itself_when_it_is_the_one_that_needs_room() -> None:
    world = World()
    world.submit(NINE[:8], 9)
    world.submit(OTHER[:7], 9)
    world.step()
    assert brief(world.step()) == [(0, 8, 9, (4,), True), (1, 7, 8, (), True)]
    assert brief(world.step()) == [(0, 9, 10, (), True)]
    assert world.scheduler.preemptions == 1
    world.drain()


def test_who_was_preempted_returns_with_its_output_and_finds_its_blocks() -> None:
    world, old, young = preempting()
    world.submit([1], 1)
    for _ in range(4):
        assert not world.step().admissions
    known = world.live[young]
    world.stop(old)
    plan = world.step()
    assert [(a.prompt, a.output) for a in plan.admissions] == [
        (tuple(OTHER[:8]), tuple(known.expected[:2])),
        ((1,), ()),
    ]
    assert brief(plan)[1] == (0, 8, 10, (2, 3, 4), True)
    assert world.scheduler.preemptions == 1
    world.drain()
    assert [known.cached for known in world.ended] == [0, 0, 0], (
        "what was found when it returned is not counted"
    )


def test_who_was_preempted_is_computed_again_where_its_blocks_were_given_up() -> None:
    world, old, _ = preempting()
    for _ in range(7):
        assert world.step().shares[0].row == 0
    assert old not in world.live
    plan = world.step()
    (admission,) = plan.admissions
    assert len(admission.output) == 2
    assert [(share.start, share.stop) for share in plan.shares] == [(4, 10)], (
        "the tail was given up, the head was not"
    )
    world.drain()


def test_two_that_cannot_be_together_take_turns() -> None:
    world = World()
    world.submit([0], 20)
    world.submit([1], 20)
    world.drain()
    assert world.scheduler.preemptions
    assert [known.prompt for known in world.ended] == [[0], [1]]


# -- log-probabilities of the prompt
# -----------------------------------------------------------------------------------------


def test_every_prompt_position_is_computed_where_its_logprobs_are_asked_for() -> None:
    world = World(blocks=8, max_step_tokens=6)
    finished(world, NINE)
    world.submit(NINE, 2, prompt_logprobs=0)
    (share,) = world.step().shares
    assert (share.start, share.next_prompt_tokens) == (0, tuple(NINE[1:7]))
    (share,) = world.step().shares
    assert (share.start, share.next_prompt_tokens) == (6, tuple(NINE[7:]))
    (share,) = world.step().shares
    assert (share.start, share.next_prompt_tokens) == (9, ())
    assert [score.token for score in world.ended[-1].scored] == NINE[1:]


def test_others_share_what_was_computed_for_logprobs() -> None:
    world = World()
    world.submit(NINE, 1, prompt_logprobs=0)
    world.submit(NINE, 1)
    assert [(share.start, share.new_blocks) for share in world.step().shares] == [
        (8, (0, 1, 3)),
        (0, (0, 1, 2)),
    ]


def test_a_prompt_of_one_token_has_no_logprobs() -> None:
    world = World()
    world.submit([1], 2, prompt_logprobs=0)
    world.drain()
    assert world.ended[0].scored == []


def test_logprobs_come_once_though_the_prompt_is_computed_twice() -> None:
    world = World()
    world.submit(NINE[:7], 9)
    world.submit(OTHER[:8], 4, prompt_logprobs=0)
    world.step()
    world.step()
    world.step()
    assert world.scheduler.preemptions == 1
    world.drain()
    assert [score.token for score in world.ended[-1].scored] == OTHER[1:8]


def test_logprobs_go_on_where_an_interrupt_cut_them() -> None:
    """Five of the prompt's positions have been reported when it starts anew, and then it is computed six at a
    time."""
    world = World(max_step_tokens=6)
    other = world.submit([0], 9)
    world.step()
    id = world.submit(NINE, 1, prompt_logprobs=0)
    world.step()
    assert len(world.live[id].scored) == 5
    world.stop(other)
    world.interrupt()
    (share,) = world.step().shares
    assert (share.start, share.next_prompt_tokens) == (0, tuple(NINE[1:7]))
    assert [score.token for score in world.live[id].scored] == NINE[1:7]
    world.drain()
    assert [score.token for score in world.ended[-1].scored] == NINE[1:]


# -- refusals
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "max_length", "message"),
    [
        ([], 1, 1000, r"^the prompt is empty; give at least one token$"),
        (
            [0] * 12,
            None,
            12,
            r"^the request has 12 tokens of prompt, but the context holds 12 in all; shorten it, or ",
        ),
        (
            [0] * 10,
            3,
            12,
            r"^the request has 10 tokens of prompt and 3 of output, but the context holds 12 in all; "
            r"shorten it, or ",
        ),
        (
            [0] * 21,
            None,
            1000,
            r"^the request has 21 tokens of prompt, but the KV blocks hold 21 in all; shorten it, or ",
        ),
        (
            [0] * 20,
            2,
            1000,
            r"^the request has 20 tokens of prompt and 2 of output, but the KV blocks hold 21 in all; "
            r"shorten it, or ",
        ),
    ],
)
def test_what_can_never_be_served_is_refused_and_leaves_no_trace(
    prompt: list[int], max_tokens: int | None, max_length: int, message: str
) -> None:
    world = World(max_length=max_length)
    with pytest.raises(RequestError, match=message) as refusal:
        world.scheduler.submit(prompt, sampling(), max_tokens)
    assert "\n" not in str(refusal.value)
    assert not world.scheduler.busy
    assert world.submit([0], 1) == 0


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "max_length"), [(11, 1, 12), (1, 11, 12), (20, 1, 1000), (1, 20, 1000)]
)
def test_what_just_fits_is_served(prompt: int, max_tokens: int, max_length: int) -> None:
    world = World(max_length=max_length)
    world.submit([0] * prompt, max_tokens)
    world.drain()
    assert len(world.ended[0].output) == max_tokens


# -- stop, interrupt
# ---------------------------------------------------------------------------------------------------------


def test_stop_in_every_phase_frees_everything_and_only_once() -> None:
    world = World(max_step_tokens=6, max_sequences=2)
    decoding, chunked, waiting = world.submit([0], 9), world.submit(NINE, 1), world.submit([2], 1)
    world.step()
    assert [world.live[id].computed for id in (decoding, chunked, waiting)] == [1, 5, 0]
    world.stop(chunked)
    assert world.ledger.available == 4
    world.stop(decoding)
    world.stop(waiting)
    assert (world.ledger.available, world.scheduler.running, world.scheduler.waiting) == (5, 0, 0)
    assert not world.scheduler.busy
    assert not world.scheduler.stop(RequestId(7))
    assert world.scheduler.plan() == Plan((), ())


def test_who_was_preempted_can_be_stopped() -> None:
    world, _, young = preempting()
    world.step()
    world.stop(young)
    assert world.scheduler.waiting == 0
    world.drain()


def test_a_row_is_given_again() -> None:
    world = World(max_sequences=1)
    first = world.submit([0], 9)
    world.step()
    world.submit([1], 1)
    world.stop(first)
    (admission,) = world.step().admissions
    assert (admission.row, admission.prompt) == (0, (1,))


def test_after_an_interrupt_no_kv_is_trusted_and_all_start_anew_in_order() -> None:
    world = World(blocks=10)
    finished(world, OTHER)
    world.submit([0, 1], 4)
    world.submit(NINE, 4)
    world.step()
    world.submit(OTHER, 4)
    outputs = [list(known.output) for known in world.live.values()]
    assert [len(output) for output in outputs] == [1, 1, 0]
    assert len(world.interrupt().admissions) == 1
    assert world.ledger.available == 10
    plan = world.step()
    assert [(list(a.prompt), list(a.output)) for a in plan.admissions] == [
        ([0, 1], outputs[0]),
        (NINE, outputs[1]),
        (OTHER, []),
    ]
    assert sorted((share.row, share.start) for share in plan.shares) == [(0, 0), (1, 0), (2, 0)]
    world.drain()


def cut_short(call: Callable[[], object], lines: int) -> bool:
    """Calls, and interrupts before the call has run more than this many lines of the package. False if it
    ended by itself."""
    left, before = lines, sys.gettrace()

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal left
        if not frame.f_globals["__name__"].startswith("penstock."):
            return None
        left -= event == "line"
        if left < 0:
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("preempts", [True, False])
def test_a_plan_may_be_interrupted_anywhere(preempts: bool) -> None:
    """It preempts one, or takes two in again: between any two of its lines an interrupt can be recovered
    from."""
    lines, unfinished = 0, True
    while unfinished:
        world, old, _ = preempting()
        world.submit([1], 1)
        if not preempts:
            world.step()
            world.stop(old)
        unfinished = cut_short(world.scheduler.plan, lines)
        lines += 1
        world.recover()
        world.drain()
    assert lines > 50


# -- the check itself
# --------------------------------------------------------------------------------------------------------


def test_check_sees_a_request_that_holds_what_the_ledger_does_not_know() -> None:
    world, _, _ = preempting()
    world.scheduler.check()
    world.ledger.release([world.scheduler._queues.running[0].kv.pages[-1]])
    with pytest.raises(AssertionError, match="holders on record"):
        world.scheduler.check()


def test_check_sees_a_lost_row() -> None:
    world, _, _ = preempting()
    world.scheduler._queues.free_rows.pop()
    with pytest.raises(AssertionError, match="a row is lost"):
        world.scheduler.check()


# -- priorities
# ------------------------------------------------------------------------------------------------------------


def test_those_of_a_lower_number_are_admitted_first_and_among_equals_who_came_first() -> None:
    world = World(max_sequences=1)
    zero, one, too, less, more, three = [
        world.submit([0, 1], 2, priority=priority) for priority in (0, 1, 0, -1, 1, 0)
    ]
    world.step()
    urgent = world.submit([0, 1], 2, priority=-2)
    world.drain()
    assert [known.id for known in world.ended] == [less, urgent, zero, too, three, one, more]


def test_when_room_is_short_the_highest_number_goes_though_it_came_first() -> None:
    world = World()
    patient = world.submit(OTHER[:7], 9, priority=1)
    urgent = world.submit(NINE[:8], 9)
    world.step()
    assert [known.id for known in world.running()] == [urgent, patient]
    world.drain()
    assert world.scheduler.preemptions == 1
    assert [known.id for known in world.ended] == [urgent, patient]


def test_after_an_interrupt_all_start_anew_in_their_turns() -> None:
    world = World(max_sequences=1)
    later, sooner = world.submit([0, 1], 2, priority=1), world.submit([0, 1], 2)
    world.interrupt()
    world.drain()
    assert [known.id for known in world.ended] == [sooner, later]


# -- steps that were too large for the memory, and steps cut short that ran ahead
# ----------------------------------------------


def crowd(*, host: int = 0) -> tuple[Scheduler, list[RequestId]]:
    """Four requests, each of which lacks only its newest token."""
    scheduler = Scheduler(
        BlockLedger(80),
        SchedulerLimits(4, 16, 4, 300),
        PrefixRule(ROOT),
        Storage(HostLedger(host)),
        check=True,
    )
    ids = [scheduler.submit([number, 1, 2], sampling(), 70) for number in range(4)]
    yielded(scheduler)
    return scheduler, ids


def yielded(scheduler: Scheduler) -> Plan:
    """A step is carried out."""
    plan = scheduler.plan()
    scheduler.commit(plan, Outcome(tuple(Result((0,) if share.sample else ()) for share in plan.shares)))
    return plan


def test_a_step_that_was_too_large_has_half_the_requests_next() -> None:
    scheduler, ids = crowd()
    for most in (2, 1):
        plan = scheduler.plan()
        assert scheduler.narrow(plan) is None
        scheduler.recover()
        assert scheduler.narrowed == (most, most)
        # All start anew, and so as many tokens at a time as there may be.
        for _ in range(4):
            assert sum(len(share.tokens) for share in yielded(scheduler).shares) <= most
            assert scheduler.running <= most
    plan = scheduler.plan()
    assert (len(plan.shares), plan.tokens) == (1, 1)
    assert scheduler.narrow(plan) == ids[0]


def test_nobody_of_several_is_stopped_for_a_step_that_was_too_large() -> None:
    """With host blocks a step has room for one of them: here for a token of each of the four."""
    scheduler, _ = crowd(host=8)
    plan = scheduler.plan()
    assert (len(plan.shares), plan.tokens) == (4, 4)
    assert scheduler.narrow(plan) is None
    assert scheduler.narrowed == (4, 2)


def test_more_is_tried_again_after_twice_as_many_steps_each_time() -> None:
    scheduler, _ = crowd()
    steps = []
    for _ in range(3):
        assert scheduler.narrow(scheduler.plan()) is None
        scheduler.recover()
        narrowed, count = scheduler.narrowed, 0
        while scheduler.narrowed == narrowed:
            yielded(scheduler)
            count += 1
        steps.append(count)
    assert steps == [8, 16, 32]


def test_who_was_about_to_end_in_a_step_cut_short_goes_on() -> None:
    """Its prompt takes several steps again."""
    scheduler = Scheduler(BlockLedger(8), SchedulerLimits(4, 4, 2, 100), PrefixRule(ROOT), check=True)
    scheduler.submit([0] * 10, sampling(), 2)
    for _ in range(3):
        yielded(scheduler)
    plan = scheduler.plan()
    scheduler.run_ahead(plan)
    assert not scheduler.plan().shares, "its last token is on its way"
    scheduler.recover()
    assert [sum(len(share.tokens) for share in yielded(scheduler).shares) for _ in range(3)] == [4, 4, 3]
    assert not scheduler.busy
