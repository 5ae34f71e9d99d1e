"""Defines what clients may send to /api/chat and /api/generate, in ollama's words: a request for a chat or
for the continuation of a text, and it is read as one."""

import re
from collections import deque
from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from msgspec import Struct

from penstock.server.wire.conversation import Message
from penstock.server.wire.decoding import FieldError, converted
from penstock.server.wire.requests import ChatRequest, CompletionRequest, TokenRequest
from penstock.server.wire.structured import StructuredOutputs, closed

LATEST = ":latest"
"""The tag of a name that has none."""
RENAMED = {
    "stop": "options.stop",
    "response_format": "format",
    "max_completion_tokens": "options.num_predict",
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "reasoning_effort": "think",
    "tool_choice": "tools",
}
"""Fields of a chat's request, as they are called here."""
_OPTIONS = {
    "seed": "seed",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "stop": "stop",
}
"""Options, and what they are called elsewhere."""
_READ = {*_OPTIONS, "num_predict", "num_ctx"}
_NEUTRAL: Mapping[str, tuple[float, ...]] = {"mirostat": (0,), "typical_p": (1, 0), "tfs_z": (1, 0)}
"""Options that would change the answer, and the values with which they do not."""

_UNITS_OF_TIME = {"ns": 1e-9, "us": 1e-6, "\u00b5s": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|\u00b5s|ms|s|m|h)")


class OllamaMessage(Struct, kw_only=True):
    """Holds a message of a conversation."""

    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaRequest(TokenRequest, forbid_unknown_fields=False, kw_only=True):
    """Declares what both kinds of requests have. Fields that are not known have no effect, as clients expect
    of this protocol."""

    format: str | dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    think: bool | str | None = None
    keep_alive: float | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the model that is asked for."""
        return (self.model, self.model.removesuffix(LATEST))

    @property
    def streams(self) -> bool:
        """Tell whether the answer is a stream: that is what clients get who do not say."""
        return self.stream is not False

    @property
    def outputs(self) -> int:
        """Count the outputs."""
        return 1

    @property
    def loads(self) -> bool:
        """Tell whether nothing is asked but that the model be there."""
        raise NotImplementedError

    @property
    def unloads(self) -> bool:
        """Tell whether nothing is asked but that the model go."""
        return self.loads and self.kept == 0

    @property
    def kept(self) -> float | None:
        """Return the seconds for which the model is to stay without requests; None is the server's. Raise
        FieldError."""
        return seconds_kept(self.keep_alive)

    @property
    def tells_reasoning(self) -> bool:
        """Tell whether reasoning is part of the answer."""
        return self.think is not False

    @property
    def most_context(self) -> int | None:
        """Return the most tokens of prompt and answer together; None is as many as the server has room for.
        Raise FieldError."""
        return self._whole("num_ctx")

    @property
    def most_tokens(self) -> int | None:
        """Return the most tokens of the answer; None is as many as there is room for. Raise FieldError."""
        most = self._whole("num_predict")
        return most if most is not None and most > 0 else None

    @property
    def ignored(self) -> list[str]:
        """Name the fields that were sent and have no effect."""
        named = ["keep_alive"] if self.keep_alive is not None else []
        return named + [
            f"options.{name}" for name in sorted((self.options or {}).keys() - _READ) if _plain(name)
        ]

    def check(self) -> None:
        """Raise FieldError for what this server cannot honour at all."""
        options = self.options or {}
        for name, neutral in _NEUTRAL.items():
            if (given := options.get(name)) is not None and given not in neutral:
                raise FieldError(
                    f"options.{name} {str(given)[:40]} is not supported, since outputs are not sampled so; "
                    "leave it out",
                    "options",
                )
        penalised = options.get("repeat_penalty") not in (None, 1)
        if penalised and options.get("repeat_last_n") not in (None, -1):
            raise FieldError(
                "options.repeat_last_n is not supported, since repeat_penalty counts the whole context; "
                "leave it out, or set it to -1",
                "options",
            )

    def _fields(self) -> dict[str, object]:
        """Return the fields of a request to OpenAI's paths."""
        options = self.options or {}
        fields: dict[str, object] = {"model": self.model, "priority": self.priority, "timeout": self.timeout}
        fields |= {own: options[name] for name, own in _OPTIONS.items() if options.get(name) is not None}
        return fields | {"max_tokens": self.most_tokens}

    def _whole(self, name: str) -> int | None:
        given = (self.options or {}).get(name)
        if isinstance(given, float) and given.is_integer():
            given = int(given)
        if given is not None and (type(given) is not int or (name == "num_ctx" and given < 1)):
            raise FieldError(
                f"options.{name} {str(given)[:40]!r} must be a whole number; correct it", "options"
            )
        return given

    @property
    def _schema(self) -> dict[str, Any] | None:
        """Return the schema that the answer keeps to; None if it has no form. Raise FieldError."""
        if isinstance(self.format, dict):
            return closed(self.format)
        if self.format == "json":
            return {"type": "object"}
        if self.format:
            raise FieldError(
                f"format {self.format[:40]!r} is none; use json or a JSON schema, or leave it out", "format"
            )
        return None

    def _chat(self, messages: Sequence[Message], tools: list[Any] | None = None) -> ChatRequest:
        """Return the request for an answer to these messages. Raise FieldError."""
        fields = self._fields() | {
            "logprobs": self.logprobs,
            "top_logprobs": self.top_logprobs if self.logprobs else None,
            "include_reasoning": self.tells_reasoning,
            "tools": tools or None,
        }
        if isinstance(self.think, bool):  # Templates know one of these names, or none.
            fields["chat_template_kwargs"] = {"enable_thinking": self.think, "thinking": self.think}
        elif self.think is not None:
            fields["reasoning_effort"] = self.think
        if (schema := self._schema) is not None:
            fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
        if messages[-1].role == "assistant" and not messages[-1].tool_calls:  # The answer goes on with it.
            fields |= {"continue_final_message": True, "add_generation_prompt": False}
        chat = converted({"messages": [{"role": "user"}], **fields}, ChatRequest, "the request", "options")
        chat.structured_outputs, chat.messages = self.structured_outputs, list(messages)
        return chat


class OllamaChatRequest(OllamaRequest, forbid_unknown_fields=False, kw_only=True):
    """Holds the body of POST /api/chat."""

    messages: list[OllamaMessage] | None = None
    tools: list[dict[str, Any]] | None = None

    @property
    def loads(self) -> bool:
        """Tell whether nothing is asked but that the model be there."""
        return not self.messages

    def request(self) -> ChatRequest | CompletionRequest:
        """Return the same as a request to OpenAI's paths. Raise FieldError."""
        return self._chat(_messages(self.messages or ()), self.tools)


class OllamaGenerateRequest(OllamaRequest, forbid_unknown_fields=False, kw_only=True):
    """Holds the body of POST /api/generate."""

    prompt: str | None = None
    system: str | None = None
    suffix: str | None = None
    template: str | None = None
    images: list[Any] | None = None
    context: list[int] | None = None
    raw: bool | None = None

    @property
    def loads(self) -> bool:
        """Tell whether nothing is asked but that the model be there."""
        return not self.prompt

    def check(self) -> None:
        """Raise FieldError for what this server cannot honour at all."""
        OllamaRequest.check(self)
        for name, why in (
            ("suffix", "text is only continued at its end; leave it out"),
            (
                "template",
                "the model's own chat template is used; leave it out, or write the prompt and set raw",
            ),
            ("images", "the model reads text alone; leave it out"),
            ("context", "the server keeps none; send the conversation to /api/chat"),
        ):
            if getattr(self, name):
                raise FieldError(f"{name} is not supported, since {why}", name)
        if self.raw and self.system:
            raise FieldError("raw prompts have no system; leave it out, or raw", "raw")

    def request(self) -> ChatRequest | CompletionRequest:
        """Return the same as a request to OpenAI's paths. Raise FieldError."""
        if not self.raw:
            said = [Message(role="user", content=self.prompt)]
            return self._chat([Message(role="system", content=self.system), *said] if self.system else said)
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        # How long the answer may be is seen to by whoever knows how much room there is.
        fields = {"prompt": self.prompt, "logprobs": logprobs, "max_tokens": 1}
        raw = converted(self._fields() | fields, CompletionRequest, "the request", "options")
        raw.structured_outputs = self.structured_outputs
        if (schema := self._schema) is not None:
            if raw.structured_outputs is not None:
                raise FieldError(
                    "format and structured_outputs each give the answer a form; leave one of them out",
                    "format",
                )
            raw.structured_outputs = StructuredOutputs(json=schema)
        return raw


def _messages(given: Sequence[OllamaMessage]) -> list[Message]:
    """Return messages as others have them: there calls have ids, and their results name these. Raise
    FieldError."""
    messages: list[Message] = []
    open_calls: deque[tuple[str, object]] = deque()
    """Calls without a result so far: ids, and what was called."""
    for at, one in enumerate(given):
        if one.images:
            raise FieldError(
                f"messages[{at}] has images, but the model reads text alone; leave them out", "messages"
            )
        message = Message(role=one.role, content=one.content)
        if one.thinking:
            message.reasoning_content = one.thinking
        if one.tool_calls:
            message.tool_calls = [
                {"id": f"call_{at}_{number}", "type": "function", **call}
                for number, call in enumerate(one.tool_calls)
            ]
            open_calls.extend((call["id"], _called(call)) for call in message.tool_calls)
        if one.role == "tool":
            message.tool_call_id = one.tool_call_id or _answered(open_calls, one.tool_name)
            if one.tool_name is not None:
                message.name = one.tool_name
        messages.append(message)
    return messages


def _called(call: Mapping[str, Any]) -> object:
    function = call.get("function")
    return function.get("name") if isinstance(function, Mapping) else None


def _answered(open_calls: deque[tuple[str, object]], name: str | None) -> str:
    """Return the id of the first call that a result may be of, and take it out."""
    found = next((one for one in open_calls if name is None or one[1] == name), None)
    if found is None:
        return "call"
    open_calls.remove(found)
    return found[0]


def _plain(name: str) -> bool:
    """Tell whether a name can be told in a header."""
    return len(name) <= 40 and name.isascii() and name.isidentifier()


class ShowRequest(Struct, kw_only=True):
    """Holds the body of POST /api/show."""

    model: str | None = None
    name: str | None = None
    """The same, as older clients call it."""
    verbose: bool | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the model that is asked for."""
        name = self.model or self.name or ""
        return (name, name.removesuffix(LATEST))


def seconds_kept(keep_alive: float | str | None) -> float | None:
    """Return the seconds that ollama's keep_alive means: a number of them, or a duration such as 5m or 1h30m.
    Below zero it is for ever. None if it is not set. Raise FieldError."""
    if keep_alive is None:
        return None
    if isinstance(keep_alive, str):
        text = keep_alive.strip()[:40]
        sign, digits = (-1, text[1:]) if text[:1] == "-" else (1, text.removeprefix("+"))
        if digits == "0":
            return 0.0
        if not digits or _DURATION.sub("", digits):
            raise FieldError(
                f"keep_alive {text!r} is no duration; send seconds, such as 300, or a text such as 5m or "
                "1h30m; -1 keeps the model",
                "keep_alive",
            )
        seconds = sign * sum(
            float(number) * _UNITS_OF_TIME[unit] for number, unit in _DURATION.findall(digits)
        )
    else:
        seconds = keep_alive
    return inf if seconds < 0 else float(seconds)
