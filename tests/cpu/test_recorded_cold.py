"""Decode steps of rows with KV beyond the device are recorded, but for the tiles that come: computed here as
graphs would replay them, with the tiles between them."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import tiny
from cpu.test_ahead_hostile import Recorded, write_kv
from cpu.test_long_contexts import brought, everything_is_free, longest, some_asks, some_room, words
from far import Ask, Room, answers, check, lines, opened
from penstock import LLM
from penstock.ops.attention import attend
from penstock.ops.attention.inputs import LayerAttention, Rows, Scratch
from penstock.step.plan import Plan
from penstock.worker.graphs import DecodeGraphs
from penstock.worker.runner import Runner

NAMES = ("llama", "qwen2_windows", "qwen3_windows", "mistral")
"""Without dynamic frequencies and mixtures, which are not recorded on this device."""


def paged_decode(
    q: Tensor,
    cache: tuple[Tensor, Tensor],
    rows: Rows,
    layer: LayerAttention,
    *,
    out: Tensor,
    lse: Tensor | None,
) -> Tensor:
    """Each row to the keys in its own pages, of which the newest is its own."""
    for row, length in enumerate(rows.lengths.tolist()):
        groups, pages = q.shape[1] // cache[0].shape[2], rows.table[row].long()
        oldest = 0 if layer.window is None else max(length - layer.window, 0)
        k, v = (x[pages].flatten(0, 1)[oldest:length].repeat_interleave(groups, 1) for x in cache)
        scores = torch.einsum("hd,khd->hk", q[row], k) * layer.scale
        out[row] = torch.einsum("hk,khd->hd", scores.softmax(-1), v) if length else 0
        if lse is not None:
            lse[row] = scores.logsumexp(-1) if length else -torch.inf
    return out


def kept(scratch: Scratch) -> set[int]:
    return {one.untyped_storage().data_ptr() for one in scratch._kept.values()}


class Played:
    """Computes what the pieces of a program would, and between them what it has them do."""

    def __init__(self, graphs: DecodeGraphs, count: int, *, cold: bool) -> None:
        self._graphs, self._count, self._cold = graphs, count, cold

    def replay(self) -> None:
        kernels, step = SimpleNamespace(write_kv=write_kv, paged_decode=paged_decode), self._graphs._step

        def fold(into: partial[None]) -> None:
            """By then other pieces may have computed over what no layer keeps."""
            assert into.args[0].untyped_storage().data_ptr() in kept(step._scratch)
            self._graphs._reads.fold(into)

        with patch.object(attend, "_kernels", lambda x: kernels):
            step.compute(self._count, Recorded(self._graphs._weights), later=fold if self._cold else None)


def record(self: DecodeGraphs, **_: bool) -> None:
    self._programs = {count: Played(self, count, cold=False) for count in self.counts}  # type: ignore[misc]
    self._cold = {count: Played(self, count, cold=True) for count in self._cold_counts}  # type: ignore[misc]


@contextmanager
def recorded(name: str, room: Room, **more: object) -> Iterator[tuple[LLM, list[int]]]:
    """An engine whose decode steps are recorded, and how many rows each of those had that was replayed with
    KV beyond the device."""
    replayed, run = list[int](), DecodeGraphs.run

    def noted(self: DecodeGraphs, plan: Plan) -> tuple[Tensor, Tensor]:
        if self._reads.cold is not None:
            replayed.append(len(plan.shares))
        return run(self, plan)

    with (
        patch.object(DecodeGraphs, "record", record),
        patch.object(DecodeGraphs, "run", noted),
        opened(name, room, **more) as llm,
    ):
        runner, limits = llm.booted.engine._ranks, llm.booted.limits
        assert isinstance(runner, Runner)
        runner.record(limits.max_sequences, 0, limits.max_length, record_runs=False, cold=True)
        yield llm, replayed


@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "ahead"])
@pytest.mark.parametrize("name", NAMES)
def test_no_token_is_another(name: str, ahead: bool) -> None:
    """Long ones and short ones side by side, some of which share what is beyond the device."""
    rng = random.Random(name)
    common = words(rng, 70)
    asks = [
        Ask((*common, *words(rng, 40)), 40),
        Ask((*common, *words(rng, 9)), 30, at=9),
        Ask(tuple(common[:50]), 30, at=2),
        Ask((5, 6, 7), 14, at=1),
        Ask(tuple(words(rng, 1)), 3, at=12),
    ]
    room = Room(pages=12, block=4, step=16, tile=20, sequences=5)
    with patch.object(Runner, "ahead", ahead), recorded(name, room) as (llm, replayed):
        found = answers(llm, asks)
        assert brought(llm) > 0
        everything_is_free(llm)
    check(name, asks, found)
    assert len(replayed) > 20
    assert max(replayed) > 1


@pytest.mark.parametrize("seed", range(60 if tiny.THOROUGH else 8))
def test_whatever_the_sizes_and_whoever_comes_and_goes(seed: int) -> None:
    rng = random.Random(1000 + seed)
    name, room = NAMES[seed % len(NAMES)], some_room(rng)
    with (
        patch.object(Runner, "ahead", bool(seed % 3)),
        lines("some", seed),
        recorded(name, room) as (llm, _),
    ):
        asks = some_asks(rng, min(longest(llm), 120))
        found = answers(llm, asks)
        everything_is_free(llm)
    check(name, asks, found)
