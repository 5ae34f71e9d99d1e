"""How many experts the CPU takes, against machines of which it is known what each would take."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.weights.streaming.shares import AGAIN, HAND_OVER, MARGIN, CpuShares, Times, line_through

EXPERTS, MOST, STEPS = 64, 32, 50
"""STEPS: layers that are computed between two reviews."""


@dataclass
class Machine:
    """Takes times as a machine would: nanoseconds of an expert by the link and by the CPU, of the rest of a
    layer, and of the hand-over. slows: how much longer the link takes while the CPU computes. hiccups: the
    share of layers in which the CPU takes ten times as long."""

    link: float
    cpu: float
    rest: float = 10e3
    hand_over: float = 8e3
    slows: float = 1.0
    hiccups: float = 0.0

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(3)

    def times(self, count: int, mine: int, longer: float = 1.0) -> tuple[float, float]:
        """Until all but the CPU's are there, and until all are. longer: how many times as long the CPU
        takes."""
        rest = self.rest + (count - mine) * self.link * (self.slows if mine else 1.0)
        return rest, max(rest, self.hand_over + mine * self.cpu * longer) if mine else rest

    def measured(
        self, shares: list[int], counts: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], float]:
        """What layers with these many missing experts take, as the device and the CPU write it down."""
        times = np.zeros((len(Times), EXPERTS + 1, 2), np.int64)
        took, total = np.zeros((MOST + 1, 2), np.int64), 0.0
        for count in counts.tolist():
            mine = shares[count]
            longer = 1.0 if self.rng.random() >= self.hiccups else 10.0
            rest, all_of_it = self.times(count, mine, longer)
            total += all_of_it
            if not mine:
                times[Times.ALONE, count] += 1, round(all_of_it)
                continue
            times[Times.TOGETHER, count] += 1, round(all_of_it)
            times[Times.REST, count - mine] += 1, round(rest)
            took[mine] += 1, round(mine * self.cpu * longer)
            if all_of_it > rest:
                times[Times.LATE, mine] += 1, round(self.hand_over)
        return times, took, total

    def best(self, count: int, least: int = 0) -> float:
        return min(self.times(count, mine)[1] for mine in range(least, min(count, MOST) + 1))


def settled(
    machine: Callable[[int], Machine], counts: Callable[[], NDArray[np.int64]], always: bool, reviews: int
) -> tuple[CpuShares, float, float, float]:
    """The shares after so many reviews, and what the second half of all took: as it was, without the CPU, and
    at best."""
    shares, spent, alone, best = CpuShares(EXPERTS, MOST, always), 0.0, 0.0, 0.0
    for turn in range(reviews):
        now, asked = machine(turn), counts()
        times, took, total = now.measured(shares.shares, asked)
        if turn >= reviews // 2:
            spent += total
            alone += sum(now.times(count, 0)[1] for count in asked.tolist())
            best += sum(now.best(count, int(always)) for count in asked.tolist())
        shares.review(times, took)
    return shares, spent, alone, best


def like_a_step(tokens: int, seed: int = 1) -> Callable[[], NDArray[np.int64]]:
    rng = np.random.default_rng(seed)
    return lambda: np.minimum(rng.binomial(4 * tokens, 0.6, STEPS) + 1, EXPERTS)


MACHINES = [
    Machine(link, cpu, slows=slows)
    for slows in (1.0, 1.3)
    for link, cpu in (
        (240e3, 240e3),
        (240e3, 480e3),
        (520e3, 160e3),
        (60e3, 90e3),
        (20e3, 900e3),
        (240e3, 60e3),
    )
]


@pytest.mark.parametrize("tokens", [1, 4, 16])
@pytest.mark.parametrize("machine", MACHINES, ids=str)
def test_it_is_never_slower_than_the_link_alone_and_nearly_best(machine: Machine, tokens: int) -> None:
    """In thirty-six settings, those included where the CPU is of no use."""
    _, spent, alone, best = settled(lambda _: machine, like_a_step(tokens), always=False, reviews=4 * AGAIN)
    assert spent <= MARGIN * alone
    assert spent <= 1.08 * best, (spent / best, alone / best)


@pytest.mark.parametrize("machine", MACHINES, ids=str)
def test_the_cpu_always_takes_some_if_it_has_to(machine: Machine) -> None:
    shares, spent, _, best = settled(lambda _: machine, like_a_step(2), always=True, reviews=AGAIN)
    assert all(0 < share <= count for count, share in enumerate(shares.shares) if count)
    assert spent <= 1.05 * best


@pytest.mark.parametrize("always", [False, True])
@pytest.mark.parametrize("hiccups", [0.0, 0.01])
def test_it_settles_soon_and_hiccups_do_not_turn_it(always: bool, hiccups: float) -> None:
    """After twelve reviews, some fifty steps, whichever way it began."""
    machine = Machine(240e3, 165e3, rest=20e3, slows=1.2, hiccups=hiccups)
    counts = np.random.default_rng(5)
    shares = CpuShares(EXPERTS, MOST, always)
    for _ in range(12):
        times, took, _ = machine.measured(shares.shares, counts.binomial(4, 0.875, STEPS))
        shares.review(times, took)
    for count in range(1, 5):
        best = machine.best(count, int(always))
        assert machine.times(count, shares.shares[count])[1] <= (1.25 if hiccups else 1.01) * best, count


def test_shares_follow_a_machine_that_changes() -> None:
    """The CPU is taken by something else, and comes back: it is tried again, the later the slower it was."""
    fast, slow = Machine(240e3, 120e3), Machine(240e3, 4e6)
    shares, *_ = settled(lambda _: fast, like_a_step(4), always=False, reviews=20)
    before = shares.shares[12]
    counts = like_a_step(4)
    for machine, reviews, low, high in ((slow, 3, 0, 0), (fast, 20, before - 1, before + 1)):
        for _ in range(reviews * AGAIN):
            times, took, _ = machine.measured(shares.shares, counts())
            shares.review(times, took)
        if shares.reviews % AGAIN == 0:  # All comes, to know what that takes.
            shares.review(*machine.measured(shares.shares, counts())[:2])
        assert low <= shares.shares[12] <= high


def test_what_makes_layers_slower_is_left_for_a_while() -> None:
    """The CPU makes the link so slow that lines alone would say otherwise."""
    machine = Machine(240e3, 240e3, slows=4.0)
    shares, spent, alone, _ = settled(lambda _: machine, like_a_step(4), always=False, reviews=4 * AGAIN)
    assert spent <= MARGIN * alone
    assert shares.slower_until > 0


def test_nothing_changes_where_nothing_is_measured() -> None:
    """As where there is no clock."""
    for always in (False, True):
        shares = CpuShares(EXPERTS, MOST, always)
        before = shares.shares
        empty = np.zeros((len(Times), EXPERTS + 1, 2), np.int64), np.zeros((MOST + 1, 2), np.int64)
        for _ in range(3):
            assert shares.review(*empty) == before
        assert any(before) == always
        assert all(share <= min(count, MOST) for count, share in enumerate(before))


def test_a_line_is_nearest_to_what_was_seen() -> None:
    times = np.zeros((8, 2))
    assert line_through(times) is None
    times[3] = 4, 4 * 30.0
    line = line_through(times)
    assert line is not None
    assert (line.first, line.each) == (0.0, 10.0), "through zero, if there is but one"
    times[5] = 2, 2 * 40.0
    line = line_through(times)
    assert line is not None
    assert (line.first, line.each) == (pytest.approx(15.0), pytest.approx(5.0))
    times[5] = 2, 2 * 10.0
    line = line_through(times)
    assert line is not None
    assert line.each == 0.0, "more never take less"
    assert line.first == pytest.approx((4 * 30.0 + 2 * 10.0) / 6)


def test_the_hand_over_counts_as_it_was_seen() -> None:
    """An expert whose CPU time fits beside the link by itself, but not with a slow hand-over."""
    for hand_over, mine in ((0.0, 1), (300e3, 0)):
        machine = Machine(100e3, 90e3, rest=0.0, hand_over=hand_over)
        shares, *_ = settled(lambda _, one=machine: one, lambda: np.full(STEPS, 2), always=False, reviews=30)  # type: ignore[misc]
        assert shares.shares[2] == mine
    assert HAND_OVER < 90e3
