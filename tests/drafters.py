"""Drafters that are right, wrong and everything between, for tests of speculative decoding."""

import random
from collections.abc import Mapping, Sequence

from penstock.sched.request import Request
from penstock.sched.suffix import Draft
from penstock.step.plan import UNKNOWN

Truth = Mapping[tuple[int, ...], Sequence[Sequence[int]]]
"""Outputs of each prompt, as they are without drafts."""


class Adversary:
    """Drafts by turns what comes next, a beginning of that, end tokens, duplicates, garbage and nothing.

    kinds: which of these, by turns that are drawn.
    """

    def __init__(
        self, truth: Truth, vocab: int, ends: Sequence[int] = (), kinds: str = "tbedgn", seed: int = 0
    ) -> None:
        self._truth, self._vocab, self._ends, self._kinds = truth, vocab, ends, kinds
        self._random = random.Random(seed)
        self.proposed = 0

    def propose(self, request: Request, most: int) -> Draft:
        draw, prompt = self._random, request.prompt
        said = tuple(request.tokens[len(prompt) : request.known])
        assert UNKNOWN not in said
        after = [
            list(output[len(said) :])
            for output in self._truth.get(prompt, ())
            if tuple(output[: len(said)]) == said
        ]
        true = draw.choice(after) if after else []
        garbage = [draw.randrange(self._vocab) for _ in range(draw.randint(1, 9))]
        match draw.choice(self._kinds):
            case "t":
                tokens = true
            case "b":
                tokens = true[: draw.randint(0, 5)] + garbage
            case "e":
                tokens = true[: draw.randint(0, 3)] + list(self._ends) + garbage
            case "d":
                tokens = [request.tokens[request.known - 1]] * draw.randint(1, 9)
            case "g":
                tokens = garbage
            case _:
                tokens = []
        tokens = tokens[:most]
        self.proposed += len(tokens)
        return Draft(tuple(tokens), (1.0,) * len(tokens), 32)


class TreeAdversary(Adversary):
    """Drafts trees by turns: the truth deep in a side branch, equal siblings, end tokens and garbage; also
    lines, and nothing.
    """

    def __init__(self, truth: Truth, vocab: int, ends: Sequence[int] = (), seed: int = 0) -> None:
        super().__init__(truth, vocab, ends, kinds="tbbedgn", seed=seed)

    def propose(self, request: Request, most: int) -> Draft:
        draw = self._random
        lines = [super(TreeAdversary, self).propose(request, most).tokens for _ in range(draw.randint(1, 4))]
        tokens, parents = list[int](), list[int]()
        for line in lines:
            # From anywhere along what is there, so that lines part late, and equal siblings come about.
            parent = 0
            for token in line:
                alike = [
                    node for node, (one, above) in enumerate(zip(tokens, parents, strict=True), 1)
                    if above == parent and one == token
                ]  # fmt: skip
                if alike and draw.random() < 0.8:
                    parent = alike[0]
                    continue
                if len(tokens) == most:
                    break
                tokens.append(token)
                parents.append(parent)
                parent = len(tokens)
                if draw.random() < 0.3 and len(tokens) < most:
                    tokens.append(draw.choice([token, draw.randrange(self._vocab), *self._ends]))
                    parents.append(draw.choice([parent, parents[-1], draw.randint(0, len(parents))]))
        if parents == list(range(len(parents))):
            return Draft(tuple(tokens), (1.0,) * len(tokens), 32)
        scores = tuple(draw.random() for _ in tokens)
        return Draft(tuple(tokens), scores, 32, parents=tuple(parents))
