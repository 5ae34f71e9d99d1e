"""Attention of one step over paged KV: exact, merged from parts, the same for every device.

A step's queries are of two sorts. *Rows* add one token to a sequence and attend to everything in its blocks,
themselves included. *Runs* are longer pieces of one sequence: each attends causally to itself and then, tile
by tile, to everything before it; the parts are merged by their log-sum-exp in float32, which is exact. The
memory that a run takes does not depend on the context's length. A short one behind a past in pages, such as
what is left of a prompt that was found, is attended to straight in them where there is a kernel for that.

The KV of a sequence too long for the device's pages rests elsewhere but for its newest tokens, the tail. It
passes by in *tiles*, in an order fixed before the step: each is borrowed once per layer and serves every
query that it names, whatever pages hold is merged with it.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from penstock.ops.kernels import attention_kernels, tile_kernels
from penstock.ops.runs import suits_run

PAST_TILE = 8192
"""Keys of the past that a run attends to at a time; gathered from pages into scratch."""

WINDOW_TILE = 512
"""Queries of a run that share one mask in layers with a sliding window."""

_CUDNN_QUERIES = (1024, 2048, 4096, 8192, 16384)
"""cuDNN plans once per shape, at 45 ms: it gets few shapes, and the ones where it is fastest."""
_CUDNN_KEYS = (8192, 16384, 32768)


class Scratch:
    """Memory that one layer after the other gathers K and V into, kept from step to step: pages that are new
    to the process cost more than what is written into them. For one step at a time."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def of(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """An uninitialized tensor of this shape, of `like`'s kind: the same memory as was last lent by that
        name, where that is enough."""
        size = math.prod(shape)
        kept = self._kept.get(name)
        if kept is None or kept.numel() < size or kept.dtype != like.dtype or kept.device != like.device:
            kept = self._kept[name] = torch.empty(size * 5 // 4, dtype=like.dtype, device=like.device)
        return kept[:size].view(shape)


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows of similar length, padded to one, for devices without a paged kernel; a row longer than PAST_TILE
    is alone, without masks.

    cold: one row, alone and without masks, that also attends to tiles; `keys` are those of its tail, perhaps
    none. masks: by window, bool `[rows, 1, 1, keys]`, or none where none is needed. beyond: bool `[rows, keys
    - shortest, 1, 1]`, which keys from the shortest row's end on lie behind their row's end; or none.
    """

    rows: Tensor
    blocks: Tensor
    keys: int
    masks: Mapping[int | None, Tensor | None]
    shortest: int
    beyond: Tensor | None
    cold: bool = False


@dataclass(frozen=True, slots=True)
class Rows:
    """The first `count` queries of a step. `table` int32 `[count, blocks]`; `lengths` int32 `[count]`, the
    newest token included.

    Of a row that also attends to tiles, both speak of its tail alone: the table begins with the tail's first
    block, and the length, which `max_length` bounds too, counts the tail's tokens and may be 0. A row of
    length 0 that attends to nothing answers 0.
    """

    count: int
    table: Tensor
    lengths: Tensor
    max_length: int
    groups: tuple[RowGroup, ...] = ()
    arrivals: Tensor | None = None
    """int32 zeros, at least `[count * kv_heads]`, which the device's paged kernel counts in and leaves zeros;
    it needs a second launch without. One step at a time may use them."""
    scratch: Scratch = field(default_factory=Scratch)
    """Of the groups."""


@dataclass(frozen=True, slots=True)
class Run:
    """Queries [first, first + count) of a step, at positions [start, start + count) of one sequence with
    these blocks (int64).

    Not `paged`: of its past only the positions from `near` on are in pages, these blocks. It sees them,
    itself, whose KV is not read from pages, and the tiles that name it.
    """

    first: int
    count: int
    start: int
    blocks: Tensor
    paged: bool = True
    near: int = 0


@dataclass(frozen=True, slots=True)
class PlacedRun:
    """All tokens of a step are one sequence's, which is in pages; where, is read on the device, by its paged
    kernel.

    blocks: int32 `[blocks]`, the sequence's. where: int32 `[2]`, the position of the first token and how many
    there are; what else the step has is padding. The run ends at `max_length` or before.
    """

    blocks: Tensor
    where: Tensor
    max_length: int


@dataclass(frozen=True, slots=True)
class ColdTile:
    """Keys at positions [start, start + keys) of all the sequences that share them, and who attends to them.

    rows: indices of the step's rows, ascending, and `index`, the same as int64 on the device. runs: indices
    of the step's runs, not paged, which begin at or after the tile's end.
    """

    start: int
    keys: int
    rows: tuple[int, ...]
    index: Tensor
    runs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ColdInputs:
    """What of a step concerns KV outside the pages, the same for all layers.

    tiles: in the order in which layers take them. seen: by window, the indices of the tiles that a layer with
    that window takes, ascending; all where nothing is said. positions: of each of the step's rows, tiles or
    not. paged: int64, which of the step's tokens have a place in pages; None where all do. AttentionInputs'
    `blocks` and `offsets` are then of those tokens alone, while `slots` keeps one entry per token, -1 for the
    others.
    """

    tiles: tuple[ColdTile, ...]
    positions: tuple[int, ...]
    paged: Tensor | None = None
    seen: Mapping[int | None, tuple[int, ...]] = field(default_factory=dict)
    choosing_rows: tuple[int, ...] = ()
    choosing_runs: tuple[int, ...] = ()
    """Indices of rows and runs that attend to what a policy chooses for them instead of to tiles; only
    without windows."""

    def of(self, window: int | None) -> tuple[ColdTile, ...]:
        """The tiles that a layer with this window takes."""
        seen = self.seen.get(window)
        return self.tiles if seen is None else tuple(self.tiles[index] for index in seen)


class Tiles(Protocol):
    """Where a layer's tiles come from, in ColdInputs' order: what `take` lends may be read on the compute
    stream until `release`.

    K and V, of the same strides, `[keys, kv_heads, dim]`; there may be more keys than are valid.
    """

    def take(self) -> tuple[Tensor, Tensor]: ...

    def release(self) -> None: ...

    def choose(self, reader: int, q: Tensor, lse: Tensor, scale: float) -> Iterator[tuple[Tensor, Tensor]]:
        """What a policy chooses for these queries, tile after tile; each is lent until the next is asked for.

        reader: the number of who looks, `choosing_rows` first and then `choosing_runs`. q `[queries, heads,
        dim]`; lse of all that they have seen, float32 `[queries, heads]`, kept up to date by the caller.
        """


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """Where a step's tokens go and what they see. `blocks`, `offsets` and `slots` int64 `[tokens]`: where
    each token's KV is written."""

    blocks: Tensor
    offsets: Tensor
    slots: Tensor
    rows: Rows | None
    runs: tuple[Run, ...]
    cold: ColdInputs | None = None
    placed: PlacedRun | None = None
    """Instead of rows and runs."""


Part = tuple[Tensor, Tensor]
"""Attention over some of the keys: output `[queries, heads, dim]` and log-sum-exp, float32 `[queries,
heads]`."""


def reads_pages(device: torch.device) -> bool:
    """Whether rows are attended to straight in their pages, or need RowGroups because the device has no
    kernel for that."""
    return device.type == "cuda" and attention_kernels() is not None


def _kernels(x: Tensor) -> ModuleType | None:
    """The kernels for tensors where `x` is, or none."""
    return attention_kernels() if x.is_cuda else None


def _tile_kernels(x: Tensor) -> ModuleType | None:
    """Those for tiles, likewise."""
    return tile_kernels() if x.is_cuda else None


def scratch_bytes(
    heads: int, kv_heads: int, head_dim: int, element: int, block_size: int, device: torch.device
) -> int:
    """Bytes that attention to pages takes at most beside a step's own, whatever the lengths of its sequences.
    0 without kernels."""
    kernels = attention_kernels() if device.type == "cuda" else None
    return (
        int(kernels.scratch_bytes(heads, kv_heads, head_dim, element, block_size, device)) if kernels else 0
    )


def write(k: Tensor, v: Tensor, cache: tuple[Tensor, Tensor], inputs: AttentionInputs) -> None:
    """Put a step's k and v `[tokens, kv_heads, dim]` where they belong in a layer's cache, as `attend`
    describes it."""
    k_cache, v_cache = cache
    if kernels := _kernels(k):
        kernels.write_kv(k, v, k_cache, v_cache, inputs.slots)
        return
    paged = None if inputs.cold is None else inputs.cold.paged
    k_cache[inputs.blocks, inputs.offsets] = k if paged is None else k[paged]
    v_cache[inputs.blocks, inputs.offsets] = v if paged is None else v[paged]


def attend(
    q: Tensor, k: Tensor, v: Tensor, cache: tuple[Tensor, Tensor], inputs: AttentionInputs, scale: float,
    window: int | None,
    tiles: Tiles | None = None, written: bool = False,
) -> Tensor:  # fmt: skip
    """Write this step's k and v `[tokens, kv_heads, dim]` to the layer's cache, unless that is done, then
    attend: q and result `[tokens, heads, dim]`.

    cache: K and V of one layer, strided views `[blocks, block_size, kv_heads, dim]`. window: how many tokens
    a query sees, None is all. tiles: lends what `inputs.cold` lists for this window; each is taken and
    released once.
    """
    k_cache, v_cache = cache
    cold = inputs.cold
    passing = cold.of(window) if cold else ()
    kernels = _kernels(q)
    if not written:
        write(k, v, cache, inputs)
    if placed := inputs.placed:
        assert kernels is not None, "what is placed on the device is read by its kernels"
        seen, _ = kernels.placed_run(
            q,
            k_cache,
            v_cache,
            placed.blocks,
            placed.where,
            scale=scale,
            window=window,
            max_length=placed.max_length,
        )
        return seen  # type: ignore[no-any-return]
    if len(inputs.runs) == 1 and not inputs.rows and not cold and inputs.runs[0].paged:
        return (
            _attend_paged(q, k, v, k_cache, v_cache, inputs.runs[0], scale, window).to(q.dtype).contiguous()
        )
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    states: dict[int, Part] = {}
    rows_state: Part | None = None
    if rows := inputs.rows:
        wide = any(tile.rows for tile in passing) or bool(cold and cold.choosing_rows)
        seen = (
            torch.empty(q[: rows.count].shape, dtype=torch.float32, device=q.device)
            if wide
            else out[: rows.count]
        )
        if kernels:
            _, lse = kernels.paged_decode(
                q[: rows.count], k_cache, v_cache, rows.table, rows.lengths,
                scale=scale, window=window, max_length=rows.max_length, out=seen, arrivals=rows.arrivals,
            )  # fmt: skip
        else:
            lse = _attend_rows(q, k_cache, v_cache, rows, scale, window, seen)
        if wide:
            rows_state = seen, lse
    for index, run in enumerate(inputs.runs):
        part = slice(run.first, run.first + run.count)
        if not run.paged:
            own, lse = _attend_own(q[part], k[part], v[part], scale, window)
            more = passing or len(run.blocks) or (cold and index in cold.choosing_runs)
            states[index] = own.float() if more else own, lse
            for position, past_k, past_v in _past_in_pages(k_cache, v_cache, run):
                _add_past(states[index], q[part], past_k, past_v, scale, window, run.start - position)
        else:
            out[part] = _attend_paged(q[part], k[part], v[part], k_cache, v_cache, run, scale, window)
    if passing:
        assert tiles is not None, "a step with cold tiles needs someone to take them from"
        for tile in passing:
            lent_k, lent_v = tiles.take()
            _attend_tile(
                q, lent_k[: tile.keys], lent_v[: tile.keys], tile, inputs, rows_state, states, scale, window
            )
            tiles.release()
    if cold and (cold.choosing_rows or cold.choosing_runs):
        assert tiles is not None, "a step with a policy needs someone who chooses"
        _attend_chosen(q, inputs, rows_state, states, tiles, scale)
    if rows_state:
        out[: len(rows_state[0])] = rows_state[0]
    for index, state in states.items():
        run = inputs.runs[index]
        out[run.first : run.first + run.count] = state[0]
    return out


def _attend_chosen(
    q: Tensor,
    inputs: AttentionInputs,
    rows: Part | None,
    runs: Mapping[int, Part],
    tiles: Tiles,
    scale: float,
) -> None:
    """What policies choose, folded into the states."""
    assert inputs.cold
    readers: list[tuple[slice, Part]] = []
    for row in inputs.cold.choosing_rows:
        assert rows
        part = slice(row, row + 1)
        readers.append((part, (rows[0][part], rows[1][part])))
    for index in inputs.cold.choosing_runs:
        run = inputs.runs[index]
        readers.append((slice(run.first, run.first + run.count), runs[index]))
    for number, (part, state) in enumerate(readers):
        for k, v in tiles.choose(number, q[part], state[1], scale):
            _fold(state, q[part], k, v, scale)


def _attend_own(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Part:
    """A run over itself alone, causally, in a layer with or without a window."""
    if window is None or len(q) <= window:
        return dense(q, k, v, scale, causal=True)
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    piece = min(WINDOW_TILE, window)
    for first in range(0, len(q), piece):
        part = slice(first, first + piece)
        out[part], lse[part] = dense(q[part], k[part], v[part], scale, causal=True)
        if first:
            _add_past((out[part], lse[part]), q[part], k[:first], v[:first], scale, window, first)
    return out, lse


def _attend_tile(
    q: Tensor, k: Tensor, v: Tensor, tile: ColdTile, inputs: AttentionInputs, rows: Part | None,
    runs: Mapping[int, Part],
    scale: float, window: int | None,
) -> None:  # fmt: skip
    """One tile's valid keys, for every query that it names: folded into the state of all rows, and into those
    of the runs, by index."""
    assert inputs.cold
    if rows and tile.rows:
        _rows_over_tile(rows, q, k, v, tile, inputs.cold.positions, scale, window)
    for index in tile.runs:
        run = inputs.runs[index]
        _add_past(
            runs[index], q[run.first : run.first + run.count], k, v, scale, window, run.start - tile.start
        )


def _rows_over_tile(
    state: Part,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tile: ColdTile,
    positions: tuple[int, ...],
    scale: float,
    window: int | None,
) -> None:
    """The rows that a tile names, stacked so that its keys are read once for all; one by one where a window
    cuts it."""
    out, lse = state
    distances = [positions[row] - tile.start for row in tile.rows]
    if window is not None and max(distances) >= window:
        for row, distance in zip(tile.rows, distances, strict=True):
            part = slice(row, row + 1)
            _add_past((out[part], lse[part]), q[part], k, v, scale, window, distance)
        return
    first, count = tile.rows[0], len(tile.rows)
    if tile.rows[-1] - first == count - 1:
        part = slice(first, first + count)
        _fold((out[part], lse[part]), q[part], k, v, scale)
    elif (kernels := _tile_kernels(q)) and kernels.fits_tile(q, k, v, count):
        kernels.fold_tile(out, lse, q[: len(out)], k, v, tile.index, scale=scale)
    else:
        some = out[tile.index], lse[tile.index]
        _fold(some, q[tile.index], k, v, scale)
        out[tile.index], lse[tile.index] = some


def _fold(state: Part, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
    """Fold what every query sees of all keys into their state. A few go to a kernel that spreads the keys
    over the whole device."""
    if (kernels := _tile_kernels(q)) and kernels.fits_tile(q, k, v, len(q)):
        kernels.fold_tile(*state, q, k, v, scale=scale)
        return
    merge(*state, *dense(q, k, v, scale, causal=False))


def _add_past(
    state: Part, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, distance: int
) -> None:
    """Fold into `state` what consecutive queries see of keys that all come before them. distance: first
    query's position less first key's.

    A window makes of the keys that query i sees those from i + shift on: a triangle that is causal when
    queries and keys are turned round, and a rectangle behind it. So no mask is needed, and each part has its
    log-sum-exp.
    """
    count, keys = len(q), len(k)
    if window is None or distance + count <= window:
        _fold(state, q, k, v, scale)
        return
    shift = distance - window + 1
    whole, stop = min(max(1 - shift, 0), count), min(count, keys - shift)
    if not whole and stop <= 0:
        return

    def fold(begin: int, end: int, oldest: int, newest: int, triangle: bool = False) -> None:
        parts = q[begin:end], k[oldest:newest], v[oldest:newest]
        some = state[0][begin:end], state[1][begin:end]
        if not triangle:
            _fold(some, *parts, scale)
            return
        mirrored_q, mirrored_k, mirrored_v = (x.flip(0) for x in parts)
        merge(*some, *(x.flip(0) for x in dense(mirrored_q, mirrored_k, mirrored_v, scale, causal=True)))

    if whole:
        fold(0, whole, 0, keys)
    for begin in range(whole, stop, WINDOW_TILE):
        end = min(begin + WINDOW_TILE, stop)
        if end - begin == 1:
            fold(begin, end, begin + shift, keys)
            continue
        fold(begin, end, begin + shift, end + shift, triangle=True)
        if end + shift < keys:
            fold(begin, end, end + shift, keys)


def _attend_rows(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: Rows, scale: float, window: int | None, out: Tensor
) -> Tensor:
    """Writes `out` and returns the log-sum-exp, float32 `[rows, heads]`, filled in for rows that also attend
    to tiles."""
    heads, dim = q.shape[1:]
    kv_heads = k_cache.shape[2]
    lse = torch.empty(rows.count, heads, dtype=torch.float32, device=q.device)
    assert sum(len(group.rows) for group in rows.groups) == rows.count, "a row is in no group"
    for group in rows.groups:
        if group.keys > PAST_TILE or group.cold:
            seen, lse[group.rows] = _attend_long_row(
                q[group.rows], k_cache, v_cache, group, rows.scratch, scale, window
            )
            out[group.rows] = seen.to(out.dtype)
            continue
        k, v = (
            seen[:, : group.keys] for seen in _both_gathered(k_cache, v_cache, group.blocks, rows.scratch)
        )
        if (
            group.beyond is not None
        ):  # Memory never written, or another request's: not even a mask makes a NaN harmless.
            for gathered in (k, v):
                gathered[:, group.shortest :].masked_fill_(group.beyond, 0)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        # The query heads that share a key head stand where queries stand, so that keys are read once for all
        # of them.
        part = q[group.rows].view(-1, kv_heads, heads // kv_heads, dim)
        mask = group.masks[window]
        seen = torch.nn.functional.scaled_dot_product_attention(part, k, v, attn_mask=mask, scale=scale)
        out[group.rows] = seen.reshape(-1, heads, dim).to(out.dtype)
    return lse


def _both_gathered(
    k_cache: Tensor, v_cache: Tensor, blocks: Tensor, scratch: Scratch
) -> tuple[Tensor, Tensor]:
    """K and V of the tokens of blocks `[..., blocks]`, copied into scratch: `[..., keys, kv_heads, dim]`."""
    if k_cache.is_cuda:  # Its allocator keeps memory itself.
        return _gathered(k_cache, blocks), _gathered(v_cache, blocks)
    places = [
        scratch.of(name, (blocks.numel(), *cache.shape[1:]), cache)
        for name, cache in (("k", k_cache), ("v", v_cache))
    ]
    return _gathered(k_cache, blocks, places[0]), _gathered(v_cache, blocks, places[1])


def _gathered(cache: Tensor, blocks: Tensor, place: Tensor | None = None) -> Tensor:
    """`cache[blocks]`, with the tokens of a sequence's blocks one after the other. A CPU takes five times as
    long for that as for this."""
    if cache.is_cuda:
        return cache[blocks].flatten(blocks.dim() - 1, blocks.dim())
    return torch.index_select(cache, 0, blocks.flatten(), out=place).view(
        *blocks.shape[:-1], -1, *cache.shape[2:]
    )


def _attend_long_row(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    group: RowGroup,
    scratch: Scratch,
    scale: float,
    window: int | None,
) -> Part:
    """A group of one row, PAST_TILE keys at a time: q and result `[1, heads, dim]`, the result in float32; of
    no keys 0 and -inf."""
    assert len(group.rows) == 1, (
        "rows longer than a tile, and rows with cold tiles, are alone in their groups"
    )
    block_size, state = k_cache.shape[1], None
    oldest = 0 if window is None else max(group.keys - window, 0)
    for first in range(oldest, group.keys, PAST_TILE):
        stop = min(first + PAST_TILE, group.keys)
        begin = first // block_size
        blocks = group.blocks[0, begin : -(-stop // block_size)]
        part = slice(first - begin * block_size, stop - begin * block_size)
        k, v = (seen[part] for seen in _both_gathered(k_cache, v_cache, blocks, scratch))
        out, lse = dense(q, k, v, scale, causal=False)
        if state is None:
            state = out.float(), lse.clone()
        else:
            merge(*state, out, lse)
    return state or (
        torch.zeros_like(q, dtype=torch.float32),
        torch.full(q.shape[:2], -torch.inf, device=q.device),
    )


def _attend_paged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    run: Run,
    scale: float,
    window: int | None,
) -> Tensor:
    """A run whose past is in pages, perhaps in float32."""
    group, head_bytes = q.shape[1] // k_cache.shape[2], q.shape[2] * q.element_size()
    if (
        run.start
        and (kernels := _kernels(q))
        and suits_run(run.count, run.start + run.count, group, head_bytes)
    ):
        out: Tensor = kernels.paged_run(
            q, k_cache, v_cache, run.blocks, run.start, scale=scale, window=window
        )[0]
        return out
    if window is not None and run.start + run.count > window:
        return _attend_window(q, k_cache, v_cache, run, scale, window)
    return _attend_run(q, k, v, k_cache, v_cache, run, scale)


def _attend_run(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, run: Run, scale: float
) -> Tensor:
    out, lse = dense(q, k, v, scale, causal=True)
    if run.start == 0:
        return out
    out = out.float()
    for _, past_k, past_v in _past_in_pages(k_cache, v_cache, run):
        merge(out, lse, *dense(q, past_k, past_v, scale, causal=False))
    return out


def _past_in_pages(k_cache: Tensor, v_cache: Tensor, run: Run) -> Iterator[tuple[int, Tensor, Tensor]]:
    """A run's past that is in pages, gathered a tile at a time: the first's position, and K and V `[keys,
    kv_heads, dim]`."""
    block_size = k_cache.shape[1]
    tile = max(PAST_TILE // block_size, 1)
    for first in range(0, -(-(run.start - run.near) // block_size) if len(run.blocks) else 0, tile):
        blocks, position = run.blocks[first : first + tile], run.near + first * block_size
        keys = min(run.start - position, tile * block_size)
        past_k, past_v = (_gathered(cache, blocks)[:keys] for cache in (k_cache, v_cache))
        yield position, past_k, past_v


def _attend_window(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, run: Run, scale: float, window: int
) -> Tensor:
    """A run in a layer where a query sees `window` tokens: pieces of the run, each against the keys that any
    of its queries sees."""
    block_size, parts = k_cache.shape[1], []
    for first in range(0, run.count, WINDOW_TILE):
        count = min(WINDOW_TILE, run.count - first)
        start = run.start + first
        oldest_block = max(start - window + 1, 0) // block_size
        oldest, stop = oldest_block * block_size, start + count
        blocks = run.blocks[oldest_block : -(-stop // block_size)]
        k, v = (_gathered(cache, blocks)[: stop - oldest] for cache in (k_cache, v_cache))
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
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)[
            0
        ].transpose(0, 1)
    bias = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, -torch.inf)
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, attn_mask=bias, scale=scale
    )[0]
    return out[0].transpose(0, 1)


def dense(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool) -> Part:
    """Every query over every key, or causally over as many keys as queries: q `[queries, heads, dim]`, k and
    v `[keys, kv_heads, dim]`.

    The fastest call that torch has for the device, dtype and shape, and that returns the log-sum-exp.
    """
    if not q.is_cuda:
        batched = (x.transpose(0, 1)[None] for x in (q, k, v))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *batched, is_causal=causal, scale=scale
        )
        return out[0].transpose(0, 1), lse[0].transpose(0, 1)
    if q.dtype == torch.float32 or q.shape[2] % 8 or q.shape[2] > 256:
        return dense_reference(q, k, v, scale, causal=causal)
    if q.shape[0] in _CUDNN_QUERIES and k.shape[0] in (q.shape[0], *_CUDNN_KEYS) and q.shape[2] in (64, 128):
        batched = (x.transpose(0, 1)[None] for x in (q, k, v))
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *batched, None, True, is_causal=causal, scale=scale
        )
        return out[0].transpose(0, 1), lse.view(q.shape[1], -1).transpose(0, 1)
    ends = (_ends(x.shape[0], x.device) for x in (q, k))
    flash = torch.ops.aten._flash_attention_forward
    out, lse, *_ = flash(q, k, v, *ends, q.shape[0], k.shape[0], 0.0, causal, False, scale=scale)
    return out, lse.transpose(0, 1)


@lru_cache(maxsize=256)
def _ends(length: int, device: torch.device) -> Tensor:
    """Where a lone sequence of this length, which is not 0, begins and ends. Kept for the layers that
    follow."""
    return torch.arange(
        0, length + 1, length, dtype=torch.int32, device=device
    )  # Made there: what is sent is waited for.


def dense_reference(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool) -> Part:
    """`dense` in plain torch: scores, softmax, product, in float32 whatever the inputs are."""
    parts = []
    group = q.shape[1] // k.shape[1]
    wide_k, wide_v = (x.float().repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
    for first in range(0, q.shape[0], 1024):
        piece = q[first : first + 1024].float().transpose(0, 1)
        scores = piece @ wide_k.mT * scale
        if causal:
            later = (
                torch.arange(k.shape[0], device=q.device)
                > torch.arange(first, first + piece.shape[1], device=q.device)[:, None]
            )
            scores.masked_fill_(later, -torch.inf)
        parts.append(
            ((scores.softmax(-1) @ wide_v).transpose(0, 1).to(q.dtype), scores.logsumexp(-1).transpose(0, 1))
        )
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def merge(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    """Fold attention over other keys into `out` (float32) and `lse`, in place and exactly; shapes as in
    Part."""
    if kernels := _tile_kernels(out):
        kernels.merge_states(out, lse, other_out, other_lse)
        return
    share = torch.sigmoid(other_lse - lse)[..., None]
    out.add_(share * (other_out.float() - out))
    torch.logaddexp(lse, other_lse, out=lse)
