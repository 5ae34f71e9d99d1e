"""Loads and unloads LoRA adapters while requests are answered."""

import asyncio

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from penstock.api.llm import LLM
from penstock.base.errors import CheckpointError, UnsupportedModelError
from penstock.engine.adapters import means_model
from penstock.server.http.asking import body_of
from penstock.server.http.state import ServerState
from penstock.server.wire.adapters import LoadAdapterRequest, UnloadAdapterRequest
from penstock.server.wire.decoding import FieldError


async def load_adapter(server: ServerState, request: Request) -> Response:
    """Load an adapter, from a directory of the server's machine."""
    asked = await body_of(server, request, LoadAdapterRequest, lambda _: None)
    llm = _changeable(server)
    if means_model(asked.lora_name, server.settings.names):
        raise FieldError(
            f"{asked.lora_name[:200]!r} is a name of the model's, or begins with one and a colon; give the "
            "adapter another name",
            "lora_name",
        )
    try:
        await asyncio.to_thread(
            llm.load_lora_adapter, asked.lora_name, asked.lora_path, load_inplace=asked.load_inplace
        )
    except (CheckpointError, UnsupportedModelError) as fault:
        raise FieldError(str(fault), "lora_path") from fault
    return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' added successfully.")


async def unload_adapter(server: ServerState, request: Request) -> Response:
    """Forget an adapter. Requests that run go on with it."""
    asked = await body_of(server, request, UnloadAdapterRequest, lambda _: None)
    llm = _changeable(server)
    await asyncio.to_thread(llm.unload_lora_adapter, asked.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' removed successfully.")


def _changeable(server: ServerState) -> LLM:
    """Return the model whose adapters a client may change. Raise HTTPException where none may."""
    if not server.settings.allow_runtime_lora_updating:
        raise HTTPException(
            403,
            "clients may not change this server's LoRA adapters; start it with "
            "--allow-runtime-lora-updating, or name adapters with --lora-modules",
        )
    if len(server.settings.keys) > 1:
        raise HTTPException(
            403,
            "all keys ask for the same LoRA adapters, so none of several may change them; restart the "
            "server with --lora-modules",
        )
    server.model()
    if server.llm is None:
        raise HTTPException(
            501, "replicas load no adapters while they run; restart the server with --lora-modules"
        )
    return server.llm
