"""Decides how a short run behind a long past is attended to in pages, and up to where that pays."""

from collections.abc import Iterable

_MOST_READ = 1 << 18
"""Largest number of keys that a run may read in all its pieces.

For one KV head of 128 in bfloat16 they are 128 MiB.
"""


MOST_PIECES = 4096
"""Most pieces of runs that are attended to together: kernels are compiled for no more."""
_MOST_READ_BY_ROWS = 1 << 16
"""Largest number of keys that the tokens of a draft may read, each by itself."""


def run_tokens(group: int, head_bytes: int) -> int:
    """Return how many tokens a kernel takes together: their query heads are multiplied with the same keys.

    Large heads allow fewer tokens: these and two tiles of K and V must fit in the 99 KiB of shared memory
    that some devices have for a program.

    group: query heads of each KV head.
    head_bytes: bytes of one head of a token.
    """
    return max(min(64, max(16, 16384 // head_bytes)) // group, 1)


def suits_run(tokens: int, stop: int, group: int, head_bytes: int) -> bool:
    """Tell whether a run of so many tokens, which ends at `stop`, should be attended to straight in pages.

    That reads more bytes than gathering the past first and merging later, in fewer launches.
    """
    return -(-tokens // run_tokens(group, head_bytes)) * stop <= _MOST_READ


def suits_rows_together(runs: Iterable[tuple[int, int]]) -> bool:
    """Tell whether runs of a step, of so many tokens which end there, should be attended to as rows: as
    `suits_rows` says of each, and all of them together."""
    read = [tokens * stop for tokens, stop in runs]
    return max(read, default=0) <= _MOST_READ_BY_ROWS and sum(read) <= 2 * _MOST_READ_BY_ROWS


def suits_rows(tokens: int, stop: int) -> bool:
    """Tell whether so many tokens of a sequence, which end at `stop`, should be attended to as rows of their
    own. That reads their past once for each, in the launches of a decode step."""
    return tokens * stop <= _MOST_READ_BY_ROWS
