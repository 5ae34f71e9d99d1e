"""The CPU computes feed-forwards where they rest, in passes of few decode rows: kernels are interpreted, the
service is a thread. Passes of both kinds turn, whatever is late."""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip(
        "kernels are interpreted where there is no GPU; tests/gpu runs them compiled", allow_module_level=True
    )

import tiny
from members import RATES, Rank, share, steps, together
from penstock.arch.layout import GroupId, GroupKind, group_layouts
from penstock.arch.spec import SWIGLU
from penstock.base.config import Config
from penstock.base.errors import ConfigError, DeviceError
from penstock.base.tiers import Tier
from penstock.engine import cpu_rates, placing
from penstock.memory.streams import CallerStream
from penstock.ops.matrix import GroupViews, Matrix
from penstock.ops.native.experts import ThreadPool
from penstock.ops.native.few_bits import library
from penstock.ops.row_classes import CLASSES, MOST_TOKENS, class_of
from penstock.step.plan import Plan
from penstock.weights.checkpoint.reader import Checkpoint
from penstock.weights.streaming import stream
from penstock.weights.streaming.cpu_dense import CpuFeedForwards
from penstock.weights.streaming.feeder import Feeder
from penstock.weights.streaming.orders import turns_of
from penstock.weights.streaming.residency import CpuOrder, CpuPass, padded
from penstock.weights.streaming.ring import Link, Prediction, RingLayout, StreamRates, lay_ring
from penstock.weights.streaming.turns import CpuTurns
from penstock.worker.runner import decode_rows
from quantised import SCHEMES, checkpoints
from streams import (
    LONG,
    UNIT,
    Gates,
    Shape,
    World,
    cut_short,
    everywhere,
    no_thread_left,
    random_delays,
    within,
)
from tiled import tiled_pool

if library() is None:
    pytest.skip("no C compiler", allow_module_level=True)

CPU = torch.device("cpu")


# ---- feed-forwards


@cache
def checkpoint(name: str, scheme: str = "") -> Path:
    """With feed-forwards as wide as kernels for a CPU read them, quantised if there is a scheme."""
    path = tiny.folder() / f"{name}_{scheme}_for_cpu"
    if scheme:
        return checkpoints(checkpoint(name), path, SCHEMES[scheme])[0]
    return tiny.write(tiny.CASES[name], path, intermediate_size=96)


def at_once(self: CpuFeedForwards, number: int, x: Tensor) -> Tensor:
    """In place of the service and the kernels that ask it."""
    out, group = torch.empty_like(x), list(self._groups.values())[number]
    tiled_pool().feed_forward(x, [group], [len(x)], SWIGLU, out)
    return out


def plans() -> list[Plan]:
    """Prompts, then decode steps of three rows, with a chunk between two of them."""
    first, second, third = steps()
    following = [
        Plan((), (share(0, [7], 7 + turn), share(1, [9], 15 + turn), share(2, [11], 33 + turn)))
        for turn in range(3)
    ]
    return [first, second, third, *following]


@pytest.mark.parametrize(
    ("name", "scheme", "part"),
    [
        *((name, "", part) for name in ("llama_biases", "qwen3", "qwen2") for part in (0.2, 0.6)),
        *(("llama", scheme, 0.2) for scheme in ("gptq", "packed_asymmetric", "fp8", "mxfp4")),
    ],
)
def test_a_model_computes_what_it_computes_with_groups_that_stream(
    name: str, scheme: str, part: float
) -> None:
    """To the last bit what the CPU's kernels compute without a hand-over; nearly what streams; steps of other
    kinds before decode steps to the last bit what streams."""
    found = list[list[Tensor]]()
    for cpu, python in ((False, False), (True, True), (True, False)):
        with ExitStack() as patched, Checkpoint.open(checkpoint(name, scheme)) as model:
            rank = Rank(model, part=part, cpu=cpu, dtype="bfloat16")
            patched.callback(rank.weights.close)
            if python:
                patched.enter_context(patch.object(CpuFeedForwards, "compute", at_once))
            found.append(together([rank], plans())[0])
            if cpu and not python:
                own = rank.weights.cpu
                assert own is not None
                own.check()
                groups = len(rank.weights.placement.cpu.groups)  # type: ignore[union-attr]
                assert own.service.took[:, :, 0].sum() == 4 * groups > 0
    streamed, by_python, by_service = found
    assert all(map(torch.equal, by_python, by_service))
    assert all(map(torch.equal, streamed[:2], by_service[:2]))
    for one, other in zip(streamed[2:], by_service[2:], strict=True):
        assert not torch.equal(one, other), "roundings differ"
        assert (one - other).abs().max() < 0.02 * one.abs().max()


def test_a_step_has_as_many_decode_rows_as_sequences() -> None:
    """None where a prompt comes, too."""
    assert [decode_rows(plan) for plan in plans()] == [0, 0, 3, 3, 3, 3]


def test_what_was_asked_in_a_step_that_was_broken_off_is_waited_for() -> None:
    """Then the box is the device's again: what is asked next is answered by what it is asked of."""

    def fails(*_: object) -> None:
        raise KeyboardInterrupt

    with service() as (own, groups):
        rng = torch.Generator().manual_seed(1)
        xs = [torch.randn(rows, HIDDEN, generator=rng).bfloat16() for rows in (MOST_TOKENS, 3, 1)]
        with patch.object(own, "take", fails), pytest.raises(KeyboardInterrupt):
            own.compute(0, xs[0])
        settled = own.settle
        with patch.object(own, "settle", side_effect=settled) as waited:
            for number, x in enumerate(xs[1:]):
                assert torch.equal(own.compute(number, x), want(groups[number], x))
        assert waited.call_count == 1
        own.check()


def test_norms_before_and_behind_are_the_device_s() -> None:
    """It normalises what it gives, and what it takes: by copies of its own."""
    vectors = {name: torch.rand(HIDDEN).bfloat16() for name in ("norm", "norm_after", "down_bias")}
    with service(vectors=vectors) as (own, groups):
        lent = list(own.views().values())
        assert len(lent) == len(groups)
        for one in lent:
            assert one.vectors.keys() == {"norm", "norm_after"}
            for name, vector in one.vectors.items():
                assert torch.equal(vector, vectors[name])


def test_a_service_that_is_gone_is_an_error_and_no_hang() -> None:
    with service() as (own, _):
        own.service.close()
        own.compute(0, torch.zeros(1, HIDDEN, dtype=torch.bfloat16))
        with pytest.raises(DeviceError, match="its share of feed-forwards"):
            own.check()


HIDDEN, INNER = 64, 96


@contextmanager
def service(
    count: int = 3, vectors: Mapping[str, Tensor] | None = None
) -> Iterator[tuple[CpuFeedForwards, list[GroupViews]]]:
    """Feed-forwards in host memory, and what has the CPU compute them."""
    rng, none = torch.Generator().manual_seed(0), Prediction(1.0, dict.fromkeys(Link, 0.0))

    def matrix(*shape: int) -> Matrix:
        return Matrix.of((torch.randn(shape, generator=rng) / 8).bfloat16())

    groups = [
        GroupViews({"gate_up": matrix(2 * INNER, HIDDEN), "down": matrix(HIDDEN, INNER)}, vectors or {}, ())
        for _ in range(count)
    ]
    ids = Shape((1,) * count, "h" * count, 1).ids
    of = CpuPass((CpuOrder(tuple(ids), RingLayout()),), (none,), True, HIDDEN, "bfloat16")
    own = CpuFeedForwards(of, dict(zip(ids, groups, strict=True)), CPU, CallerStream(), 2)
    try:
        yield own, groups
    finally:
        own.close()
        own.free()


def want(group: GroupViews, x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    tiled_pool().feed_forward(x, [group], [len(x)], SWIGLU, out)
    return out


# ---- two orders of one ring


class Borrowed:
    """In place of the service, for groups that are only bytes."""

    bytes, worked = 0, 0.0

    def __init__(self, of: CpuPass, *_: object) -> None:
        self._groups = of.groups

    def views(self) -> dict[GroupId, GroupViews]:
        return {id: GroupViews({}, {}, (), torch.clone) for id in self._groups}

    def close(self) -> None: ...

    def free(self) -> None: ...


def orders(shape: Shape, computed: Sequence[int], of_many: Sequence[int], *, always: bool = True) -> Shape:
    """The groups of a shape, some of which the CPU computes: others in steps of more than four rows."""
    placement = shape.placement()

    def order(numbers: Sequence[int]) -> CpuOrder:
        ids = [shape.ids[number] for number in numbers]
        runs = [
            (run.use, run.start, run.size)
            for run in placement.device_ring.runs
            if placement.uses[run.use].id not in ids
        ]
        return CpuOrder(tuple(ids), lay_ring(runs, shape.ring * UNIT))

    none = Prediction(1.0, dict.fromkeys(Link, 0.0))
    by_class = (*[order(computed)] * 3, *[order(of_many)] * 2)
    of = CpuPass(by_class, (none,) * CLASSES, always, HIDDEN, "bfloat16")
    return replace(shape, solved=replace(placement, cpu=of))


def turning(shape: Shape, gates: Gates, **more: Any) -> World:
    with patch.object(stream, "CpuFeedForwards", Borrowed):
        return World(shape, gates, **more)


def one_pass(world: World, rows: int, until: int | None = None) -> None:
    """A pass in which the CPU computes some groups if there are rows; broken off behind `until` groups."""
    shared = world.weights.turn(rows)
    assert shared == (rows > 0)
    of = world.placement.cpu
    assert of is not None
    computed = of.orders[class_of(rows)].groups if rows else ()
    for id in world.shape.order[:until]:
        if id in computed:
            assert world.weights.take(id).elsewhere is not None
            world.weights.release(id)
        else:
            world.use(id)
    world.weights.end_pass()


SHAPES = [
    orders(Shape((4, 4, 4, 4, 4, 4), "hhhhhh", 4), (1, 4), (3,)),
    orders(Shape((4, 4, 4, 4, 4, 4), "hhhhhh", 8), (0, 2, 4), (1, 4)),
    orders(Shape((2, 7, 2, 7, 2, 7, 3), "hhhdhhh", 9), (1, 5), (5,)),
    orders(Shape((1, 9, 1, 9, 1, 9, 5), "hhhhhhh", 19), (1, 3), (3, 5)),
    orders(Shape((3, 5, 3, 5), "hhhh", 8, again=(0,)), (1,), (3,)),
]
TURNS = [0, 1, 1, 8, 0, 1, 0, 8, 8, 1, 0]
"""Rows of passes."""


@pytest.mark.parametrize("shape", SHAPES, ids=[str(at) for at in range(len(SHAPES))])
@pytest.mark.parametrize("late", ["nothing", "copy", "kernel", 1, 2, 3, 4])
def test_every_kernel_sees_its_group_whichever_passes_turn(shape: Shape, late: str | int) -> None:
    delay = (
        random_delays(late) if isinstance(late, int) else lambda place: 2e-3 if place[0] == late else 0.0  # type: ignore[index]
    )
    with no_thread_left(), turning(shape, Gates(delay=delay)) as world:
        for rows in TURNS:
            one_pass(world, rows)
        assert world.wrong() == []
        for rows in (0, 1, 8):
            lent, of = world.weights.standing(shared=rows), world.placement.cpu
            assert of is not None
            computed = of.orders[class_of(rows)].groups if rows else ()
            assert all(lent.moves(id) == (id not in computed) for id in world.shape.order if id in of.groups)
        turns = world.weights._turning
        assert turns is not None
        assert turns.passes_shared == sum(rows > 0 for rows in TURNS)


@pytest.mark.parametrize("shape", SHAPES, ids=[str(at) for at in range(len(SHAPES))])
@pytest.mark.parametrize("seed", range(6))
def test_passes_may_be_broken_off_anywhere(shape: Shape, seed: int) -> None:
    rng = np.random.default_rng(seed)
    with no_thread_left(), turning(shape, Gates(delay=random_delays(seed))) as world:
        for _ in range(14):
            until = int(rng.integers(1, len(shape.order) + 1)) if rng.random() < 0.5 else None
            one_pass(world, int(rng.choice([0, 1, 8])), until)
        for rows in (0, 8, 1):
            one_pass(world, rows)
        assert world.wrong() == []


def test_the_link_carries_only_what_the_cpu_does_not_compute() -> None:
    """In passes of the same kind, beside what is fetched ahead; a change costs a fill of the ring."""
    shape = SHAPES[1]
    with turning(shape, Gates()) as world:
        copied = list[int]()
        for rows in (0, 0, 1, 1, 1, 0):
            one_pass(world, rows)
            world.computing.mark().wait()
            world.copies.mark().wait()
            copied.append(world.weights.stats().copied // UNIT)
    each = np.diff(copied).tolist()
    assert each[0] == 24
    assert each[2] == each[3] == 12
    assert each[1] <= 12 + 8
    assert each[4] <= 24 + 8


def test_what_comes_behind_a_change_is_not_measured() -> None:
    """It waits for a fill of the ring, so it says nothing about passes of its kind. Classes of rows are kept
    apart."""
    noted = list[tuple[int, bool]]()

    def note(self: CpuTurns, kind: int, seconds: float, *, shared: bool) -> None:
        noted.append((kind, shared))

    with turning(SHAPES[0], Gates()) as world, patch.object(CpuTurns, "note", note):
        for rows in (0, 1, 1, 2, 0, 2, 4):
            one_pass(world, rows)
        world.computing.mark().wait()
        world.weights.turn(0)
    assert noted == [(0, True), (1, True), (2, True)]


def test_steps_of_up_to_sixteen_rows_are_shared() -> None:
    """By classes of 1, 2, 4, 8 and 16 rows; in others all groups stream."""
    asked = list[int | None]()

    def choose(self: CpuTurns, kind: int | None) -> bool:
        asked.append(kind)
        return kind is not None

    with turning(SHAPES[0], Gates()) as world, patch.object(CpuTurns, "choose", choose):
        turns = world.weights._turning
        assert turns is not None
        rows = (0, 1, 2, 3, 4, 5, 8, 9, MOST_TOKENS, MOST_TOKENS + 1, 64)
        shared = [turns.choose(one) is not turns.streamed for one in rows]
    assert asked == [None, 0, 1, 2, 2, 3, 3, 4, 4, None, None]
    assert shared == [one is not None for one in asked]


def test_a_change_costs_a_fill_of_the_ring_each_way() -> None:
    placement, rate = SHAPES[1].placement(), 4e9
    of = placement.cpu
    assert of is not None
    turns = turns_of(placement, StreamRates(rate, 0.0, 1e12))
    assert turns.cost == turns.owed == (8 * UNIT + of.orders[0].ring.size) / rate
    assert of.orders[0].ring.size > 0
    assert len(turns.streamed.predicted) == len(turns.shared.predicted) == len(of.predictions)


def held(shape: Shape, rows: int, go_on: Any) -> list[int]:
    """The kernels that saw wrong bytes, where a pass is broken off, and its last kernel is held up while one
    of the other kind begins."""
    gates = Gates([("kernel", 2)])
    with patch.object(Feeder, "go_on", go_on), turning(shape, gates) as world:
        world.weights.turn(rows)
        of = world.placement.cpu
        assert of is not None
        first, second, third, *_ = (id for id in shape.order if not rows or id not in of.orders[0].groups)
        world.use(first)
        world.use(second)
        world.take(third)
        world.weights.turn(1 - rows)
        time.sleep(0.05)
        gates.open()
        one_pass(world, 1 - rows)
        one_pass(world, rows)
        return world.wrong()


def without_the_wait(self: Feeder) -> None:
    with patch.object(self._copies, "wait", lambda *_: None):
        go_on(self)


go_on = Feeder.go_on


@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize("shape", SHAPES[:2], ids=["0", "1"])
def test_the_wait_for_who_uses_what_the_other_order_brought_is_needed(shape: Shape, rows: int) -> None:
    """Without it, bytes are written over that are being read."""
    assert held(shape, rows, go_on) == []
    assert held(shape, rows, without_the_wait) != []


@pytest.mark.parametrize("place", ["go_on", "_lend"])
@pytest.mark.parametrize("behind", [False, True])
def test_a_change_may_be_interrupted(place: str, behind: bool) -> None:
    """Then the next pass, of whichever kind, finds what it needs."""
    for following in (0, 1):
        with turning(SHAPES[1], Gates(delay=random_delays(following))) as world:
            one_pass(world, 0)
            owner: Any = world.weights if place == "_lend" else Feeder
            real = getattr(owner, place)

            def interrupted(*given: object, real: Any = real) -> None:
                if behind:
                    real(*given)
                raise KeyboardInterrupt

            with patch.object(owner, place, interrupted), pytest.raises(KeyboardInterrupt):
                world.weights.turn(1)
            for rows in (following, 1, 0):
                one_pass(world, rows)
            assert world.wrong() == []


@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize("following", [0, 1])
def test_an_interrupt_may_strike_anywhere_in_a_change(rows: int, following: int) -> None:
    """Behind either kind of pass, with the ring full of what it would have taken next."""

    def strike(place: int) -> bool:
        with turning(SHAPES[place % 2], Gates(delay=random_delays(place, longest=1e-4))) as world:
            one_pass(world, 1 - rows)
            one_pass(world, 1 - rows, 3)
            struck = cut_short(lambda: world.weights.turn(rows), place, ("penstock", "threading"))
            assert within(LONG, lambda: [one_pass(world, one) for one in (following, 1 - following, rows)])
            assert world.wrong() == []
        return struck

    assert everywhere(strike) > 30


def test_closing_in_the_midst_of_either_pass_ends() -> None:
    for rows in (0, 1):
        with no_thread_left(), turning(SHAPES[0], Gates()) as world:
            one_pass(world, 1 - rows)
            one_pass(world, rows, 2)


# ---- boots


def test_the_cpu_s_rate_is_measured_with_the_widest_feed_forward() -> None:
    """By class of rows; of bytes that are read, so several rows take hardly fewer."""
    with Checkpoint.open(checkpoint("llama_biases")) as model:
        rank = Rank(model, part=0.2, dtype="bfloat16")
        rank.weights.close()
        layouts = group_layouts(model.spec, model.names, "bfloat16")
        outline = SimpleNamespace(layouts=layouts, dtype="bfloat16", spec=model.spec)
        plan: Any = SimpleNamespace(outline=outline, placement=rank.weights.placement)
    feed_forward, rows = ThreadPool.feed_forward, set[int]()

    def seen(self: ThreadPool, x: Tensor, *given: Any) -> None:
        rows.add(len(x))
        feed_forward(self, x, *given)

    with (
        no_thread_left(),
        patch.object(cpu_rates, "_SECONDS", 0.02),
        patch.object(ThreadPool, "feed_forward", seen),
        patch.object(cpu_rates, "Arena", side_effect=cpu_rates.Arena) as arena,
    ):
        found = cpu_rates.cpu_read(plan, CPU, RATES)
        homes = rank.weights.placement.homes
        rest = [one for one in layouts if one.id.kind is GroupKind.FFN and homes[one.id] is Tier.HOST]
        assert arena.call_args[0][0] == sum(map(padded, rest)), "no more than will rest there"
    assert sorted(rows) == [1 << kind for kind in range(CLASSES)]
    assert len(found) == CLASSES
    assert all(1e6 < rate < 1e12 for rate in found)

    with (
        patch.object(cpu_rates, "Arena", side_effect=MemoryError("none left")),
        patch.object(ThreadPool, "close", autospec=True, side_effect=ThreadPool.close) as closed,
        pytest.raises(MemoryError),
    ):
        cpu_rates.cpu_read(plan, CPU, RATES)
    assert closed.call_count == 1, "threads that nothing ends"


@pytest.mark.parametrize(
    ("use", "blocked", "why"),
    [
        ("on", "", "no compiler"),
        ("on", "some weights are on disk", ""),
        ("auto", "", "no compiler"),
        ("auto", "some weights are on disk", ""),
        ("auto", "", ""),
        ("on", "", ""),
        ("off", "", ""),
    ],
)
def test_where_the_cpu_cannot_on_is_refused_and_auto_is_off(use: str, blocked: str, why: str) -> None:
    said = list[str]()
    outline = SimpleNamespace(settings=Config(Path(), cpu_compute=use))
    plan: Any = SimpleNamespace(outline=outline, placement=None, experts=None)
    with (
        patch.object(placing, "cpu_blocker", lambda *_: blocked or None),
        patch.object(placing, "find_library", lambda *_: why),
    ):
        if use == "on" and (blocked or why):
            with pytest.raises(ConfigError, match=f"cpu_compute is on, but {blocked or why}"):
                placing.wants_cpu_rates(plan, said.append)
            return
        assert placing.wants_cpu_rates(plan, said.append) == (use != "off" and not (blocked or why))
    assert all(blocked in one and why in one for one in said)
    assert len(said) == (use == "auto" and bool(blocked or why))
