"""Read and write packed numbers: codes of four and eight bits, and floating-point numbers of few bits.

Nothing here imports torch: everything is a method of a tensor that is given.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # Torch takes 1.2 s to import; `penstock plan` does without.
    from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The numbers of four bits with two of exponent and one of mantissa, by their code (OCP Microscaling 1.0)."""
RUN_BITS = 256
"""Bits of a run of codes; see `packed`."""
NO_EXPONENT = 255
"""The E8M0 exponent that is no number."""
EXPERT_KERNELS = "few_bits_experts"
"""The module of `penstock.ops.triton` that multiplies with many experts of few bits at once."""


def as_bytes(words: "Tensor") -> "Tensor":
    """Return the bytes of a tensor, little end first: uint8 `[..., last * bytes of a number]`."""
    return words.contiguous().view(words[:0].byte().dtype)


def in_words(codes: "Tensor", bits: int, width: int) -> "Tensor":
    """Return codes one a byte, uint8 `[rows, width]`, of bytes as checkpoints have them, `[rows, ...]`: the
    first code in the low bits. bits: 4 or 8."""
    if bits == 8:
        return codes[:, :width]
    single = codes.new_empty(*codes.shape, 2)
    single[..., 0], single[..., 1] = codes & 15, codes >> 4
    return single.flatten(1)[:, :width]


def packed_bytes(width: int, bits: int) -> int:
    """Return the bytes of a row of so many codes, as `packed` has them."""
    run = RUN_BITS // bits
    return -(-width // run) * RUN_BITS // 8


def packed(codes: "Tensor", bits: int) -> "Tensor":
    """Return codes as they rest, uint8 `[rows, packed_bytes]`, of codes one a byte `[rows, width]`.

    They rest in runs of RUN_BITS, the last filled up with zeros: 64 codes of four bits or 32 of eight. A run
    is eight words of 32 bits, little end first. The bits of word i from bit `j * bits` on are the code of
    column 8j + i. A product takes words apart by shifts, and reads activations eight at a time.
    """
    height, width = codes.shape
    each = RUN_BITS // bits
    whole = codes.new_zeros(height, -(-width // each) * each)
    whole[:, :width] = codes
    if bits == 8:
        return whole.view(height, -1, 4, 8).transpose(2, 3).flatten(1)
    runs = whole.view(height, -1, 4, 2, 8)
    return (runs[:, :, :, 0] | runs[:, :, :, 1] << 4).transpose(2, 3).flatten(1)


def unpacked(codes: "Tensor", bits: int, width: int) -> "Tensor":
    """Return codes one a byte, uint8 `[rows, width]`, of what `packed` returns."""
    bytes_of_words = codes.view(len(codes), -1, 8, 4).transpose(2, 3)
    if bits == 8:
        return bytes_of_words.flatten(1)[:, :width]
    single = codes.new_empty(*bytes_of_words.shape[:3], 2, 8)
    single[:, :, :, 0], single[:, :, :, 1] = bytes_of_words & 15, bytes_of_words >> 4
    return single.flatten(1)[:, :width]


def floats_of(codes: "Tensor", like: "Tensor") -> "Tensor":
    """Return the numbers float8_e4m3fn that codes, uint8, are, exactly, in float32, the dtype of `like`; two
    codes are no numbers."""
    wide = codes.int()
    return ((wide & 0x7F) << 20 | (wide & 0x80) << 24).view(like.dtype).mul_(2.0**120)


def powers_of_two(exponents: "Tensor") -> "Tensor":
    """Return float32 `2 ** (exponent - 127)` of E8M0 exponents, uint8."""
    ones = exponents.float().fill_(1)
    return ones.ldexp(exponents.int() - 127)


def spread(scales: "Tensor", size: int, width: int) -> "Tensor":
    """Return `[rows, width]`: each column of `scales` `[rows, groups]` for `size` columns."""
    if size * scales.shape[1] == width:
        return scales.unsqueeze(2).expand(-1, -1, size).flatten(1)
    return scales.repeat_interleave(size, 1)[:, :width]


def in_steps(group: int, width: int, least: int = 16) -> bool:
    """Tell whether steps of a kernel lie within groups of columns or hold whole ones: whether groups are
    whole rows, or a power of two from `least` on."""
    return group >= width or (group >= least and group & (group - 1) == 0)
