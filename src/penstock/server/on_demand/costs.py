"""Says what loading costs: how long a load takes, and which loaded models cost least to do without.

A load reads the weights and does what does not depend on their size. The rate of reading is measured when the
server starts. What loads took beyond that is learned from them; and a model that was loaded before is
expected to take what it took then.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from time import perf_counter
from typing import Protocol, Self, TypeVar

_FIRST_EXTRA = 1.5
"""Seconds of a load beside reading, before any load has shown it."""
_FIRST_UNLOAD = 0.3
"""The same of unloading."""
_NEWEST = 0.5
"""The weight of the newest measurement; those before have the rest."""
_READ, _PART = 64 << 20, 4 << 20
"""Bytes that are read to measure a rate, and at a time."""
_SOON = 0.001
"""The least seconds after which a model is expected to be asked for."""


@dataclass(frozen=True, slots=True)
class MemoryShare:
    """Holds bytes of memory: of the device, and of the host beside it."""

    device: int
    host: int = 0

    def __add__(self, other: Self) -> Self:
        return type(self)(self.device + other.device, self.host + other.host)

    def __sub__(self, other: Self) -> Self:
        return type(self)(self.device - other.device, self.host - other.host)

    def within(self, room: Self) -> bool:
        """Tell whether it fits into so much."""
        return self.device <= room.device and self.host <= room.host


class LoadForecast:
    """Forecasts how long loads take, and learns from those that were."""

    def __init__(self, rates: dict[str, float]) -> None:
        """rates: by model, bytes a second at which its files are read."""
        self._rates = rates
        self._took: dict[str, float] = {}
        self._extra = _FIRST_EXTRA
        self.unload = _FIRST_UNLOAD
        """Seconds that it takes to unload a model."""

    def seconds(self, name: str, size: int) -> float:
        """Return the seconds that a load of so many bytes will take."""
        if (took := self._took.get(name)) is not None:
            return took
        return self._extra + size / self._rates[name]

    def loaded(self, name: str, size: int, seconds: float) -> None:
        """Note how long a load took."""
        extra = max(seconds - size / self._rates[name], 0.0)
        self._extra = extra if not self._took else _NEWEST * extra + (1 - _NEWEST) * self._extra
        before = self._took.get(name, seconds)
        self._took[name] = _NEWEST * seconds + (1 - _NEWEST) * before

    def unloaded(self, seconds: float) -> None:
        """Note how long it took to unload a model."""
        self.unload = _NEWEST * seconds + (1 - _NEWEST) * self.unload


def reading_rate(model: Path) -> float:
    """Return the bytes a second at which a model's files are read, the largest first; infinity if it has
    none."""
    files = [model] if model.is_file() else [one for one in model.iterdir() if one.is_file()]
    part, done, began = bytearray(_PART), 0, perf_counter()
    for one in sorted(files, key=lambda one: -one.stat().st_size):
        with suppress(OSError), one.open("rb", buffering=0) as file:  # Whether it is needed shows when it is.
            while done < _READ and (count := file.readinto(part)):
                done += count
    return done / max(perf_counter() - began, 1e-9) if done else inf


class Dispensable(Protocol):
    """Is a loaded model, as whoever chooses among them sees it."""

    @property
    def share(self) -> MemoryShare:
        """Return the memory that it gives back."""


D = TypeVar("D", bound=Dispensable)


def expected_cost(reload: float, gap: float, idle: float) -> float:
    """Return what it costs to do without a model, in seconds of loading a second.

    That is what it takes to load again, over the time until it is likely asked for: the usual gap between
    its requests, or as long as there was none, if that is longer.
    """
    return reload / max(gap, idle, _SOON)


def cheapest(costs: Sequence[tuple[float, D]], need: MemoryShare) -> list[D] | None:
    """Return the models that cost least to do without and give back what is needed; None if all of them do
    not give that back.

    The cheapest are taken until it is enough. Then those that are not needed after all are left, the dearest
    first.
    """
    nothing = MemoryShare(0)
    if need.within(nothing):
        return []
    taken: list[D] = []
    for _, one in sorted(costs, key=lambda cost: cost[0]):
        taken.append(one)
        if need.within(sum((one.share for one in taken), nothing)):
            break
    else:
        return None
    for one in reversed(taken[:-1]):
        rest = [other for other in taken if other is not one]
        if need.within(sum((other.share for other in rest), nothing)):
            taken = rest
    return taken
