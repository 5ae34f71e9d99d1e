"""Tells of several models that are loaded at their first use: their state, and their engines' metrics."""

import asyncio
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.base.errors import EngineClosedError
from penstock.server.fleet.merge import side_by_side
from penstock.server.http.state import ServerState
from penstock.server.monitoring.counts import CacheState, MissedState
from penstock.server.monitoring.served import ServedModel
from penstock.server.monitoring.state import PlanState, State
from penstock.server.on_demand.model import ModelPhase

_LABEL = "model"


def served_models(server: ServerState) -> list[ServedModel]:
    """Return the state of each of several models."""
    models = server.models
    assert models is not None
    return [
        ServedModel(
            name=one.name,
            state=str(one.phase),
            bytes=one.size,
            device_memory=one.share.device,
            host_memory=one.share.host,
            running=len(one.uses),
            waiting=len(one.waiters),
            load_seconds=models.load_time(one),
            ready_in=models.expected_wait(one),
            expires_in=models.expires_in(one),
            loads=one.loads,
            fault=one.fault,
        )
        for one in models.models.values()
    ]


def _nothing_loaded(waiting: int) -> State:
    """Return the state where no model is loaded, with so many requests that wait."""
    return State(
        model="", family="", layers=0, dtype="", format="", device="", longest=0, open=True, running=0,
        waiting=waiting, output_tokens=0, output_rate=0.0, computed_rate=0.0, prompt=None, queue=(), tiers=(),
        links=(), cache=CacheState(0, 0, 0, 0), plan=PlanState(0, 0, 0, 0, 0, 0.0, 0.0, 0.0, ""),
        missed=MissedState(0, 0, 0.0, 0.0, 0.0, 0.0), experts=None,
    )  # fmt: skip


async def state_of_all(server: ServerState) -> dict[str, Any]:
    """Return the state of the machine as the model that was used last has it, and that of each model."""
    assert server.models is not None
    served = served_models(server)
    waiting = sum(one.waiting for one in served)
    found: dict[str, Any] = msgspec.to_builtins(_nothing_loaded(waiting))
    for one in server.hosted:
        if one.fleet is None or one.broker is None:
            continue
        try:
            found = dict(await one.fleet.state(one.broker))
        except EngineClosedError:  # It is being unloaded.
            continue
        found.pop("replicas")
        found["waiting"] += waiting
        break
    return found | {"open": not server.models.closing, "models": msgspec.to_builtins(served)}


class _LoadCounts(Collector):
    def __init__(self, server: ServerState) -> None:
        assert server.models is not None
        self._models = server.models.models.values()

    def collect(self) -> list[Metric]:
        there = GaugeMetricFamily("penstock:model_loaded", "Whether a model is loaded.", labels=[_LABEL])
        waiting = GaugeMetricFamily(
            "penstock:model_waiting", "Requests that wait for a model to be loaded.", labels=[_LABEL]
        )
        loads = CounterMetricFamily("penstock:model_loads", "Loads of a model.", labels=[_LABEL])
        took = CounterMetricFamily(
            "penstock:model_load_seconds", "Seconds that loads of a model took.", labels=[_LABEL]
        )
        for one in self._models:
            there.add_metric([one.name], one.phase is ModelPhase.LOADED)
            waiting.add_metric([one.name], len(one.waiters))
            loads.add_metric([one.name], one.loads)
            took.add_metric([one.name], one.load_seconds)
        return [there, waiting, loads, took]


async def metrics_of_all(server: ServerState, own: bytes) -> bytes:
    """Return the server's own metrics, counts of loads, and what each engine has beside, by its model."""
    registry = CollectorRegistry()
    registry.register(_LoadCounts(server))
    ours = own.decode() + generate_latest(registry).decode()
    told = await asyncio.gather(*(one.fleet.told_metrics() for one in server.hosted if one.fleet is not None))
    texts = {name: text for one in told for name, text in one.items()}
    return (ours + side_by_side(texts, ours, _LABEL)).encode()
