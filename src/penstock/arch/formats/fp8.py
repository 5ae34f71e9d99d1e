"""Read what config.json says of FP8: in blocks, as DeepSeek, Qwen and MiniMax publish it, or by tensor."""

from collections.abc import Mapping
from dataclasses import replace
from math import prod

from penstock.arch.formats import found
from penstock.arch.formats.dense import DENSE
from penstock.arch.formats.floats import E8M0, Float8
from penstock.arch.formats.format import FileTensor, WeightFormat
from penstock.arch.formats.names import (
    EMBEDDING,
    ByName,
    Listed,
    ModuleNames,
    checked_regex,
    linears,
    together,
)
from penstock.arch.formats.words import Words
from penstock.base.errors import CheckpointError

METHOD = "fp8"
_NAMES = ("weight_scale_inv", "weight_scale", "scale", "qscale_weight")
"""Names that tensors of scales have beside `weight`."""
BLOCKS = "weight_blocks"
"""A key of our own; see `with_blocks`."""
_UNREAD = (".activation_scale", ".input_scale", ".q_scale", ".k_scale", ".v_scale", ".kv_scale")


def read(config: Mapping[str, object], where: str, dtype: str) -> WeightFormat:
    """Return the formats of a checkpoint in FP8. Raises UnsupportedModelError, naming the key."""
    words = Words(config, f"{where}: quantization_config")
    words.one_of("fmt", "e4m3", ("e4m3", "float8_e4m3fn"))
    words.one_of("expert_dtype", "fp8", ("fp8",))
    tables = words.list("modules_to_convert")  # By ends of their names; each has one scale.
    if not all(name and EMBEDDING.endswith(name) for name in tables):
        words.refuse("modules_to_convert", EMBEDDING)
    table = Float8(METHOD, block=(0, 0))
    exponents = words.one_of("scale_fmt", "float", ("float", "ue8m0")) == "ue8m0"
    block = words.block("weight_block_size") if words.get("weight_block_size") is not None else (1, 0)
    format = Float8(METHOD, block=block, scale=E8M0 if exponents else "float32", scales=_NAMES)
    others = words.object(BLOCKS) or Words({}, "")
    keys = Words({key: key for key in others.keys}, f"{where}: quantization_config.{BLOCKS}")
    blocks = [
        (Listed(frozenset(others.list(key))), replace(format, block=keys.block(key))) for key in others.keys
    ]
    listed = words.list("modules_to_not_convert") or words.list("ignored_layers")
    key = f"{where}: quantization_config.modules_to_not_convert"
    # As Hugging Face reads the list: a name's beginning up to a dot or its end, which may be a pattern.
    patterns = tuple(rf"(?:{checked_regex(one, key, inside=True)})(?:(?<=\.)|(?=\.|$))" for one in listed)
    excepted, embedding = ModuleNames(regexes=patterns, ends=listed), ModuleNames(ends=tables)
    stored = *blocks, *found.rules(words, format)
    rules = *stored, (excepted, DENSE), (embedding, table), *linears(format)
    return ByName(METHOD, rules=rules, unread=_UNREAD)


def with_blocks(
    config: Mapping[str, object], where: str, tensors: Mapping[str, FileTensor]
) -> Mapping[str, object]:
    """Return a `quantization_config` that names the block of every matrix that has another than it says.

    Blocks follow from the shapes of weights and scales. Modules are listed under the key `weight_blocks`, by
    their block, such as "64x128"; `experts.*` stands for every expert of a layer.

    tensors: those of the checkpoint.

    Raises CheckpointError, naming file, tensor and shapes, for scales that fit no block, and
    UnsupportedModelError as `read` does.
    """
    plain = {key: value for key, value in config.items() if key != BLOCKS}
    format, kinds = read(plain, where, "float32"), dict[str, str]()
    for name, weight in tensors.items():
        module = name.removesuffix(".weight")
        scale = next((key for one in _NAMES if (key := f"{module}.{one}") in tensors), None)
        if module == name or scale is None or len(weight.shape) != 2:
            continue
        its, grid = format.of(name), tensors[scale].shape
        if isinstance(its, Float8) and its.scales == _NAMES:
            block = _block(weight.shape, grid, its.block)
            if block is None:
                raise CheckpointError(
                    f"{tensors[scale].file}: tensor {scale} has shape {list(grid)}, which fits weights "
                    f"{list(weight.shape)} neither in the blocks of {where} nor in others; set "
                    "weight_block_size to theirs"
                )
            kinds[module] = "" if block == its.block else f"{block[0]}x{block[1]}"
    listed = dict[str, list[str]]()
    for module, extents in together(kinds).items():
        if extents:
            listed.setdefault(extents, []).append(module)
    return plain | {BLOCKS: listed} if listed else plain


def _block(shape: tuple[int, ...], grid: tuple[int, ...], said: tuple[int, int]) -> tuple[int, int] | None:
    """Return the block of a matrix with a grid of scales: what config.json has said, where that fits; None if
    nothing does."""
    if prod(grid) == 1:
        return said  # One scale fits every block.
    if len(grid) != 2 and grid != shape[:1]:
        return None
    height, width = map(_size, shape, (*grid, 1), said)
    return None if height is None or width is None else (height, width)


def _size(extent: int, count: int, said: int) -> int | None:
    """Return the rows or columns of a block, so that `count` blocks cover an extent.

    What was said comes first. Else blocks are equal, or a power of two that the extent cuts off. None if
    neither fits, or both do.
    """
    if -(-extent // (said or max(extent, 1))) == count:
        return said
    if count == 1:
        return extent
    even = {extent // count} if count and extent % count == 0 else set()
    powers = {1 << at for at in range(extent.bit_length()) if -(-extent // (1 << at)) == count}
    return (even | powers).pop() if len(even | powers) == 1 else None
