"""Send random routings of a mixture through an engine's largest step, and compare the memory that they take
with what the budget counted for it.

    PYTHONPATH=src python3 benchmarks/routings.py --out routings.json  10,000 on a GPU or a CPU
    PYTHONPATH=src python3 benchmarks/routings.py --device cpu --routings 200

An engine is booted over random weights. Then plans of the largest size are carried out by its own runner;
only the router's scores are replaced, layer by layer, so that tokens go to the experts that a routing names.
Between them come smaller steps, which leave the allocator as other requests would. On a GPU torch may have no
more than what was taken after boot and what the budget has for activations: one byte more is
torch.OutOfMemoryError. On a CPU the peak of the process's RSS is read, counted from what was resident after
boot.
"""

import argparse
import ctypes
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from unittest.mock import patch

import torch
from recording import environment, need_commit
from torch import Tensor

from penstock.arch.layout import GroupKind, group_layouts
from penstock.base.config import Config
from penstock.engine.boot import Booted, boot
from penstock.engine.placing import Override
from penstock.memory import device as memory
from penstock.ops import experts
from penstock.ops.attention.gathered import PAST_TILE
from penstock.ops.matrix import GroupViews
from penstock.step.plan import Plan
from penstock.weights.checkpoint.shape import Shape
from penstock.weights.streaming.residency import WeightLimits, padded
from penstock.worker.sizes import StepSizes
from penstock.worker.warmup import largest_step

STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Case:
    """A mixture and a step. length: of the longest sequence. resident: the share of the weights that may stay
    on the device; the others stream. plain: without kernels for experts."""

    name: str
    hidden: int
    inner: int
    experts: int
    top_k: int
    layers: int
    tokens: int
    sequences: int
    length: int
    resident: float = 1.0
    plain: bool = False
    dtype: str = "bfloat16"
    share: float = 0.0
    """Of all routings."""

    def config(self) -> dict[str, object]:
        return {
            "model_type": "qwen3_moe",
            "hidden_size": self.hidden,
            "intermediate_size": 3 * self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": max(self.hidden // 64, 2),
            "num_key_value_heads": 2,
            "head_dim": 64,
            "num_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "moe_intermediate_size": self.inner,
            "norm_topk_prob": True,
            "vocab_size": 4096,
            "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "tie_word_embeddings": False,
            "dtype": self.dtype,
        }


QWEN = {
    "hidden": 2048,
    "inner": 768,
    "experts": 128,
    "top_k": 8,
    "layers": 3,
    "tokens": 8192,
    "sequences": 16,
}
SMALL = {"hidden": 256, "inner": 96, "experts": 32, "top_k": 4, "layers": 3, "tokens": 2048, "sequences": 16}
ON_GPU = (
    Case("small, short sequences", length=576, share=0.34, **SMALL),  # type: ignore[arg-type]
    Case("small, long sequences, streamed", length=8192, resident=0.5, share=0.3, **SMALL),  # type: ignore[arg-type]
    Case("small, without kernels", length=576, plain=True, share=0.3, **SMALL),  # type: ignore[arg-type]
    Case("Qwen3-30B-A3B's layers, short sequences", length=576, share=0.02, **QWEN),  # type: ignore[arg-type]
    Case("Qwen3-30B-A3B's layers, streamed", length=576, resident=0.4, share=0.02, **QWEN),  # type: ignore[arg-type]
    Case("Qwen3-30B-A3B's layers, long sequences, streamed", length=40960, resident=0.4, share=0.02, **QWEN),  # type: ignore[arg-type]
)
TINY = {
    "hidden": 128,
    "inner": 96,
    "experts": 12,
    "top_k": 3,
    "layers": 3,
    "tokens": 512,
    "sequences": 8,
    "dtype": "float32",
}
WIDE = {
    "hidden": 256,
    "inner": 256,
    "experts": 12,
    "top_k": 4,
    "layers": 3,
    "tokens": 2048,
    "sequences": 8,
    "dtype": "float32",
}
ON_CPU = (
    Case("tiny, short sequences", length=96, share=0.48, **TINY),  # type: ignore[arg-type]
    Case("tiny, long sequences, streamed", length=2048, resident=0.5, share=0.48, **TINY),  # type: ignore[arg-type]
    Case("wide, short sequences", length=288, share=0.02, **WIDE),  # type: ignore[arg-type]
    Case("wide, long sequences, streamed", length=4096, resident=0.5, share=0.02, **WIDE),  # type: ignore[arg-type]
)


# ---- routings: scores [tokens, experts] on the host, of which the router takes the top_k highest


def to_one(case: Case, rng: torch.Generator) -> Tensor:
    """Every token takes the same experts."""
    return torch.rand(1, case.experts, generator=rng).expand(case.tokens, -1)


def one_first(case: Case, rng: torch.Generator) -> Tensor:
    """One expert is every token's, the others are any."""
    scores = uniform(case, rng)
    scores[:, int(torch.randint(case.experts, (1,), generator=rng))] = 9.0
    return scores


def uniform(case: Case, rng: torch.Generator) -> Tensor:
    return torch.rand(case.tokens, case.experts, generator=rng)


def alternating(case: Case, rng: torch.Generator) -> Tensor:
    """Two sets of experts, token by token in turn."""
    return torch.rand(2, case.experts, generator=rng).repeat(-(-case.tokens // 2), 1)[: case.tokens]


def zipf(case: Case, rng: torch.Generator) -> Tensor:
    """Experts are as popular as words are."""
    places = torch.randperm(case.experts, generator=rng) + 1.0
    return -places.log() - (-uniform(case, rng).clamp(1e-6, 1 - 1e-6).log()).log()


def ragged(case: Case, rng: torch.Generator) -> Tensor:
    """Most tokens take the same experts, and each of the others has one token or a few: most blocks are
    nearly empty."""
    scores = to_one(case, rng).clone()
    few = torch.randint(1, 4, (1,), generator=rng)
    for expert in range(case.experts):
        tokens = torch.randint(case.tokens, (int(few),), generator=rng)
        scores[tokens, expert] = 2.0
    return scores


KINDS: dict[str, Callable[[Case, torch.Generator], Tensor]] = {
    "all to the same": to_one,
    "one for all": one_first,
    "uniform": uniform,
    "alternating": alternating,
    "zipf": zipf,
    "ragged": ragged,
}
NAMES = (*KINDS, "another in each layer")


@dataclass
class Found:
    """Of one case. counted, peak: bytes that the budget has for activations, and that all steps took at most.
    short: how often a step was refused memory beyond that."""

    case: str
    routings: dict[str, int]
    counted: int
    peak: int
    short: int
    seconds: float

    @property
    def within(self) -> bool:
        return not self.short and self.peak <= self.counted


def measured(case: Case, routings: int, device: torch.device, seed: int = 0) -> Found:
    """Boot, and carry out as many largest steps, each with a routing of its own, and a smaller one before
    every eighth."""
    with _booted(case, device) as booted:
        sizes = StepSizes(case.tokens, case.sequences, case.length, booted.limits.block_size)
        whole = largest_step(sizes, past=PAST_TILE)
        rng, counts = torch.Generator().manual_seed(seed), Counter[str]()
        booted.engine._ranks.target.pool.bytes.zero_()  # type: ignore[union-attr]  # On a CPU its pages would come with the steps; they are KV's.
        begin, short = time.perf_counter(), 0
        with _limited(booted, device) as peak:
            for number in range(routings):
                if number % 8 == 0:
                    part = int(torch.randint(case.sequences + 1, case.tokens, (1,), generator=rng))
                    smaller = largest_step(replace(sizes, max_step_tokens=part), past=PAST_TILE)
                    _step(booted, case, smaller, None, rng)
                name = NAMES[number % len(NAMES)]
                counts[name] += 1
                try:
                    _step(booted, case, whole, name, rng)
                except torch.OutOfMemoryError as fault:
                    short += 1
                    print(f"{case.name}, routing {number}, {name}: {fault}", file=sys.stderr)
            highest = peak()
        return Found(
            case.name, dict(counts), booted.budget.activations, highest, short, time.perf_counter() - begin
        )


class Forced:
    """Routes as `name` says, in place: nothing more is allocated on the device."""

    def __init__(self, case: Case, name: str, rng: torch.Generator) -> None:
        self.case, self.rng = case, rng
        self.kinds, self.first = list(KINDS.values()), int(torch.randint(len(KINDS), (1,), generator=rng))
        self.alike = KINDS[name](case, rng) if name in KINDS else None

    def scores(self, layer: int, router: GroupViews, x: Tensor, scores: Tensor) -> Tensor:
        forced = self.alike
        if forced is None:
            forced = self.kinds[(self.first + layer) % len(self.kinds)](self.case, self.rng)
        return scores.copy_(forced[: len(scores)].to(scores.dtype))


def _step(booted: Booted, case: Case, plan: Plan, name: str | None, rng: torch.Generator) -> None:
    """One step whose layers have this routing; None is the router's own."""
    runner = booted.engine._ranks
    runner.target.decoder.routing = Forced(case, name, rng) if name is not None else None  # type: ignore[union-attr]
    runner.run(plan)


@contextmanager
def _booted(case: Case, device: torch.device) -> Iterator[Booted]:
    model = Shape.of(case.config(), case.name)
    config = Config(
        Path(),
        device=str(device),
        dtype=case.dtype,
        max_step_tokens=case.tokens,
        max_sequences=case.sequences,
        max_length=case.length,
        kv_blocks=-(-case.length // 64),
        prefix_cache=False,
        graphs=False,
    )
    layouts = group_layouts(model.spec, model.names, case.dtype)
    total = sum(map(padded, layouts))
    limits = WeightLimits(int(total * case.resident), total) if case.resident < 1 else None
    with patch.object(experts, "triton_kernels", lambda _: None) if case.plain else nullcontext():
        booted = boot(config, model, override=Override(limits=limits))
        try:
            assert booted.weights.stats().streams == (case.resident < 1), (
                "what should stream stays, or the other way round"
            )
            assert any(layout.id.kind is GroupKind.EXPERT for layout in layouts)
            yield booted
        finally:
            booted.engine.close()


@contextmanager
def _limited(booted: Booted, device: torch.device) -> Iterator[Callable[[], int]]:
    """No more than the budget's activations beside what is taken now; what the peak was, when it is asked
    for."""
    memory.give_back(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before, whole = torch.cuda.memory_reserved(device), torch.cuda.mem_get_info(device)[1]
        torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.set_per_process_memory_fraction((before + booted.budget.activations) / whole, device)
        try:
            yield lambda: torch.cuda.max_memory_reserved(device) - before
        finally:
            memory.lift_cap(device)
        return
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    CLEAR.write_text("5")  # Linux forgets the highest RSS so far.
    before, files = status("VmHWM"), status("RssFile")
    # Pages of a library that are called for the first time are no memory of the work.
    yield lambda: status("VmHWM") - before - max(status("RssFile") - files, 0)


def status(name: str) -> int:
    """Bytes that Linux has under this name for this process."""
    return next(
        int(line.split()[1]) * 1024 for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:")
    )


def record(found: list[Found], out: Path) -> None:
    """Write what was found, beside what the file has of other cases."""
    cases = [asdict(one) | {"within": one.within} for one in found]
    if out.exists():
        those = {one.case for one in found}
        cases = [case for case in json.loads(out.read_text())["cases"] if case["case"] not in those] + cases
    report = {
        "bench": "routings",
        "routings": sum(sum(case["routings"].values()) for case in cases),
        "within": all(case["within"] for case in cases),
        "cases": cases,
        "environment": environment(),
    }
    out.write_text(json.dumps(report, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--routings", type=int, default=10_000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--only",
        default="",
        metavar="TEXT",
        help="cases whose names have this in them; others that --out has are kept",
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    need_commit(options.out)
    device = memory.choose_device(options.device)
    found = []
    for case in ON_GPU if device.type == "cuda" else ON_CPU:
        if options.only not in case.name:
            continue
        found.append(measured(case, max(round(options.routings * case.share), 1), device))
        one = found[-1]
        peak, counted = one.peak / 2**20, one.counted / 2**20
        taken = f"{peak:.1f} MiB at most of {counted:.1f} counted, {one.short} times refused more"
        print(f"{one.case}: {sum(one.routings.values())} in {one.seconds:.0f} s, {taken}", flush=True)
        if options.out:
            record(found, options.out)
    done = sum(sum(one.routings.values()) for one in found)
    print(f"{done} routings, {'all within' if all(one.within for one in found) else 'BEYOND'} the budget")
    return 0 if all(one.within for one in found) else 1


if __name__ == "__main__":
    sys.exit(main())
