"""A server that speaks the Hub's protocol as huggingface_hub uses it, with real files, and with the faults
that networks and hubs have."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

LARGE = (".safetensors", ".gguf", ".bin")
"""Files that are kept by the digest of their bytes, and fetched from another address."""


def git_name(data: bytes) -> str:
    """What git calls a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def folder(path: Path) -> dict[str, bytes]:
    """The files of a directory."""
    return {one.relative_to(path).as_posix(): one.read_bytes() for one in path.rglob("*") if one.is_file()}


@dataclass
class Repository:
    """Commits with their files, and the branches that name them. gated: only this token may fetch files."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    gated: str = ""
    private: str = ""
    card: Mapping[str, object] = field(default_factory=dict)


@dataclass
class Asked:
    """What came: method, path, its Range, and its token."""

    method: str
    path: str
    range: str
    token: str


@dataclass
class Hub:
    """A hub at `url`. What of it is broken, tests set."""

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    breaks_after: list[int] = field(default_factory=list)
    """Bytes after which the connection of each next answer with a large file's bytes is cut."""
    ranges: bool = True
    """Whether parts of files are given out."""
    says: dict[str, bytes] = field(default_factory=dict)
    """What is sent instead of a large file, by its digest, or of a small one, by its path."""
    status: int = 0
    """With what all is answered, if not 0."""
    failures: int = 0
    """How many next requests for large files are answered with 503."""
    hold: threading.Event | None = None
    """What answers with large files wait for after their first half."""

    def add(self, repository: str, files: Mapping[str, bytes], branch: str = "main") -> str:
        """Make a commit, to which a branch then leads."""
        there = self.repositories.setdefault(repository, Repository())
        parts = [f"{path} {sha256(data)}" for path, data in sorted(files.items())]
        commit = hashlib.sha1("\n".join(parts).encode()).hexdigest()
        there.commits[commit] = dict(files)
        there.branches[branch] = commit
        return commit

    def paths(self, method: str = "") -> list[str]:
        """The paths that were asked for."""
        return [one.path for one in self.asked if method in ("", one.method)]

    def fetched(self) -> set[str]:
        """The files whose bytes were asked for."""
        return {one.split("/resolve/")[1].split("/", 1)[1] for one in self.paths("GET") if "/resolve/" in one}


@contextmanager
def serving() -> Iterator[Hub]:
    """A hub on this machine for a `with` block."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    with _Server(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield hub
        finally:
            if hub.hold is not None:
                hub.hold.set()
            server.shutdown()
            thread.join()


def use(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process ask the hub at an address, as HF_ENDPOINT does for one that starts."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


def begin(hub: Hub, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a hub as new, and this process one that has no token, and its cache in `home`."""
    fresh = Hub(hub.url)
    for name in Hub.__dataclass_fields__:
        setattr(hub, name, getattr(fresh, name))
    use(hub.url, monkeypatch)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)


class _Server(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """A client that is gone is no fault of the server's."""


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # Head and body go out as they come.

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        self.hub.asked.append(Asked(self.command, path, self.headers.get("Range", ""), token))
        if self.hub.status:
            return self._fail(self.hub.status)
        if path.startswith("/cdn/"):
            return self._large(path.removeprefix("/cdn/"))
        if path.startswith("/api/models/"):
            repository, _, revision = path.removeprefix("/api/models/").partition("/revision/")
            return self._about(repository, revision or "main", token)
        repository, _, rest = path.removeprefix("/").partition("/resolve/")
        return self._file(repository, rest, token)

    def _found(self, repository: str, revision: str, token: str) -> tuple[Repository, str] | None:
        there = self.hub.repositories.get(repository)
        if there is None or (there.private and token != there.private):
            return self._fail(404 if token else 401, "RepoNotFound")
        commit = there.branches.get(revision, revision)
        if commit not in there.commits:
            return self._fail(404, "RevisionNotFound")
        return there, commit

    def _about(self, repository: str, revision: str, token: str) -> None:
        found = self._found(repository, revision, token)
        if found is None:
            return
        there, commit = found
        siblings = []
        for path, data in there.commits[commit].items():
            one: dict[str, object] = {"rfilename": path, "size": len(data), "blobId": git_name(data)}
            if path.endswith(LARGE):
                one["lfs"] = {"sha256": sha256(data), "size": len(data), "pointerSize": 130}
            siblings.append(one)
        body = {"id": repository, "modelId": repository, "sha": commit, "siblings": siblings}
        body |= {"gated": "auto" if there.gated else False, "private": bool(there.private), "tags": []}
        self._send(json.dumps(body | {"cardData": there.card}).encode(), {"Content-Type": "application/json"})

    def _file(self, repository: str, rest: str, token: str) -> None:
        there = self.hub.repositories.get(repository, Repository())
        revisions = [one for one in (*there.branches, *there.commits) if rest.startswith(f"{one}/")]
        revision = max(revisions, key=len, default=rest.partition("/")[0])
        found = self._found(repository, revision, token)
        if found is None:
            return
        there, commit = found
        if there.gated and token != there.gated:
            return self._fail(403 if token else 401, "GatedRepo")
        data = there.commits[commit].get(path := rest.removeprefix(f"{revision}/"))
        if data is None:
            return self._fail(404, "EntryNotFound", {"X-Repo-Commit": commit})
        if not path.endswith(LARGE):
            headers = {"ETag": f'"{git_name(data)}"', "X-Repo-Commit": commit}
            return self._send(self.hub.says.get(path, data), headers)
        headers = {
            "X-Repo-Commit": commit,
            "X-Linked-Size": str(len(data)),
            "X-Linked-ETag": f'"{sha256(data)}"',
            "Location": f"{self.hub.url.replace('127.0.0.1', 'localhost')}/cdn/{sha256(data)}",
        }
        self._send(b"", headers, status=302)

    def _large(self, digest: str) -> None:
        if self.hub.failures:
            self.hub.failures -= 1
            return self._fail(503)
        everything = (
            data
            for there in self.hub.repositories.values()
            for files in there.commits.values()
            for data in files.values()
        )
        data = self.hub.says.get(digest) or next(one for one in everything if sha256(one) == digest)
        wanted = self.headers.get("Range", "")
        if not (wanted and self.hub.ranges):
            return self._send(data, {})
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        start, end = int(first), min(int(last or len(data) - 1) + 1, len(data))
        if start >= len(data):
            return self._fail(416)
        self._send(data[start:end], {"Content-Range": f"bytes {start}-{end - 1}/{len(data)}"}, status=206)

    def _fail(self, status: int, code: str = "", headers: Mapping[str, str] | None = None) -> None:
        more = {"X-Error-Code": code, "X-Error-Message": code} if code else {}
        self._send(b"{}", {**more, **(headers or {})}, status=status)

    def _send(self, body: bytes, headers: Mapping[str, str], status: int = 200) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if not self.path.startswith("/cdn/"):
            self.wfile.write(body)
            return
        if self.hub.hold is not None:
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            self.hub.hold.wait(30)
            body = body[len(body) // 2 :]
        cut = self.hub.breaks_after.pop(0) if self.hub.breaks_after else None
        self.wfile.write(body[:cut])
        if cut is not None:
            self.close_connection = True
