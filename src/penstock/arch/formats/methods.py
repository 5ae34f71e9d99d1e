"""The storage formats that checkpoints may have, by the names that config.json gives them."""

from collections.abc import Callable, Mapping

from penstock.arch.formats.dense import DENSE
from penstock.arch.formats.format import Format
from penstock.base.errors import UnsupportedModelError

FORMATS: dict[str, Callable[[Mapping[str, object], str], Format]] = {}
"""For each `quant_method`: what reads its `quantization_config`. A second argument opens the messages of
errors."""


def read_format(config: Mapping[str, object], where: str) -> Format:
    """Return the format that the `quantization_config` of a config.json asks for; dense where it has none.

    Raises UnsupportedModelError, naming the key, for one that this engine does not read.
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
