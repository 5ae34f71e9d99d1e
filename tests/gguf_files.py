"""GGUF files, written by the `gguf` library from checkpoints of Hugging Face, and the same models dense.

Matrices of types that the library quantises are rounded. Of others blocks are drawn, with scales that make
numbers of a usual size: what matters is what a file stands for, not how well it was made.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file

import tiny
from penstock.arch.formats.gguf_blocks import QUANTISED

Type = gguf.GGMLQuantizationType
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "head_dim": 64,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
}
"""Extents of a tiny model whose matrices all types can have."""
ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
}  # fmt: skip
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}  # fmt: skip
EXPERTS = {
    "gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps",
    "w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps",
}  # fmt: skip
KEYS = {
    "num_hidden_layers": "block_count", "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length", "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count", "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length", "num_experts": "expert_count", "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count", "moe_intermediate_size": "expert_feed_forward_length",
    "sliding_window": "attention.sliding_window", "vocab_size": "vocab_size",
}  # fmt: skip
Choice = Callable[[str], str]
"""Gives the name of the type that a tensor shall have, by its name in the file."""


def draw(kind: str, rows: int, width: int, size: float, seed: np.random.Generator) -> np.ndarray:
    """Bytes of a matrix `[rows, width]`, as uint8 `[rows, bytes]`: any blocks, with some edges among their
    scales, and numbers of about `size`."""
    block = QUANTISED[kind]
    blocks = seed.integers(0, 256, (rows * width // block.values, block.size), dtype=np.uint8)
    if kind == "MXFP4":
        blocks[:, 0] = seed.integers(118, 123, len(blocks))
        return blocks.reshape(rows, -1)

    def set_scales(scale: float) -> np.ndarray:
        for number, at in enumerate(block.halves):
            scales = (seed.choice([-1.0, 0.5, 1.0, 0.0], len(blocks), p=[0.3, 0.3, 0.3, 0.1]) * scale).astype(
                "<f2"
            )
            blocks[:, at : at + 2] = (scales if number == 0 else abs(scales)).view(np.uint8).reshape(-1, 2)
        return dequantize(blocks, Type[kind])

    spread = float(set_scales(1.0).std())
    set_scales(size / spread)
    return blocks.reshape(rows, -1)


def made(kind: str, matrix: np.ndarray, seed: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """What a file has of a matrix, float32 `[..., out, in]`, and the numbers that this stands for."""
    if kind in ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"):
        stored = quantize(matrix, Type[kind])
    else:
        rows, width = matrix.size // matrix.shape[-1], matrix.shape[-1]
        stored = draw(kind, rows, width, float(matrix.std()), seed).reshape(*matrix.shape[:-1], -1)
    return stored, dequantize(stored, Type[kind]).reshape(matrix.shape)


def turned(rows: np.ndarray, dim: int) -> np.ndarray:
    """Rows of queries or keys as llama.cpp has them: those of a head interleaved."""
    return rows.reshape(-1, 2, dim // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def turned_back(rows: np.ndarray, dim: int) -> np.ndarray:
    return rows.reshape(-1, dim // 2, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


@dataclass
class Made:
    """A GGUF file, and the directory of the same model dense."""

    file: Path
    dense: Path


@dataclass(frozen=True)
class Writing:
    """How a file is written: types of matrices, more metadata, tensors in files of so many."""

    types: Choice | str = "Q8_0"
    metadata: Mapping[str, object] = field(default_factory=dict)
    split: int = 0
    fused: bool = False
    alignment: int = 0
    tensors: Mapping[str, np.ndarray] = field(default_factory=dict)
    """More of them, in float32."""
    apart: bool = False
    """Experts in tensors of their own, as old files have them."""

    def of(self, name: str) -> str:
        if "norm" in name or name.endswith(("bias", "ffn_gate_inp.weight")):
            return "F32"
        return self.types if isinstance(self.types, str) else self.types(name)


def source(name: str, **more: object) -> Path:
    """A tiny checkpoint of a family, wide enough for all types."""
    case = tiny.CASES[name]
    path = tiny.folder() / f"gguf-{name}-{'-'.join(map(str, more.values()))}"
    wide = {**WIDE, **({"moe_intermediate_size": 256} if case.model_type == "qwen3_moe" else {}), **more}
    return path if path.exists() else tiny.write(case, path, **wide)


def write(checkpoint: Path, folder: Path, writing: Writing) -> Made:
    """Write a checkpoint as GGUF, and again as what that stands for."""
    config = json.loads((checkpoint / "config.json").read_text())
    tensors = {
        name: value.float().numpy()
        for file in sorted(checkpoint.glob("*.safetensors"))
        for name, value in load_file(file).items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    made_of, plain = _tensors(tensors, config, writing)
    name = folder / "model.gguf"
    split = {"split_max_tensors": writing.split} if writing.split else {}
    writer = gguf.GGUFWriter(name, ARCHITECTURES[config["model_type"]], **split)
    if writing.alignment:
        writer.add_custom_alignment(writing.alignment)
    _metadata(writer, config, writing)
    for tensor, (stored, kind) in made_of.items():
        writer.add_tensor(tensor, stored, raw_dtype=Type[kind])
    for tensor, more in writing.tensors.items():
        writer.add_tensor(tensor, more)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    dense = folder / "dense"
    dense.mkdir()
    (dense / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    save_file({key: torch.from_numpy(np.ascontiguousarray(value)) for key, value in plain.items()},
              dense / "model.safetensors", {"format": "pt"})  # fmt: skip
    for file in checkpoint.glob("tokenizer*.json"):
        shutil.copy(file, dense)
    return Made(next(iter(sorted(folder.glob("*.gguf")))), dense)


def _tensors(
    tensors: Mapping[str, np.ndarray], config: Mapping[str, object], writing: Writing
) -> tuple[dict[str, tuple[np.ndarray, str]], dict[str, np.ndarray]]:
    """The tensors of the file with their types, and the dense ones by the checkpoint's names."""
    seed, dim = np.random.default_rng(5), int(str(config["head_dim"]))
    is_llama = ARCHITECTURES[str(config["model_type"])] == "llama"
    groups = dict[str, list[str]]()
    for name in tensors:
        groups.setdefault(_name(name, writing), []).append(name)
    file, plain = dict[str, tuple[np.ndarray, str]](), dict[str, np.ndarray]()
    for name, of in groups.items():
        of.sort(key=lambda one: "qkv".find(one.split("_proj")[0][-1]) if "attn_qkv" in name else 0)
        whole = [tensors[one] for one in of]
        turns = [
            is_llama and one.endswith(("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias"))
            for one in of
        ]
        whole = [turned(one, dim) if turn else one for one, turn in zip(whole, turns, strict=True)]
        together = np.stack(whole) if "_exps" in name else np.concatenate(whole)
        kind = writing.of(name)
        stored, numbers = made(kind, together, seed)
        file[name] = stored, kind
        heights = np.cumsum([len(one) for one in whole])[:-1]
        parts = list(numbers) if "_exps" in name else np.split(numbers, heights)
        for one, part, turn in zip(of, parts, turns, strict=True):
            plain[one] = turned_back(part, dim) if turn else part
    return file, plain


def _name(name: str, writing: Writing) -> str:
    """The name in a file of a checkpoint's tensor."""
    stem, _, kind = name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{NAMES[stem]}.{kind}"
    _, _, layer, inside = stem.split(".", 3)
    if ".experts." in inside:
        _, expert, which = inside.rsplit(".", 2)
        stacked = EXPERTS[which]
        return f"blk.{layer}.{stacked.removesuffix('_exps')}.{expert}.{kind}" if writing.apart else (
            f"blk.{layer}.{stacked}.{kind}"
        )  # fmt: skip
    what = NAMES[inside]
    fused = writing.fused and what in ("attn_q", "attn_k", "attn_v")
    return f"blk.{layer}.{'attn_qkv' if fused else what}.{kind}"


def _metadata(writer: gguf.GGUFWriter, config: Mapping[str, object], writing: Writing) -> None:
    architecture = ARCHITECTURES[str(config["model_type"])]
    values: dict[str, object] = {}
    for key, name in KEYS.items():
        value = config.get(key)
        used = key != "sliding_window" or config.get("use_sliding_window", True)
        if isinstance(value, int) and used:
            values[f"{architecture}.{name}"] = value
    rope = config.get("rope_parameters") or {}
    assert isinstance(rope, dict)
    values[f"{architecture}.rope.freq_base"] = float(rope.get("rope_theta", 10000.0))
    values[f"{architecture}.attention.layer_norm_rms_epsilon"] = float(str(config["rms_norm_eps"]))
    values |= {"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.bos_token_id": 1}
    add(writer, values | dict(writing.metadata))


def add(writer: gguf.GGUFWriter, values: Mapping[str, object]) -> None:
    """Add metadata; None takes away."""
    for key, value in values.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
