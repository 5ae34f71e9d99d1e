"""Follows outputs through compiled structures (guided decoding), token by token; by llguidance."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.api.grammars import said
from penstock.base.errors import StructureError

if TYPE_CHECKING:
    from llguidance import LLMatcher

_LOG = logging.getLogger("penstock")


class Copies(Protocol):
    """Copies make a matcher for one more output, and return its original, too.

    since: the last original, if it is full.
    """

    def __call__(self, since: "LLMatcher | None" = None) -> "tuple[LLMatcher, LLMatcher]":
        """Return both."""
        ...


class Matcher:
    """Follows one output through its structure. Where that cannot be followed any further, the output may
    only end, and is broken."""

    def __init__(self, ends: frozenset[int]) -> None:
        self.inner: LLMatcher | None = None
        """None when it may only end."""
        self.broken = False
        self._ends = ends
        self._taken: list[int] = []
        self._drafted = False
        """Whether some of it is a draft."""

    def follow(self, copies: Copies) -> None:
        """Begin. copies: returns a matcher for one more output."""
        self._copies = copies
        self.inner, self._first = copies()

    def ahead(self, draft: Sequence[int], parents: Sequence[int] = ()) -> "dict[int, Matcher]":
        """Return matchers that have followed this one's output, and the tokens of a draft up to one of them
        each, by its number from 1 on, as far as the structure allows these. parents: as of `step.tree`."""
        if self.inner is None:
            return {}
        if parents:
            return self._along(draft, parents)
        allowed = self.inner.deep_copy().validate_tokens(list(draft))
        matchers, last = dict[int, Matcher](), self
        for number, token in enumerate(draft[: max(allowed, 0)], 1):
            last = last._copy()
            last.take(token)
            matchers[number] = last
        return matchers

    def _along(self, draft: Sequence[int], parents: Sequence[int]) -> "dict[int, Matcher]":
        found = {0: self}
        for number, (token, parent) in enumerate(zip(draft, parents, strict=True), 1):
            before = found.get(parent)
            if before is None or before.inner is None:
                continue
            if before.inner.deep_copy().validate_tokens([token]) == 1:
                found[number] = before._copy()
                found[number].take(token)
        del found[0]
        return found

    def _copy(self) -> "Matcher":
        other = Matcher(self._ends)
        other.inner, other.broken, other._taken = self.inner, self.broken, [*self._taken]
        if self.inner is not None:
            other.inner, other._copies, other._first = self.inner.deep_copy(), self._copies, self._first
        other._drafted = True
        return other

    def break_off(self, why: str) -> None:
        """Let the output only end from here on."""
        self.inner, self.broken = None, True
        if self._drafted:  # Perhaps this never comes.
            return
        _LOG.warning(
            "an output ends early, after %d tokens: llguidance cannot follow its schema or grammar any "
            "further (%s); simplify it if this comes again",
            len(self._taken),
            why,
        )

    def take(self, token: int) -> None:
        """Follow one token. An end token is the end, wherever the structure is: the request's own may come
        before its end."""
        if self.inner is None:
            return
        if token in self._ends:
            self.inner = None
            return
        self._taken.append(token)
        if not self.inner.consume_token(token):
            self._renew()

    def finish(self, mask: NDArray[np.int32], end: int) -> None:
        """Complete a mask that the library has filled: what it calls the end are the end tokens."""
        if self.inner is not None and self.inner.is_error():
            self._renew()
            if self.inner is not None:
                fill_mask(self.inner, mask)
                if self.inner.is_error():
                    self.break_off(said(self.inner.get_error()))
        words = mask.view(np.uint32)
        if self.inner is None or words[end // 32] >> end % 32 & 1:
            for token in self._ends:
                words[token // 32] |= np.uint32(1 << token % 32)

    def _renew(self) -> None:
        """Say the same in a structure that is as good as new: the old one's room may be full, of what others
        have said in theirs."""
        assert self.inner is not None
        why = said(self.inner.get_error())
        try:
            self.inner, self._first = self._copies(self._first)
        except StructureError as error:
            self.break_off(str(error))
            return
        if not self.inner.consume_tokens(self._taken):
            self.break_off(why)


def fill_mask(matcher: "LLMatcher", mask: NDArray[np.int32]) -> None:
    """Fill one row of bits with the tokens that may be next."""
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
