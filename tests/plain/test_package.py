"""What is packed into a wheel, and what a package index is told of it. Nothing is built: hatchling says what
it would pack."""

import ast
import re
from pathlib import Path

import pytest

import penstock
from penstock.cli.main import main

pytest.importorskip("hatchling", reason="needs hatchling, which builds wheels")

from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "src" / "penstock"
KINDS = {".py", ".c", ".json", ".safetensors", ".html", ".css", ".js", ".mjs", ".svg", ".txt", ".typed"}


@pytest.fixture(scope="module")
def builder() -> WheelBuilder:
    return WheelBuilder(str(ROOT))


def test_a_wheel_has_every_file_of_the_package_and_no_other(builder: WheelBuilder) -> None:
    packed = {Path(one.distribution_path) for one in builder.recurse_included_files()}
    there = {
        path.relative_to(ROOT / "src")
        for path in SOURCES.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert packed == there
    assert {path.suffix or path.name for path in packed} <= KINDS
    assert {path.parts[0] for path in packed} == {"penstock"}
    for name in (
        "py.typed", "shipped/model.safetensors", "shipped/tokenizer.json", "ops/native/dots.c",
        "server/http/page/index.html", "server/http/page/vendor/LICENSES.txt", "cli/machines/h100.json",
    ):  # fmt: skip
        assert Path("penstock", name) in packed


def test_an_index_is_told_what_it_is(builder: WheelBuilder) -> None:
    core = builder.metadata.core
    assert core.version == penstock.__version__
    assert core.scripts == {"penstock": f"{main.__module__}:{main.__name__}"}
    assert core.description.endswith(".")
    assert core.readme_content_type == "text/markdown"
    assert core.readme.startswith("# penstock")
    assert core.requires_python == ">=3.11"
    licences = [ROOT / name for name in core.license_files]
    assert {one.name for one in licences} == {"LICENSE", "NOTICE", "LICENSES.txt"}
    assert all(one.stat().st_size for one in licences)
    every = core.optional_dependencies
    for extra in ("serve", "grammar", "otel"):
        assert set(every[extra]) <= set(every["all"]), "what `all` names is resolved"


def test_sources_are_in_the_grammar_of_the_oldest_python_that_is_named(builder: WheelBuilder) -> None:
    """A newer Python, which somebody may develop with, would read more."""
    named = re.findall(r":: Python :: 3\.(\d+)$", "\n".join(builder.metadata.core.classifiers), re.MULTILINE)
    oldest = (3, min(map(int, named)))
    newest = max(map(int, named))
    assert f"Python 3.{oldest[1]} to 3.{newest}," in builder.metadata.core.readme
    assert sorted(map(int, named)) == list(range(oldest[1], newest + 1))
    assert builder.metadata.core.requires_python == f">={oldest[0]}.{oldest[1]}"
    for path in SOURCES.rglob("*.py"):
        ast.parse(path.read_text(encoding="utf-8"), feature_version=oldest)
