"""Defines the messages of a conversation, as clients send them."""

from collections.abc import Sequence
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from penstock.api.text.messages import wrong_role
from penstock.server.wire.decoding import FieldError

_OWN = ("messages", "add_generation_prompt", "tools", "self")
"""Names that a template gets from other fields."""


class TextPart(Struct, forbid_unknown_fields=True):
    """Gives a part of a message's content, which is text."""

    type: Literal["text"]
    text: str


class Message(Struct, forbid_unknown_fields=True, kw_only=True):
    """Holds a message of a conversation, with what clients send back of an answer. All of it is for the
    model's template."""

    role: str
    content: str | list[TextPart] | None = None
    name: str | UnsetType | None = UNSET
    refusal: str | UnsetType | None = UNSET
    tool_calls: list[dict[str, Any]] | UnsetType | None = UNSET
    tool_call_id: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType | None = UNSET
    reasoning: str | UnsetType | None = UNSET
    function_call: dict[str, Any] | UnsetType | None = UNSET
    annotations: list[Any] | UnsetType | None = UNSET
    audio: dict[str, Any] | UnsetType | None = UNSET

    def plain(self) -> dict[str, object]:
        """Return the message as a template reads it: text in one piece."""
        content = (
            self.content
            if not isinstance(self.content, list)
            else "".join(part.text for part in self.content)
        )
        fields = {
            name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not UNSET
        }
        return fields | {"content": content or ""}


def check_chat(
    messages: Sequence[Message], variables: dict[str, Any] | None, *, continues: bool = False
) -> None:
    """Raise FieldError for roles that there are not, for variables of the template that are others, and for a
    last message that cannot be continued."""
    for at, message in enumerate(messages):
        if wrong := wrong_role(f"messages[{at}]", message.role):
            raise FieldError(wrong, "messages")
    if continues and (not messages or messages[-1].role != "assistant" or messages[-1].tool_calls):
        raise FieldError(
            "continue_final_message needs a last message of the assistant, without calls; add one, or leave "
            "continue_final_message out",
            "continue_final_message",
        )
    if taken := [name for name in _OWN if name in (variables or ())]:
        raise FieldError(
            f"chat_template_kwargs has {taken[0]!r}, which the server sets itself; leave it out",
            "chat_template_kwargs",
        )
