"""Chooses the CPU threads that a step computes with, by its work and by the cores that are free.

Threads that share a core wait for each other: beside one busy process a step on all cores takes several times
as long as one that leaves that process a core. So what others take is looked at between steps, at most once a
second.

Results do not change. A few rows are computed alike by any number of threads (`ops/native`, and products of
up to `_FEW` rows; tests/cpu/test_threads.py holds them to it). Libraries divide larger products among
threads, which may change the last bits: so a step of more rows always has all threads.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from time import monotonic

import torch

from penstock.arch.bounds import weight_bytes_read
from penstock.base.config import Config, threads_named
from penstock.base.cores import (
    CoreLimits,
    CoreTimes,
    core_limits,
    counted,
    free_cores,
    overloaded,
    worth,
)
from penstock.base.errors import ConfigError
from penstock.base.units import counted as quantity
from penstock.engine.contexts import LongRoom
from penstock.engine.placing import Say
from penstock.engine.plan import Outline
from penstock.ops.linear import SAME_ROWS
from penstock.ops.native.few_bits import find_library

_PERIOD, _FIRST = 1.0, 0.2
"""Seconds between two looks, and from the first step after a pause to the first look."""
_PAUSE = 3.0
"""Seconds without a look after which what others took in them says nothing of now."""
_FEW = {torch.float32: SAME_ROWS}
"""Rows of a step up to which the threads do not change a bit. In 16 bits it is one row."""
_LOOKS = 2
"""Looks in succession that must find too little before it is said."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """Says what a decode step is: the bytes of weights that it reads, and the dtype that it computes in."""

    bytes_read: float
    dtype: torch.dtype


class StepThreads:
    """Gives each step its threads, and afterwards those back that the caller had."""

    def __init__(
        self,
        most: int,
        limits: CoreLimits | None,
        work: StepWork | None,
        *,
        say: Say,
        since: CoreTimes | None = None,
        look: Callable[[CoreLimits], CoreTimes | None] = CoreTimes.now,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """Take at most so many threads.

        work: by which threads are chosen; None takes all in every step. say: is told once that others leave
        too little. since: a first look, from which on what others take is counted.
        """
        self.most = self.now = most
        self._limits, self._work, self._say = limits, work, say
        self._look, self._clock = look, clock
        self._few = 0 if work is None else _FEW.get(work.dtype, 1)
        self._taken, self._free, self._short = 0, most, 0
        self._before = since
        self._due = inf if limits is None else clock() + (0.0 if since else _FIRST)

    @property
    def chosen(self) -> bool:
        """Tell whether threads are chosen, and not the same in every step."""
        return self._work is not None

    @contextmanager
    def of(self, rows: int) -> Iterator[None]:
        """Compute a step of so many rows."""
        before, wanted = torch.get_num_threads(), self.wanted(rows)
        self.now = wanted
        if wanted == before:
            yield
            return
        torch.set_num_threads(wanted)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def wanted(self, rows: int) -> int:
        """Return the threads for a step, after a look at what others take if it is time for one."""
        if (now := self._clock()) >= self._due:
            self._choose(now)
        if self._work is None or rows > self._few:
            return self.most
        return min(self._free, worth(self._work.bytes_read, rows))

    def _choose(self, now: float) -> None:
        assert self._limits is not None
        before, self._before = self._before, self._look(self._limits)
        paused, self._due = now > self._due + _PAUSE, now + _PERIOD
        if before is None or paused:
            self._due = now + _FIRST
        if before is None or self._before is None or paused:
            return
        others, in_group = self._before.others(before)
        if self._work is not None:
            self._taken = counted(self._taken, others)
            self._free = min(self.most, free_cores(self._limits, self._taken, in_group))
        self._warn(others)

    def _warn(self, others: float) -> None:
        """Say that others take cores which threads compute on, once, when two looks have found it."""
        assert self._limits is not None
        if self._short == _LOOKS:
            return
        self._short = self._short + 1 if overloaded(self._limits, others, self._free) else 0
        if self._short == _LOOKS:
            there = quantity(len(self._limits.cores), "core")
            self._say(
                f"threads: other processes keep {others:.1f} of {there} busy, so answers take longer; "
                f"end some of them{'' if self.chosen else ', or lower threads'}"
            )


def first_look() -> CoreTimes | None:
    """Look at the cores as boot begins; None where the system does not tell anything."""
    limits = core_limits()
    return None if limits is None else CoreTimes.now(limits)


def threads_for(
    config: Config, outline: Outline[LongRoom], device: torch.device, *, since: CoreTimes | None, say: Say
) -> StepThreads | None:
    """Return the threads of an engine: those that were asked for, or at most those that this thread has. None
    where a GPU computes, and no number was asked for.

    since: a look at the cores when boot began.
    """
    asked, ranks = config.threads, config.tensor_parallel
    most, limits = asked or torch.get_num_threads(), core_limits()
    if asked is not None and limits is not None and asked > (cores := free_cores(limits, 0, 0.0)):
        say(f"threads: {asked} are more than the {quantity(cores, 'core')} there, and slower; leave them out")
    if device.type != "cpu" or ranks > 1:
        return None if asked is None or ranks > 1 else StepThreads(most, None, None, say=say)
    work = None
    if limits is not None and asked is None and not threads_named() and most > 1:
        most = min(most, free_cores(limits, 0, 0.0))
        if config.kernels and not find_library():
            read = weight_bytes_read(outline.spec, outline.layouts)
            work = StepWork(read, getattr(torch, outline.dtype))
    alone = limits is not None and len(limits.cores) == 1
    watched = limits if work is not None or asked is not None or alone else None
    threads = StepThreads(most, watched, work, say=say, since=since)
    if (now := threads.wanted(1)) < most:
        say(f"CPU threads: {most} for a prompt, {now} for a token of an answer; more would not be faster now")
    return threads


_OPENED = list[int]()
"""The process that was the first to open a model with several threads, if any was."""


def check_fork(threads: int | None) -> None:
    """Raise ConfigError in a process that was forked from one that has opened a model with several threads:
    they were not forked with it, and whatever waits for them would wait for ever.

    threads: that are asked for; None for as many as torch has.
    """
    if (threads or torch.get_num_threads()) == 1:
        return
    if _OPENED and _OPENED[0] != os.getpid():
        raise ConfigError(
            "this process was forked from one that has opened a model with several CPU threads, which do not "
            "exist here; start it by multiprocessing's `spawn`, or give threads=1"
        )
    _OPENED[:] = [os.getpid()]
