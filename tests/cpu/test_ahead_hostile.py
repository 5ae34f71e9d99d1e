"""Steps that run ahead, and recorded ones: what goes wrong when a pass has no end, and when who is about to
end still holds blocks."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import tiny
from penstock import LLM, SamplingParams
from penstock.arch.layout import GroupId
from penstock.engine import measuring
from penstock.kv.ledger.blocks import BlockLedger
from penstock.kv.ledger.host import HostLedger
from penstock.memory.device import peak_of
from penstock.ops.attention import attend
from penstock.ops.attention.inputs import LayerAttention, Rows
from penstock.ops.matrix import GroupViews
from penstock.sched.rules import PrefixRule, SchedulerLimits
from penstock.sched.scheduler import Scheduler, Storage
from penstock.step.plan import Outcome, Plan, Result
from penstock.weights.streaming.stream import WeightStream
from penstock.worker.graphs import DecodeGraphs
from penstock.worker.runner import Runner
from worlds import ROOT, sampling

SETTINGS = {
    "device": "cpu",
    "dtype": "float32",
    "max_length": 128,
    "block_size": 4,
    "max_step_tokens": 7,
    "max_sequences": 5,
    "kv_blocks": 22,
    "check": True,
}
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]
"""A token more than a step takes."""
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


def opened(**more: object) -> LLM:
    """Of tied embeddings, which a pass uses twice."""
    return LLM(tiny.checkpoint("llama_tied"), **(SETTINGS | more))  # type: ignore[arg-type]


def least_memory() -> dict[str, int]:
    """All weights stream through the smallest rings."""
    with opened() as llm:
        budget, layouts = llm.memory.budget, llm.booted.weights._layouts.values()
    least = budget.activations + budget.kv + max(-(-layout.size // 4096) * 4096 for layout in layouts)
    return {"device_memory": least, "host_memory": least + int(0.35 * budget.weights)}


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    real, size = slots >= 0, k_cache.shape[1]
    k_cache[slots[real] // size, slots[real] % size] = k[real]
    v_cache[slots[real] // size, slots[real] % size] = v[real]


def paged_decode(
    q: Tensor, cache: tuple[Tensor, Tensor], rows: Rows, layer: LayerAttention, *, out: Tensor, **_: object
) -> Tensor:
    for row, length in enumerate(rows.lengths.tolist()):
        groups, pages = q.shape[1] // cache[0].shape[2], rows.table[row].long()
        k, v = (x[pages].flatten(0, 1)[:length].repeat_interleave(groups, 1) for x in cache)
        scores = torch.einsum("hd,khd->hk", q[row], k) * layer.scale
        out[row] = torch.einsum("hk,khd->hd", scores.softmax(-1), v) if length else 0
    return out


class Recorded:
    """Weights as a recorded pass borrows them: each group where it was lent when the pass was recorded."""

    experts = None

    def __init__(self, weights: WeightStream) -> None:
        self._weights, self._standing = weights, weights.standing()

    def take(self, group: GroupId) -> GroupViews:
        recorded, lent = self._standing.take(group), self._weights.take(group)
        assert lent is recorded, f"{group} is not where it was when the step was recorded"
        return lent

    def release(self, group: GroupId) -> None:
        self._weights.release(group)


class Played:
    """Computes what a graph would replay."""

    def __init__(self, graphs: DecodeGraphs, count: int) -> None:
        self._graphs, self._count = graphs, count

    def replay(self) -> None:
        with patch.object(
            attend, "_kernels", lambda x: SimpleNamespace(write_kv=write_kv, paged_decode=paged_decode)
        ):
            self._graphs._step.compute(self._count, Recorded(self._graphs._weights))


def played(self: DecodeGraphs, **_: bool) -> None:
    self._programs = {count: Played(self, count) for count in self.counts}  # type: ignore[misc]


@pytest.fixture
def llm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    monkeypatch.setattr(measuring, "peak_of", lambda device, run: 0 * peak_of(device, run))
    monkeypatch.setattr(Runner, "ahead", True)
    monkeypatch.setattr(DecodeGraphs, "record", played)
    with opened(cache=tmp_path, **least_memory()) as llm:
        runner, limits = llm.booted.engine._ranks, llm.booted.limits
        assert isinstance(runner, Runner)
        runner.record(limits.max_sequences, 0, limits.max_length, record_runs=False)
        yield llm


def resident(prompt: Sequence[int]) -> tuple[int, ...]:
    with opened() as llm:
        return llm.generate([prompt], GREEDY)[0].tokens


def test_a_last_chunk_of_one_token_may_be_replayed_after_a_pass_without_a_head(llm: LLM) -> None:
    assert llm.generate([PROMPT], GREEDY)[0].tokens == resident(PROMPT)


def test_a_prompt_of_one_token_may_be_replayed_after_a_pass_that_was_broken_off(llm: LLM) -> None:
    weights, stream = llm.booted.weights, llm.stream(PROMPT[:4], GREEDY)
    take = weights.take

    def struck(group: GroupId) -> Mapping[str, Tensor]:
        if group.layer == 1:
            raise KeyboardInterrupt
        return take(group)

    with patch.object(weights, "take", struck), suppress(KeyboardInterrupt):
        next(stream)
    stream.close()
    assert llm.generate([PROMPT[:1]], GREEDY)[0].tokens == resident(PROMPT[:1])


def served(scheduler: Scheduler, ahead: bool) -> None:
    """Whoever has been submitted, to the end, as an engine does it."""
    flight: Plan | None = None
    while scheduler.busy or flight is not None:
        over, flight = flight, None
        if over is None or ahead:
            plan = scheduler.plan()
            assert plan.shares or over is not None, "an empty step"
            if plan.shares and ahead:
                scheduler.run_ahead(plan)
                flight = plan
            elif plan.shares:
                assert over is None
                over = plan
        if over is not None:
            scheduler.commit(
                over, Outcome(tuple(Result((1,) if share.sample else ()) for share in over.shares))
            )


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("first", [5, 8])
def test_nobody_goes_for_blocks_that_are_free_when_the_step_under_way_is_over(
    ahead: bool, first: int
) -> None:
    """Two of two blocks each, of four: when one comes to need a third, the other has yielded its last
    token."""
    scheduler = Scheduler(
        BlockLedger(4), SchedulerLimits(4, 16, 2, 100), PrefixRule(ROOT, share=False), check=True
    )
    for token, most in enumerate((first, 13 - first)):
        scheduler.submit([token] * 4, sampling(), most)
    served(scheduler, ahead)
    assert scheduler.preemptions == 0


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_prompt_that_just_fits_becomes_long_while_there_is_a_place_for_its_newest_token(
    size: int, ahead: bool
) -> None:
    scheduler = Scheduler(
        BlockLedger(6),
        SchedulerLimits(size, 64, 2, 100, recent=1),
        PrefixRule(ROOT),
        Storage(HostLedger(20)),
        check=True,
    )
    scheduler.submit([0] * (6 * size - 1), sampling())
    served(scheduler, ahead)
    assert scheduler.preemptions == 0
