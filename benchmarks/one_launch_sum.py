"""A sum over the GPUs of one machine in one launch of a kernel, through memory that all of them see, beside NCCL's.

    PYTHONPATH=src python3 benchmarks/one_launch_sum.py --out one_launch_sum.json
    PYTHONPATH=src python3 benchmarks/one_launch_sum.py --tiny --device cpu      interpreted, between processes

It is checked before it is timed: many sums of random sizes and random numbers, each as all ranks compute it by themselves, with ranks
that are late on purpose.

How it works. Every rank has a window that the others see, with two slots. A program of each rank puts its piece of x into its own slot,
says so to the same program of all other ranks, waits until they have said so, and adds up the pieces in the order of ranks.

Why this is safe. A piece is written before it is said to be there: a barrier among the program's threads, then a release for the whole
system, that the others' acquire and their barrier follow. A slot is written again two sums later, and by then all others have said that
they have come to the sum between, which a rank's stream begins when the sum before is over: nobody reads the slot any more. Numbers of sums
wrap around and are compared by their difference. Who waits also looks at a word in host memory, by which the host ends all waiting.
"""

import argparse
import dataclasses
import importlib
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", str(int("cpu" in sys.argv)))  # read when Triton is imported, by other ranks as well

import torch
import triton
import triton.language as tl
from execution import row
from tensor_parallel import recorded, timed
from torch import Tensor
from torch._C._distributed_c10d import FileStore, _SymmetricMemory

from penstock.bench.machine import machine
from penstock.parallel.group import Group
from penstock.parallel.launch import launch
from penstock.parallel.seat import Seat

Found = dict[str, object]
OFTEN = 100


@triton.jit(do_not_specialize=["size", "rank"])  # type: ignore[untyped-decorator]
def sum_kernel(  # type: ignore[no-untyped-def]
    x, windows, flags, ended, stop, size, rank, capacity, RANKS: tl.constexpr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr
) -> None:
    """windows, flags: int64 addresses of all ranks' slots, and of what has been said to each, which is int32 `[ranks, programs]`.
    ended: int32 `[programs]`, how many sums each program of this rank has ended."""
    program = tl.program_id(0)
    at = program * BLOCK + tl.arange(0, BLOCK)
    there = at < size
    number = tl.load(ended + program) + 1
    slot = (number & 1) * capacity
    own = tl.load(windows + rank).to(tl.pointer_type(x.dtype.element_ty))
    tl.store(own + slot + at, tl.load(x + at, mask=there), mask=there)
    tl.debug_barrier()  # all threads' stores before the release of one
    for other in tl.static_range(RANKS):
        if other != rank:
            theirs = tl.load(flags + other).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(theirs + rank * PROGRAMS + program, number, sem="release", scope="sys")
    said = tl.load(flags + rank).to(tl.pointer_type(tl.int32))
    for other in tl.static_range(RANKS):
        if other != rank:
            seen = tl.atomic_add(said + other * PROGRAMS + program, 0, sem="acquire", scope="sys")
            while (seen - number < 0) & (tl.load(stop, volatile=True) == 0):
                seen = tl.atomic_add(said + other * PROGRAMS + program, 0, sem="acquire", scope="sys")
    tl.debug_barrier()  # the acquire of one before all threads' loads
    total = tl.zeros([BLOCK], tl.float32)
    for other in tl.static_range(RANKS):
        theirs = tl.load(windows + other).to(tl.pointer_type(x.dtype.element_ty))
        total += tl.load(theirs + slot + at, mask=there, other=0.0, cache_modifier=".cg").to(tl.float32)
    tl.store(x + at, total.to(x.dtype.element_ty), mask=there)
    tl.store(ended + program, number)


class Sums:
    """Sums in place of contiguous tensors of up to `capacity` elements, in the order of the current stream."""

    def __init__(self, group: Group, folder: Path, dtype: torch.dtype, capacity: int, block: int, first: int = 0) -> None:
        """first: what programs have ended to begin with, for numbers that wrap around."""
        self.rank, self.ranks, self._block = group.rank, group.ranks, block
        self._capacity, self._programs = capacity, -(-capacity // block)
        said = group.ranks * self._programs * 4
        size = 2 * capacity * dtype.itemsize + said
        if group.device.type == "cuda":
            _SymmetricMemory.set_group_info("sums", group.rank, group.ranks, FileStore(str(folder / "store"), group.ranks))
            window = _SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, group.device, "sums")
            self._handle = _SymmetricMemory.rendezvous(window, "sums")
            starts = list(self._handle.buffer_ptrs)
        else:
            files = [torch.from_file(str(folder / f"window {rank}"), True, size, dtype=torch.uint8) for rank in range(group.ranks)]
            window, self._files, starts = files[group.rank], files, [file.data_ptr() for file in files]
        self._said = window[2 * capacity * dtype.itemsize :].view(torch.int32)
        self._said.fill_(first)
        self._windows = torch.tensor(starts, device=group.device)
        self._flags = self._windows + 2 * capacity * dtype.itemsize
        self._ended = torch.full((self._programs,), first, dtype=torch.int32, device=group.device)
        self.stop = torch.zeros(1, dtype=torch.int32, pin_memory=group.device.type == "cuda")
        if group.device.type == "cuda":
            torch.cuda.synchronize(group.device)
        group.barrier()

    def all_reduce(self, x: Tensor) -> None:
        assert x.is_contiguous()
        assert x.numel() <= self._capacity, x.shape
        sum_kernel[(triton.cdiv(x.numel(), self._block),)](
            x,
            self._windows,
            self._flags,
            self._ended,
            self.stop,
            x.numel(),
            self.rank,
            self._capacity,
            RANKS=self.ranks,
            BLOCK=self._block,
            PROGRAMS=self._programs,
            num_warps=4,
        )


@dataclass(frozen=True, slots=True)
class Scale:
    tiny: bool
    folder: str

    @property
    def sizes(self) -> tuple[int, ...]:
        return (8, 40) if self.tiny else (4096, 8 * 4096, 64 * 4096, 256 * 4096)

    @property
    def dtype(self) -> torch.dtype:
        """The interpreter rounds to bfloat16 in another way."""
        return torch.float32 if self.tiny else torch.bfloat16

    @property
    def rounds(self) -> int:
        return 400 if self.tiny else 4000


def piece_of(rank: int, turn: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What a rank adds in a turn, the same wherever it is made."""
    generator = torch.Generator().manual_seed(turn * 97 + rank)
    return torch.randn(size, generator=generator).to(dtype).to(device)


def check(sums: Sums, group: Group, scale: Scale) -> int:
    """Raises AssertionError if a sum is not what it should be, or not the same to the bit. How many there were."""
    device, rng, late = group.device, random.Random(5), random.Random(group.rank)
    turns = scale.rounds // 10
    sizes = [rng.randrange(1, max(scale.sizes) + 1) for _ in range(turns)]
    made = [[piece_of(rank, turn, size, scale.dtype, device) for rank in range(group.ranks)] for turn, size in enumerate(sizes)]
    found = []
    for one in made:
        x = one[group.rank].clone()
        if late.random() < 0.3:  # Before, between and behind what the others do.
            time.sleep(late.random() * 1e-3)
            if device.type == "cuda":
                torch.cuda._sleep(late.randrange(200_000))
        sums.all_reduce(x)
        found.append(x)
    for x, one in zip(found, made, strict=True):
        right = torch.stack([piece.float() for piece in one])
        total = right[0]
        for piece in right[1:]:
            total = total + piece
        assert torch.equal(x, total.to(x.dtype)), "a sum is wrong"
    return turns


def often(all_reduce: Callable[[Tensor], None], x: Tensor) -> None:
    for _ in range(OFTEN):
        all_reduce(x)


def measure(group: Group, scale: Scale) -> Found:
    """Microseconds of a sum inside a CUDA graph of many, by its bytes."""
    device, found = group.device, Found()
    # Numbers wrap around in the midst of the check.
    sums = Sums(group, Path(scale.folder), scale.dtype, max(scale.sizes), 16 if scale.tiny else 1024, (1 << 31) - scale.rounds // 20)
    found["checked"] = check(sums, group, scale)
    if device.type != "cuda":
        return found
    for size in scale.sizes:
        x, one = torch.zeros(size, dtype=scale.dtype, device=device), Found()
        for name, all_reduce in (("NCCL", group.all_reduce), ("one launch", sums.all_reduce)):
            one[name] = timed(recorded(partial(often, all_reduce, x), device)) / OFTEN * 1e6
            group.barrier()
        found[str(2 * size)] = one
    found["checked again"] = check(sums, group, scale)
    return found


def follow(seat: Seat, device: str, *scale: object) -> None:
    """On the other ranks."""
    where = torch.device("cpu") if device == "cpu" else torch.device("cuda", seat.rank)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    group = seat.group(where)
    measure(group, Scale(*scale))  # type: ignore[arg-type]
    group.barrier()
    group.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device("cpu") if args.device == "cpu" else torch.device("cuda", 0)
    with tempfile.TemporaryDirectory() as folder:
        scale = Scale(args.tiny, folder)
        crew = launch(
            args.ranks, importlib.import_module("one_launch_sum").follow, args.device, args.tiny, folder
        )  # By a name that others know.
        try:
            group = crew.group(device)
            found = measure(group, scale)
            group.barrier()
            group.close()
        finally:
            crew.close(10.0)
    for what, one in found.items():
        row(what if what.startswith("checked") else f"a sum of {int(what):,} bytes", json.dumps(one))
    if args.out:
        args.out.write_text(json.dumps({"environment": dataclasses.asdict(machine()), "ranks": args.ranks} | found))


if __name__ == "__main__":
    main()
