"""Samples tokens from logits: penalties, truncation and the draw. Every row of a batch has its own settings.

No row's result depends on another row. Of the tokens that are left, the one is drawn whose logit, divided by
the temperature, is highest with Gumbel noise added (see `gumbel`). The request's seed, the token's position
and the token alone decide the noise, so a seed means the same draws whatever else is in the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.ops.gumbel import gumbel, key_words
from penstock.ops.kernels import native_kernels, triton_kernels
from penstock.step.params import Sampling

_COLDEST = 1e-30
"""Lowest temperature that is not taken as 0.

Logits divided by less may be infinite, and then have no softmax.
"""

_ROWS = 16
"""Rows drawn at a time without kernels.

Sorted, with order and sums in float64, they take ten times their logits.
"""

DRAW_FIELDS = 8
"""Numbers that describe a draw, as `pack_sampling` returns them."""

_FEW = (256, 4096)
"""Numbers of likeliest tokens that are tried before a whole vocabulary is sorted.

Sorting 150,000 tokens takes 13 ms.
"""


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """TokenCounts holds the counts that penalties use.

    output: how often each token is in the output, int32 `[vocab]`.
    prompt: whether it is in the prompt, bool `[vocab]`.
    """

    output: Tensor
    prompt: Tensor


def penalise(logits: Tensor, sampling: Sampling, counts: TokenCounts) -> None:
    """Apply repetition, frequency and presence penalties to one row's logits `[vocab]`, in place.

    The repetition penalty is that of Keskar et al. 2019, arXiv 1909.05858.
    """
    if sampling.repetition_penalty != 1:
        seen = counts.prompt | (counts.output > 0)
        factor = torch.where(logits > 0, 1 / sampling.repetition_penalty, sampling.repetition_penalty)
        logits.copy_(torch.where(seen, logits * factor, logits))
    if sampling.frequency_penalty:
        logits.sub_(counts.output * sampling.frequency_penalty)
    if sampling.presence_penalty:
        logits.sub_((counts.output > 0) * sampling.presence_penalty)


def is_greedy(sampling: Sampling) -> bool:
    """Tell whether these settings always take the likeliest token."""
    return sampling.temperature <= _COLDEST or sampling.top_k == 1


def pack_sampling(
    rows: Sequence[int], settings: Sequence[Sampling], positions: Sequence[int]
) -> NDArray[np.float64]:
    """Pack the settings of the draws of some rows of logits: float64 `[rows, 8]`.

    The columns are row, temperature, top-k, top-p, min-p, the two words of the seed's key, and the position
    of the token that is drawn. All whole numbers are exact.
    """
    of = zip(rows, settings, positions, strict=True)
    table = [
        (row, one.temperature, one.top_k, one.top_p, one.min_p, *key_words(one.seed), position)
        for row, one, position in of
    ]
    return np.array(table, dtype=np.float64).reshape(-1, DRAW_FIELDS)


def draw(logits: Tensor, asked: Tensor, tokens: Tensor) -> None:
    """Draw a token for each row of `asked`, as `pack_sampling` returns it.

    Temperature is applied first, then top-k, then top-p to what top-k leaves, then min-p, as in Hugging Face
    transformers. Of equally likely tokens the lower id comes first, and of equal sums with noise too. NaN
    logits are impossible tokens. With kernels the host waits for nothing.

    logits: float32 `[rows, vocab]`.
    asked: float64 `[draws, 8]`.
    tokens: int64 `[rows]`, of which the named rows are written.
    """
    if logits.is_cuda and (kernels := triton_kernels("sampling")):
        kernels.draw(logits, asked, tokens)
        return
    ordered = (asked[:, 2] > 0) | (asked[:, 3] < 1)
    # Sorting a vocabulary is slow. Rows without top-k and top-p need no order, and for others the likeliest
    # tokens may be enough.
    for some, sorts in ((asked[ordered], True), (asked[~ordered], False)):
        for first in range(0, len(some), _ROWS):
            part = some[first : first + _ROWS]
            part = (_draw_among_few if sorts else _draw_among_all)(logits, part, tokens)
            if len(part):
                rows = part[:, 0].long()
                tokens[rows] = draw_reference(logits[rows], part, sorts=sorts)


def draw_reference(logits: Tensor, asked: Tensor, *, sorts: bool = True) -> Tensor:
    """Compute `draw` step by step, and return the tokens, int64 `[draws]`.

    logits: float32 `[draws, vocab]`, a row for each draw.
    sorts: whether any row has top-k or top-p, and so needs an order.
    """
    return noisy_scores(logits, asked, sorts=sorts).argmax(-1)  # The first, of equal ones.


def noisy_scores(logits: Tensor, asked: Tensor, *, sorts: bool = True) -> Tensor:
    """Return the numbers of which a draw takes the highest: -inf for tokens that cannot be drawn.

    The arguments are those of `draw_reference`.
    """
    most, nucleus = asked[:, 2, None], asked[:, 3, None]
    warm, below = _warm(logits, asked)
    noisy = below + gumbel(asked[:, 5:], logits.shape[1])
    if sorts or (asked[:, 4] > 0).any():
        likelihood = below.exp()
        left = likelihood >= _least(asked)
        if sorts:
            order = warm.sort(dim=-1, descending=True, stable=True).indices
            best = likelihood.gather(-1, order).double()
            _truncate(best, most, nucleus, likelihood.double().cumsum(-1)[:, -1:])
            left &= torch.zeros_like(left).scatter_(-1, order, best > 0)
        noisy.masked_fill_(~left, -torch.inf)
    return noisy


def _draw_among_all(logits: Tensor, asked: Tensor, tokens: Tensor) -> Tensor:
    """Draw where no order is needed, by kernels for a CPU, with the tokens of `draw_reference`.

    Returns the rows of `asked` for which there are no such kernels.
    """
    native = None if logits.is_cuda else native_kernels("gumbel")
    if native is None or not native.suits():
        return asked
    bounded = asked[:, 4] > 0
    if len(free := asked[~bounded]):
        rows = free[:, 0].long()
        tokens[rows] = native.best(logits[rows], free[:, 1], free[:, 5:])
    if len(some := asked[bounded]):
        rows = some[:, 0].long()
        _, below = _warm(logits[rows], some)
        below.masked_fill_(below.exp() < _least(some), -torch.inf)
        tokens[rows] = native.best(below, torch.ones(len(some)), some[:, 5:])
    return asked[:0]


def _draw_among_few(logits: Tensor, asked: Tensor, tokens: Tensor) -> Tensor:
    """Draw among each row's likeliest tokens, where these are enough, with the bits of `draw_reference`.

    Returns the rows of `asked` for which they are not enough.
    """
    warm, below = _warm(logits[asked[:, 0].long()], asked)
    likelihood = below.exp()
    everything = (
        likelihood.double().cumsum(-1)[:, -1:] if (asked[:, 2] == 0).any() else torch.ones_like(asked[:, :1])
    )
    for count in _FEW:
        if count >= logits.shape[-1] or not len(asked):
            break
        most, nucleus = asked[:, 2, None], asked[:, 3, None]
        order = ranked(warm, count)
        among = likelihood.gather(-1, order)
        best = among.double()
        enough = torch.where(most > 0, most <= count, best.cumsum(-1)[:, -1:] >= nucleus * everything)[:, 0]
        _truncate(best, most, nucleus, everything)
        best.masked_fill_(among < _least(asked), 0)
        noisy = below.gather(-1, order) + gumbel(asked[:, 5:], order)
        noisy.masked_fill_(best == 0, -torch.inf)
        found = order.masked_fill(noisy < noisy.amax(-1, keepdim=True), logits.shape[1]).amin(-1)
        tokens[asked[enough, 0].long()] = found[enough]
        warm, below, likelihood, everything, asked = (
            x[~enough] for x in (warm, below, likelihood, everything, asked)
        )
    return asked


def _warm(logits: Tensor, asked: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits divided by each row's temperature, and how far they are from the likeliest token's.

    The likeliest may be infinite, and several may be. Both are float32 `[draws, vocab]`.
    """
    warm = logits.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf) / asked[:, 1, None].float()
    top = warm.amax(-1, keepdim=True)
    return warm, torch.where(warm == top, 0.0, warm - top)


def _least(asked: Tensor) -> Tensor:
    """Return min-p: the first float32 numbers that are not below it, `[draws, 1]`."""
    wish = asked[:, 4, None]
    least = wish.float()
    return torch.where(least < wish, least.nextafter(torch.full_like(least, torch.inf)), least)


def _truncate(best: Tensor, most: Tensor, nucleus: Tensor, everything: Tensor) -> None:
    """Set to 0 the likelihoods that top-k and top-p leave out, in place.

    best: float64 `[draws, count]`, in falling order.
    everything: the sum over all tokens, `[draws, 1]`.
    """
    best.masked_fill_((torch.arange(best.shape[-1], device=best.device) >= most) & (most > 0), 0)
    sums = best.cumsum(-1)
    best.masked_fill_(
        (sums - best >= nucleus * torch.where(most > 0, sums[:, -1:], everything)) & (nucleus < 1), 0
    )


def ranked(scores: Tensor, count: int) -> Tensor:
    """Return the ids of the `count` highest tokens of each row of float32 `[rows, vocab]`, highest first.

    Of equal ones the lower id comes first; the choice of `topk` depends on the count and the number of rows.
    -0 counts as 0.
    """
    if count == 0:
        return torch.empty(len(scores), 0, dtype=torch.int64, device=scores.device)
    keys = (scores + 0.0).view(torch.int32).long()
    keys ^= (keys >> 63) & 0x7FFFFFFF  # In the order of the numbers: `order_of` of ops/triton/bins.py.
    keys <<= 32
    keys -= torch.arange(scores.shape[1], device=scores.device)
    return keys.topk(count).indices
