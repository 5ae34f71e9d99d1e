"""Sizes as people write them."""

import pytest

from penstock.base.errors import ConfigError
from penstock.base.units import format_duration, parse_memory, parse_size, parse_tokens


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("16GiB", 16 << 30),
        ("1.5GB", 1_500_000_000),
        ("800M", 800 << 20),
        ("3 kb", 3000),
        ("7", 7),
        (7, 7),
        (".5k", 512),
        ("1_000B", 1000),
    ],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "count"),
    [("32K", 32768), ("1m", 1 << 20), ("1.5K", 1536), (" 4K ", 4096), ("0K", 0)]
    + [(text, None) for text in ("4096", "32KB", "32KiB", "0.3K", "-1K", "K", "32k tokens", "1G", "\u0663K")],
)
def test_counts_of_tokens(text: str, count: int | None) -> None:
    assert parse_tokens(text) == count


def test_memory_has_a_unit_where_a_number_is_too_small_for_bytes() -> None:
    with pytest.raises(ConfigError, match=r"^size '24' would be 24 bytes; write its unit, as in 16GiB$"):
        parse_memory("24")
    for text, size in (("1048576", 1 << 20), ("24B", 24), (24, 24), ("16GiB", 16 << 30)):
        assert parse_memory(text) == size


def test_a_share_is_of_a_whole() -> None:
    assert parse_size("80%", whole=1000) == 800
    for text, whole in (
        ("80%", None),
        ("101%", 1000),
        ("0", None),
        ("0%", 1000),
        ("1e400", None),
        ("9PB", None),
    ):
        with pytest.raises(ConfigError):
            parse_size(text, whole=whole)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0432, "43.2 ms"), (0.999, "999 ms"), (1.0, "1 s"), (61.23, "61.2 s")]
)
def test_a_time_below_a_second_is_in_milliseconds(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
