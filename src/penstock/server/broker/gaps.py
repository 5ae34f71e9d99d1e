"""Counts many equal values at once, as a histogram for Prometheus."""

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Gaps(Collector):
    """Counts, as a histogram, many values at once: after a step there is one for each request, and for nearly
    all of them the same."""

    def __init__(self, name: str, what: str, bounds: tuple[float, ...]) -> None:
        self._name, self._what, self._bounds = name, what, bounds
        self._counts, self._sum = [0] * (len(bounds) + 1), 0.0
        """Of what is not above a bound and above the one before, and above them all."""

    def observe(self, value: float, times: int) -> None:
        """Count a value so many times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def collect(self) -> Iterator[Metric]:
        """Yield the histogram."""
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._what, buckets=buckets, sum_value=self._sum)
