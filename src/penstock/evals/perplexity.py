"""Measures how well a model predicts a text: its log-perplexity, in nats a token.

The text is one run of tokens, with the special tokens that the tokenizer puts around a text. It is read in
windows of equal length, each `stride` tokens behind the one before, the last one shorter. A token counts
once, in the first window that has it; the first token of the text does not. So windows overlap by at least a
token, and every token behind the first window has at least `length - stride` tokens before it.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import exp, inf, isnan, log, nan
from time import perf_counter

from penstock.api.llm import LLM
from penstock.arch.formats.recipe import name_of
from penstock.base.errors import CheckpointError, RequestError
from penstock.base.report import JsonLine
from penstock.base.units import counted
from penstock.step.params import SamplingParams
from penstock.step.request import FinishReason

LENGTH = 2048
"""Tokens of a window where no other number is asked for, as far as the model has room for them."""
_AT_ONCE = 32
"""Most windows that are given to the engine at a time: one first, then twice as many each time, so that
something is told after the first."""


_LARGEST = log(sys.float_info.max)
"""The logarithm of the largest number, 709.78."""


@dataclass(frozen=True, slots=True)
class PerplexityWork:
    """Says what is measured.

    text: the text; source: its name.
    length: tokens of a window; None is LENGTH, or what the model has room for.
    stride: tokens from one window to the next; None is one less than the length.
    tokens: the most tokens of the text that are read; None is all.
    """

    text: str
    source: str
    length: int | None = None
    stride: int | None = None
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class PerplexityReport(JsonLine):
    """Holds a text's log-perplexity under a model.

    format: the format of weights of few bits; empty for dense ones.
    tokens: those that count. text_bytes: of the text that was read, in UTF-8.
    log_perplexity: mean negative log-probability of a token, in nats.
    perplexity: its exponential; infinite where no number is so large.
    bits_per_byte: the same for a byte of the text, in bits, which models with different tokenizers share.
    """

    eval: str
    model: str
    text: str
    dtype: str
    format: str
    device: str
    length: int
    stride: int
    tokens: int
    text_bytes: int
    log_perplexity: float
    perplexity: float
    bits_per_byte: float
    seconds: float

    def __str__(self) -> str:
        weights = f"{self.format} weights, {self.dtype}" if self.format else self.dtype
        return (
            f"{self.model}, {weights} on {self.device}: log-perplexity {self.log_perplexity:.4f} a token "
            f"(perplexity {self.perplexity:.4g}, {self.bits_per_byte:.4f} bits a byte)\n"
            f"{self.tokens:,} tokens of {self.text}, in windows of {self.length:,} every {self.stride:,}, "
            f"in {self.seconds:,.1f} s"
        )


@dataclass(frozen=True, slots=True)
class TextWindow:
    """A text window is the tokens `[start, stop)` of a text. Those from `counted` on count."""

    start: int
    stop: int
    counted: int


def windows(tokens: int, length: int, stride: int) -> Iterator[TextWindow]:
    """Yield the windows of a text of so many tokens. Every token but the first counts in one of them."""
    counted = 1
    for start in range(0, tokens, stride):
        stop = min(start + length, tokens)
        yield TextWindow(start, stop, counted)
        if stop == tokens:
            return
        counted = stop


def perplexity(llm: LLM, work: PerplexityWork, model: str, tell: Callable[[str], None]) -> PerplexityReport:
    """Return the log-perplexity of a text. Raises RequestError for a text of fewer than two tokens, windows
    that model and memory have no room for, and strides beyond the window; CheckpointError for logits that are
    not numbers.

    model: its name in the report.
    tell: called with how far it is.
    """
    room = llm.limits.max_model_len - 1
    length = work.length or min(LENGTH, room)
    if not 2 <= length <= room:
        raise RequestError(
            f"windows of {length:,} tokens were asked for; model and memory have room for 2 to {room:,}; "
            "give another --length"
        )
    stride = work.stride or length - 1
    if stride >= length:
        raise RequestError(
            f"a stride of {stride:,} leaves out what windows of {length:,} tokens begin with; give a "
            f"--stride of at most {length - 1:,}"
        )
    tokens = llm.encode(work.text)[: work.tokens]
    if len(tokens) < 2:
        raise RequestError(f"{work.source} has {counted(len(tokens), 'token')}; give a text of at least two")
    begin, loss, at_once = perf_counter(), 0.0, 1
    every = windows(len(tokens), length, stride)
    while some := list(islice(every, at_once)):
        loss += _loss(llm, tokens, some)
        if isnan(loss):
            raise CheckpointError(
                f"the model's logits are not numbers (NaN) before token {some[-1].stop:,} of {work.source}; "
                "try another --dtype, or fetch the model again"
            )
        mean = loss / (some[-1].stop - 1)
        tell(f"{some[-1].stop:,} of {len(tokens):,} tokens: log-perplexity {mean:.4f}")
        at_once = min(2 * at_once, _AT_ONCE)
    mean = loss / (len(tokens) - 1)
    size = len((work.text if work.tokens is None else llm.decode(tokens)).encode())
    return PerplexityReport(
        eval="perplexity",
        model=model,
        text=work.source,
        dtype=llm.dtype,
        format=name_of(llm.spec.format),
        device=llm.device,
        length=length,
        stride=stride,
        tokens=len(tokens) - 1,
        text_bytes=size,
        log_perplexity=mean,
        perplexity=exp(mean) if mean < _LARGEST else inf,
        bits_per_byte=loss / log(2) / size if size else 0.0,
        seconds=perf_counter() - begin,
    )


def _loss(llm: LLM, tokens: Sequence[int], some: Sequence[TextWindow]) -> float:
    """Return the sum of the negative log-probabilities of the tokens that count in some windows.

    It is NaN if logits are not numbers.
    """
    prompts = [list(tokens[one.start : one.stop]) for one in some]
    found = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))
    loss = 0.0
    for one, completion in zip(some, found, strict=True):
        if completion.finish_reason is FinishReason.ERROR:
            return nan
        scores = completion.prompt_logprobs or ()
        loss -= sum(score.logprob for score in scores[one.counted - one.start :] if score is not None)
    return loss
