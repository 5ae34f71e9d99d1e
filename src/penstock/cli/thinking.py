"""Asks a model to think before it answers, or not to, by the switch that its chat template has."""

from collections.abc import Collection, Mapping
from enum import StrEnum

SWITCHES = ("enable_thinking", "thinking")
"""Names of the switch, in templates of Qwen, GLM and others, and of DeepSeek and Granite."""
EFFORT, LEAST = "reasoning_effort", "low"


class Think(StrEnum):
    """Says whether a model thinks before it answers, and whether that is shown."""

    ON = "on"
    OFF = "off"
    HIDE = "hide"


def thinking_variables(
    think: Think | None, reads: Collection[str], *, marked: bool
) -> tuple[Mapping[str, object], str]:
    """Return template variables for a wish, and what to say where the template cannot pass it on.

    reads: the variables that the template reads. marked: whether the model is known to mark its thinking.
    """
    if think is None or think is Think.HIDE:
        return {}, ""
    switch = next((name for name in SWITCHES if name in reads), None)
    if switch is not None:
        return {switch: think is Think.ON}, ""
    if not marked and EFFORT not in reads:
        return {}, f"the model's chat template knows no thinking, so --think {think} changes nothing"
    if think is Think.ON:
        return {}, ""
    if EFFORT in reads:
        said = f"this model always thinks; it is asked to think little ({EFFORT} {LEAST}), and that is hidden"
        return {EFFORT: LEAST}, said
    return {}, "the model's chat template has no switch for thinking; the model may think, and that is hidden"
