"""Large bodies of one key are read at a rate, where there are several keys; nobody else waits for that."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterable
from typing import cast

import pytest

pytest.importorskip("starlette")

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Scope

from penstock.base.wanted import expect_wanted
from penstock.server.answers import prompts
from penstock.server.broker.broker import RequestBroker
from penstock.server.broker.calls import BusyError, DeadlineError
from penstock.server.http import app, uploads
from penstock.server.http import asking as reading_of
from penstock.server.http.keys import ApiKey
from penstock.server.http.state import ServerSettings, ServerState
from penstock.server.http.uploads import SMALL, Uploads
from penstock.server.monitoring.records import _KEY, RequestRecord, record_of
from penstock.server.wire.decoding import FieldError
from penstock.server.wire.requests import TokenizeRequest

PART = 16 << 10


def asking(owner: bytes, parts: Iterable[bytes]) -> Request:
    messages: list[Message] = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    messages.append({"type": "http.request", "body": b"", "more_body": False})

    async def receive() -> Message:
        if not messages:
            await asyncio.sleep(3600)  # The client waits for its answer.
        return messages.pop(0)

    account = RequestRecord("one", "POST", {}, owner=owner)
    scope: Scope = {"type": "http", "method": "POST", "path": "/", "headers": [], _KEY: account}
    return Request(scope, receive)


@pytest.fixture(autouse=True)
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "_RATE", 1 << 20)
    monkeypatch.setattr(uploads, "_BURST", 2 * SMALL)


async def seconds(there: Uploads, owner: bytes, size: int) -> float:
    loop = asyncio.get_running_loop()
    begin, request = loop.time(), asking(owner, [b"x" * PART] * (size // PART))
    assert await there.body(request) == b"x" * size
    there.release(request)
    return loop.time() - begin


def test_a_keys_large_bodies_are_read_at_a_rate_together() -> None:
    async def both() -> list[float]:
        there = Uploads(1 << 30, keys=2)
        return await asyncio.gather(*(seconds(there, b"one", 512 << 10) for _ in range(2)))

    # What is large of both, less what may come at once, at a mebibyte a second; when each ends depends on
    # their turns.
    assert max(asyncio.run(both())) >= (2 * ((512 << 10) - SMALL) - 2 * SMALL - 2 * PART) / (1 << 20)


def test_neither_another_key_nor_small_requests_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "_RATE", 1)  # So that who waits does so for hours.

    async def others() -> None:
        there = Uploads(1 << 30, keys=2)
        large = asyncio.ensure_future(seconds(there, b"one", 512 << 10))
        await asyncio.sleep(0.05)
        async with asyncio.timeout(30):
            await seconds(there, b"two", 2 * SMALL)
            await seconds(there, b"one", SMALL)
        assert not large.done()
        large.cancel()

    asyncio.run(others())


def test_a_server_of_one_key_reads_as_fast_as_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "_RATE", 1)  # Or it would take hours.
    assert asyncio.run(seconds(Uploads(1 << 30, keys=1), b"one", 512 << 10)) < 60


def test_to_be_read_slowly_is_not_to_come_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time that a body may take does not run while it is not read."""
    monkeypatch.setattr(
        uploads, "_RATE", 128 << 10
    )  # It takes 2.5 seconds, with a second and a half to spare for a slow machine.
    monkeypatch.setattr(uploads, "_PATIENCE", 1.5)
    monkeypatch.setattr(uploads, "_SLOWEST", 1 << 40)
    assert asyncio.run(seconds(Uploads(1 << 30, keys=2), b"one", 512 << 10)) > 2


def test_a_body_has_its_time_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not begin anew with each part, however steadily they come."""
    monkeypatch.setattr(uploads, "_PATIENCE", 0.5)
    monkeypatch.setattr(uploads, "_SLOWEST", 1 << 40)

    async def dripping() -> None:
        request = asking(b"one", ())

        async def receive() -> Message:
            await asyncio.sleep(0.05)
            return {"type": "http.request", "body": b"x", "more_body": True}

        request._receive = receive
        with pytest.raises(HTTPException, match="send it faster") as late:
            await asyncio.wait_for(Uploads(1 << 30, keys=2).body(request), 30)
        assert late.value.status_code == 408

    asyncio.run(dripping())


@pytest.mark.parametrize(("keys", "share"), [(1, 4), (2, 2), (9, 2)])
@pytest.mark.parametrize("bound", ["requests", "bytes"])
def test_a_key_has_its_share_of_what_is_on_its_way(
    monkeypatch: pytest.MonkeyPatch, keys: int, share: int, bound: str
) -> None:
    """Half where there are several, by number and by size; a request more is refused, another's is not."""
    monkeypatch.setattr(uploads, "_MOST", 4 if bound == "requests" else 1000)
    there, size = Uploads(100, keys=keys), 1 if bound == "requests" else 100
    for _ in range(share):
        there._hold(asking(b"one", ()), size)
    with pytest.raises(
        BusyError,
        match="from this key are being received" if keys > 1 else "more than the server takes at once",
    ):
        there._hold(asking(b"one", ()), size)
    held = [asking(b"two", ()) for _ in range(4 - share)]
    for request in held:
        there._hold(request, size)
    with pytest.raises(
        BusyError,
        match="from all clients are being received" if keys > 1 else "more than the server takes at once",
    ):
        there._hold(asking(b"three", ()), size)
    if held:
        there.release(held[0])
        there._hold(asking(b"three", ()), size)


def large_and_small(text: str) -> list[Request]:
    """A request of more than 64 KiB, and one of less, each of which says that much."""
    found = []
    for more in (SMALL, 0):
        body = text.encode() + b" " * more
        request = asking(b"one", [body])
        request.scope["headers"] = [(b"content-type", b"application/json")]
        found.append(request)
    return found


def test_large_bodies_are_decoded_and_checked_on_a_thread() -> None:
    """So that the loop goes on meanwhile. Small ones are not, and wait for nobody."""

    async def both() -> None:
        house = ServerState(ServerSettings(("m",), keys=(ApiKey(b"one"), ApiKey(b"two"))))
        large, small = large_and_small('{"prompt": "a"}')
        on = list[int]()

        def check(asked: TokenizeRequest) -> None:
            on.append(threading.get_ident())

        assert (await reading_of.body_of(house, large, TokenizeRequest, check)).prompt == "a"
        assert house.uploads.is_large(large), "it has only been looked at"
        assert (await reading_of.body_of(house, small, TokenizeRequest, check)).prompt == "a"
        assert [one == threading.get_ident() for one in on] == [False, True]

    asyncio.run(both())


@pytest.mark.parametrize(
    "many", ["[[]" + ",[]" * 250_000 + "]", "[0" + ",0" * 1_000_001 + "]"], ids=["lists", "numbers"]
)
def test_a_body_that_takes_long_to_decode_is_not_decoded(many: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading_of, "decoded", lambda *_: pytest.fail("it is decoded"))

    async def refused() -> None:
        request, _ = large_and_small('{"prompt": "a", "tools": ' + many + "}")
        with pytest.raises(FieldError, match="send several smaller ones"):
            await reading_of.body_of(
                ServerState(ServerSettings(("m",))), request, TokenizeRequest, TokenizeRequest.check
            )

    asyncio.run(refused())


def test_nobody_waits_for_another_keys_large_request() -> None:
    """Of each key one at a time is read, of two keys at once, and more go round among them."""
    order: list[str] = []

    async def all_of_them() -> None:
        there, gate = Uploads(1 << 30, keys=3), threading.Event()

        async def read(owner: bytes, work: Callable[[], object]) -> None:
            request = asking(owner, ())
            there._hold(request, SMALL + 1)
            await there.aside(request, work)

        held = [asyncio.ensure_future(read(b"one", gate.wait)) for _ in range(3)]
        await asyncio.sleep(0)
        await read(b"two", lambda: order.append("two"))
        second = asyncio.ensure_future(read(b"two", gate.wait))
        await asyncio.sleep(0)
        rest = [
            asyncio.ensure_future(read(owner, lambda owner=owner: order.append(owner.decode())))  # type: ignore[misc]
            for owner in (b"one", b"one", b"three")
        ]
        await asyncio.sleep(0.05)
        assert order == ["two"]
        gate.set()
        await asyncio.gather(*held, second, *rest)

    asyncio.run(asyncio.wait_for(all_of_them(), 30))
    assert order.index("three") < order.index("one"), "three has waited for one of each"


def test_decoding_rests_where_there_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[float] = []
    monkeypatch.setattr(uploads.time, "sleep", rests.append)

    def work() -> None:
        end = uploads.time.thread_time() + 0.05
        while uploads.time.thread_time() < end:
            pass

    async def one(keys: int) -> None:
        await Uploads(1 << 30, keys=keys).opened(asking(b"one", ()), work)

    asyncio.run(one(1))
    assert rests == []
    asyncio.run(one(2))
    assert 0.15 <= rests[0] <= 1.0


def test_a_deadline_runs_from_arrival_while_a_request_is_read() -> None:
    """Its time was over before: it would last an hour otherwise."""

    class Timed:
        def allowed_seconds(self, wanted: float | None) -> float | None:
            return wanted

    async def late() -> None:
        house, request = (
            ServerState(ServerSettings(("m",)), broker=cast(RequestBroker, Timed())),
            asking(b"one", ()),
        )
        record_of(request).began -= 7200
        never = threading.Event()
        work = house.uploads.aside(request, never.wait)
        try:
            with pytest.raises(DeadlineError):
                await reading_of.in_time(house, request, work, 3600)
        finally:
            never.set()  # The interpreter waits for its thread at the end.

    asyncio.run(asyncio.wait_for(late(), 30))


@pytest.mark.parametrize("large", [True, False])
def test_reading_ends_when_its_time_is_over_or_its_client_has_gone(large: bool) -> None:
    """What runs ends at its next pause. Of a small request that is not noticed before it has been read."""

    class Timed:
        def allowed_seconds(self, wanted: float | None) -> float | None:
            return wanted

    async def all_of_them(gone: bool) -> None:
        house, request, ended = (
            ServerState(
                ServerSettings(("m",), keys=(ApiKey(b"one"), ApiKey(b"two"))),
                broker=cast(RequestBroker, Timed()),
            ),
            asking(b"one", ()),
            threading.Event(),
        )
        house.uploads._hold(request, SMALL + large)

        async def receive() -> Message:
            await asyncio.sleep(0.1 if gone else 3600)
            return {"type": "http.disconnect"}

        request._receive = receive

        def work() -> None:
            try:
                while True:
                    expect_wanted()
                    time.sleep(0.001)
            finally:
                ended.set()

        reading = house.uploads.aside(request, work)
        with pytest.raises(ClientDisconnect if gone else DeadlineError):
            await reading_of.in_time(house, request, reading, 3600 if gone else 0.1)
        assert await asyncio.to_thread(ended.wait, 30)

    for gone in (True, False):
        if large or not gone:
            asyncio.run(asyncio.wait_for(all_of_them(gone), 30))


@pytest.mark.parametrize("keys", [(ApiKey(b""),), (ApiKey(b""), ApiKey(b"one"))])
@pytest.mark.parametrize("sent", ["Bearer", "Bearer ", "bearer \t", "Bearer  "])
def test_an_empty_key_is_nobodys(keys: tuple[ApiKey, ...], sent: str) -> None:
    request = asking(b"", ())
    request.scope["headers"] = [(b"authorization", sent.encode())]
    with pytest.raises(HTTPException, match="API key is missing"):
        app._owner(ServerSettings(("m",), keys=keys), request)


@pytest.mark.parametrize(
    "given",
    [
        [{"type": "function", "function": {"name": "f", "parameters": {"enum": ["x"] * 100_000}}}],
        [{"type": "function", "function": {"name": "f", "description": "x" * ((1 << 20) + 1)}}],
        {"a": {"x" * 600_000: 1, "y" * 600_000: 2}},
        [2**4000] * 1000,
    ],
)
def test_what_is_too_much_for_a_template_is_refused(given: object) -> None:
    with pytest.raises(FieldError, match="tools may have 100,000 values, and 1,048,576 characters"):
        prompts._expect_few("tools", given)
    prompts._expect_few("tools", [{"enum": ["x"] * 99_000}, {"description": "x" * 900_000}])
