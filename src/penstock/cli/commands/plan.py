"""`penstock plan`: where a model's weights would rest on a machine, and how fast it would run there. Neither
has to be here."""

import math
import shutil
import subprocess
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from penstock.arch.formats.recipe import name_of
from penstock.arch.spec import ModelSpec
from penstock.base.config import CACHE, DTYPES, Config
from penstock.base.cores import cpu_name, multiplies_halves
from penstock.base.errors import ConfigError
from penstock.cli.command import TOKENS, Command, debug_option, files, option
from penstock.cli.figures import PARSERS, parse_cpu_rates
from penstock.cli.known_costs import SHIPPED
from penstock.cli.options import engine_flags, with_options
from penstock.cli.options import weight_format as weight_format_flag
from penstock.cli.plan_drafts import with_choice, with_drafts
from penstock.cli.plan_report import ASSUMED, Figure, Report, Setting
from penstock.cli.shape import open_model
from penstock.cli.terminal import say
from penstock.engine.costs import costs_file, host_kind, read_costs
from penstock.engine.forecast import forecast
from penstock.engine.machines import ExpertUse, Machine, Work
from penstock.weights.streaming.ring import StreamRates

MACHINE, WORK, OUTPUT = "Machine", "Work", "Output"
SETTINGS = (
    "tensor_parallel",
    "cpu_compute",
    "draft_memory",
    "disk_kv_memory",
    "host_kv_dtype",
    "kv_store",
    "kv_tile",
    "attention_policy",
    "prefill_policy",
    "sketch_bits",
    "max_loras",
    "max_lora_rank",
)
"""Settings of an engine that a plan looks at: those for several ranks, for drafts, for KV beyond the device,
and for adapters."""
EXAMPLES = """
  penstock plan ./my-model                       on this machine, at usual rates
  penstock plan ./my-model --machine desktop-24 --picture plan.png
  penstock plan ./my-model --device-memory 16GiB --host-memory 100GiB --disk-rate 3GB/s
  penstock plan Qwen/Qwen3-8B --machine laptop   one of the Hugging Face Hub, before it is fetched
  penstock plan 8B --machine laptop --batch 4 --context 2048 --json
  penstock plan 70B --format int4 --machine desktop-16
  penstock plan ./my-mixture --machine desktop-16 --expert-hits 0.6
  penstock plan 8B --machine desktop-24 --context 131072 --tensor-parallel 2
  penstock plan Qwen/Qwen3-32B --machine desktop-24 --speculate Qwen/Qwen3-0.6B
"""
GIB = 1 << 30
_COUNT = click.IntRange(min=1)


@dataclass(frozen=True, slots=True)
class Known:
    """Describes a machine that is known by name.

    Its figures are what an engine may take and what is reached, not what is printed on the box.

    about: what the machine is.
    step_tokens: tokens of the usual step of its device.
    """

    about: str
    device_memory: int
    host_memory: int
    link_rate: float
    disk_rate: float
    device_read: float
    compute: float
    step_tokens: int = 8192
    costs: str | None = None
    """The file beside this one that has its costs of steps, as `penstock doctor` measured them there."""


MACHINES: Mapping[str, Known] = {
    "laptop": Known(
        "8 GB GPU on PCIe 4 x8, 32 GiB of memory, PCIe 3 NVMe", 7 * GIB, 24 * GIB, 13e9, 3e9, 230e9, 25e12
    ),
    "desktop-16": Known(
        "16 GB card on PCIe 5 x16, 64 GiB of memory, PCIe 5 NVMe",
        14 * GIB,
        48 * GIB,
        50e9,
        7e9,
        860e9,
        100e12,
    ),
    "desktop-24": Known(
        "24 GB card on PCIe 4 x16, 128 GiB of memory, PCIe 4 NVMe",
        21 * GIB,
        100 * GIB,
        25e9,
        5e9,
        920e9,
        150e12,
    ),
    "h100": Known(
        "one H100 on PCIe 5 x16, 125 GiB of memory, virtual disk, as measured",
        70 * GIB,
        100 * GIB,
        54e9,
        2.5e9,
        3.0e12,
        750e12,
        16384,
        "h100.json",
    ),
    "h200": Known(
        "one H200 on PCIe 5 x16, 125 GiB of memory, virtual disk, as measured",
        125 * GIB,
        100 * GIB,
        54e9,
        2.5e9,
        4.2e12,
        750e12,
        16384,
        "h200.json",
    ),
    "cpu": Known("16 cores, 64 GiB of DDR5, PCIe 4 NVMe; no GPU", 48 * GIB, 0, 25e9, 5e9, 60e9, 1e12, 512),
}
"""The GPU is taken nine tenths of, the host memory what a system in use leaves. Where the device is the CPU
it is host memory itself, of which no more is there, and the link a copy within it."""
USUAL = "desktop-24"
"""Its rates hold where no others are given."""


@click.command(cls=Command, examples=EXAMPLES)
@click.argument("model", shell_complete=files)
@option(
    MACHINE,
    "--machine",
    type=click.Choice(list(MACHINES)),
    help="A usual machine, or the H200 of the results. [this one]",
)
@option(
    MACHINE,
    "--device-memory",
    metavar="SIZE",
    help="Memory that the engine may take on the device: 16GiB. [the machine's]",
)
@option(
    MACHINE,
    "--host-memory",
    metavar="SIZE",
    help="Host memory that the engine may take: 100GiB. [the machine's]",
)
@option(
    MACHINE,
    "--link-rate",
    metavar="RATE",
    help="Rate of copies from host memory to the device: 54GB/s. [the machine's]",
)
@option(
    MACHINE,
    "--disk-rate",
    metavar="RATE",
    help="Rate of reads from disk: 3GB/s; none or 0 for no disk. [the machine's]",
)
@option(
    MACHINE,
    "--device-read",
    metavar="RATE",
    help="Rate of reads from the device's own memory: 4TB/s. [the machine's]",
)
@option(
    MACHINE,
    "--compute",
    metavar="RATE",
    help="Rate of matrix products in the dtype: 700TFLOPS. [the machine's]",
)
@option(
    MACHINE,
    "--cpu-rate",
    metavar="RATE",
    help="Rate at which the CPU reads what it computes, or one each for 1, 2, 4, 8, 16 rows. [measured]",
)
@option(
    MACHINE,
    "--costs",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="File of step costs that `penstock doctor` measured. [the machine's]",
)
@option(
    MACHINE,
    "--cache",
    type=click.Path(path_type=Path),
    default=CACHE,
    metavar="DIR",
    help=f"Directory in which `penstock doctor` keeps step costs. [{CACHE}]",
)
@option(WORK, "--batch", type=_COUNT, default=1, metavar="N", help="Sequences that are computed at once. [1]")
@option(
    WORK,
    "--context",
    type=TOKENS,
    metavar="N",
    help="Tokens of each sequence, prompt and output. [4096, or what the model holds]",
)
@option(
    WORK, "--step-tokens", type=TOKENS, metavar="N", help="Most tokens computed in one step. [8192; cpu: 512]"
)
@option(
    WORK,
    "--expert-hits",
    type=click.FloatRange(0, 1),
    metavar="SHARE",
    help="Share on the device of the experts that a decode step asks for: 0.6. [that of even use]",
)
@option(
    WORK,
    "--routing",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The same, as slots hit over a routing that `penstock bench experts` recorded.",
)
@option(
    WORK,
    "--speculate",
    default="off",
    metavar="DRAFTS",
    help="Show decoding with drafts, too, of: auto, suffix, self, mtp, or a draft model or an EAGLE-3 head, "
    "named as MODEL is. [off]",
)
@option(
    WORK,
    "--dtype",
    type=click.Choice(DTYPES),
    default="auto",
    metavar="TYPE",
    help="Data type of weights and KV: auto, float32, float16 or bfloat16. [auto: the model's]",
)
@with_options(weight_format_flag(WORK), *engine_flags(*SETTINGS))
@option(OUTPUT, "--json", is_flag=True, help="Print one line of JSON instead.")
@option(
    OUTPUT,
    "--picture",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Draw the forecast as a PNG, too.",
)
@debug_option
def command(
    model: str,
    machine: str | None,
    costs: Path | None,
    cache: Path,
    dtype: str,
    weight_format: str | None,
    json: bool,
    picture: Path | None,
    **given: Any,
) -> None:
    """Forecast where the weights of MODEL would rest, how fast it would decode and take prompts in, what
    binds it, and what more of anything would buy; with --speculate also what drafts would take and give.
    MODEL is a config.json or a directory with one, of which nothing else is needed, a GGUF file, a shape that
    `bench` knows, or a model of the Hugging Face Hub, of which no more than that is fetched.

    Nothing is measured. Without --machine, sizes are those of this machine, 90 % of the first GPU and 80 % of
    free memory. Rates, and what a step costs beyond bytes, are as `penstock doctor` measured them here, if it
    did. Else rates are assumed, those of a desktop with a 24 GB card, and the device's time is a bound; where
    there is no GPU, rates and costs are those of a CPU with two cores. Any flag replaces the figure it names.
    """
    if picture is not None and not picture.absolute().parent.is_dir():
        raise ConfigError(
            f"cannot write {picture}: its directory does not exist; create it, or name another file"
        )
    batch, context, step_tokens = (given.pop(name) for name in ("batch", "context", "step_tokens"))
    speculate = given.pop("speculate")
    hits, routing = given.pop("expert_hits"), given.pop("routing")
    cpu_rate = given.pop("cpu_rate")
    settings = Config(Path(), **{name: given.pop(name) for name in SETTINGS})
    asked = {name: PARSERS[name](text) for name, text in given.items() if text is not None}
    name, spec, names = open_model(model, weight_format)
    chosen = dtype_there(machine, spec.dtype, asked) if dtype == "auto" else dtype
    kept = costs or kept_costs(machine, cache.expanduser(), chosen, name_of(spec.format), asked)
    setting, usual_step = settle(machine, asked, kept)
    setting = _with_cpu(setting, settings, cpu_rate)
    use = _expert_use(spec, batch, hits, routing)
    context = context or min(4096, spec.max_length)
    work = Work(chosen, batch, context, step_tokens or usual_step, expert_use=use, settings=settings)
    there = machine_of(setting)
    work, choice = with_drafts(speculate, (model, spec, names), there, work, dtype)
    report = Report.of(name, spec, names, setting, forecast(spec, names, there, work))
    report = replace(report, speculation=with_choice(report.speculation, choice))
    if picture is not None:
        from penstock.cli.plan_picture import draw  # Pillow: 60 ms

        draw(report, picture)
        say(f"drawn to {picture}", faint=True)
    click.echo(report.line() if json else report)


def _with_cpu(setting: Setting, settings: Config, rate: str | None) -> Setting:
    """Return a setting with the CPU's rates, if it may compute: those given, or measured with what steps
    cost. Raises ConfigError."""
    if settings.cpu_compute == "off":
        if rate is not None:
            raise ConfigError("--cpu-rate is given, but --cpu-compute is off; add --cpu-compute auto")
        return setting
    if rate is not None:
        return replace(setting, cpu_read=parse_cpu_rates(rate), cpu_source="given")
    measured = setting.costs.cpu_read if setting.costs else ()
    return replace(setting, cpu_read=measured, cpu_source="measured with int4") if measured else setting


def _expert_use(spec: ModelSpec, batch: int, hits: float | None, routing: Path | None) -> ExpertUse | None:
    """Return how experts are used, as far as that is given or recorded. Raises ConfigError and
    UsageError."""
    if hits is not None and routing is not None:
        raise click.UsageError("--expert-hits and --routing exclude each other; give one of them")
    if hits is None and routing is None:
        return None
    if spec.moe is None:
        raise ConfigError(
            f"{spec.family} of this shape has no experts; leave --expert-hits and --routing out"
        )
    if routing is None:
        assert hits is not None
        if math.isnan(hits):  # It is in no range, and click lets it through.
            raise click.UsageError("--expert-hits is not a number; give a share from 0 to 1")
        return ExpertUse(((0.0, hits),))
    from penstock.bench.routing.use import expert_use  # torch takes 1.2 s

    return expert_use(routing, spec.moe, batch)


def dtype_there(machine: str | None, stored: str, asked: Collection[str] = ()) -> str:
    """Return the dtype that `auto` means on a machine: on a CPU without instructions for halves float32, as a
    boot chooses. asked: names of figures that are given."""
    here = machine is None and not (_gpu()[0] or _means_gpu(asked) or multiplies_halves())
    return "float32" if here else stored


def _means_gpu(asked: Collection[str]) -> bool:
    """Tell whether figures that are given are those of a GPU, though there may be none here: one has memory
    of its own beside the host's."""
    return "device_memory" in asked and "host_memory" in asked


def kept_costs(
    machine: str | None, cache: Path, dtype: str, few_bits: str = "", asked: Collection[str] = ()
) -> Path | None:
    """The file that has a machine's costs of steps in a dtype, by default this one's; None where nobody
    measured them. On a CPU it is then one that comes with penstock, of another CPU.

    few_bits: the format of weights, empty for dense ones. asked: names of figures that are given.
    """
    if machine is None:
        if gpu := _gpu()[0]:
            file = costs_file(cache, gpu, dtype)
            return file if file.exists() else None
        if _means_gpu(asked):
            return None
        kind = host_kind(dtype, few_bits)
        files = costs_file(cache, cpu_name(), kind), SHIPPED / f"cpu-{kind}.json"
        return next((file for file in files if file.exists()), None)
    name = MACHINES[machine].costs
    return SHIPPED / name if name and dtype in ("bfloat16", "float16") else None


def settle(machine: str | None, asked: Mapping[str, float], costs: Path | None = None) -> tuple[Setting, int]:
    """Return all figures of a machine, and the tokens of its usual step. Raises ConfigError.

    machine: its name; None is this machine.
    asked: figures that take the place of the machine's own.
    costs: the file that has its costs of steps.
    """
    known = MACHINES[machine or USUAL]
    steps = read_costs(costs) if costs else None
    figures = {name: Figure(getattr(known, name), machine or ASSUMED) for name in PARSERS}
    if machine is None:
        of_gpu = steps is not None and not steps.host and "device_memory" in asked
        gpu, free = _gpu()[1] or _means_gpu(asked) or of_gpu, _free_memory()
        if gpu:
            found = {"device_memory": int(gpu), "host_memory": free * 4 // 5}
        else:
            known = MACHINES["cpu"]
            figures = {name: Figure(getattr(known, name), ASSUMED) for name in PARSERS}
            found = {"device_memory": free // 2}
        figures |= {name: Figure(size, "this machine") for name, size in found.items()}
    if "host_memory" in asked and not known.host_memory:
        raise ConfigError(
            "--host-memory is for machines with a GPU, and on a CPU host memory is the device memory; give "
            "--device-memory instead, or a --machine with a GPU"
        )
    if steps is not None and steps.host == bool(known.host_memory):
        raise ConfigError(
            f"{costs} has the step costs of a {'CPU' if steps.host else 'GPU'}, and the forecast is of a "
            f"machine {'with' if steps.host else 'without'} a GPU; give costs that were measured on its like"
        )
    elsewhere = costs is not None and costs.parent == SHIPPED
    if steps and machine is None:
        source = ASSUMED if elsewhere else "measured"
        rates = ("link_rate", "device_read", "compute", *(("disk_rate",) if steps.disk_rate else ()))
        figures |= {name: Figure(getattr(steps, name), source) for name in rates}
    figures |= {name: Figure(value, "given") for name, value in asked.items()}
    about = f"{machine}: {known.about}" if machine else None
    return Setting(about, figures, steps, elsewhere=elsewhere and machine is None), known.step_tokens


def machine_of(setting: Setting) -> Machine:
    """Return the machine that a setting describes."""
    value = {name: figure.value for name, figure in setting.figures.items()}
    rates = StreamRates(value["link_rate"], value["disk_rate"], value["device_read"], setting.cpu_read)
    return Machine(
        int(value["device_memory"]), int(value["host_memory"]) or None, rates, value["compute"], setting.costs
    )


def _gpu() -> tuple[str, int]:
    """The first GPU's name and nine tenths of its memory; nothing if there is none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return "", 0
    command = [program, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        first = subprocess.run(
            command, capture_output=True, text=True, timeout=10, check=True
        ).stdout.splitlines()[0]
        name, _, memory = first.rpartition(",")
        return name.strip(), int(memory) * 2**20 * 9 // 10
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return "", 0


def _free_memory() -> int:
    """Return the free bytes of the host, or of the container, whose limit psutil does not know."""
    import psutil  # 10 ms

    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
    except (OSError, ValueError):
        limit = 2**62
    return min(int(psutil.virtual_memory().available), limit)
