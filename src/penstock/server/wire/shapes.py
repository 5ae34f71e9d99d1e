"""What answers are, field by field: nothing reads them here, and the API's description is made from them."""

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

FinishReason = Literal["stop", "length", "tool_calls", "error"]


class Shape(Struct, forbid_unknown_fields=True, kw_only=True):
    """Nothing else is in an answer."""


class Fault(Shape):
    message: str
    type: Literal[
        "invalid_request_error", "authentication_error", "rate_limit_error", "timeout_error", "server_error"
    ]
    param: str | None
    """The field that is at fault."""
    code: str | None


class Refusal(Shape):
    """What is said instead of an answer, and as the last event of a stream that has failed."""

    error: Fault


class PromptTokensDetails(Shape):
    cached_tokens: int


class Usage(Shape):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class LogprobEntry(Shape):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(LogprobEntry):
    top_logprobs: list[LogprobEntry]


class ChatLogprobs(Shape):
    content: list[ChatTokenLogprob]
    refusal: None


class Function(Shape):
    name: str
    arguments: str
    """A JSON object."""


class ToolCall(Shape):
    id: str
    type: Literal["function"]
    function: Function


class ChatMessage(Shape):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Shape):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(Shape):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class FunctionDelta(Shape):
    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(Shape):
    """Its id, type and the function's name come once, with the first."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(Shape):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Shape):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatCompletionChunk(Shape):
    """The data of an event of a chat that is streamed."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class CompletionLogprobs(Shape):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(Shape):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason


class CompletionResponse(Shape):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunkChoice(Shape):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class CompletionChunk(Shape):
    """The data of an event of a completion that is streamed."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class ModelCard(Shape):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(Shape):
    object: Literal["list"]
    data: list[ModelCard]


class TokenizeResponse(Shape):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class Text(Shape):
    prompt: str


class Status(Shape):
    status: Literal["alive", "ready", "loading", "closing", "waiting for a replica"]


# ---- responses


class OutputText(Shape, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any]
    logprobs: list[ChatTokenLogprob]


class ReasoningText(Shape, tag_field="type", tag="reasoning_text"):
    text: str


ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputMessage(Shape, tag_field="type", tag="message"):
    id: str
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningItem(Shape, tag_field="type", tag="reasoning"):
    id: str
    status: ItemStatus
    summary: list[Any]
    content: list[ReasoningText]


class FunctionCall(Shape, tag_field="type", tag="function_call"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


Item = OutputMessage | ReasoningItem | FunctionCall


class ResponseError(Shape):
    code: Literal["server_error"]
    message: str


class IncompleteDetails(Shape):
    reason: Literal["max_output_tokens"]


class ReasoningSettings(Shape):
    effort: str | None
    summary: None


class TextSettings(Shape):
    format: dict[str, Any]
    verbosity: str | None


class InputTokensDetails(Shape):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(Shape):
    reasoning_tokens: int


class ResponseUsage(Shape):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class Response(Shape):
    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[Item]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningSettings
    safety_identifier: str | None
    service_tier: str
    store: bool
    temperature: float
    text: TextSettings
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: str | None


class DeletedResponse(Shape):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class StreamEvent(Shape):
    """The data of an event of a response that is streamed."""

    sequence_number: int


class ResponseEvent(StreamEvent):
    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: Response


class ItemEvent(StreamEvent):
    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: Item


class PlacedEvent(StreamEvent):
    item_id: str
    output_index: int


class ContentPartEvent(PlacedEvent):
    type: Literal["response.content_part.added", "response.content_part.done"]
    content_index: int
    part: OutputText | ReasoningText


class TextDeltaEvent(PlacedEvent):
    type: Literal["response.output_text.delta"]
    content_index: int
    delta: str
    logprobs: list[ChatTokenLogprob]


class TextDoneEvent(PlacedEvent):
    type: Literal["response.output_text.done"]
    content_index: int
    text: str
    logprobs: list[ChatTokenLogprob]


class ReasoningDeltaEvent(PlacedEvent):
    type: Literal["response.reasoning_text.delta"]
    content_index: int
    delta: str


class ReasoningDoneEvent(PlacedEvent):
    type: Literal["response.reasoning_text.done"]
    content_index: int
    text: str


class ArgumentsDeltaEvent(PlacedEvent):
    type: Literal["response.function_call_arguments.delta"]
    delta: str


class ArgumentsDoneEvent(PlacedEvent):
    type: Literal["response.function_call_arguments.done"]
    name: str
    arguments: str


EVENTS = (
    ResponseEvent,
    ItemEvent,
    ContentPartEvent,
    TextDeltaEvent,
    TextDoneEvent,
    ReasoningDeltaEvent,
    ReasoningDoneEvent,
    ArgumentsDeltaEvent,
    ArgumentsDoneEvent,
)
"""Of a response."""
