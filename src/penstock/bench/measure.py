"""Drives an Engine directly, without texts or threads around it, and times its steps."""

import random
import time
from dataclasses import dataclass

from penstock.base.errors import BudgetError, CheckpointError
from penstock.bench.times import Times
from penstock.engine.boot import Booted
from penstock.engine.engine import Engine
from penstock.sched.scheduler import Event
from penstock.step.params import Sampling
from penstock.step.plan import RequestId
from penstock.step.request import FinishReason

WARM_STEPS = 4
"""Decode steps that are not timed, after every prompt is in: the first of a new shape also pays for what is set up once."""

_GREEDY = Sampling(0.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, (), 0, frozenset(), 0, None, None)


@dataclass(frozen=True, slots=True)
class Work:
    """`batch` sequences of `context` prompt tokens each; `output` timed decode steps; all of it `repeat` times with fresh prompts."""

    batch: int
    context: int
    output: int
    repeat: int

    def room(self, step_tokens: int) -> int:
        """Tokens that a sequence may reach: while the last prompts come in, the first are already decoding."""
        prefill_steps = -(-self.batch * self.context // max(step_tokens - self.batch, 1)) + 1
        return self.context + prefill_steps + WARM_STEPS + self.output + 1


@dataclass(frozen=True, slots=True)
class Decoded:
    """Times of single steps, how long the sequences were in the middle of the timed ones, and bytes of weights that came to the device and
    from the disk in each of those, experts included."""

    times: Times
    lengths: tuple[int, ...]
    copied: float = 0.0
    read: float = 0.0


def decode(booted: Booted, work: Work) -> Decoded:
    """Steady decode steps: every prompt is in, every step yields one token a sequence. A step ends when its tokens are on the host."""
    _check_room(booted, work)
    engine, rng = booted.engine, random.Random(0)
    seconds: list[float] = []
    lengths: list[int] = []
    copied = read = 0
    for _ in range(work.repeat):
        requests = _submit(engine, work, booted.spec.vocab_size, rng)
        got = dict.fromkeys(requests, 0)
        while not all(got.values()):
            _step(engine, got)
        for _ in range(WARM_STEPS):
            _step(engine, got)
        lengths = [work.context + count + work.output // 2 for count in got.values()]
        before = booted.weights.stats()
        seconds += [_step(engine, got) for _ in range(work.output)]
        after = booted.weights.stats()
        copied, read = copied + after.copied - before.copied, read + after.read - before.read
        for request in requests:
            engine.stop(request)
    return Decoded(Times.of(seconds), tuple(lengths), copied / len(seconds), read / len(seconds))


def prefill(booted: Booted, work: Work) -> Times:
    """From the first step until every prompt has yielded its first token. One round more than asked for, the first, is not timed."""
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
    """Seconds of one prompt and of each decode step after it; what rested where, and bytes that came to the device in those steps."""

    prefill: float
    steps: list[float]
    blocks: int
    """KV blocks of the device that were held, at most."""
    host: int
    disk: int
    """Bytes of KV in host memory, and on disk."""
    kv_copied: int
    weights_copied: int


def context_room(context: int, output: int) -> int:
    """Tokens that a sequence of `context` prompt tokens comes to, one more included, so that it does not end with the last step."""
    return context + WARM_STEPS + output + 2


def context(booted: Booted, context: int, output: int, rng: random.Random) -> Context:
    """One sequence: its prompt to the first token, and `output` decode steps."""
    engine, weights = booted.engine, booted.weights
    [request] = _submit(engine, Work(1, context, output, 1), booted.spec.vocab_size, rng, context_room(context, output) - context)
    got, blocks = {request: 0}, 0
    begin = time.perf_counter()
    while not got[request]:
        _step(engine, got)
        now = engine.stats()
        blocks = max(blocks, now.kv_blocks - now.kv_blocks_free)
    prefill = time.perf_counter() - begin
    for _ in range(WARM_STEPS):
        _step(engine, got)
    kv, copied = engine.kv_stats(), weights.stats().copied
    seconds = [_step(engine, got) for _ in range(output)]
    now = engine.stats()
    moved = now.kv.since(kv) if now.kv and kv else None
    blocks = max(blocks, now.kv_blocks - now.kv_blocks_free)
    engine.stop(request)
    return Context(
        prefill=prefill,
        steps=seconds,
        blocks=blocks,
        host=moved.host if moved else 0,
        disk=moved.disk if moved else 0,
        kv_copied=moved.copied if moved else 0,
        weights_copied=weights.stats().copied - copied,
    )


def _submit(engine: Engine, work: Work, vocab: int, rng: random.Random, max_tokens: int | None = None) -> list[RequestId]:
    """Prompts that no earlier one begins like, so that nothing of them can be in a cache."""
    prompts = [[rng.randrange(vocab) for _ in range(work.context)] for _ in range(work.batch)]
    return [engine.submit(prompt, _GREEDY, max_tokens) for prompt in prompts]


def _step(engine: Engine, got: dict[RequestId, int]) -> float:
    """Seconds of one step; its tokens are counted in `got`."""
    begin = time.perf_counter()
    events = engine.step()
    seconds = time.perf_counter() - begin
    for event in events:
        got[event.request] += event.token is not None
        check_sound(event)
    return seconds


def check_sound(event: Event) -> None:
    """Raises CheckpointError where a request has ended since its logits are not numbers: what would be timed then does nothing."""
    if event.finish is FinishReason.ERROR:
        raise CheckpointError(
            "the model's logits are not numbers (NaN), so that nothing is measured; try another --dtype, or fetch it again"
        )


def _check_room(booted: Booted, work: Work) -> None:
    """All sequences must run at once; if some had to wait for others, something else would be measured."""
    length = min(work.room(booted.limits.max_step_tokens) + booted.budget.block_size, booted.limits.max_length)
    needed = work.batch * -(-length // booted.budget.block_size)
    if booted.budget.blocks < needed:
        raise BudgetError(
            f"{work.batch} sequences of {length:,} tokens need {needed:,} KV blocks, but there is room for "
            f"{booted.budget.blocks:,}; allow more device memory, or lower --batch or --context"
        )
