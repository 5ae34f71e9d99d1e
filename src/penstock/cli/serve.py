"""`penstock serve`: a model behind OpenAI's API."""

import logging
import os
from functools import partial
from pathlib import Path

import click

from penstock.base.config import launched
from penstock.base.errors import ConfigError
from penstock.cli.command import Command, option
from penstock.cli.load import load, told
from penstock.cli.options import engine_config, engine_options
from penstock.cli.terminal import say

SERVER, LIMITS = "Server options", "Limits"
KEYS = "PENSTOCK_API_KEYS"
EXAMPLES = """
  penstock serve                                         the model that comes with penstock, at http://127.0.0.1:8000
  penstock serve ./my-model --name my-model --port 9000
  penstock serve ./my-model --host 0.0.0.0 --api-keys keys.txt
  curl http://127.0.0.1:8000/v1/chat/completions -H "Content-Type: application/json" \\
    -d '{"model": "shipped", "messages": [{"role": "user", "content": "Hello"}]}'
"""


@click.command(cls=Command, examples=EXAMPLES)
@click.argument("model", required=False, type=click.Path(path_type=Path))
@option(SERVER, "--host", default="127.0.0.1", metavar="ADDRESS", help="Where to listen; 0.0.0.0 is everywhere. [127.0.0.1]")
@option(SERVER, "--port", type=click.IntRange(0, 65535), default=8000, metavar="N", help="Where to listen; 0 is any free one. [8000]")
@option(SERVER, "--name", "names", multiple=True, metavar="NAME", help="What clients call the model; may be repeated. [its directory's]")
@option(
    SERVER,
    "--api-keys",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help=f"Keys, one a line, of which a client must send one. [{KEYS}, with commas between; else anybody may ask]",
)
@option(LIMITS, "--queue", type=click.IntRange(min=0), default=256, metavar="N", help="Outputs that may wait; beyond it is 429. [256]")
@option(LIMITS, "--max-body", type=click.IntRange(min=1024), default=32 << 20, metavar="BYTES", help="Of a request. [32 MiB]")
@option(LIMITS, "--patience", type=click.FloatRange(min=0), default=30.0, metavar="S", help="Seconds for requests to end at the end. [30]")
@option(SERVER, "--quiet", "-q", is_flag=True, help="Do not print device and memory sizing.")
@engine_options
@click.pass_context
def command(ctx: click.Context, /, **settings: object) -> None:
    """Serve MODEL, a Hugging Face checkpoint directory, or without it the small model that comes with penstock.

    /v1/chat/completions, /v1/completions, /v1/models, /tokenize and /detokenize; /health says that the server is alive, /ready that its
    model is loaded. The first Ctrl-C, or SIGTERM, lets requests end; a second one does not.
    """
    asked = ctx.params
    try:
        from penstock.server.app import Settings
        from penstock.server.run import Listening, serve
    except ModuleNotFoundError as missing:
        raise ConfigError(f"serving needs {missing.name}, which is not installed; pip install 'penstock[serve]'") from missing
    from penstock.api.llm import SHIPPED_MODEL  # torch, after what could be checked without it

    model = SHIPPED_MODEL if asked["model"] is None else asked["model"]
    config = engine_config(ctx, model, None)
    names = asked["names"] or (model.resolve().name,)
    there = Settings(tuple(names), _keys(asked["api_keys"]), asked["max_body"])
    if not there.keys and asked["host"] not in ("127.0.0.1", "localhost", "::1"):
        logging.getLogger("penstock").warning("whoever reaches %s may use this server; --api-keys would ask for a key", asked["host"])
    if config.tensor_parallel > 1 and (place := launched()) is not None and place.rank:
        load(config, quiet=asked["quiet"]).close()  # It follows rank 0, which listens, and does not return.
        return
    listening = Listening(asked["host"], asked["port"], asked["queue"], asked["patience"])
    with told(asked["quiet"]):
        serve(partial(load, config, quiet=asked["quiet"]), there, listening, ready=lambda address: say(f"serving {names[0]} at {address}"))


def _keys(file: Path | None) -> tuple[bytes, ...]:
    """Raises ConfigError."""
    if file is None:
        return tuple(key.strip().encode() for key in os.environ.get(KEYS, "").split(",") if key.strip())
    try:
        keys = tuple(line.strip().encode() for line in file.read_text(encoding="utf-8").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as fault:
        raise ConfigError(f"the API keys in {file} cannot be read: {fault}; give a file of keys, one a line") from fault
    if not keys:
        raise ConfigError(f"{file} has no API key in it; write one a line, or leave --api-keys out")
    return keys
