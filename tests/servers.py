"""`penstock serve` in a process of its own, and a client that does as little as it can."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

import forks
from streams import LONG

SETTINGS = {"device": "cpu", "dtype": "float32", "device_memory": "600MiB", "max_sequences": 4}
"""Of an LLM that says what is right."""
FLAGS = (
    "--device",
    "cpu",
    "--dtype",
    "float32",
    "--device-memory",
    "600MiB",
    "--max-sequences",
    "4",
    "--queue",
    "3",
)
ROOM = 4 + 3
"""Outputs that such a server takes."""
STORY, TALK = "Once upon a time", [{"role": "user", "content": "Tell me a story about a boat."}]
COUNT = 12
"""Tokens of most answers."""
ENDLESS = {"model": "shipped", "prompt": "The sea", "max_tokens": 20_000, "ignore_eos": True, "stream": True}
HEAD = "Host: localhost\r\nContent-Type: application/json\r\n"
"""Of a request that is written out."""
RAW_HEAD = HEAD.encode()
Answer = tuple[int, Mapping[str, str], Any]
S = TypeVar("S", bound="Server")


class Server:
    """The command, started at once; what it says on stderr is in a file."""

    python: Sequence[str] = ("-m", "penstock")
    popen: type["subprocess.Popen[bytes]"] = forks.LoadedPopen

    def __init__(self, log: Path, *flags: str, environment: Mapping[str, str] | None = None) -> None:
        self.log = log
        with log.open("wb") as file:
            self.process = self.popen(
                [sys.executable, *self.python, "serve", *flags],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=file,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
            )

    def said(self) -> str:
        return self.log.read_text()

    def wait(self, seconds: float = 3 * LONG) -> "Server":
        """Until it serves."""
        until(
            lambda: (
                self.process.poll() is not None
                or re.search(r"^serving \S+ at http\S+\n", self.said(), re.MULTILINE)
            ),
            seconds,
        )
        assert self.process.poll() is None, self.said()
        found = re.search(r"^serving (\S+) at (http\S+)\n", self.said(), re.MULTILINE)
        assert found is not None
        self.name, self.url = found.groups()
        return self

    def connection(self) -> http.client.HTTPConnection:
        place = urlsplit(self.url)
        return http.client.HTTPConnection(place.hostname or "", place.port, timeout=LONG)

    def ask(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Status, headers and body, read as JSON where it is. body: bytes, or what JSON can hold."""
        connection = self.connection()
        try:
            raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            kind = {} if raw is None else {"Content-Type": "application/json"}
            connection.request(method, path, raw, kind | dict(headers or {}))
            answer = connection.getresponse()
            said = answer.read()
            kind = answer.headers.get("content-type", "")
            return answer.status, answer.headers, json.loads(said) if kind == "application/json" else said
        finally:
            connection.close()

    def complete(self, **fields: Any) -> Answer:
        usual = {"model": "shipped", "prompt": STORY, "max_tokens": COUNT, "temperature": 0}
        return self.ask("POST", "/v1/completions", usual | fields)

    def insist(self, body: Any) -> Answer:
        """A whole completion, whatever is there before it."""
        while (answer := self.ask("POST", "/v1/completions", body))[0] == 429:
            time.sleep(0.001)
        return answer

    def signal(self, which: signal.Signals) -> None:
        self.process.send_signal(which)

    def ended(self) -> int:
        return self.process.wait(LONG)


def until(happens: Callable[[], object], seconds: float = LONG) -> None:
    late = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < late, "it does not happen"
        time.sleep(0.01)


@contextmanager
def serving(folder: Path, *flags: str, environment: Mapping[str, str] | None = None) -> Iterator[Server]:
    with ending(Server(folder / "said.txt", *flags, environment=environment)) as server:
        yield server


@contextmanager
def ending(server: S) -> Iterator[S]:
    """Whatever happens to it."""
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
        server.process.wait()


class Stream:
    """A completion that is being streamed to a client that reads when it likes."""

    def __init__(
        self, server: Server, body: Mapping[str, Any] = ENDLESS, path: str = "/v1/completions"
    ) -> None:
        self._connection = server.connection()
        try:
            self._connection.request(
                "POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            self._answer = self._connection.getresponse()
        except BaseException:
            self._connection.close()
            raise
        self.status = self._answer.status

    def event(self) -> Any:
        """The next one; None when it is the last, or there is none."""
        while line := self._answer.readline():
            if line.startswith(b"data: "):
                return None if line == b"data: [DONE]\n" else json.loads(line.removeprefix(b"data: "))
        return None

    def events(self) -> list[Any]:
        return list(iter(self.event, None))

    def close(self) -> None:
        self._answer.close()
        self._connection.close()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def counted(server: Server) -> dict[tuple[str, ...], float]:
    """Each sample by its name and the values of its labels."""
    status, headers, said = server.ask("GET", "/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    families = text_string_to_metric_families(said.decode())
    return {
        (one.name.removeprefix("penstock:"), *one.labels.values()): one.value
        for family in families
        for one in family.samples
    }
