"""Draft heads of EAGLE-3 for tests: random ones for any target, in both forms, and the published arithmetic
in plain torch."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

import tiny

DRAFT_VOCAB = 41
USUAL = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}


def config_of(
    target: Mapping[str, object], nested: bool, kind: str = "llama", **more: object
) -> dict[str, object]:
    """The config of a head for a target with this config, in the authors' form or in that of
    `speculators`. kind: of its layer."""
    hidden = target["hidden_size"]
    layer = {
        "model_type": kind,
        "hidden_size": hidden,
        "head_dim": hidden // USUAL["num_attention_heads"],
        "vocab_size": target["vocab_size"],
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        **USUAL,
    }
    head = {"draft_vocab_size": DRAFT_VOCAB, "torch_dtype": "float32", **more}
    if not nested:
        return {"architectures": ["LlamaForCausalLMEagle3"]} | layer | head
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3"},
        "transformer_layer_config": layer,
        **head,
    }


def tensors_of(config: Mapping[str, object], seed: int = 0, *, embeds: bool = True) -> dict[str, Tensor]:
    """Random tensors of a head, in the authors' names."""
    layer = config.get("transformer_layer_config", config)
    assert isinstance(layer, Mapping)
    hidden, vocab, inner = layer["hidden_size"], layer["vocab_size"], layer["intermediate_size"]
    heads, kv_heads = layer["num_attention_heads"], layer["num_key_value_heads"]
    dim = layer.get("head_dim", hidden // heads)
    draft, taps = config["draft_vocab_size"], len(config.get("eagle_aux_hidden_state_layer_ids") or "abc")
    rng = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=rng) * columns**-0.5

    def norm(width: int = hidden) -> Tensor:
        return 1 + 0.3 * torch.randn(width, generator=rng)

    at = "midlayer."
    ids = torch.randperm(vocab, generator=rng)[:draft].sort().values
    known = torch.zeros(vocab, dtype=torch.bool)
    known[ids] = True
    tensors = {
        "fc.weight": matrix(hidden, taps * hidden),
        f"{at}input_layernorm.weight": norm(),
        f"{at}hidden_norm.weight": norm(),
        f"{at}post_attention_layernorm.weight": norm(),
        f"{at}self_attn.q_proj.weight": 2 * matrix(heads * dim, 2 * hidden),
        f"{at}self_attn.k_proj.weight": 2 * matrix(kv_heads * dim, 2 * hidden),
        f"{at}self_attn.v_proj.weight": matrix(kv_heads * dim, 2 * hidden),
        f"{at}self_attn.o_proj.weight": matrix(hidden, heads * dim),
        f"{at}mlp.gate_proj.weight": matrix(inner, hidden),
        f"{at}mlp.up_proj.weight": matrix(inner, hidden),
        f"{at}mlp.down_proj.weight": matrix(hidden, inner),
        "norm.weight": norm(),
        "lm_head.weight": 3 * matrix(draft, hidden),
        "d2t": ids - torch.arange(draft),
        "t2d": known,
    }
    if layer["model_type"] == "qwen3":
        tensors |= {f"{at}self_attn.{name}_norm.weight": norm(dim) for name in "qk"}
    if embeds:
        tensors["embed_tokens.weight"] = torch.randn(vocab, hidden, generator=rng)
    if config.get("norm_before_fc"):
        tensors["input_norm.weight"] = norm(taps * hidden)
    if config.get("fc_norm"):
        tensors |= {f"fc_norm.{tap}.weight": norm() for tap in range(taps)}
    return tensors


def write(path: Path, config: Mapping[str, object], tensors: Mapping[str, Tensor]) -> Path:
    """Write a head; in the form of `speculators` its layer has another name."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if "speculators_model_type" in config:
        tensors = {name.replace("midlayer.", "layers.0."): one for name, one in tensors.items()}
    save_file({name: one.contiguous() for name, one in tensors.items()}, path / "model.safetensors")
    return path


def random_head(
    path: Path, name: str, *, nested: bool = False, embeds: bool = True, seed: int = 0, **more: object
) -> Path:
    """A random head for the tiny checkpoint of a family."""
    target = json.loads((tiny.checkpoint(name) / "config.json").read_text())
    config = config_of(target, nested, **{"eagle_aux_hidden_state_layer_ids": [1, 2, 3]} | more)
    return write(path, config, tensors_of(config, seed, embeds=embeds))


@dataclass
class PlainHead:
    """The published arithmetic of a head, over whole sequences, without any cache.

    embedding: the target's, where the head has none.
    """

    config: Mapping[str, object]
    tensors: Mapping[str, Tensor]
    embedding: Tensor

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight

    def features(self, taps: Sequence[Tensor]) -> Tensor:
        """Features of the target's hidden states, each `[tokens, hidden]`."""
        joined = torch.cat(tuple(taps), -1)
        if self.config.get("norm_before_fc"):
            joined = self._norm(joined, self.tensors["input_norm.weight"])
        if self.config.get("fc_norm"):
            joined = torch.cat(
                [self._norm(one, self.tensors[f"fc_norm.{at}.weight"]) for at, one in enumerate(taps)], -1
            )
        return joined @ self.tensors["fc.weight"].T

    def layer(self, features: Tensor, tokens: Tensor) -> Tensor:
        """The layer's output of pairs of features and the token behind, each seeing those before."""
        w, at = self.tensors, "midlayer."
        hidden = features.shape[1]
        heads, kv_heads = USUAL["num_attention_heads"], USUAL["num_key_value_heads"]
        dim = hidden // heads
        embedded = self._norm(self.embedding[tokens], w[f"{at}input_layernorm.weight"])
        normed = self._norm(features, w[f"{at}hidden_norm.weight"])
        residual = normed if self.config.get("norm_before_residual") else features
        pairs = torch.cat((embedded, normed), -1)
        q, k, v = (
            (pairs @ w[f"{at}self_attn.{name}_proj.weight"].T).view(len(tokens), count, dim).transpose(0, 1)
            for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        if f"{at}self_attn.q_norm.weight" in w:
            q, k = (self._norm(x, w[f"{at}self_attn.{name}_norm.weight"]) for x, name in ((q, "q"), (k, "k")))
        angles = torch.arange(len(tokens))[:, None] * 10000.0 ** (-torch.arange(0, dim, 2) / dim)
        cos, sin = torch.cat((angles, angles), 1).cos(), torch.cat((angles, angles), 1).sin()

        def turned(x: Tensor) -> Tensor:
            left, right = x.chunk(2, -1)
            return x * cos + torch.cat((-right, left), -1) * sin

        seen = F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True, enable_gqa=True)
        seen = seen.transpose(0, 1).reshape(len(tokens), heads * dim)
        x = residual + seen @ w[f"{at}self_attn.o_proj.weight"].T
        y = self._norm(x, w[f"{at}post_attention_layernorm.weight"])
        inner = F.silu(y @ w[f"{at}mlp.gate_proj.weight"].T) * (y @ w[f"{at}mlp.up_proj.weight"].T)
        return x + inner @ w[f"{at}mlp.down_proj.weight"].T

    def logits(self, out: Tensor) -> Tensor:
        """Logits of the tokens that can be drafted."""
        return self._norm(out, self.tensors["norm.weight"]) @ self.tensors["lm_head.weight"].T

    @property
    def ids(self) -> Tensor:
        """The target's token of each that can be drafted."""
        return torch.arange(len(self.tensors["lm_head.weight"])) + self.tensors["d2t"]

    def outputs(self, taps: Sequence[Tensor], behind: Sequence[int]) -> Iterator[Tensor]:
        """The outputs, `[hidden]`, at the last of these tokens that has hidden states of the token before,
        and at each behind it: of a draft, along which the head goes on with its own."""
        features = self.features(taps)
        while True:
            out = self.layer(features, torch.tensor(behind[: len(features)]))
            yield out[-1]
            if len(features) == len(behind):
                return
            onward = self._norm(out, self.tensors["norm.weight"]) if self.config.get("norm_output") else out
            features = torch.cat((features, onward[-1:]))
