"""Kernels that are interpreted reach nothing but the tensors that they are given, or fail.

On a GPU, what lies behind a tensor is read in silence and overwritten in silence, or, where nothing is
mapped, ends the process; and interpreted, it is some other tensor's, and all numbers may be right
nevertheless. What is checked are addresses, element by element, in all that a kernel reads, writes or
changes. What lies between a view's rows counts as its own.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
from torch import Tensor

import interpreting

_within: list[tuple[int, int]] = []
"""What may be reached now: addresses [first, end)."""


class OutsideError(AssertionError):
    """A kernel has reached beyond what it was given. The interpreter raises its own error, which names this
    one."""


def span(tensor: Tensor) -> tuple[int, int]:
    """Addresses [first, end) from a tensor's first element to its last, whatever else its storage holds."""
    if not tensor.numel():
        return tensor.data_ptr(), tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


@contextmanager
def lent(spans: Iterable[tuple[int, int]]) -> Iterator[None]:
    """Meanwhile kernels may reach this too: what they find by addresses in memory."""
    before = len(_within)
    _within.extend(spans)
    try:
        yield
    finally:
        del _within[before:]


@cache
def install() -> None:
    """From now on, for as long as the process lives. Where kernels are interpreted: this imports Triton."""
    from triton.runtime import interpreter

    interpreting.install()
    executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    call = executor.__call__

    def called(self: Any, *args: Any, **named: Any) -> None:
        with lent(span(one) for one in (*args, *named.values()) if isinstance(one, Tensor)):
            call(self, *args, **named)

    def checked(access: Callable[..., Any], verb: str, at: int, masked: int | None) -> Callable[..., Any]:
        """at, masked: which of its arguments are the addresses and their mask."""

        def accessed(self: Any, *args: Any, **named: Any) -> Any:
            pointers = args[at]
            size = interpreter._get_np_dtype(pointers.get_element_ty()).itemsize
            _check(verb, pointers.data, None if masked is None else args[masked].data, size)
            return access(self, *args, **named)

        return accessed

    executor.__call__ = called
    for name, verb, at, masked in (
        (
            "create_masked_load",
            "read",
            0,
            1,
        ),  # Accesses without a mask come here too, with one that leaves nothing out.
        ("create_masked_store", "written", 0, 2),
        ("create_atomic_rmw", "changed", 1, 3),
        ("create_atomic_cas", "changed", 0, None),
    ):
        setattr(builder, name, checked(getattr(builder, name), verb, at, masked))


def _check(verb: str, addresses: Any, mask: Any, size: int) -> None:
    """Raises OutsideError unless each of these elements, of `size` bytes, lies in one of the tensors."""
    # What masks are made of may be integers.
    at = (
        addresses.reshape(-1)
        if mask is None
        else addresses[np.broadcast_to(mask, addresses.shape).astype(bool)]
    )
    if not at.size:
        return
    low, high = int(at.min()), int(at.max()) + size
    if any(first <= low and high <= end for first, end in _within):
        return
    outside = np.ones(at.size, dtype=bool)
    for first, end in _within:
        outside &= (at < first) | (at + size > end)
    if outside.any():
        one = int(at[outside][0])
        near, end = min(_within, key=lambda span: max(span[0] - one, one - span[1]), default=(0, 0))
        those = f"{outside.sum()} of {at.size} elements"
        raise OutsideError(
            f"{those} are {verb} outside, one at byte {one - near} of the {end - near} of the nearest tensor"
        )
