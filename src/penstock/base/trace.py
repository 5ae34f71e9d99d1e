"""Record what ran when, on every link and stream, as a file that Perfetto (ui.perfetto.dev) and chrome://tracing
open.

Why this is safe from any thread: an event is a tuple of values that never change, and recording it is one
append to a list, which Python makes whole. Several threads that see the last free place at once may each take
it, so the bound is kept to within an event per thread. Beyond it, dropped events are counted under a lock.
`write` works on a copy, taken at once, so recording may go on.
"""

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from heapq import heappop, heappush
from pathlib import Path
from threading import Lock
from time import perf_counter

from penstock.base.errors import ConfigError

TRACKS = ("compute", "stalls", "host to device", "disk read")
"""Tracks stand in this order, from top to bottom; others follow by name."""
MOST = 1_000_000
"""Events kept, of about 400 bytes each."""

_PROCESS = 1
_Argument = str | int | float
_Event = tuple[str | None, str, float, float, dict[str, _Argument]]
"""Track (None: a counter), name, begin, end, arguments. A tuple, because most of the cost of a span would be
a class around it."""
_Placed = tuple[int, int, str, dict[str, _Argument]]
"""An event of a track: begin and end in nanoseconds, name, arguments."""


class Trace:
    """Records spans and counters from any thread, in seconds of perf_counter.

    Of more than `most` events the later ones are only counted.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._begin = perf_counter()
        self._events: list[_Event] = []
        self._dropped = 0
        self._dropping = Lock()

    @staticmethod
    def check(path: Path) -> None:
        """Raise ConfigError if a trace could not be written to `path`, before a run that would be lost.

        A file that is there stays as it is.
        """
        folder = path.parent
        try:
            if not folder.is_dir():
                raise _refusal(path, f"there is no directory {folder}")
            if path.is_dir():
                raise _refusal(path, "that is a directory")
            if not os.access(path if path.exists() else folder, os.W_OK):
                raise _refusal(path, "writing there is not permitted")
            if not path.exists():
                # Made and removed, for what permissions do not show: names that are too long, read-only file
                # systems. A symbolic link to nothing is followed.
                new = os.path.realpath(path)
                os.close(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC))
                os.unlink(new)
        except OSError as error:
            raise _refusal(path, error.strerror or str(error)) from error

    def span(self, track: str, name: str, begin: float, end: float, **args: str | int | float) -> None:
        """Record something that went on from `begin` to `end`.

        Spans of a track that overlap are shown in lanes, one below the other, never as parts of each
        other: what is part of something belongs on another track.
        """
        if len(self._events) < self._most:
            self._events.append((track, name, begin, end, args))
        else:
            self._drop()

    def counter(self, name: str, at: float, **values: int | float) -> None:
        """Record values that hold from `at` on; they are shown as a graph."""
        if len(self._events) < self._most:
            self._events.append((None, name, at, at, dict(values)))
        else:
            self._drop()

    @property
    def empty(self) -> bool:
        """Tell whether nothing was recorded."""
        return not self._events

    def write(self, path: Path) -> None:
        """Write everything up to now as Chrome trace JSON, in microseconds since the trace began.

        Raises ConfigError.
        """
        events, dropped = self._events.copy(), self._dropped
        try:
            with path.open("w", encoding="utf-8") as file:
                file.write(
                    '{"displayTimeUnit":"ms","otherData":'
                    + _json({"events": len(events), "dropped": dropped})
                    + ',"traceEvents":['
                )
                for number, entry in enumerate(self._entries(events, dropped)):
                    file.write((",\n" if number else "\n") + _json(entry))
                file.write("\n]}\n")
        except OSError as error:
            raise _refusal(path, error.strerror or str(error)) from error

    def _drop(self) -> None:
        with self._dropping:
            self._dropped += 1

    def _entries(self, events: list[_Event], dropped: int) -> Iterator[dict[str, object]]:
        # Whole nanoseconds: rounded any later, a span could end behind the beginning of the next.
        start = min([self._begin, *(event[2] for event in events)])
        tracks, counters = defaultdict[str, list[_Placed]](list), list[_Placed]()
        for track, name, begin, end, args in events:
            first = round((begin - start) * 1e9)
            placed = (first, max(round((end - start) * 1e9), first), name, args)
            (counters if track is None else tracks[track]).append(placed)
        yield _about(
            "process_name", 0, name=f"penstock ({dropped:,} later events dropped)" if dropped else "penstock"
        )
        thread = 0
        for track in sorted(tracks, key=_rank):
            lanes = _lanes(tracks[track])
            for number, lane in enumerate(lanes, start=1):
                thread += 1
                yield _about("thread_name", thread, name=track if len(lanes) == 1 else f"{track} {number}")
                yield _about("thread_sort_index", thread, sort_index=thread)
                for begin, end, name, args in lane:
                    duration = (end - begin) / 1000
                    yield {
                        "ph": "X",
                        "pid": _PROCESS,
                        "tid": thread,
                        "name": name,
                        "ts": begin / 1000,
                        "dur": duration,
                        "args": args,
                    }
        for at, _, name, values in sorted(counters, key=_begin_and_end):
            yield {"ph": "C", "pid": _PROCESS, "tid": 0, "name": name, "ts": at / 1000, "args": values}


def _lanes(spans: list[_Placed]) -> list[list[_Placed]]:
    """Return the spans in as few rows as possible, so that none overlap in a row.

    Each goes to the first row that is free.
    """
    lanes = list[list[_Placed]]()
    busy, free = list[tuple[int, int]](), list[int]()
    for span in sorted(spans, key=_begin_and_end):
        while busy and busy[0][0] <= span[0]:
            heappush(free, heappop(busy)[1])
        lane = heappop(free) if free else len(lanes)
        if lane == len(lanes):
            lanes.append([])
        lanes[lane].append(span)
        heappush(busy, (span[1], lane))
    return lanes


def _begin_and_end(span: _Placed) -> tuple[int, int]:
    return span[:2]


def _rank(track: str) -> tuple[int, list[tuple[int, str]]]:
    """Return a track's place: known tracks first, "disk read 2" before "disk read 10"."""
    known = re.sub(r" \d+$", "", track)
    parts = [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", track)]
    return TRACKS.index(known) if known in TRACKS else len(TRACKS), parts


def _about(what: str, thread: int, **args: _Argument) -> dict[str, object]:
    return {"ph": "M", "pid": _PROCESS, "tid": thread, "name": what, "args": args}


def _json(entry: Mapping[str, object]) -> str:
    return json.dumps(entry, separators=(",", ":"))


def _refusal(path: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"the trace cannot be written to {path}: {reason}; name a file in a directory that exists and that "
        "you may write to"
    )
