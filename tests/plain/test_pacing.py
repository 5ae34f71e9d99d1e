"""Long work in Python pauses, and loses nothing by it."""

import pytest

from penstock.api.text.messages import conversation
from penstock.base import pacing
from penstock.base.pacing import paced


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
