"""Makes drafts that are trees, by a draft model: the likeliest lines of tokens, level by level.

A node's children are the tokens that the target may draw behind it: those with the highest sums of the draft
model's score and the request's noise of that position, since the target draws by the same noise. How likely
each is, is what a softmax of these sums says. The product along a line is how likely the line holds, and of
all nodes that were offered the likeliest are the tree (best first, as SpecExec, Svirschevski et al. 2024,
arXiv 2406.02532).

A step of the draft model computes some of them that were not yet, of all requests together. Their KV is in
the request's pages, in the order in which they were computed, whatever place they have in the draft: the
target writes there anew, and a draft model with KV of its own computes what held once more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil, log
from time import perf_counter

import torch

from penstock.engine.drafter import ModelDrafter, plan_of, share_of
from penstock.engine.ranks import Ranks, Threads
from penstock.sched.request import Request
from penstock.sched.suffix import NO_DRAFT, Draft
from penstock.step.plan import MOST_NODES, Plan, Row, Share, ShareKind

_CHILDREN = 8
"""Tokens that are offered behind each one."""
_LEVELS, _NODES_OF_A_LEVEL = 8, 4
"""Steps of a small tree, and how many nodes more a step more is for. Deep trees gain more than broad ones."""
_AT_ONCE = 5
"""A step computes at most so many parts of a tree."""
_LEAST = 1e-6
"""Probability below which a token is not offered."""
_LONG_PASS = 0.05
"""Seconds of a pass over weights that stream from which on trees are grown on a GPU: the host launches each
kernel of the steps that grow one, while lines are drafted by recorded steps. Set by hand."""


def grows_trees(device: torch.device, seconds: float) -> bool:
    """Tell whether a draft model grows trees for a target of whose passes the streams take so many seconds,
    0 if nothing streams."""
    return seconds >= _LONG_PASS if device.type == "cuda" else seconds > 0


class TreeDrafter(ModelDrafter):
    """Carries out the steps of a draft model that grow trees."""

    def __init__(
        self, ranks: Ranks, step_tokens: int, threads: Threads | None = None, *, shares_kv: bool = False
    ) -> None:
        """Draft as ModelDrafter does, but trees."""
        super().__init__(ranks, step_tokens, threads, shares_kv=shares_kv)
        self.most, self.trees = MOST_NODES, True

    def levels(self, count: int) -> int:
        """Return how many steps a tree of so many nodes takes at most."""
        return min(count, _LEVELS + count // _NODES_OF_A_LEVEL)

    def propose(self, asked: Sequence[tuple[Request, Share, int]]) -> list[Draft]:
        """Return a tree of at most so many tokens for each request, the likeliest first."""
        began, steps = perf_counter(), 0
        trees = {share.row: GrowingTree(request, count) for request, share, count in asked}
        known = list(self.known(asked))
        for plan in known:
            self._grow(plan, trees)
        # Of a tree that is deeper than the output may become, the rest would be in vain.
        depths = [
            min(self.levels(count), request.most - len(request.tokens) - 1) for request, _, count in asked
        ]
        for level in range(1, max(depths)):
            shares = [
                share
                for (request, _, _), depth in zip(asked, depths, strict=True)
                if level < depth and (share := self._level(request, trees))
            ]
            if not shares:
                break
            self._grow(plan_of(shares), trees)
            steps += 1
        for request, _, _ in asked:
            request.kv.drafted = len(request.tokens)
        computed = sum([plan.tokens for plan in known])
        alike = computed <= 2 * sum([count for _, _, count in asked])
        self.took(perf_counter() - began, len(known) + steps, alike)
        return [trees[share.row].draft() for _, share, _ in asked]

    def _level(self, request: Request, trees: Mapping[Row, "GrowingTree"]) -> Share | None:
        """Return a share that computes the likeliest nodes that are not yet computed."""
        assert request.row is not None
        tree = trees[request.row]
        before = len(tree.computed)
        tokens = tree.widen()
        if not tokens:
            return None
        share = share_of(request, len(request.tokens) - 1 + before, tokens, len(request.kv.pages))
        return replace(share, kind=ShareKind.VERIFY, parents=tree.parents_computed())

    def _grow(self, plan: Plan, trees: Mapping[Row, "GrowingTree"]) -> None:
        outcome = self.begin(replace(plan, children=_CHILDREN)).outcome()
        assert not outcome.landed, "transfers that a draft's step reports are lost"
        for share, result in zip(plan.shares, outcome.results, strict=True):
            trees[share.row].offer(result.children)


class GrowingTree:
    """Grows the tree of one request, whose newest token is node 0.

    computed: nodes in the order in which the draft model computes them.
    """

    def __init__(self, request: Request, count: int) -> None:
        """Begin with the newest token, which is computed next. count: tokens of the draft, at most."""
        self._ends, self._count, self._width = request.sampling.end_tokens, count, ceil(count / _AT_ONCE)
        self._tokens, self._parents, self._chances, self._scores = [request.tokens[-1]], [0], [1.0], [0.0]
        self._best = list[int]()
        """The likeliest nodes that were offered, in order."""
        self.computed, self._coming = [0], [0]

    def offer(self, children: Sequence[Sequence[tuple[int, float]]]) -> None:
        """Take in what may follow the nodes that were computed last, if it is told."""
        if not children:
            return
        for node, some in zip(self._coming, children, strict=True):
            for token, chance in some:
                if chance >= _LEAST:
                    self._best.append(len(self._tokens))
                    self._tokens.append(token)
                    self._parents.append(node)
                    self._chances.append(chance)
                    self._scores.append(self._scores[node] + log(chance))
        # A child is never likelier than its parent, and comes behind it where both are equal.
        self._best = sorted(self._best, key=lambda node: (-self._scores[node], node))[: self._count]

    def widen(self) -> tuple[int, ...]:
        """Return the tokens of the likeliest nodes that are not yet computed. These are computed next."""
        done, self._coming = set(self.computed), list[int]()
        for node in self._best:
            if node not in done and self._tokens[node] not in self._ends:
                self._coming.append(node)
                if len(self._coming) == self._width:
                    break
        room = 1 + self._count - len(self.computed)
        self._coming = self._coming[:room]
        self.computed += self._coming
        return tuple([self._tokens[node] for node in self._coming])

    def parents_computed(self) -> tuple[int, ...]:
        """Return the parent of each computed node but the first, both by their places among these."""
        place = {node: at for at, node in enumerate(self.computed)}
        return tuple([place[self._parents[node]] for node in self.computed[1:]])

    def draft(self) -> Draft:
        """Return the tree."""
        if not self._best:
            return NO_DRAFT
        place = {0: 0} | {node: at for at, node in enumerate(self._best, 1)}
        return Draft(
            tuple([self._tokens[node] for node in self._best]),
            tuple([self._chances[node] for node in self._best]),
            by_model=True,
            parents=tuple([place[self._parents[node]] for node in self._best]),
        )
