"""From logits to tokens: penalties, truncation and the draw. Every row of a batch has its own settings.

No row's result depends on another row. The draw is the inverse of the cumulative distribution, in the order
of the vocabulary, at a random number. The request's seed and the token's position alone decide that number,
so a seed means the same draws whatever else is in the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.ops.kernels import sampling_kernels
from penstock.step.params import Sampling

_COLDEST = 1e-30
"""Temperatures below it are taken as 0: logits divided by them may be infinite, and then have no softmax."""

_ROWS = 16
"""Rows drawn at a time where there are no kernels: sorted, with their order and sums in float64, they take
ten times their logits."""

_FEW = (256, 4096)
"""Likeliest tokens among which a draw's are looked for before all are sorted, which takes a vocabulary of
150,000 thirteen milliseconds."""


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1), the same for the same seed and position in every process."""
    digest = blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 12) * 2.0**-52


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """TokenCounts is what penalties go by.

    output: how often each token is in the output, int32 `[vocab]`.
    prompt: whether it is in the prompt, bool `[vocab]`.
    """

    output: Tensor
    prompt: Tensor


def penalise(logits: Tensor, sampling: Sampling, counts: TokenCounts) -> None:
    """Apply a row's penalties to its logits `[vocab]`, in place (Keskar et al. 2019, arXiv 1909.05858)."""
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
    """Pack what draws of these rows of logits go by: float64 `[rows, 6]`.

    The columns are row, temperature, top-k, top-p, min-p, and the random number.
    """
    of = zip(rows, settings, positions, strict=True)
    table = [
        (row, one.temperature, one.top_k, one.top_p, one.min_p, uniform(one.seed, position))
        for row, one, position in of
    ]
    return np.array(table, dtype=np.float64).reshape(-1, 6)


def draw(logits: Tensor, asked: Tensor, tokens: Tensor) -> None:
    """Draw a token for each row of `asked`, which `pack_sampling` has packed.

    The order is temperature, top-k, top-p of what top-k leaves, min-p, as in transformers. Of tokens that are
    equally likely the first come first. A logit that is not a number is impossible. With kernels it waits for
    nothing.

    logits: float32 `[rows, vocab]`.
    asked: float64 `[draws, 6]`.
    tokens: int64 `[rows]`, of which only the rows that were named change.
    """
    if logits.is_cuda and (kernels := sampling_kernels()):
        kernels.draw(logits, asked, tokens)
        return
    ordered = (asked[:, 2] > 0) | (asked[:, 3] < 1)
    # Sorting a vocabulary is dear, so rows that need no order go without, and others try whether a part of it
    # does.
    for some, sorts in ((asked[ordered], True), (asked[~ordered], False)):
        for first in range(0, len(some), _ROWS):
            part = some[first : first + _ROWS]
            part = _draw_among_few(logits, part, tokens) if sorts else part
            if len(part):
                rows = part[:, 0].long()
                tokens[rows] = draw_reference(logits[rows], part, sorts=sorts)


def draw_reference(logits: Tensor, asked: Tensor, *, sorts: bool = True) -> Tensor:
    """Compute `draw` step by step, and return the tokens, int64 `[draws]`.

    logits: float32 `[draws, vocab]`, a row for each draw.
    sorts: False where no row needs an order.
    """
    _, most, nucleus, least, number = (asked[:, column, None] for column in range(1, 6))
    warm, likelihood = _likelihoods(logits, asked)
    kept = likelihood.double()
    if sorts:
        order = warm.sort(dim=-1, descending=True, stable=True).indices
        best = likelihood.gather(-1, order).double()
        _truncate(best, most, nucleus, kept.cumsum(-1)[:, -1:])
        kept = torch.zeros_like(best).scatter_(-1, order, best)
    kept.masked_fill_(likelihood < least, 0)
    return _drawn(kept, number)


def _draw_among_few(logits: Tensor, asked: Tensor, tokens: Tensor) -> Tensor:
    """Draw as `draw_reference`, bit for bit, among each row's likeliest tokens, if they are enough.

    Returns the part of `asked` for which they are not. Sums are over the same numbers in the same order, but
    for zeros.
    """
    warm, likelihood = _likelihoods(logits[asked[:, 0].long()], asked)
    everything = (
        likelihood.double().cumsum(-1)[:, -1:] if (asked[:, 2] == 0).any() else torch.ones_like(asked[:, :1])
    )
    for count in _FEW:
        if count >= logits.shape[-1] or not len(asked):
            break
        most, nucleus, least, number = (asked[:, column, None] for column in range(2, 6))
        order = ranked(warm, count)
        among = likelihood.gather(-1, order)
        best = among.double()
        enough = torch.where(most > 0, most <= count, best.cumsum(-1)[:, -1:] >= nucleus * everything)[:, 0]
        _truncate(best, most, nucleus, everything)
        best.masked_fill_(among < least, 0)
        order, places = order.sort(dim=-1)
        found = order.gather(-1, _drawn(best.gather(-1, places), number)[:, None])[:, 0]
        tokens[asked[enough, 0].long()] = found[enough]
        warm, likelihood, everything, asked = (x[~enough] for x in (warm, likelihood, everything, asked))
    return asked


def _likelihoods(logits: Tensor, asked: Tensor) -> tuple[Tensor, Tensor]:
    """Logits at each row's temperature, and how likely that makes tokens, relative to the likeliest, which
    may be infinite."""
    warm = logits.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf) / asked[:, 1, None].float()
    top = warm.amax(-1, keepdim=True)
    return warm, torch.where(warm == top, 1.0, (warm - top).exp())


def _truncate(best: Tensor, most: Tensor, nucleus: Tensor, everything: Tensor) -> None:
    """Make impossible what top-k and top-p leave out of likelihoods in their order. everything: the sum of
    all tokens'."""
    best.masked_fill_((torch.arange(best.shape[-1], device=best.device) >= most) & (most > 0), 0)
    sums = best.cumsum(-1)
    best.masked_fill_(
        (sums - best >= nucleus * torch.where(most > 0, sums[:, -1:], everything)) & (nucleus < 1), 0
    )


def _drawn(kept: Tensor, number: Tensor) -> Tensor:
    """The place of each row's draw among likelihoods in the order of the vocabulary."""
    sums = kept.cumsum(-1)
    places = torch.searchsorted(sums, number * sums[:, -1:], right=True)
    last = (
        sums.shape[-1] - 1 - (kept.flip(-1) > 0).int().argmax(-1)
    )  # A sum may come out below the number's share of itself.
    return torch.minimum(places[:, 0], last)


def ranked(scores: Tensor, count: int) -> Tensor:
    """Return the ids of the `count` highest tokens of each row of float32 `[rows, vocab]`, highest first.

    Of equal ones the lower id comes first: which of them `topk` takes depends on how many are asked for, and
    of how many rows. -0 counts as 0.
    """
    if count == 0:
        return torch.empty(len(scores), 0, dtype=torch.int64, device=scores.device)
    keys = (scores + 0.0).view(torch.int32).long()
    keys ^= (keys >> 63) & 0x7FFFFFFF  # In the order of the numbers, as in triton_sampling.
    keys <<= 32
    keys -= torch.arange(scores.shape[1], device=scores.device)
    return keys.topk(count).indices
