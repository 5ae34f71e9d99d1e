"""Compiles the kernels that an engine needs side by side, before it needs them.

A kernel is compiled when it is first launched, and kept on disk for later processes. One after the other,
they are most of the first start on a machine. A compiler releases the interpreter's lock for most of its
time. So the real decoder runs steps over blank weights while launches of our kernels are only noted. Then
threads compile and load the noted kernels. If all have been compiled before, this takes a moment.

Why this is safe: kernels that do not run leave memory as torch gives it, and torch's own operations, which do
run, may take it for indices. Within `ZeroFilled` that memory is zeros, and 0 is an index of everything.

Processes that begin at once, such as ranks, compile one after another, by a lock on a file: the first has
done most for all. Besides, Python knows shared libraries by their inodes. If two processes compile the same
launcher, one may replace the file that the other is loading; a later launcher may get the inode of what was
replaced, and Python then takes it for the one it has loaded.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Thread
from time import monotonic, sleep
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from penstock.ops.attention.attend import reads_pages
from penstock.ops.kernels import noted
from penstock.worker.runner import Runner
from penstock.worker.sizes import StepSizes

_LONGEST_WAIT = 300.0
"""Seconds for which a process waits for another to have compiled."""
_LOOKS = 0.05
_COMPILERS = 8
"""Threads: with more, all wait longer for the interpreter."""
_FILLING: dict[object, Callable[..., Tensor]] = {
    torch.empty: torch.zeros,
    torch.empty_like: torch.zeros_like,
    Tensor.new_empty: Tensor.new_zeros,
}


def prepare(device: torch.device) -> None:
    """Begin slow preparations on a thread, those that need no device.

    Call it before the device is first used.
    """
    if reads_pages(device):
        Thread(target=_prepare, name="penstock-prepare", daemon=True).start()


def _prepare() -> None:
    with suppress(Exception):
        from triton.runtime import driver
        from triton.runtime.cache import triton_key

        _ = driver.active  # The first time on a machine, a C compiler builds a part of it.
        triton_key()  # A digest of all of Triton, part of every key of its cache. Triton keeps it.


def compile_ahead(
    make: Callable[[], Runner], device: torch.device, sizes: StepSizes, *, recorded: bool
) -> None:
    """Compile our kernels that a runner's steps launch on a CUDA device. Without kernels do nothing.

    If steps differ from these, or anything fails here, missing kernels are compiled when they are needed.

    make: makes the runner, attached to blank weights and a pool of one block.
    recorded: whether steps will be recorded.
    """
    if not reads_pages(device):
        return

    def ready(compile: Callable[[], Any]) -> None:
        with torch.cuda.device(device), suppress(Exception):
            _ = compile().run  # This loads it.

    with torch.cuda.device(device), suppress(Exception):
        runner = make()
        try:
            with ZeroFilled():
                kernels = noted(runner.rehearse(sizes, recorded=recorded))
        finally:
            if runner.carrier is not None:
                runner.carrier.close()
        threads = min(_COMPILERS, os.cpu_count() or 1)
        with one_at_a_time(_lock_file(), _LONGEST_WAIT), ThreadPoolExecutor(threads) as pool:
            try:
                for done in [pool.submit(ready, kernel) for kernel in kernels]:
                    done.result()
            finally:
                pool.shutdown(cancel_futures=True)


@contextmanager
def one_at_a_time(file: Path, longest: float) -> Iterator[None]:
    """Hold the lock on a file, for which other processes wait.

    It ends with the process that holds it. Where it cannot be had, or not within `longest` seconds, go on
    without.
    """
    with ExitStack() as held:
        with suppress(OSError, ImportError):
            import fcntl

            file.parent.mkdir(parents=True, exist_ok=True)
            lock = held.enter_context(file.open("w"))
            end = monotonic() + longest
            while monotonic() < end:
                with suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                sleep(_LOOKS)
        yield


def _lock_file() -> Path:
    from triton import knobs

    return Path(knobs.cache.dir) / "penstock.lock"


class ZeroFilled(TorchFunctionMode):
    """Fills memory that this thread allocates through torch with zeros, instead of leaving it undefined."""

    def __torch_function__(
        self, function: Any, types: object, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch, or its zero-filled counterpart."""
        return _FILLING.get(function, function)(*args, **(kwargs or {}))
