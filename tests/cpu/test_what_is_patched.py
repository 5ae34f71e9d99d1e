"""Tests that only a GPU can run patch names of the project; one that has moved is found here."""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

GPU = sorted((Path(__file__).resolve().parents[1] / "gpu").glob("test_*.py"))


def imported(tree: ast.Module) -> dict[str, str]:
    """What each name of a module stands for, as far as it is imported from the project."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("penstock"):
            found |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
    return found


def patched(tree: ast.Module) -> Iterator[str]:
    """What a module's tests put something else in the place of."""
    names = imported(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        way, first = ast.unparse(node.func).rsplit(".", 1)[-1], node.args[0]
        if way == "patch" and isinstance(first, ast.Constant):
            if str(first.value).startswith("penstock"):
                yield str(first.value)
        elif way in ("setattr", "object") and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
            owner, _, rest = ast.unparse(first).partition(".")
            if owner in names:
                yield ".".join([names[owner], *filter(None, [rest]), str(node.args[1].value)])


def at(path: str) -> Any:
    """What a dotted path leads to. Raises AttributeError."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            found = getattr(found, part)
        return found
    raise AttributeError(path)


@pytest.mark.parametrize("file", GPU, ids=lambda file: file.stem)
def test_what_tests_of_gpus_patch_is_there(file: Path) -> None:
    tree = ast.parse(file.read_text())
    for path in [*imported(tree).values(), *patched(tree)]:
        at(path)


def test_names_that_are_patched_are_seen() -> None:
    text = (
        "from penstock.api import llm as api\nfrom penstock.worker.graphs import DecodeGraphs\n"
        "def test(m):\n    m.setattr(api, 'boot', 1)\n    patch.object(DecodeGraphs, 'run', 1)\n"
        "    patch('penstock.api.opening.boot', 1)\n"
    )
    assert list(patched(ast.parse(text))) == [
        "penstock.api.llm.boot",
        "penstock.worker.graphs.DecodeGraphs.run",
        "penstock.api.opening.boot",
    ]
    with pytest.raises(AttributeError):
        at("penstock.api.llm.boot")
