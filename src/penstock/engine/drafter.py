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

from collections.abc import Iterator, Sequence

from penstock.engine.draft_steps import DraftSteps
from penstock.engine.ranks import Ranks, Threads
from penstock.sched.request import Request
from penstock.sched.suffix import Draft
from penstock.step.plan import UNKNOWN, ModelRole, Plan, Share, ShareKind


class ModelDrafter(DraftSteps):
    """Carries out the steps of a draft model."""

    def __init__(
        self, ranks: Ranks, step_tokens: int, threads: Threads | None = None, *, shares_kv: bool = False
    ) -> None:
        """Draft as DraftSteps does. shares_kv: the model reads the target's KV, and has none of its own."""
        super().__init__(ranks, step_tokens, threads)
        self._shares_kv = shares_kv

    def propose(self, asked: Sequence[tuple[Request, Share, int]]) -> list[Draft]:
        """Return a draft of so many tokens for each request.

        Each has a share of one token in the plan of the target that is being made, and pages for that and for
        the draft.
        """
        known, further = list(self.known(asked)), list(self._further(asked))
        computed = sum([plan.tokens for plan in known])
        drawn = self.drawn([*known, *further], computed <= 2 * sum([count for _, _, count in asked]))
        for request, _, count in asked:
            request.kv.drafted = len(request.tokens) + count - 1
        return [Draft(tuple(drawn[share.row]), (1.0,) * count, by_model=True) for _, share, count in asked]

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
            shares, left, room = list[Share](), list[tuple[Request, int, int]](), self._step_tokens
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
