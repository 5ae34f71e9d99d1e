"""CUDA graphs on the CPU: what is computed while a tape records is kept, operation by operation with its
tensors, and a replay computes it again into the same tensors. As with a graph, whatever Python decided is not
decided again, and shapes and addresses stay."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar, ParamSpec, TypeVar
from unittest.mock import Mock, patch

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from penstock.worker import graphs

_P, _R = ParamSpec("_P"), TypeVar("_R")


class Tape:
    """In the place of `torch.cuda.CUDAGraph`."""

    recording: ClassVar["Tape | None"] = None
    """The one that records now."""

    def __init__(self) -> None:
        self._acts: list[Callable[[], None]] = []
        self._noting = _Noting(self)

    def capture_begin(self, *_: object, **__: object) -> None:
        assert Tape.recording is None, "two recordings at once"
        Tape.recording = self
        self._noting.__enter__()

    def capture_end(self) -> None:
        assert Tape.recording is self
        Tape.recording = None
        self._noting.__exit__(None, None, None)

    def replay(self) -> None:
        assert Tape.recording is None
        for act in self._acts:
            act()

    def note(self, operation: Callable[[], Any], result: Any) -> None:
        """Keep an operation that has just had this result."""
        self._acts.append(partial(_again, operation, result))


class _Noting(TorchDispatchMode):
    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._tape.note(partial(func, *args, **(kwargs or {})), result)
        return result


def _again(operation: Callable[[], Any], result: Any) -> None:
    for old, new in zip(tree_leaves(result), tree_leaves(operation()), strict=True):
        if (
            isinstance(old, Tensor) and old.data_ptr() != new.data_ptr()
        ):  # Else it is a view, or was computed in place.
            old.copy_(new)


def launched(kernel: Callable[_P, _R]) -> Callable[_P, _R]:
    """A kernel as a recording sees it: one launch, whatever its stand-in computes."""

    def launch(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with _disable_current_modes():
            result = kernel(*args, **kwargs)
        if Tape.recording is not None:
            Tape.recording.note(partial(kernel, *args, **kwargs), result)
        return result

    return launch


@contextmanager
def taped() -> Iterator[None]:
    """Record on tapes what would be recorded as graphs."""
    with ExitStack() as patches:
        patches.enter_context(patch("torch.cuda.CUDAGraph", Tape))
        patches.enter_context(patch("torch.cuda.stream", lambda _: nullcontext()))
        for name in ("torch.cuda.synchronize", "torch.cuda.graph_pool_handle"):
            patches.enter_context(patch(name))
        patches.enter_context(patch("torch.cuda.memory_reserved", lambda _: 0))
        patches.enter_context(patch.object(graphs, "idle_stream", lambda _: Mock()))
        yield
