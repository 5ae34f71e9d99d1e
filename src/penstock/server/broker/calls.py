"""Follows a client's call: one prompt, and the pieces of its outputs as they come."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from time import monotonic

from penstock.api.outputs import Completion, Delta
from penstock.api.sequences import PreparedPrompt, SequenceGroup
from penstock.base.errors import PenstockError
from penstock.sched.outlook import QueuedRequest, WaitForecast


class BusyError(PenstockError):
    """Says that there is no room for another request now. `seconds`: after which there may be."""

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message)
        self.seconds = seconds


class DeadlineError(PenstockError):
    """Says that a request has taken longer than it may. `seconds`: after which its model is there, if it has
    waited for that; 0 if not."""

    def __init__(self, message: str, seconds: float = 0.0) -> None:
        super().__init__(message)
        self.seconds = seconds


def overdue(seconds: float) -> DeadlineError:
    """Return the error for a request that has taken so many seconds."""
    what = f"the request has taken {seconds:g} seconds, the most that it may (timeout)"
    return DeadlineError(f"{what}; ask for fewer tokens, allow more time, or try when there is less to do")


AtOnce = Callable[[Sequence[Delta]], bool]
"""Takes pieces as soon as the loop has them. Returns whether it has taken them."""
Update = tuple["Call", Sequence[Delta], bool, BaseException | None]
"""A call, what was added to its outputs, whether that was the last, and what has kept it from being
complete."""


class Call:
    """Follows a client's prompt: the pieces of its outputs as they come, on the loop that has submitted it.

    arrival_time, scheduled_time, first_token_time, last_token_time: seconds of monotonic() at which it came,
        its first output left the engine's queue, and its first and its latest piece came; 0 until then.
    """

    def __init__(
        self, leave: Callable[["Call"], None], prompt: PreparedPrompt, owner: bytes = b"", *, room: int = 0
    ) -> None:
        """leave: ends a call that its client wants no more. owner: stands for the key of its client. room:
        outputs that it counts for; 0 in room that is kept for its request."""
        self.prompt, self.owner, self.room = prompt, owner, room
        self.arrival_time = monotonic()
        self.scheduled_time = self.first_token_time = self.last_token_time = 0.0
        self.forecast: WaitForecast | None = None
        """What it had before it when it came; None where nobody has said."""
        self.queued: Sequence[QueuedRequest] = ()
        """Its outputs, as they wait by forecast. Written before it is sent."""
        self.met = False
        """Whether the backend has met it. The backend's thread writes it."""
        self.group: SequenceGroup | None = None
        """Its outputs. The backend's thread writes it."""
        self.left = False
        """Whether its client went before its end."""
        self.over = False
        """Whether it has ended. Written by the loop; the backend's thread reads it."""
        self.timer: asyncio.TimerHandle | None = None
        """Ends the call when it has taken too long."""
        self._leave = leave
        self._pieces: list[Delta] = []
        """Pieces that have come and were not taken."""
        self._wakes, self._told = asyncio.Event(), asyncio.Event()
        self._at_once: AtOnce | None = None
        """Takes what comes, while it is waited for."""
        self._raised: Exception | None = None
        """What `_at_once` has raised."""
        self.fault: BaseException | None = None
        """What has kept its outputs from being complete."""
        self._given = False
        """Whether its client has taken pieces."""
        self._whole = False
        """Whether its client waits for all of it, so that pieces that were taken were not given out."""

    async def foretold(self, patience: float) -> WaitForecast | None:
        """Return what it had before it when it came. Wait so many seconds for it if others tell it."""
        if self.forecast is None and not self.over:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._told.wait(), patience)
        return self.forecast

    def foretell(self, forecast: WaitForecast) -> None:
        """Note what it had before it when it came."""
        if self.forecast is None:
            self.forecast = forecast
            self._told.set()

    async def pieces(self, at_once: AtOnce | None = None) -> AsyncIterator[Sequence[Delta]]:
        """Give out what has come since the last time, until the outputs are complete. Raise what has kept
        them from being so.

        at_once: is given what comes while it is waited for, as soon as the loop has it and without waking
            anybody up, but for what comes with the end. What it takes is not given out again; where it
            returns False, that comes in the usual way. What it raises is raised here.
        """
        while True:
            while not (self._pieces or self.over or self._raised):
                self._wakes.clear()
                self._at_once = at_once
                try:
                    await self._wakes.wait()
                finally:
                    self._at_once = None
            if self._raised is not None:
                raise self._raised
            pieces, self._pieces = self._pieces, []
            if pieces:
                self._given = True
                yield pieces
            elif self.fault is not None:
                raise self.fault
            else:
                return

    async def completion(self) -> Completion:
        """Wait until the outputs are complete, and return them. Raise what has kept them from being so."""
        self._whole = not self._given
        async for _ in self.pieces(lambda _: True):
            pass
        return self.so_far()

    def so_far(self) -> Completion:
        """Return what has come of it. To be called when it is complete, or for what does not change once
        there is a piece."""
        assert self.group is not None, "asked before the first piece"
        return self.group.completion()

    @property
    def counts(self) -> tuple[int, int]:
        """Return the tokens of its outputs so far, and the tokens of its prompt whose KV was found. May be
        read on the loop while more come."""
        if self.group is None:
            return 0, 0
        sequences = self.group.sequences
        return sum(len(sequence.tokens) for sequence in sequences), sequences[0].cached[0]

    @property
    def reasons(self) -> list[str]:
        """Return the finish reason of each output when the call has ended: the engine's, else "error", or
        "abort" if the client went."""
        otherwise = "error" if self.fault is not None else "abort"
        if self.group is None:
            return [otherwise] * len(self.prompt.samplings)
        return [
            otherwise if sequence.finish is None else sequence.finish.value
            for sequence in self.group.sequences
        ]

    def leave(self) -> None:
        """End the call, whose client wants no more of it. One that has ended is not disturbed."""
        self._leave(self)

    async def withdraw(self) -> bool:
        """Take back the pieces that the client was not given. Return False, and change nothing, if it has
        taken some."""
        if self._given and not self._whole:
            return False
        self._pieces.clear()
        return True

    def deliver(self, deltas: Sequence[Delta], over: bool, fault: BaseException | None) -> None:
        """Add what has come. over: whether that was the last. fault: what has kept it from being complete."""
        if over:
            self._told.set()
            if self.timer is not None:
                self.timer.cancel()
        # The last are given out with the end, for which who takes them is woken up anyway.
        if deltas and not (
            self._at_once is not None and not (over or self._pieces) and self._taken(self._at_once, deltas)
        ):
            self._pieces.extend(deltas)
        self.over, self.fault = self.over or over, self.fault or fault
        if self._pieces or self.over or self._raised:
            self._wakes.set()

    def _taken(self, at_once: AtOnce, deltas: Sequence[Delta]) -> bool:
        try:
            taken = at_once(deltas)
            self._given |= taken
            return taken
        except Exception as fault:  # It is this call's: the others of the same step get theirs.
            self._raised = fault
            return True
