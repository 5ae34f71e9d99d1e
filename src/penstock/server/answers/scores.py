"""Makes prompts of requests for scores, and writes their answers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import time

from penstock.api.outputs import Completion, Score
from penstock.api.reader import PromptReader
from penstock.api.scoring import Pairs
from penstock.api.sequences import PreparedPrompt
from penstock.base.errors import CheckpointError, UnsupportedModelError
from penstock.server.answers.completions import Answer, new_id
from penstock.server.parsing.dialects import Dialect
from penstock.server.wire.decoding import FieldError
from penstock.server.wire.scores import PairsRequest, RerankRequest


def read_scores(
    reader: PromptReader, asked: PairsRequest, dialect: Dialect | None = None
) -> "tuple[list[PreparedPrompt], ScoreWriter]":
    """Return a checked request's pairs as prompts, and what writes the answer. May be called from any thread.

    Raise FieldError and RequestError for what cannot be served.
    """
    try:
        _ = reader.scorer.head
    except (CheckpointError, UnsupportedModelError) as fault:  # Which name files of the server.
        raise FieldError(
            "the model is no reranker: its checkpoint has neither a head that scores nor a way to make "
            "embeddings; ask a server of one that has, such as Qwen3-Reranker",
            "model",
        ) from fault
    pairs = asked.cut(reader.limits.max_model_len - 1)
    ready = [replace(one, priority=asked.priority) for one in reader.read_pairs(pairs)]
    return ready, ScoreWriter(reader, asked, pairs)


@dataclass(frozen=True, slots=True)
class ScoreWriter:
    """Writes the answer to a request for scores."""

    reader: PromptReader
    asked: PairsRequest
    pairs: Pairs

    def whole(self, completions: Sequence[Completion]) -> Answer:
        """Return the answer. Raise RequestError and EngineClosedError as `Scorer.scores` does."""
        asked = self.asked
        found = self.reader.scorer.scores(self.pairs, completions, activated=asked.use_activation)
        tokens = sum(len(one.prompt_tokens) for one in completions)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        if isinstance(asked, RerankRequest):
            return {
                "id": new_id("rerank-"),
                "object": "list",
                "model": asked.model,
                "results": _ranked(found, asked),
                "usage": usage,
            }
        return {
            "id": new_id("score-"),
            "object": "list",
            "created": int(time()),
            "model": asked.model,
            "data": [
                {"object": "score", "index": index, "score": one.score} for index, one in enumerate(found)
            ],
            "usage": usage,
        }


def _ranked(found: Sequence[Score], asked: RerankRequest) -> list[Answer]:
    """Return the most relevant documents, the best first; of equals the one that was sent first."""
    order = sorted(range(len(found)), key=lambda index: -found[index].score)
    return [
        {"index": index, "relevance_score": found[index].score}
        | ({"document": {"text": found[index].document}} if asked.return_documents else {})
        for index in order[: asked.top_n or None]
    ]
