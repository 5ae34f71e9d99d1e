"""What is launched to have kernels compiled can be launched: where it runs, what fails is passed over."""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":  # asked once, when triton is imported; conftest.py sets it where there is no GPU
    pytest.skip("kernels are interpreted where there is no GPU; tests/gpu runs them compiled", allow_module_level=True)

import tiny
from penstock.arch.layout import kv_layout
from penstock.weights.shape import Shape
from penstock.worker.ahead import compile_ahead, eager_tasks, recorded_tasks

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["llama", "qwen2_windows", "mistral"])
@pytest.mark.parametrize("block_size", [4, 64])
def test_every_launch(name: str, block_size: int) -> None:
    spec = Shape.open(tiny.checkpoint(name)).spec
    layout = kv_layout(spec, "float32", block_size)
    tasks = [*eager_tasks(spec, layout, CPU), *recorded_tasks(spec, layout, CPU, 128)]
    kinds = len({window is None for window in spec.windows})
    assert len(tasks) == 1 + 5 * kinds
    for task in tasks:
        for launch in task:
            launch()


def test_nothing_is_compiled_for_a_cpu() -> None:
    spec = Shape.open(tiny.checkpoint("llama")).spec
    compile_ahead(spec, kv_layout(spec, "float32", 4), CPU, max_length=64, recorded=True, early=True)
