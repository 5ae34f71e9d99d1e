"""A pack that loses its power while it is written is not there, or whole; and the next run makes of it what
it would have been."""

import random
import shutil
from pathlib import Path

import pytest

import tiny
from penstock.base.errors import CheckpointError
from penstock.weights.checkpoint.reader import Checkpoint
from penstock.weights.pack import manifest
from penstock.weights.pack import reader as reading
from penstock.weights.pack import writer as packing
from penstock.weights.pack.reader import Pack
from penstock.weights.pack.writer import write_pack
from penstock.weights.pieces import MANIFEST, STORE
from power import Disk, PowerCut


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many pieces, and several groups in what is committed at once."""
    for module in (manifest, reading, packing):
        monkeypatch.setattr(module, "PIECE_BYTES", 16384)
    for module in (reading, packing):
        monkeypatch.setattr(module, "THREADS", 2)
    monkeypatch.setattr(packing, "COMMIT_BYTES", 60_000)


def test_what_a_power_cut_leaves(tmp_path: Path) -> None:
    """Before every call that changes what is on the disk, with some of what was not synced lost; some once
    more while it goes on."""
    model = tmp_path / "model"
    shutil.copytree(tiny.checkpoint("llama"), model)
    with Checkpoint.open(model) as checkpoint:
        whole, out = tmp_path / "whole", tmp_path / "pack"
        write_pack(checkpoint, whole, "bfloat16")
        expected = {path.name: path.read_bytes() for path in whole.iterdir()}
        rng, unfinished, number, ended = random.Random(6), 0, 0, False
        while not ended:
            number += 1
            out.mkdir()
            disk = Disk(out)
            for until in (number, rng.randint(1, 60)) if number % 3 == 0 else (number,):
                try:
                    with disk.powered(until):
                        write_pack(checkpoint, out, "bfloat16")
                    ended = until == number
                except PowerCut:
                    disk.restart(rng)
                    disk = Disk(out)
                unfinished += not _is_whole(out)
            with disk.powered():
                write_pack(checkpoint, out, "bfloat16")
            assert _is_whole(out)
            found = {path.name: path.read_bytes() for path in out.iterdir()}
            assert {name for name, data in expected.items() if found.get(name) != data} == set(), (
                f"after a cut before call {number}"
            )
            shutil.rmtree(out)
    assert number > 50
    assert unfinished > 40


def test_what_it_leaves_of_weights_in_another_directory(tmp_path: Path) -> None:
    """Names of one directory may be on the disk before those of another. Before each of the last calls, when
    all weights are written."""
    with Checkpoint.open(tiny.checkpoint("llama")) as checkpoint:
        out, elsewhere = tmp_path / "pack", tmp_path / "elsewhere"
        rng, calls, unfinished = random.Random(3), 0, 0
        for number in [0, *range(12)] * 3:
            for folder in (out, elsewhere):
                folder.mkdir()
            disk = Disk(out, elsewhere)
            try:
                with disk.powered(max(calls - number, 0)):
                    write_pack(checkpoint, out, "bfloat16", elsewhere / "weights")
                calls = disk.calls
            except PowerCut:
                disk.restart(rng)
                unfinished += not _is_whole(out, elsewhere / "weights")
                with Disk(out, elsewhere).powered():
                    write_pack(checkpoint, out, "bfloat16", elsewhere / "weights")
            assert _is_whole(out, elsewhere / "weights")
            for folder in (out, elsewhere):
                shutil.rmtree(folder)
        assert unfinished > 15


def _is_whole(out: Path, store: Path | None = None) -> bool:
    """Whether it looks whole; then it is."""
    try:
        found = Pack.open(out)
    except CheckpointError:
        return False
    with found:
        found.verify()
    assert (out / MANIFEST).exists()
    assert (store or out / STORE).exists()
    return True
