"""Clients that waste a server's time and memory: afterwards it answers as if there had been none, and holds
nothing of theirs.

Small crowds, on one server; benchmarks/hostile_clients.py has the same in full.
"""

import asyncio
import json
import random
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import uvicorn

import hostile
from hostile import CHAT, ENDLESS_ONES, FLAGS, MIB, TEXT, Rest, Watched, post, status_of
from penstock import LLM, SamplingParams
from penstock.server.http import connection
from penstock.server.http.connection import Connection
from servers import COUNT, HEAD, SETTINGS, STORY, TALK, ending, until
from speakers import shallow
from streams import LONG

PATIENCE = {"_LONGEST_HEAD": 1.0, "_LOOK": 3.0}
"""Seconds; the real ones are longer than a test."""
ROOM = 24 * MIB
"""Bytes that a server may have more afterwards: caches that are filled once, and what malloc has in
pieces."""
LONGER = 80
"""Tokens of what slow readers ask for."""


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model, **SETTINGS) as llm:  # type: ignore[arg-type]
        yield llm


@pytest.fixture(scope="module")
def texts(llm: LLM) -> tuple[str, str]:
    """A short answer and a long one."""
    short, long = llm.generate(
        [STORY, STORY],
        [
            SamplingParams(temperature=0, max_tokens=COUNT),
            SamplingParams(temperature=0, max_tokens=LONGER, ignore_eos=True),
        ],
    )
    return short.text, long.text


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shallow(tmp_path_factory.mktemp("model") / "shipped")


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("server")
    flags = (str(model), "--port", "0", *FLAGS, "--queue", "12", "--max-body", str(MIB * 3 // 2))
    with ending(Watched(folder, *flags, files=400, **PATIENCE)) as server:
        yield server.wait()
        server.signal(signal.SIGTERM)
        assert server.ended() == 0
        assert "Traceback" not in server.said()


@pytest.fixture(scope="module")
def before(server: Watched) -> Rest:
    for _ in range(2):  # Processes for long texts and large conversations stay.
        server.ask("POST", "/tokenize", {"prompt": "a " * 50_000})
        server.ask("POST", "/tokenize", {"messages": [{"role": "user", "content": "a " * 50_000}]})
    return server.warm()


@contextmanager
def survived(server: Watched, before: Rest, text: str) -> Iterator[None]:
    """And nothing is left of what was done."""
    yield
    status, _, said = server.complete()
    assert (status, said["choices"][0]["text"]) == (200, text)
    after = server.rest(before)
    assert after.rss < before.rss + ROOM


def test_clients_that_go_leave_nothing(server: Watched, before: Rest, texts: tuple[str, str]) -> None:
    with survived(server, before, texts[0]):
        found = hostile.leave_early(server, 30)
    assert min(found[kind] for kind in ("before the answer", "in a stream", "in an upload")) > 2


def test_who_goes_behind_a_second_request_is_noticed(
    server: Watched, before: Rest, texts: tuple[str, str]
) -> None:
    with survived(server, before, texts[0]):
        assert hostile.leave_behind_another(server, 3) > 0


def test_slow_readers_hold_up_nobody_and_have_their_answers(
    server: Watched, before: Rest, texts: tuple[str, str]
) -> None:
    def others() -> bool:
        status, _, said = server.complete()
        return bool(status == 200 and said["choices"][0]["text"] == texts[0])

    with survived(server, before, texts[0]):
        found = hostile.read_slowly(server, 4, 0, LONGER, texts[1], others)
    assert found.answered > 0
    assert (found.whole, found.dropped) == (2, 0)
    assert found.rss < before.rss + 4 * 4 * MIB + ROOM


def test_malformed_bodies_are_refused(server: Watched, before: Rest, texts: tuple[str, str]) -> None:
    with survived(server, before, texts[0]):
        found = hostile.send_malformed(server, 150)
    assert found["400"] > 50
    assert found["200"] > 5


def test_requests_whose_length_is_a_lie_are_refused(
    server: Watched, before: Rest, texts: tuple[str, str]
) -> None:
    with survived(server, before, texts[0]):
        found = hostile.send_broken(server, 60)
    assert found["400"] > 10
    assert "200" in found


@pytest.mark.parametrize("kind", ENDLESS_ONES)
def test_what_does_not_end_is_not_kept(
    server: Watched, before: Rest, texts: tuple[str, str], kind: str
) -> None:
    server.rss = 0
    with survived(server, before, texts[0]):
        status, sent = hostile.pour(server, kind, 12 * MIB)
    assert server.rss < before.rss + ROOM + 6 * MIB
    if kind in ("a body", "chunks", "small chunks"):
        assert status == 413
    elif kind == "requests behind a stream":
        assert status in (200, 429)
    else:
        assert status in (0, 200, 400, 431)
        assert sent < 12 * MIB


def test_large_requests_are_answered(server: Watched, before: Rest, texts: tuple[str, str]) -> None:
    with survived(server, before, texts[0]):
        found = hostile.send_large(server, MIB // 8)
    assert found["400"] > 10


def test_connections_that_never_ask_are_closed(server: Watched, before: Rest, texts: tuple[str, str]) -> None:
    with survived(server, before, texts[0]):
        found = hostile.never_end(server, 4)
    assert found["408"] == 16  # Whether the head does not end, or the body.
    assert found["none"] == 4


@pytest.mark.parametrize(
    ("sent", "status", "said"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "not HTTP"),
        (
            b"GET /health HTTP/1.1\r\nHost: here\r\nX: " + b"x" * (connection.MOST_HEAD + 1),
            431,
            "more than 65,536 bytes",
        ),
        (b"GET /health HTTP/1.1\r\nHost: here\r\n", 408, "did not come to its end"),
    ],
)
def test_what_no_route_is_asked_about_is_an_error_like_others(
    server: Watched, sent: bytes, status: int, said: str
) -> None:
    with server.connected() as connection:
        connection.sendall(sent)
        got = b""
        while part := connection.recv(1 << 16):
            got += part
    head, _, body = got.partition(b"\r\n\r\n")
    assert status_of(got) == status
    assert b"content-type: application/json" in head
    fault = json.loads(body)["error"]
    assert said in fault["message"]
    assert set(fault) == {"message", "type", "param", "code"}


def test_more_connections_than_open_files_are_refused(
    server: Watched, before: Rest, texts: tuple[str, str]
) -> None:
    with survived(server, before, texts[0]):
        found = hostile.come_together(server, 450)
    assert found["200"] > 100
    assert found.get("503", 0) + found.get("none", 0) > 100
    assert "out of system resource" not in server.said()


def test_only_so_many_large_requests_are_on_their_way(
    server: Watched, before: Rest, texts: tuple[str, str]
) -> None:
    server.rss = 0
    with survived(server, before, texts[0]):
        found = hostile.hold_uploads(server, 12, MIB * 5 // 4, 8)
    assert found == {"none": 4, "429": 8}
    assert server.rss < before.rss + ROOM + 8 * MIB


def test_large_requests_are_read_again_afterwards(server: Watched, texts: tuple[str, str]) -> None:
    """Whatever was counted of those that were not."""
    for _ in range(6):
        status, _, said = server.complete(user="u" * (MIB * 5 // 4))
        assert (status, said["choices"][0]["text"]) == (200, texts[0])


def test_a_request_is_answered_whatever_comes_behind_it(server: Watched, texts: tuple[str, str]) -> None:
    body = json.dumps({"model": "shipped", "prompt": STORY, "max_tokens": COUNT, "temperature": 0}).encode()
    rng = random.Random(3)
    for more in (
        post(TEXT, body),
        b"\x00" * 100,
        bytes(rng.randrange(256) for _ in range(5000)),
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 5000,
    ):
        with server.connected() as connection:
            connection.sendall(post(TEXT, body) + more)
            got = b""
            while part := connection.recv(1 << 16):
                got += part
        assert status_of(got) == 200, more[:50]
        assert texts[0].encode() in got
        assert got.count(b"HTTP/1.1 ") == 1
    assert server.ask("POST", CHAT, {"model": "shipped", "messages": TALK, "max_tokens": 2})[0] == 200


def test_who_does_not_read_for_too_long_is_left() -> None:
    """With the very connections of the server, and an answer that no buffer holds."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-length", b"%d" % (64 * MIB))],
            }
        )
        await send({"type": "http.response.body", "body": bytes(64 * MIB)})

    async def meet() -> None:
        server = uvicorn.Server(uvicorn.Config(answer, http=Connection, lifespan="off", log_config=None))
        with (
            socket.create_server(("127.0.0.1", 0)) as listening,
            patch.object(connection, "_LONGEST_STALL", 0.2),
        ):
            serving = asyncio.ensure_future(server.serve([listening]))
            reader, writer = await asyncio.open_connection(*listening.getsockname(), limit=1024)
            writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            while server.server_state.connections:
                await asyncio.sleep(0.01)
            assert len(await reader.read(-1)) < 64 * MIB
            writer.close()
            server.should_exit = True
            await serving

    asyncio.run(asyncio.wait_for(meet(), LONG))


def test_to_who_does_not_read_no_more_is_pushed_than_its_buffers_hold_and_all_of_it_comes() -> None:
    piece, pushed = bytes(range(256)) * 64, 0

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        nonlocal pushed
        own = connection.connection_of(scope)
        assert own is not None
        await send({"type": "http.response.start", "status": 200, "headers": []})
        own.push(b"")  # Not the end.
        while own.pushes and pushed < 64 * MIB:
            own.push(piece)
            pushed += len(piece)
        await send({"type": "http.response.body", "body": b"the rest", "more_body": False})

    async def meet() -> None:
        server = uvicorn.Server(uvicorn.Config(answer, http=Connection, lifespan="off", log_config=None))
        with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket() as reading:
            # The machine's own buffers, which grow to megabytes if they are let, are small.
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
            reading.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            serving = asyncio.ensure_future(server.serve([listening]))
            reading.connect(listening.getsockname())
            reading.setblocking(False)
            reader, writer = await asyncio.open_connection(sock=reading, limit=1024)
            writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"transfer-encoding: chunked" in head
            got = bytearray()
            while size := int(await reader.readline(), 16):
                got += await reader.readexactly(size)
                assert await reader.readexactly(2) == b"\r\n"
            assert got == piece * (pushed // len(piece)) + b"the rest"
            writer.close()
            server.should_exit = True
            await serving

    asyncio.run(asyncio.wait_for(meet(), LONG))
    assert 0 < pushed < 64 * MIB


EARLY = {
    "too large": (413, 3 * MIB, "", HEAD),
    "no JSON": (415, 3 * MIB, "", "Host: localhost\r\nContent-Type: text/plain\r\n"),
    "no host": (400, 3 * MIB, "", "Content-Type: application/json\r\n"),
    "no route": (404, 3 * MIB, "/nothing", HEAD),
}


@pytest.mark.parametrize("close", [True, False])
@pytest.mark.parametrize("name", EARLY)
def test_who_is_refused_before_all_has_come_is_told(server: Watched, name: str, close: bool) -> None:
    """Though it sends all of its body before it reads, and says that the connection is to be closed."""
    status, size, path, head = EARLY[name]
    more = "Connection: close\r\n" if close else ""
    raw = f"POST {path or TEXT} HTTP/1.1\r\n{head}{more}Content-Length: {size}\r\n\r\n".encode()
    for _ in range(5):
        with server.connected() as there:
            there.sendall(raw)
            for _ in range(size // MIB):
                there.sendall(bytes(MIB))
                time.sleep(0.02)
            got = there.recv(12, socket.MSG_WAITALL)
            while b"}}" not in got and (part := there.recv(1 << 16)):
                got += part
        assert status_of(got) == status
        assert b'"error"' in got


def test_who_has_no_key_is_told_whatever_it_sends(tmp_path: Path) -> None:
    (tmp_path / "keys.txt").write_text("the key\n")
    flags = ("--port", "0", *FLAGS, "--api-keys", str(tmp_path / "keys.txt"))
    with ending(Watched(tmp_path, *flags)) as server:
        server.wait()
        for _ in range(5):
            with server.connected() as there:
                there.sendall(post(TEXT, bytes(8 * MIB), more="Connection: close\r\n"))
                got = b""
                while part := there.recv(1 << 16):
                    got += part
            assert status_of(got) == 401
            assert got.endswith(b"}}")


def test_what_comes_behind_a_refusal_is_thrown_away_for_a_while(server: Watched, before: Rest) -> None:
    """Bounded in bytes, and in time for who sends nothing; afterwards the server holds nothing of it."""
    head = post(TEXT, b"", 500 * MIB, "Connection: close\r\n").replace(b"application/json", b"text/plain")
    with server.connected() as there:
        there.sendall(head)
        sent = 0
        with suppress(ConnectionError):
            while sent < 500 * MIB:
                sent += there.send(bytes(MIB))
    assert sent < 64 * MIB + 16 * MIB
    with server.connected() as there:
        there.sendall(head)
        begin, got = time.monotonic(), b""
        while part := there.recv(1 << 16):
            got += part
        assert status_of(got) == 415
        until(lambda: server.rest(before).files <= before.files)
        assert time.monotonic() - begin < 20


def test_only_so_many_connections_linger() -> None:
    """With the very connections of the server: beyond that they are closed at once, as when one ends."""

    async def refuse(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async def meet() -> None:
        server = uvicorn.Server(uvicorn.Config(refuse, http=Connection, lifespan="off", log_config=None))
        with (
            socket.create_server(("127.0.0.1", 0)) as listening,
            patch.object(connection, "_MOST_LINGERING", 2),
            patch.object(connection, "_LINGER", 0.5),
        ):
            serving = asyncio.ensure_future(server.serve([listening]))
            opened = [await asyncio.open_connection(*listening.getsockname()) for _ in range(4)]
            for reader, writer in opened:
                writer.write(b"POST / HTTP/1.1\r\nConnection: close\r\nContent-Length: 9\r\n\r\n")
                assert (await reader.readline()).startswith(b"HTTP/1.1 413")
            await asyncio.sleep(0.1)
            assert len(connection._lingering) == len(server.server_state.connections) == 2
            while server.server_state.connections:
                await asyncio.sleep(0.01)
            assert not connection._lingering
            for _, writer in opened:
                writer.close()
            server.should_exit = True
            await serving

    asyncio.run(asyncio.wait_for(meet(), LONG))
