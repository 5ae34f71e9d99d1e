"""Sizes, shares and rates as people write them (`16GiB`, `80%`, `3GB/s`), and numbers as people read them."""

import math
import re

from penstock.base.errors import ConfigError

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[_letter] = _UNITS[_letter + "ib"] = 1024**_power
    _UNITS[_letter + "b"] = 1000**_power

_SIZE = re.compile(r"\s*(\d+(?:_\d+)*(?:\.\d+)?|\.\d+)\s*([a-z]*)\s*", re.IGNORECASE | re.ASCII)
_TOKENS = re.compile(r"\s*(\d+(?:\.\d+)?)([km])\s*", re.IGNORECASE | re.ASCII)
_SHARE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*", re.ASCII)


def parse_size(text: str | int, *, whole: int | None = None) -> int:
    """Return the bytes that `text` means.

    text: `16GiB`, `1.5GB`, `800M` (binary), a number of bytes, or `80%` of `whole` bytes.
    Raises ConfigError for what is not a size or not above zero, and for a share without a whole.
    """
    if isinstance(text, bool) or not isinstance(text, str | int):
        raise ConfigError(f"a size is text such as 16GiB or 80%, or a number of bytes; got {text!r}")
    if isinstance(text, int):
        size = text
    elif share := _SHARE.fullmatch(text):
        percent = float(share[1])
        if percent > 100:
            raise ConfigError(f"size {text!r} is more than all there is; write at most 100%")
        if whole is None:
            raise ConfigError(
                f"size {text!r} is a percentage, which cannot be used here; write an amount such as 16GiB"
            )
        size = int(whole * percent / 100)
    else:
        match = _SIZE.fullmatch(text)
        if match is None or match[2].lower() not in _UNITS:
            raise ConfigError(
                f"cannot read {text!r} as a size; write it like 16GiB, 800MB, 80% or a number of bytes"
            )
        number = float(match[1]) * _UNITS[match[2].lower()]
        if not math.isfinite(number) or number >= 2**63:
            raise ConfigError(f"size {text!r} is larger than any memory; write it like 16GiB")
        size = int(number)
    if size <= 0:
        raise ConfigError(f"size {text!r} must be above zero; write it like 16GiB or 80%")
    return size


def parse_memory(text: str | int, *, whole: int | None = None) -> int:
    """Return the bytes that `text` means, as `parse_size` does.

    Raises ConfigError also for a small number without a unit: nobody means 24 bytes of memory.
    """
    size = parse_size(text, whole=whole)
    if isinstance(text, str) and text.strip().isdecimal() and size < 1_000_000:
        raise ConfigError(f"size {text!r} would be {counted(size, 'byte')}; write its unit, as in 16GiB")
    return size


def parse_tokens(text: str) -> int | None:
    """Return the number that a count of tokens with a K or an M means: `32K` is 32,768, `1.5K` is 1,536. None
    for any other text."""
    match = _TOKENS.fullmatch(text)
    if match is None:
        return None
    number = float(match[1]) * _UNITS[match[2].lower()]
    return int(number) if number.is_integer() else None


def format_size(size: float) -> str:
    """Return `size` bytes in binary units with three significant digits: `512 B`, `1.50 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            break
        size /= 1024
    if unit == "B":
        return f"{size:.0f} B"
    return f"{size:.{2 if abs(size) < 10 else 1 if abs(size) < 100 else 0}f} {unit}"


def format_rate(bytes_per_second: float) -> str:
    """Return a link's rate in decimal units, as links are sold: `53.4 GB/s`."""
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if abs(bytes_per_second) < 1000 or unit == "TB":
            break
        bytes_per_second /= 1000
    size = abs(bytes_per_second)
    return f"{bytes_per_second:.{2 if size < 10 else 1 if size < 100 else 0}f} {unit}/s"


def format_duration(seconds: float) -> str:
    """Return seconds, or milliseconds below one: `43.2 ms`."""
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def counted(number: int, what: str, more: str = "") -> str:
    """Return a number of things: `1 token`, `2,000 tokens`. more: the plural, if it has no s."""
    return f"{number:,} {what if number == 1 else more or what + 's'}"
