"""Describes the API in OpenAPI's words: from the types that requests are read as, and those that say what
answers are.

Nothing of it depends on the model, so every client that reaches the server may read it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import msgspec

from penstock import __version__
from penstock.server.answers.ollama import LINES
from penstock.server.answers.protocols import MESSAGES
from penstock.server.http.page import FILES
from penstock.server.monitoring.state import ExpertsState, State
from penstock.server.wire import (
    embeddings,
    message_shapes,
    ollama_shapes,
    response_shapes,
    scores,
    shapes,
)
from penstock.server.wire.adapters import LoadAdapterRequest, UnloadAdapterRequest
from penstock.server.wire.messages import CountTokensRequest, MessagesRequest
from penstock.server.wire.ollama import OllamaChatRequest, OllamaGenerateRequest, ShowRequest
from penstock.server.wire.requests import (
    ALL_TOKENS,
    MOST_LOGPROBS,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from penstock.server.wire.responses import ResponsesRequest
from penstock.step.params import MOST_TEMPERATURE

Json = dict[str, Any]
"""A JSON object, as it is written."""


# ---- routes


@dataclass(frozen=True, slots=True)
class RouteSpec:
    """Describes a route.

    answer: its type, or the media type of what is not JSON.
    events: types of an event's data, where there may be events instead.
    refused: the statuses that it may answer with, beside 401 and 500.
    open: whether no key is asked for.
    """

    method: Literal["get", "post", "delete"]
    path: str
    what: str
    answer: type | str
    asked: type | None = None
    events: tuple[type, ...] = ()
    refused: tuple[int, ...] = ()
    open: bool = False
    refusal: type = shapes.Refusal
    """The type of an error."""
    streams: str = "text/event-stream"
    """The media type of events; others than this have a line of JSON for each."""
    leads: tuple[str, ...] = ()
    """To operations that take the answer's id as their name."""
    query: Mapping[str, Json] = field(default_factory=dict)
    """Schemas of what may be in the query."""


_READS, _GENERATES = (400, 404, 413, 429, 503), (400, 404, 413, 429, 503, 504)
_OLLAMA = ollama_shapes.OllamaRefusal
_CHAT, _TEXT = "/v1/chat/completions", "/v1/completions"
_KEPT = ("get_v1_responses_name", "delete_v1_responses_name")
OPERATIONS = (
    RouteSpec(
        "post",
        _CHAT,
        "Answer a conversation",
        shapes.ChatCompletion,
        ChatRequest,
        (shapes.ChatCompletionChunk,),
        _GENERATES,
    ),
    RouteSpec(
        "post",
        _TEXT,
        "Continue texts",
        shapes.CompletionResponse,
        CompletionRequest,
        (shapes.CompletionChunk,),
        _GENERATES,
    ),
    RouteSpec(
        "post",
        "/v1/embeddings",
        "The embeddings of texts",
        embeddings.EmbeddingList,
        embeddings.EmbeddingsRequest,
        refused=_GENERATES,
    ),
    *[
        RouteSpec(
            "post",
            path,
            "How well texts answer others",
            scores.ScoreList,
            scores.ScoreRequest,
            refused=_GENERATES,
        )
        for path in scores.SCORE_PATHS
    ],
    *[
        RouteSpec(
            "post",
            path,
            "Rank documents for a query",
            scores.Ranking,
            scores.RerankRequest,
            refused=_GENERATES,
        )
        for path in scores.RERANK_PATHS
    ],
    RouteSpec(
        "post",
        "/v1/responses",
        "Respond to items",
        response_shapes.Response,
        ResponsesRequest,
        response_shapes.EVENTS,
        _GENERATES,
        leads=_KEPT,
    ),
    RouteSpec(
        "get", "/v1/responses/{name}", "A response that is kept", response_shapes.Response, refused=(400, 404)
    ),
    RouteSpec(
        "delete",
        "/v1/responses/{name}",
        "Keep a response no longer",
        response_shapes.DeletedResponse,
        refused=(404,),
    ),
    RouteSpec("get", "/v1/models", "The models by their names", shapes.ModelList, refused=(503,)),
    RouteSpec("get", "/v1/models/{name}", "A model", shapes.ModelCard, refused=(404, 503)),
    *[
        RouteSpec("post", f"/v1/{path}", what, "text/plain", asked, refused=(400, 403, 413, *more))
        for path, what, asked, more in (
            ("load_lora_adapter", "Load a LoRA adapter", LoadAdapterRequest, (501, 503)),
            ("unload_lora_adapter", "Unload a LoRA adapter", UnloadAdapterRequest, (404, 501, 503)),
        )
    ],
    RouteSpec(
        "post",
        "/tokenize",
        "The tokens of a text or a conversation",
        shapes.TokenizeResponse,
        TokenizeRequest,
        refused=_READS,
    ),
    RouteSpec("post", "/detokenize", "The text of tokens", shapes.Text, DetokenizeRequest, refused=_READS),
    RouteSpec(
        "post",
        MESSAGES,
        "Answer a conversation, as Anthropic has it",
        message_shapes.MessageAnswer,
        MessagesRequest,
        message_shapes.EVENTS,
        _GENERATES,
        refusal=message_shapes.MessageRefusal,
    ),
    RouteSpec(
        "post",
        f"{MESSAGES}/count_tokens",
        "The tokens of a conversation",
        message_shapes.TokenCount,
        CountTokensRequest,
        refused=(*_READS, 504),
        refusal=message_shapes.MessageRefusal,
    ),
    *[
        RouteSpec("post", path, what, answer, asked, (answer,), _GENERATES, refusal=_OLLAMA, streams=LINES)
        for path, what, answer, asked in (
            (
                "/api/chat",
                "Answer a conversation, as ollama has it",
                ollama_shapes.OllamaChatAnswer,
                OllamaChatRequest,
            ),
            (
                "/api/generate",
                "Continue a text, or answer it",
                ollama_shapes.OllamaTextAnswer,
                OllamaGenerateRequest,
            ),
        )
    ],
    RouteSpec(
        "post",
        "/api/embed",
        "The embeddings of texts, as ollama has them",
        embeddings.OllamaEmbeddings,
        embeddings.EmbedRequest,
        refused=_GENERATES,
        refusal=_OLLAMA,
    ),
    RouteSpec(
        "get",
        "/api/tags",
        "The models by their names",
        ollama_shapes.OllamaModels,
        refused=(503,),
        refusal=_OLLAMA,
    ),
    RouteSpec(
        "get",
        "/api/ps",
        "The models that are loaded",
        ollama_shapes.OllamaRunningModels,
        refused=(503,),
        refusal=_OLLAMA,
    ),
    RouteSpec(
        "post",
        "/api/show",
        "A model in full",
        ollama_shapes.OllamaShown,
        ShowRequest,
        refused=_READS,
        refusal=_OLLAMA,
    ),
    RouteSpec(
        "get", "/api/version", "The version of ollama's API", ollama_shapes.VersionAnswer, refusal=_OLLAMA
    ),
    RouteSpec("get", "/version", "The version of the server", ollama_shapes.VersionAnswer, open=True),
    RouteSpec(
        "post",
        "/reset_prefix_cache",
        "Forget the prefixes that are kept",
        shapes.ClearedCache,
        refused=(403, 501, 503),
    ),
    RouteSpec(
        "post",
        "/sleep",
        "Free the model's memory",
        shapes.SleepAnswer,
        refused=(400, 403, 501, 503),
        query={"level": {"enum": [1, 2], "default": 1}, "mode": {"enum": ["wait", "abort"]}},
    ),
    RouteSpec("post", "/wake_up", "End a sleep", shapes.SleepAnswer, refused=(403, 501, 503)),
    RouteSpec("get", "/is_sleeping", "Whether the model is asleep", shapes.SleepAnswer, refused=(503,)),
    RouteSpec("get", "/metrics", "Counts and times, for Prometheus", "text/plain"),
    RouteSpec("get", "/state", "The machine at this moment", State, refused=(503,)),
    RouteSpec("get", "/experts", "How each expert is used, and where it is", ExpertsState, refused=(503,)),
    RouteSpec("get", "/health", "Whether the server is alive", shapes.Status, open=True),
    RouteSpec("get", "/ready", "Whether requests are taken", shapes.Status, refused=(503,), open=True),
    RouteSpec("get", "/openapi.json", "This description", "application/json", open=True),
    *[
        RouteSpec("get", path, "The page", file.kind.partition(";")[0], refused=(304,), open=True)
        for path, file in FILES.items()
    ],
)
_STATUSES = {
    200: "The answer",
    304: "Nothing has changed since the ETag that was sent",
    400: "The request is not valid; `param` is the field at fault",
    401: "The API key is missing, or not one of this server's",
    403: "This server lets no client do this, or none of several keys",
    404: "The model, or the response, does not exist here",
    413: "The request is larger than this server reads",
    429: "There is no room for another request now",
    500: "The server has failed",
    501: "This server does not do this",
    503: "The model is being loaded, or takes no more requests",
    504: "The time that the request was given is over",
}
_SECONDS = {
    "description": "Seconds after which to try again",
    "required": True,
    "schema": {"type": "integer", "minimum": 1},
}
_HEADERS = {429: {"Retry-After": _SECONDS}, 503: {"Retry-After": _SECONDS}}
_FORECAST = {
    "X-Queue-Position": {
        "description": "Outputs that waited before the request when it came",
        "schema": {"type": "integer", "minimum": 0},
    },
    "X-Expected-First-Token": {
        "description": "Seconds from then to its first token, by forecast; unknown until steps were measured",
        "schema": {"type": "string", "pattern": r"^(\d+\.\d+|unknown)$"},
    },
}
_PROMPT = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
_EXACT: Mapping[tuple[str, str], Json] = {
    ("CompletionRequest", "prompt"): {
        "description": "Text, token ids, or several of these",
        "anyOf": [
            {"type": "string"},
            _PROMPT,
            {"type": "array", "items": {"anyOf": [{"type": "string"}, _PROMPT]}, "minItems": 1},
        ],
    },
}
"""Fields with more rules than their types say."""
RANGES: Mapping[str, Json] = {
    "temperature": {"minimum": 0, "maximum": MOST_TEMPERATURE},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "min_p": {"minimum": 0, "maximum": 1},
    "repetition_penalty": {"minimum": 0.001, "maximum": 1000},
    "presence_penalty": {"minimum": -100, "maximum": 100},
    "frequency_penalty": {"minimum": -100, "maximum": 100},
    "top_k": {"minimum": ALL_TOKENS},
    "min_tokens": {"minimum": 0},
    "max_tokens": {"minimum": 1},
    "max_completion_tokens": {"minimum": 1},
    "max_output_tokens": {"minimum": 1},
    "n": {"minimum": 1},
    "logprobs": {"minimum": 0, "maximum": MOST_LOGPROBS},
    "prompt_logprobs": {"minimum": 0, "maximum": MOST_LOGPROBS},
    "top_logprobs": {"minimum": 0, "maximum": MOST_LOGPROBS},
}
"""Ranges of numbers, in whatever request, that are checked beside their types."""

_PUBLIC_NAMES = {
    b"CompletionResponse": b"Completion",
    b"LogprobEntry": b"TokenLogprob",
    b"ModelCard": b"Model",
    b"TierPart": b"Part",
    b"TokenizeResponse": b"Tokens",
}
"""Types that are known by other names in the description."""


@cache
def described(*, keys: bool) -> bytes:
    """Return the description, as JSON.

    keys: whether the server asks for one.
    """
    kinds = {
        kind
        for one in OPERATIONS
        for kind in (one.answer, one.asked, one.refusal, *one.events)
        if isinstance(kind, type)
    }
    ordered = sorted(kinds, key=lambda kind: kind.__name__)
    references, schemas = msgspec.json.schema_components(ordered, ref_template="#/components/schemas/{name}")
    for (name, one_field), exact in _EXACT.items():
        schemas[name]["properties"][one_field] = exact
    for asked in {one.asked.__name__ for one in OPERATIONS if one.asked is not None}:
        for name, within in RANGES.items():
            entry = schemas[asked]["properties"].get(name, {})
            for kind in entry.get("anyOf", [entry]):
                kind.update(within if kind.get("type") in ("integer", "number") else {})
    known = dict(zip(ordered, references, strict=True))
    paths: dict[str, Json] = {}
    for one in OPERATIONS:
        paths.setdefault(one.path, {})[one.method] = _operation(one, known, keys=keys)
    document: Json = {
        "openapi": "3.1.0",
        "info": {
            "title": "penstock",
            "version": __version__,
            "description": "OpenAI's API, Anthropic's messages, ollama's chats, and what there is beside.",
        },
        "paths": paths,
        "components": {"schemas": schemas},
    }
    if keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    said = msgspec.json.encode(document)
    for own, public in _PUBLIC_NAMES.items():
        said = said.replace(own + b'"', public + b'"')
    return said


def _operation(one: RouteSpec, known: Mapping[type, Json], *, keys: bool) -> Json:
    entry: Json = {"summary": one.what, "operationId": _name(one)}
    names = [part[1:-1] for part in one.path.split("/") if part.startswith("{")]
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
    ] + [{"name": name, "in": "query", "schema": schema} for name, schema in one.query.items()]
    if parameters:
        entry["parameters"] = parameters
    if one.asked is not None:
        entry["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": known[one.asked]}},
        }
    if keys:
        entry["security"] = [] if one.open else [{"key": []}]
    statuses = {200, 500, *one.refused, *([401] if keys and not one.open else [])}
    entry["responses"] = {str(status): _answer(one, status, known) for status in sorted(statuses)}
    return entry


def _answer(one: RouteSpec, status: int, known: Mapping[type, Json]) -> Json:
    entry: Json = {"description": _STATUSES[status]}
    if status == 304:
        return entry
    if status == 200 and isinstance(one.answer, str):
        entry["content"] = {
            one.answer: {"schema": {"type": "object" if one.answer == "application/json" else "string"}}
        }
        return entry
    if status == 200 or (status == 503 and one.answer is shapes.Status):
        assert isinstance(one.answer, type)
        entry["content"] = {"application/json": {"schema": known[one.answer]}}
        if status == 200 and 504 in one.refused and one.asked is not CountTokensRequest:
            entry["headers"] = _FORECAST
        if one.events:
            data = [known[kind] for kind in dict.fromkeys((*one.events, one.refusal))]
            entry["content"][one.streams] = {
                "schema": {"anyOf": data} if one.streams == LINES else _event(data)
            }
        if one.leads:
            entry["links"] = {
                name: {"operationId": name, "parameters": {"name": "$response.body#/id"}}
                for name in one.leads
            }
        return entry
    entry["content"] = {"application/json": {"schema": known[one.refusal]}}
    if status in _HEADERS:
        entry["headers"] = _HEADERS[status]
    return entry


def _event(data: Sequence[Json]) -> Json:
    """Return the schema of one event of a stream."""
    written = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": data}}
    return {
        "type": "object",
        "properties": {"data": {"anyOf": [written, {"const": "[DONE]"}]}},
        "required": ["data"],
    }


def _name(one: RouteSpec) -> str:
    words = [word.strip("{}") for word in one.path.replace(".", "/").split("/") if word]
    return "_".join([one.method, *words])
