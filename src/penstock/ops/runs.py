"""Short runs behind long pasts: how many tokens a kernel takes together, and how far that pays."""

_MOST_READ = 1 << 18
"""Keys that a run may read with all its pieces: of each KV head of 128 in bfloat16, 128 MiB."""


def run_tokens(group: int, head_bytes: int) -> int:
    """Return how many tokens' query heads a kernel multiplies with the same keys at a time.

    Fewer of large heads: these and two tiles of K and V have to fit where a device has 99 KiB of shared
    memory for a program.

    group: query heads of each KV head.
    head_bytes: bytes of one head of a token.
    """
    return max(min(64, max(16, 16384 // head_bytes)) // group, 1)


def suits_run(tokens: int, stop: int, group: int, head_bytes: int) -> bool:
    """Tell whether a run of so many tokens, which ends at `stop`, is attended to straight in pages.

    That reads more than a call that gathers the past first and merges it later, in fewer launches.
    """
    return -(-tokens // run_tokens(group, head_bytes)) * stop <= _MOST_READ
