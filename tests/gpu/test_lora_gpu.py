"""LoRA adapters on a GPU: recorded steps and others say what merged weights say, an adapter that is loaded
later is replayed in its place, and a sleep changes nothing."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import adapters
import tiny
from penstock import LLM, SamplingParams
from penstock.ops.activation import silu_mul
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


@pytest.mark.parametrize(
    ("heights", "width", "rank", "gated"),
    [
        ([4096, 1024, 1024], 4096, 16, False),
        ([14336] * 2, 4096, 16, True),
        ([4096], 14336, 64, False),
        ([2560] * 2, 1024, 33, True),
    ],
)
def test_products_take_those_of_adapters(heights: list[int], width: int, rank: int, gated: bool) -> None:
    """As torch computes both one after the other; again and again, and whatever other rows have."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("few rows are products of a library here")
    rng, slots = torch.Generator("cuda").manual_seed(rank), 8
    like = torch.empty(0, dtype=torch.bfloat16, device="cuda")
    matrix = LoraMatrix(heights, width, slots=slots, rank=rank, like=like)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng, device="cuda").bfloat16()

    for slot in range(1, slots):
        for part, height in enumerate(heights):
            matrix.put(slot, part, random(rank, width) / width**0.5, random(rank, height) / rank**0.5)
    weight, how = random(sum(heights), width) / width**0.5, {"gated": True} if gated else {}
    for rows in (1, 2, 16, 33, 64):
        x, slot_of = random(rows, width), torch.arange(1, rows + 1, device="cuda") % (slots + 1)
        step = StackedRows(slot_of, slots)
        found = step.product(x, Matrix.of(weight), None, matrix, 0, **how)
        assert found is not None
        right = x.double() @ weight.double().T
        for slot in range(1, slots + 1):
            mine = torch.nonzero(slot_of == slot)[:, 0]
            for part, (a, b) in enumerate(zip(matrix.a.double(), matrix.b, strict=True)):
                right[mine, matrix._columns[part]] += x[mine].double() @ a[slot - 1].T @ b[slot - 1].double()
        right = silu_mul(right.clone()) if gated else right
        assert (found.double() - right).abs().max() < 2e-2 * right.abs().max()
        for _ in range(20):  # Now launches may be early.
            again = step.product(x, Matrix.of(weight), None, matrix, 0, **how)
            assert again is not None
            assert torch.equal(again, found)
        for slot in (0, 1, 8):
            alone = StackedRows(torch.full_like(slot_of, slot), slots)
            again = alone.product(x, Matrix.of(weight), None, matrix, 0, **how)
            assert again is not None
            assert torch.equal(again[slot_of == slot], found[slot_of == slot])
