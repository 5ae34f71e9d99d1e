"""Time products in half precision on a CPU: torch's own, and those that pass through float32.

    PYTHONPATH=src python3 benchmarks/half_products.py --out half_products.json

Each product is timed in processor seconds of one thread, in turns, and its least time is kept.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from recording import Recording
from torch import Tensor
from torch.nn import functional as F

from penstock.ops.widened import widened_product, widens

SHAPES = ((1024, 256), (3072, 768), (4096, 1024))
ROWS = (2, 4, 8, 16, 32, 64, 128, 512)


def least(works: list[Callable[[], object]], rounds: int) -> list[float]:
    """Return the least milliseconds of each work, taken in turns behind one that is not timed."""
    found: list[list[float]] = [[] for _ in works]
    for number in range(rounds + 1):
        for work, times in zip(works, found, strict=True):
            begin = time.process_time()
            work()
            if number:
                times.append((time.process_time() - begin) * 1e3)
    return [min(times) for times in found]


def measure(dtype: torch.dtype, height: int, inner: int, rows: int, rounds: int) -> dict[str, object]:
    """Return the times of one product, and what the engine takes."""
    x, weight = torch.randn(rows, inner).to(dtype), torch.randn(height, inner).to(dtype)
    out: Tensor = x.new_empty(rows, height)
    own, wide = least([lambda: F.linear(x, weight), lambda: widened_product(x, weight, out)], rounds)
    taken = "float32" if widens(x) else "own"
    print(f"{dtype!s:<16} {height:>5} x {inner:<5} {rows:>4} rows  {own:9.3f}  {wide:9.3f} ms  {taken}")
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "out": height,
        "in": inner,
        "rows": rows,
        "own_ms": own,
        "float32_ms": wide,
        "taken": taken,
    }


def main() -> None:
    """Measure all shapes and rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="file for the results")
    asked = parser.parse_args()
    recording = Recording(asked.out)
    torch.set_num_threads(1)
    products = [
        measure(dtype, height, inner, rows, asked.rounds)
        for dtype in (torch.bfloat16, torch.float16)
        for height, inner in SHAPES
        for rows in ROWS
    ]
    recording.part("products", {"rounds": asked.rounds, "threads": 1, "products": products})


if __name__ == "__main__":
    main()
