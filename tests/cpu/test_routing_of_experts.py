"""What routers choose is recorded as it is, read back or refused, replayed and imposed."""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.arch.spec import MoeSpec, Router, Scoring
from penstock.base.config import Config
from penstock.base.errors import ConfigError
from penstock.bench.routing import imposing
from penstock.bench.routing import recording as recordings
from penstock.bench.routing.imposing import ImposedRouting, RoutingTable
from penstock.bench.routing.policies import POLICIES, Ideal, Room
from penstock.bench.routing.recorder import Recorder
from penstock.bench.routing.recording import Recording, RoutedModel
from penstock.bench.routing.replay import foretelling, hit_curve, steps_of
from penstock.bench.routing.use import expert_use
from penstock.bench.speed import measure
from penstock.cli.main import main
from penstock.engine.boot import Booted, boot
from penstock.engine.placing import Override
from penstock.models import decoder
from penstock.models.moe import mixture
from penstock.ops.matrix import GroupViews, Matrix
from penstock.ops.route import route
from penstock.weights.checkpoint.shape import Shape

MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
    "vocab_size": 96,
    "max_position_embeddings": 256,
    "dtype": "float32",
}


def mixture_of(experts: int, top_k: int) -> MoeSpec:
    """A mixture of such a size."""
    moe = Shape.of(MOE).spec.moe
    assert moe is not None
    return replace(moe, experts=experts, top_k=top_k)


MODEL = RoutedModel("small", "qwen3_moe", "ab12", 8, 2, "book.txt")


def made(tokens: int = 40, layers: int = 3, model: RoutedModel = MODEL, seed: int = 0) -> Recording:
    rng = np.random.default_rng(seed)
    ranks = rng.gumbel(size=(tokens, layers, model.experts)) - np.log(np.arange(model.experts) + 1.0)
    order = np.argsort(-ranks, axis=-1).astype(recordings.least_dtype(model.experts))
    few = tokens // 4
    return Recording(
        model,
        np.arange(layers, dtype=np.int32),
        np.array([tokens - few, few], np.int32),
        np.array([few, 0], np.int32),
        order[..., : model.top_k],
        order[:, 1:, : 2 * model.top_k],
    )


def same(one: Recording, other: Recording) -> bool:
    arrays = "layers", "lengths", "prompts", "chosen", "foretold"
    return one.model == other.model and all(
        np.array_equal(getattr(one, name), getattr(other, name)) for name in arrays
    )


# -- the file
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("experts", [8, 512])
def test_a_recording_is_read_as_it_was_written(experts: int, tmp_path: Path) -> None:
    recording = made(model=replace(MODEL, experts=experts))
    recording.write(tmp_path / "r.npz")
    assert same(Recording.read(tmp_path / "r.npz"), recording)
    assert recording.chosen.dtype == (np.uint8 if experts == 8 else np.uint16)


def test_a_file_with_any_byte_changed_is_refused_or_the_same(tmp_path: Path) -> None:
    recording, file = made(), tmp_path / "r.npz"
    recording.write(file)
    whole, rng = file.read_bytes(), random.Random(1)
    for at in [*range(0, len(whole), 7), len(whole) - 1]:
        damaged = bytearray(whole)
        damaged[at] ^= 1 << rng.randrange(8)
        file.write_bytes(damaged)
        try:
            found, fault = Recording.read(file), ""
        except ConfigError as error:
            found, fault = None, str(error)
        assert same(found, recording) if found else "no recorded routing" in fault, at
        assert "\n" not in fault
    for length in range(0, len(whole), 97):
        file.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match="record it again"):
            Recording.read(file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: replace(r, chosen=r.chosen[:-1]), "chosen is uint8"),
        (lambda r: replace(r, chosen=r.chosen.astype(np.int64)), "chosen is int64"),
        (lambda r: replace(r, chosen=np.full_like(r.chosen, 3)), "chosen has one expert twice"),
        (lambda r: replace(r, chosen=r.chosen + np.uint8(7)), "chosen has expert"),
        (lambda r: replace(r, foretold=r.foretold[..., :1]), "foretold is uint8"),
        (lambda r: replace(r, layers=r.layers[::-1].copy()), "do not rise"),
        (lambda r: replace(r, layers=r.layers.astype(np.int64)), "layers is int64"),
        (lambda r: replace(r, lengths=r.lengths + np.int32(1)), "chosen is uint8"),
        (lambda r: replace(r, lengths=r.lengths * np.array([1, 0], np.int32)), "without any"),
        (lambda r: replace(r, prompts=r.lengths + np.int32(1)), "longer than its sequence"),
        (lambda r: replace(r, model=replace(r.model, top_k=9)), "9 of 8 experts"),
        (lambda r: replace(r, model=replace(r.model, experts="8")), "experts of its header is '8'"),
        (lambda r: replace(r, model=replace(r.model, name="a\x1b[2J")), "name of its header"),
    ],
)
def test_arrays_that_do_not_belong_together_are_refused(
    change: Callable[[Recording], Recording], message: str, tmp_path: Path
) -> None:
    change(made()).write(tmp_path / "r.npz")
    with pytest.raises(ConfigError, match=message):
        Recording.read(tmp_path / "r.npz")


def test_arrays_of_another_recording_are_refused(tmp_path: Path) -> None:
    for name, seed in (("one", 1), ("other", 2)):
        made(seed=seed).write(tmp_path / f"{name}.npz")
    with np.load(tmp_path / "one.npz") as one, np.load(tmp_path / "other.npz") as other:
        np.savez_compressed(tmp_path / "mixed.npz", **{**one, "chosen": other["chosen"]})
        np.savez_compressed(tmp_path / "less.npz", **{name: one[name] for name in one if name != "prompts"})
    for name, message in (("mixed", "do not match their checksum"), ("less", "lacks prompts")):
        with pytest.raises(ConfigError, match=message):
            Recording.read(tmp_path / f"{name}.npz")


def test_a_file_that_would_fill_memory_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made().write(tmp_path / "r.npz")
    monkeypatch.setattr(recordings, "MOST_BYTES", 100)
    with pytest.raises(ConfigError, match="bytes of memory"):
        Recording.read(tmp_path / "r.npz")


# -- what a recorder sees
# ------------------------------------------------------------------------------------------------------------


def router(weight: Tensor, norm: Tensor) -> GroupViews:
    return GroupViews({"router": Matrix.of(weight)}, {"norm": norm}, ())


def test_a_recorder_keeps_choices_and_asks_the_next_router_early() -> None:
    spec = Shape.of(MOE).spec
    rng = torch.Generator().manual_seed(1)
    hidden = [torch.randn(5, 32, generator=rng) for _ in range(2)]
    routers = [
        router(torch.randn(8, 32, generator=rng), torch.rand(32, generator=rng) + 0.5) for _ in range(2)
    ]
    recorder = Recorder().on(spec, 4, torch.device("cpu"), torch.float32)
    assert recorder.layers == (0, 2)

    def passed() -> list[Tensor]:
        every = []
        for layer, views, x in zip((0, 2), routers, hidden, strict=True):
            normed = x * views.vectors["norm"]
            scores = normed @ views.matrices["router"].tensor.T
            assert recorder.scores(layer, views, normed, scores) is scores
            every.append(scores)
        return every

    passed()
    with recorder:
        scores = passed()
        passed()
    chosen, foretold = recorder.taken()
    assert chosen.shape == (10, 2, 2)
    assert foretold.shape == (10, 1, 4)
    for at, one in enumerate(scores):
        assert np.array_equal(chosen[:5, at], one.topk(2).indices.numpy())
    early = (hidden[0] * routers[1].vectors["norm"]) @ routers[1].matrices["router"].tensor.T
    assert np.array_equal(foretold[5:, 0], early.topk(4).indices.numpy())
    assert recorder.taken()[0].size == 0


# -- replays
# ------------------------------------------------------------------------------------------------------------


def test_parts_of_a_recording_run_side_by_side() -> None:
    chosen = np.array([[[0, 1]], [[2, 1]], [[3, 0]], [[2, 3]], [[7, 6]]], np.uint8)
    recording = replace(made(5, 1), chosen=chosen)
    assert [layer.tolist() for (layer,) in steps_of(recording, 1)] == [[0, 1], [1, 2], [0, 3], [2, 3], [6, 7]]
    assert [layer.tolist() for (layer,) in steps_of(recording, 2)] == [[0, 1, 3], [1, 2, 3]]


def test_hits_by_hand() -> None:
    order = [0, 1, 0, 2, 0, 1, 0, 3]
    chosen = np.array(order, np.uint8).reshape(8, 1, 1)
    recording = replace(made(8, 1, replace(MODEL, top_k=1)), chosen=chosen)
    curve = hit_curve(recording, 1, (1, 2), ("static", "ideal", "lru", "slots"))
    assert (curve.steps, curve.asked) == (4, 1.0)
    # Of 0 1 0 3: static has 0, and 1 beside it; LRU of one slot always has the other one.
    assert curve.hits["static"] == (0.5, 0.75)
    assert curve.hits["ideal"] == (0.5, 0.75)
    assert curve.hits["lru"] == (0.0, 0.5)
    assert curve.hits["slots"] == (0.5, 0.5)


@given(st.integers(1, 3), st.integers(2, 10), st.integers(0, 10_000), st.sampled_from(sorted(POLICIES)))
@settings(deadline=None, max_examples=60)
def test_no_policy_has_more_slots_than_there_are_or_hits_more_than_the_ideal(
    layers: int, experts: int, seed: int, name: str
) -> None:
    rng = np.random.default_rng(seed)
    slots = int(rng.integers(layers, layers * experts + 1))
    room = Room(layers, experts, slots)
    steps = [
        [np.unique(rng.integers(0, experts, rng.integers(1, experts + 1))) for _ in range(layers)]
        for _ in range(30)
    ]
    policy, ideal = POLICIES[name](room), Ideal(room, steps)
    hits, most = 0, 0
    for step in steps:
        for layer, asked in enumerate(step):
            here = policy.step(layer, asked)
            assert here <= min(len(asked), slots)
            hits, most = hits + here, most + ideal.step(layer, asked)
    if name != "today":  # Its slots are full from the start.
        assert hits <= most
    if slots == layers * experts:
        distinct = sum(len({int(one) for step in steps for one in step[layer]}) for layer in range(layers))
        every = sum(len(asked) for step in steps for asked in step)
        assert hits == (every if name == "today" else every - distinct)


def test_a_layer_that_is_foretold_wholly_has_a_recall_of_one() -> None:
    recording = made()
    told = foretelling(recording)
    assert told is not None
    assert told.wide == (1.0, 1.5, 2.0)
    assert told.recall == (1.0, 1.0, 1.0)
    worse = foretelling(replace(recording, foretold=recording.foretold[..., ::-1].copy()))
    assert worse is not None
    assert worse.recall == (0.0, 0.5, 1.0)
    assert foretelling(made(layers=1)) is None


# -- imposed
# ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def seen() -> Iterator[list[tuple[int, Tensor]]]:
    """The layer and the choices of every mixture that is computed."""
    found: list[tuple[int, Tensor]] = []

    def spied(x: Tensor, choice: Any, moe: MoeSpec, layer: int, *given: Any, **more: Any) -> Tensor:
        scores = isinstance(choice, Tensor)
        found.append((layer, choice.topk(moe.top_k).indices if scores else choice[1]))
        return mixture(x, choice, moe, layer, *given, **more)

    with patch.object(decoder, "mixture", spied):
        yield found


def booted(routing: ImposedRouting | None, **more: object) -> Booted:
    config = Config(Path(), device="cpu", max_sequences=4, max_step_tokens=16, prefix_cache=False, **more)
    return boot(config, Shape.of(MOE), override=Override(routing=routing))


def test_every_token_takes_the_experts_of_the_table(seen: list[tuple[int, Tensor]]) -> None:
    routing = ImposedRouting("zipf", 1.2)
    it = booted(routing)
    try:
        seen.clear()
        measure.decode(it, measure.BatchWork(3, 20, 2, 1))
    finally:
        it.engine.close()
    table = torch.from_numpy(routing.chosen(mixture_of(8, 2), 2, 4096))
    rows = torch.arange(len(table)).unsqueeze(1) + torch.arange(3) * (len(table) // 4)
    steps = [(one, other) for (first, one), (_, other) in pairwise(seen) if first == 0 and len(one) == 3]
    assert {layer for layer, _ in seen} == {0, 2}
    assert len(steps) > 3
    # Each step of three rows finds them at one place of the table, and the next step one behind it.
    places = [
        set(
            ((table[rows % len(table)] == torch.stack(step, 1)).flatten(1).all(1))
            .nonzero()
            .flatten()
            .tolist()
        )
        for step in steps
    ]
    assert any(all(at + number in found for number, found in enumerate(places)) for at in places[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_table_takes_as_much_of_the_device_as_it_may(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both kinds of scores count: those to choose by, and those that are foretold."""
    most = 1 << 16
    monkeypatch.setattr(imposing, "_TABLE_BYTES", most)
    table = ImposedRouting("uniform").on(Shape.of(MOE).spec, 4, torch.device("cpu"), dtype)
    size = table._scores.nbytes + table._likely.nbytes
    assert most - size // len(table._scores) < size <= most


def views() -> GroupViews:
    return GroupViews({}, {}, ())


def test_a_prompt_goes_through_the_table_token_by_token() -> None:
    chosen = torch.from_numpy(ImposedRouting("uniform").chosen(mixture_of(8, 2), 2, 50))
    table = RoutingTable(chosen, 8, (0, 2), 4, torch.float32)
    at = 0
    for tokens in (30, 3, 40):
        many = tokens > 4
        found = [
            table.scores(layer, views(), torch.empty(0), torch.zeros(rows, 8)).topk(2).indices
            for layer, rows in ((0, tokens), (2, 1 if many else tokens))
        ]
        rows = (at + (torch.arange(tokens) if many else torch.arange(tokens) * 12)) % 50
        at += tokens if many else 1
        assert torch.equal(found[0], chosen[rows, 0])
        assert torch.equal(found[1], chosen[rows[: len(found[1])], 1])


@pytest.mark.parametrize("recall", [0.0, 0.7, 1.0])
def test_as_many_are_foretold_as_the_recording_says(recall: float) -> None:
    chosen = torch.from_numpy(ImposedRouting("uniform").chosen(mixture_of(64, 4), 2, 400))
    table = RoutingTable(chosen, 64, (0, 2), 4, torch.float32, recall=recall)
    named = []
    for _ in range(300):
        table.scores(0, views(), torch.empty(0), torch.zeros(3, 64))
        scores = table.foretold(2, torch.zeros(3, 64))
        found = table.scores(2, views(), torch.empty(0), torch.zeros(3, 64)).topk(4).indices
        named.append(scores.gather(1, found) > 0)
    assert float(torch.stack(named).float().mean()) == pytest.approx(recall + (1 - recall) / 16, abs=0.03)


def test_a_prompt_is_foretold_what_its_own_tokens_take() -> None:
    """As each token of a decode step is, also where the last layer of the step before was left out."""
    chosen = torch.from_numpy(ImposedRouting("uniform").chosen(mixture_of(8, 2), 3, 50))
    table = RoutingTable(chosen, 8, (1, 2, 5), 4, torch.float32, recall=1.0)
    for tokens, layers in ((30, (1, 2, 5)), (3, (1, 2)), (40, (1, 2)), (2, (1, 2, 5)), (20, (1, 2, 5))):
        told = None
        for layer, following in zip(layers, (*layers[1:], 0), strict=True):
            given = torch.zeros(tokens, 8)
            taken = table.scores(layer, views(), given, given).topk(2).indices
            assert told is None or torch.equal(taken, told)
            told = table.foretold(following, given).topk(2).indices if following else None


def test_a_step_waits_for_nothing_and_makes_no_shape_of_data() -> None:
    chosen = torch.zeros(50, 2, 2, dtype=torch.int64, device="meta")
    table = RoutingTable(chosen, 8, (0, 2), 4, torch.bfloat16)
    for tokens in (3, 30):
        for layer in (0, 2):
            given = torch.zeros(tokens, 8, dtype=torch.bfloat16, device="meta")
            assert table.scores(layer, views(), given, given).shape == (tokens, 8)


def test_shares_are_sensible_in_every_dtype() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        chosen = torch.arange(16).roll(3).view(1, 1, 16)[..., :8]
        scores = RoutingTable(chosen, 128, (0,), 1, dtype).scores(0, views(), chosen, torch.zeros(1, 128))
        shares, order = scores.float().softmax(-1).topk(8)
        assert torch.equal(order[0], chosen[0, 0])
        assert shares.sum() > 0.99
        assert 1 < shares[0, 0] / shares[0, -1] < 3


@pytest.mark.parametrize("scoring", [Scoring.SIGMOID, Scoring.SOFTMAX])
@pytest.mark.parametrize(
    ("experts", "groups", "top_groups", "top_k"), [(16, 4, 2, 4), (12, 4, 1, 3), (64, 8, 4, 8)]
)
def test_routers_that_choose_among_groups_take_what_is_imposed(
    experts: int, groups: int, top_groups: int, top_k: int, scoring: Scoring, tmp_path: Path
) -> None:
    corrects = scoring is Scoring.SIGMOID
    router = Router(scoring, groups=groups, top_groups=top_groups, correction=corrects)
    moe = replace(mixture_of(experts, top_k), router=router)
    made(40).write(tmp_path / "r.npz")
    correction = torch.linspace(-0.05, 0.05, experts) if corrects else None
    for text in ("uniform", "zipf:1.1", str(tmp_path / "r.npz")):
        chosen = ImposedRouting.parse(text).chosen(moe, 2, 40)
        assert (np.diff(np.sort(chosen, -1)) > 0).all(), "each of a token's experts is another"
        table = RoutingTable(torch.from_numpy(chosen), experts, (0, 1), 40, torch.float32)
        for layer in range(2):
            scores = table.scores(layer, views(), torch.empty(0), torch.zeros(40, experts))
            _, found = route(scores, moe, correction)
            rows = (torch.arange(40) * (len(chosen) // 40)) % len(chosen)
            wanted = torch.from_numpy(chosen[:, layer])[rows]
            assert torch.equal(found.sort(-1).values, wanted.sort(-1).values)
        # What may stay as it was does.
        free = ImposedRouting.parse(text).chosen(replace(moe, router=Router(scoring)), 2, 40)
        assert (chosen[..., 0] == free[..., 0]).all()
        fits = [
            len({one // (experts // groups) for one in row}) <= top_groups
            for row in free.reshape(-1, top_k).tolist()
        ]
        assert (chosen == free).all(-1).reshape(-1)[fits].all()


def test_zipf_prefers_few_and_uniform_none() -> None:
    moe = mixture_of(64, 4)
    for text, least, most in (("uniform", 0.2, 0.3), ("zipf", 0.5, 0.75), ("zipf:2", 0.75, 1.0)):
        chosen = ImposedRouting.parse(text).chosen(moe, 3, 2000)
        assert chosen.shape == (2000, 3, 4)
        assert (np.diff(np.sort(chosen, -1)) > 0).all()
        for layer in range(3):
            counts = np.sort(np.bincount(chosen[:, layer].ravel(), minlength=64))[::-1]
            assert least < counts[:16].sum() / counts.sum() < most


@pytest.mark.parametrize(
    ("experts", "top_k", "layers"), [(8, 2, 5), (16, 2, 3), (16, 4, 3), (12, 5, 2), (4, 4, 1)]
)
def test_a_recording_fits_any_shape(experts: int, top_k: int, layers: int, tmp_path: Path) -> None:
    recording = made(64)
    recording.write(tmp_path / "r.npz")
    moe = mixture_of(experts, top_k)
    chosen = ImposedRouting.parse(str(tmp_path / "r.npz")).chosen(moe, layers, 50)
    assert chosen.shape == (50, layers, top_k)
    assert (np.diff(np.sort(chosen, -1)) > 0).all()
    assert 0 <= chosen.min() <= chosen.max() < experts
    if (experts, top_k) == (8, 2):
        assert np.array_equal(chosen, recording.chosen[:50, [0, 1, 2, 0, 1]])
    if experts == 16:  # What was popular still is, in either half.
        counts = np.bincount(chosen[:, 0].ravel() // 2, minlength=8)
        assert counts.argmax() == np.bincount(recording.chosen[:, 0].ravel()).argmax()


# -- the commands
# ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MOE))
    return folder


def test_a_benchmark_imposes_a_routing(
    bare: Path, seen: list[tuple[int, Tensor]], capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--device", "cpu", "--context", "12", "--repeat", "1", "--max-step-tokens", "16"]
    assert main(["bench", "decode", str(bare), *small, "--output", "3", "--routing", "zipf:1.5"]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    assert "routing zipf:1.5" in table[0]
    assert json.loads(last)["routing"] == "zipf:1.5"
    imposed = {tuple(row) for _, chosen in seen[-6:] for row in chosen.tolist()}
    known = ImposedRouting.parse("zipf:1.5").chosen(mixture_of(8, 2), 2, 4096)
    assert imposed <= {tuple(row) for row in known.reshape(-1, 2).tolist()}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "decode", "--context", "8", "--routing", "zipf"], "has no experts; leave --routing out"),
        (["bench", "decode", "--routing", "zipf:x"], "write zipf, or zipf:1.2"),
        (["bench", "decode", "--routing", "zipf:-1"], "write zipf, or zipf:1.2"),
        (["bench", "prefill", "--routing", "nowhere.npz"], "nowhere.npz does not exist"),
        (["bench", "experts"], "give a MODEL and --text, or --recorded"),
        (["bench", "experts", "--recorded", "nowhere.npz"], "nowhere.npz does not exist"),
        (["bench", "experts", ".", "--recorded", "x"], "give a MODEL and --text, or --recorded"),
        (["bench", "experts", "--recorded", "x", "--policies", "mru"], "mru"),
        (["plan", "8B", "--machine", "h200", "--expert-hits", "0.5"], "has no experts"),
        (["plan", "8B", "--machine", "h200", "--expert-hits", "1.5"], "range"),
        (["plan", "gpt-oss-20b", "--machine", "h200", "--expert-hits", "nan"], "not a number"),
        (["plan", "8B", "--machine", "h200", "--expert-hits", "0.5", "--routing", "x"], "exclude each other"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) in (1, 2)
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_recording_is_replayed_without_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(200).write(tmp_path / "r.npz")
    replayed = ["bench", "experts", "--recorded", str(tmp_path / "r.npz")]
    assert main([*replayed, "--policies", "slots,ideal", "--slots", "6,12"]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    assert "3 layers of 8 experts, 2 a token; 200 tokens of book.txt" in table[0]
    line = json.loads(last)
    assert [curve["batch"] for curve in line["curves"]] == [1, 16]
    for curve in line["curves"]:
        assert curve["slots"] == [6, 12]
        assert all(a <= b for a, b in zip(curve["hits"]["slots"], curve["hits"]["ideal"], strict=True))
    assert line["foretold"]["recall"] == [1.0, 1.0, 1.0]
    assert main([*replayed, "--slots", "2"]) == 2
    assert "give 3, one for each layer, to 24" in " ".join(capsys.readouterr().err.split())


def test_plan_takes_the_hits_of_a_recording(
    bare: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recording = made(400)
    recording.write(tmp_path / "r.npz")
    use = expert_use(tmp_path / "r.npz", mixture_of(8, 2), 4)
    curve = hit_curve(recording, 4, (3, 6, 9, 12, 18), ("slots",))
    assert use.asked == curve.asked
    for slots, hits in zip(curve.slots, curve.hits["slots"], strict=True):
        assert use.at(slots / 24) == pytest.approx(hits)
    assert use.at(0.0) == 0
    assert use.at(1.0) == 1
    assert expert_use(tmp_path / "r.npz", mixture_of(16, 2), 4).asked is None
    with pytest.raises(ConfigError, match="too few for two steps of batch 201"):
        expert_use(tmp_path / "r.npz", mixture_of(8, 2), 201)


def test_plan_says_which_hits_it_took(bare: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(400).write(tmp_path / "r.npz")
    shape = str(Path(__file__).parents[2] / "benchmarks" / "shapes" / "Qwen3-30B-A3B")
    machine = ["--machine", "desktop-16", "--batch", "2"]

    def planned(*more: str) -> tuple[str, dict[str, float]]:
        assert main(["plan", shape, *machine, *more]) == 0
        table = capsys.readouterr().out
        assert main(["plan", shape, *machine, *more, "--json"]) == 0
        return table, json.loads(capsys.readouterr().out)["decode"]

    table, decode = planned("--expert-hits", "0.6")
    experts = decode["experts"]
    assert experts["hits"] == 0.6
    assert experts["come"] == pytest.approx(0.4 * experts["asked"])
    assert f"{experts['asked']:,.0f} experts; 60.0% of them are on the device (given)" in table
    assert f"{experts['come']:,.0f} come" in table
    table, recorded = planned("--routing", str(tmp_path / "r.npz"))
    assert recorded["experts"]["source"] == "recorded"
    assert f"{recorded['experts']['hits']:.1%} of them are on the device (recorded)" in table
    _, evenly = planned()
    assert evenly["experts"]["source"] == "tokens choose evenly"
    assert evenly["seconds"] > decode["seconds"]
