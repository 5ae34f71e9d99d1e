"""Drafts by a head behind the target's hidden states (EAGLE-3, or an MTP layer), in steps of its own between
those of the target.

The head draws by the settings of each request and with the noise of each position, as the target will, of the
tokens that it knows. Its KV and the features that the target's passes have left are in pages of the same
numbers as the target's, in a pool of its own. Position i has the target's features there and the token behind
it, and yields the token behind that.

`KVSpan.drafted` says how many positions have KV of the head that was computed from the target's features. It
ends before the newest token: what the head has computed of a draft, from its own outputs, is computed anew
when the target has, and so is what did not hold.

Pages that came from another tier hold no features. The head sees nothing of what lies before the end of the
last of these: the request begins there for it. Since rotary positions are relative, it counts them from
there.

Why this is safe. No step of the target is under way while the head drafts, and it writes to its own pool
alone. A page that two requests share may have the head's KV of whichever has drafted last. These differ in
its last position, if other tokens come behind the page: a draft may then be another, an output never.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.engine.draft_steps import DraftSteps
from penstock.sched.request import Request
from penstock.sched.suffix import NO_DRAFT, Draft
from penstock.step.plan import UNKNOWN, ModelRole, Plan, Share, ShareKind


@dataclass(frozen=True, slots=True)
class _HeadRequest:
    """Holds a request that is to have a draft of `count` tokens. base: its first position for the head."""

    request: Request
    count: int
    base: int

    @property
    def newest(self) -> int:
        """Return the position of the newest token, the first without features."""
        return len(self.request.tokens) - 1


class HeadDrafter(DraftSteps):
    """Carries out the steps of a draft head."""

    def propose(self, asked: Sequence[tuple[Request, Share, int]]) -> list[Draft]:
        """Return a draft of so many tokens for each request, or none where there are no features to begin
        with.

        Each has a share of one token in the plan of the target that is being made, and pages for that and for
        the draft.
        """
        able = [_HeadRequest(request, count, _base(request)) for request, _, count in asked]
        able = [one for one in able if one.base < one.newest]
        known, further = list(self._known(able)), list(self._further(able))
        computed = sum([plan.tokens for plan in known])
        alike = bool(known or further) and computed <= 2 * sum([one.count for one in able])
        drawn = self.drawn([*known, *further], alike)
        for one in able:
            one.request.kv.drafted = one.newest
        return [
            Draft(tuple(drawn[share.row]), (1.0,) * count, by_model=True) if share.row in drawn else NO_DRAFT
            for _, share, count in asked
        ]

    def _known(self, able: Sequence[_HeadRequest]) -> Iterator[Plan]:
        """Yield the steps that compute what the head lacks, up to the position before the newest token."""
        lacking = [(one, max(one.request.kv.drafted, one.base)) for one in able]
        while lacking:
            shares, left, room = list[Share](), list[tuple[_HeadRequest, int]](), self._step_tokens
            for one, start in lacking:
                stop = min(start + room, one.newest)
                if start < stop:
                    shares.append(_share(one, start, tuple(one.request.tokens[start + 1 : stop + 1])))
                    room -= stop - start
                if stop < one.newest:
                    left.append((one, stop))
            yield _plan(shares)
            lacking = left

    def _further(self, able: Sequence[_HeadRequest]) -> Iterator[Plan]:
        """Yield the steps behind these, each of the token that the one before draws."""
        for level in range(1, max([one.count for one in able], default=0)):
            yield _plan(
                [_share(one, one.newest - 1 + level, (UNKNOWN,)) for one in able if level < one.count]
            )


def _base(request: Request) -> int:
    """Return the first position from which on all pages of a request have features."""
    pages, brought, size = request.kv.pages, request.kv.pools.pages.brought, request.kv.pools.size
    if not brought:
        return 0
    return max([index + 1 for index, page in enumerate(pages) if page in brought], default=0) * size


def _share(one: _HeadRequest, start: int, tokens: tuple[int, ...]) -> Share:
    """Return a share that computes positions from `start` on with these tokens, each the one behind its
    position. It draws behind the newest token, or later."""
    request, size = one.request, one.request.kv.pools.size
    assert request.row is not None
    further = tokens == (UNKNOWN,)  # The tables are known by then.
    return Share(
        row=request.row,
        start=start - one.base,
        tokens=tokens,
        first_new_block=0,
        new_blocks=() if further else tuple(request.kv.pages[one.base // size :]),
        sample=start + len(tokens) >= one.newest,
        prompt_length=len(request.prompt),
        kind=ShareKind.DECODE if len(tokens) == 1 else ShareKind.CHUNK,
        ahead=one.base + 1,
    )


def _plan(shares: Sequence[Share]) -> Plan:
    rows = [share for share in shares if share.kind is ShareKind.DECODE]
    runs = [share for share in shares if share.kind is not ShareKind.DECODE]
    return Plan((), (*rows, *runs), model=ModelRole.DRAFT)
