"""Defines the answers of the API, field by field. Nothing reads them; the API's description is made from
them."""

from typing import Generic, Literal, TypeVar

from msgspec import UNSET, Struct, UnsetType

FinishReason = Literal["stop", "length", "tool_calls", "error"]
T = TypeVar("T")
U = TypeVar("U")


class AnswerObject(Struct, forbid_unknown_fields=True, kw_only=True):
    """Describes an object of an answer. It has no other fields."""


class Fault(AnswerObject):
    """Describes an error, as OpenAI's clients read it."""

    message: str
    type: Literal[
        "invalid_request_error", "authentication_error", "rate_limit_error", "timeout_error", "server_error"
    ]
    param: str | None
    """The field that is at fault."""
    code: str | None


class Refusal(AnswerObject):
    """Says what is wrong: the body of a response that is an error, and the last event of a stream that has
    failed."""

    error: Fault


class _Outputs(AnswerObject, Generic[T, U]):
    """Holds outputs, or what is added to them. T: what kind of object it is. U: its choices."""

    id: str
    object: T
    created: int
    model: str
    choices: list[U]


class _OutputChoice(AnswerObject, Generic[T, U]):
    """Holds an output, or what is added to it. T: log-probabilities. U: why it has ended."""

    index: int
    logprobs: T | None
    finish_reason: U


class PromptTokensDetails(AnswerObject):
    """Counts the tokens of prompts that were found in the cache."""

    cached_tokens: int


class Usage(AnswerObject):
    """Counts the tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class LogprobEntry(AnswerObject):
    """Gives the log-probability of a token."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(LogprobEntry):
    """Gives the log-probability of a token, and those of the likeliest in its place."""

    top_logprobs: list[LogprobEntry]


class ChatLogprobs(AnswerObject):
    """Gives the log-probabilities of an answer's tokens."""

    content: list[ChatTokenLogprob]
    refusal: None


class Function(AnswerObject):
    """Names a function that is called."""

    name: str
    arguments: str
    """A JSON object."""


class ToolCall(AnswerObject):
    """Calls a tool."""

    id: str
    type: Literal["function"]
    function: Function


class ChatMessage(AnswerObject):
    """Answers a conversation."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class PromptTokenLogprob(AnswerObject):
    """Gives the log-probability of a token in a prompt, and its place among all."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptTokenLogprob] | None]
"""Log-probabilities of a prompt's tokens by their ids, each beside the likeliest in its place. The first has
none."""


class ChatChoice(_OutputChoice[ChatLogprobs, FinishReason]):
    """Holds one of the answers to a conversation."""

    message: ChatMessage
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(_Outputs[Literal["chat.completion"], ChatChoice]):
    """Holds the answers to a conversation."""

    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class FunctionDelta(AnswerObject):
    """Adds to a function that is called."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(AnswerObject):
    """Adds to a call of a tool. Its id, type and the function's name come once, with the first."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(AnswerObject):
    """Adds to an answer to a conversation."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(_OutputChoice[ChatLogprobs, FinishReason | None]):
    """Adds to one of the answers to a conversation."""

    delta: ChatDelta
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(_Outputs[Literal["chat.completion.chunk"], ChatChunkChoice]):
    """Holds the data of an event of a chat that is streamed."""

    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionLogprobs(AnswerObject):
    """Gives the log-probabilities of a continuation's tokens, and with `echo` of the prompt's, of which the
    first has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(_OutputChoice[CompletionLogprobs, FinishReason]):
    """Holds one of the continuations of texts."""

    text: str
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class CompletionResponse(_Outputs[Literal["text_completion"], CompletionChoice]):
    """Holds the continuations of texts."""

    usage: Usage


class CompletionChunkChoice(_OutputChoice[CompletionLogprobs, FinishReason | None]):
    """Adds to one of the continuations of texts."""

    text: str
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionChunk(_Outputs[Literal["text_completion"], CompletionChunkChoice]):
    """Holds the data of an event of a completion that is streamed."""

    usage: Usage | UnsetType | None = UNSET


class ModelCard(AnswerObject):
    """Describes a model, as clients ask for it. parent: of a LoRA adapter, the model that it is for."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    parent: str | UnsetType = UNSET
    state: Literal["unloaded", "loading", "loaded", "unloading"] | UnsetType = UNSET
    """Told where models are loaded at their first use."""
    fault: str | UnsetType = UNSET
    """Says why its last load has failed, or its engine. A request may try again."""


class ModelList(AnswerObject):
    """Lists the models by their names."""

    object: Literal["list"]
    data: list[ModelCard]


class TokenizeResponse(AnswerObject):
    """Lists the tokens of a text or a conversation."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class Text(AnswerObject):
    """Gives the text of tokens."""

    prompt: str


class ClearedCache(AnswerObject):
    """Counts the blocks of the prefix cache that were given up."""

    cleared_blocks: int


class SleepAnswer(AnswerObject):
    """Tells whether the model is asleep, and of one that was just put to sleep where its weights are."""

    is_sleeping: bool
    level: Literal[1, 2] | UnsetType = UNSET
    weights: Literal["host memory", "page cache", "disk"] | UnsetType = UNSET


class Status(AnswerObject):
    """Gives the status of a server."""

    status: Literal["alive", "ready", "loading", "closing", "asleep", "waiting for a replica"]
