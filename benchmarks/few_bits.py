"""Time products with matrices of few bits and of GGUF's blocks on a GPU, beside the bytes that they read and
the device's best rate.

    PYTHONPATH=src python3 benchmarks/few_bits.py --out few_bits.json
    PYTHONPATH=src python3 benchmarks/few_bits.py --sweep --formats int4 --rows 1,16
    PYTHONPATH=src python3 benchmarks/few_bits.py --formats Q4_K,Q6_K --rows 1,16
    PYTHONPATH=src python3 benchmarks/few_bits.py --peer --formats int4,fp8    beside humming-kernels
    PYTHONPATH=src python3 benchmarks/few_bits.py --tiny      the same code over tiny shapes, interpreted

Every product is checked against the reference in float32 before it is timed. A graph holds a call for each of
as many matrices as fill 1 GiB, so none is found in the L2 cache. `share` is the bytes of codes and scales a
second, over the read rate that is measured in the same run. `--sweep` times every way to cut a product.
"""

import argparse
import itertools
import math
import os
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", str(int("--tiny" in sys.argv)))  # read when kernels are imported

import few_bits_peer
import torch
from decode_attention import read_ceiling, seconds_each
from recording import need_commit, write
from torch import Tensor

from penstock.arch.formats.floats import Float4, Float8
from penstock.arch.formats.format import WeightFormat, matrix
from penstock.arch.formats.gguf import FORMATS as GGUF
from penstock.arch.formats.gguf import Blocks
from penstock.arch.formats.gptq import GPTQPacking
from penstock.arch.formats.integers import Integers
from penstock.ops.kernels import pdl_launches
from penstock.ops.matrix import Matrix
from penstock.ops.triton import blocks, few_bits
from penstock.ops.triton.blocks import BlocksTuning
from penstock.ops.triton.few_bits import FewBitsTuning
from penstock.ops.triton.few_bits_mma import MOST_ROWS, MmaTuning
from penstock.ops.triton.few_bits_row import RowTuning

FORMATS: Mapping[str, WeightFormat] = {
    "int4": Integers(checkpoint_group=128, packing=GPTQPacking()),
    "int4 with zeros": Integers(checkpoint_group=128, zeros=True, packing=GPTQPacking()),
    "int4 by 64 with zeros": Integers(checkpoint_group=64, zeros=True, packing=GPTQPacking()),
    "int4 by 32": Integers(checkpoint_group=32, packing=GPTQPacking()),
    "int8": Integers(bits=8, checkpoint_group=128, packing=GPTQPacking()),
    "fp8": Float8(block=(128, 128)),
    "mxfp8": Float8(block=(1, 32), scale="e8m0"),
    "mxfp4": Float4(),
    "nvfp4": Float4(checkpoint_group=16, scale="float8_e4m3fn", second="weight_scale_2"),
    **GGUF,
}
KERNELS: Mapping[str, Any] = {"few_bits": few_bits, "blocks": blocks}
Tuning = FewBitsTuning | RowTuning | MmaTuning | BlocksTuning
SHAPES = {"qkv": (6144, 4096), "out": (4096, 4096), "gate and up": (28672, 4096), "down": (4096, 14336)}
MORE = {
    "0.6B gate and up": (6144, 1024), "0.6B down": (1024, 3072), "14B qkv": (7168, 5120),
    "70B qkv": (10240, 8192), "70B gate and up": (57344, 8192), "70B down": (8192, 28672),
}  # fmt: skip
"""Shapes on which nothing was tuned."""
TINY = {"tiny": (64, 256)}
AT_LEAST, MAX_ERROR = 1 << 30, 2e-2


def random_matrix(
    format: WeightFormat, shape: tuple[int, int], seed: int, device: str | None = None
) -> Matrix:
    """Return a matrix of random codes and small scales, on the device."""
    device = device or ("cpu" if "--tiny" in sys.argv else "cuda")
    rng, sources = torch.Generator(device).manual_seed(seed), [matrix("model.layers.0.mlp.w.weight", *shape)]
    cut, parts = format.cut(sources), dict[str, Tensor]()
    for stored in cut.stored("bfloat16", sources):
        if isinstance(cut, Blocks) and stored.repack is not None:
            raw = random_blocks(cut, stored.sources[0].shape, rng)
            parts[stored.name] = stored.repack([raw]).contiguous()
            continue
        kind: torch.dtype = getattr(torch, stored.dtype)
        among = stored.random or (range(256) if kind is torch.uint8 else None)
        if among is None:
            made = torch.empty(stored.shape, device=device).uniform_(0.005, 0.02, generator=rng)
        else:
            made = torch.randint(among.start, among.stop, stored.shape, generator=rng, device=device)
        parts[stored.name] = made.to(kind)
    return Matrix(cut, shape, parts)


def random_blocks(format: Blocks, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """Return any blocks of a file with small scales, uint8 `[out, bytes]`: codes with all their bits."""
    raw = torch.randint(256, shape, generator=rng, device=rng.device, dtype=torch.uint8)
    for at in format.block.halves:
        each = raw.view(-1, format.block.size)[:, at : at + 2]
        scales = torch.empty(len(each), 1, device=rng.device).uniform_(0.005, 0.02, generator=rng)
        each[:] = scales.half().view(torch.uint8)
    return raw


def tunings(sweep: bool, format: WeightFormat, height: int, rows: int) -> Iterator[Tuning | None]:
    """Yield ways to cut a product of `rows` with a matrix of `height` rows, the usual one first."""
    yield None
    if sweep and isinstance(format, Blocks):
        for cols, splits, stages, warps in itertools.product(
            (16, 32, 64, 128), (1, 2, 4, 8, 16), (2, 3, 4), (1, 2, 4)
        ):
            if 16 <= cols // warps <= 64:
                yield BlocksTuning(cols, splits, stages, warps)
        return
    if sweep and not isinstance(format, Blocks) and rows <= MOST_ROWS:
        for tiles, warps in itertools.product((1, 2, 4), (4, 8, 16)):
            yield MmaTuning(tiles, warps)
    if sweep and rows == 1:
        for each, runs, warps in itertools.product((1, 2, 4, 8), (16, 32), (2, 4, 8)):
            if each * warps <= 32:
                yield RowTuning(each, runs, warps)
    elif sweep:
        for (cols, warps), splits, stages in itertools.product(
            ((64, 4), (128, 4), (128, 8), (256, 8)), (1, 2, 4, 8, 16), (2, 3, 4)
        ):
            programs = height // cols * splits
            if 110 <= programs <= 1100:  # One a multiprocessor or eight.
                yield FewBitsTuning(cols, 128, splits, stages, warps)


def main() -> None:
    """Run what was asked for, print a line for each and write the results."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--rows", default="1,4,16,64")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--early", action="store_true", help="begin launches before the one before has ended")
    parser.add_argument("--peer", action="store_true", help="time humming-kernels beside them")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    need_commit(given.out)
    shapes = TINY if given.tiny else {name: (SHAPES | MORE)[name] for name in given.shapes.split(",")}
    ceiling = 1.0 if given.tiny else read_ceiling()
    print(f"read alone {ceiling / 1e12:.2f} TB/s")
    found = list[dict[str, Any]]()
    names, counts = given.formats.split(","), [int(rows) for rows in given.rows.split(",")]
    peers = {
        name: few_bits_peer.products(name, list(shapes.values()), counts, AT_LEAST)
        for name in names
        if given.peer and name in few_bits_peer.CONFIGS
    }
    for name, (label, shape) in itertools.product(names, shapes.items()):
        first = random_matrix(FORMATS[name], shape, 0)
        moved = sum(part.nbytes for part in first.parts.values())
        count = 2 if given.tiny else math.ceil(AT_LEAST / moved)
        matrices = [first, *(random_matrix(FORMATS[name], shape, seed) for seed in range(1, count))]
        plain = first.dequantised(torch.empty(0))
        for rows in counts:
            x = torch.randn(rows, shape[1], device=plain.device).bfloat16()
            kernels = KERNELS[first.format.kernels]
            assert kernels.suits(x, first), name
            want = x.float() @ plain.T
            ways = list(tunings(given.sweep, first.format, shape[0], rows))
            # Compiled side by side; what needs more memory than there is fails here, and is passed over.
            with ThreadPoolExecutor(1 if given.tiny else 12) as pool:  # The interpreter takes one at a time.
                done = list(pool.map(lambda way, x=x, first=first: attempt(x, first, way), ways))
            for way, got in zip(ways, done, strict=True):
                if got is None:
                    continue
                error = float((got.float() - want).abs().max() / want.abs().max())
                if not error < MAX_ERROR:
                    sys.exit(f"{name}, {label}, {rows} rows, {way}: error {error:.2e}; nothing was timed")

                def work(
                    x: Tensor = x,
                    matrices: list[Matrix] = matrices,
                    way: Tuning | None = way,
                    kernels: Any = kernels,
                ) -> None:
                    with pdl_launches(given.early):
                        for one in matrices:
                            kernels.few_rows(x, one, tuning=way)

                seconds = seconds_each(work, count)
                line = {
                    "format": name, "matrix": label, "shape": shape, "rows": rows, "tuning": str(way),
                    "us": seconds * 1e6, "share": moved / seconds / ceiling, "error": error,
                }  # fmt: skip
                found.append(line)
            these = found[-len([got for got in done if got is not None]) :]
            if name in peers:
                these[0]["peer_us"] = seconds_each(*peers[name][shape, rows]) * 1e6
            usual, best = these[0], sorted(these, key=lambda one: float(one["us"]))[: 3 if given.sweep else 0]
            print(
                f"{name:16} {label:12} {rows:3} rows  {usual['us']:7.1f} us  {usual['share']:.1%}",
                f"peer {usual['peer_us']:.1f} us" if name in peers else "",
                *(f"  {one['us']:.1f} {one['share']:.1%} {one['tuning'].partition('(')[2]}" for one in best),
                flush=True,
            )
            if given.out:
                write(given.out, {"read": ceiling, "device": str(plain.device), "found": found})


def attempt(x: Tensor, weight: Matrix, way: Tuning | None) -> Tensor | None:
    """Return a product, or None where the device has too little memory for this way to cut it."""
    try:
        return KERNELS[weight.format.kernels].few_rows(x, weight, tuning=way)
    except Exception as fault:
        if "resource" not in str(fault) and "shared memory" not in str(fault):
            raise
        return None


if __name__ == "__main__":
    main()
