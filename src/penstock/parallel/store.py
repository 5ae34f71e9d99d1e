"""Lets processes that were started here find each other."""

import ctypes
import os

from torch._C._distributed_c10d import FileStore


class SharedStore:
    """A store is a file without a name, which every rank has open.

    It is never freed, since its destructor would write into any file that has its descriptor's number by
    then. Its file stays open while collectives of a device are `asking`, from threads of their own, perhaps
    for ever.
    """

    def __init__(self, descriptor: int, ranks: int) -> None:
        """Open the store. descriptor: its file, which the caller keeps."""
        self.asking, self._own = False, -1
        self._own = os.dup(descriptor)
        self.store = FileStore(f"/proc/self/fd/{self._own}", ranks)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.store))

    def close(self) -> None:
        """Close the file."""
        if not self.asking:
            own, self._own = self._own, -1
            if own >= 0:
                os.close(own)

    __del__ = close
