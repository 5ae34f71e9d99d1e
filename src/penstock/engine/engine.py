"""The engine: plan, run, commit."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Protocol

from penstock.base.errors import DeviceError, EngineClosedError, StepMemoryError
from penstock.base.garbage import no_collection
from penstock.base.meter import Direction, KVStats, MissedStats, Passes, TierStats
from penstock.kv.store.diskpool import LostKV
from penstock.sched.scheduler import Event, Scheduler
from penstock.step.params import Sampling
from penstock.step.plan import Landed, Outcome, Plan, RequestId, Route, Step
from penstock.step.request import FinishReason

if TYPE_CHECKING:
    from penstock.kv.movement.carrier import Carrier

_LOG = logging.getLogger("penstock")
_LAST = 5.0
"""Seconds that the end waits for blocks on their way."""
_MOST_LOST = 8
"""Times that KV may be lost: a disk that loses more of it will not stop to."""


class Ranks(Protocol):
    """The one or several workers that carry out plans."""

    @property
    def carrier(self) -> "Carrier | None":
        """The carrier of KV beyond the device, if there is any."""
        ...

    @property
    def ahead(self) -> bool:
        """Whether a plan is worth beginning before the one before it is over: `begin` then returns before its
        arithmetic has ended."""
        ...

    def begin(self, plan: Plan) -> Step:
        """Begin a plan, or have it begun on all ranks."""
        ...

    def settle(self) -> tuple[Landed, ...]:
        """Wait for all that is under way, after a step that was broken off. Return what came of transfers."""
        ...

    def check(self) -> None:
        """Raise what has ended them, if it has not been raised before."""
        ...

    def close(self) -> None:
        """Free the devices."""
        ...


@dataclass(frozen=True, slots=True)
class Stats:
    """The state of the engine at this moment, and its counts since it started."""

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
    kv: KVStats | None
    """Of long contexts; None if there is no room for any."""
    tiers: TierStats | None
    missed: MissedStats
    """By attention policies; nothing where everything is read."""
    passes: Passes


@dataclass(frozen=True, slots=True)
class Progress:
    """The point that the last step came to."""

    reached: int
    """Tokens whose KV is there, of the prompt that it left unfinished; 0 if it left none. There is never more
    than one."""
    computed: int
    """Tokens computed since the engine started."""


class Engine:
    """The engine: requests in, events out. One thread at a time; requests may come and go between any two
    steps."""

    def __init__(self, scheduler: Scheduler, ranks: Ranks, note: Callable[[], None] | None = None) -> None:
        """note: done before the end."""
        self.scheduler, self._note = scheduler, note
        self._ranks: Ranks | None = ranks
        self._failure = ""
        self._lost = 0
        self._torn = False
        """Whether a step has begun and neither ended nor been recovered from: an interrupt may also strike
        while that is done."""
        self._flight: tuple[Plan, Step] | None = None
        """Begun by the last step, and to be committed by the next."""
        self._planned: Plan | None = None
        """The last that was given to the ranks."""
        self._steps = self._computed = self._output = 0
        self._passes = Passes()
        self._cold = self._sent = 0
        """Blocks beyond the device: held in the last step, and sent there by all."""
        self.progress = Progress(0, 0)

    @property
    def busy(self) -> bool:
        """Whether there is a request that has not ended, or a step under way."""
        return self.scheduler.busy or self._flight is not None

    def submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        max_tokens: int | None = None,
        priority: int = 0,
        salt: bytes = b"",
    ) -> RequestId:
        """Queue a request: see Scheduler.submit. Raises EngineClosedError."""
        self._open()
        return self.scheduler.submit(prompt, sampling, max_tokens, priority, salt)

    def stop(self, request: RequestId, reason: FinishReason = FinishReason.ABORT) -> bool:
        """End a request and free what it holds. Return False if it has already ended."""
        return self.scheduler.stop(request, reason)

    def step(self) -> list[Event]:
        """Do one step for all requests. Interrupted while planning or computing, or when KV does not come
        back as it was, all of them start anew with the next step and lose nothing. So they do when the device
        has too little memory for a step, in smaller ones. After any other failure, also of taking in results,
        the engine serves no more.

        Where ranks compute by themselves the next step is begun first, and then the events of the one before
        it are returned: while a step is computed the next is planned, and what the last has yielded is looked
        at.
        """
        with no_collection():
            return self._step(self._open())

    def _step(self, ranks: Ranks) -> list[Event]:
        if self._torn:
            self._recover(ranks)
        self._torn = True
        try:
            ended = self._advance(ranks)
        except KeyboardInterrupt:
            self._recover(ranks)
            raise
        except LostKV as lost:
            self._lost += 1
            if self._lost > _MOST_LOST:
                self._fail(lost)
                raise
            _LOG.warning("%s; the KV of all requests is computed again", lost)
            self._recover(ranks)
            return []
        except StepMemoryError as short:
            return self._shrink(ranks, short)
        except BaseException as fault:
            self._fail(fault)
            raise
        self._torn = False
        try:
            return [event for plan, outcome in ended for event in self._take(plan, outcome)]
        except BaseException as fault:
            self._fail(fault)
            raise

    def _advance(self, ranks: Ranks) -> list[tuple[Plan, Outcome]]:
        """Begins a step, unless that has to wait for the one under way; the steps that have come to their
        end."""
        flight, self._flight = self._flight, None
        if flight is not None and not ranks.ahead:
            return [(flight[0], flight[1].outcome())]
        plan = self.scheduler.plan()
        ended = []
        if plan.shares or plan.transfers or plan.forget or (flight is None and self.scheduler.tiers.moving):
            self._cold = self.scheduler.host.blocks - self.scheduler.host.available
            self._planned = plan
            step = ranks.begin(plan)
            if plan.shares and ranks.ahead:
                self.scheduler.run_ahead(plan)
                self._flight = plan, step
            else:
                ended.append((plan, step))
        if flight is not None:
            ended.insert(0, flight)
        return [(plan, step.outcome()) for plan, step in ended]

    def _take(self, plan: Plan, outcome: Outcome) -> list[Event]:
        wrong = self.scheduler.wrong
        events = self.scheduler.commit(plan, outcome)
        if self.scheduler.wrong > wrong:
            _LOG.error(
                "the model's logits are not numbers (NaN) for %d of %d requests of a step, and their "
                "answers end here: with float16, try bfloat16 or float32, whose range is larger; otherwise "
                "the weights are damaged, so fetch the checkpoint again",
                self.scheduler.wrong - wrong,
                len(plan.shares),
            )
        if not plan.shares:
            return events
        self._steps += 1
        self._passes = self._passes.and_one(outcome.seconds, decode=not plan.runs)
        self._computed += plan.tokens
        written = sum(max(run.cold_stop - run.start, 0) for run in plan.runs)
        self._sent += len(plan.orders) + written // self.scheduler.limits.block_size
        self.progress = Progress(
            max([share.stop for share in plan.shares if not share.sample], default=0), self._computed
        )
        self._output += sum([event.token is not None for event in events])
        return events

    def check(self) -> None:
        """Raise, between steps, what has ended the ranks, after which the engine serves no more."""
        try:
            self._open().check()
        except DeviceError as fault:
            self._fail(fault)
            raise

    def tend(self, seconds: float = 0.0) -> None:
        """Look after what is left between requests: let a step end whose tokens are no longer wanted, let
        blocks that were computed set out, and wait so long for those on their way; for those to the host
        always, which takes milliseconds."""
        if self._ranks is not None and self._flight is not None and not self.scheduler.busy:
            self.step()
        until, steps = monotonic() + seconds, 3
        while (
            self._ranks is not None
            and not self.busy
            and (self.scheduler.tiers.ready or self.scheduler.tiers.moving)
            and (steps or monotonic() < until)
        ):
            self.step()
            steps -= bool(steps)

    def finish(self) -> None:
        """Let blocks that are on their way to the host and the disk land, as long as that takes no more than
        some seconds, and close."""
        try:
            if self._ranks is not None and not self._torn:
                self.tend(_LAST)
        finally:
            self.close()

    def _shrink(self, ranks: Ranks, short: StepMemoryError) -> list[Event]:
        """After a step that was too large for the memory: the same requests have smaller ones, and lose
        nothing. If what was too large is the smallest step of a single request, that one ends."""
        plan = self._planned
        if plan is None or not plan.shares:
            self._fail(short)
            raise short
        request = self.scheduler.narrow(plan)
        self._recover(ranks)
        if request is None:
            tokens, requests = self.scheduler.narrowed or (0, 0)
            _LOG.warning(
                "%s; a step of %d tokens of %d requests is tried again with at most %d of %d",
                short, plan.tokens, len(plan.shares), tokens, requests,
            )  # fmt: skip
            return []
        self.scheduler.stop(request, FinishReason.ERROR)
        fault = (
            f"{short}; a request ends here, since its step of {plan.tokens} tokens at position "
            f"{plan.shares[0].start} does not fit even alone"
        )
        _LOG.error("%s", fault)
        return [Event(request, finish=FinishReason.ERROR, fault=fault)]

    def _recover(self, ranks: Ranks) -> None:
        self._flight = None
        self.scheduler.recover(ranks.settle())
        self._torn = False

    def _fail(self, fault: BaseException) -> None:
        self._failure = f": a step failed with {type(fault).__name__}: {fault}"
        self.close()

    def stats(self) -> Stats:
        """Return the state of the engine at this moment, and its counts since it started."""
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
            kv=self.kv_stats(),
            tiers=self.tier_stats(),
            missed=self.missed_stats(),
            passes=self._passes,
        )

    def missed_stats(self) -> MissedStats:
        """Return what attention policies have left out. On several ranks, of rank 0's heads. From any thread,
        also while a step runs."""
        ranks = self._ranks
        carrier = ranks.carrier if ranks is not None else None
        return (
            carrier.chosen.missed.stats
            if carrier is not None and carrier.chosen is not None
            else MissedStats()
        )

    def kv_stats(self) -> KVStats | None:
        """Return the KV of long contexts, in the last step; None if there is no room for any. From any
        thread, also while a step runs."""
        ranks = self._ranks  # Another thread may close the engine meanwhile.
        carrier = ranks.carrier if ranks is not None else None
        if carrier is None:
            return None
        block, room = carrier.pool.layout.block_bytes, carrier.pool.blocks
        host = min(self._cold, room)
        disk = carrier.disk
        read, written = (disk.read_bytes, disk.written_bytes) if disk is not None else (0, 0)
        return KVStats(
            host * block,
            (self._cold - host) * block,
            room * block,
            carrier.copied_bytes,
            self._sent * block,
            read,
            written,
        )

    def tier_stats(self) -> TierStats | None:
        """Return the counts of prefixes on other tiers; None if there are none."""
        ranks, tiers = self._ranks, self.scheduler.tiers
        carrier = ranks.carrier if ranks is not None else None
        if carrier is None or carrier.transfers is None:
            return None
        counts, block = tiers.counts, carrier.pool.layout.block_bytes
        up, down, inward, outward = (
            Direction(counts.moved[route] * block, counts.seconds[route], counts.lost[route])
            for route in (Route.UP, Route.DOWN, Route.IN, Route.OUT)
        )
        disk = carrier.transfers.store.stats if carrier.transfers.store is not None else None
        return TierStats(
            counts.prompts,
            counts.found,
            counts.found_host,
            counts.found_disk,
            up,
            down,
            inward,
            outward,
            tiers.pages.evicted,
            tiers.host.evicted,
            tiers.disk.evicted if tiers.disk is not None else 0,
            counts.recomputed,
            counts.late,
            tiers.host.cached,
            disk.records if disk else 0,
            disk.real_bytes if disk else 0,
            disk.checksum_failures if disk else 0,
            disk.io_failures if disk else 0,
            disk.quarantined if disk else 0,
            bool(disk and (disk.reads_off or disk.writes_off)),
        )

    def close(self) -> None:
        """Free the device. Requests that are still there are lost; a second call does nothing."""
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            try:
                if self._note is not None:
                    self._note()
            finally:
                ranks.close()

    def _open(self) -> Ranks:
        if self._ranks is None:
            raise EngineClosedError(
                f"the engine is closed{self._failure}; create a new LLM, or restart the server"
            )
        return self._ranks
