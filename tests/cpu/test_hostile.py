"""Odd values and broken outputs: one clear line, and an engine that serves on."""

import math
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import forks
import tiny
from penstock import LLM, SamplingParams
from penstock.api.text.detokenize import Detokenizer
from penstock.base.errors import RequestError

HUGE = 10**5000
"""More digits than Python writes out."""


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(tiny.checkpoint("llama"), device="cpu", dtype="float32", max_length=64, check=True) as llm:
        yield llm


@pytest.mark.parametrize(
    "settings",
    [
        *(
            {name: sign * HUGE}
            for name in ("temperature", "top_k", "top_p", "seed", "n", "max_tokens", "min_tokens")
            for sign in (1, -1)
        ),
        {"logit_bias": {3: HUGE}},
        {"logit_bias": {HUGE: 1.0}},
        {"logit_bias": [3]},
        {"logit_bias": None},
        {"stop_token_ids": [HUGE]},
        {"stop_token_ids": [None]},
        {"stop_token_ids": 5},
        {"stop": 5},
        {"stop": [None]},
        {"stop": "\udcff"},
        {"repetition_penalty": 1e-300},
        {"n": 10**8},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_values_beyond_all_bounds(settings: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**settings)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("params", [{"temperature": 0}, "x", 5, [{"temperature": 0}]], ids=str)
def test_params_that_are_none(llm: LLM, params: Any) -> None:
    with pytest.raises(RequestError):
        llm.generate([[3]], params)


@pytest.mark.parametrize(
    "prompt",
    [None, 5, {"role": "user", "content": "x"}, {3}, b"x", [HUGE]],
    ids=lambda prompt: type(prompt).__name__,
)
def test_stream_of_what_is_no_prompt(llm: LLM, prompt: Any) -> None:
    with pytest.raises(RequestError):
        llm.stream(prompt)


def test_nothing_left_to_choose(llm: LLM) -> None:
    vocab = range(llm.spec.vocab_size)
    never = dict.fromkeys(vocab, -math.inf)
    for params in (SamplingParams(logit_bias=never), SamplingParams(stop_token_ids=[*vocab], min_tokens=1)):
        with pytest.raises(RequestError, match="forbid all"):
            llm.generate([3], params)
    [only] = llm.generate([3], SamplingParams(logit_bias={**never, 7: 0.0}, max_tokens=4, temperature=1))
    assert only.tokens == (7,) * 4
    assert llm.stats().kv_blocks_free == llm.stats().kv_blocks


class _Pieces:
    """A tokenizer of the one character x."""

    special = frozenset[int]()

    def of(self, token: int) -> tuple[bytes, bytes]:
        return b"x", b"x"


def test_a_stop_string_far_longer_than_the_text() -> None:
    detokenizer = Detokenizer(_Pieces(), ["x" * 3_000_000], False, True, True)  # type: ignore[arg-type]  # All that is asked of it.
    assert [detokenizer.push([0]) for _ in range(20)] == [""] * 20
    assert detokenizer.finish() == "x" * 20


@pytest.mark.parametrize(
    ("where", "code", "words"),
    [
        ("> /dev/full", 2, "output cannot be written"),
        (">&-", 2, "stdout is closed"),
        ("2> /dev/full", 0, ""),
    ],
)
def test_output_that_cannot_be_written(where: str, code: int, words: str) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full on this system")
    command = [sys.executable, "-m", "penstock", "run", "hi", "--max-tokens", "2", "--quiet"]
    if where == ">&-":  # Of a Python that finds it closed when it starts.
        done = subprocess.run(
            ["sh", "-c", f"exec {shlex.join(command)} {where}"],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    else:
        with open("/dev/full", "wb") as none:
            streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | {
                "stderr" if where[0] == "2" else "stdout": none
            }
            with forks.LoadedPopen(command, stdin=subprocess.DEVNULL, text=True, **streams) as process:
                out, err = process.communicate(timeout=120)
        done = subprocess.CompletedProcess(command, process.returncode, out or "", err or "")
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert "internal" not in done.stderr
    assert bool(done.stdout.strip()) == (code == 0)
