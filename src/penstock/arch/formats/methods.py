"""Finds the storage format of a checkpoint by the name that config.json gives it."""

from collections.abc import Callable, Mapping

from penstock.arch.formats import awq, compressed, fp8, gguf, gptq, modelopt, mxfp4, recipe
from penstock.arch.formats.dense import DENSE
from penstock.arch.formats.format import NUMBERS, FileTensor, WeightFormat
from penstock.arch.formats.found import PACKED, UNPACKED, exceptions
from penstock.arch.formats.integers import SCALES
from penstock.base.errors import UnsupportedModelError

FORMATS: dict[str, Callable[[Mapping[str, object], str, str], WeightFormat]] = {
    "compressed-tensors": compressed.read,
    "fp8": fp8.read,
    "gptq": gptq.read,
    "awq": awq.read,
    "auto-round": gptq.read_auto_round,
    "intel/auto-round": gptq.read_auto_round,
    "modelopt": modelopt.read,
    "gguf": gguf.read,
    "mxfp4": mxfp4.read,
    recipe.METHOD: recipe.read,
}
"""Reader of `quantization_config`, by `quant_method`. Its second argument opens the messages of errors; the
third is the dtype of weights that are not quantised."""


def read_format(config: Mapping[str, object], where: str, dtype: str) -> WeightFormat:
    """Return the format that a config.json asks for in `quantization_config`, or `DENSE` without that key.

    where: opens the messages of errors.

    Raises UnsupportedModelError, which names the key, for a method that is not in `FORMATS`.
    """
    asked = config.get("quantization_config")
    _refuse_mlx(config, where)
    if asked is None:
        return DENSE
    method = asked.get("quant_method") if isinstance(asked, dict) else None
    if not isinstance(asked, dict) or not isinstance(method, str) or method not in FORMATS:
        known = ", ".join(("unquantised float32, float16, bfloat16", *FORMATS))
        named = f" to quant_method {method[:40]!r}" if isinstance(method, str) else ""
        raise UnsupportedModelError(
            f"{where}: key 'quantization_config' is set{named}, which is not supported; use a checkpoint in "
            f"{known}: most models are published in one of these, too"
        )
    return FORMATS[method](asked, where, dtype)


def _refuse_mlx(config: Mapping[str, object], where: str) -> None:
    """Raise UnsupportedModelError for weights that MLX has packed, which are no other method's."""
    own = config.get("quantization")
    if isinstance(own, dict) and {"bits", "group_size"} <= own.keys():
        raise UnsupportedModelError(
            f"{where}: key 'quantization' is MLX's, whose packed weights are not read; use the model as it "
            "was published, or a GGUF file of it"
        )


def with_stored(
    config: Mapping[str, object], where: str, tensors: Mapping[str, FileTensor], dtype: str
) -> Mapping[str, object]:
    """Return a config.json whose `quantization_config` has what only a checkpoint's tensors say of its
    format: the blocks of FP8, the dtype in which scales of integers rest, and what is packed.

    where: opens the messages of errors.
    dtype: of weights that are not quantised.

    Raises CheckpointError for shapes that the format cannot have.
    """
    asked = config.get("quantization_config")
    method = asked.get("quant_method") if isinstance(asked, dict) else None
    if not isinstance(asked, dict) or method not in (fp8.METHOD, modelopt.METHOD, *_SCALES):
        return config
    plain = {key: value for key, value in asked.items() if key not in (SCALES, fp8.BLOCKS, PACKED, UNPACKED)}
    if method != compressed.METHOD:
        codes = ("float8_e4m3fn", "uint8") if method not in _SCALES else ()
        plain |= exceptions(FORMATS[method](plain, where, dtype), tensors, codes)
    if method == fp8.METHOD:
        plain = {**fp8.with_blocks(plain, where, tensors)}
    if method not in _SCALES:
        return {**config, "quantization_config": plain}
    end, usual = _SCALES[method]
    found = {one.dtype for name, one in tensors.items() if name.endswith(end) and one.dtype in NUMBERS}
    # What holds the numbers of all of them.
    kept = found.pop() if len(found) == 1 else "float32" if found else ""
    plain |= {SCALES: kept} if kept not in ("", usual or dtype) else {}
    return {**config, "quantization_config": plain}


_SCALES = {
    gptq.METHOD: (".scales", "float16"),
    "awq": (".scales", "float16"),
    "auto-round": (".scales", "float16"),
    "intel/auto-round": (".scales", "float16"),
    compressed.METHOD: (".weight_scale", ""),
}
"""Ends of the names of scales of integers, and the dtype in which they rest where `SCALES` says nothing;
empty is that of weights that are not quantised."""
