"""Drafts by a smaller model beside the target, in steps of its own between those of the target.

The draft model draws by the settings of each request and with the noise of each position, as the target will
(`Sampler.for_drafts`). So where both models think alike, both draw alike, at any temperature.

Its KV is in the pages of the requests, under the same numbers, in a pool of its own. `KVSpan.drafted` says
how far it has come. What it lacks, such as a prompt whose KV was found, it computes before its first draft.

A copy of the target in few bits has no pool: it reads the target's KV of all tokens but the newest, and
writes its own for that one and for what it drafts. Why this is safe. No step of the target is under way while
it drafts. The share of the same plan that verifies a draft begins with the newest token, so the target writes
the same places anew before anything reads them, as far as the draft is verified. What lies behind is in no
request's tokens: it is never named, found or stored, and is written before it is read.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from statistics import median
from time import perf_counter

from penstock.engine.ranks import Ranks, Threads
from penstock.sched.request import Request
from penstock.sched.suffix import Draft
from penstock.step.plan import MOST_DRAFTED, UNKNOWN, ModelRole, Plan, RequestId, Share, ShareKind, Step

_LAST = 5
"""Measurements of which the median is taken."""


class ModelDrafter:
    """Carries out the steps of a draft model."""

    def __init__(
        self, ranks: Ranks, most: int, threads: Threads | None = None, *, shares_kv: bool = False
    ) -> None:
        """Draft by steps of the draft model of these ranks. most: tokens of a step. threads: of the CPU that
        steps compute with. shares_kv: it reads the target's KV, and has none of its own."""
        self._ranks, self._most, self._threads, self._shares_kv = ranks, most, threads, shares_kv
        self.seconds = 0.0
        """Time of a step that drafts a token for each request; 0 before one was measured."""
        self.spent = 0.0
        """Seconds of the last drafts, with what the model had to compute before."""
        self._took, self._begun = deque[float](maxlen=_LAST), False
        self.most, self.trees = MOST_DRAFTED, False

    def levels(self, count: int) -> int:
        """Return how many steps a draft of so many tokens takes: one for each."""
        return count

    def propose(self, asked: Sequence[tuple[Request, Share, int]]) -> list[Draft]:
        """Return a draft of so many tokens for each request.

        Each has a share of one token in the plan of the target that is being made, and pages for that and for
        the draft.
        """
        known = list(self.known(asked))
        plans, computed = [*known, *self._further(asked)], sum([plan.tokens for plan in known])
        begin, drafts = perf_counter(), defaultdict[RequestId, list[int]](list)
        owner = {request.row: request.id for request, _, _ in asked}
        for plan, step in [(plan, self.begin(plan)) for plan in plans]:
            outcome = step.outcome()
            assert not outcome.landed, "transfers that a draft's step reports are lost"
            for share, result in zip(plan.shares, outcome.results, strict=True):
                drafts[owner[share.row]] += result.tokens
        for request, _, count in asked:
            request.kv.drafted = len(request.tokens) + count - 1
        self.took(perf_counter() - begin, len(plans), computed <= 2 * sum([count for _, _, count in asked]))
        return [
            Draft(tuple(drafts[request.id]), (1.0,) * count, by_model=True) for request, _, count in asked
        ]

    def took(self, spent: float, steps: int, alike: bool) -> None:
        """Note the seconds of so many steps. alike: whether they say how long others take; they do not where
        most of that was a prompt, nor do the first of all, for which a device prepares much."""
        self.spent, alike, self._begun = spent, alike and self._begun, self._begun or alike
        if alike:
            self._took.append(spent / steps)
            self.seconds = median(self._took)

    def begin(self, plan: Plan) -> Step:
        """Begin a step of the draft model."""
        with nullcontext() if self._threads is None else self._threads.of(plan.tokens):
            return self._ranks.begin(plan)

    def known(self, asked: Sequence[tuple[Request, Share, int]]) -> Iterator[Plan]:
        """Yield the steps that compute what the draft model lacks of the requests' tokens."""
        lacking = [
            (
                request,
                len(request.tokens) - 1 if self._shares_kv else request.kv.drafted,
                share.first_new_block,
            )
            for request, share, _ in asked
        ]
        while lacking:
            shares, left, room = list[Share](), list[tuple[Request, int, int]](), self._most
            for request, start, block in lacking:
                stop = min(start + room, len(request.tokens))
                if start < stop:
                    shares.append(share_of(request, start, tuple(request.tokens[start:stop]), block))
                    room, block = room - (stop - start), len(request.kv.pages)
                if stop < len(request.tokens):
                    left.append((request, stop, block))
            yield plan_of(shares)
            lacking = left

    def _further(self, asked: Sequence[tuple[Request, Share, int]]) -> Iterator[Plan]:
        """Yield the steps behind these, each of the token that the one before draws."""
        for level in range(1, max(count for _, _, count in asked)):
            shares = [
                share_of(request, len(request.tokens) - 1 + level, (UNKNOWN,), len(request.kv.pages))
                for request, _, count in asked
                if level < count
            ]
            yield plan_of(shares)


def share_of(request: Request, start: int, tokens: tuple[int, ...], block: int) -> Share:
    """Return a share that computes these tokens, and draws one behind the request's newest or a later one.
    block: index of its first page that workers may not know."""
    row, kv = request.row, request.kv
    assert row is not None
    return Share(
        row=row,
        start=start,
        tokens=tokens,
        first_new_block=block,
        new_blocks=tuple(kv.pages[block:]),
        sample=start + len(tokens) >= len(request.tokens),
        prompt_length=len(request.prompt),
        kind=ShareKind.DECODE if len(tokens) == 1 else ShareKind.CHUNK,
    )


def plan_of(shares: Sequence[Share]) -> Plan:
    """Return the draft model's step of these shares."""
    rows = [share for share in shares if share.kind is ShareKind.DECODE]
    runs = [share for share in shares if share.kind is not ShareKind.DECODE]
    return Plan((), (*rows, *runs), model=ModelRole.DRAFT)
