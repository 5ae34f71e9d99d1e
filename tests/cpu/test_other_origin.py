"""What a page of another origin can do to a server, in a browser: read nothing of it, and have it compute
nothing."""

import base64
import hashlib
import http.client
import json
import re
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

pytest.importorskip("uvicorn", reason="needs the extra `serve`")

from browsers import LONG, Browser, browsing, until
from servers import COUNT, FLAGS, Answer, Server, counted, ending

KEY, OWNER = "a key of this server", "the-owners"
PAGE = Path(__file__).with_name("other_origin.js")
WAYS = {
    "asking": (
        *(
            "fetch",
            "fetch with credentials",
            "fetch without CORS",
            "fetch sent on",
            "XMLHttpRequest",
            "EventSource",
            "WebSocket",
        ),
        *("script", "module", "stylesheet", "prefetch", "preload", "img", "object", "iframe", "window"),
    ),
    "posting": (
        *(
            "form, text/plain",
            "form, urlencoded",
            "form, multipart",
            "form in a window",
            "form sent on",
            "form in a sandbox",
        ),
        *(
            "fetch of text",
            "fetch of text without CORS",
            "fetch of text without a referrer",
            "fetch of text sent on",
        ),
        *(
            "fetch of a blob without CORS",
            "fetch of JSON without CORS",
            "fetch that stays alive",
            "XMLHttpRequest of text",
        ),
        *("beacon", "ping", "report"),
    ),
    # What a browser asks another origin's server for first:
    "permitted": (
        *(
            "fetch of JSON",
            "fetch of a JSON blob",
            "fetch with a key",
            "fetch of text with a key",
            "XMLHttpRequest of JSON",
        ),
        *("beacon of JSON", "deletion"),
    ),
}
"""Of trying it, as the page names them."""
ALL = {way for ways in WAYS.values() for way in ways}
BLIND = {"form in a sandbox", "beacon", "ping", "report", "beacon of JSON"}
"""These read nothing of any server."""
SHARED = {
    *(
        "fetch",
        "fetch with credentials",
        "fetch sent on",
        "XMLHttpRequest",
        "EventSource",
        "WebSocket",
        "script",
        "module",
        "stylesheet",
    ),
    *("prefetch", "preload", "img", "object", "fetch of text", "XMLHttpRequest of text", *WAYS["permitted"]),
} - BLIND
"""These read what a server lets other origins read."""
PATHS = (
    "/",
    "/page/page.js",
    "/page/page.css",
    "/page/icon.svg",
    "/v1/models",
    "/v1/models/shipped",
    "/state",
    "/experts",
    "/metrics",
    "/health",
)
OPEN = {"/", "/page/page.js", "/page/page.css", "/page/icon.svg", "/health"}
"""Of these, what needs no key."""
MUCH = {"model": "shipped", "max_tokens": 60, "n": 4, "ignore_eos": True}
BODIES = {
    "/v1/completions": MUCH | {"prompt": "The sea", "user": "somebody"},
    "/v1/chat/completions": MUCH | {"messages": [{"role": "user", "content": "The sea"}], "user": "somebody"},
    "/v1/responses": {"model": "shipped", "max_output_tokens": 60, "input": "The sea"},
    "/tokenize": {"prompt": "The sea"},
}


class Elsewhere(ThreadingHTTPServer):
    """Somebody else's server: with the page that attacks, and beside it answers that everybody may read.

    hands_on: the host and port to which everything but that page is sent instead. without: headers that are
    left out then.
    """

    daemon_threads = True

    def __init__(self, place: tuple[str, int], hands_on: str = "", without: tuple[str, ...] = ()) -> None:
        super().__init__(place, _Handler)
        self.hands_on, self.without = hands_on, without
        self.came: list[tuple[str, str]] = []
        """Methods and paths."""

    def awaits(self, wanted: set[tuple[str, str]]) -> None:
        until(lambda: wanted <= {*self.came})


class _Handler(BaseHTTPRequestHandler):
    server: Elsewhere

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path, asked = urlsplit(self.path).path, parse_qs(urlsplit(self.path).query)
        if path == "/attack":
            report = (
                {"Content-Security-Policy-Report-Only": f"script-src 'none'; report-uri {asked['report'][0]}"}
                if asked
                else {}
            )
            self.say(
                200, "text/html", b"<!doctype html><body><script src=/attack.js></script></body>", report
            )
        elif path == "/attack.js":
            self.say(200, "text/javascript", PAGE.read_bytes())
        elif path == "/sent-on":
            self.say(307, "text/plain", b"", {"Location": asked["to"][0], **self.permission()})
        elif self.server.hands_on:
            self.hand_on(body)
        else:
            self.server.came.append((self.command, path))
            self.please()

    do_GET = do_POST = do_DELETE = do_OPTIONS = answer

    def say(self, status: int, kind: str, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response_only(status)
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def permission(self) -> dict[str, str]:
        return {
            "Access-Control-Allow-Origin": self.headers.get("Origin", "*"),
            "Access-Control-Allow-Credentials": "true",
            "Access-Control-Allow-Methods": "GET, POST, DELETE",
            "Access-Control-Allow-Headers": self.headers.get("Access-Control-Request-Headers", ""),
        }

    def please(self) -> None:
        """Answer with what is looked for."""
        if key := self.headers.get("Sec-WebSocket-Key"):
            accepted = base64.b64encode(
                hashlib.sha1((key + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11").encode()).digest()
            ).decode()
            head = (
                "HTTP/1.1 101 On\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: "
                f"{accepted}\r\n\r\n"
            )
            self.wfile.write(head.encode() + b"\x81\x05heron")
        elif "text/event-stream" in self.headers.get("Accept", ""):
            self.say(200, "text/event-stream", b"data: heron\n\n", self.permission())
        else:
            kind, said = {
                "script": ("text/javascript", b"window.heron = 'heron'; export const heron = 'heron'"),
                "style": ("text/css", b":root { --heron: heron }"),
                "image": (
                    "image/svg+xml",
                    b'<svg xmlns="http://www.w3.org/2000/svg" width="7" height="7"></svg>',
                ),
            }.get(self.headers.get("Sec-Fetch-Dest", ""), ("text/html", b"<p>heron</p>"))
            if self.headers.get("Sec-Fetch-Mode") != "cors":
                said = said.partition(b" export")[0]
            self.say(200, kind, said, self.permission())

    def hand_on(self, body: bytes) -> None:
        connection = http.client.HTTPConnection(self.server.hands_on, timeout=LONG)
        try:
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in self.server.without:
                    connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            told = {
                name: value
                for name, value in answer.headers.items()
                if name.lower() not in ("connection", "transfer-encoding")
            }
            self.say(answer.status, told.pop("content-type", ""), answer.read(), told)
        finally:
            connection.close()

    def log_message(self, format: str, *_: object) -> None:
        pass


@contextmanager
def listening(elsewhere: Elsewhere) -> Iterator[Elsewhere]:
    thread = threading.Thread(target=elsewhere.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield elsewhere
    finally:
        elsewhere.shutdown()
        thread.join()
        elsewhere.server_close()


def port(server: Server | Elsewhere) -> int:
    return server.server_port if isinstance(server, Elsewhere) else urlsplit(server.url).port or 0


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """For whom rebound.example is at 127.0.0.2, and every other name of .example at 127.0.0.1.

    So all pages are this machine's own, and the browser does not keep them from it for being strangers to the
    network.
    """
    names = "--host-resolver-rules=MAP rebound.example 127.0.0.2, MAP *.example 127.0.0.1"
    with browsing(tmp_path_factory.mktemp("browser"), names) as browser:
        yield browser


@pytest.fixture(scope="module")
def elsewhere(browser: Browser) -> Iterator[Elsewhere]:
    with listening(Elsewhere(("127.0.0.1", 0))) as elsewhere:
        yield elsewhere


class Owned(Server):
    """Asked by whoever owns it, who has the key."""

    def ask(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        return super().ask(
            method, path, body, {"Authorization": f"Bearer {KEY}", "X-Request-Id": OWNER, **(headers or {})}
        )

    def answered(self) -> list[tuple[str, int]]:
        """Methods and statuses of all requests that were not the owner's."""
        found = re.findall(
            r"^\S+ \w+ request request_id=(\S+) method=(\S+) .*?\bstatus=(\d+)", self.said(), re.MULTILINE
        )
        return [(method, int(status)) for name, method, status in found if name != OWNER]

    def awaits(self, method: str, least: int, since: int) -> None:
        """Until so many of these are answered."""
        until(lambda: [one for one, _ in self.answered()[since:]].count(method) >= least)


@contextmanager
def owned(folder: Path, key: str = "") -> Iterator[Owned]:
    flags = ("--port", "0", "--log-level", "debug", *FLAGS)
    with ending(Owned(folder / "said.txt", *flags, environment={"PENSTOCK_API_KEYS": key})) as server:
        server.wait()
        yield server
        server.signal(signal.SIGTERM)
        assert server.ended() == 0
        assert "Traceback" not in server.said()


@pytest.fixture(scope="module")
def server(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Owned]:
    with owned(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(scope="module")
def keyed(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Owned]:
    with owned(tmp_path_factory.mktemp("keyed"), KEY) as server:
        yield server


def computed(server: Owned) -> dict[tuple[str, ...], float]:
    """All that is counted but requests, and what the process takes."""
    return {
        name: count
        for name, count in counted(server).items()
        if not name[0].startswith(("http_requests_", "process_"))
    }


def attempt(
    browser: Browser, server: Owned, kind: str, page: str, *roots: str, own: bool = False, key: str = KEY
) -> tuple[dict[str, dict[str, str]], dict[str, set[tuple[str, int]]]]:
    """What a page could read in each way, by address, and methods and statuses of what came to the server.

    Nothing was computed, and the owner is served as before. page: whose it is. roots: by which it knows the
    server. own: whether to the browser the server is the page's own.
    """
    browser.open(f"{page}/attack")
    before, read, came = computed(server), {}, {}
    for way in WAYS[kind]:
        since, urls = len(server.answered()), asked(kind, way, *roots)
        read[way] = tried(browser, way, urls, key)
        first = "OPTIONS" if kind == "permitted" and not own else method(kind, way)
        least = 1 if kind == "asking" else len(urls)  # Browsers keep some pictures.
        server.awaits(first, least, since)
        came[way] = {
            one for one in server.answered()[since:] if kind == "asking" or one[0] != "GET"
        }  # They look for icons.
    assert computed(server) == before
    status, _, said = server.complete()
    assert (status, said["usage"]["completion_tokens"]) == (200, COUNT)
    return {way: texts for way, texts in read.items() if texts}, came


def asked(kind: str, way: str, *roots: str) -> dict[str, str]:
    """What is sent where."""
    if way == "WebSocket":  # Of which a browser lets a page open few at a time.
        return {f"{root}/state": "" for root in roots}
    bodies = (
        dict.fromkeys(PATHS, "")
        if kind == "asking"
        else {path: json.dumps(body) for path, body in BODIES.items()}
    )
    return {root + path: body for root in roots for path, body in bodies.items()}


def method(kind: str, way: str) -> str:
    return "DELETE" if way == "deletion" else "GET" if kind == "asking" else "POST"


def refused(kind: str, status: int) -> dict[str, set[tuple[str, int]]]:
    """What comes to another origin's server, where no request of the kind gets more than this status, and
    none a permission."""
    return {way: {("POST", status) if kind == "posting" else ("OPTIONS", 405)} for way in WAYS[kind]}


def tried(browser: Browser, way: str, urls: Mapping[str, str], key: str = KEY) -> dict[str, str]:
    """What the page that is open could read, by address."""
    return {
        url: text for url, text in browser.run("return attempt(...arguments)", way, urls, key).items() if text
    }


# ---- that what is tried can be found


@pytest.mark.parametrize("path", BODIES)
def test_what_pages_send_would_be_answered(server: Owned, path: str) -> None:
    """Also with a form's `=` in its last text, and a line's end behind it."""
    body = json.dumps(BODIES[path]).encode()
    assert (
        server.ask("POST", path, body)[0]
        == server.ask("POST", path, body[:-2] + b"=" + body[-2:] + b"\r\n")[0]
        == 200
    )


@pytest.mark.parametrize("kind", WAYS)
def test_where_everything_is_allowed_all_comes_and_is_read(
    browser: Browser, elsewhere: Elsewhere, kind: str
) -> None:
    """By a page of that origin, and by one of another."""
    root = f"http://127.0.0.1:{port(elsewhere)}"
    for place, readers in ((root, ALL - BLIND), (f"http://evil.example:{port(elsewhere)}", SHARED)):
        browser.open(f"{place}/attack")
        assert browser.run("return Object.keys(ways)") == [way for ways in WAYS.values() for way in ways]
        for way in WAYS[kind]:
            elsewhere.came.clear()
            urls = asked(kind, way, root)
            assert set(tried(browser, way, urls)) == (urls.keys() if way in readers else set()), way
            wanted = {(method(kind, way), urlsplit(url).path) for url in urls}
            elsewhere.awaits(wanted)


# ---- another origin


@pytest.mark.parametrize(
    ("name", "names"),
    [("evil.example", ("127.0.0.1", "localhost", "0.0.0.0")), ("127.0.0.1", ("127.0.0.1",))],
    ids=["another-site", "another-port"],
)
@pytest.mark.parametrize("kind", WAYS)
def test_a_page_of_another_origin_reads_nothing_and_starts_nothing(
    browser: Browser, elsewhere: Elsewhere, server: Owned, kind: str, name: str, names: tuple[str, ...]
) -> None:
    """name: the page's; to browsers, ports of one name are one site. names: the server's."""
    roots = [f"http://{one}:{port(server)}" for one in names]
    read, came = attempt(browser, server, kind, f"http://{name}:{port(elsewhere)}", *roots)
    assert read == {}
    if kind == "asking":
        assert {method for ones in came.values() for method, _ in ones} == {"GET"}
    else:
        assert came == refused(kind, 403)


@pytest.mark.parametrize("kind", WAYS)
def test_nor_has_it_anything_of_a_server_with_keys(
    browser: Browser, elsewhere: Elsewhere, keyed: Owned, kind: str
) -> None:
    """Not even if it knows one."""
    read, came = attempt(browser, keyed, kind, f"http://evil.example:{port(elsewhere)}", keyed.url)
    assert read == {}
    if kind == "asking":
        assert {method for ones in came.values() for method, _ in ones} == {"GET"}
    else:
        assert came == refused(kind, 401)


@pytest.mark.parametrize(
    ("without", "status"), [(("origin",), 403), (("origin", "sec-fetch-site"), 415)], ids=["site", "nothing"]
)
@pytest.mark.parametrize("kind", ["posting", "permitted"])
def test_a_browser_that_says_less_of_whose_page_it_is_starts_nothing(
    browser: Browser, elsewhere: Elsewhere, server: Owned, kind: str, without: tuple[str, ...], status: int
) -> None:
    """As some did once, and as what stands between may have it."""
    with listening(Elsewhere(("127.0.0.1", 0), urlsplit(server.url).netloc, without)) as between:
        page = f"http://evil.example:{port(elsewhere)}"
        read, came = attempt(browser, server, kind, page, f"http://127.0.0.1:{port(between)}")
    assert read == {}
    assert came == refused(kind, status)


def test_a_form_that_takes_the_whole_window_shows_a_refusal(
    browser: Browser, elsewhere: Elsewhere, server: Owned
) -> None:
    browser.open(f"http://evil.example:{port(elsewhere)}/attack")
    before, since = computed(server), len(server.answered())
    body = json.dumps(BODIES["/v1/completions"])
    browser.run(
        "formed(arguments[0], 'text/plain', plainly(arguments[1])).submit()",
        f"{server.url}/v1/completions",
        body,
    )
    until(lambda: browser.run("return location.origin") == server.url)
    assert "another site's page" in browser.text("body")
    until(lambda: ("POST", 403) in server.answered()[since:])
    assert computed(server) == before


# ---- a name that is made to lead here


@contextmanager
def rebinding(server: Owned) -> Iterator[str]:
    """A page from another address than the server's, and all else at its own origin from the server."""
    with listening(Elsewhere(("127.0.0.2", port(server)), urlsplit(server.url).netloc)):
        yield f"http://rebound.example:{port(server)}"


@pytest.mark.parametrize("path", PATHS)
def test_a_name_that_leads_here_opens_nothing(browser: Browser, server: Owned, path: str) -> None:
    since = len(server.answered())
    browser.open(f"http://leads-here.example:{port(server)}{path}")
    assert "--allow-host" in browser.text("body")
    assert "--allow-host" in browser.run("return fetch(arguments[0]).then((answer) => answer.text())", path)
    until(lambda: server.answered()[since:].count(("GET", 421)) >= 2)


@pytest.mark.parametrize("kind", WAYS)
def test_a_rebound_page_reads_refusals_alone(browser: Browser, server: Owned, kind: str) -> None:
    with rebinding(server) as page:
        read, came = attempt(browser, server, kind, page, page, own=True)
    assert {status for ones in came.values() for _, status in ones} - {404} == {
        421
    }  # Pages before may have looked for icons.
    assert read
    read.pop("preload", None)  # It tells that there is an answer.
    assert {text for texts in read.values() for text in texts.values() if "--allow-host" not in text} == set()


@pytest.mark.parametrize("kind", WAYS)
def test_a_rebound_page_without_a_key_reads_what_needs_none(
    browser: Browser, keyed: Owned, kind: str
) -> None:
    with rebinding(keyed) as page:
        read, came = attempt(browser, keyed, kind, page, page, own=True, key="guessed")
    read.pop("preload", None)  # It tells that there is an answer.
    secret = {
        text for texts in read.values() for url, text in texts.items() if urlsplit(url).path not in OPEN
    }
    assert {text for text in secret if '{"error":' not in text} == set()
    assert kind == "asking" or {status for ones in came.values() for _, status in ones} <= {401, 405}
