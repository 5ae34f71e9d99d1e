"""The Python face: a model in, text out."""

import logging
import math
import os
import secrets
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from penstock.api.detokenize import Detokenizer
from penstock.api.jobs import Job, Ready, Sequel
from penstock.api.outputs import Completion, Delta
from penstock.api.snapshots import MemoryUse, ServingLimits
from penstock.api.structures import Structures
from penstock.api.text import Tokenizer
from penstock.arch.spec import ModelSpec
from penstock.base.config import CACHE, Config
from penstock.base.errors import CheckpointError, EngineClosedError, RequestError
from penstock.base.trace import Trace
from penstock.engine.boot import Booted, boot
from penstock.engine.engine import Progress, Stats
from penstock.sched.scheduler import Event
from penstock.step.params import Sampling, SamplingParams, shown
from penstock.step.plan import RequestId
from penstock.step.request import FinishReason
from penstock.weights.checkpoint.reader import Checkpoint
from penstock.weights.pack.cache import is_pack
from penstock.weights.pack.reader import Pack
from penstock.weights.streaming.loading import Loading

SHIPPED_MODEL = Path(__file__).parent.parent / "shipped"
"""The checkpoint that comes with the package."""

Message = Mapping[str, object]
Prompt = str | Sequence[int] | Sequence[Message]
"""Text, token ids, or a conversation."""

_BAR_FROM = 2
"""Prompts from which `generate` shows a progress bar on a terminal."""

log = logging.getLogger("penstock")


class LLM:
    """A loaded model.

    model: a Hugging Face checkpoint directory; None is the small model that comes with the package. progress:
    whether `generate` shows a bar; None shows it for several prompts on a terminal. loading: is told how far
    packing and loading of weights are: what is being done, bytes done, bytes in all. trace: is told of every
    read, copy, wait and use of weights that stream. Everything else is explained in base.config.Config. What
    was decided (device, dtype, how memory is divided) is logged to the logger "penstock" at level INFO.

    May be used from several threads; whichever waits for its own outputs drives the engine for all. Use it in
    a `with` block, or call `close`, to free the device.

    Raises CheckpointError, UnsupportedModelError, ConfigError, DeviceError, BudgetError.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        device: str = "auto",
        dtype: str = "auto",
        device_memory: str | int | None = None,
        host_memory: str | int | None = None,
        host_kv_memory: str | int | None = None,
        disk_kv_memory: str | int | None = None,
        kv_directory: str | Path = CACHE,
        host_kv_dtype: str = "auto",
        kv_store: str = "eager",
        kv_tile: int | None = None,
        attention_policy: str = "full",
        prefill_policy: str = "full",
        sketch_bits: int = 4,
        missed_limit: float | None = None,
        max_length: int | None = None,
        beyond_trained: bool = False,
        block_size: int = 64,
        max_step_tokens: int | None = None,
        max_sequences: int | None = None,
        kv_blocks: int | None = None,
        prefix_cache: bool = True,
        graphs: bool = True,
        kernels: bool = True,
        tensor_parallel: int = 1,
        cache: str | Path = CACHE,
        check: bool = False,
        progress: bool | None = None,
        trace: Trace | None = None,
        loading: Loading | None = None,
    ) -> None:
        config = Config(
            model=SHIPPED_MODEL if model is None else Path(model),
            device=device,
            dtype=dtype,
            device_memory=device_memory,
            host_memory=host_memory,
            host_kv_memory=host_kv_memory,
            disk_kv_memory=disk_kv_memory,
            kv_directory=Path(kv_directory) if isinstance(kv_directory, str) else kv_directory,
            host_kv_dtype=host_kv_dtype,
            kv_store=kv_store,
            kv_tile=kv_tile,
            attention_policy=attention_policy,
            prefill_policy=prefill_policy,
            sketch_bits=sketch_bits,
            missed_limit=missed_limit,
            max_length=max_length,
            beyond_trained=beyond_trained,
            block_size=block_size,
            max_step_tokens=max_step_tokens,
            max_sequences=max_sequences,
            kv_blocks=kv_blocks,
            prefix_cache=prefix_cache,
            graphs=graphs,
            kernels=kernels,
            tensor_parallel=tensor_parallel,
            cache=Path(cache),
            check=check,
        )
        self._process = os.getpid()
        self._progress = progress
        self._lock = threading.RLock()
        self._live: dict[RequestId, Sequel] = {}
        self._dropped: deque[Job] = deque()
        """Jobs abandoned during a step, to be ended after it."""
        self._stepping = False
        self._events: deque[Event] = deque()
        """Of the last step, not yet handed out: empty but for an interrupt in the midst of it."""
        with ExitStack() as opened, ThreadPoolExecutor(1, "penstock-tokenizer") as beside:
            cache = config.cache.expanduser()
            weights: Checkpoint | Pack = (
                Pack.open(config.model) if is_pack(config.model) else Checkpoint.open(config.model, cache)
            )
            opened.callback(weights.close)
            # A large vocabulary takes most of a second to load: that happens beside the weights.
            tokenizer = beside.submit(_load_tokenizer, config.model)
            self._structures = Structures(
                tokenizer.result, weights.spec.vocab_size, weights.generation.eos_tokens
            )
            self._booted = boot(
                config, weights, say=log.info, trace=trace, loading=loading, guide=self._structures
            )
            opened.callback(self._booted.engine.close)
            self._defaults = weights.generation
            self._tokenizer = tokenizer.result()
            # What stays on disk is read for as long as the engine lives, which then closes it. A checkpoint
            # has been read.
            opened.pop_all()
            if isinstance(weights, Checkpoint):
                weights.close()
        self._engine = self._booted.engine
        self.limits = ServingLimits.of(self._booted)

    # -- what there is
    # -------------------------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises CheckpointError if the model has none."""
        if self._tokenizer is None:
            raise CheckpointError(
                "the model directory has no tokenizer.json; give prompts as token ids, or add the file"
            )
        return self._tokenizer

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    @property
    def booted(self) -> Booted:
        """The engine and its parts, for tests and benchmarks. Everything else reads the snapshots below."""
        return self._booted

    @property
    def spec(self) -> ModelSpec:
        """The shape of the model: layers, heads, widths, vocabulary."""
        return self._booted.spec

    @property
    def device(self) -> str:
        """The device that computes, as torch names it."""
        return str(self._booted.device)

    @property
    def dtype(self) -> str:
        """The number format of weights and activations, such as "bfloat16"."""
        return self._booted.dtype

    @property
    def boot_seconds(self) -> float:
        """The seconds that it took to start the engine."""
        return self._booted.seconds

    @property
    def memory(self) -> MemoryUse:
        """Where weights and KV rest at this moment. May be read from any thread, also while a step runs."""
        return MemoryUse.of(self._booted)

    @property
    def progress(self) -> Progress:
        """How far the last step came. May be read from any thread, also while a step runs."""
        return self._engine.progress

    def stats(self) -> Stats:
        """The engine at this moment, and its counts since it started."""
        with self._lock:
            self._sweep()
            return self._engine.stats()

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with the special tokens that the model's tokenizer puts around a text."""
        return self.tokenizer.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids, without special tokens. Raises RequestError if one is not in the
        vocabulary."""
        return self.tokenizer.decode(self._tokens(tokens))

    # -- generation
    # --------------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams | None] | None = None,
    ) -> list[Completion]:
        """Complete one prompt or many, all at once; the results stand in the order of the prompts.

        prompts: text, a list of token ids, a conversation, or a list of any of these.
        params: settings for all, or one for each.
        Raises RequestError, before anything runs, if one of them cannot be served.
        """
        several = _as_prompts(prompts)
        settings = (
            [params] * len(several)
            if params is None or isinstance(params, SamplingParams)
            else _as_settings(params)
        )
        if len(settings) != len(several):
            raise RequestError(
                f"there are {len(several)} prompts but {len(settings)} params; give one for all, or one for "
                "each"
            )
        jobs: list[Job] = []
        try:
            for prompt, one in zip(several, settings, strict=True):
                jobs.append(self.begin(self.read(prompt, one), followed=False))
            with self._bar(jobs) as advance:
                for job in jobs:
                    while not job.done:
                        self._pump()
                        advance()
        finally:
            self.abandon(jobs)
        return [job.completion() for job in jobs]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        until: Callable[[], bool] = lambda: False,
    ) -> "Stream":
        """Complete one prompt and give out each piece as it becomes certain. `until` is asked before every
        step, also while the prompt is computed: once it is true, the stream is closed.

        Raises RequestError at once, not at the first piece.
        """
        return Stream(self, self.begin(self.read(prompt, params)), until)

    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> Completion:
        """The model's answer to a conversation: messages with a "role" and a "content"."""
        return self.generate([messages], params)[0]

    def clear_prefix_cache(self) -> int:
        """Forget the KV of everything that is not running. Returns how many blocks were given up."""
        with self._lock:
            dropped = self._engine.scheduler.forget()
            self._engine.tend()
            return dropped

    def _next_delta(self, job: Job, until: Callable[[], bool]) -> Delta | None:
        """The job's next piece, None after its last, and when it was ended."""
        with self._lock:
            while True:
                for sequence in job.sequences:
                    if sequence.deltas:
                        return sequence.deltas.popleft()
                if not job.done and until():
                    self.abandon([job])
                if job.done:
                    return None
                self._pump()

    # -- one by one
    # --------------------------------------------------------------------------------------------------------

    def read(self, prompt: Prompt, params: SamplingParams | None = None) -> Ready:
        """What can be said of a prompt before the engine is told of it. From any thread, also while steps
        run.

        Raises RequestError if it could never be served.
        """
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise RequestError(
                "params are SamplingParams, one for all prompts or a list of them; got "
                f"{type(params).__name__}"
            )
        text, tokens = self._read(prompt)
        sampling = self._sampling(params)
        self._engine.scheduler.admissible(len(tokens), params.max_tokens)
        continues = isinstance(prompt, str) and bool(prompt)

        def detokenizer() -> Detokenizer | None:
            if self._tokenizer is None:
                return None
            return self._tokenizer.detokenizer(
                params.stop_strings, params.include_stop, continues=continues, kept=params.shown_tokens
            )

        return Ready(
            text, tuple(tokens), tuple(map(sampling, range(params.n))), params.max_tokens, detokenizer
        )

    def begin(self, ready: Ready, *, followed: bool = True) -> Job:
        """Queue all outputs of a prompt. They are computed as `advance` is called, and end as `abandon` is.

        followed: whether somebody takes what each step adds. Else it is not kept: the garbage collector would
        look at all of it again.
        """
        self._check_process()
        sequences: list[Sequel] = []
        job = Job(ready.prompt, ready.tokens, sequences)
        with self._lock:
            try:
                for index, own in enumerate(ready.samplings):
                    detokenizer = ready.detokenizer()
                    request = self._engine.submit(
                        ready.tokens, own, ready.max_tokens, ready.priority, ready.salt
                    )
                    deltas = deque[Delta](maxlen=None if followed else 0)
                    sequences.append(Sequel(index, request, own, detokenizer, deltas))
                    self._live[request] = sequences[-1]
            except BaseException:
                self.abandon([job])
                raise
        return job

    def advance(self) -> None:
        """One step for all jobs: what it yields is in their sequences' deltas. Without any job, a look at
        what moves between tiers."""
        if self._live:
            self._pump()
        else:
            with self._lock:
                self._engine.tend()

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise EngineClosedError(
                "this process was forked from the one that has opened the model, and what computes for it "
                "is there; open it here"
            )

    def check(self) -> None:
        """Raises what has ended the engine while nobody asked anything of it, such as a rank that was
        lost."""
        with self._lock:
            self._engine.check()

    @property
    def moving(self) -> bool:
        """Whether blocks are on their way between tiers, or about to be: then `advance` is worth calling
        without any job."""
        return self._engine.scheduler.tiers.moving or self._engine.scheduler.tiers.ready

    def _read(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """The prompt's text, if it has one, and its tokens."""
        if isinstance(prompt, str):
            return prompt, self._known(self.prompt_tokens(prompt))
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
            raise _no_prompt(prompt)
        if prompt and isinstance(prompt[0], Mapping):
            text = self.tokenizer.render_chat(prompt)  # type: ignore[arg-type]  # Checked there, with a message of its own.
            return text, self._known(self.prompt_tokens(text, special=False))
        return None, self._tokens(prompt)

    def _known(self, tokens: list[int]) -> list[int]:
        """The same. A tokenizer may have tokens that the model has no embedding for, such as one that was
        added to its file alone."""
        if (most := max(tokens, default=0)) >= (vocab := self.spec.vocab_size):
            raise RequestError(
                f"the prompt has {shown(self.tokenizer.token_text(most))}, token {most} of the tokenizer, "
                "but the model has embeddings for "
                f"tokens 0 to {vocab - 1} alone; leave it out, or serve a checkpoint whose tokenizer.json "
                "and weights belong together"
            )
        return tokens

    def prompt_tokens(self, text: str, *, special: bool = True) -> list[int]:
        """A prompt's tokens. One that is longer than any request may be is refused by its length alone, if
        that tells: to cut 30 MB into tokens takes a minute. Raises LengthError, and what Tokenizer.encode
        does."""
        scheduler = self._engine.scheduler
        if (
            len(text) > scheduler.longest
            and (least := self.tokenizer.least_tokens(text)) >= scheduler.longest
        ):
            scheduler.admissible(least, None, or_more=True)
        return self.tokenizer.encode(text, special=special)

    def _tokens(self, given: Sequence[object]) -> list[int]:
        """The same, known to be token ids."""
        vocab, tokens = self.spec.vocab_size, []
        for token in given:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
                raise RequestError(
                    f"token {shown(token)} is not in the vocabulary; token ids are whole numbers from 0 to "
                    f"{vocab - 1}"
                )
            tokens.append(token)
        return tokens

    def _sampling(self, params: SamplingParams) -> Callable[[int], Sampling]:
        """The settings of output `index`, with the model's defaults filled in."""
        defaults, vocab = self._defaults, self.spec.vocab_size
        for name, tokens in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
            if (worst := max(tokens, default=0)) >= vocab:
                raise RequestError(f"{name} has token {worst}, but token ids end at {vocab - 1}")
        if params.stop_strings and self._tokenizer is None:
            raise RequestError(
                "stop strings need a tokenizer, which the model directory does not have; use stop_token_ids"
            )
        end_tokens = frozenset(params.stop_token_ids) | frozenset(
            () if params.ignore_eos else defaults.eos_tokens
        )
        if params.structure is not None:
            self._structures.check(params.structure, end_tokens)
        never = {token for token, bias in params.logit_bias.items() if bias == -math.inf}
        if len(never | end_tokens if params.min_tokens else never) >= vocab:
            raise RequestError(
                f"logit_bias and min_tokens forbid all {vocab} tokens of the vocabulary; leave at least one"
            )
        seed, bias = (
            secrets.randbits(63) if params.seed is None else params.seed,
            tuple(params.logit_bias.items()),
        )

        def pick(asked: float | None, default: float | None, neutral: float) -> float:
            return asked if asked is not None else default if default is not None else neutral

        def sampling(index: int) -> Sampling:
            return Sampling(
                temperature=pick(params.temperature, defaults.temperature, 1.0),
                top_k=int(pick(params.top_k, defaults.top_k, 0)),
                top_p=pick(params.top_p, defaults.top_p, 1.0),
                min_p=pick(params.min_p, defaults.min_p, 0.0),
                repetition_penalty=pick(params.repetition_penalty, defaults.repetition_penalty, 1.0),
                presence_penalty=params.presence_penalty,
                frequency_penalty=params.frequency_penalty,
                logit_bias=bias,
                seed=seed + index,
                end_tokens=end_tokens,
                min_tokens=params.min_tokens,
                logprobs=params.logprobs,
                # The prompt is the same for all outputs: the first reports on it.
                prompt_logprobs=params.prompt_logprobs if index == 0 else None,
                structure=params.structure,
            )

        return sampling

    def _pump(self) -> None:
        """One step of the engine; its events go to whom they concern, whoever is waiting."""
        self._check_process()
        with self._lock:
            self._sweep()
            self._stepping = True
            try:
                if not self._events:
                    self._events.extend(self._engine.step())
                while self._events:
                    self._hand_out(self._events[0])
                    self._events.popleft()
                self._engine.tend()
            finally:
                self._stepping = False
                self._sweep()

    def _hand_out(self, event: Event) -> None:
        sequence = self._live.get(event.request)
        if sequence is None:  # It ended between the step and now, after an interrupt.
            return
        if sequence.take(event):
            self._engine.stop(event.request, FinishReason.STOP)
        if sequence.finish is not None:
            del self._live[event.request]

    def abandon(self, jobs: Sequence[Job]) -> None:
        """End whatever of these jobs still runs."""
        with self._lock:
            if (
                self._stepping
            ):  # The garbage collector, in this very thread, has found a stream in the midst of a step.
                self._dropped.extend(jobs)
                return
            for sequence in (sequence for job in jobs for sequence in job.sequences):
                if self._live.pop(sequence.request, None) is not None:
                    self._engine.stop(sequence.request)
                    sequence.finish = FinishReason.ABORT
            self._engine.tend()

    def _sweep(self) -> None:
        """Abandon what was dropped without being closed. That may happen anywhere, also within a step, so it
        is only noted then."""
        while self._dropped:
            self.abandon([self._dropped.popleft()])

    @contextmanager
    def _bar(self, jobs: Sequence[Job]) -> Iterator[Callable[[], None]]:
        shown = (len(jobs) >= _BAR_FROM and sys.stderr.isatty()) if self._progress is None else self._progress
        if not shown:
            yield lambda: None
            return
        from rich.console import Console  # 40 ms, and only a terminal wants it
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("prompts"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]} tokens/s"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task, before = bar.add_task("", total=len(jobs), rate="-"), self.stats().output_tokens

            def advance() -> None:
                elapsed = bar.tasks[0].elapsed or 0
                rate = f"{(self.stats().output_tokens - before) / elapsed:,.0f}" if elapsed else "-"
                bar.update(task, completed=sum(job.done for job in jobs), rate=rate)

            yield advance

    # -- the end
    # --------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Free weights and KV. Requests that still run are aborted; any later one raises
        EngineClosedError."""
        if os.getpid() != self._process:  # All that moves there is the other's.
            return
        with self._lock:
            for request, sequence in self._live.items():
                self._engine.stop(request)
                sequence.finish = FinishReason.ABORT
                sequence.deltas.append(Delta("", (), sequence.finish, sequence.index))
            self._live.clear()
            self._engine.finish()
            self._structures.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Stream:
    """The pieces of one prompt's outputs, as an iterator. `close`, or leaving a `with` block, ends what is
    still running and frees what it held; a stream that is simply dropped is closed at the engine's next
    step."""

    def __init__(self, llm: LLM, job: Job, until: Callable[[], bool]) -> None:
        self._llm, self._job, self._until = llm, job, until
        weakref.finalize(self, llm._dropped.append, job).atexit = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        try:
            delta = self._llm._next_delta(self._job, self._until)
        except BaseException:
            self.close()
            raise
        if delta is None:
            raise StopIteration
        return delta

    @property
    def prompt_tokens(self) -> tuple[int, ...]:
        return self._job.tokens

    @property
    def completion(self) -> Completion:
        """Everything up to now, as `generate` would return it. Outputs that have not ended by themselves
        count as aborted."""
        return self._job.completion()

    def close(self) -> None:
        self._llm.abandon([self._job])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _load_tokenizer(path: Path) -> Tokenizer | None:
    return Tokenizer.from_directory(path) if (path / "tokenizer.json").exists() else None


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts, of what may be a single one."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes | bytearray):
        raise _no_prompt(prompts)
    if prompts and isinstance(prompts[0], int | Mapping):
        return [prompts]  # type: ignore[list-item]
    for prompt in prompts:
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
            raise _no_prompt(prompt)
    return list(prompts)  # type: ignore[arg-type]


def _as_settings(params: object) -> list[SamplingParams | None]:
    if not isinstance(params, Sequence) or isinstance(params, str | bytes | bytearray):
        raise RequestError(
            f"params are SamplingParams, one for all prompts or a list of them; got {type(params).__name__}"
        )
    return list(params)


def _no_prompt(given: object) -> RequestError:
    return RequestError(
        f"a prompt is text, a list of token ids or a list of messages; got {type(given).__name__}"
    )
