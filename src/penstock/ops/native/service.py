"""Serves a device that asks for experts in host memory: a thread of service.c computes them, and no
Python."""

import ctypes
import os
import weakref
from collections.abc import Callable, Sequence
from threading import Lock
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from penstock.arch.spec import Activation
from penstock.ops.handover import HandoverBox
from penstock.ops.matrix import GroupViews
from penstock.ops.native.experts import ActivationNumbers, matrix_address
from penstock.ops.native.few_bits import NUMBERS, MatrixNumbers, library
from penstock.ops.row_classes import CLASSES


class _Resting(ctypes.Structure):
    """Holds what `struct resting` of service.c does."""

    _fields_: ClassVar = [
        ("gate_up", MatrixNumbers),
        ("down", MatrixNumbers),
        ("gate_up_bias", ctypes.c_void_p),
        ("down_bias", ctypes.c_void_p),
        ("activation", ActivationNumbers),
    ]


class _Service(ctypes.Structure):
    """Holds what `struct service` of service.c does, but for what that makes itself."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("asked", "done", "spent", "list", "x", "y", "layers")),
        *((name, ctypes.c_int64) for name in ("layer_count", "experts", "size", "most", "rows", "hidden")),
        *((name, ctypes.c_void_p) for name in ("took", "failed")),
        *((name, ctypes.c_int32) for name in ("kind", "threads", "stop")),
        *((name, ctypes.c_void_p) for name in ("pool", "id")),
    ]


class ExpertService:
    """A service computes what is asked for in a box, from when it is made until it is closed, or not
    referenced any more."""

    def __init__(
        self,
        box: HandoverBox,
        layers: Sequence[tuple[GroupViews, Activation]],
        experts: int,
        size: int,
        threads: int,
    ) -> None:
        """Begin to serve.

        layers: of each layer its first expert, which `experts.takes` approves, and the activation.
        experts: of each layer; they lie one behind the other, `size` bytes each.
        threads: that compute, in all. Raises MemoryError.
        """
        found = library()
        assert found is not None, "takes() says whether there are kernels"
        self._lock = Lock()
        self._kept = box, (_Resting * len(layers))(*(_resting(*layer) for layer in layers)), layers
        self.took: NDArray[np.int64] = np.zeros((CLASSES, box.most + 1, 2), np.int64)
        """By class of tokens and number of experts: how often they were computed, and nanoseconds in all."""
        self._failed = np.zeros(1, np.int32)
        given = _Service(
            **{name: getattr(box, name).data_ptr() for name in ("asked", "done", "spent", "list", "x", "y")},
            layers=ctypes.addressof(self._kept[1]), layer_count=len(layers), experts=experts, size=size,
            most=box.most, rows=box.rows, hidden=box.x.shape[1], took=self.took.ctypes.data,
            failed=self._failed.ctypes.data, kind=NUMBERS[box.x.dtype], threads=threads,
        )  # fmt: skip
        service: int | None = found.service_open(ctypes.byref(given))
        if not service:
            raise MemoryError("no memory for a thread that computes experts")
        # Also where nobody closes it: the thread must not look at memory that is gone.
        self._end = weakref.finalize(self, _end, found.service_close, service, os.getpid())

    @property
    def failed(self) -> str:
        """Say why something was not computed; empty if all was."""
        return ("", "no memory", "what was asked for is not there")[int(self._failed[0])]

    def close(self) -> None:
        """End the thread, behind what it is at. A second call does nothing, nor does one in a forked process,
        which has no such thread."""
        with self._lock:
            self._end()


def _end(close: Callable[[int], None], service: int, process: int) -> None:
    if os.getpid() == process:
        close(service)


def _resting(expert: GroupViews, activation: Activation) -> _Resting:
    biases = (expert.vectors.get(name) for name in ("gate_up_bias", "down_bias"))
    of_both, of_down = (None if bias is None else bias.data_ptr() for bias in biases)
    numbers = (
        MatrixNumbers.from_address(matrix_address(expert.matrices[name])) for name in ("gate_up", "down")
    )
    return _Resting(*numbers, of_both, of_down, ActivationNumbers.of(activation))
