"""Answers the routes of ollama's API, for clients that speak it alone."""

from datetime import UTC, datetime
from functools import partial
from hashlib import sha256

from starlette.requests import Request
from starlette.responses import Response

from penstock.server.answers.completions import Answer
from penstock.server.answers.ollama import LINES, loaded, read_ollama, stamp
from penstock.server.http.asking import adapter_of, asked_of, body_of, prepared_for
from penstock.server.http.embedding import embed
from penstock.server.http.sending import json_response, responded, told_ignored
from penstock.server.http.state import ServerState
from penstock.server.wire.embeddings import EmbedRequest
from penstock.server.wire.ollama import OllamaChatRequest, OllamaGenerateRequest, ShowRequest

VERSION = "0.13.5"
"""The version of ollama whose API this is: clients look at it."""
NEVER = "9999-12-31T23:59:59Z"
"""The model is unloaded at this time."""


async def _generate(
    server: ServerState, request: Request, kind: type[OllamaChatRequest] | type[OllamaGenerateRequest]
) -> Response:
    asked = await asked_of(server, request, kind)
    if asked.loads:
        answer = json_response(loaded(asked))
        if asked.streams:
            answer = Response(bytes(answer.body) + b"\n", media_type=LINES)
    else:
        ready, stream = await prepared_for(server, request, asked, read_ollama)
        answer = await responded(request, server.model()[1], ready, stream, asked)
    return told_ignored(answer, asked.ignored)


async def _tags(server: ServerState, request: Request) -> Response:
    server.model()
    return json_response({"models": [_listed(server, name) for name in _names(server)]})


async def _running(server: ServerState, request: Request) -> Response:
    reader, _ = server.model()
    more = {
        "expires_at": NEVER,
        "size_vram": server.facts.device_bytes,
        "context_length": reader.limits.max_model_len,
    }
    return json_response({"models": [_listed(server, name) | more for name in _names(server)]})


async def _version(server: ServerState, request: Request) -> Response:
    return json_response({"version": VERSION})


async def _show(server: ServerState, request: Request) -> Response:
    asked = await body_of(server, request, ShowRequest, lambda asked: adapter_of(server, *asked.names))
    reader, _ = server.model()
    facts, template, capabilities = server.facts, "", ["completion"]
    if reader.has_tokenizer and (templates := reader.tokenizer.templates):
        template = templates.get("default", next(iter(templates.values())))
        dialect = server.dialect
        capabilities += ["tools"] if any("tools" in source for source in templates.values()) else []
        capabilities += ["thinking"] if dialect is not None and (dialect.thought or dialect.channels) else []
    family = facts.family or "unknown"
    return json_response(
        {
            "modelfile": "",
            "parameters": "",
            "template": template,
            "details": _details(server),
            "model_info": {
                "general.architecture": family,
                "general.basename": asked.names[-1],
                "general.parameter_count": facts.parameters,
                f"{family}.block_count": facts.layers,
                f"{family}.context_length": reader.limits.max_model_len,
                f"{family}.embedding_length": facts.hidden_size,
            },
            "capabilities": capabilities,
            "modified_at": _since(server),
        }
    )


def _names(server: ServerState) -> list[str]:
    return [*server.settings.names, *server.adapters]


def _listed(server: ServerState, name: str) -> Answer:
    facts = server.facts
    return {
        "name": name,
        "model": name,
        "modified_at": _since(server),
        "size": facts.bytes,
        "digest": sha256(f"{name}/{facts}".encode()).hexdigest(),
        "details": _details(server),
    }


def _details(server: ServerState) -> Answer:
    facts = server.facts
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": facts.family,
        "families": [facts.family] if facts.family else [],
        "parameter_size": facts.size,
        "quantization_level": facts.format,
    }


def _since(server: ServerState) -> str:
    """Return when the model was loaded."""
    return stamp(datetime.fromtimestamp(server.loaded, UTC))


ROUTES = (
    ("POST", "/api/chat", partial(_generate, kind=OllamaChatRequest)),
    ("POST", "/api/generate", partial(_generate, kind=OllamaGenerateRequest)),
    ("POST", "/api/embed", partial(embed, kind=EmbedRequest)),
    ("GET", "/api/tags", _tags),
    ("GET", "/api/ps", _running),
    ("GET", "/api/version", _version),
    ("POST", "/api/show", _show),
)
