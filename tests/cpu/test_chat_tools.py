"""`llm.chat` with tools: the template is given them, and what are none is refused in a sentence."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from penstock import LLM, AsyncLLM, SamplingParams
from penstock.base.config import SHIPPED_MODEL
from penstock.base.errors import RequestError

SETTINGS = {"device": "cpu", "dtype": "float32", "device_memory": "300MiB", "max_length": 256}
TALK = [{"role": "user", "content": "Where is the boat?"}]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {}}}},
    }
]
FEW = SamplingParams(max_tokens=2, temperature=0)
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function | tojson }}\n{% endfor %}"
    "{{ mood }}{% for one in messages %}{{ one.content }}{% endfor %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "model"
    shutil.copytree(SHIPPED_MODEL, folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": TEMPLATE}))
    return folder


def test_tools_are_put_to_the_template(model: Path) -> None:
    described = json.dumps(TOOLS[0]["function"])
    with LLM(model, **SETTINGS) as llm:  # type: ignore[arg-type]
        assert llm.chat(TALK, FEW, tools=TOOLS).prompt == f"{described}\nWhere is the boat?"
        both = llm.chat(TALK, FEW, tools=(*TOOLS,), chat_template_kwargs={"mood": "Well. "})
        assert both.prompt == f"{described}\nWell. Where is the boat?"
        assert llm.chat(TALK, FEW, tools=[]).prompt == llm.chat(TALK, FEW).prompt == TALK[0]["content"]
        with pytest.raises(RequestError, match="the LoRA adapter 'x' is not loaded; there is none"):
            llm.chat(TALK, FEW, tools=TOOLS, lora="x")
        for tools, said in (
            ("look", "of type str; give a list of tools such as"),
            (TOOLS[0], "of type dict; give a list"),
            (["look"], r"tools\[0\] is 'look'; give a tool such as"),
            ([*TOOLS, {"function": {}}], r"tools\[1\] is no function with a name"),
            ([{"type": "search", "function": {"name": "a"}}], "no function with a name"),
            ([{"function": {"name": "a", "parameters": "{}"}}], "parameters of type str; give a JSON schema"),
        ):
            with pytest.raises(RequestError, match=said):
                llm.chat(TALK, FEW, tools=tools)  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="takes a list of messages, not a text; give chat"):
            llm.chat("Where is the boat?", FEW)  # type: ignore[arg-type]


def test_a_template_that_takes_none_says_so() -> None:
    async def main() -> None:
        async with AsyncLLM(**SETTINGS) as llm:  # type: ignore[arg-type]
            with pytest.raises(RequestError, match="chat template takes no tools"):
                await llm.chat(TALK, FEW, tools=TOOLS)

    asyncio.run(main())
