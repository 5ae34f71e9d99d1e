"""penstock.bench.warming: what is timed is warm, and what was not is said to be."""

from collections.abc import Callable, Iterator, Sequence

import pytest

from penstock.bench.warming import Rule, in_turns, timed


def taking(seconds: Sequence[float]) -> Callable[[], float]:
    """Runs that take so long one after another, the last for ever."""

    def course() -> Iterator[float]:
        yield from seconds
        while True:
            yield seconds[-1]

    return course().__next__


@pytest.mark.parametrize(
    ("seconds", "before"),
    [
        ([1.0], 3),
        ([9.0, 1.0], 4),
        (
            [3.70, 3.37, 2.28, 2.07, 2.06, 2.07],
            6,
        ),  # An offloaded model's first steps, of which a mean says 2.9.
        ([1.04, 1.03, 1.02, 1.01, 1.02], 5),  # Close to each other, but each faster than the one before.
        ([1.0, 12.0, 1.0], 5),
    ],
    ids=["steady at once", "one slow start", "falling", "falling slowly", "an outlier"],
)
def test_what_still_falls_is_not_measured(seconds: list[float], before: int) -> None:
    found = timed(taking(seconds), 4)
    assert found.warm
    assert len(found.warming) == before
    assert found.seconds == (seconds[-1],) * 4
    assert found.median == seconds[-1]
    assert not found.falling


def test_a_measurement_that_still_falls_is_made_again() -> None:
    plateau = [3.1, 2.35, 2.32, 2.32, 2.33, 2.33, 2.04, 2.04]
    found = timed(taking(plateau), 4)
    assert found.warming == tuple(plateau)  # The last four were measured, and still fell.
    assert found.seconds == (2.04,) * 4
    assert not found.falling


def test_what_never_gets_warm_is_said_to_be_so() -> None:
    found = timed(taking([2.0**-run for run in range(60)]), 4, Rule(most=7))
    assert (len(found.warming), found.warm, found.falling) == (7 + 3 * 4, False, True)
    assert str(found).endswith("NOT WARM, STILL FALLING")


def test_the_record_has_every_run_and_their_spread() -> None:
    record = timed(taking([5.0, 1.0, 1.0, 1.0, 4.0, 2.0, 3.0, 1.0, 5.0]), 5).record()
    assert record["warming_s"] == [5.0, 1.0, 1.0, 1.0]
    assert record["seconds"] == [4.0, 2.0, 3.0, 1.0, 5.0]
    assert (record["median_s"], record["least_s"], record["most_s"], record["quartiles_s"]) == (
        3.0,
        1.0,
        5.0,
        [2.0, 4.0],
    )
    assert (record["count"], record["warm"]) == (5, True)
    assert record["rule"] == {"window": 3, "within": 0.05, "most": 12, "least": 3}


def test_sides_are_warmed_one_by_one_and_measured_in_turns() -> None:
    order: list[str] = []

    def side(name: str, seconds: Sequence[float]) -> Callable[[], float]:
        take = taking(seconds)

        def work() -> float:
            order.append(name)
            return take()

        return work

    found = in_turns({"ours": side("ours", [1.0]), "theirs": side("theirs", [9.0, 2.0])}, 3)
    assert "".join(name[0] for name in order) == "ooo" + "tttt" + "ot" + "to" + "ot"
    assert [found["ours"].seconds, found["theirs"].seconds] == [(1.0,) * 3, (2.0,) * 3]
    assert found["theirs"].warming == (9.0, 2.0, 2.0, 2.0)
