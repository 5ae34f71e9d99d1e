"""Decides how long a request may be, and which requests are long."""

from penstock.sched.rules import SchedulerLimits, admit


class RequestRoom:
    """Holds the room for one request, in tokens. It never changes."""

    def __init__(self, limits: SchedulerLimits, pages: int, host_blocks: int, long_pages: int) -> None:
        """Compute the room from the blocks that there are.

        pages: blocks on the device.
        host_blocks: blocks on the host and behind it on disk.
        long_pages: pages that a long request needs.
        """
        self._limits, self._pages, self._host, self._long_pages = limits, pages, host_blocks, long_pages
        # The last token of an output is never an input, so it needs no place in a block.
        longest_short = pages * limits.block_size + 1
        # What the host holds and a block of tail: after a preemption all full blocks are computed into host
        # blocks.
        most = (host_blocks + 1) * limits.block_size if host_blocks else 0
        self._longest_long = most if pages >= long_pages else min(most, longest_short)
        self.longest = min(limits.max_length, max(longest_short, self._longest_long))
        """Most tokens of a request: the context's end or, if that is less, what KV on the device holds, or on
        the host."""
        never = longest_short + 1
        self.long_from = never if limits.long_from is None else min(never, limits.long_from)
        """Tokens from which a request may be long."""

    def admissible(self, prompt: int, max_tokens: int | None, *, or_more: bool = False) -> int:
        """Return the most tokens of output that a prompt of so many tokens may have. Any thread may call it.

        or_more: whether the prompt may have more tokens than were counted.

        Raises RequestError if the request could never be served.
        """
        return admit(prompt, max_tokens, self.longest, self._why_too_long, or_more=or_more)

    def is_long(self, reach: int, most: int) -> bool:
        """Tell whether a request of `reach` tokens, which may come to have `most`, is long.

        It is not if it would not fit as a long one.
        """
        return min(reach, most) >= self.long_from and most <= self._longest_long

    def _why_too_long(self, total: int) -> str:
        limits, size = self._limits, self._limits.block_size
        if self.longest == limits.max_length or not self._host:
            context = self.longest == limits.max_length
            what, more = (
                ("the context holds", "a larger max_length")
                if context
                else ("the KV blocks hold", "more device_memory, or KV in host memory (host_kv_memory)")
            )
            return f"{what} {self.longest} in all; shorten it, or allow {more}"
        needed = []
        if total > (self._host + 1) * size:
            needed.append(
                f"host memory or disk for {(total - 1) // size * size} tokens of KV ({self._host * size} now)"
            )
        if self._pages < self._long_pages:
            needed.append(f"{self._long_pages} KV blocks on the device ({self._pages} now)")
        if total > limits.max_length:
            needed.append(f"a max_length of {total} ({limits.max_length} now)")
        return f"KV has room for {self.longest} in all; shorten it, or allow {' and '.join(needed)}"
