"""Routes tokens to experts in plain torch: from a router's logits to each token's experts and their shares.

`ops/triton/routing.py` has the same for a GPU.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.arch.spec import MoeSpec, Router, Scoring

TINY = 1e-20
"""Added to the sum of scores of a sigmoid before they are divided by it: all of them may be 0."""
Top = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""Returns the largest numbers of each row and where they are, the largest first, as `torch.topk`."""


def route(
    logits: Tensor, moe: MoeSpec, correction: Tensor | None = None, top: Top = torch.topk
) -> tuple[Tensor, Tensor]:
    """Return each token's shares float32 and experts int64, both `[tokens, top_k]`, the best first.

    Scores are float32.

    logits: `[tokens, experts]`, with the bias of the router if it has one.
    correction: float32 `[experts]`, of a router with a correction.
    top: decides which of equal scores are chosen.
    """
    router = moe.router
    if router.scoring is Scoring.SOFTMAX_OF_CHOSEN:
        best, chosen = top(logits.float(), moe.top_k)
        return _scaled(best.softmax(-1), router), chosen
    scores = logits.float().sigmoid() if router.scoring is Scoring.SIGMOID else logits.float().softmax(-1)
    choice = scores if correction is None else scores + correction
    if router.grouped:
        choice = _of_best_groups(choice, router, top)
    shares, chosen = top(choice, moe.top_k)
    if choice is not scores:
        shares = scores.gather(1, chosen)
    if router.normalise:
        total = shares.sum(-1, keepdim=True)
        shares = shares / (total + TINY if router.scoring is Scoring.SIGMOID else total)
    return _scaled(shares, router), chosen


def _of_best_groups(choice: Tensor, router: Router, top: Top) -> Tensor:
    """Return the scores `[tokens, experts]` with -inf for experts of all but the best groups."""
    by_group = choice.view(len(choice), router.groups, choice.shape[1] // router.groups)
    sums = torch.topk(by_group, 2).values.sum(-1)
    _, best = top(sums, router.top_groups)
    others = torch.ones_like(sums, dtype=torch.bool).scatter_(1, best, False)
    return by_group.masked_fill(others.unsqueeze(-1), float("-inf")).flatten(1)


def _scaled(shares: Tensor, router: Router) -> Tensor:
    return shares if router.scale == 1.0 else shares * router.scale
