"""Drives the scheduler's tiers with a workload: host blocks, a disk behind them, and what goes there. No
bytes are moved."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from penstock.kv.ledger.blocks import BlockLedger
from penstock.kv.ledger.disk import DiskLedger
from penstock.kv.ledger.host import HostLedger
from penstock.sched.rules import Name, Names
from penstock.sched.tiers import Tiers
from penstock.step.plan import BlockId, HostBlockId, Landed, Route

_BLOCK_TOKENS = 512


class DiskAdmission(StrEnum):
    """Decides which blocks are written to the disk."""

    NONE = "write-none"
    ENGINE = "engine"
    """All blocks while there is room, then those that will likely be asked for again."""
    ALL = "write-all"
    FORESEEN = "foreseen"
    """Blocks that will be asked for again, known from the future: no admission is better for the same
    eviction."""


@dataclass(frozen=True, slots=True)
class Served:
    """Counts blocks of the requests that count: asked for, found on the host, found on disk, and written to
    disk."""

    asked: int
    host: int
    disk: int
    written: int

    @property
    def written_per_hit(self) -> float | None:
        """Return the blocks written for each that was found on disk. None if none was."""
        return self.written / self.disk if self.disk else None


class _WriteAll(HostLedger):
    def worth(self, key: bytes) -> bool:
        return True


class _Foreseeing(Tiers):
    """Writes blocks that are asked for again."""

    uses_left: Counter[bytes]

    def _want_out(self, block: HostBlockId, name: Name) -> None:
        if self.uses_left[name.key]:
            super()._want_out(block, name)


def serve(
    trace: Sequence[Sequence[int]],
    host_blocks: int,
    disk_blocks: int,
    admission: DiskAdmission,
    first: int = 0,
) -> Served:
    """Replay a trace. Requests from `first` on count.

    One request at a time: what is found goes up to pages, the rest is computed, all of it goes down, and out
    where it is admitted; then pages are forgotten. The ledgers' invariants are proved in the end.
    """
    with_disk = admission is not DiskAdmission.NONE and disk_blocks > 0
    pages = BlockLedger(max(map(len, trace)))
    written_always = admission in (DiskAdmission.ALL, DiskAdmission.FORESEEN)
    host = (_WriteAll if written_always else HostLedger)(host_blocks, block_size=_BLOCK_TOKENS)
    disk = DiskLedger(disk_blocks, block_size=_BLOCK_TOKENS) if with_disk else None
    kind = _Foreseeing if admission is DiskAdmission.FORESEEN else Tiers
    tiers = kind(pages, host, store="eager", disk=disk)
    if isinstance(tiers, _Foreseeing):
        tiers.uses_left = Counter(key.to_bytes(16, "little", signed=True) for keys in trace for key in keys)
    asked = found_host = found_disk = written_before = 0
    for at, numbers in enumerate(trace):
        if at == first:
            written_before = tiers.counts.moved[Route.OUT]
        keys = [key.to_bytes(16, "little", signed=True) for key in numbers]
        if isinstance(tiers, _Foreseeing):
            tiers.uses_left.subtract(keys)
        on_host, on_disk = _request(tiers, keys)
        if at >= first:
            asked, found_host, found_disk = asked + len(keys), found_host + on_host, found_disk + on_disk
    host.check([])
    pages.check([])
    assert disk is None or len(disk) <= max(disk_blocks, 0), f"{len(disk)} blocks on a disk for {disk_blocks}"
    return Served(asked, found_host, found_disk, tiers.counts.moved[Route.OUT] - written_before)


def _request(tiers: Tiers, keys: Sequence[bytes]) -> tuple[int, int]:
    """Serve one request. Return how many of its blocks were found on the host, and on disk."""
    names = Names(keys, [None, *keys[:-1]])
    held: list[BlockId] = []
    found_host = found_disk = 0
    came = set[bytes]()
    while len(held) < len(keys):
        at = len(held)
        if run := tiers.host.run_of(keys[at:]):
            part = names.part(at, at + len(run))
            pages = tiers.pages_of(tiers.bring_up(part, run))
            _land(tiers)
            for page, (key, parent) in zip(pages, part, strict=True):
                tiers.pages.seal(page, key, parent)
            held += pages
            from_disk = sum(key in came for key in part.keys)
            found_disk += from_disk
            found_host += len(run) - from_disk
        elif (count := tiers.on_disk(keys[at:])) and tiers.bring_in(
            part := names.part(at, at + count)
        ) is not None:
            _land(tiers)
            came.update(part.keys)
            if tiers.host.find(keys[at]) is None:
                break
        else:
            break
    for key, parent in list(names)[len(held) :]:
        (page,) = tiers.pages.allocate(1)
        tiers.pages.seal(page, key, parent)
        tiers.computed(key, parent)
        held.append(page)
    _land(tiers)
    tiers.pages.release(held)
    tiers.pages.forget()
    return found_host, found_disk


def _land(tiers: Tiers) -> None:
    """Let transfers land, and those that follow from them, until nothing moves."""
    while True:
        transfers, leaving = tiers.plan()
        if not transfers and not leaving:
            return
        for _ in tiers.landed([Landed(transfer.id, 1e-3) for transfer in transfers]):
            pass
