"""How a request ends."""

from enum import StrEnum


class FinishReason(StrEnum):
    """The reason why an output has no more tokens."""

    STOP = "stop"
    """An end token or a stop string."""
    LENGTH = "length"
    """max_tokens or the end of the context."""
    ABORT = "abort"
    ERROR = "error"
    """Its structure could not be followed any further, the model's logits were not numbers, or the device has
    too little memory for its smallest step: it is not what was asked for."""
