"""Holds the settings of a server, and the state that its routes work with."""

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from time import time

from penstock.api.llm import LLM
from penstock.api.reader import PromptReader
from penstock.base.errors import EngineClosedError
from penstock.server.answers.store import ResponseStore
from penstock.server.broker.backend import Backend, LocalBackend
from penstock.server.broker.broker import RequestBroker
from penstock.server.broker.metrics import Metrics
from penstock.server.fleet.backend import RemoteBackend
from penstock.server.http.keys import ApiKey, RefusalThrottle
from penstock.server.http.uploads import Uploads
from penstock.server.monitoring.facts import ModelFacts
from penstock.server.monitoring.records import RecordSink
from penstock.server.monitoring.state import StateMonitor
from penstock.server.parsing.dialects import AUTO, Dialect, dialect_of
from penstock.server.settings import AnswerSettings

_LOG = logging.getLogger("penstock")


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
    refusals: RefusalThrottle = field(default_factory=RefusalThrottle)
    responses: ResponseStore = field(init=False)
    uploads: Uploads = field(init=False)

    def __post_init__(self) -> None:
        self.responses = ResponseStore(self.settings.max_kept)
        self.uploads = Uploads(self.settings.max_body, keys=len(self.settings.keys))

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
            self.llm, self.facts = backend.llm, ModelFacts.of(backend.llm)
            self.clear_prefixes = backend.llm.clear_prefix_cache
            self.monitor = StateMonitor(backend, broker, self.settings.names[0])
            self.metrics.watch(backend, lambda: broker.outputs)

    @property
    def adapters(self) -> Collection[str]:
        """Return the names of the LoRA adapters that are loaded."""
        return self.settings.lora_names if self.llm is None else self.llm.lora_adapters

    def model(self) -> tuple[PromptReader, RequestBroker]:
        """Return what reads prompts and what takes calls. Raise EngineClosedError while the model is
        loaded."""
        if self.reader is None or self.broker is None:
            raise EngineClosedError("the model is still loading; wait until GET /ready answers 200")
        return self.reader, self.broker
