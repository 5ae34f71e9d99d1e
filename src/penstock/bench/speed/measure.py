"""Drive an engine directly, without texts or threads around it, and time its steps."""

import random
import time
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

from penstock.base.errors import BudgetError, CheckpointError
from penstock.base.meter import ExpertCounts
from penstock.bench.times import Timings
from penstock.engine.boot import Booted
from penstock.engine.engine import Engine
from penstock.sched.event import Event
from penstock.step.params import Sampling
from penstock.step.plan import RequestId
from penstock.step.request import FinishReason

WARM_STEPS = 4
"""Decode steps that are not timed, after every prompt is in: the first of a new shape also pays for what is
set up once."""
EDGE_STEPS = 2
"""The last of these, which stand between anything else that the host does and the first timed step; see
`time_decode`."""


def sampling(temperature: float = 0.0, seed: int = 0) -> Sampling:
    """Return the settings of a request without penalties or end tokens; at temperature 0 it is greedy."""
    return Sampling(temperature, 0, 1.0, 0.0, 1.0, 0.0, 0.0, (), seed, frozenset(), 0, None, None)


@dataclass(frozen=True, slots=True)
class BatchWork:
    """Describes the work of one batch: sequences that are decoded together.

    batch: sequences. context: prompt tokens of each. output: decode steps that are timed.
    repeat: how often all of it is done, with fresh prompts.
    """

    batch: int
    context: int
    output: int
    repeat: int

    def room(self, step_tokens: int) -> int:
        """Return the tokens that a sequence may reach: while the last prompts come in, the first are already
        decoding."""
        prefill_steps = -(-self.batch * self.context // max(step_tokens - self.batch, 1)) + 1
        return self.context + prefill_steps + WARM_STEPS + self.output + 1


@dataclass(frozen=True, slots=True)
class Decoded:
    """Timings of single steps, how long the sequences were in the middle of the timed ones, and bytes of
    weights that came to the device and from the disk in each of those, experts included.

    experts: those that all timed steps together asked for.
    """

    times: Timings
    lengths: tuple[int, ...]
    copied: float
    read: float
    experts: ExpertCounts


class Laps:
    """A stopwatch that never stops: each lap begins when the one before has ended, so no time falls between
    two."""

    def __init__(self) -> None:
        self._ended = time.perf_counter()

    def lap(self) -> float:
        """End a lap and return its seconds."""
        begun, self._ended = self._ended, time.perf_counter()
        return self._ended - begun


@dataclass(frozen=True, slots=True)
class Steady:
    """Holds the seconds of each timed decode step, and the bytes that a step moved on average.

    copied, read: of weights, to the device and from the disk.
    kv_copied: of KV of long contexts, to the device.
    experts: those of mixtures that all steps together asked for.
    """

    seconds: list[float]
    copied: float
    read: float
    kv_copied: float
    experts: ExpertCounts


def time_decode(booted: Booted, got: dict[RequestId, int], steps: int) -> Steady:
    """Time decode steps of requests that have computed their prompts. A step is timed from the moment when
    the tokens of the step before are on the host until its own are. `got` counts the tokens.

    An engine may run ahead: then the device computes a step while the host reads counters, or does anything
    else between two calls of `Engine.step`, and a clock that starts at the call misses that part. So only
    steps are between two ticks of the clock. Of EDGE_STEPS before the first tick, the first may have been
    computed while the counters were read, and the second was begun within the first.
    """
    engine, seconds = booted.engine, list[float]()
    before, kv_before = booted.weights.stats(), engine.kv_stats()
    for _ in range(EDGE_STEPS):
        step(engine, got)
    laps = Laps()
    for _ in range(steps):
        step(engine, got)
        seconds.append(laps.lap())
    moved, kv, count = booted.weights.stats().since(before), engine.kv_stats(), EDGE_STEPS + steps
    kv_copied = kv.copied - kv_before.copied if kv and kv_before else 0
    return Steady(seconds, moved.copied / count, moved.read / count, kv_copied / count, moved.experts)


def decode(booted: Booted, work: BatchWork) -> Decoded:
    """Time decode steps after every prompt has been computed. Every step yields one token a sequence, and
    ends when its tokens are on the host. Raises BudgetError where not all sequences run at once."""
    _check_room(booted, work)
    engine, rng = booted.engine, random.Random(0)
    rounds: list[Steady] = []
    lengths: list[int] = []
    for _ in range(work.repeat):
        requests = submit(engine, work, booted.spec.vocab_size, rng)
        got = dict.fromkeys(requests, 0)
        while not all(got.values()):
            step(engine, got)
        for _ in range(WARM_STEPS - EDGE_STEPS):
            step(engine, got)
        rounds.append(time_decode(booted, got, work.output))
        lengths = [work.context + count - work.output + work.output // 2 for count in got.values()]
        _end(engine, requests)
    seconds = [each for one in rounds for each in one.seconds]
    return Decoded(
        Timings.of(seconds),
        tuple(lengths),
        fmean(one.copied for one in rounds),
        fmean(one.read for one in rounds),
        ExpertCounts(
            sum(one.experts.asked for one in rounds),
            sum(one.experts.hit for one in rounds),
            disk_bytes=sum(one.experts.disk_bytes for one in rounds),
            disk_seconds=sum(one.experts.disk_seconds for one in rounds),
            computed=sum(one.experts.computed for one in rounds),
            worked=sum(one.experts.worked for one in rounds),
        ),
    )


def prefill(booted: Booted, work: BatchWork) -> Timings:
    """Time prompts, from the first step until every prompt has yielded its first token. One round more than
    asked for, the first, is not timed. Raises BudgetError where not all prompts run at once."""
    _check_room(booted, work)
    engine, rng, seconds = booted.engine, random.Random(0), []
    for _ in range(work.repeat + 1):
        requests = submit(engine, work, booted.spec.vocab_size, rng, max_tokens=1)
        got = dict.fromkeys(requests, 0)
        begin = time.perf_counter()
        while engine.busy:
            step(engine, got)
        seconds.append(time.perf_counter() - begin)
        assert all(got.values()), "a prompt ended without a token"
    return Timings.of(seconds[1:])


@dataclass(frozen=True, slots=True)
class Context:
    """Holds the times and bytes of one long sequence.

    prefill: seconds of its prompt. steps: seconds of each decode step after it.
    blocks: KV blocks of the device that were held, at most.
    host, disk: bytes of KV in host memory and on disk.
    kv_copied, weights_copied: bytes that came to the device in a decode step.
    """

    prefill: float
    steps: list[float]
    blocks: int
    host: int
    disk: int
    kv_copied: float
    weights_copied: float


def context_room(context: int, output: int) -> int:
    """Return the tokens that a sequence of `context` prompt tokens comes to. One more is included, so that it
    does not end with the last step."""
    return context + WARM_STEPS + output + 2


def context(booted: Booted, context: int, output: int, rng: random.Random) -> Context:
    """Time one sequence: its prompt to the first token, and `output` decode steps."""
    engine = booted.engine
    [request] = submit(
        engine,
        BatchWork(1, context, output, 1),
        booted.spec.vocab_size,
        rng,
        context_room(context, output) - context,
    )
    got, blocks = {request: 0}, 0
    begin = time.perf_counter()
    while not got[request]:
        step(engine, got)
        now = engine.stats()
        blocks = max(blocks, now.kv_blocks - now.kv_blocks_free)
    prefill = time.perf_counter() - begin
    for _ in range(WARM_STEPS - EDGE_STEPS):
        step(engine, got)
    timed = time_decode(booted, got, output)
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


def submit(
    engine: Engine, work: BatchWork, vocab: int, rng: random.Random, max_tokens: int | None = None
) -> list[RequestId]:
    """Submit prompts that no earlier one begins like, so that nothing of them can be in a cache."""
    prompts = [[rng.randrange(vocab) for _ in range(work.context)] for _ in range(work.batch)]
    return [engine.submit(prompt, sampling(), max_tokens) for prompt in prompts]


def step(engine: Engine, got: dict[RequestId, int]) -> None:
    """Run one step of the engine, and count its tokens in `got`."""
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
    """Raise CheckpointError where a request has ended since its logits are not numbers: what would be timed
    then does nothing."""
    if event.finish is FinishReason.ERROR:
        raise CheckpointError(
            "the model's logits are not numbers (NaN), so nothing is measured; try another --dtype, or "
            "fetch the model again"
        )


def _check_room(booted: Booted, work: BatchWork) -> None:
    """Raise BudgetError where not all sequences can run at once: with some waiting, something else is
    measured."""
    length = min(
        work.room(booted.limits.max_step_tokens) + booted.budget.block_size, booted.limits.max_length
    )
    needed = work.batch * -(-length // booted.budget.block_size)
    if booted.budget.blocks < needed:
        raise BudgetError(
            f"{work.batch} sequences of {length:,} tokens need {needed:,} KV blocks, but there is room for "
            f"{booted.budget.blocks:,}; raise --device-memory, or lower --batch or --context"
        )
