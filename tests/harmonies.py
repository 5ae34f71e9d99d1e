"""A checkpoint that writes in channels, as gpt-oss does, and clients' requests that make it write them: the
shipped model, otherwise, its special tokens called by harmony's names and two more."""

import json
from pathlib import Path
from typing import Any

from penstock.api.llm import SHIPPED_MODEL
from speakers import shallow

RETURN, END, START, CHANNEL, MESSAGE, CONSTRAIN, CALL = 0, 1, 2, 3, 4, 4094, 4095
NAMES = {
    RETURN: "<|return|>",
    END: "<|end|>",
    START: "<|start|>",
    CHANNEL: "<|channel|>",
    MESSAGE: "<|message|>",
    CONSTRAIN: "<|constrain|>",
    CALL: "<|call|>",
}
TEMPLATE = """{%- macro kind(schema) -%}
{%- if schema.enum %}"{{ schema.enum | join('" | "') }}"
{%- elif schema.type == "integer" %}number
{%- else %}{{ schema.type or "any" }}{% endif -%}
{%- endmacro -%}
<|start|>system<|message|>{{ model_identity | default("You are a test.") }}
Current date: {{ strftime_now("%Y-%m-%d") }}

Reasoning: {{ reasoning_effort | default("medium") }}

# Valid channels: analysis, commentary, final. Channel must be included for every message.
{%- if tools %}
Calls to these tools must go to the commentary channel: 'functions'.{% endif -%}
<|end|>
{%- set first = messages[0] -%}
{%- set rest = messages -%}
{%- if first.role in ("developer", "system") -%}{%- set rest = messages[1:] -%}
{%- else -%}{%- set first = none -%}
{%- endif -%}
{%- if first or tools -%}
<|start|>developer<|message|>
{%- if first %}# Instructions

{{ first.content }}
{% endif -%}
{%- if tools %}# Tools

namespace functions {
{% for tool in tools %}
{{ "// " + tool.function.description }}
type {{ tool.function.name }} = (_: {
{%- for name, schema in (tool.function.parameters.properties or {}).items() %} {{ name }}: {{ kind(schema) }},
{%- if schema.default is defined and schema.enum %}{{ " // default: " + schema.default }}{% endif %}
{%- endfor %} }) => any;
{% endfor %}
} // namespace functions
{%- endif -%}
<|end|>
{%- endif -%}
{%- set called = namespace(name=none) -%}
{%- for message in rest -%}
{%- if message.role == "assistant" and message.tool_calls -%}
{%- set later = namespace(final=false) -%}
{%- for other in rest[loop.index:] -%}
{%- if other.role == "assistant" and "tool_calls" not in other -%}{%- set later.final = true -%}{%- endif -%}
{%- endfor -%}
{%- if message.content and message.thinking -%}{{ raise_exception("both are there") }}{%- endif -%}
{%- set said = message.content or message.thinking -%}
{%- if said and not later.final -%}
<|start|>assistant<|channel|>analysis<|message|>{{ said }}<|end|>
{%- endif -%}
{%- set call = message.tool_calls[0].function -%}
<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>
{{- call.arguments | tojson }}<|call|>
{%- set called.name = call.name -%}
{%- elif message.role == "assistant" -%}
<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>
{%- elif message.role == "tool" -%}
{%- if not called.name -%}{{ raise_exception("no call was made") }}{%- endif -%}
<|start|>functions.{{ called.name }} to=assistant<|channel|>commentary<|message|>
{{- message.content | tojson }}<|end|>
{%- elif message.role == "user" -%}
<|start|>user<|message|>{{ message.content }}<|end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}
"""
"""Written by the format's description; like the template of gpt-oss it takes one call in a message, and
nothing that is said besides it."""


def checkpoint(folder: Path) -> Path:
    shallow(folder)
    tokenizer = json.loads((SHIPPED_MODEL / "tokenizer.json").read_text(encoding="utf-8"))
    model, added = tokenizer["model"], {token["id"]: token for token in tokenizer["added_tokens"]}
    words = {token: word for word, token in model["vocab"].items()}
    for token, name in NAMES.items():
        added[token] = {**added[0], "id": token, "content": name}
        del model["vocab"][words[token]]
        model["vocab"][name] = token
    gone = {words[token] for token in NAMES}
    model["merges"] = [
        pair
        for pair in model["merges"]
        if not gone & {"".join(pair if isinstance(pair, list) else pair.split(" ", 1))}
    ]
    tokenizer["added_tokens"] = [added[token] for token in sorted(added)]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder


def saying(*messages: str) -> dict[str, Any]:
    """What makes the model write exactly this: texts with marks in them, one after the other."""
    ids = {name: token for token, name in NAMES.items()}
    pieces = list[str]()
    for text in messages:
        while text:
            at, mark = min(((text.find(name), name) for name in ids if name in text), default=(len(text), ""))
            pieces += [json.dumps(text[:at], ensure_ascii=False)] if at else []
            pieces += [f"<[{ids[mark]}]>"] if mark else []
            text = text[at + len(mark) :]
    return {"structured_outputs": {"grammar": f"start: {' '.join(pieces)}"}}
