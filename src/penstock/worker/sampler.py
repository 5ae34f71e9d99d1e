"""Chooses the tokens of a step: per-row settings and penalty counts, kept between steps; log-probabilities where asked."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.ops.sampling import TokenCounts, draw, penalise, uniform
from penstock.step.params import Sampling
from penstock.step.plan import Admission, Row, Share, TokenLogprob


@dataclass(slots=True)
class _RowState:
    sampling: Sampling
    prompt_length: int
    counts: TokenCounts | None


class Sampler:
    """Owns what sampling must remember of each row. A row's state lasts until the row is given to another request."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab = vocab_size
        self._device = device
        self._rows: dict[Row, _RowState] = {}

    def admit(self, admission: Admission) -> None:
        counts = None
        if admission.sampling.penalised:
            output = torch.bincount(self._ids(admission.output), minlength=self._vocab).to(torch.int32)
            prompt = torch.bincount(self._ids(admission.prompt), minlength=self._vocab) > 0
            counts = TokenCounts(output, prompt)
        self._rows[admission.row] = _RowState(admission.sampling, len(admission.prompt), counts)

    def _ids(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor(tokens, dtype=torch.int64, device=self._device)

    def sample(self, logits: Tensor, shares: Sequence[Share]) -> tuple[list[int], list[TokenLogprob | None]]:
        """A token, and its log-probability if wanted, for each share; logits float32 `[shares, vocab]` of their last positions."""
        states = [self._rows[share.row] for share in shares]
        raw = logits.log_softmax(-1) if any(state.sampling.logprobs is not None for state in states) else None
        for row, (state, share) in enumerate(zip(states, shares, strict=True)):
            self._adjust(logits[row], state, share)
        numbers = [uniform(state.sampling.seed, share.stop) for state, share in zip(states, shares, strict=True)]
        tokens: list[int] = draw(logits, [state.sampling for state in states], numbers).tolist()
        logprobs: list[TokenLogprob | None] = []
        for row, (state, token) in enumerate(zip(states, tokens, strict=True)):
            if state.counts is not None:
                state.counts.output[token] += 1
            wanted = state.sampling.logprobs
            logprobs.append(None if raw is None or wanted is None else token_logprob(raw[row], token, wanted))
        return tokens, logprobs

    def _adjust(self, logits: Tensor, state: _RowState, share: Share) -> None:
        """Bias, penalties and the ban on early ends, in place on a row's logits `[vocab]`."""
        sampling = state.sampling
        if sampling.logit_bias:
            ids, biases = zip(*sampling.logit_bias, strict=True)
            logits.index_add_(0, self._ids(ids), torch.tensor(biases, dtype=torch.float32, device=self._device))
        if state.counts is not None:
            penalise(logits, sampling, state.counts)
        if share.stop - state.prompt_length < sampling.min_tokens and sampling.end_tokens:
            logits[self._ids(sorted(sampling.end_tokens))] = -torch.inf

    def prompt_logprobs(self, logits: Tensor, share: Share, following: Sequence[int]) -> list[TokenLogprob]:
        """The log-probability of each following prompt token; logits float32 `[positions, vocab]`."""
        wanted = self._rows[share.row].sampling.prompt_logprobs
        assert wanted is not None
        raw = logits.log_softmax(-1)
        return [token_logprob(raw[row], token, wanted) for row, token in enumerate(following)]


def token_logprob(logprobs: Tensor, token: int, wanted: int) -> TokenLogprob:
    """A token's place in a distribution `[vocab]`, and the `wanted` likeliest tokens; -1 is all of them."""
    vocab = logprobs.shape[0]
    own = logprobs[token]
    values, ids = logprobs.topk(min(wanted, vocab) if wanted >= 0 else vocab)
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprob(token, own.item(), int((logprobs > own).sum().item()) + 1, top)
