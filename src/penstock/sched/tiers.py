"""Prefix blocks on three tiers, the scheduler's side: what is kept where, what moves, and what came of it.

Full blocks of KV go down from the device to the host, and out from there to the disk, while steps go on; they come in and up again when a
request's prefix is found there. A transfer holds the blocks that it reads and those that it writes, on its own account, until it has
landed: whoever else let go of them meanwhile, nobody is given them. A block is found on a tier only when it has landed there.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal, NamedTuple

from penstock.kv.ledger import BlockLedger, DiskLedger, HostLedger
from penstock.sched.rates import Rates
from penstock.step.plan import BlockId, HostBlockId, Landed, Route, Transfer, TransferId

Store = Literal["eager", "lazy", "off"]
_AHEAD = 2
"""Lazily, blocks go down before this many steps' worth of new ones are needed."""
_AT_ONCE = 256
"""Most blocks of a transfer to the host or to the disk: more would land late, and be held so long."""


@dataclass(slots=True)
class Counts:
    """Since the engine started, in blocks."""

    moved: Counter[Route] = field(default_factory=Counter)
    lost: Counter[Route] = field(default_factory=Counter)
    seconds: dict[Route, float] = field(default_factory=lambda: dict.fromkeys(Route, 0.0))
    prompts: int = 0
    """Tokens of prompts; of those the ones found in pages, or where a long request reads them; on the host; and on disk."""
    found: int = 0
    found_host: int = 0
    found_disk: int = 0
    recomputed: int = 0
    """Of prompts, that were there and were computed all the same, since that was thought to be faster."""
    late: int = 0
    """That were waited for in vain."""

    def began(self, prompt: int, cached: int, came_up: int, came_in: int) -> None:
        """A request computes its first token: `cached` of its tokens were found, so many of them not in pages, nor on the host."""
        self.prompts += prompt
        self.found_disk += came_in
        self.found_host += max(0, came_up - came_in)
        self.found += max(0, cached - max(came_up, came_in))


class Name(NamedTuple):
    """A block's key, and that of the block which it continues."""

    key: bytes
    parent: bytes | None


@dataclass(slots=True)
class _Going:
    transfer: Transfer
    names: Sequence[Name]
    """Of its blocks, whatever the route."""
    wanted: bool = True
    """Whether what lands is to be known. Not if everything was to be forgotten meanwhile."""


class Tiers:
    """One thread; written only by the Scheduler. Without host blocks nothing ever moves."""

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
        """alike: whether blocks on the host are what they are on the device; if not, none go from one to the other. step_blocks: new pages
        that a step may take at most."""
        self.pages, self.host, self.disk = pages, host, disk
        self.pays = alike and host.near > 0
        """Whether there may be anything beyond the device."""
        self.store: Store = store if self.pays else "off"
        self.rates = Rates()
        self.counts = Counts()
        self._watermark = _AHEAD * step_blocks
        self._next = 0
        self._going: dict[TransferId, _Going] = {}
        self._coming: set[tuple[Route, bytes]] = set()
        """What is on its way, or will be: it need not set out again."""
        self._down: deque[tuple[BlockId, Name]] = deque()
        """Pages that shall go to the host, each held."""
        self._lowered = dict[BlockId, bytes]()
        """What has gone down from a page before it was to be given up: once is enough, even if the host has given it up since."""
        self._out: deque[tuple[HostBlockId, Name]] = deque()
        """Blocks of the host that shall go to the disk, each held."""
        self._new: list[Transfer] = []
        self._forget: list[bytes] = []
        self._found: list[Name] = []
        """That set out: their use is noted when there is time, while they are on their way."""

    @property
    def moving(self) -> bool:
        """Whether a transfer is under way."""
        return bool(self._going)

    @property
    def ready(self) -> bool:
        """Whether something is to set out with the next plan."""
        return bool(self._down or self._out or self._new or self._forget)

    def is_coming(self, id: TransferId) -> bool:
        """Whether it is under way."""
        return id in self._going

    def pages_of(self, id: TransferId) -> Sequence[BlockId]:
        """That a transfer which is under way fills."""
        return self._going[id].transfer.pages

    def count_of(self, id: TransferId) -> int:
        """Blocks of a transfer that is under way."""
        return len(self._going[id].names)

    # ---- finding

    def use(self, key: bytes) -> None:
        """A request has found this content, on whichever tier."""
        self.pages.use(key)
        self.host.use(key)
        if self.disk is not None:
            self.disk.use(key)

    def on_disk(self, keys: Iterable[bytes]) -> int:
        """How many of the first of these the disk has and the host has not."""
        disk, host, count = self.disk, self.host, 0
        if disk is not None:
            for key in keys:
                if not disk.find(key) or host.find(key) is not None:
                    break
                count += 1
        return count

    # ---- setting out

    def bring_up(self, names: Sequence[Name], blocks: Sequence[HostBlockId]) -> tuple[TransferId, list[BlockId]]:
        """From host blocks to as many new pages, which the caller has seen to be available. They are the transfer's."""
        self.host.hold_all(blocks)
        self._found += names
        pages = self.pages.allocate(len(blocks))
        return self._go(Route.UP, names, pages, blocks), pages

    def bring_in(self, names: Sequence[Name]) -> tuple[TransferId, int] | None:
        """From the disk to the host, as many as there is room for, and how many; None if there is none, or one is on its way."""
        names = list(takewhile(lambda name: (Route.IN, name.key) not in self._coming, names))
        blocks = self.host.allocate_near(min(len(names), self.host.available_near))
        return (self._go(Route.IN, names[: len(blocks)], (), blocks), len(blocks)) if blocks else None

    def computed(self, page: BlockId, key: bytes, parent: bytes | None) -> None:
        """A held page is full and has been computed; it may be given up before the next plan."""
        if self.store == "eager" and self.pages.find(key) == page:
            self._want_down(page, Name(key, parent))

    def sealed_on_host(self, block: HostBlockId, key: bytes, parent: bytes | None) -> None:
        """A long request has written a block there, and it has its key."""
        if self.host.is_near(block) and self.host.find(key) == block:
            self._want_out(block, Name(key, parent))

    def plan(self) -> tuple[tuple[Transfer, ...], tuple[bytes, ...]]:
        """What sets out in this step, and what the disk gives up. Called last in a plan: pages that it needs have been allocated."""
        if self.store == "lazy":
            self._look_ahead()
        while self._down and self.host.available_near:
            count = min(len(self._down), self.host.available_near, _AT_ONCE)
            some = [self._down.popleft() for _ in range(count)]
            self._go(Route.DOWN, [name for _, name in some], [page for page, _ in some], self.host.allocate_near(count))
        while self._down:  # The host is full of what is in use.
            page, name = self._down.popleft()
            self._coming.discard((Route.DOWN, name.key))
            self.pages.release([page])
        while self._out and self.disk is not None:
            some_out = [self._out.popleft() for _ in range(min(len(self._out), _AT_ONCE))]
            under_way = sum(len(going.names) for going in self._going.values() if going.transfer.route is Route.OUT)
            self._forget += self.disk.make_room(under_way + len(some_out))
            self._go(Route.OUT, [name for _, name in some_out], (), [block for block, _ in some_out])
        transfers, self._new = tuple(self._new), []
        forget, self._forget = tuple(self._forget), []
        return transfers, forget

    def _want_down(self, page: BlockId, name: Name) -> None:
        if self.host.find(name.key) is None and (Route.DOWN, name.key) not in self._coming:
            self.pages.hold(page)
            self._coming.add((Route.DOWN, name.key))
            self._down.append((page, name))

    def _want_out(self, block: HostBlockId, name: Name) -> None:
        """While the disk has room everything goes there; then only what will likely be asked for again, since writes wear it out."""
        disk = self.disk
        if disk is None or disk.find(name.key) or (Route.OUT, name.key) in self._coming or disk.capacity < 1:
            return
        if len(disk) + len(self._out) < disk.capacity or self.host.worth(name.key):
            self.host.hold(block)
            self._coming.add((Route.OUT, name.key))
            self._out.append((block, name))

    def _look_ahead(self) -> None:
        """Pages that will be given up next, as many as the next steps may need beyond those that are free."""
        short = self._watermark - self.pages.free - len(self._down)
        if short > 0:
            for page, key in self.pages.next_given_up(short):
                if self._lowered.get(page) != key:
                    self._lowered[page] = key
                    self._want_down(page, Name(key, None))

    def _go(self, route: Route, names: Sequence[Name], pages: Sequence[BlockId], blocks: Sequence[HostBlockId]) -> TransferId:
        id = TransferId(self._next)
        self._next += 1
        keys = tuple(name.key for name in names)
        transfer = Transfer(id, route, tuple(pages), tuple(blocks), keys if route in (Route.IN, Route.OUT) else ())
        self._going[id] = _Going(transfer, names)
        self._coming.update((route, key) for key in keys if route is not Route.UP)
        self._new.append(transfer)
        return id

    # ---- landing

    def landed(self, reports: Sequence[Landed]) -> Iterator[tuple[Transfer, Sequence[Name], int]]:
        """Take in what has landed. Of each transfer to the device or from the disk: itself, its blocks' names, and how many of its first
        blocks are right. Pages of those are the caller's from then on, with the hold that they have."""
        found, self._found = self._found, []
        for name in found:
            self.use(name.key)
        for report in reports:
            going = self._going.pop(report.id)
            transfer, names, lost = going.transfer, going.names, set(report.lost)
            route, right = transfer.route, min(lost, default=len(names))
            self.counts.moved[route] += len(names) - len(lost)
            self.counts.lost[route] += len(lost)
            self.counts.seconds[route] += report.seconds
            if len(lost) < len(names):
                self.rates.moved(route, len(names), report.seconds)
            self._coming.difference_update((route, name.key) for name in names)
            if route is Route.OUT:
                self._arrived_on_disk(names, lost, going.wanted)
            elif route is not Route.UP:
                self._arrived_on_host(transfer, names, lost, going.wanted)
            self.host.release(transfer.blocks)
            self.pages.release(transfer.pages[right:] if route is Route.UP else transfer.pages)
            if route in (Route.UP, Route.IN):
                yield transfer, names, right

    def _arrived_on_disk(self, names: Sequence[Name], lost: set[int], wanted: bool) -> None:
        assert self.disk is not None
        for index, name in enumerate(names):
            if index not in lost:
                if wanted:
                    self.disk.add(*name)
                else:
                    self._forget.append(name.key)

    def _arrived_on_host(self, transfer: Transfer, names: Sequence[Name], lost: set[int], wanted: bool) -> None:
        for index, (name, block) in enumerate(zip(names, transfer.blocks, strict=True)):
            if index in lost:
                if transfer.route is Route.IN and self.disk is not None:
                    self.disk.drop(name.key)
            elif wanted:
                self.host.seal(block, *name)
                if transfer.route is Route.DOWN and self.host.find(name.key) == block:
                    self._want_out(block, name)

    # ---- the end

    def reset(self) -> None:
        """Nothing is under way any more, and nobody holds anything."""
        self._going.clear()
        self._coming.clear()
        self._down.clear()
        self._out.clear()
        self._new, self._forget, self._found = [], [], []

    def forget(self) -> int:
        """Nothing on disk is to be found any more, nor what is on its way anywhere. Returns how many blocks the disk gives up."""
        for going in self._going.values():
            going.wanted = False
        for page, name in self._down:
            self._coming.discard((Route.DOWN, name.key))
            self.pages.release([page])
        for block, name in self._out:
            self._coming.discard((Route.OUT, name.key))
            self.host.release([block])
        self._down.clear()
        self._out.clear()
        keys = self.disk.clear() if self.disk is not None else []
        self._forget += keys
        return len(keys)

    def held(self) -> tuple[list[Sequence[BlockId]], list[Sequence[HostBlockId]]]:
        """What transfers hold, and what is to set out."""
        going = [going.transfer for going in self._going.values()]
        pages: list[Sequence[BlockId]] = [transfer.pages for transfer in going]
        blocks: list[Sequence[HostBlockId]] = [transfer.blocks for transfer in going]
        return [*pages, [page for page, _ in self._down]], [*blocks, [block for block, _ in self._out]]
