"""Measure contexts with KV in host memory, against the same engine with KV on the device, the link, and
transformers' offloaded cache.

    python benchmarks/long_contexts.py --out results.json            8B and 1B shapes, random weights, on CUDA
    python benchmarks/long_contexts.py --tiny                   the same course on small shapes, on any device

Ceilings are measured beside the work. Decode steps are timed when they are warm (see penstock.bench.warming),
and so is everything of `peer`; other prompts are timed once, after a shorter one. `--parts` takes a few of:
tiles, peer, peer_at_once, shared, long, million, disk, weights, policies. Parts may be run by several
commands that write to one file. Where there is no git, PENSTOCK_COMMIT says which commit the sources are of.
"""

import argparse
import dataclasses
import gc
import os
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from recording import Recording
from weight_streaming import GREEDY, Peak, disk_ceiling, link_ceiling, row, say, sync, versions

from penstock.arch.bounds import prefill_operations
from penstock.arch.layout import group_layouts
from penstock.base.config import Config
from penstock.base.units import format_rate, format_size
from penstock.bench.shapes import SHAPES
from penstock.bench.warming import BRIEF, RULE, Rule, timed
from penstock.engine.boot import Booted, boot
from penstock.engine.placing import Override
from penstock.kv.movement.carrier import Carrier
from penstock.memory.device import total_memory
from penstock.memory.probe import matmul_rate
from penstock.ops.attention.dense import dense
from penstock.ops.attention.inputs import LayerAttention
from penstock.weights.checkpoint.shape import Shape
from penstock.weights.streaming.residency import PIECE, WeightLimits, padded

PARTS = ("tiles", "peer", "peer_at_once", "shared", "long", "million", "disk", "weights", "policies")
GIB = 1 << 30
K = 1024


class Scale:
    """Real shapes and lengths, or such as a small machine can do."""

    def __init__(self, tiny: bool, block: int = 32) -> None:
        self.tiny = tiny
        self.k = 4 if tiny else K
        """What "K" is worth in the lengths below."""
        self.block = 4 if tiny else block

    def shape(self, name: str) -> dict[str, object]:
        config = dict(SHAPES["8B"])
        if name == "1B":
            config |= {
                "hidden_size": 2048,
                "intermediate_size": 8192,
                "num_hidden_layers": 16,
                "head_dim": 64,
                "tie_word_embeddings": True,
            }
        if self.tiny:
            small = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 512}
            config |= small | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
        return config | {"max_position_embeddings": 4 << 20}


@contextmanager
def running(scale: Scale, name: str, device: torch.device, **settings: object) -> Iterator[Booted]:
    config = Config(Path(), device=str(device), block_size=scale.block, **settings)  # type: ignore[arg-type]
    booted = boot(config, Shape.of(scale.shape(name)), say=say)
    try:
        yield booted
    finally:
        booted.engine.close()
        del booted
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


class Clock:
    """Times of points in the device's work, without waiting for them."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[object] = []

    def mark(self) -> None:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def spans(self) -> list[float]:
        if not self._cuda:
            return [after - before for before, after in zip(self._marks, self._marks[1:], strict=False)]
        torch.cuda.synchronize()
        return [
            before.elapsed_time(after) / 1e3
            for before, after in zip(self._marks, self._marks[1:], strict=False)
        ]


def allocated(device: torch.device, *, peak: bool = False) -> int:
    if device.type == "cpu":
        return 0
    return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()


def prompt_of(tokens: int, seed: int, vocab: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(vocab) for _ in range(tokens)]


def carrier_of(booted: Booted) -> Carrier | None:
    return booted.engine._ranks.carrier  # type: ignore[union-attr]


def prefilled(booted: Booted, prompt: Sequence[int], device: torch.device) -> tuple[object, list[float]]:
    """The request after its first token, and the seconds of each chunk."""
    request = booted.engine.submit(prompt, GREEDY)
    clock, got = Clock(device), False
    clock.mark()
    while not got:
        got = any(event.token is not None for event in booted.engine.step())
        clock.mark()
    return request, clock.spans()


def decoded(booted: Booted, requests: int, steps: int, rule: Rule = RULE) -> dict[str, object]:
    carrier, moved = carrier_of(booted), [0]

    def step() -> float:
        begin = time.perf_counter()
        events = booted.engine.step()
        seconds = time.perf_counter() - begin
        assert len(events) == requests, events
        moved.append(carrier.ring.copied_bytes if carrier else 0)
        return seconds

    took = timed(step, steps, rule)
    mean, each = sum(took.seconds) / steps, (moved[-1] - moved[-steps - 1]) / steps
    return {
        "requests": requests,
        **took.record(),
        "mean_s": mean,
        "moved_per_step": each,
        "rate": each / mean,
    }


def bound(scale: Scale, name: str, tokens: int, flops: float, attention: float) -> float:
    """Seconds of a prompt's arithmetic, its products at the rate of products and its attention at the rate of
    attention."""
    shape = Shape.of(scale.shape(name))
    layouts = group_layouts(shape.spec, shape.names, shape.spec.dtype)
    everything = prefill_operations(shape.spec, layouts, [tokens])
    one = prefill_operations(shape.spec, layouts, [1]) * tokens
    return one / flops + max(everything - one, 0) / attention


def attention_rate(scale: Scale, name: str, device: torch.device, queries: int, keys: int) -> float:
    """Operations a second of the attention of `queries` over so many earlier keys."""
    spec = Shape.of(scale.shape(name)).spec
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    q = torch.randn(queries, spec.heads, spec.head_dim, device=device, dtype=kind)
    k, v = (torch.randn(keys, spec.kv_heads, spec.head_dim, device=device, dtype=kind) for _ in range(2))
    for _ in range(2):
        dense(q, k, v, LayerAttention(spec.head_dim**-0.5), causal=False)
    sync(device)
    begin, times = time.perf_counter(), 2 if scale.tiny else 20
    for _ in range(times):
        dense(q, k, v, LayerAttention(spec.head_dim**-0.5), causal=False)
    sync(device)
    return times * 4.0 * queries * keys * spec.heads * spec.head_dim / (time.perf_counter() - begin)


def host(scale: Scale, name: str, tokens: int) -> int:
    """Bytes of KV for so many tokens and a little more."""
    spec = Shape.of(scale.shape(name)).spec
    per_token = 2 * spec.layers * spec.kv_heads * spec.head_dim * (2 if spec.dtype == "bfloat16" else 4)
    return (tokens + 4 * scale.block) * per_token * (2 if scale.tiny else 1)


def far(scale: Scale, name: str, tokens: int, chunk: int, tile: int, **more: object) -> dict[str, object]:
    """Settings for KV in host memory, though the device could hold it."""
    return {
        "max_length": tokens + 64,
        "max_step_tokens": chunk,
        "max_sequences": 4,
        "kv_blocks": 64,
        "host_kv_memory": host(scale, name, tokens + 64),
        "kv_tile": tile,
        "prefix_cache": False,
        **more,
    }


def near(scale: Scale, tokens: int, chunk: int) -> dict[str, object]:
    """Settings for KV on the device."""
    blocks = -(-(tokens + 64) // scale.block)
    return {
        "max_length": tokens + 64,
        "max_step_tokens": chunk,
        "max_sequences": 4,
        "kv_blocks": blocks,
        "prefix_cache": False,
    }


def part_tiles(scale: Scale, device: torch.device) -> dict[str, object]:
    """64K tokens of 8B: tiles of two sizes, KV in host memory and on the device."""
    tokens, chunk, found = 64 * scale.k, 16 * scale.k, {}
    found["link"] = link_ceiling(device, scale.tiny)
    found["attention"] = attention_rate(scale, "8B", device, chunk, chunk)
    found["matmul"] = matmul_rate(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    found["bound_s"] = bound(scale, "8B", tokens, found["matmul"], found["attention"])
    say(f"attention {found['attention'] / 1e12:.0f} TFLOP/s, products {found['matmul'] / 1e12:.0f}")
    settings = {
        f"tiles of {tile // scale.k}K": far(scale, "8B", tokens, chunk, tile)
        for tile in (16 * scale.k, 8 * scale.k)
    }
    settings["on the device"] = near(scale, tokens, chunk)
    for what, chosen in settings.items():
        with running(scale, "8B", device, **chosen) as booted:
            prompt = prompt_of(tokens, 1, booted.spec.vocab_size)
            request, _ = prefilled(booted, prompt, device)
            booted.engine.stop(request)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            request, chunks = prefilled(booted, prompt_of(tokens, 2, booted.spec.vocab_size), device)
            peak = torch.cuda.max_memory_allocated() - booted.weights.bytes if device.type == "cuda" else 0
            found[what] = {
                "chunks": chunks,
                "prefill_s": sum(chunks),
                "peak": peak,
                "decode": decoded(booted, 1, 4 if scale.tiny else 12),
            }
            one = found[what]["decode"]
            row(
                f"prefill of 64K, {what}",
                sum(chunks),
                f"bound {found['bound_s'] / sum(chunks):.1%}; beside weights {format_size(peak)}",
            )
            row(
                f"decode at 64K, {what}",
                one["mean_s"],
                f"{format_rate(one['rate'])} of {format_rate(found['link'])}",
            )
            if carrier_of(booted):
                one["of_link"] = one["rate"] / found["link"]
    return found


def part_peer(scale: Scale, device: torch.device, at_once: bool) -> dict[str, object]:
    """transformers with its offloaded cache at 64K, in chunks of 16K or at once, and penstock with as much
    memory beside the weights and with the least that it needs: prompts one after another, each with a cache
    of its own, and then decode steps, all of them warm."""
    from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

    tokens, chunk, prompts, steps = 64 * scale.k, 16 * scale.k, 3, 24
    piece = tokens if at_once else chunk
    config = AutoConfig.for_model(**scale.shape("8B"))
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
    prompt, cache, token = torch.tensor([prompt_of(tokens, 1, 500)], device=device), None, None

    @torch.inference_mode()
    def theirs() -> float:
        nonlocal cache, token
        cache = token = None
        gc.collect()
        cache = DynamicCache(config=config, offloading=device.type == "cuda")
        sync(device)
        begin = time.perf_counter()
        for start in range(0, tokens, piece):
            out = model(
                prompt[:, start : start + piece], past_key_values=cache, use_cache=True, logits_to_keep=1
            )
        token = out.logits[:, -1:].argmax(-1)
        token.item()
        return time.perf_counter() - begin

    @torch.inference_mode()
    def their_step() -> float:
        nonlocal token
        begin = time.perf_counter()
        token = model(
            token.view(1, 1), past_key_values=cache, use_cache=True, logits_to_keep=1
        ).logits.argmax(-1)
        token.item()
        return time.perf_counter() - begin

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before = allocated(device)
    prefill, decode = timed(theirs, prompts, BRIEF), timed(their_step, steps)
    peak = allocated(device, peak=True) - before
    row("transformers, offloaded cache, 64K, prefill", prefill.median, str(prefill))
    row("transformers, offloaded cache, 64K, decode", decode.median, str(decode))
    found: dict[str, object] = {
        "tokens": tokens,
        "tokens_at_a_time": piece,
        "versions": versions(),
        "link": 0.0,
    }
    found["transformers"] = {"prefill": prefill.record(), "decode": decode.record(), "peak": peak}
    model = cache = token = prompt = None
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    found["link"] = link_ceiling(device, scale.tiny)
    beside, blocks = 0, 64
    for what, room in (("with the least memory", 0), ("with its memory", peak)):
        if room and device.type == "cuda":
            blocks = max(64, int(room - beside) // host(scale, "8B", scale.block - 4 * scale.block))
        with running(
            scale, "8B", device, **far(scale, "8B", tokens, chunk, chunk, kv_blocks=blocks)
        ) as booted:
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            one = ours(scale, booted, device, tokens, prompts, steps)
            one |= {"blocks": blocks, "peak": allocated(device, peak=True) - booted.weights.bytes}
            beside = beside or one["peak"] - blocks * host(scale, "8B", scale.block - 4 * scale.block)
        one["prefill_ratio"] = prefill.median / one["prefill"]["median_s"]
        one["decode_ratio"] = decode.median / one["decode"]["median_s"]
        found[f"penstock, {what}"] = one
        text = (
            f"{one['prefill_ratio']:.2f} times as fast; decode {one['decode']['median_s']:.4f} s, "
            f"{one['decode_ratio']:.2f} times; "
        )
        row(
            f"penstock, 64K, {what}",
            one["prefill"]["median_s"],
            text + f"{format_size(one['peak'])} beside the weights",
        )
    return found


def ours(
    scale: Scale, booted: Booted, device: torch.device, tokens: int, prompts: int, steps: int
) -> dict[str, object]:
    """Prompts one after another, and decode steps behind the last of them."""
    request = None

    def prompt() -> float:
        nonlocal request
        if request is not None:
            booted.engine.stop(request)
        sync(device)
        asked, begin = prompt_of(tokens, 1, booted.spec.vocab_size), time.perf_counter()
        request, _ = prefilled(booted, asked, device)
        return time.perf_counter() - begin

    took = timed(prompt, prompts, BRIEF)
    return {"prefill": took.record(), "decode": decoded(booted, 1, steps)}


def part_shared(scale: Scale, device: torch.device) -> dict[str, object]:
    """Two requests of 128K tokens, of which they share 120K, decoded together and one after the other."""
    tokens, common, found = 128 * scale.k, 120 * scale.k, {}
    settings = far(scale, "8B", tokens + 16 * scale.k, 16 * scale.k, 16 * scale.k, prefix_cache=True)
    with running(scale, "8B", device, **settings) as booted:
        vocab = booted.spec.vocab_size
        both = [prompt_of(common, 1, vocab) + prompt_of(tokens - common, seed, vocab) for seed in (2, 3)]
        first, _ = prefilled(booted, both[0], device)
        alone = decoded(booted, 1, 4 if scale.tiny else 10)
        booted.engine.submit(both[1], GREEDY)
        while booted.engine.scheduler.running < 2 or len(booted.engine.step()) < 2:
            booted.engine.step()
        together = decoded(booted, 2, 4 if scale.tiny else 10)
        found |= {"alone": alone, "together": together, "gain": 2 * alone["mean_s"] / together["mean_s"]}
        row(
            "two of 128K that share 120K, decode",
            together["mean_s"],
            f"alone {alone['mean_s']:.4f} s; together {found['gain']:.2f} times",
        )
        del first
    return found


def part_long(scale: Scale, device: torch.device) -> dict[str, object]:
    """512K tokens of 8B: memory and rates by length."""
    tokens, chunk, found = 512 * scale.k, 16 * scale.k, {}
    found["link_before"] = link_ceiling(device, scale.tiny)
    found["attention"] = attention_rate(scale, "8B", device, chunk, chunk)
    found["matmul"] = matmul_rate(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    lengths = {"host": tokens, "device": tokens // 2}
    for what, length in lengths.items():
        chosen = (
            far(scale, "8B", length, chunk, 16 * scale.k) if what == "host" else near(scale, length, chunk)
        )
        marks = [mark * scale.k for mark in (32, 64, 128, 256, 512) if mark * scale.k <= length]
        with running(scale, "8B", device, **chosen) as booted, Peak(device) as peak:
            prompt = prompt_of(length, 1, booted.spec.vocab_size)
            request, _ = prefilled(booted, prompt[: 4 * chunk], device)
            short = decoded(booted, 1, 4 if scale.tiny else 12)
            booted.engine.stop(request)
            row(
                "decode at 64K",
                short["mean_s"],
                f"{format_rate(short['rate'])} of {format_rate(found['link_before'])}",
            )
            request, clock, peaks, got = booted.engine.submit(prompt, GREEDY), Clock(device), {}, False
            clock.mark()
            at = 0
            while not got:
                if device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                got = any(event.token is not None for event in booted.engine.step())
                clock.mark()
                at += chunk
                if device.type == "cuda":
                    peaks[at] = torch.cuda.max_memory_allocated() - booted.weights.bytes
            chunks = clock.spans()
            one = found[what] = {"chunks": chunks, "peaks": peaks, "decode_64K": short}
            for mark in marks:
                seconds = sum(chunks[: mark // chunk])
                limit = bound(scale, "8B", mark, found["matmul"], found["attention"])
                one[f"prefill_{mark}"] = {
                    "seconds": seconds,
                    "tokens_per_s": mark / seconds,
                    "of_bound": limit / seconds,
                }
                text = (
                    f"{mark / seconds:,.0f} tokens/s, {limit / seconds:.1%} of the bound; "
                    f"{format_size(peaks.get(mark, 0))} beside"
                )
                row(f"prefill of {mark // scale.k}K, KV on the {what}", seconds, text)
            one["decode"] = decoded(booted, 1, 4, BRIEF)
            row(
                f"decode at {length // scale.k}K",
                one["decode"]["mean_s"],
                f"{format_rate(one['decode']['rate'])} of {format_rate(found['link_before'])}",
            )
            one["peak_host"] = peak.host
    found["link_after"] = link_ceiling(device, scale.tiny)
    return found


def part_million(scale: Scale, device: torch.device) -> dict[str, object]:
    """A million tokens of 1B under 8 GiB of device memory."""
    tokens, chunk, found = 1024 * scale.k, 16 * scale.k, {}
    found["link"] = link_ceiling(device, scale.tiny)
    found["attention"] = attention_rate(scale, "1B", device, chunk, chunk)
    found["matmul"] = matmul_rate(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    settings = far(scale, "1B", tokens, chunk, 32 * scale.k)
    if not scale.tiny:
        settings["device_memory"] = 8 * GIB
    with running(scale, "1B", device, **settings) as booted, Peak(device) as peak:
        begin = time.perf_counter()
        _, chunks = prefilled(booted, prompt_of(tokens, 1, booted.spec.vocab_size), device)
        found |= {"boot_s": booted.seconds, "chunks": chunks, "prefill_s": time.perf_counter() - begin}
        found["bound_s"] = bound(scale, "1B", tokens, found["matmul"], found["attention"])
        one = found["decode"] = decoded(booted, 1, 4, BRIEF)
    found |= {"peak_device": peak.device, "peak_host": peak.host}
    text = (
        f"{found['bound_s'] / found['prefill_s']:.1%} of the bound; peak {format_size(peak.device)} of the "
        "device"
    )
    row("prefill of 1M tokens of 1B", found["prefill_s"], text)
    row("decode at 1M", one["mean_s"], f"{format_rate(one['rate'])} of {format_rate(found['link'])}")
    return found


def part_disk(scale: Scale, device: torch.device) -> dict[str, object]:
    """64K tokens of 8B, all but 2K of them on disk."""
    tokens, chunk, found = 64 * scale.k, 16 * scale.k, {}
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "ceiling"
        with file.open("wb") as out:
            for _ in range(4 if scale.tiny else 512):
                out.write(random.randbytes(PIECE // 16) * 16)
            os.fsync(out.fileno())
        found["disk_before"] = disk_ceiling(file, seconds=0.5 if scale.tiny else 5.0)
        disk = {"disk_kv_memory": 4 * host(scale, "8B", tokens), "kv_directory": Path(directory)}
        settings = far(scale, "8B", tokens, chunk, 16 * scale.k, **disk) | {
            "host_kv_memory": host(scale, "8B", 2 * scale.k)
        }
        with running(scale, "8B", device, **settings) as booted:
            _, chunks = prefilled(booted, prompt_of(tokens, 1, booted.spec.vocab_size), device)
            carrier = carrier_of(booted)
            assert carrier is not None
            found["written"] = carrier.disk.written_bytes
            before = carrier.disk.read_bytes
            found["prefill_s"], found["decode"] = sum(chunks), decoded(booted, 1, 4, BRIEF)
            read = (carrier.disk.read_bytes - before) / (4 + len(found["decode"]["warming_s"]))
        found["disk_after"] = disk_ceiling(file, seconds=0.5 if scale.tiny else 5.0)
    ceiling = (found["disk_before"] + found["disk_after"]) / 2
    rate = read / found["decode"]["mean_s"]
    found |= {"read_per_step": read, "rate": rate, "of_ceiling": rate / ceiling}
    row("prefill of 64K, KV on disk", found["prefill_s"], f"{format_size(found['written'])} written")
    row(
        "decode at 64K, KV on disk",
        found["decode"]["mean_s"],
        f"{format_rate(rate)} of {format_rate(ceiling)} = {rate / ceiling:.1%}",
    )
    return found


def part_weights(scale: Scale, device: torch.device) -> dict[str, object]:
    """64K tokens of 8B in host memory, with half of the weights there too."""
    tokens, chunk, found = 64 * scale.k, 8 * scale.k, {}
    found["link_before"] = link_ceiling(device, scale.tiny)
    shape = Shape.of(scale.shape("8B"))
    sizes = [padded(layout) for layout in group_layouts(shape.spec, shape.names, shape.spec.dtype)]
    override = Override(WeightLimits(sum(sizes) // 2 + 2 * max(sizes), 2 * sum(sizes)))
    config = Config(
        Path(), device=str(device), block_size=scale.block, **far(scale, "8B", tokens, chunk, 16 * scale.k)
    )  # type: ignore[arg-type]
    booted = boot(config, shape, say=say, override=override)
    try:
        _, chunks = prefilled(booted, prompt_of(tokens, 1, booted.spec.vocab_size), device)
        before = booted.weights.stats().copied
        one = decoded(booted, 1, 6)
        weights = (booted.weights.stats().copied - before) / (6 + len(one["warming_s"]))
    finally:
        booted.engine.close()
    rate = (weights + one["moved_per_step"]) / one["mean_s"]
    found |= {
        "prefill_s": sum(chunks),
        "decode": one,
        "weights_per_step": weights,
        "rate": rate,
        "link_after": link_ceiling(device, scale.tiny),
    }
    text = f"{format_size(weights)} of weights and {format_size(one['moved_per_step'])} of KV a step"
    row("prefill of 64K, weights and KV on the host", sum(chunks), "")
    row(
        "decode at 64K, weights and KV on the host",
        one["mean_s"],
        f"{text}, {format_rate(rate)} of {format_rate(found['link_before'])}",
    )
    return found


def part_policies(scale: Scale, device: torch.device) -> dict[str, object]:
    """Decoding at 128K tokens of 8B when a sixteenth of the blocks is read, and with KV in fp8."""
    tokens, chunk, found = 128 * scale.k, 16 * scale.k, {}
    ways = {
        "full": {},
        "topk": {"attention_policy": f"topk:{tokens // scale.block // 16}"},
        "window": {"attention_policy": f"window:{scale.k},{tokens // 16}"},
        "fp8": {"host_kv_dtype": "fp8"},
    }
    for what, more in ways.items():
        with running(scale, "8B", device, **far(scale, "8B", tokens, chunk, 16 * scale.k, **more)) as booted:
            _, chunks = prefilled(booted, prompt_of(tokens, 1, booted.spec.vocab_size), device)
            found[what] = {"prefill_s": sum(chunks), "decode": decoded(booted, 1, 4 if scale.tiny else 8)}
            carrier = carrier_of(booted)
            if carrier is not None and carrier.chosen is not None:
                found[what]["missed"] = dataclasses.asdict(carrier.chosen.missed.stats)
            row(
                f"decode at 128K, {what}",
                found[what]["decode"]["mean_s"],
                f"prefill {sum(chunks):.2f} s {found[what].get('missed', '')}",
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    device, scale = torch.device(given.device), Scale(given.tiny)
    recording, failed = (
        Recording(given.out, bench="long_contexts", tiny=given.tiny, host=total_memory(torch.device("cpu"))),
        list[str](),
    )
    work: dict[str, Callable[[Scale, torch.device], dict[str, object]]] = {
        "tiles": part_tiles,
        "peer": partial(part_peer, at_once=False),
        "peer_at_once": partial(part_peer, at_once=True),
        "shared": part_shared,
        "long": part_long,
        "million": part_million,
        "disk": part_disk,
        "weights": part_weights,
        "policies": part_policies,
    }
    for part in given.parts.split(","):
        begin = time.perf_counter()
        try:
            found = work[part](scale, device)
        except Exception as fault:  # What the other parts found is not lost for it.
            traceback.print_exc()
            found = {"failed": f"{type(fault).__name__}: {fault}"}
            failed.append(part)
        print(f"  {part}: {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
        recording.part(part, found)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
