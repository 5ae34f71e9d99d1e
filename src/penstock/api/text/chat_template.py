"""Turns a conversation into a prompt with the model's own template: a foreign program, so it runs fenced in.

The fence keeps it from everything but its variables, and ends it after so many steps or characters. What one
operation may take is not bounded here: `rendering` runs this in a process that has limits.
"""

import json
import threading
from collections.abc import Mapping
from datetime import datetime
from typing import NoReturn

from jinja2 import TemplateError, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from penstock.base.errors import RequestError

MOST_CHARACTERS = 1 << 26
"""Characters that a rendered conversation may have: far beyond any context, far below memory."""
MOST_STEPS = 2_000_000
"""Rounds of loops, about two seconds of them, and calls. A template that looks from each of 1,400 messages at
all later ones takes a million."""


class ChatTemplate:
    """Renders a compiled template. Threads may share it: the count of steps belongs to one rendering, which a
    lock makes the only one."""

    def __init__(self, source: str) -> None:
        self._lock = threading.Lock()
        self._fence = _Fence()
        try:
            tree = self._fence.parse(source)
            self.variables = frozenset(meta.find_undeclared_variables(tree))
            """Of those that it is given, the ones that it reads; there may be others in it."""
            for loop in tree.find_all(nodes.For):
                loop.body.insert(0, nodes.ExprStmt(nodes.EnvironmentAttribute("next_round")))
            self._template = self._fence.from_string(tree)
        except (
            Exception
        ) as error:  # syntax; and compiling evaluates constants, which can fail as rendering can
            line = (
                f" in line {error.lineno}"
                if isinstance(error, TemplateError) and hasattr(error, "lineno")
                else ""
            )
            raise RequestError(
                f"the model's chat template has an error{line}: {_reason(error)}; repair the template, or "
                "send plain prompts instead of messages"
            ) from error

    def render(self, variables: Mapping[str, object]) -> str:
        """Return the text of a conversation. Raise RequestError for whatever goes wrong in the template."""
        try:  # JSON's own types have no methods that could lead a template astray
            plain = json.loads(json.dumps(variables))
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(
                f"messages, tools and template variables must be JSON values: {_reason(error)}"
            ) from error
        parts, size = [], 0
        with self._lock:
            self._fence.steps = 0
            try:
                for part in self._template.generate(plain):
                    parts.append(part)
                    size += len(part)
                    if size > MOST_CHARACTERS:
                        raise SecurityError(f"it wrote more than {MOST_CHARACTERS} characters")
            except Exception as error:  # a foreign program fails in any way it likes
                raise RequestError(
                    f"the model's chat template does not take these messages: {_reason(error)}; change the "
                    "messages, or send a plain prompt"
                ) from error
        return "".join(parts)


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks what an assistant wrote, for training; here it is a
    plain block."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Fence(ImmutableSandboxedEnvironment):
    """A sandbox that also ends a template which runs on and on."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        self.steps = 0
        self.filters["tojson"] = _tojson
        self.globals |= {"raise_exception": _raise, "strftime_now": _now}
        del self.globals["lipsum"]

    @property
    def next_round(self) -> None:
        """Count a step. Templates read this at the head of every loop's body: a call there would take most of
        a loop's time."""
        self._count()

    def _count(self) -> None:
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise SecurityError(f"it took more than {MOST_STEPS} steps")

    def call(self, context: Context, function: object, /, *args: object, **kwargs: object) -> object:
        self._count()
        return super().call(context, function, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        sizes = [len(side) if isinstance(side, str | list | tuple) else side for side in (left, right)]
        if operator == "**" or (sizes != [left, right] and sizes[0] * sizes[1] > MOST_CHARACTERS):  # type: ignore[operator]
            raise SecurityError(
                f"{type(left).__name__} {operator} {type(right).__name__} may become too large"
            )
        return super().call_binop(context, operator, left, right)


def _tojson(value: object, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str,
str] | None = None,
            sort_keys: bool = False) -> str:  # fmt: skip
    """Jinja's own would escape `<` and `>` for HTML; models are trained on plain JSON."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: object) -> NoReturn:
    raise TemplateError(str(message))


def _now(style: str) -> str:
    return datetime.now().strftime(style)


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, TemplateError) else f"{type(error).__name__}: {text}"
