"""`penstock serve --on-demand` as it runs: the shipped model and two small random ones, of which memory holds
two, and one that cannot be read. Each engine has a process of its own, so what is told of models is held
against the processes there are."""

import json
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock import LLM, SamplingParams
from penstock.api.llm import SHIPPED_MODEL
from servers import STORY, Server, Stream, counted, serving, until

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from random_checkpoint import write_checkpoint

NAMES = ("shipped", "small", "other")
COUNT = 8
MEMORY = "120MiB"
"""For each; all together have twice that."""
ENGINE = {"device": "cpu", "dtype": "float32", "device_memory": MEMORY, "max_sequences": 4}
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
LONG_STORY = {"prompt": STORY, "max_tokens": 200, "ignore_eos": True, "stream": True, "temperature": 0}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    config = json.loads((SHIPPED_MODEL / "config.json").read_text())
    config |= {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "tie_word_embeddings": False}
    paths = {"shipped": SHIPPED_MODEL}
    for name, layers in (("small", 2), ("other", 3)):
        paths[name] = tmp_path_factory.mktemp("models") / name
        write_checkpoint(paths[name], config | {"num_hidden_layers": layers})
    return paths


@pytest.fixture(scope="module")
def broken(models: dict[str, Path]) -> Path:
    path = models["other"].with_name("broken")
    shutil.copytree(models["other"], path)
    (path / "config.json").write_text("{")
    return path


@pytest.fixture(scope="module")
def right(models: dict[str, Path]) -> dict[str, str]:
    """What each model says by itself."""
    said = {}
    for name, path in models.items():
        with LLM(path, **ENGINE) as llm:  # type: ignore[arg-type]
            said[name] = llm.generate(STORY, GREEDY)[0].text
    assert len(set(said.values())) == len(NAMES)
    return said


@pytest.fixture(scope="module")
def server(
    models: dict[str, Path], broken: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    flags = ["--device", "cpu", "--dtype", "float32", "--device-memory", "240MiB", "--max-sequences", "4"]
    for name in NAMES:
        flags += ["--model-memory", f"{name}={MEMORY}"]
    wanted = [f"broken={broken}", str(models["shipped"]), *(f"{name}={models[name]}" for name in NAMES[1:])]
    with serving(tmp_path_factory.mktemp("server"), *wanted, "--on-demand", "--port", "0", *flags) as server:
        yield server.wait()


def ask(server: Server, name: str, **more: Any) -> tuple[int, Any, Any]:
    fields = {"prompt": STORY, "max_tokens": COUNT, "temperature": 0, "ignore_eos": True}
    return server.ask("POST", "/v1/completions", {"model": name, **fields, **more})


def keep(server: Server, name: str, keep_alive: object) -> tuple[int, Any, Any]:
    """Ask for nothing but that a model be there for so long."""
    return server.ask("POST", "/api/generate", {"model": name, "keep_alive": keep_alive, "stream": False})


def phases(server: Server) -> dict[str, str]:
    return {one["id"]: one["state"] for one in server.ask("GET", "/v1/models")[2]["data"]}


def only(server: Server, *names: str) -> None:
    """Have these models loaded, and no other."""
    for name in set(NAMES) - set(names):
        keep(server, name, 0)
    until(lambda: loaded(server) <= set(names))  # Else one of these may go for another of them.
    for name in names:
        keep(server, name, 300)
    assert loaded(server) == set(names)


def loaded(server: Server) -> set[str]:
    return {one["name"] for one in server.ask("GET", "/api/ps")[2]["models"]}


def engines(server: Server) -> list[psutil.Process]:
    """The processes of engines: children of the one that they are forked from."""
    stem = psutil.Process(server.process.pid).children()
    return [one for child in stem for one in child.children()]


def test_each_is_loaded_as_it_is_asked_for_and_says_what_it_says_alone(
    server: Server, right: dict[str, str]
) -> None:
    assert (phases(server), loaded(server)) == (dict.fromkeys(("broken", *NAMES), "unloaded"), set())
    assert server.ask("GET", "/ready")[2] == {"status": "ready"}
    state = server.ask("GET", "/state")[2]
    assert [one["state"] for one in state["models"]] == ["unloaded"] * 4
    shown = server.ask("POST", "/api/show", {"model": "small"})[2]
    assert shown["model_info"]["llama.block_count"] == 2
    assert server.ask("GET", "/is_sleeping")[2] == {"is_sleeping": False}
    assert server.ask("POST", "/sleep")[0] == 501
    assert not engines(server), "nothing of that loads a model"
    with ThreadPoolExecutor(6) as clients:
        asked = [name for name in NAMES for _ in range(2)]
        answers = list(clients.map(lambda name: ask(server, name), asked))
    for name, (status, headers, body) in zip(asked, answers, strict=True):
        assert (status, body["choices"][0]["text"]) == (200, right[name])
        waited, forecast = (float(headers[f"x-model-wait{more}"]) for more in ("", "-forecast"))
        assert (waited > 0.01, forecast > 0.01) == (True, True)
    there = loaded(server)
    assert len(there) == 2
    assert len(engines(server)) == 2
    name = there.pop()
    status, headers, _ = ask(server, name)
    assert status == 200
    assert "x-model-wait" not in headers, "it was there"
    state = server.ask("GET", "/state")[2]
    assert (state["model"], state["tiers"][0]["tier"]) == (name, "device")
    of = {one["name"]: one for one in state["models"]}
    assert of[name]["expires_in"] == pytest.approx(300, abs=5)
    assert of[name]["device_memory"] == 120 << 20
    samples = counted(server)
    assert sum(samples["model_loads_total", name] for name in NAMES) == 3
    assert samples["kv_cache_usage_perc", name] == 0


def test_a_request_is_not_cut_when_another_model_needs_room(server: Server, right: dict[str, str]) -> None:
    """The idle one goes; and where both are used, the new one waits until one of them is free."""
    streams = [Stream(server, {"model": name, **LONG_STORY}) for name in NAMES[:2]]
    try:
        assert [stream.event() is not None for stream in streams] == [True, True]
        with ThreadPoolExecutor(1) as client:
            third = client.submit(ask, server, "other")
            counts = [len(stream.events()) for stream in streams]
            assert min(counts) > 10
            status, headers, body = third.result()
    finally:
        for stream in streams:
            stream.close()
    assert (status, body["choices"][0]["text"]) == (200, right["other"])
    assert float(headers["x-model-wait"]) > 0


def test_a_load_that_fails_tells_why_and_leaves_the_others(
    server: Server, models: dict[str, Path], right: dict[str, str]
) -> None:
    only(server, "small", "shipped")
    weights = sorted(models["other"].glob("*.safetensors"))[1]
    hidden = weights.with_suffix(".hidden")
    weights.rename(hidden)
    try:
        with ThreadPoolExecutor(2) as clients:
            told = list(clients.map(lambda _: ask(server, "other"), range(2)))
    finally:
        hidden.rename(weights)
    for status, headers, body in told:
        assert (status, body["error"]["code"]) == (503, "model_not_loaded")
        assert "the model other cannot be loaded" in body["error"]["message"]
        assert weights.name in body["error"]["message"]
        assert 1 <= int(headers["retry-after"]) <= 5
    assert [ask(server, name)[2]["choices"][0]["text"] for name in ("small",)] == [right["small"]]


def test_a_model_that_cannot_be_read_takes_no_other_down(server: Server, broken: Path) -> None:
    assert f"broken is not served, others are: {broken}/config.json is not JSON" in server.said()
    for told in (ask(server, "broken"), server.ask("POST", "/api/show", {"model": "broken"})):
        status, headers, body = told
        assert (status, "retry-after" in headers) == (503, True)
        assert f"the model broken cannot be loaded: {broken}/config.json is not JSON" in str(body)
        assert "then restart the server" in str(body)
    card = server.ask("GET", "/v1/models/broken")[2]
    assert card["state"] == "unloaded"
    assert card["fault"].startswith("the model broken cannot be loaded: ")
    listed = {one["id"]: one for one in server.ask("GET", "/v1/models")[2]["data"]}
    assert listed["broken"] == card
    assert "fault" not in listed["small"]
    assert "is not JSON" in server.ask("GET", "/state")[2]["models"][0]["fault"]


def test_a_request_that_is_too_long_is_told_the_setting_that_makes_room(server: Server) -> None:
    only(server, "shipped")
    status, _, body = ask(server, "shipped", prompt=[5] * 33_000)
    assert status == 400
    message = body["error"]["message"]
    assert "start the server with --model-memory shipped=SIZE, more than 120 MiB" in message
    assert "max_length" not in message


def test_an_engine_that_is_killed_ends_its_requests_alone(server: Server, right: dict[str, str]) -> None:
    only(server, "small", "shipped")
    before = {one.pid for one in engines(server)}
    assert keep(server, "small", 0)[2]["done_reason"] == "unload"
    until(lambda: len(engines(server)) == 1)
    assert loaded(server) == {"shipped"}
    [left] = engines(server)
    assert left.pid in before
    with Stream(server, {"model": "small", **LONG_STORY}) as goes_on:
        assert goes_on.event() is not None
        with Stream(server, {"model": "shipped", **LONG_STORY, "max_tokens": 4000}) as stream:
            assert stream.event() is not None
            left.kill()
            last = [event for event in stream.events() if "error" in event]
        why = "the engine of shipped has ended: its process was killed by signal 9"
        assert why in last[0]["error"]["message"]
        [*_, end] = goes_on.events()  # A busy engine gives out several tokens at once.
        assert end["choices"][0]["finish_reason"] == "length"
    assert "the server stops" not in server.said()
    assert ask(server, "shipped")[2]["choices"][0]["text"] == right["shipped"]


def test_a_time_that_is_over_before_the_model_is_there_says_when_it_will_be(server: Server) -> None:
    for name in NAMES:
        keep(server, name, 0)
    until(lambda: not engines(server))
    status, headers, body = ask(server, "shipped", timeout=0.05)
    assert status == 504
    assert "shipped is still being loaded; it will be there in about " in body["error"]["message"]
    assert int(headers["retry-after"]) >= 1
    for kept, seconds in (("1h", 3600.0), (-1, None)):
        assert keep(server, "shipped", kept)[2]["done_reason"] == "load"
        [there] = [one for one in server.ask("GET", "/state")[2]["models"] if one["name"] == "shipped"]
        assert there["expires_in"] == (seconds if seconds is None else pytest.approx(seconds, abs=5))
    assert keep(server, "shipped", "soon")[0] == 400
    assert ask(server, "none")[0] == 404
    with closing(server.connection()) as gone:
        body = json.dumps({"model": "small", "prompt": STORY})
        gone.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        until(lambda: of_small(server)["waiting"] == 1)
    until(lambda: of_small(server)["state"] == "loaded")
    assert (of_small(server)["waiting"], of_small(server)["running"]) == (0, 0), "its client has gone"


def of_small(server: Server) -> Any:
    return next(one for one in server.ask("GET", "/state")[2]["models"] if one["name"] == "small")


def test_the_end_lets_requests_end_and_leaves_no_process(server: Server) -> None:
    only(server, "shipped")
    with Stream(server, {"model": "shipped", **LONG_STORY}) as stream, ThreadPoolExecutor(1) as client:
        assert stream.event() is not None
        waits = client.submit(ask, server, "small")
        until(lambda: of_small(server)["waiting"] == 1)
        all_of_them = psutil.Process(server.process.pid).children(recursive=True)
        for one in (server.process.pid, *(one.pid for one in all_of_them)):
            psutil.Process(one).send_signal(signal.SIGTERM)  # As a service manager sends it.
        events = stream.events()
        status, _, body = waits.result()
    assert (status, "shut down before small was loaded" in body["error"]["message"]) == (503, True)
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert server.ended() == 0, server.said()
    late = time.monotonic() + 10
    while any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in all_of_them):
        assert time.monotonic() < late, "a process is left"
        time.sleep(0.02)
