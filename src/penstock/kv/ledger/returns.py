"""Returns: counts of how cached KV blocks come to be used again, by kind and age. What keeping one gains
follows from them.
"""

from itertools import pairwise

_MANY = 8
"""Uses from which on more do not matter."""
_KINDS = 2 * _MANY
KNOWN = _KINDS
"""Added to the kind of a block that was seen before, longer ago than is remembered in detail. It is learned
of as of a new one."""
CODES = 2 * _KINDS
AFTER = tuple(min(kind % _KINDS + 2, _KINDS - 2 + kind % 2) for kind in range(_KINDS + 2))
"""The kind of a block after one more use, by its kind before."""
_AGES = (0, 1, 2, 3, *(width << power for power in range(1, 11) for width in (2, 3)), 4096)
"""Ages in epochs at which spans of age begin. Each is half as long again as it is old; the last has no
end."""
_SPANS = len(_AGES)
_WIDTHS = (0.5, *(stop - start for start, stop in pairwise(_AGES[1:])), _AGES[-1])
_SPAN = tuple(span for span in range(_SPANS - 1) for _ in range(_AGES[span + 1] - _AGES[span]))
"""The span of an age, for ages before the last span."""
_LEARN = 32
"""Epochs from one estimate to the next."""
_FADE = 8192
"""Epochs after which all that was counted counts half."""
_DOUBT = 256.0
"""Blocks that must have come to an age before they outweigh what is assumed of it."""
_ASSUMED = 0.1
"""Chance of a return within one span where nothing has been seen: the longer unused, the lower the rate, as
LRU has it."""


class Returns:
    """Returns counts how blocks of each kind return by their age, that is epochs since their last use.

    Of each kind and span of age are counted the blocks that came to it unused and those of them that were
    used in it; their ratio is the chance of a return within the span (the product-limit estimate of survival:
    Kaplan and Meier, 1958). A block that is still in a span counts by the part of it that has passed (as a
    withdrawal does in an actuary's life table). Blocks that were evicted are counted like others for as long
    as they are remembered, so what is learned does not depend on what was evicted. The fewer blocks came to
    an age, the more is assumed that the kind behaves there as all kinds together do, in proportion to the
    span before.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self._unused: dict[int, list[int]] = {0: [0] * _KINDS}
        """The number of blocks last used in an epoch, by epoch and kind."""
        self._came = [[0.0] * _SPANS for _ in range(_KINDS)]
        self._used = [[0.0] * _SPANS for _ in range(_KINDS)]
        self._inside = [[0] * _SPANS for _ in range(_KINDS)]
        """The number of blocks with an age in a span now, by kind and span."""
        self._entered = [[0] * _SPANS for _ in range(_KINDS)]
        """The sum of the epochs in which they came to it."""
        self._estimate()

    def use(self, kind: int, blocks: int = 1) -> None:
        """Note that so many blocks are of this kind by a use just now."""
        kind %= _KINDS
        self._unused[self.epoch][kind] += blocks
        self._came[kind][0] += blocks
        self._inside[kind][0] += blocks
        self._entered[kind][0] += blocks * self.epoch

    def again(self, kind: int, since: int, blocks: int = 1) -> None:
        """Note that so many blocks that were of this kind by their use in epoch `since` are used again."""
        self._used[kind % _KINDS][self._span(since)] += blocks
        self.forget(kind, since, blocks)

    def forget(self, kind: int, since: int, blocks: int = 1) -> None:
        """Note that so many blocks of this kind will be seen no more."""
        if since in self._unused:
            self._unused[since][kind % _KINDS] -= blocks
            self._out(kind % _KINDS, self._span(since), since, blocks)

    def _out(self, kind: int, span: int, since: int, blocks: int) -> None:
        self._inside[kind][span] -= blocks
        self._entered[kind][span] -= blocks * (since + _AGES[span])

    def tick(self) -> None:
        """Begin the next epoch. O(1)."""
        self.epoch += 1
        self._unused[self.epoch] = [0] * _KINDS
        for span, age in enumerate(_AGES[1:], 1):
            for kind, blocks in enumerate(self._unused.get(self.epoch - age, ())):
                if blocks:
                    self._came[kind][span] += blocks
                    self._inside[kind][span] += blocks
                    self._entered[kind][span] += blocks * self.epoch
                    self._out(kind, span - 1, self.epoch - age, blocks)
        self._unused.pop(self.epoch - _AGES[-1], None)
        if self.epoch % _FADE == 0:
            for counts in (*self._came, *self._used):
                counts[:] = [count / 2 for count in counts]
        if self.epoch % _LEARN == 0:
            self._estimate()

    def gain(self, kind: int, since: int) -> float:
        """Return the Gittins index of such a block: its returns for each epoch of staying, if it stays for as
        long as that is worth most.
        """
        return self._gains[kind % _KINDS][self._span(since)]

    def chance(self, kind: int, since: int) -> float:
        """Return the chance that such a block returns, counted over ages that are well known; 1 for
        others."""
        return self._chances[kind % _KINDS][self._span(since)]

    def _span(self, since: int) -> int:
        age = self.epoch - since
        return _SPAN[age] if age < _AGES[-1] else _SPANS - 1

    def _seen(self, kind: int) -> list[float]:
        """Return the blocks that came to each span, less what is still ahead of those that are in it now.

        If these were counted whole, ages that only few have passed would look as if nothing returned at them,
        and what is large would be learned last.
        """
        seen = list(self._came[kind])
        for span, (inside, entered, used) in enumerate(
            zip(self._inside[kind], self._entered[kind], self._used[kind], strict=True)
        ):
            if inside and 0 < span < _SPANS - 1:
                ahead = inside - (inside * self.epoch - entered) / _WIDTHS[span]
                seen[span] = max(used, seen[span] - ahead)
        return seen

    def _estimate(self) -> None:
        seen = [self._seen(kind) for kind in range(_KINDS)]
        usual, chance = [], _ASSUMED
        for span in range(_SPANS):
            used, came = sum(counts[span] for counts in self._used), sum(counts[span] for counts in seen)
            chance = (used + _DOUBT * chance) / (came + _DOUBT)
            usual.append(chance)
        self._gains: list[list[float]] = []
        self._chances: list[list[float]] = []
        for used_in, came_to in zip(self._used, seen, strict=True):
            chances, factor = [], 1.0
            for used, came, common in zip(used_in, came_to, usual, strict=True):
                chances.append(min(1.0, (used + _DOUBT * min(1.0, factor * common)) / (came + _DOUBT)))
                factor = chances[-1] / common
            self._gains.append([_most(chances, span) for span in range(_SPANS)])
            left, later = 1.0, []
            for chance, came in zip(reversed(chances), reversed(came_to), strict=True):
                if came >= _DOUBT:
                    left *= 1 - chance
                later.append(1 - left if came >= _DOUBT else 1.0)
            self._chances.append(later[::-1])


def _most(chances: list[float], span: int) -> float:
    """Return the most returns for an epoch of staying from this span on, over all times to stop at."""
    there, returns, stayed, most = 1.0, 0.0, 0.0, 0.0
    for chance, width in zip(chances[span:], _WIDTHS[span:], strict=True):
        returns += there * chance
        stayed += there * (1 - chance / 2) * width
        there *= 1 - chance
        most = max(most, returns / stayed)
    return most
