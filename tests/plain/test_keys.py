"""A block's key is the same everywhere and for ever, and differs whenever the KV would."""

import os
import struct
import subprocess
import sys
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kv.ledger import keys
from penstock.kv.ledger.keys import KEY_BYTES, block_keys, root_key
from penstock.sched.rules import PrefixRule

PINNED = (
    "50677c98afa2c1b5f6c9a551b2812264",
    "09e5e6880fb84582038c350970738aaf",
    "8165b94cd8884628e9b72137afb916f0",
)
"""Journals on disk name blocks by these: if they change, every stored block is lost."""
CHAIN = """
from penstock.kv.ledger.keys import block_keys, root_key
root = root_key(b"model", "float32", 32)
(first,) = block_keys(root, [0, 1, 2, 3], 4)
(second,) = block_keys(first, [151643, 2**32 - 1], 2)
print(root.hex(), first.hex(), second.hex())
"""
blocks = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3), min_size=1, max_size=4)


def block_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The key of one block of all these tokens."""
    (key,) = block_keys(parent, tokens, len(tokens))
    return key


def chained(root: bytes, parts: list[list[int]]) -> bytes:
    for part in parts:
        root = block_key(root, part)
    return root


@pytest.mark.parametrize("seed", ["0", "1", "4294967295"])
def test_keys_are_the_same_in_every_process(seed: str) -> None:
    source = Path(keys.__file__).parents[3]
    env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(source)}
    printed = subprocess.run(
        [sys.executable, "-c", CHAIN], env=env, capture_output=True, text=True, check=True
    ).stdout
    assert tuple(printed.split()) == PINNED


def test_a_key_hashes_the_parent_and_little_endian_words() -> None:
    parent = bytes(range(16))
    words = struct.pack("<3I", 1, 256, 2**32 - 1)
    assert (
        block_key(parent, [1, 256, 2**32 - 1])
        == blake2b(parent + words, digest_size=16, person=b"penstock-block").digest()
    )


@given(blocks, blocks)
def test_keys_are_equal_if_and_only_if_the_blocks_are(one: list[list[int]], other: list[list[int]]) -> None:
    root = root_key(b"model")
    assert (chained(root, one) == chained(root, other)) == (one == other)


@pytest.mark.parametrize("tokens", [(7, 8, 9), range(7, 10)])
def test_any_sequence_of_tokens_gives_the_same_key(tokens: tuple[int, ...] | range) -> None:
    assert block_key(b"parent", tokens) == block_key(b"parent", [7, 8, 9])


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_token_that_does_not_fit_is_not_cut_short(token: int) -> None:
    with pytest.raises(OverflowError):
        block_key(b"parent", [token])


def test_a_root_covers_the_model_and_every_fact() -> None:
    roots = [
        root_key(b"model"),
        root_key(b"other"),
        root_key(b"model", "float16", 32),
        root_key(b"model", "float32", 32),
        root_key(b"model", "float32", 16),
        root_key(b"model", 32, "float32"),
        root_key(b"model", "float32", "32"),
        root_key(b"model", "float32, 32"),
    ]
    assert len(set(roots)) == len(roots)
    assert {len(root) for root in roots} == {KEY_BYTES}
    assert root_key(b"model", "float32", 32) == root_key(b"model", "float32", 32)


def test_a_root_is_no_block() -> None:
    """A root derived from another one, as for long prompts with dynamic rope, never equals the key of a
    block."""
    root = root_key(b"model")
    rule = PrefixRule(root, length_matters_from=10)
    assert rule.root_of(10) == rule.root_of(1) == root
    assert len({root, rule.root_of(11), rule.root_of(12), block_key(root, [11]), block_key(root, [12])}) == 5
    assert PrefixRule(root).root_of(11) == root


def test_a_salt_makes_another_root() -> None:
    root = root_key(b"model")
    rule = PrefixRule(root, length_matters_from=10)
    roots = [rule.root_of(length, salt) for length in (1, 11, 12) for salt in (b"", b"a", b"b")]
    assert len(set(roots)) == len(roots)
    assert rule.root_of(1, b"") == root
    assert rule.root_of(9, b"a") == rule.root_of(10, b"a")
