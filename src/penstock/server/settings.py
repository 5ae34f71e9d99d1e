"""Declares the settings of `penstock serve` once: checks, flags and docs/settings.md come from here."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from penstock.base.errors import ConfigError
from penstock.base.setting import MOST, UNKNOWN_WHOLE, Declared, setting
from penstock.base.units import parse_size
from penstock.server.parsing.dialects import AUTO, REASONING_PARSERS, TOOL_PARSERS

LEAST_SECONDS = 0.001


@dataclass(frozen=True, slots=True)
class Listening(Declared):
    """Sets the address of a server, and how long requests may wait and take. Raises ConfigError."""

    host: str = setting("127.0.0.1", help="Address to listen on; 0.0.0.0 is every address of this machine.")
    port: int = setting(8000, help="Port to listen on; 0 is any free port.", limits=(0, 65535))
    queue: int = setting(
        256,
        help="Outputs that may wait; a request beyond them gets status 429.",
        limits=(0, MOST),
        unit="outputs",
    )
    request_timeout: float | None = setting(
        None,
        help="Seconds that a request may take.",
        usual="no limit",
        limits=(LEAST_SECONDS, inf),
        unit="seconds",
    )
    patience: float = setting(
        30.0,
        help="Seconds that requests have to end when the server is stopped.",
        limits=(0, inf),
        unit="seconds",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSettings(Declared):
    """Sets how requests are read and answers written. Raises ConfigError."""

    max_body: int = setting(
        32 << 20,
        help="Most bytes in a request.",
        usual="32 MiB",
        limits=(1024, inf),
        unit="bytes",
    )
    max_kept: int = setting(
        64 << 20,
        help="Most bytes of responses to keep, for clients that go on with them.",
        usual="64 MiB",
        limits=(0, inf),
        unit="bytes",
    )
    tool_parser: str = setting(
        AUTO,
        help="Format in which the model writes tool calls.",
        details="auto reads it from the chat template.",
        choices=TOOL_PARSERS,
    )
    reasoning_parser: str = setting(
        AUTO,
        help="Format in which the model writes its reasoning.",
        details="auto reads it from the chat template.",
        choices=REASONING_PARSERS,
    )
    allow_runtime_lora_updating: bool = setting(
        False,
        help="Let clients load and unload LoRA adapters, from any directory of this machine.",
        details="By POST /v1/load_lora_adapter and /v1/unload_lora_adapter. There is then room for 8 "
        "adapters, unless max_loras says otherwise.",
    )
    share_prefixes: bool = setting(
        False,
        help="Share cached prefixes between keys; how fast an answer comes then shows what others sent.",
    )


@dataclass(frozen=True, slots=True)
class OnDemandSettings(Declared):
    """Sets how a server holds several models. Raises ConfigError."""

    idle_timeout: float = setting(
        300.0,
        help="Seconds without requests after which a model that is loaded on demand goes; inf for never.",
        details="keep_alive of a request to ollama's paths goes first.",
        limits=(0, inf),
        unit="seconds",
    )


def named_shares(texts: tuple[str, ...], names: Mapping[str, object]) -> dict[str, str]:
    """Return what is written behind the name of each model, in NAME=DEVICE[,HOST]. Raises ConfigError."""
    found = {}
    for text in texts:
        name, sign, share = text.rpartition("=")
        if not sign or name not in names:
            raise ConfigError(
                f"{text[:80]!r} gives no model memory; write NAME=SIZE with one of {', '.join(names)}"
            )
        for part in share.split(",", 1):
            parse_size(part, whole=UNKNOWN_WHOLE)
        found[name] = share
    return found
