"""The trace as whoever opens it finds it: parsed from the file."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Barrier
from time import perf_counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.errors import ConfigError
from penstock.base.trace import Trace

Entry = dict[str, object]
UNPRIVILEGED = """
import os
from pathlib import Path
from penstock.base.errors import ConfigError
from penstock.base.trace import Trace
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
try:
    Trace.check(Path("trace.json"))
except ConfigError as error:
    print(error)
"""


class Read:
    """A written trace."""

    def __init__(self, trace: Trace) -> None:
        with TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            trace.write(path)
            whole = json.loads(path.read_text())
        self.other = whole["otherData"]
        self.entries: list[Entry] = whole["traceEvents"]
        self.threads = {
            entry["tid"]: entry["args"]["name"] for entry in self.entries if entry["name"] == "thread_name"
        }
        self.order = {
            entry["tid"]: entry["args"]["sort_index"]
            for entry in self.entries
            if entry["name"] == "thread_sort_index"
        }
        self.process = [entry["args"]["name"] for entry in self.entries if entry["name"] == "process_name"]
        self.counters = [entry for entry in self.entries if entry["ph"] == "C"]
        self.spans = [entry for entry in self.entries if entry["ph"] == "X"]

    @property
    def tracks(self) -> list[str]:
        """From top to bottom."""
        return [
            self.threads[thread] for thread in sorted(self.threads, key=lambda thread: self.order[thread])
        ]

    def on(self, track: str) -> list[Entry]:
        return [span for span in self.spans if self.threads[span["tid"]] == track]


def test_a_span_is_a_complete_event_in_microseconds_since_the_start() -> None:
    before = perf_counter()
    trace = Trace()
    start = perf_counter() + 1
    trace.span("compute", "layer 0 ffn", start, start + 0.25, bytes=4096, pieces="all")
    read = Read(trace)
    [span] = read.spans
    assert span["name"] == "layer 0 ffn"
    assert span["args"] == {"bytes": 4096, "pieces": "all"}
    assert span["dur"] == 250_000
    assert 1e6 <= span["ts"] <= (start - before) * 1e6 + 0.001
    assert read.tracks == ["compute"]
    assert read.process == ["penstock"]
    assert read.other == {"events": 1, "dropped": 0}
    assert len({entry["pid"] for entry in read.entries}) == 1


def test_what_began_before_the_trace_is_its_start() -> None:
    began = perf_counter()
    trace = Trace()
    trace.span("compute", "early", began - 1, began)
    trace.span("compute", "late", began + 1, began + 2)
    assert [(span["ts"], span["dur"]) for span in Read(trace).spans] == [(0, 1e6), (2e6, 1e6)]


def test_tracks_stand_in_an_order_that_does_not_depend_on_who_was_first() -> None:
    trace = Trace()
    for track in ("zebra", "disk read 10", "host to device", "disk read 2", "apple", "stalls", "compute"):
        trace.span(track, "x", 1.0, 2.0)
    assert Read(trace).tracks == [
        "compute",
        "stalls",
        "host to device",
        "disk read 2",
        "disk read 10",
        "apple",
        "zebra",
    ]


def test_a_counter_is_a_graph_beside_the_tracks() -> None:
    trace = Trace()
    now = perf_counter()
    trace.counter("ring", now + 2, ready=1, coming=2.5)
    trace.counter("ring", now + 1, ready=0, coming=0)
    trace.span("compute", "x", now, now + 1)
    read = Read(trace)
    assert [entry["args"] for entry in read.counters] == [
        {"ready": 0, "coming": 0},
        {"ready": 1, "coming": 2.5},
    ]
    assert read.counters[1]["ts"] - read.counters[0]["ts"] == pytest.approx(1e6)
    assert read.tracks == ["compute"]


def test_an_empty_trace_can_be_read() -> None:
    read = Read(Trace())
    assert (read.spans, read.tracks, read.process) == ([], [], ["penstock"])


def test_readers_at_once_have_lanes_and_one_reader_has_none() -> None:
    trace = Trace()
    for begin, end in ((0, 4), (1, 2), (1.5, 3), (2, 5), (4, 6)):
        trace.span("disk read", f"{begin}-{end}", 100 + begin, 100 + end)
    for begin in range(5):
        trace.span("compute", str(begin), 100 + begin, 101 + begin)
    read = Read(trace)
    assert read.tracks == ["compute", "disk read 1", "disk read 2", "disk read 3"]
    assert [span["name"] for span in read.on("disk read 1")] == ["0-4", "4-6"]
    assert [span["name"] for span in read.on("disk read 2")] == ["1-2", "2-5"]
    assert [span["name"] for span in read.on("disk read 3")] == ["1.5-3"]
    assert len(read.on("compute")) == 5


TIMES = st.tuples(st.integers(0, 40), st.integers(0, 12)).map(
    lambda pair: (pair[0] / 7, (pair[0] + pair[1]) / 7)
)


@given(st.lists(TIMES, max_size=40), st.sampled_from([0, 10**6]))
def test_no_lane_has_two_spans_at_a_time_and_none_is_there_for_nothing(
    times: list[tuple[float, float]], base: int
) -> None:
    trace = Trace()
    for number, (begin, end) in enumerate(times):
        trace.span("disk read", "piece", base + begin, base + end, number=number)
    read = Read(trace)
    assert sorted(span["args"]["number"] for span in read.spans) == list(range(len(times)))
    found = {span["args"]["number"]: span for span in read.spans}
    start = min((begin for begin, _ in times), default=0)
    for number, (begin, end) in enumerate(times):
        if base + start < 1:  # else the trace's own beginning is the earlier one
            assert found[number]["ts"] == pytest.approx((begin - start) * 1e6, abs=0.01)
        assert found[number]["dur"] == pytest.approx((end - begin) * 1e6, abs=0.01)
    for track in read.tracks:
        spans = sorted(read.on(track), key=lambda span: (span["ts"], span["dur"]))
        assert all(
            round((one["ts"] + one["dur"]) * 1000) <= round(next["ts"] * 1000)
            for one, next in pairwise(spans)
        )
    at_once = max((sum(b <= begin < max(e, b + 1e-9) for b, e in times) for begin, _ in times), default=0)
    assert len(read.tracks) <= at_once


def test_spans_of_many_threads_at_once_are_all_there() -> None:
    trace, threads, each = Trace(), 8, 20_000
    together = Barrier(threads)

    def work(thread: int) -> None:
        together.wait()
        for number in range(each):
            trace.span(f"disk read {thread}", "piece", number, number + 1, number=number)
            if number % 100 == 0:
                trace.counter(f"counter {thread}", number, value=number)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
    read = Read(trace)
    assert read.other == {"events": threads * (each + each // 100), "dropped": 0}
    assert read.tracks == [f"disk read {thread}" for thread in range(threads)]
    for thread in range(threads):
        assert [span["args"]["number"] for span in read.on(f"disk read {thread}")] == list(range(each))
    assert Counter(entry["name"] for entry in read.counters) == {
        f"counter {thread}": each // 100 for thread in range(threads)
    }


def test_a_trace_is_bounded_and_says_what_it_dropped() -> None:
    trace = Trace(most=3)
    for number in range(1500):
        trace.span("compute", str(number), number, number + 1)
    trace.counter("ring", 0, ready=1)
    read = Read(trace)
    assert [span["name"] for span in read.spans] == ["0", "1", "2"]
    assert read.counters == []
    assert read.other == {"events": 3, "dropped": 1498}
    assert read.process == ["penstock (1,498 later events dropped)"]


def test_what_many_threads_drop_is_counted() -> None:
    threads, each, most = 8, 5_000, 1_000
    trace, together = Trace(most), Barrier(threads)

    def work(thread: int) -> None:
        together.wait()
        for number in range(each):
            trace.span(str(thread), "x", number, number + 1)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
    read = Read(trace)
    assert most <= len(read.spans) < most + threads
    assert read.other == {"events": len(read.spans), "dropped": threads * each - len(read.spans)}


def test_recording_goes_on_while_a_trace_is_written(tmp_path: Path) -> None:
    trace = Trace()
    trace.span("compute", "first", 1, 2)
    trace.write(tmp_path / "one.json")
    trace.span("compute", "second", 2, 3)
    trace.write(tmp_path / "two.json")
    one, two = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "two"))
    assert (one["otherData"]["events"], two["otherData"]["events"]) == (1, 2)


def test_where_no_file_can_be_is_said_early_and_late(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, reason in (
        (tmp_path / "missing" / "trace.json", "there is no directory"),
        (tmp_path / "file" / "trace.json", "there is no directory"),
        (tmp_path, "that is a directory"),
    ):
        with pytest.raises(ConfigError, match=reason) as refused:
            Trace.check(path)
        assert str(path) in str(refused.value)
        with pytest.raises(ConfigError, match="the trace cannot be written to"):
            Trace().write(path)
    Trace.check(tmp_path / "file")
    Trace.check(tmp_path / "new.json")
    assert not (tmp_path / "new.json").exists()


@pytest.mark.parametrize("name", ["proc/trace.json", "n" * 300, "link"])
def test_what_only_making_a_file_tells_is_said_early(tmp_path: Path, name: str) -> None:
    (tmp_path / "proc").symlink_to("/proc")
    (tmp_path / "link").symlink_to("missing/trace.json")
    with pytest.raises(
        ConfigError,
        match=r"cannot be written to .*: (No such file or directory|File name too long|.* permitted); ",
    ):
        Trace.check(tmp_path / name)


def test_looking_whether_a_trace_can_be_written_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text("old")
    (tmp_path / "link").symlink_to("new.json")
    for name in ("old.json", "link", "new.json"):
        Trace.check(tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == ["link", "old.json"]
    assert (tmp_path / "old.json").read_text() == "old"


def test_where_nothing_may_be_written_is_said_early(tmp_path: Path) -> None:
    """In a process of its own, which root, who may write everywhere, leaves for nobody. The path is relative,
    as others need not see the folder's parents."""
    tmp_path.chmod(0o555)
    said = subprocess.run(
        [sys.executable, "-c", UNPRIVILEGED], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert said.returncode == 0, said.stderr
    assert re.fullmatch(r".*trace\.json.* not permitted.*\n", said.stdout), said.stdout
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_a_full_disk_is_said() -> None:
    with pytest.raises(ConfigError, match=r"cannot be written to /dev/full: .*[Nn]o space"):
        Trace().write(Path("/dev/full"))
