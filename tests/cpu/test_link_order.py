"""Who shares the link to a device: weights and KV that both stream, in virtual time (`virtual`). The real
rings queue their copies; a machine with one copy engine for each direction says how long passes take.

Sizes are those of a 70B model, divided by SCALE.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from layouts import kv_of_heads
from penstock.arch.layout import GroupId, GroupKind, GroupLayout
from penstock.kv.movement.hostpool import HostPool
from penstock.kv.movement.tiles import Streams, Tile, TileRing
from penstock.memory.link import LANES, LUMP, LumpStream
from penstock.weights.streaming.residency import Use, WeightLimits, padded
from penstock.weights.streaming.ring import StreamRates
from penstock.weights.streaming.solver import solve
from penstock.weights.streaming.source import Sources
from penstock.weights.streaming.stream import WeightStream
from streams import layout
from virtual import VirtualStream, elapse

CPU = torch.device("cpu")
SCALE = 1024
PARAMETERS = {GroupKind.ATTENTION: 151_000_000, GroupKind.FFN: 705_000_000}
"""Of a layer."""
PRODUCTS, ATTENTION, READ = 600e12, 450e12, 3e12
"""Operations/s of products and of attention, bytes/s of the device's memory."""
BLOCK, TILE = 64, 16384
"""Tokens."""
KV = 4096
"""Bytes of a token in a layer."""
LAYERS, PASSES = 8, 4


class Zeros:
    """A source of weights in which nothing is read."""

    def read(self, layout: GroupLayout, start: int, into: Tensor, check: bool) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Work:
    """Passes of `tokens` tokens behind `past` others, of weights with `bits` each.

    room: the share of weights that the device has room for. ring: the weights' ring in layers; None for the
    solver's. link: bytes/s. lump: of large copies; None if they are not cut. ordered: whether tiles wait for
    what is needed sooner.
    """

    bits: float
    tokens: int
    past: int
    room: float = 0.36
    ring: float | None = None
    link: float = 54e9
    lump: int | None = LUMP
    ordered: bool = True

    def seconds(self) -> tuple[float, float]:
        """Return the seconds of a pass, and the bound: the link's or the arithmetic's, whichever is more."""
        lanes = [VirtualStream("up") for _ in range(LANES)]
        up = LumpStream(lanes, self.lump // SCALE) if self.lump else lanes[0]
        tiles_up, out = VirtualStream("up"), VirtualStream("down")
        compute = VirtualStream(None)
        ids = [GroupId(kind, layer) for layer in range(LAYERS) for kind in PARAMETERS]
        sizes = {kind: int(count * self.bits / 8 / SCALE) for kind, count in PARAMETERS.items()}
        layouts = [layout(id, sizes[id.kind]) for id in ids]
        total, pair = sum(map(padded, layouts)), sum(map(padded, layouts[:2]))
        limits = WeightLimits(
            int(total * self.room), total, 0, device_ring=self.ring and int(pair * self.ring)
        )
        rates = StreamRates(self.link / SCALE, 0, READ / SCALE)
        placement = solve([Use(one.id, padded(one)) for one in layouts], limits, rates)
        weights = WeightStream(placement, layouts, Sources(Zeros(), Zeros()), CPU, streams=(up, compute))
        weights.load()
        kv = kv_of_heads(
            layers=LAYERS, block_size=BLOCK, kv_heads=1, head_dim=KV // SCALE // 4, dtype="float16"
        )
        pool = HostPool(kv, max(self.past // BLOCK, 1), CPU)
        ring = TileRing(pool, 3, TILE, CPU, Streams(tiles_up, out, compute))
        if self.ordered:
            ring.sooner = weights.queued_before
        blocks = range(self.past // BLOCK)
        parts = [tuple(blocks[at : at + TILE // BLOCK]) for at in range(0, len(blocks), TILE // BLOCK)]
        tiles = [Tile(part, len(part) * BLOCK) for part in parts]
        ends = []
        for _ in range(PASSES):
            ring.begin(tiles, range(LAYERS), compute.mark())
            for id in ids:
                weights.take(id)
                products = 2 * self.tokens * PARAMETERS[id.kind] / PRODUCTS
                took = max(products, sizes[id.kind] * SCALE / READ)
                compute.kernel(took / 2)
                for tile in tiles if id.kind is GroupKind.ATTENTION else ():
                    ring.take()
                    operations = 4 * self.tokens * tile.keys * 8192
                    compute.kernel(max(operations / ATTENTION, tile.keys * KV / READ))
                    ring.release()
                compute.kernel(took / 2)
                weights.release(id)
            ends.append(compute.mark())
        busy = elapse([*lanes, tiles_up, out, compute], dict.fromkeys(("up", "down"), self.link / SCALE))
        arithmetic = sum(one for one in compute.work if isinstance(one, float))
        weights.close()
        pool.close()
        return (ends[-1].when() - ends[1].when()) / (PASSES - 2), max(busy["up"], arithmetic) / PASSES


def before(work: Work) -> Work:
    """The same with copies in one piece, and without waits for what is needed sooner."""
    return replace(work, lump=None, ordered=False)


LONG = 131072
BALANCED = [
    Work(16, 2048, LONG),
    Work(16, 4096, LONG),
    Work(16, 8192, LONG, link=25e9),
    Work(8, 4096, LONG, link=25e9),
]
"""Prompts whose arithmetic takes about as long as the link."""


@pytest.mark.parametrize("work", BALANCED, ids=str)
def test_prompts_that_need_link_and_arithmetic_alike_are_faster(work: Work) -> None:
    now, then = work.seconds()[0], before(work).seconds()[0]
    assert now < 0.94 * then, f"{now:.3f} s, {then:.3f} before"
    roomy = replace(work, ring=1.0)
    now, then = roomy.seconds()[0], before(roomy).seconds()[0]
    assert now < 0.84 * then, f"{now:.3f} s, {then:.3f} before"
    assert now < 1.05 * roomy.seconds()[1], "beyond the bound"


@pytest.mark.parametrize("ring", [None, 1.0])
@pytest.mark.parametrize("bits", [16, 4.25])
@pytest.mark.parametrize("link", [54e9, 25e9])
def test_decode_is_as_fast(bits: float, ring: float | None, link: float) -> None:
    work = Work(bits, 1, LONG, ring=ring, link=link)
    assert work.seconds()[0] < 1.003 * before(work).seconds()[0]


@pytest.mark.parametrize("past", [32768, LONG])
@pytest.mark.parametrize(
    ("bits", "tokens"), [(16, 2048), (16, 8192), (16, 16384), (4.25, 2048), (4.25, 8192)]
)
@pytest.mark.parametrize("link", [54e9, 25e9])
def test_no_prompt_is_slower_where_the_ring_has_room_for_a_layer(
    bits: float, tokens: int, past: int, link: float
) -> None:
    work = Work(bits, tokens, past, ring=1.0, link=link)
    assert work.seconds()[0] < 1.01 * before(work).seconds()[0]


@pytest.mark.parametrize("what", ["lumps", "order"])
def test_both_are_needed(what: str) -> None:
    work = Work(16, 2048, LONG, ring=1.0)
    without = replace(work, lump=None) if what == "lumps" else replace(work, ordered=False)
    assert work.seconds()[0] < 0.97 * without.seconds()[0]
