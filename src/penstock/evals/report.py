"""Reports an evaluation: cells of a heat map, as a table for a person, and as one line of JSON."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt

from penstock.base.report import JsonLine
from penstock.base.units import counted
from penstock.evals.tasks import TASKS

_Z = 1.959964
"""Standard deviations on either side of the mean that hold 95 % of a normal distribution."""


@dataclass(frozen=True, slots=True)
class Miss:
    """Holds an answer that was not all right, and the words that were expected."""

    expected: tuple[str, ...]
    answer: str


@dataclass(frozen=True, slots=True)
class EvalCell:
    """Holds the score of one task at one length and depth.

    depth: where in the text it was hidden, 0 to 1. None where a task has no depth.
    score, low, high: the mean of all samples, 0 to 1, and its 95 % interval.
    """

    task: str
    length: int
    depth: float | None
    samples: int
    score: float
    low: float
    high: float
    misses: tuple[Miss, ...]


@dataclass(frozen=True, slots=True)
class EvalReport(JsonLine):
    """Holds the cells of an evaluation, and prints them.

    text: the name of the text that things were hidden in.
    chat: prompts went through the model's chat template.
    prompt_tokens: of all prompts together.
    """

    eval: str
    model: str
    text: str
    chat: bool
    dtype: str
    device: str
    seed: int
    samples: int
    prompts: int
    prompt_tokens: int
    seconds: float
    cells: tuple[EvalCell, ...]

    @property
    def tasks(self) -> list[str]:
        """Return the names of the tasks that have cells."""
        return list(dict.fromkeys(cell.task for cell in self.cells))

    def of(self, task: str) -> tuple[list[int], list[float | None], dict[tuple[int, float | None], EvalCell]]:
        """Return the lengths of a task, its depths, and its cells by both."""
        cells = {(cell.length, cell.depth): cell for cell in self.cells if cell.task == task}
        return (
            list(dict.fromkeys(length for length, _ in cells)),
            list(dict.fromkeys(depth for _, depth in cells)),
            cells,
        )

    def __str__(self) -> str:
        head = (
            f"{self.model}, {self.dtype} on {self.device}: {counted(self.prompts, 'prompt')}, "
            f"{counted(self.prompt_tokens, 'token')} in {self.seconds:,.0f} s"
        )
        return "\n".join([head, *(line for task in self.tasks for line in self._table(task))])

    def _table(self, task: str) -> Iterator[str]:
        lengths, depths, cells = self.of(task)
        yield ""
        yield f"{task}: {TASKS[task].about}; % right by length{' and depth' if TASKS[task].deep else ''}"
        shown = [shown_depth(depth) for depth in depths] if TASKS[task].deep else []
        yield f"{'tokens':>8} " + "".join(f"{depth:>5}" for depth in shown) + f"{'all':>7}  95 % interval"
        for length in lengths:
            row = [cells[length, depth] for depth in depths]
            score = sum(cell.score for cell in row) / len(row)
            low, high = wilson(score, sum(cell.samples for cell in row))
            scores = "".join(f"{percent(cell.score):>5}" for cell in row) if shown else ""
            yield f"{length:>8,} {scores}{score:>7.1%}  {low:.1%} to {high:.1%}"


def percent(share: float) -> str:
    """Return a share as a whole number of percent. Only what is all is 100, and only what is nothing 0."""
    return str(round(100 * share) if share in (0, 1) else min(max(round(100 * share), 1), 99))


def shown_depth(depth: float | None) -> str:
    """Return a depth in percent, or "any" where there is none."""
    return "any" if depth is None else f"{100 * depth:.0f}"


def wilson(share: float, count: int) -> tuple[float, float]:
    """Return the 95 % interval of a share of `count` trials (Wilson, 1927). For a mean of scores between 0
    and 1 it is wide enough, since scores of only 0 and 1 vary most."""
    scale = 1 + _Z**2 / count
    middle = (share + _Z**2 / (2 * count)) / scale
    half = _Z / scale * sqrt(share * (1 - share) / count + _Z**2 / (4 * count**2))
    return max(middle - half, 0.0), min(middle + half, 1.0)
