"""Load a model, and complete prompts with it: the Python interface."""

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self, overload

from penstock.api.arguments import LLMArguments
from penstock.api.bar import progress_bar
from penstock.api.driver import EngineDriver
from penstock.api.embeddings import Embedder
from penstock.api.limits import ServingLimits
from penstock.api.opening import boot_model, open_weights
from penstock.api.outputs import Completion, Embedding, Score
from penstock.api.reader import Message, Prompt, PromptReader, each_of, paired, several
from penstock.api.scoring import Pairs
from penstock.api.sequences import PreparedPrompt, SequenceGroup
from penstock.api.sleeping import Sleep, Sleeper
from penstock.api.snapshots import MemoryUse
from penstock.api.stream import CompletionStream
from penstock.api.structures import Structures
from penstock.api.text.tokenizer import Tokenizer
from penstock.arch.spec import ModelSpec
from penstock.base.config import SHIPPED_MODEL as SHIPPED_MODEL
from penstock.base.config import Config
from penstock.base.meter import ExpertMap
from penstock.base.other_names import named_keywords
from penstock.base.setting import keywords_of
from penstock.base.trace import Trace
from penstock.engine.adapters import module_paths
from penstock.engine.boot import Booted
from penstock.engine.engine import Progress, Stats
from penstock.engine.placing import Override, RoutingSource
from penstock.hub.models import locate
from penstock.sched.outlook import WaitForecast
from penstock.step.adapter import LoadedAdapter
from penstock.step.params import SETTINGS, SamplingParams
from penstock.weights.checkpoint.lora import Adapter
from penstock.weights.checkpoint.reader import Checkpoint
from penstock.weights.streaming.loading import Loading

_PLACES = {
    "host memory": "host memory, where they are computed with",
    "page cache": "the system's page cache",
    "disk": "their files",
}
"""Says in words where the weights of a model that is asleep are."""

log = logging.getLogger("penstock")


class LLM:
    """Loads a model, and completes prompts with it.

    The arguments are those of `LLMArguments`: a model, the settings of `Config`, and how progress is shown.
    A model that is named as on the Hugging Face Hub is fetched if its cache does not have it.
    What boot decides (device, dtype, how memory is divided) is logged to the logger "penstock" at level INFO.

    May be used from several threads; whichever waits for its own outputs drives the engine for all. Use it in
    a `with` block, or call `close`, to free the device.

    Raises CheckpointError, UnsupportedModelError, ConfigError, DeviceError, BudgetError.
    """

    @keywords_of(LLMArguments, SETTINGS)
    def __init__(self, arguments: LLMArguments) -> None:
        self._open(arguments.config, arguments.progress, arguments.trace, arguments.loading)

    @classmethod
    def from_config(
        cls,
        config: Config,
        *,
        progress: bool | None = None,
        trace: Trace | None = None,
        loading: Loading | None = None,
        routing: RoutingSource | None = None,
    ) -> Self:
        """Return an LLM of settings that have been made already, as `LLM(...)` does of its arguments.

        routing: sees or replaces the scores of routers, for measurements.
        """
        llm = cls.__new__(cls)
        llm._open(config, progress, trace, loading, routing)
        return llm

    def _open(
        self,
        config: Config,
        progress: bool | None,
        trace: Trace | None,
        loading: Loading | None,
        routing: RoutingSource | None = None,
    ) -> None:
        if (found := locate(str(config.model))).path != config.model:
            config = replace(config, model=found.path)
        self._progress = progress
        with ExitStack() as opened, ThreadPoolExecutor(1, "penstock-tokenizer") as beside:
            weights = open_weights(config.model, config.cache)
            opened.callback(weights.close)
            # A large vocabulary takes most of a second to load: that happens beside the weights.
            tokenizer = beside.submit(Tokenizer.from_model, config.model)
            defaults = weights.generation
            structures = Structures(tokenizer.result, weights.spec.vocab_size, defaults.eos_tokens)
            boots = boot_model if routing is None else partial(boot_model, override=Override(routing=routing))
            self._boot = partial(boots, config, say=log.info, trace=trace, guide=structures)
            self._config = config
            self._booted = self._boot(weights, loading=loading)
            engine = self._booted.engine
            opened.callback(engine.close)
            self.limits = ServingLimits.of(self._booted.limits, engine.scheduler, self._booted.budget.blocks)
            self.reader = PromptReader(
                tokenizer.result(),
                structures,
                self.spec.vocab_size,
                defaults,
                self.limits,
                engine.scheduler.admissible,
                Embedder(config.model, self.spec.hidden_size),
            )
            self.driver = EngineDriver(engine)
            self._sleeper = Sleeper(self.driver, config.model)
            if (room := engine.adapters.room) is not None:  # Later on, other adapters may be there.
                again = replace(config, lora_modules=(), max_loras=room.slots, max_lora_rank=room.rank)
                self._boot = partial(boots, again, say=log.info, trace=trace, guide=structures)
            for name, path in module_paths(config).items():
                self.load_lora_adapter(name, path)
            # What stays on disk is read for as long as the engine lives, which then closes it. A checkpoint
            # has been read.
            opened.pop_all()
            if isinstance(weights, Checkpoint):
                weights.close()

    # -- what there is

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer. Raise CheckpointError if it has none."""
        return self.reader.tokenizer

    @property
    def booted(self) -> Booted:
        """Return the engine and its parts, for tests and benchmarks. Everything else reads the snapshots
        below."""
        return self._booted

    @property
    def spec(self) -> ModelSpec:
        """Return the shape of the model: layers, heads, widths, vocabulary."""
        return self._booted.spec

    @property
    def device(self) -> str:
        """Return the device that computes, as torch names it."""
        return str(self._booted.device)

    @property
    def threads(self) -> int | None:
        """Return the CPU threads that the last step computed with; None where they are whatever torch has."""
        return self._booted.engine.threads

    @property
    def dtype(self) -> str:
        """Return the number format of weights and activations, such as "bfloat16"."""
        return self._booted.dtype

    @property
    def boot_seconds(self) -> float:
        """Return the seconds that it took to start the engine."""
        return self._booted.seconds

    @property
    def memory(self) -> MemoryUse:
        """Return the memory of weights and KV at this moment. May be read from any thread, also while a step
        runs."""
        return MemoryUse.of(self._booted)

    @property
    def drafter(self) -> str:
        """Return what drafts tokens, as boot has chosen it: off, suffix, self, mtp, or model."""
        return self._booted.drafter

    def expert_map(self) -> ExpertMap:
        """Return how the experts of a mixture are used lately, and where they are. May be called from any
        thread, also while a step runs, for which it does not wait."""
        return self._booted.weights.expert_map(exact=not self._booted.engine.busy)

    @property
    def progress(self) -> Progress:
        """Return how far the last step came. May be read from any thread, also while a step runs."""
        return self._booted.engine.progress

    def stats(self) -> Stats:
        """Return the engine at this moment, and its counts since it started."""
        return self.driver.stats()

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a prompt, with the special tokens that the model's tokenizer puts around a
        text."""
        return self.tokenizer.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens. Raise RequestError for a token that is not in
        the vocabulary."""
        return self.reader.decode(tokens)

    # -- generation

    @named_keywords(SETTINGS)
    def generate(
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
        return self._complete(
            self.reader.read(*pair).adapted(name) for pair, name in zip(pairs, names, strict=True)
        )

    @named_keywords(SETTINGS)
    def embed(self, prompts: Prompt | Sequence[Prompt], *, dimensions: int | None = None) -> list[Embedding]:
        """Return the embedding of one prompt or many, in their order, for a checkpoint that is made for that.

        prompts: as of `generate`.
        dimensions: cut each to so many numbers, for models that allow it (Matryoshka embeddings).
        Raises UnsupportedModelError where the checkpoint does not say how hidden states become an embedding,
        and RequestError, before anything runs, if one of the prompts cannot be served.
        """
        embedder = self.reader.embedder
        embedder.check(dimensions)
        found = self._complete(self.reader.read_embedding(prompt) for prompt, _ in paired(prompts, None))
        return [embedder.embedding(completion, dimensions) for completion in found]

    @named_keywords(SETTINGS)
    def score(
        self,
        query: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        instruction: str | None = None,
    ) -> list[Score]:
        """Return how well each document answers the query, or each its own of as many queries, in the order
        of the documents.

        For rerankers: Qwen3-Reranker and its like, classifiers of one label. With a model for embeddings a
        score is the cosine of both.
        instruction: the task, for models that read one.
        Raises UnsupportedModelError for a model that is no reranker, and RequestError, before anything runs,
        if one of the pairs cannot be served.
        """
        pairs = Pairs.of(query, documents, instruction)
        return self.reader.scorer.scores(pairs, self._complete(self.reader.read_pairs(pairs)))

    def _complete(self, prompts: Iterable[PreparedPrompt]) -> list[Completion]:
        """Run prompts together, none of them before all have been read."""
        groups: list[SequenceGroup] = []
        try:
            groups.extend(self.driver.begin(ready, followed=False) for ready in list(prompts))
            with progress_bar(groups, lambda: self.stats().output_tokens, shown=self._progress) as advance:
                for group in groups:
                    while not group.done:
                        self.driver.step()
                        advance()
        finally:
            self.driver.abandon(groups)
        return [group.completion() for group in groups]

    @named_keywords(SETTINGS)
    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        lora: str | None = None,
        until: Callable[[], bool] | None = None,
    ) -> "CompletionStream":
        """Complete one prompt and give out each piece as it becomes certain. `until`, if it is given, is
        asked before every step, also while the prompt is computed: once it is true, the stream is closed.
        `lora` is the name of a LoRA adapter.

        Its `completion` has what pieces have not, such as log-probabilities of the prompt. Raises
        RequestError at once, not at the first piece.
        """
        ready = self.reader.read(prompt, params).adapted(lora)
        forecast = self.driver.forecast(ready)
        return CompletionStream(self.driver, self.driver.begin(ready), until, forecast)

    def forecast(
        self, prompt: Prompt, params: SamplingParams | None = None, *, lora: str | None = None
    ) -> WaitForecast:
        """Return what a prompt would have before it if it were asked for now, and the seconds until its first
        token; None where nothing of the kind has been measured yet. lora: name of a LoRA adapter. Raises
        RequestError."""
        return self.driver.forecast(self.reader.read(prompt, params).adapted(lora))

    @overload
    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        lora: str | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
    ) -> Completion: ...

    @overload
    def chat(
        self,
        messages: Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        lora: str | Sequence[str | None] | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
    ) -> list[Completion]: ...

    @named_keywords(SETTINGS)
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        lora: str | Sequence[str | None] | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
    ) -> Completion | list[Completion]:
        """Return the model's answer to a conversation: messages with a "role" and a "content". Of a list of
        conversations return the list of answers, all made at once.

        params, lora: as of `generate`.
        tools: functions that the model may call, in OpenAI's form: {"type": "function", "function": {"name",
            "description", "parameters"}}. A call is in the text, as the model writes it.
        chat_template_kwargs: more that the model's chat template reads, such as enable_thinking.
        Raises RequestError.
        """
        chats = self.reader.read_chats(messages, params, lora, chat_template_kwargs, tools)
        answers = self._complete(chats)
        return answers if several(messages) else answers[0]

    # -- LoRA adapters

    @property
    def lora_adapters(self) -> Mapping[str, LoadedAdapter]:
        """Return the LoRA adapters that are loaded, by their names."""
        return self.driver.adapters.loaded

    def load_lora_adapter(self, name: str, path: str | Path, *, load_inplace: bool = False) -> None:
        """Load the LoRA adapter in a directory that PEFT has written. Requests may ask for it by name.

        load_inplace: whether it takes the place of one of this name. Requests that run go on with the old
        one. Raises RequestError where there is no room for it, CheckpointError for files that are damaged or
        another model's, UnsupportedModelError for a kind that is not run, and EngineClosedError while the
        model is asleep.
        """
        adapter = Adapter.read(Path(os.path.expanduser(path)), self.spec, self.dtype)
        self.driver.load_adapter(name, adapter, replaces=load_inplace)
        log.info("LoRA adapter %s: rank %d, %d modules", name, adapter.rank, len(adapter.modules))

    def unload_lora_adapter(self, name: str) -> None:
        """Forget a LoRA adapter. Requests that run go on with it. Raises RequestError if it is not loaded,
        and EngineClosedError while the model is asleep."""
        self.driver.unload_adapter(name)

    # -- prefixes

    def clear_prefix_cache(self) -> int:
        """Forget the KV of everything that is not running. Return the number of blocks that were given up."""
        return self.driver.clear_prefix_cache()

    # -- asleep and awake

    def sleep(self, level: int = 1) -> Sleep:
        """Free memory until `wake_up` (vLLM: sleep). Return where the weights are meanwhile.

        Nothing may be running, and prompts are refused then. What follows `wake_up` is computed as before.
        The KV on the device is forgotten.
        level: 1 keeps weights in host memory. An engine on a CPU stays as it is, without its KV; prefixes on
            lower tiers are found again. Another one is closed, and its checkpoint kept in the system's page
            cache. 2 closes the engine, and weights are read from disk again. A closed engine's prefixes are
            found again on disk alone, if they are kept there. Its LoRA adapters are loaded again from their
            directories; one whose files have changed is refused from then on.
        Raises RequestError for another level, or if prompts are being computed.
        """
        slept = self._sleeper.sleep(level, self._booted.device.type)
        log.info("asleep: KV is freed, weights are in %s; wake_up ends it", _PLACES[slept.weights])
        return slept

    def wake_up(self) -> None:
        """End a sleep; do nothing without one. If the engine has to be started again, raises what `LLM` does,
        sleeps on, and may be tried again."""
        self._sleeper.wake(self._start_again)

    @property
    def is_sleeping(self) -> bool:
        """Tell whether the model is asleep."""
        return self._sleeper.state is not None

    def _start_again(self) -> Booted:
        with ExitStack() as opened:
            weights = open_weights(self._config.model, self._config.cache)
            opened.callback(weights.close)
            booted = self._boot(weights)
            opened.callback(booted.engine.close)
            read = partial(Adapter.read, spec=booted.spec, dtype=booted.dtype)
            booted.engine.adapters.restore(self.driver.adapters, read)
            opened.pop_all()
        if isinstance(weights, Checkpoint):
            weights.close()
        scheduler = booted.engine.scheduler
        self._booted = booted
        self.limits = ServingLimits.of(booted.limits, scheduler, booted.budget.blocks)
        self.reader.follow(self.limits, scheduler.admissible)
        return booted

    # -- the end

    def close(self) -> None:
        """Free weights and KV. Requests that still run are aborted; any later one raises
        EngineClosedError."""
        if not self.driver.forked:  # All that moves there is the other process's.
            self.driver.close()
            self.reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
