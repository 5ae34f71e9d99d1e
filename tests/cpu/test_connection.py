"""What a connection holds of an answer comes all the same, whole and in order; and who goes is noticed."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any
from unittest.mock import patch

import pytest
import uvicorn
from starlette.exceptions import HTTPException
from starlette.requests import Request

from penstock.server.http import connection, uploads
from penstock.server.http.connection import Connection, connection_of
from penstock.server.http.sending import unless_gone
from penstock.server.http.uploads import Uploads
from penstock.server.monitoring import records
from penstock.server.monitoring.records import RequestRecord
from streams import LONG

MIB = 1 << 20
START = {"type": "http.response.start", "status": 200, "headers": []}
ASKED = b"GET / HTTP/1.1\r\nHost: localhost\r\n"
Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def piece(body: bytes, *, more: bool = True) -> dict[str, object]:
    return {"type": "http.response.body", "body": body, "more_body": more}


def own(scope: Any) -> Connection:
    found = connection_of(scope)
    assert found is not None
    return found


def meet(answer: Any, talk: Talk) -> None:
    """Have a client talk to a server of these very connections, over small buffers of the machine's."""

    async def met() -> None:
        server = uvicorn.Server(uvicorn.Config(answer, http=Connection, lifespan="off", log_config=None))
        with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket() as client:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            serving = asyncio.ensure_future(server.serve([listening]))
            client.connect(listening.getsockname())
            client.setblocking(False)
            reader, writer = await asyncio.open_connection(sock=client, limit=1 << 12)
            await talk(reader, writer)
            writer.close()
            server.should_exit = True
            await serving

    asyncio.run(asyncio.wait_for(met(), LONG))


async def chunks(reader: asyncio.StreamReader) -> list[bytes]:
    """All of a chunked body."""
    got = list[bytes]()
    while size := int(await reader.readline(), 16):
        got.append(await reader.readexactly(size))
        assert await reader.readexactly(2) == b"\r\n"
    assert await reader.readexactly(2) == b"\r\n"
    return got


def test_a_streams_head_comes_though_no_piece_does() -> None:
    """The piece is only sent when the head was read."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        read = asyncio.Event()
        reads.append(read)
        writer.write(ASKED + b"\r\n")
        assert b"transfer-encoding: chunked" in await reader.readuntil(b"\r\n\r\n")
        read.set()
        assert await chunks(reader) == [b"a piece"]

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await send(START)
        await reads[0].wait()
        await send(piece(b"a piece", more=False))

    reads = list[asyncio.Event]()
    meet(answer, talk)


def test_each_piece_comes_though_nothing_follows() -> None:
    """The next one is only sent when the last was read."""
    said, read = [b"one", b"two", b"three", b"four"], list[asyncio.Event]()

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await send(START)
        for number, body in enumerate(said):
            if number == 2:
                own(scope).push(body)
            else:
                await send(piece(body))
            await read[number].wait()
        await send(piece(b"", more=False))

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        read.extend(asyncio.Event() for _ in said)
        writer.write(ASKED + b"\r\n")
        await reader.readuntil(b"\r\n\r\n")
        for body, event in zip(said, read, strict=True):
            assert await reader.readexactly(len(body) + 5) == b"%x\r\n%s\r\n" % (len(body), body)
            event.set()
        assert await chunks(reader) == []

    meet(answer, talk)


def test_an_answer_is_whole_though_the_server_ends_at_its_last_piece() -> None:
    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await send(START)
        await send(piece(b"all", more=False))
        own(scope).shutdown()  # As uvicorn does with each of its connections.

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(ASKED + b"\r\n")
        await reader.readuntil(b"\r\n\r\n")
        assert await chunks(reader) == [b"all"]

    meet(answer, talk)


@pytest.mark.parametrize("close", [True, False])
@pytest.mark.parametrize("expects", [True, False])
def test_all_ways_of_saying_something_keep_its_order(close: bool, expects: bool) -> None:
    """Sent, sent in one turn, pushed, larger than what is joined, and what comes before the answer."""
    said = [b"one", b"two", b"x" * (1 << 17), b"three", b"four", b"y" * (1 << 17), b"five", b"six"]

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["body"] == b"body"
        await send(START)
        await send(piece(said[0]))
        own(scope).push(said[1])
        await send(piece(said[2]))
        await send(piece(said[3]))
        await asyncio.sleep(0)
        await send(piece(said[4]))
        await send(piece(said[5]))
        own(scope).push(said[6])
        await send(piece(said[7], more=False))

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        more = (
            b"Content-Length: 4\r\n"
            + b"Expect: 100-continue\r\n" * expects
            + b"Connection: close\r\n" * close
        )
        for _ in range(1 if close else 3):
            writer.write(ASKED.replace(b"GET", b"POST") + more + b"\r\n")
            if expects:
                assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(b"body")
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            assert (b"connection: close" in head) == close
            assert await chunks(reader) == said
        if close:
            assert await reader.read() == b""

    meet(answer, talk)


def test_what_was_said_before_a_fault_comes() -> None:
    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await send(START)
        await send(piece(b"a piece"))
        raise OSError

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(ASKED + b"\r\n")
        await reader.readuntil(b"\r\n\r\n")
        assert await reader.read() == b"7\r\na piece\r\n"

    meet(answer, talk)


def test_who_does_not_read_is_sent_no_more_in_one_turn_either() -> None:
    sent = 0

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        nonlocal sent
        own(scope).watch(asyncio.current_task().cancel)  # type: ignore[union-attr]
        try:
            await send(START)
            while sent < 64 * MIB:
                await send(piece(bytes(1 << 10)))
                sent += 1 << 10
        except asyncio.CancelledError:
            pass

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(ASKED + b"\r\n")
        await reader.readuntil(b"\r\n\r\n")

    meet(answer, talk)
    assert 0 < sent < 64 * MIB


@pytest.mark.parametrize("size", [0, 1 << 10, 100_000, MIB])
def test_a_client_that_goes_is_noticed_however_large_its_body_was(size: int) -> None:
    """The body comes when it is waited for, so that much of it may come at once, which pauses reading."""
    asked, ended = list[asyncio.Event](), list[object]()

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        asked[0].set()
        while (await receive())["more_body"]:
            pass
        asked[1].set()
        ended.append(await unless_gone(scope, receive, asyncio.sleep(3600, "the answer")))

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.extend((asyncio.Event(), asyncio.Event()))
        writer.write(ASKED.replace(b"GET", b"POST") + b"Content-Length: %d\r\n\r\n" % size)
        await asked[0].wait()
        writer.write(bytes(size))
        await asked[1].wait()
        writer.close()
        while not ended:
            await asyncio.sleep(0.01)

    meet(answer, talk)
    assert ended == [None]


def test_who_is_refused_while_its_body_comes_counts_as_gone() -> None:
    """At once, and not only when its connection has ended, which lingers."""
    ended = list[object]()

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        ended.append(await unless_gone(scope, receive, asyncio.sleep(3600, "the answer")))

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with patch.object(connection, "_LOOK", 0.1), patch.object(connection, "_LINGER", 3600.0):
            writer.write(ASKED.replace(b"GET", b"POST") + b"Content-Length: 9\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 408")
            while not ended:
                await asyncio.sleep(0.01)

    meet(answer, talk)
    assert ended == [None]


def test_who_has_gone_before_it_is_watched_is_noticed() -> None:
    ended = list[object]()

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        ended.append(await unless_gone(scope, receive, asyncio.sleep(3600, "the answer")))

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(ASKED + b"\r\n")
        await writer.drain()
        writer.close()
        while not ended:
            await asyncio.sleep(0.01)

    meet(answer, talk)
    assert ended == [None]


def test_a_request_that_is_answered_is_not_told_of_what_becomes_of_the_next() -> None:
    told = list[object]()

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        told.append(own(scope)._gone)
        assert await unless_gone(scope, receive, asyncio.sleep(0, "the answer")) == "the answer"
        told.append(own(scope)._gone)
        await send(START)
        await send(piece(b"a piece", more=False))

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            writer.write(ASKED + b"\r\n")
            await reader.readuntil(b"\r\n\r\n")
            assert await chunks(reader) == [b"a piece"]

    meet(answer, talk)
    assert told == [None] * 4


def test_who_is_cancelled_is_so_though_its_client_goes_at_the_same_time() -> None:
    async def cancelled(also_gone: bool) -> None:
        async def receive() -> dict[str, str]:
            waiting.cancel()
            if not also_gone:
                await asyncio.sleep(3600)
            return {"type": "http.disconnect"}

        waiting = asyncio.ensure_future(unless_gone({}, receive, asyncio.sleep(3600)))
        with pytest.raises(asyncio.CancelledError):
            await waiting

    for also_gone in (True, False):
        asyncio.run(asyncio.wait_for(cancelled(also_gone), LONG))


@pytest.mark.parametrize("whole", [True, False])
def test_only_what_is_there_has_all_the_time_it_needs(whole: bool) -> None:
    """A body that is there is read without a timer, and one that is not has its time."""
    found = list[object]()

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        scope[records._KEY] = RequestRecord("req-1", "POST", {})
        while whole and not own(scope).is_whole:
            await asyncio.sleep(0.01)
        try:
            found.append(await Uploads(MIB).body(Request(scope, receive)))
        except HTTPException as fault:
            found.append(fault.status_code)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(
            ASKED.replace(b"GET", b"POST") + b"Content-Length: 4\r\n\r\n" + b"body"[: 4 if whole else 2]
        )
        while not found:
            await asyncio.sleep(0.01)

    with patch.object(uploads, "_PATIENCE", -1.0 if whole else 0.1):
        meet(answer, talk)
    assert found == [b"body" if whole else 408]
