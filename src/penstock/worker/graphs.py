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
lies at the same address in every pass. So is a decode step of few rows of which some have KV beyond the
device. It is cut in each layer, behind what rows attend to in their pages; the tiles that come are folded in
there, launched one by one, since how many there are is known only then.

Whatever a pass must wait for on the host, such as which experts a router has chosen where these stream,
cannot be recorded: `graph_blocker`. Experts that all rest on the device are found by a table, which lies
where it lay when the step was recorded. Rows of state are named by the same row numbers, and that of padding
is nobody's; those of sequences that begin are cleared before a replay.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.base.garbage import no_collection
from penstock.memory.device import give_back
from penstock.models.inputs import Weights
from penstock.ops.attention.inputs import ColdInputs, Tiles
from penstock.ops.kernels import counting, pdl_launches
from penstock.ops.runs import suits_rows, suits_rows_together
from penstock.step.plan import Plan, Share, ShareKind
from penstock.weights.streaming.stream import WeightStream
from penstock.worker.decode_step import DecodeStep
from penstock.worker.recording import Program, idle_stream, keep_idle
from penstock.worker.sizes import cold_counts, row_counts, run_counts, shared_counts

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE


@dataclass(slots=True)
class _Reads:
    """_Reads hold what a step that is replayed attends to beyond the pages, and what lends it. Programs refer
    to them, and so to nothing that holds a program."""

    cold: tuple[ColdInputs, Tiles] | None = None

    def fold(self, fold: Callable[[ColdInputs, Tiles], None]) -> None:
        assert self.cold is not None, "a step with KV beyond the device is replayed without it"
        fold(*self.cold)


class DecodeGraphs:
    """Holds recorded steps for several numbers of rows, and of tokens of a run, in shared memory."""

    def __init__(
        self, step: DecodeStep, weights: WeightStream, rows: int, tokens: int, *, cold: bool = False
    ) -> None:
        """Record nothing yet. rows, tokens: as for the step. cold: whether there may be KV beyond the device,
        all of which rows read."""
        self._step, self._weights = step, weights
        self._counts, self._runs = row_counts(rows), run_counts(step.spec, tokens)
        self._cold_counts = cold_counts(rows) if cold else ()
        self._programs: dict[int, Program] = {}
        self._shared: dict[int, Program] = {}
        """Of passes that a CPU shares."""
        self._run_programs: dict[int, Callable[[], None]] = {}
        self._mixed: dict[int, Callable[[], None]] = {}
        """Of rows and short runs."""
        self._cold: dict[int, Program] = {}
        """Of rows of which some have KV beyond the device."""
        self._reads = _Reads()
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
    def cold(self) -> tuple[int, ...]:
        """Return the numbers of rows of steps in which some have KV beyond the device, the largest first."""
        return self._cold_counts

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
            for count in self._cold_counts:
                self._step.give((), count)
                self._cold[count] = self._recorded_cold(count, pool, stream)
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

    def _recorded_cold(self, count: int, pool: "_POOL_HANDLE", stream: torch.cuda.Stream) -> Program:
        compute = partial(self._step.compute, count)
        compute(self._weights.standing(), later=lambda fold: None)
        stream.synchronize()
        program = Program(pool, self._weights, ahead=False)
        self._every.append(program)
        reads = self._reads
        compute(program, later=lambda fold: program.between(partial(reads.fold, fold)))
        program.end()
        return program

    def close(self) -> None:
        """Release the recorded graphs, even if this object is still referenced: NCCL ends only after them."""
        for programs in (
            self._programs, self._shared, self._cold, self._run_programs, self._mixed, self._adapted,
            self._adapted_runs,
        ):  # fmt: skip
            programs.clear()
        for program in self._every:
            program.close()
        self._reads.cold = None
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
        if any(share.cold_start for share in shares):
            return self._fits_cold(plan)
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

    def _fits_cold(self, plan: Plan) -> bool:
        """Tell whether the plan is of rows alone, each of which yields a token, and nothing of which leaves
        the pages by itself."""
        counts, adapters = self._cold_counts, self._step.adapters
        if plan.runs or not counts or plan.tokens > counts[0] or (adapters and adapters.needs(plan)):
            return False
        odd = (
            not share.sample
            or share.pooled
            or share.next_prompt_tokens
            or max(share.near, share.cold_stop) > share.start
            or len(share.new_blocks) > 1
            for share in plan.shares
        )
        return not any(odd)

    def _fits_run(self, share: Share) -> bool:
        chunk = share.kind is ShareKind.CHUNK and share.sample
        if not chunk or not self._runs or len(share.tokens) > self._runs[0]:
            return False
        beyond_pages = share.near or share.cold_start or share.cold_stop or share.new_cold
        reports = share.next_prompt_tokens or share.pooled
        return not beyond_pages and not reports and self._step.suits(share)

    def lend(self, tiles: tuple[ColdInputs, Tiles] | None) -> None:
        """Have the next plan's rows attend to tiles, too, or to none."""
        self._reads.cold = tiles

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
            used, cold = plan.tokens, self._reads.cold is not None
            count = min(count for count in (self._cold_counts if cold else self._counts) if count >= used)
            shared = self._weights.turn(0 if adapted or cold else count)
            programs = self._adapted if adapted else self._shared if shared else self._programs
            self._step.give(plan.shares, count)
            (self._cold if cold else programs)[count].replay()
        self._weights.end_pass()
        return self._step.logits[:used], self._step.tokens[:used]
