"""Carries out the steps of what drafts beside the target, and measures them."""

from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import nullcontext
from statistics import median
from time import perf_counter

from penstock.engine.ranks import Ranks, Threads
from penstock.step.plan import MOST_DRAFTED, Plan, Row, Step

_LAST = 5
"""Measurements of which the median is taken."""


class DraftSteps:
    """Carries out the steps of a draft model or a draft head, which drafts lines.

    seconds: time of a step that drafts a token for each request; 0 before one was measured.
    spent: seconds of the last drafts, with what had to be computed before.
    most, trees: see ModelDrafting.
    """

    def __init__(self, ranks: Ranks, step_tokens: int, threads: Threads | None = None) -> None:
        """Draft by steps of these ranks. step_tokens: most tokens of a step. threads: of the CPU that steps
        compute with."""
        self._ranks, self._step_tokens, self._threads = ranks, step_tokens, threads
        self.seconds = self.spent = 0.0
        self.most, self.trees = MOST_DRAFTED, False
        self._took, self._begun = deque[float](maxlen=_LAST), False

    def levels(self, count: int) -> int:
        """Return how many steps a draft of so many tokens takes: one for each."""
        return count

    def begin(self, plan: Plan) -> Step:
        """Begin a step."""
        with nullcontext() if self._threads is None else self._threads.of(plan.tokens):
            return self._ranks.begin(plan)

    def drawn(self, plans: Sequence[Plan], alike: bool) -> dict[Row, list[int]]:
        """Carry out these steps, each of which may begin before the one before has ended. Return what they
        draw, by row. alike: see `took`."""
        began, tokens = perf_counter(), defaultdict[Row, list[int]](list)
        for plan, step in [(plan, self.begin(plan)) for plan in plans]:
            outcome = step.outcome()
            assert not outcome.landed, "transfers that a draft's step reports are lost"
            for share, result in zip(plan.shares, outcome.results, strict=True):
                tokens[share.row] += result.tokens
        self.took(perf_counter() - began, len(plans), alike)
        return tokens

    def took(self, spent: float, steps: int, alike: bool) -> None:
        """Note the seconds of so many steps. alike: whether they say how long others take; they do not where
        most of that was a prompt, nor do the first of all, for which a device prepares much."""
        self.spent, alike, self._begun = spent, alike and self._begun, self._begun or alike
        if alike:
            self._took.append(spent / steps)
            self.seconds = median(self._took)
