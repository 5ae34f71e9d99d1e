"""Holds the limits that a scheduler keeps, and the rule by which prefixes are named."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.base.errors import LengthError, RequestError
from penstock.kv.ledger.keys import root_key


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The most that a step and a request may have. Lengths are in tokens, pages and blocks in blocks."""

    block_size: int
    """Tokens of a block."""
    max_step_tokens: int
    max_sequences: int
    max_length: int
    """Tokens of a request, prompt and output together."""
    long_from: int | None = None
    """Tokens, prompt and output together, from which a request is long. With None, a request is long if the
    device cannot hold its KV. Without host blocks no request is long."""
    recent: int = 2
    """Newest full blocks of a long request that are on the device alone."""
    near: int | None = None
    """Most blocks of a long request that are both on the host and on the device. With None, there are as many
    as there are pages to spare."""


def admit(
    prompt: int, max_tokens: int | None, longest: int, why: Callable[[int], str], *, or_more: bool = False
) -> int:
    """Return the most tokens of output that a request may have: the rule of admission.

    prompt: tokens of the prompt.
    max_tokens: tokens of output that are asked for; None is as many as there is room for.
    longest: most tokens of a request, prompt and output together.
    why: gets the tokens that are asked for, and returns how much room there is and what to try.
    or_more: whether the prompt may have more tokens than were counted.

    Raises RequestError for an empty prompt, and LengthError for a request that could never be served.
    """
    room = longest - prompt
    if not prompt:
        raise RequestError("the prompt is empty; give at least one token")
    if room < 1 or (max_tokens is not None and max_tokens > room):
        output = f" and {max_tokens} of output" if max_tokens else ""
        tokens = "token" if prompt == 1 else "tokens"
        asked = f"{'at least ' if or_more else ''}{prompt} {tokens} of prompt{output}"
        raise LengthError(f"the request has {asked}, but {why(prompt + (max_tokens or 1))}")
    return room


class Name(NamedTuple):
    """The key of a block, and the key of the block that it continues."""

    key: bytes
    parent: bytes | None


@dataclass(frozen=True, slots=True)
class Names:
    """Holds the names of several blocks, column by column."""

    keys: Sequence[bytes]
    parents: Sequence[bytes | None]

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[tuple[bytes, bytes | None]]:
        return zip(self.keys, self.parents, strict=True)

    def part(self, start: int = 0, stop: int | None = None) -> "Names":
        """Return the names [start, stop)."""
        return Names(self.keys[start:stop], self.parents[start:stop])


@dataclass(frozen=True, slots=True)
class PrefixRule:
    """A PrefixRule names prefixes so that equal names mean equal KV.

    With dynamic RoPE the KV of a prompt longer than `length_matters_from` depends on the prompt's length,
    which then enters the root.

    share: whether requests share blocks at all.
    """

    root: bytes
    share: bool = True
    length_matters_from: int | None = None

    def root_of(self, prompt_length: int, salt: bytes = b"", adapter: bytes = b"") -> bytes:
        """Return the root of a prompt's chain of keys. Requests with different `salt` never share a block,
        nor do those with different adapters.

        adapter: digest of the LoRA adapter that the prompt is computed with; empty for none.
        """
        root = root_key(self.root, "adapter", adapter) if adapter else self.root
        root = root_key(root, "salt", salt) if salt else root
        if self.length_matters_from is None or prompt_length <= self.length_matters_from:
            return root
        return root_key(root, prompt_length)
