"""Settings that are declared once: a field of a dataclass that knows its help, its limits and its default.

From `setting(...)` come the checks of a value (`checked`), the flags of the command line and the keys of
penstock.toml (cli/options), the keyword arguments of a constructor (`keywords_of`) with their help, and
docs/settings.md (tools/settings_table.py).
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from enum import Enum
from math import inf
from pathlib import Path
from textwrap import fill
from types import NoneType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, get_args

from penstock.base.errors import ConfigError
from penstock.base.units import parse_size

MOST = (1 << 31) - 1
"""The most tokens, blocks and the like: what 32 bits count, and more than any machine holds."""
UNKNOWN_WHOLE = 1 << 50
"""Bytes that a share is taken of while it is only checked. Boot knows the memory that it is a share of."""

P = ParamSpec("P")
Made = TypeVar("Made")
Owner = TypeVar("Owner")

if TYPE_CHECKING:
    # A type checker takes the constructor's argument from __set__, and the attribute from __get__.

    class AnyPath:
        """The type of a field that is given as text or a path, and read as a path."""

        def __get__(self, instance: object, owner: type | None = None) -> Path: ...
        def __set__(self, instance: object, value: str | Path) -> None: ...

    class OptionalPath(AnyPath):
        """The type of a path for which None means the default."""

        def __set__(self, instance: object, value: str | Path | None) -> None: ...
else:
    AnyPath, OptionalPath = str | Path, str | Path | None


class ValueKind(Enum):
    """The kinds of values that settings have, in words for the docs."""

    FLAG = "on or off"
    PATH = "path"
    SIZE = "size"
    NUMBER = "number"
    WHOLE = "whole number"
    TEXT = "text"
    OBJECT = "object"


_KINDS = {
    bool: ValueKind.FLAG,
    Path: ValueKind.PATH,
    float: ValueKind.NUMBER,
    int: ValueKind.WHOLE,
    str: ValueKind.TEXT,
}
"""The kind of a field by the first of these types that its annotation names; text or a number is a size."""
_TYPES: Mapping[ValueKind, Any] = {
    ValueKind.FLAG: bool,
    ValueKind.PATH: Path,
    ValueKind.NUMBER: int | float,
    ValueKind.WHOLE: int,
    ValueKind.TEXT: str,
}
"""The types of values by kind; the others have rules of their own, or none."""


@dataclass(frozen=True, slots=True)
class SettingField:
    """One declared setting.

    name: of the field, and with dashes of the flag.
    kind, optional: from the field's annotation. optional: None is allowed, and means the default.
    help: one sentence for --help and the docs. details: more sentences for the docs and help(LLM).
    usual: what the default does, in words, where it does not say so itself.
    choices: the values that are allowed, if they can be listed.
    limits: the least and the largest number that is allowed; from 0 on also a size of 0.
    unit: what a number counts. check: raises ConfigError for text that is not allowed.
    """

    name: str
    kind: ValueKind
    optional: bool
    default: object
    help: str
    details: str
    usual: str
    choices: tuple[object, ...]
    limits: tuple[float, float]
    unit: str
    check: Callable[[Any], object]

    @property
    def sentence(self) -> str:
        """Return the help, with the choices if there are any."""
        *most, last = map(str, self.choices or ("",))
        return f"{self.help[:-1]}: {', '.join(most)} or {last}." if self.choices else self.help

    @property
    def shown_default(self) -> str:
        """Return the default in words."""
        said = str(self.default).removesuffix(".0")
        return self.usual or {"True": "on", "False": "off"}.get(said, said)

    @property
    def allowed(self) -> str:
        """Return what a value must be, in words."""
        least, most = self.limits
        span = f"from {least:g} on" if most == inf else f"from {least:g} to {most:,g}"
        if self.kind in (ValueKind.NUMBER, ValueKind.WHOLE):
            return (
                f"a {self.kind.value} {f'above zero, at most {MOST:,}' if self.limits == (1, MOST) else span}"
            )
        words = {ValueKind.FLAG: "True or False", ValueKind.PATH: "a path"}
        return words.get(self.kind, str(self.kind.value))

    def checked(self, value: Any) -> object:
        """Return `value` as the settings hold it: text that is a path as a Path, None as the default.

        Raises ConfigError for what is not allowed.
        """
        if value is None and self.optional:
            return self.default
        if self.kind is ValueKind.PATH and isinstance(value, str):
            value = Path(value)
        misplaced = isinstance(value, bool) and self.kind is not ValueKind.FLAG  # True is an int to Python.
        if self.choices and (misplaced or value not in self.choices):
            listed = ", ".join(map(str, self.choices))
            raise ConfigError(f"{self.name} {value!r} is not known; choose one of {listed}")
        right = not misplaced and isinstance(value, _TYPES.get(self.kind, object)) and "\0" not in str(value)
        if self.kind in (ValueKind.NUMBER, ValueKind.WHOLE) and right and not self.choices:
            right = self.limits[0] <= value <= self.limits[1]
        if not right:
            raise ConfigError(f"{self.name} {value!r} must be {self.allowed}")
        try:
            if self.kind is ValueKind.SIZE and not (self.limits[0] == 0 and value in (0, "0")):
                parse_size(value, whole=UNKNOWN_WHOLE)
        except ConfigError as error:
            raise ConfigError(f"{self.name}: {error}") from error
        self.check(value)
        return value


def setting(
    default: Any,
    *,
    help: str,
    details: str = "",
    usual: str = "",
    choices: tuple[object, ...] = (),
    limits: tuple[float, float] = (1, MOST),
    unit: str = "",
    check: Callable[[Any], object] = lambda _: None,
) -> Any:
    """Return a dataclass field that declares a setting; `SettingField` says what the arguments are.

    The type is Any so that a checker takes the field's annotation.
    """
    words = {"help": help, "details": details, "usual": usual, "unit": unit}
    return field(default=default, metadata=words | {"choices": choices, "limits": limits, "check": check})


def settings_of(kind: type) -> tuple[SettingField, ...]:
    """Return the settings that a dataclass declares, in their order; other fields are left out."""

    def made(one: Field[Any]) -> SettingField:
        types = get_args(one.type) or (one.type,)
        known = [of for name, of in _KINDS.items() if name in types] or [ValueKind.OBJECT]
        own = ValueKind.SIZE if {str, int} <= {*types} else known[0]
        return SettingField(one.name, own, NoneType in types, one.default, **one.metadata)

    return tuple(made(one) for one in fields(kind) if "help" in one.metadata)


def check_settings(made: Any) -> None:
    """Check each setting of a frozen dataclass, and put it into the form that `checked` gives it.

    To be called by __post_init__. Raises ConfigError.
    """
    for one in settings_of(type(made)):
        object.__setattr__(made, one.name, one.checked(getattr(made, one.name)))


def described(kind: type) -> str:
    """Return a paragraph for each setting of a dataclass: its name, help, details and default."""
    texts = (
        f"{one.name}: {one.sentence} {one.details}".rstrip() + f" [{one.shown_default}]"
        for one in settings_of(kind)
    )
    return "\n".join(fill(text, 80, subsequent_indent="    ") for text in texts)


def keywords_of(
    made: Callable[P, Made],
) -> Callable[[Callable[[Owner, Made], None]], Callable[Concatenate[Owner, P], None]]:
    """Return a decorator for an `__init__(self, made)` that is then called with the arguments of `made`.

    made: a settings dataclass. Type checkers, editors and help() see its keywords with their types.
    """

    def decorate(init: Callable[[Owner, Made], None]) -> Callable[Concatenate[Owner, P], None]:
        @functools.wraps(init)
        def __init__(self: Owner, /, *args: P.args, **kwargs: P.kwargs) -> None:
            init(self, made(*args, **kwargs))

        own = inspect.signature(made)
        itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        shown = own.replace(parameters=[itself, *own.parameters.values()], return_annotation=None)
        __init__.__signature__ = shown  # type: ignore[attr-defined]
        __init__.__doc__ = described(made) if isinstance(made, type) else init.__doc__
        return __init__

    return decorate
