"""Long work in Python pauses, and loses nothing by it."""

import pytest

from penstock.api.text.messages import conversation
from penstock.base import pacing
from penstock.base.pacing import paced
from penstock.base.wanted import UnwantedError, Waiter, while_wanted


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Those that are made, none of which takes any time."""
    made = list[float]()
    monkeypatch.setattr(pacing.time, "sleep", made.append)
    return made


@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 1000])
def test_all_come_in_their_order_with_pauses(pauses: list[float], count: int) -> None:
    assert list(paced(range(count))) == list(range(count))
    assert len(pauses) == count // 256
    assert all(pauses)


def test_a_large_conversation_is_read_with_pauses(pauses: list[float]) -> None:
    messages = [{"role": "user", "content": str(number)} for number in range(1000)]
    assert conversation(messages) == messages
    assert len(pauses) == 3


@pytest.mark.parametrize("count", [100_000, 1_000_000])
def test_however_much_there_is_the_pauses_have_an_end(pauses: list[float], count: int) -> None:
    assert sum(1 for _ in paced(range(count))) == count
    assert sum(pauses) < 0.5


def test_work_that_nobody_waits_for_ends_at_a_pause(pauses: list[float]) -> None:
    waiter, done = Waiter(), list[int]()

    def work() -> None:
        for number in paced(range(1000)):
            done.append(number)
            waiter.gone |= number == 300

    with pytest.raises(UnwantedError):
        while_wanted(waiter, work)
    assert len(done) == 512
    assert list(paced(range(300))) == list(range(300)), "the next work of this thread has another waiter"


def test_work_that_nobody_waits_for_does_not_begin() -> None:
    with pytest.raises(UnwantedError):
        while_wanted(Waiter(gone=True), lambda: pytest.fail("it has begun"))
