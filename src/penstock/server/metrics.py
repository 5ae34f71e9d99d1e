"""What is counted and measured, as Prometheus reads it.

Names end as those of other engines do, so that their dashboards need another prefix and little else.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.api.llm import LLM
from penstock.api.outputs import Completion
from penstock.base.meter import KVStats, TierStats, WeightStats
from penstock.engine.engine import Stats

if TYPE_CHECKING:
    from penstock.server.desk import Desk

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
"""Up to an hour: a first token after a long prompt may take that."""
_SECONDS_EACH = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_PREFIX = "penstock:"


class Metrics:
    """Of one server. All is called on its loop."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._first = self._histogram("time_to_first_token_seconds", "From a request to the first token of it.", _SECONDS)
        self._each = self._histogram("time_per_output_token_seconds", "Between tokens of an output, on average.", _SECONDS_EACH)
        self._whole = self._histogram("e2e_request_latency_seconds", "From a request to its last token.", _SECONDS)
        self._ended = Counter(
            _PREFIX + "request_success", "Outputs that are complete, by what ended them.", ["finished_reason"], registry=self._registry
        )
        self._answers = Counter(_PREFIX + "http_requests", "Requests, by route and status.", ["route", "status"], registry=self._registry)
        self._prompts = Counter(_PREFIX + "prompt_tokens", "Tokens of prompts, computed or found.", registry=self._registry)
        self._found = Counter(
            _PREFIX + "prefix_cache_hits", "Tokens of prompts whose KV was found, by where.", ["tier"], registry=self._registry
        )
        self._left = Counter(_PREFIX + "request_abandoned", "Requests whose client went before their end.", registry=self._registry)

    def _histogram(self, name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(_PREFIX + name, what, buckets=buckets, registry=self._registry)

    def watch(self, llm: LLM, desk: "Desk") -> None:
        """From now on the engine's own counts are told too."""
        self._registry.register(_Engine(llm, desk))

    def answered(self, route: str, status: int) -> None:
        self._answers.labels(route, str(status)).inc()

    def began(self, seconds: float) -> None:
        """A request's first token, so many seconds after it came."""
        self._first.observe(seconds)

    def completed(self, seconds: float, after_first: float, completion: Completion) -> None:
        """All of a request, in so many seconds, of which some went by after its first token."""
        self._whole.observe(seconds)
        longest = max(len(output.tokens) for output in completion.outputs)
        if longest > 1:
            self._each.observe(after_first / (longest - 1))
        for output in completion.outputs:
            self._ended.labels(output.finish_reason.value).inc()
        self._prompts.inc(len(completion.prompt_tokens))
        beyond = completion.cached_host + completion.cached_disk
        for tier, count in (
            ("device", completion.cached_tokens - beyond),
            ("host", completion.cached_host),
            ("disk", completion.cached_disk),
        ):
            self._found.labels(tier).inc(count)

    def abandoned(self) -> None:
        self._left.inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _Engine(Collector):
    """The engine's counts, at the moment they are asked for."""

    def __init__(self, llm: LLM, desk: "Desk") -> None:
        self._llm, self._desk = llm, desk

    def collect(self) -> Iterator[Metric]:
        stats = self._desk.stats
        yield from _of_steps(stats)
        yield from _of_weights(self._llm.booted.weights.stats())
        if stats.kv is not None:
            yield from _of_long_contexts(stats.kv)
        if stats.tiers is not None:
            yield from _of_tiers(stats.tiers)


def _of_steps(stats: Stats) -> Iterator[Metric]:
    yield _gauge("num_requests_running", "Outputs that are being computed.", stats.running)
    yield _gauge("num_requests_waiting", "Outputs that wait for room or their turn.", stats.waiting)
    yield _gauge(
        "kv_cache_usage_perc", "Share of the device's KV blocks that are held, 1 is all.", 1 - stats.kv_blocks_free / stats.kv_blocks
    )
    yield _gauge("kv_blocks_cached", "KV blocks of the device that nobody holds and that may be found.", stats.kv_blocks_cached)
    yield _counter("num_preemptions", "Requests that had to give up their blocks and start anew.", stats.preemptions)
    yield _counter("iterations", "Steps of the engine.", stats.steps)
    yield _counter("computed_tokens", "Tokens computed, of prompts and outputs.", stats.computed_tokens)
    yield _counter("generation_tokens", "Tokens of outputs.", stats.output_tokens)


def _of_weights(stats: WeightStats) -> Iterator[Metric]:
    at = GaugeMetricFamily(_PREFIX + "weights_bytes", "Bytes of weights, by where they stay.", labels=["tier"])
    for tier, size in (("device", stats.device), ("host", stats.host), ("disk", stats.disk)):
        at.add_metric([tier], size)
    yield at
    yield _counter("weights_copied_bytes", "Bytes of weights that came from the host to the device.", stats.copied)
    yield _counter("weights_read_bytes", "Bytes of weights that were read from disk.", stats.read)
    stalled = CounterMetricFamily(_PREFIX + "weights_stalled_seconds", "Time that arithmetic waited for weights.", labels=["cause"])
    stalled.add_metric(["link"], stats.stalled_link)
    stalled.add_metric(["disk"], stats.stalled_disk)
    yield stalled
    rate = GaugeMetricFamily(_PREFIX + "link_ceiling_bytes_per_second", "What was measured at start.", labels=["link"])
    rate.add_metric(["host to device"], stats.link_rate)
    rate.add_metric(["disk to host"], stats.disk_rate)
    yield rate


def _of_long_contexts(stats: KVStats) -> Iterator[Metric]:
    at = GaugeMetricFamily(_PREFIX + "far_kv_bytes", "KV of long contexts, by where it rests.", labels=["tier"])
    at.add_metric(["host"], stats.host)
    at.add_metric(["disk"], stats.disk)
    yield at
    yield _counter("far_kv_copied_bytes", "Bytes of it that came to the device.", stats.copied)
    yield _counter("far_kv_sent_bytes", "Bytes of it that left the device.", stats.sent)


def _of_tiers(stats: TierStats) -> Iterator[Metric]:
    moved = CounterMetricFamily(_PREFIX + "kv_moved_bytes", "Bytes of KV blocks that went between tiers.", labels=["route"])
    for route, one in (("up", stats.up), ("down", stats.down), ("in", stats.inward), ("out", stats.outward)):
        moved.add_metric([route], one.bytes)
    yield moved


def _gauge(name: str, what: str, value: float) -> Metric:
    return GaugeMetricFamily(_PREFIX + name, what, value=value)


def _counter(name: str, what: str, value: float) -> Metric:
    return CounterMetricFamily(_PREFIX + name, what, value=value)
