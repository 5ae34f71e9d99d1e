"""What drafts take and would give: the memory of a draft model beside its target, and the pace by tokens that
a pass yields, which never grows faster than these."""

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from penstock.arch.families import family_of, read_spec
from penstock.arch.layout import group_layouts, kv_layout
from penstock.base.config import Config
from penstock.base.errors import BudgetError
from penstock.base.tiers import Tier
from penstock.cli.known_costs import SHIPPED
from penstock.cli.plan_drafts import MEASURED
from penstock.engine.acceptance import TOKENS, DraftForecast, speculation
from penstock.engine.costs import read_costs
from penstock.engine.draft import DraftModel
from penstock.engine.forecast import Forecast, forecast
from penstock.engine.machines import BLOCK_SIZE, ExpertUse, Machine, Work
from penstock.engine.passes import decode_step
from penstock.weights.streaming.residency import padded
from penstock.weights.streaming.ring import Link, StreamRates

GIB = 1 << 30
ROOT = Path(__file__).resolve().parents[2]
DENSE: Mapping[str, object] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32768,
    "max_position_embeddings": 65536,
    "dtype": "bfloat16",
}
MIXED = DENSE | {
    "model_type": "mixtral",
    "intermediate_size": 3584,
    "num_local_experts": 32,
    "num_experts_per_tok": 2,
}
SMALL = DENSE | {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8}
RATES = StreamRates(host_to_device=25e9, disk_to_host=5e9, device_read=1e12)
ROOMY = Machine(64 * GIB, 64 * GIB, RATES, 1e14)
NARROW = replace(ROOMY, device=9 * GIB)
SUFFIX = Work("bfloat16", context=1024, step_tokens=512, settings=Config(Path(), speculate="suffix"))
OFF = replace(SUFFIX, settings=Config(Path()))


def drafted(work: Work = SUFFIX, config: Mapping[str, object] = SMALL) -> Work:
    """With a draft model."""
    draft = DraftModel.of(read_spec(config), family_of(config).names, "bfloat16", BLOCK_SIZE, work.shard)
    return replace(work, draft=draft)


def of(
    machine: Machine, work: Work = SUFFIX, config: Mapping[str, object] = DENSE
) -> tuple[Forecast, DraftForecast]:
    spec, names = read_spec(config), family_of(config).names
    found = forecast(spec, names, machine, work)
    return found, speculation(spec, names, found)


# ---- memory


@pytest.mark.parametrize("machine", [ROOMY, NARROW], ids=["rests", "streams"])
def test_a_draft_model_stays_on_the_device_and_the_target_has_less(machine: Machine) -> None:
    alone, looked_up = of(machine)
    found, said = of(machine, drafted())
    layouts = group_layouts(read_spec(SMALL), family_of(SMALL).names, "bfloat16")
    blocks = SUFFIX.context // BLOCK_SIZE
    assert said.weights == sum(map(padded, layouts))
    assert said.kv == blocks * kv_layout(read_spec(SMALL), "bfloat16", BLOCK_SIZE).block_bytes
    assert said.left == found.budget.total - said.weights - said.kv
    assert (looked_up.weights, looked_up.kv, looked_up.left) == (0, 0, alone.budget.total)
    assert found.budget.kv == alone.budget.kv + said.kv
    assert found.budget.weights + found.budget.activations + found.budget.kv <= found.budget.total
    assert found.resting(Tier.DEVICE) + found.ring(Tier.DEVICE) <= found.budget.weights - said.weights
    if machine is NARROW:
        assert found.resting(Tier.DEVICE) < alone.resting(Tier.DEVICE)
        assert said.paces[0].tokens_per_second < alone.decode.tokens_per_second < said.without
        assert said.without == of(machine, OFF)[0].decode.tokens_per_second
    else:
        assert found.resting(Tier.DEVICE) == alone.resting(Tier.DEVICE)


def test_what_draws_behind_drafts_counts_as_in_a_boot() -> None:
    """More rows of logits are in memory at a time, up to 64 of them, which tells with a large vocabulary."""
    wide = DENSE | {"vocab_size": 262144}
    off, on, many = (of(ROOMY, work, wide)[0].budget for work in (OFF, SUFFIX, replace(OFF, batch=33)))
    assert on.activations == many.activations > off.activations
    both = of(ROOMY, drafted(config=wide), DENSE | {"vocab_size": 262144, "intermediate_size": 4096})[0]
    assert both.budget.activations > on.activations, "its recorded steps take room, too"


def test_a_draft_model_for_which_there_is_no_room_is_named() -> None:
    tight, long = replace(ROOMY, device=3 * GIB), replace(SUFFIX, batch=6)
    of(tight, long)
    told = "--device-memory to [0-9,]+ MiB, or do without"
    for config, said in ((SMALL, "--device-memory, or do without"), (DENSE, told)):
        with pytest.raises(BudgetError, match=f"for the draft model.*{said} the draft model"):
            of(tight, drafted(long, config))


# ---- pace


COSTS = read_costs(SHIPPED / "h100.json")
CASES = {
    "rests": (ROOMY, SUFFIX, DENSE),
    "streams": (NARROW, SUFFIX, DENSE),
    "from disk": (replace(NARROW, host=6 * GIB), SUFFIX, DENSE),
    "draft rests": (ROOMY, drafted(), DENSE),
    "draft streams": (NARROW, drafted(), DENSE),
    "several": (NARROW, replace(drafted(), batch=4), DENSE),
    "mixture": (NARROW, SUFFIX, MIXED),
    "mixture of many": (NARROW, replace(SUFFIX, batch=8), MIXED),
    "cpu": (replace(ROOMY, host=None), drafted(), DENSE),
    "far": (NARROW, replace(drafted(), context=65536), DENSE),
    "measured": (replace(ROOMY, costs=COSTS), replace(SUFFIX, batch=4), DENSE),
    "measured streams": (replace(NARROW, costs=COSTS), drafted(), DENSE),
}


CASES["measured, launched at once"] = (
    replace(ROOMY, costs=replace(COSTS, prompt=replace(COSTS.prompt, host_step=0.0, host_layer=0.0))),
    replace(SUFFIX, batch=4),
    DENSE,
)
"""There a layer takes less time with 16 rows than with 4."""


@pytest.mark.parametrize("case", CASES)
def test_the_pace_grows_with_what_is_accepted_and_never_faster(case: str) -> None:
    found, said = of(*CASES[case])
    assert [pace.tokens for pace in said.paces] == list(TOKENS)
    plain = said.paces[0]
    assert (plain.pace, plain.drafting) == (found.decode, 0)
    for fewer, more in pairwise(said.paces):
        assert more.tokens_per_second <= more.tokens * plain.tokens_per_second * (1 + 1e-12)
        assert more.seconds >= fewer.seconds
        if case != "measured":  # There launches take longer than a recorded step.
            assert more.tokens_per_second > fewer.tokens_per_second


def test_a_target_that_streams_yields_nearly_as_many_times_as_much() -> None:
    """By hand: the pass takes what crosses the link, and the draft model reads its weights and KV eleven
    times."""
    found, said = of(NARROW, drafted())
    last = said.paces[-1]
    assert last.pace.binding is Link.LINK
    assert last.pace.seconds == pytest.approx(found.decode.copied / RATES.host_to_device, rel=0.03)
    assert last.pace.copied == found.decode.copied
    assert last.tokens_per_second > 11 * said.paces[0].tokens_per_second
    draft = found.work.draft
    assert draft is not None
    read = sum(layout.size for layout in draft.layouts if str(layout.id) != "embedding")
    kv = SUFFIX.context // BLOCK_SIZE * draft.kv.block_bytes
    assert last.drafting == pytest.approx(11 * (read + kv) / RATES.device_read, rel=0.01)
    assert of(NARROW)[1].paces[-1].drafting == 0


def test_a_pass_reads_the_kv_of_a_sequence_once() -> None:
    long = replace(SUFFIX, context=32768)
    found, said = of(ROOMY, long)
    rows = found.pacing.pace(decode_step(found.pacing.spec, "bfloat16", 12, long.context))
    assert said.paces[-1].pace.seconds == pytest.approx(found.decode.seconds, rel=0.01)
    assert rows.seconds > 1.2 * found.decode.seconds, "as many sequences read their own"


def test_the_kernels_of_steps_that_verify_are_launched() -> None:
    """They are never recorded, which takes longer than a small resident model computes."""
    found, said = of(replace(ROOMY, costs=COSTS))
    launches = COSTS.eager_seconds(found.pacing.spec)
    assert launches == pytest.approx(COSTS.prompt.host_step + 32 * COSTS.prompt.host_layer)
    assert found.decode.seconds < launches
    assert [pace.seconds for pace in said.paces[1:]] == pytest.approx([launches] * 4)


def test_more_tokens_ask_for_more_experts_also_where_that_was_recorded() -> None:
    use = ExpertUse(((0.0, 0.5),), asked=3.0, source="recorded")
    found, said = of(NARROW, replace(SUFFIX, batch=2, expert_use=use), MIXED)
    asked = [pace.pace.experts.asked for pace in said.paces if pace.pace.experts is not None]
    assert asked[0] == 3.0 * 32
    assert asked == sorted(set(asked))
    assert asked[-1] <= 32 * 32
    assert found.decode.experts is not None


def test_a_draft_model_is_idle_where_kv_is_in_host_memory() -> None:
    found, said = of(NARROW, replace(drafted(), context=65536))
    assert found.far
    assert [pace.drafting for pace in said.paces] == [0] * len(TOKENS)
    assert any("look-up alone" in warning for warning in said.warnings)


def test_a_boots_warning_is_said() -> None:
    short = drafted(config=SMALL | {"max_position_embeddings": 512})
    assert any("trained for 512 positions" in warning for warning in of(ROOMY, short)[1].warnings)
    assert of(ROOMY, drafted())[1].warnings == ()


def test_no_more_tokens_than_a_step_has_room_for() -> None:
    _, said = of(ROOMY, replace(SUFFIX, batch=100))
    assert [pace.tokens for pace in said.paces] == [1, 2, 4]


def test_a_cpu_beside_the_device_computes_no_feed_forwards_of_drafts() -> None:
    settings = replace(SUFFIX.settings, cpu_compute="on")
    rates = replace(RATES, cpu_read=(60e9,) * 5)
    found, said = of(replace(NARROW, rates=rates), replace(SUFFIX, settings=settings))
    assert found.decode.cpu is not None
    assert all(pace.pace.cpu is None for pace in said.paces[1:])


def test_what_is_said_to_be_measured_was() -> None:
    for one in MEASURED:
        found = json.loads((ROOT / "docs" / "results" / one.file).read_text())[one.case]
        for tokens, times in one.of_plain.items():
            assert times == pytest.approx(found[f"{tokens} imposed"]["of_plain"], abs=0.005)
        assert set(one.of_plain) <= set(TOKENS)
