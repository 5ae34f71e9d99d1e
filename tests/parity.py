"""How far an engine's completions lie from transformers' greedy decoding, as numbers: for GPU tests and for
the table of families."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

import tiny
from penstock import Completion, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=tiny.OUTPUT, ignore_eos=True, logprobs=-1)
WITH_PROMPT = SamplingParams(
    temperature=0, max_tokens=tiny.OUTPUT, ignore_eos=True, logprobs=-1, prompt_logprobs=-1
)


@dataclass(frozen=True)
class Measured:
    """Over all prompts. Errors are of log-probabilities, over the largest log-probability's size."""

    equal_tokens: int
    """Output tokens up to the first that differs."""
    clear_tokens: int
    """Output tokens up to the first that transformers itself chose by a hair."""
    positions: int
    """How many distributions were compared: those whose inputs are equal."""
    worst: float
    typical: float
    """The median over the positions of each position's mean error: experts chosen otherwise, by a hair, do
    not count."""

    @property
    def exact(self) -> bool:
        return self.equal_tokens >= self.clear_tokens and self.worst < tiny.LIMIT


def measure(completions: Sequence[Completion], references: Sequence[tiny.Reference]) -> Measured:
    equal = clear = positions = 0
    worst = 0.0
    errors = []
    for completion, reference in zip(completions, references, strict=True):
        assert list(completion.prompt_tokens) == reference.prompt
        assert completion.logprobs is not None
        assert len(completion.tokens) == len(reference.tokens)
        alike = _first(torch.tensor(completion.tokens) != torch.tensor(reference.tokens))
        hair = _first(tiny.leads(reference) < tiny.CLOSE)
        equal += min(alike, hair)
        clear += hair
        rows = [tiny.dense(entry) for entry in (completion.prompt_logprobs or ())[1:] if entry is not None]
        expected = reference.logprobs if rows else reference.after_prompt
        rows += [tiny.dense(entry) for entry in completion.logprobs[: alike + 1]]
        got = torch.stack(rows)
        expected = expected[: len(got)]
        worst = max(worst, tiny.distance(got, expected))
        errors.append((got - expected).abs().mean(-1) / expected.abs().max())
        positions += len(got)
    return Measured(equal, clear, positions, worst, float(torch.cat(errors).median()))


def _first(marks: torch.Tensor) -> int:
    """Index of the first true one, or how many there are."""
    found = marks.nonzero()
    return int(found[0]) if len(found) else len(marks)


def prompt_error(references: Sequence[tiny.Reference], exact: Sequence[tiny.Reference]) -> float:
    """The typical error of transformers itself, in another precision, over the positions of the prompts."""
    errors = []
    for got, expected in zip(references, exact, strict=True):
        prompt = slice(len(got.prompt))
        errors.append(
            (got.logprobs[prompt] - expected.logprobs[prompt]).abs().mean(-1) / expected.logprobs.abs().max()
        )
    return float(torch.cat(errors).median())
