"""Learns how likely drafted tokens hold, by what has held of earlier drafts."""

from collections.abc import Sequence
from itertools import accumulate
from math import log2
from operator import mul

from penstock.sched.suffix import MOST_MATCHED, Draft

_KEPT = 0.98
"""Weight of what was seen of earlier drafts after one more: it halves with 34 of them."""
_PRIOR = 4.0
"""Weight of the prior belief that a match of n tokens holds with probability n / (n + 4), at first."""
_MODEL_HOLDS = 0.8
"""The same of a token of a draft model."""
_FADING = 0.98
"""Weight of the prior belief after one more draft. If it stayed, a long draft would always seem to gain a
little: nothing is learnt of tokens behind those that never hold."""


class Survival:
    """Learns with which probability a drafted token holds if all before it have held.

    By the length of the match at that token, by whether all places agreed on it, and by whether these are of
    other requests. Of a draft model: by how many of its tokens are before that one.
    """

    def __init__(self) -> None:
        # Lists, since single numbers are read, thousands of them a second.
        self._tried, self._held, self._prior = (
            [[first] * (max(_CLASSES) + 1) for _ in range(5)] for first in (0.0, 0.0, _PRIOR)
        )

    def of(self, draft: Draft) -> list[float]:
        """Return for each token the probability that it and all before it hold."""
        return list(accumulate([self._at(draft, depth) for depth in range(len(draft.tokens))], mul))

    def of_model(self, most: int) -> list[float]:
        """Return the same for a draft of so many tokens that a draft model may draw."""
        return self.of(Draft((0,) * most, (1.0,) * most, 0, by_model=True))

    def _at(self, draft: Draft, depth: int) -> float:
        (kind, at), score, matched = self._place(draft, depth), draft.scores[depth], draft.matched + depth
        prior = _MODEL_HOLDS if draft.by_model else score * matched / (matched + 4)
        weight = self._prior[kind][at]
        return (self._held[kind][at] + weight * prior) / (self._tried[kind][at] + weight)

    def _place(self, draft: Draft, depth: int) -> tuple[int, int]:
        if draft.by_model:
            return 2, _class_of(1 + depth)
        kind = 3 if draft.elsewhere else 0
        return kind + (draft.scores[depth] < 1), _class_of(draft.matched + depth)

    def learn(self, draft: Draft, held: int) -> None:
        """Note that the first `held` tokens of a draft have held. The one behind them was tried, too."""
        for depth in range(min(held + 1, len(draft.tokens))):
            kind, at = self._place(draft, depth)
            self._tried[kind][at] = self._tried[kind][at] * _KEPT + 1
            self._held[kind][at] = self._held[kind][at] * _KEPT + (depth < held)
            self._prior[kind][at] *= _FADING

    def compare(self, draft: Draft, tokens: Sequence[int]) -> None:
        """Note what would have held of a draft that was not verified, by the tokens that came instead."""
        pairs = zip(draft.tokens, tokens, strict=False)
        held = next((at for at, (one, other) in enumerate(pairs) if one != other), len(tokens))
        self.learn(draft.first(len(tokens)), held)


_CLASSES = [int(2 * log2(max(matched, 1))) for matched in range(2 * MOST_MATCHED + 1)]
"""The class of a match by its length: two for each power of two."""


def _class_of(matched: int) -> int:
    return _CLASSES[min(matched, 2 * MOST_MATCHED)]
