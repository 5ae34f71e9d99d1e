"""When first tokens come, foretold from what is before them: against a device that takes the same time for the
same step, in counted time."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

import pytest

from penstock.kv.ledger.blocks import BlockLedger
from penstock.sched.outlook import Course, Outlook, QueuedRequest, RunningRequest
from penstock.sched.pace import StepSeconds, StepTimes
from penstock.sched.rules import PrefixRule, SchedulerLimits
from penstock.sched.scheduler import Scheduler
from penstock.step.plan import Outcome, Plan, Result
from penstock.step.request import FinishReason
from worlds import ROOT, sampling

SIZE, BUDGET = 16, 256
FIXED, TOKEN, ROW = 2e-3, 2e-4, 3e-4
"""Seconds of a step, of each token of a prompt in it, and of each row that it decodes."""
END = 1


class Foretold(NamedTuple):
    expected: float | None
    actual: float


class Room:
    """A scheduler, and a device that counts its time. Outputs end by themselves with a chance."""

    def __init__(self, rows: int, blocks: int = 4096, chance: float = 0.0, share: bool = False) -> None:
        self.now, self.chance, self.dice = 0.0, chance, random.Random(5)
        limits = SchedulerLimits(SIZE, BUDGET, rows, 8192)
        rule = PrefixRule(ROOT, share=share)
        self.scheduler = Scheduler(BlockLedger(blocks), limits, rule, clock=lambda: self.now, check=True)
        self.foresight = self.scheduler.foresight
        self.waits: dict[int, tuple[float, float | None]] = {}
        self.found: list[Foretold] = []

    def ask(self, prompt: Sequence[int], most: int, priority: int = 0) -> float | None:
        """Submit a request. Returns the seconds that are foretold."""
        found = self.foresight.found(prompt, b"")
        outlook = self.foresight.look()
        before = [one for one in outlook.waiting if one.priority <= priority]
        course = Course(replace(outlook, waiting=tuple(before)))
        queued = QueuedRequest(len(prompt) - found, most, priority, len(prompt))
        expected = course.forecast(queued, self.now)
        request = self.scheduler.submit(prompt, sampling(end=[END]), most, priority)
        self.foresight.submitted(request, found)
        self.waits[request] = self.now, expected
        return expected

    def step(self) -> None:
        plan = self.scheduler.plan()
        runs = plan.runs
        self.now += (
            FIXED + TOKEN * sum(len(one.tokens) for one in runs) + ROW * (len(plan.shares) - len(runs))
        )
        ends = [END if self.dice.random() < self.chance else 2 for _ in plan.shares]
        results = [
            Result((token,) if one.sample else ()) for token, one in zip(ends, plan.shares, strict=True)
        ]
        events = self.scheduler.commit(plan, Outcome(tuple(results)))
        reasons = [event.finish for event in events if event.finish is not None]
        self.foresight.stepped(plan, len(events), len(reasons), reasons.count(FinishReason.STOP))
        for event in events:
            if event.request in self.waits:
                came, expected = self.waits.pop(event.request)
                self.found.append(Foretold(expected, self.now - came))

    def run(self) -> list[Foretold]:
        while self.scheduler.busy:
            self.step()
        found, self.found = self.found, []
        return found


def off(found: Sequence[Foretold]) -> list[float]:
    """How far each was off, as a part of what it was; sorted."""
    return sorted(abs(one.actual - (one.expected or 0.0)) / one.actual for one in found)


def prompt(dice: random.Random, length: int) -> list[int]:
    return [dice.randrange(3, 1000) for _ in range(length)]


@pytest.mark.parametrize("rows", [64, 8])
@pytest.mark.parametrize("chance", [0.0, 0.03])
@pytest.mark.parametrize("blocks", [4096, 120])
def test_a_burst(rows: int, chance: float, blocks: int) -> None:
    dice, room = random.Random(3), Room(rows, blocks, chance)
    for _ in range(3):
        for _ in range(64):
            room.ask(prompt(dice, dice.choice([8, 16, 40, 100, 120, 200])), dice.choice([8, 32, 64]))
        found = room.run()
    errors = off(found)
    print(
        rows,
        chance,
        blocks,
        f"median {median(errors):.3f} p90 {errors[57]:.3f}",
        [f"{a or 0:.2f}/{b:.2f}" for a, b in found[::8]],
    )


@pytest.mark.parametrize("rate", [3, 6])
@pytest.mark.parametrize("rows", [64, 4])
def test_a_stream(rate: float, rows: int) -> None:
    dice, room = random.Random(3), Room(rows, 4096, 0.03)
    for _ in range(300):
        until = room.now + dice.expovariate(rate)
        while room.now < until and room.scheduler.busy:
            room.step()
        room.now = max(room.now, until)
        room.ask(prompt(dice, dice.choice([8, 16, 40, 100, 120, 200])), dice.choice([8, 32, 64]))
    found = [one for one in room.run() if one.expected is not None][50:]
    errors = off(found)
    print(
        rows,
        rate,
        f"median {median(errors):.3f} p90 {errors[len(errors) * 9 // 10]:.3f}",
        [f"{a or 0:.2f}/{b:.2f}" for a, b in found[::12]],
    )
