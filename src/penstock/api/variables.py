"""Checks the variables and the tools that a caller gives a chat template."""

from collections.abc import Mapping, Sequence

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


def check_tools(tools: object) -> list[Mapping[str, object]]:
    """Return tools as a list. Raise RequestError unless each is a function, as OpenAI writes it."""
    form = '{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}'
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes | bytearray):
        raise RequestError(f"tools is of type {type(tools).__name__}; give a list of tools such as {form}")
    for at, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not (isinstance(function, Mapping) and isinstance(tool, Mapping)):
            raise RequestError(f"tools[{at}] is {shown(tool)}; give a tool such as {form}")
        name, parameters = function.get("name"), function.get("parameters", {})
        if tool.get("type", "function") != "function" or not isinstance(name, str) or not name:
            raise RequestError(f"tools[{at}] is no function with a name; give a tool such as {form}")
        if not isinstance(parameters, Mapping):
            raise RequestError(
                f"tools[{at}] has parameters of type {type(parameters).__name__}; give a JSON schema as a "
                "mapping"
            )
    return list(tools)
