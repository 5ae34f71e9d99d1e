"""Where all tools are said to be here, a test that skips for want of one fails; where they are not, it is
skipped."""

import os
import re
import subprocess
import sys
from pathlib import Path

CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"
SKIPS = """
import pytest
def test_that_needs_a_tool(): pytest.skip("needs chromium, which is not installed")
def test_that_needs_hardware(): pytest.skip("needs a CUDA device; torch sees none")
@pytest.mark.skipif(True, reason="needs schemathesis: pip install schemathesis")
def test_that_is_marked(): pass
@pytest.mark.xfail(reason="is known to fail", strict=True)
def test_that_is_known_to_fail(): assert False
def test_that_runs(): pass
"""
IMPORTS = """
import pytest
pytest.importorskip("no_such_package", reason="needs a package that is not here")
def test_that_never_runs(): pass
"""


def outcome(folder: Path, all_tools: str, *more: str) -> tuple[int, str]:
    """The exit status of pytest, and the last line that it prints."""
    environment = {**os.environ, "PENSTOCK_ALL_TOOLS": all_tools, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--import-mode=importlib",
        *more,
    ]
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return ran.returncode, re.sub(r" in [\d.]+s.*", "", ran.stdout.strip().splitlines()[-1])


def test_a_missing_tool_is_a_failure_where_all_should_be_here(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text())
    (tmp_path / "test_skips.py").write_text(SKIPS)
    (tmp_path / "test_imports.py").write_text(IMPORTS)
    assert outcome(tmp_path, "") == (0, "1 passed, 4 skipped, 1 xfailed")
    assert outcome(tmp_path, "1", "test_skips.py") == (1, "1 failed, 1 passed, 1 skipped, 1 xfailed, 1 error")
    status, last = outcome(tmp_path, "1")
    assert status == 2
    assert "1 error" in last
