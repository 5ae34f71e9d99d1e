"""Forecasts what a CPU computes of a pass, beside the device and the link. Nothing here reaches torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor

from penstock.ops.row_classes import MOST_TOKENS, class_of
from penstock.weights.streaming.beside import HAND_OVER, cpu_seconds, predict_shared
from penstock.weights.streaming.residency import Placement
from penstock.weights.streaming.ring import Link, Prediction, StreamRates

FALL = (1.0, 0.85, 0.7, 0.55, 0.4)
"""Parts of the CPU's rate of one row that are taken for more rows, where only that is known: as it was with
16 cores beside an H100, nearly."""


@dataclass(frozen=True, slots=True)
class CpuPart:
    """Says what a CPU computes in a pass.

    groups: feed-forwards, or experts. size: their bytes. seconds: in which it computes. alone: of a pass
    without it.
    """

    groups: float
    size: float
    seconds: float
    alone: float


def class_with_cpu(rates: StreamRates, tokens: float) -> int | None:
    """Return the class of a decode step's rows, if a CPU of known rates may compute some of it."""
    if not rates.cpu_read or tokens > MOST_TOKENS:
        return None
    return class_of(max(round(tokens), 1))


def dense_pass(
    placement: Placement, rates: StreamRates, kind: int, seconds: Sequence[float]
) -> tuple[Prediction, CpuPart]:
    """Return how long a pass takes that the CPU shares, of which only the device's own time counts as
    arithmetic, and the CPU's part. seconds: of the device's arithmetic for each use, if it computed all."""
    of = placement.cpu
    assert of is not None, "a placement without passes that the CPU shares"
    found, its = predict_shared(placement, rates, kind, seconds), cpu_seconds(placement, rates, kind)
    busy = {**found.busy, Link.COMPUTE: found.busy[Link.COMPUTE] - its}
    groups = of.orders[kind].groups
    size = sum(use.size for use in placement.uses if use.id in groups)
    return Prediction(found.seconds, busy), CpuPart(len(groups), size, its, 0.0)


def shared_experts(layers: int, come: float, size: float, link: float, cpu: float) -> tuple[float, CpuPart]:
    """Return the seconds until all experts that a device lacks have come or been computed, in all layers, and
    the CPU's part: it takes so many of a layer's that both ways take as long, nearly.

    come: of all layers. size: bytes of one. link, cpu: bytes/s.
    """

    def layer(count: int) -> tuple[float, int]:
        return min(
            (max((count - taken) * size / link, taken * size / cpu + HAND_OVER * (taken > 0)), taken)
            for taken in range(count + 1)
        )

    low = floor(come / layers)
    part = come / layers - low  # Of the layers that have one more.
    (fewer, few), (longer, many) = layer(low), layer(low + 1)
    computed = layers * ((1 - part) * few + part * many)
    seconds = layers * ((1 - part) * fewer + part * longer)
    busy = computed * size / cpu
    return seconds, CpuPart(computed, computed * size, busy, 0.0)
