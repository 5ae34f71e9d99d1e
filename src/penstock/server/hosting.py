"""Prepares a server of several models that are loaded at their first use, and loads each as it is asked
for."""

import asyncio
import gc
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from time import time

from penstock.api.opening import find_draft
from penstock.api.text.tokenizer import Tokenizer
from penstock.arch.families import FAMILIES
from penstock.arch.spec import ModelSpec
from penstock.base.config import Config
from penstock.base.errors import CheckpointError, ConfigError, EngineClosedError, UnsupportedModelError
from penstock.base.units import format_rate, format_size
from penstock.engine.draft import check_draft, no_copy_of_pack, recipe_of_copy
from penstock.engine.limits import dtype_of
from penstock.engine.rooms import Hardware
from penstock.server.broker.broker import RequestBroker
from penstock.server.fleet.backend import RemoteBackend
from penstock.server.fleet.process import EngineProcess, hardware_of
from penstock.server.fleet.requests import RemoteReader
from penstock.server.fleet.routing import Affinity
from penstock.server.http.state import HostedModel, ListedModel, ServerState
from penstock.server.monitoring.facts import ModelFacts
from penstock.server.on_demand.costs import LoadForecast, MemoryShare, reading_rate
from penstock.server.on_demand.model import LoadError, OnDemandModel
from penstock.server.on_demand.models import OnDemandModels
from penstock.server.on_demand.shares import given_share, grown, room_of, usual_share
from penstock.server.settings import Listening, OnDemandSettings
from penstock.weights.checkpoint.heads import holds_head
from penstock.weights.checkpoint.reader import Checkpoint
from penstock.weights.pack.cache import is_pack
from penstock.weights.pack.reader import Pack

_LOG = logging.getLogger("penstock")
Loadable = OnDemandModel[HostedModel]


@dataclass(frozen=True, slots=True)
class _Prepared:
    """Holds what is known when the server begins.

    cuda: whether a GPU computes. broken: why a model cannot be read, by its name.
    """

    cuda: bool
    room: MemoryShare
    models: list[Loadable]
    listed: Mapping[str, ListedModel]
    costs: LoadForecast
    broken: Mapping[str, str]


class Hosting:
    """Loads models of a server, each into a process of its own."""

    def __init__(
        self, configs: Mapping[str, Config], given: Mapping[str, str], settings: OnDemandSettings
    ) -> None:
        """configs: the settings of each model's engine, by its name. Their memory is that of all together.
        given: what a model may take of it, as DEVICE or DEVICE,HOST."""
        self._configs, self._given, self._settings = dict(configs), dict(given), settings
        self._starting: EngineProcess | None = None
        self._prepared: _Prepared | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the models."""
        return tuple(self._configs)

    def prepare(self) -> None:
        """Look at the machine and at each model's files. Raises PenstockErrors.

        One that cannot be read takes no other down, unless it is the only one.
        """
        first = next(iter(self._configs.values()))
        hardware = hardware_of(first.device)
        room = room_of(first, hardware)
        models, listed, rates = list[Loadable](), dict[str, ListedModel](), dict[str, float]()
        broken, sizes = dict[str, str](), dict[str, int]()
        shares = dict[str, tuple[MemoryShare, MemoryShare]]()
        for name, config in self._configs.items():
            try:
                spec, pack = _spec_of(config)
                dtype = dtype_of(config, spec.dtype, pack, hardware)
            except (CheckpointError, UnsupportedModelError) as fault:
                broken[name] = f"{fault}; then restart the server"
                if len(broken) == len(self._configs):
                    raise
                _LOG.error("%s is not served, others are: %s", name, broken[name])
                told = f"the model {name} cannot be loaded: {broken[name]}"
                models.append(Loadable(name, 0, MemoryShare(0), fault=told))
                listed[name] = ListedModel(ModelFacts(), 0, partial(_refused, told))
                rates[name] = inf
                continue
            facts = ModelFacts.of_spec(spec, dtype)
            sizes[name] = facts.bytes
            shares[name] = self._shares(name, spec, _draft_of(config, spec, dtype, pack), hardware, room)
            rates[name] = reading_rate(config.model)
            longest = config.max_length or spec.max_length
            listed[name] = ListedModel(facts, longest, partial(_templates, config.model))
        for name, share in grown(shares, room).items():
            models.append(Loadable(name, sizes[name], share))
            _LOG.info(
                "%s: %s of weights, may take %s of %s; its files are read at %s",
                name, format_size(sizes[name]), format_size(share.device), format_size(room.device),
                format_rate(rates[name]),
            )  # fmt: skip
        models.sort(key=lambda model: self.names.index(model.name))
        self._prepared = _Prepared(hardware.cuda, room, models, listed, LoadForecast(rates), broken)

    def _shares(
        self, name: str, spec: ModelSpec, draft: ModelSpec | None, hardware: Hardware, room: MemoryShare
    ) -> tuple[MemoryShare, MemoryShare]:
        """Return what a model may take, and with what it has room for its whole context."""
        config = self._configs[name]
        usual = usual_share(spec, config, hardware, room, draft)
        given = self._given.get(name)
        if given is not None:
            usual = given_share(given, usual, hardware, room, name)
        if given is not None or config.max_length is not None or config.kv_blocks is not None:
            return usual, usual
        return usual, usual_share(spec, replace(config, max_length=spec.max_length), hardware, room, draft)

    def open(self, state: ServerState, listening: Listening) -> OnDemandModels[HostedModel]:
        """Take requests from now on, on the running loop."""
        prepared = self._prepared
        assert prepared is not None
        state.listed, state.max_seconds, state.loaded = (
            prepared.listed,
            listening.request_timeout,
            int(time()),
        )
        models: OnDemandModels[HostedModel]

        async def load(model: Loadable) -> HostedModel:
            return await self._loaded(model, state, listening, models)

        models = OnDemandModels(
            prepared.models,
            prepared.room,
            load,
            prepared.costs,
            idle=self._settings.idle_timeout,
            queue=listening.queue,
            keys=len(state.settings.keys),
        )
        state.models = models
        # What is there for good is not looked at again when a model has gone.
        gc.collect()
        gc.freeze()
        return models

    def cancel_load(self) -> None:
        """Break off a load that is under way. May be called at any time."""
        if (process := self._starting) is not None:
            process.kill()

    async def _loaded(
        self,
        model: Loadable,
        state: ServerState,
        listening: Listening,
        models: OnDemandModels[HostedModel],
    ) -> HostedModel:
        """Load a model. Raises what keeps it from that, with nothing left."""
        assert self._prepared is not None
        if (why := self._prepared.broken.get(model.name)) is not None:
            raise CheckpointError(why)
        loop, own = asyncio.get_running_loop(), state.of_model(model.name)

        def ended(why: str) -> None:
            loop.call_soon_threadsafe(gone, why)

        died = list[str]()

        def gone(why: str) -> None:
            died.append(why)
            if model.there is not None and model.there.state is own:
                models.failed(model, why)

        config = self._engine_config(model)
        self._starting = process = EngineProcess(model.name, config, ended)
        try:
            room = partial(self._room_for_one, model)
            backend = await asyncio.to_thread(_opened, process, config, model.name, listening.patience, room)
        finally:
            self._starting = None
        if died:  # Else it is known by the time at which it could.
            await asyncio.to_thread(backend.close)
            raise EngineClosedError(f"its engine has ended at once: {died[0]}")
        broker = RequestBroker(
            backend,
            state.metrics,
            queue=listening.queue,
            keys=len(state.settings.keys),
            afterwards=f"{model.name} is unloaded, and the next request for it loads it again",
        )
        broker.max_seconds = listening.request_timeout
        own.open(backend, broker)
        # On a CPU, and where all fits on the device, all weights are there.
        own.facts = replace(state.listed[model.name].facts, device_bytes=min(model.size, model.share.device))
        return HostedModel(own, backend)

    def _room_for_one(self, model: Loadable, longest: int) -> str:
        """Return what a request that is too long is told: how much room there is, and what to try.

        longest: most tokens of a request to the model.
        """
        prepared, config, share = self._prepared, self._configs[model.name], model.share
        assert prepared is not None
        if longest >= prepared.listed[model.name].max_model_len:
            more = "allow a larger max_length"
        elif config.kv_blocks is not None:
            more = "raise kv_blocks"
        elif share.device < prepared.room.device:
            more = (
                f"start the server with --model-memory {model.name}=SIZE, more than "
                f"{format_size(share.device)}"
            )
        else:
            more = "raise device_memory"
        return f"{model.name} has room for {longest} in all; shorten it, or {more}"

    def _engine_config(self, model: Loadable) -> Config:
        """Return the settings of a model's engine, with its own part of the memory."""
        config, share = self._configs[model.name], model.share
        prepared = self._prepared
        assert prepared is not None
        # On a CPU both are one memory, and host_memory is all of it.
        host = share.host if prepared.cuda else share.host and share.host + share.device
        return replace(
            config, model=config.model.resolve(), device_memory=share.device, host_memory=host or None
        )


def _opened(
    process: EngineProcess, config: Config, name: str, patience: float, room: Callable[[int], str]
) -> RemoteBackend:
    info = process.start()
    try:
        reader = RemoteReader(config.model, info, replicas=1, room=room(info.limits.max_model_len))
    except BaseException:
        process.stop()
        raise
    affinity = Affinity(info.limits.max_sequences, info.limits.kv_blocks)
    affinity.keep([name])
    return RemoteBackend(reader, process, affinity, patience=patience)


def _spec_of(config: Config) -> tuple[ModelSpec, Path | None]:
    """Return the shape of a model, and its directory if it is a pack. Raises CheckpointError and
    UnsupportedModelError."""
    path = config.model
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; give a checkpoint's directory or a GGUF file")
    if is_pack(path):
        with Pack.open(path) as pack:
            return pack.spec, path
    with Checkpoint.open(path, config.cache.expanduser()) as checkpoint:
        return checkpoint.spec, None


def _draft_of(config: Config, target: ModelSpec, dtype: str, pack: Path | None) -> ModelSpec | None:
    """Return the shape of a model's draft model, or of its copy in few bits; None without one. Raises
    ConfigError if that does not fit, or there can be none, and what reading it raises."""
    if config.drafts_itself:
        if pack is not None:
            raise no_copy_of_pack(pack)
        names, ranks = FAMILIES[target.family].names, config.tensor_parallel
        recipe = recipe_of_copy(target, names, dtype, ranks, f"{config.model} has")
        return replace(target, format=recipe.weight_format())
    if config.drafts_by_mtp:
        raise ConfigError(
            "speculate mtp does not work with several models on demand, whose memory is counted without it; "
            "give speculate suffix, or name a draft model"
        )
    if config.draft_model is None:
        return None
    path = find_draft(config, config.draft_model)
    if holds_head(path):
        raise ConfigError(
            f"the draft head {config.draft_model} does not work with several models on demand, whose memory "
            "is counted without it; give speculate suffix, or name a draft model"
        )
    spec, _ = _spec_of(replace(config, model=path))
    check_draft(target, spec)
    return spec


def _refused(why: str) -> Mapping[str, str]:
    raise LoadError(why)


def _templates(model: Path) -> Mapping[str, str]:
    tokenizer = Tokenizer.from_model(model)
    return {} if tokenizer is None else tokenizer.templates
