"""Holds plans and outcomes, the only values that scheduler and workers exchange."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NewType, Protocol

from penstock.step.params import Sampling
from penstock.step.record import record
from penstock.step.tree import depths, walk

RequestId = NewType("RequestId", int)
BlockId = NewType("BlockId", int)
"""Index of a KV block in the pool of the device tier."""
HostBlockId = NewType("HostBlockId", int)
"""Index of a KV block in the pool of the host tier, where the KV of long requests rests."""
Row = NewType("Row", int)
"""Index of a running request in the runner's tables (a batch slot).

The scheduler gives it to a request, and takes it back when the request leaves.
"""
TransferId = NewType("TransferId", int)
UNKNOWN = -1
"""Instead of a row's newest token in a plan that is made before the step which yields it is over: the worker
has it. It is the newest that the plan's own model has drawn."""


@dataclass(frozen=True, slots=True)
class Admission:
    """An admission gives a request a row. `output` is not empty if it comes back after a preemption.

    adapter: slot of the LoRA adapter that the row is computed with; 0 for none.
    """

    row: Row
    sampling: Sampling
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    adapter: int = 0


@dataclass(frozen=True, slots=True)
class Order:
    """An order copies a page of the device to a host block before the step computes.

    The page may be written again in the step after.
    """

    source: BlockId
    target: HostBlockId


class Route(Enum):
    """A route says between which two tiers blocks move."""

    UP = "host to device"
    DOWN = "device to host"
    IN = "disk to host"
    OUT = "host to disk"


@dataclass(frozen=True, slots=True)
class Transfer:
    """A transfer copies blocks to another tier while steps go on.

    It begins in the step of its plan, and is reported when it has landed. Earlier steps wrote the blocks that
    it reads. Until it has landed no step writes those, or touches the blocks that it writes.

    pages: blocks of the device; none for IN and OUT.
    blocks: blocks of the host, as many as there are pages or keys.
    keys: names on disk, for IN and OUT.
    """

    id: TransferId
    route: Route
    pages: tuple[BlockId, ...]
    blocks: tuple[HostBlockId, ...]
    keys: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Landed:
    """Landed is the report of a transfer that has ended.

    lost: indices of its blocks that did not arrive.
    gone: keys of those of them that the disk does not have. Others may be read another time.
    """

    id: TransferId
    seconds: float
    lost: tuple[int, ...] = ()
    gone: tuple[bytes, ...] = ()


MOST_DRAFTED = 32
"""Most tokens of a draft that is a line."""
MOST_NODES = 63
"""Most tokens of a draft that is a tree. With the newest token they are as many as a number has bits."""


class ShareKind(Enum):
    """A ShareKind says how a share's tokens attend, and how many tokens they yield."""

    DECODE = "decode"
    """One token, attended to as a row beside other rows. It yields at most one."""
    CHUNK = "chunk"
    """Two or more known tokens of a prompt, attended to as a run. They yield at most one, after the last."""
    VERIFY = "verify"
    """The newest token and a draft after it, attended to as a run.

    They yield the accepted tokens of the draft and one more: from one token up to as many as the share has.
    A token is drawn after each of them, as it would be without a draft. It is accepted if all tokens of the
    draft before it were drawn, too.

    A draft may be a tree, of which each token attends to those on its own line. It is accepted if these were
    drawn. After the step the KV of what was accepted is at the places behind the newest token's.
    """


@record(frozen=True, slots=True)
class Share:
    """A share is one request's part of a step: `tokens` at positions [start, start + len(tokens)).

    Of a tree these are the places of their KV alone. The position of a token is that of the newest one and
    how many tokens it is behind it.

    The row's block table is extended at index `first_new_block` by `new_blocks`. Then it covers every
    position from `near` up to the share's end. With `sample`, the last position yields a token.

    A long request's first positions rest in host blocks, with a table of their own. The step reads [0,
    cold_start) from there, and the rest from pages and, for a chunk, from its own K and V. The positions
    [start, cold_stop) are written to host blocks; there are none if `cold_stop` <= `start`, so in every share
    of one token. Those from `near` on are written to pages, also where they are written to host blocks. No
    host block is read before the step after the one that wrote it, except for the target of an order.

    next_prompt_tokens: prompt tokens that follow each position, where prompt log-probabilities were asked
        for.
    pooled: whether the hidden state of the last position is reported, too.
    cold_start: tokens of the row that are read from host blocks, after the step's orders: whole blocks, at
        most `start`.
    cold_stop: tokens of the row that rest in host blocks after the step: whole blocks.
    near: position of the first token with KV in the row's pages. It is `cold_start`, unless that is `start`
        and the following positions are not in pages.
    first_new_cold, new_cold: the table of host blocks is extended at this index by these. Then it covers [0,
        cold_stop).
    ahead: by how much the positions of what it draws lie behind the next one, in a step of a draft head.
    parents: of a draft that is a tree, the parent of each of its tokens: see `tree`. Where there are more
        than drafted tokens, the first nodes are those of earlier steps, whose KV is before `start`.
    """

    row: Row
    start: int
    tokens: tuple[int, ...]
    first_new_block: int
    new_blocks: tuple[BlockId, ...]
    sample: bool
    prompt_length: int
    kind: ShareKind = ShareKind.DECODE
    next_prompt_tokens: tuple[int, ...] = ()
    cold_start: int = 0
    cold_stop: int = 0
    near: int = 0
    first_new_cold: int = 0
    new_cold: tuple[HostBlockId, ...] = ()
    pooled: bool = False
    ahead: int = 0
    parents: tuple[int, ...] = ()

    @property
    def stop(self) -> int:
        """Return the place after that of its last token."""
        return self.start + len(self.tokens)

    @property
    def draft(self) -> tuple[int, ...]:
        """Return the tokens of the draft that is verified; none for most shares."""
        return self.tokens[1:] if self.kind is ShareKind.VERIFY else ()

    @property
    def draws(self) -> int:
        """Return how many tokens are drawn: one, and one behind each token of a draft."""
        return 1 + len(self.draft) if self.sample else 0

    @property
    def begin(self) -> int:
        """Return the place of a tree's first node, or of the first token where there is none."""
        return self.stop - 1 - len(self.parents) if self.parents else self.start

    @property
    def positions(self) -> Sequence[int]:
        """Return the position of each of its tokens."""
        if not self.parents:
            return range(self.start, self.stop)
        return [self.begin + depth for depth in depths(self.parents)[-len(self.tokens) :]]

    def accepted(self, drawn: Sequence[int]) -> list[int]:
        """Return which of its draws are accepted, in order. drawn: what was drawn behind each token."""
        return walk(drawn, self.draft, self.parents)


def accepted(tokens: Sequence[int], draft: Sequence[int]) -> int:
    """Return how many of the tokens that were drawn after each token of a draft are accepted: those before
    which the draft has held."""
    return len(walk(tokens, draft, ()))


class ModelRole(Enum):
    """The models that a runner may hold."""

    TARGET = "target"
    """The model that requests ask for."""
    DRAFT = "draft"
    """A smaller one with the same vocabulary, beside it. Its steps read and write the same blocks of the same
    rows, by the same numbers, in a pool of its own on the device, which its KV never leaves. So a block that
    has come from another tier, or that only the target has computed, holds nothing of it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan is one step of one model. Admissions come first; they are for all models. Among the shares,
    those of kind DECODE stand before all others, and those of kind VERIFY behind all others.

    What `forget` names is given up before the transfers begin. A plan without shares while transfers are
    under way waits for one of them.

    A block that any model's plan gives a row is in the row's table for all models. Only the target's plans
    have orders, transfers and host blocks.
    """

    admissions: tuple[Admission, ...]
    shares: tuple[Share, ...]
    orders: tuple[Order, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    forget: tuple[bytes, ...] = ()
    """Keys of blocks on disk."""
    model: ModelRole = ModelRole.TARGET
    """The one that computes the shares."""
    children: int = 0
    """Tokens that are told for each draw, of those that may come next, where a draft model grows trees; then
    none is drawn."""

    @property
    def runs(self) -> tuple[Share, ...]:
        """Return the shares that are not of kind DECODE: they attend as runs."""
        count, decode = len(self.shares), ShareKind.DECODE
        while count and self.shares[count - 1].kind is not decode:
            count -= 1
        return self.shares[count:]

    @property
    def chunks(self) -> tuple[Share, ...]:
        """Return the shares of kind CHUNK."""
        return tuple([run for run in self.runs if run.kind is ShareKind.CHUNK])

    @property
    def tokens(self) -> int:
        """Return the number of tokens that the step computes."""
        return len(self.shares) + sum(len(run.tokens) - 1 for run in self.runs)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A TokenLogprob holds a token's log-probability and its rank, 1 for the likeliest.

    top: the likeliest tokens at its position and their log-probabilities, best first.
    """

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@record(frozen=True, slots=True)
class Result:
    """A result is that of one share: tokens if it was to sample, log-probabilities if they were asked for.

    tokens: in order, usually one. Each is at the position after the one that it was drawn from.
    logprobs: one for each of the tokens, or none at all.
    embedding: the hidden state of the share's last position, behind the last norm, if it was asked for.
    children: for each draw the tokens that may come next, and how likely each is, if they were asked for.
    broken: whether the output could no longer follow its structure. The last token then ends the output.
    wrong: whether logits had a NaN. The last token is then arbitrary, and KV computed before it is not to be
        trusted.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    broken: bool = False
    wrong: bool = False
    embedding: tuple[float, ...] = ()
    children: tuple[tuple[tuple[int, float], ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """An outcome has the results in the order of the plan's shares, and the transfers that have landed.

    seconds: the time that the step took.
    """

    results: tuple[Result, ...]
    landed: tuple[Landed, ...] = ()
    seconds: float = 0.0


class Step(Protocol):
    """A step is a plan that is being carried out."""

    def outcome(self) -> Outcome:
        """Wait until it has been carried out. It is called once, in the order in which plans were begun."""
        ...
