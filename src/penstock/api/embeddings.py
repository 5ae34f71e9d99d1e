"""Make embeddings of what the model computes for prompts."""

import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from penstock.api.outputs import Completion, Embedding
from penstock.base.errors import EngineClosedError, RequestError
from penstock.step.request import FinishReason
from penstock.weights.checkpoint.pooling import Pooling


class Embedder:
    """Makes embeddings of completions, as a checkpoint says. May be used from any thread."""

    def __init__(self, model: Path, hidden: int) -> None:
        """model: the checkpoint's directory. hidden: numbers of a hidden state."""
        self.model, self.hidden = model, hidden

    @cached_property
    def pooling(self) -> Pooling:
        """Return how the checkpoint makes embeddings. Raise UnsupportedModelError if it does not say."""
        return Pooling.of(self.model)

    def check(self, dimensions: int | None) -> None:
        """Raise RequestError unless embeddings can be cut to so many numbers, where None leaves them whole,
        and UnsupportedModelError for a model that makes none."""
        _ = self.pooling
        whole = isinstance(dimensions, int) and not isinstance(dimensions, bool)
        if dimensions is not None and not (whole and 1 <= dimensions <= self.hidden):
            raise RequestError(
                f"dimensions {dimensions!r} must be a whole number from 1 to {self.hidden}, the model's "
                "hidden size"
            )

    def embedding(self, completion: Completion, dimensions: int | None) -> Embedding:
        """Return the embedding of a prompt that has been computed.

        dimensions: it is cut to so many of its first numbers, before it is normalised (Matryoshka
            embeddings).
        Raises RequestError where the model's numbers were not finite, or where what was computed did not fit,
        and EngineClosedError where the prompt was not computed to its end.
        """
        vector: Sequence[float] = hidden_state(completion)[:dimensions]
        if self.pooling.normalised:
            length = max(math.hypot(*vector), 1e-12)
            vector = [number / length for number in vector]
        return Embedding(completion.prompt, completion.prompt_tokens, tuple(vector), completion.cached_tokens)


def hidden_state(completion: Completion) -> tuple[float, ...]:
    """Return the hidden state behind a prompt that has been computed. Raise what `Embedder.embedding`
    does."""
    output = completion.outputs[0]
    if output.finish_reason is FinishReason.ABORT:
        raise EngineClosedError("the model was closed before this embedding was complete")
    if output.error:
        raise RequestError(output.error)
    vector = completion.embedding
    if not vector or not all(map(math.isfinite, vector)):
        raise RequestError(
            "the model has computed numbers that are not finite for this prompt; try --dtype float32"
        )
    return vector
