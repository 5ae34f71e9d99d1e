"""The doctor measures real links, leaves nothing behind, and its arithmetic says what binds a model."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.arch import bounds
from penstock.arch.layout import group_layouts
from penstock.base.config import Config
from penstock.base.errors import DeviceError
from penstock.bench.doctor import checkup as checkup_module
from penstock.bench.doctor.checkup import checkup, describe, with_cpu_read
from penstock.bench.doctor.limits import MeasuredRates, MemoryRoom, ModelLimits, limits, prefill_rate
from penstock.bench.shapes import SHAPES
from penstock.cli.known_costs import SHIPPED
from penstock.cli.main import main
from penstock.engine import cpu_rates
from penstock.engine.costs import read_costs
from penstock.memory.probe import disk_read, matmul_rate, memory_copy, memory_read
from penstock.ops.native.few_bits import find_library
from penstock.ops.row_classes import CLASSES
from penstock.weights.checkpoint.shape import Shape

CPU = torch.device("cpu")
GIB = 1 << 30
GPU_RATES = MeasuredRates(device_read=4e12, to_device=50e9, disk=2e9)


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A model directory with the config of an 8B model and nothing else."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["8B"]))
    return tmp_path


# -- links
# ------------------------------------------------------------------------------------------------------------


def test_memory_and_arithmetic_have_rates() -> None:
    # From the slowest machine worth a name to beyond the fastest.
    assert 1e8 < memory_read(CPU) < 1e13
    assert 1e8 < memory_copy(CPU) < 1e13
    assert 1e8 < matmul_rate(CPU, torch.float32) < 1e16


@pytest.mark.skipif(bool(find_library()), reason="no C compiler")
def test_rates_of_a_cpu_that_computes_are_kept_with_what_steps_cost(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of feed-forwards in int4, by class of rows; none where there are no kernels for them."""
    shapes = {"8B": SHAPES["8B"] | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}}
    monkeypatch.setattr(checkup_module, "SHAPES", shapes)
    monkeypatch.setattr(cpu_rates, "_SECONDS", 0.01)
    monkeypatch.setattr(cpu_rates, "_READ", 1 << 20)
    costs = read_costs(SHIPPED / "h100.json")
    found = with_cpu_read(costs, CPU, tmp_path)
    assert len(found.cpu_read) == CLASSES
    assert all(1e6 < rate < 1e13 for rate in found.cpu_read)
    assert replace(found, cpu_read=()) == costs
    monkeypatch.setattr(checkup_module, "find_library", lambda _: "no compiler")
    assert with_cpu_read(costs, CPU, tmp_path) == costs


def test_the_disk_is_measured_with_a_file_that_is_gone_afterwards(bare: Path) -> None:
    rate = disk_read(bare)
    assert rate.temporary
    assert 1e6 < rate.read < 1e12
    assert os.listdir(bare) == ["config.json"]


def test_the_disk_is_measured_with_the_largest_file_there_is(bare: Path) -> None:
    shard = bare / "model.safetensors"
    with shard.open("wb") as file:
        for _ in range(64):
            file.write(os.urandom(1 << 20))
    before = shard.stat()
    rate = disk_read(bare)
    assert (rate.file, rate.temporary) == (shard, False)
    assert rate.read > 1e6
    assert (shard.stat().st_size, shard.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def test_the_disk_is_measured_through_the_page_cache_where_there_is_no_other_way(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "O_DIRECT")
    rate = disk_read(bare)
    assert not rate.direct
    assert rate.read > 1e6


def test_a_disk_that_cannot_be_measured(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="No such file"):
        disk_read(tmp_path / "nowhere")


# -- arithmetic
# ------------------------------------------------------------------------------------------------------------


def of(name: str, room: MemoryRoom, rates: MeasuredRates = GPU_RATES) -> ModelLimits:
    shape = Shape.of(SHAPES[name])
    return limits(shape.spec, shape.names, "bfloat16", room, rates)


def test_a_model_that_fits_is_bound_by_the_memory_it_is_read_from() -> None:
    found = of("8B", MemoryRoom(100 * GIB, 50 * GIB))
    assert found.fits
    assert found.kv_token_bytes == 2 * 32 * 8 * 128 * 2
    # One row of the input embedding is read, not all of its 128,256.
    assert found.weight_bytes - found.read_bytes == (128256 - 1) * 4096 * 2
    assert found.decode == pytest.approx(4e12 / found.read_bytes)
    assert found.binding == "reading the device's memory"
    assert found.longest == 131072
    assert found.decode_longest == pytest.approx(4e12 / (found.read_bytes + 131072 * found.kv_token_bytes))


def test_a_small_budget_bounds_the_context() -> None:
    found = of("8B", MemoryRoom(16 * GIB, 50 * GIB))
    assert found.fits
    assert found.longest == (16 * GIB - found.weight_bytes) // found.kv_token_bytes
    assert found.longest < 131072


def test_what_does_not_fit_comes_over_the_link_and_then_from_disk() -> None:
    whole = of("8B", MemoryRoom(100 * GIB, 0)).weight_bytes
    over = of("8B", MemoryRoom(whole - 4 * GIB, 50 * GIB))
    assert (over.fits, over.host_bytes, over.disk_bytes, over.longest, over.decode_longest) == (
        False,
        4 * GIB,
        0,
        None,
        None,
    )
    assert "host memory" in over.binding
    share = over.read_bytes / whole
    assert over.decode == pytest.approx(50e9 / (4 * GIB * share))
    deep = of("8B", MemoryRoom(whole - 4 * GIB, 3 * GIB))
    assert (deep.host_bytes, deep.disk_bytes) == (3 * GIB, GIB)
    assert deep.binding == "reading the disk"
    assert deep.decode == pytest.approx(2e9 / (GIB * share))


def test_on_a_cpu_what_does_not_fit_is_on_disk() -> None:
    found = of("8B", MemoryRoom(10 * GIB, None), MeasuredRates(device_read=20e9, to_device=None, disk=2e9))
    assert (found.host_bytes, found.disk_bytes) == (0, found.weight_bytes - 10 * GIB)
    assert found.binding == "reading the disk"
    assert found.binding_bytes == pytest.approx(found.disk_bytes * found.read_bytes / found.weight_bytes)


def test_a_pace_that_hangs_on_an_unmeasured_link_is_not_guessed() -> None:
    rates = MeasuredRates(device_read=4e12, to_device=50e9, disk=None)
    found = of("8B", MemoryRoom(10 * GIB, 1 * GIB), rates)
    assert found.decode is None
    assert found.binding == "reading the disk, which was not measured"
    assert of("8B", MemoryRoom(100 * GIB, 1), rates).decode is not None


def test_prompts_are_bound_by_arithmetic() -> None:
    shape = Shape.of(SHAPES["8B"])
    layouts = group_layouts(shape.spec, shape.names, "bfloat16")
    seconds = bounds.prefill_operations(shape.spec, layouts, [2048]) / 1e15
    assert prefill_rate(shape.spec, shape.names, "bfloat16", 1e15) == pytest.approx(2048 / seconds)


# -- the command
# ------------------------------------------------------------------------------------------------------------


def test_a_checkup_of_a_model_that_is_not_there_yet(bare: Path) -> None:
    found = checkup(Config(bare, device="cpu", dtype="bfloat16", device_memory="1GiB"))
    assert found.links.link is None
    assert found.links.disk is not None
    assert found.model.parameters == 8_030_261_248
    assert found.model.room == MemoryRoom(GIB, None)
    assert [one.dtype for one in found.model.limits] == ["float32", "float16", "bfloat16"]
    assert not any(one.fits for one in found.model.limits)
    text = describe(found)
    assert "14.0 GiB too much" in text
    assert "the weights leave no room for KV" in text
    assert "temporary file" in text
    assert os.listdir(bare) == ["config.json"]
    for few_bits, said in (("C", "our own in C"), ("torch", "none of our own; plain torch computes")):
        assert said in describe(replace(found, kernels=(), few_bits=few_bits))
    assert "our own: linear" in describe(replace(found, kernels=("linear",), few_bits="Triton"))


def test_the_command_speaks_json_in_one_line(bare: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(bare), "--quick", "--json", "--device", "cpu", "--device-memory", "1GiB"]) == 0
    [line] = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert found["links"]["disk"] is None
    assert found["links"]["host_read"] == found["links"]["device_read"] > 0
    assert found["model"]["path"] == str(bare)
    assert {one["binding"] for one in found["model"]["limits"]} == {
        "reading the disk, which was not measured"
    }
    assert found["machine"]["torch"] == torch.__version__
    assert found["few_bits"] == ("torch" if find_library() else "C")


def test_the_command_speaks_to_people(bare: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (bare / "config.json").write_text(json.dumps(SHAPES["100M"]))
    assert (
        main(
            [
                "doctor",
                str(bare),
                "--quick",
                "--device",
                "cpu",
                "--dtype",
                "float32",
                "--device-memory",
                "1GiB",
            ]
        )
        == 0
    )
    text = capsys.readouterr().out
    assert "disk            not measured" in text
    assert "100.1M parameters" in text
    assert "limited by      reading the device's memory" in text


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "config.json"),
        ("{", "config.json"),
        ('{"model_type": "abacus"}', "abacus"),
        ("[]", "config.json"),
    ],
)
def test_the_command_refuses_in_one_line(
    config: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    assert main(["doctor", str(tmp_path), "--device", "cpu"]) == 2
    streams = capsys.readouterr()
    assert message in streams.err
    assert len(streams.err.splitlines()) == 1
