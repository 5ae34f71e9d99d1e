"""Tells by a path which protocol its clients speak, and writes errors as they read them."""

from enum import Enum

from penstock.server.answers.completions import Answer, error

MESSAGES = "/v1/messages"
OLLAMA_PATHS = "/api/"
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Types of errors by status, as Anthropic names them."""


_PULL = "the server has the model that it was started with; start `penstock serve MODEL` for another one"
ABSENT = {
    "/api/embeddings": "it is ollama's older path; use /api/embed",
    "/api/pull": _PULL,
    "/api/push": _PULL,
    "/api/create": _PULL,
    "/api/copy": "names are given to the model when the server is started; add `--name NAME`",
    "/api/delete": "files of models are not the server's to delete; delete the model's directory",
}
"""Paths of ollama's API that are not served, and what to use instead."""


class Protocol(Enum):
    """Names the protocol that a client speaks."""

    OPENAI = "OpenAI"
    ANTHROPIC = "Anthropic"
    OLLAMA = "ollama"


def protocol_of(path: str) -> Protocol:
    """Return the protocol of a path. What none of the others has is OpenAI's."""
    if path == MESSAGES or path.startswith(f"{MESSAGES}/"):
        return Protocol.ANTHROPIC
    return Protocol.OLLAMA if path.startswith(OLLAMA_PATHS) else Protocol.OPENAI


def anthropic_error(message: str, status: int, request: str | None = None) -> Answer:
    """Return the body of an error as Anthropic's clients read it. request: its id, if it has one."""
    kind = _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request}


def told(path: str, status: int, body: Answer, request: str | None = None) -> Answer:
    """Return an error as the clients of a path read it. body: the same in OpenAI's form. request: its id."""
    message = str(body["error"]["message"])  # type: ignore[index]
    match protocol_of(path):
        case Protocol.ANTHROPIC:
            return anthropic_error(message, status, request)
        case Protocol.OLLAMA:
            return {"error": message}
    return body


def refusal(path: str, status: int, message: str) -> Answer:
    """Return the body of an error for a request that no route takes."""
    return told(path, status, error(message, "invalid_request_error"))
