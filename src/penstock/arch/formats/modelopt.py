"""Read what NVIDIA's ModelOpt writes: NVFP4, FP8 with a scale for each tensor, and MXFP8."""

from collections.abc import Mapping

from penstock.arch.formats.dense import DENSE
from penstock.arch.formats.floats import E8M0, Float4, Float8
from penstock.arch.formats.format import WeightFormat
from penstock.arch.formats.names import ByName, ModuleNames, linears
from penstock.arch.formats.words import Words

_UNREAD = (".input_scale", ".output_scale", ".k_scale", ".v_scale", ".q_scale")
"""Scales of activations that are quantised. `pre_quant_scale` is of others: a product without it is wrong."""
_FORMATS: dict[str, WeightFormat] = {
    "NVFP4": Float4("modelopt", 16, "float8_e4m3fn", codes="weight", second="weight_scale_2"),
    "FP8": Float8("modelopt", block=(0, 0)),
    "MXFP8": Float8("modelopt", block=(1, 32), scale=E8M0),
}


def read(config: Mapping[str, object], where: str, dtype: str) -> WeightFormat:
    """Return the formats of a checkpoint of ModelOpt. Raises UnsupportedModelError, naming the key."""
    words = Words(config, f"{where}: quantization_config")
    inside = words.object("quantization")  # As in hf_quant_config.json.
    words = inside or words
    format = _FORMATS[words.one_of("quant_algo", "", tuple(_FORMATS))]
    excepted = words.list("ignore") or words.list("exclude_modules")
    return ByName(
        "modelopt", rules=((ModuleNames(globs=excepted), DENSE), *linears(format, head=True)), unread=_UNREAD
    )
