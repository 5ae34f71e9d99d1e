"""What `penstock plan` forecasts beside what the engine then does, on this machine: resident, streamed and mixed models.

    PYTHONPATH=src python3 benchmarks/plan_against_run.py --out plan.json
    PYTHONPATH=src python3 benchmarks/plan_against_run.py --parts resident --costs h200.json
    PYTHONPATH=src python3 benchmarks/plan_against_run.py --tiny --device cpu     the same code over tiny shapes

First it measures what steps cost on the device, as `penstock doctor` does, or reads it from --costs. None of that looks at the whole models
that follow. Then each model of random weights runs, and is forecast from its shape, those costs, and the ceilings of links that the
run itself measured at its start.
"""

import argparse
import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from penstock.arch.families import family_of, read_spec
from penstock.base.config import Config
from penstock.base.errors import PenstockError
from penstock.base.units import parse_size
from penstock.bench import run
from penstock.bench.calibration import calibrate
from penstock.bench.machine import machine
from penstock.bench.report import Kind, Report
from penstock.bench.shapes import LAYERS_OF, SHAPES
from penstock.engine.costs import StepCosts, keep_costs, read_costs
from penstock.engine.forecast import Machine, Work, forecast
from penstock.memory.device import total_memory
from penstock.weights.passage import Rates

MOE = {**LAYERS_OF["30B-A3B"][0], "num_hidden_layers": 48}
TINY = SHAPES["100M"] | {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 256, "head_dim": 16}


@dataclass(frozen=True)
class Case:
    """One model at one work. `memory`: device and host budgets, None where all fits."""

    part: str
    name: str
    config: Mapping[str, object]
    kind: Kind
    batch: int
    context: int
    memory: tuple[str, str] | None = None


CASES = [
    Case("resident", "0.6B", SHAPES["0.6B"], Kind.DECODE, 1, 2048),
    Case("resident", "0.6B", SHAPES["0.6B"], Kind.DECODE, 64, 2048),
    Case("resident", "0.6B", SHAPES["0.6B"], Kind.PREFILL, 1, 16384),
    Case("resident", "0.6B", SHAPES["0.6B"], Kind.PREFILL, 1, 2048),
    Case("resident", "8B", SHAPES["8B"], Kind.DECODE, 1, 2048),
    Case("resident", "8B", SHAPES["8B"], Kind.DECODE, 1, 16384),
    Case("resident", "8B", SHAPES["8B"], Kind.DECODE, 32, 2048),
    Case("resident", "8B", SHAPES["8B"], Kind.DECODE, 64, 2048),
    Case("resident", "8B", SHAPES["8B"], Kind.PREFILL, 1, 2048),
    Case("resident", "8B", SHAPES["8B"], Kind.PREFILL, 1, 16384),
    Case("resident", "30B-A3B", MOE, Kind.DECODE, 1, 2048),
    Case("resident", "30B-A3B", MOE, Kind.DECODE, 64, 512),
    Case("resident", "30B-A3B", MOE, Kind.PREFILL, 1, 8192),
    Case("mixed", "8B", SHAPES["8B"], Kind.DECODE, 1, 2048, ("15GiB", "60GiB")),
    Case("mixed", "8B", SHAPES["8B"], Kind.DECODE, 16, 512, ("15GiB", "60GiB")),
    Case("mixed", "8B", SHAPES["8B"], Kind.PREFILL, 1, 8192, ("15GiB", "60GiB")),
    Case("streamed", "8B", SHAPES["8B"], Kind.DECODE, 1, 2048, ("6GiB", "60GiB")),
    Case("streamed", "8B", SHAPES["8B"], Kind.PREFILL, 1, 8192, ("6GiB", "60GiB")),
    Case("mixture", "30B-A3B", MOE, Kind.DECODE, 1, 512, ("16GiB", "90GiB")),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--parts", default="resident,mixed,streamed,mixture")
    parser.add_argument("--costs", type=Path, help="read the costs of steps from there instead of measuring them")
    parser.add_argument("--keep", type=Path, help="write the costs that were measured there")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="of the tree that runs, where git cannot tell")
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    device = torch.device(asked.device)
    found: dict[str, Any] = {"machine": dataclasses.asdict(machine()), "commit": asked.commit or machine().commit}
    if asked.costs:
        costs = read_costs(asked.costs)
    else:
        tiny = {"shapes": {"100M": (TINY, (1, 3)), "wide": (TINY | {"hidden_size": 128}, (1, 3))}, "rows": (1, 2), "contexts": (16, 40)}
        measured = calibrate(device, "bfloat16", say=print, **(tiny | {"prompts": (64,)} if asked.tiny else {}))
        costs = measured.costs
        found["calibration"] = {"samples": [dataclasses.asdict(one) for one in measured.samples], "errors": measured.errors}
        if asked.keep:
            keep_costs(costs, asked.keep)
    found["costs"] = json.loads(costs.line())
    cases = [dataclasses.replace(one, config=TINY, batch=1, context=40, memory=None) for one in CASES] if asked.tiny else CASES
    rows: list[dict[str, Any]] = []
    for case in cases:
        if case.part in asked.parts.split(","):
            rows.append(compare(case, asked.device, costs))
            found["rows"] = rows
            if asked.out:
                asked.out.write_text(json.dumps(found, default=str) + "\n")
    apart = sorted(abs(row["apart"]) for row in rows if "apart" in row)
    print(f"plan and run: {sum(one <= 0.05 for one in apart)} of {len(rows)} within 5 %, the worst {max(apart, default=0):.1%} apart")


def compare(case: Case, device: str, costs: StepCosts) -> dict[str, Any]:
    """Run it, and forecast it."""
    title = f"{case.name}, {case.kind}, batch {case.batch}, {case.context:,}" + (f", in {case.memory[0]}" if case.memory else "")
    memory = {"device_memory": case.memory[0], "host_memory": case.memory[1]} if case.memory else {}
    said: list[str] = []
    job = run.Job(
        case.kind,
        case.name,
        case.config,
        Config(Path(), device=device, dtype="bfloat16", **memory),  # type: ignore[arg-type]
        case.batch,
        case.context,
        48,
        3 if case.kind is Kind.PREFILL else 1,
    )
    try:
        report = run.run(job, said.append)
    except (PenstockError, torch.OutOfMemoryError) as error:
        print(f"  {title}: {error}", flush=True)
        return {"case": title, "failed": str(error)}
    spec = read_spec(case.config)
    there = machine_of(case, report, costs, device)
    middle = case.context + 28 if case.kind is Kind.DECODE else case.context
    fetched = report.streaming.experts_per_pass if report.streaming else None
    work = Work("bfloat16", case.batch, middle, report.subject.step_tokens, experts_fetched=fetched)
    plan = forecast(spec, family_of(case.config).names, there, work)
    pace = plan.decode if case.kind is Kind.DECODE else plan.prefill
    passes = 1 if case.kind is Kind.DECODE else -(-case.batch * case.context // work.step_tokens)
    ms = 1e3 * pace.seconds * passes
    apart = ms / report.ms.median - 1
    print(f"  {title:<48} plan {ms:8.4g} ms, run {report.ms} {apart:+.1%}", flush=True)
    return {
        "case": title,
        "part": case.part,
        "plan_ms": ms,
        "run_ms": dataclasses.asdict(report.ms),
        "apart": apart,
        "without_costs_ms": 1e3 * passes * without(spec, case, there, work),
        "said": said,
        "report": json.loads(report.line()),
    }


def without(spec: Any, case: Case, there: Machine, work: Work) -> float:
    """Seconds of a pass by bytes and operations alone."""
    bare = forecast(spec, family_of(case.config).names, dataclasses.replace(there, costs=None), work)
    return (bare.decode if case.kind is Kind.DECODE else bare.prefill).seconds


def machine_of(case: Case, report: Report, costs: StepCosts, device: str) -> Machine:
    """The budgets that were asked for; links as the run measured them, and the device as the costs have it."""
    link, disk = (report.streaming.link_ceiling, report.streaming.disk_ceiling) if report.streaming else (costs.link_rate, 0.0)
    sizes = [parse_size(size) for size in case.memory] if case.memory else [total_memory(torch.device(device)), 100 << 30]
    host = None if device == "cpu" else sizes[1]
    return Machine(sizes[0], host, Rates(link, disk, costs.device_read), costs.compute, costs)


if __name__ == "__main__":
    main()
