"""Defines what clients may send, field by field, and what of it the engine is asked.

The fields are OpenAI's, and beside them those of SamplingParams. One that would change the answer and cannot
be honoured is refused, and so is an unknown one; what only labels a request, or suits what is done
anyway, is taken and has no effect.
"""

import re
from functools import cached_property
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from penstock.base.errors import PenstockError, RequestError, StructureError
from penstock.server.wire.structured import ResponseFormat, StructuredOutputs
from penstock.step.params import SamplingParams
from penstock.step.structure import Structure

T = TypeVar("T")
MOST_LOGPROBS = 20
"""The likeliest tokens that a client may ask for with each."""
MOST_PROMPTS = 256
"""Prompts in one request."""
MOST_STOPS, LONGEST_STOP = 32, 1024
"""Stop strings of a request, and characters of one: they are looked for with every token, while all others
wait."""
MOST_BIASES = MOST_STOP_TOKENS = 4096
"""Biases and stop tokens of a request: they are gone through again and again. OpenAI takes fewer."""
MOST_MARKS = {b"[{:": 250_000, b",": 1_000_000}
"""Characters of a large body, those in its texts included. The first begin an object, a list or a field,
which take 0.3 us each to decode, the last stand between scalars, which take 0.04 us; nobody else computes
meanwhile."""
_SLICE = 1 << 20
_LONGEST_SAID = 300
_OWN = ("messages", "add_generation_prompt", "tools", "self")
"""Names that a template gets from other fields."""


class FieldError(PenstockError):
    """Says that a request is not what it must be. `param`: the field, if it is one's fault."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


Priority = Annotated[int, Meta(ge=-(2**31), le=2**31)]
"""A rank: of the requests that wait, that with the least is served first."""
Timeout = Annotated[float, Meta(gt=0)]
"""Seconds after which a request ends with an error."""
Salt = Annotated[str, Meta(min_length=1, max_length=256)]
"""A name for prefixes: they are shared with requests of the same."""


class StreamOptions(Struct, forbid_unknown_fields=True):
    """Sets what a stream has besides."""

    include_usage: bool = False
    include_obfuscation: bool = False


class TokenRequest(Struct, forbid_unknown_fields=True, kw_only=True, dict=True):
    """Declares what all requests for tokens have."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    # Beside OpenAI's:
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    priority: Priority = 0
    timeout: Timeout | None = None
    cache_salt: Salt | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def streams(self) -> bool:
        """Tell whether the answer is a stream."""
        return bool(self.stream)


class _Asked(TokenRequest, forbid_unknown_fields=True, kw_only=True):
    """Declares what both kinds of completion have."""

    n: int | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None
    # Beside OpenAI's:
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False

    @property
    def tells_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def most_logprobs(self) -> int | None:
        raise NotImplementedError

    @property
    def outputs(self) -> int:
        """Count the outputs of all prompts. Raise FieldError."""
        return self.params.n

    @property
    def structured_by(self) -> str:
        """Return the field that gives answers their structure."""
        return "structured_outputs"

    def structure(self) -> Structure | None:
        """Return the structure of answers; None if they have none. Raise FieldError and StructureError."""
        return None if self.structured_outputs is None else self.structured_outputs.structure()

    @cached_property
    def params(self) -> SamplingParams:
        """Return the settings of outputs. Raise FieldError."""
        if self.stream_options is not None and not self.stream:
            raise FieldError(
                "stream_options need stream; set stream to true, or leave stream_options out",
                "stream_options",
            )
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > MOST_STOPS or any(len(stop) > LONGEST_STOP for stop in stops):
            raise FieldError(
                f"stop may have {MOST_STOPS} strings of {LONGEST_STOP} characters; give fewer, or shorter "
                "ones",
                "stop",
            )
        for listed, there, most in (
            ("logit_bias", self.logit_bias, MOST_BIASES),
            ("stop_token_ids", self.stop_token_ids, MOST_STOP_TOKENS),
        ):
            if there is not None and len(there) > most:
                raise FieldError(f"{listed} has {len(there)} tokens; give at most {most}", listed)
        try:
            return SamplingParams(
                temperature=self.temperature,
                top_k=self.top_k,
                top_p=self.top_p,
                min_p=self.min_p,
                repetition_penalty=self.repetition_penalty,
                presence_penalty=self.presence_penalty or 0.0,
                frequency_penalty=self.frequency_penalty or 0.0,
                logit_bias={_token(key): bias for key, bias in (self.logit_bias or {}).items()},
                seed=self.seed,
                stop=self.stop or (),
                include_stop=self.include_stop_str_in_output,
                stop_token_ids=self.stop_token_ids or (),
                min_tokens=self.min_tokens or 0,
                max_tokens=self.most_tokens,
                ignore_eos=self.ignore_eos,
                structure=self.structure(),
                n=1 if self.n is None else self.n,
                logprobs=self.most_logprobs,
            )
        except StructureError as error:
            raise FieldError(str(error), self.structured_by) from error
        except RequestError as error:
            name = blamed(error)
            if name == "max_tokens" and self.max_tokens is None:
                name = "max_completion_tokens"
            raise FieldError(str(error), name) from error


class TextPart(Struct, forbid_unknown_fields=True):
    """Gives a part of a message's content, which is text."""

    type: Literal["text"]
    text: str


class Message(Struct, forbid_unknown_fields=True, kw_only=True):
    """Holds a message of a conversation, with what clients send back of an answer. All of it is for the
    model's template."""

    role: str
    content: str | list[TextPart] | None = None
    name: str | UnsetType | None = UNSET
    refusal: str | UnsetType | None = UNSET
    tool_calls: list[dict[str, Any]] | UnsetType | None = UNSET
    tool_call_id: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType | None = UNSET
    reasoning: str | UnsetType | None = UNSET
    function_call: dict[str, Any] | UnsetType | None = UNSET
    annotations: list[Any] | UnsetType | None = UNSET
    audio: dict[str, Any] | UnsetType | None = UNSET

    def plain(self) -> dict[str, object]:
        """Return the message as a template reads it: text in one piece."""
        content = (
            self.content
            if not isinstance(self.content, list)
            else "".join(part.text for part in self.content)
        )
        fields = {
            name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not UNSET
        }
        return fields | {"content": content or ""}


class ChatRequest(_Asked, forbid_unknown_fields=True, kw_only=True):
    """Holds the body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    # Labels, and what suits whatever is answered:
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # Beside OpenAI's:
    include_reasoning: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True

    @property
    def most_tokens(self) -> int | None:
        """Return the most tokens of each output."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def most_logprobs(self) -> int | None:
        """Return how many likeliest tokens are wanted beside each token's own."""
        return _logprobs(self.top_logprobs or 0, "top_logprobs") if self.logprobs else None

    @property
    def structured_by(self) -> str:
        """Return the field that gives answers their structure."""
        return next(
            (name for name in ("structured_outputs", "response_format") if getattr(self, name) is not None),
            "tools",
        )

    def structure(self) -> Structure | None:
        """Return the structure of answers; None if they have none. Raise FieldError and StructureError."""
        form = None if self.response_format is None else self.response_format.structure()
        if form is not None and self.structured_outputs is not None:
            raise FieldError(
                "structured_outputs and response_format each give answers a form; leave one of them out",
                "structured_outputs",
            )
        return form or _Asked.structure(self)

    def check(self) -> None:
        """Raise FieldError for what the fields do not allow together, or this server at all."""
        if self.top_logprobs is not None and not self.logprobs:
            raise FieldError(
                "top_logprobs need logprobs: set it to true, or leave top_logprobs out", "top_logprobs"
            )
        _check_variables(self.chat_template_kwargs)


class CompletionRequest(_Asked, forbid_unknown_fields=True, kw_only=True):
    """Holds the body of POST /v1/completions."""

    prompt: str | list[Any]
    """Text or token ids, or a list of these."""
    echo: bool = False
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None
    add_special_tokens: bool = True

    @property
    def most_tokens(self) -> int | None:
        """Return the most tokens of each output."""
        return 16 if self.max_tokens is None else self.max_tokens

    @property
    def most_logprobs(self) -> int | None:
        """Return how many likeliest tokens are wanted beside each token's own."""
        return None if self.logprobs is None else _logprobs(self.logprobs, "logprobs")

    def check(self) -> None:
        """Raise FieldError for what the fields do not allow together, or this server at all."""
        if self.suffix:
            raise FieldError(
                "suffix is not supported, since text is only continued at its end; leave suffix out", "suffix"
            )
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise FieldError(
                "best_of is not supported; leave it out, ask for n outputs, and choose among them", "best_of"
            )
        if self.echo and self.logprobs is not None:
            raise FieldError(
                "echo with logprobs is not supported, since the logprobs of the prompt are not returned; "
                "leave one of them out",
                "echo",
            )
        if not self.prompts:
            raise FieldError("the prompt is an empty list; send at least one prompt", "prompt")
        if len(self.prompts) > MOST_PROMPTS:
            raise FieldError(
                f"{len(self.prompts)} prompts are more than {MOST_PROMPTS}; send several requests", "prompt"
            )
        for prompt in self.prompts:
            if not isinstance(prompt, str) and not (
                isinstance(prompt, list) and all(type(token) is int for token in prompt)
            ):
                raise FieldError(
                    "prompt must be a text, a list of token ids, or a list of these",
                    "prompt",
                )

    @property
    def outputs(self) -> int:
        """Count the outputs of all prompts. Raise FieldError."""
        return self.params.n * len(self.prompts)

    @cached_property
    def prompts(self) -> list[str | list[int]]:
        """Return the prompts: texts, or token ids."""
        given = self.prompt
        return [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given


class TokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Holds the body of POST /tokenize."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Any] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        """Raise FieldError for what the fields do not allow together."""
        if (self.prompt is None) == (self.messages is None):
            raise FieldError(
                "the request has both prompt and messages, or neither; send one of them", "prompt"
            )
        _check_variables(self.chat_template_kwargs)


class DetokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Holds the body of POST /detokenize."""

    model: str | None = None
    tokens: list[int]


def blamed(error: RequestError) -> str | None:
    """Return the field that the engine's message is about: those begin with it."""
    name = str(error).split(" ", 1)[0]
    return name if name in CompletionRequest.__struct_fields__ else None


def expect_few_values(body: bytes) -> None:
    """Raise FieldError for a body that takes too long to decode, by its marks. Other threads go on between
    slices."""
    for marks, most in MOST_MARKS.items():
        found = sum(body.count(mark, at, at + _SLICE) for at in range(0, len(body), _SLICE) for mark in marks)
        if found > most:
            raise FieldError(
                f"the request has {found:,} of the characters {marks.decode()!r}, those in texts included, "
                f"but a request of more than 64 KiB may have {most:,}; send several smaller ones"
            )


def decoded(body: bytes, kind: type[T]) -> T:
    """Return what a request's body says. Raise FieldError that names the field."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        text = str(error)
        unknown = re.search(r"unknown field `([^`]*)`", text)
        place = re.search(r"at `\$\.?([^`\[.]*)", text)
        name = unknown[1] if unknown else place[1] if place and place[1] else None
        if missing := re.search(r"missing required field `([^`]*)`", text):
            name = missing[1]
        raise FieldError(f"the request is not valid: {_invalid(error)}", name) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FieldError(f"the request's body is not JSON: {error}; send a JSON object") from error


def converted(value: object, kind: type[T], where: str, param: str) -> T:
    """Return a part of a request, read as a type. where: what it is called. param: its field. Raise
    FieldError."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise FieldError(f"{where} is not valid: {_invalid(error)}", param) from error


def _invalid(error: msgspec.ValidationError) -> str:
    """Return what is not as it must be, in words that go on from others."""
    text = str(error)
    return text[:1].lower() + (text[1:] if len(text) <= _LONGEST_SAID else f"{text[1:_LONGEST_SAID]}...")


def _check_variables(variables: dict[str, Any] | None) -> None:
    if taken := [name for name in _OWN if name in (variables or ())]:
        raise FieldError(
            f"chat_template_kwargs has {taken[0]!r}, which the server sets itself; leave it out",
            "chat_template_kwargs",
        )


def _logprobs(count: int, name: str) -> int:
    if not 0 <= count <= MOST_LOGPROBS:
        raise FieldError(f"{name} {count} must be from 0 to {MOST_LOGPROBS}", name)
    return count


def _token(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 20):
        raise FieldError(
            f'logit_bias has key {key[:40]!r}; its keys must be token ids, such as "42"', "logit_bias"
        )
    return int(key)
