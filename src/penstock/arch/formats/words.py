"""Read a quantiser's part of config.json strictly: what has the wrong type is refused by its name."""

import re
from collections.abc import Mapping
from typing import NoReturn

from penstock.arch.formats.names import EMBEDDING, ModuleNames, checked_regex
from penstock.base.errors import UnsupportedModelError

_MOST = 10_000
"""Entries of a list or object that are read."""
_SHOWN = 120
"""Characters of what a stranger wrote that a message repeats."""
_EXTENTS = re.compile(r"([0-9]{1,9})x([0-9]{1,9})")


class Words:
    """Words read an object of config.json. `where` opens the messages of errors."""

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self._values, self._where = values, where

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the keys of the object."""
        return tuple(self._values)

    def get(self, key: str, default: object = None) -> object:
        """Return what is at `key`; `default` for nothing and null."""
        value = self._values.get(key)
        return default if value is None else value

    def refuse(self, key: str, supported: str) -> NoReturn:
        """Raise UnsupportedModelError for what is at `key`."""
        raise self.unsupported(f"key {key[:80]!r} is {str(self._values.get(key))[:80]}", supported)

    def unsupported(self, what: str, supported: str) -> UnsupportedModelError:
        """Return the error for `what`, which is not among what is `supported`."""
        return UnsupportedModelError(
            f"{self._where}: {what[:_SHOWN]}; supported: {supported}; use a checkpoint of the model that "
            "has one of these"
        )

    def text(self, key: str, default: str) -> str:
        """Return the string at `key`."""
        value = self.get(key, default)
        return value if isinstance(value, str) else self.refuse(key, "a string")

    def number(self, key: str, default: int | None = None) -> int:
        """Return the whole number at `key`."""
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            self.refuse(key, "a whole number")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Return the truth value at `key`."""
        value = self.get(key, default)
        return value if isinstance(value, bool) else self.refuse(key, "true or false")

    def one_of(self, key: str, default: str, known: tuple[str, ...]) -> str:
        """Return the string at `key`, one of `known`."""
        value = self.text(key, default)
        return value if value in known else self.refuse(key, ", ".join(known))

    def object(self, key: str) -> "Words | None":
        """Return the object at `key`, None for nothing."""
        value = self.get(key)
        if value is None:
            return None
        return (
            Words(value, f"{self._where}.{key}") if isinstance(value, dict) else self.refuse(key, "an object")
        )

    def objects(self, key: str) -> dict[str, "Words"]:
        """Return the objects in the object at `key`, by their names."""
        value = self.get(key, {})
        if (
            not isinstance(value, dict)
            or len(value) > _MOST
            or not all(isinstance(v, dict) for v in value.values())
        ):
            self.refuse(key, "an object of objects")
        return {name: Words(one, f"{self._where}.{key}.{name[:_SHOWN]}") for name, one in value.items()}

    def list(self, key: str) -> tuple[str, ...]:
        """Return the strings in the list at `key`; none for nothing."""
        value = self.get(key, [])
        if not isinstance(value, list) or len(value) > _MOST or not all(isinstance(v, str) for v in value):
            self.refuse(key, "a list of strings")
        return tuple(value)

    def names(self, key: str) -> ModuleNames:
        """Return the modules that the list at `key` names: whole names, regular expressions after `re:`, and
        the classes Linear and Embedding."""
        listed = self.list(key)
        regexes = tuple(
            checked_regex(one[3:], f"{self._where}.{key}") for one in listed if one.startswith("re:")
        )
        whole = frozenset(one for one in listed if not one.startswith("re:"))
        named = whole - {"Linear", "Embedding"} | ({EMBEDDING} if "Embedding" in whole else set())
        return ModuleNames(named, regexes, linear="Linear" in whole)

    def block(self, key: str) -> tuple[int, int]:
        """Return the two whole numbers at `key`, as a list or as text ("128x128")."""
        value = self.get(key)
        if isinstance(value, str) and (extents := _EXTENTS.fullmatch(value)):
            value = [int(extents[1]), int(extents[2])]
        if not isinstance(value, list) or len(value) != 2 or not all(type(v) is int and v > 0 for v in value):
            self.refuse(key, "two numbers, such as [128, 128]")
        return value[0], value[1]
