"""Builds an engine from a Config: finds out what there is, sizes everything, constructs the parts. It decides
no policy of its own."""

import json
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from penstock.arch.bounds import doubles_at
from penstock.arch.shards import Shard
from penstock.arch.spec import DTYPE_BYTES, LayerSpec, ModelSpec, RopeKind
from penstock.base.config import Config
from penstock.base.errors import BudgetError, DeviceError
from penstock.base.trace import Trace
from penstock.base.units import format_size
from penstock.engine.budget import Budget, Demand, divide, least_activations, on_heap, weights_room
from penstock.engine.contexts import LongRoom, keeps
from penstock.engine.engine import Engine, Ranks
from penstock.engine.placing import Model, Override, Placed, Say, place
from penstock.engine.settling import Settled, settle
from penstock.engine.team import (
    Place,
    described,
    device_of,
    open_described,
    share_threads,
    team_config,
)
from penstock.kv.ledger.blocks import BlockLedger
from penstock.kv.ledger.disk import DiskLedger
from penstock.kv.ledger.host import HostLedger
from penstock.kv.ledger.keys import root_key
from penstock.kv.movement.carrier import Carrier, Streams
from penstock.kv.movement.pool import KVPool
from penstock.kv.store.blocks import BlockStore
from penstock.kv.store.seal import secret_in
from penstock.kv.store.segments import StoreLocked
from penstock.memory.device import (
    choose_device,
    give_back,
    left_by,
    library_buffers,
    lift_cap,
    peak_of,
    shortage,
)
from penstock.memory.streams import streams_both_ways
from penstock.models.decoder import Decoder
from penstock.models.inputs import Collectives as Reduces
from penstock.ops.attention.attend import scratch_bytes
from penstock.ops.attention.gathered import PAST_TILE
from penstock.ops.kernels import kernels_of, plain_torch
from penstock.sched.rates import Rates
from penstock.sched.rules import Limits, PrefixRule
from penstock.sched.scheduler import Scheduler, Storage
from penstock.sched.tiers import Store
from penstock.weights.checkpoint.reader import Checkpoint
from penstock.weights.checkpoint.shape import Shape
from penstock.weights.streaming.loading import Loading, counted
from penstock.weights.streaming.residency import padded
from penstock.weights.streaming.stream import Blank, WeightStream
from penstock.weights.streaming.waits import Waits
from penstock.worker.ahead import compile_ahead, prepare
from penstock.worker.collectives import Collectives, Unsummed
from penstock.worker.graphs import begins_early, graph_bytes, why_not
from penstock.worker.inputs import InputBuilder
from penstock.worker.runner import Runner
from penstock.worker.sampler import Sampler
from penstock.worker.structures import Guide
from penstock.worker.warmup import StepSizes, largest_step

if TYPE_CHECKING:  # Needed by several ranks alone.
    from penstock.parallel.seat import Seat
    from penstock.worker.rank import Leader


@dataclass(frozen=True, slots=True)
class Booted:
    """An engine and the facts that were found or derived on the way."""

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
    """Everything from a frozen Config and an open checkpoint or pack to a running engine. `say` is told what
    was decided. Without a `guide` outputs have no structure.

    Of a Shape the weights are random. config.model is not looked at: the model has been found by now. A pack
    is closed with the engine. Raises PenstockErrors: DeviceError, ConfigError, BudgetError, CheckpointError.
    """
    begin = time.perf_counter()
    with ExitStack() as opened:  # closed if anything fails; afterwards the engine closes it
        if config.tensor_parallel == 1:
            part = _part(
                config,
                model,
                Place(choose_device(config.device)),
                opened,
                say,
                trace,
                override,
                loading,
                guide,
            )
            ranks: Ranks = part.runner
        else:
            part, ranks = _team(
                team_config(config, model), model, opened, say, trace, override, loading, guide
            )
        settled, budget, far = part.settled, part.budget, part.settled.far
        scheduler = _scheduler(config, settled, budget, part.root, part.store)
        engine = Engine(scheduler, ranks, _notes(scheduler.tiers.rates, part, ranks=config.tensor_parallel))
        opened.pop_all()
    say(f"memory {budget}")
    if far:
        say(f"long contexts: {far}")
    longest, length = engine.scheduler.longest, settled.limits.max_length
    if longest < length:
        say(
            f"the longest request is {longest:,} tokens, less than the context of {length:,}: KV has no "
            "room for more"
        )
    return Booted(
        engine,
        settled.spec,
        settled.device,
        settled.dtype,
        budget,
        settled.limits,
        part.weights,
        time.perf_counter() - begin,
    )


def follow(seat: "Seat", config: Config, what: Path | Shape, override: Override | None) -> None:
    """All that another rank does, in a process of its own: its part of the model, and then what rank 0
    says."""
    from penstock.worker.rank import serve

    with ExitStack() as opened:
        device = device_of(config, seat.local)
        share_threads(device, seat.ranks)
        model = open_described(what, config.cache.expanduser())
        group = seat.group(device)
        try:
            part = _part(
                config,
                model,
                Place(device, Shard(seat.rank, seat.ranks), group),
                opened,
                lambda _: None,
                None,
                override,
                None,
            )
            serve(seat.receive, part.runner, group)
        except BaseException:
            group.abort()  # As in rank 0.
            raise
        opened.pop_all()


def _team(
    config: Config,
    model: Model,
    opened: ExitStack,
    say: Say,
    trace: Trace | None,
    override: Override | None,
    loading: Loading | None,
    guide: Guide | None,
) -> "tuple[_Part, Leader]":
    """Rank 0's part, and all ranks as one. The processes of the others have been started, unless torchrun
    has."""
    from penstock.parallel.launch import launch
    from penstock.worker.rank import Leader

    last = opened.enter_context(ExitStack())  # Closed when all the others are.
    crew = launch(config.tensor_parallel, follow, config, described(model), override)
    opened.callback(crew.close)
    try:
        device = device_of(config, crew.local)
        last.callback(share_threads(device, crew.ranks))
        group = crew.group(device)
        opened.callback(group.close)
        place = Place(device, Shard(0, crew.ranks), group, last)
        try:
            part = _part(config, model, place, opened, say, trace, override, loading, guide)
        except BaseException:
            group.abort()  # What waits on a device for others would keep it from being tidied up.
            raise
    except Exception as fault:
        told = crew.verdict(fault) if isinstance(fault, DeviceError) else fault
        if told is fault:
            raise
        raise told from fault
    say(
        f"tensor parallel: {crew.ranks} ranks, this one with "
        f"{format_size(part.weights.bytes + part.weights.host_bytes)} of weights"
    )
    return part, Leader(part.runner, crew, group, last.close)


@dataclass(frozen=True, slots=True)
class _Part:
    """One rank's part of the model, ready to compute."""

    settled: Settled
    runner: Runner
    weights: WeightStream
    budget: Budget
    root: bytes
    store: BlockStore | None


def _part(
    config: Config,
    model: Model,
    place: Place,
    opened: ExitStack,
    say: Say,
    trace: Trace | None,
    override: Override | None,
    loading: Loading | None,
    guide: Guide | None = None,
) -> _Part:
    """Closed with `opened`. Every rank's is made in the same steps, since they compute together when the
    largest step is measured."""
    with plain_torch(not config.kernels):
        return _made(config, model, place, opened, say, trace, override, loading, guide)


def _made(
    config: Config,
    model: Model,
    place: Place,
    opened: ExitStack,
    say: Say,
    trace: Trace | None,
    override: Override | None,
    loading: Loading | None,
    guide: Guide | None,
) -> _Part:
    device = place.device
    opened.callback(lift_cap, device)
    prepare(device)
    if device.type == "cuda" and not kernels_of(device):
        say(
            f"kernels: none of our own, {'since there is no Triton' if config.kernels else 'as asked'}; "
            "plain torch computes"
        )
    settled = settle(config, model, device, say, place.shard)
    collectives = place.collectives(settled.spec, settled.dtype)
    if collectives is not None and device.type == "cuda":
        say(
            "sums over ranks: "
            f"{f'of up to {collectives.rows} rows in one launch, ' if collectives.rows else ''}by NCCL"
        )
    agree = place.group.follow if place.group else None
    runner = _runner(settled, collectives, agree=agree, guide=guide, kernels=config.kernels)
    opened.callback(runner.detach)
    recorded = _may_record(config, settled)

    def ahead(early: bool) -> None:
        blank = partial(_blank_runner, settled, collectives, early=early)
        compile_ahead(blank, device, _sizes(settled), recorded=recorded)

    kept = left_by(device, partial(ahead, _early(settled)))
    demand = _demand(config, settled, runner, taken=kept + (collectives.bytes if collectives else 0))
    placed = _placed(config, model, settled, demand, say=say, override=override, loading=loading)
    weights = _weights(settled, placed, trace)
    opened.callback(weights.close)
    budget = divide(settled.total, weights.bytes + placed.beside, demand)
    budget = replace(budget, blocks=place.least(budget.blocks))
    carrier, store, far = None, None, settled.far
    if isinstance(model, Checkpoint) and _outlives(settled):
        model.identify()  # Its files are hashed while the same bytes are loaded.
    weights.load(loading)
    root = _root(config, model, settled, say, blocks=budget.blocks)
    if far:
        carrier = _carrier(far, device, trace, store := _store(config, model, settled, root, say))
        opened.callback(carrier.close)
    rest = place.least(weights.experts_rest + weights.all_stay)
    early = rest > 1 and begins_early(device)
    if early != _early(settled):
        ahead(early)  # Of what was compiled before, hardly anything will be launched.
        give_back(device)
    runner.attach(weights, KVPool(settled.kv, budget.blocks, device), carrier, early=early)
    runner.bound_heap(budget.activations // 8)
    _record(config, settled, runner, say, experts_rest=rest > 0, all_stay=rest > 1)
    if place.group is not None:
        place.group.check()
    return _Part(settled, runner, weights, budget, root, store)


def _runner(
    settled: Settled,
    collectives: Reduces | None,
    *,
    agree: Callable[[torch.Tensor], None] | None = None,
    guide: Guide | None = None,
    kernels: bool = True,
) -> Runner:
    """Return a runner without weights and KV, which are attached when there are any."""
    spec, limits, far, device = settled.spec, settled.limits, settled.far, settled.device
    policies = far.policies if far else None
    inputs = InputBuilder(
        spec,
        device,
        rows=limits.max_sequences,
        blocks_per_row=settled.blocks_per_row,
        block_size=limits.block_size,
        tile_tokens=far.tile_tokens if far else PAST_TILE,
        choosing=(bool(policies and policies.rows), bool(policies and policies.runs)),
    )
    decoder = Decoder(spec, settled.shard, collectives)
    sampler = Sampler(spec.vocab_size, limits.max_sequences, device, agree, guide)
    return Runner(decoder, inputs, sampler, device, kernels=kernels)


def _record(
    config: Config, settled: Settled, runner: Runner, say: Say, *, experts_rest: bool, all_stay: bool
) -> None:
    """Graphs of decode steps, where there may be any, and of short prompts where the host would hold them up:
    not where weights stream. experts_rest, all_stay: on the devices of all ranks, which record alike or not
    at all."""
    device, limits = settled.device, settled.limits
    if device.type != "cuda" or not config.graphs:
        return
    reason = why_not(settled.spec, device, experts_rest=experts_rest)
    if reason:
        say(f"graphs: none; every kernel is launched by itself, since {reason}")
        return
    graphs = runner.record(
        limits.max_sequences, limits.max_step_tokens, limits.max_length, record_runs=all_stay
    )
    counts, runs = graphs.counts, graphs.runs
    prompts = f", and prompts of up to {runs[0]} tokens, {len(runs)} of them" if runs and all_stay else ""
    say(
        f"graphs: decode steps of 1 to {counts[0]} rows, {len(counts)} of them{prompts}, recorded in "
        f"{graphs.seconds:.2f} s, "
        f"{format_size(graphs.bytes)}"
    )


def _may_record(config: Config, settled: Settled) -> bool:
    """Whether steps are recorded if all weights rest where they may."""
    return config.graphs and why_not(settled.spec, settled.device, experts_rest=settled.may_rest) is None


def _demand(config: Config, settled: Settled, runner: Runner, *, taken: int) -> Demand:
    """taken: bytes of the device, beside what passes through a step."""
    limits, far = settled.limits, settled.far
    graphs = 0
    if _may_record(config, settled):
        graphs = graph_bytes(
            settled.spec,
            settled.dtype,
            limits.max_sequences,
            limits.max_step_tokens if settled.may_rest else 0,
        )
    return Demand(
        activations=_activation_peak(settled, runner) + (far.device_bytes if far else 0) + graphs + taken,
        block_bytes=settled.kv.block_bytes,
        block_size=limits.block_size,
        useful_blocks=limits.max_sequences * settled.blocks_per_row,
        fixed_blocks=config.kv_blocks,
        length=None if far else config.max_length,
    )


def _early(settled: Settled) -> bool:
    """Whether kernels will most likely begin before the one before has ended."""
    return settled.may_rest and begins_early(settled.device)


def _activation_peak(settled: Settled, runner: Runner) -> int:
    """Bytes the largest step takes, measured by running it through one layer of each kind: the others take
    the same again.

    On CUDA through two of each kind: what the first leaves to its successor lies elsewhere in the allocator's
    memory. Routings of a mixture need not be tried: what its rows take is allocated by the number of tokens
    alone.

    On a CPU tensors are counted, twice: a heap from which tensors of other sizes have come and gone was seen
    to grow to 1.75 times what one step takes, and holes go back only after a step (see Heap). Beside them
    count HEAP, since it grew by 4 MiB however little a step takes, and what libraries take once and keep. No
    part of this is read from the process's pages, so the same settings on the same machine give the same
    bytes in any process.
    """
    spec, limits, far, device = settled.spec, settled.limits, settled.far, settled.device
    sizes, layers = _sizes(settled), _layer_kinds(spec, 2 if device.type == "cuda" else 1)
    peak = least_activations(spec, settled.dtype, limits.max_step_tokens, limits.max_sequences)
    for room in (None, far) if far else (None,):
        carrier = _carrier(replace(room, blocks=1, disk=None), device, None, None) if room else None
        try:
            runner.attach(
                Blank(settled.layouts, device),
                KVPool(settled.kv, 1, device),
                carrier,
                early=_early(settled),
            )
            plan = largest_step(sizes, past=room.tile_tokens if room else PAST_TILE, cold=room is not None)
            peak = max(peak, _peak(device, partial(runner.run, plan, layers)))
        finally:
            runner.detach()
            if carrier is not None:
                carrier.close()
        del carrier
        give_back(device)
    # Long contexts take more for partial results of attention than the steps above, which are short.
    element = DTYPE_BYTES[settled.dtype]
    beside = scratch_bytes(spec.heads, spec.kv_heads, spec.head_dim, element, limits.block_size, device)
    return peak + beside if device.type == "cuda" else on_heap(peak, library_buffers(device))


def _blank_runner(settled: Settled, collectives: Collectives | None, *, early: bool) -> Runner:
    """Return a runner over blank weights and one block of KV, which waits for no other rank. Its model ends a
    layer behind the first of the last kind: a last layer computes less than others."""
    spec = settled.spec
    layers = min(_layer_kinds(spec)[-1] + 2, spec.layers)
    short = replace(spec, stack=spec.stack[:layers])
    unsummed = Unsummed(collectives) if collectives else None
    runner = _runner(replace(settled, spec=short), unsummed)
    weights = Blank(settled.layouts, settled.device)
    runner.attach(weights, KVPool(settled.kv, 1, settled.device), early=early)
    return runner


def _sizes(settled: Settled) -> StepSizes:
    limits = settled.limits
    return StepSizes(limits.max_step_tokens, limits.max_sequences, limits.max_length, limits.block_size)


def _layer_kinds(spec: ModelSpec, each: int = 1) -> tuple[int, ...]:
    """The first layers of each kind, as many as there are up to `each`."""
    kinds = dict[LayerSpec, list[int]]()
    for layer, kind in enumerate(spec.stack):
        kinds.setdefault(kind, []).append(layer)
    return tuple(sorted(layer for those in kinds.values() for layer in those[:each]))


def _peak(device: torch.device, work: Callable[[], object]) -> int:
    """Bytes that a step takes. Raises BudgetError if there is no memory for it, even without weights and
    KV."""
    try:
        return peak_of(device, work)
    except Exception as fault:
        if not (short := shortage(fault, device)):
            raise
    raise BudgetError(f"the largest step does not fit: {short}")


def _placed(
    config: Config,
    model: Model,
    settled: Settled,
    demand: Demand,
    *,
    say: Say,
    override: Override | None,
    loading: Loading | None,
) -> Placed:
    """Where weights rest, in what the demand leaves of the device."""
    layouts, far = settled.layouts, settled.far
    given = override is not None and override.limits is not None
    room = 0 if given else weights_room(settled.total, layouts, demand, host_is_device=settled.one_memory)
    return place(
        config,
        model,
        layouts,
        settled.dtype,
        settled.device,
        room,
        taken=far.host_bytes if far else 0,
        say=say,
        progress=counted("packing", sum(map(padded, layouts)), loading),
        override=override,
        shard=settled.shard,
    )


def _weights(settled: Settled, placed: Placed, trace: Trace | None) -> WeightStream:
    """Takes over what was placed, not loaded yet; if it cannot be made, that is closed."""
    try:
        return WeightStream(
            placed.placement,
            settled.layouts,
            placed.source,
            settled.device,
            disk=placed.disk,
            experts=placed.experts,
            rates=placed.rates,
            trace=trace,
        )
    except BaseException:
        placed.close()
        raise


def _carrier(far: LongRoom, device: torch.device, trace: Trace | None, store: BlockStore | None) -> Carrier:
    """Takes over the store; if it cannot be made, that is closed."""
    try:
        return Carrier(
            far.layout,
            far.blocks,
            far.tile_tokens,
            far.chunk_tokens,
            device,
            Streams(*streams_both_ways(device)),
            Waits(trace) if trace else None,
            far.disk,
            far.policies,
            store,
        )
    except BaseException:
        if store is not None:
            store.close()
        raise


def _store(config: Config, model: Model, settled: Settled, root: bytes, say: Say) -> BlockStore | None:
    """Of blocks that outlive the process, if there is room for any. Where another process writes it, it is
    only read."""
    far = settled.far
    if far is None or not far.store_bytes:
        return None
    directory, size = config.kv_directory.expanduser(), far.layout.block_bytes
    about = {
        "model": str(getattr(model, "path", settled.spec.family)),
        "family": settled.spec.family,
        "dtype": settled.dtype,
        "block_size": config.block_size,
        "layers": settled.spec.layers,
        "kv_heads": settled.spec.kv_heads,
        "head_dim": settled.spec.head_dim,
        "digest_of": "every byte of the weights, architecture and rope, dtype, layout of KV, attention "
        "policies",
    }
    secret = secret_in(config.cache.expanduser())
    try:
        store = BlockStore.open(directory, root, size, far.store_bytes, secret=secret, about=about)
    except StoreLocked:
        say(f"another process keeps KV in {directory}: what it has is read, and nothing is added")
        return BlockStore.open(directory, root, size, far.store_bytes, secret=secret, read_only=True)
    free = shutil.disk_usage(directory).free
    if store.stats.real_bytes + free < far.store_bytes:
        say(
            f"{directory} has {format_size(free)} free, less than blocks may take there: what does not fit "
            "is not kept"
        )
    return store


def _notes(rates: Rates, part: _Part, *, ranks: int) -> Callable[[], None] | None:
    """Rates begin where those of the process before have ended, if it kept blocks where this one does; what
    is to be done in the end so that the next can do the same."""
    store, device = part.store, part.settled.device
    if store is None:
        return None
    name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU, {torch.get_num_threads()} threads"
    )
    by = f"{ranks} x {name}, {'all' if part.weights.all_stay else 'some'} weights there"
    with suppress(ValueError, RecursionError, ArithmeticError):
        told = json.loads(store.noted())
        if isinstance(told, dict):
            rates.recall(told.get("rates"), steps=told.get("computed_by") == by)
    return lambda: store.note(json.dumps({"computed_by": by, "rates": rates.told()}).encode())


def _outlives(settled: Settled) -> bool:
    """Whether KV is kept where another process may find it, so that its name must tell the model from every
    other."""
    return settled.far is not None and settled.far.store_bytes > 0


def _root(
    config: Config, model: Model, settled: Settled, say: Say = lambda _: None, *, blocks: int = 0
) -> bytes:
    """The key that all KV keys begin with: a digest of all that the meaning of KV depends on but tokens. The
    weights are part of it only where KV outlives the process, since to know them every byte of a checkpoint
    is hashed. Raises CheckpointError.

    blocks: KV blocks of the device. Under a policy KV also depends on what is there, and not on the host, and
    on how it is cut."""
    fingerprint = b""
    if _outlives(settled):
        fingerprint = model.fingerprint()
        if isinstance(model, Checkpoint):
            found = model.digests()
            if found.hashed_bytes:
                lasting = f"; not remembered, since {found.forgettable}" if found.forgettable else ""
                say(
                    f"identity of the weights: {format_size(found.hashed_bytes)} hashed in "
                    f"{found.seconds:.2f} s{lasting}"
                )
            model.expect_unchanged()
    policies: tuple[object, ...] = config.attention_policy, config.prefill_policy, config.missed_limit
    far = settled.far
    if far is not None and far.policies is not None:
        policies += (
            config.sketch_bits,
            blocks,
            far.tile_tokens,
            far.chunk_tokens,
            settled.limits.max_step_tokens,
        )
    return root_key(
        fingerprint, settled.spec, settled.dtype, config.block_size, config.host_kv_dtype, policies
    )


def _scheduler(
    config: Config, settled: Settled, budget: Budget, root: bytes, store: BlockStore | None
) -> Scheduler:
    rope, far, size = settled.spec.rope, settled.far, config.block_size
    prefixes = PrefixRule(
        root, config.prefix_cache, rope.original_length if rope.kind is RopeKind.DYNAMIC else None
    )
    host = HostLedger(far.blocks + far.on_disk, far.on_disk, size) if far else None
    disk = None
    if store is not None:
        disk = DiskLedger(0 if store.read_only else store.capacity, store.keys(), size)
    kept: Store = "off"
    if far and keeps(config):
        kept = "lazy" if config.kv_store == "lazy" else "eager"
    return Scheduler(
        BlockLedger(budget.blocks),
        settled.limits,
        prefixes,
        Storage(host, disk, kept, alike=far is None or far.layout.rounded_from is None),
        doubles_at=doubles_at(settled.spec, settled.layouts)
        * settled.shard.ranks,  # Of matrices a rank has but a part.
        check=config.check,
    )
