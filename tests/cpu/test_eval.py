"""`penstock eval` on the shipped model: it finds what it was trained to find, and what was found is told in
full."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

import answerers
from answerers import Answer, script
from penstock import LLM
from penstock.cli.main import main
from penstock.cli.prompt import SHIPPED_MODEL
from penstock.evals.run import EvalWork, evaluate

FEW = ["--device", "cpu", "--dtype", "float32", "--threads", "1"]


def test_the_shipped_model_finds_needles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, picture = tmp_path / "needle.json", tmp_path / "needle.png"
    asked = [
        "--lengths",
        "1024,512",
        "--depths",
        "3",
        "--samples",
        "1",
        "--out",
        str(out),
        "--picture",
        str(picture),
    ]
    assert main(["eval", "needle", *asked, *FEW]) == 0
    shown = capsys.readouterr()
    report = json.loads(out.read_text())
    cells = report["cells"]
    assert [(cell["length"], cell["depth"]) for cell in cells] == [
        (n, d) for n in (512, 1024) for d in (0, 0.5, 1)
    ]
    for length in (512, 1024):
        scores = [cell["score"] for cell in cells if cell["length"] == length]
        assert sum(scores) / len(scores) >= 0.95
        assert re.search(rf"^ +{length:,} .* to 100\.0%$", shown.out, re.MULTILINE)
        assert f"single: 3 prompts of {length - 64:,} tokens\n" in shown.err
    assert report["prompts"] == 6
    assert report["prompt_tokens"] == 3 * (512 + 1024 - 2 * 64)
    assert (report["eval"], report["text"], report["chat"], report["dtype"]) == (
        "needle",
        "generated",
        True,
        "float32",
    )
    assert report["machine"]["torch"]
    with Image.open(picture) as image:
        assert image.format == "PNG"


@pytest.mark.parametrize(
    "asked",
    [
        ["ruler", "--depths", "1", "--tasks", "keys"],
        *([["needle", "--depths", "1"]] if "PENSTOCK_THOROUGH" in os.environ else []),
    ],
)
def test_contexts_beyond_the_device_score_as_those_on_it(
    asked: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*more: str) -> dict[str, object]:
        assert main(["eval", *asked, "--lengths", "640", "--samples", "1", *FEW, "--json", *more]) == 0
        found: dict[str, object] = json.loads(capsys.readouterr().out)
        return found

    resident = run()
    few = ["--kv-tile", "128", "--kv-blocks", "24", "--block-size", "16"]
    streamed = run("--host-kv-memory", "64MiB", *few)
    assert resident["kv"] is None
    assert streamed["kv"]["copied"] > streamed["kv"]["sent"] > 0  # type: ignore[index]
    assert resident["prompts"] == streamed["prompts"]
    assert resident["cells"] == streamed["cells"]
    disk = ["--disk-kv-memory", "256MiB", "--kv-directory", str(tmp_path)]
    stored = run("--host-kv-memory", "1MiB", *disk, *few)
    assert stored["kv"]["room"] < stored["kv"]["sent"]  # type: ignore[index]
    assert resident["cells"] == stored["cells"]


def test_what_is_not_exact_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    few = [
        "--lengths",
        "512,640",
        "--depths",
        "1",
        "--samples",
        "1",
        "--json",
        "--kv-tile",
        "128",
        "--kv-blocks",
        "24",
    ]
    policy = [
        "--host-kv-dtype",
        "fp8",
        "--attention-policy",
        "topk:2",
        "--prefill-policy",
        "vertical_slash:2,4",
        "--missed-limit",
        "0.5",
    ]
    found = []
    for more in ([], policy):
        assert (
            main(["eval", "needle", *FEW, *few, "--block-size", "16", "--host-kv-memory", "64MiB", *more])
            == 0
        )
        found.append(json.loads(capsys.readouterr().out))
    exact, other = found
    assert exact["settings"] == {
        "device": "cpu",
        "dtype": "float32",
        "host_kv_memory": "64MiB",
        "kv_tile": 128,
        "max_length": 640,
        "block_size": 16,
        "kv_blocks": 24,
        "threads": 1,
    }
    inexact = {
        "host_kv_dtype": "fp8",
        "attention_policy": "topk:2",
        "prefill_policy": "vertical_slash:2,4",
        "missed_limit": 0.5,
    }
    assert other["settings"] == exact["settings"] | inexact
    assert 0 < other["kv"]["sent"] < 0.6 * exact["kv"]["sent"]
    assert 0 < other["kv"]["copied"] < 0.5 * exact["kv"]["copied"]


def test_lengths_beyond_what_the_model_was_trained_for_must_be_allowed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in SHIPPED_MODEL.iterdir():
        shutil.copy(file, tmp_path / file.name)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 500}))
    asked = [
        "eval",
        "needle",
        str(tmp_path),
        "--lengths",
        "512",
        "--depths",
        "1",
        "--samples",
        "1",
        "--json",
        *FEW,
    ]
    assert main(asked) == 2
    assert "--lengths 512 is more than the 500 positions the model was trained for" in capsys.readouterr().err
    assert main([*asked, "--beyond-trained"]) == 0
    assert [cell["length"] for cell in json.loads(capsys.readouterr().out)["cells"]] == [512]


def test_all_tasks_run_over_a_given_text_and_say_what_was_missed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(
        "It was a quiet day. Nobody came, and nobody went. The river was as slow as ever.\n\n" * 40
    )
    asked = ["--lengths", "384", "--depths", "1", "--samples", "1", "--text", str(text), "--json"]

    def run(*more: str) -> dict[str, object]:
        assert main(["eval", "ruler", *asked, *FEW, *more]) == 0
        shown = capsys.readouterr()
        assert shown.err == ""
        report: dict[str, object] = json.loads(shown.out)
        return report

    report = run()
    cells = {cell["task"]: cell for cell in report["cells"]}
    assert list(cells) == ["single", "keys", "variables", "words"]
    assert [cell["depth"] for cell in cells.values()] == [0.5, 0.5, 0.5, None]
    assert report["text"] == str(text)
    assert cells["single"]["score"] == 1
    for cell in cells.values():
        assert cell["low"] <= cell["score"] <= cell["high"]
        assert bool(cell["misses"]) == (cell["score"] < 1)
    for miss in cells["words"]["misses"]:  # the model was never shown such lists
        assert len(miss["expected"]) == 3
        assert miss["answer"]
    assert run("--tasks", "words")["cells"] == [cells["words"]]
    raw = run("--raw", "--tasks", "single")
    assert not raw["chat"]
    assert [cell["score"] for cell in raw["cells"]] == [1]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(device="cpu", dtype="float32", max_length=4096) as llm:
        yield llm


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize(
    ("tasks", "answer", "score"),
    [
        (("single", "keys"), answerers.fact, 1),
        (("single", "keys"), answerers.neighbour, 0),
        (("single", "keys"), answerers.shortened, 0),
        (("variables",), answerers.variables, 1),
        (("variables",), answerers.bullets, 1),
        (("variables",), answerers.only_the_first, 0.2),
        (("variables",), answerers.every_name, 0.5),
        (("variables",), answerers.other_chain, 0),
        (("words",), answerers.words, 1),
        (("words",), answerers.two_words_and_another, 0.5),
        (("words",), answerers.rarest_words, 0),
        (("single", "keys", "variables", "words"), answerers.nothing, 0),
    ],
)
def test_who_knows_the_answer_is_right_and_who_does_not_is_wrong(
    llm: LLM, tasks: tuple[str, ...], answer: Answer, score: float, raw: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole evaluation, but for the model: rules that read the prompt's text answer instead, within the
    tokens that an answer has."""
    monkeypatch.setattr(llm, "generate", None)  # to be put back
    script(llm, answer)
    work = EvalWork("ruler", tasks, lengths=(512, 4096), depths=3, samples=2, seed=2, raw=raw)
    report = evaluate(llm, work, "scripted", lambda _: None)
    assert {cell.task for cell in report.cells} == set(tasks)
    assert [cell.score for cell in report.cells] == pytest.approx([score] * len(report.cells))
    assert all(cell.samples == 2 and len(cell.misses) == (0 if score == 1 else 2) for cell in report.cells)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "100000"], r"--lengths 100000 is more than the 32768 positions"),
        (
            ["--lengths", "512,99999M", "--beyond-trained", "--device-memory", "100MiB"],
            r"a length of 104,856,551,424 tokens was asked for, but model and memory have room for",
        ),
        (
            ["--lengths", "32"],
            r"a length of 32 tokens has no room for the question, which takes \d+, and 64 for the answer",
        ),
        (["--lengths", "30000", "--device-memory", "200MiB"], r"30,?000"),
        (["/nowhere"], r"/nowhere"),
    ],
)
def test_what_cannot_be_asked_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "needle", *arguments, *FEW]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("penstock: error: ")
    assert err.count("\n") == 1
    assert re.search(message, err)
