"""The import contracts hold, and each of them breaks when a module reaches where it must not."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINT = """
import json, os, sys
from importlinter.cli import lint_imports_command

for line in sys.stdin:
    out, inside = os.pipe()
    if not (child := os.fork()):
        os.dup2(inside, 1)
        os.dup2(inside, 2)
        os.chdir(json.loads(line))
        sys.path.insert(0, "")
        sys.argv = ["lint-imports", "--no-cache"]
        lint_imports_command()
    os.close(inside)
    with open(out) as said:
        text = said.read()
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text]), flush=True)
"""
"""The command in each folder that is named, in a process that begins with what is slow to import."""
Lint = Callable[[Path], tuple[int, str]]


@pytest.fixture(scope="module")
def lint() -> Iterator[Lint]:
    """What the command ends with and says in a folder."""
    with subprocess.Popen(
        [sys.executable, "-c", LINT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:

        def run(folder: Path) -> tuple[int, str]:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(str(folder)) + "\n")
            process.stdin.flush()
            code, text = json.loads(process.stdout.readline())
            return code, text

        yield run


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A copy of the package's modules, with the contracts beside it."""
    shutil.copytree(
        ROOT / "src" / "penstock",
        tmp_path / "penstock",
        ignore=shutil.ignore_patterns("shipped", "__pycache__"),
    )
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


def broken(house: Path, lint: Lint) -> set[str]:
    """Ids of the contracts that the copy breaks; the command's exit code must agree with what it prints."""
    code, text = lint(house)
    verdicts = dict(re.findall(r"^(.+) (KEPT|BROKEN)(?: \(.*\))?$", text, re.MULTILINE))
    names = contract_names()
    assert verdicts.keys() == names.keys(), text
    ids = {names[name] for name, verdict in verdicts.items() if verdict == "BROKEN"}
    assert code == (1 if ids else 0)
    return ids


def intrude(house: Path, module: str, imported: str) -> None:
    """Writes a module with one import into the copy; `module` is dotted, below the package."""
    path = house.joinpath("penstock", *module.split(".")).with_suffix(".py")
    path.parent.mkdir(exist_ok=True)
    if not (path.parent / "__init__.py").exists():
        (path.parent / "__init__.py").write_text("")
    path.write_text(f"import {imported}\n")


def test_the_package_keeps_every_contract(house: Path, lint: Lint) -> None:
    assert broken(house, lint) == set()


def test_an_empty_package_keeps_every_contract(empty_house: Path, lint: Lint) -> None:
    assert broken(empty_house, lint) == set()


INTRUDERS = [
    ("base.intruder", "penstock.step", {"floors"}),
    ("step.intruder", "penstock.arch", {"floors"}),
    ("arch.intruder", "penstock.step", {"floors"}),
    ("memory.intruder", "penstock.weights", {"floors"}),
    ("memory.intruder", "penstock.ops", {"floors"}),
    ("kv.ledger.intruder", "penstock.weights", {"floors"}),
    ("weights.pack.intruder", "penstock.models", {"floors"}),
    ("sched.intruder", "penstock.worker", {"floors", "sched"}),
    ("worker.intruder", "penstock.engine", {"floors"}),
    ("engine.intruder", "penstock.api", {"floors"}),
    ("api.text.intruder", "penstock.bench", {"floors"}),
    ("bench.speed.intruder", "penstock.cli", {"floors"}),
    ("bench.traces.intruder", "penstock.bench.speed", {"bench"}),
    ("models.intruder", "penstock.memory", {"arithmetic"}),
    ("models.intruder", "penstock.kv", {"arithmetic", "floors"}),
    ("ops.intruder", "penstock.weights", {"arithmetic", "floors"}),
    ("base.intruder", "torch", {"no-torch"}),
    ("arch.intruder", "torch.nn.functional", {"no-torch"}),
    ("step.intruder", "torch", {"no-torch"}),
    ("sched.intruder", "torch", {"no-torch", "sched"}),
    ("sched.span", "penstock.sched.growth", {"sched"}),
    ("kv.ledger.blocks", "torch", {"no-torch"}),
    ("kv.ledger.prospect", "torch", {"no-torch"}),
    ("kv.ledger.keys", "torch", {"no-torch"}),
    ("engine.budget", "torch", {"no-torch"}),
    ("api.reader", "torch", {"no-torch"}),
]
"""Where a module is put, what it imports, and the contracts that it breaks."""


def test_imports_against_the_floors_break(empty_house: Path, lint: Lint) -> None:
    """Each of them those that it should, and no others: under a contract stands which modules break it."""
    expected = {}
    for number, (module, imported, contracts) in enumerate(INTRUDERS):
        module += str(number) if module.endswith("intruder") else ""
        intrude(empty_house, module, imported)
        expected[module] = contracts
    code, text = lint(empty_house)
    names, found = contract_names(), {module: set[str]() for module in expected}
    heads = "|".join(map(re.escape, names))
    for name, told in re.findall(rf"^({heads})\n-+\n(.*?)(?=^(?:{heads})\n-+\n|\Z)", text, re.M | re.S):
        for module in re.findall(r"^- +penstock\.(\S+)(?: ->|$)", told, re.M):
            found[module].add(names[name])
    assert found == expected, text
    assert code == 1


def test_torch_is_found_behind_another_module(empty_house: Path, lint: Lint) -> None:
    intrude(empty_house, "memory.intruder", "torch")
    intrude(empty_house, "sched.rules", "penstock.memory.intruder")
    assert broken(empty_house, lint) == {"no-torch"}


def test_a_folder_without_a_floor_breaks(empty_house: Path, lint: Lint) -> None:
    intrude(empty_house, "attic.intruder", "penstock.base")
    assert "floors" in broken(empty_house, lint)
