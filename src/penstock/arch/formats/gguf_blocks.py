"""The blocks of numbers in GGUF files: their types, what their bytes stand for, and how they rest in memory.

Source: ggml's `dequantize_row_*`, in float32 and in its order of operations: numbers are equal bit for bit to
those of the `gguf` library. Nothing here imports torch: everything is a method of a tensor that is given.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
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


def _middle(value: int) -> "Callable[[Tensor, Tensor], Tensor]":
    """Return what makes numbers of codes around a middle, where a block has one scale."""
    return lambda codes, heads: (codes.float() - value).mul_(half(heads, 0))


def _line(codes: "Tensor", heads: "Tensor") -> "Tensor":
    return codes.float().mul_(half(heads, 0)).add_(half(heads, 2))


def _fifth(bits: "Tensor") -> "Tensor":
    """Return 16 or 0 for each of 32 bits in four bytes."""
    return fields(bits, 1, 1) << 4


def _signed(codes: "Tensor") -> "Tensor":
    """Return signed bytes as float32."""
    return (codes ^ 128).float().sub_(128)


def _q2_k(codes: "Tensor", heads: "Tensor") -> "Tensor":
    scales = heads[:, :16]
    return _grouped(codes, half(heads, 16) * (scales & 15).float(), half(heads, 18) * (scales >> 4).float())


def _q3_k(codes: "Tensor", heads: "Tensor") -> "Tensor":
    low, high = fields(heads[:, :8], 4, 8), fields(heads[:, 8:12], 2, 4)
    scales = (low | high << 4).float().sub_(32).mul_(half(heads, 12))
    return _grouped(codes.float().sub_(4), scales)


def _q4_k(codes: "Tensor", heads: "Tensor") -> "Tensor":
    """Make numbers of codes; eight scales and eight minima have six bits each in twelve bytes."""
    first, second, rest = heads[:, 4:8], heads[:, 8:12], heads[:, 12:]
    both = heads.new_empty(2, len(heads), 8)
    both[0, :, :4], both[1, :, :4] = first & 63, second & 63
    both[0, :, 4:], both[1, :, 4:] = rest & 15 | first >> 2 & 48, rest >> 4 | second >> 2 & 48
    return _grouped(codes, both[0].float() * half(heads, 0), both[1].float() * half(heads, 2))


def _q6_k(codes: "Tensor", heads: "Tensor") -> "Tensor":
    return _grouped(codes.float().sub_(32), _signed(heads[:, :16]).mul_(half(heads, 16)))


def _levels(codes: "Tensor") -> "Tensor":
    """Return the numbers of `LEVELS` of codes, in float32."""
    table = codes.float().new_empty(16) if len(codes) else codes.float().new_zeros(16)
    for code, level in enumerate(LEVELS):  # No copy from the host, which recorded steps cannot have.
        table[code].fill_(level)
    return table[codes.int()]


def _iq4_nl(codes: "Tensor", heads: "Tensor") -> "Tensor":
    return _levels(codes).mul_(half(heads, 0))


def _iq4_xs(codes: "Tensor", heads: "Tensor") -> "Tensor":
    low, high = fields(heads[:, 4:8], 4, 1), fields(heads[:, 2:4], 2, 1)
    scales = (low | high << 4).float().sub_(32).mul_(half(heads, 0))
    return _grouped(_levels(codes), scales)


@dataclass(frozen=True, slots=True)
class Resting:
    """Resting says how the blocks of a type rest in memory: codes where products read them, scales apart.

    A row is its units one behind the other, three times: their codes, then their high bits, then their
    heads, as many bytes as `row_bytes` says. Nothing is rounded.

    A run of codes is `words` words of 32 bits, little end first. The bits of word i from bit `j * bits` on
    are the lowest ones of the code of column `j * words + i` of the run. So place j of all words is a group
    of columns that share a scale, or half of one. Where codes have `high` bits more, these are in numbers of
    16 bits in the same order: number i has those of as many columns `j * words + i` as it has room for, of
    one run or of two.

    unit: columns of whole runs and whole blocks.
    words: of a run.
    bits: of a code in a word.
    high: bits of a code beside the words.
    values: columns of a block.
    head: bytes that a block has beside its codes: float16 numbers, scales and minima.
    group: columns that share a scale.
    codes: takes the codes, uint8 `[blocks, values]`, out of blocks of a file, uint8 `[blocks, size]`.
    heads: takes the heads, uint8 `[blocks, head]`, out of them, as the file has their bytes.
    numbers: makes float32 `[blocks, values]` of both.
    """

    unit: int
    words: int
    bits: int
    high: int
    values: int
    head: int
    group: int
    codes: "Callable[[Tensor], Tensor]"
    heads: "Callable[[Tensor], Tensor]"
    numbers: "Callable[[Tensor, Tensor], Tensor]"

    @property
    def places(self) -> int:
        """Return the codes of a word."""
        return 32 // self.bits

    @property
    def paired(self) -> bool:
        """Tell whether numbers of high bits have those of two runs. These are units."""
        return self.high * self.places == 8

    def parts(self, units: int) -> tuple[int, int, int]:
        """Return the bytes of the codes, of the high bits and of the heads of so many units."""
        return (
            units * self.unit * self.bits // 8,
            -(-units * self.unit * self.high // (16 * self.words)) * 2 * self.words,
            units * self.unit // self.values * self.head,
        )

    def row_bytes(self, units: int) -> int:
        """Return the bytes of a row of so many units: a multiple of 16."""
        return -(-sum(self.parts(units)) // 16) * 16

    def put(self, blocks: "Tensor", units: int) -> "Tensor":
        """Return rows as they rest, uint8 `[rows, row_bytes]`, of rows of blocks, uint8
        `[rows, blocks, size]`; what the last unit lacks are zeros."""
        rows, count, size = blocks.shape
        whole = blocks.new_zeros(rows, self.row_bytes(units))
        single, heads = (take(blocks.reshape(-1, size)) for take in (self.codes, self.heads))
        end, high_end, _ = accumulate(self.parts(units))
        whole[:, :end] = self._joined(single.reshape(rows, -1) & ((1 << self.bits) - 1), end, self.bits)
        if self.high:
            whole[:, end:high_end] = self._joined(
                single.reshape(rows, -1) >> self.bits, high_end - end, self.high, 2
            )
        whole[:, high_end : high_end + count * self.head] = heads.reshape(rows, -1)
        return whole

    def take(self, whole: "Tensor", units: int) -> "Tensor":
        """Return the numbers of rows as they rest, float32 `[rows, units * unit]`."""
        end, high_end, heads_end = accumulate(self.parts(units))
        codes = self._apart(whole[:, :end], self.bits)
        if self.high:
            high = self._apart(whole[:, end:high_end], self.high, 2)
            codes |= high[:, : codes.shape[1]] << self.bits
        heads = whole[:, high_end:heads_end].reshape(-1, self.head)
        return self.numbers(codes.reshape(-1, self.values), heads).view(len(whole), -1)

    def _joined(self, fields: "Tensor", end: int, bits: int, size: int = 4) -> "Tensor":
        """Return numbers of `bits` bits, uint8 `[rows, columns]`, as numbers of `size` bytes, uint8
        `[rows, end]`, filled up with zeros."""
        rows, count = fields.shape
        whole = fields.new_zeros(rows, end * 8 // bits)
        whole[:, :count] = fields
        apart = whole.view(rows, -1, size, 8 // bits, self.words)
        made = apart[:, :, :, 0].clone()
        for place in range(1, 8 // bits):
            made |= apart[:, :, :, place] << place * bits
        return made.transpose(2, 3).reshape(rows, end)

    def _apart(self, joined: "Tensor", bits: int, size: int = 4) -> "Tensor":
        """Return numbers of `bits` bits one a byte, uint8 `[rows, columns]`, of what `_joined` returns."""
        runs = joined.reshape(len(joined), -1, self.words, size).transpose(2, 3)
        made = runs.unsqueeze(3).expand(-1, -1, -1, 8 // bits, -1).clone()
        for place in range(8 // bits):
            made[:, :, :, place] >>= place * bits
        return (made & ((1 << bits) - 1)).flatten(1)


def _behind(blocks: "Tensor", *parts: slice, empty: int = 0) -> "Tensor":
    """Return some bytes of each block, one behind the other, and zeros behind them."""
    some = [blocks[:, part] for part in parts]
    made = blocks.new_zeros(len(blocks), sum(part.shape[1] for part in some) + empty)
    at = 0
    for part in some:
        made[:, at : at + part.shape[1]] = part
        at += part.shape[1]
    return made


def _first(count: int) -> "Callable[[Tensor], Tensor]":
    return lambda blocks: blocks[:, :count]


def _low(start: int, run: int = 16) -> "Callable[[Tensor], Tensor]":
    return lambda blocks: fields(blocks[:, start:], 4, run)


RESTING: "Mapping[str, Resting]" = {
    "Q4_1": Resting(128, 16, 4, 0, 32, 4, 32, _low(4), _first(4), _line),
    "Q5_0": Resting(
        128, 16, 4, 1, 32, 2, 32,
        lambda b: fields(b[:, 6:], 4, 16) | _fifth(b[:, 2:6]), _first(2), _middle(16),
    ),
    "Q5_1": Resting(
        128, 16, 4, 1, 32, 4, 32,
        lambda b: fields(b[:, 8:], 4, 16) | _fifth(b[:, 4:8]), _first(4), _line,
    ),
    "Q2_K": Resting(
        256, 16, 2, 0, 256, 20, 16,
        lambda b: fields(b[:, 16:80], 2, 32), lambda b: _behind(b, slice(16), slice(80, 84)), _q2_k,
    ),
    "Q3_K": Resting(  # A high bit that is not set takes four away.
        256, 16, 2, 1, 256, 16, 16,
        lambda b: fields(b[:, 32:96], 2, 32) | fields(b[:, :32], 1, 32) << 2,
        lambda b: _behind(b, slice(96, 110), empty=2), _q3_k,
    ),
    "Q4_K": Resting(256, 32, 4, 0, 256, 16, 32, _low(16, 32), _first(16), _q4_k),
    "Q5_K": Resting(
        256, 32, 4, 1, 256, 16, 32,
        lambda b: fields(b[:, 48:], 4, 32) | fields(b[:, 16:48], 1, 32) << 4, _first(16), _q4_k,
    ),
    "Q6_K": Resting(
        256, 16, 4, 2, 256, 20, 16,
        lambda b: fields(b[:, :128], 4, 64) | fields(b[:, 128:192], 2, 32) << 4,
        lambda b: _behind(b, slice(192, 210), empty=2), _q6_k,
    ),
    "IQ4_NL": Resting(128, 16, 4, 0, 32, 2, 32, _low(2), _first(2), _iq4_nl),
    "IQ4_XS": Resting(256, 32, 4, 0, 256, 8, 32, _low(8), _first(8), _iq4_xs),
}  # fmt: skip
"""Says of each type that is no format of ours how it rests, by its name."""
