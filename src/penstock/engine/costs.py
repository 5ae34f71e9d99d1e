"""Holds the costs of a step on a device beyond its bytes: launches, and the efficiency of kernels.

`penstock doctor` measures them once for a device (`bench.doctor.calibration`) and keeps them. `forecast` uses
them. All of it is arithmetic over a model's shape, so a forecast needs neither torch nor the device.
"""

import json
import math
import os
import re
import tempfile
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from penstock.arch.spec import ModelSpec
from penstock.base.errors import ConfigError
from penstock.engine.passes import UseWork
from penstock.memory.disk import make_private
from penstock.ops.row_classes import CLASSES

FORMAT = 1
FEW_BITS = "int4"
"""The format that a CPU's costs with weights of few bits are measured with."""
RECORDED_TOKENS = 512
"""Most tokens of a prompt that is replayed as a CUDA graph, where a dense model is resident."""
SLOT_FETCH = 0.93
"""Share of its copies' rate at which a device reads experts by itself, at most: 51.0 of 54.5 GB/s were the
most of 29 kernels on an H100."""
MAX_BYTES = 1 << 20
_MOST = 3600.0
"""No fixed cost is as many seconds."""
_UNFIT = re.compile(r"[^A-Za-z0-9]+")


@dataclass(frozen=True, slots=True)
class DecodeCosts:
    """Holds the costs of a decode step of `rows` sequences.

    step, layer, moe_layer: seconds of a step, of each dense layer, and of each with experts.
    weight_read, expert_read, kv_read: bytes/s of weights, chosen experts and KV.
    """

    rows: int
    step: float
    layer: float
    moe_layer: float
    weight_read: float
    expert_read: float
    kv_read: float


@dataclass(frozen=True, slots=True)
class PromptCosts:
    """Holds the costs of a step over prompts. Device and host work at the same time.

    products, experts, attention: operations/s of dense weights, of experts, and of attention.
    activations: bytes/s of activations between products.
    step: seconds that a step takes beside these.
    host_step, host_layer, host_moe_layer: seconds in which the host launches a step, each dense layer, and
        each with experts.
    """

    products: float
    experts: float
    attention: float
    activations: float
    step: float
    host_step: float
    host_layer: float
    host_moe_layer: float


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Holds the costs of steps on one device in one dtype.

    measured: date and versions of penstock and torch.
    link_rate, device_read: bytes/s from pinned host memory, and of the device's own, measured in the same
        minute.
    compute: operations/s of a large product, measured in the same minute.
    decode: in order of rows.
    expert_layer: seconds of a decode step for each layer with experts that are not on the device, since the
        host waits for the router's choice. 0 was not measured.
    slot_layer: the same where the device decides which of them come: what deciding takes, and computing with
        the last that come (see `slot_seconds`).
    cpu_read: bytes/s that the CPU reads of feed-forwards in int4 that it computes, by class of rows, while
        the link carries something else. Empty was not measured.
    host: whether the device is the CPU itself. It launches and computes in turn, so both add up.
    disk_rate: bytes/s of reads from disk; 0 was not measured.
    """

    device: str
    dtype: str
    measured: str
    link_rate: float
    device_read: float
    compute: float
    decode: tuple[DecodeCosts, ...]
    prompt: PromptCosts
    expert_layer: float = 0.0
    slot_layer: float = 0.0
    cpu_read: tuple[float, ...] = ()
    host: bool = False
    disk_rate: float = 0.0

    def rows(self, rows: float) -> DecodeCosts:
        """Return the costs of a decode step of `rows` sequences.

        They are interpolated between those measured: seconds and seconds per byte, linear in the logarithm of
        rows. Beyond the last, the last holds.
        """
        there = self.decode
        if rows <= there[0].rows:
            return there[0]
        for low, high in pairwise(there):
            if rows <= high.rows:
                return _between(
                    low, high, math.log(rows / low.rows) / math.log(high.rows / low.rows), round(rows)
                )
        return there[-1]

    def line(self) -> str:
        """Return the costs as a line of JSON."""
        body = asdict(self)
        for name in ("host", "disk_rate"):  # Versions that do not know these read the others.
            if not body[name]:
                del body[name]
        return json.dumps({"format": FORMAT, **body})

    @classmethod
    def parse(cls, text: str, where: str) -> Self:
        """Read the result of `line`. Raises ConfigError, which names `where`, for anything else."""
        try:
            body = json.loads(text)
            if not isinstance(body, dict) or body.pop("format", None) != FORMAT:
                raise ValueError(f"not of format {FORMAT}")
            decode = tuple(_numbers(DecodeCosts, one) for one in body.pop("decode"))
            prompt = _numbers(PromptCosts, body.pop("prompt"))
            device, dtype, measured = (body.pop(name) for name in ("device", "dtype", "measured"))
            link, read, compute, wait = (
                float(body.pop(name)) for name in ("link_rate", "device_read", "compute", "expert_layer")
            )
            slots = float(body.pop("slot_layer", 0.0))
            cpu = tuple(map(float, body.pop("cpu_read", ())))
            host, disk = body.pop("host", False) is True, float(body.pop("disk_rate", 0.0))
            if body or not all(isinstance(text, str) for text in (device, dtype, measured)):
                raise ValueError("it has other fields")
            rates = (link, read, compute, *cpu, *([disk] if disk else []))
            if not all(0 <= cost < _MOST for cost in (wait, slots)) or not all(
                1 <= rate < math.inf for rate in rates
            ):
                raise ValueError("it has numbers that cannot be")
            if not decode or [one.rows for one in decode] != sorted({one.rows for one in decode}):
                raise ValueError("rows are not in order")
            if cpu and len(cpu) != CLASSES:
                raise ValueError(f"the CPU has {len(cpu)} rates, not {CLASSES}")
            return cls(
                device, dtype, measured, link, read, compute, decode, prompt, wait, slots, cpu, host, disk
            )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
            raise ConfigError(
                f"{where} is no file of measured step costs ({error}); remove it, and run `penstock doctor` "
                "to measure again"
            ) from error

    # ---- seconds

    def decode_seconds(self, rows: float, work: UseWork) -> float:
        """Return the device's seconds for a use's part of a decode step of `rows` sequences.

        With more rows than were measured, products may take longer than reading their weights.
        """
        costs, prompt = self.rows(rows), self.prompt
        weights = max(work.weights / costs.weight_read, work.products / prompt.products)
        experts = max(work.experts / costs.expert_read, work.expert_products / prompt.experts)
        return self.fixed_seconds(rows, work) + weights + experts + work.kv / costs.kv_read

    def fixed_seconds(self, rows: float, work: UseWork) -> float:
        """Return the seconds that a use takes in a decode step whatever its size."""
        costs = self.rows(rows)
        return work.steps * costs.step + work.layers * costs.layer + work.moe_layers * costs.moe_layer

    def chunk_seconds(self, work: UseWork) -> float:
        """Return the seconds of a use's part of a step over prompts on a CPU, which launches what it
        computes."""
        one = self.rows(1)
        read = work.weights / one.weight_read + work.experts / one.expert_read
        return self.fixed_seconds(1, work) + max(prompt_seconds(self.prompt, work), read)

    def slot_seconds(
        self, rows: float, layers: int, asked: float, come: float, size: float, link: float, taken: float = 0
    ) -> float:
        """Return the seconds by which layers with slots are slower in a decode step of `rows` sequences than
        with all experts on the device.

        The device fetches what comes, and meanwhile computes with what is there, in those layers in which
        anything comes. asked, come: experts, in all `layers`. size: bytes of one. link: bytes/s. taken:
        seconds that coming takes, instead of what this link takes for all of them.
        """
        fetch = taken or come * size / self.slot_rate(link)
        something = 1 - math.pow(max(1 - come / asked, 0.0), asked / layers)
        meanwhile = something * asked * size / self.rows(rows).expert_read
        return max(fetch - meanwhile, 0.0) + layers * self.slot_layer

    def slot_rate(self, link: float) -> float:
        """Return the bytes/s at which a device reads experts by itself, over a link of so many bytes/s. One
        that is slower than the one measured is used in full, of a faster one SLOT_FETCH."""
        return min(link, SLOT_FETCH * max(link, self.link_rate))

    def launch_seconds(self, spec: ModelSpec, tokens: float) -> float:
        """Return the host's seconds to launch a step over prompts of so many tokens, 0 if it is replayed."""
        if spec.moe is None and tokens <= RECORDED_TOKENS:
            return 0.0
        return self.eager_seconds(spec)

    def eager_seconds(self, spec: ModelSpec) -> float:
        """Return the host's seconds to launch every kernel of a step that is not replayed."""
        moe_layers = sum(spec.moe_layers)
        prompt = self.prompt
        return (
            prompt.host_step
            + (spec.layers - moe_layers) * prompt.host_layer
            + moe_layers * prompt.host_moe_layer
        )


def prompt_seconds(costs: PromptCosts, work: UseWork) -> float:
    """Return the device's seconds for a use's part of a step over prompts."""
    products = work.products / costs.products + work.expert_products / costs.experts
    return (
        work.steps * costs.step
        + products
        + work.attention / costs.attention
        + work.activations / costs.activations
    )


def host_kind(dtype: str, few_bits: str) -> str:
    """Return what a CPU's costs are kept by beside its name: dtype, and whether weights have few bits.

    few_bits: the format of weights, empty for dense ones. One format stands for all.
    """
    return f"{dtype}-{FEW_BITS}" if few_bits else dtype


def costs_file(cache: Path, device: str, dtype: str) -> Path:
    """Return the file of a device's costs in the cache directory `cache`."""
    return cache / "costs" / f"{_UNFIT.sub('-', device).strip('-').lower()[:80]}-{dtype}.json"


def keep_costs(costs: StepCosts, file: Path) -> None:
    """Write the costs atomically. Raises ConfigError."""
    try:
        make_private(file.parent)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=".costs-", delete=False) as beside:
            beside.write(costs.line() + "\n")
        os.replace(beside.name, file)
    except OSError as error:
        raise ConfigError(
            f"cannot write the measured step costs to {file}: {error.strerror or error}; name another --cache"
        ) from error


def read_costs(file: Path) -> StepCosts:
    """Read costs from a file. Raises ConfigError if it cannot be read or holds anything else."""
    try:
        if file.stat().st_size > MAX_BYTES:
            raise ConfigError(
                f"{file} is too large for a file of step costs; name one that `penstock doctor` wrote"
            )
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read the measured step costs from {file}: {error}; run `penstock doctor` to measure them"
        ) from error
    return StepCosts.parse(text, str(file))


def _numbers(kind: type[DecodeCosts] | type[PromptCosts], body: object) -> Any:
    """Return a record of positive numbers. Fixed seconds may be 0."""
    if not isinstance(body, dict) or set(body) != {field.name for field in fields(kind)}:
        raise ValueError(f"{kind.__name__} has other fields")
    values: dict[str, Any] = {
        name: int(value) if name == "rows" else float(value) for name, value in body.items()
    }
    rates = {
        "rows",
        "weight_read",
        "expert_read",
        "kv_read",
        "products",
        "experts",
        "attention",
        "activations",
    }
    if not all(
        1 <= value < math.inf if name in rates else 0 <= value < _MOST for name, value in values.items()
    ):
        raise ValueError(f"{kind.__name__} has numbers that cannot be")
    return kind(**values)


def _between(low: DecodeCosts, high: DecodeCosts, share: float, rows: int) -> DecodeCosts:
    def mean(name: str) -> float:
        first, last = getattr(low, name), getattr(high, name)
        if name.endswith("_read"):
            return float(1 / ((1 - share) / first + share / last))
        return float((1 - share) * first + share * last)

    return DecodeCosts(rows, *(mean(field.name) for field in fields(DecodeCosts)[1:]))
