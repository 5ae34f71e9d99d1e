"""Clients that waste a server's time and memory, and what a server is like before and after them.

Each crowd of clients is a function that returns what it has seen: what came back, by kind. None of them may
make the server fail, and after each it must be at rest: nothing computed, nothing held, and as many tasks,
files and threads as before.
"""

import json
import random
import select
import signal
import socket
import struct
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from servers import HEAD, STORY, TALK, Server, counted, until
from streams import LONG

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MIB = 1 << 20
FLAGS = (
    "--device",
    "cpu",
    "--dtype",
    "float32",
    "--kv-blocks",
    "32",
    "--max-sequences",
    "4",
    "--max-length",
    "1024",
)
"""Of a server whose KV is so small that all of it is soon in memory."""
ENDLESS = {"model": "shipped", "prompt": "The sea", "max_tokens": 900, "ignore_eos": True, "stream": True}
_WATCHED = """
import asyncio, ctypes, gc, json, os, resource, signal, sys
from penstock.cli.main import main
from penstock.server.http import connection

for name, seconds in PATIENCE.items():
    setattr(connection, name, seconds)
if FILES:
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))

def tell(*_):
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open(PLACE + ".new", "w") as file:
        json.dump(sorted(task.get_coro().__qualname__ for task in asyncio.all_tasks()), file)
    os.replace(PLACE + ".new", PLACE)

signal.signal(signal.SIGUSR1, tell)
sys.exit(main())
"""


@dataclass(frozen=True)
class Rest:
    """A server that does nothing. rss: bytes. held: share of the KV blocks. tasks: of its event loop, by
    name."""

    rss: int
    held: float
    running: int
    waiting: int
    files: int
    threads: int
    tasks: tuple[str, ...]

    @property
    def busy(self) -> bool:
        return bool(
            self.held or self.running or self.waiting or any("run_asgi" in task for task in self.tasks)
        )


class Watched(Server):
    """One that tells its tasks when asked, by a signal, and has then given back the memory that it does not
    need."""

    popen = (
        subprocess.Popen
    )  # Of one that was forked the memory grows by what it has of the other's and comes to use.

    def __init__(self, folder: Path, *flags: str, files: int = 0, **patience: float) -> None:
        """files: that it may open, if not as many as others. patience: the seconds that
        penstock.server.http.connection names, where they are others."""
        self._told = folder / "tasks.json"
        self.python = (
            "-c",
            _WATCHED.replace("PLACE", repr(str(self._told)))
            .replace("PATIENCE", repr(patience))
            .replace("FILES", str(files)),
        )
        # What threads free is given back too when there is one arena.
        super().__init__(folder / "said.txt", *flags, environment={"MALLOC_ARENA_MAX": "1"})
        self.rss = 0
        """The most that was seen."""

    @property
    def place(self) -> tuple[str, int]:
        url = urlsplit(self.url)
        return url.hostname or "", url.port or 0

    def memory(self) -> int:
        now = int(psutil.Process(self.process.pid).memory_info().rss)
        self.rss = max(self.rss, now)
        return now

    def look(self) -> Rest:
        count = counted(self)
        self._told.unlink(missing_ok=True)
        self.signal(signal.SIGUSR1)
        until(self._told.exists)
        process = psutil.Process(self.process.pid)
        return Rest(
            self.memory(),
            count["kv_cache_usage_perc",],
            int(count["num_requests_running",]),
            int(count["num_requests_waiting",]),
            process.num_fds(),
            process.num_threads(),
            tuple(json.loads(self._told.read_text())),
        )

    def warm(self) -> Rest:
        """At rest, when all of its KV and each of its ways has been used."""
        for number in range(3):
            assert self.complete(prompt=[9 + number] * 1000, max_tokens=1)[0] == 200
        for path, body in large_requests(1000):
            self.ask("POST", path, body)
        return self.rest()

    def rest(self, before: Rest | None = None) -> Rest:
        """When it does nothing, and has no more of anything than before."""
        last = self.look()

        def rests() -> bool:
            nonlocal last
            last = self.look()
            return not last.busy and (
                before is None or (last.files <= before.files and last.tasks == before.tasks)
            )

        try:
            until(rests)
        except AssertionError as late:
            raise AssertionError(f"the server does not come to rest: before {before}, now {last}") from late
        return last

    @contextmanager
    def connected(self, timeout: float = LONG) -> Iterator[socket.socket]:
        with socket.create_connection(self.place, timeout) as connection:
            yield connection

    def send(self, raw: bytes, patience: float = 0.05) -> bytes:
        """What comes back of bytes after which the client says no more. patience: seconds until it says
        that."""
        got = b""
        with self.connected() as connection, suppress(ConnectionError):
            connection.sendall(raw)
            if not select.select([connection], [], [], patience)[0]:
                connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(1 << 16):
                got += part
                if select.select([connection], [], [], 0)[0] == []:
                    connection.shutdown(socket.SHUT_WR)
        return got


def post(path: str, body: bytes, length: int | None = None, more: str = "") -> bytes:
    """A request. length: as told, if it is not the body's."""
    size = len(body) if length is None else length
    return f"POST {path} HTTP/1.1\r\n{HEAD}{more}Content-Length: {size}\r\n\r\n".encode() + body


def status_of(answer: bytes) -> int:
    """0 if there is none."""
    return int(answer[9:12]) if answer.startswith(b"HTTP/1.1 ") else 0


def seen(statuses: Sequence[int]) -> dict[str, int]:
    """How often each."""
    return {str(status) if status else "none": count for status, count in sorted(Counter(statuses).items())}


# ---- disconnects


def leave_early(server: Watched, count: int, seed: int = 0) -> dict[str, int]:
    """Clients that go before there is an answer, in the midst of a stream, and in the midst of their upload:
    by an end or a reset."""

    def leave(number: int) -> str:
        rng = random.Random(seed * 1_000_003 + number)
        kind = ("before the answer", "in a stream", "in an upload")[number % 3]
        prompt: Any = rng.choice(
            (STORY, ["a", "b"], [9 + number % 999] * rng.choice((1, 100)), "far away " * rng.choice((1, 30)))
        )
        n = 1 if isinstance(prompt, list) else rng.choice((1, 2))
        asked = json.dumps(
            ENDLESS | {"stream": kind == "in a stream" or rng.random() < 0.3, "n": n, "prompt": prompt}
        ).encode()
        sent = post(TEXT, asked)
        if kind == "in an upload":
            sent = sent[: rng.randrange(len(sent) - 1)]
        with server.connected() as connection, suppress(TimeoutError, ConnectionError):
            connection.sendall(sent)
            if kind == "in a stream":
                if status_of(connection.recv(12, socket.MSG_WAITALL)) != 200:
                    return "refused"
                for _ in range(rng.choice((1, 1, 5))):
                    connection.recv(rng.choice((1, 100, 4000)))
            else:
                connection.settimeout(rng.choice((0.001, 0.01, 0.1)))
                connection.recv(1)
            if rng.random() < 0.5:  # A reset instead of an end.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return kind

    with ThreadPoolExecutor(8) as crowd:
        return dict(Counter(crowd.map(leave, range(count))))


# ---- slow readers


@dataclass(frozen=True)
class Slow:
    """rss: the most that the server had, in bytes. answered: right answers that others had meanwhile. whole:
    of the slow readers' own answers, how many were right when they were read at last; the rest left. dropped:
    those that the server has left."""

    rss: int
    answered: int
    whole: int
    dropped: int


def read_slowly(
    server: Watched, count: int, seconds: float, tokens: int, text: str, others: Callable[[], bool]
) -> Slow:
    """`count` clients that ask for `tokens` tokens with many log-probabilities, which is `text`, and read a
    byte a second. others: asks what others would, and says whether the answer is right."""
    body = {
        "model": "shipped",
        "prompt": STORY,
        "temperature": 0,
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "logprobs": 20,
    }
    with ExitStack() as opened:
        slow = []
        for _ in range(count):
            connection = opened.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.settimeout(LONG)
            connection.connect(server.place)
            connection.sendall(post(TEXT, json.dumps(body).encode(), more="Connection: close\r\n"))
            slow.append(connection)
        got, answered, late = [b""] * count, 0, time.monotonic() + seconds
        # Nobody waits for who reads: all is soon computed, and nothing held.
        until(lambda: len(select.select(slow, [], [], 0)[0]) == count and not server.look().busy, 20 * LONG)
        while time.monotonic() < late or not answered:
            got = [one + connection.recv(1) for one, connection in zip(got, slow, strict=True)]
            begun = time.monotonic()
            while time.monotonic() < begun + 1:
                assert others()
                answered += 1
                server.memory()
        whole = dropped = 0
        for one, connection in list(zip(got, slow, strict=True))[::2]:
            said, ended = _rest_of(one, connection)
            assert text.startswith(said)
            whole += ended and said == text
            dropped += not ended
        return Slow(server.rss, answered, whole, dropped)


def _rest_of(begun: bytes, connection: socket.socket) -> tuple[str, bool]:
    """The text of a stream of which the first bytes are known, and whether it ended as it should."""
    raw = begun
    with suppress(ConnectionError):
        while part := connection.recv(1 << 16):
            raw += part
    head, _, chunked = raw.partition(b"\r\n\r\n")
    assert status_of(head) == 200, head
    lines = chunked.split(b"\n")
    said = [
        json.loads(line[6:])["choices"][0]["text"]
        for line in lines
        if line.startswith(b"data: {") and line.endswith(b"}")
    ]
    return "".join(said), b"data: [DONE]" in lines


# ---- malformed requests


def _a_request(rng: random.Random) -> tuple[str, dict[str, Any]]:
    return rng.choice(
        [
            (
                CHAT,
                {
                    "model": "shipped",
                    "messages": TALK,
                    "max_tokens": 2,
                    "n": 1,
                    "stream": False,
                    "logit_bias": {"5": 1},
                },
            ),
            (
                TEXT,
                {
                    "model": "shipped",
                    "prompt": STORY,
                    "max_tokens": 2,
                    "stop": ["a"],
                    "temperature": 0.5,
                    "seed": 1,
                },
            ),
            ("/tokenize", {"prompt": STORY, "model": "shipped"}),
            ("/detokenize", {"tokens": [5, 6, 7]}),
        ]
    )


_SAMPLING = (
    "top_p",
    "top_k",
    "min_p",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "presence_penalty",
    "repetition_penalty",
    "stream_options",
    "user",
)
_OTHERS: dict[str, tuple[str, ...]] = {
    CHAT: (
        *_SAMPLING,
        "logprobs",
        "top_logprobs",
        "tools",
        "tool_choice",
        "response_format",
        "metadata",
        "chat_template_kwargs",
        "nobody",
    ),
    TEXT: (
        *_SAMPLING,
        "logprobs",
        "echo",
        "best_of",
        "suffix",
        "add_special_tokens",
        "response_format",
        "logit_bias",
        "nobody",
    ),
    "/tokenize": (
        "messages",
        "add_special_tokens",
        "return_token_strs",
        "chat_template_kwargs",
        "tools",
        "nobody",
    ),
    "/detokenize": ("model", "nobody"),
}
_ODD: list[Any] = [
    None, True, -1, 0, 3.5, 2**63, -(2**64), 10**300, 1e308, 5e-324, "", "x" * 5000, "\x00", "\u202e",
    "😀" * 100,
    [], [[]], [None], {}, {"a": {"b": []}}, [{}], [[{}]], {"": ""}, [0] * 3000, [True], ["a", 1],
    {"type": "x"},
]  # fmt: skip
_RAW: list[bytes] = [
    b"[" * 100_000, b'{"a":' * 50_000, b"1" * 100_000, b"-", b"1e999999", b"NaN", b'"\\ud800"',
    b"\xff\xfe{\x00}", b"\xef\xbb\xbf{}",
    b"\x00" * 1000, b'{"model": "\xc0\xaf"}', b'{"model": "shipped", "prompt": "\xed\xa0\x80"}',
    b'{"model": "shipped", "prompt": 1e400}',
    b'{"model": "shipped", "prompt": "a", "max_tokens": 1' + b"0" * 4000 + b"}",
    b'{"model":"shipped","model":"shipped","prompt":1}',
]  # fmt: skip


def malformed_body(rng: random.Random) -> tuple[str, bytes]:
    """A body with something wrong in it; never one that takes long."""
    path, body = _a_request(rng)
    chance = rng.random()
    if chance < 0.15:
        return path, rng.choice(_RAW)
    if chance < 0.6:
        name = rng.choice(
            [key for key in (*body, *_OTHERS[path]) if key != "max_tokens"]
        )  # What is asked for stays short.
        return path, json.dumps(body | {name: rng.choice(_ODD)}).encode()
    if chance < 0.7:
        return path, json.dumps(_nested(rng, body)).encode()
    raw = bytearray(json.dumps(body).encode())
    for _ in range(rng.choice((1, 2, 8))):
        raw[rng.randrange(len(raw))] = rng.choice((rng.randrange(256), *b'"{}[],:\\0'))
    return path, bytes(raw[: rng.randrange(len(raw))] if rng.random() < 0.3 else raw)


def _nested(rng: random.Random, body: dict[str, Any]) -> dict[str, Any]:
    """With one value somewhere in it that is another."""
    copy = json.loads(json.dumps(body))
    here, key = copy, rng.choice([key for key in copy if key != "max_tokens"])
    while isinstance(here[key], dict | list) and here[key]:
        here = here[key]
        key = rng.choice(list(here) if isinstance(here, dict) else range(len(here)))
    here[key] = rng.choice(_ODD)
    return copy


def send_malformed(server: Watched, count: int, seed: int = 0) -> dict[str, int]:
    """Bodies, each the same way as it is, whatever comes back."""
    rng, statuses = random.Random(seed), []
    for _ in range(count):
        path, body = malformed_body(rng)
        status, _, said = server.ask("POST", path, body)
        assert status < 500, (path, body[:300], said)
        assert status == 200 or said["error"]["message"], (path, body[:300], said)
        statuses.append(status)
    return seen(statuses)


def broken_framing(rng: random.Random) -> bytes:
    """A request whose length is not what is told, or whose pieces are none."""
    path, asked = _a_request(rng)
    body = json.dumps(asked).encode()
    chunked = f"POST {path} HTTP/1.1\r\n{HEAD}Transfer-Encoding: chunked\r\n\r\n".encode()
    size = f"{len(body):x}".encode()
    whole = size + b"\r\n" + body + b"\r\n0\r\n"
    noise = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 400)))
    return rng.choice(
        [
            post(path, body, rng.randrange(len(body))),
            post(path, body, len(body) + rng.randrange(1, 1 << 40)),
            post(path, body, 0),
            post(path, body).replace(
                b"Content-Length: ",
                rng.choice((b"Content-Length: -", b"Content-Length: 0x", b"Content-Length: 9" + b"9" * 30)),
            ),
            post(path, body, more=f"Content-Length: {rng.randrange(len(body))}\r\n"),
            post(path, body, more="Transfer-Encoding: chunked\r\n"),
            post(path, body, more="Transfer-Encoding: gzip, chunked\r\n"),
            post(path, body, more="Expect: 100-continue\r\n"),
            post(path, body, more="Content-Encoding: gzip\r\n"),
            post(
                path, body, more="Connection: upgrade\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
            ),
            chunked
            + rng.choice((b"zz", b"-1", b"ffffffffffffffff", b"fffffffffffffffff", b"", b"1;" + noise))
            + b"\r\n"
            + body,
            chunked + size + b"\r\n" + body,
            chunked + whole[: rng.randrange(len(whole))],
            chunked + whole + b"X-Trailer: " + noise.replace(b"\n", b"") + b"\r\n\r\n",
            chunked + size + b"\n" + body + b"\n0\n\n",
            b"\r\n" * rng.randrange(50) + post(path, body),
            noise,
            b"POST " + noise + b" HTTP/1.1\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            post(path, body).replace(
                b"HTTP/1.1", rng.choice((b"HTTP/0.9", b"HTTP/1.2", b"HTTP/2", b"ICY/1.1"))
            ),
            post(path, body, more="X-A: a\r\n b\r\n: c\r\nX\x00: d\r\n"),
            post(path, body) + post(path, body)[: rng.randrange(60)],
        ]
    )


def send_broken(server: Watched, count: int, seed: int = 0) -> dict[str, int]:
    rng, statuses = random.Random(seed), []
    for _ in range(count):
        raw = broken_framing(rng)
        answer = server.send(raw)
        statuses.append(status_of(answer))
        assert statuses[-1] < 500, (raw[:600], answer[:600])
    return seen(statuses)


# ---- too much, and never enough


def _chunked(path: str) -> bytes:
    return f"POST {path} HTTP/1.1\r\n{HEAD}Transfer-Encoding: chunked\r\n\r\n".encode()


_GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
ENDLESS_ONES: dict[str, tuple[bytes, bytes]] = {
    "a header": (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ", b"a" * 65536),
    "headers": (b"GET /health HTTP/1.1\r\nHost: localhost\r\n", b"X-abc: def\r\n" * 5000),
    "a line": (b"GET /", b"a" * 65536),
    "trailers": (_chunked("/tokenize") + b"2\r\n{}\r\n0\r\n", b"X-abc: def\r\n" * 5000),
    "a chunk's extension": (_chunked("/tokenize") + b"2;", b"a" * 65536),
    "a body": (post("/tokenize", b"", 1 << 40), b"a" * 65536),
    "chunks": (_chunked("/tokenize"), b"10000\r\n" + b"a" * 65536 + b"\r\n"),
    "small chunks": (_chunked("/tokenize"), b"1\r\na\r\n" * 10_000),
    "requests": (b"", _GET * 2000),
    "requests behind a stream": (post(TEXT, json.dumps(ENDLESS).encode()), _GET * 2000),
}


def pour(server: Watched, kind: str, most: int) -> tuple[int, int]:
    """Up to so many bytes of a request that does not end, or until the server closes the connection. The
    status that came first, and how many bytes were sent."""
    head, piece = ENDLESS_ONES[kind]
    got, sent = b"", len(head)
    with server.connected() as connection, suppress(ConnectionError):
        connection.sendall(head)
        while sent < most:
            connection.sendall(piece)
            sent += len(piece)
            server.memory()
            if select.select([connection], [], [], 0)[0]:
                got += (part := connection.recv(1 << 16))
                if not part:
                    break
        if not got and sent >= most and select.select([connection], [], [], LONG)[0]:
            got = connection.recv(1 << 16)
    return status_of(got), sent


def large_requests(size: int) -> Iterator[tuple[str, bytes]]:
    """About so many bytes each, of all kinds of things."""
    few = {"model": "shipped", "max_tokens": 2}

    def body(path: str, **fields: Any) -> tuple[str, bytes]:
        return path, json.dumps((few if path in (CHAT, TEXT) else {}) | fields).encode()

    yield body(TEXT, prompt="a" * size)
    yield body(TEXT, prompt="é" * (size // 6))
    yield body(TEXT, prompt=" " * size)
    yield body(TEXT, prompt=[1] * (size // 3))
    yield body(TEXT, prompt=[10**18] * (size // 20))
    yield body(TEXT, prompt=["a"] * (size // 5))
    yield body(TEXT, prompt=[[5]] * (size // 5))
    yield body(TEXT, prompt="a", stop=["b"] * (size // 5))
    yield body(TEXT, prompt="a", stop_token_ids=list(range(size // 7)))
    yield body(TEXT, prompt="a", logit_bias={str(n): 1 for n in range(size // 11)})
    yield body(TEXT, prompt="a", user="u" * size)
    yield body(TEXT, prompt="a", **{"x" * size: 1})
    yield body(CHAT, messages=[{"role": "user", "content": "a"}] * (size // 36))
    yield body(CHAT, messages=[{"role": "user", "content": [{"type": "text", "text": ""}] * (size // 28)}])
    yield body(CHAT, messages=[{"role": "r" * size, "content": "a"}])
    yield body(CHAT, messages=TALK, metadata={str(n): "" for n in range(size // 14)})
    yield body(CHAT, messages=TALK, chat_template_kwargs={"a": [[]] * (size // 4)})
    yield body(CHAT, messages=[{"role": "assistant", "tool_calls": [{"a": {}}] * (size // 11)}])
    yield CHAT, b'{"model":"shipped","messages":' + b"[" * size
    yield TEXT, b'{"model":"shipped","prompt":' + b"1" * size + b"}"
    yield TEXT, b'{"model":"shipped","prompt":"' + b"\\u0000" * (size // 6) + b'","max_tokens":1}'
    yield "/tokenize", b'{"prompt":"' + b"\\ud83d\\ude00" * (size // 12) + b'"}'
    yield body("/detokenize", tokens=[5] * (size // 3))


def send_large(server: Watched, size: int) -> dict[str, int]:
    """One by one: all have an answer."""
    statuses = []
    for path, raw in large_requests(size):
        status, _, said = server.ask("POST", path, raw)
        server.memory()
        assert status < 500, (path, raw[:100], said)
        statuses.append(status)
    return seen(statuses)


def never_end(server: Watched, count: int) -> dict[str, int]:
    """Connections that ask for nothing, or take for ever to: so many of each kind, until the server has
    closed all. What came back."""
    begun = (
        b"",
        b"GET",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n",
        post("/tokenize", b'{"prompt"', 1000),
        _chunked(TEXT) + b'5\r\n{"pro',
    )
    with ExitStack() as opened:
        connections = [opened.enter_context(server.connected()) for _ in range(count * len(begun))]
        for number, connection in enumerate(connections):
            connection.sendall(begun[number % len(begun)])
        statuses = []
        for connection in connections:
            with suppress(ConnectionError):
                got = b""
                while part := connection.recv(1 << 16):
                    got += part
            statuses.append(status_of(got))
    return seen(statuses)


def hold_uploads(server: Watched, count: int, size: int, refused: int) -> dict[str, int]:
    """Clients that send all but the last bytes of a request, and then nothing; until so many have been
    refused for it."""
    raw = post("/detokenize", b'{"tokens": [' + b"5," * (size // 2) + b"5]}")
    statuses = [0] * count
    with ExitStack() as opened:
        connections = [opened.enter_context(server.connected()) for _ in range(count)]
        for connection in connections:
            with suppress(ConnectionError):
                connection.sendall(raw[:-5])
            server.memory()

        def are_refused() -> bool:
            for number, connection in enumerate(connections):
                if not statuses[number] and select.select([connection], [], [], 0)[0]:
                    statuses[number] = status_of(connection.recv(64))
            return statuses.count(429) >= refused

        until(are_refused)
    return seen(statuses)


def leave_behind_another(server: Watched, count: int) -> int:
    """Clients that send a second request while the first is answered, and go; how many have been answered,
    and noticed to go."""
    before, answered = counted(server)["request_abandoned_total",], 0
    for _ in range(count):
        with server.connected() as connection:
            connection.sendall(post(TEXT, json.dumps(ENDLESS).encode()))
            answered += status_of(connection.recv(12, socket.MSG_WAITALL)) == 200
            connection.sendall(_GET)
    until(lambda: counted(server)["request_abandoned_total",] == before + answered)
    return answered


def come_together(server: Watched, count: int) -> dict[str, int]:
    """So many connections at once, on each of which then one request is sent."""
    with ExitStack() as opened:
        connections = []
        for _ in range(count):
            connection = opened.enter_context(socket.socket())
            connection.setblocking(False)
            connection.connect_ex(server.place)
            connections.append(connection)
        statuses = []
        for connection in connections:
            connection.settimeout(LONG)
            with suppress(ConnectionError):
                connection.sendall(_GET)
            try:
                statuses.append(status_of(connection.recv(12, socket.MSG_WAITALL)))
            except ConnectionError:
                statuses.append(0)
    return seen(statuses)
