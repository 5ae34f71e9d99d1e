"""Reads what a checkpoint's makers recommend for sampling from it, and the tokens that begin, end and pad its
texts."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.base.errors import CheckpointError, RequestError
from penstock.step.params import SamplingParams
from penstock.weights.jsonfile import MAX_CONFIG_BYTES, read_object, shown


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Holds the recommended sampling. None: the checkpoint does not say. Values have the meanings and ranges
    of SamplingParams."""

    temperature: float | None = None
    """0, greedy, when the checkpoint asks not to sample."""
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    eos_tokens: tuple[int, ...] = ()
    """Every token that ends an output, those of generation_config.json first."""
    bos_token: int | None = None
    pad_token: int | None = None


def open_generation(path: Path, config: Mapping[str, object], vocab_size: int) -> GenerationDefaults:
    """Return the defaults of the model in directory `path`, with this config.json. Raises CheckpointError."""
    side = path / "generation_config.json"
    generation = read_object(side, MAX_CONFIG_BYTES) if os.path.lexists(side) else {}
    return read_generation(generation, config, vocab_size, str(side))


def read_generation(
    generation: Mapping[str, object], config: Mapping[str, object], vocab_size: int, where: str
) -> GenerationDefaults:
    """Return the defaults that a parsed generation_config.json (empty if there is none) and config.json give;
    `where` names the former.

    Raises CheckpointError, naming the key, for values of a wrong type or out of range.
    """
    sampling = {
        name: generation.get(name)
        for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    }
    if generation.get("do_sample") is False:
        sampling["temperature"] = 0.0
    if sampling["top_k"] == -1:  # Some checkpoints write "all" so.
        sampling["top_k"] = 0
    try:
        checked = SamplingParams(**sampling)  # type: ignore[arg-type]  # Its own checks are the point.
    except RequestError as error:
        raise CheckpointError(f"{where}: {error}") from error
    both = ((generation, where), (config, "config.json"))

    def tokens(key: str) -> tuple[int, ...]:
        return tuple(
            dict.fromkeys(token for source, name in both for token in _tokens(source, key, vocab_size, name))
        )

    return GenerationDefaults(
        temperature=checked.temperature,
        top_k=checked.top_k,
        top_p=checked.top_p,
        min_p=checked.min_p,
        repetition_penalty=checked.repetition_penalty,
        eos_tokens=tokens("eos_token_id"),
        bos_token=next(iter(tokens("bos_token_id")), None),
        pad_token=next(iter(tokens("pad_token_id")), None),
    )


def _tokens(source: Mapping[str, object], key: str, vocab_size: int, where: str) -> list[int]:
    """Return one token or a list of them; what is not in the vocabulary (-1 is often meant as none) never
    comes up and is left out."""
    value = source.get(key)
    tokens = [] if value is None else value if isinstance(value, list) else [value]
    ids = [token for token in tokens if isinstance(token, int) and not isinstance(token, bool)]
    if len(ids) < len(tokens):
        raise CheckpointError(
            f"{where}: key '{key}' is {shown(value)}; it must be a token id or a list of them; correct the "
            "file, or fetch it again"
        )
    return [token for token in ids if 0 <= token < vocab_size]
