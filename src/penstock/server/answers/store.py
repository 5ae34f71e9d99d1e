"""Keeps responses that clients may come back to, in memory: the newest, as many as there is room for. A key
that has more than its share makes room for others."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from penstock.base.errors import PenstockError
from penstock.server.wire.conversation import Message

MOST = 4096
"""Responses."""


class NotKeptError(PenstockError):
    """There is no such response, or no longer. `param`: the field that names it, if it is not the path."""

    def __init__(self, name: str, param: str | None = None) -> None:
        super().__init__(
            f"the response {name[:80]!r} is not stored: only the newest are kept, in memory, and none of a "
            "request with store false; send the whole conversation as input"
        )
        self.param = param


@dataclass(frozen=True, slots=True)
class _StoredResponse:
    answer: bytes
    messages: bytes
    """The conversation up to its end, without instructions, as JSON."""

    @property
    def size(self) -> int:
        return len(self.answer) + len(self.messages)


@dataclass(slots=True)
class _Shelf:
    """Holds the responses of one key, the oldest first, and counts their bytes."""

    responses: OrderedDict[str, _StoredResponse] = field(default_factory=OrderedDict)
    size: int = 0


class ResponseStore:
    """Keeps the newest responses in memory. For one thread."""

    def __init__(self, room: int) -> None:
        """Begin without responses.

        room: bytes of all responses at most.
        """
        self._room = room
        self._shelves: dict[bytes, _Shelf] = {}
        """By key."""

    def put(self, owner: bytes, name: str, answer: bytes, messages: Sequence[Message]) -> None:
        """Keep it. The oldest make room, of the key that has most: so of several keys each has a share that
        no other takes. owner: who alone may come back to it."""
        one = _StoredResponse(answer, msgspec.json.encode(messages))
        shelf = self._shelves.setdefault(owner, _Shelf())
        shelf.responses[name] = one
        shelf.size += one.size
        while sum(each.size for each in self._shelves.values()) > self._room:
            self._forget_oldest(max(self._shelves, key=lambda whose: self._shelves[whose].size))
        while sum(len(each.responses) for each in self._shelves.values()) > MOST:
            self._forget_oldest(max(self._shelves, key=lambda whose: len(self._shelves[whose].responses)))

    def answer(self, name: str, owner: bytes) -> bytes:
        """Return a response, as JSON. Raise NotKeptError, also for another key's."""
        return self._found(name, owner).answer

    def conversation(self, name: str, owner: bytes, param: str) -> bytes:
        """Return the conversation up to the end of a response: messages, as JSON. Raise NotKeptError."""
        return self._found(name, owner, param).messages

    def drop(self, name: str, owner: bytes) -> None:
        """Forget a response. Raise NotKeptError."""
        self._found(name, owner)
        self._forget(owner, name)

    def _found(self, name: str, owner: bytes, param: str | None = None) -> _StoredResponse:
        shelf = self._shelves.get(owner, _Shelf())
        if name not in shelf.responses:  # Whether it is another's is not said.
            raise NotKeptError(name, param)
        return shelf.responses[name]

    def _forget_oldest(self, owner: bytes) -> None:
        self._forget(owner, next(iter(self._shelves[owner].responses)))

    def _forget(self, owner: bytes, name: str) -> None:
        shelf = self._shelves[owner]
        shelf.size -= shelf.responses.pop(name).size
        if not shelf.responses:
            del self._shelves[owner]
