"""Random bytes that are kept at hand are given out once, whoever asks."""

import os
import signal
from collections.abc import Sequence

import pytest

from penstock.base import randomness
from penstock.base.randomness import RandomPool

POOL = randomness._POOL


def counted(monkeypatch: pytest.MonkeyPatch) -> bytearray:
    """All that the system gives out, which is counted up in units of two bytes."""
    given = bytearray()

    def urandom(size: int) -> bytes:
        begin = len(given) // 2
        part = b"".join((begin + number).to_bytes(2) for number in range(size // 2))
        given.extend(part)
        return part

    monkeypatch.setattr(os, "urandom", urandom)
    return given


@pytest.mark.parametrize(
    "sizes", [[2] * POOL, [6, POOL, POOL - 6, 8], [POOL // 2] * 5, [4, POOL + 2, 4], [0, 2, 0, POOL, 0]]
)
def test_no_bytes_are_given_out_twice(monkeypatch: pytest.MonkeyPatch, sizes: Sequence[int]) -> None:
    given, pool = counted(monkeypatch), RandomPool()
    parts = [pool.take(size) for size in sizes]
    assert [len(part) for part in parts] == sizes
    taken = [part[at : at + 2] for part in parts for at in range(0, len(part), 2)]
    assert len(set(taken)) == len(taken)
    assert set(taken) <= {bytes(given[at : at + 2]) for at in range(0, len(given), 2)}


def test_a_forked_process_is_given_others() -> None:
    """Also where a thread was about to take some when it was forked."""
    pool = RandomPool()
    pool.take(1)
    read, write = os.pipe()
    with pool._lock:
        child = os.fork()
        if child == 0:
            signal.alarm(30)  # It would wait for ever.
            os.write(write, pool.take(POOL // 2))
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as there:
        found = there.read()
    assert os.waitpid(child, 0)[1] == 0
    assert len(found) == POOL // 2
    assert found != pool.take(POOL // 2)
