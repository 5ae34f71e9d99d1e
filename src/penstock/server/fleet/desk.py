"""A desk whose calls replicas carry out, each an engine in a process of its own: what was lost with one is
asked of another.

An answer depends on its request alone: the seeds of its draws are chosen here, before anything is computed.
So a call whose replica was lost is sent to another one as if nothing had happened. What had been told of it
comes again, is compared token by token, and is not told twice: the client sees a pause. On a GPU the last
bits of a product may depend on what else was computed with it, so another token is possible there: then a
call of which its client has been given nothing begins anew, and another one ends with an error.

Why this is safe. The desk's loop and its queues are as they were (see server.desk). In place of a driver that
steps an engine there is a loop on the driver's thread, with a task for each call; that task alone writes the
call's job, and hands over what comes in the order in which it comes. Whether a client has been given anything
is known by the desk's loop alone, so that is where a call is taken back.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from time import monotonic
from typing import Any, Protocol

from penstock.api.jobs import Job, Ready, Sequel
from penstock.api.outputs import Completion, Delta
from penstock.base.errors import EngineClosedError, PenstockError
from penstock.server.desk import AtOnce, Call, Desk
from penstock.server.fleet.errands import Begun, Came, Errand, FarLLM, LostError, Message, Refused, Sendable
from penstock.server.fleet.routing import Affinity
from penstock.server.fleet.together import counted, side_by_side, summed
from penstock.server.metrics import Metrics
from penstock.step.plan import RequestId
from penstock.step.request import FinishReason

_LOG = logging.getLogger("penstock")
_TRIES = 4
"""Replicas that a request is sent to before it is given up: it may be what they end of."""
_LOOK = 1.0
"""Seconds between two looks at whether replicas with calls are still there."""


class Crew(Protocol):
    """The replicas, from any loop."""

    def answer(self, keys: Sequence[bytes], errand: Errand) -> AsyncGenerator[Message]:
        """What comes of an errand from a replica that suits the keys, when there is one. Ends early, or
        raises LostError, when that is lost, and EngineClosedError when there will be none."""

    async def everyone(self, what: str) -> Mapping[str, Any]:
        """What each replica says of its `state`, as JSON has it, or of its `metrics`, as text; nothing of
        those that do not answer."""


class _FarCall(Call):
    def __init__(self, desk: Desk, ready: Ready, owner: bytes) -> None:
        super().__init__(desk, ready, owner)
        self.given = False
        """Whether a client has some of it."""

    async def pieces(self, at_once: AtOnce | None = None) -> AsyncGenerator[Sequence[Delta]]:
        def taken(come: Sequence[Delta]) -> bool:
            if at_once is None or not at_once(come):
                return False
            self.given = True
            return True

        async for come in super().pieces(taken):
            self.given = True
            yield come

    async def completion(self) -> Completion:
        async for _ in super().pieces(lambda _: True):
            pass
        return self.so_far()


class Fleet(Desk):
    """Takes calls, and has replicas carry them out."""

    def __init__(
        self,
        llm: FarLLM,
        metrics: Metrics,
        crew: Crew,
        affinity: Affinity,
        *,
        queue: int,
        patience: float,
        keys: int = 0,
    ) -> None:
        """queue: outputs that may wait, beside those that all replicas compute at a time. affinity: is told
        what replicas hold. patience: seconds that a replica has to end its calls when it is to go. keys: of
        the server; none may have more than half of all outputs."""
        self._crew, self._affinity, self._patience = crew, affinity, patience
        self._at: dict[_FarCall, tuple[str, asyncio.Task[None]]] = {}
        """Which replica has a call, and what waits for it there."""
        self._again = 0
        """Requests that were sent once more."""
        super().__init__(llm, metrics, queue=queue, keys=keys)

    @property
    def replicas(self) -> int:
        """That are there, as far as is known."""
        return len(self._affinity.replicas)

    def call(self, ready: Ready, owner: bytes = b"") -> Call:
        return _FarCall(self, ready, owner)

    async def metrics(self, own: bytes) -> bytes:
        """The server's own, and those of each replica that it has not."""
        ours = own.decode() + counted(self._affinity.loads, self._again)
        return (ours + side_by_side(await self._crew.everyone("metrics"), ours)).encode()

    async def state(self) -> Mapping[str, Any]:
        """All of them in sum, and each. Raises EngineClosedError if none tells its own."""
        states = await self._crew.everyone("state")
        if not states:
            raise EngineClosedError("no replica tells its state; ask /ready until there is one")
        found = summed(states)
        return found | {
            "open": self.open and found["open"],
            "waiting": max(self.outputs - found["running"], found["waiting"]),
        }

    async def _withdraw(self, call: _FarCall) -> bool:
        """Take back what a client has not been given. False if it has some."""
        if not call.given:
            call._come.clear()
        return not call.given

    # ---- on the driver's thread

    def _drive(self) -> None:
        fault: BaseException | None = None
        try:
            asyncio.run(self._meet_all())
        except BaseException as error:
            fault = error
            _LOG.error("what asks the replicas has failed: %s", error, exc_info=True)
        finally:
            self._tell(self._end, fault)

    async def _meet_all(self) -> None:
        tasks: dict[Call, asyncio.Task[None]] = {}
        looking = asyncio.ensure_future(self._look_after())
        while (call := await asyncio.to_thread(self._mail.get)) is not None:
            if (task := tasks.get(call)) is not None:
                task.cancel()
            elif not call._over:
                assert isinstance(call, _FarCall)
                tasks[call] = task = asyncio.ensure_future(self._see_to(call))
                task.add_done_callback(lambda _, call=call: tasks.pop(call))  # type: ignore[misc]
        for task in (looking, *tasks.values()):
            task.cancel()
        await asyncio.gather(looking, *tasks.values(), return_exceptions=True)

    async def _look_after(self) -> None:
        """Break off what waits for replicas that have been gone for so long that nothing more can come: their
        machine may have stopped without a word."""
        missing: dict[str, float] = {}
        while True:
            await asyncio.sleep(_LOOK)
            there, now = self._affinity.replicas, monotonic()
            missing = {name: missing.get(name, now) for name, _ in self._at.values() if name not in there}
            for name, task in self._at.values():
                if now - missing.get(name, now) > self._patience + _LOOK:
                    task.cancel()

    async def _see_to(self, call: _FarCall) -> None:
        ready = call.ready
        assert isinstance(ready, Sendable)
        job = call._job = Job(
            ready.prompt,
            ready.tokens,
            [Sequel(index, RequestId(index), own, None) for index, own in enumerate(ready.samplings)],
        )
        fault: BaseException | None = None
        try:
            for _ in range(_TRIES):
                attempt = asyncio.ensure_future(self._attempt(call, job, ready))
                try:
                    await asyncio.wait((attempt,))
                finally:
                    if not attempt.done():
                        attempt.cancel()
                        with suppress(asyncio.CancelledError):
                            await attempt
                if job.done:
                    return
                if not attempt.cancelled() and not isinstance(attempt.exception(), LostError):
                    attempt.result()
                if (name := self._at.pop(call, ("", attempt))[0]) != "":
                    self._affinity.doubt(name)
                self._again += 1
                _LOG.warning("a replica was lost in the midst of a request, which is sent to another one")
            fault = EngineClosedError(f"{_TRIES} replicas were lost with this request; send it again later")
        except PenstockError as error:
            fault = error
        except Exception as error:
            _LOG.error("a request has failed", exc_info=error)
            fault = error
        finally:
            self._at.pop(call, None)
        if fault is not None:
            self._report([(call, (), True, fault)])

    async def _attempt(self, call: _FarCall, job: Job, ready: Sendable) -> None:
        """One replica's answer, to its end. Raises LostError, and PenstockErrors for what no replica can
        answer."""
        again, name = _Again(job), ""
        async with aclosing(self._crew.answer(ready.keys, ready.errand())) as messages:
            async for message in messages:
                match message:
                    case Begun(replica):
                        name, task = replica, asyncio.current_task()
                        assert task is not None
                        self._at[call] = name, task
                        self._affinity.trust(name)
                        call.admitted = call.admitted or monotonic()
                    case Refused(fault):
                        raise fault
                    case Came(deltas) if any(delta.finish_reason is FinishReason.ABORT for delta in deltas):
                        break
                    case Came() if not job.done:
                        fresh = again.fresh(message)
                        if fresh is None:
                            await self._begin_anew(call)
                            fresh = again.anew()
                        if fresh or job.done:
                            self._report([(call, fresh, job.done, None)])
                        if job.done:
                            self._remember(name, job, ready)
        if not job.done:
            raise LostError("the answer has ended before its outputs have")

    async def _begin_anew(self, call: _FarCall) -> None:
        """Raises EngineClosedError if its client has some of it."""
        if not await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._withdraw(call), self._loop)):
            raise EngineClosedError(
                "the replica that answered was lost, and another one goes on with other tokens; send the "
                "request again for a whole answer"
            )

    def _remember(self, name: str, job: Job, ready: Sendable) -> None:
        """A replica holds what it has computed, outputs too."""
        for sequence in job.sequences:
            self._affinity.note(name, ready.keys_with(sequence.tokens))


class _Again:
    """A job's answer from one more replica, beside what was told of it before."""

    def __init__(self, job: Job) -> None:
        self._sequences = job.sequences
        self._told = [len(sequence.tokens) for sequence in job.sequences]
        """Tokens of each output, before."""
        self._met = [0] * len(job.sequences)
        """Tokens of each that have come now."""
        self._came: list[Delta] = []
        """All of them, until nothing is left to be compared."""

    def fresh(self, came: Came) -> list[Delta] | None:
        """What of it is to be told, which is added to the job. None if what was told before is not what comes
        now."""
        if any(met < told for met, told in zip(self._met, self._told, strict=True)):
            self._came.extend(came.deltas)
        self._note(came)
        fresh = []
        for delta in came.deltas:
            sequence, met, told = (
                self._sequences[delta.index],
                self._met[delta.index],
                self._told[delta.index],
            )
            self._met[delta.index] = end = met + len(delta.tokens)
            if met >= told:
                _add(sequence, delta)
                fresh.append(delta)
            elif tuple(sequence.tokens[met:end]) != delta.tokens or delta.finish_reason != (
                sequence.finish if end == told else None
            ):
                return None
        return fresh

    def anew(self) -> list[Delta]:
        """All that has come from this replica, instead of what was told before."""
        for sequence in self._sequences:
            sequence.tokens, sequence.text, sequence.logprobs, sequence.finish = [], [], [], None
        self._told = self._met = [0] * len(self._sequences)
        for delta in self._came:
            _add(self._sequences[delta.index], delta)
        return self._came

    def _note(self, came: Came) -> None:
        for sequence in self._sequences:
            sequence.cached = came.cached
        if came.prompt_logprobs:
            self._sequences[0].prompt_logprobs = list(came.prompt_logprobs)


def _add(sequence: Sequel, delta: Delta) -> None:
    sequence.tokens.extend(delta.tokens)
    sequence.text.append(delta.text)
    sequence.logprobs.extend(delta.logprobs)
    sequence.finish = delta.finish_reason
