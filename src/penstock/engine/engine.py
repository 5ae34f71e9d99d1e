"""The engine: plan, run, commit."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.base.errors import EngineClosedError
from penstock.sched.scheduler import Event, Scheduler
from penstock.step.params import Sampling
from penstock.step.plan import Outcome, Plan, RequestId
from penstock.step.request import FinishReason


class Ranks(Protocol):
    """Whoever carries out plans."""

    def run(self, plan: Plan) -> Outcome: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Stats:
    """The engine at this moment, and its counts since it started."""

    running: int
    waiting: int
    kv_blocks: int
    kv_blocks_free: int
    """Free ones and cached ones."""
    kv_blocks_cached: int
    preemptions: int
    steps: int
    computed_tokens: int
    output_tokens: int


class Engine:
    """Requests in, events out. One thread at a time; requests may come and go between any two steps."""

    def __init__(self, scheduler: Scheduler, ranks: Ranks) -> None:
        self.scheduler = scheduler
        self._ranks: Ranks | None = ranks
        self._failure = ""
        self._steps = self._computed = self._output = 0

    @property
    def busy(self) -> bool:
        return self.scheduler.busy

    def submit(self, prompt: Sequence[int], sampling: Sampling, max_tokens: int | None = None) -> RequestId:
        self._open()
        return self.scheduler.submit(prompt, sampling, max_tokens)

    def stop(self, request: RequestId, reason: FinishReason = FinishReason.ABORT) -> bool:
        """End a request and free what it holds. False if it has already ended."""
        return self.scheduler.stop(request, reason)

    def step(self) -> list[Event]:
        """One step for all requests. Interrupted while planning or computing, all of them start anew with the next step and lose
        nothing; after any other failure, also of taking in results, the engine serves no more."""
        ranks = self._open()
        try:
            plan = self.scheduler.plan()
            if not plan.shares:
                return []
            outcome = ranks.run(plan)
        except KeyboardInterrupt:
            self.scheduler.recover()
            raise
        except BaseException as fault:
            self._fail(fault)
            raise
        try:
            events = self.scheduler.commit(plan, outcome)
        except BaseException as fault:
            self._fail(fault)
            raise
        self._steps += 1
        self._computed += plan.tokens
        self._output += sum(event.token is not None for event in events)
        return events

    def _fail(self, fault: BaseException) -> None:
        self._failure = f": a step failed with {type(fault).__name__}: {fault}"
        self.close()

    def stats(self) -> Stats:
        """The engine at this moment, and its counts since it started."""
        scheduler, ledger = self.scheduler, self.scheduler.ledger
        return Stats(
            running=scheduler.running,
            waiting=scheduler.waiting,
            kv_blocks=ledger.blocks,
            kv_blocks_free=ledger.available,
            kv_blocks_cached=ledger.cached,
            preemptions=scheduler.preemptions,
            steps=self._steps,
            computed_tokens=self._computed,
            output_tokens=self._output,
        )

    def close(self) -> None:
        """Free the device. Requests that are still there are lost; a second call does nothing."""
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.close()

    def _open(self) -> Ranks:
        if self._ranks is None:
            raise EngineClosedError(f"the engine is closed{self._failure}; make a new one")
        return self._ranks
