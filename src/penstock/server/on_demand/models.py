"""Lends models to requests: loads one at its first use, and unloads one that is idle or whose room another
needs.

Requests for a model that is not loaded wait for it. Models are loaded one by one, in the order in which they
were first waited for. Where there is no room, those are unloaded that cost least to do without (`costs`). A
model that requests use is never unloaded: where room can only come from such a one, requests that come for it
wait as well, until those that use it have ended. It has been there for as long as a load takes before that
happens, and so has one that is idle between two requests that follow each other closely: no more than half of
the time is spent with loading, also where clients of two models ask by turns.

Why this is safe. All of it runs on one event loop, and nothing is awaited between a look at a model's state
and the change that follows from it. There are three waits. A load waits until the models that it takes the
room of are gone: they are marked as going, all in one go, while nobody uses them, and are counted in the
room until they have closed. A model that goes waits for its uses: it is lent no more, and goes with the last
of them. And a request waits for its load: when that has ended, each request that waits is lent the model
before anything else runs, so that nothing finds it idle in between; one that was given up meanwhile gives it
back at once. One task alone loads and unloads, so that no two loads count the same room. A load that fails
leaves the model as it was before, and all who waited for it are told why. An engine that fails is unloaded
like one that is idle; what used it was told by its broker.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from math import inf
from time import monotonic
from typing import Generic

from penstock.base.errors import EngineClosedError, PenstockError
from penstock.base.units import counted, format_size
from penstock.server.broker.calls import BusyError
from penstock.server.on_demand.costs import LoadForecast, MemoryShare, cheapest, expected_cost
from penstock.server.on_demand.model import AGAIN, Lease, LoadError, ModelPhase, ModelWaiter, OnDemandModel, T

_LOG = logging.getLogger("penstock")
_PAUSES = 2.0
"""A model is asked for again within so many of its usual pauses, or it likely will not be soon."""


class OnDemandModels(Generic[T]):
    """Lends models to requests, on one event loop."""

    def __init__(
        self,
        models: Sequence[OnDemandModel[T]],
        room: MemoryShare,
        load: Callable[[OnDemandModel[T]], Awaitable[T]],
        costs: LoadForecast,
        *,
        idle: float = inf,
        queue: int = 256,
        keys: int = 0,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """Begin without any model loaded.

        room: memory for all that are loaded at a time. load: loads one. idle: seconds without requests after
        which a model is unloaded, where a request does not say. queue: outputs that may wait for loads. keys:
        of the server; if there are several, half of the outputs that wait may be one's.
        """
        self.models = {one.name: one for one in models}
        self._room, self._load, self._costs, self._idle = room, load, costs, idle
        self._queue, self._per_key, self._clock = queue, queue // 2 if keys > 1 else queue, clock
        self._wanted: list[OnDemandModel[T]] = []
        """Models that requests wait for; the first is the next to be loaded."""
        self._head: OnDemandModel[T] | None = None
        """The model for which others are leaving."""
        self._changed = asyncio.Event()
        self.closing = False
        """Nothing is lent any more."""
        for one in models:
            one.keep, one.changed, one.clock = idle, self._changed.set, clock
        self.keeper = asyncio.ensure_future(self._keep())
        """Ends with the server, or with a bug."""

    # ---- for requests

    async def lend(
        self, model: OnDemandModel[T], outputs: int = 1, keep: float | None = None, owner: bytes = b""
    ) -> Lease[T]:
        """Lend a model, which is loaded if need be. The lease must be closed.

        outputs: that the request asks for. keep: seconds for which the model stays without requests; None is
        the usual. owner: stands for the key that has sent the request.

        Raises LoadError if it cannot be loaded, BusyError if too many wait, and EngineClosedError when the
        server ends.
        """
        now = self._clock()
        if model.asked_at:
            gap = now - model.asked_at
            model.gap = (model.gap + gap) / 2 if model.gap else gap
        model.asked_at = now
        if model.loads and not (model.uses or model.waiters):
            pause = now - model.used_at
            model.pause = (model.pause + pause) / 2 if model.pause else pause
        model.keep = self._idle if keep is None else keep
        if self.closing:
            raise EngineClosedError("the server is shutting down; send the request to another server")
        if model.phase is ModelPhase.LOADED and not model.leaving:
            return model.begin()
        if (left := model.failed_at + AGAIN - now) > 0:
            raise LoadError(model.fault, left)
        forecast = self.expected_wait(model)
        self._check_room(model, outputs, owner, forecast)
        waiter = ModelWaiter[T](asyncio.get_running_loop().create_future(), outputs, owner, now, forecast)
        model.waiters.append(waiter)
        if model not in self._wanted:
            self._wanted.append(model)
        self._changed.set()
        try:
            return await waiter.future
        except asyncio.CancelledError:
            given = waiter.future
            if given.done() and not given.cancelled() and given.exception() is None:
                given.result().close()
            raise
        finally:
            if waiter in model.waiters:
                model.waiters.remove(waiter)
            self._changed.set()

    def _check_room(self, model: OnDemandModel[T], outputs: int, owner: bytes, forecast: float) -> None:
        """Raise BusyError if too many wait. A single request may, whatever it asks for: else there would be
        no load that others wait for."""
        waiting = [waiter for one in self.models.values() for waiter in one.waiters]
        own = [waiter for waiter in waiting if waiter.owner == owner]
        for whose, some, most in (("", waiting, self._queue), (" of this key", own, self._per_key)):
            there = sum(waiter.outputs for waiter in some)
            if some and there + outputs > most:
                raise BusyError(
                    f"{counted(there, 'output')}{whose} {'waits' if there == 1 else 'wait'} for models that "
                    f"are being loaded, and at most {most} may; "
                    f"{model.name} will be there in about {forecast:.1f} s, so send the request again then",
                    max(forecast, 1.0),
                )

    def unload_soon(self, model: OnDemandModel[T]) -> None:
        """Unload a model as soon as nobody uses it and nobody waits for it."""
        model.keep = 0.0
        self._changed.set()

    def failed(self, model: OnDemandModel[T], why: str) -> None:
        """Note that the engine of a loaded model has failed: it is lent no more."""
        if model.phase is ModelPhase.LOADED:
            model.fault = f"the engine of {model.name} has failed: {why}"
            model.uses.clear()  # They were told.
            model.leaving = True
            self._changed.set()

    # ---- what is known

    @property
    def used(self) -> bool:
        """Tell whether any request uses a model."""
        return any(one.uses for one in self.models.values())

    def expected_wait(self, model: OnDemandModel[T]) -> float:
        """Return the seconds until a model is likely there; 0 if it is."""
        if model.phase is ModelPhase.LOADED and not model.leaving:
            return 0.0
        wait, loaded = 0.0, self._of(ModelPhase.LOADED)
        for one in self.models.values():  # What is under way.
            gone = self._clock() - one.phase_since
            if one.phase is ModelPhase.LOADING:
                wait = max(self.load_time(one) - gone, 0.0)
                if one is model:
                    return wait
                loaded.append(one)
            elif one.phase is ModelPhase.UNLOADING:
                wait = max(self._costs.unload - gone, wait)
        ahead = [one for one in self._wanted if one not in loaded or one.leaving]
        for one in [*ahead[: ahead.index(model)], model] if model in ahead else [*ahead, model]:
            loaded = [other for other in loaded if other is not one]
            free = self._room - sum((other.share for other in loaded), MemoryShare(0))
            if out := cheapest(self._priced(loaded), one.share - free):
                busy = [self._idle_in(other, one) for other in out]
                wait = max([wait, *busy]) + self._costs.unload
                loaded = [other for other in loaded if other not in out]
            wait += self.load_time(one)
            loaded.append(one)
        return wait

    def load_time(self, model: OnDemandModel[T]) -> float:
        """Return the seconds that loading a model will take."""
        return self._costs.seconds(model.name, model.size)

    def expires_in(self, model: OnDemandModel[T]) -> float | None:
        """Return the seconds until a loaded model is unloaded unless it is used before; None if it is not
        loaded, or stays."""
        if model.phase is not ModelPhase.LOADED or model.keep == inf:
            return None
        idle = 0.0 if model.uses else self._clock() - model.used_at
        return max(model.keep - idle, 0.0)

    def _free(self) -> MemoryShare:
        taken = (one.share for one in self.models.values() if one.phase is not ModelPhase.UNLOADED)
        return self._room - sum(taken, MemoryShare(0))

    def _turn(self, one: OnDemandModel[T], by: OnDemandModel[T]) -> float:
        """Return the seconds that are left of those for which a model may stay while another waits."""
        most = max(self.load_time(one), self.load_time(by))
        return max(one.phase_since + most - self._clock(), 0.0)

    def _asked_in(self, one: OnDemandModel[T], by: OnDemandModel[T]) -> float:
        """Return the seconds in which a model is likely asked for after its uses, if that is while it may
        stay; 0 if not."""
        left = _PAUSES * one.pause - (0.0 if one.uses else self._clock() - one.used_at)
        return left if 0 < left < self._turn(one, by) else 0.0

    def _held(self, one: OnDemandModel[T], by: OnDemandModel[T]) -> float:
        """Return the seconds for which a model is not made to go for another: one that is used, or that is
        asked for again soon."""
        return self._turn(one, by) if one.uses else self._asked_in(one, by)

    def _idle_in(self, one: OnDemandModel[T], by: OnDemandModel[T]) -> float:
        """Return the seconds until a model has likely no uses and is made to go for another.

        One whose uses are shorter than the time between them is idle in between.
        """
        stays = self._asked_in(one, by) or (one.uses and one.use_seconds >= one.gap)
        return max(one.drain, self._turn(one, by)) if stays else one.drain

    def _of(self, phase: ModelPhase) -> list[OnDemandModel[T]]:
        return [one for one in self.models.values() if one.phase is phase]

    def _priced(self, some: Sequence[OnDemandModel[T]]) -> list[tuple[float, OnDemandModel[T]]]:
        now = self._clock()
        return [(expected_cost(self.load_time(one), one.gap, now - one.asked_at), one) for one in some]

    # ---- the task that loads and unloads

    async def _keep(self) -> None:
        while True:
            self._changed.clear()
            model = self._next()
            if out := self._out(model):
                for one in out:
                    one.enter(ModelPhase.UNLOADING)
                await asyncio.gather(*map(self._unload, out))
            elif model is not None and model.share.within(self._free()):
                await self._load_one(model)
            else:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._sleep(model)):
                        await self._changed.wait()

    def _next(self) -> OnDemandModel[T] | None:
        """Return the next model to be loaded. Those that are waited for and there are lent."""
        self._wanted = [one for one in self._wanted if one.waiters]
        first = next((one for one in self._wanted if one.phase is ModelPhase.UNLOADED), None)
        if first is not self._head:
            self._head = first
            for one in self._of(ModelPhase.LOADED):
                one.leaving = bool(one.fault)
        for one in [one for one in self._wanted if one.phase is ModelPhase.LOADED and not one.leaving]:
            self._lend_all(one)
        return first

    def _out(self, model: OnDemandModel[T] | None) -> list[OnDemandModel[T]]:
        """Return the models to be unloaded now: those that have been idle for too long, and those that make
        room for another. If these are used still, they are lent no more from now on."""
        loaded, now = self._of(ModelPhase.LOADED), self._clock()
        idle = [one for one in loaded if not one.uses]
        out = [one for one in idle if one.fault or (not one.waiters and now - one.used_at >= one.keep)]
        if out or model is None:
            return out
        need = model.share - self._free()
        may = [one for one in loaded if not self._held(one, model)]
        free = [one for one in may if not one.uses]
        if (out := cheapest(self._priced(free), need) or []) or need.within(MemoryShare(0)):
            return out
        if not any(one.leaving for one in loaded):
            for one in cheapest(self._priced(may), need) or ():
                one.leaving = True
        return []

    def _sleep(self, model: OnDemandModel[T] | None) -> float | None:
        """Return the seconds until there is something to do if nothing changes; None if there never is."""
        now, loaded = self._clock(), self._of(ModelPhase.LOADED)
        due = [one.used_at + one.keep - now for one in loaded if not one.uses]
        if model is not None:
            due += [held for one in loaded if (held := self._held(one, model)) > 0]
        soonest = min(due, default=inf)
        return None if soonest == inf else max(soonest, 0.001)

    async def _load_one(self, model: OnDemandModel[T]) -> None:
        model.enter(ModelPhase.LOADING)
        model.fault, began = "", self._clock()
        try:
            model.there = await self._load(model)
        except Exception as fault:
            if not isinstance(fault, PenstockError):
                _LOG.error("loading %s has failed", model.name, exc_info=fault)
            why = str(fault) if isinstance(fault, PenstockError) else f"{type(fault).__name__}: {fault}"
            model.fault = f"the model {model.name} cannot be loaded: {why}"
            model.enter(ModelPhase.UNLOADED)
            model.failed_at = self._clock()
            if not self.closing:  # Else it was broken off.
                _LOG.warning("%s", model.fault)
            for waiter in model.waiters:
                if not waiter.future.done():
                    waiter.future.set_exception(LoadError(model.fault))
            model.waiters.clear()
            return
        seconds = self._clock() - began
        expected = self.load_time(model)
        self._costs.loaded(model.name, model.size, seconds)
        model.loads, model.load_seconds = model.loads + 1, model.load_seconds + seconds
        model.enter(ModelPhase.LOADED)
        model.used_at = model.phase_since
        _LOG.info("%s: loaded in %.2f s, %.2f s were expected", model.name, seconds, expected)
        self._lend_all(model)

    def _lend_all(self, model: OnDemandModel[T]) -> None:
        """Lend a model to all who wait for it."""
        now = self._clock()
        for waiter in model.waiters:
            if not waiter.future.done():
                waiter.future.set_result(model.begin(now - waiter.came, waiter.forecast))
        model.waiters.clear()

    async def _unload(self, model: OnDemandModel[T]) -> None:
        there, model.there = model.there, None
        assert there is not None
        began, why = self._clock(), "it was idle"
        if model.fault:
            why = model.fault
        elif self._wanted:
            why = f"{self._wanted[0].name} needs its room, {format_size(model.share.device)}"
        try:
            await there.close()
        except Exception:
            _LOG.exception("unloading %s has failed; the traceback shows a bug of penstock", model.name)
        model.leaving = False
        model.enter(ModelPhase.UNLOADED)
        self._costs.unloaded(self._clock() - began)
        _LOG.info("%s: unloaded in %.2f s, since %s", model.name, self._clock() - began, why)

    # ---- the end

    def stop_lending(self) -> None:
        """Lend nothing from now on. Who waits is told."""
        self.closing = True
        for model in self.models.values():
            for waiter in model.waiters:
                if not waiter.future.done():
                    waiter.future.set_exception(
                        EngineClosedError(
                            f"the server was shut down before {model.name} was loaded; send the request again"
                        )
                    )
            model.waiters.clear()

    async def close(self) -> None:
        """Unload all. A load under way must have been broken off, or is waited for."""
        self.stop_lending()
        moving = (ModelPhase.LOADING, ModelPhase.UNLOADING)
        while not self.keeper.done() and any(one.phase in moving for one in self.models.values()):
            await asyncio.sleep(0.01)
        self.keeper.cancel()
        await asyncio.wait((self.keeper,))
        await asyncio.gather(*(self._unload(one) for one in self._of(ModelPhase.LOADED)))
