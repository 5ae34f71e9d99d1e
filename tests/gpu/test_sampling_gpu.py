"""Draws as a GPU compiles them, over whole vocabularies; and steps that sample are begun without waiting for
the device."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import gumbel_kernel
from penstock.ops.gumbel import gumbel, words
from penstock.ops.sampling import draw, draw_reference, pack_sampling
from penstock.ops.triton.sampling import draw as draw_kernel
from penstock.step.params import Sampling
from penstock.step.plan import Admission, Row, Share
from penstock.worker.sampler import Sampler

DEVICE = "cuda"
NEAR = 1e-6
"""By how much sums of float32 exponentials may differ, of a whole."""


def sampling(
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    **more: object,
) -> Sampling:
    settings: dict[str, object] = {
        "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
        "repetition_penalty": 1.0, "presence_penalty": 0.0,
        "frequency_penalty": 0.0, "logit_bias": (), "seed": seed, "end_tokens": frozenset(), "min_tokens": 0,
        "logprobs": None,
        "prompt_logprobs": None,
    }  # fmt: skip
    return Sampling(**(settings | more))  # type: ignore[arg-type]


def possible(logits: Tensor, asked: Tensor) -> list[set[int]]:
    """What the reference draws for each nucleus, or ones as good as equal to it.

    Noise and sums with it have the same bits in both."""
    found: list[set[int]] = [set() for _ in asked]
    for nucleus in (-NEAR, 0.0, NEAR):
        near = asked.clone()
        near[:, 3] += nucleus * (near[:, 3] < 1)
        for tokens, token in zip(
            found, draw_reference(logits[asked[:, 0].long()], near).tolist(), strict=True
        ):
            tokens.add(token)
    return found


@pytest.mark.parametrize("vocab", [1000, 151936])
def test_noise_has_the_bits_of_the_cpu(vocab: int) -> None:
    """As kernels make it, and plain torch there: so a row without thresholds is drawn alike everywhere."""
    seeds, positions = (0, -5, 2**127), (1, 2**32 + 1, 2**50)
    settings = [sampling(0.8, seed=seed) for seed in seeds]
    keys = torch.from_numpy(pack_sampling(range(3), settings, positions))
    noise = gumbel(keys[:, 5:], vocab)
    assert torch.equal(gumbel(keys[:, 5:].to(DEVICE), vocab).cpu(), noise)
    size = 256
    made, others = (torch.empty(3, 1024, device=DEVICE) for _ in range(2))
    found, picked = (torch.empty(3, 1024, dtype=torch.int64, device=DEVICE) for _ in range(2))
    gumbel_kernel.noise[(1024 // size, 3)](
        keys.to(DEVICE), found, picked, made, others, 1024, SIZE=size, enable_fp_fusion=False
    )
    assert torch.equal(found.cpu(), words(keys[:, 5:].long(), 1024))
    assert torch.equal(picked, found)
    first = gumbel(keys[:, 5:], 1024).view(torch.int32)
    assert torch.equal(made.cpu().view(torch.int32), first)
    assert torch.equal(others.cpu().view(torch.int32), first)
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(vocab)) * 4
    on_host, there = torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64, device=DEVICE)
    for step in range(50):
        keys[:, -1] += 1 + step
        draw(logits, keys, on_host)
        draw_kernel(logits.to(DEVICE), keys.to(DEVICE), there)
        assert torch.equal(there.cpu(), on_host)


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("vocab", [1000, 32000, 151936])
def test_draws(vocab: int, rounded: bool) -> None:
    """Rounded as bfloat16 logits are, so that many are equal."""
    logits = torch.randn(48, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    logits = (logits.bfloat16().float() if rounded else logits).to(DEVICE)
    each = [
        (0, 1.0, 0.0),
        (20, 0.95, 0.0),
        (0, 0.9, 0.0),
        (50, 1.0, 0.05),
        (0, 0.3, 0.1),
        (vocab, 0.999, 0.0),
        (1000, 0.99, 0.0),
        (2, 1.0, 0.0),
    ]
    settings = [sampling(0.6 + row / 50, *each[row % len(each)], seed=row) for row in range(48)]
    rows = [row for row in range(48) if row % 7]
    asked = torch.from_numpy(pack_sampling(rows, [settings[row] for row in rows], rows)).to(DEVICE)
    tokens = torch.full((48,), -7, device=DEVICE)
    draw(logits, asked, tokens)
    assert all(token == -7 for row, token in enumerate(tokens.tolist()) if row not in rows)
    found = tokens[rows].tolist()
    for token, tokens_of in zip(found, possible(logits, asked), strict=True):
        assert token in tokens_of
    assert len(set(found)) > len(rows) // 3
    again = torch.full((48,), -7, device=DEVICE)
    for one in asked.flip(0):  # Whatever else is in the batch.
        draw_kernel(logits, one[None].contiguous(), again)
    assert torch.equal(again, tokens)


def test_more_tokens_near_a_threshold_than_are_listed() -> None:
    """All equal, and all but equal with one far below: then the row itself is gone through."""
    logits = torch.randn(3, 151936, generator=torch.Generator().manual_seed(0)) * 1e-5
    logits[0] = 0.0
    logits[:, 7] = -20.0
    logits = logits.to(DEVICE)
    settings = [sampling(1.0, 1000), sampling(1.0, 0, 0.95), sampling(1.0, 30_000, 0.5)]
    asked = torch.from_numpy(pack_sampling([0, 1, 2], settings, [0, 1, 2])).to(DEVICE)
    tokens = torch.full((3,), -7, device=DEVICE)
    draw_kernel(logits, asked, tokens)
    for token, tokens_of in zip(tokens.tolist(), possible(logits, asked), strict=True):
        assert token in tokens_of


def test_a_step_that_samples_waits_for_nothing() -> None:
    """Whatever is asked for, the host comes back while the device still computes; what is drawn is right all
    the same."""
    wanted = [
        sampling(0.0), sampling(0.8, 20, 0.95, seed=1), sampling(1.0, seed=2, logprobs=5), sampling(0.0,
        logprobs=0),
        sampling(0.7, seed=3, repetition_penalty=1.2, frequency_penalty=0.3), sampling(1.0, seed=4,
        logit_bias=((5, 100.0),)),
        sampling(1.0, 0, 0.9, seed=5, min_tokens=4, end_tokens=frozenset((7, 9))),
    ]  # fmt: skip
    logits = torch.randn(len(wanted), 50_000, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    shares = [Share(Row(row), 10, (1,), 0, (), sample=True, prompt_length=10) for row in range(len(wanted))]
    admissions = [Admission(Row(row), one, tuple(range(10)), (3, 3, 4)) for row, one in enumerate(wanted)]
    found = []
    for busy in (False, False, True):
        sampler = Sampler(50_000, len(wanted), torch.device(DEVICE))
        torch.cuda.synchronize()
        if busy:
            torch.cuda._sleep(2_000_000_000)  # About a second.
        done = torch.cuda.Event()
        done.record()
        for admission in admissions:
            sampler.admit(admission)
        drawn = sampler.sample(logits.clone(), shares)
        assert not (busy and done.query()), "it has waited for the device"
        found.append(drawn.read())
    assert found[0] == found[1] == found[2]
    tokens, scores = found[0]
    assert tokens[5] == 5
    assert [score is not None for score in scores] == [one.logprobs is not None for one in wanted]


@pytest.mark.parametrize("vocab", [99, 32000])
def test_what_is_no_number_is_drawn_nowhere(vocab: int) -> None:
    """And ends nothing: what is made of such a row stays within what was given. The other rows are drawn as
    without it."""
    numbers = torch.randn(6, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    settings = [
        sampling(seed=1, top_p=0.9),
        sampling(seed=2, top_k=5),
        sampling(0, logprobs=2),
        sampling(seed=4, top_p=0.5),
    ] * 2
    shares = [Share(Row(row), 7, (0,), 0, (), sample=True, prompt_length=3) for row in range(6)]

    def drawn(logits: Tensor) -> tuple[list[int], frozenset[int], list[int]]:
        sampler = Sampler(vocab, 6, torch.device(DEVICE))
        for row in range(6):
            sampler.admit(Admission(Row(row), settings[row], (1, 2, 3), ()))
        found = sampler.sample(logits.to(DEVICE), shares)
        return found.read()[0], found.tokens.wrong, sampler.newest.tolist()

    right, none, _ = drawn(numbers.clone())
    assert not none
    for bad in (0, 1, 2):
        for value in (torch.nan, -torch.nan):
            logits = numbers.clone()
            logits[bad] = value
            logits[bad + 3, vocab // 2] = value
            tokens, wrong, newest = drawn(logits)
            assert wrong == {bad, bad + 3}
            assert [token for row, token in enumerate(tokens) if row not in wrong] == [
                token for row, token in enumerate(right) if row not in wrong
            ]
            assert all(0 <= token < vocab for token in newest)


def test_infinite_logits() -> None:
    """The infinite ones are all there is to draw from."""
    logits = torch.zeros(8, 1000, device=DEVICE)
    logits[:, [3, 500]] = torch.inf
    each = [(0, 1.0, 0.0), (0, 0.9, 0.0), (5, 1.0, 0.0), (5, 0.9, 0.1)] * 2
    asked = torch.from_numpy(
        pack_sampling(
            list(range(8)), [sampling(0.7, *one, seed=row) for row, one in enumerate(each)], list(range(8))
        )
    ).to(DEVICE)
    tokens = torch.full((8,), -7, device=DEVICE)
    draw(logits, asked, tokens)
    assert set(tokens.tolist()) <= {3, 500}
