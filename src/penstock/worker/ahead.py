"""Kernels that take long to compile, compiled side by side before an engine needs them.

A kernel is compiled when it is first launched, and kept on disk for later processes. One after the other, those of attention and of draws
are most of what the first start on a machine takes; a compiler leaves the interpreter to other threads for most of its time. So each is
launched once, on a thread of its own, over a few zeros. Where all have been compiled before this takes some milliseconds.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from penstock.arch.layout import KVLayout
from penstock.arch.spec import ModelSpec
from penstock.kv.pool import KVPool
from penstock.memory.device import send
from penstock.ops.attention import reads_pages
from penstock.ops.kernels import attention_kernels, early_launches
from penstock.ops.sampling import draw, wishes
from penstock.worker.runner import SORTED

Task = tuple[Callable[[], object], ...]
"""What is launched one after another, since it shares a kernel."""


def compile_ahead(spec: ModelSpec, layout: KVLayout, device: torch.device, *, max_length: int, recorded: bool, early: bool) -> None:
    """spec, layout: of this rank's part. recorded, early: whether steps will be recorded, and may then begin early; if that turns out
    otherwise, or anything fails here, kernels are compiled when they are needed."""
    if not reads_pages(device):
        return

    def launch(task: Task, at_once: bool) -> None:
        with suppress(Exception), torch.inference_mode(), torch.cuda.device(device), early_launches(at_once):
            for one in task:
                one()

    with torch.cuda.device(device):
        tasks = [(task, False) for task in eager_tasks(spec, layout, device)]
        if recorded:
            tasks += [(task, early) for task in recorded_tasks(spec, layout, device, max_length)]
        with ThreadPoolExecutor(min(len(tasks), os.cpu_count() or 1)) as pool:
            for task, at_once in tasks:
                pool.submit(launch, task, at_once)
        torch.cuda.synchronize(device)


def eager_tasks(spec: ModelSpec, layout: KVLayout, device: torch.device) -> Iterator[Task]:
    """What steps launch that are not recorded: draws, which take longest, rows, few and many, and runs behind a past."""
    logits, tokens = torch.zeros(1, spec.vocab_size, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    yield (partial(draw, logits, send(wishes([0], [SORTED], [1]), device), tokens),)
    kernels, cache = attention_kernels(), _page(layout, device)
    assert kernels is not None
    for window in _windows(spec):
        decode = partial(kernels.paged_decode, scale=1.0, window=window, max_length=1)
        run = partial(kernels.paged_run, scale=1.0, window=window)
        yield tuple(partial(decode, _queries(spec, layout, rows, device), *cache, *_lengths(rows, device)) for rows in (8, 64))
        yield tuple(
            partial(run, _queries(spec, layout, count, device), *cache, _pages(layout, count, device).long(), 1) for count in (16, 512)
        )


def recorded_tasks(spec: ModelSpec, layout: KVLayout, device: torch.device, max_length: int) -> Iterator[Task]:
    """What recorded steps launch: few rows, many that are joined in the same launch, and runs whose place is read on the device."""
    kernels, cache = attention_kernels(), _page(layout, device)
    assert kernels is not None
    for window in _windows(spec):
        decode = partial(kernels.paged_decode, scale=1.0, window=window, max_length=max_length)
        run = partial(kernels.placed_run, scale=1.0, window=window, max_length=max_length)
        for rows in (1, 8):
            arrivals = torch.zeros(rows * layout.kv_heads, dtype=torch.int32, device=device)
            yield (partial(decode, _queries(spec, layout, rows, device), *cache, *_lengths(rows, device), arrivals=arrivals),)
        where = {count: torch.tensor([1, count], dtype=torch.int32, device=device) for count in (16, 512)}
        yield tuple(
            partial(run, _queries(spec, layout, count, device), *cache, _pages(layout, count, device), where[count]) for count in where
        )


def _page(layout: KVLayout, device: torch.device) -> tuple[Tensor, Tensor]:
    """One page of a layer, as it lies in a pool."""
    pool = KVPool(layout, 1, device)
    pool.bytes.zero_()
    return pool.layers[0]


def _queries(spec: ModelSpec, layout: KVLayout, count: int, device: torch.device) -> Tensor:
    """Of so many tokens, as they lie beside keys and values."""
    heads = spec.heads + 2 * layout.kv_heads
    return torch.zeros(count, heads, layout.head_dim, dtype=getattr(torch, layout.dtype), device=device)[:, : spec.heads]


def _lengths(rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Block table and lengths of rows of one token."""
    return torch.zeros(rows, 1, dtype=torch.int32, device=device), torch.ones(rows, dtype=torch.int32, device=device)


def _pages(layout: KVLayout, count: int, device: torch.device) -> Tensor:
    """The blocks of a run of so many tokens behind one, all the same."""
    return torch.zeros(-(-(count + 1) // layout.block_size), dtype=torch.int32, device=device)


def _windows(spec: ModelSpec) -> set[int | None]:
    """One of each kind: a kernel is the same for all sizes."""
    return {None if window is None else max(filter(None, spec.windows)) for window in spec.windows}
