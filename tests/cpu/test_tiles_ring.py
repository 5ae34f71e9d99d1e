"""KV that streams between host and device arrives whole and in time, whatever is late; and every wait of the
protocol is needed for it."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from layouts import heads_of, kv_of_heads
from penstock.arch.layout import KVLayout
from penstock.base.errors import DeviceError
from penstock.base.trace import Trace
from penstock.kv.movement import tiles as tiles_of_kv
from penstock.kv.movement.hostpool import HostPool
from penstock.kv.movement.rows import runs
from penstock.kv.movement.tiles import Outbox, Streams, Tile, TileRing
from penstock.memory.streams import CallerStream, Stream, ThreadStream, Ticket, _memcpy_2d, joined
from penstock.ops.attention.dense import dense, dense_reference, merge
from penstock.ops.attention.inputs import LayerAttention
from penstock.step.plan import HostBlockId
from penstock.weights.streaming.waits import StreamWaits
from streams import BRIEF, LONG, STRIDE, Gates, cut_short, no_thread_left, random_delays, within

CPU = torch.device("cpu")
LAYOUT = kv_of_heads(layers=3, block_size=4, kv_heads=2, head_dim=2, dtype="float16")
BLOCKS = 24
TILE = 4
"""Blocks in a slot."""
TOKENS = TILE * LAYOUT.block_size


class Line(ThreadStream):
    """A stream under test. Places are (name, number of the copy); waits may be left out."""

    def __init__(self, name: str, gates: Gates) -> None:
        super().__init__(f"{name} under test")
        self.name, self.gates, self.deaf = name, gates, False
        self.copies = 0

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.at_place(self.copies, partial(np.copyto, target.numpy(), source.numpy()))
        self.copies += 1

    def copy_rows(self, target: Tensor, source: Tensor) -> None:
        self.copy(target, source)

    def at_place(self, number: int, work: Callable[[], object], name: str | None = None) -> None:
        place = name or self.name, number
        self.run(lambda: self.gates.enter(place))
        self.run(work)
        self.run(lambda: self.gates.leave(place))

    def wait(self, ticket: Ticket) -> None:
        if not self.deaf:
            super().wait(ticket)


Seen = list[np.ndarray]


def random(*shape: int, seed: int = 0) -> Tensor:
    """Bytes that look like no others."""
    return torch.from_numpy(np.random.default_rng((seed, *shape)).integers(0, 256, shape, np.uint8))


@dataclass
class World:
    """A pool, a ring and an outbox on threads. at_once: the compute stream does what it is given while it is
    given it."""

    slots: int = 2
    gates: Gates = field(default_factory=Gates)
    layout: KVLayout = LAYOUT
    at_once: bool = False
    waits: StreamWaits | None = None

    def __post_init__(self) -> None:
        self.copies, self.out, self.computing = (
            Line(name, self.gates) for name in ("copies", "out", "compute")
        )
        compute: Stream = CallerStream() if self.at_once else self.computing
        self.pool = HostPool(self.layout, BLOCKS, CPU)
        self.pool._arena.bytes.copy_(random(BLOCKS * self.layout.block_bytes))
        streams = Streams(self.copies, self.out, compute)
        self.ring = TileRing(self.pool, self.slots, TOKENS, CPU, streams, self.waits)
        self.outbox = Outbox(self.pool, self.slots, TOKENS, CPU, streams)
        self.compute = compute
        self.kernels = 0
        self.seen: list[tuple[Seen, Seen]] = []
        """What kernels found, and what they should have."""

    def kernel(self, work: Callable[[], object]) -> None:
        if self.at_once:
            work()
        else:
            self.computing.at_place(self.kernels, work, "kernel")
        self.kernels += 1

    def resting(self, layer: int, tile: Tile) -> Seen:
        """K and V of a tile as they rest on the host."""
        rows = torch.cat([self.pool.layer_rows(layer, block, 1) for block in tile.blocks]).view(
            len(tile.blocks), 2, -1
        )
        return [
            rows[:, half].reshape(len(tile.blocks) * self.layout.block_size, -1)[: tile.keys].numpy().copy()
            for half in range(2)
        ]

    def read(self, expected: Seen, kv: Sequence[Tensor]) -> None:
        """Queue a kernel that takes down K and V."""
        arrays = [x.flatten(1).view(torch.uint8).numpy() for x in kv]
        found: Seen = []
        self.kernel(lambda: found.extend(array.copy() for array in arrays))
        self.seen.append((found, expected))

    def use(self, layer: int, tile: Tile) -> None:
        expected = self.resting(layer, tile)
        self.read(expected, self.ring.take())
        self.ring.release()

    def step(self, tiles: Sequence[Tile], layers: Sequence[int]) -> None:
        self.ring.begin(tiles, layers)
        for layer in layers:
            for tile in tiles:
                self.use(layer, tile)

    def settle(self) -> None:
        """Everything that has been queued is done."""
        for stream in (self.computing, self.copies, self.out):
            stream.mark().wait()

    def right(self) -> bool:
        """Whether all kernels have seen their bytes, once all are done."""
        self.settle()
        return all(
            np.array_equal(one, other)
            for found, expected in self.seen
            for one, other in zip(found, expected, strict=True)
        )

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *_: object) -> None:
        self.gates.open()
        for stream in (self.computing, self.copies, self.out):
            stream.deaf = False
            stream.close()
        self.pool.close()


def ids(blocks: Iterable[int]) -> tuple[HostBlockId, ...]:
    return tuple(HostBlockId(int(block)) for block in blocks)


def tile(*blocks: int, short: int = 0, block_size: int = LAYOUT.block_size) -> Tile:
    return Tile(ids(blocks), len(blocks) * block_size - short)


def random_tiles(rng: np.random.Generator) -> list[Tile]:
    """Runs of blocks, and blocks in any order; tiles may share blocks."""
    tiles = []
    for _ in range(rng.integers(0, 5)):
        count = int(rng.integers(1, TILE + 1))
        start = int(rng.integers(BLOCKS - count + 1))
        blocks = range(start, start + count) if rng.random() < 0.5 else rng.permutation(BLOCKS)[:count]
        tiles.append(tile(*blocks, short=int(rng.integers(LAYOUT.block_size))))
    return tiles


def size_of(tiles: Sequence[Tile]) -> int:
    return sum(len(one.blocks) for one in tiles) * LAYOUT.layer_bytes


def late(kind: str | int) -> Callable[[Hashable], float]:
    if isinstance(kind, int):
        return random_delays(kind, ("copies", "out", "compute", "kernel"), 5e-4)
    return lambda place: 1e-3 if place[0] == kind else 0.0  # type: ignore[index]


# ---- strided copies


@pytest.mark.parametrize("stream", [CallerStream, partial(ThreadStream, "rows")], ids=["caller", "thread"])
@pytest.mark.parametrize(("rows", "width", "stride"), [(5, 3, 8), (5, 8, 8), (1, 3, 8), (4, 1, 8)])
def test_rows_that_stand_apart_are_copied_alone(
    stream: Callable[[], Stream], rows: int, width: int, stride: int
) -> None:
    line, apart, dense_rows = stream(), random(6, stride), random(rows, width)
    before = apart.clone()
    line.copy_rows(apart[:rows, :width], dense_rows)
    back = torch.zeros_like(dense_rows)
    line.copy_rows(back, apart[:rows, :width])
    line.mark().wait()
    line.close()
    assert torch.equal(back, dense_rows)
    before[:rows, :width] = dense_rows
    assert torch.equal(apart, before)


@pytest.mark.parametrize("stream", [CallerStream, partial(ThreadStream, "rows")], ids=["caller", "thread"])
def test_what_is_no_rows_of_bytes_is_refused_where_it_is_queued(stream: Callable[[], Stream]) -> None:
    line, rows = stream(), random(4, 8)
    for target, source, fault in (
        (rows, rows[:2], "unlike shapes"),
        (rows.int(), rows.int(), "rows are bytes"),
        (rows[:, ::2], rows[:, ::2], "stand apart"),
        (rows, rows[:1].expand(4, 8), "lie over each other"),
    ):
        with pytest.raises(AssertionError, match=fault):
            line.copy_rows(target, source)
    line.close()


@pytest.mark.parametrize("stream", [CallerStream, partial(ThreadStream, "pieces")], ids=["caller", "thread"])
def test_pieces_are_copied_alone(stream: Callable[[], Stream]) -> None:
    line, target, source = stream(), random(1, 64)[0], random(1, 96)[0]
    before, pieces = target.clone(), np.array([[0, 90, 6], [40, 0, 1], [10, 5, 20]])
    line.copy_pieces(target, source, pieces)
    line.copy_pieces(target, source, pieces[:0])
    line.mark().wait()
    line.close()
    for at, start, size in pieces.tolist():
        before[at : at + size] = source[start : start + size]
    assert torch.equal(target, before)


@pytest.mark.parametrize("stream", [CallerStream, partial(ThreadStream, "pieces")], ids=["caller", "thread"])
@pytest.mark.parametrize("piece", [[-1, 0, 4], [0, -1, 4], [0, 0, 0], [60, 0, 5], [0, 92, 5]])
def test_a_piece_beyond_a_tensor_is_refused_where_it_is_queued(
    stream: Callable[[], Stream], piece: list[int]
) -> None:
    line = stream()
    with pytest.raises(AssertionError, match=r"a piece beyond the (64|96) bytes"):
        line.copy_pieces(random(1, 64)[0], random(1, 96)[0], np.array([[0, 0, 64], piece]))
    line.close()


@pytest.mark.parametrize("seed", range(20))
def test_pieces_that_follow_one_another_are_joined(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 4, 30)
    places, rests = (np.cumsum(sizes + (rng.random(30) < 0.3)) - sizes for _ in range(2))
    pieces = np.stack((places, rests, sizes), 1)
    found = joined(pieces)

    def bytes_of(some: np.ndarray) -> list[tuple[int, int]]:
        return [(at + n, start + n) for at, start, size in some.tolist() for n in range(size)]

    assert bytes_of(found) == bytes_of(pieces)
    assert not ((found[1:, :2] == found[:-1, :2] + found[:-1, 2:]).all(1)).any()
    assert len(joined(found)) == len(found) < 30


@pytest.mark.skipif(torch.version.cuda is not None, reason="needs a torch without CUDA")
def test_a_torch_without_a_runtime_is_told_from_one_with_it() -> None:
    with pytest.raises(DeviceError, match="cudaMemcpy2DAsync"):
        _memcpy_2d()


# ---- the pool


def test_the_pool_is_one_allocation_of_whole_blocks() -> None:
    pool = HostPool(LAYOUT, BLOCKS, CPU)
    assert pool._arena.size == BLOCKS * LAYOUT.block_bytes
    layers = torch.arange(LAYOUT.layers).repeat_interleave(LAYOUT.layer_bytes)
    for block in range(BLOCKS):
        pool.block(HostBlockId(block)).copy_(10 * block + layers)
    for layer in range(LAYOUT.layers):
        rows = pool.layer_rows(layer, 5, 7)
        assert rows.shape == (7, LAYOUT.layer_bytes)
        assert rows.stride() == (LAYOUT.block_bytes, 1)
        assert torch.equal(rows, (10 * torch.arange(5, 12) + layer).to(torch.uint8)[:, None].expand_as(rows))
    pool.close()
    pool.close()


# ---- whatever is late


@pytest.mark.parametrize("slots", [1, 2, 3, 7])
@pytest.mark.parametrize("delay", ["copies", "kernel", 1, 2, 3, 4])
@pytest.mark.parametrize("few", [1, 4])
def test_every_kernel_sees_its_tile(
    slots: int, delay: str | int, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """few: runs that are copied one by one; what has more goes in pieces, all in one call."""
    monkeypatch.setattr(tiles_of_kv, "_FEW", few)
    rng = np.random.default_rng((slots, delay if isinstance(delay, int) else len(delay)))
    with no_thread_left(), World(slots, Gates(delay=late(delay))) as world:
        size = 0
        for _ in range(8):
            tiles, layers = random_tiles(rng), [int(layer) for layer in rng.integers(0, LAYOUT.layers, 3)]
            world.step(tiles, layers)
            size += size_of(tiles) * len(layers)
        assert world.right()
        assert world.ring.copied_bytes == size


def test_few_views_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the newest visits, whatever tiles come."""
    monkeypatch.setattr(tiles_of_kv, "_MOST_VIEWS", 5)
    rng = np.random.default_rng(5)
    with World(2) as world:
        for _ in range(20):
            world.step(random_tiles(rng), range(LAYOUT.layers))
            assert 0 < len(world.ring._copied) <= 5
            assert 0 < len(world.ring._lent) <= 5
        assert world.right()


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("seed", range(6))
def test_steps_may_be_broken_off_at_any_tile(slots: int, seed: int) -> None:
    rng = np.random.default_rng((slots, seed))
    with World(slots, Gates(delay=late(seed))) as world:
        for _ in range(20):
            tiles, layers = random_tiles(rng), range(LAYOUT.layers)
            world.ring.begin(tiles, layers)
            visits = [(layer, tile) for layer in layers for tile in tiles]
            left = int(rng.integers(len(visits) + 1))
            for layer, one in visits[:left]:
                world.use(layer, one)
            if left < len(visits) and rng.random() < 0.5:
                layer, one = visits[left]
                world.read(world.resting(layer, one), world.ring.take())
            if rng.random() < 0.5:
                world.ring.begin((), ())
        assert world.right()


def test_consecutive_blocks_are_copied_at_once() -> None:
    with World() as world:
        world.step([tile(3, 4, 5, 6), tile(9, 8), tile(1, 2, 7)], [1])
        world.settle()
        assert world.copies.copies == 2 * (1 + 2 + 2)


def test_slots_are_filled_before_they_are_asked_for() -> None:
    """As far as there are slots in `begin`, and one for each that is released."""
    tiles = [tile(block) for block in range(5)]
    with World(slots=3) as world:
        world.ring.begin(tiles, [0, 2])
        assert world.ring.copied_bytes == size_of(tiles[:3])
        world.use(0, tiles[0])
        assert world.ring.copied_bytes == size_of(tiles[:4])
        world.ring.begin((), ())
        with pytest.raises(AssertionError, match="take of tile 0 in a step of 0"):
            world.ring.take()
        assert world.ring.copied_bytes == size_of(tiles[:4])


def test_what_does_not_fit_or_comes_out_of_turn_is_refused() -> None:
    with World() as world:
        for wrong in (
            tile(*range(TILE + 1)),
            Tile(ids([1, 2]), LAYOUT.block_size),
            Tile(ids([1]), LAYOUT.block_size + 1),
            Tile((), 0),
        ):
            with pytest.raises(AssertionError, match=r"keys in|in a slot"):
                world.ring.begin([wrong], [0])
        world.ring.begin([tile(0), tile(1)], [0])
        with pytest.raises(AssertionError, match="not in use"):
            world.ring.release()
        world.ring.take()
        with pytest.raises(AssertionError, match="before the last one was released"):
            world.ring.take()
        k = torch.zeros(2 * LAYOUT.block_size, *heads_of(LAYOUT), dtype=torch.float16)
        with pytest.raises(AssertionError, match="for 1 blocks"):
            world.outbox.send(0, (k, k), ids([1]))
        with pytest.raises(AssertionError, match="in a slot of"):
            world.outbox.send(0, [k.repeat(TILE, 1, 1)] * 2, ids(range(2 * TILE)))


def test_waits_are_told_of_every_copy_and_use() -> None:
    trace = Trace()
    waits = StreamWaits(trace)
    tiles = [tile(2, 3), tile(5)]
    with World(waits=waits, gates=Gates(delay=late("copies"))) as world:
        world.step(tiles, [0, 2])
        world.settle()
        assert waits.stalled() > 0
    names = ["kv.0.0", "kv.0.1", "kv.2.0", "kv.2.1"]
    assert [name for track, name, *_ in trace._events if track == "compute"] == names
    copied = [(name, more["bytes"]) for track, name, _, _, more in trace._events if track == "host to device"]
    assert copied == list(zip(names, [size_of([one]) for one in tiles] * 2, strict=True))


# ---- there and back


class Growing:
    """A sequence that grows, and what its KV is."""

    def __init__(self, world: World, rng: np.random.Generator) -> None:
        self.world, self.rng = world, rng
        layout = world.layout
        self.k, self.v = (
            torch.zeros(TOKENS, 2 * heads_of(layout)[0], heads_of(layout)[1], dtype=torch.float16)[:, 1:3]
            for _ in range(2)
        )
        """Used anew for each layer, as activations are: strided, as they come from a fused projection."""
        self.page = torch.zeros(layout.block_bytes, dtype=torch.uint8)
        self.known: dict[tuple[int, int], Seen] = {}
        """By layer and block: bytes of K and V."""
        self.blocks: list[int] = []

    def tiles(self) -> list[Tile]:
        return [tile(*self.blocks[at : at + TILE]) for at in range(0, len(self.blocks), TILE)]

    def step(self, new: Sequence[int], demoted: Sequence[int] = ()) -> None:
        """Demote blocks, then in each layer compute a chunk, send it, and read all that was there before."""
        world, layout = self.world, self.world.layout
        size = layout.layer_bytes // 2
        for block in demoted:
            whole = random(layout.block_bytes, seed=int(self.rng.integers(1 << 30)))
            world.kernel(partial(self.page.copy_, whole))
            world.outbox.demote(self.page, HostBlockId(block))
            self.blocks.append(block)
            for layer in range(layout.layers):
                start = layer * layout.layer_bytes
                self.known[layer, block] = [
                    whole[start + half * size : start + (half + 1) * size].numpy() for half in range(2)
                ]
        tiles = self.tiles()
        world.ring.begin(tiles, range(layout.layers), world.outbox.landed())
        for layer in range(layout.layers):
            chunk, tokens = (
                [random(TILE, size, seed=int(self.rng.integers(1 << 30))) for _ in range(2)],
                len(new) * layout.block_size,
            )
            for target, bytes in zip((self.k, self.v), chunk, strict=True):
                world.kernel(partial(self.write, target, bytes.view(torch.float16).view(target.shape)))
            world.outbox.send(layer, (self.k[:tokens], self.v[:tokens]), ids(new))
            for block, k, v in zip(new, *(bytes[: len(new)] for bytes in chunk), strict=True):
                self.known[layer, block] = [k.numpy(), v.numpy()]
            for one in tiles:
                parts = [self.known[layer, block] for block in one.blocks]
                expected = [
                    np.concatenate([part[half] for part in parts]).reshape(one.keys, -1) for half in range(2)
                ]
                world.read(expected, world.ring.take())
                world.ring.release()
        self.blocks += new

    @staticmethod
    def write(target: Tensor, values: Tensor) -> None:
        np.copyto(target.numpy().view(np.uint16), values.numpy().view(np.uint16))

    def landed(self) -> bool:
        """Whether the host holds what it should, once all is done."""
        self.world.settle()
        return all(
            np.array_equal(np.concatenate(halves), self.world.pool.layer_rows(layer, block, 1)[0].numpy())
            for (layer, block), halves in self.known.items()
        )


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("delay", ["copies", "out", "compute", "kernel", 1, 2, 3])
def test_what_is_sent_comes_back(slots: int, delay: str | int) -> None:
    """Chunks sent layer by layer and blocks demoted whole, while what went before is read."""
    rng = np.random.default_rng((slots, delay if isinstance(delay, int) else len(delay)))
    with no_thread_left(), World(slots, Gates(delay=late(delay))) as world:
        sequence = Growing(world, rng)
        free = [int(block) for block in rng.permutation(BLOCKS)]
        while len(free) > TILE + 2:
            demoted = [free.pop() for _ in range(rng.integers(0, 3))]
            new = [free.pop() for _ in range(rng.integers(0, TILE + 1))]
            if rng.random() < 0.5:
                new.sort()
            sequence.step(new, demoted)
        assert world.right()
        assert sequence.landed()


def test_a_block_larger_than_a_staging_slot_is_demoted_in_parts() -> None:
    with World() as world:
        outbox = Outbox(
            world.pool, 2, LAYOUT.block_size, CPU, Streams(world.copies, world.out, world.computing)
        )
        whole, target = random(LAYOUT.block_bytes, seed=1), HostBlockId(3)
        outbox.demote(whole.clone(), target)
        outbox.landed().wait()
        assert torch.equal(world.pool.block(target), whole)
        assert world.out.copies == LAYOUT.layers


def test_tiles_are_attended_to_as_they_lie() -> None:
    """Merged, they give attention over the whole of the sequence, and none of them is copied for it."""
    layout = kv_of_heads(layers=2, block_size=4, kv_heads=2, head_dim=8, dtype="float32")
    with World(layout=layout, slots=2) as world:
        shape = (
            BLOCKS,
            layout.layers,
            2,
            layout.block_size,
            *heads_of(layout),
        )
        generator = torch.Generator().manual_seed(0)
        kv = torch.randn(shape, generator=generator)
        world.pool._arena.bytes.copy_(kv.flatten().view(torch.uint8))
        q = torch.randn(3, 4, 8, generator=generator)
        blocks, last = [5, 6, 7, 2, 9, 10, 1, 0, 20, 19], 3
        ring = TileRing(world.pool, 2, TOKENS, CPU, Streams(world.copies, world.out, CallerStream()))
        tiles = [
            tile(*blocks[at : at + TILE], short=1 if at + TILE >= len(blocks) else 0)
            for at in range(0, len(blocks), TILE)
        ]
        ring.begin(tiles, [1])
        state = None
        for _ in tiles:
            k, v = ring.take()
            assert k.is_contiguous()
            assert v.is_contiguous()
            out, lse = dense(q, k, v, LayerAttention(0.3), causal=False)
            if state is None:
                state = out.float().contiguous(), lse.clone()
            else:
                merge(*state, out, lse)
            ring.release()
        assert state is not None
        whole_k, whole_v = (
            kv[blocks, 1, half].flatten(0, 1)[: len(blocks) * layout.block_size - 4 + last]
            for half in range(2)
        )
        out, lse = dense_reference(q, whole_k, whole_v, LayerAttention(0.3), causal=False)
        torch.testing.assert_close(state, (out, lse))


# ---- without one of its waits


def both(right: Callable[[bool], bool]) -> None:
    """`right`, given whether to leave the wait out, says whether all kernels have seen their bytes."""
    assert right(False)
    assert not right(True)


def passes(gates: Gates, place: Hashable, mutant: bool) -> None:
    """A place that is passed without the wait, and not with it."""
    assert gates.passes(place, LONG if mutant else BRIEF) == mutant


@pytest.mark.parametrize("visit", range(4))
def test_arithmetic_must_wait_for_its_copy(visit: int) -> None:
    def right(mutant: bool) -> bool:
        # Of V, which is the last.
        gates = Gates([("copies", 2 * visit + 1)])
        with World(3, gates) as world:
            world.computing.deaf = mutant
            world.step([tile(4, 5), tile(8, 9)], [0, 1])
            passes(gates, ("kernel", visit), mutant)
            gates.open()
            return world.right()

    both(right)


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("broken_off", [False, True])
def test_a_slot_must_not_be_filled_while_its_tile_is_read(slots: int, broken_off: bool) -> None:
    """Neither by the step that goes on, nor by one that begins when it has been broken off with the tile in
    use."""

    def right(mutant: bool) -> bool:
        gates = Gates([("kernel", 0)])
        tiles = [tile(block) for block in range(slots + 1)]
        with World(slots, gates) as world:
            world.copies.deaf = mutant
            world.ring.begin(tiles, [0])
            world.read(world.resting(0, tiles[0]), world.ring.take())
            if broken_off:
                world.ring.begin(tiles[::-1], [1])
            else:
                world.ring.release()
            passes(gates, ("copies", 2 * slots), mutant)
            if mutant:
                world.copies.mark().wait()
            gates.open()
            return world.right()

    both(right)


def test_a_slot_must_not_be_filled_before_its_tile_is_released() -> None:
    def right(mutant: bool) -> bool:
        gates, tiles = Gates(), [tile(0), tile(1)]
        with World(1, gates) as world:
            world.ring.begin(tiles, [0])
            kv = world.ring.take()
            if mutant:
                world.ring.release()
            passes(gates, ("copies", 3), mutant)
            world.read(world.resting(0, tiles[0]), kv)
            if not mutant:
                world.ring.release()
            return world.right()

    both(right)


def sent(world: World, how: str, block: int, seed: int) -> Callable[[], bool]:
    """Send or demote something to the block; whether that has arrived."""
    layout, whole = world.layout, random(world.layout.block_bytes, seed=seed)
    if how == "demote":
        world.outbox.demote(whole.clone(), HostBlockId(block))
        return lambda: torch.equal(world.pool.block(HostBlockId(block)), whole)
    row = whole[: layout.layer_bytes]
    k, v = row.view(torch.float16).view(2, layout.block_size, *heads_of(layout)).clone()
    world.outbox.send(1, (k, v), ids([block]))
    return lambda: torch.equal(world.pool.layer_rows(1, block, 1)[0], row)


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("how", ["send", "demote"])
def test_staging_must_not_be_filled_before_it_has_been_emptied(slots: int, how: str) -> None:
    def right(mutant: bool) -> bool:
        gates = Gates([("out", 0)])
        with World(slots, gates) as world:
            world.computing.deaf = mutant
            arrived = [sent(world, how, block, block) for block in range(slots + 1)]
            copies = {"send": 2, "demote": 1}[how]
            passes(gates, ("compute", copies * (slots + 1) - 1), mutant)
            gates.open()
            world.settle()
            return all(one() for one in arrived)

    both(right)


@pytest.mark.parametrize("how", ["send", "demote"])
def test_staging_must_not_be_emptied_before_it_has_been_filled(how: str) -> None:
    def right(mutant: bool) -> bool:
        copies = {"send": 2, "demote": 1}[how]
        gates = Gates([("compute", copies - 1)])
        with World(1, gates) as world:
            world.out.deaf = mutant
            arrived = sent(world, how, 3, 1)
            passes(gates, ("out", copies - 1), mutant)
            gates.open()
            world.settle()
            return arrived()

    both(right)


@pytest.mark.parametrize("how", ["send", "demote"])
def test_a_block_must_not_be_read_before_it_has_landed(how: str) -> None:
    def right(mutant: bool) -> bool:
        gates = Gates([("out", 0)])
        with World(2, gates) as world:
            sent(world, how, 3, 1)
            world.ring.begin([tile(3)], [1], None if mutant else world.outbox.landed())
            kv = world.ring.take()
            found = [x.flatten(1).view(torch.uint8).numpy() for x in kv]
            seen: Seen = []
            world.kernel(lambda: seen.extend(array.copy() for array in found))
            passes(gates, ("kernel", 0), mutant)
            gates.open()
            world.settle()
            return all(
                np.array_equal(one, other) for one, other in zip(seen, world.resting(1, tile(3)), strict=True)
            )

    both(right)


# ---- interrupts

TILES = [tile(3, 4, 9), tile(7, short=2), tile(1, 0)]


def used(world: World) -> None:
    """The first tile is released, the second read and in use."""
    world.ring.begin(TILES, [0, 1])
    world.use(0, TILES[0])
    world.read(world.resting(0, TILES[1]), world.ring.take())


def ready(world: World) -> None:
    world.ring.begin(TILES, [0, 1])
    world.use(0, TILES[0])


RING_CALLS: dict[str, tuple[Callable[[World], None], Callable[[World], Callable[[], object]]]] = {
    "begin": (
        lambda world: world.step(TILES, [0]),
        lambda world: partial(world.ring.begin, TILES[::-1], [2, 0]),
    ),
    "begin, unreleased": (used, lambda world: partial(world.ring.begin, TILES[::-1], [2, 0])),
    "take": (ready, lambda world: world.ring.take),
    "release": (used, lambda world: world.ring.release),
    "begin, of nothing": (used, lambda world: partial(world.ring.begin, (), ())),
}
"""By name: what is done before, and what is interrupted."""


@pytest.mark.parametrize("name", RING_CALLS)
@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("at_once", [False, True], ids=["threads", "at_once"])
def test_an_interrupt_anywhere_in_the_ring_does_no_harm(name: str, slots: int, at_once: bool) -> None:
    before, called = RING_CALLS[name]
    place, interrupted = len(name) % STRIDE, True
    while interrupted:
        with World(slots, Gates(delay=late(place)), at_once=at_once, waits=StreamWaits(None)) as world:
            before(world)
            interrupted = cut_short(called(world), place, ("penstock", "threading"))
            assert within(LONG, partial(world.step, TILES[1:] + TILES, [1, 2]))
            assert world.right()
        place += STRIDE
    assert place > 6


@pytest.mark.parametrize("how", ["send", "demote"])
@pytest.mark.parametrize("at_once", [False, True], ids=["threads", "at_once"])
def test_an_interrupt_anywhere_in_the_outbox_does_no_harm(how: str, at_once: bool) -> None:
    """What is sent later arrives, and what was interrupted has arrived in parts or whole, without a byte of
    what came later."""
    place, interrupted = 0, True
    while interrupted:
        with World(1, Gates(delay=late("out")), at_once=at_once) as world:
            first = sent(world, how, 0, 1)
            old = world.pool.block(HostBlockId(5)).clone()
            new = random(LAYOUT.block_bytes, seed=2)
            interrupted = cut_short(partial(sent, world, how, 5, 2), place)
            later = [sent(world, how, block, block) for block in (6, 7)]
            world.outbox.landed().wait()
            assert first()
            assert all(one() for one in later)
            found = world.pool.block(HostBlockId(5))
            if how == "send":
                row = slice(LAYOUT.layer_bytes, 2 * LAYOUT.layer_bytes)
                old, new, found = old[row], new[: LAYOUT.layer_bytes], found[row]
            halves = [x.view(-1, LAYOUT.layer_bytes // 2) for x in (found, old, new)]
            assert all(
                torch.equal(one, was) or torch.equal(one, will)
                for one, was, will in zip(*halves, strict=True)
            )
            if not interrupted:
                assert torch.equal(found, new)
        place += STRIDE
    assert place > 6


def test_no_run_lies_on_both_sides_of_the_border() -> None:
    assert runs([3, 4, 5, 6, 1, 2], 5) == [(0, 3, 2), (2, 5, 2), (4, 1, 2)]
    assert runs([4, 5], 4) == [(0, 4, 2)]
