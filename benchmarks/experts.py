"""Time one layer's mixture of experts by kernels, in all and step by step, beside the bytes and operations it
needs, and beside a loop over experts.

    PYTHONPATH=src python3 benchmarks/experts.py --out experts.json
    PYTHONPATH=src python3 benchmarks/experts.py --sweep               products with other tunings too
    PYTHONPATH=src python3 benchmarks/experts.py --format mxfp4        experts of few bits: int4, fp8, nvfp4
    PYTHONPATH=src python3 benchmarks/experts.py --tiny --device cpu   the same code, tiny shapes, interpreted

The whole is checked against plain arithmetic before it is timed. A graph holds calls for several steps with
tokens of their own, so that experts are not found in the L2 cache. `ideal` is the larger of two: each used
expert's weights, and what passes between the products, at the read bandwidth, or the operations at the rate
of a large product, both measured in the same run. The loop takes one expert at a time and waits for the host
to learn which are used, as is done where there are no kernels; it is timed by the clock, for no graph can
hold it.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("TRITON_INTERPRET", str(int("cpu" in sys.argv)))  # read when kernels are imported

import torch
from decode_attention import read_ceiling, seconds_each
from few_bits import FORMATS, random_matrix
from recording import need_commit, write
from torch import Tensor

from penstock.arch.experts import ExpertKind
from penstock.arch.layout import GroupId, MixtureLayout
from penstock.arch.spec import MoeSpec, Router
from penstock.memory.probe import matmul_rate
from penstock.models.moe import choose as choose_experts
from penstock.models.moe import mixture
from penstock.ops import experts
from penstock.ops.experts import experts_reference
from penstock.ops.matrix import GroupViews, Matrix
from penstock.ops.triton import experts as triton_experts
from penstock.ops.triton import few_bits_experts as triton_few_bits_experts
from penstock.ops.triton import routing as triton_routing
from penstock.ops.triton.experts import ExpertTuning, combine
from penstock.ops.triton.routing import arrange, choose

DTYPE = torch.bfloat16
KERNELS = {
    "routing": triton_routing,
    "experts": triton_experts,
    "few_bits_experts": triton_few_bits_experts,
}
MAX_ERROR = 4e-2
"""Of the whole, relative to the largest value: a few roundings of what is between the products."""


@dataclass(frozen=True)
class Shape:
    name: str
    hidden: int
    inner: int
    experts: int
    top_k: int


SHAPES = (
    Shape("Qwen3-30B-A3B", 2048, 768, 128, 8),
    Shape("Mixtral-8x7B", 4096, 14336, 8, 2),
    Shape("gpt-oss-20b", 2880, 2880, 32, 4),
    Shape("gpt-oss-120b", 2880, 2880, 128, 4),
)
TINY = (Shape("tiny", 64, 24, 12, 3), Shape("tiny, odd", 50, 33, 4, 2))


class Layer:
    """Random experts in a format, and what is borrowed of them."""

    def __init__(self, shape: Shape, device: str, format: str) -> None:
        self.shape, self.device, self.format = shape, device, format
        self.generator = torch.Generator(device).manual_seed(0)
        self.weights = [
            {
                "gate_up": self.matrix(2 * shape.inner, shape.hidden, 2 * at),
                "down": self.matrix(shape.hidden, shape.inner, 2 * at + 1),
            }
            for at in range(shape.experts)
        ]
        parts = [[part for w in one.values() for part in w.parts.values()] for one in self.weights]
        self.bytes = sum(part.nbytes for part in parts[0])
        self.addresses = torch.tensor([[part.data_ptr() for part in one] for one in parts], device=device)
        self.moe = MoeSpec(shape.experts, shape.top_k, shape.inner, Router(normalise=True))
        self.formats = tuple(one.format for one in self.weights[0].values())
        self.mixtures = {0: MixtureLayout(shape.experts, self.formats)}
        self.kind = ExpertKind(self.formats)
        if not self.mixtures[0].kernels:
            sys.exit(f"{shape.name} in {format}: no kernel takes such experts many at a time")
        self.kernels = KERNELS[self.mixtures[0].kernels]

    def matrix(self, height: int, width: int, seed: int) -> Matrix:
        if self.format != "dense":
            return random_matrix(FORMATS[self.format], (height, width), seed, self.device)
        return Matrix.of(self.random(height, width).mul_(width**-0.5))

    def random(self, *size: int) -> Tensor:
        return torch.empty(size, dtype=DTYPE, device=self.device).normal_(generator=self.generator)

    def each(self, experts: Sequence[GroupId]) -> Iterator[tuple[GroupId, GroupViews]]:
        for group in experts:
            yield group, GroupViews(self.weights[group.expert], {}, ())

    def waves_of_views(self, experts: Sequence[GroupId]) -> Iterator[dict[GroupId, GroupViews]]:
        yield dict(self.each(experts))

    def table(self, layer: int) -> Tensor:
        return self.addresses


class Bench:
    """Some steps of so many tokens."""

    def __init__(self, layer: Layer, tokens: int, steps: int) -> None:
        self.layer, self.shape, self.tokens = layer, layer.shape, tokens
        self.steps = [
            (layer.random(tokens, self.shape.hidden), layer.random(tokens, self.shape.experts))
            for _ in range(steps)
        ]
        self.pairs = tokens * self.shape.top_k
        self.tuning = layer.kernels.expert_tuning(self.pairs, self.shape.experts, DTYPE)

    def whole(self, step: tuple[Tensor, Tensor]) -> Tensor:
        x, scores = step
        layer = self.layer
        choice = choose_experts(x, scores, layer.moe, layer.mixtures[0])
        return mixture(x, choice, layer.moe, 0, layer)

    def loop(self, step: tuple[Tensor, Tensor]) -> Tensor:
        with patch.object(experts, "_kernels", lambda device: None):
            return self.whole(step)

    def error(self) -> float:
        """Of the first step, relative to the largest value."""
        x, scores = self.steps[0]
        weights = [(one["gate_up"].dequantised(x), one["down"].dequantised(x)) for one in self.layer.weights]
        _, want = experts_reference(x, scores, self.layer.moe, weights)
        return float((self.whole((x, scores)).float() - want.float()).abs().max() / want.float().abs().max())

    def bounds(self) -> tuple[float, float]:
        """Bytes that a step must move, on average, and operations."""
        shape, item = self.shape, DTYPE.itemsize
        used = statistics.mean(
            int((choose(scores, self.layer.moe)[1].unique()).numel()) for _, scores in self.steps
        )
        between = self.pairs * (2 * shape.inner + 2 * shape.hidden) + 2 * self.tokens * shape.hidden
        return used * self.layer.bytes + between * item, 6.0 * self.pairs * shape.hidden * shape.inner

    def parts(self) -> Iterator[tuple[str, Callable[[int], object]]]:
        """Each kernel, or two, by itself."""
        shape, (x, _) = self.shape, self.steps[0]
        routed = [choose(scores, self.layer.moe) for _, scores in self.steps]
        h, y = x.new_empty(self.pairs, shape.inner), x.new_zeros(self.pairs, shape.hidden)
        yield "choose", lambda i: choose(self.steps[i][1], self.layer.moe)
        yield "arrange", lambda i: arrange(routed[i][1], shape.experts, self.tuning.rows)
        yield "products", self.products(self.tuning, h, y)
        yield "combine", lambda i: combine(y, routed[i][0])

    def products(self, tuning: ExpertTuning, h: Tensor, y: Tensor) -> Callable[[int], object]:
        shape = self.shape
        placed = [
            arrange(choose(scores, self.layer.moe)[1], shape.experts, tuning.rows)[:2]
            for _, scores in self.steps
        ]

        def call(i: int) -> None:
            x, every = self.steps[i][0], range(placed[i][1].shape[1])
            layer = self.layer
            layer.kernels.products(x, placed[i], layer.addresses, h, y, tuning, every, layer.kind)

        return call

    def sweep(self, tiny: bool) -> Iterator[tuple[ExpertTuning, float]]:
        """Tunings that a device takes, and the seconds of their products."""
        own, (x, _) = self.tuning, self.steps[0]
        h, y = x.new_empty(self.pairs, self.shape.inner), x.new_zeros(self.pairs, self.shape.hidden)
        near = [rows for rows in (16, 32, 64, 128) if own.rows / 2 <= rows <= 2 * own.rows]
        every = [
            ExpertTuning(*one, own.group) for one in product(near, (64, 128, 256), (64, 128), (4, 8), (3, 4))
        ]
        for tuning in every[: 2 if tiny else None]:
            if (
                tuning.rows + tuning.columns
            ) * tuning.depth <= 384 * 64 and tuning.rows * tuning.columns <= 4096 * tuning.warps:
                yield tuning, seconds(self.products(tuning, h, y), len(self.steps))


def seconds(call: Callable[[int], object], steps: int) -> float:
    def turns() -> None:
        for i in range(steps):
            call(i)

    return seconds_each(turns, steps)


def by_the_clock(call: Callable[[int], object], steps: int) -> float:
    """Seconds of a call, in the best of a few turns."""

    def turn() -> float:
        begin = time.perf_counter()
        for i in range(steps):
            call(i)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return (time.perf_counter() - begin) / steps

    return min(turn() for _ in range(3))


def rows_of(bench: Bench, rates: tuple[float, float], sweep: bool, tiny: bool) -> Iterator[dict[str, Any]]:
    error, steps = bench.error(), len(bench.steps)
    if not error < MAX_ERROR:
        sys.exit(
            f"{bench.shape.name}, {bench.tokens} tokens: error {error:.2e}, allowed {MAX_ERROR:.0e}; "
            "nothing was timed"
        )
    moved, operations = bench.bounds()
    ideal = max(moved / rates[0], operations / rates[1])
    named = {
        "shape": bench.shape.name,
        "format": bench.layer.format,
        "tokens": bench.tokens,
        "mb": moved / 1e6,
        "gflop": operations / 1e9,
        "ideal_us": ideal * 1e6,
    }
    whole = seconds(lambda i: bench.whole(bench.steps[i]), steps)
    yield {**named, "step": "whole", "us": whole * 1e6, "error": error, "tuning": asdict(bench.tuning)}
    for step, call in bench.parts():
        yield {**named, "step": step, "us": seconds(call, steps) * 1e6}
    yield {**named, "step": "loop", "us": by_the_clock(lambda i: bench.loop(bench.steps[i]), steps) * 1e6}
    if sweep:
        found = sorted(bench.sweep(tiny), key=lambda one: one[1])
        for tuning, took in found[:3]:
            text = (
                f"{tuning.rows} x {tuning.columns} x {tuning.depth}, {tuning.warps} warps, {tuning.stages} "
                f"stages, by {tuning.group}"
            )
            yield {**named, "step": f"products {text}", "us": took * 1e6, "tuning": asdict(tuning)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write all readings to this JSON file")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tokens", type=int, nargs="+", help="[1 16 64 256 8192]")
    parser.add_argument("--shapes", nargs="+", help="names, or parts of them")
    parser.add_argument("--format", choices=("dense", *FORMATS), default="dense")
    parser.add_argument(
        "--sweep", action="store_true", help="try other tunings; the best three of each are told"
    )
    args = parser.parse_args()
    need_commit(args.out)
    counts = args.tokens or ([1, 7] if args.tiny else [1, 16, 64, 256, 8192])
    on_device = args.device == "cuda"
    rates = (read_ceiling(), matmul_rate(torch.device("cuda"), DTYPE)) if on_device else (1e9, 1e9)
    told = f"device read ceiling {rates[0] / 1e12:.3f} TB/s, products {rates[1] / 1e12:.0f} TFLOP/s"
    print(told if on_device else "interpreted: times mean nothing")
    print(f"{'shape':<14} {'tokens':>6} {'step':<10} {'us':>10} {'ideal us':>9} {'ratio':>6}")
    rows = []
    if not on_device:
        patch.object(experts, "_kernels", lambda device: triton_experts).start()
        patch.object(experts, "triton_kernels", KERNELS.get).start()
    with torch.inference_mode():
        for shape in TINY if args.tiny else SHAPES:
            if args.shapes and not any(name in shape.name for name in args.shapes):
                continue
            layer = Layer(shape, args.device, args.format)
            for tokens in counts:
                bench = Bench(layer, tokens, (20 if tokens <= 256 else 3) if on_device else 2)
                for row in rows_of(bench, rates, args.sweep, args.tiny):
                    rows.append(row)
                    print(
                        f"{row['shape']:<14} {row['tokens']:>6} {row['step']:<10} {row['us']:>10.1f} "
                        f"{row['ideal_us']:>9.1f} "
                        f"{row['us'] / row['ideal_us']:>6.2f}",
                        flush=True,
                    )
            del layer
    if args.out:
        write(args.out, {"read_bytes_s": rates[0], "operations_s": rates[1], "rows": rows})


if __name__ == "__main__":
    main()
