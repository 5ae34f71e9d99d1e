"""How far a request goes next, and what room it needs for that. Arithmetic only: it decides nothing and
changes nothing."""

from penstock.sched.rules import Limits
from penstock.step.request import Request


class Needs:
    """Of requests under these limits. `count` is of positions that are computed next."""

    def __init__(self, limits: Limits) -> None:
        self._size, self._recent = limits.block_size, limits.recent
        self.long_pages = limits.recent + 2
        """Device blocks that a long request needs: the recent ones, one on its way to the host, one that is
        being filled."""

    def goal(self, request: Request) -> int:
        """How many positions a request computes before it has to wait: for its next token, or for blocks that
        are on their way."""
        return request.meets * self._size or request.length

    def newest_only(self, request: Request) -> bool:
        """Whether a request lacks its newest token alone, and goes on after that."""
        return request.length - request.computed == 1 and not request.ending

    def chunk(self, request: Request, budget: int) -> int:
        """How many tokens a request computes if it has `budget`; of a long one whole blocks, at least two
        tokens, or all it lacks.

        Who has been admitted always has one: those admitted with it computed a token each beside its first
        chunk, as they do from then on.
        """
        lacking = self.goal(request) - request.computed
        if not request.long or lacking <= budget:
            return min(lacking, budget)
        count = budget - budget % self._size
        return count if count > 1 else 0

    def is_chunk(self, request: Request) -> bool:
        """Whether what a request computes next goes to the host, as far as it fills blocks; else to its
        tail."""
        return request.long and request.length - request.computed > 1

    def pages(self, request: Request, count: int) -> int:
        """Device blocks that must be allocated first."""
        return (
            -(-(request.computed + count) // self._size)
            - self.first_page(request, count)
            - len(request.blocks)
        )

    def first_page(self, request: Request, count: int) -> int:
        """Index of the first block that is in a page when they are computed: those it has stay."""
        if request.blocks or not request.long:
            return request.paged
        have = len(request.host_blocks)
        if not self.is_chunk(request):
            return have
        return min(self.host_after(request, count), max(have, request.length // self._size - request.near))

    def host_after(self, request: Request, count: int) -> int:
        """Host blocks that a request has when they are computed."""
        if not request.long:
            return 0
        if self.is_chunk(request):
            return (request.computed + count) // self._size
        return max(len(request.host_blocks), request.computed // self._size - self._recent)

    def host(self, request: Request, count: int) -> int:
        """Host blocks that must be allocated first."""
        return self.host_after(request, count) - len(request.host_blocks)

    def near(self, request: Request) -> int:
        """How many of a request's pages are near."""
        return len(request.host_blocks) - request.paged if request.blocks and request.long else 0

    def tail(self, request: Request, coming: int = 0) -> int:
        """Device blocks that who runs may come to need beside those it has and those that are coming: one, or
        what its prompt still lacks; a long one its tail."""
        if not request.long:
            return max(1, self.pages(request, request.length - request.computed) - coming)
        most = -(-(request.prompt_length + request.max_tokens - 1) // self._size)
        return max(1, min(self.long_pages, most) - len(request.blocks) + self.near(request))
