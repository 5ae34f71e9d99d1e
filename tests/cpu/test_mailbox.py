"""What a backend reports comes to the loop whole, in order and soon, however the loop rests between
deliveries."""

import asyncio
import random
import threading
import time
from collections.abc import Callable, Collection, Sequence

import pytest

from penstock.api.outputs import Delta
from penstock.api.sequences import PreparedPrompt
from penstock.server.broker import mailbox as mailboxes
from penstock.server.broker.calls import Call, Update
from penstock.server.broker.mailbox import Mailbox
from streams import LONG

SLOW = 0.002
"""Seconds that a delivery takes: a rest follows it."""


@pytest.fixture(autouse=True)
def rests_for_any_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailboxes, "_FEW", 0)


def delta(token: int) -> Delta:
    return Delta(str(token), (token,))


def call() -> Call:
    return Call(lambda _: None, PreparedPrompt(None, (1,), (), None, lambda: None))


class Desk:
    """Notes what is delivered, by call and in order."""

    def __init__(self, takes: float = SLOW) -> None:
        self.got: dict[Call, list[int]] = {}
        self.deliveries: list[list[Update]] = []
        self.ended: set[Call] = set()
        self._takes = takes

    def deliver(self, updates: Collection[Update]) -> None:
        time.sleep(self._takes)
        self.deliveries.append(list(updates))
        for one, deltas, over, _ in updates:
            one.first_token_time = one.first_token_time or time.monotonic()
            self.got.setdefault(one, []).extend(delta.tokens[0] for delta in deltas)
            if over:
                assert one not in self.ended
                self.ended.add(one)


def on_a_thread(work: Callable[[Mailbox], None], desk: Desk, until: Callable[[], bool]) -> None:
    async def run() -> None:
        mailbox = Mailbox(asyncio.get_running_loop(), desk.deliver)
        thread = threading.Thread(target=work, args=(mailbox,))
        thread.start()
        late = time.monotonic() + LONG
        while not until():
            assert time.monotonic() < late, "something was left lying"
            await asyncio.sleep(0.001)
        await asyncio.to_thread(thread.join)

    asyncio.run(run())


def given(call: Call, tokens: Sequence[int], *, over: bool = False) -> Update:
    return call, [delta(token) for token in tokens], over, None


@pytest.mark.parametrize("seed", range(3))
def test_all_comes_in_order_and_nothing_is_left_lying(seed: int) -> None:
    """The backend goes on, waits, or ends for good at every moment of a delivery and of a rest."""
    rng, calls = random.Random(seed), [call() for _ in range(5)]
    sent: dict[Call, list[int]] = {one: [] for one in calls}

    def work(mailbox: Mailbox) -> None:
        for step in range(90):
            some = rng.sample(calls, rng.randint(1, 5))
            mailbox.report([given(one, [step]) for one in some])
            for one in some:
                sent[one].append(step)
            time.sleep(rng.choice((0, 0, 0.0005, 0.003, 0.012)))

    desk = Desk()
    thread_over = threading.Event()

    def then(mailbox: Mailbox) -> None:
        work(mailbox)
        thread_over.set()

    on_a_thread(then, desk, lambda: thread_over.is_set() and desk.got == sent)
    assert len(desk.deliveries) < 90


def test_what_comes_in_a_rest_is_added_up_and_only_first_pieces_and_ends_come_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mailboxes, "_LONGEST", 0.5)
    monkeypatch.setattr(mailboxes, "REST", 1000.0)
    desk, streamed, ends, comes = Desk(), call(), call(), call()
    seen: list[tuple[list[int], list[int], list[int]]] = []

    async def run() -> None:
        mailbox = Mailbox(asyncio.get_running_loop(), desk.deliver)

        async def report(*updates: Update) -> None:
            mailbox.report(updates)
            await asyncio.sleep(0.01)
            seen.append(tuple(desk.got.get(one, [])[:] for one in (streamed, ends, comes)))  # type: ignore[arg-type]

        await report(given(streamed, [1]), given(ends, [1]))
        await report(given(streamed, [2]), given(ends, [2]))
        await report(given(streamed, [3]))
        await report(given(streamed, [4]), given(ends, [3], over=True))
        await report(given(comes, [1]), given(streamed, [5]))
        await asyncio.sleep(0.6)
        assert desk.got == {streamed: [1, 2, 3, 4, 5], ends: [1, 2, 3], comes: [1]}

    asyncio.run(run())
    assert seen == [
        ([1], [1], []),
        ([1], [1], []),
        ([1], [1], []),
        ([1], [1, 2, 3], []),
        ([1], [1, 2, 3], [1]),
    ]
    assert [len(one) for one in desk.deliveries] == [2, 1, 1, 1]


@pytest.mark.parametrize(("short", "few"), [(LONG, 0), (0.0, 1)])
def test_a_delivery_that_is_short_or_to_few_is_followed_by_no_rest(
    short: float, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mailboxes, "_SHORT", short)
    monkeypatch.setattr(mailboxes, "_FEW", few)
    desk, one = Desk(), call()

    async def run() -> None:
        mailbox = Mailbox(asyncio.get_running_loop(), desk.deliver)
        for token in range(20):
            mailbox.report([given(one, [token])])
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert desk.got[one][-1] == token

    asyncio.run(run())


def test_whoever_withdraws_or_runs_on_the_loop_is_behind_all_that_was_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a client was not given is taken back whole: nothing of it comes later."""
    monkeypatch.setattr(mailboxes, "_LONGEST", 0.2)
    monkeypatch.setattr(mailboxes, "REST", 1000.0)
    one = call()
    order: list[object] = []

    class Delivers(Desk):
        def deliver(self, updates: Collection[Update]) -> None:
            super().deliver(updates)
            for call, deltas, over, fault in updates:
                order.append([delta.tokens[0] for delta in deltas])
                call.deliver(deltas, over, fault)

    desk = Delivers()

    async def run() -> None:
        mailbox = Mailbox(asyncio.get_running_loop(), desk.deliver)

        def work() -> None:
            mailbox.report([given(one, [1])])
            time.sleep(0.02)
            mailbox.report([given(one, [2])])
            mailbox.run_on_loop(order.append, "ran")
            time.sleep(0.02)
            mailbox.report([given(one, [3])])
            assert asyncio.run(mailbox.withdraw(one))

        await asyncio.to_thread(work)
        order.append("withdrawn")
        mailbox.report([given(one, [7], over=True)])
        assert [[delta.tokens[0] for delta in some] async for some in one.pieces()] == [[7]]

    asyncio.run(run())
    assert order == [[1], [2], "ran", [3], "withdrawn", [7]]


@pytest.mark.parametrize("resting", [False, True])
def test_what_is_reported_right_behind_a_look_is_seen(resting: bool) -> None:
    """Also at the end of a rest, behind which no other look follows by itself."""
    desk, one = Desk(SLOW if resting else 0.0), call()

    async def run() -> None:
        mailbox = Mailbox(asyncio.get_running_loop(), desk.deliver)
        collect = mailbox._collect

        def and_more() -> None:
            collect()
            if left:
                left.pop()
                mailbox.report([given(one, [9])])

        left = list[bool]()
        mailbox._collect = and_more  # type: ignore[method-assign]
        if resting:
            mailbox.report([given(one, [0])])
            await asyncio.sleep(SLOW)
            assert mailbox._rests
            desk._takes = 0.0
        left.append(True)
        if not resting:
            mailbox.report([given(one, [0])])
        late = time.monotonic() + LONG
        while desk.got.get(one) != [0, 9]:
            assert time.monotonic() < late, "it was left lying"
            await asyncio.sleep(0.001)

    asyncio.run(run())


def test_what_runs_on_the_loop_runs_though_a_delivery_fails() -> None:
    """Such as the end of a backend, for which everybody waits."""
    ran, faults = list[int](), list[object]()

    def fails(updates: Collection[Update]) -> None:
        raise ValueError("a delivery")

    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: faults.append(context["exception"]))
        mailbox = Mailbox(loop, fails)
        mailbox._tray.append(given(call(), [1]))
        mailbox.run_on_loop(ran.append, 1)
        await asyncio.sleep(0.01)

    asyncio.run(run())
    assert ran == [1]
    assert [str(one) for one in faults] == ["a delivery"]
