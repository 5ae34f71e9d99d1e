"""Weights of few bits, read from checkpoints as quantisers write them: the numbers that they stand for, and
the tokens of the models that they are."""

from pathlib import Path

import pytest
import torch

import tiny
from members import pass_of
from penstock.api.llm import LLM
from penstock.arch.layout import group_layouts
from penstock.step.params import SamplingParams
from penstock.weights.checkpoint.reader import Checkpoint
from penstock.weights.streaming.stream import group_views
from quantised import SCHEMES, checkpoints

GREEDY = SamplingParams(temperature=0, max_tokens=12)


def matrices(path: Path) -> dict[str, torch.Tensor]:
    """Every matrix of a checkpoint, dequantised, by its group and name."""
    found = {}
    with Checkpoint.open(path) as checkpoint:
        layouts = group_layouts(checkpoint.spec, checkpoint.names, "float32")
        checkpoint.verify(layouts)
        for layout in layouts:
            whole = torch.empty(layout.size, dtype=torch.uint8)
            checkpoint.read_group(layout, whole)
            for name, matrix in group_views(layout, whole).matrices.items():
                found[f"{layout.id} {name}"] = matrix.dequantised(torch.empty(0))
    return found


@pytest.mark.parametrize("scheme", SCHEMES)
def test_numbers(scheme: str, tmp_path: Path) -> None:
    few, dense = checkpoints(tiny.checkpoint("llama"), tmp_path, SCHEMES[scheme])
    mine, theirs = matrices(few), matrices(dense)
    assert mine.keys() == theirs.keys()
    for name, matrix in mine.items():
        assert torch.equal(matrix, theirs[name]), name


def outputs(path: Path, **settings: object) -> list[object]:
    with LLM(path, device="cpu", dtype="float32", max_length=64, **settings) as llm:  # type: ignore[arg-type]
        assert settings.get("device_memory") is None or llm.booted.weights.stats().streams
        return [(one.tokens, one.logprobs) for one in llm.generate(tiny.prompts()[1:4], GREEDY)]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ["llama_biases", "qwen3_moe"])
def test_tokens(scheme: str, name: str, tmp_path: Path) -> None:
    few, dense = checkpoints(tiny.checkpoint(name), tmp_path, SCHEMES[scheme])
    same = outputs(dense)
    assert outputs(few, kernels=False) == same
    for (mine, its), (theirs, known) in zip(outputs(few), same, strict=True):
        assert mine == theirs
        assert its == pytest.approx(known, abs=1e-4)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_streamed_and_ranks(scheme: str, name: str, tmp_path: Path) -> None:
    few, dense = checkpoints(tiny.checkpoint(name), tmp_path, SCHEMES[scheme])
    alone, together = pass_of(dense, 0), pass_of(dense, 2)
    for kernels in (False, True):
        resident = pass_of(few, 0, kernels=kernels)
        for mine, theirs in zip(resident, pass_of(few, 0, part=0.4, kernels=kernels), strict=True):
            assert torch.equal(mine, theirs)
        ranks = pass_of(few, 2, kernels=kernels)
        for mine, theirs in zip([*resident, *ranks], [*alone, *together], strict=True):
            if kernels:  # Sums are made in another order.
                torch.testing.assert_close(mine, theirs, atol=2e-4, rtol=0)
            else:
                assert torch.equal(mine, theirs)
