"""The server as another client sees it than the one that it is for: Vercel's AI SDK, which reads answers in
its own way, under node.

Its packages are those that tools/ai-sdk names; tools/test_tools.sh installs them.
"""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, SamplingParams
from servers import COUNT, FLAGS, SETTINGS, STORY, TALK, Server, serving, until
from streams import LONG

PACKAGES = Path(sys.prefix) / "node_modules"
NODE = shutil.which("node")
HERE = NODE is not None and all((PACKAGES / name).is_dir() for name in ("ai", "@ai-sdk/openai-compatible"))
pytestmark = pytest.mark.skipif(not HERE, reason="needs node, and what tools/test_tools.sh installs")

# What it does is told at its end, as one object; what it has sent, too.
SCRIPT = """
import { APICallError, Output, generateText, jsonSchema, streamText } from "ai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";

const [url, story, talk, count] = [process.argv[2], process.argv[3], JSON.parse(process.argv[4]), Number(process.argv[5])];
const sent = [];
const watched = async (place, request) => { sent.push(JSON.parse(request.body)); return fetch(place, request); };
const server = createOpenAICompatible({
  name: "penstock", baseURL: url + "/v1", apiKey: "none", includeUsage: true, supportsStructuredOutputs: true, fetch: watched,
});
const greedy = { temperature: 0, maxOutputTokens: count, maxRetries: 0 };
const endless = { penstock: { ignore_eos: true } };
const plain = ({ text, finishReason, usage }) =>
  ({ text, finishReason, inputTokens: usage.inputTokens, outputTokens: usage.outputTokens });

async function streamed(options) {
  const stream = streamText({ ...options, onError: ({ error }) => { throw error; } });
  const pieces = [];
  for await (const piece of stream.textStream) pieces.push(piece);
  const usage = await stream.usage;
  return { pieces, ...plain({ text: await stream.text, finishReason: await stream.finishReason, usage }) };
}

async function refused(options) {
  try { await generateText(options); } catch (error) {
    return { isApi: APICallError.isInstance(error), status: error.statusCode, message: error.message, retryable: error.isRetryable };
  }
}

async function left(options) {
  const control = new AbortController();
  const stream = streamText({ ...options, abortSignal: control.signal, onError: () => {} });
  let pieces = 0;
  try { for await (const piece of stream.textStream) if (++pieces === 3) control.abort(); } catch { }
  return pieces;
}

const chat = server.chatModel("shipped"), text = server.completionModel("shipped");
const schema = jsonSchema({ type: "object", properties: { sky: { enum: ["blue"] } }, required: ["sky"], additionalProperties: false });
const told = {
  chat: plain(await generateText({ model: chat, messages: talk, ...greedy })),
  chatStreamed: await streamed({ model: chat, messages: talk, ...greedy }),
  drawn: plain(await generateText({ model: chat, messages: talk, ...greedy, temperature: 0.9, topP: 0.9, seed: 7 })),
  object: (await generateText({ model: chat, messages: talk, ...greedy, maxOutputTokens: 400, output: Output.object({ schema }) })).output,
  text: plain(await generateText({ model: text, prompt: story, ...greedy })),
  textStreamed: await streamed({ model: text, prompt: story, ...greedy }),
  missing: await refused({ model: server.chatModel("other"), messages: talk, ...greedy }),
  wrong: await refused({ model: chat, messages: talk, ...greedy, temperature: -1 }),
  left: await left({ model: chat, messages: talk, ...greedy, maxOutputTokens: 4000, providerOptions: endless }),
};
console.log(JSON.stringify({ told, sent }));
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("server"), "--port", "0", *FLAGS) as server:
        yield server.wait()
        server.signal(signal.SIGTERM)
        assert server.ended() == 0


@pytest.fixture(scope="module")
def found(server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("client")
    (folder / "node_modules").symlink_to(PACKAGES)
    (folder / "client.mjs").write_text(SCRIPT)
    command = [str(NODE), "client.mjs", server.url, STORY, json.dumps(TALK), str(COUNT)]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=3 * LONG, check=False)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)  # type: ignore[no-any-return]


def test_its_answers_are_what_the_model_says_offline(server: Server, found: dict[str, Any]) -> None:
    greedy, told = SamplingParams(temperature=0, max_tokens=COUNT), found["told"]
    drawn = SamplingParams(temperature=0.9, top_p=0.9, seed=7, max_tokens=COUNT)
    written = next(body["prompt"] for body in found["sent"] if "prompt" in body)
    stops = next(body.get("stop", []) for body in found["sent"] if "prompt" in body)
    ended = SamplingParams(temperature=0, max_tokens=COUNT, stop=stops)
    with LLM(None, **SETTINGS) as llm:  # type: ignore[arg-type]
        chat, other, text = llm.generate([TALK, TALK, written], [greedy, drawn, ended])
    for name, offline in (
        ("chat", chat),
        ("chatStreamed", chat),
        ("drawn", other),
        ("text", text),
        ("textStreamed", text),
    ):
        assert told[name]["text"] == offline.text, name
        assert told[name]["inputTokens"] == len(offline.prompt_tokens)
        assert told[name]["outputTokens"] == len(offline.tokens)
        assert told[name]["finishReason"] == ("length" if len(offline.tokens) == COUNT else "stop")
    for name in ("chatStreamed", "textStreamed"):
        assert "".join(told[name]["pieces"]) == told[name]["text"]
        assert told[name]["pieces"]
    assert other.text != chat.text


def test_it_has_objects_of_a_schema(found: dict[str, Any]) -> None:
    pytest.importorskip("llguidance", reason="needs the grammar extra")
    assert found["told"]["object"] == {"sky": "blue"}
    assert any("response_format" in body for body in found["sent"])


def test_it_knows_errors_for_what_they_are(found: dict[str, Any]) -> None:
    missing, wrong = found["told"]["missing"], found["told"]["wrong"]
    assert (missing["isApi"], missing["status"], missing["retryable"]) == (True, 404, False)
    assert "'other'" in missing["message"]
    assert (wrong["isApi"], wrong["status"], wrong["retryable"]) == (True, 400, False)
    assert "temperature" in wrong["message"]


def test_what_it_has_left_is_ended(server: Server, found: dict[str, Any]) -> None:
    assert found["told"]["left"] >= 3
    until(lambda: server.complete(prompt=["a"] * 7, max_tokens=1)[0] == 200)
