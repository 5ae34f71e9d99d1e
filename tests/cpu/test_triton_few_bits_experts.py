"""Products with all experts of few bits at once, interpreted on the CPU, against the same experts dense."""

import os
from collections.abc import Iterator
from functools import lru_cache
from math import prod
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip(
        "kernels are interpreted where there is no GPU; tests/gpu runs them compiled", allow_module_level=True
    )

import bounds
import tiny
from members import pass_of
from penstock.arch.formats.format import STORED_BYTES, matrix
from penstock.arch.layout import MixtureLayout
from penstock.arch.spec import SWIGLU, Activation, MoeSpec, Router
from penstock.ops import experts
from penstock.ops.experts import Grouped, experts_reference
from penstock.ops.matrix import Matrix
from penstock.ops.triton import experts as triton_experts
from penstock.ops.triton import few_bits_experts as kernels
from penstock.ops.triton import routing as triton_routing
from penstock.ops.triton.experts import ExpertTuning
from penstock.weights.streaming.lending import ExpertStream
from penstock.weights.streaming.views import StillExperts
from quantised import ALIKE, SCHEMES, checkpoints, matrix_of
from stacks import in_mxfp4

TUNINGS = (
    ExpertTuning(16, 64, 256, warps=4, stages=1, group=1),
    ExpertTuning(32, 64, 128, warps=4, stages=1, group=2),
)
BY_WARPS = ExpertTuning(kernels.BLOCK, 64, 256, warps=4, stages=1, group=1)
EXPERTS, TOP = 4, 2


@pytest.fixture(autouse=True)
def _interpreted() -> Iterator[None]:
    """Mixtures on a CPU are computed by kernels, which may read the tensors that a table says the addresses
    of, and nothing around them."""
    compute = kernels.products

    def products(x: Tensor, arranged: object, table: Tensor, h: Tensor, *rest: object) -> None:
        shapes = (2 * h.shape[1], x.shape[1]), (x.shape[1], h.shape[1])
        sizes = [
            prod(stored.shape) * STORED_BYTES[stored.dtype]
            for format, shape in zip(rest[-1].formats, shapes, strict=True)  # type: ignore[attr-defined]
            for stored in format.stored("float32", [matrix("experts.weight", *shape)])
        ]
        sizes += [x.element_size() * height for height, _ in shapes][: rest[-1].biases]  # type: ignore[attr-defined]
        rows = (zip(row, sizes, strict=True) for row in table.tolist())
        with bounds.lent((at, at + size) for row in rows for at, size in row if at):
            compute(x, arranged, table, h, *rest)  # type: ignore[arg-type]

    names = {"routing": triton_routing, "experts": triton_experts, "few_bits_experts": kernels}
    with (
        patch.object(experts, "_kernels", lambda device: triton_experts),
        patch.object(experts, "triton_kernels", names.get),
        patch.object(kernels, "products", products),
    ):
        yield


Expert = tuple[tuple[Matrix, Tensor], tuple[Matrix, Tensor]]
"""Of one expert gate_up and down, as they rest and in float32."""


@lru_cache(maxsize=3)
def weights(scheme: str, hidden: int, inner: int, mine: range | None = None) -> list[Expert]:
    """mine: the inner rows that a rank has."""
    rng, rank = torch.Generator().manual_seed(len(scheme) + hidden), mine or range(inner)
    rows = rank, range(rank.start + inner, rank.stop + inner)

    def one(height: int, width: int, seed: int, **part: object) -> tuple[Matrix, Tensor]:
        weight = torch.randn(height, width, generator=rng) / width**0.5
        return matrix_of(SCHEMES[scheme], weight, seed, **part)  # type: ignore[arg-type]

    return [
        (one(2 * inner, hidden, 2 * at, rows=rows), one(hidden, inner, 2 * at + 1, columns=mine))
        for at in range(EXPERTS)
    ]


KEPT = list[list[Tensor]]()
"""Biases that a table has addresses of."""


def mixed(
    its: list[Expert],
    tokens: int,
    tuning: ExpertTuning,
    biases: int = 0,
    activation: Activation = SWIGLU,
    dtype: torch.dtype = torch.float32,
) -> tuple[Grouped, Tensor, Tensor]:
    """A mixture that is to be computed, its table, and what the dense experts give."""
    hidden, inner = its[0][1][0].shape
    rng = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, hidden + 8, generator=rng).to(dtype)[:, 4:-4]
    scores = torch.randn(tokens, EXPERTS, generator=rng).to(dtype)
    moe = MoeSpec(EXPERTS, TOP, inner, Router(normalise=True), bias=biases > 0, activation=activation)
    formats = tuple(matrix.format for matrix, _ in its[0])
    assert MixtureLayout(EXPERTS, formats).kernels == "few_bits_experts"
    with patch.object(kernels, "expert_tuning", lambda *_: tuning):
        made = Grouped(x, scores, moe, formats=formats, biases=biases)
    made._h.fill_(torch.nan)
    made.y.fill_(torch.nan)
    addresses = [[part.data_ptr() for matrix, _ in one for part in matrix.parts.values()] for one in its]
    plain: list[list[Tensor]] = [[gate_up[1], down[1]] for gate_up, down in its]
    if biases:
        added = [[torch.randn(size, generator=rng).to(dtype) for size in (2 * inner, hidden)] for _ in its]
        for row, its_biases in zip(addresses, added, strict=True):
            row += [bias.data_ptr() for bias in its_biases[:biases]]
        KEPT[:] = added
        plain = [
            [*matrices, gate_up.float(), down.float() if biases > 1 else torch.zeros(hidden)]
            for matrices, (gate_up, down) in zip(plain, added, strict=True)
        ]
    want = experts_reference(x.float(), scores, moe, plain)[1]
    return made, torch.tensor(addresses), want


ONE_BY_ONE = "gptq_order", "gptq_order_asymmetric", "packed_order", "packed_odd", "gptq_asymmetric"
"""Columns in another order, groups of 24 columns, and zero points of groups of 16."""
READ = [name for name in SCHEMES if name not in ONE_BY_ONE]


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=2e-6 * float(want.abs().amax()))


@pytest.mark.parametrize("scheme", READ)
def test_products(scheme: str) -> None:
    """Widths that are not whole steps, and runs of which a part is there."""
    for tokens, tuning in zip((1, 9), TUNINGS, strict=True):
        made, table, want = mixed(weights(scheme, 192, 64), tokens, tuning)
        made.compute(table)
        close(made.total(), want)


def test_sums_of_operands_that_are_smaller_are_made_as_large_again() -> None:
    """Compiled kernels make some smaller by a power of two; interpreted ones none."""
    its = [((up, 4 * one), (down, 4 * other)) for (up, one), (down, other) in weights("mxfp4", 192, 64)]
    made, table, want = mixed(its, 9, TUNINGS[1])
    with patch.object(kernels, "unfolded", lambda *_: 4.0):
        made.compute(table)
    close(made.total(), want)


@pytest.mark.parametrize(
    ("scheme", "biases"), [("mxfp4", 0), ("mxfp4", 1), ("mxfp4", 2), ("nvfp4", 2), ("fp8", 1), ("awq", 2)]
)
def test_biases_and_a_clamped_activation(scheme: str, biases: int) -> None:
    """As gpt-oss has them; a rank that is not the first has no bias of down."""
    for tokens, tuning in zip((1, 9), TUNINGS, strict=True):
        clamped = Activation(alpha=1.702, shift=1.0, limit=0.7)
        for activation in (clamped, SWIGLU) if biases else (clamped,):
            made, table, want = mixed(weights(scheme, 192, 64), tokens, tuning, biases, activation)
            made.compute(table)
            close(made.total(), want)


@pytest.mark.parametrize("scheme", [name for name in READ if name not in ALIKE])
def test_few_tokens_by_warps(scheme: str) -> None:
    """With activations in bfloat16, which are read four at a time. `test_products` reads all schemes."""
    more = scheme in ("mxfp4", "awq")
    its = weights(scheme, 192 if more else 128, 64)
    activation, biases = Activation(alpha=1.702, shift=1.0, limit=0.7), 2 if more else 0
    for tokens in (1, 8) if more else (2,):
        made, table, want = mixed(its, tokens, BY_WARPS, biases, activation, torch.bfloat16)
        with patch.object(kernels, "expert_columns", wraps=kernels.expert_columns) as by_warps:
            made.compute(table)
        assert by_warps.call_count == 2
        torch.testing.assert_close(made.total().float(), want, rtol=0, atol=2e-2 * float(want.abs().amax()))


def test_inner_numbers_that_are_no_whole_runs_are_computed_by_warps_too() -> None:
    """As ranks have them whose part of an expert is no whole number of runs."""
    for scheme, inner in (("mxfp4", 96), ("nvfp4", 48), ("awq", 96)):
        its = weights(scheme, 192, inner)
        for tokens in (1, 3):
            made, table, want = mixed(its, tokens, BY_WARPS, dtype=torch.bfloat16)
            with patch.object(kernels, "expert_columns", wraps=kernels.expert_columns) as by_warps:
                made.compute(table)
            assert by_warps.call_count == 2
            assert torch.isfinite(made.total()).all()
            torch.testing.assert_close(
                made.total().float(), want, rtol=0, atol=3.5e-2 * float(want.abs().amax())
            )


def test_activations_that_cannot_be_read_by_fours_are_computed_by_no_warps() -> None:
    """Neither product: the second would begin while the first, which waits otherwise, still runs."""
    made, table, want = mixed(weights("mxfp4", 192, 96), 2, BY_WARPS, dtype=torch.bfloat16)
    aside = torch.zeros(2, 193, dtype=torch.bfloat16)[:, 1:]
    aside.copy_(made._x)
    made._x = aside
    with patch.object(kernels, "expert_columns") as by_warps:
        made.compute(table)
    assert not by_warps.called
    torch.testing.assert_close(made.total().float(), want, rtol=0, atol=2.5e-2 * float(want.abs().amax()))


def test_few_tokens_with_some_experts_at_a_time() -> None:
    """As many as have an address; nine tokens are more than few."""
    its = weights("packed_bfloat16", 192, 64)
    made, table, _ = mixed(its, 8, BY_WARPS, dtype=torch.bfloat16)
    made.compute(table)
    some, table, _ = mixed(its, 8, BY_WARPS, dtype=torch.bfloat16)
    some.counts()
    for first in (0, 1):
        lent = torch.zeros_like(table)
        lent[first::2] = table[first::2]
        some.compute(lent)
    assert torch.equal(some.total(), made.total())
    made, table, _ = mixed(its, 9, BY_WARPS, dtype=torch.bfloat16)
    with patch.object(kernels, "expert_columns") as by_warps:
        made.compute(table)
    assert not by_warps.called


@pytest.mark.parametrize("scheme", ["awq", "nvfp4", "fp8", "mxfp8"])
def test_waves_compute_the_same(scheme: str) -> None:
    """Some experts at a time; those that are not there have no address."""
    its = weights(scheme, 256, 64)
    whole, table, _ = mixed(its, 7, TUNINGS[0])
    whole.compute(table)
    some, table, _ = mixed(its, 7, TUNINGS[0])
    some.counts()
    for wave in (range(3), range(3, EXPERTS)):
        lent = torch.zeros_like(table)
        lent[wave.start : wave.stop] = table[wave.start : wave.stop]
        some.compute(lent, wave)
    assert torch.equal(some.total(), whole.total())


def test_experts_between_others_may_have_no_address() -> None:
    """Only rows of those that have one are written: an address of 0 is never read."""
    its = weights("awq", 256, 64)
    whole, table, _ = mixed(its, 7, TUNINGS[0])
    whole.compute(table)
    some, table, _ = mixed(its, 7, TUNINGS[0])
    some.counts()
    for first in (0, 1):
        lent = torch.zeros_like(table)
        lent[first::2] = table[first::2]
        unread = some.y.clone()
        some.compute(lent, range(EXPERTS))
        changed = (some.y != unread) & ~some.y.isnan()
        assert 0 < int(changed.any(1).sum()) < len(some.y)
    assert torch.equal(some.total(), whole.total())


@pytest.mark.parametrize("scheme", ["gptq", "awq", "signed_asymmetric", "fp8_128", "mxfp4", "nvfp4"])
def test_ranks_add_up(scheme: str) -> None:
    """The second begins amid a group of columns of down."""
    total = torch.zeros(5, 128)
    for mine in (range(48), range(48, 96)) if scheme != "awq" else (range(32), range(32, 96)):
        made, table, _ = mixed(weights(scheme, 128, 96, mine), 5, TUNINGS[0])
        made.compute(table)
        total += made.total()
    close(total, mixed(weights(scheme, 128, 96), 5, TUNINGS[0])[2])


@pytest.mark.parametrize("scheme", ONE_BY_ONE)
def test_what_kernels_do_not_read_is_computed_one_by_one(scheme: str) -> None:
    format = matrix_of(SCHEMES[scheme], torch.zeros(64, 320))[0].format
    assert MixtureLayout(EXPERTS, (format, format)).kernels == ""


def not_one_by_one(self: object, experts: object) -> None:
    raise AssertionError("an expert was taken by itself")


@pytest.mark.parametrize("scheme", ["gptq", "nvfp4", "stacks"])
def test_streamed(scheme: str, tmp_path: Path) -> None:
    """Also the stacks of gpt-oss, with biases."""
    if scheme == "stacks":
        few, dense = in_mxfp4(tmp_path)
    else:
        few, dense = checkpoints(tiny.checkpoint("qwen3_moe"), tmp_path, SCHEMES[scheme])
    with patch.object(experts, "_kernels", lambda device: None):
        want = pass_of(dense, 0)
    with (
        patch.object(ExpertStream, "each", not_one_by_one),
        patch.object(StillExperts, "each", not_one_by_one),
    ):
        resident, streamed = pass_of(few, 0), pass_of(few, 0, part=0.4)
    assert all(map(torch.equal, resident, streamed))
    for mine, theirs in zip(resident, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5 * float(theirs.abs().amax()))
