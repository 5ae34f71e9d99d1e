"""The import contracts hold, and each of them breaks when a module reaches where it must not."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINT = "import sys; from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command())"


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A copy of the package's modules, with the contracts beside it."""
    shutil.copytree(ROOT / "src" / "penstock", tmp_path / "penstock", ignore=shutil.ignore_patterns("shipped", "__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


@pytest.fixture
def empty_house(house: Path) -> Path:
    """The same modules without a line in them, so that what a test adds is the only import."""
    for path in house.rglob("*.py"):
        path.write_text("")
    return house


def contract_names() -> dict[str, str]:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    return {contract["name"]: contract["id"] for contract in contracts}


def broken(house: Path) -> set[str]:
    """Ids of the contracts that the copy breaks; the command's exit code must agree with what it prints."""
    result = subprocess.run([sys.executable, "-c", LINT, "--no-cache"], cwd=house, capture_output=True, text=True, check=False)
    verdicts = dict(re.findall(r"^(.+) (KEPT|BROKEN)$", result.stdout, re.MULTILINE))
    names = contract_names()
    assert verdicts.keys() == names.keys(), result.stdout + result.stderr
    ids = {names[name] for name, verdict in verdicts.items() if verdict == "BROKEN"}
    assert result.returncode == (1 if ids else 0)
    return ids


def intrude(house: Path, module: str, imported: str) -> None:
    """Writes a module with one import into the copy; `module` is dotted, below the package."""
    path = house.joinpath("penstock", *module.split(".")).with_suffix(".py")
    path.parent.mkdir(exist_ok=True)
    if not (path.parent / "__init__.py").exists():
        (path.parent / "__init__.py").write_text("")
    path.write_text(f"import {imported}\n")


def test_the_package_keeps_every_contract(house: Path) -> None:
    assert broken(house) == set()


def test_an_empty_package_keeps_every_contract(empty_house: Path) -> None:
    assert broken(empty_house) == set()


@pytest.mark.parametrize(
    ("module", "imported", "contracts"),
    [
        ("base.intruder", "penstock.step", {"floors"}),
        ("step.intruder", "penstock.arch", {"floors"}),
        ("arch.intruder", "penstock.step", {"floors"}),
        ("memory.intruder", "penstock.weights", {"floors"}),
        ("memory.intruder", "penstock.ops", {"floors"}),
        ("kv.intruder", "penstock.weights", {"floors"}),
        ("weights.intruder", "penstock.models", {"floors"}),
        ("sched.intruder", "penstock.worker", {"floors"}),
        ("worker.intruder", "penstock.engine", {"floors"}),
        ("engine.intruder", "penstock.api", {"floors"}),
        ("api.intruder", "penstock.bench", {"floors"}),
        ("bench.intruder", "penstock.cli", {"floors"}),
        ("models.intruder", "penstock.memory", {"arithmetic"}),
        ("models.intruder", "penstock.kv", {"arithmetic", "floors"}),
        ("ops.intruder", "penstock.weights", {"arithmetic", "floors"}),
        ("base.intruder", "torch", {"no-torch"}),
        ("arch.intruder", "torch.nn.functional", {"no-torch"}),
        ("step.intruder", "torch", {"no-torch"}),
        ("sched.intruder", "torch", {"no-torch"}),
        ("kv.ledger", "torch", {"no-torch"}),
        ("kv.keys", "torch", {"no-torch"}),
        ("engine.budget", "torch", {"no-torch"}),
    ],
)
def test_an_import_against_the_floors_breaks(empty_house: Path, module: str, imported: str, contracts: set[str]) -> None:
    intrude(empty_house, module, imported)
    assert broken(empty_house) == contracts


def test_torch_is_found_behind_another_module(empty_house: Path) -> None:
    intrude(empty_house, "memory.intruder", "torch")
    intrude(empty_house, "sched.intruder", "penstock.memory.intruder")
    assert broken(empty_house) == {"no-torch"}


def test_a_folder_without_a_floor_breaks(empty_house: Path) -> None:
    intrude(empty_house, "attic.intruder", "penstock.base")
    assert "floors" in broken(empty_house)
