"""Loads and launches Triton kernels, or does without them.

Kernels are imported at first use on a GPU, since a run on a CPU has no need of Triton. Every function with a
kernel also has a reference in plain torch. The reference computes on a CPU, where there is no Triton, and
within `plain_torch`.
"""

import functools
import importlib
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from threading import Lock, get_ident, local
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from penstock.ops.native import attention, blocks, dense, experts, few_bits, gumbel, layers, pointwise

if TYPE_CHECKING:
    from triton.compiler import CompiledKernel
    from triton.runtime import JITFunction
    from triton.runtime.jit import KernelParam


def triton_kernels(name: str) -> ModuleType | None:
    """Return a module of `penstock.ops.triton`, or None where plain torch computes.

    That is where Triton is not installed, and within `plain_torch`.
    """
    return None if _launches.plain else _loaded(name)


_NATIVE = {
    "few_bits": few_bits,
    "blocks": blocks,
    "dense": dense,
    "pointwise": pointwise,
    "attention": attention,
    "layers": layers,
    "experts": experts,
    "gumbel": gumbel,
}


def native_kernels(name: str = "few_bits") -> ModuleType | None:
    """Return a module of `penstock.ops.native`, or None where plain torch computes. Its `suits` and `reads`
    say whether this machine has kernels."""
    return None if _launches.plain else _NATIVE[name]


def row_kernels(name: str, x: Tensor) -> ModuleType | None:
    """Return a module of kernels for what a decoder computes between the products of few rows on a CPU, or
    None where plain torch computes: outside of `between_products`, and where they do not suit x
    `[rows, ...]`."""
    if not _launches.between or x.is_cuda or _launches.plain or not pointwise.suits(x):
        return None
    return _NATIVE[name]


@functools.cache
def _loaded(name: str) -> ModuleType | None:
    """Import a module of kernels, or return None where Triton is not installed."""
    if find_spec("triton") is None:
        return None
    module = importlib.import_module(f"penstock.ops.triton.{name}")
    _name_all(module)
    return module


def _name_all(module: ModuleType) -> None:
    """Compute the cache keys of a module's kernels, in the order in which they are defined.

    Triton's disk cache finds kernels by these keys. The key of a function that calls another one includes the
    globals of that one only if that one's key is already known. Left to the first launch, a key would depend
    on what was launched before, and a later process might compile a kernel again.
    """
    functions = _functions(module)  # Empty where kernels are interpreted.
    try:
        for function in functions:
            if function.__module__ != module.__name__:
                _name_all(sys.modules[function.__module__])
            _ = function.cache_key
    except BaseException:
        for function in functions:
            # Triton begins with a placeholder, and would keep it.
            if (function.hash or "").startswith("recursion:"):
                function.hash = None
        raise


def _functions(module: ModuleType) -> "list[JITFunction[Any]]":
    """Return the functions of a module that Triton compiles."""
    from triton.runtime import JITFunction

    return [function for function in list(vars(module).values()) if isinstance(function, JITFunction)]


_MODULES = (
    "attention",
    "dequantise",
    "dequantise_blocks",
    "blocks",
    "expert_columns",
    "expert_row",
    "experts",
    "few_bits",
    "few_bits_mma",
    "few_bits_row",
    "few_bits_experts",
    "handover",
    "linear",
    "lora",
    "norms",
    "pace",
    "pointwise",
    "routing",
    "sampling",
    "slots",
    "steps",
    "sums",
    "tiles",
)
_NOTING = Lock()
_WIDE = 1 << 40
"""An integer that needs 64 bits as an argument of a kernel."""


@dataclass(frozen=True, slots=True)
class _Pointer:
    """A pointer stands in for a tensor where a kernel is compiled: Triton asks only for dtype and alignment.

    offset: bytes of the address beyond a multiple of 16.
    """

    dtype: torch.dtype
    offset: int

    def data_ptr(self) -> int:
        """Return an address that is aligned like the tensor's."""
        return self.offset


def noted(launches: Iterable[Callable[[], object]]) -> list[Callable[[], "CompiledKernel"]]:
    """Call each of `launches` and return the kernels that it would launch, each kernel once.

    Calling a returned kernel, on any thread, compiles it for the current device, or finds it compiled. A
    launch that fails is passed over. None of our kernels is launched on this thread meanwhile, compiled or
    not: it would read what others did not write. Interpreted kernels cannot be noted.
    """
    from triton.runtime import JITFunction, driver

    found: dict[Hashable, Callable[[], CompiledKernel]] = {}
    thread, noting = get_ident(), True
    ours = {
        function for name in _MODULES if (module := triton_kernels(name)) for function in _functions(module)
    }

    def run(
        function: "JITFunction[Any]", *given: object, grid: object, warmup: bool, **more: object
    ) -> object:
        if warmup or not noting or get_ident() != thread:
            return JITFunction.run(function, *given, grid=grid, warmup=warmup, **more)
        # Two threads that compile the first kernels of a function must find the same cache.
        _ = function.device_caches[driver.active.get_current_device()]
        arguments = _specialised(function, given, more)
        compiled = partial(function.warmup, grid=(1,), **arguments)
        found.setdefault((function, *arguments.items()), compiled)
        return None

    with _NOTING:  # Not in a generator, which an interrupt could leave suspended.
        try:
            for function in ours:
                function.run = partial(run, function)
            for launch in launches:
                with suppress(Exception):
                    launch()
        finally:
            noting = False  # First: after an interrupt below, a `run` that is left behind launches normally.
            for function in ours:
                vars(function).pop("run", None)
    return [*found.values()]


def _specialised(
    function: "JITFunction[Any]", given: Sequence[object], more: dict[str, object]
) -> dict[str, Any]:
    """Return a launch's arguments by name, the same for all launches that share one compiled kernel.

    Triton compiles apart by dtype and alignment of tensors, and by width of integers, divisibility by 16, and
    whether they are 1.
    """
    named = dict(zip((param.name for param in function.params), given, strict=False)) | more
    values = {param.name: param for param in function.params if not param.is_constexpr}
    return {
        name: _stand_in(value, values[name]) if name in values else value for name, value in named.items()
    }


def _stand_in(value: object, param: "KernelParam") -> object:
    """Return one value for all values of a parameter that share a compiled kernel."""
    aligned = not (param.do_not_specialize or param.do_not_specialize_on_alignment)
    if isinstance(value, Tensor):
        return _Pointer(value.dtype, value.data_ptr() % 16 if aligned else 0)
    if isinstance(value, float):
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int) or value >= 1 << 63:
        return value
    if value == 1 and not param.do_not_specialize:
        return 1
    width = 0 if -(1 << 31) <= value < 1 << 31 else _WIDE
    return width + (16 if aligned and value % 16 == 0 else 2)


class _Launches(local):
    """Holds a thread's settings for its launches: early launches, plain torch, what is between products, and
    shared counters."""

    early = False
    plain = False
    between = False
    counters: Tensor | None = None


_launches = _Launches()


@contextmanager
def plain_torch(wanted: bool = True) -> Iterator[None]:
    """Compute in plain torch on this thread, without our kernels, if `wanted`."""
    before, _launches.plain = _launches.plain, wanted or _launches.plain
    try:
        yield
    finally:
        _launches.plain = before


@contextmanager
def between_products(wanted: bool) -> Iterator[None]:
    """Let our kernels for CPUs also compute what is between products on this thread, if `wanted`: for models
    with weights of few bits. Dense ones keep torch there, and its rounding."""
    before, _launches.between = _launches.between, wanted
    try:
        yield
    finally:
        _launches.between = before


def kernels_of(device: torch.device) -> tuple[str, ...]:
    """Return the modules of kernels that this thread would launch on a device; none for plain torch."""
    if device.type != "cuda" or _launches.plain or find_spec("triton") is None:
        return ()
    return _MODULES


@contextmanager
def pdl_launches(allowed: bool = True) -> Iterator[None]:
    """Launch this thread's kernels early, if `allowed`: programmatic dependent launch.

    A kernel may begin before the one before it has ended. It waits on the device for that end, but reads
    weights before it waits. So the weights must stay where they are, and the GPU must support it.
    """
    before, _launches.early = _launches.early, allowed
    try:
        yield
    finally:
        _launches.early = before


def uses_pdl() -> bool:
    """Tell whether this thread's launches may be early."""
    return _launches.early


def pdl_launch_options(early: bool) -> dict[str, bool]:
    """Return launch options for programmatic dependent launch, beside a kernel's own arguments."""
    return {"launch_pdl": True} if early else {}


@contextmanager
def counting(shared: Tensor) -> Iterator[None]:
    """Let kernels that this thread launches count in `shared`, int32 zeros. They leave zeros there.

    The launches must be on one stream.
    """
    before, _launches.counters = _launches.counters, shared
    try:
        yield
    finally:
        _launches.counters = before


def counters(count: int, device: torch.device) -> Tensor:
    """Return at least `count` int32 zeros, which the caller leaves as zeros: the shared ones, or new ones."""
    shared = _launches.counters
    if shared is None or shared.device != device or len(shared) < count:
        return torch.zeros(count, dtype=torch.int32, device=device)
    return shared
