"""What a request is told of its tokens depends on nothing that is asked beside it."""

from dataclasses import replace

import torch

from penstock.step.plan import Admission, Row, Share, TokenLogprob
from penstock.worker.sampler import Sampler
from worlds import sampling

VOCAB = 64


def scored(logits: torch.Tensor, *wanted: int) -> list[TokenLogprob | None]:
    """Of one row of logits for each, which wants so many of the likeliest tokens."""
    sampler = Sampler(VOCAB, len(wanted), torch.device("cpu"))
    shares = []
    for row, count in enumerate(wanted):
        sampler.admit(Admission(Row(row), replace(sampling(), logprobs=count), (1,), ()))
        shares.append(Share(Row(row), 0, (1,), 0, (), sample=True, prompt_length=1))
    return sampler.sample(logits.clone(), shares).read()[1]


def test_the_likeliest_of_equal_ones_are_the_same_whatever_others_want() -> None:
    logits = torch.randn(20, VOCAB, generator=torch.Generator().manual_seed(0)).round()
    wanted = [3, 0, -1, 1, VOCAB, 10, 2, 1, 0, 3, *range(10)]
    alone = [score for row, count in zip(logits, wanted, strict=True) for score in scored(row[None], count)]
    assert scored(logits, *wanted) == alone
    for row, count, score in zip(logits, wanted, alone, strict=True):
        best = sorted(range(VOCAB), key=lambda token: (-row[token].item(), token))
        assert score is not None
        assert [token for token, _ in score.top] == best[: VOCAB if count < 0 else count]
