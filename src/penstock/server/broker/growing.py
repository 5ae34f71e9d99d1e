"""Keeps counters from falling: Prometheus takes one that falls, however little, for one that began anew.

What an engine counts may seem to fall: a step changes numbers while they are read, of which others are the
difference, and which link was late may be known only later. And a model that has slept may have another
engine, which counts from 0.
"""

from collections.abc import Iterable

from prometheus_client.core import Metric

_GROW = ("counter", "histogram")
_Key = tuple[str, tuple[tuple[str, str], ...]]


class Growing:
    """Remembers the most that each counter has shown."""

    def __init__(self) -> None:
        self._engine: int | None = None
        self._shown: dict[_Key, float] = {}
        self._before: dict[_Key, float] = {}
        """What the engines before this one have counted."""

    def of(self, families: Iterable[Metric], engine: int) -> list[Metric]:
        """Return metrics of which no counter falls, and no count of a histogram.

        engine: number of the one that has counted. What another counts is added to what was shown. Some may
            be of the next engine already, which has counted nothing yet.
        """
        if engine != self._engine:
            self._engine, self._before = engine, dict(self._shown)
        found = list(families)
        for family in found:
            if family.type in _GROW:
                family.samples = [
                    one._replace(value=self._grown((one.name, tuple(one.labels.items())), one.value))
                    for one in family.samples
                ]
        return found

    def _grown(self, key: _Key, value: float) -> float:
        shown = max(self._shown.get(key, value), self._before.get(key, 0) + value)
        self._shown[key] = shown
        return shown
