"""Makes prompts of a recorded workload: each hash of a trace becomes a block of tokens, always the same and
unlike any other's, so prompts begin alike where they did when the trace was recorded.

A block of the trace may be of fewer tokens here, and outputs are shorter by as much.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from random import Random
from typing import Self

import numpy as np

from penstock.base.errors import ConfigError, RequestError
from penstock.bench.traces.workloads import TraceRequest

TRACE_BLOCK = 512
"""Tokens of a block when the trace was recorded."""


@dataclass(frozen=True, slots=True)
class ReplayScale:
    """Settings that turn a trace into requests of a model.

    path: the trace's file.
    block_tokens: tokens for one of the trace's blocks. None is as many as the model has positions for, a
        power of two.
    output: tokens of each answer. None is as many as were recorded, in proportion.
    speed: how many times as fast as they were recorded requests come. None is as fast as they are served.
    """

    path: Path
    block_tokens: int | None = None
    output: int | None = None
    speed: float | None = None


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """Holds the lengths of a request. prompt, output: tokens. at: seconds after the first request."""

    keys: Sequence[int]
    prompt: int
    output: int
    at: float

    @classmethod
    def of(cls, request: TraceRequest, block: int, output: int | None, start: float) -> Self:
        """Scale a request to `block` tokens for a block of the trace, a part of one rounded up."""
        blocks = len(request.keys)
        length = blocks * TRACE_BLOCK if request.input_length is None else request.input_length
        last = length - (blocks - 1) * TRACE_BLOCK
        answered = output or ceil((request.output_length or 1) * block / TRACE_BLOCK)
        return cls(
            request.keys,
            (blocks - 1) * block + ceil(last * block / TRACE_BLOCK),
            answered,
            ((request.timestamp or 0.0) - start) / 1e3,
        )


@dataclass(frozen=True, slots=True)
class Workload:
    """Holds the requests of a trace, and makes their prompts. Prompts are made when they are needed, since
    all at once can be more than memory holds.

    ordinals: of each hash, its number in order of first use.
    digits: how many tokens of a block tell it from all others: its ordinal to the base of the vocabulary.
    """

    requests: Sequence[ReplayRequest]
    block_tokens: int
    vocab: int
    ordinals: Mapping[int, int]
    digits: int

    @classmethod
    def of(
        cls, scale: ReplayScale, recorded: Sequence[TraceRequest], longest: int, vocab: int, name: str
    ) -> Self:
        """Scale a trace for the model `name` with `longest` positions and `vocab` tokens. Raises
        ConfigError where the trace lacks what is needed, RequestError where a request is too long."""
        for number, request in enumerate(recorded, 1):
            _complete(scale, request, number)
        start, sizes = (
            recorded[0].timestamp or 0.0,
            [2**power for power in reversed(range(TRACE_BLOCK.bit_length()))],
        )
        for block in [scale.block_tokens] if scale.block_tokens else sizes:
            asks = [ReplayRequest.of(request, block, scale.output, start) for request in recorded]
            needed = max(ask.prompt + ask.output for ask in asks)
            if needed <= longest:
                break
        else:
            raise RequestError(
                f"with {block} tokens for a block of the trace the longest of {len(asks):,} requests has "
                f"{needed:,} tokens of prompt and output, but {name} has {longest:,} positions; lower "
                "--requests, --output or --block-tokens"
            )
        ordinals = {
            key: number for number, key in enumerate(dict.fromkeys(key for ask in asks for key in ask.keys))
        }
        digits = 1
        while vocab**digits < len(ordinals):
            digits += 1
        if digits > block:
            raise ConfigError(
                f"{len(ordinals):,} blocks cannot all differ with {block} tokens of a vocabulary of "
                f"{vocab:,} each; raise --block-tokens, or lower --requests"
            )
        return cls(asks, block, vocab, ordinals, digits)

    @property
    def longest(self) -> int:
        """Return the tokens of the longest request, prompt and output."""
        return max(ask.prompt + ask.output for ask in self.requests)

    @property
    def prompt_tokens(self) -> int:
        """Return the tokens of all prompts."""
        return sum(ask.prompt for ask in self.requests)

    @property
    def known_tokens(self) -> int:
        """Return the tokens of prompts that begin as an earlier one did: what a cache could have at most."""
        seen, known = set[int](), 0
        for ask in self.requests:
            depth = next((depth for depth, key in enumerate(ask.keys) if key not in seen), len(ask.keys))
            known += min(depth * self.block_tokens, ask.prompt)
            seen.update(ask.keys)
        return known

    def prompt(self, ask: ReplayRequest) -> list[int]:
        """Return the tokens of a request's prompt."""
        return [token for key in ask.keys for token in self._block(key)][: ask.prompt]

    def _block(self, key: int) -> list[int]:
        number = self.ordinals[key]
        drawn = np.frombuffer(Random(number).randbytes(4 * self.block_tokens), "<u4")
        tokens: list[int] = (drawn % self.vocab).tolist()
        for place in range(self.digits):
            number, tokens[place] = divmod(number, self.vocab)
        return tokens


def _complete(scale: ReplayScale, request: TraceRequest, number: int) -> None:
    """Raise ConfigError where the trace does not say what is needed of a request."""
    where, blocks, length = f"request {number} of {scale.path}", len(request.keys), request.input_length
    if length is not None and not 0 <= blocks * TRACE_BLOCK - length < TRACE_BLOCK:
        raise ConfigError(
            f"{where} has {length:,} tokens of prompt in {blocks:,} blocks, which are not blocks of "
            f"{TRACE_BLOCK} tokens; give a trace with blocks of this size"
        )
    if scale.output is None and request.output_length is None:
        raise ConfigError(f"{where} has no output_length; give --output, the tokens of each answer")
    if scale.speed is not None and request.timestamp is None:
        raise ConfigError(f"{where} has no timestamp; leave --speed out")
