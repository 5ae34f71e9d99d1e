"""Runs replicas of a model on Ray Serve, on this machine or on many: each an engine and its broker in a
process of its own.

Ray starts them, gives each its GPUs or CPUs, sees that they live, replaces those that do not, and has more or
fewer of them as there is more or less to do. Requests do not go through Ray's own HTTP servers: those know
nothing of an answer that is half sent. The server in front of them is the one that serves a single engine,
with a backend that sends its calls to replicas (see server.fleet).
"""

import asyncio
import logging
import os
import re
import socket
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from math import ceil, floor
from threading import Event
from typing import Any

import grpc
import msgspec
import ray
import torch
from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.schema import LoggingConfig

from penstock.api.llm import LLM
from penstock.base import errors
from penstock.base.config import Config
from penstock.base.errors import CheckpointError, ConfigError, DeviceError, EngineClosedError, PenstockError
from penstock.memory.device import free_memory
from penstock.server.broker.backend import LocalBackend
from penstock.server.broker.broker import RequestBroker
from penstock.server.broker.metrics import Metrics
from penstock.server.fleet.backend import RemoteBackend
from penstock.server.fleet.ray_router import PrefixRouter
from penstock.server.fleet.requests import (
    LostError,
    RemoteReader,
    RemoteRequest,
    ReplicaInfo,
    ReplicaMessage,
    computed,
)
from penstock.server.fleet.routing import SHARED, Affinity, PromptRoute
from penstock.server.fleet.scale import Scale
from penstock.server.monitoring.state import StateMonitor
from penstock.weights.gguf.files import is_gguf

_LOG = logging.getLogger("penstock")
_NAME = "replica"
_ROWS = {"cpu": 64, "cuda": 256}
"""Sequences in one step of a replica, where none are asked for."""
_WAITING = 1.25
"""Requests that are sent to a replica, by the sequences of its steps: so many that no row is empty between
two steps. Others wait where any replica may take them."""
_OBJECTS = 100 << 20
"""Bytes of memory for Ray's objects: there are none."""
_LOOK = 0.2
_KNOCK = 5.0
"""Seconds in which a cluster has answered that it is there."""
_SILENCE = 15.0
"""Seconds after which it is said that there is no replica yet."""
_INFO = 60.0
"""Seconds in which a replica that runs has said what it is."""
_STATE = 5.0
"""Seconds in which replicas have answered with their state."""
_PERIOD, _LONGEST_PERIOD = 2.0, 30.0
"""Seconds between two looks at how much there is to do, and the most seconds that their mean counts."""
_SHARES = {"cpu": 0.5, "cuda": 0.8}
"""The share of free host memory for all replicas of a machine that has it as their device, or beside
theirs."""


# ---- a replica


class Replica:
    """Runs an engine and its broker, in a process that Ray has started."""

    async def __init__(self, config: Config, model: str, neighbours: int) -> None:  # type: ignore[misc]  # Ray Serve awaits it.
        """model: what clients call it. neighbours: replicas that share this machine's memory, this one
        included."""
        logging.basicConfig(stream=sys.stderr, level=logging.INFO)  # Into Ray's own files.
        settings = _within(config, neighbours)
        self._name = str(serve.get_replica_context().replica_id.unique_id)
        self._metrics = Metrics()
        self._llm = await asyncio.to_thread(LLM.from_config, settings, progress=False)
        backend = LocalBackend(self._llm)
        # Those who wait are counted in front.
        self._broker = RequestBroker(
            backend, self._metrics, queue=sys.maxsize, afterwards="this replica ends, and Ray starts another"
        )
        self._metrics.watch(backend, lambda: self._broker.outputs)
        self._monitor = StateMonitor(backend, self._broker, model)
        self._ending = asyncio.ensure_future(self._end_with_engine())

    async def answer(self, route: PromptRoute, request: RemoteRequest) -> AsyncGenerator[ReplicaMessage]:
        """Give out what is computed for the request. Ends early if the engine ends."""
        async with aclosing(computed(self._llm.reader, self._broker, self._name, request)) as messages:
            async for message in messages:
                yield message

    async def info(self) -> ReplicaInfo:
        """Return what the server is to know of the model."""
        return ReplicaInfo.of(self._llm)

    async def state(self) -> tuple[str, Mapping[str, Any]]:
        """Return the replica's name and the state of its machine."""
        return self._name, msgspec.to_builtins(self._monitor.look())

    async def experts(self) -> tuple[str, Any]:
        """Return the replica's name and the use of its experts."""
        return self._name, msgspec.to_builtins(await asyncio.to_thread(self._monitor.experts))

    async def metrics(self) -> tuple[str, str]:
        """Return the replica's name and its metrics, as Prometheus reads them."""
        return self._name, self._metrics.text().decode()

    async def check_health(self) -> None:
        """Raise EngineClosedError if the engine has ended. Ray calls it every few seconds."""
        if not self._broker.open:
            raise EngineClosedError("the engine of this replica has ended; send the request again")

    async def _end_with_engine(self) -> None:
        """End this process with its engine, so that no request waits for it."""
        if (fault := await self._broker.failure()) is not None:
            _LOG.error("this replica ends, since its engine has failed: %s", fault)
            os._exit(1)

    async def __del__(self) -> None:
        """End the engine. Ray Serve awaits it when the replica is to go, and nothing is under way any
        more."""
        await self._broker.close(0)
        await asyncio.to_thread(self._llm.close)


def _within(config: Config, neighbours: int) -> Config:
    """Return the settings of a replica that shares a machine: where a share of its free memory was meant, it
    is that of one of several."""
    if neighbours == 1:
        return config
    device = "cpu" if config.device == "cpu" or not torch.cuda.is_available() else "cuda"
    asked = (config.device_memory, config.host_memory) if device == "cpu" else (config.host_memory,)
    if any(size is not None for size in asked):
        return config
    part = int(free_memory(torch.device("cpu")) * _SHARES[device] / neighbours)
    return replace(config, device_memory=part) if device == "cpu" else replace(config, host_memory=part)


# ---- all of them


class Replicas:
    """Starts the replicas of a server and ends them, on any thread. They may be asked from any loop."""

    def __init__(self, config: Config, scale: Scale, name: str, patience: float) -> None:
        """name: of the model, by which the application is known to Ray. patience: seconds that a replica has
        for its calls when it goes."""
        self._config, self._scale, self._patience = config, scale, patience
        self._name, self._application = name, f"penstock-{name}"
        self._enough = Event()
        self._handle: Any = None
        self._affinity = Affinity(0, 0)

    # ---- their life

    def load(self) -> RemoteBackend:
        """Start them, and wait for the first. Raises ConfigError for what Ray cannot do, and what the
        replica's model has raised."""
        if not (self._config.model / "config.json").exists() and not is_gguf(self._config.model):
            raise CheckpointError(
                f"{self._config.model} has no config.json; name a model's directory or GGUF file, the "
                "same on every machine"
            )
        try:
            self._connect()
            if not self._enough.is_set():
                self._deploy()
            info = self._first()
        except BaseException:
            self.stop()
            raise
        limits = info.limits
        self._affinity.slack, self._affinity.kept = max(limits.max_sequences // 4, 1), limits.kv_blocks
        reader = RemoteReader(self._config.model, info, replicas=self._scale.most)
        return RemoteBackend(reader, self, self._affinity, patience=self._patience)

    def cancel_load(self) -> None:
        """Stop waiting for a replica."""
        self._enough.set()

    def stop(self) -> None:
        """End them, and whatever was started for them."""
        handle, self._handle = self._handle, None
        if ray.is_initialized():
            with suppress(RayError, RayServeException, TimeoutError, ConnectionError):
                if handle is not None:
                    # Else it would go on to tell Ray what there is to do, and start it again for that.
                    handle.shutdown()
                serve.delete(self._application)
            ray.shutdown()
        SHARED.pop(self._application, None)

    def _connect(self) -> None:
        for name in ("ray", "ray.serve"):
            logging.getLogger(name).setLevel(logging.ERROR)
        quiet = {"log_to_driver": False, "configure_logging": False, "namespace": "penstock"}
        try:
            if self._scale.ray_address is not None:
                _knock(self._scale.ray_address)
                ray.init(address=self._scale.ray_address, **quiet)
            else:
                # Nothing is reported outside, and how much memory replicas take has been decided.
                os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
                os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
                gpus = 0 if self._config.device == "cpu" else None
                ray.init(
                    address="local",
                    num_gpus=gpus,
                    include_dashboard=False,
                    object_store_memory=_OBJECTS,
                    **quiet,
                )
        except (OSError, RayError, RuntimeError, ValueError) as fault:
            what = "started" if self._scale.ray_address is None else f"reached at {self._scale.ray_address}"
            raise ConfigError(f"Ray cannot be {what}: {_line(str(fault))}; see docs/scale-out.md") from fault

    def _deploy(self) -> None:
        need, there = self._need(), [node["Resources"] for node in ray.nodes() if node["Alive"]]
        room = [min([int(node.get(name, 0) / much + 1e-6) for name, much in need.items()]) for node in there]
        asked = " and ".join(_counted(much, name) for name, much in need.items())
        if sum(room) < self._scale.least:
            what = (
                f"{_counted(self._scale.least, 'replica')} were asked for, each with {asked}, but there is "
                f"room for {sum(room)}"
            )
            if self._scale.ray_address is None:
                raise ConfigError(
                    f"{what} on this machine; ask for fewer, or name a cluster with --ray-address"
                )
            _LOG.warning("%s in the cluster now: the others wait for more machines", what)
        rows = self._config.max_sequences or min(
            _ROWS["cuda" if "GPU" in need else "cpu"], self._config.max_step_tokens or sys.maxsize
        )
        config = replace(self._config, max_sequences=rows, model=self._config.model.resolve())
        neighbours = min(max([*room, 1]), self._scale.most)
        SHARED[self._application] = self._affinity
        deployment = serve.deployment(
            Replica,
            name=_NAME,
            max_ongoing_requests=ceil(_WAITING * rows),
            graceful_shutdown_wait_loop_s=_LOOK,
            graceful_shutdown_timeout_s=self._patience + 1,
            health_check_period_s=2,
            health_check_timeout_s=60,
            max_constructor_retry_count=3,
            ray_actor_options={"num_cpus": need["CPU"], "num_gpus": need.get("GPU", 0)},
            request_router_config=RequestRouterConfig(
                request_router_class=PrefixRouter, request_router_kwargs={"application": self._application}
            ),
            logging_config=LoggingConfig(enable_access_log=False),
            **self._number(rows),
        )
        serve.start(proxy_location="Disabled")
        [self._handle] = serve.run_many(
            [
                serve.RunTarget(
                    deployment.bind(config, self._name, neighbours), name=self._application, route_prefix=None
                )
            ],
            wait_for_applications_running=False,
        )
        _LOG.info("starting %s, each with %s; their logs are below %s", self._scale, asked, _logs())

    def _number(self, rows: int) -> dict[str, object]:
        scale = self._scale
        if scale.least == scale.most:
            return {"num_replicas": scale.least}
        return {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=scale.least,
                max_replicas=scale.most,
                target_ongoing_requests=rows,
                upscale_delay_s=scale.scale_up_after,
                downscale_delay_s=scale.scale_down_after,
                metrics_interval_s=_PERIOD,
                look_back_period_s=min(max(2 * _PERIOD, scale.scale_up_after), _LONGEST_PERIOD),
            )
        }

    def _need(self) -> dict[str, float]:
        """Return what each replica asks Ray for."""
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        ranks, device = self._config.tensor_parallel, self._config.device
        if ":" in device:
            raise ConfigError(
                f"device is {device}, but Ray chooses the GPUs of each replica; set device to "
                f"{device.partition(':')[0]}"
            )
        if device != "cpu" and any(node.get("GPU", 0) for node in nodes):
            return {"GPU": ranks, "CPU": self._scale.replica_cpus or 1}
        if device not in ("auto", "cpu"):
            raise DeviceError(
                f"device is {device}, but Ray knows of no GPUs; set device to cpu, or start Ray on machines "
                "with GPUs"
            )
        if self._scale.replica_cpus:
            return {"CPU": self._scale.replica_cpus}
        cpus = [node["CPU"] for node in nodes if node.get("CPU", 0)]
        if not cpus:
            raise ConfigError("Ray knows of no CPUs; start Ray with --num-cpus on the machines that compute")
        each = min(cpus) / ceil(self._scale.most / len(cpus))
        return {"CPU": floor(each) if each >= 1 else floor(each * 1000) / 1000}

    def _first(self) -> ReplicaInfo:
        """Wait for the first replica. Return what it says of its model."""
        waited = 0.0
        while not self._enough.wait(_LOOK):
            waited += _LOOK
            application = serve.status().applications.get(self._application)
            found = application.deployments.get(_NAME) if application is not None else None
            if found is None:
                continue
            if any(state == "RUNNING" and count for state, count in found.replica_states.items()):
                info: ReplicaInfo = self._handle.info.remote().result(timeout_s=_INFO)
                return info
            _raise_what(found.message)
            if application is not None and application.status == "DEPLOY_FAILED":
                raise EngineClosedError(f"the replicas do not start: {_line(found.message)}; see their logs")
            if waited - _LOOK < _SILENCE <= waited:
                _LOG.warning(
                    "no replica has started yet; Ray says: %s",
                    _line(found.message) or "they are being started",
                )
        raise EngineClosedError("the server was stopped before a replica was ready")

    # ---- their answers

    async def answer(self, keys: Sequence[bytes], request: RemoteRequest) -> AsyncGenerator[ReplicaMessage]:
        """Give out a replica's answer; see ReplicaPool."""
        streams = self._plain.options(method_name="answer", stream=True)
        response = streams.remote(PromptRoute(keys), request)
        try:
            async for message in response:
                yield message
        except (RayActorError, grpc.RpcError) as lost:
            raise LostError(_line(str(lost))) from lost
        except RayServeException as fault:
            raise EngineClosedError(
                f"the replicas are gone: {_line(str(fault))}; send the request again later"
            ) from fault
        finally:
            response.cancel()

    async def broadcast(self, what: str) -> dict[str, Any]:
        """Ask every replica; see ReplicaPool."""
        if self._handle is None:
            return {}
        with suppress(RayError, RayServeException, TimeoutError):
            found = await self._plain.broadcast(what).results_async(timeout_s=_STATE, return_exceptions=True)
            return dict(one for one in found if not isinstance(one, BaseException))
        return {}

    @property
    def _plain(self) -> Any:
        # Over a connection to the replica: Ray's own objects would take five times as long for each piece.
        return self._handle.options(_by_reference=False)


def _knock(address: str) -> None:
    """Raise OSError or ValueError if there is no cluster: Ray would wait for minutes."""
    if "://" in address:
        raise ValueError("an address is auto, or HOST:PORT as `ray start` prints it")
    found = ray._private.services.canonicalize_bootstrap_address(address)
    if found is not None:  # Else Ray itself says that there is none.
        host, _, port = found.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), _KNOCK).close()


def _counted(much: float, what: str) -> str:
    return f"{much:g} {what}" if much == 1 else f"{much:g} {what}s"


def _logs() -> str:
    return str(ray._private.worker._global_node.get_logs_dir_path())


def _line(text: str) -> str:
    return " ".join(text.split())[:300].rstrip(".")


_RAISED = re.compile(r"penstock\.base\.errors\.(\w+): (.+)")


def _raise_what(message: str) -> None:
    """Raise what a replica's model has raised, by Ray's report of it."""
    for name, said in _RAISED.findall(message):
        if isinstance(kind := getattr(errors, name, None), type) and issubclass(kind, PenstockError):
            raise kind(said)
