"""A forecast as a picture: the three tiers to scale, the links between them, a pass group by group, and the
numbers."""

from collections.abc import Mapping
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from penstock.base.errors import ConfigError
from penstock.base.tiers import Tier
from penstock.base.units import format_size
from penstock.cli.figures import format_count, format_figure, format_pace, format_seconds
from penstock.cli.plan_report import (
    ASSUMED,
    PaceShown,
    Report,
    TierHeld,
    gain_texts,
)

WIDTH, HEIGHT = 1200, 800
_SCALE = 2
"""Drawn larger and reduced, so that edges are smooth."""
_LEFT, _RIGHT, _BAR = 48, WIDTH - 48, 148
_INK, _FAINT, _LINE, _PAPER, _RED = "#1c2430", "#6b7482", "#cfd4da", "#fbfaf7", "#c8321f"
_HOME: Mapping[Tier, str] = {Tier.DEVICE: "#12756b", Tier.HOST: "#e0982f", Tier.DISK: "#76839a"}
_RING: Mapping[Tier, str] = {Tier.DEVICE: "#7fc4ba", Tier.HOST: "#f3d19a", Tier.DISK: _PAPER}
_LONGEST = 56
"""Letters of a model's name that have room."""
_KV, _DRAFT, _ACTIVATIONS, _PROCESS = "#5b4a9e", "#3b7cb8", "#b3a6dc", "#8a8f98"


def draw(report: Report, file: Path) -> None:
    """Write the picture to `file` as a PNG. Raises ConfigError."""
    canvas = _Canvas()
    _head(canvas, report)
    _tiers(canvas, report)
    _pass(canvas, report)
    _gains(canvas, report)
    try:
        canvas.image().save(file, format="PNG")
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror or error}; name another file") from error


class _Canvas:
    """Draws, in points of the finished picture."""

    def __init__(self) -> None:
        self._large = Image.new("RGB", (WIDTH * _SCALE, HEIGHT * _SCALE), _PAPER)
        self._draw = ImageDraw.Draw(self._large)
        self._fonts: dict[int, ImageFont.FreeTypeFont | ImageFont.ImageFont] = {}

    def image(self) -> Image.Image:
        return self._large.resize((WIDTH, HEIGHT), Image.Resampling.LANCZOS)

    def text(
        self, x: float, y: float, text: str, size: int = 14, ink: str = _INK, anchor: str = "la"
    ) -> float:
        """Write at `x`; comes back with where the text ends. `anchor` as Pillow has it: la is left and above,
        ra right."""
        font = self._fonts.setdefault(size, ImageFont.load_default(size * _SCALE))
        self._draw.text((x * _SCALE, y * _SCALE), text, fill=ink, font=font, anchor=anchor)
        return x + self._draw.textlength(text, font=font) / _SCALE

    def box(
        self, x: float, y: float, width: float, height: float, fill: str | None, outline: str | None = None
    ) -> None:
        corners = (
            round(x * _SCALE),
            round(y * _SCALE),
            round((x + width) * _SCALE) - 1,
            round((y + height) * _SCALE) - 1,
        )
        if corners[2] >= corners[0]:
            self._draw.rectangle(corners, fill, outline, width=_SCALE)

    def arrow(self, x: float, bottom: float, top: float, ink: str) -> None:
        """Upwards, as bytes go from slower tiers to faster ones."""
        self.box(x - 2.5, top + 10, 5, bottom - top - 10, ink)
        self._draw.polygon(
            [
                (round(at * _SCALE), round(y * _SCALE))
                for at, y in ((x - 9, top + 11), (x + 9, top + 11), (x, top))
            ],
            ink,
        )


def _head(canvas: _Canvas, it: Report) -> None:
    canvas.text(_LEFT, 34, it.model[:_LONGEST], 34 if len(it.model) < _LONGEST // 2 else 20)
    size = f"{format_count(it.parameters)} parameters, {format_size(it.weights)} of {it.kind_of_weights}"
    canvas.text(_LEFT, 80, size, 15, _FAINT)
    canvas.text(
        _LEFT,
        102,
        f"batch {it.batch:,}, context {it.context:,}, at most {it.step_tokens:,} tokens a step",
        15,
        _FAINT,
    )
    if it.setting.machine:
        canvas.text(_LEFT, 124, it.setting.machine, 15, _FAINT)
    for x, name, pace in ((680, "decode", it.decode), (920, "prefill", it.prefill)):
        canvas.text(
            canvas.text(x, 34, format_pace(pace.tokens_per_second), 40) + 8, 58, "tokens/s", 15, _FAINT
        )
        canvas.text(x, 84, f"{name}, {format_seconds(pace.seconds)} a pass", 15)
        canvas.text(x, 106, f"bound by the {pace.binding} ({pace.busy[pace.binding]:.0%} busy)", 15, _RED)


def _tiers(canvas: _Canvas, it: Report) -> None:
    scale = (_RIGHT - _BAR) / max(one.capacity or one.weights for one in it.tiers)
    figures = it.setting.figures
    tops = {Tier.DEVICE: 166, Tier.HOST: 296, Tier.DISK: 426}
    for one in it.tiers:
        _tier(canvas, one, tops[one.tier], scale, one.tier is not Tier.DISK or figures["disk_rate"].value > 0)
    device = (
        f"reads {_figure(it, 'device_read')}, computes {_figure(it, 'compute')}, "
        f"{it.decode.busy['device']:.0%} busy"
    )
    canvas.text(_RIGHT, tops[Tier.DEVICE] + 88, device, 14, _ink(it.decode, "device"), "ra")
    if figures["disk_rate"].value:
        _link(canvas, it, "disk", tops[Tier.DISK], it.decode.read)
    _link(canvas, it, "link", tops[Tier.HOST], it.decode.copied)


def _tier(canvas: _Canvas, one: TierHeld, top: int, scale: float, there: bool) -> None:
    canvas.text(_LEFT, top + 3, one.tier.value, 20)
    canvas.text(_LEFT, top + 26, "" if one.capacity is None else format_size(one.capacity), 13, _FAINT)
    parts = (
        ("weights", one.weights, _HOME[one.tier]),
        ("ring", one.ring, _RING[one.tier]),
        ("KV", one.kv, _KV),
        ("state", one.state, _KV),
        ("draft model", one.draft, _DRAFT),
        ("activations", one.activations, _ACTIVATIONS),
        ("process", one.process, _PROCESS),
    )
    x, words = float(_BAR), float(_BAR)
    for name, size, ink in parts:
        canvas.box(x, top, size * scale, 40, ink)
        x += size * scale
        if size:
            canvas.box(words, top + 49, 11, 11, ink)
            words = canvas.text(words + 16, top + 46, f"{name} {format_size(size)}", 14) + 18
    if one.capacity:
        canvas.box(_BAR, top, one.capacity * scale, 40, None, _LINE)
        if one.free and one.free * 200 > one.capacity:
            canvas.text(words, top + 46, f"free {format_size(one.free)}", 14, _FAINT)
    elif not one.weights:
        canvas.text(_BAR, top + 10, "nothing rests here" if there else "there is none", 14, _FAINT)


def _link(canvas: _Canvas, it: Report, word: str, below: int, passing: float) -> None:
    """The link that ends in the tier above the one whose bar begins at `below`."""
    busy, ink = it.decode.busy[word], _ink(it.decode, word)
    canvas.arrow(_BAR + 12, below - 8, below - 58, ink if busy else _LINE)
    canvas.box(_BAR + 36, below - 40, 150, 12, None, _LINE)
    canvas.box(_BAR + 36, below - 40, 150 * min(busy, 1), 12, ink)
    text = (
        f"{word} {_figure(it, f'{word}_rate')}, {busy:.0%} busy, {format_size(passing)} a pass"
        if busy
        else f"{word}: idle"
    )
    canvas.text(_BAR + 200, below - 43, text, 14, ink if busy else _FAINT)


def _ink(pace: PaceShown, word: str) -> str:
    return _RED if pace.binding == word else _INK


def _figure(it: Report, name: str) -> str:
    return format_figure(name, it.setting.figures[name].value)


def _pass(canvas: _Canvas, it: Report) -> None:
    top, width = 540, (_RIGHT - _LEFT) / len(it.order)
    words = canvas.text(_LEFT, top - 26, "a pass, group by group, where each rests:", 15) + 14
    for tier, ink in _HOME.items():
        canvas.box(words, top - 22, 11, 11, ink)
        words = canvas.text(words + 16, top - 25, tier.value, 14) + 18
    last = -1
    for index, cell in enumerate(it.order):
        x = _LEFT + index * width
        gap = 1 if width > 5 else 0.5
        canvas.box(x, top, width - gap, 34, _HOME[cell.home])
        kind, _, layer = cell.group.partition(".")
        if kind == "attention" and int(layer) % _every(it.layers) == 0 and int(layer) != last:
            last = int(layer)
            canvas.text(x, top + 38, f"layer {last}" if last == 0 else f"{last}", 12, _FAINT)
    if "expert" in it.kinds:
        whole, x = it.kinds["expert"], float(_LEFT)
        for one in it.tiers:
            part = one.groups.get("expert", 0) / whole * (_RIGHT - _LEFT)
            canvas.box(x, top + 60, part, 14, _HOME[one.tier])
            x += part
        counts = ", ".join(
            f"{one.groups['expert']:,} on {one.tier}" for one in it.tiers if one.groups.get("expert")
        )
        canvas.text(_LEFT, top + 77, f"experts: {counts}", 13, _FAINT)


def _every(layers: int) -> int:
    """Return the number of layers from one number under the strip to the next."""
    return next(step for step in (1, 2, 5, 10, 20, 50, 100, layers) if layers <= 16 * step)


def _gains(canvas: _Canvas, it: Report) -> None:
    top = 662
    canvas.box(_LEFT, top - 13, _RIGHT - _LEFT, 1, _LINE)
    canvas.text(_LEFT, top, "what more would buy", 15)
    canvas.text(_LEFT + 420, top, "decode", 15, anchor="ra")
    canvas.text(_LEFT + 620, top, "prefill, tokens/s", 15, anchor="ra")
    for row, gain in enumerate(it.gains, 1):
        decode, prefill = gain_texts(it, gain)
        canvas.text(_LEFT, top + 23 * row, gain.more.value, 14, _FAINT)
        canvas.text(_LEFT + 420, top + 23 * row, decode, 14, anchor="ra")
        canvas.text(_LEFT + 620, top + 23 * row, prefill, 14, anchor="ra")
    assumed = [
        name.replace("_", " ") for name, figure in it.setting.figures.items() if figure.source == ASSUMED
    ]
    remark = f"assumed, not measured: {', '.join(assumed)}" if assumed else ""
    canvas.text(_RIGHT, HEIGHT - 28, remark, 13, _FAINT, "ra")
