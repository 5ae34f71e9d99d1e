"""What must start without torch does: the floors that decide, the package itself, the command line, the plain
tests."""

import os
import pkgutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"

PROBE = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    if "torch" in sys.modules:
        sys.exit(f"{name} imports torch")
    package = name.partition(".")[0]
    for one in [one for one in sys.modules if one.partition(".")[0] == package]:
        del sys.modules[one]  # Each is imported as if it were the first.
"""


def torch_free_prefixes() -> list[str]:
    """Modules that the import contracts keep from torch, and the two that everyone starts from."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    kept = next(contract["source_modules"] for contract in contracts if contract["id"] == "no-torch")
    return [*kept, "penstock.cli.main"]


def modules(folder: Path, package: str) -> Iterator[str]:
    """Names of the package and of everything in it, found without importing any of it."""
    yield package
    for module in pkgutil.iter_modules([str(folder)]):
        name = f"{package}.{module.name}"
        if module.ispkg:
            yield from modules(folder / module.name, name)
        else:
            yield name


def torch_free_modules() -> list[str]:
    prefixes = torch_free_prefixes()
    names = modules(SOURCE / "penstock", "penstock")
    return [
        name
        for name in names
        if name == "penstock" or any(f"{name}.".startswith(f"{prefix}.") for prefix in prefixes)
    ]


def probe(path: Path, *names: str) -> subprocess.CompletedProcess[str]:
    """Imports each module anew in an interpreter that looks into `path` first; exits with 1 if torch came
    along or an import failed."""
    environment = os.environ | {"PYTHONPATH": str(path)}
    return subprocess.run(
        [sys.executable, "-c", PROBE, *names], env=environment, capture_output=True, text=True, check=False
    )


def test_imports_without_torch() -> None:
    result = probe(SOURCE, *torch_free_modules())
    assert result.returncode == 0, result.stderr


def test_every_floor_that_decides_is_probed() -> None:
    names = torch_free_modules()
    assert {"penstock", "penstock.base.errors", "penstock.arch.spec", "penstock.step.plan"} <= set(names)
    assert "penstock.sched" in names


def test_probe_notices_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("")
    (tmp_path / "leaky.py").write_text("def late():\n    import torch\n\nlate()\n")
    (tmp_path / "clean.py").write_text("def late():\n    import torch\n")
    (tmp_path / "broken.py").write_text("import nothing.of.this.name")
    assert probe(tmp_path, "clean", "leaky").stderr == "leaky imports torch\n"
    assert probe(tmp_path, "clean", "broken").returncode == 1
    assert probe(tmp_path, "clean").returncode == 0


def test_plain_tests_are_collected_where_torch_is_missing() -> None:
    collect = "import sys, pytest; sys.modules['torch'] = None; sys.exit(pytest.main(sys.argv[1:]))"
    arguments = ["tests/plain", "--collect-only", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    arguments.append("--assert=plain")  # Nothing is run, so no assertion has to be rewritten.
    result = subprocess.run(
        [sys.executable, "-c", collect, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout
