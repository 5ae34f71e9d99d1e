"""The benchmark counts what a step must do, drives the engine over exactly that, and reports it; the
comparison with transformers runs."""

import dataclasses
import importlib.util
import json
import os
import random
import re
import shutil
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch.nn import functional as F

import forks
from penstock.arch import bounds
from penstock.arch.layout import GroupId, GroupKind, GroupLayout, group_layouts
from penstock.base.config import SHIPPED_MODEL, Config
from penstock.base.errors import BudgetError, CheckpointError, ConfigError, RequestError
from penstock.base.meter import WeightStats
from penstock.bench.doctor import calibration
from penstock.bench.machine import machine
from penstock.bench.shapes import SHAPES
from penstock.bench.speed import baseline, contexts, measure
from penstock.bench.speed.latency import BenchKind, LatencyBench, LatencyReport, run
from penstock.bench.speed.measure import BatchWork
from penstock.bench.speed.setup import Target
from penstock.bench.speed.streaming import Streaming, scratch
from penstock.bench.speed.throughput import RandomLengths
from penstock.cli.main import main
from penstock.engine import measuring
from penstock.engine.boot import Booted, boot
from penstock.engine.costs import DecodeCosts, PromptCosts, StepCosts
from penstock.engine.passes import UseWork
from penstock.memory.device import peak_of
from penstock.memory.probe import matmul_rate
from penstock.memory.streams import CudaStream
from penstock.ops import linear
from penstock.step.plan import Outcome, Plan
from penstock.weights.checkpoint.shape import Shape
from penstock.weights.streaming.residency import padded
from penstock.weights.streaming.stream import WeightStream
from penstock.worker.runner import Begun, Runner

ROOT = Path(__file__).resolve().parents[2]
TINY = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 256,
    "dtype": "float32",
}
MOE = TINY | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 6}


def simulated_device(monkeypatch: pytest.MonkeyPatch, *, device: float, host: float, counters: float) -> None:
    """An engine runs ahead of a device whose steps take `device` seconds, one after another. The host takes
    `host` to begin a step, and `counters` to read those of weights. Its arithmetic is real; its clock is
    not."""
    now, free, ends = 0.0, 0.0, deque[float]()
    begin, end, stats = Runner.begin, Runner.end, WeightStream.stats

    def begun(self: Runner, plan: Plan) -> Begun:
        nonlocal now, free
        now += host
        free = max(now, free) + device
        ends.append(free)
        return begin(self, plan)

    def ended(self: Runner, step: Begun) -> Outcome:
        nonlocal now
        now = max(now, ends.popleft()) if ends else now  # None of what boot measures.
        return end(self, step)

    def counted(self: WeightStream) -> WeightStats:
        nonlocal now
        now += counters
        return dataclasses.replace(stats(self), link_rate=1e30)

    monkeypatch.setattr(Runner, "ahead", True)
    monkeypatch.setattr(Runner, "begin", begun)
    monkeypatch.setattr(Runner, "end", ended)
    monkeypatch.setattr(WeightStream, "stats", counted)
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: now))


def layouts(shape: Shape) -> tuple[GroupLayout, ...]:
    return group_layouts(shape.spec, shape.names, "float32")


TARGET = frozenset(field.name for field in dataclasses.fields(Target))


def changed(bench: LatencyBench, **changes: object) -> LatencyBench:
    """Replace fields of a benchmark, and of its target."""
    of_target = {name: changes.pop(name) for name in TARGET & changes.keys()}
    return dataclasses.replace(bench, target=dataclasses.replace(bench.target, **of_target), **changes)


def job(kind: BenchKind, **changes: object) -> LatencyBench:
    config = Config(
        Path(), device="cpu", dtype="float32", device_memory="64MiB", max_step_tokens=16, block_size=8
    )
    target = Target("tiny", TINY, config)
    return changed(LatencyBench(kind, target, batch=2, context=20, output=5, repeat=2), **changes)


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A model directory with a config and nothing else."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return tmp_path


# -- bounds
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_have_the_parameters_that_transformers_counts(name: str) -> None:
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(**SHAPES[name])
        model = transformers.AutoModelForCausalLM.from_config(config)
    shape = Shape.of(SHAPES[name])
    corrections = [one for name, one in model.named_buffers() if name.endswith("correction_bias")]
    assert bounds.parameters(group_layouts(shape.spec, shape.names, "bfloat16")) == sum(
        one.numel() for one in (*model.parameters(), *corrections)
    )


def test_prefill_operations_are_those_of_every_product_that_somebody_needs() -> None:
    shape, length = Shape.of(TINY), 11
    heads, dim, kv, hidden, inner, vocab = 4, 8, 2, 32, 64, 96
    a_token = hidden * (heads + 2 * kv) * dim + heads * dim * hidden + 3 * hidden * inner
    pairs = sum(1 for query in range(length) for key in range(length) if key <= query)
    first_layer = 2 * length * a_token + 2 * 2 * pairs * heads * dim
    last_layer = 2 * a_token + 2 * (length - 1) * hidden * 2 * kv * dim + 2 * 2 * length * heads * dim
    by_hand = first_layer + last_layer + 2 * hidden * vocab
    assert bounds.prefill_operations(shape.spec, layouts(shape), [length]) == by_hand
    assert bounds.prefill_operations(shape.spec, layouts(shape), [length] * 3) == 3 * by_hand


def test_windows_bound_what_attention_computes_and_reads() -> None:
    windowed = Shape.of(TINY | {"model_type": "mistral", "sliding_window": 6})
    whole = Shape.of(TINY | {"model_type": "mistral", "sliding_window": None})
    for length in (1, 6, 7, 40):
        unseen = sum(1 for query in range(length) for key in range(query + 1) if key <= query - 6) + max(
            length - 6, 0
        )
        less = 4 * unseen * 4 * 8
        operations = [
            bounds.prefill_operations(shape.spec, layouts(shape), [length]) for shape in (whole, windowed)
        ]
        assert operations[0] - operations[1] == less
        token = bounds.kv_token_bytes(windowed.spec, "float32")
        assert token == 2 * 2 * 2 * 8 * 4
        assert bounds.kv_bytes_read(windowed.spec, "float32", length) == token * min(length, 6)
        assert bounds.kv_bytes_read(whole.spec, "float32", length) == token * length


def test_only_a_row_of_an_embedding_is_read_unless_it_is_the_output_too() -> None:
    matrix = 96 * 32 * 4
    apart, tied = Shape.of(TINY), Shape.of(TINY | {"tie_word_embeddings": True})
    assert bounds.weight_bytes(layouts(apart)) - bounds.weight_bytes(layouts(tied)) == matrix
    read = [bounds.weight_bytes_read(shape.spec, layouts(shape), 3) for shape in (apart, tied)]
    assert read[0] - read[1] == pytest.approx(3 * 32 * 4)
    assert read[1] == bounds.weight_bytes(layouts(tied))


def test_the_experts_that_a_batch_reads() -> None:
    shape, rng = Shape.of(MOE), random.Random(0)
    expert = 3 * 32 * 64 * 4
    none = bounds.weight_bytes_read(shape.spec, layouts(shape), 0)
    assert bounds.weight_bytes_read(shape.spec, layouts(shape), 1) - none == pytest.approx(
        2 * 2 * expert, abs=2 * 32 * 4
    )
    tried = [len({one for _ in range(5) for one in rng.sample(range(8), 2)}) for _ in range(20000)]
    chosen = (bounds.weight_bytes_read(shape.spec, layouts(shape), 5) - none) / (2 * expert)
    assert chosen == pytest.approx(sum(tried) / len(tried), rel=0.02)


# -- measuring
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "context", "step_tokens"), [(1, 1, 4), (3, 20, 16), (8, 40, 16), (5, 33, 6)]
)
def test_decode_steps_are_timed_when_all_prompts_are_in(batch: int, context: int, step_tokens: int) -> None:
    work = BatchWork(batch, context, output=3, repeat=2)
    length = work.room(step_tokens)
    config = Config(
        Path(), device="cpu", device_memory="64MiB", block_size=8, max_sequences=batch,
        max_step_tokens=step_tokens, max_length=length + 8, prefix_cache=False, check=True,
    )  # fmt: skip
    booted = boot(config, Shape.of(TINY | {"max_position_embeddings": 4096}))
    decoded = measure.decode(booted, work)
    stats = booted.engine.stats()
    assert decoded.times.count == 6
    assert decoded.times.least <= decoded.times.median <= decoded.times.most
    assert len(decoded.lengths) == batch
    assert all(context + measure.WARM_STEPS < each < length for each in decoded.lengths)
    assert (stats.running, stats.waiting, stats.preemptions) == (0, 0, 0)
    assert stats.output_tokens >= 2 * batch * (1 + measure.WARM_STEPS + 3)


@pytest.mark.parametrize(("device", "host", "whole"), [(3.5, 0.25, 3.5), (0.25, 0.75, 0.75)])
def test_every_timed_step_of_a_device_that_runs_ahead_is_a_whole_one(
    monkeypatch: pytest.MonkeyPatch, device: float, host: float, whole: float
) -> None:
    """Whatever the host does between steps, such as reading counters for 3 s. See simulated_device."""
    simulated_device(monkeypatch, device=device, host=host, counters=3.0)
    config = Config(
        Path(),
        device="cpu",
        device_memory="64MiB",
        block_size=8,
        max_sequences=2,
        max_step_tokens=16,
        max_length=64,
    )
    booted = boot(config, Shape.of(TINY))
    with closing(booted.engine):
        decoded = measure.decode(booted, BatchWork(2, 20, output=6, repeat=2))
        assert not booted.engine.busy, "a step is under way, which the next prompt would wait for"
        assert (decoded.times.least, decoded.times.most, decoded.times.count) == (
            1e3 * whole,
            1e3 * whole,
            12,
        )
        context = measure.context(booted, 20, 6, random.Random(1))
    assert context.steps == [whole] * 6
    # Two steps of the prompt, and of those that are begun by then the host's part.
    assert context.prefill == pytest.approx(2 * device + host if device > host else 3 * host)


@pytest.mark.parametrize("copies", [False, True])
def test_copies_of_experts_are_timed_with_whole_steps(copies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a layer takes more where half of its experts are elsewhere, with a link that takes no time."""
    rooms, engine = list[bool](), calibration.run_of

    @contextmanager
    def noted(*arguments: Any) -> Iterator[Booted]:
        with engine(*arguments) as booted:
            assert booted.weights.room is not None
            rooms.append(booted.weights.room.copies)
            yield booted

    monkeypatch.setattr(calibration, "run_of", noted)
    simulated_device(monkeypatch, device=3.5, host=0.25, counters=3.0)
    resident = calibration.StepSample("moe", 2, 1, calibration.CONTEXTS[0], UseWork(), (0, 2), seconds=0.5)
    many = {"num_local_experts": 32, "num_experts": 32, "max_position_embeddings": 2048}
    shapes = {"moe": (MOE | many, (1, 2))}
    decode = DecodeCosts(1, 0.0, 0.0, 0.0, 1e30, 1e30, 1e30)
    prompt = PromptCosts(1e30, 1e30, 1e30, 1e30, 0.0, 0.0, 0.0, 0.0)
    costs = StepCosts("any", "float32", "today", 1e30, 1e30, 1e30, (decode,), prompt)
    device = torch.device("cpu")
    taken = calibration._expert_layer(shapes, device, "float32", [resident], costs, copies=copies)
    assert taken == pytest.approx((3.5 - 0.5) / 2)
    assert rooms == [copies]


def test_prefill_computes_every_prompt_every_time() -> None:
    work = BatchWork(batch=3, context=20, output=1, repeat=2)
    config = Config(
        Path(),
        device="cpu",
        device_memory="64MiB",
        block_size=8,
        max_sequences=3,
        max_step_tokens=16,
        max_length=32,
    )
    booted = boot(config, Shape.of(TINY))
    times = measure.prefill(booted, work)
    assert times.count == 2
    assert booted.engine.stats().computed_tokens == 3 * 3 * 20
    assert booted.engine.stats().output_tokens == 3 * 3


def test_sequences_that_would_have_to_wait_are_refused() -> None:
    config = Config(
        Path(),
        device="cpu",
        device_memory="64MiB",
        block_size=8,
        max_sequences=3,
        kv_blocks=11,
        max_length=32,
    )
    with pytest.raises(BudgetError, match="12 KV blocks"):
        measure.decode(boot(config, Shape.of(TINY)), BatchWork(3, 20, 1, 1))


@pytest.mark.parametrize("kind", BenchKind)
def test_a_report(kind: BenchKind) -> None:
    told: list[str] = []
    report = run(job(kind), told.append)
    assert len([one for one in told if not one.startswith("kernels for this processor: ")]) == 2
    line = json.loads(report.line())
    assert "\n" not in report.line()
    assert (line["bench"], line["model"], line["weights"], line["dtype"]) == (
        kind.value,
        "tiny",
        "random",
        "float32",
    )
    assert (line["batch"], line["context"], line["step_tokens"]) == (2, 20, 16)
    assert line["ms"]["count"] == (10 if kind is BenchKind.DECODE else 2)
    tokens = 2 if kind is BenchKind.DECODE else 40
    assert line["tokens_per_second"] == pytest.approx(1e3 * tokens / line["ms"]["median"])
    assert line["of_bound"] == pytest.approx(line["bound"]["ms"] / line["ms"]["median"])
    done = line["bound"]["weight_bytes"] + line["bound"]["kv_bytes"] + line["bound"]["operations"]
    assert line["bound"]["ms"] == pytest.approx(1e3 * done / line["bound"]["per_second"])
    assert line["baseline"] is None
    assert line["machine"]["torch"] == torch.__version__
    assert line["machine"]["threads"] == torch.get_num_threads()
    assert f"{report.of_bound:.1%}" in str(report)


def test_ranks_share_the_bound() -> None:
    """Each reads its part of weights and KV at the rate of one device; a bound of all bytes would be said to
    be beaten."""
    alone = job(BenchKind.DECODE, repeat=1)
    shared = changed(
        alone, config=dataclasses.replace(alone.target.config, tensor_parallel=2, host_kv_memory=0)
    )
    one, two = run(alone).bound, run(shared).bound
    assert (two.weight_bytes, two.kv_bytes) == (one.weight_bytes / 2, one.kv_bytes / 2)
    assert two.ms == pytest.approx(1e3 * (two.weight_bytes + two.kv_bytes) / two.per_second)


@pytest.mark.parametrize("kind", BenchKind)
def test_the_same_work_by_transformers(kind: BenchKind) -> None:
    line = json.loads(run(job(kind, baseline=True)).line())
    other = line["baseline"]
    assert other["system"] == f"transformers {transformers.__version__}"
    assert other["ms"]["count"] == line["ms"]["count"]
    assert other["ratio"] == pytest.approx(other["ms"]["median"] / line["ms"]["median"])


@pytest.mark.parametrize("kind", BenchKind)
def test_a_baseline_is_timed_when_it_no_longer_gets_faster(
    kind: BenchKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that only its passes move: eight slow ones, and then all alike."""
    now, passes = [0.0], [0]

    def forward(other: baseline.Baseline, tokens: torch.Tensor, cache: object) -> tuple[torch.Tensor, object]:
        passes[0] += 1
        now[0] += 1.0 if passes[0] > 8 else 20.0 - passes[0]
        return tokens[:, -1:], cache

    monkeypatch.setattr(baseline, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(baseline.Baseline, "_forward", forward)
    other = baseline.Baseline(TINY, random=True, dtype="float32", device=torch.device("cpu"))
    work = BatchWork(batch=2, context=20, output=5, repeat=2)
    times = other.decode(work) if kind is BenchKind.DECODE else other.prefill(work)
    assert (times.least, times.most) == (1e3, 1e3)


def test_results_say_their_commit_or_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where sources lie without git's history it is said by PENSTOCK_COMMIT, or by nobody."""
    recording = script("recording", monkeypatch)
    monkeypatch.setenv("PATH", str(tmp_path))  # No git.
    monkeypatch.delenv("PENSTOCK_COMMIT", raising=False)
    out = tmp_path / "out.json"
    with pytest.raises(SystemExit, match="set PENSTOCK_COMMIT to what `git rev-parse HEAD` prints"):
        recording.Recording(out)
    recording.Recording(None).part("nothing", {})
    monkeypatch.setenv("PENSTOCK_COMMIT", "c715239+")
    recording.Recording(out, bench="some").part("first", {"a": 1})
    recording.Recording(out, bench="some").part("second", {"b": 2})
    found = json.loads(out.read_text())
    assert (found["bench"], found["first"]["a"], found["second"]["b"]) == ("some", 1, 2)
    assert found["first"]["environment"]["commit"] == found["second"]["environment"]["commit"] == "c715239+"
    recording.write(out, {"c": 3})
    assert json.loads(out.read_text())["environment"]["commit"] == "c715239+"
    monkeypatch.setenv("PENSTOCK_COMMIT", "main")
    with pytest.raises(ConfigError, match="PENSTOCK_COMMIT=main is no commit"):
        recording.Recording(out)


def test_an_unasked_context_is_what_the_model_has_room_for() -> None:
    asked = job(BenchKind.DECODE, context=None, repeat=1)
    context = run(asked).context
    assert 200 < context < 256 - 5
    assert run(dataclasses.replace(asked, context=context)).context == context
    with pytest.raises(RequestError):
        run(dataclasses.replace(asked, context=context + 1))
    with pytest.raises(RequestError, match="positions, but tiny has 256"):
        run(job(BenchKind.DECODE, context=250))


# -- shapes
# ------------------------------------------------------------------------------------------------------------


def test_a_shape_is_told_apart_by_its_numbers(bare: Path) -> None:
    assert Shape.open(bare).fingerprint() == Shape.of(TINY).fingerprint()
    assert Shape.of(TINY | {"rope_theta": 5e5}).fingerprint() != Shape.of(TINY).fingerprint()
    assert len(Shape.of(TINY).fingerprint()) == 16
    with pytest.raises(CheckpointError, match="nowhere"):
        Shape.open(bare / "nowhere")


# -- the command
# ------------------------------------------------------------------------------------------------------------

SMALL = ["--device", "cpu", "--context", "12", "--repeat", "1", "--max-step-tokens", "16"]


def test_the_command_ends_with_a_line_of_json(
    bare: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "line.json"
    assert main(["bench", "decode", str(bare), *SMALL, "--output", "3", "--out", str(out)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert "of the bound" in "\n".join(printed[:-1])
    line = json.loads(printed[-1])
    assert (line["bench"], line["output"], line["ms"]["count"]) == ("decode", 3, 3)
    assert json.loads(out.read_text()) == line


@pytest.mark.parametrize("format", ["int4", "int8", "fp8", "mxfp4", "nvfp4", "bf16"])
def test_random_weights_have_the_format_that_is_asked_for(
    format: str, bare: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (bare / "config.json").write_text(json.dumps(TINY | {"hidden_size": 64, "intermediate_size": 128}))
    arguments = ["bench", "decode", str(bare), *SMALL, "--output", "2", "--format", format]
    assert main(arguments) == 0
    *table, last = capsys.readouterr().out.splitlines()
    named = {"bf16": "", "int4": "int4:64", "int8": "int8:64"}.get(format, format)
    assert (json.loads(last)["format"], json.loads(last)["weights"]) == (named, "random")
    assert f"random {named} weights" in table[0] if named else "random weights" in table[0]


def test_a_format_is_for_random_weights(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "decode", "--format", "int4"]) == 2
    assert "--format is for random weights; give --shape" in capsys.readouterr().err


def test_the_command_prints_only_json_when_asked(bare: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "prefill", str(bare), *SMALL, "--json"]) == 0
    streams = capsys.readouterr()
    assert json.loads(streams.out)["bench"] == "prefill"
    assert streams.err == ""


def test_threads_are_those_asked_for(bare: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.get_num_threads()
    try:
        assert main(["bench", "prefill", str(bare), *SMALL, "--json", "--threads", "2"]) == 0
    finally:
        torch.set_num_threads(before)
    assert json.loads(capsys.readouterr().out)["machine"]["threads"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["decode", ".", "--shape", "8B"], "error: MODEL and --shape exclude each other"),
        (["decode", "--threads", "100000"], "100000 is not in the range 1<=x<=1024"),
        (["serve-offline", "--requests", "100000000000"], "is not in the range"),
        (["decode", "--shape", "9B"], "9B"),
        (["decode", "--batch", "0"], "batch"),
        (["prefill", "--device-memory", "much"], "much"),
        (["prefill", "--dtype", "int3"], "int3"),
        (["prefill", "--out", "no/such/place.json"], "directory does not exist"),
        (["prefill", "no/such/model"], "no/such/model"),
        (["context", ".", "--shape", "8B"], "exclude each other"),
        (
            ["context", "--lengths", "4K,x"],
            "'4K,x' is not a list of token counts; write one like 4096,32K,1M",
        ),
        (["context", "--lengths", "0"], "is not a list of token counts"),
        (
            ["context", "--lengths", "40K,128"],
            "--lengths 40960 is more than the 32768 positions the model was trained for; lower it, give the "
            "checkpoint a rope scaling by 1.25, or allow it with --beyond-trained",
        ),
        (["context", "--host-kv-memory", "much"], "much"),
        (["context", "--out", "no/such/place.json"], "directory does not exist"),
    ],
)
def test_the_command_refuses_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    streams = capsys.readouterr()
    assert message in streams.err
    assert len(streams.err.splitlines()) == 1
    assert streams.out == ""


# -- against transformers
# ----------------------------------------------------------------------------------------------------


@pytest.fixture
def against(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return script("against_transformers", monkeypatch)


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A benchmark's module, which finds those beside it."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    if machine().commit is None:
        monkeypatch.setenv("PENSTOCK_COMMIT", "0" * 40)  # Tests may run where git is not.
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_both_sides_say_the_same(
    against: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = "--layers 2 --hidden 64 --inner 96 --heads 4 --kv-heads 2 --vocab 300"
    work = "--requests 6 --prompt 3 30 --tokens 2 9 --single-tokens 5 --repeat 2 --no-memory"
    out = tmp_path / "out.json"
    monkeypatch.setattr(
        sys, "argv", ["against_transformers.py", *size.split(), *work.split(), "--out", str(out)]
    )
    against.main()
    found = json.loads(out.read_text())
    assert capsys.readouterr().out.splitlines()[-1] == out.read_text().strip()
    assert {name: (it["equal"], it["of"]) for name, it in found["comparisons"].items()} == {
        "single": (1, 1), "one by one": (6, 6), "padded": (6, 6),
    }  # fmt: skip
    assert found["comparisons"]["padded"]["useful_tokens"] >= 6 * 2
    assert all(
        it[side]["count"] == 2
        for it in found["comparisons"].values()
        for side in ("penstock", "transformers")
    )
    assert all(
        len(it[side]["warming_s"]) >= 2
        for it in found["comparisons"].values()
        for side in ("penstock", "transformers")
    )


def test_every_repeat_asks_for_the_same_lengths_of_other_prompts(
    against: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["against_transformers.py"])
    args = against.parse()
    first, second = against.requests(args, 0, 32), against.requests(args, 1, 32)
    assert [(len(one.prompt), one.output) for one in first] == [
        (len(one.prompt), one.output) for one in second
    ]
    assert all(one.prompt != other.prompt for one, other in zip(first, second, strict=True))
    assert {16 <= len(one.prompt) <= 256 and 16 <= one.output <= 128 for one in first} == {True}
    assert len({one.output for one in first}) > 16


# -- contexts
# ------------------------------------------------------------------------------------------------------------

TOKEN = 2 * 2 * 2 * 8 * 4
"""Bytes of KV."""


def course(*lengths: int, output: int = 3, **changes: object) -> contexts.ContextBench:
    config = dataclasses.replace(
        job(BenchKind.DECODE).target.config, **({"host_kv_memory": "1MiB", "kv_tile": 32} | changes)
    )
    return contexts.ContextBench(Target("tiny", TINY, config), lengths or None, output, repeat=2)


def test_kv_that_moves_is_counted_and_a_prompt_tells_how_far_it_is() -> None:
    config = dataclasses.replace(
        course().target.config, kv_blocks=8, max_length=128, max_sequences=1, check=True
    )
    engine = boot(config, Shape.of(TINY)).engine
    room = engine.kv_stats()
    assert room is not None
    assert (room.host, room.copied, room.sent, room.streams) == (0, 0, 0, False)
    engine.submit(range(90), measure.sampling(), 30)
    scheduler = engine.scheduler
    scheduler._pools.most_mirrored = 0  # pages to spare would save some of it
    reached, copied = [], 0
    for start in range(0, 90, 16):  # each step reads what the earlier ones have written
        engine.step()
        copied += start * TOKEN
        reached.append((engine.progress.reached, engine.progress.computed))
        now = engine.stats().kv
        assert now is not None
        assert (now.host, now.copied, now.sent) == (
            min(start + 16, 88) * TOKEN,
            copied,
            min(start + 16, 88) * TOKEN,
        )
    assert reached == [(16, 16), (32, 32), (48, 48), (64, 64), (80, 80), (0, 90)]
    for length in range(91, 120):  # the tail goes to the host when three of its blocks are full
        engine.step()
        copied += max(88, (length - 1) // 8 * 8 - 16) * TOKEN
        now = engine.kv_stats()
        assert now is not None
        assert (now.copied, now.sent) == (copied, now.host)
    assert now.host == 96 * TOKEN
    assert not engine.busy
    engine.close()
    assert engine.kv_stats() is None


def test_contexts_on_the_host_stream_once_for_each_token() -> None:
    told: list[str] = []
    report = contexts.sweep(course(200, 72, 200, 400), told.append)
    line = json.loads(report.line())
    rows = line["contexts"]
    assert [row["context"] for row in rows] == [72, 200, 400]
    for row in rows:
        assert row["host_kv"] == row["context"] * TOKEN
        assert (
            row["kv_per_step"] == row["host_kv"] - 4 * 8 * TOKEN
        )  # what is in pages as well need not stream
        assert row["weights_per_step"] == 0
        assert (row["prefill_ms"]["count"], row["decode_ms"]["count"]) == (2, 2 * 3)
        assert row["prefill_tokens_per_second"] == pytest.approx(
            1e3 * row["context"] / row["prefill_ms"]["median"]
        )
        assert (
            row["bound_ms"]
            == 1e3
            * bounds.prefill_operations(Shape.of(TINY).spec, layouts(Shape.of(TINY)), [row["context"]])
            / line["operations_per_second"]
        )
        assert row["of_bound"] == pytest.approx(row["bound_ms"] / row["prefill_ms"]["median"])
        assert (
            0
            < row["of_link"]
            < row["kv_per_step"] / (row["decode_ms"]["least"] / 1e3) / line["link_ceiling"] * 1.001
        )
    assert (
        len({row["device"] for row in rows}) == 1
    )  # the device holds as much of a long context as of a short one
    assert (line["bench"], line["model"], line["step_tokens"], line["block_size"]) == (
        "context",
        "tiny",
        16,
        8,
    )
    assert line["machine"]["torch"] == torch.__version__
    assert "\n" not in report.line()
    table = str(report).splitlines()
    assert len({len(row) for row in table[2:]}) == 1
    assert re.search(
        r"^ +400 .* [KM]iB +100 KiB +[\d,]+ tokens/s +[\d.]+% +\S+ ms a token +92.0 KiB a step +[\d.]+%$",
        table[-1],
    )
    assert [text.partition(" tokens: prompt in ")[0] for text in told[-3:]] == ["72", "200", "400"]


def test_contexts_that_the_device_holds_do_not_stream() -> None:
    near = contexts.sweep(course(40, 200, host_kv_memory=None)).contexts
    assert [(row.host_kv, row.kv_per_step, row.of_link) for row in near] == [(0, 0, 0)] * 2
    assert near[1].device - near[0].device == 160 * TOKEN
    mixed = contexts.sweep(course(40, 200, kv_blocks=8))
    assert [row.host_kv for row in mixed.contexts] == [0, 200 * TOKEN]
    assert re.search(r"^ +40 .* (KiB|MiB) +- .* a token +- +-$", str(mixed), re.MULTILINE)


def test_the_usual_contexts_are_those_that_model_and_memory_have_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert contexts._SHORTEST == 4096  # An eighth of it here, since all of them are measured.
    monkeypatch.setattr(contexts, "_SHORTEST", 512)

    def lengths(positions: int, **changes: object) -> list[int]:
        asked = course(**({"max_step_tokens": 64, "host_kv_memory": None} | changes), output=1)
        source = TINY | {"max_position_embeddings": positions}
        return [
            row.context
            for row in contexts.sweep(
                dataclasses.replace(asked, target=dataclasses.replace(asked.target, source=source), repeat=1)
            ).contexts
        ]

    assert lengths(1500) == [512, 1024]
    assert lengths(2048, host_kv_memory=1500 * TOKEN) == [512, 1024]
    with pytest.raises(RequestError, match=r"begin at 512 tokens, but tiny has 500 positions"):
        lengths(500)
    with pytest.raises(RequestError, match=r"memory room for about 368; give --lengths"):
        lengths(2048, host_kv_memory=500 * TOKEN)


def test_contexts_that_were_asked_for_and_do_not_fit_are_refused() -> None:
    with pytest.raises(
        RequestError,
        match=r"measuring 3 tokens after 500 takes 509 positions, but KV has room for 408; lower --lengths",
    ):
        contexts.sweep(course(40, 100, 500, host_kv_memory=400 * TOKEN))
    with pytest.raises(RequestError, match=r"after 3,000,000,000 takes .* but KV has room for 408"):
        contexts.sweep(course(3_000_000_000, host_kv_memory=400 * TOKEN))


def test_contexts_beyond_what_a_model_was_trained_for_must_be_allowed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in SHIPPED_MODEL.iterdir():
        shutil.copy(file, tmp_path / file.name)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 100}))
    given = ["bench", "context", str(tmp_path), "--lengths", "120", "--output", "1", "--device", "cpu"]
    assert main([*given, "--json"]) == 2
    assert "--lengths 120 is more than the 100 positions" in capsys.readouterr().err
    assert main([*given, "--json", "--beyond-trained"]) == 0
    assert [row["context"] for row in json.loads(capsys.readouterr().out)["contexts"]] == [120]


def test_the_command_for_contexts(bare: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "line.json"
    given = [
        "bench",
        "context",
        str(bare),
        "--lengths",
        "600,0.7K",
        "--output",
        "2",
        "--device",
        "cpu",
        "--kv-tile",
        "64",
    ]
    assert main([*given, "--host-kv-memory", "50%", "--out", str(out)]) == 0
    printed = capsys.readouterr()
    line = json.loads(printed.out.splitlines()[-1])
    assert [(row["context"], row["kv_per_step"] > 0) for row in line["contexts"]] == [
        (600, True),
        (716, True),
    ]
    assert "of link" in printed.out
    assert "716 tokens: prompt in" in printed.err
    assert json.loads(out.read_text()) == line
    disk = ["--host-kv-memory", "50KB", "--disk-kv-memory", "64MiB", "--kv-directory", str(tmp_path)]
    assert main([*given, *disk]) == 0
    printed = capsys.readouterr()
    rows = json.loads(printed.out.splitlines()[-1])["contexts"]
    for row, exact in zip(rows, line["contexts"], strict=True):
        assert row["host_kv"] + row["disk_kv"] == exact["host_kv"]
        assert 0 < row["kv_per_step"] == exact["kv_per_step"] < exact["host_kv"]
        assert row["disk_kv"] > 0
    assert re.search(r"^ +716 .* KiB \+ .* KiB on disk ", printed.out, re.MULTILINE)
    assert (
        main(
            [
                *given,
                "--host-kv-memory",
                "50%",
                "--host-kv-dtype",
                "fp8",
                "--attention-policy",
                "topk:2",
                "--json",
            ]
        )
        == 0
    )
    some = json.loads(capsys.readouterr().out)
    for row, exact in zip(some["contexts"], line["contexts"], strict=True):
        assert 0 < row["host_kv"] < exact["host_kv"] / 1.5
        assert 0 < row["kv_per_step"] < row["host_kv"]
    assert some["settings"] == line["settings"] | {"host_kv_dtype": "fp8", "attention_policy": "topk:2"}
    assert main([*given, "--json"]) == 0
    printed = capsys.readouterr()
    assert [row["kv_per_step"] for row in json.loads(printed.out)["contexts"]] == [0, 0]
    assert printed.err == ""


# -- streaming
# ------------------------------------------------------------------------------------------------------------

WIDE = TINY | {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6}
LITTLE = Config(
    Path(), device="cpu", dtype="float32", device_memory="24MiB", max_step_tokens=16, block_size=8
)


@pytest.fixture
def by_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations are counted by shape: what is measured of them depends on what this process has run before,
    and 16 MiB are few."""
    monkeypatch.setattr(measuring, "peak_of", lambda device, run: 0 * peak_of(device, run))


def streaming_job(kind: BenchKind = BenchKind.DECODE, **changes: object) -> LatencyBench:
    return job(kind, **({"source": WIDE, "config": LITTLE, "batch": 1} | changes))


def test_many_requests_at_once(bare: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "line.json"
    given = [
        "bench",
        "serve-offline",
        str(bare),
        "--requests",
        "9",
        "--input",
        "5,40",
        "--output",
        "3,20",
        "--device",
        "cpu",
        "--repeat",
        "2",
    ]
    assert main([*given, "--max-sequences", "4", "--baseline", "transformers", "--out", str(out)]) == 0
    printed = capsys.readouterr()
    line = json.loads(out.read_text())
    assert line == json.loads(printed.out.splitlines()[-1])
    work = RandomLengths(9, (5, 40), (3, 20)).draw(TINY["vocab_size"])
    assert line["prompt_tokens"] == sum(len(ask.prompt) for ask in work)
    assert line["output_tokens"] == sum(ask.output for ask in work)
    assert {(5 <= len(ask.prompt) <= 40, 3 <= ask.output <= 20) for ask in work} == {(True, True)}
    assert line["output_tokens_per_second"] == pytest.approx(
        1e3 * line["output_tokens"] / line["ms"]["median"]
    )
    assert (line["ms"]["count"], line["first_ms"]["count"], line["max_sequences"]) == (2, 2 * 9, 4)
    assert line["steps"] > max(ask.output for ask in work)
    assert line["baseline"] > 0
    bound = line["bound"]
    seconds = (bound["weight_bytes"] + bound["kv_bytes"]) / bound["bytes_per_second"] + bound[
        "operations"
    ] / bound["operations_per_second"]
    assert line["of_bound"] == pytest.approx(1e3 * seconds / line["ms"]["median"])
    assert "requests at once" in printed.out


@pytest.mark.parametrize("span", ["5", "9,3", "0,4", "a,b", "1,2,3"])
def test_a_span_that_is_none(span: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve-offline", "--input", span]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_requests_longer_than_the_model_are_refused(bare: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve-offline", str(bare), "--input", "5,9000000", "--device", "cpu"]) != 0
    assert "lower --input or --output" in capsys.readouterr().err


@pytest.mark.usefixtures("by_shape")
def test_what_does_not_fit_is_read_from_a_scratch_file(tmp_path: Path) -> None:
    report = run(streaming_job(scratch=(tmp_path, 1 << 30)))
    streaming = report.streaming
    assert streaming is not None
    assert streaming.copied_per_pass == streaming.read_per_pass == streaming.disk > 0
    assert streaming.resident + streaming.host + streaming.disk > 4 * 6 * 256 * 1024 * 3
    assert streaming.device_ring > 0
    assert report.bound.ms >= 1e3 * streaming.read_per_pass / streaming.disk_ceiling
    text, line = str(report), json.loads(report.line())
    assert re.search(r"^  disk +\S+ MiB a pass, .* of .*/s \(\d+\.\d%\)$", text, re.MULTILINE)
    assert re.search(r"^  predicted +\S+ ms a decode pass of one sequence$", text, re.MULTILINE)
    assert line["streaming"]["read_per_pass"] == streaming.read_per_pass
    assert list(tmp_path.iterdir()) == []


def test_layers_share_a_scratch_file_that_may_not_hold_them_all(tmp_path: Path) -> None:
    shape = Shape.of(WIDE)
    groups = layouts(shape)
    with scratch(tmp_path, 1, groups, "float32") as (source, file):
        sizes = {padded(layout) for layout in groups}
        assert file.stat().st_size == sum(sizes)
        first, last = (
            next(layout for layout in groups if layout.id == GroupId(GroupKind.FFN, layer))
            for layer in (0, 5)
        )
        read = [torch.empty(padded(first), dtype=torch.uint8) for _ in range(2)]
        source.read(first, 0, read[0], False)
        source.read(last, 0, read[1], False)
        assert torch.equal(*read)
        assert read[0].any()
        source.close()


@pytest.mark.usefixtures("by_shape")
def test_weights_in_host_memory_need_no_disk() -> None:
    report = run(streaming_job(config=dataclasses.replace(LITTLE, host_memory="64MiB")))
    assert report.streaming is not None
    assert report.streaming.host == report.streaming.copied_per_pass > 0
    assert report.streaming.read_per_pass == report.streaming.disk == 0


def least_of(report: LatencyReport) -> float:
    """Milliseconds in which the device reads weights and KV of a step."""
    bound = report.bound
    return 1e3 * (bound.weight_bytes + bound.kv_bytes) / bound.per_second


def test_costs_that_are_known_make_a_forecast_slower_and_others_do_not_fit() -> None:
    mixture = MOE | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
    asked = list[tuple[str, str]]()
    one = DecodeCosts(1, 1e-3, 0.0, 0.0, 1e12, 1e12, 1e12)
    prompt = PromptCosts(1e15, 1e15, 1e15, 1e12, 0.0, 0.0, 0.0, 0.0)

    def costs(device: str, dtype: str) -> StepCosts:
        asked.append((device, dtype))
        return StepCosts(device, dtype, "", 1e9, 1e9, 1e9, (one,), prompt, expert_layer=2e-3)

    job = streaming_job(source=mixture, config=dataclasses.replace(LITTLE, host_memory="128MiB"), costs=costs)
    report = run(job)
    streaming = report.streaming
    assert streaming is not None
    assert asked == [(report.subject.device, report.subject.dtype)]
    link = 1e3 * streaming.copied_per_pass / streaming.link_ceiling
    assert streaming.predicted_ms == pytest.approx(link + 1 + 4 * 2, rel=0.02)


@pytest.mark.usefixtures("by_shape")
@pytest.mark.parametrize("kind", [BenchKind.DECODE, BenchKind.PREFILL])
def test_experts_that_come_are_counted(kind: BenchKind) -> None:
    mixture = MOE | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
    said: list[str] = []
    report = run(
        streaming_job(kind=kind, source=mixture, config=dataclasses.replace(LITTLE, host_memory="128MiB")),
        said.append,
    )
    streaming, size = report.streaming, 3 * 256 * 512 * 4
    assert streaming is not None
    assert streaming.disk == streaming.read_per_pass == 0
    homes = r"of 32 experts of 1.50 MiB, \d+ on the device, \d+ on the host, 0 on disk"
    assert any(re.search(rf"^weights: of what every token needs, .*; {homes}", line) for line in said)
    assert streaming.copied_per_pass > 0
    assert report.bound.ms >= 1e3 * streaming.copied_per_pass / streaming.link_ceiling
    if kind is BenchKind.DECODE:  # Two of four layers' eight, of which some stay.
        assert streaming.experts_per_pass is not None
        assert 0 < streaming.experts_per_pass <= 2 * 4
        assert streaming.copied_per_pass % size == pytest.approx(
            streaming.experts_per_pass * size % size, abs=1
        )
        assert re.search(r"^  experts +\d+ came to the device in a pass$", str(report), re.MULTILINE)
        assert streaming.expert_hits is not None
        assert 0 <= streaming.expert_hits < 1
        # What comes takes its time on the link, and then the device reads what the step needs.
        link = 1e3 * streaming.copied_per_pass / streaming.link_ceiling
        assert streaming.predicted_ms == pytest.approx(link + least_of(report), rel=0.01)
        assert f"{streaming.expert_hits:.1%} of them on the device" in str(report)
    else:
        assert streaming.predicted_ms == 0
        assert "predicted" not in str(report)


@pytest.mark.usefixtures("by_shape")
def test_a_sliding_window_reads_everything_in_every_pass(tmp_path: Path) -> None:
    solved = run(streaming_job(scratch=(tmp_path, 1 << 30))).streaming
    window = run(streaming_job(scratch=(tmp_path, 1 << 30), window=5 << 20)).streaming
    assert solved is not None
    assert window is not None
    assert window.resident == window.host == 0
    assert window.device_ring <= 5 << 20
    assert (
        window.read_per_pass
        == window.copied_per_pass
        == solved.resident + solved.host + solved.disk
        > solved.read_per_pass
    )


@pytest.mark.usefixtures("by_shape")
def test_random_weights_that_do_not_fit_need_a_scratch_directory() -> None:
    with pytest.raises(BudgetError, match="there is no disk for the rest"):
        run(streaming_job())


def test_the_benchmark_of_streaming_on_small_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark = script("weight_streaming", monkeypatch)
    out, scratch_files = tmp_path / "found.json", tmp_path / "scratch"
    scratch_files.mkdir()
    # The products of a processor that has no bfloat16 take a hundred times as long as in float32. What is
    # moved is the same.
    monkeypatch.setattr(
        linear, "_few_rows_half", lambda x, weight: F.linear(x.float(), weight.float()).to(x.dtype)
    )
    monkeypatch.setattr(benchmark, "matmul_rate", lambda device, _: matmul_rate(device, torch.float32))
    disk_ceiling = benchmark.disk_ceiling
    monkeypatch.setattr(
        benchmark, "disk_ceiling", lambda file, seconds: disk_ceiling(file, seconds=0.05 * seconds)
    )
    for parts in ("host", "disk,window", "machine"):  # What an earlier command has written stays.
        given = [
            "--tiny",
            "--device",
            "cpu",
            "--parts",
            parts,
            "--batches",
            "1:1024,2:512",
            "--directory",
            str(scratch_files),
        ]
        monkeypatch.setattr(sys, "argv", ["weight_streaming.py", *given, "--out", str(out)])
        with pytest.raises(SystemExit) as ended:
            benchmark.main()
        assert not ended.value.code
    found = json.loads(out.read_text())
    assert [found[part].get("failed") for part in ("host", "disk", "window", "machine")] == [None] * 4
    assert all(found[part]["environment"]["commit"] for part in ("host", "disk", "window", "machine"))
    assert [
        (found["machine"][f"batch_{batch}"][name]) for batch in (1, 2) for name in ("batch", "context")
    ] == [1, 32, 2, 16]
    assert found["host"]["decode_16"]["exact"]
    assert found["host"]["decode_1"]["copied_per_pass"] == found["host"]["streamed"] > 0
    # Readers are ahead of the arithmetic by up to the ring, now more, now less.
    assert found["disk"]["read"] > 0
    assert (
        abs(found["disk"]["decode_1"]["read_per_pass"] - found["disk"]["read"])
        <= found["disk"]["host_ring"] / 4
    )
    assert found["window"]["resident"] == found["window"]["host"] == 0
    assert list(scratch_files.iterdir()) == []


def test_a_link_that_is_not_there_cannot_be_held(capsys: pytest.CaptureFixture[str]) -> None:
    """Nor is anything replaced then, or left replaced."""
    before = [vars(CudaStream)[name] for name in ("copy", "copy_rows", "copy_pieces")]
    code = main(
        ["bench", "decode", "--context", "8", "--output", "1", "--device", "cpu", "--link-rate", "25GB"]
    )
    assert code == 2
    assert capsys.readouterr().err == (
        "penstock: error: --link-rate is for GPUs, and the device is cpu; leave it out\n"
    )
    assert main(["bench", "decode", "--context", "8", "--output", "1", "--link-rate", "25"]) == 2
    assert capsys.readouterr().err == (
        "penstock: error: --link-rate of 25 B a second is less than 1.00 MiB; write bytes, as 25GB\n"
    )
    assert before == [vars(CudaStream)[name] for name in ("copy", "copy_rows", "copy_pieces")]


def test_the_disk_is_shown_beside_its_ceiling() -> None:
    """Not beside the rate at which experts were read, which is as low as readers make it."""
    read = Streaming(0, 0, 0, 0, 0, 0, 500, 1e9, 1000.0, 0.0, 0.0, 0.0, None, None, disk_rate=500.0)
    assert dict(read.rows(1000.0))["disk"].endswith("(50.0%)")


# -- speculation
# ----------------------------------------------------------------------------------------------------


AS_A_SCRIPT = """
import multiprocessing, runpy, sys
context = multiprocessing.get_context
multiprocessing.get_context = lambda kind: context("fork")
sys.path.insert(0, "benchmarks")
runpy.run_path("benchmarks/speculation.py", run_name="__main__")
"""
"""Its processes are forked, too: each has imported torch, and has computed nothing."""


def speculated(*flags: str, real: bool = False) -> tuple[int, str]:
    """The exit code, and what was said. real: it and its processes are started."""
    size = "--shape 7M --device cpu --context 16 --repeat 1"
    environment = os.environ | {"PYTHONPATH": "src", "OMP_NUM_THREADS": "1", "PENSTOCK_COMMIT": "0" * 40}
    how = ["benchmarks/speculation.py"] if real else ["-c", AS_A_SCRIPT]
    done = forks.run(
        [sys.executable, *how, *size.split(), *flags],
        forks.LoadedPopen,
        cwd=ROOT,
        env=environment,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.timeout(180)
def test_a_shape_drafts_for_itself_and_has_a_draft_model_in_lines_and_in_trees(tmp_path: Path) -> None:
    """From the same random checkpoint, which is written once."""
    out = tmp_path / "out.json"
    for drafts, more, kind in (
        ("self", [], "self"),
        ("self", ["--weight-memory", "9MiB"], "self, trees"),
        ("7M", ["--weight-memory", "6MiB"], "model, trees"),
    ):
        code, said = speculated(
            "--output", "160", "--drafts", drafts, *more, "--files", str(tmp_path), "--out", str(out)
        )
        assert code == 0, said
        assert f"drafts: {kind}\n" in said
        assert ("writing random weights" in said) == (kind == "self")
        *_, part = json.loads(out.read_text()).values()
        assert part[drafts]["behind_a_difference"] == 0
    assert (tmp_path / "7M" / "model.safetensors.index.json").exists()
    assert list((tmp_path / "cache").glob("7M-*"))


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--drafts mtp", "a shape's checkpoint has no MTP layer; give a --model that has one"),
        ("--drafts self --format int4", "those of shapes are written in bfloat16 alone"),
        ("--drafts 100M", "--drafts 100M has 32000 tokens, and 7M has 4096"),
        ("--output 4", "outputs of 4 tokens end before a pass is timed; raise --output"),
    ],
)
def test_what_cannot_be_measured_of_drafts_is_refused(flags: str, why: str) -> None:
    code, said = speculated(*flags.split(), real=flags == "--output 4")
    assert code
    assert said.splitlines()[-1].endswith(why), said
