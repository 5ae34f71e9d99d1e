"""The ledger in worlds of five blocks, and against a naive twin under any order of calls."""

import random
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.kv.ledger.blocks import BlockLedger
from penstock.kv.ledger.disk import DiskLedger
from penstock.kv.ledger.host import HostLedger
from penstock.step.plan import BlockId, HostBlockId

A, B, C, D, E = (bytes([letter]) * 16 for letter in b"abcde")


def sealed(ledger: BlockLedger, *keys: bytes) -> list[BlockId]:
    """Allocates a block for each key and seals it."""
    blocks = ledger.allocate(len(keys))
    for block, key in zip(blocks, keys, strict=True):
        ledger.seal(block, key)
    return blocks


def test_blocks_are_handed_out_from_the_first_on() -> None:
    ledger = BlockLedger(5)
    assert ledger.available == 5
    assert ledger.allocate(2) == [0, 1]
    assert ledger.allocate(0) == []
    assert ledger.allocate(3) == [2, 3, 4]
    assert ledger.available == 0
    ledger.check([[0, 1], [2, 3, 4]])


def test_a_released_block_without_a_key_is_free_and_used_first() -> None:
    ledger = BlockLedger(5)
    blocks = ledger.allocate(3)
    ledger.release(blocks[1:])
    assert (ledger.available, ledger.cached) == (4, 0)
    assert ledger.allocate(3) == [1, 2, 3]


def test_a_sealed_block_is_found_shared_and_kept_until_its_last_holder_goes() -> None:
    ledger = BlockLedger(5)
    blocks = sealed(ledger, A)
    assert ledger.find(A) == blocks[0]
    assert ledger.find(B) is None
    ledger.hold(blocks[0])
    ledger.release(blocks)
    assert (ledger.available, ledger.cached) == (4, 0)
    ledger.check([blocks])
    ledger.release(blocks)
    assert (ledger.available, ledger.cached) == (5, 1)
    assert ledger.find(A) == blocks[0]
    ledger.hold(blocks[0])
    assert (ledger.available, ledger.cached) == (4, 0)
    ledger.check([blocks])


def test_cached_blocks_are_given_up_longest_unused_first_and_tails_before_heads() -> None:
    ledger = BlockLedger(5)
    first = sealed(ledger, A, B)
    second = sealed(ledger, C, D, E)
    ledger.release(first)
    ledger.release(second)
    assert (ledger.available, ledger.cached) == (5, 5)
    order = [ledger.allocate(1)[0] for _ in range(5)]
    assert order == [1, 0, 4, 3, 2]
    assert [ledger.find(key) for key in (A, B, C, D, E)] == [None] * 5
    ledger.check([order])


def test_blocks_that_are_released_first_are_given_up_before_others_in_their_order() -> None:
    ledger = BlockLedger(5)
    others, copied = sealed(ledger, A, B), sealed(ledger, C, D, E)
    ledger.release(others)
    ledger.hold(copied[1])
    ledger.release_first(copied)
    assert [block for block, _ in ledger.next_evicted(5)] == [2, 4, 1, 0]
    assert [ledger.allocate(1)[0] for _ in range(4)] == [2, 4, 1, 0]
    ledger.check([[*copied, *others]])


def test_free_blocks_are_used_before_cached_ones() -> None:
    ledger = BlockLedger(5)
    ledger.release(sealed(ledger, A, B))
    assert ledger.allocate(3) == [2, 3, 4]
    assert (ledger.find(A), ledger.find(B)) == (0, 1)
    assert ledger.allocate(1) == [1]
    assert (ledger.find(A), ledger.find(B)) == (0, None)


def test_use_makes_a_cached_block_young_again() -> None:
    ledger = BlockLedger(5)
    ledger.release(sealed(ledger, A, B, C, D, E))
    ledger.hold(BlockId(4))
    ledger.release([BlockId(4)])
    assert ledger.allocate(5) == [3, 2, 1, 0, 4]


def test_a_second_block_with_the_same_content_stays_unknown() -> None:
    ledger = BlockLedger(5)
    (first,) = sealed(ledger, A)
    (second,) = sealed(ledger, A)
    assert ledger.find(A) == first
    ledger.check([[first], [second]])
    ledger.release([second])
    assert (ledger.available, ledger.cached) == (4, 0)
    ledger.release([first])
    assert ledger.cached == 1


def test_a_key_can_be_sealed_again_after_its_block_was_given_up() -> None:
    ledger = BlockLedger(2)
    ledger.release(sealed(ledger, A))
    assert ledger.allocate(2) == [1, 0]
    ledger.seal(BlockId(1), A)
    assert ledger.find(A) == 1
    ledger.check([[BlockId(0), BlockId(1)]])


def test_forget_drops_what_is_cached_and_hides_what_is_held() -> None:
    ledger = BlockLedger(5)
    held = sealed(ledger, A, B)
    ledger.release(sealed(ledger, C, D))
    assert ledger.forget() == 2
    assert (ledger.available, ledger.cached) == (3, 0)
    assert [ledger.find(key) for key in (A, B, C, D)] == [None] * 4
    ledger.check([held])
    ledger.release(held)
    assert (ledger.available, ledger.cached) == (5, 0)
    assert ledger.forget() == 0
    ledger.check([])


def test_reset_frees_everything() -> None:
    ledger = BlockLedger(5)
    sealed(ledger, A, B)
    ledger.release(sealed(ledger, C))
    ledger.reset()
    ledger.check([])
    assert (ledger.available, ledger.cached) == (5, 0)
    assert [ledger.find(key) for key in (A, B, C)] == [None] * 3
    assert ledger.allocate(5) == [0, 1, 2, 3, 4]


def too_many(ledger: BlockLedger) -> None:
    ledger.allocate(4)


def fewer_than_none(ledger: BlockLedger) -> None:
    ledger.allocate(-1)


def released_twice(ledger: BlockLedger) -> None:
    ledger.release([BlockId(4)])


def sealed_by_nobody(ledger: BlockLedger) -> None:
    ledger.seal(BlockId(4), B)


def sealed_twice(ledger: BlockLedger) -> None:
    ledger.seal(BlockId(0), B)


def shared_without_a_key(ledger: BlockLedger) -> None:
    ledger.hold(BlockId(1))


@pytest.mark.parametrize(
    "misuse",
    [too_many, fewer_than_none, released_twice, sealed_by_nobody, sealed_twice, shared_without_a_key],
)
def test_misuse_is_refused_and_changes_nothing(misuse: Callable[[BlockLedger], None]) -> None:
    ledger = BlockLedger(5)
    held = [*sealed(ledger, A), *ledger.allocate(1)]
    with pytest.raises(AssertionError):
        misuse(ledger)
    ledger.check([held])
    assert (ledger.available, ledger.find(A), ledger.find(B)) == (3, 0, None)


@pytest.mark.parametrize("held", [[], [[0]], [[0, 1], [1]], [[0, 1, 2]]])
def test_check_finds_a_block_lost_or_held_too_often(held: list[list[BlockId]]) -> None:
    ledger = BlockLedger(5)
    ledger.allocate(2)
    with pytest.raises(AssertionError, match="holders on record"):
        ledger.check(held)


class Twin(RuleBasedStateMachine):
    """The ledger beside lists that are searched from end to end. Chains are what requests hold."""

    @initialize(blocks=st.integers(1, 8))
    def start(self, blocks: int) -> None:
        self.ledger = BlockLedger(blocks)
        self.chains: list[list[BlockId]] = []
        self.keys: dict[BlockId, bytes] = {}
        self.free = [BlockId(block) for block in range(blocks)]
        self.cached: list[BlockId] = []

    def is_held(self, block: BlockId) -> bool:
        return any(block in chain for chain in self.chains)

    @rule(count=st.integers(1, 4))
    def allocate(self, count: int) -> None:
        count = min(count, self.ledger.available)
        expected = []
        for _ in range(count):
            expected.append(self.free.pop(0) if self.free else self.cached.pop(0))
            self.keys.pop(expected[-1], None)
        assert self.ledger.allocate(count) == expected
        if expected:
            self.chains.append(expected)

    @precondition(lambda self: self.chains)
    @rule(which=st.integers(0, 20), index=st.integers(0, 4), key=st.sampled_from([A, B, C, D, E]))
    def seal(self, which: int, index: int, key: bytes) -> None:
        chain = self.chains[which % len(self.chains)]
        block = chain[index % len(chain)]
        if block in self.keys:
            return
        self.ledger.seal(block, key)
        if key not in self.keys.values():
            self.keys[block] = key

    @rule(keys=st.lists(st.sampled_from([A, B, C, D, E]), unique=True, min_size=1))
    def share(self, keys: list[bytes]) -> None:
        chain = []
        for key in keys:
            expected = next((block for block, its in self.keys.items() if its == key), None)
            assert self.ledger.find(key) == expected
            if expected is not None:
                self.ledger.hold(expected)
                chain.append(expected)
                if expected in self.cached:
                    self.cached.remove(expected)
        if chain:
            self.chains.append(chain)

    @precondition(lambda self: self.chains)
    @rule(which=st.integers(0, 20))
    def release(self, which: int) -> None:
        chain = self.chains.pop(which % len(self.chains))
        self.ledger.release(chain)
        for block in reversed(chain):
            if not self.is_held(block):
                if block in self.keys:
                    self.cached.append(block)
                else:
                    self.free.insert(0, block)

    @rule()
    def forget(self) -> None:
        assert self.ledger.forget() == len(self.cached)
        for block in self.cached:
            self.free.insert(0, block)
        self.cached.clear()
        self.keys.clear()

    @invariant()
    def they_agree(self) -> None:
        self.ledger.check(self.chains)
        assert self.ledger.cached == len(self.cached)
        assert self.ledger.available == len(self.cached) + len(self.free)
        for key in (A, B, C, D, E):
            assert self.ledger.find(key) == next(
                (block for block, its in self.keys.items() if its == key), None
            )


TestTwin = Twin.TestCase
TestTwin.settings = settings(max_examples=100, stateful_step_count=30, derandomize=True, deadline=None)


# -- host blocks
# ------------------------------------------------------------------------------------------------------------


def runs(blocks: list[HostBlockId]) -> int:
    return 1 + sum(after != before + 1 for before, after in pairwise(blocks))


def test_host_blocks_begin_in_the_middle_and_go_on_where_they_ended() -> None:
    ledger = HostLedger(12)
    first = ledger.allocate(2)
    second = ledger.allocate(2)
    assert (first, second) == ([6, 7], [3, 4])
    assert ledger.allocate(2, first[-1]) == [8, 9]
    assert ledger.allocate(1, second[-1]) == [5]
    assert ledger.allocate(1, HostBlockId(5)) == [1], (
        "it cannot go on; out of the longest run, which is in front"
    )
    assert ledger.available == 4


def test_host_blocks_begin_where_what_is_expected_has_room() -> None:
    ledger = HostLedger(12)
    assert ledger.allocate(2, expected=9) == [3, 4]
    assert ledger.allocate(7, HostBlockId(4)) == [5, 6, 7, 8, 9, 10, 11]
    assert HostLedger(12).allocate(2, expected=20) == [0, 1]
    assert HostLedger(12).allocate(12) == list(range(12))


def test_host_blocks_come_from_the_longest_runs_where_no_run_is_enough() -> None:
    ledger = HostLedger(12)
    blocks = ledger.allocate(12)
    ledger.release([blocks[0], *blocks[2:5], *blocks[6:8]])
    assert ledger.allocate(5) == [2, 3, 4, 6, 7]
    assert ledger.allocate(0) == []
    assert ledger.allocate(1) == [0]


def test_freed_host_blocks_grow_together_whatever_the_order() -> None:
    ledger = HostLedger(64)
    blocks = ledger.allocate(64)
    random.Random(1).shuffle(blocks)
    for block in blocks:
        ledger.release([block])
    assert ledger.allocate(64) == list(range(64))


def test_cached_host_blocks_are_given_up_from_the_end_of_what_they_continue() -> None:
    ledger = HostLedger(4)
    blocks = ledger.allocate(4)
    for block, key, parent in zip(blocks, (A, B, C, D), (None, A, B, C), strict=True):
        ledger.seal(block, key, parent)
    ledger.release(blocks[2:])
    ledger.release(blocks[:2])
    assert ledger.allocate(3) == [1, 2, 3]
    assert [ledger.find(key) for key in (A, B, C, D)] == [0, None, None, None]
    ledger.check([[HostBlockId(1), HostBlockId(2), HostBlockId(3)]])


def test_what_others_copy_up_is_in_host_memory() -> None:
    """Blocks of the file are read by the request that they belong to, and not by transfers."""
    ledger = HostLedger(4, on_disk=2)
    blocks = ledger.allocate(4)
    for block, key, parent in zip(blocks, (A, B, C, D), (None, A, B, C), strict=True):
        ledger.seal(block, key, parent)
    for _ in range(2):
        assert [ledger.find(key) for key in (A, B, C, D)] == [0, 1, 2, 3]
        assert ledger.run_of((A, B, C, D)) == [0, 1]
        assert ledger.run_of((C, D)) == []
        ledger.check([blocks])
        ledger.release(blocks)
        blocks = []


def test_a_host_block_is_private_until_it_has_a_key_or_another_holder() -> None:
    ledger = HostLedger(1)
    (block,) = ledger.allocate(1)
    assert ledger.is_private(block)
    ledger.seal(block, A)
    assert not ledger.is_private(block)


def test_of_those_that_grow_by_turns_each_has_few_runs() -> None:
    """Four that begin with 100 blocks each and then take one at a time: half of all blocks are never used."""
    ledger = HostLedger(2000)
    chains: list[list[HostBlockId]] = []
    for _ in range(4):
        chain: list[HostBlockId] = []
        for _ in range(5):
            chain += ledger.allocate(20, chain[-1] if chain else None, 100 - len(chain))
        chains.append(chain)
    assert [runs(chain) for chain in chains] == [1, 1, 1, 1]
    for _ in range(150):
        for chain in chains:
            chain += ledger.allocate(1, chain[-1], 1)
    assert sum(map(runs, chains)) <= 6
    ledger.check(chains)


class HostTwin(RuleBasedStateMachine):
    """The free blocks of the host beside a plain set."""

    @initialize(blocks=st.integers(1, 40))
    def start(self, blocks: int) -> None:
        self.ledger = HostLedger(blocks)
        self.chains: list[list[HostBlockId]] = []
        self.keys = 0

    @rule(count=st.integers(0, 12), follows=st.integers(0, 20), expected=st.integers(0, 40))
    def allocate(self, count: int, follows: int, expected: int) -> None:
        count = min(count, self.ledger.available)
        after = self.chains[follows % len(self.chains)][-1] if self.chains and follows % 2 else None
        free = set(self.ledger._free)
        taken = self.ledger.allocate(count, after, expected)
        assert len(taken) == count
        assert free.issuperset(taken) or len(free) < count, (
            "a cached block is given up while there are free ones"
        )
        if after is not None and after + 1 in free and count:
            assert taken[0] == after + 1, "it could go on where it ended"
        if count <= len(free):
            parts = sorted(map(len, self._parts(free)), reverse=True)
            enough = next((n for n in range(1, len(parts) + 1) if sum(parts[:n]) >= count), 0)
            assert not count or runs(taken) <= enough + (after is not None), "more runs than are needed"
        if taken:
            self.chains.append(taken)

    def _parts(self, blocks: set[HostBlockId]) -> list[list[HostBlockId]]:
        parts: list[list[HostBlockId]] = []
        for block in sorted(blocks):
            if parts and parts[-1][-1] + 1 == block:
                parts[-1].append(block)
            else:
                parts.append([block])
        return parts

    @precondition(lambda self: self.chains)
    @rule(which=st.integers(0, 20), sealed=st.integers(0, 12))
    def release(self, which: int, sealed: int) -> None:
        chain = self.chains.pop(which % len(self.chains))
        for block in chain[:sealed]:
            self.keys += 1
            self.ledger.seal(block, self.keys.to_bytes(16, "big"))
        self.ledger.release(chain)

    @rule()
    def forget(self) -> None:
        self.ledger.forget()

    @rule()
    def vacate(self) -> None:
        kept = {key: block for key, block in self.ledger._by_key.items() if self.ledger.is_near(block)}
        self.ledger.vacate()
        self.chains.clear()
        assert self.ledger._by_key == kept
        assert self.ledger.available == self.ledger.blocks

    @rule(count=st.integers(0, 12))
    def allocate_near(self, count: int) -> None:
        taken = self.ledger.allocate_near(min(count, self.ledger.available_near))
        assert all(map(self.ledger.is_near, taken))
        if taken:
            self.chains.append(taken)

    @invariant()
    def it_is_sound(self) -> None:
        self.ledger.check(self.chains)


TestHostTwin = HostTwin.TestCase
TestHostTwin.settings = settings(max_examples=60, stateful_step_count=30, derandomize=True, deadline=None)


# -- host blocks, and behind them those on disk
# --------------------------------------------------------------------------------


def test_blocks_on_disk_are_used_when_the_host_has_none() -> None:
    ledger = HostLedger(12, on_disk=8)
    first = ledger.allocate(3)
    second = ledger.allocate(4)
    assert (first, second) == ([1, 2, 3], [0, 8, 9, 10])
    ledger.release([HostBlockId(2)])
    assert ledger.allocate(1, second[-1]) == [2], "on the host, though it could go on where it ended"
    assert ledger.allocate(1, second[-1]) == [11]
    assert ledger.available == 4
    ledger.check([first, second, [HostBlockId(11)]])


def test_cached_host_blocks_are_given_up_before_the_disk_is_used() -> None:
    ledger = HostLedger(12, on_disk=8)
    blocks = ledger.allocate(4)
    for block, key, parent in zip(blocks, (A, B, C, D), (None, A, B, C), strict=True):
        ledger.seal(block, key, parent)
    ledger.release(blocks[3:])
    ledger.release(blocks[:3])
    assert ledger.allocate(2) == [2, 3]
    assert [ledger.find(key) for key in (A, B, C, D)] == [0, 1, None, None]
    taken = ledger.allocate(3)
    assert taken == [0, 1, 8]
    assert ledger.cached == 0
    ledger.check([[HostBlockId(2), HostBlockId(3)], taken])


def test_cached_blocks_on_disk_are_given_up_when_nothing_else_is_left() -> None:
    ledger = HostLedger(4, on_disk=2)
    held, kept = ledger.allocate(2), ledger.allocate(2)
    for block, key in zip(kept, (A, B), strict=True):
        ledger.seal(block, key)
    ledger.release(kept)
    assert (ledger.available, ledger.cached, ledger.find(A)) == (2, 2, kept[0])
    assert sorted(ledger.allocate(2)) == kept
    assert ledger.cached == 0
    ledger.check([held, kept])


def test_runs_end_where_the_disk_begins() -> None:
    ledger = HostLedger(64, on_disk=40)
    blocks = ledger.allocate(64)
    assert blocks == list(range(64))
    random.Random(1).shuffle(blocks)
    for block in blocks:
        ledger.release([block])
    assert ledger._free.take(64, None, 64) == (0, 24)
    assert ledger._free.take(64, None, 64) == (24, 40)


class TieredTwin(HostTwin):
    """Blocks of both tiers."""

    @initialize(blocks=st.integers(1, 20), on_disk=st.integers(1, 20))
    def start(self, blocks: int, on_disk: int) -> None:
        self.near = blocks
        self.ledger = HostLedger(blocks + on_disk, on_disk)
        self.chains = []
        self.keys = 0

    @rule(count=st.integers(0, 12), follows=st.integers(0, 20), expected=st.integers(0, 40))
    def allocate(self, count: int, follows: int, expected: int) -> None:
        count = min(count, self.ledger.available)
        after = self.chains[follows % len(self.chains)][-1] if self.chains and follows % 2 else None
        free, available = (
            {block for block in self.ledger._free if block < self.near},
            self.ledger.available_near,
        )
        taken = self.ledger.allocate(count, after, expected)
        near = [block for block in taken if block < self.near]
        assert len(taken) == len(set(taken)) == count
        assert len(near) == min(count, available), "the disk is used while the host has room"
        assert taken[: len(near)] == near, "the disk comes before the host"
        assert free.issuperset(near) or len(free) < count, (
            "a cached block is given up while there are free ones"
        )
        if after is not None and after + 1 in free and count:
            assert taken[0] == after + 1, "it could go on where it ended"
        if taken:
            self.chains.append(taken)

    @invariant()
    def no_run_is_on_both(self) -> None:
        for runs, blocks in (
            (self.ledger._free.near, range(self.near)),
            (self.ledger._free._far, range(self.near, self.ledger.blocks)),
        ):
            assert all(
                start in blocks and start + length - 1 in blocks for start, length in runs._lengths.items()
            )


TestTieredTwin = TieredTwin.TestCase
TestTieredTwin.settings = settings(max_examples=60, stateful_step_count=30, derandomize=True, deadline=None)


def test_room_near_is_made_by_near_blocks_alone() -> None:
    ledger = HostLedger(12, on_disk=8)
    ledger.allocate(4)
    kept = ledger.allocate(6)
    for block in kept:
        ledger.seal(block, bytes([block]) * 16)
    ledger.release(kept)
    ledger.allocate(1)
    assert ledger.cached == 6, "two on disk were free"


def test_a_disk_has_room_for_what_it_holds_and_no_more() -> None:
    disk = DiskLedger(3, [A, B])
    disk.make_room(1)
    disk.add(C, B)
    assert (len(disk), disk.leaving) == (3, [])
    disk.make_room(2)
    assert (len(disk), disk.evicted) == (1, 2)
    assert not any(map(disk.find, disk.leaving))


@pytest.mark.parametrize("ledger", [BlockLedger(3), HostLedger(3)], ids=["device", "host"])
def test_a_block_whose_content_is_forgotten_stays_with_its_holder(ledger: BlockLedger | HostLedger) -> None:
    held, cached = ledger.allocate(2)
    ledger.seal(held, A)
    ledger.seal(cached, B)
    ledger.release([cached])
    for key in (A, B, C):
        ledger.forget_one(key)
    assert ledger.find(A) is ledger.find(B) is None
    assert (ledger.available, ledger.cached) == (2, 0)
    ledger.check([[held]])
    assert held not in ledger.allocate(2)


def test_what_goes_from_a_disk_is_told_and_does_not_come_back() -> None:
    """The disk's own index has it until it is told, also if an interrupt comes between the two."""
    disk = DiskLedger(3, [A, B, C])
    disk.make_room(1)
    assert [key for key in (A, B, C) if not disk.find(key)] == disk.leaving
    assert len(disk.leaving) == 1
    left = next(filter(disk.find, (A, B, C)))
    disk.leaving.append(left)
    disk.vacate()
    assert not disk.find(left)
    assert len(disk) == 1
