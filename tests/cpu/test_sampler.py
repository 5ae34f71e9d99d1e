"""What a request is told of its tokens depends on nothing that is asked beside it."""

import math
import random
from dataclasses import replace

import pytest
import torch

from penstock.ops import sampling as sampling_ops
from penstock.ops.gumbel import key_words
from penstock.ops.sampling import draw, draw_reference
from penstock.step.params import Sampling
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


def asked() -> list[Sampling]:
    """A setting of each sort."""
    plain, end = sampling(), frozenset([3, 4])
    return [
        plain,
        replace(plain, temperature=0.8, seed=1),
        replace(plain, temperature=1.2, top_p=0.8, seed=2),
        replace(plain, temperature=0.9, top_k=7, min_p=0.01, seed=3, logprobs=2),
        replace(plain, repetition_penalty=1.4, frequency_penalty=0.5, logprobs=0),
        replace(plain, temperature=0.7, presence_penalty=0.9, seed=4),
        replace(plain, logit_bias=((5, 2.0), (9, -3.0)), min_tokens=4, end_tokens=end),
        replace(plain, temperature=1.0, top_p=0.9, seed=5),
    ]


@pytest.mark.parametrize("value", [math.nan, -math.nan])
@pytest.mark.parametrize("all_of_it", [False, True])
@pytest.mark.parametrize("greedy", [False, True])
def test_a_row_that_is_not_numbers_is_named_and_the_others_are_as_without_it(
    value: float, all_of_it: bool, greedy: bool
) -> None:
    """Whichever it is, in the second of three steps. greedy: nobody draws at random."""
    settings = [one for one in asked() if not greedy or one.temperature == 0]
    steps = torch.randn(3, len(settings), VOCAB, generator=torch.Generator().manual_seed(1)) * 3

    def drawn(
        bad: int | None,
    ) -> list[tuple[list[int], list[TokenLogprob | None], frozenset[int], list[int]]]:
        """Of each step the tokens, their scores, who is named, and what is each row's newest."""
        sampler, found = Sampler(VOCAB, len(settings), torch.device("cpu")), []
        for row, setting in enumerate(settings):
            sampler.admit(Admission(Row(row), setting, (1, 2), ()))
        for step, logits in enumerate(steps.clone()):
            if bad is not None and step == 1:
                logits[bad, slice(None) if all_of_it else 17] = value
            shares = [
                Share(Row(row), 1 + step, (2,), 0, (), sample=True, prompt_length=2)
                for row in range(len(settings))
            ]
            one = sampler.sample(logits, shares)
            tokens, scores = one.read()
            found.append((tokens, scores, one.tokens.wrong, sampler.newest.tolist()))
        return found

    right = drawn(None)
    assert [wrong for _, _, wrong, _ in right] == [frozenset()] * 3
    for bad in range(len(settings)):
        found = drawn(bad)
        assert [wrong for _, _, wrong, _ in found] == [frozenset(), {bad}, frozenset()]
        tokens, _, _, newest = found[1]
        assert newest[bad] == 0
        assert 0 <= tokens[bad] < VOCAB
        for mine, own in zip(found, right, strict=True):
            for part, other in ((mine[0], own[0]), (mine[1], own[1]), (mine[3], own[3])):
                assert [one for row, one in enumerate(part) if row != bad] == [
                    one for row, one in enumerate(other) if row != bad
                ]


@pytest.mark.parametrize("few", [(1,), (3, 9), (8, 40), (63,)])
def test_draws_among_the_likeliest_are_those_among_all(
    few: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ties, zeros of both signs, infinities, and rows so flat that a part of the vocabulary does not do;
    alone and beside others."""
    monkeypatch.setattr(sampling_ops, "_FEW", few)
    generator = torch.Generator().manual_seed(2)
    logits = (
        torch.randn(600, VOCAB, generator=generator)
        * torch.tensor([0.01, 0.5, 3.0, 12.0]).repeat(150)[:, None]
    )
    logits[::5] = logits[::5].round()
    logits[::25] *= -0.0
    logits[3::7, ::3] = -torch.inf
    logits[4::50, 7] = torch.inf
    logits[5::60] = torch.nan
    positions = torch.randint(2**40, (len(logits),), generator=generator).tolist()
    settings = ((0.3, 1.0, 4.0), (0, 0, 1, 2, 7, 30, 64, 500), (1.0, 0.1, 0.9, 0.9999), (0.0, 0.0, 0.02, 0.2))
    chance = random.Random(3)
    rows = [
        (at, *map(chance.choice, settings), *key_words(at % 3), position)
        for at, position in enumerate(positions)
    ]
    asked = torch.tensor(rows, dtype=torch.float64)
    expected = draw_reference(logits, asked)
    tokens = torch.full((len(logits),), -1)
    draw(logits, asked, tokens)
    assert tokens.tolist() == expected.tolist()
    for at in range(0, len(logits), 7):
        alone = torch.full((len(logits),), -1)
        draw(logits, asked[at : at + 1], alone)
        assert alone[at] == expected[at]


def test_a_vocabulary_is_only_sorted_where_its_likeliest_tokens_do_not_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sharp, flat = torch.arange(20_000.0).flip(0), torch.zeros(20_000)
    wishes = torch.tensor(
        [[0, 1.0, 0, 0.95, 0, 5, 6, 7], [1, 1.0, 0, 0.95, 0, 5, 6, 7], [1, 1.0, 50, 0.95, 0, 5, 6, 7]],
        dtype=torch.float64,
    )
    sorted_rows: list[list[float]] = []

    def reference(logits: torch.Tensor, asked: torch.Tensor, *, sorts: bool) -> torch.Tensor:
        sorted_rows.extend(asked.tolist())
        return draw_reference(logits, asked, sorts=sorts)

    monkeypatch.setattr(sampling_ops, "draw_reference", reference)
    tokens = torch.zeros(2, dtype=torch.int64)
    draw(torch.stack([sharp, flat]), wishes, tokens)
    assert sorted_rows == [wishes[1].tolist()]


def test_ranks_take_rank_0s_tokens_wherever_one_was_drawn() -> None:
    """Devices that are not alike may draw others: what was drawn here is neither told nor the row's newest.
    The likeliest are the same."""
    logits, asked_for = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(3)), []

    def agree(tokens: torch.Tensor) -> None:
        asked_for.append(tokens.tolist())
        tokens.copy_(torch.tensor([11, 12]))

    def drawn(*settings: Sampling) -> tuple[list[int], list[int]]:
        sampler = Sampler(VOCAB, 2, torch.device("cpu"), agree)
        shares = [Share(Row(row), 0, (1,), 0, (), sample=True, prompt_length=1) for row in range(2)]
        for row, setting in enumerate(settings):
            sampler.admit(Admission(Row(row), setting, (1,), ()))
        return sampler.sample(logits.clone(), shares).read()[0], sampler.newest.tolist()

    likeliest, plain = logits.argmax(-1).tolist(), sampling()
    assert drawn(plain, plain) == (likeliest, [*likeliest, 0])
    assert not asked_for
    assert drawn(plain, replace(plain, temperature=0.8, seed=1)) == ([11, 12], [11, 12, 0])
    assert asked_for[0][0] == likeliest[0]


def test_a_row_that_comes_back_goes_on_as_if_it_had_never_gone() -> None:
    """After a preemption it is admitted with the tokens that it had. All are as likely, nearly, so that each
    one changes what is next."""
    logits, settings = (
        torch.randn(len(asked()), VOCAB, generator=torch.Generator().manual_seed(4)) * 0.05,
        asked(),
    )

    def drawn(sampler: Sampler, step: int) -> list[int]:
        shares = [
            Share(Row(row), 1 + step, (2,), 0, (), sample=True, prompt_length=2)
            for row in range(len(settings))
        ]
        return sampler.sample(logits.clone(), shares).read()[0]

    def admitted(outputs: list[tuple[int, ...]]) -> Sampler:
        sampler = Sampler(VOCAB, len(settings), torch.device("cpu"))
        for row, (setting, output) in enumerate(zip(settings, outputs, strict=True)):
            sampler.admit(Admission(Row(row), setting, (1, 2), output))
        return sampler

    stays = admitted([()] * len(settings))
    steps = [drawn(stays, step) for step in range(6)]
    back = admitted(list(zip(*steps[:3], strict=True)))
    assert [drawn(back, step) for step in range(3, 6)] == steps[3:]


def test_nothing_ends_before_it_has_as_many_tokens_as_it_must() -> None:
    logits = (
        torch.zeros(1, VOCAB).index_fill_(1, torch.tensor([3]), 2.0).index_fill_(1, torch.tensor([7]), 1.0)
    )
    sampler = Sampler(VOCAB, 1, torch.device("cpu"))
    sampler.admit(Admission(Row(0), replace(sampling(), min_tokens=3, end_tokens=frozenset([3])), (1, 2), ()))
    shares = [Share(Row(0), 1 + step, (2,), 0, (), sample=True, prompt_length=2) for step in range(5)]
    assert [sampler.sample(logits.clone(), [share]).read()[0] for share in shares] == [
        [7],
        [7],
        [7],
        [3],
        [3],
    ]
