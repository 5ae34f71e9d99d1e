"""Decides whether the CPU computes some of the experts that a device lacks, as `cpu_compute` asks. Nothing
here reaches torch."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.arch.formats.dense import DENSE
from penstock.arch.formats.floats import Float4, Float8
from penstock.arch.formats.integers import Integers
from penstock.arch.layout import mixture_layouts
from penstock.arch.spec import MoeSpec
from penstock.base.errors import ConfigError
from penstock.weights.streaming.residency import CpuWork, ExpertRoom

if TYPE_CHECKING:
    from penstock.engine.plan import Outline

_COLUMNS = 32
"""Columns of dense matrices come in so many, for kernels of a CPU."""


def with_cpu(outline: "Outline[Any]", experts: ExpertRoom | None) -> ExpertRoom | None:
    """Return the experts' room with what the CPU has to know, if it may compute some of them. Raises
    ConfigError where it must and cannot."""
    use = outline.settings.cpu_compute
    if use == "off":
        return experts
    if why := cpu_blocker(outline, experts):
        if use == "on":
            raise refusal(why)
        return experts
    assert experts is not None, "cpu_blocker() says so"
    mixtures = _mixtures(outline)
    activations, top_k = tuple(one.activation for one in mixtures), max(one.top_k for one in mixtures)
    work = CpuWork(activations, top_k, outline.spec.hidden_size, outline.dtype, use == "on")
    return replace(experts, cpu=work)


def cpu_blocker(outline: "Outline[Any]", experts: ExpertRoom | None) -> str | None:
    """Say why the CPU cannot compute experts beside a device; None if it can, but for a C compiler."""
    mixtures = mixture_layouts(outline.layouts).values()
    if not outline.hardware.cuda:
        return "there is no GPU: the CPU computes everything"
    if not mixtures:
        return "the model has no mixture of experts"
    if outline.shard.ranks > 1:
        return "several devices share the model"
    if experts is None or experts.on_device == experts.experts:
        return "all experts are on the device"
    if not experts.copies:
        return (
            "the device does not decide which experts come to it: that takes kernels, and room for all "
            "experts in host_memory"
        )
    if outline.dtype not in ("bfloat16", "float16"):
        return f"activations are {outline.dtype}, and the CPU computes experts in 16 bits"
    formats = {format for one in mixtures for format in one.formats or (None,)}
    if not all(format == DENSE or isinstance(format, Integers | Float8 | Float4) for format in formats):
        return "experts are in a format that kernels for a CPU do not read"
    widths = outline.spec.hidden_size, *(moe.intermediate_size for moe in _mixtures(outline))
    if DENSE in formats and any(width % _COLUMNS for width in widths):
        return f"experts have columns that are no multiple of {_COLUMNS}"
    return None


def cpu_note(outline: "Outline[Any]", experts: ExpertRoom | None) -> str:
    """Say in a sentence what of experts the CPU computes, or why none; empty where that was not asked."""
    if outline.settings.cpu_compute == "off":
        return ""
    if why := cpu_blocker(outline, experts):
        return f"The CPU computes no experts, since {why}."
    return (
        "Of experts that would come over the link the CPU computes some, with other roundings. What that "
        "gains is left out."
    )


def refusal(why: str) -> ConfigError:
    """Return the error of cpu_compute=on where that cannot be."""
    return ConfigError(
        f"cpu_compute is on, but {why}; leave it out, or write auto to use the CPU where it can"
    )


def _mixtures(outline: "Outline[Any]") -> list[MoeSpec]:
    return [layer.feed_forward for layer in outline.spec.stack if isinstance(layer.feed_forward, MoeSpec)]
