"""Check docs/glossary.md against the code, and names in the code against the field's terms.

A row of the glossary names code, and the files or folders that have it. Each name must be defined in one of
them. `FORBIDDEN` lists names of ours for which the field has a better one. `PENDING` lists those that the
code still has.
"""

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "penstock"
GLOSSARY = ROOT / "docs" / "glossary.md"

FORBIDDEN = {
    "choosy": "non_greedy_rows",
    "curious": "logprob_rows",
    "early_launches": "pdl_launches",
    "early_options": "pdl_launch_options",
    "give_up": "evict",
    "launches_early": "uses_pdl",
    "next_given_up": "next_evicted",
    "passage": "ring",
    "pays": "has_lower_tier",
    "steady": "fast_decode_until",
    "sum_over_ranks": "all_reduce",
    "why_not": "graph_blocker",
    "wishes": "pack_sampling",
    "Came": "OutputChunk",
    "Desk": "RequestBroker",
    "Errand": "RemoteRequest",
    "FarLLM": "RemoteReader",
    "House": "ServerState",
    "HOPE": "RETRY_DISCOUNT",
    "Kept": "ResponseStore",
    "Ready": "PreparedPrompt",
    "Sequel": "OutputSequence",
    "Told": "ResponseStream",
    "World": "PlacementSearch",
}
"""Names of ours, without leading underscores, and the name to use instead."""

PENDING: set[str] = set()
"""Names of `FORBIDDEN` that are still in the code. A name is removed from here when it is gone from there."""


class Entry(NamedTuple):
    term: str
    here: str
    where: tuple[Path, ...]


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def located(path: str) -> Path:
    return SOURCE / path if (SOURCE / path).exists() else ROOT / path


def entries(text: str) -> list[Entry]:
    """Return the rows of every table: a term, our name for it, and the files or folders that have it."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    rows = [row for row in cells if row[0] not in ("term", "---")]
    return [Entry(term, here, tuple(map(located, quoted(where)))) for term, here, where, _ in rows]


ENTRIES = entries(GLOSSARY.read_text(encoding="utf-8"))


def bound(node: ast.AST) -> Iterator[str]:
    """Yield the name that a node of a syntax tree binds, if it binds one."""
    match node:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            yield name
        case (
            ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store())
        ):
            yield name
        case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
            yield from (alias.asname for alias in aliases if alias.asname)


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def defines(path: Path, name: str) -> bool:
    """Tell whether a file has `name`: a name, `Class.member` or a string in Python, any text elsewhere."""
    if path.is_dir():
        return any(defines(file, name) for file in path.rglob("*.py"))
    if path.suffix != ".py":
        return name in path.read_text(encoding="utf-8")
    owner, _, member = name.rpartition(".")
    if owner:
        classes = [
            node for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef) and node.name == owner
        ]
        return any(member in bound(node) for one in classes for node in ast.walk(one))
    nodes = list(ast.walk(tree(path)))
    strings = (
        part for node in nodes if isinstance(node, ast.Constant) for part in str(node.value).split("/")
    )
    return any(name in bound(node) for node in nodes) or name in strings


def mentions(path: Path, word: str) -> bool:
    """Tell whether a file, or a module of a folder, has the word, in the plural too."""
    files = path.rglob("*.py") if path.is_dir() else (path,)
    return any(re.search(rf"\b{word}s?\b", file.read_text(encoding="utf-8"), re.I) for file in files)


@functools.cache
def names_in(source: Path) -> dict[str, set[str]]:
    """Return the names defined below a folder, without leading underscores, and the files of each."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for path in source.rglob("*.py"):
        where = path.relative_to(source).as_posix()
        found[path.stem].add(where)
        for node in ast.walk(tree(path)):
            for name in bound(node):
                found[name.lstrip("_")].add(where)
    return found


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.term)
def test_a_term_is_where_the_glossary_says(entry: Entry) -> None:
    assert entry.where, "a row names no file"
    assert [path for path in entry.where if not path.exists()] == []
    if names := quoted(entry.here):
        assert [name for name in names if not any(defines(path, name) for path in entry.where)] == []
        assert all(any(defines(path, name) for name in names) for path in entry.where), (
            "a file has none of the names"
        )
    elif entry.here != "none":
        word = (entry.term if entry.here == "the same" else entry.here).removeprefix("the ")
        assert all(mentions(path, word) for path in entry.where)


def test_a_term_is_explained_once() -> None:
    terms = [term for entry in ENTRIES for term in entry.term.split(", ")]
    assert sorted(set(terms)) == sorted(terms)
    assert len(terms) > 60


def test_links_of_the_glossary_lead_somewhere() -> None:
    for link in re.findall(r"\]\(([^)]+)\)", GLOSSARY.read_text(encoding="utf-8")):
        file, _, anchor = link.partition("#")
        headings = re.findall(
            r"^#+ (.+)$", (GLOSSARY.parent / file).read_text(encoding="utf-8"), re.MULTILINE
        )
        assert anchor in [re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in headings]


def test_names_of_ours_that_the_field_has_a_term_for_do_not_come_back() -> None:
    found = names_in(SOURCE)
    used = {name: (FORBIDDEN[name], sorted(found[name])) for name in FORBIDDEN if name in found}
    assert {name: used[name] for name in used.keys() - PENDING} == {}


def test_pending_names_are_still_there() -> None:
    """Fail when a name has been replaced: remove it from `PENDING` then."""
    assert sorted(PENDING - names_in(SOURCE).keys()) == []
    assert FORBIDDEN.keys() >= PENDING


def test_what_is_wrong_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "class Tray:\n    def _wishes(self, curious): ...\n    size: int = 0\n_World = 1\n"
    )
    assert {"wishes", "curious", "World", "Tray", "size", "a"} <= names_in(tmp_path).keys()
    assert defines(tmp_path / "a.py", "Tray.size")
    assert not defines(tmp_path / "a.py", "Tray.colour")
    assert not defines(tmp_path / "a.py", "Cup")
    assert defines(tmp_path, "Tray")
    assert not defines(tmp_path, "Cup")
    [entry] = entries(
        "| term | here | where | meaning |\n|---|---|---|---|\n| cup | `Cup` | `base/cups.py` | x |\n"
    )
    assert entry == Entry("cup", "`Cup`", (ROOT / "base" / "cups.py",))
    assert not entry.where[0].exists()
