"""The storage formats that checkpoints may have, by the names that config.json gives them."""

from collections.abc import Callable, Mapping

from penstock.arch.formats import awq, compressed, fp8, gptq, modelopt
from penstock.arch.formats.dense import DENSE
from penstock.arch.formats.format import Format
from penstock.base.errors import UnsupportedModelError

FORMATS: dict[str, Callable[[Mapping[str, object], str, str], Format]] = {
    "compressed-tensors": compressed.read,
    "fp8": fp8.read,
    "gptq": gptq.read,
    "awq": awq.read,
    "auto-round": gptq.read_auto_round,
    "modelopt": modelopt.read,
}
"""For each `quant_method`: what reads its `quantization_config`. A second argument opens the messages of
errors; the third is the dtype of weights that are not quantised."""


def read_format(config: Mapping[str, object], where: str, dtype: str) -> Format:
    """Return the format that the `quantization_config` of a config.json asks for; dense where it has none.

    Raises UnsupportedModelError, naming the key, for one that this engine does not read.
    """
    asked = config.get("quantization_config")
    if asked is None:
        return DENSE
    method = asked.get("quant_method") if isinstance(asked, dict) else None
    if not isinstance(asked, dict) or not isinstance(method, str) or method not in FORMATS:
        known = ", ".join(("unquantised float32, float16, bfloat16", *FORMATS))
        named = f" to quant_method {method[:40]!r}" if isinstance(method, str) else ""
        raise UnsupportedModelError(
            f"{where}: key 'quantization_config' is set{named}; supported: {known}. Most models are "
            "published in one of these, too"
        )
    return FORMATS[method](asked, where, dtype)
