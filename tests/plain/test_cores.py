"""What is counted as taken by other processes, and what is left."""

from math import inf
from pathlib import Path

import pytest

from penstock.base.cores import (
    CoreLimits,
    CoreTimes,
    core_limits,
    counted,
    free_cores,
    overloaded,
    worth,
)


def shared(cores: int, threads: int, busy: int) -> float:
    """The cores that so many processes which never rest have beside threads that do not rest either."""
    return busy * min(1.0, cores / (threads + busy))


@pytest.mark.parametrize(("cores", "busy"), [(2, 1), (2, 2), (4, 1), (8, 1), (8, 3), (8, 8), (64, 2)])
def test_each_busy_process_gets_a_core_as_long_as_there_is_one(cores: int, busy: int) -> None:
    limits, taken = CoreLimits(frozenset(range(cores))), 0
    threads = [cores]
    for _ in range(20):
        taken = counted(taken, shared(cores, threads[-1], busy))
        threads.append(free_cores(limits, taken, 0.0))
    assert threads[-1] == threads[-2] == max(1, cores - busy)
    # They end, and all cores are free again.
    assert free_cores(limits, counted(taken, 0.05), 0.0) == cores


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_what_wavers_changes_nothing(taken: int) -> None:
    for others in (taken - 0.6, taken, taken + 0.3):
        assert counted(taken, others) == taken


@pytest.mark.parametrize(
    ("cores", "threads", "busy", "told"),
    [
        (2, 1, 1, False),
        (2, 1, 2, True),
        (2, 2, 1, True),
        (2, 2, 0, False),
        (1, 1, 1, True),
        (8, 1, 7, False),
        (8, 1, 8, True),
        (8, 8, 1, True),
        (64, 1, 64, True),
    ],
)
def test_an_overloaded_machine_is_one_with_more_work_than_cores(
    cores: int, threads: int, busy: int, told: bool
) -> None:
    limits = CoreLimits(frozenset(range(cores)))
    assert overloaded(limits, shared(cores, threads, busy), threads) is told


def test_a_container_has_the_cores_of_its_limit() -> None:
    eight = frozenset(range(8))
    assert free_cores(CoreLimits(eight), 0, 0.0) == 8
    assert free_cores(CoreLimits(eight, quota=2.5), 0, 0.0) == 2
    assert free_cores(CoreLimits(eight, quota=0.5), 0, 0.0) == 1
    assert free_cores(CoreLimits(eight, quota=4.0), 0, 1.0) == 3  # another process of the container
    assert free_cores(CoreLimits(eight, quota=4.0), 6, 0.0) == 2  # others on the machine


def test_times_are_of_the_cores_that_may_be_used(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text(
        "cpu  9999 9999 9999 9999 0 0 0 0 0 0\n"
        "cpu0 100 20 30 7000 50 1 2 3 40 0\n"
        "cpu1 9000 0 0 0 0 0 0 0 0 0\n"
        "cpu10 10 0 0 0 0 0 0 0 0 0\n"
        "intr 5\n"
    )
    found = CoreTimes.now(CoreLimits(frozenset({0, 10})), stat)
    assert found is not None
    assert found.busy == pytest.approx((100 + 20 + 30 + 1 + 2 + 3 + 10) / 100)
    assert CoreTimes.now(CoreLimits(frozenset({0})), tmp_path / "none") is None
    begun = CoreTimes(10.0, 5.0, 1.0, 2.0)
    assert CoreTimes(12.0, 8.0, 2.0, 2.5).others(begun) == (1.0, 0.0)  # 3 - 1 in two seconds
    assert CoreTimes(12.0, 8.0, 2.0, 5.0).others(begun) == (1.0, 1.0)


def test_the_least_limit_of_all_groups_counts(tmp_path: Path) -> None:
    inner = tmp_path / "groups" / "outer" / "inner"
    inner.mkdir(parents=True)
    own = tmp_path / "cgroup"
    own.write_text("12:cpu:/old\n0::/outer/inner\n")
    limits = core_limits(own, tmp_path / "groups")
    assert limits is not None
    assert (limits.quota, limits.usage) == (inf, None)
    (inner / "cpu.max").write_text("max 100000\n")
    (inner.parent / "cpu.max").write_text("150000 100000\n")
    (inner.parent / "cpu.stat").write_text("usage_usec 2500000\nuser_usec 1\n")
    limits = core_limits(own, tmp_path / "groups")
    assert limits is not None
    assert (limits.quota, limits.usage) == (1.5, inner.parent / "cpu.stat")
    found = CoreTimes.now(limits)
    assert found is not None
    assert found.group == 2.5


def test_more_work_is_worth_more_threads() -> None:
    assert worth(1e6, 1) == 1
    assert worth(27.8e6, 1) == 4
    assert worth(1e6, 16) == 2
    assert worth(400e6, 1) > worth(140e6, 1) > 8
