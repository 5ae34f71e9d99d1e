"""What is secret is compared in a time that tells nothing of it. From outside that cannot be seen, so the sources are looked at."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SERVER = Path(__file__).resolve().parents[2] / "src" / "penstock" / "server"
COMPARE = "hmac.compare_digest"


def is_keys(node: ast.AST) -> bool:
    """Whether it is the keys of a server's settings."""
    return isinstance(node, ast.Attribute) and node.attr == "keys" and ast.unparse(node.value).endswith("settings")


def faults(source: str) -> Iterator[str]:
    """What is done with the keys, or with one of them, but to count them and to have them compared."""
    tree = ast.parse(source)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    each = {loop.target.id for loop in ast.walk(tree) if is_loop_over_keys(loop) and isinstance(loop.target, ast.Name)}
    for node in ast.walk(tree):
        if not is_keys(node) and not (isinstance(node, ast.Name) and node.id in each and isinstance(node.ctx, ast.Load)):
            continue
        about = parents[node]
        asked = isinstance(about, ast.UnaryOp) and isinstance(about.op, ast.Not)
        called = isinstance(about, ast.Call) and node in about.args and ast.unparse(about.func) in (COMPARE, "bool")
        if not (asked or called or is_loop_over_keys(about)):
            yield f"line {node.lineno}: {ast.unparse(about)}"


def is_loop_over_keys(node: ast.AST) -> bool:
    return isinstance(node, ast.comprehension | ast.For) and is_keys(node.iter)


def test_keys_are_only_compared_in_constant_time() -> None:
    sources = [path.read_text() for path in sorted(SERVER.rglob("*.py"))]
    assert sum(source.count(COMPARE) for source in sources) == 1
    assert [fault for source in sources for fault in faults(source)] == []


@pytest.mark.parametrize(
    "line",
    [
        "[sent == key for key in settings.keys]",
        "[key.startswith(sent) for key in house.settings.keys]",
        "any(key == sent for key in settings.keys)",
        "sent in settings.keys",
        "settings.keys[0] == sent",
        "[hmac.compare_digest(sent, key[:8]) for key in settings.keys]",
        "found = {key: 1 for key in settings.keys}",
    ],
)
def test_what_else_is_done_with_them_is_seen(line: str) -> None:
    assert list(faults(line))
    assert not list(faults("right = [hmac.compare_digest(sent, key) for key in settings.keys]\nif not settings.keys: bool(settings.keys)"))
