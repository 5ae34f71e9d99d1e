"""Triton kernels where there is Triton: loaded at first use on a GPU, since a CPU run has no need to pay for
the import.

Every function that has a kernel has a reference in plain torch as well, which does the work on a CPU, where
there is no Triton, and for a thread that is told so (`plain_torch`).
"""

import functools
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from threading import Lock, get_ident, local
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from triton.compiler import CompiledKernel
    from triton.runtime import JITFunction


def pointwise_kernels() -> ModuleType | None:
    return _kernels("pointwise")


def attention_kernels() -> ModuleType | None:
    return _kernels("attention")


def step_kernels() -> ModuleType | None:
    return _kernels("steps")


def linear_kernels() -> ModuleType | None:
    return _kernels("linear")


def expert_kernels() -> ModuleType | None:
    return _kernels("experts")


def tile_kernels() -> ModuleType | None:
    return _kernels("tiles")


def sampling_kernels() -> ModuleType | None:
    return _kernels("sampling")


def sum_kernels() -> ModuleType | None:
    return _kernels("sums")


def format_kernels(name: str) -> ModuleType | None:
    """Return the kernels of a storage format, by the name of their module."""
    return _kernels(name)


def _kernels(name: str) -> ModuleType | None:
    """None while this thread does without them, and where there is no Triton."""
    return None if _launches.plain else _loaded(name)


@functools.cache
def _loaded(name: str) -> ModuleType | None:
    """None where Triton is not installed: then the plain-torch references do the work."""
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
    """What is compiled of a module's."""
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


def noted(launches: Iterable[Callable[[], object]]) -> list[Callable[[], "CompiledKernel"]]:
    """What our kernels would have to have compiled for these, once each: to call it, on any thread, is to
    compile it for the device that is current here. Nothing runs on the device, and what fails is passed over.
    Not where kernels are interpreted.

    What has been compiled already is not launched either: it would read what others have not written.
    """
    from triton.runtime import JITFunction

    found: dict[object, Callable[[], CompiledKernel]] = {}
    thread, noting = get_ident(), True
    ours = {function for kernels in _ALL if (module := kernels()) for function in _functions(module)}

    def here() -> bool:
        return noting and get_ident() == thread

    def run(function: Any, *given: object, warmup: bool, **more: object) -> object:
        return JITFunction.run(function, *given, warmup=warmup or here(), **more)

    def compile(function: Any, key: object, *given: object) -> object:
        if not here():
            return JITFunction._do_compile(function, key, *given)
        found[function, key] = partial(JITFunction._do_compile, function, key, *given)
        return None  # Leave it at that.

    with _NOTING:  # No generator's: an interrupt could leave that behind, suspended.
        try:
            for function in ours:
                function.run, function._do_compile = partial(run, function), partial(compile, function)
            for launch in launches:
                with suppress(Exception):
                    launch()
        finally:
            noting = False  # At once: should an interrupt strike below, what is left behind does nothing.
            for function in ours:
                for name in ("run", "_do_compile"):
                    vars(function).pop(name, None)
    return [*found.values()]


class _Launches(local):
    """Of a thread."""

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
def early_launches(allowed: bool = True) -> Iterator[None]:
    """Kernels that this thread launches meanwhile may begin before what was launched before them has ended,
    and then wait on the device for that; they read weights before they wait. For weights that are where they
    are for good, on a GPU that can do so."""
    before, _launches.early = _launches.early, allowed
    try:
        yield
    finally:
        _launches.early = before


def launches_early() -> bool:
    """Whether this thread's launches may be early."""
    return _launches.early


def early_options(early: bool) -> dict[str, bool]:
    """What such a launch is told, beside a kernel's own arguments."""
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
    """So many int32 zeros or more, to be left as zeros: those that are shared, or some of one's own."""
    shared = _launches.counters
    if shared is None or shared.device != device or len(shared) < count:
        return torch.zeros(count, dtype=torch.int32, device=device)
    return shared
