"""Steps recorded once as CUDA graphs: a step is then one copy of a few numbers and one launch, or one for
each group that streams.

What a recorded step reads of a plan lies at fixed addresses: for each row of it the row's number, its
position and its token, where the plan knows that, and the page that it has got new. All else is on the device
already: block tables, newest tokens, weights, KV. Steps are recorded for a few numbers of rows; a plan takes
the smallest that it fits, and the rest is padding: of a row that is nobody's, at no position, so that it
writes to no page and attends to nothing.

So are steps of rows and short runs, in which each token is a row, and of which few are drawn from; and steps
of one run, a short prompt or what is left of one that was found, which launched one by one would
take the host longer than the device: its tokens stand where rows do, and attend together, to what comes up to
each. Drafts that are lines are verified by decode steps: each of their tokens is a row, since all KV of a
step is written before any is read. Where weights stream, the same kernels over the same inputs are launched
one by one, since bits must not depend on where weights rest, and the host has the time.

A pass over weights that stream is recorded in pieces, between what is taken and what is released; a group
lies at the same address in every pass. Whatever a pass must wait for on the host, such as which experts a
router has chosen where these stream, cannot be recorded: `graph_blocker`. Experts that all rest on the device
are found by a table, which lies where it lay when the step was recorded. Rows of state are named by the same
row numbers, and that of padding is nobody's; those of sequences that begin are cleared before a replay.
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.arch.spec import DTYPE_BYTES
from penstock.base.garbage import no_collection
from penstock.kv.movement.pool import KVPool
from penstock.memory.device import give_back
from penstock.memory.sending import StagingTurns
from penstock.models.decoder import Decoder
from penstock.models.inputs import StateInputs, StepInputs, Weights
from penstock.ops.attention.inputs import AttentionInputs, PlacedRun, Rows
from penstock.ops.kernels import counting, pdl_launches
from penstock.ops.rope import RotaryAngles
from penstock.ops.runs import suits_rows, suits_rows_together, suits_run
from penstock.ops.steps import FIELDS, LEAST, Placed, likeliest, place
from penstock.step.plan import Plan, Share, ShareKind
from penstock.weights.streaming.stream import WeightStream
from penstock.worker.adapters import RowAdapters
from penstock.worker.recording import Program, idle_stream, keep_idle
from penstock.worker.sizes import mixed_counts, row_counts, run_counts, shared_counts

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

_COUNTERS = 256
"""Most tiles of a product that programs may share."""
_WHERE = 4
"""Numbers of a step's inputs before those of its rows: a run's first position and its tokens, and padding."""


class DecodeStep:
    """Computes a step over inputs at fixed addresses: decode rows, or the tokens of a run.

    rows, tokens: the most that there may be.
    """

    def __init__(
        self,
        decoder: Decoder,
        angles: RotaryAngles,
        pool: KVPool,
        table: Tensor,
        newest: Tensor,
        *,
        rows: int,
        tokens: int,
        max_length: int,
    ) -> None:
        """Allocate inputs and outputs.

        table: int32 `[rows + 1, blocks]`, the pages of each row. The last row is for padding.
        newest: int64 `[rows + 1]`, each row's newest token.
        rows, tokens: the most that a step may have.
        """
        self.adapters: RowAdapters | None = None
        """Of its rows, if these may have any."""
        self._decoder, self._angles, self._pool, self._table, self._newest = (
            decoder,
            angles,
            pool,
            table,
            newest,
        )
        self._max_length, self.spec, self._rows = max_length, decoder.spec, rows
        self.mixed = mixed_counts(decoder.spec, pool.layout.dtype, tokens, table.shape[1])
        """Numbers of tokens of steps of rows and short runs, the largest first."""
        most = max(rows, *self.mixed, 0)
        self._nobody = len(table) - 1
        device = table.device
        size = _WHERE + FIELDS * max(most, *run_counts(decoder.spec, tokens), 0) + 2 * rows
        self._given = torch.zeros(size, dtype=torch.int32, device=device)
        self._staging = StagingTurns(size, device)
        self._arrivals = torch.zeros(
            most * max(plane.heads for layer in set(pool.layout.planes) for plane in layer),
            dtype=torch.int32,
            device=device,
        )
        self.counters = torch.zeros(_COUNTERS, dtype=torch.int32, device=device)
        self._best = torch.full((rows,), LEAST, dtype=torch.int64, device=device)
        self.logits = torch.zeros(
            rows, decoder.spec.vocab_size, dtype=getattr(torch, pool.layout.dtype), device=device
        )
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)

    def give(self, shares: Sequence[Share], count: int) -> None:
        """Send the inputs of a step of `count` rows. Each share may have one new page at most; where any has
        several tokens, all new pages must be in the table."""
        staging = self._staging.lend(_WHERE + FIELDS * count)
        self._fill(staging, shares, count)
        self._staging.read_into(self._given[: len(staging)])

    def give_mixed(self, shares: Sequence[Share], count: int) -> None:
        """Send the inputs of a step of rows and runs, of `count` tokens, each of which is a row. All new
        pages must be in the table."""
        staging = self._staging.lend(_WHERE + FIELDS * count + 2 * self._drawn(count))
        self._fill(staging, shares, count)
        wanted, rows = staging.numpy()[_WHERE + FIELDS * count :].reshape(2, -1)
        used = len(shares)
        wanted[:used] = np.cumsum([len(share.tokens) for share in shares]) - 1
        rows[:used] = [share.row for share in shares]
        wanted[used:], rows[used:] = 0, self._nobody
        self._staging.read_into(self._given[: len(staging)])

    def _fill(self, staging: Tensor, shares: Sequence[Share], count: int) -> None:
        fields = _fields(staging, count)
        used = sum([len(share.tokens) for share in shares])
        fields[0, :used] = [share.row for share in shares for _ in share.tokens]
        fields[1, :used] = [at for share in shares for at, _ in enumerate(share.tokens, share.start)]
        fields[2, :used] = [token for share in shares for token in share.tokens]
        fields[:3, used:] = [[self._nobody], [-1], [0]]
        fields[3:] = [[self._nobody], [0], [0]]
        for index, share in enumerate(shares):
            if share.new_blocks:
                fields[3:, index] = share.row, share.first_new_block, share.new_blocks[0]

    def give_run(self, share: Share | None, count: int) -> None:
        """Send the inputs of a run of `count` tokens.

        Its new pages must be in the table. None is all padding.
        """
        staging = self._staging.lend(_WHERE + FIELDS * count)
        fields, used = _fields(staging, count), len(share.tokens) if share else 0
        staging.numpy()[:_WHERE] = share.start if share else 0, used, 0, 0
        if share:
            fields[0, :used] = share.row
            fields[1, :used] = np.arange(share.start, share.stop)
            fields[2, :used] = share.tokens
        fields[:3, used:] = [[self._nobody], [-1], [0]]
        fields[3:] = [[self._nobody], [0], [0]]
        self._staging.read_into(self._given[: len(staging)])

    def suits(self, share: Share) -> bool:
        """Tell whether a run is attended to in pages. The answer is the same on all ranks."""
        spec = self.spec
        head_bytes = spec.head_dim * DTYPE_BYTES[self._pool.layout.dtype]
        return suits_run(len(share.tokens), share.stop, spec.heads // spec.kv_heads, head_bytes)

    def compute(self, count: int, weights: Weights, *, adapted: bool = False) -> None:
        """Compute the step of `count` rows: their logits and likeliest tokens, which become their newest.

        adapted: whether rows may have adapters.
        """
        given, placed = self._place(count)
        rows = Rows(count, placed.table, placed.lengths, self._max_length, (), self._arrivals)
        attention = AttentionInputs(placed.blocks, placed.offsets, placed.slots, rows, ())
        state = StateInputs(given[0].long(), ()) if self._pool.state is not None else None
        padding = given[0] == self._nobody if self.spec.moe is not None else None
        lora = self.adapters.of_rows(given[0]) if adapted and self.adapters else None
        inputs = StepInputs(
            placed.tokens, placed.cos, placed.sin, attention, None, state=state, padding=padding, lora=lora
        )
        self._finish(self._decoder.forward(weights, self._pool.layers, inputs), given[0], weights)

    def computations(self, rows: int, tokens: int) -> list[Callable[[Weights], None]]:
        """Return what would be recorded, without adapters. rows, tokens: as for the step."""
        found: list[Callable[[Weights], None]] = [partial(self.compute, count) for count in row_counts(rows)]
        found += [partial(self.compute_run, count) for count in run_counts(self.spec, tokens)]
        return found + [partial(self.compute_mixed, count) for count in self.mixed]

    def _drawn(self, count: int) -> int:
        """Return the most that may be drawn in a step of rows and runs."""
        return min(self._rows, count)

    def compute_mixed(self, count: int, weights: Weights) -> None:
        """Compute the step of rows and runs of `count` tokens: logits and likeliest tokens behind the last
        token of each share, which become the newest of its row."""
        _, placed = self._place(count)
        begin = _WHERE + FIELDS * count
        wanted, of = self._given[begin : begin + 2 * self._drawn(count)].view(2, -1)
        rows = Rows(count, placed.table, placed.lengths, self._max_length, (), self._arrivals)
        attention = AttentionInputs(placed.blocks, placed.offsets, placed.slots, rows, ())
        inputs = StepInputs(placed.tokens, placed.cos, placed.sin, attention, wanted.long())
        self._finish(self._decoder.forward(weights, self._pool.layers, inputs), of, weights)

    def compute_run(self, count: int, weights: Weights, *, adapted: bool = False) -> None:
        """Compute the run of `count` tokens: its last one's logits and likeliest token, in the first row."""
        given, placed = self._place(count)
        where, pages = (
            self._given[:2],
            self._table.index_select(0, given[0, :1])[0],
        )  # Those of `placed` end where each token does.
        run = PlacedRun(pages, where, self._max_length)
        attention = AttentionInputs(placed.blocks, placed.offsets, placed.slots, None, (), placed=run)
        last = (where[1:] - 1).clamp(min=0).long()
        newest = Rows(1, pages.unsqueeze(0), where.sum(0, keepdim=True, dtype=torch.int32), self._max_length)
        inputs = StepInputs(
            placed.tokens,
            placed.cos,
            placed.sin,
            attention,
            last,
            replace(attention, rows=newest, placed=None),
            lora=self.adapters.of_run(given[0]) if adapted and self.adapters else None,
        )
        self._finish(self._decoder.forward(weights, self._pool.layers, inputs), given[0, :1], weights)

    def _place(self, count: int) -> tuple[Tensor, Placed]:
        given = self._given[_WHERE : _WHERE + FIELDS * count].view(FIELDS, count)
        return given, place(given, self._table, self._newest, self._angles, self._pool.layout.block_size)

    def _finish(self, hidden: Tensor, rows: Tensor, weights: Weights) -> None:
        count = len(hidden)
        logits = self.logits[:count]
        with self._decoder.head(weights, hidden) as logits_of:
            logits_of(slice(count), logits)
        likeliest(logits, rows, self._newest, self.tokens[:count], self._best)


def _fields(staging: Tensor, count: int) -> NDArray[np.int32]:
    """Return a view of the fields of so many rows."""
    return staging.numpy()[_WHERE : _WHERE + FIELDS * count].reshape(FIELDS, count)


class DecodeGraphs:
    """Holds recorded steps for several numbers of rows, and of tokens of a run, in shared memory."""

    def __init__(self, step: DecodeStep, weights: WeightStream, rows: int, tokens: int) -> None:
        """Record nothing yet. rows, tokens: as for the step."""
        self._step, self._weights = step, weights
        self._counts, self._runs = row_counts(rows), run_counts(step.spec, tokens)
        self._programs: dict[int, Program] = {}
        self._shared: dict[int, Program] = {}
        """Of passes that a CPU shares."""
        self._run_programs: dict[int, Callable[[], None]] = {}
        self._mixed: dict[int, Callable[[], None]] = {}
        """Of rows and short runs."""
        self._adapted: dict[int, Program] = {}
        self._adapted_runs: dict[int, Callable[[], None]] = {}
        """Of steps in which rows have adapters: others do not pay for them."""
        self._every: list[Program] = []
        self._stream: torch.cuda.Stream | None = None
        self.seconds, self.bytes = 0.0, 0

    @property
    def counts(self) -> tuple[int, ...]:
        """Return the numbers of rows, the largest first."""
        return self._counts

    @property
    def runs(self) -> tuple[int, ...]:
        """Return the numbers of a run's tokens, the largest first."""
        return self._runs

    @property
    def mixed(self) -> tuple[int, ...]:
        """Return the numbers of tokens of steps of rows and short runs, the largest first."""
        return self._step.mixed

    def record(self, *, record_runs: bool, early: bool) -> None:
        """Record all steps. Nothing else may compute meanwhile; no group moves, and results are meaningless.

        record_runs: whether runs are recorded too.
        early: whether kernels begin before the one before has ended.
        """
        begin, device = perf_counter(), self._step.tokens.device
        shared = shared_counts(self._counts[0])
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_reserved(device)
        gc.collect()  # What is collected in the midst of a recording may free what it must not.
        pool, stream = torch.cuda.graph_pool_handle(), idle_stream(device)
        with torch.cuda.stream(stream), no_collection(), pdl_launches(early), counting(self._step.counters):
            for count in self._counts:
                self._step.give((), count)
                compute = partial(self._step.compute, count)
                self._programs[count] = self._recorded(compute, pool, stream)
                if self._step.adapters is not None:
                    self._adapted[count] = self._recorded(partial(compute, adapted=True), pool, stream)
                if self._weights.shares and count in shared:
                    self._shared[count] = self._recorded(compute, pool, stream, shared=count)
            for count in self._runs:
                self._step.give_run(None, count)
                plain = partial(self._step.compute_run, count)
                kinds = [(self._run_programs, plain)]
                if self._step.adapters is not None:
                    kinds.append((self._adapted_runs, partial(plain, adapted=True)))
                for programs, compute in kinds:
                    programs[count] = self._of_runs(compute, pool, stream, recorded=record_runs)
            for count in self._step.mixed:
                self._step.give_mixed((), count)
                compute = partial(self._step.compute_mixed, count)
                self._mixed[count] = self._of_runs(compute, pool, stream, recorded=record_runs)
        torch.cuda.synchronize(device)
        self._stream = stream  # Not one whose recording was broken off.
        give_back(
            device
        )  # What was computed once before its recording was computed on that stream, which nothing else is.
        self.bytes = torch.cuda.memory_reserved(device) - before
        self.seconds = perf_counter() - begin

    def _of_runs(
        self,
        compute: Callable[[Weights], None],
        pool: "_POOL_HANDLE",
        stream: torch.cuda.Stream,
        *,
        recorded: bool,
    ) -> Callable[[], None]:
        if recorded:
            return self._recorded(compute, pool, stream).replay
        compute(self._weights.standing())
        stream.synchronize()
        return partial(compute, self._weights)

    def _recorded(
        self,
        compute: Callable[[Weights], None],
        pool: "_POOL_HANDLE",
        stream: torch.cuda.Stream,
        *,
        shared: int = 0,
    ) -> Program:
        # What is compiled, planned and allocated once is so before the recording.
        compute(self._weights.standing(shared=shared))
        stream.synchronize()
        program = Program(pool, self._weights, shared=shared)
        self._every.append(program)
        compute(program)
        program.end()
        return program

    def close(self) -> None:
        """Release the recorded graphs, even if this object is still referenced: NCCL ends only after them."""
        for programs in (
            self._programs, self._shared, self._run_programs, self._mixed, self._adapted, self._adapted_runs,
        ):  # fmt: skip
            programs.clear()
        for program in self._every:
            program.close()
        stream, self._stream = self._stream, None
        if stream is not None:
            keep_idle(stream)

    def fits(self, plan: Plan) -> bool:
        """Tell whether a recorded step serves this plan.

        Each share must be one token of a row with KV in pages, and yield another token, perhaps with a draft
        that is a line; or there are short runs, too, or the plan is one of these. None reads too much.
        """
        shares, runs = plan.shares, plan.runs
        if runs and runs[0].kind is ShareKind.CHUNK:
            return self._fits_run(shares[0]) if len(shares) == 1 else self._fits_mixed(plan)
        if not 0 < plan.tokens <= self._counts[0]:
            return False
        odd = (
            not share.sample
            or share.pooled
            or share.cold_stop
            or share.next_prompt_tokens
            or (not runs and len(share.new_blocks) > 1)
            for share in shares
        )
        return not any(odd) and all(not run.parents and suits_rows(len(run.tokens), run.stop) for run in runs)

    def _fits_mixed(self, plan: Plan) -> bool:
        """Tell whether the plan is of rows and short runs, in pages and without adapters, each of which
        yields a token."""
        counts, adapters, runs = self._step.mixed, self._step.adapters, plan.runs
        if not counts or plan.tokens > counts[0] or (adapters is not None and adapters.needs(plan)):
            return False
        odd = (
            not share.sample
            or share.pooled
            or share.near
            or share.cold_start
            or share.cold_stop
            or share.new_cold
            or share.next_prompt_tokens
            or share.kind is ShareKind.VERIFY
            for share in plan.shares
        )
        return not any(odd) and suits_rows_together((len(run.tokens), run.stop) for run in runs)

    def _fits_run(self, share: Share) -> bool:
        chunk = share.kind is ShareKind.CHUNK and share.sample
        if not chunk or not self._runs or len(share.tokens) > self._runs[0]:
            return False
        beyond_pages = share.near or share.cold_start or share.cold_stop or share.new_cold
        reports = share.next_prompt_tokens or share.pooled
        return not beyond_pages and not reports and self._step.suits(share)

    def run(self, plan: Plan) -> tuple[Tensor, Tensor]:
        """Compute a plan.

        Return logits `[draws, vocab]` and likeliest tokens `[draws]`, until the next step.
        """
        adapters, runs = self._step.adapters, plan.runs
        adapted = adapters is not None and adapters.needs(plan)
        self._weights.begin_pass()
        if runs and len(plan.shares) > 1 and runs[0].kind is ShareKind.CHUNK:
            used = len(plan.shares)
            count = min(count for count in self._step.mixed if count >= plan.tokens)
            self._weights.turn(0)
            self._step.give_mixed(plan.shares, count)
            self._mixed[count]()
        elif runs and runs[0].kind is ShareKind.CHUNK:
            used = 1
            count = min(count for count in self._runs if count >= plan.tokens)
            self._weights.turn(0)
            self._step.give_run(plan.shares[0], count)
            (self._adapted_runs if adapted else self._run_programs)[count]()
        else:
            used = plan.tokens
            count = min(count for count in self._counts if count >= used)
            shared = self._weights.turn(0 if adapted else count)
            programs = self._adapted if adapted else self._shared if shared else self._programs
            self._step.give(plan.shares, count)
            programs[count].replay()
        self._weights.end_pass()
        return self._step.logits[:used], self._step.tokens[:used]
