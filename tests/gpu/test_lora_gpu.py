"""LoRA adapters on a GPU: recorded steps and others say what merged weights say, an adapter that is loaded
later is replayed in its place, and a sleep changes nothing."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import adapters
import tiny
from penstock import LLM, SamplingParams
from penstock.ops import lora as ops_lora
from penstock.ops.kernels import counting, pdl_launches, triton_kernels
from penstock.ops.linear import linear
from penstock.ops.lora import LoraMatrix, StackedRows
from penstock.ops.matrix import Matrix
from penstock.step.plan import Plan
from penstock.worker.graphs import DecodeGraphs

SETTINGS: dict[str, Any] = {
    "device": "cuda",
    "dtype": "float32",
    "check": True,
    "max_length": 128,
    "max_step_tokens": 64,
    "block_size": 4,
    "max_sequences": 12,
}
ALL = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=-1)


@pytest.mark.parametrize(
    "more", [{}, {"graphs": False}, {"kernels": False}], ids=["recorded", "launched", "torch"]
)
@pytest.mark.parametrize("name", ["llama_biases", "qwen3"])
def test_each_request_is_answered_as_by_its_own_merged_model(
    name: str, more: dict[str, object], tmp_path: Path
) -> None:
    base = tiny.checkpoint(name)
    some = {
        "a": adapters.write(tmp_path / "a", base, 8, seed=1),
        "b": adapters.write(tmp_path / "b", base, 3, ["q_proj", "up_proj", "o_proj"], seed=2),
        "late": adapters.write(tmp_path / "late", base, 16, seed=3, use_rslora=True),
    }
    prompts, names = tiny.prompts(), ["a", None, "b", "late", "a", None]
    loaded, replayed, run = {one: some[one] for one in ("a", "b")}, [], DecodeGraphs.run

    def noted(self: DecodeGraphs, plan: Plan) -> Any:
        replayed.append(len(plan.shares))
        return run(self, plan)

    with LLM(base, **SETTINGS | more, lora_modules=loaded, max_loras=3) as llm:
        llm.generate(prompts, ALL, lora=["a", "b"] * 3)
        llm.load_lora_adapter("late", some["late"])
        with patch.object(DecodeGraphs, "run", noted):
            found = llm.generate(prompts, ALL, lora=names)
        if not more:
            llm.sleep()
            llm.wake_up()  # Another engine, in which each has its place again.
            found += llm.generate(prompts, ALL, lora=names)
    if not more:
        assert replayed.count(len(prompts)) > 3
    if "graphs" in more:
        assert not replayed
    for completion, one in zip(found, names * (len(found) // len(names)), strict=True):
        model = tiny.load(base) if one is None else adapters.merged(base, some[one])
        expected = adapters.logprobs(model, completion.prompt_tokens, completion.tokens)
        assert completion.logprobs is not None
        for entry, row in zip(completion.logprobs, expected, strict=True):
            mine = torch.tensor([logprob for _, logprob in sorted(entry.top)], dtype=torch.float64)
            assert (mine - row).abs().max() < 1e-3 * row.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heights", "width", "rank"), [([4096, 1024, 1024], 4096, 16), ([14336] * 2, 4096, 64), ([900], 14336, 5)]
)
def test_kernels_add_to_each_row_what_its_own_adapter_adds(
    heights: list[int], width: int, rank: int, dtype: torch.dtype
) -> None:
    """In the sizes of real models; and no more than that: rows beside it stay as they are."""
    rng, slots = torch.Generator("cuda").manual_seed(rank), 8
    like = torch.empty(0, dtype=dtype, device="cuda")
    matrix = LoraMatrix(heights, width, slots=slots, rank=rank, like=like)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng, device="cuda")

    for slot in range(1, slots + 1):
        for part, height in enumerate(heights):
            matrix.put(
                slot, part, (random(rank, width) / width**0.5).to(dtype), random(rank, height).to(dtype)
            )
    for rows in (1, 16, 33, 64, 65):
        x, wide = random(rows, width).to(dtype), random(rows + 1, sum(heights)).to(dtype)
        before, slot_of = wide.clone(), torch.arange(rows, device="cuda") % (slots + 1)
        StackedRows(slot_of, slots).add(x, wide[:rows], matrix)
        right = before.double()
        for slot in range(1, slots + 1):
            mine = torch.nonzero(slot_of == slot)[:, 0]
            for part, (a, b) in enumerate(zip(matrix.a.double(), matrix.b, strict=True)):
                right[mine, matrix._columns[part]] += x[mine].double() @ a[slot - 1].T @ b[slot - 1].double()
        limit = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
        assert (wide.double() - right).abs().max() < limit * right.abs().max()
        assert torch.equal(wide[:rows][slot_of == 0], before[:rows][slot_of == 0])
        assert torch.equal(wide[rows], before[rows])


def bank(
    heights: Sequence[int], width: int, rank: int, rng: torch.Generator, slots: int = 8
) -> tuple[LoraMatrix, Matrix]:
    """Adapters in all slots but the last, and the model's matrix."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng, device="cuda").bfloat16()

    like = torch.empty(0, dtype=torch.bfloat16, device="cuda")
    matrix = LoraMatrix(heights, width, slots=slots, rank=rank, like=like)
    for slot in range(1, slots):
        for part, height in enumerate(heights):
            matrix.put(slot, part, random(rank, width) / width**0.5, random(rank, height) / rank**0.5)
    return matrix, Matrix.of(random(sum(heights), width) / width**0.5)


@pytest.mark.parametrize(
    ("heights", "rank"), [([14336] * 2, 16), ([14336] * 2, 64), ([900] * 2, 5), ([1024] * 2, 33)]
)
def test_activations_are_those_of_what_is_added(heights: list[int], rank: int) -> None:
    """As launches of their own say. Here and there a number may be the next one of bfloat16: the two are
    compiled apart."""
    rng, kernels = torch.Generator("cuda").manual_seed(rank), triton_kernels("lora")
    pointwise = triton_kernels("pointwise")
    assert kernels is not None
    assert pointwise is not None
    matrix, weight = bank(heights, 1024, rank, rng)
    for rows in (1, 16, 33, 64):
        x = torch.randn(rows, 1024, generator=rng, device="cuda").bfloat16()
        slot_of = torch.arange(1, rows + 1, device="cuda") % 9
        both = linear(x, weight)
        found = kernels.product(
            both.clone, x, matrix.a, matrix._every, matrix._heights, slot_of, early=False, gated=True
        )
        kernels.add(x, both, matrix.a, matrix._every, matrix._heights, slot_of)
        said = pointwise.silu_mul(both)
        assert torch.allclose(found.float(), said.float(), rtol=2**-6, atol=2**-8)
        assert (found == said).float().mean() > 0.95


few = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
    reason="products of few rows are the library's on this device",
)


class Products:
    """Products of a model with those of adapters; what each reads is written just before it, by a product
    that takes long. Some are shared by programs, so they have scratch."""

    START = 8192
    SHAPES = (
        ((4096, 1024, 1024), 4096, False),
        ((512, 256, 256), 4096, False),
        ((14336, 14336), 4096, True),
        ((4096,), 14336, False),
        ((1024, 1024), 1024, True),
        ((1024,), 2048, False),
    )

    def __init__(self, rows: int) -> None:
        self._rng = torch.Generator("cuda").manual_seed(rows)
        self._slots = torch.arange(1, rows + 1, device="cuda") % 9
        self._counters = torch.zeros(256, dtype=torch.int32, device="cuda")
        self._start = self._random(rows, self.START)
        self._all = [
            (
                self._random(rows, width),
                Matrix.of(self._random(width, self.START) / self.START**0.5),
                *bank(heights, width, 16, self._rng),
                gated,
            )
            for heights, width, gated in self.SHAPES
        ]

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._rng, device="cuda").bfloat16()

    def _compute(self) -> list[torch.Tensor]:
        step = StackedRows(self._slots.clone(), 8)
        found = []
        for x, before, matrix, weight, gated in self._all:
            linear(self._start, before, out=x)
            found.append(step.product(x, weight, None, matrix, gated=gated))
        return found

    def _spoilt(self, turns: int) -> Iterator[int]:
        """Another start each time; what is written of it is NaN before."""
        for turn in range(turns):
            self._start.copy_(
                torch.randn(
                    self._start.shape, generator=torch.Generator("cuda").manual_seed(turn), device="cuda"
                )
            )
            for x, *_ in self._all:
                x.fill_(float("nan"))
            yield turn

    def recorded(self, turns: int) -> list[torch.Tensor]:
        """All of them as recorded with early launches, replayed."""
        with pdl_launches(), counting(self._counters):
            self._compute()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                said = self._compute()
        found = []
        for _ in self._spoilt(turns):
            graph.replay()
            torch.cuda.synchronize()
            found += [one.clone() for one in said]
        return found

    def in_turn(self, turns: int) -> list[torch.Tensor]:
        """The same, each launch when the one before it has ended."""
        found = []
        with patch.object(ops_lora, "HIDES", False):
            for _ in self._spoilt(turns):
                found += self._compute()
                torch.cuda.synchronize()
        return found


@few
@pytest.mark.parametrize("rows", [1, 2, 16, 40, 64])
def test_what_is_hidden_is_what_comes_out_in_turn(rows: int) -> None:
    products = Products(rows)
    found, right = products.recorded(20), products.in_turn(20)
    assert not any(one.isnan().any() for one in right)
    assert all(torch.equal(one, other) for one, other in zip(found, right, strict=True))


@few
def test_what_begins_before_the_product_has_waited_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    products = Products(16)
    right, found = products.in_turn(5), ops_lora.kernel_before_others

    def too_early(x: torch.Tensor, weight: Matrix) -> Any:
        kernel = found(x, weight)
        return kernel and (lambda *given, before_others, **how: kernel(*given, **how))

    monkeypatch.setattr(ops_lora, "kernel_before_others", too_early)
    assert not all(torch.equal(*each) for each in zip(products.recorded(5), right, strict=True))
