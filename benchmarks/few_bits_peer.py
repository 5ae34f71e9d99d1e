"""Products of humming-kernels, vLLM's library of products with weights of few bits, for `few_bits.py --peer`.

Its kernels are compiled by NVRTC when they are first called. Matrices are random numbers that it quantises
itself, into a layout of its own; a product is checked against the numbers before it is timed.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "int4": {"dtype": "int4", "group_size": 128},
    "int4 with zeros": {"dtype": "uint4", "group_size": 128, "has_zero_point": True},
    "int4 by 64 with zeros": {"dtype": "uint4", "group_size": 64, "has_zero_point": True},
    "fp8": {
        "dtype": "float8e4m3",
        "weight_scale_group_size": 128,
        "weight_scale_group_size_n": 128,
        "weight_scale_type": "block",
    },
    "mxfp4": {"dtype": "float4e2m1", "group_size": 32, "scale_dtype": "float8e8m0"},
    "nvfp4": {"dtype": "float4e2m1", "group_size": 16, "scale_dtype": "float8e4m3"},
}
"""What it calls our formats."""
MAX_ERROR = 0.15
"""Of a product, relative to that of the numbers before they were quantised, by norms."""


def products(
    name: str, shapes: Sequence[tuple[int, int]], rows: Sequence[int], least: int
) -> dict[tuple[tuple[int, int], int], tuple[Callable[[], None], int]]:
    """Return, by shape and rows of activations, what computes products with as many matrices as have `least`
    bytes together, and how many these are. Raises AssertionError for a product that is not right."""
    from humming.layer import HummingLayer

    found, firsts = {}, list[Callable[[], object]]()
    for shape in shapes:
        height, width = shape
        numbers = torch.randn(height, width, device="cuda", dtype=torch.bfloat16) * 0.02
        layer = HummingLayer(
            shape_n=height, shape_k=width, weight_config=dict(CONFIGS[name]), torch_dtype=torch.bfloat16
        ).cuda()
        layer.load_from_unquantized(numbers)
        layer.transform()
        size = sum(one.numel() * one.element_size() for one in layer.parameters())
        layers = [layer, *(copy.deepcopy(layer) for _ in range(math.ceil(least / size) - 1))]
        for count in rows:
            x = torch.randn(count, width, device="cuda").bfloat16()
            y = torch.empty(count, height, device="cuda", dtype=torch.bfloat16)

            def work(x: Tensor = x, y: Tensor = y, layers: Sequence[Any] = layers) -> None:
                for one in layers:
                    one(x, outputs=y)

            def check(x: Tensor = x, layer: Any = layer, numbers: Tensor = numbers) -> None:
                want = x.float() @ numbers.float().T
                error = float((layer(x).float() - want).norm() / want.norm())
                assert error < MAX_ERROR, error

            firsts.append(check)
            found[shape, count] = work, len(layers)
    with ThreadPoolExecutor(12) as pool:  # Compiled side by side.
        for _ in pool.map(lambda one: one(), firsts):
            pass
    return found
