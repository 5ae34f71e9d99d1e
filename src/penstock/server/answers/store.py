"""Responses that clients may come back to, in memory: the newest, as many as there is room for."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from penstock.base.errors import PenstockError
from penstock.server.wire.requests import Message

MOST = 4096
"""Responses."""


class NotKeptError(PenstockError):
    """There is no such response, or no longer. `param`: the field that names it, if it is not the path."""

    def __init__(self, name: str, param: str | None = None) -> None:
        super().__init__(
            f"there is no response {name[:80]!r}: only the newest are kept, in memory, and none of a "
            "request with store false"
        )
        self.param = param


@dataclass(frozen=True, slots=True)
class _StoredResponse:
    owner: bytes
    answer: bytes
    messages: bytes
    """The conversation up to its end, without instructions, as JSON."""


class ResponseStore:
    """Keeps the newest responses in memory. For one thread."""

    def __init__(self, room: int) -> None:
        """room: bytes."""
        self._room = room
        self._size = 0
        self._responses: OrderedDict[str, _StoredResponse] = OrderedDict()

    def put(self, owner: bytes, name: str, answer: bytes, messages: Sequence[Message]) -> None:
        """Keep a response; the oldest ones make room. owner: the only key that may come back to it."""
        one = _StoredResponse(owner, answer, msgspec.json.encode(messages))
        self._responses[name] = one
        self._size += len(one.answer) + len(one.messages)
        while self._size > self._room or len(self._responses) > MOST:
            self._forget(next(iter(self._responses)))

    def answer(self, name: str, owner: bytes) -> bytes:
        """Return a response, as JSON. Raise NotKeptError, also for another key's."""
        return self._found(name, owner).answer

    def conversation(self, name: str, owner: bytes, param: str) -> bytes:
        """Return the conversation up to the end of a response: messages, as JSON. Raise NotKeptError."""
        return self._found(name, owner, param).messages

    def drop(self, name: str, owner: bytes) -> None:
        """Forget a response. Raise NotKeptError."""
        self._found(name, owner)
        self._forget(name)

    def _found(self, name: str, owner: bytes, param: str | None = None) -> _StoredResponse:
        one = self._responses.get(name)
        if one is None or one.owner != owner:  # Another key's is not even said to be there.
            raise NotKeptError(name, param)
        return one

    def _forget(self, name: str) -> None:
        one = self._responses.pop(name)
        self._size -= len(one.answer) + len(one.messages)
