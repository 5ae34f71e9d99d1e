"""Makes prompts of requests for embeddings, and writes their answers."""

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, replace
from struct import pack
from time import perf_counter_ns

from penstock.api.outputs import Completion, Embedding
from penstock.api.reader import Prompt, PromptReader
from penstock.api.sequences import PreparedPrompt
from penstock.base.errors import PenstockError, RequestError
from penstock.server.answers.completions import Answer
from penstock.server.parsing.dialects import Dialect
from penstock.server.wire.decoding import FieldError
from penstock.server.wire.embeddings import EmbeddingsRequest, EmbedRequest


def read_embeddings(
    reader: PromptReader, asked: EmbeddingsRequest | EmbedRequest, dialect: Dialect | None = None
) -> "tuple[list[PreparedPrompt], EmbeddingWriter]":
    """Return a checked request's inputs as prompts, and what writes the answer. May be called from any
    thread.

    Raise FieldError and RequestError for what cannot be served.
    """
    try:
        reader.embedder.check(asked.dimensions)
    except RequestError as fault:
        raise FieldError(str(fault), "dimensions") from fault
    except PenstockError as fault:  # Which names files of the server.
        raise FieldError(
            "the model makes no embeddings, since its checkpoint does not say how; ask a server of one that "
            "is made for that, such as Qwen3-Embedding",
            "model",
        ) from fault
    prompts = [reader.read_embedding(_shortened(reader, one, asked)) for one in asked.inputs]
    ready = [replace(one, priority=asked.priority) for one in prompts]
    return ready, EmbeddingWriter(reader, asked, perf_counter_ns())


def _shortened(
    reader: PromptReader, given: str | list[int], asked: EmbeddingsRequest | EmbedRequest
) -> Prompt:
    """Return an input, cut at its end where there is no room for more and the request allows that.

    The tokens that a tokenizer puts behind a text stay: embeddings are taken there.
    """
    if not asked.shortens:
        return given
    most = reader.limits.max_model_len - 1
    if isinstance(given, list):
        return given[:most]
    tokens = reader.tokenizer.encode(given)
    if len(tokens) <= most:
        return tokens
    behind = _behind(reader, tokens)
    return tokens[: most - behind] + tokens[len(tokens) - behind :]


def _behind(reader: PromptReader, tokens: Sequence[int]) -> int:
    """Return how many special tokens stand behind a text."""
    special, count = reader.tokenizer.special_tokens, 0
    while count < len(tokens) and tokens[-1 - count] in special:
        count += 1
    return count


@dataclass(frozen=True, slots=True)
class EmbeddingWriter:
    """Writes the answer to a request for embeddings. began: by perf_counter_ns."""

    reader: PromptReader
    asked: EmbeddingsRequest | EmbedRequest
    began: int

    def whole(self, completions: Sequence[Completion]) -> Answer:
        """Return the answer. Raise RequestError and EngineClosedError as `Embedder.embedding` does."""
        make, dimensions = self.reader.embedder.embedding, self.asked.dimensions
        found = [make(one, dimensions) for one in completions]
        tokens = sum(len(one.prompt_tokens) for one in found)
        if isinstance(self.asked, EmbedRequest):
            return {
                "model": self.asked.model,
                "embeddings": [one.embedding for one in found],
                "total_duration": perf_counter_ns() - self.began,
                "load_duration": 0,
                "prompt_eval_count": tokens,
            }
        return {
            "object": "list",
            "model": self.asked.model,
            "data": [
                {"object": "embedding", "index": index, "embedding": _written(one, self.asked)}
                for index, one in enumerate(found)
            ],
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }


def _written(one: Embedding, asked: EmbeddingsRequest) -> object:
    if asked.encoding_format == "float":
        return one.embedding
    return b64encode(pack(f"<{len(one.embedding)}f", *one.embedding)).decode()
