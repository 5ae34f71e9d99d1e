"""Trains a small mixture of experts on real text, and records how it routes: benchmarks need a routing that
training has made, and random weights route unlike it.

PYTHONPATH=src python3 tools/small_moe.py --minutes 6 --text DIR --out OUT/model --routings OUT/routings
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import shlex
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from corpus import build_corpus, prose_document, save_tokenizer, tokenizer_texts, train_tokenizer
from muon import Muon
from needles import END_OF_TEXT, END_OF_TURN
from safetensors.torch import load_file, save_file
from small_llama import Weights, attend, head_losses, rms_norm, rotate
from tokenizers import Tokenizer, processors
from torch import Tensor
from torch.utils.checkpoint import checkpoint

HELD_BACK = 0.06  # of the end of every book: it is not trained on, and its routing is recorded


@dataclass(frozen=True)
class MoeShape:
    """The model's dimensions, under the names of a Qwen3-MoE config."""

    vocab_size: int = 4096
    hidden_size: int = 384
    moe_intermediate_size: int = 64
    num_hidden_layers: int = 8
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 64
    num_experts: int = 64
    num_experts_per_tok: int = 4
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 4096

    def matrix_shapes(self) -> dict[str, tuple[int, int]]:
        """Name within a layer -> [out, in], without the experts'."""
        h, q, kv = (
            self.hidden_size,
            self.num_attention_heads * self.head_dim,
            self.num_key_value_heads * self.head_dim,
        )
        return {
            "self_attn.q_proj": (q, h),
            "self_attn.k_proj": (kv, h),
            "self_attn.v_proj": (kv, h),
            "self_attn.o_proj": (h, q),
            "mlp.gate": (self.num_experts, h),
        }

    def expert_shapes(self) -> dict[str, tuple[int, int]]:
        """Name within an expert -> [out, in]."""
        h, m = self.hidden_size, self.moe_intermediate_size
        return {"gate_proj": (m, h), "up_proj": (m, h), "down_proj": (h, m)}


def init_weights(shape: MoeShape, seed: int) -> Weights:
    """fp32 weights under their Hugging Face names; what writes to the residual stream starts at zero."""
    gen = torch.Generator().manual_seed(seed)
    weights = {
        "model.embed_tokens.weight": torch.randn(shape.vocab_size, shape.hidden_size, generator=gen) * 0.02
    }
    for layer in range(shape.num_hidden_layers):
        p = f"model.layers.{layer}."
        every = dict(shape.matrix_shapes())
        for expert in range(shape.num_experts):
            every |= {f"mlp.experts.{expert}.{name}": size for name, size in shape.expert_shapes().items()}
        for name, (rows, cols) in every.items():
            matrix = torch.randn(rows, cols, generator=gen) / math.sqrt(cols)
            weights[f"{p}{name}.weight"] = matrix * (0.0 if name.endswith(("o_proj", "down_proj")) else 1.0)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{p}{norm}.weight"] = torch.ones(shape.hidden_size)
        for norm in ("self_attn.q_norm", "self_attn.k_norm"):
            weights[f"{p}{norm}.weight"] = torch.ones(shape.head_dim)
    weights["model.norm.weight"] = torch.ones(shape.hidden_size)
    return weights


def route(x: Tensor, router: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Chosen experts and their normalised shares [tokens, top_k], and the balance: 1 where all are used
    evenly (Switch Transformer, arXiv 2101.03961, equation 4)."""
    probabilities = F.linear(x.float(), router.float()).softmax(-1)
    shares, chosen = probabilities.topk(top_k)
    used = torch.zeros_like(probabilities[0]).index_add_(
        0, chosen.flatten(), torch.ones_like(shares).flatten()
    )
    balance = len(router) * (used / used.sum() * probabilities.mean(0)).sum()
    return chosen, shares / shares.sum(-1, keepdim=True), balance


def mixture(x: Tensor, chosen: Tensor, shares: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Each token through its experts: pairs are sorted by expert and padded to the most that one has.

    x [tokens, hidden]; gate and up [experts, inner, hidden], down [experts, hidden, inner].
    """
    experts, top_k = len(gate), chosen.shape[1]
    order = chosen.flatten().argsort(stable=True)
    expert = chosen.flatten()[order]
    counts = torch.bincount(expert, minlength=experts)
    most = -(-int(counts.max()) // 64) * 64
    place = expert * most + torch.arange(len(order), device=x.device) - (counts.cumsum(0) - counts)[expert]
    rows = x.new_zeros(experts * most, x.shape[1]).index_copy(0, place, x[order // top_k])
    rows = rows.view(experts, most, -1)
    inner = F.silu(torch.bmm(rows, gate.mT)) * torch.bmm(rows, up.mT)
    out = torch.bmm(inner, down.mT).flatten(0, 1)[place]
    weighted = out * shares.flatten()[order].to(x.dtype).unsqueeze(1)
    return torch.zeros_like(x).index_add(0, order // top_k, weighted)


class SmallMoe:
    """The forward pass over rows of equal length. Activations of a layer are computed again on the way back,
    where `again` is set: a step may then be as large as the device likes."""

    def __init__(self, shape: MoeShape, weights: Weights, dtype: torch.dtype, again: bool = False) -> None:
        self.shape, self.weights, self.dtype, self.again = shape, weights, dtype, again

    def layer(self, x: Tensor, layer: int, rows: int, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """One layer: the residual stream [tokens, hidden], and the balance of its router."""
        shape, w, p = self.shape, self.weights, f"model.layers.{layer}."

        def linear(y: Tensor, name: str) -> Tensor:
            return F.linear(y, w[f"{p}{name}.weight"].to(y.dtype))

        def norm(y: Tensor, name: str) -> Tensor:
            return rms_norm(y, w[f"{p}{name}.weight"], shape.rms_norm_eps)

        y = norm(x, "input_layernorm")
        q, k, v = (
            linear(y, f"self_attn.{name}").view(len(x), -1, shape.head_dim)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        q, k = rotate(norm(q, "self_attn.q_norm"), cos, sin), rotate(norm(k, "self_attn.k_norm"), cos, sin)
        x = x + linear(attend(q, k, v, rows), "self_attn.o_proj")
        y = norm(x, "post_attention_layernorm")
        chosen, shares, balance = route(y, w[f"{p}mlp.gate.weight"], shape.num_experts_per_tok)
        experts = (
            torch.stack(
                [w[f"{p}mlp.experts.{e}.{name}.weight"] for e in range(shape.num_experts)]
            ).to(y.dtype)
            for name in ("gate_proj", "up_proj", "down_proj")
        )  # fmt: skip
        return x + mixture(y, chosen, shares, *experts), balance

    def losses(self, tokens: Tensor, targets: Tensor, chunk: int = 32_768) -> tuple[Tensor, Tensor]:
        """Loss of each token, flat, and the mean balance of all routers. tokens, targets: [rows, length]."""
        rows, length = tokens.shape
        shape, device = self.shape, tokens.device
        exponent = torch.arange(0, shape.head_dim, 2, device=device, dtype=torch.float32) / shape.head_dim
        angles = torch.arange(length, device=device).repeat(rows)[:, None] / shape.rope_theta**exponent
        cos, sin = angles.cos(), angles.sin()
        x = F.embedding(tokens.reshape(-1), self.weights["model.embed_tokens.weight"].to(self.dtype))
        balances = []
        for layer in range(shape.num_hidden_layers):
            given = (x, layer, rows, cos, sin)
            x, balance = (
                checkpoint(self.layer, *given, use_reentrant=False) if self.again else self.layer(*given)
            )
            balances.append(balance)
        norm, embedding = self.weights["model.norm.weight"], self.weights["model.embed_tokens.weight"]
        parts = [
            head_losses(xs, norm, embedding, ts, shape.rms_norm_eps)[0]
            for xs, ts in zip(x.split(chunk), targets.reshape(-1).split(chunk), strict=True)
        ]
        return torch.cat(parts), torch.stack(balances).mean()


@dataclass(frozen=True)
class Knobs:
    """Numbers of a training run."""

    tokens: int = 65_536  # of a step
    length: int = 1024  # of a row
    muon_lr: float = 0.02
    adam_lr: float = 3e-3
    balance: float = 0.01  # weight of the balance loss
    decay_from: float = 0.5  # progress from which the learning rate falls to zero
    warmup: int = 100  # steps


class Trainer:
    """Weights and optimizers: Muon for matrices, Adam for the embedding, norms and routers."""

    def __init__(self, shape: MoeShape, weights: Weights, knobs: Knobs, device: torch.device) -> None:
        self.shape, self.weights, self.knobs = shape, weights, knobs
        for w in weights.values():
            w.requires_grad_(True)
        matrices = [n for n in weights if n.endswith("_proj.weight")]
        others = [w for n, w in weights.items() if n not in set(matrices)]
        self.muon = Muon([weights[n] for n in matrices])
        self.adam = torch.optim.AdamW(
            others, lr=knobs.adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=device.type == "cuda"
        )
        gpu = device.type == "cuda"
        self.model = SmallMoe(shape, weights, torch.bfloat16 if gpu else torch.float32, again=gpu)

    def step(self, batch: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """One step on tokens [rows, length + 1], the learning rates times `scale`: its loss and balance."""
        losses, balance = self.model.losses(batch[:, :-1], batch[:, 1:])
        loss = losses.mean()
        (loss + self.knobs.balance * balance).backward()
        for w in self.weights.values():  # An expert that nobody chose.
            w.grad = torch.zeros_like(w) if w.grad is None else w.grad
        self.muon.step(self.knobs.muon_lr * scale)
        for group in self.adam.param_groups:
            torch.nn.utils.clip_grad_norm_(group["params"], 1.0)
            group["lr"] = self.knobs.adam_lr * scale
        self.adam.step()
        for w in self.weights.values():
            w.grad = None
        return loss.detach(), balance.detach()


def export(folder: Path, shape: MoeShape, weights: Weights, eos: list[int], bos: int) -> None:
    """Write a checkpoint that transformers and penstock read as a Qwen3MoeForCausalLM."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {n: w.detach().to(torch.bfloat16).cpu().contiguous() for n, w in weights.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **asdict(shape),
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "intermediate_size": shape.moe_intermediate_size, "norm_topk_prob": True, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0,
        "use_sliding_window": False, "tie_word_embeddings": True, "router_aux_loss_coef": Knobs.balance,
        "use_cache": True, "bos_token_id": bos, "eos_token_id": eos, "pad_token_id": bos,
        "torch_dtype": "bfloat16", "dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"bos_token_id": bos, "eos_token_id": eos, "do_sample": True, "temperature": 0.7}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def read_books(folder: Path) -> dict[str, str]:
    """The texts below a folder by name, `war_and_peace` and the like: those of at least 100 KB."""
    files = [f for f in sorted(folder.rglob("*.txt")) if f.stat().st_size > 100_000]
    return {f.parent.name: f.read_text(encoding="utf-8") for f in files}


def held_back(texts: dict[str, str], work: Path, seed: int, stories: int) -> dict[str, str]:
    """Take the end of each text away and write it to a file in `work`, with one of stories and chat."""
    left = {}
    for name, text in texts.items():
        cut = int(len(text) * (1 - HELD_BACK))
        left[name] = text[:cut]
        (work / f"{name}.txt").write_text(text[cut:], encoding="utf-8")
    rng = random.Random(f"held back {seed}")
    documents = ["".join(piece for piece, _ in prose_document(rng, [])) for _ in range(stories)]
    (work / "stories.txt").write_text("\n\n".join(documents), encoding="utf-8")
    return left


def train(trainer: Trainer, stream: Tensor, args: argparse.Namespace, deadline: float) -> None:
    """Step until the deadline, or for so many steps, on rows cut from anywhere in the stream of tokens."""
    knobs, device, begin = trainer.knobs, stream.device, time.perf_counter()
    gen, steps, printed = torch.Generator().manual_seed(args.seed), 0, begin
    rows, reach = max(knobs.tokens // knobs.length, 1), torch.arange(knobs.length + 1, device=device)
    while (now := time.perf_counter()) < deadline and (not args.steps or steps < args.steps):
        share = steps / args.steps if args.steps else (now - begin) / (deadline - begin)
        fall = min(1.0, max(0.01, (1 - share) / (1 - knobs.decay_from)))
        at = torch.randint(len(stream) - knobs.length - 1, (rows, 1), generator=gen).to(device)
        loss, balance = trainer.step(stream[at + reach].long(), min(1.0, (steps + 1) / knobs.warmup) * fall)
        steps += 1
        if steps % args.log_every == 0:
            now = time.perf_counter()
            speed = args.log_every * rows * knobs.length / (now - printed)
            print(
                f"step {steps} {now - begin:.0f}s progress {share:.3f} {speed:,.0f} tok/s loss {loss:.4f} "
                f"balance {balance:.4f}",
                flush=True,
            )
            if not math.isfinite(loss):
                raise RuntimeError(f"the loss is not finite at step {steps}")
            printed = now
    print(f"{steps} steps in {time.perf_counter() - begin:.0f}s", flush=True)


def record(args: argparse.Namespace, texts: list[Path]) -> None:
    """Have `penstock bench experts` record and replay the routing of each text."""
    args.routings.mkdir(parents=True, exist_ok=True)
    for text in texts:
        command = [sys.executable, "-m", "penstock", "bench", "experts", str(args.out), "--text", str(text)]
        command += ["--routing-out", str(args.routings / f"{text.stem}.npz")]
        command += ["--out", str(args.routings / f"{text.stem}.json"), *args.bench]
        print(" ".join(command), flush=True)
        done = subprocess.run(command, env=os.environ, check=False)
        if done.returncode:
            raise SystemExit(f"bench experts ended with {done.returncode} on {text}")


def arguments(argv: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--minutes", type=float, default=6.0, help="wall-clock time until the model is written")
    p.add_argument("--text", type=Path, required=True, help="folder with texts (*.txt of at least 100 KB)")
    p.add_argument("--work", type=Path, default=Path("/tmp/small_moe"), help="tokenizer and held-back texts")
    p.add_argument("--out", type=Path, required=True, help="where the model goes")
    p.add_argument("--init", type=Path, help="a model of an earlier run to go on from, with its tokenizer")
    p.add_argument("--routings", type=Path, help="where recorded routings and their reports go [none made]")
    p.add_argument("--bench", type=shlex.split, default=[], help="more flags of `penstock bench experts`")
    p.add_argument("--documents", type=int, default=60_000, help="stories and chats to generate")
    p.add_argument("--processes", type=int, default=14)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--steps", type=int, default=0, help="stop after so many steps (0: only the clock stops)")
    p.add_argument("--log-every", type=int, default=20)
    p.add_argument("--experts", type=int, default=MoeShape.num_experts)
    p.add_argument("--balance", type=float, default=Knobs.balance, help="weight of the balance loss")
    p.add_argument("--tiny", action="store_true", help="a toy model, for tests")
    p.add_argument("--small", action="store_true", help="7 million parameters, for minutes on a CPU")
    return p.parse_args(argv)


def sizes(args: argparse.Namespace) -> tuple[MoeShape, Knobs]:
    """The model's dimensions and the numbers of the run that were asked for."""
    shape = replace(MoeShape(), num_experts=args.experts)
    knobs = replace(Knobs(), balance=args.balance)
    if args.tiny:
        shape = replace(shape, hidden_size=64, moe_intermediate_size=16, num_hidden_layers=2)
        shape = replace(shape, num_attention_heads=2, num_key_value_heads=1, head_dim=32, vocab_size=640)
        return shape, replace(knobs, tokens=1024, length=128, warmup=5)
    if args.small:
        shape = replace(
            shape, hidden_size=160, moe_intermediate_size=32, num_hidden_layers=6, vocab_size=2048
        )
        shape = replace(shape, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
        return shape, replace(knobs, tokens=2048, length=256, warmup=30)
    return shape, knobs


def main(argv: list[str] | None = None) -> None:
    clock = time.perf_counter()
    args = arguments(argv)
    args.work.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() and not args.tiny else "cpu")
    shape, knobs = sizes(args)
    texts = held_back(read_books(args.text), args.work, args.seed, 20 if args.tiny else 200)
    books = list(texts.values())
    few = args.tiny or args.small
    if device.type == "cpu":  # More threads wait for each other where other programs compute, too.
        torch.set_num_threads(1)
    if args.init:
        tok = Tokenizer.from_file(str(args.init / "tokenizer.json"))
        tok.post_processor = processors.Sequence([])
        weights = {n: w.float() for n, w in load_file(args.init / "model.safetensors").items()}
    else:
        tok = train_tokenizer(tokenizer_texts(books, args.seed, 300 if few else 12_000), shape.vocab_size)
        weights = init_weights(shape, args.seed)
    # Workers are forked: they share the corpus without copies. That must happen before CUDA starts.
    ctx = multiprocessing.get_context("fork")
    stories = build_corpus(tok, books, args.seed, args.documents, ctx, args.processes).prose.tokens
    prose = [tok.encode(book, add_special_tokens=False).ids for book in books]
    stream = torch.from_numpy(np.concatenate([np.array(ids, np.int16) for ids in [*prose, stories]]))
    print(
        f"{time.perf_counter() - clock:.1f}s {len(stream) / 1e6:.1f}M tokens, "
        f"{sum(map(len, prose)) / 1e6:.1f}M of them of {', '.join(texts) or 'no book'}",
        flush=True,
    )
    trainer = Trainer(shape, {n: w.to(device) for n, w in weights.items()}, knobs, device)
    count = sum(w.numel() for w in trainer.weights.values())
    print(f"{time.perf_counter() - clock:.1f}s {count / 1e6:.2f}M parameters on {device}", flush=True)
    train(trainer, stream.to(device), args, clock + args.minutes * 60)
    ids = [tok.token_to_id(END_OF_TURN), tok.token_to_id(END_OF_TEXT)]
    export(args.out, shape, trainer.weights, ids, ids[1])
    save_tokenizer(tok, args.out, shape.max_position_embeddings)
    print(f"{time.perf_counter() - clock:.1f}s written to {args.out}", flush=True)
    if args.routings:
        record(args, sorted(args.work.glob("*.txt")))


if __name__ == "__main__":
    main()
