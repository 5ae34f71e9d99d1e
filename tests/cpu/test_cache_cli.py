"""`penstock cache`: what it says of stores of KV is so, what it finds damaged is used no more, and what it
removes are stores."""

import json
import os
import pty
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from penstock.cli.commands import cache
from penstock.cli.main import main
from penstock.kv.store import cachedir
from penstock.kv.store.directory import ABOUT, PREFIX
from penstock.kv.store.seal import SECRET as KEY_FILE
from stores import (
    IDENTITY,
    PAGE,
    SECRET,
    directory_of,
    files,
    flip,
    held,
    journal,
    key_of,
    known,
    name_of,
    opened,
    place_of,
    put,
    real,
)

OTHER = next(
    bytes([number] * 16) for number in range(256) if name_of(bytes([number] * 16)) > name_of(IDENTITY)
)
"""Which comes behind, by the names of their directories."""
ABOUT_MODEL = {"model": "tiny\x1b[2J-7b", "dtype": "bfloat16", "block_size": 32}


KEYS = Path(tempfile.mkdtemp())
(KEYS / KEY_FILE).write_bytes(SECRET)
(KEYS / KEY_FILE).chmod(0o600)


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    sealed = ["--cache", str(KEYS)] if arguments[:1] == ("verify",) else []
    code = main(["cache", *map(str, arguments), *sealed])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def fill(
    directory: Path,
    numbers: Iterable[int],
    identity: bytes = IDENTITY,
    about: dict[str, object] | None = None,
) -> None:
    with opened(directory, identity=identity, about=about) as store:
        put(store, numbers)


@pytest.fixture
def stores(tmp_path: Path) -> Path:
    """Two of them, beside what is none."""
    fill(tmp_path, range(20), about=ABOUT_MODEL)
    fill(tmp_path, range(5), OTHER)
    (tmp_path / "my-model-bfloat16").mkdir()
    (tmp_path / f"{PREFIX}notes.txt").write_text("not a store")
    return tmp_path


def test_ls_names_what_is_there(stores: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "ls", stores)
    head, first, second = out.splitlines()
    assert (code, err) == (0, "")
    assert re.split("  +", head) == ["STORE", "MODEL", "DTYPE", "BLOCK", "RECORDS", "SIZE", "LAST USED"]
    used = re.split("  +", first)
    assert used[:5] == [name_of(IDENTITY)[:12], "tiny␛[2J-7b", "bfloat16", "32", "20"]
    assert used[5] == f"{real(directory_of(stores, IDENTITY)) >> 10} KiB"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d", used[6])
    assert re.split("  +", second)[:5] == [name_of(OTHER)[:12], "?", "?", "?", "5"]
    one = run(capsys, "ls", directory_of(stores, OTHER))[1].splitlines()
    assert [re.split("  +", line) for line in one] == [re.split("  +", line) for line in (head, second)]


def test_where_there_is_nothing_nothing_is_said_to_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "CACHE", tmp_path / "cache")
    for arguments in (["ls", tmp_path], ["ls"], ["verify"], ["clear", tmp_path]):
        code, out, _ = run(capsys, *arguments)
        assert (code, out.split(": ")[1]) == (0, "no KV is kept there\n")
    fill(tmp_path / "cache", range(3))
    assert "\n" + name_of(IDENTITY)[:12] in run(capsys, "ls")[1]
    code, _, err = run(capsys, "ls", tmp_path / "nowhere")
    assert code == 2
    assert "cannot be read: No such file or directory; give a --kv-directory that you may read" in err


def test_stat_adds_up(stores: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with opened(stores, about=ABOUT_MODEL) as store:
        store.forget(map(key_of, range(9, 12)))
        flip(*place_of(store, 0))
        assert held(store, [0]) == set()
    code, out, _ = run(capsys, "stat", stores)
    first, _, total = out.splitlines()
    took = [real(directory_of(stores, identity)) for identity in (IDENTITY, OTHER)]
    assert code == 0
    assert f"tiny␛[2J-7b, 16 records, 64.0 KiB; {took[0] >> 10} KiB of the disk in 3 segments, " in first
    assert f"{(took[0] >> 10) - 64:.0f}" in first
    assert first.endswith("1 quarantined")
    assert total == f"2 stores, 21 records, {sum(took) >> 10} KiB of the disk"


def test_a_store_that_is_in_use_can_be_looked_at(stores: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with opened(stores) as store:
        put(store, [30])
        assert "  21  " in run(capsys, "ls", store.path)[1]
        flip(*place_of(store, 4))
        code, out, _ = run(capsys, "verify", stores)
        assert code == 1
        assert "20 of 21 records are as they were written" in out
        assert "1 are damaged: left, as another process writes there" in out
        assert key_of(4) in store
        code, _, err = run(capsys, "clear", "--yes", stores)
        assert code == 2
        assert "another process writes KV" in err
        assert held(store, range(31)) == {*range(20), 30} - {4}
    with opened(stores, identity=OTHER) as store:
        assert held(store, range(5)) == set(range(5))


def test_verify_finds_what_is_damaged_and_puts_it_aside(
    stores: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, "verify", stores)
    assert code == 0
    assert len(out.splitlines()) == 2
    assert "20 of 20 records are as they were written (" in out
    assert "5 of 5 records are as they were written (" in out
    with opened(stores) as store:
        places = [place_of(store, number) for number in (3, 19)]
    for place in places:
        flip(*place)
    for identity in (IDENTITY, OTHER):  # Neither is what people read needed for it.
        (directory_of(stores, identity) / ABOUT).write_bytes(b"\xff")
    code, out, _ = run(capsys, "verify", stores)
    assert code == 1
    assert "18 of 20 records are as they were written" in out
    assert "2 are damaged: put aside, and will not be used" in out
    for place in places:
        flip(*place)
    code, out, _ = run(capsys, "verify", stores)
    assert code == 0
    assert "18 of 18 records" in out
    assert "2 were put aside earlier" in out
    with opened(stores) as store:
        assert known(store) == held(store, range(20)) == set(range(20)) - {3, 19}
        assert store.stats.quarantined == 2


def test_verify_tells_damage_from_what_cannot_be_read(
    stores: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with opened(stores) as store:
        path, start = place_of(store, 17)
    whole = path.read_bytes()
    os.truncate(path, start + 1)
    code, out, _ = run(capsys, "verify", stores)
    assert code == 1
    assert "17 of 20 records are as they were written" in out
    assert "3 cannot be read now" in out
    assert "damaged" not in out
    path.write_bytes(whole)
    assert run(capsys, "verify", stores)[0] == 0


def test_a_lost_journal_is_said_and_mended(stores: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal(stores).unlink()
    assert "  20  " in run(capsys, "ls", stores)[1]
    assert "its journal is lost, and this is from its segments" in run(capsys, "stat", stores)[1]
    flip(files(stores)[0], 2 * PAGE)
    code, out, _ = run(capsys, "verify", stores)
    assert code == 1
    assert (
        "1 are damaged: left, as the journal is lost; the model that the store belongs to will not use them"
        in out
    )
    assert not journal(stores).exists()
    with opened(stores) as store:
        assert len(held(store, range(20))) == 19
    assert run(capsys, "verify", stores)[0] == 0


@pytest.mark.parametrize(
    "size", [None, True, PAGE // 2, PAGE // 4096, 3 * PAGE, 64 * PAGE, 10**14, 10**23, "4096"]
)
def test_a_lost_journal_is_not_made_from_hearsay(
    stores: Path, size: object, capsys: pytest.CaptureFixture[str]
) -> None:
    """Records of a wrong size would all be damaged, and a journal that says so would keep the right model
    out."""
    journal(stores).unlink()
    about = directory_of(stores, IDENTITY) / ABOUT
    about.write_text(json.dumps({"record_bytes": size}))
    sizes_alike = size in (PAGE // 2, PAGE // 4096)  # Places are whole pages.
    for command in ("ls", "stat", "verify"):
        code, _, err = run(capsys, command, stores)
        if not sizes_alike:
            assert code == 2
            assert "does not have the size of its records; start the model that it belongs to" in err
    assert not journal(stores).exists()
    with opened(stores) as store:
        assert len(held(store, range(20))) == 20


def test_a_link_to_a_store_is_none(stores: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (stores / f"{PREFIX}aabb").symlink_to(directory_of(stores, IDENTITY).name)
    assert len(run(capsys, "ls", stores)[1].splitlines()) == 3
    assert run(capsys, "clear", "--yes", stores)[0] == 0
    assert (stores / f"{PREFIX}aabb").is_symlink()
    assert not directory_of(stores, IDENTITY).exists()


def test_clear_removes_stores_and_nothing_else(
    stores: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, err = run(capsys, "clear", stores)
    assert code == 2
    assert "cannot ask whether to remove 2 stores of KV" in err
    ours, theirs = pty.openpty()
    with open(theirs) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        os.write(ours, b"n\n")
        code, _, err = run(capsys, "clear", stores)
        assert (code, "Remove 2 stores of KV in" in err, "nothing was removed" in err) == (0, True, True)
        assert len(cachedir.store_paths(stores)) == 2
        os.write(ours, b"y\n")
        assert run(capsys, "clear", directory_of(stores, OTHER))[0] == 0
    os.close(ours)
    assert [path.name for path in cachedir.store_paths(stores)] == [directory_of(stores, IDENTITY).name]
    strange = directory_of(stores, IDENTITY) / "mine.txt"
    strange.write_text("kept")
    code, _, err = run(capsys, "clear", "--yes", stores)
    assert code == 2
    assert "cannot be removed: Directory not empty; remove it by hand" in err
    assert os.listdir(strange.parent) == ["mine.txt"]
    strange.unlink()
    code, out, _ = run(capsys, "clear", "--yes", stores)
    assert (code, out) == (0, f"1 store of KV in {stores}: removed\n")
    assert sorted(os.listdir(stores)) == [f"{PREFIX}notes.txt", "my-model-bfloat16"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rm"], "'rm' is not one of 'ls', 'stat', 'verify', 'clear'"),
        (["ls", "--yes"], "--yes goes only with `penstock cache clear`"),
        ([], "missing argument '{ls|stat|verify|clear}'"),
    ],
)
def test_wrong_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert message in err


def test_it_does_without_torch(stores: Path) -> None:
    flip(files(stores)[0], 3 * PAGE)
    code = (
        "import sys; from penstock.cli.main import main; a = main(sys.argv[1:]); sys.exit(9 if 'torch' in "
        "sys.modules else a)"
    )
    for action, expected in (("ls", 0), ("stat", 0), ("verify", 1)):
        command = [
            sys.executable,
            "-c",
            code,
            "cache",
            action,
            str(stores),
            *(["--cache", str(KEYS)] if action == "verify" else []),
        ]
        assert subprocess.run(command, capture_output=True, check=False).returncode == expected


def test_another_key_does_not_put_all_aside(
    stores: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cache", "verify", str(stores), "--cache", str(tmp_path_factory.mktemp("other"))]) == 2
    assert "was sealed with another key" in capsys.readouterr().err
    for identity in (IDENTITY, OTHER):
        (directory_of(stores, identity) / ABOUT).unlink()
    assert main(["cache", "verify", str(stores), "--cache", str(tmp_path_factory.mktemp("third"))]) == 2
    assert "nothing was changed" in capsys.readouterr().err
    with opened(stores) as store:
        assert held(store, range(20)) == set(range(20))
