"""Defines what clients may send to /v1/responses: a request for a chat in other words, and it is read as
one."""

import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

from msgspec import Meta, Struct

from penstock.server.wire.conversation import Message
from penstock.server.wire.decoding import FieldError, converted
from penstock.server.wire.items import led
from penstock.server.wire.requests import ChatRequest, TokenRequest

MOST_METADATA = 16
LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = {
    LOGPROBS,
    # Of items that there are none of, and of reasoning, which is plain text anyway:
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
}
RENAMED = {
    "messages": "input",
    "response_format": "text",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning",
}
"""Fields of a chat's request, as they are called here."""
Label = Annotated[str, Meta(max_length=512)]
"""Text that is told again with every answer, and kept with it. OpenAI takes 64 characters of most."""
_SAME = (
    "model", "parallel_tool_calls", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed",
    "priority", "timeout",
    "chat_template_kwargs",
)  # fmt: skip
_NO_EFFECT = (
    "user", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "max_tool_calls",
)  # fmt: skip


class Reasons(Struct, forbid_unknown_fields=True):
    """Sets how the model reasons."""

    effort: Label | None = None
    summary: str | None = None
    generate_summary: str | None = None
    """Neither has an effect: reasoning is given in full."""


class Form(Struct, forbid_unknown_fields=True):
    """Sets the form of the answer's text."""

    format: dict[str, Any] | None = None
    verbosity: Label | None = None


class ResponsesRequest(TokenRequest, forbid_unknown_fields=True, kw_only=True):
    """Holds the body of POST /v1/responses."""

    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: Form | None = None
    reasoning: Reasons | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    store: bool | None = None
    metadata: dict[Label, Label] | None = None
    previous_response_id: str | None = None
    truncation: str | None = None
    background: bool | None = None
    # Labels, and what suits whatever is answered:
    user: Label | None = None
    service_tier: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    prompt_cache_retention: str | None = None
    max_tool_calls: int | None = None
    # Beside OpenAI's:
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def outputs(self) -> int:
        """Count the outputs."""
        return 1

    @property
    def ignored(self) -> list[str]:
        """Name the fields that were sent and have no effect, though some of them are told again."""
        return [name for name in _NO_EFFECT if getattr(self, name) is not None]

    @property
    def stores(self) -> bool:
        """Tell whether the response is kept."""
        return self.store is not False

    def check(self) -> None:
        """Raise FieldError for what the fields do not allow together, or this server at all."""
        if self.truncation not in (None, "disabled"):
            raise FieldError(
                f"truncation {self.truncation[:40]!r} is not supported, since nothing is left out of a "
                "conversation; set it to disabled",
                "truncation",
            )
        if self.background:
            raise FieldError(
                "background is not supported, since responses are computed while clients wait; leave it out",
                "background",
            )
        if unknown := [name for name in self.include or () if name not in _INCLUDABLE]:
            raise FieldError(
                f"include has {unknown[0][:80]!r}; supported: {', '.join(sorted(_INCLUDABLE))}", "include"
            )
        if self.metadata is not None and len(self.metadata) > MOST_METADATA:
            raise FieldError(
                f"metadata has {len(self.metadata)} keys; send at most {MOST_METADATA}", "metadata"
            )
        if self.top_logprobs and LOGPROBS not in (self.include or ()):
            raise FieldError(
                f"top_logprobs need {LOGPROBS!r} in include; add it, or leave top_logprobs out",
                "top_logprobs",
            )
        if not self.input and self.previous_response_id is None:
            raise FieldError("there is no input; give a text or a list of items", "input")

    def chat(self, messages: Sequence[Message]) -> ChatRequest:
        """Return the same as a request for a chat: the answer to these messages. Raise FieldError."""
        logprobs = LOGPROBS in (self.include or ())
        fields: dict[str, object] = {name: getattr(self, name) for name in _SAME}
        fields["max_completion_tokens"] = self.max_output_tokens
        fields |= {"logprobs": logprobs, "top_logprobs": self.top_logprobs if logprobs else None}
        if self.tools is not None:
            fields["tools"] = [_tool(at, tool) for at, tool in enumerate(self.tools)]
        if isinstance(choice := self.tool_choice, dict) and choice.get("type") == "function":
            choice = {
                "type": "function",
                "function": {key: value for key, value in choice.items() if key != "type"},
            }
        fields["tool_choice"] = choice
        if self.reasoning is not None:
            fields["reasoning_effort"] = self.reasoning.effort
        if self.text is not None:
            fields |= {"verbosity": self.text.verbosity, "response_format": _format(self.text.format)}
        # What is not checked here is the form of the text.
        chat = converted({"messages": [{"role": "user"}], **fields}, ChatRequest, "text.format", "text")
        chat.structured_outputs = self.structured_outputs
        chat.messages = led(messages, self.instructions)
        return chat


def _tool(at: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        kind = str(tool.get("type"))[:80]
        raise FieldError(
            f"tools[{at}] is of type {kind!r}; only tools of type function are supported, which the client "
            "runs itself",
            "tools",
        )
    return {
        "type": "function",
        "function": {key: value for key, value in tool.items() if key != "type" and value is not None},
    }


def _format(form: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if form is None or form.get("type") != "json_schema":
        return None if form is None else dict(form)
    return {
        "type": "json_schema",
        "json_schema": {key: value for key, value in form.items() if key != "type"},
    }


@contextmanager
def named_here(renamed: Mapping[str, str]) -> Generator[None]:
    """Have errors about a field of the chat's request name the field that it comes from. renamed: by the
    chat's name."""
    try:
        yield
    except FieldError as error:
        if (name := renamed.get(error.param or "")) is None:
            raise
        raise FieldError(re.sub(rf"\b{error.param}\b", name, str(error)), name) from error
