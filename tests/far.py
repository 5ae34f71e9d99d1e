"""Engines whose contexts do not fit their few pages, what they are asked and when, and what the same model
answers with all KV in pages.

Compute is the caller's on a CPU. Copies run on threads, which can be late, held, or deaf to the tickets of
others.
"""

import atexit
import functools
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from unittest.mock import patch

import torch
from torch import Tensor

import tiny
from penstock import LLM, Completion, SamplingParams
from penstock.arch.layout import KVLayout, kv_layout
from penstock.engine import parts
from penstock.kv.movement import carrier
from penstock.kv.movement.sizes import record_bytes
from penstock.memory.streams import CallerStream, HostTicket, Pieces, Stream, ThreadStream, Ticket

LIMIT = 1e-4
"""How far log-probabilities in float32 may lie apart."""
_HELD = 3.0
"""Seconds that a copy is held at most: a test that waits for what it holds ends, and fails."""
SETTINGS: Mapping[str, object] = {
    "device": "cpu",
    "dtype": "float32",
    "max_length": 400,
    "beyond_trained": True,
    "check": True,
}


@dataclass(frozen=True)
class Room:
    """Where KV rests, and in which pieces it passes by. `host`, `disk`: blocks."""

    pages: int = 8
    block: int = 8
    step: int = 24
    tile: int = 32
    host: int = 100
    disk: int = 0
    sequences: int = 4
    ring: int = 3
    staging: int = 2
    sharing: bool = True


@dataclass(frozen=True)
class Ask:
    """A request that comes before step `at`, and is left after `leave` steps more if it has not ended by
    then. An `endless` one may go on to the context's end; nothing is known of it beyond `tokens`."""

    prompt: tuple[int, ...]
    tokens: int = 8
    at: int = 0
    leave: int | None = None
    scored: bool = False
    sampled: bool = False
    endless: bool = False

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(
            temperature=0.8 if self.sampled else 0.0,
            seed=len(self.prompt),
            max_tokens=None if self.endless else self.tokens,
            ignore_eos=True,
            logprobs=2,
            prompt_logprobs=1 if self.scored else None,
        )


@contextmanager
def opened(name: str, room: Room, **more: object) -> Iterator[LLM]:
    """An engine of the case `name` with this room."""
    layout = layout_of(name, room.block, str(more.get("dtype", "float32")))
    sizes = {
        "kv_blocks": room.pages,
        "block_size": room.block,
        "max_step_tokens": room.step,
        "kv_tile": room.tile,
    }
    others = {
        "max_sequences": room.sequences,
        "prefix_cache": room.sharing,
        "host_kv_memory": room.host * layout.block_bytes,
    }
    if room.disk:
        others |= {
            "disk_kv_memory": room.disk * layout.layers * record_bytes(layout),
            "kv_directory": tiny.folder(),
            "kv_store": "off",
        }
    with (
        patch.object(carrier, "RING", room.ring),
        patch.object(carrier, "STAGING", room.staging),
        LLM(tiny.checkpoint(name), **{**SETTINGS, **sizes, **others, **more}) as llm,  # type: ignore[arg-type]
    ):
        assert llm.booted.engine.scheduler.host.blocks == room.host + room.disk
        yield llm


@functools.cache
def resident(name: str, dtype: str = "float32") -> LLM:
    """An engine with all KV in pages, which it shares among no requests. Open until this process ends."""
    llm = LLM(tiny.checkpoint(name), **{**SETTINGS, "dtype": dtype, "prefix_cache": False})  # type: ignore[arg-type]
    atexit.register(llm.close)
    return llm


def layout_of(name: str, block: int, dtype: str = "float32") -> KVLayout:
    return kv_layout(resident(name).spec, dtype, block)


@functools.cache
def expected(name: str, ask: Ask, dtype: str = "float32") -> Completion:
    """What the prompt gives alone, in one piece, with all KV in pages."""
    return resident(name, dtype).generate([list(ask.prompt)], replace(ask, endless=False).params)[0]


def answers(
    llm: LLM, asks: Sequence[Ask], between: Callable[[int], None] = lambda step: None
) -> list[Completion]:
    """What each gets, in steps that are interrupted wherever they may be. `between` is called before each
    step."""
    streams = {}
    step, interrupted = 0, False
    while True:
        if not interrupted:
            for index, ask in enumerate(asks):
                if ask.at == step:
                    streams[index] = llm.stream(list(ask.prompt), ask.params)
                if ask.leave is not None and ask.at + ask.leave == step:
                    streams[index].close()
            between(step)
        if len(streams) == len(asks) and not llm.booted.engine.busy:
            return [streams[index].completion for index in range(len(asks))]
        try:
            llm.driver.step()
            interrupted = False
        except KeyboardInterrupt:
            interrupted = True
        step += not interrupted


def check(
    name: str, asks: Sequence[Ask], found: Sequence[Completion], dtype: str = "float32", limit: float = LIMIT
) -> None:
    """That what they got is what each gets alone, or the beginning of it where it left."""
    for ask, got in zip(asks, found, strict=True):
        alone = expected(name, ask, dtype)
        assert len(got.tokens) <= ask.tokens, ask
        if ask.leave is None:
            assert len(got.tokens) == len(got.logprobs or ()) == ask.tokens, ask
            assert not ask.scored or len(got.prompt_logprobs or ()) == len(ask.prompt), ask
        assert got.tokens == alone.tokens[: len(got.tokens)], ask
        assert apart(got, alone) < limit, ask


def apart(one: Completion, other: Completion) -> float:
    """The largest difference of log-probabilities, of outputs and of prompts, as far as both have them."""
    assert one.logprobs is not None
    assert other.logprobs is not None
    pairs = list(zip(one.logprobs, other.logprobs, strict=False))
    if one.prompt_logprobs is not None:
        assert other.prompt_logprobs is not None
        pairs += zip(one.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=False)  # type: ignore[arg-type]
    return max((abs(mine.logprob - theirs.logprob) for mine, theirs in pairs), default=0.0)


# ---- streams that are late, held, deaf or interrupted


class Line(ThreadStream):
    """A copy stream. `late`: seconds before each of its copies. While `open` is not set, copies are held."""

    def __init__(self, name: str, late: Callable[[], float]) -> None:
        super().__init__(f"{name} under test")
        self.name, self.late = name, late
        self.open = threading.Event()
        self.open.set()

    def copy(self, target: Tensor, source: Tensor) -> None:
        self._begin()
        super().copy(target, source)

    def copy_rows(self, target: Tensor, source: Tensor) -> None:
        self._begin()
        super().copy_rows(target, source)

    def copy_pieces(self, target: Tensor, source: Tensor, pieces: Pieces) -> None:
        self._begin()
        super().copy_pieces(target, source, pieces)

    def mark(self) -> Ticket:
        ticket = _Named(self.name)
        self.run(ticket.reach)
        return ticket

    def _begin(self) -> None:
        if seconds := self.late():
            self.run(lambda: time.sleep(seconds))
        self.run(lambda: self.open.wait(_HELD))


class Caller(CallerStream):
    """What computes. It does not wait for the stream that it is `deaf` to."""

    def __init__(self, late: Callable[[], float]) -> None:
        self.late, self.deaf = late, ""

    def copy(self, target: Tensor, source: Tensor) -> None:
        time.sleep(self.late())
        super().copy(target, source)

    def copy_rows(self, target: Tensor, source: Tensor) -> None:
        time.sleep(self.late())
        super().copy_rows(target, source)

    def wait(self, ticket: Ticket) -> None:
        if not isinstance(ticket, _Named) or ticket.name != self.deaf:
            super().wait(ticket)


class _Named(HostTicket):
    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


@dataclass
class Lines:
    """The streams of the engine that was made last while this is in place."""

    late: str = ""
    """Which of in, out and compute starts its copies late; or "some", each of which a tenth of the time; or
    none."""
    seed: int = 0
    into: Line = field(init=False)
    out: Line = field(init=False)
    compute: Caller = field(init=False)

    def make(self, _: torch.device) -> tuple[Stream, Stream, Stream]:
        self.into, self.out = (Line(name, self._late(name)) for name in ("in", "out"))
        self.compute = Caller(self._late("compute"))
        return self.into, self.out, self.compute

    def _late(self, name: str) -> Callable[[], float]:
        rng = random.Random(f"{name} {self.seed}")
        if self.late == "some":
            return lambda: 1e-3 if rng.random() < 0.1 else 0.0
        return lambda: 5e-4 if self.late == name else 0.0


@contextmanager
def lines(late: str = "", seed: int = 0) -> Iterator[Lines]:
    made = Lines(late, seed)
    with patch.object(parts, "streams_both_ways", made.make):
        yield made


@contextmanager
def struck(calls: Mapping[type, Sequence[str]], gaps: Iterator[int]) -> Iterator[Callable[[], int]]:
    """Before or behind calls of these methods an interrupt strikes, as many of them apart as `gaps` says.
    Lends how often it has."""
    strikes, left = 0, next(gaps)

    def strike() -> None:
        nonlocal strikes, left
        left -= 1
        if not left:
            strikes, left = strikes + 1, next(gaps, 0)
            raise KeyboardInterrupt

    def around(method: Callable[..., object]) -> Callable[..., object]:
        def called(*arguments: object) -> object:
            strike()
            result = method(*arguments)
            strike()
            return result

        return called

    with ExitStack() as patched:
        for owner, names in calls.items():
            for name in names:
                patched.enter_context(patch.object(owner, name, around(getattr(owner, name))))
        yield lambda: strikes
