"""Starts one process for each rank. Rank 0 is the process that the user has started.

Under torchrun all of them exist already, and torchrun watches them. Nothing is started then. Rank 0 goes on
as if it had started the others. Those become followers when they call `launch`, which does not return there.
"""

import signal
import sys
from datetime import timedelta
from typing import Protocol

import torch
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from penstock.base.config import Launched, launched
from penstock.base.errors import ConfigError, DeviceError
from penstock.parallel.crew import PATIENCE, StartedCrew
from penstock.parallel.group import TIMEOUT, Group
from penstock.parallel.seat import Target

_MEETING = 600.0
"""Seconds until all ranks must have come."""


class Crew(Protocol):
    """Holds rank 0's followers. All but `failure` is used by one thread at a time."""

    ranks: int
    local: int

    def group(self, device: torch.device) -> Group:
        """Meet the others, once. Raises DeviceError if one of them does not come."""

    def send(self, message: bytes) -> None:
        """Send to all followers, after `group`. It must not be interrupted."""

    @property
    def failure(self) -> DeviceError | None:
        """Return how the run has ended, if a follower is dead or hung, else None."""

    def verdict(self, fault: BaseException) -> BaseException:
        """Return the cause of a fault here: a follower's failure, if there is one, else the fault itself."""

    def close(self, grace: float = 0.0) -> None:
        """End all followers. Those that got a close message have `grace` seconds to end by themselves."""


def launch(
    ranks: int, target: Target, *args: object, patience: float = PATIENCE, timeout: float = TIMEOUT
) -> Crew:
    """Start ranks 1 and up, each of which calls `target(seat, *args)`, and return to rank 0.

    Under torchrun nothing is started, and ranks 1 and up call `target` here and exit.

    timeout: of collectives, in seconds.

    Raises ConfigError if torchrun has started another number of processes, and DeviceError if a process
    cannot be started.
    """
    place = launched()
    if place is not None:
        return _launched(place, ranks, target, args, timeout)
    crew = StartedCrew(ranks, patience, timeout)
    try:
        crew.start(target, args)
    except BaseException:
        crew.close()
        raise
    return crew


# ---- under torchrun


class _Launched:
    """Acts as rank 0's crew, or as another rank's seat, in a process that torchrun has started.

    Messages go through the group, which reaches other machines too.
    """

    failure: DeviceError | None = None

    def __init__(self, place: Launched, timeout: float) -> None:
        self.rank, self.ranks, self.local, self._near = (
            place.rank,
            place.ranks,
            place.local,
            place.one_machine,
        )
        self._timeout = timeout
        self._group: Group | None = None

    def group(self, device: torch.device) -> Group:
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=_MEETING)))
        self._group = Group(
            PrefixStore("penstock", store),
            self.rank,
            self.ranks,
            device,
            near=self._near,
            timeout=self._timeout,
        )
        return self._group

    def send(self, message: bytes) -> None:
        assert self._group is not None, "a message before the ranks have met"
        self._group.broadcast(message)

    def receive(self) -> bytes:
        assert self._group is not None, "a message before the ranks have met"
        return self._group.broadcast()

    def verdict(self, fault: BaseException) -> BaseException:
        return fault

    def close(self, grace: float = 0.0) -> None:
        """Do nothing: torchrun ends the other processes, if they do not end by themselves."""


def _launched(place: Launched, ranks: int, target: Target, args: tuple[object, ...], timeout: float) -> Crew:
    crew = _Launched(place, timeout)
    if crew.ranks != ranks:
        raise ConfigError(
            f"tensor_parallel={ranks}, but torchrun has started {crew.ranks} processes; start it with "
            f"--nproc-per-node {ranks}"
        )
    if crew.rank == 0:
        return crew
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    target(crew, *args)
    sys.exit(0)
