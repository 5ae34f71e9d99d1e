"""`penstock eval` on the shipped model: it finds what it was trained to find, and what was found is told in full."""

import json
import re
from pathlib import Path

import pytest
from PIL import Image

from penstock.cli.main import main

FEW = ["--device", "cpu", "--dtype", "float32", "--threads", "1"]


def test_the_shipped_model_finds_needles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, picture = tmp_path / "needle.json", tmp_path / "needle.png"
    asked = ["--lengths", "2048,512", "--depths", "5", "--samples", "2", "--out", str(out), "--picture", str(picture)]
    assert main(["eval", "needle", *asked, *FEW]) == 0
    shown = capsys.readouterr()
    report = json.loads(out.read_text())
    cells = report["cells"]
    assert [(cell["length"], cell["depth"]) for cell in cells] == [(n, d) for n in (512, 2048) for d in (0, 0.25, 0.5, 0.75, 1)]
    for length in (512, 2048):
        scores = [cell["score"] for cell in cells if cell["length"] == length]
        assert sum(scores) / len(scores) >= 0.95
        assert re.search(rf"^ +{length:,} .* to 100\.0%$", shown.out, re.MULTILINE)
        assert f"single: 10 prompts of {length - 64:,} tokens\n" in shown.err
    assert report["prompts"] == 20
    assert report["prompt_tokens"] == 10 * (512 + 2048 - 2 * 64)
    assert (report["eval"], report["text"], report["chat"], report["dtype"]) == ("needle", "generated", True, "float32")
    assert report["machine"]["torch"]
    with Image.open(picture) as image:
        assert image.format == "PNG"


@pytest.mark.parametrize("asked", [["needle", "--depths", "3"], ["ruler", "--depths", "1", "--tasks", "single,keys,variables"]])
def test_contexts_on_the_host_score_as_those_on_the_device(asked: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    def run(*more: str) -> dict[str, object]:
        assert main(["eval", *asked, "--lengths", "512,1024", "--samples", "2", *FEW, "--json", *more]) == 0
        found: dict[str, object] = json.loads(capsys.readouterr().out)
        return found

    resident = run()
    streamed = run("--host-kv-memory", "64MiB", "--kv-tile", "128", "--kv-blocks", "24", "--block-size", "16")
    assert resident["kv"] is None
    assert streamed["kv"]["copied"] > streamed["kv"]["sent"] > 0  # type: ignore[index]
    assert resident["prompts"] == streamed["prompts"]
    assert resident["cells"] == streamed["cells"]


def test_all_tasks_run_over_a_given_text_and_say_what_was_missed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("It was a quiet day. Nobody came, and nobody went. The river was as slow as ever.\n\n" * 40)
    asked = ["--lengths", "512", "--depths", "1", "--samples", "2", "--text", str(text), "--json"]

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
    assert run()["cells"] == report["cells"]
    raw = run("--raw", "--tasks", "single")
    assert not raw["chat"]
    assert [cell["score"] for cell in raw["cells"]] == [1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "100000"], r"max_length 100000 is more than the 32768 positions"),
        (["--lengths", "32"], r"a length of 32 tokens has no room for the question, which takes \d+, and 64 for the answer"),
        (["--lengths", "8192", "--device-memory", "60MiB"], r"8,?192"),
        (["/nowhere"], r"/nowhere"),
    ],
)
def test_what_cannot_be_asked_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "needle", *arguments, *FEW]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("penstock: error: ")
    assert err.count("\n") == 1
    assert re.search(message, err)
