"""What is launched to have kernels compiled can be launched: where it runs, what fails is passed over."""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":  # asked once, when triton is imported; conftest.py sets it where there is no GPU
    pytest.skip("kernels are interpreted where there is no GPU; tests/gpu runs them compiled", allow_module_level=True)

import tiny
from penstock.arch.layout import group_layouts, kv_layout
from penstock.bench.shapes import SHAPES
from penstock.weights.shape import Shape
from penstock.worker.ahead import Matrix, common_launches, compile_ahead, eager_launches, matrices, recorded_launches

CPU = torch.device("cpu")


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
    compile_ahead(spec, (), kv_layout(spec, "float32", 4), CPU, longest=64, most_tokens=64, recorded=True, early=True)


def test_matrices_of_a_model() -> None:
    shape = Shape.of(SHAPES["8B"])
    found = matrices(group_layouts(shape.spec, shape.names, "bfloat16"))
    sizes = {(6144, 4096, False), (4096, 4096, False), (28672, 4096, True), (4096, 14336, False), (128256, 4096, False)}
    assert found == {Matrix(*size, False) for size in sizes}
    biased = Shape.open(tiny.checkpoint("qwen2_windows"))
    assert any(one.biased for one in matrices(group_layouts(biased.spec, biased.names, "float32")))
