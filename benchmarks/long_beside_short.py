"""Short requests beside a long one whose KV rests in host memory: tokens per second of the short ones, where
steps run ahead and where each waits for the one before.

    python benchmarks/long_beside_short.py --shape 8B --context 65536      random weights, on CUDA
    python benchmarks/long_beside_short.py --tiny                       the same course on a small shape

A line for each case: the short ones alone and beside the long one, with and without running ahead. In a step
beside the long one its whole KV streams, so that step takes longer. What running ahead gains is to be seen
between two lines of the same kind.
"""

import argparse
import random
from pathlib import Path
from statistics import median
from unittest.mock import patch

from weight_streaming import GREEDY, say

from penstock.base.config import Config
from penstock.bench.shapes import SHAPES
from penstock.bench.speed.measure import time_decode
from penstock.engine.boot import Booted, boot
from penstock.weights.checkpoint.shape import Shape
from penstock.worker.runner import Runner


def timed(booted: Booted, rows: int, context: int, steps: int) -> tuple[float, int]:
    """Return the median seconds of a decode step of `rows` short requests, beside one of `context` tokens if
    that is not 0, and how many tokens each of the short ones got."""
    engine, rng = booted.engine, random.Random(0)
    prompts = [[rng.randrange(booted.spec.vocab_size) for _ in range(32)] for _ in range(rows)]
    if context:
        prompts.append([rng.randrange(booted.spec.vocab_size) for _ in range(context)])
    got = {engine.submit(prompt, GREEDY, 2 * steps + 400): 0 for prompt in prompts}
    while not all(got.values()):
        for event in engine.step():
            got[event.request] += event.token is not None
    before = list(got.values())[:rows]
    seconds = time_decode(booted, got, steps).seconds
    tokens = min(after - first for after, first in zip(list(got.values())[:rows], before, strict=True))
    for request in got:
        engine.stop(request)
    while engine.busy:
        engine.step()
    return median(seconds), tokens


def main() -> None:
    """Run the four cases on one engine."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="8B", choices=SHAPES)
    parser.add_argument("--context", type=int, default=65536, help="tokens of the long prompt")
    parser.add_argument("--rows", type=int, default=16, help="short requests")
    parser.add_argument("--steps", type=int, default=100, help="timed decode steps")
    parser.add_argument("--tiny", action="store_true", help="a small shape, on any device")
    asked = parser.parse_args()
    shape, device, context, block = dict(SHAPES[asked.shape]), "cuda", asked.context, 32
    if asked.tiny:
        small = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 512}
        shape |= small | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
        device, context, block = "auto", 256, 4
    pages = asked.rows * ((2 * asked.steps + 432) // block + 1) + 8
    context = max(context, 2 * pages * block)  # More than pages hold: it is long.
    config = Config(
        Path(),
        device=device,
        block_size=block,
        max_length=context + 2 * asked.steps + 400,
        kv_blocks=pages,
        max_sequences=asked.rows + 1,
        host_kv_memory="64MiB" if asked.tiny else "50%",
    )
    booted = boot(config, Shape.of(shape), say=say)
    try:
        for beside in (0, context):
            for runs_ahead in (True, False):
                with patch.object(Runner, "ahead", runs_ahead):
                    seconds, tokens = timed(booted, asked.rows, beside, asked.steps)
                where = f"beside {beside:,} tokens" if beside else "alone"
                say(
                    f"{asked.rows} short ones {where}, {'ahead' if runs_ahead else 'in turn'}: "
                    f"{seconds * 1e3:.2f} ms a step, {asked.rows / seconds:,.0f} tokens/s; "
                    f"{tokens} tokens each"
                )
    finally:
        booted.engine.close()


if __name__ == "__main__":
    main()
