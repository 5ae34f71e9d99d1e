"""Runs one engine on several devices: rank 0 leads, the others carry out the same plans in the same order.

How all ranks stay in agreement. Every message has a number, and a follower takes only the next one. A plan
contains collectives, so a rank cannot leave it half done: rank 0 sends and begins it on a thread of its own,
which no interrupt reaches. An interrupt strikes the thread that called `begin`. Either the plan has not been
put for that other thread, which is one call, and then no rank ever gets it. Or it has, and then all ranks
begin it, and `settle` comes behind it. Nothing in between can be seen.

A step may begin before the one before it has ended. Rank 0 announces both, the begin and the end, and the
others do the same in the same order. So none of them is ever further ahead than rank 0, and all call their
collectives in one order. A follower waits at an end as rank 0 does: a step that reuses memory of the step
before the last, such as staging, begins behind its end on every rank. Tokens that a plan does not know are
drawn on every rank from logits of the same bits. Where more than the likeliest is wanted, rank 0's are used.

A transfer between tiers has landed when it has on every rank: each copies its own part of a block, at its own
pace. While any is under way, ranks exchange which have landed at the end of each step. A block that any of
them has lost is lost.

A failure on any rank ends all, since the others would wait for it. Every later call raises it, except
`close`.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Protocol, TypeVar

from penstock.base.errors import CheckpointError, DeviceError, UnsupportedModelError
from penstock.kv.movement.carrier import Carrier
from penstock.memory.tasks import Task, Workers
from penstock.parallel.codec import Codec
from penstock.parallel.group import Group
from penstock.parallel.launch import Crew
from penstock.step.adapter import LoadedAdapter
from penstock.step.plan import Landed, Outcome, Plan, Step, TransferId
from penstock.weights.checkpoint.lora import Adapter

T = TypeVar("T")

_GLANCE = 0.5
"""Seconds between two looks at the followers, while rank 0 computes."""
_LET_GO = 10.0
"""Seconds that work here may still take once a follower has failed, before it is abandoned."""
_GRACE = 20.0
"""Seconds that followers have to close."""


class RankPart(Protocol):
    """Does one rank's share of the work: it is a Runner."""

    @property
    def carrier(self) -> Carrier | None:
        """Return the carrier of KV beyond the device, if there is any."""

    @property
    def ahead(self) -> bool:
        """Tell whether plans are begun before the one before is over."""

    def begin(self, plan: Plan) -> Step:
        """Begin a plan."""

    def read_adapter(self, loaded: LoadedAdapter) -> Adapter:
        """Read a LoRA adapter. Raises CheckpointError and UnsupportedModelError."""

    def load_adapter(self, loaded: LoadedAdapter, adapter: Adapter) -> None:
        """Put a LoRA adapter that was read into its slot."""

    def settle(self) -> tuple[Landed, ...]:
        """Wait for all that is under way, after an interrupted step."""

    def free_kv(self) -> None:
        """Give back the memory of KV blocks."""

    def close(self) -> None:
        """Release weights and KV."""


class _Kind(Enum):
    BEGIN = "begin"
    ADAPTER = "adapter"
    END = "end"
    SETTLE = "settle"
    FREE_KV = "free KV"
    CLOSE = "close"


@dataclass(frozen=True, slots=True)
class _Message:
    """Goes from rank 0 to all others.

    collect: whether the ranks then exchange which transfers have landed.
    """

    number: int
    kind: _Kind
    plan: Plan | None
    collect: bool
    adapter: LoadedAdapter | None = None


@dataclass(frozen=True, slots=True)
class _Report:
    landed: tuple[Landed, ...]


_MESSAGES, _REPORTS = Codec(_Message), Codec(_Report)


def serve(receive: Callable[[], bytes], part: RankPart, group: Group) -> None:
    """Serve as a follower: do what rank 0's messages say until it closes.

    Raises every error of the work, and DeviceError if messages are not in order. The process must end then,
    which is how the others notice.
    """
    landed: tuple[Landed, ...] = ()
    under_way = deque[Step]()
    number = 0
    while True:
        message = _MESSAGES.decode(receive())
        if message.number != number:
            raise DeviceError(
                f"rank {group.rank} was sent message {message.number} where message {number} comes next, "
                "which is a bug of penstock; restart all ranks, and report this line"
            )
        number += 1
        if message.kind is _Kind.CLOSE:
            break
        match message.kind:
            case _Kind.BEGIN:
                assert message.plan is not None, "a begin without a plan"
                under_way.append(part.begin(message.plan))
            case _Kind.ADAPTER:
                assert message.adapter is not None, "an adapter without a name"
                _put_adapter(part, group, message.adapter)
            case _Kind.END:
                landed += under_way.popleft().outcome().landed
            case _Kind.SETTLE:
                under_way.clear()
                landed += part.settle()
            case _Kind.FREE_KV:
                part.free_kv()
        group.check()
        if message.collect:
            group.exchange(_REPORTS.encode(_Report(landed)))
            landed = ()
    part.close()
    group.close()


def _put_adapter(part: RankPart, group: Group, loaded: LoadedAdapter, adapter: Adapter | None = None) -> str:
    """Put an adapter into its slot on all ranks. Return why none has, if one cannot read it; else nothing.

    adapter: what was read; None to read it here.
    """
    refusal = b""
    try:
        adapter = adapter or part.read_adapter(loaded)
    except (CheckpointError, UnsupportedModelError) as fault:
        refusal = f"rank {group.rank}: {fault}".encode()
    if refusals := [one for one in group.exchange(refusal) if one]:
        return refusals[0].decode()
    assert adapter is not None, "an adapter that was neither read nor refused"
    part.load_adapter(loaded, adapter)
    return ""


class _Job(Task):
    """Wakes its caller when it is done, so that the caller can wait for a while at a time."""

    __slots__ = ("_woken",)

    def __init__(self, work: Callable[[], object], woken: "SimpleQueue[None]") -> None:
        super().__init__(work)
        self._woken = woken

    def do(self) -> None:
        super().do()
        self._woken.put(None)


class Leader:
    """Leads all ranks together, as rank 0. It takes over its own part of the work, the crew and the group."""

    def __init__(
        self, part: RankPart, crew: Crew, group: Group, alone: Callable[[], object] = lambda: None
    ) -> None:
        """Lead the ranks. alone: called when this process is the only one again."""
        self._part, self._crew, self._group, self._alone = part, crew, group, alone
        self._workers = Workers(1, "rank 0")
        self._job: _Job | None = None
        """The last job that a caller waits for."""
        self._woken: SimpleQueue[None] = SimpleQueue()
        self._closed = self._ended = False
        # The other thread owns these while it has a job:
        self._number = 0
        self._broken: DeviceError | None = None
        self._going: dict[TransferId, list[Landed]] = {}
        """Reports of transfers that have not landed on all ranks, from those on which they have."""
        self._under_way = deque[Step]()
        """Steps that have begun and not ended on this rank."""
        self._told: list[Landed] = []
        """Reports returned since the last step began. An interrupt may have struck before they were taken."""

    @property
    def carrier(self) -> Carrier | None:
        """Return rank 0's carrier."""
        return self._part.carrier

    @property
    def ahead(self) -> bool:
        """Tell whether plans are begun before the one before is over."""
        return self._part.ahead

    def begin(self, plan: Plan) -> Step:
        """Begin a plan on all ranks. Its `outcome` raises any failure."""
        self._told = []
        self._workers.put(Task(partial(self._begin, plan)))
        return _UnderWay(self)

    def run(self, plan: Plan) -> Outcome:
        """Run a plan on all ranks to its end. Raises DeviceError if one of them has failed."""
        return self.begin(plan).outcome()

    def end(self) -> Outcome:
        """Return the outcome of the oldest step that has not ended.

        Raises DeviceError if a rank has failed.
        """
        return self._do(self._finish)

    def load_adapter(self, loaded: LoadedAdapter, adapter: Adapter) -> None:
        """Put a LoRA adapter into its slot on all ranks. The others read it anew.

        Raises CheckpointError if one of them cannot, or finds another one: then none has it. Raises
        DeviceError if a rank has failed.
        """
        if refusal := self._do(partial(self._load_adapter, loaded, adapter)):
            raise CheckpointError(refusal)

    def settle(self) -> tuple[Landed, ...]:
        """Wait for all that is under way after an interrupted call: all ranks have run its plan, or none.

        Returns the transfers that have landed, those included that an interrupted call did not return. Raises
        DeviceError if a rank has failed.
        """
        return self._do(self._settle)

    def free_kv(self) -> None:
        """Give back the memory of KV blocks on all ranks, while nothing is under way. Raises DeviceError if a
        rank has failed."""
        self._do(self._free_kv)

    def check(self) -> None:
        """Raise DeviceError if a rank has failed, also between steps."""
        self._check()

    def close(self) -> None:
        """Close all ranks and end the other processes.

        After an interrupt call it again; otherwise that does nothing.
        """
        if self._closed:
            return
        if not (self._ended and self._job is not None and self._job.done):
            with suppress(DeviceError):  # An earlier call has raised it.
                self._do(self._end)
        self._crew.close()
        if self._job is None or self._job.done:  # Otherwise its thread hangs in the device for ever.
            self._workers.close()
            self._alone()
        self._closed = True

    def _do(self, work: Callable[[], T]) -> T:
        """Do the work on the other thread, behind work that an interrupted call may have left there."""
        results: list[T] = []
        job = self._job = _Job(lambda: results.append(work()), self._woken)
        self._workers.put(job)
        self._await(job)
        job.result()
        return results[0]

    def _await(self, job: _Job) -> None:
        late: float | None = None
        while not job.done:
            with suppress(Empty):
                self._woken.get(timeout=_GLANCE)
            failure = self._crew.failure or self._broken  # Other followers may still wait for messages.
            if failure is None or job.done:
                continue
            late = late or monotonic() + _LET_GO
            if monotonic() > late:
                raise failure

    # ---- on the other thread

    def _begin(self, plan: Plan) -> None:
        with self._unbroken():
            self._send(_Kind.BEGIN, plan)
            self._going.update((transfer.id, []) for transfer in plan.transfers)
            self._under_way.append(self._part.begin(plan))
            self._group.check()

    def _load_adapter(self, loaded: LoadedAdapter, adapter: Adapter) -> str:
        with self._unbroken():
            self._send(_Kind.ADAPTER, adapter=loaded)
            refusal = _put_adapter(self._part, self._group, loaded, adapter)
            self._group.check()
            return refusal

    def _finish(self) -> Outcome:
        with self._unbroken():
            collect = bool(self._going)
            self._send(_Kind.END, collect=collect)
            outcome = self._under_way.popleft().outcome()
            self._group.check()
            if not collect:
                assert not outcome.landed, "what has landed has set out before"
                return outcome
            landed = self._landed(outcome.landed)
            self._told += landed
            return replace(outcome, landed=tuple(landed))

    def _settle(self) -> tuple[Landed, ...]:
        with self._unbroken():
            self._send(_Kind.SETTLE, collect=True)
            self._under_way.clear()
            self._told += self._landed(self._part.settle())
            assert not self._going, "a transfer that a rank does not know of"
            return tuple(self._told)

    def _free_kv(self) -> None:
        with self._unbroken():
            self._send(_Kind.FREE_KV)
            self._part.free_kv()

    def _end(self) -> None:
        if self._ended:
            return
        self._ended, grace = True, 0.0
        try:
            with suppress(DeviceError), self._unbroken():
                self._send(_Kind.CLOSE)
                grace = _GRACE
            if not grace:
                self._group.abort()
            self._part.close()
            self._group.close()
        finally:
            self._crew.close(grace)

    def _send(
        self,
        kind: _Kind,
        plan: Plan | None = None,
        collect: bool = False,
        adapter: LoadedAdapter | None = None,
    ) -> None:
        self._crew.send(_MESSAGES.encode(_Message(self._number, kind, plan, collect, adapter)))
        self._number += 1

    def _landed(self, own: tuple[Landed, ...]) -> list[Landed]:
        """Return the transfers that have landed on all ranks since the last call."""
        everywhere = []
        for report in self._group.exchange(_REPORTS.encode(_Report(own))):
            for landed in _REPORTS.decode(report).landed:
                reports = self._going[landed.id]
                reports.append(landed)
                if len(reports) == self._group.ranks:
                    everywhere.append(_joined(self._going.pop(landed.id)))
        return everywhere

    @contextmanager
    def _unbroken(self) -> Iterator[None]:
        """End all ranks if anything within fails, or if a rank has failed meanwhile."""
        if self._broken is not None:
            raise self._broken
        try:
            self._check()
            yield
            self._check()
        except BaseException as fault:
            error = self._crew.verdict(fault)
            if not isinstance(error, DeviceError):
                error = DeviceError(
                    f"rank 0 of {self._group.ranks} failed with {type(fault).__name__}: {fault}; all ranks "
                    "end: restart them"
                )
            self._broken = error
            if error is fault:
                raise
            raise error from fault

    def _check(self) -> None:
        if self._crew.failure is not None:
            raise self._crew.failure


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """A step is under way on all ranks."""

    _leader: Leader

    def outcome(self) -> Outcome:
        return self._leader.end()


def _joined(reports: Sequence[Landed]) -> Landed:
    """Join all ranks' reports of one transfer: the longest time, and the blocks that any of them has lost."""
    lost = sorted({index for report in reports for index in report.lost})
    gone = dict.fromkeys(key for report in reports for key in report.gone)
    return Landed(reports[0].id, max(report.seconds for report in reports), tuple(lost), tuple(gone))
