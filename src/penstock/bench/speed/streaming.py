"""Adds streaming to a benchmark: random weights that really lie on a disk, and the bytes that moved, against
what the links can do."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from penstock.arch.layout import GroupId, GroupLayout
from penstock.base.errors import DeviceError
from penstock.base.meter import WeightStats
from penstock.base.units import format_rate, format_size
from penstock.bench.speed.bound import Bound
from penstock.engine.boot import Booted
from penstock.memory.disk import DirectFile, ReadError
from penstock.weights.streaming.residency import PIECE, padded
from penstock.weights.streaming.source import RandomSource, WeightSource


class _ScratchFile:
    """Reads random weights from a file. Where it may not be as large as the model, layers share its bytes.
    Reads bypass the page cache."""

    def __init__(self, file: DirectFile, offsets: dict[GroupId, int]) -> None:
        self._file, self._offsets = file, offsets

    def read(self, layout: GroupLayout, start: int, into: Tensor, check: bool) -> None:
        try:
            self._file.read_direct(into.numpy().data, self._offsets[layout.id] + start)
        except ReadError as error:
            raise DeviceError(str(error)) from error

    def close(self) -> None:
        self._file.close()


@contextmanager
def scratch(
    directory: Path, most: int, layouts: Sequence[GroupLayout], dtype: str
) -> Iterator[tuple[WeightSource, Path]]:
    """Write a temporary file in `directory` of at most `most` bytes (but one group of each size at least),
    and yield what reads it. The file has no name any more when the engine has been built, and is gone when
    that ends. Raises DeviceError."""
    random, offsets, owners, end = RandomSource(dtype), dict[GroupId, int](), dict[int, list[int]](), 0
    try:
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".penstock-scratch-") as file:
            buffer = torch.empty(PIECE, dtype=torch.uint8)
            for layout in layouts:
                size = padded(layout)
                shared = owners.setdefault(size, [])
                if shared and end + size > most:
                    offsets[layout.id] = shared[len(offsets) % len(shared)]
                    continue
                offsets[layout.id] = end
                shared.append(end)
                for start in range(0, size, PIECE):
                    part = buffer[: min(PIECE, size - start)]
                    random.read(layout, start, part, False)
                    file.write(part.numpy().data)
                end += size
            file.flush()
            os.fsync(file.fileno())
            yield _ScratchFile(DirectFile(Path(file.name)), offsets), Path(file.name)
    except OSError as error:
        raise DeviceError(
            f"cannot write weights into {directory}: {error.strerror or error}; name another directory"
        ) from error


@dataclass(frozen=True, slots=True)
class Streaming:
    """Holds the bytes that streaming moved over the timed work, against ceilings that were measured when the
    engine was built.

    resident, host, disk: bytes of weights on each tier. device_ring, host_ring: bytes of the rings.
    copied_per_pass, read_per_pass: bytes, to the device and from the disk. They are of what every token
        needs. Where experts stream, they are of experts too: in a timed decode step, or in any pass if
        prompts are timed.
    link_ceiling, disk_ceiling: in bytes/s.
    predicted_ms: of a pass that decodes one sequence. Where experts stream, of a timed decode step, by the
        formula of `penstock plan` and the experts that came; 0 for prompts, for which they are not counted.
    stalled_link, stalled_disk: seconds that a link was waited for.
    peak_device: bytes that torch had allocated at most since the process began. None on a CPU.
    experts_per_pass: experts that came to the device in a timed decode step. None for prompts, and where
        experts do not stream.
    disk_rate: bytes/s at which experts were read in timed decode steps, while any was; 0 if none was.
    expert_hits: the share that was on the device of the experts that timed decode steps asked for. None as
        for `experts_per_pass`.
    experts_by_cpu: the share of the others that the CPU computed, with other roundings than the device; 0
        where it computes none.
    cpu_rate: bytes a second of these, or of feed-forwards, that the CPU computed with, while it did.
    passes_by_cpu: the share of passes in which the CPU computed feed-forwards, with other roundings.
    """

    resident: int
    host: int
    disk: int
    device_ring: int
    host_ring: int
    copied_per_pass: int
    read_per_pass: int
    link_ceiling: float
    disk_ceiling: float
    predicted_ms: float
    stalled_link: float
    stalled_disk: float
    peak_device: int | None
    experts_per_pass: float | None
    expert_hits: float | None = None
    disk_rate: float = 0.0
    experts_by_cpu: float = 0.0
    cpu_rate: float = 0.0
    passes_by_cpu: float = 0.0

    @classmethod
    def of(cls, booted: Booted, before: WeightStats, moved: tuple[float, float] | None = None) -> Self:
        """Count from `before` on. moved: bytes that came to the device and from the disk in each timed decode
        step."""
        now, placement, device = booted.weights.stats(), booted.weights.placement, booted.device
        room, copied, read, experts = booted.weights.room, placement.streamed, placement.read, None
        if not booted.weights.experts_rest:
            assert room is not None
            passes = max(now.passes - before.passes, 1)
            each = moved or ((now.copied - before.copied) / passes, (now.read - before.read) / passes)
            experts = max(each[0] - copied, 0.0) / room.mean if moved else None
            copied, read = round(each[0]), round(each[1])
        since = now.since(before)
        if since.shared and moved:
            copied = round(moved[0])
        return cls(
            resident=now.device,
            host=now.host,
            disk=now.disk,
            device_ring=now.device_ring,
            host_ring=now.host_ring,
            copied_per_pass=copied,
            read_per_pass=read,
            link_ceiling=now.link_rate,
            disk_ceiling=now.disk_rate,
            predicted_ms=1e3 * now.predicted,
            stalled_link=now.stalled_link - before.stalled_link,
            stalled_disk=now.stalled_disk - before.stalled_disk,
            peak_device=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
            experts_per_pass=experts,
            cpu_rate=since.cpu_rate,
            passes_by_cpu=since.shared / max(since.passes, 1),
        )

    def bound(self, arithmetic: Bound, passes: int = 1) -> Bound:
        """Return the slowest of arithmetic and both links, `passes` times."""
        ms = [arithmetic.ms, 1e3 * passes * self.copied_per_pass / self.link_ceiling]
        if self.read_per_pass:
            ms.append(1e3 * passes * self.read_per_pass / self.disk_ceiling)
        return replace(arithmetic, ms=max(ms))

    def rows(self, ms: float) -> list[tuple[str, str]]:
        """Return the titles and texts of a printed report. `ms` is of a pass."""
        link, disk = (1e3 * size / ms for size in (self.copied_per_pass, self.read_per_pass))
        rows = [
            (
                "weights",
                f"device {format_size(self.resident)} + ring {format_size(self.device_ring)}, "
                f"host {format_size(self.host)} + ring {format_size(self.host_ring)}, disk "
                f"{format_size(self.disk)}",
            ),
            (
                "link",
                f"{format_size(self.copied_per_pass)} a pass, {format_rate(link)} of "
                f"{format_rate(self.link_ceiling)} "
                f"({link / self.link_ceiling:.1%})",
            ),
        ]
        if self.disk_ceiling:
            text = (
                f"{format_size(self.read_per_pass)} a pass, {format_rate(disk)} of "
                f"{format_rate(self.disk_ceiling)}"
            )
            rows.append(("disk", f"{text} ({disk / self.disk_ceiling:.1%})"))
        if self.experts_per_pass is not None:
            rows.append(("experts", f"{self.experts_per_pass:,.0f} came to the device in a pass"))
        if self.experts_by_cpu:
            text = (
                f"{self.experts_by_cpu:.1%} of the experts that the device lacked, at "
                f"{format_rate(self.cpu_rate)} while it computed; sums are rounded otherwise"
            )
            rows.append(("computed by the CPU", text))
        if self.passes_by_cpu:
            text = (
                f"feed-forwards in {self.passes_by_cpu:.1%} of the passes, at {format_rate(self.cpu_rate)} "
                "while it computed; sums are rounded otherwise"
            )
            rows.append(("computed by the CPU", text))
        if self.predicted_ms:
            of = (
                "a decode pass of one sequence"
                if self.expert_hits is None
                else f"a decode pass with these experts, {self.expert_hits:.1%} of them on the device"
            )
            rows.append(("predicted", f"{self.predicted_ms:.3g} ms {of}"))
        return rows
