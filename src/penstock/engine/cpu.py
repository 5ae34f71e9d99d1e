"""Decides whether the CPU computes some of the experts, or of the feed-forwards, that a device lacks, as
`cpu_compute` asks. Nothing here reaches torch."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.arch.formats.dense import DENSE
from penstock.arch.formats.floats import Float4, Float8
from penstock.arch.formats.format import WeightFormat
from penstock.arch.formats.integers import Integers
from penstock.arch.layout import GroupKind, GroupLayout, mixture_layouts
from penstock.arch.spec import MoeSpec
from penstock.base.errors import ConfigError
from penstock.base.tiers import Tier
from penstock.weights.streaming.beside import RowSpec, share_passes
from penstock.weights.streaming.residency import CpuWork, ExpertRoom, Placement, WeightLimits
from penstock.weights.streaming.ring import StreamRates

if TYPE_CHECKING:
    from penstock.engine.plan import Outline

_COLUMNS = 32
"""Columns of dense matrices come in so many, for kernels of a CPU."""


def with_cpu(
    outline: "Outline[Any]",
    placement: Placement,
    experts: ExpertRoom | None,
    limits: WeightLimits,
    rates: StreamRates,
) -> tuple[Placement, ExpertRoom | None]:
    """Return a placement and the experts' room with what the CPU has to know, if it may compute some of them.
    Of a model without mixtures it computes feed-forwards, if `rates` say how fast. Raises ConfigError where
    it must and cannot."""
    use = outline.settings.cpu_compute
    if use == "off":
        return placement, experts
    if why := cpu_blocker(outline, placement, experts):
        if use == "on":
            raise refusal(why)
        return placement, experts
    mixtures = _mixtures(outline)
    if not mixtures:
        rows = RowSpec(outline.spec.hidden_size, outline.dtype, always=use == "on")
        return share_passes(placement, limits, rates, rows), experts
    assert experts is not None, "cpu_blocker() says so"
    activations, top_k = tuple(one.activation for one in mixtures), max(one.top_k for one in mixtures)
    work = CpuWork(activations, top_k, outline.spec.hidden_size, outline.dtype, use == "on")
    return placement, replace(experts, cpu=work)


def cpu_blocker(outline: "Outline[Any]", placement: Placement, experts: ExpertRoom | None) -> str | None:
    """Say why the CPU cannot compute experts, or feed-forwards of a model without any, beside a device; None
    if it can, but for a C compiler."""
    if not outline.hardware.cuda:
        return "there is no GPU: the CPU computes everything"
    if outline.shard.ranks > 1:
        return "several devices share the model"
    mixtures = mixture_layouts(outline.layouts).values()
    why = _expert_blocker(experts) if mixtures else _dense_blocker(outline, placement)
    if why:
        return why
    if outline.dtype not in ("bfloat16", "float16"):
        return f"activations are {outline.dtype}, and the CPU computes in 16 bits"
    formats: set[WeightFormat | None] = {format for one in mixtures for format in one.formats or (None,)}
    formats |= {matrix.format for layout in computable(outline, placement) for matrix in layout.matrices}
    if not all(map(_readable, formats)):
        return "weights are in a format that kernels for a CPU do not read"
    inner = [moe.intermediate_size for moe in _mixtures(outline)] or [outline.spec.intermediate_size]
    if DENSE in formats and any(width % _COLUMNS for width in (outline.spec.hidden_size, *inner)):
        return f"matrices have columns that are no multiple of {_COLUMNS}"
    return None


def may_share(outline: "Outline[Any]") -> bool:
    """Tell whether the CPU may share steps of a model without mixtures, wherever its weights come to rest."""
    found = outline.hardware
    asked = outline.settings.cpu_compute != "off" and found.cuda and found.kernels and not _mixtures(outline)
    return asked and not (outline.shard.ranks > 1 or outline.far or outline.draft)


def computable(outline: "Outline[Any]", placement: Placement) -> list[GroupLayout]:
    """Return the layouts of feed-forwards that rest on HOST."""
    homes = placement.homes
    return [
        layout
        for layout in outline.layouts
        if layout.id.kind is GroupKind.FFN and homes.get(layout.id) is Tier.HOST
    ]


def cpu_note(
    outline: "Outline[Any]", placement: Placement, experts: ExpertRoom | None, *, known: bool = False
) -> str:
    """Say in a sentence what of the weights the CPU computes where no forecast says more, or why none; empty
    where that was not asked. known: whether its rate is."""
    if outline.settings.cpu_compute == "off":
        return ""
    if why := cpu_blocker(outline, placement, experts):
        return f"The CPU computes nothing, since {why}."
    what = "experts" if _mixtures(outline) else "feed-forwards"
    if known:
        return f"The CPU computes no {what} in such steps, since that would gain nothing."
    return (
        f"The CPU computes some of the {what} that would come over the link, with other roundings. What that "
        "gains is left out: give --cpu-rate, or have `penstock doctor` measure it."
    )


def _readable(format: WeightFormat | None) -> bool:
    if isinstance(format, Integers):
        return not format.ordered
    return format == DENSE or isinstance(format, Float8 | Float4)


def _expert_blocker(experts: ExpertRoom | None) -> str | None:
    if experts is None or experts.on_device == experts.experts:
        return "all experts are on the device"
    if not experts.copies:
        return (
            "the device does not decide which experts come to it: that takes kernels, and room for all "
            "experts in host_memory"
        )
    return None


def _dense_blocker(outline: "Outline[Any]", placement: Placement) -> str | None:
    if placement.everything_resident:
        return "all weights are on the device"
    if not outline.hardware.kernels:
        return "the device has no kernels that ask the CPU"
    if placement.read:
        return "some weights are on disk"
    if outline.far:
        return "KV beyond the device comes over the same link"
    if outline.draft:
        return "a draft model proposes tokens"
    if not computable(outline, placement):
        return "no feed-forward rests in host memory (some do with a smaller device_memory)"
    if sum(home is Tier.HOST for home in placement.homes.values()) == 1:
        return (
            "only one feed-forward streams, and one group has to come over the link (more stream with a "
            "smaller device_memory)"
        )
    return None


def refusal(why: str) -> ConfigError:
    """Return the error of cpu_compute=on where that cannot be."""
    return ConfigError(
        f"cpu_compute is on, but {why}; leave it out, or write auto to use the CPU where it can"
    )


def _mixtures(outline: "Outline[Any]") -> list[MoeSpec]:
    return [layer.feed_forward for layer in outline.spec.stack if isinstance(layer.feed_forward, MoeSpec)]
