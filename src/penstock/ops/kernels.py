"""Triton kernels where there is Triton: loaded at first use on a GPU, since a CPU run has no need to pay for
the import.

Every function that has a kernel has a reference in plain torch as well, which does the work on a CPU, where
there is no Triton, and for a thread that is told so (`plain_torch`).
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

from penstock.ops.native import few_bits

if TYPE_CHECKING:
    from triton.compiler import CompiledKernel
    from triton.runtime import JITFunction
    from triton.runtime.jit import KernelParam


def pointwise_kernels() -> ModuleType | None:
    """Return the kernels for norms, activations and rotations, or None where plain torch computes."""
    return _kernels("pointwise")


def attention_kernels() -> ModuleType | None:
    """Return the kernels for attention to pages, or None where plain torch computes."""
    return _kernels("attention")


def step_kernels() -> ModuleType | None:
    """Return the kernels for what is around a recorded step, or None where plain torch computes."""
    return _kernels("steps")


def linear_kernels() -> ModuleType | None:
    """Return the kernels for products of few rows, or None where plain torch computes."""
    return _kernels("linear")


def expert_kernels() -> ModuleType | None:
    """Return the kernels for mixtures of experts, or None where plain torch computes."""
    return _kernels("experts")


def tile_kernels() -> ModuleType | None:
    """Return the kernels for attention to tiles, or None where plain torch computes."""
    return _kernels("tiles")


def sampling_kernels() -> ModuleType | None:
    """Return the kernels for draws, or None where plain torch computes."""
    return _kernels("sampling")


def sum_kernels() -> ModuleType | None:
    """Return the kernels for sums over ranks, or None where plain torch computes."""
    return _kernels("sums")


def format_kernels(name: str) -> ModuleType | None:
    """Return the kernels of a storage format, by the name of their module."""
    return _kernels(name)


def native_kernels() -> ModuleType | None:
    """Return the kernels for matrices of few bits on a CPU, or None where plain torch computes. Their `suits`
    and `reads` say whether this machine has them."""
    return None if _launches.plain else few_bits


def _kernels(name: str) -> ModuleType | None:
    """Return a module of kernels; None while this thread does without them, and where there is no Triton."""
    return None if _launches.plain else _loaded(name)


@functools.cache
def _loaded(name: str) -> ModuleType | None:
    """Return a module of kernels; None where Triton is not installed: then the plain-torch references do the
    work."""
    if find_spec("triton") is None:
        return None
    module = importlib.import_module(f"penstock.ops.triton.{name}")
    _name_all(module)
    return module


def _name_all(module: ModuleType) -> None:
    """Give kernels the names by which Triton's cache finds them, in the order in which they are defined.

    A function that calls another one takes the values of global names from it, which are part of the name,
    only if that one has been named before. Left to the first launch, what a kernel is called depends on what
    has been launched before it, and a later process may compile it again.
    """
    functions = _functions(module)  # None where kernels are interpreted.
    try:
        for function in functions:
            if function.__module__ != module.__name__:
                _name_all(sys.modules[function.__module__])
            _ = function.cache_key
    except BaseException:
        for function in (
            functions
        ):  # Triton begins with a name that says nothing of what the kernel does, and would keep that.
            if (function.hash or "").startswith("recursion:"):
                function.hash = None
        raise


def _functions(module: ModuleType) -> "list[JITFunction[Any]]":
    """Return the functions of a module that Triton compiles."""
    from triton.runtime import JITFunction

    return [function for function in list(vars(module).values()) if isinstance(function, JITFunction)]


_ALL = (
    attention_kernels,
    expert_kernels,
    linear_kernels,
    pointwise_kernels,
    sampling_kernels,
    step_kernels,
    sum_kernels,
    tile_kernels,
)
_NOTING = Lock()
_WIDE = 1 << 40
"""An integer that a kernel takes in 64 bits."""


@dataclass(frozen=True, slots=True)
class _Pointer:
    """Stands in for a tensor where a kernel is compiled: Triton asks for dtype and alignment alone."""

    dtype: torch.dtype
    offset: int
    """Bytes of its address beyond a multiple of 16."""

    def data_ptr(self) -> int:
        """Return an address that is aligned like the tensor's."""
        return self.offset


def noted(launches: Iterable[Callable[[], object]]) -> list[Callable[[], "CompiledKernel"]]:
    """Call each of `launches` and return the kernels that it would launch, each kernel once.

    To call a returned kernel, on any thread, is to compile it for the device that is current there, or to
    find it compiled. A launch that fails is passed over. Nothing of ours is launched on this thread, what has
    been compiled already included: it would read what others have not written. Not for interpreted kernels.
    """
    from triton.runtime import JITFunction, driver

    found: dict[Hashable, Callable[[], CompiledKernel]] = {}
    thread, noting = get_ident(), True
    ours = {function for kernels in _ALL if (module := kernels()) for function in _functions(module)}

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

    with _NOTING:  # No generator's: an interrupt could leave that behind, suspended.
        try:
            for function in ours:
                function.run = partial(run, function)
            for launch in launches:
                with suppress(Exception):
                    launch()
        finally:
            noting = False  # At once: should an interrupt strike below, what is left behind does nothing.
            for function in ours:
                vars(function).pop("run", None)
    return [*found.values()]


def _specialised(
    function: "JITFunction[Any]", given: Sequence[object], more: dict[str, object]
) -> dict[str, Any]:
    """Return a launch's arguments by name, the same for all launches of one compiled kernel: Triton tells
    tensors apart by dtype and alignment, and integers by width, divisibility by 16 and whether they are 1."""
    named = dict(zip((param.name for param in function.params), given, strict=False)) | more
    values = {param.name: param for param in function.params if not param.is_constexpr}
    return {
        name: _stand_in(value, values[name]) if name in values else value for name, value in named.items()
    }


def _stand_in(value: object, param: "KernelParam") -> object:
    """Return what stands for all values of this parameter that kernels are not compiled apart for."""
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
    """Holds what a thread wants of its launches."""

    early = False
    plain = False
    counters: Tensor | None = None


_launches = _Launches()


@contextmanager
def plain_torch(wanted: bool = True) -> Iterator[None]:
    """This thread meanwhile does without our kernels, if that is wanted: plain torch computes what they
    would."""
    before, _launches.plain = _launches.plain, wanted or _launches.plain
    try:
        yield
    finally:
        _launches.plain = before


def kernels_of(device: torch.device) -> tuple[str, ...]:
    """The names of the groups of our kernels that this thread would launch on this device; none where plain
    torch computes."""
    if device.type != "cuda" or _launches.plain or find_spec("triton") is None:
        return ()
    return tuple(kernels.__name__.removesuffix("_kernels") for kernels in _ALL)


@contextmanager
def pdl_launches(allowed: bool = True) -> Iterator[None]:
    """Kernels that this thread launches meanwhile may begin before what was launched before them has ended,
    and then wait on the device for that; they read weights before they wait. For weights that are where they
    are for good, on a GPU that can do so."""
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
    """Kernels that this thread launches meanwhile, on one stream, count in `shared`, int32 zeros, and leave
    zeros there."""
    before, _launches.counters = _launches.counters, shared
    try:
        yield
    finally:
        _launches.counters = before


def counters(count: int, device: torch.device) -> Tensor:
    """Return so many int32 zeros or more, to be left as zeros: those that are shared, or some of the caller's
    own."""
    shared = _launches.counters
    if shared is None or shared.device != device or len(shared) < count:
        return torch.zeros(count, dtype=torch.int32, device=device)
    return shared
