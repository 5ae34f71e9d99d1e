"""Measure how many tokens a pass yields where each verifies a draft of a given length.

    PYTHONPATH=src python3 benchmarks/acceptance.py --speculate self --out acceptance.json
    PYTHONPATH=src python3 benchmarks/acceptance.py --speculate self --trees --tokens 63
    PYTHONPATH=src python3 benchmarks/acceptance.py --model Qwen/Qwen3-8B --speculate Qwen/Qwen3-0.6B

Prompts are openings of stories, at several temperatures. Every draft has as many tokens as are asked for,
whether or not that pays, so this says how good drafts are and nothing of speed. With --trees a draft is a
tree, of at most 63 tokens, else a line. Passes are tokens that were not drafted. How many tokens the engine
expected of a pass, by what had held before, is told beside how many came, of all passes and of the second
half. Each output is compared with the same one without drafts. In half precision some may differ, as they may
in a batch: so outputs of batches without drafts are compared, too.
"""

import argparse
from collections.abc import Sequence
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from unittest.mock import patch

from recording import Recording

import penstock.engine.boot
from penstock import LLM, Completion, SamplingParams
from penstock.engine.drafter import ModelDrafter
from penstock.engine.tree_drafter import TreeDrafter
from penstock.sched.speculation import Speculation
from penstock.sched.suffix import Draft

OPENINGS = (
    "Once upon a time",
    "Tom had a red ball.",
    "The little fox was hungry.",
    "One rainy morning, Lily looked out of the window.",
    "There was a big tree behind the school.",
    "Ben and Mia went to the beach.",
    "A tiny mouse lived under the stairs.",
    "It was the last day of summer.",
    "Grandma baked a cake for the party.",
    "The old boat lay on the sand.",
)
BATCH = 8
"""Outputs at once in batches without drafts."""


def answers(
    asked: argparse.Namespace, speculate: str, temperature: float, tokens: int, batch: int = 1
) -> tuple[list[Completion], str, list[float]]:
    """Return the outputs, of drafts of so many tokens each, so many at once, what computed them, and how many
    tokens were expected of each pass."""
    expected = list[float]()

    def depths(self: Speculation, found: Sequence[Draft], step: int, spare: int) -> list[int]:
        return [tokens if self.model is not None else 0] * len(found)

    def best(self: Speculation, survival: Sequence[Sequence[float]], step: int, spare: int) -> list[int]:
        expected.extend([1 + sum(some) for some in survival])
        return [len(some) for some in survival]

    def look(self: Speculation, *_: object, **more: object) -> None:
        self.resting = False

    drafter = TreeDrafter if asked.trees else ModelDrafter
    settings = {"device": asked.device, "dtype": asked.dtype, "max_sequences": batch, "prefix_cache": False}
    room = asked.output + 256
    with (
        patch.object(penstock.engine.boot, "ModelDrafter", drafter),
        patch.object(penstock.engine.boot, "TreeDrafter", drafter),
        patch.object(Speculation, "depths", depths),
        patch.object(Speculation, "_best", best),
        patch.object(Speculation, "_payable", lambda self, step, most: most),
        patch.object(Speculation, "look", look),
        LLM(asked.model, **settings, speculate=speculate, max_length=room) as llm,
    ):
        params = [
            SamplingParams(temperature=temperature, seed=seed, max_tokens=asked.output, ignore_eos=True)
            for seed in range(len(OPENINGS))
        ]
        outputs = llm.generate(OPENINGS, params)
        return outputs, f"{llm.booted.dtype} on {llm.booted.device.type}", expected


def behind_a_difference(outputs: Sequence[Completion], plain: Sequence[Completion]) -> float:
    """Return the share of tokens from the first that differs of each output on."""
    same = 0
    for one, other in zip(outputs, plain, strict=True):
        pairs = zip(one.tokens, other.tokens, strict=True)
        same += next((at for at, (mine, theirs) in enumerate(pairs) if mine != theirs), len(one.tokens))
    return 1 - same / sum(len(one.tokens) for one in outputs)


def calibration(outputs: Sequence[Completion], expected: Sequence[float]) -> tuple[float, float]:
    """Return how many times as many tokens came of all passes as were expected, and of their second half, by
    outputs, which come one behind the other."""
    # The first token of an output is of its prompt's pass, of which nothing is expected.
    came = [len(one.tokens) - 1 for one in outputs]
    passes = [tokens - one.accepted_tokens for tokens, one in zip(came, outputs, strict=True)]
    half = len(outputs) // 2
    first = round(len(expected) * sum(passes[:half]) / sum(passes))
    return (
        sum(came) / sum(passes) / fmean(expected),
        sum(came[half:]) / sum(passes[half:]) / fmean(expected[first:]),
    )


def main() -> None:
    """Measure, print a line for each temperature and length, and write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="[the shipped one]")
    parser.add_argument("--speculate", default="self", help="suffix, self, a draft model or an EAGLE-3 head")
    parser.add_argument("--tokens", default="4,8,16", help="of each draft")
    parser.add_argument("--trees", action="store_true", help="let a draft model grow trees")
    parser.add_argument("--temperatures", default="0,0.6,1")
    parser.add_argument("--output", type=int, default=200, help="tokens of each output")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    record = Recording(asked.out, bench="acceptance")
    found: dict[str, object] = {"outputs": len(OPENINGS), "tokens of each": asked.output}
    for temperature in map(float, asked.temperatures.split(",")):
        plain, what, _ = answers(asked, "off", temperature, 0)
        found["computed in"] = what
        beside, *_ = answers(asked, "off", temperature, 0, BATCH)
        share = behind_a_difference(beside, plain)
        print(
            f"temperature {temperature:3.1f}, batches of {BATCH}: {share:.2%} of tokens behind a difference"
        )
        found[f"temperature {temperature:g}, batches of {BATCH}"] = {"behind_a_difference": share}
        for tokens in map(int, asked.tokens.split(",")):
            outputs, _, expected = answers(asked, asked.speculate, temperature, tokens)
            passes = [len(one.tokens) / (len(one.tokens) - one.accepted_tokens) for one in outputs]
            differ = sum(one.tokens != other.tokens for one, other in zip(outputs, plain, strict=True))
            share = behind_a_difference(outputs, plain)
            error = stdev(passes) / sqrt(len(passes))
            ratios = calibration(outputs, expected)
            print(
                f"temperature {temperature:3.1f}, drafts of {tokens:2d}: "
                f"{fmean(passes):5.2f} +- {error:4.2f} tokens a pass, "
                f"{ratios[0]:.2f} of what was expected of {len(expected)} passes, "
                f"{ratios[1]:.2f} in the second half, {differ} of {len(outputs)} outputs differ, "
                f"{share:.2%} of tokens behind a difference",
                flush=True,
            )
            found[f"temperature {temperature:g}, {tokens} drafted"] = {
                "tokens_a_pass": fmean(passes),
                "standard_error": error,
                "of_each_output": passes,
                "passes": len(expected),
                "of_expected": ratios[0],
                "of_expected_in_the_second_half": ratios[1],
                "outputs_that_differ": differ,
                "behind_a_difference": share,
            }
    record.part(
        f"{Path(asked.model or 'shipped').name}, {asked.speculate}{', trees' if asked.trees else ''}", found
    )


if __name__ == "__main__":
    main()
