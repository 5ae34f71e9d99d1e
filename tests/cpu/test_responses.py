"""/v1/responses as OpenAI's client uses it, with a checkpoint that is made to write what a test is about."""

import json
import signal
from collections.abc import Iterator
from typing import Any

import pytest

openai = pytest.importorskip("openai", reason="needs the client that the server is for")

from pydantic import BaseModel  # noqa: E402

from penstock.server.answers.store import MOST, NotKeptError, ResponseStore  # noqa: E402
from penstock.server.wire.conversation import Message  # noqa: E402
from penstock.server.wire.decoding import FieldError  # noqa: E402
from penstock.server.wire.items import led, messages_of  # noqa: E402
from servers import FLAGS, Server, Stream, counted, serving, until  # noqa: E402
from speakers import NOW, THINK, WEATHER, checkpoint, saying  # noqa: E402
from streams import LONG  # noqa: E402

PATH = "/v1/responses"
ONE: dict[str, Any] = {"parallel_tool_calls": False, "reasoning": {"effort": "none"}}
"""Call, and no reasoning."""
ENDLESS = {
    "model": "speaker",
    "input": "Hi",
    "stream": True,
    "temperature": 2,
    "seed": 3,
    "max_output_tokens": 20_000,
}
HELLO = "How will it be in Köln?"
CALL = '[TOOL_CALLS]weather[ARGS]{"city":"Oslo","days":3}'
"""As a model writes it whose server was told so: not what the template says."""
TOOLS: list[Any] = [{"type": "function", **function} for function in (WEATHER, NOW)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    with serving(
        folder,
        str(checkpoint(folder / "speaker")),
        "--port",
        "0",
        "--max-kept",
        "20000",
        "--tool-parser",
        "mistral",
        *FLAGS,
    ) as server:
        yield server.wait()
        with Stream(
            server, ENDLESS, PATH
        ) as stream:  # What has begun and cannot be completed says so at its end.
            until(lambda: stream.event()["type"] == "response.output_text.delta")
            for _ in range(2):
                server.signal(signal.SIGTERM)
                until(lambda: server.ask("GET", "/ready")[0] == 503)
            last = stream.events()[-1]
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        assert "shut down" in last["response"]["error"]["message"]
        assert server.ended() == 0
        assert "Traceback" not in server.said()


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=LONG) as client:
        yield client


def asked(*said: str | int, **more: Any) -> dict[str, Any]:
    """What makes the model say this."""
    usual = {"model": "speaker", "input": HELLO, "temperature": 0, "max_output_tokens": 200}
    return usual | {"extra_body": saying(*said) if said else {}} | more


def count(server: Server, messages: list[dict[str, Any]], **more: Any) -> int:
    """Tokens of a conversation as a chat."""
    status, _, said = server.ask("POST", "/tokenize", {"messages": messages} | more)
    assert status == 200, said
    return int(said["count"])


def events(client: Any, request: dict[str, Any]) -> list[Any]:
    """Of a stream, whose numbers are checked, and that every piece belongs to what was begun and has not
    ended."""
    with client.responses.create(**request, stream=True) as stream:
        found = list(stream)
    assert [event.sequence_number for event in found] == list(range(len(found)))
    assert [event.type for event in found[:2]] == ["response.created", "response.in_progress"]
    assert found[0].response.status == "in_progress"
    open_item = None
    for event in found[2:-1]:
        if event.type == "response.output_item.added":
            assert open_item is None
            open_item = event.item.id
            assert event.item.status == "in_progress"
        elif event.type == "response.output_item.done":
            assert event.item.id == open_item
            open_item = None
        else:
            assert event.item_id == open_item
    assert open_item is None
    assert [event.item.id for event in found if event.type == "response.output_item.done"] == [
        item.id for item in found[-1].response.output
    ]
    return found


# ---- answers


def test_a_text_is_what_the_chat_says_whole_and_streamed(server: Server, client: Any) -> None:
    request = asked(instructions="Be brief.", max_output_tokens=12, metadata={"a": "b"}, user="me")
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": HELLO}]
    chat = client.chat.completions.create(model="speaker", messages=talk, temperature=0, max_tokens=12)
    whole = client.responses.create(**request)
    assert whole.output_text == chat.choices[0].message.content
    assert (whole.object, whole.model, whole.metadata, whole.instructions) == (
        "response",
        "speaker",
        {"a": "b"},
        "Be brief.",
    )
    assert whole.usage.input_tokens == chat.usage.prompt_tokens
    assert whole.usage.total_tokens == chat.usage.total_tokens
    cut = chat.choices[0].finish_reason == "length"
    assert (whole.status, whole.incomplete_details is not None) == (
        ("incomplete" if cut else "completed"),
        cut,
    )
    found = events(client, request)
    assert (
        "".join(event.delta for event in found if event.type == "response.output_text.delta")
        == whole.output_text
    )
    assert found[-1].type == f"response.{whole.status}"
    last, same = found[-1].response.to_dict(), whole.to_dict()
    own = {"id", "created_at", "completed_at", "output", "usage"}
    assert {key: last[key] for key in last if key not in own} == {
        key: same[key] for key in same if key not in own
    }
    assert last["usage"]["output_tokens"] == same["usage"]["output_tokens"]


def test_everything_that_is_said_is_an_item_in_its_order(client: Any) -> None:
    request = asked(THINK, "Hm.</think>\n\nLook.\n", CALL, "\nSo.", tools=TOOLS)
    whole = client.responses.create(**request)
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "message"]
    assert {item.status for item in whole.output} == {"completed"}
    reasoning, first, call, second = whole.output
    assert [part.text for part in reasoning.content] == ["Hm."]
    assert [item.content[0].text for item in (first, second)] == ["Look.", "So."]
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Oslo", "days": 3})
    assert 0 < whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens - 20
    found = events(client, request)
    kinds = [event.type.removeprefix("response.") for event in found[2:-1]]
    expected = [
        *[
            "output_item.added",
            "content_part.added",
            "reasoning_text.delta",
            "reasoning_text.done",
            "content_part.done",
            "output_item.done",
        ],
        *[
            "output_item.added",
            "content_part.added",
            "output_text.delta",
            "output_text.done",
            "content_part.done",
            "output_item.done",
        ],
        *[
            "output_item.added",
            "function_call_arguments.delta",
            "function_call_arguments.done",
            "output_item.done",
        ],
        *[
            "output_item.added",
            "content_part.added",
            "output_text.delta",
            "output_text.done",
            "content_part.done",
            "output_item.done",
        ],
    ]
    assert [kind for kind, before in zip(kinds, [None, *kinds], strict=False) if kind != before] == expected
    deltas = [event.delta for event in found if event.type == "response.function_call_arguments.delta"]
    assert len(deltas) > 5
    assert "".join(deltas) == call.arguments
    last = found[-1].response
    assert last.output_text == whole.output_text
    assert last.output[2].arguments == call.arguments
    with client.responses.stream(**request) as stream:
        assert [item.type for item in stream.get_final_response().output] == [
            item.type for item in whole.output
        ]


def test_what_is_cut_short_is_incomplete(client: Any) -> None:
    request = asked(CALL, tools=TOOLS, max_output_tokens=24)
    whole = client.responses.create(**request)
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    [item] = whole.output
    assert (item.type, item.status, item.name) == ("function_call", "incomplete", "weather")
    found = events(client, request)
    assert found[-1].type == "response.incomplete"
    [item] = found[-1].response.output
    assert (item.type, item.status, item.name) == ("function_call", "incomplete", "weather")


def test_log_probabilities_stand_with_their_text(client: Any) -> None:
    request = asked(
        THINK, "Hm.</think>", "Yes, so.", include=["message.output_text.logprobs"], top_logprobs=2
    )
    whole = client.responses.create(**request)
    [part] = whole.output[1].content
    assert "".join(entry.token for entry in part.logprobs).endswith(part.text)
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)
    found = events(client, request)
    streamed = [
        entry.token
        for event in found
        if event.type == "response.output_text.delta"
        for entry in event.logprobs
    ]
    assert streamed == [entry.token for entry in part.logprobs]
    assert client.responses.create(**asked("Yes.")).output[0].content[0].logprobs == []
    told = {"tools": TOOLS, "include": ["message.output_text.logprobs"]}
    for request in (
        asked(CALL, "So.", **told),
        asked("So.", CALL, **told),
    ):  # Those of a call are not a message's,
        outputs = client.responses.create(**request).output, events(client, request)[-1].response.output
        for [text] in ([item.content[0] for item in output if item.type == "message"] for output in outputs):
            assert "".join(entry.token for entry in text.logprobs) == text.text == "So."
    wrong = CALL[:-1] + "!"
    [broken] = client.responses.create(**asked(wrong, **told)).output  # but where it is none.
    assert broken.content[0].text == wrong
    assert "".join(entry.token for entry in broken.content[0].logprobs) == broken.content[0].text


FORM: dict[str, Any] = {"format": {"type": "json_schema", "name": "outlook", "schema": {"enum": [{"a": 1}]}}}


class Outlook(BaseModel):
    sunny: bool


def test_a_text_of_a_schema_is_parsed(client: Any) -> None:
    request = asked(text_format=Outlook, reasoning={"effort": "none"})
    assert isinstance(client.responses.parse(**request).output_parsed, Outlook)
    with client.responses.stream(**request) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Outlook)
    odd = asked(
        text=FORM,
        reasoning={"effort": "high"},
        temperature=2,
        extra_body={"seed": 1},
        max_output_tokens=12,
    )
    assert [item.type for item in client.responses.create(**odd).output] == ["reasoning"]
    choice = {"structured_outputs": {"choice": ["a", "b"]}}
    assert client.responses.create(**asked(reasoning={"effort": "none"}, extra_body=choice)).output_text in (
        "a",
        "b",
    )


# ---- conversations


def test_a_call_is_made_and_answered_by_name_of_the_response(server: Server, client: Any) -> None:
    choice = {"type": "function", "name": "weather"}
    first = client.responses.create(**asked(tools=TOOLS, tool_choice=choice, instructions="Call.", **ONE))
    [call] = first.output
    assert (call.type, call.name) == ("function_call", "weather")
    assert json.loads(call.arguments)["city"] in ("Köln", "Oslo")
    answer = [{"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}]
    second = client.responses.create(
        **asked("Take a coat.", input=answer, previous_response_id=first.id, tools=TOOLS)
    )
    assert (second.output_text, second.previous_response_id) == ("Take a coat.", first.id)
    function = {"name": "weather", "arguments": call.arguments}
    talk: list[dict[str, Any]] = [
        {"role": "user", "content": HELLO},
        {"role": "assistant", "tool_calls": [{"id": call.call_id, "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": call.call_id, "content": "Rain."},
    ]
    tools = [{"type": "function", "function": function} for function in (WEATHER, NOW)]
    assert second.usage.input_tokens == count(server, talk, tools=tools)
    third = client.responses.create(
        **asked("No.", input="Why?", previous_response_id=second.id, instructions="Be rude.")
    )
    talk += [{"role": "assistant", "content": "Take a coat."}, {"role": "user", "content": "Why?"}]
    assert third.usage.input_tokens == count(server, [{"role": "system", "content": "Be rude."}, *talk])
    same = client.responses.create(
        **asked(
            "No.", input=[*input_of(first), *answer, *input_of(second), {"role": "user", "content": "Why?"}]
        )
    )
    assert same.usage.input_tokens == count(server, talk)


def input_of(response: Any) -> list[Any]:
    """A response as a client that keeps conversations itself sends it back, and before the first one its own
    words."""
    own = (
        []
        if response.previous_response_id
        else [{"role": "user", "content": [{"type": "input_text", "text": HELLO}]}]
    )
    return own + [item.to_dict() for item in response.output]


def test_responses_are_kept_until_they_are_deleted_or_others_need_the_room(client: Any) -> None:
    first = client.responses.create(**asked("One."))
    assert client.responses.retrieve(first.id).to_dict() == first.to_dict()
    streamed = events(client, asked("Two.", previous_response_id=first.id))[-1].response
    assert client.responses.retrieve(streamed.id).output_text == "Two."
    client.responses.delete(first.id)
    unkept = client.responses.create(**asked("Three.", store=False))
    for name in (first.id, unkept.id, "resp_none", "x" * 5000):
        for ask in (client.responses.retrieve, client.responses.delete):
            with pytest.raises(openai.NotFoundError, match="only the newest are kept"):
                ask(name)
        with pytest.raises(openai.NotFoundError) as missing:
            client.responses.create(**asked(previous_response_id=name))
        assert (missing.value.param, missing.value.code) == ("previous_response_id", "response_not_found")
    assert client.responses.create(**asked("Four.", previous_response_id=streamed.id)).output_text == "Four."
    for _ in range(4):
        client.responses.create(**asked("Five.", metadata={f"{number}": "u" * 500 for number in range(12)}))
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(streamed.id)


def test_as_many_are_kept_as_there_is_room_for() -> None:
    talk = [Message(role="user", content="a" * 100)]
    kept = ResponseStore(1000)
    for number in range(6):
        kept.put(b"", str(number), b"b" * 200, talk)
    assert kept.answer("5", b"") == b"b" * 200
    assert json.loads(kept.conversation("4", b"", "x")) == [{"role": "user", "content": "a" * 100}]
    with pytest.raises(NotKeptError):
        kept.answer("1", b"")
    kept.put(b"", "large", b"b" * 1000, talk)
    for name in ("large", "5"):
        with pytest.raises(NotKeptError):
            kept.answer(name, b"")
    kept.put(b"", "6", b"", talk)
    kept.drop("6", b"")
    with pytest.raises(NotKeptError):
        kept.drop("6", b"")
    many = ResponseStore(1 << 30)
    for number in range(MOST + 1):
        many.put(b"", str(number), b"", talk)
    assert many.answer("1", b"") == b""
    with pytest.raises(NotKeptError):
        many.answer("0", b"")


def test_what_an_assistant_has_done_in_a_row_is_one_message() -> None:
    items: list[dict[str, Any]] = [
        {"role": "developer", "content": "Rules."},
        {"type": "message", "role": "system", "content": [{"type": "input_text", "text": "More."}]},
        {"role": "user", "content": "Hi"},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm."}],
            "encrypted_content": None,
        },
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Look.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "1", "name": "a", "arguments": "{}", "status": "completed"},
        {"type": "function_call", "call_id": "2", "name": "b", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "x"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "y"}]},
        {"role": "assistant", "content": "Then."},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    ]
    *_, first, a, b, last = found = messages_of(items)
    assert [message.role for message in found] == [
        "developer",
        "system",
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
    ]
    assert (first.content, first.reasoning_content) == ("Look.", "Hm.")
    assert isinstance(first.tool_calls, list)
    assert [call["function"]["name"] for call in first.tool_calls] == ["a", "b"]
    assert [(one.tool_call_id, one.content) for one in (a, b)] == [("1", "x"), ("2", "y")]
    assert last.content == "Then.\n\nNo."
    head, *rest = led(found, "First.")
    assert (head.role, head.content) == ("system", "First.\n\nRules.\n\nMore.")
    assert rest == found[2:]
    assert led(found[2:], None) == found[2:]
    before = messages_of(items[-1:], found)
    assert before[-1].content == "Then.\n\nNo.\n\nNo."
    assert found[-1].content == "Then.\n\nNo."  # Whose it was, it stays.


# ---- refusals

REFUSED: list[tuple[dict[str, Any], str | None]] = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}]}, "input"),
    ({"input": [{"role": "user", "content": [{"type": [], "text": "a"}]}]}, "input"),
    ({"input": [{"role": "user"}]}, "input"),
    ({"input": [{"type": "function_call", "name": "a", "arguments": "{}"}]}, "input"),
    ({"input": [{"type": "function_call_output", "call_id": "1", "output": 5}]}, "input"),
    ({"input": [{}]}, "input"),
    ({"instructions": ["a"]}, "instructions"),
    ({"truncation": "auto"}, "truncation"),
    ({"background": True}, "background"),
    ({"include": ["everything"]}, "include"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
    ({"metadata": {str(n): "a" for n in range(17)}}, "metadata"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools"),
    ({"tools": []}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "web_search"}}, "tool_choice"),
    ({"tools": TOOLS, "text": {"format": {"type": "json_object"}}}, "text"),
    ({"text": {"format": {"type": "image" * 1000}}}, "text"),
    ({"text": {"format": {}}}, "text"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text"),
    ({"text": {"format": {"type": "json_schema", "name": "a", "schema": 5}}}, "text"),
    ({"reasoning": {"mood": "good"}}, "mood"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    ({"stream_options": {"include_obfuscation": 5}}, "stream_options"),
]


@pytest.mark.parametrize(("more", "param"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_served_is_refused_by_name(
    server: Server, more: dict[str, Any], param: str | None
) -> None:
    status, _, said = server.ask(
        "POST", PATH, {"model": "speaker", "input": "Hi", "max_output_tokens": 2} | more
    )
    assert (status, said["error"]["param"]) == (400, param), said
    assert 10 < len(said["error"]["message"]) < 500


def test_other_models_and_ways_to_ask_are_refused(server: Server) -> None:
    assert server.ask("POST", PATH, {"model": "other", "input": "Hi"})[0] == 404
    assert server.ask("PUT", f"{PATH}/resp_1")[0] == 405
    status, _, said = server.ask("GET", f"{PATH}/resp_1?stream=true")
    assert (status, said["error"]["param"]) == (400, "stream")
    for item in ({"type": "message", "role": "user", "content": None}, {"type": 5}):
        with pytest.raises(FieldError):
            messages_of([item])


def test_a_client_that_goes_leaves_nothing_behind(server: Server) -> None:
    before = counted(server)["request_abandoned_total",]
    for _ in range(3):
        with Stream(server, ENDLESS, PATH) as stream:
            assert stream.event()["type"] == "response.created"
    until(lambda: counted(server)["request_abandoned_total",] == before + 3)


def test_a_client_that_goes_before_a_whole_answer_leaves_nothing_behind(server: Server) -> None:
    before, connection = counted(server)["request_abandoned_total",], server.connection()
    connection.request(
        "POST", PATH, json.dumps(ENDLESS | {"stream": False}), {"Content-Type": "application/json"}
    )
    until(lambda: counted(server)["num_requests_running",])
    connection.close()
    until(lambda: counted(server)["request_abandoned_total",] == before + 1)


def test_a_key_keeps_its_share_whatever_others_keep() -> None:
    """By bytes and by number; who has most makes room, also for its own."""
    kept = ResponseStore(1000)
    for number in range(5):
        kept.put(b"one", f"one {number}", b"a" * 98, [])
    for number in range(50):
        kept.put(b"two", f"two {number}", b"b" * 98, [])
        assert kept.answer("one 0", b"one") == b"a" * 98
    assert kept.answer("two 45", b"two")
    with pytest.raises(NotKeptError):
        kept.answer("two 44", b"two")
    kept.put(b"two", "large", b"b" * 999, [])
    assert kept.answer("one 0", b"one")
    for number in range(5, 9):
        kept.put(b"one", f"one {number}", b"a" * 98, [])
    assert kept.answer("one 0", b"one"), "there is room, for two has lost what is larger than its share"
    many = ResponseStore(1 << 30)
    for number in range(3):
        many.put(b"one", f"one {number}", b"", [])
    for number in range(2 * MOST):
        many.put(b"two", f"two {number}", b"", [])
    assert many.answer("one 0", b"one") == b""
    assert many.answer(f"two {MOST + 3}", b"two") == b""
    with pytest.raises(NotKeptError):
        many.answer(f"two {MOST + 2}", b"two")


@pytest.mark.parametrize("field", ["prompt_cache_key", "safety_identifier", "user"])
def test_what_is_told_again_with_an_answer_is_short(client: Any, field: str) -> None:
    answer = client.responses.with_raw_response.create(**asked("One.", **{field: "x" * 512}))
    assert getattr(answer.parse(), field) == "x" * 512
    assert answer.headers["X-Ignored-Fields"] == field
    with pytest.raises(openai.BadRequestError, match=rf"length <= 512.*{field}"):
        client.responses.create(**asked("One.", **{field: "x" * 513}))
    with pytest.raises(openai.BadRequestError, match=r"length <= 512.*metadata"):
        client.responses.create(**asked("One.", metadata={"a": "x" * 513}))
