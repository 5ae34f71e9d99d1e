#!/usr/bin/env python3
"""Print every message of the program in one list: its place, what sends it, and its text.

    python tools/messages.py [FOLDER ...]      folders or files of src/penstock; all of it without one

A message is the text of an error of our own tree or of click, a warning, a log line, or a remark on stderr.
Values that are filled in at run time stand in braces. Two blanks part the columns.
"""

import argparse
import ast
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
SOURCE = "src/penstock"
ROOTS = frozenset(("PenstockError", "ClickException", "UsageError", "BadParameter", "ClickError"))
"""Errors that every error with a message for users derives from."""
LOGS = frozenset(("debug", "info", "warning", "error", "exception", "critical"))
LOGGERS = frozenset(("log", "logger", "_log", "_logger", "logging", "LOG", "_LOG"))
REMARKS = frozenset(("say", "tell", "warn"))


@dataclass(frozen=True, slots=True)
class Message:
    """A text has a place and a sender: the class of an error, or the call that prints it."""

    file: str
    line: int
    sender: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}  {self.sender}  {' '.join(self.text.split())}"


def messages(project: Path = PROJECT) -> Iterator[Message]:
    """Yield every message of the program, by file and line."""
    yield from messages_of(nodes_of(project))


def nodes_of(project: Path = PROJECT) -> dict[str, list[ast.AST]]:
    """Return all nodes of each file of the program."""
    return {
        path.relative_to(project / SOURCE).as_posix(): list(ast.walk(ast.parse(path.read_text())))
        for path in sorted((project / SOURCE).rglob("*.py"))
    }


def messages_of(files: Mapping[str, Sequence[ast.AST]]) -> Iterator[Message]:
    """Yield every message in the nodes of some files."""
    errors = error_classes(files)
    for file, nodes in files.items():
        calls = [node for node in nodes if isinstance(node, ast.Call)]
        for call in sorted(calls, key=lambda call: (call.lineno, call.col_offset)):
            if (sent := sender(call, errors)) and (text := text_of(call)):
                yield Message(file, call.lineno, sent, text)


def error_classes(files: Mapping[str, Sequence[ast.AST]]) -> frozenset[str]:
    """Return the names of all classes that derive from ROOTS, themselves included."""
    bases = {
        node.name: {_last(base) for base in node.bases}
        for nodes in files.values()
        for node in nodes
        if isinstance(node, ast.ClassDef)
    }
    found = set(ROOTS)
    while more := {name for name, some in bases.items() if some & found} - found:
        found |= more
    return frozenset(found)


def sender(call: ast.Call, errors: frozenset[str]) -> str | None:
    """Return what sends the message of a call, or None if it has none."""
    name, of = _last(call.func), ast.unparse(call.func).rpartition(".")[0]
    if name in errors or (name in REMARKS and of in ("", "self", "self._say", "warnings")):
        return name
    return f"{of}.{name}" if name in LOGS and of.rpartition(".")[2] in LOGGERS else None


def text_of(call: ast.Call) -> str:
    """Return the first text among a call's arguments, or "" if there is none."""
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    return next((text for argument in arguments if (text := shown(argument)).strip("{}")), "")


def shown(node: ast.expr) -> str:
    """Return an expression as a text: what is filled in at run time in braces."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(shown(part) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        inner = shown(node.value) if isinstance(node.value, ast.IfExp) else ast.unparse(node.value)
        return f"{{{inner}}}"
    if isinstance(node, ast.IfExp):
        return f"{shown(node.body)}|{shown(node.orelse)}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mod):
        return shown(node.left) + (shown(node.right) if isinstance(node.op, ast.Add) else "")
    return f"{{{ast.unparse(node)}}}"


def _last(node: ast.expr) -> str:
    return ast.unparse(node).rpartition(".")[2]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the list. Returns the exit code."""
    parser = argparse.ArgumentParser(description="Every message of the program; see the file's head.")
    parser.add_argument("folders", nargs="*", help="of src/penstock; all of it without one")
    folders = tuple(parser.parse_args(arguments).folders) or ("",)
    for message in messages():
        if message.file.startswith(folders):
            print(message)
    return 0


if __name__ == "__main__":
    sys.exit(main())
