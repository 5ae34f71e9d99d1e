"""Memory of a GPU that GPUs of other processes on the machine reach as well, by CUDA's IPC handles."""

import ctypes

import torch

from penstock.base.errors import DeviceError
from penstock.memory.runtime import cuda_function

_HANDLE = ctypes.c_ubyte * 64
_PEERS_WHEN_NEEDED = 1


class _ByValue(ctypes.Structure):
    _fields_ = (("bytes", _HANDLE),)


class Window:
    """A Window is memory of this process's device, zeros at first, and what it sees of others' windows.

    It has no name that could be left behind.

    handle: by which another process sees it.
    """

    def __init__(self, device: torch.device, size: int) -> None:
        """Allocate `size` bytes. Raises DeviceError if they are not there, or cannot be shared."""
        self._device, self._own, self._seen = device, ctypes.c_void_p(), list[ctypes.c_void_p]()
        handle = _HANDLE()
        try:
            self._call("cudaMalloc", ctypes.byref(self._own), ctypes.c_size_t(size))
            self._call("cudaMemset", self._own, ctypes.c_int(0), ctypes.c_size_t(size))
            self._call("cudaIpcGetMemHandle", ctypes.byref(handle), self._own)
            torch.cuda.synchronize(device)
        except BaseException:
            self.close()
            raise
        self.handle = bytes(handle)

    @property
    def address(self) -> int:
        """Return where it begins."""
        return self._own.value or 0

    def see(self, handle: bytes) -> int:
        """Return where another's window begins, for kernels of this process's device.

        Raises DeviceError if devices do not reach each other.
        """
        there = ctypes.c_void_p()
        given = _ByValue(_HANDLE.from_buffer_copy(handle))
        self._call("cudaIpcOpenMemHandle", ctypes.byref(there), given, ctypes.c_uint(_PEERS_WHEN_NEEDED))
        self._seen.append(there)
        return there.value or 0

    def look_away(self) -> None:
        """Close others' windows."""
        seen, self._seen = self._seen, []
        with torch.cuda.device(self._device):
            for one in seen:
                cuda_function("cudaIpcCloseMemHandle")(one)

    def close(self) -> None:
        """Free the memory, once no process sees it any more. A second call does nothing."""
        self.look_away()
        own, self._own = self._own, ctypes.c_void_p()
        if own:
            with torch.cuda.device(self._device):
                cuda_function("cudaFree")(own)

    def _call(self, name: str, *arguments: object) -> None:
        with torch.cuda.device(self._device):
            error = cuda_function(name)(*arguments)  # Every argument is a ctypes value.
        if error:
            # The runtime keeps a failed call's error, and would report it for the next one.
            cuda_function("cudaGetLastError")()
            raise DeviceError(
                f"GPU memory cannot be shared between the ranks: {name} failed with CUDA error {error}"
            )
