"""Compiles what would be launched on a GPU, where there is none: kernels that the interpreter takes may be
none to the compiler, or may want more than a device has. Run as a program, since Triton decides when it is
imported whether it interprets.

    python tests/compiling.py [--early] [--ptx] 89 [a case ...]
"""

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import JITFunction, driver
from triton.runtime.jit import MockTensor

import quantised
from penstock.arch.experts import ExpertKind
from penstock.arch.formats.format import matrix
from penstock.arch.formats.gguf import FORMATS
from penstock.arch.spec import Activation, MoeSpec, Router, Scoring
from penstock.ops.attention.inputs import LayerAttention, PlacedRun, QueryRun, Rows, RunTree
from penstock.ops.handover import Handover, HandoverBox, StepRows
from penstock.ops.kernels import pdl_launches
from penstock.ops.matrix import Matrix
from penstock.ops.row_classes import CLASSES
from penstock.ops.sampling import DRAW_FIELDS
from penstock.ops.slots import COPIERS, Places, SlotArrays
from penstock.ops.triton import attention as triton_attention
from penstock.ops.triton import blocks as triton_blocks
from penstock.ops.triton import experts as triton_experts
from penstock.ops.triton import few_bits as triton_few_bits
from penstock.ops.triton import few_bits_experts as triton_few_bits_experts
from penstock.ops.triton import few_bits_mma, warp_tiles
from penstock.ops.triton import handover as triton_handover
from penstock.ops.triton import linear as triton_linear
from penstock.ops.triton import lora as triton_lora
from penstock.ops.triton import norms as triton_norms
from penstock.ops.triton import pace as triton_pace
from penstock.ops.triton import pointwise as triton_pointwise
from penstock.ops.triton import routing as triton_routing
from penstock.ops.triton import sampling as triton_sampling
from penstock.ops.triton import slots as triton_slots
from penstock.ops.triton import steps as triton_steps
from penstock.ops.triton import sums as triton_sums
from penstock.ops.triton import tiles as triton_tiles
from penstock.ops.triton.codes import kind_of
from penstock.ops.triton.routing import most_blocks

SHARED = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""By compute capability: bytes of shared memory that a program may have (CUDA C++ Programming Guide,
technical specifications)."""
BF16 = torch.bfloat16
HEADS, KV_HEADS, DIM, HIDDEN, INNER, VOCAB, SIZE = 32, 8, 128, 4096, 14336, 128256, 64


class Driver:
    """Of a device that is not there."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0


def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def pages(dim: int = DIM, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor]:
    return empty(2, 64, SIZE, KV_HEADS, dim, dtype=dtype).unbind(0)  # type: ignore[return-value]


def scores(
    heads: int, dtype: torch.dtype, *, window: int | None = None, cap: float | None = None,
    sinks: bool = False,
) -> LayerAttention:  # fmt: skip
    return LayerAttention(0.1, window, cap=cap, sinks=empty(heads, dtype=dtype) if sinks else None)


def decode(
    batch: int, *, heads: int = HEADS, dim: int = DIM, joins: bool = False, dtype: torch.dtype = BF16,
    lse: bool = False, **more: Any,
) -> None:  # fmt: skip
    """more: as of `scores`."""
    q, table = empty(batch, heads, dim, dtype=dtype), empty(batch, 64, dtype=torch.int32)
    arrivals = empty(batch * KV_HEADS, dtype=torch.int32) if joins else None
    rows = Rows(batch, table, empty(batch, dtype=torch.int32), 4096, arrivals=arrivals)
    level = empty(batch, heads, dtype=torch.float32) if lse else None
    layer = scores(heads, dtype, **more)
    triton_attention.paged_decode(q, pages(dim=dim, dtype=dtype), rows, layer, lse=level)


def run(
    tokens: int, *, heads: int = HEADS, dim: int = DIM, dtype: torch.dtype = BF16,
    ways: Sequence[str] = ("known", "tree", "placed"), **more: Any,
) -> None:  # fmt: skip
    """ways: whether the host knows where the run is, also of a tree, or the device. more: as of `scores`."""
    q, blocks = empty(tokens, heads, dim, dtype=dtype), empty(64, dtype=torch.int64)
    cache, layer = pages(dim=dim, dtype=dtype), scores(heads, dtype, **more)
    if "known" in ways:
        triton_attention.paged_run(q, cache, QueryRun(0, tokens, 2048, blocks), layer)
    if "tree" in ways:
        limits, bits = empty(tokens, dtype=torch.int32), empty(tokens, dtype=torch.int64)
        tree = RunTree(2048, (0,) * tokens, limits, {layer.window: bits})
        triton_attention.paged_run(q, cache, QueryRun(0, tokens, 2048, blocks, tree=tree), layer)
    if "placed" in ways:
        placed = PlacedRun(blocks.int(), empty(2, dtype=torch.int32), 4096)
        triton_attention.placed_run(q, cache, placed, layer, out=torch.empty_like(q))


def merge() -> None:
    state = lambda: (empty(16, HEADS, DIM), empty(16, HEADS, dtype=torch.float32))  # noqa: E731
    triton_tiles.merge_states(*state(), *state())


def write() -> None:
    triton_attention.write_kv(
        empty(8, KV_HEADS, DIM), empty(8, KV_HEADS, DIM), *pages(), empty(8, dtype=torch.int64)
    )


def pointwise(*, gains: bool) -> None:
    turns = empty(8, DIM // 2, dtype=torch.float32), empty(8, DIM // 2, dtype=torch.float32)
    triton_pointwise.rms_norm(empty(8, HIDDEN), empty(HIDDEN), 1e-5, empty(8, HIDDEN))
    triton_pointwise.silu_mul(empty(8, 2 * INNER))
    triton_pointwise.rope_(empty(8, HEADS, DIM), empty(8, KV_HEADS, DIM), *turns)
    norms = (empty(DIM), empty(DIM)) if gains else None
    triton_pointwise.project(
        empty(8, (HEADS + 2 * KV_HEADS) * DIM),
        *turns,
        pages(),
        empty(8, dtype=torch.int64),
        heads=HEADS,
        gains=norms,
        eps=1e-5,
    )


def partly_turned() -> None:
    """Of GLM-4.5 and of MiniMax-M2: half of each head is rotated, and all heads are normalised together."""
    turns = empty(8, DIM // 4, dtype=torch.float32), empty(8, DIM // 4, dtype=torch.float32)
    triton_pointwise.rope_(empty(8, HEADS, DIM), empty(8, KV_HEADS, DIM), *turns)
    qkv, where = empty(8, (HEADS + 2 * KV_HEADS) * DIM), empty(8, dtype=torch.int64)
    for gains in (None, (empty(DIM), empty(DIM))):
        triton_pointwise.project(qkv, *turns, pages(), where, heads=HEADS, gains=gains, eps=1e-5)
    sizes = HEADS * DIM, KV_HEADS * DIM
    gains = empty(sizes[0]), empty(sizes[1])
    triton_norms.norm_together(qkv, gains, sizes, 1e-5)
    triton_norms.norm_together(qkv, gains, sizes, 1e-5, triton_norms.sums_of_squares(qkv, *sizes))


def one_head() -> None:
    """Of one KV head: fewer numbers than a program has threads."""
    turns = empty(8, DIM // 2, dtype=torch.float32), empty(8, DIM // 2, dtype=torch.float32)
    triton_pointwise.rope_(empty(8, 1, DIM), empty(8, 1, DIM), *turns)
    cache = empty(2, 64, SIZE, 1, DIM).unbind(0)
    where = empty(8, dtype=torch.int64)
    triton_pointwise.project(empty(8, 3 * DIM), *turns, cache, where, heads=1, gains=None, eps=1e-5)


def linear() -> None:
    triton_linear.one_row(empty(1, HIDDEN), empty(6144, HIDDEN))
    triton_linear.one_row(empty(1, HIDDEN), empty(2 * INNER, HIDDEN), gated=True)
    triton_linear.one_row(empty(1, INNER), empty(HIDDEN, INNER))


def few_rows(*classes: int) -> None:
    """Of each class of rows, with and without a gate, alone and shared: on GPUs that it is for."""
    if driver.active.get_current_target().arch != 90:
        return
    for rows in classes:
        for outer, inner in ((6144, HIDDEN), (HIDDEN, HIDDEN), (1024, 3072), (VOCAB, HIDDEN)):
            triton_linear.few_rows(empty(rows, inner), empty(outer, inner))
        triton_linear.few_rows(empty(rows, HIDDEN), empty(2 * INNER, HIDDEN), gated=True)


def lora(
    rows: int, *heights: int, dtype: torch.dtype = BF16, slots: int = 8, rank: int = 16, inner: int = HIDDEN
) -> None:
    """Of a matrix of an 8B Llama, by default that of queries, keys and values."""
    heights = heights or (HIDDEN, KV_HEADS * DIM, KV_HEADS * DIM)
    a, b = (
        empty(len(heights), slots, rank, inner, dtype=dtype),
        empty(slots * rank * sum(heights), dtype=dtype),
    )
    x, y = empty(rows, inner, dtype=dtype), empty(rows, sum(heights), dtype=dtype)
    slot_of = empty(rows, dtype=torch.int64)
    triton_lora.add(x, y, a, b, heights, slot_of)
    triton_lora.product(lambda: y, x, a, b, heights, slot_of, early=True, gated=len(heights) == 2)


def hidden(rows: int) -> None:
    """The first launch of adapters' products, beside one of the model's."""
    a, b, x = empty(2, 8, 16, HIDDEN), empty(8 * 16 * 2 * INNER), empty(rows, HIDDEN)
    kernel = triton_linear.one_row if rows == 1 else triton_linear.few_rows
    base = partial(kernel, x, empty(2 * INNER, HIDDEN), before_others=True)
    slot_of = empty(rows, dtype=torch.int64)
    triton_lora.product(base, x, a, b, (INNER, INNER), slot_of, early=None, gated=True)


def draw() -> None:
    triton_sampling.draw(
        empty(4, VOCAB, dtype=torch.float32),
        empty(4, DRAW_FIELDS, dtype=torch.float64),
        empty(4, dtype=torch.int64),
    )


def steps() -> None:
    newest, rates = empty(8, dtype=torch.int64), empty(DIM // 2, dtype=torch.float64)
    given = empty(4, 8, dtype=torch.int32)
    triton_steps.place(
        given, empty(8, 64, dtype=torch.int32), newest, rates, empty(1, dtype=torch.float64), SIZE
    )
    best, tokens = empty(8, dtype=torch.int64), empty(8, dtype=torch.int64)
    triton_steps.likeliest(empty(8, VOCAB), empty(8, dtype=torch.int32), newest, tokens, best)


def fold(queries: int, dtype: torch.dtype = BF16, cap: float | None = None) -> None:
    k, v = empty(4096, 2, KV_HEADS, DIM, dtype=dtype).unbind(1)
    out, lse = empty(queries, HEADS, DIM, dtype=torch.float32), empty(queries, HEADS, dtype=torch.float32)
    layer = LayerAttention(0.1, cap=cap)
    triton_tiles.fold_tile(out, lse, empty(queries, HEADS, DIM, dtype=dtype), k, v, layer=layer)


QWEN, GPT_OSS = (128, 8, 2048, 768), (32, 4, 2880, 2880)
"""Experts, how many of them are used, hidden and inner size of Qwen3-30B-A3B and of gpt-oss-20b."""
CLAMPED = Activation(1.702, 1.0, 7.0)


def experts(tokens: int, dtype: torch.dtype = BF16, sizes: tuple[int, int, int, int] = QWEN) -> None:
    """Those of gpt-oss have biases and their own activation."""
    number, top, hidden, inner = sizes
    kind = ExpertKind() if sizes == QWEN else ExpertKind(biases=2, activation=CLAMPED)
    tuning = triton_experts.expert_tuning(tokens * top, number, dtype)
    moe = MoeSpec(number, top, inner, Router(normalise=True))
    logits = empty(tokens, number, dtype=dtype)
    shares, order, blocks, _ = triton_routing.route(logits, moe, None, None, tuning.rows)
    h, y = empty(tokens * top, inner, dtype=dtype), empty(tokens * top, hidden, dtype=dtype)
    table = empty(number, 2 + kind.biases, dtype=torch.int64)
    x, every = empty(tokens, hidden, dtype=dtype), range(blocks.shape[1])
    triton_experts.products(x, (order, blocks), table, h, y, tuning, every, kind)
    triton_experts.combine(y, shares)


ROUTERS = (
    (128, 8, Router()),
    (32, 4, Router(Scoring.SOFTMAX_OF_CHOSEN)),
    (256, 8, Router(Scoring.SIGMOID, normalise=True, correction=True)),
    (256, 8, Router(Scoring.SIGMOID, True, correction=True, groups=8, top_groups=4, scale=2.5)),
    (60, 4, Router(groups=3, top_groups=1)),
)
"""Of Qwen3, gpt-oss, MiniMax-M2, DeepSeek-V3, and one more with groups: experts, and those of a token."""


def routers(some: Sequence[tuple[int, int, Router]] = ROUTERS) -> None:
    for number, top, router in some:
        correction = empty(number, dtype=torch.float32) if router.correction else None
        for tokens in (1, 1000):
            logits = empty(tokens, number, dtype=torch.float32)
            triton_routing.route(logits, MoeSpec(number, top, 8, router), correction, None, 16)


def few_bits_experts(
    name: str,
    *classes: int,
    dtype: torch.dtype = BF16,
    sizes: tuple[int, int, int, int] = QWEN,
    moves: bool = False,
) -> None:
    """Of as many tokens, as `experts`. moves: the field of ExpertKind."""
    number, top, hidden, inner = sizes
    shapes = (2 * inner, hidden), (hidden, inner)
    sources = [matrix("model.layers.0.self_attn.q_proj.weight", outer, wide) for outer, wide in shapes]
    few, _ = quantised.matrix_of(quantised.SCHEMES[name], torch.zeros(64, 256))
    formats = few.format.cut(sources[:1]), few.format.cut(sources[1:])
    tensors = sum(len(one.stored("bfloat16", [of])) for one, of in zip(formats, sources, strict=True))
    kind = ExpertKind(formats) if sizes == QWEN else ExpertKind(formats, 2, CLAMPED, moves)
    for tokens in classes:
        tuning = triton_few_bits_experts.expert_tuning(tokens * top, number, dtype)
        bound = most_blocks(tokens * top, number, tuning.rows)
        triton_few_bits_experts.products(
            empty(tokens, hidden, dtype=dtype),
            (empty(tokens * top, dtype=torch.int32), empty(3, bound, dtype=torch.int32)),
            empty(number, tensors + kind.biases, dtype=torch.int64),
            empty(tokens * top, inner, dtype=dtype),
            empty(tokens * top, hidden, dtype=dtype),
            tuning,
            range(bound),
            kind,
        )


def sums(dtype: torch.dtype, dim: int = HIDDEN) -> None:
    shared = triton_sums.Shared(0, 2, empty(3, dtype=torch.int64), empty(64, dtype=torch.int32), 1 << 40)
    triton_sums.all_reduce(empty(8, dim, dtype=dtype), shared)
    triton_sums.sum_rms_norm(
        empty(8, dim, dtype=dtype), empty(8, dim, dtype=dtype), empty(dim, dtype=dtype), 1e-5, shared
    )


def slots(experts: int, count: int, most: int) -> None:
    """Of a layer: who comes to which slot, and how they come."""
    long, short = torch.int64, torch.float32
    arrays = SlotArrays(
        1, empty(experts + 1, dtype=long), empty(count, dtype=long), empty(experts, dtype=short),
        empty(experts, dtype=long), empty(1, dtype=long), empty(2562, dtype=short), empty(4, dtype=long),
        empty(1, dtype=long), empty(2, dtype=long), empty(COPIERS, dtype=torch.int32),
    )  # fmt: skip
    places = Places(3 * count, 36 * count, 8, 1 << 40, 13 << 20, empty(4, dtype=long))
    pairs, parts = empty(experts, dtype=torch.int32), places.parts(most)[0]
    coming = triton_slots.expert_step(arrays, pairs, most, 1.0, places, parts)
    triton_slots.fetch(coming, places, 1 << 44, 0)
    triton_slots.foretell(arrays, empty(8, experts), 32)
    triton_slots.foretell(arrays, empty(8, experts, dtype=short), 32, empty(8, dtype=torch.bool))
    triton_slots.fetch_ahead(arrays, places, 1 << 44)
    pace = triton_pace.LinkPace(torch.device("cpu"), 25e9)
    pace.begin()
    pace.end(1 << 30)
    pace.end_of_part(coming, places, 0, triton_slots.piece_of(places))
    pace.end_of_pieces(arrays.done, triton_slots.piece_of(places))
    box = HandoverBox(
        empty(HandoverBox.bytes_of(most, 64, HIDDEN), dtype=torch.uint8), most, 64, HIDDEN, BF16
    )
    word, times = empty(1, dtype=torch.int32), empty(CLASSES, 4, experts + 1, 2, dtype=long)
    shares = empty(CLASSES, experts + 1, dtype=torch.int32)
    handover = Handover(
        box, word, empty(65, dtype=torch.int32), empty(dtype=long), empty(1, dtype=long), shares, times, 1
    )
    coming = triton_slots.expert_step(arrays, pairs, most, 1.0, places, parts, shares[0])
    rows = StepRows(empty(16, HIDDEN), empty(64, dtype=torch.int32), empty(64, HIDDEN))
    triton_handover.give(handover, rows, pairs, 0, coming)
    triton_handover.take(handover, rows, coming)


LLAMA = ((6144, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER))
"""Sizes of matrices of an 8B Llama. The second has a gate."""


def few_bits(
    name: str,
    *classes: int,
    dtype: torch.dtype = BF16,
    sizes: Sequence[tuple[int, int]] = LLAMA,
) -> None:
    """With and without a gate, and dequantised."""
    weight = torch.zeros(64, 256)
    for outer, inner in sizes:
        few, _ = quantised.matrix_of(quantised.SCHEMES[name], weight)
        sources = [matrix("model.layers.0.self_attn.q_proj.weight", outer, inner)]
        format = few.format.cut(sources)
        parts = {
            stored.name: empty(*stored.shape, dtype=getattr(torch, stored.dtype))
            for stored in format.stored("bfloat16", sources)
        }
        large = Matrix(format, (outer, inner), parts)
        for rows in classes:
            x = empty(rows, inner, dtype=dtype)
            triton_few_bits.few_rows(x, large, gated=outer == 2 * INNER)
            kind = kind_of(large.format)
            assert kind is not None, name
            if outer == 2 * INNER and rows <= few_bits_mma.MOST_ROWS and warp_tiles.reads_rows(x):
                triton_few_bits.few_rows(x, large, gated=True, tuning=few_bits_mma.MmaTuning(2, 8))
        triton_few_bits.dequantise(large, slice(0, 1024), empty(1024, inner))


def in_turn(name: str, few: int, more: int) -> None:
    """Few rows of matrices without a gate and with, and more with and without."""
    few_bits(name, few, sizes=LLAMA[1:])
    few_bits(name, more, sizes=LLAMA[:2])


FEW, MORE, OTHER = (16, torch.float16), (64, BF16), (16, BF16)
"""Rows of a product with blocks, and numbers; the first have a gate. What codes become depends on the
numbers, and what a program holds most of all on the rows."""


def blocks(*kinds: str, products: Sequence[tuple[int, torch.dtype]] = (FEW, MORE)) -> None:
    """Of the size of an 8B Llama, blocks of GGUF dequantised, and products of few rows."""
    for kind in kinds:
        sources = [matrix("model.layers.0.mlp.down_proj.weight", HIDDEN, INNER)]
        format = FORMATS[kind].cut(sources)
        (stored,) = format.stored("bfloat16", sources)
        large = Matrix(format, (HIDDEN, INNER), {"repacked": empty(*stored.shape, dtype=torch.uint8)})
        triton_blocks.dequantise(large, slice(0, 1024), empty(1024, INNER))
        for rows, dtype in products:
            triton_blocks.few_rows(empty(rows, INNER, dtype=dtype), large, gated=(rows, dtype) == FEW)


CASES: dict[str, Callable[[], None]] = {
    "decode, one row": lambda: decode(1),
    "decode, many rows": lambda: decode(64, joins=True),
    "decode, with log-sum-exp": lambda: decode(64, joins=True, lse=True),
    "decode, a window": lambda: decode(2, window=512, joins=True),
    "decode, capped": lambda: decode(64, joins=True, cap=50.0),
    "decode, sinks": lambda: decode(2, heads=64, dim=64, window=128, sinks=True),
    "decode, sinks, many rows": lambda: decode(64, heads=64, dim=64, joins=True, sinks=True),
    "decode, wide heads": lambda: decode(2, heads=16, dim=256),
    "decode, wide heads in float32": lambda: decode(2, heads=16, dim=256, dtype=torch.float32),
    "decode, one KV head for many": lambda: decode(2, heads=64 * KV_HEADS),
    "decode, float32": lambda: decode(2, dtype=torch.float32),
    "run": lambda: run(64),
    "run, a window": lambda: run(20, window=512),
    "run, capped": lambda: run(64, cap=50.0),
    "run, sinks": lambda: run(512, heads=64, dim=64, window=128, sinks=True),
    "run, sinks, placed": lambda: run(512, heads=64, dim=64, window=128, sinks=True, ways=("placed",)),
    "run, wide heads, known": lambda: run(20, heads=16, dim=256, ways=("known",)),
    "run, wide heads": lambda: run(20, heads=16, dim=256),
    "run, float32": lambda: run(20, dtype=torch.float32),
    "run, float32, tree": lambda: run(20, dtype=torch.float32, ways=("tree",)),
    "run, wide heads in float32": lambda: run(20, heads=16, dim=256, dtype=torch.float32),
    "merge": merge,
    "write": write,
    "pointwise": lambda: pointwise(gains=False),
    "pointwise, norms of heads": lambda: pointwise(gains=True),
    "pointwise, one head": one_head,
    "pointwise, half of a head": partly_turned,
    "linear": linear,
    "linear, few rows": lambda: few_rows(16, 32),
    "linear, more rows": lambda: few_rows(64),
    "adapters": lambda: lora(16),
    "adapters, large": lambda: lora(64, INNER, INNER, rank=256),
    "adapters, float32": lambda: lora(16, HIDDEN, inner=INNER, dtype=torch.float32),
    "adapters beside one row": lambda: hidden(1),
    "adapters beside few rows": lambda: hidden(16),
    "draw": draw,
    "steps": steps,
    "sums": lambda: sums(BF16),
    "sums, wide": lambda: sums(torch.float16, 2 * HIDDEN),
    "sums, narrow": lambda: sums(BF16, 64),
    "sums, float32": lambda: sums(torch.float32),
    "fold, one": lambda: fold(1),
    "fold, some": lambda: fold(8),
    "fold, capped": lambda: fold(8, cap=50.0),
    "fold, float32": lambda: fold(8, torch.float32),
    "slots, few": lambda: slots(32, 0, 4),
    "slots, some": lambda: slots(128, 34, 8),
    "slots, many": lambda: slots(512, 100, 512),
    "slots, none": lambda: slots(128, 0, 128),
    "few bits, integers": lambda: few_bits("gptq_128", 1, 64),
    "few bits, integers in turn": lambda: in_turn("gptq_128", 1, 64),
    "few bits, zero points": lambda: few_bits("awq", 1, 16),
    "few bits, zero points in turn": lambda: in_turn("awq", 1, 16),
    "few bits, eight": lambda: few_bits("gptq_8", 1, 16),
    "few bits, FP8": lambda: few_bits("fp8_128", 1, 64),
    "few bits, MXFP8": lambda: few_bits("mxfp8", 1, 16),
    "few bits, MXFP4": lambda: few_bits("mxfp4", 1, 64),
    "few bits, MXFP4 in turn": lambda: in_turn("mxfp4", 1, 64),
    "few bits, NVFP4": lambda: few_bits("nvfp4", 1, 16),
    "few bits, NVFP4 in turn": lambda: in_turn("nvfp4", 1, 16),
    "few bits, float16": lambda: (
        few_bits("awq", 1, 16, dtype=torch.float16),
        few_bits("gptq_8", 16, dtype=torch.float16),
        few_bits("mxfp4", 16, dtype=torch.float16),
        few_bits("mxfp8", 16, dtype=torch.float16),
    ),
    "few bits experts, few tokens": lambda: few_bits_experts("mxfp4", 4, sizes=GPT_OSS),
    "few bits experts that come": lambda: few_bits_experts("mxfp4", 4, sizes=GPT_OSS, moves=True),
    "few bits experts, integers": lambda: few_bits_experts("gptq_128", 4, 4096),
    "few bits experts, small groups": lambda: few_bits_experts("gptq", 100),
    "few bits experts, zero points": lambda: few_bits_experts("awq", 4, 512),
    "few bits experts, eight": lambda: few_bits_experts("gptq_8", 4, 4096),
    "few bits experts, FP8": lambda: few_bits_experts("fp8_128", 4, 100, 4096),
    "few bits experts, MXFP4": lambda: few_bits_experts("mxfp4", 4, 4096),
    "few bits experts, NVFP4": lambda: few_bits_experts("nvfp4", 4, 4096),
    "few bits experts, gpt-oss": lambda: few_bits_experts("mxfp4", 4, 100, 4096, sizes=GPT_OSS),
    "few bits experts, float16": lambda: few_bits_experts("awq", 4, 4096, dtype=torch.float16),
    "few bits experts, float32": lambda: few_bits_experts("mxfp4", 4, dtype=torch.float32),
    "blocks of GGUF, old ones": lambda: blocks("Q4_1", "Q5_0", "Q5_1", "IQ4_NL"),
    "blocks of GGUF in turn": lambda: (
        blocks("IQ4_NL", products=[FEW]),
        blocks("Q5_1", products=[OTHER]),
        blocks("Q6_K", products=[MORE]),
    ),
    "blocks of GGUF, few bits": lambda: blocks("Q2_K", "Q3_K"),
    "blocks of GGUF, four and five bits": lambda: blocks("Q4_K", "Q5_K"),
    "blocks of GGUF, four bits in turn": lambda: blocks("Q4_K", products=[FEW]),
    "blocks of GGUF, six bits and levels": lambda: blocks("Q6_K", "IQ4_XS"),
    "routers": routers,
    "routers, in groups": lambda: routers(ROUTERS[3:4]),
    "routers, few": lambda: routers(ROUTERS[-1:]),
    "experts, few": lambda: (experts(1), experts(4)),
    "experts, some": lambda: experts(100),
    "experts, many": lambda: experts(4096),
    "experts, gpt-oss": lambda: [experts(tokens, sizes=GPT_OSS) for tokens in (1, 4, 4096)],
    "experts, float32": lambda: experts(100, torch.float32),
}


def meets(ptx: str) -> bool:
    """Whether all threads of a program meet between each read of global memory and the next write."""
    read = False
    for line in ptx.splitlines():
        if "bar.sync" in line:
            read = False
        elif "ld.global" in line:
            read = True
        elif "st.global" in line and read:
            return False
    return True


_EVENT = re.compile(
    r"griddepcontrol\.(?P<grid>wait|launch_dependents)|(?P<read>\bld\.(?:\w+\.)*global)"
    r"|(?P<write>\b(?:st|red|atom)\.(?:\w+\.)*global)|(?P<end>\b(?:ret|exit)\b)|(?P<jump>\bbra\b)"
)


_CACHED = re.compile(r"\bld\.global(?!\.cg)|\bcp\.async\.ca")
"""A read of global memory by way of a multiprocessor's own cache."""


def before_the_wait(ptx: str) -> list[str]:
    """What a program of a kernel may do on any way before it has waited for what was launched before: read,
    write, launch what comes next, or end."""
    lines = [line.split("//")[0].strip() for line in ptx[ptx.index(".entry") :].splitlines()]
    labels = {line[:-1]: at for at, line in enumerate(lines) if line.endswith(":")}
    found, known, ahead = set[str](), set[int](), [0]
    while ahead:
        at = ahead.pop()
        if at in known or at == len(lines):
            continue
        known.add(at)
        event, follows = _EVENT.search(lines[at]), True
        if event is not None:
            what = event["grid"] or event.lastgroup
            if what == "wait":
                continue
            if what == "jump":
                ahead.append(labels[lines[at].rstrip(";").split()[-1]])
            else:
                found.add({"launch_dependents": "launch"}.get(what, what))
            follows = what not in ("jump", "end") or lines[at].startswith("@")
        if follows:
            ahead.append(at + 1)
    return sorted(found)


def dealt(text: str) -> list[str]:
    """How the tensors are dealt out that products of a warp take: threads of a warp, and warps, for each
    axis."""
    named = dict(re.findall(r"^(#\w+) = #ttg\.blocked<\{(.*)\}>", text, re.M))
    given = re.findall(r"inline_asm[^\n]*mma\.sync[^\n]*-> *\(?tensor<[^,>\n]+, (#\w+)>", text)
    form = re.compile(r"threadsPerWarp = (\[[^]]*\]), warpsPerCTA = (\[[^]]*\])")
    found = [form.search(named.get(one, "")) for one in given]
    return [f"{one[1]} {one[2]}" if one else "unknown" for one in found]


_FROM_REGISTERS = re.compile(r"ttng\.warp_group_dot [^\n]*: tensor<[^\n]*\* *!ttg\.memdesc")
"""A product of capability 9.0 that reads its left operand from registers while the program goes on."""
_UNDER_WAY = re.compile(r"ttng\.warp_group_dot_wait [^\n]*pendings = [1-9]")


def overtakes(text: str) -> bool:
    """Whether a program may go on to write registers that a product under way has yet to read: who only waits
    for all but some of the products may be given the operands of these for what comes next."""
    return bool(_FROM_REGISTERS.search(text) and _UNDER_WAY.search(text))


@contextmanager
def elsewhere(capability: int, seen: Callable[[Any], None]) -> Iterator[None]:
    """On a device of this compute capability, where kernels are compiled instead of launched; each that would
    be launched is shown."""
    driver.set_active(Driver(capability))  # type: ignore[arg-type]
    compiled = JITFunction.run

    def only_compiled(self: Any, *arguments: Any, grid: object, warmup: bool, **more: Any) -> Any:
        mocked = [
            MockTensor(one.dtype, list(one.shape)) if isinstance(one, Tensor) else one for one in arguments
        ]
        if "WIDEN" in more:  # Which is for the interpreter.
            more["WIDEN"] = False
        kernel = compiled(self, *mocked, grid=grid, warmup=True, **more)
        if not warmup:
            seen(kernel)
        return kernel

    with ExitStack() as patched:
        patched.enter_context(patch.object(JITFunction, "run", only_compiled))
        for module in (triton_experts, triton_few_bits, triton_few_bits_experts):
            patched.enter_context(patch.object(module, "shared_memory", lambda _: SHARED[capability]))
        patched.enter_context(patch.object(warp_tiles, "DEALT", True))
        counts = {triton_attention: 80, triton_tiles: 80, triton_linear: 132}
        counts |= {triton_few_bits: 132, triton_blocks: 132}
        for module, count in counts.items():
            patched.enter_context(patch.object(module, "multiprocessors", lambda _, count=count: count))
        yield


def main(capability: int, names: list[str], *, early_only: bool = False) -> None:
    """A line of JSON with the bytes of shared memory that a program may have, and one for each kernel. Where
    launches may begin early, kernels are compiled for that too, or only for that."""
    print(SHARED[capability])
    case, early = "", False

    def seen(kernel: Any) -> None:
        told: dict[str, object] = {
            "case": case,
            "kernel": kernel.name,
            "shared": kernel.metadata.shared,
            "early": early,
        }
        told |= {"meets": meets(kernel.asm["ptx"]), "barriers": kernel.asm["ptx"].count("bar.sync")}
        told["dealt"] = dealt(kernel.asm["ttgir"])
        told["overtakes"] = overtakes(kernel.asm["ttgir"])
        told["products"] = len(_FROM_REGISTERS.findall(kernel.asm["ttgir"]))
        if kernel.metadata.launch_pdl:
            told["before"] = before_the_wait(kernel.asm["ptx"])
            told["waits"] = kernel.asm["ptx"].count("griddepcontrol.wait")
            told["cached"] = len(_CACHED.findall(kernel.asm["ptx"]))
        print(json.dumps(told), flush=True)

    ways = (True,) if early_only else (False, True) if capability >= 90 else (False,)
    with elsewhere(capability, seen):
        for case in names or CASES:
            for early in ways:
                with pdl_launches(early):
                    CASES[case]()


def tell(words: Sequence[str]) -> None:
    """What the words ask for."""
    names = [one for one in words if one not in ("--early", "--ptx")]
    with ExitStack() as as_asked:
        if "--ptx" in words:  # What is shown is no more than that.
            as_asked.enter_context(patch.object(CUDABackend, "make_cubin", lambda *_: b""))
        main(int(names[0]), names[1:], early_only="--early" in words)


if __name__ == "__main__":
    tell(sys.argv[1:])
