"""Blocks of two ranks that outlive the process: each has a store of its own part of them, and what only one
of them has is not there. Tokens are those of one rank that computes all."""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest

pytest.importorskip("transformers")

import forks
import tiny
from crews import children
from far import SETTINGS, Ask, answers, check, layout_of
from penstock import LLM
from penstock.base.errors import DeviceError
from penstock.base.meter import TierStats
from penstock.kv.store.blocks import BlockStore
from penstock.kv.store.cachedir import survey
from penstock.kv.store.directory import locked
from penstock.kv.store.sizes import ENTRY_BYTES
from penstock.sched.rates import TransferRates
from penstock.worker.runner import Runner

BLOCK = 8
SHORT, LONG = Ask(tuple(range(1, 50)), 5), Ask(tuple(range(3, 96)) * 2, 5)


@pytest.fixture(autouse=True)
def _alike() -> Iterator[None]:
    """What can be loaded is, however fast things went before."""
    with (
        patch.object(BlockStore, "noted", lambda _: b""),
        patch.object(TransferRates, "computed_first", lambda *_: 0),
    ):
        yield


def keeping(folder: Path, **more: object) -> LLM:
    """An engine of two ranks that keeps its blocks in this folder."""
    room = {"host_kv_memory": 60 * layout_of("llama", BLOCK).block_bytes, "disk_kv_memory": "16MiB"}
    sizes = {"kv_blocks": 8, "block_size": BLOCK, "max_step_tokens": 24, "kv_tile": 32, "tensor_parallel": 2}
    place = {"kv_directory": folder / "kv", "cache": folder / "cache"}
    return LLM(tiny.checkpoint("llama"), **{**SETTINGS, **room, **sizes, **place, **more})  # type: ignore[arg-type]


def said(llm: LLM, asks: Sequence[Ask]) -> tuple[list[int], TierStats]:
    """How many tokens of each prompt came from the disk. Outputs are those of one rank that computes all."""
    found = answers(llm, asks)
    check("llama", asks, found)
    llm.booted.engine.tend(10.0)
    tiers = llm.stats().tiers
    assert tiers is not None
    return [one.cached_disk for one in found], tiers


def stores(folder: Path) -> dict[str, Path]:
    """The directories of the stores, by whose part of the KV they have."""
    paths = [path for path in (folder / "kv").iterdir() if path.is_dir()]
    found = {json.loads((path / "store.json").read_text())["part"]: path for path in paths}
    assert len(found) == len(paths), "two stores say that they have the same part"
    return found


@pytest.mark.parametrize(
    ("ask", "ahead"), [(SHORT, False), (LONG, True)], ids=["short, in turn", "long, ahead"]
)
def test_another_process_of_two_ranks_finds_what_one_has_kept(
    ask: Ask, ahead: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Runner, "ahead", ahead)
    with keeping(tmp_path) as llm:
        [fresh], tiers = said(llm, [ask])
        assert tiers.outward.bytes > tiers.outward.lost == 0
    assert fresh == 0
    assert set(stores(tmp_path)) == {"rank 0 of 2", "rank 1 of 2"}
    with keeping(tmp_path) as llm:
        [again], tiers = said(llm, [ask])
        assert tiers.inward.bytes > tiers.inward.lost == 0
    assert again == len(ask.prompt) // BLOCK * BLOCK
    with keeping(tmp_path, tensor_parallel=1) as llm:
        assert said(llm, [ask])[0] == [0], "one rank has read what two have written"
    assert len(stores(tmp_path)) == 3


@pytest.mark.parametrize("rank", [0, 1])
def test_a_block_is_there_when_every_rank_has_it(rank: int, tmp_path: Path) -> None:
    """The end of one rank's journal is missing, as where that process was killed before it wrote it."""
    with keeping(tmp_path) as llm:
        said(llm, [SHORT])
    path = stores(tmp_path)[f"rank {rank} of 2"]
    journal = path / "journal"
    before = survey(path).records
    data = journal.read_bytes()
    journal.write_bytes(data[: -2 * ENTRY_BYTES])
    assert survey(path).records == before - 2 > 0
    with keeping(tmp_path) as llm:
        ledger = llm.booted.engine.scheduler.tiers.disk
        assert ledger is not None
        assert len(ledger) == before - 2
    assert {survey(path).records for path in stores(tmp_path).values()} == {before - 2}
    with keeping(tmp_path) as llm:
        [found], tiers = said(llm, [SHORT])
        assert found < 48
        assert tiers.inward.lost == tiers.outward.lost == 0
    assert len({survey(path).records for path in stores(tmp_path).values()}) == 1
    with keeping(tmp_path) as llm:
        assert said(llm, [SHORT])[0] == [48]


def test_a_rank_that_is_killed_leaves_at_worst_a_miss(tmp_path: Path) -> None:
    forks.ready()
    before = set(children())
    with keeping(tmp_path) as llm:
        [follower] = set(children()) - before
        said(llm, [SHORT])
        threading.Timer(0.05, lambda: psutil.Process(follower).kill()).start()
        with pytest.raises(DeviceError, match="rank 1 of 2 was killed by SIGKILL"):
            answers(llm, [LONG] * 100)
    with keeping(tmp_path) as llm:
        found, tiers = said(llm, [SHORT, LONG])
        assert found[0] == 48
        assert tiers.inward.lost == 0


def test_where_one_rank_may_only_read_none_writes(tmp_path: Path) -> None:
    with keeping(tmp_path) as llm:
        said(llm, [SHORT])
    path = stores(tmp_path)["rank 1 of 2"]
    records = survey(path).records
    with closing(locked(path, make=False)), keeping(tmp_path) as llm:
        found, tiers = said(llm, [SHORT, LONG])
        assert found == [48, 0]
        assert tiers.outward.bytes == 0
    assert {survey(path).records for path in stores(tmp_path).values()} == {records}
