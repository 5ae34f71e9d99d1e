"""Carries out a Plan: inputs, forward pass, sampling. It decides nothing and allocates no blocks; its memory is the rows' tables."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from penstock.kv.pool import KVPool
from penstock.models.decoder import Decoder
from penstock.models.inputs import LayerCaches, Weights
from penstock.step.params import Sampling
from penstock.step.plan import Admission, BlockId, Outcome, Plan, Result, Row, Share, TokenLogprob
from penstock.worker.inputs import ROW_KEYS, InputBuilder
from penstock.worker.sampler import Sampler

_HEAD_ROWS = 64
"""Positions whose logits are held at a time when log-probabilities of a prompt are asked for."""


class Runner:
    """One device's worker."""

    def __init__(self, decoder: Decoder, weights: Weights, inputs: InputBuilder, sampler: Sampler, device: torch.device) -> None:
        self._decoder = decoder
        self._weights = weights
        self._inputs = inputs
        self._sampler = sampler
        # Kernels of our own are launched on the thread's current device, which need not be this one.
        self._current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        self._caches: LayerCaches = ()

    def attach(self, pool: KVPool) -> None:
        """From now on KV is written to and read from this pool."""
        self._caches = pool.layers

    @torch.inference_mode()
    def run(self, plan: Plan, layers: tuple[int, ...] | None = None) -> Outcome:
        """Do what the plan says and report it. `layers`: run only these, to measure."""
        with self._current:
            return self._run(plan, layers)

    def _run(self, plan: Plan, layers: tuple[int, ...] | None) -> Outcome:
        for admission in plan.admissions:
            self._sampler.admit(admission)
        step = self._inputs.build(plan)
        hidden = self._decoder.forward(self._weights, self._caches, step.inputs, layers)
        sampling = [share for share in plan.shares if share.sample]
        chosen: list[tuple[int, TokenLogprob | None]] = []
        if sampling:
            logits = self._decoder.logits(self._weights, hidden[: step.samples])
            chosen = list(zip(*self._sampler.sample(logits, sampling), strict=True))
        return self._outcome(plan, chosen, hidden[step.samples :], step.prompt_positions)

    def _outcome(
        self, plan: Plan, chosen: Sequence[tuple[int, TokenLogprob | None]], prompt_hidden: Tensor, prompt_positions: Sequence[int]
    ) -> Outcome:
        results, tokens, first = [], iter(chosen), 0
        for share, positions in zip(plan.shares, prompt_positions, strict=True):
            prompt = self._prompt_logprobs(share, prompt_hidden[first : first + positions])
            first += positions
            token, logprob = next(tokens) if share.sample else (None, None)
            results.append(Result(token, logprob, tuple(prompt)))
        return Outcome(tuple(results))

    def _prompt_logprobs(self, share: Share, hidden: Tensor) -> list[TokenLogprob]:
        found: list[TokenLogprob] = []
        for first in range(0, len(hidden), _HEAD_ROWS):
            logits = self._decoder.logits(self._weights, hidden[first : first + _HEAD_ROWS])
            found += self._sampler.prompt_logprobs(logits, share, share.next_prompt_tokens[first : first + _HEAD_ROWS])
        return found


def largest_step(*, max_step_tokens: int, max_sequences: int, max_length: int, block_size: int, past: int) -> Plan:
    """The step that takes the most memory: every sequence sampling with a sorted vocabulary, one long run with a tile of past and
    log-probabilities of its prompt, rows with as much past as a device without a paged kernel gathers at a time, all tokens.

    Every block of it is block 0, so it needs a pool of one block and leaves nothing behind.
    """
    sampling = Sampling(1.0, 0, 0.9, 0.0, 1.0, 0.0, 0.0, (), 0, frozenset(), 0, 1, 1)
    singles = min(max_sequences - 1, max_step_tokens - 1)
    count = min(max_step_tokens - singles, max_length)
    start = min(past, max_length - count)
    row_past = min(ROW_KEYS // max(singles, 1), past, max_length) - 1
    shares = [_warm_share(row, row_past, 1, block_size) for row in range(singles)]
    shares.append(replace(_warm_share(singles, start, count, block_size), next_prompt_tokens=(0,) * min(count - 1, _HEAD_ROWS)))
    admissions = tuple(Admission(share.row, sampling, share.tokens, ()) for share in shares)
    return Plan(admissions, tuple(shares))


def _warm_share(row: int, start: int, count: int, block_size: int) -> Share:
    blocks = (BlockId(0),) * -(-(start + count) // block_size)
    return Share(Row(row), start, (0,) * count, 0, blocks, sample=True, prompt_length=start + count)
