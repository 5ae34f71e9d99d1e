"""Defines a model that is loaded on demand: its state, and what a request is lent of it."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from time import monotonic
from typing import Generic, Protocol, TypeVar

from penstock.base.errors import PenstockError
from penstock.server.on_demand.costs import MemoryShare

AGAIN = 5.0
"""Seconds after a load that has failed in which it is not tried again."""
_FIRST_USE = 1.0
"""Seconds that a use of a model takes, before any has ended."""


class LoadError(PenstockError):
    """Says why a model that a request needs is not there. `seconds`: after which it is tried again."""

    def __init__(self, message: str, seconds: float = AGAIN) -> None:
        super().__init__(message)
        self.seconds = seconds


class ModelPhase(StrEnum):
    """Tells whether a model is there."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"


class Closable(Protocol):
    """Is what a load returns."""

    async def close(self) -> None:
        """End it, and give its memory back."""


T = TypeVar("T", bound=Closable)


@dataclass(slots=True, eq=False)
class ModelWaiter(Generic[T]):
    """Waits for a model with so many outputs of a key, since `came`, and was told to expect `forecast`."""

    future: "asyncio.Future[Lease[T]]"
    outputs: int
    owner: bytes
    came: float
    forecast: float


class Lease(Generic[T]):
    """Lends a model to a request until it is closed. It has waited for so many seconds, and was told to
    expect `forecast`; both are 0 where the model was there."""

    def __init__(self, model: "OnDemandModel[T]", there: T, waited: float, forecast: float) -> None:
        self.there, self.waited, self.forecast = there, waited, forecast
        self._model: OnDemandModel[T] | None = model

    def close(self) -> None:
        """Give the model back. A second call does nothing."""
        model, self._model = self._model, None
        if model is not None:
            model.returned(self)


@dataclass(slots=True, eq=False)
class OnDemandModel(Generic[T]):
    """Knows the state of one model. Its OnDemandModels alone writes it.

    name: by which the server knows it. size: bytes of its weights. share: memory that it may take.
    keep: seconds without requests after which it is unloaded.
    asked_at, gap: when it was last asked for, and the usual seconds between two requests; 0 before any.
    pause: the usual seconds between the end of its uses and the next request; 0 before any.
    phase_since: when its phase began. used_at: when its last use ended.
    leaving: whether it is lent no more, until it was unloaded.
    fault: why its last load has failed, or its engine. failed_at: when.
    """

    name: str
    size: int
    share: MemoryShare
    keep: float = inf
    phase: ModelPhase = ModelPhase.UNLOADED
    there: T | None = None
    leaving: bool = False
    fault: str = ""
    failed_at: float = -inf
    loads: int = 0
    load_seconds: float = 0.0
    asked_at: float = 0.0
    gap: float = 0.0
    pause: float = 0.0
    phase_since: float = 0.0
    used_at: float = 0.0
    use_seconds: float = _FIRST_USE
    uses: dict[Lease[T], float] = field(default_factory=dict)
    waiters: list[ModelWaiter[T]] = field(default_factory=list)
    changed: Callable[[], object] = lambda: None
    clock: Callable[[], float] = monotonic

    def begin(self, waited: float = 0.0, forecast: float = 0.0) -> Lease[T]:
        """Lend it."""
        assert self.phase is ModelPhase.LOADED
        assert self.there is not None
        lease = Lease(self, self.there, waited, forecast)
        self.uses[lease] = self.clock()
        return lease

    def returned(self, lease: Lease[T]) -> None:
        """Note the end of a use."""
        if (began := self.uses.pop(lease, None)) is not None:
            self.used_at = self.clock()
            self.use_seconds += (self.used_at - began - self.use_seconds) / 4
            self.changed()

    def enter(self, phase: ModelPhase) -> None:
        """Begin a phase."""
        self.phase, self.phase_since = phase, self.clock()

    @property
    def drain(self) -> float:
        """Return the seconds until its uses have likely ended."""
        now = self.clock()
        return max((max(self.use_seconds - (now - began), 0.0) for began in self.uses.values()), default=0.0)
