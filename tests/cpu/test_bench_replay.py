"""A trace that is served by the engine is found again on every tier, is answered as without tiers, and is
told in full."""

import dataclasses
import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import tiny
from penstock.arch.layout import kv_layout
from penstock.base.config import Config
from penstock.base.errors import ConfigError, RequestError
from penstock.bench.speed.recorded import ReplayScale, Workload
from penstock.bench.speed.replay import ReplayBench, ReplayReport, replay
from penstock.bench.speed.setup import Target
from penstock.bench.traces.simulation import requests
from penstock.cli.main import main
from penstock.kv.movement.sizes import record_bytes
from penstock.sched import arrivals
from penstock.sched.rates import TransferRates
from penstock.weights.checkpoint.reader import Checkpoint

TALKS, TURNS, LENGTH = 6, 4, 3
"""Conversations that take turns; each prompt is longer by so many blocks of the trace. All begin with the
same two."""


@pytest.fixture
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is on another tier is waited for, however fast this machine computes just now."""
    monkeypatch.setattr(TransferRates, "loading_pays", lambda *_: True)
    monkeypatch.setattr(TransferRates, "computed_first", lambda *_: 0)
    monkeypatch.setattr(arrivals, "_LEAST_PATIENCE", 30.0)


def write(path: Path, prompts: Sequence[Sequence[int]], **more: object) -> Path:
    """A trace in which the last block of a prompt has 256 tokens, and a request comes every 20 ms."""
    lines = (
        {
            "timestamp": 20 * at,
            "input_length": 512 * len(keys) - 256,
            "output_length": 200,
            "hash_ids": list(keys),
        }
        | more
        for at, keys in enumerate(prompts)
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Of a prompt, the last block is its own: the next turn has another in its place."""
    prompts = []
    for turn in range(1, TURNS + 1):
        for talk in range(TALKS):
            first = 1000 * (talk + 1)
            prompts.append([7, 3, *range(first, first + LENGTH * turn), first + 500 + turn])
    return write(tmp_path / "trace.jsonl", prompts)


SCALED = frozenset(("block_tokens", "output", "speed"))


def job(trace: Path, directory: Path, **more: object) -> ReplayBench:
    """Blocks of 8 tokens, two for one of the trace: 40 on the device, 48 on the host, 400 on disk."""
    path = tiny.checkpoint("llama")
    with Checkpoint.open(path) as model:
        layout = kv_layout(model.spec, "float32", 8)
    config = Config(
        path,
        device="cpu",
        dtype="float32",
        block_size=8,
        max_step_tokens=32,
        max_sequences=2,
        kv_blocks=40,
        host_kv_memory=48 * layout.block_bytes,
        disk_kv_memory=400 * layout.layers * record_bytes(layout),
        kv_directory=directory,
        check=True,
    )
    scale = ReplayScale(
        trace, **{"block_tokens": 16} | {name: more.pop(name) for name in SCALED & more.keys()}
    )
    return ReplayBench(Target("tiny", path, config), scale, requests=1000, **more)


def told(report: ReplayReport) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = json.loads(report.line())
    return found


def common(some: Sequence[int], others: Sequence[int]) -> int:
    """How many of the first are the same."""
    return next(
        (at for at, (one, other) in enumerate(zip(some, others, strict=False)) if one != other),
        min(len(some), len(others)),
    )


def test_prompts_begin_alike_where_their_hashes_do(trace: Path, tmp_path: Path) -> None:
    recorded = requests(trace)
    work, again = (
        Workload.of(job(trace, tmp_path).scale, recorded, 512, tiny.VOCAB, "tiny") for _ in range(2)
    )
    prompts = [work.prompt(ask) for ask in work.requests]
    assert prompts == [again.prompt(ask) for ask in again.requests]
    assert [len(prompt) for prompt in prompts] == [16 * len(one.keys) - 8 for one in recorded]
    assert all(0 <= token < tiny.VOCAB for prompt in prompts for token in prompt)
    for one, prompt in zip(recorded, prompts, strict=True):
        for another, other in zip(recorded, prompts, strict=True):
            alike = min(16 * common(one.keys, another.keys), len(prompt), len(other))
            assert alike <= common(prompt, other) < alike + work.digits
    assert {ask.output for ask in work.requests} == {7}


def test_two_blocks_are_never_the_same_tokens(tmp_path: Path) -> None:
    rng = random.Random(0)
    trace = write(
        tmp_path / "many.jsonl", [[rng.randrange(-(2**70), 2**70)] for _ in range(9000)], input_length=512
    )
    work = Workload.of(
        ReplayScale(trace, block_tokens=2),
        requests(trace),
        512,
        tiny.VOCAB,
        "tiny",
    )
    assert len({tuple(work.prompt(ask)) for ask in work.requests}) == 9000
    with pytest.raises(
        ConfigError, match="9,000 blocks cannot all differ with 1 tokens of a vocabulary of 97 each"
    ):
        Workload.of(
            ReplayScale(trace, block_tokens=1),
            requests(trace),
            512,
            tiny.VOCAB,
            "tiny",
        )


@pytest.mark.usefixtures("_patient")
def test_what_is_found_on_each_tier_and_that_answers_are_the_same(trace: Path, tmp_path: Path) -> None:
    report = replay(job(trace, tmp_path / "kv"))
    run, without = report.run, report.without
    assert without is not None
    assert (report.requests, report.equal_outputs) == (TALKS * TURNS, TALKS * TURNS)
    assert all(run.found[tier].tokens > 0 for tier in ("device", "host", "disk"))
    assert (
        sum(found.tokens for found in without.found.values())
        == without.found["device"].tokens
        < report.known_tokens
    )
    assert sum(found.tokens for found in run.found.values()) + run.computed_tokens >= report.prompt_tokens
    assert sum(found.share for found in run.found.values()) == pytest.approx(
        sum(found.tokens for found in run.found.values()) / report.prompt_tokens
    )
    assert report.known_tokens == 16 * (
        2 * (TALKS - 1) + TALKS * sum(2 + LENGTH * turn for turn in range(1, TURNS))
    )
    assert all(run.ways[way].bytes > 0 < run.ways[way].rate for way in ("up", "down", "inward", "outward"))
    assert not any(way.bytes for way in without.ways.values())
    assert run.given_up["device"] > 0 < run.given_up["host"]
    assert run.computed_tokens < without.computed_tokens
    assert 0 < run.ttft_ms.p50 <= run.ttft_ms.p95 <= run.ttft_ms.p99 <= run.ttft_ms.most
    assert list((tmp_path / "kv").iterdir()) == []
    shown, line = str(report), told(report)
    assert f"{report.requests} of {report.requests} answers are the same in both" in shown
    assert f"{run.found['disk'].tokens:,} tokens" in shown
    assert (line["bench"], line["kept"], line["speed"]) == ("replay", False, None)
    assert line["run"]["found"]["disk"]["tokens"] == run.found["disk"].tokens  # type: ignore[index]


@pytest.mark.usefixtures("_patient")
def test_what_was_kept_is_found_by_the_next_run(trace: Path, tmp_path: Path) -> None:
    asked = dataclasses.replace(
        job(trace, tmp_path / "kv", keep=True, compare=False, speed=2.0), requests=TALKS
    )
    first, second = replay(asked), replay(asked)
    assert first.without is first.equal_outputs is None
    assert first.run.records_before == 0 < second.run.records_before
    assert first.run.found["disk"].tokens == 0 < second.run.found["disk"].tokens
    assert second.run.seconds >= 20e-3 * (TALKS - 1) / 2


def test_the_command(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, model = tmp_path / "out.json", tiny.checkpoint("llama")
    small = [
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--block-size",
        "8",
        "--kv-blocks",
        "40",
        "--host-kv-memory",
        "1MiB",
        "--threads",
        "1",
    ]
    asked = ["bench", "trace", str(trace), "--model", str(model), *small, "--requests", "9"]
    assert main([*asked, "--check-output", "--out", str(out)]) == 0
    shown = capsys.readouterr()
    line = json.loads(out.read_text())
    assert shown.out.endswith(f"\n\n{out.read_text()}")
    assert "a block of 512 tokens in the trace is 32 here; " in shown.out
    assert "kv_store eager: 9 of 9 in " in shown.err
    assert (line["requests"], line["block_tokens"], line["max_sequences"], line["equal_outputs"]) == (
        9,
        32,
        16,
        9,
    )
    assert line["longest"] == 32 * 9 - 16 + 13 <= 512
    # Nothing is kept beyond the device, so one run is all there is.
    assert main([*asked, "--kv-store", "off", "--output", "2", "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert (alone["output_tokens"], alone["without"], alone["run"]["kv_store"]) == (18, None, "off")
    assert main([*asked, "--kv-store", "off", "--output", "2", "--check-output"]) == 2
    assert "none is kept there; raise --host-kv-memory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--requests", "3"], "--requests goes with a model; give --model or --shape"),
        (["--kv-blocks", "3"], "--kv-blocks goes with a model; give --model or --shape"),
        (["--shape", "100M", "--part", "whole"], "--part goes without a model; leave it"),
        (["--shape", "100M", "--model", "x"], "MODEL and --shape exclude each other; give one of them"),
        (
            ["--shape", "100M", "--check-output", "--no-compare"],
            "--check-output needs a run to compare with; leave --no-compare",
        ),
    ],
)
def test_what_does_not_go_together(
    arguments: list[str], message: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "trace", str(trace), *arguments]) == 2
    assert capsys.readouterr().err == f"penstock: error: {message}\n"


def test_what_cannot_be_replayed_is_refused(trace: Path, tmp_path: Path) -> None:
    with pytest.raises(
        RequestError,
        match="the longest of 24 requests has 953 tokens of prompt and output, but tiny has 512 positions",
    ):
        replay(job(trace, tmp_path, block_tokens=64))
    for field, message in (
        (
            {"output_length": None},
            "request 1 of .* has no output_length; give --output, the tokens of each answer",
        ),
        (
            {"input_length": 9999},
            "request 1 of .* has 9,999 tokens of prompt in 3 blocks, which are not blocks of 512",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            replay(job(write(tmp_path / "bad.jsonl", [[1, 2, 3]], **field), tmp_path))
    with pytest.raises(ConfigError, match="has no timestamp; leave --speed out"):
        replay(job(write(tmp_path / "bad.jsonl", [[1, 2, 3]], timestamp="now"), tmp_path, speed=1.0))
