"""The cache of packs: each is made once, by one process, and nobody is ever given one that is not whole."""

import fcntl
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import forks
import tiny
from packs import read_group
from penstock.base.errors import CheckpointError, PenstockError
from penstock.weights.checkpoint.reader import Checkpoint
from penstock.weights.pack import writer as packing
from penstock.weights.pack.cache import cached_pack, is_pack
from penstock.weights.pack.directory import PackError, locked
from penstock.weights.pack.reader import Pack
from penstock.weights.pack.writer import write_pack
from penstock.weights.pieces import JOURNAL, MANIFEST, PAGE, STORE

MODEL = "llama"


def cached(model: Path, directory: Path, dtype: str = "float32") -> tuple[Path, list[str], list[int]]:
    """Where the pack is, what was said and what progress was told, once every group has been compared with
    the checkpoint's."""
    said: list[str] = []
    told: list[int] = []
    with (
        Checkpoint.open(model) as checkpoint,
        cached_pack(checkpoint, dtype, directory, told.append, said.append) as pack,
    ):
        for layout in pack.layouts:
            expected, group = (torch.empty(layout.size, dtype=torch.uint8) for _ in range(2))
            checkpoint.read_piece(layout, 0, expected)
            read_group(pack, layout.id, group, check=True)
            assert torch.equal(group, expected)
        assert (pack.manifest.fingerprint, pack.dtype) == (checkpoint.fingerprint().hex(), dtype)
        assert pack.generation == checkpoint.generation
        assert pack.config == checkpoint.config
        return pack.path, said, told


def refusal(call: Callable[[], object], kind: type[PenstockError]) -> str:
    with pytest.raises(PenstockError) as caught:
        call()
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    return str(caught.value)


def state(path: Path) -> list[tuple[str, int, int]]:
    """Names, inodes and times of what is in a directory: other ones if anything was written."""
    return sorted((entry.name, entry.stat().st_ino, entry.stat().st_mtime_ns) for entry in path.iterdir())


def test_made_once(tmp_path: Path) -> None:
    model = tiny.checkpoint(MODEL)
    path, said, told = cached(model, tmp_path / "home" / "cache")
    assert path.parent == tmp_path / "home" / "cache"
    assert path.name.startswith(f"{model.name}-")
    [line] = said
    assert line.startswith("weights of ")
    assert line.endswith(
        f"KiB in float32 do not fit into device and host memory; packing them once into {path}"
    )
    assert sum(told) == (path / STORE).stat().st_size
    before = state(path)
    assert cached(model, tmp_path / "home" / "cache") == (path, [], [])
    assert state(path) == before


def test_one_for_each_model_and_dtype_wherever_it_is(tmp_path: Path) -> None:
    """Models are told apart by what they are: two of one name are two, and one that moves stays one."""
    for folder, case in (("a", MODEL), ("b", "qwen3")):
        shutil.copytree(tiny.checkpoint(case), tmp_path / folder / "model")
    paths = {
        cached(tmp_path / folder / "model", tmp_path / "cache", dtype)[0]
        for folder in "ab"
        for dtype in ("float32", "bfloat16")
    }
    assert len(paths) == 4
    (tmp_path / "c").mkdir()
    (tmp_path / "a" / "model").rename(tmp_path / "c" / "model")
    path, said, _ = cached(tmp_path / "c" / "model", tmp_path / "cache")
    assert path in paths
    assert not said


@pytest.mark.parametrize("name", ["a b\nc", "é" * 100, "-" * 250, ".."])
def test_models_of_any_name(tmp_path: Path, name: str) -> None:
    model = tmp_path / "models" / name if name != ".." else tmp_path / "models" / "x" / ".."
    shutil.copytree(tiny.checkpoint(MODEL), model, dirs_exist_ok=True)
    (tmp_path / "models" / "x").mkdir(exist_ok=True)
    path, [line], _ = cached(model, tmp_path / "cache")
    assert path.parent == tmp_path / "cache"
    assert path.name.isascii()
    assert "\n" not in line


def test_settings_beside_the_weights_are_the_models_own(tmp_path: Path) -> None:
    """They are no part of the fingerprint, and may change while the pack rests."""
    model = tmp_path / "model"
    shutil.copytree(tiny.checkpoint(MODEL), model)
    cached(model, tmp_path / "cache")
    (model / "generation_config.json").write_text('{"temperature": 0.123, "do_sample": true}')
    text = (model / "config.json").read_text()
    (model / "config.json").write_text(text.replace("{", '{"_name_or_path": "another",', 1))
    _, said, _ = cached(model, tmp_path / "cache")
    assert not said


# ---- kills and company -------------------------------------------------------------------------------------

PROCESS = """
import os, signal, sys
from pathlib import Path
from penstock.weights.pack import writer as packing
from penstock.weights.checkpoint.reader import Checkpoint
from penstock.weights.pack.cache import cached_pack
packing.COMMIT_BYTES = 1
model, directory, kill, stop = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
pieces = []
def progress(count):
    pieces.append(count)
    if len(pieces) == kill:
        os.kill(os.getpid(), signal.SIGKILL)
    if len(pieces) == stop:
        print("stopped", flush=True)
        sys.stdin.readline()
with Checkpoint.open(model) as checkpoint:
    say = lambda line: print(line, flush=True)
    with cached_pack(checkpoint, "float32", directory, progress, say) as pack:
        pack.verify()
        print("whole", flush=True)
"""


def process(directory: Path, kill: int = 0, stop: int = 0) -> subprocess.Popen[str]:
    """Another one that wants the pack. It ends itself at piece number `kill`, and waits for a line at piece
    number `stop`."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-c",
        PROCESS,
        str(tiny.checkpoint(MODEL)),
        str(directory),
        str(kill),
        str(stop),
    ]
    return forks.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_goes_on_after_a_kill(tmp_path: Path) -> None:
    killed = process(tmp_path, kill=4)
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    [path] = tmp_path.iterdir()
    assert f"{path} is an unfinished pack" in refusal(lambda: Pack.open(path), CheckpointError)
    found, [line], told = cached(tiny.checkpoint(MODEL), tmp_path)
    assert found == path
    assert line.endswith(f"do not fit into device and host memory; going on with packing them into {path}")
    assert told[0] > PAGE  # what was there is not written again
    assert sum(told) == (path / STORE).stat().st_size


@pytest.mark.parametrize("end", ["in time", "by a kill"])
def test_two_at_once(tmp_path: Path, end: str) -> None:
    with process(tmp_path, stop=3) as first:
        assert first.stdout
        lines = [first.stdout.readline() for _ in range(2)]
        assert "packing them once into" in lines[0]
        assert lines[1] == "stopped\n"
        [path] = tmp_path.iterdir()
        with process(tmp_path) as second:
            assert second.stdout
            assert (
                second.stdout.readline()
                == f"another process is packing this model into {path}; waiting for it\n"
            )
            assert not (path / MANIFEST).exists()
            if end == "in time":
                assert first.communicate("\n")[0] == "whole\n"
            else:
                first.kill()
            rest = second.communicate()[0].splitlines()
    assert second.returncode == 0
    assert rest[-1] == "whole"
    if end == "in time":
        assert rest == ["whole"]
    else:
        assert [line.partition(";")[2] for line in rest[:-1]] == [f" going on with packing them into {path}"]
    assert cached(tiny.checkpoint(MODEL), tmp_path)[1] == []


def test_who_waits_for_one_that_gives_up_starts_anew(tmp_path: Path) -> None:
    """One that fails before it has written anything removes the directory, which the other has locked by
    then."""
    path = tmp_path / "pack"
    path.mkdir()
    holder = os.open(path, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    called: list[str] = []

    def busy() -> None:
        called.append("busy")
        path.rmdir()
        os.close(holder)

    with locked(path, busy):
        assert called == ["busy"]
        assert "another process is packing into" in refusal(lambda: locked(path).__enter__(), PackError)


def test_the_cache_waits_for_penstock_pack(tmp_path: Path) -> None:
    """Whoever writes packs locks them in the same way."""
    model = tiny.checkpoint(MODEL)
    path = cached(model, tmp_path)[0]
    shutil.rmtree(path)
    found: list[str] = []

    class Waited(Exception):
        pass

    def stop(line: str) -> None:
        found.append(line)
        raise Waited

    def meet(count: int) -> None:
        with Checkpoint.open(model) as other, pytest.raises(Waited):
            cached_pack(other, "float32", tmp_path, None, stop)

    with Checkpoint.open(model) as checkpoint:
        assert write_pack(checkpoint, path, "float32", progress=meet)
    assert set(found) == {f"another process is packing this model into {path}; waiting for it"}
    assert cached(model, tmp_path)[1] == []


# ---- what is wrong -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["manifest", "store cut", "store gone", "config"])
def test_a_damaged_pack_is_refused_and_left(tmp_path: Path, damage: str) -> None:
    model = tiny.checkpoint(MODEL)
    path = cached(model, tmp_path)[0]
    if damage == "manifest":
        data = bytearray((path / MANIFEST).read_bytes())
        data[len(data) // 2] ^= 1
        (path / MANIFEST).write_bytes(data)
    elif damage == "store cut":
        os.truncate(path / STORE, 70_000)
    elif damage == "store gone":
        (path / STORE).unlink()
    else:
        (path / "config.json").write_text("{}")
    before = state(path)
    message = refusal(lambda: cached(model, tmp_path), CheckpointError)
    assert str(path / {"manifest": MANIFEST, "config": "config.json"}.get(damage, STORE)) in message
    assert message.endswith(
        f"penstock made this pack by itself: remove {path}, and the next run makes it again"
    )
    assert state(path) == before
    shutil.rmtree(path)
    assert len(cached(model, tmp_path)[1]) == 1


def test_a_pack_under_a_wrong_name(tmp_path: Path) -> None:
    model = tiny.checkpoint(MODEL)
    path, other = cached(model, tmp_path)[0], cached(model, tmp_path, "float16")[0]
    shutil.rmtree(path)
    other.rename(path)
    descriptors = len(os.listdir("/proc/self/fd"))
    assert f"{path} holds a pack of another model or dtype" in refusal(
        lambda: cached(model, tmp_path), CheckpointError
    )
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_no_place_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.checkpoint(MODEL)
    (tmp_path / "file").touch()
    assert f"cannot write {tmp_path / 'file'}" in refusal(lambda: cached(model, tmp_path / "file"), PackError)
    real = os.statvfs(tmp_path)
    full = os.statvfs_result((real.f_bsize, 1, *real[2:4], 4096, *real[5:]))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    assert "free some space" in refusal(lambda: cached(model, tmp_path / "cache"), PackError)
    assert not (tmp_path / "cache").exists()


def test_what_it_makes_is_its_user_s_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        path, *_ = cached(tiny.checkpoint(MODEL), tmp_path / "above" / "cache")
    finally:
        os.umask(before)
    for each in (path, *path.parents[:2]):
        assert stat.S_IMODE(each.stat().st_mode) == 0o700, each


def test_which_directories_are_packs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny.checkpoint(MODEL), model)
    assert not is_pack(model)
    (model / MANIFEST).write_text("{}")  # of whatever else
    assert not is_pack(model)
    assert not is_pack(tmp_path)
    assert not is_pack(tmp_path / "none")
    assert is_pack(cached(model, tmp_path / "cache")[0])

    def stop(count: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(packing, "COMMIT_BYTES", 1)
    with Checkpoint.open(model) as checkpoint, pytest.raises(KeyboardInterrupt):
        write_pack(checkpoint, tmp_path / "unfinished", "float32", progress=stop)
    assert (tmp_path / "unfinished" / JOURNAL).exists()
    assert is_pack(tmp_path / "unfinished")
