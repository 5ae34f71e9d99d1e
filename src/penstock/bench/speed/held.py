"""Holds the link of a GPU to a rate while a benchmark runs: what another machine's link would do."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from penstock.base.errors import ConfigError
from penstock.base.units import format_size
from penstock.bench.speed import contexts
from penstock.engine import placing, settling
from penstock.memory.device import choose_device
from penstock.memory.streams import CudaStream, Pieces
from penstock.ops.kernels import triton_kernels
from penstock.ops.slots import ExpertParts, Places, SlotArrays
from penstock.weights.streaming.slotted import SlotExperts

_LEAST = 1 << 20
"""Bytes/s below which a copy would take hours."""


@contextmanager
def held_link(device: str, rate: float | None) -> Iterator[None]:
    """Let whatever streams copy between host and device, and experts that a GPU fetches itself, take as long
    as at `rate` bytes/s each way. None holds nothing.

    Rates that are measured meanwhile are at most as high. Raises ConfigError where there is no such link.
    """
    if rate is None:
        yield
        return
    if rate < _LEAST:
        raise ConfigError(
            f"--link-rate of {format_size(int(rate))} a second is less than {format_size(_LEAST)}; "
            "write bytes, as 25GB"
        )
    where = choose_device(device)
    if where.type != "cuda":
        raise ConfigError(f"--link-rate is for GPUs, and the device is {where}; leave it out")
    pace, slots = triton_kernels("pace"), triton_kernels("slots")
    if pace is None or slots is None:
        raise ConfigError("--link-rate needs Triton's kernels; leave it out, or install triton")
    up, down = pace.LinkPace(where, rate), pace.LinkPace(where, rate)

    def paced(
        stream: CudaStream, target: Tensor, source: Tensor, size: int, copy: Callable[[], None]
    ) -> None:
        way = None if target.is_cuda == source.is_cuda else up if target.is_cuda else down
        if way is None:
            return copy()
        stream.run(way.begin)
        copy()
        stream.run(lambda: way.end(size))

    real = CudaStream.copy, CudaStream.copy_rows, CudaStream.copy_pieces

    def copy(stream: CudaStream, target: Tensor, source: Tensor) -> None:
        paced(stream, target, source, source.nbytes, lambda: real[0](stream, target, source))

    def copy_rows(stream: CudaStream, target: Tensor, source: Tensor) -> None:
        paced(stream, target, source, source.numel(), lambda: real[1](stream, target, source))

    def copy_pieces(stream: CudaStream, target: Tensor, source: Tensor, pieces: Pieces) -> None:
        size = int(pieces[:, 2].sum())
        paced(stream, target, source, size, lambda: real[2](stream, target, source, pieces))

    fetch, fetch_ahead = slots.fetch, slots.fetch_ahead

    def held_fetch(parts: ExpertParts, places: Places, host: int, part: int) -> None:
        up.begin()
        fetch(parts, places, host, part)
        up.end_of_part(parts, places, part, slots.piece_of(places))

    def held_fetch_ahead(arrays: SlotArrays, places: Places, host: int) -> None:
        up.begin()
        fetch_ahead(arrays, places, host)
        up.end_of_pieces(arrays.done, slots.piece_of(places))

    def at_most(measure: Callable[..., float]) -> Callable[..., float]:
        @wraps(measure)
        def measured(*args: Any, **kwargs: Any) -> float:
            return min(measure(*args, **kwargs), rate)

        return measured

    with ExitStack() as held:
        for owner, name, other in (
            (CudaStream, "copy", copy),
            (CudaStream, "copy_rows", copy_rows),
            (CudaStream, "copy_pieces", copy_pieces),
            (SlotExperts, "steady", False),  # One launch for a whole step cannot be held.
            (slots, "fetch", held_fetch),
            (slots, "fetch_ahead", held_fetch_ahead),
            *((module, "copy_rate", at_most(module.copy_rate)) for module in (placing, settling, contexts)),
        ):
            held.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, other)
        torch.cuda.synchronize(where)  # Streams that copy do not wait for what a pace begins with.
        yield
