"""A mixture of experts by kernels as a GPU compiles them: against the steps one by one at real shapes, in
waves, and in a graph."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from penstock.arch.spec import MoeSpec, Router, Scoring
from penstock.ops.experts import Grouped, experts_reference, lower_first
from penstock.ops.route import route
from penstock.ops.triton.experts import expert_tuning
from penstock.ops.triton.routing import arrange, choose
from penstock.ops.triton.routing import route as route_pairs

DEVICE = "cuda"
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 2.5e-3, torch.float32: 2e-5}
"""Of the largest number: a few roundings of what is between the products, and other orders of sums."""


@dataclass(frozen=True)
class Shape:
    hidden: int
    inner: int
    experts: int
    top_k: int
    normalise: bool = True

    @property
    def moe(self) -> MoeSpec:
        return MoeSpec(self.experts, self.top_k, self.inner, Router(normalise=self.normalise))


QWEN = Shape(2048, 768, 128, 8)
MIXTRAL = Shape(4096, 14336, 8, 2)
SHAPES = {
    "qwen3-30b-a3b": QWEN,
    "mixtral-8x7b": MIXTRAL,
    "a third of qwen": Shape(2048, 256, 128, 8),
    "odd": Shape(1000, 333, 60, 4, normalise=False),
    "narrow": Shape(1024, 13, 9, 3),
}


@dataclass
class Layer:
    shape: Shape
    dtype: torch.dtype
    weights: list[tuple[Tensor, Tensor]] = field(init=False)
    table: Tensor = field(init=False)

    def __post_init__(self) -> None:
        shape, rng = self.shape, torch.Generator(DEVICE).manual_seed(0)

        def matrix(rows: int, columns: int) -> Tensor:
            return torch.empty(rows, columns, dtype=self.dtype, device=DEVICE).normal_(
                std=columns**-0.5, generator=rng
            )

        every = range(shape.experts)
        self.weights = [
            (matrix(2 * shape.inner, shape.hidden), matrix(shape.hidden, shape.inner)) for _ in every
        ]
        self.table = torch.tensor([[w.data_ptr() for w in pair] for pair in self.weights], device=DEVICE)

    def step(self, tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Hidden states, and scores that some experts like more than others do."""
        rng = torch.Generator(DEVICE).manual_seed(seed + tokens)
        x = torch.empty(tokens, self.shape.hidden, dtype=self.dtype, device=DEVICE).normal_(generator=rng)
        scores = torch.empty(tokens, self.shape.experts, device=DEVICE).normal_(generator=rng)
        return x, (scores + torch.linspace(0, 1, self.shape.experts, device=DEVICE)).to(self.dtype)

    def grouped(self, x: Tensor, scores: Tensor) -> Grouped:
        return Grouped(x, scores, self.shape.moe)

    def whole(self, x: Tensor, scores: Tensor) -> Tensor:
        mixed = self.grouped(x, scores)
        mixed.compute(self.table)
        return mixed.total()


CASES = [
    *((name, tokens, torch.bfloat16) for name in SHAPES for tokens in (1, 2, 16, 64, 256, 700, 3000)),
    *((name, tokens, torch.float32) for name in SHAPES if name != "mixtral-8x7b" for tokens in (1, 16, 300)),
    ("mixtral-8x7b", 5, torch.float32),
    *(("qwen3-30b-a3b", tokens, torch.float16) for tokens in (1, 64, 1025)),
]


@pytest.fixture(scope="module")
def layers() -> dict[tuple[str, torch.dtype], Layer]:
    """One at a time: they are large."""
    return {}


def used_in(mixed: Grouped) -> list[int]:
    return [expert for expert, count in enumerate(mixed.counts()) if count]


def layer_of(layers: dict[tuple[str, torch.dtype], Layer], name: str, dtype: torch.dtype) -> Layer:
    if (name, dtype) not in layers:
        layers.clear()
        layers[name, dtype] = Layer(SHAPES[name], dtype)
    return layers[name, dtype]


@pytest.mark.parametrize(("name", "tokens", "dtype"), CASES)
def test_against_the_steps(
    layers: dict[tuple[str, torch.dtype], Layer], name: str, tokens: int, dtype: torch.dtype
) -> None:
    layer = layer_of(layers, name, dtype)
    x, scores = layer.step(tokens)
    mixed = layer.grouped(x, scores)
    mixed.compute(layer.table)
    chosen, want = experts_reference(x, scores, layer.shape.moe, layer.weights)
    assert used_in(mixed) == chosen.unique().tolist()
    torch.testing.assert_close(mixed.total(), want, rtol=0, atol=TOLERANCE[dtype] * float(want.abs().amax()))


@pytest.mark.parametrize(
    ("name", "tokens"),
    [("qwen3-30b-a3b", 1), ("qwen3-30b-a3b", 100), ("mixtral-8x7b", 40), ("qwen3-30b-a3b", 2500)],
)
def test_waves_compute_the_same(layers: dict[tuple[str, torch.dtype], Layer], name: str, tokens: int) -> None:
    """To the last bit, from tables in which most addresses are 0."""
    layer, rng = layer_of(layers, name, torch.bfloat16), torch.Generator().manual_seed(tokens)
    x, scores = layer.step(tokens)
    want = layer.whole(x, scores)
    for most in (1, 4, 30):
        mixed = layer.grouped(x, scores)
        left = used_in(mixed)
        left = [left[at] for at in torch.randperm(len(left), generator=rng).tolist()]
        while left:
            wave, left = sorted(left[:most]), left[most:]
            table = torch.zeros_like(layer.table)
            table[wave] = layer.table[wave]
            mixed.compute(table, range(wave[0], wave[-1] + 1))
        assert torch.equal(mixed.total(), want)


@pytest.mark.parametrize("tokens", [7, 64, 250, 1500])
def test_a_row_is_the_same_wherever_it_stands(
    layers: dict[tuple[str, torch.dtype], Layer], tokens: int
) -> None:
    """Tokens in another order, and beside other tokens: to the last bit."""
    layer = layer_of(layers, "qwen3-30b-a3b", torch.bfloat16)
    x, scores = layer.step(tokens)
    want, order = layer.whole(x, scores), torch.randperm(tokens, device=DEVICE)
    assert torch.equal(layer.whole(x[order], scores[order]), want[order])
    others, other_scores = layer.step(tokens, seed=1)
    half = tokens // 2
    mixed = layer.whole(torch.cat((x[:half], others[half:])), torch.cat((scores[:half], other_scores[half:])))
    assert torch.equal(mixed[:half], want[:half])


@pytest.mark.parametrize("tokens", [1, 33, 400, 9000])
@pytest.mark.parametrize(("count", "top_k"), [(8, 2), (60, 4), (128, 8), (256, 8), (5, 5)])
@pytest.mark.parametrize("normalise", [False, True])
def test_choice_and_arrangement(tokens: int, count: int, top_k: int, normalise: bool) -> None:
    """With many ties, of which the lower expert wins."""
    rng = torch.Generator(DEVICE).manual_seed(tokens)
    scores = (torch.empty(tokens, count, device=DEVICE).normal_(generator=rng) * 4).round().div(2)
    shares, chosen = choose(scores, MoeSpec(count, top_k, 1, Router(normalise=normalise)))
    want = scores.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    assert torch.equal(chosen.long(), want)
    best = scores.double().softmax(-1).gather(1, want)
    torch.testing.assert_close(
        shares.double(), best / best.sum(-1, keepdim=True) if normalise else best, rtol=1e-5, atol=1e-7
    )
    for rows in (16, 128):
        order, blocks, counts = arrange(chosen, count, rows)
        sorted_experts, places = chosen.flatten().sort(stable=True)
        assert torch.equal(order.long(), places)
        assert torch.equal(counts.long(), torch.bincount(chosen.flatten(), minlength=count))
        experts, starts, ends = blocks[:, blocks[0] >= 0].long()
        assert torch.equal(experts, sorted_experts[starts].long())
        assert torch.equal(experts, sorted_experts[ends - 1].long())
        assert torch.equal(ends[:-1], starts[1:])
        assert (int(starts[0]), int(ends[-1])) == (0, tokens * top_k)
        assert int((ends - starts).max()) <= rows
        assert len(experts) == int((-(-counts.long() // rows)).sum())


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize("tokens", [1, 24])
def test_a_graph_follows_its_inputs_without_a_wait(
    layers: dict[tuple[str, torch.dtype], Layer], tokens: int
) -> None:
    """What is replayed over other tokens is what is computed eagerly; nothing is waited for on the host."""
    layer = layer_of(layers, "qwen3-30b-a3b", torch.bfloat16)
    x, scores = layer.step(tokens)
    layer.whole(x, scores)
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer.whole(x, scores)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer.whole(x, scores)
    for seed in range(1, 6):
        for kept, new in zip((x, scores), layer.step(tokens, seed), strict=True):
            kept.copy_(new)
        out.zero_()
        graph.replay()
        assert torch.equal(out, layer.whole(x, scores))


def test_memory_of_experts_that_nobody_takes_is_not_read() -> None:
    """They have addresses at which there is nothing: a read would end the process' device context."""
    layer = Layer(Shape(256, 96, 16, 2), torch.bfloat16)
    x, scores = layer.step(3)
    want, used = layer.whole(x, scores), used_in(layer.grouped(x, scores))
    assert len(used) < 16
    for nowhere in (0, 1 << 46):
        table = torch.full_like(layer.table, nowhere)
        table[used] = layer.table[used]
        mixed = layer.grouped(x, scores)
        mixed.compute(table)
        assert torch.equal(mixed.total(), want)


def test_every_tuning_is_visited() -> None:
    """What is above covers the sizes of blocks that real steps have."""
    seen = {
        expert_tuning(tokens * SHAPES[name].top_k, SHAPES[name].experts, dtype)
        for name, tokens, dtype in CASES
    }
    assert {tuning.rows for tuning in seen} == {16, 32, 64, 128}


@pytest.mark.parametrize("tokens", [1, 33, 4000])
@pytest.mark.parametrize(
    ("count", "top_k", "router"),
    [
        (256, 8, Router(Scoring.SIGMOID, normalise=True, correction=True)),
        (160, 8, Router(Scoring.SIGMOID, normalise=True, correction=True, scale=2.5)),
        (256, 8, Router(Scoring.SIGMOID, normalise=True, correction=True, groups=8, top_groups=4, scale=2.5)),
        (60, 4, Router(groups=3, top_groups=2)),
        (32, 4, Router(Scoring.SOFTMAX_OF_CHOSEN)),
    ],
)
def test_routers(tokens: int, count: int, top_k: int, router: Router) -> None:
    """Scores lie far apart for rounding, or are equal; of equal ones the lower expert wins."""
    rng = torch.Generator(DEVICE).manual_seed(tokens)
    logits = (torch.empty(tokens, count, device=DEVICE).normal_(generator=rng) * 8).round() / 4
    correction = (torch.empty(count, device=DEVICE).normal_(generator=rng) * 4).round() / 8
    moe, given = MoeSpec(count, top_k, 8, router), correction if router.correction else None
    shares, chosen = choose(logits, moe, given)
    want, best = route(logits, moe, given, lower_first)
    by_expert = torch.zeros(2, tokens, count, device=DEVICE)
    by_expert[0].scatter_(1, chosen.long(), shares)
    by_expert[1].scatter_(1, best, want)
    same = (chosen.long().sort(1).values == best.sort(1).values).all(1)
    assert same.float().mean() > 0.99  # the device's exponential may tell apart what is equal here
    torch.testing.assert_close(by_expert[0][same], by_expert[1][same], rtol=1e-5, atol=1e-7)
    if tokens == 1:
        of_one, *found = route_pairs(logits, moe, given, None, 16)
        torch.testing.assert_close(of_one, shares, rtol=1e-6, atol=1e-9)
        assert all(map(torch.equal, found, arrange(chosen, count, 16)))
