"""Makes the beginning that all benchmarks of an engine share: a model is opened, device and dtype are
settled, and the engine is built."""

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock.arch import bounds
from penstock.arch.formats.recipe import name_with_group
from penstock.arch.layout import GroupLayout, group_layouts
from penstock.arch.spec import ModelSpec
from penstock.base.config import Config
from penstock.bench.report import Subject
from penstock.bench.shapes import is_bare
from penstock.bench.speed.streaming import scratch
from penstock.engine.boot import Booted, boot
from penstock.engine.placing import Override, RoutingSource, Say
from penstock.engine.settling import choose_dtype
from penstock.memory.device import choose_device, device_name, give_back
from penstock.memory.probe import matmul_rate
from penstock.weights.checkpoint.reader import Checkpoint
from penstock.weights.checkpoint.shape import Shape
from penstock.weights.streaming.residency import WeightLimits


@dataclass(frozen=True, slots=True)
class Target:
    """Names the model to measure, and holds the settings of its engine.

    name: the model's name in the report.
    source: a parsed config.json, with random weights, or a model directory. Weights are random too where
        a directory has nothing but a config.json in it.
    scratch: a directory, and the most bytes to write there. Random weights that do not fit into memory are
        read from it.
    routing: replaces what the routers of a mixture say.
    """

    name: str
    source: Mapping[str, object] | Path
    config: Config
    scratch: tuple[Path, int] | None = None
    routing: RoutingSource | None = None


@dataclass(frozen=True, slots=True)
class OpenModel:
    """Holds a target with its model open, and builds the engine.

    layouts: all groups of weights of the whole model; each rank holds a part of it.
    """

    target: Target
    model: Checkpoint | Shape
    device: torch.device
    dtype: str
    layouts: tuple[GroupLayout, ...]

    @property
    def spec(self) -> ModelSpec:
        """Return the model's shape."""
        return self.model.spec

    @property
    def random(self) -> bool:
        """Tell whether the weights are random."""
        return not isinstance(self.model, Checkpoint)

    def subject(self, bench: str) -> Subject:
        """Return what the report of a benchmark says of the model and the device."""
        return Subject(
            bench=bench,
            model=self.target.name,
            weights="random" if self.random else "checkpoint",
            parameters=bounds.parameters(self.layouts),
            dtype=self.dtype,
            format=name_with_group(self.spec.format),
            device=device_name(self.device),
            routing=str(self.target.routing or ""),
        )

    def matmul_rate(self) -> float:
        """Measure the floating-point operations/s of a matrix product in the model's dtype."""
        return matmul_rate(self.device, getattr(torch, self.dtype))

    def boot(self, config: Config, say: Say, limits: WeightLimits | None = None) -> Booted:
        """Give back the memory that probes took, and build the engine. Raises PenstockErrors.

        say: called with each thing that the engine decides.
        limits: the room for weights, instead of what the budgets leave.
        """
        give_back(self.device)
        there = self.target.scratch if self.random else None
        with scratch(*there, self.layouts, self.dtype) if there else nullcontext() as disk:
            return boot(config, self.model, say=say, override=Override(limits, disk, self.target.routing))


@contextmanager
def opened(target: Target) -> Iterator[OpenModel]:
    """Open a target's model, and close it at the end. Raises PenstockErrors."""
    model, config = _open(target), target.config
    with closing(model) if isinstance(model, Checkpoint) else nullcontext():
        device = choose_device(config.device)
        dtype = choose_dtype(config, model, device)
        yield OpenModel(target, model, device, dtype, group_layouts(model.spec, model.names, dtype))


def _open(target: Target) -> Checkpoint | Shape:
    source = target.source
    if not isinstance(source, Path):
        return Shape.of(source, target.name)
    return (
        Shape.open(source) if is_bare(source) else Checkpoint.open(source, target.config.cache.expanduser())
    )
