"""Make embeddings of what the model computes for prompts."""

import math
from collections.abc import Sequence

from penstock.api.outputs import Completion, Embedding
from penstock.base.errors import RequestError
from penstock.weights.checkpoint.pooling import Pooling


def check_dimensions(dimensions: int | None, hidden: int) -> None:
    """Raise RequestError unless an embedding can be cut to so many numbers; None leaves it whole.

    hidden: numbers of a whole one.
    """
    whole = isinstance(dimensions, int) and not isinstance(dimensions, bool)
    if dimensions is not None and not (whole and 1 <= dimensions <= hidden):
        raise RequestError(
            f"dimensions {dimensions!r} must be a whole number from 1 to {hidden}, the model's hidden size"
        )


def embedding_of(completion: Completion, pooling: Pooling, dimensions: int | None) -> Embedding:
    """Return the embedding of a prompt that has been computed.

    dimensions: it is cut to so many of its first numbers, before it is normalised (Matryoshka embeddings).
    Raises RequestError where the model's numbers were not finite.
    """
    vector: Sequence[float] = completion.embedding[:dimensions]
    if not vector or not all(map(math.isfinite, vector)):
        raise RequestError(
            "the model has computed numbers that are not finite for this prompt; try --dtype float32"
        )
    if pooling.normalised:
        length = max(math.hypot(*vector), 1e-12)
        vector = [number / length for number in vector]
    return Embedding(completion.prompt, completion.prompt_tokens, tuple(vector), completion.cached_tokens)
