"""Who shares the link to a device: weights and KV that both stream, in virtual time (`virtual`). The real
rings queue their copies; a machine with one copy engine for each direction says how long passes take.

Sizes are those of a 70B model, divided by SCALE.
"""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from layouts import kv_of_heads
from penstock.arch.layout import GroupId, GroupKind, GroupLayout
from penstock.kv.movement.hostpool import HostPool
from penstock.kv.movement.tiles import Streams, Tile, TileRing
from penstock.memory.link import LUMP, LumpStream
from penstock.memory.streams import Stream, ThreadStream, Ticket
from penstock.weights.streaming.residency import Use, WeightLimits, padded
from penstock.weights.streaming.ring import StreamRates
from penstock.weights.streaming.solver import solve
from penstock.weights.streaming.source import Sources
from penstock.weights.streaming.stream import WeightStream
from streams import LONG as FOREVER
from streams import Gates, layout, random_delays, within
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


class Numbered:
    """A source of weights: all bytes of a group are the same, and no other's."""

    def read(self, layout: GroupLayout, start: int, into: Tensor, check: bool) -> None:
        into.fill_(2 * layout.id.layer + (layout.id.kind is GroupKind.FFN) + 1)

    def close(self) -> None:
        pass


def lanes_of(way: str, lump: int | None) -> tuple[LumpStream | VirtualStream, list[VirtualStream]]:
    """Return a stream for large copies, and what it is made of."""
    first, second = VirtualStream(way), VirtualStream(way)
    return (LumpStream((first, second), lump // SCALE) if lump else first), [first, second]


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

    @property
    def ids(self) -> list[GroupId]:
        """The groups of a pass, in order."""
        return [GroupId(kind, layer) for layer in range(LAYERS) for kind in PARAMETERS]

    def layouts(self) -> list[GroupLayout]:
        return [layout(id, int(PARAMETERS[id.kind] * self.bits / 8 / SCALE)) for id in self.ids]

    def weights(self, copies: Stream, compute: Stream) -> WeightStream:
        """Return weights on the host, of which the ring has been given what it holds."""
        layouts = self.layouts()
        total, pair = sum(map(padded, layouts)), sum(map(padded, layouts[:2]))
        ring = None if self.ring is None else int(pair * self.ring)
        limits = WeightLimits(int(total * self.room), total, 0, device_ring=ring)
        rates = StreamRates(self.link / SCALE, 0, READ / SCALE)
        placement = solve([Use(one.id, padded(one)) for one in layouts], limits, rates)
        sources = Sources(Numbered(), Numbered())
        weights = WeightStream(placement, layouts, sources, CPU, streams=(copies, compute))
        weights.load()
        return weights

    def seconds(self) -> tuple[float, float]:
        """Return the seconds of a pass, and the bound: the link's or the arithmetic's, whichever is more."""
        up, lanes = lanes_of("up", self.lump)
        tiles_up, out, compute = VirtualStream("up"), VirtualStream("down"), VirtualStream(None)
        weights = self.weights(up, compute)
        ids, sizes = self.ids, {id: layout.size for id, layout in zip(self.ids, self.layouts(), strict=True)}
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
                took = max(products, sizes[id] * SCALE / READ)
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


def test_weights_share_the_link_when_they_are_told_to() -> None:
    first, second = VirtualStream("up"), VirtualStream("up")
    copies = LumpStream((first, second), LUMP // SCALE, shared=False)
    weights = Work(16, 1, 0, room=0.13, ring=1.0).weights(copies, VirtualStream(None))
    assert not second.work
    for shared in (True, False):
        weights.share_link(shared)
        assert copies.shared == shared
    weights.close()


def test_what_is_needed_sooner_is_known() -> None:
    copies = VirtualStream("up")
    work = Work(16, 1, 0, room=0.13, ring=1.0)
    weights = work.weights(copies, VirtualStream(None))
    feeder = weights._feeder
    assert feeder is not None
    first = weights.queued_before(0)
    assert first is feeder._ready[0], "the first group is in the ring"
    assert first in copies.work[:-1]
    assert feeder._place[0] == 2, "there is room for a layer"
    for layer in (1, 3):
        later = weights.queued_before(layer)
        assert later is feeder._last, "of the layer nothing is queued, but what is comes sooner"
    for id in work.ids[:2]:
        weights.take(id)
        assert weights.queued_before(0) is None, "it has begun"
        assert weights.queued_before(3) is not None
        weights.release(id)
    assert weights.queued_before(1) is feeder._ready[2]
    for id in work.ids[2:]:
        weights.take(id)
        weights.release(id)
    assert weights.queued_before(3) is None, "all of this pass have begun"
    weights.begin_pass()
    assert weights.queued_before(0) is feeder._ready[0]
    weights.close()


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


def blocks_moving(stream: LumpStream | VirtualStream, count: int, size: int) -> None:
    """Queue the copies of so many KV blocks, as `Transfers` does."""
    pieces = np.array([(block, count - block - 1, 1) for block in range(count)]) * (size // SCALE)
    memory = torch.empty(count * size // SCALE, dtype=torch.uint8)
    stream.copy_pieces(memory, memory, pieces)


def tiles_beside(lump: int | None, blocks: int) -> float:
    """Return the seconds of a chunk of a long prompt, for 8 layers with 8 tiles each of 64 MiB and 4 ms. So
    many blocks of 8 MiB of another's prefix come to the device meanwhile."""
    (up, lanes), tiles, compute = lanes_of("up", lump), VirtualStream("up"), VirtualStream(None)
    if blocks:
        blocks_moving(up, blocks, 8 << 20)
    used = list[Ticket]()
    for number in range(64):
        if number >= 3:
            tiles.wait(used[number - 3])
        memory = torch.empty((64 << 20) // SCALE, dtype=torch.uint8)
        tiles.copy(memory, memory)
        compute.wait(tiles.mark())
        compute.kernel(4e-3)
        used.append(compute.mark())
    elapse([*lanes, tiles, compute], {"up": 54e9 / SCALE})
    return used[-1].when()


def test_a_prefix_that_is_loaded_does_not_hold_up_the_tiles_of_another_request() -> None:
    alone, before, now = tiles_beside(None, 0), tiles_beside(None, 512), tiles_beside(LUMP, 512)
    assert before > alone + 0.06
    assert now < alone + 0.004


def results_beside(lump: int | None) -> float:
    """Return how late the results of steps of 2 ms come, at most, while 2 GiB of KV go to the host."""
    (down, lanes), results, compute = lanes_of("down", lump), VirtualStream("down"), VirtualStream(None)
    blocks_moving(down, 256, 8 << 20)
    there, done = list[Ticket](), list[Ticket]()
    for _ in range(20):
        compute.kernel(2e-3)
        done.append(compute.mark())
        results.wait(done[-1])
        results.copy(torch.empty(1, dtype=torch.uint8), torch.empty(1, dtype=torch.uint8))
        there.append(results.mark())
    elapse([*lanes, results, compute], {"down": 54e9 / SCALE})
    return max(one.when() - other.when() for one, other in zip(there, done, strict=True))


def test_results_of_steps_wait_for_a_lump_of_a_store() -> None:
    assert results_beside(None) > 0.035
    assert results_beside(LUMP) < 1.1 * LUMP / 54e9


class Late(ThreadStream):
    """Copies that may be late. Places are ("copy", name, number)."""

    def __init__(self, name: str, gates: Gates) -> None:
        super().__init__(f"{name} under test")
        self.name, self.gates, self.copies = name, gates, 0

    def copy(self, target: Tensor, source: Tensor) -> None:
        place, self.copies = ("copy", self.name, self.copies), self.copies + 1
        self.run(lambda: self.gates.enter(place))
        super().copy(target, source)

    def copy_rows(self, target: Tensor, source: Tensor) -> None:
        place, self.copies = ("copy", self.name, self.copies), self.copies + 1
        self.run(lambda: self.gates.enter(place))
        super().copy_rows(target, source)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("ring", [0.83, 1.0])
def test_weights_and_tiles_arrive_whole_whatever_is_late(ring: float, seed: int) -> None:
    gates = Gates(delay=random_delays(seed))
    work = Work(0.02, 1, 0, room=0.13, ring=ring)
    up = LumpStream((Late("lane 0", gates), Late("lane 1", gates)), 512)
    tiles_up, compute = Late("tiles", gates), ThreadStream("compute under test")
    weights = work.weights(up, compute)
    kv = kv_of_heads(layers=LAYERS, block_size=4, kv_heads=1, head_dim=4, dtype="float16")
    pool = HostPool(kv, 6, CPU)
    pool.bytes.copy_(
        torch.from_numpy(np.random.default_rng(seed).integers(0, 256, len(pool.bytes), np.uint8))
    )
    tiles = TileRing(pool, 3, 8, CPU, Streams(tiles_up, tiles_up, compute))
    tiles.sooner = weights.queued_before
    both = [Tile((0, 1), 8), Tile((4, 5), 8)]
    seen = list[tuple[np.ndarray, np.ndarray]]()

    def look(array: np.ndarray, expected: np.ndarray) -> None:
        compute.run(lambda: seen.append((array.copy(), expected)))

    def passes() -> None:
        for turn in range(3):
            tiles.begin(both, range(LAYERS), compute.mark())
            for id in work.ids:
                look(weights.take(id).vectors["bytes"].numpy(), weights._homes[id][: sizes[id]].numpy())
                for tile in both if id.kind is GroupKind.ATTENTION else ():
                    k, _ = tiles.take()
                    rows = pool.layer_rows(id.layer, tile.blocks[0], 2).view(2, 2, -1)[:, 0]
                    look(k.reshape(2, -1).view(torch.uint8).numpy(), rows.numpy())
                    tiles.release()
                weights.release(id)
                if turn == 1 and id == work.ids[5]:
                    break  # A pass that ends early.
            compute.mark().wait()

    sizes = {id: layout.size for id, layout in zip(work.ids, work.layouts(), strict=True)}
    assert within(FOREVER, passes), "streams wait for each other"
    assert len(seen) > 40
    assert all(np.array_equal(found, expected) for found, expected in seen)
    weights.close()
    for stream in (tiles_up, compute):
        stream.close()
    pool.close()
