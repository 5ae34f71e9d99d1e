"""Costs of a step on a device are what it takes beyond the bytes it moves: launches, and the share of the
ceilings that kernels reach.

`penstock doctor` measures these costs once for a device (`bench.calibration`) and keeps them; `forecast`
reckons with them. All of it is arithmetic over a model's shape, so a forecast needs neither torch nor the
device.
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

FORMAT = 1
RECORDED_TOKENS = 512
"""Prompts of up to so many tokens are replayed as CUDA graphs where a dense model is resident; longer ones
are launched by the host."""
MAX_BYTES = 1 << 20
_UNFIT = re.compile(r"[^A-Za-z0-9]+")


@dataclass(frozen=True, slots=True)
class DecodeCosts:
    """A decode step of `rows` sequences takes `step` seconds, `layer` for each dense layer and `moe_layer`
    for each with experts, and reads weights, chosen experts and KV at `weight_read`, `expert_read` and
    `kv_read` bytes/s."""

    rows: int
    step: float
    layer: float
    moe_layer: float
    weight_read: float
    expert_read: float
    kv_read: float


@dataclass(frozen=True, slots=True)
class PromptCosts:
    """A step over prompts computes products of dense weights and of experts, and attention, at `products`,
    `experts` and `attention` operations/s; what passes between products moves at `activations` bytes/s; a
    step takes `step` seconds more.

    The host launches it in `host_step` seconds, `host_layer` for each dense layer and `host_moe_layer` for
    each with experts. Device and host work at the same time.
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
    """Of a device in one dtype. `decode` is in the order of rows. `expert_layer`: seconds of a decode step
    for each layer some of whose experts are not on the device, whatever comes; the host waits there for what
    the router chose. 0: not measured.

    link_rate, device_read: bytes/s from pinned host memory and of the device's own; compute: operations/s of
    a large product. The ceilings that were measured in the same minute.
    """

    device: str
    dtype: str
    measured: str
    """Says when and with what it was measured: date, penstock, torch."""
    link_rate: float
    device_read: float
    compute: float
    decode: tuple[DecodeCosts, ...]
    prompt: PromptCosts
    expert_layer: float = 0.0

    def rows(self, rows: float) -> DecodeCosts:
        """The costs of a decode step of `rows` sequences, interpolated between those measured (seconds per
        byte and seconds, linear in the logarithm of rows); beyond the last it is the last's."""
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
        """Return all of it, as a line of JSON."""
        return json.dumps({"format": FORMAT, **asdict(self)})

    @classmethod
    def parse(cls, text: str, where: str) -> Self:
        """Read what `line` wrote. Raises ConfigError, naming `where`, for anything else."""
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
            if body or not all(isinstance(text, str) for text in (device, dtype, measured)):
                raise ValueError("it has other fields")
            if not 0 <= wait < math.inf or not all(0 < rate < math.inf for rate in (link, read, compute)):
                raise ValueError("it has numbers that cannot be")
            if not decode or [one.rows for one in decode] != sorted({one.rows for one in decode}):
                raise ValueError("rows are not in order")
            return cls(device, dtype, measured, link, read, compute, decode, prompt, wait)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"{where} is no file of measured step costs ({error}); remove it, and run `penstock doctor` "
                "to measure again"
            ) from error

    # ---- seconds

    def decode_seconds(self, rows: float, work: UseWork) -> float:
        """Seconds on the device of a use's part of a decode step of `rows` sequences. Beyond the rows that
        were measured the products of many rows may take longer than reading what they multiply."""
        costs, prompt = self.rows(rows), self.prompt
        fixed = work.steps * costs.step + work.layers * costs.layer + work.moe_layers * costs.moe_layer
        weights = max(work.weights / costs.weight_read, work.products / prompt.products)
        experts = max(work.experts / costs.expert_read, work.expert_products / prompt.experts)
        return fixed + weights + experts + work.kv / costs.kv_read

    def launch_seconds(self, spec: ModelSpec, tokens: float) -> float:
        """Seconds in which the host launches a step over prompts of so many tokens; none to speak of where it
        is replayed."""
        if spec.moe is None and tokens <= RECORDED_TOKENS:
            return 0.0
        moe_layers = sum(spec.moe_layers)
        prompt = self.prompt
        return (
            prompt.host_step
            + (spec.layers - moe_layers) * prompt.host_layer
            + moe_layers * prompt.host_moe_layer
        )


def prompt_seconds(costs: PromptCosts, work: UseWork) -> float:
    """Seconds on the device of a use's part of a step over prompts."""
    products = work.products / costs.products + work.expert_products / costs.experts
    return (
        work.steps * costs.step
        + products
        + work.attention / costs.attention
        + work.activations / costs.activations
    )


def costs_file(cache: Path, device: str, dtype: str) -> Path:
    """Return where the costs of a device are kept in the cache directory `cache`."""
    return cache / "costs" / f"{_UNFIT.sub('-', device).strip('-').lower()[:80]}-{dtype}.json"


def keep_costs(costs: StepCosts, file: Path) -> None:
    """Write them, at once or not at all. Raises ConfigError."""
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
    """Raises ConfigError for a file that cannot be read or holds something else."""
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
    """A record of positive numbers; fixed seconds may be 0."""
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
    if not all(0 <= value < math.inf and (value > 0 or name not in rates) for name, value in values.items()):
        raise ValueError(f"{kind.__name__} has numbers that cannot be")
    return kind(**values)


def _between(low: DecodeCosts, high: DecodeCosts, share: float, rows: int) -> DecodeCosts:
    def mean(name: str) -> float:
        first, last = getattr(low, name), getattr(high, name)
        if name.endswith("_read"):
            return float(1 / ((1 - share) / first + share / last))
        return float((1 - share) * first + share * last)

    return DecodeCosts(rows, *(mean(field.name) for field in fields(DecodeCosts)[1:]))
