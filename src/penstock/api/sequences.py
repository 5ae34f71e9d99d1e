"""Hold the outputs of a prompt while they are made: what the engine is asked for, and what has come so
far."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Self

from penstock.api.outputs import Completion, Delta, Output
from penstock.api.text.detokenize import Detokenizer
from penstock.sched.event import Event
from penstock.sched.outlook import Outlook, QueuedRequest
from penstock.step.params import Sampling
from penstock.step.plan import RequestId, TokenLogprob
from penstock.step.request import FinishReason


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A prompt that has been read and checked: everything that the engine is asked for.

    prompt: its text; None for a prompt of token ids.
    tokens: token ids.
    samplings: settings of each output.
    max_tokens: tokens of each output at most; None is as many as there is room for.
    detokenizer: makes a new detokenizer, one for each output.
    priority: the waiting prompt of the lowest number is served first.
    salt: prefixes are shared with prompts of the same salt alone.
    found: tokens whose KV is thought to be there when its turn comes, for forecasts alone.
    lora: name of the LoRA adapter that it is answered with; empty for none.
    """

    prompt: str | None
    tokens: tuple[int, ...]
    samplings: tuple[Sampling, ...]
    max_tokens: int | None
    detokenizer: Callable[[], Detokenizer | None]
    priority: int = 0
    salt: bytes = b""
    found: int = 0
    lora: str = ""

    def adapted(self, lora: str | None) -> Self:
        """Return the same prompt, which is answered with the LoRA adapter of this name, or with none."""
        return self if (lora or "") == self.lora else replace(self, lora=lora or "")

    def salted(self, salt: bytes) -> Self:
        """Return the same prompt, which shares prefixes with prompts of this salt."""
        return self if salt == self.salt else replace(self, salt=salt)

    def queued(self, outlook: Outlook, longest: int) -> list[QueuedRequest]:
        """Return its outputs, as they will wait. Those behind the first find what that computes.

        longest: most tokens of a request.
        """
        length, size = len(self.tokens), outlook.size
        most = self.max_tokens or max(longest - length, 1)
        first = QueuedRequest(max(length - self.found, 1), most, self.priority, length)
        rest = length - (length - 1) // size * size if outlook.shares else length
        return [first, *[replace(first, tokens=rest)] * (len(self.samplings) - 1)]


@dataclass(slots=True)
class OutputSequence:
    """Holds one output while it is made (vLLM: a Sequence).

    deltas: what steps have added and was not taken yet.
    cached: prompt tokens whose KV was found; those that came from host memory, and from disk.
    drafts: tokens that were drafted, and those of them that were accepted.
    """

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
    stop: str = ""
    cached: tuple[int, int, int] = (0, 0, 0)
    drafts: tuple[int, int] = (0, 0)
    embedding: tuple[float, ...] = ()

    def take(self, event: Event) -> bool:
        """Add what a step has computed. Return whether a stop string has just ended the output, which the
        engine does not know."""
        if event.prompt_logprobs:
            self.prompt_logprobs.extend(event.prompt_logprobs)
        if event.embedding:
            self.embedding = event.embedding
        if event.token is None:
            if event.finish is not None:
                self._break_off(event)
            return False
        self.cached = event.cached, event.cached_host, event.cached_disk
        self.drafts = event.drafts
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
                self.finish, self.stop = FinishReason.STOP, self.detokenizer.matched
            elif self.finish is not None:
                text += self.detokenizer.finish()
        self.text.append(text)
        self.deltas.append(
            Delta(
                text,
                (event.token,),
                self.finish,
                self.index,
                (event.logprob,) if event.logprob else (),
                self.stop,
            )
        )
        return stopped

    def _break_off(self, event: Event) -> None:
        """End the output without another token."""
        self.finish, self.error = event.finish, event.fault
        text = self.detokenizer.finish() if self.detokenizer is not None else ""
        self.text.append(text)
        self.deltas.append(Delta(text, (), self.finish, self.index))

    def output(self) -> Output:
        """Return everything up to now. An output that has not ended counts as aborted."""
        logprobs = None if self.sampling.logprobs is None else tuple(self.logprobs)
        return Output(
            self.index,
            "".join(self.text),
            tuple(self.tokens),
            self.finish or FinishReason.ABORT,
            logprobs,
            self.error,
            self.stop,
        )


@dataclass(slots=True)
class SequenceGroup:
    """Holds a prompt and its outputs while they are made (vLLM: a SequenceGroup).

    prompt: its text; None for a prompt of token ids.
    tokens: token ids of the prompt.
    """

    prompt: str | None
    tokens: tuple[int, ...]
    sequences: list[OutputSequence]

    @property
    def done(self) -> bool:
        """Tell whether all outputs have ended."""
        return None not in [sequence.finish for sequence in self.sequences]

    def completion(self) -> Completion:
        """Return the prompt with everything that has come of its outputs up to now."""
        first = self.sequences[0]
        prompt_logprobs = None if first.sampling.prompt_logprobs is None else (None, *first.prompt_logprobs)
        outputs = tuple(sequence.output() for sequence in self.sequences)
        drafted, accepted = (sum(one.drafts[which] for one in self.sequences) for which in (0, 1))
        return Completion(
            self.prompt,
            self.tokens,
            outputs,
            prompt_logprobs,
            *first.cached,
            first.embedding,
            drafted,
            accepted,
        )
