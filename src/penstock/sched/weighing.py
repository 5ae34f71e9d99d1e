"""Weighs drafts by what steps take."""

from bisect import bisect_left
from collections.abc import Callable, Sequence

_LEAST = 0.01
"""Probability below which a token is not worth looking at."""


def best_counts(
    survival: Sequence[Sequence[float]], spare: int, least: float, seconds: Callable[[int], float]
) -> list[int]:
    """Return how many tokens of each draft give the most tokens a second, and more than `least`; none where
    nothing does. A token's survival is at most that of the one before it, so the likeliest of all are always
    the first of each draft.

    survival: of each draft. spare: most tokens of all of them. seconds: of the step by their number.
    """
    every = sorted(
        [(-chance, place) for place, some in enumerate(survival) for chance in some if chance >= _LEAST]
    )[:spare]
    counts, best, gained = [0] * len(survival), 0, float(len(survival))
    for number, (chance, _) in enumerate(every, 1):
        gained -= chance
        if (rate := gained / seconds(number)) > least:
            best, least = number, rate
    for _, place in every[:best]:
        counts[place] += 1
    return counts


def tokens_a_second(survival: Sequence[Sequence[float]], counts: Sequence[int], seconds: float) -> float:
    """Return the tokens a second that are expected of a step that verifies so many tokens of each request's
    draft. survival: of these drafts. seconds: of the step, and for making the drafts."""
    return sum([1 + sum(some[:count]) for some, count in zip(survival, counts, strict=True)]) / seconds


def count_within(allowed: float, most: int, seconds: Callable[[int], float]) -> int:
    """Return the largest count up to `most` that takes at most the allowed seconds; more never take less."""
    return bisect_left(range(1, most + 1), True, key=lambda count: seconds(count) > allowed)
