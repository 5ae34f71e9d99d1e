"""Measure decode attention over paged KV, over a sweep of tunings: bytes of K and V read per second, beside
the best read rate of the device.

    PYTHONPATH=src python3 benchmarks/decode_attention.py --out decode_attention.json

Prints one row per shape (the built-in tuning, then the best found) and the tuning that does best over all
shapes of a block size; ends with one JSON line. Every tuning is checked against plain arithmetic before it is
timed. Layers of a pool of at least 1 GiB are visited in turn inside a CUDA graph, so nothing is found in the
L2 cache. Without a GPU, with TRITON_INTERPRET=1, it walks the same path over tiny shapes.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from recording import need_commit, write
from torch import Tensor

from penstock.ops.attention.inputs import LayerAttention, Rows
from penstock.ops.triton.attention import paged_decode
from penstock.ops.triton.tuning import DecodeTuning, decode_tuning

DIM = 128
SCALE = 1 / math.sqrt(DIM)
SHARED_MEMORY = 227 * 1024
"""Bytes a program may use on Hopper."""


@dataclass(frozen=True)
class Shape:
    name: str
    lengths: tuple[int, ...]
    block_size: int
    heads: int = 32
    kv_heads: int = 8

    @property
    def kv_bytes(self) -> int:
        return sum(self.lengths) * self.kv_heads * DIM * 2 * 2


def shapes(block_size: int, tiny: bool) -> list[Shape]:
    if tiny:
        return [Shape("1 x 200", (200,), block_size), Shape("3 ragged", (64, 0, 150), block_size)]
    rng = torch.Generator().manual_seed(7)
    ragged = tuple(torch.randint(100, 8000, (64,), generator=rng).tolist())
    lone = (65536,) + (1000,) * 31
    return [
        Shape("1 x 2K", (2048,), block_size),
        Shape("1 x 32K", (32768,), block_size),
        Shape("1 x 128K", (131072,), block_size),
        Shape("32 x 2K", (2048,) * 32, block_size),
        Shape("32 x 8K", (8192,) * 32, block_size),
        Shape("64 x 2K", (2048,) * 64, block_size),
        Shape("64 x 8K", (8192,) * 64, block_size),
        Shape("64 ragged", ragged, block_size),
        Shape("64K and 31 x 1K", lone, block_size),
        Shape("256 x 540", (540,) * 256, block_size, 16),
        # On one device of two; what does not depend on how much is read shows in the shorter ones.
        *(
            Shape(f"64 x {length}, half", (length,) * 64, block_size, 16, 4)
            for length in (64, 512, 2048, 4096)
        ),
    ]


def tunings(tiny: bool) -> Iterator[DecodeTuning]:
    """Compiled variants vary slowest; `workers_per_sm` needs no compilation."""
    if tiny:
        yield from (DecodeTuning(16, 4, 2, 1), DecodeTuning(64, 4, 2, 2))
        return
    for (tile, warps), depth in product(
        [(32, 2), (32, 4), (64, 4), (64, 8), (128, 4), (128, 8)], [1, 2, 3, 4]
    ):
        footprint = tile * DIM * 2 * 2 * depth
        if footprint + 16384 <= SHARED_MEMORY and footprint >= 32768:
            for workers in (1, 2, 3, 4, 6, 8, 12):
                yield DecodeTuning(tile, warps, depth, workers)


class Setting:
    """One shape's pool, table and query. Blocks are scattered over the pool at random.

    heads_first: in a block a head's tokens lie beside each other, instead of a token's heads.
    """

    def __init__(self, shape: Shape, device: str, at_least: int, *, heads_first: bool, joins: bool) -> None:
        self.shape = shape
        size = shape.block_size
        counts = [-(-n // size) for n in shape.lengths]
        blocks = sum(counts)
        self.layers = max(1, min(64, -(-at_least // shape.kv_bytes)))
        inner = (shape.kv_heads, size) if heads_first else (size, shape.kv_heads)
        pool = torch.empty(blocks, self.layers, 2, *inner, DIM, dtype=torch.bfloat16, device=device)
        for block in pool.split(max(1, (1 << 28) // pool[0].numel())):
            block.normal_()
        self.pool = pool.transpose(3, 4) if heads_first else pool
        order = torch.randperm(blocks, dtype=torch.int32).split(counts)
        self.table = torch.nn.utils.rnn.pad_sequence(list(order), batch_first=True).to(device)
        self.lengths = torch.tensor(shape.lengths, dtype=torch.int32, device=device)
        self.q = torch.randn(len(shape.lengths), shape.heads, DIM, dtype=torch.bfloat16, device=device)
        self.out = torch.empty_like(self.q)
        self.lse = torch.empty(self.q.shape[:2], dtype=torch.float32, device=device)
        self.arrivals = (
            torch.zeros(len(shape.lengths) * shape.kv_heads, dtype=torch.int32, device=device)
            if joins
            else None
        )

    def call(self, layer: int, tuning: DecodeTuning | None) -> tuple[Tensor, Tensor]:
        cache, longest = (self.pool[:, layer, 0], self.pool[:, layer, 1]), max(self.shape.lengths)
        rows = Rows(len(self.q), self.table, self.lengths, longest, arrivals=self.arrivals)
        reads = LayerAttention(SCALE)
        return paged_decode(self.q, cache, rows, reads, out=self.out, lse=self.lse, tuning=tuning), self.lse

    def call_all(self, tuning: DecodeTuning | None) -> None:
        for layer in range(self.layers):
            self.call(layer, tuning)

    def worst_error(self, tuning: DecodeTuning | None, rows: int = 4) -> float:
        """Largest error relative to the largest value, over a few rows of one layer; the log-sum-exp counts
        like the output."""
        layer = self.layers - 1
        out, lse = self.call(layer, tuning)
        worst = 0.0
        for row in {round(i * (len(self.shape.lengths) - 1) / (rows - 1)) for i in range(rows)}:
            length = self.shape.lengths[row]
            if length == 0:
                worst = max(worst, float(out[row].abs().max()), float(lse[row].isfinite().any()))
                continue
            blocks = self.table[row, : -(-length // self.shape.block_size)].long()
            k, v = (
                self.pool[blocks, layer, i]
                .flatten(0, 1)[:length]
                .float()
                .repeat_interleave(self.shape.heads // self.shape.kv_heads, 1)
                for i in (0, 1)
            )
            score = torch.einsum("hd,thd->ht", self.q[row].float(), k) * SCALE
            want = torch.einsum("ht,thd->hd", score.softmax(1), v)
            worst = max(worst, float((out[row].float() - want).abs().max() / want.abs().max()))
            worst = max(worst, float((lse[row] - score.logsumexp(1)).abs().max()))
        return worst


def seconds_each(work: Callable[[], None], calls: int, at_least: float = 0.02) -> float:
    """Seconds per call of a `work` that makes `calls` of them: replays of a graph on a GPU, the median of
    five bursts."""
    if not torch.cuda.is_available():
        start = time.perf_counter()
        work()
        return (time.perf_counter() - start) / calls
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def burst(replays: int) -> float:
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000 / replays

    once = burst(2)
    replays = max(1, math.ceil(at_least / 5 / once))
    return statistics.median(burst(replays) for _ in range(5)) / calls


@triton.jit
def _read(x, sums, steps, WIDTH: tl.constexpr, UNROLL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each program sums `steps` stretches of WIDTH numbers."""
    at = tl.arange(0, WIDTH) + tl.program_id(0).to(tl.int64) * steps * WIDTH
    total = tl.zeros([WIDTH], tl.int32)
    for step in tl.range(0, steps, loop_unroll_factor=UNROLL):
        total += tl.load(x + at + step.to(tl.int64) * WIDTH)
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))


def read_ceiling() -> float:
    """The most bytes per second a plain sum over 8 GiB reads."""
    numbers = 1 << 31
    x = torch.ones(numbers, dtype=torch.int32, device="cuda")
    best = 0.0
    for width, warps, steps in product([2048, 4096, 8192], [4, 8], [4, 16, 64]):
        programs = numbers // (width * steps)
        sums = torch.empty(programs, dtype=torch.int32, device="cuda")

        def work(
            programs: int = programs,
            sums: Tensor = sums,
            steps: int = steps,
            width: int = width,
            warps: int = warps,
        ) -> None:
            _read[(programs,)](x, sums, steps, WIDTH=width, UNROLL=4, num_warps=warps)

        seconds = seconds_each(work, 1)
        assert int(sums.sum()) == numbers
        best = max(best, numbers * 4 / seconds)
    return best


def measure(setting: Setting, tuning: DecodeTuning | None) -> float:
    return seconds_each(lambda: setting.call_all(tuning), setting.layers)


def sweep(setting: Setting, ceiling: float, tiny: bool, deadline: float) -> dict[str, Any]:
    shape = setting.shape
    error = setting.worst_error(None)
    assert error < 2e-2, (shape, error)
    builtin = measure(setting, None)
    row: dict[str, Any] = {
        "shape": shape.name, "block_size": shape.block_size, "kv_mb": shape.kv_bytes / 1e6,
        "layers": setting.layers,
        "builtin": asdict(decode_tuning(DIM, 2, shape.block_size)), "builtin_us": builtin * 1e6,
        "error": error, "sweep": [],
    }  # fmt: skip
    checked: set[tuple[int, int, int, bool]] = set()

    def read(tuning: DecodeTuning) -> dict[str, Any]:
        variant = (tuning.tile, tuning.warps, tuning.depth, tuning.overlap)
        try:
            if variant not in checked:
                error = setting.worst_error(tuning)
                assert error < 2e-2, (shape, tuning, error)
                checked.add(variant)
            return {**asdict(tuning), "us": measure(setting, tuning) * 1e6}
        except triton.runtime.errors.OutOfResources as problem:
            return {**asdict(tuning), "us": math.inf, "why": str(problem)}

    for tuning in tunings(tiny):
        if time.monotonic() > deadline:
            break
        row["sweep"].append(read(tuning))
    row["overlap"] = []
    if not tiny:  # the join launched early, for the built-in tuning and the best found
        best = sorted(row["sweep"], key=lambda entry: entry["us"])[:1]
        for key in [row["builtin"], *({name: entry[name] for name in row["builtin"]} for entry in best)]:
            row["overlap"].append(read(DecodeTuning(**{**key, "overlap": not key["overlap"]})))
    for entry in [row, *row["sweep"], *row["overlap"]]:
        us = entry.get("us", entry.get("builtin_us"))
        entry["tb_s"] = shape.kv_bytes / us / 1e6
        entry["of_ceiling"] = entry["tb_s"] * 1e12 / ceiling if ceiling else None
    return row


def label(tuning: dict[str, Any]) -> str:
    return f"{tuning['tile']:>4} {tuning['warps']:>5} {tuning['depth']:>5} {tuning['workers_per_sm']:>7}"


def table_row(row: dict[str, Any], entry: dict[str, Any], tuning: dict[str, Any], note: str) -> str:
    share = f"{100 * entry['of_ceiling']:6.1f} %" if entry["of_ceiling"] else "      -"
    us = entry.get("us", entry.get("builtin_us"))
    return (
        f"{row['shape']:<16} {row['block_size']:>5} {note:<8} {label(tuning)} {us:>10.1f} "
        f"{entry['tb_s']:>7.3f} {share}"
    )


def overall(rows: list[dict[str, Any]]) -> list[tuple[float, dict[str, Any]]]:
    """Tunings by the geometric mean of their time over the best time of each shape; 1 is best everywhere."""
    scores: dict[tuple[int, ...], list[float]] = {}
    for row in rows:
        best = min((entry["us"] for entry in row["sweep"]), default=math.inf)
        for entry in row["sweep"]:
            key = (entry["tile"], entry["warps"], entry["depth"], entry["workers_per_sm"])
            scores.setdefault(key, []).append(entry["us"] / best)
    whole = {
        key: ratios
        for key, ratios in scores.items()
        if len(ratios) == len(rows) and math.isfinite(max(ratios))
    }
    ranked = [
        (statistics.geometric_mean(ratios), asdict(DecodeTuning(*key))) for key, ratios in whole.items()
    ]
    return sorted(ranked, key=lambda pair: pair[0])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write all readings to this JSON file")
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--shapes", nargs="+", help="names, or parts of them")
    parser.add_argument(
        "--heads-first", action="store_true", help="in a block, a head's tokens beside each other"
    )
    parser.add_argument(
        "--joins", action="store_true", help="everything in one launch, as in a step of many rows"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=400,
        help="stop sweeping after this long; the built-in tuning is always read",
    )
    args = parser.parse_args()
    need_commit(args.out)
    tiny = not torch.cuda.is_available()
    device = "cpu" if tiny else "cuda"
    deadline = time.monotonic() + args.seconds
    ceiling = 0.0 if tiny else read_ceiling()
    print(f"device read ceiling {ceiling / 1e12:.3f} TB/s; heads of {DIM}, bf16")
    print(f"{'shape':<16} {'block':>5} {'':<8} tile warps depth workers         us    TB/s  of ceiling")
    found: dict[str, Any] = {
        "device_read_tb_s": ceiling / 1e12, "heads_first": args.heads_first, "joins": args.joins, "rows": [],
        "overall": {},
    }  # fmt: skip
    for index, block_size in enumerate(args.block_sizes):
        rows = []
        cases = [
            one
            for one in shapes(block_size, tiny)
            if not args.shapes or any(part in one.name for part in args.shapes)
        ]
        for number, shape in enumerate(cases):
            left = len(cases) * (len(args.block_sizes) - index) - number
            setting = Setting(
                shape, device, 0 if tiny else 1 << 30, heads_first=args.heads_first, joins=args.joins
            )
            row = sweep(
                setting, ceiling, tiny, time.monotonic() + max(0.0, deadline - time.monotonic()) / left * 1.5
            )
            rows.append(row)
            print(table_row(row, row, row["builtin"], "built-in"))
            for entry in sorted(row["sweep"], key=lambda entry: entry["us"])[:3]:
                print(table_row(row, entry, entry, "found"))
            for entry in row["overlap"]:
                print(table_row(row, entry, entry, "overlap" if entry["overlap"] else "apart"), flush=True)
        found["rows"] += rows
        found["overall"][block_size] = [
            {"over_best": score, **tuning} for score, tuning in overall(rows)[:10]
        ]
        for entry in found["overall"][block_size][:5]:
            print(
                f"block {block_size}, all shapes: {label(entry)}  {entry['over_best']:.3f} x the best of each"
            )
    if args.out:
        write(args.out, found)
    brief = [
        {
            "shape": row["shape"],
            "block": row["block_size"],
            "us": row["builtin_us"],
            "tb_s": row["tb_s"],
            "of_ceiling": row["of_ceiling"],
        }
        for row in found["rows"]
    ]
    print(
        json.dumps(
            {
                "device_read_tb_s": found["device_read_tb_s"],
                "decode_attention": brief,
                "overall": found["overall"],
            }
        )
    )


if __name__ == "__main__":
    main()
