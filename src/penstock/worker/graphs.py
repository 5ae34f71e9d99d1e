"""Decode steps recorded once as CUDA graphs: a step is then one copy of a few numbers and one launch, or one for each group that streams.

What a recorded step reads of a plan lies at fixed addresses: for each row of it the row's number, its position and its token, where the
plan knows that, and the page that it has got new. All else is on the device already: block tables, newest tokens, weights, KV. Steps are
recorded for a few numbers of rows; a plan takes the smallest that it fits, and the rest is padding: of a row that is nobody's, at no
position, so that it writes to no page and attends to nothing.

A pass over weights that stream is recorded in pieces, between what is taken and what is released; a group lies at the same address in
every pass. Whatever a pass must wait for on the host, such as which experts a router has chosen where these stream, cannot be recorded:
`why_not`. Experts that all rest on the device are found by a table, which lies where it lay when the step was recorded.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.arch.layout import GroupId
from penstock.arch.spec import DTYPE_BYTES, ModelSpec, RopeKind
from penstock.base.garbage import no_collection
from penstock.kv.pool import KVPool
from penstock.models.decoder import Decoder
from penstock.models.inputs import StepInputs, Weights
from penstock.ops.attention import AttentionInputs, Rows, reads_pages
from penstock.ops.kernels import early_launches
from penstock.ops.rope import RotaryAngles
from penstock.ops.steps import FIELDS, LEAST, likeliest, place
from penstock.step.plan import Plan
from penstock.weights.stream import WeightStream

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

_GRAPH_BYTES = 16 << 20
"""Of a recorded step, beside what passes through it."""
_MANY = 32
_EARLY = (9, 0)
"""The first GPUs whose kernels can wait for each other on the device."""
_IN_FLIGHT = 2
"""Steps that may be under way at once."""


def why_not(spec: ModelSpec, device: torch.device, *, experts_rest: bool) -> str | None:
    """Why decode steps of this model cannot be recorded on this device; None if they can. experts_rest: whether all experts, if it has
    any, are on the device for good."""
    if not reads_pages(device):
        return "there is no kernel that reads pages" if device.type == "cuda" else "there is no CUDA device"
    if spec.moe is not None and not experts_rest:
        return "experts stream, and the host has to know which of them a router chooses"
    if spec.rope.kind is RopeKind.DYNAMIC:
        return "frequencies depend on each request's length"
    return None


def row_counts(most: int) -> tuple[int, ...]:
    """Numbers of rows for which steps are recorded, the largest first: each at most half as large again as the next, later a quarter."""
    counts, count = {most}, 1
    while count < most:
        counts.add(count)
        power = 1 << (count.bit_length() - 1)
        count += max(1, power // (4 if count >= _MANY else 2))
    return tuple(sorted(counts, reverse=True))


def graph_bytes(spec: ModelSpec, dtype: str, rows: int) -> int:
    """Bytes that recorded steps of up to `rows` rows take, at most."""
    wide = max(2 * spec.intermediate_size + spec.hidden_size, spec.query_size + 2 * spec.kv_size + 3 * spec.hidden_size)
    if spec.moe is not None:
        wide = max(wide, spec.moe.top_k * (spec.moe.intermediate_size + spec.hidden_size) + 2 * spec.hidden_size)
    passing = rows * (2 * wide + spec.vocab_size) * DTYPE_BYTES[dtype]
    return rows * spec.vocab_size * DTYPE_BYTES[dtype] + passing + len(row_counts(rows)) * _GRAPH_BYTES


class DecodeStep:
    """The pass of a decode step over inputs at fixed addresses, for at most `rows` rows."""

    def __init__(
        self, decoder: Decoder, angles: RotaryAngles, pool: KVPool, table: Tensor, newest: Tensor, *, rows: int, max_length: int
    ) -> None:
        """table: int32 `[rows + 1, blocks]`, the pages of each row, the last nobody's; newest: int64 `[rows + 1]`, its newest token."""
        self._decoder, self._angles, self._pool, self._table, self._newest = decoder, angles, pool, table, newest
        self._max_length = max_length
        self._nobody = len(table) - 1
        device = table.device
        pinned = device.type == "cuda"
        self._given = torch.zeros(FIELDS * rows, dtype=torch.int32, device=device)
        self._staging = [torch.zeros(FIELDS * rows, dtype=torch.int32, pin_memory=pinned) for _ in range(_IN_FLIGHT)]
        self._turn = 0
        self._arrivals = torch.zeros(rows * pool.layout.kv_heads, dtype=torch.int32, device=device)
        self._best = torch.full((rows,), LEAST, dtype=torch.int64, device=device)
        self.logits = torch.zeros(rows, decoder.spec.vocab_size, dtype=getattr(torch, pool.layout.dtype), device=device)
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)

    def give(self, plan: Plan, count: int) -> None:
        """Send what the step of `count` rows needs of the plan, whose rows get one new page each at most."""
        self._turn = (self._turn + 1) % _IN_FLIGHT
        staging = self._staging[self._turn][: FIELDS * count]
        fields = staging.numpy().reshape(FIELDS, count)
        used, shares = len(plan.shares), plan.shares
        fields[0, :used] = [share.row for share in shares]
        fields[1, :used] = [share.start for share in shares]
        fields[2, :used] = [share.tokens[0] for share in shares]
        fields[:3, used:] = [[self._nobody], [-1], [0]]
        fields[3:] = [[self._nobody], [0], [0]]
        for index, share in enumerate(shares):
            if share.new_blocks:
                fields[3:, index] = share.row, share.first_new_block, share.new_blocks[0]
        self._given[: FIELDS * count].copy_(staging, non_blocking=True)

    def compute(self, count: int, weights: Weights) -> None:
        """The step of `count` rows: their logits, and the likeliest token of each, also as their newest."""
        given = self._given[: FIELDS * count].view(FIELDS, count)
        placed = place(given, self._table, self._newest, self._angles, self._pool.layout.block_size)
        rows = Rows(count, placed.table, placed.lengths, self._max_length, (), self._arrivals)
        attention = AttentionInputs(placed.blocks, placed.offsets, placed.slots, rows, ())
        inputs = StepInputs(placed.tokens, placed.cos, placed.sin, attention, None)
        hidden = self._decoder.forward(weights, self._pool.layers, inputs)
        logits = self.logits[:count]
        with self._decoder.head(weights, hidden) as logits_of:
            logits_of(slice(count), logits)
        likeliest(logits, given[0], self._newest, self.tokens[:count], self._best)


class DecodeGraphs:
    """Recorded steps for several numbers of rows, in memory that they share."""

    def __init__(self, step: DecodeStep, weights: WeightStream, rows: int) -> None:
        self._step, self._weights = step, weights
        self._counts = row_counts(rows)
        self._programs: dict[int, _Program] = {}
        self.seconds, self.bytes = 0.0, 0

    @property
    def counts(self) -> tuple[int, ...]:
        """Numbers of rows, the largest first."""
        return self._counts

    def record(self) -> None:
        """Record all. Nothing else may compute meanwhile; no group moves, and what is computed is rubbish that nobody reads."""
        begin, device = perf_counter(), self._step.tokens.device
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_reserved(device)
        gc.collect()  # What is collected in the midst of a recording may free what it must not.
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        early = self._weights.all_stay and torch.cuda.get_device_capability(device) >= _EARLY
        with torch.cuda.stream(stream), no_collection(), early_launches(early):
            for count in self._counts:
                self._step.give(Plan((), ()), count)
                # What is compiled, planned and allocated once is so before the recording.
                self._step.compute(count, self._weights.standing())
                stream.synchronize()
                program = _Program(pool, self._weights)
                self._step.compute(count, program)
                program.end()
                self._programs[count] = program
        torch.cuda.synchronize(device)
        self.bytes = torch.cuda.memory_reserved(device) - before
        self.seconds = perf_counter() - begin

    def fits(self, plan: Plan) -> bool:
        """Whether there is a recorded step for this plan: each share is a token of a row whose KV is in pages, and yields another."""
        shares = plan.shares
        if not 0 < len(shares) <= self._counts[0] or plan.runs:
            return False
        odd = (not share.sample or share.cold_stop or share.next_prompt_tokens or len(share.new_blocks) > 1 for share in shares)
        return not any(odd)

    def run(self, plan: Plan) -> tuple[Tensor, Tensor]:
        """Logits `[shares, vocab]` and the likeliest tokens `[shares]`, at addresses that the next step uses again."""
        used = len(plan.shares)
        count = min(count for count in self._counts if count >= used)
        self._step.give(plan, count)
        self._weights.begin_pass()
        self._programs[count].replay()
        return self._step.logits[:used], self._step.tokens[:used]


class _Program:
    """Weights that are lent while a pass is recorded; then the recorded pieces of it, and what is taken and released between them."""

    def __init__(self, pool: "_POOL_HANDLE", weights: WeightStream) -> None:
        """Recording begins, on the current stream."""
        self._pool, self._weights, self._standing = pool, weights, weights.standing()
        self._acts: list[Callable[[], object]] = []
        self._released: list[GroupId] = []
        """Since the last was taken: noted in the program before the next is."""
        self._graph = self._begin()

    def _begin(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # Other threads read weights and KV meanwhile, and look at events.
        graph.capture_begin(self._pool, capture_error_mode="thread_local")
        return graph

    def _cut(self) -> None:
        self._graph.capture_end()
        self._acts.append(self._graph.replay)

    def take(self, group: GroupId) -> Mapping[str, Tensor]:
        views = self._standing.take(group)
        if self._weights.moves(group):
            self._cut()
            self._note_released()
            self._acts.append(lambda: self._take(group, views))
            self._graph = self._begin()
        return views

    def release(self, group: GroupId) -> None:
        self._standing.release(group)
        if self._weights.moves(group):
            self._released.append(group)

    def expect(self, experts: Sequence[GroupId]) -> None:
        raise AssertionError("experts are chosen while a step is recorded")

    def table(self, layer: int) -> Tensor | None:
        return self._standing.table(layer)

    def waves(self, experts: Sequence[GroupId]) -> Iterator[tuple[Sequence[GroupId], Tensor]]:
        raise AssertionError("experts stream while a step is recorded")

    def end(self) -> None:
        """Recording is over."""
        self._cut()
        self._note_released()

    def replay(self) -> None:
        for act in self._acts:
            act()

    def _note_released(self) -> None:
        self._acts += [lambda group=group: self._weights.release(group) for group in self._released]  # type: ignore[misc]
        self._released.clear()

    def _take(self, group: GroupId, recorded: Mapping[str, Tensor]) -> None:
        lent = self._weights.take(group)
        assert lent is recorded, f"{group} is not where it was when the step was recorded"
