"""The name of a full KV block: a hash over everything its contents depend on, the same in every process and
on every machine.

A block's key chains the key of the block before it with the block's own tokens, so equal keys mean equal
prefixes. The first link is a root that covers the model, its dtype, the layout of the KV and whatever else
its contents depend on (`engine.boot`).
"""

import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b

KEY_BYTES = 16
_BIG_ENDIAN = sys.byteorder == "big"


def root_key(fingerprint: bytes, *facts: object) -> bytes:
    """Return the first link of all chains: a digest of the model's fingerprint and of whatever else KV
    depends on (dtype, block size, a prompt's length)."""
    digest = blake2b(fingerprint, digest_size=KEY_BYTES, person=b"penstock-root")
    digest.update(repr(facts).encode())
    return digest.digest()


def block_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Return the key of the block that holds `tokens` and follows the block with key `parent`."""
    return block_keys(parent, tokens, len(tokens))[0]


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
