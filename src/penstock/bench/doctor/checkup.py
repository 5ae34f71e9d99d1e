"""Reports what this machine has, how fast its links are, and what limits a model on it."""

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import sleep

import torch

from penstock.arch import bounds
from penstock.arch.formats.recipe import config_in
from penstock.arch.layout import group_layouts
from penstock.arch.spec import DTYPE_BYTES
from penstock.base.config import Config
from penstock.base.cores import CoreLimits, CoreTimes, core_limits, counted, cpu_name, free_cores
from penstock.base.errors import ConfigError, DeviceError
from penstock.base.report import JsonLine
from penstock.base.units import counted as quantity
from penstock.base.units import format_rate, format_size
from penstock.bench.doctor.calibration import calibrate
from penstock.bench.doctor.host_steps import calibrate_host
from penstock.bench.doctor.limits import MeasuredRates, MemoryRoom, ModelLimits, limits, prefill_rate
from penstock.bench.machine import MachineInfo, machine
from penstock.bench.shapes import SHAPES
from penstock.engine.costs import FEW_BITS, StepCosts, costs_file, host_kind, keep_costs, read_costs
from penstock.engine.cpu_rates import usual_cpu_read
from penstock.engine.placing import Say
from penstock.engine.settling import choose_dtype, device_budget
from penstock.memory.device import choose_device, device_name, free_memory, give_back, native_half
from penstock.memory.probe import (
    DiskRate,
    LinkRates,
    disk_read,
    link_rates,
    matmul_rate,
    memory_copy,
    memory_read,
)
from penstock.ops.kernels import kernels_of
from penstock.ops.native.few_bits import find_library
from penstock.weights.checkpoint.shape import Shape
from penstock.weights.gguf.files import is_gguf

_BY = {"Triton": "Triton kernels", "C": "C kernels, compiled here", "torch": "plain torch, much slower"}
_MOMENT = 0.3
"""Seconds for which others are looked at."""
_HOST_SHARE = 0.8
"""The share of the free host memory that is room for weights which do not fit on a device beside it."""


@dataclass(frozen=True, slots=True)
class Links:
    """Holds the rates of memories and links, in bytes/s. `matmul` is in operations/s, in the dtype that the
    model would run in. A rate is None where there is no such link, or it was not measured."""

    host_read: float
    device_read: float
    device_copy: float
    matmul: float
    link: LinkRates | None
    disk: DiskRate | None


@dataclass(frozen=True, slots=True)
class ModelCheck:
    """A model, and what the machine allows it in every dtype.

    dtype: the one it would run in. room: the bytes that it may take.
    prefill: prompt tokens/s that one sequence cannot exceed in `dtype`.
    """

    path: Path
    family: str
    layers: int
    parameters: int
    max_length: int
    dtype: str
    room: MemoryRoom
    prefill: float
    limits: tuple[ModelLimits, ...]


@dataclass(frozen=True, slots=True)
class Checkup(JsonLine):
    """Holds the findings of `penstock doctor`, which `describe` prints.

    device, name: such as `cuda:0`, and the device's own name.
    kernels: modules of our own kernels that compute on the device; none where plain torch does.
    few_bits: what computes products with weights of few bits there: `Triton`, `C` or `torch`.
    steps: what steps cost on the device. None where it was not measured: with `quick` before the first time.
    """

    machine: MachineInfo
    device: str
    name: str
    kernels: tuple[str, ...]
    few_bits: str
    links: Links
    model: ModelCheck
    notes: tuple[str, ...]
    steps: StepCosts | None = None


def checkup(
    config: Config, *, quick: bool = False, again: bool = False, say: Say = lambda _: None
) -> Checkup:
    """Measure this machine for the model and device of `config`. Of the model only its config.json is read.

    The costs of steps are measured once, in about a minute and a half, and kept in `config.cache`, where
    `penstock plan` finds them. Raises CheckpointError, UnsupportedModelError, ConfigError, DeviceError,
    BudgetError.

    quick: leave out the disk and the steps.
    again: measure steps though their costs are kept.
    """
    shape, device = Shape.open(config.model), choose_device(config.device)
    dtype = choose_dtype(config, shape, device)
    on_gpu = device.type == "cuda"
    cpu = torch.device("cpu")
    room = MemoryRoom(device_budget(config, device), int(free_memory(cpu) * _HOST_SHARE) if on_gpu else None)
    about = machine()
    notes = _notes(about, device, config.cache.expanduser())
    if dtype == "float16":
        notes.append(
            "the model would run in float16: activations beyond 65,504 are infinite, and answers then end "
            "with an error; --dtype bfloat16 has the range but rounds weights, float32 does neither"
        )
    try:
        disk = None if quick else disk_read(config.model.parent if is_gguf(config.model) else config.model)
    except DeviceError as error:
        disk = None
        notes.append(str(error))
    host_read = memory_read(cpu)
    links = Links(
        host_read=host_read,
        device_read=memory_read(device) if on_gpu else host_read,
        device_copy=memory_copy(device),
        matmul=matmul_rate(device, getattr(torch, dtype)),
        link=link_rates(device) if on_gpu else None,
        disk=disk,
    )
    to_device = links.link.to_device if links.link else None
    rates = MeasuredRates(links.device_read, to_device, disk.read if disk else None)
    spec = shape.spec
    model = ModelCheck(
        path=config.model,
        family=spec.family,
        layers=spec.layers,
        parameters=bounds.parameters(group_layouts(spec, shape.names, dtype)),
        max_length=spec.max_length,
        dtype=dtype,
        room=room,
        prefill=prefill_rate(spec, shape.names, dtype, links.matmul),
        limits=tuple(limits(spec, shape.names, each, room, rates) for each in DTYPE_BYTES),
    )
    give_back(device)
    cache = config.cache.expanduser()
    if on_gpu:
        steps = _steps(device, dtype, cache, quick, again, say)
    else:
        steps = _host_steps(dtype, cache, disk.read if disk else 0.0, quick=quick, again=again, say=say)
    return Checkup(
        about,
        str(device),
        device_name(device),
        kernels_of(device),
        _few_bits(device, config.cache.expanduser()),
        links,
        model,
        tuple(notes),
        steps,
    )


def _few_bits(device: torch.device, cache: Path) -> str:
    """Name what computes products with weights of few bits on the device."""
    if device.type == "cpu":
        return "torch" if find_library(cache) else "C"
    return "Triton" if kernels_of(device) else "torch"


def _steps(
    device: torch.device, dtype: str, cache: Path, quick: bool, again: bool, say: Say
) -> StepCosts | None:
    """Read the costs of steps where they are kept, or measure and keep them."""
    if dtype == "float32":
        return None
    file = costs_file(cache, device_name(device), dtype)
    if file.exists() and not again:
        with suppress(ConfigError):  # Of another version, or damaged: measured again.
            return read_costs(file)
    if quick:
        return None
    say("measuring what steps cost, once, in about a minute and a half")
    found = calibrate(device, dtype, say=say)
    costs = with_cpu_read(found.costs, device, cache)
    keep_costs(costs, file)
    say(
        f"kept in {file}; half of {len(found.samples)} steps are predicted within {found.typical:.1%}, all "
        f"within {found.worst:.0%}"
    )
    return costs


def _host_steps(
    dtype: str, cache: Path, disk: float, *, quick: bool, again: bool, say: Say
) -> StepCosts | None:
    """Do the same on a CPU, with dense weights and with weights of few bits; return those of dense ones.

    disk: bytes/s; 0 was not measured.
    """
    costs: list[StepCosts] = []
    for format in (None, FEW_BITS):
        file = costs_file(cache, cpu_name(), host_kind(dtype, format or ""))
        known = None
        if file.exists() and not again:
            with suppress(ConfigError):  # Of another version, or damaged: measured again.
                known = read_costs(file)
        if known is None and quick:
            continue
        if known is None:
            say(f"measuring what steps in {format or dtype} cost, once, in half a minute on idle cores")
            found = calibrate_host(dtype, format, say=say)
            known = found.costs
            say(
                f"kept in {file}; half of {len(found.samples)} steps are predicted within {found.typical:.1%}"
            )
        costs.append(replace(known, disk_rate=disk or known.disk_rate))
        keep_costs(costs[-1], file)
    return costs[0] if costs else None


def with_cpu_read(costs: StepCosts, device: torch.device, cache: Path) -> StepCosts:
    """Return costs with the bytes/s that the CPU reads of the feed-forwards of a usual model in int4, if
    there are kernels for that."""
    if find_library(cache):
        return costs
    shape = Shape.of(dict(config_in("int4", SHAPES["8B"], "8B")), "8B")
    return replace(costs, cpu_read=usual_cpu_read(shape, costs.dtype, device, costs.link_rate))


def _notes(about: MachineInfo, device: torch.device, cache: Path) -> list[str]:
    """Return notes for a user who wonders about speed."""
    notes = []
    if device.type == "cuda" and about.triton is None:
        notes.append(
            "Triton is not installed: plain torch does what its kernels would, much slower; pip install "
            "triton"
        )
    if device.type == "cpu":
        if about.threads < about.cores:
            notes.append(
                f"torch computes with {about.threads} of {about.cores} cores; OMP_NUM_THREADS or the like "
                "is set"
            )
        if (limits := core_limits()) is not None and (free := _free_now(limits)) < about.cores:
            notes.append(
                f"free now: {free} of {about.cores} cores, since others are busy or a container has a "
                "limit: a decode step takes no more threads than that"
            )
        if not native_half(device):
            notes.append(
                "this processor multiplies bfloat16 in software; float32 is faster on it, and what auto "
                "chooses"
            )
        if why := find_library(cache):
            notes.append(f"weights of few bits are computed by plain torch, much slower: {why}")
    return notes


def _free_now(limits: CoreLimits) -> int:
    """Return the cores that are free in a moment in which this process does nothing."""
    before = CoreTimes.now(limits)
    sleep(_MOMENT)
    after = CoreTimes.now(limits)
    others = (0.0, 0.0) if before is None or after is None else after.others(before)
    return free_cores(limits, counted(0, others[0]), others[1])


def describe(found: Checkup) -> str:
    """Return the findings as text for a person."""
    return "\n\n".join(
        "\n".join([title, *(f"  {name:<15} {text}" for name, text in rows)])
        for title, rows in (
            ("Machine", _machine_rows(found)),
            ("Links", _link_rows(found)),
            *((("Steps", _step_rows(found.steps)),) if found.steps else ()),
            ("Model", _model_rows(found.model)),
        )
    )


def _kernels(found: Checkup) -> str:
    """Say which kernels of ours compute."""
    if found.kernels:
        return f"our own: {', '.join(found.kernels)}"
    return "our own in C, compiled here" if found.few_bits == "C" else "none of our own; plain torch computes"


def _machine_rows(found: Checkup) -> list[tuple[str, str]]:
    it = found.machine
    triton = f"Triton {it.triton}" if it.triton else "no Triton"
    source = f"{it.penstock} ({it.commit})" if it.commit else it.penstock
    rows = [
        ("system", it.system),
        (
            "processor",
            f"{it.processor}, {quantity(it.cores, 'core')}, {quantity(it.threads, 'thread')} in use",
        ),
        ("memory", f"{format_size(it.memory)}, {format_size(it.free)} free"),
        *(
            (one.device, f"{one.name}, {format_size(one.memory)}, {format_size(one.free)} free")
            for one in it.devices
        ),
        ("software", f"penstock {source}, Python {it.python}, torch {it.torch}, {triton}"),
        ("computes on", found.name),
        ("kernels", _kernels(found)),
        ("few bits", f"products with weights of few bits by {_BY[found.few_bits]}"),
    ]
    return rows + [("note", note) for note in found.notes]


def _link_rows(found: Checkup) -> list[tuple[str, str]]:
    links, gpu = found.links, found.links.link
    host, disk = f"{format_rate(links.host_read)} read", "not measured"
    copied = f"{format_rate(links.device_copy)} copied (read and written)"
    if (read := links.disk) is not None:
        how = "past the page cache" if read.direct else "through the page cache, which may have helped"
        which = "a temporary file" if read.temporary else read.file.name
        disk = f"{format_rate(read.read)} read, {how}, from {which}"
    rows = [("host memory", host if gpu else f"{host}, {copied}")]
    if gpu:
        there, back = format_rate(gpu.to_device), format_rate(gpu.from_device)
        rows += [
            ("device memory", f"{format_rate(links.device_read)} read, {copied}"),
            ("host to device", f"{there}, back {back}, each {format_rate(gpu.both)} at once"),
        ]
    arithmetic = f"{links.matmul / 1e12:.3g} TFLOP/s in {found.model.dtype}"
    return [*rows, ("disk", disk), ("arithmetic", arithmetic)]


def _step_rows(steps: StepCosts) -> list[tuple[str, str]]:
    rows = [("measured", f"{steps.measured}, in {steps.dtype}")]
    for one in steps.decode:
        fixed = (
            f"{1e6 * one.step:.3g} us and {1e6 * one.layer:.3g} us a layer ({1e6 * one.moe_layer:.3g} us "
            "with experts)"
        )
        read = (
            f"weights at {format_rate(one.weight_read)}, experts {format_rate(one.expert_read)}, KV "
            f"{format_rate(one.kv_read)}"
        )
        rows.append((f"decode, {one.rows} rows", f"{fixed}; {read}"))
    prompt = steps.prompt
    rates = ", ".join(
        f"{name} {getattr(prompt, name) / 1e12:.3g} TFLOP/s" for name in ("products", "experts", "attention")
    )
    if steps.cpu_read:
        by_rows = ", ".join(format_rate(rate) for rate in steps.cpu_read)
        rows.append(("cpu, int4", f"feed-forwards of 1, 2, 4, 8 and 16 rows at {by_rows}"))
    launched = "" if steps.host else f"; launched in {1e3 * prompt.host_layer:.3g} ms a layer"
    rows.append(("prompts", f"{rates}{launched}"))
    return rows


def _model_rows(model: ModelCheck) -> list[tuple[str, str]]:
    chosen = next(one for one in model.limits if one.dtype == model.dtype)
    rows = [
        ("from", f"{model.path}"),
        (
            "shape",
            f"{model.family}, {quantity(model.layers, 'layer')}, {model.parameters / 1e6:,.4g}M parameters, "
            f"context {model.max_length:,}",
        ),
        (
            "budget",
            f"{format_size(model.room.device)}"
            + (f", and {format_size(model.room.host)} on the host" if model.room.host else ""),
        ),
    ]
    for one in model.limits:
        fits = "fits" if one.fits else f"{format_size(one.host_bytes + one.disk_bytes)} too much"
        size = f"weights {format_size(one.weight_bytes)}, KV {format_size(one.kv_token_bytes)} a token"
        rows.append((one.dtype, f"{size}: {fits}, {_pace(one)}"))
    rows.append(("runs in", f"{chosen.dtype}; prompts at most at {_rate(model.prefill)} tokens/s"))
    rows.append(("limited by", f"{chosen.binding}: {format_size(chosen.binding_bytes)} a token"))
    if chosen.longest is None:
        rows.append(("context", "the weights leave no room for KV"))
    else:
        why = (
            "all the model can"
            if chosen.longest == model.max_length
            else "what fits beside the weights, before activations"
        )
        slow = (
            f", at most {_rate(chosen.decode_longest)} tokens/s at its end" if chosen.decode_longest else ""
        )
        rows.append(("context", f"{chosen.longest:,} tokens, {why}{slow}"))
    return rows


def _pace(one: ModelLimits) -> str:
    if one.decode is None:
        return "how fast it could be streamed is not known"
    how = "decodes" if one.fits else "streamed it would decode"
    return f"{how} at most {_rate(one.decode)} tokens/s"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
