"""Computes halves of a decoder's layer for few rows on a CPU, each in one call, by the kernels in layers.c.

A half is what is between two additions to the residual: norm, attention and its projections, or norm and
feed-forward. Numbers are those of the kernels one by one; what is saved is the calls.
"""

import ctypes
from collections.abc import Iterable, Sequence
from typing import ClassVar
from weakref import ref

import torch
from torch import Tensor

from penstock.ops.attention.inputs import AttentionInputs, LayerAttention
from penstock.ops.matrix import GroupViews, Matrix
from penstock.ops.native import attention as attention_rows
from penstock.ops.native import blocks, few_bits
from penstock.ops.native.few_bits import NUMBERS, library
from penstock.ops.native.pointwise import suits_pages


class _Run(ctypes.Structure):
    """Holds what `struct some_rows` of layers.c does."""

    _fields_: ClassVar = [
        ("matrix", ctypes.c_void_p), ("first", ctypes.c_int64), ("in_blocks", ctypes.c_int64)
    ]  # fmt: skip


class _Projection(ctypes.Structure):
    """Holds what `struct projection` of layers.c does."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("runs", "bias")),
        *((name, ctypes.c_int64) for name in ("count", "height")),
    ]  # fmt: skip


class _Half(ctypes.Structure):
    """Holds what `struct half` of layers.c does."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("norm", "q_norm", "k_norm")),
        ("into", _Projection),
        ("out", _Projection),
        *((name, ctypes.c_int64) for name in ("size", "heads", "kv_heads", "dim", "turned", "window")),
        *((name, ctypes.c_float) for name in ("eps", "head_eps", "scale")),
        ("kind", ctypes.c_int32),
    ]


class _LayerHalves(ctypes.Structure):
    """Holds what `struct layer` of layers.c does."""

    _fields_: ClassVar = [(name, ctypes.c_void_p) for name in ("attention", "feed_forward", "k", "v")]


class Half:
    """Describes half a layer whose weights rest in these places.

    address: of the description, or 0 where the half is not computed here.
    """

    __slots__ = ("_kept", "address", "dtype", "made", "stack")

    def __init__(self, weights: GroupViews, ends: tuple[str, str], dtype: torch.dtype, eps: float) -> None:
        """Describe a half without attention. ends: names of its first projection and its last, which keeps
        this description: so that has no way back to it."""
        self.dtype, self.address = dtype, 0
        self.stack: Stack | None = None
        """The description of all layers, where this is the first half of the first."""
        self._kept: list[object] = [weights.matrices[ends[0]], *weights.vectors.values()]
        """What the description has addresses of."""
        into, out = (self._projection(weights, name) for name in ends)
        self.made = _Half()
        norm = weights.vectors.get("norm")
        if (
            norm is None
            or into is None
            or out is None
            or any(x.dtype != dtype for x in weights.vectors.values())
        ):
            return
        self.made = _Half(
            norm=norm.data_ptr(), into=into, out=out, size=norm.shape[0], eps=eps, kind=NUMBERS[dtype]
        )
        self.address = ctypes.addressof(self.made)

    def attend(
        self,
        weights: GroupViews,
        heads: tuple[int, int, int],
        layer: LayerAttention,
        eps: float,
        turned: int,
    ) -> None:
        """Describe its attention.

        heads: of queries, of keys, and the dimensions of each.
        turned: the dimensions of a head that are rotated.
        """
        made, vectors = self.made, weights.vectors
        (made.heads, made.kv_heads, made.dim), made.turned = heads, turned
        made.window, made.scale = layer.window or 0, layer.scale
        if "q_norm" in vectors:
            made.q_norm, made.k_norm, made.head_eps = (
                vectors["q_norm"].data_ptr(),
                vectors["k_norm"].data_ptr(),
                eps,
            )
        if (
            layer.cap is not None
            or layer.lse
            or layer.sinks is not None
            or not attention_rows.suits_heads(*heads)
        ):
            self.address = 0

    def _projection(self, weights: GroupViews, name: str) -> _Projection | None:
        """Describe a projection, if kernels multiply with all of its matrices."""
        whole, bias, runs, first = (
            weights.matrices[name],
            weights.vectors.get(f"{name}_bias"),
            list[_Run](),
            0,
        )
        for matrix in whole.joined or (whole,):
            kernels = _KERNELS.get(matrix.format.native)
            if kernels is None or not kernels.reads(matrix.format):
                return None
            runs.append(_Run(kernels.address(matrix), first, kernels is blocks))
            first += matrix.shape[0]
        array = (_Run * len(runs))(*runs)
        self._kept.append(array)
        address = None if bias is None else bias.data_ptr()
        return _Projection(ctypes.addressof(array), address, len(runs), whole.shape[0])


_KERNELS = {"few_bits": few_bits, "blocks": blocks}


class Stack:
    """Describes all layers whose weights rest in these places, with their pages.

    It is kept by the first half, and keeps the others, which have no way back to it. It does not keep pages:
    `of` says whether they are those that are given.
    """

    __slots__ = ("_first", "_kept", "layers")

    def __init__(self, halves: Sequence[Half], caches: Sequence[tuple[Tensor, ...]]) -> None:
        """Describe layers of two halves each. caches: K and V of each layer in pages."""
        self._kept, self._first = halves[1:], ref(caches[0][0])
        addresses = iter([half.address for half in halves])
        self.layers = (_LayerHalves * len(caches))(
            *(_LayerHalves(next(addresses), next(addresses), k.data_ptr(), v.data_ptr()) for k, v in caches)
        )

    def of(self, caches: Sequence[tuple[Tensor, ...]]) -> bool:
        """Tell whether it describes layers with these pages, which are made and given up together."""
        return self._first() is caches[0][0]


def stack(
    first: object, last_matrices: Iterable[Matrix], caches: Sequence[tuple[Tensor, ...]], x: Tensor
) -> Stack | None:
    """Return the description of all layers, or None where they are not computed here at once, or not yet.

    first: the `half` of the first layer's attention.
    last_matrices: the last matrix of each half in turn, which are read only if there is no description.
    """
    if not isinstance(first, Half) or first.dtype != x.dtype:
        return None
    if first.stack is None or not first.stack.of(caches):
        halves: list[Half] = []
        for matrix in last_matrices:
            half = matrix.half
            if not isinstance(half, Half) or half.dtype != x.dtype or not half.address:
                return None
            halves.append(half)
        pages = caches[0]
        alike = all(
            len(its) == 2 and its[0].shape == pages[0].shape and its[0].stride() == pages[0].stride()
            and suits_pages((its[0], its[1]), x.dtype)
            for its in caches
        )  # fmt: skip
        first.stack = Stack(halves, caches) if alike and len(halves) == 2 * len(caches) else None
    return first.stack


def pass_layers(
    layers: Stack, x: Tensor, angles: tuple[Tensor, Tensor], k: Tensor, inputs: AttentionInputs
) -> Tensor:
    """Pass the residual x `[rows, hidden]` through all layers, in place. Return what is still to be added.

    angles, inputs: as of `attention`.
    k: keys of any layer in pages. Raises MemoryError.
    """
    found, rows, (cos, sin), part = library(), inputs.rows, angles, torch.empty_like(x)
    assert found is not None
    assert rows is not None
    if found.layers_pass(
        layers.layers, len(layers.layers), x.data_ptr(), rows.count, part.data_ptr(), cos.data_ptr(),
        sin.data_ptr(), inputs.slots.data_ptr(), rows.table.data_ptr(), rows.table.stride(0),
        rows.lengths.data_ptr(), k.shape[1], *k.stride()[:3], torch.get_num_threads(), found.parallel,
    ):  # fmt: skip
        raise MemoryError("no memory for layers of few bits")
    return part


def _like(part: Tensor, x: Tensor) -> bool:
    """Tell whether kernels may read one as the other: as many numbers of one dtype, side by side."""
    return part.shape == x.shape and part.dtype == x.dtype and part.is_contiguous()


def feed_forward(weights: GroupViews, eps: float, x: Tensor, part: Tensor | None) -> Tensor | None:
    """Return the output of a feed-forward, `[rows, hidden]`, or None where it is not computed here.

    x: the residual `[rows, hidden]`, to which `part` is added in place first, if there is one. `part` may
        be overwritten. Raises MemoryError.
    """
    down, found = weights.matrices["down"], library()
    half = down.half
    assert part is None or _like(part, x), (part.shape, part.dtype, part.stride())
    if not isinstance(half, Half) or half.dtype != x.dtype:
        half = down.half = Half(weights, ("gate_up", "down"), x.dtype, eps)
    if not half.address or found is None:
        return None
    out = torch.empty_like(x) if part is None else part
    if found.layer_feed_forward(
        half.address, None if part is None else part.data_ptr(), x.data_ptr(), x.shape[0], out.data_ptr(),
        torch.get_num_threads(), found.parallel,
    ):  # fmt: skip
        raise MemoryError("no memory for a feed-forward of few bits")
    return out


def suits(inputs: AttentionInputs, cache: tuple[Tensor, Tensor], x: Tensor) -> bool:
    """Tell whether `attention` computes such a step: rows that see nothing but pages."""
    rows = inputs.rows
    return (
        rows is not None
        and rows.count == x.shape[0]
        and rows.table.stride(1) == rows.lengths.stride(0) == 1
        and inputs.cold is None
        and not inputs.placed
        and suits_pages(cache, x.dtype)
    )


def describes(half: object, x: Tensor) -> bool:
    """Tell whether this is the description of half a layer for activations as x is."""
    return isinstance(half, Half) and half.dtype == x.dtype


def attention(
    half: object, x: Tensor, part: Tensor | None, angles: tuple[Tensor, Tensor], cache: tuple[Tensor, Tensor],
    inputs: AttentionInputs,
) -> Tensor | None:  # fmt: skip
    """Return the output of attention and its projections, `[rows, hidden]`, or None where it is not computed
    here. Keys and values are written.

    half: what `describes` such a half. x, part: as of `feed_forward`.
    angles: cosines and sines, float32 `[rows, turned / 2]`.
    cache: K and V in pages, which `suits_pages`.
    inputs: which `suits`. Raises MemoryError.
    """
    found, rows, (k, v), (cos, sin) = library(), inputs.rows, cache, angles
    assert found is not None
    assert rows is not None
    assert isinstance(half, Half)
    assert part is None or _like(part, x), (part.shape, part.dtype, part.stride())
    if not half.address:
        return None
    of_block, of_token, of_head, _ = k.stride()
    out = torch.empty_like(x) if part is None else part
    if found.layer_attention(
        half.address, None if part is None else part.data_ptr(), x.data_ptr(), rows.count, out.data_ptr(),
        cos.data_ptr(), sin.data_ptr(), inputs.slots.data_ptr(), rows.table.data_ptr(), rows.table.stride(0),
        rows.lengths.data_ptr(), k.data_ptr(), v.data_ptr(), k.shape[1], of_block, of_token, of_head,
        torch.get_num_threads(), found.parallel,
    ):  # fmt: skip
        raise MemoryError("no memory for attention of few bits")
    return out
