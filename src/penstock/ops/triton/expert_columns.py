"""Computes a mixture's few tokens with experts of few bits by the matrix products of a warp.

Programs are as those of `warp_tiles`: a few tiles of an expert's matrix, with the rows of one block of
`routing`. A row's numbers are its own: they depend neither on the other rows of its block nor on which
experts are computed in the same call.

Where launches may be early, the product with down reads which experts there are, and the first of their
codes, while the one with gate and up still runs. Why this is safe: that one is launched just before it, and
lets it begin only when it has itself waited for all that was launched earlier, which is all that says where
experts are, and this is read past the cache of a multiprocessor. Activations are read, and outputs stored,
behind a wait of its own. Programs without work wait too: its end is taken for that of all before it. Where
experts come and go it waits before it reads anything: what another multiprocessor has written to the place of
an expert is there to be read behind a wait of one's own only.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from penstock.arch.formats.codes import packed_bytes
from penstock.arch.spec import SWIGLU, Activation
from penstock.ops.kernels import pdl_launch_options, uses_pdl
from penstock.ops.triton.activation import activation_options
from penstock.ops.triton.codes import FOUR_BITS, RUN_SCALES, CodeKind
from penstock.ops.triton.few_bits_mma import MmaTuning
from penstock.ops.triton.tuning import cdiv
from penstock.ops.triton.warp_tiles import codes_options, tiles_of_products

FEW_TOKENS = 8
"""Most tokens of a step that is computed so. No expert has more rows than there are tokens."""
NUMBERS = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
SCALE_TYPES = {str(kind)[6:]: its for kind, its in NUMBERS.items()} | {"uint8": tl.uint8}
RAW_TYPES = {torch.uint8: tl.uint8, torch.int16: tl.int16, torch.int32: tl.int32}


@triton.jit(do_not_specialize=["first", "bound"])  # type: ignore[untyped-decorator]
def _expert_columns(  # type: ignore[no-untyped-def]
    x,
    table,
    order,
    blocks,
    y,
    first,
    bound,
    s_x,
    TOP: tl.constexpr,
    TENSORS: tl.constexpr,
    AT: tl.constexpr,
    OUTER: tl.constexpr,
    INNER: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    ROW_SCALES: tl.constexpr,
    TILES: tl.constexpr,
    WARPS: tl.constexpr,
    WIDE: tl.constexpr,
    GROUP: tl.constexpr,
    DOWN: tl.constexpr,
    KIND: tl.constexpr,
    PLACES: tl.constexpr,
    SCALES: tl.constexpr,
    SCALE_TYPE: tl.constexpr,
    RAW: tl.constexpr,
    ZEROS: tl.constexpr,
    SECOND: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    ALPHA: tl.constexpr,
    SHIFT: tl.constexpr,
    LIMIT: tl.constexpr,
    HALF: tl.constexpr,
    LESS: tl.constexpr,
    PTX: tl.constexpr,
    REGISTERS: tl.constexpr,
    FOLDED: tl.constexpr,
    EVEN: tl.constexpr,
    MOVES: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Compute TILES tiles (see `warp_tiles`) for the pairs of one block, of at most eight for each of WIDE.
    All else as in `few_bits_experts`. x: as fours."""
    if EARLY and (GATED or MOVES):
        gdc_wait()
    if EARLY:
        gdc_launch_dependents()
    PARTS: tl.constexpr = (OUTER + TILES * (8 if GATED else 16) - 1) // (TILES * (8 if GATED else 16))
    block, part = first + tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    expert = tl.load(blocks + block, cache_modifier=".cg")
    if expert < 0:
        if EARLY and not GATED:
            gdc_wait()
        return
    entry = table + expert * TENSORS + AT
    address = tl.load(entry, cache_modifier=".cg")
    if address == 0:
        if EARLY and not GATED:
            gdc_wait()
        return
    begin = tl.load(blocks + bound + block, cache_modifier=".cg")
    end = tl.load(blocks + 2 * bound + block, cache_modifier=".cg")
    lane = tl.arange(0, 32)[:, None]
    if GATED:
        near = tl.load(order + tl.minimum(begin + lane // 4, end - 1)) // TOP
        far = tl.load(order + tl.minimum(begin + lane // 4 + 8, end - 1)) // TOP
    else:
        near, far = tl.minimum(begin + lane // 4, end - 1), tl.minimum(begin + lane // 4 + 8, end - 1)
    rows_at = x + near.to(tl.int64) * s_x, x + far.to(tl.int64) * s_x
    row = begin + lane % 4 * 2
    a, b, c, d = row, row + 1, row + 8, row + 9
    stored = a < end, b < end, c < end, d < end
    if not GATED:
        a = tl.load(order + a, mask=a < end, other=0, cache_modifier=".cg")
        b = tl.load(order + b, mask=b < end, other=0, cache_modifier=".cg")
        c = tl.load(order + c, mask=c < end, other=0, cache_modifier=".cg")
        d = tl.load(order + d, mask=d < end, other=0, cache_modifier=".cg")
    to = (
        y + a.to(tl.int64) * OUTER,
        y + b.to(tl.int64) * OUTER,
        y + c.to(tl.int64) * OUTER,
        y + d.to(tl.int64) * OUTER,
    )
    scale = tl.load(entry + 1, cache_modifier=".cg").to(tl.pointer_type(SCALE_TYPE))
    zero, second, bias = scale, scale, scale
    if ZEROS:
        zero = tl.load(entry + 2, cache_modifier=".cg").to(tl.pointer_type(tl.uint8))
    if SECOND:
        second = tl.load(entry + 2, cache_modifier=".cg").to(tl.pointer_type(tl.float32))
    if BIAS:
        bias = tl.load(table + expert * TENSORS + BIAS, cache_modifier=".cg").to(
            tl.pointer_type(y.dtype.element_ty)
        )
    tiles_of_products(
        rows_at,
        to,
        stored,
        address.to(tl.pointer_type(tl.int32)),
        scale,
        zero,
        second,
        bias,
        part * TILES,
        OUTER,
        INNER,
        DOWN,
        ROW_WORDS,
        ROW_SCALES,
        TILES,
        WARPS,
        WIDE,
        GROUP,
        KIND,
        PLACES,
        SCALES,
        RAW,
        ZEROS,
        SECOND,
        GATED,
        BIAS > 0,
        EARLY and not GATED,
        HALF,
        LESS,
        PTX,
        REGISTERS,
        FOLDED,
        ALPHA,
        SHIFT,
        LIMIT,
        EVEN,
    )


def expert_columns(
    x: Tensor,
    step: tuple[Tensor, Tensor, Tensor, range, bool],
    y: Tensor,
    kind: CodeKind,
    at: tuple[int, int],
    *,
    top: int,
    activation: Activation | None,
    tuning: MmaTuning,
) -> None:
    """Compute one product of blocks of at most FEW_TOKENS rows: y `[pairs, outer]` of x `[rows, inner]`.

    step: table, order and blocks, and which of the blocks, as `few_bits_experts.products` has them; and
        whether experts move, the field of ExpertKind.
    kind: of the matrices.
    at: the first address of the matrix in a row of the table, and that of its bias, or 0.
    top: experts of a token.
    activation: of a matrix of gate and up; None for down.
    tuning: how the product is cut.
    """
    outer, inner, gated = y.shape[1], x.shape[1], activation is not None
    table, order, blocks, part, moves = step
    scales, scale_type = cdiv(inner, min(kind.group, inner)), SCALE_TYPES[kind.scale_dtype]
    codes = codes_options(kind, inner, x.dtype, scales, wide=1)
    if codes["RAW"]:
        each = RUN_SCALES[kind.codes, kind.scales, kind.group]
        scales, scale_type = scales // each.itemsize, RAW_TYPES[each]
    fours = x.view(torch.int64)
    tiles = cdiv(outer, tuning.tiles * (8 if gated else 16))
    _expert_columns[(len(part) * tiles,)](
        fours,
        table,
        order,
        blocks,
        y,
        part.start,
        blocks.shape[1],
        fours.stride(0),
        TOP=top,
        TENSORS=table.shape[1],
        AT=at[0],
        OUTER=outer,
        INNER=inner,
        ROW_WORDS=packed_bytes(inner, 4 if kind.codes in FOUR_BITS else 8) // 4,
        ROW_SCALES=scales,
        TILES=tuning.tiles,
        WARPS=tuning.warps,
        DOWN=kind.down,
        SCALE_TYPE=scale_type,
        ZEROS=kind.zeros,
        SECOND=kind.second,
        BIAS=at[1],
        GATED=gated,
        **activation_options(activation or SWIGLU),
        **codes,
        MOVES=moves,
        EARLY=uses_pdl(),
        num_warps=tuning.warps,
        **pdl_launch_options(uses_pdl()),
    )
