"""Holds sampling settings, as a user writes them and as the engine runs them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields

from penstock.base.errors import RequestError
from penstock.base.other_names import named_arguments
from penstock.step.structure import Structure

_MOST_BIAS = 1e30
"""Largest bias of a logit. It stays finite in float32, also after a penalty."""


MOST_TEMPERATURE = 2
"""OpenAI's limit: what is drawn beyond it is noise."""
MOST = 2**63 - 1
"""Largest whole number of a setting: an int64 tensor holds it."""
MOST_OUTPUTS = 2**16


@named_arguments
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Holds the sampling settings of one request, which check themselves.

    None means: as the model's generation_config.json says, else no effect.

    temperature: 0 is greedy; above 0, up to 2, divides the logits. Without a model default: 1.0.
    top_k: keep the k most probable tokens; 0 keeps all.
    top_p: keep the smallest set of tokens that together have a probability of p (nucleus sampling, Holtzman
        et al. 2019).
    min_p: drop tokens less probable than min_p times the most probable one (Nguyen et al. 2024).
    repetition_penalty: above 1 makes every token of prompt and output less likely (Keskar et al. 2019).
    presence_penalty, frequency_penalty: subtracted from a token's logit once if it is in the output, and once
        per occurrence.
    logit_bias: token id to a number added to its logit.
    seed: the same seed, prompt and settings give the same random numbers, whatever else is in the batch.
    stop: strings that end the output, and are cut from it unless `include_stop`.
    stop_token_ids: tokens that end the output, beside the model's own end tokens.
    shown_tokens: special tokens that are part of the text; others are left out.
    text_token: of these, the one behind which the text of a message begins, which ends at the next of them.
        Stop strings are looked for in such texts alone. None: everywhere.
    min_tokens: no end token is sampled before this many.
    max_tokens: at most this many; None up to the context's end.
    ignore_eos: go on after the model's end tokens.
    structure: form of the whole output, such as JSON of a schema. The output ends when it is complete.
    n: number of independent outputs for the prompt.
    logprobs: number of most likely tokens to report with each output token, beside the chosen one; -1 is the
        whole vocabulary, None reports nothing. Log-probabilities are of the model's own distribution, before
        penalties and temperature.
    prompt_logprobs: the same for each prompt token but the first.

    Raises RequestError if a value is out of range.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: str | Sequence[str] | None = ()
    include_stop: bool = False
    stop_token_ids: Sequence[int] = ()
    shown_tokens: Sequence[int] = ()
    text_token: int | None = None
    min_tokens: int = 0
    max_tokens: int | None = None
    ignore_eos: bool = False
    structure: Structure | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        _within("temperature", self.temperature, 0, MOST_TEMPERATURE, "0 is greedy, 0.7 is usual")
        _within("top_p", self.top_p, 0, 1, "1 keeps all", open_low=True)
        _within("min_p", self.min_p, 0, 1, "0 keeps all")
        _within("repetition_penalty", self.repetition_penalty, 0.001, 1000, "1 is none")
        _within("presence_penalty", self.presence_penalty, -100, 100, "0 is none")
        _within("frequency_penalty", self.frequency_penalty, -100, 100, "0 is none")
        _whole("top_k", self.top_k, 0, "0 keeps all")
        _whole("min_tokens", self.min_tokens, 0, "0 is no minimum")
        _whole("max_tokens", self.max_tokens, 1, "leave it out for what is usual")
        _whole("n", self.n, 1, "1 is usual", MOST_OUTPUTS)
        _whole("logprobs", self.logprobs, -1, "None is none, -1 the whole vocabulary")
        _whole("prompt_logprobs", self.prompt_logprobs, -1, "None is none, -1 the whole vocabulary")
        _whole("seed", self.seed, -(2**128), "None is a new one each time", 2**128)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}; lower min_tokens, or "
                "raise max_tokens"
            )
        if not isinstance(self.stop, Iterable | None) or any(
            not isinstance(text, str) or not text for text in self.stop_strings
        ):
            raise RequestError(f"stop {shown(self.stop)} must be strings of at least one character")
        if any("\ud800" <= character <= "\udfff" for text in self.stop_strings for character in text):
            raise RequestError(
                f"stop {shown(self.stop)} is not valid Unicode, so no text ever has it; give it as UTF-8"
            )
        for name, tokens in (("stop_token_ids", self.stop_token_ids), ("shown_tokens", self.shown_tokens)):
            if not isinstance(tokens, Iterable) or isinstance(tokens, str | bytes):
                raise RequestError(f"{name} {shown(tokens)} must be a list of token ids")
            for token in tokens:
                _whole(name, token, 0, "token ids", required=True)
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError(
                f"logit_bias {shown(self.logit_bias)} must be a mapping from token ids to numbers"
            )
        for token, bias in self.logit_bias.items():
            _whole("logit_bias", token, 0, "token ids as keys", required=True)
            number = not isinstance(bias, bool) and isinstance(bias, int | float)
            if not number or not (bias == -math.inf or abs(bias) <= _MOST_BIAS):
                raise RequestError(
                    f"logit_bias of token {token} is {shown(bias)}; it must be a number up to "
                    f"{_MOST_BIAS:g}, or minus infinity"
                )

        if self.structure is not None:
            if not isinstance(self.structure, Structure):
                raise RequestError(
                    f"structure {shown(self.structure)} must be a Structure, such as "
                    "Structure.regex('[0-9]+')"
                )
            for name, asked in (("ignore_eos", self.ignore_eos), ("min_tokens", self.min_tokens)):
                if asked:
                    raise RequestError(
                        f"{name} {asked} does not work with structured output, which ends with an end "
                        "token; leave one of them out"
                    )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Return the stop strings as a tuple, also where a single one was given."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


SETTINGS = frozenset(one.name for one in fields(SamplingParams))
"""The names of its settings."""


def _within(
    name: str, value: float | None, low: float, high: float, hint: str, *, open_low: bool = False
) -> None:
    if value is None:
        return
    number = not isinstance(value, bool) and isinstance(value, int | float)
    if not number or not (low < value if open_low else low <= value) or not value <= high:
        raise RequestError(
            f"{name} {shown(value)} must be {'above' if open_low else 'from'} {low} "
            f"{'and at most' if open_low else 'to'} {high}; {hint}"
        )


def _whole(
    name: str, value: int | None, low: int, hint: str, high: int = MOST, *, required: bool = False
) -> None:
    if value is None and not required:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise RequestError(f"{name} {shown(value)} must be a whole number, at least {low}; {hint}")
    if value > high:
        raise RequestError(f"{name} {shown(value)} must be a whole number, at most {high}; {hint}")


def shown(value: object) -> str:
    """Return `value` as text for a message: short, also for integers that Python refuses to print."""
    if isinstance(value, int) and abs(value) > 2**256:
        return f"{'-' if value < 0 else ''}2**{value.bit_length() - 1} or more"
    text = " ".join(repr(value).split())
    return text if len(text) <= 160 else f"{text[:160]}..."


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling holds the settings of a request with every default filled in, as a plan carries them to ranks.

    end_tokens: tokens that end the output: the model's own unless ignored, and the request's.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    seed: int
    end_tokens: frozenset[int]
    min_tokens: int
    logprobs: int | None
    prompt_logprobs: int | None
    structure: Structure | None = None
    pooled: bool = False
    """The hidden state behind the prompt is wanted as its embedding. A token is drawn after it, too."""

    @property
    def penalised(self) -> bool:
        """Tell whether logits depend on the tokens of prompt and output."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
