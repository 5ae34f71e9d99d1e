"""Makes Gumbel noise: a number for each seed, position and token, with the same bits on every device.

A token is drawn as the one whose logit by the temperature, plus its noise, is highest. That draws each token
as often as its probability says (Gumbel 1954; Maddison et al. 2014, arXiv 1411.0030). So whoever knows the
seed knows the noise before there are logits.

A word of 32 bits comes from a counter-based hash, Philox4x32-10 (Salmon et al. 2011). Its key is made of the
seed. Its counter is the token's block of four and the position, and the place in the block chooses one of its
four words.

A word k stands for the noise -log(-log((2**32 - k - 0.5) / 2**32)), between -3.1 and 22.9. A low word is a
high noise, and has all digits of float32. Logarithms are made of additions and products alone, each rounded,
since devices have other bits in their own: noise is within 2e-6.
"""

from hashlib import blake2b
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.ops.kernels import native_kernels

WORDS = 3
"""Numbers that noise is made of: the two words of a key, and a position."""
_KEYS, _FACTORS, _MASK = (0x9E3779B9, 0xBB67AE85), (0xD2511F53, 0xCD9E8D57), 0xFFFFFFFF
_ROUNDS = 10
LOG = (
    0.08734836429357529, -0.14307518303394318, 0.14917974174022675, -0.16570508480072021,
    0.19962072372436523, -0.25001755356788635, 0.33333951234817505, -0.49999991059303284,
)  # fmt: skip
"""Coefficients of (log(1 + f) - f) / f**2 between sqrt(1/2) and sqrt(2), within 3e-8, the highest first."""
LN_2 = 0.6931471824645996
HALF = 0x3F3504F3
"""The bits of sqrt(1/2) in float32."""

_Whole = TypeVar("_Whole", Tensor, NDArray[np.int64])


def key_words(seed: int) -> tuple[int, int]:
    """Return a seed's key, as two words of 32 bits. A seed is any whole number."""
    digest = blake2b(str(seed).encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def gumbel(keys: Tensor, tokens: Tensor | int) -> Tensor:
    """Return the noise of tokens, float32 `[draws, count]`.

    keys: whole numbers `[draws, 3]`: the words of a seed's key, and the position that is drawn.
    tokens: int64 `[draws, count]`, or the size of a vocabulary: then all its tokens in order.
    """
    assert keys.shape[1] == WORDS, keys.shape
    native = None if keys.is_cuda else native_kernels("gumbel")
    if native is not None and native.suits():
        noise: Tensor = native.gumbel(keys, tokens)
        return noise
    return noise_of(words(keys.long(), tokens))


def words(keys: Tensor, tokens: Tensor | int) -> Tensor:
    """Return the words that noise is made of, int64 `[draws, count]`. keys: int64."""
    if isinstance(tokens, int):
        blocks = torch.arange((tokens + 3) // 4, device=keys.device).expand(len(keys), -1)
        return torch.stack(_philox(keys, blocks), -1).flatten(1)[:, :tokens]
    four = torch.stack(_philox(keys, tokens >> 2), -1)
    return four.gather(-1, (tokens & 3)[..., None])[..., 0]


def _philox(keys: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    low, high, position = keys.unsqueeze(-1).unbind(1)
    if keys.is_cuda:
        return _rounds((blocks, low * 0, position & _MASK, position >> 32), low, high)
    # NumPy has the faster products of int64.
    on_host = (blocks.numpy(), low.numpy() * 0, position.numpy() & _MASK, position.numpy() >> 32)
    one, two, three, four = map(torch.from_numpy, _rounds(on_host, low.numpy(), high.numpy()))
    return one, two, three, four


def _rounds(
    counter: tuple[_Whole, _Whole, _Whole, _Whole], low: _Whole, high: _Whole
) -> tuple[_Whole, _Whole, _Whole, _Whole]:
    """Return four words of Philox4x32-10. All numbers are words of 32 bits in int64."""
    a, b, c, d = counter
    for _ in range(_ROUNDS):
        first, second = a * _FACTORS[0], c * _FACTORS[1]  # Of 64 bits, as if without a sign.
        a, b = ((second >> 32) ^ b ^ low) & _MASK, second & _MASK
        c, d = ((first >> 32) ^ d ^ high) & _MASK, first & _MASK
        low, high = (low + _KEYS[0]) & _MASK, (high + _KEYS[1]) & _MASK
    return a, b, c, d


def noise_of(word: Tensor) -> Tensor:
    """Return the noise that words stand for, float32."""
    below, above = ((one.float() + 0.5) * 2.0**-32 for one in (word, word ^ _MASK))
    waits = -_log(above, -below)
    return -_log(waits, waits - 1)


def _log(x: Tensor, near: Tensor) -> Tensor:
    """Return logarithms. near: x - 1 where x is beside 1, which may have more digits than x."""
    bits = x.view(torch.int32)
    power = (bits - HALF) >> 23
    f = torch.where(power == 0, near, (bits - (power << 23)).view(torch.float32) - 1)
    total = torch.full_like(f, LOG[0])
    for coefficient in LOG[1:]:
        total = total * f + coefficient
    return power.float() * LN_2 + (f * f * total + f)
