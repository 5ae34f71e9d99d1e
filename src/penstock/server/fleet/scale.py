"""How many replicas there are to be, and where."""

from dataclasses import dataclass

from penstock.base.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Scale:
    """The number of replicas, and where they run.

    least, most: replicas; between them there are as many as there is work for.
    address: of a Ray cluster; None is one of its own, on this machine.
    cpus: CPUs for each; None is an equal part of the machine, or one beside GPUs.
    up, down: seconds for which there must be work for more, or for fewer, before there are.
    """

    least: int
    most: int
    address: str | None = None
    cpus: float | None = None
    up: float = 30.0
    down: float = 600.0

    def __str__(self) -> str:
        if self.least < self.most:
            return f"{self.least} to {self.most} replicas"
        return "a replica" if self.most == 1 else f"{self.most} replicas"


def bounds(text: str) -> tuple[int, int]:
    """The least and the most that are meant by `N` or `MIN:MAX`. Raises ConfigError."""
    least, colon, most = text.partition(":")
    numbers = (least, most if colon else least)
    if not all(number.isascii() and number.isdigit() and int(number[:9]) > 0 for number in numbers) or int(
        numbers[0]
    ) > int(numbers[1]):
        raise ConfigError(
            f"replicas {text!r} are not a number, or the least and the most of them; write 2, or 1:4"
        )
    return int(numbers[0]), int(numbers[1])
