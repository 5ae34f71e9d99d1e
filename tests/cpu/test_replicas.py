"""`penstock serve --replicas` as its clients see it: the real command, real Ray, one cluster for all of it,
as one takes half a minute."""

import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from signal import SIGKILL, SIGTERM

import psutil
import pytest

from penstock import LLM, SamplingParams
from penstock.cli.main import main
from servers import ENDLESS, FLAGS, SETTINGS, STORY, Server, Stream, counted, serving, until
from streams import LONG

pytest.importorskip("ray.serve", reason="needs Ray Serve: pip install 'penstock[ray]'")

SIZE, ROWS, COUNT = 16, 4, 48
MORE = (*FLAGS, "--queue", "40", "--block-size", str(SIZE), "--replicas", "1:2", "--scale-up-after", "0")
PROMPTS = [f"{STORY}, when the year was {1900 + number}" for number in range(16)]
DRAWS = [
    {
        "max_tokens": COUNT,
        "temperature": 0 if number % 4 == 3 else 1.0,
        "seed": number,
        "ignore_eos": True,
        "n": 1 + (number % 8 == 5),
    }
    for number in range(16)
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("replicas"), *MORE) as server:
        yield server.wait()


def family(server: Server) -> list[psutil.Process]:
    """Every process that was started for it."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(server.process.pid).children(recursive=True)
    return []


def replicas(server: Server) -> list[psutil.Process]:
    """Those that compute."""
    found = []
    for process in family(server):
        with suppress(psutil.Error):
            if process.cmdline()[:1] and process.cmdline()[0].startswith("ray::ServeReplica"):
                found.append(process)
    return found


def loads(server: Server) -> Mapping[str, float]:
    """Requests under way at each replica."""
    return {labels[1]: value for labels, value in counted(server).items() if labels[0] == "replica_requests"}


@pytest.mark.timeout(300)
def test_a_life_with_replicas(server: Server) -> None:
    one_is_enough_to_be_ready(server)
    there_are_more_of_them_when_there_is_more_to_do(server)
    what_all_of_them_are_is_told_together_and_one_by_one(server)
    a_beginning_goes_where_it_was_computed(server)
    errors_are_those_of_a_single_server(server)
    who_leaves_takes_its_request_along(server)
    no_request_is_lost_with_a_replica(server)
    what_is_under_way_ends_before_the_server_does(server)


def one_is_enough_to_be_ready(server: Server) -> None:
    assert server.ask("GET", "/ready")[::2] == (200, {"status": "ready"})
    assert len(replicas(server)) == len(loads(server)) == 1
    status, _, answer = server.complete()
    assert status == 200
    with LLM(**SETTINGS) as llm:
        assert (
            answer["choices"][0]["text"]
            == llm.generate(STORY, SamplingParams(temperature=0, max_tokens=12))[0].text
        )
        assert server.ask("GET", "/v1/models")[2]["data"][0]["max_model_len"] == llm.limits.max_model_len
    assert answer["usage"]["completion_tokens"] == 12


def there_are_more_of_them_when_there_is_more_to_do(server: Server) -> None:
    with ExitStack() as opened:
        streams = [opened.enter_context(Stream(server, ENDLESS)) for _ in range(ROWS + 2)]
        assert all(stream.status == 200 for stream in streams)
        until(lambda: len(loads(server)) == 2, 3 * LONG)
        # Those that waited are for whoever is there.
        until(lambda: min(loads(server).values()) > 0)
        assert server.ask("GET", "/ready")[0] == 200
    until(lambda: sum(loads(server).values()) == 0)


def what_all_of_them_are_is_told_together_and_one_by_one(server: Server) -> None:
    status, _, state = server.ask("GET", "/state")
    assert status == 200
    own = list(state["replicas"].values())
    assert set(state["replicas"]) == set(loads(server))
    assert state["model"] == "shipped"
    assert state["output_tokens"] == sum(one["output_tokens"] for one in own) > 0
    memory = [
        sum(tier["bytes"] for tier in one["tiers"] if tier["tier"] == "device") for one in (state, *own)
    ]
    assert memory[0] == memory[1] + memory[2] > 0
    found = counted(server)
    assert found["replicas",] == 2
    assert all(found["generation_tokens_total", one] > 0 for one in loads(server))
    assert found["request_success_total", "length"] >= 1, "as the server itself has counted them"


def a_beginning_goes_where_it_was_computed(server: Server) -> None:
    """Alone, with one ending after another, and while others are computed."""
    beginnings = [f"{name} had a boat. " * 12 for name in ("Tim", "Ben", "Lily")]
    for beginning in beginnings:
        server.complete(prompt=beginning, max_tokens=1)
    for number in range(4):
        for beginning in beginnings:
            usage = server.complete(prompt=f"{beginning}{number}", max_tokens=1)[2]["usage"]
            missing = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
            assert missing <= 2 * SIZE < usage["prompt_tokens"]
    counts = counted(server)
    assert all(counts["computed_tokens_total", one] > 0 for one in loads(server))


def errors_are_those_of_a_single_server(server: Server) -> None:
    status, _, answer = server.complete(max_tokens=1 << 20, stream=True)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    status, _, answer = server.complete(model="another")
    assert (status, answer["error"]["param"]) == (404, "model")
    status, _, answer = server.complete(temperature=-1)
    assert (status, answer["error"]["param"]) == (400, "temperature")
    status, _, answer = server.complete(logit_bias={"1000000": 1})
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")


def who_leaves_takes_its_request_along(server: Server) -> None:
    with ExitStack() as opened:
        streams = [opened.enter_context(Stream(server, ENDLESS)) for _ in range(2)]
        assert all(stream.event() for stream in streams)
    until(
        lambda: (
            sum(value for labels, value in counted(server).items() if labels[0] == "num_requests_running")
            == 0
        )
    )


def no_request_is_lost_with_a_replica(server: Server) -> None:
    """Half of them streams; some draws, some outputs two. What is told is what one engine would have told."""
    with LLM(**SETTINGS) as llm:
        expected = [
            [output.text for output in one.outputs]
            for one in llm.generate(PROMPTS, [SamplingParams(**draw) for draw in DRAWS])
        ]
    before = loads(server)
    begun: list[int] = []

    def ask(number: int) -> list[str]:
        body = {"model": "shipped", "prompt": PROMPTS[number], **DRAWS[number]}
        if number % 2:
            status, _, answer = server.ask("POST", "/v1/completions", body)
            assert status == 200, answer
            return [choice["text"] for choice in answer["choices"]]
        texts = [""] * DRAWS[number]["n"]
        with Stream(server, body | {"stream": True}) as stream:
            while (event := stream.event()) is not None:
                assert "error" not in event, event
                begun.append(number)
                for choice in event["choices"]:
                    texts[choice["index"]] += choice["text"]
        return texts

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        asked = [pool.submit(ask, number) for number in range(len(PROMPTS))]
        # Each of them has some, and is in the midst of a stream.
        until(lambda: len(set(begun)) >= 4 and min(loads(server).values()) > 1)
        lost = replicas(server)[0]
        lost.send_signal(SIGKILL)
        found = [one.result() for one in asked]
    assert found == expected
    counts = counted(server)
    assert counts["requests_sent_again_total",] > 0
    assert counts["request_success_total", "length"] > 0
    # Another one comes in its place.
    until(lambda: len(loads(server)) == 2 and loads(server).keys() != before.keys(), 3 * LONG)
    assert lost.pid not in [process.pid for process in replicas(server)]
    assert server.ask("GET", "/ready")[0] == 200


def what_is_under_way_ends_before_the_server_does(server: Server) -> None:
    everybody = family(server)
    with Stream(server, ENDLESS | {"max_tokens": COUNT}) as stream:
        assert stream.event()
        server.signal(SIGTERM)
        until(lambda: server.ask("GET", "/ready")[0] == 503)
        assert server.complete()[0] == 503
        assert [event["choices"][0]["finish_reason"] for event in stream.events()][-1] == "length"
    assert server.ended() == 0, server.said()
    assert psutil.wait_procs(everybody, LONG)[1] == [], "nothing is left of it"


@pytest.mark.parametrize(
    ("address", "why"),
    [("127.0.0.1:1", "Connection refused"), ("ray://head:10001", "an address is auto, or HOST:PORT")],
)
def test_a_cluster_that_is_not_there_is_an_error(
    address: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--replicas", "2", "--port", "0", "--quiet", "--ray-address", address]) == 2
    assert re.fullmatch(
        rf"penstock: error: Ray cannot be reached at {address}: .*{why}.*\n", capsys.readouterr().err
    )


@pytest.mark.timeout(300)
def test_what_is_under_way_at_a_replica_that_is_not_needed_any_more_goes_on_at_another(
    tmp_path: Path,
) -> None:
    """It has less patience than these answers take."""
    greedy = SamplingParams(temperature=0, max_tokens=2500, ignore_eos=True)
    with LLM(**SETTINGS) as llm:
        expected = [one.text for one in llm.generate(PROMPTS[:2], greedy)]
    asked = {"model": "shipped", "max_tokens": 2500, "ignore_eos": True, "temperature": 0, "stream": True}

    def told(server: Server, prompt: str) -> str:
        with Stream(server, asked | {"prompt": prompt}) as stream:
            return "".join(event["choices"][0]["text"] for event in stream.events())

    with (
        serving(tmp_path, *MORE, "--scale-down-after", "3", "--patience", "5") as server,
        ThreadPoolExecutor(2) as pool,
    ):
        server.wait()
        with ExitStack() as opened:
            for _ in range(ROWS + 2):
                opened.enter_context(Stream(server, ENDLESS))
            until(lambda: len(loads(server)) == 2, 3 * LONG)
            streams = [pool.submit(told, server, prompt) for prompt in PROMPTS[:2]]
            until(lambda: sum(loads(server).values()) == ROWS + 4)
        until(lambda: len(loads(server)) == 1, 3 * LONG)
        assert [one.result() for one in streams] == expected
        assert server.ask("GET", "/ready")[0] == 200
