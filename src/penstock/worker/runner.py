"""Carries out a Plan: inputs, forward pass, sampling, by the model that it names. It decides nothing and
allocates no blocks; its memory is the rows' tables."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from penstock.arch.formats.dense import DENSE
from penstock.base.errors import CheckpointError, StepMemoryError
from penstock.kv.movement.carrier import Carrier
from penstock.kv.movement.pool import KVPool
from penstock.memory.device import Heap, give_back, lift_cap, shortage
from penstock.memory.sending import send
from penstock.models.inputs import Weights
from penstock.ops.attention.gathered import PAST_TILE
from penstock.ops.kernels import between_products, counting, pdl_launches, plain_torch
from penstock.step.adapter import LoadedAdapter
from penstock.step.plan import Landed, ModelRole, Outcome, Plan, Result, ShareKind, TokenLogprob
from penstock.weights.checkpoint.lora import Adapter
from penstock.weights.streaming.cpu_experts import CpuService
from penstock.weights.streaming.snapshots import SlotSnapshots
from penstock.weights.streaming.stream import WeightStream
from penstock.worker.decode_step import DecodeStep
from penstock.worker.graphs import DecodeGraphs
from penstock.worker.loaded import LoadedModel
from penstock.worker.sampler import Drawn, fetched
from penstock.worker.sizes import HEAD_ROWS, StepSizes
from penstock.worker.tensors import Moves, drawn_together, sampled
from penstock.worker.trees import Move, compact, moves_of
from penstock.worker.warmup import draft_step, kernel_steps, largest_step, long_steps, small_steps, tree_step

_PATIENCE = 0.02
"""Seconds that a step without work waits for a transfer to land."""


class Runner:
    """Carries out plans on one device, by the models that it holds: one, or two that share rows and block
    numbers."""

    def __init__(
        self,
        target: LoadedModel,
        device: torch.device,
        *,
        draft: LoadedModel | None = None,
        kernels: bool = True,
    ) -> None:
        """Begin without weights and KV; see `attach`.

        kernels: whether to launch our kernels, where there are any. Otherwise plain torch computes.
        """
        self.models = {ModelRole.TARGET: target}
        if draft is not None:
            self.models[ModelRole.DRAFT] = draft
        self.target = target
        self._device = device
        # Kernels of our own are launched on the thread's current device, which need not be this one.
        self._current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        self._kernels = kernels
        self._few_bits = any(model.decoder.spec.format != DENSE for model in self.models.values())
        self._heap: Heap | None = None
        self._snapshots: SlotSnapshots | None = None
        """Takes what the device counts of experts, after a step."""
        self._cpu: CpuService | None = None
        """Knows whether the CPU has computed its part of a step."""
        self._ended = 0.0
        """Time at which the last plan ended, by perf_counter."""

    def attach(
        self,
        weights: Weights,
        pool: KVPool,
        carrier: Carrier | None = None,
        *,
        early: bool = False,
        role: ModelRole = ModelRole.TARGET,
    ) -> None:
        """Let a model borrow these weights from now on, write KV to this pool and read it from there, and use
        what the carrier carries. early: as of LoadedModel."""
        model = self.models[role]
        model.weights, model.pool, model.carrier, model.early = weights, pool, carrier, early
        if carrier is not None and isinstance(weights, WeightStream):
            carrier.ring.sooner = weights.queued_before
        if role is ModelRole.TARGET:
            self._snapshots = weights.snapshots if isinstance(weights, WeightStream) else None
            self._cpu = weights.cpu if isinstance(weights, WeightStream) else None

    def bound_heap(self, kept: int) -> None:
        """Keep at most so many bytes of a CPU's heap for reuse between steps, beside those in use now."""
        self._heap = Heap(kept) if self._device.type == "cpu" else None

    def record(
        self,
        rows: int,
        tokens: int,
        max_length: int,
        *,
        record_runs: bool,
        cold: bool = False,
        role: ModelRole = ModelRole.TARGET,
    ) -> DecodeGraphs:
        """Record decode steps of up to `rows` rows, and short runs in steps of up to `tokens` tokens.

        They are replayed from now on. Call it after `attach`, for a model and a device that allow it.

        cold: whether rows may have KV beyond the device.
        record_runs: whether runs are recorded. Otherwise they compute the same kernels without a graph.
        """
        model = self.models[role]
        assert isinstance(model.weights, WeightStream), "record before attach"
        with self._here(), torch.inference_mode():
            step = model.decode_step(rows, tokens, max_length)
            model.graphs = DecodeGraphs(step, model.weights, rows, tokens, cold=cold and model.lends_all)
            model.graphs.record(record_runs=record_runs, early=model.early)
        return model.graphs

    def rehearse(self, sizes: StepSizes, *, recorded: bool) -> Iterator[Callable[[], object]]:
        """Yield calls that launch every kernel of ours that steps of the target need, once or more often.
        After `attach`.

        recorded: whether decode steps and short runs will be. Kernels of long requests are for a carrier.
        """
        plans = *kernel_steps(sizes), *small_steps(sizes), largest_step(sizes, past=PAST_TILE)
        if sizes.drafted:
            plans += draft_step(sizes), tree_step(sizes)
        if self.target.carrier is not None:
            plans += (*long_steps(sizes),)
        yield from (partial(self.run, plan) for plan in plans)
        weights, tokens = self.target.weights, sizes.max_step_tokens
        assert weights is not None, "rehearse before attach"
        if recorded:
            rows = sizes.rows(self.target.decoder.spec)
            with self._here(), torch.inference_mode():
                step = self.target.decode_step(rows, tokens, sizes.max_length)
            for compute in step.computations(rows, tokens, cold=self.target.lends_all):
                yield partial(self._as_recorded, step, compute, weights)

    def _as_recorded(self, step: DecodeStep, compute: Callable[[Weights], None], weights: Weights) -> None:
        with self._here(), torch.inference_mode(), pdl_launches(self.target.early), counting(step.counters):
            compute(weights)

    @contextmanager
    def _here(self) -> Iterator[None]:
        """Work on this device, with or without our kernels as configured."""
        with self._current, plain_torch(not self._kernels), between_products(self._few_bits):
            yield

    @property
    def carrier(self) -> Carrier | None:
        """Return what moves the target's KV beyond the device, if there is any."""
        return self.target.carrier

    def detach(self) -> None:
        """Release weights, KV and recorded steps."""
        self._snapshots = self._cpu = None
        for model in self.models.values():
            model.detach()

    def close(self) -> None:
        """Release everything for good, and end all that moves weights or KV."""
        self._snapshots = self._cpu = None
        for model in reversed(self.models.values()):
            model.close()
        lift_cap(self._device)

    @property
    def ahead(self) -> bool:
        """Tell whether plans are begun before the one before is over, since the device computes by itself."""
        return self._device.type == "cuda"

    def begin(self, plan: Plan) -> "Begun":
        """Begin a plan, or carry it out.

        Raises StepMemoryError if the device has too little memory; see `settle`.
        """
        try:
            return self._begin(plan, None)
        except Exception as fault:
            if not (short := shortage(fault, self._device)):
                raise
        # Raised out here: whatever the step has allocated would live as long as what was raised within it.
        raise StepMemoryError(short)

    def run(self, plan: Plan, layers: tuple[int, ...] | None = None) -> Outcome:
        """Carry out a plan and return its outcome. layers: run only these, to measure."""
        return self._begin(plan, layers).outcome()

    @torch.inference_mode()
    def _begin(self, plan: Plan, layers: tuple[int, ...] | None) -> "Begun":
        with self._here():
            begun = perf_counter()
            for admission in plan.admissions:
                self.target.sampler.admit(admission)
            if self.target.adapters is not None:
                self.target.adapters.admit(plan.admissions)
            if plan.shares:
                computed = self._compute(plan, layers)
                if self._snapshots is not None:
                    self._snapshots.take(begun)
                return Begun(self, plan, begun, *computed)
            self._transfer(plan)
            return Begun(self, plan, begun)

    @torch.inference_mode()
    def end(self, begun: "Begun") -> Outcome:
        """Wait for the oldest plan that has not ended. That of a draft model never tells what has landed."""
        plan, carrier = begun.plan, self.target.carrier
        transfers = carrier.transfers if carrier is not None and plan.model is ModelRole.TARGET else None
        with self._here():
            results = begun.results()
            if self._cpu is not None:
                self._cpu.check()
            if transfers is not None and not (plan.shares or plan.transfers or plan.forget):
                transfers.wait(_PATIENCE)
            landed = transfers.landed() if transfers is not None else ()
        if self._heap is not None:
            self._heap.tidy()
        since, self._ended = max(begun.at, self._ended), perf_counter()
        return Outcome(results, landed, self._ended - since)

    def read_adapter(self, loaded: LoadedAdapter) -> Adapter:
        """Read an adapter. Raises CheckpointError where it cannot be read, or is no longer what it was, and
        UnsupportedModelError."""
        adapters = self.target.adapters
        assert adapters is not None, "an adapter without room for any"
        adapter = adapters.read(Path(loaded.path))
        if adapter.digest != loaded.digest:
            raise CheckpointError(f"the adapter in {loaded.path} changed while it was read; load it again")
        return adapter

    def load_adapter(self, loaded: LoadedAdapter, adapter: Adapter) -> None:
        """Put an adapter that was read into its slot, which no request needs that has not ended."""
        adapters = self.target.adapters
        assert adapters is not None, "an adapter without room for any"
        assert adapter.digest == loaded.digest, "an adapter under the digest of another"
        with self._here(), torch.inference_mode():
            adapters.put(loaded.slot, adapter)

    def settle(self) -> tuple[Landed, ...]:
        """Wait for all that is under way, after an interrupted step.

        Return the transfers that have landed.
        """
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        give_back(self._device)
        carrier = self.target.carrier
        if carrier is None or carrier.transfers is None:
            return ()
        return carrier.transfers.settle()

    def free_kv(self) -> None:
        """Give back the memory of KV blocks, which hold nothing that is needed, and of the heap."""
        for model in self.models.values():
            if model.pool is not None:
                model.pool.free()
        give_back(self._device)

    def check(self) -> None:
        """Do nothing: a single runner does not fail between steps."""

    def _transfer(self, plan: Plan) -> None:
        """Begin the plan's transfers, behind all work so far."""
        carrier, pool = self.target.carrier, self.target.pool
        transfers = carrier.transfers if carrier is not None else None
        if carrier is None or transfers is None:
            nothing = not plan.transfers and not plan.forget
            assert nothing, "a plan with transfers needs a carrier of whole blocks"
            return
        assert pool is not None
        transfers.begin(plan.transfers, plan.forget, pool, carrier.outbox.landed)

    def _compute(
        self, plan: Plan, layers: tuple[int, ...] | None
    ) -> "tuple[Sequence[Drawn], Sequence[Sequence[TokenLogprob]], Tensor | None]":
        """Return what the step draws, some shares together, log-probabilities of prompts by share, and the
        embeddings of shares that are pooled, `[shares, hidden]`, on their way to the host."""
        model = self.models[plan.model]
        inputs, graphs = model.inputs, model.graphs
        state = model.pool.state if model.pool is not None else None
        if state is not None and (begun := [share.row for share in plan.shares if not share.start]):
            state.clear(send(np.array(begun, dtype=np.int64), self._device))
        if graphs is not None and not plan.children and graphs.fits(plan):
            inputs.tables.note(plan)
            if plan.runs:
                inputs.tables.note_on_device(plan)
            self._transfer(plan)
            graphs.lend(None)
            if model.carrier is not None and any(share.cold_start for share in plan.shares):
                seen, moves = inputs.moves_of_rows(plan.shares)
                self._tell(model, plan, moves, layers)
                graphs.lend((seen, model.carrier))
            together = model.sampler.choose(*graphs.run(plan), plan.shares)
            return (together,), ((),) * len(plan.shares), None
        step = inputs.build(plan, model.sampler.newest)
        lora = None if model.adapters is None else model.adapters.of(plan)
        if lora is not None:
            step = replace(step, inputs=replace(step.inputs, lora=lora))
        weights, pool = model.weights, model.pool
        assert weights is not None, "run before attach, or after close"
        assert pool is not None
        by_cpu = weights if isinstance(weights, WeightStream) and weights.shares else None
        if by_cpu is not None:
            by_cpu.turn(0 if lora is not None else decode_rows(plan))
        self._transfer(plan)
        self._tell(model, plan, step.moves, layers)
        prompts: list[list[TokenLogprob]] = [[] for _ in plan.shares]
        logits: Tensor | None = None
        embeddings: Tensor | None = None
        verified: list[Drawn] = []
        with pdl_launches(model.early):
            hidden = model.decoder.forward(
                weights, pool.layers, step.inputs, layers, model.carrier, stay=weights.all_stay
            )
            if not len(hidden):
                return (), prompts, None
            with model.decoder.head(weights, hidden) as logits_of:
                plain, drafts = drawn_together(plan)
                first = len(plain)
                if plain:
                    logits = logits_of(slice(first)).float()
                for some in drafts:
                    end = first + sum([share.draws for share in some])
                    part = logits_of(slice(first, end)).float()
                    verified.append(model.sampler.sample(part, some, plan.children))
                    first = end
                if pooled := [place for place, share in enumerate(sampled(plan)) if share.pooled]:
                    rows = send(np.array(pooled, dtype=np.int64), self._device)
                    embeddings = fetched(logits_of.normed[rows].float())
                for share, positions, found in zip(plan.shares, step.prompt_positions, prompts, strict=True):
                    for start in range(0, positions, HEAD_ROWS):
                        end = min(start + HEAD_ROWS, positions)
                        part = logits_of(slice(first + start, first + end)).float()
                        following = share.next_prompt_tokens[start:end]
                        found += model.sampler.prompt_logprobs(part, share, following)
                    first += positions
        if by_cpu is not None:
            by_cpu.end_pass()
        drawn = () if logits is None else (model.sampler.sample(logits, plain, plan.children),)
        return (*drawn, *verified), prompts, embeddings

    def _tell(
        self,
        model: LoadedModel,
        plan: Plan,
        moves: Moves,
        layers: tuple[int, ...] | None,
    ) -> None:
        """Give the carrier the KV that the step moves."""
        if model.carrier is None:
            beyond = plan.orders or moves.tiles or moves.sends or moves.readers
            assert not beyond, "a plan with host blocks needs a carrier"
            return
        assert model.pool is not None
        if isinstance(model.weights, WeightStream):
            # The link alone says how long a step of rows takes, whatever the order of its copies.
            model.weights.share_link(bool(moves.tiles and plan.runs))
        spec, cold = model.decoder.spec, moves.cold
        through = range(spec.layers) if layers is None else layers
        every = range(len(moves.tiles))
        windows, kept = spec.windows, model.pool.layout.planes
        seen = [
            (cold.seen.get(windows[layer], every) if cold else every) if kept[layer] else ()
            for layer in through
        ]
        model.carrier.begin(plan.orders, model.pool, moves.sends, moves.tiles, through, seen, moves.readers)


def decode_rows(plan: Plan) -> int:
    """Return the rows of a step that decodes one token of each; 0 of any other."""
    return len(plan.shares) if all(share.kind is ShareKind.DECODE for share in plan.shares) else 0


@dataclass(frozen=True, slots=True)
class Begun:
    """Holds a plan that a runner has begun, at time `at` by perf_counter."""

    runner: Runner
    plan: Plan
    at: float
    drawn: Sequence[Drawn] = ()
    prompts: Sequence[Sequence[TokenLogprob]] = ()
    embeddings: Tensor | None = None

    def outcome(self) -> Outcome:
        """Wait for the plan's end and return its outcome.

        Call it once, in the order in which plans were begun.
        """
        return self.runner.end(self)

    def results(self) -> tuple[Result, ...]:
        """Return the results of its shares, when they are known. The KV of accepted trees is moved then."""
        if self.plan.children:
            found = iter([one for some in self.drawn for one in some.children()])
            return tuple(Result(children=tuple(islice(found, share.draws))) for share in self.plan.shares)
        tokens, logprobs = list[int](), list[TokenLogprob | None]()
        broken, wrong = set[int](), set[int]()
        for some in self.drawn:
            first, (those, scored) = len(tokens), some.read()
            tokens, logprobs = tokens + those, logprobs + scored
            broken.update([first + place for place in some.broken])
            wrong.update([first + place for place in some.tokens.wrong])
        scores = [() if logprob is None else (logprob,) for logprob in logprobs]
        plain = not (any(self.prompts) or broken or wrong or any(run.draft for run in self.plan.runs))
        if plain and len(tokens) == len(self.plan.shares) and self.embeddings is None:
            return tuple(map(Result, zip(tokens), scores))  # Tuples of one token each.
        first, results, moves = 0, [], list[Move]()
        embeddings = iter(self.embeddings.tolist() if self.embeddings is not None else ())
        for share, prompt in zip(self.plan.shares, self.prompts, strict=True):
            draws = share.draws if self.drawn else 0
            if not draws:
                results.append(Result(prompt_logprobs=tuple(prompt)))
                continue
            nodes = share.accepted(tokens[first : first + draws])
            faulty = next((at for at, node in enumerate(nodes, 1) if first + node in wrong), len(nodes))
            places = [first + node for node in nodes[:faulty]]
            moves += moves_of(share, nodes[:faulty]) if share.parents else ()
            pooled = tuple(next(embeddings)) if share.pooled else ()
            said, own = zip(*[(tokens[place], scores[place]) for place in places], strict=True)
            ends = places[-1] in broken, places[-1] in wrong
            results.append(Result(said, tuple(chain(*own)), tuple(prompt), *ends, pooled))
            first += draws
        model = self.runner.models[self.plan.model]
        if moves and model.pool is not None:
            compact(moves, model.inputs.tables, model.pool)
        return tuple(results)
