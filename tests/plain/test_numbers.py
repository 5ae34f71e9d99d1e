"""README's table says what docs/results says, and results say of which sources and machine they are."""

import copy
import importlib.util
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "results"
FILES = sorted(FOLDER.glob("*.json"))
COMMIT = re.compile(r"[0-9a-f]{7,40}\+?|unknown: .{20,}")


@pytest.fixture(scope="module")
def numbers() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("numbers_table", ROOT / "tools" / "numbers_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def dicts(whole: object) -> Iterator[Mapping[str, Any]]:
    if isinstance(whole, Mapping):
        yield whole
    for one in whole.values() if isinstance(whole, Mapping) else whole if isinstance(whole, list) else ():
        yield from dicts(one)


def test_readme_has_the_table_that_the_results_make(numbers: ModuleType) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme == numbers.written(readme, numbers.Results(FOLDER)), "python tools/numbers_table.py --write"


@pytest.mark.parametrize(
    ("file", "path", "other"),
    [
        ("h200_execution", ("2026-11-23, gaps explained", "decode", "8B, batch 64", "ms", "median"), 9.0),
        ("h200_execution", ("2026-11-23, gaps explained", "decode", "8B, batch 64", "batch"), 32),
        ("h200_execution", ("2026-11-23, gaps explained", "decode", "8B, batch 64", "context"), 1024),
        ("h200_execution", ("2026-11-23, gaps explained", "decode", "8B, batch 64", "dtype"), "float16"),
        (
            "h200_tensor_parallel",
            ("2026-11-28, the ring that is taken", "stream", "2 ranks", "streaming", "copied_per_pass"),
            14e9,
        ),
        ("h200_weight_streaming", ("machine", "batch_32", "context"), 16),
        ("h200_prefix_tiers", ("environment", "devices"), [{"name": "NVIDIA H100 80GB HBM3"}]),
        ("cpu_against_transformers", ("requests",), 16),
    ],
    ids=lambda one: one if isinstance(one, str) else None,
)
def test_another_number_or_condition_makes_another_table(
    numbers: ModuleType, file: str, path: tuple[str, ...], other: object
) -> None:
    results = numbers.Results(FOLDER)
    before = numbers.table(results)
    changed = copy.deepcopy(results[file])
    place = changed
    for name in path[:-1]:
        place = place[name]
    assert place[path[-1]] != other
    place[path[-1]] = other
    results._files[file] = changed
    assert numbers.table(results) != before


def test_a_run_above_its_caps_is_refused(numbers: ModuleType) -> None:
    results = numbers.Results(FOLDER)
    results._files["h200_weight_streaming"]["machine"]["over"] = ["batch 1: device 16.1GiB of 16GiB"]
    with pytest.raises(AssertionError):
        numbers.table(results)


RECORD = {
    "seconds": [2.0, 1.0, 3.0],
    "median_s": 2.0,
    "least_s": 1.0,
    "most_s": 3.0,
    "warm": True,
    "falling": False,
}
MACHINE = {
    "date": "2027-01-01",
    "devices": [{"name": "NVIDIA H100 80GB HBM3"}],
    "cores": 16,
    "processor": "x",
}


def test_what_is_measured_anew_takes_the_place_of_what_was_not_warm(numbers: ModuleType) -> None:
    """In the form that benchmarks/long_contexts.py and weight_streaming.py write."""
    results = numbers.Results(FOLDER)
    side = {"prefill": RECORD, "decode": RECORD | {"warm": False}, "peak": 5 << 30}
    ours = {"prefill": RECORD, "decode": RECORD, "peak": 5 << 30, "prefill_ratio": 1.25, "decode_ratio": 3.5}
    peer = {"environment": MACHINE, "tokens": 65536, "transformers": side, "penstock, with its memory": ours}
    results._files["h100_long_contexts"] = {"peer": peer}
    offload = {
        "environment": MACHINE,
        "layers": 16,
        "layers_kept": 6,
        "accelerate": RECORD,
        "penstock": RECORD,
        "ratio": 6.5,
    }
    batch = RECORD | {"batch": 32, "context": 512, "read_per_pass": 20 << 30}
    caps = {"device_memory": "16GiB", "host_memory": "100GiB"}
    machine = {"environment": MACHINE, "caps": caps, "layers": 80, "over": [], "disk": 2e9, "batch_32": batch}
    results._files["h100_weight_streaming"] = {"offload": offload, "machine": machine}
    lines = numbers.table(results).splitlines()
    [prefill, decode] = [line for line in lines if "transformers, offloaded cache" in line]
    assert (
        "64K of context in chunks, prefill, 5.0 GiB beside the weights | 1 H100 | 2.00 s | 1.00 s to 3.00 "
        "s, 3 runs |" in prefill
    )
    assert prefill.endswith("| 1.25 |")
    assert "not warm" in decode
    [host] = [line for line in lines if "accelerate" in line]
    assert "10 of 16 in host memory, decode, batch 1 | 1 H100 |" in host
    assert host.endswith("| 6.50 |")
    [eighty] = [line for line in lines if line.startswith("| 80 layers")]
    assert "batch 32, 512 tokens of context each | 1 H100 | 2.00 s |" in eighty


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_results_say_of_which_sources_and_machine_they_are(file: Path) -> None:
    whole = json.loads(file.read_text(encoding="utf-8"))
    said = [one["commit"] for one in dicts(whole) if "commit" in one]
    assert said
    assert [one for one in said if not isinstance(one, str) or not COMMIT.fullmatch(one)] == []
    parts = [whole, *[one for one in whole.values() if isinstance(one, dict)]]
    assert any(
        isinstance(one.get(name), dict) and "commit" in one[name]
        for one in parts
        for name in ("environment", "machine")
    )


def test_a_cell_has_one_number_and_one_unit(numbers: ModuleType) -> None:
    for row in numbers.rows(numbers.Results(FOLDER)):
        for value in (row.penstock, row.theirs):
            assert re.fullmatch(
                r"([\d,.]+ (tokens/s|ms|s|GB/s|MiB))?|[\d,]+ of [\d,]+ answers exact", value.text
            ), row
        assert re.fullmatch(r"(\d+(\.\d+)?)?", row.ratio), row
