"""A model that writes in channels behind the server, batches and the command line: reasoning, answers and
calls, what its outputs are held to, and what its template is given."""

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

openai = pytest.importorskip("openai", reason="needs the client that the server is for")

from harmonies import CALL, END, RETURN, checkpoint, saying  # noqa: E402
from penstock import LLM  # noqa: E402
from penstock.api.text.tokenizer import Tokenizer  # noqa: E402
from penstock.cli.main import main  # noqa: E402
from penstock.server.answers.prompts import chat_tokens, read_chat  # noqa: E402
from penstock.server.batch import Batch  # noqa: E402
from penstock.server.parsing.dialects import dialect_of  # noqa: E402
from penstock.server.parsing.harmony import MARKS  # noqa: E402
from penstock.server.parsing.output_parser import Called, whole  # noqa: E402
from penstock.server.parsing.reading import Content, Reasoning  # noqa: E402
from penstock.server.parsing.tools import template_messages, tools_of  # noqa: E402
from penstock.server.parsing.turns import channel_tools  # noqa: E402
from penstock.server.wire.conversation import Message  # noqa: E402
from penstock.server.wire.decoding import FieldError, converted  # noqa: E402
from penstock.server.wire.requests import ChatRequest, TokenizeRequest  # noqa: E402
from servers import FLAGS, Server, serving  # noqa: E402
from speakers import NOW, WEATHER  # noqa: E402
from streams import LONG  # noqa: E402

REAL = Path(__file__).parents[3] / "shared" / "data" / "chat_templates" / "openai-gpt-oss-120b.jinja"
TALK: list[Any] = [{"role": "user", "content": "How will it be in Köln?"}]
TOOLS: list[Any] = [{"type": "function", "function": function} for function in (WEATHER, NOW)]
THOUGHT, ANSWER = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
TO = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
GIVEN = '{"city": "Köln", "days": 2}'
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
}
HELD = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("models") / "harmony")


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("server"), str(model), "--port", "0", *FLAGS) as server:
        yield server.wait()
        server.signal(signal.SIGTERM)
        assert server.ended() == 0
        assert "Traceback" not in server.said()
        assert "unknown" not in server.said()


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=LONG) as client:
        yield client


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model, device="cpu", dtype="float32", device_memory="600MiB", max_sequences=4) as llm:
        yield llm


def asked(*said: str, **more: Any) -> dict[str, Any]:
    usual = {"model": "harmony", "messages": TALK, "tools": TOOLS, "temperature": 0, "max_tokens": 200}
    return usual | {"extra_body": saying(*said) if said else {}} | more


def told(client: Any, request: dict[str, Any]) -> tuple[str | None, str, list[tuple[str, str]], str]:
    """Reasoning, content, calls and the reason for the end; the same in a stream as whole."""
    choice = client.chat.completions.create(**request).choices[0]
    message = choice.message
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or []]
    whole = (getattr(message, "reasoning_content", ""), message.content, calls, choice.finish_reason)
    text, streamed = {"content": "", "reasoning_content": ""}, list[list[str]]()
    with client.chat.completions.create(**request, stream=True) as stream:
        for chunk in stream:
            for name in text:
                text[name] += getattr(chunk.choices[0].delta, name, None) or ""
            for call in chunk.choices[0].delta.tool_calls or []:
                if call.index == len(streamed):
                    streamed.append([call.function.name, ""])
                streamed[call.index][1] += call.function.arguments
            reason = chunk.choices[0].finish_reason
    assert text == {"content": whole[1] or "", "reasoning_content": whole[0]}
    assert ([(name, given) for name, given in streamed], reason) == whole[2:]
    assert not any(mark in str(whole) for mark in MARKS)
    return whole


# ---- what the model writes


def test_reasoning_answers_and_calls_are_told_apart(client: Any) -> None:
    answer = asked(f"{THOUGHT}Is it?\n{NEXT}{ANSWER} Yes.\n")
    assert told(client, answer) == ("Is it?\n", " Yes.\n", [], "stop")
    plan = "<|channel|>commentary<|message|>I look."
    assert told(client, asked(f"{THOUGHT}Hm.{NEXT}{plan}{NEXT}{TO}{GIVEN}<|call|>")) == (
        "Hm.",
        "I look.",
        [("weather", GIVEN)],
        "tool_calls",
    )
    role = " to=functions.now<|channel|>commentary json<|message|>{}"
    assert told(client, asked(f"{role}{NEXT}{TO}{GIVEN}")) == (
        "",
        None,
        [("now", "{}"), ("weather", GIVEN)],
        "tool_calls",
    )
    assert told(client, asked(f"{TO}{GIVEN}", tool_choice="none")) == ("", GIVEN, [], "stop")
    hidden = client.chat.completions.create(
        **answer | {"extra_body": answer["extra_body"] | {"include_reasoning": False}}
    )
    assert not hasattr(hidden.choices[0].message, "reasoning_content")


def test_an_output_that_is_cut_short_is_what_it_is(client: Any) -> None:
    text = f"{THOUGHT}One two three four five six seven{NEXT}{ANSWER}Eight"
    for most in (1, 3, 4, 8, 14, 17):
        reasoning, content, calls, reason = told(client, asked(text, max_tokens=most))
        assert (content, calls, reason) == ("", [], "length")
        assert "One two three four five six seven".startswith(reasoning or "")
        assert bool(reasoning) == (most > 7)  # Of a mark, a word in five tokens and a mark.
    choice = client.chat.completions.create(**asked(f"{TO}{GIVEN}", max_tokens=28)).choices[0]
    assert (choice.finish_reason, choice.message.tool_calls) == ("length", None)
    assert choice.message.content == ""
    bare = client.chat.completions.create(**asked(f"{TO}{GIVEN}", stop=['{"city"'])).choices[0]
    assert (bare.finish_reason, bare.message.tool_calls, bare.message.content) == ("stop", None, "")


@pytest.mark.parametrize("stop", ["final", "analysis", "assistant", "channel", "<|start|>assistant", "an"])
def test_stop_strings_are_no_words_of_headers(client: Any, stop: str) -> None:
    """They end what is said, thoughts and answers, where they stand in it."""
    text = f"{THOUGHT}Hm, one.{NEXT}{ANSWER}Two three."
    assert told(client, asked(text, stop=[stop])) == ("Hm, one.", "Two three.", [], "stop")
    whole = f"{THOUGHT}Hm, one.{NEXT}{ANSWER}Two {stop} three."
    if "<" not in stop:
        assert told(client, asked(whole, stop=[stop])) == ("Hm, one.", "Two ", [], "stop")
    assert told(client, asked(f"{THOUGHT}Hm, ones.{NEXT}{ANSWER}Two", stop=["one", stop])) == (
        "Hm, ",
        "",
        [],
        "stop",
    )


def test_the_end_of_a_message_is_no_end_of_an_output(llm: LLM, model: Path) -> None:
    """Though generation_config.json names it; and the marks that end an output do, though it does not."""
    named = json.loads((model / "generation_config.json").read_text())
    assert named["eos_token_id"] == [END, RETURN]
    assert llm.reader.defaults.eos_tokens == (RETURN, CALL)


def test_responses_have_items_for_reasoning_calls_and_messages(client: Any) -> None:
    tools: list[Any] = [{"type": "function", **function} for function in (WEATHER, NOW)]
    usual = {"model": "harmony", "tools": tools, "temperature": 0, "max_output_tokens": 200}
    said = saying(f"{THOUGHT}Hm.{NEXT}{TO}{GIVEN}<|call|>")
    first = client.responses.create(**usual, input="In Köln?", extra_body=said)
    reasoning, call = first.output
    assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "Hm.")
    assert (call.type, call.name, call.arguments, call.status) == (
        "function_call",
        "weather",
        GIVEN,
        "completed",
    )
    assert 0 < first.usage.output_tokens_details.reasoning_tokens < first.usage.output_tokens
    with client.responses.create(**usual, input="In Köln?", extra_body=said, stream=True) as stream:
        events = list(stream)
    assert "".join(event.delta for event in events if event.type == "response.reasoning_text.delta") == "Hm."
    given = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(given) == GIVEN
    assert len(given) > 2
    answer = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}
    second = client.responses.create(
        **usual, input=[answer], previous_response_id=first.id, extra_body=saying(f"{ANSWER}It rains.")
    )
    [message] = second.output
    assert (message.type, message.content[0].text) == ("message", "It rains.")


def test_a_batch_tells_them_apart_too(llm: LLM, tmp_path: Path) -> None:
    body = {"messages": TALK, "temperature": 0, **saying(f"{THOUGHT}Hm.{NEXT}{ANSWER}Yes.")}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (tmp_path / "in").write_text(json.dumps(line))
    Batch(tmp_path / "in", tmp_path / "out").run(llm, ("harmony",))
    message = json.loads((tmp_path / "out").read_text())["response"]["body"]["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")


def test_the_command_line_shows_answers_and_keeps_reasoning_apart(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grammar = tmp_path / "grammar"
    grammar.write_text(saying(f"{THOUGHT}Hm.{NEXT}{ANSWER}Yes.")["structured_outputs"]["grammar"])
    usual = ["run", str(model), "In Köln?", "--chat", "--device", "cpu", "--dtype", "float32", "--quiet"]
    assert main([*usual, "--grammar", str(grammar)]) == 0
    assert capsys.readouterr().out == "Yes.\n"
    assert main([*usual, "--grammar", str(grammar), "--json", "-n", "2"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [(one["reasoning"], one["text"]) for one in record["outputs"]] == [("Hm.", "Yes.")] * 2
    schema = tmp_path / "schema"
    schema.write_text(json.dumps(SCHEMA))
    assert (
        main([*usual, "--json-schema", str(schema), "--json", "--temperature", "0", "--max-tokens", "400"])
        == 0
    )
    record = json.loads(capsys.readouterr().out)
    assert record["finish_reason"] == "length" or json.loads(record["text"])["a"] in (1, 2)


def test_a_chat_goes_on_from_answers_and_says_where_one_was_cut_short(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar = tmp_path / "grammar"
    grammar.write_text(saying(f"{THOUGHT}Hm.{NEXT}{ANSWER}Yes.")["structured_outputs"]["grammar"])
    usual = ["chat", str(model), "--device", "cpu", "--dtype", "float32", "--grammar", str(grammar)]
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=[b"a\n", b"b\n"], isatty=lambda: False))
    assert main([*usual, "--json"]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert [(one["reasoning"], one["text"]) for one in (first, second)] == [("Hm.", "Yes.")] * 2
    tokenizer = Tokenizer.from_directory(model)
    added = "<|start|>assistant<|channel|>final<|message|>Yes.<|end|><|start|>user<|message|>b<|end|>"
    grown = second["usage"]["prompt_tokens"] - first["usage"]["prompt_tokens"]
    assert grown == len(tokenizer.encode(added, special=False))
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=[b"a\n"], isatty=lambda: False))
    assert main([*usual, "--max-tokens", "8"]) == 0
    said = capsys.readouterr()
    assert said.out == ""
    assert "cut short in its reasoning" in said.err


# ---- what outputs are held to


def request(**more: Any) -> ChatRequest:
    return converted(
        {"model": "harmony", "messages": TALK, "temperature": 0, **more}, ChatRequest, "request", ""
    )


def never(llm: LLM, *words: str) -> dict[str, float]:
    """Biases by which the words that name channels are not said."""
    texts = {token: llm.tokenizer.token_text(token) for token in range(llm.tokenizer.vocabulary_size)}
    heads = {word[:size] for word in words for size in range(1, len(word) + 1)}
    return {str(token): -100 for token, text in texts.items() if text in heads}


def held(llm: LLM, most: int = 300, **more: Any) -> tuple[str, list[Any]]:
    """The output with its marks, and its parts."""
    ready, speech = read_chat(llm.reader, request(max_tokens=most, **more))
    group = llm.driver.begin(ready)
    while not group.done:
        llm.driver.advance()
    text = group.completion().text
    return text, whole(speech(), text)


def test_a_form_begins_with_the_answer(llm: LLM) -> None:
    text, parts = held(llm, response_format=HELD, logit_bias=never(llm, "analysis"))
    assert re.fullmatch(r"<\|channel\|>final( <\|constrain\|>json)?<\|message\|>\{.*\}", text, re.DOTALL), (
        text
    )
    [content] = parts
    assert isinstance(content, Content)
    assert json.loads(content.text)["a"] in (1, 2)
    text, parts = held(llm, response_format=HELD, most=40, logit_bias=never(llm, "final") | {str(END): -100})
    assert text.startswith(THOUGHT)
    assert [type(part) for part in parts] == [Reasoning]


def test_a_form_that_can_be_no_part_of_another_begins_behind_the_prompt(llm: LLM) -> None:
    schema = {"type": "integer", "multipleOf": 7, "minimum": 7, "maximum": 70}
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    ready, _ = read_chat(llm.reader, request(response_format=form))
    assert llm.tokenizer.decode(ready.tokens, skip_special=False).endswith(f"<|start|>assistant{ANSWER}")
    text, [content] = held(llm, response_format=form)
    assert int(content.text) % 7 == 0
    assert text == content.text
    with pytest.raises(FieldError, match="multipleOf") as refused:
        read_chat(llm.reader, request(response_format=form, tools=TOOLS))
    assert refused.value.param == "response_format"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_call_that_has_to_be_is_one_in_its_channel(llm: LLM, choice: object) -> None:
    text, parts = held(llm, tools=TOOLS, tool_choice=choice, logit_bias=never(llm, "analysis"))
    [call] = parts
    assert isinstance(call, Called)
    assert f"<|channel|>commentary to=functions.{call.name} <|constrain|>json<|message|>" in text
    given = json.loads(call.arguments)
    if call.name == "weather":
        assert given["city"] in ("Köln", "Oslo")
        assert given["days"] in (1, 2, 3)
    else:
        assert (choice, call.name) == ("required", "now")


def test_a_form_leaves_calls_to_the_model_where_there_are_tools(llm: LLM) -> None:
    _, [call] = held(llm, tools=TOOLS, response_format=HELD, logit_bias=never(llm, "analysis", "final"))
    assert isinstance(call, Called)
    bias = never(llm, "analysis", "commentary")
    _, [content] = held(llm, tools=TOOLS, response_format=HELD, logit_bias=bias)
    assert json.loads(content.text)["a"] in (1, 2)
    odd = [
        {
            "type": "function",
            "function": {"name": "f", "parameters": {"properties": {"n": {"multipleOf": 3}}}},
        }
    ]
    read_chat(llm.reader, request(tools=odd, response_format=HELD))
    with pytest.raises(FieldError, match="'f' have multipleOf") as refused:
        read_chat(llm.reader, request(tools=odd, tool_choice="required"))
    assert refused.value.param == "tools"


def test_calls_are_text_where_the_server_was_told_that_there_are_none(llm: LLM) -> None:
    dialect = dialect_of(llm.tokenizer.templates, "none")
    _, speech = read_chat(llm.reader, request(tools=TOOLS), dialect)
    assert whole(speech(), f"{THOUGHT}Hm.{NEXT}{TO}{GIVEN}") == [Reasoning("Hm."), Content(GIVEN)]
    _, speech = read_chat(llm.reader, request(tools=TOOLS, tool_choice="required"), dialect)
    assert whole(speech(), f"{TO}{GIVEN}") == [Called("weather", GIVEN)]


# ---- what the template is given


def test_how_much_to_reason_is_one_of_what_the_model_knows(llm: LLM) -> None:
    for effort in ("low", "medium", "high"):
        ready, _ = read_chat(llm.reader, request(reasoning_effort=effort))
        assert f"Reasoning: {effort}\n" in llm.tokenizer.decode(ready.tokens, skip_special=False)
        ready, _ = read_chat(llm.reader, request(chat_template_kwargs={"reasoning_effort": effort}))
        assert f"Reasoning: {effort}\n" in llm.tokenizer.decode(ready.tokens, skip_special=False)
    for more in ({"reasoning_effort": "minimal"}, {"chat_template_kwargs": {"reasoning_effort": 5}}):
        with pytest.raises(FieldError, match="low, medium, high") as refused:
            read_chat(llm.reader, request(**more))
        assert refused.value.param == "reasoning_effort"


def called(name: str, function: str, arguments: str) -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": function, "arguments": arguments}}


HISTORY: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "reasoning_content": "Old.", "tool_calls": [called("z", "now", "{}")]},
    {"role": "tool", "tool_call_id": "z", "content": "noon"},
    {"role": "assistant", "content": "Hello", "reasoning_content": "Older."},
    {"role": "user", "content": "And now?"},
    {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "Both.",
        "tool_calls": [called("a", "weather", '{"city":"Oslo","days":1}'), called("b", "now", "{}")],
    },
    {"role": "tool", "tool_call_id": "b", "content": "12"},
    {"role": "tool", "tool_call_id": "a", "content": "Rain."},
]
GOES_ON = (
    "<|start|>user<|message|>Hi<|end|>"
    "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>"
    '<|start|>functions.now to=assistant<|channel|>commentary<|message|>"noon"<|end|>'
    "<|start|>assistant<|channel|>final<|message|>Hello<|end|>"
    "<|start|>user<|message|>And now?<|end|>"
    "<|start|>assistant<|channel|>analysis<|message|>Both.<|end|>"
    "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    "<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>"
    '{"city": "Oslo", "days": 1}<|call|>'
    '<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"Rain."<|end|>'
    "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>"
    '<|start|>functions.now to=assistant<|channel|>commentary<|message|>"12"<|end|>'
    "<|start|>assistant"
)


def test_reasoning_stays_with_calls_in_progress_and_goes_with_the_answer(llm: LLM) -> None:
    messages = converted(HISTORY, list[Message], "messages", "messages")
    tokens = chat_tokens(llm.reader, TokenizeRequest(messages=messages, tools=TOOLS))
    text = llm.tokenizer.decode(tokens, skip_special=False)
    assert text.endswith(GOES_ON)
    assert "# Instructions\n\nBe brief." in text


@pytest.mark.skipif(not REAL.is_file(), reason="needs the real template in ../shared/data, which is not here")
def test_the_real_template_takes_what_is_sent_back(llm: LLM) -> None:
    templates = {"default": REAL.read_text(encoding="utf-8")}
    real, dialect = Tokenizer(llm.tokenizer._tokenizer, {}, templates), dialect_of(templates)
    assert (dialect.channels, dialect.channel_calls) == (True, True)
    tools = channel_tools(tools_of(TOOLS, None, None).described)
    messages = template_messages(converted(HISTORY, list[Message], "messages", "messages"), dialect)
    text = real.render_chat(
        messages, tools=tools, reasoning_effort="high", builtin_tools=["python", "browser"]
    )
    assert text.endswith(GOES_ON)
    assert "\nReasoning: high\n" in text
    assert re.search(r"\nCurrent date: \d{4}-\d\d-\d\d\n", text)
    assert '\ncity: "Köln" | "Oslo",\n' in text
    assert "## python\n" in text
    assert "type now = () => any;" in text
