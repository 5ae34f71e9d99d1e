"""The tools that train what drafts for the shipped model: for seconds here, and still drafts hold."""

import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest

TOOLS = Path(__file__).parents[2] / "tools"
sys.path.insert(0, str(TOOLS))  # The tools are scripts, not a package.

import train_head  # noqa: E402
import train_sibling  # noqa: E402

import tiny  # noqa: E402
from cpu.test_speculation import always  # noqa: E402
from drafters import Adversary  # noqa: E402
from penstock import LLM, Completion, SamplingParams  # noqa: E402
from penstock.sched.speculation import Speculation  # noqa: E402
from penstock.sched.suffix import Draft  # noqa: E402

OPENINGS = ("Once upon a time", "Tom had a red ball.", "The little fox was hungry.", "Ben and Mia went")


HEATS = 0, 1.0
SETTINGS = {"device": "cpu", "dtype": "float32", "max_length": 128, "check": True, "max_sequences": 8}
ASKED = [
    (opening, SamplingParams(temperature=heat, seed=seed, max_tokens=24, ignore_eos=True))
    for heat in HEATS
    for seed, opening in enumerate(OPENINGS)
]


def answers(**more: object) -> list[Completion]:
    with LLM(**(SETTINGS | more)) as llm:
        return llm.generate(*map(list, zip(*ASKED, strict=True)))


@cache
def plainly() -> list[Completion]:
    return answers()


def tokens_a_pass(draft: Path) -> list[float]:
    """How many tokens a pass yields at each heat with drafts of four, once no token is another."""

    def depths(self: Speculation, found: Sequence[Draft], tokens: int, spare: int) -> list[int]:
        return [4 if self.model is not None else 0] * len(found)

    plain = plainly()
    with always(Adversary({}, tiny.VOCAB, kinds="n")), patch.object(Speculation, "depths", depths):
        found = answers(speculate=str(draft))
    assert [one.tokens for one in found] == [one.tokens for one in plain]
    yields = list[float]()
    for some in (found[: len(OPENINGS)], found[len(OPENINGS) :]):
        said, held = sum(len(one.tokens) for one in some), sum(one.accepted_tokens for one in some)
        yields.append(said / (said - held))
    return yields


@pytest.mark.parametrize("tool", [train_head, train_sibling], ids=["head", "sibling"])
def test_what_was_trained_for_seconds_drafts(tool: object, tmp_path: Path) -> None:
    small = ["--rows", "60", "--own", "1", "--threads", "1"]
    steps = {
        train_head: ["40", "--depth", "2", "--batch", "2", "--length", "48"],
        train_sibling: ["60", "--batch", "3", "--length", "32"],
    }[tool]
    tool.main([*small, "--out", str(tmp_path / "draft"), "--steps", *steps])  # type: ignore[attr-defined]
    greedy, drawn = tokens_a_pass(tmp_path / "draft")
    assert greedy > 1.15
    assert drawn > 1.02
