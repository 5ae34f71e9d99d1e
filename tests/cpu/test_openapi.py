"""/openapi.json says what the server does: every route is in it, and every answer is as it says."""

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from jsonschema import Draft202012Validator

from penstock.api.llm import SHIPPED_MODEL
from penstock.server.http.app import application
from penstock.server.http.openapi import OPERATIONS, RANGES, described
from penstock.server.http.state import ServerSettings, ServerState
from penstock.server.wire.decoding import FieldError
from penstock.server.wire.requests import ChatRequest, CompletionRequest
from servers import FLAGS, ROOM, STORY, TALK, Server, Stream, serving, until

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
Json = Mapping[str, Any]
SHORT = {"model": "shipped", "max_tokens": 3}
PLACE = {
    "type": "object",
    "properties": {"at": {"enum": ["sea"]}},
    "required": ["at"],
    "additionalProperties": False,
}
CALL = {
    "parallel_tool_calls": False,
    "tools": [{"type": "function", "function": {"name": "look", "parameters": PLACE}}],
    "tool_choice": "required",
    "max_tokens": 40,
}
DETAILS = {"prompt_logprobs": 1, "return_token_ids": True}
OLLAMA = {"model": "shipped", "stream": False, "options": {"num_predict": 3}}
TEMPLATE = """{% if tools %}<|user|>{{ tools[0].function.name }} in a <tool_call><|end|>{% endif %}"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Whatever is asked of it, its answers are short. Its model is the shipped one, with a template that
    takes tools."""
    folder = tmp_path_factory.mktemp("server")
    model = folder / "model"
    model.mkdir()
    for file in SHIPPED_MODEL.iterdir():
        shutil.copy(file, model / file.name)
    settings = json.loads((SHIPPED_MODEL / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").unlink()
    (model / "tokenizer_config.json").write_text(
        json.dumps(settings | {"chat_template": TEMPLATE + settings["chat_template"]})
    )
    flags = ("--port", "0", "--name", "shipped", *FLAGS, "--max-length", "128", "--max-body", "100000")
    with serving(folder, str(model), *flags) as server:
        yield server.wait()
        assert "Traceback" not in server.said()


@pytest.fixture(scope="module")
def document(server: Server) -> Json:
    status, headers, said = server.ask("GET", "/openapi.json")
    assert (status, headers["content-type"]) == (200, "application/json")
    assert said == json.loads(described(keys=False))
    return said  # type: ignore[no-any-return]


def test_every_route_is_described_and_nothing_else() -> None:
    app: Any = application(ServerState(ServerSettings(("mine",))))
    there = {
        (route.path.replace(":path}", "}"), method.lower())
        for route in app._app._app._app.routes
        for method in route.methods - {"HEAD"}
    }
    document = json.loads(described(keys=False))
    assert there == {(path, method) for path, methods in document["paths"].items() for method in methods}
    assert len(
        {told["operationId"] for methods in document["paths"].values() for told in methods.values()}
    ) == len(OPERATIONS)
    assert "security" not in json.dumps(document)


def test_what_a_path_does_not_take_is_refused_with_all_that_it_does(server: Server, document: Json) -> None:
    for path, methods in document["paths"].items():
        status, headers, _ = server.ask("PUT", path.replace("{name}", "a"))
        assert status == 405
        assert {one.strip().lower() for one in headers["allow"].split(",")} - {"head"} == set(methods)


def test_a_server_with_keys_says_what_needs_one() -> None:
    document = json.loads(described(keys=True))
    assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    for path, methods in document["paths"].items():
        for told in methods.values():
            is_open = path in ("/health", "/ready", "/version", "/openapi.json", "/") or path.startswith(
                "/page/"
            )
            assert told["security"] == ([] if is_open else [{"key": []}])
            assert ("401" in told["responses"]) != is_open


def test_ranges_are_those_that_are_checked() -> None:
    """At each bound a number is taken, and beyond it is not."""
    chat, text = {"model": "a", "messages": TALK, "logprobs": True}, {"model": "a", "prompt": "a"}

    def taken(name: str, value: float) -> bool:
        kind, body = (CompletionRequest, text) if name == "logprobs" else (ChatRequest, chat)
        try:
            asked = msgspec.convert(body | {name: value}, kind)
            asked.check()
            assert asked.params
        except (FieldError, msgspec.ValidationError):
            return False
        return True

    for name, within in RANGES.items():
        if name not in ChatRequest.__struct_fields__:
            continue
        whole = isinstance(within.get("maximum", 0), int) and name not in ("temperature", "top_p", "min_p")
        step = 1 if whole and "penalty" not in name else 1e-6
        for bound, sign in (("minimum", -1), ("maximum", 1)):
            if bound in within:
                assert taken(name, within[bound]), (name, bound)
                assert not taken(name, within[bound] + sign * step), (name, bound)
        if "exclusiveMinimum" in within:
            assert not taken(name, within["exclusiveMinimum"])
            assert taken(name, within["exclusiveMinimum"] + step)


# ---- what is answered


def conforms(document: Json, schema: Json, value: object) -> None:
    # Draft 2020-12 is OpenAPI 3.1's; references are into the document.
    validator = Draft202012Validator({**schema, "components": document["components"]})
    faults = sorted(validator.iter_errors(value), key=lambda fault: fault.path)
    assert not faults, (value, [fault.message[:500] for fault in faults])


def answer_of(document: Json, method: str, path: str, status: int) -> Json:
    responses = document["paths"][path][method.lower()]["responses"]
    assert str(status) in responses, f"{method} {path} answers {status}, which is not described"
    return responses[str(status)]  # type: ignore[no-any-return]


ASKED: list[tuple[str, str, str, Any, int]] = [
    ("GET", "/health", "/health", None, 200),
    ("GET", "/ready", "/ready", None, 200),
    ("GET", "/state", "/state", None, 200),
    ("GET", "/experts", "/experts", None, 200),
    ("GET", "/metrics", "/metrics", None, 200),
    ("GET", "/", "/", None, 200),
    ("GET", "/page/icon.svg", "/page/icon.svg", None, 200),
    ("GET", "/v1/models", "/v1/models", None, 200),
    ("GET", "/v1/models/{name}", "/v1/models/shipped", None, 200),
    ("GET", "/v1/models/{name}", "/v1/models/a/b", None, 404),
    ("POST", CHAT, CHAT, SHORT | {"messages": TALK, "n": 2}, 200),
    ("POST", CHAT, CHAT, SHORT | {"messages": TALK, "logprobs": True, "top_logprobs": 2}, 200),
    ("POST", CHAT, CHAT, SHORT | CALL | {"messages": TALK}, 200),
    ("POST", CHAT, CHAT, SHORT | {"messages": [{"role": "user", "content": [{"text": "a"}]}]}, 400),
    ("POST", CHAT, CHAT, SHORT | {"messages": TALK, "model": "other"}, 404),
    ("POST", CHAT, CHAT, {"messages": [{"role": "user", "content": "a" * 200_000}]}, 413),
    ("POST", TEXT, TEXT, SHORT | {"prompt": [STORY, [5, 6]], "logprobs": 2, "n": 2}, 200),
    ("POST", CHAT, CHAT, SHORT | DETAILS | {"messages": TALK}, 200),
    ("POST", TEXT, TEXT, SHORT | DETAILS | {"prompt": STORY, "logprobs": 2, "echo": True}, 200),
    ("POST", TEXT, TEXT, SHORT | {"prompt": [5] * 200}, 400),
    ("POST", TEXT, TEXT, b"[", 400),
    ("POST", RESPONSES, RESPONSES, {"model": "shipped", "input": "Hello", "max_output_tokens": 3}, 200),
    (
        "POST",
        RESPONSES,
        RESPONSES,
        {"model": "shipped", "input": "Hello", "previous_response_id": "resp_none"},
        404,
    ),
    ("GET", "/v1/responses/{name}", "/v1/responses/resp_none", None, 404),
    ("GET", "/v1/responses/{name}", "/v1/responses/resp_none?stream=true", None, 400),
    ("DELETE", "/v1/responses/{name}", "/v1/responses/resp_none", None, 404),
    ("POST", MESSAGES, MESSAGES, SHORT | {"messages": TALK}, 200),
    ("POST", MESSAGES, MESSAGES, SHORT | {"messages": [{"role": "tool", "content": "a"}]}, 400),
    ("POST", MESSAGES, MESSAGES, SHORT | {"messages": TALK, "model": "other"}, 404),
    ("POST", COUNT, COUNT, {"model": "shipped", "messages": TALK}, 200),
    ("POST", COUNT, COUNT, {"model": "shipped"}, 400),
    ("POST", "/api/chat", "/api/chat", OLLAMA | {"messages": TALK, "logprobs": True}, 200),
    ("POST", "/api/chat", "/api/chat", OLLAMA | {"messages": TALK, "format": "xml"}, 400),
    ("POST", "/api/chat", "/api/chat", OLLAMA, 200),
    ("POST", "/api/generate", "/api/generate", OLLAMA | {"prompt": STORY}, 200),
    ("POST", "/api/generate", "/api/generate", OLLAMA | {"model": "other"}, 404),
    ("GET", "/api/tags", "/api/tags", None, 200),
    ("GET", "/api/ps", "/api/ps", None, 200),
    ("GET", "/api/version", "/api/version", None, 200),
    ("POST", "/api/show", "/api/show", {"model": "shipped:latest"}, 200),
    ("POST", "/api/show", "/api/show", {}, 404),
    ("GET", "/version", "/version", None, 200),
    ("POST", "/score", "/score", {"model": "shipped", "text_1": "A", "text_2": "B"}, 400),
    ("POST", "/v1/rerank", "/v1/rerank", {"model": "shipped", "query": "A", "documents": []}, 400),
    ("POST", "/reset_prefix_cache", "/reset_prefix_cache", None, 200),
    ("POST", LOAD, LOAD, {"lora_name": "a", "lora_path": "/nowhere"}, 403),
    ("POST", LOAD, LOAD, {"lora_name": "a"}, 400),
    ("POST", UNLOAD, UNLOAD, {"lora_name": "a"}, 403),
    ("POST", "/sleep", "/sleep?level=3", None, 400),
    ("POST", "/sleep", "/sleep", None, 200),
    ("GET", "/is_sleeping", "/is_sleeping", None, 200),
    ("POST", TEXT, TEXT, SHORT | {"prompt": STORY}, 503),
    ("POST", "/wake_up", "/wake_up", None, 200),
    ("POST", "/tokenize", "/tokenize", {"prompt": STORY, "return_token_strs": True}, 200),
    ("POST", "/tokenize", "/tokenize", {"messages": TALK}, 200),
    ("POST", "/tokenize", "/tokenize", {}, 400),
    ("POST", "/detokenize", "/detokenize", {"tokens": [5, 6]}, 200),
    ("POST", "/detokenize", "/detokenize", {"tokens": [5000]}, 400),
]


@pytest.mark.parametrize(
    ("method", "path", "place", "body", "status"), ASKED, ids=[str(number) for number in range(len(ASKED))]
)
def test_an_answer_is_as_it_is_described(
    server: Server, document: Json, method: str, path: str, place: str, body: Any, status: int
) -> None:
    found, headers, said = server.ask(method, place, body)
    assert found == status, said
    [(kind, content)] = [
        (kind, content)
        for kind, content in answer_of(document, method, path, status)["content"].items()
        if kind == headers["content-type"].partition(";")[0]
    ]
    if kind == "application/json":
        conforms(document, content["schema"], said)
    assert (
        not (isinstance(body, dict) and "tools" in body)
        or said["choices"][0]["finish_reason"] == "tool_calls"
    )


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            CHAT,
            SHORT
            | {
                "messages": TALK,
                "n": 2,
                "logprobs": True,
                "top_logprobs": 1,
                "stream_options": {"include_usage": True},
            },
        ),
        (CHAT, SHORT | CALL | {"messages": TALK}),
        (
            TEXT,
            SHORT
            | {
                "prompt": [STORY, "The sea"],
                "logprobs": 1,
                "echo": False,
                "stream_options": {"include_usage": True},
            },
        ),
        (RESPONSES, {"model": "shipped", "input": "Hello", "max_output_tokens": 5, "temperature": 0}),
        (MESSAGES, SHORT | {"messages": TALK}),
        (CHAT, SHORT | {"messages": TALK, "return_token_ids": True}),
        (TEXT, SHORT | {"prompt": STORY, "return_token_ids": True}),
    ],
)
def test_events_are_as_they_are_described(server: Server, document: Json, path: str, body: Json) -> None:
    data = answer_of(document, "POST", path, 200)["content"]["text/event-stream"]["schema"]["properties"][
        "data"
    ]
    schema = data["anyOf"][0]["contentSchema"]
    with Stream(server, {**body, "stream": True}, path) as stream:
        assert stream.status == 200
        events = stream.events()
    assert events
    for event in events:
        conforms(document, schema, event)
    assert "tools" not in body or events[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("path", "asked"), [("/api/chat", {"messages": TALK}), ("/api/generate", {"prompt": STORY})]
)
def test_lines_are_as_they_are_described(server: Server, document: Json, path: str, asked: Json) -> None:
    status, headers, said = server.ask("POST", path, OLLAMA | asked | {"stream": True})
    [(kind, content)] = [
        (kind, content)
        for kind, content in answer_of(document, "POST", path, status)["content"].items()
        if kind == headers["content-type"]
    ]
    assert kind == "application/x-ndjson"
    lines = said.splitlines()
    assert 2 <= len(lines) <= 4, "tokens that come at once share a line"
    for line in lines:
        conforms(document, content["schema"], json.loads(line))


def test_a_path_without_its_version_is_named_with_it(server: Server) -> None:
    status, _, said = server.ask("POST", "/chat/completions", {})
    assert status == 404
    assert "nothing at /chat/completions; did you mean /v1/chat/completions?" in json.dumps(said)
    assert "did you mean" not in json.dumps(server.ask("POST", "/chat/completion", {})[2])


def test_a_response_that_is_kept_is_as_it_is_described(server: Server, document: Json) -> None:
    _, _, first = server.ask(
        "POST", RESPONSES, {"model": "shipped", "input": "Hello", "max_output_tokens": 3}
    )
    for method, kind in (("GET", "Response"), ("DELETE", "DeletedResponse")):
        status, _, said = server.ask(method, f"{RESPONSES}/{first['id']}")
        assert status == 200
        conforms(document, {"$ref": f"#/components/schemas/{kind}"}, said)


def test_a_refusal_for_want_of_room_is_as_it_is_described(server: Server, document: Json) -> None:
    everything = {"model": "shipped", "prompt": STORY, "n": ROOM, "ignore_eos": True, "stream": True}

    def refused() -> bool:
        with Stream(server, everything):
            status, headers, said = server.complete()
        if status != 429:
            return False
        told = answer_of(document, "POST", TEXT, status)
        conforms(document, told["content"]["application/json"]["schema"], said)
        conforms(document, told["headers"]["Retry-After"]["schema"], int(headers["retry-after"]))
        return True

    until(refused)


def narrowed(document: Json, model: str) -> Json:
    """With the model's name, so that most requests get to it, and without a deadline, which is a 504 where it
    is short."""
    copy = json.loads(json.dumps(document))
    for name, schema in copy["components"]["schemas"].items():
        fields = schema.get("properties", {})
        if name.endswith("Request") and "timeout" in fields:
            fields["model"] = {"enum": [model]}
            del fields["timeout"]
    return copy  # type: ignore[no-any-return]


@pytest.mark.skipif(
    importlib.util.find_spec("schemathesis") is None, reason="needs schemathesis: pip install schemathesis"
)
def test_generated_requests_are_answered_as_described(server: Server, document: Json, tmp_path: Path) -> None:
    (tmp_path / "openapi.json").write_text(json.dumps(narrowed(document, server.name)))
    command = [
        str(Path(sys.executable).with_name("st")),
        "run",
        "openapi.json",
        "--url",
        server.url,
        "--generation-deterministic",
    ]
    # What a schema cannot say, such as which fields go together, is refused all the same.
    command += [
        "--phases",
        "fuzzing",
        "--max-examples",
        "3",
        "--include-method",
        "POST",
        "--exclude-checks",
        "positive_data_acceptance",
        "--exclude-path",  # Behind which the others would be refused.
        "/sleep",
        "--exclude-path",
        "/wake_up",
    ]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout[-4000:]
    assert "18 passed" in found.stdout
