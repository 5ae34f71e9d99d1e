"""Answers that are held to a form by models that reason first: the form is what comes behind the reasoning."""

import json
import re

from penstock.api.text import Tokenizer
from penstock.server.parsing.speech import Thought
from penstock.step.structure import Structure, StructureKind

_SPACES = {"x-guidance": {"whitespace_pattern": "[ \\n\\r\\t]{1,64}"}}
"""As JSON has them that is all of an output."""


def behind_reasoning(structure: Structure, thought: Thought, tokenizer: Tokenizer, *, opened: bool) -> Structure:
    """opened: reasoning has begun in the prompt; else there may be none. Raises StructureError."""
    begin, end = (_special(mark, tokenizer) for mark in (thought.begin, thought.end))
    grammar = [
        "start: reasoning form" if opened else f"start: ({begin or json.dumps(thought.begin)} reasoning)? form",
        r"reasoning: thought /\n{0,4}/",
        f"thought: /(?s:.*)/ {end}" if end else f"thought[suffix={json.dumps(thought.end)}]: /(?s:.*)/",
        f"form: {_rule(structure)}",
    ]
    return Structure.lark("\n".join(grammar))


def may_be_behind(structure: Structure) -> bool:
    """Else it says what all of the output is, as a grammar does, and a schema that can be no part of one."""
    is_schema = structure.kind is StructureKind.JSON_SCHEMA
    return structure.kind is not StructureKind.LARK and not (is_schema and ("multipleOf" in structure.text or "\\u" in structure.text))


def _special(mark: str, tokenizer: Tokenizer) -> str | None:
    """How grammars write it, if it is a token that is no text."""
    token = tokenizer.token_to_id(mark)
    return f"<[{token}]>" if token is not None and tokenizer.is_special(token) else None


def _rule(structure: Structure) -> str:
    match structure.kind:
        case StructureKind.JSON_SCHEMA:
            return f"%json {json.dumps(_SPACES | json.loads(structure.text), ensure_ascii=False)}"
        case StructureKind.JSON_OBJECT:
            return f"%json {json.dumps(_SPACES | {'type': 'object'})}"
        case StructureKind.CHOICE:
            return " | ".join(json.dumps(text, ensure_ascii=False) for text in json.loads(structure.text))
    pattern = re.sub(r"(?s)\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], structure.text)
    return "/" + pattern.replace("\n", r"\n") + "/"
