"""Chooses the tokens of a step: per-row settings and penalty counts, kept between steps; log-probabilities where asked."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.ops.sampling import TokenCounts, draw, is_greedy, penalise
from penstock.step.params import Sampling
from penstock.step.plan import Admission, Row, Share, TokenLogprob


@dataclass(slots=True)
class _RowState:
    sampling: Sampling
    prompt_length: int
    counts: TokenCounts | None
    greedy: bool
    """Whether it takes the likeliest token, whatever else there is."""


class Sampler:
    """Owns what sampling must remember of each row. A row's state lasts until the row is given to another request."""

    def __init__(self, vocab_size: int, rows: int, device: torch.device, agree: Callable[[Tensor], None] | None = None) -> None:
        """agree: puts rank 0's tokens in the place of this rank's, if there are several."""
        self._vocab = vocab_size
        self._agree = agree
        self._device = device
        self._rows: dict[Row, _RowState] = {}
        self.newest = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        """Each row's newest token; the last is nobody's."""
        self._one = torch.ones(1, dtype=torch.int32, device=device)

    def admit(self, admission: Admission) -> None:
        counts = None
        if admission.sampling.penalised:
            output = torch.bincount(self._ids(admission.output), minlength=self._vocab).to(torch.int32)
            prompt = torch.bincount(self._ids(admission.prompt), minlength=self._vocab) > 0
            counts = TokenCounts(output, prompt)
        self._rows[admission.row] = _RowState(admission.sampling, len(admission.prompt), counts, is_plain(admission.sampling))

    def _ids(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor(tokens, dtype=torch.int64, device=self._device)

    def choose(self, logits: Tensor, likeliest: Tensor, shares: Sequence[Share]) -> "Drawn":
        """As `sample`, where the likeliest tokens are known and are the rows' newest."""
        if all(self._rows[share.row].greedy for share in shares):
            return Drawn(likeliest, (None,) * len(shares))
        return self.sample(logits, shares)

    def sample(self, logits: Tensor, shares: Sequence[Share]) -> "Drawn":
        """A token, and its log-probability if wanted, for each share; logits float32 `[shares, vocab]` of their last positions."""
        states = [self._rows[share.row] for share in shares]
        raw = logits.log_softmax(-1) if any(state.sampling.logprobs is not None for state in states) else None
        for row, (state, share) in enumerate(zip(states, shares, strict=True)):
            self._adjust(logits[row], state, share)
        tokens = draw(logits, [state.sampling for state in states], [share.stop for share in shares])
        # Logits are the same on all ranks, but sums over a vocabulary are not to the last bit, not even twice on one device.
        if self._agree is not None and not all(is_greedy(state.sampling) for state in states):
            self._agree(tokens)
        self.newest[self._ids([share.row for share in shares])] = tokens
        scores: list[_Score | None] = []
        for row, state in enumerate(states):
            if state.counts is not None:
                state.counts.output.index_add_(0, tokens[row : row + 1], self._one)
            wanted = state.sampling.logprobs
            scores.append(None if raw is None or wanted is None else _Score.of(raw[row], tokens[row : row + 1], wanted))
        return Drawn(tokens, scores)

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
        tokens = self._ids(following)
        return [_Score.of(raw[row], tokens[row : row + 1], wanted).read(token) for row, token in enumerate(following)]


def is_plain(sampling: Sampling) -> bool:
    """Whether such a request takes the likeliest token and wants to know nothing else."""
    adjusted = sampling.logit_bias or sampling.penalised or (sampling.min_tokens and sampling.end_tokens)
    return is_greedy(sampling) and not adjusted and sampling.logprobs is None


@dataclass(frozen=True, slots=True)
class _Score:
    """A token's place in a distribution, on the device."""

    own: Tensor
    rank: Tensor
    values: Tensor
    ids: Tensor

    @classmethod
    def of(cls, logprobs: Tensor, token: Tensor, wanted: int) -> "_Score":
        """logprobs `[vocab]`; token int64 `[1]`; `wanted`: of the likeliest tokens, -1 is all of them."""
        vocab = logprobs.shape[0]
        own = logprobs.gather(0, token)
        values, ids = logprobs.topk(min(wanted, vocab) if wanted >= 0 else vocab)
        return cls(own, (logprobs > own).sum() + 1, values, ids)

    def read(self, token: int) -> TokenLogprob:
        top = tuple(zip(self.ids.tolist(), self.values.tolist(), strict=True))
        return TokenLogprob(token, self.own.item(), int(self.rank.item()), top)


class Drawn:
    """What a step has drawn. It may be made before that is known, and waits for it where it is read."""

    def __init__(self, tokens: Tensor, scores: Sequence[_Score | None]) -> None:
        """tokens: int64 `[shares]`."""
        self._scores = scores
        # A copy: the next step may draw into the same place.
        self._tokens = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=tokens.is_cuda).copy_(tokens, non_blocking=True)
        self._done: torch.cuda.Event | None = None
        if tokens.is_cuda:
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()

    def read(self) -> tuple[list[int], list[TokenLogprob | None]]:
        if self._done is not None:
            self._done.synchronize()
        tokens: list[int] = self._tokens.tolist()
        return tokens, [None if score is None else score.read(token) for score, token in zip(self._scores, tokens, strict=True)]
