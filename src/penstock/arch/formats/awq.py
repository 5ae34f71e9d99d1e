"""AWQ in its layout "gemm": words hold eight columns of `[in, out]`, interleaved."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.arch.formats import found
from penstock.arch.formats.codes import as_bytes, in_words
from penstock.arch.formats.dense import DENSE
from penstock.arch.formats.format import NUMBERS, WORDS, TensorSlice, WeightFormat, beside
from penstock.arch.formats.integers import SCALES, Integers, Packing
from penstock.arch.formats.names import ByName, ModuleNames, linears
from penstock.arch.formats.words import Words

if TYPE_CHECKING:  # Torch takes 1.2 s to import; `penstock plan` does without.
    from torch import Tensor

_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The places of columns in a word, from the low bits on: the inverse of the order in which AutoAWQ packs,
0, 2, 4, 6, 1, 3, 5, 7."""


@dataclass(frozen=True)
class AWQPacking(Packing):
    """AWQPacking reads words along the output, of four-bit codes."""

    def codes(self, source: TensorSlice, bits: int) -> TensorSlice:
        """Return `qweight`, int32 `[in, out / 8]`."""
        height, width = source.shape
        return TensorSlice(beside(source, "qweight"), (width, height // 8), dtypes=WORDS)

    def scales(self, source: TensorSlice, groups: int) -> TensorSlice:
        """Return `scales` `[groups, out]`."""
        return TensorSlice(beside(source, "scales"), (groups, source.shape[0]), dtypes=NUMBERS)

    def zeros(self, source: TensorSlice, groups: int, bits: int) -> TensorSlice:
        """Return `qzeros`, int32 `[groups, out / 8]`."""
        return TensorSlice(beside(source, "qzeros"), (groups, source.shape[0] // 8), dtypes=WORDS)

    def read_codes(self, whole: "Tensor", shape: tuple[int, ...], bits: int) -> "Tensor":
        """Return the codes, uint8 `[out, in]`."""
        return _columns(whole, shape[0]).t()

    def read_scales(self, whole: "Tensor", shape: tuple[int, int]) -> "Tensor":
        """Return the scales `[out, groups]`."""
        return whole.t()

    def read_zeros(self, whole: "Tensor", shape: tuple[int, ...], bits: int) -> "Tensor":
        """Return the zero points as codes, uint8 `[out, groups]`."""
        return _columns(whole, shape[0]).t()


def _columns(words: "Tensor", width: int) -> "Tensor":
    """Return the codes of interleaved words, uint8 `[rows, width]`."""
    return in_words(as_bytes(words), 4, width).view(len(words), -1, 8)[:, :, list(_PLACES)].flatten(1)


def read(config: Mapping[str, object], where: str, dtype: str) -> WeightFormat:
    """Return the formats of a checkpoint of AWQ. Raises UnsupportedModelError, naming the key."""
    words = Words(config, f"{where}: quantization_config")
    version = words.text("version", words.text("format", "gemm")).lower()
    if version != "gemm" or words.text("backend", "autoawq") == "llm-awq":
        raise words.unsupported(
            f"version {version!r}", "gemm, as AutoAWQ writes it, where gemv and llm-awq are other layouts"
        )
    # Old files of AutoAWQ have the second names.
    for key in ("bits", "w_bit"):
        if words.number(key, 4) != 4:
            words.refuse(key, "4")
    group = words.number("group_size", words.number("q_group_size", 128))
    integers = Integers(
        "awq", 4, checkpoint_group=max(group, 0),
        scale=words.one_of(SCALES, "float16", NUMBERS), zeros=words.flag("zero_point", True),
        packing=AWQPacking(),
    )  # fmt: skip
    excepted = ModuleNames(parts=words.list("modules_to_not_convert"))
    return ByName("awq", rules=(*found.rules(words, integers), (excepted, DENSE), *linears(integers)))
