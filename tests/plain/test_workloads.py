"""Generated workloads are traces, and what the tiers serve of them is counted."""

from pathlib import Path

import pytest

from penstock.bench.traces.simulation import POLICIES, read, replay
from penstock.bench.traces.tiered import DiskAdmission, _request, serve
from penstock.bench.traces.workloads import HELD_OUT, TUNED, WORKLOADS, generate, write
from penstock.kv.ledger.blocks import BlockLedger
from penstock.kv.ledger.disk import DiskLedger
from penstock.kv.ledger.host import HostLedger
from penstock.sched.tiers import Tiers


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_a_trace_and_the_same_each_time(name: str, tmp_path: Path) -> None:
    made = generate(name, 3, 150)
    write(tmp_path / "trace.jsonl", made)
    assert (
        read(tmp_path / "trace.jsonl")
        == [request.keys for request in made]
        == [request.keys for request in generate(name, 3, 150)]
    )
    parents: dict[int, int | None] = {}
    for request in made:
        for parent, key in zip((None, *request.keys), request.keys, strict=False):
            assert parents.setdefault(key, parent) == parent, "a block's hash stands for all before it"


def test_what_is_tuned_on_is_not_reported_on() -> None:
    assert set(TUNED) | set(HELD_OUT) == set(WORKLOADS)
    assert not set(TUNED) & set(HELD_OUT)


def test_the_ledger_serves_what_the_policy_promises_and_the_disk_adds_to_it() -> None:
    trace = [request.keys for request in generate("sessions", requests=500)]
    served = {admission: serve(trace, 300, 900, admission, 250) for admission in DiskAdmission}
    alone = served[DiskAdmission.NONE]
    policy = replay(trace, POLICIES["adaptive"](trace, 300), 300, 250)
    # The ledger gives blocks up before new ones come, the policy's replay afterwards; that tells where a room
    # holds few requests.
    assert abs(alone.host / alone.asked - policy) <= 0.04
    assert (alone.disk, alone.written) == (0, 0)
    for admission in (DiskAdmission.ENGINE, DiskAdmission.ALL, DiskAdmission.FORESEEN):
        assert served[admission].disk > 0
    assert (
        served[DiskAdmission.FORESEEN].written
        < served[DiskAdmission.ENGINE].written
        <= served[DiskAdmission.ALL].written
    )
    engine, everything = served[DiskAdmission.ENGINE], served[DiskAdmission.ALL]
    assert engine.written / engine.disk < 0.67 * everything.written / everything.disk


def test_a_full_disk_takes_what_is_used_again() -> None:
    pages, host, disk = BlockLedger(4), HostLedger(40, block_size=512), DiskLedger(40, block_size=512)
    tiers = Tiers(pages, host, store="eager", disk=disk)
    prompts = [
        [number.to_bytes(16, "little") for number in range(start, start + 4)] for start in range(0, 2400, 4)
    ]
    for prompt in prompts:
        _request(tiers, prompt)
    assert len(disk) == 40
    assert not any(disk.find(key) for key in prompts[-1]), "nothing was ever asked for again"
    _request(tiers, prompts[-1])
    assert all(disk.find(key) for key in prompts[-1])
