"""Makes the shares of a plan: running requests grow and preempt others, then waiting ones are admitted."""

from collections.abc import Iterator, Sequence

from penstock.sched.arrivals import Arrivals
from penstock.sched.queue import RequestQueues
from penstock.sched.request import Request
from penstock.sched.reserves import Reserves
from penstock.sched.span import Pools
from penstock.sched.width import StepWidth
from penstock.step.plan import Admission, Share, ShareKind


class Growth:
    """Gives tokens and blocks to requests, the oldest first."""

    def __init__(
        self, pools: Pools, queues: RequestQueues, reserves: Reserves, arrivals: Arrivals, width: StepWidth
    ) -> None:
        self._pools, self._queues, self._reserves = pools, queues, reserves
        self._arrivals, self._width = arrivals, width
        self.preemptions = 0

    def run(self, shares: list[Share]) -> tuple[int, bool, bool]:
        """Append the shares of running requests.

        Every request that lacks only its newest token gets it, so a long prompt never holds up decodes:
        chunks take what is left. A prompt that is not finished in this step leaves up to half of that to
        prompts that can be, behind it or in the queue. So at most one request is amid its prompt, and no
        other waits for it.

        Returns the tokens left in the step, whether these are only for prompts that they finish, and whether
        a request was preempted.
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
            gone = request.row is None  # It was preempted in this loop.
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
        """Admit requests from the queue, in order, while there are tokens, rows, and blocks for their length.

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
            yield Admission(row, request.sampling, request.prompt, output, request.adapter)
            if not comes:
                count, whole = self.part(request, count, budget, whole)
                budget -= count
                shares.append(self.share(request, count))

    def _prompt(self, request: Request, budget: int, whole: bool) -> tuple[int, bool]:
        """Return how many tokens a request computes of its prompt, and the new value of `whole`.

        The count is 0 if the request waits for blocks that are under way.
        """
        self.reuse(request)
        if self._arrivals.meet(request) or self._arrivals.fetch(request):
            return 0, whole
        return self.part(request, self.chunk(request, budget, whole), budget, whole)

    def chunk(self, request: Request, budget: int, whole: bool) -> int:
        """Return how many tokens a request may compute of its prompt.

        It is 0 if `whole` is set and they do not finish the prompt.
        """
        count = request.chunk(max(budget, 0))
        return count if not whole or request.kv.computed + count == request.goal else 0

    def part(self, request: Request, count: int, budget: int, whole: bool) -> tuple[int, bool]:
        """Return how many of `count` tokens a request computes, and the new value of `whole`.

        A prompt that is not finished leaves some tokens to prompts that can be.
        """
        if whole or request.kv.computed + count >= request.goal:
            return count, whole
        return request.chunk(budget - self._reserves.wanted(budget // 2)) or count, True

    def reuse(self, request: Request) -> None:
        """Skip over full blocks that are cached."""
        if request.share_prefix:
            request.kv.reuse()

    # ---- room

    def _place(self, request: Request, count: int, shares: list[Share]) -> None:
        """Append the share of a running request for `count` positions.

        If there are no pages for it, it waits for pages that are freed soon, or is preempted itself.
        """
        kv, pages = request.kv, self._pools.pages
        lacking = kv.pages_needed(count) - pages.available
        if lacking > 0 or kv.long:
            if 0 < lacking <= sum(len(other.kv.pages) for other in self._queues.running if other.ending):
                return  # Requests that end with the step under way will free enough pages.
            if kv.chunks_to_host and not kv.pages:
                kv.mirror_limit -= min(kv.mirror_limit, max(0, lacking))
            if not self._make_room(request, count):
                if not 0 < kv.pages_needed(count) - pages.available <= self._pools.tiers.pages_held:
                    self.preempt(request)  # Otherwise transfers will free enough pages when they land.
                return
        shares.append(self.share(request, count))

    def _make_room(self, request: Request, count: int) -> bool:
        """Preempt others until the running request has the blocks for `count` more positions.

        Only requests behind it are preempted, and they have no share yet: the last one that has such blocks.
        If pages are short, short requests go before long ones, since they are computed again sooner. Mirrored
        pages are given up first.

        Returns False if the request has to be preempted itself.
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
        """Give up mirrored pages before any share is made.

        They are needed for the next token of all running requests, and for the first request in the queue.
        """
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
        """Give up `count` mirrored pages of these requests, the youngest first, or as many as there are.

        Requests that have a share must not be among them, since they will read these pages. Returns whether a
        page was given up.
        """
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
        """Send a running request back to the queue, before all that have a later turn.

        Its KV is recomputed, or found in the prefix cache.
        """
        self._queues.remove(request)
        self.let_go(request)
        self._queues.wait(request)
        self.preemptions += 1

    def let_go(self, request: Request) -> None:
        """Free a request's blocks and end its wait."""
        self._arrivals.leave(request)
        request.meets, request.meeting = 0, None
        request.kv.release()

    # ---- shares

    def share(self, request: Request, count: int) -> Share:
        """Allocate blocks for the next `count` positions, seal full pages, and return the share."""
        kv, size = request.kv, self._pools.size
        start, stop, row = kv.computed, kv.computed + count, request.row
        assert row is not None
        if start < len(request.prompt):
            counts = self._pools.tiers.counts
            counts.prompts += 0 if request.begun else len(request.prompt)
            counts.find(request.found.compute(start, stop))
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
            pooled=request.sampling.pooled and stop == len(request.tokens),
        )
        kv.note_tables()
        if share.sample:
            kv.note_fast_decode()
        else:
            kv.fast_decode_until = 0
        return share
