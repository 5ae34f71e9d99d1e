"""Finds the storage format of a checkpoint by the name that config.json gives it."""

from collections.abc import Callable, Mapping

from penstock.arch.formats.dense import DENSE
from penstock.arch.formats.format import WeightFormat
from penstock.base.errors import UnsupportedModelError

FORMATS: dict[str, Callable[[Mapping[str, object], str], WeightFormat]] = {}
"""Reader of `quantization_config`, by `quant_method`. Its second argument opens the messages of errors."""


def read_format(config: Mapping[str, object], where: str) -> WeightFormat:
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
        raise UnsupportedModelError(
            f"{where}: key 'quantization_config' asks for a quantisation that is not supported; use a "
            f"checkpoint in {known}"
        )
    return FORMATS[method](asked, where)
