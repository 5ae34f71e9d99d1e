"""One request as the scheduler knows it: its tokens, how far it is computed, where its KV rests."""

from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto

from penstock.step.params import Sampling
from penstock.step.plan import BlockId, HostBlockId, RequestId, Row, TransferId


class Phase(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class FinishReason(StrEnum):
    STOP = "stop"
    """An end token or a stop string."""
    LENGTH = "length"
    """max_tokens or the end of the context."""
    ABORT = "abort"
    ERROR = "error"
    """Its structure could not be followed any further, the model's logits were not numbers, or the device has
    too little memory for its smallest step: it is not what was asked for."""


@dataclass(slots=True, eq=False)
class Request:
    """Written only by the Scheduler. `tokens` is the prompt followed by the output so far.

    Positions [0, computed) have their KV in `host_blocks`, which only a long request has, and the last of
    them in `blocks`, which may begin before the host's end; a request only ever catches up with its own
    length.
    """

    id: RequestId
    tokens: list[int]
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    share_prefix: bool = True
    """False when every prompt position must be computed, because its log-probabilities were asked for."""
    priority: int = 0
    """Of those that wait the one with the least is served first."""
    salt: bytes = b""
    """Its prefixes are shared with requests of the same salt alone."""
    phase: Phase = Phase.WAITING
    row: Row | None = None
    long: bool = False
    """Its KV rests in host blocks, but for a tail; once long, always long."""
    paged: int = 0
    """Index of the first of its blocks that is in a page of the device: `blocks` begin with it. Those before
    it are on the host alone."""
    near: int = 0
    """How many blocks that are on the host may be in pages as well, so that they need not stream."""
    host_blocks: list[HostBlockId] = field(default_factory=list)
    """Full ones, for the first positions."""
    blocks: list[BlockId] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    """Chained keys of the full blocks of `tokens`, computed as they are needed."""
    unknown: int = 0
    """How many of the last tokens stand for what steps under way will yield."""
    ending: bool = False
    """Whether a step under way yields its last token, as far as its length decides."""
    computed: int = 0
    sealed: int = 0
    """How many leading blocks are known to the ledger by their key. Of a long request: host blocks that
    committed steps have written."""
    shown: int = 0
    """Of a long request: up to which block its pages are known to the ledger by their keys."""
    tabled: int = 0
    """Up to which of its blocks the workers have been told of those on the device."""
    host_tabled: int = 0
    """How many leading host blocks the workers have been told of."""
    cached: int | None = None
    """Prompt tokens whose KV was found instead of computed, when the request was first admitted; None until
    then."""
    arriving: TransferId | None = None
    """What it waits for: its next blocks come from another tier. Meanwhile it computes nothing."""
    since: float = 0.0
    """When it began to wait, in seconds of the scheduler's clock."""
    meets: int = 0
    """Index of the first block that comes from the disk while those before it are computed; 0 if there is
    none."""
    meeting: TransferId | None = None
    """By which it comes."""
    patient: bool = True
    """Whether it still asks the disk; not when some of it was lost, or computing is faster."""
    weighed: int = 0
    """Blocks up to this one have been found on another tier and not brought, since computing them is
    faster."""
    punctual: bool = True
    """Whether what it waited for has come in time so far; if not it asks no more."""
    from_host: int = 0
    from_disk: int = 0
    """Of the cached tokens, those that came up from the host, and those of them that had come there from
    disk."""
    steady: int = 0
    """A position before this one, when it is computed by itself, changes nothing but `computed`: it has a
    place in the last page, and if full pages are to be known by their keys then it does not fill that page,
    and those before are. 0 where that is not known."""
    scored: int = 0
    """Prompt tokens after the first whose log-probabilities have been reported."""
    finish: FinishReason | None = None

    @property
    def turn(self) -> tuple[int, int]:
        """What the queue is ordered by: the priority, then who came first."""
        return self.priority, self.id

    @property
    def prompt_length(self) -> int:
        return len(self.prompt)

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def known(self) -> int:
        """How many of the tokens are known."""
        return len(self.tokens) - self.unknown

    @property
    def output_length(self) -> int:
        return len(self.tokens) - self.prompt_length
