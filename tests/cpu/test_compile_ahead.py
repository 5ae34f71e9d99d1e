"""Kernels are compiled before requests need them: those that steps launch, and no others."""

import importlib
import os
import re
import sys
from contextlib import closing
from pathlib import Path
from time import perf_counter
from types import ModuleType

import pytest
import torch

import forks
from penstock.arch.layout import group_layouts
from penstock.base.config import Config
from penstock.bench.shapes import SHAPES
from penstock.engine import boot as booting
from penstock.engine import hardware
from penstock.ops import kernels
from penstock.ops import triton as triton_folder
from penstock.weights.checkpoint.shape import Shape
from penstock.weights.streaming.residency import padded
from penstock.worker.ahead import ZeroFilled, compile_ahead, one_at_a_time
from penstock.worker.sizes import StepSizes

CPU = torch.device("cpu")


def test_memory_is_zeros_while_kernels_are_noted() -> None:
    held = torch.full((1 << 20,), 7.0)
    del held
    with ZeroFilled():
        new = torch.empty(1 << 20)
        assert not any(bool(x.any()) for x in (new, torch.empty_like(new), new.new_empty(1 << 20)))


def test_every_kernel_that_is_launched_is_noted() -> None:
    """A launch of any other would be real while launches are noted, over memory that means nothing."""
    pytest.importorskip("triton")

    def loaded(name: str) -> ModuleType:
        return importlib.import_module(f"{triton_folder.__name__}.{name}")

    launched = {}
    for file in Path(triton_folder.__path__[0]).glob("*.py"):
        text = file.read_text()
        own = re.findall(r"^@triton\.jit.*\ndef (\w+)", text, re.MULTILINE)
        launched |= {
            f"{file.stem}.{name}": vars(loaded(file.stem))[name] for name in own if f"{name}[" in text
        }
    noted = {id(value) for name in kernels._MODULES for value in vars(loaded(name)).values()}
    assert len(launched) > 20
    assert [name for name, kernel in launched.items() if id(kernel) not in noted] == []


def test_processes_compile_one_after_another(tmp_path: Path) -> None:
    """The next one begins when one has ended, however it does."""
    lock, order = tmp_path / "there" / "lock", tmp_path / "order"
    call = (
        "import os, sys, time; from pathlib import Path; from penstock.worker.ahead import one_at_a_time\n"
        "with one_at_a_time(Path(sys.argv[1]), 60), open(sys.argv[2], 'a') as order:\n"
        "    for what in ('begins', 'ends'):\n"
        "        print(what, file=order, flush=True); time.sleep(0.3)\n"
        "    os._exit(1)"
    )
    given = [sys.executable, "-c", call, str(lock), str(order)]
    every = [forks.Popen(given, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}) for _ in range(2)]
    assert [one.wait(60) for one in every] == [1] * 2
    assert order.read_text().split() == ["begins", "ends"] * 2


def test_nobody_waits_for_ever(tmp_path: Path) -> None:
    """Nor is anything refused where there can be no lock."""
    with one_at_a_time(tmp_path / "lock", 60):
        begun = perf_counter()
        with one_at_a_time(tmp_path / "lock", 0.2):
            assert perf_counter() - begun >= 0.2
    (tmp_path / "file").touch()
    with one_at_a_time(tmp_path / "file" / "lock", 60):
        pass


def test_nothing_is_compiled_for_a_cpu() -> None:
    def made() -> None:
        raise AssertionError

    compile_ahead(made, CPU, StepSizes(64, 8, 64, 4), recorded=True)  # type: ignore[arg-type]


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
    monkeypatch.setattr(hardware, "begins_early", lambda _: True)
    monkeypatch.setattr(booting, "compile_ahead", lambda make, *_, **__: asked.append(make.keywords["early"]))
    memory = {"device_memory": weights + room, "host_memory": 4 * weights + room}
    booted = booting.boot(
        Config(Path(), device="cpu", dtype="float32", max_length=512, max_step_tokens=64, **memory), shape
    )
    with closing(booted.engine):
        assert booted.weights.all_stay is (len(wanted) == 1)
    assert asked == wanted
