"""Counts and measures, for Prometheus.

Names end as those of other engines do, so that their dashboards need another prefix and little else. All of
them are there as soon as the model is, also those of tiers that are not in use.
"""

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from time import monotonic

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from penstock.api.outputs import Completion
from penstock.api.snapshots import MemoryUse, PrefixCounts
from penstock.base.meter import SHARES, Direction, KVStats, MissedStats, Passes, TierStats, WeightStats
from penstock.engine.engine import Stats
from penstock.server.broker.backend import LocalBackend
from penstock.server.broker.gaps import Gaps
from penstock.server.broker.growing import Growing

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
"""Up to an hour: a first token after a long prompt may take that."""
_SECONDS_EACH = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_OF_EXPECTED = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 4, 10)
_TOKENS = tuple(4**power for power in range(11))
"""Up to a million."""
_PREFIX = "penstock:"
_LOOKS = 1.0
"""Seconds between two looks from which a link's rate is taken, at least: more than one may read the
metrics."""
_NOTHING = Direction(0, 0.0, 0)
NO_TIERS = TierStats(
    0, 0, 0, 0, _NOTHING, _NOTHING, _NOTHING, _NOTHING, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, False
)
NO_KV = KVStats(0, 0, 0, 0, 0)
"""Counts of an engine without KV beyond the device."""


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Measures a request in seconds: until its turn came, from then to its first token, and from there to its
    last."""

    queue: float
    prefill: float
    decode: float

    @property
    def whole(self) -> float:
        """Return the seconds from its arrival to its last token."""
        return self.queue + self.prefill + self.decode


class Metrics:
    """Counts and measures the requests of one server. All is called on its loop."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._first = self._histogram(
            "time_to_first_token_seconds", "From a request to the first token of it.", _SECONDS
        )
        self._off = self._histogram(
            "time_to_first_token_of_expected",
            "The same, in units of what was forecast when the request came.",
            _OF_EXPECTED,
        )
        self._gap = Gaps(
            _PREFIX + "inter_token_latency_seconds",
            "Between two steps that brought tokens of a request.",
            _SECONDS_EACH,
        )
        self._registry.register(self._gap)
        self._each = self._histogram(
            "time_per_output_token_seconds", "Between tokens of an output, on average.", _SECONDS_EACH
        )
        self._whole = self._histogram(
            "e2e_request_latency_seconds", "From a request to its last token.", _SECONDS
        )
        self._queue = self._histogram(
            "request_queue_time_seconds", "From a request to its first step.", _SECONDS
        )
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "From a request's first step to its first token.", _SECONDS
        )
        self._decode = self._histogram(
            "request_decode_time_seconds", "From a request's first token to its last.", _SECONDS
        )
        self._long = self._histogram("request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self._said = self._histogram("request_generation_tokens", "Tokens of an output.", _TOKENS)
        self._ended = self._counter(
            "request_success", "Outputs that are complete, by what ended them.", "finished_reason"
        )
        self._left = self._counter("request_abandoned", "Requests whose client went before their end.")
        self._answers = self._counter("http_requests", "Requests, by route and status.", "route", "status")
        self._prompts = self._counter("prompt_tokens", "Tokens of prompts, computed or found.")
        self._asked = self._counter(
            "prefix_cache_queries", "Tokens of prompts that were looked for among earlier ones."
        )
        self._found = self._counter(
            "prefix_cache_hits", "Tokens of prompts whose KV was found, by where.", "tier"
        )
        for tier in ("device", "host", "disk"):
            self._found.labels(tier)
        for reason in ("stop", "length"):
            self._ended.labels(reason)
        self._looks = True
        ProcessCollector(registry=self._registry)

    def _histogram(self, name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(_PREFIX + name, what, buckets=buckets, registry=self._registry)

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(_PREFIX + name, what, labels, registry=self._registry)

    def watch(self, backend: LocalBackend, outputs: Callable[[], int]) -> None:
        """Show the engine's own counts too from now on. outputs: returns those that are not complete."""
        self._looks = backend.llm.limits.prefix_cache
        self._registry.register(_EngineCollector(backend, outputs))

    def answered(self, route: str, status: int) -> None:
        """Count an answer, by its route and status."""
        self._answers.labels(route, str(status)).inc()

    def began(self, seconds: float, expected: float | None) -> None:
        """Observe a request's first token, so many seconds after it came. expected: what was forecast."""
        self._first.observe(seconds)
        if expected:
            self._off.observe(seconds / expected)

    def went_on(self, gaps: Iterable[float]) -> None:
        """Observe more tokens of requests, each so many seconds after its last."""
        for seconds, requests in Tally(gaps).items():
            self._gap.observe(seconds, requests)

    def completed(self, times: RequestTimes, completion: Completion) -> None:
        """Observe a request that is complete."""
        self._whole.observe(times.whole)
        self._queue.observe(times.queue)
        self._prefill.observe(times.prefill)
        self._decode.observe(times.decode)
        longest = max(len(output.tokens) for output in completion.outputs)
        if longest > 1:
            self._each.observe(times.decode / (longest - 1))
        for output in completion.outputs:
            self._ended.labels(output.finish_reason.value).inc()
            self._said.observe(len(output.tokens))
        self._long.observe(len(completion.prompt_tokens))
        self._prompts.inc(len(completion.prompt_tokens))
        if self._looks:
            self._asked.inc(len(completion.prompt_tokens))
        beyond = completion.cached_host + completion.cached_disk
        for tier, count in (
            ("device", completion.cached_tokens - beyond),
            ("host", completion.cached_host),
            ("disk", completion.cached_disk),
        ):
            if count:
                self._found.labels(tier).inc(count)

    def abandoned(self) -> None:
        """Count a request that its client has left."""
        self._left.inc()

    def text(self) -> bytes:
        """Return all metrics, as Prometheus reads them."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    """Reports the engine's counts, at the moment they are asked for."""

    def __init__(self, backend: LocalBackend, outputs: Callable[[], int]) -> None:
        self._backend, self._outputs = backend, outputs
        self._rates, self._growing = _LinkRates(), Growing()

    def collect(self) -> list[Metric]:
        stats, memory = self._backend.stats, self._backend.llm.memory
        return self._growing.of(self._now(stats, memory), stats.engine)

    def _now(self, stats: Stats, memory: MemoryUse) -> Iterator[Metric]:
        weights, kv, tiers = memory.weights, stats.kv or NO_KV, stats.tiers or NO_TIERS
        yield from _of_steps(stats, max(self._outputs() - stats.running, stats.waiting))
        yield from _of_passes(stats.passes, weights)
        yield from _of_weights(weights)
        crossed = _crossed(weights, kv, tiers)
        yield from _of_links(weights, crossed, self._rates.of(crossed, monotonic()))
        yield from _of_kv(memory, stats, kv, tiers)
        yield from _of_missed(stats.missed)
        yield from _of_tiers(tiers, memory.prefixes)


class _LinkRates:
    """Computes the rates of what only grows, between two looks."""

    def __init__(self) -> None:
        self._when, self._counted, self._rates = 0.0, dict[str, int](), dict[str, float]()

    def of(self, counted: Mapping[str, int], now: float) -> Mapping[str, float]:
        """Return how much each has grown a second since the last look; of a look that comes too soon, the
        rates of the one before. What is less than it was is of another engine, and counts from 0."""
        seconds = now - self._when
        if seconds >= _LOOKS or not self._counted:
            before, self._when, self._counted = self._counted, now, dict(counted)
            self._rates = {name: max(n - before.get(name, n), 0) / seconds for name, n in counted.items()}
        return self._rates


def _of_steps(stats: Stats, waiting: int) -> Sequence[Metric]:
    held = 1 - stats.kv_blocks_free / stats.kv_blocks
    return (
        _gauge("num_requests_running", "Outputs that are being computed.", stats.running),
        _gauge("num_requests_waiting", "Outputs that wait for room or their turn.", waiting),
        _gauge("kv_cache_usage_perc", "Share of the device's KV blocks that are held, 1 is all.", held),
        _gauge(
            "kv_blocks_cached",
            "KV blocks of the device that nobody holds and that may be found.",
            stats.kv_blocks_cached,
        ),
        _counter(
            "num_preemptions", "Requests that had to give up their blocks and start anew.", stats.preemptions
        ),
        _counter("iterations", "Steps of the engine.", stats.steps),
        _counter("computed_tokens", "Tokens computed, of prompts and outputs.", stats.computed_tokens),
        _counter("generation_tokens", "Tokens of outputs.", stats.output_tokens),
        _counter("spec_decode_num_drafts", "Drafts that were verified.", stats.drafts[0]),
        _counter("spec_decode_num_draft_tokens", "Tokens of these drafts.", stats.drafts[1]),
        _counter("spec_decode_num_accepted_tokens", "Those that were accepted.", stats.drafts[2]),
    )


def _of_passes(passes: Passes, weights: WeightStats) -> Sequence[Metric]:
    counts = {"decode": passes.decode, "prefill": passes.prefill}
    seconds = {"decode": passes.decode_seconds, "prefill": passes.prefill_seconds}
    return (
        _counter("passes", "Steps of the engine, each a pass over the model.", counts, "kind"),
        _counter("pass_seconds", "Time that they took.", seconds, "kind"),
        # With the same label as what was measured: what a prompt's passes take is not predicted.
        _gauge(
            "pass_predicted_seconds",
            "What a pass was predicted to take at start; 0 if it was not.",
            {"decode": weights.predicted},
            "kind",
        ),
    )


def _of_missed(missed: MissedStats) -> Sequence[Metric]:
    ends = [*map(floatToGoString, SHARES), "+Inf"]
    shares = HistogramMetricFamily(
        _PREFIX + "attention_missed_share",
        "Bound on the attention that a policy's choice has missed, 1 is all.",
        labels=["heads"],
    )
    for heads, buckets, total in (
        ("worst", missed.worst_buckets, missed.worst_total),
        ("mean", missed.mean_buckets, missed.mean_total),
    ):
        shares.add_metric([heads], list(zip(ends, accumulate(buckets), strict=True)), total)
    blocks = {"read": missed.blocks_read, "skipped": missed.blocks - missed.blocks_read}
    return (
        shares,
        _gauge(
            "attention_missed_share_max",
            "The largest of these bounds since the start, of any head and token that has one.",
            missed.most,
        ),
        _counter(
            "attention_choices",
            "Choices of attention policies: blocks that queries read in a layer.",
            missed.choices,
        ),
        _counter(
            "attention_fallbacks",
            "Of these, the ones that might have missed too much: everything was read.",
            missed.fallbacks,
        ),
        _counter(
            "attention_blocks",
            "KV blocks that policies chose from, by what became of them.",
            blocks,
            "choice",
        ),
    )


def _of_weights(stats: WeightStats) -> Sequence[Metric]:
    at = {"device": stats.device, "host": stats.host, "disk": stats.disk}
    waits, experts = {"link": stats.stalled_link, "disk": stats.stalled_disk}, stats.experts
    return (
        _gauge("weights_bytes", "Bytes of weights, by where they stay.", at, "tier"),
        _counter(
            "weights_copied_bytes", "Bytes of weights that came from the host to the device.", stats.copied
        ),
        _counter("weights_read_bytes", "Bytes of weights that were read from disk.", stats.read),
        _counter("weights_stalled_seconds", "Time that arithmetic waited for weights.", waits, "cause"),
        _counter("weights_cpu_passes", "Passes in which the CPU computes feed-forwards.", stats.shared),
        _counter(
            "experts_asked",
            "Experts that layers were asked for, where not all rest on the device, by whether it had them.",
            {"hit": experts.hit, "miss": experts.asked - experts.hit},
            "found",
        ),
        _counter("experts_found", "The same, by the tier where they were.", experts.found, "tier"),
        _counter("experts_computed", "Misses, by where they were computed.", experts.by_place, "place"),
        _counter(
            "experts_fetched_bytes",
            "Bytes of those that the device did not have, by the tier where they were.",
            {"host": experts.copied - experts.read, "disk": experts.read},
            "tier",
        ),
        _gauge(
            "experts_age_seconds",
            "Time since a device has counted them: it is not waited for while steps run.",
            experts.age,
        ),
        _counter(
            "experts_foretold",
            "Experts that the layer before foretold, by whether they were asked for and missing.",
            {"right": experts.right, "wrong": experts.foretold - experts.right},
            "outcome",
        ),
    )


def _crossed(weights: WeightStats, kv: KVStats, tiers: TierStats) -> Mapping[str, int]:
    """Return the bytes that have gone over each link: weights, KV of long contexts, and KV that is kept for
    later requests."""
    return {
        "host to device": weights.copied + kv.copied + tiers.up.bytes,
        "device to host": kv.sent + tiers.down.bytes,
        "disk to host": weights.read + kv.read + tiers.inward.bytes,
        "host to disk": kv.written + tiers.outward.bytes,
    }


def _of_links(stats: WeightStats, crossed: Mapping[str, int], rates: Mapping[str, float]) -> Sequence[Metric]:
    ceilings = {"host to device": stats.link_rate, "disk to host": stats.disk_rate}
    return (
        _counter("link_bytes", "Bytes of weights and KV that have crossed a link.", crossed, "link"),
        _gauge(
            "link_bytes_per_second",
            "What crosses a link, since the metrics were last read.",
            rates,
            "link",
        ),
        _gauge(
            "link_ceiling_bytes_per_second",
            "What was measured at start; 0 if it was not.",
            ceilings,
            "link",
        ),
    )


def _of_kv(memory: MemoryUse, stats: Stats, kv: KVStats, tiers: TierStats) -> Sequence[Metric]:
    block, far = memory.budget.block_bytes, {"host": kv.host, "disk": kv.disk}
    near = kv.room // memory.host_blocks if memory.host_blocks else 0
    kept = {
        "device": stats.kv_blocks_cached * block,
        "host": tiers.cached_host * near,
        "disk": tiers.disk_bytes,
    }
    held = {"device": (stats.kv_blocks - stats.kv_blocks_free) * block, **far}
    room = {"device": stats.kv_blocks * block, "host": kv.room}
    return (
        _gauge("kv_held_bytes", "KV of requests under way, by where it rests.", held, "tier"),
        _gauge("kv_kept_bytes", "KV that is kept for later requests, by where.", kept, "tier"),
        _gauge("kv_room_bytes", "Memory for KV.", room, "tier"),
        _gauge("far_kv_bytes", "KV of long contexts, by where it rests.", far, "tier"),
        _counter("far_kv_copied_bytes", "Bytes of it that came to the device.", kv.copied),
        _counter("far_kv_sent_bytes", "Bytes of it that left the device.", kv.sent),
        _counter("far_kv_read_bytes", "Bytes of it that were read from disk.", kv.read),
        _counter("far_kv_written_bytes", "Bytes of it that were written to disk.", kv.written),
    )


def _of_tiers(stats: TierStats, prefixes: PrefixCounts) -> Sequence[Metric]:
    ways = {"up": stats.up, "down": stats.down, "in": stats.inward, "out": stats.outward}.items()
    decided = {"load": prefixes.loaded_blocks, "recompute": stats.recomputed, "late": stats.late}
    made_room = {"device": prefixes.evicted_blocks, "host": stats.given_up_host, "disk": stats.given_up_disk}
    return (
        _counter(
            "kv_moved_bytes",
            "Bytes of KV blocks that went between tiers.",
            {route: way.bytes for route, way in ways},
            "route",
        ),
        _counter(
            "kv_moving_seconds",
            "Time that they were under way.",
            {route: way.seconds for route, way in ways},
            "route",
        ),
        _counter(
            "kv_lost_blocks",
            "KV blocks that did not get there.",
            {route: way.lost for route, way in ways},
            "route",
        ),
        _counter(
            "kv_load_decisions",
            "KV blocks found beyond the device, by what became of them.",
            decided,
            "decision",
        ),
        _counter("kv_given_up_blocks", "KV blocks that made room for others.", made_room, "tier"),
        _counter(
            "kv_checksum_failures",
            "KV blocks that were not on disk as they were written.",
            stats.checksum_failures,
        ),
        _counter("kv_io_failures", "Reads and writes of KV on disk that failed.", stats.io_failures),
        _gauge(
            "kv_quarantined_blocks",
            "KV blocks on disk that were damaged and are not used.",
            stats.quarantined,
        ),
        _gauge("kv_disk_off", "1 while the disk is left alone, since it kept failing.", stats.disk_off),
    )


def _family(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    what: str,
    value: float | Mapping[str, float],
    label: str = "",
) -> Metric:
    """Return a metric. value: of the metric, or by the label."""
    if not isinstance(value, Mapping):
        return kind(_PREFIX + name, what, value=value)
    found = kind(_PREFIX + name, what, labels=[label])
    for one, count in value.items():
        found.add_metric([one], count)
    return found


_gauge, _counter = partial(_family, GaugeMetricFamily), partial(_family, CounterMetricFamily)
