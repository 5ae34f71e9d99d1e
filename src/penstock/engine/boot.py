"""Builds an engine from a Config: reads the machine, has a plan made, and constructs it.

It decides nothing.
"""

import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING

import torch

from penstock.arch.formats.dense import DENSE
from penstock.arch.mtp import no_mtp
from penstock.arch.shards import Shard
from penstock.arch.spec import ModelSpec
from penstock.base.config import Config
from penstock.base.errors import CheckpointError, DeviceError
from penstock.base.trace import Trace
from penstock.base.units import format_size, parse_size
from penstock.engine.budget import Budget, memory_of
from penstock.engine.contexts import LongRoom
from penstock.engine.copying import check_copy, copy_in_few_bits
from penstock.engine.deciding import decided
from penstock.engine.drafter import ModelDrafter
from penstock.engine.engine import Engine
from penstock.engine.head_drafter import HeadDrafter
from penstock.engine.measuring import activation_peak, step_fits
from penstock.engine.parts import (
    blank_runner,
    make_carrier,
    make_pool,
    make_runner,
    make_scheduler,
    make_weights,
)
from penstock.engine.placing import BootContext, Model, Override, PlacedWeights, Say, place, source_of
from penstock.engine.plan import BootPlan, Rest
from penstock.engine.ranks import Ranks
from penstock.engine.settling import Settled, settle
from penstock.engine.store import carry_rates, ledger_of, open_store, outlives, root_of
from penstock.engine.team import (
    Description,
    Place,
    described,
    device_of,
    open_described,
    team_config,
    threads_of_rank,
)
from penstock.engine.threads import check_fork, first_look, threads_for
from penstock.engine.tree_drafter import TreeDrafter, grows_trees
from penstock.kv.ledger.disk import DiskLedger
from penstock.kv.movement.pool import KVPool
from penstock.kv.store.blocks import BlockStore
from penstock.kv.store.diskpool import check_directory
from penstock.memory.device import choose_device, device_name, give_back, left_by, lift_cap
from penstock.models.draft_head import HiddenTaps
from penstock.ops.kernels import kernels_of, plain_torch
from penstock.ops.native.few_bits import find_library
from penstock.sched.rules import SchedulerLimits
from penstock.step.plan import ModelRole
from penstock.weights.checkpoint.heads import HeadCheckpoint
from penstock.weights.checkpoint.reader import Checkpoint
from penstock.weights.pack.cache import made_here
from penstock.weights.pack.reader import Pack
from penstock.weights.streaming.loading import Loading
from penstock.weights.streaming.source import Sources, WithEmbedding
from penstock.weights.streaming.stream import WeightStream
from penstock.worker.ahead import compile_ahead, prepare
from penstock.worker.collectives import RankCollectives
from penstock.worker.runner import Runner
from penstock.worker.sizes import prefix_blocker
from penstock.worker.structures import Guide

if TYPE_CHECKING:  # Needed by several ranks alone.
    from penstock.parallel.seat import Seat
    from penstock.worker.rank import Leader


@dataclass(frozen=True, slots=True)
class Booted:
    """Holds an engine and the facts that were found or derived on the way."""

    engine: Engine
    spec: ModelSpec
    device: torch.device
    dtype: str
    budget: Budget
    limits: SchedulerLimits
    weights: WeightStream
    seconds: float
    drafter: str
    """The word for what drafts; see Config.drafter."""


def boot(
    config: Config,
    model: Model,
    *,
    say: Say = lambda _: None,
    trace: Trace | None = None,
    override: Override | None = None,
    loading: Loading | None = None,
    guide: Guide | None = None,
    draft: Model | None = None,
) -> Booted:
    """Return a running engine of a frozen Config and an open checkpoint or pack. say, trace, override,
    loading, guide, draft: see BootContext.

    Of a Shape the weights are random. config.model is not looked at: the model has been found by now. A pack
    is closed with the engine. A draft model that is given computes what plans ask of it; the scheduler asks
    for drafts alone. Which of them `auto` means is decided here. Raises PenstockErrors: DeviceError,
    ConfigError, BudgetError, CheckpointError.
    """
    begin = time.perf_counter()
    check_fork(config.threads)
    config = decided(config, model, say)
    if config.drafts_itself and draft is None:
        check_copy(config, model)
    if config.drafts_by_mtp and draft is None:
        raise no_mtp("a benchmark opens none")
    context = BootContext(say, trace, override or Override(), loading, guide, draft)
    since = first_look()
    with ExitStack() as opened:  # closed if anything fails; afterwards the engine closes it
        if config.tensor_parallel == 1:
            device = choose_device(config.device)
            with threads_of_rank(device, 1, config.threads):
                part = _build(config, model, Place(device), opened, context)
            ranks: Ranks = part.runner
        else:
            models = (model,) if draft is None else (model, draft)
            part, ranks, device = _team(team_config(config, *models), model, opened, context)
        plan, outline = part.plan, part.plan.outline
        scheduler = make_scheduler(plan, part.root, part.disk)
        weights = "all" if plan.rest is Rest.ALL else "some"
        by = f"{config.tensor_parallel} x {device_name(device)}, {weights} weights there"
        threads = threads_for(config, outline, device, since=since, say=say)
        if outline.draft is not None and scheduler.speculation is not None:
            most = outline.limits.max_step_tokens
            shares = config.drafts_itself
            streams = 0.0 if plan.rest is Rest.ALL else plan.placement.prediction.seconds
            scheduler.speculation.model = (
                HeadDrafter(ranks, most, threads)
                if isinstance(draft, HeadCheckpoint)
                else (TreeDrafter if grows_trees(device, streams) else ModelDrafter)(
                    ranks, most, threads, shares_kv=shares
                )
            )
        note = carry_rates(scheduler.tiers.rates, part.store, by)
        engine = Engine(scheduler, ranks, note, threads, outline.lora)
        opened.pop_all()
    for line in memory_of(part.shares):
        say(line)
    if outline.far:
        say(f"long contexts: {outline.far}")
    if config.prefix_cache and (blocker := prefix_blocker(outline.spec)):
        say(f"prefixes are not shared, since {blocker}")
    longest, length = engine.scheduler.longest, outline.limits.max_length
    if longest < length:
        room = "kv_blocks or host_kv_memory" if config.kv_blocks is not None else "host_kv_memory"
        if outline.draft is not None and config.draft_memory is not None:
            room = f"draft_memory or {room}"
        say(
            f"requests are limited to {longest:,} tokens of the context's {length:,}, since KV has no room "
            f"for more; raise {room} for longer ones"
        )
    return Booted(
        engine,
        outline.spec,
        device,
        outline.dtype,
        plan.budget,
        outline.limits,
        part.weights,
        time.perf_counter() - begin,
        config.drafter,
    )


def follow(
    seat: "Seat", config: Config, what: Description, override: Override, draft: Description | None
) -> None:
    """Do all that another rank does, in a process of its own: build its part of the models, and then do what
    rank 0 says."""
    from penstock.worker.rank import serve

    with ExitStack() as opened:
        device = device_of(config, seat.local)
        opened.enter_context(threads_of_rank(device, seat.ranks, config.threads))
        cache = config.cache.expanduser()
        model = open_described(what, cache)
        beside = None if draft is None else open_described(draft, cache)
        group = seat.group(device)
        shard = Shard(seat.rank, seat.ranks)
        try:
            context = BootContext(override=override, draft=beside)
            part = _build(config, model, Place(device, shard, group), opened, context)
            serve(seat.receive, part.runner, group)
        except BaseException:
            group.abort()  # As in rank 0.
            raise
        opened.pop_all()


def _team(
    config: Config, model: Model, opened: ExitStack, context: BootContext
) -> "tuple[_Part, Leader, torch.device]":
    """Return rank 0's part, all ranks as one, and its device.

    It starts the processes of the others, unless torchrun has.
    """
    from penstock.parallel.launch import launch
    from penstock.worker.rank import Leader

    last = opened.enter_context(ExitStack())  # Closed when all the others are.
    what, draft = described(model), None if context.draft is None else described(context.draft)
    if config.disk_kv_memory is not None and (size := parse_size(config.disk_kv_memory)):
        check_directory(config.kv_directory.expanduser(), size)
    crew = launch(config.tensor_parallel, follow, config, what, context.override, draft)
    opened.callback(crew.close)
    try:
        device = device_of(config, crew.local)
        last.enter_context(threads_of_rank(device, crew.ranks, config.threads))
        group = crew.group(device)
        opened.callback(group.close)
        try:
            part = _build(config, model, Place(device, Shard(0, crew.ranks), group, last), opened, context)
        except BaseException:
            group.abort()  # What waits on a device for others would keep it from being tidied up.
            raise
    except Exception as fault:
        told = crew.verdict(fault) if isinstance(fault, DeviceError) else fault
        if told is fault:
            raise
        raise told from fault
    context.say(
        f"tensor parallel: {crew.ranks} ranks, this one with "
        f"{format_size(part.weights.bytes + part.weights.host_bytes)} of weights"
    )
    return part, Leader(part.runner, crew, group, last.close), device


@dataclass(frozen=True, slots=True)
class _Part:
    """Holds one rank's part of the model, ready to compute."""

    plan: BootPlan[LongRoom]
    runner: Runner
    weights: WeightStream
    root: bytes
    store: BlockStore | None
    disk: DiskLedger | None
    """The books of what all ranks' stores have."""
    shares: tuple[str, ...]
    """The division of each rank's memory."""


def _attach_drafts(runner: Runner, drafts: WeightStream, pool: KVPool, plan: BootPlan[LongRoom]) -> None:
    """Attach what drafts: a model or a copy, or a head, to which the target's passes give hidden states."""
    runner.attach(drafts, pool, early=plan.early, role=ModelRole.DRAFT)
    if (head := plan.outline.head) is not None and head.head is not None:
        decoder = runner.target.decoder
        decoder.taps = HiddenTaps(head.head, decoder.spec.layers, drafts, pool.layers)


def _build(config: Config, model: Model, where: Place, opened: ExitStack, context: BootContext) -> _Part:
    """Build one rank's part, which is closed with `opened`. Every rank builds its part in the same steps,
    since ranks compute together when the largest step is measured."""
    with plain_torch(not config.kernels), ExitStack() as copied:
        device, say = where.device, context.say
        opened.callback(lift_cap, device)
        prepare(device)
        if config.drafts_itself and context.draft is None:
            copy = copied.enter_context(copy_in_few_bits(config, model, device, say, where.shard))
            context = replace(context, draft=copy)
        if device.type == "cuda" and not kernels_of(device):
            why = "since there is no Triton" if config.kernels else "as asked"
            say(f"kernels: plain torch computes, {why}")
        outline = where.agree(settle(config, model, device, say, where.shard, context.draft))
        if device.type == "cuda" and config.cpu_compute != "off":
            # Compiled beside what follows; who needs the kernels waits.
            Thread(target=find_library, args=(config.cache.expanduser(),), daemon=True).start()
        native = device.type == "cpu" and config.kernels
        if native and (why := find_library(config.cache.expanduser(), say)):
            what = "attention" if outline.spec.format == DENSE else "weights of few bits"
            say(f"kernels for {what}: none, plain torch computes much slower: {why}")
        sums = [None if one.head else where.collectives(one.spec, one.dtype) for one in outline.models]
        if (collectives := sums[0]) is not None and device.type == "cuda":
            few = f"of up to {collectives.rows} rows in one launch, " if collectives.rows else ""
            say(f"all-reduce: {few}by NCCL")
        agree = where.group.follow if where.group else None
        runner = make_runner(outline, device, *sums, agree=agree, guide=context.guide)
        opened.callback(runner.detach)
        if (imposed := context.override.routing) is not None:
            rows, dtype = outline.limits.max_sequences, getattr(torch, outline.dtype)
            runner.target.decoder.routing = imposed.on(outline.spec, rows, device, dtype)

        def ahead(one: Settled, by: RankCollectives | None, early: bool) -> None:
            blank = partial(blank_runner, one, device, by, early=early)
            compile_ahead(blank, device, one.sizes, recorded=one.recorded)

        def measured(one: Settled, by: RankCollectives | None) -> tuple[int, int]:
            with step_fits(device):
                stays = left_by(device, partial(ahead, one, by, one.early)) + (by.bytes if by else 0)
                alone = runner if one is outline else make_runner(one, device, by)
                return stays, activation_peak(one, alone, device)

        stays, peaks = zip(*map(measured, outline.models, sums), strict=True)
        # Steps of one model and of another take the same memory in turn.
        placed = place(outline, sum(stays) + max(peaks) + outline.beside, model, device, context)
        weights = make_weights(placed, device, context.trace)
        opened.callback(weights.close)
        blocks = where.least(placed.plan.budget.blocks)
        if isinstance(model, Checkpoint) and outlives(outline):
            model.identify()  # Its files are hashed while the same bytes are loaded.
        weights.load(context.loading)
        drafts = _draft_weights(placed.plan, model, opened, context, device)
        root = root_of(config, model, outline, say, blocks=blocks)
        carrier = store = disk = None
        if outline.far:
            store = open_store(model, outline, root, say)
            over_ranks = where.group.all_reduce if where.group else None
            carrier = make_carrier(outline.far, device, context.trace, store, over_ranks)
            opened.callback(carrier.close)
            disk = ledger_of(store, where, config.block_size) if store is not None else None
        # Behind loading, so that nobody goes on without a rank that failed there.
        plan = placed.plan.agreed(blocks, where.least(placed.plan.rest))
        if plan.compile_again:
            ahead(outline, collectives, plan.early)  # Hardly any of what was compiled will be launched.
            give_back(device)
        pool = make_pool(outline, blocks, device)
        runner.attach(weights, pool, carrier, early=plan.early)
        of_draft = plan.of_draft
        if drafts is not None and of_draft is not None:
            own = pool if config.drafts_itself else make_pool(of_draft.outline, blocks, device)
            _attach_drafts(runner, drafts, own, of_draft)
        runner.bound_heap(plan.budget.activations // 8)
        _record(plan, runner, say, ModelRole.TARGET)
        if of_draft is not None:
            _record(of_draft, runner, say, ModelRole.DRAFT)
        shares = where.shares(plan.budget)
        if where.group is not None:
            where.group.check()
        return _Part(plan, runner, weights, root, store, disk, shares)


def _draft_weights(
    plan: BootPlan[LongRoom], model: Model, opened: ExitStack, context: BootContext, device: torch.device
) -> WeightStream | None:
    """Return the weights of the draft model, loaded, which are closed with `opened`; None without one."""
    of_draft, draft = plan.of_draft, context.draft
    if of_draft is None or draft is None:
        return None
    source = source_of(draft, of_draft.outline.dtype)
    if isinstance(draft, HeadCheckpoint) and not draft.embeds:
        source = WithEmbedding(source, source_of(model, plan.outline.dtype))
    weights = make_weights(PlacedWeights(of_draft, Sources(source, source), None), device, context.trace)
    opened.callback(weights.close)
    try:
        weights.load(context.loading)
    except CheckpointError as error:
        if not isinstance(context.draft, Pack) or not plan.outline.settings.drafts_itself:
            raise
        raise made_here(error, context.draft.path) from error
    return weights


def _record(plan: BootPlan[LongRoom], runner: Runner, say: Say, role: ModelRole) -> None:
    """Record what the plan of a model says as CUDA graphs."""
    outline, whose = plan.outline, "draft model's " if role is ModelRole.DRAFT else ""
    if not plan.recorded:
        if outline.hardware.cuda and outline.settings.graphs:
            say(f"{whose}CUDA graphs: off, since {plan.graph_blocker}; every kernel is launched by itself")
        return
    limits = outline.limits
    graphs = runner.record(
        outline.sizes.rows(outline.spec),
        limits.max_step_tokens,
        limits.max_length,
        record_runs=plan.record_runs,
        cold=outline.far is not None and plan.budget.blocks < outline.blocks_per_row,
        role=role,
    )
    counts, runs, mixed, prompts = graphs.counts, graphs.runs, graphs.mixed, ""
    if plan.record_runs and runs:
        prompts = f", prompts of up to {runs[0]} tokens, {len(runs)} of them"
        if mixed:
            prompts += f", and rows with prompts of up to {mixed[0]} tokens, {len(mixed)} of them"
    if graphs.cold:
        prompts = (
            f", of up to {graphs.cold[0]} with KV beyond the device, {len(graphs.cold)} of them{prompts}"
        )
    say(
        f"{whose}CUDA graphs: decode steps of 1 to {counts[0]} rows, {len(counts)} of them{prompts}, "
        f"recorded in {graphs.seconds:.2f} s, {format_size(graphs.bytes)}"
    )
