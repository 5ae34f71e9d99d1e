"""Masks on a GPU are those on the CPU; steps that are recorded, and begun before the last is over, hold
outputs to their structure."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

pytest.importorskip("llguidance", reason="needs the library that knows structures")

from penstock import LLM, SamplingParams, Structure
from penstock.step.plan import Admission, Row
from penstock.worker.runner import Runner
from penstock.worker.structures import Masks
from worlds import sampling

SETTINGS: dict[str, Any] = {
    "device": "cuda",
    "dtype": "float32",
    "max_length": 256,
    "max_sequences": 24,
    "check": True,
}
SCHEMA = {
    "x-guidance": {"whitespace_flexible": False},
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


class Given:
    """A guide with random masks."""

    def __init__(self, rows: int, vocab: int) -> None:
        self.words = (
            np.random.default_rng(5)
            .integers(-(2**31), 2**31, (rows, vocab // 32 + 1), dtype=np.int64)
            .astype(np.int32)
        )
        self.words[:, 1] |= 1

    def begin(self, row: Row, sampling: object) -> None: ...

    def take(self, row: Row, tokens: Sequence[int]) -> None: ...

    def masks(
        self, rows: Sequence[Row], drafts: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]
    ) -> tuple[np.ndarray, frozenset[int]]:
        return self.words[: len(rows)].copy(), frozenset()


@pytest.mark.parametrize("vocab", [97, 4096, 151_936])
def test_masks_are_those_on_the_cpu(vocab: int) -> None:
    logits = torch.randn(40, vocab, generator=torch.Generator().manual_seed(1))
    logits[7] = -torch.inf
    rows = {share: (Row(share), (), ()) for share in range(1, 40, 2)}
    found = []
    for device in ("cpu", "cuda"):
        masks, some = Masks(Given(40, vocab), torch.device(device)), logits.clone().to(device)
        for row, *_ in rows.values():
            masks.admit(Admission(row, replace(sampling(), structure=Structure.regex("a")), (1,), ()))
        masks.put(some, rows)
        found.append(some.cpu())
    assert torch.equal(*found)
    assert not torch.equal(found[0], logits)


@pytest.mark.parametrize("graphs", [True, False])
def test_outputs_are_held_to_their_structure(graphs: bool) -> None:
    kinds = (Structure.json_schema(SCHEMA), Structure.choice(["red", "blue"]), None)
    params = [
        SamplingParams(structure=structure, seed=seed, temperature=seed % 3 * 0.7, top_p=0.9, max_tokens=90)
        for seed in range(8)
        for structure in kinds
    ]
    told = []
    for ahead in (True, False):
        with patch.object(Runner, "ahead", ahead), LLM(**SETTINGS, graphs=graphs) as llm:
            found = llm.generate(["Once upon a time"] * len(params), params)
        told.append([one.tokens for one in found])
        for one, other in zip(found[::3], found[1::3], strict=True):
            assert {one.finish_reason, other.finish_reason} == {"stop"}
            assert json.loads(one.text).keys() == {"name", "age"}
            assert other.text in ("red", "blue")
    assert told[0] == told[1]
