"""Speculation over a day's mix of texts, by counted time: what look-up drafts in code that is written again,
in prose, in a play and in records; resident and streamed, alone and in batches."""

import itertools
import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
from tokenizers import Tokenizer

from counted import Machine, Passes, run
from cpu.test_resting import MACHINES, rates
from penstock.sched.drafter import SuffixDrafter
from penstock.sched.speculation import Speculation
from penstock.sched.suffix import Draft

SHARED = Path(__file__).parents[3] / "shared" / "data"
pytestmark = pytest.mark.skipif(not SHARED.is_dir(), reason="needs real texts in ../shared/data")
PASSES, WINDOW, FIRST = 420, 64, 128
"""Passes of a run, those of a window, and those at first in which it is learnt what steps take."""
STEP = 1024
"""Tokens of a step, of a prompt."""
PROMPT = 1500
"""Tokens of a prompt, but for code."""
KINDS = ("code", "prose", "play", "records")
FIXED = (4, 16)
"""Tokens of drafts that are all verified, whatever they cost."""


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(SHARED / "tokenizer_qwen_hf" / "tokenizer.json"))


@cache
def text(kind: str) -> list[int]:
    read = {
        "prose": SHARED / "war_and_peace" / "2600-0.txt",
        "play": SHARED / "tinyshakespeare" / "input.txt",
        "records": SHARED / "mooncake_trace" / "conversation_trace.jsonl",
    }[kind]
    return list(tokenizer().encode(read.read_text(encoding="utf-8")[10_000:500_000]).ids)


@cache
def code() -> tuple[list[int], list[int]]:
    """Modules of Python, and the same with other names for some things, as an editor is asked for."""
    before = "\n".join(
        path.read_text(encoding="utf-8") for path in sorted(Path(os.__file__).parent.glob("c*.py"))
    )
    after = before.replace("self", "this").replace("value", "number").replace("name", "title")
    return list(tokenizer().encode(before).ids), list(tokenizer().encode(after).ids)


@cache
def asked(kind: str, number: int) -> tuple[list[int], list[int]]:
    """Return a prompt and what is said behind it."""
    if kind == "code":
        before, after = code()
        at = number * 2000 % (len(after) // 2)
        return [number, *before[at : at + 6000]], after[at:]
    whole = text(kind)
    at = number * 7919 % (len(whole) // 2)
    return [number, *whole[at : at + PROMPT]], whole[at + PROMPT :]


def mix(kind: str, rows: int) -> dict[int, tuple[list[int], list[int]]]:
    kinds = itertools.cycle(KINDS if kind == "mixed" else [kind])
    return {number: asked(next(kinds), number) for number in range(rows)}


def decoded(
    name: str, work: dict[int, tuple[list[int], list[int]]], count: int, speculates: bool = True
) -> tuple[Passes, Speculation | None]:
    seconds, host, ahead = MACHINES[name]

    def said(number: int, place: int) -> int:
        output = work[number][1]
        return output[place % len(output)]

    device = Machine(said, seconds, host, ahead)
    speculation = Speculation(SuffixDrafter(), clock=lambda: device.now) if speculates else None
    prompts = [prompt for prompt, _ in work.values()]
    computing = sum(map(len, prompts)) // STEP
    passes, _ = run(device, len(work), count + computing, speculation, prompts)
    return passes, speculation


def fixed(most: int) -> Callable[[Speculation, Sequence[Draft], int, int], list[Draft]]:
    """Verify so many tokens of every draft in every step."""

    def choose(self: Speculation, found: Sequence[Draft], tokens: int, spare: int) -> list[Draft]:
        return [draft.first(min(most, len(draft.tokens))) for draft in found]

    return choose


def awake(self: Speculation, *_: object, **more: object) -> None:
    self.resting = False


def first(passes: Passes) -> int:
    """The pass from which on it counts: all prompts are computed, and what steps take is known."""
    return FIRST + next(number for number, (_, _, least) in enumerate(passes) if least)


def whole_rate(passes: Passes) -> float:
    (begun, before, _), (ended, after, _) = passes[first(passes)], passes[-1]
    return (after - before) / (ended - begun)


@pytest.mark.parametrize(("kind", "rows"), [*[(kind, 1) for kind in KINDS], ("mixed", 8)])
@pytest.mark.parametrize("name", MACHINES)
def test_it_is_as_fast_as_plain_decoding_and_nearly_as_the_best_fixed_draft(
    name: str, kind: str, rows: int
) -> None:
    work = mix(kind, rows)
    plain, _ = decoded(name, work, FIRST + 2 * WINDOW, speculates=False)
    mine, _ = decoded(name, work, PASSES)
    usual = rates(plain)[-1]
    best, of = whole_rate(plain), 0
    for most in FIXED:
        with (
            patch.object(Speculation, "choose", fixed(most)),
            patch.object(Speculation, "look", awake),
            patch.object(Speculation, "rest", lambda self: None),
        ):
            passes, _ = decoded(name, work, PASSES)
        if (rate := whole_rate(passes)) > best:
            best, of = rate, most
    shares = [rate / usual for rate in rates(mine, first(mine))]
    print(
        f"{name}, {kind}, {rows} rows: worst window {min(shares):.3f}, all {whole_rate(mine) / usual:.3f}, "
        f"best of fixed drafts, {of}: {best / usual:.3f}"
    )
    assert min(shares) >= 0.94, "right behind drafts that held, something may be lost"
    assert sum([share < 0.98 for share in shares]) <= 0.25 * len(shares)
    assert whole_rate(mine) >= max(0.98 * usual, 0.9 * best)
