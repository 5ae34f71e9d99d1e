"""Settings from a file: who wins, what is refused, what is told; and that the files in deploy/ name what
there is."""

import configparser
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import pytest

from penstock.cli.command import Session
from penstock.cli.commands import run, serve
from penstock.cli.commands.serve import api_keys
from penstock.cli.configfile import all_commands, read, settable
from penstock.cli.main import COMMANDS, main, root

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
PATIENCE = 30
"""Seconds that a server waits by itself for its requests to end."""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PENSTOCK_API_KEYS", raising=False)
    return tmp_path


def parsed(name: str, *arguments: str, config: Path | None = None) -> click.Context:
    """What a command makes of its arguments, and of the settings that it finds."""
    context = click.Context(root, info_name="penstock", obj=Session(config=config))
    found = root.get_command(context, name)
    assert found is not None
    return found.make_context(name, list(arguments), parent=context)


def expanded(context: click.Context) -> dict[str, object]:
    return {
        name: value.expanduser() if isinstance(value, Path) else value
        for name, value in context.params.items()
    }


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    return code, *capsys.readouterr()


# -- who wins
# ------------------------------------------------------------------------------------------------------------


def secrets(*arguments: str) -> tuple[bytes, ...]:
    return tuple(key.secret for key in api_keys(parsed(*arguments)))


def test_what_is_typed_wins_over_the_environment_and_that_over_the_file(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("typed", "set"):
        (elsewhere / name).write_text(f"{name}-key\n")
    Path("penstock.toml").write_text('port = 1\nqueue = 7\n[serve]\nport = 2\napi-keys = "set"\n')
    assert [parsed("serve").params[name] for name in ("port", "queue", "max_body")] == [2, 7, 32 << 20]
    assert parsed("serve", "--port", "3").params["port"] == 3
    assert secrets("serve") == (b"set-key",)
    monkeypatch.setenv("PENSTOCK_API_KEYS", "one, two")
    assert secrets("serve") == (b"one", b"two")
    assert secrets("serve", "--api-keys", "typed") == (b"typed-key",)


def test_values_of_every_kind_are_as_if_they_were_typed(elsewhere: Path) -> None:
    Path("penstock.toml").write_text("""
        model = "~/a model"
        device_memory = 1_000_000
        prefix-cache = false
        patience = 8
        name = "one"
        logit-bias = ["5=-1.5", "7=2"]
        temperature = 0.25
        stop = ["a b", ""]
        kv-directory = "~/kv"
        n = 3
        [chat]
        temperature = 1
        """)
    asked = parsed("serve").params
    assert asked["model"] == (str(Path.home() / "a model"),)
    assert (asked["device_memory"], asked["prefix_cache"], asked["patience"], asked["names"]) == (
        "1000000",
        False,
        8.0,
        ("one",),
    )
    asked = parsed("run", "prompt").params
    assert asked["logit_bias"] == {5: -1.5, 7: 2.0}
    assert (asked["temperature"], asked["stop"], asked["n"]) == (0.25, ("a b", ""), 3)
    assert asked["kv_directory"] == Path.home() / "kv"
    assert parsed("chat").params["temperature"] == 1.0
    assert parsed("chat", "--prefix-cache").params["prefix_cache"] is True
    assert parsed("bench", "decode").params == {}  # The command's own, of which none is set.


def test_a_file_that_is_named_is_read_before_and_behind_the_command(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (elsewhere / "one.toml").write_text("port = 1")
    (elsewhere / "two.toml").write_text("port = 2")
    assert parsed("serve", config=Path("one.toml")).params["port"] == 1
    assert parsed("serve", "--config", "two.toml", config=Path("one.toml")).params["port"] == 2
    (elsewhere / "penstock.toml").write_text("[cache]\n")
    assert said(capsys, "cache", "ls", str(elsewhere))[2] == "settings from penstock.toml\n"
    assert (
        said(capsys, "--config", "one.toml", "cache", "ls", str(elsewhere))[2] == "settings from one.toml\n"
    )
    (elsewhere / "penstock.toml").unlink()
    (elsewhere / "penstock.toml").mkdir()
    assert said(capsys, "cache", "ls", str(elsewhere))[2] == ""


def test_help_does_not_depend_on_the_file(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("penstock.toml").write_text("= = =")
    for arguments in (["--help"], ["serve", "--help"], ["--version"]):
        assert said(capsys, *arguments)[0] == 0
    assert said(capsys, "cache", "ls")[0] == 2


def test_run_takes_the_model_that_is_set_unless_one_is_typed(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("penstock.toml").write_text('[run]\nmodel = "set"\n')
    assert "model 'set' does not exist" in said(capsys, "run", "prompt")[2]
    assert "model 'typed' does not exist" in said(capsys, "run", "typed", "prompt")[2]
    Path("prompt").write_text("prompt")
    assert "model 'set' does not exist" in said(capsys, "run", "--file", "prompt")[2]


def test_run_takes_the_file_of_the_prompt_that_is_set(capsys: pytest.CaptureFixture[str]) -> None:
    Path("penstock.toml").write_text('[run]\nfile = "prompt.txt"\n')
    Path("prompt.txt").write_text("Once upon a time")
    code, out, _ = said(capsys, "run", "--device", "cpu", "--max-tokens", "3", "--json")
    assert (code, json.loads(out)["prompt"]) == (0, "Once upon a time")


# -- what is refused
# ---------------------------------------------------------------------------------------------------------

WRONG = [
    ("prt = 1", "there is no setting prt; did you mean port?"),
    ("[serve]\nprt = 1", "there is no setting prt in [serve]; did you mean port?"),
    ("[sevre]\nport = 1", "there is no command for [sevre]; did you mean [serve]?"),
    ("serve = 1", "there is no setting serve"),
    ("[serve.more]\nport = 1", "there is no setting more in [serve]"),
    ("no-prefix-cache = true", "there is no setting no-prefix-cache; did you mean prefix-cache?"),
    ("config = 'other.toml'", "there is no setting config"),
    ("[cache]\nyes = true", "there is no setting yes in [cache]"),
    ("[pack]\nmodel = 'a'", "there is no setting model in [pack]; type it behind the command"),
    ("[batch]\nrequests = 'a'", "there is no setting requests in [batch]; type it behind the command"),
    (
        "[run]\nprompt = 'a'",
        'there is no setting prompt in [run]; type the prompt behind the command, or set file = "PATH" to a ',
    ),
    ("[chat]\nprompt = 'a'", "there is no setting prompt in [chat]; what you say comes once chat has begun"),
    ("max_body = 2000\nmax-body = 2000", "max-body is set twice, with - and with _"),
    ("port = 70000", "port: invalid value for '--port': 70000 is not in the range 0<=x<=65535"),
    ("[serve]\nport = 'x'", "port in [serve]: invalid value for '--port': 'x' is not a valid integer range"),
    ("port = 80.5", "port: invalid value for '--port': '80.5' is not a valid integer range"),
    ("port = true", "port: invalid value for '--port': write a text or a number, not true or false"),
    ("port = [1]", "port: invalid value for '--port': write a text or a number, not a list"),
    (
        "host = 2026-01-01",
        "host: invalid value for '--host': write a text or a number, not a date or a time",
    ),
    ("name = [1, [2]]", "name: invalid value for '--name': write a text or a number, not a list"),
    ("quiet = 'yes'", "quiet: invalid value for '--quiet' / '-q': write true or false"),
    ("quiet = 1", "quiet: invalid value for '--quiet' / '-q': write true or false"),
    ("device-memory = 'much'", "invalid value for '--device-memory': cannot read 'much' as a size"),
    ("log-format = 'xml'", "invalid value for '--log-format': 'xml' is not one of 'text', 'json'"),
    ("= 1", "cannot be read: Invalid statement (at line 1, column 1)"),
    ("a = " + "[" * 5000, "cannot be read"),
    ("a = '\udcff'", "cannot be read: 'utf-8' codec can't decode byte 0xff"),
]


@pytest.mark.parametrize(("text", "message"), WRONG)
def test_what_is_wrong_is_refused_by_serve_and_by_the_check(
    text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("penstock.toml").write_bytes(text.encode(errors="surrogateescape"))
    commands = [["config", "check"], ["cache", "ls"] if "cache" in text else ["serve", "nowhere"]]
    for arguments in commands:
        code, out, err = said(capsys, *arguments)
        assert (code, out) == (2, "")
        assert err.startswith("penstock: error: ")
        assert "penstock.toml" in err
        assert message in err
        assert len(err.splitlines()) == 1


def test_a_flag_refuses_the_same_with_the_same_words(capsys: pytest.CaptureFixture[str]) -> None:
    for flag, value in (
        ("port", "70000"),
        ("patience", "-1"),
        ("device-memory", "120%"),
        ("log-level", "loud"),
        ("kv-blocks", "0"),
    ):
        Path("penstock.toml").unlink(missing_ok=True)
        typed = said(capsys, "serve", f"--{flag}", value)[2].removeprefix("penstock: error: ")
        Path("penstock.toml").write_text(f'{flag} = "{value}"')
        assert said(capsys, "serve")[2] == f"penstock: error: penstock.toml: {flag}: {typed}"


def test_a_file_that_cannot_be_read_is_told(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (elsewhere / "large").write_bytes(b"#" * (1 << 21))
    for name, message in (
        ("nowhere", "No such file or directory; name a file that can be read"),
        (".", "Is a directory"),
        ("large", "has more than 1048576 bytes"),
    ):
        for arguments in (["config", "check", name], ["serve", "--config", name]):
            code, _, err = said(capsys, *arguments)
            assert (code, message in err) == (2, True), err
    assert "penstock.toml cannot be read: No such file" in said(capsys, "config", "check")[2]
    assert said(capsys, "config", "check", "--command", "srv")[2].startswith(
        "penstock: error: 'srv' is no command of penstock"
    )


# -- the check
# ------------------------------------------------------------------------------------------------------------


def test_the_check_prints_a_file_with_the_same_settings_and_where_they_are_from(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("penstock.toml").write_text(
        'host-kv-memory = "1GiB"\nmodel = "m"\n[serve]\nport = 9000\nname = ["a", "b \\"c\\""]\n'
    )
    code, out, err = said(capsys, "config", "check")
    assert (code, err) == (0, "")
    rows = {line.split(" = ")[0].strip("# "): line for line in out.splitlines()}
    assert re.fullmatch(r"port = 9000 +# \[serve\] in penstock.toml", rows["port"])
    assert re.fullmatch(r'host-kv-memory = "1GiB" +# penstock.toml', rows["host-kv-memory"])
    assert re.fullmatch(r"queue = 256 +# default", rows["queue"])
    assert re.search(r"^# kv-tile +# not set$", out, re.MULTILINE)
    Path("again.toml").write_text(out)
    for name in ("serve", "run", "chat", "batch"):
        Path("again.toml").write_text(said(capsys, "config", "check", "--command", name)[1])
        needed = ["in", "out"] if name == "batch" else []
        assert expanded(parsed(name, *needed, config=Path("again.toml"))) == expanded(parsed(name, *needed))
    monkeypatch.setenv("PENSTOCK_API_KEYS", "secret-one,secret-two")
    out = said(capsys, "config", "check")[1]
    assert re.search(r"^# api-keys +# 2 in PENSTOCK_API_KEYS$", out, re.MULTILINE)
    assert "secret" not in out


def test_the_check_finds_all_that_is_wrong_at_once_and_nothing_twice(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("penstock.toml").write_text(
        'prot = 1\ndevice-memory = "much"\n[eval]\ndepths = 0\n[bench]\nshape = "tiny"\n'
    )
    code, out, err = said(capsys, "config", "check")
    assert (code, out) == (2, "")
    assert sorted(re.sub(r".*toml: (\S+).*", r"\1", line) for line in err.splitlines()) == [
        "depths",
        "device-memory:",
        "shape",
        "there",
    ]


def test_the_check_imports_nothing_heavy() -> None:
    Path("penstock.toml").write_text("port = 1\n[run]\ntemperature = 1\n")
    heavy = "torch numpy tokenizers safetensors jinja2 rich msgspec starlette opentelemetry"
    code = f"""
import sys
from penstock.cli.main import main
assert main(["config", "check"]) == 0
sys.exit(", ".join(name for name in {heavy.split()!r} if name in sys.modules) or 0)
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('device = "tpu"', "device 'tpu' is not known"),
        ('[doctor]\ndtype = "int3"', "dtype 'int3' is not known"),
        ("[run]\ntemperature = -1", "temperature -1.0 must be from 0 to 2; 0 is greedy"),
        ("[chat]\nquiet = true\nverbose = true", "--quiet and --verbose exclude each other"),
        ('[serve]\napi-keys = "nowhere"', "the API keys in nowhere cannot be read"),
        ('[serve]\napi-keys = "empty"', "empty has no API key in it"),
    ],
)
def test_the_check_finds_what_only_the_command_would(
    text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("empty").write_text("\n")
    Path("penstock.toml").write_text(text)
    code, out, err = said(capsys, "config", "check")
    assert (code, out) == (2, "")
    assert message in err
    assert "penstock.toml" in err


def test_a_key_that_was_written_in_place_of_its_file_is_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    Path("penstock.toml").write_text('api-keys = ["sk-secret"]')
    code, _, err = said(capsys, "config", "check")
    assert (code, "sk-secret" in err) == (2, False)


def test_every_flag_of_every_command_may_be_set() -> None:
    context = click.Context(root, info_name="penstock")
    for name, some in all_commands(root, context).items():
        for command in some:
            flags = {parameter.name for parameter in command.params if isinstance(parameter, click.Option)}
            known = {parameter.name for parameter in settable(name, command).values()}
            assert flags - known <= {"config", "yes", "help_all"}
            assert known - flags <= {"model"}
    assert "port" in settable("serve", serve.command)
    assert "model" in settable("run", run.command)


# -- what is in deploy/
# ------------------------------------------------------------------------------------------------------


def flags_of(command: click.Command) -> set[str]:
    return {name for parameter in command.params for name in parameter.opts + parameter.secondary_opts}


def unit() -> configparser.ConfigParser:
    found = configparser.ConfigParser(strict=False, interpolation=None)
    found.optionxform = str  # type: ignore[assignment,method-assign]
    found.read_string((DEPLOY / "penstock.service").read_text())
    return found


def test_the_service_starts_what_there_is_and_waits_longer_than_its_patience() -> None:
    service = unit()["Service"]
    program, name, *arguments = shlex.split(service["ExecStart"])
    assert (Path(program).name, name) == ("penstock", "serve")
    assert {argument for argument in arguments if argument.startswith("-")} <= flags_of(serve.command)
    (Path("penstock.toml")).write_text("")
    arguments[arguments.index("--config") + 1] = "penstock.toml"
    asked = parsed("serve", *arguments).params
    assert asked["log_format"] == "json"
    assert int(service["TimeoutStopSec"]) > asked["patience"] + 15
    assert asked["patience"] == parsed("serve").params["patience"] == PATIENCE
    assert (service["DynamicUser"], service["ProtectSystem"], service["NoNewPrivileges"]) == (
        "yes",
        "strict",
        "yes",
    )
    assert (service["LimitMEMLOCK"], service["Restart"]) == ("infinity", "on-failure")
    assert not {"PrivateDevices", "ProtectClock", "MemoryDenyWriteExecute"} & set(
        service
    )  # They would hide GPUs, or forbid kernels.


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
def test_systemd_understands_the_service(elsewhere: Path) -> None:
    there = shutil.which("true") or "/bin/true"
    text = re.sub(
        r"^ExecStart=\S+", f"ExecStart={there}", (DEPLOY / "penstock.service").read_text(), flags=re.MULTILINE
    )
    (elsewhere / "penstock.service").write_text(text)
    result = subprocess.run(
        ["systemd-analyze", "verify", "./penstock.service"], capture_output=True, text=True, check=False
    )
    assert (
        result.returncode,
        [line for line in result.stderr.splitlines() if "penstock.service" in line],
    ) == (0, [])


def test_the_settings_in_deploy_are_right(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = said(capsys, "config", "check", str(DEPLOY / "penstock.toml"))
    assert (code, err) == (0, "")
    assert 'host = "127.0.0.1"' in out
    # What stands there to be uncommented is right as well.
    text = re.sub(r"^# (?=[a-z-]+ = )", "", (DEPLOY / "penstock.toml").read_text(), flags=re.MULTILINE)
    assert len(tomllib.loads(text)) > 3
    Path("keys").write_text("key")
    Path("penstock.toml").write_text(text.replace("/etc/penstock/api-keys", "keys"))
    assert said(capsys, "config", "check")[::2] == (0, "")


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"\\\n\s*", "", (DEPLOY / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in lines]


def test_the_image_runs_what_there_is_as_nobody_special() -> None:
    said = instructions()
    kinds = [kind for kind, _ in said]
    told: dict[str, Any] = dict(said)
    program, name, *arguments = json.loads(told["ENTRYPOINT"])
    assert (program, name) == ("penstock", "serve")
    assert parsed("serve", *arguments).params["port"] == int(told["EXPOSE"])
    assert told["USER"] not in ("root", "0")
    assert max(n for n, kind in enumerate(kinds) if kind == "RUN") < kinds.index("USER")
    health = re.findall(r"http://127\.0\.0\.1:(\d+)(/\w+)", told["HEALTHCHECK"])
    assert health == [(told["EXPOSE"], "/health")]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = {
        word
        for kind, what in said
        if kind == "RUN"
        for word in what.partition("tools/install.py ")[2].split()
        if word[0] != "-"
    }
    assert wanted <= set(extras)
    assert {"serve", "grammar", "otel"} <= wanted
    copied = [name for kind, what in said if kind == "COPY" for name in what.split()[:-1]]
    assert all((ROOT / name).exists() for name in copied)
    kept = (DEPLOY / "Dockerfile.dockerignore").read_text()
    assert all(f"!{name}\n" in kept for name in copied)


def test_commands_in_comments_and_on_the_page_name_flags_that_there_are() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    text = page + (DEPLOY / "Dockerfile").read_text() + (DEPLOY / "penstock.service").read_text()
    known = {
        flag
        for some in all_commands(root, click.Context(root)).values()
        for command in some
        for flag in flags_of(command)
    }
    foreign = {"--gpus", "--ulimit", "--stop-timeout", "--now", "--unit", "--output", "--help", "--build-arg"}
    foreign |= {"--yes", "--no-install-recommends"} | set(re.findall(r"--\w[\w-]*", told_to_docker()))
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)) <= known | foreign
    assert {command.split()[1] for command in re.findall(r"^penstock [a-z]+", page, re.MULTILINE)} <= set(
        COMMANDS
    )
    for file in re.findall(r"`(deploy/[\w.-]+)`", page):
        assert (ROOT / file).is_file()


def told_to_docker() -> str:
    return " ".join(what for kind, what in instructions() if kind in ("RUN", "HEALTHCHECK"))


def test_the_file_on_the_page_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    [text] = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "operations.md").read_text(), re.DOTALL)
    Path("penstock.toml").write_text(text)
    with patch.dict(
        os.environ, {"PENSTOCK_API_KEYS": "a"}
    ):  # Instead of the file of keys, which is not here.
        code, out, err = said(capsys, "config", "check")
    assert (code, err) == (0, "")
    assert "port = 9000" in out
    assert [entry.table for entry in read(Path("penstock.toml")).entries] == [
        "",
        "",
        "serve",
        "serve",
        "serve",
        "serve",
        "run",
    ]
