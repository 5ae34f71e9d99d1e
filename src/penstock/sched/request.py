"""Holds one request as the scheduler knows it: its tokens, its KV, and the transfers that it waits for."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from penstock.sched.found import FoundTokens
from penstock.sched.span import KVSpan
from penstock.sched.suffix import TokenHistory
from penstock.step.params import Sampling
from penstock.step.plan import RequestId, Row, TransferId
from penstock.step.request import FinishReason


class Phase(Enum):
    """A phase says whether a request waits, runs or has ended."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True)
class DraftCounts:
    """Counts steps that verified a draft, tokens of these drafts, and those of them that were accepted.

    failed: drafters that failed in a request, which had no drafts from then on. cut: drafts within which an
    output ended, so that no token of the pass itself became output.
    """

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    failed: int = 0
    cut: int = 0


@dataclass(slots=True, eq=False)
class Request:
    """A request lives from submission to its end. Only the scheduler writes to it.

    `tokens` is the prompt followed by the output so far. A request only ever catches up with its own length.
    """

    id: RequestId
    tokens: list[int]
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    kv: KVSpan
    """The blocks of its KV. The span shares the list of tokens."""
    share_prefix: bool = True
    """False if every prompt position must be computed, because its log-probabilities were asked for."""
    adapter: int = 0
    """Slot of its LoRA adapter; 0 for none."""
    scope: tuple[bytes, bytes] = (b"", b"")
    """Salt, and digest of its adapter: it shares nothing with requests of another one."""
    priority: int = 0
    """The queue's first criterion: the smallest number is served first."""
    foreseen: int = 0
    """Tokens of its prompt whose KV is thought to be there when it begins, for forecasts alone."""
    phase: Phase = Phase.WAITING
    row: Row | None = None
    unknown: int = 0
    """Number of its last tokens that are UNKNOWN: steps under way yield them."""
    ending: bool = False
    """True if the next plan leaves it out.

    A step under way yields its last token, by its length, or verifies a draft, which yields any number of
    tokens.
    """
    found: FoundTokens = field(init=False)
    """Prompt tokens whose KV was found, and that it never computed."""
    arriving: TransferId | None = None
    """The transfer that brings its next blocks from another tier.

    Until it lands, the request computes nothing.
    """
    since: float = 0.0
    """Time at which it began to wait, in seconds of the scheduler's clock."""
    meets: int = 0
    """Index of the first block that is read from the disk while those before it are computed, or 0."""
    meeting: TransferId | None = None
    """The transfer that brings that block."""
    patient: bool = True
    """True while it still asks the disk. It does not if blocks were lost, or computing is faster."""
    weighed: int = 0
    """Blocks up to this index were found on another tier and not loaded, since computing them is faster."""
    punctual: bool = True
    """True while its transfers have come in time. If not, it asks for no more."""
    scored: int = 0
    """Prompt tokens after the first with log-probabilities that have been reported."""
    finish: FinishReason | None = None
    history: TokenHistory | None = None
    """Its tokens, for drafts; None before the first."""
    drafts: DraftCounts = field(default_factory=DraftCounts)

    def __post_init__(self) -> None:
        """Begin with nothing found."""
        self.found = FoundTokens(len(self.prompt))

    @property
    def begun(self) -> bool:
        """Tell whether it has computed anything."""
        return self.found.reached > 0

    @property
    def turn(self) -> tuple[int, int]:
        """Return its place in the order of queues: by priority, then by age."""
        return self.priority, self.id

    @property
    def length(self) -> int:
        """Return the number of tokens of prompt and output."""
        return len(self.tokens)

    @property
    def known(self) -> int:
        """Return the number of leading tokens that are not UNKNOWN."""
        return len(self.tokens) - self.unknown

    @property
    def most(self) -> int:
        """Return the largest number of tokens that it may come to have."""
        return len(self.prompt) + self.max_tokens

    @property
    def goal(self) -> int:
        """Return how many positions it computes before it waits for a token, or for blocks under way."""
        return self.meets * self.kv.pools.size or len(self.tokens)

    def kept(self, at: int, tokens: Sequence[int]) -> int:
        """Return how many of these tokens, the first at position `at`, are its own: up to its end."""
        sampling, before = self.sampling, at - len(self.prompt)
        ends = (
            kept
            for kept, token in enumerate(tokens, 1)
            if token in sampling.end_tokens and before + kept >= sampling.min_tokens
        )
        return next(ends, len(tokens))

    def chunk(self, budget: int) -> int:
        """Return how many tokens it computes next if it has `budget`.

        A long request computes whole blocks, at least two tokens, or all that it lacks. An admitted request
        always has one chunk: those admitted with it computed a token each beside its first chunk, as they do
        from then on.
        """
        lacking, size = self.goal - self.kv.computed, self.kv.pools.size
        if not self.kv.long or lacking <= budget:
            return min(lacking, budget)
        count = budget - budget % size
        return count if count > 1 else 0
