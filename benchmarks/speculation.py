"""Measure speculative decoding where a given number of tokens holds of every draft, beside plain decoding.

    PYTHONPATH=src python3 benchmarks/speculation.py --shape 8B --device-memory 6GiB --out speculation.json
    PYTHONPATH=src python3 benchmarks/speculation.py --drafts suffix --prompt "Say it twice: ..."
    PYTHONPATH=src python3 benchmarks/speculation.py --shape 8B --drafts self --device-memory 6GiB

Weights of a shape are random, so nothing can be said of how often drafts hold. So first the tokens are
decoded without drafts. Then a drafter that knows them proposes as many as are to hold, and wrong ones behind
them, and the engine verifies what pays by its own measurements. Every token is compared. In half precision
rounding may turn one; then that output goes another way, its drafts fail, and the share of it is reported.
Random weights make near ties everywhere, so outputs of a shape have a bias that makes each a single token
again and again; what is computed is the same. With and without drafts are processes of their own, so that
both have the same memory.

`--drafts` suffix, self, auto, mtp or a draft model measures the drafter itself instead, with what really
holds. All but suffix and mtp may be of a shape too, whose random weights are written to a checkpoint first:
the copy in four bits is made of one. A draft model may then be a shape itself, with as many tokens. The bias
makes nearly all drafts hold, so what is measured there is what drafts, and trees of them, cost. On a CPU a
draft model and a copy grow trees where weights stream (`--weight-memory`).
"""

import argparse
import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TypeVar

from random_checkpoint import write_checkpoint
from recording import Recording

from penstock.api.opening import boot_model, open_weights
from penstock.api.text.tokenizer import Tokenizer
from penstock.arch.formats.dense import DENSE
from penstock.arch.formats.recipe import config_in
from penstock.base.config import CACHE, SHIPPED_MODEL, Config
from penstock.base.units import parse_size
from penstock.bench.shapes import HOST_LAYERS_OF, LAYERS_OF, SHAPES
from penstock.bench.speed.measure import check_sound, sampling
from penstock.engine.boot import Booted, boot
from penstock.engine.placing import Override
from penstock.hub.models import locate
from penstock.sched.request import Request
from penstock.sched.suffix import Draft
from penstock.step.plan import RequestId
from penstock.weights.checkpoint.shape import Shape
from penstock.weights.streaming.residency import WeightLimits

Outputs = Mapping[tuple[int, ...], Sequence[int]]
T = TypeVar("T")
EVERY_SHAPE = {name: shape for name, (shape, _) in (*LAYERS_OF.items(), *HOST_LAYERS_OF.items())} | {**SHAPES}
CERTAIN = 1e4
"""Bias of a token that is certain."""
WARM = 4
"""Passes behind the first token that are not timed."""


class Oracle:
    """Drafts tokens of which so many hold, by outputs that are known, and wrong ones behind them.

    truth: outputs by prompt. holds: tokens that a pass is to yield, its own included. drafted: tokens of a
    draft.
    """

    def __init__(self, truth: Outputs, vocabulary: int) -> None:
        self._truth, self._vocabulary = truth, vocabulary
        self.holds, self.drafted = 1, 16

    def propose(self, request: Request, most: int) -> Draft:
        """Return the draft. Where the output is another than the known one, nothing of it is likely to
        hold."""
        said = request.known - len(request.prompt)
        known = self._truth[request.prompt][said : said + self.drafted]
        right = list(known[: self.holds - 1])
        wrong = [(token + 1) % self._vocabulary for token in known[self.holds - 1 :]]
        tokens = (right + wrong)[: min(most, self.drafted)]
        scores = [1.0] * len(right) + [0.5] * len(wrong)
        return Draft(tuple(tokens), tuple(scores[: len(tokens)]), 1)


@dataclass(frozen=True, slots=True)
class Spoken:
    """Holds outputs by prompt, tokens a second behind the warm passes, and tokens a pass of one request."""

    outputs: dict[tuple[int, ...], list[int]]
    rate: float
    passes: float


def speak(booted: Booted, prompts: Sequence[Sequence[int]], asked: argparse.Namespace) -> Spoken:
    """Decode tokens behind each prompt, all together."""
    engine, output = booted.engine, asked.output
    ids: dict[RequestId, tuple[int, ...]] = {}
    for seed, prompt in enumerate(prompts):
        wishes = sampling(asked.temperature, seed)
        if asked.shape:
            wishes = replace(wishes, logit_bias=((prompt[0], CERTAIN),))
        ids[engine.submit(prompt, wishes, output)] = tuple(prompt)
    got = {prompt: list[int]() for prompt in ids.values()}
    begun = passes = warm = counted = 0
    since = took = 0.0
    while engine.busy:
        events = engine.step()
        for event in events:
            check_sound(event)
            if event.token is not None:
                got[ids[event.request]].append(event.token)
        if events and all(got.values()):
            warm += 1
            if warm == WARM:
                since, begun = time.perf_counter(), sum(map(len, got.values()))
            elif warm > WARM and all(len(tokens) < output for tokens in got.values()):
                passes += 1
                counted, took = sum(map(len, got.values())) - begun, time.perf_counter() - since
    if not passes:
        raise SystemExit(f"outputs of {output} tokens end before a pass is timed; raise --output")
    return Spoken(got, counted / took, counted / passes / len(got))


def booted_of(asked: argparse.Namespace, config: Config) -> Booted:
    """Return an engine of the shape or the model."""
    room = parse_size(asked.weight_memory) if asked.weight_memory else 0
    override = Override(limits=WeightLimits(room, 1 << 40)) if room else None
    if asked.shape and asked.checkpoint is None:
        shape = EVERY_SHAPE[asked.shape]
        source = config_in(asked.format, shape, asked.shape) if asked.format else shape
        return boot(config, Shape.of(source, asked.shape), say=print, override=override)
    return boot_model(config, open_weights(config.model, config.cache), say=print, override=override)


def differing(mine: Spoken, plain: Spoken) -> float:
    """Return the share of tokens up to each output's first difference that are missing to all."""
    same = total = 0
    for prompt, tokens in plain.outputs.items():
        other = mine.outputs[prompt]
        total += len(tokens)
        same += next((at for at, token in enumerate(tokens) if other[at] != token), len(tokens))
    return 1 - same / total


def config_of(asked: argparse.Namespace) -> Config:
    """Return the settings, without drafts."""
    return Config(
        asked.checkpoint or (Path() if asked.shape else locate(asked.model).path),
        device=asked.device,
        dtype=asked.dtype,
        device_memory=asked.device_memory,
        host_memory=asked.host_memory,
        max_sequences=asked.batch,
        max_length=asked.context + asked.output + 64,
        prefix_cache=False,
        cache=asked.cache,
    )


def prompts_of(asked: argparse.Namespace, config: Config, vocabulary: int) -> list[list[int]]:
    """Return what is asked: a text, or random tokens."""
    chance = random.Random(0)
    if not asked.prompt:
        return [[chance.randrange(vocabulary) for _ in range(asked.context)] for _ in range(asked.batch)]
    tokenizer = Tokenizer.from_model(config.model)
    assert tokenizer is not None, f"{config.model} has no tokenizer"
    return [tokenizer.encode(asked.prompt)]


def plain_of(asked: argparse.Namespace) -> list[Spoken]:
    """Decode without drafts."""
    config = config_of(asked)
    booted = booted_of(asked, config)
    with closing(booted.engine):
        prompts = prompts_of(asked, config, booted.spec.vocab_size)
        return [speak(booted, prompts, asked) for _ in range(asked.repeat)]


def drafted_of(asked: argparse.Namespace, outputs: Outputs) -> dict[str, list[Spoken]]:
    """Decode with drafts, of each number of tokens that are to hold."""
    config = replace(config_of(asked), speculate=asked.drafts or "suffix")
    booted = booted_of(asked, config)
    with closing(booted.engine):
        prompts = prompts_of(asked, config, booted.spec.vocab_size)
        if asked.drafts:
            print(f"drafts: {booted.drafter}{', trees' if grows(booted) else ''}", flush=True)
            return {asked.called: [speak(booted, prompts, asked) for _ in range(asked.repeat)]}
        speculation = booted.engine.scheduler.speculation
        assert speculation is not None
        speculation.drafter = oracle = Oracle(outputs, booted.spec.vocab_size)
        oracle.drafted, found = asked.drafted, {}
        for holds in [int(number) for number in asked.accepted.split(",")]:
            oracle.holds = holds
            found[f"{holds} imposed"] = [speak(booted, prompts, asked) for _ in range(asked.repeat)]
        return found


def written(name: str, folder: Path) -> Path:
    """Return the checkpoint of a shape's random weights, which is written if it is not there."""
    path = folder / name
    if not path.exists():
        print(f"writing random weights of {name} to {path}", flush=True)
        with TemporaryDirectory(dir=folder) as part:
            write_checkpoint(Path(part) / name, EVERY_SHAPE[name])
            (Path(part) / name).rename(path)
    return path


def why_no_checkpoint(asked: argparse.Namespace) -> str | None:
    """Return why a shape has no drafts of the kind that is asked for."""
    if asked.format or Shape.of(EVERY_SHAPE[asked.shape]).spec.format != DENSE:
        return (
            f"--drafts {asked.drafts} needs a checkpoint, and those of shapes are written in bfloat16 alone"
        )
    if asked.drafts == "mtp":
        return "a shape's checkpoint has no MTP layer; give a --model that has one"
    draft, tokens = EVERY_SHAPE.get(asked.drafts), EVERY_SHAPE[asked.shape]["vocab_size"]
    if draft is not None and draft["vocab_size"] != tokens:
        return f"--drafts {asked.drafts} has {draft['vocab_size']} tokens, and {asked.shape} has {tokens}"
    return None


def grows(booted: Booted) -> bool:
    """Tell whether drafts are trees."""
    speculation = booted.engine.scheduler.speculation
    return speculation is not None and speculation.model is not None and speculation.model.trees


def apart(work: Callable[..., T], *given: object) -> T:
    """Run it in a process of its own, and return what it returns."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(work, *given).result()


def main() -> None:
    """Run plain decoding, and then drafts of each number of tokens that hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(SHIPPED_MODEL))
    parser.add_argument("--shape", choices=EVERY_SHAPE)
    parser.add_argument("--format", help="of the shape's random weights, such as int4")
    parser.add_argument(
        "--drafts",
        default="",
        help="suffix, self, auto, mtp or a draft model, or a shape for one, instead of what is imposed",
    )
    parser.add_argument(
        "--files", type=Path, help="directory for checkpoints of shapes and copies; else they are removed"
    )
    parser.add_argument("--accepted", default="1,2,4,8,12", help="tokens that a pass is to yield")
    parser.add_argument("--drafted", type=int, default=16, help="tokens of a draft")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--prompt", help="a text, instead of random tokens")
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device-memory")
    parser.add_argument("--host-memory")
    parser.add_argument(
        "--weight-memory", help="of the device, for the model's weights alone: what is beyond streams"
    )
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    asked.checkpoint, asked.cache, asked.called = None, CACHE, asked.drafts
    with TemporaryDirectory() if asked.files is None else nullcontext(asked.files) as files:
        if asked.shape and asked.drafts not in ("", "suffix"):
            if why := why_no_checkpoint(asked):
                parser.error(why)
            asked.cache = Path(files) / "cache"
            asked.cache.mkdir(parents=True, exist_ok=True)
            asked.checkpoint = written(asked.shape, Path(files))
            if asked.drafts in EVERY_SHAPE:
                asked.drafts = str(written(asked.drafts, Path(files)))
        compare(asked)


def compare(asked: argparse.Namespace) -> None:
    """Decode without drafts and with them, and print and record both."""
    record = Recording(asked.out, bench="speculation")
    plains = apart(plain_of, asked)
    rate = median(one.rate for one in plains)
    print(f"plain {rate:8.2f} tokens/s, of {[round(one.rate, 2) for one in plains]}", flush=True)
    found: dict[str, object] = {"plain": [one.rate for one in plains]}
    for what, those in apart(drafted_of, asked, plains[-1].outputs).items():
        mine, passes = median(one.rate for one in those), median(one.passes for one in those)
        other = max(differing(one, plains[-1]) for one in those)
        print(
            f"{what:>12} {mine:8.2f} tokens/s, {mine / rate:5.2f} of plain, {passes:5.2f} tokens a pass, "
            f"{mine / rate / passes:4.2f} of that; {other:.1%} of tokens behind a difference"
        )
        found[what] = {
            "rates": [one.rate for one in those],
            "of_plain": mine / rate,
            "tokens_a_pass": [one.passes for one in those],
            "behind_a_difference": other,
        }
    weights = f"{asked.weight_memory} of weights" if asked.weight_memory else ""
    words = [asked.shape or Path(asked.model).name, asked.format, asked.called, asked.device_memory, weights]
    words.append(f"batch {asked.batch}" if asked.batch > 1 else "")
    words.append(f"temperature {asked.temperature:g}" if asked.temperature else "")
    record.part(" ".join(word for word in words if word), found)


if __name__ == "__main__":
    main()
