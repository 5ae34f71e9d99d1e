"""Parses what a model says into parts, as they come: reasoning, content, calls of tools.

The parts are the same however the text was divided. No text is lost, but for markers and line breaks around
them: what begins as a call and is none is content. Where an answer was cut off in a call, all of that call is
left out.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from penstock.server.parsing.calls import Calls, Schemas
from penstock.server.parsing.jsontext import SPACE, MalformedError
from penstock.server.parsing.reading import (
    BREAK,
    Arguments,
    Begin,
    Broken,
    Content,
    End,
    FormatReader,
    Part,
    Reading,
    Reasoning,
)

P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class CallFormat:
    """Describes how calls are written.

    read: reads calls behind a marker.
    bare: the beginning of an answer that has no marker and may be a call.
    others: texts that belong to a call besides, and are tokens of their own in some tokenizers.
    """

    read: Callable[[Calls, str], Reading[None]]
    markers: tuple[str, ...] = ()
    bare: str = ""
    others: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """Marks where reasoning begins and ends."""

    begin: str
    end: str


FORMATS: Mapping[str, CallFormat] = {
    "hermes": CallFormat(Calls.tagged, ("<tool_call>",), others=("</tool_call>",)),
    "qwen3_coder": CallFormat(Calls.tagged, ("<tool_call>", "<function="), others=("</tool_call>",)),
    "llama3_json": CallFormat(Calls.llama, ("<|python_tag|>",), bare="{"),
    "mistral": CallFormat(Calls.mistral, ("[TOOL_CALLS]",), others=("[ARGS]", "[CALL_ID]")),
}
REASONING_MARKS: Mapping[str, ReasoningMarks] = {
    "think": ReasoningMarks("<think>", "</think>"),
    "mistral": ReasoningMarks("[THINK]", "[/THINK]"),
}
LIST = CallFormat(lambda calls, _: calls.list(), bare="[")
"""Calls in a form that no model was taught, for one that can write nothing else."""


class OutputParser:
    """Parses one answer as it comes."""

    def __init__(
        self,
        format: CallFormat | None = None,
        functions: Schemas | None = None,
        *,
        several: bool = True,
        thought: ReasoningMarks | None = None,
        thinking: bool = False,
    ) -> None:
        """format: None if there are no calls. several: False if there is one call at most, behind which
        nothing is read. thinking: the prompt has ended in the midst of reasoning."""
        self._format, self._thought = format, thought
        self.thinking = thought is not None and thinking
        """Whether what comes is reasoning."""
        self._reader = FormatReader()
        self._calls = Calls(self._reader, functions or {}, several=several)
        self._reading = self._read()

    def push(self, text: str) -> list[Part]:
        """Add a piece of text, and return the parts that are certain now."""
        self._reader.push(text)
        return self._parts()

    def finish(self, *, cut: str | None = None) -> list[Part]:
        """Return the parts that are left. Nothing may be pushed after it.

        cut: the stop string before which the text was cut off; empty if it was for its length, and None if
            the model has ended it. A call that it was in the midst of is no content then: nothing is left of
            it but what was told.
        """
        self._reader.ended, self._reader.cut = True, cut
        return self._parts()

    def _parts(self) -> list[Part]:
        parts: list[Part] = []
        for part in self._reading:
            if part is None:
                break
            parts.append(part)
        return _joined(parts)

    def _read(self) -> Reading[None]:
        if self._thought is not None:
            yield from self._reason(self._thought)
        yield from self._speak(self._format)

    def _reason(self, thought: ReasoningMarks) -> Reading[None]:
        reader = self._reader
        if not self.thinking:
            yield from reader.ahead()
            # Spaces that stand before something else are content.
            if (yield from reader.starts(thought.begin, room=reader.run(SPACE))) is None:
                return
            reader.behind(thought.begin)
            self.thinking = True
        yield from reader.space(BREAK)
        end = yield from reader.until((thought.end,), Reasoning)
        if end is not None:
            reader.behind(end)
            self.thinking = False
            yield from reader.space(BREAK)

    def _speak(self, format: CallFormat | None) -> Reading[None]:
        if format is not None and format.bare and (yield from self._reader.ahead()) == format.bare:
            self._reader.mark()
            yield from self._call(format, "")
        markers = () if format is None else format.markers
        while (marker := (yield from self._reader.until(markers, Content))) is not None:
            assert format is not None
            self._reader.mark(BREAK * self._reader.breaks)
            self._reader.behind(marker)
            yield from self._call(format, marker)

    def _call(self, format: CallFormat, marker: str) -> Reading[None]:
        try:
            yield from format.read(self._calls, marker)
        except MalformedError:
            yield from self._calls.break_off(bare=not marker and format is not LIST)
            return
        self._reader.unmark()
        yield from self._reader.space()
        if self._calls.enough:
            yield from self._drop()

    def _drop(self) -> Reading[None]:
        """Read all that is left, and give out nothing of it."""
        while True:
            self._reader.take(self._reader.left)
            if not (yield from self._reader.more()):
                return


@dataclass(frozen=True, slots=True)
class Called:
    """Names the function and the arguments of a whole call."""

    name: str
    arguments: str


def whole(speech: OutputParser, text: str, *, cut: str | None = None) -> list[Reasoning | Content | Called]:
    """Return the parts of a text that is complete. A call that was broken off is content, unless the text was
    cut off within it. cut: as of `OutputParser.finish`."""
    said = list[Reasoning | Content | Called]()
    names, arguments = dict[int, str](), dict[int, str]()
    for part in [*speech.push(text), *speech.finish(cut=cut)]:
        match part:
            case Begin():
                names[part.index], arguments[part.index] = part.name, ""
            case Arguments():
                arguments[part.index] += part.text
            case End():
                said.append(Called(names[part.index], arguments[part.index]))
            case Broken():
                said += [Content(part.text)] if part.text else []
            case _:
                said.append(part)
    return _joined(said)


def _joined(parts: Iterable[P]) -> list[P]:
    """Join neighbours of a kind."""
    joined = list[Any]()
    for part in parts:
        match joined[-1] if joined else None, part:
            case (Reasoning() | Content()) as last, Reasoning() | Content() if type(last) is type(part):
                joined[-1] = replace(last, text=last.text + part.text)
            case Arguments() as last, Arguments():
                joined[-1] = replace(last, text=last.text + part.text)
            case _:
                joined.append(part)
    return joined
