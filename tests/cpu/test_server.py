"""`penstock serve` as its clients see it: the real command in a process of its own, OpenAI's client, and
clients that misbehave."""

import http.client
import json
import os
import random
import re
import signal
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import psutil
import pytest

openai = pytest.importorskip("openai", reason="needs the client that the server is for")

from penstock import LLM, Completion, SamplingParams, __version__  # noqa: E402
from penstock.server.answers.prompts import read  # noqa: E402
from penstock.server.wire.requests import CompletionRequest  # noqa: E402
from servers import (  # noqa: E402
    COUNT,
    ENDLESS,
    FLAGS,
    HEAD,
    RAW_HEAD,
    ROOM,
    SETTINGS,
    STORY,
    TALK,
    Server,
    Stream,
    counted,
    serving,
    until,
)
from speakers import shallow  # noqa: E402
from streams import LONG  # noqa: E402

# ---- the server and its clients


@contextmanager
def client_of(server: Server, key: str = "none") -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=LONG) as client:
        yield client


@contextmanager
def full(server: Server) -> Iterator[list[Stream]]:
    """As many streams as there is room for, and proof that there is no more. Who has left a moment ago may
    still be there; in the end nobody is."""
    with ExitStack() as opened:
        streams: list[Stream] = []

        def one_more() -> bool:
            stream = Stream(server)
            if stream.status == 200:
                streams.append(opened.enter_context(stream))
            else:
                assert stream.status == 429
                stream.close()
            return len(streams) == ROOM

        until(one_more)
        status, _, said = server.complete()
        assert (status, said["error"]["code"]) == (429, "queue_full")
        yield streams
    until(lambda: server.complete(prompt=["a"] * ROOM, max_tokens=1)[0] == 200)


def is_taken(server: Server) -> bool:
    """Whether a stream has room now."""
    with Stream(server) as stream:
        assert stream.status in (200, 429)
        return stream.status == 200


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shallow(tmp_path_factory.mktemp("model") / "shipped")


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("server"), str(model), "--port", "0", *FLAGS) as server:
        yield server.wait()
        server.signal(signal.SIGTERM)
        assert server.ended() == 0
        assert "Traceback" not in server.said()


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    with client_of(server) as client:
        yield client


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model, **SETTINGS) as llm:
        yield llm


def greedy(**settings: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": COUNT} | settings)


def right(server: Server, offline: Completion) -> bool:
    status, _, said = server.complete()
    return bool(status == 200 and said["choices"][0]["text"] == offline.text)


@pytest.fixture(scope="module")
def story(llm: LLM) -> Completion:
    """What `Server.complete` asks for."""
    return llm.generate(STORY, greedy())[0]


# ---- answers


def test_a_chat_says_what_the_model_says_offline_whole_and_streamed(client: Any, llm: LLM) -> None:
    offline = llm.chat(TALK, greedy(max_tokens=30))
    asked = {"model": "shipped", "messages": TALK, "temperature": 0, "max_completion_tokens": 30}
    whole = client.chat.completions.create(**asked)
    assert (whole.object, whole.model, whole.choices[0].message.role) == (
        "chat.completion",
        "shipped",
        "assistant",
    )
    assert whole.choices[0].message.content == offline.text
    assert whole.choices[0].finish_reason == ("length" if len(offline.tokens) == 30 else "stop")
    assert whole.usage.prompt_tokens == len(offline.prompt_tokens)
    assert whole.usage.completion_tokens == len(offline.tokens)
    with client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    ) as stream:
        *chunks, last = stream
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == offline.text
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant"] + [None] * (len(chunks) - 1)
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert {chunk.id for chunk in [*chunks, last]} == {last.id}
    assert last.choices == []
    assert last.usage.total_tokens == whole.usage.total_tokens
    assert len(chunks) > 1


def test_parts_of_text_and_a_system_message_reach_the_template(client: Any, llm: LLM) -> None:
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    parts = [
        talk[0],
        {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]},
    ]
    found = client.chat.completions.create(model="shipped", messages=parts, temperature=0, max_tokens=8)
    assert found.choices[0].message.content == llm.chat(talk, greedy(max_tokens=8)).text


def test_an_answer_may_be_sent_back_as_the_client_has_it(client: Any, llm: LLM) -> None:
    """With all the fields that OpenAI's client puts into it."""
    settings = {"model": "shipped", "max_tokens": COUNT, "temperature": 0}
    first = client.chat.completions.create(messages=TALK, **settings).choices[0].message
    talk = [*TALK, first, {"role": "user", "content": "And then?"}]
    said = client.chat.completions.create(messages=talk, **settings).choices[0].message.content
    assert said == llm.chat([*TALK, {"role": "assistant", "content": first.content}, talk[-1]], greedy()).text
    with pytest.raises(openai.BadRequestError, match="unknown field `mood`"):
        client.chat.completions.create(messages=[{**TALK[0], "mood": "good"}], **settings)


def test_completions_of_texts_and_of_tokens_in_the_order_of_their_prompts(client: Any, llm: LLM) -> None:
    prompts: list[Any] = [STORY, "The sea", llm.encode("A dog")]
    offline = llm.generate(prompts, greedy())
    whole = client.completions.create(model="shipped", prompt=prompts, temperature=0, max_tokens=COUNT)
    assert [(choice.index, choice.text) for choice in whole.choices] == [
        (n, one.text) for n, one in enumerate(offline)
    ]
    assert whole.usage.prompt_tokens == sum(len(one.prompt_tokens) for one in offline)
    asked = {"model": "shipped", "prompt": prompts, "temperature": 0, "max_tokens": COUNT, "stream": True}
    with client.completions.create(**asked, stream_options={"include_usage": True}) as stream:
        *chunks, last = stream
    texts = [
        "".join(chunk.choices[0].text for chunk in chunks if chunk.choices[0].index == n) for n in range(3)
    ]
    assert texts == [one.text for one in offline]
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    alone = client.completions.create(model="shipped", prompt=prompts[2], temperature=0, max_tokens=COUNT)
    assert alone.choices[0].text == offline[2].text
    assert len(client.completions.create(model="shipped", prompt=STORY, temperature=0).choices[0].text) > 0


def test_several_outputs_of_a_seed_are_those_of_the_seed_offline(client: Any, llm: LLM) -> None:
    offline = llm.generate(
        STORY, SamplingParams(temperature=0.9, top_p=0.95, seed=11, n=3, max_tokens=COUNT)
    )[0]
    asked = {
        "model": "shipped",
        "prompt": STORY,
        "temperature": 0.9,
        "top_p": 0.95,
        "seed": 11,
        "n": 3,
        "max_tokens": COUNT,
    }
    whole = client.completions.create(**asked)
    assert [choice.text for choice in whole.choices] == [output.text for output in offline.outputs]
    assert len({choice.text for choice in whole.choices}) > 1
    with client.completions.create(**asked, stream=True) as stream:
        chunks = list(stream)
    texts = [
        "".join(chunk.choices[0].text for chunk in chunks if chunk.choices[0].index == n) for n in range(3)
    ]
    assert texts == [output.text for output in offline.outputs]
    two = client.completions.create(**asked | {"prompt": [STORY, "The sea"]})
    assert [choice.index for choice in two.choices] == list(range(6))
    assert [choice.text for choice in two.choices[:3]] == texts


def test_a_stop_string_ends_the_text_before_it_also_in_a_stream(client: Any, llm: LLM) -> None:
    text = llm.generate(STORY, greedy(max_tokens=40))[0].text
    stop = text[len(text) // 2 :][:5]
    asked = {
        "model": "shipped",
        "prompt": STORY,
        "temperature": 0,
        "max_tokens": 40,
        "stop": ["never there", stop],
    }
    whole = client.completions.create(**asked)
    assert whole.choices[0].text == text[: text.index(stop)]
    assert whole.choices[0].finish_reason == "stop"
    with client.completions.create(**asked, stream=True) as stream:
        chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == text[: text.index(stop)]
    assert chunks[-1].choices[0].finish_reason == "stop"
    kept = client.completions.create(**asked, extra_body={"include_stop_str_in_output": True})
    assert kept.choices[0].text == text[: text.index(stop)] + stop


def test_log_probabilities_are_those_offline_whole_and_streamed(client: Any, llm: LLM) -> None:
    offline = llm.chat(TALK, greedy(logprobs=3))
    assert offline.logprobs is not None
    asked = {
        "model": "shipped",
        "messages": TALK,
        "temperature": 0,
        "max_tokens": COUNT,
        "logprobs": True,
        "top_logprobs": 3,
    }
    whole = client.chat.completions.create(**asked).choices[0].logprobs.content
    with client.chat.completions.create(**asked, stream=True) as stream:
        streamed = [
            entry
            for chunk in stream
            if chunk.choices[0].logprobs
            for entry in chunk.choices[0].logprobs.content
        ]
    for found in (whole, streamed):
        assert [entry.logprob for entry in found] == pytest.approx(
            [one.logprob for one in offline.logprobs], abs=1e-3
        )
        assert b"".join(bytes(entry.bytes) for entry in found).decode() == offline.text
        for entry, one in zip(found, offline.logprobs, strict=True):
            assert [other.logprob for other in entry.top_logprobs] == pytest.approx(
                [value for _, value in one.top], abs=1e-3
            )
            assert entry.token == entry.top_logprobs[0].token
    bare = client.chat.completions.create(**asked | {"top_logprobs": 0}).choices[0].logprobs.content
    assert [(entry.token, entry.top_logprobs) for entry in bare] == [(entry.token, []) for entry in whole]


def test_log_probabilities_of_a_completion_tell_where_their_tokens_stand(client: Any, llm: LLM) -> None:
    asked = {
        "model": "shipped",
        "prompt": "The café",
        "temperature": 0,
        "max_tokens": 20,
        "logprobs": 2,
        "stop": ["zzz"],
    }
    choice = client.completions.create(**asked).choices[0]
    assert choice.logprobs.text_offset[0] == 0
    assert "".join(choice.logprobs.tokens) == choice.text
    for token, offset, top in zip(
        choice.logprobs.tokens, choice.logprobs.text_offset, choice.logprobs.top_logprobs, strict=True
    ):
        assert choice.text[offset:].startswith(token)
        assert token in top
    with client.completions.create(**asked, stream=True) as stream:
        found = [chunk.choices[0].logprobs for chunk in stream if chunk.choices[0].logprobs]
    assert [offset for one in found for offset in one.text_offset] == choice.logprobs.text_offset
    assert [token for one in found for token in one.tokens] == choice.logprobs.tokens
    assert [value for one in found for value in one.token_logprobs] == pytest.approx(
        choice.logprobs.token_logprobs, abs=1e-3
    )


def test_what_a_text_does_not_have_takes_no_room_in_it(server: Server, llm: LLM) -> None:
    """Special tokens that are not shown, and bytes of a character that is not whole yet."""
    mark = llm.tokenizer.token_to_id("<|user|>")
    body: dict[str, Any] = {"model": "shipped", "temperature": 0, "max_tokens": 30, "logprobs": 0}
    grammar = f'start: "Yes" <[{mark}]> "na\u00efve" <[{mark}]> " \U0001f989 so"'
    body["structured_outputs"] = {"grammar": grammar}
    echo = {"prompt": "<|user|>The owl", "echo": True}
    for more in ({"prompt": STORY}, {"prompt": STORY, "skip_special_tokens": False}, echo):
        status, _, said = server.ask("POST", TEXT, body | more)
        assert status == 200, said
        [choice] = said["choices"]
        text, found = choice["text"], choice["logprobs"]
        assert "🦉" in text
        assert ("<|user|>na" in text) == ("skip_special_tokens" in more)
        ends = [*found["text_offset"][1:], len(text)]
        parts = [text[at:to] for at, to in zip(found["text_offset"], ends, strict=True)]
        assert "".join(parts) == text
        for token, part in zip(found["tokens"], parts, strict=True):
            assert part in (token, "") or "\ufffd" in token
            assert part or token.startswith("<") or "\ufffd" in token
        if more is not echo:
            _, _, lines = server.ask("POST", TEXT, body | more | {"stream": True})
            chunks = [json.loads(line[6:]) for line in lines.splitlines() if line.startswith(b"data: {")]
            told = [one["logprobs"] for chunk in chunks for one in chunk["choices"] if one["logprobs"]]
            assert [at for one in told for at in one["text_offset"]] == found["text_offset"]


def test_a_repeated_prompt_is_told_to_be_cached(client: Any, llm: LLM) -> None:
    tokens = [7 + n % 50 for n in range(200)]
    asked = {"model": "shipped", "prompt": tokens, "temperature": 0, "max_tokens": 2}
    first, second = (client.completions.create(**asked) for _ in range(2))
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert 128 <= second.usage.prompt_tokens_details.cached_tokens < 200
    assert (
        second.choices[0].text == first.choices[0].text == llm.generate(tokens, greedy(max_tokens=2))[0].text
    )


def test_echo_says_the_prompt_first(client: Any, llm: LLM) -> None:
    tokens = llm.encode("A dog")
    offline = llm.generate([STORY, tokens], greedy())
    expected = [STORY + offline[0].text, llm.decode(tokens) + offline[1].text]
    asked = {
        "model": "shipped",
        "prompt": [STORY, tokens],
        "temperature": 0,
        "max_tokens": COUNT,
        "echo": True,
    }
    assert [choice.text for choice in client.completions.create(**asked).choices] == expected
    with client.completions.create(**asked, stream=True) as stream:
        chunks = list(stream)
    assert [
        "".join(chunk.choices[0].text for chunk in chunks if chunk.choices[0].index == n) for n in range(2)
    ] == expected


def test_log_probabilities_of_a_prompt_are_those_offline(client: Any, llm: LLM) -> None:
    """As evaluations ask for them, and as vLLM has them."""
    tokens = llm.encode("Once upon a time there was")
    offline = llm.generate([tokens], greedy(max_tokens=2, logprobs=1, prompt_logprobs=1))[0]
    assert offline.prompt_logprobs is not None
    assert offline.logprobs is not None
    expected = [None if one is None else one.logprob for one in offline.prompt_logprobs]
    asked = {"model": "shipped", "prompt": [tokens, tokens], "temperature": 0, "max_tokens": 2, "echo": True}
    choices = client.completions.create(**asked, logprobs=1, extra_body={"prompt_logprobs": 3}).choices
    for choice in choices:
        found = choice.logprobs
        assert found.token_logprobs[0] is found.top_logprobs[0] is None
        own = [one.logprob for one in offline.logprobs]
        assert found.token_logprobs[1:] == pytest.approx([*expected[1:], *own], abs=1e-3)
        assert [len(top) for top in found.top_logprobs[1:]] == [1] * (len(tokens) + 1)
        begun = [0 if at < 2 else len("".join(found.tokens[1:at])) for at in range(len(found.tokens))]
        assert found.text_offset == begun, "what begins the prompt is no part of the text"
        assert choice.text == llm.decode(tokens) + offline.text
        entries = choice.prompt_logprobs
        assert entries[0] is None
        for token, entry, value in zip(tokens[1:], entries[1:], offline.prompt_logprobs[1:], strict=True):
            assert value is not None
            assert entry[str(token)]["logprob"] == pytest.approx(value.logprob, abs=1e-3)
            assert entry[str(token)]["rank"] == value.rank
            assert len(entry) in (3, 4)
            assert {one["rank"] for one in entry.values()} == {1, 2, 3, value.rank}
    [alone] = client.completions.create(**asked | {"prompt": tokens, "max_tokens": 0}, logprobs=1).choices
    assert (alone.text, alone.finish_reason) == (llm.decode(tokens), "length")
    assert alone.logprobs.token_logprobs[1:] == pytest.approx(expected[1:], abs=1e-3)
    body = {"prompt_logprobs": 0, "temperature": 0}
    chat = client.chat.completions.create(model="shipped", messages=TALK, max_tokens=1, extra_body=body)
    assert len(chat.prompt_logprobs) == chat.usage.prompt_tokens


def test_fields_of_other_servers_hold(server: Server, llm: LLM) -> None:
    def said(path: str = TEXT, **more: Any) -> tuple[Any, Any]:
        usual = {"prompt": STORY} if path == TEXT else {"messages": TALK}
        body = {"model": "shipped", "temperature": 0, "max_tokens": 4} | usual | more
        status, headers, answer = server.ask("POST", path, body)
        assert status == 200, answer
        return headers, answer

    tokens, offline = tuple(llm.encode(STORY)), llm.generate(STORY, greedy(max_tokens=4))[0]
    _, answer = said(return_token_ids=True, top_k=-1)
    [choice] = answer["choices"]
    assert (choice["text"], tuple(choice["token_ids"])) == (offline.text, offline.tokens)
    assert tuple(choice["prompt_token_ids"]) == tokens
    _, chat = said(CHAT, return_token_ids=True)
    assert len(chat["prompt_token_ids"]) == chat["usage"]["prompt_tokens"]
    assert len(chat["choices"][0]["token_ids"]) == 4
    with Stream(
        server,
        {
            "model": "shipped",
            "prompt": STORY,
            "temperature": 0,
            "max_tokens": 4,
            "stream": True,
            "return_token_ids": True,
        },
    ) as stream:
        found = [event["choices"][0] for event in stream.events()]
    assert [token for one in found for token in one["token_ids"]] == choice["token_ids"]
    assert [one.get("prompt_token_ids") for one in found] == [[*tokens]] + [None] * (len(found) - 1)
    # The last tokens of a prompt are those of all of it, however long it is.
    for prompt, most in (
        (STORY, 2),
        ("So it went on. " * 9000 + STORY, 3),
        ([*tokens], 3),
    ):
        _, answer = said(prompt=prompt, truncate_prompt_tokens=most, return_token_ids=True)
        assert tuple(answer["choices"][0]["prompt_token_ids"]) == tokens[-most:]
    cut = said(prompt="Once upon a time there was a fox", truncate_prompt_tokens=4, echo=True, logprobs=0)[1]
    told = cut["choices"][0]
    assert "".join(told["logprobs"]["tokens"]) == told["text"], "text that was cut off is not told"
    longest = {"model": "a", "prompt": "a " * 40_000, "max_tokens": 4, "truncate_prompt_tokens": -1}
    [ready], _ = read(llm.reader, msgspec.convert(longest, CompletionRequest))
    assert len(ready.tokens) == llm.limits.max_model_len - 4
    for guided, held in (
        ({"guided_choice": ["yes indeed"]}, "yes indeed"),
        ({"guided_regex": "[4]{3}"}, "444"),
        ({"guided_json": {"enum": [[1, {"a": 2}]]}}, '[1,{"a":2}]'),
        ({"guided_json": {"enum": [[1, 2]]}, "guided_whitespace_pattern": "  "}, "[1  ,  2  ]"),
        ({"guided_grammar": 'start: "so"'}, "so"),
        (
            {
                "structured_outputs": {
                    "json": {"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2}
                }
            },
            "[1,1]",
        ),
    ):
        assert said(**guided, max_tokens=20)[1]["choices"][0]["text"] == held, guided
    mark = next(
        token for token in sorted(llm.tokenizer.special_tokens) if token not in llm.reader.defaults.eos_tokens
    )
    marked = {"structured_outputs": {"grammar": f'start: "a" <[{mark}]> "b"'}, "max_tokens": 9}
    assert said(**marked)[1]["choices"][0]["text"] == "ab"
    shown = f"a{llm.tokenizer.token_text(mark)}b"
    for path in (TEXT, CHAT):
        [choice] = said(path, **marked, skip_special_tokens=False)[1]["choices"]
        assert (choice["text"] if path == TEXT else choice["message"]["content"]) == shown


@pytest.mark.parametrize("priority", [0, 3, -5])
def test_a_prompt_has_the_priority_of_its_request(llm: LLM, priority: int) -> None:
    asked = {"model": "a", "prompt": "a", "priority": priority}
    [ready], _ = read(llm.reader, msgspec.convert(asked, CompletionRequest))
    assert ready.priority == priority


def test_fields_without_effect_are_named_in_a_header(server: Server) -> None:
    body = {"model": "shipped", "messages": TALK, "max_tokens": 1}
    labels = {
        "user": "me",
        "store": False,
        "prediction": {"type": "content", "content": "a"},
        "modalities": ["text"],
    }
    status, headers, _ = server.ask("POST", CHAT, body | labels)
    assert (status, headers["x-ignored-fields"]) == (200, "user, store, prediction")
    assert "x-ignored-fields" not in server.ask("POST", CHAT, body)[1]


def test_headers_say_what_was_before_a_request_and_when_its_first_token_comes(server: Server) -> None:
    """Those of a stream come before the token; until outputs have ended nobody knows who waits how long."""
    message = {"model": "shipped", "messages": TALK, "max_tokens": COUNT}
    server.complete()
    for path, body in (
        ("/v1/completions", {"model": "shipped", "prompt": STORY, "max_tokens": COUNT}),
        ("/v1/chat/completions", message),
        ("/v1/messages", message),
        (
            "/api/chat",
            {"model": "shipped", "messages": TALK, "stream": False, "options": {"num_predict": COUNT}},
        ),
    ):
        status, headers, _ = server.ask("POST", path, body)
        assert status == 200
        assert headers["x-queue-position"] == "0", path
        assert 0 < float(headers["x-expected-first-token"]) < LONG, path
    before = counted(server)["time_to_first_token_of_expected_count",]
    with full(server) as streams:
        until(lambda: len(server.ask("GET", "/state")[2]["queue"]) == len(streams) - 4)  # It is of a step.
        queue = server.ask("GET", "/state")[2]["queue"]
        assert [one["place"] for one in queue] == list(range(len(streams) - 4))
        assert all(one["length"] > 0 for one in queue)
        lefts = [one["left"] for one in queue]
        assert lefts == sorted(lefts)
    assert counted(server)["time_to_first_token_of_expected_count",] >= before + 4
    assert "x-queue-position" not in server.complete(max_tokens=-1)[1]


def test_the_version_is_told_and_prefixes_are_forgotten(server: Server) -> None:
    assert server.ask("GET", "/version")[2] == {"version": __version__}
    prompt = [9 + n % 60 for n in range(200)]

    def cached() -> int:
        usage = server.complete(prompt=prompt, max_tokens=1)[2]["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    cached()
    assert cached() >= 128
    with Stream(server) as stream:  # What runs goes on.
        assert stream.event()
        status, _, said = server.ask("POST", "/reset_prefix_cache")
        assert (status, said["cleared_blocks"] >= 3) == (200, True)
        assert cached() == 0
        assert stream.event()


def test_models_are_listed_and_described(client: Any, llm: LLM) -> None:
    [model] = client.models.list().data
    assert (model.id, model.object, model.max_model_len) == ("shipped", "model", llm.spec.max_length)
    assert client.models.retrieve("shipped").id == "shipped"
    with pytest.raises(openai.NotFoundError, match="'other'"):
        client.models.retrieve("other")


def test_tokens_there_and_back(server: Server, llm: LLM) -> None:
    text = "A café, 東京 and <|end|> too"
    status, _, said = server.ask("POST", "/tokenize", {"prompt": text, "return_token_strs": True})
    assert (status, said["tokens"], said["count"]) == (200, llm.encode(text), len(llm.encode(text)))
    assert len(said["token_strs"]) == said["count"]
    status, _, back = server.ask("POST", "/detokenize", {"model": "shipped", "tokens": said["tokens"]})
    assert (status, back) == (200, {"prompt": llm.decode(said["tokens"])})
    _, _, talk = server.ask("POST", "/tokenize", {"messages": TALK})
    assert talk["tokens"] == llm.tokenizer.encode_chat(TALK)
    _, _, talk = server.ask("POST", "/tokenize", {"messages": TALK, "add_generation_prompt": False})
    assert talk["tokens"] == llm.tokenizer.encode_chat(TALK, add_generation_prompt=False)


# ---- refusals

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
REFUSED: list[tuple[str, Any, int, str | None]] = [
    (CHAT, b"", 400, None),
    (CHAT, b"{", 400, None),
    (CHAT, b"[]", 400, None),
    (CHAT, b'{"model": "shipped", "messages": [{"role": "user", "content": "\xff"}]}', 400, None),
    (CHAT, b'{"model": "shipped", "messages": [{"role": "user", "content": "\\ud800"}]}', 400, None),
    (TEXT, b'{"model": "shipped", "prompt": ' + b"[" * 5000, 400, None),
    (CHAT, {"messages": TALK}, 400, "model"),
    (CHAT, {"model": "shipped"}, 400, "messages"),
    (CHAT, {"model": "shipped", "messages": []}, 400, "messages"),
    (CHAT, {"model": "shipped", "messages": [{"content": "a"}]}, 400, "role"),
    (CHAT, {"model": "shipped", "messages": [*TALK, {"role": "user"}]}, 400, "messages[1].content"),
    (
        CHAT,
        {"model": "shipped", "messages": [{"role": "user", "content": [{"type": "image_url", "url": "a"}]}]},
        400,
        "messages",
    ),
    (CHAT, {"model": "other", "messages": TALK}, 404, "model"),
    (CHAT, {"model": 1, "messages": TALK}, 400, "model"),
    (CHAT, {"model": "shipped", "messages": TALK, "tools": []}, 400, "tools"),
    (CHAT, {"model": "shipped", "messages": TALK, "stream": "yes"}, 400, "stream"),
    (
        CHAT,
        {"model": "shipped", "messages": TALK, "stream_options": {"include_usage": True}},
        400,
        "stream_options",
    ),
    (CHAT, {"model": "shipped", "messages": TALK, "top_logprobs": 2}, 400, "top_logprobs"),
    (CHAT, {"model": "shipped", "messages": TALK, "logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
    (
        CHAT,
        {"model": "shipped", "messages": TALK, "response_format": {"type": "xml"}},
        400,
        "response_format",
    ),
    (CHAT, {"model": "shipped", "messages": TALK, "max_completion_tokens": 0}, 400, "max_completion_tokens"),
    (CHAT, {"model": "shipped", "messages": TALK, "max_tokens": 0}, 400, "max_tokens"),
    (
        CHAT,
        {"model": "shipped", "messages": TALK, "chat_template_kwargs": {"messages": []}},
        400,
        "chat_template_kwargs",
    ),
    (
        CHAT,
        {"model": "shipped", "messages": TALK, "chat_template_kwargs": {"add_generation_prompt": 1}},
        400,
        "chat_template_kwargs",
    ),
    (
        CHAT,
        {"model": "shipped", "messages": TALK, "chat_template_kwargs": {"self": 1}},
        400,
        "chat_template_kwargs",
    ),
    (TEXT, {"model": "shipped"}, 400, "prompt"),
    (TEXT, {"model": "shipped", "prompt": []}, 400, "prompt"),
    (TEXT, {"model": "shipped", "prompt": [[]]}, 400, None),
    (TEXT, {"model": "shipped", "prompt": [1, "a"]}, 400, "prompt"),
    (TEXT, {"model": "shipped", "prompt": [True]}, 400, "prompt"),
    (TEXT, {"model": "shipped", "prompt": [-1]}, 400, None),
    (TEXT, {"model": "shipped", "prompt": [10**40]}, 400, None),
    (TEXT, {"model": "shipped", "prompt": ["a", [4096]]}, 400, None),
    (TEXT, {"model": "shipped", "prompt": ["a"] * 257}, 400, "prompt"),
    (TEXT, {"model": "shipped", "prompt": "a", "max_tokens": 32_768}, 400, None),
    (TEXT, {"model": "shipped", "prompt": [5] * 40_000}, 400, None),
    (TEXT, {"model": "shipped", "prompt": "a", "temperature": -1}, 400, "temperature"),
    (TEXT, b'{"model": "shipped", "prompt": "a", "temperature": 1e999}', 400, "temperature"),
    (TEXT, b'{"model": "shipped", "prompt": "a", "temperature": NaN}', 400, None),
    (TEXT, {"model": "shipped", "prompt": "a", "top_p": 0}, 400, "top_p"),
    (TEXT, {"model": "shipped", "prompt": "a", "n": 0}, 400, "n"),
    (TEXT, {"model": "shipped", "prompt": "a", "n": ROOM + 1}, 400, "n"),
    (TEXT, {"model": "shipped", "prompt": ["a"] * 4, "n": 2}, 400, "n"),
    (TEXT, {"model": "shipped", "prompt": ["a"] * 256, "n": 65_536}, 400, "n"),
    (TEXT, {"model": "shipped", "prompt": "a", "seed": 10**40}, 400, "seed"),
    (TEXT, {"model": "shipped", "prompt": "a", "logprobs": 21}, 400, "logprobs"),
    (TEXT, {"model": "shipped", "prompt": "a", "logprobs": -1}, 400, "logprobs"),
    (TEXT, {"model": "shipped", "prompt": "a", "echo": True, "logprobs": 1, "stream": True}, 400, "echo"),
    (TEXT, {"model": "shipped", "prompt": "a", "prompt_logprobs": 1, "stream": True}, 400, "prompt_logprobs"),
    (
        TEXT,
        {"model": "shipped", "prompt": "a", "max_tokens": 0, "echo": True, "stream": True},
        400,
        "max_tokens",
    ),
    (TEXT, {"model": "shipped", "prompt": "a", "prompt_logprobs": 21}, 400, "prompt_logprobs"),
    (TEXT, {"model": "shipped", "prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
    (TEXT, {"model": "shipped", "prompt": "a", "temperature": 9}, 400, "temperature"),
    (TEXT, {"model": "shipped", "prompt": "a", "top_k": -2}, 400, "top_k"),
    (TEXT, {"model": "shipped", "prompt": "a", "truncate_prompt_tokens": 0}, 400, "truncate_prompt_tokens"),
    (
        TEXT,
        {"model": "shipped", "prompt": "a", "guided_regex": "a", "guided_choice": ["a"]},
        400,
        "guided_regex",
    ),
    (
        TEXT,
        {"model": "shipped", "prompt": "a", "guided_regex": "a", "structured_outputs": {"regex": "a"}},
        400,
        "guided_regex",
    ),
    (CHAT, {"model": "shipped", "messages": [{"role": "bot", "content": "a"}]}, 400, "messages"),
    (CHAT, {"model": "shipped", "messages": TALK, "modalities": ["audio"]}, 400, "modalities"),
    (
        CHAT,
        {"model": "shipped", "messages": TALK, "continue_final_message": True},
        400,
        "continue_final_message",
    ),
    (TEXT, {"model": "shipped", "prompt": "a", "best_of": 2}, 400, "best_of"),
    (TEXT, {"model": "shipped", "prompt": "a", "suffix": "b"}, 400, "suffix"),
    (TEXT, {"model": "shipped", "prompt": "a", "stop": ["b", ""]}, 400, "stop"),
    (TEXT, {"model": "shipped", "prompt": "a", "stop": ["b"] * 33}, 400, "stop"),
    (TEXT, {"model": "shipped", "prompt": "a", "stop": "b" * 1025}, 400, "stop"),
    (TEXT, {"model": "shipped", "prompt": "a", "logit_bias": {"x": 1}}, 400, "logit_bias"),
    (TEXT, {"model": "shipped", "prompt": "a", "logit_bias": {"4096": 1}}, 400, "logit_bias"),
    (TEXT, {"model": "shipped", "prompt": "a", "stop_token_ids": [-1]}, 400, "stop_token_ids"),
    (TEXT, {"model": "shipped", "prompt": "a", "min_tokens": 9, "max_tokens": 3}, 400, "min_tokens"),
    (TEXT, {"model": "shipped", "prompt": "a", "timeout": 0}, 400, "timeout"),
    (TEXT, {"model": "shipped", "prompt": "a", "priority": 2**40}, 400, "priority"),
    (TEXT, {"model": "shipped", "prompt": "a", "priority": 0.5}, 400, "priority"),
    ("/tokenize", {}, 400, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": TALK}, 400, "prompt"),
    ("/tokenize", {"messages": TALK, "chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs"),
    ("/tokenize", {"messages": []}, 400, None),
    ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
    ("/detokenize", {"tokens": [4096]}, 400, None),
    ("/detokenize", {"tokens": ["a"]}, 400, "tokens"),
    ("/nowhere", {}, 404, None),
    ("/v1/models", {}, 405, None),
]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"), REFUSED, ids=[str(number) for number in range(len(REFUSED))]
)
def test_what_cannot_be_served_is_refused_by_name(
    server: Server, path: str, body: Any, status: int, param: str | None
) -> None:
    found, _, said = server.ask("POST", path, body)
    assert (found, said["error"]["param"]) == (status, param), said
    assert said.keys() == {"error"}
    assert said["error"].keys() == {"message", "type", "param", "code"}
    assert said["error"]["type"] == "invalid_request_error"
    assert 10 < len(said["error"]["message"]) < 500
    assert "\n" not in said["error"]["message"]


def test_a_request_that_is_too_long_is_told_its_own_fields_and_the_servers_flags(server: Server) -> None:
    status, _, said = server.ask("POST", TEXT, {"model": "shipped", "prompt": "a", "max_tokens": 10**6})
    assert (status, said["error"]["code"]) == (400, "context_length_exceeded")
    message = said["error"]["message"]
    assert "; shorten the prompt or lower max_tokens, " in message
    assert "or let the server's operator allow a larger --max-length" in message


def test_openais_client_raises_what_it_is_told(client: Any, server: Server) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=TALK)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="shipped", prompt="a", temperature=2000)
    assert bad.value.param == "temperature"
    for method, path in (("GET", CHAT), ("PUT", CHAT), ("DELETE", "/v1/models"), ("POST", "/health")):
        status, headers, said = server.ask(method, path)
        assert (status, said["error"]["type"]) == (405, "invalid_request_error")
        assert headers["allow"]
    for path in ("/v1", "/%ff", "/%ed%a0%80", "/a?b=%ff", f"/{'a' * 3000}"):
        status, _, said = server.ask("GET", path)
        assert (status, said["error"]["param"]) == (404, None)
        assert len(said["error"]["message"]) < 300
    assert [server.ask("GET", path)[0] for path in ("/health", "/ready")] == [200, 200]


def test_keys_are_asked_for_and_bodies_and_times_are_limited(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("first-key\n\nzwölf\n", encoding="utf-8")
    limits = ("--max-body", "2000", "--request-timeout", "3")
    flags = (
        "--api-keys",
        str(keys),
        *limits,
        "--name",
        "mine",
        "--name",
        "a/b",
        "--quiet",
        "--port",
        "0",
        *FLAGS,
    )
    with serving(tmp_path, *flags) as server:
        server.wait()
        assert server.name == "mine"
        key, kind = {"Authorization": "Bearer first-key"}, {"Content-Type": "application/json"}
        wrong_ones = (
            "Bearer wrong",
            "first-key",
            "Basic first-key",
            "Bearer",
            "Bearer first",
            "Bearer first-key2",
        )
        for wrong in ({}, *({"Authorization": one} for one in wrong_ones), {"X-Forwarded-Prefix": "/health"}):
            for method, path in (("GET", "/v1/models"), ("POST", TEXT), ("POST", "/tokenize")):
                status, _, said = server.ask(method, path, b"{" if method == "POST" else None, wrong)
                assert (status, said["error"]["code"]) == (401, "invalid_api_key"), wrong
        for host in ("x/health?", "x/health#"):
            assert server.ask("GET", "/v1/models", headers=key | {"Host": host})[0] == 400
        assert [server.ask("GET", path)[0] for path in ("/health", "/ready")] == [200, 200]
        assert server.ask("GET", "/v1/models", headers={"Authorization": "bearer zwölf".encode()})[0] == 200  # type: ignore[dict-item]
        with client_of(server, "first-key") as client:
            assert [model.id for model in client.models.list()] == ["mine", "a/b"]
            assert client.models.retrieve("a/b").id == "a/b"
            assert client.completions.create(model="a/b", prompt="a", max_tokens=2).model == "a/b"
        with client_of(server, "wrong") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
        asked = {"model": "mine", "prompt": "a", "max_tokens": 2, "user": ""}
        room = 2000 - len(json.dumps(asked))
        assert server.ask("POST", TEXT, asked | {"user": "u" * room}, key)[0] == 200
        for size in (room + 1, 1 << 20):
            status, _, said = server.ask("POST", TEXT, asked | {"user": "u" * size}, key)
            assert (status, said["error"]["type"]) == (413, "invalid_request_error")
        connection = server.connection()
        try:  # In pieces, of a length that is not told before.
            connection.request("POST", TEXT, iter([b"[" * 1000] * 3), key | kind, encode_chunked=True)
            assert connection.getresponse().status == 413
            connection.close()
            connection.request(
                "POST",
                TEXT,
                iter([json.dumps(asked).encode()]),
                key | {"Content-Type": "application/json"},
                encode_chunked=True,
            )
            assert connection.getresponse().status == 200
        finally:
            connection.close()
        status, _, said = server.ask(
            "POST", TEXT, ENDLESS | {"model": "mine", "stream": False, "timeout": 1000}, key
        )
        assert (status, said["error"]["code"]) == (504, "deadline_exceeded")
        server.signal(signal.SIGINT)
        assert server.ended() == 0
        began, late, end = server.said().splitlines()
        assert end == "stopped serving mine"
        assert began == f"serving mine at {server.url}"
        assert late.endswith("error=DeadlineError")


# ---- many clients


def test_beyond_the_queue_is_429_and_afterwards_served_again(server: Server, story: Completion) -> None:
    with full(server) as streams:
        status, headers, said = server.complete()
        assert (status, said["error"]["type"]) == (429, "rate_limit_error")
        assert int(headers["retry-after"]) >= 1
        assert server.complete(prompt=["a", "b"], n=2)[0] == 429
        with client_of(server) as client, pytest.raises(openai.RateLimitError):
            client.completions.create(model="shipped", prompt=STORY, stream=True)
        streams.pop().close()  # One more has room, two have not.
        until(lambda: is_taken(server))
        assert server.complete(prompt=["a", "b"])[0] == 429
        assert all(stream.event()["choices"][0]["index"] == 0 for stream in streams[:4])
    until(lambda: right(server, story))


def test_what_takes_longer_than_it_may_is_ended_whole_and_streamed(server: Server, story: Completion) -> None:
    body = ENDLESS | {"timeout": 0.3, "priority": 1}
    status, _, said = server.ask("POST", TEXT, body | {"stream": False})
    assert (status, said["error"]["type"], said["error"]["code"]) == (
        504,
        "timeout_error",
        "deadline_exceeded",
    )
    with Stream(server, body) as stream:
        *pieces, last = stream.events()
    assert "0.3 seconds" in last["error"]["message"]
    assert "".join(piece["choices"][0]["text"] for piece in pieces)
    assert right(server, story)


def test_clients_that_disconnect_at_any_moment_leave_nothing(server: Server, story: Completion) -> None:
    place = urlsplit(server.url)

    def misbehave(seed: int) -> int:
        rng = random.Random(seed)
        n, prompt = rng.choice((1, 1, 2)), rng.choice((STORY, ["a", "b"], [9 + seed] * rng.choice((5, 3000))))
        body = json.dumps(ENDLESS | {"stream": rng.random() < 0.6, "n": n, "prompt": prompt}).encode()
        head = f"POST {TEXT} HTTP/1.1\r\n{HEAD}Content-Length: {len(body)}\r\n\r\n".encode()
        with socket.create_connection((place.hostname, place.port), LONG) as connection:
            sent = head + body
            connection.sendall(sent[: rng.randrange(len(sent))] if rng.random() < 0.2 else sent)
            connection.settimeout(rng.choice((0.001, 0.05, 0.3, 2.0)))
            got = 0
            with suppress(TimeoutError):
                for _ in range(rng.choice((0, 1, 1, 5))):
                    got += len(connection.recv(rng.choice((1, 100, 4000))))
            if rng.random() < 0.5:  # A reset instead of an end.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return got

    with ThreadPoolExecutor(6) as crowd:
        assert sum(got > 0 for got in crowd.map(misbehave, range(40))) > 5
    with full(server):
        pass
    until(lambda: right(server, story))


def test_a_slow_reader_holds_up_nobody_and_misses_nothing(
    server: Server, llm: LLM, story: Completion
) -> None:
    asked = {
        "model": "shipped",
        "messages": TALK,
        "n": 3,
        "seed": 3,
        "max_tokens": 120,
        "ignore_eos": True,
        "stream": True,
    }
    body = json.dumps(asked | {"logprobs": True, "top_logprobs": 20}).encode()
    place = urlsplit(server.url)
    offline = llm.generate([TALK], SamplingParams(n=3, seed=3, max_tokens=120, ignore_eos=True))[0]
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.settimeout(LONG)
        slow.connect((place.hostname, place.port))
        slow.sendall(
            f"POST {CHAT} HTTP/1.1\r\n{HEAD}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        for _ in range(3):
            assert right(server, story)
        with full(server):  # Its outputs are complete, though nobody has read them.
            pass
        answer = http.client.HTTPResponse(slow)
        answer.begin()
        chunks = [
            json.loads(line[6:]) for line in answer.read().split(b"\n\n") if line.startswith(b"data: {")
        ]
    texts = ["", "", ""]
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["delta"].get("content", "")
    assert texts == [output.text for output in offline.outputs]


def test_a_client_that_goes_while_its_prompt_is_read_takes_no_place(
    server: Server, story: Completion
) -> None:
    body = json.dumps(ENDLESS | {"prompt": "far away " * 6_000}).encode()
    place = urlsplit(server.url)
    for _ in range(2 * ROOM):
        with socket.create_connection((place.hostname, place.port), LONG) as connection:
            connection.sendall(
                f"POST {TEXT} HTTP/1.1\r\n{HEAD}Content-Length: {len(body)}\r\n\r\n".encode() + body
            )
    until(lambda: right(server, story))
    with full(server):
        pass


def _mutated(rng: random.Random) -> tuple[str, bytes]:
    """A request with something wrong in it; never one that takes long."""
    path, body = rng.choice(
        [
            (
                CHAT,
                {
                    "model": "shipped",
                    "messages": TALK,
                    "max_tokens": 2,
                    "n": 1,
                    "stream": False,
                    "logit_bias": {"5": 1},
                },
            ),
            (
                TEXT,
                {
                    "model": "shipped",
                    "prompt": STORY,
                    "max_tokens": 2,
                    "stop": ["a"],
                    "temperature": 0.5,
                    "seed": 1,
                },
            ),
            ("/tokenize", {"prompt": STORY, "model": "shipped"}),
            ("/detokenize", {"tokens": [5, 6, 7]}),
        ]
    )
    odd: list[Any] = [
        None,
        True,
        -1,
        0,
        3.5,
        2**63,
        -(2**64),
        "",
        "x" * 5000,
        "\x00",
        [],
        [[]],
        [None],
        {},
        {"a": {"b": []}},
        [{}],
        [[{}]],
    ]
    if rng.random() < 0.6:
        name = rng.choice(
            [
                *(key for key in body if key != "max_tokens"),
                "stream_options",
                "top_p",
                "name",
                "logprobs",
                "echo",
                "user",
            ]
        )
        return path, json.dumps(body | {name: rng.choice(odd)}).encode()
    raw = bytearray(json.dumps(body).encode())
    for _ in range(rng.choice((1, 2, 8))):
        raw[rng.randrange(len(raw))] = rng.choice((rng.randrange(256), *b'"{}[],:\\0'))
    return path, bytes(raw[: rng.randrange(len(raw))] if rng.random() < 0.3 else raw)


def test_no_body_makes_the_server_fail(server: Server, story: Completion) -> None:
    rng, found = random.Random(7), []
    for _ in range(120):
        path, body = _mutated(rng)
        status, _, said = server.ask("POST", path, body)
        assert status < 500, (path, body, said)
        assert status == 200 or said["error"]["message"], (path, body, said)
        found.append(status)
    assert {200, 400} <= set(found)
    assert right(server, story)


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x00\xa5\x01\x00",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /v1/models?\xff HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /nowhere?\xff HTTP/1.1\r\nHost: \xff\r\nAuthorization: Bearer \xff\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\n" + RAW_HEAD + b"Content-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\n"
        + RAW_HEAD
        + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\n" + RAW_HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n",
        b"GET /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: "
        b"websocket\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /nowhere HTTP/1.1\r\nHost: "
        b"localhost\r\nConnection: close\r\n\r\n",
        b"HEAD /health HTTP/1.0\r\n\r\n",
    ],
)
def test_no_bytes_make_the_server_fail(server: Server, story: Completion, sent: bytes) -> None:
    place = urlsplit(server.url)
    with socket.create_connection((place.hostname, place.port), LONG) as connection:
        connection.sendall(sent)
        first = connection.recv(1 << 16)
        connection.shutdown(socket.SHUT_WR)
        assert not first.startswith(b"HTTP/1.1 5"), first
    assert right(server, story)


# ---- the end


def test_a_signal_lets_requests_end_and_takes_no_new_ones(model: Path, tmp_path: Path, llm: LLM) -> None:
    whole = {"model": "shipped", "prompt": "The sea", "temperature": 0, "max_tokens": 120, "ignore_eos": True}
    offline = llm.generate("The sea", greedy(max_tokens=120, ignore_eos=True))[0].text
    with (
        serving(tmp_path, str(model), "--port", "0", "--patience", "100", *FLAGS) as server,
        ThreadPoolExecutor(1) as other,
    ):
        server.wait()
        early = other.submit(server.insist, whole)
        until(lambda: server.complete(prompt=["a"] * ROOM, max_tokens=1)[0] == 429)  # It is there.
        with ExitStack() as opened:  # Some run, some wait, and one is there until the end.
            endless = opened.enter_context(Stream(server))
            streams = [opened.enter_context(Stream(server, whole | {"stream": True})) for _ in range(4)]
            texts = [streams[0].event()["choices"][0]["text"]]
            server.signal(signal.SIGTERM)
            until(lambda: server.ask("GET", "/ready")[0] == 503)
            status, headers, said = server.complete()
            assert (status, said["error"]["type"]) == (503, "server_error")
            assert int(headers["retry-after"]) >= 1
            with (
                client_of(server) as client,
                pytest.raises(openai.InternalServerError, match="shutting down"),
            ):
                client.chat.completions.create(model="shipped", messages=TALK)
            assert server.ask("GET", "/health")[0] == 200
            texts += [event["choices"][0]["text"] for event in streams[0].events()]
            assert "".join(texts) == offline
            for stream in streams[1:]:
                assert "".join(event["choices"][0]["text"] for event in stream.events()) == offline
            assert endless.event()["choices"]
        status, _, said = early.result()
        assert (status, said["choices"][0]["text"]) == (200, offline)
        assert server.ended() == 0
        assert "Traceback" not in server.said()


def test_a_second_signal_ends_requests_and_patience_is_finite(tmp_path: Path) -> None:
    for number, (patience, signals) in enumerate((("1000", 2), ("0.1", 1))):
        folder = tmp_path / str(number)
        folder.mkdir()
        with (
            serving(folder, "--port", "0", "--patience", patience, *FLAGS) as server,
            ThreadPoolExecutor(1) as other,
        ):
            server.wait()
            with Stream(server) as stream, Stream(server) as unread:
                whole = other.submit(server.insist, ENDLESS | {"stream": False})
                until(lambda stream=stream: stream.event() is not None)
                until(
                    lambda server=server: server.complete(prompt=["a"] * 5, max_tokens=1)[0] == 429
                )  # All three are there.
                server.signal(signal.SIGTERM)
                if signals == 2:
                    until(lambda server=server: server.ask("GET", "/ready")[0] == 503)
                    server.signal(signal.SIGINT)
                assert "shut down" in stream.events()[-1]["error"]["message"]
                assert whole.result()[0] == 503
                assert server.ended() == 0
                assert unread.status == 200
            assert "Traceback" not in server.said()


HELD = """
import os, sys, time

def hold(event, arguments):
    opens = event == "open" and str(arguments[0]).endswith("/tokenizer.json")
    while opens and not os.path.exists(os.environ["PENSTOCK_TEST_GO"]):
        time.sleep(0.01)

sys.addaudithook(hold)
"""
"""A process that opens no tokenizer before a file is there."""


def test_while_it_loads_it_is_alive_and_not_ready_and_may_be_ended(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "sitecustomize.py").write_text(HELD)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    for signals in (1, 2):
        go = tmp_path / str(signals) / "go"
        go.parent.mkdir()
        environment = {"PYTHONPATH": path, "PENSTOCK_TEST_GO": str(go)}
        with serving(
            go.parent, "--name", "model", "--port", str(port), *FLAGS, environment=environment
        ) as server:
            server.url = f"http://127.0.0.1:{port}"

            def alive(server: Server = server) -> bool:
                with suppress(ConnectionError):
                    return server.ask("GET", "/health")[0] == 200
                return False

            until(alive)
            assert server.ask("GET", "/ready")[2] == {"status": "loading"}
            for method, path, body in (
                ("GET", "/v1/models", None),
                ("POST", TEXT, {"model": "model", "prompt": "a"}),
            ):
                status, _, said = server.ask(method, path, body)
                assert (status, said["error"]["code"]) == (503, "unavailable")
            for _ in range(signals):
                server.signal(signal.SIGTERM)
                assert alive() or signals == 2
            if signals == 1:
                go.touch()
            assert server.ended() == signals - 1
            assert "serving" not in server.said().replace("stopped serving", "")
            assert "Traceback" not in server.said()


def test_a_rank_that_is_killed_ends_the_server_and_is_told_to_all(tmp_path: Path) -> None:
    with (
        serving(tmp_path, "--port", "0", "--tensor-parallel", "2", *FLAGS) as server,
        ThreadPoolExecutor(1) as other,
    ):
        server.wait()
        children = psutil.Process(server.process.pid).children(recursive=True)
        [follower] = [child for child in children if "penstock.parallel.seat" in " ".join(child.cmdline())]
        with Stream(server) as stream:
            assert stream.event()["choices"]
            whole = other.submit(server.insist, ENDLESS | {"stream": False})
            with Stream(server) as later:
                assert later.status == 200
            follower.send_signal(signal.SIGKILL)
            assert "rank 1 of 2" in stream.events()[-1]["error"]["message"]
            status, _, said = whole.result()
            assert (status, said["error"]["type"]) == (503, "server_error")
            assert "rank 1 of 2" in said["error"]["message"]
        with suppress(OSError):
            assert server.ask("GET", "/ready")[0] == 503
        assert server.ended() == 2
        assert re.search(r"^penstock: error: rank 1 of 2 was killed by SIGKILL", server.said(), re.MULTILINE)
        _, alive = psutil.wait_procs(children, LONG)
        assert alive == []


def test_a_rank_that_is_lost_while_nobody_asks_is_noticed(tmp_path: Path) -> None:
    with serving(tmp_path, "--port", "0", "--tensor-parallel", "2", *FLAGS) as server:
        server.wait()
        assert server.complete()[0] == 200
        children = psutil.Process(server.process.pid).children(recursive=True)
        [follower] = [child for child in children if "penstock.parallel.seat" in " ".join(child.cmdline())]
        follower.kill()
        assert server.ended() == 2
        assert re.search(r"^penstock: error: rank 1 of 2 was killed by SIGKILL", server.said(), re.MULTILINE)


def test_a_signal_to_all_processes_lets_requests_end_too(
    model: Path, tmp_path: Path, story: Completion
) -> None:
    """As a service manager sends it, to followers as well."""
    with serving(tmp_path, str(model), "--port", "0", "--tensor-parallel", "2", *FLAGS) as server:
        server.wait()
        with Stream(server, ENDLESS | {"prompt": STORY, "max_tokens": 80, "temperature": 0}) as stream:
            texts = [stream.event()["choices"][0]["text"]]
            os.killpg(server.process.pid, signal.SIGTERM)
            texts += [event["choices"][0]["text"] for event in stream.events()]
        assert "".join(texts).startswith(story.text)
        assert len(texts) > 40
        assert server.ended() == 0


# ---- what is counted


def test_metrics_tell_what_was_served(server: Server) -> None:
    prompt = f"{STORY} " * 40
    server.complete(prompt=prompt)
    before = counted(server)
    assert server.complete(prompt=prompt, n=2, ignore_eos=True)[0] == 200
    assert server.complete(max_tokens=-1)[0] == 400
    with Stream(server) as stream:
        assert stream.event()["choices"]
        assert counted(server)["num_requests_running",] >= 1
    until(lambda: counted(server)["request_abandoned_total",] == before["request_abandoned_total",] + 1)
    until(lambda: counted(server)["num_requests_running",] == 0)
    after = counted(server)
    more = {name: value - before.get(name, 0) for name, value in after.items()}
    assert more["request_success_total", "length"] == 2
    assert more["e2e_request_latency_seconds_count",] == more["time_per_output_token_seconds_count",] == 1
    assert more["time_to_first_token_seconds_count",] == 2
    assert more["generation_tokens_total",] > 2 * COUNT
    assert 100 < more["prefix_cache_hits_total", "device"] < more["prompt_tokens_total",] < 400
    assert more["http_requests_total", "/v1/completions", "400"] == 1
    assert more["http_requests_total", "/v1/completions", "200"] == 2
    assert 0 <= after["kv_cache_usage_perc",] < 1
    assert after["weights_bytes", "device"] > 10**7


@pytest.mark.parametrize("wrong", ["port", "host", "model", "keys"])
def test_what_cannot_be_started_is_one_line_and_exit_code_2(
    tmp_path: Path, server: Server, wrong: str
) -> None:
    flags = {
        "port": ("--port", server.url.rsplit(":", 1)[1]),
        "host": ("--host", "a" * 300, "--without-keys"),
        "model": (str(tmp_path / "nowhere"),),
        "keys": ("--api-keys", str(tmp_path / "nowhere")),
    }[wrong]
    with serving(tmp_path, "--port", "0", *FLAGS, *flags) as other:
        assert other.ended() == 2
        *remarks, line = other.said().splitlines()
        assert line.startswith("penstock: error: ")
        assert len(remarks) == (wrong == "host")  # Whoever reaches it may use it.
