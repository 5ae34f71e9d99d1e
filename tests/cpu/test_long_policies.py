"""Policies in a whole engine: what may not be missed is read after all, and what was missed is told."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import tiny
from layouts import heads_of
from penstock import LLM, Completion, SamplingParams
from penstock.base.errors import ConfigError
from penstock.base.meter import SHARES, MissedStats
from penstock.kv.movement.chosen import Chosen
from penstock.kv.movement.fp8 import from_fp8
from penstock.kv.movement.hostpool import HostPool
from penstock.ops.attention.inputs import LayerAttention
from penstock.ops.policies import Choice

SETTINGS = {
    "device": "cpu",
    "dtype": "float32",
    "max_length": 300,
    "beyond_trained": True,
    "max_step_tokens": 48,
    "block_size": 8,
}
FAR = {"kv_blocks": 8, "host_kv_memory": "4MiB", "kv_tile": 32, "max_sequences": 4, "check": True}
PROMPTS = [[token % 90 for token in range(3, 160)], [token * 7 % 90 for token in range(90)], [5, 6, 7]]
WANTED = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=1)


def answer(name: str, **settings: Any) -> tuple[list[Completion], MissedStats | None]:
    with LLM(tiny.checkpoint(name), **(SETTINGS | settings)) as llm:
        found = llm.generate(PROMPTS, WANTED)
        return found, llm.stats().missed


def apart(one: list[Completion], other: list[Completion]) -> float:
    pairs = [
        pair for a, b in zip(one, other, strict=True) for pair in zip(a.logprobs, b.logprobs, strict=True)
    ]
    return max(abs(a.logprob - b.logprob) for a, b in pairs)


@pytest.mark.parametrize(
    "chosen",
    [
        {"attention_policy": "topk:3", "prefill_policy": "topk:2"},
        {"prefill_policy": "vertical_slash:2,1,3", "missed_limit": 0.99},
        *(
            [{"attention_policy": "window:8,16", "prefill_policy": "window:8,16", "missed_limit": 0.99}]
            if tiny.THOROUGH
            else []
        ),
    ],
    ids=["best", "slash, limited", "window, limited"][: 3 if tiny.THOROUGH else 2],
)
def test_two_ranks_choose_what_one_does(chosen: dict[str, object]) -> None:
    """By the heads of both, and read the rest where one of them misses too much."""
    alone, one = answer("llama", **FAR, **chosen)
    together, both = answer("llama", **FAR, **chosen, tensor_parallel=2)
    assert one is not None
    assert both is not None
    assert [found.tokens for found in together] == [found.tokens for found in alone]
    assert apart(together, alone) < 1e-4
    counts = [(found.choices, found.blocks, found.blocks_read, found.fallbacks) for found in (one, both)]
    assert counts[0] == counts[1]
    assert one.blocks > one.blocks_read > 0
    assert bool(one.fallbacks) == ("missed_limit" in chosen)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_everything_is_exact(name: str, tmp_path: Path) -> None:
    """By a policy that takes all blocks, or by falling back to all: rows, runs, and both with blocks on
    disk."""
    exact, nothing = answer(name)
    assert nothing == MissedStats()
    disk = {"disk_kv_memory": "2MiB", "kv_store": "off", "kv_directory": tmp_path, "host_kv_memory": "13KiB"}
    for number, chosen in enumerate(
        (
            {"attention_policy": "topk:1000"},
            {"attention_policy": "topk:3", "missed_limit": 0.0},
            {"attention_policy": "window:8,16", "prefill_policy": "vertical_slash:2,1", "missed_limit": 0.0},
            {
                "attention_policy": "topk:3",
                "prefill_policy": "vertical_slash:2,1",
                "missed_limit": 0.0,
                **disk,
            },
        )
    ):
        if name != "llama" and number % 3:
            continue  # Another family has nothing new in the midst of them.
        found, missed = answer(name, **(FAR | chosen))
        assert missed.choices
        assert [one.tokens for one in found] == [one.tokens for one in exact], chosen
        assert apart(found, exact) < 5e-5, chosen
        assert missed.most == 0
        assert missed.blocks_read == missed.blocks > 0
        assert missed.fallbacks == (0 if "1000" in str(chosen) else missed.choices)


def test_what_is_missed_is_told() -> None:
    exact, _ = answer("llama")
    found, missed = answer("llama", **FAR, attention_policy="topk:3")
    assert missed.choices
    assert apart(found, exact) > 1e-3, "a policy that changes nothing was not asked"
    assert 0 < missed.most <= 1
    assert 0 < missed.blocks_read <= 3 * missed.choices < missed.blocks
    assert missed.fallbacks == 0
    assert found[2].tokens == exact[2].tokens, "who has no far KV misses none"


@pytest.mark.parametrize(
    ("settings", "least"),
    [
        ({"dtype": "bfloat16"}, 0),
        ({"dtype": "float32", "sketch_bits": 8}, 0),
        ({"dtype": "float32", "sketch_bits": 0}, 0),
        ({"dtype": "bfloat16", "host_kv_dtype": "fp8", "sketch_bits": 8}, 0),
        ({"dtype": "bfloat16", "prefill_policy": "vertical_slash:2,1"}, 0),
        ({"dtype": "bfloat16", "prefill_policy": "vertical_slash:2,1", "missed_limit": 1.0}, 17),
        ({"dtype": "bfloat16", "kv_tile": 8}, 0),
    ],
    ids=str,
)
def test_no_more_is_missed_than_is_said(
    settings: dict[str, object], least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every bound of every choice against the share itself, of all keys as they rest, by float64. least:
    queries whose bounds are told in one choice at least once, where a limit asks for all of a run's."""
    choosing, bounding = Chosen.choose, Choice.missed
    told: list[tuple[Tensor, Tensor]] = []
    asked: list[Tensor] = []
    seen: list[Tensor] = []
    owners: list[Chosen] = []

    def missed(choice: Choice, lse: Tensor) -> Tensor:
        told.append((choice.keep, bounding(choice, lse)))
        return told[-1][1]

    def choose(self: Chosen, layer: int, reader: int, q: Tensor, lse: Tensor, at: LayerAttention):  # type: ignore[no-untyped-def]
        if owners[-1:] != [self]:  # The first one was only there to be measured.
            owners.append(self)
            told.clear(), asked.clear(), seen.clear()
        pool, blocks = self._ring._pool, self._readers[reader].blocks
        before = lse.clone().double()
        yield from choosing(self, layer, reader, q, lse, at)
        if not told:
            return
        keep, bound = told.pop()
        keys = torch.stack([keys_of(pool, layer, int(block)) for block in blocks]).double()
        group = q.shape[1] // keys.shape[2]
        scores = torch.einsum(
            "qhd,bthd->qhbt", q.double() * at.scale, keys.repeat_interleave(group, 2)
        ).logsumexp(3)
        everything = torch.logaddexp(before, scores.logsumexp(2))
        share = (scores.masked_fill(keep, -torch.inf).logsumexp(2) - everything).exp()
        some = slice(None) if len(bound) == len(q) else torch.linspace(0, len(q) - 1, 16).long()
        assert (bound >= share[some] * (1 - 1e-5)).all(), (bound, share[some])
        asked.append(bound)
        seen.append(share.max())

    monkeypatch.setattr(Choice, "missed", missed)
    monkeypatch.setattr(Chosen, "choose", choose)
    _, found = answer("llama", **(SETTINGS | FAR | {"attention_policy": "topk:6"} | settings))
    assert found.choices >= len(seen) > 50
    assert max(len(bound) for bound in asked) >= least
    assert found.most == pytest.approx(max(float(bound.max()) for bound in asked))
    assert sum(found.worst_buckets) == sum(found.mean_buckets) == found.choices
    at = np.searchsorted(SHARES, [float(bound.max()) for bound in asked])
    assert found.worst_buckets[1:] == tuple(np.bincount(at, minlength=len(SHARES) + 1)[1:])
    if settings.get("sketch_bits", 4):
        assert found.worst < 1.3 * sum(float(share) for share in seen) / found.choices, (
            "far more than there is"
        )


def keys_of(pool: HostPool, layer: int, block: int) -> Tensor:
    """A block's keys of a layer as they rest."""
    layout = pool.layout
    rows = pool.layer_rows(layer, block, 1)[0, : layout.layer_bytes // 2]
    shape = layout.block_size, *heads_of(layout)
    if not layout.rounded_from:
        return rows.view(getattr(torch, layout.dtype)).view(shape)
    keys = torch.empty(1, *shape, dtype=getattr(torch, layout.rounded_from))
    from_fp8(rows[None], keys)
    return keys[0]


def test_a_limit_reads_the_rest_only_where_it_must() -> None:
    _, free = answer("llama", **FAR, attention_policy="topk:14")
    assert free.worst > 0
    limit = free.worst
    _, bound = answer("llama", **FAR, attention_policy="topk:14", missed_limit=limit)
    assert 0 < bound.fallbacks < bound.choices
    assert bound.most <= limit


def test_dense_layers_read_everything() -> None:
    _, missed = answer("llama", **FAR, attention_policy="topk:3,1")
    assert missed.choices
    assert 3 * missed.choices < missed.blocks_read < missed.blocks


@pytest.mark.parametrize(
    "text",
    [
        "",
        "top",
        "topk",
        "topk:",
        "topk:-1",
        "topk:1,2,3",
        "window:1",
        "window:a,b",
        "vertical_slash",
        "full:1",
    ],
)
def test_policies_nobody_knows(text: str) -> None:
    with pytest.raises(ConfigError, match="is not known; write full"):
        answer("llama", **FAR, attention_policy=text)


def test_windows_have_a_policy_of_their_own() -> None:
    with pytest.raises(ConfigError, match="which has sliding windows"):
        answer("mistral", **FAR, attention_policy="topk:3")
