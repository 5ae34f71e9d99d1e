"""Long contexts on two ranks: each keeps its heads' part of every host block and of every record on disk, at
the same indices, which are the plan's. Tokens are those of one rank."""

import random
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

pytest.importorskip("transformers")

import tiny
from far import SETTINGS, Ask, answers, check, layout_of
from penstock import LLM
from penstock.worker.runner import Runner

BLOCK = 8


@pytest.fixture(params=[False, True], ids=["in turn", "ahead"], autouse=True)
def _ahead(request: pytest.FixtureRequest) -> Iterator[None]:
    """Steps wait for each other, or the next begins before the last has been committed."""
    with patch.object(Runner, "ahead", request.param):
        yield


def some() -> list[Ask]:
    """Two long ones that begin alike, and short ones beside them."""
    rng = random.Random(3)
    common = [rng.randrange(tiny.VOCAB) for _ in range(70)]
    more = [rng.randrange(tiny.VOCAB) for _ in range(40)]
    return [
        Ask((*common, *more), 12),
        Ask((*common, *more[:9]), 6, at=9),
        Ask(tuple(common[:50]), 6, at=2),
        Ask((5, 6, 7), 20, at=1),
    ]


@pytest.mark.parametrize("disk", [None, "512KiB"], ids=["host", "disk"])
def test_two_ranks_say_what_one_does(disk: str | None, tmp_path: Path) -> None:
    beyond: dict[str, object] = {
        "host_kv_memory": (12 if disk else 100) * layout_of("llama", BLOCK).block_bytes // 2
    }
    if disk:
        beyond |= {"disk_kv_memory": disk, "kv_directory": tmp_path, "kv_store": "off"}
    settings = {**SETTINGS, "kv_blocks": 8, "block_size": BLOCK, "max_step_tokens": 24, "kv_tile": 32}
    with LLM(tiny.checkpoint("llama"), **settings, **beyond, tensor_parallel=2) as llm:  # type: ignore[arg-type]
        found = answers(llm, some())
        stats = llm.stats().kv
    assert stats is not None
    assert stats.copied > 0
    assert bool(stats.written) == bool(disk)
    check("llama", some(), found)


def test_prefixes_go_to_the_host_and_come_back_on_two_ranks() -> None:
    """Short ones, by transfers: reported when they have landed on both."""
    ask = Ask(tuple(range(1, 50)), 5)
    settings = {**SETTINGS, "kv_blocks": 8, "block_size": BLOCK, "max_step_tokens": 24, "kv_store": "eager"}
    room = 40 * layout_of("llama", BLOCK).block_bytes // 2
    with LLM(tiny.checkpoint("llama"), **settings, host_kv_memory=room, tensor_parallel=2) as llm:  # type: ignore[arg-type]
        first = answers(llm, [ask])
        llm.booted.engine.tend(5.0)
        llm.booted.engine.scheduler.ledger.forget()
        again = answers(llm, [ask])
        tiers = llm.stats().tiers
    check("llama", [ask, ask], [*first, *again])
    assert tiers is not None
    assert tiers.down.bytes > 0
