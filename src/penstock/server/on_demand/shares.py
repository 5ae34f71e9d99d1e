"""Says what each of several models may take of the memory that there is for all of them."""

from collections.abc import Mapping

from penstock.arch.bounds import kv_token_bytes
from penstock.arch.families import FAMILIES
from penstock.arch.layout import group_layouts
from penstock.arch.spec import ModelSpec
from penstock.base.config import Config
from penstock.base.errors import ConfigError
from penstock.base.units import format_size, parse_size
from penstock.engine.budget import GROWTH, LEAST_TOKENS, on_heap, usual_activations
from penstock.engine.limits import dtype_of, limits_of
from penstock.engine.rooms import Hardware, device_room, host_room
from penstock.server.on_demand.costs import MemoryShare
from penstock.weights.streaming.residency import padded

_CONTEXTS = 8
"""Sequences of LEAST_TOKENS tokens for whose KV a model has room, where no length was asked for."""
_STEP_SLACK = 6
"""A step may take one part in so many more than is estimated; else there is too little room for KV."""
_PROCESS = 2 << 30
"""Bytes of host memory that a process takes beside a GPU."""
_BUFFERS = 16 << 20
"""Bytes of a CPU's libraries."""


def room_of(config: Config, hardware: Hardware) -> MemoryShare:
    """Return the memory for all models. Raises BudgetError."""
    if not hardware.cuda:
        return MemoryShare(device_room(config, hardware), host_room(config, hardware))
    asked = config.host_memory
    host = host_room(config, hardware) if asked is None else parse_size(asked, whole=hardware.host_whole)
    return MemoryShare(device_room(config, hardware), host)


def usual_share(
    spec: ModelSpec, config: Config, hardware: Hardware, room: MemoryShare, draft: ModelSpec | None = None
) -> MemoryShare:
    """Return what a model may take where nobody says: all of its weights, the largest step, and KV for one
    sequence of max_length or several of a usual length. It is no more than the room. Raises ConfigError.

    draft: of its draft model, whose weights and KV are beside its own, or of its copy in few bits, which has
    no KV.
    """
    dtype = dtype_of(config, spec.dtype, None, hardware)
    limits = limits_of(config, spec, hardware)
    weights, token = _weights(spec, dtype), kv_token_bytes(spec, dtype)
    if draft is not None:
        own = dtype_of(config, draft.dtype, None, hardware)
        weights += _weights(draft, own)
        token += 0 if config.drafts_itself else kv_token_bytes(draft, own)
    step = usual_activations(spec, dtype, limits.max_step_tokens, limits.max_sequences)
    if not hardware.cuda:
        step = on_heap(step, _BUFFERS)
    step += step // _STEP_SLACK
    tokens = config.max_length or min(_CONTEXTS * LEAST_TOKENS, limits.max_sequences * spec.max_length)
    if config.kv_blocks is not None:
        tokens = config.kv_blocks * config.block_size
    wanted = weights + step + token * tokens
    beyond = max(wanted - room.device, 0)
    if not hardware.cuda:
        return MemoryShare(min(wanted, room.device), min(beyond, room.host))
    far = 0 if config.host_kv_memory is None else parse_size(config.host_kv_memory, whole=hardware.host_whole)
    return MemoryShare(min(wanted, room.device), min(_PROCESS + GROWTH + beyond + far, room.host))


def grown(shares: Mapping[str, tuple[MemoryShare, MemoryShare]], room: MemoryShare) -> dict[str, MemoryShare]:
    """Return what each model may take: up to what its whole context needs, where that keeps no other out.

    shares: by each model's name, what it takes at least, and with its whole context. If all models fit
    together, what they leave goes first to those that lack least. A model that no other fits beside may take
    all there is.
    """
    found = {name: least for name, (least, _) in shares.items()}
    left = room.device - sum(share.device for share in found.values())

    def lacks(name: str) -> int:
        return shares[name][1].device - found[name].device

    for name in sorted(shares, key=lacks):
        others = [share.device for other, share in found.items() if other != name]
        alone = all(found[name].device + other > room.device for other in others)
        more = min(lacks(name), room.device - found[name].device if alone else left)
        if more > 0:
            left -= more
            found[name] += MemoryShare(more)
    return found


def _weights(spec: ModelSpec, dtype: str) -> int:
    return sum(padded(one) for one in group_layouts(spec, FAMILIES[spec.family].names, dtype))


def given_share(
    text: str, usual: MemoryShare, hardware: Hardware, room: MemoryShare, name: str
) -> MemoryShare:
    """Return what a model may take by DEVICE or DEVICE,HOST. Raises ConfigError if that is more than there is
    for all."""
    device, comma, host = text.partition(",")
    share = MemoryShare(
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
