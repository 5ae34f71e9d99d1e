"""Normalises a router's input and computes its logits in one launch, for few tokens.

A program has one expert and one token. It adds and normalises the token's whole row, which is small, so that
none waits for another's norm; one of a token's programs stores it. A token's numbers depend on nothing but
its own row, not on how many tokens there are.

Why this is safe. The residual is read by all programs of a token, so the sum goes to memory of its own.
Where launches may be early, weights are read before the wait: the norm's, and the expert's row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from penstock.ops.kernels import pdl_launch_options, uses_pdl
from penstock.ops.triton.pointwise import load_gain, normalised

MOST_TOKENS = 8
"""Most tokens of `add_norm_score`: each of them reads the router's matrix from the cache."""


def suits(part: Tensor, residual: Tensor, router: Tensor) -> bool:
    """Tell whether `add_norm_score` takes these."""
    few = 0 < len(residual) <= MOST_TOKENS
    return few and part.dtype == residual.dtype == router.dtype and part.is_contiguous()


@triton.jit  # type: ignore[untyped-decorator]
def _add_norm_score(  # type: ignore[no-untyped-def]
    part,
    residual,
    weight,
    router,
    bias,
    total,
    normed,
    scores,
    eps,
    s_router,
    HIDDEN: tl.constexpr,
    COLS: tl.constexpr,
    BIASED: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Compute the logit of one expert for one token. Grid [experts, tokens]."""
    if EARLY:
        gdc_launch_dependents()
    expert, token, experts = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    cols = tl.arange(0, COLS)[None, :]
    inside = cols < HIDDEN
    gain = load_gain(weight, HIDDEN, COLS)
    w = tl.load(router + expert.to(tl.int64) * s_router + cols, mask=inside, other=0.0)
    if EARLY:
        gdc_wait()
    at = token * HIDDEN + cols
    kind: tl.constexpr = residual.dtype.element_ty
    some = tl.load(part + at, mask=inside, other=0.0).to(tl.float32)
    whole = (some + tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)).to(kind)
    unit = normalised(whole.to(tl.float32), gain, eps, HIDDEN, kind)
    score = tl.sum(w.to(tl.float32) * unit.to(tl.float32))
    if BIASED:
        score += tl.load(bias + expert).to(tl.float32)
    tl.store(scores + token * experts + expert, score.to(kind))
    if expert == 0:
        tl.store(total + at, whole, mask=inside)
        tl.store(normed + at, unit, mask=inside)


def add_norm_score(
    part: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    router: Tensor,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum of part and residual, its norm, both `[tokens, hidden]`, and the logits of the experts
    for that, `[tokens, experts]`, in new memory. It adds in float32, and rounds as `rms_norm` and `one_row`.

    part, residual: `[tokens, hidden]`, contiguous, at most MOST_TOKENS.
    weight: of the norm, `[hidden]`.
    router: `[experts, hidden]` (rows strided), of the same dtype. bias: `[experts]`.
    """
    (tokens, hidden), experts = residual.shape, len(router)
    assert 0 < tokens <= MOST_TOKENS, residual.shape
    assert part.shape == residual.shape, (part.shape, residual.shape)
    assert router.shape == (experts, hidden), (router.shape, residual.shape)
    assert weight.shape == (hidden,), (weight.shape, residual.shape)
    assert part.dtype == residual.dtype == router.dtype, (part.dtype, residual.dtype, router.dtype)
    assert part.is_contiguous()
    assert residual.is_contiguous()
    assert weight.stride(0) == router.stride(1) == 1
    assert bias is None or (bias.shape == (experts,) and bias.is_contiguous())
    total, normed = torch.empty_like(residual), torch.empty_like(residual)
    scores = residual.new_empty(tokens, experts)
    cols, early = triton.next_power_of_2(hidden), uses_pdl()
    _add_norm_score[(experts, tokens)](
        part,
        residual,
        weight,
        router,
        bias if bias is not None else router,
        total,
        normed,
        scores,
        eps,
        router.stride(0),
        HIDDEN=hidden,
        COLS=cols,
        BIASED=bias is not None,
        EARLY=early,
        num_warps=8 if cols > 2048 else 4,
        **pdl_launch_options(early),
    )
    return total, normed, scores
