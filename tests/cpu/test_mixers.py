"""A mixer is a declaration and a function: one that penstock does not have, with values wider than keys and a
plane more, in layers that are normalised after their blocks, is added from outside, and whatever moves KV
moves it."""

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

import exact
import tiny
import toys
from exact import BLOCK, LIMIT, SETTINGS, close, drawn, host, outputs, prompts
from members import CPU, pass_of
from penstock.api.llm import LLM
from penstock.api.outputs import Completion
from penstock.arch import bounds
from penstock.arch.layout import KVLayout, group_layouts, kv_layout
from penstock.arch.mixers.mixer import Plane
from penstock.cli.main import main
from penstock.kv.movement.carrier import Carrier, CarrierRoom
from penstock.kv.movement.fp8 import as_rested
from penstock.kv.movement.pool import KVPool
from penstock.kv.movement.sizes import record_bytes
from penstock.kv.movement.tiles import Streams, Tile
from penstock.memory.streams import CallerStream
from penstock.sched.rates import TransferRates
from penstock.step.params import SamplingParams
from penstock.step.plan import BlockId, HostBlockId
from penstock.weights.checkpoint.reader import Checkpoint


@pytest.fixture(autouse=True)
def known() -> Iterator[None]:
    with toys.tilted_known():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toys.tilted_checkpoint(tmp_path_factory.mktemp("tilted") / "model")


def test_logits_are_those_of_the_reference(model: Path) -> None:
    assert exact.confirms(model, outputs(model))


def test_contexts_longer_than_the_device_give_the_same(model: Path) -> None:
    long = {"kv_blocks": 6, "max_step_tokens": 24, "kv_tile": 32, "host_kv_memory": host(model, 60)}
    with LLM(model, **SETTINGS | long) as llm:  # type: ignore[arg-type]
        found = drawn(llm)
        assert llm.booted.engine.scheduler.host.blocks == 60
    assert close(found, outputs(model))


@pytest.mark.parametrize(("policy", "same"), [("topk:100", True), ("topk:1", False)])
def test_policies_choose_blocks_of_these_planes(policy: str, same: bool, tmp_path: Path) -> None:
    """Where all layers have the same."""
    model = toys.made_checkpoint(tmp_path / "model", "all_tilted")
    long = {"kv_blocks": 6, "max_step_tokens": 24, "kv_tile": 32, "host_kv_memory": host(model, 60)}
    found = outputs(model, **long, attention_policy=policy, prefill_policy=policy)
    assert close(found, outputs(model)) == same


def test_contexts_on_disk_give_the_same(model: Path, tmp_path: Path) -> None:
    with Checkpoint.open(model) as checkpoint:
        layout = kv_layout(checkpoint.spec, "float32", BLOCK)
    disk = 40 * layout.layers * record_bytes(layout)
    long = {
        "kv_blocks": 6,
        "max_step_tokens": 24,
        "kv_tile": 32,
        "host_kv_memory": host(model, 4),
        "kv_store": "off",
    }
    assert close(outputs(model, **long, disk_kv_memory=disk, kv_directory=tmp_path), outputs(model))


def test_prefixes_that_were_kept_give_the_same(model: Path, tmp_path: Path) -> None:
    """Through the store on disk, in an engine that has never seen them."""
    kept = {
        "host_kv_memory": "8MiB",
        "disk_kv_memory": "32MiB",
        "kv_directory": tmp_path / "kv",
        "block_size": 16,
    }
    plain = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3)
    with (
        patch.object(TransferRates, "loading_pays", lambda *_: True),
        patch.object(TransferRates, "computed_first", lambda *_: 0),
    ):
        first, again = (kept_by(model, plain, kept) for _ in range(2))
    assert [one.tokens for one in again] == [one.tokens for one in first]
    assert (first[1].cached_tokens, again[1].cached_disk) == (0, 112)


def kept_by(model: Path, params: SamplingParams, kept: dict[str, object]) -> list[Completion]:
    with LLM(model, **SETTINGS | kept) as llm:  # type: ignore[arg-type]
        return llm.generate(prompts(), params)


@pytest.mark.parametrize("rounded", [False, True])
def test_planes_come_back_from_the_host(rounded: bool) -> None:
    """Of chunks that were sent and of blocks that were demoted, layers of two kinds in each."""
    plain = Plane("k", 2, 6, scored=True), Plane("v", 2, 6)
    exact = KVLayout(
        (plain, (*plain, Plane("more", 1, 4), Plane("index", 1, 2, "int32")), plain), 4, "bfloat16"
    )
    layout, blocks = exact.in_fp8 if rounded else exact, 5
    streams = Streams(CallerStream(), CallerStream(), CallerStream())
    carrier = Carrier(CarrierRoom(layout, blocks, 16, 16), CPU, streams)
    pages = KVPool(exact, blocks, CPU)
    pages.bytes.random_(0, 120)  # bytes of which no two make a number that is infinite or none
    order = [3, 0, 4, 1, 2]
    sent, demoted = order[:3], order[3:]
    try:
        for page in demoted:
            carrier.outbox.demote(pages.block(BlockId(page)), HostBlockId(page))
        tiles = [Tile(tuple(map(HostBlockId, part)), 4 * len(part) - 1) for part in (order[:4], order[4:])]
        for layer, planes in enumerate(pages.layers):
            carrier.outbox.send(layer, [plane[sent].flatten(0, 1) for plane in planes], sent)
        carrier.ring.begin(tiles, range(3), carrier.outbox.landed())
        for layer, planes in enumerate(pages.layers):
            for tile in tiles:
                lent = carrier.ring.take()
                assert len(lent) == len(planes) == len(exact.planes[layer])
                for plane, found in zip(planes, lent, strict=True):
                    some = plane[list(tile.blocks)]
                    wanted = as_rested(some) if rounded and plane.is_floating_point() else some
                    assert torch.equal(found, wanted.flatten(0, 1)[: tile.keys])
                carrier.ring.release()
    finally:
        carrier.close()


def test_an_engine_with_kv_in_fp8(model: Path) -> None:
    long = {"kv_blocks": 6, "max_step_tokens": 24, "kv_tile": 32, "host_kv_memory": host(model, 60)}
    found, expected = outputs(model, **long, host_kv_dtype="fp8"), outputs(model)
    apart = [
        (torch.tensor(scores[:110]) - torch.tensor(others[:110])).abs().mean()
        for (_, scores), (_, others) in zip(found, expected, strict=True)
    ]
    assert apart[0] < LIMIT < max(apart) < 1


def test_ranks_and_weights_that_stream(model: Path) -> None:
    alone = pass_of(model, 0)
    for one, other in zip(pass_of(model, 0, part=0.5), alone, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(pass_of(model, 2), alone, strict=True):
        assert tiny.distance(one, other) < 1e-5


def test_layouts_bounds_and_plans(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Checkpoint.open(model) as checkpoint:
        spec, names = checkpoint.spec, checkpoint.names
    layout = kv_layout(spec, "float32", BLOCK)
    plain = 2 * spec.kv_heads * spec.head_dim
    tilted = spec.kv_heads * (spec.head_dim + 20 + 3)
    assert layout.layer_sizes == tuple(4 * BLOCK * one for one in (plain, tilted, tilted))
    assert bounds.kv_bytes_read(spec, "float32", 10) == 4 * 10 * (plain + 2 * tilted)
    pairs = 10 * 11 // 2
    assert bounds.attention_operations(spec, pairs, 1) == 2 * pairs * spec.heads * (spec.head_dim + 20)
    assert bounds.parameters(group_layouts(spec, names, "float32")) == sum(
        one.numel() for one in load_file(model / "model.safetensors").values()
    )
    assert main(["plan", str(model), "--machine", "cpu", "--dtype", "float32", "--context", "64"]) == 0
    assert "tilted" in capsys.readouterr().out
