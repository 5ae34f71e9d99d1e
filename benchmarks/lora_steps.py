"""Time decode steps with LoRA adapters beside steps with none, in one engine and in turn.

    PYTHONPATH=src python3 benchmarks/lora_steps.py --out adapters.json
    PYTHONPATH=src python3 benchmarks/lora_steps.py --tiny --device cpu      the same code over a tiny shape

Weights are random, in the shape of Llama-3.1-8B, in bfloat16; adapters are random, on all linear layers, and
are loaded from files. Each round times the same batch with no adapter, with one adapter for all requests, and
with as many different adapters as --adapters says, and begins with another of these. A figure is the median
of the steps of all rounds, after a round that is not counted; the medians of the rounds stand beside it.
`over none` is what a step takes longer, at most 15 % is the aim for 8 adapters. `--apart` computes products
and those of adapters in kernels of their own, as few bits are. `--kernels` traces what each
kernel takes, too. Exit status 1 if requests of different adapters were answered alike, so that something else
was timed.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from execution import TINY, by_kernel, row, tell_kernels
from recording import Recording
from safetensors.torch import save_file

from penstock.arch.lora import lora_places
from penstock.arch.shards import WHOLE
from penstock.arch.spec import ModelSpec
from penstock.base.config import Config
from penstock.bench.speed import measure
from penstock.engine.boot import Booted, boot
from penstock.ops.lora import LoraMatrix
from penstock.step.plan import RequestId
from penstock.weights.checkpoint.lora import CONFIG, TENSORS, Adapter
from penstock.weights.checkpoint.shape import Shape

AIM = 0.15
SHAPE = Path(__file__).resolve().parent / "shapes" / "Llama-3.1-8B" / "config.json"


def write_adapter(folder: Path, spec: ModelSpec, rank: int, seed: int) -> None:
    """An adapter of random numbers for all places of a model, as PEFT writes it. It changes products about as
    much as they are."""
    generator, tensors = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
    for module, place in lora_places(spec, WHOLE).items():
        height, width = place.source.shape
        for side, shape, spread in (("A", (rank, width), width**-0.5), ("B", (height, rank), rank**-0.5)):
            numbers = torch.empty(shape, dtype=torch.bfloat16).normal_(0, spread, generator=generator)
            tensors[f"base_model.model.{module}.lora_{side}.weight"] = numbers
    folder.mkdir()
    save_file(tensors, folder / TENSORS)
    said = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}
    (folder / CONFIG).write_text(json.dumps(said))


def load(booted: Booted, count: int, rank: int) -> tuple[list[str], list[float]]:
    """Adapters in all places of an engine: their names, and the seconds that each took to load."""
    names, seconds = [f"adapter-{number}" for number in range(count)], []
    for seed, name in enumerate(names):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, name)
            write_adapter(path, booted.spec, rank, seed)
            begin = time.perf_counter()
            adapter = Adapter.read(path, booted.spec, booted.dtype)
            booted.engine.adapters.add(name, adapter)
            seconds.append(time.perf_counter() - begin)
    return names, seconds


def prompts_of(count: int, length: int, vocab: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(vocab) for _ in range(length)] for _ in range(count)]


def begun(booted: Booted, prompts: Sequence[Sequence[int]], names: Sequence[str]) -> dict[RequestId, int]:
    """Requests that decode, in turn with these adapters: of each, how many tokens it has yielded."""
    engine = booted.engine
    got = {
        engine.submit(prompt, measure.sampling(), lora=names[at % len(names)]): 0
        for at, prompt in enumerate(prompts)
    }
    while not all(got.values()):
        measure.step(engine, got)
    for _ in range(measure.WARM_STEPS):
        measure.step(engine, got)
    return got


def end(booted: Booted, got: Mapping[RequestId, int]) -> None:
    for request in got:
        booted.engine.stop(request)
    while booted.engine.busy:
        booted.engine.step()


def answers(booted: Booted, names: Sequence[str], vocab: int) -> list[tuple[int, ...]]:
    """Greedy tokens for one prompt with each adapter, all at once."""
    (prompt,) = prompts_of(1, 20, vocab)
    engine = booted.engine
    got = {engine.submit(prompt, measure.sampling(), 12, lora=name): list[int]() for name in names}
    while engine.busy:
        for event in engine.step():
            if event.token is not None:
                got[event.request].append(event.token)
    return [tuple(tokens) for tokens in got.values()]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--context", type=int, default=512, help="prompt tokens of each request")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=64, help="timed steps of a setting in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--apart", action="store_true")
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    shape: Mapping[str, Any] = TINY if given.tiny else json.loads(SHAPE.read_text())
    context, steps = (20, 8) if given.tiny else (given.context, given.steps)
    recording = Recording(given.out, bench="adapters", tiny=given.tiny)
    config = Config(
        Path(),
        device=given.device,
        max_length=context + given.batch + 8 * steps,
        max_sequences=given.batch,
        max_loras=given.adapters,
        max_lora_rank=given.rank,
        prefix_cache=False,
    )
    told = list[str]()
    with ExitStack() as opened:
        if given.apart:
            opened.enter_context(patch.object(LoraMatrix, "product", lambda *given, **how: None))
        booted = boot(config, Shape.of(shape), say=told.append)
        opened.enter_context(closing(booted.engine))
        for line in told:
            print(f"  {line}")
        names, loading = load(booted, given.adapters, given.rank)
        row("an adapter is loaded in", f"{median(loading):.3g} s")
        vocab = booted.spec.vocab_size
        said = answers(booted, ["", *names], vocab)
        apart = len(set(said)) == len(said)
        settings = {"none": [""], "one": names[:1], "different": names}
        prompts = prompts_of(given.batch, context, vocab)
        seconds: dict[str, list[list[float]]] = {name: [] for name in settings}
        for number in range(given.rounds + 1):
            turn = number % len(settings)
            order = [*settings][turn:] + [*settings][:turn]
            for name in order:
                got = begun(booted, prompts, settings[name])
                timed = measure.time_decode(booted, got, steps).seconds
                end(booted, got)
                if number:
                    seconds[name].append(timed)
        found: dict[str, object] = {
            "shape": "tiny" if given.tiny else SHAPE.parent.name,
            "batch": given.batch,
            "context": context,
            "adapters": given.adapters,
            "rank": given.rank,
            "dtype": booted.dtype,
            "device": str(booted.device),
            "said": told,
            "load_s": loading,
            "answers_differ": apart,
            "kernels_apart": given.apart,
        }
        base = median(each for one in seconds["none"] for each in one)
        for name, rounds in seconds.items():
            mine = median(each for one in rounds for each in one)
            over = mine / base - 1
            medians = [median(one) * 1e3 for one in rounds]
            found[name] = {"ms": mine * 1e3, "over_none": over, "rounds_ms": medians}
            what = {"none": "no adapter", "one": "one adapter for all"}.get(name, f"{len(names)} adapters")
            aim = f", aim {AIM:.0%}" if name == "different" else ""
            span = f"{min(medians):.3f} to {max(medians):.3f}"
            row(f"decode, {what}", f"{mine * 1e3:.3f} ms ({span}); over none {over:+.1%}{aim}")
        if given.kernels:
            for name in settings:
                got = begun(booted, prompts, settings[name])
                count = steps // 2
                taken = by_kernel(
                    lambda got=got, count=count: [measure.step(booted.engine, got) for _ in range(count)],
                    count,
                    booted.device,
                )
                end(booted, got)
                found[f"kernels_{name}"] = one = {"ms": taken["traced_ms"], **taken}
                tell_kernels(name, one)
        recording.part(f"batch_{given.batch}{'_apart' if given.apart else ''}", found)
    if not apart:
        print("requests of different adapters were answered alike", file=sys.stderr)
    return int(not apart)


if __name__ == "__main__":
    sys.exit(main())
