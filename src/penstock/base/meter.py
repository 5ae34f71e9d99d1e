"""Counts of what streams, as values: where weights and KV rest, what moving them has taken; two of these tell
what happens in between."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise

from penstock.base.tiers import Tier

_STEPS = 16
"""Over which a prompt's rate is taken: later ones take longer, since they look back further."""


@dataclass(frozen=True, slots=True)
class ExpertCounts:
    """Counts the experts that layers were asked for since the start, where not all of them rest on DEVICE.

    asked, hit: all, and those that were on DEVICE.
    from_disk: those of the others that were on DISK; the rest were on HOST.
    copied, read: bytes that came for them, HOST to DEVICE and DISK to HOST.
    fetched: of `copied`, what a device has fetched and counted by itself.
    age: seconds since that was so; of a difference, how much longer that is ago than it was before.
    foretold, right: those that a layer foretold of the next, to come early; and those of them that were then
    missing.
    computed: those of the others that the CPU computed where they rest; the rest came.
    worked: seconds in which the CPU computed them.
    disk_bytes, disk_seconds: all that was read from DISK for them, wrong ones included, and the time in which
    any of it was.
    """

    asked: int = 0
    hit: int = 0
    from_disk: int = 0
    copied: int = 0
    read: int = 0
    fetched: int = 0
    age: float = 0.0
    foretold: int = 0
    right: int = 0
    computed: int = 0
    worked: float = 0.0
    disk_bytes: int = 0
    disk_seconds: float = 0.0

    @property
    def found(self) -> Mapping[str, int]:
        """Return how many of those that were asked for were on each tier."""
        missed = self.asked - self.hit
        return {"device": self.hit, "host": missed - self.from_disk, "disk": self.from_disk}

    @property
    def hit_rate(self) -> float:
        """Return the share that was on DEVICE, 0 where nothing was asked for."""
        return self.hit / self.asked if self.asked else 0.0

    @property
    def disk_rate(self) -> float:
        """Return the bytes a second of DISK while it was read, 0 where it was not."""
        return self.disk_bytes / self.disk_seconds if self.disk_seconds else 0.0

    @property
    def by_place(self) -> Mapping[str, int]:
        """Return how many of those that were not on DEVICE were computed where."""
        return {"cpu": self.computed, "device": self.asked - self.hit - self.computed}

    @property
    def cpu_share(self) -> float:
        """Return the share that the CPU computed of those that were not on DEVICE, 0 without any."""
        return self.computed / max(self.asked - self.hit, 1)

    def since(self, before: "ExpertCounts") -> "ExpertCounts":
        """Return the same, counting only what came after `before`."""
        names = (field.name for field in fields(self))
        return ExpertCounts(*(getattr(self, name) - getattr(before, name) for name in names))

    def rate(self, seconds: float) -> float:
        """Return the bytes a second that came to DEVICE, of a difference over `seconds`.

        What a device counts by itself is seen later, and is of a time that is seen later as well.
        """
        own = seconds - self.age
        return (self.copied - self.fetched) / seconds + (self.fetched / own if own > 0 else 0.0)


@dataclass(frozen=True, slots=True)
class WeightStats:
    """The placement of weights, and the traffic that streaming them has caused since the engine started."""

    device: int
    host: int
    disk: int
    """Bytes with their home on each tier, rings not counted."""
    device_ring: int
    host_ring: int
    """Bytes of the rings."""
    passes: int
    """Passes that have begun."""
    copied: int
    """Bytes HOST to DEVICE, loading not counted."""
    read: int
    """Bytes DISK to HOST, loading not counted."""
    stalled_link: float
    stalled_disk: float
    """Seconds that arithmetic waited for weights, by what was late."""
    link_rate: float
    disk_rate: float
    """Bytes per second: ceilings measured at start. 0: no such link is in use."""
    predicted: float
    """Seconds of a pass that decodes one sequence. A pass with some of a prompt takes longer; of those
    nothing is predicted."""
    binding: str
    """The bottleneck of a pass: "disk", "link" or "compute"."""
    experts: ExpertCounts = ExpertCounts()
    by_cpu: int = 0
    shared: int = 0
    worked: float = 0.0
    """Feed-forwards that a CPU computes in passes that it shares: bytes; the passes; the seconds of that."""

    @property
    def cpu_rate(self) -> float:
        """Return the bytes a second of feed-forwards that the CPU computed with, while it did."""
        return self.by_cpu * self.shared / self.worked if self.worked else 0.0

    @property
    def streams(self) -> bool:
        """Tell whether any weights stream; what fits stays on the device."""
        return self.device_ring > 0

    def since(self, before: "WeightStats") -> "WeightStats":
        """Return the same, counting only what came after `before`.

        Which link was late may be corrected later: a wait taken back counts as none.
        """
        return replace(
            self,
            passes=self.passes - before.passes,
            copied=self.copied - before.copied,
            read=self.read - before.read,
            experts=self.experts.since(before.experts),
            shared=self.shared - before.shared,
            worked=self.worked - before.worked,
            stalled_link=max(self.stalled_link - before.stalled_link, 0.0),
            stalled_disk=max(self.stalled_disk - before.stalled_disk, 0.0),
        )

    def flow(self, seconds: float) -> "Flow":
        """Return all that was counted, as rates over `seconds`."""
        if seconds <= 0:
            return Flow(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        copied = (self.copied - self.experts.copied) / seconds + self.experts.rate(seconds)
        read = self.read / seconds
        return Flow(
            copied,
            read,
            copied / self.link_rate if self.link_rate else 0.0,
            read / self.disk_rate if self.disk_rate else 0.0,
            _share(self.stalled_link, seconds),
            _share(self.stalled_disk, seconds),
        )


@dataclass(frozen=True, slots=True)
class LayerExperts:
    """Says how the experts of a layer are used, in their order.

    rates: the share of recent steps that asked for each.
    tiers: where each is when a step begins; DEVICE also for a copy in a slot there.
    """

    layer: int
    rates: list[float]
    tiers: list[Tier]


@dataclass(frozen=True, slots=True)
class ExpertMap:
    """Holds the experts of all layers that have some, where not all of them rest on DEVICE.

    age: seconds since it was so.
    """

    layers: Sequence[LayerExperts] = ()
    age: float = 0.0


@dataclass(frozen=True, slots=True)
class Flow:
    """Holds the rates of streaming over an interval."""

    copied: float
    read: float
    """Bytes per second HOST to DEVICE and DISK to HOST."""
    copied_share: float
    read_share: float
    """The same as shares of what was measured at start, above 1 where that was surpassed; 0 where there is no
    such link."""
    waited_link: float
    waited_disk: float
    """Shares of the time for which arithmetic waited."""


@dataclass(frozen=True, slots=True)
class KVStats:
    """The KV of contexts longer than the device holds: where it rests, and bytes moved since the engine
    started."""

    host: int
    disk: int
    """Bytes of the requests of the last step, on each tier; what is kept for later ones is not counted."""
    room: int
    """Bytes of KV that host memory has room for."""
    copied: int
    """Bytes that were copied to DEVICE."""
    sent: int
    """Bytes that were copied from DEVICE."""
    read: int = 0
    written: int = 0
    """Bytes from DISK to HOST, and from HOST to DISK."""

    def since(self, before: "KVStats") -> "KVStats":
        """Return the same, counting only what came after `before`."""
        return replace(
            self,
            copied=self.copied - before.copied,
            sent=self.sent - before.sent,
            read=self.read - before.read,
            written=self.written - before.written,
        )

    @property
    def streams(self) -> bool:
        """Tell whether anything rests beyond the device, or did."""
        return self.host + self.disk + self.copied + self.sent > 0


SHARES = (0.001, 0.003, 0.01, 0.03, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Upper ends of the buckets in which bounds on missed attention are counted."""


@dataclass(frozen=True, slots=True)
class MissedStats:
    """Counts of what attention policies have left out since the engine started.

    A policy chooses the blocks that queries read in a layer. A bound is an upper one, of the share of a
    query's attention in a head that lies in blocks that were not read. For a run of a prompt it is of 16
    of the queries, unless a limit is set. What was read after all, because a bound was above the limit,
    is not missed.
    """

    choices: int = 0
    fallbacks: int = 0
    """Choices that might have missed more than the limit: everything was read."""
    blocks_read: int = 0
    blocks: int = 0
    """Blocks that were read, and that there were to choose from, of all choices."""
    most: float = 0.0
    """The largest bound, of any head and query."""
    worst_total: float = 0.0
    mean_total: float = 0.0
    """Sums over choices: of each one's largest bound, and of its mean over heads and queries."""
    worst_buckets: tuple[int, ...] = (0,) * (len(SHARES) + 1)
    mean_buckets: tuple[int, ...] = (0,) * (len(SHARES) + 1)
    """Choices whose mean lies at or below each of SHARES and above the one before; the last lie above all."""

    @property
    def worst(self) -> float:
        """Return the largest bound of a choice, on average over choices."""
        return self.worst_total / self.choices if self.choices else 0.0

    @property
    def mean(self) -> float:
        """Return the mean bound of a choice, on average over choices."""
        return self.mean_total / self.choices if self.choices else 0.0

    @property
    def read(self) -> float:
        """Return the share of blocks that was read."""
        return self.blocks_read / self.blocks if self.blocks else 1.0

    def since(self, before: "MissedStats") -> "MissedStats":
        """Return the same, counting only what came after `before`; `most` stays that of all, if anything
        came."""
        chosen = self.choices - before.choices
        return MissedStats(
            chosen,
            self.fallbacks - before.fallbacks,
            self.blocks_read - before.blocks_read,
            self.blocks - before.blocks,
            self.most if chosen else 0.0,
            self.worst_total - before.worst_total,
            self.mean_total - before.mean_total,
            tuple(a - b for a, b in zip(self.worst_buckets, before.worst_buckets, strict=True)),
            tuple(a - b for a, b in zip(self.mean_buckets, before.mean_buckets, strict=True)),
        )


@dataclass(frozen=True, slots=True)
class Direction:
    """Counts the traffic one way between two tiers."""

    bytes: int
    seconds: float
    """Seconds that bytes were under way."""
    lost: int
    """Blocks that did not get there."""

    @property
    def rate(self) -> float:
        """Return bytes per second, 0 if nothing moved."""
        return self.bytes / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class TierStats:
    """The tiers on which prompts were found, and what was kept for later ones, since the engine started."""

    prompt_tokens: int
    found_device: int
    found_host: int
    found_disk: int
    """Prompt tokens whose KV was found, by the tier on which it was."""
    up: Direction
    down: Direction
    inward: Direction
    outward: Direction
    """Host to device, device to host, disk to host, host to disk."""
    given_up_device: int
    given_up_host: int
    given_up_disk: int
    """Blocks that made room for others."""
    recomputed: int
    """Blocks that were there, but slower to bring than to compute."""
    late: int
    """Blocks that were waited for in vain."""
    cached_host: int
    cached_disk: int
    """Blocks that are there and not in use, and records on disk."""
    disk_bytes: int
    checksum_failures: int
    io_failures: int
    quarantined: int
    disk_off: bool
    """The disk is left alone for a while if this is set, since it kept failing."""

    @property
    def moved(self) -> bool:
        """Tell whether any block has moved between tiers."""
        return any(way.bytes or way.lost for way in (self.up, self.down, self.inward, self.outward))


@dataclass(frozen=True, slots=True)
class Passes:
    """Counts the steps of the engine since it started, and their seconds. Each step is a pass over the model.

    In a decode step every request adds a token; `WeightStats.predicted` is of these alone. The others compute
    some of a prompt: prefill.
    """

    decode: int = 0
    decode_seconds: float = 0.0
    prefill: int = 0
    prefill_seconds: float = 0.0

    def and_one(self, seconds: float, *, decode: bool) -> "Passes":
        """Return the same with one more step, of so many seconds."""
        if decode:
            return replace(self, decode=self.decode + 1, decode_seconds=self.decode_seconds + seconds)
        return replace(self, prefill=self.prefill + 1, prefill_seconds=self.prefill_seconds + seconds)

    def decode_pass(self, before: "Passes") -> float:
        """Return the mean seconds of a decode step since `before`, 0 if there was none."""
        count = self.decode - before.decode
        return (self.decode_seconds - before.decode_seconds) / count if count else 0.0

    def prefill_pass(self, before: "Passes") -> float:
        """Return the mean seconds of a step with some of a prompt since `before`, 0 if there was none."""
        count = self.prefill - before.prefill
        return (self.prefill_seconds - before.prefill_seconds) / count if count else 0.0


@dataclass(frozen=True, slots=True)
class MeterSample:
    """Holds the counts at one moment.

    when: seconds of perf_counter.
    kv: of long contexts; None if there is no room for any.
    """

    when: float
    weights: WeightStats
    kv: KVStats | None


class PromptProgress:
    """Follows the progress of a prompt of `length` tokens, by the time."""

    def __init__(self, length: int, begin: float, computed: int) -> None:
        """computed: tokens by the engine until now, when the prompt begins."""
        self.length, self.begin, self.reached = length, begin, 0
        self._steps = deque([(begin, computed)], _STEPS)

    def see(self, now: float, reached: int, computed: int) -> None:
        """Note how far the prompt is.

        now: seconds. reached: tokens of the prompt; 0 if no step of it is done, or its last one is.
        computed: tokens by the engine since it started.
        """
        if computed > self._steps[-1][1]:  # until then it is of an earlier prompt
            self.reached = max(self.reached, min(reached, self.length))
            self._steps.append((now, computed))

    @property
    def rate(self) -> float:
        """Return tokens a second; 0 if not known."""
        (first, least), (last, most) = self._steps[0], self._steps[-1]
        return (most - least) / (last - first) if last > first else 0.0

    def left(self, now: float) -> float:
        """Return the seconds until the prompt is computed, where `rate` is known."""
        return max((self.length - self.reached) / self.rate - (now - self._steps[-1][0]), 0.0)


def pass_seconds(seen: Iterable[MeterSample]) -> float:
    """Return the mean seconds of a pass in `seen`, from the first beginning of one to the last.

    0 if fewer than two beginnings are seen.
    """
    begun = [later for earlier, later in pairwise(seen) if later.weights.passes > earlier.weights.passes]
    if len(begun) < 2:
        return 0.0
    first, last = begun[0], begun[-1]
    return (last.when - first.when) / (last.weights.passes - first.weights.passes)


def _share(waited: float, seconds: float) -> float:
    """Return the share of an interval that was waited.

    A wait is counted when it is over, and may have begun before the interval.
    """
    return min(waited / seconds, 1.0)
