"""Read what config.json says of FP8: in blocks, as DeepSeek, Qwen and MiniMax publish it, or by tensor."""

from collections.abc import Mapping

from penstock.arch.formats.dense import DENSE
from penstock.arch.formats.floats import E8M0, Float8
from penstock.arch.formats.format import WeightFormat
from penstock.arch.formats.names import EMBEDDING, ByName, ModuleNames, checked_regex, linears
from penstock.arch.formats.words import Words

_UNREAD = (".activation_scale", ".input_scale", ".q_scale", ".k_scale", ".v_scale")


def read(config: Mapping[str, object], where: str, dtype: str) -> WeightFormat:
    """Return the formats of a checkpoint in FP8. Raises UnsupportedModelError, naming the key."""
    words = Words(config, f"{where}: quantization_config")
    words.one_of("fmt", "e4m3", ("e4m3", "float8_e4m3fn"))
    words.one_of("expert_dtype", "fp8", ("fp8",))
    tables = words.list("modules_to_convert")  # By ends of their names; each has one scale.
    if not all(name and EMBEDDING.endswith(name) for name in tables):
        words.refuse("modules_to_convert", EMBEDDING)
    table = Float8("fp8", block=(0, 0))
    exponents = words.one_of("scale_fmt", "float", ("float", "ue8m0")) == "ue8m0"
    block = words.block("weight_block_size") if words.get("weight_block_size") is not None else (1, 0)
    names = ("weight_scale_inv", "weight_scale", "scale", "qscale_weight")
    format = Float8("fp8", block=block, scale=E8M0 if exponents else "float32", scales=names)
    listed = words.list("modules_to_not_convert") or words.list("ignored_layers")
    key = f"{where}: quantization_config.modules_to_not_convert"
    # As Hugging Face reads the list: a name's beginning up to a dot or its end, which may be a pattern.
    patterns = tuple(rf"(?:{checked_regex(one, key)})(?:(?<=\.)|(?=\.|$))" for one in listed)
    excepted, embedding = ModuleNames(regexes=patterns, ends=listed), ModuleNames(ends=tables)
    return ByName("fp8", rules=((excepted, DENSE), (embedding, table), *linears(format)), unread=_UNREAD)
