"""A chat: what its commands do, how reasoning is kept apart, and what a person sees at a terminal."""

import asyncio
import json
import os
import stat
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest

import forks
from penstock.api.async_llm import AsyncLLM
from penstock.api.llm import LLM
from penstock.api.outputs import Completion
from penstock.base.errors import RequestError
from penstock.cli.main import main
from penstock.cli.terminal import Interrupt
from penstock.step.params import SamplingParams
from speakers import THINK, checkpoint
from terminals import READY, Terminal

SOURCE = Path(__file__).resolve().parents[2] / "src"
CALL = "import sys; from penstock.cli.main import main; sys.exit(main())"
ANSWER = "# Title\n\nSome **bold** words.\n\x1b[31mred\x1b]0;mine\x07\n"
PASTE, END_PASTE = "\x1b[200~", "\x1b[201~"
Chat = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("chat") / "speaker")


@pytest.fixture
def says(tmp_path: Path) -> Callable[..., Path]:
    """A file with the grammar of exactly this: texts, and tokens that are none."""

    def grammar(*pieces: str | int) -> Path:
        said = " ".join(f"<[{piece}]>" if isinstance(piece, int) else json.dumps(piece) for piece in pieces)
        file = tmp_path / "says.lark"
        file.write_text(f"start: {said}")
        return file

    return grammar


@pytest.fixture
def chat(speaker: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Chat:
    """A chat in this process, with lines from a pipe."""

    def talk(stdin: str, *arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(stdin.encode()), encoding="utf-8"))
        capsys.readouterr()
        code = main(["chat", str(speaker), "--quiet", *map(str, arguments)])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return talk


def test_reasoning_is_no_part_of_what_goes_into_a_pipe(chat: Chat, says: Callable[..., Path]) -> None:
    grammar = says(THINK, "\nhm, hm\n</think>\n\n", ANSWER)
    assert chat("hi\n", "--grammar", grammar) == (0, ANSWER, "")
    for more in ((), ("--think", "on"), ("--think", "hide")):
        code, out, err = chat("hi\nho\n", "--grammar", grammar, "--json", *more)
        records = [json.loads(line) for line in out.splitlines()]
        assert [(one["reasoning"], one["text"]) for one in records] == [("hm, hm", ANSWER)] * 2
        assert (code, err) == (0, "")


def test_a_wish_to_think_goes_by_the_template(chat: Chat, says: Callable[..., Path]) -> None:
    code, out, err = chat("hi\n", "--think", "off", "--max-tokens", "1")
    assert code == 0
    assert err.startswith("penstock: note: this model always thinks; it is asked to think little")
    thinking = says("hm</think>yes")  # The prompt has begun it.
    wish = '{"reasoning_effort": "high", "tone": 1}'
    code, out, err = chat("hi\n/think\n", "--chat-template-kwargs", wish, "--grammar", thinking)
    assert (code, out) == (0, "yes\n")
    assert "note: the model's chat template does not read tone, so it changes nothing" in err
    none = chat("hi\n", "--chat-template-kwargs", '{"reasoning_effort": "none"}', "--grammar", thinking)
    assert none[1] == "hm</think>yes\n"  # It ended in the prompt, so this is the answer.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--chat-template-kwargs", "{"], "'{' is not JSON"),
        (["--chat-template-kwargs", "[]"], "'[]' is no object"),
        (["--chat-template-kwargs", '{"tools": []}'], "has 'tools', which comes from elsewhere"),
        (["--raw", "--think", "on"], "--think needs the chat template, which --raw leaves out"),
        (["--raw", "--chat-template-kwargs", '{"a": 1}'], "--chat-template-kwargs needs the chat template"),
    ],
)
def test_wishes_that_cannot_be_are_refused(chat: Chat, arguments: list[str], message: str) -> None:
    code, out, err = chat("hi\n", *arguments)
    assert (code, out) == (2, "")
    assert message in err


def test_commands_change_the_conversation(chat: Chat, tmp_path: Path) -> None:
    kept, notes = tmp_path / "talk.json", tmp_path / "notes.txt"
    notes.write_text("The door is ```blue```.\n")
    lines = f"""\
/set seed 5
one
/retry
/retry
two
/undo
/save {kept}
/clear
/load {kept}
/file {notes}
/retry
three
/bye
never
"""
    code, out, err = chat(lines, "--json", "--max-tokens", "20", "--temperature", "1")
    records = [json.loads(line) for line in out.splitlines()]
    prompts, texts = ([one[key] for one in records] for key in ("prompt", "text"))
    assert code == 0
    assert prompts[:4] == ["one", "one", "one", "two"]
    assert len(set(texts[:3])) == 3  # Each with a seed of its own
    assert prompts[4] == "one"  # The file goes with what follows.
    same = chat("/set seed 7\none\n", "--json", "--max-tokens", "20", "--temperature", "1")
    assert json.loads(same[1])["text"] == texts[2]  # that follows from the first.
    said = json.loads(kept.read_text(encoding="utf-8"))["messages"]
    assert said == [{"role": "user", "content": "one"}, {"role": "assistant", "content": texts[2]}]
    assert prompts[5] == "notes.txt:\n````\nThe door is ```blue```.\n````\n\nthree"
    lengths = [one["usage"]["prompt_tokens"] for one in records]
    assert lengths[0] == lengths[1] == lengths[2] < lengths[3] < lengths[5]
    for part in (
        "seed is 5\n",
        "taken back: two\n",
        f"saved to {kept}: 1 message and its answer\n",
        "a new conversation begins\n",
        f"loaded {kept}: 1 message and its answer\n",
        "notes.txt goes with the next message: ",
    ):
        assert part in err


def test_an_answer_stays_where_no_other_comes(
    chat: Chat, says: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pressed(Interrupt):
        """Ctrl-C comes before the first token, from the second answer on."""

        answers = 0

        def __enter__(self) -> "Pressed":
            super().__enter__()
            Pressed.answers += 1
            self.asked = Pressed.answers > 1
            return self

    monkeypatch.setattr("penstock.cli.commands.chat.Interrupt", Pressed)
    kept = tmp_path / "talk.json"
    code, out, err = chat(f"one\n/retry\n/save {kept}\n", "--grammar", says("first"))
    assert (code, out) == (0, "first\n")
    assert "stopped; the message and its answer are left out" in err
    said = json.loads(kept.read_text(encoding="utf-8"))["messages"]
    assert [message["content"] for message in said] == ["one", "first"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/undo", "there is no message to take back"),
        ("/retry", "there is no message to answer again"),
        ("/rtry", "/rtry is no command of the chat; did you mean /retry? /help lists them"),
        ("/set temperature 9", "temperature 9.0 must be from 0 to 2"),
        ("/set top_p none", "top_p 'none' is no number; give one, or default"),
        ("/set top_k 1.5", "top_k '1.5' is no whole number"),
        ("/set warmth 1", "'warmth' is no setting of the chat; names are temperature, top_p"),
        ("/set a b c", "/set takes a name and a value"),
        ("/think much", "think 'much' is not known; give on, off or hide"),
        ("/file", "/file needs the name of a text file"),
        ("/file /dev/zero", "/dev/zero is no file"),
        ("/file {model}", "cannot be read: it is not UTF-8"),
        ("/file {long}", "tokens, and the conversation would have "),
        ("/file ~nobody-of-this-name/x", "~nobody-of-this-name/x begins with the home of a user who is not"),
        ("/set think maybe", "think 'maybe' is not known; give on, off or hide"),
        ("/set history on", "history takes no value; type /set history"),
        ("/save", "/save needs the name of a file"),
        ("/save .", ". is a directory; name a file in it"),
        ("/save {long}/x", "long.txt/x cannot be written: Not a directory; name another file"),
        ("/save {long}", "exists, and was not replaced; name another file"),
        ("/load {long}", "is not JSON: "),
    ],
)
def test_a_command_that_cannot_be_obeyed_says_why(
    chat: Chat, speaker: Path, tmp_path: Path, line: str, message: str
) -> None:
    long = tmp_path / "long.txt"
    long.write_text("word " * 300)
    before = long.read_bytes()
    said = line.format(model=speaker / "model.safetensors", long=long)
    code, out, err = chat(f"{said}\n", "--max-length", "200", "--kv-blocks", "8")
    assert (code, out) == (2, "")
    assert err.startswith("penstock: error: ")
    assert message in err
    assert len(err.splitlines()) == 1
    assert long.read_bytes() == before


def test_settings_are_shown_as_they_are(chat: Chat) -> None:
    lines = (
        "/set parameter num_predict 9\n/set think hide\n/set system Be kind.\n/set nowordwrap\n"
        "/set temperature=0.5\n/set temperature default\n/set verbose\n/show\n/?\n"
    )
    code, _, err = chat(lines)
    assert code == 0
    shown = {line[:20].strip(): line[20:] for line in err.splitlines()}
    assert (shown["max_tokens"], shown["think"], shown["system"]) == ("9", "hide", "Be kind.")
    assert shown["temperature"] == "0.7  (the model's)"
    assert shown["conversation"] == "0 messages, 0 tokens"
    assert "/exit, /bye, /quit" in shown


def test_python_gives_a_template_its_variables(speaker: Path) -> None:
    talk = [{"role": "user", "content": "hi"}]
    few = SamplingParams(max_tokens=2)
    with LLM(speaker) as llm:
        usual = llm.chat(talk, few)
        asked = llm.chat(talk, few, chat_template_kwargs={"reasoning_effort": "high"})
        assert (usual.prompt or "").endswith("<|assistant|>")
        assert asked.prompt == f"{usual.prompt}<think>"
        assert asked.prompt_tokens == (*usual.prompt_tokens, THINK)
        for messages, said in (
            ("hi", "chat takes a list of messages, not a text; give chat\\("),
            (7, "and this is of type int"),
            (talk[0], "and this is of type dict"),
            ([talk[0], talk], "and this is a list with a value of type list"),
            ([talk, []], "messages must be a list with at least one"),
            ([talk, [{"role": "bot", "content": "hi"}]], "messages\\[0\\].role 'bot' is none; use one of"),
        ):
            with pytest.raises(RequestError, match=said):
                llm.chat(messages)  # type: ignore[arg-type]
        for variables, said in (
            ({"tools": []}, "has 'tools'"),
            ([], "must be a mapping"),
            ({1: 2}, "mapping"),
        ):
            with pytest.raises(RequestError, match=said):
                llm.chat(talk, few, chat_template_kwargs=variables)  # type: ignore[arg-type]

    async def beside() -> Completion:
        async with AsyncLLM(speaker) as llm:
            return await llm.chat(talk, few, chat_template_kwargs={"reasoning_effort": "high"})

    assert asyncio.run(beside()).prompt_tokens == asked.prompt_tokens


def test_several_conversations_are_answered_at_once_each_by_itself(speaker: Path) -> None:
    talks = [[{"role": "user", "content": text}] for text in ("hi", "ho")]
    params = [SamplingParams(max_tokens=most, temperature=0) for most in (2, 3)]
    with LLM(speaker) as llm:
        found = llm.chat(talks, params)
        assert found == [llm.chat(talk, own) for talk, own in zip(talks, params, strict=True)]
        assert [len(one.tokens) for one in found] == [2, 3]
        assert [one.prompt for one in llm.chat(talks[:1], params[0])] == [found[0].prompt]
        with pytest.raises(RequestError, match="there are 1 SamplingParams for 2 prompts"):
            llm.chat(talks, params[:1])

    async def beside() -> list[Completion]:
        async with AsyncLLM(speaker) as llm:
            return await llm.chat(talks, params)

    assert [one.text for one in asyncio.run(beside())] == [one.text for one in found]


# -- at a terminal
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., "subprocess.Popen[bytes]"]]:
    """Starts the command as a process of its own, which does not outlive the test."""
    started: list[subprocess.Popen[bytes]] = []

    def call(*arguments: str | Path, **streams: int) -> "subprocess.Popen[bytes]":
        own = {
            "PYTHONPATH": str(SOURCE),
            "OMP_NUM_THREADS": "1",
            "TERM": "xterm",
            "XDG_STATE_HOME": str(tmp_path),
        }
        command = [sys.executable, "-c", CALL, *map(str, arguments)]
        started.append(forks.LoadedPopen(command, env=os.environ | own, **streams))
        return started[-1]

    yield call
    for process in started:
        process.kill()
        process.wait()


def test_a_person_talks(
    start: Callable[..., "subprocess.Popen[bytes]"], speaker: Path, says: Callable[..., Path], tmp_path: Path
) -> None:
    grammar = says(THINK, "hm hm</think>", ANSWER)
    terminal = Terminal(start, "chat", speaker, "--grammar", grammar, "--temperature", "1")
    terminal.until(READY)

    # What is typed is edited; the answer is drawn, its reasoning faint, its escapes pictures.
    terminal.type("hx\x7fi\r")
    shown = terminal.until("first token after")
    shown = shown[shown.rindex("hi") :]
    assert "\x1b[2mhm\x1b[0m\x1b[2m hm\x1b[0m\r\n\r\n\x1b[1m\x1b[4mTitle\x1b[0m\r\n\r\n" in shown
    assert "Some \x1b[1mbold\x1b[0m words.\r\n␛[31mred␛]0;mine␇\r\n" in shown
    assert "\x1b[31m" not in shown
    assert "\x1b]0;" not in shown
    assert "tokens/s" in shown

    # A pasted text is one message of two lines, and so are those behind a backslash and within quotes.
    for typed, text in (
        (f"{PASTE}one\ntwo \\{END_PASTE}.\r", "one\ntwo \\."),
        ("three\\\rfour\r", "three\nfour"),
        ('"""five\rsix\x1b\r"""\r', "five\nsix"),
    ):
        terminal.until(READY)
        terminal.type(typed)
        terminal.until("first token after")
        terminal.until(READY)
        terminal.type(f"/save {tmp_path}/talk.json\r")
        if (tmp_path / "talk.json").exists():
            terminal.until("replace it? [y/N]")
            terminal.type("y\r")
        terminal.until("saved to")
        said = json.loads((tmp_path / "talk.json").read_text(encoding="utf-8"))["messages"]
        assert said[-2]["content"] == text
        assert said[-1]["content"] == ANSWER

    # Nothing is replaced unasked, and a mistake ends nothing.
    terminal.until(READY)
    terminal.type("/clear\r/save " + str(tmp_path / "talk.json") + "\r")
    terminal.until("[y/N]")
    terminal.type("\r")
    terminal.until("exists, and was not replaced")
    assert json.loads((tmp_path / "talk.json").read_text(encoding="utf-8"))["messages"] == said

    # Hidden, reasoning is not there; /h is completed by Tab.
    terminal.type("/set think hide\r")
    terminal.until("think is hide")
    terminal.type("yes\r")
    shown = terminal.until("first token after")
    assert "hm" not in shown[shown.rindex("yes") :].replace("thinking", "")
    terminal.type("/he\t")
    terminal.until("/he")  # What is completed may be drawn apart from what was typed.
    terminal.until("lp")
    terminal.type("\r")
    terminal.until("/help, /?")
    terminal.until(READY)
    terminal.type("/bye\r")
    assert terminal.process.wait(60) == 0
    modes = termios.tcgetattr(terminal.descriptor)
    assert modes[3] & termios.ECHO
    assert modes[3] & termios.ICANON
    terminal.close()

    history = tmp_path / "penstock" / "chat_history"
    typed_lines = [json.loads(line) for line in history.read_text().splitlines()]
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert typed_lines[0] == "hi"
    assert "three\nfour" in typed_lines


def test_what_was_typed_comes_back_unless_that_is_not_wanted(
    start: Callable[..., "subprocess.Popen[bytes]"], speaker: Path, tmp_path: Path
) -> None:
    file = tmp_path / "penstock" / "chat_history"
    file.parent.mkdir()
    file.write_text('"from another day"\n')
    terminal = Terminal(start, "chat", speaker, "--max-tokens", "80")
    terminal.until(READY)
    terminal.type("\x1b[A\r")  # Up.
    terminal.until("from another day")
    terminal.until("first token after")
    terminal.until(READY)
    terminal.type("/set nohistory\rsecret\r")
    terminal.until("secret")
    terminal.until("\x1b[?2004l")
    while not termios.tcgetattr(terminal.descriptor)[3] & termios.ISIG:  # The editor still has it.
        time.sleep(0.001)
    # It answers now, and what is typed meanwhile is no part of the text.
    terminal.type("/clear\r\x04")
    assert "/clear" not in terminal.until("first token after")
    terminal.until("a new conversation begins")
    assert terminal.process.wait(60) == 0
    terminal.close()
    assert file.read_text() == '"from another day"\n"/set nohistory"\n'
