"""Kernels that take long to compile, compiled side by side before an engine needs them.

A kernel is compiled when it is first launched, and kept on disk for later processes. One after the other,
they are most of what the first start on a machine takes; a compiler leaves the interpreter to other threads
for most of its time. So launches of a step's kernels over a few zeros are noted, and what they need is
compiled and loaded on several threads, each kernel by itself. Where all have been compiled before this takes
a moment. Nothing is launched, and nothing of a library is called: what its handles keep is to be measured
later, as a step's.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from penstock.arch.layout import GroupKind, GroupLayout, KVLayout
from penstock.arch.spec import ModelSpec
from penstock.kv.movement.pool import KVPool
from penstock.memory.device import send
from penstock.ops.attention.attend import reads_pages
from penstock.ops.attention.inputs import LayerAttention, PlacedRun, Rows, Run
from penstock.ops.kernels import attention_kernels, early_launches, linear_kernels, noted, pointwise_kernels
from penstock.ops.linear import gated, linear
from penstock.ops.rope import RotaryAngles
from penstock.ops.sampling import draw, pack_sampling
from penstock.ops.steps import FIELDS, LEAST, likeliest, place
from penstock.worker.graphs import run_counts
from penstock.worker.runner import SORTED

_ROWS = (1, 2, 17, 33)
"""One of each class for which products have a kernel."""
_COMPILERS = 8
"""Threads: with more, all wait longer for the interpreter."""

Launch = Callable[[], object]


def prepare(device: torch.device) -> None:
    """Begins what takes a while and needs no device yet, on a thread. To be called before the device is first
    used."""
    if reads_pages(device):
        Thread(target=_prepare, name="penstock-prepare", daemon=True).start()


def _prepare() -> None:
    with suppress(Exception):
        from triton.runtime import driver
        from triton.runtime.cache import triton_key

        _ = driver.active  # The first time on a machine, a C compiler makes a part of it.
        # A digest of all of Triton, which every name in its cache begins with; kept by Triton once it is
        # known.
        triton_key()


def compile_ahead(
    spec: ModelSpec,
    groups: Sequence[GroupLayout],
    layout: KVLayout,
    device: torch.device,
    *,
    longest: int,
    most_tokens: int,
    recorded: bool,
    early: bool,
) -> None:
    """spec, groups, layout: of this rank's part, but all of the vocabulary. longest: tokens of a context;
    most_tokens: of a step.

    recorded, early: whether steps will be recorded, and kernels begin before the one before has ended; if
    that turns out otherwise, or anything fails here, what is missing is compiled when it is needed.
    """
    if not reads_pages(device):
        return

    def ready(compile: Callable[[], Any]) -> None:
        with torch.cuda.device(device), suppress(Exception):
            _ = compile().run  # By which it is loaded.

    with torch.cuda.device(device), suppress(Exception):
        launches = [*eager_launches(spec, layout, device), *common_launches(spec, groups, layout, device)]
        if recorded:
            launches += recorded_launches(spec, layout, device, longest, most_tokens)
        with torch.inference_mode(), early_launches(early):
            kernels = noted(launches)
        with ThreadPoolExecutor(min(_COMPILERS, os.cpu_count() or 1)) as pool:
            try:
                for done in [pool.submit(ready, kernel) for kernel in kernels]:
                    done.result()
            finally:
                pool.shutdown(cancel_futures=True)


def common_launches(
    spec: ModelSpec, groups: Sequence[GroupLayout], layout: KVLayout, device: torch.device
) -> Iterator[Launch]:
    """What every step launches, recorded or not: products, by the classes of rows that have kernels of their
    own, and what is between."""
    for rows in _ROWS:
        yield from filter(None, (_product(matrix, rows, layout.dtype, device) for matrix in matrices(groups)))
    kernels, page, dtype = pointwise_kernels(), _page(layout, device), getattr(torch, layout.dtype)
    assert kernels is not None
    x, gain = (
        torch.zeros(1, spec.hidden_size, dtype=dtype, device=device),
        torch.zeros(spec.hidden_size, dtype=dtype, device=device),
    )
    qkv = torch.zeros(1, (spec.heads + 2 * layout.kv_heads) * layout.head_dim, dtype=dtype, device=device)
    turn, slot = (
        torch.zeros(1, layout.head_dim // 2, device=device),
        torch.zeros(1, dtype=torch.int64, device=device),
    )
    gains = (gain[: layout.head_dim], gain[: layout.head_dim]) if spec.qk_norm else None
    yield partial(kernels.rms_norm, x, gain, spec.norm_eps)
    yield partial(kernels.rms_norm, x, gain, spec.norm_eps, x.clone())
    yield partial(
        kernels.project,
        qkv,
        turn,
        turn,
        page,
        slot,
        heads=spec.heads,
        gains=gains,
        eps=spec.norm_eps if gains else 0.0,
    )
    if not all(map(spec.is_moe, range(spec.layers))):
        yield partial(
            kernels.silu_mul, torch.zeros(1, 2 * spec.intermediate_size, dtype=dtype, device=device)
        )


@dataclass(frozen=True, slots=True)
class Matrix:
    """That activations are multiplied with."""

    outer: int
    inner: int
    gated: bool
    biased: bool


def matrices(groups: Sequence[GroupLayout]) -> set[Matrix]:
    """One of each shape; nothing of experts, which have kernels of their own."""
    found = set[Matrix]()
    for group in groups:
        fields = {field.name: field.shape for field in group.fields}
        for name in fields.keys() & {"qkv", "out", "gate_up", "down", "router", "output", "embedding"}:
            if group.id.kind is not GroupKind.EXPERT:
                outer, inner = fields[name]
                found.add(Matrix(outer, inner, name == "gate_up", f"{name}_bias" in fields))
    return found


def _product(matrix: Matrix, rows: int, dtype: str, device: torch.device) -> Launch | None:
    """Over one row of zeros, again and again; None if the product is the library's, which would copy them."""
    kind, kernels = getattr(torch, dtype), linear_kernels()
    assert kernels is not None
    x = torch.zeros(rows, matrix.inner, dtype=kind, device=device)
    weight = torch.zeros(1, matrix.inner, dtype=kind, device=device).expand(matrix.outer, -1)
    if rows > 1 and not kernels.suits_few_rows(x, weight):
        return None
    bias = torch.zeros(matrix.outer, dtype=kind, device=device) if matrix.biased else None
    return partial(gated if matrix.gated else linear, x, weight, bias)


def eager_launches(spec: ModelSpec, layout: KVLayout, device: torch.device) -> Iterator[Launch]:
    """What steps launch that are not recorded: draws, which take longest, rows, few and many, and runs behind
    a past."""
    logits, tokens = (
        torch.zeros(1, spec.vocab_size, device=device),
        torch.zeros(1, dtype=torch.int64, device=device),
    )
    yield partial(draw, logits, send(pack_sampling([0], [SORTED], [1]), device), tokens)
    kernels, cache = attention_kernels(), _page(layout, device)
    assert kernels is not None
    for window in _windows(spec):
        layer = LayerAttention(1.0, window)
        for count in (8, 64):
            rows = Rows(count, *_lengths(count, device), 1)
            yield partial(kernels.paged_decode, _queries(spec, layout, count, device), cache, rows, layer)
        for count in (16, 512):
            run = Run(0, count, 1, _pages(layout, count, device).long())
            yield partial(kernels.paged_run, _queries(spec, layout, count, device), cache, run, layer)


def recorded_launches(
    spec: ModelSpec, layout: KVLayout, device: torch.device, longest: int, most_tokens: int
) -> Iterator[Launch]:
    """What recorded steps launch: few rows, many that are joined in the same launch, runs whose place is read
    on the device, and what finds places and the likeliest tokens."""
    kernels, cache = attention_kernels(), _page(layout, device)
    assert kernels is not None
    for window in _windows(spec):
        layer = LayerAttention(1.0, window)
        for count in (1, 8):
            arrivals = torch.zeros(count * layout.kv_heads, dtype=torch.int32, device=device)
            rows = Rows(count, *_lengths(count, device), longest, arrivals=arrivals)
            yield partial(kernels.paged_decode, _queries(spec, layout, count, device), cache, rows, layer)
        for count in run_counts(spec, most_tokens):
            where = torch.tensor([1, count], dtype=torch.int32, device=device)
            run, q = (
                PlacedRun(_pages(layout, count, device), where, longest),
                _queries(spec, layout, count, device),
            )
            yield partial(kernels.placed_run, q, cache, run, layer, out=torch.zeros_like(q))
    given, newest = (
        torch.zeros(FIELDS, 1, dtype=torch.int32, device=device),
        torch.zeros(1, dtype=torch.int64, device=device),
    )
    table = torch.zeros(1, -(-longest // layout.block_size), dtype=torch.int32, device=device)
    logits = torch.zeros(1, spec.vocab_size, dtype=getattr(torch, layout.dtype), device=device)
    yield partial(place, given, table, newest, RotaryAngles(spec.rope, device), layout.block_size)
    yield partial(likeliest, logits, given[0], newest, newest.clone(), torch.full_like(newest, LEAST))


def _page(layout: KVLayout, device: torch.device) -> tuple[Tensor, Tensor]:
    """One page of a layer, as it lies in a pool."""
    pool = KVPool(layout, 1, device)
    pool.bytes.zero_()
    return pool.layers[0]


def _queries(spec: ModelSpec, layout: KVLayout, count: int, device: torch.device) -> Tensor:
    """Of so many tokens, as they lie beside keys and values."""
    heads = spec.heads + 2 * layout.kv_heads
    return torch.zeros(count, heads, layout.head_dim, dtype=getattr(torch, layout.dtype), device=device)[
        :, : spec.heads
    ]


def _lengths(rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Block table and lengths of rows of one token."""
    return torch.zeros(rows, 1, dtype=torch.int32, device=device), torch.ones(
        rows, dtype=torch.int32, device=device
    )


def _pages(layout: KVLayout, count: int, device: torch.device) -> Tensor:
    """The blocks of a run of so many tokens behind one, all the same."""
    return torch.zeros(-(-(count + 1) // layout.block_size), dtype=torch.int32, device=device)


def _windows(spec: ModelSpec) -> set[int | None]:
    """One of each kind: a kernel is the same for all sizes."""
    return {None if window is None else max(filter(None, spec.windows)) for window in spec.windows}
