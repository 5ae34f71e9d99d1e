"""Compare every model family on a GPU with transformers: greedy tokens and log-probabilities in float32,
errors in half precision.

    PYTHONPATH=src python3 benchmarks/families_gpu.py --out families_gpu.json

Writes tiny random checkpoints with transformers, then runs each as one batch, again over what the prefix
cache kept, and in small chunks with so few blocks that requests are sent back. In float32 (no TF32 anywhere)
tokens must be equal, but for choices that transformers itself made by a hair, and log-probabilities within
1e-4 of their size. In bfloat16 and float16 the typical error against float32 is set beside transformers' own
in that dtype and must be no more than 1.5 times it. The wide cases have heads of 64 and 128 and prompts of up
to 9,300 tokens, for the fast kernels; their reference turns positions in double, since float32 angles are off
by as much as that there.

Prints a table and ends with one JSON line; exit status 1 if anything is off. Takes five minutes. `--device
cpu` walks the same path.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from recording import environment, need_commit  # noqa: E402

import tiny  # noqa: E402
from parity import GREEDY, WITH_PROMPT, Measured, measure, prompt_error  # noqa: E402
from penstock import LLM  # noqa: E402

HALF_LIMIT = 1.5
"""Our typical error in half precision over transformers' own."""


@dataclass(frozen=True)
class Line:
    case: str
    dtype: str
    way: str
    measured: Measured
    theirs: float | None
    cached_tokens: int
    preemptions: int
    seconds: float

    @property
    def sound(self) -> bool:
        if self.dtype == "float32":
            return self.measured.exact
        return self.theirs is None or self.measured.typical < HALF_LIMIT * self.theirs


def lines_of(
    name: str, case: tiny.Case, prompts: list[list[int]], device: str, halves: list[str]
) -> Iterator[Line]:
    path = tiny.write(case, tiny.folder() / f"gpu_{name}")
    model = tiny.load(path, device)
    if name in tiny.WIDE:
        tiny.turn_exactly(model)
    exact = [tiny.decode(model, prompt) for prompt in prompts]
    longest = max(map(len, prompts)) + tiny.OUTPUT
    size = 4 if longest < 1024 else 32
    settings = {"device": device, "max_length": longest, "check": True}

    yield from _kept(name, LLM(path, dtype="float32", **settings), prompts, exact, "float32", None)
    begun = time.perf_counter()
    few = {
        "block_size": size,
        "kv_blocks": longest // size + 4,
        "max_sequences": 5,
        "max_step_tokens": 7 if longest < 1024 else 1024,
    }
    with LLM(path, dtype="float32", **few, **settings) as llm:
        measured = measure(llm.generate(prompts, GREEDY), exact)
        yield Line(
            name, "float32", "scarce", measured, None, 0, llm.stats().preemptions, time.perf_counter() - begun
        )
    for dtype in halves:
        half = tiny.load(path, device, getattr(torch, dtype))
        theirs = prompt_error([tiny.decode(half, prompt, steps=1) for prompt in prompts], exact)
        yield from _kept(name, LLM(path, dtype=dtype, **settings), prompts, exact, dtype, theirs)


def _kept(
    name: str,
    llm: LLM,
    prompts: list[list[int]],
    exact: list[tiny.Reference],
    dtype: str,
    theirs: float | None,
) -> Iterator[Line]:
    """One batch, and the same again over what the prefix cache kept."""
    with llm:
        for way, params in (("batch", WITH_PROMPT), ("again", GREEDY)):
            begun = time.perf_counter()
            completions = llm.generate(prompts, params)
            cached = sum(completion.cached_tokens for completion in completions)
            # Errors over the output alone, from few positions and after tokens that may differ, are no match
            # for those over the prompt.
            limit = theirs if way == "batch" else None
            yield Line(
                name,
                dtype,
                way,
                measure(completions, exact),
                limit,
                cached,
                llm.stats().preemptions,
                time.perf_counter() - begun,
            )


def show(line: Line) -> None:
    measured = line.measured
    tokens = f"{measured.equal_tokens}/{measured.clear_tokens}"
    theirs = "" if line.theirs is None else f"{line.theirs:.1e}"
    print(
        f"{line.case:24} {line.dtype:9} {line.way:7} {tokens:>9} {measured.worst:9.1e} "
        f"{measured.typical:9.1e} {theirs:>9}"
        f" {line.cached_tokens:6} {line.preemptions:4} {line.seconds:6.1f}  {'' if line.sound else 'OFF'}",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write all numbers here as JSON")
    parser.add_argument("--only", default="", help="only cases whose name has this in it")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cases", choices=("all", "narrow", "wide"), default="all")
    arguments = parser.parse_args()
    need_commit(arguments.out)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False

    cases = []
    if arguments.cases != "wide":
        cases += [(name, case, tiny.prompts(), ["bfloat16"]) for name, case in tiny.CASES.items()]
    if arguments.cases != "narrow":
        cases += [
            (name, case, tiny.long_prompts(), ["bfloat16", "float16"]) for name, case in tiny.WIDE.items()
        ]
    print(
        f"{'case':24} {'dtype':9} {'way':7} {'tokens':>9} {'worst':>9} {'typical':>9} {'theirs':>9} "
        f"{'cached':>6} {'sent':>4} {'sec':>6}"
    )
    found: list[Line] = []
    failed: list[str] = []
    for name, case, prompts, halves in cases:
        if arguments.only not in name:
            continue
        try:
            for line in lines_of(name, case, prompts, arguments.device, halves):
                show(line)
                found.append(line)
        except Exception as fault:  # the table should name every family that fails
            failed.append(f"{name}: {type(fault).__name__}: {fault}")
            print(failed[-1], flush=True)
    off = [f"{line.case} {line.dtype} {line.way}" for line in found if not line.sound]
    summary = {
        "lines": len(found),
        "off": off,
        "failed": failed,
        "float32_worst": max(
            (line.measured.worst for line in found if line.dtype == "float32"), default=None
        ),
        "half_ratio": max(
            (line.measured.typical / line.theirs for line in found if line.theirs), default=None
        ),
        "preempted": sum(line.preemptions > 0 for line in found),
    }
    if arguments.out:
        arguments.out.write_text(
            json.dumps(
                {**summary, "machine": environment(), "all": [asdict(line) for line in found]}, indent=1
            )
        )
    print(json.dumps(summary))
    return 1 if off or failed or not found else 0


if __name__ == "__main__":
    sys.exit(main())
