"""What is launched to have kernels compiled can be launched: where it runs, what fails is passed over."""

import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

if (
    os.environ.get("TRITON_INTERPRET") != "1"
):  # asked once, when triton is imported; conftest.py sets it where there is no GPU
    pytest.skip(
        "kernels are interpreted where there is no GPU; tests/gpu runs them compiled", allow_module_level=True
    )

import tiny
from penstock.arch.layout import group_layouts, kv_layout
from penstock.base.config import Config
from penstock.bench.shapes import SHAPES
from penstock.engine import boot as booting
from penstock.weights.checkpoint.shape import Shape
from penstock.weights.streaming.residency import padded
from penstock.worker.ahead import (
    Matrix,
    common_launches,
    compile_ahead,
    eager_launches,
    matrices,
    recorded_launches,
)

CPU = torch.device("cpu")


@pytest.fixture
def _one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each launch the first program is interpreted: whether it can be launched is all that is asked. What
    it computes is rubbish."""
    from triton.runtime.interpreter import GridExecutor

    call = GridExecutor.__call__

    def called(self: Any, *args: Any, **named: Any) -> None:
        self.grid = (1,)
        call(self, *args, **named)

    monkeypatch.setattr(GridExecutor, "__call__", called)


@pytest.mark.filterwarnings(
    "ignore::RuntimeWarning"
)  # What is computed is of memory as it was found, and nobody's.
@pytest.mark.usefixtures("_one_program")
@pytest.mark.parametrize(("name", "block_size"), [("qwen2_windows", 4), ("qwen3", 64)])
def test_every_launch(name: str, block_size: int) -> None:
    shape = Shape.open(tiny.checkpoint(name))
    spec = shape.spec
    layout = kv_layout(spec, "float32", block_size)
    groups = group_layouts(spec, shape.names, "float32")
    launches = [*eager_launches(spec, layout, CPU), *recorded_launches(spec, layout, CPU, 128, 64)]
    kinds = len({window is None for window in spec.windows})
    assert len(launches) == 1 + (4 + 2 + 3) * kinds + 2
    launches += common_launches(spec, groups, layout, CPU)
    assert len(launches) > 1 + (4 + 2 + 3) * kinds + 2 + 4
    for launch in launches:
        launch()


def test_nothing_is_compiled_for_a_cpu() -> None:
    spec = Shape.open(tiny.checkpoint("llama")).spec
    compile_ahead(
        spec, (), kv_layout(spec, "float32", 4), CPU, longest=64, most_tokens=64, recorded=True, early=True
    )


def test_matrices_of_a_model() -> None:
    shape = Shape.of(SHAPES["8B"])
    found = matrices(group_layouts(shape.spec, shape.names, "bfloat16"))
    sizes = {
        (6144, 4096, False),
        (4096, 4096, False),
        (28672, 4096, True),
        (4096, 14336, False),
        (128256, 4096, False),
    }
    assert found == {Matrix(*size, False) for size in sizes}
    biased = Shape.open(tiny.checkpoint("qwen2_windows"))
    assert any(one.biased for one in matrices(group_layouts(biased.spec, biased.names, "float32")))


@pytest.mark.parametrize(("room", "wanted"), [(1 << 30, [True]), (1 << 20, [True, False])])
def test_what_is_launched_in_the_end_is_compiled_before_requests(
    room: int, wanted: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where weights would fit by themselves, but stream since KV takes the room, kernels do not overlap after
    all."""
    sizes = {
        "num_hidden_layers": 32,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    shape, asked = Shape.of(SHAPES["0.6B"] | sizes | {"vocab_size": 512}), list[bool]()
    weights = sum(map(padded, group_layouts(shape.spec, shape.names, "float32")))
    monkeypatch.setattr(booting, "begins_early", lambda _: True)
    monkeypatch.setattr(booting, "compile_ahead", lambda *_, early, **__: asked.append(early))
    memory = {"device_memory": weights + room, "host_memory": 4 * weights + room}
    booted = booting.boot(
        Config(Path(), device="cpu", dtype="float32", max_length=512, max_step_tokens=64, **memory), shape
    )
    with closing(booted.engine):
        assert booted.weights.all_stay is (len(wanted) == 1)
    assert asked == wanted
