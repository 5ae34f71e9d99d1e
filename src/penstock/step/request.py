"""Says how a request ends."""

from enum import StrEnum


class FinishReason(StrEnum):
    """A FinishReason says why an output has no more tokens."""

    STOP = "stop"
    """An end token or a stop string."""
    LENGTH = "length"
    """max_tokens or the end of the context."""
    ABORT = "abort"
    ERROR = "error"
    """An error: a broken structure, NaN logits, or too little device memory for the smallest step."""
