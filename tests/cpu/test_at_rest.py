"""Experts that are computed on the host, where they rest, give what they give on the device: alone, beside
others that stream, in every format."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import tiny
import toys
from members import pass_of
from penstock.arch.layout import GroupId
from penstock.arch.shards import Shard
from penstock.arch.spec import SWIGLU
from penstock.models import moe
from penstock.ops.experts import outputs_at_rest
from penstock.ops.kernels import plain_torch
from penstock.ops.linear import gated, linear
from penstock.ops.matrix import GroupViews, Matrix
from penstock.ops.native.experts import ThreadPool
from penstock.ops.native.few_bits import library
from penstock.weights.checkpoint.reader import Checkpoint
from penstock.weights.pack.reader import Pack
from penstock.weights.pack.writer import write_pack
from penstock.weights.streaming.lending import ExpertStream
from penstock.weights.streaming.source import PackSource
from quantised import SCHEMES, checkpoints, matrix_of

MOST = 1 << 20
"""Tokens of an expert: no step has as many."""


@pytest.fixture
def at_rest(monkeypatch: pytest.MonkeyPatch) -> list[GroupId]:
    """Experts that were lent where they rest, and computed."""
    lend, computed = ExpertStream.at_rest, list[GroupId]()

    @contextmanager
    def noted(self: ExpertStream, experts: Sequence[GroupId]) -> Iterator[Mapping[GroupId, GroupViews]]:
        with lend(self, experts) as lent:
            computed.extend(lent)
            yield lent

    monkeypatch.setattr(ExpertStream, "at_rest", noted)
    return computed


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "qwen3_moe_dense_layer", "qwen2_moe", "glm4_moe"])
@pytest.mark.parametrize("rows", [1, 3, MOST])
def test_what_is_computed_at_rest_is_what_is_computed_elsewhere(
    name: str, rows: int, at_rest: list[GroupId]
) -> None:
    """To the last bit: on a CPU both are the same products. Few rows leave others, which stream beside."""
    resident = pass_of(tiny.checkpoint(name), 0)
    assert same(resident, pass_of(tiny.checkpoint(name), 0, part=0.4))
    assert not at_rest
    taken = list[GroupId]()
    each = ExpertStream.each

    def noted(self: ExpertStream, experts: Sequence[GroupId]) -> object:
        taken.extend(experts)
        return each(self, experts)

    with patch.object(ExpertStream, "each", noted):
        assert same(resident, pass_of(tiny.checkpoint(name), 0, part=0.4, rows_at_rest=rows))
    assert at_rest
    assert taken or rows == MOST


def test_nothing_rests_where_all_are_on_the_device(at_rest: list[GroupId]) -> None:
    assert same(
        pass_of(tiny.checkpoint("mixtral"), 0), pass_of(tiny.checkpoint("mixtral"), 0, rows_at_rest=MOST)
    )
    assert not at_rest


def test_in_a_format_of_few_bits(tmp_path: Path, at_rest: list[GroupId]) -> None:
    with toys.known():
        few, dense = toys.checkpoints("mixtral", tmp_path)
        resident = pass_of(few, 0)
        assert same(resident, pass_of(dense, 0))
        for path in (few, dense):
            at_rest.clear()
            assert same(resident, pass_of(path, 0, part=0.4, rows_at_rest=2))
            assert at_rest


@pytest.mark.parametrize("part", [0.4, 0.7])
def test_on_two_ranks(part: float, at_rest: list[GroupId]) -> None:
    want = pass_of(tiny.checkpoint("qwen3_moe"), 2, part=part)
    assert same(want, pass_of(tiny.checkpoint("qwen3_moe"), 2, part=part, rows_at_rest=2))
    assert at_rest


@pytest.mark.parametrize("scheme", ["gptq", "gptq_order", "awq", "packed_8", "fp8_128", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("ranks", [0, 2])
def test_experts_of_few_bits(scheme: str, ranks: int, tmp_path: Path, at_rest: list[GroupId]) -> None:
    """Whole, and cut by rows and columns for ranks; by plain torch, and by the kernels for a CPU."""
    few, dense = checkpoints(tiny.checkpoint("mixtral"), tmp_path, SCHEMES[scheme])
    for kernels in (False, True):
        resident = pass_of(few, ranks, kernels=kernels)
        assert kernels or same(resident, pass_of(dense, ranks, kernels=False))
        at_rest.clear()
        assert same(resident, pass_of(few, ranks, part=0.4, kernels=kernels, rows_at_rest=2))
        assert at_rest


@pytest.mark.parametrize("scheme", ["gptq_order", "awq", "fp8_128", "nvfp4"])
def test_experts_of_few_bits_from_packs_of_ranks(scheme: str, tmp_path: Path, at_rest: list[GroupId]) -> None:
    few, _ = checkpoints(tiny.checkpoint("mixtral"), tmp_path, SCHEMES[scheme])
    want, sources = pass_of(few, 2), list[PackSource]()
    for rank in range(2):
        with Checkpoint.open(few) as checkpoint:
            write_pack(checkpoint, tmp_path / str(rank), "float32", shard=Shard(rank, 2))
        sources.append(PackSource(Pack.open(tmp_path / str(rank), Shard(rank, 2))))
    assert same(want, pass_of(few, 2, source=sources, part=0.4, rows_at_rest=2))
    assert at_rest


def test_a_product_at_rest_is_the_feed_forward() -> None:
    """Both paths against the formula, with rows in the order of pairs."""
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(5, 8, generator=rng), torch.full((10, 8), torch.nan)
    pairs = torch.tensor([3, 0, 9, 1, 2, 4, 5, 6, 7, 8])
    groups = moe._groups(0, 3)
    spans = {groups[0]: slice(0, 3), groups[2]: slice(3, 10)}
    matrices = {
        "gate_up": Matrix.of(torch.randn(12, 8, generator=rng)),
        "down": Matrix.of(torch.randn(8, 6, generator=rng)),
    }
    lender = Lender(GroupViews(matrices, {}, ()))
    with moe._at_rest(x, y, pairs, spans, lender, 3) as others:  # type: ignore[arg-type]
        assert others == [groups[2]]
        assert lender.asked == [groups[0]]
        assert not lender.over
    assert lender.over
    mine = pairs[:3]
    want = linear(gated(x[mine // 2], matrices["gate_up"]), matrices["down"])
    assert torch.equal(y[mine], want)
    assert y[pairs[3:]].isnan().all()


@pytest.mark.parametrize("layout", ["dense", "mxfp4", "gptq_order"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits(layout: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several experts in one call of the kernels, where these take them: as one by one, but for roundings."""
    if library() is None:
        pytest.skip("no C compiler")
    calls, feed_forward = list[Sequence[int]](), ThreadPool.feed_forward

    def noted(self: ThreadPool, x: Tensor, experts: object, counts: Sequence[int], *others: object) -> None:
        calls.append(counts)
        feed_forward(self, x, experts, counts, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(ThreadPool, "feed_forward", noted)
    x = torch.randn(24, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    experts, counts = list[GroupViews](), (3, 16, 1, 4)
    for seed in range(len(counts)):
        rng = torch.Generator().manual_seed(seed)
        made = {
            "gate_up": torch.randn(128, 64, generator=rng) / 8,
            "down": torch.randn(64, 64, generator=rng) / 8,
        }
        dense = layout == "dense"
        experts.append(
            GroupViews(
                {
                    name: Matrix.of(one.to(dtype)) if dense else matrix_of(SCHEMES[layout], one)[0]
                    for name, one in made.items()
                },
                {},
                (),
            )
        )
    with plain_torch():
        want = outputs_at_rest(x.clone(), experts, counts, SWIGLU)
    got = outputs_at_rest(x.clone(), experts, counts, SWIGLU)
    assert calls == ([] if layout == "gptq_order" else [counts])
    torch.testing.assert_close(got, want, atol=2e-2 if dtype == torch.bfloat16 else 3e-3, rtol=1e-2)
    many = torch.cat((x, x))
    assert outputs_at_rest(many, experts[:2], (17, 31), SWIGLU).shape == many.shape
    assert len(calls) <= 1, "many rows are torch's"


class Lender:
    """Lends the same views of every expert that it is asked for."""

    def __init__(self, views: GroupViews) -> None:
        self.views, self.asked, self.over = views, list[GroupId](), False

    @contextmanager
    def at_rest(self, experts: Sequence[GroupId]) -> Iterator[Mapping[GroupId, GroupViews]]:
        self.asked += experts
        yield dict.fromkeys(experts, self.views)
        self.over = True
