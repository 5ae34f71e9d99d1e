"""Log-perplexity of a text: the windows that it is read in, and the number that transformers finds."""

import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from math import exp, inf, log, nan
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")
import transformers

from penstock.api.llm import LLM, SHIPPED_MODEL
from penstock.api.outputs import Completion
from penstock.base.errors import CheckpointError, RequestError
from penstock.cli.main import main
from penstock.evals import perplexity as module
from penstock.evals.perplexity import PerplexityReport, PerplexityWork, perplexity, windows
from penstock.evals.phrases import generated_text
from penstock.step.request import FinishReason

TEXT = generated_text(random.Random("perplexity"), 2500)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(device="cpu", dtype="float32", max_length=600) as llm:
        yield llm


@pytest.fixture(scope="module")
def peer() -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(SHIPPED_MODEL, dtype=torch.float32).eval()


@torch.no_grad()
def by_hand(peer: transformers.PreTrainedModel, tokens: Tensor, length: int, stride: int) -> float:
    """Mean loss of all tokens but the first, in windows as the documentation of transformers has them."""
    loss, done = 0.0, 1
    for start in range(0, len(tokens), stride):
        part = tokens[start : start + length]
        scores = peer(part[None]).logits[0, :-1].log_softmax(-1).gather(1, part[1:, None])[:, 0]
        fresh = start + len(part) - done
        loss -= float(scores[len(scores) - fresh :].sum())
        done = start + len(part)
        if done == len(tokens):
            break
    return loss / (len(tokens) - 1)


@pytest.mark.parametrize(("length", "stride"), [(128, None), (128, 64), (200, 33), (599, None)])
def test_transformers_finds_the_same(
    llm: LLM, peer: transformers.PreTrainedModel, length: int, stride: int | None
) -> None:
    report = perplexity(llm, PerplexityWork(TEXT, "stories", length, stride), "shipped", lambda _: None)
    tokens = torch.tensor(llm.encode(TEXT))
    assert report.tokens == len(tokens) - 1 > 500
    expected = by_hand(peer, tokens, length, stride or length - 1)
    assert report.log_perplexity == pytest.approx(expected, abs=2e-5)
    assert report.perplexity == pytest.approx(exp(expected), rel=1e-4)
    bits = expected * report.tokens / torch.log(torch.tensor(2.0)).item() / len(TEXT.encode())
    assert report.bits_per_byte == pytest.approx(bits, rel=1e-4)


@pytest.mark.parametrize(
    ("tokens", "length", "stride"), [(2, 8, 7), (8, 8, 7), (9, 8, 7), (100, 8, 3), (50, 2, 1)]
)
def test_every_token_but_the_first_counts_once(tokens: int, length: int, stride: int) -> None:
    counted = []
    for one in windows(tokens, length, stride):
        assert one.stop - one.start <= length
        assert one.start < one.counted < one.stop
        counted += range(one.counted, one.stop)
    assert counted == list(range(1, tokens))


def test_what_cannot_be_measured(llm: LLM) -> None:
    for work, message in (
        (PerplexityWork("", "nothing"), r"nothing has \d token"),
        (PerplexityWork(TEXT, "stories", 1000), "room for 2 to 599"),
        (PerplexityWork(TEXT, "stories", 128, 128), "a --stride of at most 127"),
    ):
        with pytest.raises(RequestError, match=message):
            perplexity(llm, work, "shipped", lambda _: None)


def test_a_text_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "folder.txt").mkdir()
    assert main(["eval", "perplexity", str(tmp_path)]) == 2
    assert capsys.readouterr().err.endswith("; name a file that can be read\n")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "stories.txt", tmp_path / "line.json"
    file.write_text(TEXT)
    flags = ["--device", "cpu", "--dtype", "float32", "--length", "64", "--tokens", "200"]
    assert main(["eval", "perplexity", str(file), *flags, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    line = json.loads(out.read_text())
    assert (line["eval"], line["tokens"], line["length"], line["stride"]) == ("perplexity", 199, 64, 63)
    assert f"log-perplexity {line['log_perplexity']:.4f} a token" in printed
    bits = line["log_perplexity"] * line["tokens"] / log(2)
    assert line["bits_per_byte"] == pytest.approx(bits / line["text_bytes"])
    assert 200 < line["text_bytes"] < 0.6 * len(TEXT.encode())  # Of the part that was read.
    assert main(["eval", "perplexity", str(file), str(SHIPPED_MODEL), *flags, "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["log_perplexity"] == pytest.approx(line["log_perplexity"], rel=1e-6)


def told(llm: LLM, work: PerplexityWork) -> tuple[PerplexityReport, list[str]]:
    lines = list[str]()
    return perplexity(llm, work, "shipped", lines.append), lines


def test_it_is_told_from_the_first_window_on(llm: LLM) -> None:
    report, lines = told(llm, PerplexityWork(TEXT, "stories", 16, 4, 500))
    counts = [int(line.partition(" of ")[0]) for line in lines]
    assert counts[:4] == [16, 16 + 4 * 2, 16 + 4 * 6, 16 + 4 * 14]
    assert counts[-1] == 500 == report.tokens + 1
    assert lines[-1].endswith(f"log-perplexity {report.log_perplexity:.4f}")


@pytest.mark.parametrize(
    ("logprob", "shown"), [(-709.0, "e+307"), (-710.0, "inf"), (-1e300, "inf"), (-inf, "inf")]
)
def test_a_perplexity_that_is_no_number(
    llm: LLM, logprob: float, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        module, "_loss", lambda _, tokens, some: -logprob * sum(w.stop - w.counted for w in some)
    )
    report, _ = told(llm, PerplexityWork(TEXT, "stories", 100, None, 300))
    assert report.log_perplexity == pytest.approx(-logprob)
    assert f"(perplexity {shown}" in str(report) or shown.startswith("e")
    line = json.loads(report.line(), parse_constant=lambda name: pytest.fail(name))
    assert (line["perplexity"] is None) == (shown == "inf")


@pytest.mark.parametrize("what", ["error", "nan"])
def test_logits_that_are_no_numbers(llm: LLM, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = llm.generate

    def generate(prompts: Any, params: Any) -> list[Completion]:
        found = real(prompts, params)
        if what == "error":
            outputs = (replace(found[-1].outputs[0], finish_reason=FinishReason.ERROR),)
            return [*found[:-1], replace(found[-1], outputs=outputs)]
        scores = found[-1].prompt_logprobs
        assert scores is not None
        wrong = (*scores[:-1], replace(scores[-1], logprob=nan))  # type: ignore[type-var]
        return [*found[:-1], replace(found[-1], prompt_logprobs=wrong)]

    monkeypatch.setattr(llm, "generate", generate)
    with pytest.raises(
        CheckpointError, match=r"not numbers \(NaN\) before token 100 of stories; try another"
    ):
        told(llm, PerplexityWork(TEXT, "stories", 100, None, 300))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/nowhere.txt"], "/nowhere.txt does not exist"),
        ([__file__, "/nowhere"], "/nowhere does not exist"),
        ([__file__, "--length", "1"], "'--length'"),
        (
            [__file__, "--length", "32768"],
            "--length 32768 with the token behind it is more than the 32768 positions the model was trained",
        ),
        ([__file__, "--length", "64", "--stride", "64"], "a --stride of at most 63"),
        ([__file__, "--out", "/nowhere/a.json"], "its directory does not exist"),
    ],
)
def test_refusals_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "perplexity", *arguments]) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert message in streams.err
    assert len(re.findall("\n", streams.err)) == 1
