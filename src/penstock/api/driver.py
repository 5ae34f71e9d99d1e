"""Drives an engine: one step at a time for all prompts, whichever thread waits for them."""

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from penstock.api.outputs import Delta
from penstock.api.sequences import OutputSequence, PreparedPrompt, SequenceGroup
from penstock.base.errors import EngineClosedError, RequestError
from penstock.base.units import counted
from penstock.engine.adapters import LoadedAdapters
from penstock.engine.engine import Engine, Stats
from penstock.sched.event import Event
from penstock.sched.outlook import Course, Outlook, WaitForecast
from penstock.step.adapter import LoadedAdapter
from penstock.step.plan import RequestId
from penstock.step.request import FinishReason
from penstock.weights.checkpoint.lora import Adapter

ASLEEP = "the model is asleep; wake it up (LLM.wake_up, POST /wake_up) and send the request again"


class EngineDriver:
    """Begins prompts, runs steps, and hands what they yield to the outputs that it belongs to.

    Why this is safe. One lock guards the engine and the table of outputs; whichever thread holds it runs the
    step for all. The garbage collector may end a stream in any thread, also within a step: such a group is
    only noted, and ended between steps. An interrupt within a step leaves events that are handed out by the
    next one. A group knows its own outputs by identity: an engine that has taken another's place counts its
    requests from 0 again.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._live: dict[RequestId, OutputSequence] = {}
        self._dropped: deque[SequenceGroup] = deque()
        """Groups abandoned during a step, to be ended after it."""
        self._stepping = self._asleep = self._closed = False
        self._events: deque[Event] = deque()
        """Events of the last step that are not handed out: there are none but for an interrupt within it."""

    @property
    def forked(self) -> bool:
        """Tell whether this process was forked from the one that has opened the model."""
        return os.getpid() != self._process

    @property
    def moving(self) -> bool:
        """Tell whether blocks are on their way between tiers, or about to be: then `advance` is worth calling
        without any prompt."""
        return self._engine.scheduler.tiers.moving or self._engine.scheduler.tiers.ready

    def stats(self) -> Stats:
        """Return the engine at this moment, and its counts since it started."""
        with self._lock:
            self._sweep()
            return self._engine.stats()

    def is_waiting(self, request: RequestId) -> bool:
        """Tell whether a request still waits in the engine's queue. Takes no lock."""
        return self._engine.scheduler.is_waiting(request)

    def outlook(self) -> Outlook:
        """Return what is before a new request now, for any thread."""
        with self._lock:
            return self._engine.outlook()

    def found_now(self, ready: PreparedPrompt) -> int:
        """Count the tokens of a prompt whose KV is there now. Takes no lock."""
        engine = self._engine
        adapter = engine.adapters.loaded.get(ready.lora)
        if ready.lora and adapter is None:
            return 0
        digest = b"" if adapter is None else adapter.digest
        return engine.scheduler.foresight.found(ready.tokens, ready.salt, digest)

    def forecast(self, ready: PreparedPrompt) -> WaitForecast:
        """Return what a prompt would have before it, and when its first token would come. Raises RequestError
        for an adapter that is not loaded."""
        with self._lock:
            self._engine.adapters.of(ready.lora)
            outlook = self._engine.outlook().before(ready.priority)
            scored = ready.samplings[0].prompt_logprobs is not None
            ready = replace(ready, found=0 if scored else self.found_now(ready))
            first, *_ = ready.queued(outlook, self._engine.scheduler.longest)
            seconds = Course(outlook).forecast(first, outlook.when)
        return WaitForecast(outlook.place, seconds)

    def check(self) -> None:
        """Raise what has ended the engine while it had nothing to do, such as a rank that was lost."""
        with self._lock:
            if not self._asleep:
                self._engine.check()

    def begin(self, ready: PreparedPrompt, *, followed: bool = True) -> SequenceGroup:
        """Queue all outputs of a prompt. They are computed as `advance` is called, and end as `abandon` is.

        followed: whether what each step adds is taken. Else it is not kept: the garbage collector would
            look at all of it again.
        """
        self.check_process()
        sequences: list[OutputSequence] = []
        group = SequenceGroup(ready.prompt, ready.tokens, sequences)
        with self._lock:
            self._check_awake()
            try:
                for index, own in enumerate(ready.samplings):
                    detokenizer = ready.detokenizer()
                    request = self._engine.submit(
                        ready.tokens,
                        own,
                        ready.max_tokens,
                        ready.priority,
                        ready.salt,
                        len(ready.tokens) - 1 if index else ready.found,
                        ready.lora,
                    )
                    deltas = deque[Delta](maxlen=None if followed else 0)
                    sequences.append(OutputSequence(index, request, own, detokenizer, deltas))
                    self._live[request] = sequences[-1]
            except BaseException:
                self.abandon([group])
                raise
        return group

    def advance(self) -> None:
        """Run one step for all prompts: what it yields is in the deltas of their outputs. Without any prompt,
        look after what moves between tiers."""
        if self._live:
            self.step()
        else:
            with self._lock:
                self._engine.tend()

    def step(self) -> None:
        """Run one step of the engine, and hand its events to the outputs that they belong to, whichever
        thread waits for these."""
        self.check_process()
        with self._lock:
            self._sweep()
            self._stepping = True
            try:
                if not self._events:
                    self._events.extend(self._engine.step())
                while self._events:
                    self._hand_out(self._events[0])
                    self._events.popleft()
                self._engine.tend()
            finally:
                self._stepping = False
                self._sweep()

    def _hand_out(self, event: Event) -> None:
        sequence = self._live.get(event.request)
        if sequence is None:  # It ended between the step and now, after an interrupt.
            return
        if sequence.take(event):
            self._engine.stop(event.request, FinishReason.STOP)
        if sequence.finish is not None:
            del self._live[event.request]

    def next_delta(self, group: SequenceGroup, until: Callable[[], bool]) -> Delta | None:
        """Return the group's next piece; None after its last, and when the group was ended.

        until: asked before every step; once it is true, the group is ended.
        """
        with self._lock:
            while True:
                for sequence in group.sequences:
                    if sequence.deltas:
                        return sequence.deltas.popleft()
                if not group.done and until():
                    self.abandon([group])
                if group.done:
                    return None
                self.step()

    def take_deltas(self, group: SequenceGroup) -> tuple[list[Delta], bool]:
        """Return the group's pieces that were not taken yet, and whether these were the last. Waits for a
        step that another thread runs: within one, an output may have ended and its last piece be missing."""
        with self._lock:
            pieces = [delta for sequence in group.sequences for delta in sequence.deltas]
            for sequence in group.sequences:
                sequence.deltas.clear()
            return pieces, group.done

    @property
    def adapters(self) -> LoadedAdapters:
        """Return the LoRA adapters of the engine. Other threads may read which are loaded, and which are
        lost."""
        return self._engine.adapters

    def load_adapter(self, name: str, adapter: Adapter, *, replaces: bool = False) -> LoadedAdapter:
        """Load a LoRA adapter that has been read, between two steps; see LoadedAdapters.add. Raises
        EngineClosedError while the model is asleep: an engine that takes this one's place has what this one
        had when it was closed."""
        self.check_process()
        with self._lock:
            self._check_awake()
            return self._engine.adapters.add(name, adapter, replaces=replaces)

    def unload_adapter(self, name: str) -> None:
        """Forget a LoRA adapter. Prompts that were begun go on with it. Raises RequestError if it is not
        loaded, and EngineClosedError while the model is asleep."""
        with self._lock:
            self._check_awake()
            self._engine.adapters.remove(name)

    def clear_prefix_cache(self) -> int:
        """Forget the KV of everything that is not running. Return the number of blocks that were given up."""
        with self._lock:
            dropped = self._engine.scheduler.forget()
            self._engine.tend()
            return dropped

    @property
    def idle(self) -> bool:
        """Tell whether nothing is being computed, and nothing waits to be."""
        with self._lock:
            self._sweep()
            return not self._live

    def check_open(self) -> None:
        """Raise EngineClosedError if the model was closed, or if this process has none."""
        self.check_process()
        if self._closed:
            raise EngineClosedError("the model was closed; create a new LLM")

    def sleep(self, *, closes: bool) -> None:
        """Begin no prompt from now on, and free the KV. closes: and all else that the engine has.

        Raise RequestError while something is being computed, and EngineClosedError for a model that was
        closed.
        """
        with self._lock:
            self.check_open()
            if not self.idle:
                raise RequestError(
                    f"the model cannot sleep, since it makes {counted(len(self._live), 'output')} now; let "
                    "that end, or close streams"
                )
            if closes:
                self._engine.finish()
            else:
                self._engine.free_kv()
            self._events.clear()  # An interrupt may have left some, of requests that nobody waits for.
            self._asleep = True

    def wake(self, engine: Engine | None = None) -> None:
        """Begin prompts again. engine: takes the place of the one that `sleep` has closed. Raise
        EngineClosedError, and close it, if the model was closed meanwhile."""
        with self._lock:
            if self._closed and engine is not None:
                engine.close()
            self.check_open()
            if engine is not None:
                self._engine = engine
            self._asleep = False

    def _check_awake(self) -> None:
        if self._asleep:
            raise EngineClosedError(ASLEEP)

    def drop(self, group: SequenceGroup) -> None:
        """Note that a group is wanted no more; it is ended with the next step. Takes no lock."""
        self._dropped.append(group)

    def abandon(self, groups: Sequence[SequenceGroup]) -> None:
        """End what still runs of these groups."""
        with self._lock:
            if self._stepping:  # The garbage collector has found a stream within a step, in this very thread.
                self._dropped.extend(groups)
                return
            for sequence in (sequence for group in groups for sequence in group.sequences):
                if self._live.get(sequence.request) is sequence:
                    del self._live[sequence.request]
                    self._engine.stop(sequence.request)
                    sequence.finish = FinishReason.ABORT
            self._engine.tend()

    def close(self) -> None:
        """End all requests as aborted, and close the engine; any later request raises EngineClosedError."""
        with self._lock:
            for request, sequence in self._live.items():
                self._engine.stop(request)
                sequence.finish = FinishReason.ABORT
                sequence.deltas.append(Delta("", (), sequence.finish, sequence.index))
            self._live.clear()
            self._closed, self._asleep = True, False
            self._engine.finish()

    def _sweep(self) -> None:
        """End the groups that were dropped."""
        while self._dropped:
            self.abandon([self._dropped.popleft()])

    def check_process(self) -> None:
        """Raise EngineClosedError in a process that was forked from the one that has opened the model."""
        if self.forked:
            raise EngineClosedError(
                "this process was forked after the model was opened, and has no engine of its own; create "
                "the LLM in a process that multiprocessing starts with `spawn`"
            )
