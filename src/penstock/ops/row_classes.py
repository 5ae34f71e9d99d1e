"""Divides steps of few rows into classes, by which the rates of a CPU that computes beside a device are kept
apart. Nothing here reaches torch."""

MOST_TOKENS = 16
"""Tokens of a step up to which the CPU takes experts: with more the arithmetic takes longer than reading."""
CLASSES = MOST_TOKENS.bit_length()
"""Classes of tokens, for which rates are kept apart: 1, 2, up to 4, up to 8, up to 16."""


def class_of(tokens: int) -> int:
    """Return the class of so many tokens."""
    return (tokens - 1).bit_length()
