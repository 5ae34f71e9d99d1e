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
  must ask first, and gets no permission.

With keys the first two are not needed, since a page does not have one, and clients that run in a page's
clothes of their own may ask.

What is read-only is answered, but a browser gives the answer to no other site's page, and shows it in none
(see `CLOSED`). Otherwise a page could tell by what loads and what does not whether a model of some name is
here.
"""

import re
from collections.abc import Iterable
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.server.answers.completions import error
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
_INVALID = "invalid_request_error"


class OriginGuard:
    """Guards all routes from other sites' pages, as ASGI middleware."""

    def __init__(self, app: ASGIApp, names: Iterable[str], *, keys: bool) -> None:
        """Guard an application.

        names: of this machine, beside addresses and localhost.
        keys: whether clients must send one.
        """
        self._app, self._names, self._keys = (
            app,
            {name.lower().rstrip(".") for name in ("localhost", *names)},
            keys,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to the application, or refuse it."""
        refused = self._refusal(scope) if scope["type"] == "http" else None
        if refused is None:
            await self._app(scope, receive, send)
            return
        status, text = refused
        await json_response(error(text, _INVALID), status)(scope, receive, send)

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
            if scope["method"] not in _READS and (page := _foreign(scope, hosts[0])):
                return (
                    403,
                    f"{page} is another site's page, which may not use this server; ask from the server's "
                    "own page, or use keys",
                )
        return None

    def _known(self, name: str) -> bool:
        if name.lower().rstrip(".") in self._names:
            return True
        try:
            ip_address(name.strip("[]"))
        except ValueError:
            return False
        return True


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


def is_json(scope: Scope) -> bool:
    """Tell whether the body is declared as JSON, once."""
    kinds = _values(scope, b"content-type")
    return len(kinds) == 1 and _JSON.fullmatch(kinds[0]) is not None
