"""Read what NVIDIA's ModelOpt writes: NVFP4, FP8 with scales for tensors, rows or blocks, MXFP8, and mixtures
of these."""

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.arch.formats import found
from penstock.arch.formats.dense import DENSE
from penstock.arch.formats.floats import E8M0, Float4, Float8
from penstock.arch.formats.format import WeightFormat
from penstock.arch.formats.names import ByName, ModuleNames, linears
from penstock.arch.formats.words import Words

METHOD, MIXED = "modelopt", "MIXED_PRECISION"
_UNREAD = (".input_scale", ".output_scale", ".k_scale", ".v_scale", ".q_scale")
"""Scales of activations that are quantised. `pre_quant_scale` is of others: a product without it is wrong."""
_NVFP4 = Float4(METHOD, 16, "float8_e4m3fn", codes="weight", second="weight_scale_2")
_FORMATS: dict[str, WeightFormat] = {
    "NVFP4": _NVFP4,
    "W4A16_NVFP4": _NVFP4,
    "FP8": Float8(METHOD, block=(0, 0)),
    "FP8_PER_CHANNEL_PER_TOKEN": Float8(METHOD, block=(1, 0)),
    "FP8_PB_WO": Float8(METHOD, block=(128, 128), scales=("weight_scale", "weight_scale_inv")),
    "MXFP8": Float8(METHOD, block=(1, 32), scale=E8M0),
}


@dataclass(frozen=True)
class _Within(ModuleNames):
    """Modules are listed by their names, or by those of what they are in, such as all experts."""

    def has(self, module: str) -> bool:
        """Tell whether a module is meant."""
        parts = module.split(".")
        return any(".".join(parts[:count]) in self.whole for count in range(1, len(parts) + 1))


def read(config: Mapping[str, object], where: str, dtype: str) -> WeightFormat:
    """Return the formats of a checkpoint of ModelOpt. Raises UnsupportedModelError, naming the key."""
    words = Words(config, f"{where}: quantization_config")
    inside = words.object("quantization")  # As in hf_quant_config.json.
    own, words = words, inside or words
    excepted = words.list("ignore") or words.list("exclude_modules")
    dense = ModuleNames(globs=excepted), DENSE
    if words.text("quant_algo", "").upper() == MIXED:
        layers = words.objects("quantized_layers")
        named = {name: _format(layer) for name, layer in layers.items()}
        formats = dict.fromkeys(named.values())
        layered = [
            (_Within(frozenset(name for name, one in named.items() if one == format)), format)
            for format in formats
        ]
        return ByName(METHOD, rules=(dense, *layered), unread=_UNREAD)
    format = _format(words)
    rules = (*found.rules(own, format), dense, *linears(format, head=True))
    return ByName(METHOD, rules=rules, unread=_UNREAD)


def _format(words: Words) -> WeightFormat:
    algorithm = words.text("quant_algo", "").upper()
    if algorithm not in _FORMATS:
        words.refuse("quant_algo", ", ".join((*_FORMATS, MIXED)))
    return _FORMATS[algorithm]
