"""Keeps outputs of requests that have finished, for drafts of others: see `suffix.look_up_among`.

Outputs of one scope are never seen from another. A scope is what separates prefixes, too: the salt, which
differs by API key where a server separates keys, and the digest of a LoRA adapter. Tokens are looked at on
the host alone, and a draft changes no token; but how fast an answer comes would tell what others were told.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np

from penstock.sched.suffix import MOST_MATCHED, Ints

Scope = tuple[bytes, bytes]
"""A salt, and the digest of an adapter."""
MOST_TOKENS = 1 << 16
"""Tokens of all outputs together: to look through as many takes about a tenth of a millisecond."""
_NONE: Ints = np.empty(0, dtype=np.int32)


class FinishedOutputs:
    """Holds the newest outputs, of all scopes together at most so many, and MOST_TOKENS tokens of them."""

    def __init__(self, most: int) -> None:
        """Begin with none. most: how many are kept."""
        self._most = most
        self._order = deque[Scope]()
        """The scopes of all that are kept, the oldest first."""
        self._kept = dict[Scope, deque[Ints]]()
        self._tokens = 0
        self._joined = dict[Scope, Ints]()
        """Outputs of scopes that were asked for since one of theirs came or went, one behind the other."""

    def add(self, scope: Scope, tokens: Sequence[int], prompt: int) -> None:
        """Keep an output, behind so many of its prompt's last tokens as a match may have. The oldest outputs
        go where there are too many. prompt: how many of the tokens are the prompt's."""
        if prompt >= len(tokens):
            return
        fresh = tokens[max(prompt - MOST_MATCHED, 0) :][:MOST_TOKENS]
        self._kept.setdefault(scope, deque()).append(np.array([*fresh, -1], dtype=np.int32))
        self._order.append(scope)
        self._tokens += len(fresh) + 1
        self._joined.pop(scope, None)
        while len(self._order) > self._most or (self._tokens > MOST_TOKENS and len(self._order) > 1):
            gone = self._order.popleft()
            self._tokens -= len(self._kept[gone].popleft())
            self._joined.pop(gone, None)
            if not self._kept[gone]:
                del self._kept[gone]

    def of(self, scope: Scope) -> Ints:
        """Return the outputs of a scope, the newest last, with -1 behind each; int32."""
        if (kept := self._kept.get(scope)) is None:
            return _NONE
        if scope not in self._joined:
            self._joined[scope] = np.concatenate(list(kept))
        return self._joined[scope]

    def forget(self) -> None:
        """Forget all of them."""
        for held in (self._order, self._kept, self._joined):
            held.clear()
        self._tokens = 0
