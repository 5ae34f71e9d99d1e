"""Checks the variables that a caller gives a chat template."""

from collections.abc import Mapping

from penstock.base.errors import RequestError
from penstock.step.params import shown

OWN = ("messages", "add_generation_prompt", "tools", "documents", "self")
"""Names that a template gets from elsewhere."""


def check_variables(variables: object) -> None:
    """Raise RequestError unless these are variables that a template may be given."""
    if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
        raise RequestError(
            f"chat_template_kwargs {shown(variables)} must be a mapping from names to values, such as "
            "{'enable_thinking': False}"
        )
    if taken := [name for name in OWN if name in variables]:
        raise RequestError(f"chat_template_kwargs has {taken[0]!r}, which comes from elsewhere; leave it out")
