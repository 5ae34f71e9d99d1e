"""Decides how many tokens of which drafts a step verifies.

A step takes some seconds, and more with more tokens. A drafted token is worth the probability that it and all
before it hold. So of all drafts those tokens are verified that give the most tokens a second, by what steps
took and by what has held of earlier drafts. Where no draft gives more than plain decoding, none is verified,
but for a probe now and then.

A step that verifies waits for the one before, since a draft begins with its tokens, and the next one waits
for what it yields. Plain steps run ahead where the device computes by itself. So both are measured from the
end of a step to the end of the next, and apart. Where nothing was verified for some steps, speculation rests:
see `resting`. What it may lose beside plain decoding is bounded, whatever is drafted: see `DraftBudget`.

Speculation changes no token. The target draws at every position of a draft with the request's own settings
and noise, as it would have without; tokens of the draft that equal what it draws are kept.

A drafter that fails in a request, stalls, or returns what is no draft is not asked again for this request,
which goes on without drafts.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from math import inf
from time import monotonic

from penstock.sched.drafter import Drafter, ModelDrafting, flaw
from penstock.sched.rates import Curve
from penstock.sched.request import DraftCounts, Request
from penstock.sched.resting import DraftBudget, Lookout
from penstock.sched.suffix import NO_DRAFT, Draft
from penstock.sched.survival import Survival
from penstock.sched.weighing import best_counts, count_within, tokens_a_second
from penstock.step.plan import MOST_DRAFTED, UNKNOWN, Plan, Share

_LOG = logging.getLogger("penstock")
_STALLED = 1.0
"""Seconds for one draft after which a drafter is not asked again for a request."""
_PROBED = 4
"""Tokens of a request that a probe verifies."""
_MEASURED = 8
"""Steps in a row without drafts that are all measured. Of those behind them, only one of as many is."""
_GAIN = 1.02
"""Times as many tokens a second as without drafts, below which nothing is verified."""
_PROBE_EVERY, _PROBE_SOON, _LONG = 64, 8, 1 << 30
"""Fewest steps between two probes, if what the last verified did not all hold; where much may be lost, at
first and behind drafts that have held; and steps for which no probe waits."""
_PROBE_COST = 0.25
"""Plain steps that all tokens of a probe but the first may cost, for which it waits."""
_QUIET = 2, 4
"""Steps in a row that might have verified a draft and did not, after which it rests; behind gains."""
_NEW, _LEAST_TRUST = 0.25, 0.02
"""Weight of the last time that speculation woke for a draft, and the least trust in what is seen at rest."""
_WEIGHED_EVERY = 16
"""Steps of rest between two times that it is weighed whether a draft model pays."""
_FIRST = 4
"""Tokens of a draft model's drafts before it is known what its steps take."""


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
        self._seconds, self._ahead = Curve(), Curve()
        """Of steps without any of a prompt, by their tokens: those that waited, and those that ran ahead."""
        self._thoughts: dict[int, float] = {}
        """Seconds of steps by their tokens, as far as they were asked for since the last was measured."""
        self._alike = 0
        """Steps in a row that verified nothing."""
        self._since: float | None = None
        """When the last step ended; None if there was nothing to do since."""
        self._apart, self._gained = 0.0, 0
        """Seconds of a draft model's steps before the step under way, and drafted tokens that it yielded."""
        self.budget = DraftBudget()
        self._lookout = Lookout(self._propose, clock)
        self.resting, self._woken, self._expects = True, False, False
        """Whether it rests, whether it has just woken, and whether it did for a draft that seemed to pay."""
        self._trust = 1.0
        """Part of the latest times that it woke for such a draft in which one was verified then."""
        self._quiet = 0
        """Steps in a row that might have verified a draft and did not."""
        self._looked_up: set[int] | None = None
        """The only requests that look-up drafts for next, if it has woken for a probe or for a model."""
        self._probes = False
        """Whether the last drafts that were chosen are a probe. If one of them holds, another follows."""
        self._whole, self._needed = 0, 1
        """Drafts of which all has held since more than pays was verified, and how many of them there are
        before that is done again."""
        self._largest = 0
        """Most tokens of one of these."""
        self._plain = 0
        """Steps that might have verified a draft, since the last that has."""
        self._drafts: dict[int, Draft] = {}
        """Drafts of the step under way, by row."""

    def propose(self, requests: Sequence[tuple[Request, int]], spare: int) -> list[Draft]:
        """Return a draft of each of these requests, by look-up.

        requests: with the most tokens that each has place for.
        spare: tokens that the step may have beside.
        """
        return [
            self._propose(request, min(most, MOST_DRAFTED, spare))
            if self._looked_up is None or request.id in self._looked_up
            else NO_DRAFT
            for request, most in requests
        ]

    def depths(self, found: Sequence[Draft], tokens: int, spare: int) -> list[int]:
        """Return how many tokens the draft model is to draft for each request.

        As many as give the most tokens a second, by what its steps and the target's took. None for requests
        of whose drafts by look-up as much is expected, and none if look-up alone gives more. tokens, spare:
        see `choose`.
        """
        if self.model is None or not found:
            return [0] * len(found)
        most, took = min(self.model.most, spare // len(found)), self.model.seconds
        depth, gained = self._deepest(len(found), tokens, most)
        probes = not depth
        if not took:
            depth = min(_FIRST, most)
        elif probes:
            self._unasked += 1
            depth = self._probing_depth(len(found), tokens, most)
        survival = [self.survival.of(draft) for draft in found]
        deep = [0 if sum(some) >= gained[depth] else depth for some in survival]
        by_model = partial(self.survival.of_model, tree=self.model.trees)
        both = [by_model(count) if count else some for count, some in zip(deep, survival, strict=True)]
        apart = self.model.levels(max(deep)) * took
        if not probes and self._rate(both, tokens, spare, apart) <= self._rate(survival, tokens, spare):
            return [0] * len(found)
        self._unasked *= not depth
        return deep

    def _rate(
        self, survival: Sequence[Sequence[float]], tokens: int, spare: int, apart: float = 0.0
    ) -> float:
        """Return the most tokens a second of drafts, as far as that may be lost. apart: seconds for them."""
        counts = self._best(survival, tokens, self._payable(tokens, min(spare, sum(map(len, survival)))))
        return tokens_a_second(survival, counts, self._at(tokens + sum(counts)) + apart)

    def _deepest(self, rows: int, tokens: int, most: int) -> tuple[int, list[float]]:
        """Return how many tokens of the draft model for each of these rows give the most tokens a second, as
        far as that may be lost, and how many are expected to hold of each number."""
        assert self.model is not None
        took, plain = self.model.seconds, self._base(tokens)
        allowed = self._at(tokens + rows) + took + self.budget.left * plain
        gained = list(accumulate(self.survival.of_model(most, tree=self.model.trees), initial=0.0))
        best, depth = _GAIN * rows / plain, 0
        for deep in range(1, most + 1) if took and self.budget.left > 0 else ():
            seconds = self._at(tokens + rows * deep) + self.model.levels(deep) * took
            if (rate := (rows + rows * gained[deep]) / seconds) > best and seconds <= allowed:
                best, depth = rate, deep
        return depth, gained

    def _probing_depth(self, rows: int, tokens: int, most: int) -> int:
        """Return how many tokens a draft model is to draft for each, to see whether they hold now: none
        before its patience is over, and no more than may be lost."""
        assert self.model is not None
        most, took, plain = min(_PROBED, most, max(32 // rows, 1)), self.model.seconds, self._base(tokens)
        by, steps = self.model.levels, self._thought
        self._patience = _PROBE_EVERY * max(1, (steps(tokens + rows * most) + self.model.spent) / plain - 1)
        if self._unasked < self._patience or not (self.budget.full or self._woken):
            return 0
        least = self._thought(tokens + rows) + took
        allowed = least + (_PROBE_COST if self.budget.left < 1 else self.budget.left) * plain
        return count_within(allowed, most, lambda deep: steps(tokens + rows * deep) + by(deep) * took)

    def choose(self, found: Sequence[Draft], tokens: int, spare: int) -> list[Draft]:
        """Return what a step verifies of the drafts of all requests, none of it for most of them.

        tokens: of the step without drafts.
        spare: tokens that it may have beside.
        """
        if not any(draft.tokens for draft in found):
            self._chose_none()
            return list(found)
        survival = [self.survival.of(draft) for draft in found]
        self._probes = False
        payable = self._payable(tokens, min(spare, sum([len(draft.tokens) for draft in found])))
        counts = self._best(survival, tokens, payable)
        if not any(counts):
            self._plain += 1
            counts = self._probe(found, survival, tokens, spare)
            self._probes = True
            if not any(counts):
                self._chose_none()
                return [NO_DRAFT] * len(found)
        elif self._whole >= self._needed:
            self._whole = 0
            return self._chose(self._deeper(found, counts, payable))
        return self._chose([draft.first(count) for draft, count in zip(found, counts, strict=True)])

    def _chose(self, drafts: list[Draft]) -> list[Draft]:
        """Return these drafts, which are verified now."""
        if self._woken and self._expects and not self._probes:
            self._trust += _NEW * (1 - self._trust)
        self._plain = self._quiet = 0
        self._woken, self._looked_up = False, None
        return drafts

    def _chose_none(self) -> None:
        """Rest if nothing was verified for some steps, or by the step for which speculation has woken."""
        self._quiet += 1
        if self._woken and self._expects:
            self._trust = max((1 - _NEW) * self._trust, _LEAST_TRUST)
        if self._woken or self._quiet >= _QUIET[self.budget.left >= 1] or self.budget.left <= 0:
            self.rest()

    # ---- resting

    def rest(self) -> None:
        """Let all requests run ahead from now on."""
        self.resting, self._woken, self._quiet, self._looked_up = True, False, 0, None

    def rested(self) -> None:
        """Note that a step is planned that might have verified a draft."""
        self._plain += 1
        self._unasked += 1

    def look(self, requests: Sequence[tuple[Request, int]], tokens: int, spare: int, *, ahead: bool) -> None:
        """Wake if it pays to verify a draft as soon as nothing is under way, or if a probe is due.

        requests: those that decode, with the most tokens that each has place for behind its own.
        tokens, spare: of the next step, as of `choose`. ahead: whether a step that yields tokens is under
        way.
        """
        # What a plain step takes is known when one has run ahead.
        may = requests and self.budget.left > 0 and (self._ahead or not ahead)
        if not may or not self._lookout.begin(self._base(tokens), ahead):
            return
        self._expects = False
        try:
            if by_model := self._model_may_pay(len(requests), tokens, spare):
                self._looked_up = set()
            if by_model or self._draft_may_pay(requests, tokens, spare):
                self.resting, self._woken = False, True
        finally:
            self._lookout.end()
        if not self.resting:
            self._lookout.forget()

    def _model_may_pay(self, rows: int, tokens: int, spare: int) -> bool:
        """Tell whether a draft model is to be asked."""
        if self.model is None or (most := min(self.model.most, spare // rows)) < 1:
            return False
        if not self.model.seconds:
            return True
        if self._unasked % _WEIGHED_EVERY and self._unasked < self._patience:
            return False
        return bool(self._deepest(rows, tokens, most)[0] or self._probing_depth(rows, tokens, most))

    def _draft_may_pay(self, requests: Sequence[tuple[Request, int]], tokens: int, spare: int) -> bool:
        """Tell whether a draft by look-up is to be verified, or probed."""
        probes = self._probe_due()
        found = self._lookout.look([(request, min(most, MOST_DRAFTED, spare)) for request, most in requests])
        # The first tokens of a draft are under way already.
        left = [draft.tokens[request.unknown :] for draft, (request, _) in zip(found, requests, strict=True)]
        if not any(left):
            return False
        trust = self._trust if any(request.unknown for request, _ in requests) else 1.0
        survival = [
            [trust * chance for chance in self.survival.of(draft)[request.unknown :]]
            for draft, (request, _) in zip(found, requests, strict=True)
        ]
        payable = self._payable(tokens, min(spare, sum(map(len, left))))
        self._expects = any(self._best(survival, tokens, payable))
        if probes and not self._expects:
            self._looked_up = {request.id for (request, _), some in zip(requests, left, strict=True) if some}
        return self._expects or probes

    def _propose(self, request: Request, most: int) -> Draft:
        """Return a draft of a request, or none where its drafter has failed, now or before."""
        if most < 1 or request.drafts.failed:
            return NO_DRAFT
        began = self._clock()
        try:
            draft = self.drafter.propose(request, most)
            fault = flaw(draft, most, self._vocabulary)
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
        """Return how many tokens of each draft give the most tokens a second; see `best_counts`."""
        least = _GAIN * len(survival) / self._base(tokens)
        return best_counts(survival, spare, least, lambda number: self._at(tokens + number))

    def _deeper(self, found: Sequence[Draft], counts: Sequence[int], spare: int) -> list[Draft]:
        """Return twice as many tokens of each draft, as far as there are. Else nothing would be learnt of
        tokens that once did not hold. The more often that is in vain, the more rarely it is done."""
        deeper, left = list[Draft](), spare - sum(counts)
        for draft, count in zip(found, counts, strict=True):
            more = min(count, len(draft.tokens) - count, left)
            left -= more
            deeper.append(replace(draft.first(count + more), tried=count) if more else draft.first(count))
        return deeper

    def _at(self, tokens: int) -> float:
        """Return the seconds of a step of so many tokens. Twice as many as any step had take too long, so
        that it is found out step by step how many do not pay."""
        return self._thought(tokens) if tokens <= 2 * max(self._largest, _PROBED) else inf

    def _thought(self, tokens: int) -> float:
        """Return the same by what is known, however many tokens it has."""
        if (seconds := self._thoughts.get(tokens)) is None:
            seconds = max([curve.at(tokens) for curve in (self._seconds, self._ahead) if curve], default=1.0)
            self._thoughts[tokens] = seconds
        return seconds

    def _base(self, tokens: int) -> float:
        """Return the seconds of a step of so many tokens if nothing waits for it."""
        return max(self._ahead.at(tokens) if self._ahead else self._at(tokens), 1e-9)

    def _payable(self, tokens: int, most: int) -> int:
        """Return how many drafted tokens a step may have, by what is lost if none holds. The first, for which
        the step waits, is free where anything may be lost."""
        if self.budget.left <= 0:
            return 0
        known = [seconds for size, seconds in self._seconds.points if size > tokens]
        least = max(self._thought(tokens + 1), known[0] if known else 0.0)
        allowed = least + self.budget.left * self._base(tokens)
        if self._thought(tokens + most) <= allowed:
            return most
        return count_within(allowed, most, lambda number: self._thought(tokens + number))

    def _probe_due(self) -> bool:
        """Tell whether drafts may be verified that are not thought to pay: sooner, where much may be lost."""
        return self.budget.full and self._plain >= (_PROBE_EVERY if self.budget.left < 1 else _PROBE_SOON)

    def _probe(
        self, found: Sequence[Draft], survival: Sequence[Sequence[float]], tokens: int, spare: int
    ) -> list[int]:
        """Return how many tokens of each draft are verified to see whether they hold now: of most of them
        none, and no more than may be lost."""
        counts = [0] * len(found)
        if not (self._probe_due() or (self._woken and not self._expects)):
            return counts
        most = min(spare, sum([min(len(draft.tokens), _PROBED) for draft in found]))
        allowed = self._thought(tokens + 1) + _PROBE_COST * self._base(tokens)
        left = count_within(allowed, most, lambda number: self._thought(tokens + number))
        for place in sorted(range(len(found)), key=lambda place: -sum(survival[place][:_PROBED])):
            counts[place] = min(len(found[place].tokens), _PROBED, left)
            left -= counts[place]
        return counts

    def by_model(self, asked: Sequence[tuple[Request, Share, int]]) -> list[Draft]:
        """Return drafts of the draft model; see ModelDrafting."""
        assert self.model is not None
        drafts, self._apart = self.model.propose(asked), self.model.spent
        return drafts

    def verifies(self, share: Share, draft: Draft) -> None:
        """Note that a step verifies a draft."""
        self._drafts[share.row] = draft

    def learn(self, request: Request, share: Share, drawn: Sequence[int], kept: int) -> None:
        """Note the tokens that the target drew for a share that verified a draft, and how many of these are
        the request's, which may have ended within the draft."""
        draft = self._drafts.pop(share.row, None)
        if draft is None:
            return
        held, deep = min(len(drawn) - 1, len(draft.tokens)), draft.deep
        self.survival.learn_drawn(draft, drawn)
        if draft.instead_of is not None:
            self.survival.compare(draft.instead_of, drawn)
        if self._probes and held == deep:
            self._plain = self._unasked = _LONG
        if draft.tried:
            self._needed = 1 if held > draft.tried else min(2 * self._needed, _PROBE_EVERY)
        elif held == deep:
            self._whole += 1
        for counts in (self.counts, request.drafts):
            counts.drafts, counts.drafted = counts.drafts + 1, counts.drafted + len(draft.tokens)
            counts.accepted += min(held, kept)
            counts.cut += kept <= held
        self._gained += min(held, kept)

    def stepped(self, plan: Plan, seconds: float) -> None:
        """Note that a step has ended, behind what was learnt of its drafts.

        seconds: that it took by itself. If there was something to do since the step before, the time since
        then counts, but for steps of a draft model.
        """
        now = self._clock()
        since, self._since = self._since, now
        apart, self._apart = self._apart, 0.0
        gained, self._gained = self._gained, 0
        self._drafts.clear()
        if not seconds > 0 or plan.chunks:
            return
        if since is not None:
            seconds = max(seconds, now - since - apart)
        rows, tokens = len(plan.shares), plan.tokens
        self._largest = max(self._largest, tokens)
        self._alike = 0 if tokens > rows else self._alike + 1
        ahead = any(UNKNOWN in share.tokens for share in plan.shares)
        if ahead and self._woken:  # Nothing was begun behind it, since it woke.
            return self.budget.spend(max(seconds / self._base(rows) - 1, 0.0))
        if (ahead or not self._ahead) and self._alike > _MEASURED and self._alike % _MEASURED:
            return self.budget.plain()
        self._thoughts.clear()
        if ahead:
            self._ahead.add(tokens, seconds)
        else:
            self._seconds.add(tokens, seconds)
            # A draft model's first steps are slow, and say nothing of others.
            if not apart or tokens == rows or (self.model is not None and self.model.seconds):
                self.budget.spend((self._at(tokens) + apart) / self._base(rows) - 1 - gained / rows)
        if tokens == rows:
            self.budget.plain()
        elif self._probes and not gained:
            self.rest()

    def idle(self) -> None:
        """Note that there is nothing to do: what passes from now on is not the time of a step."""
        self._since, self._apart = None, 0.0
