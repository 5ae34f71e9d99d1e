"""The shares of a plan: those who run grow, others make room for them, and those who wait are admitted."""

from collections.abc import Iterator, Sequence

from penstock.sched.arrivals import Arrivals
from penstock.sched.queue import RequestQueues
from penstock.sched.request import Request
from penstock.sched.reserves import Reserves
from penstock.sched.span import Pools
from penstock.sched.width import StepWidth
from penstock.step.plan import Admission, Share, ShareKind


class Growth:
    """The giver of tokens and blocks, to the oldest first."""

    def __init__(
        self, pools: Pools, queues: RequestQueues, reserves: Reserves, arrivals: Arrivals, width: StepWidth
    ) -> None:
        self._pools, self._queues, self._reserves = pools, queues, reserves
        self._arrivals, self._width = arrivals, width
        self.preemptions = 0

    def run(self, shares: list[Share]) -> tuple[int, bool, bool]:
        """Append the shares of the running. Return the tokens left in the step, whether these are only for
        prompts that they finish, and whether anyone was preempted.

        Every request that only lacks its newest token gets it, so a long prompt never holds up others: chunks
        take what is left. A prompt that is not finished in this step leaves up to half of that to prompts
        which can be, behind it or in the queue. So there is never more than one in the midst of its prompt,
        and no other waits for that one.
        """
        running = self._queues.running
        budget = self._width.tokens - sum(
            [len(request.tokens) - request.kv.computed == 1 for request in running if not request.ending]
        )
        before, whole = self.preemptions, False
        for request in tuple(running):
            kv, tokens = request.kv, request.tokens
            start = kv.computed
            if start < kv.fast_decode_until and len(tokens) - start == 1 and not request.ending:
                assert request.row is not None
                shares.append(
                    Share(
                        request.row, start, (tokens[start],), kv.table_length, (), True, len(request.prompt)
                    )
                )
                kv.computed = start + 1
                continue
            gone = request.row is None  # It had to make room.
            if gone or request.ending:
                continue
            if request.arriving is not None and not self._arrivals.is_late(request):
                continue
            count = 1
            if len(tokens) - start > 1:
                count, whole = self._prompt(request, budget, whole)
                budget -= count
            if count:
                self._place(request, count, shares)
        return budget, whole, self.preemptions > before

    def admit(self, shares: list[Share], budget: int, whole: bool) -> Iterator[Admission]:
        """Admit requests from the queue, each in its turn, while tokens, rows and blocks for their whole
        length are there.

        A request that waits for its prompt from another tier is admitted without tokens.

        whole: whether tokens are only for prompts that they finish.
        """
        queues, reserves = self._queues, self._reserves
        while queues.waiting and queues.free_rows and len(queues.running) < self._width.rows:
            request = queues.waiting[0]
            self.reuse(request)
            room = reserves.has_room(request)
            comes = room and not reserves.is_full(request) and self._arrivals.fetch(request)
            count = 0 if comes else self.chunk(request, budget, whole)
            if not room or not (comes or (count and not reserves.is_full())):
                self.let_go(request)
                return
            if request.kv.long:
                request.kv.find_mirrors(self._pools.pages.available - reserves.pages(request))
            row = queues.run_next()
            output = tuple(request.tokens[len(request.prompt) :])
            yield Admission(row, request.sampling, request.prompt, output)
            if not comes:
                count, whole = self.part(request, count, budget, whole)
                budget -= count
                shares.append(self.share(request, count))

    def _prompt(self, request: Request, budget: int, whole: bool) -> tuple[int, bool]:
        """Return how many tokens a request computes of its prompt, none if it waits for blocks on their way,
        and whether the other tokens are only for prompts that they finish."""
        self.reuse(request)
        if self._arrivals.meet(request) or self._arrivals.fetch(request):
            return 0, whole
        return self.part(request, self.chunk(request, budget, whole), budget, whole)

    def chunk(self, request: Request, budget: int, whole: bool) -> int:
        """Return how many tokens a request may compute of its prompt; none if they do not finish it where
        only `whole` prompts go on."""
        count = request.chunk(max(budget, 0))
        return count if not whole or request.kv.computed + count == request.goal else 0

    def part(self, request: Request, count: int, budget: int, whole: bool) -> tuple[int, bool]:
        """Return how many of `count` tokens a request computes if it leaves some to prompts that can be
        finished, and whether the others are only for those from now on."""
        if whole or request.kv.computed + count >= request.goal:
            return count, whole
        return request.chunk(budget - self._reserves.wanted(budget // 2)) or count, True

    def reuse(self, request: Request) -> None:
        """Let a request skip full blocks that are there."""
        found = request.share_prefix and request.kv.reuse()
        if found and request.kv.long and request.meeting is not None and request.cached is not None:
            self._arrivals.met(request, found * self._pools.size)

    # ---- room

    def _place(self, request: Request, count: int, shares: list[Share]) -> None:
        """Append the share of a running request for `count` positions. If there are no pages for it, it waits
        for those that will be free soon, or is preempted itself."""
        kv, pages = request.kv, self._pools.pages
        lacking = kv.pages_needed(count) - pages.available
        if lacking > 0 or kv.long:
            if 0 < lacking <= sum(len(other.kv.pages) for other in self._queues.running if other.ending):
                return  # They will be free when the step under way is over.
            if kv.chunks_to_host and not kv.pages:
                kv.mirror_limit -= min(kv.mirror_limit, max(0, lacking))
            if not self._make_room(request, count):
                if not 0 < kv.pages_needed(count) - pages.available <= self._pools.tiers.pages_held:
                    self.preempt(request)  # Else they will be free when they have landed.
                return
        shares.append(self.share(request, count))

    def _make_room(self, request: Request, count: int) -> bool:
        """Preempt until the running request has the blocks for `count` more positions. Return False if it has
        to go itself.

        Only requests behind it are preempted, and they have no share yet: the last that has such blocks. Of
        those that need pages short ones go first, since they are sooner computed again. Before anyone goes,
        mirrored pages do.
        """
        running, pools, kv = self._queues.running, self._pools, request.kv
        while True:
            lacking = kv.pages_needed(count) - pools.pages.available
            lacks_pages = lacking > 0
            if not lacks_pages and kv.host_needed(count) <= pools.host.available:
                return True
            position = running.index(request)
            if lacks_pages and self._give_mirrors(running[position:], lacking):
                continue
            behind = [
                other
                for other in running[position + 1 :]
                if (other.kv.pages if lacks_pages else other.kv.long)
            ]
            if not behind:
                return False
            self.preempt(max(behind, key=lambda other: (lacks_pages and not other.kv.long, other.turn)))

    def free_mirrors(self) -> None:
        """Give up mirrored pages before anyone has a share: for the next token of all who run, and for the
        first in the queue."""
        if not self._pools.long_spans:
            return
        queues, available = self._queues, self._pools.pages.available
        wanted = sum(
            request.kv.pages_needed(1)
            for request in queues.running
            if request.kv.lacking == 1 and not request.ending
        )
        if queues.waiting and queues.free_rows:
            promised = self._reserves.pages(queues.waiting[0])
            if promised - available <= sum(request.kv.mirrored for request in queues.running):
                wanted = max(wanted, promised)
        self._give_mirrors(queues.running, wanted - available)

    def _give_mirrors(self, requests: Sequence[Request], count: int) -> bool:
        """Give up so many mirrored pages of these, or as many as there are, of the youngest first. Return
        whether there was one. Who has a share is not among them, as it will read these pages."""
        given = 0
        for request in reversed(requests):
            kv = request.kv
            some = min(kv.mirrored, count - given)
            if some > 0:
                given += some
                kv.mirror_limit = kv.mirrored - some
                kv.drop_mirrors(some)
        return given > 0

    def preempt(self, request: Request) -> None:
        """Send a running request back to the queue, before all that have a later turn. Its KV is computed
        again, or found again."""
        self._queues.remove(request)
        self.let_go(request)
        self._queues.wait(request)
        self.preemptions += 1

    def let_go(self, request: Request) -> None:
        """Free what a request holds and waits for."""
        self._arrivals.leave(request)
        request.meets, request.meeting = 0, None
        request.kv.release()

    # ---- shares

    def share(self, request: Request, count: int) -> Share:
        """Allocate blocks for the next `count` positions, seal pages that become full, and describe the
        work."""
        kv, size = request.kv, self._pools.size
        start, stop, row = kv.computed, kv.computed + count, request.row
        assert row is not None
        if request.cached is None:
            request.cached = start
            self._pools.tiers.counts.began(
                len(request.prompt), start, min(request.from_host, start), min(request.from_disk, start)
            )
        kv.grow(count)
        if self._pools.share:
            kv.seal(request.known)
        following, first = tuple[int, ...](), kv.first_page
        asked = request.sampling.prompt_logprobs is not None
        if asked and request.scored < min(stop, len(request.prompt) - 1):
            following = tuple(request.tokens[start + 1 : min(stop + 1, len(request.prompt))])
        new = max(kv.table_length, first)
        share = Share(
            row=row,
            start=start,
            tokens=tuple(request.tokens[start:stop]),
            first_new_block=new,
            new_blocks=tuple(kv.pages[new - first :]),
            sample=stop == len(request.tokens),
            prompt_length=len(request.prompt),
            kind=ShareKind.DECODE if count == 1 else ShareKind.CHUNK,
            next_prompt_tokens=following,
            cold_start=min(start, first * size),
            cold_stop=len(kv.host) * size,
            near=first * size,
            first_new_cold=kv.host_table_length,
            new_cold=tuple(kv.host[kv.host_table_length :]),
        )
        kv.note_tables()
        if share.sample:
            kv.note_fast_decode()
        else:
            kv.fast_decode_until = 0
        return share
