"""Settings are declared once: checks, flags, keywords of `LLM` and docs/settings.md come from that."""

import importlib.util
import inspect
import re
import subprocess
import sys
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any

import click
import pytest

from penstock.base.config import CACHE, SHIPPED_MODEL, Config
from penstock.base.errors import ConfigError
from penstock.base.setting import AnyPath, Declared, described, keywords_of, setting, settings_of
from penstock.cli.main import root
from penstock.cli.options import as_flags, engine_config, settings_from
from penstock.server.fleet.scale import Scale
from penstock.server.settings import AnswerSettings, Listening, OnDemandSettings

ROOT = Path(__file__).resolve().parents[2]
READ = "penstock", "penstock.api.llm", "penstock.api.arguments", "penstock.base.*", "dataclasses", "pathlib"
"""What mypy must read to know what LLM takes."""


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("device", "tpu", "device 'tpu' is not known; choose auto, cpu, cuda or cuda:N"),
        ("device", "cuda:", "device 'cuda:' is not known"),
        ("device", "cpu:0", "device 'cpu:0' is not known"),
        ("device", None, "device None must be text"),
        ("dtype", "int8", "dtype 'int8' is not known; choose one of auto, float32, float16, bfloat16"),
        ("kv_store", None, "kv_store None is not known; choose one of eager, lazy, off"),
        ("sketch_bits", True, "sketch_bits True is not known; choose one of 0, 4, 8"),
        ("sketch_bits", 5, "sketch_bits 5 is not known; choose one of 0, 4, 8"),
        ("missed_limit", 1.5, "missed_limit 1.5 must be a number from 0 to 1"),
        ("missed_limit", float("nan"), "missed_limit nan must be a number from 0 to 1"),
        ("missed_limit", "a", "missed_limit 'a' must be a number from 0 to 1"),
        ("max_length", 0, "max_length 0 must be a whole number above zero"),
        ("max_length", 1.0, "max_length 1.0 must be a whole number above zero"),
        ("kv_blocks", True, "kv_blocks True must be a whole number above zero"),
        ("kv_tile", 2**31, "kv_tile 2147483648 must be a whole number above zero, at most 2,147,483,647"),
        ("block_size", None, "block_size None must be a whole number above zero"),
        ("tensor_parallel", "2", "tensor_parallel '2' must be a whole number above zero"),
        ("attention_policy", 3, "attention_policy 3 must be text"),
        ("prefill_policy", "topk", "attention policy 'topk' is not known; write full, window:SINKS,RECENT"),
        ("kv_directory", None, "kv_directory None must be a path"),
        ("cache", "a\0b", "must be a path"),
        ("graphs", "no", "graphs 'no' must be True or False"),
        ("device_memory", "much", "device_memory: cannot read 'much' as a size; write it like 16GiB"),
        ("device_memory", "0", "device_memory: size '0' must be above zero"),
        ("host_memory", 1.5, "host_memory: a size is text such as 16GiB or 80%"),
        ("host_kv_memory", "-1", "host_kv_memory: cannot read '-1' as a size"),
        ("lora_modules", "a", "lora_modules 'a' must be name=path"),
        ("lora_modules", ["a=x", "=y"], "lora_modules '=y' must be name=path"),
        ("lora_modules", {"a": ""}, "lora_modules 'a=' must be name=path"),
        ("lora_modules", ["a=x", "a=y"], "lora_modules has 'a' twice; give each its own name"),
        ("lora_modules", 3, "lora_modules 3 must be texts name=path, or a mapping from names to paths"),
        ("max_loras", -1, "max_loras -1 must be a whole number from 0 to 1,024"),
    ],
)
def test_what_is_not_allowed_is_refused(name: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        Config(**{name: value})  # type: ignore[arg-type]


def test_what_is_allowed_is_held_in_one_form() -> None:
    config = Config(None, kv_directory="a", cache=Path("b"), host_kv_memory="0", device_memory="80%")
    assert (config.model, config.kv_directory, config.cache) == (SHIPPED_MODEL, Path("a"), Path("b"))
    assert (config.host_kv_memory, config.device_memory) == ("0", "80%")
    assert replace(config, model="x", host_kv_memory=0).model == Path("x")
    assert Config(device="cuda:12", sketch_bits=0, missed_limit=1, max_length=2**31 - 1).kv_directory == CACHE
    assert config.changed() == {
        "kv_directory": "a",
        "cache": "b",
        "host_kv_memory": "0",
        "device_memory": "80%",
    }
    assert Config().changed() == {}
    for modules in ({"a": Path("x=y"), "b": "z"}, ["a=x=y", "b=z"], ("a=x=y", "b=z")):
        assert Config(lora_modules=modules).lora_modules == ("a=x=y", "b=z")
    assert Config(lora_modules="a=x").lora_modules == ("a=x",)


def test_several_adapters_behind_one_flag() -> None:
    """As vLLM has it; what is no name=path is something else again."""
    command = root.get_command(click.Context(root), "run")
    assert command is not None
    given = ["--lora-modules", "a=x", "b=y=z", "--lora-modules", "-c=w", "--seed", "3", "d=text"]
    made = command.make_context("run", given, parent=click.Context(root, info_name="penstock"))
    assert made.params["lora_modules"] == ("a=x", "b=y=z", "-c=w")
    assert (made.params["seed"], made.params["arguments"]) == (3, ("d=text",))


@pytest.mark.parametrize("name", ["run", "chat", "serve", "batch"])
def test_flags_without_a_value_are_the_defaults(name: str, tmp_path: Path) -> None:
    context = click.Context(root, info_name="penstock")
    command = root.get_command(context, name)
    assert command is not None
    needed = {"run": ["x"], "batch": ["in", "out"]}.get(name, [])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        made = command.make_context(name, needed, parent=context)
    assert engine_config(made, SHIPPED_MODEL, None) == Config()
    if name == "serve":
        assert settings_from(Listening, made.params) == Listening()
        assert settings_from(AnswerSettings, made.params) == AnswerSettings()
        assert settings_from(Scale, made.params, least=1, most=2) == Scale(1, 2)


def test_every_flag_says_what_it_does_and_its_default() -> None:
    context = click.Context(root, info_name="penstock")
    command = root.get_command(context, "serve")
    assert command is not None
    flags = {one.name: one for one in command.params}
    kinds = (Listening, AnswerSettings, OnDemandSettings, Scale)
    server = [one for kind in kinds for one in settings_of(kind)]
    for one in (*settings_of(Config), *server):
        assert re.fullmatch(r"[A-Z].*\.", one.help)
        assert re.fullmatch(r"([A-Za-z0-9].*\.)?", one.details)
        assert one.shown_default != "None"
        if one.name != "model":
            flag = flags[one.name]
            assert isinstance(flag, click.Option)
            assert (flag.help or "").startswith(as_flags(one.sentence))
            assert one.default is False or as_flags(f"[{one.shown_default}]") in (flag.help or "")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"port": 70000}, "port 70000 must be a whole number from 0 to 65,535"),
        ({"port": -1}, "port -1 must be a whole number from 0 to 65,535"),
        ({"request_timeout": 0}, "request_timeout 0 must be a number from 0.001 on"),
        ({"patience": float("nan")}, "patience nan must be a number from 0 on"),
        ({"host": None}, "host None must be text"),
    ],
)
def test_what_a_server_cannot_do_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        Listening(**settings)
    with pytest.raises(ConfigError, match="tool_parser 'x' is not known; choose one of auto, none"):
        AnswerSettings(tool_parser="x")


@dataclass(frozen=True)
class Toy(Declared):
    """A toy's settings."""

    model: AnyPath = setting(Path("here"), help="Where it is.")
    _: KW_ONLY
    size: int = setting(3, help="How large it is.", details="In cubits.", limits=(2, 9))
    kind: str = setting("a", help="What it is.", choices=("a", "b"))
    noted: int = 0


class Held:
    """A class of which the constructor takes a toy's settings."""

    @keywords_of(Toy)
    def __init__(self, toy: Toy) -> None:
        self.toy = toy


def test_a_constructor_takes_the_keywords_of_a_declaration_and_says_so() -> None:
    assert Held("there", size=4, noted=5).toy == Toy(Path("there"), size=4, noted=5)
    with pytest.raises(ConfigError, match="size 1 must be a whole number from 2 to 9"):
        Held(size=1)
    with pytest.raises(TypeError, match=r"^Held\(\) got an unexpected keyword argument 'sise'"):
        Held(sise=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"'sise'; did you mean size\?$"):
        Held(sise=1)  # type: ignore[call-arg]
    assert str(inspect.signature(Held)).splitlines() == [
        "(",
        "    model: str | Path = 'here',",
        "    *,",
        "    size: int = 3,",
        "    kind: str = 'a',",
        "    noted: int = 0,",
        ")",
    ]
    assert [*inspect.signature(Held).parameters] == ["model", "size", "kind", "noted"]
    assert inspect.signature(Held).parameters["size"].default == 3
    assert Held.__init__.__doc__ == described(Toy)
    assert described(Toy).splitlines() == [
        "model: Where it is. [here]",
        "size: How large it is. In cubits. [3]",
        "kind: What it is: a or b. [a]",
    ]


def test_a_checker_of_types_knows_each_keyword_of_llm(tmp_path: Path) -> None:
    right = (
        'LLM(None, device="cpu", kv_directory="x", cache=Path("y"), progress=False, device_memory=1)',
        'LLM("a", max_length=None, device_memory="80%", graphs=False)',
        'replace(Config("a"), cache=Path("b")).cache.name',
    )
    wrong = {
        "LLM(device=3)": 'Argument "device" to "LLM" has incompatible type "int"; expected "str"',
        "LLM(cache=None)": 'Argument "cache" to "LLM" has incompatible type "None"; expected "str | Path"',
        "LLM(kv_blok=3)": 'Unexpected keyword argument "kv_blok" for "LLM"; did you mean "kv_blocks"?',
        'LLM("a", "cpu")': 'Too many positional arguments for "LLM"',
        'Config(kv_blocks="3")': 'Argument "kv_blocks" to "Config" has incompatible type "str"',
    }
    imports = (
        "from dataclasses import replace",
        "from pathlib import Path",
        "from penstock import LLM",
        "from penstock.base.config import Config",
    )
    (tmp_path / "use.py").write_text("\n".join([*imports, *right, *wrong]))
    (tmp_path / "mypy.ini").write_text(
        f"[mypy]\nstrict = true\nmypy_path = {ROOT / 'src'}\nfollow_imports = skip\n"
        f"ignore_missing_imports = true\n[mypy-{','.join(READ)}]\nfollow_imports = silent\n"
    )
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--no-error-summary", "use.py"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False).stdout
    first = len(imports) + len(right) + 1
    lines = [line for line in found.splitlines() if "error:" in line]
    assert len(lines) == len(wrong), found
    for number, (line, message) in enumerate(zip(lines, wrong.values(), strict=True), first):
        assert line.startswith(f"use.py:{number}: error: {message}"), line


def test_the_page_of_settings_is_what_is_declared() -> None:
    spec = importlib.util.spec_from_file_location("settings_table", ROOT / "tools" / "settings_table.py")
    assert spec is not None
    assert spec.loader is not None
    table = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(table)
    assert table.PAGE.read_text(encoding="utf-8") == table.page(), "python tools/settings_table.py --write"
    assert "(docs/settings.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
