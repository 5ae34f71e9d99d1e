"""Drives an Engine directly, without texts or threads around it, and times its steps."""

import random
import time
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

from penstock.base.errors import BudgetError, CheckpointError
from penstock.bench.times import Times
from penstock.engine.boot import Booted
from penstock.engine.engine import Engine
from penstock.sched.scheduler import Event
from penstock.step.params import Sampling
from penstock.step.plan import RequestId
from penstock.step.request import FinishReason

WARM_STEPS = 4
"""Decode steps that are not timed, after every prompt is in: the first of a new shape also pays for what is
set up once."""
EDGE_STEPS = 2
"""The last of these, which stand between anything else that the host does and the first timed step; see
`steady`."""

_GREEDY = Sampling(0.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, (), 0, frozenset(), 0, None, None)


@dataclass(frozen=True, slots=True)
class Work:
    """`batch` sequences of `context` prompt tokens each; `output` timed decode steps; all of it `repeat`
    times with fresh prompts."""

    batch: int
    context: int
    output: int
    repeat: int

    def room(self, step_tokens: int) -> int:
        """Tokens that a sequence may reach: while the last prompts come in, the first are already
        decoding."""
        prefill_steps = -(-self.batch * self.context // max(step_tokens - self.batch, 1)) + 1
        return self.context + prefill_steps + WARM_STEPS + self.output + 1


@dataclass(frozen=True, slots=True)
class Decoded:
    """Times of single steps, how long the sequences were in the middle of the timed ones, and bytes of
    weights that came to the device and from the disk in each of those, experts included."""

    times: Times
    lengths: tuple[int, ...]
    copied: float = 0.0
    read: float = 0.0


class Laps:
    """A stopwatch that never stops. Each lap begins when the one before has ended, so no time falls between
    two."""

    def __init__(self) -> None:
        self._ended = time.perf_counter()

    def lap(self) -> float:
        """End a lap, and return its seconds."""
        begun, self._ended = self._ended, time.perf_counter()
        return self._ended - begun


@dataclass(frozen=True, slots=True)
class Steady:
    """Seconds of each timed decode step, and what a step moved on average. copied, read: bytes of weights
    that came to the device and from the disk. kv_copied: bytes of KV of long contexts that came to the
    device."""

    seconds: list[float]
    copied: float
    read: float
    kv_copied: float


def steady(booted: Booted, got: dict[RequestId, int], steps: int) -> Steady:
    """Time decode steps of requests whose prompts are in: each from the moment when the tokens of the step
    before are on the host until its own are. `got` counts the tokens.

    An engine may run ahead: then the device computes a step while the host reads counters, or does anything
    else between two calls of `Engine.step`, and a clock that starts at the call misses that part. So only
    steps are between two ticks of the clock. Of EDGE_STEPS before the first tick, the first may have been
    computed while the counters were read, and the second was begun within the first.
    """
    engine, seconds = booted.engine, list[float]()
    before, kv_before = booted.weights.stats(), engine.kv_stats()
    for _ in range(EDGE_STEPS):
        _step(engine, got)
    laps = Laps()
    for _ in range(steps):
        _step(engine, got)
        seconds.append(laps.lap())
    moved, kv, count = booted.weights.stats().since(before), engine.kv_stats(), EDGE_STEPS + steps
    kv_copied = kv.copied - kv_before.copied if kv and kv_before else 0
    return Steady(seconds, moved.copied / count, moved.read / count, kv_copied / count)


def decode(booted: Booted, work: Work) -> Decoded:
    """Steady decode steps: every prompt is in, every step yields one token a sequence. A step ends when its
    tokens are on the host."""
    _check_room(booted, work)
    engine, rng = booted.engine, random.Random(0)
    rounds: list[Steady] = []
    lengths: list[int] = []
    for _ in range(work.repeat):
        requests = _submit(engine, work, booted.spec.vocab_size, rng)
        got = dict.fromkeys(requests, 0)
        while not all(got.values()):
            _step(engine, got)
        for _ in range(WARM_STEPS - EDGE_STEPS):
            _step(engine, got)
        rounds.append(steady(booted, got, work.output))
        lengths = [work.context + count - work.output + work.output // 2 for count in got.values()]
        _end(engine, requests)
    seconds = [each for one in rounds for each in one.seconds]
    return Decoded(
        Times.of(seconds),
        tuple(lengths),
        fmean(one.copied for one in rounds),
        fmean(one.read for one in rounds),
    )


def prefill(booted: Booted, work: Work) -> Times:
    """From the first step until every prompt has yielded its first token. One round more than asked for, the
    first, is not timed."""
    _check_room(booted, work)
    engine, rng, seconds = booted.engine, random.Random(0), []
    for _ in range(work.repeat + 1):
        requests = _submit(engine, work, booted.spec.vocab_size, rng, max_tokens=1)
        got = dict.fromkeys(requests, 0)
        begin = time.perf_counter()
        while engine.busy:
            _step(engine, got)
        seconds.append(time.perf_counter() - begin)
        assert all(got.values()), "a prompt ended without a token"
    return Times.of(seconds[1:])


@dataclass(frozen=True, slots=True)
class Context:
    """Seconds of one prompt and of each decode step after it; what rested where, and bytes that came to the
    device in such a step."""

    prefill: float
    steps: list[float]
    blocks: int
    """KV blocks of the device that were held, at most."""
    host: int
    disk: int
    """Bytes of KV in host memory, and on disk."""
    kv_copied: float
    weights_copied: float


def context_room(context: int, output: int) -> int:
    """Tokens that a sequence of `context` prompt tokens comes to, one more included, so that it does not end
    with the last step."""
    return context + WARM_STEPS + output + 2


def context(booted: Booted, context: int, output: int, rng: random.Random) -> Context:
    """One sequence: its prompt to the first token, and `output` decode steps."""
    engine = booted.engine
    [request] = _submit(
        engine,
        Work(1, context, output, 1),
        booted.spec.vocab_size,
        rng,
        context_room(context, output) - context,
    )
    got, blocks = {request: 0}, 0
    begin = time.perf_counter()
    while not got[request]:
        _step(engine, got)
        now = engine.stats()
        blocks = max(blocks, now.kv_blocks - now.kv_blocks_free)
    prefill = time.perf_counter() - begin
    for _ in range(WARM_STEPS - EDGE_STEPS):
        _step(engine, got)
    timed = steady(booted, got, output)
    now = engine.stats()
    blocks = max(blocks, now.kv_blocks - now.kv_blocks_free)
    _end(engine, [request])
    return Context(
        prefill=prefill,
        steps=timed.seconds,
        blocks=blocks,
        host=now.kv.host if now.kv else 0,
        disk=now.kv.disk if now.kv else 0,
        kv_copied=timed.kv_copied,
        weights_copied=timed.copied,
    )


def _submit(
    engine: Engine, work: Work, vocab: int, rng: random.Random, max_tokens: int | None = None
) -> list[RequestId]:
    """Prompts that no earlier one begins like, so that nothing of them can be in a cache."""
    prompts = [[rng.randrange(vocab) for _ in range(work.context)] for _ in range(work.batch)]
    return [engine.submit(prompt, _GREEDY, max_tokens) for prompt in prompts]


def _step(engine: Engine, got: dict[RequestId, int]) -> None:
    """One call of the engine, whose tokens are counted in `got`."""
    for event in engine.step():
        got[event.request] += event.token is not None
        check_sound(event)


def _end(engine: Engine, requests: Iterable[RequestId]) -> None:
    """Stop requests and let the step end that has been begun ahead, so that what is timed next does not wait
    for it."""
    for request in requests:
        engine.stop(request)
    while engine.busy:
        engine.step()


def check_sound(event: Event) -> None:
    """Raises CheckpointError where a request has ended since its logits are not numbers: what would be timed
    then does nothing."""
    if event.finish is FinishReason.ERROR:
        raise CheckpointError(
            "the model's logits are not numbers (NaN), so that nothing is measured; try another --dtype, or "
            "fetch it again"
        )


def _check_room(booted: Booted, work: Work) -> None:
    """All sequences must run at once; if some had to wait for others, something else would be measured."""
    length = min(
        work.room(booted.limits.max_step_tokens) + booted.budget.block_size, booted.limits.max_length
    )
    needed = work.batch * -(-length // booted.budget.block_size)
    if booted.budget.blocks < needed:
        raise BudgetError(
            f"{work.batch} sequences of {length:,} tokens need {needed:,} KV blocks, but there is room for "
            f"{booted.budget.blocks:,}; allow more device memory, or lower --batch or --context"
        )
