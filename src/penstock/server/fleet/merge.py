"""Merges what several replicas report: metrics side by side, the state in sum."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from penstock.server.monitoring.counts import SpeculationState

_LABEL = "replica"
_NAMES = ("what", "tier", "link")
"""Fields by which parts of a list are distinguished."""


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> list[Metric]:
        return self._families


def counted(loads: Mapping[str, int], again: int) -> str:
    """Return the metrics of what a server knows of its replicas: requests under way at each, and requests
    that were sent once more."""
    at = GaugeMetricFamily(
        "penstock:replica_requests", "Requests that a replica has under way.", labels=[_LABEL]
    )
    for replica, load in loads.items():
        at.add_metric([replica], load)
    there = GaugeMetricFamily("penstock:replicas", "Replicas that are there.", value=len(loads))
    sent = CounterMetricFamily(
        "penstock:requests_sent_again",
        "Requests that another replica was sent, as one was lost.",
        value=again,
    )
    return _text([there, at, sent])


def side_by_side(texts: Mapping[str, str], known: str, label: str = _LABEL) -> str:
    """Return the metrics of each replica with a label that says which, but for those that `known`, the
    server's own, has."""
    own = {family.name for family in text_string_to_metric_families(known)}
    families: dict[str, Metric] = {}
    for replica, text in texts.items():
        for family in text_string_to_metric_families(text):
            if family.name in own:
                continue
            merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            merged.samples += [
                sample._replace(labels={**sample.labels, label: replica}) for sample in family.samples
            ]
    return _text(families.values())


def _text(families: Iterable[Metric]) -> str:
    return generate_latest(_Families(families)).decode()


def summed(states: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state of all as that of one, with each replica's own under `replicas`. Raises ValueError if
    there are none."""
    if not states:
        raise ValueError("there are no states to be summed")
    return {**_merged(list(states.values())), "replicas": dict(states)}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


_OWN_WAY: Mapping[str, Callable[[Sequence[Any]], Any]] = {
    "layers": min,
    "longest": min,
    "open": any,
    "waited": _mean,
    "age": max,
    "decode_predicted": max,
    "decode_seconds": max,
    "prefill_seconds": max,
    "speculation": lambda found: _speculation([one for one in found if one is not None]),
    "experts": lambda found: _merged([one for one in found if one is not None]) or None,
    "queue": lambda queues: [one for queue in queues for one in queue],
    "prompt": lambda prompts: next((prompt for prompt in prompts if prompt is not None), None),
}
"""Fields that do not add up."""


def _merged(objects: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    merged = {}
    for name in dict.fromkeys(name for one in objects for name in one):
        values = [one[name] for one in objects if name in one]
        merged[name] = _OWN_WAY[name](values) if name in _OWN_WAY else _sum(values)
    return merged


def _speculation(counts: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the counts of drafts of all replicas; None where nothing drafts."""
    return asdict(SpeculationState.summed(**_merged(counts))) if counts else None


def _sum(values: Sequence[Any]) -> Any:
    """Add numbers, objects field by field, and parts of lists by their names. Of anything else the first."""
    match values[0]:
        case bool() | str() | None:
            return values[0]
        case int() | float():
            return sum(values)
        case Mapping():
            return _merged(values)
        case list() | tuple():
            named: dict[str, list[Mapping[str, Any]]] = {}
            for part in (part for value in values for part in value):
                named.setdefault(next(part[name] for name in _NAMES if name in part), []).append(part)
            return [_merged(parts) for parts in named.values()]
    raise TypeError(f"{type(values[0]).__name__} cannot be summed")
