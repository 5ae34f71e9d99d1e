"""Aligns texts in columns."""

from collections.abc import Iterable, Sequence


def headed(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table: its head begins at the margin, what is below it two columns in."""
    return aligned([head, *((f"  {name}", *texts) for name, *texts in rows)], "<" + ">" * (len(head) - 1), "")


def aligned(rows: Sequence[Sequence[str]], sides: str, margin: str = "  ") -> list[str]:
    """Return a line for each row. sides: < or > for each column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(f"{text:{side}{width}}" for text, side, width in zip(row, sides, widths, strict=True))
        for row in rows
    )
    return [f"{margin}{line}".rstrip() for line in lines]
