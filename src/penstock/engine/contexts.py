"""Contexts longer than the device holds: how much host memory their KV gets, and in which pieces it passes
through the device. Plain values: nothing here reaches torch."""

from dataclasses import dataclass, replace

from penstock.arch.layout import KVLayout
from penstock.arch.spec import DTYPE_BYTES, ModelSpec
from penstock.base.config import Config
from penstock.base.errors import BudgetError, ConfigError
from penstock.base.units import format_size, parse_size
from penstock.engine.budget import goes_to_host, usual_activations
from penstock.engine.rooms import Hardware, host_room
from penstock.kv.movement.sizes import (
    Disk,
    Policies,
    carrier_bytes,
    chosen_bytes,
    record_bytes,
    sketch_layout,
    staging_bytes,
    usual_tile,
)
from penstock.kv.store.sizes import least_cap
from penstock.sched.rules import SchedulerLimits
from penstock.worker.sizes import prefix_blocker

_CHUNKS = 1024, 16384
_STEP_PART = 4
"""Activations of a step that was not asked for take at most one part in so many of the device's memory."""


@dataclass(frozen=True, slots=True)
class LongRoom:
    """Holds the room for KV in host memory and on disk, and how it streams through the device.

    tile_tokens, chunk_tokens: tokens of a tile and of a chunk, whole blocks.
    disk: more blocks behind host memory, in a file that lives as long as the process.
    store_bytes: bytes of disk for blocks that outlive the process.
    unused_bytes: bytes of disk that are left over and too few for such a store.
    most_blocks: blocks of the longest sequence.
    """

    layout: KVLayout
    blocks: int
    tile_tokens: int
    chunk_tokens: int
    disk: Disk | None = None
    store_bytes: int = 0
    unused_bytes: int = 0
    policies: Policies | None = None
    most_blocks: int = 0

    @property
    def host_bytes(self) -> int:
        """Return the bytes of host memory for KV, staging buffers and sketches of keys."""
        staging = staging_bytes(self.layout, self.tile_tokens, self.chunk_tokens) if self.disk else 0
        sketches = self._sketch_bytes * (self.blocks + self.on_disk)
        return self.blocks * self.layout.block_bytes + staging * (2 if self.policies else 1) + sketches

    @property
    def _sketch_bytes(self) -> int:
        """Return the bytes of host memory for the sketches of a block's keys; 0 without policies."""
        return (
            sketch_layout(self.layout, self.policies.bits).bytes * self.layout.layers if self.policies else 0
        )

    def within(self, there: int) -> "LongRoom":
        """Return the room in at most `there` bytes of host memory.

        It has fewer blocks on the host, and fewer on disk if the sketches of those take too much. It has no
        blocks on the host if there is no room for one.
        """
        each, sketches = self.layout.block_bytes + self._sketch_bytes, self._sketch_bytes
        room = self
        if self.disk and sketches:
            beside = there - self.host_bytes + self.blocks * each + self.on_disk * sketches - each
            room = replace(
                room, disk=replace(self.disk, blocks=max(min(self.on_disk, beside // sketches), 1))
            )
        return replace(room, blocks=room.blocks - max(-(-(room.host_bytes - there) // each), 0))

    @property
    def on_disk(self) -> int:
        """Return the number of blocks on disk."""
        return self.disk.blocks if self.disk else 0

    @property
    def device_bytes(self) -> int:
        """Return the bytes of the device through which far KV streams."""
        chosen = (
            chosen_bytes(self.layout, self.tile_tokens, self.most_blocks, self.policies)
            if self.policies
            else 0
        )
        return carrier_bytes(self.layout, self.tile_tokens, self.chunk_tokens) + chosen

    def __str__(self) -> str:
        tokens, more = self.blocks * self.layout.block_size, self.on_disk * self.layout.block_size
        kind = " in fp8" if self.layout.rounded_from else ""
        disk = (
            f"{format_size(self.on_disk * self.layout.layers * record_bytes(self.layout))} on disk for "
            f"{more:,} more; "
            if more
            else ""
        )
        if self.store_bytes:
            disk += f"{format_size(self.store_bytes)} on disk keep blocks for later; "
        if self.unused_bytes:
            least = format_size(least_cap(self.layout.block_bytes))
            disk += (
                f"{format_size(self.unused_bytes)} left on disk keep no blocks for later, which takes "
                f"{least} or more; "
            )
        return (
            f"{format_size(self.host_bytes)} of host memory hold KV{kind} for {tokens:,} tokens; {disk}"
            f"{format_size(self.device_bytes)} of the device for tiles of {self.tile_tokens:,} tokens and "
            f"chunks of {self.chunk_tokens:,}"
        )


def long_room(
    config: Config,
    spec: ModelSpec,
    limits: SchedulerLimits,
    layout: KVLayout,
    hardware: Hardware,
    total: int,
    resident: int,
) -> LongRoom | None:
    """Host memory for KV: as much as was asked for, or what a sequence of the length that was asked for takes
    if it does not fit the device. None if nobody needs any.

    spec: of this rank's part of the model. total: bytes of the device. resident: what all weights and the
    largest step take of them. Of several ranks each holds its own heads' KV, in its part of what was asked
    for. Raises BudgetError, ConfigError.
    """
    asked, size, ranks = config.host_kv_memory, layout.block_size, config.tensor_parallel
    policies = _policies(config, spec)  # Refused where they cannot be, whether this room holds KV or not.
    if asked in (0, "0"):
        if config.disk_kv_memory is not None:
            raise ConfigError(
                "disk_kv_memory needs host_kv_memory, since KV comes from disk by way of host memory; give "
                "host_kv_memory a size above 0"
            )
        return None
    needed = -(-limits.max_length // size)
    if asked is None and config.disk_kv_memory is None:
        fits = not goes_to_host(needed * layout.block_bytes, total, resident)
        if (
            fits
            or config.max_length is None
            or config.kv_blocks is not None
            or limits.max_step_tokens < max(2, size)
        ):
            return None
        if not hardware.cuda and host_room(config, hardware) == 0:
            return None
    if config.host_kv_dtype == "fp8":
        layout = layout.in_fp8
    if limits.max_step_tokens < max(2, size):
        least = f"a block, {size} tokens" if size > 1 else "2 tokens"
        raise ConfigError(
            f"max_step_tokens {limits.max_step_tokens} must be at least {least}, for contexts in host "
            "memory; raise it, or set host_kv_memory to 0"
        )
    there, of = _host_memory(config, hardware, total)
    if asked is None:
        blocks = min(needed, there // layout.block_bytes)
        if blocks == 0:
            return None
    else:
        wanted = parse_size(asked, whole=hardware.host_whole) // ranks
        blocks = _whole_blocks(wanted, layout.block_bytes, "host memory", size)
        if wanted > there:
            raise BudgetError(
                f"{format_size(wanted)} of host memory were asked for KV, but {of} {format_size(there)}; "
                "lower host_kv_memory"
            )
    asked_tile = min(max(config.kv_tile // size, 1), needed) * size if config.kv_tile else 0
    tile = asked_tile or usual_tile(layout, total, needed * size, "cuda" if hardware.cuda else "cpu")
    room = LongRoom(
        layout, blocks, tile, limits.max_step_tokens // size * size, policies=policies, most_blocks=needed
    )
    if config.disk_kv_memory is not None:
        wanted, block = parse_size(config.disk_kv_memory) // ranks, layout.layers * record_bytes(layout)
        on_disk = _whole_blocks(wanted, block, "disk", size)
        directory = config.kv_directory.expanduser()
        if keeps(config, spec):  # On its way to the disk and back KV takes host memory, too.
            on_host = replace(room, disk=Disk(1, directory)).within(there).blocks
            on_disk = min(on_disk, max(needed - on_host, 0))
            left = wanted - on_disk * block
            room = (
                replace(room, store_bytes=left)
                if left >= least_cap(layout.block_bytes)
                else replace(room, unused_bytes=left)
            )
        if on_disk:
            room = replace(room, disk=Disk(on_disk, directory))
    room = room.within(there)
    if room.blocks < 1:
        raise BudgetError(
            "what KV needs of host memory beside its blocks, "
            f"{format_size(room.host_bytes - room.blocks * layout.block_bytes)}, leaves none for them, "
            f"since {of} {format_size(there)}; raise host_kv_memory, or lower kv_tile or max_step_tokens"
        )
    return room


def keeps(config: Config, spec: ModelSpec) -> bool:
    """Tell whether blocks of KV are kept on the host, and on disk, for later requests."""
    return config.prefix_cache and config.kv_store != "off" and prefix_blocker(spec) is None


def _whole_blocks(wanted: int, block: int, of: str, tokens: int) -> int:
    if wanted < block:
        raise BudgetError(
            f"{format_size(wanted)} of {of} for KV are less than a block of {tokens} tokens, "
            f"{format_size(block)}; allow more, or lower block_size"
        )
    return wanted // block


def usual_chunk(
    config: Config,
    spec: ModelSpec,
    dtype: str,
    limits: SchedulerLimits,
    total: int,
    *,
    link: float,
    arithmetic: float,
) -> int:
    """Return the tokens of a chunk whose attention takes twice as long as its tiles take to come from host
    memory, four times where some come from disk. It is a power of two, and no more than the largest step's
    memory and the context allow.

    total: bytes of the device. link: bytes/s from host memory to the device. arithmetic: operations/s there.
    """
    balance = chunk_in_balance(spec, DTYPE_BYTES[dtype], link, arithmetic)
    chunk, wanted = _CHUNKS[0], (2 if config.disk_kv_memory is None else 4) * balance
    while chunk < min(wanted, _CHUNKS[1], limits.max_length):
        if usual_activations(spec, dtype, 2 * chunk, limits.max_sequences) > total // _STEP_PART:
            break
        chunk *= 2
    return chunk


def chunk_in_balance(spec: ModelSpec, itemsize: int, link: float, arithmetic: float) -> float:
    """Return the tokens of a chunk for which attention to a key takes as long as its copy over the link."""
    return (2 * spec.kv_heads * itemsize / link) * arithmetic / (4 * spec.heads)


def _policies(config: Config, spec: ModelSpec) -> Policies | None:
    asked = config.attention_policy, config.prefill_policy
    rows, runs = (None if policy == "full" else policy for policy in asked)
    if rows is None and runs is None:
        return None
    if any(window is not None for window in spec.windows):
        raise ConfigError(
            "attention policies do not work with this model, which has sliding windows; set "
            "attention_policy and prefill_policy to full"
        )
    if len({layer.mixer.planes for layer in spec.stack}) > 1:
        raise ConfigError(
            "attention policies do not work with this model, whose layers do not all keep the same KV; set "
            "attention_policy and prefill_policy to full"
        )
    return Policies(rows, runs, config.missed_limit, config.sketch_bits, spec.heads)


def _host_memory(config: Config, hardware: Hardware, total: int) -> tuple[int, str]:
    """Return the bytes that KV may take, and words for a message about them."""
    room = host_room(config, hardware)
    if not hardware.cuda and room == 0:
        return total // 2, "half of the budget is"
    return min(room, hardware.host_free), "there are"
