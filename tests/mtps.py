"""Checkpoints of GLM-4 with an MTP layer for tests, and the published arithmetic of such a layer: plain torch
around a decoder layer of transformers."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import tiny

LAYERS = 3
AT = f"model.layers.{LAYERS}"


def checkpoint(
    path: Path, name: str = "glm4_moe", *, shares: bool = False, vocab: int = tiny.VOCAB, **more: object
) -> Path:
    """A random checkpoint of a kind of GLM-4 with a layer behind the last one that predicts a further token.

    shares: whether it has no embedding and no head of its own. more: changes its config.json. Beside it,
    `whole` is the same with that layer as a usual one.
    """
    case = replace(tiny.CASES[name], shard="1GB")
    whole = tiny.write(case, path / "whole", num_hidden_layers=LAYERS + 1, vocab_size=vocab)
    config = json.loads((whole / "config.json").read_text())
    config |= {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1} | more
    config.pop("layer_types", None)
    tensors, hidden = load_file(whole / "model.safetensors"), config["hidden_size"]
    rng = torch.Generator().manual_seed(7)

    def norm() -> Tensor:
        return 1 + 0.4 * torch.randn(hidden, generator=rng)

    def matrix(rows: int, columns: int, gain: float) -> Tensor:
        return gain * torch.randn(rows, columns, generator=rng) * columns**-0.5

    tensors |= {
        f"{AT}.enorm.weight": norm(),
        f"{AT}.hnorm.weight": norm(),
        f"{AT}.eh_proj.weight": matrix(hidden, 2 * hidden, 1.5),
        f"{AT}.shared_head.norm.weight": norm(),
    }
    if not shares:  # Others than the target's, so that a test sees which are taken.
        tensors |= {
            f"{AT}.embed_tokens.weight": torch.randn(vocab, hidden, generator=rng),
            f"{AT}.shared_head.head.weight": matrix(vocab, hidden, 3.0),
        }
    return write(path / "model", config, tensors)


def write(path: Path, config: dict[str, object], tensors: dict[str, Tensor]) -> Path:
    """Write a checkpoint."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file({name: one.clone().contiguous() for name, one in tensors.items()}, path / "model.safetensors")
    return path


class PlainMtp:
    """The published arithmetic, over whole sequences, without any cache."""

    def __init__(self, path: Path) -> None:
        """path: of `checkpoint`."""

        def load(one: Path) -> torch.nn.Module:
            return transformers.AutoModelForCausalLM.from_pretrained(one, dtype=torch.float32).eval()

        self.target, self.tensors = load(path), load_file(path / "model.safetensors")
        whole = load(path.parent / "whole")
        self.layer, self.rotary = whole.model.layers[LAYERS], whole.model.rotary_emb
        self.eps = whole.config.rms_norm_eps
        self.known = list[tuple[tuple[int, ...], Tensor]]()

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.tensors[f"{AT}.{name}.weight"]
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * weight

    def _own(self, name: str, of_target: str) -> Tensor:
        return self.tensors.get(f"{AT}.{name}.weight", self.tensors[f"{of_target}.weight"])

    @torch.inference_mode()
    def hidden(self, tokens: Sequence[int]) -> Tensor:
        """The target's hidden states behind its last norm, `[tokens, hidden]`. Those of a longer sequence
        begin with them."""
        for longer, states in self.known:
            if longer[: len(tokens)] == tuple(tokens):
                return states[: len(tokens)]
        states = self.target.model(torch.tensor([tokens])).last_hidden_state[0]
        self.known.append((tuple(tokens), states))
        return states

    @torch.inference_mode()
    def outputs(self, hidden: Tensor, behind: Sequence[int]) -> list[Tensor]:
        """The outputs behind the layer's own last norm, `[hidden]`, at the last of these tokens that has the
        target's hidden state of the token before, and at each behind it: of a draft, along which the layer
        goes on with its own output.
        """
        outputs = list[Tensor]()
        while True:
            count = len(hidden)
            embedded = self._own("embed_tokens", "model.embed_tokens")[torch.tensor(behind[:count])]
            pairs = torch.cat((self._norm(embedded, "enorm"), self._norm(hidden, "hnorm")), -1)
            x = (pairs @ self.tensors[f"{AT}.eh_proj.weight"].T)[None]
            places = torch.arange(count)[None]
            mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
            out = self.layer(
                x,
                attention_mask=mask,
                position_ids=places,
                position_embeddings=self.rotary(x, places),
            )
            out = out[0] if isinstance(out, tuple) else out
            outputs.append(self._norm(out[0], "shared_head.norm")[-1])
            if count == len(behind):
                return outputs
            hidden = torch.cat((hidden, outputs[-1][None]))

    def logits(self, out: Tensor) -> Tensor:
        """Logits of all tokens."""
        return out @ self._own("shared_head.head", "lm_head").T
