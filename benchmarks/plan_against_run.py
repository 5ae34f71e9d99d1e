"""Compare the forecasts of `penstock plan` with the engine's runs on this machine: resident, streamed and
mixed models.

    PYTHONPATH=src python3 benchmarks/plan_against_run.py --out plan.json PYTHONPATH=src python3
    benchmarks/plan_against_run.py --parts resident --costs h200.json PYTHONPATH=src python3
    benchmarks/plan_against_run.py --tiny --device cpu     the same code over tiny shapes

First it measures what steps cost on the device, as `penstock doctor` does, or reads it from --costs. None of
that looks at the whole models that follow. Then each model of random weights runs, and is forecast from its
shape, those costs, and the ceilings of links that the run itself measured at its start.
"""

import argparse
import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from recording import environment, need_commit

from penstock.arch.families import family_of, read_spec
from penstock.base.config import Config
from penstock.base.errors import PenstockError
from penstock.base.units import parse_size
from penstock.bench.doctor.calibration import Ceilings, StepSample, calibrate, fit
from penstock.bench.shapes import LAYERS_OF, SHAPES
from penstock.bench.speed.latency import BenchKind, LatencyBench, run
from penstock.bench.speed.setup import Target
from penstock.engine.costs import StepCosts, keep_costs, read_costs
from penstock.engine.forecast import forecast
from penstock.engine.machines import Machine, Work
from penstock.engine.passes import UseWork
from penstock.memory.device import total_memory
from penstock.weights.streaming.ring import StreamRates

TOKENS = re.compile(r"each\), ([\d,]+) tokens")
MOE = {**LAYERS_OF["30B-A3B"][0], "num_hidden_layers": 48}
TINY = SHAPES["100M"] | {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 256,
    "head_dim": 16,
}


@dataclass(frozen=True)
class Case:
    """One model at one work. `memory`: device and host budgets, None where all fits."""

    part: str
    name: str
    config: Mapping[str, object]
    kind: BenchKind
    batch: int
    context: int
    memory: tuple[str, str] | None = None

    @property
    def title(self) -> str:
        where = f", in {self.memory[0]}" if self.memory else ""
        return f"{self.name}, {self.kind}, batch {self.batch}, {self.context:,}{where}"


CASES = [
    Case("resident", "0.6B", SHAPES["0.6B"], BenchKind.DECODE, 1, 2048),
    Case("resident", "0.6B", SHAPES["0.6B"], BenchKind.DECODE, 64, 2048),
    Case("resident", "0.6B", SHAPES["0.6B"], BenchKind.PREFILL, 1, 16384),
    Case("resident", "0.6B", SHAPES["0.6B"], BenchKind.PREFILL, 1, 2048),
    Case("resident", "8B", SHAPES["8B"], BenchKind.DECODE, 1, 2048),
    Case("resident", "8B", SHAPES["8B"], BenchKind.DECODE, 1, 16384),
    Case("resident", "8B", SHAPES["8B"], BenchKind.DECODE, 32, 2048),
    Case("resident", "8B", SHAPES["8B"], BenchKind.DECODE, 64, 2048),
    Case("resident", "8B", SHAPES["8B"], BenchKind.PREFILL, 1, 2048),
    Case("resident", "8B", SHAPES["8B"], BenchKind.PREFILL, 1, 16384),
    Case("resident", "30B-A3B", MOE, BenchKind.DECODE, 1, 2048),
    Case("resident", "30B-A3B", MOE, BenchKind.DECODE, 64, 512),
    Case("resident", "30B-A3B", MOE, BenchKind.PREFILL, 1, 8192),
    Case("mixed", "8B", SHAPES["8B"], BenchKind.DECODE, 1, 2048, ("15GiB", "60GiB")),
    Case("mixed", "8B", SHAPES["8B"], BenchKind.DECODE, 16, 512, ("15GiB", "60GiB")),
    Case("mixed", "8B", SHAPES["8B"], BenchKind.PREFILL, 1, 8192, ("15GiB", "60GiB")),
    Case("streamed", "8B", SHAPES["8B"], BenchKind.DECODE, 1, 2048, ("6GiB", "60GiB")),
    Case("streamed", "8B", SHAPES["8B"], BenchKind.PREFILL, 1, 8192, ("10GiB", "60GiB")),
    Case("mixture", "30B-A3B", MOE, BenchKind.DECODE, 1, 512, ("16GiB", "90GiB")),
    Case("mixture", "30B-A3B", MOE, BenchKind.DECODE, 16, 512, ("16GiB", "90GiB")),
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--parts", default="resident,mixed,streamed,mixture")
    parser.add_argument(
        "--costs", type=Path, help="read the costs of steps from there instead of measuring them"
    )
    parser.add_argument("--keep", type=Path, help="write the costs that were measured there")
    parser.add_argument(
        "--again",
        type=Path,
        metavar="FILE",
        help="run nothing: fit FILE's samples and forecast its runs anew",
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    if asked.again:
        anew(asked.again, asked.out, asked.keep)
        return
    need_commit(asked.out)
    device = torch.device(asked.device)
    found: dict[str, Any] = {"environment": environment()}
    if asked.costs:
        costs = read_costs(asked.costs)
    else:
        tiny = {
            "shapes": {"100M": (TINY, (1, 3)), "wide": (TINY | {"hidden_size": 128}, (1, 3))},
            "rows": (1, 2),
            "contexts": (16, 40),
        }
        measured = calibrate(
            device, "bfloat16", say=print, **(tiny | {"prompts": (64,)} if asked.tiny else {})
        )
        costs = measured.costs
        found["samples"] = [dataclasses.asdict(one) for one in measured.samples]
        if asked.keep:
            keep_costs(costs, asked.keep)
    found["costs"] = json.loads(costs.line())
    cases = (
        [dataclasses.replace(one, config=TINY, batch=1, context=40, memory=None) for one in CASES]
        if asked.tiny
        else CASES
    )
    whole = total_memory(device)
    rows: list[dict[str, Any]] = []
    for case in cases:
        if case.part in asked.parts.split(","):
            rows.append(
                forecast_of(case, ran(case, asked.device), costs, None if asked.device == "cpu" else whole)
            )
            found["rows"] = rows
            if asked.out:
                asked.out.write_text(json.dumps(found, default=str) + "\n")
    tell(rows)


def anew(file: Path, out: Path | None, keep: Path | None) -> None:
    """Forecast what a file's runs measured, by costs that are fitted to its samples as they would be
    today."""
    found = json.loads(file.read_text())
    samples = [
        StepSample(**{**one, "work": UseWork(**one["work"]), "launches": tuple(one["launches"])})
        for one in found["samples"]
    ]
    was = StepCosts.parse(json.dumps(found["costs"]), str(file))
    ceilings = Ceilings(was.link_rate, was.device_read, was.prompt.activations, was.compute)
    costs = dataclasses.replace(
        fit(samples, ceilings, was.device, was.dtype, was.measured),
        expert_layer=was.expert_layer,
        slot_layer=was.slot_layer,
    )
    by_title = {case.title: case for case in CASES}
    whole = found["environment"]["devices"][0]["memory"]
    found["rows"] = [forecast_of(by_title[row["case"]], row, costs, whole) for row in found["rows"]]
    found["costs"] = json.loads(costs.line())
    if keep:
        keep_costs(costs, keep)
    if out:
        out.write_text(json.dumps(found) + "\n")
    tell(found["rows"])


def tell(rows: Sequence[Mapping[str, Any]]) -> None:
    apart = [abs(row["apart"]) for row in rows if "apart" in row]
    print(
        f"plan and run: {sum(one <= 0.05 for one in apart)} of {len(rows)} within 5 %, the worst "
        f"{max(apart, default=0):.1%} apart"
    )


def ran(case: Case, device: str) -> dict[str, Any]:
    """What the engine took, or why it did not run."""
    memory = {"device_memory": case.memory[0], "host_memory": case.memory[1]} if case.memory else {}
    said: list[str] = []
    config = Config(Path(), device=device, dtype="bfloat16", **memory)  # type: ignore[arg-type]
    repeat = (9 if case.context <= 2048 else 3) if case.kind is BenchKind.PREFILL else 1
    try:
        target = Target(case.name, case.config, config)
        report = run(LatencyBench(case.kind, target, case.batch, case.context, 48, repeat), said.append)
    except (PenstockError, torch.OutOfMemoryError) as error:
        return {"case": case.title, "part": case.part, "failed": str(error), "said": said}
    facts = {name: value for name, value in json.loads(report.line()).items() if name != "machine"}
    return {"case": case.title, "part": case.part, "said": said, "report": facts}


def forecast_of(case: Case, row: dict[str, Any], costs: StepCosts, whole: int | None) -> dict[str, Any]:
    """The row with what was forecast: from the shape, the costs, budgets that were asked for, and ceilings of
    links that the run measured at its start. whole: bytes of the GPU's memory, None on a CPU."""
    if "failed" in row:
        print(f"  {case.title}: {row['failed']}", flush=True)
        return row
    report = row["report"]
    spec, streaming, measured = read_spec(case.config), report["streaming"], report["ms"]["median"]
    link, disk = (
        (streaming["link_ceiling"], streaming["disk_ceiling"]) if streaming else (costs.link_rate, 0.0)
    )
    sizes = [parse_size(size) for size in case.memory] if case.memory else [whole or 64 << 30, 100 << 30]
    there = Machine(
        sizes[0],
        sizes[1] if whole else None,
        StreamRates(link, disk, costs.device_read),
        costs.compute,
        costs,
    )
    # KV has room for as many tokens as the run allowed each sequence, which is somewhat more than they came
    # to.
    length = next(
        int(found[1].replace(",", "")) // case.batch for line in row["said"] if (found := TOKENS.search(line))
    )
    context = length if case.memory else case.context + 28
    fetched = streaming["experts_per_pass"] if streaming else None
    work = Work(
        "bfloat16",
        case.batch,
        context if case.kind is BenchKind.DECODE else case.context,
        report["step_tokens"],
        fetched,
    )
    passes = 1 if case.kind is BenchKind.DECODE else -(-case.batch * case.context // work.step_tokens)

    def ms(machine: Machine) -> float:
        plan = forecast(spec, family_of(case.config).names, machine, work)
        return 1e3 * passes * (plan.decode if case.kind is BenchKind.DECODE else plan.prefill).seconds

    planned, bare = ms(there), ms(dataclasses.replace(there, costs=None))
    apart = planned / measured - 1
    print(
        f"  {case.title:<48} plan {planned:8.4g} ms, run {measured:8.4g} ms, {apart:+.1%}; without costs "
        f"{bare:.4g} ms",
        flush=True,
    )
    return {**row, "plan_ms": planned, "run_ms": measured, "apart": apart, "without_costs_ms": bare}


if __name__ == "__main__":
    main()
