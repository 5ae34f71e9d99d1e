"""A compact Llama in plain torch for training and checking small models: weights are a dict under their
Hugging Face names."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

Weights = dict[str, Tensor]
MATRICES = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


@dataclass(frozen=True)
class Shape:
    """The model's dimensions."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 704
    num_hidden_layers: int = 8
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    rope_theta: float = 500_000.0
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 32_768

    def matrix_shapes(self) -> dict[str, tuple[int, int]]:
        """Name within a layer -> [out, in]."""
        h, q, kv, m = (
            self.hidden_size,
            self.num_attention_heads * self.head_dim,
            self.num_key_value_heads * self.head_dim,
            self.intermediate_size,
        )
        return dict(zip(MATRICES, ((q, h), (kv, h), (kv, h), (h, q), (m, h), (m, h), (h, m)), strict=True))


def init_weights(shape: Shape, seed: int, device: torch.device) -> Weights:
    """fp32 weights; the matrices that write to the residual stream start at zero, so that every layer begins
    as the identity."""
    gen = torch.Generator().manual_seed(seed)
    weights = {
        "model.embed_tokens.weight": torch.randn(shape.vocab_size, shape.hidden_size, generator=gen) * 0.02
    }
    for layer in range(shape.num_hidden_layers):
        for name, (rows, cols) in shape.matrix_shapes().items():
            matrix = torch.randn(rows, cols, generator=gen) / math.sqrt(cols)
            weights[f"model.layers.{layer}.{name}.weight"] = matrix * (
                0.0 if name.endswith(("o_proj", "down_proj")) else 1.0
            )
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{norm}.weight"] = torch.ones(shape.hidden_size)
    weights["model.norm.weight"] = torch.ones(shape.hidden_size)
    return {name: w.to(device) for name, w in weights.items()}


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension, computed in fp32."""
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return y.to(x.dtype) * weight.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, halves split as in Llama. x [tokens, heads, dim], cos and sin [tokens, dim / 2]."""
    a, b = x.float().chunk(2, dim=-1)
    c, s = cos[:, None], sin[:, None]
    return torch.cat((a * c - b * s, b * c + a * s), dim=-1).to(x.dtype)


def rope_table(shape: Shape, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [tokens, head_dim / 2] in fp32."""
    exponent = (
        torch.arange(0, shape.head_dim, 2, device=positions.device, dtype=torch.float32) / shape.head_dim
    )
    angles = positions.float()[:, None] / shape.rope_theta**exponent
    return angles.cos(), angles.sin()


def before_attention(
    x: Tensor,
    norm: Tensor,
    wq: Tensor,
    wk: Tensor,
    wv: Tensor,
    angles: tuple[Tensor, Tensor],
    head_dim: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v as [tokens, heads, dim] from the residual stream x [tokens, hidden].

    angles: cos and sin [tokens, dim / 2].
    """
    y = rms_norm(x, norm, eps)
    q, k, v = [F.linear(y, w.to(x.dtype)).view(x.shape[0], -1, head_dim) for w in (wq, wk, wv)]
    return rotate(q, *angles), rotate(k, *angles), v


def after_attention(
    x: Tensor, attended: Tensor, wo: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor, eps: float
) -> Tensor:
    """The rest of a layer: output projection and SwiGLU, each added to the residual stream."""
    x = x + F.linear(attended, wo.to(x.dtype))
    y = rms_norm(x, norm, eps)
    return x + F.linear(F.silu(F.linear(y, gate.to(x.dtype))) * F.linear(y, up.to(x.dtype)), down.to(x.dtype))


def head_losses(
    x: Tensor, norm: Tensor, embedding: Tensor, targets: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Negative log-likelihood per token and whether the target is the likeliest token."""
    logits = F.linear(rms_norm(x, norm, eps), embedding.to(x.dtype)).float()
    losses = F.cross_entropy(logits, targets, reduction="none")
    return losses, logits.detach().argmax(-1) == targets


def attend(q: Tensor, k: Tensor, v: Tensor, rows: int) -> Tensor:
    """Causal attention within each of `rows` equal rows. [tokens, heads, dim] -> [tokens, heads * dim]."""
    q, k, v = (t.view(rows, -1, *t.shape[1:]).transpose(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2).reshape(-1, q.shape[1] * q.shape[3])


class SmallLlama:
    """The forward pass over flat tokens of equal rows. `compiled` fuses what lies between the attentions:
    these parts see only the number of tokens, so that one compilation serves every row length."""

    def __init__(self, shape: Shape, weights: Weights, dtype: torch.dtype, compiled: bool = False) -> None:
        self.shape, self.weights, self.dtype = shape, weights, dtype
        wrap: Callable = (lambda f: torch.compile(f, dynamic=False)) if compiled else (lambda f: f)
        self._before, self._after, self._head = (
            wrap(before_attention),
            wrap(after_attention),
            wrap(head_losses),
        )
        self._tables: dict[int, tuple[Tensor, Tensor]] = {}
        self.backends: dict[
            int, SDPBackend
        ] = {}  # row length -> which fused attention; PyTorch chooses where none is named

    def table(self, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin of `rows` rows that each start at position 0."""
        if length not in self._tables:
            device = self.weights["model.norm.weight"].device
            self._tables[length] = rope_table(self.shape, torch.arange(length, device=device).repeat(rows))
        cos, sin = self._tables[length]
        if len(cos) != rows * length:
            del self._tables[length]
            return self.table(rows, length)
        return cos, sin

    def hidden(
        self, tokens: Tensor, cache: list[tuple[Tensor, Tensor]] | None = None, start: int = 0
    ) -> Tensor:
        """tokens [rows, length] -> residual stream [rows * length, hidden]. With a cache (one row): its keys
        and values are extended."""
        rows, length = tokens.shape
        shape, w = self.shape, self.weights
        if cache is None:
            angles = self.table(rows, length)
        else:
            angles = rope_table(shape, torch.arange(start, start + length, device=tokens.device))
        x = F.embedding(tokens.reshape(-1), w["model.embed_tokens.weight"].to(self.dtype))
        for layer in range(shape.num_hidden_layers):
            p = f"model.layers.{layer}."
            wq, wk, wv, wo, gate, up, down = (w[f"{p}{name}.weight"] for name in MATRICES)
            q, k, v = self._before(
                x, w[p + "input_layernorm.weight"], wq, wk, wv, angles, shape.head_dim, shape.rms_norm_eps
            )
            if cache is not None and start:
                k, v = torch.cat((cache[layer][0], k)), torch.cat((cache[layer][1], v))
                cache[layer] = (k, v)
                kv = [t.transpose(0, 1)[None] for t in (q, k, v)]
                out = (
                    F.scaled_dot_product_attention(*kv, enable_gqa=True)[0]
                    .transpose(0, 1)
                    .reshape(length, -1)
                )
            else:
                with (
                    sdpa_kernel(self.backends[length])
                    if length in self.backends
                    else contextlib.nullcontext()
                ):
                    out = attend(q, k, v, rows)
                if cache is not None:
                    cache.append((k, v))
            x = self._after(
                x, out, wo, w[p + "post_attention_layernorm.weight"], gate, up, down, shape.rms_norm_eps
            )
        return x

    def losses(self, tokens: Tensor, targets: Tensor, chunk: int = 32_768) -> tuple[Tensor, Tensor]:
        """Loss and hit per token, flat. The logits of a chunk of tokens exist at a time."""
        x = self.hidden(tokens)
        norm, embedding = self.weights["model.norm.weight"], self.weights["model.embed_tokens.weight"]
        parts = [
            self._head(xs, norm, embedding, ts, self.shape.rms_norm_eps)
            for xs, ts in zip(x.split(chunk), targets.reshape(-1).split(chunk), strict=True)
        ]
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])

    def logits(self, x: Tensor) -> Tensor:
        """Logits in fp32 of some rows of the residual stream."""
        y = rms_norm(x, self.weights["model.norm.weight"], self.shape.rms_norm_eps)
        return F.linear(y, self.weights["model.embed_tokens.weight"].to(x.dtype)).float()

    @torch.no_grad()
    def generate(
        self, prompt: list[int], count: int, stop: set[int], temperature: float = 0.0, seed: int = 0
    ) -> list[int]:
        """Continue one prompt, greedily at temperature 0, up to and without a stop token. One token a step,
        with a KV cache."""
        device = self.weights["model.norm.weight"].device
        gen = torch.Generator(device).manual_seed(seed)
        cache: list[tuple[Tensor, Tensor]] = []
        x, start, out = self.hidden(torch.tensor([prompt], device=device), cache), len(prompt), []
        for _ in range(count):
            logits = self.logits(x[-1:])[0]
            chosen = (
                torch.multinomial((logits / temperature).softmax(-1), 1, generator=gen)
                if temperature
                else logits.argmax()
            )
            token = int(chosen)
            if token in stop:
                break
            out.append(token)
            x = self.hidden(torch.tensor([[token]], device=device), cache, start)
            start += 1
        return out


def export(
    folder: Path, shape: Shape, weights: Weights, dtype: torch.dtype, eos: list[int], bos: int
) -> None:
    """Write a checkpoint that transformers (4 and 5) read as a LlamaForCausalLM."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {n: w.detach().to(dtype).cpu().contiguous() for n, w in weights.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    name = str(dtype).removeprefix("torch.")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", **asdict(shape),
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "initializer_range": 0.02, "use_cache": True, "bos_token_id": bos, "eos_token_id": eos,
        "pad_token_id": bos,
        "torch_dtype": name, "dtype": name,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": bos,
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.95,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def load(folder: Path, device: torch.device, dtype: torch.dtype) -> tuple[Shape, Weights]:
    """Read a checkpoint written by `export`."""
    config = json.loads((folder / "config.json").read_text())
    shape = Shape(**{k: config[k] for k in Shape.__dataclass_fields__})
    return shape, {n: w.to(device, dtype) for n, w in load_file(folder / "model.safetensors").items()}
