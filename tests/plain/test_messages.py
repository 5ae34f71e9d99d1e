"""tools/messages.py: every message is found, and what is filled in at run time stands in braces."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import messages  # noqa: E402


def listed(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "src/penstock/one.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return [str(message) for message in messages.messages(tmp_path)]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("raise PenstockError('no; do')", ["one.py:1  PenstockError  no; do"]),
        ("raise errors.PenstockError(f'{x:,} of ' 'y')", ["one.py:1  PenstockError  {x} of y"]),
        ("class A(PenstockError): ...\nclass B(A): ...\nraise B('b')", ["one.py:3  B  b"]),
        ("raise click.BadParameter('bad', ctx)", ["one.py:1  BadParameter  bad"]),
        ("raise PenstockError('a' if x else 'b')", ["one.py:1  PenstockError  a|b"]),
        ("raise PenstockError(f\"{'a' if x else y}\")", ["one.py:1  PenstockError  {a|{y}}"]),
        ("raise PenstockError('a' + why)", ["one.py:1  PenstockError  a{why}"]),
        ("raise PenstockError(code, 'text')", ["one.py:1  PenstockError  {code}"]),
        ("say(f'memory {size}')", ["one.py:1  say  memory {size}"]),
        ("_LOG.warning('%s is late', name)", ["one.py:1  _LOG.warning  %s is late"]),
        ("say('two\\nlines')", ["one.py:1  say  two lines"]),
        ("b()\nif x:\n    say('later')\nsay('last')", ["one.py:3  say  later", "one.py:4  say  last"]),
        ("raise ValueError('ours')", []),
        ("math.log('x')", []),
        ("raise PenstockError", []),
    ],
)
def test_what_is_listed(tmp_path: Path, text: str, found: list[str]) -> None:
    assert listed(tmp_path, text) == found


def test_nothing_of_the_program_is_missing() -> None:
    """Every `raise` of an error of ours with an argument is in the list."""
    files = messages.nodes_of()
    assert len(files) == len(list((ROOT / "src/penstock").rglob("*.py")))
    errors = messages.error_classes(files)
    assert {"ConfigError", "StoreError", "FieldError", "UsageError"} <= errors
    raised = sum(
        isinstance(node, ast.Raise)
        and isinstance(node.exc, ast.Call)
        and ast.unparse(node.exc.func).rpartition(".")[2] in errors
        and bool(node.exc.args)
        for nodes in files.values()
        for node in nodes
    )
    sent = [message for message in messages.messages_of(files) if message.sender in errors]
    assert len(sent) >= raised > 400
