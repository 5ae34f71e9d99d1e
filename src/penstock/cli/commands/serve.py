"""`penstock serve`: a model behind OpenAI's API."""

import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
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
from penstock.cli.models import check_names, located, taken
from penstock.cli.options import engine_config, engine_options, flag, settings_from, with_options
from penstock.cli.terminal import say
from penstock.engine.adapters import module_paths
from penstock.server.fleet.scale import Scale, bounds
from penstock.server.http.keys import ApiKey
from penstock.server.settings import AnswerSettings, Listening, OnDemandSettings, named_shares

if TYPE_CHECKING:
    from penstock.server.broker.backend import Backend
    from penstock.server.fleet.replicas import Replicas
    from penstock.server.hosting import Hosting

SERVER, REPLICAS, LIMITS, LOG = "Server options", "Replicas", "Limits", "Log"
MODELS = "Several models"
FORMATS, LEVELS = ("text", "json"), ("debug", "info", "warning", "error")
KEYS = "PENSTOCK_API_KEYS"
_THEIRS = "VLLM_API_KEY"
"""vLLM's variable. Whoever sets it takes the server for one that asks for a key."""
ROOM_FOR_LORAS = 8
"""Adapters that there is room for where clients may load some."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
_SETTINGS = (Listening, AnswerSettings, Scale, OnDemandSettings)
_DECLARED = {one.name: one for kind in _SETTINGS for one in settings_of(kind)}
_USUAL_PORTS = {"http": ":80", "https": ":443"}
_LOG = logging.getLogger("penstock")
EXAMPLES = """
  penstock serve                                         the model that comes with penstock, at http://127.0.0.1:8000
  penstock serve Qwen/Qwen3-8B                           one of the Hugging Face Hub
  penstock serve ./my-model --name my-model --port 9000
  penstock serve ./my-model --host 0.0.0.0 --api-keys keys.txt
  penstock serve ./small big=./my-large-model --on-demand --device-memory 20GiB
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
@click.argument("model", nargs=-1, metavar="[MODEL]...")
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
    MODELS,
    "--on-demand",
    is_flag=True,
    help="Serve one or several MODELs, each loaded at its first use, and unloaded when it is idle or "
    "another needs its room.",
)
@_flags(MODELS, "idle_timeout")
@option(
    MODELS,
    "--model-memory",
    multiple=True,
    metavar="NAME=SIZE",
    help="Memory that a model may take of --device-memory; NAME=SIZE,SIZE also of --host-memory. May be "
    "repeated. [weights, the largest step and some KV]",
)
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
    Without it the small model that comes with penstock is served. With --on-demand there may be several;
    NAME=MODEL gives one a name.

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
    wanted = _wanted(asked)
    config = engine_config(ctx, Path(wanted[0][1]) if wanted else None, None)
    config, modules = _with_adapters(asked, config), tuple(module_paths(config))
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

    def served() -> str:
        return ",".join(there.names) if asked["on_demand"] else there.names[0]

    def tell_ready(address: str) -> None:
        if as_json:
            note("serving", model=served(), address=address)
        else:
            say(f"serving {served()} at {address}")

    def serve_until_end(load: "Callable[[], Backend] | Hosting", **more: Any) -> None:
        serve(load, there, listening, ready=tell_ready, sinks=sinks, **more)
        if not as_json:
            say(f"stopped serving {served()}")

    level = asked["log_level"] or ("warning" if quiet else "info")
    with logged(partial(say, faint=not as_json), asked["log_format"], level), traced(os.environ) as sinks:
        if as_json and session is not None and session.read is not None:
            note("settings", file=str(session.read))
        if not there.keys and asked["host"] not in LOOPBACK:
            _LOG.warning(
                "anybody who can reach %s may use this server; give --api-keys to ask for a key",
                asked["host"],
            )
        _check_replicas(asked)
        if asked["on_demand"]:
            hosting = _hosting(asked, config, wanted, as_json)
            there = replace(there, names=hosting.names)
            serve_until_end(hosting)
            return
        config, name = located(config, log=as_json, **taken(asked))
        if not asked["names"]:
            there = replace(there, names=(name,))
        check_names(there.names, modules)
        if asked["replicas"] is not None:
            crew = _crew(asked, config, there.names[0])
            serve_until_end(crew.load, cancel_load=crew.cancel_load)
            return
        load_model = partial(load, config, quiet=quiet or as_json)
        if config.tensor_parallel > 1 and (place := launched()) is not None and place.rank:
            load_model().close()  # It follows rank 0, which listens, and does not return.
            return
        serve_until_end(lambda: LocalBackend(load_model()))


def _wanted(asked: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the models that were asked for: the name of each, empty if none was given, and what it is.

    Raises ConfigError.
    """
    if not asked["on_demand"]:
        if len(asked["model"]) > 1:
            raise ConfigError(
                f"{len(asked['model'])} models were named, but a server holds one; add --on-demand, so that "
                "each is loaded at its first use"
            )
        if asked["model_memory"]:
            raise ConfigError("--model-memory is only for several models; add --on-demand, or leave it out")
        return [("", text) for text in asked["model"]]
    if asked["replicas"] is not None:
        raise ConfigError("--on-demand does not work with --replicas; leave one of them out")
    if launched() is not None:
        raise ConfigError(
            "--on-demand does not work under torchrun, since each model has a process of its own; start "
            "penstock serve without torchrun"
        )
    found = []
    for text in asked["model"]:
        name, sign, model = text.partition("=")
        whole = not sign or "/" in name or Path(text).exists()
        found.append(("", text) if whole else (name, model))
    if asked["names"] and len(found) > 1:
        raise ConfigError("--name is for one model; write NAME=MODEL for each of several")
    if asked["names"][1:]:
        raise ConfigError("a model that is loaded on demand has one name; leave out all --name but one")
    return found


def _with_adapters(asked: Mapping[str, Any], config: Config) -> Config:
    """Return the settings with room for LoRA adapters that clients may load. Raises ConfigError."""
    loads = asked["allow_runtime_lora_updating"]
    if asked["on_demand"] and (config.lora_modules or config.max_loras or loads):
        raise ConfigError(
            "models that are loaded on demand have no LoRA adapters; leave out --lora-modules, --max-loras "
            "and --allow-runtime-lora-updating, or serve one model without --on-demand"
        )
    if not loads or config.max_loras is not None:
        return config
    return replace(config, max_loras=max(ROOM_FOR_LORAS, len(config.lora_modules)))


def _hosting(
    asked: Mapping[str, Any], config: Config, wanted: Sequence[tuple[str, str]], as_json: bool
) -> "Hosting":
    """Return what loads models at their first use. Raises PenstockErrors."""
    from penstock.server.hosting import Hosting

    configs: dict[str, Config] = {}
    for given, text in wanted or [("", str(config.model))]:
        own, name = located(replace(config, model=Path(text)), log=as_json, **taken(asked))
        name = given or (asked["names"] or (name,))[0]
        if name in configs:
            raise ConfigError(f"two models are called {name}; give one another name, as NAME={text}")
        configs[name] = own
    shares = named_shares(asked["model_memory"], configs)
    return Hosting(configs, shares, settings_from(OnDemandSettings, asked))


def _check_replicas(asked: Mapping[str, Any]) -> None:
    """Raise ConfigError for settings of replicas where there are none."""
    if asked["replicas"] is None and (asked["ray_address"] is not None or asked["replica_cpus"] is not None):
        raise ConfigError(
            "--ray-address and --replica-cpus are only for replicas; add --replicas N, or leave them out"
        )


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
        if not (keys := keys_in_environment()) and os.environ.get(_THEIRS):
            raise ConfigError(f"{_THEIRS} is not read; give its key in {KEYS}, or unset it to serve without")
        return keys
    try:
        lines = [
            (number, line)
            for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1)
            if line.strip()
        ]
    except (OSError, UnicodeDecodeError) as fault:
        raise ConfigError(
            f"the API keys in {file} cannot be read: {fault}; give a text file with one key on each line, "
            f"or the keys themselves in the variable {KEYS}"
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
