"""Takes the calls of an event loop's clients, and has a backend carry them out on one thread.

Why this is safe. Two threads, and between them a mailbox. The loop's thread alone knows which calls there
are, how many, and who waits for what; the backend's alone touches the model. The last that a backend reports
of a call is its end: its outputs are complete, or a fault. A call that its client has left is put in the
mailbox like a new one and met in that order, so it is ended behind its own beginning; what comes of it
meanwhile reaches nobody. When the backend fails, or has ended, every call that it has not ended is told so,
those too that it had not met
yet: `_over` is set on the loop, behind everything that was reported before, and no call is taken after it.
"""

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic

from penstock.api.driver import ASLEEP
from penstock.api.sequences import PreparedPrompt
from penstock.base.errors import EngineClosedError, PenstockError
from penstock.base.units import counted
from penstock.server.broker.backend import Backend, Quotas
from penstock.server.broker.calls import BusyError, Call, Update, overdue
from penstock.server.broker.mailbox import Mailbox
from penstock.server.broker.metrics import Metrics, RequestTimes

_LOG = logging.getLogger("penstock")
_FIRST_GUESS = 1.0
"""Seconds that an output takes, before any has ended."""
_LONGEST_WAIT = 60.0
"""Seconds of Retry-After at most."""


class RequestBroker:
    """Takes calls on the running loop, and drives a backend on a thread of its own."""

    def __init__(
        self,
        backend: Backend,
        metrics: Metrics,
        *,
        queue: int,
        keys: int = 0,
        afterwards: str = "the server stops; restart it",
    ) -> None:
        """queue: outputs that may wait, beside those that the backend computes at a time. metrics: counts
        calls.
        keys: of the server; see Quotas. afterwards: what follows when the engine fails, for the log."""
        self._afterwards = afterwards
        self._backend, self._metrics = backend, metrics
        self._quotas = Quotas.of(backend.reader.limits.max_sequences, queue, keys)
        self._calls: set[Call] = set()
        """Calls that were taken and have not ended."""
        self.outputs = 0
        """Outputs of all calls, that are computed or wait, and for which room is kept."""
        self._of_key: Counter[bytes] = Counter()
        """Those of each key."""
        self._output_seconds_ema = _FIRST_GUESS
        """The moving average of seconds per completed call; sets Retry-After."""
        self.max_seconds: float | None = None
        """The seconds that a request may take, whatever it asks for."""
        self._closing = self._paused = self._aborting = False
        self._fault: BaseException | None = None
        self._over = asyncio.Event()
        self._mailbox = Mailbox(asyncio.get_running_loop(), self._deliver)
        self._thread = threading.Thread(target=self._drive, name="penstock driver", daemon=True)
        self._thread.start()

    @property
    def open(self) -> bool:
        """Tell whether calls are taken."""
        return not (self._closing or self._over.is_set())

    @property
    def reading(self) -> Call | None:
        """Return the first call that the engine was given and that has no output yet: a prompt that is being
        computed is that call's."""
        unread = [
            (call.group.sequences[0].request, call)
            for call in self._calls
            if call.group is not None and not call.first_token_time
        ]
        return min(unread, key=lambda one: one[0])[1] if unread else None

    def check_room(self, asked: int, owner: bytes = b"") -> None:
        """Raise BusyError if there is no room for so many outputs of a key, and EngineClosedError if there
        never will be."""
        if not self.open:
            raise self._closed()
        if self._paused:
            raise EngineClosedError(ASLEEP)
        quotas, largest = self._quotas, self._quotas.largest_request
        if asked > largest:
            raise BusyError(
                f"{asked} outputs were asked for, but the server computes at most {largest} at a time; "
                "lower n, or send fewer prompts",
                0.0,
            )
        for whose, there, most in (
            ("", self.outputs, quotas.total),
            (" of this key", self._of_key[owner], quotas.per_key),
        ):
            if there + asked > most:
                raise BusyError(
                    f"{counted(there, 'output')}{whose} {'is' if there == 1 else 'are'} running or waiting, "
                    f"and at most {most} may be; send the request again later",
                    min(max(1.0, self._until_ended(there + asked - most)), _LONGEST_WAIT),
                )

    def _closed(self) -> EngineClosedError:
        why = f"it has failed: {self._fault}" if self._fault else "the server is shutting down"
        return EngineClosedError(
            f"the server takes no more requests, since {why}; send the request to another server, or again "
            "later"
        )

    @property
    def paused(self) -> bool:
        """Tell whether no calls are taken, since the model sleeps or is about to."""
        return self._paused

    def pause(self) -> None:
        """Take no calls until `go_on`: the model goes to sleep."""
        self._paused = True

    def go_on(self) -> None:
        """Take calls again."""
        self._paused = self._aborting = False

    def abort(self) -> None:
        """End all calls, since the model goes to sleep."""
        self._aborting = True
        for call in list(self._calls):
            self._break_off(call, _ended())

    @contextmanager
    def room(self, wanted: int, owner: bytes = b"") -> Iterator[int]:
        """Keep room for a request that submits its prompts in turns, for as many outputs as are computed at a
        time for one key: no more than so many, and where there is less room for as many as there is. Yield
        how many these are. Raise what `check_room` does.

        Like a call, such a request is under way until its end: whoever waits for calls waits for it, also
        between two turns.
        """
        self.check_room(1, owner)
        quotas = self._quotas
        free = min(quotas.total - self.outputs, quotas.per_key - self._of_key[owner])
        kept = min(wanted, free, quotas.running_per_key)
        self._count(owner, kept)
        try:
            yield kept
        finally:
            if not self._over.is_set():  # All was forgotten then.
                self._count(owner, -kept)

    def _until_ended(self, outputs: int) -> float:
        """Return the seconds until so many outputs have ended: by forecast, or by what outputs have taken."""
        forecaster = self._backend.forecaster
        seconds = None if forecaster is None else forecaster.first_end(outputs)
        return self._output_seconds_ema * outputs / self._quotas.running if seconds is None else seconds

    def queue(self, most: int) -> list[tuple[int, float | None]]:
        """Return the outputs that wait, at most so many: see WaitForecaster.waiting."""
        forecaster = self._backend.forecaster
        return [] if forecaster is None else forecaster.waiting(most)

    def allowed_seconds(self, wanted: float | None) -> float | None:
        """Return the seconds that a request may take which wants so many; None is any."""
        given = [one for one in (wanted, self.max_seconds) if one is not None]
        return min(given, default=None)

    def submit(
        self,
        prompts: Sequence[PreparedPrompt],
        wanted: float | None = None,
        since: float | None = None,
        owner: bytes = b"",
        *,
        kept: bool = False,
    ) -> list[Call]:
        """Return a call for each prompt of a request; none is begun unless all are. Raise what `check_room`
        does.

        wanted: seconds after which they end with DeadlineError.
        since: when the request came, in seconds of monotonic(), from which these run; None is now.
        owner: stands for the key that has sent it.
        kept: whether room for them is kept; such a request is under way.
        """
        if kept:
            if self._over.is_set():
                raise self._closed()
            if self._aborting:
                raise _ended()
        else:
            self.check_room(sum(len(one.samplings) for one in prompts), owner)
        calls = [Call(self.leave, one, owner, room=0 if kept else len(one.samplings)) for one in prompts]
        if (forecaster := self._backend.forecaster) is not None:
            for call in calls:
                call.foretell(forecaster.forecast(call))
        self._calls.update(calls)
        for call in calls:
            self._count(owner, call.room)
        seconds, gone = self.allowed_seconds(wanted), 0.0 if since is None else monotonic() - since
        for call in calls:
            if seconds is not None:
                later = asyncio.get_running_loop().call_later
                call.timer = later(max(seconds - gone, 0.0), self._expire, call, seconds)
            self._mailbox.send(call)
        return calls

    async def close(self, patience: float, hurry: Callable[[], bool] = lambda: False) -> None:
        """Take no more calls, let those that there are end for so many seconds, or until there is hurry, then
        end them."""
        self._closing = True
        late = monotonic() + patience
        while self.outputs and monotonic() < late and not (hurry() or self._over.is_set()):
            await asyncio.sleep(0.01)
        self._mailbox.send(None)
        await self._over.wait()
        await asyncio.to_thread(self._thread.join)

    async def failure(self) -> BaseException | None:
        """Wait until the backend has ended. Return what has ended it; None if the broker has."""
        await self._over.wait()
        return self._fault

    def leave(self, call: Call) -> None:
        """End a call that its client wants no more. One that has ended is not disturbed."""
        if call in self._calls and not call.over:
            call.left = True
            self._break_off(call, None)
            self._metrics.abandoned()

    def _expire(self, call: Call, seconds: float) -> None:
        self._mailbox.flush()  # What was computed in time is the client's.
        if call in self._calls and not call.over:
            self._break_off(call, overdue(seconds))

    def _break_off(self, call: Call, fault: BaseException | None) -> None:
        call.deliver((), True, fault)
        self._forget(call)
        self._mailbox.send(call)

    def _forget(self, call: Call) -> None:
        """Count a call no more, which has ended."""
        self._calls.discard(call)
        self._count(call.owner, -call.room)

    def _count(self, owner: bytes, more: int) -> None:
        self.outputs += more
        self._of_key[owner] += more
        if not self._of_key[owner]:
            del self._of_key[owner]

    def _deliver(self, updates: Collection[Update]) -> None:
        """Give calls what the backend has reported of them."""
        now, gaps = monotonic(), list[float]()
        for call, deltas, over, fault in updates:
            if call not in self._calls:
                continue
            if deltas:
                if not call.first_token_time:
                    call.first_token_time = now
                    expected = None if call.forecast is None else call.forecast.seconds
                    self._metrics.began(now - call.arrival_time, expected)
                else:
                    gaps.append(now - call.last_token_time)
                call.last_token_time = now
            call.deliver(deltas, over, fault)
            if over:
                self._forget(call)
                if fault is None:
                    self._output_seconds_ema += (now - call.arrival_time - self._output_seconds_ema) / 16
                    times = RequestTimes(
                        call.scheduled_time - call.arrival_time,
                        call.first_token_time - call.scheduled_time,
                        now - call.first_token_time,
                    )
                    self._metrics.completed(times, call.so_far())
        self._metrics.went_on(gaps)

    def _drive(self) -> None:
        """Run the backend, on its thread."""
        fault: BaseException | None = None
        try:
            self._backend.drive(self._mailbox, self._quotas)
        except BaseException as error:
            fault = error
            _LOG.error(
                "the engine has failed: %s; %s",
                error,
                self._afterwards,
                exc_info=not isinstance(error, PenstockError),
            )
        finally:
            self._mailbox.run_on_loop(self._end, fault)

    def _end(self, fault: BaseException | None) -> None:
        self._fault = fault
        what = (
            f"the engine has failed: {fault}"
            if fault
            else "the server was shut down before this request was complete"
        )
        for call in self._calls:
            call.deliver((), True, EngineClosedError(f"{what}; send it again"))
        self._calls.clear()
        self._of_key.clear()
        self.outputs = 0
        self._over.set()


def _ended() -> EngineClosedError:
    return EngineClosedError(f"the request has ended, since {ASLEEP}")
