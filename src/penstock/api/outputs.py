"""Give a caller what was generated: completions, and the pieces of one that is still being made."""

from dataclasses import dataclass

from penstock.step.plan import TokenLogprob
from penstock.step.record import record
from penstock.step.request import FinishReason


@dataclass(frozen=True, slots=True)
class Output:
    """Holds one continuation of a prompt.

    tokens: includes the token that ended it.
    text: has neither that token nor special tokens.
    """

    index: int
    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] | None = None
    """One for each token, where they were asked for."""
    error: str = ""
    """The reason for which it ended early, where the finish reason is `error` and that is known."""
    stop: str = ""
    """The stop string that has ended it, if one has (vLLM: stop_reason)."""


@dataclass(frozen=True, slots=True)
class Completion:
    """Holds a prompt and its continuations, as many as `SamplingParams.n`. The shortcuts are those of the
    first."""

    prompt: str | None
    """The text that was given, or rendered from a chat; None for a prompt of tokens."""
    prompt_tokens: tuple[int, ...]
    outputs: tuple[Output, ...]
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """One for each prompt token, None for the first, where they were asked for."""
    cached_tokens: int = 0
    """Prompt tokens whose KV was found instead of computed."""
    cached_host: int = 0
    cached_disk: int = 0
    """Those of them that came from host memory, and from disk."""
    embedding: tuple[float, ...] = ()
    """The hidden state behind the prompt, where it was asked for; see `Embedding`."""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    """Tokens that were drafted for all outputs, and those of them that the model drew: see
    `Config.speculate`."""

    @property
    def text(self) -> str:
        """Return the text of the first output."""
        return self.outputs[0].text

    @property
    def tokens(self) -> tuple[int, ...]:
        """Return the tokens of the first output."""
        return self.outputs[0].tokens

    @property
    def finish_reason(self) -> FinishReason:
        """Return the reason for which the first output ended."""
        return self.outputs[0].finish_reason

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        """Return the log-probabilities of the first output's tokens, where they were asked for."""
        return self.outputs[0].logprobs


@dataclass(frozen=True, slots=True)
class Embedding:
    """Holds the embedding of a prompt (vLLM: EmbeddingRequestOutput).

    prompt: the text that was given, or rendered from a chat; None for a prompt of tokens.
    embedding: numbers of length 1 together where the checkpoint normalises them.
    """

    prompt: str | None
    prompt_tokens: tuple[int, ...]
    embedding: tuple[float, ...]
    cached_tokens: int = 0
    """Prompt tokens whose KV was found instead of computed."""


@dataclass(frozen=True, slots=True)
class Score:
    """Holds how well a document answers a query (vLLM: ScoringRequestOutput).

    score: from 0 to 1 where the checkpoint's head ends in a sigmoid, the cosine where it makes embeddings.
    prompt_tokens: of both.
    """

    query: str
    document: str
    score: float
    prompt_tokens: tuple[int, ...]
    cached_tokens: int = 0
    """Prompt tokens whose KV was found instead of computed."""


@record(frozen=True, slots=True)
class Delta:
    """Holds a piece that a step has added to output `index`: tokens, the text that became certain, and in the
    last piece the reason for which the output ended, and the stop string that has ended it, if one has."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None = None
    index: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    stop: str = ""
