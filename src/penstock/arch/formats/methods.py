"""Finds the storage format of a checkpoint by the name that config.json gives it."""

from collections.abc import Callable, Mapping

from penstock.arch.formats import awq, compressed, fp8, gguf, gptq, modelopt, mxfp4, recipe
from penstock.arch.formats.dense import DENSE
from penstock.arch.formats.format import WeightFormat
from penstock.base.errors import UnsupportedModelError

FORMATS: dict[str, Callable[[Mapping[str, object], str, str], WeightFormat]] = {
    "compressed-tensors": compressed.read,
    "fp8": fp8.read,
    "gptq": gptq.read,
    "awq": awq.read,
    "auto-round": gptq.read_auto_round,
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


def with_shapes(
    config: Mapping[str, object], where: str, tensors: Mapping[str, tuple[str, tuple[int, ...]]]
) -> Mapping[str, object]:
    """Return a config.json with what only the shapes of a checkpoint's tensors say of its format.

    where: opens the messages of errors.
    tensors: file and shape of each tensor.

    Raises CheckpointError for shapes that the format cannot have.
    """
    asked = config.get("quantization_config")
    if not isinstance(asked, dict) or asked.get("quant_method") != fp8.METHOD:
        return config
    return {**config, "quantization_config": fp8.with_blocks(asked, where, tensors)}
