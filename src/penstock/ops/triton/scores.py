"""Scale and cap scores of attention in kernels, and let sinks weigh on an output."""

import triton
import triton.language as tl

from penstock.ops.attention.inputs import LayerAttention

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit  # type: ignore[untyped-decorator]
def scaled(product, scale_log2, CAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return scores times log2(e), of products of queries and keys.

    CAP: soft cap of scores, 0 for none. With one, `scale_log2` is twice the scale times log2(e) over CAP
        (`score_factor`). The score is CAP * tanh(x), with tanh(|x|) = (1 - e) / (1 + e), e = exp(-2|x|).
    """
    if CAP > 0:
        twice = product * scale_log2
        fade = tl.exp2(-tl.abs(twice))
        product = tl.where(twice < 0.0, -CAP * LOG2_E, CAP * LOG2_E) * ((1.0 - fade) / (1.0 + fade))
    else:
        product = product * scale_log2
    return product


def score_factor(layer: LayerAttention) -> float:
    """Return `scale_log2` of `scaled` for a layer."""
    factor: float = layer.scale * LOG2_E.value
    return factor if layer.cap is None else 2 * factor / layer.cap


@triton.jit  # type: ignore[untyped-decorator]
def with_sinks(acc, level, sinks, heads, head_in, SINKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the output of heads, given the log-sum-exp of all of their keys, as their sinks leave it."""
    if SINKS:
        sink = tl.load(sinks + heads, mask=head_in, other=0.0).to(tl.float32)
        acc = acc / (1.0 + tl.exp(sink - level))[:, None]
    return acc
