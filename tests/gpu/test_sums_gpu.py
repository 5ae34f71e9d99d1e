"""Sums over the ranks of two GPUs in one launch, through memory that both see: right, the same on both, and
never waited for for ever."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from crews import all_ranks
from penstock.arch.spec import ModelSpec
from penstock.base.errors import DeviceError
from penstock.bench.shapes import SHAPES
from penstock.ops.kernels import pdl_launches
from penstock.ops.norm import add_rms_norm
from penstock.parallel.group import Group
from penstock.weights.checkpoint.shape import Shape
from penstock.worker.collectives import RankCollectives

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason=f"needs two GPUs; there are {torch.cuda.device_count()}"
)

Case = Callable[[Group], None]
EPS = 1e-5
MOST = 132
"""Rows of one launch on a GPU with as many multiprocessors, or fewer."""


def spec_of(hidden: int) -> ModelSpec:
    return Shape.of(SHAPES["8B"] | {"hidden_size": hidden}).spec


@contextmanager
def collected(group: Group, hidden: int, dtype: torch.dtype) -> Iterator[RankCollectives]:
    collectives = RankCollectives(group, spec_of(hidden), dtype)
    collectives.open()
    assert 0 < collectives.rows <= MOST, "the GPUs do not reach each other"
    yield collectives
    torch.cuda.synchronize()
    collectives._use_nccl("the test is over")


def come_late(rng: random.Random) -> None:
    if rng.random() < 0.3:
        time.sleep(rng.random() * 1e-3)
    if rng.random() < 0.3:
        torch.cuda._sleep(rng.randrange(300_000))


def parts(group: Group, turn: int, rows: int, hidden: int, dtype: torch.dtype) -> list[Tensor]:
    """One for each rank, the same on every rank."""
    generator = torch.Generator().manual_seed(turn)
    return [
        torch.randn(rows, hidden, generator=generator).to(dtype).to(group.device) for _ in range(group.ranks)
    ]


def added(every: list[Tensor]) -> Tensor:
    total = every[0].float()
    for one in every[1:]:
        total = total + one.float()
    return total.to(every[0].dtype)


def sums(group: Group) -> None:
    for hidden, dtype in (
        (4096, torch.bfloat16),
        (1000, torch.float16),
        (72, torch.float32),
        (8192, torch.bfloat16),
    ):
        sizes, late = random.Random(hidden), random.Random(group.rank)
        rows = [sizes.choice((1, 2, 3, 64, 100, MOST, 2 * MOST)) for _ in range(60)]
        made = [parts(group, turn, count, hidden, dtype) for turn, count in enumerate(rows)]
        with collected(group, hidden, dtype) as collectives:
            collectives._shared.turns.fill_((1 << 31) - 30)  # Numbers wrap around in the midst.
            for every in made:  # Nobody waits on the host between them.
                come_late(late)
                collectives.all_reduce(every[group.rank])
            torch.cuda.synchronize()
        for turn, (count, every) in enumerate(zip(rows, made, strict=True)):
            assert torch.equal(every[group.rank], added(parts(group, turn, count, hidden, dtype))), (
                hidden,
                dtype,
                count,
            )


def norms(group: Group) -> None:
    """As the library's sum, the residual sum and the norm make it, one after the other; beyond so many rows
    by these."""
    for hidden, dtype, near in (
        (4096, torch.float32, 1e-5),
        (8192, torch.float16, 4e-3),
        (8192, torch.bfloat16, 3e-2),
    ):
        late = random.Random(group.rank)
        with collected(group, hidden, dtype) as collectives:
            for turn, count in enumerate((1, 5, MOST, MOST + 1, 64)):
                every = parts(group, turn, count, hidden, dtype)
                residual, weight = (
                    parts(group, 50 + turn, count, hidden, dtype)[0],
                    parts(group, 99, 1, hidden, dtype)[0][0],
                )
                other, x = residual.clone(), every[group.rank].clone()
                group.all_reduce(x)
                want = add_rms_norm(x, other, weight, EPS)
                come_late(late)
                got = collectives.add_rms_norm(every[group.rank].clone(), residual, weight, EPS)
                torch.testing.assert_close(residual, other, rtol=near, atol=near)
                torch.testing.assert_close(got, want, rtol=near, atol=near)
                assert len(set(group.exchange(got.sum(-1).float().cpu().numpy().tobytes()[:1000]))) == 1


def recorded(group: Group) -> None:
    """A chain of them in a graph, launched early, whose replays follow its inputs."""
    dtype, hidden, late = torch.bfloat16, 4096, random.Random(group.rank)
    start, weight = (
        torch.empty(8, hidden, dtype=dtype, device=group.device),
        torch.ones(hidden, dtype=dtype, device=group.device),
    )

    def chain(add: Callable[[Tensor, Tensor, Tensor, float], Tensor]) -> Tensor:
        residual, x = start.clone(), start * 1
        for _ in range(20):
            x = add(x, residual, weight, EPS) * 0.5
        return x

    with collected(group, hidden, dtype) as collectives:
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream), pdl_launches():
            chain(collectives.add_rms_norm)
            stream.synchronize()
            group.barrier()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                said = chain(collectives.add_rms_norm)
        for turn in range(50):
            start.copy_(parts(group, turn, 8, hidden, dtype)[group.rank])
            plain = chain(collectives.add_rms_norm).clone()
            torch.cuda.synchronize()
            come_late(late)
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(said, plain), turn


def nobody_comes(group: Group) -> None:
    """The host ends all waiting; and it ends by itself, which is an error."""
    with collected(group, 4096, torch.bfloat16) as collectives:
        x = torch.zeros(MOST, 4096, dtype=torch.bfloat16, device=group.device)
        if group.rank:
            return
        torch.cuda.synchronize()
        timer = threading.Timer(0.5, lambda: group.over.fill_(1))
        timer.start()
        begin = time.monotonic()
        for _ in range(3):
            collectives.all_reduce(x)
        torch.cuda.synchronize()
        assert time.monotonic() - begin >= 0.4, "did not wait"
        timer.join()
        group.over.zero_()
        collectives._shared = replace(collectives._shared, limit=300_000_000)
        begin = time.monotonic()
        collectives.all_reduce(x)
        torch.cuda.synchronize()
        assert time.monotonic() - begin >= 0.2, "did not wait"
        with pytest.raises(DeviceError, match="incomplete"):
            group.check()
        group.over.zero_()


CASES: dict[str, Case] = {case.__name__: case for case in (sums, norms, recorded, nobody_comes)}


@pytest.fixture(scope="module")
def together() -> Iterator[Callable[[str], None]]:
    with all_ranks(2, __file__, CASES, "cuda") as do:
        yield do


@pytest.mark.parametrize("case", CASES)
def test_on_every_rank(together: Callable[[str], None], case: str) -> None:
    together(case)
