"""Divides an engine among several devices: each rank's part of the model, its device, and its exchanges."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from penstock.arch.formats.recipe import quantised_here
from penstock.arch.parts import held
from penstock.arch.shards import WHOLE, Shard
from penstock.arch.spec import ModelSpec
from penstock.base.config import Config
from penstock.base.errors import ConfigError, DeviceError
from penstock.base.units import counted
from penstock.engine.budget import Budget
from penstock.engine.contexts import LongRoom
from penstock.engine.placing import Model
from penstock.engine.plan import Outline
from penstock.kv.ledger.keys import KEY_BYTES
from penstock.memory.device import choose_device
from penstock.weights.checkpoint.heads import HeadCheckpoint
from penstock.weights.checkpoint.reader import Checkpoint
from penstock.weights.checkpoint.shape import Shape
from penstock.weights.pack.reader import Pack
from penstock.worker.collectives import RankCollectives

if TYPE_CHECKING:  # Needed by several ranks alone.
    from penstock.parallel.group import Group


@dataclass(frozen=True, slots=True)
class Place:
    """Says which part of the model this process has, and where it computes.

    group: of all ranks, if there are others.
    last: callbacks for when no other rank is left.
    """

    device: torch.device
    shard: Shard = WHOLE
    group: "Group | None" = None
    last: ExitStack = field(default_factory=ExitStack)

    def least(self, value: int) -> int:
        """Return the smallest value of any rank, which all of them then use."""
        return self.group.least(value) if self.group is not None else value

    def shares(self, budget: Budget) -> tuple[str, ...]:
        """Return the budgets of all ranks as text, in order of rank. To be called on all at once."""
        if self.group is None:
            return (str(budget),)
        return tuple(one.decode() for one in self.group.exchange(str(budget).encode()))

    def agree(self, outline: Outline[LongRoom]) -> Outline[LongRoom]:
        """Return the outline with the least limits and far KV of any rank: a plan names slots for all."""
        if self.group is None or outline.settings.host_kv_memory in (0, "0"):
            return outline
        far, limits = outline.far, outline.limits
        tokens = self.least(limits.max_step_tokens)
        mine = (far.blocks, far.on_disk, far.tile_tokens, far.store_bytes) if far else (0,) * 4
        blocks, on_disk, tile, store = map(self.least, mine)
        if far is not None and blocks:
            chunk = tokens // limits.block_size * limits.block_size
            disk = replace(far.disk, blocks=on_disk) if far.disk and on_disk else None
            far = replace(far, blocks=blocks, tile_tokens=tile, chunk_tokens=chunk, disk=disk)
            if not store:
                far = replace(far, store_bytes=0)
        return replace(outline, limits=replace(limits, max_step_tokens=tokens), far=far if blocks else None)

    def common(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return those of this rank's keys that all ranks have, in its order. To be called on all at once."""
        if self.group is None:
            return list(keys)
        every = [
            {message[at : at + KEY_BYTES] for at in range(0, len(message), KEY_BYTES)}
            for message in self.group.exchange(b"".join(keys))
        ]
        return [key for key in keys if all(key in one for one in every)]

    def collectives(self, spec: ModelSpec, dtype: str) -> RankCollectives | None:
        """Return the collectives with the other ranks, or None without any. All ranks call it at once."""
        if self.group is None:
            return None
        collectives = RankCollectives(self.group, spec, getattr(torch, dtype))
        self.last.callback(collectives.close)
        collectives.open()
        return collectives


def device_of(config: Config, local: int) -> torch.device:
    """Return the device of the `local`th rank of a machine. Raises DeviceError if it is not there,
    ConfigError if one device was named for all."""
    device = choose_device(config.device)
    if device.type == "cpu" or config.tensor_parallel == 1:
        return device
    if ":" in config.device:
        raise ConfigError(
            f"device is {config.device}, but tensor_parallel={config.tensor_parallel} takes one device for "
            "each rank, from cuda:0 on; set device to cuda, and choose GPUs with CUDA_VISIBLE_DEVICES"
        )
    there = torch.cuda.device_count()
    if local >= there:
        raise DeviceError(
            f"tensor_parallel is {config.tensor_parallel}, but this machine has "
            f"{counted(there, 'CUDA device')}; lower tensor_parallel, or set device to cpu"
        )
    return torch.device("cuda", local)


def team_config(config: Config, *models: Model) -> Config:
    """Return the settings of each rank. Raises ConfigError for what several ranks, or so many of one of these
    models, cannot do. A second model is the draft model."""
    for model, whose in zip(models, ("the model's", "the draft model's"), strict=False):
        if isinstance(model, HeadCheckpoint):  # Each rank has all of it.
            continue
        held(model.spec, Shard(0, config.tensor_parallel), whose)
        if isinstance(model, Pack):
            few = quantised_here(model.config)
            raise ConfigError(
                f"tensor_parallel={config.tensor_parallel} needs a checkpoint, of which each rank reads its "
                f"part, but {model.path} is a pack; give the checkpoint it was made of"
                + (", or one that is published in few bits, or leave tensor_parallel out" if few else "")
            )
    if config.host_kv_memory is None and config.disk_kv_memory is None:
        return replace(
            config, host_kv_memory=0
        )  # What each rank has room for differs: it is to be asked for.
    return config


@contextmanager
def threads_of_rank(device: torch.device, ranks: int, asked: int | None = None) -> Iterator[None]:
    """Compute with this rank's share of the CPU threads: of those that were `asked` for, or of those that
    there are. Threads of several ranks that wait for each other are far slower."""
    before = torch.get_num_threads()
    if device.type == "cpu" or asked is not None:
        torch.set_num_threads(max(1, (asked or before) // ranks))
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True, slots=True)
class HeadPath:
    """Says where the checkpoint of a draft head is, or that of the model whose MTP layer drafts."""

    path: Path
    of_mtp: bool


Description = Path | HeadPath | Shape


def described(model: Model) -> Description:
    """Return a description from which another process opens the same model."""
    if isinstance(model, Shape):
        return model
    path = model.path.resolve()
    return HeadPath(path, model.head.place is not None) if isinstance(model, HeadCheckpoint) else path


def open_described(what: Description, cache: Path) -> Checkpoint | Shape:
    """The model that another process has described. cache: where digests of weight files are remembered."""
    if isinstance(what, HeadPath):
        return (HeadCheckpoint.open_mtp if what.of_mtp else HeadCheckpoint.open_head)(what.path)
    return what if isinstance(what, Shape) else Checkpoint.open(what, cache)
