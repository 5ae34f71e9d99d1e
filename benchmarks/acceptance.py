"""Measure how many tokens a pass yields where each verifies a draft of a given length.

    PYTHONPATH=src python3 benchmarks/acceptance.py --speculate self --out acceptance.json
    PYTHONPATH=src python3 benchmarks/acceptance.py --speculate self --trees --tokens 63
    PYTHONPATH=src python3 benchmarks/acceptance.py --model Qwen/Qwen3-8B --speculate Qwen/Qwen3-0.6B

Prompts are openings of stories, at several temperatures. Every draft has as many tokens as are asked for,
whether or not that pays, so this says how good drafts are and nothing of speed. With --trees a draft is a
tree, of at most 63 tokens, else a line. Passes are tokens that were not drafted. Each output is compared with
the same one without drafts; in half precision some may differ.
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


def answers(
    asked: argparse.Namespace, speculate: str, temperature: float, tokens: int
) -> tuple[list[Completion], str]:
    """Return the outputs, of drafts of so many tokens each, and what computed them."""

    def depths(self: Speculation, found: Sequence[Draft], step: int, spare: int) -> list[int]:
        return [tokens if self.model is not None else 0] * len(found)

    def best(self: Speculation, survival: Sequence[Sequence[float]], step: int, spare: int) -> list[int]:
        return [len(some) for some in survival]

    def look(self: Speculation, *_: object, **more: object) -> None:
        self.resting = False

    drafter = TreeDrafter if asked.trees else ModelDrafter
    settings = {"device": asked.device, "dtype": asked.dtype, "max_sequences": 1, "prefix_cache": False}
    room = asked.output + 256
    with (
        patch.object(penstock.engine.boot, "ModelDrafter", drafter),
        patch.object(penstock.engine.boot, "TreeDrafter", drafter),
        patch.object(Speculation, "depths", depths),
        patch.object(Speculation, "_best", best),
        patch.object(Speculation, "_payable", lambda self, step, most: most),
        patch.object(Speculation, "look", look),
        LLM(asked.model, **settings, speculate=speculate, max_length=room) as llm,  # type: ignore[arg-type]
    ):
        params = [
            SamplingParams(temperature=temperature, seed=seed, max_tokens=asked.output, ignore_eos=True)
            for seed in range(len(OPENINGS))
        ]
        return llm.generate(OPENINGS, params), f"{llm.booted.dtype} on {llm.booted.device.type}"


def main() -> None:
    """Measure, print a line for each temperature and length, and write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="[the shipped one]")
    parser.add_argument("--speculate", default="self", help="suffix, self, or a draft model")
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
        plain, what = answers(asked, "off", temperature, 0)
        found["computed in"] = what
        for tokens in map(int, asked.tokens.split(",")):
            outputs, _ = answers(asked, asked.speculate, temperature, tokens)
            passes = [len(one.tokens) / (len(one.tokens) - one.accepted_tokens) for one in outputs]
            differ = sum(one.tokens != other.tokens for one, other in zip(outputs, plain, strict=True))
            error = stdev(passes) / sqrt(len(passes))
            print(
                f"temperature {temperature:3.1f}, drafts of {tokens:2d}: "
                f"{fmean(passes):5.2f} +- {error:4.2f} tokens a pass, "
                f"{differ} of {len(outputs)} outputs differ",
                flush=True,
            )
            found[f"temperature {temperature:g}, {tokens} drafted"] = {
                "tokens_a_pass": fmean(passes),
                "standard_error": error,
                "of_each_output": passes,
                "outputs_that_differ": differ,
            }
    record.part(
        f"{Path(asked.model or 'shipped').name}, {asked.speculate}{', trees' if asked.trees else ''}", found
    )


if __name__ == "__main__":
    main()
