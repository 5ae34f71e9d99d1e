"""One request as the scheduler knows it: its tokens, its KV, what it waits for."""

from dataclasses import dataclass
from enum import Enum, auto

from penstock.sched.span import KVSpan
from penstock.step.params import Sampling
from penstock.step.plan import RequestId, Row, TransferId
from penstock.step.request import FinishReason


class Phase(Enum):
    """Where a request is."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Request:
    """A request from its submission to its end. It is written by the scheduler alone.

    `tokens` is the prompt followed by the output so far. A request only ever catches up with its own length.
    """

    id: RequestId
    tokens: list[int]
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    kv: KVSpan
    """Where its KV rests. It shares the list of tokens."""
    share_prefix: bool = True
    """False when every prompt position must be computed, because its log-probabilities were asked for."""
    priority: int = 0
    """Of those that wait, the one with the least is served first."""
    phase: Phase = Phase.WAITING
    row: Row | None = None
    unknown: int = 0
    """How many of the last tokens are UNKNOWN: steps under way yield them."""
    ending: bool = False
    """Whether the next plan leaves it out: a step under way yields its last token, as far as its length
    decides, or verifies a draft, which yields as many tokens as hold."""
    cached: int | None = None
    """Prompt tokens whose KV was found instead of computed, when the request was first admitted. None until
    then."""
    arriving: TransferId | None = None
    """The transfer that brings its next blocks from another tier. Meanwhile it computes nothing."""
    since: float = 0.0
    """When it began to wait, in seconds of the scheduler's clock."""
    meets: int = 0
    """Index of the first block that comes from the disk while those before it are computed; 0 if there is
    none."""
    meeting: TransferId | None = None
    """The transfer that brings that block."""
    patient: bool = True
    """Whether it still asks the disk. It does not when some of it was lost, or computing is faster."""
    weighed: int = 0
    """Blocks up to this one were found on another tier and not brought, since computing them is faster."""
    punctual: bool = True
    """Whether what it waited for has come in time so far. If not, it asks no more."""
    from_host: int = 0
    from_disk: int = 0
    """Of the cached tokens, those that came up from the host, and those of them that had come there from
    disk."""
    scored: int = 0
    """Prompt tokens after the first whose log-probabilities have been reported."""
    finish: FinishReason | None = None

    @property
    def turn(self) -> tuple[int, int]:
        """The order of queues: the priority, then who came first."""
        return self.priority, self.id

    @property
    def length(self) -> int:
        """The number of tokens of prompt and output."""
        return len(self.tokens)

    @property
    def known(self) -> int:
        """The number of leading tokens that are not UNKNOWN."""
        return len(self.tokens) - self.unknown

    @property
    def most(self) -> int:
        """The most tokens that it may come to have."""
        return len(self.prompt) + self.max_tokens

    @property
    def goal(self) -> int:
        """How many positions it computes before it has to wait: for its next token, or for blocks that are on
        their way."""
        return self.meets * self.kv.pools.size or len(self.tokens)

    def chunk(self, budget: int) -> int:
        """Return how many tokens it computes next if it has `budget`. A long one computes whole blocks, at
        least two tokens, or all it lacks.

        Who has been admitted always has one: those admitted with it computed a token each beside its first
        chunk, as they do from then on.
        """
        lacking, size = self.goal - self.kv.computed, self.kv.pools.size
        if not self.kv.long or lacking <= budget:
            return min(lacking, budget)
        count = budget - budget % size
        return count if count > 1 else 0
