"""KV that streams between host and device on CUDA: strided copies are exact, and what is sent comes back,
whatever is late."""

import numpy as np
import pytest
import torch
from torch import Tensor

from layouts import heads_of, kv_of_heads
from penstock.kv.movement import tiles as tiles_of_kv
from penstock.kv.movement.hostpool import HostPool
from penstock.kv.movement.tiles import Outbox, Streams, Tile, TileRing
from penstock.memory.streams import CudaStream, Pieces
from penstock.step.plan import HostBlockId

CUDA = torch.device("cuda")
LAYOUT = kv_of_heads(layers=3, block_size=16, kv_heads=2, head_dim=64, dtype="bfloat16")
TILE = 4
TOKENS = TILE * LAYOUT.block_size
LATE = 5_000_000
"""Clock cycles, some milliseconds: far longer than any copy here."""


class Slow(CudaStream):
    cycles = 0

    def copy_rows(self, target: Tensor, source: Tensor) -> None:
        self._late()
        super().copy_rows(target, source)

    def copy_pieces(self, target: Tensor, source: Tensor, pieces: Pieces) -> None:
        self._late()
        super().copy_pieces(target, source, pieces)

    def _late(self) -> None:
        if self.cycles:
            with torch.cuda.stream(self._queue()):
                torch.cuda._sleep(self.cycles)


def on(device: torch.device, bytes: Tensor) -> Tensor:
    return bytes.to(device) if device.type == "cuda" else bytes.pin_memory()


@pytest.mark.parametrize(("rows", "width"), [(7, 48), (1, 48), (7, 1), (7, 64)])
def test_rows_that_stand_apart_are_copied_alone(rows: int, width: int) -> None:
    stream = CudaStream(CUDA)
    for there, here in ((torch.device("cpu"), CUDA), (CUDA, torch.device("cpu")), (CUDA, CUDA)):
        source = on(there, torch.randint(0, 256, (rows, 64), dtype=torch.uint8))[:, :width]
        target = on(here, torch.zeros(rows, 80, dtype=torch.uint8))
        torch.cuda.synchronize()
        stream.copy_rows(target[:, :width], source)
        stream.mark().wait()
        assert torch.equal(target[:, :width].cpu(), source.cpu())
        assert not target[:, width:].any()


def test_pieces_are_copied_alone() -> None:
    stream, rng = CudaStream(CUDA), np.random.default_rng(0)
    sizes = rng.integers(1, 9000, 300)
    pieces = np.stack((rng.permutation(300) * 9000, np.cumsum(sizes) - sizes, sizes), 1)
    for there, here in ((torch.device("cpu"), CUDA), (CUDA, torch.device("cpu")), (CUDA, CUDA)):
        source = on(there, torch.randint(0, 256, (int(sizes.sum()),), dtype=torch.uint8))
        target = on(here, torch.zeros(300 * 9000, dtype=torch.uint8))
        torch.cuda.synchronize()
        for some in (pieces[:200], pieces[200:], pieces[:0]):
            stream.copy_pieces(target, source, some)
        stream.mark().wait()
        expected, bytes = np.zeros(len(target), np.uint8), source.cpu().numpy()
        for at, start, size in pieces.tolist():
            expected[at : at + size] = bytes[start : start + size]
        assert np.array_equal(target.cpu().numpy(), expected)


@pytest.mark.parametrize("late", ["nothing", "copies", "out", "compute"])
@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("few", [0, 4])
def test_what_is_sent_comes_back(slots: int, late: str, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks sent layer by layer and a block demoted per step, while what went before is read; k, v and page
    are used anew at once."""
    monkeypatch.setattr(tiles_of_kv, "_FEW", few)
    copies = Slow(CUDA)
    streams = {
        "copies": copies,
        "out": Slow(CUDA, clock=copies.clock),
        "compute": Slow(CUDA, current=True, clock=copies.clock),
    }
    if late != "nothing":
        streams[late].cycles = LATE
    pool = HostPool(LAYOUT, 32, CUDA)
    lines = Streams(copies, streams["out"], streams["compute"])
    ring = TileRing(pool, slots, TOKENS, CUDA, lines)
    outbox = Outbox(pool, slots, TOKENS, CUDA, lines)
    truth = torch.randn(
        32,
        LAYOUT.layers,
        2,
        LAYOUT.block_size,
        *heads_of(LAYOUT),
        device=CUDA,
    ).bfloat16()
    free = [HostBlockId(block) for block in torch.randperm(32).tolist()]
    fused = torch.zeros(TOKENS, 6, LAYOUT.planes[0][0].width, dtype=torch.bfloat16, device=CUDA)
    page, k, v = torch.zeros_like(truth[0]), fused[:, 2:4], fused[:, 4:]
    blocks, seen = list[HostBlockId](), list[tuple[Tensor, Tensor]]()
    for _ in range(4):
        demoted, new = free.pop(), [free.pop() for _ in range(TILE)]
        page.copy_(truth[demoted])
        outbox.demote(page.view(-1).view(torch.uint8), demoted)
        page.zero_()
        blocks.append(demoted)
        tiles = [
            Tile(tuple(blocks[at : at + TILE]), len(blocks[at : at + TILE]) * LAYOUT.block_size)
            for at in range(0, len(blocks), TILE)
        ]
        ring.begin(tiles, range(LAYOUT.layers), outbox.landed())
        for layer in range(LAYOUT.layers):
            k.copy_(truth[new, layer, 0].flatten(0, 1))
            v.copy_(truth[new, layer, 1].flatten(0, 1))
            outbox.send(layer, (k, v), new)
            fused.zero_()
            for tile in tiles:
                for half, found in enumerate(ring.take()):
                    seen.append((found.clone(), truth[list(tile.blocks), layer, half].flatten(0, 1)))
                ring.release()
        blocks += new
    torch.cuda.synchronize()
    assert all(torch.equal(found, expected) for found, expected in seen)
    used = torch.stack([pool.block(block) for block in blocks])
    assert torch.equal(used, truth[blocks].cpu().reshape(len(blocks), -1).view(torch.uint8))
    pool.close()
