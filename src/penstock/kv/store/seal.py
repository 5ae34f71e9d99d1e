"""What tells a record that this user's engines have written from every other: a code that nobody can make
without the key.

The code is that of AES in Galois/counter mode (NIST SP 800-38D), which reads memory faster than a plain
checksum: over the record's bytes and its block's key, by a key that is derived from the user's own and the
store's identity. A key must never be used twice with one nonce: each record has 8 random bytes of its own,
and 4 of its block's key. Of the 16 bytes of the code 12 are kept.
"""

import hmac
import os
import secrets
import stat
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from zlib import crc32

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from penstock.base.errors import PenstockError
from penstock.kv.ledger.keys import KEY_BYTES
from penstock.memory.disk import make_private

SECRET = "kv.key"
"""The file in the cache directory."""
SECRET_BYTES = 32
_SALT, _CODE = 8, 12
SEAL_BYTES = _SALT + _CODE


class SecretError(PenstockError):
    """The user's key cannot be had, or others may read it."""


class Seal:
    """Of the store with this identity. Threads may share it."""

    def __init__(self, identity: bytes, secret: bytes) -> None:
        self.seed = crc32(identity)
        """By which entries of journals are told from others'. These are no more than a guide: what they name
        is held against its code."""
        self._cipher = AESGCM(blake2b(identity, key=secret, digest_size=32, person=b"penstock-seal").digest())

    def of(self, key: bytes, data: memoryview) -> bytes:
        """A new one for a block's record: SEAL_BYTES."""
        salt = os.urandom(_SALT)
        return salt + self._code(salt, key, data)

    def fits(self, seal: bytes, key: bytes, data: memoryview) -> bool:
        """Whether it was made for this record."""
        return hmac.compare_digest(self._code(seal[:_SALT], key, data), seal[_SALT:])

    def _code(self, salt: bytes, key: bytes, data: memoryview) -> bytes:
        assert len(key) == KEY_BYTES
        return self._cipher.encrypt(salt + key[: 12 - _SALT], key, data)[KEY_BYTES : KEY_BYTES + _CODE]


def key_id(secret: bytes) -> str:
    """By which a store says with which key its records are sealed."""
    return blake2b(secret, digest_size=8, person=b"penstock-key").hexdigest()


def secret_in(cache: Path) -> bytes:
    """The user's key, in the cache directory; it is made if there is none. Raises SecretError."""
    path = cache / SECRET
    try:
        if not path.exists():
            _make(path)
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            there, secret = os.fstat(file), os.read(file, SECRET_BYTES + 1)
        finally:
            os.close(file)
    except OSError as fault:
        raise SecretError(f"{path} cannot be read or made: {fault.strerror}; name another --cache") from fault
    if there.st_uid != os.geteuid() or there.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise SecretError(
            f"{path} must belong to you alone (mode 0600), or others could put KV in your cache; remove it: "
            "a new key is made, and KV on disk is computed again"
        )
    if len(secret) != SECRET_BYTES or not stat.S_ISREG(there.st_mode):
        raise SecretError(
            f"{path} is damaged, since a key has {SECRET_BYTES} bytes; remove it: a new key is made, and KV "
            "on disk is computed again"
        )
    return secret


def _make(path: Path) -> None:
    """At once, or not at all: of several processes the first one's key stays. Raises OSError."""
    make_private(path.parent)
    beside = path.with_name(f".{SECRET}-{secrets.token_hex(8)}")
    file = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(file, secrets.token_bytes(SECRET_BYTES))
        os.fsync(file)
        with suppress(FileExistsError):
            os.link(beside, path)
    finally:
        os.close(file)
        os.unlink(beside)


def sealed_identity(identity: bytes, secret: bytes) -> bytes:
    """The identity of a store whose records this key seals: with another key they are another store's, and
    not damaged."""
    return blake2b(identity, key=secret, digest_size=16, person=b"penstock-store").digest()
