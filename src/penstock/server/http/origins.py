"""Guards the server: refuses what a web page could have a browser send, and names by which this machine is
not known.

A server without keys on a person's own machine can be reached by every page which that person's browser has
open. Three ways are closed:

- DNS rebinding: a page's own name is made to resolve to 127.0.0.1, and to the browser the server is the
  page's own. Its requests carry that name in `Host`, so without keys only addresses, localhost and names that
  were configured are answered.
- A request across origins that needs no permission, such as a form's. The browser sends `Origin` and
  `Sec-Fetch-Site`, which a page cannot change; of what is not read-only, those from elsewhere are refused.
- A body in a form's clothes. Only what is declared as JSON is read (see `is_json`); a page that declares it
  must ask first, and gets no permission. On ollama's paths, where clients declare nothing, that holds for
  requests in which a browser has said where they are from (see `is_of_browser`).

With keys the first two are not needed, since a page does not have one, and clients that run in a page's
clothes of their own may ask.

Pages of origins that were allowed may use the server like its own.

What is read-only is answered, but a browser gives the answer to no other site's page, and shows it in none
(see `CLOSED`). Otherwise a page could tell by what loads and what does not whether a model of some name is
here.
"""

import re
from collections.abc import Iterable, Sequence
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.server.answers.protocols import refusal
from penstock.server.http.sending import json_response

CLOSED = (
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("X-Frame-Options", "DENY"),
    ("X-Content-Type-Options", "nosniff"),
)
"""Headers of every answer: for the server's own page alone, in no frame, and to be taken for nothing but what
it says it is."""
_READS = ("GET", "HEAD", "OPTIONS")
_HOST = re.compile(r"(?P<name>\[[0-9a-f:.%]+\]|[^\[\]:/@\s]+)(?::(?P<port>[0-9]{1,5}))?", re.IGNORECASE)
_JSON = re.compile(r"application/(?:[a-z0-9.+-]+\+)?json\s*(?:;.*)?", re.IGNORECASE | re.DOTALL)


class OriginGuard:
    """Guards all routes from other sites' pages, as ASGI middleware."""

    def __init__(
        self, app: ASGIApp, names: Iterable[str], origins: Iterable[str] = (), *, keys: bool
    ) -> None:
        """Guard an application.

        names: of this machine, beside addresses and localhost.
        origins: of other sites' pages that may use the server; "*" is any.
        keys: whether clients must send one.
        """
        self._app, self._keys = app, keys
        self._names = {name.lower().rstrip(".") for name in ("localhost", *names)}
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to the application, or refuse it."""
        refused = self._refusal(scope) if scope["type"] == "http" else None
        if refused is None:
            await self._app(scope, receive, send)
            return
        status, text = refused
        await json_response(refusal(scope["path"], status, text), status)(scope, receive, send)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Return status and reason, if the request is not let in."""
        hosts = _values(scope, b"host")
        host = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
        if host is None:
            return 400, "a request needs one Host header, with a name or an address and perhaps a port"
        if not self._keys:
            if not self._known(host["name"]):
                name = host["name"][:200]
                return (
                    421,
                    f"this server does not answer to the name {name}; use its address or localhost, or "
                    f"start it with --allow-host {name}",
                )
            may = scope["method"] in _READS or self._shares(scope)
            if not may and (page := _foreign(scope, hosts[0])):
                return (
                    403,
                    f"{page} is another site's page, which may not use this server; ask from the server's "
                    "own page, use keys, or start it with --allow-origin",
                )
        return None

    def _shares(self, scope: Scope) -> bool:
        """Tell whether a request is of a page that may use the server."""
        sent = _values(scope, b"origin")
        return len(sent) == 1 and ("*" in self._origins or sent[0] in self._origins)

    def _known(self, name: str) -> bool:
        if name.lower().rstrip(".") in self._names:
            return True
        try:
            ip_address(name.strip("[]"))
        except ValueError:
            return False
        return True


def shared_with(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Return an application whose answers a browser gives to pages of these origins (CORS)."""
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "POST", "DELETE"),
        allow_headers=("*",),
        expose_headers=(
            "X-Request-Id",
            "X-Ignored-Fields",
            "X-Queue-Position",
            "X-Expected-First-Token",
            "X-Model-Wait",
            "X-Model-Wait-Forecast",
            "Retry-After",
        ),
    )


def _values(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1").strip() for key, value in scope["headers"] if key == name]


def _foreign(scope: Scope, host: str) -> str:
    """Return the origin of a request that a browser sent for another site's page; it is empty if it is
    none."""
    for origin in _values(scope, b"origin"):
        try:
            there = urlsplit(origin).netloc
        except ValueError:
            there = ""
        if not there or there.lower() != host.lower():
            return origin[:200] or "what says no origin"
    if "cross-site" in _values(scope, b"sec-fetch-site"):
        return "what asks across sites"
    return ""


def is_of_browser(scope: Scope) -> bool:
    """Tell whether a browser has sent a request: all of them say so of what is not read-only."""
    return any(name == b"origin" or name.startswith(b"sec-fetch-") for name, _ in scope["headers"])


def is_json(scope: Scope) -> bool:
    """Tell whether the body is declared as JSON, once."""
    kinds = _values(scope, b"content-type")
    return len(kinds) == 1 and _JSON.fullmatch(kinds[0]) is not None
