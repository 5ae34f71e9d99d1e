"""Drafts that are looked up in outputs of requests that have finished: what is found, what is kept, and that
nothing is seen by those who share nothing."""

import random
from collections import Counter

import numpy as np
import pytest

from counted import Machine
from penstock.engine.engine import Engine
from penstock.kv.ledger.blocks import BlockLedger
from penstock.sched import finished
from penstock.sched.drafter import SuffixDrafter
from penstock.sched.finished import FinishedOutputs
from penstock.sched.rules import PrefixRule, SchedulerLimits
from penstock.sched.scheduler import Scheduler
from penstock.sched.speculation import Speculation
from penstock.sched.suffix import FOLLOWED, LEAST, LONGER, MOST_MATCHED, Draft, look_up_among
from penstock.step.adapter import LoadedAdapter
from penstock.step.request import FinishReason
from worlds import ROOT, sampling

OURS, THEIRS = (b"", b""), (b"key", b"")


def slowly(outputs: list[list[int]], newest: list[int], most: int) -> Draft:
    """What `look_up_among` is to find, place by place and token by token."""

    def matched(output: list[int], place: int) -> int:
        count = 0
        while count < min(place + 1, len(newest)) and output[place - count] == newest[-1 - count]:
            count += 1
        return min(count, MOST_MATCHED)

    places = [(output, place) for output in outputs for place in range(len(output))]
    longest = max((matched(*one) for one in places), default=0)
    if longest < 2 or most < 1:
        return Draft()
    going = [output[place + 1 :] for output, place in places if matched(output, place) == longest][-FOLLOWED:]
    tokens, scores, followed = list[int](), list[float](), len(going)
    for step in range(min(most, LONGER * longest)):
        going = [rest for rest in going if step < len(rest)]
        counts = Counter(rest[step] for rest in going)
        likeliest = max(counts.values(), default=0)
        if not likeliest or likeliest < LEAST * followed:
            break
        token = next(rest[step] for rest in reversed(going) if counts[rest[step]] == likeliest)
        tokens.append(token)
        scores.append(likeliest / len(going))
        going = [rest for rest in going if rest[step] == token]
    return Draft(tuple(tokens), tuple(scores), longest, elsewhere=True) if tokens else Draft()


def test_what_followed_the_longest_match_in_other_outputs_is_found() -> None:
    chance, drafted = random.Random(3), 0
    for _ in range(1200):
        letters = chance.choice([1, 2, 3, 5, 40])
        kept = FinishedOutputs(100)
        outputs = [
            [chance.randrange(letters) for _ in range(chance.choice([1, 2, 5, 30, 300]))]
            for _ in range(chance.choice([0, 1, 2, 7]))
        ]
        for output in outputs:
            kept.add(OURS, output, 0)
        newest = [chance.randrange(letters) for _ in range(chance.choice([0, 1, 2, 5, 40]))]
        if outputs and chance.random() < 0.5:
            newest += outputs[-1][: chance.randint(0, 40)]
        most = chance.choice([0, 1, 2, 7, 32])
        found = look_up_among(kept.of(OURS), np.array(newest, dtype=np.int32), most)
        assert found == slowly(outputs, newest, most)
        assert all(type(token) is int for token in found.tokens)
        drafted += len(found.tokens) > 1
    assert drafted > 200


def test_the_newest_are_kept_and_all_of_them_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finished, "MOST_TOKENS", 100)
    kept, chance = FinishedOutputs(5), random.Random(1)
    every: list[tuple[tuple[bytes, bytes], list[int]]] = []
    for number in range(300):
        scope = (bytes([chance.randrange(4)]), b"")
        output = [number] * chance.choice([1, 3, 20, 40, 400])
        kept.add(scope, output, 0)
        every.append((scope, output[:100]))
        while len(every) > 5 or (sum(len(one) + 1 for _, one in every) > 100 and len(every) > 1):
            del every[0]
        for letter in range(4):
            those = [
                token for one, output in every if one == (bytes([letter]), b"") for token in [*output, -1]
            ]
            assert kept.of((bytes([letter]), b"")).tolist() == those
    assert set(kept._kept) == {scope for scope, _ in every}, "what is gone takes no memory"
    assert set(kept._joined) <= set(kept._kept)
    kept.forget()
    assert not any(len(kept.of((bytes([letter]), b""))) for letter in range(4))


def test_an_output_is_found_behind_the_end_of_its_prompt() -> None:
    kept = FinishedOutputs(9)
    kept.add(OURS, [*range(100), 7, 8, 9], 100)
    kept.add(OURS, [1, 2, 3], 3)  # Nothing was said.
    assert kept.of(OURS).tolist() == [*range(68, 100), 7, 8, 9, -1]
    assert look_up_among(kept.of(OURS), np.array([98, 99], dtype=np.int32), 9).tokens == (7, 8, 9)


def said(number: int, place: int) -> int:
    return hash((number, place)) % 997


def engine_of(most: int) -> tuple[Engine, Speculation]:
    device = Machine(said, lambda tokens: 5e-2 + 1e-5 * tokens, 1e-4)
    outputs = FinishedOutputs(most) if most else None
    speculation = Speculation(SuffixDrafter(outputs), clock=lambda: device.now)
    limits = SchedulerLimits(16, 1024, 4, 1 << 20)
    clock = lambda: device.now  # noqa: E731
    scheduler = Scheduler(
        BlockLedger(200), limits, PrefixRule(ROOT, True), speculation=speculation, clock=clock
    )
    return Engine(scheduler, device), speculation


def steps_of(engine: Engine, salt: bytes = b"", adapter: LoadedAdapter | None = None) -> int:
    """Say 60 tokens of the one prompt, and return the passes that they took."""
    engine.scheduler.submit([5], sampling(), 60, salt=salt, adapter=adapter)
    got, passes = list[int](), 0
    while len(got) < 60:
        events = engine.step()
        got += [event.token for event in events if event.token is not None]
        passes += bool(events)
    while engine.busy:
        engine.step()
    assert got == [said(5, place) for place in range(60)]
    return passes


ADAPTER = LoadedAdapter("a", "/a", b"files", 1)


@pytest.mark.parametrize(
    ("first", "second", "shares"),
    [
        ((b"", None), (b"", None), True),
        ((b"key", None), (b"key", None), True),
        ((b"key", None), (b"other", None), False),
        ((b"key", None), (b"", None), False),
        ((b"", None), (b"key", None), False),
        ((b"", ADAPTER), (b"", ADAPTER), True),
        ((b"", ADAPTER), (b"", None), False),
        ((b"", ADAPTER), (b"", LoadedAdapter("a", "/a", b"other files", 1)), False),
        ((b"key", ADAPTER), (b"key", LoadedAdapter("b", "/b", b"files", 2)), True),
    ],
)
def test_only_those_look_in_an_output_who_share_its_prefix(
    first: tuple[bytes, LoadedAdapter | None], second: tuple[bytes, LoadedAdapter | None], shares: bool
) -> None:
    engine, _ = engine_of(8)
    assert steps_of(engine, *first) == 60
    assert (steps_of(engine, *second) < 40) is shares


def test_nothing_is_kept_unless_it_was_asked_for_nor_of_what_was_broken_off() -> None:
    engine, speculation = engine_of(0)
    assert [steps_of(engine) for _ in range(2)] == [60, 60]
    engine, speculation = engine_of(8)
    outputs = speculation.drafter.outputs  # type: ignore[attr-defined]
    id = engine.scheduler.submit([5], sampling(), 60)
    for _ in range(20):
        engine.step()
    engine.stop(id, FinishReason.ABORT)
    assert not len(outputs.of(OURS))
    steps_of(engine)
    assert outputs.of(OURS).tolist() == [5, *(said(5, place) for place in range(60)), -1]
    engine.scheduler.forget()
    assert not len(outputs.of(OURS))
