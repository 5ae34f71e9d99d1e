"""Conversations as chat templates expect them."""

from collections.abc import Mapping, Sequence

from penstock.base.errors import RequestError
from penstock.base.pacing import paced

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""The roles that messages of a conversation may have."""
_REASONING = ("reasoning_content", "thinking", "reasoning")


def wrong_role(where: str, role: str) -> str | None:
    """Return what is wrong with a message's role; None if it is one. where: the message."""
    return None if role in ROLES else f"{where}.role {role[:40]!r} is none; use one of {', '.join(ROLES)}"


def conversation(messages: object, *, any_role: bool = False) -> list[dict[str, object]]:
    """Return messages as templates expect them: text parts joined, keys without a value left out. Raise
    RequestError.

    any_role: whether roles may be others than those of a conversation, as rerankers' templates read them.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise RequestError(
            f"messages must be a list with at least one {{role, content}}, not {str(messages)[:40]!r}"
        )
    return [_message(f"messages[{at}]", message, any_role) for at, message in enumerate(paced(messages))]


def _message(where: str, message: object, any_role: bool) -> dict[str, object]:
    kept = (
        {key: value for key, value in message.items() if value is not None}
        if isinstance(message, Mapping)
        else {}
    )
    if not isinstance(role := kept.get("role"), str):
        raise RequestError(
            f"{where} must be a mapping with a role, such as user, assistant or system, not "
            f"{str(message)[:40]!r}"
        )
    if not any_role and (wrong := wrong_role(where, role)):
        raise RequestError(wrong)
    content = kept.get("content", "" if "tool_calls" in kept else None)
    if isinstance(content, list | tuple):
        content = "".join(_part(where, part) for part in content)
    if not isinstance(content, str):
        raise RequestError(
            f"{where} has content of type {type(content).__name__}; give a text, or a list of parts of type "
            '"text"'
        )
    kept["content"] = content
    reasoning = next((kept[key] for key in _REASONING if key in kept), None)
    if reasoning is not None:  # one thing under three names: templates read the first or the second
        kept = {"thinking": reasoning, **kept, "reasoning_content": reasoning}
    return kept


def _part(where: str, part: object) -> str:
    kind, text = (
        (part.get("type"), part.get("text")) if isinstance(part, Mapping) else (type(part).__name__, None)
    )
    if kind != "text" or not isinstance(text, str):
        raise RequestError(
            f"{where} has a part of type {kind!r}; only text is supported, so give parts such as "
            '{"type": "text", "text": "..."}'
        )
    return text
