"""Measure decode steps beside busy processes: with a fixed number of threads, and with threads that are
chosen by the cores that are free.

    PYTHONPATH=src python3 benchmarks/busy_machine.py --out cpu_busy_machine.json
    PYTHONPATH=src python3 benchmarks/busy_machine.py --models shipped --before ../before/src

A busy process is a loop in Python, at the same priority. Each setting has a process of its own with the
model loaded; they take turns, one at a time, with the same busy processes beside them. Rates are tokens
over seconds of a second and a half of steps, after a second that is not counted: the median of the
rounds, the least and the most. `of_best` is the rate of `auto` over that of the best fixed number of
threads beside as many processes; `before` is what the sources in --before do by themselves.
"""

import argparse
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

from recording import Recording

SETTLE, SECONDS, CONTEXT, LONGEST = 1.0, 1.5, 64, 448
MODELS = ("shipped", "100M", "100M-int4")


def serve(name: str, threads: str) -> None:
    """Load a model, and time decode steps for each line on stdin."""
    from penstock.arch.formats.recipe import config_in
    from penstock.base.config import CACHE, SHIPPED_MODEL, Config
    from penstock.bench.shapes import SHAPES
    from penstock.bench.speed import measure
    from penstock.engine.boot import boot
    from penstock.weights.checkpoint.reader import Checkpoint
    from penstock.weights.checkpoint.shape import Shape

    shape = dict(SHAPES["100M"])
    model: Checkpoint | Shape = (
        Checkpoint.open(SHIPPED_MODEL, CACHE.expanduser())
        if name == "shipped"
        else Shape.of(config_in("int4", shape, name) if name.endswith("int4") else shape, name)
    )
    if threads.isdigit():
        import torch

        torch.set_num_threads(int(threads))
    fixed = {"threads": int(threads)} if threads.isdigit() else {}
    config = Config(device="cpu", max_sequences=1, max_length=LONGEST + CONTEXT, prefix_cache=False, **fixed)
    booted = boot(config, model)
    rng, work = random.Random(0), measure.BatchWork(1, CONTEXT, 1, 1)
    print(booted.dtype, flush=True)
    for _ in sys.stdin:
        begin, count, spent = time.perf_counter(), 0, 0.0
        while spent < SECONDS:
            [request] = measure.submit(booted.engine, work, booted.spec.vocab_size, rng, LONGEST - CONTEXT)
            got = {request: 0}
            while booted.engine.busy and spent < SECONDS:
                before, tokens = time.perf_counter(), got[request]
                measure.step(booted.engine, got)
                if tokens and before > begin + SETTLE:
                    spent, count = spent + time.perf_counter() - before, count + got[request] - tokens
            booted.engine.stop(request)
            while booted.engine.busy:
                booted.engine.step()
        print(count / spent, flush=True)


@contextmanager
def child(name: str, threads: str, sources: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a process with the model loaded."""
    given = dict(os.environ, PYTHONPATH=str(sources))
    given.pop("OMP_NUM_THREADS", None)
    command = [sys.executable, __file__, "--serve", name, threads]
    with subprocess.Popen(
        command, env=given, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as there:
        try:
            if not said(there):
                sys.exit(f"{' '.join(command)} ended without a word")
            yield there
        finally:
            there.kill()


def said(there: subprocess.Popen[str]) -> str:
    """Return the next line of a process."""
    assert there.stdout is not None
    return there.stdout.readline().strip()


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep so many processes busy."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(0.3)
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def measure_model(
    name: str, settings: dict[str, Path], loads: Sequence[int], rounds: int
) -> dict[str, object]:
    """Return the rates of each setting beside so many busy processes."""
    found: dict[str, object] = {}
    with ExitStack() as opened:
        children = {
            setting: opened.enter_context(child(name, setting, sources))
            for setting, sources in settings.items()
        }
        for load in loads:
            rates: dict[str, list[float]] = {setting: [] for setting in children}
            with busy(load):
                for _ in range(rounds):
                    for setting, there in children.items():
                        assert there.stdin is not None
                        there.stdin.write("\n")
                        there.stdin.flush()
                        rates[setting].append(float(said(there)))
            medians = {setting: median(some) for setting, some in rates.items()}
            best = max(rate for setting, rate in medians.items() if setting.isdigit())
            found[f"{load} busy"] = {
                "tokens_per_second": {
                    setting: {"median": medians[setting], "least": min(some), "most": max(some)}
                    for setting, some in rates.items()
                },
                "of_best": medians["auto"] / best,
                "of_before": medians["auto"] / medians["before"] if "before" in medians else None,
            }
            line = ", ".join(f"{setting} {rate:.1f}" for setting, rate in medians.items())
            print(
                f"{name}, {load} busy: {line} tokens/s; auto {medians['auto'] / best:.2f} of the best fixed"
            )
    return found


def main() -> None:
    """Measure each model, and write what was found."""
    if sys.argv[1:2] == ["--serve"]:
        serve(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--loads", default="0,1,2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--before", type=Path, help="the src directory of other sources")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if unknown := set(given.models.split(",")) - {*MODELS}:
        parser.error(f"no models {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
    own = Path(__file__).resolve().parent.parent / "src"
    cores = len(os.sched_getaffinity(0))
    settings = {str(count): own for count in sorted({1, cores})} | {"auto": own}
    if given.before is not None:
        settings["before"] = given.before
    recording = Recording(given.out, rounds=given.rounds, seconds=SECONDS, context=CONTEXT)
    for name in given.models.split(","):
        loads = [int(load) for load in given.loads.split(",")]
        recording.part(name, measure_model(name, settings, loads, given.rounds))


if __name__ == "__main__":
    main()
