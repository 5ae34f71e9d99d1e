"""Defines what clients may send to have embeddings, and what they get."""

from functools import cached_property
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from penstock.server.wire.decoding import FieldError
from penstock.server.wire.ollama import LATEST, seconds_kept
from penstock.server.wire.requests import MOST_PROMPTS, Priority, Salt, Timeout
from penstock.server.wire.shapes import AnswerObject


class PooledRequest(Struct, kw_only=True, dict=True):
    """Declares what all requests for hidden states have: for embeddings, and for scores."""

    model: str
    # Beside those of others:
    priority: Priority = 0
    timeout: Timeout | None = None
    cache_salt: Salt | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the model that is asked for."""
        return (self.model,)

    @property
    def streams(self) -> bool:
        """Tell whether the answer is a stream, which these are not."""
        return False

    @property
    def outputs(self) -> int:
        """Count the outputs for which there must be room."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise FieldError for what the fields do not allow together."""


class InputsRequest(PooledRequest, kw_only=True):
    """Declares what all requests for embeddings have."""

    input: str | list[Any]
    """Text or token ids, or a list of these."""
    dimensions: int | None = None

    @property
    def shortens(self) -> bool:
        """Tell whether inputs are cut to what the model has room for."""
        return False

    @property
    def outputs(self) -> int:
        """Count the inputs."""
        return len(self.inputs)

    @cached_property
    def inputs(self) -> list[str | list[int]]:
        """Return the inputs: texts, or token ids."""
        given = self.input
        return [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given

    def check(self) -> None:
        """Raise FieldError for inputs that are none."""
        if not self.inputs:
            raise FieldError("input is an empty list; send at least one text", "input")
        if len(self.inputs) > MOST_PROMPTS:
            raise FieldError(
                f"{len(self.inputs)} inputs are more than {MOST_PROMPTS}; send several requests", "input"
            )
        for one in self.inputs:
            if not isinstance(one, str) and not (
                isinstance(one, list) and all(type(token) is int for token in one)
            ):
                raise FieldError("input must be a text, a list of token ids, or a list of these", "input")
            if not one:
                raise FieldError("input has an empty text; leave it out", "input")


class EmbeddingsRequest(InputsRequest, forbid_unknown_fields=True, kw_only=True):
    """Holds the body of POST /v1/embeddings."""

    encoding_format: Literal["float", "base64"] = "float"
    user: str | None = None

    @property
    def ignored(self) -> list[str]:
        """Name the fields that were sent and have no effect."""
        return [] if self.user is None else ["user"]


class EmbedRequest(InputsRequest, forbid_unknown_fields=False, kw_only=True):
    """Holds the body of POST /api/embed, in ollama's words."""

    truncate: bool | None = None
    keep_alive: float | str | None = None
    options: dict[str, Any] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the model that is asked for."""
        return (self.model, self.model.removesuffix(LATEST))

    @property
    def kept(self) -> float | None:
        """Return the seconds for which the model is to stay without requests; None is the server's. Raise
        FieldError."""
        return seconds_kept(self.keep_alive)

    @property
    def shortens(self) -> bool:
        """Tell whether inputs are cut to what the model has room for: unless a client says that not."""
        return self.truncate is not False

    @property
    def ignored(self) -> list[str]:
        """Name the fields that were sent and have no effect."""
        return [name for name in ("keep_alive", "options") if getattr(self, name)]


# ---- answers


class EmbeddingUsage(AnswerObject):
    """Counts the tokens of a request."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingObject(AnswerObject):
    """Holds the embedding of an input."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str
    """Numbers, or the bytes of 32-bit numbers, the least significant first, in base64."""


class EmbeddingList(AnswerObject):
    """Answers a request for embeddings."""

    object: Literal["list"]
    model: str
    data: list[EmbeddingObject]
    usage: EmbeddingUsage


class OllamaEmbeddings(AnswerObject):
    """Answers a request for embeddings, as ollama has it. Durations are in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
