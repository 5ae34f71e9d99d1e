"""Keeps a conversation in a file: JSON with its messages in OpenAI's form."""

import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from penstock.base.errors import RequestError

MOST_BYTES = 64 << 20
Turns = list[tuple[str, str]]


def save(
    file: Path, model: str, messages: Sequence[dict[str, object]], may_replace: Callable[[], bool]
) -> bool:
    """Write a conversation to a file, whole or not at all. Return whether it was written.

    may_replace: is asked where there is such a file. Raises RequestError.
    """
    text = json.dumps({"model": model, "messages": messages}, ensure_ascii=False, indent=2) + "\n"
    if not file.name:
        raise RequestError(f"{file} is a directory; name a file in it")
    new = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        if os.path.lexists(file) and (not file.is_file() or not may_replace()):
            return False
        with new.open("x", encoding="utf-8") as opened:
            opened.write(text)
        os.replace(new, file.resolve() if file.is_symlink() else file)
    except (OSError, ValueError) as error:
        raise RequestError(f"{file} cannot be written: {_reason(error)}; name another file") from error
    finally:
        with suppress(OSError, ValueError):
            new.unlink(missing_ok=True)
    return True


def load(file: Path) -> tuple[str | None, Turns]:
    """Return the system message of a file's conversation, and its turns. Raises RequestError."""
    text = read_text(file)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{file} is not JSON: {_reason(error)}; give a file that /save wrote") from error
    messages = found.get("messages") if isinstance(found, dict) else found
    if not isinstance(messages, list):
        raise RequestError(f"{file} has no list of messages; give a file that /save wrote")
    said = [_message(file, number, message) for number, message in enumerate(messages)]
    system = said.pop(0)[1] if said and said[0][0] in ("system", "developer") else None
    for number, (role, _) in enumerate(said):
        if role != ("user", "assistant")[number % 2]:
            raise RequestError(
                f"{file} has a message of the role {role!r} where one of the "
                f"{('user', 'assistant')[number % 2]} should be; give a conversation that takes turns"
            )
    if len(said) % 2:
        raise RequestError(f"{file} ends with a message of the user that has no answer; remove it")
    return system, [(said[at][1], said[at + 1][1]) for at in range(0, len(said), 2)]


def read_text(file: Path) -> str:
    """Return the text of a file. Raises RequestError."""
    try:
        if not file.is_file():
            raise RequestError(
                f"{file} is {'no file' if file.exists() else 'not there'}; give the name of a text file"
            )
        if (size := file.stat().st_size) > MOST_BYTES:
            raise RequestError(
                f"{file} has {size:,} bytes, and {MOST_BYTES:,} are the most; give a smaller file"
            )
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise RequestError(f"{file} cannot be read: {_reason(error)}; give a text file in UTF-8") from error


def _message(file: Path, number: int, message: object) -> tuple[str, str]:
    """Return the role and the text of a message."""
    match message:
        case {"role": str(role), "content": str(text)}:
            return role, text
        case {"role": str(role), "content": list(parts)} if all(map(_text_part, parts)):
            return role, "".join(part["text"] for part in parts)
    raise RequestError(
        f"{file} has messages[{number}] without a role and a text as its content; give a conversation of "
        "texts"
    )


def _text_part(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
