"""Short runs behind long pasts: how many of their tokens are attended to at a time, and how far that is the
way to do it."""

_MOST_READ = 1 << 18
"""Keys that a run may read with all its pieces: of each KV head of 128 in bfloat16, 128 MiB."""


def run_tokens(group: int, head_bytes: int) -> int:
    """Tokens whose query heads, `group` for each KV head, are multiplied with the same keys at a time: of
    large heads fewer, since these and two tiles of keys and values together have to fit where a device has 99
    KiB for a program."""
    return max(min(64, max(16, 16384 // head_bytes)) // group, 1)


def suits_run(tokens: int, stop: int, group: int, head_bytes: int) -> bool:
    """Whether a run of so many tokens, which ends at `stop`, is to be attended to straight in pages: that
    reads more than a call that gathers a past first and merges it later, in fewer launches."""
    return -(-tokens // run_tokens(group, head_bytes)) * stop <= _MOST_READ
