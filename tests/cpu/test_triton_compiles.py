"""Kernels as compilers for GPUs see them, which need no GPU: the interpreter does not know what these refuse, or what a device lacks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tiny

pytest.importorskip("triton")

TESTS = Path(__file__).resolve().parents[1]
LARGE = ("decode, many rows", "run", "run, wide heads", "run, float32", "merge", "write", "fold, float32", "draw", "experts, some")
"""Each kernel once, and where one takes most."""
EARLY = ("decode, one row", "pointwise", "linear", "linear, few rows", "steps", "sums")
"""Where launches may begin before those before them have ended, which devices can from 9.0 on."""
EVERYTHING = [(capability, ()) for capability in (80, 86, 89, 90, 100, 120)]


@pytest.mark.parametrize(("capability", "cases"), EVERYTHING if tiny.THOROUGH else [(89, LARGE), (90, EARLY)])
def test_every_kernel_compiles_for_it_and_fits(capability: int, cases: tuple[str, ...], tmp_path: Path) -> None:
    pytest.importorskip("triton.backends.nvidia")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(TESTS.parent / "src")}
    command = [sys.executable, str(TESTS / "compiling.py"), str(capability), *cases]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    most, *kernels = map(json.loads, result.stdout.splitlines())
    assert len(kernels) >= 2 * len(cases or LARGE)
    assert not [kernel for kernel in kernels if kernel["shared"] > most]
