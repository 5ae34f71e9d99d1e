"""Attention of one step over paged KV: exact, merged from parts, the same for every device.

A step's queries are of two sorts. *Rows* add one token to a sequence and attend to everything in its blocks, themselves included.
*Runs* are longer pieces of one sequence: each attends causally to itself and then, tile by tile, to everything before it; the parts are
merged by their log-sum-exp in float32, which is exact. The memory that a run takes does not depend on the context's length.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from penstock.ops.kernels import attention_kernels

PAST_TILE = 8192
"""Keys of the past that a run attends to at a time; gathered from pages into scratch."""

WINDOW_TILE = 512
"""Queries of a run that share one mask in layers with a sliding window."""

_CUDNN_QUERIES = (1024, 2048, 4096, 8192, 16384)
"""cuDNN plans once per shape, at 45 ms: it gets few shapes, and the ones where it is fastest."""


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows of similar length, padded to one, for devices without a paged kernel; a row longer than PAST_TILE is alone, without masks.

    masks: by window, bool `[rows, 1, 1, keys]`, or none where none is needed.
    beyond: bool `[rows, keys - shortest, 1, 1]`, which keys from the shortest row's end on lie behind their row's end; or none.
    """

    rows: Tensor
    blocks: Tensor
    keys: int
    masks: Mapping[int | None, Tensor | None]
    shortest: int
    beyond: Tensor | None


@dataclass(frozen=True, slots=True)
class Rows:
    """The first `count` queries of a step. `table` int32 `[count, blocks]`; `lengths` int32 `[count]`, the newest token included."""

    count: int
    table: Tensor
    lengths: Tensor
    max_length: int
    groups: tuple[RowGroup, ...] = ()


@dataclass(frozen=True, slots=True)
class Run:
    """Queries [first, first + count) of a step, at positions [start, start + count) of one sequence with these blocks (int64)."""

    first: int
    count: int
    start: int
    blocks: Tensor


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """Where a step's tokens go and what they see. `blocks`, `offsets` and `slots` int64 `[tokens]`: where each token's KV is written."""

    blocks: Tensor
    offsets: Tensor
    slots: Tensor
    rows: Rows | None
    runs: tuple[Run, ...]


Part = tuple[Tensor, Tensor]
"""Attention over some of the keys: output `[queries, heads, dim]` and log-sum-exp, float32 `[queries, heads]`."""


def reads_pages(device: torch.device) -> bool:
    """Whether rows are attended to straight in their pages, or need RowGroups because the device has no kernel for that."""
    return device.type == "cuda" and attention_kernels() is not None


def attend(
    q: Tensor, k: Tensor, v: Tensor, cache: tuple[Tensor, Tensor], inputs: AttentionInputs, scale: float, window: int | None
) -> Tensor:
    """Write this step's k and v `[tokens, kv_heads, dim]` to the layer's cache, then attend: q and result `[tokens, heads, dim]`.

    cache: K and V of one layer, strided views `[blocks, block_size, kv_heads, dim]`. window: how many tokens a query sees, None is all.
    """
    k_cache, v_cache = cache
    kernels = attention_kernels() if q.is_cuda else None
    if kernels:
        kernels.write_kv(k, v, k_cache, v_cache, inputs.slots)
    else:
        k_cache[inputs.blocks, inputs.offsets] = k
        v_cache[inputs.blocks, inputs.offsets] = v
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if rows := inputs.rows:
        if kernels:
            kernels.paged_decode(
                q[: rows.count], k_cache, v_cache, rows.table, rows.lengths,
                scale=scale, window=window, max_length=rows.max_length, out=out[: rows.count],
            )  # fmt: skip
        else:
            _attend_rows(q, k_cache, v_cache, rows, scale, window, out)
    for run in inputs.runs:
        part = slice(run.first, run.first + run.count)
        if window is not None and run.start + run.count > window:
            out[part] = _attend_window(q[part], k_cache, v_cache, run, scale, window)
        else:
            out[part] = _attend_run(q[part], k[part], v[part], k_cache, v_cache, run, scale)
    return out


def _attend_rows(q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: Rows, scale: float, window: int | None, out: Tensor) -> None:
    heads, dim = q.shape[1:]
    kv_heads = k_cache.shape[2]
    assert sum(len(group.rows) for group in rows.groups) == rows.count, "a row is in no group"
    for group in rows.groups:
        if group.keys > PAST_TILE:
            out[group.rows] = _attend_long_row(q[group.rows], k_cache, v_cache, group, scale, window).to(out.dtype)
            continue
        k, v = (cache[group.blocks].flatten(1, 2)[:, : group.keys] for cache in (k_cache, v_cache))
        if group.beyond is not None:  # Memory never written, or another request's: not even a mask makes a NaN harmless.
            for gathered in (k, v):
                gathered[:, group.shortest :].masked_fill_(group.beyond, 0)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        # The query heads that share a key head stand where queries stand, so that keys are read once for all of them.
        part = q[group.rows].view(-1, kv_heads, heads // kv_heads, dim)
        mask = group.masks[window]
        seen = torch.nn.functional.scaled_dot_product_attention(part, k, v, attn_mask=mask, scale=scale)
        out[group.rows] = seen.reshape(-1, heads, dim)


def _attend_long_row(q: Tensor, k_cache: Tensor, v_cache: Tensor, group: RowGroup, scale: float, window: int | None) -> Tensor:
    """A group of one row, tile by tile over what it sees: q and result `[1, heads, dim]`, the result in float32."""
    assert len(group.rows) == 1, "rows longer than a tile are alone in their groups"
    block_size, state = k_cache.shape[1], None
    oldest = 0 if window is None else max(group.keys - window, 0)
    for first in range(oldest, group.keys, PAST_TILE):
        stop = min(first + PAST_TILE, group.keys)
        begin = first // block_size
        blocks = group.blocks[0, begin : -(-stop // block_size)]
        k, v = (cache[blocks].flatten(0, 1)[first - begin * block_size : stop - begin * block_size] for cache in (k_cache, v_cache))
        out, lse = dense(q, k, v, scale, causal=False)
        if state is None:
            state = out.float(), lse.clone()
        else:
            merge(*state, out, lse)
    assert state is not None
    return state[0]


def _attend_run(q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, run: Run, scale: float) -> Tensor:
    out, lse = dense(q, k, v, scale, causal=True)
    if run.start == 0:
        return out
    out = out.float()
    block_size = k_cache.shape[1]
    tile = max(PAST_TILE // block_size, 1)
    for first in range(0, -(-run.start // block_size), tile):
        blocks = run.blocks[first : first + tile]
        keys = min(run.start - first * block_size, tile * block_size)
        past_k, past_v = (cache[blocks].flatten(0, 1)[:keys] for cache in (k_cache, v_cache))
        merge(out, lse, *dense(q, past_k, past_v, scale, causal=False))
    return out


def _attend_window(q: Tensor, k_cache: Tensor, v_cache: Tensor, run: Run, scale: float, window: int) -> Tensor:
    """A run in a layer where a query sees `window` tokens: pieces of the run, each against the keys that any of its queries sees."""
    block_size, parts = k_cache.shape[1], []
    for first in range(0, run.count, WINDOW_TILE):
        count = min(WINDOW_TILE, run.count - first)
        start = run.start + first
        oldest_block = max(start - window + 1, 0) // block_size
        oldest, stop = oldest_block * block_size, start + count
        blocks = run.blocks[oldest_block : -(-stop // block_size)]
        k, v = (cache[blocks].flatten(0, 1)[: stop - oldest] for cache in (k_cache, v_cache))
        query = torch.arange(start, stop, device=q.device)[:, None]
        key = torch.arange(oldest, stop, device=q.device)[None]
        parts.append(_masked(q[first : first + count], k, v, scale, (key <= query) & (key > query - window)))
    return torch.cat(parts)


def _masked(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor) -> Tensor:
    """Attention where `mask`, bool `[queries, keys]`, is true."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    if q.is_cuda:
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)[0].transpose(0, 1)
    bias = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, -torch.inf)
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=bias, scale=scale)[0]
    return out[0].transpose(0, 1)


def dense(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool) -> Part:
    """Every query over every key, or causally over as many keys as queries: q `[queries, heads, dim]`, k and v `[keys, kv_heads, dim]`.

    The fastest call that torch has for the device, dtype and shape, and that returns the log-sum-exp.
    """
    if not q.is_cuda:
        batched = (x.transpose(0, 1)[None] for x in (q, k, v))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*batched, is_causal=causal, scale=scale)
        return out[0].transpose(0, 1), lse[0].transpose(0, 1)
    if q.dtype == torch.float32 or q.shape[2] % 8 or q.shape[2] > 256:
        return dense_reference(q, k, v, scale, causal=causal)
    if q.shape[0] in _CUDNN_QUERIES and k.shape[0] in (q.shape[0], PAST_TILE) and q.shape[2] in (64, 128):
        batched = (x.transpose(0, 1)[None] for x in (q, k, v))
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(*batched, None, True, is_causal=causal, scale=scale)
        return out[0].transpose(0, 1), lse.view(q.shape[1], -1).transpose(0, 1)
    ends = (_ends(x.shape[0], x.device) for x in (q, k))
    flash = torch.ops.aten._flash_attention_forward
    out, lse, *_ = flash(q, k, v, *ends, q.shape[0], k.shape[0], 0.0, causal, False, scale=scale)
    return out, lse.transpose(0, 1)


@lru_cache(maxsize=256)
def _ends(length: int, device: torch.device) -> Tensor:
    """Where a lone sequence of this length begins and ends. Kept for the layers that follow: the host waits while it is sent."""
    return torch.tensor([0, length], dtype=torch.int32, device=device)


def dense_reference(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool) -> Part:
    """`dense` in plain torch: scores, softmax, product, in float32 whatever the inputs are."""
    parts = []
    group = q.shape[1] // k.shape[1]
    wide_k, wide_v = (x.float().repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
    for first in range(0, q.shape[0], 1024):
        piece = q[first : first + 1024].float().transpose(0, 1)
        scores = piece @ wide_k.mT * scale
        if causal:
            later = torch.arange(k.shape[0], device=q.device) > torch.arange(first, first + piece.shape[1], device=q.device)[:, None]
            scores.masked_fill_(later, -torch.inf)
        parts.append(((scores.softmax(-1) @ wide_v).transpose(0, 1).to(q.dtype), scores.logsumexp(-1).transpose(0, 1)))
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def merge(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    """Fold attention over other keys into `out` (float32) and `lse`, in place and exactly; shapes as in Part."""
    if out.is_cuda and (kernels := attention_kernels()):
        kernels.merge_states(out, lse, other_out, other_lse)
        return
    share = torch.sigmoid(other_lse - lse)[..., None]
    out.add_(share * (other_out.float() - out))
    torch.logaddexp(lse, other_lse, out=lse)
