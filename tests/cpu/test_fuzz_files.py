"""Changed files are read or refused, and what reading them must not do is found."""

import random
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))  # scripts, not a package

import fuzz_files as fuzz

from penstock.base.errors import CheckpointError

COUNT = 12
"""Of each kind: a second. `make fuzz-files` makes ten thousand, where the code that they reach leads to the
next ones."""


@pytest.mark.parametrize("name", fuzz.KINDS)
def test_changed_files_are_read_or_refused(tmp_path: Path, name: str) -> None:
    kind, random_ = fuzz.KINDS[name], random.Random(name)
    with fuzz.Runs(kind, tmp_path) as runs:
        made = {fuzz.changed(runs.original, kind.change, random_) for _ in range(COUNT)}
        assert len(made - {runs.original}) > COUNT // 2
        for data in made:
            runs.read(data)


def filled(size: int) -> None:
    """Take so much memory, all of which is written to."""
    assert len(bytearray(b"1") * size) == size


def _write(path: Path) -> None:
    (path / "file").write_text("ok")


def test_what_reading_must_not_do_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "MEMORY", 128 << 20)
    outside = tmp_path / "outside"
    outside.touch()

    def read(path: Path) -> None:
        match (path / "file").read_text():
            case "refused":
                raise CheckpointError("no")
            case "fault":
                raise KeyError("no")
            case "outside":
                outside.read_bytes()
            case "memory":
                filled(fuzz.MEMORY + (64 << 20))

    filled(2 * fuzz.MEMORY)  # What the process had before is not what reading takes.
    (tmp_path / "runs").mkdir()
    with fuzz.Runs(fuzz.Kind("file", _write, read), tmp_path / "runs") as runs:
        runs.read(b"ok")
        runs.read(b"refused")
        with pytest.raises(KeyError):
            runs.read(b"fault")
        with pytest.raises(fuzz.Outside, match="outside"):
            runs.read(b"outside")
        runs.read(b"ok")
        with pytest.raises(MemoryError):
            runs.read(b"memory")


def test_a_kind_whose_file_is_refused_as_it_is_tests_nothing(tmp_path: Path) -> None:
    def read(path: Path) -> None:
        raise CheckpointError("no")

    with pytest.raises(CheckpointError), fuzz.Runs(fuzz.Kind("file", _write, read), tmp_path):
        pass
