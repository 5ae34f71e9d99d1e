"""The key of a full KV block: a hash of everything that its contents depend on.

A block gets its key when it is full (`blocks.Ledger.seal`). Its copies have the same one on every tier, in
every process and on every machine. A key chains the key of the block before with the block's own tokens, so
equal keys mean equal prefixes. The first link is a root that covers the model, its dtype, the layout of the
KV and whatever else its contents depend on (`engine.store.root_of`).
"""

import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b

KEY_BYTES = 16
_BIG_ENDIAN = sys.byteorder == "big"


def root_key(fingerprint: bytes, *facts: object) -> bytes:
    """Return the first link of a chain: a digest of the model's fingerprint and of other facts.

    facts: whatever else KV depends on, such as dtype, block size or a prompt's length.
    """
    digest = blake2b(fingerprint, digest_size=KEY_BYTES, person=b"penstock-root")
    digest.update(repr(facts).encode())
    return digest.digest()


def block_keys(parent: bytes, tokens: Sequence[int], size: int) -> list[bytes]:
    """Return the keys of the full blocks of `size` tokens that follow the block with key `parent`."""
    words = array("I", tokens)
    if _BIG_ENDIAN:
        words.byteswap()
    data, width = memoryview(words).cast("B"), size * words.itemsize
    keys, begin = [], blake2b(digest_size=KEY_BYTES, person=b"penstock-block").copy
    for start in range(0, len(data) - width + 1, width):
        digest = begin()
        digest.update(parent)
        digest.update(data[start : start + width])
        parent = digest.digest()
        keys.append(parent)
    return keys
