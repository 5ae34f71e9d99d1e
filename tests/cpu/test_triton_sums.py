"""Sums over ranks in one launch, interpreted, between two and three processes that see the same files instead
of each other's memory."""

import os
import random
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

if (
    os.environ.get("TRITON_INTERPRET") != "1"
):  # asked once, when triton is imported; conftest.py sets it where there is no GPU
    pytest.skip(
        "kernels are interpreted where there is no GPU; tests/gpu runs them compiled", allow_module_level=True
    )

import bounds
import tiny
from crews import all_ranks
from penstock.base.errors import DeviceError
from penstock.bench.shapes import SHAPES
from penstock.ops.norm import rms_norm
from penstock.ops.triton import sums as triton_sums
from penstock.ops.triton.sums import Shared, all_reduce, sum_rms_norm, window_bytes
from penstock.parallel.group import Group
from penstock.weights.checkpoint.shape import Shape
from penstock.worker import collectives as summing
from penstock.worker.collectives import RankCollectives
from streams import LONG

Case = Callable[[Group], None]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
EPS = 1e-5
MOST, DIM = 5, 24
"""No power of two, in words either."""
OFTEN = triton_sums.tl.constexpr(4)
"""Looks, which take long here, until one at the host's word."""


@contextmanager
def sharing(group: Group, dtype: torch.dtype, first: int = 0) -> Iterator[Shared]:
    """Windows for MOST rows of DIM numbers; what each row has counted so far is `first`."""
    bounds.install()
    size = window_bytes(group.ranks, MOST, DIM, dtype)
    with ExitStack() as ends:
        folder = Path(
            group.broadcast(
                os.fsencode(ends.enter_context(tempfile.TemporaryDirectory())) if group.rank == 0 else None
            ).decode()
        )
        windows = [
            torch.from_file(str(folder / str(rank)), True, size, dtype=torch.uint8)
            for rank in range(group.ranks)
        ]
        ends.enter_context(bounds.lent(map(bounds.span, [group.over, *windows])))
        where = torch.tensor([one.data_ptr() for one in (group.over, *windows)])
        group.barrier()
        yield Shared(group.rank, group.ranks, where, torch.full((MOST,), first, dtype=torch.int32), 0)
        group.barrier()


def parts(group: Group, turn: int, rows: int, dtype: torch.dtype) -> list[Tensor]:
    """One for each rank, the same on every rank."""
    generator = torch.Generator().manual_seed(turn)
    # Numbers that bfloat16 adds exactly: the interpreter rounds to it in another way than torch.
    return [torch.randint(-8, 8, (rows, DIM), generator=generator).to(dtype) for _ in range(group.ranks)]


def some_rows(rng: random.Random) -> int:
    return rng.choice((0, 1, 2, MOST))


def come_late(rng: random.Random) -> None:
    if rng.random() < 0.4:
        time.sleep(rng.random() * 4e-3)


def sums(group: Group) -> None:
    rows, late = random.Random(3), random.Random(group.rank)
    for dtype in DTYPES:
        with sharing(group, dtype, (1 << 31) - 9) as shared:  # Numbers wrap around in the midst.
            for turn in range(20):
                every = parts(group, turn, some_rows(rows), dtype)
                wide = torch.full((len(every[0]), DIM + 8), 3.0, dtype=dtype)
                wide[:, :DIM] = every[group.rank]
                come_late(late)
                all_reduce(wide[:, :DIM], shared)
                assert torch.equal(wide[:, :DIM], torch.stack(every).sum(0))
                assert (wide[:, DIM:] == 3.0).all(), "written beside a row"


def norms(group: Group) -> None:
    rows, late = random.Random(4), random.Random(group.rank + 10)
    for dtype, near in zip(DTYPES, (1e-6, 2e-3, 2e-2), strict=True):
        with sharing(group, dtype) as shared:
            for turn in range(8):
                every = parts(group, turn, some_rows(rows), dtype)
                residual, weight = (
                    parts(group, 100 + turn, len(every[0]), dtype)[0],
                    parts(group, 200 + turn, 1, dtype)[0][0],
                )
                total = residual + torch.stack(every).sum(0)
                come_late(late)
                x = every[group.rank].clone()
                normed = sum_rms_norm(x, residual, weight, EPS, shared)
                assert torch.equal(residual, total)
                assert torch.equal(x, every[group.rank])
                torch.testing.assert_close(normed, rms_norm(total, weight, EPS), rtol=near, atol=near)


def the_same_bits(group: Group) -> None:
    """Numbers that do not add exactly."""
    for dtype in DTYPES:
        with sharing(group, dtype) as shared:
            x = torch.randn(MOST, DIM, generator=torch.Generator().manual_seed(group.rank)).to(dtype)
            all_reduce(x, shared)
            assert len(set(group.exchange(x.view(torch.uint8).numpy().tobytes()))) == 1


def nobody_comes(group: Group) -> None:
    """Rank 0 waits for others that do not come, until the host says that it is over; and then for nobody any
    more."""
    with changed(_LOOKS=OFTEN), sharing(group, torch.float32) as shared:
        if group.rank == 0:
            timer = threading.Timer(0.1, lambda: group.over.fill_(1))
            timer.start()
            for _ in range(3):
                all_reduce(torch.zeros(MOST, DIM), shared)
            timer.join()
            group.over.fill_(0)


@contextmanager
def changed(**other: object) -> Iterator[None]:
    """Meanwhile the kernel calls something else by these names."""
    plain = triton_sums._sum
    again = types.FunctionType(plain.fn.__code__, {**plain.fn.__globals__, **other}, plain.fn.__name__)
    again.__annotations__ = plain.fn.__annotations__
    triton_sums._sum = triton_sums.triton.jit(again)
    try:
        yield
    finally:
        triton_sums._sum = plain


def look_once(*args: object) -> object:
    return triton_sums._look.fn(*args)[0], 0


def look_late(*args: object) -> object:
    time.sleep(0.05)
    return triton_sums._look.fn(*args)


def without_waiting(group: Group) -> None:
    with changed(_look=look_once), sharing(group, torch.float32) as shared:
        x = torch.ones(MOST, DIM)
        if group.rank:
            group.barrier()  # Until rank 0 has what it takes for the sum.
        all_reduce(x, shared)
        if not group.rank:
            group.barrier()
        assert group.rank or not torch.equal(x, torch.full_like(x, group.ranks)), (
            "rank 0 does not wait, and has the sum"
        )


def two_in_a_row(group: Group, patience: float) -> bool:
    """Whether they are right, on the last rank, which looks late; patience: seconds until nobody waits any
    more."""
    last = group.rank == group.ranks - 1
    with (
        changed(_LOOKS=OFTEN, **{"_look": look_late} if last else {}),
        sharing(group, torch.float32) as shared,
    ):
        found = [torch.full((1, DIM), float(one)) for one in (1, 2)]
        timer = threading.Timer(patience, lambda: group.over.fill_(1))
        timer.start()
        for x in found:
            all_reduce(x, shared)
        timer.cancel()
        group.over.fill_(0)
        return not last or all(
            torch.equal(x, torch.full((1, DIM), float(one * group.ranks)))
            for x, one in zip(found, (1, 2), strict=True)
        )


def two_slots(group: Group) -> None:
    assert two_in_a_row(group, LONG)


def one_slot(group: Group) -> None:
    """What the last rank has not read yet is written over, and it waits for what does not come again."""
    plain, triton_sums._slot = triton_sums._slot, lambda turn: turn & 0
    try:
        assert two_in_a_row(group, 1.0) == (group.rank < group.ranks - 1)
    finally:
        triton_sums._slot = plain


class FileWindow:
    """In the place of a GPU's memory: a file, which others find by its path. blind: whether this rank is
    refused others' windows. astray: whether what it writes does not come out at the others'. last: the one
    that was opened last. away, closed: whether others' are seen no more, and it is gone."""

    folder, blind, astray = Path(), False, False
    last: "FileWindow"

    def __init__(self, device: torch.device, size: int) -> None:
        FileWindow.last = self
        self.away = self.closed = False
        self._size, self._files = size, list[Tensor]()
        self.handle = os.fsencode(Path(tempfile.mkdtemp(dir=self.folder)) / "window")
        self.address = self._map(self.handle)

    def see(self, handle: bytes) -> int:
        if self.blind:
            raise DeviceError("peer access is not supported between these two devices")
        return self._map(self.handle + b" of another" if self.astray else handle)

    def _map(self, handle: bytes) -> int:
        self._files.append(torch.from_file(os.fsdecode(handle), True, self._size, dtype=torch.uint8))
        bounds._within.append(bounds.span(self._files[-1]))
        return self._files[-1].data_ptr()

    def look_away(self) -> None:
        self.away = True
        del self._files[1:]

    def close(self) -> None:
        self.closed = True
        self._files.clear()


SPEC = Shape.of(SHAPES["100M"]).spec


@contextmanager
def collected(group: Group, **ways: bool) -> Iterator[RankCollectives]:
    bounds.install()
    with ExitStack() as ends:
        ends.enter_context(bounds.lent([bounds.span(group.over)]))
        for name, value in {
            "folder": Path(ends.enter_context(tempfile.TemporaryDirectory())),
            **ways,
        }.items():
            ends.enter_context(patch.object(FileWindow, name, value))
        ends.enter_context(patch.object(summing, "_kernels", lambda _: triton_sums))
        ends.enter_context(patch.object(summing, "Window", FileWindow))
        collectives = RankCollectives(group, SPEC, torch.float32)
        collectives.open()
        yield collectives
        group.barrier()


def sums_right(group: Group, collectives: RankCollectives) -> bool:
    for rows in (0, 1, 3, 9):
        x = torch.full((rows, SPEC.hidden_size), group.rank + 1.0)
        collectives.all_reduce(x)
        residual, weight = torch.ones_like(x), torch.ones(SPEC.hidden_size)
        collectives.add_rms_norm(torch.full_like(x, group.rank + 1.0), residual, weight, EPS)
        total = group.ranks * (group.ranks + 1) / 2
        if not (
            torch.equal(x, torch.full_like(x, total)) and torch.equal(residual, torch.full_like(x, total + 1))
        ):
            return False
    return True


def by_windows(group: Group) -> None:
    with collected(group) as collectives:
        assert 0 < collectives.rows < 9
        assert collectives.bytes > 0
        assert collectives._shared.limit == int(group.limit * 1e9)
        assert sums_right(group, collectives)
        x = torch.full((collectives.rows, SPEC.hidden_size), 1.0)
        with patch.object(group, "all_reduce", side_effect=AssertionError("it goes by the library")):
            collectives.all_reduce(x)
        assert torch.equal(x, torch.full_like(x, group.ranks))
        group.barrier()
        collectives.close()
        assert FileWindow.last.closed
        assert group.over.item() == 1, "whoever waited would keep memory from being freed"
        group.over.zero_()


def goes_by_the_library(group: Group, collectives: RankCollectives) -> None:
    """All that was begun with windows is undone."""
    assert collectives.rows == collectives.bytes == 0
    assert collectives._window is None
    assert FileWindow.last.away
    assert FileWindow.last.closed
    assert group.over.item() == 0
    assert sums_right(group, collectives)


def one_is_refused(group: Group) -> None:
    with collected(group, blind=group.rank == 1) as collectives:
        goes_by_the_library(group, collectives)


def tried(group: Group, then: Callable[[Tensor], object]) -> None:
    """Of the sum that is tried first something is not right on rank 1, and on no other."""
    plain = triton_sums.all_reduce

    def other(x: Tensor, shared: Shared) -> None:
        plain(x, shared)
        then(x)

    first = patch.object(triton_sums, "all_reduce", other if group.rank == 1 else plain)
    with first, collected(group) as collectives:
        goes_by_the_library(group, collectives)


def one_finds_a_wrong_sum(group: Group) -> None:
    tried(group, lambda x: x[-1].add_(1))


def one_has_not_waited_to_the_end(group: Group) -> None:
    """Though its sum is right, by chance."""
    tried(group, lambda _: group.over.fill_(1))


def one_has_room_for_fewer_rows(group: Group) -> None:
    """So all sum as many in one launch as that one does."""
    room = patch.object(triton_sums, "most_rows", lambda _: 2 if group.rank == 1 else 3)
    with room, collected(group) as collectives:
        assert collectives.rows == 2
        assert sums_right(group, collectives)


def widths_of_logits_are_known(group: Group) -> None:
    """Ranks ask each other for none: a step would wait for that on the host."""
    collectives = RankCollectives(group, replace(SPEC, vocab_size=7), torch.float32)
    own = collectives.widths[group.rank]
    assert sum(collectives.widths) == 7
    with patch.object(group, "exchange", side_effect=AssertionError("a wait on the host")):
        logits = collectives.gather(torch.full((2, own), float(group.rank)))
    wanted = [float(rank) for rank, width in enumerate(collectives.widths) for _ in range(width)]
    assert logits.tolist() == [wanted, wanted]


def one_is_told_not_to(group: Group) -> None:
    with patch.dict(os.environ, NCCL_P2P_DISABLE=str(int(group.rank == 1))), collected(group) as collectives:
        assert collectives.rows == collectives.bytes == 0
        assert collectives._window is None
        assert sums_right(group, collectives)


def what_is_written_does_not_come(group: Group) -> None:
    with changed(_LOOKS=OFTEN):
        timer = threading.Timer(0.3, lambda: group.over.fill_(1))  # The interpreter has no clock.
        timer.start()
        with collected(group, astray=group.rank == 1) as collectives:
            timer.join()
            group.over.zero_()
            goes_by_the_library(group, collectives)


CASES: dict[str, Case] = {
    case.__name__: case
    for case in (
        *(sums, norms, the_same_bits, nobody_comes, without_waiting, two_slots, one_slot),
        *(by_windows, one_is_refused, one_is_told_not_to, what_is_written_does_not_come),
        *(one_finds_a_wrong_sum, one_has_not_waited_to_the_end, one_has_room_for_fewer_rows),
        widths_of_logits_are_known,
    )
}


@pytest.fixture(scope="module", params=[2, 3] if tiny.THOROUGH else [3])
def together(request: pytest.FixtureRequest) -> Iterator[Callable[[str], None]]:
    with all_ranks(request.param, __file__, CASES) as do:
        yield do


@pytest.mark.parametrize("case", CASES)
def test_on_every_rank(together: Callable[[str], None], case: str) -> None:
    together(case)
