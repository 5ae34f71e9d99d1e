"""First tokens come when it was forecast, against a device that takes the same time for the same step, in
counted time: none passes."""

import random
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import NamedTuple

import pytest

from outlooks import BUDGET, IDLE, NEW, SIZE, STEPS
from penstock.kv.ledger.blocks import BlockLedger
from penstock.sched.outlook import MOST_FOLLOWED, Course, QueuedRequest, RunningRequest
from penstock.sched.pace import StepTimes
from penstock.sched.rules import PrefixRule, SchedulerLimits
from penstock.sched.scheduler import Scheduler
from penstock.step.plan import Outcome, Plan, Result
from worlds import ROOT, sampling

FIXED, TOKEN, ROW = 2e-3, 2e-4, 3e-4
"""Seconds of a step, of each token of a prompt in it, and of each row that it decodes."""
END, OTHER = 1, 2
SHORT = (8, 16, 40, 100, 120)


class Foretold(NamedTuple):
    expected: float | None
    actual: float


class Room:
    """A scheduler, and a device that counts its time. Outputs end by themselves with a chance."""

    def __init__(
        self, rows: int, blocks: int = 4096, chance: float = 0.0, attended: float = 0.0, prompt: float = 0.0
    ) -> None:
        """attended, prompt: seconds of a token that a row attends to, and of each prompt of a step."""
        self.now, self.chance, self.dice = 0.0, chance, random.Random(5)
        self.speed, self._attended, self._prompt = 1.0, attended, prompt
        limits = SchedulerLimits(SIZE, BUDGET, rows, 8192)
        rule = PrefixRule(ROOT)
        self.scheduler = Scheduler(BlockLedger(blocks), limits, rule, clock=lambda: self.now)
        self.foresight = self.scheduler.foresight
        self._asked: dict[int, tuple[float, float | None]] = {}

    def ask(self, prompt: Sequence[int], most: int, priority: int = 0) -> tuple[int, float | None]:
        """Submit a request. Returns it, and the seconds that are forecast."""
        found = self.foresight.found(prompt, b"")
        queued = QueuedRequest(len(prompt) - found, most, priority, len(prompt))
        expected = Course(self.foresight.look().before(priority)).forecast(queued, self.now)
        request = self.scheduler.submit(prompt, sampling(end=[END]), most, priority, foreseen=found)
        self.foresight.submitted()
        self._asked[request] = self.now, expected
        return request, expected

    def step(self) -> dict[int, Foretold]:
        """Those whose first token has come."""
        plan = self.scheduler.plan()
        tokens, runs = sum(len(one.tokens) for one in plan.runs), len(plan.runs)
        rows = plan.shares[: len(plan.shares) - runs]
        seconds = FIXED + TOKEN * tokens + ROW * len(rows) + self._prompt * runs
        self.now += self.speed * (seconds + self._attended * sum(share.start for share in rows))
        drawn = [END if self.dice.random() < self.chance else OTHER for _ in plan.shares]
        results = [
            Result((token,)) if one.sample else Result()
            for token, one in zip(drawn, plan.shares, strict=True)
        ]
        events = self.scheduler.commit(plan, Outcome(tuple(results)))
        reasons = [event.finish for event in events if event.finish is not None]
        self.foresight.stepped(plan, len(events), reasons)
        come = {}
        for event in events:
            if event.request in self._asked:
                came, expected = self._asked.pop(event.request)
                come[event.request] = Foretold(expected, self.now - came)
        return come

    def run(self) -> dict[int, Foretold]:
        come: dict[int, Foretold] = {}
        while self.scheduler.busy:
            come |= self.step()
        return come

    def learn(self, rows: int = 8) -> None:
        """Measure steps of all sizes, and outputs that end."""
        for length in (*SHORT, 200, 240):
            self.ask(words(self.dice, length), 4)
            self.run()
        for _ in range(rows):
            self.ask(words(self.dice, 100), 24)
        self.run()


def words(dice: random.Random, length: int) -> list[int]:
    return [dice.randrange(3, 1000) for _ in range(length)]


def off(found: Foretold) -> float:
    """As a part of what it was."""
    assert found.expected is not None
    return abs(found.actual - found.expected) / found.actual


def burst(room: Room, count: int = 64) -> list[float]:
    """How far forecasts were off, sorted."""
    dice = room.dice
    for _ in range(count):
        room.ask(words(dice, dice.choice(SHORT)), dice.choice([8, 32, 64]))
    return sorted(map(off, room.run().values()))


@pytest.mark.parametrize(
    ("rows", "blocks", "chance"), [(64, 4096, 0.0), (8, 4096, 0.0), (8, 4096, 0.03), (64, 120, 0.0)]
)
def test_a_burst_comes_when_it_was_forecast(rows: int, blocks: int, chance: float) -> None:
    """It waits for tokens of prompts, for rows, for outputs that end by chance, and for KV blocks."""
    room = Room(rows, blocks, chance)
    room.learn(rows)
    burst(room)  # How soon outputs end is known when many have ended.
    errors = burst(room)
    assert median(errors) < 0.1
    assert errors[int(0.75 * len(errors))] < 0.2, "but of those that others join in their step"


def test_what_rows_attend_to_and_each_prompt_is_waited_for() -> None:
    """Rows of long contexts take longer, and so do more prompts of as many tokens in all."""
    room = Room(8, attended=5e-6, prompt=4e-3)
    room.learn()
    for length in (900, 40, 900, 120):
        for _ in range(8):
            room.ask(words(room.dice, length), 16)
        room.run()
    for length, most in ((900, 0.15), (40, 0.2), (100, 0.2)):
        for _ in range(8):
            room.ask(words(room.dice, length), 32)
        while room.scheduler.waiting:
            room.step()
        for _ in range(4):
            room.step()
        last, _ = room.ask(words(room.dice, 40), 4)
        assert off(room.run()[last]) < most


def test_a_machine_that_becomes_slower_is_followed() -> None:
    room = Room(8)
    room.learn()
    burst(room)
    for speed in (2.5, 1.0):
        room.speed = speed
        burst(room, 24)
        assert median(burst(room)) < 0.2


def test_nothing_is_said_before_anything_was_measured() -> None:
    room = Room(1)
    assert room.ask(words(room.dice, 40), 400)[1] is None
    while not room.step():
        pass
    assert room.ask(words(room.dice, 40), 4)[1] is None, "nobody knows when an output ends"
    room.run()
    assert room.ask(words(room.dice, 40), 4)[1] is not None


def test_what_is_found_of_its_prompt_is_not_computed() -> None:
    room = Room(8)
    room.learn()
    prompt = words(room.dice, 240)
    first, expected = room.ask(prompt, 4)
    assert off(room.run()[first]) < 0.1
    again, sooner = room.ask([*prompt, 5], 4)
    assert sooner is not None
    assert expected is not None
    assert sooner < expected / 4
    assert off(room.run()[again]) < 0.2


def test_what_others_will_find_of_their_prompts_is_not_waited_for() -> None:
    room = Room(64)
    room.learn()
    prompt = words(room.dice, 240)
    room.ask(prompt, 4)
    room.run()
    for number in range(8):
        room.ask([*prompt, number], 4)
    last, _ = room.ask(words(room.dice, 100), 4)
    assert off(room.run()[last]) < 0.2


def test_who_is_less_urgent_is_not_waited_for() -> None:
    room = Room(2)
    room.learn(2)
    for _ in range(12):
        room.ask(words(room.dice, 100), 32, priority=1)
    room.step()
    urgent, expected = room.ask(words(room.dice, 100), 4)
    patient, later = room.ask(words(room.dice, 100), 4, priority=1)
    assert later is not None
    assert expected is not None
    assert later > 3 * expected
    come = room.run()
    assert off(come[urgent]) < 0.2, "one that is less urgent is computed in the same step"
    assert off(come[patient]) < 0.1


def test_who_is_less_urgent_and_far_behind_is_not_counted() -> None:
    room = Room(1)
    for number in range(MOST_FOLLOWED + 90):
        room.ask(words(room.dice, 8), 4, priority=number % 3)
    each = MOST_FOLLOWED // 3 + 30
    seen = room.foresight.look()
    assert sum(count for _, count in seen.more) == 90
    assert [seen.before(priority).place for priority in (-1, 0, 1, 2, 9)] == [
        0, each + 1, 2 * each + 1, 3 * each + 1, 3 * each + 1
    ]  # fmt: skip
    assert seen.before(2) is seen
    for number in range(90):
        room.ask(words(room.dice, 8), 4, priority=3 + number)
    more = room.foresight.look().more
    assert len(more) < 12, "no more priorities are counted apart"
    assert sum(count for _, count in more) == 180


def test_a_long_prompt_is_waited_for_by_long_ones_alone() -> None:
    room = Room(16)
    room.learn()
    for length in (400, 900):  # Beyond a step, later positions are not dearer here.
        room.ask(words(room.dice, length), 4)
        room.run()
    long, _ = room.ask(words(room.dice, 4000), 4)
    short, _ = room.ask(words(room.dice, 40), 4)
    come = room.run()
    assert off(come[long]) < 0.15
    assert off(come[short]) < 0.2
    assert come[short].actual < come[long].actual / 8


def test_who_asks_for_forecasts_changes_nothing() -> None:
    def plans(*, asks: bool) -> list[Plan]:
        room, made = Room(4, 60), list[Plan]()
        dice = random.Random(7)
        plan = room.scheduler.plan

        def kept() -> Plan:
            made.append(plan())
            return made[-1]

        room.scheduler.plan = kept  # type: ignore[method-assign]
        for number in range(40):
            prompt = words(dice, dice.choice((*SHORT, 400)))
            if asks:
                room.ask(prompt, 20, number % 2)
            else:
                room.scheduler.submit(prompt, sampling(end=[END]), 20, number % 2)
            room.step()
        room.run()
        return made

    assert plans(asks=True) == plans(asks=False)


# ---- by hand


def test_rows_that_decode_and_blocks_that_are_held_are_waited_for() -> None:
    running = tuple(RunningRequest(0, left, 30) for left in (5, 9, 20, 30))
    full = replace(IDLE, running=running)
    alone = Course(IDLE).forecast(NEW, 0.0)
    waits = Course(full).forecast(NEW, 0.0)
    assert alone == pytest.approx(0.02)
    assert waits == pytest.approx(5 * STEPS.decode(4) + STEPS.chunk(16, 3))
    few = replace(full, rows=16, pages=40)
    big = QueuedRequest(1000, 10, 0, 1000)
    room, tight = Course(replace(few, pages=999)).add(big), Course(few).add(big)
    assert tight == pytest.approx(room + 5 * STEPS.decode(4), rel=0.05)


def test_a_step_under_way_takes_nobody_in() -> None:
    busy = replace(IDLE, running=(RunningRequest(0, 100, 3),))
    at_once, later = (Course(replace(busy, under_way=way)).forecast(NEW, 0.0) for way in (False, True))
    assert at_once is not None
    assert later == pytest.approx(at_once + STEPS.decode(1))
    since = Course(busy).forecast(NEW, 0.004)
    assert since == pytest.approx(later - 0.004), "it came within a step, whose rest it waits for"


def test_room_for_another_is_when_outputs_have_ended() -> None:
    running = tuple(RunningRequest(0, left, 30) for left in (5, 9, 20, 30))
    course = Course(replace(IDLE, running=running, waiting=(NEW,) * 8))
    ends = [course.first_end(count) for count in (1, 2, 12)]
    assert ends[0] == pytest.approx(5 * STEPS.decode(4))
    assert None not in ends
    assert ends == sorted(ends, key=float)  # type: ignore[arg-type]
    assert ends[2] != ends[1]
    unknown = replace(IDLE, running=running, steps=replace(STEPS, ends=None))
    assert Course(unknown).first_end(1) is None


def test_whatever_is_before_a_request_there_is_a_forecast() -> None:
    dice = random.Random(11)

    def some(most: int) -> int:
        return dice.choice((0, 1, dice.randrange(most)))

    for _ in range(200):
        running = [RunningRequest(some(900), some(90), some(40), some(900)) for _ in range(some(9))]
        waiting = [
            QueuedRequest(1 + some(2000), some(90), 0, 1 + some(2000)) for _ in range(dice.randrange(40))
        ]
        seen = replace(
            IDLE,
            running=tuple(running),
            waiting=tuple(waiting),
            more=((0, 1 + some(99)),),
            pages=some(200),
            rows=1 + some(9),
            tokens=1 + some(300),
            doubles_at=dice.choice([1e9, 100.0]),
            under_way=dice.random() < 0.5,
            steps=replace(STEPS, ends=dice.choice([0.0, 0.04, 1.0])),
        )
        course = Course(seen)
        for since in sorted(dice.random() for _ in range(4)):
            seconds = course.forecast(QueuedRequest(1 + some(900), some(90), 0, 900), since)
            assert seconds is not None
            assert 0 < seconds < 1e4
        end = course.first_end(3)
        assert end is not None
        assert end >= 0


def test_steps_are_averaged_by_their_size_and_one_that_was_held_up_hardly_counts() -> None:
    times = StepTimes()
    assert not times.measured().known
    for _ in range(40):
        times.stepped(0, 8, 0.02)
        times.stepped(100, 8, 0.1)
        times.stepped(0, 1, 0.01)
    times.stepped(0, 8, 100.0)
    found = times.measured()
    assert 0.02 < found.decode(8) < 0.03
    assert found.decode(1) == pytest.approx(0.01)
    assert found.chunk(100, 8) == pytest.approx(0.1, rel=0.1), "what was measured, beside as many rows"
    assert found.chunk(100) < found.chunk(100, 8)
    assert found.chunk(200) - found.chunk(100) == pytest.approx(found.chunk(100) - found.decode(1)), (
        "beyond what was measured each counts"
    )
    assert found.ends is None
    for _ in range(500):
        times.yielded(20, 1, 1)
    assert times.measured().ends == pytest.approx(0.05, rel=0.1)


def test_a_forecast_is_cheap_and_a_long_queue_is_not_followed_to_its_end() -> None:
    running = tuple(RunningRequest(0, 10 + left, 30) for left in range(64))
    full = replace(IDLE, running=running, rows=64, waiting=(NEW,) * 256, pages=100_000)
    course, begin = Course(full), perf_counter()
    for _ in range(1000):
        course.forecast(NEW, 0.0)
    assert (perf_counter() - begin) / 1000 < 500e-6, "some microseconds, on a machine with other things to do"
    more = Course(replace(full, more=((0, 768),))).forecast(NEW, 0.0)
    all_of_them = Course(replace(full, waiting=(NEW,) * 1024)).forecast(NEW, 0.0)
    assert more == pytest.approx(all_of_them, rel=0.15)
