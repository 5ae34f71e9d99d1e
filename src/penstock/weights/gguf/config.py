"""Makes the config.json that a GGUF file's metadata stand for, key by key; what no key of config.json can say
is refused."""

import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isclose

from penstock.arch.families import family_of
from penstock.arch.formats.gguf_blocks import QUANTISED
from penstock.arch.rope import inverse_frequencies
from penstock.arch.spec import RopeKind, RopeSpec
from penstock.base.errors import CheckpointError, UnsupportedModelError
from penstock.weights.gguf.files import GGUFFiles, GGUFTensor
from penstock.weights.gguf.names import EMBEDDING, HEAD, ROPE_FACTORS, Naming
from penstock.weights.jsonfile import readable, shown

ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe")
_CONTROL = 3
ENDS = (b"<|im_end|>", b"<|endoftext|>", b"<|eot_id|>", b"<|end_of_text|>", b"<|eom_id|>")
"""Control tokens that end an output wherever a vocabulary has them."""
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
_HARMLESS = ("tensor_data_layout", "rope.scaling.finetuned")
"""Keys that change no arithmetic."""
_MOST = 2**32
_SAMPLED, _NUMBERS, _ENOUGH = 1000, 256, 64
"""Matrices and the numbers of each that are looked at to see how they were made, and how many tell."""


class Metadata:
    """Reads metadata of a model and checks their types.

    Raises UnsupportedModelError, naming file and key. Keys of the architecture that were not asked for are
    refused in the end.
    """

    def __init__(self, files: GGUFFiles) -> None:
        self._values, self._where = files.metadata, str(files.path)
        self.architecture = self.text("general.architecture")
        self._asked: set[str] = set()

    def refuse(self, key: str, supported: str) -> UnsupportedModelError:
        """Return the error for the value at a key."""
        given = "missing" if key not in self._values else shown(self._values[key])
        return UnsupportedModelError(f"{self._where}: key {key} is {given}; supported: {supported}")

    def text(self, key: str, default: str | None = None) -> str:
        """Return the string at a key."""
        value = self._values.get(key, default)
        if not isinstance(value, str):
            raise self.refuse(key, "a string")
        return value

    def own(self, key: str) -> str:
        """Return the whole name of a key of the architecture, which is known from now on."""
        self._asked.add(whole := f"{self.architecture}.{key}")
        return whole

    def has(self, key: str) -> bool:
        """Tell whether the architecture's key is there."""
        return self.own(key) in self._values

    def whole(self, key: str, default: int | None = None, *, low: int = 1) -> int:
        """Return the whole number at the architecture's key: one, or the same for all layers."""
        value = self._values.get(self.own(key), default)
        if isinstance(value, array) and len(set(value)) == 1:
            value = value[0]
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= _MOST:
            raise self.refuse(self.own(key), f"a whole number from {low}, the same in all layers")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return the number at the architecture's key: of float32, the shortest that rounds to it."""
        value = self._values.get(self.own(key), default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 1e-30 <= value <= 1e30:
            raise self.refuse(self.own(key), "a number from 1e-30 to 1e30")
        return _shortest(float(value))

    def only(self, key: str, *supported: object) -> None:
        """Refuse any value at the architecture's key but these; a missing one counts as the first."""
        if self._values.get(self.own(key), supported[0]) not in supported:
            raise self.refuse(self.own(key), ", ".join(map(str, supported)))

    def without_pooling(self) -> None:
        """Refuse models that make embeddings, which are read from directories alone."""
        if self._values.get(key := self.own("pooling_type"), 0) != 0:
            raise self.refuse(
                key,
                "files of models that write; for embeddings give the model's directory, with modules.json",
            )

    def token(self, name: str) -> int | None:
        """Return the id of a special token, perhaps none of the vocabulary; None if there is none."""
        value = self._values.get(f"tokenizer.ggml.{name}_token_id")
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise self.refuse(f"tokenizer.ggml.{name}_token_id", "a token id")
        return value

    def expect_all_asked(self) -> None:
        """Raise UnsupportedModelError for a key of the architecture that was not asked for, unless it is zero
        or harmless."""
        known = self._asked | {f"{self.architecture}.{key}" for key in _HARMLESS}
        for key, value in self._values.items():
            if not key.startswith(f"{self.architecture}.") or key in known:
                continue
            if value if isinstance(value, int | float | str | list) else any(value):
                raise self.refuse(key, "files without it: it is a variant that is not run")


def _shortest(value: float) -> float:
    """Return the number of fewest digits that is the same in float32; the number itself if it is none."""
    bits = struct.pack("<f", value)
    if struct.unpack("<f", bits)[0] != value:
        return value
    texts = (f"{value:.{digits}g}" for digits in range(1, 10))
    return next(float(text) for text in texts if struct.pack("<f", float(text)) == bits)


def read_gguf_config(files: GGUFFiles) -> dict[str, object]:
    """Return the config.json that a model's files stand for.

    Raises UnsupportedModelError, naming file and key, for an architecture or a value that is not run;
    CheckpointError for a file without an embedding.
    """
    metadata = Metadata(files)
    if metadata.architecture not in ARCHITECTURES:
        others = "other families are read from directories of safetensors, if at all"
        raise metadata.refuse("general.architecture", f"{', '.join(ARCHITECTURES)}; {others}")
    embedding = files.tensors.get(EMBEDDING)
    if embedding is None or len(embedding.info.shape) != 2:
        raise CheckpointError(f"{files.path} lacks tensor {EMBEDDING}, a matrix; fetch the file again")
    is_mixture = metadata.whole("expert_count", 0, low=0) > 0
    heads, hidden = metadata.whole("attention.head_count"), metadata.whole("embedding_length")
    dim = metadata.whole("attention.key_length", hidden // heads)
    metadata.only("attention.value_length", dim)
    metadata.only("rope.dimension_count", dim)
    metadata.only("attention.causal", True)
    metadata.has("vocab_size")
    metadata.without_pooling()
    config: dict[str, object] = {
        "hidden_size": hidden,
        "num_hidden_layers": metadata.whole("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.whole("attention.head_count_kv", heads),
        "head_dim": dim,
        "intermediate_size": metadata.whole("feed_forward_length", 1 if is_mixture else None),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": metadata.whole("context_length"),
        "rope_theta": metadata.number("rope.freq_base", 10000.0),
        "vocab_size": embedding.info.shape[0],
        "tie_word_embeddings": HEAD not in files.tensors,
        "attention_bias": "blk.0.attn_q.bias" in files.tensors or "blk.0.attn_qkv.bias" in files.tensors,
        "dtype": _dtype(files),
        "bos_token_id": metadata.token("bos"),
        "eos_token_id": _ends(files, metadata),
        "pad_token_id": metadata.token("padding"),
        **_family(files, metadata),
    }
    if scaling := _rope_scaling(files, metadata, config):
        config["rope_scaling"] = scaling
    metadata.expect_all_asked()
    types = _types(files, naming_of(config, metadata.architecture))
    return config | ({"quantization_config": {"quant_method": "gguf", "types": types}} if types else {})


def naming_of(config: Mapping[str, object], architecture: str) -> Naming:
    """Return how the tensors of a model with such a config are named."""
    dim, heads, kv_heads = (config[key] for key in ("head_dim", "num_attention_heads", "num_key_value_heads"))
    sizes = int(str(heads)) * int(str(dim)), int(str(kv_heads)) * int(str(dim))
    return Naming(family_of(config).names, *sizes, turned=architecture == "llama")


def read_gguf_generation(files: GGUFFiles) -> dict[str, object]:
    """Return the generation_config.json that a model's files stand for."""
    values = {name: files.metadata.get(f"general.sampling.{key}") for key, name in _SAMPLING.items()}
    return {name: value for name, value in values.items() if isinstance(value, int | float)}


def _family(files: GGUFFiles, metadata: Metadata) -> dict[str, object]:
    """Return the keys in which families differ."""
    experts, window = (
        metadata.whole("expert_count", 0, low=0),
        metadata.whole("attention.sliding_window", 0, low=0),
    )
    if metadata.architecture == "llama":
        family: dict[str, object] = {"model_type": "mixtral" if experts else "mistral" if window else "llama"}
        family |= {"sliding_window": window or None, "mlp_bias": "blk.0.ffn_gate.bias" in files.tensors}
        family |= {
            "num_local_experts": experts,
            "num_experts_per_tok": metadata.whole("expert_used_count", 0, low=0),
        }
        _only_routing(metadata)
        return family
    metadata.only("attention.sliding_window", 0)
    if metadata.architecture != "qwen3moe":
        metadata.only("expert_count", 0)
        metadata.only("expert_used_count", 0)
        return {"model_type": metadata.architecture}
    _only_routing(metadata)
    layers = range(metadata.whole("block_count"))
    if len(layers) > len(files.tensors):
        raise metadata.refuse(
            "qwen3moe.block_count", f"as many as the file has, of {len(files.tensors)} tensors"
        )
    return {
        "model_type": "qwen3_moe",
        "num_experts": experts,
        "num_experts_per_tok": metadata.whole("expert_used_count"),
        "moe_intermediate_size": metadata.whole("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "mlp_only_layers": [layer for layer in layers if f"blk.{layer}.ffn_gate.weight" in files.tensors],
    }


def _only_routing(metadata: Metadata) -> None:
    """Refuse routers other than softmax over all experts, normalised over those that were chosen."""
    metadata.only("expert_weights_norm", True)
    metadata.only("expert_weights_scale", 1.0, 0.0)
    metadata.only("expert_gating_func", 0, 1)


def _dtype(files: GGUFFiles) -> str:
    """Return the dtype of activations: that of all matrices, or bfloat16.

    A file of F16 leads to float16, but to bfloat16 if that has its numbers too: then the model was made in
    bfloat16, and its activations may be beyond float16.
    """
    matrices = [one for one in files.tensors.values() if len(one.info.shape) > 1]
    types = {one.info.type.name for one in matrices}
    if not types <= {"F32", "F16"}:
        return "bfloat16"
    if types == {"F32"}:
        return "float32"
    there = [bits for one in matrices[:_SAMPLED] for bits in _first_numbers(one) if bits & 0x7FFF]
    return "bfloat16" if len(there) >= _ENOUGH and all(map(_in_bfloat16, there)) else "float16"


def _first_numbers(tensor: GGUFTensor) -> Sequence[int]:
    """Return the bits of an F16 matrix's first numbers, uint16; none of others, and where the file ends
    before."""
    info = tensor.info
    size = min(info.size, 2 * _NUMBERS)
    if info.type.name != "F16" or info.offset + size > tensor.file.size:
        return ()  # The file was opened for its header alone.
    with readable():
        return struct.unpack(f"<{size // 2}H", tensor.file.read(info.offset, size))


def _in_bfloat16(bits: int) -> bool:
    """Tell whether bfloat16, of eight significant bits, has the number float16 of these bits."""
    mantissa = bits & 0x3FF | (0x400 if bits & 0x7C00 else 0)
    return mantissa // (mantissa & -mantissa) < 1 << 8


def _ends(files: GGUFFiles, metadata: Metadata) -> list[int]:
    """Return the tokens that end an output: those that metadata name first."""
    named = [metadata.token(name) for name in ("eos", "eot", "eom")]
    tokens, kinds = (
        files.metadata.get("tokenizer.ggml.tokens"),
        files.metadata.get("tokenizer.ggml.token_type"),
    )
    if isinstance(tokens, list) and isinstance(kinds, array) and len(tokens) == len(kinds):
        control = {token: at for at, token in enumerate(tokens) if kinds[at] == _CONTROL}
        named += [control.get(end) for end in ENDS]
    return list(dict.fromkeys(token for token in named if token is not None))


def _types(files: GGUFFiles, naming: Naming) -> dict[str, list[str]]:
    """Return the modules of each quantised type, of experts those of the first."""
    types: dict[str, list[str]] = {}
    for tensor in files.tensors.values():
        info = tensor.info
        if info.type.name in QUANTISED:
            stacked = len(info.shape) == 3
            # All experts are named alike; a header alone may claim any number of them.
            first = replace(info, shape=(1, *info.shape[1:])) if stacked else info
            modules = (part.module for part in naming.parts(first) if part.kind == "weight")
            types.setdefault(info.type.name, []).extend(
                module.replace(".experts.0.", ".experts.") if stacked else module for module in modules
            )
    return types


def _rope_scaling(
    files: GGUFFiles, metadata: Metadata, config: Mapping[str, object]
) -> dict[str, object] | None:
    """Return `rope_scaling`. Raises UnsupportedModelError for what none of its kinds is."""
    kind = metadata.text(metadata.own("rope.scaling.type"), "none")
    factor, trained = (
        metadata.has("rope.scaling.factor"),
        metadata.has("rope.scaling.original_context_length"),
    )
    linear = metadata.number("rope.scale_linear", 1.0)
    for key in ("attn_factor", "yarn_ext_factor", "yarn_attn_factor"):
        metadata.only(f"rope.scaling.{key}", 1.0)
    if (factors := files.tensors.get(ROPE_FACTORS)) is not None:
        if kind != "none" or linear != 1:
            raise metadata.refuse(metadata.own("rope.scaling.type"), f"none beside tensor {ROPE_FACTORS}")
        return _llama3(factors, config)
    if kind == "none":
        return {"rope_type": "linear", "factor": linear} if linear != 1 else None
    scaling: dict[str, object] = {"rope_type": kind}
    if kind not in ("linear", "yarn"):
        raise metadata.refuse(metadata.own("rope.scaling.type"), "none, linear, yarn")
    if factor:
        scaling["factor"] = metadata.number("rope.scaling.factor")
    if kind == "yarn" and trained:
        scaling["original_max_position_embeddings"] = metadata.whole("rope.scaling.original_context_length")
    for key in ("beta_fast", "beta_slow"):
        if metadata.has(f"rope.scaling.yarn_{key}"):
            scaling[key] = metadata.number(f"rope.scaling.yarn_{key}")
    return scaling


def _llama3(tensor: GGUFTensor, config: Mapping[str, object]) -> dict[str, object] | None:
    """Return the scaling of Llama 3.1 that led to a tensor, which has a divisor for each pair of a head.

    Files do not have its numbers. The factor is the last divisor; frequencies that are blended begin and end
    where those of Llama 3.1 do, for some trained length that is a power of two.
    """
    info, dim, theta = tensor.info, config["head_dim"], config["rope_theta"]
    assert isinstance(dim, int)
    assert isinstance(theta, float)
    what = f"{tensor.file.path}: tensor {ROPE_FACTORS}"
    if info.shape != (dim // 2,) or info.type.name != "F32" or dim > 2**16:
        raise CheckpointError(
            f"{what} is {list(info.shape)} of {info.type.name}; supported: [{dim // 2}] of F32"
        )
    if info.offset + info.size > tensor.file.size:
        return None  # The file was opened for its header alone.
    with readable():
        divisors = struct.unpack(f"<{dim // 2}f", tensor.file.read(info.offset, info.size))
    if set(divisors) == {1.0}:
        return None
    factor = _shortest(divisors[-1])
    if not 1 <= factor < 1e6:
        raise UnsupportedModelError(f"{what} ends with {factor}; supported: a divisor from 1 to a million")
    plain = inverse_frequencies(RopeSpec(theta, dim))
    for length in (2**power for power in range(5, 24)):
        rope = RopeSpec(theta, dim, RopeKind.LLAMA3, factor, length)
        scaled = inverse_frequencies(rope)
        if all(isclose(a / b, c, rel_tol=1e-5) for a, b, c in zip(plain, scaled, divisors, strict=True)):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": rope.low_freq_factor,
                "high_freq_factor": rope.high_freq_factor,
                "original_max_position_embeddings": length,
            }
    raise UnsupportedModelError(
        f"{what} scales rope in a way that is not known; supported: that of Llama 3.1"
    )
