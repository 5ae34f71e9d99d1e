"""Ranks as threads, each with its own part of weights and KV, which compute together what one does alone."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Barrier, BrokenBarrierError

import torch
from torch import Tensor

import tiny
from penstock.arch.layout import GroupKind, GroupLayout, group_layouts, kv_layout, state_layout
from penstock.arch.shards import Shard
from penstock.arch.spec import MoeSpec
from penstock.kv.movement.pool import KVPool, StatePool
from penstock.models.decoder import Decoder
from penstock.ops.kernels import plain_torch
from penstock.ops.norm import add_rms_norm
from penstock.ops.row_classes import CLASSES
from penstock.step.plan import BlockId, Plan, Row, Share, ShareKind
from penstock.weights.checkpoint.reader import Checkpoint
from penstock.weights.streaming.beside import RowSpec, share_passes
from penstock.weights.streaming.residency import CpuWork, WeightLimits, padded
from penstock.weights.streaming.ring import StreamRates
from penstock.weights.streaming.solver import solve_model
from penstock.weights.streaming.source import CheckpointSource, Sources
from penstock.weights.streaming.source import WeightSource as Bytes
from penstock.weights.streaming.stream import WeightStream
from penstock.worker.inputs import InputBuilder
from penstock.worker.runner import decode_rows
from penstock.worker.tables import BlockTables

CPU = torch.device("cpu")
BLOCK, PAGES = 8, 16
RATES = StreamRates(host_to_device=1e9, disk_to_host=1e9, device_read=1e10)


class Meeting:
    """Where ranks exchange tensors. If one of them fails, none waits for it."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.barrier = Barrier(ranks, timeout=60)
        self.brought: list[Tensor | None] = [None] * ranks


@dataclass
class Member:
    """The collectives of one rank."""

    meeting: Meeting
    rank: int
    sums: int = 0
    gathers: int = 0
    few: int = 0
    """Sums of a few numbers a row."""

    def all_reduce(self, x: Tensor) -> None:
        assert x.is_contiguous()
        self.sums += 1
        first, *others = self._exchange(x)
        total = first.clone()
        for other in others:
            total += other
        self.meeting.barrier.wait()  # Before anyone writes, all have read.
        x.copy_(total)

    def all_reduce_few(self, x: Tensor) -> None:
        self.all_reduce(x)
        self.sums -= 1
        self.few += 1

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        self.all_reduce(x)
        return add_rms_norm(x, residual, weight, eps)

    def gather(self, x: Tensor) -> Tensor:
        self.gathers += 1
        whole = torch.cat(self._exchange(x), dim=-1)
        self.meeting.barrier.wait()
        return whole

    def _exchange(self, x: Tensor) -> list[Tensor]:
        self.meeting.brought[self.rank] = x
        self.meeting.barrier.wait()
        return [part for part in self.meeting.brought if part is not None]


@dataclass
class Rank:
    """One rank of `shard.ranks`, or all of the model without one."""

    model: Checkpoint
    shard: Shard | None = None
    member: Member | None = None
    dtype: str = "float32"
    change: Callable[[GroupLayout], GroupLayout] = lambda layout: layout
    source: Bytes | None = None
    part: float = 1.0
    """Of the weights, as much is on the device."""
    copies: bool = False
    """Whether experts on the device are copies, about which it decides by itself."""
    cpu: bool = False
    """Whether the CPU computes some of those that the device lacks; of a model without experts, some of the
    feed-forwards in steps of few decode rows."""
    kernels: bool = True
    """Whether our own kernels compute."""
    weights: WeightStream = field(init=False)
    pool: KVPool = field(init=False)

    def __post_init__(self) -> None:
        spec = self.model.spec
        layouts = tuple(map(self.change, group_layouts(spec, self.model.names, self.dtype, self.shard)))
        total = sum(map(padded, layouts))
        least = max(map(padded, layouts)) * 3
        sizes = [padded(layout) for layout in layouts if layout.id.kind is GroupKind.EXPERT]
        host = total + len(sizes) * max(sizes, default=0) - sum(sizes)  # Slots are of one size.
        room = total if self.part == 1 else max(int(self.part * total), least)
        limits = WeightLimits(room, host, copies=self.copies)
        placement, experts, _ = solve_model(layouts, spec.tied_embeddings, limits, RATES, disk=False)
        if self.cpu and experts is None:
            rows = RowSpec(spec.hidden_size, self.dtype, always=True)
            placement = share_passes(placement, limits, replace(RATES, cpu_read=(2e9,) * CLASSES), rows)
            assert placement.cpu is not None, "none rests on the host"
        elif self.cpu:
            assert experts is not None, "all are on the device"
            mixtures = [layer.feed_forward for layer in spec.stack if isinstance(layer.feed_forward, MoeSpec)]
            activations, top_k = tuple(one.activation for one in mixtures), mixtures[0].top_k
            work = CpuWork(activations, top_k, spec.hidden_size, self.dtype, always=True)
            experts = replace(experts, cpu=work)
        source = self.source or CheckpointSource(self.model)
        self.weights = WeightStream(placement, layouts, Sources(source, source), CPU, experts=experts)
        state = StatePool(state_layout(spec, self.dtype, self.shard), 4, CPU) if spec.has_state else None
        self.pool = KVPool(kv_layout(spec, self.dtype, BLOCK, self.shard), PAGES, CPU, state)
        self._inputs = InputBuilder(spec, CPU, BlockTables(4, 8, CPU), block_size=BLOCK)
        self._decoder = Decoder(spec, self.shard, self.member, dtype=getattr(torch, self.dtype))

    def load(self) -> None:
        self.weights.load()

    @torch.inference_mode()
    def run(self, plans: Sequence[Plan]) -> list[Tensor]:
        """The logits that each plan asks for, `[rows, vocab]`: those of samples, then those of prompts."""
        with plain_torch(not self.kernels):
            return [self._pass(plan) for plan in plans]

    def _pass(self, plan: Plan) -> Tensor:
        step = self._inputs.build(plan, torch.zeros(4, dtype=torch.int64))
        self.weights.turn(decode_rows(plan))
        hidden = self._decoder.forward(self.weights, self.pool.layers, step.inputs)
        with self._decoder.head(self.weights, hidden) as logits_of:
            parts = [
                logits_of(part).float() for part in (slice(step.samples), slice(step.samples, len(hidden)))
            ]
        self.weights.end_pass()
        assert all(part.dtype is torch.float32 for part in parts)
        return torch.cat(parts)


def together(ranks: Sequence[Rank], plans: Sequence[Plan]) -> list[list[Tensor]]:
    """What each rank finds. Raises what the first that failed did."""
    meeting = ranks[0].member.meeting if ranks[0].member else Meeting(1)

    def run(rank: Rank) -> list[Tensor]:
        try:
            rank.load()
            return rank.run(plans)
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(len(ranks)) as pool:
        running = [pool.submit(run, rank) for rank in ranks]
    errors = [error for each in running if (error := each.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, BrokenBarrierError)):
        raise error
    return [each.result() for each in running]


def pass_of(
    path: Path, ranks: int, *, plans: Sequence[Plan] | None = None, check: bool = True, **settings: object
) -> list[Tensor]:
    """The logits that ranks find together, the same for all; without ranks, those of one that knows of no
    others."""
    plans = steps() if plans is None else plans
    with ExitStack() as opened:
        meeting, those = Meeting(ranks), list[Rank]()
        for rank in range(max(ranks, 1)):
            model = opened.enter_context(Checkpoint.open(path))
            shard, member = (Shard(rank, ranks), Member(meeting, rank)) if ranks else (None, None)
            own = {
                name: value[rank] if isinstance(value, list) else value for name, value in settings.items()
            }
            those.append(Rank(model, shard, member, **own))  # type: ignore[arg-type]
            opened.callback(those[-1].weights.close)
        first, *others = together(those, plans)
        spec = model.spec
        for other in others:
            assert all(map(torch.equal, first, other))
        for rank in those if ranks > 1 else ():
            assert rank.member is not None
            assert (rank.member.sums, rank.member.gathers) == (
                len(plans) * (1 + 2 * spec.layers),
                2 * len(plans),
            )
            joint = [getattr(layer.mixer, "normed_together", None) for layer in spec.stack]
            assert rank.member.few == len(plans) * (spec.layers - joint.count(None))
            stats = rank.weights.stats()
            assert stats.streams == ("part" in settings)
        if ranks == 1 and those[0].member:
            assert (those[0].member.sums, those[0].member.gathers) == (0, 0)
    return first


def steps() -> list[Plan]:
    """Three requests: two prompts and a chunk of a third; a token of each and the chunk's rest; a token of
    all. All logits are wanted."""
    text = [token for prompt in tiny.prompts()[1:4] for token in prompt]
    long, short, middle = text[18:50], text[:5], text[5:18]
    return [
        Plan((), (share(0, short, 0), share(1, middle, 0), share(2, long[:20], 0))),
        Plan((), (share(0, [60], 5), share(1, [3], 13), share(2, long[20:], 20))),
        Plan((), (share(0, [96], 6), share(1, [47], 14), share(2, [48], 32))),
    ]


def share(row: int, tokens: Sequence[int], start: int) -> Share:
    begin, stop = -(-start // BLOCK), -(-(start + len(tokens)) // BLOCK)
    blocks = tuple(BlockId(5 * row + block) for block in range(begin, stop))
    asked = tuple(tokens[1:])
    return Share(
        Row(row),
        start,
        tuple(tokens),
        begin,
        blocks,
        sample=True,
        prompt_length=(5, 13, 32)[row],
        next_prompt_tokens=asked,
        kind=ShareKind.DECODE if len(tokens) == 1 else ShareKind.CHUNK,
    )
