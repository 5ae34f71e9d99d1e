"""Two keys of one server: neither finds what the other has sent, nor comes back to what it was answered. Over
sockets."""

import asyncio
import json
import re
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

pytest.importorskip("uvicorn", reason="needs the extra `serve`")

from penstock import LLM, SamplingParams
from penstock.api.text.tokenizer import Tokenizer
from penstock.base.errors import LengthError
from penstock.cli.main import main
from penstock.server.broker.backend import LocalBackend
from penstock.server.broker.broker import RequestBroker
from penstock.server.broker.calls import Call, DeadlineError
from penstock.server.broker.metrics import Metrics
from penstock.server.http import keys as tenants
from penstock.server.http.keys import RefusalThrottle
from servers import ENDLESS, FLAGS, SETTINGS, Server, ending, serving
from speakers import shallow
from streams import LONG

ONE, TWO = "the first key", "the second key"
PROMPT = "Once there was a very small boat, and nobody knew where it came from. " * 12


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from served(tmp_path_factory.mktemp("own"), "--allow-runtime-lora-updating")


@pytest.fixture(scope="module")
def sharing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from served(tmp_path_factory.mktemp("shared"), "--share-prefixes")


def served(folder: Path, *flags: str) -> Iterator[Server]:
    (folder / "keys.txt").write_text(f"{ONE}\n{TWO}\n")
    model, keys = str(shallow(folder / "shipped")), str(folder / "keys.txt")
    with serving(folder, model, "--port", "0", "--api-keys", keys, *flags, *FLAGS) as server:
        yield server.wait()
        server.signal(signal.SIGTERM)
        assert server.ended() == 0
        assert "Traceback" not in server.said()


def asked(
    server: Server, key: str, path: str, method: str = "POST", **body: object
) -> tuple[int, dict[str, Any]]:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    data = json.dumps(body).encode() if body else None
    try:
        with urllib.request.urlopen(
            urllib.request.Request(server.url + path, data, headers, method=method), timeout=LONG
        ) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def cached(server: Server, key: str, prompt: str, **more: object) -> int:
    body = {"model": "shipped", "prompt": prompt, "max_tokens": 1, "temperature": 0} | more
    status, found = asked(server, key, "/v1/completions", **body)
    assert status == 200, found
    return int(found["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_no_key_of_several_clears_the_cache_or_changes_what_all_ask(server: Server) -> None:
    loads = [f"/v1/{what}load_lora_adapter" for what in ("", "un")]
    for path in ("/reset_prefix_cache", "/sleep", "/wake_up", *loads):
        body = {"lora_name": "a"} | ({"lora_path": "/nowhere"} if path == loads[0] else {})
        status, found = asked(server, ONE, path, **(body if path in loads else {}))
        assert (status, "none of several may" in found["error"]["message"]) == (403, True)
    assert asked(server, ONE, "/is_sleeping", "GET") == (200, {"is_sleeping": False})


def test_a_key_finds_its_own_prefixes_and_no_others(server: Server) -> None:
    prompt = "Mine. " + PROMPT
    assert cached(server, ONE, prompt) == 0
    assert cached(server, TWO, prompt) == 0
    assert (mine := cached(server, ONE, prompt)) > 100
    assert cached(server, TWO, prompt) == mine


def test_a_salt_tells_requests_of_one_key_apart(server: Server) -> None:
    prompt = "Salted. " + PROMPT
    assert cached(server, ONE, prompt, cache_salt="a") == 0
    assert cached(server, ONE, prompt) == 0
    assert cached(server, ONE, prompt, cache_salt="b") == 0
    assert cached(server, TWO, prompt, cache_salt="a") == 0
    assert cached(server, ONE, prompt, cache_salt="a") > 100


def test_responses_are_answered_by_salt_too(server: Server) -> None:
    def found(key: str, **more: object) -> int:
        body = {"model": "shipped", "input": "Answer me. " + PROMPT, "max_output_tokens": 1} | more
        status, response = asked(server, key, "/v1/responses", **body)
        assert status == 200, response
        return int(response["usage"]["input_tokens_details"]["cached_tokens"])

    assert found(ONE, cache_salt="x") == 0
    assert found(TWO) == found(ONE) == 0
    assert found(ONE, cache_salt="x") > 100
    assert found(TWO) > 100


def test_prefixes_are_shared_where_that_is_said(sharing: Server) -> None:
    prompt = "Ours. " + PROMPT
    assert cached(sharing, ONE, prompt) == 0
    assert cached(sharing, TWO, prompt) > 100
    assert cached(sharing, TWO, prompt, cache_salt="own") == 0


@pytest.mark.parametrize("salt", ["", "x" * 257, 3], ids=["empty", "long", "number"])
def test_what_is_no_salt_is_refused(server: Server, salt: object) -> None:
    status, found = asked(server, ONE, "/v1/completions", model="shipped", prompt="a", cache_salt=salt)
    assert status == 400
    assert "cache_salt" in found["error"]["message"]


def test_a_response_is_its_key_s(server: Server) -> None:
    status, mine = asked(server, ONE, "/v1/responses", model="shipped", input="Hello", max_output_tokens=4)
    assert status == 200
    there = f"/v1/responses/{mine['id']}"
    answers = [
        asked(server, TWO, there, "GET"),
        asked(server, TWO, there, "DELETE"),
        asked(
            server,
            TWO,
            "/v1/responses",
            model="shipped",
            input="Go on",
            previous_response_id=mine["id"],
            max_output_tokens=4,
        ),
    ]
    assert [status for status, _ in answers] == [404] * 3
    # As of one that never was: nothing tells that it is there.
    unknown = f"resp_{'0' * (len(mine['id']) - 5)}"
    _, never = asked(server, TWO, f"/v1/responses/{unknown}", "GET")
    assert answers[0][1]["error"]["message"].replace(mine["id"], "") == never["error"]["message"].replace(
        unknown, ""
    )
    assert asked(server, ONE, there, "GET") == (200, mine)
    status, more = asked(
        server,
        ONE,
        "/v1/responses",
        model="shipped",
        input="Go on",
        previous_response_id=mine["id"],
        max_output_tokens=4,
    )
    assert status == 200
    assert more["previous_response_id"] == mine["id"]
    assert asked(server, ONE, there, "DELETE")[0] == 200
    assert asked(server, ONE, there, "GET")[0] == 404


def streamed(server: Server, key: str, **more: object) -> socket.socket:
    """A connection on which an answer has begun that does not end."""
    place = urlsplit(server.url)
    connection = socket.create_connection((place.hostname, place.port), LONG)
    body = json.dumps(ENDLESS | more).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\nContent-Type: "
        "application/json\r\n"
    )
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return connection


def test_one_key_cannot_have_all_there_is(server: Server) -> None:
    """Of four outputs at once and three that wait, each has three."""
    right = asked(
        server, TWO, "/v1/completions", model="shipped", prompt=PROMPT, max_tokens=8, temperature=0
    )[1]["choices"][0]["text"]
    with ExitStack() as opened:
        begun = [opened.enter_context(closing(streamed(server, ONE))) for _ in range(3)]
        assert [connection.recv(12, socket.MSG_WAITALL) for connection in begun] == [b"HTTP/1.1 200"] * 3
        status, found = asked(server, ONE, "/v1/completions", model="shipped", prompt="a", max_tokens=1)
        assert (status, found["error"]["code"]) == (429, "queue_full")
        assert "of this key" in found["error"]["message"]
        for _ in range(3):
            status, found = asked(
                server, TWO, "/v1/completions", model="shipped", prompt=PROMPT, max_tokens=8, temperature=0
            )
            assert (status, found["choices"][0]["text"]) == (200, right)
    status, found = asked(server, ONE, "/v1/completions", model="shipped", prompt="a", max_tokens=1, n=4)
    assert (status, found["error"]["param"]) == (400, "n")
    assert "at most 3 at a time" in found["error"]["message"]


def test_keys_come_in_turns() -> None:
    """Whoever has asked for more before; and nobody has more than three quarters of what is computed at a
    time."""
    order: list[bytes] = []
    most = 0

    sent = threading.Event()

    class Noting(LocalBackend):
        def drive(self, *given: Any) -> None:
            assert sent.wait(LONG)  # All are there when the first is begun.
            super().drive(*given)

        def _begin(self, call: Call, *rest: Any) -> None:
            nonlocal most
            super()._begin(call, *rest)
            order.append(call.owner)
            most = max(most, *self._running.values())

    async def ask(llm: LLM) -> None:
        backend = Noting(llm)
        broker = RequestBroker(backend, Metrics(), queue=60, keys=5)
        ready = llm.reader.read("The sea", SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
        calls = [broker.submit([ready], owner=b"much")[0] for _ in range(16)]
        calls += [
            broker.submit([ready], owner=owner)[0]
            for _ in range(3)
            for owner in (b"little", b"less", b"few", b"none")
        ]
        sent.set()
        texts = {(await call.completion()).text for call in calls}
        await broker.close(LONG)
        assert len(texts) == 1
        assert not +backend._running
        assert not broker._of_key

    with LLM(**SETTINGS) as llm:
        asyncio.run(ask(llm))
    assert most == 3
    assert len(order) == 28
    assert max(at for at, owner in enumerate(order) if owner != b"much") < 18


def test_a_timeout_runs_from_arrival(tmp_path: Path) -> None:
    """Also while a request waits to be read, on a thread, and then it is not computed."""
    slow = (
        "import sys, time; import penstock.server.http.app as app; read = app.read\n"
        "def slowly(*given): time.sleep(1.5); return read(*given)\n"
        "app.read = slowly\n"
        "from penstock.cli.main import main; sys.exit(main())"
    )

    class Slow(Server):
        python = ("-c", slow)

    server = Slow(tmp_path / "log", "--port", "0", *FLAGS)
    try:
        server.wait()
        begin = time.monotonic()
        status, found = asked(
            server, "", "/v1/completions", model="shipped", prompt="a " * 600, max_tokens=1, timeout=0.3
        )
        assert (status, found["error"]["code"]) == (504, "deadline_exceeded")
        assert time.monotonic() - begin < 1.4
        assert (
            asked(server, "", "/v1/completions", model="shipped", prompt="a", max_tokens=1, timeout=60)[0]
            == 200
        )
    finally:
        server.process.kill()
        server.process.wait()


def test_a_deadline_runs_from_arrival_at_the_desk_too() -> None:
    """Its time was over before: it would last an hour otherwise, and is answered in seconds."""

    async def ask(llm: LLM) -> None:
        broker = RequestBroker(LocalBackend(llm), Metrics(), queue=3)
        ready = llm.reader.read("The sea", SamplingParams(temperature=0, max_tokens=64, ignore_eos=True))
        [late] = broker.submit([ready], 3600.0, time.monotonic() - 7200)
        with pytest.raises(DeadlineError):
            await late.completion()
        [early] = broker.submit([ready], 3600.0, time.monotonic() - 1)
        assert (await early.completion()).text
        await broker.close(LONG)

    with LLM(**SETTINGS) as llm:
        asyncio.run(ask(llm))


def test_a_deadline_runs_while_the_body_comes(server: Server) -> None:
    """Of which the last part comes when its time is over: it is not computed, however short it is."""
    place = urlsplit(server.url)
    for pause, timeout, status in ((1.5, 1.2, b"504"), (0.0, 600, b"200")):
        body = json.dumps({"model": "shipped", "prompt": "a", "max_tokens": 1, "timeout": timeout}).encode()
        with socket.create_connection((place.hostname, place.port), LONG) as connection:
            connection.sendall(
                f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {ONE}\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
                + body[:-1]
            )
            time.sleep(pause)
            connection.sendall(body[-1:])
            assert connection.recv(12, socket.MSG_WAITALL)[9:] == status


BOMBS = {
    "elements": (
        b'"chat_template_kwargs": {"a": [[]' + b",[]" * 4_000_000 + b"]}",
        "send several smaller ones",
    ),
    "values": (b'"chat_template_kwargs": {"a": [[]' + b",[]" * 100_000 + b"]}", "100,000 values"),
    "numbers": (b'"chat_template_kwargs": {"a": [0' + b",0" * 100_000 + b"]}", "100,000 values"),
    "bytes": (b'"chat_template_kwargs": {"a": "' + b"x" * (1 << 20) + b'y"}', "1,048,576 characters"),
    "names": (b'"chat_template_kwargs": {"' + b"x" * (1 << 20) + b'y": 1}', "1,048,576 characters"),
    "biases": (
        b'"logit_bias": {"0": 1' + b"".join(b',"%d": 1' % at for at in range(1, 4097)) + b"}",
        "logit_bias has 4097 tokens",
    ),
    "stops": (b'"stop_token_ids": [0' + b",0" * 4096 + b"]", "stop_token_ids has 4097 tokens"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_what_takes_long_for_a_template_or_the_loop_is_refused(server: Server, name: str) -> None:
    more, said = BOMBS[name]
    begin = time.monotonic()
    status, found = sent(server, ONE, more)
    assert status == 400
    assert said in found["error"]["message"]
    assert time.monotonic() < begin + 10


def sent(server: Server, key: str, more: bytes) -> tuple[int, dict[str, Any]]:
    body = (
        b'{"model": "shipped", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}], '
        + more
        + b"}"
    )
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(server.url + "/v1/chat/completions", body, headers), timeout=LONG
        ) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_what_a_template_may_be_sent_is_sent(server: Server) -> None:
    """At its bounds, in a second or two, and so is a large request of another key meanwhile."""
    with ThreadPoolExecutor(4) as pool:
        most = b'"chat_template_kwargs": {"a": [[]' + b",[]" * 99_900 + b"]}"
        asked = [pool.submit(sent, server, ONE, most) for _ in range(3)]
        begin = time.monotonic()
        status, _ = sent(server, TWO, b'"chat_template_kwargs": {"a": "' + b"x" * 100_000 + b'"}')
        took = time.monotonic() - begin
        assert [one.result()[0] for one in asked] == [200] * 3
    assert status == 200
    assert took < 15


def test_who_has_gone_leaves_its_place_among_large_requests(tmp_path: Path) -> None:
    """What is read of it ends, and what waits is not read at all."""
    slow = (
        "import sys, time; import penstock.server.http.app as app; read = app.read\n"
        "from penstock.base.wanted import expect_wanted\n"
        "def slowly(llm, asked, *given):\n"
        "    while asked.user and asked.user[0] == 's': expect_wanted(); time.sleep(0.01)\n"
        "    return read(llm, asked, *given)\n"
        "app.read = slowly\n"
        "from penstock.cli.main import main; sys.exit(main())"
    )

    class Slow(Server):
        python = ("-c", slow)

    server = Slow(tmp_path / "log", "--port", "0", *FLAGS)
    try:
        place = urlsplit(server.wait().url)
        for _ in range(3):
            body = json.dumps({"model": "shipped", "prompt": "a", "user": "s" * 100_000}).encode()
            with socket.create_connection((place.hostname, place.port), LONG) as connection:
                connection.sendall(
                    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                    b"Content-Length: %d\r\n\r\n" % len(body) + body
                )
                time.sleep(0.3)
        status, _ = asked(
            server, "", "/v1/completions", model="shipped", prompt="a", max_tokens=1, user="u" * 100_000
        )
        assert status == 200
    finally:
        server.process.kill()
        server.process.wait()


class Hasty(Server):
    """With the same seconds for the connection and for the body, as they are, but fewer of them."""

    python = (
        "-c",
        "import sys; import penstock.server.http.uploads as u, penstock.server.http.connection as c; "
        "u._PATIENCE = c._LOOK = 1.0; from penstock.cli.main import main; sys.exit(main())",
    )


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hasty]:
    with ending(Hasty(tmp_path_factory.mktemp("hasty") / "log", "--port", "0", *FLAGS)) as server:
        yield server.wait()
        assert "Traceback" not in server.said()


@pytest.mark.parametrize("begun", [b"", b"{", b"{" * 40_000])
def test_a_client_that_stalls_is_told(hasty: Hasty, begun: bytes) -> None:
    """All of several at once."""
    place = urlsplit(hasty.url)
    question = (
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: 1000000\r\n\r\n"
    )
    with ExitStack() as opened:
        connections = [
            opened.enter_context(socket.create_connection((place.hostname, place.port), LONG))
            for _ in range(4)
        ]
        for connection in connections:
            connection.sendall(question + begun)
        for connection in connections:
            answer = b""
            while part := connection.recv(1 << 16):
                answer += part
            assert answer.startswith(b"HTTP/1.1 408")
            assert answer.count(b"HTTP/1.1") == 1
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]


def test_a_body_that_stalls_ends(tmp_path: Path) -> None:
    class Hasty(Server):
        python = (
            "-c",
            "import sys; import penstock.server.http.uploads as u; u._PATIENCE = 0.5; from penstock.cli.main "
            "import main; sys.exit(main())",
        )

    server = Hasty(tmp_path / "log", "--port", "0", *FLAGS)
    try:
        place = urlsplit(server.wait().url)
        with socket.create_connection((place.hostname, place.port), LONG) as connection:
            connection.sendall(
                b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
                b"application/json\r\nContent-Length: 100\r\n\r\n{"
            )
            answer = b""
            while part := connection.recv(1 << 16):
                answer += part
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"send it faster" in answer
        # The connection itself ends such a body after 30 seconds.
        took = re.search(rb"came in (\d+) seconds", answer)
        assert took is not None
        assert int(took[1]) < 20
    finally:
        server.process.kill()
        server.process.wait()


def test_what_cannot_fit_is_not_cut_into_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirty megabytes would take a minute."""
    with LLM(**SETTINGS) as llm:
        assert len(llm.reader.encode("word " * 1000)) >= 1000

        def cut(*given: object, **more: object) -> list[int]:
            raise AssertionError("cut into tokens")

        monkeypatch.setattr(Tokenizer, "encode", cut)
        for ask in (llm.reader.encode, llm.reader.read):
            with pytest.raises(LengthError, match=r"has at least [0-9]+ tokens of prompt"):
                ask("word " * 6_000_000)
        with pytest.raises(LengthError):
            llm.reader.read([{"role": "user", "content": "word " * 1_000_000}])


def test_priority_goes_as_far_as_a_key_is_granted(tmp_path: Path) -> None:
    (tmp_path / "keys.txt").write_text(f"{ONE}\n{TWO}\tpriority=-5\n")
    with serving(tmp_path, "--port", "0", "--api-keys", str(tmp_path / "keys.txt"), *FLAGS) as server:
        server.wait()
        for key, priority, status in (
            (ONE, 0, 200),
            (ONE, 3, 200),
            (ONE, -1, 400),
            (TWO, -5, 200),
            (TWO, -6, 400),
        ):
            for path, prompt in (("/v1/completions", {"prompt": "a"}), ("/v1/responses", {"input": "a"})):
                answered, found = asked(server, key, path, model="shipped", priority=priority, **prompt)
                assert answered == status, found
                assert status == 200 or found["error"]["param"] == "priority"


@pytest.mark.parametrize("line", ["\tpriority=-5", "  \t priority=-5"])
def test_a_line_without_a_key_is_refused(
    tmp_path: Path, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where there is only what stands behind one, which made every client's key right that sent none."""
    (tmp_path / "keys.txt").write_text(f"{ONE}\n\n{line}\n")
    assert main(["serve", "--port", "0", "--api-keys", str(tmp_path / "keys.txt")]) == 2
    assert "line 3 of" in capsys.readouterr().err


@pytest.mark.parametrize("behind", ["priority=high", "owner", "priority=-5 x", "priority=" + "9" * 30])
def test_what_stands_behind_a_key_is_read_or_refused(
    tmp_path: Path, behind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "keys.txt").write_text(f"{ONE}\t{behind}\n")
    assert main(["serve", "--port", "0", "--api-keys", str(tmp_path / "keys.txt")]) == 2
    assert "write priority=NUMBER" in capsys.readouterr().err


def test_a_key_that_is_refused_again_and_again_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another does not, and neither does who is refused now and then."""
    monkeypatch.setattr(tenants, "LONGEST", 0.5)

    async def waits() -> tuple[list[float], float, float]:
        refusals, loop = RefusalThrottle(), asyncio.get_running_loop()

        async def turn(owner: bytes) -> float:
            begin = loop.time()
            await refusals.turn(owner)
            return loop.time() - begin

        many = [asyncio.ensure_future(turn(b"much")) for _ in range(60)]
        await asyncio.sleep(0)
        other = await turn(b"little")
        took = await asyncio.gather(*many)
        await asyncio.sleep(0.6)
        return list(took), other, await turn(b"much")

    took, other, later = asyncio.run(waits())
    assert took[0] < 0.01 > other
    assert later < 0.01
    assert all(one >= 0.019 * place for place, one in enumerate(took[:20]))
    assert max(took) < 5


def test_who_is_refused_a_hundred_times_is_told_in_two_seconds(server: Server) -> None:
    begin = time.monotonic()
    with ThreadPoolExecutor(10) as pool:
        found = list(
            pool.map(
                lambda _: asked(server, ONE, "/v1/completions", model="other", prompt="a")[0], range(100)
            )
        )
    assert found == [404] * 100
    assert time.monotonic() - begin > 1.9
