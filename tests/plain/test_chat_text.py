"""A chat's text: how it is wrapped and drawn while it comes, what is kept of what was typed, and files of
conversations. None of it needs a model."""

import fcntl
import json
import multiprocessing
import os
import random
import re
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.base.config import state_directory
from penstock.base.errors import RequestError
from penstock.cli import history as history_file
from penstock.cli import markdown
from penstock.cli.editor import goes_on, unquoted
from penstock.cli.history import ChatHistory
from penstock.cli.markdown import MarkdownStream
from penstock.cli.terminal import PLAIN, Look, Piece, styled
from penstock.cli.thinking import Think, thinking_variables
from penstock.cli.transcript import load, save
from penstock.cli.wrapping import Wrapper, cells

SOURCE = Path(__file__).resolve().parents[2] / "src"
WIDTH = 40
SAMPLE = r"""# A title with *stress*

Some *text* with `code` and **bold words**, a lone * star, 2 * 3 * 4, snake_case and [a link](https://x.y/z).
\(x_1 * y_2\) and \*not stressed\*. **This is never closed, and the row is far longer than the terminal.
- an item that is long enough to be wrapped under itself
  1. a nested **item** with a note [1]
> a quotation that is long enough for a second row, with its bar

```python
def power(x):  # **no** Markdown, and this row is longer than the terminal has columns
    return x ** 2
```
| name | what it is |
|---|:-:|
| `x` | **one** thing |
| y \| z | another |
Behind the table.
---
这是一个没有空格的很长的句子它应该在终端的边缘被正确地换行。而不会丢失任何字符。
~~gone~~ https://example.org/a/very/long/address/that/no/row/of/the/terminal/has/room/for
"""


def drawn(text: str, seed: int = 0, width: int = WIDTH) -> list[Piece]:
    """The pieces of a text that comes in pieces; in one for seed 0."""
    stream, chance, at = MarkdownStream(lambda: width), random.Random(seed), 0
    pieces: list[Piece] = []
    while at < len(text):
        size = chance.randint(1, 7) if seed else len(text)
        pieces += stream.push(text[at : at + size])
        at += size
    return pieces + stream.finish()


def letters(pieces: list[Piece]) -> list[tuple[str, Look]]:
    return [(letter, look) for text, look in pieces for letter in text]


def plain(pieces: list[Piece]) -> str:
    return "".join(text for text, _ in pieces)


# -- wrapping
# ---------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.text(st.sampled_from("ab  \n\t漢字é👍,"), max_size=200), st.integers(12, 50), st.integers(1, 9))
def test_wrapped_text_has_all_its_letters_and_fits(text: str, width: int, size: int) -> None:
    wrapper = Wrapper(lambda: width)
    pieces = [one for at in range(0, len(text), size) for one in wrapper.add(text[at : at + size])]
    whole = plain(pieces + wrapper.flush())
    assert re.sub(r"\s", "", whole) == re.sub(r"\s", "", text)
    assert all(cells(row) < width or not row.strip() for row in whole.split("\n"))


def test_rows_end_at_words_and_lines_stay_lines() -> None:
    wrapper = Wrapper(lambda: 20)
    text = "one two three four five\n  six seven eight nine\n\nten"
    assert plain(wrapper.add(text) + wrapper.flush()) == (
        "one two three four\nfive\n  six seven eight\nnine\n\nten"
    )
    assert plain(wrapper.add(" ends") + wrapper.flush()) == " ends"


def test_a_word_is_written_once_it_is_whole() -> None:
    wrapper = Wrapper(lambda: 20)
    assert plain(wrapper.add("one tw")) == "one"
    assert plain(wrapper.add("o ")) == " two"
    assert plain(wrapper.add("x" * 19)) == "\n" + "x" * 19  # A row is full: it is not held any longer.


# -- Markdown
# ---------------------------------------------------------------------------------------------------


def test_markdown_is_drawn_alike_however_it_was_cut() -> None:
    whole = letters(drawn(SAMPLE))
    for seed in range(1, 25):
        assert letters(drawn(SAMPLE, seed)) == whole


def test_markdown_looks_as_it_says() -> None:
    pieces = drawn(SAMPLE)
    text = plain(pieces)
    looks = {word: {look for part, look in pieces if word in part.split()} for word in text.split()}
    assert looks["title"] == {Look(bold=True, underline=True)}
    assert looks["stress"] == {Look(bold=True, underline=True, italic=True)}
    assert looks["code"] == {Look(colour="cyan")}
    assert looks["bold"] == looks["name"] == {Look(bold=True)}
    assert looks["gone"] == {Look(strikethrough=True)}
    assert looks["power(x):"] == looks["Markdown,"] == {Look(colour="cyan")}
    assert "a\nlone * star, 2 * 3 * 4, snake_case and\na link (https://x.y/z)." in text
    assert "\\(x_1 * y_2\\) and *not stressed*.\n**This is never closed, and the row is\n" in text
    assert (
        "• an item that is long enough to be\n  wrapped under itself\n  1. a nested item with a note [1]"
        in text
    )
    assert "│ a quotation that is long enough for a\n│ second row, with its bar" in text
    assert "def power(x):  # **no** Markdown, and this row is longer than the terminal has columns\n" in text
    assert re.search(r"name +what it is *\n─+\nx +one thing *\ny \| z +another *\nBehind", text)
    assert all(cells(row) < WIDTH for row in text.split("\n") if "Markdown" not in row)


def test_a_line_is_drawn_while_it_comes() -> None:
    stream = MarkdownStream(lambda: 80)
    assert plain(stream.push("Once upon a ti")) == "Once upon a"
    assert plain(stream.push("me **there is** no")) == " time there is"
    assert plain(stream.push(" **end" + " of it" * 40)).startswith(" no **end of it of it")


@settings(max_examples=150)
@given(st.text(st.sampled_from("ab1 *_`~[]()|#->\\\n!.漢\x1b\r"), max_size=120), st.integers(0, 3))
def test_no_letter_is_lost_whatever_comes(text: str, seed: int) -> None:
    shown = plain(drawn(text, seed))
    for letter in "ab漢\x1b":
        assert shown.count(letter) == text.count(letter)
    assert "\x1b" not in re.sub(r"\x1b\[[\d;]*m", "", styled(drawn(text, seed)))


@pytest.mark.parametrize("word", ["*a ", "[1, ", "_x y "])
def test_marks_that_close_nothing_are_looked_at_once(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes a parse or two, not one for each word that is held: a long line would take minutes."""
    parses, inline = list[str](), markdown._inline

    def noted(text: str) -> object:
        parses.append(text)
        return inline(text)

    monkeypatch.setattr(markdown, "_inline", noted)
    stream = MarkdownStream(lambda: WIDTH)
    pieces = [piece for _ in range(100) for piece in stream.push(word)] + stream.finish()
    assert "".join(plain(pieces).split()) == "".join((word * 100).split())
    assert len(parses) < 3 * 100


@pytest.mark.parametrize(
    ("cell", "count", "fits"), [("a", 20, True), ("a", 27, False), ("a", 100, False), ("漢字", 26, False)]
)
def test_a_table_of_too_many_columns_is_as_it_was_written(cell: str, count: int, fits: bool) -> None:
    row = "|" + f"{cell}|" * count + "\n"
    text = "".join(letter for letter, _ in drawn(f"{row}|{'-|' * count}\n{row}\n", width=80))
    assert text.count(cell) == 2 * count
    assert ("|" not in text) == fits


def test_no_escape_of_a_model_reaches_the_terminal() -> None:
    text = (
        "\x1b]0;mine\x07 \x1b[2J **\x1b[31mred** `\x9b5n` \x1bc\n| \x1b[A |\n|---|\n| \x08 |\n"
        "```\n\x1b[1;1H\n```\n"
    )
    for seed in range(4):
        shown = styled(drawn(text, seed))
        assert not re.search("[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f]", shown)
        assert "\x1b" not in re.sub(r"\x1b\[(0|1|2|36)m", "", shown)
        assert shown.count("␛") == text.count("\x1b")
    assert styled([("", Look(bold=True)), ("a", PLAIN)]) == "a"


# -- what was typed
# ---------------------------------------------------------------------------------------------


def test_quotes_hold_a_message_of_several_lines() -> None:
    assert [goes_on(text) for text in ('"""', '"""a\nb', '"""a"""', 'a"""', '/system """x')] == [
        True,
        True,
        False,
        False,
        True,
    ]
    assert unquoted('"""\na\nb\n"""') == "a\nb"
    assert unquoted('"""/a"""') == "//a"  # It is no command.
    assert unquoted('/set system """x\ny"""') == "/set system x\ny"
    assert unquoted('say """a"""') == 'say """a"""'


def test_history_is_kept_for_oneself_alone(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "history"
    kept = ChatHistory(file)
    assert kept.read() == []
    for entry in ("one", "two\nlines", "ü\u2028"):
        kept.append(entry)
    kept.append("x" * 100_000)  # A pasted file.
    assert ChatHistory(file).read() == ["one", "two\nlines", "ü\u2028"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    file.chmod(0o644)
    file.write_bytes(file.read_bytes() + b'"torn')
    kept.append("after")
    assert kept.read() == ["one", "two\nlines", "ü\u2028", "after"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    ChatHistory(tmp_path).append("to a directory")  # No error, and no history.
    assert ChatHistory(tmp_path).read() == []


def _type(file: Path, name: str, count: int) -> None:
    history_file.MOST_BYTES = 2000  # So it is replaced again and again.
    for number in range(count):
        ChatHistory(file).append(f"{name}{number}")


def test_chats_at_once_lose_nothing_of_each_other(tmp_path: Path) -> None:
    """Each replaces the file all the time: an entry that went into one that has no name any more is lost."""
    file = tmp_path / "history"
    fork = multiprocessing.get_context("fork")
    for _ in range(3):
        chats = [fork.Process(target=_type, args=(file, name, 300)) for name in "abcd"]
        for chat in chats:
            chat.start()
        for chat in chats:
            chat.join()
        found = ChatHistory(file).read()
        for name in "abcd":  # Of each, what is there is what came last, without a gap.
            numbers = [int(entry[1:]) for entry in found if entry[0] == name]
            assert numbers == list(range(numbers[0], 300)) if numbers else True
        assert found[-1][1:] == "299"
        assert len(file.read_bytes()) < 4000
    assert [path.name for path in tmp_path.iterdir()] == ["history"]


def test_an_entry_that_waited_goes_into_the_file_that_has_the_name(tmp_path: Path) -> None:
    """Another chat cuts the history while this one waits for its lock."""
    file, other = tmp_path / "history", tmp_path / "new"
    ChatHistory(file).append("old")
    chat = multiprocessing.get_context("fork").Process(target=_type, args=(file, "a", 1))
    with file.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        chat.start()
        while not re.search(rf"-> FLOCK .* {chat.pid} ", Path("/proc/locks").read_text()):
            assert chat.is_alive()
            time.sleep(0.005)
        other.write_text('"kept"\n')
        other.replace(file)
        fcntl.flock(held, fcntl.LOCK_UN)
    chat.join()
    assert ChatHistory(file).read() == ["kept", "a0"]


def test_where_history_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/somewhere")
    assert state_directory() == Path("/somewhere/penstock")
    for other in ("relative", ""):
        monkeypatch.setenv("XDG_STATE_HOME", other)
        assert state_directory() == Path("~/.local/state/penstock").expanduser()


def test_a_pipe_needs_no_editor() -> None:
    code = (
        "import sys; import penstock.cli.commands.chat; "
        "sys.exit(' '.join({'prompt_toolkit', 'markdown_it', 'asyncio'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


# -- files of conversations
# ----------------------------------------------------------------------------------------


def test_a_conversation_comes_back_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "a\nü"},
        {"role": "assistant", "content": "b"},
    ]
    assert save(file, "some model", messages, lambda: False)
    assert json.loads(file.read_text(encoding="utf-8")) == {"model": "some model", "messages": messages}
    assert load(file) == ("Be kind.", [("a\nü", "b")])
    before = file.read_bytes()
    assert not save(file, "other", [], lambda: False)
    assert file.read_bytes() == before
    assert save(file, "other", messages[1:], lambda: True)
    assert load(file) == (None, [("a\nü", "b")])
    with pytest.raises(RequestError, match="cannot be written: No such file"):
        save(tmp_path / "no" / "where", "m", [], lambda: True)
    for name in ("talk.json/x", "n" * 300, "nul\0", "/"):
        with pytest.raises(RequestError, match="name a"):
            save(tmp_path / name, "m", [], lambda: True)
    assert [path.name for path in tmp_path.iterdir()] == ["talk.json"]


def test_parts_and_a_bare_list_are_read_too(tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    file.write_text(
        json.dumps([{"role": "user", "content": parts}, {"role": "assistant", "content": "c", "name": "x"}])
    )
    assert load(file) == (None, [("ab", "c")])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON: "),
        ("[" * 100_000, "is not JSON: "),
        ("3", "has no list of messages"),
        ('[{"role": "user"}]', r"has messages\[0\] without a role and a text"),
        ('[{"role": "assistant", "content": "a"}]', "role 'assistant' where one of the user should be"),
        ('[{"role": "user", "content": "a"}]', "ends with a message of the user that has no answer"),
        ('[{"role": "user", "content": [{"type": "image_url"}]}]', r"has messages\[0\] without"),
    ],
)
def test_a_file_that_is_no_conversation_is_refused(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    file.write_text(text)
    with pytest.raises(RequestError, match=message):
        load(file)
    with pytest.raises(RequestError, match="is not there"):
        load(tmp_path / "none")
    with pytest.raises(RequestError, match="is no file"):
        load(tmp_path)


# -- thinking
# ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("think", "reads", "marked", "variables", "said"),
    [
        (None, {"enable_thinking"}, True, {}, ""),
        (Think.HIDE, {"enable_thinking"}, True, {}, ""),
        (Think.ON, {"enable_thinking"}, True, {"enable_thinking": True}, ""),
        (Think.OFF, {"enable_thinking", "reasoning_effort"}, True, {"enable_thinking": False}, ""),
        (Think.OFF, {"thinking"}, False, {"thinking": False}, ""),
        (Think.OFF, {"reasoning_effort"}, True, {"reasoning_effort": "low"}, "always thinks"),
        (Think.ON, {"reasoning_effort"}, True, {}, ""),
        (Think.OFF, {"messages"}, True, {}, "has no switch for thinking"),
        (Think.ON, {"messages"}, True, {}, ""),
        (Think.OFF, {"messages"}, False, {}, "knows no thinking, so --think off changes nothing"),
        (Think.ON, {"messages"}, False, {}, "knows no thinking, so --think on changes nothing"),
    ],
)
def test_thinking_goes_by_the_switch_of_the_template(
    think: Think | None, reads: set[str], marked: bool, variables: dict[str, object], said: str
) -> None:
    found, words = thinking_variables(think, reads, marked=marked)
    assert found == variables
    assert (said in words) if said else not words
