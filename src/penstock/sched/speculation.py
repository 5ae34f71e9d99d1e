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
from dataclasses import replace
from itertools import accumulate
from math import inf, log2
from operator import mul
from time import monotonic
from typing import Protocol

from penstock.sched.rates import Curve
from penstock.sched.request import DraftCounts, Request
from penstock.sched.suffix import MOST_MATCHED, NO_DRAFT, Draft, TokenHistory, look_up
from penstock.step.plan import MOST_DRAFTED, Plan, Share

_LOG = logging.getLogger("penstock")
_STALLED = 1.0
"""Seconds for one draft after which a drafter is not asked again for a request."""
_LEAST = 0.01
"""Probability below which a token is not worth looking at."""
_PROBED = 4
"""Tokens of a request that a probe verifies."""
_GAIN = 1.02
"""Times as many tokens a second as without drafts, below which nothing is verified."""
_PROBE_EVERY = 64
"""Steps between two probes that take as long as a plain step. Those that take longer come less often."""
_KEPT = 0.98
"""Weight of what was seen of earlier drafts after one more: it halves with 34 of them."""
_PRIOR = 4.0
"""Weight of the prior belief that a match of n tokens holds with probability n / (n + 4), at first."""
_MODEL_HOLDS = 0.8
"""The same of a token of a draft model."""
_FIRST = 4
"""Tokens of a draft model's drafts before it is known what its steps take."""
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


class ModelDrafting(Protocol):
    """Makes drafts by steps of a draft model, for all requests of a plan at once.

    seconds: time of a step that draws a token for each of them; 0 before one was measured.
    spent: seconds of the last drafts, with what the model had to compute before.
    """

    seconds: float
    spent: float

    def propose(self, asked: Sequence[tuple[Request, Share, int]]) -> list[Draft]:
        """Return a draft of so many tokens for each request, whose share of one token is in the plan."""
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

    By the length of the match at that token, and by whether all places agreed on it. Of a draft model: by how
    many of its tokens are before that one.
    """

    def __init__(self) -> None:
        # Lists, since single numbers are read, thousands of them a second.
        self._tried, self._held, self._prior = (
            [[first] * (max(_CLASSES) + 1) for _ in range(3)] for first in (0.0, 0.0, _PRIOR)
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
        return int(draft.scores[depth] < 1), _class_of(draft.matched + depth)

    def learn(self, draft: Draft, held: int) -> None:
        """Note that the first `held` tokens of a draft have held. The one behind them was tried, too."""
        for depth in range(min(held + 1, len(draft.tokens))):
            kind, at = self._place(draft, depth)
            self._tried[kind][at] = self._tried[kind][at] * _KEPT + 1
            self._held[kind][at] = self._held[kind][at] * _KEPT + (depth < held)
            self._prior[kind][at] *= _FADING


_CLASSES = [int(2 * log2(max(matched, 1))) for matched in range(2 * MOST_MATCHED + 1)]
"""The class of a match by its length: two for each power of two."""


def _class_of(matched: int) -> int:
    return _CLASSES[min(matched, 2 * MOST_MATCHED)]


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
        self.model: ModelDrafting | None = None
        """Drafts where look-up gives less, if there is a draft model."""
        self._unasked, self._patience = 0, float(_PROBE_EVERY)
        """Steps that might have had drafts of the model and had none, and how many of these there are before
        it is asked again."""
        self._vocabulary, self._clock = vocabulary, clock
        self.counts = DraftCounts()
        self._seconds = Curve()
        """Of steps without any of a prompt, by their tokens."""
        self._whole, self._needed = 0, 1
        """Drafts of which all has held since more than pays was verified, and how many of them there are
        before that is done again."""
        self._largest = 0
        """Most tokens of one of these."""
        self._plain = 0
        """Steps that might have verified a draft, since the last that has."""
        self._wait = float(_PROBE_EVERY)
        """Of these, how many come before a probe."""
        self._drafts: dict[int, Draft] = {}
        """Drafts of the step under way, by row."""

    def propose(self, requests: Sequence[tuple[Request, int]], spare: int) -> list[Draft]:
        """Return a draft of each of these requests, by look-up.

        requests: with the most tokens that each has place for.
        spare: tokens that the step may have beside.
        """
        return [self._propose(request, min(most, MOST_DRAFTED, spare)) for request, most in requests]

    def depths(self, found: Sequence[Draft], tokens: int, spare: int) -> list[int]:
        """Return how many tokens the draft model is to draft for each request.

        As many as give the most tokens a second, by what its steps and the target's took. None for requests
        of whose drafts by look-up as much is expected.

        tokens, spare: see `choose`.
        """
        if self.model is None or not found:
            return [0] * len(found)
        most = min(MOST_DRAFTED, spare // len(found))
        chances, took = self.survival.of_model(most), self.model.seconds
        rows, best, depth = len(found), _GAIN * len(found) / self._at(tokens), 0
        gained = list(accumulate(chances, initial=0.0))
        for deep in range(1, most + 1) if took else ():
            rate = (rows + rows * gained[deep]) / (self._at(tokens + rows * deep) + deep * took)
            if rate > best:
                best, depth = rate, deep
        if not took:
            depth = min(_FIRST, most)
        elif not depth:
            cost = self._ratio(tokens, rows * min(_PROBED, most)) - 1 + self.model.spent / self._at(tokens)
            self._patience = max(_PROBE_EVERY, _PROBE_EVERY * cost)
            self._unasked += 1
            if self._unasked >= self._patience:
                depth = min(_PROBED, most)
        if depth:
            self._unasked = 0
        return [0 if sum(self.survival.of(draft)) >= gained[depth] else depth for draft in found]

    def choose(self, found: Sequence[Draft], tokens: int, spare: int) -> list[Draft]:
        """Return what a step verifies of the drafts of all requests, none of it for most of them.

        tokens: of the step without drafts.
        spare: tokens that it may have beside.
        """
        if not any(draft.tokens for draft in found):
            return list(found)
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
            if self._whole >= self._needed:
                self._whole = 0
                return self._deeper(found, counts, spare)
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
        every = sorted(
            [(-chance, place) for place, some in enumerate(survival) for chance in some if chance >= _LEAST]
        )[:spare]
        counts, best, gained = [0] * len(survival), 0, float(len(survival))
        most = _GAIN * len(survival) / self._at(tokens)
        for number, (chance, _) in enumerate(every, 1):
            gained -= chance
            if (rate := gained / self._at(tokens + number)) > most:
                best, most = number, rate
        for _, place in every[:best]:
            counts[place] += 1
        return counts

    def _deeper(self, found: Sequence[Draft], counts: Sequence[int], spare: int) -> list[Draft]:
        """Return twice as many tokens of each draft, as far as there are. Else nothing would be learnt of
        tokens that once did not hold. The more often that is in vain, the more rarely it is done."""
        more = list[Draft]()
        for draft, count in zip(found, counts, strict=True):
            most = min(2 * count, len(draft.tokens), max(spare - sum(len(one.tokens) for one in more), 0))
            more.append(replace(draft.first(most), tried=count) if most > count else draft.first(most))
        return more

    def _at(self, tokens: int) -> float:
        """Return the seconds of a step of so many tokens. Twice as many as any step had take too long, so
        that it is found out step by step how many do not pay."""
        if not self._seconds:
            return 1.0 if tokens <= 2 * _PROBED else inf
        return self._seconds.at(tokens) if tokens <= 2 * max(self._largest, _PROBED) else inf

    def _ratio(self, tokens: int, more: int) -> float:
        return self._at(tokens + more) / max(self._at(tokens), 1e-9)

    def verifies(self, share: Share, draft: Draft) -> None:
        """Note that a step verifies a draft."""
        self._drafts[share.row] = draft

    def learn(self, request: Request, share: Share, drawn: int, kept: int) -> None:
        """Note how many tokens the target drew for a share that verified a draft, and how many of these are
        the request's, which may have ended within the draft."""
        draft = self._drafts.pop(share.row, None)
        if draft is None:
            return
        held = min(drawn - 1, len(draft.tokens))
        self.survival.learn(draft, held)
        if draft.tried:
            self._needed = 1 if held > draft.tried else min(2 * self._needed, _PROBE_EVERY)
        elif held == len(draft.tokens):
            self._whole += 1
        for counts in (self.counts, request.drafts):
            counts.drafts, counts.drafted = counts.drafts + 1, counts.drafted + len(draft.tokens)
            counts.accepted += min(held, kept)

    def stepped(self, plan: Plan, seconds: float) -> None:
        """Note how long a step took."""
        if seconds > 0 and not plan.chunks:
            self._seconds.add(plan.tokens, seconds)
            self._largest = max(self._largest, plan.tokens)


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
