"""A mixture of experts by kernels, interpreted on the CPU: against the steps one by one, in one call and in
waves, in a whole engine."""

import ctypes
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

if (
    os.environ.get("TRITON_INTERPRET") != "1"
):  # asked once, when triton is imported; conftest.py sets it where there is no GPU
    pytest.skip(
        "kernels are interpreted where there is no GPU; tests/gpu runs them compiled", allow_module_level=True
    )

import bounds
import tiny
import toys
from members import Rank, pass_of, steps, together
from penstock import LLM, SamplingParams
from penstock.arch.layout import GroupId, GroupKind
from penstock.arch.spec import SWIGLU, Activation, MoeSpec, Router, Scoring
from penstock.engine import measuring, placing
from penstock.memory.device import peak_of
from penstock.models import decoder
from penstock.ops import experts
from penstock.ops.experts import Grouped, experts_reference
from penstock.ops.linear import gated, linear
from penstock.ops.matrix import GroupViews, Matrix
from penstock.ops.slots import ExpertParts, Places, SlotArrays
from penstock.ops.triton import expert_row as triton_row
from penstock.ops.triton import experts as triton_experts
from penstock.ops.triton import routing as triton_routing
from penstock.ops.triton import slots as triton_slots
from penstock.ops.triton.experts import expert_tuning
from penstock.ops.triton.routing import arrange, choose, most_blocks, route
from penstock.step.plan import Plan
from penstock.weights.checkpoint.reader import Checkpoint
from penstock.weights.streaming import slotted
from penstock.weights.streaming.lending import ExpertStream
from penstock.weights.streaming.stream import WeightStream
from penstock.weights.streaming.views import StillExperts

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-2, torch.float16: 4e-3}
"""Of the largest number; the interpreter truncates to bf16 where a GPU rounds."""
KERNELS = {"routing": triton_routing, "experts": triton_experts}
NOWHERE = 1 << 62
"""An address at which there is no memory."""


@pytest.fixture(autouse=True)
def _interpreted() -> Iterator[None]:
    """Of what is not given to them, kernels may read the matrices that a table says the addresses of, and
    nothing around them."""
    compute = triton_experts.products

    def products(x: Tensor, arranged: object, table: Tensor, h: Tensor, *rest: object) -> None:
        inner, hidden = h.shape[1], x.shape[1]
        numbers = 2 * inner * hidden, hidden * inner, 2 * inner, hidden
        matrices = [
            (at, at + count * x.element_size())
            for row in table.tolist()
            for at, count in zip(row, numbers, strict=False)
        ]
        with bounds.lent(span for span in matrices if span[0] not in (0, NOWHERE)):
            compute(x, arranged, table, h, *rest)  # type: ignore[arg-type]

    with (
        patch.object(experts, "_kernels", lambda device: triton_experts),
        patch.object(experts, "triton_kernels", KERNELS.get),
        patch.object(triton_experts, "products", products),
    ):
        yield


@dataclass
class Case:
    """Random experts, each in memory of its own, and tokens whose rows stand apart. levels: how many
    different scores there may be. biases: of gate_up, and of down."""

    tokens: int
    hidden: int
    inner: int
    experts: int
    top_k: int
    dtype: torch.dtype = torch.float32
    normalise: bool = True
    levels: int | None = None
    biases: int = 0
    activation: Activation = SWIGLU

    def __post_init__(self) -> None:
        router = Router(normalise=self.normalise)
        self.moe = MoeSpec(
            self.experts, self.top_k, self.inner, router, self.biases > 0, activation=self.activation
        )
        rng = torch.Generator().manual_seed(self.tokens * 1000 + self.hidden)
        self.x = torch.randn(self.tokens, self.hidden + 8, generator=rng).to(self.dtype)[:, 4:-4]
        scores = torch.randn(self.tokens, self.experts + 3, generator=rng)[:, : self.experts]
        self.scores = (scores if self.levels is None else (scores * self.levels / 4).round()).to(self.dtype)
        sizes = (2 * self.inner, self.hidden), (self.hidden, self.inner)
        self.weights = [
            [
                *((torch.randn(size, generator=rng) / size[1] ** 0.5).to(self.dtype) for size in sizes),
                *(torch.randn(size[0], generator=rng).to(self.dtype) for size in sizes[: self.biases]),
            ]
            for _ in range(self.experts)
        ]

    def grouped(self) -> Grouped:
        mixed = Grouped(self.x, self.scores, self.moe, biases=self.biases)
        mixed._h.fill_(math.nan)
        mixed.y.fill_(math.nan)
        return mixed

    def grouped_total(self) -> Tensor:
        mixed = self.grouped()
        mixed.compute(self.table(range(self.experts)))
        return mixed.total()

    def table(self, lent: Sequence[int]) -> Tensor:
        every = range(self.experts)
        return torch.tensor(
            [[w.data_ptr() if expert in lent else 0 for w in self.weights[expert]] for expert in every],
            dtype=torch.int64,
        )

    def reference(self) -> tuple[Tensor, Tensor]:
        zeros = torch.zeros(self.hidden, dtype=self.dtype)
        weights = [[*one, zeros] if self.biases == 1 else one for one in self.weights]
        return experts_reference(self.x, self.scores, self.moe, weights)

    def check(self) -> None:
        mixed = self.grouped()
        mixed.compute(self.table(range(self.experts)))
        chosen, want = self.reference()
        assert torch.tensor(mixed.counts()).nonzero().flatten().tolist() == chosen.unique().tolist()
        got = mixed.total()
        assert got.dtype == self.dtype
        torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE[self.dtype] * float(want.abs().amax()))


class TestChoose:
    @pytest.mark.parametrize("normalise", [False, True])
    @pytest.mark.parametrize(
        ("tokens", "count", "top_k"), [(1, 6, 2), (9, 128, 8), (3, 5, 5), (7, 60, 1), (300, 8, 3)]
    )
    def test_as_the_reference_does(self, tokens: int, count: int, top_k: int, normalise: bool) -> None:
        scores = torch.randn(tokens, count + 5, generator=torch.Generator().manual_seed(count))[:, 2:-3] * 4
        shares, chosen = choose(scores, MoeSpec(count, top_k, 1, Router(normalise=normalise)))
        probabilities = scores.double().softmax(-1)
        want, best = probabilities.topk(top_k)
        assert torch.equal(chosen.long(), best)
        torch.testing.assert_close(
            shares.double(), want / want.sum(-1, keepdim=True) if normalise else want, rtol=2e-6, atol=1e-9
        )

    @given(
        st.lists(st.sampled_from([0.0, -0.0, 1.0, -2.5, math.inf, -math.inf, 3e-39]), min_size=1, max_size=9),
        st.integers(1, 9),
    )
    @settings(max_examples=25)
    def test_of_equal_scores_the_lower_expert_wins(self, row: list[float], top_k: int) -> None:
        top_k = min(top_k, len(row))
        with np.errstate(invalid="ignore"):
            _, chosen = choose(torch.tensor([row]), MoeSpec(len(row), top_k, 1, Router(normalise=True)))
        assert (
            chosen[0].tolist() == sorted(range(len(row)), key=lambda expert: (-row[expert], expert))[:top_k]
        )

    def test_whatever_the_scores_are_the_experts_exist_and_differ(self) -> None:
        scores = torch.tensor([[math.nan, 1.0, -math.nan], [math.nan] * 3, [math.inf] * 3, [-math.inf] * 3])
        with np.errstate(invalid="ignore"):
            _, chosen = choose(scores, MoeSpec(3, 2, 1))
        for row in chosen.tolist():
            assert len(set(row)) == 2
            assert set(row) <= {0, 1, 2}


@pytest.mark.parametrize(
    ("dtype", "hidden", "inner", "biases", "activation"),
    [
        (torch.bfloat16, 64, 48, 0, SWIGLU),
        (torch.float16, 72, 20, 2, Activation(1.702, 1.0, 7.0)),
        (torch.bfloat16, 27, 65, 1, SWIGLU),
    ],
    ids=str,
)
@pytest.mark.parametrize("stretch", [32, 4096])
def test_a_single_token(
    dtype: torch.dtype,
    hidden: int,
    inner: int,
    biases: int,
    activation: Activation,
    stretch: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By rows of its experts' matrices, in one stretch and in several: all at once, and in two calls."""
    monkeypatch.setattr(triton_row, "one_row_tuning", lambda *_: (4, stretch, 4))
    case = Case(1, hidden, inner, 6, 3, dtype, biases=biases, activation=activation)
    case.check()
    mixed = case.grouped()
    for lent in ((0, 3, 4), (1, 2, 5)):
        mixed.compute(case.table(lent))
    assert torch.equal(mixed.total(), case.grouped_total())


@settings(max_examples=20)
@given(
    tokens=st.integers(0, 90),
    count=st.integers(1, 9),
    top_k=st.integers(1, 4),
    rows=st.sampled_from([1, 4, 16]),
    seed=st.integers(0, 9),
)
def test_pairs_by_expert(tokens: int, count: int, top_k: int, rows: int, seed: int) -> None:
    """Some experts are used by nobody, some by almost all; pairs are arranged in several turns."""
    top_k = min(top_k, count)
    rng = torch.Generator().manual_seed(seed)
    likely = torch.rand(tokens, count, generator=rng) * torch.linspace(0, 1, count) ** seed
    chosen = likely.topk(top_k).indices.int() if tokens else torch.empty(0, top_k, dtype=torch.int32)
    with patch.object(triton_routing, "_CHUNK", 64):
        order, blocks, counts = arrange(chosen, count, rows)
    flat = chosen.flatten().tolist()
    assert order.tolist() == sorted(range(len(flat)), key=lambda pair: (flat[pair], pair))
    assert counts.tolist() == [flat.count(expert) for expert in range(count)]
    want, start = [], 0
    for expert in range(count):
        end = start + flat.count(expert)
        want += [(expert, first, min(first + rows, end)) for first in range(start, end, rows)]
        start = end
    assert len(want) <= blocks.shape[1] == most_blocks(len(flat), count, rows)
    found = list(zip(*blocks.tolist(), strict=True))
    assert found[: len(want)] == want
    assert all(expert == -1 for expert, _, _ in found[len(want) :])


@settings(max_examples=40)
@given(
    count=st.sampled_from([4, 12, 60, 128]),
    top_k=st.integers(1, 8),
    router=st.sampled_from(
        [
            Router(),
            Router(normalise=True),
            Router(Scoring.SOFTMAX_OF_CHOSEN, scale=2.5),
            Router(Scoring.SIGMOID, normalise=True, correction=True),
            Router(Scoring.SIGMOID, correction=True, groups=4, top_groups=2),
        ]
    ),
    spread=st.sampled_from([0, 1, 9]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_single_token_is_routed_as_others_are(
    count: int, top_k: int, router: Router, spread: int, dtype: torch.dtype
) -> None:
    """In one launch instead of two, with many ties and few; what is not written is seen."""
    moe, rng = MoeSpec(count, min(top_k, count // 2), 8, router), torch.Generator().manual_seed(spread)
    logits = (torch.randn(1, count + 5, generator=rng) * spread).round()[:, 2:-3].to(dtype) / 2
    correction = torch.randn(count, generator=rng) if router.correction else None
    with (
        patch.object(triton_routing, "_choose", None),
        patch.object(triton_routing, "_arrange", None),
        patch.object(torch, "empty", lambda *shape, **how: torch.full(shape, 77, **how)),
    ):
        found = route(logits, moe, correction, None, 16)
    shares, chosen = choose(logits, moe, correction)
    for one, other in zip(found, (shares, *arrange(chosen, count, 16)), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("pairs", "count", "rows"), [(1, 8, 16), (7, 3, 4), (8, 128, 16), (100, 4, 16), (40, 1, 16)]
)
def test_blocks_are_never_more_than_there_is_room_for(pairs: int, count: int, rows: int) -> None:
    """The most there can be: every expert has one pair beyond full blocks, as far as pairs go."""
    used = min(pairs, count)
    counts = [1] * used
    counts[0] += (pairs - used) // rows * rows
    assert sum(-(-n // rows) for n in counts) == most_blocks(pairs, count, rows)


class TestProducts:
    @pytest.mark.parametrize(
        ("tokens", "hidden", "inner", "count", "top_k", "dtype"),
        [
            (1, 48, 40, 6, 2, torch.float32),
            (7, 65, 33, 5, 3, torch.bfloat16),
            (7, 65, 33, 5, 3, torch.float32),
            (37, 40, 13, 9, 4, torch.float16),
            (5, 300, 17, 3, 1, torch.bfloat16),
        ],
    )
    def test_against_the_steps(
        self, tokens: int, hidden: int, inner: int, count: int, top_k: int, dtype: torch.dtype
    ) -> None:
        Case(tokens, hidden, inner, count, top_k, dtype, normalise=bool(tokens % 2)).check()

    @pytest.mark.parametrize("dtype", TOLERANCE)
    @pytest.mark.parametrize("biases", [0, 1, 2])
    def test_biases_and_a_clamped_activation(self, biases: int, dtype: torch.dtype) -> None:
        """As gpt-oss has them; a rank that is not the first has no bias of down."""
        clamped = Activation(alpha=1.702, shift=1.0, limit=0.7)
        for tokens, hidden, inner in ((1, 48, 40), (9, 65, 33)):
            Case(tokens, hidden, inner, 5, 3, dtype, biases=biases, activation=clamped).check()
            Case(tokens, hidden, inner, 5, 3, dtype, biases=biases).check()

    @pytest.mark.parametrize("tokens", [1, 9, 40, 80])
    def test_every_size_of_blocks(self, tokens: int) -> None:
        case = Case(tokens, 48, 24, 2, 2, torch.float16)
        case.check()
        assert expert_tuning(2 * tokens, 2, torch.float16).rows == {1: 16, 9: 32, 40: 64, 80: 128}[tokens]

    def test_ties(self) -> None:
        case = Case(24, 40, 24, 6, 3, levels=3)
        assert all(len(row.unique()) < 6 for row in case.scores)
        case.check()

    def test_nobody(self) -> None:
        case = Case(0, 40, 24, 6, 3)
        mixed = case.grouped()
        mixed.compute(case.table(range(6)))
        assert mixed.counts() == [0] * 6
        assert mixed.total().shape == (0, 40)

    def test_experts_that_nobody_takes_are_not_read(self) -> None:
        """They lie where there is no memory at all."""
        case = Case(3, 40, 24, 12, 2)
        taken = case.reference()[0].unique().tolist()
        assert len(taken) < 12
        table = case.table(taken)
        table[table == 0] = NOWHERE
        mixed = case.grouped()
        mixed.compute(table)
        assert torch.equal(mixed.total(), all_at_once(case))

    @pytest.mark.parametrize("tokens", [1, 13])
    @pytest.mark.parametrize("seed", range(2))
    def test_waves_compute_the_same(self, tokens: int, seed: int) -> None:
        """Random experts at a time, some of them used by nobody; those that are not there have the address 0,
        where nothing can be read."""
        case, rng = (
            Case(tokens, 65, 33, 7, 3, levels=2 if seed % 2 else None),
            torch.Generator().manual_seed(seed),
        )
        mixed, left = case.grouped(), torch.randperm(7, generator=rng).tolist()
        mixed.counts()
        while left:
            count = int(torch.randint(1, 4, (), generator=rng))
            wave, left = sorted(left[:count]), left[count:]
            before = mixed.y.clone()
            mixed.compute(case.table(wave), range(wave[0], wave[-1] + 1) if seed < 2 else None)
            chosen = case.reference()[0].flatten()
            others = ~torch.isin(chosen, torch.tensor(wave))
            torch.testing.assert_close(mixed.y[others], before[others], rtol=0, atol=0, equal_nan=True)
        assert torch.equal(mixed.total(), all_at_once(case))


def all_at_once(case: Case) -> Tensor:
    mixed = case.grouped()
    mixed.compute(case.table(range(case.experts)))
    return mixed.total()


# ---- in an engine

SETTINGS = {
    "device": "cpu",
    "dtype": "float32",
    "max_length": 128,
    "block_size": 4,
    "max_step_tokens": 16,
    "max_sequences": 3,
}
GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=-1)


@pytest.fixture
def _lean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "peak_of", lambda device, run: 0 * peak_of(device, run))
    monkeypatch.setattr(placing, "copy_rate", lambda *_: 25e9)
    monkeypatch.setattr(placing, "memory_read", lambda *_: 40e9)


@pytest.mark.usefixtures("_lean")
@pytest.mark.parametrize(
    "name", ["qwen3_moe_dense_layer", "qwen2_moe", "glm4_moe", "glm4_moe_groups", "gpt_oss"]
)
def test_what_streams_in_waves_computes_the_same(name: str, tmp_path: Path) -> None:
    """Resident, from one table for each layer; then with most experts on the host; tokens are the reference
    model's."""
    references = tiny.references(name)[:2]
    prompts = [one.prompt for one in references]

    def run(**more: object) -> tuple[object, int, LLM]:
        with (
            LLM(tiny.checkpoint(name), **(SETTINGS | more), cache=tmp_path, kv_blocks=60) as llm,
            patch.object(ExpertStream, "each", _not_one_by_one),
            patch.object(StillExperts, "each", _not_one_by_one),
        ):
            found = llm.generate(prompts, GREEDY)
            for one, reference in zip(found, references, strict=True):
                assert list(one.tokens) == reference.tokens[:3]
            return found, llm.memory.weights.copied, llm

    whole, copied, llm = run()
    assert copied == 0
    assert llm.booted.weights.experts_rest
    budget = llm.memory.budget
    beside = budget.activations + budget.kv
    streamed, copied, llm = run(
        device_memory=beside + int(0.6 * budget.weights), host_memory=beside + 2 * budget.weights
    )
    assert copied > 0
    assert not llm.booted.weights.experts_rest
    assert streamed == whole


def test_padding_takes_what_the_first_takes() -> None:
    case = Case(6, 32, 16, 8, 2)
    padding = torch.tensor([False, False, False, True, True, True])
    mixed = Grouped(case.x, case.scores, case.moe, padding=padding)
    _, chosen = choose(case.scores, case.moe)
    asked = torch.cat((chosen[:3], chosen[:1].expand(3, 2)))
    assert torch.equal(mixed.pairs, torch.bincount(asked.flatten(), minlength=8).int())
    mixed.compute(case.table(range(8)))
    assert torch.equal(mixed.total()[:3], case.grouped_total()[:3])


@contextmanager
def _slots_interpreted(order: list[str] | None = None) -> Iterator[list[list[int]]]:
    """Kernels may read the host's memory of a layer's experts, and write to all places. Yields who came to
    which place."""
    came, fetch, fetch_ahead = list[list[int]](), triton_slots.fetch, triton_slots.fetch_ahead

    def lent(parts: ExpertParts, places: Places, host: int, part: int) -> None:
        start, stop = parts.starts[part : part + 2].tolist()
        came.extend(parts.coming[:, start:stop].T.tolist())
        if order is not None:
            order.append("fetch")
        ends = host + 8 * places.size, places.base + (places.transit + places.ring + 1) * places.size
        with bounds.lent([(host, ends[0]), (places.base, ends[1])]):
            fetch(parts, places, host, part)

    def lent_ahead(arrays: SlotArrays, places: Places, host: int) -> None:
        ends = host + 64 * places.size, places.base + (places.transit + places.ring + 1) * places.size
        with bounds.lent([(host, ends[0]), (places.base, ends[1])]):
            fetch_ahead(arrays, places, host)

    with patch.object(triton_slots, "fetch", lent), patch.object(triton_slots, "fetch_ahead", lent_ahead):
        yield came


def _begins_with_the_device(weights: WeightStream) -> None:
    """A pass that is recorded asks the device, whoever decided before."""
    experts = weights.experts
    assert isinstance(experts, slotted.SlotExperts)
    layer = min(experts.mixtures)
    for _ in experts.waves([GroupId(GroupKind.EXPERT, layer, 0)]):
        pass
    with patch.object(experts._slots, "lend_ring", wraps=experts._slots.lend_ring) as lend:
        weights.begin_pass()
        weights.begin_pass()
    lend.assert_called_once()


def few_steps() -> list[Plan]:
    """Of two requests; the last one is taken twice."""
    first, second, third = (replace(plan, shares=plan.shares[:2]) for plan in steps())
    return [first, second, third, third]


@cache
def resident(name: str) -> list[Tensor]:
    """What these steps give where all experts rest on the device, by the same kernels."""
    return pass_of(tiny.checkpoint(name), 0, plans=few_steps())


@pytest.mark.parametrize(
    ("name", "many", "most"),
    [("qwen3_moe", 0, 0.9), ("qwen3_moe", 4, 0.9), ("glm4_moe", 4, 0.98), ("gpt_oss", 4, 0.9)],
)
def test_experts_that_the_device_decides_about_compute_the_same(
    name: str, many: int, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With slots for some of them, or none; with a dense first layer and shared experts; with biases; where
    the host decides about steps of many tokens, in turns."""
    monkeypatch.setattr(slotted, "_MANY", many or 1 << 20)
    path, plans, whole = tiny.checkpoint(name), few_steps(), resident(name)
    some = set[bool]()
    for part in (0.2, most):
        with _slots_interpreted() as came:
            rank = Rank(Checkpoint.open(path), part=part, copies=True)
            assert isinstance(rank.weights.experts, slotted.SlotExperts)
            found = together([rank], plans)[0]
            stats = rank.weights.stats()
            asked, hits, foretold, right = rank.weights.experts.snapshots.exact().counts.sum(0).tolist()
            _begins_with_the_device(rank.weights)
            rank.weights.close()
        assert all(map(torch.equal, found, whole))
        assert len(came) == asked - hits
        assert stats.copied >= len(came) * rank.weights.room.size
        assert (hits > 0) == (rank.weights.room.slots > 0)
        assert (foretold > 0) == (rank.weights.room.device_ring >= 4)
        assert (stats.experts.foretold, stats.experts.right) == (foretold, right)
        some.add(hits > 0)
    assert some == {False, True}


def test_whatever_is_foretold_the_same_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the routers, wrongly, or not at all; whether there was time for all of it or for some pieces."""
    monkeypatch.setattr(slotted, "_MANY", 1 << 20)
    monkeypatch.setattr(slotted, "_FEW", 1 << 20)
    monkeypatch.setattr(triton_slots, "_WORDS", 256)
    path, plans, ahead = tiny.checkpoint("qwen3_moe"), few_steps(), triton_slots.fetch_ahead
    whole, foretell = resident("qwen3_moe"), triton_slots.foretell
    said, heard = list[Tensor](), list[Tensor]()

    def in_part(arrays: SlotArrays, places: Places, host: int) -> None:
        ahead(arrays, places, host)
        arrays.done.clamp_(max=1)

    def listened(arrays: SlotArrays, scores: Tensor, *rest: object) -> None:
        heard.append(scores)
        foretell(arrays, scores, *rest)  # type: ignore[arg-type]

    for sign, fetch_ahead in ((1, ahead), (1, in_part), (-1, ahead), (0, ahead)):

        def foretold(layer: int, scores: Tensor, sign: int = sign) -> Tensor:
            said.append(scores * sign)
            return said[-1]

        with (
            patch.object(triton_slots, "fetch_ahead", fetch_ahead),
            patch.object(triton_slots, "foretell", listened),
            patch.object(slotted, "_LEAST_RING", 4 if sign else 99),
            _slots_interpreted(),
        ):
            rank = Rank(Checkpoint.open(path), part=0.9, copies=True)
            rank._decoder.routing = SimpleNamespace(scores=lambda *given: given[-1], foretold=foretold)
            found = together([rank], plans)[0]
            assert (rank.weights.experts.counts(exact=True).right > 0) == (sign != 0)
            rank.weights.close()
        assert all(map(torch.equal, found, whole))
    assert len(heard) == 3 * 2 * len(plans)
    assert all(one is other for one, other in zip(heard, said, strict=True))


def test_shared_experts_are_queued_behind_the_first_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    """They do not need what comes, so they are computed meanwhile."""
    monkeypatch.setattr(slotted, "_MANY", 1 << 20)
    order, shared = list[str](), decoder.shared_experts

    def noted(x: Tensor, weights: GroupViews) -> Tensor:
        order.append("shared")
        return shared(x, weights)

    with _slots_interpreted(order), patch.object(decoder, "shared_experts", noted):
        rank = Rank(Checkpoint.open(tiny.checkpoint("glm4_moe")), part=0.2, copies=True)
        together([rank], steps()[:1])
        rank.weights.close()
    assert order[0] == "fetch"
    assert "shared" in order


def _at(address: int, count: int, dtype: torch.dtype) -> Tensor:
    """The tensor that lies there."""
    size = count * dtype.itemsize
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=dtype)


def _products(
    x: Tensor,
    arranged: tuple[Tensor, Tensor],
    table: Tensor,
    h: Tensor,
    y: Tensor,
    tuning: object,
    part: range,
    kind: object,
) -> None:
    """What kernels of the toy format would do: the reference for each block, from the addresses alone."""
    (inner, hidden), top_k, (order, blocks) = (h.shape[1], x.shape[1]), len(y) // len(x), arranged
    for expert, start, end in blocks[:, part.start : part.stop].T.tolist():
        if expert < 0 or not table[expert, 0]:
            continue
        values, scale, down, down_scale = table[expert].tolist()
        parts = {
            "values": _at(values, 2 * inner * hidden, torch.int8).view(2 * inner, hidden),
            "scale": _at(scale, 2 * inner, torch.float32),
        }
        pairs = order[start:end].long()
        h[start:end] = gated(x[pairs // top_k], Matrix(toys.Int8(), (2 * inner, hidden), parts))
        parts = {
            "values": _at(down, hidden * inner, torch.int8).view(hidden, inner),
            "scale": _at(down_scale, hidden, torch.float32),
        }
        y[pairs] = linear(h[start:end], Matrix(toys.Int8(), (hidden, inner), parts))


def test_a_format_may_bring_its_own_products_of_many_experts(tmp_path: Path) -> None:
    """Experts of few bits from one table, resident and in waves; a format without computes one by one."""
    with toys.known():
        few, dense = toys.checkpoints("mixtral", tmp_path)
        want, one_by_one = pass_of(dense, 0), pass_of(few, 0)
        kernels = SimpleNamespace(products=_products, expert_tuning=expert_tuning)
        with (
            patch.object(toys.Int8, "expert_kernels", "toys"),
            patch.object(experts, "triton_kernels", (KERNELS | {"toys": kernels}).get),
            patch.object(ExpertStream, "each", _not_one_by_one),
            patch.object(StillExperts, "each", _not_one_by_one),
        ):
            resident, streamed = pass_of(few, 0), pass_of(few, 0, part=0.4)
    assert all(map(torch.equal, resident, streamed))
    for found in (one_by_one, resident):
        for mine, theirs in zip(found, want, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-5 * float(theirs.abs().amax()))


def _not_one_by_one(self: object, experts: Sequence[GroupId]) -> None:
    raise AssertionError("an expert was taken by itself")


def test_a_table_says_where_experts_are_lent() -> None:
    with LLM(tiny.checkpoint("mixtral"), **SETTINGS) as llm:
        weights = llm.booted.weights
        for layer in range(3):
            experts = weights.experts
            assert experts is weights.standing().experts
            table = experts.table(layer)
            assert table is not None
            assert table is experts.table(layer)
            every = [GroupId(GroupKind.EXPERT, layer, expert) for expert in range(len(table))]
            for (_, views), row in zip(experts.each(every), table.tolist(), strict=True):
                assert row == [views.matrices[name].tensor.data_ptr() for name in ("gate_up", "down")]
