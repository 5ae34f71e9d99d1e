"""A pool of threads as a service has it."""

from functools import cache

import torch

from penstock.ops.native.experts import ThreadPool


@cache
def tiled_pool() -> ThreadPool:
    """Return a pool that may multiply by tiles, as a service does: where there are tiles, other pools sum in
    another order."""
    return ThreadPool(torch.get_num_threads(), tiles=True)
