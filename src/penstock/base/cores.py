"""Finds out how many cores are free for this process: those that it may run on, less what others keep busy.

The rules are functions of numbers; `CoreTimes.now` and `core_limits` read these from Linux. Elsewhere nothing
is known, and nothing is chosen by it.
"""

import os
import platform
import time
from dataclasses import dataclass
from math import ceil, floor, inf
from pathlib import Path
from typing import Self

from penstock.base.units import counted as quantity

_STAT, _OWN_GROUP, _GROUPS = Path("/proc/stat"), Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_INFO = Path("/proc/cpuinfo")
_HALVES = {"avx512_bf16", "amx_tile"}
_UP, _DOWN = 0.35, 0.7
"""Cores that others must take beyond those counted before one more is counted, or leave before one less is.
A process that never rests takes half a core beside threads of ours on every core, and a whole one once it has
a core of its own: both are one core. A tenth of a core now and then is none."""
_WORTH = 8 << 20
"""Bytes of weights that a step reads for which another thread is worth its while."""


def cpu_name(info: Path = _INFO) -> str:
    """Return the processor's name and how many cores this process may run on."""
    return f"{processor(info)}, {quantity(usable_cores(), 'core')}"


def processor(info: Path = _INFO) -> str:
    """Return the processor's name."""
    return _told(info, "model name") or platform.processor() or platform.machine()


def usable_cores() -> int:
    """Return how many cores this process may run on, where the system knows it."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def multiplies_halves(info: Path = _INFO) -> bool:
    """Tell whether the processor has instructions for products in bfloat16, as `native_half` does without
    torch."""
    return not _HALVES.isdisjoint(_told(info, "flags").split())


def _told(info: Path, name: str) -> str:
    try:
        lines = info.read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")


@dataclass(frozen=True, slots=True)
class CoreLimits:
    """Holds the cores that a process may use.

    cores: those it may run on. quota: how many of them at a time, as a container's limit says; inf for none.
    usage: the file that counts what the container has used; None without a limit.
    """

    cores: frozenset[int]
    quota: float = inf
    usage: Path | None = None


@dataclass(frozen=True, slots=True)
class CoreTimes:
    """Holds seconds of CPU time, counted since some moment.

    at: the time. busy: of the cores that this process may run on, by all processes. own: by this process.
    group: by the container that has a limit.
    """

    at: float
    busy: float
    own: float
    group: float = 0.0

    @classmethod
    def now(cls, limits: CoreLimits, stat: Path = _STAT) -> Self | None:
        """Read the times; None where the system does not tell them."""
        try:
            lines = stat.read_text().splitlines()
            tick, busy = os.sysconf("SC_CLK_TCK"), 0
            for line in lines:
                name, *numbers = line.split()
                if name[:3] == "cpu" and name[3:].isdigit() and int(name[3:]) in limits.cores:
                    user, nice, system, _, _, *rest = map(int, numbers[:8])
                    busy += user + nice + system + sum(rest)  # interrupts, and what other machines took
            group = _usage(limits.usage) if limits.usage else 0.0
        except (OSError, ValueError):
            return None
        return cls(time.monotonic(), busy / tick, time.process_time(), group)

    def others(self, before: Self) -> tuple[float, float]:
        """Return the cores that other processes took since: on the machine, and in the container."""
        seconds, own = max(self.at - before.at, 1e-3), self.own - before.own
        return tuple(  # type: ignore[return-value]
            max(0.0, (after - begun - own) / seconds)
            for after, begun in ((self.busy, before.busy), (self.group, before.group))
        )


def counted(before: int, others: float) -> int:
    """Return the whole cores that others have, by what they took, and what was counted before."""
    if before - _DOWN <= others <= before + _UP:
        return before
    return max(0, ceil(others - _UP))


def free_cores(limits: CoreLimits, taken: int, in_group: float) -> int:
    """Return the cores that are left for this process, at least one."""
    left = len(limits.cores) - taken
    if limits.quota < inf:
        left = min(left, floor(limits.quota - in_group + 0.25))
    return max(1, left)


def overloaded(limits: CoreLimits, others: float, threads: int) -> bool:
    """Tell whether others take cores that so many threads compute on: a process that never rests has half of
    what it would, or more."""
    cores = len(limits.cores)
    return others > cores - threads + (_UP if threads > 1 else 0.5 / (cores + 1))


def worth(bytes_read: float, rows: int) -> int:
    """Return the threads that a step is worth which reads so many bytes of weights for so many rows."""
    return max(1, ceil(bytes_read * rows / _WORTH))


def core_limits(own_group: Path = _OWN_GROUP, groups: Path = _GROUPS) -> CoreLimits | None:
    """Return what this process may use; None where the system does not tell it."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    least, usage = inf, None
    for folder in _folders(own_group, groups):
        try:
            most, period = (folder / "cpu.max").read_text().split()
            quota = inf if most == "max" else int(most) / int(period)
        except (OSError, ValueError):
            continue
        if quota < least:
            least, usage = quota, folder / "cpu.stat"
    return CoreLimits(frozenset(os.sched_getaffinity(0)), least, usage)


def _folders(own_group: Path, groups: Path) -> list[Path]:
    """Return the folders of this process's control group and of all above it."""
    try:
        names = [line[3:] for line in own_group.read_text().splitlines() if line.startswith("0::")]
    except OSError:
        names = []
    at = groups / (names[0].strip("/") if names else "")
    return [at, *(above for above in at.parents if above.is_relative_to(groups))]


def _usage(file: Path) -> float:
    """Return the seconds that a control group has used."""
    for line in file.read_text().splitlines():
        name, _, value = line.partition(" ")
        if name == "usage_usec":
            return int(value) / 1e6
    raise ValueError(f"{file} has no usage_usec")
