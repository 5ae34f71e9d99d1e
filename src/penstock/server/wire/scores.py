"""Defines what clients may send to have documents scored for a query, and what they get."""

from functools import cached_property
from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from penstock.api.scoring import Pairs
from penstock.base.errors import RequestError
from penstock.server.wire.decoding import FieldError
from penstock.server.wire.embeddings import EmbeddingUsage, PooledRequest
from penstock.server.wire.shapes import AnswerObject

SCORE_PATHS = ("/score", "/v1/score")
RERANK_PATHS = ("/rerank", "/v1/rerank", "/v2/rerank")
MOST_DOCUMENTS = 1000
_FIRST, _SECOND = ("text_1", "data_1", "queries"), ("text_2", "data_2", "documents", "items")


class PairsRequest(PooledRequest, kw_only=True):
    """Declares what all requests for scores have."""

    instruction: str | None = None
    """The task, for models that read one."""
    use_activation: bool = True
    """Without it a score is the head's logit."""
    truncate_prompt_tokens: int | None = None
    """Tokens of a prompt at most, to which its document is cut; -1 is what the model has room for."""
    max_tokens_per_doc: int | None = None
    """Tokens to which a document is cut."""
    user: str | None = None

    @property
    def outputs(self) -> int:
        """Count the outputs for which there must be room at once: pairs are computed in turns."""
        return 1

    @cached_property
    def pairs(self) -> Pairs:
        """Return the pairs."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise FieldError for pairs that are none."""
        for name in ("max_tokens_per_doc", "truncate_prompt_tokens"):
            given = getattr(self, name)
            if given is not None and given < 1 and (name, given) != ("truncate_prompt_tokens", -1):
                raise FieldError(f"{name} {given} must be at least 1; leave it out to cut nothing", name)
        if (count := len(self.pairs.documents)) > MOST_DOCUMENTS:
            raise FieldError(
                f"{count} documents are more than {MOST_DOCUMENTS}; send several requests", "documents"
            )

    def cut(self, longest: int) -> Pairs:
        """Return the pairs, cut as is asked for. longest: tokens of a prompt that the model has room for."""
        pairs, most = self.pairs, self.truncate_prompt_tokens
        return Pairs(
            pairs.queries,
            pairs.documents,
            self.instruction,
            self.max_tokens_per_doc,
            longest if most == -1 else most,
        )


class ScoreRequest(PairsRequest, forbid_unknown_fields=True, kw_only=True):
    """Holds the body of POST /score, in vLLM's words: one text for many others, or one for each."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    data_1: str | list[str] | None = None
    data_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    items: str | list[str] | None = None

    @cached_property
    def pairs(self) -> Pairs:
        """Return the pairs. Raise FieldError for texts that are not there, or that do not fit together."""
        found: list[str | list[str]] = []
        for names in (_FIRST, _SECOND):
            given = [name for name in names if getattr(self, name) is not None]
            if len(given) != 1:
                raise FieldError(
                    f"{' and '.join(given) or 'nothing'} was sent; send one of {', '.join(names)}", names[0]
                )
            found.append(getattr(self, given[0]))
        queries, documents = found
        try:
            return Pairs.of(queries, documents)
        except RequestError as fault:
            raise FieldError(str(fault), _SECOND[0]) from fault

    @property
    def ignored(self) -> list[str]:
        """Name the fields that were sent and have no effect."""
        return [] if self.user is None else ["user"]


class RerankDocument(Struct):
    """Holds a document that is sent as an object. Its other fields are not read."""

    text: str


class RerankRequest(PairsRequest, forbid_unknown_fields=True, kw_only=True):
    """Holds the body of POST /rerank, in the words of Jina and Cohere."""

    query: str
    documents: list[str | RerankDocument]
    top_n: int | None = None
    """Documents that are answered at most; 0 is all."""
    return_documents: bool = True
    rank_fields: list[str] | None = None
    max_chunks_per_doc: int | None = None

    @cached_property
    def pairs(self) -> Pairs:
        """Return the query with each document. Raise FieldError if there are none."""
        if not self.documents:
            raise FieldError("documents is an empty list; send at least one text", "documents")
        return Pairs.of(self.query, [one if isinstance(one, str) else one.text for one in self.documents])

    def check(self) -> None:
        """Raise FieldError for documents that are none, and for a number of them that cannot be."""
        super().check()
        if self.top_n is not None and self.top_n < 0:
            raise FieldError(f"top_n {self.top_n} must be at least 0; 0 is all documents", "top_n")

    @property
    def ignored(self) -> list[str]:
        """Name the fields that were sent and have no effect."""
        names = ("user", "rank_fields", "max_chunks_per_doc")
        return [name for name in names if getattr(self, name) is not None]


# ---- answers


class ScoreObject(AnswerObject):
    """Holds the score of a pair."""

    object: Literal["score"]
    index: int
    score: float


class ScoreList(AnswerObject):
    """Answers a request for scores, in the order of the documents."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreObject]
    usage: EmbeddingUsage


class RankedText(AnswerObject):
    """Holds the text of a document."""

    text: str


class RankedDocument(AnswerObject):
    """Holds a document's place among those that were sent, and how well it answers the query."""

    index: int
    relevance_score: float
    document: RankedText | UnsetType = UNSET


class Ranking(AnswerObject):
    """Answers a request to rank documents, the most relevant first."""

    id: str
    object: Literal["list"]
    model: str
    results: list[RankedDocument]
    usage: EmbeddingUsage
