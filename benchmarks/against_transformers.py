"""Time penstock against transformers' `generate` on a CPU: one random Llama, one process, the same dtype and
threads, greedy.

    python benchmarks/against_transformers.py --out against_transformers.json

Three comparisons, each repeated with fresh prompts and in alternating order, once every side is warm (see
penstock.bench.warming); medians count, and all seconds are kept:

    single      one prompt, one output
    one by one  many requests of mixed lengths: penstock gets them all at once, transformers runs each alone,
                with its own length
    padded      the same; transformers runs them as one batch, padded on the left, to the end of the longest
                output; only what was asked for counts

Tokens of both sides are compared. Peak memory is what fresh processes, each with one side only, have taken at
most (VmHWM) for the mixed requests. Prints a table, and ends with one line of JSON. --layers, --requests and
the like make it small enough to try out.
"""

import argparse
import itertools
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from penstock.bench.warming import Timed

# transformers and penstock are imported by the side that needs them: in a process whose memory is measured
# the other has no business.

SINGLE_PROMPT, SINGLE_OUTPUT = 64, 64
WANTED = {"single": 1.2, "one by one": 3.0, "padded": 1.3}
"""How many times as fast as transformers penstock is to be."""


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    output: int


Tokens = list[list[int]]


class Transformers:
    def __init__(self, path: Path, dtype: str) -> None:
        import transformers

        model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
        self._model = model.eval()
        self._model.generation_config.eos_token_id = None

    def alone(self, requests: list[Request]) -> Tokens:
        return [tokens for request in requests for tokens in self.padded([request])]

    @torch.inference_mode()
    def padded(self, requests: list[Request]) -> Tokens:
        width, most = max(len(one.prompt) for one in requests), max(one.output for one in requests)
        ids = torch.zeros(len(requests), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, one in enumerate(requests):
            ids[row, width - len(one.prompt) :] = torch.tensor(one.prompt)
            mask[row, width - len(one.prompt) :] = 1
        out = self._model.generate(
            ids, attention_mask=mask, max_new_tokens=most, do_sample=False, pad_token_id=0
        )
        assert out.shape[1] == width + most, "transformers ended before the asked length"
        return [row[: one.output] for row, one in zip(out[:, width:].tolist(), requests, strict=True)]


class Penstock:
    def __init__(self, path: Path, dtype: str) -> None:
        from penstock import LLM

        self._llm = LLM(
            path, device="cpu", dtype=dtype, device_memory=_memory(path), prefix_cache=False, progress=False
        )

    def together(self, requests: list[Request]) -> Tokens:
        from penstock import SamplingParams

        params = [SamplingParams(temperature=0, max_tokens=one.output, ignore_eos=True) for one in requests]
        return [list(one.tokens) for one in self._llm.generate([one.prompt for one in requests], params)]


def _memory(path: Path) -> int:
    """Weights twice over, which leaves ample room for KV that is only touched as it is used."""
    return 2 * sum(file.stat().st_size for file in path.glob("*.safetensors")) + (1 << 30)


@dataclass(frozen=True)
class Outcome:
    """Seconds of every repeat, and tokens of a round that all sides have done."""

    took: "Timed"
    useful: int
    tokens: Tokens

    @property
    def rate(self) -> float:
        """Useful tokens/s at the median."""
        return self.useful / self.took.median


def requests(args: argparse.Namespace, seed: int, count: int) -> list[Request]:
    """`count` of mixed lengths. The lengths depend on --seed alone, so that every repeat does the same work;
    the tokens on `seed` too."""
    lengths, rng = random.Random(args.seed), random.Random(f"{args.seed} {seed}")
    sizes = [(lengths.randint(*args.prompt), lengths.randint(*args.tokens)) for _ in range(count)]
    return [Request([rng.randrange(args.vocab) for _ in range(prompt)], output) for prompt, output in sizes]


def single(args: argparse.Namespace, seed: int) -> list[Request]:
    rng = random.Random(f"{args.seed} {seed} single")
    return [Request([rng.randrange(args.vocab) for _ in range(SINGLE_PROMPT)], args.single_tokens)]


def alternate(
    sides: dict[str, Callable[[list[Request]], Tokens]],
    work: Callable[[int], list[Request]],
    repeat: int,
    brief: bool,
) -> dict[str, Outcome]:
    """Every side, warm, on the same work, in turns."""
    from penstock.bench.warming import BRIEF, RULE, in_turns

    rounds = {name: itertools.count() for name in sides}

    def one(name: str) -> float:
        batch = work(next(rounds[name]))
        begin = time.perf_counter()
        sides[name](batch)
        return time.perf_counter() - begin

    took = in_turns({name: partial(one, name) for name in sides}, repeat, BRIEF if brief else RULE)
    # Sides need more rounds or fewer to be warm: what they say is compared of one more, which is the same for
    # all.
    last = work(-1)
    useful = sum(one.output for one in last)
    return {name: Outcome(took[name], useful, sides[name](last)) for name in sides}


def write_model(args: argparse.Namespace, path: Path) -> float:
    """A random Llama in float32, its layers loud enough that it does not just repeat its input; returns its
    parameters in millions."""
    import transformers

    torch.manual_seed(args.seed)
    config = transformers.LlamaConfig(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=args.inner,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for weight in model.model.layers.parameters():
            if weight.dim() == 2:
                weight.mul_(2)
    model.save_pretrained(path)
    return sum(weight.numel() for weight in model.parameters()) / 1e6


def peak(side: str, path: Path) -> int:
    """Bytes that a fresh process takes at most which loads `side` only and runs the mixed requests."""
    command = [sys.executable, __file__, *sys.argv[1:], "--model", str(path), "--peak-of", side]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"measuring the memory of {side} failed:\n{done.stderr}")
    return int(done.stdout.split()[-1])


def report_peak(args: argparse.Namespace, path: Path) -> None:
    """What `peak` starts: one side, one run, and the high-water mark of this process."""
    batch = requests(args, 0, args.requests)
    if args.peak_of == "penstock":
        Penstock(path, args.dtype).together(batch)
    elif args.peak_of == "padded":
        Transformers(path, args.dtype).padded(batch)
    else:
        Transformers(path, args.dtype).alone(batch)
    status = Path("/proc/self/status").read_text()
    print(next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")))


def compare(ours: Outcome, theirs: Outcome, wanted: float) -> dict[str, object]:
    return {
        "penstock_tokens_per_second": ours.rate,
        "transformers_tokens_per_second": theirs.rate,
        "ratio": ours.rate / theirs.rate,
        "wanted": wanted,
        "useful_tokens": ours.useful,
        "penstock": ours.took.record(),
        "transformers": theirs.took.record(),
        "equal": sum(one == other for one, other in zip(ours.tokens, theirs.tokens, strict=True)),
        "of": len(ours.tokens),
    }


def measure(args: argparse.Namespace, path: Path, millions: float) -> dict[str, object]:
    """All of it, as what the line of JSON says."""
    import transformers
    from recording import environment

    peaks = (
        {side: peak(side, path) for side in ("penstock", "one by one", "padded")}
        if not args.no_memory
        else {}
    )
    theirs, ours = Transformers(path, args.dtype), Penstock(path, args.dtype)
    one = alternate(
        {"penstock": ours.together, "single": theirs.alone},
        lambda number: single(args, number),
        args.repeat,
        brief=False,
    )
    many = alternate(
        {"penstock": ours.together, "one by one": theirs.alone, "padded": theirs.padded},
        lambda number: requests(args, number, args.requests),
        args.repeat,
        brief=True,
    )
    pairs = (("single", one), ("one by one", many), ("padded", many))
    return {
        "bench": "against_transformers",
        "parameters_millions": round(millions, 1),
        "dtype": args.dtype,
        "threads": torch.get_num_threads(),
        "requests": args.requests,
        "repeat": args.repeat,
        "comparisons": {name: compare(runs["penstock"], runs[name], WANTED[name]) for name, runs in pairs},
        "peak_bytes": peaks,
        "transformers": transformers.__version__,
        "environment": environment(),
    }


def show(found: dict[str, Any]) -> None:
    print(
        f"{found['parameters_millions']}M parameters, {found['dtype']}, {found['threads']} threads, "
        f"transformers {found['transformers']}"
    )
    print(f"{'':<12} {'penstock':>12} {'transformers':>14} {'ratio':>7} {'wanted':>7}   same tokens")
    for name, it in found["comparisons"].items():
        spread = ", ".join(
            f"{side} {it['useful_tokens'] / it[side]['most_s']:.1f} to "
            f"{it['useful_tokens'] / it[side]['least_s']:.1f}"
            for side in ("penstock", "transformers")
        )
        rates = (
            f"{it['penstock_tokens_per_second']:>8.1f} t/s {it['transformers_tokens_per_second']:>10.1f} t/s"
        )
        print(
            f"{name:<12} {rates} {it['ratio']:>7.2f} {it['wanted']:>7.1f}   {it['equal']} of {it['of']}; "
            f"{spread}"
        )
    if peaks := found["peak_bytes"]:
        print("peak memory  " + ", ".join(f"{name} {size / 2**20:,.0f} MiB" for name, size in peaks.items()))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (
        ("layers", 12),
        ("hidden", 768),
        ("inner", 2048),
        ("heads", 12),
        ("kv-heads", 4),
        ("vocab", 32000),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, help="of torch; all sides use as many")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt", type=int, nargs=2, default=(16, 256), metavar=("LEAST", "MOST"))
    parser.add_argument("--tokens", type=int, nargs=2, default=(16, 128), metavar=("LEAST", "MOST"))
    parser.add_argument("--single-tokens", type=int, default=SINGLE_OUTPUT)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-memory", action="store_true", help="leave out the runs in fresh processes")
    parser.add_argument("--out", type=Path, help="write the line of JSON here too")
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.peak_of:
        report_peak(args, args.model)
        return
    if args.out:
        from recording import need_commit

        need_commit(args.out)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        found = measure(args, Path(folder), write_model(args, Path(folder)))
    show(found)
    line = json.dumps(found)
    print(line)
    if args.out:
        args.out.write_text(line + "\n")


if __name__ == "__main__":
    main()
