"""The tools that train what drafts for the shipped model: for seconds here, and still drafts hold."""

import sys
from collections.abc import Sequence
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
from penstock import LLM, SamplingParams  # noqa: E402
from penstock.sched.speculation import Speculation  # noqa: E402
from penstock.sched.suffix import Draft  # noqa: E402

OPENINGS = ("Once upon a time", "Tom had a red ball.", "The little fox was hungry.", "Ben and Mia went")


def tokens_a_pass(draft: Path, heat: float) -> float:
    """How many tokens a pass yields with drafts of four, once no token is another."""
    params = [
        SamplingParams(temperature=heat, seed=seed, max_tokens=40, ignore_eos=True)
        for seed in range(len(OPENINGS))
    ]
    settings = {"device": "cpu", "dtype": "float32", "max_length": 128, "check": True, "max_sequences": 4}

    def depths(self: Speculation, found: Sequence[Draft], tokens: int, spare: int) -> list[int]:
        return [4 if self.model is not None else 0] * len(found)

    with LLM(**settings) as llm:
        plain = llm.generate(OPENINGS, params)
    with (
        always(Adversary({}, tiny.VOCAB, kinds="n")),
        patch.object(Speculation, "depths", depths),
        LLM(**settings, speculate=str(draft)) as llm,
    ):
        found = llm.generate(OPENINGS, params)
    assert [one.tokens for one in found] == [one.tokens for one in plain]
    said, held = sum(len(one.tokens) for one in found), sum(one.accepted_tokens for one in found)
    return said / (said - held)


@pytest.mark.parametrize("tool", [train_head, train_sibling], ids=["head", "sibling"])
def test_what_was_trained_for_seconds_drafts(tool: object, tmp_path: Path) -> None:
    small = ["--rows", "60", "--own", "1", "--batch", "3", "--length", "48", "--threads", "1"]
    steps = {train_head: ["70", "--depth", "2"], train_sibling: ["120"]}[tool]
    tool.main([*small, "--out", str(tmp_path / "draft"), "--steps", *steps])  # type: ignore[attr-defined]
    assert tokens_a_pass(tmp_path / "draft", 0) > 1.15
    assert tokens_a_pass(tmp_path / "draft", 1.0) > 1.02
