"""Reads the bytes of groups from a pack or a checkpoint, or makes random numbers of which only the speed
matters."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from penstock.arch.formats.format import STORED_BYTES
from penstock.arch.layout import GroupKind, GroupLayout
from penstock.memory.disk import in_pages
from penstock.weights.checkpoint.reader import Checkpoint
from penstock.weights.pack.reader import Pack
from penstock.weights.pieces import PIECE_BYTES

_PERIOD = 8_388_593
"""Random numbers that are made; a prime, so that no two rows of a matrix begin alike."""


class WeightSource(Protocol):
    """Gives any piece of any group, to any number of threads at once."""

    def read(self, layout: GroupLayout, start: int, into: Tensor, check: bool) -> None:
        """Fill `into`, flat uint8 on the CPU, with bytes of the group from `start` on, whole pages of it;
        zeros past its end.

        `check`: whether to make sure that they are the right ones, where that is known. They are then whole
        pieces of PIECE_BYTES, but for the last. Raises CheckpointError; `into` then holds anything.
        """

    def close(self) -> None:
        """Close it: it will not be read any more."""


@dataclass(frozen=True, slots=True)
class Sources:
    """Says where groups are read from: `loaded` for those that stay on DEVICE and HOST, `streamed` for those
    that stay on DISK. Both may be one."""

    loaded: WeightSource
    streamed: WeightSource

    def close(self) -> None:
        """Close both: nothing will be read any more."""
        for source in {self.loaded, self.streamed}:
            source.close()


class PackSource:
    """Reads a pack, and owns it.

    Every piece is held against the manifest's digest when it is first read; and whenever it is read again, if
    the store may have been written meanwhile.
    """

    def __init__(self, pack: Pack) -> None:
        self.pack = pack

    def read(self, layout: GroupLayout, start: int, into: Tensor, check: bool) -> None:
        """Read a part of the pack, as `WeightSource.read` says."""
        self.pack.read_piece(layout.id, start, into, check)
        if check or not self.pack.changed:
            return
        first = start // PIECE_BYTES * PIECE_BYTES
        end = min(-(-(start + len(into)) // PIECE_BYTES) * PIECE_BYTES, in_pages(layout.size))
        pieces = torch.empty(end - first, dtype=torch.uint8)
        self.pack.read_piece(layout.id, first, pieces, True)
        into.copy_(pieces[start - first :][: len(into)])

    def close(self) -> None:
        """Close the pack."""
        self.pack.close()


class CheckpointSource:
    """Reads a checkpoint, and borrows it: it may be closed when all weights are where they stay."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def read(self, layout: GroupLayout, start: int, into: Tensor, check: bool) -> None:
        """Read and convert tensors of the checkpoint, as `WeightSource.read` says."""
        self._checkpoint.read_piece(layout, start, into)

    def close(self) -> None:
        """Do nothing: the checkpoint is the caller's."""
        pass


class WithEmbedding:
    """Reads a draft head without an embedding, and for that the target's, which it borrows."""

    def __init__(self, head: WeightSource, target: WeightSource) -> None:
        self._head, self._target = head, target

    def read(self, layout: GroupLayout, start: int, into: Tensor, check: bool) -> None:
        """Read a part of a group, as `WeightSource.read` says."""
        source = self._target if layout.id.kind is GroupKind.EMBEDDING else self._head
        source.read(layout, start, into, check)

    def close(self) -> None:
        """Close the head."""
        self._head.close()


class RandomSource:
    """Makes random weights of a usual size, the same every time, as fast as memory can be written; norms are
    ones."""

    def __init__(self, dtype: str, seed: int = 0, std: float = 0.02) -> None:
        self._seed, self._std, self._one_at_a_time = seed, std, threading.Lock()
        self._numbers(dtype, None)  # While no other memory is taken.

    def read(self, layout: GroupLayout, start: int, into: Tensor, check: bool) -> None:
        """Make a piece, as `WeightSource.read` says."""
        target, end = into.numpy(), start + len(into)
        target[:] = 0
        for number, field in enumerate(layout.fields):
            first, last = max(field.offset, start), min(field.offset + field.size, end)
            if first >= last:
                continue
            ones = field.name.endswith("norm")
            block = _ones(field.dtype) if ones else self._numbers(field.dtype, field.random)
            # A place of its own in the period for every field of every group.
            place = hash((layout.id.layer, layout.id.expert, len(layout.fields), number)) % _PERIOD
            shift = place * STORED_BYTES[field.dtype]
            at = first
            while at < last:
                begin = (shift + at - field.offset) % len(block)
                count = min(last - at, len(block) - begin)
                np.copyto(target[at - start : at - start + count], block[begin : begin + count])
                at += count

    def close(self) -> None:
        """Do nothing: there is nothing to close."""
        pass

    def _numbers(self, dtype: str, among: range | None) -> np.ndarray[Any, Any]:
        with self._one_at_a_time:  # The cache alone lets every thread that asks make its own.
            return random_numbers(dtype, self._seed, self._std, among)


def reading(source: WeightSource, layout: GroupLayout, start: int) -> Callable[[Tensor, bool], None]:
    """Return what fills a piece of the host ring, from byte `start` of the group on."""
    return lambda into, check: source.read(layout, start, into, check)


@lru_cache(maxsize=16)
def random_numbers(dtype: str, seed: int, std: float, among: range | None) -> np.ndarray[Any, Any]:
    """Return the bytes of _PERIOD random numbers, of those `among` which they are, or normal ones, or, of a
    dtype without fractions, any."""
    kind: torch.dtype = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(seed)
    if among is not None:
        numbers = torch.randint(among.start, among.stop, (_PERIOD,), generator=generator).to(kind)
    elif kind.is_floating_point:
        numbers = torch.empty(_PERIOD).normal_(0, std, generator=generator).to(kind)
    else:
        limits = torch.iinfo(kind)
        numbers = torch.randint(limits.min, limits.max + 1, (_PERIOD,), dtype=kind, generator=generator)
    return numbers.view(torch.uint8).numpy()


@lru_cache(maxsize=8)
def _ones(dtype: str) -> np.ndarray[Any, Any]:
    return torch.ones(4096, dtype=getattr(torch, dtype)).view(torch.uint8).numpy()
