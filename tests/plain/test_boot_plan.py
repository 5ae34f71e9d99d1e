"""engine.plan: what a boot decides, as values: a table of machines and models, and the plan of each."""

import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from penstock.arch.families import family_of, read_spec
from penstock.arch.formats.floats import Float8
from penstock.arch.formats.format import WeightFormat
from penstock.arch.formats.gguf import Blocks
from penstock.arch.formats.integers import Integers
from penstock.arch.layout import GroupId, GroupKind, GroupLayout, group_layouts, kv_layout
from penstock.arch.shards import WHOLE, Shard
from penstock.base.config import Config
from penstock.base.errors import BudgetError, ConfigError
from penstock.base.tiers import Tier
from penstock.engine.budget import Budget, memory_of
from penstock.engine.cpu import cpu_blocker, with_cpu
from penstock.engine.draft import DraftModel, beyond_trained, check_draft
from penstock.engine.limits import dtype_of, limits_of
from penstock.engine.plan import USUAL, BootPlan, Measured, Outline, Rest, plan_boot
from penstock.engine.rooms import Hardware, device_room, host_room
from penstock.ops.row_classes import MOST_TOKENS
from penstock.weights.streaming.beside import LOSS
from penstock.weights.streaming.residency import Placement, WeightLimits, padded
from penstock.weights.streaming.ring import StreamRates, lay_ring
from penstock.worker.sizes import (
    HEAD_ROWS,
    cold_bytes,
    graph_bytes,
    mixed_counts,
    row_counts,
    run_counts,
    shared_bytes,
)

GIB, MIB = 1 << 30, 1 << 20
DENSE = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 8192,
    "max_position_embeddings": 4096,
    "dtype": "bfloat16",
}
MIXED = DENSE | {
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "intermediate_size": 2048,
}
DYNAMIC = DENSE | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
HOPPER = Hardware(cuda=True, free=64 * GIB, whole=80 * GIB, host_free=100 * GIB, host_whole=125 * GIB)
HOPPER = replace(HOPPER, kernels=True, pdl=True)
AMPERE = replace(HOPPER, pdl=False)
NARROW = replace(HOPPER, host_free=GIB // 2)
PLAIN = replace(HOPPER, kernels=False)
CPU = Hardware(cuda=False, free=64 * GIB, whole=64 * GIB, host_free=64 * GIB, host_whole=64 * GIB)
STEP = 64 * MIB
"""What the largest step takes."""


@dataclass(frozen=True)
class Ways:
    """KV beyond the device."""

    device_bytes: int = 8 * MIB
    host_bytes: int = GIB


def outlined(
    config: dict[str, object], hardware: Hardware, total: int, far: Ways | None = None, **settings: object
) -> Outline[Ways]:
    spec = read_spec(config)
    asked = Config(Path(), **settings)  # type: ignore[arg-type]
    layouts = group_layouts(spec, family_of(config).names, "bfloat16")
    kv, limits = kv_layout(spec, "bfloat16", asked.block_size), limits_of(asked, spec, hardware)
    one_memory = not hardware.cuda and host_room(asked, hardware) == 0
    return Outline(asked, hardware, spec, WHOLE, "bfloat16", limits, one_memory, total, layouts, kv, far)


def whole(config: dict[str, object]) -> int:
    return sum(map(padded, outlined(config, CPU, 0).layouts))


def planned(
    config: dict[str, object],
    hardware: Hardware,
    share: float,
    *,
    disk: bool = True,
    rates: StreamRates | None = None,
    **settings: object,
) -> BootPlan[Ways]:
    """On a device with room for this share of the weights beside a step and KV of one sequence."""
    outline = outlined(config, hardware, 0, **settings)
    kv = outline.demand(0).least_blocks * outline.kv.block_bytes
    total = int(share * whole(config)) + STEP + kv
    return plan_boot(replace(outline, total=total), Measured(STEP, hardware, disk, rates))


@pytest.mark.parametrize(
    ("config", "hardware", "share", "rest", "early", "recorded", "runs", "why"),
    [
        (DENSE, HOPPER, 1.0, Rest.ALL, True, True, True, None),
        (DENSE, AMPERE, 1.0, Rest.ALL, False, True, True, None),
        (DENSE, HOPPER, 0.5, Rest.EXPERTS, False, True, False, None),
        (DENSE, PLAIN, 1.0, Rest.ALL, True, False, False, "no kernel of our own"),
        (DENSE, CPU, 1.0, Rest.ALL, False, False, False, "no CUDA device"),
        (DYNAMIC, HOPPER, 1.0, Rest.ALL, True, False, False, "each request's length"),
        (MIXED, HOPPER, 1.0, Rest.ALL, True, True, True, None),
        (MIXED, HOPPER, 0.6, Rest.SOME, True, True, False, None),
        (MIXED, NARROW, 0.6, Rest.SOME, False, False, False, "experts stream"),
    ],
    ids=[
        "rests",
        "older GPU",
        "streams",
        "no kernels",
        "CPU",
        "dynamic rope",
        "mixture",
        "experts come",
        "experts from disk",
    ],
)
def test_machines_and_models(
    config: dict[str, object],
    hardware: Hardware,
    share: float,
    rest: Rest,
    early: bool,
    recorded: bool,
    runs: bool,
    why: str | None,
) -> None:
    plan = planned(config, hardware, share)
    assert (plan.rest, plan.early, plan.recorded, plan.record_runs) == (rest, early, recorded, runs)
    assert plan.streams == (rest is not Rest.ALL)
    assert (plan.graph_blocker is None) == (why is None)
    assert (why or "") in (plan.graph_blocker or "")
    assert not planned(config, hardware, share, graphs=False).recorded
    budget = plan.budget
    assert budget.weights + budget.activations + budget.kv <= budget.total
    assert budget.blocks >= 1


def test_experts_have_slots_on_the_device_where_the_host_holds_them_all() -> None:
    """Beside what is for those that pass through."""
    plan = planned(MIXED, HOPPER, 0.6)
    room = plan.experts
    assert room is not None
    assert room.copies
    assert (room.on_device, room.on_host, room.on_disk) == (0, room.experts, 0)
    assert room.slots > 0
    assert room.device_ring == 9, "eight of them, and one that comes ahead"
    assert room.device == (room.slots + room.device_ring) * room.size
    assert "slots for copies" in str(room)
    assert plan.budget.weights >= plan.placement.resting(Tier.DEVICE) + room.device
    from_disk = planned(MIXED, NARROW, 0.6).experts
    assert from_disk is not None
    assert (from_disk.copies, from_disk.slots) == (False, 0)
    assert from_disk.on_disk > 0
    without = planned(MIXED, replace(HOPPER, kernels=False), 0.6).experts
    assert without is not None
    assert not without.copies


def test_kernels_do_not_begin_early_where_other_groups_than_experts_stream() -> None:
    plan = planned(MIXED, HOPPER, 0.03)
    assert plan.experts is not None
    assert plan.experts.copies
    assert not plan.placement.everything_resident
    assert (plan.outline.early, plan.early, plan.compile_again) == (True, False, True)


def test_the_host_decides_where_layers_have_different_numbers_of_experts() -> None:
    outline = outlined(MIXED, HOPPER, GIB)
    assert outline.decides
    assert outline.layouts[-2].id.kind is GroupKind.EXPERT
    assert not replace(outline, layouts=(*outline.layouts[:-2], outline.layouts[-1])).decides


def test_what_was_compiled_for_weights_that_rest_is_compiled_again_where_kv_takes_their_room() -> None:
    """By themselves they would fit: 0.99 of them and what is for KV and the step."""
    plan = planned(DENSE, HOPPER, 0.99)
    assert plan.outline.may_rest
    assert (plan.outline.early, plan.early, plan.compile_again) == (True, False, True)
    assert not planned(DENSE, HOPPER, 1.0).compile_again
    assert not planned(DENSE, AMPERE, 0.99).compile_again


def test_all_ranks_go_by_the_least() -> None:
    plan = planned(DENSE, HOPPER, 1.0)
    least = plan.agreed(plan.budget.blocks - 1, Rest.EXPERTS)
    assert least.budget == replace(plan.budget, blocks=plan.budget.blocks - 1)
    assert (least.early, least.recorded, least.record_runs, least.compile_again) == (False, True, False, True)
    assert not planned(MIXED, HOPPER, 1.0).agreed(1, Rest.SOME).recorded


def test_the_same_values_give_the_same_plan_and_measured_rates_another_placement() -> None:
    plan = planned(DENSE, HOPPER, 0.5, host_memory="2GiB")
    measured = Measured(STEP, HOPPER, disk=True)
    assert plan_boot(plan.outline, measured) == plan
    again = plan_boot(plan.outline, replace(measured, rates=replace(USUAL, disk_to_host=0.0)))
    assert again.placement.homes.keys() == plan.placement.homes.keys()
    assert not again.needs_disk
    assert again.limits == plan.limits


def test_the_disk_is_needed_where_host_memory_is_short() -> None:
    little = "700MiB"  # 512 MiB are set aside.
    plan = planned(DENSE, HOPPER, 0.3, host_memory=little)
    assert plan.needs_disk
    assert plan.placement.resting(Tier.DISK) > 0
    assert not planned(DENSE, HOPPER, 0.3).needs_disk
    with pytest.raises(BudgetError, match=r"there is no disk|does not fit|do not fit"):
        planned(DENSE, HOPPER, 0.3, disk=False, host_memory=little)


def test_a_cpu_streams_through_a_part_of_its_own_memory() -> None:
    plan = planned(DENSE, CPU, 0.6)
    assert 0 < plan.beside < whole(DENSE) / 8
    assert plan.limits.host == plan.beside
    there = plan.placement.resting(Tier.DEVICE) + plan.placement.device_ring.size
    assert plan.budget.weights == there + plan.beside, "that part holds no KV"
    both = planned(DENSE, CPU, 0.6, device_memory="1GiB", host_memory="3GiB")
    assert (both.beside, both.limits.host) == (0, 2 * GIB)


def test_far_kv_takes_its_part_of_the_host_and_of_the_device() -> None:
    near = outlined(MIXED, HOPPER, 8 * GIB)
    far = replace(near, far=Ways())
    steps = cold_bytes(far.sizes.rows(far.spec))
    assert steps >= 16 * MIB
    assert far.beside - near.beside == Ways().device_bytes + steps, "with the steps that are recorded for it"
    assert (near.demand(0).length, far.demand(0).length) == (near.settings.max_length, None)
    small = whole(MIXED) // 2
    plans = [plan_boot(replace(one, total=small), Measured(STEP, HOPPER, disk=True)) for one in (near, far)]
    assert plans[0].limits.host - plans[1].limits.host == Ways().host_bytes


def test_limits_that_are_given_replace_those_of_the_budget() -> None:
    outline = outlined(DENSE, HOPPER, 8 * GIB)
    given = WeightLimits(whole(DENSE) // 2, 2 * whole(DENSE))
    plan = plan_boot(outline, Measured(STEP, HOPPER, disk=False), given)
    assert plan.streams
    assert plan.limits is given
    everything = plan_boot(outline, Measured(STEP, HOPPER, disk=False), replace(given, device=4 * GIB))
    assert everything.rest is Rest.ALL


def test_experts_rest_where_only_they_do_not_move() -> None:
    outline = outlined(MIXED, HOPPER, 8 * GIB)
    sizes = [padded(layout) for layout in outline.layouts if layout.id.kind is GroupKind.EXPERT]
    assert len(sizes) == 16 * 8
    plan = plan_boot(outline, Measured(STEP, HOPPER, disk=False))
    assert (plan.experts, plan.experts_rest) == (None, True)


# ---- a draft model


SMALL = DENSE | {"num_hidden_layers": 4, "hidden_size": 512, "intermediate_size": 1024}


def beside(outline: Outline[Ways], config: dict[str, object] = SMALL) -> Outline[Ways]:
    """With a draft model."""
    other = outlined(config, outline.hardware, 0)
    return replace(outline, draft=DraftModel(other.spec, other.dtype, other.layouts, other.kv))


def room_for(outline: Outline[Ways], blocks: int) -> int:
    """Bytes of a device that holds all weights, a step and so many blocks, of all models, and no more."""
    draft = outline.draft
    kv = outline.kv.block_bytes + (draft.kv.block_bytes if draft else 0)
    return whole(DENSE) + (draft.weights if draft else 0) + STEP + blocks * kv


def test_a_draft_model_is_within_the_same_budget() -> None:
    """To the byte: its weights, its KV in every block, and its recorded steps."""
    alone = outlined(DENSE, HOPPER, 0, kv_blocks=100)
    both = beside(alone)
    assert both.draft is not None
    for outline in (alone, both):
        total, measured = room_for(outline, 100), Measured(STEP, HOPPER, disk=False)
        plan = plan_boot(replace(outline, total=total), measured)
        assert (plan.rest, plan.budget.blocks) == (Rest.ALL, 100)
        assert plan.budget.weights + plan.budget.activations + plan.budget.kv == total
        with pytest.raises(BudgetError) as refused:  # A byte less.
            plan_boot(replace(outline, total=total - 1), measured, plan.limits)
        assert ("draft model" in str(refused.value)) == (outline is both)
    alone, both = (replace(one, total=8 * GIB) for one in (alone, both))
    assert both.block_bytes == alone.block_bytes + both.draft.kv.block_bytes  # type: ignore[union-attr]
    assert both.of_draft is not None
    assert both.beside == alone.beside + both.of_draft.beside > alone.beside
    without = replace(both, settings=replace(both.settings, graphs=False))
    assert without.beside == 0


@pytest.mark.parametrize("blocks", [None, 100])
@pytest.mark.parametrize("hardware", [HOPPER, CPU])
def test_a_budget_that_is_too_small_says_the_least_that_would_do(
    hardware: Hardware, blocks: int | None
) -> None:
    outline = outlined(DENSE, hardware, 20 * MIB, kv_blocks=blocks)
    measured = Measured(STEP, hardware, disk=True, rates=USUAL)
    with pytest.raises(BudgetError, match="is too small for one group") as refused:
        plan_boot(outline, measured)
    found = re.search(r"so that the budget is ([\d,]+) MiB at least", str(refused.value))
    assert found is not None
    least = int(found[1].replace(",", "")) * MIB
    plan_boot(replace(outline, total=least), measured)
    with pytest.raises(BudgetError):
        plan_boot(replace(outline, total=least - MIB), measured)


def test_decode_steps_of_a_draft_model_have_a_row_for_each_sequence() -> None:
    """It verifies nothing, so it records no more of them, and less memory is set aside."""
    both = beside(outlined(DENSE, HOPPER, 8 * GIB))
    both = replace(
        both, settings=replace(both.settings, speculate="self"), limits=replace(both.limits, max_sequences=2)
    )
    draft = both.of_draft
    assert draft is not None
    assert draft.draft is None
    assert (both.sizes.rows(both.spec), draft.sizes.rows(draft.spec)) == (HEAD_ROWS, 2)
    assert draft.sizes.drafted == both.sizes.drafted > 0, "it computes trees, for which kernels are compiled"
    assert draft.beside < replace(draft, only_drafts=False).beside
    tokens = both.limits.max_step_tokens
    blocks = -(-both.limits.max_length // both.sizes.block_size)
    assert draft.beside == graph_bytes(draft.spec, draft.dtype, 2, tokens, blocks=blocks)


def test_a_draft_model_rests_where_the_target_streams() -> None:
    outline = beside(outlined(DENSE, HOPPER, 0))
    least = outline.demand(0).least_blocks * outline.block_bytes
    for share, rest in ((1.0, Rest.ALL), (0.5, Rest.EXPERTS)):
        total = int(share * whole(DENSE)) + outline.draft.weights + STEP + least  # type: ignore[union-attr]
        plan = plan_boot(replace(outline, total=total), Measured(STEP, HOPPER, disk=False))
        draft = plan.of_draft
        assert draft is not None
        assert (plan.rest, draft.rest) == (rest, Rest.ALL)
        assert (draft.early, draft.recorded, draft.record_runs, draft.compile_again) == (*[True] * 3, False)
        assert draft.placement.resting(Tier.DEVICE) == outline.draft.weights  # type: ignore[union-attr]
        budget = plan.budget
        assert draft.budget is budget
        assert budget.weights + budget.activations + budget.kv <= budget.total
        assert budget.weights >= draft.placement.resting(Tier.DEVICE) + plan.placement.resting(Tier.DEVICE)
        agreed = plan.agreed(3, Rest.SOME).of_draft
        assert agreed is not None
        assert (agreed.budget.blocks, agreed.rest) == (3, Rest.ALL)
    alone = plan_boot(replace(outline, draft=None, total=total), Measured(STEP, HOPPER, disk=False))
    assert alone.placement.resting(Tier.DEVICE) > plan.placement.resting(Tier.DEVICE)
    assert alone.limits.host == plan.limits.host, "it takes none of the host"


def test_weights_that_would_rest_alone_need_not_beside_a_draft_model() -> None:
    alone = outlined(DENSE, HOPPER, whole(DENSE))
    assert alone.may_rest
    assert alone.early
    assert not beside(alone).may_rest
    assert not beside(alone).early


def test_a_draft_model_of_another_vocabulary_is_refused() -> None:
    target, same = read_spec(DENSE), read_spec(SMALL)
    check_draft(target, same)
    with pytest.raises(ConfigError, match="8,000 tokens was asked for, but the model has 8,192"):
        check_draft(target, read_spec(SMALL | {"vocab_size": 8000}))


def test_the_parts_of_the_memory_that_is_told_add_up() -> None:
    mib = 1 << 20
    budget = Budget(1 << 30, 10 * mib, 20 * mib, block_bytes=mib, blocks=30, block_size=64, state=5 * mib)
    assert str(budget).startswith(
        "65.0 MiB of 1.00 GiB allowed: weights 10.0 MiB, activations 20.0 MiB, state of sequences 5.00 MiB, "
        "KV 30.0 MiB = "
    )


def test_memory_of_ranks() -> None:
    assert memory_of(["a"]) == ["memory a"]
    assert memory_of(["a", "a", "a"]) == ["memory of each of 3 ranks a"]
    assert memory_of(["a", "a", "b"]) == ["memory of rank 0 a", "memory of rank 1 a", "memory of rank 2 b"]


@pytest.mark.parametrize(
    ("trained", "length", "warned"), [(4096, 4096, False), (4096, 4097, True), (4096, 100, False)]
)
def test_a_draft_model_of_fewer_positions(trained: int, length: int, warned: bool) -> None:
    small = SMALL | {"max_position_embeddings": trained}
    said = beyond_trained(read_spec(small), length)
    assert bool(said) == warned
    assert not warned or ("trained for 4,096 positions" in said and "may have 4,097" in said)
    dynamic = {"rope_type": "dynamic", "factor": 2.0}
    assert not beyond_trained(read_spec(small | {"rope_scaling": dynamic}), length)


def test_a_draft_model_that_leaves_no_room_is_refused() -> None:
    outline = beside(outlined(DENSE, HOPPER, 0), DENSE)
    total = whole(DENSE) + STEP
    with pytest.raises(BudgetError, match=r"for the draft model; .* or do without the draft model"):
        plan_boot(replace(outline, total=total), Measured(STEP, HOPPER, disk=True))


def test_a_budget_that_is_too_small_is_refused() -> None:
    outline = outlined(DENSE, HOPPER, 4 * MIB)
    with pytest.raises(BudgetError, match="too small for one group"):
        plan_boot(outline, Measured(STEP, HOPPER, disk=True))


@pytest.mark.parametrize("hardware", [HOPPER, CPU])
def test_blocks_that_leave_no_room_for_weights_are_refused_with_those_that_would(hardware: Hardware) -> None:
    outline = outlined(DENSE, hardware, whole(DENSE) // 2 + STEP, kv_blocks=10_000)
    measured = Measured(STEP, hardware, disk=True)
    with pytest.raises(BudgetError, match=r"or lower kv_blocks to [\d,]+$") as refused:
        plan_boot(outline, measured)
    most = int(str(refused.value).rpartition(" ")[2].replace(",", ""))
    for blocks in (most, most + 1):
        fewer = replace(outline, settings=replace(outline.settings, kv_blocks=blocks))
        if blocks == most:
            assert plan_boot(fewer, measured).budget.blocks == most
        else:
            with pytest.raises(BudgetError):
                plan_boot(fewer, measured)


# ---- what a Config leaves open


@pytest.mark.parametrize(
    ("asked", "pack", "halves", "found"),
    [
        ("auto", None, True, "bfloat16"),
        ("auto", None, False, "float32"),
        ("auto", Path("p"), False, "bfloat16"),
        ("float16", None, False, "float16"),
        ("bfloat16", Path("p"), False, "bfloat16"),
    ],
)
def test_dtypes(asked: str, pack: Path | None, halves: bool, found: str) -> None:
    config = Config(Path(), dtype=asked)  # type: ignore[arg-type]
    assert dtype_of(config, "bfloat16", pack, replace(CPU, halves=halves)) == found


def test_a_pack_has_one_dtype() -> None:
    with pytest.raises(ConfigError, match="packed in bfloat16"):
        dtype_of(Config(Path(), dtype="float16"), "bfloat16", Path("p"), CPU)


def test_what_the_device_and_the_host_give() -> None:
    assert device_room(Config(Path()), HOPPER) == int(0.9 * HOPPER.free)
    assert device_room(Config(Path()), CPU) == CPU.free // 2
    assert device_room(Config(Path(), device_memory="50%"), HOPPER) == 40 * GIB
    assert device_room(Config(Path(), host_memory="3GiB", device_memory="2GiB"), CPU) == 2 * GIB
    with pytest.raises(BudgetError, match=r"only 64\.0 GiB are free"):
        device_room(Config(Path(), device_memory="70GiB"), HOPPER)
    busy = replace(HOPPER, process=GIB)
    assert host_room(Config(Path()), busy) == int(0.8 * HOPPER.host_free)
    assert host_room(Config(Path(), host_memory="4GiB"), busy) == 4 * GIB - GIB - 512 * MIB
    assert host_room(Config(Path(), host_memory="4GiB"), CPU) == 0
    assert host_room(Config(Path(), host_memory="4GiB", device_memory="1GiB"), CPU) == 3 * GIB
    with pytest.raises(BudgetError, match="only 100 GiB are free"):
        host_room(Config(Path(), host_memory="120GiB"), busy)


def test_the_experts_room_says_what_the_cpu_has_to_know() -> None:
    assert planned(MIXED, HOPPER, 0.6).experts.cpu is None  # type: ignore[union-attr]
    for use in ("auto", "on"):
        room = planned(MIXED, HOPPER, 0.6, cpu_compute=use).experts
        assert room is not None
        assert room.cpu is not None
        assert (room.cpu.top_k, room.cpu.dtype, room.cpu.always) == (2, "bfloat16", use == "on")
        assert room.experts % len(room.cpu.activations) == 0
        assert "the CPU computes some" in str(room)
        assert ("if it is faster" in str(room)) == (use == "auto")
        assert replace(room, cpu=None) == planned(MIXED, HOPPER, 0.6).experts


@pytest.mark.parametrize(
    ("config", "hardware", "share", "why"),
    [
        (MIXED, CPU, 0.6, "there is no GPU"),
        (DENSE, CPU, 0.6, "there is no GPU"),
        (DENSE, HOPPER, 1.0, "all weights are on the device"),
        (DENSE, PLAIN, 0.6, "no kernels that ask"),
        (DENSE, NARROW, 0.2, "on disk"),
        (DENSE | {"intermediate_size": 4104}, HOPPER, 0.6, "no multiple of 32"),
        (MIXED, HOPPER, 1.0, "all experts are on the device"),
        (MIXED, NARROW, 0.6, "host_memory"),
        (MIXED, PLAIN, 0.6, "host_memory"),
        (MIXED | {"intermediate_size": 2056}, HOPPER, 0.6, "no multiple of 32"),
    ],
)
def test_where_it_cannot_on_is_refused_and_auto_is_off(
    config: dict[str, object], hardware: Hardware, share: float, why: str
) -> None:
    with pytest.raises(ConfigError, match=f"cpu_compute is on, but .*{why}"):
        planned(config, hardware, share, cpu_compute="on")
    plan = planned(config, hardware, share, cpu_compute="auto")
    assert plan.placement.cpu is None
    assert plan.experts is None or plan.experts.cpu is None
    assert why in (cpu_blocker(plan.outline, plan.placement, plan.experts) or "")


def test_what_else_stands_against_it() -> None:
    for config in (MIXED, DENSE):
        plan = planned(config, HOPPER, 0.6, cpu_compute="on")
        assert cpu_blocker(plan.outline, plan.placement, plan.experts) is None
        for outline, why in (
            (replace(plan.outline, shard=Shard(0, 2)), "several devices"),
            (replace(plan.outline, dtype="float32"), "activations are float32"),
        ):
            with pytest.raises(ConfigError, match=why):
                with_cpu(outline, plan.placement, plan.experts, plan.limits, USUAL)
    far = replace(plan.outline, far=Ways())
    assert "KV beyond the device" in (cpu_blocker(far, plan.placement, None) or "")
    for format, reads in (
        (Blocks(type="Q4_K"), False),
        (Integers(ordered=True), False),
        (Integers(), True),
        (Float8(), True),
    ):
        layouts = tuple(of_format(layout, format) for layout in plan.outline.layouts)
        found = cpu_blocker(replace(plan.outline, layouts=layouts), plan.placement, None)
        assert ("a format that kernels" in (found or "")) == (not reads)


@pytest.mark.parametrize(
    ("feed_forwards", "why"),
    [(0, "no feed-forward rests in host memory"), (1, "only one feed-forward streams")],
)
def test_where_hardly_anything_streams_on_says_what_to_try(feed_forwards: int, why: str) -> None:
    """The link brings one group at least: a single feed-forward leaves the CPU nothing."""
    plan = planned(DENSE, HOPPER, 0.5, cpu_compute="on")
    kind = GroupKind.FFN if feed_forwards else GroupKind.ATTENTION

    def streams(*ids: GroupId) -> Placement:
        homes = {id: Tier.HOST if id in ids else Tier.DEVICE for id in plan.placement.homes}
        runs = [(index, 0, use.size) for index, use in enumerate(plan.placement.uses) if use.id in ids]
        return replace(plan.placement, homes=homes, device_ring=lay_ring(runs, GIB))

    rates = replace(USUAL, cpu_read=(8e10,) * 5)
    few = streams(GroupId(kind, 3))
    with pytest.raises(ConfigError, match=rf"{why}.*smaller device_memory.*write auto"):
        with_cpu(plan.outline, few, None, plan.limits, rates)
    auto = replace(plan.outline, settings=replace(plan.outline.settings, cpu_compute="auto"))
    assert with_cpu(auto, few, None, plan.limits, rates) == (few, None)
    more = with_cpu(
        plan.outline, streams(GroupId(GroupKind.FFN, 3), GroupId(GroupKind.FFN, 9)), None, plan.limits, rates
    )
    assert more[0].cpu is not None


@pytest.mark.parametrize("sequences", [1, 5, 64])
def test_steps_that_the_cpu_shares_are_counted_with_what_is_recorded(sequences: int) -> None:
    """They are recorded a second time, where weights stream; with a draft model there are none."""
    size = whole(DENSE)

    def outline(use: str, total: int = size // 2) -> Outline[Ways]:
        limits = {"max_sequences": sequences, "max_step_tokens": 64, "max_length": 64}
        return outlined(DENSE, HOPPER, total, **limits, cpu_compute=use)

    each = 16 * MIB
    again = len([count for count in row_counts(sequences) if count <= MOST_TOKENS])
    for use in ("auto", "on"):
        assert outline(use).beside - outline("off").beside == again * each == shared_bytes(sequences)
        more, spec = outline(use, 2 * size).beside - outline("off", 2 * size).beside, outline(use).spec
        runs = len(run_counts(spec, 64)) + len(mixed_counts(spec, outline(use).dtype, 64, 4))
        assert more == max(again - runs, 0) * each, "runs are recorded only where nothing streams"
        assert beside(outline(use)).beside == beside(outline("off")).beside


def of_format(layout: GroupLayout, format: WeightFormat) -> GroupLayout:
    return replace(layout, matrices=tuple(replace(one, format=format) for one in layout.matrices))


def test_the_placement_says_what_the_cpu_has_to_know_of_feed_forwards() -> None:
    """Once its rate is known: the rest is placed as without it, and auto leaves it out where it is slow."""
    slow, fast = replace(USUAL, cpu_read=(1e8,) * 5), replace(USUAL, cpu_read=(8e10,) * 5)
    without = planned(DENSE, HOPPER, 0.6, rates=fast).placement
    assert without.cpu is None
    for use in ("auto", "on"):
        assert planned(DENSE, HOPPER, 0.6, rates=USUAL, cpu_compute=use).placement == without
        placement = planned(DENSE, HOPPER, 0.6, rates=fast, cpu_compute=use).placement
        assert placement.cpu is not None
        assert (placement.cpu.hidden, placement.cpu.dtype) == (1024, "bfloat16")
        assert placement.cpu.always == (use == "on")
        assert ("if it is faster" in str(placement)) == (use == "auto")
        assert placement.prediction.seconds <= LOSS * without.prediction.seconds
        by_slow = planned(DENSE, HOPPER, 0.6, rates=slow, cpu_compute=use).placement
        assert (by_slow.cpu is None) == (use == "auto")
