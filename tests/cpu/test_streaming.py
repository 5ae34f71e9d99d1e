"""Models that are larger than their memory give the same tokens and the same log-probabilities, bit for bit, or an error; never a wrong one."""

import json
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import tiny
from penstock import LLM, Completion, SamplingParams
from penstock.arch.layout import GroupKind
from penstock.base.errors import BudgetError, CheckpointError, EngineClosedError
from penstock.base.meter import WeightStats
from penstock.base.trace import Trace
from penstock.engine import boot as booting
from penstock.engine import placing
from penstock.memory.device import peak_of
from penstock.weights.checkpoint import Checkpoint
from penstock.weights.manifest import STORE
from penstock.weights.pack import Pack
from penstock.weights.packing import write_pack

SETTINGS = {
    "device": "cpu",
    "dtype": "float32",
    "max_length": 128,
    "block_size": 4,
    "max_step_tokens": 7,
    "max_sequences": 5,
    "kv_blocks": 25,
    "check": True,
}
"""Prompts go in chunks of seven tokens, and blocks are scarce."""
ALL = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=-1, prompt_logprobs=-1)
LONGER = SamplingParams(temperature=0.8, seed=3, max_tokens=24, ignore_eos=True, logprobs=-1)
BUDGETS = ["host", "disk", "both", "least"]


@pytest.fixture(autouse=True)
def _lean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations are counted by shape: what is measured of them depends on the memory that the tests before have left. Links are not
    measured again and again either; what streams, and where, is the same."""
    monkeypatch.setattr(booting, "peak_of", lambda device, run: 0 * peak_of(device, run))
    monkeypatch.setattr(placing, "copy_rate", lambda *_: 25e9)
    monkeypatch.setattr(placing, "file_read", lambda *_: _Rate(3e9))
    monkeypatch.setattr(placing, "memory_read", lambda *_: 40e9)


@dataclass
class _Rate:
    read: float


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("packs")


@dataclass(frozen=True)
class Resident:
    """What an engine whose weights all stay on the device gives, and what that takes."""

    completions: tuple[Completion, ...]
    again: tuple[Completion, ...]
    beside: int
    """Bytes beside weights."""
    weights: int
    least: int
    """Bytes without which nothing goes: the largest group, and two experts."""


def rounds(llm: LLM) -> tuple[tuple[Completion, ...], tuple[Completion, ...]]:
    """Prompts of all lengths at once, with everything that can be told of them; then sampled, some of it from the prefix cache, with so
    many blocks that some are sent back."""
    first = tuple(llm.generate(tiny.prompts(), ALL))
    again = tuple(llm.generate(tiny.prompts(), LONGER))
    assert llm.stats().preemptions > 0
    assert any(completion.cached_tokens for completion in again)
    return first, again


def open_model(path: Path, **settings: object) -> LLM:
    return LLM(path, **{**SETTINGS, **settings})  # type: ignore[arg-type]


@cache
def resident(name: str) -> Resident:
    with open_model(tiny.checkpoint(name)) as llm:
        first, again = rounds(llm)
        assert not llm.booted.weights.stats().streams
        budget = llm.booted.budget
        sizes = {layout.id: -(-layout.size // 4096) * 4096 for layout in llm.booted.weights._layouts.values()}
    experts = [size for id, size in sizes.items() if id.kind is GroupKind.EXPERT]
    least = max(size for id, size in sizes.items() if id.kind is not GroupKind.EXPERT) + 2 * max(experts, default=0)
    return Resident(first, again, budget.activations + budget.kv, budget.weights, least)


def budgets(name: str, kind: str) -> dict[str, int]:
    """Memory so that weights rest on the device and the host, the device and the disk, all three, or stream through the smallest rings."""
    whole = resident(name)
    beside, weights = whole.beside, whole.weights
    device = beside + max(int(0.45 * weights), whole.least)
    match kind:
        case "host":
            return {"device_memory": device, "host_memory": device + 2 * weights}
        case "disk":
            return {"device_memory": beside + int(0.85 * weights)}
        case "both":
            return {"device_memory": device, "host_memory": device + int(0.35 * weights)}
        case _:
            return {"device_memory": beside + whole.least, "host_memory": beside + whole.least + 2 * whole.least}


@pytest.mark.parametrize("name", tiny.CASES)
@pytest.mark.parametrize("kind", BUDGETS)
def test_what_streams_computes_the_same(name: str, kind: str, packs: Path) -> None:
    whole = resident(name)
    with open_model(tiny.checkpoint(name), cache=packs, **budgets(name, kind)) as llm:
        assert rounds(llm) == (whole.completions, whole.again)
        stats = llm.booted.weights.stats()
    assert stats.copied > 10 * whole.weights
    assert (stats.read > 0) == (kind != "host")
    assert stats.device + stats.host + stats.disk == whole.weights
    if kind == "least":
        assert stats.device_ring <= whole.least


@pytest.mark.parametrize("name", ["llama_tied", "mixtral"])
def test_links_are_measured(name: str, packs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(booting, "peak_of", lambda device, run: 0 * peak_of(device, run))
    with open_model(tiny.checkpoint(name), cache=packs, **budgets(name, "both")) as llm:
        assert tuple(llm.generate(tiny.prompts(), ALL)) == resident(name).completions
        stats = llm.booted.weights.stats()
    assert min(stats.link_rate, stats.disk_rate, stats.predicted) > 0
    assert stats.read > 0
