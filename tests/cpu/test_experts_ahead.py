"""Experts that are foretold and read ahead from disk: right bytes whatever was foretold, right ones sooner,
wrong ones in nobody's way."""

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import tiny
from expert_worlds import ROOMS, SIZE, WIDE, World, every, expert, routed
from penstock import LLM, SamplingParams
from penstock.arch.layout import GroupId, GroupKind
from penstock.base.errors import CheckpointError
from penstock.base.tiers import Tier
from penstock.memory.disk import DirectFile
from penstock.models.decoder import Decoder
from penstock.weights.pieces import PAGE, PIECE_BYTES
from penstock.weights.streaming import expert_reads as module
from penstock.weights.streaming import experts
from penstock.weights.streaming.expert_reads import ExpertReads
from penstock.weights.streaming.lending import ExpertStream
from penstock.weights.streaming.source import PackSource
from streams import (
    BRIEF,
    LONG,
    OURS_AND_LOCKS,
    STRIDE,
    UNIT,
    Gates,
    cut_short,
    no_thread_left,
    random_delays,
    within,
)

DISK = {name: room for name, room in (ROOMS | {f"wide, {name}": room for name, room in WIDE.items()}).items()
        if room[3]}  # fmt: skip
PIECES = range(0, SIZE, UNIT)


@pytest.fixture(autouse=True)
def _in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each expert is read in three, and exchanges begin after a few passes."""
    monkeypatch.setattr(experts, "REVIEW", 3)
    monkeypatch.setattr(experts, "FADE", 7)
    monkeypatch.setattr(module, "READ_BYTES", UNIT)
    monkeypatch.setattr(module, "AHEAD_BYTES", UNIT)
    monkeypatch.setattr(module, "PIECE_BYTES", UNIT)


def reads_of(world: World) -> ExpertReads:
    assert world.experts._reads is not None
    return world.experts._reads


def on_disk(world: World, layer: int) -> list[GroupId]:
    return [id for id in world.ids if id.layer == layer and world.experts.homes[id].tier is Tier.DISK]


def read(gates: Gates, id: GroupId, seconds: float = LONG) -> bool:
    return all(gates.passes(("read", str(id), start, 0), seconds) for start in PIECES)


@pytest.mark.parametrize("room", DISK.values(), ids=DISK)
@pytest.mark.parametrize("late", ["nothing", "copy", "kernel", "read", 1, 2])
def test_every_kernel_sees_its_expert(room: tuple[int, int, int, int], late: str | int) -> None:
    """Whether what was foretold is right, wrong, or both; in waves and one by one."""
    rng = np.random.default_rng(len(str(late)))
    delay = every(late) if isinstance(late, str) else random_delays(late)
    with no_thread_left(), World(room, Gates(delay=delay)) as world:
        first = list(world.experts.homes.items())
        for turn in range(36):
            layer, following = turn % 3, (turn + 1) % 3
            use = world.waves if rng.random() < 0.7 else world.layer
            use(routed(rng, layer, skew=0.8))
            world.experts.foretell(routed(rng, following, skew=0.8))
        assert world.wrong() == []
        world.check()
        assert not room[0] or list(world.experts.homes.items()) != first


def test_right_ones_are_not_read_again() -> None:
    gates = Gates()
    with World((0, 0, 6, 8), gates) as world:
        world.waves([expert(0, 0)])
        world.experts.foretell([expert(1, 2), expert(1, 0)])
        assert read(gates, expert(1, 2))
        assert read(gates, expert(1, 0))
        world.waves([expert(1, number) for number in (0, 1, 2)])
        assert [world.store.reads[expert(1, 2), start] for start in PIECES] == [1, 1, 1]
        reads = reads_of(world)
        assert (reads.foretold, reads.right) == (2, 2)
        assert world.experts.read_bytes == 4 * SIZE
        assert world.wrong() == []
        world.check()


def test_a_right_one_is_gone_on_with_by_all_readers() -> None:
    """Two threads read ahead. They are held at two pieces, and all others come meanwhile."""
    told = expert(1, 2)
    gates = Gates([("read", str(told), start, 0) for start in (0, UNIT)])
    with World((0, 0, 6, 8), gates) as world:
        world.waves([expert(0, 0)])
        world.experts.foretell([told])
        assert not gates.passes(("read", str(told), 2 * UNIT, 0), BRIEF)
        world.experts.expect([told])
        assert gates.passes(("read", str(told), 2 * UNIT, 0))
        gates.open()
        world.layer([told])
        assert world.wrong() == []


def test_no_more_of_a_wrong_one_is_read() -> None:
    told = expert(1, 2)
    gates = Gates([("read", str(told), start, 0) for start in (0, UNIT)])
    with World((0, 0, 6, 8), gates) as world:
        world.waves([expert(0, 0)])
        world.experts.foretell([told])
        assert within(LONG, lambda: until(lambda: world.store.reads[told, UNIT] == 1))
        world.waves([expert(1, 0)])
        gates.open()
        world.waves([expert(2, 0)])
        world.check()
        assert [world.store.reads[told, start] for start in PIECES] == [1, 1, 0]
        reads = reads_of(world)
        assert (reads.foretold, reads.right) == (1, 0)
        assert world.experts.read_bytes == 3 * SIZE
        assert world.wrong() == []


def until(done: Callable[[], bool]) -> None:
    while not done():
        time.sleep(1e-3)


def test_what_is_foretold_is_read_behind_all_that_was_asked_for() -> None:
    gates = Gates([("read", str(expert(0, 1)), 0, 0)])
    with World((0, 0, 6, 8), gates) as world:
        world.experts.expect([expert(0, 0), expert(0, 1)])
        world.experts.foretell([expert(1, 0)])
        assert read(gates, expert(0, 0))
        assert not gates.passes(("read", str(expert(1, 0)), 0, 0), BRIEF)
        gates.open()
        assert read(gates, expert(1, 0))


def test_a_read_waits_for_a_wrong_one_that_still_comes_to_its_slot() -> None:
    wrong = expert(1, 3)
    gates = Gates([("read", str(wrong), start, 0) for start in PIECES])
    with World((0, 0, 4, 2), gates) as world:
        world.layer([expert(0, 0)])
        world.experts.foretell([wrong])
        assert within(LONG, lambda: until(lambda: world.store.reads[wrong, 0] == 1))
        slot = reads_of(world)._under_way[wrong].slot
        host = threading.Thread(target=world.layer, args=([expert(1, 0), expert(1, 1), expert(1, 2)],))
        host.start()
        assert not within(BRIEF, host.join)
        late = [id for id, one in reads_of(world)._under_way.items() if one.slot == slot]
        assert late
        assert not gates.passes(("read", str(late[0]), 0, 0), BRIEF)
        gates.open()
        host.join()
        assert world.wrong() == []
        world.check()


@pytest.mark.parametrize("room", DISK.values(), ids=DISK)
def test_slots_are_left_for_those_that_are_asked_for(room: tuple[int, int, int, int]) -> None:
    """All of a layer is foretold, the other way round: what is needed first still finds a slot."""
    with World(room) as world:
        for turn in range(9):
            ids = [expert(turn % 3, number) for number in range(4)]
            assert within(LONG, partial(world.layer if turn % 2 else world.waves, ids))
            world.experts.foretell([expert((turn + 1) % 3, number) for number in reversed(range(4))])
            assert len(reads_of(world).ring) >= min(max(room[3] // 2, 1), room[3])
        assert world.wrong() == []
        world.check()


def test_right_ones_come_first() -> None:
    gates = Gates()
    with World((0, 0, 6, 8), gates) as world:
        world.waves([expert(0, 0)])
        world.experts.foretell([expert(1, 3)])
        assert read(gates, expert(1, 3))
        first = next(iter(world.experts.waves([expert(1, number) for number in range(4)])))
        assert expert(1, 3) in first
        assert list(first) == sorted(first, key=lambda id: id.expert)
        world.experts.take_wave(first)
        world.experts.release_wave(first)


def test_what_a_reader_meets_ahead_is_raised_where_the_expert_is_taken_and_nowhere_else() -> None:
    gates = Gates()
    with no_thread_left(), World((0, 0, 6, 8), gates) as world:
        damaged = expert(1, 2)
        world.store.faults = {(damaged, UNIT): CheckpointError(f"{damaged} is damaged")}
        for _ in range(2):
            world.waves([expert(0, 0)])
            world.experts.foretell([damaged])
            assert within(LONG, lambda: until(lambda: reads_of(world).ready(damaged)))
            world.waves([expert(1, 0)])
        world.waves([expert(0, 0)])
        world.experts.foretell([damaged])
        with pytest.raises(CheckpointError, match=r"expert\.1\.2 is damaged"):
            world.waves([damaged])
        world.store.faults = {}
        world.waves([damaged])
        assert world.wrong() == []
        world.check()


def test_what_was_read_ahead_is_checked_until_it_was_read_whole_once() -> None:
    gates = Gates()
    with World((0, 0, 6, 8), gates) as world:
        told = expert(1, 2)
        for turn in range(2):
            world.waves([expert(0, 0)])
            world.experts.foretell([told])
            assert within(LONG, lambda: until(lambda: reads_of(world).ready(told)))
            world.waves([expert(1, 0)])
            assert world.store.unchecked[told, 0] == 0, f"of {turn + 1} that were wrong"
        world.waves([told])
        world.waves([told])
        assert (world.store.reads[told, 0], world.store.unchecked[told, 0]) == (4, 1)


def test_layers_stop_to_foretell_where_it_does_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """And begin again when trials find that it would."""
    with World((0, 0, 6, 8)) as world:
        reads = reads_of(world)

        def passes(count: int, number: int) -> int:
            told = 0
            for _ in range(count):
                for layer in range(3):
                    world.waves([expert(layer, 0)])
                    if world.experts.foretells():
                        told += 1
                        world.experts.foretell([expert((layer + 1) % 3, number)])
                        begun = reads._under_way[expert((layer + 1) % 3, number)].begun
                        assert within(LONG, partial(until, begun.copy))
            return told

        assert passes(20, 0) == 60
        passes(64, 1)
        assert passes(64, 1) == 3, "a trial in 64 layers"
        monkeypatch.setattr(module, "_TRIAL", 2)
        passes(60, 0)
        assert passes(20, 0) == 60
        assert world.wrong() == []


@pytest.mark.parametrize("room", ["disk", "all tiers, the larger host ring", "wide, all tiers", "wide, disk"])
@pytest.mark.parametrize("name", ["foretell", "expect the right ones", "expect others", "close"])
def test_an_interrupt_anywhere_does_no_harm(room: str, name: str) -> None:
    place, interrupted = len(room + name) % STRIDE, True
    while interrupted:
        with no_thread_left(), World(DISK[room], Gates(delay=random_delays(place, longest=3e-4))) as world:
            moving = world.experts
            world.layer([expert(0, 0), expert(0, 3)])
            told, ids = on_disk(world, 1), [expert(1, number) for number in range(4)]
            call: Callable[[], object] = partial(moving.foretell, told)
            if name != "foretell":
                moving.foretell(told[:1])
            if name == "expect the right ones":
                call = partial(moving.expect, ids)
            elif name == "expect others":
                call = partial(moving.expect, [id for id in ids if id != told[0]])
            elif name == "close":
                call = moving.close
            interrupted = cut_short(call, place, OURS_AND_LOCKS)
            if name != "close":
                cut_short(partial(moving.expect, [expert(0, 1)]), place % 23, OURS_AND_LOCKS)
                assert within(LONG, world.every)
                assert within(LONG, world.check)
                assert world.wrong() == []
            assert within(LONG, moving.close)
        place += STRIDE
    assert place > 3


# ---- a whole model


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "glm4_moe"])
@pytest.mark.parametrize("foretells", [False, True])
def test_tokens_are_those_of_experts_that_rest(
    name: str, foretells: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every layer foretelling the next, and with none. Nothing passes the page cache."""
    monkeypatch.setattr(ExpertReads, "worthwhile", lambda self: foretells)
    monkeypatch.setattr(module, "READ_BYTES", PAGE)
    monkeypatch.setattr(module, "AHEAD_BYTES", PAGE)
    monkeypatch.setattr(module, "PIECE_BYTES", PIECE_BYTES)
    settings = {"device": "cpu", "dtype": "float32", "max_length": 64, "max_sequences": 2, "cache": tmp_path}
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=-1)
    prompts = tiny.prompts()[:2]
    with LLM(tiny.checkpoint(name), **settings) as llm:  # type: ignore[arg-type]
        expected = llm.generate(prompts, params)
        budget, layouts = llm.memory.budget, llm.booted.weights._layouts.values()
        padded = [(layout.id, -(-layout.size // 4096) * 4096) for layout in layouts]
        dense = sum(size for id, size in padded if id.kind != "expert")
        largest = max(size for id, size in padded if id.kind == "expert")
    device = budget.activations + budget.kv + dense + 2 * largest
    with LLM(
        tiny.checkpoint(name),
        **settings,  # type: ignore[arg-type]
        kv_blocks=budget.blocks,
        device_memory=device,
        host_memory=device + 5 * largest,
    ) as llm:
        source = llm.booted.weights._sources.streamed
        assert isinstance(source, PackSource)
        if source.pack.store.direct:
            monkeypatch.setattr(DirectFile, "read_into", None)
        assert llm.generate(prompts, params) == expected
        counts = llm.memory.weights.experts
    assert counts.from_disk > 20
    assert (counts.foretold > 10) == (counts.right > 0) == foretells


def test_what_is_foretold_is_what_the_next_router_would_choose() -> None:
    """With the correction of its scores, which here decides alone."""
    with LLM(tiny.checkpoint("glm4_moe"), device="cpu", dtype="float32", max_length=64) as llm:
        weights, spec = llm.booted.weights, llm.spec
        layer = spec.layers - 1
        router = weights.take(GroupId(GroupKind.ROUTER, layer)).vectors["correction"]
        router.zero_()
        router[3], router[1] = 100.0, 50.0
        foretold = Decoder(spec)._foretold(layer, torch.randn(5, spec.hidden_size), weights, chosen=True)
    assert foretold[:, :2].tolist() == [[3, 1]] * 5


def test_what_a_step_that_was_broken_off_had_foretold_is_forgotten() -> None:
    """Else the next step, which foretells nothing, would read for it, and ask its activations."""
    asked = list[object]()
    slots = SimpleNamespace(foretells=lambda: False, expect=lambda _: None, foretell=asked.append)
    layouts = [SimpleNamespace(id=GroupId(GroupKind.EXPERT, layer, 0)) for layer in range(3)]
    lent = ExpertStream(layouts, {}, slots, torch.device("cpu"))  # type: ignore[arg-type]
    lent.look_ahead()
    lent.foretell_later(2, lambda: torch.tensor([[0]]))
    assert lent.foretells(0, 1) is None
    assert list(lent.each([])) == []
    assert asked == []
