"""LoRA adapters of a server: asked for as models, loaded and unloaded while others are answered."""

import json
import shutil
import sys
from collections.abc import Iterator
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any
from unittest.mock import patch

import openai
import pytest

pytest.importorskip("transformers")

import adapters
from penstock import LLM, SamplingParams
from penstock.api.llm import SHIPPED_MODEL
from penstock.base.errors import AdapterError, ConfigError
from penstock.cli.commands import run
from penstock.cli.main import main
from penstock.server.http.errors import error_response
from servers import COUNT, FLAGS, SETTINGS, STORY, TALK, Server, Stream, serving

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT)


@pytest.fixture(scope="module")
def some(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: adapters.write(folder / name, SHIPPED_MODEL, 4, ["q_proj", "down_proj"], seed=seed)
        for seed, name in enumerate(("red", "blue"))
    }


@pytest.fixture(scope="module")
def right(some: dict[str, Path]) -> dict[str, str]:
    """What the model and each adapter say."""
    with LLM(**SETTINGS, lora_modules=some) as llm:
        said = llm.generate([STORY] * 3, GREEDY, lora=["red", "blue", None])
        talk = llm.chat(TALK, GREEDY, lora="red")
    texts = dict(zip(("red", "blue", "shipped"), (one.text for one in said), strict=True))
    assert len(set(texts.values())) == 3
    return texts | {"talk": talk.text}


@pytest.fixture(scope="module")
def server(some: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    loads = ("--lora-modules", f"red={some['red']}", "--allow-runtime-lora-updating", "--max-loras", "2")
    with serving(tmp_path_factory.mktemp("server"), *FLAGS, "--port", "0", *loads) as server:
        yield server.wait()


def text(server: Server, model: str, **fields: Any) -> Any:
    status, _, said = server.complete(model=model, **fields)
    return said["choices"][0]["text"] if status == 200 else (status, said["error"]["message"])


def test_an_adapter_is_a_model(server: Server, right: dict[str, str]) -> None:
    assert text(server, "shipped") == right["shipped"]
    assert text(server, "red") == text(server, "shipped:red") == right["red"]
    for absent in ("blue", "shipped:blue", "red:shipped", ":red"):
        assert text(server, absent) == (
            404,
            f"the model {absent!r} does not exist here; there is shipped, red",
        )
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        chat = client.chat.completions.create(model="red", messages=TALK, temperature=0, max_tokens=COUNT)  # type: ignore[call-overload]
        assert (chat.model, chat.choices[0].message.content) == ("red", right["talk"])
        assert [one.id for one in client.models.list().data] == ["shipped", "red"]
        model = client.models.retrieve("red")
        assert (model.id, model.parent) == ("red", "shipped")  # type: ignore[attr-defined]
    ollama = {"model": "red:latest", "prompt": STORY, "raw": True, "stream": False}
    options = {"temperature": 0, "num_predict": COUNT}
    assert server.ask("POST", "/api/generate", ollama | {"options": options})[2]["response"] == right["red"]
    assert [one["name"] for one in server.ask("GET", "/api/tags")[2]["models"]] == ["shipped", "red"]


def test_it_is_loaded_and_unloaded_while_others_are_answered(
    server: Server, some: dict[str, Path], right: dict[str, str]
) -> None:
    def ask(path: str, **body: Any) -> tuple[int, Any]:
        status, _, said = server.ask("POST", path, body)
        return status, said.decode() if isinstance(said, bytes) else said["error"]["message"]

    with Stream(server) as stream:
        assert stream.event()
        blue = {"lora_name": "blue", "lora_path": str(some["blue"])}
        assert ask(LOAD, **blue) == (200, "Success: LoRA adapter 'blue' added successfully.")
        assert text(server, "blue") == right["blue"]
        status, message = ask(LOAD, **blue)
        assert (status, message) == (
            400,
            "the LoRA adapter 'blue' is loaded already; unload it first, or give another name",
        )
        for name in ("shipped", "shipped:red"):
            status, message = ask(LOAD, **blue | {"lora_name": name})
            assert (status, message.partition(" is ")[0]) == (400, repr(name))
        status, message = ask(LOAD, lora_name="x", lora_path=str(some["blue"].parent))
        assert status == 400
        assert message.startswith(f"{some['blue'].parent} is no LoRA adapter: it has no adapter_config.json")
        assert ask(UNLOAD, lora_name="blue") == (200, "Success: LoRA adapter 'blue' removed successfully.")
        assert text(server, "blue")[0] == 404
        assert ask(UNLOAD, lora_name="blue") == (404, "the LoRA adapter 'blue' is not loaded; there is red")
        assert stream.event()


def test_one_that_goes_between_being_taken_and_begun_is_not_found() -> None:
    told = error_response(AdapterError("the LoRA adapter 'a' is not loaded; there is none"))
    assert told.status_code == 404
    assert b'"model_not_found"' in bytes(told.body)


def test_one_that_was_lost_in_a_sleep_is_refused(
    server: Server, some: dict[str, Path], right: dict[str, str], tmp_path: Path
) -> None:
    green = {"lora_name": "green", "lora_path": str(shutil.copytree(some["blue"], tmp_path / "green"))}
    assert server.ask("POST", LOAD, green)[0] == 200
    adapters.change(tmp_path / "green", lora_alpha=17)
    assert server.ask("POST", "/sleep?level=2")[0] == 200
    for path, body in ((LOAD, green), (UNLOAD, {"lora_name": "green"})):
        assert server.ask("POST", path, body)[0] == 503
    assert text(server, "green")[0] == 503
    assert server.ask("POST", "/wake_up")[0] == 200
    assert [text(server, name) for name in ("shipped", "red")] == [right["shipped"], right["red"]]
    status, message = text(server, "shipped:green")
    assert (status, message.rpartition("since ")[0]) == (
        404,
        "the LoRA adapter 'green' could not be loaded again after a sleep, ",
    )
    assert [one["id"] for one in server.ask("GET", "/v1/models")[2]["data"]] == ["shipped", "red"]
    assert server.ask("POST", UNLOAD, {"lora_name": "green"})[0] == 200
    assert text(server, "green")[1] == "the model 'green' does not exist here; there is shipped, red"


def test_models_on_demand_have_none(some: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    with patch("penstock.server.run.serve", side_effect=AssertionError("served")):
        for flags in (["--lora-modules", f"red={some['red']}"], ["--allow-runtime-lora-updating"]):
            assert main(["serve", "--on-demand", *flags]) == 2
            assert "models that are loaded on demand have no LoRA adapters; leave" in capsys.readouterr().err


def test_the_command_line(
    some: dict[str, Path],
    right: dict[str, str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usual = [*FLAGS[:6], "-q", "--temperature", "0", "--max-tokens", str(COUNT)]
    flags = ["run", STORY, "--no-echo", *usual]
    modules = ["--lora-modules", *(f"{name}={path}" for name, path in some.items())]
    assert main([*flags, *modules, "--lora", "blue"]) == 0
    assert capsys.readouterr().out.rstrip("\n") == right["blue"].rstrip("\n")
    assert main([*flags, *modules, "--lora", "red", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == right["red"]
    monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(f"{TALK[0]['content']}\n".encode())))
    assert main(["chat", *usual, *modules, "--lora", "red"]) == 0
    assert capsys.readouterr().out.strip() == right["talk"].strip()
    with patch.object(run, "loaded", side_effect=AssertionError("loaded, though it was clear before")):
        assert main([*flags, *modules, "--lora", "green"]) == 2
        assert "the LoRA adapter 'green' is not loaded; there is red, blue" in capsys.readouterr().err
    with patch.object(run, "loaded", side_effect=ConfigError("so far")):
        for more in ([], ["-q"], modules, [*modules, "-q"]):
            assert main(["run", STORY, "--device", "cpu", *more]) == 2
            told = "answered without LoRA adapters; --lora takes one of: red, blue" in capsys.readouterr().err
            assert told is (more == modules)
    prompt = ["--lora-modules", "red=1", "blue=2", "Solve x=3", "--device", "cpu"]
    assert run.command._repeated(prompt) == [*prompt[:2], "--lora-modules", *prompt[2:]]  # type: ignore[attr-defined]
    assert main([*flags, "--lora-modules", "red"]) == 2
    assert "lora_modules 'red' must be name=path" in capsys.readouterr().err


def test_a_batch(
    some: dict[str, Path], right: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["red", "shipped:blue", "shipped", None, "green"]
    body = {"prompt": STORY, "temperature": 0, "max_tokens": COUNT}
    lines = [
        {"custom_id": str(name), "url": "/v1/completions", "body": body | ({"model": name} if name else {})}
        for name in names
    ]
    asked, answers = tmp_path / "asked.jsonl", tmp_path / "answers.jsonl"
    asked.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    flags = [str(asked), str(answers), *FLAGS[:6], "--max-sequences", "4"]
    flags += ["--name", "shipped", "--lora-modules", *(f"{name}={path}" for name, path in some.items())]
    assert main(["batch", *flags]) == 3
    found = {one["custom_id"]: one["response"] for one in map(json.loads, answers.read_text().splitlines())}
    texts = {name: one["body"]["choices"][0]["text"] for name, one in found.items() if name != "green"}
    base = right["shipped"]
    assert texts == {"red": right["red"], "shipped:blue": right["blue"], "shipped": base, "None": base}
    assert "is not the one that runs here: shipped, red, blue" in found["green"]["body"]["error"]["message"]
    capsys.readouterr()
    assert main(["batch", *flags, "--name", "blue"]) == 2
    assert "the LoRA adapter 'blue' has a name of the model's, or begins with" in capsys.readouterr().err
