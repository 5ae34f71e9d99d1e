"""Serves the page at `/`: a chat, and the machine beside it. Its files ask this server alone, and need no
key."""

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

_FOLDER = Path(__file__).parent / "page"
_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
_HEADERS = {
    # Beyond 'self': what a page may be told to do by text that it shows. No text becomes markup or a script.
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors "
    "'none'; object-src 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    kind: str
    tag: str


def _file(path: Path) -> _File:
    content = path.read_bytes()
    return _File(content, _KINDS[path.suffix], f'"{sha256(content).hexdigest()[:32]}"')


def _address(path: Path) -> str:
    name = path.relative_to(_FOLDER).as_posix()
    return "/" if name == "index.html" else f"/page/{name}"


FILES = {_address(path): _file(path) for path in sorted(_FOLDER.rglob("*")) if path.suffix in _KINDS}
"""Files of the page, by path."""


async def page_file(_: object, request: Request) -> Response:
    """Return a file of the page; for a client that has it already, only that it is the same."""
    file = FILES[request.scope["path"]]
    headers = _HEADERS | {"ETag": file.tag}
    had = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    if file.tag in had or had == ["*"]:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.kind)
