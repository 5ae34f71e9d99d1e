"""Time our fused kernels beside plain torch and torch.compile, by parts of a decoder layer and for the whole
of one.

Four ways to compute the same, on the same tensors: *ours*, as the engine does; *plain*, the engine's own
functions with --no-kernels; *compiled*, the usual way to write the part in torch, by torch.compile; *tuned*,
the same by its mode max-autotune-no-cudagraphs, of whole layers. Each way's result is compared with ours
before anything is timed.

On a GPU the calls are recorded as a CUDA graph, as decode steps are in the engine, and replayed, so what is
compared is kernels; `eager_us` has the same calls launched one by one from Python. Weights are used in turn,
in as many copies as exceed the cache. A figure is the median of rounds, after rounds that are not counted;
the least and the greatest stand beside it. Nothing is compiled any more once --seconds are over; what is left
out then is said.

python benchmarks/fusions.py --json fusions.json            on a GPU, Qwen3 0.6B and 8B
python benchmarks/fusions.py --tiny --device cpu            on anything, in seconds
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.bench.machine import machine
from penstock.ops.activation import silu_mul
from penstock.ops.attention.attend import attend
from penstock.ops.attention.inputs import AttentionInputs, LayerAttention, QueryRun, RowGroup, Rows
from penstock.ops.kernels import plain_torch
from penstock.ops.linear import gated, linear
from penstock.ops.matrix import Matrix
from penstock.ops.norm import add_rms_norm
from penstock.ops.project import HeadNorms, project
from penstock.ops.sampling import draw, draw_reference, pack_sampling
from penstock.step.params import Sampling

EPS = 1e-6
BLOCK = 64
CACHE_BYTES = 256 << 20
"""Weights used in turn are no fewer: several times a GPU's cache."""


@dataclass(frozen=True)
class Shape:
    """Of a model's layer, and its vocabulary."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    dim: int
    inner: int
    vocab: int

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.dim


SHAPES = (
    Shape("Qwen3-0.6B", 1024, 16, 8, 128, 3072, 151936),
    Shape("Qwen3-8B", 4096, 32, 8, 128, 12288, 151936),
)
TINY = (Shape("tiny", 64, 4, 2, 16, 96, 500),)
Call = Callable[[int], object]
"""Of the number of a call, which says whose turn it is."""


@dataclass(frozen=True)
class Part:
    """ours: of the engine; plain is the same without kernels. usual: as torch.compile gets it, to be called
    with `given`. reset: undo what calls have changed, which both do in place where the engine does."""

    name: str
    ours: Call
    usual: Callable[..., object]
    given: Callable[[int], tuple[object, ...]]
    reset: Callable[[], object] = lambda: None
    tune: bool = False


def usual_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype) * weight


def usual_add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    residual.add_(x)
    return usual_norm(residual, weight), residual


def usual_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def usual_project(
    qkv: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, blocks: Tensor, offsets: Tensor,
    q_norm: Tensor, k_norm: Tensor, heads: int, kv_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    q, k, v = qkv.view(len(qkv), heads + 2 * kv_heads, -1).split((heads, kv_heads, kv_heads), 1)
    q, k = usual_rotate(usual_norm(q, q_norm), cos, sin), usual_rotate(usual_norm(k, k_norm), cos, sin)
    k_cache[blocks, offsets] = k
    v_cache[blocks, offsets] = v
    return q, k, v


def usual_gated(x: Tensor, weight: Tensor) -> Tensor:
    gate, up = F.linear(x, weight).chunk(2, dim=-1)
    return F.silu(gate) * up


def usual_silu_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


class Layer:
    """A layer's weights in several copies, KV of `rows` sequences of `past` tokens, or of a prompt of `rows`
    tokens, and a step over it."""

    def __init__(
        self, shape: Shape, rows: int, past: int | None, device: torch.device, dtype: torch.dtype
    ) -> None:
        """past: of each row, None: the rows are a prompt."""
        self.shape, self.rows, self.past = shape, rows, past
        rng = torch.Generator(device).manual_seed(rows)

        def random(*extents: int) -> Tensor:
            return (torch.randn(extents, generator=rng, device=device) / extents[-1] ** 0.5).to(dtype)

        one = {
            "qkv": (shape.qkv, shape.hidden),
            "out": (shape.hidden, shape.heads * shape.dim),
            "gate_up": (2 * shape.inner, shape.hidden),
            "down": (shape.hidden, shape.inner),
        }
        size = sum(a * b for a, b in one.values()) * dtype.itemsize
        self.copies = -(-CACHE_BYTES // size) if device.type == "cuda" else 1
        self.weights = [{name: random(*extents) for name, extents in one.items()} for _ in range(self.copies)]
        self.norm, self.head_norm = random(shape.hidden) + 1, random(shape.dim) + 1
        length = rows if past is None else past + 1
        per = -(-length // BLOCK)
        sequences = 1 if past is None else rows
        pool = random(sequences * per, 2, BLOCK, shape.kv_heads, shape.dim)
        self.cache = pool[:, 0], pool[:, 1]
        table = torch.arange(sequences * per, device=device).view(sequences, per)
        positions = (
            torch.arange(rows, device=device) if past is None else torch.full((rows,), past, device=device)
        )
        self.blocks = table[0, positions // BLOCK] if past is None else table[:, past // BLOCK].clone()
        self.offsets = positions % BLOCK
        self.table = table
        angles = positions[:, None] * torch.logspace(
            0, -6, shape.dim // 2, dtype=torch.float64, device=device
        )
        self.cos, self.sin = angles.cos().float(), angles.sin().float()
        self.x, self.before = random(rows, shape.hidden), random(rows, shape.hidden)
        self.residual = self.before.clone()
        slots = self.blocks * BLOCK + self.offsets
        if past is None:
            runs, some = (QueryRun(0, rows, 0, table[0]),), None
        else:
            group = RowGroup(torch.arange(rows, device=device), table, length, {None: None}, length, None)
            lengths = torch.full((rows,), length, dtype=torch.int32, device=device)
            arrivals = torch.zeros(rows * shape.kv_heads, dtype=torch.int32, device=device)
            runs, some = (), Rows(rows, table.int(), lengths, length, (group,), arrivals)
        self.inputs = AttentionInputs(self.blocks, self.offsets, slots, some, runs)

    def reset(self) -> None:
        self.residual.copy_(self.before)

    def ours(self, turn: int) -> tuple[Tensor, Tensor]:
        """What the engine computes for a layer."""
        w, shape, residual = self.weights[turn % self.copies], self.shape, self.residual
        qkv = linear(add_rms_norm(self.x, residual, self.norm, EPS), Matrix.of(w["qkv"]))
        norms = HeadNorms(self.head_norm, self.head_norm, EPS)
        q, k, v = project(qkv, self.cos, self.sin, self.cache, self.inputs, heads=shape.heads, norms=norms)
        seen = attend(q, k, v, self.cache, self.inputs, LayerAttention(shape.dim**-0.5)).out
        out = linear(seen.view(len(seen), -1), Matrix.of(w["out"]))
        normed = add_rms_norm(out, residual, self.norm, EPS)
        return linear(gated(normed, Matrix.of(w["gate_up"])), Matrix.of(w["down"])), residual

    def given(self, turn: int) -> tuple[object, ...]:
        w = self.weights[turn % self.copies]
        tensors = (
            self.x,
            self.residual,
            self.norm,
            self.head_norm,
            w["qkv"],
            w["out"],
            w["gate_up"],
            w["down"],
        )
        return *tensors, *self.cache, self.cos, self.sin, self.blocks, self.offsets, self.table

    def usual(
        self, x: Tensor, residual: Tensor, norm: Tensor, head_norm: Tensor, qkv: Tensor, out: Tensor,
        gate_up: Tensor, down: Tensor,
        k_cache: Tensor, v_cache: Tensor, cos: Tensor, sin: Tensor, blocks: Tensor, offsets: Tensor,
        table: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        shape, past = self.shape, self.past
        normed, _ = usual_add_norm(x, residual, norm)
        q, k, v = usual_project(
            F.linear(normed, qkv),
            cos,
            sin,
            k_cache,
            v_cache,
            blocks,
            offsets,
            head_norm,
            head_norm,
            shape.heads,
            shape.kv_heads,
        )
        if past is None:
            q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
            seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
        else:
            k, v = (cache[table].flatten(1, 2)[:, : past + 1].transpose(1, 2) for cache in (k_cache, v_cache))
            seen = F.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)
        normed, _ = usual_add_norm(F.linear(seen.reshape(len(x), -1), out), residual, norm)
        return F.linear(usual_gated(normed, gate_up), down), residual


def parts(
    shape: Shape, rows: int, past: int | None, device: torch.device, dtype: torch.dtype
) -> Iterator[Part]:
    layer = Layer(shape, rows, past, device, dtype)
    weights, copies = layer.weights, layer.copies
    norms = HeadNorms(layer.head_norm, layer.head_norm, EPS)
    fresh = torch.randn(rows, shape.qkv, device=device).to(dtype)
    products = fresh.clone()
    wide = torch.randn(rows, 2 * shape.inner, device=device).to(dtype)
    sizes = shape.heads, shape.kv_heads

    def add_norm(turn: int) -> tuple[Tensor, Tensor]:
        return add_rms_norm(layer.x, layer.residual, layer.norm, EPS), layer.residual

    def projected(turn: int) -> tuple[Tensor, Tensor, Tensor]:
        return project(
            products, layer.cos, layer.sin, layer.cache, layer.inputs, heads=shape.heads, norms=norms
        )

    def usual_projected(qkv: Tensor, *more: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return usual_project(qkv, *more, *sizes)  # type: ignore[call-arg, arg-type]

    places = *layer.cache, layer.blocks, layer.offsets
    yield Part(
        "add and norm",
        add_norm,
        usual_add_norm,
        lambda turn: (layer.x, layer.residual, layer.norm),
        layer.reset,
    )
    yield Part(
        "head norms, RoPE, KV write", projected, usual_projected,
        lambda turn: (products, layer.cos, layer.sin, *places, layer.head_norm, layer.head_norm),
        lambda: products.copy_(fresh),
    )  # fmt: skip
    yield Part("gate", lambda turn: silu_mul(wide), usual_silu_mul, lambda turn: (wide,))
    if past is not None:
        yield Part(
            "qkv product", lambda turn: linear(layer.x, Matrix.of(weights[turn % copies]["qkv"])), F.linear,
            lambda turn: (layer.x, weights[turn % copies]["qkv"]),
        )  # fmt: skip
        yield Part(
            "gated product", lambda turn: gated(layer.x, Matrix.of(weights[turn % copies]["gate_up"])),
            usual_gated,
            lambda turn: (layer.x, weights[turn % copies]["gate_up"]),
        )  # fmt: skip
        yield sampling(shape, rows, device)
    yield Part("layer", layer.ours, layer.usual, layer.given, layer.reset, tune=True)


def sampling(shape: Shape, rows: int, device: torch.device) -> Part:
    """Draws with temperature and top-p, which have to know a vocabulary's likeliest tokens."""
    logits = torch.randn(rows, shape.vocab, device=device) * 3
    setting = Sampling(0.8, 0, 0.9, 0.0, 1.0, 0.0, 0.0, (), 7, frozenset(), 0, 1, 1)
    asked = torch.from_numpy(pack_sampling(range(rows), [setting] * rows, range(rows))).to(device)
    tokens = torch.zeros(rows, dtype=torch.int64, device=device)

    def drawn(turn: int) -> Tensor:
        draw(logits, asked, tokens)
        return tokens

    return Part("draw, top-p", drawn, draw_reference, lambda turn: (logits, asked))


@dataclass(frozen=True)
class Timing:
    """Microseconds of a call."""

    median: float
    least: float
    most: float


def timed(call: Call, device: torch.device, calls: int, rounds: int, *, recorded: bool) -> Timing:
    """Of `rounds` rounds of `calls` calls, after three that are not counted. recorded: as a CUDA graph, which
    waits for nobody."""
    turn = 0

    def several() -> None:
        nonlocal turn
        for _ in range(calls):
            call(turn)
            turn += 1

    replay: Callable[[], object] = several
    if recorded:
        side = torch.cuda.Stream(device)
        with torch.cuda.stream(side):
            several()
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            several()
        replay = graph.replay
    found = []
    for number in range(rounds + 3):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = perf_counter()
        replay()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if number >= 3:
            found.append((perf_counter() - begin) / calls * 1e6)
    return Timing(statistics.median(found), min(found), max(found))


def apart(one: object, other: object) -> float:
    """The largest distance of two results' numbers, as a share of the largest number; of tokens, how many
    differ."""
    mine, theirs = (x if isinstance(x, tuple) else (x,) for x in (one, other))
    worst = 0.0
    for a, b in zip(mine, theirs, strict=True):
        assert isinstance(a, Tensor)
        assert isinstance(b, Tensor)
        if a.dtype == torch.int64:
            worst = max(worst, float((a != b).double().mean()))
        else:
            worst = max(
                worst, float((a.float() - b.float()).abs().max() / b.float().abs().max().clamp_min(1e-9))
            )
    return worst


def compare(
    part: Part, device: torch.device, calls: int, rounds: int, until: float, cpu_backend: str
) -> dict[str, object]:
    def kept(x: object) -> object:
        return tuple(y.clone() for y in x) if isinstance(x, tuple) else x.clone()  # type: ignore[attr-defined]

    backend = {} if device.type == "cuda" else {"backend": cpu_backend}
    part.reset()
    expected = kept(part.ours(0))
    ways: dict[str, tuple[Call, AbstractContextManager[None]]] = {
        "ours": (part.ours, nullcontext()),
        "plain": (part.ours, plain_torch()),
    }
    found: dict[str, object] = {"part": part.name}
    modes = {
        "compiled": None,
        **({"tuned": "max-autotune-no-cudagraphs"} if part.tune and device.type == "cuda" else {}),
    }
    for name, mode in modes.items():
        if perf_counter() > until:
            found[name] = {"left_out": "no time was left to compile it"}
            continue
        torch._dynamo.reset()
        compiled = torch.compile(part.usual, dynamic=False, **({"mode": mode} if mode else backend))  # type: ignore[call-overload]
        begin = perf_counter()
        try:
            compiled(*part.given(0))
        except Exception as fault:  # What it cannot compile is a result, too.
            found[name] = {"left_out": f"{type(fault).__name__}: {str(fault).splitlines()[0][:200]}"}
            continue
        found[f"{name}_compile_s"] = round(perf_counter() - begin, 2)
        ways[name] = (lambda turn, run=compiled: run(*part.given(turn))), nullcontext()  # type: ignore[misc]
    for name, (call, within) in ways.items():
        told: dict[str, object] = {}
        with within:
            part.reset()
            told["apart"] = apart(kept(call(0)), expected)
            eager = timed(call, device, calls, rounds, recorded=False)
            told["eager_us"] = vars(eager)
            if device.type == "cuda":
                try:
                    told["graph_us"] = vars(timed(call, device, calls, rounds, recorded=True))
                except Exception as fault:  # A call that waits for the device cannot be recorded.
                    told["graph_us"] = None
                    told["not_recorded"] = f"{type(fault).__name__}: {str(fault).splitlines()[0][:120]}"
                    torch.cuda.synchronize(device)
        found[name] = told
    return found


def line(found: dict[str, object]) -> str:
    def figure(name: str) -> str:
        told = found.get(name)
        if not isinstance(told, dict) or "eager_us" not in told:
            return f"{name} left out"
        eager, graph = told["eager_us"], told.get("graph_us")
        it = graph or eager
        spread = (
            f"{it['least']:.1f} to {it['most']:.1f}; eager {eager['median']:.1f}; apart {told['apart']:.1e}"
        )
        return f"{name} {it['median']:9.1f} ({spread})"

    return f"{found['part']:27s} " + "  ".join(
        figure(name) for name in ("ours", "plain", "compiled", "tuned") if name in found
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="small shapes, few rounds")
    parser.add_argument("--past", type=int, default=1024, help="tokens that decode looks back at")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of a prefill")
    parser.add_argument(
        "--seconds", type=float, default=180.0, help="after which nothing is compiled any more"
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--models", help="those alone whose names have this in them")
    parser.add_argument(
        "--no-tune", action="store_true", help="leave out max-autotune, which tries products for minutes"
    )
    parser.add_argument(
        "--cpu-backend", default="eager", help="of torch.compile: eager only traces; inductor takes minutes"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device, begin = torch.device(args.device), perf_counter()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch._inductor.config.fx_graph_cache = False
    cases = [(1, args.past), (64, args.past), (args.prompt, None)]
    rounds, shapes = args.rounds, SHAPES
    if args.tiny:
        cases, rounds, shapes = [(1, 100), (3, 100), (70, None)], 3, TINY
    result: dict[str, object] = {
        "bench": "fusions",
        "machine": asdict(machine()),
        "device": str(device),
        "dtype": str(dtype),
        "rounds": rounds,
    }
    tables: list[dict[str, object]] = []
    with torch.inference_mode():
        for shape in (one for one in shapes if not args.models or args.models in one.name):
            for rows, past in cases:
                title = {
                    "model": shape.name,
                    "rows": rows,
                    "past": past,
                    "kind": "prefill" if past is None else "decode",
                }
                behind = f" of {past} tokens" if past is not None else ""
                print(f"{shape.name}, {title['kind']}, {rows} rows{behind}: us a call", flush=True)
                found = []
                for part in parts(shape, rows, past, device, dtype):
                    part = replace(part, tune=part.tune and not args.no_tune)
                    calls = 2 if args.tiny else 20 if past is not None else 5
                    found.append(compare(part, device, calls, rounds, begin + args.seconds, args.cpu_backend))
                    print("  " + line(found[-1]), flush=True)
                tables.append(title | {"parts": found})
                result |= {"seconds": round(perf_counter() - begin, 1), "tables": tables}
                if args.json:  # After each table: what comes next may take longer than somebody waits.
                    args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{result['seconds']} s")


if __name__ == "__main__":
    main()
