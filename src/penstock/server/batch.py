"""Answers files of requests, with a line for each: OpenAI's batch format.

What has been answered is in the output file, a line at a time, so a run that was ended goes on where it was:
it reads the lines that are there, drops one that was cut short, and does the rest. A line that was refused
for the name of its model is asked again when the model has that name, and so is one for which there was no
time.
"""

import errno
import os
from codecs import BOM_UTF8
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from shutil import copymode
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from penstock.api.reader import PromptReader
from penstock.api.sequences import PreparedPrompt, SequenceGroup
from penstock.base.errors import ConfigError, PenstockError
from penstock.base.units import counted
from penstock.engine.adapters import adapter_named
from penstock.server.answers.completions import Answer, AnswerWriter, error, new_id
from penstock.server.answers.prompts import read
from penstock.server.broker.calls import BusyError
from penstock.server.wire.decoding import FieldError, decoded
from penstock.server.wire.requests import ChatRequest, CompletionRequest

if TYPE_CHECKING:
    from penstock.api.llm import LLM

KINDS: dict[str, type[ChatRequest | CompletionRequest]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
}
STDOUT = Path("-")
"""Answers that go there are written to stdout. Each run answers all requests."""
_AHEAD = 2
"""Outputs that are queued at a time, for each that the engine computes at a time: enough that it never
waits."""
_BEGIN = b'{"id":"batch_req-'
"""Each answer begins so, and no other line may be taken for one that was cut short."""
_DONE, _CROWDED = 200, 429
"""Statuses of answers: of one that was made, and of a line for which there was no time."""


class _BatchLine(Struct, kw_only=True):
    custom_id: str
    method: str = "POST"
    url: str
    body: dict[str, Any]


class _Named(Struct):
    custom_id: str


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts the lines of a batch: of the input, answered (before this run too), and of these, refused.

    Answers to lines that are no longer in the input do not count.
    """

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


@dataclass(frozen=True, slots=True)
class _InputLine:
    """Holds a line of the input."""

    name: str
    """Its id; its number if it has none."""
    place: int
    """Lines before it that are called so."""
    line: _BatchLine | None
    fault: PenstockError = field(default_factory=PenstockError)
    """It says why there is no line."""


@dataclass(frozen=True, slots=True)
class _EarlierAnswer:
    """Tells what an answer in the output file says of its line."""

    failed: bool
    unnamed: bool
    """The model did not have the name that the line asks for."""
    crowded: bool
    """There was no time for it."""

    @classmethod
    def of(cls, answer: dict[str, Any]) -> "_EarlierAnswer":
        response = answer.get("response")
        response = response if isinstance(response, dict) else {}
        status, body = response.get("status_code"), response.get("body")
        fault = body.get("error") if isinstance(body, dict) else None
        param = fault.get("param") if isinstance(fault, dict) else None
        failed = answer.get("error") is not None or status != _DONE
        return cls(failed, failed and param == "model", status == _CROWDED)


class Batch:
    """Answers the requests of a file, in the order in which they share most, into another file."""

    def __init__(self, source: Path, target: Path) -> None:
        """Find what has been answered. Raise ConfigError for files that cannot be used."""
        self._source, self._target = source, target
        with suppress(OSError):
            if target != STDOUT and source.samefile(target):
                raise ConfigError(f"{target} is the file of requests, too; name another one for the answers")
        self._kept = self._resumed()
        self.lines, self.answered, self.failed = 0, 0, 0

    def left(self, names: Sequence[str] | None = None, adapters: Collection[str] = ()) -> Tally | None:
        """Return the tally if nothing is left to do, for which no model is needed; None if something is.

        names: of the model, as for `run`; None if they are not known: then what was refused for its model's
        name is left. adapters: names of its LoRA adapters. Raises ConfigError.
        """
        lines, failed, known = 0, 0, _known(names, adapters)
        for one in self._asked():
            if (kept := self._standing(one, known)) is None:
                return None
            lines += 1
            failed += kept.failed
        if not lines and (self._target == STDOUT or not self._target.exists()):
            raise ConfigError(f"{self._source} has no requests; write one to a line, as JSON")
        return Tally(lines, lines, failed)

    def run(
        self, llm: "LLM", names: Sequence[str], progress: Callable[[Tally], object] = lambda _: None
    ) -> Tally:
        """Answer what is not answered yet. To be ended at any moment, and begun again. Raises ConfigError and
        what the engine does.

        names: of the model; the first is meant where a request names none.
        """
        self.lines, self.answered, self.failed = 0, 0, 0
        refused: list[bytes] = []
        tasks = self._tasks(llm, names, refused)
        with FileIO(os.dup(1), "wb") if self._target == STDOUT else FileIO(self._target, "ab") as out:
            for line in refused:
                self._put(out, line, failed=True)
            progress(self._tally())
            waiting, active = deque(sorted(tasks, key=lambda task: task.prompts[0].tokens)), list[_Task]()
            del tasks
            driver, most = llm.driver, _AHEAD * llm.limits.max_sequences
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
                        self._put(out, _line(task.custom_id, _DONE, body))
                        for line in task.behind:
                            self._put(out, line, failed=True)
                        progress(self._tally())
            finally:
                driver.abandon([group for task in active for group in task.groups])
                synced = _sync(out)
            if synced is not None:
                raise self._unwritten(synced)
        return self._tally()

    def _tally(self) -> Tally:
        return Tally(self.lines, self.answered, self.failed)

    def _put(self, out: FileIO, line: bytes, *, failed: bool = False) -> None:
        """Write an answer. Raise ConfigError if it cannot be; those before it stay, and nothing of it."""
        size, left = os.fstat(out.fileno()).st_size, memoryview(line + b"\n")
        try:
            while left:
                left = left[out.write(left) :]
        except OSError as fault:
            with suppress(OSError):
                out.truncate(size)
            raise self._unwritten(fault) from fault
        self.answered += 1
        self.failed += failed

    def _unwritten(self, fault: OSError) -> OSError | ConfigError:
        """Return the error for answers that cannot be written: to stdout, that of any output."""
        if self._target == STDOUT:
            return OSError(fault.errno, fault.strerror)
        return ConfigError(
            f"{self._target} cannot be written: {fault.strerror}; {counted(self.answered, 'answer')} of "
            f"{self.lines:,} are kept there; free some space, and run it again, which goes on behind them"
        )

    def _resumed(self) -> dict[str, list[_EarlierAnswer]]:
        """Return what has been answered of each id, and drop a last line that was cut short."""
        kept, whole = defaultdict[str, list[_EarlierAnswer]](list), 0
        if self._target == STDOUT or not (self._target.is_file() or self._target.is_dir()):
            return kept  # Nor has a pipe or a device answers of an earlier run.
        try:
            with self._target.open("rb+") as out:
                for line in out:
                    cut = line[-1:] != b"\n"
                    if cut and (line.startswith(_BEGIN) or _BEGIN.startswith(line)):
                        break
                    found = None if cut else _answer(line)
                    if found is None:
                        raise ConfigError(
                            f"{self._target} has a line that is no answer of a batch; name another file, or "
                            "the unfinished answers of this batch"
                        )
                    kept[found["custom_id"]].append(_EarlierAnswer.of(found))
                    whole += len(line)
                out.truncate(whole)
        except OSError as fault:
            raise ConfigError(f"{self._target} cannot be written: {fault}; name another file") from fault
        return kept

    def _standing(self, one: _InputLine, known: Callable[[object], bool]) -> _EarlierAnswer | None:
        """Return the answer that a line has already; None if there is none, or it is asked again."""
        answers = self._kept.get(one.name, ())
        if len(answers) <= one.place:
            return None
        kept = answers[one.place]
        body = {} if one.line is None else one.line.body
        named = one.line is not None and ("model" not in body or known(body["model"]))
        return None if kept.crowded or (kept.unnamed and named) else kept

    def _drop(self, again: dict[str, int]) -> None:
        """Take answers out of the file: of each id those from a place on, which are all refusals.

        The file is replaced at once, so that a run which ends meanwhile loses no answer. Raises ConfigError.
        """
        met, target = Counter[str](), self._target.resolve()
        other = target.with_name(f"{target.name}.part")
        try:
            with target.open("rb") as old, other.open("wb") as new:
                for line in old:
                    name = (_answer(line) or {})["custom_id"]
                    if met[name] < again.get(name, met[name] + 1):
                        new.write(line)
                    met[name] += 1
                new.flush()
                os.fsync(new.fileno())
            copymode(target, other)
            other.replace(target)
        except OSError as fault:
            with suppress(OSError):
                other.unlink(missing_ok=True)
            raise ConfigError(f"{self._target} cannot be written: {fault}; name another file") from fault
        for name, place in again.items():
            del self._kept[name][place:]

    def _again(self, known: Callable[[object], bool]) -> dict[str, int]:
        """Return the first place of each id whose answer is asked for once more."""
        again = dict[str, int]()
        if any(kept.unnamed or kept.crowded for answers in self._kept.values() for kept in answers):
            for one in self._asked():
                if one.place < len(self._kept.get(one.name, ())) and self._standing(one, known) is None:
                    again.setdefault(one.name, one.place)
        return again

    def _tasks(self, llm: "LLM", names: Sequence[str], refused: list[bytes]) -> list[_Task]:
        """Return the tasks that are left. Lines that cannot be served are answered at once."""
        known = _known(names, llm.lora_adapters)
        if again := self._again(known):
            self._drop(again)
        tasks, ids = dict[str, _Task](), set[str]()
        for one in self._asked():
            self.lines += 1
            if (kept := self._standing(one, known)) is not None:
                self.answered += 1
                self.failed += kept.failed
                if one.line is not None:
                    ids.add(one.name)
                continue
            try:
                if one.line is None:
                    raise one.fault
                if one.name in ids:
                    raise FieldError(
                        f"custom_id {one.name!r} is used by another line too; give each line its own",
                        "custom_id",
                    )
                ids.add(one.name)
                tasks[one.name] = _Task(one.name, *_read(llm.reader, names, llm.lora_adapters, one.line))
            except BusyError as fault:
                refusal = _line(one.name, _CROWDED, error(str(fault), "rate_limit_error"))
            except PenstockError as fault:
                param = fault.param if isinstance(fault, FieldError) else None
                refusal = _line(one.name, 400, error(str(fault), "invalid_request_error", param))
            else:
                continue
            (tasks[one.name].behind if one.name in tasks else refused).append(refusal)
        return list(tasks.values())

    def _asked(self) -> Iterator[_InputLine]:
        met = Counter[str]()
        for number, text in self._lines():
            try:
                line = decoded(text, _BatchLine)
                one = _InputLine(line.custom_id, met[line.custom_id], line)
            except PenstockError as fault:
                name = _name(text) or f"line {number}"
                one = _InputLine(name, met[name], None, fault)
            met[one.name] += 1
            yield one

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        try:
            with self._source.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    text = line.removeprefix(BOM_UTF8) if number == 1 else line
                    if text.strip():
                        yield number, text
        except OSError as fault:
            raise ConfigError(
                f"{self._source} cannot be read: {fault}; give a file with one JSON request on each line"
            ) from fault


def _read(
    reader: PromptReader, names: Sequence[str], adapters: Collection[str], asked: _BatchLine
) -> tuple[list[PreparedPrompt], AnswerWriter]:
    kind = KINDS.get(asked.url)
    if asked.method != "POST" or kind is None:
        raise FieldError(
            f"{asked.method} {asked.url} is not supported in a batch; POST to one of {' and '.join(KINDS)}",
            "url",
        )
    request = decoded(msgspec.json.encode({"model": names[0], **asked.body}), kind)
    lora = adapter_named([request.model], names, adapters)
    if lora is None:
        raise FieldError(
            f"the model {request.model[:200]!r} is not the one that runs here: "
            f"{', '.join([*names, *adapters])}",
            "model",
        )
    if request.streams:
        raise FieldError("a batch has no streams; leave stream out", "stream")
    request.check()
    ready, writer = read(reader, request)
    return [one.adapted(lora) for one in ready], writer


def _sync(out: FileIO) -> OSError | None:
    """See that a file is on the disk. Return why it is not; None for what is no file on one."""
    try:
        os.fsync(out.fileno())
    except OSError as fault:
        return fault if fault.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO) else None
    return None


def _known(names: Sequence[str] | None, adapters: Collection[str]) -> Callable[[object], bool]:
    """Return what tells whether a name is the model's, or an adapter's. names: None if any may be."""
    return lambda name: (
        names is None or (isinstance(name, str) and adapter_named([name], names, adapters) is not None)
    )


def _answer(line: bytes) -> dict[str, Any] | None:
    """Return a line of the output file; None if it is no answer."""
    try:
        found = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return None
    ours = isinstance(found, dict) and isinstance(found.get("custom_id"), str) and "response" in found
    return found if ours else None


def _name(text: bytes) -> str:
    """Return the id in a line that is no request; empty if it has none."""
    try:
        return msgspec.json.decode(text, type=_Named).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""


def _line(custom_id: str, status: int, body: Answer) -> bytes:
    response = {"status_code": status, "request_id": new_id("req-"), "body": body}
    return msgspec.json.encode(
        {"id": new_id("batch_req-"), "custom_id": custom_id, "response": response, "error": None}
    )
