"""Places the KV of one request: a prefix of blocks on the host, and a suffix of pages on the device.

block     0   1   2   3   4   5   6   7
host    [ h   h   h   h   h )                  prefix: [0, len(host))
pages           [ p   p   p   p   p   p )      suffix: [first_page, first_page + len(pages))
                  mirrored      tail

A short request is a span with an empty prefix: all of its blocks are pages. Only a long one has a prefix. Its
chunks are whole blocks, which are written to the host at once. The rest of the last chunk, and decoded
tokens, go to pages: the tail. Of the full blocks of the tail the newest few stay. Older ones move to the host
by orders. The last blocks of the prefix may be mirrored, that is in pages as well, and then need not stream.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from penstock.kv.ledger.keys import block_keys
from penstock.sched.rules import Name, Names, SchedulerLimits
from penstock.sched.tiers import Tiers
from penstock.step.plan import BlockId, HostBlockId, Order


class Pools:
    """Holds the blocks that spans allocate from, and the orders of the plan that is being made."""

    def __init__(self, tiers: Tiers, limits: SchedulerLimits, *, share: bool) -> None:
        """Begin with no orders.

        share: whether blocks are known by their content, so that other spans find them.
        """
        self.tiers, self.pages, self.host, self.share = tiers, tiers.pages, tiers.host, share
        self.size, self.recent, self.most_mirrored = limits.block_size, limits.recent, limits.near
        self.long_pages = limits.recent + 2
        """Pages that a long span needs: the recent ones, one on its way to the host, one that is filled."""
        self.long_spans = 0
        """Number of long spans of requests that have not ended."""
        self.orders: list[Order] = []
        """Orders of the plan that is being made, or was made last."""
        self.leaving: list[BlockId] = []
        """Pages of no span that these orders read. They are held until the next plan."""

    def end_orders(self) -> None:
        """Forget the orders of the last plan, and release the pages that they read.

        Others may write these pages now: orders read before the next step writes.
        """
        self.pages.release(self.leaving)
        self.reset()

    def reset(self) -> None:
        """Forget the orders of the last plan, when no page is held any more."""
        self.orders, self.leaving = [], []


@dataclass(slots=True, eq=False)
class KVSpan:
    """A span is the KV of a request: which positions are computed, and the blocks that hold them.

    Only the scheduler writes to it. It allocates and frees blocks of its pools. Counts and indices are in
    blocks, `computed` and lengths in tokens.
    """

    pools: Pools
    tokens: list[int]
    """The request's own list: prompt, output, and UNKNOWN for a token under way."""
    root: bytes
    """The root of its chain of keys."""
    long: bool = False
    """True if full blocks go to the host. Once true, it stays so."""
    computed: int = 0
    """Positions [0, computed) have their KV in blocks when the plans so far have been carried out."""
    host: list[HostBlockId] = field(default_factory=list)
    """The prefix: full blocks."""
    pages: list[BlockId] = field(default_factory=list)
    """The suffix. The last page may be filled in part."""
    first_page: int = 0
    """Index of the block that is in the first page; at most `len(host)`."""
    mirror_limit: int = 0
    """Most blocks that may be on the host and in pages."""
    keys: list[bytes] = field(default_factory=list)
    """Chained keys of the leading full blocks of `tokens`, made when they are needed."""
    host_sealed: int = 0
    """Leading host blocks that committed steps have written, and that others find."""
    pages_sealed: int = 0
    """Index of the first block that is not known to the ledger of pages by its key."""
    table_length: int = 0
    """Length of the row's block table, as the workers know it."""
    host_table_length: int = 0
    """Length of the row's table of host blocks, as the workers know it."""
    fast_decode_until: int = 0
    """A decode before this position changes nothing but `computed`.

    The position has its place in the last page, and does not fill a page that is to be sealed. It is 0 where
    that is not known.
    """

    drafted: int = 0
    """Positions [0, drafted) have the KV of a draft model, too, in the same pages of its own pool."""

    # ---- what is there, and what is needed

    @property
    def lacking(self) -> int:
        """Return how many positions are not computed yet."""
        return len(self.tokens) - self.computed

    @property
    def mirrored(self) -> int:
        """Return how many blocks are both on the host and in pages."""
        return len(self.host) - self.first_page if self.pages else 0

    @property
    def chunks_to_host(self) -> bool:
        """Tell whether the next positions are a chunk that goes to the host at once, not to the tail."""
        return self.long and self.lacking > 1 and self.computed == len(self.host) * self.pools.size

    def host_needed(self, count: int) -> int:
        """Return how many host blocks the next `count` positions take."""
        return self._host_after(count) - len(self.host)

    def pages_needed(self, count: int) -> int:
        """Return how many pages the next `count` positions take."""
        return -(-(self.computed + count) // self.pools.size) - self._first_page(count) - len(self.pages)

    def reserve(self, most: int, coming: int = 0) -> int:
        """Return how many more pages the request may need while it runs: one, or those that its prompt lacks.

        A long one needs its tail.

        most: tokens that it may come to have.
        coming: pages under way to it.
        """
        if not self.long:
            return max(1, self.pages_needed(self.lacking) - coming)
        tail = min(self.pools.long_pages, -(-(most - 1) // self.pools.size))
        return max(1, tail - len(self.pages) + self.mirrored)

    def _host_after(self, count: int) -> int:
        """Return the length of the prefix when `count` more positions are computed."""
        if not self.long:
            return 0
        if self.chunks_to_host:
            return (self.computed + count) // self.pools.size
        return max(len(self.host), self.computed // self.pools.size - self.pools.recent)

    def _first_page(self, count: int) -> int:
        """Return `first_page` when `count` more positions are computed. Pages that are there stay."""
        if self.pages:
            return self.first_page
        have = len(self.host)
        if not self.chunks_to_host:
            return have
        return min(
            self._host_after(count), max(have, len(self.tokens) // self.pools.size - self.mirror_limit)
        )

    # ---- names

    def key(self, index: int) -> bytes:
        """Return the key of the full block `index`. Its tokens must be known."""
        keys, size = self.keys, self.pools.size
        if len(keys) <= index:
            parent = keys[-1] if keys else self.root
            keys += block_keys(parent, self.tokens[len(keys) * size : (index + 1) * size], size)
        return keys[index]

    def name(self, index: int) -> Name:
        """Return the name of the full block `index`. Its tokens must be known."""
        return Name(self.key(index), self.keys[index - 1] if index else None)

    def names(self, first: int, count: int) -> Names:
        """Return the names of `count` blocks from `first` on. Their keys must have been made."""
        keys = self.keys[first : first + count]
        return Names(keys, [self.keys[first - 1] if first else None, *keys[:-1]])

    def next_keys(self, first: int) -> Sequence[bytes]:
        """Return the keys of the full blocks from `first` on, without a block that holds the last token."""
        last = (len(self.tokens) - 1) // self.pools.size
        if first >= last:
            return ()
        self.key(last - 1)
        return self.keys[first:last]

    # ---- growth

    def reuse(self) -> int:
        """Skip over full blocks that someone has computed already, or computes in this very step. Return how
        many.

        The same step is early enough for pages: in every layer, K and V of all tokens of a step are written
        before any are read. A host block is found when the step that wrote it has been committed. The last
        token is always computed, since its logits are wanted.
        """
        blocks, reuse = (self.host, self._reuse_host) if self.long else (self.pages, self._reuse_pages)
        first, size = len(blocks), self.pools.size
        if self.computed != first * size:
            return 0
        found = reuse(self.next_keys(first))
        self.computed += found * size
        return found

    def _reuse_pages(self, keys: Sequence[bytes]) -> int:
        pages = self.pools.pages.run_of(keys)
        if pages:
            self.pools.pages.hold_run(keys, pages)
            self.pools.tiers.use(keys[: len(pages)])
            self.pages += pages
            self.pages_sealed = len(self.pages)
        return len(pages)

    def _reuse_host(self, keys: Sequence[bytes]) -> int:
        host, first = self.pools.host, len(self.host)
        for key in keys:
            block = host.find(key)
            if block is None:
                break
            self.pools.tiers.use((key,))
            host.hold(block)
            self.host.append(block)
        if len(self.host) > first:
            self.host_sealed = len(self.host)
            self.drop_mirrors(len(self.pages))  # They would leave a gap before what is computed next.
        return len(self.host) - first

    def take_in(self, pages: Sequence[BlockId]) -> None:
        """Append full, sealed pages that have come from another tier, with the hold that they have."""
        self.pages.extend(pages)
        self.computed += len(pages) * self.pools.size
        self.pages_sealed = len(self.pages)

    def find_mirrors(self, spare: int) -> None:
        """Let a long span that is about to be computed have `spare` mirrored blocks, and hold those pages
        that someone has left."""
        pools, most = self.pools, self.pools.most_mirrored
        self.mirror_limit = max(0, spare if most is None else min(spare, most))
        first = have = len(self.host)
        # What follows the first of them needs pages too.
        least = max(0, len(self.tokens) // pools.size - self.mirror_limit)
        while first > least and (page := pools.pages.find(self.key(first - 1))) is not None:
            pools.pages.hold(page)
            self.pages.insert(0, page)
            first -= 1
        self.first_page, self.pages_sealed = first, have

    def grow(self, count: int) -> None:
        """Allocate the blocks for the next `count` positions, and order to the host what leaves the tail. The
        caller has seen that the pools have as many blocks."""
        pages, first = self.pages_needed(count), self._first_page(count)
        if self.long:
            chunk = self.chunks_to_host
            added = self._extend_host(count)
            self.first_page = first
            if not chunk:
                self._move_down(added)
        if pages:
            self.pages += self.pools.pages.allocate(pages)
        self.computed += count

    def _extend_host(self, count: int) -> list[HostBlockId]:
        have = len(self.host)
        added = self.pools.host.allocate(
            self.host_needed(count),
            self.host[-1] if have else None,
            len(self.tokens) // self.pools.size - have,
        )
        self.host += added
        return added

    def _move_down(self, targets: Sequence[HostBlockId]) -> None:
        """Order the oldest blocks of the tail to these host blocks, the newest of the prefix. Mirrors beyond
        the limit are given up. A page that is still to be read waits for the next plan."""
        pools, begin = self.pools, len(self.host) - len(targets) - self.first_page
        sources = self.pages[begin : begin + len(targets)]
        pools.orders += map(Order, sources, targets)
        if (beyond := self.mirrored - self.mirror_limit) > 0:
            # A plan may order twice, for a token and for a draft.
            pools.leaving += self.drop_mirrors(beyond, but=[order.source for order in pools.orders])

    def drop_mirrors(self, count: int, but: Sequence[BlockId] = ()) -> list[BlockId]:
        """Give up the first `count` pages, which are mirrored. Return those in `but`, which stay held."""
        if not count:
            return []
        dropped, self.pages, still = self.pages[:count], self.pages[count:], set(but)
        self.first_page += count
        self.pools.pages.release([page for page in dropped if page not in still])
        return [page for page in dropped if page in still]

    def go_long(self) -> None:
        """Make the span long: full blocks go to the host. Pages that exist already go there by orders."""
        self.long, self.fast_decode_until = True, 0
        self.pools.long_spans += 1
        most = self.pools.most_mirrored
        self.mirror_limit = len(self.pages) if most is None else min(len(self.pages), most)

    # ---- sealing

    def seal(self, known: int) -> None:
        """Let others find the full pages, as far as the first `known` tokens fill them.

        The plans so far must be going to be carried out first.
        """
        full, first = min(self.computed, known) // self.pools.size, self.first_page
        for index in range(max(self.pages_sealed, first), full):
            self.pools.pages.seal(self.pages[index - first], self.key(index))
        self.pages_sealed = full

    def seal_host(self, stop: int) -> Iterator[tuple[HostBlockId, Name]]:
        """Let others find the host blocks up to index `stop`, which a committed step has written.

        Yields the blocks that were not sealed before, and their names.
        """
        stop = min(stop, len(self.host))  # It may have been sent back to the queue since.
        for index in range(self.host_sealed, stop if self.pools.share else 0):
            name = self.name(index)
            self.pools.host.seal(self.host[index], *name)
            yield self.host[index], name
        self.host_sealed = max(self.host_sealed, stop)

    def note_tables(self) -> None:
        """Note that the workers' block tables have all blocks after this plan."""
        self.table_length, self.host_table_length = self.first_page + len(self.pages), len(self.host)

    def note_fast_decode(self) -> None:
        """Compute `fast_decode_until` of a span that is computed up to its newest token."""
        blocks, size = len(self.pages), self.pools.size
        if self.long:
            self.fast_decode_until = 0
        elif not self.pools.share:
            self.fast_decode_until = blocks * size
        else:
            self.fast_decode_until = blocks * size - 1 if self.pages_sealed >= blocks - 1 else 0

    # ---- giving up

    def truncate(self, length: int) -> None:
        """Give up the positions from `length` on, such as those of a rejected draft.

        The caller may change their tokens. Blocks that begin there are freed. A block in which `length` lies
        will be written again. If it has a key, it is unsealed. If others hold it too, or it is only on the
        host, it is given up whole and computed again.
        """
        if length >= self.computed:
            return
        pools, size = self.pools, self.pools.size
        whole, part = divmod(length, size)
        self.fast_decode_until = 0
        pools.host.release(self.host[whole:])
        del self.host[whole:]
        if part and not self._open(whole):
            length, part = whole * size, 0
        keep = max(0, whole + (part > 0) - self.first_page)
        pools.pages.release(self.pages[keep:])
        del self.pages[keep:]
        self.computed, self.drafted = length, min(self.drafted, length)
        del self.keys[whole:]
        self.first_page = min(self.first_page, len(self.host))
        self.host_sealed = min(self.host_sealed, len(self.host))
        self.host_table_length = min(self.host_table_length, len(self.host))
        self.pages_sealed = min(self.pages_sealed, whole)
        self.table_length = min(self.table_length, self.first_page + len(self.pages))

    def _open(self, index: int) -> bool:
        """Make a block writable again.

        Return whether it is: it must be in a page that no other span holds.
        """
        at = index - self.first_page
        return 0 <= at < len(self.pages) and self.pools.pages.unseal(self.pages[at])

    def release(self) -> None:
        """Free all blocks. Nothing is computed any more."""
        self.pools.pages.release(self.pages)
        self.pools.host.release(self.host)
        self.reset()

    def reset(self) -> None:
        """Forget all blocks without freeing them. Nothing is computed any more."""
        self.pages, self.host = [], []
        self.computed = self.host_sealed = self.pages_sealed = self.table_length = self.host_table_length = 0
        self.first_page = self.mirror_limit = self.fast_decode_until = self.drafted = 0
