"""Learns how likely drafted tokens hold, by what has held of earlier drafts."""

from collections.abc import Sequence
from itertools import accumulate
from math import log2
from operator import mul

from penstock.sched.suffix import MOST_MATCHED, Draft
from penstock.step.plan import MOST_NODES

_KEPT = 0.98
"""Weight of what was seen of earlier drafts after one more: it halves with 34 of them."""
_PRIOR = 4.0
"""Weight of the prior belief that a match of n tokens holds with probability n / (n + 4), at first."""
_MODEL_HOLDS = 0.8
"""The same of a token of a draft model."""
_FADING = 0.98
"""Weight of the prior belief after one more draft. If it stayed, a long draft would always seem to gain a
little: nothing is learnt of tokens behind those that never hold."""


_NODE_HOLDS = 0.93
"""The part of a draft model's trees that is thought, at first, to hold at their likeliest token, and at each
behind it of that at the one before."""
_BINS = 8
"""Classes of a tree's scores, beside that of 1."""


class Survival:
    """Learns with which probability a drafted token holds if all before it have held.

    By the length of the match at that token, by whether all places agreed on it, and by whether these are of
    other requests. Of a draft model: by how many of its tokens are before that one. Of a tree: by its score,
    for those before which all has held.
    """

    def __init__(self) -> None:
        # Lists, since single numbers are read, thousands of them a second.
        self._tried, self._held, self._prior = (
            [[first] * (max(_CLASSES) + 1) for _ in range(6)] for first in (0.0, 0.0, _PRIOR)
        )
        self._nodes = [_NODE_HOLDS**at for at in range(1, MOST_NODES + 1)]
        """How likely the tokens of a draft model's trees hold, the likeliest first."""

    def of(self, draft: Draft) -> list[float]:
        """Return for each token the probability that it and all before it hold."""
        each = [self._at(draft, depth) for depth in range(len(draft.tokens))]
        if not draft.parents:
            return list(accumulate(each, mul))
        every = [1.0]
        for parent, own in zip(draft.parents, each, strict=True):
            every.append(every[parent] * own)
        return every[1:]

    def of_model(self, most: int, *, tree: bool = False) -> list[float]:
        """Return the same for a draft of so many tokens that a draft model may make, the likeliest first."""
        if tree:
            return [self._nodes[min(at, MOST_NODES - 1)] for at in range(most)]
        return self.of(Draft((0,) * most, (1.0,) * most, 0, by_model=True))

    def _at(self, draft: Draft, depth: int) -> float:
        (kind, at), score, matched = self._place(draft, depth), draft.scores[depth], draft.matched + depth
        prior = score * matched / (matched + 4)
        if draft.by_model:
            prior = score if draft.parents else _MODEL_HOLDS
        weight = self._prior[kind][at]
        return (self._held[kind][at] + weight * prior) / (self._tried[kind][at] + weight)

    def _place(self, draft: Draft, depth: int) -> tuple[int, int]:
        if draft.parents:
            return 5, int(draft.scores[depth] * _BINS)
        if draft.by_model:
            return 2, _class_of(1 + depth)
        kind = 3 if draft.elsewhere else 0
        return kind + (draft.scores[depth] < 1), _class_of(draft.matched + depth)

    def learn(self, draft: Draft, held: int) -> None:
        """Note that the first `held` tokens of a draft have held. The one behind them was tried, too."""
        for depth in range(min(held + 1, len(draft.tokens))):
            self._note(*self._place(draft, depth), depth < held)

    def _note(self, kind: int, at: int, held: bool) -> None:
        self._tried[kind][at] = self._tried[kind][at] * _KEPT + 1
        self._held[kind][at] = self._held[kind][at] * _KEPT + held
        self._prior[kind][at] *= _FADING

    def learn_drawn(self, draft: Draft, drawn: Sequence[int]) -> None:
        """Note what was drawn where a draft was verified: of a line the tokens that held, and one more.

        Of a tree's tokens those were tried before which all has held.
        """
        if not draft.parents:
            return self.learn(draft, len(drawn) - 1)
        if draft.by_model:
            for at, chance in enumerate(sorted(self.of(draft), reverse=True)):
                self._nodes[at] += (1 - _KEPT) * (chance - self._nodes[at])
        held = set(draft.nodes(drawn[:-1]))
        for child, parent in enumerate(draft.parents, 1):
            if parent in held:
                self._note(*self._place(draft, child - 1), child in held)

    def compare(self, draft: Draft, tokens: Sequence[int]) -> None:
        """Note what would have held of a draft that was not verified, by the tokens that came instead."""
        pairs = zip(draft.tokens, tokens, strict=False)
        held = next((at for at, (one, other) in enumerate(pairs) if one != other), len(tokens))
        self.learn(draft.first(len(tokens)), held)


_CLASSES = [int(2 * log2(max(matched, 1))) for matched in range(2 * MOST_MATCHED + 1)]
"""The class of a match by its length: two for each power of two."""


def _class_of(matched: int) -> int:
    return _CLASSES[min(matched, 2 * MOST_MATCHED)]
