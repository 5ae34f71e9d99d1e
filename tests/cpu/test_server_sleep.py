"""A server whose model sleeps: requests end first, later ones are told, and answers are the same
afterwards."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from servers import ENDLESS, FLAGS, Server, Stream, serving, until

MORE = 60
"""Tokens of an answer that takes a while."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    with serving(folder, *FLAGS, "--port", "0") as server:
        yield server.wait()
        assert "Traceback" not in server.said()


def awake(server: Server) -> bool:
    return server.ask("GET", "/is_sleeping")[2] != {"is_sleeping": True}


def slept(server: Server, query: str = "") -> Any:
    status, _, answer = server.ask("POST", f"/sleep{query}")
    assert status == 200
    return answer


@pytest.mark.parametrize(
    ("query", "weights"), [("", "host memory"), ("?level=1&mode=wait", "host memory"), ("?level=2", "disk")]
)
def test_answers_are_the_same_after_a_sleep(server: Server, query: str, weights: str) -> None:
    before = server.complete()[2]["choices"]
    level = 2 if "2" in query else 1
    assert slept(server, query) == {"is_sleeping": True, "level": level, "weights": weights}
    assert slept(server) == {"is_sleeping": True, "level": level, "weights": weights}
    assert server.ask("GET", "/is_sleeping")[2] == {"is_sleeping": True}
    assert server.ask("GET", "/ready")[::2] == (503, {"status": "asleep"})
    assert server.ask("GET", "/health")[0] == 200
    for path in ("/state", "/metrics", "/experts", "/v1/models"):
        assert server.ask("GET", path)[0] == 200
    assert server.ask("POST", "/reset_prefix_cache")[0] == 200
    status, headers, answer = server.complete()
    assert (status, "Retry-After" in headers) == (503, True)
    assert "is asleep; wake it up (LLM.wake_up, POST /wake_up)" in answer["error"]["message"]
    for _ in range(2):
        assert server.ask("POST", "/wake_up")[::2] == (200, {"is_sleeping": False})
    assert server.ask("GET", "/ready")[0] == 200
    assert server.complete()[2]["choices"] == before


def test_what_runs_ends_before_the_model_sleeps(server: Server) -> None:
    with Stream(server, ENDLESS | {"max_tokens": MORE}) as stream:
        assert stream.event()
        thread = threading.Thread(target=slept, args=[server])
        thread.start()
        until(lambda: server.ask("GET", "/ready")[0] == 503)
        assert server.complete()[0] == 503
        events = stream.events()
        thread.join()
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert not awake(server)
    server.ask("POST", "/wake_up")
    assert server.complete()[0] == 200


def test_what_runs_is_ended_where_that_is_asked_for(server: Server) -> None:
    with Stream(server) as stream:
        assert stream.event()
        slept(server, "?mode=abort")
        last = stream.events()[-1]
    assert "has ended, since the model is asleep" in last["error"]["message"]
    server.ask("POST", "/wake_up")
    assert server.complete()[0] == 200


def test_a_sleep_that_waits_is_called_off_or_made_to_abort(server: Server) -> None:
    with Stream(server) as stream, ThreadPoolExecutor(1) as beside:
        for path, query, status in (("/wake_up", "", 400), ("/sleep", "?mode=abort", 200)):
            assert stream.event()
            waiting = beside.submit(server.ask, "POST", "/sleep")
            until(lambda: server.ask("GET", "/ready")[0] == 503)
            assert server.ask("GET", "/state")[2]["open"] is False
            assert server.ask("POST", path + query)[0] == 200
            assert waiting.result()[0] == status
        assert "has ended, since the model is asleep" in stream.events()[-1]["error"]["message"]
    assert not awake(server)
    server.ask("POST", "/wake_up")
    assert server.complete()[0] == 200


def test_rates_are_of_one_engine(server: Server) -> None:
    server.complete(max_tokens=MORE, ignore_eos=True)
    assert server.ask("GET", "/state")[2]["output_rate"] >= 0
    slept(server, "?level=2")
    server.ask("POST", "/wake_up")
    server.complete()
    state = server.ask("GET", "/state")[2]
    assert (state["output_rate"] >= 0, state["computed_rate"] >= 0) == (True, True)


@pytest.mark.parametrize("query", ["?level=0", "?level=x", "?mode=keep"])
def test_other_levels_and_modes_are_refused(server: Server, query: str) -> None:
    status, _, answer = server.ask("POST", f"/sleep{query}")
    assert (status, answer["error"]["param"]) == (400, query[1:].partition("=")[0])
    assert awake(server)
