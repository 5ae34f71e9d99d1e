"""Computes what a machine's links allow a model: does it fit, how fast can it decode, how long may its
contexts be. Nothing is measured here."""

import math
from dataclasses import dataclass

from penstock.arch import bounds
from penstock.arch.families import TensorNames
from penstock.arch.layout import group_layouts
from penstock.arch.spec import ModelSpec

PROMPT = 2048
"""Tokens of the prompt that a rate is given for, if the model takes as many."""


@dataclass(frozen=True, slots=True)
class MeasuredRates:
    """Holds rates that were measured, in bytes/s. A rate is None where there is no such link, or it was not
    measured."""

    device_read: float
    to_device: float | None
    disk: float | None


@dataclass(frozen=True, slots=True)
class MemoryRoom:
    """Holds the bytes that a model may take: for weights and KV on the device, and for more weights in host
    memory. `host` is None where the device is the host."""

    device: int
    host: int | None


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Holds the limits of a model in one dtype on the device.

    Weights that do not fit on the device rest in host memory as far as there is room, and the others on disk.
    They are read from there for every token. The slowest link then sets the pace, since all work at once.

    read_bytes: of weights, for one token of one sequence.
    host_bytes: of weights that do not fit on the device.
    disk_bytes: of weights that do not fit in host memory either.
    longest: tokens of one sequence that fit beside the weights, before activations. None if the weights leave
        nothing.
    decode: tokens/s that one short sequence cannot exceed. None if it hangs on a link that was not measured.
    decode_longest: the same with `longest` tokens of context.
    binding: the link that sets the pace of decoding, in words.
    binding_bytes: bytes that pass through it for one token of one short sequence.
    """

    dtype: str
    weight_bytes: int
    read_bytes: int
    kv_token_bytes: int
    host_bytes: int
    disk_bytes: int
    longest: int | None
    decode: float | None
    decode_longest: float | None
    binding: str
    binding_bytes: int

    @property
    def fits(self) -> bool:
        """Tell whether all weights fit on the device."""
        return not self.host_bytes and not self.disk_bytes


def limits(
    spec: ModelSpec, names: TensorNames, dtype: str, room: MemoryRoom, rates: MeasuredRates
) -> ModelLimits:
    """Compute the limits of a model in `dtype`."""
    layouts = group_layouts(spec, names, dtype)
    weights, read = bounds.weight_bytes(layouts), bounds.weight_bytes_read(spec, layouts)
    token = bounds.kv_token_bytes(spec, dtype)
    beyond = max(weights - room.device, 0)
    on_disk = max(beyond - (room.host or 0), 0)
    used = read / weights  # Of a mixture of experts, or an embedding, a token needs but a part.
    links = [("reading the device's memory", read, rates.device_read)]
    if room.host is not None:
        links.append(("the link from host memory to the device", beyond * used, rates.to_device or 0))
    links.append(("reading the disk", on_disk * used, rates.disk or 0))
    # A link that was not measured is as slow as it may be.
    seconds, size, binding = max(
        (math.inf if not rate else size / rate, size, name) for name, size, rate in links if size
    )
    known = math.isfinite(seconds)
    free = room.device - weights
    longest = min(free // token, spec.max_length) if free >= token else None
    return ModelLimits(
        dtype=dtype,
        weight_bytes=weights,
        read_bytes=round(read),
        kv_token_bytes=token,
        host_bytes=beyond - on_disk,
        disk_bytes=on_disk,
        longest=longest,
        decode=1 / seconds if known else None,
        decode_longest=None
        if longest is None
        else rates.device_read / (read + bounds.kv_bytes_read(spec, dtype, longest)),
        binding=binding if known else f"{binding}, which was not measured",
        binding_bytes=round(size),
    )


def prefill_rate(spec: ModelSpec, names: TensorNames, dtype: str, operations_per_second: float) -> float:
    """Return the prompt tokens/s that one sequence cannot exceed, at a rate measured in that dtype."""
    prompt = min(PROMPT, spec.max_length)
    return (
        prompt
        * operations_per_second
        / bounds.prefill_operations(spec, group_layouts(spec, names, dtype), [prompt])
    )
