"""Finds the way in which a model writes tool calls and reasoning: by its chat templates, or by a setting."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from penstock.server.parsing.output_parser import FORMATS, REASONING_MARKS, CallFormat, ReasoningMarks

AUTO, NONE, HARMONY = "auto", "none", "harmony"
TOOL_PARSERS = (AUTO, NONE, *FORMATS, HARMONY)
REASONING_PARSERS = (AUTO, NONE, *REASONING_MARKS, HARMONY)
_CHANNELS = r"<\|channel\|>(?s:.)*<\|message\|>"
_CALLS = {
    HARMONY: _CHANNELS,
    "mistral": r"\[TOOL_CALLS\]",
    "qwen3_coder": r"(?s)<tool_call>.*<function=|<function=.*<tool_call>",
    "hermes": "<tool_call>",
    "llama3_json": r'(?s)<\|python_tag\|>|ipython.*"parameters"|"parameters".*ipython',
}
"""Patterns in a template by which the format that its model writes is known; the first that fits counts."""
_REASONING = {HARMONY: _CHANNELS, "think": "</?think>", "mistral": r"\[/?THINK\]"}


@dataclass(frozen=True, slots=True)
class Dialect:
    """Tells how a model writes calls of tools and reasoning, and what its chat templates take."""

    calls: CallFormat | None = None
    thought: ReasoningMarks | None = None
    channels: bool = False
    """True if it writes messages in channels, calls and reasoning among them: harmony. The two above are None
    then."""
    channel_calls: bool = False
    """True if messages to functions are calls; else they are text."""
    names_developer: bool = False
    """True if the templates know the role developer, which most call system."""
    short_ids: bool = False
    """True if they take only ids of tool calls that have nine letters and digits."""


def dialect_of(templates: Mapping[str, str], calls: str = AUTO, reasoning: str = AUTO) -> Dialect:
    """Return a model's dialect. templates: sources. calls, reasoning: one of TOOL_PARSERS and of
    REASONING_PARSERS; "harmony" as either means that all is written in channels."""
    return _dialect("\n".join(templates.values()), calls, reasoning)


@lru_cache(maxsize=16)
def _dialect(source: str, calls: str, reasoning: str) -> Dialect:
    calls = _mentioned(source, _CALLS) if calls == AUTO else calls
    reasoning = _mentioned(source, _REASONING) if reasoning == AUTO else reasoning
    channels = HARMONY in (calls, reasoning)
    return Dialect(
        None if channels else FORMATS.get(calls),
        None if channels else REASONING_MARKS.get(reasoning),
        channels=channels,
        channel_calls=channels and calls != NONE,
        names_developer="developer" in source,
        short_ids="[TOOL_CALLS]" in source,
    )


def _mentioned(source: str, patterns: Mapping[str, str]) -> str:
    return next((name for name, pattern in patterns.items() if re.search(pattern, source)), NONE)
