"""Holds what all reports of benchmarks share: the model that was measured, and tables."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Subject:
    """Names the model that a benchmark has measured, and on what.

    bench: the benchmark's name.
    weights: `random`, or `checkpoint` where they are the model's own.
    format: of weights of few bits; empty for dense ones, which have the dtype.
    routing: what tokens of a mixture were made to choose; empty if their routers chose.
    """

    bench: str
    model: str
    weights: str
    parameters: int
    dtype: str
    format: str
    device: str
    routing: str = ""

    def __str__(self) -> str:
        weights = f"{self.weights} {self.format} weights" if self.format else f"{self.weights} weights"
        routing = f", routing {self.routing}" if self.routing else ""
        return (
            f"{self.model}: {self.parameters / 1e6:,.4g}M parameters, {self.dtype}, {weights}{routing}, "
            f"{self.device}"
        )


def table(rows: Sequence[Sequence[str]], *, left: bool = False) -> Iterator[str]:
    """Yield the lines of a table, indented by two blanks. `left` aligns cells to the left, else to the
    right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (
            cell.ljust(width) if left else cell.rjust(width) for cell, width in zip(row, widths, strict=True)
        )
        yield f"  {'  '.join(cells)}".rstrip()
