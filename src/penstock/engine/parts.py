"""Constructs the parts of an engine from what was decided. It decides nothing."""

from collections.abc import Callable
from dataclasses import replace

import torch

from penstock.arch.bounds import doubles_at
from penstock.arch.layout import state_layout
from penstock.arch.spec import LayerSpec, ModelSpec, RopeKind
from penstock.base.trace import Trace
from penstock.engine.contexts import LongRoom, keeps
from penstock.engine.placing import PlacedWeights
from penstock.engine.plan import BootPlan
from penstock.engine.settling import Settled
from penstock.kv.ledger.blocks import BlockLedger
from penstock.kv.ledger.disk import DiskLedger
from penstock.kv.ledger.host import HostLedger
from penstock.kv.movement.carrier import Carrier, CarrierRoom
from penstock.kv.movement.pool import KVPool, StatePool
from penstock.kv.movement.tiles import Streams
from penstock.kv.store.blocks import BlockStore
from penstock.memory.streams import streams_both_ways
from penstock.models.decoder import Decoder
from penstock.models.draft_head import HeadDecoder
from penstock.models.inputs import Collectives
from penstock.ops.attention.gathered import PAST_TILE
from penstock.ops.attention.inputs import Scratch
from penstock.sched.drafter import SuffixDrafter
from penstock.sched.finished import FinishedOutputs
from penstock.sched.rules import PrefixRule
from penstock.sched.scheduler import Scheduler
from penstock.sched.speculation import Speculation
from penstock.sched.storage import Storage
from penstock.sched.tiers import Store
from penstock.weights.streaming.stream import WeightStream
from penstock.weights.streaming.views import Blank
from penstock.weights.streaming.waits import StreamWaits
from penstock.worker.adapters import RowAdapters
from penstock.worker.collectives import RankCollectives, Unsummed
from penstock.worker.inputs import InputBuilder
from penstock.worker.loaded import LoadedModel
from penstock.worker.runner import Runner
from penstock.worker.sampler import Sampler
from penstock.worker.sizes import prefix_blocker
from penstock.worker.structures import Guide
from penstock.worker.tables import BlockTables


def make_runner(
    settled: Settled,
    device: torch.device,
    *collectives: Collectives | None,
    agree: Callable[[torch.Tensor], None] | None = None,
    guide: Guide | None = None,
) -> Runner:
    """Return a runner without weights and KV, which are attached when there are any. collectives: for each
    model. agree, guide: as of `Sampler`."""
    spec, limits = settled.spec, settled.limits
    tables = BlockTables(limits.max_sequences, settled.blocks_per_row, device)
    sampler = Sampler(spec.vocab_size, limits.max_sequences, device, agree, guide)
    scratch = Scratch()
    # A request may begin for a draft head behind its first block, so it has tables of its own.
    apart = BlockTables(limits.max_sequences, settled.blocks_per_row, device)
    target, *drafts = (
        _make_model(
            one,
            device,
            sums,
            apart if one.head else tables,
            sampler if one is settled else sampler.for_drafts(same_bits=one.head is None),
            scratch,
        )
        for one, sums in zip(settled.models, collectives, strict=True)
    )
    return Runner(target, device, draft=next(iter(drafts), None), kernels=settled.settings.kernels)


def _make_model(
    settled: Settled,
    device: torch.device,
    collectives: Collectives | None,
    tables: BlockTables,
    sampler: Sampler,
    scratch: Scratch,
) -> LoadedModel:
    far = settled.far
    policies = far.policies if far else None
    inputs = InputBuilder(
        settled.spec,
        device,
        tables,
        block_size=settled.limits.block_size,
        tile_tokens=far.tile_tokens if far else PAST_TILE,
        choosing=(bool(policies and policies.rows), bool(policies and policies.runs)),
        scratch=scratch,
    )
    dtype: torch.dtype = getattr(torch, settled.dtype)
    adapters, rows = None, settled.limits.max_sequences
    if settled.lora is not None:
        like = torch.empty(0, dtype=dtype, device=device)
        adapters = RowAdapters(settled.spec, settled.shard, settled.lora, rows, like)
    decoder = Decoder(settled.spec, settled.shard, collectives, dtype=dtype)
    if settled.head is not None and settled.head.head is not None:
        like = torch.empty(0, dtype=dtype, device=device)
        decoder = HeadDecoder(settled.head.head, settled.head.ids, rows, like)
    return LoadedModel(decoder, inputs, sampler, adapters)


def blank_runner(
    settled: Settled, device: torch.device, collectives: RankCollectives | None, *, early: bool
) -> Runner:
    """Return a runner over blank weights and one block of KV on each side, which waits for no other rank. Its
    model ends a layer behind the first of the last kind: a last layer computes less than others. Its carrier,
    if it has one, is to be closed."""
    spec, far, size = settled.spec, settled.far, settled.limits.block_size
    if far is not None:
        far = replace(far, blocks=1, disk=None, tile_tokens=size, chunk_tokens=max(size, 2))
    layers = min(layer_kinds(spec)[-1] + 2, spec.layers)
    short = replace(spec, stack=spec.stack[:layers])
    unsummed = Unsummed(collectives) if collectives else None
    runner = make_runner(replace(settled, spec=short, far=far, draft=None, lora=None), device, unsummed)
    blank, pool = Blank(settled.layouts, device), make_pool(settled, 1, device)
    runner.attach(blank, pool, make_carrier(far, device) if far else None, early=early)
    return runner


def make_pool(outline: Settled, blocks: int, device: torch.device) -> KVPool:
    """Return a pool of so many KV blocks, and of the state of all sequences that may run, if there is any."""
    state = None
    if outline.spec.has_state:
        layout = state_layout(outline.spec, outline.dtype, outline.shard)
        state = StatePool(layout, outline.limits.max_sequences, device)
    # What has no place is written to the last block of a draft head.
    return KVPool(outline.kv, blocks + (outline.head is not None), device, state)


def layer_kinds(spec: ModelSpec, each: int = 1) -> tuple[int, ...]:
    """Return the first layers of each kind, up to `each` of them."""
    kinds = dict[LayerSpec, list[int]]()
    for layer, kind in enumerate(spec.stack):
        kinds.setdefault(kind, []).append(layer)
    return tuple(sorted(layer for those in kinds.values() for layer in those[:each]))


def make_weights(placed: PlacedWeights, device: torch.device, trace: Trace | None) -> WeightStream:
    """Return the placed weights, not loaded yet.

    It takes over their sources, and closes them if it fails.
    """
    plan = placed.plan
    try:
        return WeightStream(
            plan.placement,
            plan.outline.layouts,
            placed.sources,
            device,
            experts=plan.experts,
            rates=placed.rates,
            trace=trace,
        )
    except BaseException:
        placed.sources.close()
        raise


def make_carrier(
    far: LongRoom,
    device: torch.device,
    trace: Trace | None = None,
    store: BlockStore | None = None,
    sum_ranks: Callable[[torch.Tensor], object] | None = None,
) -> Carrier:
    """Return what moves KV between the device and the host. It takes over the store; if it cannot be made,
    that is closed. sum_ranks: see `Chosen`; None without other ranks."""
    try:
        room = CarrierRoom(far.layout, far.blocks, far.tile_tokens, far.chunk_tokens, far.disk, far.policies)
        streams = Streams(*streams_both_ways(device))
        carrier = Carrier(room, device, streams, StreamWaits(trace) if trace else None, store)
    except BaseException:
        if store is not None:
            store.close()
        raise
    if carrier.chosen is not None and sum_ranks is not None:
        carrier.chosen.sum_ranks = sum_ranks
    return carrier


def make_scheduler(plan: BootPlan[LongRoom], root: bytes, disk: DiskLedger | None) -> Scheduler:
    """Return a scheduler over the plan's KV blocks. root: root of all KV keys."""
    outline, config = plan.outline, plan.outline.settings
    rope, far, size = outline.spec.rope, outline.far, config.block_size
    prefixes = PrefixRule(
        root,
        config.prefix_cache and prefix_blocker(outline.spec) is None,
        rope.original_length if rope.kind is RopeKind.DYNAMIC else None,
    )
    host = HostLedger(far.blocks + far.on_disk, far.on_disk, size) if far else None
    kept: Store = "off"
    if far and keeps(config, outline.spec):
        kept = "lazy" if config.kv_store == "lazy" else "eager"
    most = config.suffix_decoding_max_cached_requests
    outputs = FinishedOutputs(most) if most else None
    return Scheduler(
        BlockLedger(plan.budget.blocks),
        outline.limits,
        prefixes,
        Storage(host, disk, kept, alike=far is None or far.layout.rounded_from is None),
        doubles_at=doubles_at(outline.spec, outline.layouts)
        * outline.shard.ranks,  # Of matrices a rank has but a part.
        speculation=None
        if config.speculate == "off"
        else Speculation(SuffixDrafter(outputs), vocabulary=outline.spec.vocab_size),
        check=config.check,
    )
