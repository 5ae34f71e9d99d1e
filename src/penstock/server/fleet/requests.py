"""Defines what goes between a server and its replicas: prompts that the server has read, and the outputs that
a replica computes for them."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from penstock.api.embeddings import Embedder
from penstock.api.limits import ServingLimits
from penstock.api.llm import LLM
from penstock.api.outputs import Delta
from penstock.api.reader import Prompt, PromptReader
from penstock.api.sequences import PreparedPrompt
from penstock.api.structures import Structures
from penstock.api.text.tokenizer import Tokenizer
from penstock.base.errors import EngineClosedError, PenstockError
from penstock.kv.ledger.keys import block_keys, root_key
from penstock.sched.outlook import WaitForecast
from penstock.sched.rules import admit
from penstock.server.broker.broker import RequestBroker
from penstock.server.broker.calls import Call
from penstock.step.params import SamplingParams
from penstock.step.plan import TokenLogprob
from penstock.weights.checkpoint.generation import GenerationDefaults

_ROOT = root_key(b"which replica")
"""The first link of prompts' keys. Where they are compared there is one model."""


# ---- what a replica is sent, and what it sends


@dataclass(frozen=True, slots=True)
class RemoteRequest:
    """Sends a prompt and its settings, as PromptReader.read takes them.

    decided: fields of PreparedPrompt that the server has decided, seeds among them.
    """

    prompt: Prompt
    params: SamplingParams | None
    decided: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Accepted:
    """Says that a replica has taken the request. forecast: what it has before it there."""

    replica: str
    forecast: WaitForecast | None = None


@dataclass(frozen=True, slots=True)
class OutputChunk:
    """Holds what was added to the outputs. prompt_logprobs, embedding: they come with the first chunk."""

    deltas: tuple[Delta, ...]
    cached: tuple[int, int, int]
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    embedding: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Rejected:
    """Says that no replica can answer the request, and why."""

    fault: PenstockError


ReplicaMessage = Accepted | OutputChunk | Rejected


class LostError(PenstockError):
    """Says that a replica was lost within an answer."""


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """Tells what a server knows of a replica's model. limits: of one replica."""

    vocab_size: int
    limits: ServingLimits
    defaults: GenerationDefaults
    hidden_size: int

    @classmethod
    def of(cls, llm: LLM) -> Self:
        """Return what is known of a loaded model."""
        return cls(llm.reader.vocab_size, llm.limits, llm.reader.defaults, llm.spec.hidden_size)


# ---- where prompts are read


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedPrompt(PreparedPrompt):
    """Adds to a prompt what decides which replica computes it.

    given, params: as the reader was given them.
    keys: of its full blocks.
    size: tokens of a block.
    """

    given: Prompt
    params: SamplingParams | None
    keys: Sequence[bytes]
    size: int

    def salted(self, salt: bytes) -> Self:
        """Return the same prompt, which shares prefixes with prompts of this salt."""
        return replace(self, salt=salt, keys=_keys(self.tokens, self.size, salt, self.lora))

    def adapted(self, lora: str | None) -> Self:
        """Return the same prompt, which is answered with the LoRA adapter of this name, or with none."""
        return replace(self, lora=lora or "", keys=_keys(self.tokens, self.size, self.salt, lora or ""))

    def request(self) -> RemoteRequest:
        """Return the request that a replica is sent."""
        own = {
            field.name: getattr(self, field.name)
            for field in fields(PreparedPrompt)
            if field.name not in ("prompt", "tokens", "detokenizer", "found")
        }
        return RemoteRequest(self.given, self.params, own)

    def keys_with(self, output: Sequence[int]) -> list[bytes]:
        """Return the keys of the full blocks when an output is there too. Of its last token there is no
        KV."""
        rest = (*self.tokens[len(self.keys) * self.size :], *output[:-1])
        last = self.keys[-1] if self.keys else _root(self.salt, self.lora)
        return [*self.keys, *block_keys(last, rest, self.size)]


def _root(salt: bytes, lora: str) -> bytes:
    return root_key(_ROOT, salt, lora) if salt or lora else _ROOT


def _keys(tokens: Sequence[int], size: int, salt: bytes = b"", lora: str = "") -> list[bytes]:
    """Return the keys of a prompt's full blocks but for its last token, which is computed in any case."""
    return block_keys(_root(salt, lora), tokens[: (len(tokens) - 1) // size * size], size)


class RemoteReader(PromptReader):
    """Reads prompts for replicas: what it returns says where it may be computed."""

    def __init__(self, model: Path, info: ReplicaInfo, *, replicas: int, room: str = "") -> None:
        """model: its directory, with the tokenizer. replicas: most that there will be. room: what is told of
        the room for a request that is too long, and of what to try."""
        tokenizer, longest = Tokenizer.from_model(model), info.limits.max_model_len

        def why(_: int) -> str:
            return (
                room
                or f"a replica holds {longest} in all; shorten it, or raise max_length or the memory for KV"
            )

        def admitted(prompt: int, max_tokens: int | None, *, or_more: bool = False) -> int:
            return admit(prompt, max_tokens, longest, why, or_more=or_more)

        limits = replace(info.limits, max_sequences=replicas * info.limits.max_sequences)
        structures = Structures(lambda: tokenizer, info.vocab_size, info.defaults.eos_tokens)
        super().__init__(
            tokenizer,
            structures,
            info.vocab_size,
            info.defaults,
            limits,
            admitted,
            Embedder(model, info.hidden_size),
        )

    def read(self, prompt: Prompt, params: SamplingParams | None = None) -> RoutedPrompt:
        """Return a prompt as replicas take it. Raise RequestError for one that could never be served."""
        ready, size = super().read(prompt, params), self.limits.block_size
        own = (getattr(ready, field.name) for field in fields(PreparedPrompt))
        return RoutedPrompt(*own, given=prompt, params=params, keys=_keys(ready.tokens, size), size=size)


# ---- where they are computed


async def computed(
    reader: PromptReader, broker: RequestBroker, replica: str, request: RemoteRequest
) -> AsyncGenerator[ReplicaMessage]:
    """Give out what a replica's own engine computes for a request. Ends early if the engine ends."""
    calls, sent = list[Call](), False
    yield Accepted(replica)  # At once, so that it is known where the request is.
    try:
        prepared = await asyncio.to_thread(_decided, reader, request)
        calls += broker.submit([prepared])
        yield Accepted(replica, calls[0].forecast)
        async for deltas in calls[0].pieces():
            assert calls[0].group is not None
            first = calls[0].group.sequences[0]
            once = () if sent else tuple(first.prompt_logprobs)
            yield OutputChunk(tuple(deltas), first.cached, once, () if sent else first.embedding)
            sent = True
    except EngineClosedError:
        return
    except PenstockError as fault:
        yield Rejected(fault)
    finally:
        for call in calls:
            call.leave()


def _decided(reader: PromptReader, request: RemoteRequest) -> PreparedPrompt:
    """Return the request as the model reads it. Raise RequestError."""
    return replace(reader.read(request.prompt, request.params), **request.decided)
