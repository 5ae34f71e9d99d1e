"""Measure how often the engine, with the shipped model, finds a fact hidden in a long text: by style, length
and depth.

python benchmarks/retrieval.py --samples 8 --text DIR --out FILE

Every answer is generated through the public API, greedily, many prompts at a time. Without --text (a folder
of books as .txt files) the texts are generated stories. Facts and questions come from `tools/needles.py`,
drawn by a seed that training does not use.
"""

import argparse
import json
import multiprocessing
import os
import random
import sys
import time
from collections import defaultdict
from pathlib import Path

TOOLS = Path(__file__).parent.parent / "tools"
sys.path.insert(0, str(TOOLS))

import needles  # noqa: E402
from eval_retrieval import DEPTHS, haystacks  # noqa: E402
from recording import environment, need_commit  # noqa: E402

from penstock import LLM, SamplingParams  # noqa: E402

CONTEXT = 32768
_texts: list[str] = []  # of the processes that make samples


def make(job: tuple[int, float, str, int, str]) -> needles.Sample:
    from tokenizers import Tokenizer

    length, depth, style, seed, tokenizer = job
    length = min(length, CONTEXT - 64)  # room for the answer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    rng = random.Random(seed)
    distractors = rng.choice((0, 1, 3, 8)) if length > 400 else 0
    return needles.make_sample(
        length, depth, rng, Tokenizer.from_file(tokenizer), rng.choice(_texts), style, distractors=distractors
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="a checkpoint directory; the shipped model if left out")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192, 16384, 32768])
    parser.add_argument("--styles", nargs="+", default=["chat", "plain", "passkey"])
    parser.add_argument("--samples", type=int, default=8, help="for each style, length and depth")
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    need_commit(args.out)

    model = args.model or Path(__file__).parent.parent / "src" / "penstock" / "shipped"
    _texts[:] = haystacks(args.text, args.seed)
    cells = [
        (n, d, s) for n in args.lengths for d in DEPTHS for s in args.styles for _ in range(args.samples)
    ]
    jobs = [
        (*cell, args.seed * 10**6 + number, str(model / "tokenizer.json"))
        for number, cell in enumerate(cells)
    ]
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as workers:  # before CUDA starts
        samples = workers.map(make, jobs, chunksize=4)

    begin = time.perf_counter()
    with LLM(model, device=args.device, dtype=args.dtype) as llm:
        params = SamplingParams(temperature=0, max_tokens=48)
        # The room that an answer needs comes off the longest prompts, which fill the context.
        prompts = [
            list(sample.messages) if style == "chat" else sample.prompt
            for (_, _, style), sample in zip(cells, samples, strict=True)
        ]
        completions = llm.generate(prompts, params)
        stats, dtype = llm.stats(), llm.dtype
    seconds = time.perf_counter() - begin

    right: dict[tuple[str, int, float], list[bool]] = defaultdict(list)
    misses = []
    for cell, sample, completion in zip(cells, samples, completions, strict=True):
        length, depth, style = cell
        found = (
            completion.text == sample.answer if style == "chat" else completion.text.startswith(sample.answer)
        )
        right[style, length, depth].append(found)
        if not found:
            misses.append(
                {
                    "style": style,
                    "length": length,
                    "depth": depth,
                    "expected": sample.answer,
                    "got": completion.text[:120],
                }
            )
    accuracy: dict[str, dict[int, dict[str, object]]] = {}
    for style in args.styles:
        print(
            f"\n{style}: share of exact answers, by length and depth in %\n{'':>7}"
            + "".join(f"{d * 100:6.0f}" for d in DEPTHS)
            + "   all"
        )
        for length in args.lengths:
            row = [sum(right[style, length, depth]) / args.samples for depth in DEPTHS]
            mean = sum(row) / len(row)
            print(f"{length:7}" + "".join(f"{share:6.2f}" for share in row) + f" {mean:6.3f}")
            accuracy.setdefault(style, {})[length] = {"by_depth": row, "all": mean}
    total = sum(sum(cell) for cell in right.values())
    print(
        f"\n{total} of {len(samples)} exact; {seconds:.0f} s, {stats.computed_tokens / seconds:,.0f} "
        f"tokens/s, {dtype}"
    )
    record = {
        "bench": "retrieval",
        "model": model.name,
        "texts": "generated stories" + (" and the books that training used" if args.text else ""),
        "samples_per_cell": args.samples,
        "exact": total,
        "of": len(samples),
        "accuracy": accuracy,
        "misses": misses,
        "seconds": seconds,
        "computed_tokens": stats.computed_tokens,
        "dtype": dtype,
        "machine": environment(),
    }
    if args.out:
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
