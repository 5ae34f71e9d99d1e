"""What the documents name is there: files, classes, functions, settings, commands and links. Sources are
parsed, not imported."""

import ast
import functools
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.arch.families import FAMILIES
from penstock.arch.spec import DTYPE_BYTES, RopeKind
from penstock.base.config import Config
from penstock.base.errors import ConfigError
from penstock.base.setting import settings_of
from penstock.base.units import parse_size
from penstock.cli.main import COMMANDS
from penstock.server.fleet.scale import Scale
from penstock.server.settings import AnswerSettings, Listening, OnDemandSettings

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "penstock"
README, TOUR, ADDING = ROOT / "README.md", ROOT / "docs" / "tour.md", ROOT / "docs" / "adding-a-model.md"
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
    "optional-dependencies"
]
DOCUMENTS = pytest.mark.parametrize("document", [README, TOUR, ADDING], ids=lambda path: path.name)
NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
CALL = re.compile(rf"({NAME.pattern})\(.*\)")


class Names:
    """What the package's modules define: top-level names and `Class.member`, each with the files it is in;
    and every string in them."""

    def __init__(self) -> None:
        self.files: defaultdict[str, set[str]] = defaultdict(set)
        self.strings: set[str] = set()
        for path in SOURCE.rglob("*.py"):
            tree, where = ast.parse(path.read_text()), path.relative_to(SOURCE).as_posix()
            for name in _top_level(tree):
                self.files[name].add(where)
            for node in ast.walk(tree):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    self.strings.add(node.value)

    def __contains__(self, name: str) -> bool:
        return name in self.files


def _top_level(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        yield from _defined(node)
        if isinstance(node, ast.ClassDef):
            for member in node.body:
                yield from (f"{node.name}.{name}" for name in _defined(member))


def _defined(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield node.name
    elif isinstance(node, ast.Assign):
        yield from (target.id for target in node.targets if isinstance(target, ast.Name))
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id


@functools.cache
def names() -> Names:
    return Names()


@functools.cache
def fields() -> set[str]:
    """Members of classes and parameters of functions, without what they belong to."""
    parameters = {
        argument.arg
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for argument in (*node.args.args, *node.args.kwonlyargs)
    }
    return {name.partition(".")[2] for name in names().files if "." in name} | parameters


def prose(document: Path) -> str:
    """The text without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)


def quoted(document: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", prose(document))


def code(document: Path) -> str:
    return "\n".join(re.findall(r"^```\w*\n(.*?)^```$", document.read_text(), flags=re.MULTILINE | re.DOTALL))


def is_path(token: str) -> bool:
    return " " not in token and ("/" in token or token.endswith((".py", ".md", ".txt")))


def file_exists(token: str) -> bool:
    return any((base / token).exists() for base in (SOURCE, ROOT))


def known(token: str, document: Path) -> bool:
    """Whether `token` is something of this package's, or something the document itself shows in code."""
    if token.startswith(("~", "/")):  # A place in somebody's home, or on the server.
        return token in names().strings
    if is_path(token):
        return file_exists(token)
    if token.startswith("make"):
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return token == "make" or token.removeprefix("make ") in targets
    if token.startswith("penstock "):
        return token.split()[1] in COMMANDS
    if token.startswith("--"):
        kinds = (Config, Listening, AnswerSettings, OnDemandSettings, Scale)
        declared = (f"--{one.name.replace('_', '-')}" for kind in kinds for one in settings_of(kind))
        return token in declared or any(token in string.split("/") for string in names().strings)
    if token[0].isdigit():
        return is_size(token)
    if called := CALL.fullmatch(token):
        return known(called[1], document)
    if NAME.fullmatch(token) and (token in names() or token in fields()):
        return True
    if (ROOT / token).exists() or (SOURCE / "shipped" / token).exists():
        return True
    return token in names().strings or re.search(rf"\b{re.escape(token)}\b", code(document)) is not None


def is_size(token: str) -> bool:
    try:
        parse_size(token, whole=100)
    except ConfigError:
        return False
    return True


@DOCUMENTS
def test_everything_in_backticks_is_known(document: Path) -> None:
    # A command line that only sets things up, and a path that setting up makes, are nothing of the package's.
    foreign = {
        "python3 -m venv .venv",
        ".venv",
        "pip uninstall penstock",
        "~/.local/state/penstock",
        "~/.local/share/penstock",
        'config.only("key", supported)',
        *[f"pip install 'penstock[{extra}]'" for extra in EXTRAS],
    }
    assert [token for token in quoted(document) if token not in foreign and not known(token, document)] == []


@DOCUMENTS
def test_dotted_names_and_classes_exist(document: Path) -> None:
    """Names of these forms can be nothing else, so that they occur in some string does not count."""
    tokens = [
        token
        for token in quoted(document)
        if NAME.fullmatch(token) and not is_path(token) and token not in code(document)
    ]
    strict = [token for token in tokens if re.match(r"_?[A-Z]\w*(\.\w+)?$", token) and not token.isupper()]
    assert [token for token in strict if token not in names()] == []
    assert len(strict) > 5


def test_the_tour_says_where_everything_is() -> None:
    """For every class and function it names there is a file it names, too; and it names nothing of another
    sort."""
    tokens = set(quoted(TOUR))
    files = {token for token in tokens if token.endswith(".py")}
    assert all((SOURCE / file).is_file() for file in files)
    shown = {token for token in tokens - files if not is_path(token) and token not in ("new_blocks",)}
    assert [token for token in sorted(shown) if token not in names()] == []
    assert [token for token in sorted(shown) if not names().files[token] & files] == []
    assert len(shown) > 100


def test_files_in_the_diagrams_of_the_tour_are_there() -> None:
    found = re.findall(r"([\w/]+/\w+\.py): (\w+)", code(TOUR))
    assert len(found) > 3
    for path, name in found:
        assert any(one.rpartition(".")[2] == name and path in names().files[one] for one in names().files), (
            path
        )


@DOCUMENTS
def test_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", prose(document))
    inside = [link for link in links if not re.match(r"[a-z]+:", link)]
    assert inside
    for link in inside:
        file, _, anchor = link.partition("#")
        target = document.parent / file if file else document
        assert target.exists(), f"{document.name} links to {link}, which is not there"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", prose(target), re.MULTILINE)
            assert anchor in [
                re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings
            ]


@pytest.mark.parametrize(
    ("row", "supported"),
    [
        ("families", {*FAMILIES, "model_type"}),
        ("rotary embeddings", set(RopeKind)),
        ("dtypes", set(DTYPE_BYTES)),
    ],
    ids=["families", "rope", "dtypes"],
)
def test_the_table_of_what_runs_is_complete(row: str, supported: set[str]) -> None:
    [line] = re.findall(rf"^\| {row} \|.*$", README.read_text(), re.MULTILINE)
    assert set(re.findall(r"`([^`]+)`", line)) == supported


def test_what_is_not_there_is_noticed() -> None:
    for token in (
        "Scheduler.plon",
        "sched/planner.py",
        "Planner",
        "penstock fly",
        "make coffee",
        "--tempo",
        "12parsecs",
        "base/nothing/",
        "~/.penstock",
    ):
        assert not known(token, TOUR)


def errors() -> dict[str, tuple[str, str]]:
    """Every public error of the package: the one that it is a kind of, and the file that it is in."""
    classes = {}
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                for base in node.bases:
                    classes[node.name] = (
                        base.id if isinstance(base, ast.Name) else "",
                        path.relative_to(SOURCE).as_posix(),
                    )

    def is_ours(name: str) -> bool:
        return name == "PenstockError" or (name in classes and is_ours(classes[name][0]))

    return {name: known for name, known in classes.items() if is_ours(known[0]) and not name.startswith("_")}


def test_every_error_is_in_the_tree_and_in_the_readme() -> None:
    tree: dict[str, tuple[str, str]] = {}
    above: list[str] = []
    for depth, name, where in re.findall(
        r"^((?:    )+)(\w+) *([\w/]+\.py)?$", ast.get_docstring(_errors_file(), clean=False) or "", re.M
    ):
        level = len(depth) // 4 - 1
        above[level:] = [name]
        if level:
            tree[name] = above[level - 1], where or "base/errors.py"
    assert tree == errors()
    section = README.read_text().split("\n## Errors\n")[1].split("\n## ")[0]
    assert set(re.findall(r"`(\w+)`", section)) >= errors().keys()


def _errors_file() -> ast.Module:
    return ast.parse((SOURCE / "base" / "errors.py").read_text())
