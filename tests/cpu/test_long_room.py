"""How much host memory and disk KV gets, by arithmetic alone."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import tiny
from layouts import kv_of_heads
from penstock.arch.layout import GroupLayout, KVLayout, group_layouts, kv_layout
from penstock.arch.shards import Shard
from penstock.arch.spec import ModelSpec
from penstock.base.config import Config
from penstock.base.errors import BudgetError, ConfigError
from penstock.bench.shapes import SHAPES
from penstock.engine.boot import boot
from penstock.engine.budget import Demand, divide, least_activations, weights_room
from penstock.engine.contexts import LongRoom, chunk_in_balance, long_room
from penstock.engine.hardware import read_hardware
from penstock.engine.limits import limits_of
from penstock.engine.rooms import Hardware
from penstock.engine.settling import settle
from penstock.engine.team import Place
from penstock.kv.movement.hostpool import HostPool
from penstock.kv.movement.sizes import record_bytes, sketch_layout, staging_bytes
from penstock.kv.store.segments import StoreError, sizes
from penstock.kv.store.sizes import least_cap
from penstock.memory.arena import Arena, PinningError
from penstock.sched.rules import SchedulerLimits
from penstock.step.plan import HostBlockId
from penstock.weights.checkpoint.reader import Checkpoint
from penstock.weights.checkpoint.shape import Shape
from penstock.weights.streaming.residency import padded

CPU = torch.device("cpu")
SPEC = Shape.of(dict(SHAPES["100M"])).spec
LAYOUT = kv_of_heads(
    layers=SPEC.layers, block_size=32, kv_heads=SPEC.kv_heads, head_dim=SPEC.head_dim, dtype="bfloat16"
)
MIB = 1 << 20


def room(
    *, total: int = 64 * MIB, resident: int = 0, tokens: int = 512, **settings: object
) -> LongRoom | None:
    """On a machine with two budgets, so that host memory is beside the device's."""
    config = Config(Path(), **settings)  # type: ignore[arg-type]
    limits = SchedulerLimits(32, tokens, 4, config.max_length or 4096)
    return long_room(config, SPEC, limits, LAYOUT, read_hardware(CPU), total, resident)


BOTH = {"device_memory": "64MiB", "host_memory": "192MiB"}


def test_nobody_needs_any() -> None:
    assert room(**BOTH) is None, "no length was asked for"
    assert room(**BOTH, max_length=1000) is None, "it fits beside the weights"
    assert room(**BOTH, max_length=100_000, host_kv_memory="0") is None
    assert room(**BOTH, max_length=100_000, kv_blocks=4) is None, "who fixes the pages wants just these"
    assert room(device_memory="64MiB", max_length=100_000) is None, "one memory has no second place"


def test_a_length_that_does_not_fit_has_its_blocks_on_the_host() -> None:
    found = room(**BOTH, resident=60 * MIB, max_length=1500)
    assert found is not None
    assert found.blocks == 47
    assert found.host_bytes == 47 * LAYOUT.block_bytes


def test_no_more_than_the_host_has() -> None:
    found = room(**BOTH, max_length=100_000)
    assert found is not None
    assert found.blocks == 128 * MIB // LAYOUT.block_bytes
    with pytest.raises(
        BudgetError, match=r"1\.00 GiB of host memory were asked for KV, but there are 128 MiB"
    ):
        room(**BOTH, host_kv_memory="1GiB")


def test_policies_hold_sketches_of_all_blocks_in_host_memory() -> None:
    """Of those on disk too."""
    found = room(
        **BOTH,
        host_kv_memory="128MiB",
        disk_kv_memory="1GiB",
        kv_tile=64,
        kv_store="off",
        attention_policy="topk:4",
    )
    assert found is not None
    assert found.policies is not None
    assert found.disk is not None
    sketch = sketch_layout(LAYOUT, found.policies.bits).bytes * LAYOUT.layers
    fewer_on_disk = replace(found, disk=replace(found.disk, blocks=found.on_disk - 100))
    assert found.host_bytes - fewer_on_disk.host_bytes == 100 * sketch
    assert found.host_bytes - replace(found, blocks=found.blocks - 10).host_bytes == 10 * (
        LAYOUT.block_bytes + sketch
    )
    blocks = found.blocks * (LAYOUT.block_bytes + sketch) + found.on_disk * sketch
    passing = staging_bytes(LAYOUT, found.tile_tokens, found.chunk_tokens)
    assert found.host_bytes == blocks + 2 * passing, "what is chosen passes by itself"
    assert found.host_bytes <= 128 * MIB


def test_disk_is_beside_the_host_and_passes_through_it() -> None:
    found = room(**BOTH, host_kv_memory="128MiB", disk_kv_memory="1GiB", kv_tile=64, kv_store="off")
    assert found is not None
    assert found.on_disk == (1 << 30) // LAYOUT.block_bytes
    settings = {"host_kv_memory": "128MiB", "disk_kv_memory": "1GiB", "kv_tile": 64, "kv_store": "off"}
    half = room(**BOTH, **settings, tensor_parallel=2)
    assert half is not None
    assert half.on_disk == found.on_disk // 2, "each rank has its part of the disk"
    assert found.host_bytes <= 128 * MIB
    assert found.blocks < 128 * MIB // LAYOUT.block_bytes
    with pytest.raises(ConfigError, match="by way of host memory"):
        room(**BOTH, host_kv_memory=0, disk_kv_memory="1GiB")
    with pytest.raises(BudgetError, match="of disk for KV are less than a block"):
        room(**BOTH, host_kv_memory="1MiB", disk_kv_memory=1000)


def test_tiles_are_whole_blocks_and_a_small_part_of_the_device() -> None:
    for asked, tokens in ((None, None), (1, 32), (100, 96), (3000, 2976), (10**9, 4096)):
        found = room(**BOTH, host_kv_memory="8MiB", kv_tile=asked)
        assert found is not None
        assert found.tile_tokens % 32 == 0
        assert tokens is None or found.tile_tokens == tokens
    usual = room(**BOTH, host_kv_memory="8MiB")
    assert usual is not None
    assert usual.device_bytes < 64 * MIB // 8


def test_a_chunk_in_balance_takes_as_long_to_attend_as_to_bring() -> None:
    link, arithmetic = 25e9, 165e12
    chunk = chunk_in_balance(SPEC, 2, link, arithmetic)
    bring = 2 * SPEC.kv_heads * SPEC.head_dim * 2 / link
    attend = 4 * chunk * SPEC.heads * SPEC.head_dim / arithmetic
    assert attend == pytest.approx(bring)


def test_memory_that_cannot_be_pinned_serves_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As with a limit of locked memory: the driver refuses, the pool is there all the same, and somebody says
    so."""

    def refuse(*_: object) -> None:
        raise PinningError("cannot pin 6 MiB of host memory for cuda (CUDA error 304); allow less")

    monkeypatch.setattr(Arena, "_register", refuse)
    pool = HostPool(LAYOUT, 8, torch.device("cuda"))
    pool.block(HostBlockId(7)).fill_(3)
    assert int(pool.layer_rows(SPEC.layers - 1, 7, 1).sum()) == 3 * LAYOUT.layer_bytes
    assert "cannot pin" in caplog.text
    assert "several times slower" in caplog.text
    pool.close()


@pytest.mark.parametrize(
    ("memory", "asked", "ranks", "tokens"),
    [
        (80, None, 1, 16384),
        (48, None, 1, 8192),
        (80, "24GiB", 1, 8192),
        (141, "64GiB", 1, 16384),
        (80, None, 2, 8192),
    ],
)
def test_steps_are_longer_where_there_is_room(
    memory: int, asked: str | None, ranks: int, tokens: int
) -> None:
    """On one device, by what it has or may use; several need not be alike and must agree."""
    gpu = Hardware(cuda=True, free=memory << 30, whole=memory << 30, host_free=0, host_whole=0)
    spec = Shape.of(SHAPES["8B"]).spec
    config = Config(Path(), device="cuda", device_memory=asked, tensor_parallel=ranks)
    assert limits_of(config, spec, gpu).max_step_tokens == tokens
    assert limits_of(replace(config, max_step_tokens=512), spec, gpu).max_step_tokens == 512


def boots(
    layouts: Sequence[GroupLayout], spec: ModelSpec, layout: KVLayout, total: int, **settings: object
) -> bool:
    """Whether all arithmetic of a start on a CPU finds room: for KV, for the store of blocks, and for weights
    beside them."""
    config = Config(Path(), device="cpu", **settings)  # type: ignore[arg-type]
    limits = SchedulerLimits(layout.block_size, config.max_step_tokens or 512, 4, config.max_length or 4096)
    activations = least_activations(spec, "float32", limits.max_step_tokens, limits.max_sequences)
    try:
        far = long_room(
            config,
            spec,
            limits,
            layout,
            read_hardware(CPU),
            total,
            sum(map(padded, layouts)) + activations,
        )
        if far is not None and far.store_bytes:
            sizes(far.store_bytes, far.layout.block_bytes)
        if far is not None and config.host_memory is None:
            total -= far.host_bytes
        demand = Demand(
            activations=activations + (far.device_bytes if far else 0),
            block_bytes=layout.block_bytes,
            block_size=layout.block_size,
            useful_blocks=4 * -(-limits.max_length // layout.block_size),
            fixed_blocks=config.kv_blocks,
            length=None if far else config.max_length,
        )
        room = weights_room(total, layouts, demand, host_is_device=config.host_memory is None)
        divide(total, room, demand)
    except (BudgetError, StoreError):
        return False
    return True


KIB = 1 << 10
SIZES = {
    "host_kv_memory": [32 * KIB << power for power in range(13)]
    + [3 * MIB, 5 * MIB + 1, 20 * MIB, 33 * MIB, 100 * MIB],
    "disk_kv_memory": [32 * KIB << power for power in range(16)]
    + [200_000_000, 64 * MIB + 300 * KIB, 64 * MIB + 1, 7 * MIB + 1, 10**13],
    "kv_blocks": [1, 2, 3, 5, 8, 16, 64, 1000, None],
    "max_length": [100, 4096, 4097, 8192, 20_000, 32_768, 131_072],
}


MACHINES = 40 if tiny.THOROUGH else 10


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"kv_store": "off"},
        {"attention_policy": "topk:4"},
        {"attention_policy": "topk:4", "kv_store": "off"},
    ],
)
def test_no_size_between_two_that_start_is_refused(more: dict[str, object]) -> None:
    """For some machines, one size after another goes through all its values: those that start are neighbours,
    and of the disk's every one beyond the least, unless policies hold bounds of its blocks in memory."""
    spec = Shape.of(dict(SHAPES["100M"])).spec
    layouts = group_layouts(spec, None, "float32")
    weights, rng = sum(map(padded, layouts)), random.Random(0)
    started = 0
    for _ in range(MACHINES):
        layout = kv_layout(spec, "float32", rng.choice((1, 16, 64, 128)))
        total = weights + rng.choice((64, 200, 1000)) * MIB
        machine: dict[str, object] = {}
        if rng.random() < 0.5:
            machine = {"device_memory": total, "host_memory": total + rng.choice((8, 128, 1024)) * MIB}
        chosen = {name: rng.choice(values) for name, values in SIZES.items()}
        for name, values in SIZES.items():
            values = sorted(values, key=lambda value: float("inf") if value is None else value)
            found = [
                boots(layouts, spec, layout, total, **machine, **chosen | {name: value}, **more)
                for value in values
                if value
            ]
            first = found.index(True) if True in found else len(found)
            last = len(found) - found[::-1].index(True) if True in found else len(found)
            if name == "disk_kv_memory" and "attention_policy" not in more:
                last = len(found)
            assert all(found[first:last]), (
                f"{name}: {found} of {values}, {chosen}, {machine}, {total}, {layout}"
            )
            started += sum(found)
    assert started > 13 * MACHINES


def test_what_long_contexts_leave_of_the_disk_may_be_too_little_for_a_store(tmp_path: Path) -> None:
    layout = kv_layout(Checkpoint.open(tiny.checkpoint("llama")).spec, "float32", 8)
    needed, host = 400 // 8, 3
    own = (needed - host) * layout.layers * record_bytes(layout)
    said = list[str]()
    for more, store in (
        (0, False),
        (1000, False),
        (least_cap(layout.block_bytes) - 1, False),
        (least_cap(layout.block_bytes), True),
    ):
        config = Config(
            tiny.checkpoint("llama"),
            device="cpu",
            dtype="float32",
            max_length=400,
            beyond_trained=True,
            block_size=8,
            max_step_tokens=24,
            kv_blocks=8,
            host_kv_memory=host * layout.block_bytes,
            disk_kv_memory=own + more,
            kv_directory=tmp_path / str(more),
        )
        booted = boot(config, Checkpoint.open(config.model), say=said.append)
        try:
            assert booted.engine.scheduler.host.blocks == needed
            assert (booted.engine.scheduler.tiers.disk is not None) is store
            assert ("keep no blocks for later" in " ".join(said)) is (bool(more) and not store)
        finally:
            booted.engine.close()
            said.clear()


def test_kv_has_what_weights_and_the_largest_step_leave() -> None:
    demand = Demand(activations=300, block_bytes=100, block_size=16, useful_blocks=50)
    assert divide(2000, 1000, demand).blocks == 7
    assert divide(1400, 1000, demand).blocks == 1
    with pytest.raises(BudgetError, match="leaves no room for KV"):
        divide(1399, 1000, demand)
    fixed = replace(demand, fixed_blocks=7)
    assert divide(2000, 1000, fixed).blocks == 7
    with pytest.raises(BudgetError, match="leaves room for 6"):
        divide(1999, 1000, fixed)


def test_ranks_agree_on_the_least_room_that_any_has() -> None:
    """Each number is a rank's own, or that of a smaller one."""
    shape = Shape.of(SHAPES["100M"])
    config = Config(Path(), device="cpu", dtype="float32", device_memory="2GiB", host_kv_memory="64MiB")
    config = replace(config, max_length=4096, disk_kv_memory="48MiB", tensor_parallel=2)
    mine = settle(config, shape, CPU, lambda _: None, Shard(0, 2))
    assert mine.far is not None
    assert mine.far.disk is not None
    smaller = {mine.far.blocks: 5, mine.far.disk.blocks: 7, mine.far.tile_tokens: 64, 512: 100}
    smaller |= {mine.far.store_bytes: 0}
    other = SimpleNamespace(least=lambda value: min(value, smaller[value]))
    found = Place(CPU, Shard(0, 2), other).agree(mine)  # type: ignore[arg-type]
    assert found.far is not None
    assert found.limits.max_step_tokens == 100
    assert (found.far.blocks, found.far.on_disk, found.far.tile_tokens) == (5, 7, 64)
    assert found.far.chunk_tokens == 64  # A whole block.
    nothing = SimpleNamespace(least=lambda _: 0)
    assert Place(CPU, Shard(0, 2), nothing).agree(mine).far is None  # type: ignore[arg-type]
    alone = replace(mine, settings=replace(config, host_kv_memory=0, disk_kv_memory=None))
    assert Place(CPU, Shard(0, 2), nothing).agree(alone) is alone  # type: ignore[arg-type]
