"""The command line up to where a model is needed: help, arguments, prompts; and that none of it waits for
torch."""

import json
import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import fields
from importlib import import_module
from io import BytesIO, TextIOWrapper
from pathlib import Path

import click
import pytest

from penstock import __version__
from penstock.api.outputs import Delta
from penstock.base import other_names
from penstock.base.config import CACHE, Config, completion_file, state_directory
from penstock.base.errors import PenstockError
from penstock.cli import options
from penstock.cli.command import Option
from penstock.cli.commands import chat, pack, plan, run
from penstock.cli.commands.run import Screen
from penstock.cli.main import COMMANDS, main, root
from penstock.cli.model_names import hub_name
from penstock.cli.options import as_flags
from penstock.cli.prompt import SHIPPED_MODEL, PromptText, model_and_prompt
from penstock.hub.names import ModelName
from penstock.step.params import SamplingParams
from penstock.step.request import FinishReason

SOURCE = Path(__file__).resolve().parents[2] / "src"
HEAVY = "torch numpy tokenizers safetensors jinja2 rich"
PROBE = f"""
import sys
from penstock.cli.main import main
assert main(sys.argv[2:]) == int(sys.argv[1])
sys.exit(", ".join(name for name in {HEAVY.split()!r} if name in sys.modules) or 0)
"""


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        (0, ["--help"]),
        (0, ["--version"]),
        *((0, [name, "--help"]) for name in COMMANDS),
        (2, ["run", "x", "--temperature", "-1"]),
        (2, ["run", "/nowhere", "x"]),
        (2, ["run", "x", "--device-memory", "much"]),
        (2, ["chat", "/nowhere"]),
        (2, ["chat", "--block-size", "0"]),
        (2, ["run", "x", "--trace", "/nowhere/trace.json"]),
        (2, ["plan", "/nowhere"]),
        (2, ["rum"]),
        (0, ["completion", "bash"]),
        (0, ["run", "--help-all"]),
    ],
)
def test_nothing_heavy_is_imported_for(code: int, arguments: list[str]) -> None:
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-c", PROBE, str(code), *arguments]
    result = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, f"imported: {result.stderr}"


def test_only_the_command_that_is_called_is_imported() -> None:
    code = (
        "import sys; from penstock.cli.main import main; main(['--help']); "
        "sys.exit('penstock.cli.commands.run' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        check=False,
    )
    assert result.returncode == 0


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(COMMANDS) == [
        "run",
        "chat",
        "serve",
        "batch",
        "bench",
        "eval",
        "pack",
        "pull",
        "list",
        "show",
        "rm",
        "plan",
        "cache",
        "doctor",
        "config",
        "completion",
    ]
    assert main(["--help"]) == 0
    shown = capsys.readouterr()
    for name, purpose in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(purpose)}$", shown.out, re.MULTILINE)
    assert main([]) == 0
    assert capsys.readouterr() == shown
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"penstock {__version__}\n"


def test_a_group_without_a_command_shows_its_help_as_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval"]) == 2
    assert capsys.readouterr().err.startswith("Usage: penstock eval [OPTIONS] COMMAND [ARGS]...\n\n")


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "-h"]) == 0
    assert capsys.readouterr().out.startswith(f"Usage: penstock {name}")


@pytest.mark.parametrize(
    ("name", "sections"),
    [
        ("run", ["Prompt", "Sampling", "Output", "Engine"]),
        ("chat", ["Prompt", "Sampling", "Output", "Engine"]),
        ("pack", ["Pack", "Quantise"]),
        ("plan", ["Machine", "Work", "Engine", "Output"]),
    ],
)
def test_every_option_is_explained_in_a_section(
    name: str, sections: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name, "--help-all" if name != "pack" else "--help"]) == 0
    out = capsys.readouterr().out
    assert re.findall(r"^(\S.*):$", out, re.MULTILINE) == [*sections, "Other options", "Examples"]
    command = root.get_command(click.Context(root), name)
    assert command is not None
    for option in command.params:
        if isinstance(option, click.Option):
            assert option.help
            assert re.search(rf"^  .*{option.opts[0]}\b", out, re.MULTILINE)


@pytest.mark.parametrize("name", ["run", "chat", "serve", "batch", "plan"])
def test_help_has_what_many_need_and_says_how_many_more_there_are(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = root.get_command(click.Context(root), name)
    assert command is not None
    flags = [one for one in command.params if isinstance(one, Option)]
    assert main([name, "--help"]) == 0
    common = capsys.readouterr().out.partition("\nExamples:")[0]
    assert main([name, "--help-all"]) == 0
    whole = capsys.readouterr().out.partition("\nExamples:")[0]
    rare = [one for one in flags if one.rare]
    assert f"\n{len(rare)} more options: penstock {name} --help-all\n" in common
    assert "more options" not in whole
    for one in flags:
        shown = re.compile(rf"^  .*{one.opts[0]}\b", re.MULTILINE)
        assert shown.search(whole)
        assert bool(shown.search(common)) != one.rare
    assert len(common) < len(whole)
    assert main(["pack", "--help-all"]) == 2  # It has no others.


def test_examples_in_the_help_are_commands_that_parse() -> None:
    lines = filter(None, (run.EXAMPLES + chat.EXAMPLES + pack.EXAMPLES + plan.EXAMPLES).splitlines())
    found = [re.split(r"  +| [|<>] ", line.split("penstock ")[1])[0] for line in lines]
    for name, *arguments in map(shlex.split, found):
        command = root.get_command(click.Context(root), name)
        assert command is not None
        parsed = command.make_context(name, arguments).params
        assert len(parsed.get("arguments", ())) <= 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["frobnicate"], "no such command 'frobnicate'; see penstock --help"),
        (["rum"], "no such command 'rum'; did you mean run?"),
        (["chta", "x"], "no such command 'chta'; did you mean chat?"),
        (["--frobnicate"], "no such option '--frobnicate'; see penstock --help"),
        (["run", "--xyzzy"], "no such option '--xyzzy'; see penstock run --help"),
        (["run", "--max-token", "5"], "no such option '--max-token'; did you mean --max-tokens?"),
        (
            ["run", "x", "--max-tokens", "0"],
            "--max-tokens 0 must be a whole number, at least 1; leave it out for what is usual",
        ),
        (["run", "x", "--seed"], "option '--seed' requires an argument; see penstock run --help"),
        (
            ["run", "Qwen3-8B"],
            "model 'Qwen3-8B' does not exist; give a directory with a config.json, or a model of the Hugging "
            "Face Hub as owner/name; as a prompt, one word goes through a pipe: echo Qwen3-8B | penstock run",
        ),
        (
            ["chat", "Hello"],
            "model 'Hello' does not exist; give a directory with a config.json, or a model of the Hugging "
            "Face Hub as owner/name; what you say comes once chat has begun",
        ),
        (["serve", "--max-model-len", "9"], "no such option '--max-model-len'; here it is --max-length"),
        (["serve", "--served-model-name", "x"], "no such option '--served-model-name'; here it is --name"),
        (
            ["run", "x", "--gpu-memory-utilization", ".9"],
            "no such option '--gpu-memory-utilization'; here it is --device-memory, such as 90%",
        ),
        (["rm", "--ctx-size", "0"], "no such option '--ctx-size'; see penstock rm --help"),
        (
            ["run", "x", "--best-of", "2"],
            "no such option '--best-of'; outputs are not ranked; -n and --logprobs give several to choose "
            "from",
        ),
        (
            ["serve", "--length-penalty", "2"],
            "no such option '--length-penalty'; there is no beam search, which weighs outputs by it; leave "
            "it out",
        ),
        (
            ["run", "--exponential-penalty", "2"],
            "no such option '--exponential-penalty'; see penstock run --help",
        ),
        (["help", "rum"], "no such command 'rum'; did you mean run?"),
        (["chat", "a", "b"], "got unexpected extra argument (b); see penstock chat --help"),
    ],
)
def test_wrong_usage_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr() == ("", f"penstock: error: {message}\n")


def test_a_package_that_is_missing_is_no_fault_of_penstock(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["run", "Once upon a time", "--device", "cpu"]) == 2
    said = "penstock: error: torch, which penstock needs, is not installed; pip install torch\n"
    assert capsys.readouterr() == ("", said)


def test_settings_in_errors_are_written_as_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert as_flags("raise kv_blocks, or lower max_length.") == "raise --kv-blocks, or lower --max-length."
    for same in (
        "/a/max_length/b",
        "'max_length'",
        "max_length.json",
        "--max-length",
        "no_such",
        "max_length=3",
    ):
        assert as_flags(same) == same
    config = json.loads((SHIPPED_MODEL / "config.json").read_text()) | {"max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    # A forecast is for the model's context, where that is shorter than usual.
    assert main(["plan", str(tmp_path)]) == 0
    assert "context 512," in capsys.readouterr().out
    assert main(["plan", str(tmp_path), "--context", "600"]) == 2
    assert "lower --context" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--regex", "--choice"])
def test_structures_are_refused_before_loading_without_what_they_need(
    flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(options, "find_spec", lambda name: None)
    assert main(["run", "Hello", flag, "a"]) == 2
    said = f"{flag} needs llguidance, which is not installed; pip install 'penstock[grammar]'"
    assert capsys.readouterr() == ("", f"penstock: error: {said}\n")


# -- completion
# -----------------------------------------------------------------------------------------------


def completed(*words: str) -> list[str]:
    """What a shell offers for the last of these words."""
    environment = os.environ | {
        "PYTHONPATH": str(SOURCE),
        "_PENSTOCK_COMPLETE": "bash_complete",
        "COMP_WORDS": " ".join(["penstock", *words]),
        "COMP_CWORD": str(len(words)),
    }
    code = "import sys; from penstock.cli.main import main; main([]); sys.exit('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_a_shell_completes_commands_options_and_files() -> None:
    assert completed("ch") == ["plain,chat"]
    assert completed("run", "--tem") == ["plain,--temperature"]
    assert completed("chat", "./mod") == ["file,./mod"]


def test_bash_takes_what_completion_prints(tmp_path: Path) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("needs bash")
    (tmp_path / "penstock").write_text(
        f'#!/bin/sh\nPYTHONPATH={SOURCE} exec {sys.executable} -m penstock "$@"\n'
    )
    (tmp_path / "penstock").chmod(0o755)
    script = (
        'eval "$(penstock completion bash)"; COMP_WORDS=(penstock doc); COMP_CWORD=1; '
        '_penstock_completion penstock; echo "${COMPREPLY[@]}"; complete -p penstock'
    )
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        [bash, "-c", script], env=os.environ | {"PATH": path}, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["doctor", "complete -o nosort -F _penstock_completion penstock"]


def test_completion_is_installed_once_where_the_shell_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, folder in (
        ("HOME", ""),
        ("XDG_DATA_HOME", "data"),
        ("XDG_CONFIG_HOME", "config"),
        ("ZDOTDIR", "z"),
    ):
        monkeypatch.setenv(name, str(tmp_path / folder))
    (tmp_path / "z").mkdir()
    (tmp_path / ".bashrc").write_text("alias a=b")
    for shell, file, reads in (
        ("bash", "data/penstock/completion.bash", ".bashrc"),
        ("zsh", "data/penstock/completion.zsh", "z/.zshrc"),
        ("fish", "config/fish/completions/penstock.fish", None),
    ):
        assert main(["completion", shell]) == 0
        script = capsys.readouterr().out
        for _ in range(2):
            assert main(["completion", shell, "--install"]) == 0
            assert capsys.readouterr().out.startswith(f"written to {tmp_path / file}")
        assert (tmp_path / file).read_text() == script
        if reads is not None:
            assert (tmp_path / reads).read_text().count(f'source "{tmp_path / file}"\n') == 1
    assert (tmp_path / ".bashrc").read_text().startswith("alias a=b\nsource ")
    monkeypatch.setenv("XDG_DATA_HOME", "/dev/null/x")
    assert main(["completion", "bash", "--install"]) == 2
    assert "cannot be written: Not a directory; print the script" in capsys.readouterr().err
    assert main(["completion", "csh"]) == 2


# -- what [MODEL] PROMPT means
# -----------------------------------------------------------------------------------------------


def pipe(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(data), encoding="utf-8"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_one_argument_is_the_prompt_for_the_shipped_model(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe(monkeypatch, b"not read")
    assert model_and_prompt(("Once",), None) == (SHIPPED_MODEL, PromptText("Once", True))
    assert model_and_prompt((str(model), "Once"), None) == (model, PromptText("Once", True))


def test_a_prompt_that_is_left_out_is_read_from_a_pipe(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, path in (
        ((), SHIPPED_MODEL),
        (("-",), SHIPPED_MODEL),
        ((str(model),), model),
        ((str(model), "-"), model),
    ):
        pipe(monkeypatch, "Grüße\n\n".encode())
        assert model_and_prompt(arguments, None) == (path, PromptText("Grüße\n", False))


def test_a_prompt_that_is_left_out_on_a_terminal_is_missing(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = pty.openpty()
    with open(theirs, closefd=True) as terminal, open(ours, "wb", closefd=True):
        for stdin in (terminal, None):
            monkeypatch.setattr(sys, "stdin", stdin)
            with pytest.raises(
                click.UsageError,
                match="the prompt is missing; give it in quotes, with --file, or through a pipe, or talk",
            ):
                model_and_prompt((), None)
            with pytest.raises(click.UsageError, match=f"the prompt is missing after the model {model}; "):
                model_and_prompt((str(model),), None)


def test_a_prompt_from_a_file_is_for_the_model_in_the_argument(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"Once\r\n")
    assert model_and_prompt((), str(file)) == (SHIPPED_MODEL, PromptText("Once", False))
    assert model_and_prompt((str(model),), str(file)) == (model, PromptText("Once", False))
    with pytest.raises(PenstockError, match=f"{tmp_path}: Is a directory"):
        model_and_prompt((), str(tmp_path))


@pytest.mark.parametrize("text", ["x" * 5000, "a\0b", "one/two three", "gpt2", "Once."])
def test_a_prompt_is_never_mistaken_for_a_path(text: str) -> None:
    assert model_and_prompt((text,), None)[1].text == text
    with pytest.raises(PenstockError, match="does not exist"):
        model_and_prompt((text, "prompt"), None)


@pytest.mark.parametrize("text", ["Qwen/Qwen3-8B", "hf.co/a/b", "a/b:Q4_K_M", "a/b@main"])
def test_a_name_of_the_hub_is_never_mistaken_for_a_prompt(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(click.UsageError, match=f"the prompt is missing after the model {text}; "):
        model_and_prompt((text,), None)
    pipe(monkeypatch, b"Once")
    assert model_and_prompt((text,), None) == (Path(text), PromptText("Once", False))


@pytest.mark.parametrize("text", ["./models/llama", "/nowhere/llama", "../llama", "llama.gguf"])
def test_nor_is_a_path(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(PenstockError, match="does not exist"):
        model_and_prompt((text,), None)


# -- several outputs on one screen
# -------------------------------------------------------------------------------------------


def test_outputs_are_written_one_below_the_other_however_they_come(
    capsys: pytest.CaptureFixture[str],
) -> None:
    screen = Screen(3, "P")
    stop = FinishReason.STOP
    for index, text, finish in [
        (1, "b", None),
        (0, "a", None),
        (2, "c\n", stop),
        (1, "B", stop),
        (0, "A", stop),
    ]:
        screen.show(Delta(text, (1,), finish, index))
    screen.end()
    assert (
        capsys.readouterr().out
        == "P\n--- output 1 of 3 ---\naA\n--- output 2 of 3 ---\nbB\n--- output 3 of 3 ---\nc\n"
    )


@pytest.mark.parametrize(("asked", "same"), [(["help"], ["--help"]), (["help", "run"], ["run", "--help"])])
def test_help_is_a_word_too(asked: list[str], same: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for arguments in (asked, same):
        assert main(arguments) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("qwen3:8b", "Qwen/Qwen3-8B"),
        ("qwen3", "Qwen/Qwen3-8B"),
        ("qwen3:latest", "Qwen/Qwen3-8B"),
        ("qwen3:0.6b-q4_K_M", "Qwen/Qwen3-0.6B"),
        ("qwen3:30b", "Qwen/Qwen3-30B-A3B"),
        ("qwen2.5-coder:7b", "Qwen/Qwen2.5-Coder-7B-Instruct"),
        ("llama3.2:1b", "meta-llama/Llama-3.2-1B-Instruct"),
        ("mixtral", "mistralai/Mixtral-8x7B-Instruct-v0.1"),
        ("gpt-oss:20b", "openai/gpt-oss-20b"),
        ("smollm2:135m", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("qwen3:who", None),
        ("hello", None),
    ],
)
def test_a_model_of_ollamas_is_named_as_the_hub_has_it(theirs: str, ours: str | None) -> None:
    assert hub_name(theirs) == ours
    assert ours is None or ModelName.parse(ours) is not None


@pytest.mark.parametrize("command", ["run", "chat", "serve", "show"])
def test_a_model_that_is_named_as_in_ollama_is_refused_with_the_hubs_name(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "qwen3:8b", *(["hi"] if command == "run" else [])]) == 2
    assert capsys.readouterr().err == (
        "penstock: error: model 'qwen3:8b' does not exist; on the Hugging Face Hub it is Qwen/Qwen3-8B\n"
    )


def test_what_is_to_be_removed_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("XDG_STATE_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert main(["uninstall"]) == 2
    told = capsys.readouterr().err
    readme = (Path(__file__).resolve().parents[2] / "README.md").read_text()
    for path in (CACHE, state_directory(), completion_file("bash")[0].parent):
        home = str(path).replace(str(Path.home()), "~")
        assert f"`{home}`" in readme
        assert str(path) in told or "share" in home


def test_help_shows_speculation_and_what_n_means(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "--speculate SPECULATE Speculative decoding" in shown
    assert "-n N Independent outputs of the prompt; for their length see --max-tokens. [1]" in shown


def test_what_other_engines_call_otherwise_is_named_as_it_is_here() -> None:
    """Each by an option that some command has."""
    options = set[str]()
    for name in COMMANDS:
        command = import_module(f"penstock.cli.commands.{name}").command
        options |= {one for param in command.params for one in (*param.opts, *param.secondary_opts)}
    for theirs in other_names._OURS:
        assert other_names.ours_for(theirs, options), theirs
        assert theirs not in options
    absent = {f"--{name.replace('_', '-')}" for name in other_names._ABSENT}
    assert not absent & options


def test_a_number_of_tokens_may_have_a_k_or_an_m(capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for context in ("32K", "32768"):
        assert main(["plan", "8B", "--machine", "desktop-24", "--context", context, "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1]
    assert main(["plan", "8B", "--context", "32X"]) == 2
    assert "'32X' is not a valid number of tokens; write it like 4096 or 32K\n" in capsys.readouterr().err
    assert main(["run", "--max-length", "0K", "/nowhere", "x"]) == 2
    assert "0 is not in the range x>=1" in capsys.readouterr().err
    assert main(["run", "--max-length", "2k", "--max-tokens", "1K", "/nowhere", "x"]) == 2
    assert "'/nowhere' does not exist" in capsys.readouterr().err
    counting = {
        "--max-length",
        "--max-step-tokens",
        "--kv-tile",
        "--block-size",
        "--max-tokens",
        "--min-tokens",
    }
    for name in ("run", "chat", "serve", "batch"):
        command = import_module(f"penstock.cli.commands.{name}").command
        for one in command.params:
            if counting & {*one.opts}:
                assert one.type.convert("1K", one, None) == 1024, f"{name} {one.opts}"
        assert counting & {opt for one in command.params for opt in one.opts}


HINTS = (
    (
        ["run", "-ngl", "99", "hi"],
        "-ngl'; here it is --device-memory, such as 16GiB; what does not fit streams",
    ),
    (["serve", "-ngl", "99"], "-ngl'; here it is --device-memory, such as 16GiB; what does not fit streams"),
    (["run", "-c", "4096", "hi"], "-c'; here it is --max-length"),
    (["run", "-np", "2", "hi"], "-np'; here it is --max-sequences"),
    (["run", "-t", "4", "hi"], "-t'; here it is --threads"),
    (["run", "-m", "X", "hi"], "-m'; it stands without one: penstock run [MODEL] PROMPT"),
    (["run", "--model", "X", "hi"], "--model'; it stands without one: penstock run [MODEL] PROMPT"),
    (["chat", "--model", "X"], "--model'; it stands without one: penstock chat [MODEL]"),
    (["plan", "-hf", "X"], "-hf'; it stands without one: penstock plan MODEL"),
    (["batch", "a", "b", "-m", "X"], "-m'; here it is --model"),
    (["run", "-p", "hi"], "-p'; it stands without one: penstock run [MODEL] PROMPT"),
    (["chat", "-p", "hi"], "-p'; see penstock chat --help"),
    (["run", "--chat-template", "x", "hi"], "--chat-template'; conversations are written by"),
    (
        ["serve", "--kv-cache-dtype", "fp8"],
        "--kv-cache-dtype'; KV on the device has the model's dtype; --host",
    ),
    (["run", "-ctk", "q8_0", "hi"], "-ctk'; KV on the device has the model's dtype; --host-kv-dtype is"),
    (["serve", "--tool-call-parser", "hermes"], "--tool-call-parser'; here it is --tool-parser"),
    (["run", "--flash-attn", "hi"], "--flash-attn'; attention is always computed in tiles"),
    (["run", "-fa", "hi"], "-fa'; attention is always computed in tiles"),
    (["run", "--mlock", "hi"], "--mlock'; weights are not locked in memory; --host-memory bounds"),
    (["serve", "--load-format", "dummy"], "--load-format'; the form of a checkpoint is known by its files"),
    (["run", "--batch-size", "8", "hi"], "--batch-size'; here it is --max-step-tokens"),
)


@pytest.mark.parametrize(("arguments", "said"), HINTS)
def test_an_option_that_people_know_from_elsewhere_is_answered_with_ours(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert f"penstock: error: no such option '{said}" in capsys.readouterr().err


def test_what_is_a_value_or_stands_behind_two_dashes_is_no_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--stop", "-np", "/nowhere", "hi"]) == 2
    assert main(["run", "/nowhere", "--", "-ngl"]) == 2
    for line in capsys.readouterr().err.splitlines():
        assert "'/nowhere' does not exist" in line


def test_commands_that_people_know_from_elsewhere_are_answered_with_ours(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for theirs, ours in other_names._COMMANDS.items():
        assert theirs not in COMMANDS
        assert ours.split()[0] in COMMANDS
        assert main([theirs, "x"]) == 2
        assert capsys.readouterr().err == (
            f"penstock: error: no such command {theirs!r}; here it is penstock {ours}\n"
        )


def test_what_is_named_instead_of_an_absent_argument_exists() -> None:
    names = {one.name for one in (*fields(SamplingParams), *fields(Config))}
    for theirs, (_, instead) in other_names._ABSENT.items():
        assert theirs not in names
        assert {*re.findall(r"{(\w+)}", instead)} <= names, theirs
    for theirs, ours in other_names._ARGUMENTS.items():
        assert {*re.findall(r"^\w+", ours)} <= names, theirs


def test_keys_of_other_servers_are_answered_with_where_they_belong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server that somebody takes for one with a key does not start without."""
    assert main(["serve", "--api-key", "abc"]) == 2
    assert "here it is --api-keys, a file; or the variable PENSTOCK_API_KEYS" in capsys.readouterr().err
    monkeypatch.delenv("PENSTOCK_API_KEYS", raising=False)
    monkeypatch.setenv("VLLM_API_KEY", "abc")
    assert main(["serve"]) == 2
    assert "VLLM_API_KEY is not read; give its key in PENSTOCK_API_KEYS" in capsys.readouterr().err
    assert main(["serve", "--api-keys", "sk-abc"]) == 2
    assert "or the keys themselves in the variable PENSTOCK_API_KEYS" in capsys.readouterr().err


def test_an_option_that_is_not_needed_here_is_answered_with_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--trust-remote-code"]) == 2
    assert "no code of a checkpoint is ever run; leave it out" in capsys.readouterr().err
