"""Holds the settings of a server, and the state that its routes work with."""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import time

import torch

from penstock.api.llm import LLM
from penstock.api.reader import PromptReader
from penstock.base.errors import EngineClosedError
from penstock.memory.device import give_back
from penstock.server.answers.store import ResponseStore
from penstock.server.broker.backend import Backend, LocalBackend
from penstock.server.broker.bed import Bed
from penstock.server.broker.broker import RequestBroker
from penstock.server.broker.metrics import Metrics
from penstock.server.fleet.backend import RemoteBackend
from penstock.server.http.keys import ApiKey, RefusalThrottle
from penstock.server.http.uploads import Uploads
from penstock.server.monitoring.facts import ModelFacts
from penstock.server.monitoring.records import RecordSink
from penstock.server.monitoring.state import StateMonitor
from penstock.server.on_demand.models import OnDemandModels
from penstock.server.parsing.dialects import AUTO, Dialect, dialect_of
from penstock.server.settings import AnswerSettings

_LOG = logging.getLogger("penstock")
_TOLD = 1.0
"""Seconds in which an engine that has failed has told its calls why. One that goes otherwise has none."""


@dataclass(frozen=True, slots=True)
class ServerSettings(AnswerSettings):
    """Sets what a server answers, and to whom.

    names: names by which clients ask for the model; the first is the one that answers give.
    lora_names: of the LoRA adapters that are loaded at the start.
    keys: a client must send one of them, if there are any.
    allow_hosts: names by which this machine is asked, if there are no keys; see OriginGuard.
    allow_origins: origins of other sites' pages that may use the server; "*" is any.
    """

    names: tuple[str, ...]
    lora_names: tuple[str, ...] = ()
    keys: tuple[ApiKey, ...] = ()
    allow_hosts: tuple[str, ...] = ()
    allow_origins: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ListedModel:
    """Tells what is known of a model without loading it.

    max_model_len: tokens of a request, before it is loaded. templates: reads its chat templates, by name, on
    any thread.
    """

    facts: ModelFacts
    max_model_len: int
    templates: Callable[[], Mapping[str, str]]


@dataclass(slots=True)
class HostedModel:
    """Holds one of several models while it is loaded: what routes work with, which is that of a server of
    this model alone."""

    state: "ServerState"
    backend: RemoteBackend

    async def close(self) -> None:
        """End the engine, and wait until its process is gone."""
        assert self.state.broker is not None
        await self.state.broker.close(_TOLD)
        await asyncio.to_thread(self.backend.close)
        # What is left of it here lies in circles.
        await asyncio.to_thread(give_back, torch.device("cpu"))


@dataclass(slots=True)
class ServerState:
    """Holds what routes work with. There is no model while it is being loaded.

    monitor: looks at the engine in this process, if that computes.
    fleet: the backend, if replicas compute.
    loaded: when the model was there, in seconds since 1970.
    sinks: are given the record of each request that is over, before the log is.
    dialect: how the model writes reasoning and calls of tools.
    facts: of the model that is loaded.
    llm: the model, if the engine is in this process.
    clear_prefixes: forgets all prefixes that are kept, and returns how many blocks they had; on any thread.
    bed: puts the model to sleep, if it is in this process.
    models: several models, each loaded at its first use, in place of all that is one model's.
    listed: what is known of these, by name. max_seconds: that any request may take.
    """

    settings: ServerSettings
    reader: PromptReader | None = None
    broker: RequestBroker | None = None
    monitor: StateMonitor | None = None
    fleet: RemoteBackend | None = None
    loaded: int = 0
    metrics: Metrics = field(default_factory=Metrics)
    sinks: Sequence[RecordSink] = ()
    dialect: Dialect | None = None
    facts: ModelFacts = field(default_factory=ModelFacts)
    llm: LLM | None = None
    clear_prefixes: Callable[[], int] | None = None
    bed: Bed | None = None
    models: OnDemandModels[HostedModel] | None = None
    listed: Mapping[str, ListedModel] = field(default_factory=dict)
    max_seconds: float | None = None
    refusals: RefusalThrottle = field(default_factory=RefusalThrottle)
    responses: ResponseStore = field(init=False)
    uploads: Uploads = field(init=False)

    def __post_init__(self) -> None:
        self.responses = ResponseStore(self.settings.max_kept)
        self.uploads = Uploads(self.settings.max_body, keys=len(self.settings.keys))

    def of_model(self, name: str) -> "ServerState":
        """Return the state of a server of one of several models, which shares all that is no model's."""
        own = ServerState(replace(self.settings, names=(name,)), metrics=self.metrics, listed=self.listed)
        own.responses, own.uploads, own.refusals = self.responses, self.uploads, self.refusals
        own.max_seconds = self.max_seconds
        return own

    @property
    def is_open(self) -> bool:
        """Tell whether requests are taken: the model is there, or models are loaded for requests."""
        return self.broker is not None or self.models is not None

    @property
    def hosted(self) -> "list[ServerState]":
        """Return the states of those of several models that are loaded, the one that was used last first."""
        there = [] if self.models is None else list(self.models.models.values())
        return [
            one.there.state for one in sorted(there, key=lambda one: -one.asked_at) if one.there is not None
        ]

    @property
    def outputs(self) -> int:
        """Count the outputs that are computed or wait."""
        brokers = [self.broker, *(one.broker for one in self.hosted)]
        return sum(one.outputs for one in brokers if one is not None)

    def allowed_seconds(self, wanted: float | None) -> float | None:
        """Return the seconds that a request may take which wants so many; None is any."""
        if self.broker is not None:
            return self.broker.allowed_seconds(wanted)
        return min([one for one in (wanted, self.max_seconds) if one is not None], default=None)

    def open(self, backend: Backend, broker: RequestBroker) -> None:
        """Take requests from now on, for what was loaded."""
        self.reader, self.broker, self.loaded = backend.reader, broker, int(time())
        if self.reader.has_tokenizer:
            self.reader.tokenizer.cut_aside()
            templates = self.reader.tokenizer.templates
            self.dialect = dialect_of(templates, self.settings.tool_parser, self.settings.reasoning_parser)
            if (
                self.dialect.calls is None
                and not self.dialect.channels
                and self.settings.tool_parser == AUTO
                and any("tools" in source for source in templates.values())
            ):
                _LOG.warning(
                    "the model takes tools, but the form of its tool calls is unknown: calls stay in the "
                    "text; name the form with --tool-parser"
                )
        if isinstance(backend, RemoteBackend):
            self.fleet = backend
        elif isinstance(backend, LocalBackend):
            self.bed = Bed(backend.llm, broker)
            self.llm, self.facts = backend.llm, ModelFacts.of(backend.llm)
            self.clear_prefixes = backend.llm.clear_prefix_cache
            self.monitor = StateMonitor(backend, broker, self.settings.names[0])
            self.metrics.watch(backend, lambda: broker.outputs)

    @property
    def adapters(self) -> Collection[str]:
        """Return the names of the LoRA adapters that are loaded."""
        return self.settings.lora_names if self.llm is None else self.llm.lora_adapters

    @property
    def lost_adapters(self) -> Mapping[str, str]:
        """Return why adapters are not there that could not be loaded again after a sleep, by their names."""
        return {} if self.llm is None else self.llm.driver.adapters.lost

    def model(self) -> tuple[PromptReader, RequestBroker]:
        """Return what reads prompts and what takes calls. Raise EngineClosedError while the model is
        loaded."""
        if self.reader is None or self.broker is None:
            raise EngineClosedError("the model is still loading; wait until GET /ready answers 200")
        return self.reader, self.broker
