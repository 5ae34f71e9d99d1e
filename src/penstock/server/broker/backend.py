"""Computes calls: the interface of backends, and the engine in this process."""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty
from time import monotonic
from typing import Protocol, Self

from penstock.api.llm import LLM
from penstock.api.outputs import Delta
from penstock.api.reader import PromptReader
from penstock.api.sequences import SequenceGroup
from penstock.base.errors import PenstockError
from penstock.engine.engine import Stats
from penstock.sched.outlook import Course
from penstock.server.broker.calls import Call, Update
from penstock.server.broker.forecasts import Sight, WaitForecaster
from penstock.server.broker.mailbox import Mailbox

_NAP = 0.02
"""Seconds between two looks at blocks that move between tiers while there are no calls."""
_LOOKS = 0.02
_LOOKING = 0.01
"""Seconds between two looks at the queues while there is something to do, and the part of the time that they
may take."""
_GLANCE = 1.0
"""Seconds between two looks at whether the engine is still alive, then."""


@dataclass(frozen=True, slots=True)
class Quotas:
    """Limits the outputs that there may be.

    running: computed at a time.
    total: computed and waiting.
    shared: whether there are several keys, which take turns.
    per_key: of one key, computed and waiting. Where there are several, half of all.
    running_per_key: of one key, computed at a time. Where there are several, three quarters of all, so that
        another key's find room.
    largest_request: of one request.
    """

    running: int
    total: int
    shared: bool
    per_key: int
    running_per_key: int
    largest_request: int

    @classmethod
    def of(cls, running: int, queue: int, keys: int) -> Self:
        """Return the quotas of a server. queue: outputs that may wait. keys: of the server."""
        total, shared = running + queue, keys > 1
        if not shared:
            return cls(running, total, shared, total, running, total)
        per_key, running_per_key = max(total // 2, 1), max(running * 3 // 4, 1)
        return cls(running, total, shared, per_key, running_per_key, min(per_key, running_per_key))


class Backend(Protocol):
    """A backend computes calls: an engine in this process, or replicas in others."""

    @property
    def reader(self) -> PromptReader:
        """Reads prompts for its model, and knows the limits of what it computes."""

    @property
    def forecaster(self) -> WaitForecaster | None:
        """Forecasts on the loop when calls have their first tokens; None if that is told by others, later."""

    def drive(self, mailbox: Mailbox, quotas: Quotas) -> None:
        """Carry out the calls that come through a mailbox, until it gives None. Runs on a thread of its own.
        Calls that have not ended by then are ended by the broker. Raises what keeps it from going on."""

    def close(self) -> None:
        """Free everything that it holds, after `drive` has returned."""


class LocalBackend:
    """Runs calls on the engine in this process.

    Why this is safe. Its thread alone touches the engine's driver. `group` and `scheduled_time` of a call are
    written before anything of it is reported, and `stats` and `sight` are frozen values that are put in place
    of others.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm, self.reader, self._driver = llm, llm.reader, llm.driver
        self.stats: Stats = llm.stats()
        """The engine's counts after its last step."""
        outlook = llm.driver.outlook()
        self.sight = Sight(outlook, Course(outlook))
        """The engine's queues after its last step, or lately."""
        self.forecaster = WaitForecaster(lambda: self.sight, llm.driver.found_now, llm.limits.max_model_len)
        self._met = 0
        """Calls that were met."""
        self._looks_again = 0.0
        """When it is time for another look at the queues, in seconds of monotonic()."""
        self._long = llm.limits.max_step_tokens // 2
        """Tokens from which a prompt is long: it may take more than what a step leaves to those behind
        another long one."""
        self._active: dict[Call, SequenceGroup] = {}
        self._waiting: list[Call] = []
        """Calls that wait here for their turn."""
        self._queued: list[Call] = []
        """Calls that wait in the engine's queue."""
        self._running: Counter[bytes] = Counter()
        """Outputs of each key that the engine was given."""

    def drive(self, mailbox: Mailbox, quotas: Quotas) -> None:
        """Carry out calls; see Backend. Raises what has ended the engine."""
        while self._meet(mailbox, quotas):
            began = monotonic()
            self._driver.advance()
            self.stats = self._driver.stats()
            if self._queued:
                self._note_scheduled(began)
            updates = self._updates()
            self._look(began)  # Before calls are told that they are over, and others come.
            mailbox.report(updates)

    def close(self) -> None:
        """Close the model."""
        self.llm.close()

    def _meet(self, mailbox: Mailbox, quotas: Quotas) -> bool:
        """Begin and end what was asked for; wait for it if there is nothing else to do. False when all is
        over.

        Of long prompts one at a time is given to the engine, which serves each in its turn: a second one,
        before it is its turn, would hold up the short ones behind it, for which a step with a long one has
        room. Where there are several keys, so do all others wait here until it is their turn: the engine has
        no more than it may take at once, and the key goes first that has least under way.
        """
        refused: list[Update] = []
        while True:
            idle = not (self._active or refused or self._waiting)
            try:
                call = mailbox.receive(block=idle, timeout=_NAP if self._driver.moving else _GLANCE)
            except Empty:
                if idle:
                    self._driver.check()
                break
            if call is None:
                self._driver.abandon(list(self._active.values()))
                return False
            self._met += not call.met
            call.met = True
            if (group := self._active.pop(call, None)) is not None:
                with suppress(ValueError):
                    self._queued.remove(call)
                self._driver.abandon([group])
                self._running[call.owner] -= len(group.sequences)
                self._look(monotonic())
            elif not call.over:
                if quotas.shared or self._is_long(call):
                    self._waiting.append(call)
                else:
                    self._begin(call, refused)
        if self._waiting:
            self._begin_in_turn(quotas, refused)
        mailbox.report(refused)
        return True

    def _begin_in_turn(self, quotas: Quotas, refused: list[Update]) -> None:
        """Begin the calls whose turn it is, as far as there is room for them."""
        waiting = self._waiting
        waiting[:] = [call for call in waiting if not call.over]
        reads = any(self._is_reading(group) for group in self._active.values())
        ahead = sum(len(call.prompt.samplings) for call in self._queued)

        def may(call: Call) -> bool:
            if self._is_long(call) and reads:
                return False
            running, more = self._running[call.owner], len(call.prompt.samplings)
            return not (quotas.shared and running) or (
                running + more <= quotas.running_per_key and ahead + more <= quotas.running
            )

        def turn(place: int) -> tuple[int, int, int]:
            call = waiting[place]
            return call.prompt.priority, self._running[call.owner], place

        while able := [place for place, call in enumerate(waiting) if may(call)]:
            call = waiting.pop(min(able, key=turn))
            reads |= self._is_long(call)
            ahead += len(call.prompt.samplings)
            self._begin(call, refused)

    def _is_long(self, call: Call) -> bool:
        return len(call.prompt.tokens) > self._long

    def _is_reading(self, group: SequenceGroup) -> bool:
        """Tell whether it is a long prompt without any output yet."""
        return len(group.tokens) > self._long and not any(sequence.tokens for sequence in group.sequences)

    def _begin(self, call: Call, refused: list[Update]) -> None:
        try:
            self._active[call] = call.group = self._driver.begin(call.prompt)
            self._queued.append(call)
            self._running[call.owner] += len(call.prompt.samplings)
        except PenstockError as fault:
            refused.append((call, (), True, fault))

    def _look(self, now: float) -> None:
        """See what is before a new call, for the loop; not after every step where these are short."""
        if now < self._looks_again and (self._active or self._waiting):
            return
        outlook = self._driver.outlook()
        held = [one for call in self._waiting if not call.over for one in call.queued]
        self.sight = Sight(outlook, Course(outlook), self._met, tuple(held))
        self._looks_again = now + max(_LOOKS, (monotonic() - outlook.when) / _LOOKING)

    def _note_scheduled(self, when: float) -> None:
        """Note the calls whose first output was taken from the engine's queue by the step that began then."""
        waits, still = self._driver.is_waiting, list[Call]()
        for call in self._queued:
            assert call.group is not None
            if waits(call.group.sequences[0].request):
                still.append(call)
            else:
                call.scheduled_time = when
        self._queued = still

    def _updates(self) -> Sequence[Update]:
        """Return what the last step has added to calls."""
        updates: list[Update] = []
        ended: list[Call] = []
        for call, group in self._active.items():
            added, over = list[Delta](), True
            for sequence in group.sequences:
                deltas = sequence.deltas
                while deltas:
                    added.append(deltas.popleft())
                if sequence.finish is None:
                    over = False
            if over:
                ended.append(call)
            if added or over:
                updates.append((call, added, over, None))
        for call in ended:
            self._running[call.owner] -= len(self._active.pop(call).sequences)
        return updates
