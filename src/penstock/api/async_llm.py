"""Load a model, and complete prompts for tasks of an event loop: the Python interface for asyncio."""

import asyncio
import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self, overload

from penstock.api.arguments import LLMArguments
from penstock.api.limits import ServingLimits
from penstock.api.llm import LLM
from penstock.api.outputs import Completion, Delta, Embedding, Score
from penstock.api.reader import Message, Prompt, each_of, paired, several
from penstock.api.scoring import Pairs
from penstock.api.sequences import PreparedPrompt
from penstock.api.sleeping import Sleep
from penstock.api.stepping import AsyncRequest, StepThread
from penstock.base.errors import EngineClosedError
from penstock.base.other_names import named_keywords
from penstock.base.setting import keywords_of
from penstock.engine.engine import Stats
from penstock.step.adapter import LoadedAdapter
from penstock.step.params import SETTINGS, SamplingParams


class AsyncLLM:
    """Loads a model, and completes prompts for tasks of an event loop (vLLM: AsyncLLM).

    The arguments are those of `LLM`. The model is loaded on a thread when it is first needed, or by `async
    with`. Requests of all tasks run together. A task that is cancelled, or leaves a stream, ends its request
    and frees what it held. Tasks of several loops may share one model.

    Use it in an `async with` block, or call `close`, to free the device.

    What loads the model raises CheckpointError, UnsupportedModelError, ConfigError, DeviceError, BudgetError.
    """

    @keywords_of(LLMArguments, SETTINGS)
    def __init__(self, arguments: LLMArguments) -> None:
        self._arguments = arguments
        self._lock = threading.Lock()
        self._loading: Future[tuple[LLM, StepThread]] | None = None
        self._closed = False

    # -- generation

    @named_keywords(SETTINGS)
    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        lora: str | Sequence[str | None] | None = None,
    ) -> list[Completion]:
        """Complete one prompt or many, all at once; the results stand in the order of the prompts.

        prompts: text, a list or an array of token ids, a conversation, or a list of any of these.
        params: settings for all, or one for each.
        lora: name of the LoRA adapter for all, or one for each; None for none.
        Raises RequestError, before anything runs, if one of them cannot be served.
        """
        pairs = paired(prompts, params)
        names = each_of(lora, len(pairs))
        llm, steps = await self._opened()
        ready = await asyncio.to_thread(lambda: [llm.reader.read(*pair) for pair in pairs])
        adapted = [one.adapted(name) for one, name in zip(ready, names, strict=True)]
        return await self._complete(adapted, steps)

    @named_keywords(SETTINGS)
    async def embed(
        self, prompts: Prompt | Sequence[Prompt], *, dimensions: int | None = None
    ) -> list[Embedding]:
        """Return the embedding of one prompt or many, as `LLM.embed` does."""
        several = [prompt for prompt, _ in paired(prompts, None)]
        llm, steps = await self._opened()

        def read() -> list[PreparedPrompt]:
            llm.reader.embedder.check(dimensions)
            return [llm.reader.read_embedding(prompt) for prompt in several]

        found = await self._complete(await asyncio.to_thread(read), steps)
        return [llm.reader.embedder.embedding(completion, dimensions) for completion in found]

    @named_keywords(SETTINGS)
    async def score(
        self,
        query: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        instruction: str | None = None,
    ) -> list[Score]:
        """Return how well each document answers the query, as `LLM.score` does."""
        pairs = Pairs.of(query, documents, instruction)
        llm, steps = await self._opened()
        found = await self._complete(await asyncio.to_thread(llm.reader.read_pairs, pairs), steps)
        return llm.reader.scorer.scores(pairs, found)

    async def _complete(self, prompts: Sequence[PreparedPrompt], steps: StepThread) -> list[Completion]:
        requests = [AsyncRequest(one) for one in prompts]
        try:
            for request in requests:
                steps.follow(request)
            for request in requests:
                while await request.next_delta() is not None:
                    pass
        finally:
            for request in requests:
                steps.leave(request)
        return [request.completion() for request in requests]

    @named_keywords(SETTINGS)
    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, lora: str | None = None
    ) -> "AsyncCompletionStream":
        """Complete one prompt and give out each piece as it becomes certain: `async for piece in
        llm.stream(...)`. The first piece raises RequestError for what cannot be served. lora: name of a LoRA
        adapter."""
        return AsyncCompletionStream(self, prompt, params, lora)

    @overload
    async def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        lora: str | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
    ) -> Completion: ...

    @overload
    async def chat(
        self,
        messages: Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        lora: str | Sequence[str | None] | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
    ) -> list[Completion]: ...

    @named_keywords(SETTINGS)
    async def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        lora: str | Sequence[str | None] | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
    ) -> Completion | list[Completion]:
        """Return the model's answer to a conversation, or to each of several, as `LLM.chat` does."""
        llm, steps = await self._opened()
        read, more = llm.reader.read_chats, (chat_template_kwargs, tools)
        chats = await asyncio.to_thread(read, messages, params, lora, *more)
        answers = await self._complete(chats, steps)
        return answers if several(messages) else answers[0]

    # -- what there is

    async def limits(self) -> ServingLimits:
        """Return the largest requests and steps that the model takes."""
        return (await self._opened())[0].limits

    async def stats(self) -> Stats:
        """Return the engine at this moment, and its counts since it started."""
        llm, _ = await self._opened()
        return await asyncio.to_thread(llm.stats)

    async def sleep(self, level: int = 1) -> Sleep:
        """Free memory until `wake_up`, as `LLM.sleep` does."""
        llm, _ = await self._opened()
        return await asyncio.to_thread(llm.sleep, level)

    async def wake_up(self) -> None:
        """End a sleep, as `LLM.wake_up` does."""
        llm, _ = await self._opened()
        await asyncio.to_thread(llm.wake_up)

    async def is_sleeping(self) -> bool:
        """Tell whether the model is asleep."""
        return (await self._opened())[0].is_sleeping

    async def lora_adapters(self) -> Mapping[str, LoadedAdapter]:
        """Return the LoRA adapters that are loaded, by their names."""
        return (await self._opened())[0].lora_adapters

    async def load_lora_adapter(self, name: str, path: str | Path, *, load_inplace: bool = False) -> None:
        """Load a LoRA adapter, as `LLM.load_lora_adapter` does, while others are answered."""
        llm, _ = await self._opened()
        await asyncio.to_thread(llm.load_lora_adapter, name, path, load_inplace=load_inplace)

    async def unload_lora_adapter(self, name: str) -> None:
        """Forget a LoRA adapter, as `LLM.unload_lora_adapter` does."""
        llm, _ = await self._opened()
        await asyncio.to_thread(llm.unload_lora_adapter, name)

    async def clear_prefix_cache(self) -> int:
        """Forget the KV of everything that is not running. Return the number of blocks that were given up."""
        llm, _ = await self._opened()
        return await asyncio.to_thread(llm.clear_prefix_cache)

    # -- beginning and end

    async def _begin(
        self, prompt: Prompt, params: SamplingParams | None, lora: str | None
    ) -> tuple[AsyncRequest, StepThread]:
        llm, steps = await self._opened()
        request = AsyncRequest((await asyncio.to_thread(llm.reader.read, prompt, params)).adapted(lora))
        steps.follow(request)
        return request, steps

    async def _opened(self) -> tuple[LLM, StepThread]:
        """Load the model unless it was, and return it. Tasks that come meanwhile wait for the same."""
        with self._lock:
            if self._closed:
                raise EngineClosedError("the model was closed; make another AsyncLLM")
            if self._loading is None or (self._loading.done() and self._loading.exception() is not None):
                executor = ThreadPoolExecutor(1, "penstock loading")
                self._loading = executor.submit(self._load)
                executor.shutdown(wait=False)
            loading = self._loading
        return await asyncio.shield(asyncio.wrap_future(loading))  # One task that leaves stops no other.

    def _load(self) -> tuple[LLM, StepThread]:
        arguments = self._arguments
        llm = LLM.from_config(
            arguments.config, progress=False, trace=arguments.trace, loading=arguments.loading
        )
        steps = StepThread(llm.driver)
        weakref.finalize(self, _end, llm, steps)
        return llm, steps

    async def close(self) -> None:
        """Free weights and KV. Requests that still run are aborted; any later one raises
        EngineClosedError."""
        with self._lock:
            self._closed, loading = True, self._loading
        if loading is not None:
            await asyncio.to_thread(_end_loaded, loading)

    async def __aenter__(self) -> Self:
        await self._opened()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class AsyncCompletionStream:
    """Gives out the pieces of one prompt's outputs as they become certain, to one task.

    It begins with the first piece that is asked for. `aclose`, leaving an `async with` block, or cancelling
    the task ends what is still running; a stream that is simply dropped is ended at the engine's next step.
    """

    def __init__(
        self, llm: AsyncLLM, prompt: Prompt, params: SamplingParams | None, lora: str | None
    ) -> None:
        self._llm, self._asked = llm, (prompt, params, lora)
        self._request: AsyncRequest | None = None
        self._steps: StepThread | None = None
        self._over = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        try:
            delta = None if self._over else await (await self._begun()).next_delta()
        except BaseException:
            await self.aclose()
            raise
        if delta is None:
            self._over = True
            raise StopAsyncIteration
        return delta

    async def _begun(self) -> AsyncRequest:
        if self._request is None:
            self._request, self._steps = await self._llm._begin(*self._asked)
            weakref.finalize(self, self._steps.leave, self._request).atexit = False
        return self._request

    @property
    def completion(self) -> Completion:
        """Return the outputs up to now, as `generate` would return them. Those that have not ended by
        themselves count as aborted. Raise EngineClosedError before the first piece was asked for."""
        if self._request is None:
            raise EngineClosedError("the stream has not begun; ask for its first piece")
        return self._request.completion()

    async def aclose(self) -> None:
        """End what is still running."""
        self._over = True
        if self._request is not None and self._steps is not None:
            self._steps.leave(self._request)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


def _end(llm: LLM, steps: StepThread) -> None:
    steps.stop()
    llm.close()


def _end_loaded(loading: Future[tuple[LLM, StepThread]]) -> None:
    """Wait until a model is loaded, and close it."""
    if loading.exception() is None:
        _end(*loading.result())
