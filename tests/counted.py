"""A machine whose time is counted, not measured: what a step takes is told, and so is what the host does for
it. The engine's loop runs on it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.engine.engine import Engine
from penstock.kv.ledger.blocks import BlockLedger
from penstock.sched.request import Request
from penstock.sched.rules import PrefixRule, SchedulerLimits
from penstock.sched.scheduler import Scheduler
from penstock.sched.speculation import Speculation
from penstock.sched.suffix import Draft
from penstock.step.adapter import LoadedAdapter
from penstock.step.plan import Landed, Outcome, Plan, Result, Row, Share, ShareKind, accepted
from worlds import ROOT, sampling

Said = Callable[[int, int], int]
"""The token that a request says at a place of its output. Its prompt begins with its number."""


@dataclass
class Machine:
    """Computes steps in `seconds` by their tokens, one after the other. The host needs `host` seconds to
    begin one, and as many to end it."""

    said: Said
    seconds: Callable[[int], float]
    host: float
    ahead: bool = True
    carrier: None = None
    now: float = 0.0
    free: float = 0.0
    """When the device has done all that was begun."""
    rows: dict[Row, int] = field(default_factory=dict)

    def begin(self, plan: Plan) -> "Counted":
        for admission in plan.admissions:
            self.rows[admission.row] = admission.prompt[0]
        self.now += self.host
        begun = max(self.now, self.free)
        self.free = begun + self.seconds(plan.tokens)
        if not self.ahead:
            self.now = self.free
        return Counted(self, plan, begun, self.free)

    def result(self, share: Share) -> Result:
        """What is drawn behind each token of a share, up to where a draft does not hold."""
        if not share.sample:
            return Result()
        first = (share.stop if share.kind is not ShareKind.VERIFY else share.start + 1) - share.prompt_length
        draws = [self.said(self.rows[share.row], at) for at in range(first, first + share.draws)]
        return Result(tuple(draws[: accepted(draws, share.draft)]))

    def load_adapter(self, loaded: LoadedAdapter, adapter: object) -> None:
        raise NotImplementedError

    def settle(self) -> tuple[Landed, ...]:
        return ()

    def free_kv(self) -> None: ...

    def check(self) -> None: ...

    def close(self) -> None: ...


@dataclass
class Counted:
    """A step of such a machine."""

    machine: Machine
    plan: Plan
    begun: float
    ended: float

    def outcome(self) -> Outcome:
        self.machine.now = max(self.machine.now, self.ended) + self.machine.host
        results = tuple(self.machine.result(share) for share in self.plan.shares)
        return Outcome(results, (), self.ended - self.begun)


@dataclass
class Drafts:
    """Drafts of `most` tokens, each of which takes the host `seconds`, by a function of request and place."""

    machine: Machine
    tokens: Callable[[int, int], Sequence[int]]
    seconds: float = 2e-5

    def propose(self, request: Request, most: int) -> Draft:
        self.machine.now += self.seconds
        place = request.known - len(request.prompt)
        tokens = tuple(self.tokens(request.prompt[0], place))[:most]
        return Draft(tokens, (1.0,) * len(tokens), 8)


Passes = list[tuple[float, int, int]]
"""Of each step that has ended with tokens: when, how many of all requests by then, and how many of them are
the fewest of one request."""


def run(
    machine: Machine,
    rows: int,
    count: int,
    speculation: Speculation | None,
    prompts: Sequence[Sequence[int]] | None = None,
) -> tuple[Passes, Scheduler]:
    """Decode in so many passes, all requests together. prompts: each with its number first, if they are more
    than that."""
    prompts = prompts or [[number] for number in range(rows)]
    limits = SchedulerLimits(16, 1024, rows, 1 << 20)
    scheduler = Scheduler(
        BlockLedger(sum([(len(prompt) + 20 * count) // 16 + 8 for prompt in prompts])),
        limits,
        PrefixRule(ROOT, False),
        speculation=speculation,
        clock=lambda: machine.now,
    )
    engine = Engine(scheduler, machine)
    ids = {engine.submit(prompt, sampling(), 20 * count): prompt[0] for prompt in prompts}
    got, passes = dict.fromkeys(ids.values(), 0), Passes()
    while len(passes) < count:
        events = engine.step()
        for event in events:
            number = ids[event.request]
            assert event.token == machine.said(number, got[number])
            got[number] += 1
        if events:
            passes.append((machine.now, sum(got.values()), min(got.values())))
    return passes, scheduler
