"""Codes of records: of one key, one store, one block and its bytes; and the key, which nobody else may
have."""

import os
import threading
from pathlib import Path

import pytest

from penstock.kv.store.seal import SEAL_BYTES, SECRET, Seal, SecretError, key_id, sealed_identity, secret_in

MINE, OTHERS, KEY = bytes(range(32)), bytes(range(1, 33)), bytes(range(16))
DATA = bytearray(range(256)) * 64


def test_a_seal_is_of_all_that_it_is_made_of() -> None:
    seal = Seal(b"store", MINE)
    made = seal.of(KEY, memoryview(DATA))
    assert len(made) == SEAL_BYTES
    assert seal.fits(made, KEY, memoryview(DATA))
    assert Seal(b"store", MINE).fits(made, KEY, memoryview(DATA))
    assert not Seal(b"other", MINE).fits(made, KEY, memoryview(DATA))
    assert not Seal(b"store", OTHERS).fits(made, KEY, memoryview(DATA))
    for at in range(16):
        other = bytearray(KEY)
        other[at] ^= 1
        assert not seal.fits(made, bytes(other), memoryview(DATA))
    for at in (0, 1, 8191, len(DATA) - 1):
        for bit in (1, 128):
            changed = bytearray(DATA)
            changed[at] ^= bit
            assert not seal.fits(made, KEY, memoryview(changed))
    for at in range(SEAL_BYTES):
        forged = bytearray(made)
        forged[at] ^= 1
        assert not seal.fits(bytes(forged), KEY, memoryview(DATA))
    assert not seal.fits(made, KEY, memoryview(DATA)[:-1])
    assert not seal.fits(bytes(SEAL_BYTES), KEY, memoryview(DATA))


def test_no_two_have_the_same_nonce() -> None:
    """With one twice, whoever has both records could make any other."""
    seal = Seal(b"store", MINE)
    assert len({seal.of(KEY, memoryview(DATA))[:8] for _ in range(1000)}) == 1000


def test_another_key_has_another_store() -> None:
    names = {
        sealed_identity(identity, secret) for identity in (b"a" * 16, b"b" * 16) for secret in (MINE, OTHERS)
    }
    assert len(names) == 4
    assert key_id(MINE) != key_id(OTHERS)


def test_the_key_is_made_once_and_is_its_owner_s_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        first = secret_in(tmp_path / "new" / "cache")
    finally:
        os.umask(before)
    assert secret_in(tmp_path / "new" / "cache") == first
    assert secret_in(tmp_path) != first
    assert (tmp_path / "new" / "cache" / SECRET).stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path / "new" / "cache") == [SECRET]


def test_of_many_that_make_it_at_once_all_have_the_same(tmp_path: Path) -> None:
    found: list[bytes] = []
    begin = threading.Barrier(8)

    def make() -> None:
        begin.wait()
        found.append(secret_in(tmp_path / "cache"))

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_key_that_others_may_see_is_refused(tmp_path: Path, mode: int) -> None:
    secret_in(tmp_path)
    (tmp_path / SECRET).chmod(mode)
    with pytest.raises(SecretError, match="must belong to you alone"):
        secret_in(tmp_path)


@pytest.mark.parametrize("content", [b"", bytes(31), bytes(33)])
def test_what_is_no_key_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / SECRET).write_bytes(content)
    (tmp_path / SECRET).chmod(0o600)
    with pytest.raises(SecretError, match="is damaged, since a key has 32 bytes"):
        secret_in(tmp_path)


def test_a_link_or_a_directory_is_none(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(bytes(32))
    (tmp_path / "elsewhere").chmod(0o600)
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / SECRET).symlink_to(tmp_path / "elsewhere")
    (tmp_path / "two" / SECRET).mkdir(parents=True)
    for place in ("one", "two"):
        with pytest.raises(SecretError):
            secret_in(tmp_path / place)
