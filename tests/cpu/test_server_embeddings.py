"""Embeddings from a server, to the official clients of OpenAI and ollama."""

import json
import shutil
from base64 import b64decode
from collections.abc import Iterator, Mapping
from pathlib import Path
from struct import unpack
from typing import Any

import ollama
import openai
import pytest

from penstock import LLM
from penstock.base.config import SHIPPED_MODEL
from penstock.server.answers.embeddings import read_embeddings
from penstock.server.wire.decoding import FieldError
from penstock.server.wire.embeddings import EmbeddingsRequest
from servers import FLAGS, SETTINGS, Server, serving

TEXTS = ["Once upon a time", "A", "The little fox went to the sea. " * 6]
MODULES = [
    {"path": "", "type": "sentence_transformers.models.Transformer"},
    {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model, as one that says how its hidden states are pooled."""
    folder = tmp_path_factory.mktemp("model") / "shipped"
    folder.mkdir()
    for file in SHIPPED_MODEL.iterdir():
        shutil.copy(file, folder)
    (folder / "modules.json").write_text(json.dumps(MODULES))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true}')
    return folder


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    with serving(folder, str(model), *FLAGS, "--max-length", "128", "--port", "0") as server:
        yield server.wait()


@pytest.fixture(scope="module")
def expected(model: Path) -> list[tuple[float, ...]]:
    with LLM(model, **SETTINGS, max_length=128) as llm:  # type: ignore[arg-type]
        return [one.embedding for one in llm.embed(TEXTS)]


def near(found: Any, true: Any) -> bool:
    return len(found) == len(true) and all(
        abs(one - other) < 1e-5 for one, other in zip(found, true, strict=True)
    )


def test_openais_client(server: Server, expected: list[tuple[float, ...]]) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.embeddings.create(model="shipped", input=TEXTS)  # In base64, as it asks by itself.
        assert all(near(one.embedding, true) for one, true in zip(answer.data, expected, strict=True))
        assert [one.index for one in answer.data] == [0, 1, 2]
        assert answer.usage.total_tokens == answer.usage.prompt_tokens > 10
        floats = client.embeddings.create(model="shipped", input=TEXTS[0], encoding_format="float")
        assert near(floats.data[0].embedding, expected[0])
        short = client.embeddings.create(model="shipped", input=TEXTS[:1], dimensions=16, user="me")
        length = sum(number * number for number in expected[0][:16]) ** 0.5
        assert near(short.data[0].embedding, [number / length for number in expected[0][:16]])


def test_ollamas_client(server: Server, expected: list[tuple[float, ...]]) -> None:
    with ollama.Client(server.url) as client:
        answer = client.embed("shipped:latest", TEXTS)
        assert all(near(one, true) for one, true in zip(answer.embeddings, expected, strict=True))
        assert answer.prompt_eval_count
        long = client.embed("shipped", TEXTS[2] * 40)  # It is cut to what there is room for.
        assert len(long.embeddings[0]) == len(expected[0])
        with pytest.raises(ollama.ResponseError, match="context holds 128"):
            client.embed("shipped", TEXTS[2] * 40, truncate=False)


def test_tokens_and_bytes(server: Server, expected: list[tuple[float, ...]]) -> None:
    status, _, tokens = server.ask("POST", "/tokenize", {"prompt": TEXTS[0]})
    assert status == 200
    ask = {"model": "shipped", "input": tokens["tokens"], "encoding_format": "base64", "user": "me"}
    status, headers, answer = server.ask("POST", "/v1/embeddings", ask)
    assert (status, headers["X-Ignored-Fields"]) == (200, "user")
    data = b64decode(answer["data"][0]["embedding"])
    assert near(unpack(f"<{len(data) // 4}f", data), expected[0])


@pytest.mark.parametrize(
    ("fields", "status", "param", "said"),
    [
        ({"input": []}, 400, "input", "an empty list"),
        ({"input": ""}, 400, "input", "an empty text"),
        ({"input": ["A", ""]}, 400, "input", "an empty text"),
        ({"input": ["A", 3]}, 400, "input", "a list of token ids"),
        ({"input": [1.5]}, 400, "input", "a list of token ids"),
        ({"input": ["A"] * 257}, 400, "input", "more than 256"),
        ({"input": [10**9]}, 400, None, "not in the vocabulary"),
        ({"input": "A", "dimensions": 0}, 400, "dimensions", "from 1 to"),
        ({"input": "A", "dimensions": 100_000}, 400, "dimensions", "from 1 to"),
        ({"input": "A", "encoding_format": "hex"}, 400, None, "encoding_format"),
        ({"input": "A", "temperature": 1}, 400, None, "temperature"),
        ({"input": "A " * 5000}, 400, None, "context holds 128"),
        ({"input": "A", "model": "other"}, 404, "model", "does not exist"),
    ],
)
def test_what_cannot_be_is_refused(
    server: Server, fields: Mapping[str, Any], status: int, param: str | None, said: str
) -> None:
    found, _, answer = server.ask("POST", "/v1/embeddings", {"model": "shipped"} | dict(fields))
    assert found == status
    assert said in answer["error"]["message"]
    assert param in (None, answer["error"]["param"])
    assert server.ask("POST", "/v1/embeddings", {"model": "shipped", "input": "A"})[0] == 200


def test_inputs_have_the_rank_that_was_asked_for(model: Path) -> None:
    with LLM(model, **SETTINGS, max_length=128) as llm:  # type: ignore[arg-type]
        ready, _ = read_embeddings(llm.reader, EmbeddingsRequest(model="shipped", input=TEXTS, priority=7))
    assert [one.priority for one in ready] == [7, 7, 7]


def test_a_model_that_makes_none_says_so_without_paths() -> None:
    with LLM(**SETTINGS, max_length=128) as llm:  # type: ignore[arg-type]
        asked = EmbeddingsRequest(model="shipped", input="A")
        with pytest.raises(FieldError, match="made for that") as refused:
            read_embeddings(llm.reader, asked)
    assert refused.value.param == "model"
    assert "/" not in str(refused.value)
