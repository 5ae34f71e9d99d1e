"""Moves prefix blocks between three tiers, on the scheduler's side: what is where, what moves, what landed.

Full KV blocks go down from the device to the host, and out from there to the disk, while steps go on. They
come in and up again when a request's prefix is found there. A transfer itself holds the blocks that it reads
and writes until it has landed, so they are given to no one else, even when all others have released them. A
block is found on a tier only when it has landed there.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal

from penstock.kv.ledger.blocks import BlockLedger
from penstock.kv.ledger.disk import DiskLedger
from penstock.kv.ledger.host import HostLedger
from penstock.sched.found import FoundByTier
from penstock.sched.rates import TransferRates
from penstock.sched.rules import Name, Names
from penstock.step.plan import BlockId, HostBlockId, Landed, Route, Transfer, TransferId

Store = Literal["eager", "lazy", "off"]
_AHEAD = 2
"""Lazily, blocks go down before this many steps' worth of new ones are needed."""
_HELD_PART = 4
"""The disk's writes hold at most one in so many host blocks."""
_COMING_PART = 2
"""Reads from the disk hold at most one in so many host blocks."""
_AT_ONCE = 256
"""Most blocks of a transfer to the host or to the disk. More would land late, and be held so long."""


@dataclass(slots=True)
class TierCounts:
    """Counts blocks and tokens since the engine started.

    moved, lost, seconds: blocks that have landed or were lost, and seconds of transfers, by route.
    prompts: tokens of prompts.
    found, found_host, found_disk: prompt tokens found on the device (or where a long request reads them), on
        the host, and on disk.
    recomputed: blocks that were on a lower tier and computed all the same, since that seemed faster.
    late: blocks that were waited for in vain.
    """

    moved: Counter[Route] = field(default_factory=Counter)
    lost: Counter[Route] = field(default_factory=Counter)
    seconds: dict[Route, float] = field(default_factory=lambda: dict.fromkeys(Route, 0.0))
    prompts: int = 0
    found: int = 0
    found_host: int = 0
    found_disk: int = 0
    recomputed: int = 0
    late: int = 0

    def find(self, tokens: FoundByTier) -> None:
        """Note that these prompt tokens were found."""
        self.found += tokens.device
        self.found_host += tokens.host
        self.found_disk += tokens.disk


@dataclass(slots=True)
class _PlannedTransfer:
    """Holds a transfer under way, and the names of its blocks, on every route.

    wanted: whether its blocks are to be found when they land. Not if they were to be forgotten meanwhile.
    """

    transfer: Transfer
    names: Names
    wanted: bool = True


class Tiers:
    """Keeps the blocks of all tiers and the transfers between them. Only the scheduler's thread writes to it.

    Without host blocks nothing ever moves.
    """

    def __init__(
        self,
        pages: BlockLedger,
        host: HostLedger,
        *,
        alike: bool = True,
        store: Store = "off",
        disk: DiskLedger | None = None,
        step_blocks: int = 1,
    ) -> None:
        """Begin with no transfer. step_blocks: most new pages of a step.

        alike: whether blocks on the host have the bytes of those on the device. If not, no block moves
            between these two; host and disk still exchange blocks.
        """
        self.pages, self.host, self.disk = pages, host, disk
        self.below_device = alike and host.near > 0
        """Whether pages may be filled from the host, and copied there."""
        self.has_lower_tier = self.below_device or (host.near > 0 and disk is not None)
        """Whether any blocks may come from another tier."""
        self.store: Store = store if self.below_device else "off"
        self.rates = TransferRates()
        self.counts = TierCounts()
        self._watermark = _AHEAD * step_blocks
        self._next = 0
        self._going: dict[TransferId, _PlannedTransfer] = {}
        self._coming: dict[Route, set[bytes]] = {route: set() for route in Route}
        """Keys under way by each route, or soon, which need not set out again."""
        self._down: deque[tuple[BlockId, Name]] = deque()
        """Pages that will go to the host, each held."""
        self._lowered = dict[BlockId, bytes]()
        """Keys that have gone down from pages before their eviction, each once."""
        self._out: deque[tuple[HostBlockId, Name]] = deque()
        """Host blocks that will go to the disk, each held."""
        self._later = dict[bytes, Name]()
        """Blocks that will go to the disk when fewer are on their way there. They are not held."""
        self._new: list[Transfer] = []
        self._told = 0
        """Number of leading keys of `disk.leaving` that the plan under way names."""
        self._found: list[Name] = []
        """Names of host blocks that set out. Their use is noted later, while they are on their way."""

    @property
    def moving(self) -> bool:
        """Tell whether a transfer is under way."""
        return bool(self._going)

    @property
    def ready(self) -> bool:
        """Tell whether something will set out with the next plan."""
        leaves = self.disk is not None and len(self.disk.leaving) > self._told
        return bool(self._down or self._out or self._new or leaves)

    def is_coming(self, id: TransferId) -> bool:
        """Tell whether a transfer is under way."""
        return id in self._going

    def pages_of(self, id: TransferId) -> Sequence[BlockId]:
        """Return the pages that a transfer under way fills."""
        return self._going[id].transfer.pages

    @property
    def pages_held(self) -> int:
        """Return the number of pages that transfers under way, or queued, hold until they land."""
        return sum(len(going.transfer.pages) for going in self._going.values()) + len(self._down)

    def count_of(self, id: TransferId) -> int:
        """Return the number of blocks of a transfer under way."""
        return len(self._going[id].names)

    # ---- finding

    def use(self, keys: Sequence[bytes]) -> None:
        """Note that a request has found this content, on whichever tier."""
        self.pages.use(keys)
        self.host.use(keys)
        if self.disk is not None:
            self.disk.use(keys)

    def on_disk(self, keys: Iterable[bytes]) -> int:
        """Return how many leading keys are on disk and not on the host."""
        disk, host, count = self.disk, self.host, 0
        if disk is not None:
            for key in keys:
                if not disk.find(key) or host.find(key) is not None:
                    break
                count += 1
        return count

    # ---- setting out

    def bring_up(self, names: Names, blocks: Sequence[HostBlockId]) -> TransferId:
        """Start a copy of host blocks to as many new pages, which must be available.

        It holds them until it lands.
        """
        self.host.hold_run(names.keys, blocks)
        self._found += map(Name, names.keys, names.parents)
        pages = self.pages.allocate(len(blocks))
        return self._go(Route.UP, names, pages, blocks)

    def bring_in(self, names: Names, promised: int = 0) -> TransferId | None:
        """Start a read of blocks from disk to host, as many as there is room for, beside `promised` blocks.

        Returns None if there is no room, or the first block is under way already.
        """
        assert self.disk is not None
        coming = self._coming[Route.IN]
        new = sum(1 for _ in takewhile(lambda key: key not in coming, names.keys))
        most = max(self.host.near // _COMING_PART, 1) - len(coming)
        blocks = self.host.allocate_near(max(0, min(new, self._room(promised), most)))
        if not blocks:
            return None
        names = names.part(0, len(blocks))
        self.disk.hold(names.keys)
        return self._go(Route.IN, names, (), blocks)

    def _room(self, promised: int) -> int:
        """Return how many host blocks transfers may take."""
        return min(self.host.available_near, self.host.available - promised)

    def computed(self, key: bytes, parent: bytes | None) -> None:
        """Note that a page with this content has been computed. It may be evicted before the next plan."""
        if self.store == "eager" and (page := self.pages.find(key)) is not None:
            self._want_down(page, Name(key, parent))

    def sealed_on_host(self, block: HostBlockId, key: bytes, parent: bytes | None) -> None:
        """Note that a long request has written and sealed a block on the host."""
        if self.host.is_near(block) and self.host.find(key) == block:
            self._want_out(block, Name(key, parent))

    def plan(self, promised: int = 0) -> tuple[tuple[Transfer, ...], tuple[bytes, ...]]:
        """Return the transfers that set out in this step, and the keys that the disk gives up.

        It is called last in a plan, when the step's own pages are allocated. promised: host blocks for
        others.
        """
        if self.store == "lazy":
            self._look_ahead()
        while self._down and self._room(promised) > 0:
            count = min(len(self._down), self._room(promised), _AT_ONCE)
            some = [self._down.popleft() for _ in range(count)]
            self._go(Route.DOWN, _names(some), [page for page, _ in some], self.host.allocate_near(count))
        while self._down:  # The host is full of what is in use.
            page, name = self._down.popleft()
            self._coming[Route.DOWN].discard(name.key)
            self.pages.release([page])
        while self._out and self.disk is not None:
            some_out = [self._out.popleft() for _ in range(min(len(self._out), _AT_ONCE))]
            self.disk.make_room(self._outward())
            self._go(Route.OUT, _names(some_out), (), [block for block, _ in some_out])
        transfers, self._new = tuple(self._new), []
        # Until the step is committed it may have to be said again.
        leaving = tuple(self.disk.leaving) if self.disk is not None else ()
        self._told = len(leaving)
        return transfers, leaving

    def _most_outward(self) -> int:
        return min(max(self.host.near // _HELD_PART, 1), self.disk.capacity if self.disk is not None else 0)

    def _outward(self) -> int:
        """Return how many blocks are on their way to the disk, or soon."""
        return len(self._coming[Route.OUT])

    def _want_down(self, page: BlockId, name: Name) -> None:
        if self.host.find(name.key) is None and name.key not in self._coming[Route.DOWN]:
            self.pages.hold(page)
            self._coming[Route.DOWN].add(name.key)
            self._down.append((page, name))

    def _want_out(self, block: HostBlockId, name: Name) -> None:
        """Queue a host block for the disk, while that has room; then only blocks that will likely be used
        again.

        Writes wear a disk out.
        """
        disk = self.disk
        if disk is None or disk.find(name.key) or name.key in self._coming[Route.OUT] or disk.capacity < 1:
            return
        # However slow the disk, what waits for it leaves most of the host to others.
        outward = self._outward()
        if outward >= self._most_outward():
            self._later[name.key] = name
            return
        if len(disk) + outward < disk.capacity or self.host.worth(name.key):
            self.host.hold(block)
            self._coming[Route.OUT].add(name.key)
            self._out.append((block, name))

    def _want_out_again(self, names: Sequence[Name]) -> None:
        """Queue blocks for the disk that were used again. They may not have been worth a write before."""
        if self.disk is None:
            return
        for name in names:
            block = self.host.find(name.key)
            if block is not None and self.host.is_near(block):
                self._want_out(block, name)

    def _look_ahead(self) -> None:
        """Queue the pages that are evicted next for the host: as many as the next steps lack free ones."""
        short = self._watermark - self.pages.free - len(self._down)
        if short > 0:
            for page, key in self.pages.next_evicted(short):
                if self._lowered.get(page) != key:
                    self._lowered[page] = key
                    self._want_down(page, Name(key, None))

    def _go(
        self, route: Route, names: Names, pages: Sequence[BlockId], blocks: Sequence[HostBlockId]
    ) -> TransferId:
        """Start a transfer."""
        id = TransferId(self._next)
        self._next += 1
        transfer = Transfer(
            id,
            route,
            tuple(pages),
            tuple(blocks),
            tuple(names.keys) if route in (Route.IN, Route.OUT) else (),
        )
        self._going[id] = _PlannedTransfer(transfer, names)
        self._coming[route].update(names.keys)
        self._new.append(transfer)
        return id

    # ---- landing

    def landed(self, reports: Sequence[Landed]) -> Iterator[tuple[Transfer, Names, int]]:
        """Take in the reports of transfers that have landed.

        Yields each transfer to the device or from the disk, its names (none if they were to be forgotten),
        and how many of its leading blocks are right. The caller then holds the right pages.
        """
        found, self._found = self._found, []
        if self.disk is not None:
            del self.disk.leaving[: self._told]
        self._told = 0
        self.use([name.key for name in found])
        self._want_out_again(found)
        for report in reports:
            going = self._going.pop(report.id)
            transfer, names, lost = going.transfer, going.names, set(report.lost)
            route, right = transfer.route, min(lost, default=len(names))
            self.counts.moved[route] += len(names) - len(lost)
            self.counts.lost[route] += len(lost)
            self.counts.seconds[route] += report.seconds
            if len(lost) < len(names):
                self.rates.moved(route, len(names), report.seconds)
            self._coming[route].difference_update(names.keys)
            if route is Route.IN and self.disk is not None:
                self.disk.let_go(names.keys)
            if self.disk is not None:
                for key in report.gone:
                    self.disk.drop(key)
            if route is Route.OUT:
                self._arrived_on_disk(names, lost, going.wanted)
                self._go_on()
            elif route is not Route.UP:
                self._arrived_on_host(transfer, names, lost, going.wanted)
            self.host.release(transfer.blocks)
            if route is Route.UP:
                self.pages.release(transfer.pages[right:])
                yield transfer, names if going.wanted else names.part(0, 0), right
            elif route is Route.IN:
                yield transfer, names, right if going.wanted else 0
            elif self.store == "lazy":
                self.pages.release_first(transfer.pages)
            else:
                self.pages.release(transfer.pages)

    def _go_on(self) -> None:
        """Queue blocks for the disk that waited until fewer were on their way there."""
        while self._later and self._outward() < self._most_outward():
            name = self._later.pop(next(iter(self._later)))
            block = self.host.find(name.key)
            if block is not None and self.host.is_near(block):
                self._want_out(block, name)

    def _arrived_on_disk(self, names: Names, lost: set[int], wanted: bool) -> None:
        """Note what every rank has on disk now. All forget what is lost on one, or is not to be known."""
        assert self.disk is not None
        for index, (key, parent) in enumerate(names):
            if wanted and index not in lost:
                self.disk.add(key, parent)
            else:
                self.disk.leaving.append(key)

    def _arrived_on_host(self, transfer: Transfer, names: Names, lost: set[int], wanted: bool) -> None:
        for index, ((key, parent), block) in enumerate(zip(names, transfer.blocks, strict=True)):
            if wanted and index not in lost:
                self.host.seal(block, key, parent)
                if transfer.route is Route.DOWN and self.host.find(key) == block:
                    self._want_out(block, Name(key, parent))

    # ---- the end

    def reset(self, reports: Sequence[Landed] = ()) -> None:
        """Note that no transfer is under way, and that all blocks are free. reports: the last transfers.

        The disk still gives up the keys that it was about to.
        """
        self._told = 0
        if self.disk is not None:
            self.disk.vacate()
            leaving = set(self.disk.leaving)
            for report in reports:
                for key in report.gone:
                    self.disk.drop(key)
                going = self._going.get(report.id)
                if going is not None and going.transfer.route is Route.OUT:
                    lost = {index for index, key in enumerate(going.names.keys) if key in leaving}
                    self._arrived_on_disk(going.names, lost.union(report.lost), going.wanted)
        self._going.clear()
        self._later.clear()
        for keys in self._coming.values():
            keys.clear()
        self._down.clear()
        self._out.clear()
        self._new, self._found = [], []

    def forget(self) -> int:
        """Forget all blocks on disk, and all that are under way. Return how many blocks the disk gives up."""
        for going in self._going.values():
            going.wanted = False
        for page, name in self._down:
            self._coming[Route.DOWN].discard(name.key)
            self.pages.release([page])
        for block, name in self._out:
            self._coming[Route.OUT].discard(name.key)
            self.host.release([block])
        self._down.clear()
        self._out.clear()
        self._lowered.clear()
        self._later.clear()
        return self.disk.clear() if self.disk is not None else 0

    def forget_some(self, keys: Sequence[bytes]) -> None:
        """Forget these keys on disk, and the blocks of every transfer with one of them."""
        some = set(keys)
        for going in self._going.values():
            going.wanted = going.wanted and some.isdisjoint(going.names.keys)
        for page, name in [one for one in self._down if one[1].key in some]:
            self._down.remove((page, name))
            self._coming[Route.DOWN].discard(name.key)
            self.pages.release([page])
        for block, name in [one for one in self._out if one[1].key in some]:
            self._out.remove((block, name))
            self._coming[Route.OUT].discard(name.key)
            self.host.release([block])
        for page in [page for page, key in self._lowered.items() if key in some]:
            del self._lowered[page]
        for key in keys:
            self._later.pop(key, None)
            if self.disk is not None:
                self.disk.drop(key)

    def held(self) -> tuple[list[Sequence[BlockId]], list[Sequence[HostBlockId]]]:
        """Return the pages and the host blocks that transfers hold, those that are queued included."""
        going = [going.transfer for going in self._going.values()]
        pages: list[Sequence[BlockId]] = [transfer.pages for transfer in going]
        blocks: list[Sequence[HostBlockId]] = [transfer.blocks for transfer in going]
        return [*pages, [page for page, _ in self._down]], [*blocks, [block for block, _ in self._out]]


def _names(some: Sequence[tuple[int, Name]]) -> Names:
    return Names([name.key for _, name in some], [name.parent for _, name in some])
