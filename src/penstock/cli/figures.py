"""Reads figures of machines as they are written on a command line, and shows numbers of forecasts."""

import re
from collections.abc import Callable, Mapping

from penstock.base.errors import ConfigError
from penstock.base.units import format_rate, format_size, parse_size
from penstock.engine.cpu_share import FALL
from penstock.ops.row_classes import CLASSES

_OPERATIONS = re.compile(
    r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([kmgtp]?)\s*(?:flops|flop/s)?\s*", re.IGNORECASE | re.ASCII
)


def parse_rate(text: str) -> float:
    """Read bytes/s from `3GB/s`, or `3GB`. Raises ConfigError, also where the unit was forgotten."""
    try:
        rate = parse_size(text.strip().lower().removesuffix("/s"))
    except ConfigError as error:
        raise ConfigError(f"cannot read {text!r} as a rate; write it like 3GB/s") from error
    if rate < 10**6:
        raise ConfigError(f"rate {text!r} is less than 1 MB/s; write it like 3GB/s")
    return float(rate)


def parse_disk(text: str) -> float:
    """The same; 0 for `none` and `0`, which is no disk."""
    return 0.0 if text.strip().lower() in ("none", "0") else parse_rate(text)


def parse_operations(text: str) -> float:
    """Read operations/s from `700TFLOPS` or `7e14`. Raises ConfigError."""
    match = _OPERATIONS.fullmatch(text)
    number = float(match[1]) * 1000.0 ** " kmgtp".index(match[2].lower() or " ") if match else 0.0
    if not 1e6 <= number < 1e30:
        raise ConfigError(f"cannot read {text!r} as operations a second; write it like 700TFLOPS")
    return number


def parse_cpu_rates(text: str) -> tuple[float, ...]:
    """Read the CPU's rates by class of rows: one for each, or one from which those of more rows are taken to
    fall as FALL says. Raises ConfigError."""
    rates = tuple(map(parse_rate, text.split(",")))
    if len(rates) == 1:
        return tuple(rates[0] * part for part in FALL)
    if len(rates) != CLASSES:
        raise ConfigError(
            f"cannot read {text!r} as rates of the CPU; write one, or one each for 1, 2, 4, 8 and 16 rows, "
            "like 60GB/s,50GB/s,40GB/s,30GB/s,20GB/s"
        )
    return rates


PARSERS: Mapping[str, Callable[[str], float]] = {
    "device_memory": parse_size,
    "host_memory": parse_size,
    "link_rate": parse_rate,
    "disk_rate": parse_disk,
    "device_read": parse_rate,
    "compute": parse_operations,
}
"""Flags are named without dashes."""


def format_figure(name: str, value: float) -> str:
    """Return a machine's figure with its unit."""
    if name.endswith("memory"):
        return format_size(value) if value else "the device"
    if name == "compute":
        return f"{value / 1e12:.3g} TFLOP/s"
    return format_rate(value) if value else "none"


def format_pace(number: float) -> str:
    """Return three digits, and no powers of ten: `0.0309`, `57.9`, `9,949`."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.2g}" if number < 1e-3 else f"{number:#.3g}"


def format_seconds(seconds: float) -> str:
    """Return seconds, or milliseconds below one."""
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{format_pace(seconds)} s"


def format_count(number: float) -> str:
    """Return a count in billions or millions: `8.03B`."""
    return f"{number / 1e9:.3g}B" if number >= 1e9 else f"{number / 1e6:.3g}M"
