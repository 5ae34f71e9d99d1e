"""Traces of requests, for collectors of OpenTelemetry's: a span for each that asks for tokens, and in it
its queue, prefill and decode.

Spans are made when a request is over, from the times that were noted anyway: while it is served nothing is
done for them. They are sent by a thread of the SDK's. Attributes are those of the semantic conventions for
HTTP and for generative AI; none has any text of a prompt or an output.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import Thread
from typing import TYPE_CHECKING

from penstock import __version__
from penstock.server.monitoring.records import RecordSink, RequestRecord

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer
    from opentelemetry.util.types import AttributeValue

_LOG = logging.getLogger("penstock")
_ENDPOINTS = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"
_PROTOCOLS = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"
_HTTP = "http/protobuf"
_LAST = 5.0
"""Seconds that the end waits for a collector to take the last spans."""
_OPERATIONS = {"/v1/chat/completions": "chat", "/v1/responses": "chat", "/v1/completions": "text_completion"}


def endpoint(environment: Mapping[str, str]) -> str | None:
    """Return where traces go by OpenTelemetry's own variables; None if nowhere."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    if "otlp" not in (environment.get("OTEL_TRACES_EXPORTER") or "otlp").split(","):
        return None
    return next((environment[name] for name in _ENDPOINTS if environment.get(name)), None)


@contextmanager
def traced(environment: Mapping[str, str]) -> Iterator[list[RecordSink]]:
    """Give the sinks that trace requests; none if traces go nowhere, and then nothing is imported either."""
    if endpoint(environment) is None:
        yield []
        return
    if (
        protocol := next((environment[name] for name in _PROTOCOLS if environment.get(name)), _HTTP)
    ) != _HTTP:
        _LOG.warning(
            "the protocol for traces is %s, but only %s is supported: none are sent; set "
            "OTEL_EXPORTER_OTLP_PROTOCOL to it",
            protocol,
            _HTTP,
        )
        yield []
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as missing:
        _LOG.warning(
            "traces are set up, but %s is not installed: none are sent; pip install 'penstock[otel]'",
            missing.name,
        )
        yield []
        return
    about = {SERVICE_VERSION: __version__}
    if not environment.get("OTEL_SERVICE_NAME") and SERVICE_NAME not in environment.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    ):
        about[SERVICE_NAME] = "penstock"
    provider = TracerProvider(resource=Resource.create(about), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    try:
        yield [span_sink(provider.get_tracer("penstock", __version__))]
    finally:
        end = Thread(target=provider.shutdown, name="penstock last spans", daemon=True)
        end.start()
        end.join(_LAST)
        if end.is_alive():
            _LOG.warning(
                "the collector did not take the last traces within %g seconds, and they are lost; check "
                "OTEL_EXPORTER_OTLP_ENDPOINT",
                _LAST,
            )


def span_sink(tracer: "Tracer") -> RecordSink:
    """Return the sink that makes the spans of a request that is over, and notes its trace's id in the
    record."""
    from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    propagator = TraceContextTextMapPropagator()

    def tell(record: RequestRecord) -> None:
        if not record.calls and record.route not in _OPERATIONS:  # It is not asked for tokens.
            return
        carrier = {
            name: record.headers[name.encode()].decode("latin-1")
            for name in propagator.fields
            if name.encode() in record.headers
        }
        at = _clock(record)
        name = " ".join(filter(None, (_OPERATIONS.get(record.route, record.route), record.model)))
        span = tracer.start_span(
            name,
            propagator.extract(carrier),
            SpanKind.SERVER,
            attributes=_attributes(record),
            start_time=at(record.began),
        )
        if (record.status or 0) >= 500 or (record.fault is not None and record.status == 200):
            span.set_status(Status(StatusCode.ERROR))
        within = set_span_in_context(span)
        for part, begin, end in _parts(record):
            tracer.start_span(part, within, start_time=at(begin)).end(at(end))
        span.end(at(record.ended))
        if (context := span.get_span_context()).is_valid:
            record.trace = format(context.trace_id, "032x")

    return tell


def _clock(record: RequestRecord) -> Callable[[float], int]:
    """Return the function from seconds of monotonic() to nanoseconds since 1970."""
    return lambda moment: record.began_ns + round((moment - record.began) * 1e9)


def _parts(record: RequestRecord) -> Iterator[tuple[str, float, float]]:
    """Yield the phases of a request, as far as it came: name, begin and end. Of several prompts they go from
    the first to the last."""
    if not record.calls:
        return
    asked = record.calls[0].arrival_time
    yield "queue", asked, record.scheduled_time or record.ended
    if record.scheduled_time:
        yield "prefill", record.scheduled_time, record.first_token_time or record.ended
    if record.first_token_time:
        yield "decode", record.first_token_time, max(record.last_token_time, record.first_token_time)


def _attributes(record: RequestRecord) -> "dict[str, AttributeValue]":
    found: dict[str, AttributeValue | None] = {
        "http.request.method": record.method,
        "http.route": record.route,
        "http.response.status_code": record.status,
        "error.type": record.fault,
        "penstock.request.id": record.id,
        "gen_ai.operation.name": _OPERATIONS.get(record.route),
        "gen_ai.provider.name": "penstock",
        "gen_ai.request.model": record.model,
    }
    if record.calls:
        ready = record.calls[0].prompt
        sampling = ready.samplings[0]
        found |= {
            "gen_ai.response.model": record.model,
            "gen_ai.request.stream": record.streams,
            "gen_ai.request.choice.count": len(ready.samplings),
            "gen_ai.request.max_tokens": ready.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.top_k": sampling.top_k,
            "gen_ai.request.presence_penalty": sampling.presence_penalty,
            "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
            "gen_ai.usage.input_tokens": record.prompt_tokens,
            "gen_ai.usage.output_tokens": record.output_tokens,
            "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
            "gen_ai.response.finish_reasons": record.reasons,
            "gen_ai.response.time_to_first_chunk": record.first_token_time - record.began
            if record.first_token_time
            else None,
        }
    return {name: value for name, value in found.items() if value is not None}
