"""Times transformers at the same work, as plainly as it allows: its model and its cache, called step by step,
greedy."""

import importlib
import importlib.util
import time
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from penstock.base.errors import ConfigError
from penstock.bench.speed.measure import BatchWork
from penstock.bench.times import Timings
from penstock.bench.warming import timed

_AT_ONCE = 32
"""Requests in a padded batch."""
_WARM_TOKENS = 4
"""Output tokens of each request of the first batch, before requests are timed."""


def transformers() -> ModuleType:
    """Import the library. Raises ConfigError where it is not installed."""
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(
            "--baseline transformers needs the package transformers, which is not installed; pip install "
            "transformers"
        )
    return importlib.import_module("transformers")


class Baseline:
    """Runs a model of transformers on a device. Its weights are random if all that is known of it is a
    config."""

    def __init__(
        self, source: Mapping[str, object] | Path, *, random: bool, dtype: str, device: torch.device
    ) -> None:
        library = transformers()
        kind: torch.dtype = getattr(torch, dtype)
        if isinstance(source, Path) and not random:
            model = library.AutoModelForCausalLM.from_pretrained(source, dtype=kind)
        else:
            config = (
                library.AutoConfig.from_pretrained(source)
                if isinstance(source, Path)
                else library.AutoConfig.for_model(**dict(source))
            )
            with device:
                model = library.AutoModelForCausalLM.from_config(config, dtype=kind)
        self._model: Any = model.to(device).eval()
        self._device = device
        self._vocab = int(self._model.config.vocab_size)

    @torch.inference_mode()
    def decode(self, work: BatchWork) -> Timings:
        """Time single steps of the whole batch as `measure.decode` does. Each ends when its tokens are on the
        host. In each round steps are timed when they no longer get faster."""
        seconds = list[float]()
        for round in range(work.repeat):
            token, cache = self._forward(self._prompts(work, round), None)

            def step() -> float:
                nonlocal token, cache
                begin = time.perf_counter()
                token, cache = self._forward(token, cache)
                token.tolist()
                return time.perf_counter() - begin

            seconds += timed(step, work.output).seconds
        return Timings.of(seconds)

    @torch.inference_mode()
    def prefill(self, work: BatchWork) -> Timings:
        """Time one forward pass over all prompts as `measure.prefill` does, when rounds no longer get
        faster."""
        rounds = count()

        def prompts() -> float:
            tokens = self._prompts(work, next(rounds))
            begin = time.perf_counter()
            self._forward(tokens, None)[0].tolist()
            return time.perf_counter() - begin

        return Timings.of(timed(prompts, work.repeat).seconds)

    @torch.inference_mode()
    def serve(self, work: Sequence[tuple[Sequence[int], int]]) -> float:
        """Return the seconds that requests take, each a prompt and how many tokens it wants.

        Batches are padded on the left, and each runs until its last request is done. One batch is served for
        a few tokens before that is timed.
        """
        self._generate([(prompt, _WARM_TOKENS) for prompt, _ in work[:_AT_ONCE]])
        begin = time.perf_counter()
        for first in range(0, len(work), _AT_ONCE):
            self._generate(work[first : first + _AT_ONCE])
        return time.perf_counter() - begin

    def _generate(self, some: Sequence[tuple[Sequence[int], int]]) -> None:
        """Serve a padded batch to the end of its longest output."""
        longest, steps = max(len(prompt) for prompt, _ in some), max(output for _, output in some)
        tokens = torch.tensor(
            [[0] * (longest - len(prompt)) + list(prompt) for prompt, _ in some], device=self._device
        )
        mask = torch.tensor(
            [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt, _ in some], device=self._device
        )
        limits = {"max_new_tokens": steps, "min_new_tokens": steps, "do_sample": False, "pad_token_id": 0}
        self._model.generate(tokens, attention_mask=mask, **limits).tolist()

    def _forward(self, tokens: Tensor, cache: object) -> tuple[Tensor, object]:
        """Return the likeliest next tokens `[batch, 1]` after `tokens` `[batch, new]`, and the cache with
        these in it."""
        out = self._model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].argmax(-1, keepdim=True), out.past_key_values

    def _prompts(self, work: BatchWork, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(self._vocab, (work.batch, work.context), generator=generator).to(self._device)
