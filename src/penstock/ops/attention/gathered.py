"""Attends to pages without a kernel that reads them: K and V are gathered first, a part at a time."""

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.ops.attention import dense
from penstock.ops.attention.dense import Part, masked, merge
from penstock.ops.attention.inputs import LayerAttention, QueryRun, RowGroup, Rows, Scratch

PAST_TILE = 8192
"""Keys of the past that a run attends to at a time; gathered from pages into scratch."""

Cache = tuple[Tensor, Tensor]
"""K and V of one layer in pages: strided views `[blocks, block_size, kv_heads, dim]` and `[blocks,
block_size, kv_heads, dim_v]`."""


def attend_rows(
    q: Tensor, cache: Cache, rows: Rows, layer: LayerAttention, out: Tensor, lse: Tensor | None
) -> None:
    """Attend with each row to its keys in pages, group by group.

    q: `[rows or more, heads, dim]`.
    out: `[rows, heads, dim_v]`, which is written.
    lse: float32 `[rows, heads]`, which is written if it is given.
    """
    heads, kv_heads = q.shape[1], cache[0].shape[2]
    assert sum(len(group.rows) for group in rows.groups) == rows.count, "a row is in no group"
    for group in rows.groups:
        if group.keys <= PAST_TILE and not group.cold:
            k, v = (x[:, : group.keys] for x in _gathered(cache, group.blocks, rows.scratch))
            if group.beyond is not None:
                # Memory never written, or another request's: not even a mask makes a NaN harmless.
                for gathered in (k, v):
                    gathered[:, group.shortest :].masked_fill_(group.beyond, 0)
            k, v = k.transpose(1, 2), v.transpose(1, 2)
            # The query heads that share a key head stand where queries stand, so that keys are read once for
            # all of them.
            part = q[group.rows].view(-1, kv_heads, heads // kv_heads, q.shape[2])
            seen, level = masked(part, k, v, layer, mask=group.masks[layer.window], lse=lse is not None)
        else:
            seen, level = _attend_long_row(q[group.rows], cache, group, rows.scratch, layer)
        out[group.rows] = seen.reshape(-1, heads, out.shape[2]).to(out.dtype)
        if lse is not None and level is not None:
            lse[group.rows] = level.reshape(-1, heads)


def _attend_long_row(
    q: Tensor, cache: Cache, group: RowGroup, scratch: Scratch, layer: LayerAttention
) -> Part:
    """Attend with a group of one row, q `[1, heads, dim]`, to PAST_TILE keys at a time.

    The output is float32. Without keys it is 0, and the log-sum-exp -inf.
    """
    assert len(group.rows) == 1, (
        "rows longer than a tile, and rows with cold tiles, are alone in their groups"
    )
    block_size, state = cache[0].shape[1], None
    oldest = 0 if layer.window is None else max(group.keys - layer.window, 0)
    for first in range(oldest, group.keys, PAST_TILE):
        stop = min(first + PAST_TILE, group.keys)
        begin = first // block_size
        blocks = group.blocks[0, begin : -(-stop // block_size)]
        part = slice(first - begin * block_size, stop - begin * block_size)
        k, v = (x[part] for x in _gathered(cache, blocks, scratch))
        out, lse = dense.dense(q, k, v, layer, causal=False)
        if state is None:
            state = out.float(), lse.clone()
        else:
            merge(*state, out, lse)
    return state or (
        torch.zeros(*q.shape[:2], cache[1].shape[3], device=q.device),
        torch.full(q.shape[:2], -torch.inf, device=q.device),
    )


def past_in_pages(cache: Cache, run: QueryRun, window: int | None) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield the part of a run's past that is in pages, PAST_TILE keys at a time.

    Each item is the first key's position, and K and V `[keys, kv_heads, dim]`. Tiles outside the window are
    left out.
    """
    block_size = cache[0].shape[1]
    tile = max(PAST_TILE // block_size, 1)
    for first in range(0, -(-(run.start - run.near) // block_size) if len(run.blocks) else 0, tile):
        blocks, position = run.blocks[first : first + tile], run.near + first * block_size
        keys = min(run.start - position, tile * block_size)
        if window is None or run.start - window < position + keys - 1:
            past_k, past_v = (_of_blocks(x, blocks)[:keys] for x in cache)
            yield position, past_k, past_v


def places_in_pages(cache: Cache, run: QueryRun, begin: int, stop: int) -> tuple[Tensor, Tensor]:
    """Return K and V of a run's sequence at the places [begin, stop), which are in its pages."""
    size = cache[0].shape[1]
    first = begin // size
    blocks, skipped = run.blocks[first - run.near // size : -(-stop // size)], begin - first * size
    k, v = (_of_blocks(x, blocks)[skipped : skipped + stop - begin] for x in cache)
    return k, v


def attend_window(
    q: Tensor, cache: Cache, run: QueryRun, layer: LayerAttention, *, lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Attend with a run, its own KV in pages as well, in a layer with a window.

    It takes pieces of the run, each against the keys that any of its queries sees, and returns the output
    `[queries, heads, dim_v]`, and the log-sum-exp if it is needed.
    """
    window, block_size, parts, levels = layer.window, cache[0].shape[1], list[Tensor](), list[Tensor]()
    assert window is not None
    for first in range(0, run.count, dense.WINDOW_TILE):
        count = min(dense.WINDOW_TILE, run.count - first)
        start = run.start + first
        oldest_block = max(start - window + 1, 0) // block_size
        oldest, stop = oldest_block * block_size, start + count
        blocks = run.blocks[oldest_block : -(-stop // block_size)]
        query = torch.arange(start, stop, device=q.device)[:, None]
        key = torch.arange(oldest, stop, device=q.device)[None]
        piece = (q[first : first + count], *(_of_blocks(x, blocks)[: stop - oldest] for x in cache))
        mask = (key <= query) & (key > query - window)
        queries, k, v = (x.transpose(0, 1)[None] for x in piece)
        out, level = masked(queries, k, v, layer, mask=mask, lse=lse)
        parts.append(out[0].transpose(0, 1))
        if lse and level is not None:
            levels.append(level[0].t())
    return torch.cat(parts), torch.cat(levels) if lse else None


def _gathered(cache: Cache, blocks: Tensor, scratch: Scratch) -> tuple[Tensor, Tensor]:
    """Copy K and V of the tokens of blocks `[..., blocks]` into scratch: `[..., keys, kv_heads, dim]`."""
    if blocks.is_cuda:  # Its allocator keeps memory itself.
        return _of_blocks(cache[0], blocks), _of_blocks(cache[1], blocks)
    k_place, v_place = (
        scratch.of(name, (blocks.numel(), *x.shape[1:]), x) for name, x in zip("kv", cache, strict=True)
    )
    return _of_blocks(cache[0], blocks, k_place), _of_blocks(cache[1], blocks, v_place)


def _of_blocks(cache: Tensor, blocks: Tensor, place: Tensor | None = None) -> Tensor:
    """Return `cache[blocks]`, with the tokens of a sequence's blocks one after the other.

    On a CPU `index_select` is five times as fast as indexing.
    """
    if cache.is_cuda:
        return cache[blocks].flatten(blocks.dim() - 1, blocks.dim())
    return torch.index_select(cache, 0, blocks.flatten(), out=place).view(
        *blocks.shape[:-1], -1, *cache.shape[2:]
    )
