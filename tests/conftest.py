"""What every test may count on: a marker per folder, one thread for CPU arithmetic, a GPU where one is needed, real material."""

import gc
import os
import random
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import settings

TESTS = Path(__file__).resolve().parent
FOLDERS = ("plain", "cpu", "gpu")

# Triton decides when it is imported, by whichever test comes first, whether it interprets its kernels; without a GPU it must.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell that starts something in the background lets it ignore interrupts, and all that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A slow machine is no fault of the code; and whether a change is right must not hang on luck, so examples are the same every time.
settings.register_profile("penstock", deadline=None, derandomize="PENSTOCK_THOROUGH" not in os.environ)
settings.load_profile("penstock")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test gets its folder's marker; those in tests/gpu are skipped where no GPU can run them."""
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


def why_no_gpu() -> str:
    """Why tests/gpu cannot run here; empty if they can. Imports torch, so it is asked only when there are such tests."""
    try:
        import torch
    except ImportError as error:
        return f"needs a CUDA device, and torch cannot be imported: {error}"
    return "" if torch.cuda.is_available() else f"needs a CUDA device; torch {torch.__version__} sees none"


_imported = 0
"""Modules that were there when garbage was last set apart from them."""


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Several workers share the cores, and sums in one thread come out the same on every machine size. What was imported stays: every model
    that is loaded collects garbage, and going through all of transformers for it would take longer than most tests."""
    global _imported
    if len(sys.modules) > _imported + 50:
        gc.collect()
        gc.freeze()
        _imported = len(sys.modules)
    random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
        if item.get_closest_marker("cpu"):
            sys.modules["torch"].set_num_threads(1)
            if "triton.runtime.interpreter" in sys.modules:  # Imported where kernels are interpreted, and nowhere else.
                import bounds  # Which imports torch.

                bounds.install()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real texts, traces, tokenizers and a trained checkpoint that lies beside the repository."""
    folder = TESTS.parents[1] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("needs the real material in ../shared/data, which is not here")
    return folder
