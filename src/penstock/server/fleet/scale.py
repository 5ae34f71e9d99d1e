"""Declares how many replicas there are to be, and where."""

from dataclasses import dataclass
from math import inf

from penstock.base.errors import ConfigError
from penstock.base.setting import Declared, setting


@dataclass(frozen=True, slots=True)
class Scale(Declared):
    """Sets the number of replicas: at least `least`, and up to `most` as there is work. Raises
    ConfigError."""

    least: int
    most: int
    ray_address: str | None = setting(
        None,
        help="Address of a Ray cluster, on a machine of it; auto finds it.",
        usual="a new cluster, on this machine",
    )
    replica_cpus: float | None = setting(
        None,
        help="CPUs of each replica.",
        usual="equal parts; 1 beside GPUs",
        limits=(0.001, inf),
        unit="CPUs",
    )
    scale_up_after: float = setting(
        30.0,
        help="Seconds with work for more replicas after which there are more.",
        limits=(0, inf),
        unit="seconds",
    )
    scale_down_after: float = setting(
        600.0,
        help="Seconds with too little work after which there are fewer.",
        limits=(0, inf),
        unit="seconds",
    )

    def __str__(self) -> str:
        if self.least < self.most:
            return f"{self.least} to {self.most} replicas"
        return "a replica" if self.most == 1 else f"{self.most} replicas"


def bounds(text: str) -> tuple[int, int]:
    """Return the least and the most that are meant by `N` or `MIN:MAX`. Raises ConfigError."""
    least, colon, most = text.partition(":")
    numbers = (least, most if colon else least)
    if not all(number.isascii() and number.isdigit() and int(number[:9]) > 0 for number in numbers) or int(
        numbers[0]
    ) > int(numbers[1]):
        raise ConfigError(f"replicas {text!r} is neither a number nor a least and a most; write 2, or 1:4")
    return int(numbers[0]), int(numbers[1])
