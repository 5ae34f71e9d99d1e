"""Score documents for queries: with a head that reads both, or by the cosine of their embeddings."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import mul
from typing import Self

from penstock.api.embeddings import Embedder, hidden_state
from penstock.api.outputs import Completion, Score
from penstock.api.text.tokenizer import Tokenizer
from penstock.base.errors import CheckpointError, RequestError
from penstock.base.units import counted
from penstock.step.params import shown
from penstock.weights.checkpoint.scoring import ScoreHead

_TASK = "Given a web search query, retrieve relevant passages that answer the query"
_JUDGE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
    'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_ANSWER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
"""These and the task are of Qwen3-Reranker's model card."""
_TURN = "<|im_start|>"
_ROLES = re.compile(r"""['"]query['"].*['"]document['"]""", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Pairs:
    """Holds queries and documents, one of each for a score, and how they are put to the model.

    instruction: the task, for models that read one; None is the model's own.
    document_tokens, prompt_tokens: documents are cut at their end to so many tokens, and so that a prompt has
        at most so many.
    """

    queries: tuple[str, ...]
    documents: tuple[str, ...]
    instruction: str | None = None
    document_tokens: int | None = None
    prompt_tokens: int | None = None

    @classmethod
    def of(
        cls, queries: str | Sequence[str], documents: str | Sequence[str], instruction: str | None = None
    ) -> Self:
        """Return the pairs of one query with each document, or of each query with its own. Raise RequestError
        for numbers that do not fit, and for what is no text."""
        ours, theirs = _texts("queries", queries), _texts("documents", documents)
        if len(ours) not in (1, len(theirs)):
            raise RequestError(
                f"there are {len(ours)} queries for {counted(len(theirs), 'document')}; give one query for "
                "all, or one for each"
            )
        if instruction is not None and not isinstance(instruction, str):
            raise RequestError(f"instruction {shown(instruction)} must be a text")
        return cls(ours, theirs, instruction)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        queries = self.queries * (len(self.documents) if len(self.queries) == 1 else 1)
        return iter(zip(queries, self.documents, strict=True))


def _texts(name: str, given: object) -> tuple[str, ...]:
    several = (given,) if isinstance(given, str) else given
    if not isinstance(several, Sequence) or isinstance(several, bytes | bytearray):
        raise RequestError(f"{name} is of type {type(given).__name__}; give a text or a list of texts")
    for one in several:
        if not isinstance(one, str):
            raise RequestError(f"{name} has a value of type {type(one).__name__}; give texts")
    if not several:
        raise RequestError(f"{name} is empty; give at least one text")
    return tuple(several)


class Scorer:
    """Makes prompts of pairs, and scores of what was computed for these, as a checkpoint says. May be used
    from any thread."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder

    @cached_property
    def head(self) -> ScoreHead | None:
        """Return what makes scores; None where they are cosines of embeddings. Raise UnsupportedModelError
        for a model that is no reranker, CheckpointError for files that are damaged."""
        head = ScoreHead.of(self._embedder.model)
        if head is None:
            self._embedder.check(None)
        elif len(head.weights) != (hidden := self._embedder.hidden):
            raise CheckpointError(
                f"{self._embedder.model} scores with {len(head.weights)} numbers, but its hidden states have "
                f"{hidden}; fetch it again"
            )
        return head

    def text(self, tokenizer: Tokenizer, pair: tuple[str, str], instruction: str | None) -> str | None:
        """Return a pair as the model reads it; None if that is text for text, with whatever the tokenizer
        puts around a pair. Raise RequestError.

        A query that begins with `<|im_start|>` has been written out by its client, and its document goes
        behind it.
        """
        query, document = pair
        if query.startswith(_TURN):
            return query + document
        if (name := _template_of(tokenizer.templates)) is not None:
            task = [] if instruction is None else [{"role": "system", "content": instruction}]
            asked = [{"role": "query", "content": query}, {"role": "document", "content": document}]
            return tokenizer.render_pair(name, [*task, *asked])
        if self.head is not None and self.head.instructs:
            task_text = _TASK if instruction is None else instruction
            return f"{_JUDGE}<Instruct>: {task_text}\n<Query>: {query}\n<Document>: {document}{_ANSWER}"
        if instruction is not None:
            raise RequestError("this model takes no instruction; leave it out, or put it into the query")
        return None

    def scores(
        self, pairs: Pairs, completions: Sequence[Completion], *, activated: bool = True
    ) -> list[Score]:
        """Return the score of each pair, of what was computed for `PromptReader.read_pairs`. Raise what
        `Embedder.embedding` does.

        activated: whether the head's number goes through its activation.
        """
        if (head := self.head) is not None:
            return [
                Score(
                    *pair,
                    head.score(hidden_state(one), activated=activated),
                    one.prompt_tokens,
                    one.cached_tokens,
                )
                for pair, one in zip(pairs, completions, strict=True)
            ]
        embedded = [self._embedder.embedding(one, None) for one in completions]
        count = len(pairs.queries)
        queries = embedded[:count] * (len(pairs.documents) if count == 1 else 1)
        return [
            Score(
                *pair,
                _cosine(one.embedding, other.embedding),
                one.prompt_tokens + other.prompt_tokens,
                one.cached_tokens + other.cached_tokens,
            )
            for pair, one, other in zip(pairs, queries, embedded[count:], strict=True)
        ]


def _template_of(templates: Mapping[str, str]) -> str | None:
    """Return the name of the chat template that has roles for a query and a document, if one has."""
    names = [name for name in ("rerank", "default") if _ROLES.search(templates.get(name, ""))]
    return names[0] if names else None


def _cosine(one: Sequence[float], other: Sequence[float]) -> float:
    lengths = math.hypot(*one) * math.hypot(*other)
    return math.fsum(map(mul, one, other)) / max(lengths, 1e-12)
