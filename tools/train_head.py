#!/usr/bin/env python3
"""Trains a small EAGLE-3 head (arXiv 2503.01840) for a small Llama, such as the shipped model: a toy, with
which the engine's drafts can be tried.

    python3 tools/train_head.py --minutes 3 --out OUT/head

The model is frozen. It says how likely each token is behind each token of stories, and the head learns to say
the same from its hidden states, at the next token and, going on with its own outputs, at those behind it.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import stories
import torch
from needles import END_OF_TEXT
from safetensors.torch import save_file
from small_llama import Shape, SmallLlama, Weights, load, rms_norm, rope_table, rotate
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

SHIPPED = Path(__file__).resolve().parents[1] / "src" / "penstock" / "shipped"

LATER = 0.8
"""Weight of the loss of each further step, over that of the one before."""


@dataclass
class Head:
    """A head in training: its shape is its target's, with one layer."""

    shape: Shape
    weights: Weights
    ids: Tensor  # int64 [draft vocabulary]: the target's tokens
    taps: tuple[int, ...]

    def features(self, states: Tensor) -> Tensor:
        """Return features [tokens, hidden] of hidden states [tokens, 3 * hidden]."""
        return F.linear(states, self.weights["fc.weight"])

    def step(
        self, features: list[Tensor], embedded: list[Tensor], rows: int, angles: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Return the output [tokens, hidden] of the last of several steps, each one token further.

        A token sees those up to its own of the first step, and of each later step its own alone, as it will
        when it is drafted. features, embedded, angles: of each step.
        """
        w, eps, dim = self.weights, self.shape.rms_norm_eps, self.shape.head_dim
        at = "midlayer."

        def projected(step: int, name: str) -> Tensor:
            pair = torch.cat(
                (
                    rms_norm(embedded[step], w[f"{at}input_layernorm.weight"], eps),
                    rms_norm(features[step], w[f"{at}hidden_norm.weight"], eps),
                ),
                -1,
            )
            found = F.linear(pair, w[f"{at}self_attn.{name}_proj.weight"]).view(len(pair), -1, dim)
            return found if name == "v" else rotate(found, *angles[step])

        last = len(features) - 1
        q = projected(last, "q").view(rows, -1, self.shape.num_attention_heads, dim).transpose(1, 2)
        keys, values = (
            [
                projected(step, name)
                .view(rows, -1, self.shape.num_key_value_heads, dim)
                .transpose(1, 2)
                .repeat_interleave(self.shape.num_attention_heads // self.shape.num_key_value_heads, 1)
                for step in range(last + 1)
            ]
            for name in ("k", "v")
        )
        length = q.shape[2]
        scores = q @ keys[0].transpose(2, 3) / dim**0.5
        later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
        own = [(q * k).sum(-1, keepdim=True) / dim**0.5 for k in keys[1:]]
        shares = torch.cat((scores, *own), -1).softmax(-1)
        seen = shares[..., :length] @ values[0]
        for step, value in enumerate(values[1:]):
            seen = seen + shares[..., length + step, None] * value
        seen = seen.transpose(1, 2).reshape(len(features[0]), -1)
        x = features[last] + F.linear(seen, w[f"{at}self_attn.o_proj.weight"])
        y = rms_norm(x, w[f"{at}post_attention_layernorm.weight"], eps)
        inner = F.silu(F.linear(y, w[f"{at}mlp.gate_proj.weight"])) * F.linear(
            y, w[f"{at}mlp.up_proj.weight"]
        )
        return x + F.linear(inner, w[f"{at}mlp.down_proj.weight"])

    def logits(self, x: Tensor) -> Tensor:
        """Return logits of the tokens that can be drafted."""
        return F.linear(
            rms_norm(x, self.weights["norm.weight"], self.shape.rms_norm_eps), self.weights["lm_head.weight"]
        )


def new_head(shape: Shape, target: Weights, ids: Tensor, seed: int) -> Head:
    """Return a head that is not trained. It begins with the target's rows of the vocabulary."""
    rng = torch.Generator().manual_seed(seed)
    hidden, inner, dim = shape.hidden_size, shape.intermediate_size, shape.head_dim
    queries, keys = shape.num_attention_heads * dim, shape.num_key_value_heads * dim
    sizes = {
        "fc": (hidden, 3 * hidden),
        "midlayer.self_attn.q_proj": (queries, 2 * hidden),
        "midlayer.self_attn.k_proj": (keys, 2 * hidden),
        "midlayer.self_attn.v_proj": (keys, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, queries),
        "midlayer.mlp.gate_proj": (inner, hidden),
        "midlayer.mlp.up_proj": (inner, hidden),
        "midlayer.mlp.down_proj": (hidden, inner),
    }
    weights: Weights = {}
    for name, (out, into) in sizes.items():
        weights[f"{name}.weight"] = torch.randn(out, into, generator=rng) * into**-0.5
    for name in ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm"):
        weights[f"{name}.weight"] = torch.ones(hidden)
    # What is highest of the target is closest to its output: there the head begins.
    weights["fc.weight"] *= 0.1
    weights["fc.weight"][:, 2 * hidden :] += torch.eye(hidden)
    for name in ("o_proj", "down_proj"):
        place = next(one for one in weights if one.endswith(f"{name}.weight"))
        weights[place] *= 0.1
    weights["norm.weight"] = target["model.norm.weight"].clone()
    weights["lm_head.weight"] = target["model.embed_tokens.weight"][ids].clone()
    taps = (2, shape.num_hidden_layers // 2, shape.num_hidden_layers - 3)
    return Head(shape, weights, ids, taps)


def texts(tokenizer: Tokenizer, length: int, seed: int) -> Iterator[list[int]]:
    """Yield rows of so many tokens of stories, one behind the other."""
    rng, end = random.Random(seed), tokenizer.token_to_id(END_OF_TEXT)
    left: list[int] = []
    while True:
        while len(left) < length:
            left += [*tokenizer.encode(stories.make_story(rng).text).ids, end]
        yield left[:length]
        left = left[length:]


def said(model: SmallLlama, rows: Iterator[list[int]], count: int, own: int) -> Tensor:
    """Return `count` rows [count, length]: of each the second half is the model's own words for the first
    `own` of them."""
    found = []
    for number in range(count):
        row = next(rows)
        if number < own:
            half = len(row) // 2
            row = row[:half] + model.generate(row[:half], len(row) - half, set(), 1.0, number)
        found.append(row)
    return torch.tensor(found)


@torch.no_grad()
def seen(model: SmallLlama, tokens: Tensor, taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return the target's hidden states before the layers `taps`, beside each other, [tokens, 3 * hidden],
    and its logits [tokens, vocabulary]."""
    states: list[Tensor] = []
    before: Callable[..., tuple[Tensor, Tensor, Tensor]] = model._before

    def noted(x: Tensor, *more: object) -> tuple[Tensor, Tensor, Tensor]:
        states.append(x)
        return before(x, *more)

    model._before = noted
    try:
        last = model.hidden(tokens)
    finally:
        model._before = before
    return torch.cat([states[tap] for tap in taps], -1), model.logits(last)


def losses(
    head: Head, target: Weights, tokens: Tensor, states: Tensor, logits: Tensor, depth: int
) -> list[Tensor]:
    """Return the loss of each step: how far the head's likelihoods are from the target's."""
    rows, length = tokens.shape
    vocabulary = logits.shape[-1]
    kept = length - 1 - depth
    states = states.view(rows, length, -1)[:, :kept].reshape(rows * kept, -1)
    features, embedded, angles = [head.features(states)], [], []
    found = []
    for step in range(depth):
        behind = tokens[:, 1 + step : 1 + step + kept].reshape(-1)
        embedded.append(F.embedding(behind, target["model.embed_tokens.weight"]))
        where = torch.arange(step, step + kept).repeat(rows)
        angles.append(rope_table(head.shape, where))
        out = head.step(features, embedded, rows, angles)
        wanted = logits.view(rows, length, vocabulary)[:, 1 + step : 1 + step + kept].reshape(-1, vocabulary)
        shares = wanted.softmax(-1)[:, head.ids]
        found.append(-(shares * head.logits(out).log_softmax(-1)).sum(-1).mean())
        features.append(out)
    return found


def train(head: Head, model: SmallLlama, rows: Tensor, args: argparse.Namespace) -> int:
    """Train until time is over, and return the number of steps."""
    parameters = list(head.weights.values())
    for one in parameters:
        one.requires_grad_(True)
    adam = torch.optim.AdamW(parameters, lr=args.rate, betas=(0.9, 0.95), weight_decay=0.0)
    rng, begin, steps = torch.Generator().manual_seed(args.seed), time.monotonic(), 0
    while True:
        part = (time.monotonic() - begin) / (60 * args.minutes) if not args.steps else steps / args.steps
        if part >= 1:
            return steps
        batch = rows[torch.randperm(len(rows), generator=rng)[: args.batch]]
        start = int(torch.randint(rows.shape[1] - args.length + 1, (1,), generator=rng))
        batch = batch[:, start : start + args.length]
        states, logits = seen(model, batch, head.taps)
        each = losses(head, model.weights, batch, states, logits, args.depth)
        loss = sum(one * LATER**step for step, one in enumerate(each))
        assert isinstance(loss, Tensor)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for group in adam.param_groups:
            group["lr"] = args.rate * min(1.0, (steps + 1) / 20) * max(0.02, 1 - part)
        adam.step()
        adam.zero_grad()
        steps += 1
        if steps % 50 == 0:
            said_losses = " ".join(f"{float(one.detach()):.3f}" for one in each)
            print(f"step {steps}, {part:.0%}: losses {said_losses}", flush=True)


def write(head: Head, folder: Path, vocabulary: int) -> None:
    """Write the head in its authors' form, in bfloat16, without an embedding: that is its target's."""
    folder.mkdir(parents=True, exist_ok=True)
    count, shape = len(head.ids), head.shape
    tensors = {name: one.detach().to(torch.bfloat16).contiguous() for name, one in head.weights.items()}
    known = torch.zeros(vocabulary, dtype=torch.bool)
    known[head.ids] = True
    tensors |= {"d2t": head.ids - torch.arange(count), "t2d": known}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
        "hidden_size": shape.hidden_size, "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_attention_heads, "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim, "rms_norm_eps": shape.rms_norm_eps, "rope_theta": shape.rope_theta,
        "max_position_embeddings": shape.max_position_embeddings, "hidden_act": "silu",
        "tie_word_embeddings": False, "vocab_size": vocabulary, "draft_vocab_size": count,
        "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Return the settings of a run."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", type=Path, default=SHIPPED, help="[the shipped one]")
    p.add_argument("--out", type=Path, required=True, help="directory of the head")
    p.add_argument("--minutes", type=float, default=3.0, help="of training, behind what prepares it")
    p.add_argument("--steps", type=int, default=0, help="stop after so many steps, not by the clock")
    p.add_argument("--rows", type=int, default=400, help="rows of text")
    p.add_argument("--own", type=int, default=0, help="rows of these whose second half the model says")
    p.add_argument("--depth", type=int, default=4, help="tokens that are drafted one behind the other")
    p.add_argument("--batch", type=int, default=4)
    p.add_argument("--length", type=int, default=96, help="tokens of a row in a step")
    p.add_argument("--vocabulary", type=int, default=1024, help="tokens that can be drafted")
    p.add_argument("--rate", type=float, default=2e-3)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--threads", type=int, default=2)
    return p.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Make text, train on it, and write the head."""
    args = arguments(argv)
    torch.set_num_threads(args.threads)
    shape, weights = load(args.model, torch.device("cpu"), torch.float32)
    model = SmallLlama(shape, weights, torch.float32)
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    begin = time.monotonic()
    rows = said(model, texts(tokenizer, 2 * args.length, args.seed), args.rows, args.own)
    counts = torch.bincount(rows.flatten(), minlength=shape.vocab_size)
    ids = counts.argsort(descending=True)[: args.vocabulary].sort().values
    covered = float(counts[ids].sum() / counts.sum())
    print(
        f"{rows.numel():,} tokens in {time.monotonic() - begin:.0f} s, {covered:.1%} of them can be drafted",
        flush=True,
    )
    head = new_head(shape, weights, ids, args.seed)
    steps = train(head, model, rows, args)
    write(head, args.out, shape.vocab_size)
    print(f"{steps} steps; {sum(one.numel() for one in head.weights.values()):,} parameters in {args.out}")


if __name__ == "__main__":
    main()
