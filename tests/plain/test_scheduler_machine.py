"""No block leaked, shared wrongly or freed twice, and no wrong token, under any order of add, finish, abort,
preempt and forget."""

import os
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from worlds import ALPHABET, END, World

tokens = st.lists(st.integers(0, ALPHABET - 1), min_size=1, max_size=24)
some = st.integers(0, 30)


class Days(RuleBasedStateMachine):
    """A world in which anything happens between two steps. `World.step` judges every plan and everything that
    is read from the KV."""

    @initialize(
        blocks=st.integers(1, 10),
        block_size=st.sampled_from([1, 2, 4, 8]),
        max_step_tokens=st.sampled_from([1, 2, 3, 5, 8, 64]),
        max_sequences=st.integers(1, 5),
        max_length=st.sampled_from([2, 12, 30, 1000]),
        share=st.sampled_from([True, True, True, False]),
        rope_from=st.sampled_from([None, None, 0, 2, 6]),
    )
    def begin(
        self,
        blocks: int,
        block_size: int,
        max_step_tokens: int,
        max_sequences: int,
        max_length: int,
        share: bool,
        rope_from: int | None,
    ) -> None:
        self.world = World(
            blocks=blocks,
            block_size=block_size,
            max_step_tokens=max_step_tokens,
            max_sequences=max_sequences,
            max_length=max_length,
            share=share,
            rope_from=rope_from,
        )

    @rule(
        prompt=tokens,
        max_tokens=st.sampled_from([None, 1, 2, 5, 12, 30]),
        copies=st.sampled_from([1, 1, 2, 4]),
        ends=st.booleans(),
        min_tokens=st.integers(0, 3),
        scored=st.sampled_from([None, None, None, 0]),
        priority=st.sampled_from([0, 0, -1, 1]),
    )
    def submit(
        self,
        prompt: list[int],
        max_tokens: int | None,
        copies: int,
        ends: bool,
        min_tokens: int,
        scored: int | None,
        priority: int = 0,
    ) -> None:
        prompt = prompt[: self.world.scheduler.longest - 1]
        if max_tokens is not None:
            max_tokens = min(max_tokens, self.world.scheduler.longest - len(prompt))
        for copy in range(copies):
            self.world.submit(
                prompt,
                max_tokens,
                end=[END] if ends else (),
                min_tokens=min_tokens,
                prompt_logprobs=scored,
                parity=copy // 2,
                priority=priority,
            )

    @precondition(lambda self: self.world.live or self.world.ended)
    @rule(
        which=some,
        cut=some,
        more=st.lists(st.integers(0, ALPHABET - 1), max_size=3),
        max_tokens=st.sampled_from([1, 5, 30]),
    )
    def go_on(self, which: int, cut: int, more: list[int], max_tokens: int) -> None:
        """A prompt that begins like another request, perhaps with its output."""
        everyone = [*self.world.live.values(), *self.world.ended]
        other = everyone[which % len(everyone)]
        words = [*other.prompt, *other.output]
        self.submit(words[: 1 + cut % len(words)] + more, max_tokens, 1, False, 0, None)

    @precondition(lambda self: self.world.live)
    @rule(which=some)
    def stop(self, which: int) -> None:
        self.world.stop(list(self.world.live)[which % len(self.world.live)])

    @rule()
    def forget(self) -> None:
        self.world.ledger.forget()

    @rule()
    def interrupt(self) -> None:
        self.world.interrupt()

    @rule(steps=st.sampled_from([1, 1, 2, 5, 15]))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.world.step()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()


TestDays = Days.TestCase
TestDays.settings = settings(max_examples=150, stateful_step_count=30, derandomize=True, deadline=None)


def crowded(seed: int) -> World:
    """A world with little memory and much to do, which it has done: long outputs, prompts that begin alike, a
    few aborts."""
    chance = random.Random(seed)
    size = chance.choice([1, 2, 4, 8])
    world = World(
        blocks=chance.randint(3, 12),
        block_size=size,
        max_step_tokens=chance.choice([4, 7, 16, 64]),
        max_sequences=chance.randint(2, 6),
        rope_from=chance.choice([None, None, 3 * size]),
    )
    beginnings = [[chance.randrange(ALPHABET) for _ in range(2 * size)] for _ in range(2)]
    for _ in range(100):
        room = world.scheduler.longest - 1
        if len(world.waiting()) < 3 and chance.random() < 0.4:
            prompt = (chance.choice(beginnings) + [chance.randrange(2) for _ in range(chance.randint(0, 3))])[
                : room // 2 + 1
            ]
            scored = chance.choice([None, None, None, 1])
            world.submit(
                prompt,
                chance.randint(1, room - len(prompt) + 1),
                prompt_logprobs=scored,
                parity=chance.randint(0, 1),
                priority=chance.randint(0, 1),
            )
        elif world.live and chance.random() < 0.03:
            world.stop(chance.choice(list(world.live)))
        else:
            world.step()
    world.drain()
    return world


@pytest.mark.parametrize("seed", range(8 if "PENSTOCK_THOROUGH" in os.environ else 4))
def test_a_crowd_in_little_memory_is_served_in_order_and_gives_everything_back(seed: int) -> None:
    preemptions = hits = 0
    for world in map(crowded, range(20 * seed, 20 * seed + 20)):
        preemptions += world.scheduler.preemptions
        hits += sum(bool(known.cached) for known in world.ended)
    assert preemptions > 20, "these worlds are too large to prove anything"
    assert hits > 20, "these worlds share too little to prove anything"
