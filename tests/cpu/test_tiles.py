"""Attention in tiles is attention: with tiles of a few keys, results are those of one piece, to rounding."""

from pathlib import Path

import pytest

import penstock.ops.attention.gathered
import penstock.worker.inputs
from penstock import LLM, SamplingParams
from penstock.kv.movement.pool import KVPool
from penstock.step.plan import TokenLogprob
from tiny import checkpoint

PROMPTS = [
    [(7 * index + seed) % 90 + 3 for index in range(length)]
    for seed, length in ((1, 70), (2, 33), (3, 5), (4, 48))
]
SETTINGS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=-1, prompt_logprobs=-1)


def everything(folder: Path, **engine: int) -> tuple[list[tuple[int, ...]], list[dict[int, float]]]:
    """Greedy tokens, and every distribution of prompt and output."""
    with LLM(folder, device="cpu", dtype="float32", check=True, **engine) as llm:
        found = llm.generate(PROMPTS, SETTINGS)
    tables: list[dict[int, float]] = []
    for one in found:
        entries: list[TokenLogprob] = [
            entry for entry in (*(one.prompt_logprobs or ()), *(one.logprobs or ())) if entry is not None
        ]
        tables += [dict(entry.top) for entry in entries]
    return [one.tokens for one in found], tables


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2_windows"])
@pytest.mark.parametrize("tile", [4, 16])
def test_small_tiles_change_nothing(kind: str, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint(kind)
    tokens, tables = everything(folder)
    monkeypatch.setattr(penstock.ops.attention.gathered, "PAST_TILE", tile)
    monkeypatch.setattr(penstock.worker.inputs, "PAST_TILE", tile)
    monkeypatch.setattr(penstock.worker.inputs, "ROW_KEYS", 2 * tile)
    tiled_tokens, tiled_tables = everything(folder, max_step_tokens=20, max_sequences=4, block_size=4)
    assert tiled_tokens == tokens
    worst = max(
        abs(table[token] - tiled[token])
        for table, tiled in zip(tables, tiled_tables, strict=True)
        for token in table
    )
    assert worst < 1e-4


def test_what_lies_behind_a_rows_end_is_never_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are padded to the longest of their group: KV that was never written, here NaN, must not reach a
    result through a mask."""
    folder = checkpoint("mixtral")
    tokens, tables = everything(folder)
    plain = KVPool.__init__

    def poisoned(self: KVPool, *arguments: object) -> None:
        plain(self, *arguments)  # type: ignore[arg-type]
        for k, v in self.layers:
            k.fill_(float("nan"))
            v.fill_(float("nan"))

    monkeypatch.setattr(KVPool, "__init__", poisoned)
    again, again_tables = everything(folder)
    assert again == tokens
    assert again_tables == tables
