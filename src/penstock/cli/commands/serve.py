"""`penstock serve`: a model behind OpenAI's API."""

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from penstock.base.config import Config, launched
from penstock.base.errors import ConfigError
from penstock.base.setting import settings_of
from penstock.cli.command import Command, Decorator, Session, option
from penstock.cli.load import load
from penstock.cli.models import located, taken
from penstock.cli.options import engine_config, engine_options, flag, settings_from, with_options
from penstock.cli.terminal import say
from penstock.engine.adapters import module_paths
from penstock.server.fleet.scale import Scale, bounds
from penstock.server.http.keys import ApiKey
from penstock.server.settings import AnswerSettings, Listening

if TYPE_CHECKING:
    from penstock.server.fleet.replicas import Replicas

SERVER, REPLICAS, LIMITS, LOG = "Server options", "Replicas", "Limits", "Log"
FORMATS, LEVELS = ("text", "json"), ("debug", "info", "warning", "error")
KEYS = "PENSTOCK_API_KEYS"
ROOM_FOR_LORAS = 8
"""Adapters that there is room for where clients may load some."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
_DECLARED = {one.name: one for kind in (Listening, AnswerSettings, Scale) for one in settings_of(kind)}
_USUAL_PORTS = {"http": ":80", "https": ":443"}
_LOG = logging.getLogger("penstock")
EXAMPLES = """
  penstock serve                                         the model that comes with penstock, at http://127.0.0.1:8000
  penstock serve Qwen/Qwen3-8B                           one of the Hugging Face Hub
  penstock serve ./my-model --name my-model --port 9000
  penstock serve ./my-model --host 0.0.0.0 --api-keys keys.txt
  curl http://127.0.0.1:8000/v1/chat/completions -H "Content-Type: application/json" \\
    -d '{"model": "shipped", "messages": [{"role": "user", "content": "Hello"}]}'
"""


def _replicas(ctx: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, int] | None:
    try:
        return None if value is None else bounds(value)
    except ConfigError as error:
        raise click.BadParameter(str(error), ctx, parameter) from error


def _origins(ctx: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    """Return origins as browsers write them: in small letters, without the port that is usual."""
    found = []
    for one in value:
        parts = re.fullmatch(r"([a-z][a-z0-9+.-]*)://([^/\s]+?)(:\d+)?/?", one.lower())
        if one != "*" and parts is None:
            raise click.BadParameter(
                f"{one[:80]!r} is no origin; write a scheme, a name and perhaps a port, such as "
                "https://chat.example.org, or * for any",
                ctx,
                parameter,
            )
        usual = parts is not None and parts[3] == _USUAL_PORTS.get(parts[1], "")
        found.append("*" if parts is None else f"{parts[1]}://{parts[2]}{'' if usual else parts[3] or ''}")
    return tuple(found)


def _flags(section: str, *names: str) -> Decorator:
    """Return the flags of settings that a server, its answers or its replicas declare."""
    rare = section in (LIMITS, REPLICAS)
    return with_options(*(flag(_DECLARED[name], section, rare=rare) for name in names))


@click.command(cls=Command, examples=EXAMPLES)
@click.argument("model", required=False, type=click.Path(path_type=Path))
@_flags(SERVER, "host", "port")
@option(
    SERVER,
    "--name",
    "names",
    multiple=True,
    metavar="NAME",
    help="Name of the model for clients; may be repeated. [its directory's, or its name on the Hub]",
)
@option(
    SERVER,
    "--api-keys",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="File of keys, one a line; a client must send one of them. "
    f"[{KEYS}, with commas between; without keys all may ask]",
)
@option(
    SERVER,
    "--allow-host",
    "allow_hosts",
    multiple=True,
    metavar="NAME",
    rare=True,
    help="Name that this machine answers to without keys, beside its addresses; may be repeated.",
)
@option(
    SERVER,
    "--allow-origin",
    "allow_origins",
    multiple=True,
    callback=_origins,
    metavar="ORIGIN",
    help="Site whose pages may use the server (CORS), such as https://chat.example.org, or * for any; may be "
    "repeated.",
)
@option(
    SERVER,
    "--without-keys",
    is_flag=True,
    help="Let anybody who can reach --host use the server, without keys.",
)
@_flags(SERVER, "allow_runtime_lora_updating", "share_prefixes")
@_flags(LIMITS, "queue", "max_body", "request_timeout", "patience", "max_kept")
@_flags(SERVER, "tool_parser", "reasoning_parser")
@option(
    REPLICAS,
    "--replicas",
    callback=_replicas,
    metavar="N",
    rare=True,
    help="Engines to start on Ray; MIN:MAX for as many as there is work for. [one engine, without Ray]",
)
@_flags(REPLICAS, "ray_address", "replica_cpus", "scale_up_after", "scale_down_after")
@option(
    SERVER,
    "--quiet",
    "-q",
    is_flag=True,
    help="Do not print device and memory sizing, nor a line for each request.",
)
@option(
    LOG,
    "--log-format",
    type=click.Choice(FORMATS),
    default="text",
    help="Format of the log: a line of text or a JSON object an event. [text]",
)
@option(
    LOG,
    "--log-level",
    type=click.Choice(LEVELS),
    rare=True,
    help="Least level of events in the log. [info; with --quiet warning]",
)
@engine_options
@click.pass_context
def command(ctx: click.Context, /, **settings: object) -> None:
    """Serve MODEL: a checkpoint directory, a GGUF file, or a model of the Hugging Face Hub, as owner/name.
    Without it the small model that comes with penstock is served.

    /v1/chat/completions, /v1/responses, /v1/completions, /v1/models, /tokenize and /detokenize; /v1/messages
    as Anthropic has it; /api/chat and others as ollama has them. /health says that the server is alive,
    /ready that its model is loaded. The first Ctrl-C, or SIGTERM, lets requests end; a second one does not.
    """
    asked = ctx.params
    try:
        from penstock.server.broker.backend import LocalBackend
        from penstock.server.http.state import ServerSettings
        from penstock.server.monitoring.logs import last_line, logged, note
        from penstock.server.monitoring.telemetry import traced
        from penstock.server.run import serve
    except ModuleNotFoundError as missing:
        raise ConfigError(
            f"serving needs {missing.name}, which is not installed; pip install 'penstock[serve]'"
        ) from missing
    config = engine_config(ctx, asked["model"], None)
    modules = tuple(module_paths(config))
    if asked["allow_runtime_lora_updating"] and config.max_loras is None:
        config = replace(config, max_loras=max(ROOM_FOR_LORAS, len(modules)))
    names = asked["names"] or (str(config.model),)
    allowed = {name: asked[name] for name in ("allow_hosts", "allow_origins")}
    there = settings_from(
        ServerSettings, asked, names=tuple(names), lora_names=modules, keys=api_keys(ctx), **allowed
    )
    if not (there.keys or asked["without_keys"] or asked["host"] in LOOPBACK):
        raise ConfigError(
            f"{asked['host']} can be reached from other machines, and no API keys are set; name a file of "
            "keys with --api-keys, or add --without-keys to let anybody use this server"
        )
    listening = settings_from(Listening, asked)
    quiet, as_json = asked["quiet"], asked["log_format"] == "json"
    session = ctx.find_object(Session)
    if session is not None and as_json:
        session.report = lambda text, trace: say(last_line(text, trace))

    def tell_ready(address: str) -> None:
        if as_json:
            note("serving", model=there.names[0], address=address)
        else:
            say(f"serving {there.names[0]} at {address}")

    level = asked["log_level"] or ("warning" if quiet else "info")
    with logged(partial(say, faint=not as_json), asked["log_format"], level), traced(os.environ) as sinks:
        if as_json and session is not None and session.read is not None:
            note("settings", file=str(session.read))
        if not there.keys and asked["host"] not in LOOPBACK:
            _LOG.warning(
                "anybody who can reach %s may use this server; give --api-keys to ask for a key",
                asked["host"],
            )
        if asked["replicas"] is None and (
            asked["ray_address"] is not None or asked["replica_cpus"] is not None
        ):
            raise ConfigError(
                "--ray-address and --replica-cpus are only for replicas; add --replicas N, or leave them out"
            )
        config, name = located(config, log=as_json, **taken(asked))
        if not asked["names"]:
            there = replace(there, names=(name,))
        if same := set(there.names) & set(modules):
            raise ConfigError(
                f"{min(same)!r} names the model and a LoRA adapter; give one of them another name, by "
                "--name or --lora-modules"
            )
        if asked["replicas"] is not None:
            crew = _crew(asked, config, there.names[0])
            serve(
                crew.load,
                there,
                listening,
                ready=tell_ready,
                sinks=sinks,
                cancel_load=crew.cancel_load,
            )
            return
        load_model = partial(load, config, quiet=quiet or as_json)
        if config.tensor_parallel > 1 and (place := launched()) is not None and place.rank:
            load_model().close()  # It follows rank 0, which listens, and does not return.
            return
        serve(lambda: LocalBackend(load_model()), there, listening, ready=tell_ready, sinks=sinks)


def _crew(asked: Mapping[str, Any], config: Config, name: str) -> "Replicas":
    """Return the replicas that were asked for. Raises ConfigError."""
    if launched() is not None:
        raise ConfigError(
            "--replicas does not work under torchrun, since Ray starts the replicas; start penstock serve "
            "without torchrun"
        )
    try:
        from penstock.server.fleet.replicas import Replicas
    except ModuleNotFoundError as missing:
        raise ConfigError(
            "replicas need ray, which is not installed; pip install 'penstock[ray]'"
        ) from missing
    least, most = asked["replicas"]
    scale = settings_from(Scale, asked, least=least, most=most)
    return Replicas(config, scale, name, asked["patience"])


def keys_in_environment() -> tuple[ApiKey, ...]:
    """Return the keys in PENSTOCK_API_KEYS."""
    return tuple(ApiKey(key.strip().encode()) for key in os.environ.get(KEYS, "").split(",") if key.strip())


def api_keys(ctx: click.Context) -> tuple[ApiKey, ...]:
    """Return the keys; a client must send one of them. Raises ConfigError.

    They are from the file that was typed, else from the environment, else from the file that settings name.
    """
    file: Path | None = ctx.params["api_keys"]
    typed = ctx.get_parameter_source("api_keys") is ParameterSource.COMMANDLINE
    if file is None or (not typed and keys_in_environment()):
        return keys_in_environment()
    try:
        lines = [
            (number, line)
            for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1)
            if line.strip()
        ]
    except (OSError, UnicodeDecodeError) as fault:
        raise ConfigError(
            f"the API keys in {file} cannot be read: {fault}; give a text file with one key on each line"
        ) from fault
    if not lines:
        raise ConfigError(f"{file} has no API key in it; write one key on each line, or leave --api-keys out")
    return tuple({key.secret: key for key in (_key(line, number, file) for number, line in lines)}.values())


def _key(line: str, number: int, file: Path) -> ApiKey:
    """Read a line of the file: a key, and behind a tab the least number that it may send for `priority`.

    Raises ConfigError.
    """
    text, tab, granted = line.partition("\t")
    if not text.strip():
        raise ConfigError(
            f"line {number} of {file} has no key before the tab; write one there, or remove the line"
        )
    name, _, least = granted.strip().partition("=")
    if tab and (name != "priority" or not re.fullmatch(r"-?\d{1,9}", least)):
        raise ConfigError(
            f"a key in {file} is followed by {granted.strip()[:40]!r}; write priority=NUMBER after a tab, "
            "or nothing"
        )
    return ApiKey(text.strip().encode(), int(least) if tab else 0)
