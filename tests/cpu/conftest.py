"""What every test with torch may count on: ranks that it starts here have imported torch before, CPU kernels
are compiled once, and machines are measured briefly."""

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

import compiled_once
import forks
from penstock.memory import probe
from penstock.parallel import crew

BRIEFLY = 0.02
"""Seconds that a rate is measured for, and what rests on it is a forecast."""


@pytest.fixture(scope="session", autouse=True)
def _compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """All workers and the processes that tests start compile by the same compiler (see compiled_once)."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    compiler = compiled_once.compiler_in(folder / "compiled_once")
    with pytest.MonkeyPatch.context() as patch:
        if compiler is not None:
            patch.setenv("CC", compiler)
        yield


@pytest.fixture(scope="session", autouse=True)
def _quick_followers() -> Iterator[None]:
    """Followers of this process are forked of one that has imported what they would import (see forks), which
    takes most of what they compute here. Those of processes that tests start are not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            crew, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": forks.FollowerPopen})
        )
        yield


@pytest.fixture(scope="session", autouse=True)
def _brief_probes() -> Iterator[None]:
    """Links, memory, disks and arithmetic are measured as ever, but not for long, nor in hundreds of
    megabytes."""
    best, read = probe._best, probe._read_rate

    def best_of_few(work: Callable[[], object], device: torch.device, seconds: float = BRIEFLY) -> float:
        begin = time.perf_counter()
        work()
        took = time.perf_counter() - begin
        return took if took > 5 * BRIEFLY else best(work, device, min(seconds, BRIEFLY))

    def read_briefly(fd: int, *, once: bool, seconds: float) -> float:
        return read(fd, once=once, seconds=min(seconds, 2 * BRIEFLY))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe, "_best", best_of_few)
        patch.setattr(probe, "_read_rate", read_briefly)
        patch.setattr(probe, "_HOST_BYTES", 16 << 20)
        patch.setattr(probe, "_cache_bytes", lambda: 0)
        yield
