"""Makes a backend of replicas, each an engine in a process of its own: what was lost with one is asked of
another.

An answer depends on its request alone: the seeds of its draws are chosen here, before anything is computed.
So a call whose replica was lost is sent to another one as if nothing had happened. What had come of it comes
again, is compared token by token, and is not given out twice: the client sees a pause. On a GPU the last bits
of a product may depend on what else was computed with it, so another token is possible there: then a call of
which its client has been given nothing begins anew, and another one ends with an error.

Why this is safe. In place of a driver that steps an engine there is a loop on the backend's thread, with a
task for each call; that task alone writes the call's group, and reports what comes in the order in which it
comes. Whether a client has been given anything is known by the broker's loop alone, so that is where pieces
are taken back.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from time import monotonic
from typing import Any, Protocol

from penstock.api.outputs import Delta
from penstock.api.sequences import OutputSequence, SequenceGroup
from penstock.base.errors import EngineClosedError, PenstockError
from penstock.server.broker.backend import Quotas
from penstock.server.broker.broker import RequestBroker
from penstock.server.broker.calls import Call
from penstock.server.broker.mailbox import Mailbox
from penstock.server.fleet.merge import counted, side_by_side, summed
from penstock.server.fleet.requests import (
    Accepted,
    LostError,
    OutputChunk,
    Rejected,
    RemoteReader,
    RemoteRequest,
    ReplicaMessage,
    RoutedPrompt,
)
from penstock.server.fleet.routing import Affinity
from penstock.step.plan import RequestId
from penstock.step.request import FinishReason

_LOG = logging.getLogger("penstock")
_TRIES = 4
"""Replicas that a request is sent to before it is given up: it may be what they end of."""
_LOOK = 1.0
"""Seconds between two looks at whether replicas with calls are still there."""


class ReplicaPool(Protocol):
    """Reaches the replicas, from any loop."""

    def answer(self, keys: Sequence[bytes], request: RemoteRequest) -> AsyncGenerator[ReplicaMessage]:
        """Give out what a replica that suits the keys computes for a request, when there is one. Ends early,
        or raises LostError, when that is lost, and EngineClosedError when there will be none."""

    async def broadcast(self, what: str) -> Mapping[str, Any]:
        """Return what each replica says of its `state` or its `experts`, as JSON has them, or of its
        `metrics`, as text. Those that do not answer are left out."""

    def stop(self) -> None:
        """End them, and whatever was started for them."""


class RemoteBackend:
    """Has replicas carry out calls; see Backend."""

    forecaster = None
    """Replicas tell what calls have before them there."""

    def __init__(
        self, reader: RemoteReader, pool: ReplicaPool, affinity: Affinity, *, patience: float
    ) -> None:
        """Begin without calls.

        affinity: notes what replicas hold.
        patience: seconds that a replica has to end its calls when it is to go.
        """
        self.reader = reader
        self._pool, self._affinity, self._patience = pool, affinity, patience
        self._at: dict[Call, tuple[str, asyncio.Task[None]]] = {}
        """Which replica has a call, and what waits for it there."""
        self._sent_again = 0
        """Requests that were sent once more."""

    @property
    def replicas(self) -> int:
        """Return the number of replicas that are there, as far as is known."""
        return len(self._affinity.replicas)

    async def metrics(self, own: bytes) -> bytes:
        """Return the server's own metrics, and those of each replica that it has not."""
        ours = own.decode() + counted(self._affinity.loads, self._sent_again)
        return (ours + side_by_side(await self._pool.broadcast("metrics"), ours)).encode()

    async def state(self, broker: RequestBroker) -> Mapping[str, Any]:
        """Return the state of all replicas in sum, and of each. Raise EngineClosedError if none tells its
        own."""
        states = await self._pool.broadcast("state")
        if not states:
            raise EngineClosedError("no replica is ready; wait until GET /ready answers 200")
        found = summed(states)
        return found | {
            "open": broker.open and found["open"],
            "waiting": max(broker.outputs - found["running"], found["waiting"]),
        }

    async def experts(self) -> Any:
        """Return the use of experts of the first replica: slots of others hold others. Raise
        EngineClosedError if none tells its own."""
        found = await self._pool.broadcast("experts")
        if not found:
            raise EngineClosedError("no replica is ready; wait until GET /ready answers 200")
        return found[min(found)]

    async def told_metrics(self) -> Mapping[str, str]:
        """Return the metrics of each replica, by its name."""
        return await self._pool.broadcast("metrics")

    async def clear(self) -> int:
        """Forget all prefixes that are kept, and return how many blocks they had. For replicas that can."""
        return sum((await self._pool.broadcast("clear")).values())

    def drive(self, mailbox: Mailbox, quotas: Quotas) -> None:
        """Carry out calls; see Backend."""
        asyncio.run(self._meet_all(mailbox))

    def close(self) -> None:
        """End the replicas."""
        self.reader.close()
        self._pool.stop()

    # ---- on the backend's thread

    async def _meet_all(self, mailbox: Mailbox) -> None:
        tasks: dict[Call, asyncio.Task[None]] = {}
        looking = asyncio.ensure_future(self._look_after())
        while (call := await asyncio.to_thread(mailbox.receive)) is not None:
            if (task := tasks.get(call)) is not None:
                task.cancel()
            elif not call.over:
                tasks[call] = task = asyncio.ensure_future(self._see_to(call, mailbox))
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

    async def _see_to(self, call: Call, mailbox: Mailbox) -> None:
        prompt = call.prompt
        assert isinstance(prompt, RoutedPrompt)
        sequences = [
            OutputSequence(index, RequestId(index), own, None) for index, own in enumerate(prompt.samplings)
        ]
        group = call.group = SequenceGroup(prompt.prompt, prompt.tokens, sequences)
        try:
            for _ in range(_TRIES):
                if await self._ends_at_one(call, group, prompt, mailbox):
                    return
                _LOG.warning(
                    "a replica was lost during a request, which is sent to another one; see the replica's log"
                )
            raise EngineClosedError(f"{_TRIES} replicas were lost with this request; send it again later")
        except Exception as fault:
            if not isinstance(fault, PenstockError):
                _LOG.error(
                    "a request has failed; the traceback shows a bug of penstock, so report it",
                    exc_info=fault,
                )
            mailbox.report([(call, (), True, fault)])
        finally:
            self._at.pop(call, None)

    async def _ends_at_one(
        self, call: Call, group: SequenceGroup, prompt: RoutedPrompt, mailbox: Mailbox
    ) -> bool:
        """Ask one replica. Return False if it was lost."""
        attempt = asyncio.ensure_future(self._attempt(call, group, prompt, mailbox))
        try:
            await asyncio.wait((attempt,))
        finally:
            if not attempt.done():
                attempt.cancel()
                with suppress(asyncio.CancelledError):
                    await attempt
        if group.done:
            return True
        if not attempt.cancelled() and not isinstance(attempt.exception(), LostError):
            attempt.result()
        if (name := self._at.pop(call, ("", attempt))[0]) != "":
            self._affinity.doubt(name)
        self._sent_again += 1
        return False

    async def _attempt(
        self, call: Call, group: SequenceGroup, prompt: RoutedPrompt, mailbox: Mailbox
    ) -> None:
        """Follow one replica's answer to its end. Raise LostError, and PenstockErrors for what no replica can
        answer."""
        replay, name = _Replay(group), ""
        async with aclosing(self._pool.answer(prompt.keys, prompt.request())) as messages:
            async for message in messages:
                match message:
                    case Accepted(replica, forecast):
                        if forecast is not None:
                            mailbox.run_on_loop(call.foretell, forecast)
                        name, task = replica, asyncio.current_task()
                        assert task is not None
                        self._at[call] = name, task
                        self._affinity.trust(name)
                        call.scheduled_time = call.scheduled_time or monotonic()
                    case Rejected(fault):
                        raise fault
                    case OutputChunk(deltas) if any(
                        delta.finish_reason is FinishReason.ABORT for delta in deltas
                    ):
                        break
                    case OutputChunk() if not group.done:
                        fresh = replay.fresh(message)
                        if fresh is None:
                            if not await mailbox.withdraw(call):
                                raise EngineClosedError(
                                    "the replica that answered was lost, and another one does not continue "
                                    "with the same tokens; send the request again for a whole answer"
                                )
                            fresh = replay.anew()
                        if fresh or group.done:
                            mailbox.report([(call, fresh, group.done, None)])
                        if group.done:  # The replica holds what it has computed, outputs too.
                            for sequence in group.sequences:
                                self._affinity.note(name, prompt.keys_with(sequence.tokens))
        if not group.done:
            raise LostError("the answer of a replica ended too early; send the request again")


class _Replay:
    """Compares a group's answer from one more replica with what had come of it before."""

    def __init__(self, group: SequenceGroup) -> None:
        self._sequences = group.sequences
        self._before = [len(sequence.tokens) for sequence in group.sequences]
        """Tokens of each output that had come before."""
        self._now = [0] * len(group.sequences)
        """Tokens of each output that have come now."""
        self._all: list[Delta] = []
        """All pieces that have come now, until nothing is left to be compared."""

    def fresh(self, chunk: OutputChunk) -> list[Delta] | None:
        """Return what of a chunk is new, which is added to the group. None if what had come before is not
        what comes now."""
        if any(now < before for now, before in zip(self._now, self._before, strict=True)):
            self._all.extend(chunk.deltas)
        for sequence in self._sequences:
            sequence.cached = chunk.cached
        if chunk.prompt_logprobs:
            self._sequences[0].prompt_logprobs = list(chunk.prompt_logprobs)
        if chunk.embedding:
            self._sequences[0].embedding = chunk.embedding
        fresh = []
        for delta in chunk.deltas:
            sequence, now, before = (
                self._sequences[delta.index],
                self._now[delta.index],
                self._before[delta.index],
            )
            self._now[delta.index] = end = now + len(delta.tokens)
            if now >= before:
                _add(sequence, delta)
                fresh.append(delta)
            elif tuple(sequence.tokens[now:end]) != delta.tokens or delta.finish_reason != (
                sequence.finish if end == before else None
            ):
                return None
        return fresh

    def anew(self) -> list[Delta]:
        """Return all that has come from this replica, which takes the place of what had come before."""
        for sequence in self._sequences:
            sequence.tokens, sequence.text, sequence.logprobs, sequence.finish = [], [], [], None
        self._before = self._now = [0] * len(self._sequences)
        for delta in self._all:
            _add(self._sequences[delta.index], delta)
        return self._all


def _add(sequence: OutputSequence, delta: Delta) -> None:
    sequence.tokens.extend(delta.tokens)
    sequence.text.append(delta.text)
    sequence.logprobs.extend(delta.logprobs)
    sequence.finish, sequence.stop = delta.finish_reason, delta.stop
