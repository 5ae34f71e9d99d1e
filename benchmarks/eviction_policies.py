"""Scores eviction policies and disk admission on generated workloads, and on recorded traces given by name.

    python benchmarks/eviction_policies.py --seeds 0,1 --out docs/results/cpu_eviction.json [--trace
    conversation_trace.jsonl]

The second half of each workload counts. Rooms are parts of the distinct blocks: 1/128 to 1/4.
"""

import argparse
import os
import sys
import time
from multiprocessing import Pool
from pathlib import Path

from recording import need_commit, write

from penstock.bench.traces.simulation import POLICIES, Trace, read, replay
from penstock.bench.traces.tiered import DiskAdmission, serve
from penstock.bench.traces.workloads import HELD_OUT, TUNED, WORKLOADS, generate

_PARTS = (128, 64, 32, 16, 8, 4)
_SIMPLE = ("fifo", "lru", "second-use")
_DISK_ROOMS = 3
"""Blocks of the disk for each of the host."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--workloads", default=",".join(WORKLOADS), help="names, separated by commas; empty: none"
    )
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--requests", type=int, default=6000)
    parser.add_argument(
        "--trace",
        type=Path,
        action="append",
        default=[],
        help="a recorded trace; rooms are 2048 blocks and more",
    )
    parser.add_argument("--disk", action="store_true", help="score disk admission too, at the third room")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    need_commit(given.out)
    names, seeds = list(filter(None, given.workloads.split(","))), list(map(int, given.seeds.split(",")))
    jobs = [(name, seed, given.requests, given.disk and seed == seeds[0]) for name in names for seed in seeds]
    jobs += [(str(path), None, 0, given.disk) for path in given.trace]
    with Pool(os.cpu_count()) as pool:
        rows = [row for some in pool.imap(_rows, jobs, chunksize=1) for row in some]
    worst: dict[str, object] = {}
    for group in ("tuned", "held-out", "recorded"):
        of = [row for row in rows if row["group"] == group]
        if of:
            row = min(of, key=lambda row: float(str(row["behind"])))
            worst[group] = {name: row[name] for name in ("workload", "seed", "blocks", "behind")}
    result: dict[str, object] = {
        "requests": given.requests,
        "counts": "second half",
        "tuned": TUNED,
        "held_out": HELD_OUT,
        "worst_points_against_best_simple": worst,
        "rows": rows,
    }
    if given.out:
        write(given.out, result)
    print(worst)


def _rows(job: tuple[str, int | None, int, bool]) -> list[dict[str, object]]:
    name, seed, requests, disk = job
    if seed is None:
        path = Path(name)
        return _score(path.stem, "recorded", 0, read(path), [2048 << power for power in range(6)], disk)
    trace = [request.keys for request in generate(name, seed, requests)]
    distinct = len({key for keys in trace for key in keys})
    group = "tuned" if name in TUNED else "held-out"
    return _score(name, group, seed, trace, [distinct // part for part in _PARTS], disk)


def _score(
    name: str, group: str, seed: int, trace: Trace, rooms: list[int], disk: bool
) -> list[dict[str, object]]:
    first, asked, rows = len(trace) // 2, sum(map(len, trace)), list[dict[str, object]]()
    for room, blocks in enumerate(rooms):
        hits, costs = dict[str, float](), dict[str, float]()
        for policy, make in POLICIES.items():
            began = time.process_time()
            hits[policy] = round(100 * replay(trace, make(trace, blocks), blocks, first), 2)
            costs[policy] = round(1e6 * (time.process_time() - began) / asked, 2)
        behind = round(hits["adaptive"] - max(hits[simple] for simple in _SIMPLE), 2)
        row: dict[str, object] = {"workload": name, "group": group, "seed": seed, "blocks": blocks}
        row |= {"hits": hits, "cpu_us_per_block": costs, "behind": behind}
        if disk and room == 2:
            row["disk"] = _disk(trace, blocks, _DISK_ROOMS * blocks, first)
        rows.append(row)
        cells = " ".join(f"{policy} {rate:.1f}" for policy, rate in hits.items())
        print(
            f"{group} {name} seed {seed}, {blocks} blocks: {cells}; against the best simple policy "
            f"{behind:+.2f}",
            flush=True,
        )
        if "disk" in row:
            print(f"  disk {row['disk']}", flush=True)
    return rows


def _disk(trace: Trace, host: int, disk: int, first: int) -> dict[str, object]:
    bound = 100 * replay(trace, POLICIES["clairvoyant"](trace, host + disk), host + disk, first)
    scored: dict[str, object] = {"host_blocks": host, "disk_blocks": disk, "optimum_of_both": round(bound, 2)}
    for admission in DiskAdmission:
        served = serve(trace, host, disk, admission, first)
        each = served.written_per_hit
        scored[str(admission)] = {
            "host": round(100 * served.host / served.asked, 2),
            "disk": round(100 * served.disk / served.asked, 2),
            "written": served.written,
            "written_per_hit": None if each is None else round(each, 3),
        }
    return scored


if __name__ == "__main__":
    sys.exit(main())
