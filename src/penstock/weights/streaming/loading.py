"""Brings groups to where they stay: straight into host memory, by way of pinned slots to a device. Every byte
is read once and checked."""

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from queue import SimpleQueue

from torch import Tensor

from penstock.arch.layout import GroupLayout
from penstock.memory.streams import Stream, Ticket
from penstock.weights.streaming.residency import PIECE
from penstock.weights.streaming.source import WeightSource

LOADERS = 8
"""Threads that read; each holds a piece."""
Progress = Callable[[int], None]
Loading = Callable[[str, int, int], None]
"""Called from any thread with what is being done, bytes done and bytes in all."""


def counted(what: str, total: int, loading: Loading | None) -> Progress | None:
    """Return what adds up the bytes of pieces, from any thread, for who wants to know how far it is; None if
    there is no `loading`."""
    if loading is None:
        return None
    lock, done = threading.Lock(), 0

    def progress(size: int) -> None:
        nonlocal done
        with lock:
            done += size
            now = done
        loading(what, now, total)

    return progress


def load(
    groups: Iterable[tuple[GroupLayout, Tensor]],
    source: WeightSource,
    staging: Sequence[Tensor],
    copies: Stream,
    progress: Progress | None,
) -> None:
    """Fill each group's place, flat uint8 on the CPU or on a device. `staging`: pinned slots of PIECE bytes,
    on the way to a device.

    `progress` gets the bytes of each piece, from whichever thread. Raises what `source` raises, when no
    thread is at work any more.

    Why this is safe: no two pieces have bytes in common, a slot belongs to one thread from taking to giving
    it back, and before it is read into the copy out of it is waited for. On return everything that was queued
    on `copies` is done.
    """
    slots: SimpleQueue[tuple[Tensor, Ticket | None]] = SimpleQueue()
    for slot in staging:
        slots.put((slot, None))
    one_at_a_time = threading.Lock()

    def piece(layout: GroupLayout, start: int, target: Tensor) -> None:
        if target.device.type == "cpu":
            source.read(layout, start, target, True)
        else:
            slot, busy = slots.get()
            try:
                if busy is not None:
                    busy.wait()
                source.read(layout, start, slot[: len(target)], True)
                with one_at_a_time:
                    copies.copy(target, slot[: len(target)])
                    busy = copies.mark()
            finally:
                slots.put((slot, busy))
        if progress:
            progress(len(target))

    with ThreadPoolExecutor(LOADERS, thread_name_prefix="penstock loader") as pool:
        try:
            tasks = [
                pool.submit(piece, layout, start, place[start : start + PIECE])
                for layout, place in groups
                for start in range(0, len(place), PIECE)
            ]
            done, _ = wait(tasks, return_when=FIRST_EXCEPTION)
        finally:
            pool.shutdown(cancel_futures=True)
    for task in done:
        task.result()
    copies.mark().wait()
