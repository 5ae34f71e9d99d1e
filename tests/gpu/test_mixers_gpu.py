"""Mixers that keep state, and capped scores, on a GPU: recorded or not, streamed or not, against float64."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import exact
import toys
from exact import confirms, host, outputs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CUDA: dict[str, Any] = {"device": "cuda", "device_memory": "4GiB", "block_size": 16}


@pytest.fixture(autouse=True)
def known() -> Iterator[None]:
    with toys.hybrid_known(), toys.capped_known():
        yield


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("make", [toys.hybrid_checkpoint, toys.capped_checkpoint])
def test_logits_are_those_of_the_reference(make: Any, graphs: bool, tmp_path: Path) -> None:
    """Rows of state are given to others: there are fewer of them than prompts."""
    path = make(tmp_path / "model")
    for tokens in (24, 512):
        found = outputs(path, **CUDA, graphs=graphs, max_sequences=2, max_step_tokens=tokens)
        assert confirms(path, found)


@pytest.mark.parametrize("make", [toys.hybrid_checkpoint, toys.capped_checkpoint])
def test_contexts_longer_than_the_device(make: Any, tmp_path: Path) -> None:
    path = make(tmp_path / "model")
    long = {"kv_blocks": 6, "max_step_tokens": 32, "kv_tile": 32, "host_kv_memory": host(path, 60)}
    assert exact.BLOCK == 8
    assert confirms(path, outputs(path, **CUDA | {"block_size": 8} | long))
