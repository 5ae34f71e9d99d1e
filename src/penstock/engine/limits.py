"""Decides the dtype of activations and the limits of a scheduler, by settings and by the machine."""

from math import ceil
from pathlib import Path

from penstock.arch.spec import ModelSpec
from penstock.base.config import Config
from penstock.base.errors import ConfigError
from penstock.base.units import parse_size
from penstock.engine.draft import check_state
from penstock.engine.rooms import STEP, Hardware
from penstock.sched.rules import SchedulerLimits

_ROOMY = 64 << 30
"""Bytes of a device from which on a step is twice as long by default: less attention is merged from parts."""


def dtype_of(config: Config, stored: str, pack: Path | None, hardware: Hardware) -> str:
    """Return the dtype of weights and KV.

    `auto` is the stored one, but float32 on processors that multiply halves in software, many times slower. A
    pack has one dtype.

    Raises ConfigError if another one was asked for.
    """
    if pack is not None and config.dtype not in ("auto", stored):
        raise ConfigError(
            f"dtype is {config.dtype}, but {pack} is packed in {stored}; leave dtype out, or pack the model "
            f"again in {config.dtype}"
        )
    if config.dtype != "auto":
        return config.dtype
    return stored if pack is not None or hardware.halves else "float32"


def check_positions(spec: ModelSpec, length: int, asked: str) -> None:
    """Raise ConfigError for a length beyond the positions that a model was trained for. asked: what asks for
    it, as the message names it."""
    if not spec.reaches(length):
        raise ConfigError(
            f"{asked} is more than the {spec.max_length} positions the model was trained for; lower it, give "
            f"the checkpoint a rope scaling by {ceil(100 * length / spec.max_length) / 100:g}, or allow it "
            "with beyond_trained"
        )


def limits_of(config: Config, spec: ModelSpec, hardware: Hardware) -> SchedulerLimits:
    """Return the limits that were asked for, or the device's defaults. Raises ConfigError."""
    check_state(config, spec)
    usual = STEP["cuda" if hardware.cuda else "cpu"]
    if config.max_length is not None and not config.beyond_trained:
        check_positions(spec, config.max_length, f"max_length {config.max_length}")
    tokens = config.max_step_tokens or usual.tokens * (2 if _is_roomy(config, hardware) else 1)
    sequences = config.max_sequences or min(usual.sequences, tokens)
    if sequences > tokens:
        raise ConfigError(
            f"max_sequences {sequences} is more than max_step_tokens {tokens}; each sequence needs a token "
            f"in every step; raise max_step_tokens to {sequences}, or lower max_sequences"
        )
    if config.block_size & (config.block_size - 1) or config.block_size > 256:
        raise ConfigError(
            f"block_size is {config.block_size}; give a power of two of at most 256, such as 16"
        )
    return SchedulerLimits(config.block_size, tokens, sequences, config.max_length or spec.max_length)


def _is_roomy(config: Config, hardware: Hardware) -> bool:
    """Tell whether the device is large, by numbers that do not change while the machine is used.

    Several devices may differ and must agree, so they are never roomy.
    """
    if not hardware.cuda or config.tensor_parallel > 1:
        return False
    whole = hardware.whole
    return (
        whole if config.device_memory is None else parse_size(config.device_memory, whole=whole)
    ) >= _ROOMY
