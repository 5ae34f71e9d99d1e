"""Computes attention of one step over paged KV: exact, merged from parts, the same on every device.

A step has two sorts of queries. *Rows* add one token to a sequence and attend to everything in its blocks,
themselves included. *Runs* are chunks, longer pieces of one sequence. A run attends causally to itself and
then, tile by tile, to everything before it. The parts are merged by their log-sum-exp in float32, which is
exact. A run may be a tree of drafted tokens: then a mask says what it sees of itself. The memory that a run
takes does not depend on the context's length. A short run behind a past in pages, such as the rest of a
prompt with a cached prefix, is attended to straight in pages, if there is a kernel for it.

A sequence too long for the device's pages keeps only its newest tokens there, the tail. Its other KV streams
by in *tiles*, in an order fixed before the step. Each tile is lent once a layer and serves every query that
it names. What pages hold is merged with it.

A sink is one more logit of a head, of no value. It weighs on an output only when all of its keys were
merged: by then `out * sigmoid(lse - sink)` is what a softmax over the keys and the sink gives, without the
sink.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.ops.attention.dense import Part, attend_fresh, attend_itself, fold, fold_past
from penstock.ops.attention.gathered import Cache, attend_rows, attend_window, past_in_pages
from penstock.ops.attention.inputs import (
    AttentionInputs,
    ColdInputs,
    ColdTile,
    LayerAttention,
    PlacedRun,
    QueryRun,
    Rows,
    RunBatch,
    Scratch,
    Tiles,
)
from penstock.ops.attention.tree import attend_tree, fold_before
from penstock.ops.kernels import native_kernels, triton_kernels
from penstock.ops.runs import MOST_PIECES, run_tokens, suits_run


class Attended(NamedTuple):
    """Attended is the output of attention, by whatever path.

    out: `[tokens, heads, dim_v]` of q's dtype.
    lse: natural log-sum-exp of the scaled scores, sinks left out, float32 `[tokens, heads]`, -inf where
        nothing was seen. `merge` takes both where there are no sinks. None if LayerAttention does not ask for
        it.
    """

    out: Tensor
    lse: Tensor | None


def reads_pages(device: torch.device) -> bool:
    """Tell whether a kernel reads pages directly for rows. Otherwise they need RowGroups."""
    return device.type == "cuda" and triton_kernels("attention") is not None


def _kernels(x: Tensor) -> ModuleType | None:
    """Return the kernels over pages for tensors where `x` is, or None."""
    return triton_kernels("attention") if x.is_cuda else None


def _native_kernels(q: Tensor, cache: Cache, layer: LayerAttention) -> ModuleType | None:
    """Return the kernels in C over pages, if they suit."""
    native = None if q.is_cuda else native_kernels("attention")
    return native if native is not None and native.suits(q, cache, layer) else None


def scratch_bytes(
    heads: int, kv_heads: int, head_dim: int, element: int, block_size: int, device: torch.device
) -> int:
    """Bound the bytes that attention to pages takes beside a step's own, whatever the lengths of sequences.

    element: bytes of a number. The answer is 0 without kernels.
    """
    kernels = triton_kernels("attention") if device.type == "cuda" else None
    return (
        int(kernels.scratch_bytes(heads, kv_heads, head_dim, element, block_size, device)) if kernels else 0
    )


def write(k: Tensor, v: Tensor, cache: Cache, inputs: AttentionInputs) -> None:
    """Write a step's k `[tokens, kv_heads, dim]` and v `[tokens, kv_heads, dim_v]` to a layer's cache."""
    if kernels := _kernels(k):
        kernels.write_kv(k, v, *cache, inputs.slots)
        return
    k_cache, v_cache = cache
    paged = None if inputs.cold is None else inputs.cold.paged
    k_cache[inputs.blocks, inputs.offsets] = k if paged is None else k[paged]
    v_cache[inputs.blocks, inputs.offsets] = v if paged is None else v[paged]


def attend(
    q: Tensor, k: Tensor, v: Tensor, cache: Cache, inputs: AttentionInputs, layer: LayerAttention,
    tiles: Tiles | None = None,
) -> Attended:  # fmt: skip
    """Attend with all queries of a step in one layer, after the step's k and v were written to the cache.

    q: `[tokens, heads, dim]`.
    k, v: the step's own, `[tokens, kv_heads, dim]` and `[tokens, kv_heads, dim_v]`.
    tiles: lends what `inputs.cold` lists for the layer's window; each tile is taken and released once.
    """
    kernels = _kernels(q)
    assert kernels is None or v.shape[2] == q.shape[2], (
        f"kernels read V as wide as K, not {v.shape[2]} beside {q.shape[2]}: plain_torch() does without them"
    )
    if inputs.placed:
        assert kernels is not None, "what is placed on the device is read by its kernels"
        return _attend_placed(q, cache, inputs.placed, layer, kernels)
    if len(inputs.runs) == 1 and not inputs.rows and not inputs.cold and inputs.runs[0].paged:
        seen, level = _attend_paged(q, k, v, cache, inputs.runs[0], layer)
        return Attended(seen.to(q.dtype).contiguous(), level if layer.lse else None)
    return _attend_mixed(q, k, v, cache, inputs, layer, tiles)


def _attend_placed(
    q: Tensor, cache: Cache, placed: PlacedRun, layer: LayerAttention, kernels: ModuleType
) -> Attended:
    """Attend with one run whose place is read on the device; padding answers 0 and -inf."""
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    lse = torch.full(q.shape[:2], -torch.inf, device=q.device) if layer.lse else None
    kernels.placed_run(q, cache, placed, layer, out=out, lse=lse)
    return Attended(out, lse)


def _attend_mixed(
    q: Tensor, k: Tensor, v: Tensor, cache: Cache, inputs: AttentionInputs, layer: LayerAttention,
    tiles: Tiles | None,
) -> Attended:  # fmt: skip
    """Attend with rows and runs. What tiles or a policy add to is kept as states until all was added."""
    out = torch.empty(*q.shape[:2], v.shape[2], dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if layer.lse else None
    result, runs, cold = Attended(out, lse), dict[int, Part](), inputs.cold
    rows: Part | None = None
    passing = cold.of(layer.window) if cold else ()
    if inputs.rows:
        more = any(tile.rows for tile in passing) or bool(cold and cold.choosing_rows)
        if (later := inputs.later) is not None:
            rows = _attend_rows(q, cache, inputs.rows, layer, result, more=True, kept=later.scratch)
            assert rows is not None
            asking = later.scratch.of("q", tuple(rows[0].shape), q).copy_(q[: inputs.rows.count])
            later.fold(partial(_fold_later, asking, rows, layer))
        else:
            rows = _attend_rows(q, cache, inputs.rows, layer, result, more=more)
    together = [batch for batch in inputs.batches if _attend_batch(q, k, v, cache, batch, layer, result)]
    over = {index for batch in together for index in batch.index}
    for index, run in enumerate(inputs.runs):
        if index in over:
            continue
        queries = run.queries
        own = q[queries], k[queries], v[queries]
        if run.paged:
            _put(result, queries, _attend_paged(*own, cache, run, layer))
        else:
            more = bool(passing) or len(run.blocks) > 0 or bool(cold and index in cold.choosing_runs)
            runs[index] = _attend_chunk(*own, cache, run, layer, more=more)
    if passing:
        _fold_tiles(q, inputs, passing, layer, rows, runs, tiles)
    if cold and (cold.choosing_rows or cold.choosing_runs):
        _fold_chosen(q, inputs, cold, layer, rows, runs, tiles)
    if rows:
        _put(result, slice(len(rows[0])), _with_sinks(rows, layer))
    for index, state in runs.items():
        _put(result, inputs.runs[index].queries, _with_sinks(state, layer))
    return result


def _with_sinks(part: tuple[Tensor, Tensor | None], layer: LayerAttention) -> tuple[Tensor, Tensor | None]:
    """Let the layer's sinks, if it has any, weigh on outputs of which all keys are merged, in place.

    Our kernels for GPUs do so themselves.
    """
    out, lse = part
    if layer.sinks is not None:
        assert lse is not None, "sinks weigh by the log-sum-exp of the keys"
        out.mul_(torch.sigmoid(lse - layer.sinks)[..., None])
    return part


def _put(result: Attended, queries: slice, part: tuple[Tensor, Tensor | None]) -> None:
    """Write some queries' part to its place in the result."""
    result.out[queries] = part[0]
    if result.lse is not None and part[1] is not None:
        result.lse[queries] = part[1]


def _attend_rows(
    q: Tensor, cache: Cache, rows: Rows, layer: LayerAttention, result: Attended, *, more: bool,
    kept: Scratch | None = None,
) -> Part | None:  # fmt: skip
    """Attend with the rows to what is in pages, into the result; if more follows, return a state, which is
    kept there if it is to be."""
    out = result.out[: rows.count]
    lse = None if result.lse is None else result.lse[: rows.count]
    if more:
        shape, like = tuple(out.shape), torch.empty(0, dtype=torch.float32, device=q.device)
        out = like.new_empty(shape) if kept is None else kept.of("out", shape, like)
        layer = layer if layer.sinks is None else replace(layer, sinks=None)
    kernels = _kernels(q)
    if more or (lse is None and layer.sinks is not None and kernels is None):
        shape, like = tuple(out.shape[:2]), torch.empty(0, dtype=torch.float32, device=q.device)
        lse = like.new_empty(shape) if kept is None else kept.of("lse", shape, like)
    if either := kernels or _native_kernels(q, cache, layer):
        either.paged_decode(q[: rows.count], cache, rows, layer, out=out, lse=lse)
    else:
        attend_rows(q, cache, rows, layer, out, lse)
    if kernels is None:
        _with_sinks((out, lse), layer)
    return (out, lse) if more and lse is not None else None


def _attend_batch(
    q: Tensor, k: Tensor, v: Tensor, cache: Cache, batch: RunBatch, layer: LayerAttention, result: Attended
) -> bool:
    """Attend with runs together, into the result. Return False where no kernel suits them."""
    kernels, queries = _kernels(q), batch.queries
    if kernels is None:
        return False
    own = q[queries], k[queries], v[queries]
    whole = batch.fresh and (layer.window is None or batch.longest <= layer.window)
    if whole and (part := attend_fresh(*own, batch.ends, batch.longest, layer)) is not None:
        _put(result, queries, _with_sinks(part, layer))
        return True
    group, head_bytes = q.shape[1] // k.shape[1], q.shape[2] * q.element_size()
    pieces = sum([-(-run.count // run_tokens(group, head_bytes)) for run in batch.runs])
    fits = (suits_run(run.count, run.start + run.count, group, head_bytes) for run in batch.runs)
    if pieces > MOST_PIECES or not all(fits):
        return False
    lse = None if result.lse is None else result.lse[queries]
    kernels.paged_runs(own[0], cache, batch, layer, out=result.out[queries], lse=lse)
    return True


def _attend_paged(
    q: Tensor, k: Tensor, v: Tensor, cache: Cache, run: QueryRun, layer: LayerAttention
) -> tuple[Tensor, Tensor | None]:
    """Attend with a run whose past is in pages; the output is perhaps float32.

    The log-sum-exp is there if the layer asks for it. Capped scores, and windows with sinks, have no other
    kernel than that over pages.
    """
    group, head_bytes, sinks = (
        q.shape[1] // k.shape[1],
        q.shape[2] * q.element_size(),
        layer.sinks is not None,
    )
    alone = layer.cap is not None or (sinks and layer.window is not None)
    kernels = _kernels(q) if run.start or alone else None
    if kernels and (alone or suits_run(run.count, run.start + run.count, group, head_bytes)):
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if layer.lse else None
        return kernels.paged_run(q, cache, run, layer, lse=lse), lse
    levels = layer.lse or sinks
    if (native := _native_kernels(q, cache, layer)) and native.suits_run(run):
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if levels else None
        return _with_sinks((native.paged_run(q, cache, run, layer, lse=lse), lse), layer)
    cut = layer.window is not None and run.start + run.count > layer.window
    if cut and run.tree is None and not (levels and q.is_cuda):
        return _with_sinks(attend_window(q, cache, run, layer, lse=levels), layer)
    return _with_sinks(_attend_chunk(q, k, v, cache, run, layer, more=run.start > 0), layer)


def _attend_chunk(
    q: Tensor, k: Tensor, v: Tensor, cache: Cache, run: QueryRun, layer: LayerAttention, *, more: bool
) -> Part:
    """Attend with a run to itself and to its past in pages.

    more: whether it has a past, in pages or elsewhere; then return a state, into which to fold.
    """
    if run.tree is not None:
        return attend_tree(q, k, v, cache, run, layer)
    own, lse = attend_itself(q, k, v, layer)
    if not more:
        return own, lse
    state = own.float(), lse
    for position, past_k, past_v in past_in_pages(cache, run, layer.window):
        fold_past(state, q, past_k, past_v, layer, run.start - position)
    return state


def _fold_tiles(
    q: Tensor, inputs: AttentionInputs, passing: tuple[ColdTile, ...], layer: LayerAttention,
    rows: Part | None, runs: Mapping[int, Part], tiles: Tiles | None,
) -> None:  # fmt: skip
    """Fold the valid keys of each passing tile into the states of all queries that it names."""
    assert tiles is not None, "a step with cold tiles needs someone to take them from"
    assert inputs.cold
    for tile in passing:
        k, v = (x if x.shape[0] == tile.keys else x[: tile.keys] for x in tiles.take())
        if rows and tile.rows:
            _fold_into_rows(rows, q, k, v, tile, inputs.cold.positions, layer)
        for index in tile.runs:
            run = inputs.runs[index]
            if run.tree is not None:
                fold_before(runs[index], q[run.queries], k, v, layer, run.tree, tile.start)
            else:
                fold_past(runs[index], q[run.queries], k, v, layer, run.start - tile.start)
        tiles.release()


def _fold_later(q: Tensor, rows: Part, layer: LayerAttention, cold: ColdInputs, tiles: Tiles) -> None:
    """Fold the tiles that the layer sees into rows of a step that is replayed, all of them."""
    for tile in cold.of(layer.window):
        k, v = (x[: tile.keys] for x in tiles.take())
        _fold_into_rows(rows, q, k, v, tile, cold.positions, layer)
        tiles.release()


def _fold_into_rows(
    state: Part,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tile: ColdTile,
    positions: tuple[int, ...],
    layer: LayerAttention,
) -> None:
    """Fold a tile into the rows that it names.

    The rows are stacked, so that the tile is read once for all. Where a window cuts the tile, they go one by
    one.
    """
    out, lse = state
    distances = [positions[row] - tile.start for row in tile.rows]
    if layer.window is not None and max(distances) >= layer.window:
        for row, distance in zip(tile.rows, distances, strict=True):
            part = slice(row, row + 1)
            fold_past((out[part], lse[part]), q[part], k, v, layer, distance)
        return
    first, count = tile.rows[0], len(tile.rows)
    if tile.rows[-1] - first == count - 1:
        part = slice(first, first + count)
        fold((out[part], lse[part]), q[part], k, v, layer)
    else:
        fold(state, q[: len(out)], k, v, layer, tile.index)


def _fold_chosen(
    q: Tensor, inputs: AttentionInputs, cold: ColdInputs, layer: LayerAttention,
    rows: Part | None, runs: Mapping[int, Part], tiles: Tiles | None,
) -> None:  # fmt: skip
    """Fold what policies choose into the states of the queries that it is chosen for."""
    assert tiles is not None, "a step with a policy needs someone who chooses"
    assert rows or not cold.choosing_rows
    alone = [slice(row, row + 1) for row in cold.choosing_rows]
    readers = [(part, (rows[0][part], rows[1][part])) for part in alone if rows]
    readers += [(inputs.runs[index].queries, runs[index]) for index in cold.choosing_runs]
    for number, (part, state) in enumerate(readers):
        for k, v in tiles.choose(number, q[part], state[1], layer):
            fold(state, q[part], k, v, layer)
