"""Holds what is counted since the engine started, as /state tells of it."""

from dataclasses import dataclass
from typing import Self

from penstock.engine.engine import Stats


@dataclass(frozen=True, slots=True)
class CacheState:
    """Counts the prompt tokens since the engine started: computed, and found on a tier."""

    computed: int
    device: int
    host: int
    disk: int


@dataclass(frozen=True, slots=True)
class MissedState:
    """Bounds the attention that policies have left out since the engine started. All are 0 if everything is
    read.

    most: the largest bound on the share of a token's attention, in a head and layer, that was missed.
    worst, mean: of a choice's heads the largest bound and the mean one, on average.
    read: share of the blocks.
    """

    choices: int
    fallbacks: int
    read: float
    most: float
    worst: float
    mean: float


@dataclass(frozen=True, slots=True)
class SpeculationState:
    """Counts drafts since the engine started.

    drafted: tokens of drafts that steps verified. accepted: those of them that became output.
    tokens, passes: of outputs, and passes over the model that gave each output its tokens.
    tokens_a_pass: tokens that such a pass gave to an output, on average: 1 without drafts, 0 before any.
    drafter: what drafts, as boot has chosen it: suffix, self, mtp, or model.
    """

    drafted: int
    accepted: int
    tokens: int
    passes: int
    tokens_a_pass: float
    drafter: str = ""

    @classmethod
    def of(cls, stats: Stats, drafter: str) -> Self:
        """Return what an engine with drafts has counted."""
        _, drafted, accepted = stats.drafts
        passes = stats.output_tokens - accepted + stats.cut
        return cls.summed(drafted, accepted, stats.output_tokens, passes, drafter)

    @classmethod
    def summed(
        cls, drafted: int, accepted: int, tokens: int, passes: int, drafter: str = "", **_: float
    ) -> Self:
        """Return these counts, of one engine or of several."""
        return cls(drafted, accepted, tokens, passes, tokens / passes if passes else 0.0, drafter)
