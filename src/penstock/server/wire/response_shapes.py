"""Defines the answers and events of /v1/responses, field by field; see wire.shapes."""

from typing import Any, Literal

from penstock.server.wire.shapes import AnswerObject, ChatTokenLogprob


class OutputText(AnswerObject, tag_field="type", tag="output_text"):
    """Holds the text of a message."""

    text: str
    annotations: list[Any]
    logprobs: list[ChatTokenLogprob]


class ReasoningText(AnswerObject, tag_field="type", tag="reasoning_text"):
    """Holds the text of reasoning."""

    text: str


class _Item(AnswerObject):
    """Holds an item of a response."""

    id: str
    status: Literal["in_progress", "completed", "incomplete"]


class OutputMessage(_Item, tag_field="type", tag="message"):
    """Holds an item: a message."""

    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningItem(_Item, tag_field="type", tag="reasoning"):
    """Holds an item: reasoning."""

    summary: list[Any]
    content: list[ReasoningText]


class FunctionCall(_Item, tag_field="type", tag="function_call"):
    """Holds an item: a call of a function."""

    call_id: str
    name: str
    arguments: str


Item = OutputMessage | ReasoningItem | FunctionCall


class ResponseError(AnswerObject):
    """Says what has kept a response from being complete."""

    code: Literal["server_error"]
    message: str


class IncompleteDetails(AnswerObject):
    """Gives the reason for which a response is not complete."""

    reason: Literal["max_output_tokens"]


class ReasoningSettings(AnswerObject):
    """Repeats the settings of reasoning that a request had."""

    effort: str | None
    summary: None


class TextSettings(AnswerObject):
    """Repeats the form of text that a request asked for."""

    format: dict[str, Any]
    verbosity: str | None


class InputTokensDetails(AnswerObject):
    """Counts the tokens of the input that were found in the cache."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(AnswerObject):
    """Counts the tokens of the output that are reasoning."""

    reasoning_tokens: int


class ResponseUsage(AnswerObject):
    """Counts the tokens of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class Response(AnswerObject):
    """Responds to items."""

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


class DeletedResponse(AnswerObject):
    """Answers the request to delete a response."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class StreamEvent(AnswerObject):
    """Holds the data of an event of a response that is streamed."""

    sequence_number: int


class ResponseEvent(StreamEvent):
    """Tells of a whole response."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: Response


class ItemEvent(StreamEvent):
    """Tells of an item."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: Item


class PlacedEvent(StreamEvent):
    """Tells of a part of an item."""

    item_id: str
    output_index: int


class ContentEvent(PlacedEvent):
    """Tells of the content of an item."""

    content_index: int


class ContentPartEvent(ContentEvent):
    """Tells of a part of an item's content."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    part: OutputText | ReasoningText


class TextDeltaEvent(ContentEvent):
    """Adds a piece of text."""

    type: Literal["response.output_text.delta"]
    delta: str
    logprobs: list[ChatTokenLogprob]


class TextDoneEvent(ContentEvent):
    """Ends a text."""

    type: Literal["response.output_text.done"]
    text: str
    logprobs: list[ChatTokenLogprob]


class ReasoningDeltaEvent(ContentEvent):
    """Adds a piece of reasoning."""

    type: Literal["response.reasoning_text.delta"]
    delta: str


class ReasoningDoneEvent(ContentEvent):
    """Ends a text of reasoning."""

    type: Literal["response.reasoning_text.done"]
    text: str


class ArgumentsDeltaEvent(PlacedEvent):
    """Adds a piece of a call's arguments."""

    type: Literal["response.function_call_arguments.delta"]
    delta: str


class ArgumentsDoneEvent(PlacedEvent):
    """Ends the arguments of a call."""

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
"""The events of a response."""
