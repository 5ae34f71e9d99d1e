"""Constructs the parts of an engine from what was decided. It decides nothing."""

from collections.abc import Callable
from dataclasses import replace

import torch

from penstock.arch.bounds import doubles_at
from penstock.arch.spec import LayerSpec, ModelSpec, RopeKind
from penstock.base.trace import Trace
from penstock.engine.contexts import LongRoom, keeps
from penstock.engine.placing import PlacedWeights
from penstock.engine.plan import BootPlan
from penstock.engine.settling import Settled
from penstock.kv.ledger.blocks import BlockLedger
from penstock.kv.ledger.disk import DiskLedger
from penstock.kv.ledger.host import HostLedger
from penstock.kv.movement.carrier import Carrier, Streams
from penstock.kv.movement.pool import KVPool
from penstock.kv.store.blocks import BlockStore
from penstock.memory.streams import streams_both_ways
from penstock.models.decoder import Decoder
from penstock.models.inputs import Collectives
from penstock.ops.attention.gathered import PAST_TILE
from penstock.sched.rules import PrefixRule
from penstock.sched.scheduler import Scheduler, Storage
from penstock.sched.tiers import Store
from penstock.weights.streaming.stream import Blank, WeightStream
from penstock.weights.streaming.waits import Waits
from penstock.worker.collectives import RankCollectives, Unsummed
from penstock.worker.inputs import InputBuilder
from penstock.worker.runner import Runner
from penstock.worker.sampler import Sampler
from penstock.worker.structures import Guide


def make_runner(
    settled: Settled,
    device: torch.device,
    collectives: Collectives | None,
    *,
    agree: Callable[[torch.Tensor], None] | None = None,
    guide: Guide | None = None,
) -> Runner:
    """Return a runner without weights and KV, which are attached later. agree, guide: as for `Sampler`."""
    spec, limits, far = settled.spec, settled.limits, settled.far
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
    return Runner(decoder, inputs, sampler, device, kernels=settled.settings.kernels)


def blank_runner(
    settled: Settled, device: torch.device, collectives: RankCollectives | None, *, early: bool
) -> Runner:
    """Return a runner over blank weights and one block of KV, which waits for no other rank.

    Its model ends one layer behind the first of the last kind, since a last layer computes less than others.
    """
    spec = settled.spec
    layers = min(layer_kinds(spec)[-1] + 2, spec.layers)
    short = replace(spec, stack=spec.stack[:layers])
    unsummed = Unsummed(collectives) if collectives else None
    runner = make_runner(replace(settled, spec=short), device, unsummed)
    runner.attach(Blank(settled.layouts, device), KVPool(settled.kv, 1, device), early=early)
    return runner


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
            placed.source,
            device,
            disk=placed.disk,
            experts=plan.experts,
            rates=placed.rates,
            trace=trace,
        )
    except BaseException:
        placed.close()
        raise


def make_carrier(
    far: LongRoom, device: torch.device, trace: Trace | None = None, store: BlockStore | None = None
) -> Carrier:
    """Return the carrier of KV between device and host.

    It takes over the store, and closes it if it fails.
    """
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


def make_scheduler(plan: BootPlan[LongRoom], root: bytes, store: BlockStore | None) -> Scheduler:
    """Return a scheduler over the plan's KV blocks. root: root of all KV keys."""
    outline, config = plan.outline, plan.outline.settings
    rope, far, size = outline.spec.rope, outline.far, config.block_size
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
    storage = Storage(host, disk, kept, alike=far is None or far.layout.rounded_from is None)
    # The layouts have only this rank's part of each matrix.
    doubles = doubles_at(outline.spec, outline.layouts) * outline.shard.ranks
    return Scheduler(
        BlockLedger(plan.budget.blocks),
        outline.limits,
        prefixes,
        storage,
        doubles_at=doubles,
        check=config.check,
    )
