"""Whose a request is, by the key that came with it, and with whom it shares prefixes."""

from dataclasses import dataclass
from hashlib import blake2b

DIGEST_BYTES = 16
NOBODY = b""
"""Whoever asks a server without keys."""


@dataclass(frozen=True, slots=True)
class Key:
    """What a client sends to be answered, and the least number that it may ask for as `priority`."""

    secret: bytes
    priority: int = 0


def owner_of(key: bytes) -> bytes:
    """What stands for a key wherever something is kept for it, in memory or on disk: a digest, from which a key can only be guessed."""
    return blake2b(key, digest_size=DIGEST_BYTES, person=b"penstock-owner").digest()


def salt_of(owner: bytes, given: str | None, *, share: bool) -> bytes:
    """Prefixes are shared between requests of the same salt: of one key that send the same `cache_salt`, or none; share: of any key."""
    whose = NOBODY if share else owner
    if not whose and given is None:
        return b""
    said = b"" if given is None else b"\1" + given.encode("utf-8", "surrogatepass")
    return blake2b(whose + said, digest_size=DIGEST_BYTES, person=b"penstock-salt").digest()
