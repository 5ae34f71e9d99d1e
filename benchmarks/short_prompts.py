"""Measure steps with several short prompts, beside rows that decode and without: replayed as CUDA graphs, and
launched kernel by kernel.

    PYTHONPATH=src python3 benchmarks/short_prompts.py --shapes 0.6B,8B --out docs/results/short_prompts.json

Both engines are there at once, each with its own random weights and KV, and take turns. A round is the time
to the first tokens of all prompts; each of them is new, but for a prefix of 512 tokens that is found where
the case says so. `arrivals`: 32 sequences decode 100 tokens each, and with every fourth step a prompt of 16
tokens comes, of which one token is asked for; told are the seconds over 100 steps.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from random_checkpoint import write_checkpoint
from recording import Recording

from penstock import LLM, SamplingParams
from penstock.api.llm import SHIPPED_MODEL
from penstock.bench.shapes import SHAPES
from penstock.bench.warming import in_turns

CASES = ((1, 16, 0), (2, 16, 0), (8, 16, 0), (32, 16, 0), (64, 16, 0), (8, 64, 0), (4, 128, 0), (8, 16, 512))
"""Prompts, tokens of each, and tokens before these that are found."""
ROWS, STEPS, EVERY, COMING = 32, 100, 4, 16
IDS = 4000
ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
MANY = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True)
rng = random.Random(0)


def prompts_of(count: int, tokens: int, before: int = 0) -> list[list[int]]:
    """New prompts, behind the same tokens."""
    shared = [5 + place % IDS for place in range(before)]
    return [[*shared, *(rng.randrange(5, IDS) for _ in range(tokens))] for _ in range(count)]


def first_tokens(llm: LLM, case: tuple[int, int, int]) -> Callable[[], float]:
    def measured() -> float:
        prompts = prompts_of(*case)
        begin = time.perf_counter()
        llm.generate(prompts, ONE)
        return time.perf_counter() - begin

    return measured


def arrivals(llm: LLM) -> Callable[[], float]:
    def measured() -> float:
        driver, read = llm.driver, llm.reader.read
        rows = [driver.begin(read(prompt, MANY)) for prompt in prompts_of(ROWS, COMING)]
        come = [read(prompt, ONE) for prompt in prompts_of(STEPS // EVERY, COMING)]
        begin = time.perf_counter()
        steps = 0
        while not all(row.done for row in rows):
            if steps % EVERY == 0 and come:
                driver.begin(come.pop())
            driver.advance()
            steps += 1
        return time.perf_counter() - begin

    return measured


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shapes", help="of random weights, with commas between them; else the shipped model"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    recording = Recording(asked.out, bench="short_prompts")
    for shape in asked.shapes.split(",") if asked.shapes else ("shipped",):
        with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
            model = SHIPPED_MODEL
            if asked.shapes:
                model = Path(folder) / shape
                write_checkpoint(model, SHAPES[shape])
            settings = {"device": asked.device, "max_sequences": 64, "max_length": 1024}
            if asked.device != "cpu":
                settings["device_memory"] = "45%"
            ways = {"recorded": True, "one by one": False}
            llms = {way: opened.enter_context(LLM(model, **settings, graphs=on)) for way, on in ways.items()}
            found: dict[str, object] = {}
            timings = {
                f"{count} x {tokens}" + (f" behind {before}" if before else ""): {
                    way: first_tokens(llm, (count, tokens, before)) for way, llm in llms.items()
                }
                for count, tokens, before in CASES
            }
            timings["arrivals"] = {way: arrivals(llm) for way, llm in llms.items()}
            for case, work in timings.items():
                timed = in_turns(work, asked.rounds)
                found[case] = {way: one.record() for way, one in timed.items()}
                fast, slow = (1e3 * median(timed[way].seconds) for way in ways)
                print(f"{shape:8} {case:18} {fast:8.2f} ms recorded, {slow:8.2f} one by one", flush=True)
            recording.part(shape, found)


if __name__ == "__main__":
    main()
