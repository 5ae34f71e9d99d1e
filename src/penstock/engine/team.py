"""An engine on several devices: which part of the model each rank has, on which device, and what it exchanges
with the others."""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.arch.parts import held
from penstock.arch.shards import WHOLE, Shard, cut
from penstock.arch.spec import ModelSpec
from penstock.base.config import Config, peers_disabled
from penstock.base.errors import ConfigError, DeviceError
from penstock.engine.placing import Model
from penstock.memory.device import choose_device
from penstock.memory.windows import Window
from penstock.ops.kernels import sum_kernels
from penstock.ops.norm import add_rms_norm
from penstock.weights.checkpoint.reader import Checkpoint
from penstock.weights.checkpoint.shape import Shape
from penstock.weights.pack.reader import Pack

if TYPE_CHECKING:  # Needed by several ranks alone.
    from penstock.parallel.group import Group

_LOG = logging.getLogger("penstock")
_TRIAL = 30_000_000_000
"""Nanoseconds that ranks wait for each other's first sum, which each may have to compile."""


@dataclass(frozen=True, slots=True)
class Place:
    """This process's part of the model, and where it computes. `group`: of all ranks, if there are others.
    `last`: what is to be done when no other rank is left."""

    device: torch.device
    shard: Shard = WHOLE
    group: "Group | None" = None
    last: ExitStack = field(default_factory=ExitStack)

    def least(self, value: int) -> int:
        """The smallest that any rank says, which all of them then go by."""
        return self.group.least(value) if self.group is not None else value

    def collectives(self, spec: ModelSpec, dtype: str) -> "Collectives | None":
        """On all ranks at once."""
        if self.group is None:
            return None
        collectives = Collectives(self.group, spec, getattr(torch, dtype))
        self.last.callback(collectives.close)
        collectives.open()
        return collectives


class Collectives:
    """What a decoder asks of the others. Of the group, which knows nothing of models, with the widths of
    every rank's logits; and where GPUs reach each other, sums of few rows in one launch, through windows
    (`ops.triton_sums`)."""

    def __init__(self, group: "Group", spec: ModelSpec, dtype: torch.dtype) -> None:
        self._group, self._hidden, self._dtype = group, spec.hidden_size, dtype
        self._widths = [len(cut(spec.vocab_size, Shard(rank, group.ranks))) for rank in range(group.ranks)]
        self.rows = 0
        """Sums of up to so many take one launch."""
        self.bytes = 0
        """Of the device, for good."""
        self._window: Window | None = None

    def open(self) -> None:
        """Open windows, where that is possible. On all ranks at once."""
        group = self._group
        kernels = _kernels(group.device) if group.near else None
        if kernels is None or not kernels.suits(self._hidden, self._dtype):
            return
        rows = group.least(kernels.most_rows(group.device))
        size = kernels.window_bytes(group.ranks, rows, self._hidden, self._dtype)
        if not (addresses := self._addresses(size)):
            return
        turns = torch.zeros(rows, dtype=torch.int32, device=group.device)
        where = torch.tensor([group.over.data_ptr(), *addresses], device=group.device)
        self._kernels, self._shared = kernels, kernels.Shared(group.rank, group.ranks, where, turns, _TRIAL)
        if group.device.type == "cuda":
            torch.cuda.synchronize(group.device)
        group.barrier()
        if self._tried(rows):
            self._shared = replace(self._shared, limit=int(group.limit * 1e9))
            self.rows, self.bytes = rows, size
        else:
            self._give_up("what one GPU wrote did not come to another; is NCCL_P2P_DISABLE=1 missing?")

    def all_reduce(self, x: Tensor) -> None:
        if 0 < len(x) <= self.rows:
            self._kernels.sum_over_ranks(x, self._shared)
        else:
            self._group.all_reduce(x)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        if 0 < len(x) <= self.rows:
            normed: Tensor = self._kernels.sum_rms_norm(x, residual, weight, eps, self._shared)
            return normed
        self._group.all_reduce(x)
        return add_rms_norm(x, residual, weight, eps)

    def gather(self, x: Tensor) -> Tensor:
        return self._group.gather(x, self._widths)

    def close(self) -> None:
        """Once no other rank is left. Nobody waits for any: freeing would wait for who does."""
        if self._window is not None:
            self._group.abort()
            self._window.close()

    def _addresses(self, size: int) -> list[int]:
        """Where the windows of all begin for this device; none where any two GPUs do not reach each other."""
        group, addresses, why = self._group, list[int](), ""
        if peers_disabled():
            why = "NCCL_P2P_DISABLE is set"
        else:
            try:
                self._window = Window(group.device, size)
            except DeviceError as fault:
                why = str(fault)
        handles = group.exchange(self._window.handle if self._window else b"")
        if self._window and all(handles):
            try:
                own = self._window
                addresses = [
                    own.address if rank == group.rank else own.see(handle)
                    for rank, handle in enumerate(handles)
                ]
            except DeviceError as fault:
                why = str(fault)
        if group.least(len(addresses)):
            return addresses
        self._give_up(why or "another rank cannot")
        return []

    def _tried(self, rows: int) -> bool:
        """Whether a sum of as many rows as may be comes out right on all ranks, in time that also suffices to
        compile it."""
        group = self._group
        x = torch.arange(rows, device=group.device).remainder(7).to(self._dtype)[:, None].repeat(
            1, self._hidden
        ) * (group.rank + 1)
        want = x.clone()
        group.all_reduce(want)
        self._kernels.sum_over_ranks(x, self._shared)
        right = bool(torch.equal(x, want)) and not int(group.over)
        everywhere = group.least(right) > 0
        group.over.zero_()
        return everywhere

    def _give_up(self, why: str) -> None:
        """On all ranks."""
        _LOG.info("sums over ranks go by NCCL: %s", why)
        window, self._window = self._window, None
        if window is not None:
            window.look_away()
        self._group.barrier()
        if window is not None:
            window.close()


def _kernels(device: torch.device) -> ModuleType | None:
    return sum_kernels() if device.type == "cuda" else None


def device_of(config: Config, local: int) -> torch.device:
    """The device of the `local`th rank of a machine. Raises DeviceError if it is not there, ConfigError if
    one device was named for all."""
    device = choose_device(config.device)
    if device.type == "cpu" or config.tensor_parallel == 1:
        return device
    if ":" in config.device:
        raise ConfigError(
            f"device {config.device} was asked for, but tensor_parallel={config.tensor_parallel} takes one "
            "device for each rank, from "
            "cuda:0 on; give device cuda, and choose devices by CUDA_VISIBLE_DEVICES"
        )
    there = torch.cuda.device_count()
    if local >= there:
        raise DeviceError(
            f"tensor_parallel={config.tensor_parallel} was asked for, but {there} CUDA devices are there; "
            "ask for as many, or for the CPU"
        )
    return torch.device("cuda", local)


def team_config(config: Config, model: Model) -> Config:
    """The settings of each rank. Raises ConfigError for what several ranks, or so many of this model, cannot
    do."""
    held(model.spec, Shard(0, config.tensor_parallel))
    if isinstance(model, Pack):
        raise ConfigError(
            f"tensor_parallel={config.tensor_parallel} needs a checkpoint, of which each rank reads its "
            f"part, but {model.path} is a pack; "
            "give the checkpoint it was made of"
        )
    far = {"host_kv_memory": config.host_kv_memory, "disk_kv_memory": config.disk_kv_memory}
    for name, value in far.items():
        if value not in (None, 0, "0"):
            raise ConfigError(
                f"{name} {value} goes with a single device so far; leave it, or tensor_parallel"
            )
    return replace(config, host_kv_memory=0)


def share_threads(device: torch.device, ranks: int) -> Callable[[], None]:
    """Where ranks compute on the same cores: this process's part of its threads, since threads that wait for
    each other take far longer. Returns what gives it back all that it had."""
    before = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(max(1, before // ranks))
    return lambda: torch.set_num_threads(before)


def described(model: Model) -> Path | Shape:
    """By which another process opens the same model."""
    return model if isinstance(model, Shape) else model.path.resolve()


def open_described(what: Path | Shape, cache: Path) -> Checkpoint | Shape:
    """The model that another process has described. cache: where digests of weight files are remembered."""
    return what if isinstance(what, Shape) else Checkpoint.open(what, cache)
