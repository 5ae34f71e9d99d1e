"""`--speculate auto`: what is chosen on which machine, that a boot and a plan choose alike and say so, that
no token is another, and that two drafters at once lose nothing by counted time."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import tiny
from counted import Drafts, Machine, Passes, run
from cpu.test_plan import json_of, text_of
from cpu.test_resting import MACHINES, Model, machine, plain_rate, rates, right, wrong
from cpu.test_run_ahead import alike
from cpu.test_speculation import SETTINGS, plainly, wanted
from penstock import LLM
from penstock.base.config import Config
from penstock.base.errors import BudgetError, CheckpointError
from penstock.cli.main import main
from penstock.engine.choosing import DRAFTED, GAIN, YIELD
from penstock.engine.deciding import decided
from penstock.engine.draft import DraftModel, recipe_of_copy
from penstock.sched.speculation import Speculation
from penstock.sched.suffix import Draft
from penstock.server.monitoring.counts import SpeculationState
from penstock.weights.checkpoint.reader import Checkpoint
from penstock.weights.pieces import STORE
from toys import hybrid_checkpoint, hybrid_known

ROOMY, NARROW = "2GiB", "80MiB"
"""Memory in which all weights of `wide` rest, and in which a part of them has to stream."""


@pytest.fixture(scope="module")
def wide() -> Path:
    """A model of 60 MiB, of which no group is large."""
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 16, "head_dim": 64}
    return tiny.write(tiny.CASES["llama"], tiny.folder() / "wide", **sizes)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def chosen(path: Path, cache: Path, **more: object) -> tuple[str, str]:
    """What a boot decides, and the line that it says."""
    said = list[str]()
    config = Config(path, **(SETTINGS | {"speculate": "auto", "cache": cache} | more))
    with Checkpoint.open(path, cache) as model:
        found = decided(config, model, said.append)
    [line] = said
    return found.speculate, line


# -- what is chosen


def test_a_copy_drafts_where_weights_stream_and_it_fits(wide: Path, cache: Path) -> None:
    assert chosen(wide, cache, device_memory=ROOMY) == (
        "suffix",
        "drafts: of look-up, since all weights stay on the device, where a pass takes little longer",
    )
    kind, line = chosen(wide, cache, device_memory=NARROW)
    assert kind == "self"
    assert line.startswith("drafts: of look-up, and of a copy in four bits, since")
    assert f"if passes that verify {DRAFTED} drafted tokens yield {YIELD}" in line
    kind, line = chosen(wide, cache, device_memory=NARROW, draft_memory="4MiB")
    assert kind == "suffix"
    assert "takes 7.99 MiB, and draft_memory is 4.00 MiB" in line


def test_ranks_choose_alike(wide: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 decides for those that it starts. Those of torchrun would each measure by themselves."""
    settings: dict[str, object] = {"device_memory": "130MiB", "tensor_parallel": 2, "max_sequences": 4}
    assert chosen(wide, cache, **settings)[0] == "self"
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "::1", "MASTER_PORT": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    kind, line = chosen(wide, cache, **settings)
    assert kind == "suffix"
    assert "torchrun has started the ranks" in line


def test_what_is_named_stays_as_it_is(wide: Path, cache: Path) -> None:
    with Checkpoint.open(wide, cache) as model:
        for named in ("off", "suffix", "self"):
            config = Config(wide, speculate=named, device="cpu")
            assert decided(config, model, pytest.fail) is config


def test_where_no_copy_is_possible_it_says_why_and_looks_up(
    tmp_path: Path, wide: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = SETTINGS | {"cache": tmp_path, "device_memory": NARROW}
    with LLM(wide, **settings, speculate="self"):
        pass
    few = next(path for path in tmp_path.glob("wide-*"))
    with caplog.at_level(logging.INFO, "penstock"), LLM(few, **settings, speculate="auto") as llm:
        assert llm.drafter == "suffix"
    assert "drafts: of look-up, since" in caplog.text


def test_a_model_with_state_drafts_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with hybrid_known():
        path = hybrid_checkpoint(tmp_path / "hybrid")
        with caplog.at_level(logging.INFO, "penstock"), LLM(path, device="cpu", speculate="auto") as llm:
            assert llm.drafter == "off"
            assert llm.generate([[3, 4, 5]])[0].drafted_tokens == 0
    assert "drafts: none, since layers of" in caplog.text


def test_a_copy_is_taken_only_where_much_is_forecast_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    """On an H200 weights that the copy displaces cost more than drafts give that hold in part."""
    for gpu, takes in (("h100", True), ("h200", False)):
        asked = ["70B", "--machine", gpu, "--speculate"]
        said = json_of(capsys, *asked, "auto")["speculation"]
        assert bool(said["draft"]) is takes
        assert "takes 35.4 GiB" in said["choice"]
        named = json_of(capsys, *asked, "self")["speculation"]
        pace = next(one for one in named["paces"] if one["tokens"] == 8)
        about = YIELD / 8 * pace["tokens_per_second"]
        assert (about > GAIN * named["without"]) is takes
        assert f"{named['without']:.3g} without" in said["choice"]


def test_a_plan_chooses_as_a_boot_does(capsys: pytest.CaptureFixture[str]) -> None:
    machine = ["--machine", "desktop-16", "--speculate"]
    table, found = text_of(capsys, "8B", *machine, "auto"), json_of(capsys, "8B", *machine, "auto")
    assert "--speculate auto: drafts: of look-up, and of a copy in four bits, since" in table
    named = json_of(capsys, "8B", *machine, "self")["speculation"]
    assert found["speculation"] == named | {"choice": found["speculation"]["choice"]}
    assert found["speculation"]["draft"]["shares_kv"]
    resident = json_of(capsys, "0.6B", *machine, "auto")["speculation"]
    assert resident["draft"] is None
    assert "all weights stay on the device" in resident["choice"]
    little = json_of(capsys, "8B", *machine, "auto", "--draft-memory", "1GiB")["speculation"]
    assert little["draft"] is None
    assert "draft_memory is 1.00 GiB" in little["choice"]


def test_groups_of_a_copy_divide_the_rows_of_every_matrix(cache: Path) -> None:
    """Also of each rank's part of them."""
    for name, ranks, group in (("llama", 1, 16), ("llama", 2, 8), ("llama_linear", 1, 16)):
        with Checkpoint.open(tiny.checkpoint(name), cache) as model:
            recipe = recipe_of_copy(model.spec, model.names, "float32", ranks, "it has")
        assert recipe.group == group


# -- that it is exact


def test_no_token_is_another_and_both_draft(wide: Path, cache: Path) -> None:
    asked = wanted(24)
    prompts, params = [prompt for prompt, _ in asked], [wishes for _, wishes in asked]
    with LLM(wide, **SETTINGS, device_memory=ROOMY) as llm:
        plain = llm.generate(prompts, params)
    for memory, drafter in ((ROOMY, "suffix"), (NARROW, "self")):
        more = {"device_memory": memory, "cache": cache, "speculate": "auto", "max_sequences": 4}
        with LLM(wide, **(SETTINGS | more)) as llm:
            assert llm.drafter == drafter
            assert llm.booted.weights.placement.everything_resident is (drafter == "suffix")
            alike(llm.generate(prompts, params), plain, 1e-4)
            state = SpeculationState.of(llm.stats(), llm.drafter)
        assert state.drafter == drafter


# -- memory of drafts


def test_a_draft_model_takes_no_more_than_it_may(cache: Path) -> None:
    """Its pool has fewer blocks then, and so have requests; what they say is the same."""
    draft, asked = str(tiny.checkpoint("qwen3")), wanted()
    plain = plainly("llama")
    with LLM(tiny.checkpoint("llama"), **SETTINGS, speculate=draft) as llm:
        most = llm.booted.budget.blocks
        model = llm.booted.engine.scheduler.speculation
        assert model is not None
    with Checkpoint.open(tiny.checkpoint("qwen3"), cache) as small:
        found = DraftModel.of(small.spec, small.names, "float32", 4)
    for blocks in (25, most):
        limit = found.weights + blocks * found.block_bytes
        settings = SETTINGS | {"speculate": draft, "draft_memory": limit, "max_length": None}
        with LLM(tiny.checkpoint("llama"), **settings) as llm:
            assert llm.booted.budget.blocks == blocks
            few = [(prompt, wish) for prompt, wish in asked if len(prompt) + (wish.max_tokens or 0) < 90]
            alike(
                llm.generate(*map(list, zip(*few, strict=True))),
                [one for one, pair in zip(plain, asked, strict=True) if pair in few],
                1e-4,
            )
    for more in (
        {"draft_memory": found.weights},
        {"draft_memory": found.weights + 9 * found.block_bytes, "kv_blocks": 10},
    ):
        with pytest.raises(BudgetError, match=r"the draft model takes .* of its KV on the device, but"):
            LLM(tiny.checkpoint("llama"), **(SETTINGS | {"speculate": draft} | more))


def test_a_copy_takes_no_more_than_it_may(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = SETTINGS | {"speculate": "self", "cache": tmp_path}
    with pytest.raises(BudgetError, match=r"^the copy in few bits takes .* of weights on the device, but"):
        LLM(tiny.checkpoint("llama"), **settings, draft_memory="1KiB")
    with LLM(tiny.checkpoint("llama"), **settings, draft_memory="1MiB") as llm:
        assert llm.drafter == "self"
    asked = ["plan", "8B", "--machine", "desktop-16", "--speculate", "self"]
    assert main([*asked, "--draft-memory", "1GiB"]) == 2
    assert (
        "takes 4.40 GiB of weights on the device, but --draft-memory is 1.00 GiB" in capsys.readouterr().err
    )
    assert main([*asked, "--draft-memory", "5GiB"]) == 0


# -- copies that are damaged or old


def test_a_damaged_copy_says_that_it_may_be_removed(tmp_path: Path) -> None:
    settings = SETTINGS | {"speculate": "self", "cache": tmp_path}
    with LLM(tiny.checkpoint("llama"), **settings):
        pass
    [path] = tmp_path.glob("llama-*")
    store = path / STORE
    data = bytearray(store.read_bytes())
    data[len(data) // 2] ^= 1
    store.write_bytes(data)
    with pytest.raises(CheckpointError) as told:
        LLM(tiny.checkpoint("llama"), **settings)
    assert f"penstock made this pack by itself: remove {path}, and the next run" in str(told.value)


def test_copies_of_what_a_model_was_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, cache = tmp_path / "mine", tmp_path / "cache"
    settings = SETTINGS | {"speculate": "self", "cache": cache}
    for seed in (1, 2):
        tiny.write(replace(tiny.CASES["llama"], seed=seed), model)
        (cache / f"mine-{'0' * 32}-float32").mkdir(parents=True, exist_ok=True)  # Not finished.
        with caplog.at_level(logging.INFO, "penstock"), LLM(model, **settings):
            pass
        said = [line for line in caplog.messages if "packs of what this model was before" in line]
        finished = [path for path in cache.glob("mine-*") if (path / STORE).exists()]
        assert len(finished) == seed
        if seed == 1:
            assert not said
            [before] = finished
    [line] = said
    assert line.endswith(f"may be removed if no run needs them: {before}")


# -- by counted time


def both(
    name: str,
    rows: int,
    count: int,
    looked_up: Callable[[int, int], Sequence[int]],
    by_model: Callable[[int, int], Sequence[int]],
) -> tuple[Passes, Speculation]:
    device: Machine = machine(name)
    speculation = Speculation(Drafts(device, looked_up), clock=lambda: device.now)
    speculation.model = Model(device, by_model)
    passes, _ = run(device, rows, count, speculation)
    return passes, speculation


STEPS_AHEAD = [name for name in MACHINES if name != "CPU"]


@pytest.mark.parametrize("rows", [1, 8, 32])
@pytest.mark.parametrize("name", STEPS_AHEAD)
def test_two_drafters_whose_drafts_never_hold_cost_less_than_two_percent(name: str, rows: int) -> None:
    passes, speculation = both(name, rows, 900, wrong, wrong)
    assert min(rates(passes, 128)) >= 0.98 * plain_rate(name, rows)
    assert speculation.counts.drafts > 10


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("name", ["GPU", "weights stream"])
def test_what_is_looked_up_at_no_cost_goes_before_drafts_that_cost(name: str, rows: int) -> None:
    """Both hold. What look-up drafts is learnt while the model's drafts are verified in its place."""
    passes, _ = both(name, rows, 300, right, right)
    alone, _ = both(name, rows, 300, right, wrong)
    assert rates(passes)[-1] >= 0.99 * rates(alone)[-1]
    assert rates(passes)[-1] > 2 * plain_rate(name, rows)


def test_each_request_is_drafted_for_by_what_holds_of_it() -> None:
    """Of half of the requests look-up is right, and of the others it finds nothing."""

    def some(number: int, place: int) -> list[int]:
        return right(number, place) if number % 2 else []

    passes, _ = both("weights stream", 8, 500, some, right)
    looked_up, _ = both("weights stream", 8, 500, some, wrong)
    assert rates(passes)[-1] > 1.1 * rates(looked_up)[-1]


def test_drafts_that_look_up_gives_for_nothing_are_not_paid_for() -> None:
    """The model's hold twice as long, but each of its tokens takes a fifth of the target's step."""
    speculation = Speculation(Drafts(machine("GPU"), wrong))
    found, drawn = Draft((1,) * 4, (1.0,) * 4, 32), Draft((1,) * 8, (1.0,) * 8, by_model=True)
    for tokens in (1, 9):
        speculation._seconds.add(tokens, 1.0)
    speculation._largest = 9
    for _ in range(60):
        speculation.survival.learn(found, 4)
        speculation.survival.learn(drawn, 8)
    for seconds, model in ((0.001, True), (0.2, False)):
        speculation.model = Model(machine("GPU"), right, seconds=seconds)
        assert speculation._deepest(1, 1, 16)[0] >= 8, "alone it would pay"
        assert (speculation.depths([found], 1, 16) != [0]) is model
