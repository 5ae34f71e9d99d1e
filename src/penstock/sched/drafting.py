"""Gives shares of a plan drafts to verify, as far as there is room that nobody else needs.

A draft never takes what a request needs: it gets pages and tokens of the step that are left, and no request
gives way for it. Its KV is in pages of the request's own behind those of its tokens. These pages have no
name, so nobody finds them, until the tokens in them are the request's. `Scheduler.commit` gives up those of
what did not hold.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from penstock.sched.request import Request
from penstock.sched.room import RequestRoom
from penstock.sched.span import Pools
from penstock.sched.speculation import Speculation
from penstock.sched.width import StepWidth
from penstock.step.plan import Row, Share, ShareKind

EARLY = 2
"""A request becomes long so many tokens before it is too long for the device: its next one has no place
there."""


class Drafting:
    """Makes shares that verify drafts of shares of one token."""

    def __init__(self, pools: Pools, room: RequestRoom, width: StepWidth, speculation: Speculation) -> None:
        self._pools, self._room, self._width, self.speculation = pools, room, width, speculation

    def extend(self, shares: Sequence[Share], by_row: Mapping[Row, Request]) -> list[Share]:
        """Return a plan's shares, some of which verify a draft now. These come last.

        A request whose draft is verified is left out of plans until that is known: `Request.ending`.
        """
        decoding = [
            (share, request, most)
            for share in shares
            if share.kind is ShareKind.DECODE
            and share.sample
            and (most := self._most(request := by_row[share.row])) > 0
        ]
        if not decoding:
            return list(shares)
        tokens = sum([len(share.tokens) for share in shares])
        drafts = self.speculation.choose(
            [(request, most) for _, request, most in decoding], tokens, self._width.tokens - tokens
        )
        verifying = dict[Row, Share]()
        for (share, request, _), draft in zip(decoding, drafts, strict=True):
            count = self._fitting(request, len(draft.tokens), 2 * len(by_row))
            if count:
                draft = draft.first(count)
                self.speculation.verifies(share, draft)
                verifying[share.row] = self._verified(share, request, draft.tokens)
        return [share for share in shares if share.row not in verifying] + list(verifying.values())

    def _most(self, request: Request) -> int:
        """Return the most tokens of a draft that may all be the request's. The target adds one to them."""
        if request.unknown or request.sampling.pooled:
            return 0
        most = request.most - len(request.tokens) - 1
        return most if request.kv.long else min(most, self._room.long_from - EARLY - len(request.tokens) - 1)

    def _fitting(self, request: Request, count: int, kept: int) -> int:
        """Return how many of so many tokens have a place in blocks. kept: pages that are left to others."""
        kv, pools = request.kv, self._pools
        if not count or kv.host_needed(count) > pools.host.available:
            return 0
        if kv.pages_needed(count) > pools.pages.available - kept:
            count = min(count, -kv.computed % pools.size)
        return count

    def _verified(self, share: Share, request: Request, draft: tuple[int, ...]) -> Share:
        kv, size = request.kv, self._pools.size
        kv.grow(len(draft))
        kv.note_tables()
        kv.fast_decode_until, request.ending = 0, True
        return replace(
            share,
            kind=ShareKind.VERIFY,
            tokens=(*share.tokens, *draft),
            new_blocks=tuple(kv.pages[share.first_new_block - kv.first_page :]),
            cold_start=min(share.start, kv.first_page * size),
            cold_stop=len(kv.host) * size,
            near=kv.first_page * size,
            new_cold=tuple(kv.host[share.first_new_cold :]),
        )
