"""Calls are told on the loop what is before them, by what the engine's thread saw and what was sent since."""

import asyncio
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import monotonic

import pytest

from outlooks import BUDGET, BUSY, IDLE, NEW, STEPS
from penstock.api.sequences import PreparedPrompt
from penstock.sched.outlook import MOST_FOLLOWED, Course, Outlook, QueuedRequest, WaitForecast
from penstock.sched.pace import StepSeconds
from penstock.server.broker.calls import Call
from penstock.server.broker.forecasts import Sight, WaitForecaster
from worlds import sampling

ONE = sampling()


def call_of(tokens: Sequence[int], most: int = 10, priority: int = 0, outputs: int = 1) -> Call:
    return Call(
        lambda _: None, PreparedPrompt(None, tuple(tokens), (ONE,) * outputs, most, lambda: None, priority)
    )


def forecaster(outlook: Outlook, found: int = 0, met: int = 0) -> tuple[WaitForecaster, list[Sight]]:
    """What it sees may be put in place of another."""
    outlook = replace(outlook, when=monotonic())
    sights = [Sight(outlook, Course(outlook), met)]
    return WaitForecaster(lambda: sights[-1], lambda _: found, 8192), sights


def soon(run: Callable[[], None]) -> None:
    async def on_a_loop() -> None:
        run()

    asyncio.run(on_a_loop())


def test_calls_that_the_engine_has_not_seen_are_counted_once() -> None:
    def run() -> None:
        waits, sights = forecaster(BUSY)
        first = [waits.forecast(call_of([number] * 40)) for number in range(6)]
        assert [one.place for one in first] == list(range(6))
        # Now the engine has met four of them, and two wait there; the other two are still on their way.
        waiting = (NEW, NEW)
        seen = replace(BUSY, waiting=waiting, when=monotonic())
        sights.append(Sight(seen, Course(seen), met=4))
        assert waits.forecast(call_of([7] * 40)).place == 2 + 2
        assert [length for length, _ in waits.waiting(9)] == [16, 16, 40, 40, 40]

    soon(run)


def test_on_the_loop_too_who_is_less_urgent_is_left_out_and_outputs_are_counted() -> None:
    def run() -> None:
        waits, _ = forecaster(
            replace(BUSY, waiting=(NEW, replace(NEW, priority=1), replace(NEW, priority=2)))
        )
        patient = waits.forecast(call_of([1] * 40, priority=2, outputs=3))
        urgent = waits.forecast(call_of([2] * 40, priority=1))
        last = waits.forecast(call_of([3] * 40, priority=2))
        assert (patient.place, urgent.place, last.place) == (3, 2, 3 + 3 + 1)
        assert urgent.seconds is not None
        assert last.seconds is not None
        assert urgent.seconds < last.seconds

    soon(run)


def test_a_prompt_finds_what_is_there_and_what_a_call_before_it_computes() -> None:
    def run() -> None:
        waits, _ = forecaster(IDLE, found=32)
        calls = [call_of(prompt) for prompt in ([5] * 100, [5] * 40 + [6] * 60, [5] * 100, [6] * 100)]
        for call in calls:
            waits.forecast(call)
        # Whole blocks count, and never the last token. The third has only the beginning of the one before it.
        assert [call.prompt.found for call in calls] == [32, 32, 32, 32]
        waits, _ = forecaster(IDLE)
        for call in calls:
            waits.forecast(call)
        assert [call.prompt.found for call in calls] == [0, 32, 32, 0]
        again = call_of([6] * 100)
        waits.forecast(again)
        assert again.prompt.found == 96
        other = call_of([6] * 100)
        other.prompt = other.prompt.adapted("another")
        waits.forecast(other)
        assert other.prompt.found == 0, "its KV is of another adapter"
        again.over = True
        last = call_of([6] * 100)
        waits.forecast(last)
        assert last.prompt.found == 0, "the one before it has gone"

    soon(run)


def test_short_ones_do_not_wait_for_long_ones_that_are_held_back() -> None:
    def run() -> None:
        waits, _ = forecaster(replace(IDLE, rows=16))
        long = [waits.forecast(call_of([number] * 1000)).seconds for number in range(4)]
        short = waits.forecast(call_of([9] * 16)).seconds
        assert None not in long
        assert short is not None
        assert long == sorted(long, key=float)  # type: ignore[arg-type]
        assert long[3] == pytest.approx(4 * (long[0] or 0), rel=0.1)
        assert short == pytest.approx(2 * STEPS.chunk(BUDGET), rel=0.1), (
            "the step that was begun, and the next"
        )
        waits, _ = forecaster(replace(IDLE, rows=2))
        for number in range(4):
            waits.forecast(call_of([number] * 1000))
        assert waits.forecast(call_of([9] * 16)).seconds == pytest.approx(short, rel=0.1), "a row is left"

    soon(run)


def test_what_a_call_costs_does_not_grow_with_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither with alternating priorities, nor with calls that nobody has met yet, nor if it is refused."""
    followed = 0
    add = Course.add

    def counted(self: Course, queued: QueuedRequest, since: float = 0.0) -> float:
        nonlocal followed
        followed += 1
        return add(self, queued, since)

    def since_then() -> int:
        nonlocal followed
        found, followed = followed, 0
        return found

    full = replace(BUSY, waiting=(NEW,) * MOST_FOLLOWED, more=((0, 5000), (1, 5000)))
    waits, sights = forecaster(full)
    monkeypatch.setattr(Course, "add", counted)
    for number in range(1000):
        waits.forecast(call_of([number] * 40, priority=number % 50))
    assert since_then() < 10_000, "some for each call, and some queues that are followed once"
    sights.append(Sight(full, Course(full)))
    since_then()
    place = waits.forecast(call_of([1] * 40, priority=99)).place
    assert place == MOST_FOLLOWED + 10_000 + 1000
    assert since_then() <= MOST_FOLLOWED + 1
    for _ in range(100):
        assert waits.first_end(1) is not None
    assert since_then() <= MOST_FOLLOWED
    held = replace(sights[-1], held=tuple(replace(NEW, tokens=1000, length=1000) for _ in range(5000)))
    sights.append(held)
    for number in range(100):
        waits.forecast(call_of([number] * (1000 if number % 2 else 40)))
    assert since_then() < MOST_FOLLOWED + 100 * 20


def test_who_is_refused_may_come_again_when_the_next_output_has_ended() -> None:
    """Not when all that wait have a row."""
    waits, _ = forecaster(replace(BUSY, waiting=(NEW,) * 8))
    first, second, all_of_them = (waits.first_end(count) for count in (1, 2, 12))
    assert first == pytest.approx(50 * STEPS.decode(4), rel=0.05)
    assert second == pytest.approx(60 * STEPS.decode(4), rel=0.1)
    assert second is not None
    assert all_of_them is not None
    assert second < all_of_them


def test_long_prompts_that_are_held_back_are_waited_for_one_after_the_other() -> None:
    """Also where not all of them are followed: each adds what it takes, and not what others wait for."""
    long = QueuedRequest(1000, 10, 0, 1000)
    for others in (8, 60):
        outlook = replace(BUSY, rows=100, pages=100_000, waiting=(long,), when=monotonic())
        exact = Course(outlook)
        for _ in range(others):
            exact.add(long)
        sight = Sight(outlook, Course(outlook), held=(long,) * others)
        waits = WaitForecaster(lambda sight=sight: sight, lambda _: 0, 8192)  # type: ignore[misc]
        expected = exact.copy().add(long)
        for number in range(3):  # Behind a short one they are looked at again.
            found = waits.forecast(call_of([number] * 1000))
            assert found.place == 1 + others + 2 * number
            assert found.seconds == pytest.approx(expected, rel=0.1)
            waits.forecast(call_of([number] * 16))
            expected += expected / (others + 2)
        told = waits.waiting(2 + others)
        assert [length for length, _ in told] == [1000] * (1 + others) + [1000]
        seconds = [left or 0.0 for _, left in told]
        assert seconds == sorted(seconds)


def test_before_anything_was_measured_all_are_counted_and_nothing_is_said() -> None:
    waits, _ = forecaster(replace(BUSY, steps=StepSeconds(), waiting=(NEW,)))
    told = [waits.forecast(call_of([number] * length)) for number, length in enumerate([1000, 40] * 20)]
    assert told == [WaitForecast(1 + number, None) for number in range(40)]
    assert waits.first_end(3) is None
    assert waits.waiting(50) == [(length, None) for length in (16, *[1000, 40] * 20)]


def test_calls_that_are_over_are_not_kept() -> None:
    waits, sights = forecaster(BUSY)
    call = call_of([5] * 100)
    kept = weakref.ref(call)
    waits.forecast(call)
    sights.append(replace(sights[-1], met=1))
    assert waits.waiting(9) == []
    del call
    assert kept() is None
