"""Speculation that rests: where drafts do not hold, steps run ahead and take as long as without, by counted
time; where they begin to hold, that is seen."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from unittest.mock import patch

import pytest

from counted import Drafts, Machine, Passes, run
from liars import Told
from penstock.engine.drafter import ModelDrafter
from penstock.kv.ledger.blocks import BlockLedger
from penstock.sched import resting
from penstock.sched.drafter import SuffixDrafter
from penstock.sched.request import Request
from penstock.sched.resting import DraftBudget, Lookout
from penstock.sched.rules import PrefixRule, SchedulerLimits
from penstock.sched.scheduler import Scheduler
from penstock.sched.speculation import Speculation
from penstock.sched.suffix import Draft
from penstock.step.plan import MOST_DRAFTED, UNKNOWN, Plan, Row, Share, ShareKind
from worlds import ROOT, sampling

WINDOW, FIRST = 64, 128
"""Passes of a window, and those at first in which it is learnt what steps take."""
MACHINES: dict[str, tuple[Callable[[int], float], float, bool]] = {
    "GPU": (lambda tokens: 2e-3 + 5e-6 * tokens, 2e-4, True),
    "small model": (lambda tokens: 1e-3 + 5e-6 * tokens, 2e-4, True),
    "weights stream": (lambda tokens: 5e-2 + 1e-5 * tokens, 3e-4, True),
    "CPU": (lambda tokens: 1.5e-3 + 1.5e-3 * tokens, 2e-4, False),
}
"""Seconds of a step, those of the host to begin one and to end it, and whether steps run ahead."""


def said(number: int, place: int) -> int:
    return hash((number, place)) % 997


def right(number: int, place: int) -> list[int]:
    return [said(number, place + further) for further in range(16)]


def wrong(number: int, place: int) -> list[int]:
    return [1000] * 16


def machine(name: str) -> Machine:
    seconds, host, ahead = MACHINES[name]
    return Machine(said, seconds, host, ahead)


def rates(passes: Passes, first: int = 0) -> list[float]:
    """Tokens a second in each window."""
    return [
        (passes[at + WINDOW][1] - passes[at][1]) / (passes[at + WINDOW][0] - passes[at][0])
        for at in range(first, len(passes) - WINDOW)
    ]


@cache
def plain_rate(name: str, rows: int) -> float:
    """Tokens a second without speculation."""
    passes, _ = run(machine(name), rows, 40 + WINDOW, None)
    return rates(passes)[-1]


def drafted(
    name: str, rows: int, count: int, tokens: Callable[[int, int], Sequence[int]]
) -> tuple[Passes, Scheduler]:
    device = machine(name)
    speculation = Speculation(Drafts(device, tokens), clock=lambda: device.now)
    return run(device, rows, count, speculation)


@pytest.mark.parametrize("rows", [1, 8, 32])
@pytest.mark.parametrize("name", MACHINES)
def test_drafts_that_never_hold_cost_less_than_two_percent_in_any_window(name: str, rows: int) -> None:
    passes, scheduler = drafted(name, rows, 900, wrong)
    assert min(rates(passes, FIRST)) >= 0.98 * plain_rate(name, rows)
    assert min(rates(passes)) >= 0.9 * plain_rate(name, rows), "what is not known costs too much"
    assert scheduler.speculation is not None
    assert scheduler.speculation.counts.drafts > 10, "whether they hold now is looked at now and then"


@pytest.mark.parametrize("rate", [0.0044, 0.005])
def test_all_that_is_lost_is_paid_for_by_the_budget(rate: float) -> None:
    name, rows, count = "small model", 8, 900
    with patch.object(resting, "_RATE", rate):
        passes, scheduler = drafted(name, rows, count, wrong)
    assert min(rates(passes, FIRST)) >= 0.98 * plain_rate(name, rows)
    lost = passes[-1][0] * plain_rate(name, rows) / rows - count
    assert lost <= 8 + rate * count + 1, "more than what may be lost at first, and at each step"
    assert scheduler.speculation is not None
    assert scheduler.speculation.counts.drafts >= count // (3 * WINDOW)


def test_what_it_wakes_for_is_done_and_paid_for() -> None:
    """The step for whose end it waits has none behind it, and the next one waited, whatever it verifies."""
    now = 0.0
    speculation = Speculation(SuffixDrafter(), clock=lambda: now)
    runs_ahead, waited = (Plan((), (Share(Row(0), 8, (token,), 0, (), True, 4),)) for token in (UNKNOWN, 5))

    def step(plan: Plan, seconds: float) -> float:
        nonlocal now
        now, before = now + seconds, speculation.budget.left
        speculation.stepped(plan, seconds)
        return speculation.budget.left - before

    for _ in range(82):
        step(runs_ahead, 1e-3)
    speculation.resting, speculation._woken, speculation._expects = False, True, False
    assert step(runs_ahead, 1.3e-3) == pytest.approx(-0.3, abs=0.01)
    speculation._plain = 64
    assert not speculation.budget.full
    (probe,) = speculation.choose([Draft((1, 2, 3, 4), (0.1,) * 4, 1)], 1, 100)
    assert probe.tokens, "a probe for which it has woken"
    speculation.rest()
    assert step(waited, 1.3e-3) < -0.2


@pytest.mark.parametrize("rows", [1, 8, 32])
@pytest.mark.parametrize("name", [name for name in MACHINES if name != "CPU"])
def test_nothing_is_lost_where_there_is_nothing_to_draft(name: str, rows: int) -> None:
    passes, _ = drafted(name, rows, 400, lambda number, place: [])
    assert min(rates(passes)) >= 0.999 * plain_rate(name, rows)


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("name", MACHINES)
def test_drafts_that_begin_to_hold_are_found_within_a_few_steps(name: str, rows: int) -> None:
    """From then on there is as much of it as if they had held from the beginning."""
    begins = 300
    passes, _ = drafted(
        name, rows, 500, lambda number, place: right(number, place) if place >= begins else []
    )
    at = next(at for at, (_, _, least) in enumerate(passes) if least >= begins)
    per_pass = [(later[1] - one[1]) / rows for one, later in pairwise(passes)]
    assert max(per_pass[at : at + 6]) > 1, "the first is verified soon"
    always, _ = drafted(name, rows, 500, right)
    assert rates(always)[-1] > 1.05 * plain_rate(name, rows)
    assert rates(passes)[-1] >= 0.9 * rates(always)[-1]


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("name", ["GPU", "small model", "weights stream"])
def test_drafts_that_hold_after_many_that_did_not_are_found(name: str, rows: int) -> None:
    begins = 600
    passes, _ = drafted(
        name, rows, 1500, lambda number, place: (right if place >= begins else wrong)(number, place)
    )
    assert rates(passes)[-1] > 4 * plain_rate(name, rows)


@pytest.mark.parametrize("name", ["GPU", "weights stream"])
@pytest.mark.parametrize("rows", [1, 8])
def test_nothing_is_lost_for_long_by_drafts_that_hold_by_turns(name: str, rows: int) -> None:
    passes, _ = drafted(
        name, rows, 1200, lambda number, place: (right if place // 100 % 2 else wrong)(number, place)
    )
    (begun, before, _), (ended, after, _) = passes[FIRST], passes[-1]
    assert (after - before) / (ended - begun) > 0.99 * plain_rate(name, rows)


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("seed", range(3))
def test_no_request_starves(name: str, seed: int) -> None:
    """Whoever decodes has a token of every pass, whoever drafts."""
    chance = random.Random(seed)
    kinds = [chance.choice([right, wrong, lambda number, place: []]) for _ in range(8)]
    device = machine(name)
    speculation = Speculation(
        Drafts(device, lambda number, place: kinds[number](number, place)), clock=lambda: device.now
    )
    passes, _ = run(device, 8, 400, speculation)
    assert all(least >= number for number, (_, _, least) in enumerate(passes, 1))


@dataclass
class Model:
    """A draft model that needs `seconds` for a token of each request, while the target computes nothing.
    first: seconds of its first ones, which it does not take for those of others."""

    machine: Machine
    tokens: Callable[[int, int], Sequence[int]]
    seconds: float = 0.0
    spent: float = 0.0
    first: float = 0.0
    most: int = MOST_DRAFTED
    trees: bool = False

    def levels(self, count: int) -> int:
        return count

    def propose(self, asked: Sequence[tuple[Request, Share, int]]) -> list[Draft]:
        assert self.machine.free <= self.machine.now, "a step of the target is under way"
        took, self.first = self.first or 2e-4, 0.0
        self.seconds = 2e-4 if took == 2e-4 else 0.0
        self.spent = took * max(count for _, _, count in asked)
        self.machine.now += self.spent
        drafts = list[Draft]()
        for request, _, count in asked:
            assert not request.unknown
            request.kv.drafted = len(request.tokens) + count - 1
            place = len(request.tokens) - len(request.prompt)
            tokens = tuple(self.tokens(request.prompt[0], place))[:count]
            tokens += (1000,) * (count - len(tokens))
            drafts.append(Draft(tokens, (1.0,) * count, by_model=True))
        return drafts


def by_model(
    name: str, rows: int, count: int, tokens: Callable[[int, int], Sequence[int]], first: float = 0.0
) -> tuple[Passes, Scheduler]:
    device = machine(name)
    speculation = Speculation(Drafts(device, lambda number, place: []), clock=lambda: device.now)
    speculation.model = Model(device, tokens, first=first)
    return run(device, rows, count, speculation)


def test_the_first_steps_of_a_draft_model_are_not_measured() -> None:
    device = machine("GPU")
    drafter = ModelDrafter(device, 64)
    drafter.took(5.0, 4, alike=True)
    assert (drafter.seconds, drafter.spent) == (0, 5.0)
    drafter.took(0.4, 4, alike=True)
    assert drafter.seconds == pytest.approx(0.1)


@pytest.mark.parametrize("name", ["GPU", "weights stream"])
def test_first_steps_of_a_draft_model_that_take_long_are_not_held_against_it(name: str) -> None:
    passes, _ = by_model(name, 1, 150, right, first=0.5)
    always, _ = by_model(name, 1, 150, right)
    assert rates(passes)[-1] > 0.95 * rates(always)[-1] > 2 * plain_rate(name, 1)


@pytest.mark.parametrize("rows", [1, 8, 32])
@pytest.mark.parametrize("name", ["GPU", "small model", "weights stream"])
def test_nor_does_a_draft_model_whose_drafts_never_hold(name: str, rows: int) -> None:
    passes, scheduler = by_model(name, rows, 900, wrong)
    assert min(rates(passes, FIRST)) >= 0.98 * plain_rate(name, rows)
    assert scheduler.speculation is not None
    assert scheduler.speculation.counts.drafts > 5


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("name", ["GPU", "weights stream"])
def test_a_draft_model_that_begins_to_draft_well_is_found(name: str, rows: int) -> None:
    always, _ = by_model(name, rows, 300, right)
    assert rates(always)[-1] > 2 * plain_rate(name, rows)
    passes, _ = by_model(
        name, rows, 1500, lambda number, place: (right if place >= 300 else wrong)(number, place)
    )
    assert rates(passes)[-1] > 0.9 * rates(always)[-1]


# -- what may be lost
# ------------------------------------------------------------------------------------------------------------


def test_a_budget_bounds_what_is_lost() -> None:
    """However it is spent where nothing is gained, and it is not spent twice."""
    budget, chance = DraftBudget(), random.Random(5)
    for _ in range(400):
        budget.plain()
    lost = list[float]()
    for _ in range(4000):
        cost = chance.random() if budget.full and chance.random() < 0.3 else 0.0
        lost.append(cost)
        if cost:
            budget.spend(cost)
        else:
            budget.plain()
    assert max(sum(lost[at : at + 64]) for at in range(len(lost) - 64)) <= 0.02 * 64
    assert 0.004 <= sum(lost) / len(lost) <= 0.006


def test_what_was_gained_may_be_lost_again_but_soon() -> None:
    budget = DraftBudget()
    for _ in range(400):
        budget.plain()
    free = budget.left
    for _ in range(100):
        budget.spend(-5.0)
    assert budget.left > 2 * free
    most = budget.left
    budget.spend(-100.0)
    assert budget.left == most <= 64, "there is a bound to it"
    budget.spend(0.5)
    assert budget.left <= 8, "what does not hold once may not hold at all"
    for _ in range(200):
        budget.plain()
    assert budget.left == pytest.approx(free, abs=0.05)
    for _ in range(50):
        budget.spend(1.0)
    assert budget.left >= -2, "it is not owed for ever"


# -- looking
# ------------------------------------------------------------------------------------------------------------


def asked(*outputs: list[int]) -> list[Request]:
    """Requests that have said this, and whose newest token is not known yet."""
    scheduler = Scheduler(BlockLedger(50), SchedulerLimits(4, 16, 8, 1000), PrefixRule(ROOT))
    for _ in outputs:
        scheduler.submit([0], sampling(), 100)
    requests = list(scheduler._requests.values())
    for request, output in zip(requests, outputs, strict=True):
        request.tokens += [*output, UNKNOWN]
        request.unknown = 1
    return requests


def goes_on(request: Request, token: int) -> None:
    """The token that was not known is, and the next one is not."""
    request.tokens[-1:] = [token, UNKNOWN]


def test_a_draft_that_was_seen_is_kept_as_long_as_it_holds() -> None:
    """There is time to look at one request before each plan."""
    now, looked = 0.0, list[int]()

    def propose(request: Request, most: int) -> Draft:
        nonlocal now
        now += 1.0
        looked.append(request.id)
        last = request.tokens[request.known - 1]
        return Draft(tuple(range(last + 1, last + 1 + min(most, 5))), (1.0,) * min(most, 5), 3)

    one, other = requests = asked([1], [10])
    lookout = Lookout(propose, lambda: now)

    def look(first: int, second: int) -> list[tuple[tuple[int, ...], int]]:
        goes_on(one, first)
        goes_on(other, second)
        assert lookout.begin(1e-3, True)
        return [
            (draft.tokens, draft.matched) for draft in lookout.look([(request, 9) for request in requests])
        ]

    assert look(1, 10) == [((2, 3, 4, 5, 6), 3), ((), 0)]
    assert look(2, 20) == [((3, 4, 5, 6), 4), ((21, 22, 23, 24, 25), 3)]
    assert look(3, 50) == [((4, 5, 6, 7, 8), 3), ((), 0)], "the other one went another way"
    assert looked == [0, 1, 0]
    lookout.forget()
    assert look(4, 51) == [((), 0), ((52, 53, 54, 55, 56), 3)]


def test_a_look_that_was_worth_it_is_not_made_up_for() -> None:
    """Else drafts that hold would come later, the longer a look-up takes."""
    now = 0.0

    def propose(request: Request, most: int) -> Draft:
        nonlocal now
        now += 1e-3
        return Draft((2,) * 9, (1.0,) * 9, 9)

    lookout = Lookout(propose, lambda: now)
    for worth, again in ((False, False), (True, True)):
        assert lookout.begin(1e-3, True)
        lookout.look([(request, 9) for request in asked([1])])
        lookout.end()
        if worth:
            lookout.forget()
        assert lookout.begin(1e-3, True) is again
        lookout.forget()


@pytest.mark.parametrize(("ahead", "part"), [(True, 0.03), (False, 0.005)])
def test_looks_take_a_small_part_of_the_time_and_come_to_everybody(ahead: bool, part: float) -> None:
    """A look takes 50 microseconds, and a step two milliseconds."""
    now, looked = 0.0, list[int]()

    def propose(request: Request, most: int) -> Draft:
        nonlocal now
        now += 5e-5
        looked.append(request.id)
        return Draft()

    requests = asked(*([1] for _ in range(8)))
    lookout = Lookout(propose, lambda: now)
    for _ in range(800):
        now += 2e-3
        for request in requests:
            goes_on(request, 1)
        if lookout.begin(2e-3, ahead):
            lookout.look([(request, 9) for request in requests])
            lookout.end()
    assert len(looked) * 5e-5 == pytest.approx(part * 800 * 2e-3, rel=0.1)
    assert len(set(looked[-8:])) == 8


def test_what_is_looked_at_is_known() -> None:
    """Look-up while a token is on its way sees those before it, and what it finds begins with that token."""
    text = [5, 6, 7, 8, 9, 5, 6]
    [request] = asked(text)
    found = SuffixDrafter().propose(request, 9)
    assert found.tokens[:3] == (7, 8, 9)
    assert request.history is not None
    assert request.history.tokens.tolist() == [0, *text]
    goes_on(request, 7)
    assert SuffixDrafter().propose(request, 9).tokens[:2] == (8, 9)
    assert request.history.tokens.tolist() == [0, *text, 7]


def test_it_wakes_for_what_is_behind_the_tokens_under_way() -> None:
    """A draft whose only token is on its way already is none."""
    for length, wakes in ((1, False), (2, True)):
        drafts = Told(lambda request, most, length=length: Draft((3,) * length, (1.0,) * length, 30))
        speculation = Speculation(drafts)
        speculation._ahead.add(1, 1.0)
        speculation._plain = 100  # A probe is due as well.
        speculation.look([(asked([1])[0], 9)], 1, 30, ahead=True)
        assert speculation.resting is not wakes


def test_nothing_rests_with_a_draft_under_way() -> None:
    """Whatever rests is planned together, so a plan is made when the draft is known."""
    device = machine("GPU")
    speculation = Speculation(
        Drafts(device, lambda number, place: right(number, place) if number % 2 else []),
        clock=lambda: device.now,
    )
    rested = 0
    begin = device.begin

    def watched(plan: Plan) -> object:
        nonlocal rested
        speculation.resting = True  # As soon as it is planned.
        rested += any(share.kind is ShareKind.VERIFY for share in plan.shares)
        assert len(plan.shares) == 8, "requests part into groups that take turns"
        return begin(plan)

    device.begin = watched  # type: ignore[method-assign,assignment]
    run(device, 8, 200, speculation)
    assert rested > 20
