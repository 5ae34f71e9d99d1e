"""The model of a checkpoint in float64, token by token from its tensors alone, and what an engine says of the
same prompts."""

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

import tiny
import toys
from penstock.api.llm import LLM
from penstock.arch.layout import kv_layout
from penstock.arch.mixers.attention import Attention
from penstock.arch.mixers.mixer import Mixer
from penstock.arch.rope import inverse_frequencies
from penstock.arch.spec import ModelSpec
from penstock.step.params import SamplingParams
from penstock.weights.checkpoint.reader import Checkpoint

LIMIT = 1e-4
"""How far log-probabilities in float32 may lie apart."""
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3, prompt_logprobs=1)
BLOCK = 8
SETTINGS = {"device": "cpu", "dtype": "float32", "max_length": 200, "block_size": BLOCK, "check": True}
Drawn = tuple[list[int], list[float]]
"""Tokens, and the log-probability of each of the prompt's after the first and of the output's."""


class Reference:
    """Logits of a checkpoint in float64."""

    def __init__(self, path: Path) -> None:
        with Checkpoint.open(path) as checkpoint:
            self.spec: ModelSpec = checkpoint.spec
        self.t = {name: one.double() for name, one in load_file(path / "model.safetensors").items()}

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Of all positions, `[tokens, vocab]`."""
        spec = self.spec
        x = self.t["model.embed_tokens.weight"][list(tokens)] * spec.embedding_scale
        for number, layer in enumerate(spec.stack):
            at, norms = f"model.layers.{number}", (layer.mixer_norms, layer.feed_forward_norms)
            blocks = lambda y, at=at, layer=layer: self.mixed(y, at, layer.mixer), self.feed_forward(at)
            for block, norm in zip(blocks, norms, strict=True):
                out = block(self.norm(x, at, norm.before))
                x = x + self.norm(out, at, norm.after) * layer.scale
        head = "model.embed_tokens" if spec.tied_embeddings else "lm_head"
        logits = self.norm(x, "model", "norm") @ self.t[f"{head}.weight"].T * spec.logits_scale
        return logits if spec.logits_cap is None else spec.logits_cap * torch.tanh(logits / spec.logits_cap)

    def norm(self, x: Tensor, at: str, name: str | None) -> Tensor:
        if name is None:
            return x
        return (
            x
            / (x.square().mean(-1, keepdim=True) + self.spec.norm_eps).sqrt()
            * self.t[f"{at}.{name}.weight"]
        )

    def feed_forward(self, at: str):  # type: ignore[no-untyped-def]
        gate, up, down = (self.t[f"{at}.mlp.{one}_proj.weight"] for one in ("gate", "up", "down"))
        return lambda x: (F.silu(x @ gate.T) * (x @ up.T)) @ down.T

    def mixed(self, x: Tensor, at: str, mixer: Mixer) -> Tensor:
        if isinstance(mixer, toys.Tilted):
            out, *tilts = self.attended(x, f"{at}.tilted.{{}}.weight", ("q", "k", "v", "tilt"), mixer)
            for tilt in tilts:
                out = out * (1 + tilt.mean(-1, keepdim=True))
            return out.flatten(1) @ self.t[f"{at}.tilted.out.weight"].T
        if isinstance(mixer, toys.Gated):
            return self.gated(x, f"{at}.gated", mixer)
        assert isinstance(mixer, Attention)
        [out] = self.attended(x, f"{at}.self_attn.{{}}_proj.weight", ("q", "k", "v"), mixer)
        return out.flatten(1) @ self.t[f"{at}.self_attn.o_proj.weight"].T

    def gated(self, x: Tensor, at: str, mixer: Mixer) -> Tensor:
        """Without state: every token from all that come up to it."""
        q, k, v, gate = (
            (x @ self.t[f"{at}.{name}.weight"].T).view(len(x), mixer.heads, -1)
            for name in ("q", "k", "v", "gate")
        )
        taps = [self.t[f"{at}.tap_{number}.weight"].view(mixer.heads, -1) for number in range(3)]
        padded = F.pad(v, (0, 0, 0, 0, 2, 0))
        v = sum(tap * padded[number : number + len(x)] for number, tap in enumerate(taps))  # type: ignore
        fades = F.logsigmoid(gate[..., 0]).cumsum(0)  # [tokens, heads]
        later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)[..., None]
        left = (fades[:, None] - fades[None]).masked_fill(later, -math.inf).exp()
        scores = torch.einsum("qhd,khd->qkh", q, k) / mixer.head_dim * left
        out = torch.einsum("qkh,khd->qhd", scores, v)
        return out.flatten(1) @ self.t[f"{at}.out.weight"].T

    def attended(self, x: Tensor, at: str, names: Sequence[str], mixer: Mixer) -> list[Tensor]:
        """Softmax attention over all values, `[tokens, heads, width]` of each."""
        heads = [mixer.heads, *[mixer.kv_heads] * (len(names) - 1)]
        q, k, *values = (
            (x @ self.t[at.format(name)].T).view(len(x), count, -1)
            for name, count in zip(names, heads, strict=True)
        )
        group = mixer.heads // mixer.kv_heads
        k, *values = (one.repeat_interleave(group, 1) for one in (self.turned(k), *values))
        scale, cap = getattr(mixer, "scale", None), getattr(mixer, "cap", None)
        scores = torch.einsum("qhd,khd->hqk", self.turned(q), k) * (scale or mixer.head_dim**-0.5)
        scores = scores if cap is None else cap * torch.tanh(scores / cap)
        scores += torch.full((len(x), len(x)), -math.inf).triu(1)
        return [torch.einsum("hqk,khd->qhd", scores.softmax(-1), one) for one in values]

    def turned(self, x: Tensor) -> Tensor:
        frequencies = torch.tensor(inverse_frequencies(self.spec.rope), dtype=torch.float64)
        angles = torch.arange(len(x))[:, None] * frequencies
        a, b = x.chunk(2, -1)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def prompts() -> list[list[int]]:
    random = torch.Generator().manual_seed(5)
    return [torch.randint(tiny.VOCAB, (length,), generator=random).tolist() for length in (5, 120, 61)]


def outputs(path: Path, **settings: object) -> list[Drawn]:
    with LLM(path, **SETTINGS | settings) as llm:  # type: ignore[arg-type]
        return drawn(llm)


def drawn(llm: LLM, params: SamplingParams = GREEDY) -> list[Drawn]:
    found = []
    for one in llm.generate(prompts(), params):
        scores = [entry.logprob for entry in (*(one.prompt_logprobs or ())[1:], *(one.logprobs or ()))]
        found.append((list(one.tokens), scores))
    return found


def confirms(path: Path, found: list[Drawn]) -> bool:
    """Whether the reference says the same of the prompts and of what was drawn."""
    reference = Reference(path)
    for prompt, (tokens, scores) in zip(prompts(), found, strict=True):
        every = [*prompt, *tokens]
        logits = reference.logits(every)
        expected = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(every)[1:, None])[:, 0]
        alike = torch.allclose(torch.tensor(scores).double(), expected, atol=LIMIT, rtol=0)
        if not alike or logits[len(prompt) - 1 : -1].argmax(-1).tolist() != tokens:
            return False
    return True


def close(found: list[Drawn], expected: list[Drawn]) -> bool:
    return all(
        tokens == others and torch.allclose(torch.tensor(scores), torch.tensor(wanted), atol=LIMIT, rtol=0)
        for (tokens, scores), (others, wanted) in zip(found, expected, strict=True)
    )


def host(path: Path, blocks: int) -> int:
    """Bytes of so many blocks on the host."""
    with Checkpoint.open(path) as checkpoint:
        return blocks * kv_layout(checkpoint.spec, "float32", BLOCK).block_bytes
