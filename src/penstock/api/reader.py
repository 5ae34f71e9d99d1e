"""Read a request: its text becomes token ids, and its settings are filled in and checked, before the engine
sees it."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from penstock.api.embeddings import Embedder
from penstock.api.limits import ServingLimits
from penstock.api.scoring import Pairs, Scorer
from penstock.api.sequences import PreparedPrompt
from penstock.api.structures import Structures
from penstock.api.text.detokenize import Detokenizer, Headers
from penstock.api.text.tokenizer import Tokenizer
from penstock.api.variables import check_tools, check_variables
from penstock.base.errors import CheckpointError, RequestError
from penstock.base.randomness import random_bytes
from penstock.base.units import counted
from penstock.step.params import Sampling, SamplingParams, shown
from penstock.step.structure import Structure
from penstock.weights.checkpoint.generation import GenerationDefaults

Message = Mapping[str, object]
Prompt = str | Sequence[int] | Sequence[Message]
"""Text, token ids, or a conversation."""


_CHANNEL, _MESSAGE_END, _OUTPUT_ENDS = "<|channel|>", "<|end|>", ("<|return|>", "<|call|>")


class Admit(Protocol):
    """The rule by which requests are admitted: sched.rules.admit, with the limits of an engine."""

    def __call__(self, prompt: int, max_tokens: int | None, *, or_more: bool = False) -> int:
        """Return the most tokens of output that a prompt of so many tokens may have. Raise RequestError for a
        request that could never be served."""


class PromptReader:
    """Reads prompts for a model: tokenizer, chat template, defaults and limits, without an engine.

    May be used from any thread, also while steps run.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        structures: Structures,
        vocab_size: int,
        defaults: GenerationDefaults,
        limits: ServingLimits,
        admit: Admit,
        embedder: Embedder,
    ) -> None:
        """Read prompts for a model.

        tokenizer: None if the model directory has none.
        structures: compiles what outputs are held to.
        vocab_size: tokens that the model has embeddings for.
        defaults: sampling settings from the checkpoint's generation_config.json.
        limits: the largest requests that are served.
        admit: the rule by which requests are admitted.
        embedder: makes embeddings, if the model can.
        """
        self._tokenizer, self._structures, self._admit = tokenizer, structures, admit
        self.vocab_size, self.limits, self.embedder = vocab_size, limits, embedder
        self.scorer = Scorer(embedder)
        self.defaults = replace(defaults, eos_tokens=self._ends(defaults.eos_tokens))

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer. Raise CheckpointError if it has none."""
        if self._tokenizer is None:
            raise CheckpointError(
                "the model directory has no tokenizer.json; give prompts as token ids, or add the file"
            )
        return self._tokenizer

    @property
    def has_tokenizer(self) -> bool:
        """Tell whether the model has a tokenizer; without one prompts are token ids."""
        return self._tokenizer is not None

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the token ids of a text. A text that is longer than any request may be is refused by its
        length alone where that suffices: to cut 30 MB into tokens takes a minute.

        special: whether to put the special tokens around it that the model's tokenizer puts around a text.

        Raise LengthError, CheckpointError without a tokenizer, and RequestError for what is not Unicode.
        """
        longest, tokenizer = self.limits.max_model_len, self.tokenizer
        if len(text) > longest and (least := tokenizer.least_tokens(text)) >= longest:
            self._admit(least, None, or_more=True)
        return tokenizer.encode(text, special=special)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens. Raise RequestError for a token that is not in
        the vocabulary."""
        return self.tokenizer.decode(self._tokens(tokens))

    def read(self, prompt: Prompt, params: SamplingParams | None = None) -> PreparedPrompt:
        """Return a prompt as the engine takes it. Raise RequestError for one that could never be served."""
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"params is of type {type(params).__name__}; give one SamplingParams for all prompts, or a "
                "list with one for each"
            )
        text, tokens = self._read(prompt)
        sampling = self._sampling(params)
        self._admit(len(tokens), params.max_tokens)
        continues, headers = isinstance(prompt, str) and bool(prompt), None
        if (begins := params.text_token) is not None:
            headers = Headers(frozenset(params.shown_tokens), begins, within=[*tokens[-1:]] == [begins])

        def detokenizer() -> Detokenizer | None:
            if self._tokenizer is None:
                return None
            return self._tokenizer.detokenizer(
                params.stop_strings,
                params.include_stop,
                continues=continues,
                kept=params.shown_tokens,
                headers=headers,
            )

        return PreparedPrompt(
            text, tuple(tokens), tuple(map(sampling, range(params.n))), params.max_tokens, detokenizer
        )

    def read_embedding(self, prompt: Prompt) -> PreparedPrompt:
        """Return a prompt of which the embedding is wanted. Raise RequestError for one that could never be
        served."""
        ready = self.read(prompt, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
        return replace(ready, samplings=tuple(replace(one, pooled=True) for one in ready.samplings))

    def read_pairs(self, pairs: Pairs) -> list[PreparedPrompt]:
        """Return the prompts that `Scorer.scores` makes scores of: one for each pair, or where those are
        cosines one for each query and then for each document. Raise RequestError for one that could never be
        served, and UnsupportedModelError for a model that is no reranker."""
        if self.scorer.head is not None:
            return [self._read_pair(query, document, pairs) for query, document in pairs]
        if pairs.instruction is not None:
            raise RequestError("this model takes no instruction; leave it out, or put it into the query")
        most = pairs.prompt_tokens
        documents = min((one for one in (pairs.document_tokens, most) if one is not None), default=None)
        return [
            self.read_embedding(self._cut(text, limit))
            for texts, limit in ((pairs.queries, most), (pairs.documents, documents))
            for text in texts
        ]

    def _read_pair(self, query: str, document: str, pairs: Pairs) -> PreparedPrompt:
        document, most = self._cut(document, pairs.document_tokens), pairs.prompt_tokens
        text, tokens = self._pair((query, document), pairs.instruction)
        left = len(self.tokenizer.encode(document, special=False))
        while most is not None and len(tokens) > most:
            left -= len(tokens) - most
            if left <= 0:
                raise RequestError(
                    f"the prompt has {len(tokens)} tokens, and {most} have no room for any of its document; "
                    "send a shorter query, or allow more tokens"
                )
            document = self._cut(document, left)
            text, tokens = self._pair((query, document), pairs.instruction)
        return replace(self.read_embedding(self._known(tokens)), prompt=text)

    def _pair(self, pair: tuple[str, str], instruction: str | None) -> tuple[str | None, list[int]]:
        text = self.scorer.text(self.tokenizer, pair, instruction)
        if text is not None:
            return text, self.tokenizer.encode(text, special=False)
        return None, self.tokenizer.encode_pair(*pair)

    def _cut(self, text: str, most: int | None) -> str:
        """Return a text, cut at its end to so many tokens; None is all of them."""
        if most is None:
            return text
        left = most
        while len(self.tokenizer.encode(text, special=False)) > most:
            text = self.tokenizer.beginning(text, left)
            left = max(left - 1, 0)  # What was cut may be read as other tokens, and as more.
        return text

    def read_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        tools: Sequence[Mapping[str, object]] | None = None,
    ) -> PreparedPrompt:
        """Return the prompt of a conversation, as `read` does.

        chat_template_kwargs: more that the model's template reads. tools: as of `LLM.chat`.
        """
        if not isinstance(messages, Sequence) or not all(isinstance(one, Mapping) for one in messages):
            raise _not_messages(messages)
        variables: Any = {} if chat_template_kwargs is None else chat_template_kwargs
        check_variables(variables)
        if tools is not None:
            tools = check_tools(tools)
            if "tools" not in self.tokenizer.template_variables(tools=True):
                raise RequestError(
                    "the model's chat template takes no tools; leave them out, or use a model that does"
                )
        text = self.tokenizer.render_chat(messages, tools=tools or None, **variables)
        return replace(self.read(self._known(self.encode(text, special=False)), params), prompt=text)

    def read_chats(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams | None] | None,
        lora: str | Sequence[str | None] | None,
        chat_template_kwargs: Mapping[str, object] | None,
        tools: Sequence[Mapping[str, object]] | None,
    ) -> list[PreparedPrompt]:
        """Return the prompts of one conversation or many, as `read_chat` does."""
        pairs: Any = paired(messages, params) if several(messages) else [(messages, params)]
        return [
            self.read_chat(own, settings, chat_template_kwargs, tools).adapted(name)
            for (own, settings), name in zip(pairs, each_of(lora, len(pairs)), strict=True)
        ]

    def is_whole(self, structure: Structure, output: Sequence[int]) -> bool:
        """Tell whether an output that was cut is whole by its structure all the same. Raise
        StructureError."""
        return self._structures.is_whole(structure, output)

    def follow(self, limits: ServingLimits, admit: Admit) -> None:
        """Take these limits from now on, of an engine that was started anew."""
        self.limits, self._admit = limits, admit

    def close(self) -> None:
        """Free what was compiled for structured outputs."""
        self._structures.close()

    def _ends(self, named: tuple[int, ...]) -> tuple[int, ...]:
        """Return the tokens that end an output, of those that the checkpoint names as such.

        Where the model writes messages in channels (harmony), they are `<|return|>` and `<|call|>` too,
        named or not, and never `<|end|>`, behind which the next message comes.
        """
        if self._tokenizer is None:
            return named
        more = [self._tokenizer.token_to_id(token) for token in (_CHANNEL, *_OUTPUT_ENDS)]
        if not all(token is not None and token < self.vocab_size for token in more):
            return named
        between = self._tokenizer.token_to_id(_MESSAGE_END)
        return tuple(token for token in dict.fromkeys([*named, *more[1:]]) if token not in (None, between))

    def _read(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """Return the prompt's text, if it has one, and its tokens."""
        if isinstance(prompt, str):
            return prompt, self._known(self.encode(prompt))
        prompt = plain(prompt)
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
            raise not_a_prompt(prompt)
        if prompt and isinstance(prompt[0], Mapping):
            text = self.tokenizer.render_chat(prompt)  # type: ignore[arg-type]  # Checked there, with a message of its own.
            return text, self._known(self.encode(text, special=False))
        if prompt and isinstance(prompt[0], str):
            raise RequestError(
                f"this prompt is a list that begins with the text {shown(prompt[0])}; a prompt is one text, "
                "token ids or a conversation, and `generate` takes several prompts as a list"
            )
        return None, self._tokens(prompt)

    def _known(self, tokens: list[int]) -> list[int]:
        """Return the tokens, checked: a tokenizer may have some that the model has no embedding for, such as
        one that was added to its file alone. Raise RequestError for these."""
        if (most := max(tokens, default=0)) >= (vocab := self.vocab_size):
            raise RequestError(
                f"the prompt has {shown(self.tokenizer.token_text(most))}, token {most} of the tokenizer, "
                "but the model has embeddings for "
                f"tokens 0 to {vocab - 1} alone; leave it out, or serve a checkpoint whose tokenizer.json "
                "and weights belong together"
            )
        return tokens

    def _tokens(self, given: Sequence[object]) -> list[int]:
        """Return the same values, known to be token ids. Raise RequestError for what is none."""
        vocab, tokens = self.vocab_size, []
        for token in given:
            token = token if isinstance(token, int) else plain(token)
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
                raise RequestError(
                    f"token {shown(token)} is not in the vocabulary; token ids are whole numbers from 0 to "
                    f"{vocab - 1}"
                )
            tokens.append(token)
        return tokens

    def _sampling(self, params: SamplingParams) -> Callable[[int], Sampling]:
        """Return the function that makes the settings of output `index`, with the model's defaults filled
        in."""
        defaults, vocab = self.defaults, self.vocab_size
        for name, tokens in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
            if (worst := max(tokens, default=0)) >= vocab:
                raise RequestError(
                    f"{name} has token {worst}, but the model has only tokens 0 to {vocab - 1}; give ids in "
                    "this range"
                )
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
            int.from_bytes(random_bytes(8)) >> 1 if params.seed is None else params.seed,
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


def plain(given: Any) -> Any:
    """Return the list of an array or tensor of one dimension, the number of one of none, and what else is
    given as it is. Raise RequestError for more dimensions, whose rows may be padded."""
    if not hasattr(given, "tolist"):
        return given
    if getattr(given, "ndim", 1) > 1:
        raise RequestError(
            f"token ids are given in an array of {' x '.join(map(str, given.shape))}, but a prompt has one "
            "dimension; give one row, such as ids[0], or a list of rows without padding"
        )
    return given.tolist()


def not_a_prompt(given: object) -> RequestError:
    """Return the error for a value that is no prompt."""
    return RequestError(
        f"the prompt is of type {type(given).__name__}; give text, a list of token ids, or a list of messages"
    )


def several(messages: object) -> bool:
    """Tell whether these are several conversations, and not the messages of one."""
    return (
        isinstance(messages, Sequence)
        and bool(messages)
        and all(isinstance(one, Sequence) and not isinstance(one, str | bytes) for one in messages)
    )


def paired(
    prompts: Prompt | Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams | None] | None,
) -> list[tuple[Prompt, SamplingParams | None]]:
    """Return each prompt with its settings, of one prompt or many, and of one for all or one for each. Raise
    RequestError where the numbers differ, and for what is none of these."""
    several = _as_prompts(prompts)
    settings = (
        [params] * len(several)
        if params is None or isinstance(params, SamplingParams)
        else _as_settings(params)
    )
    if len(settings) != len(several):
        raise RequestError(
            f"there are {len(settings)} SamplingParams for {counted(len(several), 'prompt')}; give one for "
            "all, or one for each"
        )
    return list(zip(several, settings, strict=True))


def each_of(names: str | Sequence[str | None] | None, count: int) -> Sequence[str | None]:
    """Return the name of each of so many prompts' LoRA adapters, of one for all or one for each. Raise
    RequestError where the numbers differ, and for what is no name."""
    each = [names] * count if names is None or isinstance(names, str) else names
    if not isinstance(each, Sequence) or not all(one is None or isinstance(one, str) for one in each):
        raise RequestError(f"lora {shown(names)} must be the name of an adapter, or one for each prompt")
    if len(each) != count:
        raise RequestError(
            f"there are {count} prompts but {len(each)} names of adapters; give one for all, or one for each"
        )
    return each


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return a list of prompts, of what may be a single one."""
    if isinstance(prompts, str):
        return [prompts]
    prompts = plain(prompts)
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes | bytearray):
        raise not_a_prompt(prompts)
    if prompts and isinstance(plain(prompts[0]), int | Mapping):
        return [prompts]  # type: ignore[list-item]
    several = [plain(prompt) for prompt in prompts]
    for prompt in several:
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
            raise not_a_prompt(prompt)
    return several


def _as_settings(params: object) -> list[SamplingParams | None]:
    if not isinstance(params, Sequence) or isinstance(params, str | bytes | bytearray):
        raise RequestError(
            f"params is of type {type(params).__name__}; give one SamplingParams for all prompts, or a list "
            "with one for each"
        )
    return list(params)


def _not_messages(given: object) -> RequestError:
    """Return the error for a value that is no conversation."""
    example = 'chat([{"role": "user", "content": "Hello"}])'
    if isinstance(given, str):
        return RequestError(f"chat takes a list of messages, not a text; give {example}, or use generate")
    what = f"of type {type(given).__name__}"
    if isinstance(given, Sequence):
        other = next(one for one in given if not isinstance(one, Mapping))
        what = f"a list with a value of type {type(other).__name__}"
    return RequestError(f"chat takes a list of messages, and this is {what}; give {example}")
