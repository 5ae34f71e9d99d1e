"""A process that has used torch before: what it keeps of the device and cannot give back is not counted on,
and hides nothing of a step."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import tiny
from penstock import LLM, SamplingParams
from penstock.base.errors import BudgetError
from penstock.memory.device import give_back, peak_of, stuck_memory

DEVICE = torch.device("cuda", 0)
WHOLE, PART = 512 << 20, 32 << 20
SETTINGS = {
    "device": "cuda",
    "dtype": "bfloat16",
    "device_memory": "3GiB",
    "max_length": 4096,
    "beyond_trained": True,
}


def small_in_large() -> Tensor:
    """Lies in what a large tensor has left."""
    whole = torch.empty(WHOLE, dtype=torch.uint8, device=DEVICE)
    del whole
    return torch.empty(PART, dtype=torch.uint8, device=DEVICE)


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    give_back(DEVICE)
    yield
    give_back(DEVICE)


@pytest.fixture(scope="module")
def model() -> Path:
    return tiny.checkpoint("llama")


def work() -> None:
    for size in (3, 40, 200):
        torch.empty(size << 20, dtype=torch.uint8, device=DEVICE)


def test_a_step_takes_as_much() -> None:
    part = small_in_large()
    there = peak_of(DEVICE, work)
    kept = stuck_memory(DEVICE)
    del part
    give_back(DEVICE)
    assert kept >= WHOLE - PART > stuck_memory(DEVICE)
    assert peak_of(DEVICE, work) == there


def test_an_engine_counts_on_less(model: Path) -> None:
    rng = random.Random(0)
    prompts = [[rng.randrange(90) for _ in range(2000)] for _ in range(4)]
    four = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM(model, **SETTINGS) as llm:
        llm.generate(
            prompts, four
        )  # All kernels are in the process from here on, and are counted in what lies outside of torch.
    del llm
    give_back(DEVICE)
    part = small_in_large()
    with LLM(model, **SETTINGS) as llm:
        budget = llm.memory.budget
        assert torch.cuda.memory_reserved(DEVICE) - WHOLE <= budget.total
        llm.generate(prompts, four)
        assert torch.cuda.max_memory_reserved(DEVICE) <= 3 << 30
    del llm, part
    give_back(DEVICE)
    with LLM(model, **SETTINGS) as llm:
        assert llm.memory.budget.total >= budget.total + WHOLE - PART
        assert llm.memory.budget.activations == budget.activations


def test_recording_gives_back_what_it_took_beside(model: Path) -> None:
    with LLM(model, **SETTINGS) as llm:
        assert stuck_memory(DEVICE) <= 64 << 20
        assert torch.cuda.memory_reserved(DEVICE) <= llm.memory.budget.total


def test_nothing_is_left(model: Path) -> None:
    taken = torch.empty(2 << 30, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(BudgetError, match=r"this process already uses "):
        LLM(model, **(SETTINGS | {"device_memory": "2GiB"}))
    del taken
