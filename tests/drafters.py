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
