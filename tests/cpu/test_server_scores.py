"""Scores and rankings from a server, as clients of vLLM, Jina and Cohere ask for them."""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM
from penstock.server.answers.scores import read_scores
from penstock.server.wire.decoding import FieldError
from penstock.server.wire.scores import RERANK_PATHS, SCORE_PATHS, ScoreRequest
from rerankers import DOCUMENTS, QUERY, answered, answering, near, put
from servers import FLAGS, SETTINGS, Server, serving, until

MANY = [*DOCUMENTS, *(f"{one} {number}" for number, one in enumerate(DOCUMENTS * 2))]
"""More than the server computes at once, or has room for."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return answering(tmp_path_factory.mktemp("model") / "Qwen3-Reranker-tiny")


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    with serving(folder, str(model), *FLAGS, "--name", "mine", "--port", "0") as server:
        yield server.wait()
        assert "Traceback" not in server.said()


@pytest.fixture(scope="module")
def expected(model: Path) -> list[float]:
    return answered(model, [put(QUERY, one) for one in MANY])


@pytest.mark.parametrize("path", RERANK_PATHS)
def test_documents_come_in_the_order_of_their_relevance(
    server: Server, expected: list[float], path: str
) -> None:
    ask = {"model": "mine", "query": QUERY, "documents": MANY}
    status, headers, answer = server.ask("POST", path, ask | {"user": "me"})
    assert (status, headers["X-Ignored-Fields"]) == (200, "user")
    order = sorted(range(len(MANY)), key=lambda one: -expected[one])
    assert [one["index"] for one in answer["results"]] == order
    assert near([one["relevance_score"] for one in answer["results"]], [expected[one] for one in order])
    assert [one["document"] for one in answer["results"]] == [{"text": MANY[one]} for one in order]
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] > 100 * len(MANY)
    assert (answer["model"], answer["id"][:7]) == ("mine", "rerank-")
    objects = [{"text": one, "title": "x"} for one in MANY]
    few = ask | {"documents": objects, "top_n": 2, "return_documents": False}
    assert server.ask("POST", path, few)[2]["results"] == [
        {"index": one, "relevance_score": pytest.approx(expected[one], abs=1e-4)} for one in order[:2]
    ]


@pytest.mark.parametrize("path", SCORE_PATHS)
def test_scores_come_in_the_order_of_the_documents(server: Server, expected: list[float], path: str) -> None:
    for first, second in (("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2")):
        status, _, answer = server.ask("POST", path, {"model": "mine", first: QUERY, second: DOCUMENTS})
        assert status == 200
        assert near([one["score"] for one in answer["data"]], expected[:4])
        assert [one["index"] for one in answer["data"]] == [0, 1, 2, 3]
    one = {"model": "mine", "text_1": [QUERY, "other"], "text_2": DOCUMENTS[:2], "use_activation": False}
    found = [one["score"] for one in server.ask("POST", path, one)[2]["data"]]
    assert 1 / (1 + 2.718281828459045 ** -found[0]) == pytest.approx(expected[0], abs=1e-4)
    assert found[1] != pytest.approx(expected[1], abs=1e-4)


def test_long_documents_are_cut_where_that_is_asked_for(server: Server, model: Path) -> None:
    long = "water " * 400
    ask = {"model": "mine", "query": QUERY, "documents": [long]}
    status, _, answer = server.ask("POST", "/rerank", ask)
    assert status == 400
    assert "context holds 512" in answer["error"]["message"]
    whole = server.ask("POST", "/rerank", ask | {"truncate_prompt_tokens": -1})[2]
    assert whole["usage"]["prompt_tokens"] == 511
    assert whole["results"][0]["document"]["text"] == long
    cut = server.ask("POST", "/rerank", ask | {"max_tokens_per_doc": 5})[2]
    assert near([cut["results"][0]["relevance_score"]], answered(model, [put(QUERY, "water")]))


@pytest.mark.parametrize(
    ("path", "fields", "status", "param", "said"),
    [
        ("/rerank", {"query": "A", "documents": []}, 400, "documents", "an empty list"),
        ("/rerank", {"query": "A", "documents": ["B"] * 1001}, 400, "documents", "more than 1000"),
        ("/rerank", {"query": "A", "documents": [{"title": "B"}]}, 400, "text", "missing"),
        ("/rerank", {"query": "A", "documents": ["B"], "top_n": -1}, 400, "top_n", "at least 0"),
        ("/rerank", {"query": "A"}, 400, "documents", "missing"),
        ("/rerank", {"query": "A", "documents": ["B"], "max_tokens_per_doc": 0}, 400, None, "at least 1"),
        ("/score", {"text_1": "A"}, 400, "text_2", "nothing was sent; send one of text_2"),
        ("/score", {"text_1": "A", "queries": "B", "text_2": "C"}, 400, "text_1", "text_1 and queries"),
        ("/score", {"text_1": ["A", "B"], "text_2": ["C"]}, 400, "text_2", "2 queries for 1 document;"),
        ("/score", {"text_1": "A", "text_2": "B", "model": "other"}, 404, "model", "does not exist"),
    ],
)
def test_what_cannot_be_is_refused(
    server: Server, path: str, fields: Mapping[str, Any], status: int, param: str | None, said: str
) -> None:
    found, _, answer = server.ask("POST", path, {"model": "mine"} | dict(fields))
    assert found == status
    assert said in answer["error"]["message"]
    assert param in (None, answer["error"]["param"])


def test_a_request_in_turns_ends_before_the_model_sleeps(server: Server, expected: list[float]) -> None:
    def computed() -> int:
        return int(server.ask("GET", "/state")[2]["output_tokens"])

    many = {"model": "mine", "query": QUERY, "documents": (MANY * 9)[:100], "top_n": 1}
    with ThreadPoolExecutor(1) as beside:
        for query, status in (("", 200), ("?mode=abort", 503)):
            before = computed()
            asked = beside.submit(server.ask, "POST", "/rerank", many)
            until(lambda before=before: computed() > before)
            assert server.ask("POST", f"/sleep{query}")[0] == 200
            answer = asked.result()
            assert answer[0] == status
            assert server.ask("POST", "/wake_up")[0] == 200
    assert "has ended, since the model is asleep" in answer[2]["error"]["message"]


def test_a_model_whose_files_are_gone_sleeps_on(server: Server, model: Path, expected: list[float]) -> None:
    assert server.ask("POST", "/sleep?level=2")[0] == 200
    elsewhere = model.rename(model.with_name("elsewhere"))
    status, _, answer = server.ask("POST", "/wake_up")
    assert (status, server.ask("GET", "/is_sleeping")[2]) == (500, {"is_sleeping": True})
    assert "sleeps on, since it cannot be started again" in answer["error"]["message"]
    elsewhere.rename(model)
    assert server.ask("POST", "/wake_up")[0] == 200
    ask = {"model": "mine", "text_1": QUERY, "text_2": DOCUMENTS}
    assert near([one["score"] for one in server.ask("POST", "/score", ask)[2]["data"]], expected[:4])


def test_a_model_that_is_none_says_so_without_paths() -> None:
    asked = ScoreRequest(model="shipped", text_1="A", text_2="B")
    with LLM(**SETTINGS, max_length=128) as llm:  # type: ignore[arg-type]
        reader = llm.reader
    with pytest.raises(FieldError, match="is no reranker") as refused:
        read_scores(reader, asked)
    assert refused.value.param == "model"
    assert "/" not in str(refused.value)
