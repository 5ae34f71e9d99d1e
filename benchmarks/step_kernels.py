"""Show which kernels a decode step runs on a GPU, what each adds to it, and those of a layer in order.

    PYTHONPATH=src python3 benchmarks/step_kernels.py decode --shape 8B --format int4 --output 40
    PYTHONPATH=src python3 benchmarks/step_kernels.py decode --shape gpt-oss-20b --out step_kernels.json

Arguments are those of `penstock bench decode`, which runs as usual; a few steps behind its timed ones are
recorded by torch's profiler. Where launches begin early, a kernel's own time has what it waits in it. What it
adds to the step is from the end of all before it to its own, so these sum up to the step.
"""

import argparse
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from recording import need_commit, write
from torch.profiler import ProfilerActivity, profile

from penstock.bench.speed import measure
from penstock.bench.speed.measure import Steady
from penstock.cli.main import main as penstock
from penstock.engine.boot import Booted
from penstock.step.plan import RequestId

STEPS = 6
"""Steps that are recorded; the one in the middle is shown."""
LAST = "_settle"
"""Begins the name of the kernel with which a step ends: it draws the tokens."""
SHOWN = 24
"""Kernels that are shown in order, from the middle of the step on."""


@dataclass(frozen=True, slots=True)
class Ran:
    """Holds a kernel's name, and its begin and end in microseconds."""

    name: str
    begin: float
    end: float


def recorded(booted: Booted, got: dict[RequestId, int]) -> list[Ran]:
    """Return what ran on the device in STEPS more steps, in order."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(STEPS):
            measure.step(booted.engine, got)
        torch.cuda.synchronize()
    events = [one for one in seen.profiler.kineto_results.events() if "CUDA" in str(one.device_type())]
    ran = [
        Ran(one.name()[:60], one.start_ns() / 1e3, (one.start_ns() + one.duration_ns()) / 1e3)
        for one in events
    ]
    return sorted(ran, key=lambda one: one.begin)


def one_step(ran: list[Ran]) -> list[Ran]:
    """Return those of the step in the middle. Ends the program where steps cannot be told apart."""
    ends = [at for at, one in enumerate(ran) if one.name.startswith(LAST)]
    if len(ends) < STEPS:
        sys.exit(f"{len(ends)} kernels {LAST} in {STEPS} steps: this step cannot be shown")
    return ran[ends[STEPS // 2 - 1] + 1 : ends[STEPS // 2] + 1]


def table(step: list[Ran]) -> dict[str, Any]:
    """Return what each kind of kernel adds to a step, and some in order, in microseconds."""
    adds, counts = defaultdict[str, float](float), defaultdict[str, int](int)
    order, done = list[dict[str, Any]](), step[0].begin
    for one in step:
        more, done = max(one.end - done, 0.0), max(one.end, done)
        adds[one.name] += more
        counts[one.name] += 1
        order.append({"kernel": one.name, "begin": one.begin - step[0].begin, "adds": more})
    kinds = sorted(adds, key=lambda name: -adds[name])
    return {
        "step_us": done - step[0].begin,
        "kernels": {name: {"count": counts[name], "adds_us": adds[name]} for name in kinds},
        "in order": order[len(order) // 2 :][:SHOWN],
    }


def main() -> None:
    """Run the benchmark with the steps behind it recorded."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--out", type=Path)
    given, rest = parser.parse_known_args()
    need_commit(given.out)
    timed, found = measure.time_decode, list[dict[str, Any]]()

    def and_recorded(booted: Booted, got: dict[RequestId, int], steps: int) -> Steady:
        steady = timed(booted, got, steps - STEPS)
        found.append(table(one_step(recorded(booted, got))))
        return steady

    measure.time_decode = and_recorded
    code = penstock(["bench", *rest, "--repeat", "1"])
    for one in found:
        print(f"step {one['step_us']:.1f} us")
        for name, kind in one["kernels"].items():
            print(f"  {name:<60} {kind['count']:4d} add {kind['adds_us']:8.1f} us")
        for each in one["in order"]:
            print(f"  {each['begin']:9.1f} {each['adds']:7.2f} {each['kernel']}")
        if given.out:
            write(given.out, {"bench": "step kernels", "arguments": rest, **one})
    sys.exit(code)


if __name__ == "__main__":
    main()
