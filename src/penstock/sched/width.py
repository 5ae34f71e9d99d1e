"""Narrows steps after one that was too large for the memory, and widens them again."""

from penstock.step.plan import Plan, ShareKind

_SMOOTH, _SMOOTHEST = 8, 4096
"""Steps after which twice as much is tried again: at first, and at most. Each failure doubles them."""


class StepWidth:
    """Holds the most tokens and requests of a step: the limits, or fewer for a while."""

    def __init__(self, tokens: int, rows: int) -> None:
        self._most = self.tokens, self.rows = tokens, rows
        self._smooth, self._wait = 0, 0
        """Steps since it was narrowed, and before more is tried."""

    @property
    def narrowed(self) -> tuple[int, int] | None:
        """Return the most tokens and requests of a step if these are below the limits, else None."""
        return None if (self.tokens, self.rows) == self._most else (self.tokens, self.rows)

    def narrow(self, plan: Plan, least: int) -> bool:
        """Halve the width, since the step of this plan was too large.

        After some steps that succeed the width is doubled again, each time later if that fails.

        Returns False if it cannot be smaller: the plan is of one request, with at most `least` tokens, and
        without a draft.
        """
        if len(plan.shares) == 1 and plan.tokens <= least and plan.shares[0].kind is not ShareKind.VERIFY:
            return False
        self.tokens, self.rows = max(plan.tokens // 2, least), max(len(plan.shares) // 2, 1)
        self._smooth, self._wait = 0, min(max(2 * self._wait, _SMOOTH), _SMOOTHEST)
        return True

    def widen(self) -> None:
        """Note that a step has succeeded."""
        self._smooth += 1
        if self._smooth >= self._wait:
            self._smooth = 0
            self.tokens, self.rows = min(2 * self.tokens, self._most[0]), min(2 * self.rows, self._most[1])
            if self.narrowed is None:
                self._wait = 0
