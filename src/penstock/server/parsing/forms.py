"""Answers that are held to a form by models that reason first: the form is what comes behind the
reasoning."""

import json
import re

from penstock.api.text.tokenizer import Tokenizer
from penstock.server.parsing.output_parser import ReasoningMarks
from penstock.step.structure import Structure, StructureKind

_NO_PART = {
    StructureKind.JSON_SCHEMA: re.compile(r"multipleOf|\\u"),
    StructureKind.REGEX: re.compile(r"(?s)\(\?\w*x.*\n"),
}
"""Patterns of what can be no part of a grammar: a regular expression with comments, which ends of lines
end."""
_IN_GRAMMAR = {"/": r"\/", "\n": r"\n", "\\\n": r"\n", "%": r"\x25"}
_SPACES = {"x-guidance": {"whitespace_pattern": "[ \\n\\r\\t]{1,64}"}}
"""White space as in JSON that is all of an output."""


def behind_reasoning(
    structure: Structure, thought: ReasoningMarks, tokenizer: Tokenizer, *, opened: bool
) -> Structure:
    """Return the structure of an output that reasons before it keeps to `structure`. opened: reasoning has
    begun in the prompt; else there may be none. Raise StructureError."""
    begin, end = (_special(mark, tokenizer) for mark in (thought.begin, thought.end))
    grammar = [
        "start: reasoning form"
        if opened
        else f"start: ({begin or json.dumps(thought.begin)} reasoning)? form",
        r"reasoning: thought /\n{0,4}/",
        f"thought: /(?s:.*)/ {end}" if end else f"thought[suffix={json.dumps(thought.end)}]: /(?s:.*)/",
        f"form: {_rule(structure)}",
    ]
    return Structure.lark("\n".join(grammar))


def may_be_behind(structure: Structure) -> bool:
    """Tell whether a structure may stand behind reasoning. Others say what all of the output is, as a grammar
    does."""
    no_part = _NO_PART.get(structure.kind)
    return structure.kind is not StructureKind.LARK and (
        no_part is None or no_part.search(structure.text) is None
    )


def _special(mark: str, tokenizer: Tokenizer) -> str | None:
    """Return how grammars write a mark, if it is a token that is no text."""
    token = tokenizer.token_to_id(mark)
    return f"<[{token}]>" if token is not None and tokenizer.is_special(token) else None


def _rule(structure: Structure) -> str:
    match structure.kind:
        case StructureKind.JSON_SCHEMA:
            return f"%json {json.dumps(_SPACES | json.loads(structure.text), ensure_ascii=False)}"
        case StructureKind.JSON_OBJECT:
            return f"%json {json.dumps(_SPACES | {'type': 'object'})}"
        case StructureKind.CHOICE:
            texts = (json.dumps(text, ensure_ascii=False) for text in json.loads(structure.text))
            return " | ".join(texts).replace("%", r"\u0025")
    return (
        "/"
        + re.sub(r"(?s)\\.|[/\n%]", lambda found: _IN_GRAMMAR.get(found[0], found[0]), structure.text)
        + "/"
    )
