"""The replay against a search over all that a cache could do, and against what is known of a real
workload."""

import json
import os
from collections.abc import Sequence
from functools import cache
from itertools import chain, combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.bench.traces.simulation import (
    BLOCK_BYTES,
    POLICIES,
    CacheBench,
    Fifo,
    Learned,
    LeastRecent,
    SecondUse,
    TracePart,
    measure,
    read,
    replay,
)
from penstock.cli import bench_options
from penstock.cli.main import main

# -- against a reference on tiny traces
# ---------------------------------------------------------------------------------------


@st.composite
def traces(draw: st.DrawFn) -> list[list[int]]:
    """Requests as paths from a root of a binary tree: of a block `key` the parent is `key // 2`."""
    ends = draw(st.lists(st.integers(1, 31), min_size=1, max_size=8))
    return [[end >> up for up in reversed(range(end.bit_length()))] for end in ends]


def most_hits(trace: Sequence[Sequence[int]], blocks: int) -> int:
    """By trying every set of blocks that a cache could keep after each request."""

    @cache
    def best(at: int, there: frozenset[int]) -> int:
        if at == len(trace):
            return 0
        keys = trace[at]
        found = next((depth for depth, key in enumerate(keys) if key not in there), len(keys))
        could = there | set(keys)
        sizes = range(
            min(blocks, len(could)), min(blocks, len(could)) + 1
        )  # more blocks never have fewer hits
        kept = chain.from_iterable(combinations(sorted(could), size) for size in sizes)
        return found + max(best(at + 1, frozenset(one)) for one in kept)

    return best(0, frozenset())


@given(traces(), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_the_clairvoyant_has_the_most_hits_there_can_be(trace: list[list[int]], blocks: int) -> None:
    asked = sum(map(len, trace))
    assert round(replay(trace, POLICIES["clairvoyant"](trace, blocks), blocks) * asked) == most_hits(
        trace, blocks
    )


@given(st.lists(st.integers(1, 200), min_size=1, max_size=60), st.integers(1, 12))
@settings(max_examples=100, deadline=None)
def test_none_beats_the_clairvoyant(ends: list[int], blocks: int) -> None:
    trace = [[end >> up for up in reversed(range(end.bit_length()))] for end in ends]
    hits = {name: replay(trace, make(trace, blocks), blocks) for name, make in POLICIES.items()}
    assert hits["clairvoyant"] == max(hits.values())


@given(traces(), st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_lru_is_the_list_of_what_was_used_last(trace: list[list[int]], blocks: int) -> None:
    used: list[int] = []
    hits = 0
    for keys in trace:
        hits += next((depth for depth, key in enumerate(keys) if key not in used), len(keys))
        used = [*keys, *(key for key in used if key not in keys)][:blocks]
    assert round(replay(trace, LeastRecent(), blocks) * sum(map(len, trace))) == hits


def test_hits_end_at_the_first_block_that_is_not_there() -> None:
    fifo = [[1, 2, 3], [4], [1, 2, 3]]
    assert replay(fifo, Fifo(), 3) == 0, "1 was given up for 4, so 2 and 3 are of no use"
    assert replay(fifo, LeastRecent(), 3) == 2 / 7, "only 3 was given up"


def test_second_use_has_what_was_seen_twice() -> None:
    assert replay([[1, 2], [3, 4], [1, 2], [5], [1, 2]], SecondUse(), 2) == 2 / 9


def test_requests_before_the_first_that_counts_only_fill() -> None:
    trace = [[1, 2], [1, 2], [3], [1, 2, 3]]
    assert [replay(trace, LeastRecent(), 9, first) for first in range(4)] == [5 / 8, 5 / 6, 3 / 4, 3 / 3]


# -- a real workload
# ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def conversations(shared_data: Path) -> list[list[int]]:
    return read(shared_data / "mooncake_trace" / "conversation_trace.jsonl")


def test_the_trace_is_whole(conversations: list[list[int]]) -> None:
    assert (len(conversations), sum(map(len, conversations))) == (12_031, 288_500)


@pytest.mark.parametrize(
    ("name", "gib", "percent"),
    [
        *zip(["lru"] * 5, [128, 256, 1024, 2048, 4096], [5.5, 8.8, 26.6, 33.5, 35.9], strict=True),
        *zip(["second-use"] * 3, [1024, 2048, 4096], [21.2, 21.3, 21.3], strict=True),
        ("lru", 1 << 20, 36.6),
        ("clairvoyant", 1024, 36.6),
    ],
)
def test_figures_known_from_elsewhere(
    conversations: list[list[int]], name: str, gib: int, percent: float
) -> None:
    blocks = (gib << 30) // BLOCK_BYTES
    assert 100 * replay(conversations, POLICIES[name](conversations, blocks), blocks) == pytest.approx(
        percent, abs=0.06
    )


@pytest.mark.parametrize(
    ("gib", "requests"),
    [(128, 12_031), (256, 12_031), (4096, 12_031)] if "PENSTOCK_THOROUGH" in os.environ else [(128, 4_000)],
)
def test_it_has_the_most_of_all_that_know_no_future(
    conversations: list[list[int]], gib: int, requests: int
) -> None:
    """By the second half, with the first to learn from."""
    conversations = conversations[:requests]
    blocks, first = (gib << 30) // BLOCK_BYTES, len(conversations) // 2
    others = [
        replay(conversations, POLICIES[name](conversations, blocks), blocks, first)
        for name in ("fifo", "lru", "second-use")
    ]
    learned = replay(conversations, Learned(blocks), blocks, first)
    assert learned >= max(others)
    if gib <= 256:
        best = replay(conversations, POLICIES["clairvoyant"](conversations, blocks), blocks, first)
        assert learned >= max(others) + 0.05 * (best - max(others))


# -- the report
# ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    lines = ([1, 2, 3], [1, 2, 4], [5], [1, 2, 3])
    path.write_text("".join(json.dumps({"timestamp": 0, "hash_ids": keys}) + "\n" for keys in lines) + "\n")
    return path


def test_what_is_reported(trace: Path) -> None:
    report = measure(
        CacheBench(trace, capacities=(5 * 64, 3 * 64), block_bytes=64, part=TracePart.SECOND_HALF, cost=64)
    )
    assert (report.requests, report.asked, report.distinct) == (4, 10, 5)
    assert [(row.capacity, row.blocks, row.hits["lru"]) for row in report.rows] == [
        (192, 3, 2 / 4),
        (320, 5, 3 / 4),
        (None, 5, 3 / 4),
    ]
    assert report.rows[-1].hits == dict.fromkeys(POLICIES, 3 / 4) | {"second-use": 2 / 4}
    assert report.cost
    assert report.cost.bytes_per_block > 0 < report.cost.microseconds
    assert json.loads(report.line())["rows"][1]["hits"]["clairvoyant"] == 3 / 4
    assert "320 B" in str(report)


def test_the_command(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    arguments = [
        str(trace),
        "--rooms",
        "192MiB,1GiB",
        "--policies",
        "lru,prospect",
        "--cost",
        "0",
        "--out",
        str(out),
    ]
    assert main(["bench", "trace", *arguments, "--json"]) == 0
    line = capsys.readouterr().out
    assert out.read_text() == line
    assert [list(row["hits"]) for row in json.loads(line)["rows"]] == [["lru", "prospect"]] * 3
    assert main(["bench", "trace", *arguments]) == 0
    shown = capsys.readouterr()
    assert shown.out.endswith(f"\n\n{line}")
    assert "1.00 GiB" in shown.out
    assert "16 blocks: lru" in shown.err


def test_all_policies_can_be_named() -> None:
    assert list(POLICIES) == bench_options._POLICIES


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            '{"hash_ids": [1]}\n[1]\n',
            "line 2 of PATH has no hash_ids, a list of whole numbers; give a trace that has them on each "
            "line",
        ),
        (
            '{"hash_ids": [1, "a"]}',
            "line 1 of PATH has no hash_ids, a list of whole numbers; give a trace that has them on each "
            "line",
        ),
        ("{", "line 1 of PATH is not JSON; give a trace with one request, a JSON object, on each line"),
        (
            '{"hash_ids": [1, 2, 1]}',
            "line 1 of PATH names a block twice, which hashes that cover all earlier blocks never do; give "
            "a trace with such chained hash_ids",
        ),
        ("\n", "the trace PATH asks for no block; each of its lines must be JSON with hash_ids"),
    ],
)
def test_what_is_no_trace_is_refused(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(content)
    assert main(["bench", "trace", str(path)]) == 2
    assert capsys.readouterr().err == f"penstock: error: {message.replace('PATH', str(path))}\n"


def test_a_room_without_a_block_is_refused(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "trace", str(trace), "--rooms", "1KiB"]) == 2
    said = "a room of 1.00 KiB holds no block of 64.0 MiB; give larger --rooms, or smaller --block-bytes"
    assert said in capsys.readouterr().err
