"""Functions of the CUDA runtime that torch has no name for."""

import ctypes
from collections.abc import Callable

import torch

from penstock.base.errors import DeviceError


def cuda_function(name: str, *arguments: type) -> Callable[..., int]:
    """Return a function of the CUDA runtime that torch has loaded; it returns an error's number, or 0.

    The loader looks a name up in a library and in all that it was linked with, whatever that is called and
    wherever it lies. Raises DeviceError if it is not there.
    """
    for library in ("libtorch_cuda.so", f"{torch.__path__[0]}/lib/libtorch_cuda.so", None):
        try:
            function: Callable[..., int] = ctypes.CDLL(library)[name]
        except (OSError, AttributeError):
            continue
        function.argtypes, function.restype = list(arguments), ctypes.c_int  # type: ignore[attr-defined]
        return function
    raise DeviceError(
        f"torch {torch.__version__} does not provide {name} of the CUDA runtime; install a torch from "
        "pypi.org or pytorch.org"
    )
