"""Answers the routes of ollama's API, for clients that speak it alone."""

import asyncio
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from time import time

from starlette.requests import Request
from starlette.responses import Response

from penstock.server.answers.completions import Answer
from penstock.server.answers.ollama import LINES, loaded, read_ollama, stamp
from penstock.server.http.asking import adapter_of, asked_of, body_of, prepared_for
from penstock.server.http.embedding import embed
from penstock.server.http.sending import json_response, responded, told_ignored
from penstock.server.http.state import HostedModel, ServerState
from penstock.server.monitoring.facts import ModelFacts
from penstock.server.monitoring.records import record_of
from penstock.server.on_demand.model import OnDemandModel
from penstock.server.parsing.dialects import Dialect, dialect_of
from penstock.server.wire.embeddings import EmbedRequest
from penstock.server.wire.ollama import OllamaChatRequest, OllamaGenerateRequest, ShowRequest

VERSION = "0.13.5"
"""The version of ollama whose API this is: clients look at it."""
NEVER = "9999-12-31T23:59:59Z"
"""The model is unloaded at this time."""


async def _generate(
    server: ServerState, request: Request, kind: type[OllamaChatRequest] | type[OllamaGenerateRequest]
) -> Response:
    whole = server
    server, asked = await asked_of(server, request, kind)
    ignored = [name for name in asked.ignored if whole.models is None or name != "keep_alive"]
    if asked.loads:
        if whole.models is not None and asked.unloads:
            whole.models.unload_soon(_model_of(whole, asked.names))
        answer = json_response(loaded(asked, unloads=whole.models is not None and asked.unloads))
        if asked.streams:
            answer = Response(bytes(answer.body) + b"\n", media_type=LINES)
    else:
        ready, stream = await prepared_for(server, request, asked, read_ollama)
        ignored += stream.ignored
        if (wait := record_of(request).wait) is not None:
            stream.load_seconds = wait[0]
        answer = await responded(request, server.model()[1], ready, stream, asked)
    return told_ignored(answer, ignored)


def _model_of(server: ServerState, names: Sequence[str]) -> OnDemandModel[HostedModel]:
    assert server.models is not None
    return next(server.models.models[name] for name in names if name in server.models.models)


async def _tags(server: ServerState, request: Request) -> Response:
    if server.models is None:
        server.model()
    return json_response({"models": [_listed(server, name) for name in _names(server)]})


async def _running(server: ServerState, request: Request) -> Response:
    there = [server] if server.models is None else server.hosted
    return json_response({"models": [answer for one in there for answer in _running_of(one, server)]})


def _running_of(server: ServerState, whole: ServerState) -> list[Answer]:
    """Return the names of a loaded model. whole: the server's state, which knows when the model goes."""
    reader, _ = server.model()
    gone = None
    if whole.models is not None:
        gone = whole.models.expires_in(whole.models.models[server.settings.names[0]])
    more = {
        "expires_at": NEVER if gone is None else stamp(datetime.fromtimestamp(time() + gone, UTC)),
        "size_vram": server.facts.device_bytes,
        "context_length": reader.limits.max_model_len,
    }
    return [_listed(server, name) | more for name in _names(server)]


async def _version(server: ServerState, request: Request) -> Response:
    return json_response({"version": VERSION})


async def _show(server: ServerState, request: Request) -> Response:
    asked = await body_of(server, request, ShowRequest, lambda asked: adapter_of(server, *asked.names))
    facts, longest, templates, dialect = await _shown(server, asked.names)
    template, capabilities = "", ["completion"]
    if templates:
        template = templates.get("default", next(iter(templates.values())))
        capabilities += ["tools"] if any("tools" in source for source in templates.values()) else []
        capabilities += ["thinking"] if dialect is not None and (dialect.thought or dialect.channels) else []
    family = facts.family or "unknown"
    return json_response(
        {
            "modelfile": "",
            "parameters": "",
            "template": template,
            "details": _details(facts),
            "model_info": {
                "general.architecture": family,
                "general.basename": asked.names[-1],
                "general.parameter_count": facts.parameters,
                f"{family}.block_count": facts.layers,
                f"{family}.context_length": longest,
                f"{family}.embedding_length": facts.hidden_size,
            },
            "capabilities": capabilities,
            "modified_at": _since(server),
        }
    )


async def _shown(
    server: ServerState, names: Sequence[str]
) -> tuple[ModelFacts, int, Mapping[str, str], Dialect | None]:
    """Return a model's facts, most tokens, chat templates and dialect. It is not loaded for that."""
    if server.models is not None:
        listed = server.listed[_model_of(server, names).name]
        templates = await asyncio.to_thread(listed.templates)
        settings = server.settings
        dialect = dialect_of(templates, settings.tool_parser, settings.reasoning_parser)
        return listed.facts, listed.max_model_len, templates, dialect
    reader, _ = server.model()
    found = reader.tokenizer.templates if reader.has_tokenizer else {}
    return server.facts, reader.limits.max_model_len, found, server.dialect


def _names(server: ServerState) -> list[str]:
    return [*server.settings.names, *server.adapters]


def _listed(server: ServerState, name: str) -> Answer:
    facts = server.listed[name].facts if name in server.listed else server.facts
    return {
        "name": name,
        "model": name,
        "modified_at": _since(server),
        "size": facts.bytes,
        "digest": sha256(f"{name}/{facts}".encode()).hexdigest(),
        "details": _details(facts),
    }


def _details(facts: ModelFacts) -> Answer:
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
