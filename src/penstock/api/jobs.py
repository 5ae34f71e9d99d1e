"""Prompts at work: what has come of each of their outputs so far."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from penstock.api.detokenize import Detokenizer
from penstock.api.outputs import Completion, Delta, Output
from penstock.sched.scheduler import Event
from penstock.step.params import Sampling
from penstock.step.plan import RequestId, TokenLogprob
from penstock.step.request import FinishReason


@dataclass(frozen=True, slots=True)
class Ready:
    """A prompt that has been read and checked, with the settings of each of its outputs: all that the engine
    is to be told."""

    prompt: str | None
    tokens: tuple[int, ...]
    samplings: tuple[Sampling, ...]
    max_tokens: int | None
    detokenizer: Callable[[], Detokenizer | None]
    """A new one for each output."""
    priority: int = 0
    """Of those that wait the one with the least is served first."""
    salt: bytes = b""
    """Prefixes are shared with prompts of the same salt alone."""

    def salted(self, salt: bytes) -> "Ready":
        """The same, sharing with those of that salt."""
        return replace(self, salt=salt)


@dataclass(slots=True)
class Sequel:
    """One output in the making."""

    index: int
    request: RequestId
    sampling: Sampling
    detokenizer: Detokenizer | None
    deltas: deque[Delta] = field(default_factory=deque)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    finish: FinishReason | None = None
    error: str = ""
    cached: tuple[int, int, int] = (0, 0, 0)
    """Prompt tokens that were found; those that came from the host, and from disk."""

    def take(self, event: Event) -> bool:
        """Add what happened in a step. True if a stop string has just ended the output, which the engine does
        not know."""
        if event.prompt_logprobs:
            self.prompt_logprobs.extend(event.prompt_logprobs)
        if event.token is None:
            if event.finish is not None:
                self._break_off(event)
            return False
        if event.cached:
            self.cached = event.cached, event.cached_host, event.cached_disk
        self.tokens.append(event.token)
        if event.logprob is not None:
            self.logprobs.append(event.logprob)
        self.finish = event.finish
        text, stopped = "", False
        if self.detokenizer is not None:
            # The token that ends an output is no part of its text.
            ended = self.finish in (FinishReason.STOP, FinishReason.ERROR)
            text = "" if ended else self.detokenizer.push([event.token])
            stopped = self.detokenizer.stopped and not ended
            if stopped:
                self.finish = FinishReason.STOP
            elif self.finish is not None:
                text += self.detokenizer.finish()
        self.text.append(text)
        self.deltas.append(
            Delta(text, (event.token,), self.finish, self.index, (event.logprob,) if event.logprob else ())
        )
        return stopped

    def _break_off(self, event: Event) -> None:
        """The output ends without another token."""
        self.finish, self.error = event.finish, event.fault
        text = self.detokenizer.finish() if self.detokenizer is not None else ""
        self.text.append(text)
        self.deltas.append(Delta(text, (), self.finish, self.index))

    def output(self) -> Output:
        logprobs = None if self.sampling.logprobs is None else tuple(self.logprobs)
        return Output(
            self.index,
            "".join(self.text),
            tuple(self.tokens),
            self.finish or FinishReason.ABORT,
            logprobs,
            self.error,
        )


@dataclass(slots=True)
class Job:
    """A prompt and its outputs in the making."""

    prompt: str | None
    tokens: tuple[int, ...]
    sequences: list[Sequel]

    @property
    def done(self) -> bool:
        return all(sequence.finish is not None for sequence in self.sequences)

    def completion(self) -> Completion:
        first = self.sequences[0]
        prompt_logprobs = None if first.sampling.prompt_logprobs is None else (None, *first.prompt_logprobs)
        outputs = tuple(sequence.output() for sequence in self.sequences)
        return Completion(self.prompt, self.tokens, outputs, prompt_logprobs, *first.cached)
