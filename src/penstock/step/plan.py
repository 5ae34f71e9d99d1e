"""What one step must do and what came of it: the only two things the scheduler and the workers say to each
other."""

from dataclasses import dataclass
from enum import Enum
from typing import NewType, Protocol

from penstock.step.params import Sampling
from penstock.step.record import record

RequestId = NewType("RequestId", int)
BlockId = NewType("BlockId", int)
"""Index of a KV block in the pool of the device tier."""
HostBlockId = NewType("HostBlockId", int)
"""Index of a KV block in the pool of the host tier, where the KV of long requests rests."""
Row = NewType("Row", int)
"""Index of a running request in the runner's tables; given by the scheduler, free again when the request
leaves."""
TransferId = NewType("TransferId", int)
UNKNOWN = -1
"""Instead of a row's newest token in a plan that is made before the step which yields it is over: the worker
has it. It is the newest that the plan's own model has drawn."""


@dataclass(frozen=True, slots=True)
class Admission:
    """A request takes a row. `output` is not empty when it comes back after a preemption."""

    row: Row
    sampling: Sampling
    prompt: tuple[int, ...]
    output: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Order:
    """Copy a page of the device to a block of the host before the step computes. The page may be written
    again in the step after."""

    source: BlockId
    target: HostBlockId


class Route(Enum):
    """The two tiers between which blocks go."""

    UP = "host to device"
    DOWN = "device to host"
    IN = "disk to host"
    OUT = "host to disk"


@dataclass(frozen=True, slots=True)
class Transfer:
    """Blocks are copied to another tier while steps go on. It begins in the step of its plan, and is reported
    when it has landed.

    What it reads was written by earlier steps. No step writes that, nor touches what it writes, until it has
    landed.
    """

    id: TransferId
    route: Route
    pages: tuple[BlockId, ...]
    """Of the device; none for IN and OUT."""
    blocks: tuple[HostBlockId, ...]
    """Of the host, as many as there are pages or keys."""
    keys: tuple[bytes, ...] = ()
    """Their names on disk, for IN and OUT."""


@dataclass(frozen=True, slots=True)
class Landed:
    """A transfer has ended.

    lost: which of its blocks, by their index in it, did not get there.
    gone: the keys of those of them that the disk does not have; others may be read another time.
    """

    id: TransferId
    seconds: float
    lost: tuple[int, ...] = ()
    gone: tuple[bytes, ...] = ()


class ShareKind(Enum):
    """The kind of a share's tokens, which decides how they attend and how many tokens they yield."""

    DECODE = "decode"
    """One token, attended to as a row beside other rows; it yields at most one."""
    CHUNK = "chunk"
    """Two or more known tokens, attended to as a run; they yield at most one, after the last."""
    VERIFY = "verify"
    """The newest token and the draft that follows it, attended to as a run. They yield the tokens of the
    draft that hold and one more: from one token up to as many as the share has. The scheduler takes such
    results in; nothing makes drafts yet, and a sampler draws after the last token of a run alone."""


@record(frozen=True, slots=True)
class Share:
    """One request's part of a step: compute `tokens` at positions [start, start + len(tokens)).

    The row's block table is extended at index `first_new_block` by `new_blocks`; after that it covers every
    position from `near` up to the share's end. With `sample`, the last position yields a token.

    Of a long request the first positions rest in host blocks, by a table of their own. What is computed in
    the step reads [0, cold_start) from there, and the rest from the device's pages and, of a chunk, from what
    is in hand. The positions [start, cold_stop) are written to host blocks; there are none if `cold_stop` <=
    `start`, so in every share of one token. Those from `near` on are written to pages, whether they are
    written to host blocks or not. No host block is read before the step after the one whose share wrote it;
    the target of an order may be read at once.
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
    """Prompt tokens that follow each of this share's positions, where prompt log-probabilities were asked
    for."""
    cold_start: int = 0
    """Tokens of the row that are read from host blocks, the orders of the step carried out; whole blocks, no
    more than `start`."""
    cold_stop: int = 0
    """Tokens of the row that rest in host blocks after the step; whole blocks."""
    near: int = 0
    """Position of the first token whose KV is in the row's pages; `cold_start`, unless that is `start` and
    what follows is not."""
    first_new_cold: int = 0
    new_cold: tuple[HostBlockId, ...] = ()
    """The row's table of host blocks is extended at index `first_new_cold` by these; after that it covers [0,
    cold_stop)."""

    @property
    def stop(self) -> int:
        """The position after the last of its tokens."""
        return self.start + len(self.tokens)


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
    those of kind DECODE stand before all others.

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

    @property
    def runs(self) -> tuple[Share, ...]:
        """Return the shares that are not of kind DECODE: those that attend as runs."""
        count, decode = len(self.shares), ShareKind.DECODE
        while count and self.shares[count - 1].kind is not decode:
            count -= 1
        return self.shares[count:]

    @property
    def tokens(self) -> int:
        """The number of tokens that the step computes."""
        return len(self.shares) + sum(len(run.tokens) - 1 for run in self.runs)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of a token, and the likeliest tokens at its position, best first."""

    token: int
    logprob: float
    rank: int
    """1 for the likeliest token."""
    top: tuple[tuple[int, float], ...]


@record(frozen=True, slots=True)
class Result:
    """The result of one share: tokens if it was to sample, log-probabilities if they were asked for."""

    tokens: tuple[int, ...] = ()
    """In order; usually one. Each is at the position after the one that it was drawn from."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each of the tokens, or none at all."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    broken: bool = False
    """Whether the output's structure could not be followed any further. The last token then ends the output,
    which is not what it should be."""
    wrong: bool = False
    """Whether logits were not numbers. Any token then stands in the place of the last one, and what was
    computed before it may not be trusted either."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results in the order of the plan's shares, and the transfers that have landed by now."""

    results: tuple[Result, ...]
    landed: tuple[Landed, ...] = ()
    seconds: float = 0.0
    """That the step took."""


class Step(Protocol):
    """A plan that is being carried out."""

    def outcome(self) -> Outcome:
        """Wait until it has been carried out. To be called once, in the order in which plans were begun."""
        ...
