"""Kernels in C for matrices of few bits on a CPU, against what the matrices stand for, and how they are
compiled and kept."""

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

import forks
import tiny
from native_ways import WAYS
from penstock.base.config import Config
from penstock.bench.doctor.checkup import checkup
from penstock.engine.boot import boot
from penstock.ops.kernels import native_kernels, plain_torch
from penstock.ops.linear import add_linear, gated, linear
from penstock.ops.matrix import Matrix
from penstock.ops.native import few_bits
from penstock.ops.native.compiler import FOLDER, NativeError, load
from penstock.ops.native.few_bits import (
    FewBitsLibrary,
    dequantise,
    few_rows,
    few_rows_each,
    find_library,
)
from penstock.weights.checkpoint.reader import Checkpoint
from quantised import SCHEMES, checkpoints, matrix_of

LANES = {"no_avx512": 8, "portable": 8}
ROWS = (*range(1, 18), 37)


@pytest.fixture(scope="session")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("native")


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, kept: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kernels compiled in one of the ways that this processor can run."""
    try:
        found = compiled(kept, request.param)
    except NativeError as fault:
        pytest.skip(str(fault))
    assert found.lanes == LANES.get(request.param, found.lanes)
    monkeypatch.setattr(few_bits, "_found", state(found))
    return str(request.param)


@cache
def compiled(kept: Path, way: str) -> FewBitsLibrary:
    return FewBitsLibrary(load(kept, WAYS[way]))


def state(library: FewBitsLibrary | None = None) -> few_bits._Found:
    made = few_bits._Found()
    made.library, made.sought = library, library is not None
    return made


@pytest.fixture
def unsought(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has not looked for kernels yet."""
    monkeypatch.setattr(few_bits, "_found", state())


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def example(scheme: str, height: int, width: int) -> tuple[Matrix, Tensor]:
    """A matrix whose sides are the largest up to these that the layout holds, which no kernel has seen. Its
    tensors stay as they are."""
    few, plain = numbers(scheme, height, width)
    return Matrix(few.format, few.shape, few.parts), plain


@cache
def numbers(scheme: str, height: int, width: int) -> tuple[Matrix, Tensor]:
    down, across = SCHEMES[scheme].multiple
    rng = torch.Generator().manual_seed(len(scheme) + width)
    return matrix_of(
        SCHEMES[scheme], torch.randn(height // down * down, width // across * across, generator=rng) / 17
    )


def bound(x: Tensor, plain: Tensor) -> Tensor:
    """What a product in float32 may be off by: rounding of as many sums as a lane has, of the terms' size."""
    return (x.double().abs() @ plain.double().abs().T) * 2.0**-24 * (6 + plain.shape[1] / 8)


@pytest.mark.parametrize("width", [64, 303, 640])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_product(scheme: str, width: int, way: str) -> None:
    few, plain = example(scheme, 43, width)
    rng = torch.Generator().manual_seed(width)
    x = torch.randn(max(ROWS), plain.shape[1], generator=rng)
    want, most = x.double() @ plain.double().T, bound(x, plain)
    whole = few_rows(x, few)
    for rows in ROWS:
        got = few_rows(x[:rows], few)
        assert got.dtype == torch.float32
        assert ((got - want[:rows]).abs() <= most[:rows]).all(), rows
        assert torch.equal(got, whole[:rows]), "a row depends on the others"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_half(scheme: str, dtype: torch.dtype, way: str) -> None:
    """What is read and written in 16 bits is widened and rounded as torch does it."""
    few, plain = example(scheme, 24, 200)
    rng = torch.Generator().manual_seed(1)
    x = (torch.randn(5, plain.shape[1], generator=rng) * 3).to(dtype)
    assert torch.equal(few_rows(x, few), few_rows(x.float(), few).to(dtype))
    bias = torch.randn(len(plain), generator=rng).to(dtype)
    wide = few_rows(x.float(), few, bias.float())
    assert torch.equal(few_rows(x, few, bias), wide.to(dtype))
    assert torch.equal(wide, few_rows(x.float(), few) + bias.float())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_dequantised(scheme: str, way: str) -> None:
    few, plain = example(scheme, 43, 303)
    for rows in (slice(0, 43), slice(16, 32), slice(7, 30)):
        some = plain[rows]
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            out = torch.full(some.shape, torch.nan, dtype=dtype)
            dequantise(few, slice(rows.start, min(rows.stop, len(plain))), out)
            assert torch.equal(out, some.to(dtype))


@pytest.mark.parametrize(
    ("scheme", "dtype"),
    [
        (scheme, dtype)
        for turn, scheme in enumerate(SCHEMES)
        for other, dtype in enumerate((torch.float32, torch.bfloat16))
        if tiny.THOROUGH or turn % 2 == other
    ],
)
def test_products_at_once(scheme: str, dtype: torch.dtype, way: str, threads: None) -> None:
    """Rows with a matrix each are what they are one by one, on any number of threads."""
    few, _ = example(scheme, 300, 200)
    matrices = [  # Four different ones.
        Matrix(few.format, few.shape, {**few.parts, "codes": few.parts["codes"].roll(at, 0)})
        for at in range(4)
    ]
    (height, width), counts = matrices[0].shape, (1, 6, 2, 3)
    x = torch.randn(12, width + 3, generator=torch.Generator().manual_seed(4)).to(dtype)[:, :width]
    want = torch.cat([few_rows(part, few) for part, few in zip(x.split(counts), matrices, strict=True)])
    for count in (1, 3):
        torch.set_num_threads(count)
        out = torch.full((14, height + 2), torch.nan, dtype=dtype)
        few_rows_each(x, matrices, counts, out[1:-1, 1:-1])
        assert torch.equal(out[1:-1, 1:-1], want)
        assert out.isnan().sum() == out.numel() - want.numel()


@pytest.mark.parametrize("scheme", ["gptq_asymmetric", "gptq_order", "packed_8", "fp8_channel", "nvfp4"])
def test_roundings(scheme: str, way: str) -> None:
    """Results that lie between two numbers of 16 bits, that are too large for one, or hardly a number."""
    few, plain = example(scheme, 24, 64)
    for size in (1e-7, 1e-5, 1.0, 3e4, 1e6):
        x = torch.randn(4, plain.shape[1], generator=torch.Generator().manual_seed(7)) * size
        wide, x_half = few_rows(x.half().float(), few), x.half()
        assert torch.equal(few_rows(x_half, few).nan_to_num(), wide.half().nan_to_num())
        assert torch.equal(few_rows(x.bfloat16(), few), few_rows(x.bfloat16().float(), few).bfloat16())


@pytest.mark.parametrize("scheme", ["packed", "packed_8", "mxfp4", "nvfp4", "fp8"])
def test_threads(scheme: str, way: str, threads: None) -> None:
    few, plain = example(scheme, 700, 608)
    x = torch.randn(5, plain.shape[1], generator=torch.Generator().manual_seed(2))
    found = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        out = torch.empty(plain.shape)
        dequantise(few, slice(0, len(plain)), out)
        found.append((few_rows(x, few), few_rows(x[:1], few), out))
    for one in found[1:]:
        assert all(map(torch.equal, one, found[0]))
    assert torch.equal(found[0][2], plain)


def test_torch_s_own_threads(way: str) -> None:
    """Kernels start no threads beside torch's."""
    found = few_bits.library()
    assert found is not None
    if "OpenMP" not in torch.__config__.parallel_info():
        pytest.skip("torch without OpenMP")
    assert found.parallel is not None
    few, plain = example("packed", 700, 608)
    x = torch.randn(2, plain.shape[1])
    torch.randn(512, 512) @ torch.randn(512, 512)
    before = len(os.listdir("/proc/self/task"))
    for _ in range(3):
        few_rows(x, few)
    assert len(os.listdir("/proc/self/task")) <= max(before, torch.get_num_threads())


def test_side_by_side(way: str) -> None:
    """Threads of a program may compute at the same time."""
    few, plain = example("packed_asymmetric", 512, 640)
    x = torch.randn(3, plain.shape[1])
    want = few_rows(x, few)
    with ThreadPoolExecutor(4) as pool:
        for got in pool.map(lambda _: few_rows(x, few), range(40)):
            assert torch.equal(got, want)


# ---- in products


@pytest.mark.parametrize("scheme", ["packed_asymmetric", "mxfp4", "fp8", "gptq_order"])
@pytest.mark.parametrize("rows", [1, 5, 300])
def test_linear(scheme: str, rows: int, way: str) -> None:
    few, plain = example(scheme, 64, 320)
    rng = torch.Generator().manual_seed(rows)
    x, bias = torch.randn(rows, plain.shape[1], generator=rng), torch.randn(len(plain), generator=rng)
    want = (x.double() @ plain.double().T + bias).float()
    torch.testing.assert_close(linear(x, few, bias), want, atol=2e-5, rtol=1e-5)
    wide = torch.full((rows, len(plain) + 9), torch.nan)
    got = linear(x, few, bias, out=wide[:, 4:-5])
    assert torch.equal(got, wide[:, 4:-5])
    assert wide[:, :4].isnan().all()
    assert wide[:, -5:].isnan().all()
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-5)
    onto = torch.randn(rows, len(plain), generator=rng)
    sums = onto + want - bias
    add_linear(x, few, onto)
    torch.testing.assert_close(onto, sums, atol=2e-5, rtol=1e-5)
    gate, up = want.chunk(2, -1)
    torch.testing.assert_close(gated(x, few, bias), gate.sigmoid() * gate * up, atol=5e-5, rtol=1e-5)


def test_used(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows are computed by the kernel, unless a thread wants plain torch."""
    few, plain = example("packed", 64, 320)
    x, calls = torch.randn(2, plain.shape[1]), []
    monkeypatch.setattr(few_bits, "few_rows", lambda *given, **more: calls.append(given) or x)
    linear(x, few)
    assert len(calls) == 1
    with plain_torch():
        assert native_kernels() is None
        linear(x, few)
    assert len(calls) == 1


# ---- compiling and keeping


def files(cache: Path) -> list[Path]:
    return sorted((cache / FOLDER).iterdir())


def fake_compiler(folder: Path, text: str) -> str:
    path = folder / "fake-cc"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def products() -> None:
    few, plain = example("packed", 16, 64)
    x = torch.randn(2, 64)
    torch.testing.assert_close(linear(x, few), x @ plain.T, atol=1e-5, rtol=1e-5)


def test_kept(tmp_path: Path, unsought: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_library(tmp_path) == ""
    (path,) = files(tmp_path)
    assert (tmp_path / FOLDER).stat().st_mode & 0o777 == 0o700
    assert path.stat().st_mode & 0o777 == 0o600
    products()
    log = tmp_path / "log"
    real = subprocess.run

    def noted(command: list[str], **more: object) -> object:
        log.write_text(log.read_text() + f"{command}\n" if log.exists() else f"{command}\n")
        return real(command, **more)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess, "run", noted)
    load(tmp_path)
    assert "-shared" not in log.read_text(), "compiled again"
    load(tmp_path, WAYS["no_avx512"] if platform.machine() == "x86_64" else ("-O0",))
    assert "-shared" in log.read_text()
    assert len(files(tmp_path)) == 2


def test_no_compiler(tmp_path: Path, unsought: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert find_library(tmp_path) == "there is no C compiler (cc, gcc or clang)"
    products()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("exit 3", "does not run"),
        ('[ "$1" = --version ] || { echo "no space on device" >&2; exit 1; }', "no space on device"),
        ("exit 0", "fails"),
    ],
)
def test_compiler_fails(
    text: str, said: str, tmp_path: Path, unsought: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", fake_compiler(tmp_path, text))
    assert said in find_library(tmp_path)
    assert files(tmp_path) == []
    products()


def test_compiler_makes_something_else(
    tmp_path: Path, unsought: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = 'while [ $# -gt 0 ]; do [ "$1" = -o ] && echo no library > "$2"; shift; done'
    monkeypatch.setenv("CC", fake_compiler(tmp_path, text))
    assert "cannot be loaded" in find_library(tmp_path)
    products()


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o755])
def test_folder_of_others(mode: int, tmp_path: Path, unsought: None) -> None:
    folder = tmp_path / FOLDER
    folder.mkdir()
    folder.chmod(mode)
    assert "must be a directory that is yours alone" in find_library(tmp_path)
    assert list(folder.iterdir()) == []
    products()


def test_folder_is_a_link(tmp_path: Path, unsought: None) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / FOLDER).symlink_to(tmp_path / "elsewhere")
    assert "must be a directory that is yours alone" in find_library(tmp_path)


def test_no_folder(tmp_path: Path, unsought: None) -> None:
    (tmp_path / FOLDER).write_text("")
    assert "cannot be made" in find_library(tmp_path)
    products()


def test_damaged(tmp_path: Path) -> None:
    """A file that is not whole, or that others may write, is compiled anew and never loaded."""
    load(tmp_path)
    (path,) = files(tmp_path)
    whole = path.read_bytes()
    for damaged in (b"", whole[:5000], whole[:-1], whole[:9000] + b"\0" + whole[9001:]):
        path.unlink()
        path.write_bytes(damaged)
        path.chmod(0o600)
        load(tmp_path)
        assert path.stat().st_size >= len(whole) - 64
        assert path.read_bytes() != damaged
    path.chmod(0o666)
    load(tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600


def test_two_processes(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from penstock.ops.native.few_bits import find_library; "
        "sys.exit(find_library(Path(sys.argv[1])) or 0)"
    )
    started = [forks.Popen([sys.executable, "-c", program, str(tmp_path)]) for _ in range(2)]
    assert [one.wait(100) for one in started] == [0, 0]
    assert len(files(tmp_path)) == 1


# ---- what a person sees


def test_doctor_and_boot_say_why(tmp_path: Path, unsought: None, monkeypatch: pytest.MonkeyPatch) -> None:
    few, _ = checkpoints(tiny.checkpoint("llama"), tmp_path, SCHEMES["packed"])
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    config = Config(few, device="cpu", dtype="float32", cache=tmp_path / "cache", max_length=64)
    why = "there is no C compiler (cc, gcc or clang)"
    assert any(why in note for note in checkup(config, quick=True).notes)
    said: list[str] = []
    with Checkpoint.open(few) as checkpoint, closing(boot(config, checkpoint, say=said.append).engine):
        assert [line for line in said if why in line] == [
            f"kernels for weights of few bits: none, plain torch computes much slower: {why}"
        ]


def test_boot_compiles(tmp_path: Path, unsought: None) -> None:
    few, dense = checkpoints(tiny.checkpoint("llama"), tmp_path, SCHEMES["packed"])
    for path, kernels, count in ((dense, False, 0), (few, False, 0), (few, True, 1), (dense, True, 1)):
        cache = tmp_path / f"cache{count}"
        config = Config(path, device="cpu", dtype="float32", cache=cache, max_length=64, kernels=kernels)
        with Checkpoint.open(path) as checkpoint, closing(boot(config, checkpoint).engine):
            assert len(files(cache) if (cache / FOLDER).exists() else []) == count
