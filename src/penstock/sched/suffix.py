"""Finds drafts by suffix look-up: what followed the last time that the newest tokens occurred.

It needs no model and no memory beside the tokens. It pays where an output repeats what it or its prompt has
said: code that is edited, quotations, JSON. Known as prompt look-up and as n-gram speculation, and as suffix
decoding (Oliaro et al. 2024, arXiv 2411.04975) where, as here, the longest match decides.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from penstock.step.tree import depths

MOST_MATCHED = 32
"""Tokens of a match beyond which a longer one says nothing more."""

LONGER = 4
"""Times as long as its match that a draft may be: what follows a short match hardly holds for long."""
FOLLOWED = 32
"""Places with the longest match that are followed."""
LEAST = 0.05
"""Part of these that have to agree on all of a draft."""
LEAST_ELSEWHERE = 2
"""Tokens of the shortest match in outputs of other requests."""
_TOGETHER = 256
"""Places whose matches are compared at once; of more, token by token until fewer are left."""

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Draft:
    """A draft holds tokens that may come next.

    scores: for each token, the share of the places that agree on it, of those that agree on all before it.
    matched: how many of the newest tokens occurred there, at most MOST_MATCHED.
    by_model: whether a draft model drew them. Then all scores are 1, and nothing was matched.
    tried: how many of them are thought to pay, where more are verified to see whether they hold; else 0.
    instead_of: the draft by look-up in whose place it is.
    elsewhere: whether it was found in outputs of other requests.
    parents: of a tree, for each token the number of the one that it follows, from 1 on, or 0 where that is
        the newest token; a token comes behind its parent. None for a line.
        The scores are then how likely each is its parent's next.
    """

    tokens: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()
    matched: int = 0
    by_model: bool = False
    tried: int = 0
    instead_of: "Draft | None" = None
    elsewhere: bool = False
    parents: tuple[int, ...] = ()

    def first(self, count: int) -> "Draft":
        """Return its first `count` tokens as a draft."""
        if not count:
            return NO_DRAFT
        return replace(
            self, tokens=self.tokens[:count], scores=self.scores[:count], parents=self.parents[:count]
        )

    @property
    def deep(self) -> int:
        """Return how many tokens of it hold at most."""
        return max(depths(self.parents)) if self.parents else len(self.tokens)

    def nodes(self, tokens: Sequence[int]) -> list[int]:
        """Return which of a tree's tokens hold where these come next, behind 0 for the newest one."""
        found = [0]
        for node, (parent, token) in enumerate(zip(self.parents, self.tokens, strict=True), 1):
            if parent == found[-1] and [token] == list(tokens[len(found) - 1 : len(found)]):
                found.append(node)
        return found

    def heavy_first(self) -> "Draft":
        """Return the same tree with its first line in front: of each token's children the first, and so on.

        If that holds, its KV is where it is to be.
        """
        if not self.parents:
            return self
        first = dict[int, int]()
        for node, parent in enumerate(self.parents, 1):
            first.setdefault(parent, node)
        line = [0]
        while node := first.get(line[-1], 0):
            line.append(node)
        order = [*line, *sorted(set(range(1, len(self.tokens) + 1)) - set(line))]
        place = {node: at for at, node in enumerate(order)}
        return replace(
            self,
            tokens=tuple([self.tokens[node - 1] for node in order[1:]]),
            scores=tuple([self.scores[node - 1] for node in order[1:]]),
            parents=tuple([place[self.parents[node - 1]] for node in order[1:]]),
        )

    def behind(self, count: int) -> "Draft":
        """Return what is left of it when its first `count` tokens have held, if it is a line."""
        if self.parents and count:
            return NO_DRAFT
        return replace(
            self, tokens=self.tokens[count:], scores=self.scores[count:], matched=self.matched + count
        )


NO_DRAFT = Draft()


class TokenHistory:
    """Holds the tokens of a request in an array, so that all of its places are compared at once."""

    def __init__(self) -> None:
        self._room: Ints = np.empty(256, dtype=np.int32)
        self._length = 0

    @property
    def tokens(self) -> Ints:
        """Return the tokens, int32 `[length]`. They are valid until the next call of `follow`."""
        return self._room[: self._length]

    def follow(self, tokens: Sequence[int], length: int) -> None:
        """Take in the first `length` of a request's tokens. Those that it has must be the first of them."""
        if length > len(self._room):
            room = np.empty(2 * length, dtype=np.int32)
            room[: self._length] = self.tokens
            self._room = room
        if length > self._length:
            self._room[self._length : length] = tokens[self._length : length]
        self._length = length


def look_up(history: Ints, most: int) -> Draft:
    """Return a draft of at most `most` tokens behind a history, and at most LONGER times its match.

    Of the latest places with the longest match, at most FOLLOWED, those go on that agree with the token that
    most of them have. The latest place decides between equals. The draft ends where hardly one of the places
    goes on. A match may reach into the draft itself, so a repetition goes on.
    """
    count = len(history)
    if count < 2 or most < 1:
        return NO_DRAFT
    places, matched = _longest(history[:-1], history)
    if not matched:
        return NO_DRAFT
    most = min(most, LONGER * matched)
    going = [(place + 1, history[place + 1 : place + 1 + most].tolist()) for place in places[-FOLLOWED:]]
    tokens, scores, all_of_them = list[int](), list[float](), len(going)
    for step in range(most):
        if len(going) == 1:  # Nothing is left to be counted.
            [(place, known)] = going
            for at in range(step, most):
                tokens.append(known[at] if at < len(known) else tokens[place + at - count])
            scores += [1.0] * (most - step)
            break
        found = [known[step] if step < len(known) else tokens[place + step - count] for place, known in going]
        votes = dict[int, int]()
        for token in reversed(found):
            votes[token] = votes.get(token, 0) + 1
        token = max(votes, key=votes.__getitem__)  # Of equals the first, which is of the latest place.
        if votes[token] < LEAST * all_of_them:
            break
        tokens.append(token)
        scores.append(votes[token] / len(found))
        if votes[token] < len(found):
            going = [one for one, other in zip(going, found, strict=True) if other == token]
    return Draft(tuple(tokens), tuple(scores), matched)


def look_up_among(outputs: Ints, newest: Ints, most: int) -> Draft:
    """Return a draft of what followed the newest tokens in other outputs; see `look_up`. A match has
    LEAST_ELSEWHERE tokens at least: in so many tokens each occurs somewhere.

    outputs: one behind the other, with -1 behind each, which no token is. newest: the tokens of a request.
    """
    if len(newest) < LEAST_ELSEWHERE or len(outputs) < 2 or most < 1:
        return NO_DRAFT
    places, matched = _longest(outputs[:-1], newest, LEAST_ELSEWHERE)
    most = min(most, LONGER * matched)
    going = [outputs[place + 1 : place + 1 + most].tolist() for place in places[-FOLLOWED:]]
    tokens, scores, all_of_them = list[int](), list[float](), len(going)
    for step in range(most):
        going = [known for known in going if step < len(known) and known[step] >= 0]
        votes = Counter(known[step] for known in reversed(going))
        token, count = votes.most_common(1)[0] if votes else (0, 0)  # Of equals the first.
        if not count or count < LEAST * all_of_them:
            break
        tokens.append(token)
        scores.append(count / len(going))
        going = [known for known in going if known[step] == token]
    return Draft(tuple(tokens), tuple(scores), matched, elsewhere=True) if tokens else NO_DRAFT


def _longest(text: Ints, newest: Ints, least: int = 1) -> tuple[list[int], int]:
    """Return the places of a text with the longest match of the newest tokens, in order, and its length, from
    `least` to MOST_MATCHED; none with 0 if there is no such match."""
    last = len(newest) - 1
    alike = text == newest[last]
    for back in range(1, least):
        alike[back:] &= text[:-back] == newest[last - back]
        alike[:back] = False
    places = np.flatnonzero(alike)
    matched = least if len(places) else 0
    while len(places) > _TOGETHER and matched < min(MOST_MATCHED, last + 1):
        longer = places[places >= matched]
        longer = longer[text[longer - matched] == newest[last - matched]]
        if not len(longer):
            return places.tolist(), matched
        places, matched = longer, matched + 1
    if not matched:
        return [], 0
    steps = np.arange(min(MOST_MATCHED, last + 1))
    before = places[:, None] - steps
    same = (text[np.maximum(before, 0)] == newest[last - steps]) & (before >= 0)
    lengths = np.logical_and.accumulate(same, axis=1).sum(axis=1)
    matched = int(lengths.max())
    return places[lengths == matched].tolist(), matched
