"""Kernels for CPUs compiled with fewer instructions than this processor has."""

import ctypes
import fcntl
import platform
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest

from penstock.ops.native import compiler, few_bits

_QUICK = "-Og"
"""What only tests run is compiled in a quarter of the time: for SSE it would take half a minute of a core."""
WAYS = {
    "best": (),
    "no_avx512": ("-mno-avx512f", _QUICK),
    "portable": ("-mno-avx512f", "-mno-avx2", _QUICK),
}
"""Flags that leave out instructions which this processor may have. Another compiler may not know them."""
_IN_C = ("-include", str(Path(__file__).with_name("tiles_in_c.h")), _QUICK)
TILES = {"tiles": _IN_C, "refused": _IN_C}
"""Flags for tiles that are written in C, on any processor with dot products; the system may refuse them."""


def use(way: str, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let these kernels compute, which are compiled in `kept` first.

    A test is skipped where there is no compiler, or none that knows the flags.
    """
    found = few_bits._Found()
    found.library, found.sought = _compiled(way, kept), True
    monkeypatch.setattr(few_bits, "_found", found)


def _shared(kept: Path) -> Path:
    """A folder that all workers of a run have; `kept` where there are none."""
    worker = next((folder for folder in kept.parents if folder.name.startswith("popen-")), None)
    if worker is None:
        return kept
    folder = worker.parent / "native-ways"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


@cache
def _compiled(way: str, kept: Path) -> few_bits.FewBitsLibrary:
    known = platform.machine() == "x86_64"
    try:
        compiler.find_compiler()
    except compiler.NativeError as fault:
        pytest.skip(str(fault))
    # Not for any processor where compiling for this one fails.
    with patch.object(compiler, "_TARGETS", compiler._TARGETS[:1] if known else compiler._TARGETS):
        try:
            folder = _shared(kept)
            with (folder / f"{way}.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # Who comes later finds it compiled.
                # A file of its own, or it would be the library that is loaded already.
                loaded = compiler.load(
                    folder / "refused" if way == "refused" else folder, {**WAYS, **TILES}[way]
                )
                if way == "refused":
                    ctypes.c_int.in_dll(loaded, "tiles_refused").value = 1
                return few_bits.FewBitsLibrary(loaded)
        except compiler.NativeError as fault:
            if known:
                raise
            pytest.skip(str(fault))
