"""Runs the engine's loop: plan, run, commit."""

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import count
from time import monotonic
from typing import TYPE_CHECKING

from penstock.arch.lora import LoraRoom
from penstock.base.errors import DeviceError, EngineClosedError, StepMemoryError
from penstock.base.garbage import no_collection
from penstock.base.meter import Direction, KVStats, MissedStats, Passes, TierStats
from penstock.engine.adapters import LoadedAdapters
from penstock.engine.ranks import Ranks, Threads
from penstock.kv.store.diskpool import LostKV
from penstock.sched.event import Event
from penstock.sched.outlook import Outlook
from penstock.sched.scheduler import Scheduler
from penstock.step.adapter import LoadedAdapter
from penstock.step.params import Sampling
from penstock.step.plan import Outcome, Plan, RequestId, Route, Step
from penstock.step.request import FinishReason

if TYPE_CHECKING:
    from penstock.weights.checkpoint.lora import Adapter

_LOG = logging.getLogger("penstock")
_NUMBERS = count(1)
"""Each engine of this process has one."""
_LAST = 5.0
"""Seconds that `finish` waits for blocks on their way."""
_MOST_LOST = 8
"""Times that KV may be lost. A disk that loses more will go on losing it."""


@dataclass(frozen=True, slots=True)
class Stats:
    """Holds the state of the engine at this moment, and its counts since it started.

    kv_blocks_free: free blocks, cached ones included.
    kv: KV of long contexts; None if there is no room for any.
    missed: attention that policies have left out; empty where everything is read.
    drafts: steps of requests that verified a draft, tokens of these drafts, and those that were accepted.
    cut: drafts within which an output ended.
    engine: number of the engine. A model that has slept may have another one, which counts from 0.
    """

    running: int
    waiting: int
    kv_blocks: int
    kv_blocks_free: int
    kv_blocks_cached: int
    preemptions: int
    steps: int
    computed_tokens: int
    output_tokens: int
    kv: KVStats | None
    tiers: TierStats | None
    missed: MissedStats
    passes: Passes
    drafts: tuple[int, int, int] = (0, 0, 0)
    cut: int = 0
    engine: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """Holds what the last step has reached.

    reached: tokens of the unfinished prompt that have KV; 0 without one. There is never more than one.
    computed: tokens computed since the engine started.
    """

    reached: int
    computed: int


class Engine:
    """Takes requests in and gives events out.

    One thread at a time; requests may come and go between steps.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        ranks: Ranks,
        note: Callable[[], None] | None = None,
        threads: Threads | None = None,
        room: LoraRoom | None = None,
    ) -> None:
        """Drive this scheduler and these ranks.

        note: called before the engine closes. threads: those of the CPU that steps compute with. room: for
        LoRA adapters.
        """
        self.number = next(_NUMBERS)
        self.adapters = LoadedAdapters(room, self._load_adapter, lambda: scheduler.adapters)
        self.scheduler, self._note, self._threads = scheduler, note, threads
        self._ranks: Ranks | None = ranks
        self._failure = ""
        self._lost = 0
        self._torn = False
        """True if a step has begun, and neither ended nor been recovered from.

        An interrupt may also strike during the recovery.
        """
        self._flight: tuple[Plan, Step] | None = None
        """The step that runs ahead: begun by the last step, to be committed by the next."""
        self._planned: Plan | None = None
        """The last plan that was given to the ranks."""
        self._steps = self._computed = self._output = 0
        self._passes = Passes()
        self._cold = self._sent = 0
        """Blocks beyond the device: held in the last step, and sent there by all steps."""
        self.progress = Progress(0, 0)

    @property
    def busy(self) -> bool:
        """Tell whether there is a request that has not ended, or a step under way."""
        return self.scheduler.busy or self._flight is not None

    @property
    def threads(self) -> int | None:
        """Return the CPU threads of the last step; None where they are whatever torch has."""
        return None if self._threads is None else self._threads.now

    def submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        max_tokens: int | None = None,
        priority: int = 0,
        salt: bytes = b"",
        found: int = 0,
        lora: str = "",
    ) -> RequestId:
        """Queue a request; see Scheduler.submit. found: tokens of the prompt whose KV is thought to be there,
        for forecasts alone. lora: name of its LoRA adapter. Raises EngineClosedError, and RequestError for an
        adapter that is not loaded."""
        self._open()
        adapter = self.adapters.of(lora)
        request = self.scheduler.submit(prompt, sampling, max_tokens, priority, salt, found, adapter)
        self.scheduler.foresight.submitted()
        return request

    def _load_adapter(self, loaded: LoadedAdapter, adapter: "Adapter") -> None:
        self._open().load_adapter(loaded, adapter)

    def stop(self, request: RequestId, reason: FinishReason = FinishReason.ABORT) -> bool:
        """End a request and free its blocks. Return False if it has already ended."""
        begun = not self.scheduler.is_waiting(request)
        if stopped := self.scheduler.stop(request, reason):
            self.scheduler.foresight.stopped(begun)
        return stopped

    def outlook(self) -> Outlook:
        """Return what is before a new request now. It is for any thread."""
        return self.scheduler.foresight.look(self._flight is not None)

    def step(self) -> list[Event]:
        """Do one step for all requests, and return its events.

        After an interrupt, or when KV on disk is lost, all requests start anew with the next step and lose
        nothing. After a step that was too large for the device's memory they do so in smaller steps. After
        any other failure the engine is closed.

        Where ranks compute by themselves, the next step is begun before the events of the last one are
        returned. So the next step is planned, and the last tokens are handled, while a step is computed.
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
        """Begin a step, unless it has to wait for the one under way. Return the steps that have ended."""
        flight, self._flight = self._flight, None
        if flight is not None and not ranks.ahead:
            return [(flight[0], flight[1].outcome())]
        self._planned = None
        plan = self.scheduler.plan()
        ended = []
        if plan.shares or plan.transfers or plan.forget or (flight is None and self.scheduler.tiers.moving):
            self._cold = self.scheduler.host.blocks - self.scheduler.host.available
            self._planned = plan
            with nullcontext() if self._threads is None else self._threads.of(plan.tokens):
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
        """Commit a step, and count."""
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
        reasons = [event.finish for event in events if event.finish is not None]
        tokens = sum([event.token is not None for event in events])
        self.scheduler.foresight.stepped(plan, tokens, reasons)
        if not plan.shares:
            return events
        self._steps += 1
        self._passes = self._passes.and_one(outcome.seconds, decode=not plan.chunks)
        self._computed += plan.tokens
        written = sum(max(run.cold_stop - run.start, 0) for run in plan.runs)
        self._sent += len(plan.orders) + written // self.scheduler.limits.block_size
        self.progress = Progress(
            max([share.stop for share in plan.shares if not share.sample], default=0), self._computed
        )
        self._output += tokens
        return events

    def check(self) -> None:
        """Raise the failure of a rank between steps, after which the engine is closed."""
        try:
            self._open().check()
        except DeviceError as fault:
            self._fail(fault)
            raise

    def tend(self, seconds: float = 0.0) -> None:
        """Do what is left between requests, for at most `seconds`.

        A step ends if its tokens are no longer wanted, and computed blocks set out for lower tiers. Copies to
        the host are always waited for, which takes milliseconds.
        """
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

    def free_kv(self) -> None:
        """Forget the device's KV and give back its memory, without requests. Lower tiers keep theirs."""
        ranks = self._open()
        self.tend(_LAST)
        self._recover(ranks)
        ranks.free_kv()

    def finish(self) -> None:
        """Wait some seconds for blocks on their way to the host and the disk, and close."""
        try:
            if self._ranks is not None and not self._torn:
                self.tend(_LAST)
        finally:
            self.close()

    def _shrink(self, ranks: Ranks, short: StepMemoryError) -> list[Event]:
        """Start all requests anew in smaller steps, after one that was too large for the memory.

        They lose nothing. If it was the smallest step of a single request, that request ends. If it was a
        step that drafts, which is computed while a plan is made, nothing is drafted for a while.
        """
        plan = self._planned
        if plan is not None and not plan.shares:
            self._fail(short)
            raise short
        request = self.scheduler.narrow(plan)
        self._recover(ranks)
        if plan is None:
            _LOG.warning("%s; it was a step that drafts, and nothing is drafted for a while", short)
            return []
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
        self.scheduler.foresight.interrupted()
        self._flight = None
        self.scheduler.recover(ranks.settle())
        self._torn = False

    def _fail(self, fault: BaseException) -> None:
        self._failure = f": a step failed with {type(fault).__name__}: {fault}"
        self.close()

    def stats(self) -> Stats:
        """Return the state of the engine at this moment, and its counts since it started."""
        scheduler, ledger = self.scheduler, self.scheduler.ledger
        drafts = scheduler.speculation.counts if scheduler.speculation is not None else None
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
            drafts=(0, 0, 0) if drafts is None else (drafts.drafts, drafts.drafted, drafts.accepted),
            cut=0 if drafts is None else drafts.cut,
            engine=self.number,
        )

    def missed_stats(self) -> MissedStats:
        """Return the attention that policies have left out; on several ranks, by rank 0's heads.

        Any thread may call it, also while a step runs.
        """
        ranks = self._ranks
        carrier = ranks.carrier if ranks is not None else None
        return (
            carrier.chosen.missed.stats
            if carrier is not None and carrier.chosen is not None
            else MissedStats()
        )

    def kv_stats(self) -> KVStats | None:
        """Return the KV of long contexts in the last step, or None if there is no room for any.

        Any thread may call it, also while a step runs.
        """
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
        """Return the counts of prefix blocks on other tiers, or None without them."""
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
        """Free the device. Unfinished requests are lost. A second call does nothing."""
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
