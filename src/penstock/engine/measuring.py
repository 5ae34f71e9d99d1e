"""Measures what the largest step takes of the device's memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from penstock.arch.spec import DTYPE_BYTES
from penstock.base.errors import BudgetError
from penstock.engine.budget import least_activations, on_heap
from penstock.engine.parts import layer_kinds, make_carrier, make_pool
from penstock.engine.settling import Settled
from penstock.memory.device import give_back, library_buffers, peak_of, shortage
from penstock.ops.attention.attend import scratch_bytes
from penstock.ops.attention.gathered import PAST_TILE
from penstock.weights.streaming.views import Blank
from penstock.worker.runner import Runner
from penstock.worker.warmup import draft_step, largest_step


def activation_peak(settled: Settled, runner: Runner, device: torch.device) -> int:
    """Return the bytes that the largest step takes, measured with one layer of each kind (profiling run).

    Other layers take the same again. On CUDA two of each kind run, since what the first leaves to its
    successor lies elsewhere in the allocator's memory. Routings of a mixture need not be tried: memory
    depends on the number of tokens alone.

    On a CPU tensors are counted, twice: a heap from which tensors of other sizes have come and gone was seen
    to grow to 1.75 times what one step takes, and holes are returned only after a step (see Heap). HEAP is
    added, since the heap grew by 4 MiB however small a step is, and the buffers of libraries. The process's
    pages are not read, so the same settings on the same machine give the same bytes in any process.
    """
    spec, limits, far = settled.spec, settled.limits, settled.far
    sizes, layers = settled.sizes, layer_kinds(spec, 2 if device.type == "cuda" else 1)
    peak = least_activations(spec, settled.dtype, limits.max_step_tokens, limits.max_sequences)
    for room in (None, far) if far else (None,):
        carrier = make_carrier(replace(room, blocks=1, disk=None), device) if room else None
        try:
            blank = Blank(settled.layouts, device)
            runner.attach(blank, make_pool(settled, 1, device), carrier, early=settled.early)
            plan = largest_step(sizes, past=room.tile_tokens if room else PAST_TILE, cold=room is not None)
            peak = max(peak, peak_of(device, partial(runner.run, plan, layers)))
            if sizes.drafted:
                peak = max(peak, peak_of(device, partial(runner.run, draft_step(sizes), layers)))
        finally:
            runner.detach()
            if carrier is not None:
                carrier.close()
        del carrier, blank
        give_back(device)
    # Long contexts take more for partial results of attention than the steps above, which are short.
    element = DTYPE_BYTES[settled.dtype]
    beside = max(
        scratch_bytes(one.heads, one.kv_heads, one.head_dim, element, limits.block_size, device)
        for one in {layer.mixer for layer in spec.stack if layer.mixer.planes}
    )
    return peak + beside if device.type == "cuda" else on_heap(peak, library_buffers(device))


@contextmanager
def step_fits(device: torch.device) -> Iterator[None]:
    """Raise BudgetError where there is too little memory even without weights and KV."""
    try:
        yield
    except Exception as fault:
        if not (short := shortage(fault, device)):
            raise
        message = f"the largest step does not fit into device memory: {short}"
    else:
        return
    raise BudgetError(message)
