"""A pool of threads as a service has it."""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from penstock.arch.spec import Activation
from penstock.ops.matrix import GroupViews
from penstock.ops.native.experts import ThreadPool


@cache
def tiled_pool() -> ThreadPool:
    """Return a pool that may multiply by tiles, as a service does: where there are tiles, other pools sum in
    another order."""
    return ThreadPool(torch.get_num_threads(), tiles=True)


def tiled_outputs(
    x: Tensor, experts: Sequence[GroupViews], counts: Sequence[int], activation: Activation
) -> Tensor:
    """Return the outputs of experts, the next `counts` rows of x through each of them."""
    out = torch.empty_like(x)
    tiled_pool().feed_forward(x, experts, counts, activation, out)
    return out
