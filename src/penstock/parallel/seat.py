"""Gives a follower its place among the ranks, and runs its process."""

import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn, Protocol

import torch

from penstock.base.errors import PenstockError
from penstock.parallel.channel import ChannelReader
from penstock.parallel.group import Group
from penstock.parallel.store import SharedStore

PULSE = 0.5
"""Seconds between two pulses."""
JOINED = b"J"
"""Sent by a follower that is about to meet the others. All other bytes are pulses."""


class Seat(Protocol):
    """A seat is a rank's place among the others.

    local: its place among the ranks of its machine: the index of its device.
    """

    rank: int
    ranks: int
    local: int

    def group(self, device: torch.device) -> Group:
        """Meet the others, once, on every rank. Return when all have come."""

    def receive(self) -> bytes:
        """Return the next message from rank 0, however long it takes to come."""


Target = Callable[..., None]
"""The function that a follower runs, with its seat and the other arguments of `launch`.

Another process finds it by its module and name.
"""


@dataclass(frozen=True, slots=True)
class Start:
    """Holds the arguments of a follower's process, which it gets first."""

    rank: int
    ranks: int
    memory: int
    line: int
    store: int
    timeout: float
    target: Target
    args: tuple[object, ...]


class _Follower:
    """Holds a follower's seat, in its own process."""

    def __init__(self, control: socket.socket, start: Start) -> None:
        self.rank, self.ranks, self.local = start.rank, start.ranks, start.rank
        self._control, self._store, self._timeout = control, start.store, start.timeout
        self._reader = ChannelReader(start.memory, socket.socket(fileno=start.line))

    def group(self, device: torch.device) -> Group:
        self._control.sendall(JOINED)
        shared = SharedStore(self._store, self.ranks)
        return Group(shared.store, self.rank, self.ranks, device, timeout=self._timeout, shared=shared)

    def receive(self) -> bytes:
        return self._reader.receive()


def follow(control: int) -> NoReturn:
    """Run a started process to its end.

    It ends with the one that has started it, and without cleaning up: that might wait for other ranks, and
    the kernel does it as well.
    """
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, signal.SIG_IGN)
    try:
        line = socket.socket(fileno=control)
        start: Start = pickle.loads(_read(line, int.from_bytes(_read(line, 8), "little")))
        threading.Thread(target=_pulse, args=(line,), name="penstock pulse", daemon=True).start()
        start.target(_Follower(line, start), *start.args)
        _leave(0)
    except PenstockError as fault:
        print(f"{type(fault).__name__}: {fault}", file=sys.stderr)
        _leave(1)
    except BaseException:
        traceback.print_exc()
        _leave(1)
    finally:
        os._exit(1)  # It could not be printed.


def _leave(code: int) -> NoReturn:
    """End while the fault is still held: with it goes its group, whose other ranks would then fail because of
    that, and might be seen to end first."""
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _pulse(line: socket.socket) -> None:
    while True:
        try:
            line.send(b".")
        except OSError:
            os._exit(1)
        time.sleep(PULSE)


def _read(line: socket.socket, size: int) -> bytes:
    parts = b""
    while len(parts) < size:
        part = line.recv(size - len(parts))
        if not part:
            os._exit(1)
        parts += part
    return parts
