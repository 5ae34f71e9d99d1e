"""What every test may count on: a marker per folder, one thread for CPU arithmetic, a GPU where one is
needed, real material."""

import gc
import logging
import os
import random
import re
import signal
import sys
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)
TESTS = Path(__file__).resolve().parent
FOLDERS = ("plain", "cpu", "gpu")
ALL_TOOLS = os.environ.get("PENSTOCK_ALL_TOOLS", "") not in ("", "0")
"""Whether every tool that tests use is said to be here. Then one that is not is a failure."""
HARDWARE = re.compile(
    r"\bGPU\b|\bCUDA\b|loop device|file system|O_TMPFILE|/dev/full|\.\./shared/data|nine hundred megabytes"
    r"|base image"
)
"""Reasons of skips that no installing mends: the machine's, and material that lies beside the repository. And
those of clients that take too much of a disk to be installed for a test each."""

# Triton decides when it is imported, by whichever test comes first, whether it interprets its kernels;
# without a GPU it must.
HAS_GPU = Path("/dev/nvidiactl").exists()
if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")

# What is made while tests are looked for stays: going through it again and again would find nothing.
gc.disable()

# A thread that is woken waits for its turn. Else gloo's interrupts the one that sends, which holds a lock,
# and spins for the lock until its own time is over: a tenth of what tests with several ranks computed.
with suppress(AttributeError, OSError):  # Where there is no such policy, or none may be set.
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

# As the first model sets it: processes are forked from one of the same environment (see forks).
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

# No test asks the Hub but those that serve one themselves.
os.environ["HF_HUB_OFFLINE"] = "1"

# A shell that starts something in the background lets it ignore interrupts, and all that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A slow machine is no fault of the code; and whether a change is right must not hang on luck, so examples are
# the same every time.
settings.register_profile("penstock", deadline=None, derandomize="PENSTOCK_THOROUGH" not in os.environ)
settings.load_profile("penstock")


@settings(max_examples=1)
@given(st.none())
def drawn(_: None) -> None:
    """Makes hypothesis look for what holds its random numbers before that is set apart from garbage.
    Afterwards it finds nothing on Python 3.14, and warns. It goes through all that is there, so it is called
    while there is little."""


@pytest.hookimpl(trylast=True)
def pytest_sessionstart() -> None:
    drawn()


def pytest_collection_finish() -> None:
    """What stays is set apart from garbage. There is hardly any yet, and it is not looked for."""
    global _imported
    _propagate()
    gc.freeze()
    gc.enable()
    _imported = len(sys.modules)


def _propagate() -> None:
    """What torch's loggers are told goes to the root's handlers, as if they were of those: around each part
    of each test pytest adds its own handlers to all loggers that keep to themselves, and there are dozens."""
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if isinstance(logger, logging.Logger) and name.partition(".")[0] in ("torch", "transformers"):
            logger.propagate = True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test gets its folder's marker; those in tests/gpu are skipped where no GPU can run them."""
    if _worker(items[0].config if items else None):
        items.sort(key=lambda item: item.path)
    on_gpu = []
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0] if item.path.is_relative_to(TESTS) else ""
        if folder in FOLDERS:
            item.add_marker(folder)
        if folder == "gpu":
            on_gpu.append(item)
    if on_gpu and (reason := why_no_gpu()):
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return _judged((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Workers begin at different files: what one has compiled is there when another comes to it."""
    report = _judged((yield))
    if isinstance(collector, pytest.Directory) and (worker := _worker(collector.config)):
        first = len(report.result) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
        report.result[:] = [*report.result[first:], *report.result[:first]]
    return report


def _worker(config: pytest.Config | None) -> dict[str, Any] | None:
    """What xdist has told this process, if it is one of its workers."""
    return getattr(config, "workerinput", None)


def _judged(report: Report) -> Report:
    """A failure instead of a skip, where a tool is missing that should be here."""
    if (
        ALL_TOOLS
        and report.skipped
        and not hasattr(report, "wasxfail")
        and isinstance(report.longrepr, tuple)
    ):
        reason = str(report.longrepr[2])
        if not HARDWARE.search(reason):
            report.outcome = "failed"
            report.longrepr = f"{reason}, while all tools should be here; `make test-all` installs them"
    return report


def why_no_gpu() -> str:
    """Why tests/gpu cannot run here; empty if they can. Imports torch, so it is asked only when there are
    such tests."""
    try:
        import torch
    except ImportError as error:
        return f"needs a CUDA device, and torch cannot be imported: {error}"
    return "" if torch.cuda.is_available() else f"needs a CUDA device; torch {torch.__version__} sees none"


_imported, _file, _full = 0, Path(), 0
"""Modules that were there, the file whose tests ran, and full collections there had been, when what stays was
last set apart from garbage."""


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Several workers share the cores, and sums in one thread come out the same on every machine size. What
    was imported stays, and what earlier files and a few dozen models have made: every model that is loaded
    collects garbage, and going through all that would take longer than most tests."""
    global _imported, _file, _full
    collected = gc.get_stats()[2]["collections"]
    if len(sys.modules) > _imported + 5 or item.path != _file or collected > _full + 25:
        gc.collect()
        gc.freeze()
        _imported, _file, _full = len(sys.modules), item.path, collected
    random.seed(0)
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        # For devices that are not there torch keeps each seed, with the stack that it was set from.
        (torch.manual_seed if HAS_GPU else torch.default_generator.manual_seed)(0)
        if item.get_closest_marker("cpu"):
            torch.set_num_threads(1)
            if (
                "triton.runtime.interpreter" in sys.modules
            ):  # Imported where kernels are interpreted, and nowhere else.
                import bounds  # Which imports torch.

                bounds.install()


@pytest.fixture(scope="session", autouse=True)
def _first_estimate() -> Iterator[None]:
    """What a tier assumes before anything was counted is worked out once, not for each of the thousands of
    tiers that tests make."""
    from penstock.kv.ledger.returns import Returns

    estimate, first = Returns._estimate, dict[str, object]()

    def estimate_once(self: Returns) -> None:
        if self.epoch:
            estimate(self)
            return
        if not first:
            estimate(self)
            first.update(_gains=self._gains, _chances=self._chances)
        vars(self).update(first)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Returns, "_estimate", estimate_once)
        yield


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real texts, traces, tokenizers and a trained checkpoint that lies beside the
    repository."""
    folder = TESTS.parents[1] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("needs the real material in ../shared/data, which is not here")
    return folder
