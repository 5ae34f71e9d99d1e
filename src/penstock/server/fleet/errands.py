"""What goes between a server and its replicas: prompts that the server has read, and what a replica makes of
them."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from penstock.api.jobs import Ready
from penstock.api.llm import LLM, Prompt
from penstock.api.outputs import Delta
from penstock.api.structures import Structures
from penstock.api.text import Tokenizer
from penstock.arch.spec import ModelSpec
from penstock.base.errors import EngineClosedError, LengthError, PenstockError, RequestError
from penstock.base.meter import MissedStats, Passes
from penstock.engine.boot import Booted
from penstock.engine.engine import Stats
from penstock.kv.ledger.keys import block_keys, root_key
from penstock.sched.rules import Limits
from penstock.server.desk import Desk
from penstock.step.params import SamplingParams
from penstock.step.plan import TokenLogprob
from penstock.weights.checkpoint.generation import GenerationDefaults

_ROOT = root_key(b"which replica")
"""Of the keys by which prompts are told apart. Where they are compared there is one model."""


# ---- what a replica is sent, and what it sends


@dataclass(frozen=True, slots=True)
class Errand:
    """A prompt and its settings, as LLM.read takes them, and whatever was decided of it since."""

    prompt: Prompt
    params: SamplingParams | None
    decided: dict[str, object]
    """Fields of Ready, seeds among them."""


@dataclass(frozen=True, slots=True)
class Begun:
    """A replica has taken the errand."""

    replica: str


@dataclass(frozen=True, slots=True)
class Came:
    """What was added to the outputs. prompt_logprobs: all of them, with the first."""

    deltas: tuple[Delta, ...]
    cached: tuple[int, int, int]
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing comes of it, here or elsewhere."""

    fault: PenstockError


Message = Begun | Came | Refused


class LostError(PenstockError):
    """A replica was lost in the midst of an answer."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What is to be known of a replica's model where prompts are read."""

    spec: ModelSpec
    limits: Limits
    longest: int
    blocks: int
    """KV blocks that it holds, on the device and in host memory."""
    defaults: GenerationDefaults

    @classmethod
    def of(cls, llm: LLM) -> "Facts":
        scheduler = llm.booted.engine.scheduler
        blocks = llm.booted.budget.blocks + (scheduler.host.near or 0)
        return cls(llm.spec, llm.booted.limits, scheduler.longest, blocks, llm._defaults)


# ---- where prompts are read


@dataclass(frozen=True, slots=True, kw_only=True)
class Sendable(Ready):
    given: Prompt
    params: SamplingParams | None
    keys: Sequence[bytes]
    """Of its full blocks."""
    size: int
    """Tokens of a block."""

    def salted(self, salt: bytes) -> "Sendable":
        return replace(self, salt=salt, keys=_keys(self.tokens, self.size, salt))

    def errand(self) -> Errand:
        own = {
            field.name: getattr(self, field.name)
            for field in fields(Ready)
            if field.name not in ("prompt", "tokens", "detokenizer")
        }
        return Errand(self.given, self.params, own)

    def keys_with(self, output: Sequence[int]) -> list[bytes]:
        """Of the full blocks when an output is there too. Of its last token there is no KV."""
        rest = (*self.tokens[len(self.keys) * self.size :], *output[:-1])
        return [*self.keys, *block_keys(self.keys[-1] if self.keys else _root(self.salt), rest, self.size)]


def _root(salt: bytes) -> bytes:
    return root_key(_ROOT, salt) if salt else _ROOT


def _keys(tokens: Sequence[int], size: int, salt: bytes = b"") -> list[bytes]:
    """Of the full blocks of a prompt but for its last token, which is computed in any case."""
    return block_keys(_root(salt), tokens[: (len(tokens) - 1) // size * size], size)


class FarLLM(LLM):
    """A model whose engines are elsewhere: its prompts are read here, and nothing is computed."""

    def __init__(self, model: Path, facts: Facts, *, replicas: int) -> None:
        """model: its directory, of which the tokenizer is read. replicas: most that there will be."""
        # Of an engine that is not there: what reading asks of it, and what a desk does.
        scheduler = SimpleNamespace(longest=facts.longest, admissible=self._admissible)
        limits = SimpleNamespace(
            max_sequences=replicas * facts.limits.max_sequences,
            max_step_tokens=facts.limits.max_step_tokens,
            max_length=facts.limits.max_length,
            block_size=facts.limits.block_size,
        )
        self._facts = facts
        self._tokenizer = Tokenizer.from_directory(model) if (model / "tokenizer.json").exists() else None
        self._defaults = facts.defaults
        self._structures = Structures(
            lambda: self._tokenizer, facts.spec.vocab_size, facts.defaults.eos_tokens
        )
        self._engine = SimpleNamespace(scheduler=scheduler)  # type: ignore[assignment]
        self._booted = cast(Booted, SimpleNamespace(spec=facts.spec, limits=limits, engine=self._engine))

    def read(self, prompt: Prompt, params: SamplingParams | None = None) -> Ready:
        ready, size = super().read(prompt, params), self._facts.limits.block_size
        keys = _keys(ready.tokens, size)
        return Sendable(
            *(getattr(ready, field.name) for field in fields(Ready)),
            given=prompt,
            params=params,
            keys=keys,
            size=size,
        )

    def stats(self) -> Stats:
        return Stats(0, 0, 1, 1, 0, 0, 0, 0, 0, None, None, MissedStats(), Passes())

    def close(self) -> None:
        self._structures.close()

    def _admissible(self, prompt: int, max_tokens: int | None, *, or_more: bool = False) -> int:
        room = self._facts.longest - prompt
        if not prompt:
            raise RequestError("the prompt is empty; give at least one token")
        if room < 1 or (max_tokens is not None and max_tokens > room):
            asked = f"{'at least ' if or_more else ''}{prompt} tokens of prompt" + (
                f" and {max_tokens} of output" if max_tokens else ""
            )
            longest = self._facts.longest
            raise LengthError(
                f"the request has {asked}, but a replica holds {longest} in all; shorten it, or allow more "
                "length or memory"
            )
        return room


# ---- where they are computed


async def carried_out(llm: LLM, desk: Desk, replica: str, errand: Errand) -> AsyncGenerator[Message]:
    """What a replica's own model and desk make of an errand. Ends early if they end."""
    yield Begun(replica)
    try:
        ready = await asyncio.to_thread(_decided, llm, errand)
        [call] = desk.ask([ready])
    except EngineClosedError:
        return
    except PenstockError as fault:
        yield Refused(fault)
        return
    told = False
    try:
        async for deltas in call.pieces():
            assert call._job is not None
            first = call._job.sequences[0]
            yield Came(tuple(deltas), first.cached, () if told else tuple(first.prompt_logprobs))
            told = True
    except EngineClosedError:
        return
    except PenstockError as fault:
        yield Refused(fault)
    finally:
        call.leave()


def _decided(llm: LLM, errand: Errand) -> Ready:
    """The errand as the model reads it. Raises RequestError."""
    read = llm.read(errand.prompt, errand.params)
    own = {field.name: getattr(read, field.name) for field in fields(Ready)}
    return Ready(**own | errand.decided)
