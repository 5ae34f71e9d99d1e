"""Clients that others have written, each with a server of the shipped model: LangChain, litellm, lm-eval, and
the very requests that Open WebUI's backend makes. A client is skipped where its package is not installed."""

import importlib
import json
import signal
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="needs the extra `serve`")
pytest.importorskip("llguidance", reason="needs the extra `grammar`")

from penstock import LLM, SamplingParams
from penstock.base.config import SHIPPED_MODEL
from servers import FLAGS, SETTINGS, STORY, TALK, Server, serving

pytestmark = pytest.mark.filterwarnings("ignore")  # They have warnings of their own.
MODEL, FEW = "shipped", 6
SCHEMA = {
    "title": "Pet",
    "description": "An animal in a house.",
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "legs": {"const": 4}},
    "required": ["kind", "legs"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("server"), "--port", "0", *FLAGS) as server:
        yield server.wait()
        server.signal(signal.SIGTERM)
        assert server.ended() == 0
        assert "Traceback" not in server.said()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(None, **SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def answer(llm: LLM) -> str:
    """What the model says to TALK."""
    return llm.chat(TALK, SamplingParams(temperature=0, max_tokens=FEW)).text


def needs(name: str, package: str) -> Any:
    """A client's module. With all that they need, the three are nine hundred megabytes."""
    why = f"needs {package}; pip install langchain-openai litellm lm-eval[api] takes nine hundred megabytes"
    pytest.importorskip(name, reason=why)
    return importlib.import_module(name)


def test_langchain_answers_streams_and_keeps_to_a_schema(
    server: Server, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LANGSMITH_TRACING", "false")
    client = needs("langchain_openai", "langchain-openai").ChatOpenAI(
        model=MODEL, base_url=f"{server.url}/v1", api_key="none", temperature=0, max_tokens=FEW, max_retries=0
    )
    talk = [("user", TALK[0]["content"])]
    whole = client.invoke(talk)
    assert whole.content == answer
    assert whole.usage_metadata["output_tokens"] == FEW
    assert whole.response_metadata["finish_reason"] == "length"
    assert "".join(piece.content for piece in client.stream(talk)) == answer
    assert [one.content for one in client.batch([talk, talk])] == [answer, answer]
    structured = client.model_copy(update={"max_tokens": 40}).with_structured_output(
        SCHEMA, method="json_schema"
    )
    pet = structured.invoke(talk)
    assert pet["legs"] == 4
    assert pet["kind"] in ("cat", "dog")


def test_litellm_speaks_all_three_protocols(
    server: Server, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    client = needs("litellm", "litellm")
    usual = {"messages": TALK, "api_key": "none", "max_tokens": FEW, "temperature": 0, "num_retries": 0}
    for provider, base in (
        ("openai", f"{server.url}/v1"),
        ("ollama_chat", server.url),
        ("anthropic", server.url),
    ):
        asked = usual | {"model": f"{provider}/{MODEL}", "api_base": base}
        whole = client.completion(**asked)
        assert whole.choices[0].message.content == answer, provider
        assert whole.usage.completion_tokens == FEW
        pieces = [piece.choices[0].delta.content or "" for piece in client.completion(**asked, stream=True)]
        assert "".join(pieces) == answer, provider
        assert len(pieces) > 2
    with pytest.raises(client.exceptions.NotFoundError, match="does not exist here"):
        client.completion(**usual, model="openai/nope", api_base=f"{server.url}/v1")


def test_lm_eval_scores_a_task_as_the_model_does(
    server: Server, llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the log-probabilities that the server tells of a prompt's tokens. The task's data are a file."""
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    evaluate = needs("lm_eval", "lm-eval").simple_evaluate
    tasks = needs("lm_eval.tasks", "lm-eval")
    needs("tenacity", "lm-eval")
    asked = [("Once upon a", [" time", " stone"]), ("The sun was", [" seven", " shining"])]
    data = [{"text": text, "choices": choices, "label": 0} for text, choices in asked]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, data)))
    task = {
        "task": "beginnings", "dataset_path": "json", "output_type": "multiple_choice", "test_split": "test",
        "dataset_kwargs": {
            "data_files": {"test": str(tmp_path / "data.jsonl")}, "cache_dir": str(tmp_path / "cache")
        },
        "doc_to_text": "{{text}}", "doc_to_choice": "{{choices}}", "doc_to_target": "{{label}}",
        "target_delimiter": "", "metric_list": [{"metric": "acc"}],
    }  # fmt: skip
    (tmp_path / "beginnings.yaml").write_text(json.dumps(task))
    found = evaluate(
        model="local-completions",
        model_args={
            "model": MODEL, "base_url": f"{server.url}/v1/completions", "tokenizer": str(SHIPPED_MODEL),
            "tokenizer_backend": "huggingface", "max_retries": 1, "max_length": 512,
        },
        tasks=["beginnings"],
        task_manager=tasks.TaskManager(include_path=str(tmp_path), include_defaults=False),
        bootstrap_iters=0,
    )  # fmt: skip
    samples = sorted(found["samples"]["beginnings"], key=lambda one: one["doc_id"])
    told = [float(response[0][0]) for one in samples for response in one["resps"]]
    assert told == pytest.approx(
        [one for text, choices in asked for one in scores(llm, text, choices)], abs=1e-3
    )
    assert found["results"]["beginnings"]["acc,none"] == 0.5


def scores(llm: LLM, text: str, choices: list[str]) -> Iterator[float]:
    """The log-probability of each choice behind a text, with no mark at the beginning: lm-eval sends none."""
    params, encode = SamplingParams(max_tokens=1, prompt_logprobs=0), llm.tokenizer.encode
    for choice in choices:
        tokens, before = encode(text + choice, special=False), encode(text, special=False)
        [found] = llm.generate([tokens], params)
        assert found.prompt_logprobs is not None
        yield sum(
            one.logprob for one in found.prompt_logprobs[len(before) - len(tokens) :] if one is not None
        )


# ---- Open WebUI: what its backend sends, with its headers

SENDER = {
    "Content-Type": "application/json",
    "X-OpenWebUI-User-Name": "A%20Person",
    "X-OpenWebUI-User-Id": "5b6f",
    "X-OpenWebUI-User-Email": "a@example.org",
    "X-OpenWebUI-User-Role": "admin",
}


def sent(server: Server, method: str, path: str, body: Any = None) -> Any:
    status, _, said = server.ask(method, path, body, SENDER)
    assert status == 200, said
    return said


def test_open_webui_finds_the_server_and_its_models(server: Server) -> None:
    version = sent(server, "GET", "/api/version")["version"]
    assert len([int(part) for part in version.split(".")]) == 3, "the lowest of several is sought by numbers"
    [listed] = sent(server, "GET", "/api/tags")["models"]
    assert (listed["model"], listed["name"]) == (MODEL, MODEL)
    [there] = sent(server, "GET", "/api/ps")["models"]
    assert there["model"] == MODEL
    assert datetime.fromisoformat(there["expires_at"]).timestamp() > 0
    assert sent(server, "POST", "/api/show", {"model": MODEL})["details"]["family"] == "llama"
    assert [one["id"] for one in sent(server, "GET", "/v1/models")["data"]] == [MODEL]
    sent(server, "POST", "/api/generate", {"model": MODEL, "keep_alive": 0, "prompt": ""})  # To unload it.


def test_open_webui_chats_as_with_ollama(server: Server, answer: str) -> None:
    options = {"temperature": 0.0, "num_predict": FEW, "num_ctx": 2048, "num_gpu": 0, "num_thread": 2}
    asked = {"model": MODEL, "messages": TALK, "options": options}
    *pieces, last = map(json.loads, sent(server, "POST", "/api/chat", asked | {"stream": True}).splitlines())
    assert "".join(one["message"]["content"] for one in pieces) == answer
    assert not any(one["done"] for one in pieces)
    assert last["done"]
    assert (last["done_reason"], last["eval_count"]) == ("length", FEW)
    assert last["eval_duration"] > 0
    whole = sent(server, "POST", "/api/chat", asked | {"stream": False})
    assert whole["message"]["content"] == answer
    # Continue: the answer so far is the last message, with the thoughts that came before it.
    begun = [*TALK, {"role": "assistant", "content": answer, "thinking": "A boat."}]
    on = sent(server, "POST", "/api/chat", asked | {"messages": begun, "stream": False, "keep_alive": "5m"})
    assert on["message"]["content"]
    shaped = sent(server, "POST", "/api/chat", asked | {"stream": False, "format": SCHEMA, "options": {}})
    assert json.loads(shaped["message"]["content"])["legs"] == 4


def test_open_webui_chats_as_with_openai(server: Server, answer: str) -> None:
    asked = {"model": MODEL, "messages": TALK, "max_tokens": FEW, "temperature": 0.0}
    streams = {"stream": True, "stream_options": {"include_usage": True}}
    said = sent(server, "POST", "/v1/chat/completions", asked | streams).decode()
    *events, end = [line.removeprefix("data: ") for line in said.splitlines() if line]
    assert end == "[DONE]"
    chunks = [json.loads(one) for one in events]
    assert len({one["id"] for one in chunks}) == 1
    assert "".join(one["choices"][0]["delta"].get("content") or "" for one in chunks[:-1]) == answer
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == FEW
    # A title is asked for whole, and the answer so far is continued as with llama.cpp.
    assert sent(server, "POST", "/v1/chat/completions", asked | {"stream": False})["choices"][0]["message"][
        "content"
    ] == answer  # fmt: skip
    begun = [
        {"role": "system", "content": "Tell stories."},
        *TALK,
        {"role": "assistant", "content": "A boat"},
    ]
    on = {"stream": False, "continue_final_message": True, "add_generation_prompt": False}
    sent(server, "POST", "/v1/chat/completions", asked | on | {"messages": begun})


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"model": "nope", "messages": TALK, "stream": True}, 404, "'nope' does not exist here"),
        (
            {
                "model": MODEL,
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": STORY},
                            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
                        ],
                    }
                ],
                "stream": True,
            },
            400,
            "messages[0].content[1] is of type image_url, but the model reads text alone; leave it out",
        ),
    ],
)
def test_open_webui_shows_why_it_was_refused(server: Server, body: Any, status: int, said: str) -> None:
    """It takes the line from `error` of an answer that is no stream."""
    found, headers, told = server.ask("POST", "/v1/chat/completions", body, SENDER)
    assert (found, headers["content-type"]) == (status, "application/json")
    assert said in told["error"]["message"]
