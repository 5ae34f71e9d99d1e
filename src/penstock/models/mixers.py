"""Computes mixers, by their types: from a layer's normalised input to the input of its output projection."""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol

from torch import Tensor

from penstock.arch.layout import GroupId, GroupKind
from penstock.arch.mixers.attention import Attention
from penstock.arch.mixers.mixer import Mixer
from penstock.models.inputs import ColdCache, Collectives, StepInputs
from penstock.ops.attention.attend import attend
from penstock.ops.attention.inputs import LayerAttention
from penstock.ops.linear import linear
from penstock.ops.matrix import GroupViews
from penstock.ops.project import HeadNorms, JointNorms, norm_together, project


@dataclass(frozen=True, slots=True)
class Mixing:
    """Mixing holds a step as one layer's mixer sees it.

    wanted: positions whose output is read, int64 `[rows]`, if not all of them.
    cold: lends and takes KV beyond the device, where `inputs` name it.
    collectives: of a model on several ranks.
    """

    layer: int
    inputs: StepInputs
    cold: ColdCache | None
    wanted: Tensor | None
    norm_eps: float
    collectives: Collectives | None = None


class Forward(Protocol):
    """Computes a mixer of its type: writes the planes of all tokens to the cache and to `mixing.cold`, takes
    each state that `mixing.inputs.state` names on by its tokens, and returns `[rows, output_size]` of the
    wanted positions.

    x: `[tokens, hidden]`.
    cache: the layer's planes in pages, then its arrays of state, `[rows, *shape]`.
    """

    def __call__(
        self, mixer: "Mixer", x: Tensor, weights: GroupViews, cache: tuple[Tensor, ...], mixing: Mixing
    ) -> Tensor:
        """Compute the mixer for the step's tokens and return `[rows, output_size]`."""


def attention(
    mixer: Mixer, x: Tensor, weights: GroupViews, cache: tuple[Tensor, ...], mixing: Mixing
) -> Tensor:
    """Return softmax attention of the wanted positions, `[rows, heads * head_dim]`."""
    assert isinstance(mixer, Attention)
    inputs, wanted, seen_by, w = mixing.inputs, mixing.wanted, mixing.inputs.attention, weights
    k_cache, v_cache = cache
    product, bias = w.matrices["qkv"], w.vectors.get("qkv_bias")
    if inputs.lora is None:
        qkv = linear(x, product, bias)
    else:
        qkv = inputs.lora.linear(GroupId(GroupKind.ATTENTION, mixing.layer), "qkv", x, product, bias)
    del x  # Attention needs its memory.
    norms = None
    if mixer.normed_together is not None:
        together = JointNorms(
            w.vectors["q_norm"], w.vectors["k_norm"], mixing.norm_eps, mixer.normed_together
        )
        norm_together(qkv, together, _over_ranks(mixing.collectives, counts_keys=mixer.counts_keys))
    elif mixer.qk_norm:
        norms = HeadNorms(w.vectors["q_norm"], w.vectors["k_norm"], mixing.norm_eps)
    q, k, v = project(
        qkv, inputs.cos, inputs.sin, (k_cache, v_cache), seen_by, heads=mixer.heads, norms=norms
    )
    if mixing.cold is not None:
        mixing.cold.send(mixing.layer, (k, v))
    if wanted is not None and inputs.last is not None:
        # They are rows, which see no keys but those in pages.
        q, wanted, seen_by = q[wanted], None, inputs.last
    seen = attend(q, k, v, (k_cache, v_cache), seen_by, scores_of(mixer, w), mixing.cold).out
    seen = seen if wanted is None else seen[wanted]
    return seen.view(len(seen), mixer.output_size)


def attention_at_once(
    kernels: ModuleType,
    mixer: Mixer,
    weights: GroupViews,
    cache: tuple[Tensor, ...],
    mixing: Mixing,
    x: Tensor,
    part: Tensor | None,
) -> Tensor | None:
    """Return the output of attention and its projections by one call of a CPU's kernels, or None where they
    do not compute it. Its arguments are those of `attention`, and those that `Residual.pass_half` gives."""
    inputs = mixing.inputs
    k_cache, v_cache = cache[:2]
    if (
        not isinstance(mixer, Attention)
        or mixer.normed_together is not None
        or mixing.cold is not None
        or mixing.wanted is not None
        or not kernels.suits(inputs.attention, (k_cache, v_cache), x)
    ):
        return None
    half = weights.matrices["out"].half
    if not kernels.describes(half, x):
        half = kernels.Half(weights, ("qkv", "out"), x.dtype, mixing.norm_eps)
        heads = mixer.heads, k_cache.shape[2], mixer.head_dim
        half.attend(weights, heads, scores_of(mixer, weights), mixing.norm_eps, 2 * inputs.cos.shape[1])
        weights.matrices["out"].half = half
    angles, pages = (inputs.cos, inputs.sin), (k_cache, v_cache)
    return kernels.attention(half, x, part, angles, pages, inputs.attention)  # type: ignore[no-any-return]


def _over_ranks(collectives: Collectives | None, *, counts_keys: bool) -> Callable[[Tensor], None] | None:
    """Return the `over_ranks` of `norm_together`: sums of squares `[tokens, 2]`, in which the keys of a rank
    do not count if another one with the same keys counts them."""
    if collectives is None:
        return None

    def add_up(squares: Tensor) -> None:
        if not counts_keys:
            squares[:, 1].zero_()
        collectives.all_reduce_few(squares)

    return add_up


def scores_of(mixer: Attention, weights: GroupViews) -> LayerAttention:
    """Return the scale, the window, the cap and the sinks of a layer's scores."""
    scale = mixer.head_dim**-0.5 if mixer.scale is None else mixer.scale
    return LayerAttention(scale, mixer.window, cap=mixer.cap, sinks=weights.vectors.get("sinks"))


FORWARD: dict[type[Mixer], Forward] = {Attention: attention}
"""Forward functions, by the type of a mixer."""
