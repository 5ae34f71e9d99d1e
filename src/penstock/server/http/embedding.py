"""Answers requests for embeddings and for scores."""

from starlette.requests import Request
from starlette.responses import Response

from penstock.server.answers.embeddings import read_embeddings
from penstock.server.answers.scores import read_scores
from penstock.server.http.asking import asked_of, prepared_for
from penstock.server.http.sending import embedded, scored, told_ignored
from penstock.server.http.state import ServerState
from penstock.server.wire.embeddings import EmbeddingsRequest, EmbedRequest
from penstock.server.wire.scores import RerankRequest, ScoreRequest


async def embed(
    server: ServerState, request: Request, kind: type[EmbeddingsRequest] | type[EmbedRequest]
) -> Response:
    """Return the embeddings that a request asks for."""
    whole = server
    server, asked = await asked_of(server, request, kind)
    ready, writer = await prepared_for(server, request, asked, read_embeddings)
    ignored = [name for name in asked.ignored if whole.models is None or name != "keep_alive"]
    return told_ignored(await embedded(request, server.model()[1], ready, writer, asked), ignored)


async def score(
    server: ServerState, request: Request, kind: type[ScoreRequest] | type[RerankRequest]
) -> Response:
    """Return the scores that a request asks for."""
    server, asked = await asked_of(server, request, kind)
    ready, writer = await prepared_for(server, request, asked, read_scores)
    return told_ignored(await scored(request, server.model()[1], ready, writer, asked), asked.ignored)
