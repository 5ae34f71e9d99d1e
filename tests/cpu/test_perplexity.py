"""Log-perplexity of a text: the windows that it is read in, and the number that transformers finds."""

import json
import random
import re
from collections.abc import Iterator
from math import exp, log
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")
import transformers

from penstock.api.llm import LLM, SHIPPED_MODEL
from penstock.base.errors import RequestError
from penstock.cli.main import main
from penstock.evals.perplexity import PerplexityWork, perplexity, windows
from penstock.evals.phrases import generated_text

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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/nowhere.txt"], "/nowhere.txt does not exist"),
        ([__file__, "/nowhere"], "/nowhere does not exist"),
        ([__file__, "--length", "1"], "'--length'"),
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
