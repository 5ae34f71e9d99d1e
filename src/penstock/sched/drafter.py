"""Says what makes drafts: look-up in tokens that are there, a draft model, or anything of a test."""

from collections.abc import Sequence
from typing import Protocol

from penstock.sched.finished import FinishedOutputs
from penstock.sched.request import Request
from penstock.sched.suffix import MOST_MATCHED, Draft, TokenHistory, look_up, look_up_among
from penstock.step.plan import Share


class Drafter(Protocol):
    """Proposes what may come next. It may be wrong in any way: the target decides every token."""

    def propose(self, request: Request, most: int) -> Draft:
        """Return at most `most` tokens behind those that are known of a request: see `Request.known`.

        most: at least one.
        """
        ...


class ModelDrafting(Protocol):
    """Makes drafts by steps of a draft model, for all requests of a plan at once.

    seconds: time of a step that draws a token for each of them; 0 before one was measured.
    spent: seconds of the last drafts, with what the model had to compute before.
    most: tokens of a draft, at most.
    trees: whether its drafts are trees.
    """

    seconds: float
    spent: float
    most: int
    trees: bool

    def levels(self, count: int) -> int:
        """Return how many steps a draft of so many tokens takes."""
        ...

    def propose(self, asked: Sequence[tuple[Request, Share, int]]) -> list[Draft]:
        """Return a draft of so many tokens for each request, whose share of one token is in the plan."""
        ...


class SuffixDrafter:
    """Drafts by `suffix.look_up` in the request's own tokens, and perhaps in outputs of others that have
    finished."""

    def __init__(self, outputs: FinishedOutputs | None = None) -> None:
        """outputs: those of requests that have finished, if these are looked at, too."""
        self.outputs = outputs

    def propose(self, request: Request, most: int) -> Draft:
        """Look in what the request has said so far, its prompt included; in outputs of others, too, whose
        match has to be longer."""
        if request.history is None:
            request.history = TokenHistory()
        request.history.follow(request.tokens, request.known)
        newest = request.history.tokens
        own = look_up(newest, most)
        if self.outputs is None or own.matched >= MOST_MATCHED:
            return own
        other = look_up_among(self.outputs.of(request.scope), newest, most)
        return other if other.matched > own.matched else own


def flaw(draft: Draft, most: int, vocabulary: int | None) -> str:
    """Return what is wrong with a draft of at most `most` tokens, or an empty string."""
    tokens, scores, parents = draft.tokens, draft.scores, draft.parents
    if len(tokens) > most:
        return f"a draft of {len(tokens)} tokens, where {most} have a place"
    if len(scores) != len(tokens):
        return f"a draft of {len(tokens)} tokens with {len(scores)} scores"
    if not all(isinstance(token, int) and 0 <= token < (vocabulary or 1 << 31) for token in tokens):
        return "a draft of tokens that the model does not know"
    if not all(0 <= score <= 1 for score in scores) or draft.matched < 0:
        return "a draft with scores that are no probabilities, or a match of less than nothing"
    if parents and (len(parents) != len(tokens) or any(not 0 <= one <= at for at, one in enumerate(parents))):
        return "a tree in which a token is not behind its parent"
    return ""
