"""What tests cost: a plugin for pytest that writes processor and wall seconds of each, with those of
processes that have ended in it.

PYTHONPATH=tools OMP_NUM_THREADS=1 COSTS=/tmp/costs pytest -p test_costs -n 2 tests     a line of JSON a test, in a file for each worker
python tools/test_costs.py /tmp/costs --out costs.json                their sums by file, and the costliest tests

A server that several tests share counts in the test that ends it.
"""

import argparse
import json
import os
import resource
import time
from collections.abc import Generator
from dataclasses import asdict
from pathlib import Path

import pytest

from penstock.bench.machine import machine

MOST = 60


def pytest_configure() -> None:
    Path(os.environ["COSTS"]).mkdir(parents=True, exist_ok=True)


def _used() -> float:
    return sum(
        sum(resource.getrusage(whose)[:2]) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    before, begin = _used(), time.perf_counter()
    result = yield
    told = {
        "test": item.nodeid,
        "cpu_s": round(_used() - before, 3),
        "wall_s": round(time.perf_counter() - begin, 3),
    }
    with (Path(os.environ["COSTS"]) / f"{os.environ.get('PYTEST_XDIST_WORKER', 'main')}.jsonl").open(
        "a"
    ) as file:
        file.write(json.dumps(told) + "\n")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("costs", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    rows = [json.loads(line) for file in sorted(asked.costs.glob("*.jsonl")) for line in file.open()]
    files: dict[str, list[float]] = {}
    for row in rows:
        found = files.setdefault(row["test"].partition("::")[0], [0, 0.0, 0.0])
        found[:] = found[0] + 1, found[1] + row["cpu_s"], found[2] + row["wall_s"]
    ordered = sorted(files.items(), key=lambda item: -item[1][1])
    report = {
        "environment": asdict(machine()),
        "bench": "test_costs",
        "tests": len(rows),
        "cpu_s": round(sum(row["cpu_s"] for row in rows), 1),
        "wall_s": round(sum(row["wall_s"] for row in rows), 1),
        "by_file": [
            {"file": file, "tests": n, "cpu_s": round(cpu, 1), "wall_s": round(wall, 1)}
            for file, (n, cpu, wall) in ordered
        ],
        "costliest": sorted(rows, key=lambda row: -row["cpu_s"])[:MOST],
    }
    asked.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{report['tests']} tests, {report['cpu_s']} s of processors, {report['wall_s']} s of workers")


if __name__ == "__main__":
    main()
