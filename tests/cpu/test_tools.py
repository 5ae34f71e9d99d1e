"""Tools and reasoning in /v1/chat/completions, as OpenAI's client uses them, with a checkpoint that is made
to write them."""

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

openai = pytest.importorskip("openai", reason="needs the client that the server is for")

from penstock.api.llm import SHIPPED_MODEL  # noqa: E402
from penstock.api.text.tokenizer import Tokenizer  # noqa: E402
from penstock.server.answers.prompts import chat_tokens  # noqa: E402
from penstock.server.parsing.dialects import Dialect, dialect_of  # noqa: E402
from penstock.server.parsing.output_parser import FORMATS, REASONING_MARKS  # noqa: E402
from penstock.server.parsing.tools import template_messages, tools_of  # noqa: E402
from penstock.server.wire.conversation import Message  # noqa: E402
from penstock.server.wire.decoding import FieldError  # noqa: E402
from penstock.server.wire.requests import TokenizeRequest  # noqa: E402
from servers import FLAGS, Server, serving  # noqa: E402
from speakers import CALL, NOW, TEMPLATE, THINK, WEATHER, called, checkpoint, saying  # noqa: E402
from streams import LONG  # noqa: E402

CHAT = "/v1/chat/completions"
TALK: list[Any] = [{"role": "user", "content": "How will it be in Köln?"}]
TOOLS: list[Any] = [{"type": "function", "function": function} for function in (WEATHER, NOW)]
REAL = Path(__file__).parents[3] / "shared" / "data" / "chat_templates"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("models") / "speaker")


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("server"), str(model), "--port", "0", *FLAGS) as server:
        yield server.wait()
        server.signal(signal.SIGTERM)
        assert server.ended() == 0
        assert "Traceback" not in server.said()


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=LONG) as client:
        yield client


def asked(*said: str | int, **more: Any) -> dict[str, Any]:
    """What makes a model with tools say this."""
    usual = {"model": "speaker", "messages": TALK, "tools": TOOLS, "temperature": 0, "max_tokens": 200}
    return usual | {"extra_body": saying(*said) if said else {}} | more


def streamed(client: Any, request: dict[str, Any]) -> tuple[list[Any], list[dict[str, str]], str, str, str]:
    """The chunks; and calls, content, reasoning and the reason for the end that they add up to."""
    with client.chat.completions.create(**request, stream=True) as stream:
        chunks = list(stream)
    calls: list[dict[str, str]] = []
    content = reasoning = ""
    for chunk in chunks:
        delta = chunk.choices[0].delta
        content += delta.content or ""
        reasoning += getattr(delta, "reasoning_content", None) or ""
        for call in delta.tool_calls or []:
            if call.index == len(calls):
                assert call.type == "function"
                calls.append({"id": call.id, "name": call.function.name, "arguments": ""})
            else:
                assert (call.id, call.type, call.function.name) == (None, None, None)
            calls[call.index]["arguments"] += call.function.arguments
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant"] + [None] * (len(chunks) - 1)
    assert {chunk.choices[0].finish_reason for chunk in chunks[:-1]} <= {None}
    return chunks, calls, content, reasoning, chunks[-1].choices[0].finish_reason


# ---- what the model writes


def test_calls_are_told_whole_and_as_they_come(client: Any) -> None:
    arguments = {"city": "Köln", "days": 2}
    request = asked("Let me see.\n", *called("weather", **arguments), "\n", *called("now"))
    whole = client.chat.completions.create(**request).choices[0]
    assert (whole.finish_reason, whole.message.content) == ("tool_calls", "Let me see.")
    assert [call.function.name for call in whole.message.tool_calls] == ["weather", "now"]
    assert [json.loads(call.function.arguments) for call in whole.message.tool_calls] == [arguments, {}]
    assert all(re.fullmatch("call_[0-9a-f]{24}", call.id) for call in whole.message.tool_calls)
    pieces = []
    for _ in range(5):  # On a busy machine several pieces come as one.
        chunks, calls, content, reasoning, reason = streamed(client, request)
        assert (reason, content, reasoning) == ("tool_calls", "Let me see.", "")
        assert [(call["name"], call["arguments"]) for call in calls] == [
            (call.function.name, call.function.arguments) for call in whole.message.tool_calls
        ]
        assert len({call["id"] for call in calls}) == 2
        pieces.append(sum(bool(chunk.choices[0].delta.tool_calls) for chunk in chunks))
        if pieces[-1] > 5:
            break
    assert max(pieces) > 5
    one = (
        client.chat.completions.create(**asked(*called("now"), *called("weather"), parallel_tool_calls=False))
        .choices[0]
        .message
    )
    assert (one.content, [call.function.name for call in one.tool_calls]) == (None, ["now"])


def test_reasoning_is_told_apart_from_content_and_from_calls(client: Any) -> None:
    request = asked(THINK, "\nIs {tool_call} right?\n</think>\n\nYes.\n", *called("now"))
    whole = client.chat.completions.create(**request).choices[0].message
    assert (whole.reasoning_content, whole.content, len(whole.tool_calls)) == (
        "Is {tool_call} right?",
        "Yes.",
        1,
    )
    _, calls, content, reasoning, reason = streamed(client, request)
    assert (calls[0]["name"], content, reasoning, reason) == (
        "now",
        "Yes.",
        "Is {tool_call} right?",
        "tool_calls",
    )
    request["extra_body"] |= {"include_reasoning": False}
    assert not hasattr(client.chat.completions.create(**request).choices[0].message, "reasoning_content")
    assert streamed(client, request)[3] == ""


def test_reasoning_that_the_prompt_has_begun(client: Any) -> None:
    request = asked("Hm.\n</think>\n\nYes.", reasoning_effort="high", tools=openai.NOT_GIVEN)
    whole = client.chat.completions.create(**request).choices[0].message
    assert (whole.reasoning_content, whole.content) == ("Hm.", "Yes.")
    assert streamed(client, request)[2:4] == ("Yes.", "Hm.")


def test_several_answers_are_told_apart_each_by_itself(client: Any) -> None:
    request = asked("So.", *called("now"), n=2)
    assert [
        len(choice.message.tool_calls) for choice in client.chat.completions.create(**request).choices
    ] == [1, 1]
    with client.chat.completions.create(**request, stream=True) as stream:
        chunks = [chunk.choices[0] for chunk in stream]
    for index in (0, 1):
        own = [choice for choice in chunks if choice.index == index]
        assert sum(call.id is not None for choice in own for call in choice.delta.tool_calls or []) == 1
        assert own[-1].finish_reason == "tool_calls"


def test_without_tools_a_call_is_text_and_what_is_no_call_always_is(client: Any) -> None:
    text = '{"name":"now"}</tool_call>'
    for more in ({"tools": openai.NOT_GIVEN}, {"tool_choice": "none"}):
        whole = client.chat.completions.create(**asked(*called("now"), **more)).choices[0]
        assert (whole.finish_reason, whole.message.tool_calls) == ("stop", None)
        assert whole.message.content == text
    whole = client.chat.completions.create(**asked(CALL, "oh")).choices[0]
    assert (whole.finish_reason, whole.message.content) == ("stop", "<tool_call>oh")
    assert streamed(client, asked(CALL, "oh"))[1:] == ([], "<tool_call>oh", "", "stop")


CUTS: list[tuple[dict[str, Any], str]] = [
    *(({"max_tokens": most}, "length") for most in (6, 7, 8, 15, 24)),
    *(({"stop": stop}, "stop") for stop in ("weather", '"', "Köln", "}")),
]


@pytest.mark.parametrize(("cut", "why"), CUTS, ids=range(len(CUTS)))
def test_a_call_that_is_cut_short_is_none_and_no_content(client: Any, cut: dict[str, Any], why: str) -> None:
    request = asked("Let me see.\n", *called("weather", city="Köln", days=2), **cut)
    whole = client.chat.completions.create(**request).choices[0]
    assert (whole.finish_reason, whole.message.tool_calls) == (why, None)
    assert whole.message.content.rstrip("\n") == "Let me see."
    _, calls, content, _, reason = streamed(client, request)
    assert (reason, content) == (why, whole.message.content)
    assert '{"city": "Köln", "days": 2'.startswith("".join(call["arguments"] for call in calls))


def test_calls_before_one_that_is_cut_short_are_kept(client: Any) -> None:
    said = *called("now"), *called("weather", city="Köln", days=2)
    request = asked(*said, stop="Köln")
    whole = client.chat.completions.create(**request).choices[0]
    assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
    assert [call.function.name for call in whole.message.tool_calls] == ["now"]
    _, calls, content, _, reason = streamed(client, request)
    assert ([call["name"] for call in calls], content, reason) == (["now", "weather"], "", "tool_calls")


def test_a_call_that_the_model_itself_leaves_open_is_content(client: Any) -> None:
    [_, text] = called("weather", city="Köln", days=2)
    request = asked(CALL, str(text)[:30])
    whole = client.chat.completions.create(**request).choices[0]
    assert (whole.finish_reason, whole.message.content) == ("stop", f"<tool_call>{str(text)[:30]}")


def test_log_probabilities_are_told_of_calls_too(client: Any) -> None:
    request = asked(*called("now"), logprobs=True)
    whole = client.chat.completions.create(**request)
    chunks = streamed(client, request)[0]
    told = [
        entry.token
        for chunk in chunks
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert [entry.token for entry in whole.choices[0].logprobs.content] == told
    assert len(told) == whole.usage.completion_tokens


# ---- what the model has to write


@pytest.mark.parametrize("several", [True, False])
def test_a_required_call_is_one_of_the_tools(client: Any, several: bool) -> None:
    request = asked(
        tool_choice="required", parallel_tool_calls=several, reasoning_effort="none", max_tokens=80
    )
    whole = client.chat.completions.create(**request).choices[0]
    assert whole.message.content is None or whole.finish_reason == "length"
    calls = whole.message.tool_calls
    assert (len(calls), whole.finish_reason) == (1, "tool_calls") or several
    for call in calls:
        given = json.loads(call.function.arguments)
        if call.function.name == "weather":
            assert given["city"] in ("Köln", "Oslo")
            assert given["days"] in (1, 2, 3)
        else:
            assert call.function.name == "now"


def test_a_named_call_is_that_one_also_in_a_stream_and_behind_reasoning(client: Any) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    request = asked(tool_choice=named, reasoning_effort="none")
    [call] = client.chat.completions.create(**request).choices[0].message.tool_calls
    assert call.function.name == "weather"
    _, calls, content, reasoning, reason = streamed(client, request)
    assert [(one["name"], one["arguments"]) for one in calls] == [("weather", call.function.arguments)]
    assert (content, reasoning, reason) == ("", "", "tool_calls")


# ---- what is sent back, and what templates read


def test_a_conversation_with_calls_goes_on(server: Server, client: Any, model: Path) -> None:
    first = (
        client.chat.completions.create(**asked("So.\n", *called("weather", city="Oslo", days=1)))
        .choices[0]
        .message
    )
    name = first.tool_calls[0].id
    talk = [*TALK, first.to_dict(), {"role": "tool", "tool_call_id": name, "content": "Rain."}]
    status, _, told = server.ask("POST", "/tokenize", {"messages": talk, "tools": TOOLS})
    text = "".join(
        [
            f"[user] {TALK[0]['content']}<|end|>[assistant] So.",
            '<tool_call>{"name": "weather", "arguments": {"city": "Oslo", "days": 1}}</tool_call><|end|>',
            f"[tool] Rain. of {name}<|end|><|assistant|>",
        ]
    )
    tokenizer = Tokenizer.from_directory(model)
    assert status == 200
    assert tokenizer.decode(told["tokens"], skip_special=False).endswith(text)
    said = client.chat.completions.create(**asked("Fine.", messages=talk))
    assert said.choices[0].message.content == "Fine."
    assert said.usage.prompt_tokens == told["count"]


def test_templates_read_arguments_as_objects_and_roles_that_they_know() -> None:
    def call(arguments: Any, name: str = "call_1") -> dict[str, Any]:
        return {"id": name, "type": "function", "function": {"name": "f", "arguments": arguments}}

    def message(*calls: Any) -> Message:
        return Message(role="assistant", tool_calls=list(calls))

    given = ['{"a": [1.5, "ü"]}', "", "[1]", "{", '{"a": NaN}', {"b": 2}]
    [read] = template_messages([message(*map(call, given))], Dialect())
    found = [one["function"]["arguments"] for one in read["tool_calls"]]  # type: ignore[attr-defined]
    assert found == [{"a": [1.5, "ü"]}, {}, "[1]", "{", '{"a": NaN}', {"b": 2}]
    assert "tool_calls" not in template_messages([message()], Dialect())[0]
    assert template_messages([message({"function": 5}, {})], Dialect())[0]["tool_calls"] == [
        {"function": 5},
        {},
    ]
    rules = [Message(role="developer", content="Be brief.")]
    assert template_messages(rules, Dialect())[0]["role"] == "system"
    assert template_messages(rules, Dialect(names_developer=True))[0]["role"] == "developer"
    asks, answers = (
        message(call("{}"), call("{}", "abcDEF123")),
        Message(role="tool", tool_call_id="call_1", content="x"),
    )
    first, second = template_messages([asks, answers], Dialect(short_ids=True))
    short = [one["id"] for one in first["tool_calls"]]  # type: ignore[attr-defined]
    assert re.fullmatch("[0-9a-f]{9}", short[0])
    assert (short[1], second["tool_call_id"]) == ("abcDEF123", short[0])


DIALECTS = [
    (TEMPLATE, "hermes", "think"),
    ("{% for message in messages %}{{ message.content }}{% endfor %}", None, None),
    ("<tool_call>\n<function=name>\n<parameter=key>", "qwen3_coder", None),
    ('Environment: ipython\n{"name": NAME, "parameters": ARGUMENTS}', "llama3_json", None),
    ("[AVAILABLE_TOOLS] [TOOL_CALLS] [THINK]", "mistral", "mistral"),
    ("{{ content.split('</think>')[-1] }}", None, "think"),
]


@pytest.mark.parametrize(("template", "calls", "thought"), DIALECTS, ids=range(len(DIALECTS)))
def test_a_template_says_what_its_model_writes(template: str, calls: str | None, thought: str | None) -> None:
    found = dialect_of({"default": template})
    assert found.calls == (FORMATS[calls] if calls else None)
    assert found.thought == (REASONING_MARKS[thought] if thought else None)
    other = dialect_of({"default": template}, "mistral", "none")
    assert (other.calls, other.thought) == (FORMATS["mistral"], None)


@pytest.mark.skipif(not REAL.is_dir(), reason="needs the real material in ../shared/data, which is not here")
@pytest.mark.parametrize(
    ("name", "calls", "thinks"),
    [
        ("Qwen-Qwen2.5-7B-Instruct", "hermes", False),
        ("Qwen-Qwen3-0.6B", "hermes", True),
        ("meta-llama-Llama-3.1-8B-Instruct", "llama3_json", False),
        ("meta-llama-Llama-3.3-70B-Instruct", "llama3_json", False),
    ],
)
def test_real_templates_take_tools_and_calls_that_are_sent_back(name: str, calls: str, thinks: bool) -> None:
    tokenizer = Tokenizer.from_directory(SHIPPED_MODEL)
    templates = {"default": (REAL / f"{name}.jinja").read_text(encoding="utf-8")}
    real = Tokenizer(tokenizer._tokenizer, {"bos_token": "<s>"}, templates)
    dialect = dialect_of(templates)
    assert (dialect.calls, dialect.thought is not None) == (FORMATS[calls], thinks)
    tools = tools_of(TOOLS, None, None)
    function = {"name": "weather", "arguments": '{"city":"Köln","days":2}'}
    talk = [
        Message(role="developer", content="Be brief."),
        Message(role="user", content="And now?"),
        Message(role="assistant", tool_calls=[{"id": "call_1", "type": "function", "function": function}]),
        Message(role="tool", tool_call_id="call_1", content="Rain."),
    ]
    assert "tools" in real.template_variables(tools=True)
    text = real.render_chat(template_messages(talk, dialect), tools=tools.described)
    assert '{"city": "Köln", "days": 2}' in text
    assert "Be brief." in text
    assert '"name": "now"' in text


# ---- refusals


def function(**fields: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": fields}]


DEEP: Any = {}
for _ in range(300):
    DEEP = {"properties": {"a": DEEP}}
REFUSED: list[tuple[dict[str, Any], str | None]] = [
    ({"tools": []}, "tools"),
    ({"tools": 5}, "tools"),
    ({"tools": [5]}, "tools"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tools": function()}, "tools"),
    ({"tools": function(name="")}, "tools"),
    ({"tools": function(name="a b")}, "tools"),
    ({"tools": function(name="a" * 129)}, "tools"),
    ({"tools": function(name=5)}, "tools"),
    ({"tools": function(name="a", parameters=[])}, "tools"),
    ({"tools": function(name="a", parameters={"type": "string"})}, "tools"),
    ({"tools": function(name="a", mood="good")}, "tools"),
    ({"tools": function(name="a") * 2}, "tools"),
    ({"tools": [one for n in range(129) for one in function(name=f"f{n}")]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": 5}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
    (
        {
            "tools": function(name="a", parameters={"properties": {"x": {"type": "colour"}}}),
            "tool_choice": "required",
        },
        "tools",
    ),
    ({"tools": function(name="a", parameters={"enum": ["x" * 70_000]}), "tool_choice": "required"}, "tools"),
    ({"tools": function(name="a", parameters=DEEP), "tool_choice": "required"}, "tools"),
    ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    ({"reasoning_effort": 5}, "reasoning_effort"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"messages": [*TALK, {"role": "assistant", "tool_calls": "x"}]}, "messages"),
    ({"messages": [*TALK, {"role": "assistant", "tool_calls": ["x"]}]}, "messages"),
]


@pytest.mark.parametrize(("more", "param"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_served_is_refused_by_name(
    server: Server, more: dict[str, Any], param: str | None
) -> None:
    status, _, said = server.ask("POST", CHAT, {"model": "speaker", "messages": TALK, "max_tokens": 4} | more)
    assert (status, said["error"]["param"]) == (400, param), said
    assert 10 < len(said["error"]["message"]) < 500


def test_a_template_that_takes_no_tools_is_no_way_to_tell_of_them() -> None:
    tokenizer = Tokenizer.from_directory(SHIPPED_MODEL)
    shipped: Any = SimpleNamespace(tokenizer=tokenizer, encode=tokenizer.encode)
    messages = [Message(role="user", content="a")]
    assert chat_tokens(shipped, TokenizeRequest(messages=messages))
    with pytest.raises(FieldError, match="template takes none") as refused:
        chat_tokens(shipped, TokenizeRequest(messages=messages, tools=TOOLS))
    assert refused.value.param == "tools"
