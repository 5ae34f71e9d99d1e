"""How much host memory and disk KV gets, by arithmetic alone."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.arch.layout import KVLayout
from penstock.base.config import Config
from penstock.base.errors import BudgetError, ConfigError
from penstock.bench.shapes import SHAPES
from penstock.engine import settling
from penstock.engine.contexts import LongRoom, chunk_in_balance, long_room
from penstock.kv.hostpool import HostPool
from penstock.memory.arena import Arena, PinningError
from penstock.sched.rules import Limits
from penstock.step.plan import HostBlockId
from penstock.weights.shape import Shape

CPU = torch.device("cpu")
SPEC = Shape.of(dict(SHAPES["100M"])).spec
LAYOUT = KVLayout(layers=SPEC.layers, block_size=32, kv_heads=SPEC.kv_heads, head_dim=SPEC.head_dim, dtype="bfloat16")
MIB = 1 << 20


def room(*, total: int = 64 * MIB, resident: int = 0, tokens: int = 512, **settings: object) -> LongRoom | None:
    """On a machine with two budgets, so that host memory is beside the device's."""
    config = Config(Path(), **settings)  # type: ignore[arg-type]
    limits = Limits(32, tokens, 4, config.max_length or 4096)
    return long_room(config, SPEC, limits, LAYOUT, CPU, total, resident)


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
    with pytest.raises(BudgetError, match=r"1\.00 GiB of host memory were asked for KV, but there are 128 MiB"):
        room(**BOTH, host_kv_memory="1GiB")


def test_disk_is_beside_the_host_and_passes_through_it() -> None:
    found = room(**BOTH, host_kv_memory="128MiB", disk_kv_memory="1GiB", kv_tile=64, kv_store="off")
    assert found is not None
    assert found.on_disk == (1 << 30) // LAYOUT.block_bytes
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


def test_memory_that_cannot_be_pinned_serves_as_it_is(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """As with a limit of locked memory: the driver refuses, the pool is there all the same, and somebody says so."""

    def refuse(arena: Arena, device: torch.device) -> None:
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
    [(80, None, 1, 16384), (48, None, 1, 8192), (80, "24GiB", 1, 8192), (141, "64GiB", 1, 16384), (80, None, 2, 8192)],
)
def test_steps_are_longer_where_there_is_room(
    memory: int, asked: str | None, ranks: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one device, by what it has or may use; several need not be alike and must agree."""
    monkeypatch.setattr(settling, "total_memory", lambda device: memory << 30)
    spec = Shape.of(SHAPES["8B"]).spec
    config = Config(Path(), device="cuda", device_memory=asked, tensor_parallel=ranks)
    assert settling.choose_limits(config, spec, torch.device("cuda")).max_step_tokens == tokens
    assert settling.choose_limits(replace(config, max_step_tokens=512), spec, torch.device("cuda")).max_step_tokens == 512
