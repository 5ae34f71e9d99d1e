"""Chat templates are rendered in processes of their own: one that takes too long, or too much memory, ends
with its process.

A template is a program that came with the checkpoint. The sandbox keeps it from the system; what it computes
it can make as large as it likes, in one operation that no count of steps sees and no thread can break off.
"""

import contextlib
import json
import os
import signal
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from penstock.api.text.processes import Pool, Process, serve
from penstock.base.errors import RequestError
from penstock.base.pacing import paced

PROCESSES = 4
"""Processes that render at a time: one that takes long does not hold up the others."""
SECONDS = 5.0
"""Seconds of a processor that one rendering may take."""
MEMORY = 1 << 30
"""Bytes of addresses that a process may have: its own, some 60 MiB, included."""
_PATIENCE = 60.0
"""Seconds by the clock, on a machine with much else to do."""
_BRIEFLY = 0.2
"""Seconds after which a rendering leaves the processor to whatever else wants it."""
_LARGE = 64 << 10
"""Bytes from which on messages leave it from the beginning."""


class Template:
    """Renders a chat template, given by its source. Threads may share it."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._digest = sha256(source.encode("utf-8", "surrogatepass")).hexdigest()
        self._variables: frozenset[str] | None = None

    @property
    def variables(self) -> frozenset[str]:
        """The variables that the template reads, of those that it is given; there may be others in it. Raise
        RequestError if it cannot be compiled."""
        if self._variables is None:
            self._variables = frozenset(self._answer({}))
        return self._variables

    def render(self, variables: Mapping[str, object]) -> str:
        """Return the text of a conversation. Raise RequestError for whatever goes wrong in the template, and
        for what JSON cannot hold."""
        return str(self._answer({"variables": variables}))

    def _answer(self, asked: dict[str, object]) -> Any:
        """Ask by the digest alone, and by the source where the process has not seen it."""
        sent = _written(asked | {"digest": self._digest})
        pool = RENDERERS if len(sent) < _LARGE else LARGE  # The same for both, so that it learns the source.
        answer = _asked(pool, sent)
        if "unknown" in answer:
            answer = _asked(pool, f'{sent[:-1]}, "source": {json.dumps(self._source)}}}')
        if "fault" in answer:
            raise RequestError(answer["fault"])
        return answer["found"]


def _asked(pool: Pool, sent: str) -> Any:
    try:
        return json.loads(pool.ask(sent.encode(), _PATIENCE))
    except (EOFError, OSError) as error:
        raise RequestError(
            f"the model's chat template needs more than the {SECONDS:g} seconds or {MEMORY >> 20} MiB "
            "allowed for these messages; send fewer or shorter ones, or a plain prompt"
        ) from error


def _written(what: object) -> str:
    """Return what json.dumps returns. Raise RequestError for what JSON cannot hold."""
    try:
        return _json(what)
    except (TypeError, ValueError, RecursionError) as error:
        what_is = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise RequestError(
            f"messages, tools and template variables must be JSON values: {what_is}"
        ) from error


def _json(what: object) -> str:
    """Return what json.dumps returns, which holds the interpreter's lock until all is written."""
    if isinstance(what, dict):
        return "{" + ", ".join(f"{_name(name)}: {_json(value)}" for name, value in what.items()) + "}"
    if isinstance(what, list):
        return "[" + ", ".join(map(json.dumps, paced(what))) + "]"
    return json.dumps(what)


def _name(name: object) -> str:
    return json.dumps(name) if isinstance(name, str) else json.dumps({name: 0})[1:-4]


def _renderer(*, yields: bool = False) -> Process:
    return Process(__name__, "render", [str(SECONDS), str(MEMORY)], yields=yields)


RENDERERS = Pool(PROCESSES, _renderer, _BRIEFLY)
LARGE = Pool(PROCESSES, lambda: _renderer(yields=True))


def render(seconds: str, memory: str) -> None:
    """Render templates until the pipe is closed: all that such a process does.

    seconds: seconds of a processor for each rendering.
    memory: bytes that the process may have.
    """
    from penstock.api.text.chat_template import ChatTemplate

    _limit(int(memory))
    compiled: dict[str, ChatTemplate] = {}

    def answer(sent: bytes) -> bytes:
        asked = json.loads(sent)
        signal.setitimer(signal.ITIMER_PROF, float(seconds))  # Ends the process, whatever it does.
        try:
            reply: Mapping[str, object]
            if "source" in asked and asked["digest"] not in compiled:
                compiled[asked["digest"]] = ChatTemplate(asked["source"])
            if (template := compiled.get(asked["digest"])) is None:
                reply = {"unknown": True}
            elif "variables" in asked:
                reply = {"found": template.render(asked["variables"])}
            else:
                reply = {"found": sorted(template.variables)}
        except RequestError as fault:
            if isinstance(fault.__cause__, MemoryError):
                os._exit(1)  # As where the system ends it.
            reply = {"fault": str(fault)}
        text = json.dumps(reply).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        return text

    serve(answer)


def _limit(memory: int) -> None:
    """Limit the memory of this process to so many bytes, and let it leave no core dump."""
    import resource

    for which, most in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_CORE, 0)):
        with contextlib.suppress(OSError, ValueError):  # Some systems have no such limit.
            resource.setrlimit(which, (most, most))
