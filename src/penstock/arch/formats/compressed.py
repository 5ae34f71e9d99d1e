"""compressed-tensors, what llm-compressor writes: groups of modules, each with a scheme.

Source of the layouts and of what matches first: the compressed-tensors library.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.arch.formats.codes import as_bytes, in_words
from penstock.arch.formats.dense import DENSE
from penstock.arch.formats.floats import E8M0, Float4, Float8
from penstock.arch.formats.format import NUMBERS, WORDS, TensorSlice, WeightFormat, beside
from penstock.arch.formats.integers import SCALES, Integers, Packing
from penstock.arch.formats.names import ByName, ModuleNames
from penstock.arch.formats.words import Words

if TYPE_CHECKING:  # Torch takes 1.2 s to import; `penstock plan` does without.
    from torch import Tensor

METHOD = "compressed-tensors"
_UNREAD = tuple(
    f".{name}"
    for name in (
        "input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point",
        "q_scale", "k_scale", "v_scale", "k_zero_point", "v_zero_point", "q_zero_point",
    )
)  # fmt: skip
"""Scales of activations and of KV: products are of weights alone, KV rests as penstock is asked to."""


@dataclass(frozen=True)
class PackedRows(Packing):
    """`pack-quantized`: words along the input; zero points in words along the output."""

    ordered: bool = False

    def codes(self, source: TensorSlice, bits: int) -> TensorSlice:
        """Return `weight_packed`, int32 `[out, in * bits / 32]`."""
        height, width = source.shape
        return TensorSlice(beside(source, "weight_packed"), (height, -(-width * bits // 32)), dtypes=WORDS)

    def scales(self, source: TensorSlice, groups: int) -> TensorSlice:
        """Return `weight_scale` `[out, groups]`."""
        return TensorSlice(beside(source, "weight_scale"), (), loose=True, dtypes=NUMBERS)

    def zeros(self, source: TensorSlice, groups: int, bits: int) -> TensorSlice:
        """Return `weight_zero_point`, int32 `[out * bits / 32, groups]`."""
        return TensorSlice(
            beside(source, "weight_zero_point"),
            (-(-source.shape[0] * bits // 32), groups),
            optional=True,
            dtypes=WORDS,
        )

    def order(self, source: TensorSlice) -> TensorSlice:
        """Return `weight_g_idx`, int32 `[in]`."""
        return TensorSlice(beside(source, "weight_g_idx"), (source.shape[1],), dtypes=WORDS)

    def extent(self, source: TensorSlice) -> TensorSlice:
        """Return `weight_shape`, int64 `[2]`."""
        return TensorSlice(beside(source, "weight_shape"), (2,), dtypes=("int64", "int32"))

    def read_codes(self, whole: "Tensor", shape: tuple[int, ...], bits: int) -> "Tensor":
        """Return the codes, uint8 `[out, in]`."""
        return in_words(as_bytes(whole), bits, shape[1])

    def read_scales(self, whole: "Tensor", shape: tuple[int, int]) -> "Tensor":
        """Return the scales `[out, groups]`."""
        return _grid(whole, shape)

    def read_zeros(self, whole: "Tensor", shape: tuple[int, ...], bits: int) -> "Tensor":
        """Return the zero points as codes, uint8 `[out, groups]`."""
        return in_words(as_bytes(whole.t()), bits, shape[0]).t()


@dataclass(frozen=True)
class Signed(Packing):
    """`int-quantized`: signed numbers of eight bits, one a byte."""

    def codes(self, source: TensorSlice, bits: int) -> TensorSlice:
        """Return `weight`, int8 `[out, in]`."""
        return TensorSlice(beside(source, "weight"), source.shape, dtypes=("int8",))

    def scales(self, source: TensorSlice, groups: int) -> TensorSlice:
        """Return `weight_scale` `[out, groups]`, or one number."""
        return TensorSlice(beside(source, "weight_scale"), (), loose=True, dtypes=NUMBERS)

    def zeros(self, source: TensorSlice, groups: int, bits: int) -> TensorSlice:
        """Return `weight_zero_point`, int8 like the scales."""
        return TensorSlice(
            beside(source, "weight_zero_point"), (), optional=True, loose=True, dtypes=("int8",)
        )

    def read_codes(self, whole: "Tensor", shape: tuple[int, ...], bits: int) -> "Tensor":
        """Return the codes, uint8 `[out, in]`."""
        return as_bytes(whole) ^ 128

    def read_scales(self, whole: "Tensor", shape: tuple[int, int]) -> "Tensor":
        """Return the scales `[out, groups]`."""
        return _grid(whole, shape)

    def read_zeros(self, whole: "Tensor", shape: tuple[int, ...], bits: int) -> "Tensor":
        """Return the zero points as codes, uint8 `[out, groups]`."""
        return as_bytes(_grid(whole, shape)) ^ 128


def _grid(whole: "Tensor", shape: tuple[int, ...]) -> "Tensor":
    """Return scales or zero points for each row and group, of as many, of one for each row, or of one."""
    return (whole.reshape(-1, 1) if whole.dim() < 2 else whole).expand(*shape)


def read(config: Mapping[str, object], where: str, dtype: str) -> WeightFormat:
    """Return the formats of a checkpoint's weights. Raises UnsupportedModelError, naming the key."""
    words = Words(config, f"{where}: quantization_config")
    _refuse_rotations(words)
    sparse = words.object("sparsity_config")
    if sparse is not None and sparse.text("format", "dense") != "dense":
        sparse.refuse("format", "dense")
    kind, dtype = words.text("format", ""), words.one_of(SCALES, dtype, NUMBERS)
    rules = []
    for group in words.objects("config_groups").values():
        scheme = _scheme(group, group.text("format", kind) or kind, dtype)
        rules.append((group.names("targets"), scheme))
    # Whole names come before patterns, those in the order of their text, and these before classes of modules.
    exact = [(ModuleNames(whole=names.whole), scheme) for names, scheme in rules if names.whole]
    patterns = sorted(
        ((one, scheme) for names, scheme in rules for one in names.regexes), key=lambda rule: rule[0]
    )
    regex = [(ModuleNames(regexes=(one,)), scheme) for one, scheme in patterns]
    every = [(ModuleNames(linear=True), scheme) for names, scheme in rules if names.linear]
    return ByName(METHOD, rules=((words.names("ignore"), DENSE), *exact, *regex, *every), unread=_UNREAD)


def _refuse_rotations(words: Words) -> None:
    """Raise UnsupportedModelError if anything but weights is to be transformed, which every step would do."""
    transforms = words.object("transform_config")
    for transform in transforms.objects("config_groups").values() if transforms is not None else ():
        applied = transform.get("apply", [])
        places = [one.get("location") if isinstance(one, dict) else one for one in _listed(applied)]
        if not all(place in ("weight_input", "weight_output") for place in places):
            transform.refuse("apply", "transforms at weight_input and weight_output, which weights contain")


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]


def _scheme(group: Words, kind: str, dtype: str) -> WeightFormat:
    weights = group.object("weights")
    if weights is None or kind == "dense":
        return DENSE
    bits, type, strategy = (
        weights.number("num_bits"),
        weights.text("type", "int"),
        weights.text("strategy", "tensor"),
    )
    if weights.get("dynamic", False) is not False:
        weights.refuse("dynamic", "false for weights")
    symmetric = weights.flag("symmetric", True)
    size = weights.number("group_size", 0)
    match kind, type:
        case ("pack-quantized", "int") if bits in (4, 8) and strategy in ("group", "channel"):
            packing: Packing = PackedRows()
        case ("int-quantized" | "naive-quantized", "int") if bits == 8 and strategy in (
            "group",
            "channel",
            "tensor",
        ):
            packing = Signed()
        case ("float-quantized" | "naive-quantized", "float") if bits == 8 and strategy in _BLOCKS:
            return Float8(METHOD, block=_block(weights, strategy))
        case ("mxfp8-quantized", "float") if bits == 8:
            return Float8(METHOD, block=(1, 32), scale=E8M0)
        case ("nvfp4-pack-quantized", "float") if bits == 4:
            return Float4(METHOD, 16, "float8_e4m3fn", second="weight_global_scale", divided=True)
        case ("mxfp4-pack-quantized", "float") if bits == 4:
            return Float4(METHOD)
        case _:
            raise weights.unsupported(
                f"format {kind!r} with {bits} bits, type {type!r}, strategy {strategy!r}",
                "pack-quantized (int, 4 or 8 bits, group or channel), int-quantized (8 bits), "
                "float-quantized (8 bits; tensor, channel, block), mxfp8-quantized, "
                "nvfp4-pack-quantized, mxfp4-pack-quantized",
            )
    grouped = strategy == "group"
    if grouped and size < 1:
        weights.refuse("group_size", "a number of columns")
    order = weights.get("actorder")
    return Integers(
        METHOD,
        bits=bits,
        checkpoint_group=size if grouped else 0,
        scale=dtype if grouped else "float32",
        zeros=not symmetric,
        ordered=order in ("group", "dynamic", True),
        packing=packing,
    )


_BLOCKS = {"tensor": (0, 0), "channel": (1, 0), "block": None}
"""Rows and columns that share a scale, by the strategy; the config says it for blocks."""


def _block(weights: Words, strategy: str) -> tuple[int, int]:
    if strategy != "block":
        return _BLOCKS[strategy] or (0, 0)
    return weights.block("block_structure")
