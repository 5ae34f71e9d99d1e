"""Decides how many tokens of which drafts a step verifies.

A step takes some seconds, and more with more tokens. A drafted token is worth the probability that it and all
before it hold. So of all drafts those tokens are verified that give the most tokens a second, by what steps
took and by what has held of earlier drafts. Where no draft gives more than plain decoding, none is verified,
but for a probe now and then.

Speculation changes no token. The target draws at every position of a draft with the request's own settings
and noise, as it would have without; tokens of the draft that equal what it draws are kept.

A drafter that fails in a request, stalls, or returns what is no draft is not asked again for this request,
which goes on without drafts.
"""

import logging
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul
from time import monotonic
from typing import Protocol

import numpy as np

from penstock.sched.rates import Curve
from penstock.sched.request import DraftCounts, Request
from penstock.sched.suffix import MOST_MATCHED, NO_DRAFT, Draft, TokenHistory, look_up
from penstock.step.plan import MOST_DRAFTED, Plan, Share

_LOG = logging.getLogger("penstock")
_STALLED = 1.0
"""Seconds for one draft after which a drafter is not asked again for a request."""
_PROBED = 4
"""Tokens of a request that a probe verifies."""
_GAIN = 1.02
"""Times as many tokens a second as without drafts, below which nothing is verified."""
_PROBE_EVERY = 64
"""Steps between two probes that take as long as a plain step. Those that take longer come less often."""
_KEPT = 0.9965
"""Weight of what was seen of earlier drafts after one more: it halves with 200 of them."""
_PRIOR = 4.0
"""Weight of the prior belief that a match of n tokens holds with probability n / (n + 1), at first."""
_FADING = 0.98
"""Weight of the prior belief after one more draft. If it stayed, a long draft would always seem to gain a
little: nothing is learnt of tokens behind those that never hold."""


class Drafter(Protocol):
    """Proposes what may come next. It may be wrong in any way: the target decides every token."""

    def propose(self, request: Request, most: int) -> Draft:
        """Return at most `most` tokens behind a request's newest one, all of whose tokens are known.

        most: at least one.
        """
        ...


class SuffixDrafter:
    """Drafts by `suffix.look_up` in the request's own tokens."""

    def propose(self, request: Request, most: int) -> Draft:
        """Look in what the request has said so far, its prompt included."""
        if request.history is None:
            request.history = TokenHistory()
        request.history.follow(request.tokens, len(request.tokens))
        return look_up(request.history.tokens, most)


class Survival:
    """Learns with which probability a drafted token holds if all before it have held.

    By the length of the match at that token, and by whether all places agreed on it.
    """

    def __init__(self) -> None:
        classes = _class_of(2 * MOST_MATCHED) + 1
        self._tried = np.zeros((2, classes))
        self._held = np.zeros((2, classes))
        self._prior = np.full((2, classes), _PRIOR)

    def of(self, draft: Draft) -> list[float]:
        """Return for each token the probability that it and all before it hold."""
        each = [
            self._of(draft.matched + depth, score)
            for depth, score in enumerate(draft.scores[: len(draft.tokens)])
        ]
        return list(accumulate(each, mul))

    def _of(self, matched: int, score: float) -> float:
        at = int(score < 1), _class_of(matched)
        prior, weight = score * matched / (matched + 1), self._prior[at]
        return float((self._held[at] + weight * prior) / (self._tried[at] + weight))

    def learn(self, draft: Draft, held: int) -> None:
        """Note that the first `held` tokens of a draft have held. The one behind them was tried, too."""
        for depth in range(min(held + 1, len(draft.tokens))):
            at = int(draft.scores[depth] < 1), _class_of(draft.matched + depth)
            self._tried[at] = self._tried[at] * _KEPT + 1
            self._held[at] = self._held[at] * _KEPT + (depth < held)
            self._prior[at] *= _FADING


def _class_of(matched: int) -> int:
    """Return the class of a match: two for each power of two."""
    return min(int(2 * np.log2(max(matched, 1))), int(2 * np.log2(2 * MOST_MATCHED)))


class Speculation:
    """Chooses the drafts of each step, and learns from what comes of them."""

    def __init__(
        self,
        drafter: Drafter,
        survival: Survival | None = None,
        vocabulary: int | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """Begin without drafts.

        vocabulary: tokens that the target knows, where a drafter might name others.
        clock: returns seconds.
        """
        self.drafter, self.survival = drafter, survival or Survival()
        self._vocabulary, self._clock = vocabulary, clock
        self.counts = DraftCounts()
        self._seconds = Curve()
        """Of steps without any of a prompt, by their tokens."""
        self._plain = 0
        """Steps that might have verified a draft, since the last that has."""
        self._wait = float(_PROBE_EVERY)
        """Of these, how many come before a probe."""
        self._drafts: dict[int, Draft] = {}
        """Drafts of the step under way, by row."""

    def choose(self, requests: Sequence[tuple[Request, int]], tokens: int, spare: int) -> list[Draft]:
        """Return what a step verifies of each of these requests, none of it for most of them.

        requests: with the most tokens that each has place for.
        tokens: of the step without drafts.
        spare: tokens that it may have beside.
        """
        found = [self._propose(request, min(most, MOST_DRAFTED, spare)) for request, most in requests]
        if not any(draft.tokens for draft in found):
            return found
        survival = [self.survival.of(draft) for draft in found]
        counts = self._best(survival, tokens, spare)
        if not any(counts):
            self._plain += 1
            if self._plain < self._wait:
                return [NO_DRAFT] * len(found)
            most = max(1, min(_PROBED, spare // len(found)))
            counts = [
                min(len(draft.tokens), most, max(0, spare - most * place))
                for place, draft in enumerate(found)
            ]
            self._wait = max(_PROBE_EVERY, _PROBE_EVERY * (self._ratio(tokens, sum(counts)) - 1))
        else:
            self._wait = _PROBE_EVERY
        self._plain = 0
        return [draft.first(count) for draft, count in zip(found, counts, strict=True)]

    def _propose(self, request: Request, most: int) -> Draft:
        """Return a draft of a request, or none where its drafter has failed, now or before."""
        if most < 1 or request.drafts.failed:
            return NO_DRAFT
        began = self._clock()
        try:
            draft = self.drafter.propose(request, most)
            fault = _flaw(draft, most, self._vocabulary)
        except Exception as error:  # Any fault of a drafter is one that an answer does not have to share.
            draft, fault = NO_DRAFT, f"{type(error).__name__}: {error}"
        if not fault and (seconds := self._clock() - began) > _STALLED:
            fault = f"a draft took {seconds:.1f} s"
        if not fault:
            return draft
        for counts in (self.counts, request.drafts):
            counts.failed += 1
        _LOG.warning(
            "%s drafts no more for request %d, which goes on: %s",
            type(self.drafter).__name__,
            request.id,
            fault,
        )
        return NO_DRAFT

    def _best(self, survival: Sequence[Sequence[float]], tokens: int, spare: int) -> list[int]:
        """Return how many tokens of each draft give the most tokens a second. A token's survival is at most
        that of the one before it, so the likeliest of all are always the first of each draft."""
        every = sorted((-chance, place) for place, some in enumerate(survival) for chance in some)[:spare]
        counts, best, gained = [0] * len(survival), 0, float(len(survival))
        most = _GAIN * len(survival) / self._at(tokens)
        for number, (chance, _) in enumerate(every, 1):
            gained -= chance
            if (rate := gained / self._at(tokens + number)) > most:
                best, most = number, rate
        for _, place in every[:best]:
            counts[place] += 1
        return counts

    def _at(self, tokens: int) -> float:
        return self._seconds.at(tokens) if self._seconds else 1.0

    def _ratio(self, tokens: int, more: int) -> float:
        return self._at(tokens + more) / max(self._at(tokens), 1e-9)

    def verifies(self, share: Share, draft: Draft) -> None:
        """Note that a step verifies a draft."""
        self._drafts[share.row] = draft

    def learn(self, request: Request, share: Share, drawn: int) -> None:
        """Note how many tokens the target drew for a share that verified a draft."""
        draft = self._drafts.pop(share.row, None)
        if draft is None:
            return
        held = min(drawn - 1, len(draft.tokens))
        self.survival.learn(draft, held)
        for counts in (self.counts, request.drafts):
            counts.drafts, counts.drafted = counts.drafts + 1, counts.drafted + len(draft.tokens)
            counts.accepted += held

    def stepped(self, plan: Plan, seconds: float) -> None:
        """Note how long a step took."""
        if seconds > 0 and not plan.chunks:
            self._seconds.add(plan.tokens, seconds)


def _flaw(draft: Draft, most: int, vocabulary: int | None) -> str:
    """Return what is wrong with a draft of at most `most` tokens, or an empty string."""
    tokens, scores = draft.tokens, draft.scores
    if len(tokens) > most:
        return f"a draft of {len(tokens)} tokens, where {most} have a place"
    if len(scores) != len(tokens):
        return f"a draft of {len(tokens)} tokens with {len(scores)} scores"
    if not all(isinstance(token, int) and 0 <= token < (vocabulary or 1 << 31) for token in tokens):
        return "a draft of tokens that the model does not know"
    if not all(0 <= score <= 1 for score in scores) or draft.matched < 0:
        return "a draft with scores that are no probabilities, or a match of less than nothing"
    return ""
