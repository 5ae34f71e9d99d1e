"""Compare the speed and the memory of two versions of penstock on the same machine, in turns.

    python3 benchmarks/before_after.py --before TREE --out compared.json      8B and 0.6B shapes, on CUDA
    python3 benchmarks/before_after.py --before TREE --tiny                   small shapes, on any device

TREE is another checkout. Each round runs both versions, each in a fresh process, in an order that alternates.
A process measures everything once: decode steps, prompts, many requests, weights and KV that stream, a prefix
that comes back from host memory, the start of engines, and the most memory that each engine took.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "torch_dtype": "bfloat16",
    "rms_norm_eps": 1e-5,
}
SHAPES = {
    "8B": LLAMA
    | {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
        "rope_theta": 5e5,
    },
    "0.6B": LLAMA
    | {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
        "rope_theta": 1e6, "tie_word_embeddings": True,
    },
    "tiny": LLAMA
    | {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
        "rope_theta": 1e4,
    },
}  # fmt: skip


# ---- one version, in a process of its own


class Clocked:
    """One engine over random weights, and what was measured of it."""

    def __init__(
        self, shape: str, device: str, found: dict[str, float], label: str, **settings: object
    ) -> None:
        import torch

        from penstock.base.config import Config
        from penstock.engine.boot import boot

        self._cuda = device == "cuda"
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        config = Config(Path(), device=device, dtype="bfloat16" if self._cuda else "float32", **settings)
        self.booted = boot(config, shape_class().of(SHAPES[shape]))
        found[f"start of {label}, s"] = time.perf_counter() - begin
        self.engine, self._found, self._label = self.booted.engine, found, label
        self._vocab, self._random = SHAPES[shape]["vocab_size"], random.Random(0)

    def prompt(self, length: int) -> list[int]:
        return [self._random.randrange(self._vocab) for _ in range(length)]

    def step(self, got: dict[Any, int]) -> None:
        for event in self.engine.step():
            got[event.request] += event.token is not None

    def decode(self, rows: int, context: int, steps: int) -> float:
        """Return the median seconds of a decode step."""
        requests = [self.engine.submit(self.prompt(context), greedy()) for _ in range(rows)]
        got = dict.fromkeys(requests, 0)
        while not all(got.values()):
            self.step(got)
        for _ in range(8):
            self.step(got)
        seconds = []
        last = time.perf_counter()
        for _ in range(steps):
            self.step(got)
            now = time.perf_counter()
            seconds.append(now - last)
            last = now
        for request in requests:
            self.engine.stop(request)
        self.idle()
        return statistics.median(seconds)

    def first_token(self, prompt: list[int]) -> float:
        """Return the seconds until a prompt's first token."""
        begin = time.perf_counter()
        got = {self.engine.submit(prompt, greedy(), 1): 0}
        while not all(got.values()):
            self.step(got)
        took = time.perf_counter() - begin
        self.idle()
        return took

    def many(self, count: int, least: int, most: int) -> float:
        """Return the output tokens a second of so many requests of random lengths."""
        sizes = [(self._random.randint(least, most), self._random.randint(least, most)) for _ in range(count)]
        begin = time.perf_counter()
        got = {self.engine.submit(self.prompt(length), greedy(), output): 0 for length, output in sizes}
        while self.engine.busy:
            self.step(got)
        return sum(got.values()) / (time.perf_counter() - begin)

    def idle(self) -> None:
        while self.engine.busy:
            self.engine.step()

    def close(self) -> None:
        import torch

        if self._cuda:
            self._found[f"device memory of {self._label}, MiB"] = torch.cuda.max_memory_reserved() / 2**20
        self.engine.close()


def shape_class() -> Any:
    try:
        from penstock.weights.checkpoint.shape import Shape
    except ImportError:
        from penstock.weights.shape import Shape  # type: ignore[import-not-found,no-redef]
    return Shape


def greedy() -> Any:
    try:
        from penstock.bench.speed.measure import sampling

        return sampling()
    except ImportError:
        from penstock.bench.measure import _GREEDY

        return _GREEDY


@contextmanager
def clocked(*given: Any, **settings: Any) -> Iterator[Clocked]:
    one = Clocked(*given, **settings)
    try:
        yield one
    finally:
        one.close()


def resident(tiny: bool, found: dict[str, float]) -> None:
    """Measure 8B with everything on the device."""
    shape, device, part = ("tiny", "cpu", 32) if tiny else ("8B", "cuda", 1)
    with clocked(shape, device, found, "8B") as engine:
        found["8B, one sequence, ms a step"] = 1e3 * engine.decode(1, 2048 // part, 96 // part)
        rows = 4 if tiny else 64
        found["8B, 64 sequences, ms a step"] = 1e3 * engine.decode(rows, 2048 // part, 96 // part)
        engine.first_token(engine.prompt(16384 // part))
        prompts = [engine.first_token(engine.prompt(16384 // part)) for _ in range(3)]
        found["8B, prompt of 16K, s"] = statistics.median(prompts)


def small(tiny: bool, found: dict[str, float]) -> None:
    """Measure 0.6B: one sequence, and 256 requests, three times."""
    shape, device, part = ("tiny", "cpu", 32) if tiny else ("0.6B", "cuda", 1)
    with clocked(shape, device, found, "0.6B") as engine:
        found["0.6B, one sequence, ms a step"] = 1e3 * engine.decode(1, 2048 // part, 192 // part)
        engine.many(8, 100 // part + 1, 1024 // part)
        rates = [engine.many(8 if tiny else 256, 100 // part + 1, 1024 // part) for _ in range(3)]
        found["0.6B, 256 requests, s for 1,000 output tokens"] = 1e3 / statistics.median(rates)


def streamed(tiny: bool, found: dict[str, float]) -> None:
    """Measure 8B whose weights are in host memory but for 8 GiB."""
    shape, device, part = ("tiny", "cpu", 32) if tiny else ("8B", "cuda", 1)
    with clocked(
        shape, device, found, "8B streamed", **({} if tiny else {"device_memory": "8GiB"})
    ) as engine:
        found["8B streamed from host memory, ms a step"] = 1e3 * engine.decode(1, 512 // part, 24)


def far_kv(tiny: bool, found: dict[str, float]) -> None:
    """Measure 8B with KV in host memory: of a context, and of prefixes that come back."""
    shape, device, context, prefix = ("tiny", "cpu", 3000, 1024) if tiny else ("8B", "cuda", 131_072, 32_768)
    room = {"kv_blocks": 40, "host_kv_memory": "64MiB", "max_length": 4000}
    if not tiny:
        room = {"kv_blocks": 700, "host_kv_memory": "24GiB", "max_length": 140_000}
    with clocked(shape, device, found, "8B, KV on the host", beyond_trained=True, **room) as engine:
        found["8B, prompt of 128K, s"] = engine.first_token(engine.prompt(context))
        found["8B, KV of 128K streamed, ms a step"] = 1e3 * engine.decode(1, context, 12)
        others = [engine.prompt(prefix) for _ in range(3)]
        for one in others:
            engine.first_token(one)
        found["8B, prefix of 32K from host memory, s"] = engine.first_token(others[0])


PARTS = {"r": resident, "s": small, "w": streamed, "k": far_kv}


def measure(tiny: bool, only: str) -> dict[str, float]:
    """Return what was measured. only: the letters of parts, in order."""
    found: dict[str, float] = {}
    for letter in only:
        PARTS[letter](tiny, found)
    found["host memory at most, MiB"] = peak_of_host()
    return found


def peak_of_host() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    return 0.0


# ---- both


def compare(before: Path, after: Path, rounds: int, more: list[str]) -> dict[str, list[dict[str, float]]]:
    trees = {"before": before, "after": after}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
    for number in range(rounds):
        for name in list(trees)[:: 1 if number % 2 == 0 else -1]:
            environment = os.environ | {
                "PYTHONPATH": f"{trees[name] / 'src'}:{os.environ.get('PYTHONPATH', '')}"
            }
            ran = subprocess.run(
                [sys.executable, __file__, "--one", *more],
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            if ran.returncode:
                sys.exit(f"{name} failed:\n{ran.stderr[-3000:]}")
            runs[name].append(json.loads(ran.stdout.splitlines()[-1]))
            print(name, json.dumps(runs[name][-1]), flush=True)
    return runs


def table(runs: dict[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    rows = []
    for what in runs["before"][0]:
        old, new = ([run[what] for run in runs[name]] for name in ("before", "after"))
        ratio = statistics.median(new) / statistics.median(old)
        rows.append({"what": what, "before": old, "after": new, "ratio": ratio})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, help="a checkout of the earlier version")
    parser.add_argument("--after", type=Path, default=HERE)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", default="rswk", help="parts: resident, small, weights and KV that stream")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.tiny, args.only)))
        return
    more = ["--only", args.only, *(["--tiny"] if args.tiny else [])]
    runs = compare(args.before, args.after, args.rounds, more)
    rows = table(runs)
    for row in rows:
        old, new = (f"{statistics.median(row[name]):.4g}" for name in ("before", "after"))
        print(f"{row['what']:46} {old:>10} {new:>10} {row['ratio']:8.4f}")
    if args.out:
        sys.path[:0] = [str(HERE / "tests"), str(HERE / "src")]
        from recording import environment

        args.out.write_text(
            json.dumps({"rounds": args.rounds, "rows": rows, "environment": environment()}) + "\n"
        )


if __name__ == "__main__":
    main()
