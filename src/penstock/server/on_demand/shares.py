"""Says what each of several models may take of the memory that there is for all of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from penstock.arch.bounds import kv_token_bytes
from penstock.arch.families import FAMILIES
from penstock.arch.layout import group_layouts
from penstock.arch.spec import ModelSpec
from penstock.base.config import Config
from penstock.base.errors import ConfigError
from penstock.base.setting import Declared, setting
from penstock.base.units import format_size, parse_size
from penstock.engine.budget import GROWTH, LEAST_TOKENS, on_heap, usual_activations
from penstock.engine.plan import dtype_of, limits_of
from penstock.engine.rooms import Hardware, device_room, host_room
from penstock.server.on_demand.costs import Share
from penstock.weights.streaming.residency import padded

_CONTEXTS = 8
"""Sequences of LEAST_TOKENS tokens for whose KV a model has room, where no length was asked for."""
_PROCESS = 2 << 30
"""Bytes of host memory that a process takes beside a GPU."""
_BUFFERS = 16 << 20
"""Bytes of a CPU's libraries."""


@dataclass(frozen=True, slots=True)
class OnDemandSettings(Declared):
    """Sets how a server holds several models. Raises ConfigError."""

    idle_timeout: float = setting(
        300.0,
        help="Seconds without requests after which a model is unloaded; inf for never.",
        details="It holds with on_demand. keep_alive of a request to ollama's paths goes first.",
        limits=(0, inf),
        unit="seconds",
    )


def room_of(config: Config, hardware: Hardware) -> Share:
    """Return the memory for all models. Raises BudgetError."""
    if not hardware.cuda:
        return Share(device_room(config, hardware), host_room(config, hardware))
    asked = config.host_memory
    host = (
        host_room(config, hardware) if asked is None else parse_size(asked, whole=hardware.host_whole)
    )
    return Share(device_room(config, hardware), host)


def usual_share(spec: ModelSpec, config: Config, hardware: Hardware, room: Share) -> Share:
    """Return what a model may take where nobody says: all of its weights, the largest step, and KV for one
    sequence of max_length or several of a usual length. It is no more than the room. Raises ConfigError."""
    dtype = dtype_of(config, spec.dtype, None, hardware)
    limits = limits_of(config, spec, hardware)
    weights = sum(padded(one) for one in group_layouts(spec, FAMILIES[spec.family].names, dtype))
    step = usual_activations(spec, dtype, limits.max_step_tokens, limits.max_sequences)
    if not hardware.cuda:
        step = on_heap(step, _BUFFERS)
    tokens = config.max_length or min(_CONTEXTS * LEAST_TOKENS, limits.max_sequences * spec.max_length)
    if config.kv_blocks is not None:
        tokens = config.kv_blocks * config.block_size
    kv = kv_token_bytes(spec, dtype) * tokens
    wanted = weights + step + kv
    beyond = max(wanted - room.device, 0)
    if not hardware.cuda:
        return Share(min(wanted, room.device), min(beyond, room.host))
    far = 0 if config.host_kv_memory is None else parse_size(config.host_kv_memory, whole=hardware.host_whole)
    return Share(min(wanted, room.device), min(_PROCESS + GROWTH + beyond + far, room.host))


def given_share(text: str, usual: Share, hardware: Hardware, room: Share, name: str) -> Share:
    """Return what a model may take by DEVICE or DEVICE,HOST. Raises ConfigError if that is more than there is
    for all."""
    device, comma, host = text.partition(",")
    share = Share(
        parse_size(device, whole=hardware.whole),
        parse_size(host, whole=hardware.host_whole) if comma else usual.host,
    )
    for what, asked, most in (("device", share.device, room.device), ("host", share.host, room.host)):
        if asked > most:
            raise ConfigError(
                f"{name} was given {format_size(asked)} of {what} memory, but all models have "
                f"{format_size(most)}; give it less, or raise {what}_memory"
            )
    return share


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
            parse_size(part, whole=1 << 50)
        found[name] = share
    return found
