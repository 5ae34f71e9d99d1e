"""Builds an engine from a Config: reads the machine, has a plan made, and constructs what it says. It decides
nothing."""

import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from penstock.arch.formats.dense import DENSE
from penstock.arch.shards import Shard
from penstock.arch.spec import ModelSpec
from penstock.base.config import Config
from penstock.base.errors import DeviceError
from penstock.base.trace import Trace
from penstock.base.units import format_size
from penstock.engine.budget import Budget
from penstock.engine.contexts import LongRoom
from penstock.engine.engine import Engine, Ranks
from penstock.engine.measuring import activation_peak
from penstock.engine.parts import (
    blank_runner,
    make_carrier,
    make_runner,
    make_scheduler,
    make_weights,
)
from penstock.engine.placing import BootContext, Model, Override, Say, place
from penstock.engine.plan import BootPlan, Rest
from penstock.engine.settling import settle
from penstock.engine.store import carry_rates, open_store, outlives, root_of
from penstock.engine.team import Place, described, device_of, open_described, share_threads, team_config
from penstock.kv.movement.pool import KVPool
from penstock.kv.store.blocks import BlockStore
from penstock.memory.device import choose_device, device_name, give_back, left_by, lift_cap
from penstock.ops.kernels import kernels_of, plain_torch
from penstock.ops.native.few_bits import find_library
from penstock.sched.rules import Limits
from penstock.weights.checkpoint.reader import Checkpoint
from penstock.weights.checkpoint.shape import Shape
from penstock.weights.streaming.loading import Loading
from penstock.weights.streaming.stream import WeightStream
from penstock.worker.ahead import compile_ahead, prepare
from penstock.worker.runner import Runner
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
    limits: Limits
    weights: WeightStream
    seconds: float


def boot(
    config: Config,
    model: Model,
    *,
    say: Say = lambda _: None,
    trace: Trace | None = None,
    override: Override | None = None,
    loading: Loading | None = None,
    guide: Guide | None = None,
) -> Booted:
    """Return a running engine of a frozen Config and an open checkpoint or pack. say, trace, override,
    loading, guide: see BootContext.

    Of a Shape the weights are random. config.model is not looked at: the model has been found by now. A pack
    is closed with the engine. Raises PenstockErrors: DeviceError, ConfigError, BudgetError, CheckpointError.
    """
    begin = time.perf_counter()
    context = BootContext(say, trace, override or Override(), loading, guide)
    with ExitStack() as opened:  # closed if anything fails; afterwards the engine closes it
        if config.tensor_parallel == 1:
            device = choose_device(config.device)
            part = _build(config, model, Place(device), opened, context)
            ranks: Ranks = part.runner
        else:
            part, ranks, device = _team(team_config(config, model), model, opened, context)
        plan, outline = part.plan, part.plan.outline
        scheduler = make_scheduler(plan, part.root, part.store)
        weights = "all" if plan.rest is Rest.ALL else "some"
        by = f"{config.tensor_parallel} x {device_name(device)}, {weights} weights there"
        engine = Engine(scheduler, ranks, carry_rates(scheduler.tiers.rates, part.store, by))
        opened.pop_all()
    say(f"memory {plan.budget}")
    if outline.far:
        say(f"long contexts: {outline.far}")
    longest, length = engine.scheduler.longest, outline.limits.max_length
    if longest < length:
        say(
            f"the longest request is {longest:,} tokens, less than the context of {length:,}: KV has no "
            "room for more"
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
    )


def follow(seat: "Seat", config: Config, what: Path | Shape, override: Override) -> None:
    """Do all that another rank does, in a process of its own: build its part of the model, and then do what
    rank 0 says."""
    from penstock.worker.rank import serve

    with ExitStack() as opened:
        device = device_of(config, seat.local)
        share_threads(device, seat.ranks)
        model = open_described(what, config.cache.expanduser())
        group = seat.group(device)
        shard = Shard(seat.rank, seat.ranks)
        try:
            context = BootContext(override=override)
            part = _build(config, model, Place(device, shard, group), opened, context)
            serve(seat.receive, part.runner, group)
        except BaseException:
            group.abort()  # As in rank 0.
            raise
        opened.pop_all()


def _team(
    config: Config, model: Model, opened: ExitStack, context: BootContext
) -> "tuple[_Part, Leader, torch.device]":
    """Rank 0's part, all ranks as one, and its device. The processes of the others have been started, unless
    torchrun has."""
    from penstock.parallel.launch import launch
    from penstock.worker.rank import Leader

    last = opened.enter_context(ExitStack())  # Closed when all the others are.
    crew = launch(config.tensor_parallel, follow, config, described(model), context.override)
    opened.callback(crew.close)
    try:
        device = device_of(config, crew.local)
        last.callback(share_threads(device, crew.ranks))
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
    """One rank's part of the model, ready to compute."""

    plan: BootPlan[LongRoom]
    runner: Runner
    weights: WeightStream
    root: bytes
    store: BlockStore | None


def _build(config: Config, model: Model, where: Place, opened: ExitStack, context: BootContext) -> _Part:
    """Build one rank's part, which is closed with `opened`. Every rank builds its part in the same steps,
    since ranks compute together when the largest step is measured."""
    with plain_torch(not config.kernels):
        device, say = where.device, context.say
        opened.callback(lift_cap, device)
        prepare(device)
        if device.type == "cuda" and not kernels_of(device):
            why = "since there is no Triton" if config.kernels else "as asked"
            say(f"kernels: none of our own, {why}; plain torch computes")
        outline = where.agree(settle(config, model, device, say, where.shard))
        native = device.type == "cpu" and config.kernels and outline.spec.format != DENSE
        if native and (why := find_library(config.cache.expanduser())):
            say(f"kernels for weights of few bits: none, plain torch computes much slower: {why}")
        collectives = where.collectives(outline.spec, outline.dtype)
        if collectives is not None and device.type == "cuda":
            few = f"of up to {collectives.rows} rows in one launch, " if collectives.rows else ""
            say(f"sums over ranks: {few}by NCCL")
        agree = where.group.follow if where.group else None
        runner = make_runner(outline, device, collectives, agree=agree, guide=context.guide)
        opened.callback(runner.detach)

        def ahead(early: bool) -> None:
            blank = partial(blank_runner, outline, device, collectives, early=early)
            compile_ahead(blank, device, outline.sizes, recorded=outline.recorded)

        taken = left_by(device, partial(ahead, outline.early)) + (collectives.bytes if collectives else 0)
        taken += activation_peak(outline, runner, device) + outline.beside
        placed = place(outline, taken, model, device, context)
        weights = make_weights(placed, device, context.trace)
        opened.callback(weights.close)
        blocks = where.least(placed.plan.budget.blocks)
        if isinstance(model, Checkpoint) and outlives(outline):
            model.identify()  # Its files are hashed while the same bytes are loaded.
        weights.load(context.loading)
        root = root_of(config, model, outline, say, blocks=blocks)
        carrier = store = None
        if outline.far:
            store = open_store(model, outline, root, say)
            carrier = make_carrier(outline.far, device, context.trace, store)
            opened.callback(carrier.close)
        # Behind loading, so that nobody goes on without a rank that failed there.
        plan = placed.plan.agreed(blocks, where.least(placed.plan.rest))
        if plan.compile_again:
            ahead(plan.early)  # Of what was compiled before, hardly anything will be launched.
            give_back(device)
        pool = KVPool(outline.kv, blocks, device)
        runner.attach(weights, pool, carrier, early=plan.early)
        runner.bound_heap(plan.budget.activations // 8)
        _record(plan, runner, say)
        if where.group is not None:
            where.group.check()
        return _Part(plan, runner, weights, root, store)


def _record(plan: BootPlan[LongRoom], runner: Runner, say: Say) -> None:
    """Record what the plan says as CUDA graphs."""
    outline = plan.outline
    if not plan.recorded:
        if outline.hardware.cuda and outline.settings.graphs:
            say(f"graphs: none; every kernel is launched by itself, since {plan.graph_blocker}")
        return
    limits = outline.limits
    graphs = runner.record(
        limits.max_sequences, limits.max_step_tokens, limits.max_length, record_runs=plan.record_runs
    )
    counts, runs = graphs.counts, graphs.runs
    prompts = (
        f", and prompts of up to {runs[0]} tokens, {len(runs)} of them" if runs and plan.record_runs else ""
    )
    say(
        f"graphs: decode steps of 1 to {counts[0]} rows, {len(counts)} of them{prompts}, recorded in "
        f"{graphs.seconds:.2f} s, "
        f"{format_size(graphs.bytes)}"
    )
