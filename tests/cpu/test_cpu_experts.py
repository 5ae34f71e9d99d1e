"""The CPU computes experts that a device lacks, where they rest: kernels are interpreted, the service is a
thread."""

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip(
        "kernels are interpreted where there is no GPU; tests/gpu runs them compiled", allow_module_level=True
    )

import triton.language as tl

import bounds
import tiny
from members import Rank, steps, together
from penstock import LLM, SamplingParams
from penstock.arch.layout import GroupId, GroupKind
from penstock.arch.spec import SWIGLU, Activation, MoeSpec
from penstock.base.config import Config
from penstock.base.errors import ConfigError, DeviceError
from penstock.engine import placing
from penstock.memory.streams import CallerStream
from penstock.ops import experts
from penstock.ops.handover import LISTED, HandoverBox, StepRows
from penstock.ops.matrix import GroupViews, Matrix
from penstock.ops.native.few_bits import library
from penstock.ops.native.service import ExpertService
from penstock.ops.row_classes import MOST_TOKENS, class_of
from penstock.ops.slots import ExpertParts, Places
from penstock.ops.triton import experts as triton_experts
from penstock.ops.triton import few_bits_experts
from penstock.ops.triton import handover as triton_handover
from penstock.ops.triton import routing as triton_routing
from penstock.ops.triton import slots as triton_slots
from penstock.ops.triton.slots import expert_step
from penstock.step.plan import Plan
from penstock.weights.checkpoint.reader import Checkpoint
from penstock.weights.streaming import cpu_experts, slotted
from penstock.weights.streaming.cpu_experts import REVIEW, CpuExperts
from penstock.weights.streaming.residency import CpuWork, ExpertRoom
from penstock.weights.streaming.shares import Times
from penstock.weights.streaming.slots import SlotRule, SlotTable
from stacks import in_mxfp4
from tiled import tiled_outputs

if library() is None:
    pytest.skip("no C compiler", allow_module_level=True)

CPU, HIDDEN, INNER, EXPERTS, TOP_K, LAYERS = torch.device("cpu"), 64, 32, 8, 2, 2
SIZE = 2 * 3 * HIDDEN * INNER
LATE = 0.02
"""Seconds by which work is late."""


@dataclass
class World:
    """Experts of two layers in host memory, and what has the CPU compute them."""

    service: type = ExpertService
    dtype: torch.dtype = torch.bfloat16
    cpu: CpuExperts = field(init=False)

    def __post_init__(self) -> None:
        self.rng = torch.Generator().manual_seed(0)
        self.host = (torch.randn(LAYERS * EXPERTS, SIZE // 2, generator=self.rng) / 8).to(self.dtype)
        work = CpuWork((SWIGLU,) * LAYERS, TOP_K, HIDDEN, str(self.dtype).removeprefix("torch."), always=True)
        firsts = [self.views(layer, 0) for layer in range(LAYERS)]
        with patch.object(cpu_experts, "ExpertService", self.service):
            self.cpu = CpuExperts(work, firsts, EXPERTS, SIZE, CPU, CallerStream(), 2)

    def views(self, layer: int, expert: int) -> GroupViews:
        row = self.host[layer * EXPERTS + expert]
        gate_up, down = row[: 2 * INNER * HIDDEN].view(2 * INNER, HIDDEN), row[2 * INNER * HIDDEN :]
        matrices = {"gate_up": Matrix.of(gate_up), "down": Matrix.of(down.view(HIDDEN, INNER))}
        return GroupViews(matrices, {}, ())

    def step(self, tokens: int, mine: int, padded: int = 0) -> "Asked":
        """Random rows, of which the CPU takes the last experts that were chosen, backwards. padded: tokens
        that take what the first one takes."""
        scores = torch.randn(tokens, EXPERTS, generator=self.rng)
        chosen = scores.topk(TOP_K).indices
        chosen[tokens - padded :] = chosen[:1]
        flat = chosen.flatten()
        order, pairs = flat.argsort(stable=True).int(), torch.bincount(flat, minlength=EXPERTS).int()
        x = torch.randn(tokens, HIDDEN, generator=self.rng).to(self.dtype)
        rows = StepRows(x, order, torch.full((len(flat), HIDDEN), torch.nan, dtype=self.dtype))
        asked = [one for one in range(EXPERTS) if pairs[one]]
        first = max(len(asked) - mine, 0)
        there, taken = asked[:first], asked[first:][::-1]
        coming = torch.tensor([[*there, *taken, -1], [0] * (len(asked) + 1)])
        starts = torch.tensor([0, len(there), -1, len(asked)])
        tables = torch.zeros(1, EXPERTS, 2, dtype=torch.int64)
        return Asked(rows, pairs, ExpertParts(coming, starts, tables, torch.zeros(8).int()), taken)

    def want(self, layer: int, asked: "Asked") -> Tensor:
        """Outputs by pair, NaN for those of experts that come."""
        return by_reference(asked, [self.views(layer, one) for one in asked.taken])

    def close(self) -> None:
        self.cpu.close()
        self.cpu.free()


@dataclass
class Asked:
    rows: StepRows
    pairs: Tensor
    parts: ExpertParts
    taken: Sequence[int]


def by_reference(asked: Asked, views: Sequence[GroupViews], activation: Activation = SWIGLU) -> Tensor:
    out, order = torch.full_like(asked.rows.y, torch.nan), asked.rows.order.long()
    starts = asked.pairs.cumsum(0) - asked.pairs
    if not asked.taken:
        return out
    counts = [int(asked.pairs[one]) for one in asked.taken]
    mine = torch.cat([order[starts[one] :][: asked.pairs[one]] for one in asked.taken])
    top_k = len(order) // len(asked.rows.x)
    out[mine] = tiled_outputs(asked.rows.x[mine // top_k], views, counts, activation)
    return out


@contextmanager
def world(service: type = ExpertService, dtype: torch.dtype = torch.bfloat16) -> Iterator[World]:
    made = World(service, dtype)
    try:
        yield made
    finally:
        made.close()


def same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.nan_to_num(9.0), other.nan_to_num(9.0))


class Late:
    """Plays the service with a thread of Python, late before it reads and before it writes."""

    def __init__(
        self, box: HandoverBox, layers: Sequence[object], experts: int, size: int, threads: int
    ) -> None:
        self.box, self.layers, self.failed, self.over = box, layers, "", False
        self.took, self.delay = torch.zeros(5, box.most + 1, 2, dtype=torch.int64).numpy(), LATE
        self.experts: World | None = None
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def serve(self) -> None:
        seen = 0
        while not self.over:
            if (asked := int(self.box.asked)) == seen:
                time.sleep(0.001)
                continue
            time.sleep(self.delay)
            layer, count, rows, _ = self.box.list[:LISTED].tolist()
            ids, counts, tokens = torch.split(
                self.box.list[LISTED:], [self.box.most, self.box.most, self.box.rows]
            )
            assert self.experts is not None
            views = [self.experts.views(layer, one) for one in ids[:count].tolist()]
            time.sleep(self.delay)
            made = tiled_outputs(self.box.x[tokens[:rows].long()], views, counts[:count].tolist(), SWIGLU)
            time.sleep(self.delay)
            self.box.y[:rows] = made
            seen = asked
            self.box.done.fill_(seen)

    def close(self) -> None:
        self.over = True
        self.thread.join()


class Unwaiting:
    """Launches `take` so that it finds the CPU's number to be right at once."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return lambda asked, begun, done, *rest, **more: self.kernel[grid](asked, begun, asked, *rest, **more)


# ---- the hand-over


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_outputs_are_those_of_experts_at_rest(dtype: torch.dtype) -> None:
    """To the last bit: in steps of any size, of both layers, whatever the CPU's share, with padding."""
    with world(dtype=dtype) as made:
        for turn in range(24):
            tokens = (1, 2, 3, 5, 11, MOST_TOKENS)[turn % 6]
            asked = made.step(tokens, turn % 5, padded=tokens // 2 * (turn % 2))
            made.cpu.give(asked.rows, asked.pairs, turn % LAYERS, asked.parts)
            made.cpu.take(asked.rows, asked.parts)
            assert same(asked.rows.y, made.want(turn % LAYERS, asked)), turn
        made.cpu.check()
        took = made.cpu.service.took
        computed = int((took[:, :, 0].sum(0) * torch.arange(took.shape[1]).numpy()).sum())
        assert int(made.cpu.handover.computed) == computed > 0
        assert (took[:, 1:, 1] >= took[:, 1:, 0]).all(), "nanoseconds of each"
        assert int(made.cpu.handover.asked) == int(made.cpu.handover.box.done) < 24, (
            "nothing is asked for nothing"
        )


def test_numbers_wrap_around() -> None:
    with world() as made:
        most = (1 << 31) - 1
        made.cpu.close()
        made.cpu.handover.asked.fill_(most), made.cpu.handover.box.done.fill_(most)
        made.cpu.handover.box.asked.fill_(most), made.cpu.handover.box.over.fill_(0)
        firsts = [(made.views(layer, 0), SWIGLU) for layer in range(LAYERS)]
        made.cpu.service = ExpertService(made.cpu.handover.box, firsts, EXPERTS, SIZE, 1)
        for _ in range(3):
            asked = made.step(3, 2)
            made.cpu.give(asked.rows, asked.pairs, 0, asked.parts)
            made.cpu.take(asked.rows, asked.parts)
            assert same(asked.rows.y, made.want(0, asked))
        assert int(made.cpu.handover.box.done) == -(1 << 31) + 2


def test_the_wait_is_needed() -> None:
    for removed in (False, True):
        with world(Late) as made, ExitStack() as patched:
            made.cpu.service.experts = made  # type: ignore[attr-defined]
            if removed:
                patched.enter_context(
                    patch.object(triton_handover, "_take", Unwaiting(triton_handover._take))
                )
            right = list[bool]()
            for turn in range(3):
                asked = made.step(2, 2)
                made.cpu.give(asked.rows, asked.pairs, turn % LAYERS, asked.parts)
                made.cpu.take(asked.rows, asked.parts)
                right.append(same(asked.rows.y, made.want(turn % LAYERS, asked)))
            assert all(right) == (not removed)


def test_what_a_layer_took_is_counted_once_however_many_programs_take_it() -> None:
    """kinds: where nothing was asked for, and where something was: until all was there, and until asked."""
    ticks = count(1000)
    with (
        world() as made,
        patch.object(triton_handover, "TIMED", new=True),
        patch.object(triton_handover, "globaltimer", lambda: tl.full([], next(ticks), tl.int64)),
    ):
        for tokens, mine in ((5, 3), (5, 0), (MOST_TOKENS, 4)):
            asked = made.step(tokens, mine)
            times, came = made.cpu.handover.times[class_of(tokens)], int(asked.parts.starts[1])
            before = times[:3, :, 0].clone()
            made.cpu.give(asked.rows, asked.pairs, 0, asked.parts)
            made.cpu.take(asked.rows, asked.parts)
            assert same(asked.rows.y, made.want(0, asked))
            want = torch.zeros_like(before)
            if mine:
                want[1, came + mine] = want[2, came] = 1
            else:
                want[0, came] = 1
            assert torch.equal(times[:3, :, 0] - before, want)
            assert (times[:3, :, 1] >= times[:3, :, 0]).all()


@pytest.mark.parametrize("late", [True, False])
def test_what_a_layer_took_beyond_the_work_is_counted_where_the_cpu_was_late(late: bool) -> None:
    """Once, however many programs waited: until the answer, less what the CPU says that it worked."""
    ticks, spent = count(1000), 7
    with (
        world(Late) as made,
        patch.object(triton_handover, "TIMED", new=True),
        patch.object(triton_handover, "globaltimer", lambda: tl.full([], next(ticks), tl.int64)),
    ):
        box = made.cpu.handover.box
        made.cpu.service.experts = made  # type: ignore[attr-defined]
        box.spent.fill_(spent)
        asked = made.step(5, 3)
        times, came = made.cpu.handover.times[class_of(5)], int(asked.parts.starts[1])
        made.cpu.give(asked.rows, asked.pairs, 0, asked.parts)
        while not late and int(box.done) != int(made.cpu.handover.asked):
            time.sleep(0.001)
        made.cpu.take(asked.rows, asked.parts)
        want = torch.zeros_like(times[Times.LATE])
        if late:
            want[3] = torch.tensor([1, int(times[Times.TOGETHER, came + 3, 1]) - spent])
        assert torch.equal(times[Times.LATE], want)


def test_who_waits_for_a_step_that_was_broken_off_writes_nothing() -> None:
    with world() as made:
        asked, handover = made.step(5, 3), made.cpu.handover
        made.cpu.give(asked.rows, asked.pairs, 0, asked.parts)
        made.cpu.settle(asked.parts)
        assert int(handover.box.done) == int(handover.asked) == 1
        pairs = handover.mine[1:][: handover.mine[0]].long()
        assert torch.equal(handover.box.y[: len(pairs)], made.want(0, asked)[pairs])
        assert asked.rows.y.isnan().all()


@pytest.mark.parametrize("slots", [0, 1])
def test_the_least_valuable_are_the_cpu_s_but_not_what_has_come_ahead(slots: int) -> None:
    """They take no slot and have no address; who comes is in the tables as without them."""
    table = SlotTable(1, EXPERTS, slots, CPU, SlotRule(1e9, 1.0))
    places = Places(0, slots, EXPERTS, 1 << 20, 4096, torch.tensor([0]))
    shares = torch.tensor([0, 0, 1, 2, 2, 2, 2, 2, 2]).int()

    def step(*asked: int) -> tuple[list[int], list[int], set[int]]:
        """Who comes, whom the CPU takes, and who is in a table."""
        table.begin()
        pairs = torch.bincount(torch.tensor(asked), minlength=EXPERTS).int()
        parts = expert_step(
            table.arrays(0), pairs, len(asked), 1.0, places, 2 if len(asked) > 1 else 1, shares
        )
        assert parts.shared
        came, every = parts.starts[len(parts.tables)], int(parts.starts[-1])
        there = {one for rows in parts.tables for one in rows[:, 0].nonzero()[:, 0].tolist()}
        return parts.coming[0, :came].tolist(), parts.coming[0, came:every].tolist(), there

    for _ in range(2):
        came, taken, there = step(5)
        assert taken == []
        assert there == {5}
    assert step(4)[0] == [4]
    in_slot = table.expert_of[0].tolist()
    came, taken, there = step(4, 3) if slots else step(4, 3, 5)
    assert taken == ([3] if slots else [4, 3])
    assert there == ({4} if slots else {5})
    assert table.expert_of[0].tolist() in (in_slot, [4])
    arrays = table.arrays(0)
    arrays.told.copy_(torch.tensor([7, int(arrays.turn)]))
    came, taken, there = step(6, 3, 7)
    assert came == [7]
    assert taken == [3, 6]
    assert there == {7}


@pytest.mark.parametrize("slots", [0, 1])
def test_slots_change_also_where_the_cpu_could_take_all(slots: int) -> None:
    """Else what was used often long ago would keep them for ever."""
    table = SlotTable(1, EXPERTS, slots, CPU, SlotRule(1e9, 1.0))
    places, shares = (
        Places(0, slots, EXPERTS, 1 << 20, 4096, torch.tensor([0])),
        torch.arange(EXPERTS + 1).int(),
    )
    found = list[tuple[list[int], list[int]]]()
    for asked in (5, 5, 4, 4, 4):
        table.begin()
        pairs = torch.bincount(torch.tensor([asked]), minlength=EXPERTS).int()
        parts = expert_step(table.arrays(0), pairs, 1, 1.0, places, 1, shares)
        came, every = int(parts.starts[1]), int(parts.starts[-1])
        found.append((parts.coming[0, :came].tolist(), parts.coming[0, came:every].tolist()))
    if slots:
        assert found == [([5], []), ([], []), ([], [4]), ([4], []), ([], [])]
    else:
        assert found == [([], [one]) for one in (5, 5, 4, 4, 4)]


def test_a_list_that_is_wrong_is_not_computed() -> None:
    """And says so, before anybody takes what is in the box for outputs."""
    for at, value in ((0, LAYERS), (1, 99), (2, 1000), (3, 17), (LISTED, EXPERTS), (LISTED + EXPERTS, 17)):
        with world() as made:
            asked, box = made.step(1, 1), made.cpu.handover.box
            made.cpu.give(asked.rows, asked.pairs, 0, asked.parts)
            made.cpu.take(asked.rows, asked.parts)
            made.cpu.check()
            box.list[at] = value
            box.asked.add_(1)
            made.cpu.handover.asked.add_(1)
            made.cpu.settle(asked.parts)
            with pytest.raises(DeviceError, match="what was asked for is not there"):
                made.cpu.check()


def test_a_service_that_is_gone_is_an_error_and_no_hang() -> None:
    with world() as made:
        asked = made.step(2, 2)
        made.cpu.service.close()
        made.cpu.check()
        made.cpu.give(asked.rows, asked.pairs, 0, asked.parts)
        begun = time.perf_counter()
        made.cpu.take(asked.rows, asked.parts)
        first = time.perf_counter() - begun
        with pytest.raises(DeviceError, match="did not answer in time"):
            made.cpu.check()
        begun = time.perf_counter()
        for _ in range(5):
            made.cpu.give(asked.rows, asked.pairs, 0, asked.parts)
            made.cpu.take(asked.rows, asked.parts)
        assert time.perf_counter() - begun < max(2 * first, 1.0), "nothing waits any more"


def test_what_waits_is_let_go_when_the_engine_closes() -> None:
    with patch.object(cpu_experts, "LIMIT_LOOKS", 1 << 40), world() as made:
        made.cpu.service.close()
        asked = made.step(2, 2)
        made.cpu.give(asked.rows, asked.pairs, 0, asked.parts)
        waits = threading.Thread(target=made.cpu.take, args=(asked.rows, asked.parts), daemon=True)
        waits.start()
        time.sleep(5 * LATE)
        assert waits.is_alive()
        made.cpu.close()
        waits.join(10)
        assert not waits.is_alive()
        made.cpu.close()


def test_a_service_that_is_dropped_looks_at_its_memory_no_more() -> None:
    """As when what is made after it finds no memory: nobody closes it then."""
    if not (child := os.fork()):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10)
        with patch.object(CpuExperts, "_send", side_effect=MemoryError), suppress(MemoryError):
            World()
        gc.collect()
        time.sleep(0.2)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_a_forked_process_closes_nothing_of_its_parents() -> None:
    """It has none of the threads: to wait for them, or for a lock that they hold, would have no end."""
    with world() as made:
        time.sleep(0.2)  # The pool's workers sleep.
        if not (child := os.fork()):
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(10)
            made.cpu.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        asked = made.step(2, 2)
        made.cpu.give(asked.rows, asked.pairs, 0, asked.parts)
        made.cpu.take(asked.rows, asked.parts)
        assert same(asked.rows.y, made.want(0, asked))


# ---- whole models


@contextmanager
def interpreted() -> Iterator[None]:
    """Kernels read and write all memory that there is."""
    fetch, ahead, products = triton_slots.fetch, triton_slots.fetch_ahead, triton_experts.products
    every = [(1, 1 << 62)]

    def lent(of: object) -> object:
        def call(*given: object, **named: object) -> None:
            with bounds.lent(every):
                of(*given, **named)  # type: ignore[operator]

        return call

    kernels = {"routing": triton_routing, "experts": triton_experts, "few_bits_experts": few_bits_experts}
    with (
        patch.object(experts, "_kernels", lambda device: triton_experts),
        patch.object(experts, "triton_kernels", kernels.get),
        patch.object(triton_experts, "products", lent(products)),
        patch.object(few_bits_experts, "products", lent(few_bits_experts.products)),
        patch.object(triton_slots, "fetch", lent(fetch)),
        patch.object(triton_slots, "fetch_ahead", lent(ahead)),
        patch.object(slotted, "_MANY", 1 << 20),
    ):
        yield


def by_python(rank: Rank) -> ExitStack:
    """In place of the service and the kernels that ask it: `tiled_outputs`, at once."""
    lent, cpu = rank.weights.experts, rank.weights.cpu
    assert isinstance(lent, slotted.SlotExperts)
    assert cpu is not None
    given = list[tuple[Tensor, int]]()

    def give(rows: StepRows, pairs: Tensor, layer: int, parts: ExpertParts) -> None:
        given.append((pairs, layer))

    def take(rows: StepRows, parts: ExpertParts) -> None:
        pairs, number = given.pop()
        first, every = int(parts.starts[len(parts.tables)]), int(parts.starts[-1])
        taken = parts.coming[0, first:every].tolist()
        layer = list(lent.mixtures)[number]
        ids = [GroupId(GroupKind.EXPERT, layer, one) for one in taken]
        views = [lent._in_slot(id, lent._host[number * lent._experts + id.expert]) for id in ids]
        moe = rank.model.spec.stack[layer].feed_forward
        assert isinstance(moe, MoeSpec)
        made = by_reference(Asked(rows, pairs, parts, taken), views, moe.activation)
        mine = ~made.isnan().any(1)
        rows.y[mine] = made[mine]

    patched = ExitStack()
    patched.enter_context(patch.object(cpu, "give", give))
    patched.enter_context(patch.object(cpu, "take", take))
    return patched


def few(requests: int) -> list[Plan]:
    """Steps of so many tokens at most, behind prompts that are longer than the CPU takes."""
    first, second, third = (replace(plan, shares=plan.shares[:requests]) for plan in steps())
    return [first, second, third, third]


@cache
def checkpoint(name: str) -> Path:
    """With experts as wide as kernels for a CPU read them; gpt_oss with experts in MXFP4."""
    case, path = tiny.CASES[name], tiny.folder() / f"{name}_for_cpu"
    if name == "gpt_oss":
        return in_mxfp4(path)[0]
    return tiny.write(case, path, moe_intermediate_size=64)


@pytest.mark.parametrize(
    ("name", "part", "share"),
    [
        ("glm4_moe", 0.8, "some"),
        ("gpt_oss", 0.2, "all"),
        *([("qwen3_moe", 0.8, "none"), ("glm4_moe", 0.2, "all"), ("gpt_oss", 0.2, "some")] * tiny.THOROUGH),
    ],
)
def test_a_model_computes_what_it_computes_with_experts_at_rest(name: str, part: float, share: str) -> None:
    found = list[list[Tensor]]()
    for python in (True, False):
        with interpreted(), ExitStack() as patched:
            rank = Rank(Checkpoint.open(checkpoint(name)), part=part, copies=True, cpu=True, dtype="bfloat16")
            cpu = rank.weights.cpu
            assert cpu is not None
            every = range(len(cpu.shares(1)))
            cpu.impose({"none": [0] * len(every), "some": [n // 2 for n in every], "all": list(every)}[share])
            if python:
                patched.enter_context(by_python(rank))
            found.append(together([rank], few(3 if name == "gpt_oss" else 2))[0])
            counts = rank.weights.experts.counts(exact=True)  # type: ignore[union-attr]
            cpu.check()
            rank.weights.close()
        if not python:
            missing = counts.asked - counts.hit
            assert (counts.computed > 0) == (counts.worked > 0) == (share != "none")
            assert counts.fetched == (missing - counts.computed) * rank.weights.room.size  # type: ignore[union-attr]
    assert all(map(torch.equal, *found))


def test_what_was_asked_in_a_step_that_was_broken_off_is_waited_for() -> None:
    """Then the box is the device's again, and what it asks next is answered."""
    with interpreted(), patch.object(cpu_experts, "ExpertService", Late):
        rank = Rank(
            Checkpoint.open(checkpoint("qwen3_moe")), part=0.2, copies=True, cpu=True, dtype="bfloat16"
        )
        rank.load()
        lent, cpu = rank.weights.experts, rank.weights.cpu
        assert isinstance(lent, slotted.SlotExperts)
        assert cpu is not None
        ids = list(lent._of_layer.values())
        service, count, layer = cpu.service, len(ids[0]), ids[0][0].layer
        host = lent._host.view(len(ids), count, -1)
        service.experts = SimpleNamespace(  # type: ignore[attr-defined]
            views=lambda number, one: lent._in_slot(ids[number][one], host[number, one])
        )
        cpu.impose(list(range(count + 1)))
        rng = torch.Generator().manual_seed(0)

        def asked(first: int) -> tuple[Asked, Iterator[Tensor]]:
            x = torch.randn(1, rank.model.spec.hidden_size, generator=rng).bfloat16()
            pairs = torch.tensor([int(first <= one < first + 2) for one in range(count)]).int()
            rows = StepRows(x, torch.arange(2).int(), torch.full((2, x.shape[1]), torch.nan).bfloat16())
            parts = lent.parts(layer, pairs, 2, rows)
            assert parts is not None
            assert lent._decided is not None
            return Asked(rows, pairs, lent._decided, [first, first + 1]), parts

        asked(0)
        assert int(cpu.handover.box.done) != int(cpu.handover.asked), "the CPU is at it"
        lent.device_decides()
        assert int(cpu.handover.box.done) == int(cpu.handover.asked)
        again, parts = asked(3)
        assert [table.any() for table in parts] == [False] * len(again.parts.tables), "none comes"
        assert same(
            again.rows.y, by_reference(again, [lent._in_slot(ids[0][one], host[0, one]) for one in (3, 4)])
        )
        cpu.check()
        rank.weights.close()


def test_shares_are_corrected_by_what_was_measured() -> None:
    """By what the device and the CPU have written down since the last time, in steps of as many tokens."""
    with world() as made:
        cpu, times = made.cpu, made.cpu.handover.times
        before = made.cpu.shares(1).tolist()
        for count in (4, 6):
            times[0, Times.ALONE, count] = torch.tensor([10, 10 * (10_000 + count * 1_000_000)])
            times[0, Times.REST, count - 2] = torch.tensor([10, 10 * (10_000 + (count - 2) * 1_000_000)])
            cpu.service.took[0, count // 2] = 10, 10 * count // 2 * 1_000_000
        measured, took = times.clone(), cpu.service.took.copy()
        times[0, Times.ALONE, 6] = torch.tensor([10, 10**12])
        for _ in range(REVIEW):
            cpu.begin_pass()
        assert not times.any(), "what was before steps were steady"
        times.copy_(measured)
        cpu.service.took[:] += took
        for _ in range(REVIEW * 2):
            cpu.begin_pass()
        assert cpu.shares(1)[6] == 3, "as fast as the link"
        assert cpu.shares(1).tolist() == cpu.known_shares(1) != before
        assert cpu.shares(2).tolist() == before, "of other steps nothing is known"
        for _ in range(REVIEW * 2):
            cpu.begin_pass()
        assert cpu.shares(1)[6] == 3, "nothing new was seen"


def test_without_a_compiler_on_is_refused_and_auto_is_off() -> None:
    room = ExpertRoom(64, 8, 0, 8, copies=True, cpu=CpuWork((SWIGLU,), 2, 64, "bfloat16", always=False))
    for use, why in (("on", "no compiler"), ("auto", "no compiler"), ("auto", ""), ("off", "no compiler")):
        said, config = list[str](), Config(Path(), cpu_compute=use)
        plan = SimpleNamespace(outline=SimpleNamespace(settings=config), placement=None, experts=room)
        with (
            patch.object(placing, "cpu_blocker", lambda *_: None),
            patch.object(placing, "find_library", lambda *_, why=why: why),
        ):
            if use == "on":
                with pytest.raises(ConfigError, match="cpu_compute is on, but no compiler"):
                    placing._with_compiled(plan, said.append)  # type: ignore[arg-type]
                continue
            found = placing._with_compiled(plan, said.append)  # type: ignore[arg-type]
        assert found is not None
        assert (found.cpu is None) == (use == "auto" and bool(why))
        assert ["rounded otherwise" in one for one in said] == ([not why] if use == "auto" else [])
        assert all(why in one for one in said)


def test_tokens_that_mean_nothing_are_not_given_out(tmp_path: Path) -> None:
    with LLM(tiny.checkpoint("llama"), cache=tmp_path, max_length=64, kv_blocks=8) as llm, world() as made:
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        runner = llm.booted.engine._ranks
        runner._cpu = made.cpu  # type: ignore[union-attr]
        assert len(llm.generate([[5, 6, 7]], params)[0].tokens) == 4
        made.cpu.handover.box.over.fill_(1)
        with pytest.raises(DeviceError, match="the CPU has not computed its share of experts"):
            llm.generate([[5, 6, 7]], params)
