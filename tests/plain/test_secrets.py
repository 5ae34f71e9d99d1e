"""What is secret is compared in a time that tells nothing of it. From outside that cannot be seen, so the
sources are looked at."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SERVER = Path(__file__).resolve().parents[2] / "src" / "penstock" / "server"
COMPARE = "hmac.compare_digest"


def is_keys(node: ast.AST) -> bool:
    """Whether it is the keys of a server's settings."""
    return (
        isinstance(node, ast.Attribute)
        and node.attr == "keys"
        and ast.unparse(node.value).endswith("settings")
    )


def faults(source: str) -> Iterator[str]:
    """What is done with the keys, or with one of them, but to count them, to have their secrets compared, and
    to see what they may."""
    tree = ast.parse(source)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    each = {
        loop.target.id
        for loop in ast.walk(tree)
        if is_loop_over_keys(loop) and isinstance(loop.target, ast.Name)
    }
    for node in ast.walk(tree):
        about = parents.get(node)
        if is_keys(node):
            asked = isinstance(about, ast.UnaryOp) and isinstance(about.op, ast.Not)
            counted = (
                isinstance(about, ast.Call)
                and node in about.args
                and ast.unparse(about.func) in ("bool", "len")
            )
            of_one = isinstance(about, ast.Subscript) and is_harmless(parents[about])
            right = asked or counted or of_one or is_loop_over_keys(about)
        elif isinstance(node, ast.Name) and node.id in each and isinstance(node.ctx, ast.Load):
            right = is_harmless(about) or (isinstance(about, ast.Attribute) and about.attr == "secret")
        elif isinstance(node, ast.Attribute) and node.attr == "secret":
            right = isinstance(about, ast.Call) and node in about.args and ast.unparse(about.func) == COMPARE
        else:
            continue
        if not right:
            yield f"line {node.lineno}: {ast.unparse(about or node)}"


def is_harmless(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "priority"


def is_loop_over_keys(node: ast.AST | None) -> bool:
    return isinstance(node, ast.comprehension | ast.For) and is_keys(node.iter)


def test_keys_are_only_compared_in_constant_time() -> None:
    sources = [path.read_text() for path in sorted(SERVER.rglob("*.py"))]
    assert sum(source.count(COMPARE) for source in sources) == 1
    assert [fault for source in sources for fault in faults(source)] == []


@pytest.mark.parametrize(
    "line",
    [
        "[sent == key.secret for key in settings.keys]",
        "[sent == key for key in settings.keys]",
        "[key.secret.startswith(sent) for key in house.settings.keys]",
        "any(key.secret == sent for key in settings.keys)",
        "sent in settings.keys",
        "settings.keys[0] == sent",
        "settings.keys[0].secret == sent",
        "[hmac.compare_digest(sent, key.secret[:8]) for key in settings.keys]",
        "found = {key: 1 for key in settings.keys}",
        "found = {key.secret: 1 for key in settings.keys}",
        "first = settings.keys[0]",
    ],
)
def test_what_else_is_done_with_them_is_seen(line: str) -> None:
    assert list(faults(line))
    allowed = "right = [hmac.compare_digest(sent, key.secret) for key in settings.keys]"
    assert not list(
        faults(
            f"{allowed}\nif not settings.keys: "
            "bool(settings.keys)\nlen(settings.keys)\nsettings.keys[0].priority"
        )
    )
