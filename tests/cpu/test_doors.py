"""Who may ask a server without keys: nobody's page but its own, by no name but its own. Over sockets, with
what browsers send."""

import json
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

pytest.importorskip("uvicorn", reason="needs the extra `serve`")

from servers import FLAGS, Server, serving
from streams import LONG

KEY = "a key of this server"
ASKED = json.dumps({"model": "shipped", "prompt": "The sea", "max_tokens": 2, "temperature": 0}).encode()
JSON = ("Content-Type", "application/json")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(
        tmp_path_factory.mktemp("server"), "--port", "0", "--allow-host", "Models.Example.org", *FLAGS
    ) as server:
        yield server.wait()
        server.signal(signal.SIGTERM)
        assert server.ended() == 0
        assert "Traceback" not in server.said()


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("keyed")
    (folder / "keys.txt").write_text(KEY)
    with serving(folder, "--port", "0", "--api-keys", str(folder / "keys.txt"), *FLAGS) as server:
        yield server.wait()


def sent(
    server: Server, head: str, *headers: tuple[str, str], body: bytes = b""
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of a request that is written as it stands, with no header but these and the
    body's length."""
    place = urlsplit(server.url)
    with socket.create_connection((place.hostname, place.port), LONG) as connection:
        lines = [
            f"{head} HTTP/1.1",
            *(f"{name}: {value}" for name, value in headers),
            f"Content-Length: {len(body)}",
            "Connection: close",
        ]
        connection.sendall("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
        answer = b""
        while part := connection.recv(1 << 16):
            answer += part
    start, _, rest = answer.partition(b"\r\n\r\n")
    status, *told = start.decode("latin-1").split("\r\n")
    return (
        int(status.split()[1]),
        {name.lower(): value for name, _, value in (line.partition(": ") for line in told)},
        rest,
    )


def own(server: Server) -> str:
    return urlsplit(server.url).netloc


def completed(server: Server, *headers: tuple[str, str], host: str = "", body: bytes = ASKED) -> int:
    return sent(server, "POST /v1/completions", ("Host", host or own(server)), *headers, body=body)[0]


@pytest.mark.parametrize(
    "name",
    [
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "a" * 300,
        "0x7f.1",
    ],
)
@pytest.mark.parametrize(
    "path", ["/", "/state", "/experts", "/metrics", "/health", "/v1/models", "/openapi.json", "/nowhere"]
)
def test_a_rebound_name_reads_nothing(server: Server, name: str, path: str) -> None:
    status, _, said = sent(server, f"GET {path}", ("Host", name))
    assert status == 421
    assert b"--allow-host" in said
    assert b"penstock" not in said
    assert completed(server, JSON, host=name) == 421


@pytest.mark.parametrize(
    "name",
    [
        "127.0.0.1",
        "127.0.0.1:{port}",
        "LocalHost:{port}",
        "localhost.",
        "[::1]:{port}",
        "10.1.2.3",
        "models.example.org",
        "MODELS.example.org.:81",
    ],
)
def test_the_machines_own_names_are_answered(server: Server, name: str) -> None:
    host = name.format(port=urlsplit(server.url).port)
    assert sent(server, "GET /v1/models", ("Host", host))[0] == 200
    assert completed(server, JSON, host=host) == 200


@pytest.mark.parametrize(
    "hosts",
    [
        [],
        ["127.0.0.1", "127.0.0.1"],
        ["127.0.0.1", "evil.example"],
        ["evil.example", "127.0.0.1"],
        [""],
        ["a b"],
        ["a@127.0.0.1"],
        ["127.0.0.1/x"],
    ],
)
def test_a_request_has_one_host(server: Server, keyed: Server, hosts: list[str]) -> None:
    for one in (server, keyed):
        assert (
            sent(
                one, "GET /v1/models", *(("Host", host) for host in hosts), ("Authorization", f"Bearer {KEY}")
            )[0]
            == 400
        )


@pytest.mark.parametrize(
    "headers",
    [
        [("Origin", "https://evil.example")],
        [("Origin", "null")],
        [("Origin", "http://127.0.0.1:1")],
        [("Origin", "http://localhost.evil.example")],
        [("Origin", "http://[")],
        [("Origin", "")],
        [("Sec-Fetch-Site", "cross-site")],
        [("Origin", "{own}"), ("Sec-Fetch-Site", "cross-site")],
        [("Origin", "{own}"), ("Origin", "https://evil.example")],
    ],
)
def test_another_sites_page_changes_nothing(server: Server, headers: list[tuple[str, str]]) -> None:
    said = [(name, value.format(own=server.url)) for name, value in headers]
    assert completed(server, JSON, *said) == 403
    assert sent(server, "DELETE /v1/responses/resp_1", ("Host", own(server)), *said)[0] == 403
    assert (
        sent(server, "POST /tokenize", ("Host", own(server)), JSON, *said, body=b'{"prompt": "a"}')[0] == 403
    )


def test_the_servers_own_page_and_programs_are_served(server: Server) -> None:
    assert completed(server, JSON, ("Origin", server.url), ("Sec-Fetch-Site", "same-origin")) == 200
    assert completed(server, JSON, ("Sec-Fetch-Site", "none")) == 200
    assert completed(server, JSON) == 200


def test_a_key_opens_what_names_and_origins_would_not(keyed: Server) -> None:
    key = ("Authorization", f"Bearer {KEY}")
    assert completed(keyed, JSON, key, ("Origin", "https://app.example"), host="models.example") == 200
    assert completed(keyed, JSON, ("Origin", "https://app.example"), host="models.example") == 401


@pytest.mark.parametrize(
    "kind",
    [
        None,
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "text/json",
        "application/jsonp",
        "application/json, text/plain",
        "x application/json",
        "",
    ],
)
def test_only_what_is_declared_as_json_is_read(server: Server, keyed: Server, kind: str | None) -> None:
    headers = [] if kind is None else [("Content-Type", kind)]
    for one in (server, keyed):
        assert completed(one, *headers, ("Authorization", f"Bearer {KEY}")) == 415
    assert completed(server, JSON, *headers) == 415 or kind is None


@pytest.mark.parametrize(
    "kind",
    ["application/json", "Application/JSON; charset=utf-8", "application/json;", "application/vnd.api+json"],
)
def test_however_json_is_declared(server: Server, kind: str) -> None:
    assert completed(server, ("Content-Type", kind)) == 200


def test_nobody_is_sent_where_the_host_header_says(keyed: Server) -> None:
    """A path with a slash too many is not there; it is no redirect."""
    for path in ("/v1/models/", "/state/", "/health/", "//evil.example/", "/tokenize/"):
        status, headers, _ = sent(
            keyed, f"GET {path}", ("Host", "evil.example"), ("Authorization", f"Bearer {KEY}")
        )
        assert status in (404, 405)
        assert "location" not in headers


def test_no_answer_is_for_another_origins_page(server: Server, keyed: Server) -> None:
    """Neither may be used or shown there, whatever it is."""
    paths = (
        "/",
        "/page/page.js",
        "/state",
        "/experts",
        "/metrics",
        "/health",
        "/v1/models/shipped",
        "/v1/completions",
        "/nowhere",
    )
    for one in (server, keyed):
        for path in paths:
            for host in (own(one), "evil.example"):
                _, headers, _ = sent(one, f"GET {path}", ("Host", host))
                assert headers["cross-origin-resource-policy"] == "same-origin"
                assert headers["x-frame-options"] == "DENY"
                assert headers["x-content-type-options"] == "nosniff"


def test_nothing_waits_behind_what_is_refused(server: Server) -> None:
    """A page that sends as much as it can starts nothing."""
    for _ in range(200):
        assert completed(server, ("Content-Type", "text/plain"), ("Origin", "https://evil.example")) == 403
    waiting = json.loads(sent(server, "GET /state", ("Host", own(server)))[2])
    assert waiting["running"] == waiting["waiting"] == 0


def test_everywhere_needs_keys_or_to_be_said_twice(tmp_path: Path) -> None:
    with serving(tmp_path, "--port", "0", "--host", "0.0.0.0", *FLAGS) as server:
        assert server.ended() == 2
    assert "--api-keys" in server.said()
    assert "--without-keys" in server.said()
    with serving(tmp_path, "--port", "0", "--host", "0.0.0.0", "--without-keys", *FLAGS) as server:
        server.wait()
        assert sent(server, "GET /v1/models", ("Host", "127.0.0.1"))[0] == 200
