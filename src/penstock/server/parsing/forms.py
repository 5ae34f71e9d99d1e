"""Answers that are held to a form by models that reason first: the form is what comes behind the
reasoning."""

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from penstock.server.parsing.harmony import CHANNEL, CONSTRAIN, END, FUNCTIONS, MESSAGE, START
from penstock.server.parsing.output_parser import ReasoningMarks
from penstock.step.structure import Structure, StructureKind

if TYPE_CHECKING:  # The command line, which needs none to refuse a flag, comes by here.
    from penstock.api.text.tokenizer import Tokenizer

_NO_PART = {
    StructureKind.JSON_SCHEMA: re.compile(r"multipleOf|\\u"),
    StructureKind.REGEX: re.compile(r"(?s)\(\?\w*x.*\n"),
}
"""Patterns of what can be no part of a grammar: a regular expression with comments, which ends of lines
end."""
_IN_GRAMMAR = {"/": r"\/", "\n": r"\n", "\\\n": r"\n", "%": r"\x25"}


def behind_reasoning(
    structure: Structure, thought: ReasoningMarks, tokenizer: "Tokenizer", *, opened: bool
) -> Structure:
    """Return the structure of an output that reasons before it keeps to `structure`. opened: reasoning has
    begun in the prompt; else there may be none. Raise StructureError."""
    grammar = [
        "start: reasoning form" if opened else f"start: ({_mark(thought.begin, tokenizer)} reasoning)? form",
        r"reasoning: thought /\n{0,4}/",
        _thought(thought.end, tokenizer),
        f"form: {_rule(structure)}",
    ]
    return Structure.lark("\n".join(grammar))


def in_channels(
    form: Structure | None, calls: Mapping[str, Structure], tokenizer: "Tokenizer", *, header: str
) -> Structure:
    """Return the structure of an output in channels: reasoning, then an answer that keeps to a form, or a
    call.

    form: of the answer; None if there has to be a call.
    calls: functions that may be called, and the structure of their arguments.
    header: what harmony's `begun` returns for the prompt.

    Raise StructureError.
    """
    start, channel, message, constrain = (
        _mark(mark, tokenizer) for mark in (START, CHANNEL, MESSAGE, CONSTRAIN)
    )
    lead = "thought again" if header.endswith(MESSAGE) else "" if header else "again"
    answer = f'answer: {channel} "final" (" " {constrain} "json")? {message} form'
    last = [f"call{at}" for at in range(len(calls))] + (["answer"] if form is not None else [])
    grammar = [
        f"start: {lead} (analysis again)* ({' | '.join(last)})",
        f'analysis: {channel} "analysis" {message} thought',
        f'again: {start} "assistant"',
        _thought(END, tokenizer),
        *([answer, f"form: {_rule(form)}"] if form is not None else []),
    ]
    for at, (name, arguments) in enumerate(calls.items()):
        to = json.dumps(f"commentary to={FUNCTIONS}{name} ")
        grammar += [
            f'call{at}: {channel} {to} {constrain} "json" {message} arguments{at}',
            f"arguments{at}: {_rule(arguments)}",
        ]
    return Structure.lark("\n".join(grammar))


def may_be_behind(structure: Structure) -> bool:
    """Tell whether a structure may stand behind reasoning. Others say what all of the output is, as a grammar
    does."""
    no_part = _NO_PART.get(structure.kind)
    return structure.kind is not StructureKind.LARK and (
        no_part is None or no_part.search(structure.text) is None
    )


def _mark(mark: str, tokenizer: "Tokenizer") -> str:
    """Return how grammars write a mark."""
    return _special(mark, tokenizer) or json.dumps(mark)


def _thought(end: str, tokenizer: "Tokenizer") -> str:
    """Return the rule of reasoning up to its end."""
    special = _special(end, tokenizer)
    return f"thought: /(?s:.*)/ {special}" if special else f"thought[suffix={json.dumps(end)}]: /(?s:.*)/"


def _special(mark: str, tokenizer: "Tokenizer") -> str | None:
    """Return how grammars write a mark, if it is a token that is no text."""
    token = tokenizer.token_to_id(mark)
    return f"<[{token}]>" if token is not None and tokenizer.is_special(token) else None


def _rule(structure: Structure) -> str:
    match structure.kind:
        case StructureKind.JSON_SCHEMA:
            return f"%json {structure.text}"
        case StructureKind.JSON_OBJECT:
            return '%json {"type": "object"}'
        case StructureKind.CHOICE:
            texts = (json.dumps(text, ensure_ascii=False) for text in json.loads(structure.text))
            return " | ".join(texts).replace("%", r"\u0025")
    return (
        "/"
        + re.sub(r"(?s)\\.|[/\n%]", lambda found: _IN_GRAMMAR.get(found[0], found[0]), structure.text)
        + "/"
    )
