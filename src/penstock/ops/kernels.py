"""Triton kernels where there is Triton: loaded at first use on a GPU, since a CPU run has no need to pay for the import."""

import functools
import importlib
import importlib.util
from types import ModuleType


@functools.cache
def pointwise_kernels() -> ModuleType | None:
    return _kernels("triton_pointwise")


@functools.cache
def attention_kernels() -> ModuleType | None:
    return _kernels("triton_attention")


@functools.cache
def expert_kernels() -> ModuleType | None:
    return _kernels("triton_experts")


@functools.cache
def tile_kernels() -> ModuleType | None:
    return _kernels("triton_tiles")


@functools.cache
def sampling_kernels() -> ModuleType | None:
    return _kernels("triton_sampling")


def _kernels(name: str) -> ModuleType | None:
    """None where Triton is not installed: then the plain-torch references do the work."""
    if importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module(f"penstock.ops.{name}")
