"""Measure weights streamed from host memory and from disk, against what the links can do and against
accelerate's offloading, in one run.

    python benchmarks/weight_streaming.py --out results.json        70B-shaped layers, random weights, on CUDA
    python benchmarks/weight_streaming.py --tiny                the same course on small shapes, on any device

Ceilings are measured before and after the work they are compared with, and nothing is timed before it is warm
(see penstock.bench.warming). `--parts` takes a few of: host, disk, offload, offload_disk, machine, window,
mixture. Parts may be run by several commands that write to one file. Where there is no git, PENSTOCK_COMMIT
says which commit the sources are of.

`machine` is 80 layers under caps of 16 GiB of device and 100 GiB of host memory, which the process may not
exceed: what the driver says of the device, and the most that the process had resident, stand in the results,
and a run that was above them fails. It takes some 7 minutes, 30 GiB of disk, and a device that nobody else
uses.
"""

import argparse
import dataclasses
import gc
import json
import math
import os
import random
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import torch
from recording import Recording

from penstock.arch.bounds import prefill_operations
from penstock.arch.layout import GroupLayout, group_layouts
from penstock.base.config import Config
from penstock.base.meter import WeightStats
from penstock.base.units import format_rate, format_size, parse_size
from penstock.bench.shapes import SHAPES
from penstock.bench.speed.measure import Laps
from penstock.bench.speed.streaming import scratch
from penstock.bench.warming import BRIEF, RULE, Rule, Timed, timed
from penstock.engine.boot import Booted, boot
from penstock.engine.forecast import forecast
from penstock.engine.machines import CONTEXT, FIXED, PROCESS, Machine, Work
from penstock.engine.placing import Override
from penstock.memory.arena import Arena
from penstock.memory.device import give_back
from penstock.memory.disk import DirectFile
from penstock.memory.probe import matmul_rate
from penstock.step.params import Sampling
from penstock.weights.checkpoint.shape import Shape
from penstock.weights.streaming.residency import PIECE, WeightLimits, padded
from penstock.weights.streaming.ring import StreamRates
from penstock.weights.streaming.source import WeightSource

PARTS = ("host", "disk", "offload", "offload_disk", "machine", "window", "mixture")
GREEDY = Sampling(0.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, (), 0, frozenset(), 0, None, None)
GIB = 1 << 30
CAPS = {"device_memory": "16GiB", "host_memory": "100GiB"}
"""Of the machine of which 80 layers need the disk as well."""
TINY_CAPS = {"device_memory": "72MiB", "host_memory": "92MiB"}
SLOW = Rule(window=2, within=0.1, most=4, least=2)
"""For passes of ten seconds over a disk whose rate changes by as much within minutes."""


def shape(layers: int, tiny: bool) -> dict[str, object]:
    config = dict(SHAPES["70B"]) | {"num_hidden_layers": layers}
    if tiny:
        config |= {
            "hidden_size": 512,
            "intermediate_size": 1792,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "vocab_size": 4096,
        }
    return config


class Peak:
    """The most memory that this process and the device had in use, sampled every 20 ms; the device's by what
    its driver says is taken, by whomever. `host` is the system's own record of the most, where it keeps
    one."""

    def __init__(self, device: torch.device) -> None:
        self.host = self.device = 0
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # Linux then forgets what was the most so far.
        self._cuda, self._process, self._end = device.type == "cuda", psutil.Process(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Peak":
        self._thread.start()
        return self

    def __exit__(self, *fault: object) -> None:
        self._end.set()
        self._thread.join()
        with suppress(OSError, StopIteration):
            lines = Path("/proc/self/status").read_text().splitlines()
            self.host = max(
                self.host, next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
            )

    def _watch(self) -> None:
        while not self._end.wait(0.02):
            self.host = max(self.host, self._process.memory_info().rss)
            if self._cuda:
                free, whole = torch.cuda.mem_get_info()
                self.device = max(self.device, whole - free)


def link_ceiling(device: torch.device, tiny: bool) -> float:
    """Bytes/s of copies of 1 GiB from registered memory, one after another."""
    size = (16 << 20) if tiny else GIB
    source, target = (
        Arena(size, torch.device("cpu"), pinned_for=device),
        torch.empty(size, dtype=torch.uint8, device=device),
    )
    for _ in range(2):
        target.copy_(source.bytes, non_blocking=True)
    sync(device)
    begin = time.perf_counter()
    for _ in range(16):
        target.copy_(source.bytes, non_blocking=True)
    sync(device)
    rate = 16 * size / (time.perf_counter() - begin)
    source.close()
    del target
    give_back(device)  # Before something small that stays is put there.
    return rate


def pageable_rate(device: torch.device, tiny: bool) -> float:
    """Bytes/s of copies of 1 GiB from memory that is not registered: what offloading without pinned memory
    cannot exceed."""
    source, target = (
        torch.ones((16 << 20) if tiny else GIB, dtype=torch.uint8, device=place) for place in ("cpu", device)
    )
    target.copy_(source)
    sync(device)
    begin = time.perf_counter()
    for _ in range(4):
        target.copy_(source)
    sync(device)
    return 4 * source.nbytes / (time.perf_counter() - begin)


def disk_ceiling(file: Path, threads: int = 8, seconds: float = 4.0) -> float:
    """Measure bytes/s of O_DIRECT reads of 16 MiB, through the whole file and round again."""
    stored = DirectFile(file)
    starts = list(range(0, stored.size - PIECE + 1, PIECE)) or [0]
    size = min(PIECE, stored.size // 4096 * 4096)
    lock, state = threading.Lock(), {"next": 0, "done": 0}
    begin = time.perf_counter()

    def read() -> None:
        buffer = Arena(size, torch.device("cpu")).bytes.numpy().data
        in_time = True
        while in_time:  # One read at least, also on a machine that is busy with something else.
            with lock:
                start, state["next"] = starts[state["next"] % len(starts)], state["next"] + 1
            stored.read_direct(buffer, start)
            with lock:
                state["done"] += size
            in_time = time.perf_counter() < begin + seconds

    workers = [threading.Thread(target=read) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    rate = state["done"] / (time.perf_counter() - begin)
    stored.close()
    return rate


def sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def decode(booted: Booted, batch: int, context: int, steps: int, rule: Rule = RULE) -> dict[str, object]:
    """Seconds of single decode steps in the steady state, and what moved in them: sequences of `context`
    prompt tokens each."""
    engine, rng, weights = booted.engine, random.Random(batch), booted.weights
    requests = [
        engine.submit([rng.randrange(booted.spec.vocab_size) for _ in range(context)], GREEDY)
        for _ in range(batch)
    ]
    got, begin = dict.fromkeys(requests, 0), time.perf_counter()
    while not all(got.values()):
        for event in engine.step():
            got[event.request] += event.token is not None
    prompts, moved, at, laps = time.perf_counter() - begin, list[WeightStats](), weights.stats(), Laps()

    def step() -> float:
        events = engine.step()
        seconds = laps.lap()  # What is read below counts in the next lap: the device computes meanwhile.
        assert len(events) == batch
        moved.append(weights.stats())
        return seconds

    took = timed(step, steps, rule)
    for request in requests:
        engine.stop(request)
    before, after, total = [at, *moved][-steps - 1], moved[-1], sum(took.seconds)
    passes = zip([at, *moved][-steps - 1 :], moved[-steps:], strict=False)
    return {
        "batch": batch,
        "context": context,
        "prompts_s": prompts,
        **took.record(),
        "mean_s": total / steps,
        "tokens_per_s": batch * steps / total,
        "copied_per_pass": (after.copied - before.copied) / steps,
        "read_per_pass": (after.read - before.read) / steps,
        "moved": [(now.copied - then.copied, now.read - then.read) for then, now in passes],
        "stalled_link_s": (after.stalled_link - before.stalled_link) / steps,
        "stalled_disk_s": (after.stalled_disk - before.stalled_disk) / steps,
    }


def prefill(booted: Booted, tokens: int, times: int, rule: Rule = RULE) -> Timed:
    engine, rng = booted.engine, random.Random(1)

    def prompt() -> float:
        engine.submit([rng.randrange(booted.spec.vocab_size) for _ in range(tokens)], GREEDY, 1)
        begin = time.perf_counter()
        while engine.busy:
            engine.step()
        return time.perf_counter() - begin

    return timed(prompt, times, rule)


@contextmanager
def running(
    config: dict[str, object],
    limits: WeightLimits | None,
    device: torch.device,
    disk: object = None,
    **settings: object,
) -> Iterator[Booted]:
    shape = Shape.of(
        config
    )  # In its own dtype, in which limits and what is on disk are, also where a processor has none of it.
    booted = boot(
        Config(Path(), device=str(device), dtype=shape.spec.dtype, prefix_cache=False, **settings),  # type: ignore[arg-type]
        shape,
        say=say,
        override=Override(limits, disk),  # type: ignore[arg-type]
    )
    try:
        yield booted
    finally:
        booted.engine.close()
        del booted
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def facts(booted: Booted) -> dict[str, object]:
    placement, stats = booted.weights.placement, booted.weights.stats()
    return {
        "boot_s": booted.seconds,
        "placement": str(placement),
        "resident": stats.device,
        "host": stats.host,
        "disk": stats.disk,
        "device_ring": stats.device_ring,
        "host_ring": stats.host_ring,
        "streamed": placement.streamed,
        "read": placement.read,
        "predicted_s": placement.prediction.seconds,
        "binding": str(placement.prediction.binding),
    }


def sizes(layers: int, tiny: bool, kept: int) -> tuple[int, int]:
    """Bytes of all weights, and of embedding, head and `kept` layers: what stays on the device in both
    systems."""
    spec = Shape.of(shape(layers, tiny))
    layouts = group_layouts(spec.spec, spec.names, spec.spec.dtype)
    total = sum(map(padded, layouts))
    layer = sum(padded(layout) for layout in layouts if layout.id.layer == 0)
    return total, total - (layers - kept) * layer


def resident_limits(layers: int, tiny: bool, kept: int, host: int) -> WeightLimits:
    """Room for what accelerate keeps on the device as well, and for a ring beside."""
    total, stays = sizes(layers, tiny, kept)
    ring = (total - stays) // (layers - kept) * 2
    return WeightLimits(stays + ring, host, resident=stays, device_ring=ring)


def part_host(device: torch.device, tiny: bool) -> dict[str, object]:
    layers, found = 16, {}
    before = link_ceiling(device, tiny)
    total, _ = sizes(layers, tiny, 0)
    limits = resident_limits(layers, tiny, 6, 2 * total)
    with running(
        shape(layers, tiny),
        limits,
        device,
        max_step_tokens=2048 if not tiny else 64,
        max_sequences=16,
        max_length=4096,
    ) as booted:
        found |= facts(booted)
        for batch in (1, 16):
            found[f"decode_{batch}"] = decode(booted, batch, 64 if not tiny else 16, 12 if not tiny else 4)
        tokens = 2048 if not tiny else 32
        times = prefill(booted, tokens, 6).record()
        spec = Shape.of(shape(layers, tiny))
        operations = prefill_operations(
            spec.spec, group_layouts(spec.spec, spec.names, spec.spec.dtype), [tokens]
        )
        found["prefill"] = {"tokens": tokens, "operations": operations, **times}
    after, flops = link_ceiling(device, tiny), matmul_rate(device, torch.bfloat16)
    ceiling = (before + after) / 2
    found |= {"link_before": before, "link_after": after, "matmul": flops}
    for batch in (1, 16):
        one = found[f"decode_{batch}"]
        one["rate"] = found["streamed"] / one["mean_s"]
        one["of_ceiling"] = one["rate"] / ceiling
        one["exact"] = one["copied_per_pass"] == found["streamed"]
        row(
            f"decode, batch {batch}, all streamed groups on the host",
            one["mean_s"],
            f"{share(one, ceiling)}; bytes exact: {one['exact']}; predicted {found['predicted_s']:.4f} s",
        )
    least, middle = found["prefill"]["least_s"], found["prefill"]["median_s"]
    bound = max(operations / flops, found["streamed"] / ceiling)
    found["prefill"] |= {"bound_s": bound, "of_bound": bound / middle}
    row(
        f"prefill, {tokens} tokens",
        middle,
        f"bound {bound:.4f} s (arithmetic {operations / flops:.4f}) = {bound / middle:.1%}; best {least:.4f}",
    )
    return found


def part_disk(device: torch.device, tiny: bool, directory: Path) -> dict[str, object]:
    layers, found = 8, {}
    spec = Shape.of(shape(layers, tiny))
    layouts = group_layouts(spec.spec, spec.names, spec.spec.dtype)
    limits = dataclasses.replace(resident_limits(layers, tiny, 2, 64 * PIECE), kept=0)
    with scratch(directory, 40 * GIB, layouts, spec.spec.dtype) as disk:
        before = disk_ceiling(disk[1], seconds=1.0 if tiny else 5.0)
        with running(
            shape(layers, tiny), limits, device, disk, max_step_tokens=64, max_sequences=1, max_length=512
        ) as booted:
            found |= facts(booted)
            found["decode_1"] = decode(booted, 1, 32, 4, BRIEF)
        after = disk_ceiling(disk[1], seconds=1.0 if tiny else 5.0)
    ceiling, one = (before + after) / 2, found["decode_1"]
    one["rate"] = found["read"] / one["mean_s"]
    one["of_ceiling"] = one["rate"] / ceiling
    found |= {"disk_before": before, "disk_after": after, "exact": one["read_per_pass"]}
    row(
        "decode, batch 1, streamed groups on disk",
        one["mean_s"],
        f"{share(one, ceiling)} ({format_rate(before)} before, {format_rate(after)} after); predicted "
        f"{found['predicted_s']:.3f} s",
    )
    return found


def write_checkpoint(directory: Path, layers: int, tiny: bool) -> None:
    """The shape as a checkpoint in bfloat16, a file for each layer, all of random numbers."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True)
    config = shape(layers, tiny) | {"architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(config))
    spec = Shape.of(shape(layers, tiny))
    block = torch.randn(1 << 22).mul_(0.02).to(torch.bfloat16)
    places, total = {}, 0
    for layer in range(-1, layers):
        tensors = {}
        for layout in group_layouts(spec.spec, spec.names, "bfloat16"):
            for source in (
                source for field in layout.fields for source in field.sources if layout.id.layer == layer
            ):
                count = math.prod(source.shape)
                tensors[source.tensor] = block.repeat(-(-count // len(block)))[:count].view(source.shape)
        name = f"model-{layer + 1:05}.safetensors"
        save_file(tensors, directory / name, {"format": "pt"})
        places |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": places})
    )


def offloaded(directory: Path, layers: int, kept: int, device: torch.device, where: str) -> "torch.nn.Module":
    """The checkpoint as people load it: `kept` layers on the device and the others left to accelerate."""
    import transformers

    here: int | str = 0 if device.type == "cuda" else "cpu"
    spread = {round((index + 0.5) * layers / kept) for index in range(kept)}
    places: dict[str, int | str] = dict.fromkeys(
        ("model.embed_tokens", "model.norm", "lm_head", "model.rotary_emb"), here
    )
    places |= {f"model.layers.{layer}": here if layer in spread else where for layer in range(layers)}
    return transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.bfloat16, device_map=places, offload_folder=str(directory / "offloaded")
    ).eval()


@torch.inference_mode()
def steps_of(
    model: "torch.nn.Module", device: torch.device, steps: int, before: Callable[[], None], rule: Rule
) -> Timed:
    """Single greedy decode steps with a KV cache, after a prompt of 32 tokens."""
    out = model(torch.arange(32, device=device)[None], use_cache=True)
    tokens, cache = out.logits[:, -1:].argmax(-1), out.past_key_values

    def step() -> float:
        nonlocal tokens, cache
        before()
        begin = time.perf_counter()
        out = model(tokens, past_key_values=cache, use_cache=True)
        tokens, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
        tokens.tolist()
        return time.perf_counter() - begin

    return timed(step, steps, rule)


def drop_cache(directory: Path) -> None:
    for file in directory.rglob("*"):
        if file.is_file():
            with open(file, "rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def part_offload(device: torch.device, tiny: bool, directory: Path, where: str) -> dict[str, object]:
    """accelerate's offloading to the CPU's memory or to disk, beside the same layers there; 32 tokens of
    context, batch 1."""
    layers, kept, found = 16, 6, dict[str, object]()
    folder = directory / "penstock-offload"
    shutil.rmtree(folder, ignore_errors=True)
    write_checkpoint(folder, layers, tiny)
    os.sync()
    rule, steps = (RULE, 8) if where == "cpu" else (BRIEF, 4)
    try:
        model = offloaded(folder, layers, kept, device, where)
        theirs = steps_of(
            model, device, steps, (lambda: drop_cache(folder)) if where == "disk" else (lambda: None), rule
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    found |= {
        "context": 32,
        "layers": layers,
        "layers_kept": kept,
        "versions": versions(),
        "accelerate": theirs.record(),
    }
    row(f"accelerate, {layers - kept} of {layers} layers on {where}", theirs.median, str(theirs))
    del model
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if where == "cpu":
        found |= {"link_before": link_ceiling(device, tiny), "pageable": pageable_rate(device, tiny)}
        limits = resident_limits(layers, tiny, kept, 2 * sizes(layers, tiny, kept)[0])
        with running(
            shape(layers, tiny), limits, device, max_step_tokens=64, max_sequences=1, max_length=512
        ) as booted:
            found["penstock"] = facts(booted) | decode(booted, 1, 32, steps, rule)
        found["link_after"] = link_ceiling(device, tiny)
        moved, ceilings = "streamed", (found["link_before"], found["link_after"])
    else:
        spec = Shape.of(shape(layers, tiny))
        layouts = group_layouts(spec.spec, spec.names, spec.spec.dtype)
        limits = dataclasses.replace(resident_limits(layers, tiny, kept, 64 * PIECE), kept=0)
        with scratch(directory, 20 * GIB, layouts, spec.spec.dtype) as disk:
            found["disk_before"] = disk_ceiling(disk[1], seconds=1.0 if tiny else 4.0)
            with running(
                shape(layers, tiny), limits, device, disk, max_step_tokens=64, max_sequences=1, max_length=512
            ) as booted:
                found["penstock"] = facts(booted) | decode(booted, 1, 32, steps, rule)
            found["disk_after"] = disk_ceiling(disk[1], seconds=1.0 if tiny else 4.0)
        moved, ceilings = "read", (found["disk_before"], found["disk_after"])
    ours = found["penstock"]
    rate, ceiling = ours[moved] / ours["mean_s"], sum(ceilings) / 2
    found |= {"ratio": theirs.median / ours["median_s"], "rate": rate, "of_ceiling": rate / ceiling}
    text = (
        f"{found['ratio']:.2f} times as fast as accelerate; {format_rate(rate)} of {format_rate(ceiling)} = "
        f"{rate / ceiling:.1%}"
    )
    row(f"penstock, the same layers on {'the host' if where == 'cpu' else 'disk'}", ours["median_s"], text)
    return found


def versions() -> dict[str, str]:
    """Of those that are compared with, as far as they are there."""
    found = {}
    for name in ("transformers", "accelerate"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


class Kept:
    """A source that outlives an engine, which closes what it reads from."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    def read(self, layout: GroupLayout, start: int, into: torch.Tensor, check: bool) -> None:
        self._source.read(layout, start, into, check)

    def close(self) -> None:
        pass


def part_machine(
    device: torch.device, tiny: bool, directory: Path, batches: dict[int, int], room: int
) -> dict[str, object]:
    """80 layers, 16 GiB of device and 100 GiB of host memory, the rest on disk: batches by how many tokens of
    context each sequence has, an engine for each, and the ceilings before and after all of them. The part
    fails if the process was above a cap."""
    layers, found, over = (80 if not tiny else 12), dict[str, object](), list[str]()
    config = shape(layers, tiny)
    spec = Shape.of(config)
    layouts = group_layouts(spec.spec, spec.names, spec.spec.dtype)
    caps, seconds, steps = (TINY_CAPS, 1.0, 2) if tiny else (CAPS, 4.0, 3)
    with scratch(directory, room, layouts, spec.spec.dtype) as disk:
        found |= {"caps": caps, "layers": layers, "file": disk[1].stat().st_size}
        found |= {
            "disk_before": disk_ceiling(disk[1], seconds=seconds),
            "link_before": link_ceiling(device, tiny),
        }
        operations = matmul_rate(device, torch.bfloat16)
        for batch, context in batches.items():
            give_back(device)
            longest = context + 64
            settings = {
                "max_step_tokens": 64 if tiny else max(2048, batch * context // 4),
                "max_sequences": batch,
                "max_length": longest,
                "block_size": 16,
                "kv_blocks": batch * -(-longest // 16) + 1,
            }
            with (
                Peak(device) as peak,
                running(config, None, device, (Kept(disk[0]), disk[1]), **caps, **settings) as booted,
            ):
                one = facts(booted) | {"settings": settings}
                if batch == 1:
                    one["prefill"] = {
                        "tokens": context,
                        **prefill(booted, context, 2, Rule(window=1, most=1, least=1)).record(),
                    }
                one |= decode(booted, batch, context, steps, SLOW)
                rates = booted.weights.rates
            one |= {
                "peak_device": peak.device,
                "peak_host": peak.host,
                "rate": one["read_per_pass"] / one["mean_s"],
            }
            if device.type == "cuda":
                for what, most, cap in (
                    ("device", peak.device, caps["device_memory"]),
                    ("host", peak.host, caps["host_memory"]),
                ):
                    if most > parse_size(cap):
                        over.append(f"batch {batch}: {what} {format_size(most)} of {cap}")
            found[f"batch_{batch}"] = one
            say(json.dumps(one))  # A pass takes long, and the run may be cut off.
        disk[0].close()
        give_back(device)
        found |= {
            "disk_after": disk_ceiling(disk[1], seconds=seconds),
            "link_after": link_ceiling(device, tiny),
            "over": over,
        }
    found["disk"] = disk_rate = (found["disk_before"] + found["disk_after"]) / 2
    for batch, context in batches.items():
        one = found[f"batch_{batch}"]
        one["of_disk"] = one["rate"] / disk_rate
        text = (
            f"{one['median_s'] / batch:.3f} s a token; predicted {one['predicted_s']:.2f} s a pass; disk "
            f"{format_rate(one['rate'])} of "
        )
        text += (
            f"{format_rate(disk_rate)} = {one['of_disk']:.1%}; peak device "
            f"{format_size(one['peak_device'])}, host "
        )
        row(
            f"80 layers, batch {batch}, {context:,} tokens each",
            one["median_s"],
            text + format_size(one["peak_host"]),
        )
    if first := found.get("batch_1"):
        first["plan"] = planned(spec, rates, disk_rate, operations, caps, tiny)
        for name, took in (("decode", first["median_s"]), ("prefill", first["prefill"]["median_s"])):
            then = first["plan"][name]
            row(f"plan, {name}", then, f"measured {took:.3f} s, {then / took - 1:+.1%}")
    if over:
        found["failed"] = "above a cap: " + "; ".join(over)
    return found


def part_window(device: torch.device, tiny: bool, directory: Path, room: int) -> dict[str, object]:
    """Sliding windows over the same 80 layers, as described for them: six layers on the device, forty in host
    memory, all of them read again in every pass. One pass is measured, after the prompt's and one that warms
    up."""
    layers, found = (80 if not tiny else 12), dict[str, object]()
    config = shape(layers, tiny)
    spec = Shape.of(config)
    layouts = group_layouts(spec.spec, spec.names, spec.spec.dtype)
    layer = sum(padded(layout) for layout in layouts if layout.id.layer == 0)
    limits = WeightLimits(
        6 * layer, (40 if not tiny else 4) * layer, resident=0, kept=0, device_ring=6 * layer
    )
    budgets = {"device_memory": "16GiB"} if tiny else {}
    settings = {
        "max_step_tokens": 2048 if not tiny else 64,
        "max_sequences": 1,
        "max_length": 2304,
        "block_size": 16,
        "kv_blocks": 160,
    }
    with scratch(directory, room, layouts, spec.spec.dtype) as disk:
        found["disk_before"] = disk_ceiling(disk[1], seconds=1.0 if tiny else 4.0)
        with Peak(device) as peak, running(config, limits, device, disk, **budgets, **settings) as booted:
            found |= facts(booted) | decode(booted, 1, 16, 1, Rule(window=1, most=1, least=1))
        found["disk_after"] = disk_ceiling(disk[1], seconds=1.0 if tiny else 4.0)
    found |= {"layers": layers, "peak_device": peak.device, "peak_host": peak.host}
    row(
        "80 layers, sliding windows, batch 1, 16 tokens",
        found["median_s"],
        f"predicted {found['predicted_s']:.2f} s",
    )
    return found


def planned(
    spec: Shape, rates: StreamRates, disk: float, operations: float, budgets: dict[str, str], tiny: bool
) -> dict[str, float]:
    """Seconds of a pass that `penstock plan` forecasts for these budgets, with the disk's rate of this
    run."""
    device, host = (parse_size(size) for size in budgets.values())
    if tiny:  # No GPU takes of this, and no process beside it.
        device, host = device + CONTEXT + FIXED + (1 << 20), host - device + PROCESS
    there = Machine(device, host, dataclasses.replace(rates, disk_to_host=disk), operations)
    tokens = 2048 if not tiny else 64
    decode = forecast(spec.spec, spec.names, there, Work(spec.spec.dtype, 1, 2304, tokens)).decode
    prefill = forecast(spec.spec, spec.names, there, Work(spec.spec.dtype, 1, tokens, tokens)).prefill
    return {"decode": decode.seconds, "prefill": prefill.seconds}


def part_mixture(device: torch.device, tiny: bool) -> dict[str, object]:
    """A mixture of experts with room for a third of it on the device and the rest in host memory; random
    weights choose evenly."""
    config = json.loads((Path(__file__).parent / "shapes" / "Qwen3-30B-A3B" / "config.json").read_text())
    if tiny:
        config |= {
            "hidden_size": 256,
            "moe_intermediate_size": 128,
            "num_hidden_layers": 4,
            "num_experts": 16,
            "vocab_size": 4096,
        }
    spec = Shape.of(config)
    layouts = group_layouts(spec.spec, spec.names, spec.spec.dtype)
    total, largest = sum(map(padded, layouts)), max(map(padded, layouts))
    found: dict[str, object] = {"link": link_ceiling(device, tiny)}
    limits = WeightLimits(total // 3 + 2 * largest, total)
    with running(
        config, limits, device, max_step_tokens=256 if not tiny else 32, max_sequences=16, max_length=512
    ) as booted:
        found |= facts(booted)
        for batch in (1, 16):
            one = found[f"decode_{batch}"] = decode(
                booted, batch, 16, 40 if not tiny else 4, Rule(least=20, most=40) if not tiny else RULE
            )
            rate = one["copied_per_pass"] / one["mean_s"]
            text = (
                f"{format_size(one['copied_per_pass'])} a pass, {format_rate(rate)} of "
                f"{format_rate(found['link'])}"
            )
            row(f"mixture, a third on the device, batch {batch}", one["mean_s"], text)
    return found


def share(one: dict[str, object], ceiling: float) -> str:
    return f"{format_rate(one['rate'])} of {format_rate(ceiling)} = {one['of_ceiling']:.1%}"


def row(what: str, seconds: float, text: str) -> None:
    print(f"{what:<55} {seconds:9.4f} s  {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--directory", type=Path, default=Path("/tmp"), help="where what rests on disk is written"
    )
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument(
        "--batches",
        default="1:2048,32:512",
        help="of `machine`: how many sequences, and how many tokens each has",
    )
    parser.add_argument(
        "--file",
        default="30GiB",
        help="of `machine` and `window`: at most so much of the disk; layers share its bytes",
    )
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    device, recording = (
        torch.device(given.device),
        Recording(given.out, bench="weight_streaming", tiny=given.tiny),
    )
    batches = {
        int(count): int(context)
        for count, _, context in (one.partition(":") for one in given.batches.split(","))
    }
    batches = {count: context // 32 for count, context in batches.items()} if given.tiny else batches
    room, failed = parse_size(given.file), list[str]()
    work: dict[str, Callable[[], dict[str, object]]] = {
        "host": lambda: part_host(device, given.tiny),
        "disk": lambda: part_disk(device, given.tiny, given.directory),
        "offload": lambda: part_offload(device, given.tiny, given.directory, "cpu"),
        "offload_disk": lambda: part_offload(device, given.tiny, given.directory, "disk"),
        "machine": lambda: part_machine(device, given.tiny, given.directory, batches, room),
        "window": lambda: part_window(device, given.tiny, given.directory, room),
        "mixture": lambda: part_mixture(device, given.tiny),
    }
    for part in given.parts.split(","):
        begin = time.perf_counter()
        try:
            found = work[part]()
        except Exception as fault:  # What the other parts found is not lost for it.
            traceback.print_exc()
            found = {"failed": f"{type(fault).__name__}: {fault}"}
        say(f"{part}: {time.perf_counter() - begin:.0f} s")
        recording.part(part, found)
        if "failed" in found:
            say(f"{part} failed: {found['failed']}")
            failed.append(part)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
