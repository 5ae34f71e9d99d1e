"""Between an event loop with many clients and the one thread that drives the engine.

Why this is safe. Two threads, and between them two queues whose every operation is done or not done. The
loop's thread alone knows which calls there are, how many, and who waits for what; the driver alone touches
the model. Whatever the driver has for a call it hands to the loop once after each step, for all calls at
once, and the last it hands over of a call is its end: its outputs are complete, or a fault. It leaves that in
a tray, where the loop finds all steps since it last looked, and has the loop look unless it was told to and
has not begun: the loop notes that it begins before it looks, the driver asks after it has put something
there, so nothing is left lying. A call that its client has left is put in the queue like a new one and met in
that order, so it is ended behind its own beginning; what comes of it meanwhile reaches nobody. When the
driver fails, or has ended, every call that it has not ended is told so, those too that it had not met yet:
`_over` is set on the loop, behind everything that was handed over before, and no call is taken after it. When
a call's turn came the driver writes once, before it hands over anything of it.
"""

import asyncio
import logging
import threading
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from time import monotonic

from penstock.api.jobs import Job, Ready
from penstock.api.llm import LLM
from penstock.api.outputs import Completion, Delta
from penstock.base.errors import EngineClosedError, PenstockError
from penstock.engine.engine import Stats
from penstock.server.metrics import Metrics, Times

_LOG = logging.getLogger("penstock")
_NAP = 0.02
"""Seconds between two looks at blocks that move between tiers while nobody asks for anything."""
_GLANCE = 1.0
"""Seconds between two looks at whether the engine is still alive, then."""
_FIRST_GUESS = 1.0
"""Seconds that an output takes, before any has ended."""
_LONGEST_WAIT = 60.0


class BusyError(PenstockError):
    """There is no room for another request now. `seconds`: after which there may be."""

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message)
        self.seconds = seconds


class DeadlineError(PenstockError):
    """A request has taken longer than it may."""


def overdue(seconds: float) -> DeadlineError:
    """Of a request that has taken so many."""
    what = f"the request has taken {seconds:g} seconds, which is all it may (timeout)"
    return DeadlineError(f"{what}; ask for fewer tokens, allow more time, or try when there is less to do")


AtOnce = Callable[[Sequence[Delta]], bool]
News = tuple["Call", Sequence[Delta], bool, BaseException | None]
"""What has come of a call, whether that was the last of it, and what has kept it from being complete."""


class Call:
    """A client's prompt: pieces of its outputs as they come, from the loop that has asked."""

    def __init__(self, desk: "Desk", ready: Ready, owner: bytes = b"") -> None:
        self.ready, self.owner = ready, owner
        self.begun = monotonic()
        self._desk = desk
        self._job: Job | None = None
        """The driver's."""
        self.admitted = self.first = self.last = 0.0
        """When its turn came, and there were a first and, lately, another piece, by monotonic(); 0 until
        then."""
        self.left = False
        """Whether its client went before its end."""
        self._come: list[Delta] = []
        self._news = asyncio.Event()
        self._at_once: AtOnce | None = None
        """Takes what comes, while somebody waits for it."""
        self._raised: Exception | None = None
        """By that."""
        self._fault: BaseException | None = None
        self._over = False
        self._timer: asyncio.TimerHandle | None = None
        """That ends it when it has taken too long."""

    async def pieces(self, at_once: AtOnce | None = None) -> AsyncIterator[Sequence[Delta]]:
        """All that has come since the last time, until the outputs are complete. Raises what has kept them
        from being so.

        at_once: is given what comes while it is waited for, as soon as the loop has it and with nobody woken
        up for it. What it takes is not told again; where it does not, by saying False, that comes in the
        usual way. What it raises is raised here.
        """
        while True:
            while not (self._come or self._over or self._raised):
                self._news.clear()
                self._at_once = at_once
                try:
                    await self._news.wait()
                finally:
                    self._at_once = None
            if self._raised is not None:
                raise self._raised
            come, self._come = self._come, []
            if come:
                yield come
            elif self._fault is not None:
                raise self._fault
            else:
                return

    async def completion(self) -> Completion:
        """When it is complete."""
        async for _ in self.pieces(lambda _: True):
            pass
        return self.so_far()

    def so_far(self) -> Completion:
        """What has come of it; to be asked when it is complete, or for what does not change once there is a
        piece."""
        assert self._job is not None, "asked before the first piece"
        return self._job.completion()

    @property
    def counts(self) -> tuple[int, int]:
        """Tokens of its outputs so far, and those of its prompt that were found. From the loop, also while
        there come more."""
        if self._job is None:
            return 0, 0
        return sum(len(sequence.tokens) for sequence in self._job.sequences), self._job.sequences[0].cached[0]

    @property
    def reasons(self) -> list[str]:
        """Why each of its outputs has ended, when the call has: as the engine says it, else "error", or
        "abort" if the client went."""
        otherwise = "error" if self._fault is not None else "abort"
        if self._job is None:
            return [otherwise] * len(self.ready.samplings)
        return [
            otherwise if sequence.finish is None else sequence.finish.value
            for sequence in self._job.sequences
        ]

    @property
    def fault(self) -> BaseException | None:
        """What has kept its outputs from being complete."""
        return self._fault

    def leave(self) -> None:
        """The client wants nothing more of it. What has ended is not disturbed."""
        self._desk._leave(self)

    def _take(self, deltas: Sequence[Delta], over: bool, fault: BaseException | None) -> None:
        if over and self._timer is not None:
            self._timer.cancel()
        if deltas and not (
            self._at_once is not None and not self._come and self._taken(self._at_once, deltas)
        ):
            self._come.extend(deltas)
        self._over, self._fault = self._over or over, self._fault or fault
        if self._come or self._over or self._raised:
            self._news.set()

    def _taken(self, at_once: AtOnce, deltas: Sequence[Delta]) -> bool:
        try:
            return at_once(deltas)
        except Exception as fault:  # Of this call: the others of the same step are to be told of theirs.
            self._raised = fault
            return True


class Desk:
    """Takes calls for a model, on the running loop, and drives it on a thread of its own."""

    def __init__(self, llm: LLM, metrics: Metrics, *, queue: int, keys: int = 0) -> None:
        """queue: outputs that may wait, beside those that the model computes at a time. metrics: is told how
        calls go. keys: of the server. Where there are several, each may have half of all outputs, and three
        quarters of those computed at a time."""
        self._llm, self._metrics = llm, metrics
        self._long = llm.limits.max_step_tokens // 2
        """Tokens from which a prompt is long: it may take more than what a step leaves to those behind
        another long one."""
        self._rows = llm.limits.max_sequences
        self._most = self._rows + queue
        self._several = keys > 1
        self._each = max(self._most // 2, 1) if self._several else self._most
        """Outputs that one key may have, under way and waiting."""
        self._each_at_once = max(self._rows * 3 // 4, 1) if self._several else self._rows
        """Of these, that may be under way, so that another key's find room."""
        self._loop = asyncio.get_running_loop()
        self._calls: set[Call] = set()
        """Taken and not ended."""
        self._outputs = 0
        """Of all calls."""
        self._of_key: Counter[bytes] = Counter()
        """Of each key's."""
        self._seconds = _FIRST_GUESS
        """That an output takes, lately."""
        self.most_seconds: float | None = None
        """That a request may take, whatever it asks for."""
        self._closing = False
        self._fault: BaseException | None = None
        self._over = asyncio.Event()
        self._tray: deque[News] = deque()
        """What comes of calls, from the driver to the loop."""
        self._told = False
        """Whether the loop is about to look into it."""
        self._mail: SimpleQueue[Call | None] = SimpleQueue()
        """Calls to begin or, when they were met before, to end; None is the end of all."""
        self._under_way: Counter[bytes] = Counter()
        """The driver's: outputs of each key that the engine was given."""
        self._queued: list[Call] = []
        """The driver's: those that the engine was given, and whose turn has not come."""
        self.stats: Stats = llm.stats()
        """After the last step. The driver puts a new one in its place."""
        self._thread = threading.Thread(target=self._drive, name="penstock driver", daemon=True)
        self._thread.start()

    # ---- on the loop

    @property
    def open(self) -> bool:
        """Whether calls are taken."""
        return not (self._closing or self._over.is_set())

    @property
    def outputs(self) -> int:
        """Under way, and waiting."""
        return self._outputs

    @property
    def reading(self) -> Call | None:
        """Of calls that the engine was given, the first of which nothing has come: a prompt in the making is
        that one's."""
        unread = [
            (call._job.sequences[0].request, call)
            for call in self._calls
            if call._job is not None and not call.first
        ]
        return min(unread, key=lambda one: one[0])[1] if unread else None

    def check_room(self, asked: int, owner: bytes = b"") -> None:
        """For so many outputs of a key. Raises BusyError if there is none, EngineClosedError if there never
        will be."""
        if not self.open:
            why = f"it has failed: {self._fault}" if self._fault else "the server is shutting down"
            raise EngineClosedError(
                f"the model takes no more requests, as {why}; try another server, or this one later"
            )
        largest = min(self._each, self._each_at_once) if self._several else self._most
        if asked > largest:
            raise BusyError(
                f"{asked} outputs were asked for, but there is room for {largest} at a time; ask for fewer",
                0.0,
            )
        for whose, there, most in (
            ("", self._outputs, self._most),
            (" of this key", self._of_key[owner], self._each),
        ):
            if there + asked > most:
                seconds = min(max(1.0, self._seconds * (there + asked - most) / self._rows), _LONGEST_WAIT)
                raise BusyError(
                    f"{there} outputs{whose} are under way or waiting, and {most} can at most; try again "
                    "later",
                    seconds,
                )

    def seconds(self, wanted: float | None) -> float | None:
        """That a request may take which wants to take so many; None: any."""
        given = [one for one in (wanted, self.most_seconds) if one is not None]
        return min(given, default=None)

    def ask(
        self,
        ready: Sequence[Ready],
        wanted: float | None = None,
        since: float | None = None,
        owner: bytes = b"",
    ) -> list[Call]:
        """A call for each prompt of a request; none is begun unless all are. Raises what `check_room` does.
        wanted: seconds after which they end with DeadlineError. since: when the request came, by monotonic(),
        from which these run; None is now. owner: whose it is."""
        asked = sum(len(one.samplings) for one in ready)
        self.check_room(asked, owner)
        calls = [self.call(one, owner) for one in ready]
        self._calls.update(calls)
        self._outputs += asked
        self._of_key[owner] += asked
        seconds, gone = self.seconds(wanted), 0.0 if since is None else monotonic() - since
        for call in calls:
            if seconds is not None:
                call._timer = self._loop.call_later(max(seconds - gone, 0.0), self._expire, call, seconds)
            self._mail.put(call)
        return calls

    def call(self, ready: Ready, owner: bytes = b"") -> Call:
        """A new one, of which nobody knows yet."""
        return Call(self, ready, owner)

    async def close(self, patience: float, hurry: Callable[[], bool] = lambda: False) -> None:
        """Take no more calls, let those that there are end for so many seconds, or until there is hurry, then
        end them."""
        self._closing = True
        late = monotonic() + patience
        while self._calls and monotonic() < late and not (hurry() or self._over.is_set()):
            await asyncio.sleep(0.01)
        self._mail.put(None)
        await self._over.wait()
        await asyncio.to_thread(self._thread.join)

    async def failure(self) -> BaseException | None:
        """When the driver has ended: why, unless it was told to."""
        await self._over.wait()
        return self._fault

    def _leave(self, call: Call) -> None:
        if call in self._calls and not call._over:
            call.left = True
            self._break_off(call, None)
            self._metrics.abandoned()

    def _expire(self, call: Call, seconds: float) -> None:
        if call in self._calls and not call._over:
            self._break_off(call, overdue(seconds))

    def _break_off(self, call: Call, fault: BaseException | None) -> None:
        call._take((), True, fault)
        self._forget(call)
        self._mail.put(call)

    def _forget(self, call: Call) -> None:
        """It has ended."""
        self._calls.discard(call)
        self._outputs -= len(call.ready.samplings)
        self._of_key[call.owner] -= len(call.ready.samplings)
        if not self._of_key[call.owner]:
            del self._of_key[call.owner]

    def _deliver(self) -> None:
        """All that lies in the tray: of several steps, where the loop had other things to do, what came of a
        call is one piece."""
        self._told = False
        news: dict[Call, News] = {}
        while self._tray:
            one = self._tray.popleft()
            before = news.get(one[0])
            news[one[0]] = one if before is None else (one[0], [*before[1], *one[1]], one[2], one[3])
        now, gaps = monotonic(), list[float]()
        for call, deltas, over, fault in news.values():
            if call not in self._calls:
                continue
            if deltas:
                if not call.first:
                    call.first = now
                    self._metrics.began(now - call.begun)
                else:
                    gaps.append(now - call.last)
                call.last = now
            call._take(deltas, over, fault)
            if over:
                self._forget(call)
                if fault is None:
                    self._seconds += (now - call.begun - self._seconds) / 16
                    times = Times(call.admitted - call.begun, call.first - call.admitted, now - call.first)
                    self._metrics.completed(times, call.so_far())
        self._metrics.went_on(gaps)

    def _end(self, fault: BaseException | None) -> None:
        self._fault = fault
        what = (
            f"the engine has failed: {fault}"
            if fault
            else "the server was shut down before this request was complete"
        )
        for call in self._calls:
            call._take((), True, EngineClosedError(f"{what}; send it again"))
        self._calls.clear()
        self._of_key.clear()
        self._outputs = 0
        self._over.set()

    # ---- on the driver's thread

    def _drive(self) -> None:
        fault: BaseException | None = None
        active: dict[Call, Job] = {}
        waiting: list[Call] = []
        try:
            while self._meet(active, waiting):
                began = monotonic()
                self._llm.advance()
                self.stats = self._llm.stats()
                self._note_turns(began)
                self._hand_over(active)
        except BaseException as error:
            fault = error
            _LOG.error("the engine has failed: %s", error, exc_info=not isinstance(error, PenstockError))
        finally:
            self._tell(self._end, fault)

    def _meet(self, active: dict[Call, Job], waiting: list[Call]) -> bool:
        """Begin and end what was asked for; wait for it if there is nothing else to do. False when all is
        over.

        Of long prompts one at a time is given to the engine, which serves each in its turn: a second one,
        before it is its turn, would hold up the short ones behind it, for which a step with a long one has
        room. Where there are several keys, so do all others wait here until it is their turn: the engine has
        no more than it may take at once, and the key goes first that has least under way.
        """
        refused: list[News] = []
        while True:
            idle = not active and not refused and not waiting
            try:
                call = self._mail.get(block=idle, timeout=_NAP if self._llm.moving else _GLANCE)
            except Empty:
                if idle:
                    self._llm.check()
                break
            if call is None:
                self._llm.abandon(list(active.values()))
                return False
            if (job := active.pop(call, None)) is not None:
                with suppress(ValueError):
                    self._queued.remove(call)
                self._llm.abandon([job])
                self._under_way[call.owner] -= len(job.sequences)
            elif not call._over:
                if self._several or self._is_long(call):
                    waiting.append(call)
                else:
                    self._begin(call, active, refused)
        if waiting:
            self._begin_in_turn(active, waiting, refused)
        self._report(refused)
        return True

    def _begin_in_turn(self, active: dict[Call, Job], waiting: list[Call], refused: list[News]) -> None:
        """Those whose turn it is, as far as there is room for them."""
        waiting[:] = [call for call in waiting if not call._over]
        reads = any(self._is_reading(job) for job in active.values())
        ahead = sum(len(call.ready.samplings) for call in self._queued)

        def may(call: Call) -> bool:
            if self._is_long(call) and reads:
                return False
            under_way = self._under_way[call.owner]
            return not (self._several and under_way) or (
                under_way + len(call.ready.samplings) <= self._each_at_once
                and ahead + len(call.ready.samplings) <= self._rows
            )

        while able := [place for place, call in enumerate(waiting) if may(call)]:
            first = min(
                able,
                key=lambda place: (
                    waiting[place].ready.priority,
                    self._under_way[waiting[place].owner],
                    place,
                ),
            )
            call = waiting.pop(first)
            reads |= self._is_long(call)
            ahead += len(call.ready.samplings)
            self._begin(call, active, refused)

    def _is_long(self, call: Call) -> bool:
        return len(call.ready.tokens) > self._long

    def _is_reading(self, job: Job) -> bool:
        """Whether it is a long prompt of which nothing has come yet."""
        return len(job.tokens) > self._long and not any(sequence.tokens for sequence in job.sequences)

    def _begin(self, call: Call, active: dict[Call, Job], refused: list[News]) -> None:
        try:
            active[call] = call._job = self._llm.begin(call.ready)
            self._queued.append(call)
            self._under_way[call.owner] += len(call.ready.samplings)
        except PenstockError as fault:
            refused.append((call, (), True, fault))

    def _note_turns(self, when: float) -> None:
        """Of calls of which the step that began then has taken the first output from the engine's queue."""
        if not self._queued:
            return
        waits, still = self._llm.booted.engine.scheduler.is_waiting, list[Call]()
        for call in self._queued:
            assert call._job is not None
            if waits(call._job.sequences[0].request):
                still.append(call)
            else:
                call.admitted = when
        self._queued = still

    def _hand_over(self, active: dict[Call, Job]) -> None:
        news: list[News] = []
        for call, job in list(active.items()):
            deltas = [
                sequence.deltas.popleft() for sequence in job.sequences for _ in range(len(sequence.deltas))
            ]
            if deltas or job.done:
                news.append((call, deltas, job.done, None))
            if job.done:
                del active[call]
                self._under_way[call.owner] -= len(job.sequences)
        self._report(news)

    def _report(self, news: Sequence[News]) -> None:
        self._tray.extend(news)
        if self._tray and not self._told:
            self._told = True
            self._tell(self._deliver)

    def _tell(self, what: object, *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(what, *args)  # type: ignore[arg-type]
        except RuntimeError:  # The loop has been closed, and nobody is there to be told.
            _LOG.debug("nobody is told of what has come")
