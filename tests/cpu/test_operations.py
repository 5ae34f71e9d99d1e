"""What those who run a server are told of it: ids, logs, traces and metrics of the real command, and the
files that name them."""

import http.client
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import urlsplit

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

collected = pytest.importorskip(
    "opentelemetry.proto.collector.trace.v1.trace_service_pb2", reason="needs OpenTelemetry"
)

import forks  # noqa: E402
from penstock.cli.main import main  # noqa: E402
from penstock.server.monitoring import telemetry  # noqa: E402
from penstock.server.monitoring.logs import JsonLines, TextLines, logged, note  # noqa: E402
from streams import LONG  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
KEY = "key-that-nobody-is-told"
PROMPT = "Once upon a time there was a lighthouse"
ROWS = 2
ENDLESS = {"model": "shipped", "prompt": "The sea", "max_tokens": 2000, "ignore_eos": True, "stream": True}
Answer = tuple[int, Mapping[str, str], Any]


class Collector:
    """Takes spans, as those do that OpenTelemetry's are sent to."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.news = threading.Condition()
        outer = self

        class Taken(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                assert self.path == "/v1/traces"
                outer.take(collected.ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Taken)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    def take(self, request: Any) -> None:
        with self.news:
            for resource in request.resource_spans:
                self.service = {one.key: one.value.string_value for one in resource.resource.attributes}
                self.spans += [span for scope in resource.scope_spans for span in scope.spans]
            self.news.notify_all()

    def of(self, trace: str) -> dict[str, Any]:
        """The spans of a trace by their names, when its last has come."""

        def whole() -> bool:
            return any(
                span.kind == span.SPAN_KIND_SERVER for span in self.spans if span.trace_id.hex() == trace
            )

        with self.news:
            assert self.news.wait_for(whole, LONG)
            return {span.name: span for span in self.spans if span.trace_id.hex() == trace}

    def __enter__(self) -> "Collector":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Server:
    """The command, what it logs in a file."""

    def __init__(self, folder: Path, *flags: str, environment: Mapping[str, str]) -> None:
        self.log = folder / "log"
        with self.log.open("wb") as file:
            self.process = forks.LoadedPopen(
                [sys.executable, "-m", "penstock", "serve", *flags],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=file,
                env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            )

    def events(self, kind: str) -> list[dict[str, Any]]:
        whole = self.log.read_text().rpartition("\n")[0]  # Its last line may be half written.
        return [event for event in map(json.loads, whole.splitlines()) if event["event"] == kind]

    def wait(self) -> "Server":
        until(lambda: self.process.poll() is not None or '"serving"' in self.log.read_text(), 3 * LONG)
        assert self.process.poll() is None, self.log.read_text()
        place = urlsplit(self.events("serving")[0]["address"])
        self.place = place.hostname or "", place.port or 0
        return self

    def open(
        self, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None
    ) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(*self.place, timeout=LONG)
        raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        usual = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        connection.request(method, path, raw, usual | dict(headers or {}))
        return connection

    def ask(
        self, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        connection = self.open(method, path, body, headers)
        try:
            answer = connection.getresponse()
            said = answer.read()
            return (
                answer.status,
                answer.headers,
                json.loads(said) if answer.headers["content-type"] == "application/json" else said,
            )
        finally:
            connection.close()

    def complete(self, headers: Mapping[str, str] | None = None, **fields: object) -> Answer:
        return self.ask(
            "POST",
            TEXT,
            {"model": "shipped", "prompt": PROMPT, "max_tokens": 6, "temperature": 0} | fields,
            headers,
        )

    def told(self, id: str) -> dict[str, Any]:
        """What is logged of a request."""
        found: list[dict[str, Any]] = []

        def there() -> bool:
            found[:] = [event for event in self.events("request") if event["request_id"] == id]
            return bool(found)

        until(there)
        [event] = found
        return event

    def counted(self) -> dict[tuple[str, ...], float]:
        """Each sample by its name and the values of its labels."""
        families = text_string_to_metric_families(self.ask("GET", "/metrics")[2].decode())
        return {
            (one.name.removeprefix("penstock:"), *one.labels.values()): one.value
            for family in families
            for one in family.samples
        }


def until(happens: Callable[[], object], seconds: float = LONG) -> None:
    late = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < late, "it does not happen"
        time.sleep(0.01)


@contextmanager
def streaming(server: Server, id: str, **fields: object) -> Iterator[http.client.HTTPResponse]:
    """An endless answer, of which something has come."""
    connection = server.open("POST", TEXT, ENDLESS | fields, {"X-Request-Id": id})
    try:
        answer = connection.getresponse()
        assert answer.readline().startswith(b"data: ")
        yield answer
    finally:
        connection.close()


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def server(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("operations")
    (folder / "keys").write_text(KEY)
    (folder / "settings.toml").write_text(f"""
        device = "cpu"
        dtype = "float32"
        device-memory = "400MiB"
        host-kv-memory = "64MiB"
        disk-kv-memory = "256MiB"
        max-length = 2048
        kv-directory = "{folder}/kv"
        [serve]
        port = 0
        max-sequences = {ROWS}
        max-body = 4000
        api-keys = "{folder}/keys"
        log-format = "json"
        log-level = "debug"
        """)
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
        "OTEL_BSP_SCHEDULE_DELAY": "20",
        "NO_PROXY": "127.0.0.1",
    }
    server = Server(folder, "--config", str(folder / "settings.toml"), environment=environment)
    try:
        yield server.wait()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(LONG) == 0
        assert [event["event"] for event in map(json.loads, server.log.read_text().splitlines())][-2:] == [
            "stopping",
            "stopped",
        ]
        assert server.events("settings")[0]["file"] == str(folder / "settings.toml")
        assert KEY not in server.log.read_text()
    finally:
        server.process.kill()
        server.process.wait()


# ---- ids


def test_every_response_tells_its_request_id(server: Server) -> None:
    asked: list[tuple[str, str, object, int]] = [
        ("POST", TEXT, {"model": "shipped", "prompt": "a", "max_tokens": 1}, 200),
        ("POST", TEXT, {"model": "shipped", "prompt": "a", "max_tokens": 1, "stream": True}, 200),
        ("POST", TEXT, {"model": "other", "prompt": "a"}, 404),
        ("POST", TEXT, b"{", 400),
        ("POST", TEXT, b" " * 5000, 413),
        ("GET", TEXT, None, 405),
        ("GET", "/nowhere", None, 404),
        ("GET", "/v1/models", None, 200),
        ("GET", "/health", None, 200),
        ("GET", "/", None, 200),
    ]
    for number, (method, path, body, expected) in enumerate(asked):
        status, headers, _ = server.ask(method, path, body, {"X-Request-Id": f'mine-{number}/"#{{}}~'})
        assert (status, headers["x-request-id"]) == (expected, f'mine-{number}/"#{{}}~')
        assert len(headers.get_all("x-request-id")) == 1  # type: ignore[attr-defined]
        assert server.told(f'mine-{number}/"#{{}}~')["status"] == expected
    status, headers, _ = server.ask(
        "GET", "/v1/models", headers={"Authorization": "Bearer wrong", "X-Request-Id": "refused"}
    )
    assert (status, headers["x-request-id"]) == (401, "refused")
    assert server.told("refused")["error"] == "401"


def test_an_id_that_cannot_be_written_anywhere_is_replaced(server: Server) -> None:
    sent: list[dict[str, str]] = [
        {},
        *({"X-Request-Id": wrong} for wrong in ("", " ", "a b", "a" * 129, "caf\xe9", "a\tb")),
    ]
    found = [server.ask("GET", "/health", headers=headers)[1]["x-request-id"] for headers in sent]
    assert all(re.fullmatch("req-[0-9a-f]{32}", id) for id in found)
    assert len(set(found)) == len(found)
    assert server.ask("GET", "/health", headers={"X-Request-Id": "a" * 128})[1]["x-request-id"] == "a" * 128


# ---- logs


def test_a_request_is_told_in_a_line_without_any_of_its_text(server: Server) -> None:
    begin = datetime.now(UTC)
    status, headers, said = server.complete(
        n=2, seed=1, temperature=1, prompt=f"{PROMPT} " * 20, ignore_eos=True
    )
    assert status == 200
    event = server.told(headers["x-request-id"])
    when = datetime.fromisoformat(event["time"])
    assert event["time"].endswith("Z")
    assert begin - timedelta(seconds=1) <= when <= datetime.now(UTC) + timedelta(seconds=1)
    assert (event["level"], event["method"], event["route"], event["status"], event["model"]) == (
        "info",
        "POST",
        TEXT,
        200,
        "shipped",
    )
    usage = said["usage"]
    assert (event["prompt_tokens"], event["output_tokens"]) == (
        usage["prompt_tokens"],
        usage["completion_tokens"],
    )
    assert event["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert (event["finish_reason"], event["stream"], "error" in event) == ("length", False, False)
    assert 0 <= event["queue_seconds"] <= event["first_token_seconds"] <= event["seconds"]
    again = server.told(
        server.complete(n=2, seed=1, temperature=1, prompt=f"{PROMPT} " * 20)[1]["x-request-id"]
    )
    assert again["cached_tokens"] >= 64
    log = server.log.read_text()
    assert PROMPT not in log
    assert all(choice["text"].strip() not in log for choice in said["choices"])


def test_what_is_refused_and_what_is_polled_is_told_too(server: Server) -> None:
    long = server.told(server.complete(prompt=[5] * 1000, max_tokens=10**9)[1]["x-request-id"])
    assert (long["status"], long["error"], long["level"]) == (400, "LengthError", "info")
    assert "prompt_tokens" not in long
    other = server.told(server.ask("GET", "/v1/models/some%20thing")[1]["x-request-id"])
    assert (other["status"], other["route"]) == (404, "/v1/models/{name:path}")
    lost = server.told(server.ask("GET", "/secret/place")[1]["x-request-id"])
    assert (lost["status"], lost["route"]) == (404, "unknown")
    assert "secret" not in server.log.read_text()
    assert server.told(server.ask("GET", "/ready")[1]["x-request-id"])["level"] == "debug"


def test_a_client_that_goes_is_told_as_such(server: Server) -> None:
    with streaming(server, "goes"):
        pass
    event = server.told("goes")
    assert (event["status"], event["finish_reason"], event["stream"]) == (200, "abort", True)
    assert event["output_tokens"] >= 1
    until(lambda: server.counted()["num_requests_running",] == 0)
    connection = server.open("POST", TEXT, ENDLESS | {"stream": False}, {"X-Request-Id": "goes-early"})
    until(lambda: server.counted()["num_requests_running",] == 1)
    connection.close()
    event = server.told("goes-early")
    assert (event["status"], event["finish_reason"], event["stream"]) == (499, "abort", False)


def test_who_waits_is_counted_and_told_how_long(server: Server) -> None:
    with ExitStack() as running, ThreadPoolExecutor(1) as other:
        for number in range(ROWS):
            running.enter_context(streaming(server, f"before-{number}"))
        late = other.submit(server.complete, {"X-Request-Id": "waits"})
        until(lambda: server.counted()["num_requests_waiting",] == 1)
        seen = time.monotonic()
        assert server.counted()["num_requests_running",] == ROWS
        assert server.counted()["kv_held_bytes", "device"] > 0
        until(lambda: time.monotonic() > seen + 0.05)
        waited = time.monotonic() - seen
        running.close()
        assert late.result()[0] == 200
    assert server.told("waits")["queue_seconds"] >= waited


# ---- traces


def attributes(span: Any) -> dict[str, Any]:
    found = {}
    for one in span.attributes:
        kind = one.value.WhichOneof("value")
        value = getattr(one.value, kind)
        found[one.key] = [each.string_value for each in value.values] if kind == "array_value" else value
    return found


def test_a_request_is_a_span_with_its_parts_in_its_clients_trace(
    server: Server, collector: Collector
) -> None:
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    body = {
        "model": "shipped",
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": 5,
        "temperature": 0.5,
        "seed": 3,
    }
    headers = {"traceparent": f"00-{trace}-{parent}-01", "X-Request-Id": "traced"}
    before = time.time_ns()
    status, _, said = server.ask("POST", CHAT, body, headers)
    after = time.time_ns()
    assert status == 200
    spans = collector.of(trace)
    assert set(spans) == {"chat shipped", "queue", "prefill", "decode"}
    whole = spans.pop("chat shipped")
    assert (whole.parent_span_id.hex(), whole.kind) == (parent, whole.SPAN_KIND_SERVER)
    assert before - 10**7 <= whole.start_time_unix_nano < whole.end_time_unix_nano <= after + 10**7
    times = [whole.start_time_unix_nano]
    for name in ("queue", "prefill", "decode"):
        assert spans[name].parent_span_id == whole.span_id
        times += [spans[name].start_time_unix_nano, spans[name].end_time_unix_nano]
    assert sorted(times) == times
    assert times[-1] <= whole.end_time_unix_nano
    found = attributes(whole)
    usage = said["usage"]
    assert found["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert found["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert found["gen_ai.response.finish_reasons"] == [said["choices"][0]["finish_reason"]]
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "shipped",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "http.route": CHAT,
        "http.response.status_code": 200,
        "penstock.request.id": "traced",
    }
    assert found | expected == found
    assert server.told("traced")["trace_id"] == trace
    assert (collector.service["service.name"], bool(collector.service["service.version"])) == (
        "penstock",
        True,
    )
    assert PROMPT not in str(spans) + str(whole)


def test_what_is_refused_has_a_span_and_what_asks_for_no_tokens_has_none(
    server: Server, collector: Collector
) -> None:
    event = server.told(server.complete(temperature=-1)[1]["x-request-id"])
    [span] = collector.of(event["trace_id"]).values()
    assert attributes(span)["error.type"] == event["error"]
    assert attributes(span)["http.response.status_code"] == 400
    assert not span.parent_span_id
    broken = server.told(server.complete({"traceparent": "00-zz"})[1]["x-request-id"])
    assert len(collector.of(broken["trace_id"])) == 4
    assert "trace_id" not in server.told(server.ask("GET", "/v1/models")[1]["x-request-id"])


def test_without_a_place_for_traces_nothing_is_imported(caplog: pytest.LogCaptureFixture) -> None:
    exporter = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
    nowhere: list[dict[str, str]] = [
        {},
        {"OTEL_SERVICE_NAME": "a"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a", "OTEL_TRACES_EXPORTER": "none"},
    ]
    with patch.dict(sys.modules, {exporter: None}):  # Whoever imports it is told that it is not there.
        for environment in nowhere:
            with telemetry.traced(environment) as sinks:
                assert sinks == []
        assert caplog.text == ""
        with telemetry.traced({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://a"}) as sinks:
            assert sinks == []
    assert "pip install 'penstock[otel]'" in caplog.text
    with telemetry.traced(
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
    ) as sinks:
        assert sinks == []
    assert "only http/protobuf is supported" in caplog.text


# ---- metrics


def exported(server: Server) -> dict[str, str]:
    """Names as they are asked for, and types."""
    found = re.findall(r"^# TYPE (\S+) (\S+)$", server.ask("GET", "/metrics")[2].decode(), re.MULTILINE)
    return {name: kind for name, kind in found if not name.endswith("_created")}


def test_metrics_tell_where_a_request_spent_its_time(server: Server) -> None:
    until(lambda: server.counted()["num_requests_running",] == 0)
    before = server.counted()
    prompt = "A boat on the water. " * 40
    for _ in range(2):
        assert server.complete(prompt=prompt, ignore_eos=True)[0] == 200
    after = server.counted()
    more = {name: value - before[name] for name, value in after.items() if name in before}
    parts = [more[f"request_{part}_time_seconds_sum",] for part in ("queue", "prefill", "decode")]
    assert all(part > 0 for part in parts)
    assert sum(parts) == pytest.approx(more["e2e_request_latency_seconds_sum",])
    assert more["time_to_first_token_seconds_sum",] == pytest.approx(sum(parts[:2]))
    assert more["inter_token_latency_seconds_sum",] == pytest.approx(parts[2])
    assert 1 <= more["inter_token_latency_seconds_count",] <= 10
    assert (
        more["request_prompt_tokens_sum",]
        == more["prompt_tokens_total",]
        == more["prefix_cache_queries_total",]
    )
    assert more["request_generation_tokens_sum",] == more["generation_tokens_total",] == 12
    assert 64 <= more["prefix_cache_hits_total", "device"] < more["prefix_cache_queries_total",]
    assert after["process_resident_memory_bytes",] > 10**7
    until(lambda: server.counted()["kv_moved_bytes_total", "out"] > before["kv_moved_bytes_total", "out"])
    after = server.counted()
    assert after["kv_moved_bytes_total", "down"] > before["kv_moved_bytes_total", "down"]
    assert after["link_bytes_total", "device to host"] >= after["kv_moved_bytes_total", "down"]
    assert after["kv_room_bytes", "host"] == 64 << 20
    assert 0 < after["kv_kept_bytes", "host"] <= after["kv_room_bytes", "host"]
    assert after["kv_kept_bytes", "disk"] > 0
    assert (
        after["kv_checksum_failures_total",]
        == after["kv_io_failures_total",]
        == after["kv_lost_blocks_total", "down"]
        == 0
    )


def test_rates_are_those_between_two_looks() -> None:
    from penstock.server.broker.metrics import _LinkRates

    rates = _LinkRates()
    assert rates.of({"up": 500}, 10.0) == {"up": 0}
    assert rates.of({"up": 900}, 10.5) == {"up": 0}  # Another one looks.
    assert rates.of({"up": 900}, 12.0) == {"up": 200}
    assert rates.of({"up": 900}, 12.1) == {"up": 200}
    assert rates.of({"up": 900}, 13.0) == {"up": 0}


def test_gaps_that_are_told_together_are_counted_as_one_by_one() -> None:
    """By the library's own histogram, which differs in that it also says when it was made."""
    from penstock.server.broker.gaps import Gaps
    from penstock.server.broker.metrics import _SECONDS_EACH

    ours, theirs = CollectorRegistry(), CollectorRegistry()
    gaps, each = (
        Gaps("penstock:gap", "What lies between.", _SECONDS_EACH),
        Histogram("penstock:gap", "", buckets=_SECONDS_EACH, registry=theirs),
    )
    ours.register(gaps)
    for value, times in ((0.0, 3), (0.001, 2), (0.0011, 1), (0.25, 5), (30.0, 1), (31.0, 4), (0.25, 1)):
        gaps.observe(value, times)
        for _ in range(times):
            each.observe(value)

    def samples(registry: CollectorRegistry) -> dict[tuple[str, ...], float]:
        families = text_string_to_metric_families(generate_latest(registry).decode())
        every = [sample for family in families for sample in family.samples]
        return {
            (one.name, *one.labels.values()): one.value for one in every if not one.name.endswith("_created")
        }

    assert samples(ours) == pytest.approx(samples(theirs))


def test_the_page_lists_what_is_exported_and_nothing_else(server: Server) -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    rows = re.findall(r"^\| `((?:penstock:|process_)\w+)` \| (\w+) \| (.+) \|$", page, re.MULTILINE)
    assert {name: kind for name, kind, _ in rows} == exported(server)
    assert len({name for name, _, _ in rows}) == len(rows)


def test_the_page_lists_the_fields_and_events_of_the_log(server: Server) -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    told = {name for event in server.events("request") for name in event}
    assert {name for name in told if f"`{name}`" not in page} == set()
    events = set(re.findall(r"^\| `(\w+)` \| (?:in JSON|one is|at each|all is|anything)", page, re.MULTILINE))
    assert {event["event"] for event in map(json.loads, server.log.read_text().splitlines())} <= events


def test_the_dashboard_asks_for_what_is_exported(server: Server) -> None:
    board = json.loads((ROOT / "deploy" / "grafana-dashboard.json").read_text())
    kinds = exported(server)
    samples = {sample[0] for sample in server.counted()}
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    queries += [one["query"]["query"] for one in board["templating"]["list"] if one["type"] == "query"]
    asked = {name for query in queries for name in re.findall(r"\b(?:penstock:|process_)\w+", query)}
    assert len(asked) > 25
    known = samples | {name.removeprefix("penstock:") for name in kinds}
    assert {name for name in asked if name.removeprefix("penstock:") not in known} == set()
    for query in queries:
        assert query.count("(") == query.count(")")
        for label in re.findall(r"by \((\w+)", query):
            assert label in ("le", "tier", "route", "status", "decision", "cause", "choice"), query
    ids = [panel["id"] for panel in board["panels"]]
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]}
    assert len(set(ids)) == len(places) == len(ids)
    assert all(
        panel["description"] and panel["targets"] for panel in board["panels"] if panel["type"] != "row"
    )


# ---- the same without a server


def test_lines_are_one_each_and_their_fields_can_be_told_apart() -> None:
    for formatter in ("text", "json"):
        lines: list[str] = []
        with logged(lines.append, formatter, "info"):
            note("request", request_id='a"=\\', route="/x", error=None, seconds=1 / 3, stream=True)
            logging.getLogger("penstock").info("a remark\nof %d lines", 2)
            logging.getLogger("penstock").debug("not told")
            logging.getLogger("elsewhere").info("not told")
            logging.getLogger("elsewhere").warning("bad")
        assert len(lines) == 3
        if formatter == "json":
            event, remark, other = map(json.loads, lines)
            assert {name: event[name] for name in event if name != "time"} == {
                "level": "info", "event": "request", "request_id": 'a"=\\', "route": "/x",
                "seconds": 0.333333, "stream": True,
            }  # fmt: skip
            assert (remark["event"], remark["message"]) == ("remark", "a remark\nof 2 lines")
            assert (other["logger"], other["level"], other["message"]) == ("elsewhere", "warning", "bad")
            assert all("\n" not in line for line in lines)
        else:
            assert re.fullmatch(
                r'\d{4}-\d\d-\d\dT[\d:.]{12}Z info request request_id="a\\"=\\\\" route=/x seconds=0.333333 '
                r"stream=true",
                lines[0],
            )
    fault = logging.LogRecord("penstock", logging.ERROR, "", 0, "failed", (), None)
    try:
        raise ValueError("deep")
    except ValueError:
        fault.exc_info = sys.exc_info()
    assert "ValueError: deep" in json.loads(JsonLines().format(fault))["traceback"]
    assert "ValueError: deep" in TextLines().format(fault)


@pytest.mark.parametrize("debug", [False, True])
def test_what_ends_a_server_is_an_event_too(debug: bool, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert (
            main(
                [
                    "serve",
                    "--device",
                    "cpu",
                    "--port",
                    port,
                    "--log-format",
                    "json",
                    *(["--debug"] if debug else []),
                ]
            )
            == 2
        )
    [event] = map(json.loads, capsys.readouterr().err.splitlines())
    assert (event["event"], event["level"]) == ("ended", "error")
    assert "cannot be listened on" in event["message"]
    assert ("ConfigError" in event.get("traceback", "")) == debug


def test_a_collector_that_does_not_answer_does_not_hold_up_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from penstock.server.monitoring.records import RequestRecord

    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{deaf.getsockname()[1]}")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")
        monkeypatch.setattr(telemetry, "_LAST", 0.01)
        with telemetry.traced(os.environ) as [tell]:
            account = RequestRecord("id", "POST", {}, route=TEXT, status=429, ended=time.monotonic())
            tell(account)
            assert account.trace is not None
        for thread in threading.enumerate():
            if thread.name == "penstock last spans":
                thread.join()  # Which gives up by itself, after this process has gone on.
    assert "the collector did not take the last traces" in caplog.text


def test_what_was_found_is_counted_once_by_where_it_was() -> None:
    from penstock.api.outputs import Completion, Output
    from penstock.server.broker.metrics import Metrics, RequestTimes
    from penstock.step.request import FinishReason

    metrics = Metrics()
    output = Output(0, "a", (1,), FinishReason.STOP)
    metrics.completed(
        RequestTimes(0.0, 0.0, 0.0),
        Completion(None, tuple(range(100)), (output,), None, 60, cached_host=30, cached_disk=10),
    )
    families = text_string_to_metric_families(generate_latest(metrics._registry).decode())
    found = {
        one.labels["tier"]: one.value
        for family in families
        for one in family.samples
        if one.name.endswith("prefix_cache_hits_total")
    }
    assert found == {"device": 20, "host": 30, "disk": 10}
