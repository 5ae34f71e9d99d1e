"""Samples the tokens of a step, with settings and penalty counts of each row, and log-probabilities.

Only reading tokens, `prompt_logprobs`, and a step with structured rows wait for the device: see `structures`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.memory.sending import send
from penstock.ops.sampling import (
    TokenCounts,
    draw,
    is_greedy,
    noisy_scores,
    pack_sampling,
    penalise,
    ranked,
)
from penstock.ops.steps import NO_TOKEN, likeliest_on_host, without_numbers
from penstock.step.params import Sampling
from penstock.step.plan import Admission, Row, Share, TokenLogprob
from penstock.step.tree import lines, repeated, sights
from penstock.worker.structures import Guide, Masks

_ROWS = 16
"""Rows of logits in which the likeliest tokens are looked for at a time.

Each takes several times its memory.
"""

_SPREAD = 0.1
"""A draft's scores by this are the logits of what the target may draw: they are off by about so much.

Measured with a copy of the shipped model in four bits, trees of 63: 12.6 tokens a pass by 0.15, 13.2 by 0.1,
13.8 by 0.06 at temperature 1, and 11.3 and 11.4 by the first two at 0, with few prompts. SmolLM2-135M, whose
copy drafts worse, had more by 0.1 than by 0.3 and 1.
"""


@dataclass(slots=True)
class _RowState:
    sampling: Sampling
    prompt_length: int
    counts: TokenCounts | None = None
    bias: tuple[Tensor, Tensor] | None = None
    """Tokens, and the numbers that are added to their logits."""
    ends: Tensor | None = None
    """End tokens, which are banned until the output has min_tokens."""

    @property
    def adjusts(self) -> bool:
        """Tell whether logits may be changed before a draw; else no row is looked at alone."""
        return self.bias is not None or self.counts is not None or self.ends is not None


class _Draw(NamedTuple):
    """Holds the draw of one token, at `position`. path: tokens of a draft that are to be before it."""

    state: _RowState
    position: int
    path: tuple[int, ...]


class Sampler:
    """Chooses tokens, and owns each row's sampling state.

    It lasts until the row is given to another request.
    """

    def __init__(
        self,
        vocab_size: int,
        rows: int,
        device: torch.device,
        agree: Callable[[Tensor], None] | None = None,
        guide: Guide | None = None,
    ) -> None:
        """Begin without rows.

        agree: replaces this rank's tokens by rank 0's, if there are several ranks.
        guide: keeps structured output, on rank 0 only. Its tokens are used on all ranks.
        """
        self._vocab = vocab_size
        self._masks = Masks(guide, device) if guide is not None else None
        self._agree = agree
        self._device = device
        self._rows: dict[Row, _RowState] = {}
        self._non_greedy_rows: set[Row] = set()
        """Of those, whoever wants more than the likeliest token."""
        self._counts_drawn = True
        """Whether what is drawn is counted as output."""
        self._same_bits = True
        """Whether logits have the same bits on all ranks."""
        self.newest = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        """Newest token of each row. The last is for padding."""
        self._one = torch.ones(1, dtype=torch.int32, device=device)

    def for_drafts(self, *, same_bits: bool = True) -> "Sampler":
        """Return a sampler for the drafts of the same rows: it draws by their settings and counts and by the
        same numbers, but nothing that it draws is counted or held to a structure. `newest` is its own.

        same_bits: whether logits have the same bits on all ranks. They need not, where each rank computes
        them by itself, on devices that differ: then all use rank 0's tokens.
        """
        drafts = copy(self)
        drafts._masks, drafts._counts_drawn, drafts.newest = None, False, torch.zeros_like(self.newest)
        drafts._same_bits = same_bits
        return drafts

    def admit(self, admission: Admission) -> None:
        """Store the settings of a new request, and count its tokens if penalties need that."""
        sampling = admission.sampling
        state = self._rows[admission.row] = _RowState(sampling, len(admission.prompt))
        (self._non_greedy_rows.discard if is_plain(sampling) else self._non_greedy_rows.add)(admission.row)
        if sampling.penalised:
            output = torch.zeros(self._vocab, dtype=torch.int32, device=self._device)
            output.index_add_(0, self._ids(admission.output), self._one.expand(len(admission.output)))
            prompt = torch.zeros(self._vocab, dtype=torch.bool, device=self._device).index_fill_(
                0, self._ids(admission.prompt), True
            )
            state.counts = TokenCounts(output, prompt)
        if sampling.logit_bias:
            tokens, biases = zip(*sampling.logit_bias, strict=True)
            state.bias = self._ids(tokens), send(np.array(biases, dtype=np.float32), self._device)
        if sampling.min_tokens and sampling.end_tokens:
            state.ends = self._ids(sorted(sampling.end_tokens))
        if self._masks is not None:
            self._masks.admit(admission)

    def _ids(self, numbers: Sequence[int]) -> Tensor:
        return send(np.array(numbers, dtype=np.int64), self._device)

    def choose(self, logits: Tensor, likeliest: Tensor, shares: Sequence[Share]) -> "Drawn":
        """Choose tokens as `sample` does, where the likeliest tokens are known, and those of shares of one
        token are the rows' newest."""
        if self._takes_likeliest(shares):
            if any(share.draft for share in shares):
                last, _ = _walked(likeliest, shares)
                rows = self._ids([share.row for share in shares])
                self.newest[rows] = likeliest.clamp(min=0)[last]
            return Drawn(likeliest)
        return self.sample(logits.float(), shares)

    def _takes_likeliest(self, shares: Sequence[Share]) -> bool:
        rows = self._non_greedy_rows
        return not rows or rows.isdisjoint([share.row for share in shares])

    def sample(self, logits: Tensor, shares: Sequence[Share], children: int = 0) -> "Drawn":
        """Sample the tokens that shares draw, and find their log-probabilities if wanted.

        Those of a draft that is verified are drawn as if all before it had been drawn and counted. The newest
        token of its row is the last one that is accepted, and only accepted ones are counted.

        logits: float32 `[draws, vocab]` of the positions after which a token is drawn: of each share in turn.
            They may be overwritten.
        children: if not 0, so many tokens that may come next are found for each draw, and none is drawn.
        """
        if children:
            return self._children(logits, shares, children)
        if not logits.is_cuda and self._takes_likeliest(shares):
            tokens = likeliest_on_host(logits)
            if self._agree is not None and not self._same_bits:
                self._agree(tokens)
            last, _ = _walked(tokens, shares)
            self.newest.numpy()[[share.row for share in shares]] = tokens.clamp(min=0)[last]
            return Drawn(tokens)
        draws = [draw for share in shares for draw in self._draws(share)]
        wanted = {
            row: one.state.sampling.logprobs
            for row, one in enumerate(draws)
            if one.state.sampling.logprobs is not None
        }
        logprob_rows = sorted(wanted, key=wanted.__getitem__)
        scored = self._ids(logprob_rows)
        raw = logits[scored].log_softmax(-1) if logprob_rows else None
        for row, one in enumerate(draws):
            if one.state.adjusts:
                self._adjust(logits[row], one)
        held, first = dict[int, tuple[Row, Sequence[int], Sequence[int]]](), 0
        for share in shares:
            if self._rows[share.row].sampling.structure is not None:
                held[first] = share.row, share.draft, share.parents
            first += share.draws
        broken = self._masks.put(logits, held) if held and self._masks is not None else frozenset[int]()
        tokens = logits.argmax(-1)
        wrong = without_numbers(logits, tokens)
        random = [row for row, one in enumerate(draws) if not is_greedy(one.state.sampling)]
        if random:
            asked = pack_sampling(
                random,
                [draws[row].state.sampling for row in random],
                [draws[row].position for row in random],
            )
            draw(logits, send(asked, self._device), tokens)
            tokens.masked_fill_(wrong, NO_TOKEN)
        # Logits may have the same bits on all ranks. Likelihoods need not where devices differ, and only rank
        # 0 has masks.
        if self._agree is not None and (random or held or not self._same_bits):
            self._agree(tokens)
        known, (last, kept) = tokens.clamp(min=0), _walked(tokens, shares)
        self.newest[self._ids([share.row for share in shares])] = known[last]
        if self._counts_drawn:
            self._count(known, last, kept, shares)
        scores = (
            None if raw is None else _Scores(raw, known[scored], {row: wanted[row] for row in logprob_rows})
        )
        drawn = Drawn(tokens, scores, broken)
        if self._masks is not None:
            self._masks.drawn(held, drawn.tokens)
        return drawn

    def _children(self, logits: Tensor, shares: Sequence[Share], most: int) -> "Drawn":
        """Find the tokens that the target may draw behind each token of these shares, by a draft's logits and
        the noise of each position, and how likely each is.

        logits: float32 `[draws, vocab]`, as of `sample`.
        """
        places = [
            (self._rows[share.row], position + 1)
            for share in shares
            for position in (share.positions[-share.draws :] if share.draws else ())
        ]
        for row, (state, position) in enumerate(places):
            if state.adjusts:
                self._adjust(logits[row], _Draw(state, position, ()))
        random = [row for row, (state, _) in enumerate(places) if not is_greedy(state.sampling)]
        if random:
            settings, positions = (
                [places[row][0].sampling for row in random],
                [places[row][1] for row in random],
            )
            sorts = any(one.top_k or one.top_p < 1 for one in settings)
            asked = send(pack_sampling(random, settings, positions), self._device)
            rows = self._ids(random)
            logits[rows] = noisy_scores(logits[rows], asked, sorts=sorts)
        logits /= _SPREAD
        best, tokens = logits.topk(min(most, self._vocab))
        return Drawn(tokens.flatten(), chances=(best - logits.logsumexp(-1, keepdim=True)).exp())

    def _draws(self, share: Share) -> "Iterator[_Draw]":
        state, draft, draws = self._rows[share.row], share.draft, share.draws
        if share.parents and draws:
            assert len(share.parents) == len(draft), "a tree of which not all is verified"
            for position, path in zip(share.positions, lines(draft, share.parents), strict=True):
                yield _Draw(state, position + 1, path)
            return
        first = share.stop - len(draft) + share.ahead
        for at in range(draws):
            yield _Draw(state, first + at, draft[:at])

    def _count(
        self, known: Tensor, last: Tensor | slice, trees: Mapping[int, Tensor], shares: Sequence[Share]
    ) -> None:
        """Count accepted tokens as output, where penalties use the counts. last, trees: as of `_walked`."""
        first = 0
        for place, share in enumerate(shares):
            counts, draws = self._rows[share.row].counts, share.draws
            if counts is not None and draws == 1:
                counts.output.index_add_(0, known[first : first + 1], self._one)
            elif counts is not None:
                assert isinstance(last, Tensor)
                kept = trees.get(place)
                if kept is None:
                    kept = torch.arange(first, first + draws, device=self._device) <= last[place]
                counts.output.index_add_(0, known[first : first + draws], kept.int())
            first += draws

    def _adjust(self, logits: Tensor, one: "_Draw") -> None:
        """Apply bias, penalties and the ban of early ends to a row's logits `[vocab]`, in place."""
        state = one.state
        if state.bias is not None:
            logits.index_add_(0, *state.bias)
        if (counts := state.counts) is not None:
            if one.path:
                more = self._one.expand(len(one.path))
                output = counts.output.index_add(0, self._ids(one.path), more)
                counts = TokenCounts(output, counts.prompt)
            penalise(logits, state.sampling, counts)
        if state.ends is not None and one.position - state.prompt_length < state.sampling.min_tokens:
            logits.index_fill_(0, state.ends, -torch.inf)

    def prompt_logprobs(self, logits: Tensor, share: Share, following: Sequence[int]) -> list[TokenLogprob]:
        """Return the log-probability of each following prompt token.

        logits: float32 `[positions, vocab]`.
        """
        wanted = self._rows[share.row].sampling.prompt_logprobs
        assert wanted is not None
        tokens = self._ids(following)
        scores = _Scores(logits.log_softmax(-1), tokens, dict.fromkeys(range(len(following)), wanted))
        return [score for score in Drawn(tokens, scores).read()[1] if score is not None]


def is_plain(sampling: Sampling) -> bool:
    """Tell whether such a request only takes the likeliest token, without log-probabilities."""
    adjusted = sampling.logit_bias or sampling.penalised or (sampling.min_tokens and sampling.end_tokens)
    return is_greedy(sampling) and not adjusted and sampling.logprobs is None and sampling.structure is None


class _Scores:
    """Finds log-probabilities and ranks of tokens, and copies them to the host."""

    def __init__(self, logprobs: Tensor, tokens: Tensor, wanted: dict[int, int]) -> None:
        """Start the copies.

        logprobs: float32 `[scores, vocab]`.
        tokens: int64 `[scores]`.
        wanted: for each of them, its share, and how many of the likeliest tokens to report, -1 for all. Equal
            numbers must be adjacent.
        """
        own = logprobs.gather(1, tokens[:, None])
        self._shares = list(wanted)
        self._parts = [fetched(part) for part in (own[:, 0], (logprobs > own).sum(-1) + 1)]
        self._tops: list[tuple[Tensor, Tensor]] = []
        start, vocab = 0, logprobs.shape[1]
        for count, those in groupby(wanted.values()):
            stop = start + len(list(those))
            for part in torch.split(logprobs[start:stop], _ROWS):
                ids = ranked(part, min(count, vocab) if count >= 0 else vocab)
                self._tops.append((fetched(ids), fetched(part.gather(1, ids))))
            start = stop

    def read(self, tokens: Sequence[int]) -> list[TokenLogprob | None]:
        """Return the scores of a step's tokens, when all have arrived."""
        scores: list[TokenLogprob | None] = [None] * len(tokens)
        tops = (top for ids, values in self._tops for top in zip(ids.tolist(), values.tolist(), strict=True))
        for share, own, rank, top in zip(
            self._shares, *(part.tolist() for part in self._parts), tops, strict=True
        ):
            scores[share] = TokenLogprob(tokens[share], own, rank, tuple(zip(*top, strict=True)))
        return scores


class PendingTokens:
    """Holds the tokens of a step that are on their way to the host."""

    def __init__(self, tokens: Tensor) -> None:
        """Start the copy of int64 `[shares]`, NO_TOKEN where logits have a NaN, in stream order."""
        self._tokens = fetched(tokens)
        self._read: list[int] | None = None
        self.wrong: frozenset[int] = frozenset()
        """Shares with NaN logits, once the tokens have been read. Their tokens are arbitrary."""
        self._done: torch.cuda.Event | None = None
        if tokens.is_cuda:
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()

    def read(self) -> list[int]:
        """Wait for the tokens and return them, one for each share."""
        if self._read is None:
            if self._done is not None:
                self._done.synchronize()
            self._read = self._tokens.tolist()
            if NO_TOKEN in self._read:
                self.wrong = frozenset(place for place, token in enumerate(self._read) if token == NO_TOKEN)
                self._read = [max(token, 0) for token in self._read]
        return self._read


class Drawn:
    """Holds the tokens and scores that a step has drawn. Reading waits for them."""

    def __init__(
        self,
        tokens: Tensor,
        scores: _Scores | None = None,
        broken: frozenset[int] = frozenset(),
        chances: Tensor | None = None,
    ) -> None:
        """Start the copies.

        tokens: as for PendingTokens.
        broken: shares that could not follow their structure, so that they may only end.
        chances: float32 `[draws, count]`, if the tokens are as many for each draw that may come next: how
            likely each is.
        """
        self._scores = scores
        self._chances = None if chances is None else fetched(chances)
        self.tokens = PendingTokens(tokens)
        self.broken = broken

    def children(self) -> list[tuple[tuple[int, float], ...]]:
        """Wait for tokens that may come next and return those of each draw, and how likely each is."""
        tokens = iter(self.tokens.read())
        assert self._chances is not None, "tokens that were drawn are not what may come next"
        pairs = [[(next(tokens), min(chance, 1.0)) for chance in some] for some in self._chances.tolist()]
        return [tuple([pair for pair in some if pair[1] > 0]) for some in pairs]

    def read(self) -> tuple[list[int], list[TokenLogprob | None]]:
        """Wait for tokens and scores and return them, one for each share."""
        tokens = self.tokens.read()
        return tokens, self._scores.read(tokens) if self._scores is not None else [None] * len(tokens)


def _walked(tokens: Tensor, shares: Sequence[Share]) -> tuple[Tensor | slice, Mapping[int, Tensor]]:
    """Return the place of each share's last accepted token in int64 tokens `[draws]`; and of shares that
    verify a tree, by their index, which of their draws are accepted, bool `[draws]`."""
    if len(tokens) == len(shares):
        return slice(None), {}
    places, trees, first = list[Tensor](), dict[int, Tensor](), 0
    for place, share in enumerate(shares):
        last = tokens.new_zeros(())
        if share.parents and share.draft:
            last, trees[place] = _walked_tree(tokens[first : first + share.draws], share)
        elif share.draft:
            draft = send(np.array(share.draft, dtype=np.int64), tokens.device)
            last = (tokens[first : first + len(draft)] == draft).long().cumprod(0).sum()
        places.append(last + first)
        first += share.draws
    return torch.stack(places), trees


def _walked_tree(drawn: Tensor, share: Share) -> tuple[Tensor, Tensor]:
    """Do what `tree.walk` does, without waiting for the device."""
    draft, parents = share.draft, share.parents
    bits = np.array(sights(parents), dtype=np.uint64)[:, None] >> np.arange(len(drawn), dtype=np.uint64)
    seen = send((bits & 1).astype(np.int64), drawn.device).bool()
    told = send(np.array([draft, parents, repeated(draft, parents)], dtype=np.int64), drawn.device)
    held = (drawn[told[1]] == told[0]) & (told[2] == 0)
    alive = (torch.cat([held.new_ones(1), held]) | ~seen).all(1)
    last = (alive * seen.sum(1)).argmax()
    return last, seen[last]


def fetched(x: Tensor) -> Tensor:
    """Start a copy to the host, in stream order. Later work on the stream may reuse the memory."""
    if not x.is_cuda:
        return x.clone()
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
