"""Finds drafts by suffix look-up: what followed the last time that the newest tokens occurred.

It needs no model and no memory beside the tokens. It pays where an output repeats what it or its prompt has
said: code that is edited, quotations, JSON. Known as prompt look-up and as n-gram speculation, and as suffix
decoding (Oliaro et al. 2024, arXiv 2411.04975) where, as here, the longest match decides.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MOST_MATCHED = 32
"""Tokens of a match beyond which a longer one says nothing more."""

Ints = NDArray[np.int32]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Draft:
    """A draft holds tokens that may come next.

    scores: for each token, the share of the places that agree on it, of those that agree on all before it.
    matched: how many of the newest tokens occurred there, at most MOST_MATCHED.
    by_model: whether a draft model drew them. Then all scores are 1, and nothing was matched.
    tried: how many of them are thought to pay, where more are verified to see whether they hold; else 0.
    """

    tokens: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()
    matched: int = 0
    by_model: bool = False
    tried: int = 0

    def first(self, count: int) -> "Draft":
        """Return its first `count` tokens as a draft."""
        if not count:
            return NO_DRAFT
        return Draft(self.tokens[:count], self.scores[:count], self.matched, self.by_model, self.tried)


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
    """Return a draft of at most `most` tokens behind a history.

    Of all places with the longest match, those go on that agree with the token that most of them have. The
    latest place decides between equals. A match may reach into the draft itself, so a repetition goes on.
    """
    count = len(history)
    if count < 2 or most < 1:
        return NO_DRAFT
    places = np.flatnonzero(history[:-1] == history[-1])
    matched = 1
    while len(places) and matched < MOST_MATCHED:
        longer = places[places >= matched]
        longer = longer[history[longer - matched] == history[count - 1 - matched]]
        if not len(longer):
            break
        places, matched = longer, matched + 1
    if not len(places):
        return NO_DRAFT
    tokens, scores = list[int](), list[float]()
    places = places + 1
    while len(tokens) < most:
        if len(places) == 1:  # Nothing is left to be counted.
            place = int(places[0])
            known = history[place : place + most - len(tokens)].tolist()
            for step in range(most - len(tokens)):
                tokens.append(known[step] if step < len(known) else tokens[place + step - count])
            scores += [1.0] * (most - len(scores))
            break
        inside = places < count
        found = np.where(inside, history[np.minimum(places, count - 1)], -1)
        for at in np.flatnonzero(~inside).tolist():
            found[at] = tokens[int(places[at]) - count]
        _, first, counts = np.unique(found[::-1], return_index=True, return_counts=True)
        likeliest = np.lexsort((first, -counts))[0]
        token = int(found[::-1][first[likeliest]])
        tokens.append(token)
        scores.append(float(counts[likeliest]) / len(found))
        places = places[found == token] + 1
    return Draft(tuple(tokens), tuple(scores), matched)
