"""KV that rests in fp8: what rounding costs, and that nothing else costs anything, near, far and in a whole
engine."""

import contextlib
import functools
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

import tiny
from layouts import heads_of, kv_of_heads
from penstock import LLM, Completion, SamplingParams
from penstock.arch.layout import KVLayout
from penstock.base.config import Config
from penstock.base.errors import ConfigError
from penstock.bench.shapes import SHAPES
from penstock.cli.main import main
from penstock.engine.contexts import LongRoom, long_room
from penstock.engine.hardware import read_hardware
from penstock.kv.movement.carrier import Carrier, CarrierRoom, Send
from penstock.kv.movement.fp8 import from_fp8, to_fp8
from penstock.kv.movement.hostpool import HostPool
from penstock.kv.movement.pool import KVPool
from penstock.kv.movement.sizes import Disk, carrier_bytes, chosen_bytes, sketch_layout
from penstock.kv.movement.tiles import Outbox, Streams, Tile, TileRing
from penstock.kv.store.blocks import BlockStore
from penstock.memory.streams import CallerStream, Pieces, ThreadStream, Ticket
from penstock.sched.rates import TransferRates
from penstock.sched.rules import SchedulerLimits
from penstock.step.plan import BlockId, HostBlockId, Order
from penstock.weights.checkpoint.shape import Shape
from streams import BRIEF, LONG, STRIDE, Gates, cut_short, no_thread_left, random_delays, within

CPU = torch.device("cpu")
DTYPES = ("float32", "float16", "bfloat16")
KINDS = pytest.mark.parametrize("dtype", DTYPES)
MIB = 1 << 20


# ---- what rounding should give, in double

CODES = torch.arange(127, dtype=torch.float64)
E4M3 = torch.where(CODES < 8, CODES * 2.0**-9, (8 + CODES % 8) * 2.0 ** (CODES // 8 - 10))
"""Every finite magnitude, by its code: the step of each binade is an eighth, and below 2^-6 there is one
step."""
MIDDLES = (E4M3[1:] + E4M3[:-1]) / 2


def scales(blocks: Tensor) -> Tensor:
    """`[..., 1, kv_heads, 1]`: the least power of two, and no less than a normal float32, that brings a
    head's numbers to 448 or below."""
    largest = blocks.double().abs().amax((-3, -1), keepdim=True)
    return torch.where(largest > 0, torch.exp2(torch.log2(largest / 448).ceil()).clamp(min=2.0**-126), 1.0)


def rounded(blocks: Tensor) -> Tensor:
    """Blocks `[..., block_size, kv_heads, head_dim]` as they should come back: the nearest, of two the one
    with an even code."""
    scale = scales(blocks)
    size = blocks.double().abs() / scale
    below, above = torch.bucketize(size, MIDDLES), torch.bucketize(size, MIDDLES, right=True)
    return (
        (E4M3[torch.where(below % 2 == 0, below, above)] * scale).copysign(blocks.double()).to(blocks.dtype)
    )


def passed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks after they have been in fp8, and the scales that were kept, `[..., kv_heads]`."""
    count, heads = blocks.shape[-3:].numel(), blocks.shape[-2]
    rows = torch.full((*blocks.shape[:-3], count + 4 * heads), 0x7F, dtype=torch.uint8)
    to_fp8(blocks, rows)
    back = torch.full_like(blocks, torch.nan, memory_format=torch.contiguous_format)
    from_fp8(rows, back)
    return back, rows[..., count:].view(torch.float32)


def noise(*shape: int, dtype: str, seed: int = 0) -> Tensor:
    """Numbers of many sizes within a head, and of others in other heads (the last but one dimension) and
    blocks (the first)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.exp2(
        torch.randint(-12, 1, shape, generator=generator).float()
    )
    sizes = torch.randint(-9, 10, (shape[0], *[1] * (len(shape) - 3), shape[-2], 1), generator=generator)
    return (x * torch.exp2(sizes.float())).to(getattr(torch, dtype))


@KINDS
def test_numbers_are_rounded_to_the_nearest(dtype: str) -> None:
    blocks = noise(40, 2, 8, 3, 10, dtype=dtype)
    back, kept = passed(blocks)
    assert torch.equal(kept.double()[..., None, :, None], scales(blocks))
    assert torch.equal(back, rounded(blocks))
    error, exact = (back.double() - blocks.double()).abs(), blocks.double().abs()
    # Where the dtype has no more numbers between (float16 below 2^-14), half a step of its own is added.
    limit = torch.maximum(exact / 16, scales(blocks) / 2**10) + (2.0**-25 if dtype == "float16" else 0)
    assert (error <= limit).all()
    normal = (exact >= scales(blocks) / 2**6) & (exact > 2.0**-13)
    assert 0.05 < float((error / exact)[normal].max()) <= 1 / 16
    assert normal.sum() > 0.2 * normal.numel()
    assert (error[exact < scales(blocks) / 2**6] > 0).any()


@KINDS
def test_strides_do_not_matter(dtype: str) -> None:
    """As K and V lie in a fused projection, tokens of several heads side by side, and as rows stand apart."""
    fused = noise(6, 8, 9, 10, dtype=dtype).flatten(0, 1)
    for heads in (slice(2, 5), slice(5, 9), slice(None, None, 2)):
        blocks = fused[:, heads].unflatten(0, (6, 8))
        assert not blocks.is_contiguous()
        assert torch.equal(passed(blocks)[0], passed(blocks.contiguous())[0])
        wide, count = (
            torch.zeros(6, 2, 8 * blocks.shape[2] * 14, dtype=torch.uint8),
            blocks[0].numel() + 4 * blocks.shape[2],
        )
        to_fp8(blocks, wide[:, 1, :count])
        assert not wide[:, 0].any()
        assert not wide[:, 1, count:].any()
        apart = torch.zeros(6, 8, 12, 10, dtype=fused.dtype)
        from_fp8(wide[:, 1, :count], apart[:, :, : blocks.shape[2]])
        assert torch.equal(apart[:, :, : blocks.shape[2]], rounded(blocks))


def test_a_scale_is_the_least_that_suffices() -> None:
    """At every power of two of float32: 448 of it stays what it is, and the next number takes twice the
    scale."""
    powers = torch.exp2(torch.arange(-126, 120).double())
    edge = (448 * powers).float()[:, None, None, None].expand(-1, 1, 1, 4)
    back, kept = passed(edge)
    assert torch.equal(back, edge)
    assert torch.equal(kept.flatten().double(), powers)
    kept = passed(torch.nextafter(edge[:-1], torch.tensor(inf)))[1]
    assert torch.equal(kept.flatten().double(), 2 * powers[:-1])


@KINDS
def test_the_least_and_the_largest_numbers_stay_finite(dtype: str) -> None:
    info = torch.finfo(getattr(torch, dtype))
    for largest in (0.0, info.smallest_normal / 64, info.tiny, 1.0, info.max / 3, info.max):
        blocks = torch.tensor([[largest, -largest], [largest / 3, -0.0]], dtype=getattr(torch, dtype))[
            :, None, :, None
        ].expand(2, 2, 2, 1)
        back, kept = passed(blocks)
        assert back.isfinite().all()
        assert kept.isfinite().all()
        assert (kept > 0).all()
        error = (back.double() - blocks.double()).abs()
        assert (error <= torch.maximum(blocks.double().abs() / 16, scales(blocks) / 2**10)).all()
    zeros, kept = passed(torch.zeros(2, 4, 3, 6, dtype=getattr(torch, dtype)))
    assert not zeros.any()
    assert torch.equal(kept, torch.ones(2, 3))


# ---- there and back, near and far


class Late(ThreadStream):
    """A stream of copies. Places are (name, number of the copy)."""

    def __init__(self, name: str, gates: Gates) -> None:
        super().__init__(f"{name} under test")
        self.name, self.gates, self.copies = name, gates, 0

    def copy_rows(self, target: Tensor, source: Tensor) -> None:
        place, self.copies = (self.name, self.copies), self.copies + 1
        self.run(functools.partial(self.gates.enter, place))
        super().copy_rows(target, source)
        self.run(functools.partial(self.gates.leave, place))

    def copy_pieces(self, target: Tensor, source: Tensor, pieces: Pieces) -> None:
        place, self.copies = (self.name, self.copies), self.copies + 1
        self.run(functools.partial(self.gates.enter, place))
        super().copy_pieces(target, source, pieces)
        self.run(functools.partial(self.gates.leave, place))


class Compute(CallerStream):
    deaf = False

    def wait(self, ticket: Ticket) -> None:
        if not self.deaf:
            super().wait(ticket)


EXACT = kv_of_heads(layers=3, block_size=4, kv_heads=3, head_dim=6, dtype="bfloat16")
NEAR, FAR, TILE, CHUNK = 10, 12, 4, 5
"""Blocks."""


@contextlib.contextmanager
def carrying(layout: KVLayout, folder: Path, gates: Gates) -> Iterator[Carrier]:
    with no_thread_left():
        streams = Streams(Late("copies", gates), Late("out", gates), CallerStream())
        size = layout.block_size
        room = CarrierRoom(layout, NEAR, TILE * size, CHUNK * size, Disk(FAR, folder))
        carrier = Carrier(room, CPU, streams)
        try:
            yield carrier
        finally:
            gates.open()
            carrier.close()


def ids(blocks: Sequence[int]) -> tuple[HostBlockId, ...]:
    return tuple(map(HostBlockId, blocks))


@KINDS
@pytest.mark.parametrize("seed", range(3))
def test_blocks_come_back_rounded_once(dtype: str, seed: int, tmp_path: Path) -> None:
    """Chunks sent layer by layer from fused projections, and blocks demoted from pages, to host and disk,
    whatever is late; pages and projections are written over at once."""
    exact = replace(EXACT, dtype=dtype)
    size, rng = exact.block_size, np.random.default_rng(seed)
    truth = noise(
        NEAR + FAR,
        exact.layers,
        2,
        size,
        *heads_of(exact),
        dtype=dtype,
        seed=seed,
    )
    expected = rounded(truth)
    pages, fused = (
        KVPool(exact, 2, CPU),
        torch.zeros(CHUNK * size, 3 * heads_of(exact)[0], heads_of(exact)[1], dtype=truth.dtype),
    )
    k, v = fused[:, : exact.planes[0][0].heads], fused[:, 2 * exact.planes[0][0].heads :]
    free, blocks = rng.permutation(NEAR + FAR).tolist(), list[int]()
    with carrying(
        exact.in_fp8, tmp_path, Gates(delay=random_delays(seed, ("copies", "out"), 1e-3))
    ) as carrier:
        while len(free) > CHUNK + 2:
            demoted, new = [free.pop(), free.pop()], [free.pop() for _ in range(rng.integers(1, CHUNK + 1))]
            for page, block in enumerate(demoted):
                pages.block(BlockId(page)).copy_(truth[block].flatten().view(torch.uint8))
            blocks += demoted
            tiles = [
                Tile(ids(part), len(part) * size - 1)
                for part in np.array_split(blocks, -(-len(blocks) // TILE))
            ]
            orders = [Order(BlockId(page), HostBlockId(block)) for page, block in enumerate(demoted)]
            every = [range(len(tiles))] * exact.layers
            carrier.begin(orders, pages, [Send(0, ids(new))], tiles, range(exact.layers), every)
            pages.bytes.fill_(255)  # not a number, in any dtype
            for layer in range(exact.layers):
                for target, half in ((k, 0), (v, 1)):
                    target[: len(new) * size].copy_(truth[new, layer, half].flatten(0, 1))
                carrier.send(layer, (k, v))
                fused.fill_(torch.nan)
                for tile in tiles:
                    for half, lent in enumerate(carrier.take()):
                        assert lent.is_contiguous()
                        assert torch.equal(
                            lent, expected[list(tile.blocks), layer, half].flatten(0, 1)[: tile.keys]
                        )
                        assert lent.dtype == truth.dtype
                    carrier.release()
            blocks += new
        assert carrier.disk.read_bytes > 0
        assert carrier.ring.copied_bytes % exact.in_fp8.layer_bytes == 0


def test_the_device_memory_is_what_is_counted(tmp_path: Path) -> None:
    for layout in (EXACT, EXACT.in_fp8):
        with carrying(layout, tmp_path, Gates()) as carrier:
            planes = [plane for layers in carrier.ring._views for layer in layers for plane in layer]
            tensors = [*carrier.ring._slots, *planes, *carrier.outbox._slots]
            held = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
            assert sum(held.values()) == carrier_bytes(
                layout, TILE * layout.block_size, CHUNK * layout.block_size
            )
            assert len(held) == (3 if layout.rounded_from else 2)


# ---- without one of its waits, and interrupted


@contextlib.contextmanager
def one_slot(gates: Gates) -> Iterator[tuple[Compute, TileRing, Outbox]]:
    """A ring and an outbox of one slot each, for one block."""
    compute, copies, out = Compute(), Late("copies", gates), Late("out", gates)
    pool = HostPool(EXACT.in_fp8, NEAR, CPU)
    pool._arena.bytes.zero_()
    streams = Streams(copies, out, compute)
    try:
        yield (
            compute,
            TileRing(pool, 1, EXACT.block_size, CPU, streams),
            Outbox(pool, 1, EXACT.block_size, CPU, streams),
        )
    finally:
        gates.open()
        copies.close()
        out.close()


KV = noise(NEAR, EXACT.block_size, *heads_of(EXACT), dtype="bfloat16", seed=9)


def lent(ring: TileRing, block: int, after: Ticket, layer: int = 1) -> Tensor:
    """K of a block's layer as it comes; the tile is released."""
    ring.begin([Tile(ids([block]), EXACT.block_size)], [layer], after)
    k = ring.take()[0].clone()
    ring.release()
    return k


@pytest.mark.parametrize("mutant", [False, True])
def test_a_tile_is_not_expanded_before_it_has_come(mutant: bool) -> None:
    gates, found = Gates([("copies", 0)]), list[Tensor]()
    with one_slot(gates) as (compute, ring, outbox):
        outbox.send(1, (KV[3], KV[3]), ids([3]))
        compute.deaf = mutant
        early = within(LONG if mutant else BRIEF, lambda: found.append(lent(ring, 3, outbox.landed())))
        assert early == mutant
        gates.open()
        assert within(LONG, lambda: wait_for(found))
        assert torch.equal(found[0], rounded(KV[3])) != mutant


@pytest.mark.parametrize("mutant", [False, True])
@pytest.mark.parametrize("how", ["send", "demote"])
def test_nothing_is_rounded_into_staging_before_it_is_empty(how: str, mutant: bool) -> None:
    gates, sent = Gates([("out", 0)]), threading.Event()
    with one_slot(gates) as (compute, ring, outbox):

        def send(block: int) -> None:
            if how == "send":
                outbox.send(1, (KV[block], KV[block]), ids([block]))
            else:
                outbox.demote(
                    KV[block].expand(EXACT.layers, 2, -1, -1, -1).flatten().view(torch.uint8),
                    HostBlockId(block),
                )

        def both() -> None:
            send(3)
            send(4)
            sent.set()

        compute.deaf = mutant
        assert within(LONG if mutant else BRIEF, both) == mutant
        gates.open()
        assert sent.wait(LONG)
        compute.deaf = False
        first = {"send": 1, "demote": 0}[how]
        found = [
            torch.equal(lent(ring, block, outbox.landed(), first), rounded(KV[block])) for block in (3, 4)
        ]
        assert found == [not mutant, True]


def wait_for(found: Sequence[object]) -> None:
    while not found:
        threading.Event().wait(1e-3)


@pytest.mark.parametrize("name", ["take", "send", "demote"])
def test_an_interrupt_anywhere_does_no_harm(name: str) -> None:
    place, interrupted = 0, True
    block = KV[5].expand(EXACT.layers, 2, -1, -1, -1).flatten().view(torch.uint8)
    while interrupted:
        with one_slot(Gates()) as (_, ring, outbox):
            outbox.send(1, (KV[3], KV[3]), ids([3]))
            ring.begin([Tile(ids([3]), EXACT.block_size)], [1], outbox.landed())
            calls: dict[str, Callable[[], object]] = {
                "take": ring.take,
                "send": lambda outbox=outbox: outbox.send(1, (KV[5], KV[5]), ids([5])),  # type: ignore[misc]
                "demote": lambda outbox=outbox: outbox.demote(block, HostBlockId(5)),  # type: ignore[misc]
            }
            interrupted = cut_short(calls[name], place, ("penstock",))
            outbox.send(1, (KV[6], KV[6]), ids([6]))
            for kept in (3, 6) if interrupted or name == "take" else (3, 5, 6):
                assert torch.equal(lent(ring, kept, outbox.landed()), rounded(KV[kept]))
        place += STRIDE
    assert place > 6


# ---- sizes


SPEC = Shape.of(dict(SHAPES["100M"])).spec
LAYOUT = kv_of_heads(
    layers=SPEC.layers, block_size=32, kv_heads=SPEC.kv_heads, head_dim=SPEC.head_dim, dtype="bfloat16"
)


def room(layout: KVLayout = LAYOUT, **settings: object) -> LongRoom:
    """On a machine with two budgets, so that host memory is beside the device's."""
    config = Config(
        Path(), device_memory="64MiB", host_memory="192MiB", block_size=layout.block_size, **settings
    )  # type: ignore[arg-type]
    found = long_room(
        config,
        SPEC,
        SchedulerLimits(layout.block_size, 512, 4, config.max_length or 4096),
        layout,
        read_hardware(CPU),
        64 * MIB,
        60 * MIB,
    )
    assert found is not None
    return found


def test_host_memory_is_halved_and_the_scratch_is_counted() -> None:
    per_token = SPEC.layers * 2 * SPEC.kv_heads * (SPEC.head_dim + 4 / 32)
    exact, fp8 = (room(max_length=1500, kv_tile=96, host_kv_dtype=kind) for kind in ("auto", "fp8"))
    assert exact.layout is LAYOUT
    assert fp8.layout.exact == LAYOUT
    assert exact.blocks == fp8.blocks == 47
    assert exact.host_bytes == 47 * 32 * SPEC.layers * 2 * SPEC.kv_heads * SPEC.head_dim * 2
    assert fp8.host_bytes == 47 * 32 * per_token
    assert 0.5 < fp8.host_bytes / exact.host_bytes < 0.505
    slots = (3 * 96 + 2 * 512) * per_token / SPEC.layers
    assert fp8.device_bytes == slots + 96 * 2 * SPEC.kv_heads * SPEC.head_dim * 2
    assert exact.device_bytes == (3 * 96 + 2 * 512) * 2 * SPEC.kv_heads * SPEC.head_dim * 2
    asked = [room(host_kv_memory="32MiB", host_kv_dtype=kind).blocks for kind in ("auto", "fp8")]
    assert asked == [32 * MIB // LAYOUT.block_bytes, 32 * MIB // LAYOUT.in_fp8.block_bytes]
    assert "hold KV in fp8 for" in str(fp8)
    assert "fp8" not in str(exact)


@pytest.mark.parametrize("kind", ["auto", "fp8"])
def test_what_policies_keep_is_of_the_keys_as_they_rest(kind: str) -> None:
    plain = room(max_length=1500, kv_tile=96, host_kv_dtype=kind)
    chosen = room(max_length=1500, kv_tile=96, host_kv_dtype=kind, attention_policy="topk:4")
    assert chosen.policies is not None
    sketch = sketch_layout(chosen.layout, chosen.policies.bits)
    assert chosen.host_bytes - plain.host_bytes == 47 * SPEC.layers * sketch.bytes > 0
    needed = chosen_bytes(chosen.layout, 96, 47, chosen.policies)
    assert chosen.device_bytes - plain.device_bytes == needed > 3 * 3 * chosen.layout.layer_bytes


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="host_kv_dtype 'fp4' is not known; choose one of auto, fp8"):
        Config(Path(), host_kv_dtype="fp4")
    askew = kv_of_heads(layers=1, block_size=2, kv_heads=1, head_dim=25, dtype="float32")
    with pytest.raises(ConfigError, match="2 tokens of 1 heads of 25 are 50; choose a larger block_size"):
        room(askew, host_kv_memory="1MiB", host_kv_dtype="fp8")
    assert room(askew, host_kv_memory="1MiB").layout is askew


# ---- a whole engine

FOLDED = {"device": "cpu", "max_length": 400, "beyond_trained": True, "check": True, "max_sequences": 2}
SMALL = {"kv_blocks": 8, "block_size": 8, "max_step_tokens": 24, "kv_tile": 32, "host_kv_memory": "1MiB"}
PROMPTS = [tiny._text(1000)[:300], tiny._text(1000)[500:650]]


@functools.cache
def answers(dtype: str, kind: str = "auto") -> list[Completion]:
    return asked(dtype, host_kv_dtype=kind)


def asked(dtype: str, **more: object) -> list[Completion]:
    """Distributions after every token of the prompts, and what is generated."""
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=-1, prompt_logprobs=-1)
    with LLM(tiny.checkpoint("llama"), dtype=dtype, **{**FOLDED, **SMALL, **more}) as llm:  # type: ignore[arg-type]
        found = [llm.generate([prompt], params)[0] for prompt in PROMPTS]
        stats = llm.stats().kv
        assert stats is not None
        assert stats.host > 0
        assert (stats.disk > 0) == ("disk_kv_memory" in more)
        return found


def distributions(completion: Completion) -> Tensor:
    """`[tokens - 1, vocabulary]`: after each token of the prompt but the last."""
    assert completion.prompt_logprobs is not None
    return torch.stack([tiny.dense(entry) for entry in completion.prompt_logprobs if entry is not None])


def everything(completion: Completion) -> list[object]:
    assert completion.logprobs is not None
    return [completion.tokens, completion.logprobs, completion.prompt_logprobs]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_computes_with_what_was_rounded_and_nothing_else(dtype: str) -> None:
    """As one does to whose exact host memory everything goes rounded: to the last bit."""
    send, demote = Outbox.send, Outbox.demote

    def send_rounded(
        self: Outbox, layer: int, planes: Sequence[Tensor], blocks: Sequence[HostBlockId]
    ) -> None:
        both = [rounded(x.unflatten(0, (len(blocks), -1))).flatten(0, 1) for x in planes]
        send(self, layer, both, blocks)

    def demote_rounded(self: Outbox, block: Tensor, target: HostBlockId) -> None:
        layout = self._pool.layout
        shape = layout.layers, 2, layout.block_size, *heads_of(layout)
        demote(
            self, rounded(block.view(getattr(torch, dtype)).view(shape)).flatten().view(torch.uint8), target
        )

    with patch.object(Outbox, "send", send_rounded), patch.object(Outbox, "demote", demote_rounded):
        expected = asked(dtype)
    assert list(map(everything, answers(dtype, "fp8"))) == list(map(everything, expected))


APART, DIVERGENCE = 0.51, 0.073
"""Twice what was found: the mean difference of log-probabilities of a prompt's tokens, and the mean
divergence of distributions, in nats. The model is random and its attention sharp: bfloat16 alone, against
float32, makes 0.074 and 0.0028."""


@KINDS
def test_an_engine_says_nearly_the_same(dtype: str) -> None:
    for exact, found in zip(answers(dtype), answers(dtype, "fp8"), strict=True):
        p, q = distributions(exact), distributions(found)
        tokens = torch.tensor(found.prompt_tokens[1:])[:, None]
        apart = float((p - q).gather(1, tokens).abs().mean())
        divergence = float((p.exp() * (p - q)).sum(1).mean())
        assert 0 < apart < APART
        assert 0 < divergence < DIVERGENCE


def test_disk_changes_nothing(tmp_path: Path) -> None:
    """Four blocks of a context on the host and the rest on disk give what the host alone gives."""
    near = 4 * kv_of_heads(3, 8, 2, 16, "bfloat16").in_fp8.block_bytes
    found = asked(
        "bfloat16", host_kv_dtype="fp8", host_kv_memory=near, disk_kv_memory="1MiB", kv_directory=tmp_path
    )
    assert list(map(everything, found)) == list(map(everything, answers("bfloat16", "fp8")))


def test_blocks_in_fp8_outlive_the_process_and_are_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process reads them and says what this one says of the same blocks. Where blocks rest in another
    dtype, none are found."""
    monkeypatch.setattr(BlockStore, "noted", lambda _: b"")
    monkeypatch.setattr(TransferRates, "computed_first", lambda *_: 0)  # What can be loaded is.
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=-1)
    whole = len(PROMPTS[0]) // 8 * 8

    def asked(kind: str, times: int) -> list[Completion]:
        place = {"kv_directory": tmp_path, "cache": tmp_path / "cache", "disk_kv_memory": "8MiB"}
        settings = {**FOLDED, **SMALL, **place, "host_kv_dtype": kind, "dtype": "bfloat16"}
        with LLM(tiny.checkpoint("llama"), **settings) as llm:  # type: ignore[arg-type]
            found = []
            for _ in range(times):
                found += llm.generate([PROMPTS[0]], params)
                llm.booted.engine.scheduler.ledger.forget()  # In pages the newest blocks are exact.
            llm.booted.engine.tend(10.0)
            tiers = llm.stats().tiers
            assert tiers is not None
            assert tiers.inward.lost == tiers.outward.lost == 0
        return found

    computed, reused = asked("fp8", 2)
    assert (computed.cached_tokens, reused.cached_tokens) == (0, whole)
    [other] = asked("auto", 1)
    assert other.cached_tokens == 0
    for kind, same in (("fp8", reused), ("auto", None)):
        [again] = asked(kind, 1)
        assert again.cached_disk == whole
        assert same is None or everything(again) == everything(same)
    sizes = [json.loads(path.read_text())["record_bytes"] for path in tmp_path.glob("*/store.json")]
    exact = kv_of_heads(3, 8, 2, 16, "bfloat16")
    assert sorted(sizes) == [exact.in_fp8.block_bytes, exact.block_bytes]


def test_a_policy_that_chooses_everything_changes_nothing() -> None:
    found = asked("float32", host_kv_dtype="fp8", attention_policy="topk:1000", prefill_policy="topk:1000")
    for one, other in zip(found, answers("float32", "fp8"), strict=True):
        assert one.tokens == other.tokens
        assert tiny.distance(distributions(one), distributions(other)) < tiny.LIMIT


def test_the_command_line_passes_it_on(capfd: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--device",
        "cpu",
        "--kv-blocks",
        "8",
        "--host-kv-memory",
        "2MiB",
        "--host-kv-dtype",
        "fp8",
        "--max-tokens",
        "1",
        "-v",
    ]
    assert main(["run", *flags, "hello"]) == 0
    assert "hold KV in fp8" in capfd.readouterr().err
