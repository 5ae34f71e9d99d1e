"""A forecast is what hand arithmetic says where that is simple, adds up, and never gets worse with more of
anything."""

import json
import random
import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from penstock.arch import bounds
from penstock.arch.families import family_of, read_spec
from penstock.arch.layout import GroupKind, GroupLayout, group_layouts, kv_layout
from penstock.arch.spec import ModelSpec
from penstock.base.config import Config
from penstock.base.errors import BudgetError, ConfigError
from penstock.base.tiers import Tier
from penstock.engine.contexts import LongRoom, long_room
from penstock.engine.cpu_share import shared_experts
from penstock.engine.forecast import ExpertTraffic, Forecast, forecast
from penstock.engine.gains import More, gains
from penstock.engine.machines import BLOCK_SIZE, CONTEXT, PROCESS, TABLES, ExpertUse, Machine, Work
from penstock.engine.passes import decode_step, mixtures_of, pass_work
from penstock.weights.streaming.beside import HAND_OVER, LOSS
from penstock.weights.streaming.residency import padded, pass_order
from penstock.weights.streaming.ring import SKEW, Link, StreamRates

GIB = 1 << 30
ROOT = Path(__file__).resolve().parents[2]
SHAPES = sorted((ROOT / "benchmarks" / "shapes").glob("*/config.json"))
PARAMETERS = {
    "Qwen3-0.6B": 596_049_920,
    "Mistral-7B": 7_248_023_552,
    "Llama-3.1-8B": 8_030_261_248,
    "Qwen3-8B": 8_190_735_360,
    "gpt-oss-20b": 20_914_757_184,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-32B": 32_762_123_264,
    "Mixtral-8x7B": 46_702_792_704,
    "Llama-3.3-70B": 70_553_706_496,
    "gpt-oss-120b": 116_829_156_672,
    "Qwen3-235B-A22B": 235_093_634_560,
    "Llama-3.1-405B": 405_853_388_800,
}
"""As their makers publish them."""
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
FAST = StreamRates(host_to_device=50e9, disk_to_host=5e9, device_read=1e12)
WORK = Work("bfloat16", batch=1, context=512, step_tokens=512)


def of(config: Mapping[str, object], machine: Machine, work: Work = WORK) -> Forecast:
    return forecast(read_spec(config), family_of(config).names, machine, work)


def layouts_of(config: Mapping[str, object]) -> tuple[GroupLayout, ...]:
    return group_layouts(read_spec(config), family_of(config).names, "bfloat16")


def whole(config: Mapping[str, object]) -> int:
    return sum(map(padded, layouts_of(config)))


def beside(config: Mapping[str, object], work: Work = WORK, *, host: int | None = 0) -> int:
    """Bytes of the device that are not for weights."""
    budget = of(config, Machine(64 * GIB, host, FAST, 1e15), work).budget
    return budget.kv + budget.activations


def machine(
    config: Mapping[str, object],
    device: float,
    host: float = 64 * GIB,
    rates: StreamRates = FAST,
    operations: float = 1e15,
) -> Machine:
    """One with room for `device` of the weights, as a share of them."""
    return Machine(
        int(whole(config) * device) + beside(config) + CONTEXT + int(host) // TABLES,
        int(host),
        rates,
        operations,
    )


# ---- by hand


@pytest.mark.parametrize(
    ("host", "ranks", "apart"), [(64 * GIB, 2, True), (64 * GIB, 1, False), (None, 2, False)]
)
def test_ranks_are_apart_where_each_has_a_device(host: int | None, ranks: int, apart: bool) -> None:
    assert Machine(64 * GIB, host, FAST, 1e15).of_rank(ranks).rates.skew == (SKEW if apart else 0.0)


def test_what_is_resident_decodes_as_fast_as_it_is_read() -> None:
    spec, layouts = read_spec(DENSE), layouts_of(DENSE)
    for work in (WORK, replace(WORK, batch=7), replace(WORK, context=4096)):
        found = of(DENSE, Machine(64 * GIB, 0, FAST, 1e15), work)
        weights = bounds.weight_bytes_read(spec, layouts, work.batch)
        kv = work.batch * 16 * 2 * 2 * 128 * 2 * work.context
        assert found.everything_resident
        assert found.decode.seconds == pytest.approx((weights + kv) / 1e12)
        assert found.decode.tokens_per_second == pytest.approx(work.batch / found.decode.seconds)
        assert found.decode.binding is Link.COMPUTE
        assert (found.decode.copied, found.decode.read) == (0, 0)


def test_what_is_resident_takes_prompts_in_as_fast_as_it_computes() -> None:
    slow = Machine(64 * GIB, 0, FAST, 1e12)
    for batch, context in ((1, 512), (1, 4000), (3, 1000)):
        found = of(DENSE, slow, replace(WORK, batch=batch, context=context))
        operations = bounds.prefill_operations(read_spec(DENSE), layouts_of(DENSE), [context] * batch)
        assert batch * context / found.prefill.tokens_per_second == pytest.approx(operations / 1e12, rel=0.01)
        assert found.prefill.tokens <= WORK.step_tokens


def test_many_sequences_are_bound_by_arithmetic() -> None:
    found = of(DENSE, Machine(64 * GIB, 0, FAST, 1e11), replace(WORK, batch=64, context=32))
    layouts = [layout for layout in layouts_of(DENSE) if layout.id.kind is not GroupKind.EMBEDDING]
    products = sum(
        2 * 64 * field.shape[0] * field.shape[1]
        for layout in layouts
        for field in layout.fields
        if len(field.shape) == 2
    )
    attention = 16 * 4 * 64 * 32 * 8 * 128
    assert found.decode.seconds == pytest.approx((products + attention) / 1e11, rel=0.01)


def test_what_is_on_the_host_takes_as_long_as_its_copy() -> None:
    for share in (0.3, 0.6, 0.9):
        found = of(DENSE, machine(DENSE, share))
        assert found.resting(Tier.DISK) == 0
        assert found.decode.copied == whole(DENSE) - found.resting(Tier.DEVICE) > 0
        # At most the arithmetic with what is in the ring is not hidden.
        assert 0 <= found.decode.seconds - found.decode.copied / 50e9 <= found.decode.busy[Link.COMPUTE]
        assert found.decode.binding is Link.LINK
        assert found.decode.share(Link.LINK) == pytest.approx(
            found.decode.copied / 50e9 / found.decode.seconds
        )


LONG = DENSE | {"max_position_embeddings": 1 << 20}


def test_kv_that_the_device_does_not_hold_comes_over_the_link() -> None:
    """Every token of the output brings what pages do not hold as well, every chunk of a prompt what is before
    it."""
    context, chunk = 1 << 18, 4096
    roomy = Machine(CONTEXT + (64 * GIB) // TABLES + int(1.5 * whole(DENSE)) + GIB // 2, 64 * GIB, FAST, 1e14)
    found = of(LONG, roomy, replace(WORK, context=context, step_tokens=chunk))
    token = kv_layout(read_spec(LONG), "bfloat16", 1).block_bytes
    assert found.far == context * token
    assert found.everything_resident
    near = (found.budget.blocks - 4) * BLOCK_SIZE * token
    assert near > GIB // 8
    assert found.decode.copied == found.far - near
    assert found.decode.seconds == pytest.approx(found.decode.copied / 50e9)
    assert found.decode.binding is Link.LINK
    passes = context // chunk
    assert found.prefill.copied == pytest.approx(token * chunk * passes * (passes - 1) / 2 / passes)
    two = of(LONG, roomy, replace(WORK, context=context, step_tokens=chunk, batch=2))
    assert two.decode.copied == pytest.approx(2 * found.far - near, rel=0.02)
    for share in (0.5, 0.8):  # Weights that stream take their part of the link as well.
        small = replace(roomy, device=CONTEXT + (64 * GIB) // TABLES + int(share * whole(DENSE)) + GIB // 4)
        both = of(LONG, small, replace(WORK, context=context))
        assert both.far == found.far
        near = max(both.budget.blocks - 4, 0) * BLOCK_SIZE * token
        assert both.decode.copied == found.far - near + both.placement.streamed > both.placement.streamed
        assert both.decode.seconds == pytest.approx(both.decode.copied / 50e9)


def test_kv_that_fits_stays_on_the_device() -> None:
    assert of(LONG, Machine(64 * GIB, 64 * GIB, FAST, 1e14), replace(WORK, context=1 << 18)).far == 0


def with_settings(work: Work, **settings: object) -> Work:
    return replace(work, settings=Config(Path(), **settings))  # type: ignore[arg-type]


FAR_WORK = replace(WORK, context=1 << 18, step_tokens=4096)
ROOMY = Machine(CONTEXT + (64 * GIB) // TABLES + int(1.5 * whole(DENSE)) + GIB // 2, 64 * GIB, FAST, 1e14)


def far_of(found: Forecast) -> LongRoom:
    assert found.plan.outline.far is not None
    return found.plan.outline.far


def test_the_room_for_far_kv_is_what_a_boot_makes() -> None:
    """By the same function, of the same settings: tiles, chunks, dtype, policies and sketches."""
    chosen: dict[str, object] = {"host_kv_dtype": "fp8", "attention_policy": "topk:8", "kv_tile": 1000}
    found = of(LONG, ROOMY, with_settings(FAR_WORK, **chosen))
    outline, far = found.plan.outline, far_of(found)
    assert (far.layout, far.tile_tokens, far.chunk_tokens) == (outline.kv.in_fp8, 992, 4096)
    assert far.policies is not None
    assert (far.policies.rows, far.policies.runs) == ("topk:8", None)
    asked = replace(outline.settings, host_kv_memory=far.blocks * far.layout.block_bytes)
    resident = whole(DENSE) + found.budget.activations
    limits, spec, machine = outline.limits, outline.spec, outline.hardware
    assert far == long_room(asked, spec, limits, outline.kv, machine, outline.total, resident)
    assert outline.beside >= far.device_bytes


def test_kv_in_fp8_takes_half_the_link() -> None:
    exact, half = (of(LONG, ROOMY, with_settings(FAR_WORK, host_kv_dtype=kind)) for kind in ("auto", "fp8"))
    assert half.far == pytest.approx(exact.far / 2, rel=0.02)
    assert half.prefill.copied == pytest.approx(exact.prefill.copied / 2, rel=0.02)


def test_far_kv_that_the_host_does_not_hold_is_read_from_disk() -> None:
    small = replace(ROOMY, host=PROCESS + 2 * GIB)
    with pytest.raises(BudgetError, match="that host memory has for it; raise"):
        of(LONG, small, FAR_WORK)
    found = of(LONG, small, with_settings(FAR_WORK, disk_kv_memory="8GiB"))
    far = far_of(found)
    needed = FAR_WORK.context // BLOCK_SIZE
    assert far.blocks + far.on_disk == needed
    assert far.store_bytes > 0
    assert found.decode.read == pytest.approx(found.decode.copied * far.on_disk / needed)
    assert found.decode.binding is Link.DISK
    assert found.decode.seconds == pytest.approx(found.decode.read / 5e9)
    with pytest.raises(BudgetError, match="nor the disk"):
        of(LONG, small, with_settings(FAR_WORK, disk_kv_memory="1GiB"))


def test_ranks_have_a_part_each() -> None:
    """Half the weights, half the KV, and half of host memory, on a device and a link of its own."""
    one, two = (of(LONG, ROOMY, with_settings(FAR_WORK, tensor_parallel=ranks)) for ranks in (1, 2))
    assert far_of(two).blocks == far_of(one).blocks
    assert two.far == one.far / 2
    weights = [sum(found.resting(tier) for tier in Tier) for found in (one, two)]
    assert weights[1] == pytest.approx(weights[0] / 2, rel=0.02)
    assert two.own.host == one.own.host // 2  # type: ignore[operator]
    assert (two.own.device, two.own.rates.host_to_device) == (ROOMY.device, FAST.host_to_device)
    assert two.own.rates.disk_to_host == FAST.disk_to_host / 2
    assert two.machine == ROOMY
    assert two.decode.tokens_per_second / one.decode.tokens_per_second > 1.8
    with pytest.raises(ConfigError, match="tensor_parallel=64 is more than"):
        of(LONG, ROOMY, with_settings(FAR_WORK, tensor_parallel=64))


def test_kv_that_nobody_holds_is_refused() -> None:
    with pytest.raises(
        BudgetError,
        match=r"KV of 1 x 1,048,576 tokens takes 16.0 GiB, which neither the device holds nor the",
    ):
        of(LONG, Machine(4 * GIB, PROCESS + 2 * GIB, FAST, 1e14), replace(WORK, context=1 << 20))


def test_what_is_on_disk_takes_as_long_as_its_reading() -> None:
    small = machine(DENSE, 0.3, host=PROCESS + 0.5 * whole(DENSE), rates=replace(FAST, disk_to_host=1e8))
    found = of(DENSE, small)
    assert found.decode.read == found.resting(Tier.DISK) > 0
    assert found.decode.seconds == pytest.approx(found.decode.read / 1e8, rel=0.02)
    assert found.decode.binding is Link.DISK


def test_tied_embeddings_are_read_whole_once() -> None:
    tied = DENSE | {"tie_word_embeddings": True}
    apart, together = (of(config, Machine(64 * GIB, 0, FAST, 1e15)) for config in (DENSE, tied))
    assert len(together.placement.uses) == len(apart.placement.uses) + 1
    assert together.decode.seconds == pytest.approx(apart.decode.seconds, rel=1e-3)
    assert together.resting(Tier.DEVICE) < apart.resting(Tier.DEVICE)


def test_windows_bound_the_kv_that_is_read() -> None:
    windowed = DENSE | {"model_type": "mistral", "sliding_window": 64}
    seconds = [
        of(config, Machine(64 * GIB, 0, FAST, 1e15)).decode.seconds
        for config in (windowed, windowed | {"sliding_window": None})
    ]
    assert seconds[1] - seconds[0] == pytest.approx(16 * 2 * 2 * 128 * 2 * (512 - 64) / 1e12)


def test_experts_that_are_resident_are_read_as_they_are_chosen() -> None:
    spec, layouts = read_spec(MIXED), layouts_of(MIXED)
    for batch in (1, 5):
        found = of(MIXED, Machine(64 * GIB, 0, FAST, 1e15), replace(WORK, batch=batch, context=32))
        read = bounds.weight_bytes_read(spec, layouts, batch) + batch * bounds.kv_bytes_read(
            spec, "bfloat16", 32
        )
        assert found.everything_resident
        assert found.decode.seconds == pytest.approx(read / 1e12)


def test_experts_on_the_host_are_copied_when_they_are_chosen() -> None:
    found = of(MIXED, machine(MIXED, 0.4))
    room = found.experts
    assert room is not None
    assert room.copies
    assert 0 < room.near < room.experts == 16 * 8
    assert found.placement.everything_resident
    assert not found.everything_resident
    copied = 16 * 2 * (1 - room.near / room.experts) * room.size
    assert found.decode.copied == pytest.approx(copied)
    dense = sum(found.placement.prediction.busy.values())
    assert found.decode.seconds == pytest.approx(copied / 50e9, abs=2 * dense + 16 * 2 * room.size / 1e12)
    # A prompt needs all experts, but in the last layer those of its last token.
    assert found.prefill.copied == pytest.approx(
        (15 * 8 + 2) * (1 - room.near / room.experts) * room.size, rel=1e-4
    )


@pytest.mark.parametrize("batch", [1, 7])
def test_hits_that_are_known_say_what_comes(batch: int) -> None:
    work = replace(WORK, batch=batch)
    found = {
        hits: of(MIXED, machine(MIXED, 0.4), replace(work, expert_use=ExpertUse(((0.0, hits),))))
        for hits in (0.0, 0.25, 0.6, 1.0)
    }
    room, asked = found[0.6].experts, 16 * bounds.experts_chosen(read_spec(MIXED).moe, batch)
    assert room is not None
    for hits, one in found.items():
        assert one.decode.experts == ExpertTraffic(asked, hits, pytest.approx(asked * (1 - hits)), "given")
        assert one.decode.copied == pytest.approx(asked * (1 - hits) * room.size)
        fetched = one.decode.seconds - found[1.0].decode.seconds
        assert fetched == pytest.approx(asked * (1 - hits) * room.size / FAST.host_to_device)
        # Prompts ask for everything.
        assert one.prefill == of(MIXED, machine(MIXED, 0.4), work).prefill
    evenly = of(MIXED, machine(MIXED, 0.4), work)
    assert evenly.decode.experts is not None
    assert evenly.decode.experts.hits == room.near / room.experts
    assert evenly.decode.copied == pytest.approx(asked * (1 - room.near / room.experts) * room.size)
    # As many as were counted are as many as such hits let come.
    counted = of(MIXED, machine(MIXED, 0.4), replace(work, experts_fetched=0.4 * asked))
    assert counted.decode.seconds == pytest.approx(found[0.6].decode.seconds)


def test_misses_of_host_memory_come_from_disk() -> None:
    """As many as were counted, or as a curve says; else as tokens choose evenly."""
    slow = machine(MIXED, 0.3, PROCESS + 0.4 * whole(MIXED), StreamRates(50e9, 1e9, 1e12))

    def read(**known: object) -> tuple[float, float]:
        found = of(MIXED, slow, replace(WORK, **known))  # type: ignore[arg-type]
        assert found.experts is not None
        return found.decode.read / found.experts.mean, found.decode.seconds

    found = of(MIXED, slow, WORK)
    room, traffic = found.experts, found.decode.experts
    assert room is not None
    assert traffic is not None
    assert 0 < room.on_disk < room.experts - room.on_device
    near, asked = 1 - room.on_disk / room.experts, traffic.asked
    given = read(expert_use=ExpertUse(((0.0, 0.5),)))[0]
    assert given == pytest.approx(0.5 * asked * room.on_disk / (room.experts - room.on_device))
    curve = ExpertUse(((0.0, 0.0), (near, 0.9), (1.0, 1.0)), source="recorded")
    assert read(expert_use=curve)[0] == pytest.approx(0.1 * asked)
    few, many = (read(experts_fetched=0.5 * asked, experts_read=count) for count in (2.0, 5.0))
    assert (few[0], many[0]) == (2.0, 5.0)
    assert many[1] - few[1] == pytest.approx(3 * room.mean / 1e9)


def test_hits_that_were_recorded_rise_with_what_is_on_the_device() -> None:
    use = ExpertUse(((0.0, 0.0), (0.25, 0.5), (0.75, 0.8), (1.0, 1.0)), asked=1.5, source="recorded")
    assert [use.at(share) for share in (0.0, 0.125, 0.25, 0.5, 1.0)] == pytest.approx([0, 0.25, 0.5, 0.65, 1])
    work = replace(WORK, expert_use=use)
    paces = [of(MIXED, machine(MIXED, share), work) for share in (0.3, 0.5, 0.7)]
    for found in paces:
        room, traffic = found.experts, found.decode.experts
        assert room is not None
        assert traffic is not None
        assert (traffic.asked, traffic.source) == (16 * 1.5, "recorded")
        assert traffic.hits == pytest.approx(use.at(room.near / room.experts))
    assert paces[0].decode.seconds > paces[1].decode.seconds > paces[2].decode.seconds
    assert of(MIXED, Machine(64 * GIB, 0, FAST, 1e15), work).decode.experts is None


def test_misses_are_read_from_disk_in_the_share_that_rests_there() -> None:
    given = machine(MIXED, 0.3, host=PROCESS + 0.4 * whole(MIXED))
    work = replace(WORK, expert_use=ExpertUse(((0.0, 0.5),)))
    found, none = of(MIXED, given, work), of(MIXED, given, replace(work, expert_use=ExpertUse(((0.0, 1.0),))))
    room = found.experts
    assert room is not None
    assert room.on_disk > 0
    read = 16 * 2 * 0.5 * room.size * room.on_disk / (room.on_host + room.on_disk)
    assert found.decode.read == pytest.approx(read)
    assert found.decode.seconds - none.decode.seconds == pytest.approx(read / FAST.disk_to_host)


def test_experts_on_disk_come_as_in_many_draws() -> None:
    rates = replace(FAST, disk_to_host=25e9)
    found = of(MIXED, machine(MIXED, 0.3, host=PROCESS + 0.4 * whole(MIXED), rates=rates))
    room = found.experts
    assert room is not None
    assert min(room.on_device, room.on_host, room.on_disk) > 0
    rng, homes = (
        random.Random(0),
        [Tier.DEVICE] * room.on_device + [Tier.HOST] * room.on_host + [Tier.DISK] * room.on_disk,
    )
    copy, read, total, draws = room.size / 50e9, room.size / 25e9, 0.0, 20_000
    for _ in range(draws):
        drawn = rng.choices(homes, k=2)
        on_disk, fetched = drawn.count(Tier.DISK), 2 - drawn.count(Tier.DEVICE)
        total += max(on_disk * read + copy if on_disk else 0, fetched * copy)
    arithmetic = found.decode.busy[Link.COMPUTE]
    # How many of the others are on HOST is taken at its mean, which is a little less than the mean of the
    # longer.
    assert found.decode.seconds - arithmetic == pytest.approx(16 * total / draws, rel=0.05)


def test_a_cpu_streams_from_disk_through_a_part_of_its_memory() -> None:
    found = of(DENSE, Machine(int(0.6 * whole(DENSE)) + beside(DENSE, host=None), None, FAST, 1e12))
    assert found.resting(Tier.HOST) < found.plan.beside
    assert 0 < found.ring(Tier.HOST) <= found.plan.beside < whole(DENSE) / 8
    assert found.resting(Tier.DISK) == found.decode.read > 0.4 * whole(DENSE)
    assert of(DENSE, Machine(64 * GIB, None, FAST, 1e12)).plan.beside == 0


# ---- adding up


@pytest.mark.parametrize("config", [DENSE, MIXED], ids=["dense", "mixture"])
@pytest.mark.parametrize("share", [0.3, 0.55, 0.8, 2.0])
def test_every_byte_has_one_home_and_no_tier_holds_too_much(
    config: Mapping[str, object], share: float
) -> None:
    found = of(config, machine(config, share, host=PROCESS + 0.4 * whole(config)))
    budget = found.budget
    assert sum(found.resting(tier) for tier in Tier) == whole(config)
    assert found.resting(Tier.DEVICE) + found.ring(Tier.DEVICE) == budget.weights
    assert budget.weights + budget.kv + budget.activations <= found.machine.usable == budget.total
    assert found.resting(Tier.HOST) + found.ring(Tier.HOST) <= 0.4 * whole(config)
    assert budget.blocks == 512 // BLOCK_SIZE
    for pace in (found.decode, found.prefill):
        assert max(pace.busy.values()) <= pace.seconds * 1.001
        assert sum(pace.busy.values()) >= pace.seconds * 0.999


def several(eight: str) -> dict[str, object]:
    """A mixture in compressed-tensors: four bits, and eight for modules that a pattern names."""

    def group(bits: int, target: str) -> dict[str, object]:
        weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": 128}
        return {"targets": [target], "weights": weights}

    groups = {"group_0": group(4, "Linear"), "group_1": group(8, f"re:{eight}")}
    quantised = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups,
                 "ignore": ["lm_head", "re:.*gate$"]}  # fmt: skip
    return MIXED | {"quantization_config": quantised}


SEVERAL = [
    ".*experts.[0-2].w2$",
    r".*layers\.(1|2|3)\.block_sparse_moe.experts",
    r".*layers\.0\..*experts.7\..*",
]


@pytest.mark.parametrize("eight", SEVERAL)
@pytest.mark.parametrize("share", [0.3, 0.55, 0.8, 1.0, 2.0])
@pytest.mark.parametrize("on_host", [0.2, 1.2])
def test_experts_of_several_sizes_add_up(eight: str, share: float, on_host: float) -> None:
    """By tensor; and each slot has room for the largest of them."""
    config = several(eight)
    experts = [padded(one) for one in layouts_of(config) if one.id.kind is GroupKind.EXPERT]
    assert min(experts) < max(experts)
    found = of(config, machine(config, share, host=PROCESS + on_host * whole(config)))
    budget, room = found.budget, found.experts
    assert room is not None
    assert (room.size, room.experts) == (max(experts), len(experts))
    assert sum(found.resting(tier) for tier in Tier) == whole(config)
    assert found.resting(Tier.DEVICE) + found.ring(Tier.DEVICE) == budget.weights
    assert budget.weights + budget.kv + budget.activations <= found.machine.usable == budget.total
    assert found.resting(Tier.HOST) + found.ring(Tier.HOST) <= on_host * whole(config)
    if found.plan.streams:
        assert room.device_ring >= 2
        slots = (room.near + room.device_ring) * max(experts)
        assert (
            found.placement.resting(Tier.DEVICE) + found.placement.device_ring.size + slots == budget.weights
        )
    assert found.everything_resident == (share >= 1) == (not found.plan.streams)


@pytest.mark.parametrize("eight", SEVERAL)
def test_the_work_of_experts_of_several_sizes(eight: str) -> None:
    """A pass reads what the layouts of each layer say, and copies the mean of what is chosen."""
    config = several(eight)
    spec, layouts = read_spec(config), layouts_of(config)
    every = pass_order(layouts, spec.tied_embeddings)
    uses = pass_work(spec, "bfloat16", every, mixtures_of(layouts), decode_step(spec, "bfloat16", 1, 512))
    for layout, use in zip(every, uses, strict=True):
        its = [
            one.size for one in layouts if one.id.kind is GroupKind.EXPERT and one.id.layer == layout.id.layer
        ]
        chosen = sum(its) * 2 / 8 if layout.id.kind is GroupKind.ROUTER else 0
        assert use.experts == pytest.approx(chosen)
    none = of(config, machine(config, 0.3, host=PROCESS + 2 * whole(config)))
    assert none.experts is not None
    chosen = 2 * 16 * (1 - none.experts.near / 128)
    mean = sum(padded(one) for one in layouts if one.id.kind is GroupKind.EXPERT) / 128
    assert none.decode.copied - none.placement.streamed == pytest.approx(chosen * mean)


def test_kv_is_for_all_sequences_in_whole_blocks() -> None:
    work = replace(WORK, batch=3, context=100)
    budget = of(DENSE, Machine(64 * GIB, 0, FAST, 1e15), work).budget
    assert budget.blocks == 3 * 4
    assert budget.block_bytes == kv_layout(read_spec(DENSE), "bfloat16", BLOCK_SIZE).block_bytes


# ---- more of it


@pytest.mark.parametrize("config", [DENSE | {"num_hidden_layers": 32}, MIXED], ids=["dense", "mixture"])
def test_more_memory_never_decodes_slower(config: Mapping[str, object]) -> None:
    shares = [0.3 + 0.05 * step for step in range(17)]
    for grown in (
        [machine(config, share, host=PROCESS + 0.3 * whole(config)) for share in shares],
        [machine(config, 0.3, host=PROCESS + (share - 0.1) * whole(config)) for share in shares],
    ):
        rates = [of(config, one).decode.tokens_per_second for one in grown]
        # The solver does not try every placement.
        assert all(after >= 0.99 * before for before, after in pairwise(rates))
        assert rates[-1] > 1.5 * rates[0]


def test_what_more_would_buy() -> None:
    config = DENSE | {"intermediate_size": 16384, "num_hidden_layers": 120}
    found = of(config, machine(config, 0.3, host=PROCESS + 0.3 * whole(config)))
    spec, names = read_spec(config), family_of(config).names
    bought = {gain.more: gain for gain in gains(spec, names, found)}
    assert set(bought) == set(More)
    assert found.decode.binding is Link.DISK
    now = found.decode.tokens_per_second
    assert bought[More.DISK].decode == pytest.approx(0.1 * now, rel=0.05)
    assert bought[More.LINK].decode < 0.01 * now
    less = found.resting(Tier.DISK) - 10**9
    assert bought[More.HOST].decode == pytest.approx(now * found.resting(Tier.DISK) / less - now, rel=0.1)
    without = of(config, machine(config, 0.3, rates=replace(FAST, disk_to_host=0)))
    assert More.DISK not in {gain.more for gain in gains(spec, names, without)}
    cpu = of(config, Machine(found.machine.usable, None, FAST, 1e12))
    assert More.HOST not in {gain.more for gain in gains(spec, names, cpu)}
    resident = of(config, Machine(64 * GIB, 0, FAST, 1e15))
    assert all(gain.decode == gain.prefill == 0 for gain in gains(spec, names, resident))


# ---- beside a CPU that computes


FALLING = (60e9, 50e9, 40e9, 20e9, 5e9)


@pytest.mark.parametrize("batch", [1, 3, 8, 16, 17])
def test_what_a_cpu_gains_is_of_the_batch_that_is_asked(batch: int) -> None:
    """By the rate of its class of rows; from 17 on, and where the link is as fast, there is nothing."""
    narrow = replace(FAST, host_to_device=10e9)
    work = replace(WORK, batch=batch, settings=replace(WORK.settings, cpu_compute="auto"))
    off = of(DENSE, machine(DENSE, 0.5, rates=narrow), replace(work, settings=WORK.settings))
    found = of(DENSE, machine(DENSE, 0.5, rates=replace(narrow, cpu_read=FALLING)), work)
    assert found.prefill.cpu is None
    if batch > 8:
        assert found.decode.cpu is None
        assert found.decode.seconds <= LOSS * off.decode.seconds
        return
    part, of_cpu = found.decode.cpu, found.placement.cpu
    assert part is not None
    assert of_cpu is not None
    rate = FALLING[(batch - 1).bit_length()]
    assert part.seconds == pytest.approx(part.size / rate + part.groups * HAND_OVER)
    assert part.groups == len(of_cpu.orders[(batch - 1).bit_length()].groups)
    assert part.size + found.decode.copied == found.placement.streamed
    assert max(part.seconds, found.decode.busy[Link.LINK]) <= 1.001 * found.decode.seconds
    assert found.decode.seconds < part.alone
    assert part.alone <= LOSS * off.decode.seconds
    assert found.decode.busy[Link.COMPUTE] < 0.2 * found.decode.seconds


def test_a_cpu_that_must_compute_may_lose() -> None:
    slow = replace(FAST, cpu_read=(1e9,) * 5)
    work = replace(WORK, settings=replace(WORK.settings, cpu_compute="on"))
    found = of(DENSE, machine(DENSE, 0.5, rates=slow), work).decode
    assert found.cpu is not None
    assert found.seconds > found.cpu.alone
    auto = replace(work, settings=replace(WORK.settings, cpu_compute="auto"))
    assert of(DENSE, machine(DENSE, 0.5, rates=slow), auto).decode.cpu is None


@pytest.mark.parametrize(("layers", "come"), [(1, 0.0), (4, 3.0), (4, 4.0), (24, 85.5), (12, 300.0)])
@pytest.mark.parametrize(("link", "cpu"), [(25e9, 60e9), (55e9, 40e9), (55e9, 1e9)])
def test_of_experts_a_cpu_takes_as_many_as_make_a_layer_shortest(
    layers: int, come: float, link: float, cpu: float
) -> None:
    size = 13e6
    seconds, part = shared_experts(layers, come, size, link, cpu)
    alone = come * size / link
    assert seconds <= alone * (1 + 1e-9)
    assert part.size == part.groups * size
    assert part.seconds == part.size / cpu
    assert part.groups <= come
    assert seconds >= 0.99 * max((come - part.groups) * size / link, part.seconds)
    if cpu > link and come > layers:
        assert seconds < 0.7 * alone
    if cpu < 2e9 and come / layers < 25:
        assert part.groups == 0


# ---- refusals


@pytest.mark.parametrize(
    ("given", "work", "error", "message"),
    [
        (Machine(GIB // 100, 64 * GIB, FAST, 1e12), WORK, BudgetError, "in 10.2 MiB of the device, of which"),
        (
            machine(DENSE, 0.3, host=PROCESS, rates=replace(FAST, disk_to_host=0)),
            WORK,
            BudgetError,
            "no disk for the rest",
        ),
        (machine(DENSE, 0.3, host=PROCESS), WORK, BudgetError, "too small for a ring"),
        (machine(DENSE, 0.3), replace(WORK, batch=500), BudgetError, "a batch of .* would fit"),
        (machine(DENSE, 0.3), replace(WORK, context=5000), ConfigError, "4,096 positions"),
        (machine(DENSE, 0.3), replace(WORK, batch=513), ConfigError, "512 tokens a step"),
    ],
)
def test_what_a_boot_would_refuse(given: Machine, work: Work, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        of(DENSE, given, work)


@pytest.mark.parametrize(
    ("given", "work"),
    [
        (machine(DENSE, 0.3), replace(WORK, batch=500)),
        (machine(DENSE, 0.3), replace(WORK, batch=500, context=300)),
        (Machine(GIB, None, FAST, 1e12), replace(WORK, batch=500)),
        (machine(DENSE, 0.01), replace(WORK, step_tokens=1 << 18, context=4000)),
    ],
)
def test_of_work_that_does_not_fit_it_is_said_what_would(given: Machine, work: Work) -> None:
    """To the last sequence, and to the last block of a context."""
    with pytest.raises(BudgetError, match="would fit") as refused:
        of(DENSE, given, work)
    said = dict(
        re.findall(r"(batch of|context of|step-tokens) ([\d,]+)(?= |,)", str(refused.value).partition(";")[2])
    )
    for text, name, unit in (
        ("batch of", "batch", 1),
        ("context of", "context", BLOCK_SIZE),
        ("step-tokens", "step_tokens", BLOCK_SIZE),
    ):
        if text in said:
            most = int(said[text].replace(",", ""))
            assert 0 < most < getattr(work, name)
            of(DENSE, given, replace(work, **{name: most}))
            with pytest.raises(BudgetError):
                of(DENSE, given, replace(work, **{name: most + unit}))
    assert said


def test_dynamic_rope_goes_beyond_its_positions() -> None:
    dynamic = DENSE | {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}
    assert of(dynamic, Machine(64 * GIB, 0, FAST, 1e15), replace(WORK, context=5000)).everything_resident


# ---- the shapes


@pytest.mark.parametrize("file", SHAPES, ids=lambda file: file.parent.name)
def test_the_shapes_are_of_the_size_that_is_published(file: Path) -> None:
    config = json.loads(file.read_text())
    spec: ModelSpec = read_spec(config)
    assert (
        bounds.parameters(group_layouts(spec, family_of(config).names, spec.dtype))
        == PARAMETERS[file.parent.name]
    )
    assert len(SHAPES) == len(PARAMETERS)


def test_the_position_at_which_a_token_is_as_dear_again() -> None:
    """Of what a prompt's next token adds there, and at its beginning."""
    spec, layouts = read_spec(DENSE), layouts_of(DENSE)

    def added(position: int) -> float:
        return bounds.prefill_operations(spec, layouts, [position + 1]) - bounds.prefill_operations(
            spec, layouts, [position]
        )

    at = bounds.doubles_at(spec, layouts)
    assert added(round(at)) == pytest.approx(2 * added(1), rel=0.01)
