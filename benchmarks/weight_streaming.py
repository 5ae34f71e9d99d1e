"""Weights streamed from host memory and from disk, against what the links can do and against accelerate's offloading, in one run.

    python benchmarks/weight_streaming.py --out results.json            70B-shaped layers, random weights, on CUDA
    python benchmarks/weight_streaming.py --tiny                        the same course on small shapes, on any device

Ceilings are measured before and after the work they are compared with. `--parts` takes a few of: host, disk, offload, machine, window,
mixture.
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
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch

from penstock.arch.bounds import prefill_operations
from penstock.arch.layout import group_layouts
from penstock.base.config import Config
from penstock.base.units import format_rate, format_size, parse_size
from penstock.bench.machine import machine
from penstock.bench.shapes import SHAPES
from penstock.bench.streaming import scratch
from penstock.engine.boot import Booted, boot
from penstock.engine.forecast import CONTEXT, PROCESS, Machine, Work, forecast
from penstock.engine.placing import Override
from penstock.memory.arena import Arena
from penstock.memory.disk import DirectFile
from penstock.memory.probe import matmul_rate
from penstock.step.params import Sampling
from penstock.weights.passage import Rates
from penstock.weights.residency import PIECE, Limits, padded
from penstock.weights.shape import Shape

PARTS = ("host", "disk", "offload", "machine", "window", "mixture")
GREEDY = Sampling(0.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, (), 0, frozenset(), 0, None, None)
GIB = 1 << 30


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
    """The most memory that this process and the device had in use, sampled every 20 ms."""

    def __init__(self, device: torch.device) -> None:
        self.host = self.device = 0
        self._cuda, self._process, self._end = device.type == "cuda", psutil.Process(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Peak":
        self._thread.start()
        return self

    def __exit__(self, *fault: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._end.wait(0.02):
            self.host = max(self.host, self._process.memory_info().rss)
            if self._cuda:
                free, whole = torch.cuda.mem_get_info()
                self.device = max(self.device, whole - free)


def link_ceiling(device: torch.device, tiny: bool) -> float:
    """Bytes/s of copies of 1 GiB from registered memory, one after another."""
    size = (16 << 20) if tiny else GIB
    source, target = Arena(size, torch.device("cpu"), pinned_for=device), torch.empty(size, dtype=torch.uint8, device=device)
    for _ in range(2):
        target.copy_(source.bytes, non_blocking=True)
    sync(device)
    begin = time.perf_counter()
    for _ in range(16):
        target.copy_(source.bytes, non_blocking=True)
    sync(device)
    rate = 16 * size / (time.perf_counter() - begin)
    source.close()
    return rate


def pageable_rate(device: torch.device, tiny: bool) -> float:
    """Bytes/s of copies of 1 GiB from memory that is not registered: what offloading without pinned memory cannot exceed."""
    source, target = (torch.ones((16 << 20) if tiny else GIB, dtype=torch.uint8, device=place) for place in ("cpu", device))
    target.copy_(source)
    sync(device)
    begin = time.perf_counter()
    for _ in range(4):
        target.copy_(source)
    sync(device)
    return 4 * source.nbytes / (time.perf_counter() - begin)


def disk_ceiling(file: Path, threads: int = 8, seconds: float = 4.0) -> float:
    """Bytes/s of O_DIRECT reads of 16 MiB, through the whole file and round again."""
    stored = DirectFile(file)
    starts = list(range(0, stored.size - PIECE + 1, PIECE)) or [0]
    size = min(PIECE, stored.size // 4096 * 4096)
    lock, state = threading.Lock(), {"next": 0, "done": 0}
    begin = time.perf_counter()

    def read() -> None:
        buffer = Arena(size, torch.device("cpu")).bytes.numpy().data
        while time.perf_counter() < begin + seconds:
            with lock:
                start, state["next"] = starts[state["next"] % len(starts)], state["next"] + 1
            stored.read_direct(buffer, start)
            with lock:
                state["done"] += size

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


def decode(booted: Booted, batch: int, context: int, steps: int, warm: int = 2) -> dict[str, object]:
    """Seconds of single decode steps in the steady state, and what moved in them."""
    engine, rng, weights = booted.engine, random.Random(batch), booted.weights
    requests = [engine.submit([rng.randrange(booted.spec.vocab_size) for _ in range(context)], GREEDY) for _ in range(batch)]
    got = dict.fromkeys(requests, 0)
    while not all(got.values()):
        for event in engine.step():
            got[event.request] += event.token is not None
    for _ in range(warm):
        engine.step()
    before, seconds, moved = weights.stats(), [], []
    for _ in range(steps):
        begin, at = time.perf_counter(), weights.stats()
        events = engine.step()
        seconds.append(time.perf_counter() - begin)
        assert len(events) == batch
        moved.append((weights.stats().copied - at.copied, weights.stats().read - at.read))
    after = weights.stats()
    for request in requests:
        engine.stop(request)
    total = sum(seconds)
    return {
        "batch": batch,
        "context": context,
        "seconds": seconds,
        "mean_s": total / steps,
        "tokens_per_s": batch * steps / total,
        "copied_per_pass": (after.copied - before.copied) / steps,
        "read_per_pass": (after.read - before.read) / steps,
        "moved": moved,
        "stalled_link_s": (after.stalled_link - before.stalled_link) / steps,
        "stalled_disk_s": (after.stalled_disk - before.stalled_disk) / steps,
    }


def prefill(booted: Booted, tokens: int, times: int) -> list[float]:
    engine, rng, seconds = booted.engine, random.Random(1), []
    for _ in range(times + 1):
        engine.submit([rng.randrange(booted.spec.vocab_size) for _ in range(tokens)], GREEDY, 1)
        begin = time.perf_counter()
        while engine.busy:
            engine.step()
        seconds.append(time.perf_counter() - begin)
    return seconds[1:]


@contextmanager
def running(
    config: dict[str, object], limits: Limits | None, device: torch.device, disk: object = None, **settings: object
) -> Iterator[Booted]:
    shape = Shape.of(config)  # In its own dtype, in which limits and what is on disk are, also where a processor has none of it.
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
    """Bytes of all weights, and of embedding, head and `kept` layers: what stays on the device in both systems."""
    spec = Shape.of(shape(layers, tiny))
    layouts = group_layouts(spec.spec, spec.names, spec.spec.dtype)
    total = sum(map(padded, layouts))
    layer = sum(padded(layout) for layout in layouts if layout.id.layer == 0)
    return total, total - (layers - kept) * layer


def resident_limits(layers: int, tiny: bool, kept: int, host: int) -> Limits:
    """Room for what accelerate keeps on the device as well, and for a ring beside."""
    total, stays = sizes(layers, tiny, kept)
    ring = (total - stays) // (layers - kept) * 2
    return Limits(stays + ring, host, resident=stays, device_ring=ring)


def part_host(device: torch.device, tiny: bool) -> dict[str, object]:
    layers, found = 16, {}
    before = link_ceiling(device, tiny)
    total, _ = sizes(layers, tiny, 0)
    limits = resident_limits(layers, tiny, 6, 2 * total)
    with running(
        shape(layers, tiny), limits, device, max_step_tokens=2048 if not tiny else 64, max_sequences=16, max_length=4096
    ) as booted:
        found |= facts(booted)
        for batch in (1, 16):
            found[f"decode_{batch}"] = decode(booted, batch, 64, 12 if not tiny else 4)
        tokens = 2048 if not tiny else 64
        times = prefill(booted, tokens, 4)
        spec = Shape.of(shape(layers, tiny))
        operations = prefill_operations(spec.spec, group_layouts(spec.spec, spec.names, spec.spec.dtype), [tokens])
        found["prefill"] = {"tokens": tokens, "seconds": times, "operations": operations}
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
    least = min(found["prefill"]["seconds"])
    mean = sum(found["prefill"]["seconds"]) / len(found["prefill"]["seconds"])
    bound = max(operations / flops, found["streamed"] / ceiling)
    found["prefill"] |= {"bound_s": bound, "mean_s": mean, "of_bound": bound / mean}
    row(
        f"prefill, {tokens} tokens",
        mean,
        f"bound {bound:.4f} s (arithmetic {operations / flops:.4f}) = {bound / mean:.1%}; best {least:.4f}",
    )
    return found


def part_disk(device: torch.device, tiny: bool, directory: Path) -> dict[str, object]:
    layers, found = 8, {}
    spec = Shape.of(shape(layers, tiny))
    layouts = group_layouts(spec.spec, spec.names, spec.spec.dtype)
    limits = dataclasses.replace(resident_limits(layers, tiny, 2, 64 * PIECE), kept=0)
    with scratch(directory, 40 * GIB, layouts, spec.spec.dtype) as disk:
        before = disk_ceiling(disk[1], seconds=1.0 if tiny else 5.0)
        with running(shape(layers, tiny), limits, device, disk, max_step_tokens=64, max_sequences=1, max_length=512) as booted:
            found |= facts(booted)
            found["decode_1"] = decode(booted, 1, 32, 4, warm=1)
        after = disk_ceiling(disk[1], seconds=1.0 if tiny else 5.0)
    ceiling, one = (before + after) / 2, found["decode_1"]
    one["rate"] = found["read"] / one["mean_s"]
    one["of_ceiling"] = one["rate"] / ceiling
    found |= {"disk_before": before, "disk_after": after, "exact": one["read_per_pass"]}
    row(
        "decode, batch 1, streamed groups on disk",
        one["mean_s"],
        f"{share(one, ceiling)} ({format_rate(before)} before, {format_rate(after)} after); predicted {found['predicted_s']:.3f} s",
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
            for source in (source for field in layout.fields for source in field.sources if layout.id.layer == layer):
                count = math.prod(source.shape)
                tensors[source.tensor] = block.repeat(-(-count // len(block)))[:count].view(source.shape)
        name = f"model-{layer + 1:05}.safetensors"
        save_file(tensors, directory / name, {"format": "pt"})
        places |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}))


def offloaded(directory: Path, layers: int, kept: int, device: torch.device, where: str) -> "torch.nn.Module":
    """The checkpoint as people load it: `kept` layers on the device and the others left to accelerate."""
    import transformers

    here: int | str = 0 if device.type == "cuda" else "cpu"
    spread = {round((index + 0.5) * layers / kept) for index in range(kept)}
    places: dict[str, int | str] = dict.fromkeys(("model.embed_tokens", "model.norm", "lm_head", "model.rotary_emb"), here)
    places |= {f"model.layers.{layer}": here if layer in spread else where for layer in range(layers)}
    return transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.bfloat16, device_map=places, offload_folder=str(directory / "offloaded")
    ).eval()


@torch.inference_mode()
def steps_of(model: "torch.nn.Module", device: torch.device, steps: int, before: Callable[[], None]) -> list[float]:
    """Seconds of single greedy decode steps with a KV cache."""
    tokens, cache, seconds = torch.arange(32, device=device)[None], None, []
    for step in range(steps + 1):
        before()
        begin = time.perf_counter()
        out = model(tokens, past_key_values=cache, use_cache=True)
        tokens, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
        tokens.tolist()
        if step:
            seconds.append(time.perf_counter() - begin)
    return seconds


def drop_cache(directory: Path) -> None:
    for file in directory.rglob("*"):
        if file.is_file():
            with open(file, "rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def part_offload(device: torch.device, tiny: bool, directory: Path) -> dict[str, object]:
    layers, kept, found = 16, 6, {}
    folder = directory / "penstock-offload"
    shutil.rmtree(folder, ignore_errors=True)
    write_checkpoint(folder, layers, tiny)
    os.sync()
    for where, steps in (("cpu", 4), ("disk", 2)):
        model = offloaded(folder, layers, kept, device, where)
        times = steps_of(model, device, steps, (lambda: drop_cache(folder)) if where == "disk" else (lambda: None))
        found[f"accelerate_{where}"] = {"seconds": times, "mean_s": sum(times) / len(times)}
        row(f"accelerate, {layers - kept} of {layers} layers on {where}", sum(times) / len(times), "")
        del model
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    shutil.rmtree(folder, ignore_errors=True)
    found["pageable"] = pageable_rate(device, tiny)
    total, _ = sizes(layers, tiny, kept)
    with running(
        shape(layers, tiny), resident_limits(layers, tiny, kept, 2 * total), device, max_step_tokens=64, max_sequences=1, max_length=512
    ) as booted:
        found["host"] = facts(booted) | decode(booted, 1, 32, 8)
    spec = Shape.of(shape(layers, tiny))
    layouts = group_layouts(spec.spec, spec.names, spec.spec.dtype)
    limits = dataclasses.replace(resident_limits(layers, tiny, kept, 64 * PIECE), kept=0)
    with scratch(directory, 20 * GIB, layouts, spec.spec.dtype) as disk:
        ceiling = disk_ceiling(disk[1], seconds=1.0 if tiny else 3.0)
        with running(shape(layers, tiny), limits, device, disk, max_step_tokens=64, max_sequences=1, max_length=512) as booted:
            found["disk"] = facts(booted) | decode(booted, 1, 32, 2, warm=1)
    for ours, theirs in (("host", "cpu"), ("disk", "disk")):
        ratio = found[f"accelerate_{theirs}"]["mean_s"] / found[ours]["mean_s"]
        found[f"{ours}_ratio"] = ratio
        row(f"penstock, the same layers on {ours}", found[ours]["mean_s"], f"{ratio:.2f} times as fast as accelerate")
    rate = found["disk"]["read"] / found["disk"]["mean_s"]
    found |= {"disk_ceiling": ceiling, "disk_of_ceiling": rate / ceiling}
    row("", found["disk"]["mean_s"], f"{format_rate(rate)} of {format_rate(ceiling)} = {rate / ceiling:.1%}")
    return found


def part_machine(device: torch.device, tiny: bool, directory: Path, window: bool) -> dict[str, object]:
    """80 layers, 16 GiB of device and 100 GiB of host memory, the rest on disk; or sliding windows over the same."""
    layers, found = (80 if not tiny else 12), {}
    config = shape(layers, tiny)
    spec = Shape.of(config)
    layouts = group_layouts(spec.spec, spec.names, spec.spec.dtype)
    layer = sum(padded(layout) for layout in layouts if layout.id.layer == 0)
    budgets = {"device_memory": "16GiB", "host_memory": "100GiB"} if not tiny else {"device_memory": "72MiB", "host_memory": "92MiB"}
    limits = None
    if window:
        # As described for sliding windows: six layers on the device, forty in host memory, all of them read again in every pass.
        limits = Limits(6 * layer, (40 if not tiny else 4) * layer, resident=0, kept=0, device_ring=6 * layer)
        budgets = {} if tiny else {"device_memory": "16GiB"}
    with scratch(directory, 20 * GIB, layouts, spec.spec.dtype) as disk, Peak(device) as peak:
        before = disk_ceiling(disk[1], seconds=1.0 if tiny else 4.0)
        settings = {
            "max_step_tokens": 2048 if not tiny else 64,
            "max_sequences": 32,
            "max_length": 2304,
            "block_size": 16,
            "kv_blocks": 160 if not tiny else 200,
        }
        with running(config, limits, device, disk, **budgets, **settings) as booted:
            found |= facts(booted)
            for batch in (1,) if window else (1, 32):
                found[f"decode_{batch}"] = decode(booted, batch, 16, 1 if window else 3, warm=0 if window else 1)
            if not window:
                found["prefill"] = {"tokens": 2048 if not tiny else 64, "seconds": prefill(booted, 2048 if not tiny else 64, 2)}
            rates = booted.weights.rates
        after = disk_ceiling(disk[1], seconds=1.0 if tiny else 4.0)
    found |= {"disk_before": before, "disk_after": after, "peak_device": peak.device, "peak_host": peak.host}
    if not window:
        found["plan"] = planned(spec, rates, (before + after) / 2, matmul_rate(device, torch.bfloat16), budgets, tiny)
        times = found["prefill"]["seconds"]
        for name, seconds in (("decode", found["decode_1"]["mean_s"]), ("prefill", sum(times) / len(times))):
            then = found["plan"][name]
            row(f"plan, {name}", then, f"measured {seconds:.3f} s, {then / seconds - 1:+.1%}")
    for batch in (1,) if window else (1, 32):
        one = found[f"decode_{batch}"]
        name = "sliding windows" if window else "16 GiB device, 100 GiB host"
        row(
            f"80 layers, {name}, batch {batch}",
            one["mean_s"],
            f"predicted {found['predicted_s']:.2f} s; {one['mean_s'] / batch:.3f} s a token; "
            f"disk {format_rate(one['read_per_pass'] / one['mean_s'])} of {format_rate((before + after) / 2)}; "
            f"peak device {format_size(peak.device)}, host {format_size(peak.host)}",
        )
    return found


def planned(spec: Shape, rates: Rates, disk: float, operations: float, budgets: dict[str, str], tiny: bool) -> dict[str, float]:
    """Seconds of a pass that `penstock plan` forecasts for these budgets, with the disk's rate of this run."""
    device, host = (parse_size(size) for size in budgets.values())
    if tiny:  # No GPU's context takes of this, and no process beside it.
        device, host = device + CONTEXT + (1 << 20), host - device + PROCESS
    there = Machine(device, host, dataclasses.replace(rates, disk_to_host=disk), operations)
    tokens = 2048 if not tiny else 64
    decode = forecast(spec.spec, spec.names, there, Work(spec.spec.dtype, 1, 2304, tokens)).decode
    prefill = forecast(spec.spec, spec.names, there, Work(spec.spec.dtype, 1, tokens, tokens)).prefill
    return {"decode": decode.seconds, "prefill": prefill.seconds}


def part_mixture(device: torch.device, tiny: bool) -> dict[str, object]:
    """A mixture of experts with room for a third of it on the device and the rest in host memory; random weights choose evenly."""
    config = json.loads((Path(__file__).parent / "shapes" / "Qwen3-30B-A3B" / "config.json").read_text())
    if tiny:
        config |= {"hidden_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 4, "num_experts": 16, "vocab_size": 4096}
    spec = Shape.of(config)
    layouts = group_layouts(spec.spec, spec.names, spec.spec.dtype)
    total, largest = sum(map(padded, layouts)), max(map(padded, layouts))
    found: dict[str, object] = {"link": link_ceiling(device, tiny)}
    limits = Limits(total // 3 + 2 * largest, total)
    with running(config, limits, device, max_step_tokens=256 if not tiny else 32, max_sequences=16, max_length=512) as booted:
        found |= facts(booted)
        for batch in (1, 16):
            one = found[f"decode_{batch}"] = decode(booted, batch, 16, 40 if not tiny else 4, warm=20 if not tiny else 2)
            rate = one["copied_per_pass"] / one["mean_s"]
            text = f"{format_size(one['copied_per_pass'])} a pass, {format_rate(rate)} of {format_rate(found['link'])}"
            row(f"mixture, a third on the device, batch {batch}", one["mean_s"], text)
    return found


def share(one: dict[str, object], ceiling: float) -> str:
    return f"{format_rate(one['rate'])} of {format_rate(ceiling)} = {one['of_ceiling']:.1%}"


def row(what: str, seconds: float, text: str) -> None:
    print(f"{what:<55} {seconds:9.4f} s  {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--directory", type=Path, default=Path("/tmp"), help="where what rests on disk is written")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    device = torch.device(given.device)
    found: dict[str, object] = {"environment": dataclasses.asdict(machine()), "tiny": given.tiny}
    work: dict[str, Callable[[], object]] = {
        "host": lambda: part_host(device, given.tiny),
        "disk": lambda: part_disk(device, given.tiny, given.directory),
        "offload": lambda: part_offload(device, given.tiny, given.directory),
        "machine": lambda: part_machine(device, given.tiny, given.directory, False),
        "window": lambda: part_machine(device, given.tiny, given.directory, True),
        "mixture": lambda: part_mixture(device, given.tiny),
    }
    for part in given.parts.split(","):
        begin = time.perf_counter()
        try:
            found[part] = work[part]()
        except Exception as fault:  # What the other parts found is not lost for it.
            traceback.print_exc()
            found[part] = {"failed": f"{type(fault).__name__}: {fault}"}
        say(f"{part}: {time.perf_counter() - begin:.0f} s")
        if given.out:
            given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
