"""Writes docs/plans.md: what `penstock plan` forecasts for the shapes in benchmarks/shapes on every machine
it knows by name.

python tools/plan_table.py
"""

import json
from pathlib import Path

from penstock.arch import bounds
from penstock.arch.layout import group_layouts
from penstock.arch.shards import WHOLE
from penstock.base.config import CACHE
from penstock.base.errors import BudgetError
from penstock.base.units import format_size
from penstock.cli.commands.plan import MACHINES, kept_costs, machine_of, open_model, settle
from penstock.cli.figures import format_count, format_figure, format_pace
from penstock.cli.plan_report import WORDS
from penstock.engine.forecast import Forecast, forecast
from penstock.engine.machines import Work

ROOT = Path(__file__).resolve().parents[1]
PAGE, SHAPES, RESULTS = ROOT / "docs" / "plans.md", ROOT / "benchmarks" / "shapes", ROOT / "docs" / "results"
CONTEXT = 4096

HEAD = f"""# Twelve models on six machines

What `penstock plan` forecasts, written by `tools/plan_table.py`: bfloat16, the experts of gpt-oss in MXFP4, one sequence of
{CONTEXT:,} tokens. Weights are placed by the functions that a boot uses, and a pass takes as long as disk, link and device hold each other up.

On `h100` and `h200` the device's time follows from costs of steps that `penstock doctor` measured there: launches, and the rates at which
kernels read and compute. They were fitted to models of a few layers and then held against whole models: see below. On the other machines
nothing was measured. There the device's time is a bound, and models that are resident are slower, the smaller the more.

A cell has tokens/s of decoding, what they are bound by, and tokens/s of taking in a prompt. The disk and the link bind what does not fit,
the device's own memory what does. Of a mixture of experts only those move that a token chose.
"""
MEASURED_HEAD = """
## Forecast and measured

Random weights in these shapes, bfloat16, medians of 48 decode steps, of 9 prompts of 2,048 tokens or of 3 longer ones. `in 15GiB` caps the
GPU's memory; the rest is in host memory. Costs of steps come from models of a few layers, measured in the same process. Forecasts were made
again after the runs, when `plan` had learned of the 64 MiB that recorded steps take. Most are within 5 %. Four kinds are not:

- Short prompts of a small model. The host launches them more slowly than the GPU computes, and its own speed changes by half between runs.
- One sequence of a small model. Costs are measured in an engine for contexts of 16,384 tokens, whose attention is launched for as many; the
  engine that was timed has room for 2,200, and is 5 to 6 % faster. With room for 16,384 to 131,072 one took 0.935 to 0.947 ms on another
  H100, where 0.942 are forecast (`results/h100_room.json`).
- On the H200, a prompt whose weights stream: 10 % faster than forecast, and why was not found. The H100's is within 1 %.
- A mixture in 16 GiB, one sequence. The host waits for the router in each layer, and what that takes differs between machines, and from
  step to step: 72 to 301 ms on the H100. On H200s 49 and 67 ms were measured, and 58 and 110 forecast.
"""
MACHINES_HEAD = """
## The machines

What an engine may take of each, and what its links reach, which is less than what is printed on the box. Any flag replaces the figure
that it names: `penstock plan MODEL --machine laptop --disk-rate 6GB/s`.
"""


def page() -> str:
    """The whole document."""
    found = []
    for file in SHAPES.glob("*/config.json"):  # One after another, so that each is laid out once.
        numbers, size = _sizes(file)
        small = list[str]()
        row = [_name(file, numbers, size), *(_cell(file, machine, small) for machine in MACHINES)]
        found.append((size, row, small))
    found.sort(key=lambda one: one[0])
    rows, reasons = [row for _, row, _ in found], [reason for *_, small in found for reason in small]
    figures = [
        [
            f"`{name}`",
            known.about,
            *(format_figure(figure, value.value) for figure, value in settle(name, {})[0].figures.items()),
        ]
        for name, known in MACHINES.items()
    ]
    columns = [name.replace("_", " ") for name in settle("cpu", {})[0].figures]
    remarks = "".join(f"\n{reason}" for reason in reasons)
    return "\n".join(
        [
            HEAD,
            _table(["model", *(f"`{name}`" for name in MACHINES)], rows),
            remarks and f"\nToo small:\n{remarks}",
            _measured(),
            MACHINES_HEAD,
            _table(["machine", "what it is", *columns], figures),
            "",
        ]
    )


def _measured() -> str:
    """What was forecast beside what the engine then took, from the results of
    `benchmarks/plan_against_run.py`."""
    rows, without = [], list[str]()
    for file in sorted(RESULTS.glob("*_plan.json")):
        name = file.name.removesuffix("_plan.json")
        for row in json.loads(file.read_text())["rows"]:
            if "failed" in row:
                without.append(f"- {row['case']} on `{name}`: {row['failed'].split('.')[0].split(';')[0]}")
            else:
                times = [f"{row[key]:#.3g} ms" for key in ("plan_ms", "run_ms", "without_costs_ms")]
                rows.append([f"`{name}`", row["case"], *times[:2], f"{row['apart']:+.1%}", times[2]])
    table = _table(
        ["machine", "shape and work", "forecast", "measured", "apart", "without costs of steps"], rows
    )
    failed = "\n\nThese runs ended without a measurement:\n\n" + "\n".join(without) if without else ""
    return f"{MEASURED_HEAD}\n{table}{failed}"


def _cell(file: Path, machine: str, reasons: list[str]) -> str:
    try:
        found = _forecast(file, machine)
    except BudgetError as error:
        reasons.append(f"- {file.parent.name} on `{machine}`: {error}")
        return "too small"
    decode, prefill = found.decode, found.prefill
    return (
        f"{format_pace(decode.tokens_per_second)} ({WORDS[decode.binding]}), "
        f"{format_pace(prefill.tokens_per_second)}"
    )


def _forecast(file: Path, machine: str) -> Forecast:
    _, spec, names = open_model(str(file))
    setting, step_tokens = settle(machine, {}, kept_costs(machine, CACHE, "bfloat16"))
    return forecast(
        spec, names, machine_of(setting), Work("bfloat16", context=CONTEXT, step_tokens=step_tokens)
    )


def _name(file: Path, numbers: int, bytes: int) -> str:
    return f"{open_model(str(file))[0]} ({format_count(numbers)}, {format_size(bytes)})"


def _sizes(file: Path) -> tuple[int, int]:
    """Numbers of a model's weights, and their bytes."""
    _, spec, names = open_model(str(file))
    layouts = group_layouts(spec, names, "bfloat16", WHOLE)
    return bounds.parameters(layouts), bounds.weight_bytes(layouts)


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(page())
