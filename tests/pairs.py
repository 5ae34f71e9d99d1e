"""Engines of a target and a draft model, whose plans are made by hand: both models compute the same rows in
the same blocks, and drafts are proposed by one and verified by the other."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import tiny
from penstock.base.config import Config
from penstock.engine.boot import Booted, boot
from penstock.engine.placing import Override, Say
from penstock.engine.ranks import Ranks
from penstock.sched.span import KVSpan
from penstock.step.params import Sampling
from penstock.step.plan import UNKNOWN, Admission, ModelRole, Plan, Row, Share, ShareKind
from penstock.weights.checkpoint.reader import Checkpoint
from penstock.weights.pack.cache import is_pack
from penstock.weights.pack.reader import Pack
from worlds import sampling

TARGET, DRAFT = ModelRole.TARGET, ModelRole.DRAFT
SETTINGS = {
    "device": "cpu",
    "dtype": "float32",
    "check": True,
    "max_step_tokens": 64,
    "block_size": 4,
    "max_sequences": 7,
    "max_length": 160,
    "kv_blocks": 150,
}
CHUNK = 7
"""Tokens of a prompt that are computed in a step."""
GREEDY = sampling()


@contextmanager
def opened(
    target: Path,
    draft: Path | None,
    *,
    override: Override | None = None,
    say: Say = lambda _: None,
    **more: object,
) -> Iterator[Booted]:
    """An engine of two models, of a checkpoint or a pack each; of one, without a draft."""
    config = Config(target, **(SETTINGS | more))  # type: ignore[arg-type]
    models = [
        Pack.open(path) if is_pack(path) else Checkpoint.open(path, config.cache)
        for path in (target, draft)
        if path is not None
    ]
    booted = boot(config, models[0], draft=models[1] if draft else None, override=override, say=say)
    try:
        yield booted
    finally:
        booted.engine.close()
        for model in models:
            model.close()


def ranks_of(booted: Booted) -> Ranks:
    """What carries plans out."""
    ranks = booted.engine._ranks
    assert ranks is not None
    return ranks


def near(name: str, by: float) -> Path:
    """A checkpoint whose weights are off from those of the case by this part of their size: a good draft."""
    path = tiny.folder() / f"near-{name}-{by}"
    if not path.exists():
        tiny.write(tiny.CASES[name], path)
        rng = torch.Generator().manual_seed(1)
        for file in path.glob("*.safetensors"):
            tensors = load_file(file)
            for tensor in tensors.values():
                tensor += by * tensor.float().std() * torch.randn(tensor.shape, generator=rng)
            save_file(tensors, file, {"format": "pt"})
    return path


@dataclass(eq=False)
class Talk:
    """A request of two models: its tokens, the blocks that both use, and how far each has come."""

    booted: Booted
    row: Row
    prompt: list[int]
    sampling: Sampling = GREEDY
    span: KVSpan = field(init=False)
    done: dict[ModelRole, int] = field(init=False)
    """The positions whose KV each model has."""
    said: dict[ModelRole, list[int]] = field(init=False)
    """What each model has said by itself."""
    found: int = 0
    """Tokens of the prompt whose KV was there."""

    def __post_init__(self) -> None:
        scheduler = self.booted.engine.scheduler
        root = scheduler.prefixes.root_of(len(self.prompt))
        self.span = KVSpan(scheduler._pools, list(self.prompt), root)
        self.done, self.said = dict.fromkeys(ModelRole, 0), {role: [] for role in ModelRole}

    @property
    def admission(self) -> Admission:
        return Admission(self.row, self.sampling, tuple(self.prompt), ())

    @property
    def tokens(self) -> list[int]:
        """The prompt, and what has been accepted."""
        return self.span.tokens

    def share(
        self,
        role: ModelRole,
        tokens: Sequence[int],
        kind: ShareKind | None = None,
        *,
        sample: bool = True,
    ) -> Share:
        """These tokens behind what the model has. A block that it is the first to need is allocated."""
        start, span = self.done[role], self.span
        stop = self.done[role] = start + len(tokens)
        if stop > span.computed:
            span.grow(stop - span.computed)
        first = span.table_length
        pages = tuple(span.pages[first:])
        span.note_tables()
        kind = kind or (ShareKind.DECODE if len(tokens) == 1 else ShareKind.CHUNK)
        return Share(self.row, start, tuple(tokens), first, pages, sample, len(self.prompt), kind)

    def find(self) -> None:
        """Begin behind the blocks that someone has left whose prompt began alike: both models have computed
        them."""
        self.span.reuse()
        self.found = self.span.computed
        self.done = dict.fromkeys(ModelRole, self.found)

    def leave(self) -> None:
        """Free all blocks. Those of the prompt may be found."""
        self.span.seal(len(self.prompt))
        self.span.release()

    def next(self, role: ModelRole) -> Share:
        """A piece of the prompt, or the newest token that the model has said."""
        at, prompt = self.done[role], self.prompt
        if at < len(prompt):
            stop = min(at + CHUNK, len(prompt))
            return self.share(role, prompt[at:stop], sample=stop == len(prompt))
        return self.share(role, self.said[role][-1:])


def planned(role: ModelRole, shares: Sequence[Share], admissions: Sequence[Admission] = ()) -> Plan:
    """A step of one model. Decode shares come first."""
    ordered = sorted(shares, key=lambda share: share.kind is not ShareKind.DECODE)
    return Plan(tuple(admissions), tuple(ordered), model=role)


def talks_of(booted: Booted, prompts: Sequence[Sequence[int]], settings: Sampling = GREEDY) -> list[Talk]:
    """One request in each row."""
    return [Talk(booted, Row(row), list(prompt), settings) for row, prompt in enumerate(prompts)]


def say_both(
    booted: Booted,
    prompts: Sequence[Sequence[int]],
    count: int,
    ahead: bool = False,
    settings: Sampling = GREEDY,
    found: list[int] | None = None,
) -> dict[ModelRole, list[list[int]]]:
    """Let each model decode `count` tokens of every prompt by itself, in steps that take turns. Requests come
    one after the other. ahead: a step of the one is begun before that of the other has ended.
    found: takes how many tokens of each prompt were computed before.
    """
    ranks, talks = ranks_of(booted), talks_of(booted, prompts, settings)
    step = 0
    while any(len(said) < count for talk in talks for said in talk.said.values()):
        plans = []
        if step < len(talks):
            talks[step].find()
        for role in ModelRole:
            some = [talk for talk in talks[: step + 1] if len(talk.said[role]) < count]
            new = [talks[step].admission] if role is TARGET and step < len(talks) else []
            by_row = {talk.row: talk for talk in some}
            plans.append((by_row, planned(role, [talk.next(role) for talk in some], new)))
        plans = [(by_row, plan) for by_row, plan in plans if plan.shares]
        if ahead:
            begun = [ranks.begin(plan) for _, plan in plans]
            outcomes = [one.outcome() for one in begun]
        else:
            outcomes = [ranks.begin(plan).outcome() for _, plan in plans]
        for (by_row, plan), outcome in zip(plans, outcomes, strict=True):
            for share, result in zip(plan.shares, outcome.results, strict=True):
                by_row[share.row].said[plan.model] += result.tokens
        step += 1
    booted.engine.scheduler._pools.pages.check([talk.span.pages for talk in talks])
    for talk in talks:
        talk.leave()
    if found is not None:
        found += [talk.found for talk in talks]
    return {role: [talk.said[role] for talk in talks] for role in ModelRole}


@dataclass
class Spoken:
    """What was said by drafts and verification, and how many tokens of drafts were proposed and held."""

    outputs: list[list[int]]
    proposed: int = 0
    held: int = 0


def speculate(booted: Booted, prompts: Sequence[Sequence[int]], count: int, drafts: int = 3) -> Spoken:
    """Say `count` tokens of each prompt: the draft model proposes, the target verifies in one run a request,
    and what it rejects is truncated, for both."""
    ranks, talks = ranks_of(booted), talks_of(booted, prompts)
    spoken = Spoken([])
    for talk in talks:
        admissions = [talk.admission]
        while talk.done[TARGET] < len(talk.prompt):
            outcome = ranks.begin(planned(TARGET, [talk.next(TARGET)], admissions)).outcome()
            admissions = []
        talk.tokens.extend(outcome.results[0].tokens)
    while running := [talk for talk in talks if len(talk.tokens) - len(talk.prompt) < count]:
        proposals = _proposed(ranks, running, drafts)
        shares = []
        for talk in running:
            run = [talk.tokens[-1], *proposals[talk.row]]
            shares.append(talk.share(TARGET, run, ShareKind.VERIFY))
        outcome = ranks.begin(planned(TARGET, shares)).outcome()
        for talk, result in zip(running, outcome.results, strict=True):
            spoken.proposed, spoken.held = spoken.proposed + drafts, spoken.held + len(result.tokens) - 1
            talk.tokens.extend(result.tokens)
            valid = len(talk.tokens) - 1
            talk.span.truncate(valid)
            talk.span.seal(valid)
            talk.done = {role: min(done, valid) for role, done in talk.done.items()}
        booted.engine.scheduler._pools.pages.check([talk.span.pages for talk in talks])
    for talk in talks:
        talk.span.release()
    spoken.outputs = [talk.tokens[len(talk.prompt) :][:count] for talk in talks]
    return spoken


def _proposed(ranks: Ranks, talks: Sequence[Talk], drafts: int) -> dict[Row, list[int]]:
    """Tokens that the draft model expects next, by row. It goes on from tokens that only it knows so far."""
    proposals: dict[Row, list[int]] = {talk.row: [] for talk in talks}
    known = planned(DRAFT, [talk.share(DRAFT, talk.tokens[talk.done[DRAFT] :]) for talk in talks])
    more = [
        planned(DRAFT, [talk.share(DRAFT, [UNKNOWN]) for talk in talks]) for _ in range(drafts - 1)
    ]  # Nothing of them depends on what the steps before yield.
    begun = [(plan, ranks.begin(plan)) for plan in (known, *more)]
    for plan, step in begun:
        for share, result in zip(plan.shares, step.outcome().results, strict=True):
            proposals[share.row] += result.tokens
    return proposals
