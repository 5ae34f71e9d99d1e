"""A checkpoint whose template knows tools and reasoning, and clients' requests that make it write them: the
shipped model, otherwise.

Two of its special tokens are markers: `<tool_call>` and `<think>`. What closes them is plain text.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from penstock.api.llm import SHIPPED_MODEL

LAYERS = 0, 1, 7
"""Of what speaks: what it says, if nobody tells it what, has many words."""
CALL, THINK = 2, 3
"""Tokens, which are called system and user in the shipped model."""
_RENAMED = {"<|system|>": "<tool_call>", "<|user|>": "<think>"}
TEMPLATE = """{{- bos_token -}}
{%- if tools -%}
Tools:{% for tool in tools %} {{ tool | tojson }}{% endfor %}
Call them as <tool_call>{"name": NAME, "arguments": {}}</tool_call>
{% endif -%}
{%- for message in messages -%}
[{{ message.role }}] {% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif -%}
{{ message.content }}
{%- for call in message.tool_calls or [] -%}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>
{%- endfor -%}
{%- if message.tool_call_id %} of {{ message.tool_call_id }}{% endif -%}
<|end|>
{%- endfor -%}
{%- if add_generation_prompt -%}
<|assistant|>
{%- if reasoning_effort == "high" -%}<think>{% elif reasoning_effort == "none" %}<think></think>{% endif -%}
{%- endif -%}
"""
WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "Says how it will be.",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "enum": ["Köln", "Oslo"]},
            "days": {"$ref": "#/$defs/days"},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
        "$defs": {"days": {"enum": [1, 2, 3]}},
    },
}
NOW: dict[str, Any] = {"name": "now"}


def shallow(folder: Path) -> Path:
    """Three of the shipped model's eight layers: where it does not matter what is said, less than half of the
    work."""
    folder.mkdir()
    for file in SHIPPED_MODEL.iterdir():
        if file.suffix == ".json":
            shutil.copy(file, folder / file.name)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": len(LAYERS)}))
    whole = load_file(SHIPPED_MODEL / "model.safetensors")
    tensors = {name: one for name, one in whole.items() if ".layers." not in name}
    for number, layer in enumerate(LAYERS):
        old, new = f"model.layers.{layer}.", f"model.layers.{number}."
        tensors |= {name.replace(old, new): one for name, one in whole.items() if old in name}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def checkpoint(folder: Path) -> Path:
    shallow(folder)
    tokenizer = json.loads((SHIPPED_MODEL / "tokenizer.json").read_text(encoding="utf-8"))
    for old, new in _RENAMED.items():
        tokenizer["model"]["vocab"][new] = tokenizer["model"]["vocab"].pop(old)
        next(token for token in tokenizer["added_tokens"] if token["content"] == old)["content"] = new
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder


def saying(*pieces: str | int) -> dict[str, Any]:
    """What makes the model say exactly this: texts, and tokens that are none."""
    grammar = "start: " + " ".join(
        f"<[{piece}]>" if isinstance(piece, int) else json.dumps(piece) for piece in pieces
    )
    return {"structured_outputs": {"grammar": grammar}}


def called(name: str, **arguments: object) -> Sequence[str | int]:
    """A call, written in few tokens."""
    given = f',"arguments":{json.dumps(arguments, ensure_ascii=False)}' if arguments else ""
    return CALL, f'{{"name":"{name}"{given}}}</tool_call>'
