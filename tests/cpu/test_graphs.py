"""Decode steps over inputs at fixed addresses, as graphs record them, here computed instead of replayed: what
they say must be what steps with inputs of their own say. In place of kernels that read pages there is plain
arithmetic that takes tables and lengths as they do."""

import gc
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor

import adapters
import pairs
import tiny
import toys
from penstock import LLM, SamplingParams
from penstock.arch.layout import GroupId, GroupKind, group_layouts, mixture_layouts
from penstock.arch.spec import SWIGLU, ModelSpec
from penstock.engine import cpu, placing
from penstock.engine.boot import _record as record
from penstock.engine.boot import boot
from penstock.engine.placing import Override
from penstock.models.decoder import EMBEDDING
from penstock.ops.attention import attend
from penstock.ops.attention.inputs import LayerAttention, PlacedRun, Rows
from penstock.ops.native import dense
from penstock.ops.native.few_bits import library
from penstock.ops.row_classes import CLASSES
from penstock.step.plan import BlockId, HostBlockId, ModelRole, Plan, Row, Share, ShareKind
from penstock.weights.checkpoint.reader import Checkpoint
from penstock.weights.checkpoint.shape import Shape
from penstock.weights.streaming.cpu_dense import CpuFeedForwards
from penstock.weights.streaming.residency import WeightLimits, padded
from penstock.worker import graphs as worker_graphs
from penstock.worker.decode_step import DecodeStep
from penstock.worker.graphs import DecodeGraphs
from penstock.worker.loaded import LoadedModel
from penstock.worker.recording import Program
from penstock.worker.runner import Runner
from penstock.worker.sizes import (
    cold_counts,
    graph_blocker,
    mixed_counts,
    row_counts,
    run_counts,
    shared_counts,
)
from tapes import launched, taped
from tiled import tiled_pool

SETTINGS = {
    "device": "cpu",
    "dtype": "float32",
    "check": True,
    "max_step_tokens": 24,
    "block_size": 4,
    "max_sequences": 7,
}
GREEDY = SamplingParams(temperature=0, max_tokens=tiny.OUTPUT, ignore_eos=True)
LESS = replace(GREEDY, max_tokens=tiny.OUTPUT // 2)
SOME = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
FEW = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    real, size = slots >= 0, k_cache.shape[1]
    k_cache[slots[real] // size, slots[real] % size] = k[real]
    v_cache[slots[real] // size, slots[real] % size] = v[real]


def paged_decode(
    q: Tensor, cache: tuple[Tensor, Tensor], rows: Rows, layer: LayerAttention, *, out: Tensor, **_: object
) -> Tensor:
    for row, length in enumerate(rows.lengths.tolist()):
        assert length <= rows.max_length
        first = max(0, length - layer.window) if layer.window else 0
        groups, pages = q.shape[1] // cache[0].shape[2], rows.table[row].long()
        k, v = (x[pages].flatten(0, 1)[first:length].repeat_interleave(groups, 1) for x in cache)
        scores = torch.einsum("hd,khd->hk", q[row], k) * layer.scale
        out[row] = torch.einsum("hk,khd->hd", scores.softmax(-1), v) if length else 0
    return out


def placed_run(
    q: Tensor, cache: tuple[Tensor, Tensor], run: PlacedRun, layer: LayerAttention, **results: Any
) -> Tensor:
    start, count = run.where.tolist()
    assert start + count <= run.max_length
    lengths = torch.tensor([start + at + 1 if at < count else 0 for at in range(len(q))])
    rows = Rows(len(q), run.blocks[None].expand(len(q), -1), lengths, run.max_length)
    return paged_decode(q, cache, rows, layer, **results)


KERNELS = SimpleNamespace(write_kv=write_kv, paged_decode=paged_decode, placed_run=placed_run)


class Played:
    """Computes what a graph would replay."""

    seen: ClassVar[list[int]] = []
    runs: ClassVar[list[int]] = []
    mixed: ClassVar[list[int]] = []
    adapted: ClassVar[list[int]] = []
    """Those of either kind in which rows have adapters."""

    def __init__(self, graphs: DecodeGraphs, count: int, *, adapted: bool = False) -> None:
        self._graphs, self._count, self._adapted = graphs, count, adapted

    def replay(self) -> None:
        self.seen.append(self._count)
        self.adapted += [self._count] * self._adapted
        with patch.object(attend, "_kernels", lambda x: KERNELS):
            self._graphs._step.compute(self._count, self._graphs._weights, adapted=self._adapted)

    def run(self) -> None:
        self.runs.append(self._count)
        self.adapted += [self._count] * self._adapted
        with patch.object(attend, "_kernels", lambda x: KERNELS):
            self._graphs._step.compute_run(self._count, self._graphs._weights, adapted=self._adapted)

    def run_mixed(self) -> None:
        self.mixed.append(self._count)
        with patch.object(attend, "_kernels", lambda x: KERNELS):
            self._graphs._step.compute_mixed(self._count, self._graphs._weights)


def played(self: DecodeGraphs, **_: bool) -> None:
    self._mixed = {count: Played(self, count).run_mixed for count in self._step.mixed}
    self._programs = {count: Played(self, count) for count in self.counts}  # type: ignore[misc]
    self._run_programs = {count: Played(self, count).run for count in self.runs}
    self._adapted = {count: Played(self, count, adapted=True) for count in self.counts}  # type: ignore[misc]
    self._adapted_runs = {count: Played(self, count, adapted=True).run for count in self.runs}


@pytest.fixture(autouse=True)
def _unrecorded() -> Iterator[None]:
    Played.seen, Played.runs, Played.mixed, Played.adapted = [], [], [], []
    with patch.object(DecodeGraphs, "record", played):
        yield


def spec_of(name: str) -> ModelSpec:
    with Checkpoint.open(tiny.checkpoint(name)) as checkpoint:
        return checkpoint.spec


def opened(name: str | Path, **more: object) -> LLM:
    path = name if isinstance(name, Path) else tiny.checkpoint(name)
    llm = LLM(path, **(SETTINGS | more))
    runner, limits = llm.booted.engine._ranks, llm.booted.limits
    assert isinstance(runner, Runner)
    runner.record(limits.max_sequences, limits.max_step_tokens, limits.max_length, record_runs=True)
    return llm


@pytest.mark.parametrize(
    ("name", "ahead"),
    [
        *((name, False) for name in ("qwen3", "glm4_moe")),
        *((name, True) for name in ("llama", "qwen2_windows", "qwen2_moe", "minimax_m2")),
        *((name, False) for name in ("llama", "qwen3_moe") if tiny.THOROUGH),
    ],
)
def test_greedy_tokens_are_the_same(name: str, ahead: bool) -> None:
    references = tiny.references(name)
    with patch.object(Runner, "ahead", ahead), opened(name) as llm:
        for params in (LESS, SOME):  # Then by way of the prefix cache.
            for one, reference in zip(
                llm.generate([one.prompt for one in references], params), references, strict=True
            ):
                assert list(one.tokens) == reference.tokens[: params.max_tokens]
    assert len(set(Played.seen)) > 1, "no padding was needed"
    assert len(Played.seen) > tiny.OUTPUT // 2


@pytest.mark.parametrize(
    ("name", "ahead"), [("llama", False), ("qwen2_windows", True), ("qwen3", False), ("qwen3", True)]
)
def test_prompts_one_by_one(name: str, ahead: bool) -> None:
    """Whole ones, the last pieces of longer ones, and what is left of those that are known."""
    references = tiny.references(name)
    with patch.object(Runner, "ahead", ahead), opened(name, max_step_tokens=40) as llm:
        for one in references * 2:  # Of their outputs, a few: those are what other tests are about.
            assert list(llm.generate([one.prompt], FEW)[0].tokens) == one.tokens[:4]
    assert len(Played.runs) > len(references) // 2
    assert set(Played.runs) == {16, 32}


def test_rows_of_several_adapters_and_of_none(tmp_path: Path) -> None:
    """Rows that others had before, prompts one by one, and steps without any adapter, which take none
    along."""
    base, names = tiny.checkpoint("llama"), ["a", None, "b", "a", None, "b"]
    modules = {
        "a": adapters.write(tmp_path / "a", base, 8, seed=1),
        "b": adapters.write(tmp_path / "b", base, 3, ["q_proj", "up_proj"], seed=2),
    }
    more = {"max_step_tokens": 40, "lora_modules": modules}
    with LLM(base, **(SETTINGS | more)) as llm:
        right = llm.generate(tiny.prompts(), SOME, lora=names)
    with patch.object(Runner, "ahead", True), opened("llama", **more) as llm:
        for order in (slice(None), slice(None, None, -1)):
            found = llm.generate(tiny.prompts()[order], SOME, lora=names[order])
            assert [one.tokens for one in found] == [one.tokens for one in right[order]]
        assert Played.adapted
        llm.clear_prefix_cache()
        before = len(Played.adapted)
        assert llm.generate(tiny.prompts()[1], SOME)[0].tokens == right[1].tokens
        assert len(Played.adapted) == before
        runs = len(Played.runs)
        for prompt, name, one in zip(tiny.prompts()[2:], names[2:], right[2:], strict=True):
            llm.clear_prefix_cache()
            assert llm.generate([prompt], FEW, lora=name)[0].tokens == one.tokens[:4]
        assert len(Played.runs) > runs
        assert set(Played.runs) & set(Played.adapted[before:])


def test_what_recorded_runs_do_not_do() -> None:
    """Pieces that draw nothing, and log-probabilities of prompts; and steps with rows beside a run."""
    prompt = list(range(2, 60))
    with opened("llama", max_step_tokens=40) as llm:
        assert sorted(llm.booted.engine._ranks.target.graphs.runs) == [16, 32]  # type: ignore[attr-defined]
        llm.generate([prompt], GREEDY)
        assert Played.runs == [32], "18 tokens, behind 40 of a step of its own"
        llm.clear_prefix_cache()
        Played.runs = []
        llm.generate([prompt[:20]], SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0))
        assert not Played.runs
        llm.clear_prefix_cache()
        llm.generate([prompt[:9], prompt[9:20]], GREEDY)
        assert not Played.runs, "two at a time"
        assert Played.mixed == [32]


@pytest.mark.parametrize(
    ("name", "ahead"), [("llama", False), ("llama", True), ("qwen2_windows", True), ("qwen3", True)]
)
def test_prompts_beside_rows_and_each_other(name: str, ahead: bool) -> None:
    """Whole ones and what is left of those that are known, of which the smallest size that holds all tokens
    is played; what is longer, or draws nothing, is not."""
    references = tiny.references(name)
    sizes = list[tuple[int, int]]()
    give = DecodeStep.give_mixed

    def noted(self: DecodeStep, shares: Sequence[Share], count: int) -> None:
        sizes.append((sum(len(share.tokens) for share in shares), count))
        give(self, shares, count)

    with (
        patch.object(Runner, "ahead", ahead),
        patch.object(DecodeStep, "give_mixed", noted),
        opened(name, max_step_tokens=72) as llm,
    ):
        for _ in range(2):
            row = llm.stream([5, 6, 7], SOME)
            said = list(next(row).tokens)
            for those in ([0, 1], [2], [1, 3], [0, 2, 4]):
                found = llm.generate([references[at].prompt for at in those], FEW)
                for at, one in zip(those, found, strict=True):
                    assert list(one.tokens) == references[at].tokens[:4]
            said += [token for delta in row for token in delta.tokens]
            assert said == list(llm.generate([[5, 6, 7]], SOME)[0].tokens)
            llm.clear_prefix_cache()
    assert {count for _, count in sizes} == {32, 64}
    assert all(count == min(size for size in (32, 64) if size >= used) for used, count in sizes)
    assert Played.mixed == [count for _, count in sizes]


def test_what_is_sampled_beside_rows_is_the_same() -> None:
    """Behind the last token of each prompt, by its own settings."""
    params = [
        SamplingParams(temperature=0.9, seed=at, max_tokens=4, logprobs=1, repetition_penalty=1.1 + at / 5)
        for at in range(4)
    ]
    asked = [one.prompt[:12] for one in tiny.references("llama")[:4]]
    with LLM(tiny.checkpoint("llama"), **SETTINGS) as llm:
        expected = [llm.generate([one], those)[0] for one, those in zip(asked, params, strict=True)]
    with patch.object(Runner, "ahead", True), opened("llama", max_step_tokens=72) as llm:
        row = llm.stream([5, 6, 7], SOME)
        next(row)
        found = llm.generate(asked, params)
        assert len(list(row)) > 3
    assert Played.mixed
    for one, other in zip(found, expected, strict=True):
        assert one.tokens == other.tokens
        for a, b in zip(one.logprobs or (), other.logprobs or (), strict=True):
            assert abs(a.logprob - b.logprob) < 1e-4


@pytest.mark.parametrize("ahead", [False, True])
def test_prompts_that_read_what_their_own_step_writes(ahead: bool) -> None:
    """Of one step: a prompt, two that go on behind it, by one token and by several, and rows that are under
    way."""
    prompt = list(range(2, 14))
    asked = [prompt, [*prompt, 40], [*prompt, 41, 42, 43], [*prompt[:8], 50]]
    settings = {"block_size": 4, "max_step_tokens": 40}
    with LLM(tiny.checkpoint("llama"), **(SETTINGS | settings | {"prefix_cache": False})) as llm:
        alone = [llm.generate([one], SOME)[0].tokens for one in [*asked, [60, 61]]]
    for those in ([0, 1], [0, 2], [0, 1, 2], [0, 3], [2, 3], [1, 2]):
        with patch.object(Runner, "ahead", ahead), opened("llama", **settings) as llm:
            row = llm.stream([60, 61], SOME)
            said = list(next(row).tokens)  # From now on it is a row of all steps.
            found = llm.generate([asked[at] for at in those], SOME)
            assert [one.tokens for one in found] == [alone[at] for at in those], those
            assert [*said, *(token for delta in row for token in delta.tokens)] == list(alone[-1])
        assert Played.mixed
        Played.mixed.clear()


@pytest.mark.parametrize("ahead", [False, True])
def test_two_models_have_steps_of_their_own(ahead: bool) -> None:
    """Each has its own newest tokens, and both read the tables that either has extended."""
    names = {ModelRole.TARGET: "qwen3", ModelRole.DRAFT: "llama"}
    settings = {"max_step_tokens": 40, "max_sequences": 7}
    with pairs.opened(*map(tiny.checkpoint, names.values()), **settings) as booted:
        runner = booted.engine._ranks
        assert isinstance(runner, Runner)
        for role in names:
            runner.record(7, 40, booted.limits.max_length, record_runs=True, role=role)
        said = pairs.say_both(booted, tiny.prompts(), 12, ahead)
        for role, name in names.items():
            assert said[role] == [one.tokens[:12] for one in tiny.references(name)]
        decoded = len(Played.seen)
        spoken = pairs.speculate(booted, tiny.prompts(), 12)
        assert spoken.outputs == said[ModelRole.TARGET]
        assert len(Played.seen) > decoded >= 24
        assert len(Played.runs) > 2


def test_what_is_sampled_is_the_same() -> None:
    prompts = [one.prompt for one in tiny.references("llama")]
    params = [
        SamplingParams(temperature=0.8, seed=3, max_tokens=9),
        SamplingParams(temperature=0, max_tokens=12, logprobs=2, repetition_penalty=1.2),
        SamplingParams(temperature=1.1, top_k=7, seed=4, max_tokens=10, logprobs=0),
        SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=0),
        SamplingParams(temperature=0, max_tokens=11, min_tokens=11),
        SamplingParams(temperature=0, max_tokens=7),
    ]
    with patch.object(Runner, "ahead", True), opened("llama") as llm:
        found = llm.generate(prompts, params)
    assert Played.seen
    with LLM(tiny.checkpoint("llama"), **SETTINGS) as llm:
        expected = llm.generate(prompts, params)
    for one, other in zip(found, expected, strict=True):
        assert one.tokens == other.tokens
        assert len(one.logprobs or ()) == len(other.logprobs or ())
        assert all(
            abs(a.logprob - b.logprob) < 1e-4
            for a, b in zip(one.logprobs or (), other.logprobs or (), strict=True)
        )


def test_rows_that_change_hands_and_blocks_that_do() -> None:
    """Few blocks, few rows: requests are preempted, rows given to others, block tables overwritten."""
    references = tiny.references("llama")
    with (
        patch.object(Runner, "ahead", True),
        opened("llama", kv_blocks=30, max_sequences=4, max_length=110) as llm,
    ):
        found = llm.generate([one.prompt for one in references] * 3, GREEDY)
        assert llm.stats().preemptions > 0
    for one, reference in zip(found, references * 3, strict=True):
        assert list(one.tokens) == reference.tokens
    assert Played.seen


@pytest.mark.parametrize("ahead", [False, True])
def test_rows_of_state_are_the_rows_of_the_step(ahead: bool, tmp_path: Path) -> None:
    """Prompts of one token, too, whose rows others had before, and padding beside them."""
    prompts = [one.prompt for one in tiny.references("llama")]
    asked = [*prompts, [3], [4], *prompts[:3], [5]]
    with toys.hybrid_known():
        path = toys.hybrid_checkpoint(tmp_path / "model")
        with LLM(path, **SETTINGS) as llm:
            expected = [llm.generate([one], SOME)[0].tokens for one in asked]
        with patch.object(Runner, "ahead", ahead), opened(path, max_sequences=3) as llm:
            assert [one.tokens for one in llm.generate(asked, SOME)] == expected
    assert len(Played.seen) > 20
    assert not Played.runs


def test_nothing_is_written_for_padding() -> None:
    with opened("llama", max_step_tokens=40) as llm, torch.inference_mode():
        runner = llm.booted.engine._ranks
        assert isinstance(runner, Runner)
        assert runner.target.graphs is not None
        assert runner.target.pool is not None
        runner.target.pool.bytes.random_(0, 100)
        before, step = runner.target.pool.bytes.clone(), runner.target.graphs._step
        newest = step._newest.clone()
        step.give((), 7)
        Played(runner.target.graphs, 7).replay()
        step.give_run(None, 16)
        Played(runner.target.graphs, 16).run()
        step.give_mixed((), 32)
        Played(runner.target.graphs, 32).run_mixed()
        assert torch.equal(before, runner.target.pool.bytes)
        assert not step._table[:-1].any()
        assert torch.equal(newest[:-1], step._newest[:-1])


def test_padding_has_a_row_of_state_of_its_own(tmp_path: Path) -> None:
    with (
        toys.hybrid_known(),
        opened(toys.hybrid_checkpoint(tmp_path / "model")) as llm,
        torch.inference_mode(),
    ):
        runner = llm.booted.engine._ranks
        assert isinstance(runner, Runner)
        assert runner.target.graphs is not None
        assert runner.target.pool is not None
        state = runner.target.pool.state
        assert state is not None
        rows = state._rows.random_(0, 60)
        before = rows.clone()
        runner.target.graphs._step.give((), 7)
        Played(runner.target.graphs, 7).replay()
        assert torch.equal(before[:-1], rows[:-1])
        assert not torch.equal(before[-1], rows[-1])


@pytest.mark.parametrize("most", [1, 2, 3, 7, 16, 64, 100, 256, 1000])
def test_row_counts(most: int) -> None:
    counts = row_counts(most)
    assert counts[0] == most
    assert counts[-1] == 1
    assert list(counts) == sorted(set(counts), reverse=True)
    assert all(larger <= max(1.5 * smaller, smaller + 1) for larger, smaller in pairwise(counts))


@pytest.mark.parametrize(
    ("most", "counts"), [(8, ()), (16, (16,)), (100, (64, 32, 16)), (8192, (512, 256, 128, 64, 32, 16))]
)
def test_run_counts(most: int, counts: tuple[int, ...]) -> None:
    assert run_counts(spec_of("llama"), most) == counts
    assert run_counts(spec_of("mixtral"), most) == ()


@pytest.mark.parametrize(
    ("most", "blocks", "counts"),
    [
        (31, 9, ()),
        (100, 9, (64, 32)),
        (8192, 9, (1024, 768, 512, 384, 256, 128, 64, 32)),
        (8192, 1 << 16, (128, 64, 32)),
    ],
)
def test_mixed_counts(most: int, blocks: int, counts: tuple[int, ...], tmp_path: Path) -> None:
    """As far as activations and block tables have room."""
    assert mixed_counts(spec_of("llama"), "float32", most, blocks) == counts
    assert mixed_counts(spec_of("mixtral"), "float32", most, blocks) == ()
    with toys.hybrid_known(), Checkpoint.open(toys.hybrid_checkpoint(tmp_path / "model")) as checkpoint:
        assert mixed_counts(checkpoint.spec, "float32", most, blocks) == ()


def test_where_weights_stream_only_decode_steps_are_recorded() -> None:
    """Prompts, alone and beside rows, compute the same kernels without a recording; and no pass of theirs is
    one that a CPU shares."""
    with recorded("llama", max_step_tokens=40) as llm:
        graphs = graphs_of(llm)
        before = len(graphs._every)
        assert before == len(graphs.counts) + len(graphs.runs) + len(graphs.mixed)
        graphs.close()
        with taped(), torch.inference_mode():
            RECORD(graphs, record_runs=False, early=False)
        assert len(graphs._every) - before == len(graphs.counts)
        turns = list[int]()
        with patch.object(type(llm.booted.weights), "turn", lambda self, rows: turns.append(rows)):
            found = llm.generate([[5, 6, 7], [8, 9]], FEW)
        assert turns[0] == 0
        assert set(turns[1:]) == {2}
        assert [one.tokens for one in found] == [
            llm.generate([one], FEW)[0].tokens for one in ([5, 6, 7], [8, 9])
        ]


def test_what_cannot_be_recorded_says_why() -> None:
    def blocker(name: str, *, gpu: bool = True, host_decides: bool) -> str | None:
        return graph_blocker(spec_of(name), cuda=gpu, kernels=gpu, host_decides=host_decides)

    def blocker_of_few(name: str) -> str | None:
        shape = Shape.open(tiny.checkpoint(name))
        few = replace(shape.spec, format=toys.Int8())
        mixtures = mixture_layouts(group_layouts(few, shape.names, "float32")).values()
        return graph_blocker(few, cuda=True, kernels=True, host_decides=False, mixtures=mixtures)

    assert "one expert after another" in str(blocker_of_few("mixtral"))
    assert blocker_of_few("llama") is None
    assert "no CUDA device" in str(blocker("llama", gpu=False, host_decides=False))
    assert "experts stream" in str(blocker("mixtral", host_decides=True))
    assert "length" in str(blocker("llama_dynamic", host_decides=False))
    assert blocker("mixtral", host_decides=False) is None
    assert blocker("llama", host_decides=True) is None


def test_steps_share_the_inputs_that_two_in_flight_need() -> None:
    """What is given to a step stays as it is while the next is given its own."""
    with opened("llama") as llm, torch.inference_mode():
        runner = llm.booted.engine._ranks
        assert isinstance(runner, Runner)
        assert runner.target.graphs is not None
        step: DecodeStep = runner.target.graphs._step
        staging = step._staging
        step.give((), 3)
        first = staging._buffers[staging._turn].clone()
        turn = staging._turn
        step.give((), 7)
        assert staging._turn != turn
        assert torch.equal(first, staging._buffers[turn])


class Lent:
    """Weights of which the attention's move. Says what is asked of it."""

    experts = None

    def __init__(self, said: list[str]) -> None:
        self.said, self.views = said, {}

    def standing(self, *, shared: int = 0) -> "Lent":
        return Lent([])

    def moves(self, group: GroupId) -> bool:
        return group.kind is GroupKind.ATTENTION

    def take(self, group: GroupId) -> dict[str, Tensor]:
        self.said.append(f"take {group.layer}")
        return self.views

    def release(self, group: GroupId) -> None:
        self.said.append(f"release {group.layer}")


@pytest.mark.parametrize("held", [False, True])
def test_a_recorded_pass_is_replayed_in_its_order_and_gone_when_nobody_has_it(held: bool) -> None:
    """Collections do not run in steps, and what a graph has recorded of the ranks' library keeps that from
    ending."""
    said: list[str] = []

    class Graph:
        count = 0

        def __init__(self) -> None:
            self.number, Graph.count = Graph.count, Graph.count + 1

        def capture_begin(self, *_: object, **__: object) -> None: ...

        def capture_end(self) -> None: ...

        def replay(self) -> None:
            said.append(f"piece {self.number}")

    weights = Lent(said)
    gc.disable()
    try:
        with patch("torch.cuda.CUDAGraph", Graph):
            program = Program(None, weights)  # type: ignore[arg-type]
            weights.views = program._standing.views  # type: ignore[attr-defined]
            for layer in range(2):
                for kind in (GroupKind.ATTENTION, GroupKind.FFN):
                    program.take(GroupId(kind, layer))
                    program.release(GroupId(kind, layer))
            program.between(lambda: said.append("between"))
            program.end()
        program.replay()
        # What was released is given back before the rest of its layer is computed: the ring has room for what
        # comes next.
        assert said == [
            "piece 0",
            "take 0",
            "piece 1",
            "release 0",
            "piece 2",
            "take 1",
            "piece 3",
            "release 1",
            "piece 4",
            "between",
            "piece 5",
        ]
        graph = weakref.ref(program._graph)
        if held:
            program.close()
        else:
            del program
        assert graph() is None
    finally:
        gc.enable()


def test_a_program_that_is_cut_in_layers_foretells_no_expert() -> None:
    """A piece that ends while one is on its way cannot be recorded."""
    weights = Lent([])
    experts = Mock(decided=True, foretells=lambda layer, most: layer + 1)
    weights.standing = lambda *, shared=0: Mock(experts=experts)  # type: ignore[method-assign]
    with patch("torch.cuda.CUDAGraph"):
        for ahead, following in ((True, 1), (False, None)):
            lent = Program(None, weights, ahead=ahead).experts  # type: ignore[arg-type]
            assert lent.foretells(0, 8) == following
            assert lent.decided
            assert lent.parts is experts.parts


def test_a_step_with_kv_beyond_the_device_is_cut_where_that_is_folded_in() -> None:
    """All of its rows are recorded, once for all tiles that may come. Which do is known at a replay."""
    acts: list[Callable[[], None]] = []
    seen: list[object] = []
    recorded = Mock(between=acts.append)

    def compute(count: int, weights: object, *, later: Callable[[Callable[..., None]], None]) -> None:
        seen.append((count, weights))
        later(lambda cold, tiles: seen.append((cold, tiles)))

    weights = Mock()
    step = Mock(compute=compute, adapters=None, logits=torch.zeros(7, 2), tokens=torch.zeros(7))
    graphs = DecodeGraphs(step, weights, 7, 30, cold=True)
    with patch.object(worker_graphs, "Program", return_value=recorded) as program:
        found = graphs._recorded_cold(3, None, Mock())  # type: ignore[arg-type]
    program.assert_called_once_with(None, weights, ahead=False)
    assert found is recorded
    assert seen == [(3, weights.standing()), (3, recorded)]
    (act,) = acts
    for lent in (("cold", "tiles"), ("other", "later")):
        graphs.lend(lent)  # type: ignore[arg-type]
        act()
        assert seen[-1] == lent
    graphs._cold[4] = recorded
    graphs.run(Plan((), (COLD,) * 3))
    recorded.replay.assert_called_once_with()
    # Recorded over what is lent to a pass that no CPU shares.
    weights.turn.assert_called_once_with(0)
    graphs.close()
    assert not graphs._cold
    recorded.close.assert_called_once()


def test_only_rows_that_read_all_of_their_kv_are_lent_it() -> None:
    """A policy chooses on the host what others read."""
    model = Mock(carrier=None)
    lends_all = LoadedModel.lends_all.fget
    assert not lends_all(model)  # type: ignore[misc]
    model.carrier = Mock(chosen=None)
    assert lends_all(model)  # type: ignore[misc]
    model.carrier = Mock(chosen=Mock())
    assert not lends_all(model)  # type: ignore[misc]


@pytest.mark.parametrize(("blocks", "far", "cold"), [(3, True, True), (4, True, False), (3, False, False)])
def test_they_are_recorded_where_a_sequence_may_have_kv_beyond_the_device(
    blocks: int, far: bool, cold: bool
) -> None:
    """By what all ranks agree on."""
    outline = Mock(
        limits=Mock(max_step_tokens=16, max_length=60), blocks_per_row=4, far=Mock() if far else None
    )
    plan = Mock(outline=outline, recorded=True, record_runs=False, budget=Mock(blocks=blocks))
    runner, said = Mock(), list[str]()
    graphs = runner.record.return_value
    graphs.counts, graphs.cold, graphs.runs, graphs.mixed = (8, 4), (4, 2) if cold else (), (), ()
    graphs.seconds, graphs.bytes = 1.0, 1 << 20
    record(plan, runner, said.append, ModelRole.TARGET)
    assert runner.record.call_args.kwargs["cold"] is cold
    assert (", of up to 4 with KV beyond the device, 2 of them" in said[0]) is cold


def test_rows_with_adapters_and_kv_beyond_the_device_are_not_replayed() -> None:
    adapters = Mock()
    step = Mock(mixed=(), adapters=adapters)
    step.spec = spec_of("llama")
    graphs = DecodeGraphs(step, Mock(), 20, 30, cold=True)
    for needs in (True, False):
        adapters.needs = lambda plan, needs=needs: needs
        assert graphs.fits(Plan((), (COLD,))) is not needs


def test_who_lets_go_of_weights_lets_go_of_what_was_recorded() -> None:
    program = Mock()
    with opened("llama", max_step_tokens=40) as llm:
        graphs = llm.booted.engine._ranks.target.graphs  # type: ignore[attr-defined]
        graphs._every.append(program)
        assert graphs._programs
        assert graphs._run_programs
        assert graphs._mixed
    assert not graphs._mixed
    assert not graphs._programs
    assert not graphs._run_programs
    program.close.assert_called_once()


RECORD = DecodeGraphs.record
"""What the other tests replace."""
LAUNCHED = SimpleNamespace(**{name: launched(kernel) for name, kernel in vars(KERNELS).items()})
MIXED = 1000
STEPS = {name: getattr(DecodeStep, name) for name in ("compute", "compute_run", "compute_mixed")}


@contextmanager
def recorded(name: str | Path, **more: object) -> Iterator[LLM]:
    """An engine whose steps are recorded on tapes, in pieces where weights stream, and replayed. Its kernels
    are stand-ins."""

    def with_kernels(name: str) -> Callable[..., None]:
        def compute(*args: object, **more: bool) -> None:
            with (
                patch.object(attend, "_kernels", lambda x: LAUNCHED),
                patch.object(dense, "suits_row", lambda x, weight: False),  # No tape sees a C function.
            ):
                STEPS[name](*args, **more)

        return compute

    with patch.multiple(DecodeStep, **{name: with_kernels(name) for name in STEPS}):
        with taped(), patch.object(DecodeGraphs, "record", RECORD):
            llm = opened(name, **more)
        with llm:
            yield llm


def graphs_of(llm: LLM) -> DecodeGraphs:
    graphs = llm.booted.engine._ranks.target.graphs  # type: ignore[attr-defined]
    assert isinstance(graphs, DecodeGraphs)
    return graphs


@contextmanager
def watched(llm: LLM) -> Iterator[list[tuple[int, int]]]:
    """Of each step that is replayed meanwhile: its rows, or its run's tokens as a negative number, or MIXED
    and its tokens, and those it was recorded for."""
    graphs, run = graphs_of(llm), DecodeGraphs.run
    found: list[tuple[int, int]] = []
    played = list[int]()
    for count, program in (*graphs._programs.items(), *graphs._shared.items()):
        program._acts.insert(0, partial(played.append, count))
    for count, replay in graphs._run_programs.items():
        graphs._run_programs[count] = lambda count=count, replay=replay: (played.append(-count), replay())  # type: ignore[misc]

    for count, replay in graphs._mixed.items():
        graphs._mixed[count] = lambda count=count, replay=replay: (played.append(MIXED + count), replay())  # type: ignore[misc]

    def noted(self: DecodeGraphs, plan: Plan) -> tuple[Tensor, Tensor]:
        result = run(self, plan)
        used = MIXED + plan.tokens if len(plan.shares) > 1 else -plan.tokens
        found.append((used if plan.runs else len(plan.shares), played.pop()))
        assert not played, "one step was replayed twice"
        return result

    with patch.object(DecodeGraphs, "run", noted):
        yield found


def test_an_adapter_is_replayed_that_was_loaded_after_the_recording(tmp_path: Path) -> None:
    """In a place that was empty then, and in that of another one."""
    base = tiny.checkpoint("llama")
    some = [adapters.write(tmp_path / f"{at}", base, 8, seed=at) for at in range(3)]
    with LLM(base, **SETTINGS, lora_modules={f"{at}": path for at, path in enumerate(some)}) as llm:
        right = {at: llm.generate(tiny.prompts(), FEW, lora=at) for at in ("0", "1", "2")}
        plain = llm.generate(tiny.prompts(), FEW)
    with patch.object(Runner, "ahead", True), recorded("llama", max_loras=2, max_lora_rank=8) as llm:
        for name, path in (("0", some[0]), ("1", some[1])):
            llm.load_lora_adapter(name, path)
        names = ["0", None, "1", "0", "1", None]
        found = llm.generate(tiny.prompts(), FEW, lora=names)
        for at, (name, one) in enumerate(zip(names, found, strict=True)):
            assert one.tokens == (plain if name is None else right[name])[at].tokens
        llm.unload_lora_adapter("0")
        llm.load_lora_adapter("2", some[2])
        for prompt, one in zip(tiny.prompts(), right["2"], strict=True):
            assert llm.generate([prompt], FEW, lora="2")[0].tokens == one.tokens


@pytest.mark.parametrize("name", ["llama", "qwen2_windows"])
def test_a_recording_of_the_size_next_above_is_replayed(name: str) -> None:
    """For every number of rows, and for runs; each computes what it was recorded for and no other."""
    references = (tiny.references(name) * 2)[:7]
    params = [SamplingParams(temperature=0, max_tokens=3 * (at + 1), ignore_eos=True) for at in range(7)]
    with (
        patch.object(Runner, "ahead", True),
        recorded(name, max_step_tokens=40) as llm,
        watched(llm) as found,
    ):
        counts, runs, mixed = graphs_of(llm).counts, graphs_of(llm).runs, graphs_of(llm)._step.mixed
        completions = llm.generate([one.prompt for one in references], params)
        for at, (one, reference) in enumerate(zip(completions, references, strict=True)):
            assert list(one.tokens) == reference.tokens[: 3 * (at + 1)]
        for reference in references[:3]:
            llm.clear_prefix_cache()
            assert list(llm.generate([reference.prompt], FEW)[0].tokens) == reference.tokens[:4]
    assert {used for used, _ in found if 0 < used < MIXED} == set(range(1, 8))
    assert any(used < 0 for used, _ in found)
    assert any(used > MIXED for used, _ in found)
    for used, size in found:
        least = (
            min(count for count in counts if count >= used)
            if 0 < used < MIXED
            else -min(count for count in runs if count >= -used)
            if used < 0
            else MIXED + min(count for count in mixed if MIXED + count >= used)
        )
        assert size == least


@pytest.mark.parametrize("name", ["llama", "llama_tied"])
def test_recorded_steps_take_weights_that_stream_from_the_beginning_of_a_pass(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also behind a pass that ended before its last group: a piece of a prompt that draws nothing. A tied
    embedding passes twice."""
    references = tiny.references(name)
    with Checkpoint.open(tiny.checkpoint(name)) as checkpoint:
        sizes = [padded(layout) for layout in group_layouts(checkpoint.spec, checkpoint.names, "float32")]
    override = Override(WeightLimits(max(sizes), 4 * sum(sizes)))
    monkeypatch.setattr("penstock.api.opening.boot", partial(boot, override=override))
    with recorded(name, max_step_tokens=16) as llm, watched(llm) as found:
        assert llm.booted.weights.standing().moves(EMBEDDING)
        for at, length in enumerate((17, 20, 37)):  # What follows whole pieces is a row, or a run.
            reference = references[at]
            known = [*reference.prompt, *reference.tokens][:length]
            after = reference.tokens[length - len(reference.prompt) :]
            assert list(llm.generate([known], FEW)[0].tokens) == after[:4]
        assert any(used < 0 for used, _ in found)
        for one, reference in zip(
            llm.generate([one.prompt for one in references], FEW), references, strict=True
        ):
            assert list(one.tokens) == reference.tokens[:4]
        assert llm.memory.weights.copied > 0


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="on GPUs kernels are compiled")
@pytest.mark.skipif(library() is None, reason="no C compiler")
def test_recorded_steps_have_the_cpu_compute_feed_forwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as are asked for, the same as without a hand-over, in steps of few rows between steps of other
    kinds."""
    handover = pytest.importorskip("penstock.ops.triton.handover")
    path = tiny.write(tiny.CASES["llama"], tmp_path / "model", intermediate_size=96)
    with Checkpoint.open(path) as checkpoint:
        sizes = [padded(layout) for layout in group_layouts(checkpoint.spec, checkpoint.names, "bfloat16")]
    override = Override(WeightLimits(max(sizes) * 2, 4 * sum(sizes)))
    monkeypatch.setattr("penstock.api.opening.boot", partial(boot, override=override))
    for module in (cpu, placing):
        monkeypatch.setattr(module, "cpu_blocker", lambda *_: None)
    monkeypatch.setattr(placing, "cpu_read", lambda *_: (1e9,) * CLASSES)
    for name in ("give", "take"):
        monkeypatch.setattr(handover, name, launched(getattr(handover, name)))

    def at_once(self: CpuFeedForwards, number: int, x: Tensor) -> Tensor:
        out, group = torch.empty_like(x), list(self._groups.values())[number]

        def compute() -> None:
            tiled_pool().feed_forward(x, [group], [len(x)], SWIGLU, out)

        launched(compute)()
        return out

    prompts, params = [[5 + one, 6, 7 + 2 * one, 8] for one in range(3)], [SOME, FEW, FEW]
    found = list[list[tuple[int, ...]]]()
    for compute in (at_once, CpuFeedForwards.compute):
        monkeypatch.setattr(CpuFeedForwards, "compute", compute)
        with recorded(path, dtype="bfloat16", cpu_compute="on") as llm, watched(llm) as played:
            weights, graphs = llm.booted.weights, graphs_of(llm)
            of, by_cpu, turning = weights.placement.cpu, weights.cpu, weights._turning
            assert of is not None
            assert by_cpu is not None
            assert turning is not None
            assert set(graphs._shared) == set(graphs.counts) == set(shared_counts(7))
            before = int(by_cpu.handover.computed)
            outputs = llm.generate(prompts, params)
            outputs += llm.generate(prompts[:1], SOME)  # Behind a prompt of which most is known.
            found.append([one.tokens for one in outputs])
            steps = sum(used > 0 for used, _ in played)
            assert turning.passes_shared == steps > 20
            assert len(played) > steps, "prompts came between"
            if compute is not at_once:
                assert int(by_cpu.handover.computed) - before == steps * len(of.groups)
                assert by_cpu.service.took[:, :, 0].sum() == int(by_cpu.handover.computed)
    assert found[0] == found[1]
    modules = {"a": adapters.write(tmp_path / "a", path, 4, ["down_proj"])}
    with recorded(path, dtype="bfloat16", cpu_compute="on", lora_modules=modules) as llm:
        turning = llm.booted.weights._turning
        assert turning is not None
        mixed = llm.generate(prompts, params, lora=["a", None, None])
        assert turning.passes_shared == 0, "a step with an adapter, which the CPU does not know"
        assert [one.tokens for one in llm.generate(prompts, params)] == found[0][:3]
        assert turning.passes_shared > 0
    assert mixed[0].tokens != found[0][0]


ROW = Share(Row(0), 9, (1,), 0, (), sample=True, prompt_length=5)
RUN = replace(ROW, tokens=(1, 2, 3), kind=ShareKind.CHUNK)
VERIFY = replace(RUN, kind=ShareKind.VERIFY)
HOST = (HostBlockId(3),)


@pytest.mark.parametrize(
    ("shares", "fits"),
    [
        ([ROW], True),
        ([ROW] * 7, True),
        ([ROW] * 8, False),
        ([replace(ROW, new_blocks=(BlockId(1),))], True),
        ([replace(ROW, new_blocks=(BlockId(1), BlockId(2)))], False),
        ([replace(ROW, sample=False)], False),
        ([replace(ROW, next_prompt_tokens=(4,))], False),
        ([ROW, replace(ROW, pooled=True)], False),
        ([ROW, replace(ROW, cold_stop=4)], False),
        ([replace(ROW, cold_start=4, cold_stop=4, near=4)], False),
        ([RUN], True),
        ([replace(RUN, tokens=(1,) * 16)], True),
        ([replace(RUN, tokens=(1,) * 17)], False),
        ([ROW, RUN], True),
        ([RUN, RUN], True),
        ([ROW, *[RUN] * 10], True),
        ([ROW, *[RUN] * 11], False),
        ([ROW, replace(RUN, sample=False)], False),
        ([ROW, replace(RUN, pooled=True)], False),
        ([ROW, replace(RUN, next_prompt_tokens=(4,))], False),
        ([ROW, replace(RUN, near=4)], False),
        ([replace(ROW, cold_start=4), RUN], False),
        ([ROW, replace(RUN, cold_stop=8)], False),
        ([ROW, replace(RUN, new_cold=HOST)], False),
        ([ROW, RUN, VERIFY], False),
        ([replace(ROW, new_blocks=(BlockId(1),)), replace(RUN, new_blocks=(BlockId(2), BlockId(3)))], True),
        ([ROW, replace(RUN, start=1 << 14)], True),
        ([ROW, replace(RUN, start=1 << 15)], False),
        ([replace(RUN, start=1 << 14)] * 2, True),
        ([replace(RUN, start=1 << 14)] * 3, False),
        ([replace(RUN, sample=False)], False),
        ([VERIFY], True),
        ([replace(VERIFY, new_blocks=(BlockId(1), BlockId(2)))], True),
        ([ROW, VERIFY, VERIFY], True),
        ([ROW, ROW, VERIFY, VERIFY], False),
        ([replace(VERIFY, start=1 << 16)], False),
        ([replace(VERIFY, parents=(0, 0))], False),
        ([replace(VERIFY, next_prompt_tokens=(4,))], False),
        ([replace(VERIFY, cold_start=4, cold_stop=4, near=4)], False),
        ([RUN, VERIFY], False),
        ([replace(RUN, next_prompt_tokens=(4,))], False),
        ([replace(RUN, pooled=True)], False),
        ([replace(RUN, cold_stop=8)], False),
        ([replace(RUN, cold_start=4)], False),
        ([replace(RUN, near=4)], False),
        ([replace(RUN, new_cold=HOST)], False),
        ([], False),
    ],
)
def test_which_steps_are_replayed(shares: Sequence[Share], fits: bool) -> None:
    """No others. KV beyond the pages, more than one new page or positions without a draw are nothing that a
    recorded step looks at."""
    step = Mock(spec=spec_of("llama"), suits=lambda share: True, mixed=(32,), adapters=None)
    step.spec = spec_of("llama")
    assert DecodeGraphs(step, Mock(), 7, 30).fits(Plan((), tuple(shares))) == fits


@pytest.mark.parametrize("most", range(1, 40))
def test_steps_with_kv_beyond_the_device_are_recorded_for_up_to_eight_rows(most: int) -> None:
    counts = cold_counts(most)
    assert counts[0] == min(most, 8)
    assert counts[-1] == 1
    assert all(one <= 2 * next for one, next in pairwise(counts))


COLD = replace(ROW, start=9, cold_start=4, cold_stop=4, near=4)
"""A row whose newest tokens are in pages, and the others beyond the device."""


@pytest.mark.parametrize(
    ("shares", "fits"),
    [
        ([COLD], True),
        ([ROW, COLD, COLD], True),
        ([replace(COLD, new_blocks=(BlockId(1),), new_cold=HOST)], True),
        ([COLD] * 8, True),
        ([COLD] * 9, False),
        ([ROW] * 7, True),
        ([replace(COLD, new_blocks=(BlockId(1), BlockId(2)))], False),
        ([replace(COLD, cold_stop=12)], False),
        ([replace(COLD, near=12)], False),
        ([replace(COLD, sample=False)], False),
        ([replace(COLD, pooled=True)], False),
        ([replace(COLD, next_prompt_tokens=(4,))], False),
        ([COLD, RUN], False),
        ([ROW, replace(VERIFY, cold_start=4, cold_stop=4, near=4)], False),
        ([COLD, VERIFY], False),
    ],
)
def test_which_steps_of_rows_with_kv_beyond_the_device_are_replayed(
    shares: Sequence[Share], fits: bool
) -> None:
    """Up to so many rows, nothing of which leaves the pages meanwhile."""
    step = Mock(spec=spec_of("llama"), suits=lambda share: True, mixed=(32,), adapters=None)
    step.spec = spec_of("llama")
    assert DecodeGraphs(step, Mock(), 20, 30, cold=True).fits(Plan((), tuple(shares))) == fits
