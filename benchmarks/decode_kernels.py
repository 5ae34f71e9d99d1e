"""Time the kernels of one layer of a decode step, and the kernel that draws tokens behind them: each inside a
CUDA graph, beside the bytes it must move and the device's best rate.

    PYTHONPATH=src python3 benchmarks/decode_kernels.py --out decode_kernels.json PYTHONPATH=src python3
    benchmarks/decode_kernels.py --tiny --device cpu      the same code over tiny shapes, interpreted

Every kernel is checked against plain arithmetic before it is timed. A graph holds 50 calls, each with buffers
of its own until they fill 1 GiB, so weights and KV are never found in the L2 cache; the activations of a few
rows are, as in a real step. `ideal` is the bytes at the read bandwidth measured in the same run. Variants of
a step stand side by side; the sum over a layer takes the first of each.
"""

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", str(int("cpu" in sys.argv)))  # read when kernels are imported

import torch
from decode_attention import read_ceiling, seconds_each
from recording import need_commit, write
from torch import Tensor
from torch.nn import functional as F

from penstock.ops.activation import silu_mul as silu_mul_plainly
from penstock.ops.attention.inputs import LayerAttention, Rows
from penstock.ops.kernels import pdl_launches
from penstock.ops.norm import add_rms_norm as add_rms_norm_plainly
from penstock.ops.project import HeadNorms, project_reference
from penstock.ops.sampling import DRAW_FIELDS, draw_reference
from penstock.ops.triton.attention import paged_decode, write_kv
from penstock.ops.triton.linear import one_row
from penstock.ops.triton.pointwise import project, rms_norm, rope_, silu_mul
from penstock.ops.triton.sampling import draw
from penstock.ops.triton.tuning import DecodeTuning, decode_tuning

DTYPE, EPS, BLOCK_SIZE = torch.bfloat16, 1e-6, 64
TUNINGS = (
    (1, 16384, 4),
    (1, 16384, 8),
    (2, 2048, 4),
    (4, 2048, 8),
    (2, 16384, 8),
    (1, 4096, 2),
    (2, 4096, 2),
    (2, 1024, 2),
)
"""Of products of one row: numbers of a program, its stretch of a row of weights, its warps."""
AT_LEAST = 1 << 30
"""Bytes of buffers that are visited in turn."""
MAX_ERROR = 2e-2
"""Of a kernel, relative to the largest value: two steps of bfloat16, and probabilities rounded before they
meet V."""


@dataclass(frozen=True)
class Shape:
    name: str
    heads: int
    kv_heads: int
    dim: int
    hidden: int
    inner: int
    qk_norm: bool
    vocab: int

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.dim


SHAPES = (
    Shape("8B", 32, 8, 128, 4096, 14336, False, 128256),
    Shape("0.6B", 16, 8, 128, 1024, 3072, True, 151936),
)
TINY = (Shape("tiny", 4, 2, 32, 64, 96, False, 90), Shape("tiny, norms", 6, 3, 16, 48, 80, True, 200))


@dataclass(frozen=True)
class Work:
    """One kernel, or the kernels that do the same: a call on one of its sets of buffers, and its error before
    anything is timed."""

    step: str
    variant: str
    bytes: int
    """That one call must move."""
    calls: list[Callable[[], object]]
    error: float
    times: int = 1
    """In a layer."""


class Bench:
    def __init__(self, shape: Shape, batch: int, device: str, repeats: int) -> None:
        self.shape, self.batch, self.device, self.repeats = shape, batch, device, repeats
        self.generator = torch.Generator(device).manual_seed(0)

    def random(self, *size: int) -> Tensor:
        return torch.empty(size, dtype=DTYPE, device=self.device).normal_(generator=self.generator)

    def sets(self, moved: int) -> int:
        """Sets of buffers of so many bytes."""
        return max(1, min(self.repeats, math.ceil(AT_LEAST / moved) if self.device != "cpu" else 2))

    def works(self) -> Iterator[Work]:
        """All steps but attention, in the order of a layer."""
        shape = self.shape
        yield self.norm()
        yield from self.linear("qkv", shape.hidden, shape.qkv)
        yield from self.projections()
        yield from self.linear("out", shape.heads * shape.dim, shape.hidden)
        yield from self.linear("gate and up", shape.hidden, 2 * shape.inner)
        yield self.gate()
        yield from self.linear("down", shape.inner, shape.hidden)

    def norm(self) -> Work:
        hidden, moved = self.shape.hidden, (4 * self.batch + 1) * self.shape.hidden * 2
        buffers = [
            (self.random(self.batch, hidden), self.random(self.batch, hidden))
            for _ in range(self.sets(moved))
        ]
        gain = self.random(hidden)
        (x, residual), plain = buffers[0], on_host(buffers[0][1])
        want = add_rms_norm_plainly(on_host(x), plain, on_host(gain), EPS)
        got, _ = rms_norm(x, gain, EPS, residual)
        worst = max(error(got, want), error(residual, plain))
        return Work(
            "norm",
            "",
            moved,
            [lambda x=x, r=r: rms_norm(x, gain, EPS, r) for x, r in buffers],
            worst,
            times=2,
        )

    def linear(self, name: str, inner: int, outer: int) -> Iterator[Work]:
        """By the library, and, of one row, by the kernel; with the gate behind it where there is one."""
        moved = (inner * outer + self.batch * (inner + outer)) * 2
        x, matrices = (
            self.random(self.batch, inner),
            [self.random(outer, inner) for _ in range(self.sets(moved))],
        )
        yield Work(name, "", moved, [lambda w=w: F.linear(x, w) for w in matrices], 0.0)
        if self.batch > 1:
            return
        gated = name == "gate and up"

        def by_row(w: Tensor, early: bool, tuning: tuple[int, int, int] | None) -> Tensor:
            with pdl_launches(early):
                return one_row(x, w, gated=gated, tuning=tuning)

        want = F.linear(x, matrices[0])
        want = silu_mul_plainly(on_host(want)) if gated else want
        for tuning in (None, *(TUNINGS if self.device != "cpu" else ())):
            for early in (False, True) if self.device != "cpu" else (False,):
                worst = error(by_row(matrices[0], early, tuning), want)
                how = "by one row" if tuning is None else "/".join(map(str, tuning))
                variant = f"{'early ' if early else ''}{how}"
                yield Work(
                    name,
                    variant,
                    moved,
                    [lambda w=w, e=early, t=tuning: by_row(w, e, t) for w in matrices],
                    worst,
                )

    def gate(self) -> Work:
        moved = 3 * self.batch * self.shape.inner * 2
        buffers = [self.random(self.batch, 2 * self.shape.inner) for _ in range(self.sets(moved))]
        worst = error(silu_mul(buffers[0]), silu_mul_plainly(on_host(buffers[0])))
        return Work("gate", "", moved, [lambda x=x: silu_mul(x) for x in buffers], worst)

    def projections(self) -> Iterator[Work]:
        """From the fused projection to pages: in one kernel, and in one for each step."""
        shape, batch = self.shape, self.batch
        turned, written = shape.heads + shape.kv_heads, 2 * shape.kv_heads
        moved = batch * (shape.dim * 2 * (turned + shape.kv_heads + turned + written) + shape.dim * 4)
        count = self.sets(moved)
        buffers = [self.random(batch, shape.qkv) for _ in range(count)]
        pool = self.random(batch, count, 2, BLOCK_SIZE, shape.kv_heads, shape.dim)
        slots = (torch.arange(batch) * BLOCK_SIZE + torch.arange(batch) % BLOCK_SIZE).to(self.device)
        angle = torch.rand(batch, shape.dim // 2, device=self.device) * 300
        cos, sin = angle.cos(), angle.sin()
        gains = (self.random(shape.dim), self.random(shape.dim)) if shape.qk_norm else None

        def fused(index: int) -> tuple[Tensor, Tensor, Tensor]:
            cache = pool[:, index].unbind(1)
            return project(buffers[index], cos, sin, cache, slots, heads=shape.heads, gains=gains, eps=EPS)

        def by_steps(index: int) -> None:
            heads = buffers[index].view(batch, -1, shape.dim)
            qk, v = heads[:, :turned], heads[:, turned:]
            if gains:
                parts = qk[:, : shape.heads], qk[:, shape.heads :]
                qk = torch.cat(
                    [rms_norm(part, gain, EPS)[0] for part, gain in zip(parts, gains, strict=True)], 1
                )
            rope_(qk, None, cos, sin)
            write_kv(qk[:, shape.heads :], v, *pool[:, index].unbind(1), slots)

        norms = HeadNorms(on_host(gains[0]), on_host(gains[1]), EPS) if gains else None
        sizes = {"heads": shape.heads, "kv_heads": shape.kv_heads}
        want = project_reference(on_host(buffers[0]), on_host(cos), on_host(sin), **sizes, norms=norms)
        got = fused(0)
        pages = [pool[:, 0, which].flatten(0, 1)[slots] for which in (0, 1)]
        worst = max(error(one, other) for one, other in zip((*got, *pages), (*want, *want[1:]), strict=True))
        indices = range(count)
        yield Work("project", "one kernel", moved, [lambda i=i: fused(i) for i in indices], worst)
        yield Work("project", "by steps", moved, [lambda i=i: by_steps(i) for i in indices], worst)

    def attentions(self, context: int, bound: int) -> Iterator[Work]:
        """Over rows of the same length and over ragged ones, of which a quarter is padding; `bound` as a
        graph would fix it."""
        ragged = [context * (1 + row % 4) // 4 if row % 4 else 0 for row in range(self.batch)]
        yield from self.attention(f"attention {context}", [context] * self.batch, bound)
        if self.batch >= 4:
            yield from self.attention(f"ragged to {context}", ragged, bound)

    def attention(self, name: str, lengths: list[int], bound: int) -> Iterator[Work]:
        shape, batch = self.shape, self.batch
        kv = sum(lengths) * shape.kv_heads * shape.dim * 2 * 2
        moved = kv + 2 * batch * shape.heads * shape.dim * 2
        counts = [-(-length // BLOCK_SIZE) for length in lengths]
        layers = self.sets(kv)
        pool = torch.empty(
            sum(counts), layers, 2, BLOCK_SIZE, shape.kv_heads, shape.dim, dtype=DTYPE, device=self.device
        )
        for part in pool.split(max(1, (1 << 28) // pool[0].numel())):
            part.normal_(generator=self.generator)
        order = torch.randperm(sum(counts), dtype=torch.int32).split(counts)
        table = torch.nn.utils.rnn.pad_sequence(list(order), batch_first=True).to(self.device)
        visible = torch.tensor(lengths, dtype=torch.int32, device=self.device)
        arrivals = torch.zeros(batch * shape.kv_heads, dtype=torch.int32, device=self.device)
        q, scale = self.random(batch, shape.heads, shape.dim), shape.dim**-0.5
        tuning = decode_tuning(shape.dim, 2, BLOCK_SIZE)
        overlap = DecodeTuning(tuning.tile, tuning.warps, tuning.depth, tuning.workers_per_sm, overlap=True)

        def call(layer: int, counters: Tensor | None, tuning: DecodeTuning | None) -> Tensor:
            rows = Rows(batch, table, visible, bound, arrivals=counters)
            return paged_decode(q, pool[:, layer].unbind(1), rows, LayerAttention(scale), tuning=tuning)

        def worst(got: Tensor) -> float:
            found = 0.0
            for row in {round(i * (batch - 1) / 3) for i in range(4)}:
                if lengths[row] == 0:
                    found = max(found, float(got[row].abs().max()))
                    continue
                at = table[row, : counts[row]].long()
                k, v = (
                    pool[at, 0, which].flatten(0, 1)[: lengths[row]].float().transpose(0, 1)
                    for which in (0, 1)
                )
                grouped = q[row].float().view(shape.kv_heads, -1, shape.dim)
                want = ((grouped @ k.mT * scale).softmax(-1) @ v).view(shape.heads, shape.dim)
                found = max(found, error(got[row], want))
            return found

        ways: list[tuple[str, Tensor | None, DecodeTuning | None]] = [
            ("one launch", arrivals, None),
            ("two launches", None, None),
        ]
        if self.device != "cpu":
            ways.append(("two, overlapped", None, overlap))
            for least in (1, 2, 4):
                tuned = replace(tuning, least=least)
                ways += [(f"one, least {least}", arrivals, tuned), (f"two, least {least}", None, tuned)]
        for variant, counters, tuned in ways:
            found = worst(call(0, counters, tuned))
            yield Work(
                name,
                variant,
                moved,
                [lambda i=i, c=counters, t=tuned: call(i, c, t) for i in range(layers)],
                found,
            )

    def draws(self) -> Iterator[Work]:
        """Of tokens, where no row takes the likeliest, by the kernel and by sorting. A look at the logits is
        all they must move."""
        batch, vocab = self.batch, self.shape.vocab
        moved = batch * vocab * 4
        buffers = [
            torch.randn(batch, vocab, generator=self.generator, device=self.device) * 3
            for _ in range(self.sets(moved))
        ]
        keys = torch.randint(2**32, (batch, 3), generator=self.generator, device=self.device)
        for name, top_k, top_p in (("all", 0, 1.0), ("top-p", 0, 0.95), ("top-k, top-p", 20, 0.95)):
            asked = torch.zeros(batch, DRAW_FIELDS, dtype=torch.float64, device=self.device)
            asked[:, 0] = torch.arange(batch)
            asked[:, 1], asked[:, 2], asked[:, 3], asked[:, 5:] = 0.7, top_k, top_p, keys
            tokens = torch.zeros(batch, dtype=torch.int64, device=self.device)
            draw(buffers[0], asked, tokens)
            others = sum(
                int(a) != int(b) for a, b in zip(tokens, draw_reference(buffers[0], asked), strict=True)
            )
            worst = 0.0 if others <= 1 else 1.0  # One may be at the threshold of top-p.
            sorts = top_k > 0 or top_p < 1
            calls = [lambda x=x, a=asked, t=tokens: draw(x, a, t) for x in buffers]
            yield Work(f"draw, {name}", "kernel", moved, calls, worst)
            calls = [lambda x=x, a=asked, s=sorts: draw_reference(x, a, sorts=s) for x in buffers]
            yield Work(f"draw, {name}", "sorted" if sorts else "by steps", moved, calls, 0.0)


def on_host(x: Tensor) -> Tensor:
    """A copy, where the ops are plain torch."""
    return x.to("cpu", copy=True)


def error(got: Tensor, want: Tensor) -> float:
    """Largest, relative to the largest value."""
    want = want.to(got.device).float()
    return float((got.float() - want).abs().max() / want.abs().max().clamp(min=1e-30))


def measure(work: Work, repeats: int) -> float:
    """Seconds of a call."""
    if not work.error < MAX_ERROR:
        sys.exit(
            f"{work.step} {work.variant}: error {work.error:.2e}, allowed {MAX_ERROR:.0e}; nothing was timed"
        )

    def turns() -> None:
        for turn in range(repeats):
            work.calls[turn % len(work.calls)]()

    return seconds_each(turns, repeats)


def rows_of(
    shape: Shape, batch: int, contexts: list[int], bound: int, device: str, repeats: int, ceiling: float
) -> Iterator[dict[str, Any]]:
    bench, sums = Bench(shape, batch, device, repeats), [0.0, 0.0]
    for work in bench.works():
        row = reading(bench, work, ceiling)
        if work.variant in ("", "one kernel"):
            sums[0] += work.times * row["us"]
            sums[1] += work.times * row["ideal_us"]
        yield row
    for work in bench.draws():
        yield reading(bench, work, ceiling)
    for context in contexts:
        for work in bench.attentions(context, bound):
            row = reading(bench, work, ceiling)
            yield row
            if work.variant == "one launch":
                total, ideal = sums[0] + row["us"], sums[1] + row["ideal_us"]
                named = {"shape": shape.name, "batch": batch, "step": "layer", "variant": work.step}
                yield {**named, "us": total, "mb": ideal * ceiling / 1e12, "ideal_us": ideal, "error": 0.0}


def reading(bench: Bench, work: Work, ceiling: float) -> dict[str, Any]:
    """A row of the table."""
    named = {"shape": bench.shape.name, "batch": bench.batch, "step": work.step, "variant": work.variant}
    us, ideal = measure(work, bench.repeats) * 1e6, work.bytes / ceiling * 1e6
    return {**named, "us": us, "mb": work.bytes / 1e6, "ideal_us": ideal, "error": work.error}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write all readings to this JSON file")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--batches", type=int, nargs="+", help="[1 16 64 256]")
    parser.add_argument(
        "--contexts", type=int, nargs="+", help="tokens in sight of every row [512 2048 16384]"
    )
    parser.add_argument(
        "--bound", type=int, default=1 << 17, help="longest row that the graph is made for [131072]"
    )
    args = parser.parse_args()
    need_commit(args.out)
    batches = args.batches or ([1, 5] if args.tiny else [1, 16, 64, 256])
    contexts = args.contexts or ([40, 150] if args.tiny else [512, 2048, 16384])
    repeats = 2 if args.device == "cpu" else 50
    ceiling = read_ceiling() if args.device == "cuda" else 1e9
    print(
        f"device read ceiling {ceiling / 1e12:.3f} TB/s"
        if args.device == "cuda"
        else "interpreted: times mean nothing"
    )
    print(
        f"{'shape':<12} {'batch':>5} {'step':<18} {'':<16} {'us':>9} {'MB':>10} {'ideal us':>9} {'ratio':>6}"
    )
    rows = []
    for shape in TINY if args.tiny else SHAPES:
        for batch in batches:
            for row in rows_of(shape, batch, contexts, args.bound, args.device, repeats, ceiling):
                rows.append(row)
                print(
                    f"{row['shape']:<12} {row['batch']:>5} {row['step']:<18} {row['variant']:<16} "
                    f"{row['us']:>9.2f} {row['mb']:>10.3f} "
                    f"{row['ideal_us']:>9.2f} {row['us'] / row['ideal_us']:>6.2f}",
                    flush=True,
                )
    if args.out:
        write(args.out, {"device_read_tb_s": ceiling / 1e12, "bound": args.bound, "rows": rows})


if __name__ == "__main__":
    main()
