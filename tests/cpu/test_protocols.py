"""Anthropic's /v1/messages and ollama's /api, as their own clients use them, with a checkpoint that is made
to say what it is asked for."""

import asyncio
import json
import re
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from pydantic import BaseModel

if find_spec("anthropic") is None:  # Importing it takes as long as the tests.
    pytest.skip("needs the client that the server is for: anthropic", allow_module_level=True)
ollama = pytest.importorskip("ollama", reason="needs the client that the server is for")

from penstock.api.outputs import Delta  # noqa: E402
from penstock.server.answers import messages  # noqa: E402
from penstock.server.broker.calls import Call  # noqa: E402
from penstock.server.parsing.output_parser import OutputParser  # noqa: E402
from penstock.server.wire.decoding import FieldError, decoded  # noqa: E402
from penstock.server.wire.messages import MessagesRequest  # noqa: E402
from penstock.server.wire.ollama import OllamaChatRequest, OllamaGenerateRequest  # noqa: E402
from penstock.server.wire.structured import closed  # noqa: E402
from penstock.step.request import FinishReason  # noqa: E402
from servers import FLAGS, Server, Stream, counted, serving, until  # noqa: E402
from speakers import NOW, THINK, WEATHER, called, checkpoint, saying  # noqa: E402
from streams import LONG  # noqa: E402

MESSAGES, SITE = "/v1/messages", "https://chat.example.org"
LENGTH = 512
HELLO = "How will it be in Köln?"
TALK: list[Any] = [{"role": "user", "content": HELLO}]
FUNCTIONS: list[Any] = [{"type": "function", "function": one} for one in (WEATHER, NOW)]
TOOLS: list[Any] = [
    {"name": "weather", "description": WEATHER["description"], "input_schema": WEATHER["parameters"]},
    {"name": "now", "input_schema": {"type": "object", "properties": {}}},
]
ARGUMENTS = {"city": "Köln", "days": 2}
SAID = (THINK, "Hm.</think>\n\nLet me see.\n", *called("weather", **ARGUMENTS), "\n", *called("now"))
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [7]}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = checkpoint(tmp_path_factory.mktemp("models") / "speaker")
    site = "HTTPS://Chat.Example.org:443"  # A browser would write SITE.
    more = ("--port", "0", "--max-length", str(LENGTH), "--max-body", "100000", "--allow-origin", site)
    with serving(tmp_path_factory.mktemp("server"), str(model), *FLAGS, *more) as server:
        yield server.wait()
        server.signal(signal.SIGTERM)
        assert server.ended() == 0
        assert "Traceback" not in server.said()


@pytest.fixture(scope="module")
def claude(server: Server) -> Iterator[Any]:
    from anthropic import Anthropic

    with Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=LONG) as client:
        yield client


@pytest.fixture(scope="module")
def llama(server: Server) -> Iterator[Any]:
    client = ollama.Client(server.url, timeout=LONG)
    yield client
    client._client.close()


def asked(*said: str | int, **more: Any) -> dict[str, Any]:
    """What makes the model say this."""
    usual = {"model": "speaker", "messages": TALK, "max_tokens": 200}
    return usual | {"extra_body": saying(*said) if said else {"temperature": 0}} | more


def post(server: Server, path: str, *said: str | int, **body: Any) -> tuple[int, Any, Any]:
    return server.ask("POST", path, {"model": "speaker", **(saying(*said) if said else {}), **body})


def tokens_of(server: Server, talk: list[Any], **more: Any) -> int:
    status, _, answer = server.ask("POST", "/tokenize", {"messages": talk, **more})
    assert status == 200, answer
    return int(answer["count"])


def lines(said: bytes) -> list[Any]:
    return [json.loads(line) for line in said.splitlines()]


# ---- Anthropic


def test_a_message_has_thoughts_text_and_calls_whole_and_streamed(claude: Any) -> None:
    request = asked(*SAID, tools=TOOLS, thinking={"type": "enabled", "budget_tokens": 1024})
    whole = claude.messages.create(**request)
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
    thought, text, first, second = whole.content
    assert (thought.thinking, text.text) == ("Hm.", "Let me see.")
    assert thought.signature  # Without it clients send no thoughts back.
    assert (first.name, first.input, second.name, second.input) == ("weather", ARGUMENTS, "now", {})
    assert (whole.role, whole.stop_reason, whole.stop_sequence) == ("assistant", "tool_use", None)
    with claude.messages.stream(**request) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    plain = [
        {key: value for key, value in block if key not in ("id", "signature", "parsed_output")}
        for block in whole.content
    ]
    assert plain == [
        {key: value for key, value in block if key not in ("id", "signature", "parsed_output")}
        for block in streamed.content
    ]
    assert (streamed.stop_reason, streamed.usage.output_tokens) == ("tool_use", whole.usage.output_tokens)
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert [kinds.count(f"content_block_{what}") for what in ("start", "stop")] == [4, 4]
    assert kinds.count("input_json") > 4  # Piece by piece.
    # What was computed of the prompt is found, and is no input then.
    used = streamed.usage
    assert used.cache_read_input_tokens >= 64
    assert (
        used.input_tokens + used.cache_read_input_tokens
        == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    )


def test_thoughts_that_were_not_asked_for_are_not_told(claude: Any) -> None:
    for more in (
        {},
        {"thinking": {"type": "disabled"}},
        {"thinking": {"type": "adaptive", "display": "omitted"}},
    ):
        assert [
            block.type for block in claude.messages.create(**asked(THINK, "Hm.</think>Yes.", **more)).content
        ] == ["text"]


def test_events_are_server_sent_ones_with_a_ping(server: Server) -> None:
    _, headers, said = post(server, MESSAGES, "So.", messages=TALK, max_tokens=9, stream=True)
    assert headers["content-type"].startswith("text/event-stream")
    assert headers["request-id"] == headers["x-request-id"]
    names = [line.removeprefix(b"event: ") for line in said.splitlines() if line.startswith(b"event: ")]
    kinds = [json.loads(line[6:])["type"] for line in said.splitlines() if line.startswith(b"data: ")]
    assert [name.decode() for name in names] == kinds
    assert kinds[:2] == ["message_start", "ping"]


def test_a_conversation_is_read_as_the_same_one_of_the_chats_is(server: Server, claude: Any) -> None:
    calls = [{"id": "toolu_1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}]
    chat = [
        {"role": "system", "content": "Be brief.\n\nBe kind."},
        {"role": "user", "content": f"{HELLO}\n\nNow."},
        {"role": "assistant", "content": "Let me see.", "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "Rain.\n\nCold."},
        {"role": "user", "content": "And then?"},
    ]
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "a"}
    use = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": ARGUMENTS}
    result = [{"type": "text", "text": "Rain."}, {"type": "text", "text": "Cold."}]
    turns = [
        {
            "role": "user",
            "content": [{"type": "text", "text": HELLO, "cache_control": {"type": "ephemeral"}}],
        },
        {"role": "user", "content": "Now."},
        {"role": "assistant", "content": [thought, {"type": "text", "text": "Let me see."}, use]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": result},
                {"type": "text", "text": "And then?"},
            ],
        },
    ]
    system = [
        {"type": "text", "text": text} for text in ("x-anthropic-billing-header: a", "Be brief.", "Be kind.")
    ]
    counted = claude.messages.count_tokens(model="speaker", messages=turns, system=system, tools=TOOLS)
    expected = tokens_of(server, chat, tools=FUNCTIONS)
    assert counted.input_tokens == expected
    answer = claude.messages.create(**asked("So.", messages=turns, system=system, tools=TOOLS))
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == expected


def test_an_answer_goes_on_with_what_the_assistant_has_begun(server: Server, claude: Any) -> None:
    begun = [*TALK, {"role": "assistant", "content": "Once upon a "}]
    prompt = f"<s>[user] {HELLO}<|end|>[assistant] Once upon a "
    _, _, text = server.ask(
        "POST",
        "/v1/completions",
        {"model": "speaker", "prompt": prompt.removeprefix("<s>"), "temperature": 0, "max_tokens": 6},
    )
    answer = claude.messages.create(**asked(messages=begun, max_tokens=6))
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == text["usage"]["prompt_tokens"]
    assert answer.content[0].text == text["choices"][0]["text"]
    _, _, chat = post(
        server,
        "/v1/chat/completions",
        messages=begun,
        continue_final_message=True,
        temperature=0,
        max_tokens=6,
    )
    assert chat["choices"][0]["message"]["content"] == answer.content[0].text


def test_why_a_message_has_ended_is_told(claude: Any) -> None:
    def end(*said: str, **more: Any) -> tuple[str, str | None]:
        answer = claude.messages.create(**asked(*said, **more))
        return answer.stop_reason, answer.stop_sequence

    assert end("So it is.") == ("end_turn", None)
    assert end("So it is.", max_tokens=2) == ("max_tokens", None)
    assert end("So it is.", stop_sequences=["never", "is"]) == ("stop_sequence", "is")
    long = [{"role": "user", "content": HELLO * 40}]
    assert end(messages=long, max_tokens=LENGTH) == ("model_context_window_exceeded", None)


@pytest.mark.parametrize(
    ("cut", "why"),
    [({"max_tokens": 24}, "max_tokens"), ({"stop_sequences": ["weather"]}, "stop_sequence")],
)
def test_nothing_of_a_call_that_is_cut_off_is_text(claude: Any, cut: dict[str, Any], why: str) -> None:
    request = asked("So.\n", *called("weather", **ARGUMENTS), tools=TOOLS, **cut)
    answer = claude.messages.create(**request)
    assert ([(one.type, one.text) for one in answer.content], answer.stop_reason) == ([("text", "So.")], why)
    with claude.messages.stream(**request) as stream:
        streamed = stream.get_final_message()
    assert "".join(one.text for one in streamed.content if one.type == "text") == "So."
    assert streamed.stop_reason == why
    empty = claude.messages.create(**asked(*called("now"), tools=TOOLS, max_tokens=3))
    assert (empty.content, empty.stop_reason) == ([], "max_tokens")


def test_a_call_that_has_to_be_is_made(claude: Any) -> None:
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "now"}):
        with claude.messages.stream(**asked(tools=TOOLS[1:], tool_choice=choice, max_tokens=60)) as stream:
            answer = stream.get_final_message()
        assert [block.name for block in answer.content] == ["now"]
        assert answer.stop_reason == "tool_use"


def test_an_answer_keeps_to_a_schema_at_once_and_is_compact(claude: Any) -> None:
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    request = asked(output_config=form, tools=TOOLS, tool_choice={"type": "none"})
    [block] = claude.messages.create(**request).content
    assert block.text == '{"a":7}'


USE = {"type": "tool_use", "id": "a", "name": "b", "input": {}}
REFUSED: list[tuple[str, dict[str, Any], int, str, str]] = [
    (MESSAGES, {"model": "other"}, 404, "not_found_error", "'other'"),
    (MESSAGES, {"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
    (MESSAGES, {"max_tokens": 0}, 400, "invalid_request_error", "max_tokens 0"),
    (MESSAGES, {"messages": []}, 400, "invalid_request_error", "messages"),
    (MESSAGES, {"messages": [{"role": "bot", "content": "a"}]}, 400, "invalid_request_error", "'bot'"),
    (
        MESSAGES,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}]},
        400,
        "invalid_request_error",
        r"messages\[0\].content\[1\] is of type 'image'",
    ),
    (
        MESSAGES,
        {"messages": [{"role": "user", "content": [USE]}]},
        400,
        "invalid_request_error",
        "reads text and tool_result there",
    ),
    (
        MESSAGES,
        {"messages": [*TALK, {"role": "assistant", "content": [USE]}]},
        400,
        "invalid_request_error",
        "end with a tool_use; send its tool_result",
    ),
    (
        MESSAGES,
        {"tools": [{"type": "web_search_20250305", "name": "a"}]},
        400,
        "invalid_request_error",
        "type custom",
    ),
    (
        MESSAGES,
        {"tools": TOOLS, "tool_choice": {"type": "tool"}},
        400,
        "invalid_request_error",
        "name of a tool",
    ),
    (MESSAGES, {"mcp_servers": [{}]}, 400, "invalid_request_error", "mcp_servers"),
    (MESSAGES, {"temperature": 9}, 400, "invalid_request_error", "temperature 9"),
    (MESSAGES, {"stop_sequences": [""]}, 400, "invalid_request_error", "stop_sequences"),
    (MESSAGES, {"nonsense": 1}, 400, "invalid_request_error", "nonsense"),
    (
        MESSAGES,
        {"messages": [{"role": "user", "content": "a" * 200_000}]},
        413,
        "request_too_large",
        "--max-body",
    ),
    (
        MESSAGES,
        {"messages": [{"role": "user", "content": "a b" * 9000}]},
        400,
        "invalid_request_error",
        "tokens of prompt",
    ),
    (
        f"{MESSAGES}/count_tokens",
        {"system": [{"type": "image"}]},
        400,
        "invalid_request_error",
        r"system\[0\]",
    ),
    (f"{MESSAGES}/batches", {}, 404, "not_found_error", "nothing at /v1/messages/batches"),
]


@pytest.mark.parametrize(
    ("path", "more", "status", "kind", "said"), REFUSED, ids=[str(number) for number in range(len(REFUSED))]
)
def test_what_is_no_message_is_refused_as_anthropics_clients_know_it(
    server: Server, path: str, more: Any, status: int, kind: str, said: str
) -> None:
    body = {"messages": TALK, "max_tokens": 9 if path == MESSAGES else None} | more
    found, _, answer = post(server, path, **{key: value for key, value in body.items() if value is not None})
    assert found == status, answer
    assert answer.keys() == {"type", "error", "request_id"}
    assert (answer["type"], answer["error"]["type"]) == ("error", kind)
    assert len(answer["error"]["message"]) < 400
    assert re.search(said, answer["error"]["message"]), answer


def test_anthropics_client_raises_what_it_is_told(claude: Any) -> None:
    from anthropic import NotFoundError

    with pytest.raises(NotFoundError, match="'other'") as missing:
        claude.messages.create(**asked(model="other"))
    assert missing.value.type == "not_found_error"
    assert missing.value.request_id.startswith("req-")


def test_a_client_that_goes_leaves_nothing(server: Server) -> None:
    long = {"structured_outputs": {"regex": "a{400}"}, "stream": True}
    body = long | {"model": "speaker", "messages": TALK}
    requests = [
        (MESSAGES, body | {"max_tokens": 400}),
        ("/api/chat", body),
        ("/api/generate", body | {"prompt": HELLO}),
    ]
    for path, body in requests:
        with Stream(server, body, path) as stream:
            assert stream.status == 200
            assert stream._answer.readline()
    until(lambda: counted(server)["num_requests_running",] == 0)
    assert counted(server)["request_abandoned_total",] >= 3


def test_a_stream_that_is_silent_has_pings_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces come at all moments between pings: before, behind, and in the very turn of the loop."""
    monkeypatch.setattr(messages, "PING_SECONDS", 0.01)
    texts = [f"{number} " for number in range(40)]

    async def told() -> list[Any]:
        call = Call(lambda _: None, None)  # type: ignore[arg-type]
        request = decoded(
            json.dumps({"model": "a", "max_tokens": 99, "messages": TALK, "stream": True}).encode(),
            MessagesRequest,
        )

        class Ready:
            tokens = (1, 2)

        stream = messages.MessageStream(request, Ready(), OutputParser())  # type: ignore[arg-type]
        monkeypatch.setattr(stream, "_end", lambda _: None)
        monkeypatch.setattr(call, "so_far", lambda: None)

        async def speak() -> None:
            for number, text in enumerate(texts):
                await asyncio.sleep((0.0, 0.0099, 0.01, 0.0101, 0.025)[number % 5])
                call.deliver([Delta(text, (number,))], False, None)
            call.deliver([Delta("", (), FinishReason.STOP)], True, None)

        speaking = asyncio.ensure_future(speak())
        events = b"".join([event async for event in stream.events(call)])
        await speaking
        return [json.loads(line[6:]) for line in events.splitlines() if line.startswith(b"data: ")]

    events = asyncio.run(told())
    assert sum(event["type"] == "ping" for event in events) > 5
    assert "".join(
        event["delta"]["text"] for event in events if event["type"] == "content_block_delta"
    ) == "".join(texts)


# ---- ollama


def test_a_chat_of_ollama_is_that_of_the_chats_whole_and_streamed(server: Server, llama: Any) -> None:
    options = {"temperature": 0, "num_predict": 8, "seed": 1, "num_gpu": 1}
    _, _, chat = post(server, "/v1/chat/completions", messages=TALK, temperature=0, max_tokens=8)
    expected = chat["choices"][0]["message"]["content"]
    whole = llama.chat("speaker", TALK, options=options, logprobs=True, top_logprobs=2)
    assert (whole.message.content, whole.done, whole.done_reason) == (expected, True, "length")
    assert (whole.eval_count, whole.prompt_eval_count) == (8, tokens_of(server, TALK))
    assert [len(one.top_logprobs) for one in whole.logprobs] == [2] * 8
    assert 0 < whole.prompt_eval_duration < whole.total_duration < LONG * 1e9
    assert 0 < whole.eval_duration < whole.total_duration
    at_once = llama.chat("speaker", TALK, options=options | {"num_predict": 1})
    assert (at_once.eval_count, at_once.eval_duration > 0) == (1, True)
    pieces = list(llama.chat("speaker:latest", TALK, options=options, stream=True))
    assert "".join(piece.message.content for piece in pieces) == expected
    assert [piece.done for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert pieces[-1].eval_count == 8
    # However busy the machine is, so many tokens do not come at once.
    long = list(llama.chat("speaker", TALK, options=options | {"num_predict": 60}, stream=True))
    assert len(long) > 4


def test_thoughts_and_calls_come_apart(server: Server, llama: Any) -> None:
    body = {"messages": TALK, "tools": FUNCTIONS, "options": {}}
    _, _, whole = post(server, "/api/chat", *SAID, **body, stream=False)
    message = whole["message"]
    assert (message["thinking"], message["content"], whole["done_reason"]) == ("Hm.", "Let me see.", "stop")
    functions = [call["function"] for call in message["tool_calls"]]
    assert functions == [
        {"index": 0, "name": "weather", "arguments": ARGUMENTS},
        {"index": 1, "name": "now", "arguments": {}},
    ]
    _, headers, said = post(server, "/api/chat", *SAID, **body, keep_alive="5m")
    assert headers["content-type"] == "application/x-ndjson"
    assert headers["x-ignored-fields"] == "keep_alive"
    found = [line["message"] for line in lines(said)]
    assert "".join(one["content"] for one in found) == "Let me see."
    assert "".join(one.get("thinking", "") for one in found) == "Hm."
    assert [call["function"] for one in found for call in one.get("tool_calls", ())] == functions
    _, _, silent = post(server, "/api/chat", THINK, "Hm.</think>Yes.", **body, think=False, stream=False)
    assert "thinking" not in silent["message"]
    # A call that is cut off is none, and no text.
    _, _, broken = post(
        server,
        "/api/chat",
        "So.\n",
        *called("weather", **ARGUMENTS),
        **body | {"options": {"num_predict": 24}},
        stream=False,
    )
    assert broken["done_reason"] == "length"
    assert broken["message"] == {"role": "assistant", "content": "So."}


def test_results_of_tools_name_their_calls(server: Server) -> None:
    calls = [{"function": {"name": name, "arguments": ARGUMENTS}} for name in ("now", "weather")]
    talk = [
        *TALK,
        {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_name": "weather", "content": "Rain."},
        {"role": "tool", "content": "Noon."},
    ]
    named = [{"id": f"call_1_{at}", "type": "function", **call} for at, call in enumerate(calls)]
    same = [
        *TALK,
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": named},
        {"role": "tool", "tool_call_id": "call_1_1", "content": "Rain."},
        {"role": "tool", "tool_call_id": "call_1_0", "content": "Noon."},
    ]
    body = {"messages": talk, "tools": FUNCTIONS, "stream": False, "options": {"num_predict": 1}}
    assert post(server, "/api/chat", **body)[2]["prompt_eval_count"] == tokens_of(
        server, same, tools=FUNCTIONS
    )
    request = decoded(json.dumps({"model": "a", "messages": talk}).encode(), OllamaChatRequest).request()
    assert [one.tool_call_id for one in request.messages[2:]] == ["call_1_1", "call_1_0"]  # type: ignore[union-attr]


def test_a_text_is_answered_or_raw_and_continued(server: Server, llama: Any) -> None:
    options = {"temperature": 0, "num_predict": 6}
    _, _, text = post(server, "/v1/completions", prompt="Once upon", temperature=0, max_tokens=6)
    raw = llama.generate("speaker", "Once upon", raw=True, options=options, logprobs=True)
    assert (raw.response, raw.eval_count, len(raw.logprobs)) == (text["choices"][0]["text"], 6, 6)
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Once upon"}]
    answer = llama.generate("speaker", "Once upon", system="Be brief.", options=options)
    assert answer.prompt_eval_count == tokens_of(server, said)
    assert answer.response == llama.chat("speaker", said, options=options).message.content
    pieces = list(llama.generate("speaker", "Once upon", raw=True, options=options, stream=True))
    assert "".join(piece.response for piece in pieces) == raw.response
    assert (
        llama.generate("speaker", "Once upon", raw=True, options={"num_predict": -1, "num_ctx": 9}).eval_count
        <= 9
    )


def test_options_hold(server: Server, llama: Any) -> None:
    prompt = tokens_of(server, TALK)
    short = llama.chat("speaker", TALK, options={"temperature": 0, "num_ctx": prompt + 3})
    assert (short.eval_count, short.done_reason) == (3, "length")
    with pytest.raises(ollama.ResponseError, match="num_ctx is 2"):
        llama.chat("speaker", TALK, options={"num_ctx": 2})
    stopped = post(server, "/api/chat", "So it is.", messages=TALK, stream=False, options={"stop": ["it"]})[2]
    assert (stopped["message"]["content"], stopped["done_reason"]) == ("So ", "stop")
    whole = llama.chat(
        "speaker", TALK, options={"num_predict": 100_000, "temperature": 0, "num_ctx": prompt + 2}
    )
    assert whole.eval_count == 2


class Part(BaseModel):
    kind: Literal["new"]
    count: Literal[1, 2] = 1


class Whole(BaseModel):
    """As programs give ollama the form of an answer."""

    name: Literal["Köln"]
    parts: tuple[Part, Part]


def test_a_format_is_the_form_of_the_answer(llama: Any) -> None:
    """Of chats and texts, whole and streamed, and of raw prompts from their first token on. Objects have what
    the schema names and no more, as ollama has it."""
    form, system = Whole.model_json_schema(), {"role": "system", "content": "Be brief."}
    for seed in range(6):
        options = {"temperature": 2, "seed": seed, "num_predict": 100}
        asked = {"format": form, "options": options, "think": False}
        said = llama.chat("speaker", [system, *TALK], **asked)
        assert said.done_reason == "stop"
        Whole.model_validate_json(said.message.content)
        assert json.loads(said.message.content).keys() == {"name", "parts"}
        pieces = [one.message.content for one in llama.chat("speaker", [system, *TALK], stream=True, **asked)]
        assert "".join(pieces) == said.message.content
        for how in ({"think": False}, {"raw": True}):
            told = llama.generate("speaker", "Once", **asked | how)
            Whole.model_validate_json(told.response)
            assert json.loads(told.response).keys() == {"name", "parts"}
            assert told.done_reason == "stop"
            streamed = llama.generate("speaker", "Once", stream=True, **asked | how)
            assert "".join(one.response for one in streamed) == told.response


def test_json_is_an_object(llama: Any) -> None:
    for seed in range(4):
        options = {"temperature": 1, "seed": seed, "num_predict": 40}
        asked = {"format": "json", "options": options, "think": False}
        for said in (
            llama.chat("speaker", TALK, **asked).message.content,
            llama.generate("speaker", "Once", **asked).response,
            llama.generate("speaker", "Once", raw=True, **asked).response,
        ):
            assert said.startswith("{")
            assert re.match(r'\{(\}|")', said)
    plain = {"temperature": 0, "num_predict": 6}
    assert (
        llama.chat("speaker", TALK, format="", options=plain).message
        == llama.chat("speaker", TALK, options=plain).message
    )


def test_a_form_goes_before_tools_and_that_is_told(server: Server) -> None:
    body = {"messages": TALK, "tools": FUNCTIONS, "format": SCHEMA, "think": False}
    for streams in (False, True):
        status, headers, said = post(server, "/api/chat", **body, stream=streams)
        assert (status, headers["x-ignored-fields"]) == (200, "tools")
        answers = lines(said) if streams else [said]
        assert "".join(one["message"]["content"] for one in answers) == '{"a":7}'
        assert not any("tool_calls" in one["message"] for one in answers)
    _, headers, _ = post(
        server, "/api/chat", **body | {"format": ""}, stream=False, options={"num_predict": 1}
    )
    assert headers["x-ignored-fields"] is None


def test_objects_without_a_word_on_other_properties_have_none() -> None:
    inner = {"type": "object", "properties": {"b": {"items": {"properties": {}}}}}
    shut = {
        "type": "object",
        "properties": {"b": {"items": {"properties": {}, "additionalProperties": False}}},
        "additionalProperties": False,
    }
    for name in ("items", "additionalProperties"):
        assert closed({name: inner}) == {name: shut}
    for name in ("anyOf", "oneOf", "prefixItems"):
        assert closed({name: [True, inner]}) == {name: [True, shut]}
    assert closed({"allOf": [inner]}) == {"allOf": [shut]}
    for name in ("$defs", "definitions"):
        assert closed({"$ref": f"#/{name}/a", name: {"a": inner}}) == {
            "$ref": f"#/{name}/a",
            name: {"a": shut},
        }
    same: list[dict[str, Any]] = [
        {},
        {"type": "object"},
        {"properties": {"a": {}}, "additionalProperties": True},
        {"properties": {"a": {}}, "required": ["b"]},
        {"properties": {"a": {}}, "anyOf": [{"required": ["a"]}]},
        {"allOf": [inner, {"properties": {"c": {}}}]},
        {"items": {"properties": {"a": {}}, "patternProperties": {"b": {}}}},
        {"not": inner, "enum": [{"properties": {}}], "const": {"properties": {}}},
    ]
    for schema in same:
        assert closed(schema) == schema
    deep: dict[str, Any] = inner
    for _ in range(1000):
        deep = {"anyOf": [deep]}
    assert closed(deep)["anyOf"]


def test_the_model_is_listed_and_described(server: Server, llama: Any) -> None:
    [listed], [running] = llama.list().models, llama.ps().models
    assert listed.model == running.model == "speaker"
    assert (listed.details.family, listed.details.parameter_size) == ("llama", "3.3M")
    assert listed.size == running.size > 7e6
    assert running.context_length == LENGTH
    shown = llama.show("speaker")
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert shown.modelinfo["llama.context_length"] == LENGTH
    assert "tool_call" in shown.template
    assert server.ask("GET", "/api/version")[2]["version"]
    assert post(server, "/api/chat", stream=False)[2]["done_reason"] == "load"
    assert lines(post(server, "/api/generate")[2])[-1]["done"] is True


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/api/chat", {"model": "other", "messages": TALK}, 404, "'other'"),
        ("/api/chat", {"messages": [{"role": "bot", "content": "a"}]}, 400, "'bot'"),
        ("/api/chat", {"messages": [{"role": "user", "content": "a", "images": ["YQ=="]}]}, 400, "images"),
        ("/api/chat", {"messages": TALK, "options": {"temperature": "hot"}}, 400, "temperature"),
        ("/api/chat", {"messages": TALK, "options": {"num_predict": 1.5}}, 400, "num_predict"),
        ("/api/chat", {"messages": TALK, "options": {"mirostat": 2}}, 400, "mirostat"),
        (
            "/api/chat",
            {"messages": TALK, "options": {"repeat_penalty": 2, "repeat_last_n": 3}},
            400,
            "repeat_last_n",
        ),
        ("/api/chat", {"messages": TALK, "format": "xml"}, 400, "'xml'"),
        ("/api/generate", {"prompt": "a", "format": "xml", "raw": True}, 400, "'xml'"),
        ("/api/chat", {"messages": TALK, "format": {"type": "objekt"}}, 400, "objekt"),
        ("/api/generate", {"prompt": "a", "format": {"type": "objekt"}, "raw": True}, 400, "objekt"),
        ("/api/chat", {"messages": TALK, "format": ["json"]}, 400, "format"),
        ("/api/generate", {"prompt": "a", "suffix": "b"}, 400, "suffix"),
        ("/api/generate", {"prompt": "a", "template": "b"}, 400, "template"),
        ("/api/generate", {"prompt": "a", "context": [1]}, 400, "/api/chat"),
        ("/api/generate", {"prompt": "a", "raw": True, "system": "b"}, 400, "raw"),
        ("/api/show", {"model": "other"}, 404, "'other'"),
        ("/api/pull", {}, 501, "penstock serve MODEL"),
        ("/api/embed", {"input": "a"}, 400, "no embeddings"),
        ("/api/nothing", {}, 404, "nothing at /api/nothing"),
    ],
)
def test_what_ollama_would_do_and_this_does_not_is_refused(
    server: Server, path: str, body: Any, status: int, said: str
) -> None:
    found, _, answer = post(server, path, **body)
    assert (found, answer.keys()) == (status, {"error"}), answer
    assert said in answer["error"]


def test_a_call_that_ends_with_a_timeout_of_its_own_is_no_silence() -> None:
    async def told() -> None:
        call = Call(lambda _: None, None)  # type: ignore[arg-type]
        call.deliver([], True, TimeoutError("of the device"))
        body = {"model": "a", "max_tokens": 9, "messages": TALK, "stream": True}

        class Ready:
            tokens = (1, 2)

        request = msgspec.convert(body, MessagesRequest)
        events = messages.MessageStream(request, Ready(), OutputParser()).events(call)  # type: ignore[arg-type]
        for _ in range(9):
            await anext(events)

    with pytest.raises(TimeoutError, match="of the device"):
        asyncio.run(told())


# ---- who may ask


def test_pages_of_a_site_that_is_allowed_may_use_the_server(server: Server) -> None:
    body = json.dumps({"model": "speaker", "prompt": "a", "max_tokens": 1}).encode()
    for site, allowed in ((SITE, True), ("https://other.example.org", False)):
        status, headers, _ = server.ask("POST", "/v1/completions", body, {"Origin": site})
        assert status == (200 if allowed else 403)
        assert headers.get("access-control-allow-origin") == (SITE if allowed else None)
        wishes = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
        status, headers, _ = server.ask("OPTIONS", "/api/chat", None, {"Origin": site, **wishes})
        assert (status == 200) == allowed
        assert headers.get("access-control-allow-origin") == (SITE if allowed else None)


def test_only_what_no_browser_sends_needs_no_declaration(server: Server) -> None:
    body = json.dumps(
        {"model": "speaker", "prompt": "a", "stream": False, "options": {"num_predict": 1}}
    ).encode()
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    assert server.ask("POST", "/api/generate", body, form)[0] == 200
    assert server.ask("POST", "/api/generate", body, form | {"Sec-Fetch-Site": "none"})[0] == 415
    assert server.ask("POST", "/api/generate", body, form | {"Origin": SITE})[0] == 415
    assert server.ask("POST", "/v1/completions", body, form)[0] == 415


# ---- whatever comes

_JSON = some.recursive(
    some.none() | some.booleans() | some.integers(-3, 3) | some.floats() | some.text(max_size=3),
    lambda inner: (
        some.lists(inner, max_size=2)
        | some.dictionaries(
            some.sampled_from(
                [
                    "temperature",
                    "num_ctx",
                    "num_predict",
                    "mirostat",
                    "type",
                    "text",
                    "role",
                    "content",
                    "name",
                    "input",
                    "tool_use_id",
                    "function",
                    "stop",
                    "id",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)
_BLOCK = some.fixed_dictionaries(
    {"type": some.sampled_from(["text", "thinking", "tool_use", "tool_result", "image", "a"])},
    optional=dict.fromkeys(("text", "thinking", "id", "name", "input", "tool_use_id", "content"), _JSON),
)
_TURN = some.fixed_dictionaries(
    {
        "role": some.sampled_from(["user", "assistant", "tool", "a"]),
        "content": _JSON | some.lists(_BLOCK, max_size=3),
    },
    optional=dict.fromkeys(("tool_calls", "tool_name", "images", "thinking"), _JSON),
)
_BODY = some.fixed_dictionaries(
    {"model": some.just("a"), "max_tokens": some.integers(0, 2), "messages": some.lists(_TURN, max_size=3)},
    optional=dict.fromkeys(
        [
            "system",
            "tools",
            "tool_choice",
            "thinking",
            "output_config",
            "stop_sequences",
            "metadata",
            "prompt",
            "options",
            "format",
            "think",
            "keep_alive",
            "raw",
            "suffix",
            "stream",
        ],
        _JSON,
    ),
)


@settings(max_examples=60, deadline=None)
@given(_BODY, some.sampled_from([MessagesRequest, OllamaChatRequest, OllamaGenerateRequest]))
def test_whatever_comes_is_read_or_refused(body: Any, kind: Any) -> None:
    try:
        asked = decoded(msgspec.json.encode(body), kind)
        asked.check()
        read = asked.chat() if kind is MessagesRequest else None if asked.loads else asked.request()
        assert isinstance(asked.ignored, list)
        if read is not None:
            read.check()
            assert read.params
    except FieldError:
        pass
