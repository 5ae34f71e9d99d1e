"""The noise that draws tokens: its words, its bits everywhere, its law, and the law of what it draws."""

import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import native_ways
from penstock.ops import gumbel as gumbel_ops
from penstock.ops import sampling as sampling_ops
from penstock.ops.gumbel import gumbel, key_words, noise_of, words
from penstock.ops.kernels import plain_torch
from penstock.ops.sampling import draw, draw_reference, pack_sampling
from worlds import sampling

HIGH = 2**32
SEEDS = (0, 1, -1, 11, 2**63, -(2**127), 2**128 - 1)
POSITIONS = (0, 1, HIGH - 1, HIGH, 3 * HIGH + 5, 2**53 - 1)
KEYS = torch.tensor([[*key_words(seed), position] for seed in SEEDS for position in POSITIONS])
VOCAB = 613


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 as its paper has it, of whole numbers without a size."""
    for _ in range(10):
        (high0, low0), (high1, low1) = (
            divmod(factor * word, HIGH)
            for factor, word in ((0xD2511F53, counter[0]), (0xCD9E8D57, counter[2]))
        )
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
        key = [(word + more) % HIGH for word, more in zip(key, (0x9E3779B9, 0xBB67AE85), strict=True)]
    return counter


def word(key: list[int], token: int) -> int:
    low, high, position = key
    return philox([token // 4, 0, position % HIGH, position // HIGH], [low, high])[token % 4]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([HIGH - 1] * 4, [HIGH - 1] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_the_hash_has_its_published_answers(counter: list[int], key: list[int], expected: str) -> None:
    """Those of Random123, of its authors."""
    assert " ".join(f"{one:08x}" for one in philox(counter, key)) == expected
    for made in (torch.tensor, np.array):
        a, b, c, d = (made([one]) for one in counter)
        found = gumbel_ops._rounds((a, b, c, d), *(made([one]) for one in key))  # type: ignore[type-var]
        assert " ".join(f"{int(one[0]):08x}" for one in found) == expected


def test_words_are_those_of_the_key_the_position_and_the_token() -> None:
    ids = [0, 1, 2, 3, 4, 7, 611, 612]
    expected = [[word(key, token) for token in ids] for key in KEYS.tolist()]
    assert words(KEYS, VOCAB)[:, ids].tolist() == expected
    assert words(KEYS, torch.tensor(ids).expand(len(KEYS), -1)).tolist() == expected
    assert len({tuple(row) for row in expected}) == len(KEYS), "each seed and position has its own"
    assert word([5, 6, 7], 2**20 - 1) == int(words(torch.tensor([[5, 6, 7]]), 2**20)[0, -1])


def bits(noise: Tensor) -> Tensor:
    return noise.view(torch.int32)


@pytest.mark.parametrize("way", ["", "portable"])
def test_noise_has_the_same_bits_however_it_is_made(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By plain torch, by kernels of each kind of processor, of a whole vocabulary, and of any tokens."""
    if way:
        native_ways.use(way, tmp_path, monkeypatch)
    ids = torch.randint(VOCAB, (len(KEYS), 301), generator=torch.Generator().manual_seed(0))
    found = gumbel(KEYS, VOCAB), gumbel(KEYS, ids), gumbel(KEYS.double(), ids[:, :1])
    with plain_torch():
        expected = gumbel(KEYS, VOCAB), gumbel(KEYS, ids), gumbel(KEYS, ids[:, :1])
    assert all(torch.equal(bits(one), bits(other)) for one, other in zip(found, expected, strict=True))
    assert torch.equal(bits(expected[0].gather(1, ids)), bits(expected[1]))


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are interpreted without a GPU")
def test_noise_of_kernels_has_the_same_bits() -> None:
    pytest.importorskip("triton")
    import gumbel_kernel

    noise, others = torch.empty(len(KEYS), 256), torch.empty(len(KEYS), 256)
    found, picked = (torch.empty(len(KEYS), 256, dtype=torch.int64) for _ in range(2))
    asked = torch.cat([torch.zeros(len(KEYS), 5, dtype=torch.float64), KEYS], 1)
    gumbel_kernel.noise[(2, len(KEYS))](
        asked, found, picked, noise, others, 256, SIZE=128, enable_fp_fusion=False
    )
    assert torch.equal(found, words(KEYS, 256))
    assert torch.equal(picked, found)
    assert torch.equal(bits(noise), bits(gumbel(KEYS, 256)))
    assert torch.equal(bits(others), bits(noise))


def test_noise_is_that_of_its_word() -> None:
    """Within the last places, at either end and beside 0 and 1; a greater word is no more noise."""
    rng = np.random.default_rng(0)
    ends = np.array([0, 1, 2, 2**23, 2**23 + 1, 2**31, HIGH - 2, HIGH - 1])
    beside = [int(HIGH * (1 - math.exp(-math.exp(-at)))) + step for at in (0, 1) for step in range(-40, 40)]
    every = np.concatenate(
        [ends, beside, rng.integers(0, HIGH, 50_000), (2 ** rng.uniform(0, 32, 50_000)).astype(np.int64)]
    )
    every.sort()
    found = noise_of(torch.from_numpy(every)).double().numpy()
    expected = -np.log(-np.log1p(-(every + 0.5) / HIGH))
    assert np.abs(found - expected).max() < 2e-6
    assert (np.diff(found) <= 0).all()
    assert found[0] == pytest.approx(33 * math.log(2), abs=1e-5)
    assert found[-1] == pytest.approx(-math.log(33 * math.log(2)), abs=1e-5)


def test_numbers_of_neighbouring_tokens_positions_and_seeds_are_independent() -> None:
    """And each is as any other: a word's place in its range."""
    seeds, positions, tokens = 12, 40, 512
    keys = torch.tensor(
        [[*key_words(seed), position] for seed in range(seeds) for position in range(positions)]
    )
    places = (words(keys, tokens).double() + 0.5).view(seeds, positions, tokens) / HIGH
    counts = torch.histc(places, bins=64, min=0, max=1)
    assert chi_square(counts, torch.full((64,), places.numel() / 64)) < 1
    turned = places - 0.5
    for axis in range(3):
        for lag in (1, 2, 4):
            length = turned.shape[axis] - lag
            pairs = turned.narrow(axis, 0, length) * turned.narrow(axis, lag, length)
            assert abs(float(pairs.mean()) * 12) * math.sqrt(pairs.numel()) < 5
    # So are bits, high and low ones.
    low = (words(keys, tokens) & 1).double().mean()
    assert abs(float(low) - 0.5) * 2 * math.sqrt(places.numel()) < 5


def chi_square(counts: Tensor, expected: Tensor) -> float:
    """How far it is from its mean, in fives of deviations: below 1, if counts are as expected."""
    freedom = len(counts) - 1
    return (float(((counts - expected) ** 2 / expected).sum()) - freedom) / (5 * math.sqrt(2 * freedom))


LAWS: dict[str, dict[str, float]] = {
    "all": {},
    "hot": {"temperature": 3.0},
    "peaked": {"temperature": 0.15},
    "flat": {"temperature": 1000.0},
    "top-k": {"top_k": 7},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.1},
    "top-k, top-p and min-p": {"top_k": 12, "top_p": 0.9, "min_p": 0.02},
}


@pytest.mark.parametrize("law", LAWS)
def test_tokens_are_drawn_as_often_as_they_are_likely(law: str) -> None:
    """Of those that are left, over positions and seeds."""
    draws, vocab, settings = 12_000, 40, LAWS[law]
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(1)) * 1.5
    wishes = [replace(sampling(seed), **{"temperature": 1.0} | settings) for seed in (3, -4, 2**70)]  # type: ignore[arg-type]
    asked = torch.from_numpy(
        pack_sampling([0] * draws, [wishes[at % 3] for at in range(draws)], [at // 3 for at in range(draws)])
    )
    found = draw_reference(logits.expand(draws, -1), asked, sorts=law.startswith("top"))
    counts = torch.bincount(found, minlength=vocab)
    likely = (logits.double() / settings.get("temperature", 1.0)).softmax(-1)
    best, order = likely.sort(descending=True)
    if "top_k" in settings:
        best[int(settings["top_k"]) :] = 0
    if "top_p" in settings:
        best[(best.cumsum(0) - best) >= settings["top_p"] * best.sum()] = 0
    best[best < settings.get("min_p", 0) * best[0]] = 0
    expected = torch.zeros_like(best).scatter(0, order, best / best.sum()) * draws
    assert not counts[expected == 0].any()
    often = expected >= 5
    assert often.sum() > 1
    rest = expected[~often].sum()
    observed, wanted = counts[often].double(), expected[often]
    if rest > 1:
        observed = torch.cat([observed, counts[~often].sum()[None].double()])
        wanted = torch.cat([wanted, rest[None]])
    assert chi_square(observed, wanted) < 1


def test_tokens_of_a_large_vocabulary_are_drawn_as_often_as_they_are_likely() -> None:
    """In twenty sets that are as likely, of neighbours and of every twentieth."""
    vocab, draws, sets = 150_000, 600, 20
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(2)) * 2
    table = pack_sampling(range(1), [replace(sampling(5), temperature=0.9)], [0])
    found, token = [], torch.zeros(1, dtype=torch.int64)
    for position in range(draws):
        table[0, -1] = position
        draw(logits[None], torch.from_numpy(table), token)
        found.append(int(token))
    before = (logits.double() / 0.9).softmax(-1).cumsum(0)
    places = torch.tensor(found)
    for counts, expected in (
        (torch.histc(before[places], sets, 0, 1), torch.full((sets,), draws / sets)),
        (
            torch.bincount(places % sets, minlength=sets),
            draws * (logits.double() / 0.9).softmax(-1).view(-1, sets).sum(0),
        ),
    ):
        assert chi_square(counts.double(), expected) < 1


@pytest.mark.parametrize(("position", "token"), [(6427080, 10), (9851281, 311)])
def test_a_token_of_a_probability_of_one_in_a_thousand_million_can_be_drawn(
    position: int, token: int
) -> None:
    """Where its word is the least there is: then its noise is 22.9. Also behind tokens that are likelier."""
    asked = torch.from_numpy(pack_sampling([0], [replace(sampling(11), temperature=1.0)], [position]))
    assert int(words(asked[:, 5:].long(), token + 1)[0, -1]) == 0
    logits = torch.zeros(1, 400)
    logits[:, 256:] = -torch.inf
    for nats, wins in ((20.7, True), (26.0, False)):
        logits[0, token] = math.log(256) - nats
        drawn = torch.zeros(1, dtype=torch.int64)
        draw(logits, asked, drawn)
        assert (int(drawn) == token) == wins
        assert int(draw_reference(logits, asked)) == int(drawn)


def test_equal_sums_take_the_lower_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """In each way to draw; and infinite logits are equally likely, so that noise decides among them."""
    settings = [replace(sampling(1), temperature=0.5, top_k=top_k) for top_k in (0, 30)]
    logits = torch.zeros(2, 400)
    logits[:, [70, 300, 20]] = 9.0
    asked, tokens = (
        torch.from_numpy(pack_sampling([0, 1], settings, [4, 4])),
        torch.zeros(2, dtype=torch.int64),
    )
    with plain_torch(), monkeypatch.context() as patched:
        patched.setattr(
            sampling_ops,
            "gumbel",
            lambda keys, ids: torch.zeros(2, 400)[
                : len(keys), : ids if isinstance(ids, int) else ids.shape[1]
            ],
        )
        draw(logits, asked, tokens)
        assert tokens.tolist() == draw_reference(logits, asked).tolist() == [20, 20]
    logits[:, [70, 300, 20]] = math.inf
    found = set()
    for position in range(40):
        asked[:, -1] = position
        draw(logits, asked, tokens)
        assert tokens[0] == tokens[1] == draw_reference(logits, asked)[0]
        found.add(int(tokens[0]))
    assert found == {20, 70, 300}
