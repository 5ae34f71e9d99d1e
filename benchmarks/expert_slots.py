"""Choose the numbers of the rule by which experts have slots on one recorded routing, and judge it on others,
beside other policies.

    PYTHONPATH=src python3 benchmarks/expert_slots.py a.npz b.npz c.npz --out expert_routing.json

The recordings are files of `penstock bench experts --routing-out`. The rule (`weights.streaming.slots`) is
chosen on the first half of the first file. It is judged on all of them, and on a drift: a thousand tokens of
each in turn. Hits are the mean over batches of 1 and 16, and over slots for an eighth, a quarter and half of
the experts; those of the second half of a recording.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import fmean

import numpy as np
from recording import Recording as Results

from penstock.bench.routing.policies import POLICIES, Ranked, Room, SlotPolicy
from penstock.bench.routing.recording import Recording
from penstock.bench.routing.replay import BATCHES, REFERENCES, SHARES, HitCurve, foretelling, hit_curve
from penstock.weights.streaming.slots import SlotRule

HALF_LIVES = (2.0, 8.0, 32.0, 64.0, 128.0, 256.0, 512.0, 2048.0, 1e9)
MARGINS = (0.0, 0.5, 1.0, 1.5, 2.0)
CHOSEN_AT = (1 / 8, 1 / 4, 1 / 2)
BLOCK, BLOCKS = 1024, 4
"""Tokens of one text in a drift, and how often each has its turn."""


def cut(recording: Recording, tokens: np.ndarray, text: str) -> Recording:
    """These tokens of a recording as one sequence."""
    lengths = np.array([len(tokens)], np.int32)
    return replace(
        recording,
        model=replace(recording.model, text=text),
        lengths=lengths,
        prompts=lengths,
        chosen=recording.chosen[tokens],
        foretold=recording.foretold[tokens],
    )


def drift(recordings: Sequence[Recording]) -> Recording:
    """Blocks of all recordings in turn."""
    starts = range(0, min(BLOCKS * BLOCK, *(one.tokens for one in recordings)), BLOCK)
    parts = [one.chosen[at : at + BLOCK] for at in starts for one in recordings]
    told = [one.foretold[at : at + BLOCK] for at in starts for one in recordings]
    whole = replace(recordings[0], chosen=np.concatenate(parts), foretold=np.concatenate(told))
    return cut(whole, np.arange(whole.tokens), "drift")


def slots_at(recording: Recording, shares: Sequence[float]) -> tuple[int, ...]:
    layers = len(recording.layers)
    return tuple(max(round(share * recording.model.experts), 1) * layers for share in shares)


def measured(
    recording: Recording,
    shares: Sequence[float],
    names: Sequence[str],
    makers: Mapping[str, Callable[[Room], SlotPolicy]] = POLICIES,
) -> tuple[list[HitCurve], dict[str, float]]:
    """The curves of both batches, and the mean hits of each policy."""
    slots, counted = slots_at(recording, shares), set(slots_at(recording, CHOSEN_AT))
    curves = [hit_curve(recording, batch, slots, names, makers) for batch in BATCHES]
    chosen = [at for at, count in enumerate(slots) if count in counted]
    return curves, {name: fmean(curve.hits[name][at] for curve in curves for at in chosen) for name in names}


def grid(recording: Recording) -> dict[str, float]:
    """The mean hits by half-life and margin."""
    rules = {f"{life:g} x {margin:g}": SlotRule(life, margin) for life in HALF_LIVES for margin in MARGINS}
    made = {name: partial(Ranked, rule=rule, shared=False) for name, rule in rules.items()}
    return measured(recording, CHOSEN_AT, list(made), made)[1]


def judged(recording: Recording) -> dict[str, object]:
    """What all policies hit over a recording, and how well it is foretold."""
    curves, mean = measured(recording, SHARES, [*REFERENCES, *POLICIES])
    told = foretelling(recording)
    print(f"{recording.model.text}: " + ", ".join(f"{name} {hits:.1%}" for name, hits in mean.items()))
    return {
        "model": asdict(recording.model),
        "tokens": recording.tokens,
        "layers": len(recording.layers),
        "mean": mean,
        "curves": [asdict(curve) for curve in curves],
        "foretold": asdict(told) if told else None,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recordings", nargs="+", type=Path)
    parser.add_argument("--only", default="", metavar="TEXT", help="parts whose names have this in them")
    parser.add_argument("--about", default="", help="what was recorded, for --out")
    parser.add_argument("--out", type=Path, help="parts that are there already and are not measured stay")
    options = parser.parse_args()
    facts = {"about": options.about} if options.about else {}
    out = Results(options.out, bench="expert_slots", rule=asdict(SlotRule()), **facts)
    recordings = [Recording.read(path) for path in options.recordings]
    works = {Path(one.model.text).stem: one for one in recordings} | {"drift": drift(recordings)}
    if options.only in "choice":
        first = recordings[0]
        found = grid(cut(first, np.arange(first.tokens // 2), first.model.text))
        for name, hits in sorted(found.items(), key=lambda one: -one[1]):
            print(f"{name:>14}  {hits:.2%}")
        rounded = {name: round(hits, 5) for name, hits in found.items()}
        out.part("choice", {"on": f"the first half of {first.model.text}", "half_life x margin": rounded})
    for name, recording in works.items():
        if options.only in name:
            out.part(name, judged(recording))
    return 0


if __name__ == "__main__":
    sys.exit(main())
