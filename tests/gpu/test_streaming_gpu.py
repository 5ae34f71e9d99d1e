"""Streamed weights on CUDA: bit for bit what resident ones give, whatever is late; and wrong as soon as a
wait is left out."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import tiny
from penstock import LLM, Completion, SamplingParams
from penstock.api import opening as api
from penstock.arch.layout import Field, GroupId, GroupKind, GroupLayout, group_layouts
from penstock.base.trace import Trace
from penstock.engine.boot import boot
from penstock.engine.placing import Override
from penstock.memory.streams import CudaStream, Stream, Ticket
from penstock.weights.checkpoint.reader import Checkpoint
from penstock.weights.streaming import stream as streaming
from penstock.weights.streaming.residency import Use, WeightLimits, padded
from penstock.weights.streaming.ring import StreamRates
from penstock.weights.streaming.solver import solve
from penstock.weights.streaming.source import RandomSource, Sources
from penstock.weights.streaming.stream import WeightStream

CUDA = torch.device("cuda")
LATE = 20_000_000
"""Clock cycles, about 10 ms: far longer than any copy here."""
ALL = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=-1, prompt_logprobs=-1)
RATES = StreamRates(50e9, 2e9, 4e12)


class Slow(CudaStream):
    """Copies that begin late, and waits that can be left out."""

    cycles = 0
    without: int | None = None
    done: Sequence[Ticket | None] = ()

    def copy(self, target: Tensor, source: Tensor) -> None:
        if self.cycles:
            with torch.cuda.stream(self._queue()):
                torch.cuda._sleep(self.cycles)
        super().copy(target, source)

    def wait(self, ticket: Ticket) -> None:
        if self.without is None or ticket is not self.done[self.without]:
            super().wait(ticket)


def slow_streams(cycles: int) -> tuple[Slow, CudaStream]:
    copies = Slow(CUDA)
    copies.cycles = cycles
    return copies, CudaStream(CUDA, current=True, clock=copies.clock)


def limits_of(path: Path, share: float, host: bool, dtype: str = "float32") -> WeightLimits:
    """Room on DEVICE for that share of the weights; 0 for a ring of the largest group alone."""
    with Checkpoint.open(path) as checkpoint:
        layouts = group_layouts(checkpoint.spec, checkpoint.names, dtype)
    sizes = [padded(layout) for layout in layouts]
    experts = [padded(layout) for layout in layouts if layout.id.kind is GroupKind.EXPERT]
    device = max(sizes) + 2 * max(experts, default=0) + int(share * sum(sizes))
    return WeightLimits(device, 4 * sum(sizes) if host else max(sizes) + 2 * max(experts, default=max(sizes)))


def outputs(llm: LLM) -> list[Completion]:
    return llm.generate(tiny.prompts()[:4], ALL)


def same(one: list[Completion], other: list[Completion]) -> bool:
    return [(it.tokens, it.logprobs, it.prompt_logprobs) for it in one] == [
        (it.tokens, it.logprobs, it.prompt_logprobs) for it in other
    ]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("packs")


@pytest.mark.parametrize("name", tiny.CASES)
def test_streamed_is_resident(name: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny.checkpoint(name)
    settings = {
        "device": "cuda",
        "dtype": "float32",
        "max_length": 128,
        "max_step_tokens": 24,
        "check": True,
        "cache": cache,
    }
    with LLM(path, **settings) as llm:
        expected = outputs(llm)
    for share, host, cycles in ((0, True, 0), (0, False, 0), (0.4, True, 0), (0.4, False, 200_000)):
        override = Override(limits_of(path, share, host))
        with monkeypatch.context() as patched:
            patched.setattr(api, "boot", partial(boot, override=override))
            patched.setattr(streaming, "streams_of", lambda device, cycles=cycles: slow_streams(cycles))
            trace = Trace()
            with LLM(path, **settings, trace=trace) as llm:
                assert same(outputs(llm), expected), (share, host, cycles)
                stats = llm.memory.weights
                assert stats.copied > 0
                assert host or stats.read > 0


def test_half_precision_and_long_prompts(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny.write(next(iter(tiny.WIDE.values())), tiny.folder() / "wide_streamed")
    settings = {
        "device": "cuda",
        "dtype": "bfloat16",
        "max_length": 2500,
        "max_step_tokens": 1024,
        "cache": cache,
    }
    prompts = tiny.long_prompts()[:3]
    plain = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=5)
    with LLM(path, **settings) as llm:
        expected = llm.generate(prompts, plain)
    with monkeypatch.context() as patched:
        patched.setattr(
            api, "boot", partial(boot, override=Override(limits_of(path, 0.3, False, "bfloat16")))
        )
        with LLM(path, **settings) as llm:
            assert same(llm.generate(prompts, plain), expected)
            assert llm.memory.weights.read > 0


# ---- the waits, one by one


class World:
    """Eight groups of one matrix each, of three sizes, all of which pass through a ring for two of them or
    so."""

    def __init__(self, ring: int, cycles: int) -> None:
        self.layouts = tuple(
            GroupLayout(
                GroupId(GroupKind.FFN, layer), (Field("down", (rows, 1024), 0, (), "float32"),), rows * 4096
            )
            for layer, rows in enumerate((256, 512, 256, 384, 512, 256, 384, 256))
        )
        uses = [Use(layout.id, padded(layout)) for layout in self.layouts]
        placement = solve(
            uses, WeightLimits(ring << 20, 64 << 20, 0, resident=0, device_ring=ring << 20), RATES
        )
        self.streams = slow_streams(cycles)
        streams: tuple[Stream, Stream] = self.streams
        source = RandomSource("float32")
        self.weights = WeightStream(placement, self.layouts, Sources(source, source), CUDA, streams=streams)
        self.weights.load()
        expected = WeightStream(
            solve(uses, WeightLimits(64 << 20, 0, 0), RATES), self.layouts, Sources(source, source), CUDA
        )
        expected.load()
        self.expected = {
            layout.id: expected.take(layout.id).vectors["down"].clone() for layout in self.layouts
        }
        expected.close()

    def passes(self, count: int, late: int | None = None) -> bool:
        """Whether all that was read was right. `late`: the kernel of this group begins late in every pass."""
        right = []
        for _ in range(count):
            for number, layout in enumerate(self.layouts):
                down = self.weights.take(layout.id).vectors["down"]
                if number == late:
                    torch.cuda._sleep(LATE)
                right.append((down == self.expected[layout.id]).all())
                self.weights.release(layout.id)
        return bool(torch.stack(right).all())

    def close(self) -> None:
        self.weights.close()


@pytest.fixture(params=[2, 3, 4, 6])
def ring(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def test_whatever_is_late(ring: int) -> None:
    for cycles in (0, LATE // 10):
        world = World(ring, cycles)
        try:
            assert all(world.passes(3, late) for late in (None, *range(8)))
        finally:
            world.close()


def test_every_wait_of_a_copy_is_needed(ring: int) -> None:
    world = World(ring, 0)
    feeder, copies = world.weights._feeder, world.streams[0]
    assert feeder is not None
    copies.done = feeder._done
    waited = {
        segment.wait for segments in feeder._segments for segment in segments if segment.wait is not None
    }
    assert waited
    try:
        for victim in sorted(waited):
            assert world.passes(2, victim)
            copies.without = victim
            assert not world.passes(3, victim), f"nobody needs to wait for {victim}"
            copies.without = None
            torch.cuda.synchronize()
            world.passes(1)
    finally:
        world.close()


def test_the_arithmetic_must_wait_for_the_copy(ring: int) -> None:
    world = World(ring, LATE)
    try:
        assert world.passes(2)
        compute = world.streams[1]
        compute.wait = lambda ticket: None  # type: ignore[method-assign]
        assert not world.passes(2)
    finally:
        world.close()
