"""What two and three processes compute together: the same on each, and what one would have computed."""

import gc
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from crews import CPU, all_ranks, led, order
from penstock.base.errors import DeviceError
from penstock.parallel.group import Group
from penstock.parallel.store import SharedStore
from penstock.step.params import Sampling
from penstock.step.plan import Admission, Row, Share
from penstock.worker.rank import Leader
from penstock.worker.sampler import Sampler
from streams import LONG, within

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32]
Case = Callable[[Group], None]


def parts(ranks: int, *shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """One for each rank, the same on every rank; small whole numbers, which every dtype adds exactly."""
    return [
        torch.randint(-8, 8, shape, generator=torch.Generator().manual_seed(rank)).to(dtype)
        for rank in range(ranks)
    ]


def sums(group: Group) -> None:
    for dtype in DTYPES:
        for shape in ((1,), (3, 5), (2, 0), (700, 70)):
            every = parts(group.ranks, *shape, dtype=dtype)
            mine = every[group.rank].clone()
            group.all_reduce(mine)
            assert mine.dtype == dtype
            assert torch.equal(mine, torch.stack(every).sum(0).to(dtype))


def rounded_sums(group: Group) -> None:
    """Halves that do not add exactly: the same bits on each rank, near the sum."""
    for dtype in (torch.bfloat16, torch.float16):
        every = [
            torch.randn(1000, generator=torch.Generator().manual_seed(rank)).to(dtype)
            for rank in range(group.ranks)
        ]
        mine = every[group.rank].clone()
        group.all_reduce(mine)
        torch.testing.assert_close(mine.float(), torch.stack(every).float().sum(0), atol=0.05, rtol=0.02)
        assert len(set(group.exchange(mine.view(torch.uint8).numpy().tobytes()))) == 1


def gathers(group: Group) -> None:
    for dtype in DTYPES:
        for rows in ((), (3,), (2, 4), (0,)):
            for widths in (
                [5] * group.ranks,
                [4 - rank for rank in range(group.ranks)],
                [7 * (rank == 1) for rank in range(group.ranks)],
            ):
                every = [
                    part[..., :width]
                    for part, width in zip(parts(group.ranks, *rows, 9, dtype=dtype), widths, strict=True)
                ]
                for given in (None, widths):
                    whole = group.gather(every[group.rank], given)
                    assert whole.dtype == dtype
                    assert torch.equal(whole, torch.cat(every, -1))


def copies(group: Group) -> None:
    for dtype in DTYPES:
        for shape in ((1,), (3, 5), (2, 0)):
            every = parts(group.ranks, *shape, dtype=dtype)
            mine = every[group.rank].clone()
            group.follow(mine)
            assert torch.equal(mine, every[0])


def draws(group: Group) -> None:
    """What rank 0 draws is every rank's newest, even where the last bits of its logits are others."""
    settings = [tiny_sampling(temperature) for temperature in (0.0, 1.0, 0.0, 0.7)]
    for rows in (range(4), range(0, 4, 2)):
        sampler = Sampler(50, 4, CPU, group.follow)
        for row, sampling in enumerate(settings):
            sampler.admit(Admission(Row(row), sampling, (1, 2), ()))
        logits = torch.randn(len(rows), 50, generator=torch.Generator().manual_seed(7))
        random = [index for index, row in enumerate(rows) if row % 2]
        logits[random] = torch.randn(len(random), 50, generator=torch.Generator().manual_seed(group.rank))
        tokens, _ = sampler.sample(logits, [share_of(row) for row in rows]).read()
        assert sampler.newest[list(rows)].tolist() == tokens
        assert len(set(group.exchange(bytes(tokens)))) == 1


def tiny_sampling(temperature: float) -> Sampling:
    return Sampling(temperature, 0, 1.0, 0.0, 1.0, 0.0, 0.0, (), 0, frozenset(), 5, None, None)


def share_of(row: int) -> Share:
    return Share(Row(row), 3, (1,), 0, (), sample=True, prompt_length=2)


def within_inference(group: Group) -> None:
    with torch.inference_mode():
        sums(group)
        gathers(group)


def agreements(group: Group) -> None:
    rank, ranks = group.rank, group.ranks
    assert group.least(1000 - rank) == 1001 - ranks
    assert group.least(2**62 + rank) == 2**62
    assert group.least(-rank) == 1 - ranks
    group.barrier()


def messages(group: Group) -> None:
    for size in (0, 1, 1015, 1016, 1017, 100_000):
        every = [bytes([65 + rank]) * (size * rank // (group.ranks - 1)) for rank in range(group.ranks)]
        assert group.exchange(every[group.rank]) == every
        said = bytes(range(256)) * (size // 256)
        assert group.broadcast(said if group.rank == 0 else None) == said


CASES: dict[str, Case] = {
    case.__name__: case
    for case in (sums, rounded_sums, gathers, copies, draws, within_inference, agreements, messages)
}


@pytest.fixture(scope="module", params=[2, 3])
def together(request: pytest.FixtureRequest) -> Iterator[Callable[[str], None]]:
    with all_ranks(request.param, __file__, CASES) as do:
        yield do


@pytest.mark.parametrize("case", CASES)
def test_on_every_rank(together: Callable[[str], None], case: str) -> None:
    together(case)


class Recorded:
    """In the place of NCCL, which does not end before what graphs have recorded of it is gone."""

    def __init__(self) -> None:
        self.gone, self.asked = threading.Event(), list[str]()

    def abort(self) -> None:
        self.asked.append("abort")
        self.gone.wait(LONG)

    def shutdown(self) -> None:
        self.asked.append("shutdown")
        self.gone.wait(LONG)


def alone() -> tuple[Group, Recorded]:
    group, recorded = Group(HashStore(), 0, 1, CPU), Recorded()
    group._nccl = cast(Any, recorded)
    return group, recorded


def test_who_aborts_does_not_wait_for_graphs() -> None:
    group, recorded = alone()
    group.abort()
    assert group.over.item() == 1
    group.abort()
    assert not recorded.gone.is_set()
    with pytest.raises(DeviceError, match="incomplete"):
        group.check()
    recorded.gone.set()
    group.close()
    group.close()
    with pytest.raises(DeviceError, match="closed"):
        group.barrier()
    assert recorded.asked == ["abort"]
    assert group._ending is not None
    assert not group._ending.is_alive()


def test_what_does_not_end_is_left_to_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("penstock.parallel.group._ENDING", 0.05)
    group, recorded = alone()
    group.close()
    assert recorded.asked == ["shutdown"]
    assert "ends without them" in caplog.text
    recorded.gone.set()


def test_the_file_of_a_store_stays_open_for_what_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may ask the store, by the file's number. Else it is closed with the group."""
    monkeypatch.setattr("penstock.parallel.group._ENDING", 0.05)
    for hangs in (False, True):
        recorded, file = Recorded(), os.memfd_create("a test's")
        shared = SharedStore(file, 1)
        group = Group(shared.store, 0, 1, CPU, shared=shared)
        group._nccl, shared.asking, own = cast(Any, recorded), True, shared._own
        if not hangs:
            recorded.gone.set()
        group.close()
        del group, shared
        gc.collect()
        os.close(file)
        assert Path(f"/proc/self/fd/{own}").exists() is hangs
        recorded.gone.set()
    os.close(own)


def test_a_rank_that_is_gone_ends_the_run_though_graphs_are_there() -> None:
    """They go when rank 0's part closes, which is after it has begun to abort."""
    leader, crew = led(2)
    recorded = Recorded()
    leader._group._nccl = cast(Any, recorded)
    with patch.object(leader._part, "close", recorded.gone.set):
        assert within(LONG, partial(_killed, leader))
        leader.close()
    assert crew.failure is not None
    assert recorded.asked == ["abort"]
    assert recorded.gone.is_set()


def _killed(leader: Leader) -> None:
    with pytest.raises(DeviceError, match="rank 1 of 2"):
        leader.run(order("kill", 1))
