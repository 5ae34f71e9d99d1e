"""Measure the engine where everything fits, beside what the machine allows in the same run: decode, prompts,
many requests, start, idle time.

    PYTHONPATH=src python3 benchmarks/execution.py --out execution.json
    PYTHONPATH=src python3 benchmarks/execution.py --parts decode,idle --graphs off
    PYTHONPATH=src python3 benchmarks/execution.py --tiny --device cpu      the same code over tiny shapes

Parts: equal (graphs on and off, greedy tokens of random weights), decode, prefill, serve, start, checkpoint,
idle, gaps, kernels. `idle` traces steady decode steps and gives the share of them in which no kernel runs,
`gaps` the same of passes that stream; `kernels` says which kernels take the time of a step; `checkpoint`
starts from one that is written for it into --directory, past the page cache, beside the rate at which its
files can be read. Random weights in real shapes, bfloat16.
"""

import argparse
import dataclasses
import json
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from random_checkpoint import write_checkpoint
from recording import Recording
from torch.profiler import ProfilerActivity, profile, record_function

from penstock.arch.layout import group_layouts
from penstock.base.config import Config
from penstock.bench.shapes import SHAPES
from penstock.bench.speed import measure
from penstock.bench.speed.latency import BenchKind, LatencyBench, run
from penstock.bench.speed.setup import Target
from penstock.bench.speed.throughput import RandomLengths, ThroughputBench, serve
from penstock.engine.boot import Booted, boot
from penstock.memory.device import give_back
from penstock.memory.probe import disk_read
from penstock.step.plan import RequestId
from penstock.weights.checkpoint.reader import Checkpoint
from penstock.weights.checkpoint.shape import Shape

TINY = SHAPES["100M"] | {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 256,
    "head_dim": 16,
}
Found = dict[str, object]


@dataclasses.dataclass(frozen=True)
class Place:
    device: str
    tiny: bool
    graphs: bool
    directory: Path | None = None

    def shape(self, name: str) -> Mapping[str, object]:
        return TINY if self.tiny else SHAPES[name]

    def config(self, **more: object) -> Config:
        return Config(Path(), device=self.device, graphs=self.graphs, **more)  # type: ignore[arg-type]


def row(what: str, text: str) -> None:
    print(f"  {what:<44} {text}", flush=True)


def part_equal(place: Place) -> Found:
    """Greedy tokens with graphs and without, and with steps that wait for each other."""
    said = []
    for graphs in (True, False):
        config = dataclasses.replace(
            place.config(max_length=512, max_sequences=8, dtype="float32"), graphs=graphs
        )
        booted = boot(config, Shape.of(place.shape("0.6B") | {"num_hidden_layers": 4}))
        with closing(booted.engine):
            rng = random.Random(0)
            prompts = [[rng.randrange(200) for _ in range(length)] for length in (1, 7, 40, 100, 33, 5)]
            said.append(answers(booted, prompts, 60))
        give_back(booted.device)
    row(
        "greedy tokens, graphs and none",
        f"{sum(a == b for a, b in zip(*said, strict=True))} of {len(said[0])} alike",
    )
    return {"alike": said[0] == said[1], "requests": len(said[0])}


def answers(booted: Booted, prompts: list[list[int]], output: int) -> list[list[int]]:
    engine = booted.engine
    got = {engine.submit(prompt, measure.sampling(), output): list[int]() for prompt in prompts}
    while engine.busy:
        for event in engine.step():
            if event.token is not None:
                got[event.request].append(event.token)
    return list(got.values())


def part_decode(place: Place) -> Found:
    found: Found = {}
    for name, batch, target in (
        ("8B", 1, 4.35),
        ("8B", 64, 9.1),
        ("0.6B", 1, 1.0),
        ("8B", 16, None),
        ("0.6B", 64, None),
    ):
        context, output = (20, 8) if place.tiny else (2048, 64)
        report = run(
            LatencyBench(
                BenchKind.DECODE,
                Target(name, place.shape(name), place.config()),
                2 if place.tiny else batch,
                context,
                output,
                1 if place.tiny else 2,
            )
        )
        found[f"{name}, batch {batch}"] = json.loads(report.line())
        aim = f", target {target} ms" if target else ""
        row(
            f"decode, {name}, batch {batch}, {context:,} of context",
            f"{report.ms}; {report.of_bound:.1%} of the bound{aim}",
        )
    return found


def part_prefill(place: Place) -> Found:
    context = 40 if place.tiny else 16384
    target = Target("8B", place.shape("8B"), place.config())
    report = run(LatencyBench(BenchKind.PREFILL, target, 1, context, 1, 1 if place.tiny else 3))
    row(
        f"prompt of {context:,} tokens, 8B", f"{report.ms}; {report.of_bound:.1%} of the bound, target 475 ms"
    )
    return {"8B": json.loads(report.line())}


def part_serve(place: Place) -> Found:
    found: Found = {}
    for temperature in (0.0, 0.6):
        span, requests = ((5, 20), 6) if place.tiny else ((100, 1024), 256)
        target = Target("0.6B", place.shape("0.6B"), place.config())
        lengths = RandomLengths(requests, span, span)
        report = serve(ThroughputBench(target, lengths, temperature, repeat=1 if place.tiny else 2))
        found[f"temperature {temperature}"] = json.loads(report.line())
        rate = (
            f"{report.output_tokens_per_second:,.0f} output tokens/s, {report.of_bound:.1%} of the bound, "
            "target 25,000"
        )
        row(
            f"{requests} requests, 0.6B, temperature {temperature}", f"{report.ms.median / 1e3:.3g} s, {rate}"
        )
    return found


def part_start(place: Place) -> Found:
    said: list[str] = []
    begin = time.perf_counter()
    booted = boot(place.config(max_length=4096), Shape.of(place.shape("8B")), say=said.append)
    seconds = time.perf_counter() - begin
    one_token(booted)
    first = time.perf_counter() - begin
    give_back(booted.device)
    row("start, 8B, random weights", f"{seconds:.2f} s, first token after {first:.2f} s, target 10 s")
    for line in said:
        print(f"    {line}")
    return {"boot_s": seconds, "first_token_s": first, "said": said}


def one_token(booted: Booted) -> None:
    """The first, and the engine's end."""
    with closing(booted.engine):
        booted.engine.submit([1, 2, 3], measure.sampling(), 1)
        while booted.engine.busy:
            booted.engine.step()


def part_checkpoint(place: Place) -> Found:
    """Opening the files to the first token, and how long the disk needs for their bytes at the rate probed
    before and after."""
    with tempfile.TemporaryDirectory(dir=place.directory) as folder:
        model = Path(folder, "model")
        write_checkpoint(model, place.shape("8B"))
        files = sorted(model.glob("*.safetensors"))
        size, rates, said = sum(file.stat().st_size for file in files), [], list[str]()
        os.sync()
        forget(files)
        rates.append(disk_read(model).read)
        forget(files)
        begin = time.perf_counter()
        with closing(Checkpoint.open(model)) as checkpoint:
            booted = boot(place.config(max_length=4096), checkpoint, say=said.append)
            seconds = time.perf_counter() - begin
            one_token(booted)
            first = time.perf_counter() - begin
        give_back(booted.device)
        forget(files)
        rates.append(disk_read(model).read)
    least = size / (sum(rates) / 2)
    row(
        "start, 8B, from files",
        f"{seconds:.2f} s, first token after {first:.2f} s, {first / least:.2f} times {least:.2f} s of "
        "reading",
    )
    for line in said:
        print(f"    {line}")
    return {
        "boot_s": seconds,
        "first_token_s": first,
        "bytes": size,
        "disk_bytes_per_s": rates,
        "reading_s": least,
        "said": said,
    }


def forget(files: Sequence[Path]) -> None:
    """Have the page cache forget them."""
    for file in files:
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def part_idle(place: Place) -> Found:
    found: Found = {}
    for name, batch in (("8B", 1), ("0.6B", 1), ("0.6B", 64)):
        booted = boot(
            place.config(max_length=2048, max_sequences=batch, prefix_cache=False),
            Shape.of(place.shape(name)),
        )
        with closing(booted.engine):
            rng, steps = random.Random(0), 6 if place.tiny else 40
            for _ in range(batch):
                booted.engine.submit([rng.randrange(200) for _ in range(64)], measure.sampling(), 4 * steps)
            for _ in range(steps):
                booted.engine.step()
            found[f"{name}, batch {batch}"] = one = traced(booted.engine.step, steps, booted.device)
        give_back(booted.device)
        row(
            f"idle share of decode, {name}, batch {batch}",
            f"{one['idle']:.1%} of {one['wall_s'] * 1e3:.1f} ms, {steps} steps, target 5%",
        )
    return found


def part_gaps(place: Place) -> Found:
    """Of passes whose weights stream, the share in which nothing is copied and nothing computed, and that in
    which nothing is copied."""
    steps, shape = 6, Shape.of(place.shape("70B-slice"))
    size = sum(layout.size for layout in group_layouts(shape.spec, shape.names, "bfloat16"))
    limit = None if place.tiny else int(0.6 * size)
    config, told = place.config(device_memory=limit, max_length=512, max_sequences=1), list[str]()
    with closing(boot(config, shape, say=told.append).engine) as engine:
        engine.submit([1, 2, 3], measure.sampling(), 4 * steps)
        for _ in range(steps):
            engine.step()
        one = traced(engine.step, steps, torch.device(place.device))
    said = (
        f"{one['idle']:.2%} of {one['wall_s'] / steps * 1e3:.1f} ms, target 1%; without copies "
        f"{one['uncopied']:.2%}"
    )
    said += f"; the longest {one['longest_ms']:.2f} ms, at {one['longest_at']:.0%}"
    row("gaps in passes that stream, 70B-shaped layers", said)
    for line in told:
        print(f"    {line}")
    give_back(torch.device(place.device))
    return {"70B-slice, batch 1": {**one, "said": told}}


def traced(step: Callable[[], object], steps: int, device: torch.device) -> dict[str, float]:
    """Share of the time between the first kernel's start and the last one's end in which none runs, and in
    which none copies; how long the longest while without any is, and after what share of the time it begins.
    Behind one step more, in which the profiler begins: where a process has traced before, it holds up what is
    launched for tens of milliseconds."""
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    with profile(activities=kinds) as trace:
        step()
        wait()
        with record_function("steps"):
            begin = time.perf_counter()
            for _ in range(steps):
                step()
            wait()
            wall = time.perf_counter() - begin
    kind, every = (
        torch.autograd.DeviceType.CUDA if device.type == "cuda" else torch.autograd.DeviceType.CPU,
        trace.events() or (),
    )
    since = next(event.time_range.start for event in every if event.name == "steps")
    events = [
        event
        for event in every
        if event.device_type == kind and event.name != "steps" and event.time_range.start >= since
    ]
    spans = [(event.time_range.start, event.time_range.end) for event in events]
    begin, busy, whiles = min(start for start, _ in spans), covered(spans), [*uncovered(spans)]
    length, longest = (
        max(end for _, end in spans) - begin,
        max(whiles, key=lambda one: one[1] - one[0], default=(begin, begin)),
    )
    copied = covered([span for event, span in zip(events, spans, strict=True) if "HtoD" in event.name])
    shares = {
        "idle": 1 - busy / length,
        "uncopied": 1 - copied / length,
        "longest_at": (longest[0] - begin) / length,
    }
    shares["longest_ms"] = (longest[1] - longest[0]) / 1e3
    return {**shares, "busy_s": busy / 1e6, "span_s": length / 1e6, "wall_s": wall, "events": len(spans)}


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Length of what they cover."""
    if not spans:
        return 0.0
    length = max(end for _, end in spans) - min(start for start, _ in spans)
    return length - sum(end - start for start, end in uncovered(spans))


def uncovered(spans: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """What lies between them, in its order."""
    until = math.inf
    for start, end in sorted(spans):
        if start > until:
            yield until, start
        until = end if math.isinf(until) else max(until, end)


def part_kernels(place: Place) -> Found:
    """Which kernels take the time of a decode step, and of a step of a long prompt."""
    found: Found = {}
    for name, batch, context in (("8B", 1, 2048), ("8B", 64, 2048), ("0.6B", 1, 2048), ("0.6B", 256, 512)):
        batch, context, steps = (min(batch, 2), 40, 4) if place.tiny else (batch, context, 24)
        with ready(place, name, batch, context + 8 * steps + batch) as booted:
            engine = booted.engine
            got = submitted(booted, batch, context, 6 * steps)
            while not all(got.values()):
                measure.step(engine, got)
            waits = measure.time_decode(booted, got, 2 * steps).seconds
            taken = by_kernel(
                lambda engine=engine, steps=steps: [engine.step() for _ in range(steps)], steps, booted.device
            )
        told = found[f"{name}, batch {batch}, {context:,}"] = {"ms": median(waits) * 1e3, **taken}
        tell_kernels(f"{name}, batch {batch}, {context:,}", told)
    context = 40 if place.tiny else 16384
    with ready(place, "8B", 1, context + 8) as booted:
        engine = booted.engine

        def prompt() -> None:
            submitted(booted, 1, context, 1)
            while engine.busy:
                engine.step()

        prompt()
        steps, begin = -(-context // booted.limits.max_step_tokens), time.perf_counter()
        prompt()
        told = {"ms": (time.perf_counter() - begin) / steps * 1e3, **by_kernel(prompt, steps, booted.device)}
    found[f"8B, prompt, {context:,}"] = told
    tell_kernels(f"8B, prompt, {context:,}", told)
    return found


@contextmanager
def ready(place: Place, name: str, rows: int, length: int) -> Iterator[Booted]:
    booted = boot(
        place.config(max_length=length, max_sequences=rows, prefix_cache=False), Shape.of(place.shape(name))
    )
    with closing(booted.engine):
        yield booted
    give_back(booted.device)


def submitted(booted: Booted, rows: int, context: int, output: int) -> dict[RequestId, int]:
    """So many random prompts; of each, how many tokens it has yielded."""
    rng = random.Random(0)
    prompts = [[rng.randrange(200) for _ in range(context)] for _ in range(rows)]
    return {booted.engine.submit(prompt, measure.sampling(), output): 0 for prompt in prompts}


def by_kernel(work: Callable[[], object], steps: int, device: torch.device) -> dict[str, Any]:
    """What each kernel takes in one of the steps that `work` consists of, in microseconds, the longest
    first."""
    kind, activity = torch.autograd.DeviceType.CPU, ProfilerActivity.CPU
    if device.type == "cuda":
        kind, activity = torch.autograd.DeviceType.CUDA, ProfilerActivity.CUDA
    with profile(activities=[activity]) as trace:
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        wall = time.perf_counter() - begin
    sums: dict[str, list[float]] = {}
    for event in trace.events() or ():
        if event.device_type == kind:
            sums.setdefault(event.name, []).append(event.time_range.end - event.time_range.start)
    table = sorted(
        ((sum(times) / steps, len(times) / steps, what[:60]) for what, times in sums.items()), reverse=True
    )
    kernels = [{"us": micros, "times": times, "name": what} for micros, times, what in table]
    return {
        "traced_ms": wall / steps * 1e3,
        "kernels_ms": sum(one[0] for one in table) / 1e3,
        "kernels": kernels[:16],
    }


def tell_kernels(what: str, told: dict[str, Any]) -> None:
    row(
        what,
        f"{told['ms']:.3g} ms a step, traced {told['traced_ms']:.3g} ms, kernels {told['kernels_ms']:.3g} ms",
    )
    for one in told["kernels"]:
        print(f"      {one['us']:9.1f} us {one['times']:7.1f} times  {one['name']}", flush=True)


PARTS: dict[str, Callable[[Place], Found]] = {
    "equal": part_equal,
    "decode": part_decode,
    "prefill": part_prefill,
    "serve": part_serve,
    "start": part_start,
    "checkpoint": part_checkpoint,
    "idle": part_idle,
    "gaps": part_gaps,
    "kernels": part_kernels,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="which, in this order")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--graphs", choices=("on", "off"), default="on")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument(
        "--directory", type=Path, help="where a checkpoint is written; by default where temporary files are"
    )
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    place = Place(given.device, given.tiny, given.graphs == "on", given.directory)
    recording = Recording(given.out, bench="execution", tiny=given.tiny, graphs=place.graphs)
    failed = 0
    for name in given.parts.split(","):
        print(name, flush=True)
        try:
            found = PARTS[name](place)
        except Exception as fault:
            found, failed = {"failed": repr(fault)}, failed + 1
            row("failed", repr(fault))
        give_back(torch.device(given.device))
        recording.part(name, found)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
