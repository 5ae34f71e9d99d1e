"""Fits costs to measured times: non-negative least squares of relative errors."""

from collections.abc import Sequence

import numpy as np

NEAR, ROUNDS = 0.03, 12
"""Relative errors up to which rows of a fit count in full, and how often it is made again with new
weights."""
UNKNOWN = 1e18
"""Operations/s that stand for a cost that the samples did not show."""


def rate_of(seconds: float, fallback: float) -> float:
    """Return a rate by the seconds that one takes; the fallback where it seemed to take none."""
    return 1 / seconds if seconds > 0 else fallback


def least_squares(
    table: Sequence[Sequence[float]], seconds: Sequence[float], scale: Sequence[float] | None = None
) -> list[float]:
    """Return non-negative coefficients with the least relative error over all rows.

    Columns that would be negative are left out, worst first. Rows that remain far off count less (Huber's
    weights): something else held up those.
    """
    weight = np.asarray(seconds if scale is None else scale)
    rows, wanted = np.asarray(table) / weight[:, None], np.asarray(seconds) / weight
    size = np.abs(rows).max(axis=0)
    used, trust = [column for column in range(rows.shape[1]) if size[column] > 0], np.ones(len(wanted))
    result = np.zeros(rows.shape[1])
    for _ in range(ROUNDS):
        while used:
            found, *_ = np.linalg.lstsq(
                rows[:, used] / size[used] * trust[:, None], wanted * trust, rcond=None
            )
            if found.min() >= 0:
                break
            used.pop(int(found.argmin()))
        result[:] = 0.0
        if used:
            result[used] = found / size[used]
        apart = np.abs(rows @ result - wanted)
        trust = np.sqrt(np.minimum(1.0, NEAR / np.maximum(apart, 1e-12)))
    return [float(value) for value in result]
