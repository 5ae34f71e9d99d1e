"""Packs hold exactly what their checkpoints do, survive a kill at any instruction, and whatever is wrong with
one is said in one line."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import forks
import tiny
from packs import read_group, run_of
from penstock.arch.layout import GroupId, GroupKind, group_layouts
from penstock.base.config import SHIPPED_MODEL
from penstock.base.errors import CheckpointError, PenstockError
from penstock.cli.main import main
from penstock.weights.checkpoint.reader import Checkpoint
from penstock.weights.pack import manifest
from penstock.weights.pack import reader as reading
from penstock.weights.pack import writer as packing
from penstock.weights.pack.directory import PackError
from penstock.weights.pack.reader import Pack, in_order
from penstock.weights.pack.writer import write_pack
from penstock.weights.pieces import JOURNAL, MANIFEST, PAGE, PIECE_BYTES, STORE
from safetensor_files import flip, sealed

FAMILY_CASES = (
    "llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "qwen2_moe", "glm4_moe", "minimax_m2"
)  # fmt: skip
DTYPES = ("float32", "float16", "bfloat16")
UNFINISHED = "weights.bin.partial"


def pack(model: Path, out: Path, dtype: str = "float32", **more: object) -> bool:
    with Checkpoint.open(model) as checkpoint:
        return write_pack(checkpoint, out, dtype, **more)  # type: ignore[arg-type]


def refusal(call: Callable[[], object], kind: type[PenstockError] = CheckpointError) -> str:
    with pytest.raises(PenstockError) as caught:
        call()
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    return str(caught.value)


def verify(path: Path) -> None:
    with Pack.open(path) as found:
        found.verify()


def check_equal(model: Path, path: Path, dtype: str) -> None:
    """Every group of the pack is what Checkpoint.read_piece gives, and what lies between groups is zero."""
    with Checkpoint.open(model) as checkpoint, Pack.open(path) as found:
        assert found.layouts == group_layouts(checkpoint.spec, checkpoint.names, dtype)
        assert (found.dtype, found.generation, found.config) == (
            dtype,
            checkpoint.generation,
            checkpoint.config,
        )
        assert found.manifest.fingerprint == checkpoint.fingerprint().hex()
        data, end = (path / STORE).read_bytes(), 0
        for layout in found.layouts:
            expected = torch.empty(layout.size, dtype=torch.uint8)
            checkpoint.read_piece(layout, 0, expected)
            for check in (False, True):
                group = torch.full((layout.size,), 0xEE, dtype=torch.uint8)
                read_group(found, layout.id, group, check)
                assert torch.equal(group, expected)
            whole = aligned(run_of(found, layout.id).length)
            found.read_piece(layout.id, 0, whole, check=True)
            assert torch.equal(whole[: layout.size], expected)
            assert not whole[layout.size :].any()
            offset = run_of(found, layout.id).offset
            assert offset % PAGE == 0
            assert not any(data[end:offset])
            assert data[offset : offset + layout.size] == expected.numpy().tobytes()
            end = offset + layout.size
        assert not any(data[end:])
        assert len(data) == found.manifest.size == -(-end // PAGE) * PAGE
        found.verify()


def aligned(count: int, shift: int = 0) -> torch.Tensor:
    """`count` bytes of memory that starts `shift` bytes after a page's start, filled with something."""
    room = torch.full((count + 2 * PAGE,), 0xEE, dtype=torch.uint8)
    first = -room.data_ptr() % PAGE + shift
    return room[first : first + count]


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A pack of a small model."""
    pack(tiny.checkpoint("llama"), tmp_path / "pack")
    return tmp_path / "pack"


# ---- what is written ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "case", [*FAMILY_CASES, "llama_biases", "llama_tied", "llama_sharded", "llama_bfloat16_file"]
)
def test_every_group_of_every_family(tmp_path: Path, case: str, dtype: str) -> None:
    told: list[int] = []
    assert pack(tiny.checkpoint(case), tmp_path / "pack", dtype, progress=told.append)
    check_equal(tiny.checkpoint(case), tmp_path / "pack", dtype)
    assert sum(told) == (tmp_path / "pack" / STORE).stat().st_size
    assert sorted(set(os.listdir(tmp_path / "pack")) - {"config.json", "generation_config.json"}) == [
        MANIFEST,
        STORE,
    ]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    more = {"vocab_size": 150_001, "intermediate_size": 70_003, "num_hidden_layers": 1}
    return tiny.write(tiny.CASES["llama"], tmp_path_factory.mktemp("wide") / "model", **more)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_groups_of_many_pieces(wide: Path, tmp_path: Path, dtype: str) -> None:
    """Borders of pieces within sources, between sources and between fields."""
    model = wide
    pack(model, tmp_path / "pack", dtype)
    with Pack.open(tmp_path / "pack") as found:
        assert max(run.size for run in found.manifest.runs) > 2 * PIECE_BYTES
        run = max(found.manifest.runs, key=lambda run: run.size)
        group = next(layout.id for layout in found.layouts if str(layout.id) == run.id)
        data = (tmp_path / "pack" / STORE).read_bytes()[run.offset : run.end]
        for start, end in ((0, PIECE_BYTES), (PIECE_BYTES, run.length), (PIECE_BYTES, 2 * PIECE_BYTES)):
            into = aligned(end - start)
            found.read_piece(group, start, into, check=True)
            assert into.numpy().tobytes() == data[start:end]
    check_equal(model, tmp_path / "pack", dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_piece_is_that_part_of_the_group(dtype: str) -> None:
    rng = random.Random(1)
    with Checkpoint.open(tiny.checkpoint("qwen2")) as checkpoint:
        for layout in group_layouts(checkpoint.spec, checkpoint.names, dtype):
            whole = torch.empty(layout.size, dtype=torch.uint8)
            checkpoint.read_piece(layout, 0, whole)
            for _ in range(20):
                start, length = 256 * rng.randrange(layout.size // 256), 256 * rng.randrange(1, 80)
                piece = torch.full((length,), 0xEE, dtype=torch.uint8)
                checkpoint.read_piece(layout, start, piece)
                expected = torch.cat([whole, torch.zeros(length, dtype=torch.uint8)])[start : start + length]
                assert torch.equal(piece, expected)


def test_what_makes_it_a_model_directory_comes_along(tmp_path: Path, shared_data: Path) -> None:
    model = shared_data / "stories260k_hf"
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "model" / "additional_chat_templates").mkdir()
    (tmp_path / "model" / "additional_chat_templates" / "tool_use.jinja").write_text("x")
    (tmp_path / "model" / "README.md").write_text("x")
    pack(tmp_path / "model", tmp_path / "pack")
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "pack" / name).read_bytes() == (model / name).read_bytes()
    assert (tmp_path / "pack" / "additional_chat_templates" / "tool_use.jinja").read_text() == "x"
    assert not (tmp_path / "pack" / "README.md").exists()
    verify(tmp_path / "pack")


def test_a_second_run_does_nothing(llama: Path) -> None:
    before = {file.name: file.stat().st_mtime_ns for file in llama.iterdir()}
    assert not pack(tiny.checkpoint("llama"), llama)
    assert {file.name: file.stat().st_mtime_ns for file in llama.iterdir()} == before


def test_weights_in_a_file_elsewhere(tmp_path: Path) -> None:
    model = tiny.checkpoint("llama")
    pack(model, tmp_path / "pack", store=tmp_path / "store")
    pack(model, tmp_path / "plain")
    assert (tmp_path / "store").read_bytes() == (tmp_path / "plain" / STORE).read_bytes()
    verify(tmp_path / "pack")
    assert f"another store ({tmp_path / 'store'})" in refusal(
        lambda: pack(model, tmp_path / "pack"), PackError
    )
    assert f"{tmp_path / 'store'} exists already" in refusal(
        lambda: pack(model, tmp_path / "b", store=tmp_path / "store"), PackError
    )
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("begin", "kind"),
    [
        (None, "which looks like a checkpoint in safetensors"),
        (b"GGUF\3\0\0\0rest", "which looks like a GGUF file"),
        (b"PK\3\4\0\0\0\0archive", "which looks like a checkpoint of PyTorch, or another zip file"),
        (b"", "a file of 0 B"),
        (b"GGU", "a file of 3 B"),
        ("directory", "a directory"),
        ("pipe", "which is no regular file"),
        ("/nowhere/at/all", "which is no regular file"),
        ("/dev/zero", "which is no regular file"),
    ],
)
def test_a_store_that_is_there_is_never_to_be_removed(
    begin: bytes | str | None, kind: str, tmp_path: Path
) -> None:
    """It may be the only copy of somebody's model: it is named, left alone, and another name asked for."""
    model = tiny.write(tiny.CASES["llama"], tmp_path / "model")
    store = tmp_path / "store" if begin is not None else next(model.glob("*.safetensors"))
    if isinstance(begin, bytes):
        store.write_bytes(begin)
    elif begin == "directory":
        store.mkdir()
    elif begin == "pipe":
        os.mkfifo(store)
    elif begin is not None:
        store.symlink_to(begin)
    before = store.read_bytes() if store.is_file() else None
    said = refusal(lambda: pack(model, tmp_path / "out", store=store), PackError)
    assert f"{store} exists already, {kind}, and" in said
    assert said.endswith("; name another path with --store")
    assert "remove" not in said
    assert (store.read_bytes() if store.is_file() else None) == before
    assert not (tmp_path / "out").exists()


@pytest.fixture
def block_device(tmp_path: Path) -> Iterator[Path]:
    """A device of 4 MiB."""
    with (tmp_path / "disk").open("wb") as file:
        file.truncate(4 << 20)
    try:
        made = subprocess.run(
            ["losetup", "-f", "--show", tmp_path / "disk"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs the right to set up a loop device")
    yield Path(made.stdout.strip())
    subprocess.run(["losetup", "-d", made.stdout.strip()], check=True)


def test_weights_on_a_block_device(tmp_path: Path, block_device: Path) -> None:
    model = tiny.checkpoint("llama")
    pack(model, tmp_path / "pack", store=block_device)
    assert os.listdir(tmp_path / "pack").count(MANIFEST) == 1
    verify(tmp_path / "pack")
    with Checkpoint.open(model) as checkpoint, Pack.open(tmp_path / "pack") as found:
        for layout in found.layouts:
            expected, group = (torch.empty(layout.size, dtype=torch.uint8) for _ in range(2))
            checkpoint.read_piece(layout, 0, expected)
            read_group(found, layout.id, group, check=True)
            assert torch.equal(group, expected)
            piece = aligned(run_of(found, layout.id).length)
            found.read_piece(layout.id, 0, piece, check=True)
            assert torch.equal(piece[: layout.size], expected)
        assert found.store.direct
    assert not pack(model, tmp_path / "pack", store=block_device)
    large = tiny.write(tiny.CASES["llama"], tmp_path / "large", vocab_size=20_000)
    assert "has 4.00 MiB, but the pack takes" in refusal(
        lambda: pack(large, tmp_path / "other", store=block_device), PackError
    )


# ---- kills -------------------------------------------------------------------------------------------------

# Forks from a process that has imported everything and has no threads yet. Pieces and what is committed at
# once are small, so that there is much to be killed between. A child is killed before its call number N that
# changes what is on the disk, half way through it if it writes bytes, until one is not killed any more.
KILLS = """
import os, random, signal, sys, threading, time
from pathlib import Path
from penstock.base.errors import CheckpointError
from penstock.weights import pieces
from penstock.weights.pack import manifest
from penstock.weights.pack import reader as reading
from penstock.weights.pack import writer as packing
from penstock.weights.checkpoint.reader import Checkpoint
pieces.PIECE_BYTES = manifest.PIECE_BYTES = reading.PIECE_BYTES = packing.PIECE_BYTES = 16384
reading.THREADS = packing.THREADS = 2
packing.COMMIT_BYTES = 60000
model, folder, kind = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
where = {"store": folder / "store"} if kind == "store" else {}
CALLS = ["fsync", "fdatasync", "rename", "ftruncate", "unlink", "mkdir", "open"]
if kind == "plain":  # Where else the store may be, bytes are written alike.
    CALLS += ["pwrite", "write"]

def kill_at(number):
    count, lock = [0], threading.Lock()
    def wrap(call, name):
        def wrapped(*args, **more):
            with lock:
                count[0] += 1
                if count[0] == number:
                    if name in ("pwrite", "write"):
                        call(args[0], bytes(args[1])[: len(args[1]) // 2], *args[2:])
                    os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **more)
        return wrapped
    for name in CALLS:
        setattr(os, name, wrap(getattr(os, name), name))

def child(out, number=0):
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        with Checkpoint.open(model) as checkpoint:
            if number:
                kill_at(number)
            packing.write_pack(checkpoint, out, "bfloat16", **where)
        code = 0
    finally:
        os._exit(code)

def ended(process):
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])

def content(out):
    store = folder / "store" if kind == "store" else out / "weights.bin"
    assert sorted(os.listdir(out)) == names or not names, os.listdir(out)
    return store.read_bytes(), (out / "manifest.json").read_bytes()

def whole(out):
    "Whether it looks whole; then it is."
    try:
        found = reading.Pack.open(out)
    except CheckpointError:
        return False
    with found:
        found.verify()
    return True

def fresh(name):
    (folder / "store").unlink(missing_ok=True)
    (folder / "store.partial").unlink(missing_ok=True)
    return folder / name

names = []
reference = fresh("reference")
began = time.perf_counter()
assert ended(child(reference)) == 0
took = time.perf_counter() - began
expected, names = content(reference), sorted(os.listdir(reference))
number, early = 0, 0
rng = random.Random(0)
while True:
    number += 1
    out = fresh(f"kill-{number}")
    if kind == "random":
        if number > 12:
            break
        process = child(out)
        time.sleep(took * rng.random())
        os.kill(process, signal.SIGKILL)
        ended(process)
    elif ended(child(out, number)) == 0:
        break
    early += not whole(out)
    if number % 3 == 0:  # killed once more while it goes on
        ended(child(out, rng.randrange(1, 40)))
        whole(out)
    assert ended(child(out)) == 0, number
    assert whole(out), number
    assert content(out) == expected, number
print(number, early)
"""


@pytest.mark.parametrize("kind", ["plain", "store", "random"])
def test_killed_anywhere_it_goes_on_to_the_same_pack(tmp_path: Path, kind: str) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    model = tiny.write(
        tiny.CASES["llama"], tmp_path / "model", num_hidden_layers=1
    )  # Four groups: of each kind of call a few.
    command = [sys.executable, "-c", KILLS, model, tmp_path, kind]
    result = forks.run(command, env=environment, text=True)
    assert result.returncode == 0, result.stderr
    number, early = map(int, result.stdout.split())
    assert number > {"random": 12, "store": 30, "plain": 50}[kind]
    # At random times a kill may always come too late; what those tell is only that no time is a bad one.
    assert kind == "random" or early > {"store": 25, "plain": 45}[kind]


def test_what_is_there_is_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, out = tiny.checkpoint("llama"), tmp_path / "pack"
    monkeypatch.setattr(packing, "COMMIT_BYTES", 1)
    stopped_before(model, out, group=3)
    told: list[int] = []
    assert pack(model, out, progress=told.append)
    assert told[0] > PAGE
    assert sum(told) == (out / STORE).stat().st_size
    check_equal(model, out, "float32")


def stopped_before(model: Path, out: Path, group: int) -> None:
    """An unfinished pack, of which about `group` groups are there."""
    told: list[int] = []

    def stop(count: int) -> None:
        told.append(count)
        if len(told) > group:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(model, out, progress=stop)
    assert "is an unfinished pack" in refusal(lambda: Pack.open(out))


@pytest.mark.parametrize("damage", ["bit", "cut", "gone", "journal"])
def test_damage_to_what_is_there_is_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    model, out = tiny.checkpoint("llama"), tmp_path / "pack"
    monkeypatch.setattr(packing, "COMMIT_BYTES", 1)
    stopped_before(model, out, group=3)
    lines = (out / JOURNAL).read_text().splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["embedding", "attention.0", "ffn.0"]
    file = out / UNFINISHED
    if damage == "bit":
        with Checkpoint.open(model) as checkpoint:
            sizes = [
                -(-one.size // PAGE) * PAGE
                for one in group_layouts(checkpoint.spec, checkpoint.names, "float32")
            ]
        flip(file, sum(sizes[:2]) + 100)
    elif damage == "cut":
        os.truncate(file, 5000)
    elif damage == "gone":
        file.unlink()
    else:
        (out / JOURNAL).write_text("\n".join(lines)[:-10] + "?" * 50)
    assert pack(model, out)
    check_equal(model, out, "float32")


def test_an_unfinished_pack_of_something_else(tmp_path: Path) -> None:
    model, out = tiny.checkpoint("llama"), tmp_path / "pack"
    stopped_before(model, out, group=3)
    for other, dtype in ((tiny.checkpoint("qwen3"), "float32"), (model, "float16")):
        assert f"{out} holds an unfinished pack of another" in refusal(
            lambda other=other, dtype=dtype: pack(other, out, dtype), PackError
        )
    assert pack(model, out)
    check_equal(model, out, "float32")


def test_only_one_at_a_time(tmp_path: Path) -> None:
    model, out = tiny.checkpoint("llama"), tmp_path / "pack"
    found: list[str] = []
    pack(model, out, progress=lambda count: found.append(refusal(lambda: pack(model, out), PackError)))
    assert found
    assert f"another process is packing into {out}" in found[0]
    check_equal(model, out, "float32")


# ---- where there is no room, or something else -------------------------------------------------------------


def test_too_little_room_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, out = tiny.checkpoint("llama"), tmp_path / "pack"
    real = os.statvfs(tmp_path)
    changed = os.statvfs_result(
        (real.f_bsize, 1, *real[2:4], 2 << 20, *real[5:])
    )  # 2 MiB; the pack takes 0.6 and is given 1 to spare
    monkeypatch.setattr(os, "statvfs", lambda path: changed)
    assert pack(model, out)
    changed = os.statvfs_result((real.f_bsize, 1, *real[2:4], 1 << 20, *real[5:]))
    assert "has 1.00 MiB free; the pack takes" in refusal(lambda: pack(model, tmp_path / "other"), PackError)
    assert not (tmp_path / "other").exists()


# What it compiles is not written: Python leaves a module's file cut short where the limit meets it, and who
# imports that later fails.
LIMITED = (
    "import resource, sys; sys.dont_write_bytecode = True; resource.setrlimit(resource.RLIMIT_FSIZE, "
    "(int(sys.argv[1]), -1)); "
)
LIMITED += "from penstock.cli.main import main; sys.exit(main(sys.argv[2:]))"


@pytest.mark.parametrize("limit", [0, 100, 5000, 300_000])
def test_disk_that_fills_while_packing(tmp_path: Path, limit: int) -> None:
    model, out = tiny.checkpoint("llama"), tmp_path / "pack"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", LIMITED, str(limit), "pack", model, "--out", out]
    result = forks.run(command, env=environment, text=True)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("penstock: error: no room for ")
    assert "is kept" not in result.stderr  # as no group is
    assert result.stderr.endswith(f"free some space and run the same command again, or remove {out}\n")
    assert result.stderr.count("\n") == 1
    if limit == 300_000:
        assert f"no room for {out / UNFINISHED}, group " in result.stderr
    assert "is an unfinished pack" in refusal(lambda: Pack.open(out))
    assert pack(model, out)
    check_equal(model, out, "float32")


def test_directories_that_are_not_to_be_taken(tmp_path: Path, llama: Path) -> None:
    model = tiny.checkpoint("llama")
    assert "holds a pack of another model or format; remove it" in refusal(
        lambda: pack(tiny.checkpoint("qwen3"), llama), PackError
    )
    assert "holds a pack of another dtype (float32)" in refusal(
        lambda: pack(model, llama, "float16"), PackError
    )
    shutil.copytree(model, tmp_path / "model")
    before = sorted(os.listdir(tmp_path / "model"))
    assert "holds other files (config.json)" in refusal(
        lambda: pack(tmp_path / "model", tmp_path / "model"), PackError
    )
    assert sorted(os.listdir(tmp_path / "model")) == before
    (tmp_path / "empty").mkdir()
    assert pack(model, tmp_path / "empty")
    verify(llama)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("file", "file: it exists and is no directory"),
        ("file/x", "file: it exists and is no directory"),
        ("link", "link: it exists and is no directory"),
        ("new/proc/x", "new/proc/x: No such file or directory"),
        ("n" * 300, f"{'n' * 300}: File name too long"),
        (f"new/a/{'n' * 300}", f"new/a/{'n' * 300}: File name too long"),
    ],
)
def test_where_no_directory_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, fault: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    if "proc" in name:
        (tmp_path / "new").symlink_to("/")
    before = sorted(os.listdir())
    assert main(["pack", str(tiny.checkpoint("llama")), "--out", name]) == 2
    assert (
        capsys.readouterr().err == f"penstock: error: cannot write {fault}; give another --out or --store\n"
    )
    assert sorted(os.listdir()) == before


def test_a_model_of_no_name_that_can_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pack", "n" * 300]) == 2
    assert capsys.readouterr().err.startswith("penstock: error: checkpoint nnn")


def test_a_failure_leaves_no_directory_that_it_made(tmp_path: Path) -> None:
    model, there = tiny.checkpoint("llama"), tmp_path / "there"
    there.mkdir()
    message = refusal(lambda: pack(model, there / "a" / "b" / "c", store=tmp_path / "none" / "x"), PackError)
    assert message.startswith(
        f"the store {tmp_path / 'none' / 'x'} cannot be made: there is no directory {tmp_path / 'none'}; "
        "make it"
    )
    assert "kept" not in message
    assert list(there.iterdir()) == []
    with packing.locked(there / "a" / "b"):
        (there / "a" / "other").touch()
    with pytest.raises(ZeroDivisionError), packing.locked(there / "a" / "c" / "d"):
        raise ZeroDivisionError
    assert sorted(path.name for path in (there / "a").iterdir()) == ["b", "other"]


@pytest.mark.parametrize(
    ("store", "name"),
    [
        (MANIFEST, MANIFEST),
        ("manifest", JOURNAL),
        ("manifest.json.tmp", "manifest.json.tmp"),
        ("config.json", "config.json"),
        ("tokenizer.model", "tokenizer.model"),
        ("additional_chat_templates", "additional_chat_templates"),
        ("model.safetensors", "model.safetensors"),
        ("../other/../link/config.json", "config.json"),
    ],
)
def test_a_store_in_the_place_of_another_file(tmp_path: Path, store: str, name: str) -> None:
    (tmp_path / "link").symlink_to("new/pack")
    (tmp_path / "other").mkdir()
    out = tmp_path / "new" / "pack"
    message = refusal(
        lambda: pack(
            tiny.checkpoint("llama"), out, store=Path(f"{out}/../{store}" if "link" in store else out / store)
        ),
        PackError,
    )
    assert f"cannot have that name, since {out} has another file {name}; " in message
    assert not out.parent.exists()


@pytest.mark.parametrize("name", ["weights", STORE])
def test_a_store_of_another_name_in_the_packs_directory(tmp_path: Path, name: str) -> None:
    out = tmp_path / "pack"
    assert pack(tiny.checkpoint("llama"), out, store=out / name)
    assert not pack(tiny.checkpoint("llama"), out, store=out / name)
    verify(out)


def test_what_is_kept_is_said_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, out = tiny.checkpoint("llama"), tmp_path / "pack"
    stopped_before(model, out, group=3)  # none of which was committed
    (out / "manifest.json.tmp").mkdir()
    (out / "config.json").unlink()
    (out / "config.json.tmp").mkdir()
    fault = "Is a directory"
    message = refusal(lambda: pack(model, out), PackError)
    assert (
        message
        == f"cannot write {out / 'config.json.tmp'}: {fault}; give another --out or --store and remove {out}"
    )
    (out / "config.json.tmp").rmdir()
    monkeypatch.setattr(packing, "COMMIT_BYTES", 1)
    message = refusal(lambda: pack(model, out), PackError)
    assert (
        message
        == f"cannot write {out / 'manifest.json.tmp'}: {fault}; what is packed is kept: the same command "
        "goes on with it"
    )
    (out / "manifest.json.tmp").rmdir()
    told: list[int] = []
    assert pack(model, out, progress=told.append)
    assert told == [(out / STORE).stat().st_size]


def test_a_damaged_model_leaves_nothing(tmp_path: Path) -> None:
    shutil.copytree(tiny.checkpoint("llama"), tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    with Checkpoint.open(tmp_path / "model") as checkpoint:
        os.truncate(file, 100_000)
        assert f"{file} changed while it was read" in refusal(
            lambda: write_pack(checkpoint, tmp_path / "pack", "float32")
        )
    assert "is cut short" in refusal(lambda: pack(tmp_path / "model", tmp_path / "pack"))
    assert not (tmp_path / "pack").exists()


def test_a_model_that_changes_meanwhile(tmp_path: Path) -> None:
    model, out = tmp_path / "model", tmp_path / "pack"
    shutil.copytree(tiny.checkpoint("llama"), model)
    size = (model / "model.safetensors").stat().st_size
    told: list[int] = []

    def change(count: int) -> None:
        if not told:
            flip(model / "model.safetensors", size - 1)
        told.append(count)

    assert "changed while it was packed" in refusal(lambda: pack(model, out, progress=change))
    assert "is an unfinished pack" in refusal(lambda: Pack.open(out))


# ---- damage ------------------------------------------------------------------------------------------------


def test_a_flipped_bit_anywhere_is_found(llama: Path) -> None:
    rng, file = random.Random(2), llama / STORE
    with Pack.open(llama) as found:
        for layout, run in zip(found.layouts, found.manifest.runs, strict=True):
            for at in (0, run.size - 1, run.length - 1, rng.randrange(run.length)):
                flip(file, run.offset + at, bit := rng.randrange(8))
                message = refusal(found.verify)
                assert f"{file}: group {run.id}, {run.size} bytes at byte {run.offset}, is damaged" in message
                assert (
                    f"the {run.length} bytes at byte {run.offset} are not those that were packed" in message
                )
                whole = aligned(run.length)
                assert message == refusal(
                    lambda layout=layout, whole=whole: found.read_piece(layout.id, 0, whole, check=True)
                )
                if at < run.size:
                    into = torch.empty(run.size, dtype=torch.uint8)
                    assert message == refusal(
                        lambda layout=layout, into=into: read_group(found, layout.id, into, check=True)
                    )
                flip(file, run.offset + at, bit)
        found.verify()
        first, last = found.manifest.runs[1], found.manifest.runs[-1]
        flip(file, last.offset)
        flip(file, first.offset)
        assert f"group {first.id}," in refusal(found.verify)


def test_a_flipped_bit_in_other_files(llama: Path) -> None:
    rng = random.Random(3)
    for name in (MANIFEST, "config.json", "generation_config.json"):
        for _ in range(30):
            at, bit = rng.randrange((llama / name).stat().st_size), rng.randrange(8)
            flip(llama / name, at, bit)
            assert name in refusal(lambda: verify(llama))
            flip(llama / name, at, bit)
    verify(llama)
    (llama / "generation_config.json").unlink()
    assert "generation_config.json" in refusal(lambda: verify(llama))


def test_a_store_of_the_wrong_size(llama: Path) -> None:
    file = llama / STORE
    size = file.stat().st_size
    with Pack.open(llama) as found:
        head, cut = found.manifest.runs[-1], found.manifest.runs[2]
        os.truncate(file, cut.offset + 1)
        into = torch.empty(cut.size, dtype=torch.uint8)
        group = GroupId(GroupKind.FFN, 0)
        for check in (False, True):
            message = refusal(lambda check=check: read_group(found, group, into, check))
            assert f"cannot read {file} at byte {cut.offset + 1}: it ends there" in message
            assert f"group ffn.0 at byte {cut.offset}" in message
    message = refusal(lambda: Pack.open(llama))
    assert message.startswith(
        f"{file} has {cut.offset + 1} bytes instead of {size}: it is cut short within group ffn.0 at byte "
        f"{cut.offset}"
    )
    os.truncate(file, size - 1)
    assert f"within group {head.id} at byte {head.offset}" in refusal(lambda: Pack.open(llama))
    os.truncate(file, size + 1)
    assert "it is not of this pack" in refusal(lambda: Pack.open(llama))
    file.unlink()
    assert f"cannot open {file}" in refusal(lambda: Pack.open(llama))


def test_parts_of_another_model(llama: Path, tmp_path: Path) -> None:
    pack(tiny.checkpoint("qwen3"), tmp_path / "other")
    shutil.copy(tmp_path / "other" / "config.json", llama / "config.json")
    assert f"{llama / 'config.json'} is not that of the model that was packed" in refusal(
        lambda: Pack.open(llama)
    )
    shutil.copy(tmp_path / "other" / MANIFEST, llama / MANIFEST)
    assert f"{llama / STORE} has" in refusal(lambda: Pack.open(llama))
    shutil.copy(tiny.checkpoint("llama") / "config.json", llama / "config.json")
    assert "is not that of the model that was packed" in refusal(lambda: Pack.open(llama))


def test_no_pack(tmp_path: Path) -> None:
    assert f"{tmp_path} is no pack, since it has no {MANIFEST}" in refusal(lambda: Pack.open(tmp_path))
    (tmp_path / MANIFEST).symlink_to("nowhere")
    assert f"cannot open {tmp_path / MANIFEST}" in refusal(lambda: Pack.open(tmp_path))
    (tmp_path / MANIFEST).unlink()
    with (tmp_path / MANIFEST).open("wb") as file:
        file.truncate(100_000_001)
    assert "a manifest has at most" in refusal(lambda: Pack.open(tmp_path))


def test_every_file_is_given_back(tmp_path: Path, llama: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    pack(tiny.checkpoint("llama"), tmp_path / "other")
    verify(llama)
    os.truncate(llama / STORE, 5000)
    refusal(lambda: Pack.open(llama))
    stopped_before(tiny.checkpoint("llama"), tmp_path / "third", group=2)
    assert len(os.listdir("/proc/self/fd")) == before


def test_tasks_come_back_in_order_and_none_is_left_behind() -> None:
    assert list(in_order((lambda number=number: number for number in range(100)), 3)) == list(range(100))
    ran: list[int] = []
    found = in_order((lambda number=number: ran.append(number) for number in range(100)), 3)  # type: ignore[func-returns-value]
    next(found)
    found.close()
    assert 1 <= len(ran) <= 6
    with pytest.raises(ZeroDivisionError):
        list(in_order((lambda number=number: 1 // (3 - number) for number in range(100)), 2))


# ---- pieces ------------------------------------------------------------------------------------------------

SMALL = 16384


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Pack]:
    """An open pack of many small pieces; no group is a whole number of them."""
    for module in (manifest, reading, packing):
        monkeypatch.setattr(module, "PIECE_BYTES", SMALL)
    pack(tiny.checkpoint("qwen3_moe"), tmp_path / "pack")
    with Pack.open(tmp_path / "pack") as found:
        assert max(len(run.pieces) for run in found.manifest.runs) > 3
        yield found


def where(found: Pack) -> list[tuple[GroupId, int, int, int]]:
    """Every piece: its group, where it starts in the group's run and in the store, its length."""
    runs = zip(found.layouts, found.manifest.runs, strict=True)
    return [
        (layout.id, start, run.offset + start, run.piece_length(start))
        for layout, run in runs
        for start in run.pieces
    ]


@pytest.mark.parametrize("shift", [0, 1, 512])
@pytest.mark.parametrize("refused", [False, True])
def test_pieces_into_any_memory(pieces: Pack, shift: int, refused: bool) -> None:
    data = pieces.store.path.read_bytes()
    pieces.store.direct = pieces.store.direct and not refused
    for group, start, at, length in where(pieces):
        assert run_of(pieces, group).length % PAGE == 0
        for check in (False, True):
            into = aligned(length, shift)
            pieces.read_piece(group, start, into, check)
            assert into.numpy().tobytes() == data[at : at + length]
        if start == 0:  # all of the group at once; and any pages, which have no digest
            into = aligned(run_of(pieces, group).length, shift)
            pieces.read_piece(group, 0, into, check=True)
            assert into.numpy().tobytes() == data[at : at + len(into)]
            into = aligned(PAGE, shift)
            pieces.read_piece(group, run_of(pieces, group).length - PAGE, into)
            assert into.numpy().tobytes() == data[at + run_of(pieces, group).length - PAGE :][:PAGE]
    assert pieces.store.direct or refused or not is_direct(pieces.store.path)


def is_direct(path: Path) -> bool:
    """Whether the kernel reads this file past the page cache."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return False
    try:
        return os.preadv(file, [aligned(PAGE).numpy().data], 0) == PAGE
    except OSError:
        return False
    finally:
        os.close(file)


def test_a_flipped_bit_is_found_in_its_piece_only(pieces: Pack) -> None:
    rng, file = random.Random(9), pieces.store.path
    damaged = {at: rng.randrange(length) for _, _, at, length in where(pieces)[::2]}
    for at, byte in damaged.items():
        flip(file, at + byte, rng.randrange(8))
    for group, start, at, length in where(pieces):
        into = aligned(length)
        pieces.read_piece(group, start, into)
        if at in damaged:
            message = refusal(
                lambda group=group, start=start, into=into: pieces.read_piece(group, start, into, check=True)
            )
            assert message.startswith(f"{file}: group {group}, ")
            assert f"the {length} bytes at byte {at} are not those that were packed" in message
        else:
            pieces.read_piece(group, start, into, check=True)


def test_a_store_cut_while_it_is_open(pieces: Pack) -> None:
    places, file = where(pieces), pieces.store.path
    group, start, at, length = places[len(places) // 2]
    for end in (at + PAGE, at + 700, at):
        os.truncate(file, end)
        for shift in (0, 1):
            for check in (False, True):
                into = aligned(length, shift)
                message = refusal(lambda into=into, check=check: pieces.read_piece(group, start, into, check))
                assert f"cannot read {file} at byte {end}: it ends there" in message
                assert message.startswith(f"group {group} at byte {at - start}: ")
    before = places[len(places) // 2 - 1]
    pieces.read_piece(before[0], before[1], aligned(before[3]), check=True)


def test_a_disk_that_fails(pieces: Pack) -> None:
    """Behind the store's descriptors is another file, which gives true input/output errors at such places."""
    for file in {pieces.store._fd, pieces.store._direct} - {-1}:
        broken = os.open("/proc/self/mem", os.O_RDONLY)
        os.dup2(broken, file)
        os.close(broken)
    group, start, at, length = where(pieces)[1]
    assert 0 < at < 65536  # where no process has memory
    for shift in (0, 1):
        into = aligned(length, shift)
        message = refusal(lambda into=into: pieces.read_piece(group, start, into, check=True))
        assert (
            message == f"group {group} at byte {at - start}: cannot read {pieces.store.path} at byte {at}: "
            "Input/output error; check the disk"
        )


def test_many_threads_read_pieces(pieces: Pack) -> None:
    data = pieces.store.path.read_bytes()
    places = where(pieces) * 3
    random.Random(10).shuffle(places)

    def right(number: int) -> bool:
        group, start, at, length = places[number]
        into = aligned(length, shift=number % 3)
        pieces.read_piece(group, start, into, check=number % 2 == 0)
        return into.numpy().tobytes() == data[at : at + length]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(right, range(len(places))))


def test_a_large_piece_is_one_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.write(tiny.CASES["llama"], tmp_path / "model", vocab_size=150_001, num_hidden_layers=1)
    pack(model, tmp_path / "pack")
    asked: list[tuple[int, int]] = []
    real = os.preadv

    def seen(file: int, buffers: list[memoryview], offset: int) -> int:
        asked.append((offset, len(buffers[0])))
        return real(file, buffers, offset)

    with Pack.open(tmp_path / "pack") as found:
        head, length = found.layouts[-1].id, 2 * PIECE_BYTES
        assert run_of(found, head).length > length
        if not is_direct(found.store.path):
            pytest.skip("needs a file system that reads past the page cache")
        monkeypatch.setattr(os, "preadv", seen)
        found.read_piece(head, 0, aligned(length), check=True)
        assert asked == [(run_of(found, head).offset, length)]


# ---- memory and the command --------------------------------------------------------------------------------

MEASURED = """
import sys, torch
from pathlib import Path
from penstock.weights.pack import reader as reading
from penstock.weights.pack import writer as packing
from penstock.weights.checkpoint.reader import Checkpoint
from penstock.weights.pack.reader import Pack
from penstock.weights.pack.writer import write_pack
reading.THREADS = packing.THREADS = 2
def peak():
    [line] = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024
torch.zeros(1000).half()
before = peak()
with Checkpoint.open(Path(sys.argv[1])) as checkpoint:
    write_pack(checkpoint, Path(sys.argv[2]), sys.argv[3])
with Pack.open(Path(sys.argv[2])) as pack:
    pack.verify()
    print(peak() - before, max(layout.size for layout in pack.layouts))
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_does_not_grow_with_groups(tmp_path: Path, dtype: str) -> None:
    """Files without blocks, so that only what is written takes room."""
    rows = 37_500 if dtype == "float32" else 75_000  # As many bytes of either.
    config = {
        "model_type": "llama",
        "vocab_size": rows,
        "hidden_size": 1024,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
    }
    config |= {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 8, "tie_word_embeddings": True}
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config))
    entries, end = {}, 0
    with torch.device("meta"):
        tensors = tiny.transformers.AutoModelForCausalLM.from_config(
            tiny.transformers.AutoConfig.for_model(**config)
        ).state_dict()
    for name, tensor in tensors.items():
        if name != "lm_head.weight":
            size = tensor.numel() * 4
            entries[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [end, end + size]}
            end += size
    header = sealed(json.dumps(entries).encode())
    with (model / "model.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + end)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", MEASURED, model, tmp_path / "pack", dtype]
    result = forks.run(command, env=environment, text=True)
    assert result.returncode == 0, result.stderr
    grown, largest = map(int, result.stdout.split())
    assert largest > 140e6
    assert grown < min(100e6, 3 * 2 * PIECE_BYTES + 40e6)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(tiny.checkpoint("llama_bfloat16_file"), tmp_path / "model")
    out = tmp_path / "model.pack"
    assert main(["pack", str(tmp_path / "model")]) == 0
    assert capsys.readouterr().out.startswith(f"{out}: 8 groups, ")
    check_equal(tmp_path / "model", out, "bfloat16")
    assert main(["pack", str(tmp_path / "model")]) == 0
    assert capsys.readouterr().out.startswith(f"{out} is packed already: 8 groups, ")
    assert main(["pack", "--verify", str(out)]) == 0
    assert "8 groups and 2 files are as they were packed" in capsys.readouterr().out
    assert main(["pack", str(out)]) == 2
    assert "is a pack already" in capsys.readouterr().err
    flip(out / STORE, 5)
    assert main(["pack", "--verify", str(out)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"penstock: error: {out / STORE}: group embedding, ")
    stopped_before(tmp_path / "model", tmp_path / "half", group=1)
    assert main(["pack", "--verify", str(tmp_path / "half")]) == 2
    message = (
        f"{tmp_path / 'half'} is an unfinished pack; `penstock pack MODEL --out {tmp_path / 'half'}` goes on "
        "with it"
    )
    assert capsys.readouterr().err == f"penstock: error: {message}\n"
    assert main(["pack", "--verify", str(out), "--dtype", "float16"]) == 2
    assert "--verify takes only the directory of a pack" in capsys.readouterr().err


def test_links_of_a_pack_are_looked_at_before_its_manifest_is_read(tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "secret").write_text("{}")
    (tmp_path / "pack" / MANIFEST).symlink_to("../secret")
    with pytest.raises(CheckpointError, match="outside of the model's directory"):
        Pack.open(tmp_path / "pack")


def test_how_far_packing_is_is_told_also_where_there_is_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hashing comes first, which reads everything, and checks read everything again."""
    shutil.copytree(SHIPPED_MODEL, tmp_path / "model")
    out = tmp_path / "model.pack"
    monkeypatch.setattr("penstock.cli.commands.pack.CACHE", tmp_path / "cache")
    assert main(["pack", str(tmp_path / "model"), "--dtype", "float32"]) == 0
    assert capsys.readouterr().err == "", "what is done soon is told by no line"
    shutil.rmtree(out)
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)  # Files so young are not remembered.
    monkeypatch.setattr("penstock.cli.progress.LINES_EVERY", 0.0)
    assert main(["pack", str(tmp_path / "model"), "--dtype", "float32"]) == 0
    lines = capsys.readouterr().err.splitlines()
    size = r"[\d.]+ [KM]?i?B"
    for what in ("hashing", "packing"):
        told = [one for one in lines if re.fullmatch(rf"{what}: {size} of {size}, [\d.]+ [KMG]?B/s", one)]
        assert told, (what, lines)
    assert main(["pack", "--verify", str(out)]) == 0
    assert re.search(rf"(?m)^checking: {size} of {size}, ", capsys.readouterr().err)


def test_bytes_that_are_hashed_are_told_and_add_up(tmp_path: Path) -> None:
    told = list[int]()
    with Checkpoint.open(SHIPPED_MODEL, tmp_path) as checkpoint:
        todo = checkpoint.identify()
        assert todo == (SHIPPED_MODEL / "model.safetensors").stat().st_size
        digests = checkpoint.digests(told.append)
    assert sum(told) == todo
    with Checkpoint.open(SHIPPED_MODEL, tmp_path) as checkpoint:
        assert checkpoint.identify() == 0
        assert checkpoint.digests().files == digests.files
