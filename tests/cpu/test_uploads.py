"""Large bodies of one key are read at a rate, where there are several keys; nobody else waits for that."""

import asyncio
from collections.abc import Iterable

import pytest

pytest.importorskip("starlette")

from starlette.requests import Request
from starlette.types import Message, Scope

from penstock.server.http import uploads
from penstock.server.http.uploads import SMALL, Uploads
from penstock.server.monitoring.records import _KEY, RequestRecord

PART = 16 << 10


def asking(owner: bytes, parts: Iterable[bytes]) -> Request:
    messages: list[Message] = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    messages.append({"type": "http.request", "body": b"", "more_body": False})

    async def receive() -> Message:
        return messages.pop(0)

    account = RequestRecord("one", "POST", {}, owner=owner)
    scope: Scope = {"type": "http", "method": "POST", "path": "/", "headers": [], _KEY: account}
    return Request(scope, receive)


@pytest.fixture(autouse=True)
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "_RATE", 1 << 20)
    monkeypatch.setattr(uploads, "_BURST", 2 * SMALL)


async def seconds(there: Uploads, owner: bytes, size: int) -> float:
    loop = asyncio.get_running_loop()
    begin, request = loop.time(), asking(owner, [b"x" * PART] * (size // PART))
    assert await there.body(request) == b"x" * size
    there.release(request)
    return loop.time() - begin


def test_a_keys_large_bodies_are_read_at_a_rate_together() -> None:
    async def both() -> list[float]:
        there = Uploads(1 << 30, keys=2)
        return await asyncio.gather(*(seconds(there, b"one", 512 << 10) for _ in range(2)))

    # What is large of both, less what may come at once, at a mebibyte a second; when each ends depends on
    # their turns.
    assert max(asyncio.run(both())) >= (2 * ((512 << 10) - SMALL) - 2 * SMALL - 2 * PART) / (1 << 20)


def test_neither_another_key_nor_small_requests_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "_RATE", 1)  # So that who waits does so for hours.

    async def others() -> None:
        there = Uploads(1 << 30, keys=2)
        large = asyncio.ensure_future(seconds(there, b"one", 512 << 10))
        await asyncio.sleep(0.05)
        async with asyncio.timeout(30):
            await seconds(there, b"two", 2 * SMALL)
            await seconds(there, b"one", SMALL)
        assert not large.done()
        large.cancel()

    asyncio.run(others())


def test_a_server_of_one_key_reads_as_fast_as_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "_RATE", 1)  # Or it would take hours.
    assert asyncio.run(seconds(Uploads(1 << 30, keys=1), b"one", 512 << 10)) < 60


def test_to_be_read_slowly_is_not_to_come_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time that a body may take does not run while it is not read."""
    monkeypatch.setattr(
        uploads, "_RATE", 128 << 10
    )  # It takes 2.5 seconds, with a second and a half to spare for a slow machine.
    monkeypatch.setattr(uploads, "_PATIENCE", 1.5)
    monkeypatch.setattr(uploads, "_SLOWEST", 1 << 40)
    assert asyncio.run(seconds(Uploads(1 << 30, keys=2), b"one", 512 << 10)) > 2
