"""Declare settings once: each is a field of a dataclass that knows its help, its limits and its default.

From `setting(...)` come the checks of a value (`checked`), the flags of the command line and the keys of
penstock.toml (cli/options), the keyword arguments of a constructor (`keywords_of`) with their help, and
docs/settings.md (tools/settings_table.py).
"""

import functools
import inspect
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from math import inf
from pathlib import Path
from textwrap import fill
from types import NoneType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, get_args

from penstock.base.errors import ConfigError
from penstock.base.other_names import unknown_setting
from penstock.base.units import parse_memory

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

    class NamedPaths:
        """The type of paths with names, read as texts `name=path`."""

        def __get__(self, instance: object, owner: type | None = None) -> tuple[str, ...]: ...
        def __set__(
            self, instance: object, value: str | Sequence[str] | Mapping[str, str | Path]
        ) -> None: ...
else:
    AnyPath, OptionalPath, NamedPaths = str | Path, str | Path | None, tuple


Size = str | int
"""The type of a size: text such as 16GiB or 80%, or bytes."""
WORDS: Mapping[object, str] = {
    Size: "size",
    Path: "path",
    bool: "on or off",
    float: "number",
    int: "whole number",
    str: "text",
    tuple: "name=path",
}
"""The kinds of settings, in words for the docs. A setting is of the first kind that its annotation names."""


@dataclass(frozen=True, slots=True)
class SettingField:
    """Describes one declared setting.

    name: of the field, and with dashes of the flag.
    kind: the one of WORDS that the annotation names; object for what only a program can give.
    optional: whether None is allowed, which means the default.
    help: one sentence for --help and the docs.
    details: more sentences for the docs and help(LLM).
    usual: what the default does, in words, where it does not say so itself.
    choices: the values that are allowed, if they can be listed.
    limits: the least and the largest number that is allowed; from 0 on also a size of 0.
    unit: what a number counts.
    check: raises ConfigError for text that is not allowed.
    """

    name: str
    kind: Any
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
        start = "above zero, at most" if least == 1 else f"from {least:g} to"
        span = f"from {least:g} on" if most == inf else f"{start} {most:,}"
        words = {
            bool: "True or False",
            Path: "a path",
            int: f"a whole number {span}",
            float: f"a number {span}",
        }
        return words.get(self.kind, str(WORDS.get(self.kind)))

    def checked(self, value: Any) -> object:
        """Return `value` as the settings hold it: text that is a path as a Path, None as the default.

        Raises ConfigError for what is not allowed.
        """
        if value is None and self.optional:
            return self.default
        if self.kind is Path and isinstance(value, str | os.PathLike):
            value = Path(value)
        if self.kind is tuple:
            return named_paths(self.name, value)
        if self.kind == Size:
            self._check_size(value)
            return value
        misplaced = isinstance(value, bool) and self.kind is not bool  # True is an int to Python.
        if self.choices and (misplaced or value not in self.choices):
            listed = ", ".join(map(str, self.choices))
            raise ConfigError(f"{self.name} {value!r} is not known; choose one of {listed}")
        right = not misplaced and isinstance(value, float | int if self.kind is float else self.kind)
        if self.kind in (int, float) and right and not self.choices:
            right = self.limits[0] <= value <= self.limits[1]
        if not right or (self.kind is Path and "\0" in str(value)):
            raise ConfigError(f"{self.name} {value!r} must be {self.allowed}")
        self.check(value)
        return value

    def _check_size(self, value: Any) -> None:
        try:
            if self.limits[0] != 0 or value not in (0, "0"):
                parse_memory(value, whole=UNKNOWN_WHOLE)
        except ConfigError as error:
            raise ConfigError(f"{self.name}: {error}") from error


def named_paths(setting: str, value: object) -> tuple[str, ...]:
    """Return paths with names as texts `name=path`, of a text, of several, or of a mapping from names to
    paths.

    Raises ConfigError for what is none of these, and for a name that comes twice.
    """
    if isinstance(value, Mapping):
        value = [f"{name}={path}" for name, path in value.items()]
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"{setting} {value!r} must be texts name=path, or a mapping from names to paths")
    names = set[str]()
    for text in texts:
        name, _, path = text.partition("=")
        if not (name and path) or not name.isprintable() or "\0" in path:
            raise ConfigError(f"{setting} {text!r} must be name=path")
        if name in names:
            raise ConfigError(f"{setting} has {name!r} twice; give each its own name")
        names.add(name)
    return tuple(texts)


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


def settings_of(declared: Any) -> tuple[SettingField, ...]:
    """Return the settings that a dataclass declares, in their order; other fields are left out."""

    def made(one: Field[Any]) -> SettingField:
        types = {*get_args(one.type)} or {one.type}
        kind = next((kind for kind in WORDS if ({*get_args(kind)} or {kind}) <= types), object)
        return SettingField(one.name, kind, NoneType in types, one.default, **one.metadata)

    return tuple(made(one) for one in fields(declared) if "help" in one.metadata)


class Declared:
    """Checks the settings of a dataclass that derives from it. Raises ConfigError for values that are not
    allowed."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for one in settings_of(type(self)):
            object.__setattr__(self, one.name, one.checked(getattr(self, one.name)))


def as_flags(text: str, names: Collection[str]) -> str:
    """Return a text in which settings of these names are written as flags: max_length as --max-length."""
    return re.sub(
        # Not within the name of a file, or within quotes.
        r"(?<![\w./'\"-])[a-z]+_[a-z_]+(?![\w/'\"=-]|\.\w)",
        lambda name: f"--{name[0].replace('_', '-')}" if name[0] in names else name[0],
        text,
    )


def described(kind: type) -> str:
    """Return a paragraph for each setting of a dataclass: its name, help, details and default."""
    texts = (
        f"{one.name}: {one.sentence} {one.details}".rstrip() + f" [{one.shown_default}]"
        for one in settings_of(kind)
    )
    return "\n".join(fill(text, 80, subsequent_indent="    ") for text in texts)


_WRITTEN: Mapping[object, object] = {NamedPaths: str | Sequence[str] | Mapping[str, str | Path]}
"""This may be given for a field whose annotation at run time does not say it."""


class _Lines(inspect.Signature):
    """A signature that help() shows with a line for each parameter."""

    def __str__(self) -> str:
        lines = list[str]()
        for one in self.parameters.values():
            if one.kind is one.KEYWORD_ONLY and "*" not in lines:
                lines.append("*")
            typed = re.sub(r"\b([a-z]\w*\.)+", "", str(one.replace(default=one.empty)))
            lines.append(typed if one.default is one.empty else f"{typed} = {one.default!r}")
        return "".join(["(", *(f"\n    {line}," for line in lines), "\n)"])


def _plain(parameter: inspect.Parameter) -> inspect.Parameter:
    """Return a parameter as a user writes it, without places of this machine."""
    default, annotation = parameter.default, parameter.annotation
    if isinstance(default, Path):
        default = None if default.is_absolute() else str(default)
    return parameter.replace(annotation=_WRITTEN.get(annotation, annotation), default=default)


def keywords_of(
    made: Callable[P, Made], requests: Collection[str] = ()
) -> Callable[[Callable[[Owner, Made], None]], Callable[Concatenate[Owner, P], None]]:
    """Return a decorator for an `__init__(self, made)` that is then called with the arguments of `made`.

    requests: names of settings that requests have, and the engine has not.
    made: a settings dataclass. Type checkers, editors and help() see its keywords with their types,
    and help() shows each in a line.
    """

    def decorate(init: Callable[[Owner, Made], None]) -> Callable[Concatenate[Owner, P], None]:
        @functools.wraps(init)
        def __init__(self: Owner, /, *args: P.args, **kwargs: P.kwargs) -> None:
            try:
                own.bind(*args, **kwargs)
            except TypeError as error:  # Whoever calls has never heard of `made`.
                strange = next((name for name in kwargs if name not in own.parameters), None)
                meant = unknown_setting(strange, own.parameters, requests) if strange else ""
                raise TypeError(f"{type(self).__name__}() {error}{meant}") from None
            init(self, made(*args, **kwargs))

        own = inspect.signature(made)
        itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = [*map(_plain, own.parameters.values())]
        __init__.__signature__ = _Lines([itself, *parameters])  # type: ignore[attr-defined]
        __init__.__annotations__ = {one.name: one.annotation for one in parameters} | {"return": None}
        __init__.__doc__ = described(made) if isinstance(made, type) else init.__doc__
        return __init__

    return decorate
