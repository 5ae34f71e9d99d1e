"""Holds what happened to a request in a step."""

from penstock.step.plan import RequestId, TokenLogprob
from penstock.step.record import record
from penstock.step.request import FinishReason


@record(frozen=True, slots=True)
class Event:
    """An event is one thing that happened to a request in a step.

    It is a token, the end, or log-probabilities of the prompt. A step that yields several tokens of a request
    makes an event for each.

    cached: prompt tokens with KV from the prefix cache, which the request has not computed.
    cached_host, cached_disk: those of them that had to come from the host, and from the disk.
    fault: why the request ended, if that was an error of its own without a token.
    embedding: the hidden state behind the prompt, where it was asked for.
    drafts: tokens of its drafts so far, and those of them that were accepted.
    """

    request: RequestId
    token: int | None = None
    logprob: TokenLogprob | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    cached: int = 0
    cached_host: int = 0
    cached_disk: int = 0
    fault: str = ""
    embedding: tuple[float, ...] = ()
    drafts: tuple[int, int] = (0, 0)
