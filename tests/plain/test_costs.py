"""Costs of steps: kept and read as they were, between those measured where a forecast needs them, and part of
what a forecast says."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.arch.families import family_of, read_spec
from penstock.arch.formats.recipe import config_in
from penstock.arch.layout import GroupKind, group_layouts
from penstock.base.config import Config
from penstock.base.errors import ConfigError
from penstock.bench.shapes import LAYERS_OF, SHAPES
from penstock.cli.commands import plan
from penstock.cli.commands.plan import MACHINES, kept_costs, machine_of, settle
from penstock.cli.known_costs import SHIPPED, costs_of
from penstock.engine.costs import (
    DecodeCosts,
    PromptCosts,
    StepCosts,
    costs_file,
    keep_costs,
    prompt_seconds,
    read_costs,
)
from penstock.engine.forecast import decode_pace, forecast
from penstock.engine.gains import More, gains
from penstock.engine.machines import ExpertUse, Machine, Work
from penstock.engine.passes import UseWork, decode_step, pass_work, prompt_step
from penstock.weights.streaming.residency import padded, pass_order
from penstock.weights.streaming.ring import StreamRates

ONE = DecodeCosts(1, step=1e-5, layer=2e-5, moe_layer=4e-5, weight_read=4e12, expert_read=3e12, kv_read=2e12)
FOUR = DecodeCosts(4, step=3e-5, layer=4e-5, moe_layer=6e-5, weight_read=2e12, expert_read=1e12, kv_read=1e12)
PROMPT = PromptCosts(7e14, 5e14, 6e14, 4e12, 1e-3, 2e-3, 3e-4, 5e-4)
COSTS = StepCosts("Some GPU", "bfloat16", "today", 50e9, 4.2e12, 8e14, (ONE, FOUR), PROMPT, 1e-3)
GIB = 1 << 30
RATES = StreamRates(50e9, 0.0, 4.2e12)


def test_costs_are_read_as_they_were_kept(tmp_path: Path) -> None:
    file = costs_file(tmp_path, "Some GPU / 80GB", "bfloat16")
    assert file == tmp_path / "costs" / "some-gpu-80gb-bfloat16.json"
    for costs in (COSTS, replace(COSTS, cpu_read=(5e10, 4e10, 3e10, 2e10, 1e10))):
        keep_costs(costs, file)
        assert read_costs(file) == costs
    assert [path.name for path in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize(
    "damage",
    [
        lambda body: body.pop("prompt"),
        lambda body: body.update(format=0),
        lambda body: body.update(link_rate=0),
        lambda body: body.update(expert_layer=-1),
        lambda body: body.update(slot_layer=-1),
        lambda body: body.update(cpu_read=[1e9] * 4),
        lambda body: body.update(cpu_read=[1e9] * 4 + [0]),
        lambda body: body.update(device=7),
        lambda body: body.update(more=1),
        lambda body: body["decode"].reverse(),
        lambda body: body["decode"].clear(),
        lambda body: body["decode"][0].update(kv_read=float("nan")),
        lambda body: body["decode"][0].update(weight_read=0),
        lambda body: body["decode"][0].update(expert_read=1e-300),
        lambda body: body["decode"][0].update(kv_read=10**400),
        lambda body: body.update(link_rate=1e-300),
        lambda body: body.update(slot_layer=10**400),
        lambda body: body.update(slot_layer=1e300),
        lambda body: body["decode"][1].update(rows=1),
        lambda body: body["prompt"].update(step="fast"),
        lambda body: body["prompt"].pop("attention"),
    ],
)
def test_what_are_no_costs_is_refused(damage: object, tmp_path: Path) -> None:
    body = json.loads(COSTS.line())
    damage(body)  # type: ignore[operator]
    (tmp_path / "costs.json").write_text(json.dumps(body))
    with pytest.raises(
        ConfigError, match=r"costs\.json is no file of measured step costs.*run `penstock doctor`"
    ):
        read_costs(tmp_path / "costs.json")


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, "\xff"])
def test_what_is_no_json_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "costs.json").write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"costs\.json"):
        read_costs(tmp_path / "costs.json")
    with pytest.raises(ConfigError, match="run `penstock doctor`"):
        read_costs(tmp_path / "none.json")


def test_rows_between_those_measured_cost_between_them() -> None:
    assert COSTS.rows(1) == ONE
    assert COSTS.rows(4) == FOUR
    assert COSTS.rows(300) == FOUR
    two = COSTS.rows(2)  # Half way in the logarithm.
    assert (two.rows, two.step, two.layer, two.moe_layer) == (
        2,
        pytest.approx(2e-5),
        pytest.approx(3e-5),
        pytest.approx(5e-5),
    )
    assert two.weight_read == pytest.approx(2 / (1 / 4e12 + 1 / 2e12))


def test_a_use_costs_what_it_reads_and_what_is_fixed() -> None:
    use = UseWork(steps=1, layers=0.5, moe_layers=0.5, weights=4e9, experts=3e9, kv=2e9)
    assert COSTS.decode_seconds(1, use) == pytest.approx(1e-5 + 1e-5 + 2e-5 + 3e-3)
    many = UseWork(weights=1e6, products=7e12)  # As of so many rows that computing takes longer than reading.
    assert COSTS.decode_seconds(4, many) == pytest.approx(1e-2)
    prompt = UseWork(steps=1, products=7e14, expert_products=5e14, attention=6e14, activations=4e12)
    assert prompt_seconds(PROMPT, prompt) == pytest.approx(4.001)


def machine(costs: StepCosts | None) -> Machine:
    return Machine(80 * GIB, 64 * GIB, RATES, 8e14, costs)


def paces(name: str, costs: StepCosts | None, work: Work, layers: int | None = None) -> tuple[float, float]:
    """Seconds of a decode step and of a step over prompts."""
    config = dict(LAYERS_OF[name][0]) | ({"num_hidden_layers": layers} if layers else {})
    found = forecast(read_spec(config), family_of(config).names, machine(costs), work)
    return found.decode.seconds, found.prefill.seconds


def test_a_resident_models_forecast_is_the_sum_of_its_uses() -> None:
    config, work = SHAPES["8B"], Work("bfloat16", context=2048, step_tokens=2048)
    spec, names = read_spec(config), family_of(config).names
    every = pass_order(group_layouts(spec, names, "bfloat16"), spec.tied_embeddings)
    uses = pass_work(spec, "bfloat16", every, {}, decode_step(spec, "bfloat16", 1, 2048))
    whole = UseWork.sum(uses)
    assert (whole.steps, whole.layers, whole.moe_layers) == (1, spec.layers, 0)
    decode, prefill = paces("8B", COSTS, work)
    assert decode == pytest.approx(sum(COSTS.decode_seconds(1, use) for use in uses))
    prompt = UseWork.sum(pass_work(spec, "bfloat16", every, {}, prompt_step(spec, "bfloat16", 1, 2048, 2048)))
    assert prefill == pytest.approx(prompt_seconds(PROMPT, prompt))
    bound = paces("8B", None, work)
    assert decode > bound[0]
    assert prefill > bound[1]


def test_a_prompt_takes_no_less_than_its_launches_unless_it_is_replayed() -> None:
    fast = replace(PROMPT, products=1e18, experts=1e18, attention=1e18, activations=1e18, step=0.0)
    costs = replace(
        COSTS, prompt=fast, decode=(replace(FOUR, weight_read=1e18, expert_read=1e18, moe_layer=0.0),)
    )
    _, launched = paces("0.6B", costs, Work("bfloat16", context=640, step_tokens=640))
    assert launched == pytest.approx(2e-3 + 28 * 3e-4)
    _, mixed = paces("30B-A3B", costs, Work("bfloat16", context=256, step_tokens=256), layers=12)
    assert mixed == pytest.approx(2e-3 + 12 * 5e-4)
    _, replayed = paces("0.6B", costs, Work("bfloat16", context=512, step_tokens=512))
    assert replayed < launched


def test_a_layer_whose_experts_are_elsewhere_costs_the_wait_for_its_router() -> None:
    config = dict(LAYERS_OF["30B-A3B"][0]) | {"num_hidden_layers": 12}
    spec, names = read_spec(config), family_of(config).names
    layouts = group_layouts(spec, names, "bfloat16")
    experts = [layout for layout in layouts if layout.id.kind is GroupKind.EXPERT]
    small = Machine(12 * GIB, 8 * GIB, RATES, 8e14, COSTS)
    work = Work("bfloat16", context=512, step_tokens=512)
    seconds = [
        forecast(
            spec, names, replace(small, costs=costs), replace(work, experts_fetched=fetched)
        ).decode.seconds
        for costs, fetched in ((COSTS, 0.0), (replace(COSTS, expert_layer=0.0), 0.0), (COSTS, 10.0))
    ]
    assert seconds[0] - seconds[1] == pytest.approx(12 * 1e-3)
    assert seconds[2] - seconds[0] == pytest.approx(10 * experts[0].size / 50e9)


def test_a_layer_with_slots_costs_what_deciding_takes_and_an_engine_is_forecast_as_its_plan() -> None:
    config = dict(LAYERS_OF["30B-A3B"][0]) | {"num_hidden_layers": 12}
    spec, names = read_spec(config), family_of(config).names
    layouts = group_layouts(spec, names, "bfloat16")
    size = padded(next(layout for layout in layouts if layout.id.kind is GroupKind.EXPERT))
    seconds, prompts = list[float](), list[float]()
    for costs, fetched in ((COSTS, 0.0), (replace(COSTS, slot_layer=3e-4), 0.0), (COSTS, 10.0)):
        there = Machine(8 * GIB, 64 * GIB, RATES, 8e14, costs)
        work = Work("bfloat16", context=512, step_tokens=512, experts_fetched=fetched)
        found = forecast(spec, names, there, work)
        assert found.experts is not None
        assert found.experts.copies
        same = decode_pace(spec, layouts, there, found.placement, found.experts, work)
        assert same == found.decode
        seconds.append(same.seconds), prompts.append(found.prefill.seconds)
    assert seconds[1] - seconds[0] == pytest.approx(12 * 3e-4)
    assert len(set(prompts)) == 1, "of many tokens all experts come, and nothing is decided"
    # A layer misses one of its 8 in 58 of 100 cases, and then computes with 8 experts while it comes.
    meanwhile = 0.585 * 96 * size / ONE.expert_read
    assert seconds[2] - seconds[0] == pytest.approx(10 * size / (0.93 * 50e9) - meanwhile, rel=1e-3)
    slow = replace(there, rates=replace(RATES, host_to_device=25e9))
    slower = forecast(spec, names, slow, work).decode.seconds - seconds[2]
    assert slower == pytest.approx(10 * size / 25e9 - 10 * size / (0.93 * 50e9), rel=1e-3), "its own link"
    # A step asks for 8 of 128 experts in each of 12 layers: by a share or by a count it is the same.
    given = replace(work, experts_fetched=None, expert_use=ExpertUse(((0.0, 1 - 10 / 96),)))
    assert forecast(spec, names, there, given).decode.seconds == pytest.approx(seconds[2])


def test_slots_cost_nothing_but_deciding_where_what_comes_is_hidden() -> None:
    costs = replace(COSTS, slot_layer=1e-5)
    size, link = 1e7, 50e9
    assert costs.slot_seconds(1, 12, 96, 0.0, size, link) == pytest.approx(12e-5)
    # All are missed: the first come while nothing is there, but computing goes on beside.
    all_come = 96 * size / (0.93 * 50e9) - 96 * size / 3e12 + 12e-5
    assert costs.slot_seconds(1, 12, 96, 96.0, size, link) == pytest.approx(all_come)
    slow = costs.slot_seconds(1, 12, 96, 96.0, size, 25e9)
    assert slow == pytest.approx(96 * size / 25e9 - 96 * size / 3e12 + 12e-5), "a slow link is used in full"
    fast = costs.slot_seconds(1, 12, 96, 96.0, size, 100e9)
    assert fast == pytest.approx(96 * size / (0.93 * 100e9) - 96 * size / 3e12 + 12e-5), "a faster link helps"
    assert costs.slot_seconds(1, 12, 96, 1e-3, size, 1e15) >= 12e-5


@pytest.mark.parametrize(
    ("model", "batch", "device", "rate", "hits", "alone", "shared"),
    [
        ("gpt-oss-20b", 1, 6, 62.9, 0.109, 46.40, 15.68),
        ("gpt-oss-20b", 2, 6, 62.3, 0.110, 85.68, 26.56),
        ("gpt-oss-20b", 4, 6, 61.3, 0.102, 151.49, 46.73),
        ("gpt-oss-20b", 8, 6, 55.9, 0.082, 243.20, 79.65),
        ("gpt-oss-20b", 16, 6, 49.1, 0.050, 341.85, 119.47),
        ("gpt-oss-20b", 1, 6, 45.6, 0.119, 23.36, 14.52),
        ("gpt-oss-20b", 1, 8, 48.0, 0.346, 17.61, 11.65),
        ("qwen3-30b-a3b", 8, 6, 35.2, 0.288, 100.41, 66.04),
    ],
)
def test_what_the_cpu_gained_is_forecast(
    model: str, batch: int, device: int, rate: float, hits: float, alone: float, shared: float
) -> None:
    """Milliseconds of kept runs on an H100, `h100_cpu_compute.json`, by the rate that the CPU had in them."""
    shape = SHAPES[model] if model in SHAPES else LAYERS_OF["30B-A3B"][0] | {"num_hidden_layers": 48}
    config = config_in("int4" if "qwen" in model else None, shape, model)
    spec, names = read_spec(config), family_of(config).names
    setting, _ = settle("h100", {}, kept_costs("h100", Path(), "bfloat16"))
    link = 55e9 if alone in (23.36, 17.61, 100.41) else 25e9
    there = machine_of(setting)
    rates = replace(there.rates, host_to_device=link, cpu_read=(rate * 1e9,) * 5)
    settings = Config(Path(), cpu_compute="auto")
    use = ExpertUse(((0.0, hits),))
    work = Work("bfloat16", batch=batch, context=256, step_tokens=1024, expert_use=use, settings=settings)
    found = forecast(spec, names, replace(there, device=device * GIB, rates=rates), work).decode
    assert found.cpu is not None
    assert 1e3 * found.cpu.alone == pytest.approx(alone, rel=0.15)
    assert 1e3 * found.seconds == pytest.approx(shared, rel=0.15)


def test_a_faster_link_would_bring_what_comes_to_slots_sooner() -> None:
    config = dict(LAYERS_OF["30B-A3B"][0]) | {"num_hidden_layers": 12}
    spec, names = read_spec(config), family_of(config).names
    work = Work("bfloat16", context=512, step_tokens=512, experts_fetched=90.0)
    found = forecast(spec, names, Machine(8 * GIB, 64 * GIB, RATES, 8e14, COSTS), work)
    assert found.experts is not None
    assert found.experts.copies
    bought = {gain.more: gain.decode for gain in gains(spec, names, found)}
    assert bought[More.LINK] > 0.08 * found.decode.tokens_per_second
    rates = [link * 1e9 for link in (10, 46.4, 46.6, 49.9, 50, 50.1, 55, 100)]
    seconds = [COSTS.slot_seconds(1, 12, 96, 90.0, 1e7, link) for link in rates]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[2] == seconds[4] > seconds[5]


def test_costs_are_those_that_were_measured_here_else_those_of_the_name(tmp_path: Path) -> None:
    shipped = read_costs(SHIPPED / "h100.json")
    assert costs_of(tmp_path, shipped.device, "bfloat16") == shipped
    assert costs_of(tmp_path, shipped.device, "float32") is None
    assert costs_of(tmp_path, "Some GPU", "bfloat16") is None
    keep_costs(COSTS, costs_file(tmp_path, shipped.device, "bfloat16"))
    assert costs_of(tmp_path, shipped.device, "bfloat16") == COSTS


def test_costs_from_before_there_were_slots_are_read() -> None:
    body = json.loads(replace(COSTS, slot_layer=2e-4).line())
    assert StepCosts.parse(json.dumps(body), "here").slot_layer == 2e-4
    del body["slot_layer"], body["cpu_read"]
    assert StepCosts.parse(json.dumps(body), "here") == COSTS


def test_machines_with_costs_are_forecast_with_them() -> None:
    for name, known in MACHINES.items():
        file = kept_costs(name, Path("/nowhere"), "bfloat16")
        assert (file is not None) == (known.costs is not None)
        setting, _ = settle(name, {}, file)
        assert (machine_of(setting).costs is not None) == (known.costs is not None)
    assert kept_costs("h100", Path("/nowhere"), "float32") is None


@pytest.mark.parametrize(("machine", "file"), [("h100", "cpu-bfloat16.json"), ("cpu", "h100.json")])
def test_costs_of_another_kind_of_machine_are_refused(machine: str, file: str) -> None:
    with pytest.raises(
        ConfigError, match=r"has the step costs of a [CG]PU, and the forecast is of a machine with"
    ):
        plan.settle(machine, {}, SHIPPED / file)


def test_costs_and_memory_of_a_gpu_mean_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there is none, and where the CPU has no instructions for halves."""
    monkeypatch.setattr(plan, "_gpu", lambda: ("", 0))
    monkeypatch.setattr(plan, "multiplies_halves", lambda: False)
    setting, _ = plan.settle(None, {"device_memory": 75e9}, SHIPPED / "h100.json")
    assert plan.machine_of(setting).host
    assert plan.dtype_there(None, "bfloat16", ("device_memory", "host_memory")) == "bfloat16"
    assert plan.dtype_there(None, "bfloat16", ("device_memory",)) == "float32"


def test_ranks_that_share_a_cpu_have_no_measured_costs() -> None:
    alone = Machine(64 << 30, None, RATES, 1e12, COSTS)
    assert alone.of_rank(1).costs is COSTS
    assert alone.of_rank(2).costs is None
    assert replace(alone, host=64 << 30).of_rank(2).costs is COSTS


def test_lines_of_a_gpu_are_those_that_older_versions_read() -> None:
    assert not {"host", "disk_rate"} & json.loads(COSTS.line()).keys()
    here = replace(COSTS, host=True, disk_rate=1e9)
    assert StepCosts.parse(here.line(), "here") == here
