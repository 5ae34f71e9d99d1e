#!/usr/bin/env python3
"""Trains a sibling of the shipped model, of about a million parameters and with the same tokenizer, to draft
for it.

    python3 tools/train_sibling.py --minutes 5 --out OUT/sibling

It learns to be as likely to say each token of stories as the large model is.
"""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path

import torch
from needles import END_OF_TEXT, END_OF_TURN
from small_llama import MATRICES, Shape, SmallLlama, export, init_weights, load
from tokenizers import Tokenizer
from torch.nn import functional as F
from train_head import SHIPPED, said, texts


def sibling_of(shape: Shape) -> Shape:
    """Return the shape of a model with the same tokens."""
    return Shape(
        vocab_size=shape.vocab_size,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        rope_theta=shape.rope_theta,
        rms_norm_eps=shape.rms_norm_eps,
        max_position_embeddings=shape.max_position_embeddings,
    )


def train(small: SmallLlama, large: SmallLlama, rows: torch.Tensor, args: argparse.Namespace) -> int:
    """Train until time is over, and return the number of steps."""
    parameters = list(small.weights.values())
    for one in parameters:
        one.requires_grad_(True)
    matrices = [w for name, w in small.weights.items() if name.removesuffix(".weight").endswith(MATRICES)]
    others = [w for w in parameters if all(w is not one for one in matrices)]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=args.rate, betas=(0.9, 0.95))
    rng, begin, steps = torch.Generator().manual_seed(args.seed), time.monotonic(), 0
    while True:
        part = (time.monotonic() - begin) / (60 * args.minutes) if not args.steps else steps / args.steps
        if part >= 1:
            return steps
        batch = rows[torch.randperm(len(rows), generator=rng)[: args.batch]]
        start = int(torch.randint(rows.shape[1] - args.length + 1, (1,), generator=rng))
        batch = batch[:, start : start + args.length]
        with torch.no_grad():
            wanted = large.logits(large.hidden(batch)).softmax(-1)
        loss = F.cross_entropy(small.logits(small.hidden(batch)), wanted)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for group in adam.param_groups:
            group["lr"] = args.rate * min(1.0, (steps + 1) / 30) * max(0.02, 1 - part)
        adam.step()
        adam.zero_grad()
        steps += 1
        if steps % 100 == 0:
            print(f"step {steps}, {part:.0%}: loss {float(loss.detach()):.3f}", flush=True)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Return the settings of a run."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", type=Path, default=SHIPPED, help="the large one [the shipped one]")
    p.add_argument("--out", type=Path, required=True, help="directory of the sibling")
    p.add_argument("--minutes", type=float, default=5.0, help="of training, behind what prepares it")
    p.add_argument("--steps", type=int, default=0, help="stop after so many steps, not by the clock")
    p.add_argument("--rows", type=int, default=4000, help="rows of text")
    p.add_argument("--own", type=int, default=0, help="rows of these whose second half the large model says")
    p.add_argument("--batch", type=int, default=8)
    p.add_argument("--length", type=int, default=128, help="tokens of a row in a step")
    p.add_argument("--rate", type=float, default=4e-3)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--threads", type=int, default=2)
    return p.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Make text, train on it, and write the sibling."""
    args = arguments(argv)
    torch.set_num_threads(args.threads)
    device = torch.device("cpu")
    shape, weights = load(args.model, device, torch.float32)
    large = SmallLlama(shape, weights, torch.float32)
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    rows = said(large, texts(tokenizer, 2 * args.length, args.seed), args.rows, args.own)
    own = sibling_of(shape)
    small = SmallLlama(own, init_weights(own, args.seed, device), torch.float32)
    steps = train(small, large, rows, args)
    ends = [tokenizer.token_to_id(name) for name in (END_OF_TURN, END_OF_TEXT)]
    export(args.out, own, small.weights, torch.bfloat16, ends, ends[1])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(args.model / name, args.out / name)
    print(f"{steps} steps; {sum(one.numel() for one in small.weights.values()):,} parameters in {args.out}")


if __name__ == "__main__":
    main()
