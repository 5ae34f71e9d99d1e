"""Defines what clients may send, field by field, and what of it the engine is asked.

The fields are OpenAI's, and beside them those of SamplingParams. One that would change the answer and cannot
be honoured is refused, and so is an unknown one; what only labels a request, or suits what is done
anyway, is taken and has no effect.
"""

from functools import cached_property
from typing import Annotated, Any

from msgspec import Meta, Struct

from penstock.base.errors import RequestError, StructureError
from penstock.server.wire.conversation import Message, check_chat
from penstock.server.wire.decoding import FieldError
from penstock.server.wire.structured import ResponseFormat, StructuredOutputs
from penstock.step.params import SamplingParams
from penstock.step.structure import Structure

MOST_LOGPROBS = 20
"""The likeliest tokens that a client may ask for with each."""
MOST_PROMPTS = 256
"""Prompts in one request."""
MOST_STOPS, LONGEST_STOP = 32, 1024
"""Stop strings of a request, and characters of one: they are looked for with every token, while all others
wait."""
MOST_BIASES = MOST_STOP_TOKENS = 4096
"""Biases and stop tokens of a request: they are gone through again and again. OpenAI takes fewer."""
ALL_TOKENS = -1
"""Other servers' way to say that top_k keeps all."""
Priority = Annotated[int, Meta(ge=-(2**31), le=2**31)]
"""A rank: of the requests that wait, that with the least is served first."""
Timeout = Annotated[float, Meta(gt=0)]
"""Seconds after which a request ends with an error."""
Truncation = Annotated[int, Meta(ge=-1)]
"""The most tokens of a prompt, the last ones; -1 is as many as there is room for."""
Salt = Annotated[str, Meta(min_length=1, max_length=256)]
"""A name for prefixes: they are shared with requests of the same."""


_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""Older names for fields of structured_outputs."""
_NO_EFFECT = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "prediction", "guided_decoding_backend", "spaces_between_special_tokens",
)  # fmt: skip


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
    def names(self) -> tuple[str, ...]:
        """Return the names of the model that is asked for."""
        return (self.model,)

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
    # Beside OpenAI's:
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    truncate_prompt_tokens: Truncation | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    # Labels, and what suits whatever is answered:
    user: str | None = None
    guided_decoding_backend: str | None = None
    spaces_between_special_tokens: bool | None = None

    @property
    def ignored(self) -> list[str]:
        """Name the fields that were sent and have no effect."""
        return [name for name in _NO_EFFECT if getattr(self, name, None) is not None]

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
    def most_prompt_logprobs(self) -> int | None:
        """Return how many likeliest tokens are wanted beside each of the prompt's own."""
        return self._prompt_logprobs()

    def _prompt_logprobs(self) -> int | None:
        return None if self.prompt_logprobs is None else _logprobs(self.prompt_logprobs, "prompt_logprobs")

    @property
    def outputs(self) -> int:
        """Count the outputs of all prompts. Raise FieldError."""
        return self.params.n

    @property
    def structured_by(self) -> str:
        """Return the field that gives answers their structure."""
        return next((name for name in _GUIDED if getattr(self, name) is not None), "structured_outputs")

    def structure(self) -> Structure | None:
        """Return the structure of answers; None if they have none. Raise FieldError and StructureError."""
        guided = {part: getattr(self, name) for name, part in _GUIDED.items()}
        given = self.structured_outputs
        if any(value is not None for value in guided.values()):
            if given is not None:
                raise FieldError(
                    f"structured_outputs and {self.structured_by} each give answers a form; leave one of "
                    "them out",
                    self.structured_by,
                )
            given = StructuredOutputs(whitespace_pattern=self.guided_whitespace_pattern, **guided)
        return None if given is None else given.structure()

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
                top_k=0 if self.top_k == ALL_TOKENS else self.top_k,
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
                prompt_logprobs=self.most_prompt_logprobs,
            )
        except StructureError as error:
            raise FieldError(str(error), self.structured_by) from error
        except RequestError as error:
            name = blamed(error)
            if name == "max_tokens" and self.max_tokens is None:
                name = "max_completion_tokens"
            raise FieldError(str(error), name) from error


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
    prompt_cache_retention: str | None = None
    prediction: dict[str, Any] | None = None
    modalities: list[str] | None = None
    # Beside OpenAI's:
    include_reasoning: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

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
            (
                name
                for name in ("structured_outputs", *_GUIDED, "response_format")
                if getattr(self, name) is not None
            ),
            "tools",
        )

    def structure(self) -> Structure | None:
        """Return the structure of answers; None if they have none. Raise FieldError and StructureError."""
        form = None if self.response_format is None else self.response_format.structure()
        other = _Asked.structure(self)
        if form is not None and other is not None:
            raise FieldError(
                f"{self.structured_by} and response_format each give answers a form; leave one of them out",
                self.structured_by,
            )
        return form or other

    def check(self) -> None:
        """Raise FieldError for what the fields do not allow together, or this server at all."""
        if self.top_logprobs is not None and not self.logprobs:
            raise FieldError(
                "top_logprobs need logprobs: set it to true, or leave top_logprobs out", "top_logprobs"
            )
        if self.modalities is not None and self.modalities != ["text"]:
            raise FieldError(
                f"modalities {str(self.modalities)[:80]} are not supported; send text alone, or leave it out",
                "modalities",
            )
        _check_streams(self)
        check_chat(self.messages, self.chat_template_kwargs, continues=self.continue_final_message)


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
        return 16 if self.max_tokens is None else self.max_tokens or int(self.echo)

    @property
    def only_echoes(self) -> bool:
        """Tell whether prompts are to be told alone, with no outputs."""
        return self.echo and self.max_tokens == 0

    @property
    def most_prompt_logprobs(self) -> int | None:
        """Return how many likeliest tokens are wanted beside each of the prompt's own."""
        own = self._prompt_logprobs()
        return max(own or 0, self.most_logprobs or 0) if self.echo and self.logprobs is not None else own

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
        _check_streams(self)
        if self.only_echoes and self.streams:
            raise FieldError(
                "max_tokens 0 is for answers that are no streams; set stream to false", "max_tokens"
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
    continue_final_message: bool = False

    def check(self) -> None:
        """Raise FieldError for what the fields do not allow together."""
        if (self.prompt is None) == (self.messages is None):
            raise FieldError(
                "the request has both prompt and messages, or neither; send one of them", "prompt"
            )
        check_chat(self.messages or (), self.chat_template_kwargs, continues=self.continue_final_message)


class DetokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Holds the body of POST /detokenize."""

    model: str | None = None
    tokens: list[int]


def blamed(error: RequestError) -> str | None:
    """Return the field that the engine's message is about: those begin with it."""
    name = str(error).split(" ", 1)[0]
    return name if name in CompletionRequest.__struct_fields__ else None


def _check_streams(asked: ChatRequest | CompletionRequest) -> None:
    if asked.streams and asked.most_prompt_logprobs is not None:
        name = "echo" if asked.prompt_logprobs is None else "prompt_logprobs"
        what = "echo with logprobs is" if name == "echo" else "prompt_logprobs are"
        raise FieldError(f"{what} for answers that are no streams; set stream to false", name)


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
