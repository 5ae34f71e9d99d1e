"""Measure what a start takes to know its weights by every byte: hashed the first time, remembered afterwards.

    python benchmarks/identity.py --out identity.json              8B shape, random weights, 16 GB in --folder
    python benchmarks/identity.py --model DIR --out identity.json           a checkpoint that is there
    python benchmarks/identity.py --tiny --device cpu                       the same course on a small shape

`digests`: bytes, seconds, CPU seconds and GB/s of hashing all weight files, from the disk (the page cache was
told to forget them) and from the page cache; of a second time, when they are remembered; and of only reading
the files, by as many threads.

`starts`, each a process of its own, imports not counted: `plain` keeps KV in host memory only and needs no
identity; `first` keeps KV on disk too and remembers nothing; `again` is the next one. `identity_seconds` is
what the starting thread spent on it or waited for it, without what other threads hashed meanwhile;
`ready_seconds` is until the engine can be asked, `token_seconds` until the first token.
"""

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from random_checkpoint import write_checkpoint

from penstock import LLM, SamplingParams
from penstock.bench.machine import machine
from penstock.bench.shapes import SHAPES
from penstock.memory.disk import REQUEST_BYTES, DiskFile
from penstock.weights.checkpoint.identity import MEMORY, RECENT_NS, hashers
from penstock.weights.checkpoint.reader import Checkpoint

TINY = {
    "model_type": "llama",
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
STARTS = ("plain", "first", "again")
Found = dict[str, Any]


def weight_files(model: Path) -> list[Path]:
    return sorted(model.glob("*.safetensors"))


def forget(model: Path) -> None:
    """Let the page cache go of the weights."""
    for path in weight_files(model):
        with DiskFile(path) as file:
            file.settle()  # Only what is on the disk can go.
            file.forget()


def read_all(model: Path) -> None:
    """Every byte of the weights, by as many threads as hash."""
    own = threading.local()

    def piece(file: DiskFile, at: int) -> None:
        if not hasattr(own, "buffer"):
            own.buffer = memoryview(bytearray(REQUEST_BYTES))
        file.read_into(own.buffer[: min(REQUEST_BYTES, file.size - at)], at)

    with ExitStack() as opened, ThreadPoolExecutor(hashers()) as pool:
        files = [opened.enter_context(DiskFile(path)) for path in weight_files(model)]
        tasks = [pool.submit(piece, file, at) for file in files for at in range(0, file.size, REQUEST_BYTES)]
        for task in tasks:
            task.result()


def timed(work: Callable[[], object], size: int) -> Found:
    began, spent = time.perf_counter(), time.process_time()
    work()
    seconds = time.perf_counter() - began
    return {
        "seconds": seconds,
        "cpu_seconds": time.process_time() - spent,
        "gb_per_second": size / seconds / 1e9,
    }


def part_digests(model: Path, cache: Path) -> Found:
    """Hashing alone, and reading alone."""
    size = sum(path.stat().st_size for path in weight_files(model))
    found: Found = {"bytes": size, "files": len(weight_files(model)), "threads": hashers()}

    def identity() -> None:
        with Checkpoint.open(model, cache) as checkpoint:
            checkpoint.fingerprint()

    for place in ("disk", "page cache"):
        for what, work in (("read", lambda: read_all(model)), ("hash", identity)):
            if place == "disk":
                forget(model)
            (cache / MEMORY).unlink(missing_ok=True)
            found[f"{what} from {place}"] = timed(work, size)
    found["remembered"] = timed(identity, size)
    with Checkpoint.open(model, cache) as checkpoint:
        found["remembered"]["hashed_bytes"] = checkpoint.digests().hashed_bytes
    return found


def start(kind: str, args: argparse.Namespace, folder: Path) -> Found:
    """One start, in this process."""
    spent = 0.0

    def counted(name: str) -> None:
        real = getattr(Checkpoint, name)

        def call(self: Checkpoint) -> object:
            nonlocal spent
            began = time.perf_counter()
            try:
                return real(self)
            finally:
                spent += time.perf_counter() - began

        setattr(Checkpoint, name, call)

    for name in ("identify", "digests", "expect_unchanged"):  # fingerprint is hardly more than digests.
        counted(name)
    device_kv: dict[str, Any] = {
        "host_kv_memory": "8MiB" if args.tiny else "4GiB",
        "kv_directory": folder / "kv",
        "cache": folder / "cache",
    }
    if kind != "plain":
        device_kv["disk_kv_memory"] = "32MiB" if args.tiny else "8GiB"
    began, cpu = time.perf_counter(), time.process_time()
    with LLM(args.model, device=args.device, max_length=256 if args.tiny else 8192, **device_kv) as llm:
        ready = time.perf_counter() - began
        llm.generate([[1, 2, 3, 4]], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
        token = time.perf_counter() - began
    return {
        "identity_seconds": spent,
        "ready_seconds": ready,
        "token_seconds": token,
        "cpu_seconds": time.process_time() - cpu,
    }


def part_starts(args: argparse.Namespace, folder: Path) -> Found:
    """Each kind of start, from the disk and from the page cache, each `repeat` times; the median of each
    figure, and all of them."""
    found: Found = {}
    for place in ("disk", "page cache"):
        runs: dict[str, list[Found]] = {kind: [] for kind in STARTS}
        for _ in range(args.repeat):
            for kind in STARTS:
                if kind != "again":
                    (folder / "cache" / MEMORY).unlink(missing_ok=True)
                if place == "disk":
                    forget(args.model)
                command = [
                    sys.executable,
                    __file__,
                    "--start",
                    kind,
                    "--model",
                    str(args.model),
                    "--folder",
                    str(folder),
                ]
                command += ["--device", args.device, *(["--tiny"] if args.tiny else [])]
                result = subprocess.run(command, capture_output=True, text=True, check=False)
                if result.returncode:
                    sys.exit(f"a start ({kind}) failed: {result.stderr[-2000:]}")
                runs[kind].append(json.loads(result.stdout.splitlines()[-1]))
        for kind, each in runs.items():
            medians = {name: statistics.median(run[name] for run in each) for name in each[0]}
            found[f"{kind} from {place}"] = medians | {"runs": each}
            print(
                f"{kind} from {place}: "
                + ", ".join(f"{name} {value:.3f}" for name, value in medians.items()),
                flush=True,
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path)
    parser.add_argument(
        "--folder",
        type=Path,
        help="where the random checkpoint, KV and digests are written; a temporary one if not given",
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--start", choices=STARTS, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.start:
        print(json.dumps(start(args.start, args, args.folder)))
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        if args.model is None:
            args.model = folder / "model"
            write_checkpoint(args.model, TINY if args.tiny else SHAPES["8B"])
            time.sleep(RECENT_NS / 1e9)  # What was written a moment before is not remembered.
        found: Found = {"environment": dataclasses.asdict(machine()), "model": args.model.name}
        found["digests"] = part_digests(args.model, folder / "cache")
        for name, value in found["digests"].items():
            print(f"{name}: {value}", flush=True)
        found["starts"] = part_starts(args, folder)
        starts, read = found["starts"], found["digests"]["read from disk"]["seconds"]
        found["first token over reading, from disk"] = {
            kind: starts[f"{kind} from disk"]["token_seconds"] / read for kind in STARTS
        }
        found["remembered costs a start, seconds"] = starts["again from page cache"]["identity_seconds"]
        print(
            json.dumps(
                {
                    key: value
                    for key, value in found.items()
                    if key not in ("digests", "starts", "environment")
                }
            )
        )
        if args.out:
            args.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
