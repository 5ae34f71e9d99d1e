"""Two keys of one server: neither finds what the other has sent, nor comes back to what it was answered. Over sockets."""

import json
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="needs the extra `serve`")

from servers import FLAGS, Server, serving
from streams import LONG

ONE, TWO = "the first key", "the second key"
PROMPT = "Once there was a very small boat, and nobody knew where it came from. " * 12


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from served(tmp_path_factory.mktemp("own"))


@pytest.fixture(scope="module")
def sharing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from served(tmp_path_factory.mktemp("shared"), "--share-prefixes")


def served(folder: Path, *flags: str) -> Iterator[Server]:
    (folder / "keys.txt").write_text(f"{ONE}\n{TWO}\n")
    with serving(folder, "--port", "0", "--api-keys", str(folder / "keys.txt"), *flags, *FLAGS) as server:
        yield server.wait()
        server.signal(signal.SIGTERM)
        assert server.ended() == 0
        assert "Traceback" not in server.said()


def asked(server: Server, key: str, path: str, method: str = "POST", **body: object) -> tuple[int, dict[str, Any]]:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    data = json.dumps(body).encode() if body else None
    try:
        with urllib.request.urlopen(urllib.request.Request(server.url + path, data, headers, method=method), timeout=LONG) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def cached(server: Server, key: str, prompt: str, **more: object) -> int:
    body = {"model": "shipped", "prompt": prompt, "max_tokens": 1, "temperature": 0} | more
    status, found = asked(server, key, "/v1/completions", **body)
    assert status == 200, found
    return int(found["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_key_finds_its_own_prefixes_and_no_others(server: Server) -> None:
    prompt = "Mine. " + PROMPT
    assert cached(server, ONE, prompt) == 0
    assert cached(server, TWO, prompt) == 0
    assert (mine := cached(server, ONE, prompt)) > 100
    assert cached(server, TWO, prompt) == mine


def test_a_salt_tells_requests_of_one_key_apart(server: Server) -> None:
    prompt = "Salted. " + PROMPT
    assert cached(server, ONE, prompt, cache_salt="a") == 0
    assert cached(server, ONE, prompt) == 0
    assert cached(server, ONE, prompt, cache_salt="b") == 0
    assert cached(server, TWO, prompt, cache_salt="a") == 0
    assert cached(server, ONE, prompt, cache_salt="a") > 100


def test_responses_are_answered_by_salt_too(server: Server) -> None:
    def found(key: str, **more: object) -> int:
        body = {"model": "shipped", "input": "Answer me. " + PROMPT, "max_output_tokens": 1} | more
        status, response = asked(server, key, "/v1/responses", **body)
        assert status == 200, response
        return int(response["usage"]["input_tokens_details"]["cached_tokens"])

    assert found(ONE, cache_salt="x") == 0
    assert found(TWO) == found(ONE) == 0
    assert found(ONE, cache_salt="x") > 100
    assert found(TWO) > 100


def test_prefixes_are_shared_where_that_is_said(sharing: Server) -> None:
    prompt = "Ours. " + PROMPT
    assert cached(sharing, ONE, prompt) == 0
    assert cached(sharing, TWO, prompt) > 100
    assert cached(sharing, TWO, prompt, cache_salt="own") == 0


@pytest.mark.parametrize("salt", ["", "x" * 257, 3], ids=["empty", "long", "number"])
def test_what_is_no_salt_is_refused(server: Server, salt: object) -> None:
    status, found = asked(server, ONE, "/v1/completions", model="shipped", prompt="a", cache_salt=salt)
    assert status == 400
    assert "cache_salt" in found["error"]["message"]


def test_a_response_is_its_key_s(server: Server) -> None:
    status, mine = asked(server, ONE, "/v1/responses", model="shipped", input="Hello", max_output_tokens=4)
    assert status == 200
    there = f"/v1/responses/{mine['id']}"
    answers = [
        asked(server, TWO, there, "GET"),
        asked(server, TWO, there, "DELETE"),
        asked(server, TWO, "/v1/responses", model="shipped", input="Go on", previous_response_id=mine["id"], max_output_tokens=4),
    ]
    assert [status for status, _ in answers] == [404] * 3
    # As of one that never was: nothing tells that it is there.
    unknown = f"resp_{'0' * (len(mine['id']) - 5)}"
    _, never = asked(server, TWO, f"/v1/responses/{unknown}", "GET")
    assert answers[0][1]["error"]["message"].replace(mine["id"], "") == never["error"]["message"].replace(unknown, "")
    assert asked(server, ONE, there, "GET") == (200, mine)
    status, more = asked(server, ONE, "/v1/responses", model="shipped", input="Go on", previous_response_id=mine["id"], max_output_tokens=4)
    assert status == 200
    assert more["previous_response_id"] == mine["id"]
    assert asked(server, ONE, there, "DELETE")[0] == 200
    assert asked(server, ONE, there, "GET")[0] == 404
