"""Answers files of requests, with a line for each: OpenAI's batch format.

What has been answered is in the output file, a line at a time, so a run that was ended goes on where it was:
it reads the lines that are there, drops one that was cut short, and does the rest.
"""

import os
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from msgspec import Struct

from penstock.api.llm import LLM
from penstock.api.sequences import PreparedPrompt, SequenceGroup
from penstock.base.errors import ConfigError, PenstockError
from penstock.engine.adapters import adapter_named
from penstock.server.answers.completions import Answer, AnswerWriter, error, new_id
from penstock.server.answers.prompts import read
from penstock.server.broker.calls import BusyError
from penstock.server.wire.decoding import FieldError, decoded
from penstock.server.wire.requests import ChatRequest, CompletionRequest

KINDS: dict[str, type[ChatRequest | CompletionRequest]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
}
_AHEAD = 2
"""Outputs that are queued at a time, for each that the engine computes at a time: enough that it never
waits."""


class _BatchLine(Struct, kw_only=True):
    custom_id: str
    method: str = "POST"
    url: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts the lines of a batch: of the input, answered (before this run too), and of these, refused."""

    lines: int
    answered: int
    failed: int


@dataclass(slots=True)
class _Task:
    custom_id: str
    prompts: Sequence[PreparedPrompt]
    writer: AnswerWriter
    groups: list[SequenceGroup] = field(default_factory=list)
    behind: list[bytes] = field(default_factory=list)
    """Refusals of later lines with its id. They are written behind its answer: what is there of an id then
    answers the first lines that have it, wherever the run is ended."""


class Batch:
    """Answers the requests of a file, in the order in which they share most, into another file."""

    def __init__(self, llm: LLM, source: Path, target: Path, names: Sequence[str]) -> None:
        """Find what has been answered. Raise ConfigError for files that cannot be used.

        names: of the model; the first is meant where a request names none.
        """
        self._llm, self._names = llm, names
        self._source, self._target = source, target
        self.answered, self.failed = 0, 0
        self._seen = self._resumed()
        self.lines = 0

    def run(self, progress: Callable[[Tally], object] = lambda _: None) -> Tally:
        """Answer what is not answered yet. To be ended at any moment, and begun again. Raises ConfigError and
        what the engine does."""
        refused: list[bytes] = []
        tasks = self._tasks(refused)
        with self._target.open("ab") as out:
            for line in refused:
                self._put(out, line, failed=True)
            progress(self._tally())
            waiting, active = deque(sorted(tasks, key=lambda task: task.prompts[0].tokens)), list[_Task]()
            del tasks
            driver, most = self._llm.driver, _AHEAD * self._llm.limits.max_sequences
            try:
                while waiting or active:
                    while (
                        waiting and sum(len(one.samplings) for task in active for one in task.prompts) < most
                    ):
                        task = waiting.popleft()
                        active.append(task)
                        task.groups.extend(map(driver.begin, task.prompts))
                    driver.advance()
                    for task in [one for one in active if all(group.done for group in one.groups)]:
                        active.remove(task)
                        body = task.writer.whole([group.completion() for group in task.groups])
                        self._put(out, _line(task.custom_id, 200, body))
                        for line in task.behind:
                            self._put(out, line, failed=True)
                        progress(self._tally())
            finally:
                driver.abandon([group for task in active for group in task.groups])
                out.flush()
                with suppress(OSError):
                    os.fsync(out.fileno())
        return self._tally()

    def _tally(self) -> Tally:
        return Tally(self.lines, self.answered, self.failed)

    def _put(self, out: BinaryIO, line: bytes, *, failed: bool = False) -> None:
        out.write(line + b"\n")
        out.flush()
        self.answered += 1
        self.failed += failed

    def _resumed(self) -> Counter[str]:
        """Count how often each id has been answered, and drop a last line that was cut short."""
        seen, whole = Counter[str](), 0
        if not self._target.exists():
            return seen
        try:
            with self._target.open("rb+") as out:
                for line in out:
                    try:
                        found = msgspec.json.decode(line)
                    except msgspec.DecodeError:
                        found = None
                    if line[-1:] != b"\n":
                        break
                    if not isinstance(found, dict) or not isinstance(found.get("custom_id"), str):
                        raise ConfigError(
                            f"{self._target} has a line that is no answer of a batch; name another file, or "
                            "the unfinished answers of this batch"
                        )
                    seen[found["custom_id"]] += 1
                    self.answered += 1
                    self.failed += (
                        found.get("error") is not None or found.get("response", {}).get("status_code") != 200
                    )
                    whole += len(line)
                out.truncate(whole)
        except OSError as fault:
            raise ConfigError(f"{self._target} cannot be written: {fault}; name another file") from fault
        return seen

    def _tasks(self, refused: list[bytes]) -> list[_Task]:
        """Return the tasks that are left. Lines that cannot be served are answered at once."""
        tasks, ids, met = dict[str, _Task](), set[str](), Counter[str]()
        for number, line in self._lines():
            self.lines += 1
            name, refusal = f"line {number}", None
            try:
                asked = decoded(line, _BatchLine)
                name = asked.custom_id
                if name in ids:
                    raise FieldError(
                        f"custom_id {name!r} is used by another line too; give each line its own", "custom_id"
                    )
                ids.add(name)
                if met[name] >= self._seen[name]:
                    tasks[name] = _Task(name, *self._read(asked))
            except BusyError as fault:
                refusal = _line(name, 429, error(str(fault), "rate_limit_error"))
            except PenstockError as fault:
                param = fault.param if isinstance(fault, FieldError) else None
                refusal = _line(name, 400, error(str(fault), "invalid_request_error", param))
            met[name] += 1
            if refusal is not None and met[name] > self._seen[name]:
                (tasks[name].behind if name in tasks else refused).append(refusal)
        return list(tasks.values())

    def _read(self, asked: _BatchLine) -> tuple[list[PreparedPrompt], AnswerWriter]:
        kind = KINDS.get(asked.url)
        if asked.method != "POST" or kind is None:
            raise FieldError(
                f"{asked.method} {asked.url} is not supported in a batch; POST to one of "
                f"{' and '.join(KINDS)}",
                "url",
            )
        request = decoded(msgspec.json.encode({"model": self._names[0], **asked.body}), kind)
        adapters = self._llm.lora_adapters
        lora = adapter_named([request.model], self._names, adapters)
        if lora is None:
            raise FieldError(
                f"the model {request.model[:200]!r} is not the one that runs here: "
                f"{', '.join([*self._names, *adapters])}",
                "model",
            )
        if request.streams:
            raise FieldError("a batch has no streams; leave stream out", "stream")
        request.check()
        ready, writer = read(self._llm.reader, request)
        return [one.adapted(lora) for one in ready], writer

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        try:
            with self._source.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        yield number, line
        except OSError as fault:
            raise ConfigError(
                f"{self._source} cannot be read: {fault}; give a file with one JSON request on each line"
            ) from fault


def _line(custom_id: str, status: int, body: Answer) -> bytes:
    response = {"status_code": status, "request_id": new_id("req-"), "body": body}
    return msgspec.json.encode(
        {"id": new_id("batch_req-"), "custom_id": custom_id, "response": response, "error": None}
    )
