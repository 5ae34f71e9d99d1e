"""The socket that the server listens at."""

import asyncio
import socket

import pytest

pytest.importorskip("uvicorn")

from penstock.server.run import _bind
from penstock.server.settings import Listening


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_no_piece_of_an_answer_waits_until_the_one_before_is_acknowledged(host: str) -> None:
    """A client acknowledges after 40 ms what it has no answer to, and a kept connection would wait for that
    in every answer."""

    async def seen() -> int:
        found = asyncio.get_running_loop().create_future()

        async def come(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            found.set_result(
                writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            )
            writer.close()

        bound = _bind(Listening(host, 0))
        async with await asyncio.start_server(come, sock=bound):
            _, writer = await asyncio.open_connection(*bound.getsockname()[:2])
            try:
                return int(await found)
            finally:
                writer.close()

    assert asyncio.run(seen())
