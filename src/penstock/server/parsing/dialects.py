"""Finds the way in which a model writes tool calls and reasoning: by its chat templates, or by a setting."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.server.parsing.output_parser import FORMATS, REASONING_MARKS, CallFormat, ReasoningMarks

AUTO, NONE = "auto", "none"
TOOL_PARSERS, REASONING_PARSERS = (AUTO, NONE, *FORMATS), (AUTO, NONE, *REASONING_MARKS)
_CALLS = {
    "mistral": r"\[TOOL_CALLS\]",
    "qwen3_coder": r"(?s)<tool_call>.*<function=|<function=.*<tool_call>",
    "hermes": "<tool_call>",
    "llama3_json": r'(?s)<\|python_tag\|>|ipython.*"parameters"|"parameters".*ipython',
}
"""Patterns in a template by which the format that its model writes is known; the first that fits counts."""
_REASONING = {"think": "</?think>", "mistral": r"\[/?THINK\]"}


@dataclass(frozen=True, slots=True)
class Dialect:
    """Tells how a model writes calls of tools and reasoning, and what its chat templates take."""

    calls: CallFormat | None = None
    thought: ReasoningMarks | None = None
    names_developer: bool = False
    """True if the templates know the role developer, which most call system."""
    short_ids: bool = False
    """True if they take only ids of tool calls that have nine letters and digits."""


def dialect_of(templates: Mapping[str, str], calls: str = AUTO, reasoning: str = AUTO) -> Dialect:
    """Return a model's dialect. templates: sources. calls, reasoning: "auto", "none", or one of FORMATS and
    of REASONING_MARKS."""
    source = "\n".join(templates.values())
    calls = _mentioned(source, _CALLS) if calls == AUTO else calls
    reasoning = _mentioned(source, _REASONING) if reasoning == AUTO else reasoning
    return Dialect(
        FORMATS.get(calls), REASONING_MARKS.get(reasoning), "developer" in source, "[TOOL_CALLS]" in source
    )


def _mentioned(source: str, patterns: Mapping[str, str]) -> str:
    return next((name for name, pattern in patterns.items() if re.search(pattern, source)), NONE)
