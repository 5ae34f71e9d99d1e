"""What one step must do and what came of it: the only two things the scheduler and the workers say to each other."""

from dataclasses import dataclass
from typing import NewType

from penstock.step.params import Sampling

RequestId = NewType("RequestId", int)
BlockId = NewType("BlockId", int)
"""Index of a KV block in the pool of the device tier."""
Row = NewType("Row", int)
"""Index of a running request in the runner's tables; given by the scheduler, free again when the request leaves."""


@dataclass(frozen=True, slots=True)
class Admission:
    """A request takes a row. `output` is not empty when it comes back after a preemption."""

    row: Row
    sampling: Sampling
    prompt: tuple[int, ...]
    output: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Share:
    """One request's part of a step: compute `tokens` at positions [start, start + len(tokens)).

    The row's block table is extended at index `first_new_block` by `new_blocks`; after that it covers every position up to
    the share's end. With `sample`, the last position yields a token.
    """

    row: Row
    start: int
    tokens: tuple[int, ...]
    first_new_block: int
    new_blocks: tuple[BlockId, ...]
    sample: bool
    prompt_length: int
    next_prompt_tokens: tuple[int, ...] = ()
    """Prompt tokens that follow each of this share's positions, where prompt log-probabilities were asked for."""

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Plan:
    """A step. Admissions come first; shares that compute one token of a running request stand before longer ones."""

    admissions: tuple[Admission, ...]
    shares: tuple[Share, ...]

    @property
    def tokens(self) -> int:
        return sum(len(share.tokens) for share in self.shares)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log-probability, and the likeliest tokens at its position, best first."""

    token: int
    logprob: float
    rank: int
    """1 for the likeliest token."""
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Result:
    """What one share yielded: a token if it was to sample, log-probabilities if they were asked for."""

    token: int | None = None
    logprob: TokenLogprob | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results in the order of the plan's shares."""

    results: tuple[Result, ...]
