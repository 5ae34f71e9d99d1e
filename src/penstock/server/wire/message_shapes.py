"""Defines the answers and events of /v1/messages, field by field; see wire.shapes."""

from typing import Any, Literal

from penstock.server.wire.shapes import AnswerObject

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class MessageFault(AnswerObject):
    """Describes an error, as Anthropic's clients read it."""

    type: str
    message: str


class MessageRefusal(AnswerObject, tag_field="type", tag="error"):
    """Says what is wrong: the body of a response that is an error, and the last event of a stream that has
    failed."""

    error: MessageFault
    request_id: str | None


class MessageUsage(AnswerObject):
    """Counts the tokens of a message. Those of the prompt that were found in the cache are no input."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class TextBlock(AnswerObject, tag_field="type", tag="text"):
    """Holds text of an answer."""

    text: str


class ThinkingBlock(AnswerObject, tag_field="type", tag="thinking"):
    """Holds reasoning."""

    thinking: str
    signature: str


class ToolUseBlock(AnswerObject, tag_field="type", tag="tool_use"):
    """Calls a tool."""

    id: str
    name: str
    input: dict[str, Any]


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock


class MessageAnswer(AnswerObject, tag_field="type", tag="message"):
    """Answers a conversation."""

    id: str
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageStart(AnswerObject, tag_field="type", tag="message_start"):
    """Begins a message, which is empty so far."""

    message: MessageAnswer


class Ping(AnswerObject, tag_field="type", tag="ping"):
    """Says that the answer is still being made."""


class BlockStart(AnswerObject, tag_field="type", tag="content_block_start"):
    """Begins a block, which is empty so far."""

    index: int
    content_block: ContentBlock


class BlockTextDelta(AnswerObject, tag_field="type", tag="text_delta"):
    """Adds to a text."""

    text: str


class ThinkingDelta(AnswerObject, tag_field="type", tag="thinking_delta"):
    """Adds to reasoning."""

    thinking: str


class SignatureDelta(AnswerObject, tag_field="type", tag="signature_delta"):
    """Signs reasoning, which is whole."""

    signature: str


class InputDelta(AnswerObject, tag_field="type", tag="input_json_delta"):
    """Adds to the input of a tool, which is JSON when it is whole."""

    partial_json: str


class BlockDelta(AnswerObject, tag_field="type", tag="content_block_delta"):
    """Adds to a block."""

    index: int
    delta: BlockTextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockStop(AnswerObject, tag_field="type", tag="content_block_stop"):
    """Ends a block."""

    index: int


class MessageEnd(AnswerObject):
    """Says why a message has ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(AnswerObject, tag_field="type", tag="message_delta"):
    """Gives what is known at the end of a message alone."""

    delta: MessageEnd
    usage: MessageUsage


class MessageStop(AnswerObject, tag_field="type", tag="message_stop"):
    """Ends a message."""


EVENTS = (MessageStart, Ping, BlockStart, BlockDelta, BlockStop, MessageDelta, MessageStop, MessageRefusal)


class TokenCount(AnswerObject):
    """Counts the tokens of a prompt."""

    input_tokens: int
