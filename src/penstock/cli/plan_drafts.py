"""Shows what drafts take and would give, as a part of a forecast's report."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from penstock.arch import bounds
from penstock.arch.families import TensorNames
from penstock.arch.formats.recipe import copy_recipe
from penstock.arch.heads import check_head
from penstock.arch.spec import ModelSpec
from penstock.base.config import check_speculate
from penstock.base.units import counted, format_size
from penstock.bench.shapes import SHAPES
from penstock.cli.columns import headed
from penstock.cli.figures import format_count, format_pace, format_seconds
from penstock.cli.shape import open_head, open_model, open_mtp
from penstock.cli.terminal import say
from penstock.engine.acceptance import DraftedPace, speculation
from penstock.engine.choosing import DraftChoice, choose_drafts
from penstock.engine.draft import DraftModel, check_continues, check_draft, copy_or_why
from penstock.engine.forecast import Forecast
from penstock.engine.machines import BLOCK_SIZE, Machine, Work
from penstock.weights.streaming.ring import Link

WORDS = {Link.DISK: "disk", Link.LINK: "link", Link.COMPUTE: "device"}
"""Links are called so: the device itself is what computes and reads its memory."""


@dataclass(frozen=True, slots=True)
class MeasuredGain:
    """Says how many times as fast as plain a model was with drafts of which so many tokens of each pass were
    made to hold.

    model: and where it ran. file, case: of docs/results. of_plain: by the tokens that were made to hold.
    """

    model: str
    file: str
    case: str
    of_plain: Mapping[int, float]


MEASURED = (
    MeasuredGain(
        "the shipped model in float32 on 2 CPU cores",
        "cpu_speculation.json",
        "shipped",
        {1: 0.90, 2: 1.25, 4: 2.27, 8: 3.49, 12: 4.16},
    ),
    MeasuredGain(
        "an 8B that streams, with 6 GiB of an H100",
        "h100_speculation.json",
        "8B 6GiB",
        {2: 2.02, 4: 3.93, 8: 7.77, 12: 11.21},
    ),
)


HELD = {0: 9.4, 1: 12.2}
"""Tokens a pass by temperature, where a copy in four bits drafts 16: docs/results/cpu_acceptance.json."""


def with_drafts(
    text: str, target: tuple[str, ModelSpec, TensorNames], machine: Machine, work: Work, dtype: str
) -> tuple[Work, DraftChoice | None]:
    """Return the work with the drafts that --speculate names, and what was chosen, if it is auto.

    target: how the model was named, and its shape. dtype: as it was asked for. Raises ConfigError if a draft
    model does not fit the target, and what `open_model` raises.
    """
    model, spec, names = target
    if text not in SHAPES:
        check_speculate(text)
    choice = None
    if text == "auto":
        choice = choose_drafts(spec, names, machine, work, _copy_of(spec, names, work))
        text = choice.speculate
    # A draft model is beside the setting: it may be but a shape.
    words = text if text in ("off", "self") else "suffix"
    work = replace(work, settings=replace(work.settings, speculate=words))
    if text in ("off", "suffix"):
        return work, choice
    if text == "self":
        copy_recipe(spec.format, f"{model} has")
        copy = _copy_of(spec, names, work)
        assert isinstance(copy, DraftModel)
        check_draft(spec, copy.spec)
        return replace(work, draft=copy), choice
    if text == "mtp":
        layer = open_mtp(model, spec)
        return replace(work, draft=DraftModel.of_head(layer, work.dtype, BLOCK_SIZE)), choice
    if (head := open_head(text)) is not None:
        check_head(head, spec, text)
        return replace(work, draft=DraftModel.of_head(head, work.dtype, BLOCK_SIZE)), choice
    _, small, its = open_model(text)
    if os.path.isdir(text):
        check_continues(Path(text))
    check_draft(spec, small)
    draft = DraftModel.of(small, its, small.dtype if dtype == "auto" else dtype, BLOCK_SIZE, work.shard)
    return replace(work, draft=draft), choice


def _copy_of(spec: ModelSpec, names: TensorNames, work: Work) -> DraftModel | str:
    return copy_or_why(spec, names, work.dtype, BLOCK_SIZE, work.shard)


@dataclass(frozen=True, slots=True)
class DraftShown:
    """Shows a draft model. weights, kv: bytes on the device; kv is of its own pool. shares_kv: it is a copy
    of the model, and uses its KV. head: it is a draft head, not a model."""

    family: str
    layers: int
    parameters: int
    dtype: str
    weights: int
    kv: int
    shares_kv: bool
    head: bool

    @classmethod
    def of(cls, draft: DraftModel, kv: int) -> Self:
        """Return what is shown of a draft model."""
        spec, parameters = draft.spec, bounds.parameters(draft.layouts)
        own = draft.shares_kv, draft.head is not None
        return cls(spec.family, spec.layers, parameters, draft.dtype, draft.weights, kv, *own)


@dataclass(frozen=True, slots=True)
class DraftedPaceShown:
    """Shows passes that yield `tokens` tokens for each sequence. tokens_per_second: of all sequences.
    of_plain: of those of one token a pass. seconds: of a pass; drafting: of these, the draft model's."""

    tokens: int
    tokens_per_second: float
    of_plain: float
    seconds: float
    drafting: float
    binding: str

    @classmethod
    def of(cls, pace: DraftedPace, plain: DraftedPace) -> Self:
        """Return what is shown of a pace."""
        binding = "draft model" if pace.drafting > pace.pace.seconds else WORDS[pace.pace.binding]
        times = pace.tokens_per_second / plain.tokens_per_second
        return cls(pace.tokens, pace.tokens_per_second, times, pace.seconds, pace.drafting, binding)


@dataclass(frozen=True, slots=True)
class SpeculationShown:
    """Shows what drafts take, and what they would give.

    draft: None without a draft model. left: bytes of the device that are left to the target. without:
    tokens/s of decoding where nothing drafts. measured: what was measured, of other models. choice: what auto
    chooses here, and why; empty where drafts were named.
    """

    draft: DraftShown | None
    left: int
    without: float
    paces: tuple[DraftedPaceShown, ...]
    warnings: tuple[str, ...]
    measured: tuple[MeasuredGain, ...] = MEASURED
    choice: str = ""

    @classmethod
    def of(cls, spec: ModelSpec, names: TensorNames, found: Forecast) -> Self | None:
        """Return what is shown of a model that is forecast with drafts; None without."""
        if found.work.settings.speculate == "off":
            return None
        said, draft = speculation(spec, names, found), found.work.draft
        paces = tuple(DraftedPaceShown.of(pace, said.paces[0]) for pace in said.paces)
        shown = DraftShown.of(draft, said.kv) if draft else None
        return cls(shown, said.left, said.without, paces, said.warnings)

    def lines(self) -> list[str]:
        """Return the table, and what has to be known of it."""
        drafts = ["of it drafting"] if self.draft else []
        head = ["Speculative decoding", "tokens/s", "of plain", "a pass", *drafts, "bound by"]
        rows = [
            [
                f"{counted(pace.tokens, 'token')} a pass{', plain' if pace.tokens == 1 else ''}",
                format_pace(pace.tokens_per_second),
                f"{pace.of_plain:.2f}",
                format_seconds(pace.seconds),
                *([format_seconds(pace.drafting) if pace.drafting else "-"] if drafts else []),
                f"the {pace.binding}",
            ]
            for pace in self.paces
        ]
        return [*headed(head, rows), *(f"  {note}" for note in self._notes())]

    def _notes(self) -> list[str]:
        notes, left_out = list[str](), "that a step waits for the tokens of the last one"
        if draft := self.draft:
            what = "copy in four bits" if draft.shares_kv else f"draft {'head' if draft.head else 'model'}"
            kv, own = f"{format_size(draft.kv)} of KV in a pool of its own", "no KV but the target's"
            notes.append(
                f"The {what} ({draft.family}, {counted(draft.layers, 'layer')}, "
                f"{format_count(draft.parameters)} parameters, {draft.dtype}) stays on the device: "
                f"{format_size(draft.weights)} of weights, and "
                f"{own if draft.shares_kv else kv}. "
                f"{format_size(self.left)} are left to the target."
            )
            if not draft.shares_kv:
                left_out += f", and that the {what} computes each prompt"
        return [
            *([f"--speculate auto: {self.choice}."] if self.choice else []),
            *notes,
            f"Without --speculate it decodes {format_pace(self.without)} tokens/s.",
            *self.warnings,
            "How many tokens a pass yields depends on the text and on the draft, and is not forecast: in "
            f"each row all drafts hold. None of these rows was measured. Left out: {left_out}.",
            "How often drafts hold in real texts was measured with the shipped model alone, in stories: by "
            f"look-up hardly, by a copy in four bits {HELD[0]} tokens a pass at temperature 0, {HELD[1]} at "
            "1, of drafts of 16. Where tokens were made to hold, these models were so many times as fast as "
            "plain:",
            *(f"  {one.model}: {_times(one)}" for one in self.measured),
        ]


def with_choice(shown: SpeculationShown | None, choice: DraftChoice | None) -> SpeculationShown | None:
    """Return what is shown of drafts, with what was chosen. Where that is none, a line says so by itself."""
    if choice is not None and shown is None:
        say(str(choice), faint=True)
    return replace(shown, choice=str(choice)) if shown and choice else shown


def _times(one: MeasuredGain) -> str:
    return ", ".join(f"{times:.2f} with {tokens}" for tokens, times in one.of_plain.items())
