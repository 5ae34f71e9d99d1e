"""Compare a model on two devices with the same on one, in the same run: tokens, decode steps, streamed
layers, and the time of an all-reduce.

    PYTHONPATH=src python3 benchmarks/tensor_parallel.py --out tensor_parallel.json
    PYTHONPATH=src python3 benchmarks/tensor_parallel.py --tiny --device cpu    on processes of a CPU

Parts: ceilings, equal, sums, decode, formats, stream, kv; one that is named twice is measured twice. Random
weights in real shapes, bfloat16 or few bits, but for `equal`, which is float32.
"""

import argparse
import dataclasses
import importlib
import json
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from threading import Barrier
from typing import TypedDict

import torch
from execution import row
from recording import Recording
from torch import Tensor

from penstock import LLM, SamplingParams
from penstock.arch.formats.recipe import config_in
from penstock.base.config import Config
from penstock.bench.shapes import SHAPES
from penstock.bench.speed import measure
from penstock.bench.speed.latency import BenchKind, LatencyBench, run
from penstock.bench.speed.setup import Target, opened
from penstock.bench.times import Timings
from penstock.memory.device import give_back
from penstock.memory.probe import link_rates, memory_read
from penstock.ops.kernels import pdl_launches
from penstock.ops.norm import add_rms_norm
from penstock.parallel.group import Group
from penstock.parallel.launch import launch
from penstock.parallel.seat import Seat
from penstock.weights.checkpoint.shape import Shape
from penstock.worker.collectives import RankCollectives

TINY = SHAPES["100M"] | {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 256,
    "head_dim": 16,
}
TINY_MIXTURE = SHAPES["gpt-oss-20b"] | {
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 8,
    "vocab_size": 256,
}
Found = dict[str, object]


class Rates(TypedDict):
    """Holds bytes a second."""

    median: float
    all: list[float]


@dataclass(frozen=True, slots=True)
class Place:
    device: str
    tiny: bool
    ranks: int

    def config(self, ranks: int, **more: object) -> Config:
        return Config(Path(), device=self.device, tensor_parallel=ranks, **({"host_kv_memory": 0} | more))  # type: ignore[arg-type]

    def devices(self) -> list[torch.device]:
        return [torch.device("cuda", rank) for rank in range(self.ranks)]

    def shape(self, name: str, **more: object) -> Mapping[str, object]:
        return TINY if self.tiny else SHAPES[name] | more


def part_equal(place: Place) -> Found:
    """Greedy tokens of the model that comes with the package, on one rank and on several, with graphs and
    without. Random weights would be others on each rank."""
    texts = (
        "Once upon a time",
        "The little fox",
        "One rainy morning",
        "A",
        "The sun was shining and all the animals " * 12,
    )
    said = {}
    for ranks in (1, place.ranks):
        for graphs in (True, False):
            config = place.config(ranks, max_length=1024, max_sequences=8, dtype="float32", graphs=graphs)
            settings = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)} | {
                "model": None
            }
            with LLM(**settings) as llm:
                params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
                said[ranks, graphs] = [one.tokens for one in llm.generate(texts, params)]
    one = said[1, True]
    for (ranks, graphs), tokens in said.items():
        alike = sum(a == b for a, b in zip(one, tokens, strict=True))
        row(
            f"greedy tokens, {ranks} ranks, graphs {'on' if graphs else 'off'}",
            f"{alike} of {len(texts)} as on one",
        )
    return {f"{ranks} ranks, graphs {graphs}": tokens == one for (ranks, graphs), tokens in said.items()}


OFTEN = 100


def often(work: Callable[[], object]) -> None:
    for _ in range(OFTEN):
        work()


def sum_often(group: Group, shape: Mapping[str, object], rows: Sequence[int]) -> Found:
    """Microseconds of a sum over ranks of so many rows, and of one with the residual sum and the norm behind
    it: by the group's library, and as a model's ranks do it; inside a CUDA graph of many."""
    spec, device, found = Shape.of(shape).spec, group.device, Found()
    collectives = RankCollectives(group, spec, torch.bfloat16)
    collectives.open()
    weight = torch.ones(spec.hidden_size, dtype=torch.bfloat16, device=device)
    for count in rows:
        x, residual = (
            torch.zeros(count, spec.hidden_size, dtype=torch.bfloat16, device=device) for _ in range(2)
        )

        def apart(x: Tensor = x, residual: Tensor = residual) -> None:
            group.all_reduce(x)
            add_rms_norm(x, residual, weight, spec.norm_eps)

        ways: dict[str, Callable[[], object]] = {
            "sum, by the library": partial(group.all_reduce, x),
            "sum": partial(collectives.all_reduce, x),
            "sum and norm, by the library": apart,
            "sum and norm": partial(collectives.add_rms_norm, x, residual, weight, spec.norm_eps),
        }
        one = found[str(count)] = Found()
        for name, work in ways.items():
            work()
            if device.type == "cuda":
                with pdl_launches():
                    replay = recorded(partial(often, work), device)
                group.barrier()
                one[name] = timed(replay) / OFTEN * 1e6
            group.barrier()
    found["in one launch, up to rows"] = collectives.rows
    group.barrier()
    return found


def recorded(work: Callable[[], object], device: torch.device) -> Callable[[], None]:
    """As a CUDA graph, to be replayed."""
    stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
    torch.cuda.synchronize(device)  # Sums have one order, and so far were of another stream.
    with torch.cuda.stream(stream):
        work()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            work()
        stream.synchronize()
    return graph.replay


def timed(work: Callable[[], object]) -> float:
    """Seconds on the device, the least of five."""
    least = float("inf")
    for _ in range(5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        least = min(least, begin.elapsed_time(end) / 1e3)
    return least


def sums_here(seat: Seat, device: str, shape: Mapping[str, object], rows: tuple[int, ...]) -> None:
    """On the other ranks."""
    where = torch.device("cpu") if device == "cpu" else torch.device("cuda", seat.rank)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    group = seat.group(where)
    sum_often(group, shape, rows)
    group.close()


def part_sums(place: Place) -> Found:
    shape, rows = place.shape("8B"), (1, 8, 64, 128, 256, 512)
    device = torch.device("cpu") if place.device == "cpu" else torch.device("cuda", 0)
    follow = importlib.import_module("tensor_parallel").sums_here  # By a name that others know.
    crew = launch(place.ranks, follow, place.device, shape, rows)
    try:
        group = crew.group(device)
        found = sum_often(group, shape, rows)
        group.close()
    finally:
        crew.close(10.0)
    for count, one in found.items():
        row(f"{count} rows" if count.isdigit() else count, json.dumps(one))
    return found


def part_decode(place: Place) -> Found:
    found: Found = {}
    for batch, aim in ((1, 1.6), (64, 1.7)):
        times = {}
        for ranks in (1, place.ranks):
            context, output = (20, 8) if place.tiny else (2048, 64)
            sequences, repeat = (2, 1) if place.tiny else (batch, 4)
            target = Target("8B", place.shape("8B"), place.config(ranks))
            report = run(LatencyBench(BenchKind.DECODE, target, sequences, context, output, repeat))
            times[ranks] = report.ms
            found[f"batch {batch}, {ranks} ranks"] = json.loads(report.line())
        told(f"decode, 8B, batch {batch}", times, aim, found)
    return found


def part_ceilings(place: Place) -> Found:
    """Bytes a second that each device reads, and that its link carries, alone and while all do the same."""
    found: Found = {}
    if place.device == "cpu":
        return found
    devices = place.devices()
    for device in devices:
        torch.cuda.set_device(device)
        found[str(device)] = {"read": memory_read(device), **dataclasses.asdict(link_rates(device))}
    found["links at once, to devices"] = at_once(devices)
    torch.cuda.set_device(0)
    for name, one in found.items():
        row(name, json.dumps(one))
    return found


SENT = 256 << 20
SENDINGS = 64


def links(when: str, place: Place) -> Found:
    """What each link carries alone and at once with the others, before and after what they are judged by."""
    if place.device == "cpu":
        return {}
    alone, together = at_once(place.devices()[:1]), at_once(place.devices())
    rates = [one["median"] / 1e9 for one in (*alone.values(), *together.values())]
    row(f"links {when}", f"alone {rates[0]:.1f}, at once {', '.join(f'{one:.1f}' for one in rates[1:])} GB/s")
    return {f"links {when}": {"alone": alone, "at once": together}}


def at_once(devices: Sequence[torch.device]) -> dict[str, Rates]:
    """Bytes a second that come to each device while the others are sent to as well: the median of five, and
    all five."""
    start = Barrier(len(devices))

    def sent(device: torch.device) -> list[float]:
        torch.cuda.set_device(device)
        source = torch.empty(SENT, dtype=torch.uint8, pin_memory=True)
        target = torch.empty(SENT, dtype=torch.uint8, device=device)
        rates = []
        for _ in range(6):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.wait()
            begin.record()
            for _ in range(SENDINGS):
                target.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
            rates.append(SENT * SENDINGS / (begin.elapsed_time(end) / 1e3))
        return rates[1:]

    with ThreadPoolExecutor(len(devices)) as pool:
        told = list(pool.map(sent, devices))
    return {
        str(device): Rates(median=median(rates), all=rates)
        for device, rates in zip(devices, told, strict=True)
    }


def part_formats(place: Place) -> Found:
    """8B in int4, and a mixture in MXFP4, decoded at batch 1 and 64."""
    found: Found = {}
    for name, form in (("8B", "int4"), ("gpt-oss-20b", None)):
        shape = place.shape(name) if form or not place.tiny else TINY_MIXTURE
        source = config_in(form, shape, name) if form else shape
        for batch in (1,) if place.tiny else (1, 64):
            times = {}
            for ranks in (1, place.ranks):
                context, output = (20, 8) if place.tiny else (2048 if batch == 1 else 512, 64)
                target = Target(name, source, place.config(ranks))
                report = run(
                    LatencyBench(BenchKind.DECODE, target, batch, context, output, 1 if place.tiny else 6)
                )
                times[ranks] = report.ms
                found[f"{name} {form or ''}, batch {batch}, {ranks} ranks"] = json.loads(report.line())
            told(f"decode, {name} {form or ''}, batch {batch}", times, 1.3, found)
    return found


def part_kv(place: Place) -> Found:
    """One long sequence whose KV is in host memory, and comes to the devices in every step."""
    found: Found = {}
    context, output, pages = (200, 4, 16) if place.tiny else (65_536, 96, 64)
    times, rates, means = {}, {}, {}
    found |= links("before", place)
    for ranks in (1, place.ranks):
        settings = {"kv_blocks": pages, "max_sequences": 1, "prefix_cache": False}
        settings |= {"max_length": measure.context_room(context, output)}
        config = place.config(ranks, host_kv_memory="64MiB" if place.tiny else "16GiB", **settings)
        with opened(Target("8B", place.shape("8B"), config)) as model:
            booted = model.boot(config, lambda _: None)
        with closing(booted.engine):
            one = measure.context(booted, context, output, random.Random(0))
        times[ranks] = Timings.of(one.steps)
        # The host sees ends of steps several ms late or not, so all steps count, not the one in the middle.
        means[ranks] = fmean(one.steps)
        rates[ranks] = one.kv_copied / means[ranks]
        found[f"{ranks} ranks"] = dataclasses.asdict(one) | {"kv_copied_per_second_and_rank": rates[ranks]}
        row(
            f"{ranks} ranks",
            f"prompt {one.prefill:.2f} s, {rates[ranks] / 1e9:.1f} GB/s of KV over each link",
        )
        del booted
        give_back(torch.device(place.device))
    found |= links("after", place)
    told(f"decode, 8B, KV of {context:,} tokens in host memory", times, 1.9, found)
    found["by means: times as fast"] = means[1] / means[place.ranks]
    row(
        "the same, by means",
        f"{means[1] * 1e3:.1f} ms on one, {means[place.ranks] * 1e3:.1f} ms on {place.ranks}: "
        f"{means[1] / means[place.ranks]:.2f} times as fast",
    )
    return found


def part_stream(place: Place) -> Found:
    """Layers of a 70B, all of them in host memory but for a ring. Several devices have as much memory
    together as one."""
    found: Found = {}
    layers, room = (2, None) if place.tiny else (16, 12 << 30)
    times, rates = {}, {}
    found |= links("before", place)
    for ranks in (1, place.ranks):
        own = room and f"{room // ranks}B"
        config = place.config(ranks, device_memory=own, max_length=256, max_step_tokens=128)
        target = Target("70B", place.shape("70B", num_hidden_layers=layers), config)
        report = run(LatencyBench(BenchKind.DECODE, target, 1, 20, 8 if place.tiny else 32, 1))
        times[ranks] = report.ms
        found[f"{ranks} ranks"] = json.loads(report.line())
        if report.streaming is None and not place.tiny:
            sys.exit("the layers do not stream: allow less device memory")
        if (
            report.streaming is not None
        ):  # Several devices hold more, so less crosses the links: what these carry is told by itself.
            rates[ranks] = ranks * report.streaming.copied_per_pass / (report.ms.median / 1e3)
    found |= links("after", place)
    told(f"decode, {layers} layers of a 70B, streamed", times, 1.9, found)
    if len(rates) == 2:
        found["bytes/s over all links"], found["links: times as fast"] = rates, rates[place.ranks] / rates[1]
        row(
            "the links alone",
            f"{rates[place.ranks] / rates[1]:.2f} times as fast; the rest is what several devices hold",
        )
    return found


def told(what: str, times: dict[int, Timings], target: float, found: Found) -> None:
    (_, one), (ranks, several) = times.items()
    found[f"{what}: times as fast"] = one.median / several.median
    row(
        what,
        f"{one} on one, {several} on {ranks}: {one.median / several.median:.2f} times as fast, target "
        f"{target}",
    )


PARTS: dict[str, Callable[[Place], Found]] = {
    "ceilings": part_ceilings,
    "equal": part_equal,
    "sums": part_sums,
    "decode": part_decode,
    "formats": part_formats,
    "stream": part_stream,
    "kv": part_kv,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="which, in this order")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    place = Place(args.device, args.tiny, args.ranks)
    recording = Recording(args.out, bench="tensor_parallel", tiny=args.tiny, ranks=args.ranks)
    parts = args.parts.split(",")
    for at, part in enumerate(parts):
        print(part, flush=True)
        again = parts[:at].count(part)
        recording.part(f"{part}, again {again}" if again else part, PARTS[part](place))


if __name__ == "__main__":
    main()
