"""Parses the messages of models that write in channels, as gpt-oss does: the harmony response format.

A message is `<|start|>ROLE<|channel|>CHANNEL<|message|>TEXT<|end|>`. Its header may also name a recipient,
behind the role or behind the channel, and at its end a type: ` to=functions.NAME <|constrain|>json`. The
prompt has the beginning of the first message, mostly `<|start|>assistant`. The last message ends with
`<|return|>`, or with `<|call|>` where a function is called. (Format: openai/harmony, docs/format.md.)

What is said in the channel analysis is reasoning. A message to a function is a call. All else is content,
also text where a header should be, and a call that is malformed.
"""

from collections.abc import Callable, Iterator

from penstock.server.parsing.calls import Calls, Schemas
from penstock.server.parsing.jsontext import MalformedError
from penstock.server.parsing.output_parser import OutputParser
from penstock.server.parsing.reading import Content, FormatReader, Part, Reading, Reasoning

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
ENDS = (END, RETURN, CALL)
MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
FUNCTIONS = "functions."
"""Begins the recipient of a call."""
ANSWERING = f"assistant{CHANNEL}final{MESSAGE}"
"""The header of an answer."""
APART = "\n\n"
"""Stands between messages of a kind, which are one text to clients."""
_TO = "to="
_TYPES = ("json", "code")
_LONGEST_WORD, _LONGEST_TYPE = 256, 32


def begun(prompt: str) -> str:
    """Return what a prompt has of the header of the message that is to be said; empty if the message is yet
    to begin. It ends with `<|message|>` if the header is whole."""
    header, message, text = prompt.rpartition(START)[2].partition(MESSAGE)
    return "" if any(end in header + text for end in ENDS) else header + message


def answer_after(header: str) -> str:
    """Return what a prompt lacks so that an answer begins. header: what `begun` returns for it."""
    if header == "assistant":
        return ANSWERING.removeprefix(header)
    return f"{END if header else ''}{START}{ANSWERING}"


class HarmonyParser(OutputParser):
    """Parses one answer in channels as it comes."""

    def __init__(
        self, functions: Schemas | None = None, *, several: bool = True, header: str = "assistant"
    ) -> None:
        """Begin an answer.

        functions: schemas of the functions that may be called; without any, calls are text.
        several: False if there is one call at most, behind which nothing is read.
        header: what `begun` returns for the prompt.
        """
        super().__init__()
        self._calls = Calls(FormatReader(), functions or {}, several=several)
        self._channel = self._recipient = ""
        """Of the message that is being read."""
        self._said = set[type[Part]]()
        """Kinds of text in earlier messages."""
        self._reader.push(START + header if header else "")

    def _read(self) -> Reading[None]:
        while not self._calls.enough and (yield from self._header()):
            if name := self._function():
                yield from self._tool_call(name)
            else:
                yield from self._text(Reasoning if self._channel == "analysis" else Content)
        yield from self._drop()

    # ---- headers

    def _header(self) -> Reading[bool]:
        """Read up to the text of a message, also where a header should be. False if there is no more."""
        self._channel = self._recipient = ""
        self._reader.mark()
        try:
            while (mark := (yield from self._mark())) != MESSAGE:
                if mark is None and self._unfinished():
                    return False
                yield from self._entry(mark)
        except MalformedError:
            self._reader.back()
            self._recipient = ""
        self._reader.unmark()
        return True

    def _mark(self) -> Reading[str | None]:
        """Read a mark, or what begins a recipient, and spaces before it. None if something else comes."""
        yield from self._reader.space()
        mark = yield from self._reader.starts(*MARKS, _TO)
        self._reader.take(len(mark or ""))
        return mark

    def _entry(self, mark: str | None) -> Reading[None]:
        """Read what stands behind a mark of a header. None: something that has no mark, so it can be a type
        alone. Raise MalformedError if it is none."""
        if mark is None:
            if not self._channel and not self._recipient:
                raise MalformedError("text comes where a header should")
            yield from self._reader.word(_LONGEST_TYPE)
            yield from self._reader.space()
            if (yield from self._reader.starts(MESSAGE)) is None and self._reader.left:
                raise MalformedError("text comes where a header should end")
        elif mark == _TO:
            self._recipient = yield from self._word()
        else:
            if mark == CHANNEL:
                self._channel = yield from self._word("analysis", "commentary", "final")
            elif mark == CONSTRAIN:
                yield from self._word()
            else:
                self._channel = self._recipient = ""
                if mark == START:
                    yield from self._word("assistant")
            self._reader.mark()  # What was read up to here is no text, whatever follows.

    def _word(self, *known: str) -> Reading[str]:
        """Read a word. known: words that are read even where text follows them at once."""
        if (found := (yield from self._reader.starts(*known))) is not None:
            return self._reader.take(len(found))
        return (yield from self._reader.word(_LONGEST_WORD))

    def _unfinished(self) -> bool:
        """Tell whether the output has ended within a header. It has not where text came in its place, which
        is still to be read then."""
        reader = self._reader
        if reader.left:
            return False
        reader.back()
        rest, entries = reader.text.strip(), [_TO + FUNCTIONS, *_TYPES]
        if rest.startswith(_TO + FUNCTIONS):
            rest, entries = "".join(rest.split(maxsplit=1)[1:]), [*_TYPES]
        if not any(one.startswith(rest) for one in entries):
            raise MalformedError("the output ends with text where a header should be")
        reader.take(reader.left)
        return True

    # ---- texts

    def _text(self, kind: type[Reasoning] | type[Content]) -> Reading[None]:
        """Read a message's text, up to the mark behind it. Those that end nothing are left out."""
        self.thinking = kind is Reasoning
        part = self._part(kind)
        while (mark := (yield from self._reader.until(MARKS, part, trim=0))) in (MESSAGE, CONSTRAIN):
            self._reader.behind(mark)
        self.thinking = False

    def _part(self, kind: type[Reasoning] | type[Content]) -> Callable[[str], Part]:
        """Return what makes parts of a message's text, apart from the message of this kind before it."""
        apart = APART if kind in self._said else ""

        def part(text: str) -> Part:
            nonlocal apart
            text, apart = apart + text, ""
            self._said.add(kind)
            return kind(text)

        return part

    def _function(self) -> str:
        """Return the name of the function that the message calls; empty if it calls none."""
        functions, name = self._calls.functions, self._recipient.removeprefix(FUNCTIONS)
        return name if functions and (name != self._recipient or name in functions) else ""

    def _tool_call(self, name: str) -> Reading[None]:
        """Read the arguments of a call, which are the message's text: no mark is part of them."""
        reader = self._calls.reader = FormatReader()
        text, parts = self._reader.until(MARKS, reader.push, trim=0), self._arguments(name)
        part, more = self._part(Content), True
        while more:
            more = next(text, END) is None  # It gives out nothing else before its end.
            yield from self._certain(parts, part)
            if more:
                yield None
        reader.ended = True
        reader.cut = None if self._reader.left else self._reader.cut  # What is left is a mark, its end.
        yield from self._certain(parts, part)

    def _certain(self, parts: Reading[None], part: Callable[[str], Part]) -> Iterator[Part]:
        """Yield what is certain of a call, what is content in it as `part` makes it."""
        while (found := next(parts, None)) is not None:
            yield part(found.text) if isinstance(found, Content) else found

    def _arguments(self, name: str) -> Reading[None]:
        """Read a call from its own text. What follows the arguments is content."""
        calls, reader = self._calls, self._calls.reader
        reader.mark()
        try:
            yield from reader.space()
            if reader.left or reader.cut is not None:
                yield from calls.given(name)
            else:
                yield from calls.begin(name)
                yield calls.arguments("{}")
                yield from calls.end()
            yield from reader.space()
        except MalformedError:
            yield from calls.break_off()
        reader.unmark()
        if not calls.enough:
            yield from reader.until((), Content, trim=0)
