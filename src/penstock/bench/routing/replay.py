"""Replays a recorded routing against numbers of slots: how many of the experts that are asked for are
there."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.bench.report import table
from penstock.bench.routing.policies import POLICIES, Ideal, Room, SlotPolicy, Static, Steps
from penstock.bench.routing.recording import Recording

STATIC, IDEAL = "static", "ideal"
REFERENCES = (STATIC, IDEAL)
"""The first knows what the first half asked for most, the second knows the future."""
SHARES = (1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 3 / 4)
"""Parts of all experts that have slots, where no numbers are given."""
BATCHES = (1, 16)


@dataclass(frozen=True, slots=True)
class HitCurve:
    """Holds the hits of one batch: of the experts that a layer is asked for in a step, those that are in
    slots. Steps of the first half fill the slots and do not count.

    asked: distinct experts that a layer is asked for in a step, on average. steps: those that count.
    slots: their numbers, of all layers together. hits: shares from 0 to 1 by policy, one for each number.
    """

    batch: int
    steps: int
    asked: float
    slots: tuple[int, ...]
    hits: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class Foretelling:
    """Says how often the next layer's router, given what this layer's got, names the experts that the next
    layer then takes.

    wide: how many it names, as multiples of top_k. recall: the share of the taken ones among them.
    """

    wide: tuple[float, ...]
    recall: tuple[float, ...]


def steps_of(recording: Recording, batch: int) -> Steps:
    """Return the distinct experts that each layer is asked for, step by step, where the recording is cut into
    `batch` equal parts that run side by side."""
    length = recording.tokens // batch
    parts = recording.chosen[: length * batch].reshape(batch, length, *recording.chosen.shape[1:])
    return [
        [np.unique(layer).astype(np.int64) for layer in step.transpose(1, 0, 2)]
        for step in parts.transpose(1, 0, 2, 3)
    ]


def hit_curve(
    recording: Recording,
    batch: int,
    slots: Sequence[int],
    policies: Iterable[str],
    makers: Mapping[str, Callable[[Room], SlotPolicy]] = POLICIES,
) -> HitCurve:
    """Return the hits of policies at these numbers of slots. makers: of all but the references, by name."""
    steps, layers, experts = steps_of(recording, batch), len(recording.layers), recording.model.experts
    half = len(steps) // 2
    asked = sum(len(layer) for step in steps[half:] for layer in step)
    first = Counter(
        id for step in steps[:half] for at, layer in enumerate(step) for id in (layer + at * experts).tolist()
    )
    order = sorted(range(layers * experts), key=lambda id: (-first[id], id))

    def made(name: str, room: Room) -> SlotPolicy:
        if name == STATIC:
            return Static(room, order[: room.slots])
        return Ideal(room, steps) if name == IDEAL else makers[name](room)

    def hits(name: str, count: int) -> float:
        policy, found = made(name, Room(layers, experts, count)), 0
        for number, step in enumerate(steps):
            here = sum(policy.step(layer, one) for layer, one in enumerate(step))
            found += here if number >= half else 0
        return found / asked

    shares = {name: tuple(hits(name, count) for count in slots) for name in policies}
    counted = len(steps) - half
    return HitCurve(batch, counted, asked / counted / layers, tuple(slots), shares)


def foretelling(recording: Recording) -> Foretelling | None:
    """Return how well layers foretell each other. None for a model of one layer."""
    top_k, told = recording.model.top_k, recording.foretold
    if not told.size:
        return None
    widths = sorted({min(-(-top_k * half // 2), told.shape[2]) for half in (2, 3, 4)})
    there = recording.chosen[:, 1:, :, None] == told[:, :, None, :]
    return Foretelling(
        tuple(width / top_k for width in widths),
        tuple(float(there[..., :width].any(-1).mean()) for width in widths),
    )


def default_slots(recording: Recording) -> tuple[int, ...]:
    """Return numbers of slots of all layers together, at least one for each layer."""
    layers = len(recording.layers)
    return tuple(dict.fromkeys(max(round(share * recording.model.experts), 1) * layers for share in SHARES))


def curve_lines(curve: HitCurve, every: int) -> list[str]:
    """Return the lines of a printed curve. every: experts of all layers."""
    head = ["slots", "of all", *curve.hits]
    rows = [
        [f"{count:,}", f"{count / every:.1%}", *(f"{shares[at]:.1%}" for shares in curve.hits.values())]
        for at, count in enumerate(curve.slots)
    ]
    title = f"Hits at batch {curve.batch}: {curve.asked:.1f} experts are asked for in a layer and step"
    return [title, *table([head, *rows])]
