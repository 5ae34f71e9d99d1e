"""tools/house.py: what is over a limit is found, what is listed is excused, and a list only shrinks."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import house  # noqa: E402
from house import House  # noqa: E402

TABLE = """
[limits]
complexity = 3
parameters = 2
length = 12

[words]
openings = "Of|What|To be"
verbs = "return read hold copy"
{more}
# ---- debts
"""


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return tmp_path / "house.toml"


def built(tmp_path: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def lines(project: Path, table: Path, more: str = "") -> list[str]:
    table.write_text(TABLE.format(more=more))
    return house.check(project, House.read(table))


BRANCHES = "\n".join(f"    if x == {number}:\n        return {number}" for number in range(4))


class TestFinds:
    @pytest.mark.parametrize(
        ("text", "rule", "name"),
        [
            (f"def _f(x):\n{BRANCHES}\n", "complexity", "`_f`"),
            ("def _f(a, b, c):\n    return a\n", "parameters", "_f"),
            ("class _A:\n    def _f(self, a, b, c):\n        return a\n", "parameters", "_A._f"),
            ("x = 1\n" * 13, "length", "13 lines"),
            ("def f():\n    return 1\n", "docstring", "f"),
            ("class A:\n    pass\n", "docstring", "A"),
            ('"""Of blocks, those that hold."""\n', "opening", "Of blocks"),
            ('def _f():\n    """What it reads.\n\n    It reads."""\n', "opening", "What it reads."),
            (
                'class _A:\n    """Read it."""\n\n    x: int\n    """To be read."""\n',
                "opening",
                "To be read.",
            ),
            ('def _f():\n    """A block of tokens."""\n', "verb", "A block of tokens."),
            ('def _f():\n    """Reads a file."""\n', "verb", "Reads a file."),
        ],
    )
    def test_what_is_over_a_limit(self, tmp_path: Path, table: Path, text: str, rule: str, name: str) -> None:
        (line,) = lines(built(tmp_path, {"src/one.py": text}), table)
        assert line.startswith("src/one.py:")
        assert f": {rule}: " in line
        assert name in line

    def test_class_names_of_two_files(self, tmp_path: Path, table: Path) -> None:
        files = {f"src/{name}.py": "class _Report:\n    pass\n" for name in ("one", "two")}
        found = lines(built(tmp_path, files), table)
        assert [line.split(":")[0] for line in found] == ["src/one.py", "src/two.py"]
        assert "src/two.py" in found[0]

    def test_class_names_of_one_file(self, tmp_path: Path, table: Path) -> None:
        text = "class _A:\n    pass\nclass _B:\n    class _A:\n        pass\n"
        found = lines(built(tmp_path, {"src/one.py": text}), table)
        assert len(found) == 2
        assert all("class-name: _A is also a class of the same file" in line for line in found)

    def test_counts_statements(self, tmp_path: Path) -> None:
        project = built(tmp_path, {"src/one.py": '"""Hold three."""\nx = 1\ny = 2\nz = 3\n'})
        assert house.statements(project) == 3

    @pytest.mark.parametrize(
        "text",
        [
            "@triton.jit\ndef _f(a, b, c):\n    return a\n",
            "@triton.jit(do_not_specialize=['x'])\ndef _f(a, b, c):\n    return a\n",
            'class A:\n    """Hold."""\n\n    def f(self, a, b):\n        """Return it."""\n',
            'def _f():\n    """`x` holds: A block that is read is What Of."""\n',
            'def _f():\n    """Blocks hold it. Of blocks."""\n',
            'class _A:\n    """Reads a file."""\n',
        ],
    )
    def test_nothing_where_limits_are_kept(self, tmp_path: Path, table: Path, text: str) -> None:
        assert lines(built(tmp_path, {"src/one.py": text}), table) == []

    def test_length_names_and_docstrings_of_src_alone(self, tmp_path: Path, table: Path) -> None:
        text = '"""Of."""\n\nclass A:\n    pass\n' + "x = 1\n" * 12
        assert lines(built(tmp_path, {"tests/one.py": text, "tools/two.py": text}), table) == []

    def test_parameters_of_tests_too(self, tmp_path: Path, table: Path) -> None:
        (line,) = lines(built(tmp_path, {"tests/one.py": "def f(a, b, c):\n    return a\n"}), table)
        assert line.startswith("tests/one.py:1: parameters: ")


class TestLists:
    WIDE = "def _f(a, b, c):\n    return a\n"
    EXCEPTION = '[[exception]]\nrule = "parameters"\nfile = "src/one.py"\nname = "_f"\nreason = "{reason}"\n'

    @pytest.mark.parametrize(
        "more", [EXCEPTION.format(reason="a test"), '[debts.parameters]\n"src/one.py" = ["_f"]\n']
    )
    def test_excuse_what_they_name_and_only_while_it_is_needed(
        self, tmp_path: Path, table: Path, more: str
    ) -> None:
        project = built(tmp_path, {"src/one.py": self.WIDE})
        assert lines(project, table, more) == []
        (project / "src/one.py").write_text("def _f(a):\n    return a\n")
        (line,) = lines(project, table, more)
        assert "src/one.py: _f keeps the limit" in line

    def test_an_exception_needs_a_reason(self, table: Path) -> None:
        table.write_text(TABLE.format(more=self.EXCEPTION.format(reason=" ")))
        with pytest.raises(ValueError, match="needs a reason"):
            House.read(table)

    @pytest.mark.parametrize(
        "more", ['[debts.width]\n"src/one.py" = ["_f"]\n', EXCEPTION.replace("parameters", "width")]
    )
    def test_a_rule_that_is_not_there(self, table: Path, more: str) -> None:
        table.write_text(TABLE.format(more=more.format(reason="a test")))
        with pytest.raises(ValueError, match="complexity, parameters"):
            House.read(table)

    def test_debts_shrink_and_grow_only_where_that_is_said(self, tmp_path: Path, table: Path) -> None:
        project = built(tmp_path, {"src/one.py": self.WIDE})
        table.write_text(TABLE.format(more=""))
        before, findings = table.read_text(), list(house.find(project, House.read(table)))
        refusal = house.write(table, findings, grow=False)
        assert refusal is not None
        assert "parameters: src/one.py: _f" in refusal
        assert table.read_text() == before
        assert house.write(table, findings, grow=True) is None
        assert House.read(table).debts == {("parameters", "src/one.py", "_f")}
        assert house.check(project, House.read(table)) == []
        assert house.write(table, [], grow=False) is None
        assert House.read(table).debts == frozenset()

    def test_the_projects_own_can_be_read(self) -> None:
        assert House.read(house.TABLE).limits["complexity"] == 15


@pytest.mark.parametrize(
    ("sentence", "good"),
    [
        ("Return it.", True),
        ("A block holds tokens.", True),
        ("The copies of a step hold.", False),
        ("Blocks hold tokens.", True),
        ("Tokens that are held.", False),
        ("A policy copies.", True),
        ("Copy of a block.", False),
        ("The block is read.", True),
        ("Its reads.", False),
    ],
)
def test_verbs(sentence: str, good: bool) -> None:
    words = sentence.lower().rstrip(".").split()
    assert house.has_verb(words, frozenset({"return", "read", "hold", "copy"})) is good
