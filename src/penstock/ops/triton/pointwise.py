"""Kernels for the small steps between matrix products.

They are normalisation with the residual sum, rotary positions with the write of new keys and values, and the
gated activation. Each rounds where the reference models round, so that fused and unfused arithmetic agree to
the last bit of the dtype wherever float32 does. Where launches may be early (`kernels.pdl_launches`), each
waits on the device before it reads or writes anything.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from penstock.ops.kernels import pdl_launch_options, uses_pdl
from penstock.ops.triton.tuning import cdiv, next_power_of_2


@triton.jit  # type: ignore[untyped-decorator]
def in_turn(EARLY: tl.constexpr) -> None:
    """Let the next kernel be launched, and wait until what was launched before this one has ended."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _rms_norm(  # type: ignore[no-untyped-def]
    x,
    residual,
    weight,
    y,
    rows,
    eps,
    s_x,
    s_x_head,
    s_r,
    s_r_head,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    COLS: tl.constexpr,
    ROWS: tl.constexpr,
    ADDS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Normalise ROWS rows; row r is head r % HEADS of token r // HEADS."""
    in_turn(EARLY)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token, head = row // HEADS, row % HEADS
    cols = tl.arange(0, COLS)
    inside = (row < rows)[:, None] & (cols < DIM)[None, :]
    value = tl.load(x + (token * s_x + head * s_x_head)[:, None] + cols[None, :], mask=inside, other=0.0).to(
        tl.float32
    )
    gain = tl.load(weight + cols, mask=cols < DIM, other=0.0).to(tl.float32)
    if ADDS:
        at = residual + (token * s_r + head * s_r_head)[:, None] + cols[None, :]
        total = (value + tl.load(at, mask=inside, other=0.0).to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(at, total, mask=inside)
        value = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 1) / DIM + eps)
    unit = (value * scale[:, None]).to(y.dtype.element_ty).to(tl.float32)
    tl.store(
        y + row[:, None] * DIM + cols[None, :], (unit * gain[None, :]).to(y.dtype.element_ty), mask=inside
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Normalise x `[tokens, dim]` or `[tokens, heads, dim]` (strided, last dim contiguous) over its last dim.

    Returns y (contiguous, x's dtype) and the residual stream: `residual`, or x itself where none was given.
    Rounding: `(x32 * rsqrt(mean(x32**2) + eps)).to(dtype) * weight`.

    residual: of x's shape. The sum is taken first: residual += x in place, rounded to its dtype, and that is
        normalised.
    """
    dim = x.shape[-1]
    heads = x.shape[1] if x.dim() == 3 else 1
    stream = x if residual is None else residual
    assert x.dim() in (2, 3), x.shape
    assert stream.shape == x.shape, (x.shape, stream.shape)
    assert weight.shape == (dim,), (x.shape, weight.shape)
    assert x.stride(-1) == stream.stride(-1) == weight.stride(0) == 1
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    count = x.shape[0] * heads
    if count == 0:
        return y, stream
    cols = next_power_of_2(dim)
    rows, early = max(1, 1024 // cols), uses_pdl()
    _rms_norm[(cdiv(count, rows),)](
        x,
        stream,
        weight,
        y,
        count,
        eps,
        x.stride(0),
        x.stride(1) if heads > 1 else 0,
        stream.stride(0),
        stream.stride(1) if heads > 1 else 0,
        HEADS=heads,
        DIM=dim,
        COLS=cols,
        ROWS=rows,
        ADDS=residual is not None,
        EARLY=early,
        num_warps=min(16, max(4, cols // 512)),
        **pdl_launch_options(early),
    )
    return y, stream


@triton.jit  # type: ignore[untyped-decorator]
def _turn(  # type: ignore[no-untyped-def]
    x, gain, cos, sin, eps, s_head, HEADS: tl.constexpr, HALF: tl.constexpr, COLS: tl.constexpr,
    REST: tl.constexpr, REST_COLS: tl.constexpr, ROWS: tl.constexpr, NORMS: tl.constexpr,
    first=0,
):  # fmt: skip
    """Normalise, if NORMS, and rotate ROWS heads of one token from `first` on, in place.

    Pairs are (i, i + HALF). The REST dimensions behind them are not rotated. Returns the stored halves, and
    the rest if there is any.
    """
    heads, cols = first + tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[None, :]
    inside = (heads < HEADS) & (cols < HALF)
    at = x + heads * s_head + cols
    left = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    if REST > 0:
        rest_cols = tl.arange(0, REST_COLS)[None, :]
        rest_inside = (heads < HEADS) & (rest_cols < REST)
        rest_at = x + heads * s_head + 2 * HALF + rest_cols
        rest = tl.load(rest_at, mask=rest_inside, other=0.0)
    if NORMS:
        gain_left = tl.load(gain + cols, mask=cols < HALF, other=0.0).to(tl.float32)
        gain_right = tl.load(gain + HALF + cols, mask=cols < HALF, other=0.0).to(tl.float32)
        squares = tl.sum(left * left + right * right, 1)
        if REST > 0:
            rest_wide = rest.to(tl.float32)
            squares += tl.sum(rest_wide * rest_wide, 1)
        scale = tl.rsqrt(squares / (2 * HALF + REST) + eps)[:, None]
        left = (left * scale).to(x.dtype.element_ty).to(tl.float32) * gain_left
        right = (right * scale).to(x.dtype.element_ty).to(tl.float32) * gain_right
        left, right = left.to(x.dtype.element_ty).to(tl.float32), right.to(x.dtype.element_ty).to(tl.float32)
        if REST > 0:
            gain_rest = tl.load(gain + 2 * HALF + rest_cols, mask=rest_cols < REST, other=0.0).to(tl.float32)
            rest = (rest_wide * scale).to(x.dtype.element_ty).to(tl.float32) * gain_rest
            rest = rest.to(x.dtype.element_ty)
    turned = (left * cos - right * sin).to(x.dtype.element_ty)
    other = (right * cos + left * sin).to(x.dtype.element_ty)
    tl.debug_barrier()  # several threads may have read one number, where these are few
    tl.store(at, turned, mask=inside)
    tl.store(at + HALF, other, mask=inside)
    if REST > 0:
        if NORMS:
            tl.store(rest_at, rest, mask=rest_inside)
        return turned, other, rest
    else:
        return turned, other, other


@triton.jit  # type: ignore[untyped-decorator]
def _rope(  # type: ignore[no-untyped-def]
    q,
    k,
    cos,
    sin,
    s_q,
    s_q_head,
    s_k,
    s_k_head,
    s_cos,
    s_sin,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    COLS: tl.constexpr,
    ROWS: tl.constexpr,
    KV_ROWS: tl.constexpr,
) -> None:
    """Rotate queries and keys of one token. Grid [tokens]."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, COLS)
    c = tl.load(cos + token * s_cos + cols, mask=cols < HALF, other=0.0)[None, :]
    s = tl.load(sin + token * s_sin + cols, mask=cols < HALF, other=0.0)[None, :]
    _turn(q + token * s_q, q, c, s, 0.0, s_q_head, HEADS, HALF, COLS, 0, 1, ROWS, False)
    if KV_HEADS > 0:
        _turn(k + token * s_k, k, c, s, 0.0, s_k_head, KV_HEADS, HALF, COLS, 0, 1, KV_ROWS, False)


def rope_(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor) -> None:
    """Rotate q `[tokens, heads, dim]` and k `[tokens, kv_heads, dim]` in place: pairs (i, i + turned / 2).

    The first `turned` dimensions of a head are rotated. The arithmetic is float32, rounded once. Without k, q
    may hold the heads of both.

    cos, sin: float32 `[tokens, turned / 2]`.
    """
    tokens, heads, dim = q.shape
    kv_heads = 0 if k is None else k.shape[1]
    k = q if k is None else k
    assert k.shape == (tokens, kv_heads or heads, dim), (q.shape, k.shape)
    half = cos.shape[1]
    assert cos.shape == sin.shape == (tokens, half), (q.shape, cos.shape)
    assert 2 * half <= dim, (q.shape, cos.shape)
    assert q.stride(2) == k.stride(2) == cos.stride(1) == sin.stride(1) == 1
    assert cos.dtype == sin.dtype == torch.float32
    if tokens == 0:
        return
    rows, cols = next_power_of_2(heads), next_power_of_2(half)
    _rope[(tokens,)](
        q,
        k,
        cos,
        sin,
        *q.stride()[:2],
        *k.stride()[:2],
        cos.stride(0),
        sin.stride(0),
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=half,
        COLS=cols,
        ROWS=rows,
        KV_ROWS=next_power_of_2(max(kv_heads, 1)),
        num_warps=8 if rows * cols > 4096 else 4,
    )


@triton.jit(do_not_specialize_on_alignment=["slots"])  # type: ignore[untyped-decorator]
def _project(  # type: ignore[no-untyped-def]
    qkv,
    q_gain,
    k_gain,
    cos,
    sin,
    k_cache,
    v_cache,
    slots,
    eps,
    s_row,
    s_cos,
    s_sin,
    s_kc_block,
    s_kc,
    s_kc_head,
    s_vc_block,
    s_vc,
    s_vc_head,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    COLS: tl.constexpr,
    REST: tl.constexpr,
    REST_COLS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    NORMS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Prepare ROWS query heads of one token, or ROWS of its KV heads.

    Grid [tokens, parts], query parts first.
    """
    in_turn(EARLY)
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    DIM: tl.constexpr = 2 * HALF + REST
    cols = tl.arange(0, COLS)[None, :]
    c = tl.load(cos + token * s_cos + cols, mask=cols < HALF, other=0.0)
    s = tl.load(sin + token * s_sin + cols, mask=cols < HALF, other=0.0)
    row = qkv + token * s_row
    query_parts = tl.cdiv(HEADS, ROWS)
    if part < query_parts:
        _turn(row, q_gain, c, s, eps, DIM, HEADS, HALF, COLS, REST, REST_COLS, ROWS, NORMS, part * ROWS)
    else:
        slot = tl.load(slots + token)
        first = (part - query_parts) * ROWS
        heads = first + tl.arange(0, ROWS)[:, None]
        inside = (heads < KV_HEADS) & (cols < HALF)
        values = row + (HEADS + KV_HEADS + heads) * DIM
        value = values + cols
        value_left = tl.load(value, mask=inside)
        value_right = tl.load(value + HALF, mask=inside)
        if REST > 0:
            rest_cols = tl.arange(0, REST_COLS)[None, :]
            rest_inside = (heads < KV_HEADS) & (rest_cols < REST)
            value_rest = tl.load(values + 2 * HALF + rest_cols, mask=rest_inside)
        left, right, rest = _turn(
            row + HEADS * DIM, k_gain, c, s, eps, DIM, KV_HEADS, HALF, COLS, REST, REST_COLS, ROWS, NORMS,
            first,
        )  # fmt: skip
        if slot >= 0:
            block, offset = slot // BLOCK, slot % BLOCK
            k_head = k_cache + block * s_kc_block + offset * s_kc + heads * s_kc_head
            v_head = v_cache + block * s_vc_block + offset * s_vc + heads * s_vc_head
            k_at, v_at = k_head + cols, v_head + cols
            tl.store(k_at, left, mask=inside)
            tl.store(k_at + HALF, right, mask=inside)
            tl.store(v_at, value_left, mask=inside)
            tl.store(v_at + HALF, value_right, mask=inside)
            if REST > 0:
                tl.store(k_head + 2 * HALF + rest_cols, rest, mask=rest_inside)
                tl.store(v_head + 2 * HALF + rest_cols, value_rest, mask=rest_inside)


def project(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: tuple[Tensor, Tensor],
    slots: Tensor,
    *,
    heads: int,
    gains: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm and rotate q and k, and write k and v to pages, in one kernel.

    Returns q `[tokens, heads, dim]`, k and v `[tokens, kv_heads, dim]`: views of qkv. It rounds after the
    norm's division, after its gain, and after the rotation. The squares of a head are added in another order
    than by `rms_norm`, so that a normalised number may come out one step of the dtype beside; without norms
    nothing differs from `rope_`.

    qkv: `[tokens, (heads + 2 * kv_heads) * dim]` (rows strided), of which q and k are changed in place.
    cos, sin: float32 `[tokens, turned / 2]`; the first `turned` dimensions of a head are rotated.
    cache: K and V in pages, `[blocks, block_size, kv_heads, dim]`.
    slots: the slot mapping, int64 `[tokens]`: block * block_size + offset; -1 writes nothing.
    gains: of q and k, `[dim]`, if heads are normalised.
    """
    k_cache, v_cache = cache
    tokens, (block_size, kv_heads, dim) = len(qkv), k_cache.shape[1:]
    assert qkv.shape == (tokens, (heads + 2 * kv_heads) * dim), (qkv.shape, heads, k_cache.shape)
    assert v_cache.shape == k_cache.shape, (k_cache.shape, v_cache.shape)
    half = cos.shape[1]
    rest = dim - 2 * half
    assert cos.shape == sin.shape == (tokens, half), (qkv.shape, cos.shape)
    assert slots.shape == (tokens,), (slots.shape, tokens)
    assert rest >= 0, (dim, cos.shape)
    assert (
        qkv.stride(1)
        == cos.stride(1)
        == sin.stride(1)
        == slots.stride(0)
        == k_cache.stride(3)
        == v_cache.stride(3)
        == 1
    )
    assert qkv.dtype == k_cache.dtype == v_cache.dtype
    assert cos.dtype == sin.dtype == torch.float32
    assert slots.dtype == torch.int64, slots.dtype
    split = qkv.view(tokens, heads + 2 * kv_heads, dim)
    views = split[:, :heads], split[:, heads : heads + kv_heads], split[:, heads + kv_heads :]
    if tokens == 0:
        return views
    q_gain, k_gain = gains or (qkv, qkv)
    assert gains is None or (
        q_gain.shape == k_gain.shape == (dim,) and q_gain.stride(0) == k_gain.stride(0) == 1
    )
    cols, rest_cols = next_power_of_2(half), next_power_of_2(max(rest, 1))
    most = max(1, 1024 // max(cols, rest_cols // 2))
    rows, early = min(next_power_of_2(max(heads, kv_heads)), most), uses_pdl()
    _project[(tokens, cdiv(heads, rows) + cdiv(kv_heads, rows))](
        qkv,
        q_gain,
        k_gain,
        cos,
        sin,
        k_cache,
        v_cache,
        slots,
        eps,
        qkv.stride(0),
        cos.stride(0),
        sin.stride(0),
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=half,
        COLS=cols,
        REST=rest,
        REST_COLS=rest_cols,
        ROWS=rows,
        BLOCK=block_size,
        NORMS=gains is not None,
        EARLY=early,
        num_warps=4,
        **pdl_launch_options(early),
    )
    return views


@triton.jit
def silu(gate):  # type: ignore[no-untyped-def]
    """Return silu of float32 numbers."""
    tail = tl.exp(-tl.abs(gate))  # at most 1: no overflow on either side
    return gate * tl.where(gate >= 0.0, 1.0, tail) / (1.0 + tail)


@triton.jit  # type: ignore[untyped-decorator]
def _silu_mul(  # type: ignore[no-untyped-def]
    gate_up, y, s_row, WIDTH: tl.constexpr, COLS: tl.constexpr, EARLY: tl.constexpr
) -> None:
    """Compute COLS columns of one row. Grid [tokens, parts]."""
    in_turn(EARLY)
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = cols < WIDTH
    at = gate_up + token * s_row + cols
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + WIDTH, mask=inside, other=0.0).to(tl.float32)
    active = silu(gate).to(y.dtype.element_ty).to(tl.float32)
    tl.store(y + token * WIDTH + cols, (active * up).to(y.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return `silu(gate) * up`, `[tokens, width]`, of gate_up `[tokens, 2 * width]`, gate first.

    Rows may be strided. silu is rounded before the product.
    """
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.shape[1] == 2 * width, gate_up.shape
    assert gate_up.stride(1) == 1, gate_up.stride()
    y = torch.empty(tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    if tokens == 0:
        return y
    cols, early = min(1024, next_power_of_2(width)), uses_pdl()
    _silu_mul[(tokens, cdiv(width, cols))](
        gate_up,
        y,
        gate_up.stride(0),
        WIDTH=width,
        COLS=cols,
        EARLY=early,
        num_warps=4,
        **pdl_launch_options(early),
    )
    return y
