"""Gives shares of a plan drafts to verify, as far as there is room that nobody else needs.

A draft never takes what a request needs: it gets pages and tokens of the step that are left, and no request
gives way for it. What is cached the longest may. Its KV is in pages of the request's own behind those of its
tokens. These pages have no name, so nobody finds them, until the tokens in them are the request's.
`Scheduler.commit` gives up those of what did not hold.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from penstock.sched.drafter import SuffixDrafter
from penstock.sched.request import Request
from penstock.sched.room import RequestRoom
from penstock.sched.span import Pools
from penstock.sched.speculation import Speculation
from penstock.sched.suffix import Draft
from penstock.sched.width import StepWidth
from penstock.step.plan import Plan, Row, Share, ShareKind
from penstock.step.request import FinishReason

EARLY = 2
"""A request becomes long so many tokens before it is too long for the device: its next one has no place
there."""


_PAUSE, _LONGEST_PAUSE = 64, 4096
"""Steps without drafts after one with drafts that was too large for the memory: at first, and at most. Each
failure doubles them."""


class Drafting:
    """Makes shares that verify drafts of shares of one token."""

    def __init__(self, pools: Pools, room: RequestRoom, width: StepWidth, speculation: Speculation) -> None:
        self._pools, self._room, self._width, self.speculation = pools, room, width, speculation
        self._paused, self._pause = 0, _PAUSE // 2
        """Steps that are still left without drafts, and those that the last failure cost."""

    def pause(self, plan: Plan | None) -> None:
        """Verify nothing for a while if this plan, whose step was too large for the memory, has drafts. plan:
        None if it was a step that drafts."""
        if plan is None or (plan.runs and plan.runs[-1].kind is ShareKind.VERIFY):
            self._paused = self._pause = min(2 * self._pause, _LONGEST_PAUSE)
            self.speculation.rest()

    def waits(self, under_way: Sequence[Plan], running: Sequence[Request]) -> bool:
        """Tell whether the next plan has to wait for steps under way, before it is made.

        While speculation rests it has not: all requests run ahead. Before each plan it is seen whether it
        wakes. When it is awake, nothing is planned while steps under way yield tokens, which drafts begin
        with. If those requests were planned that are in no step, each would have every second step from then
        on, and the oldest might wait for pages of others. So they go on together. A draft model's steps are
        begun and ended while a plan is made, so none of the target may be under way.
        """
        speculation, verify = self.speculation, ShareKind.VERIFY
        yields = any(share.sample for plan in under_way for share in plan.shares)
        if speculation.resting and not self._paused:
            self._look(running, ahead=yields)
        if speculation.resting:
            return any(plan.runs and plan.runs[-1].kind is verify for plan in under_way)
        if speculation.model is not None and under_way:
            return True
        return yields

    def _look(self, running: Sequence[Request], *, ahead: bool) -> None:
        """Let speculation see whether it pays to wake."""
        decoding = [
            (request, most)
            for request in running
            if not request.ending and request.kv.lacking == 1 and (most := self._most(request)) > 0
        ]
        spare = self._width.tokens - len(decoding)
        self.speculation.look(decoding, len(decoding), spare, ahead=ahead)

    def extend(self, shares: Sequence[Share], by_row: Mapping[Row, Request]) -> list[Share]:
        """Return a plan's shares, some of which verify a draft now. These come last.

        A request whose draft is verified is left out of plans until that is known: `Request.ending`.
        """
        if self.speculation.resting:
            self._paused -= bool(self._paused)
            self.speculation.rested()
            return list(shares)
        decoding = [
            (share, request, most)
            for share in shares
            if share.kind is ShareKind.DECODE
            and share.sample
            and (most := self._most(request := by_row[share.row])) > 0
        ]
        if not decoding:
            self.speculation.rest()
            return list(shares)
        assert not any(request.unknown for _, request, _ in decoding), (
            "a draft behind a token that is not known"
        )
        tokens, kept = sum([len(share.tokens) for share in shares]), 2 * len(by_row)
        spare = self._width.tokens - tokens
        found = self.speculation.propose([(request, most) for _, request, most in decoding], spare)
        grown = self._by_model(decoding, found, kept, tokens, spare)
        drafts = self.speculation.choose(found, tokens, spare)
        verifying = dict[Row, Share]()
        for (share, request, _), draft in zip(decoding, drafts, strict=True):
            there = grown.get(share.row, 0)
            count = len(draft.tokens) if there else self._fitting(request, len(draft.tokens), kept)
            if count < there:
                request.kv.truncate(request.kv.computed - there + count)
            if count:
                draft = draft.first(count).heavy_first()
                self.speculation.verifies(share, draft)
                verifying[share.row] = self._verified(share, request, draft, grown=bool(there))
        return [share for share in shares if share.row not in verifying] + list(verifying.values())

    def stepped(self, plan: Plan, seconds: float, *, idle: bool) -> None:
        """Note that a step has been committed, and how long it took. idle: whether there is nothing to do."""
        if plan.shares:
            self.speculation.stepped(plan, seconds)
        if idle:
            self.speculation.idle()

    def finished(self, request: Request, reason: FinishReason) -> None:
        """Let others look in the output of a request that has ended by itself."""
        drafter, by_itself = self.speculation.drafter, reason in (FinishReason.STOP, FinishReason.LENGTH)
        if by_itself and isinstance(drafter, SuffixDrafter) and drafter.outputs is not None:
            drafter.outputs.add(request.scope, request.tokens[: request.known], len(request.prompt))

    def forget(self) -> None:
        """Forget outputs of requests that have ended."""
        drafter = self.speculation.drafter
        if isinstance(drafter, SuffixDrafter) and drafter.outputs is not None:
            drafter.outputs.forget()

    def _by_model(
        self,
        decoding: Sequence[tuple[Share, Request, int]],
        found: list[Draft],
        kept: int,
        tokens: int,
        spare: int,
    ) -> dict[Row, int]:
        """Let the draft model draft where that pays, and put its drafts into `found`.

        The pages of these requests grow by the drafts, which the model computes there. Returns by how many
        tokens, by row.
        """
        grown, asked, which = dict[Row, int](), list[tuple[Request, Share, int]](), list[int]()
        for place, depth in enumerate(self.speculation.depths(found, tokens, spare)):
            share, request, most = decoding[place]
            # The draft model's KV never leaves the device.
            places = min(depth, self._places(request, most))
            count = 0 if request.kv.long else self._fitting(request, places, kept)
            if count:
                request.kv.grow(count)
                request.kv.note_tables()
                grown[share.row] = count
                asked.append((request, share, count))
                which.append(place)
        if asked:
            for place, draft in zip(which, self.speculation.by_model(asked), strict=True):
                found[place] = replace(draft, instead_of=found[place])
        return grown

    def _most(self, request: Request) -> int:
        """Return the most tokens of a draft that may all be the request's. The target adds one to them."""
        if request.sampling.pooled:
            return 0
        most = request.most - len(request.tokens) - 1
        return most if request.kv.long else min(most, self._room.long_from - EARLY - len(request.tokens) - 1)

    def _places(self, request: Request, most: int) -> int:
        """Return how many tokens of a draft model's draft there are places for, if `most` may all hold."""
        model = self.speculation.model
        if model is None or not model.trees:
            return most
        return min(self._room.longest, self._room.long_from - EARLY) - len(request.tokens) - 1

    def _fitting(self, request: Request, count: int, kept: int) -> int:
        """Return how many of so many tokens have a place in blocks. kept: pages that are left to others."""
        kv, pools = request.kv, self._pools
        # Without recent pages, the block that leaves for the host would be one that this very step fills.
        if not count or kv.host_needed(count) > (pools.host.available if pools.recent else 0):
            return 0
        if kv.pages_needed(count) > pools.pages.available - kept:
            count = min(count, -kv.computed % pools.size)
        return count

    def _verified(self, share: Share, request: Request, draft: Draft, *, grown: bool) -> Share:
        kv, size = request.kv, self._pools.size
        if not grown:
            kv.grow(len(draft.tokens))
            kv.note_tables()
        kv.fast_decode_until, request.ending = 0, True
        return replace(
            share,
            kind=ShareKind.VERIFY,
            tokens=(*share.tokens, *draft.tokens),
            parents=draft.parents,
            new_blocks=tuple(kv.pages[share.first_new_block - kv.first_page :]),
            cold_start=min(share.start, kv.first_page * size),
            cold_stop=len(kv.host) * size,
            near=kv.first_page * size,
            new_cold=tuple(kv.host[share.first_new_cold :]),
        )
