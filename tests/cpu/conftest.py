"""What every test with torch may count on: ranks that it starts here have imported torch before, CPU kernels
are compiled once, and machines are measured briefly."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

import compiled_once
import forks
from penstock.engine import boot
from penstock.engine.settling import Settled
from penstock.memory import probe
from penstock.models.decoder import Decoder
from penstock.ops import kernels
from penstock.ops.native.few_bits import find_library
from penstock.parallel import crew
from penstock.worker.runner import Runner

COMPUTING = tuple(f"penstock.{floor}." for floor in ("engine", "kv.movement", "models", "ops", "worker"))
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
    """Followers of this process are forked (see forks). Those of processes that tests start are not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(crew, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": forks.LoadedPopen}))
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


@pytest.fixture(scope="session", autouse=True)
def _measured_once() -> Iterator[None]:
    """The same model under the same settings takes the same memory for its largest step, so each is measured
    once. Not where more than a model and its steps takes part, nor where a test has put something else in
    the place of what is measured or measures."""
    known, real = dict[object, int](), boot.activation_peak
    usual = dict[str, list[object]]()

    def changed() -> bool:
        """Whether anything that computes is not what it was when it was first seen."""
        there = {name: vars(module) for name, module in sys.modules.items() if name.startswith(COMPUTING)}
        there |= {kind.__name__: vars(kind) for kind in (Runner, Decoder)}
        found = {name: [one for one in its.values() if callable(one)] for name, its in there.items()}
        return any(usual.setdefault(name, its) != its for name, its in found.items())

    def peak(settled: Settled, runner: Runner, device: torch.device) -> int:
        more = settled.far, settled.draft, settled.lora, runner.target.decoder.routing
        if settled.shard.ranks > 1 or any(more) or len(runner.models) > 1 or changed():
            return real(settled, runner, device)
        asked = settled.settings
        key = (
            repr((settled.spec, settled.dtype, settled.limits, settled.kv, device)),
            tuple((layout.id, layout.size, len(layout.fields)) for layout in settled.layouts),
            (asked.kernels, asked.kernels and find_library(), asked.cpu_compute, asked.check),
            (kernels._launches.plain, kernels._launches.between, torch.get_num_threads()),
        )
        if key not in known:
            known[key] = real(settled, runner, device)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(boot, "activation_peak", peak)
        changed()
        yield
