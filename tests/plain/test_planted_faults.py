"""The table of faults that tools/planted_faults.py plants is of today's sources and names tests that there
are."""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from planted_faults import Fault, planted, read_table  # noqa: E402

FAULTS = read_table()


@cache
def names_in(file: str) -> frozenset[str]:
    """Names of a file's tests, and of its classes, as in node ids."""
    names = set[str]()
    for node in ast.parse((ROOT / file).read_text()).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names |= {
                node.name,
                *(f"{node.name}::{one.name}" for one in node.body if isinstance(one, ast.FunctionDef)),
            }
        elif isinstance(node, ast.Assign):  # A machine of Hypothesis's is a test by another name.
            names |= {f"{target.id}::runTest" for target in node.targets if isinstance(target, ast.Name)}
    return frozenset(names)


def test_there_are_enough() -> None:
    assert len(FAULTS) >= 110


def flaws(fault: Fault) -> Iterator[str]:
    """What keeps it from being planted, or from being looked for."""
    if flaw := fault.flaw(ROOT):
        yield flaw
        return
    try:
        if fault.file.endswith(".py"):
            ast.parse((ROOT / fault.file).read_text().replace(fault.old, fault.new))
    except SyntaxError as error:
        yield f"it is no Python: {error}"
    for test in fault.tests:
        file, _, name = test.partition("::")
        if not (ROOT / file).is_file() or (name and name.split("[")[0] not in names_in(file)):
            yield f"there is no test {test}"


def test_all_can_be_planted() -> None:
    """What stands there has been changed, or a test was renamed: change the table too, and plant the fault
    (make faults ARGS=NAME)."""
    assert [f"{fault.name}: {flaw}" for fault in FAULTS for flaw in flaws(fault)] == []


def test_it_is_planted_and_taken_out_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = tmp_path / "project"
    (project / "src").mkdir(parents=True)
    (project / "src" / "sums.py").write_text("def double(x):\n    return x + x\n")
    (project / "test_sums.py").write_text(
        "from sums import double\n\n\ndef test_double():\n    assert double(3) == 6\n"
    )
    monkeypatch.setattr("planted_faults.PROJECT", project)
    told = [Fault("wrong", "src/sums.py", "x + x", new, ("test_sums.py",)) for new in ("x * x", "2 * x")]
    told.append(Fault("gone", "src/sums.py", "y + y", "y", ("test_sums.py",)))
    told.append(Fault("no test", "src/sums.py", "x + x", "x", ("test_nothing.py",)))
    found = list(planted(told, tmp_path / "copies", 1))
    assert [one["caught"] for one in found] == [True, False, False, False]
    assert found[0]["by"] == ["test_sums.py::test_double"]
    assert found[2]["error"] == "what is to be replaced stands 0 times in src/sums.py"
    assert "test_nothing.py" in str(found[3]["error"])
    assert (tmp_path / "copies" / "0" / "copy" / "src" / "sums.py").read_text() == (
        project / "src" / "sums.py"
    ).read_text()
