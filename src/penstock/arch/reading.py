"""Reads values of a config.json and checks their types."""

from collections.abc import Mapping

from penstock.base.errors import UnsupportedModelError


class ConfigReader:
    """A reader returns values of a config.json, each of the type that is asked for.

    Raises UnsupportedModelError, which names the key.
    """

    def __init__(self, config: Mapping[str, object], where: str) -> None:
        """Read `config`. where: opens the messages of errors."""
        self.config = config
        self.where = where

    def get(self, key: str) -> object:
        """Return whatever a key has; None if it is missing."""
        return self.config.get(key)

    def whole(self, key: str, default: int | None = None, *, low: int = 1, high: int = 2**40) -> int:
        """Return a whole number from `low` to `high`. A key that is missing or null has the default."""
        value = self.config.get(key)
        value = default if value is None else value
        if value is None:
            raise UnsupportedModelError(
                f"{self.where}: key '{key}' is missing, which must be a whole number; fetch config.json again"
            )
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise UnsupportedModelError(
                f"{self.where}: key '{key}' is {value!r}; it must be a whole number from {low} to {high}; "
                "correct config.json, or fetch it again"
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive number. A key that is missing or null has the default."""
        value = self.config.get(key)
        value = default if value is None else value
        # Within these bounds no formula of a model, rope's powers included, leaves the range of a double.
        if isinstance(value, bool) or not isinstance(value, int | float) or not 1e-30 <= value <= 1e30:
            raise UnsupportedModelError(
                f"{self.where}: key '{key}' is {value!r}; it must be a number from 1e-30 to 1e30; correct "
                "config.json, or fetch it again"
            )
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false. A key that is missing or null has the default."""
        value = self.config.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise UnsupportedModelError(
                f"{self.where}: key '{key}' is {value!r}; it must be true or false; correct config.json, or "
                "fetch it again"
            )
        return value

    def only(self, key: str, *supported: object) -> None:
        """Refuse any value but the supported ones. A missing key counts as the first of them."""
        value = self.config.get(key, supported[0])
        if value not in supported:
            raise UnsupportedModelError(
                f"{self.where}: key '{key}' is {value!r}; supported: {', '.join(map(repr, supported))}; use "
                "another checkpoint"
            )
