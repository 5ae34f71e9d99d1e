#!/usr/bin/env python3
"""Check the limits of the house: how complex, long and wide code may be, and how a docstring begins.

    python tools/house.py              print what is over a limit; exit with 1 if anything is
    python tools/house.py --write      rewrite the debts in house.toml; refused where one would be added
    python tools/house.py --write --grow
    python tools/house.py --count      print how many statements src has, for whoever wants fewer; no limit

`house.toml` beside this file holds every limit, every exception beside its reason, and the debts: what was
over a limit when the limit was set. A debt or an exception that is not needed any more fails the check, so
the lists only shrink.

Ruff measures complexity, parameters and missing docstrings. The other rules are measured here:

    length       a file of src has at most so many lines
    class-name   one class name serves one class in the whole of src
    opening      the first sentence of a docstring does not begin with a word like "Of" or "What"
    verb         the first sentence of a module, class or function has a verb; under the name of a module or
                 class, which is its subject, "Reads ..." will do
"""

import argparse
import ast
import json
import re
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_suffix(".toml")
SOURCE = "src"
RUFF_RULES = {
    "C901": "complexity",
    "PLR0913": "parameters",
    "D101": "docstring",
    "D102": "docstring",
    "D103": "docstring",
}
RULES = ("complexity", "parameters", "length", "class-name", "docstring", "opening", "verb")
AUXILIARIES = frozenset(
    re.findall(r"\w+", "is are was were be has have had does do did can could may might must will would")
)
"""Finite verbs whose third person has no form of its own in the list of verbs."""
_NOT_MAIN = frozenset(
    re.findall(
        r"\w+",
        "a an the of in on at to by for from with without as that which who whose what this its their each "
        "every all no one two than and or",
    )
)
"""Words after which a form like "reads" is a noun, or the verb of a relative clause."""
_PLURAL_SUBJECTS = frozenset(("they", "we", "you", "and"))
_MARK = "# ---- debts"


@dataclass(frozen=True, slots=True)
class Finding:
    """A place is over a limit. `name` is the qualified name in the file, or the file's own for all of it."""

    rule: str
    file: str
    name: str
    line: int
    text: str

    @property
    def key(self) -> tuple[str, str, str]:
        """Return what an entry of house.toml names it by."""
        return self.rule, self.file, self.name


@dataclass(frozen=True, slots=True)
class Docstring:
    """A docstring has an owner. `kind`: module, class, function, or field: a string after an assignment."""

    kind: str
    name: str
    line: int
    text: str


@dataclass(frozen=True, slots=True)
class House:
    """The content of house.toml, which `read` checks."""

    limits: Mapping[str, int]
    openings: frozenset[str]
    verbs: frozenset[str]
    exceptions: frozenset[tuple[str, str, str]]
    debts: frozenset[tuple[str, str, str]]

    @classmethod
    def read(cls, path: Path) -> "House":
        """Read house.toml. Raises ValueError for an exception without a reason or an unknown rule."""
        table = tomllib.loads(path.read_text())
        for one in table.get("exception", ()):
            if not one.get("reason", "").strip() or one["rule"] not in RULES:
                raise ValueError(
                    f"{path.name}: the exception {one} needs a reason, and a rule of {', '.join(RULES)}"
                )
        debts = table.get("debts", {})
        if unknown := set(debts) - set(RULES):
            raise ValueError(f"{path.name}: there is no rule {min(unknown)}; there are {', '.join(RULES)}")
        return cls(
            limits=table["limits"],
            openings=frozenset(table["words"]["openings"].split("|")),
            verbs=frozenset(table["words"]["verbs"].split()),
            exceptions=frozenset(
                (one["rule"], one["file"], one["name"]) for one in table.get("exception", ())
            ),
            debts=frozenset(
                (rule, file, name)
                for rule, files in debts.items()
                for file, names in files.items()
                for name in names
            ),
        )


def check(project: Path = PROJECT, house: House | None = None) -> list[str]:
    """Return one line for each place over a limit, and for each entry of house.toml that is not needed."""
    house = house or House.read(TABLE)
    findings = list(find(project, house))
    excused, found = house.exceptions | house.debts, {one.key for one in findings}
    lines = [f"{one.file}:{one.line}: {one.rule}: {one.text}" for one in findings if one.key not in excused]
    lines += [
        f"house.toml: {rule}: {file}: {name} keeps the limit; delete the entry, or run tools/house.py --write"
        for rule, file, name in sorted(excused - found)
    ]
    return lines


def find(project: Path, house: House) -> Iterator[Finding]:
    """Yield every place over a limit, also those that house.toml excuses."""
    yield from _measured_by_ruff(project, house.limits)
    classes = defaultdict[str, list[tuple[str, str, int]]](list)
    for path in sorted((project / SOURCE).rglob("*.py")):
        file, text = path.relative_to(project).as_posix(), path.read_text()
        tree, length = ast.parse(text), len(text.splitlines())
        if length > house.limits["length"]:
            text = f"{length} lines are more than {house.limits['length']}"
            yield Finding("length", file, Path(file).name, 1, text)
        for name, node in named(tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append((file, name, node.lineno))
        for docstring in docstrings(tree, Path(file).name):
            if problem := flaw(docstring, house):
                yield Finding(
                    problem,
                    file,
                    docstring.name,
                    docstring.line,
                    _EXPLAINED[problem] + first_sentence(docstring.text),
                )
    for name, places in classes.items():
        for file, qualified, line in places if len(places) > 1 else ():
            others = ", ".join(sorted({other for other, *_ in places} - {file})) or "the same file"
            yield Finding("class-name", file, qualified, line, f"{name} is also a class of {others}")


_EXPLAINED = {
    "opening": "the first sentence needs a subject or an imperative verb: ",
    "verb": "the first sentence needs a verb (house.toml lists those that are known): ",
}


def flaw(docstring: Docstring, house: House) -> str | None:
    """Return the rule that a docstring breaks: "opening", "verb", or None for neither."""
    sentence = first_sentence(docstring.text)
    words = re.findall(r"[A-Za-z][A-Za-z'-]*", re.sub(r"`[^`]*`", "Name", sentence))
    if not words or any(f"{sentence} ".startswith(f"{opening} ") for opening in house.openings):
        return "opening"
    words = [word.lower() for word in words]
    named = docstring.kind in ("module", "class") and words[0] in third_persons(house.verbs)
    if docstring.kind == "field" or named or has_verb(words, house.verbs):
        return None  # "Reads a file." has a subject where it stands under a name.
    return "verb"


def first_sentence(text: str) -> str:
    """Return a docstring up to its first full stop, on one line."""
    return re.split(r"(?<=[.!?])\s", " ".join(text.split()), maxsplit=1)[0]


def has_verb(words: Sequence[str], verbs: frozenset[str]) -> bool:
    """Tell whether a sentence begins with an imperative of `verbs` or has a finite verb."""
    finite = third_persons(verbs)
    before = ["", *words[:-1]]
    return (words[0] in verbs and words[1:2] != ["of"]) or any(
        (word in AUXILIARIES and previous not in ("that", "which", "who", "what"))
        or (word in finite and previous not in _NOT_MAIN)
        or (word in verbs and (previous.endswith("s") or previous in _PLURAL_SUBJECTS))
        for previous, word in zip(before, words, strict=True)
        if previous
    )


def third_person(verb: str) -> str:
    """Return the form of a verb that follows "it"."""
    if re.search(r"[^aeiou]y$", verb):
        return f"{verb[:-1]}ies"
    return verb + ("es" if re.search(r"(s|x|z|ch|sh|o)$", verb) else "s")


@cache
def third_persons(verbs: frozenset[str]) -> frozenset[str]:
    """Return those of all verbs, which every docstring is held against."""
    return frozenset(map(third_person, verbs))


def named(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yield every class and function below `tree` with its qualified name."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node
            yield from named(node, f"{prefix}{node.name}.")
        elif not isinstance(node, ast.expr):  # In which no class or function is defined.
            yield from named(node, prefix)


def docstrings(tree: ast.Module, module: str) -> Iterator[Docstring]:
    """Yield every docstring of a module. `module` is the name that its own docstring goes by."""
    for name, node in [(module, tree), *named(tree)]:
        body = getattr(node, "body", [])
        text = ast.get_docstring(node)  # type: ignore[arg-type]
        if text is not None:
            kind = {ast.Module: "module", ast.ClassDef: "class"}.get(type(node), "function")
            yield Docstring(kind, name, body[0].lineno, text)
        if isinstance(node, ast.Module | ast.ClassDef):
            inside = "" if isinstance(node, ast.Module) else f"{name}."
            for assigned, after in pairwise(body):
                if isinstance(assigned, ast.Assign | ast.AnnAssign) and _is_text(after):
                    target = assigned.targets[0] if isinstance(assigned, ast.Assign) else assigned.target
                    yield Docstring("field", inside + ast.unparse(target), after.lineno, after.value.value)


def statements(project: Path = PROJECT) -> int:
    """Return how many statements src has, docstrings not counted."""
    return sum(
        isinstance(node, ast.stmt)
        and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for path in (project / SOURCE).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
    )


def is_kernel(node: ast.AST) -> bool:
    """Tell whether a function is decorated with triton.jit: complexity and parameters except those."""
    return any(
        ast.unparse(one.func if isinstance(one, ast.Call) else one) in ("triton.jit", "jit")
        for one in getattr(node, "decorator_list", ())
    )


def _measured_by_ruff(project: Path, limits: Mapping[str, int]) -> Iterator[Finding]:
    """Yield complexity and parameters of all files, and missing docstrings of src."""
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--output-format", "json"]
    command += ["--select", ",".join(RUFF_RULES), "--exit-zero", "--target-version", "py311"]
    command += ["--config", f"lint.mccabe.max-complexity={limits['complexity']}"]
    command += ["--config", f"lint.pylint.max-args={limits['parameters']}", "."]
    result = subprocess.run(command, cwd=project, capture_output=True, text=True, check=True)
    by_file = defaultdict[str, list[Mapping[str, object]]](list)
    for problem in json.loads(result.stdout):
        file = Path(problem["filename"]).relative_to(project).as_posix()
        if RUFF_RULES[problem["code"]] != "docstring" or file.startswith(f"{SOURCE}/"):
            by_file[file].append(problem)
    for file, problems in sorted(by_file.items()):
        places = {node.lineno: (name, node) for name, node in named(ast.parse((project / file).read_text()))}
        for problem in problems:
            rule, line = RUFF_RULES[problem["code"]], problem["location"]["row"]
            name, node = places[line]
            if rule == "docstring" or not is_kernel(node):
                yield Finding(rule, file, name, line, f"{name}: {problem['message']}")


def _is_text(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


# ---- writing the debts


def write(path: Path, findings: Iterable[Finding], *, grow: bool) -> str | None:
    """Rewrite the debts. Returns why not, if something would be added."""
    house, text = House.read(path), path.read_text()
    debts = sorted({one.key for one in findings} - house.exceptions)
    after, new = Counter(rule for rule, *_ in debts), [key for key in debts if key not in house.debts]
    if new and not grow:
        listed = "\n".join(f"  {rule}: {file}: {name}" for rule, file, name in new)
        return f"these are no debts yet; mend them, or say --grow:\n{listed}"
    lines = [text.partition(_MARK)[0] + _MARK, *_DEBTS_SAY]
    for rule in RULES:
        lines += ["", f"[debts.{rule}]  # {after[rule]}"] if after[rule] else []
        files = defaultdict[str, list[str]](list)
        for key, file, name in debts:
            if key == rule:
                files[file].append(name)
        lines += [f"{json.dumps(file)} = {json.dumps(names)}" for file, names in files.items()]
    path.write_text("\n".join(lines) + "\n")
    return None


_DEBTS_SAY = (
    "# What was over a limit when the limit was set, by rule, file and name. Nothing is added here: what is",
    "# new keeps the limits, or is an exception with a reason above. `python tools/house.py --write` takes",
    "# out what is mended.",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check, or rewrite the debts. Returns the exit code."""
    parser = argparse.ArgumentParser(description="The limits of the house; see the file's head.")
    parser.add_argument("--write", action="store_true", help="rewrite the debts in house.toml")
    parser.add_argument("--grow", action="store_true", help="with --write: add debts, too")
    parser.add_argument("--count", action="store_true", help="print how many statements src has")
    given = parser.parse_args(arguments)
    if given.count:
        print(f"{statements():,} statements in {SOURCE}, docstrings not counted")
        return 0
    if given.write:
        problem = write(TABLE, find(PROJECT, House.read(TABLE)), grow=given.grow)
        print(problem or f"{TABLE.name} is written")
        return int(problem is not None)
    lines = check()
    print("\n".join(lines) if lines else "the house keeps its limits")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
