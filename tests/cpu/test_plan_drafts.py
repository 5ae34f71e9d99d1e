"""`penstock plan --speculate`: it says what a boot decides beside a draft model, to the byte, what drafts
would give, and what of that was measured. And what cannot draft is refused by name."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import tiny
from cpu.test_plan import json_of, text_of
from pairs import DRAFT, TARGET, opened, ranks_of
from penstock import LLM
from penstock.base.config import SHIPPED_MODEL, Config, check_speculate
from penstock.base.errors import ConfigError
from penstock.base.tiers import Tier
from penstock.base.units import format_size
from penstock.cli.figures import format_pace, format_seconds
from penstock.cli.main import main
from penstock.cli.plan_drafts import HELD
from penstock.cli.shape import open_model
from penstock.engine.acceptance import DraftForecast, speculation
from penstock.engine.boot import Booted
from penstock.engine.draft import DraftModel
from penstock.engine.forecast import Forecast, forecast
from penstock.engine.machines import BLOCK_SIZE, Machine, Work
from penstock.engine.plan import USUAL, Measured, plan_boot
from penstock.server.hosting import Hosting
from penstock.server.settings import OnDemandSettings
from penstock.step.plan import ModelRole
from penstock.weights.streaming.ring import StreamRates
from penstock.weights.streaming.stream import WeightStream
from penstock.worker.runner import Runner
from toys import hybrid_checkpoint, hybrid_known

ROOT = Path(__file__).resolve().parents[2]
SHAPES = ROOT / "benchmarks" / "shapes"
LARGE, SMALL = str(SHAPES / "Qwen3-32B"), str(SHAPES / "Qwen3-0.6B")
NARROW = ["--machine", "desktop-24"]
BATCH, CONTEXT, STEP = 3, 128, 64
QWEN, LLAMA = tiny.checkpoint("qwen3"), tiny.checkpoint("llama")


# ---- what a boot decides


SAME: dict[str, object] = {
    "block_size": BLOCK_SIZE,
    "max_length": CONTEXT,
    "max_sequences": BATCH,
    "max_step_tokens": STEP,
    "kv_blocks": BATCH * CONTEXT // BLOCK_SIZE,
    "speculate": str(LLAMA),
}


def runner_of(booted: Booted) -> Runner:
    runner = ranks_of(booted)
    assert isinstance(runner, Runner)
    return runner


def bytes_of(booted: Booted, role: ModelRole) -> tuple[int, int]:
    """Weights and KV of a model on the device."""
    model = runner_of(booted).models[role]
    assert isinstance(model.weights, WeightStream)
    assert model.pool is not None
    return model.weights.bytes, model.pool.bytes.numel()


def forecast_of(total: int, rates: StreamRates) -> tuple[Forecast, DraftForecast]:
    """The same sequences, blocks and steps on a CPU with so much memory."""
    (_, spec, names), (_, small, its) = open_model(str(QWEN)), open_model(str(LLAMA))
    draft = DraftModel.of(small, its, "float32", BLOCK_SIZE)
    work = Work("float32", BATCH, CONTEXT, STEP, settings=Config(Path(), speculate="suffix"), draft=draft)
    found = forecast(spec, names, Machine(total, None, rates, 1e12), work)
    return found, speculation(spec, names, found)


def test_a_boot_decides_what_was_planned() -> None:
    """To the byte: the draft model's weights and KV, the target's, and what is left to that. What steps take
    is estimated by the one and measured by the other."""
    with opened(QWEN, LLAMA, **SAME) as booted:
        budget = booted.budget
        found, said = forecast_of(budget.total, USUAL)
        assert (said.weights, said.kv) == bytes_of(booted, DRAFT)
        weights, kv = bytes_of(booted, TARGET)
        assert said.left == budget.total - said.weights - said.kv
        assert (found.resting(Tier.DEVICE), found.budget.kv - said.kv) == (weights, kv)
        assert replace(found.budget, activations=budget.activations) == budget


def test_a_boot_decides_what_was_planned_where_the_target_streams(tmp_path: Path) -> None:
    with opened(QWEN, LLAMA, **SAME) as booted:
        budget, (target, _) = booted.budget, bytes_of(booted, TARGET)
        memory = budget.weights + budget.activations + budget.kv - target // 8
    with opened(QWEN, LLAMA, **SAME, device_memory=f"{memory}B", cache=tmp_path) as booted:
        stats = booted.weights.stats(exact=True)
        rates = StreamRates(stats.link_rate, stats.disk_rate, USUAL.device_read)
        found, said = forecast_of(budget.total, rates)
        outline = replace(found.plan.outline, total=memory)
        plan = plan_boot(outline, Measured(booted.budget.activations, outline.hardware, True, rates))
        assert plan.streams
        assert plan.budget == booted.budget
        assert plan.placement.homes == booted.weights.placement.homes
        assert (said.weights, said.kv) == bytes_of(booted, DRAFT)


# ---- what is shown


@pytest.mark.parametrize("drafts", ["suffix", SMALL], ids=["suffix", "draft model"])
def test_the_line_has_what_the_table_says(drafts: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [LARGE, *NARROW, "--speculate", drafts]
    table, found = text_of(capsys, *asked), json_of(capsys, *asked)
    said = found["speculation"]
    block = next(part for part in table.split("\n\n") if part.startswith("Speculative decoding"))
    rows = re.findall(r"^  (\d+) tokens? a pass.*$", block, re.MULTILINE)
    assert rows == [str(pace["tokens"]) for pace in said["paces"]] == ["1", "2", "4", "8", "12"]
    for line, pace in zip(block.splitlines()[1:], said["paces"], strict=False):
        assert format_pace(pace["tokens_per_second"]) in line.split()
        assert f"{pace['of_plain']:.2f}" in line.split()
        assert format_seconds(pace["seconds"]) in line
        assert line.endswith(f"the {pace['binding']}")
        assert not pace["drafting"] or format_seconds(pace["drafting"]) in line
    assert said["paces"][0]["tokens_per_second"] == found["decode"]["tokens_per_second"]
    assert said["paces"][-1]["of_plain"] > 11.5
    assert f"Without --speculate it decodes {format_pace(said['without'])} tokens/s." in block
    device = found["tiers"][0]
    if drafts == "suffix":
        assert (said["draft"], device["draft"]) == (None, 0)
        assert "draft model" not in block
    else:
        draft = said["draft"]
        assert (draft["family"], draft["layers"], draft["dtype"]) == ("qwen3", 28, "bfloat16")
        assert device["draft"] == draft["weights"] + draft["kv"]
        assert f"{format_size(draft['weights'])} of weights, and {format_size(draft['kv'])} of KV" in block
        assert f"{format_size(said['left'])} are left to the target" in block
        assert re.search(
            rf"^Tiers .* draft .*\n  device .*{format_size(device['draft'])}", table, re.MULTILINE
        )
    taken = ("weights", "ring", "kv", "state", "draft", "activations", "process", "free")
    assert sum(device[name] for name in taken) == device["capacity"]
    assert device["free"] >= 0


def test_a_copy_in_few_bits_has_no_kv_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    """Four bits and scales of each weight, eight of embedding and head."""
    asked = ["8B", "--device-memory", "12GiB", "--host-memory", "100GiB", *NARROW, "--speculate", "self"]
    table, said = text_of(capsys, *asked), json_of(capsys, *asked)["speculation"]
    draft = said["draft"]
    assert 4.5 < 8 * draft["weights"] / draft["parameters"] < 5
    assert (draft["kv"], draft["shares_kv"]) == (0, True)
    assert "The copy in four bits (llama, 32 layers" in table
    assert "no KV but the target's" in table
    assert "computes each prompt" not in table
    assert said["paces"][-1]["of_plain"] > 9


def test_a_model_of_few_bits_has_no_copy_of_fewer(capsys: pytest.CaptureFixture[str]) -> None:
    for model, *more in (["gpt-oss-20b"], ["8B", "--format", "int4"]):
        assert main(["plan", model, *more, *NARROW, "--speculate", "self"]) == 2
        assert f"{model} has weights of few bits already" in capsys.readouterr().err


def test_it_says_what_was_measured_and_what_was_not(capsys: pytest.CaptureFixture[str]) -> None:
    asked = [LARGE, *NARROW, "--speculate", "suffix"]
    table, said = text_of(capsys, *asked), json_of(capsys, *asked)["speculation"]
    assert "depends on the text and on the draft, and is not forecast" in table
    assert "None of these rows was measured." in table
    assert "in real texts was measured with the shipped model alone" in table
    shipped = said["measured"][0]
    assert shipped["of_plain"] == {"1": 0.90, "2": 1.25, "4": 2.27, "8": 3.49, "12": 4.16}
    kept = json.loads((ROOT / "docs/results/cpu_acceptance.json").read_text())["shipped, self"]
    for heat, held in HELD.items():
        assert round(kept[f"temperature {heat}, 16 drafted"]["tokens_a_pass"], 1) == held
        assert f"{held}" in table
    for one in said["measured"]:
        assert f"{one['model']}: " in table
        for tokens, times in one["of_plain"].items():
            assert f"{times:.2f} with {tokens}" in table


def test_nothing_is_shown_where_nothing_drafts(capsys: pytest.CaptureFixture[str]) -> None:
    for more in ([], ["--speculate", "off"]):
        assert "Specul" not in text_of(capsys, LARGE, *NARROW, *more)
        assert json_of(capsys, LARGE, *NARROW, *more)["speculation"] is None


def test_a_shape_drafts_and_a_picture_shows_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "plan.png"
    found = json_of(capsys, "0.6B", "--machine", "laptop", "--speculate", "0.6B", "--picture", str(file))
    device = found["tiers"][0]
    assert device["draft"] == found["weights"] + device["kv"]
    with Image.open(file) as image:
        row = [image.getpixel((x, 186)) for x in range(image.width)]
    pixels = sum(all(abs(a - b) < 12 for a, b in zip(one, (0x3B, 0x7C, 0xB8), strict=True)) for one in row)
    shown = device["draft"] / max(tier["capacity"] or 0 for tier in found["tiers"]) * (1200 - 48 - 148)
    assert pixels == pytest.approx(shown, abs=4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--speculate", "Suffix"], "speculate 'Suffix' is no way to draft tokens"),
        (["--speculate", "nowhere/such"], "nowhere/such"),
        (["--speculate", str(SHAPES / "Llama-3.1-8B")], "128,256 tokens was asked for"),
        (["--speculate", SMALL, "--device-memory", "3GiB"], "do without the draft model"),
    ],
)
def test_refusals_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert main(["plan", LARGE, *NARROW, *arguments]) == 2
    streams = capsys.readouterr()
    assert (streams.out, len(streams.err.splitlines())) == ("", 1)
    assert message in streams.err


def test_a_model_with_state_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with hybrid_known():
        path = hybrid_checkpoint(tmp_path / "hybrid")
        assert main(["plan", str(path), *NARROW, "--speculate", "suffix"]) == 2
        assert "could not be taken back" in capsys.readouterr().err
        text_of(capsys, str(path), *NARROW)


# ---- what may draft


@pytest.mark.parametrize(
    "word", ["Suffix", "sufix", "SUFFIX", "Self", "Auto", "on", "ngram", "", "OFF", "true"]
)
def test_a_word_that_is_no_way_to_draft_is_refused_with_those_that_are(word: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Config(SHIPPED_MODEL, speculate=word)
    for known in (repr(word), "off", "auto", "suffix", "self", "a path that is there", "owner/name"):
        assert known in str(refused.value)


def test_a_path_that_is_there_and_names_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "draft").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in (
        "off",
        "auto",
        "suffix",
        "self",
        "draft",
        "./draft",
        str(tmp_path),
        "Qwen/Qwen3-0.6B",
        "hf.co/a/b",
    ):
        check_speculate(name)


def copied(path: Path, *, without: str = "") -> Path:
    shutil.copytree(SHIPPED_MODEL, path)
    if without:
        (path / without).unlink()
    return path


def embedder(path: Path) -> Path:
    kinds = ("Transformer", "Pooling", "Normalize")
    modules = [{"path": "1", "type": f"sentence_transformers.models.{kind}"} for kind in kinds]
    (copied(path) / "modules.json").write_text(json.dumps(modules))
    return path


def reranker(path: Path) -> Path:
    file = copied(path) / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"architectures": ["LlamaForSequenceClassification"]}))
    return path


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (embedder, "makes embeddings, and does not continue text; give a smaller model"),
        (reranker, "scores documents, and does not continue text; give a smaller model"),
        (lambda path: copied(path, without="tokenizer.json"), "has no tokenizer, so its tokens may not be"),
    ],
    ids=["embeddings", "scores", "no tokenizer"],
)
def test_a_model_that_cannot_draft_is_refused_before_anything_is_loaded(
    make: Any, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft = make(tmp_path / "draft")
    (draft / "model.safetensors").write_bytes(b"")  # Whoever opened it would say so.
    config = Config(SHIPPED_MODEL, device="cpu", speculate=str(draft))
    with pytest.raises(ConfigError, match=why):
        LLM.from_config(config)
    with pytest.raises(ConfigError, match=why):
        Hosting({"shipped": config}, {}, OnDemandSettings()).prepare()
    # A plan needs no tokenizer.
    assert main(["plan", str(SHIPPED_MODEL), *NARROW, "--speculate", str(draft)]) == 2 * ("text" in why)
    assert ("does not continue text" in capsys.readouterr().err) == ("text" in why)


def test_a_target_without_text_takes_a_draft_without(tmp_path: Path) -> None:
    """Both have only numbers, as have those of these tests."""
    with LLM(QWEN, device="cpu", dtype="float32", speculate=str(QWEN), max_length=64, kv_blocks=8) as llm:
        assert llm.drafter == "model"
        assert llm.generate([[3, 4, 5]])[0].tokens
    with LLM(QWEN, device="cpu", dtype="float32", max_length=64, kv_blocks=8) as llm:
        assert llm.drafter == "off"
