"""Defines the answers of ollama's paths, field by field; see wire.shapes."""

from typing import Any, Literal

from msgspec import UNSET, UnsetType

from penstock.server.wire.shapes import AnswerObject, ChatTokenLogprob


class OllamaRefusal(AnswerObject):
    """Says what is wrong: the body of a response that is an error, and the last line of a stream that has
    failed."""

    error: str


class OllamaFunction(AnswerObject):
    """Names a function that is called."""

    index: int
    name: str
    arguments: dict[str, Any]


class OllamaToolCall(AnswerObject):
    """Calls a tool."""

    id: str
    function: OllamaFunction


class OllamaAnswerMessage(AnswerObject):
    """Answers a conversation, or adds to an answer."""

    role: Literal["assistant"]
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaToolCall] | UnsetType = UNSET


class _OllamaAnswer(AnswerObject, kw_only=True):
    """Holds an answer, or what has come of it since the line before. Durations are in nanoseconds."""

    model: str
    created_at: str
    done: bool
    logprobs: list[ChatTokenLogprob] | UnsetType = UNSET
    done_reason: Literal["stop", "length", "load"] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class OllamaChatAnswer(_OllamaAnswer, kw_only=True):
    """Answers a conversation, or adds to an answer."""

    message: OllamaAnswerMessage


class OllamaTextAnswer(_OllamaAnswer, kw_only=True):
    """Continues a text, or adds to what does."""

    response: str
    thinking: str | UnsetType = UNSET


class OllamaDetails(AnswerObject):
    """Says of which kind a model is."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(AnswerObject):
    """Describes a model. size: bytes of its weights."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaRunningModel(OllamaModel):
    """Describes a model that is loaded. size_vram: bytes of its weights on the device."""

    expires_at: str
    size_vram: int
    context_length: int


class OllamaModels(AnswerObject):
    """Lists the models by their names."""

    models: list[OllamaModel]


class OllamaRunningModels(AnswerObject):
    """Lists the models that are loaded."""

    models: list[OllamaRunningModel]


class OllamaShown(AnswerObject):
    """Describes a model in full."""

    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[Literal["completion", "tools", "thinking"]]
    modified_at: str


class VersionAnswer(AnswerObject):
    """Gives a version."""

    version: str
