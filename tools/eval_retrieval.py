"""Measures how well a small model finds hidden facts, by depth and length of the text, and shows how it tells
stories.

python3 tools/eval_retrieval.py MODEL --text DIR --json FILE
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import time
from collections import defaultdict
from pathlib import Path

import stories
import torch
from needles import END_OF_TEXT, END_OF_TURN, Sample, make_sample, render_chat
from small_llama import SmallLlama, load
from tokenizers import Tokenizer

DEPTHS = tuple(i / 10 for i in range(11))
PROMPTS = (
    "Once upon a time", "The little fox", "It was a cold winter morning and", "My dog likes", "Hello",
    "One rainy morning, Lucy",
)  # fmt: skip
CHATS = (
    "Hello! Who are you?", "Hi", "How are you?", "What can you do?", "Thank you!", "Tell me a joke.",
    "What is "
    "the "
    "capital of France?",
    "Who wrote Hamlet?", "What is 2 plus 2?", "How do I bake a cake?", "Tell me a story about an owl.",
    "Tell me a story about a dragon and a princess.", "Write a short story about a robot named Max.",
)  # fmt: skip


def haystacks(folder: Path | None, seed: int) -> list[str]:
    """Generated stories (of a seed that no training uses), and books with unbroken and with their own
    lines."""
    rng = random.Random(f"evaluation {seed}")
    texts = ["\n\n".join(stories.make_story(rng).text for _ in range(400))]
    for file in sorted(folder.rglob("*.txt")) if folder else []:
        if file.stat().st_size > 100_000:
            paragraphs = stories.book_paragraphs(file.read_text(encoding="utf-8"))
            texts += ["\n\n".join(paragraphs), "\n\n".join(stories.unwrap(p) for p in paragraphs)]
    return texts


_shared: tuple[Tokenizer, list[str]] | None = None  # of the forked processes that make samples


def _sample(job: tuple[int, float, str, int]) -> tuple[Sample, list[int], list[int]]:
    length, depth, style, seed = job
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tok, texts = _shared  # type: ignore[misc]
    rng = random.Random(seed)
    sample = make_sample(
        length,
        depth,
        rng,
        tok,
        rng.choice(texts),
        style,
        distractors=rng.choice((0, 1, 3, 8)) if length > 400 else 0,
    )
    answer = sample.answer + (END_OF_TURN if style == "chat" else "")
    # A chat begins with <|endoftext|> already; before a plain text the tokenizer puts it.
    return (
        sample,
        tok.encode(sample.prompt, add_special_tokens=style != "chat").ids,
        tok.encode(answer, add_special_tokens=False).ids,
    )


@torch.no_grad()
def expected(model: SmallLlama, prompt: list[int], answer: list[int]) -> bool:
    """Whether greedy decoding gives `answer`: each of its tokens must be the likeliest after the ones before
    it."""
    device = model.weights["model.norm.weight"].device
    x = model.hidden(torch.tensor([prompt + answer[:-1]], device=device), [])
    return model.logits(x[-len(answer) :]).argmax(-1).tolist() == answer


def main(argv: list[str] | None = None) -> dict:
    global _shared
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", type=Path)
    p.add_argument("--text", type=Path)
    p.add_argument("--json", type=Path)
    p.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192, 16_384, 32_768])
    p.add_argument("--samples", type=int, default=8, help="per length, depth and style")
    p.add_argument("--styles", nargs="+", default=["chat", "plain", "passkey"])
    p.add_argument("--seed", type=int, default=7)
    p.add_argument("--processes", type=int, default=min(16, os.cpu_count() or 1))
    p.add_argument("--story-tokens", type=int, default=400)
    p.add_argument("--cpu", action="store_true")
    args = p.parse_args(argv)
    tok = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    begin = time.perf_counter()
    _shared = (tok, haystacks(args.text, args.seed))
    cells = [
        (n, d, s) for n in args.lengths for d in DEPTHS for s in args.styles for _ in range(args.samples)
    ]
    jobs = [(*cell, args.seed * 10**6 + i) for i, cell in enumerate(cells)]
    with multiprocessing.get_context("fork").Pool(args.processes) as workers:  # before CUDA starts
        samples = workers.map(_sample, jobs, chunksize=4)
    print(f"{len(samples)} samples in {time.perf_counter() - begin:.1f}s", flush=True)

    device = torch.device("cuda" if torch.cuda.is_available() and not args.cpu else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = SmallLlama(*load(args.model, device, dtype), dtype)
    stop = {tok.token_to_id(END_OF_TURN), tok.token_to_id(END_OF_TEXT)}
    results: dict[tuple[str, int, float], list[bool]] = defaultdict(list)
    misses, disagreements, generated = [], 0, 0
    for (length, depth, style, _), (sample, prompt, answer) in zip(jobs, samples, strict=True):
        right = expected(model, prompt, answer)
        cell = results[style, length, depth]
        # Really generated for the first sample of every cell and for the first misses.
        if not cell or (not right and len(misses) < 40):
            text = tok.decode(model.generate(prompt, len(answer) + 4, stop if style == "chat" else set()))
            same = text == sample.answer if style == "chat" else text.startswith(sample.answer)
            disagreements += same != right
            generated += 1
            if not right:
                misses.append(
                    {"style": style, "length": length, "depth": depth, "expected": sample.answer, "got": text}
                )
        cell.append(right)
    report: dict = {
        "samples": args.samples,
        "generated": generated,
        "disagreements": disagreements,
        "accuracy": {},
        "misses": misses,
    }
    for style in args.styles:
        print(
            f"\n{style}: share of exact answers; rows: length, columns: depth in %\n{'':>7}"
            + "".join(f"{d:6.0%}" for d in DEPTHS)
            + "    all"
        )
        for n in args.lengths:
            row = [sum(results[style, n, d]) / args.samples for d in DEPTHS]
            print(f"{n:7}" + "".join(f"{c:6.2f}" for c in row) + f" {sum(row) / len(row):6.3f}")
            report["accuracy"].setdefault(style, {})[n] = {"by_depth": row, "all": sum(row) / len(row)}
    print(
        f"\n{generated} answers really generated, {disagreements} of them against the check of the "
        "likeliest tokens"
    )
    for miss in misses[:8]:
        print("miss:", miss)
    report["stories"] = []
    for prompt_text in (*PROMPTS, *(render_chat([{"role": "user", "content": text}]) for text in CHATS)):
        for temperature in (0.0, 0.7):
            ids = tok.encode(prompt_text, add_special_tokens=not prompt_text.startswith(END_OF_TEXT)).ids
            text = tok.decode(model.generate(ids, args.story_tokens, stop, temperature, args.seed))
            report["stories"].append({"prompt": prompt_text, "temperature": temperature, "text": text})
            print(f"\n--- {prompt_text!r} at temperature {temperature}\n{text}", flush=True)
    print(f"\n{time.perf_counter() - begin:.0f}s")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return report


if __name__ == "__main__":
    main()
