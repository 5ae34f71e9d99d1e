"""From logits to tokens: penalties, truncation and the draw, for a batch in which every row has its own settings.

No row's result depends on another row. The draw is the inverse of the cumulative distribution at a number that the request's seed and
the token's position alone decide, so a seed means the same draws whatever else is in the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

from penstock.step.params import Sampling

_COLDEST = 1e-30
"""Temperatures below it are taken as 0: logits divided by them may be infinite, and then have no softmax."""

_ROWS = 32
"""Rows drawn at a time: sorted with their order and sums in float64 they take six times their logits."""


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1), the same for the same seed and position in every process."""
    digest = blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 12) * 2.0**-52


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """For penalties: how often each token is in the output, and whether it is in the prompt; `[vocab]` int32 and bool."""

    output: Tensor
    prompt: Tensor


def penalise(logits: Tensor, sampling: Sampling, counts: TokenCounts) -> None:
    """Apply a row's penalties to its logits `[vocab]`, in place (repetition: Keskar et al. 2019, arXiv 1909.05858)."""
    if sampling.repetition_penalty != 1:
        seen = counts.prompt | (counts.output > 0)
        factor = torch.where(logits > 0, 1 / sampling.repetition_penalty, sampling.repetition_penalty)
        logits.copy_(torch.where(seen, logits * factor, logits))
    if sampling.frequency_penalty:
        logits.sub_(counts.output * sampling.frequency_penalty)
    if sampling.presence_penalty:
        logits.sub_((counts.output > 0) * sampling.presence_penalty)


def is_greedy(sampling: Sampling) -> bool:
    return sampling.temperature <= _COLDEST or sampling.top_k == 1


def draw(logits: Tensor, settings: Sequence[Sampling], positions: Sequence[int]) -> Tensor:
    """One token per row: logits float32 `[rows, vocab]`, and the position of each row's token; result int64 `[rows]` on the device.

    In this order: temperature, top-k, top-p of what top-k leaves, min-p; as transformers does it.
    """
    tokens = logits.argmax(-1)
    random = [row for row, one in enumerate(settings) if not is_greedy(one)]
    # Sorting a vocabulary is dear, so rows that need no order go without; the choice depends on the row's own settings only.
    ordered = [row for row in random if settings[row].top_k > 0 or settings[row].top_p < 1]
    plain = [row for row in random if not (settings[row].top_k > 0 or settings[row].top_p < 1)]
    for rows, draw_rows in ((ordered, _draw_ordered), (plain, _draw_plain)):
        for first in range(0, len(rows), _ROWS):
            some = rows[first : first + _ROWS]
            index = torch.tensor(some, device=logits.device)
            chosen = [settings[row] for row in some]
            heat = _column([one.temperature for one in chosen], logits)
            at = _column([uniform(settings[row].seed, positions[row]) for row in some], logits, torch.float64)
            tokens[index] = draw_rows(logits[index] / heat, chosen, at)
    return tokens


def _draw_plain(logits: Tensor, settings: Sequence[Sampling], numbers: Tensor) -> Tensor:
    return _invert(_min_p(logits.softmax(-1), settings), numbers)


def _draw_ordered(logits: Tensor, settings: Sequence[Sampling], numbers: Tensor) -> Tensor:
    logits, order = logits.sort(dim=-1, descending=True, stable=True)
    vocab = logits.shape[-1]
    most = _column([one.top_k if one.top_k > 0 else vocab for one in settings], logits)
    logits = logits.masked_fill(torch.arange(vocab, device=logits.device) >= most, -torch.inf)
    probabilities = logits.softmax(-1)
    before = probabilities.cumsum(-1, dtype=torch.float64) - probabilities
    nucleus = _column([one.top_p for one in settings], logits, torch.float64)
    probabilities = probabilities.masked_fill((before >= nucleus) & (nucleus < 1), 0)
    place = _invert(_min_p(probabilities, settings), numbers)
    return order.gather(-1, place[:, None])[:, 0]


def _min_p(probabilities: Tensor, settings: Sequence[Sampling]) -> Tensor:
    if not any(one.min_p for one in settings):
        return probabilities
    least = _column([one.min_p for one in settings], probabilities) * probabilities.amax(-1, keepdim=True)
    return probabilities.masked_fill(probabilities < least, 0)


def _invert(probabilities: Tensor, numbers: Tensor) -> Tensor:
    """The first place at which the cumulative sum exceeds the number's share of the whole."""
    sums = probabilities.cumsum(-1, dtype=torch.float64)
    places = torch.searchsorted(sums, numbers * sums[:, -1:], right=True)[:, 0]
    return places.clamp_(max=probabilities.shape[-1] - 1)


def _column(values: Sequence[float], like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=like.device)[:, None]
