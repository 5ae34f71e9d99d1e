"""Draws scores as a heat map: for each task, a row for each depth and a column for each length."""

from collections.abc import Iterator
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from penstock.base.errors import ConfigError
from penstock.evals.report import EvalCell, EvalReport, percent, shown_depth
from penstock.evals.tasks import TASKS

Box = tuple[int, int, int, int]
"""Left, top, right, bottom, in pixels; the last two are outside."""
_INK, _FAINT, _PAPER = "#1c2430", "#6b7482", "#fbfaf7"
_STOPS = ((200, 50, 31), (240, 214, 150), (18, 117, 107))
"""The colours of nothing, half and all."""
_WIDE, _HIGH, _GAP = 112, 52, 2
_LEFT, _TOP, _MARGIN = 150, 120, 48
_TITLE, _FOOT = 64, 84
"""Pixels above and below the cells of a task."""
_LEAST_WIDTH = 900
_LETTER = 10
"""Pixels of an average letter of the title, at most."""


def colour(score: float) -> tuple[int, int, int]:
    """Return the colour of a cell: from red over sand to green, as the score goes from 0 to 1."""
    low, high = _STOPS[:2] if score < 0.5 else _STOPS[1:]
    part = 2 * score - (score >= 0.5)
    red, green, blue = (round(a + (b - a) * part) for a, b in zip(low, high, strict=True))
    return red, green, blue


def boxes(report: EvalReport) -> Iterator[tuple[EvalCell, Box]]:
    """Yield every cell, and where in the picture it is."""
    for task, top in _tops(report).items():
        lengths, depths, cells = report.of(task)
        for column, length in enumerate(lengths):
            for row, depth in enumerate(depths):
                x, y = _LEFT + column * _WIDE, top + row * _HIGH
                yield cells[length, depth], (x, y, x + _WIDE - _GAP, y + _HIGH - _GAP)


def draw(report: EvalReport, file: Path) -> None:
    """Write the picture to `file` as a PNG. Raises ConfigError."""
    image = Image.new("RGB", _size(report), _PAPER)
    pen = ImageDraw.Draw(image)

    def write(x: float, y: float, text: str, size: int, ink: str = _INK, anchor: str = "la") -> None:
        pen.text((x, y), text, fill=ink, font=ImageFont.load_default(size), anchor=anchor)

    write(_MARGIN, 28, _fitted(report.model, image.width), 32)
    samples = f"{report.samples} sample{'' if report.samples == 1 else 's'} in each cell"
    write(
        _MARGIN,
        74,
        f"% right, {samples}; {report.text} text, {report.dtype} on {report.device}"[
            : image.width // _LETTER
        ],
        18,
        _FAINT,
    )
    for task, top in _tops(report).items():
        lengths, depths, _ = report.of(task)
        write(_MARGIN, top - 40, f"{task}: {TASKS[task].about}", 22)
        bottom = top + len(depths) * _HIGH
        if TASKS[task].deep:
            write(_MARGIN, top + _HIGH / 2 - 1, "depth", 18, _FAINT, "lm")
        for row, depth in enumerate(depths):
            unit = " %" if TASKS[task].deep else " depth"
            write(_LEFT - 12, top + row * _HIGH + _HIGH / 2 - 1, shown_depth(depth) + unit, 18, _INK, "rm")
        for column, length in enumerate(lengths):
            write(_LEFT + column * _WIDE + (_WIDE - _GAP) / 2, bottom + 8, f"{length:,}", 18, _INK, "ma")
        write(_LEFT, bottom + 34, "tokens of prompt and answer", 18, _FAINT)
    for cell, (left, top, right, bottom) in boxes(report):
        pen.rectangle((left, top, right - 1, bottom - 1), colour(cell.score))
        ink = _INK if 0.2 < cell.score < 0.8 else _PAPER
        write((left + right) / 2, (top + bottom) / 2, percent(cell.score), 24, ink, "mm")
    try:
        image.save(file, format="PNG")
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror or error}; name another file") from error


def _tops(report: EvalReport) -> dict[str, int]:
    """Return the height at which the cells of each task begin, in pixels."""
    tops, y = {}, _TOP
    for task in report.tasks:
        tops[task] = y + _TITLE
        y = tops[task] + len(report.of(task)[1]) * _HIGH + _FOOT
    return tops


def _size(report: EvalReport) -> tuple[int, int]:
    columns = max(len(report.of(task)[0]) for task in report.tasks)
    rows = sum(len(report.of(task)[1]) for task in report.tasks)
    height = _TOP + rows * _HIGH + len(report.tasks) * (_TITLE + _FOOT)
    return max(_LEFT + columns * _WIDE + _MARGIN, _LEAST_WIDTH), height


def _fitted(name: str, width: int) -> str:
    """Return a name, or its end where it is too long for the picture: a path's last part says most."""
    most = (width - 2 * _MARGIN) // 20
    return name if len(name) <= most else "..." + name[3 - most :]
