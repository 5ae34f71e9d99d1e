"""`penstock serve`: a model behind OpenAI's API."""

import logging
import os
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from penstock.base.config import Config, launched
from penstock.base.errors import ConfigError
from penstock.cli.command import Command, Session, option
from penstock.cli.load import load
from penstock.cli.options import engine_config, engine_options
from penstock.cli.terminal import say
from penstock.server.parsing.dialects import AUTO, REASONING_PARSERS, TOOL_PARSERS
from penstock.server.tenants import Key

if TYPE_CHECKING:
    from penstock.server.fleet.replicas import Replicas

SERVER, REPLICAS, LIMITS, LOG = "Server options", "Replicas", "Limits", "Log"
FORMATS, LEVELS = ("text", "json"), ("debug", "info", "warning", "error")
KEYS = "PENSTOCK_API_KEYS"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
_LOG = logging.getLogger("penstock")
EXAMPLES = """
  penstock serve                                         the model that comes with penstock, at http://127.0.0.1:8000
  penstock serve ./my-model --name my-model --port 9000
  penstock serve ./my-model --host 0.0.0.0 --api-keys keys.txt
  curl http://127.0.0.1:8000/v1/chat/completions -H "Content-Type: application/json" \\
    -d '{"model": "shipped", "messages": [{"role": "user", "content": "Hello"}]}'
"""


def _replicas(ctx: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, int] | None:
    from penstock.server.fleet.scale import bounds

    try:
        return None if value is None else bounds(value)
    except ConfigError as error:
        raise click.BadParameter(str(error), ctx, parameter) from error


@click.command(cls=Command, examples=EXAMPLES)
@click.argument("model", required=False, type=click.Path(path_type=Path))
@option(
    SERVER,
    "--host",
    default="127.0.0.1",
    metavar="ADDRESS",
    help="Where to listen; 0.0.0.0 is everywhere. [127.0.0.1]",
)
@option(
    SERVER,
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    metavar="N",
    help="Where to listen; 0 is any free one. [8000]",
)
@option(
    SERVER,
    "--name",
    "names",
    multiple=True,
    metavar="NAME",
    help="What clients call the model; may be repeated. [its directory's]",
)
@option(
    SERVER,
    "--api-keys",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help=f"Keys, one a line, of which a client must send one. [{KEYS}, with commas between; else anybody "
    "may ask]",
)
@option(
    SERVER,
    "--allow-host",
    "allow_hosts",
    multiple=True,
    metavar="NAME",
    help="Without keys: a name to answer to, beside addresses and localhost; may be repeated.",
)
@option(
    SERVER,
    "--without-keys",
    is_flag=True,
    help="Let anybody who reaches --host use this server, though there are no keys.",
)
@option(
    SERVER,
    "--share-prefixes",
    is_flag=True,
    help="Let clients of all keys find each other's prefixes; how fast tells of them.",
)
@option(
    LIMITS,
    "--queue",
    type=click.IntRange(min=0),
    default=256,
    metavar="N",
    help="Outputs that may wait; beyond it is 429. [256]",
)
@option(
    LIMITS,
    "--max-body",
    type=click.IntRange(min=1024),
    default=32 << 20,
    metavar="BYTES",
    help="Of a request. [32 MiB]",
)
@option(
    LIMITS,
    "--request-timeout",
    type=click.FloatRange(min=0, min_open=True),
    metavar="S",
    help="Seconds a request may take. [any]",
)
@option(
    LIMITS,
    "--patience",
    type=click.FloatRange(min=0),
    default=30.0,
    metavar="S",
    help="Seconds for requests to end at the end. [30]",
)
@option(
    LIMITS,
    "--max-kept",
    type=click.IntRange(min=0),
    default=64 << 20,
    metavar="BYTES",
    help="Of responses to go on with. [64 MiB]",
)
@option(
    SERVER,
    "--tool-parser",
    type=click.Choice(TOOL_PARSERS),
    default=AUTO,
    help="How the model writes tool calls. [as its template]",
)
@option(
    SERVER,
    "--reasoning-parser",
    type=click.Choice(REASONING_PARSERS),
    default=AUTO,
    help="And its reasoning. [as its template]",
)
@option(
    REPLICAS,
    "--replicas",
    callback=_replicas,
    metavar="N",
    help="So many engines, on Ray; MIN:MAX: as there is work. [one, without]",
)
@option(
    REPLICAS,
    "--ray-address",
    metavar="ADDRESS",
    help="Of a cluster, on a machine of it; auto finds it. [a new one, here]",
)
@option(
    REPLICAS,
    "--replica-cpus",
    type=click.FloatRange(0, min_open=True),
    metavar="N",
    help="CPUs of each. [equal parts; 1 with GPUs]",
)
@option(
    REPLICAS,
    "--scale-up-after",
    type=click.FloatRange(min=0),
    default=30.0,
    metavar="S",
    help="Seconds with work for more. [30]",
)
@option(
    REPLICAS,
    "--scale-down-after",
    type=click.FloatRange(min=0),
    default=600.0,
    metavar="S",
    help="Seconds with too little. [600]",
)
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
    help="A line of text or a JSON object for each event. [text]",
)
@option(
    LOG, "--log-level", type=click.Choice(LEVELS), help="What to tell at least. [info; with --quiet warning]"
)
@engine_options
@click.pass_context
def command(ctx: click.Context, /, **settings: object) -> None:
    """Serve MODEL, a Hugging Face checkpoint directory, or without it the small model that comes with
    penstock.

    /v1/chat/completions, /v1/responses, /v1/completions, /v1/models, /tokenize and /detokenize; /health says
    that the server is alive, /ready that its model is loaded. The first Ctrl-C, or SIGTERM, lets requests
    end; a second one does not.
    """
    asked = ctx.params
    try:
        from penstock.server.app import Settings
        from penstock.server.run import Listening, serve
        from penstock.server.watching.logs import last_line, logged, note
        from penstock.server.watching.telemetry import traced
    except ModuleNotFoundError as missing:
        raise ConfigError(
            f"serving needs {missing.name}, which is not installed; pip install 'penstock[serve]'"
        ) from missing
    from penstock.api.llm import SHIPPED_MODEL  # torch, after what could be checked without it

    model = SHIPPED_MODEL if asked["model"] is None else asked["model"]
    config = engine_config(ctx, model, None)
    names = asked["names"] or (model.resolve().name,)
    parsers = asked["tool_parser"], asked["reasoning_parser"]
    there = Settings(
        tuple(names),
        api_keys(ctx),
        asked["max_body"],
        *parsers,
        asked["max_kept"],
        asked["allow_hosts"],
        asked["share_prefixes"],
    )
    if not (there.keys or asked["without_keys"] or asked["host"] in LOOPBACK):
        raise ConfigError(
            f"{asked['host']} can be reached from other machines, and there are no keys; name a file of "
            "them with --api-keys, or say "
            "--without-keys if anybody may use this server"
        )
    listening = Listening(
        asked["host"], asked["port"], asked["queue"], asked["patience"], asked["request_timeout"]
    )
    quiet, as_json = asked["quiet"], asked["log_format"] == "json"
    session = ctx.find_object(Session)
    if session is not None and as_json:
        session.report = lambda text, trace: say(last_line(text, trace))

    def tell_ready(address: str) -> None:
        if as_json:
            note("serving", model=names[0], address=address)
        else:
            say(f"serving {names[0]} at {address}")

    level = asked["log_level"] or ("warning" if quiet else "info")
    with logged(partial(say, faint=not as_json), asked["log_format"], level), traced(os.environ) as tellers:
        if as_json and session is not None and session.read is not None:
            note("settings", file=str(session.read))
        if not there.keys and asked["host"] not in LOOPBACK:
            _LOG.warning(
                "whoever reaches %s may use this server; --api-keys would ask for a key", asked["host"]
            )
        if asked["replicas"] is None and (
            asked["ray_address"] is not None or asked["replica_cpus"] is not None
        ):
            raise ConfigError(
                "--ray-address and --replica-cpus are for replicas; say how many with --replicas, or leave "
                "them out"
            )
        if asked["replicas"] is not None:
            crew = _crew(asked, config, names[0])
            serve(
                crew.load,
                there,
                listening,
                ready=tell_ready,
                tellers=tellers,
                desk=crew.desk,
                give_up=crew.give_up,
            )
            return
        load_model = partial(load, config, quiet=quiet or as_json)
        if config.tensor_parallel > 1 and (place := launched()) is not None and place.rank:
            load_model().close()  # It follows rank 0, which listens, and does not return.
            return
        serve(load_model, there, listening, ready=tell_ready, tellers=tellers)


def _crew(asked: Mapping[str, Any], config: Config, name: str) -> "Replicas":
    """The replicas that were asked for. Raises ConfigError."""
    if launched() is not None:
        raise ConfigError(
            "replicas are started by Ray, and this process was by torchrun; start one penstock serve, "
            "without torchrun"
        )
    try:
        from penstock.server.fleet.replicas import Replicas
    except ModuleNotFoundError as missing:
        raise ConfigError(
            "replicas need ray, which is not installed; pip install 'penstock[ray]'"
        ) from missing
    from penstock.server.fleet.scale import Scale

    least, most = asked["replicas"]
    scale = Scale(
        least,
        most,
        asked["ray_address"],
        asked["replica_cpus"],
        asked["scale_up_after"],
        asked["scale_down_after"],
    )
    return Replicas(config, scale, name, asked["patience"])


def keys_in_environment() -> tuple[Key, ...]:
    return tuple(Key(key.strip().encode()) for key in os.environ.get(KEYS, "").split(",") if key.strip())


def api_keys(ctx: click.Context) -> tuple[Key, ...]:
    """Of which a client must send one: from the file that was typed, else from the environment, else from the
    file that settings name.

    Raises ConfigError."""
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
            f"the API keys in {file} cannot be read: {fault}; give a file of keys, one a line"
        ) from fault
    if not lines:
        raise ConfigError(f"{file} has no API key in it; write one a line, or leave --api-keys out")
    return tuple({key.secret: key for key in (_key(line, number, file) for number, line in lines)}.values())


def _key(line: str, number: int, file: Path) -> Key:
    """Return the key of a line, with what stands behind a tab: the least number that it may send for
    `priority`. Raises ConfigError."""
    text, tab, granted = line.partition("\t")
    if not text.strip():
        raise ConfigError(
            f"line {number} of {file} has no key before the tab; write one there, or drop the line"
        )
    name, _, least = granted.strip().partition("=")
    if tab and (name != "priority" or not re.fullmatch(r"-?\d{1,9}", least)):
        raise ConfigError(
            f"behind a key in {file} stands {granted.strip()[:40]!r}; write priority=NUMBER behind a tab, "
            "or nothing"
        )
    return Key(text.strip().encode(), int(least) if tab else 0)
