"""Prefix blocks on three tiers, the scheduler's side: what is kept where, what moves, and what came of it.

Full blocks of KV go down from the device to the host, and out from there to the disk, while steps go on; they
come in and up again when a request's prefix is found there. A transfer holds the blocks that it reads and
those that it writes, on its own account, until it has landed: whoever else let go of them meanwhile, nobody
is given them. A block is found on a tier only when it has landed there.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal

from penstock.kv.ledger.blocks import BlockLedger
from penstock.kv.ledger.disk import DiskLedger
from penstock.kv.ledger.host import HostLedger
from penstock.sched.rates import TransferRates
from penstock.sched.rules import Name, Names
from penstock.step.plan import BlockId, HostBlockId, Landed, Route, Transfer, TransferId

Store = Literal["eager", "lazy", "off"]
_AHEAD = 2
"""Lazily, blocks go down before this many steps' worth of new ones are needed."""
_HELD_PART = 4
"""Of the host's blocks, at most one in so many is held for the disk."""
_COMING_PART = 2
"""Of the host's blocks, at most one in so many is held for what comes from the disk."""
_AT_ONCE = 256
"""Most blocks of a transfer to the host or to the disk: more would land late, and be held so long."""


@dataclass(slots=True)
class TierCounts:
    """Counts since the engine started, in blocks."""

    moved: Counter[Route] = field(default_factory=Counter)
    lost: Counter[Route] = field(default_factory=Counter)
    seconds: dict[Route, float] = field(default_factory=lambda: dict.fromkeys(Route, 0.0))
    prompts: int = 0
    """Tokens of prompts; of those the ones found in pages, or where a long request reads them; on the host;
    and on disk."""
    found: int = 0
    found_host: int = 0
    found_disk: int = 0
    recomputed: int = 0
    """Of prompts, that were there and were computed all the same, since that was thought to be faster."""
    late: int = 0
    """That were waited for in vain."""

    def began(self, prompt: int, cached: int, came_up: int, came_in: int) -> None:
        """Note that a request computes its first token: `cached` of its tokens were found, so many of them
        not in pages, nor on the host."""
        self.prompts += prompt
        self.found_disk += came_in
        self.found_host += max(0, came_up - came_in)
        self.found += max(0, cached - max(came_up, came_in))


@dataclass(slots=True)
class _PlannedTransfer:
    transfer: Transfer
    names: Names
    """Of its blocks, whatever the route."""
    wanted: bool = True
    """Whether what lands is to be known. Not if everything was to be forgotten meanwhile."""


class Tiers:
    """The blocks of all tiers and what moves between them. One thread; written only by the Scheduler. Without
    host blocks nothing ever moves."""

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
        """alike: whether blocks on the host are what they are on the device. If not, none go from one to the
        other; between host and disk they go all the same. step_blocks: new pages that a step may take at
        most."""
        self.pages, self.host, self.disk = pages, host, disk
        self.below_device = alike and host.near > 0
        """Whether pages may come from the host, and go there."""
        self.has_lower_tier = self.below_device or (host.near > 0 and disk is not None)
        """Whether any blocks may come from another tier."""
        self.store: Store = store if self.below_device else "off"
        self.rates = TransferRates()
        self.counts = TierCounts()
        self._watermark = _AHEAD * step_blocks
        self._next = 0
        self._going: dict[TransferId, _PlannedTransfer] = {}
        self._coming: dict[Route, set[bytes]] = {route: set() for route in Route}
        """What is on its way, or will be: it need not set out again."""
        self._down: deque[tuple[BlockId, Name]] = deque()
        """Pages that shall go to the host, each held."""
        self._lowered = dict[BlockId, bytes]()
        """What has gone down from a page before it was to be given up: once is enough, even if the host has
        given it up since."""
        self._out: deque[tuple[HostBlockId, Name]] = deque()
        """Blocks of the host that shall go to the disk, each held."""
        self._later = dict[bytes, Name]()
        """What would go to the disk if not so much was on its way there already; without a hold."""
        self._new: list[Transfer] = []
        self._told = 0
        """Of the keys that leave the disk, the first, which the plan under way says."""
        self._found: list[Name] = []
        """Blocks of the host that set out: their use is noted when there is time, while they are on their
        way."""

    @property
    def moving(self) -> bool:
        """Whether a transfer is under way."""
        return bool(self._going)

    @property
    def ready(self) -> bool:
        """Whether something is to set out with the next plan."""
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
        """The number of pages that are not available until transfers have landed, but for those that a
        request waits for."""
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
        """Return how many of the first of these the disk has and the host has not."""
        disk, host, count = self.disk, self.host, 0
        if disk is not None:
            for key in keys:
                if not disk.find(key) or host.find(key) is not None:
                    break
                count += 1
        return count

    # ---- setting out

    def bring_up(self, names: Names, blocks: Sequence[HostBlockId]) -> TransferId:
        """Copy host blocks to as many new pages, which the caller has seen to be available. They are the
        transfer's until it lands."""
        self.host.hold_run(names.keys, blocks)
        self._found += map(Name, names.keys, names.parents)
        pages = self.pages.allocate(len(blocks))
        return self._go(Route.UP, names, pages, blocks)

    def bring_in(self, names: Names, promised: int = 0) -> TransferId | None:
        """Read blocks from the disk to the host, as many as there is room for. Return None if there is none,
        or one of them is on its way.

        promised: host blocks that others will need.
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
        """Host blocks that transfers may take."""
        return min(self.host.available_near, self.host.available - promised)

    def computed(self, key: bytes, parent: bytes | None) -> None:
        """Note that a page with this content has been computed. It may be given up before the next plan, or
        have been."""
        if self.store == "eager" and (page := self.pages.find(key)) is not None:
            self._want_down(page, Name(key, parent))

    def sealed_on_host(self, block: HostBlockId, key: bytes, parent: bytes | None) -> None:
        """Note that a long request has written a block on the host, and that it has its key."""
        if self.host.is_near(block) and self.host.find(key) == block:
            self._want_out(block, Name(key, parent))

    def plan(self, promised: int = 0) -> tuple[tuple[Transfer, ...], tuple[bytes, ...]]:
        """Return what sets out in this step, and the keys that the disk gives up. Called last in a plan:
        pages that it needs have been allocated.

        promised: host blocks that running requests will need.
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
        """Blocks that are on their way to the disk, or shall be."""
        return len(self._coming[Route.OUT])

    def _want_down(self, page: BlockId, name: Name) -> None:
        if self.host.find(name.key) is None and name.key not in self._coming[Route.DOWN]:
            self.pages.hold(page)
            self._coming[Route.DOWN].add(name.key)
            self._down.append((page, name))

    def _want_out(self, block: HostBlockId, name: Name) -> None:
        """While the disk has room everything goes there; then only what will likely be asked for again, since
        writes wear it out."""
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
        """What was not worth a write when it came to the host may be by now: it was used again."""
        if self.disk is None:
            return
        for name in names:
            block = self.host.find(name.key)
            if block is not None and self.host.is_near(block):
                self._want_out(block, name)

    def _look_ahead(self) -> None:
        """Pages that will be given up next, as many as the next steps may need beyond those that are free."""
        short = self._watermark - self.pages.free - len(self._down)
        if short > 0:
            for page, key in self.pages.next_evicted(short):
                if self._lowered.get(page) != key:
                    self._lowered[page] = key
                    self._want_down(page, Name(key, None))

    def _go(
        self, route: Route, names: Names, pages: Sequence[BlockId], blocks: Sequence[HostBlockId]
    ) -> TransferId:
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
        """Take in what has landed. Yield for each transfer to the device or from the disk: itself, the names
        of its blocks, none if they are not to be known, and how many of its first blocks are right. Pages of
        those are the caller's from then on, with the hold that they have."""
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
        """What waited for others to get to the disk."""
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
        """Note that nothing is under way any more, of which these are the last reports, and that all blocks
        are free. The disk still forgets what it was to forget."""
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
        """Forget everything on disk, and what is on its way anywhere. Return how many blocks the disk gives
        up."""
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
        """Forget these keys on disk, and what any transfer with one of them brings."""
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
        """Return the pages and the host blocks that transfers hold, and those that are to set out."""
        going = [going.transfer for going in self._going.values()]
        pages: list[Sequence[BlockId]] = [transfer.pages for transfer in going]
        blocks: list[Sequence[HostBlockId]] = [transfer.blocks for transfer in going]
        return [*pages, [page for page, _ in self._down]], [*blocks, [block for block, _ in self._out]]


def _names(some: Sequence[tuple[int, Name]]) -> Names:
    return Names([name.key for _, name in some], [name.parent for _, name in some])
