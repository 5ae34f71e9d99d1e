"""Declare the flags that say how a model is asked to answer in a conversation, and how that is shown."""

import json
from collections.abc import Mapping
from typing import Any

import click

from penstock.api.variables import check_variables
from penstock.cli.command import option
from penstock.cli.options import OUTPUT, PROMPT, with_options
from penstock.cli.thinking import Think


def _template_variables(
    ctx: click.Context, parameter: click.Parameter, value: str | None
) -> Mapping[str, object]:
    """Return the variables of a template that a flag gives. Raises click.BadParameter."""
    if value is None:
        return {}
    try:
        variables = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise click.BadParameter(
            f"{value[:80]!r} is not JSON: {error}; write an object, as '{{\"enable_thinking\": false}}'",
            ctx,
            parameter,
        ) from error
    if not isinstance(variables, dict):
        raise click.BadParameter(
            f"{value[:80]!r} is no object; write one, as '{{\"enable_thinking\": false}}'", ctx, parameter
        )
    check_variables(variables)
    return variables


_CHAT = (
    option(
        PROMPT,
        "--think",
        type=click.Choice([one.value for one in Think]),
        callback=lambda ctx, parameter, value: None if value is None else Think(value),
        help="Let the model think before it answers, or not, or unseen. [as it does; shown on a terminal]",
    ),
    option(
        PROMPT,
        "--chat-template-kwargs",
        callback=_template_variables,
        metavar="JSON",
        help="More that the chat template reads: '{\"enable_thinking\": false}'.",
    ),
    option(
        OUTPUT,
        "--markdown/--no-markdown",
        default=True,
        help="Draw an answer's Markdown on a terminal. [--markdown]",
    ),
)
chat_options = with_options(*_CHAT)
"""Adds what says how a model is asked to answer, and how an answer is shown."""


def template_settings(ctx: click.Context, *, template: bool) -> dict[str, Any]:
    """Return `variables` and `think` of a Conversation. Raises click.UsageError where there is no template
    to read them."""
    asks = {"variables": ctx.params["chat_template_kwargs"], "think": ctx.params["think"]}
    for name, flag_name in (("variables", "--chat-template-kwargs"), ("think", "--think")):
        if asks[name] and not template:
            raise click.UsageError(f"{flag_name} needs the chat template, which --raw leaves out; add --chat")
    return asks
