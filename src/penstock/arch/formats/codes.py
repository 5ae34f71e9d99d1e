"""Read and write packed numbers: codes of four and eight bits, and floating-point numbers of few bits.

Nothing here imports torch: everything is a method of a tensor that is given.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # Torch takes 1.2 s to import; `penstock plan` does without.
    from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The numbers of four bits with two of exponent and one of mantissa, by their code (OCP Microscaling 1.0)."""
NO_EXPONENT = 255
"""The E8M0 exponent that is no number."""


def as_bytes(words: "Tensor") -> "Tensor":
    """Return the bytes of a tensor, little end first: uint8 `[..., last * bytes of a number]`."""
    return words.contiguous().view(words[:0].byte().dtype)


def unpacked(codes: "Tensor", bits: int, width: int) -> "Tensor":
    """Return codes one a byte, uint8 `[rows, width]`, of bytes `[rows, ...]` with the first in the low bits.

    bits: 4 or 8.
    """
    if bits == 8:
        return codes[:, :width]
    single = codes.new_empty(*codes.shape, 2)
    single[..., 0], single[..., 1] = codes & 15, codes >> 4
    return single.flatten(1)[:, :width]


def packed(codes: "Tensor", bits: int) -> "Tensor":
    """Return bytes with the first code in the low bits, of codes one a byte `[rows, width]`; the last byte of
    a row of odd width has zeros above."""
    if bits == 8:
        return codes
    even, odd = codes[:, 0::2], codes[:, 1::2]
    together = even.clone()
    together[:, : odd.shape[1]] |= odd << 4
    return together


def powers_of_two(exponents: "Tensor") -> "Tensor":
    """Return float32 `2 ** (exponent - 127)` of E8M0 exponents, uint8."""
    ones = exponents.float().fill_(1)
    return ones.ldexp(exponents.int() - 127)


def spread(scales: "Tensor", size: int, width: int) -> "Tensor":
    """Return `[rows, width]`: each column of `scales` `[rows, groups]` for `size` columns."""
    if size * scales.shape[1] == width:
        return scales.unsqueeze(2).expand(-1, -1, size).flatten(1)
    return scales.repeat_interleave(size, 1)[:, :width]
