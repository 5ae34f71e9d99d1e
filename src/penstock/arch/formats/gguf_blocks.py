"""The blocks of numbers in GGUF files: their types, and what their bytes stand for.

Source: ggml's `dequantize_row_*`, in float32 and in its order of operations: numbers are equal bit for bit to
those of the `gguf` library. Nothing here imports torch: everything is a method of a tensor that is given.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # Torch takes 1.2 s to import; `penstock plan` does without.
    from torch import Tensor

LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The numbers of four bits of IQ4_NL and IQ4_XS, by their code."""


@dataclass(frozen=True, slots=True)
class BlockType:
    """A block type is how a run of numbers of a row rests in a GGUF file.

    number: of the type in tensor infos.
    values: numbers in a block.
    size: bytes of a block.
    halves: places of its float16 numbers, in bytes. They are scales, for blocks of more than one value.
    """

    name: str
    number: int
    values: int
    size: int
    halves: tuple[int, ...] = ()

    def row_bytes(self, width: int) -> int:
        """Return the bytes of a row of so many numbers, in whole blocks."""
        return -(-width // self.values) * self.size


PLAIN = {
    one.name: one
    for one in (BlockType("F32", 0, 1, 4), BlockType("F16", 1, 1, 2), BlockType("BF16", 30, 1, 2))
}
"""Types of unquantised tensors."""
QUANTISED = {
    one.name: one
    for one in (
        BlockType("Q4_0", 2, 32, 18, (0,)),
        BlockType("Q4_1", 3, 32, 20, (0, 2)),
        BlockType("Q5_0", 6, 32, 22, (0,)),
        BlockType("Q5_1", 7, 32, 24, (0, 2)),
        BlockType("Q8_0", 8, 32, 34, (0,)),
        BlockType("Q2_K", 10, 256, 84, (80, 82)),
        BlockType("Q3_K", 11, 256, 110, (108,)),
        BlockType("Q4_K", 12, 256, 144, (0, 2)),
        BlockType("Q5_K", 13, 256, 176, (0, 2)),
        BlockType("Q6_K", 14, 256, 210, (208,)),
        BlockType("IQ4_NL", 20, 32, 18, (0,)),
        BlockType("IQ4_XS", 23, 256, 136, (0,)),
        BlockType("MXFP4", 39, 32, 17),
    )
}
"""Types of quantised matrices that are read."""
TYPES = {one.number: one for one in (*PLAIN.values(), *QUANTISED.values())}
UNREAD = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4",
}  # fmt: skip
"""Names of types that are known and not read, by their numbers."""


def half(blocks: "Tensor", at: int) -> "Tensor":
    """Return the float16 number at byte `at` of each block, in float32 `[blocks, 1]`."""
    return blocks[:, at : at + 2].contiguous().view(blocks[:0].half().dtype).float()


def fields(codes: "Tensor", bits: int, run: int) -> "Tensor":
    """Return codes of `bits` bits, uint8 `[blocks, bytes * 8 / bits]`: of each `run` bytes the lowest bits,
    then the next."""
    runs, count = codes.reshape(len(codes), -1, 1, run), 8 // bits
    each = runs.expand(-1, -1, count, -1).clone()
    for place in range(count):
        each[:, :, place] >>= place * bits
    return (each & ((1 << bits) - 1)).flatten(1)


def _grouped(values: "Tensor", scales: "Tensor", minima: "Tensor | None" = None) -> "Tensor":
    """Return `values * scales - minima` `[blocks, values]`; scales and minima are `[blocks, groups]`."""
    groups = values.float().view(*scales.shape, -1).mul_(scales.unsqueeze(2))
    return (groups if minima is None else groups.sub_(minima.unsqueeze(2))).flatten(1)


def _q4_0(blocks: "Tensor") -> "Tensor":
    return (fields(blocks[:, 2:], 4, 16).float() - 8).mul_(half(blocks, 0))


def _q4_1(blocks: "Tensor") -> "Tensor":
    return fields(blocks[:, 4:], 4, 16).float().mul_(half(blocks, 0)).add_(half(blocks, 2))


def _fifth(bits: "Tensor") -> "Tensor":
    """Return 16 or 0 for each of 32 bits in four bytes."""
    return fields(bits, 1, 1) << 4


def _q5_0(blocks: "Tensor") -> "Tensor":
    codes = fields(blocks[:, 6:], 4, 16) | _fifth(blocks[:, 2:6])
    return (codes.float() - 16).mul_(half(blocks, 0))


def _q5_1(blocks: "Tensor") -> "Tensor":
    codes = fields(blocks[:, 8:], 4, 16) | _fifth(blocks[:, 4:8])
    return codes.float().mul_(half(blocks, 0)).add_(half(blocks, 2))


def _q8_0(blocks: "Tensor") -> "Tensor":
    return _signed(blocks[:, 2:]).mul_(half(blocks, 0))


def _signed(codes: "Tensor") -> "Tensor":
    """Return signed bytes as float32."""
    return (codes ^ 128).float().sub_(128)


def _q2_k(blocks: "Tensor") -> "Tensor":
    scales, codes = blocks[:, :16], fields(blocks[:, 16:80], 2, 32)
    return _grouped(codes, half(blocks, 80) * (scales & 15).float(), half(blocks, 82) * (scales >> 4).float())


def _q3_k(blocks: "Tensor") -> "Tensor":
    low, high = fields(blocks[:, 96:104], 4, 8), fields(blocks[:, 104:108], 2, 4)
    scales = (low | high << 4).float().sub_(32).mul_(half(blocks, 108))
    # A bit that is not set takes four away.
    codes = fields(blocks[:, 32:96], 2, 32) | fields(blocks[:, :32], 1, 32) << 2
    return _grouped(codes.float().sub_(4), scales)


def _six_bits(scales: "Tensor") -> "tuple[Tensor, Tensor]":
    """Return the eight scales and eight minima of a block of Q4_K or Q5_K, float32, of their twelve bytes."""
    first, second, rest = scales[:, :4], scales[:, 4:8], scales[:, 8:]
    both = scales.new_empty(2, len(scales), 8)
    both[0, :, :4], both[1, :, :4] = first & 63, second & 63
    both[0, :, 4:], both[1, :, 4:] = rest & 15 | first >> 2 & 48, rest >> 4 | second >> 2 & 48
    return both[0].float(), both[1].float()


def _q4_k(blocks: "Tensor") -> "Tensor":
    scales, minima = _six_bits(blocks[:, 4:16])
    return _grouped(fields(blocks[:, 16:], 4, 32), scales * half(blocks, 0), minima * half(blocks, 2))


def _q5_k(blocks: "Tensor") -> "Tensor":
    scales, minima = _six_bits(blocks[:, 4:16])
    codes = fields(blocks[:, 48:], 4, 32) | fields(blocks[:, 16:48], 1, 32) << 4
    return _grouped(codes, scales * half(blocks, 0), minima * half(blocks, 2))


def _q6_k(blocks: "Tensor") -> "Tensor":
    codes = fields(blocks[:, :128], 4, 64) | fields(blocks[:, 128:192], 2, 32) << 4
    return _grouped(codes.float().sub_(32), _signed(blocks[:, 192:208]).mul_(half(blocks, 208)))


def _levels(codes: "Tensor") -> "Tensor":
    """Return the numbers of `LEVELS` of codes, in float32."""
    table = codes.float().new_empty(16) if len(codes) else codes.float().new_zeros(16)
    for code, level in enumerate(LEVELS):  # No copy from the host, which recorded steps cannot have.
        table[code].fill_(level)
    return table[codes.int()]


def _iq4_nl(blocks: "Tensor") -> "Tensor":
    return _levels(fields(blocks[:, 2:], 4, 16)).mul_(half(blocks, 0))


def _iq4_xs(blocks: "Tensor") -> "Tensor":
    low, high = fields(blocks[:, 4:8], 4, 1), fields(blocks[:, 2:4], 2, 1)
    scales = (low | high << 4).float().sub_(32).mul_(half(blocks, 0))
    return _grouped(_levels(fields(blocks[:, 8:], 4, 16)), scales)


DECODERS: "Mapping[str, Callable[[Tensor], Tensor]]" = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q2_K": _q2_k, "Q3_K": _q3_k,
    "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs,
}  # fmt: skip
"""Make numbers in float32 `[blocks, values]` of blocks, uint8 `[blocks, size]`."""
