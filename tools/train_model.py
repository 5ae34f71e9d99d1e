"""Trains the small model that is shipped for demonstrations: simple stories, and facts found again in long
texts.

python3 tools/train_model.py --minutes 8 --text DIR --work /tmp/penstock_train --out OUT/model
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from corpus import HAY, build_corpus, save_tokenizer, tokenizer_texts, train_tokenizer
from muon import Muon
from needles import END_OF_TEXT, END_OF_TURN
from rows import Batch, Feed, Stage, curriculum
from small_llama import MATRICES, Shape, SmallLlama, Weights, export, init_weights, load
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}
LENGTHS = (512, 2048, 8192, 32_768)


@dataclass(frozen=True)
class Knobs:
    """Numbers of a training run."""

    tokens: int = 65_536  # of each half of a step: one half with hidden facts, one of plain prose
    prose_length: int = 1024
    muon_lr: float = 0.02
    adam_lr: float = 3e-3
    decay_from: float = 0.5  # progress from which the learning rate falls to zero
    warmup: int = 100  # steps
    good: float = 0.97  # share of facts found that ends a stage early, after half of its time


@dataclass
class Half:
    """One half of a step on the device."""

    inputs: Tensor  # int64 [rows, length]
    targets: Tensor  # int64 [rows, length]
    weights: Tensor  # fp32 [rows * length], sum 1
    answers: Tensor  # int64 [rows * length], 0 or a number per answer
    rows: int


def to_device(batch: Batch, device: torch.device) -> Half:
    def send(array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor

    tokens, spans, weights = (
        send(batch.tokens).long(),
        send(batch.spans).long()[:, 1:],
        send(batch.weights)[:, 1:].reshape(-1).float(),
    )
    rows = len(tokens)
    answers = torch.where(spans > 0, spans + torch.arange(rows, device=device)[:, None] * 256, 0).reshape(-1)
    return Half(
        tokens[:, :-1].contiguous(),
        tokens[:, 1:].contiguous(),
        weights / weights.sum().clamp(min=1),
        answers,
        rows,
    )


class Tally:
    """Sums on the device, read only when a line is printed, so that steps do not wait for each other."""

    def __init__(self) -> None:
        self.sums: dict[str, tuple[Tensor, int]] = {}

    def add(self, name: str, value: Tensor, count: int = 1) -> None:
        old, n = self.sums.get(name, (0.0, 0))
        self.sums[name] = (old + value.detach(), n + count)

    def read(self) -> dict[str, float]:
        means = {name: float(value) / n for name, (value, n) in self.sums.items()}
        self.sums = {}
        return means


def found(hits: Tensor, answers: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Share of the value tokens that are predicted, share of the values that are predicted as a whole."""
    inside = answers > 0
    size = rows * 256 + 256
    wrong = torch.zeros(size, device=hits.device).index_add_(0, answers, (inside & ~hits).float())
    there = torch.zeros(size, device=hits.device).index_add_(0, answers, inside.float()) > 0
    return (inside & hits).sum() / inside.sum().clamp(min=1), (
        there & (wrong == 0)
    ).sum() / there.sum().clamp(min=1)


class Trainer:
    """Weights, optimizers and the state that survives between runs."""

    def __init__(
        self, shape: Shape, weights: Weights, knobs: Knobs, device: torch.device, compiled: bool
    ) -> None:
        self.shape, self.weights, self.knobs, self.device = shape, weights, knobs, device
        self.step, self.stage, self.progress, self.tokens = 0, 0, 0.0, 0
        for w in weights.values():
            w.requires_grad_(True)
        matrices = {n for n in weights if n.removesuffix(".weight").endswith(MATRICES)}
        self.muon = Muon([w for n, w in weights.items() if n in matrices])
        others = [w for n, w in weights.items() if n not in matrices]
        self.adam = torch.optim.AdamW(
            others, lr=knobs.adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=device.type == "cuda"
        )
        self.model = SmallLlama(
            shape, weights, torch.bfloat16 if device.type == "cuda" else torch.float32, compiled
        )

    def save(self, path: Path) -> None:
        state = {
            "weights": {n: w.detach() for n, w in self.weights.items()},
            "muon": self.muon.state_dict(),
            "adam": self.adam.state_dict(),
        }
        torch.save(state | {"summary": self.summary()}, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)

    def restore(self, path: Path) -> None:
        state = torch.load(path, map_location=self.device)
        with torch.no_grad():
            for name, w in self.weights.items():
                w.copy_(state["weights"][name])
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])
        self.adopt(state["summary"])

    def summary(self) -> dict[str, float]:
        return {"step": self.step, "stage": self.stage, "progress": self.progress, "tokens": self.tokens}

    def adopt(self, summary: dict[str, float]) -> None:
        self.step, self.stage, self.tokens = (
            int(summary["step"]),
            int(summary["stage"]),
            int(summary["tokens"]),
        )
        self.progress = summary["progress"]

    def train_step(self, halves: dict[str, Half], scale: float, tally: Tally) -> None:
        """One step on all halves, the learning rates times `scale`."""
        for name, half in halves.items():
            losses, hits = self.model.losses(half.inputs, half.targets)
            loss = losses.dot(half.weights)
            loss.backward()
            tally.add(f"loss {name}", loss)
            if name != "prose" and self.step % 5 == 0:
                digits, whole = found(hits, half.answers, half.rows)
                tally.add(f"digits {name}", digits)
                tally.add(f"found {name}", whole)
            self.tokens += half.inputs.numel()
        self.muon.step(self.knobs.muon_lr * scale)
        for group in self.adam.param_groups:
            torch.nn.utils.clip_grad_norm_(group["params"], 1.0)
            group["lr"] = self.knobs.adam_lr * scale
        self.adam.step()
        for w in self.weights.values():
            w.grad = None
        self.step += 1


def fastest_backend(shape: Shape, rows: int, length: int, device: torch.device) -> SDPBackend:
    """Time forward and backward of the fused attentions at this row length and check them against each
    other."""
    times: dict[str, float] = {}
    outputs: dict[str, Tensor] = {}
    torch.manual_seed(0)
    heads = (shape.num_attention_heads, shape.num_key_value_heads, shape.num_key_value_heads)
    # Laid out as the model has them: [rows, length, heads, dim], transposed.
    qkv = [
        torch.randn(rows, length, h, shape.head_dim, device=device, dtype=torch.bfloat16)
        .transpose(1, 2)
        .requires_grad_()
        for h in heads
    ]
    for name in ("cudnn", "flash"):
        try:
            with sdpa_kernel(BACKENDS[name]):
                for _ in range(4):
                    torch.cuda.synchronize()
                    begin = time.perf_counter()
                    out = torch.nn.functional.scaled_dot_product_attention(
                        *qkv, is_causal=True, enable_gqa=True
                    )
                    grads = torch.autograd.grad(out, qkv, out)
                    torch.cuda.synchronize()
                    times[name] = time.perf_counter() - begin
                outputs[name] = torch.cat(
                    [out.flatten()[:4096], *(g.flatten()[:4096] for g in grads)]
                ).float()
        except RuntimeError as error:
            print(f"attention {name} at {length}: not usable ({str(error).splitlines()[0]})", flush=True)
    if len(outputs) == 2 and (outputs["cudnn"] - outputs["flash"]).norm() > 0.02 * outputs["flash"].norm():
        print(f"attention at {length}: cudnn differs from flash, flash is used", flush=True)
        return BACKENDS["flash"]
    best = min(times, key=lambda name: times[name])
    print(
        f"attention at {length}: "
        + ", ".join(f"{n} {t * 1e3:.2f} ms" for n, t in times.items())
        + f" -> {best}",
        flush=True,
    )
    return BACKENDS[best]


def rate(progress: float, steps: int, knobs: Knobs) -> float:
    """Learning rate factor: a ramp after every start, then constant, then down to a hundredth at the end of
    all progress."""
    fall = min(1.0, max(0.01, (1 - progress) / (1 - knobs.decay_from)))
    return min(1.0, (steps + 1) / knobs.warmup) * fall


def train(
    trainer: Trainer, feed: Feed, stages: list[Stage], args: argparse.Namespace, deadline: float
) -> None:
    """Step until the deadline; the progress goes evenly from where it was to `--until`."""
    knobs, device = trainer.knobs, trainer.device
    begin, start, steps = time.perf_counter(), trainer.progress, 0
    tally, backends = Tally(), trainer.model.backends
    printed, saved, tokens, waited = begin, begin, trainer.tokens, 0.0
    recent: dict[str, float] = defaultdict(float)
    entered = trainer.progress
    while (now := time.perf_counter()) < deadline and (not args.steps or steps < args.steps):
        share = steps / args.steps if args.steps else (now - begin) / (deadline - begin)
        trainer.progress = start + (args.until - start) * share
        facts, prose = feed.next()
        waited += time.perf_counter() - now
        name = str(facts.tokens.shape[1] - 1)
        halves = {name: to_device(facts, device), "prose": to_device(prose, device)}
        for half in halves.values():
            length = half.inputs.shape[1]
            if device.type == "cuda" and length not in backends:
                backends[length] = fastest_backend(trainer.shape, half.rows, length, device)
        scale = rate(trainer.progress, steps, knobs)
        trainer.train_step(halves, scale, tally)
        steps += 1
        if steps % args.log_every == 0:
            means = tally.read()
            now = time.perf_counter()
            speed, late = (trainer.tokens - tokens) / (now - printed) / 1e3, waited / (now - printed)
            where = (
                f"progress {trainer.progress:.3f} stage {stages[trainer.stage].length} lr {scale:.2f} "
                f"{speed:.0f}k tok/s wait {late:.0%}"
            )
            numbers = " ".join(f"{k} {v:.3f}" for k, v in sorted(means.items()))
            print(f"step {trainer.step} {now - begin:.0f}s {where} | {numbers}", flush=True)
            if not all(np.isfinite(v) for v in means.values()):
                raise RuntimeError(
                    f"the loss is not finite at step {trainer.step}; the last good state is in {args.work}"
                )
            printed, tokens, waited = now, trainer.tokens, 0.0
            recent.update(means)
            stage = stages[trainer.stage]
            half_time = (entered + stage.until) / 2
            early = recent[f"found {stage.length}"] > knobs.good and trainer.progress >= half_time
            if trainer.stage + 1 < len(stages) and (trainer.progress >= stage.until or early):
                trainer.stage += 1
                feed.stage.value = trainer.stage
                entered = trainer.progress
                print(
                    f"next stage: {stages[trainer.stage]} found so far {recent[f'found {stage.length}']:.3f}",
                    flush=True,
                )
            if now - saved > 90:
                trainer.save(args.work / "state.pt")
                saved = now
    if device.type == "cuda":
        torch.cuda.synchronize()
    trainer.progress = args.until
    print(
        f"{steps} steps in {time.perf_counter() - begin:.0f}s, {trainer.tokens / 1e6:.0f}M tokens in all",
        flush=True,
    )


def read_books(folder: Path | None) -> list[str]:
    files = sorted(folder.rglob("*.txt")) if folder else []
    return [f.read_text(encoding="utf-8") for f in files if f.stat().st_size > 100_000]


def tokenizer_of(args: argparse.Namespace, books: list[str]) -> Tokenizer:
    """The tokenizer of an earlier run, or a new one."""
    for folder in filter(None, (args.work, args.init)):
        if (folder / "tokenizer.json").exists():
            return Tokenizer.from_file(str(folder / "tokenizer.json"))
    tok = train_tokenizer(
        tokenizer_texts(books, args.seed, 300 if args.tiny else 12_000), 600 if args.tiny else 4096
    )
    tok.save(str(args.work / "tokenizer.json"))
    return tok


def write_model(trainer: Trainer, tok: Tokenizer, out: Path) -> None:
    ids = [tok.token_to_id(END_OF_TURN), tok.token_to_id(END_OF_TEXT)]
    export(out, trainer.shape, trainer.weights, torch.bfloat16, ids, ids[1])
    save_tokenizer(tok, out, trainer.shape.max_position_embeddings)
    (out / "train_state.json").write_text(json.dumps(trainer.summary()) + "\n")


def arguments(argv: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument(
        "--minutes", type=float, default=9.0, help="wall-clock time of this run, data and export included"
    )
    p.add_argument(
        "--until",
        type=float,
        default=1.0,
        help="share of the whole curriculum that is done when this run ends",
    )
    p.add_argument("--text", type=Path, help="folder with plain-text books (*.txt of at least 100 KB)")
    p.add_argument(
        "--work",
        type=Path,
        default=Path("/tmp/penstock_train"),
        help="local state; a later run continues from it",
    )
    p.add_argument("--out", type=Path, required=True, help="where the finished model goes")
    p.add_argument("--init", type=Path, help="an exported model to continue from where --work has no state")
    p.add_argument(
        "--shares",
        type=float,
        nargs="+",
        default=[0.2, 0.2, 0.3, 0.3],
        help="time shares of the lengths 512, 2K, 8K, 32K",
    )
    p.add_argument("--documents", type=int, default=300_000, help="prose documents to generate")
    p.add_argument(
        "--hay-weight",
        type=float,
        default=HAY / 10,
        help="weight of the loss on the text that hides the facts",
    )
    p.add_argument("--processes", type=int, default=14)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--steps", type=int, default=0, help="stop after so many steps (0: only the clock stops)")
    p.add_argument("--log-every", type=int, default=50)
    p.add_argument("--muon-lr", type=float, default=Knobs.muon_lr)
    p.add_argument("--adam-lr", type=float, default=Knobs.adam_lr)
    p.add_argument(
        "--restart",
        action="store_true",
        help="ignore the progress of an earlier run: keep its weights, begin at its last stage",
    )
    p.add_argument("--no-compile", action="store_true")
    p.add_argument("--tiny", action="store_true", help="a toy model on short rows, for tests")
    return p.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    clock = time.perf_counter()
    args = arguments(argv)
    args.work.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() and not args.tiny else "cpu")
    knobs = replace(Knobs(), muon_lr=args.muon_lr, adam_lr=args.adam_lr)
    stages = curriculum(LENGTHS, args.shares)
    if args.tiny:
        torch.set_num_threads(1)
        knobs, stages = (
            replace(knobs, tokens=1024, prose_length=256, warmup=2),
            curriculum((256, 512), [0.5, 0.5]),
        )
    # Workers are forked: they share the corpus without copies. That must happen before CUDA starts.
    ctx = multiprocessing.get_context("fork")
    books = read_books(args.text)
    tok = tokenizer_of(args, books)
    print(
        f"{time.perf_counter() - clock:.1f}s tokenizer of {tok.get_vocab_size()}, "
        f"{sum(map(len, books)) / 1e6:.1f} MB of books",
        flush=True,
    )
    saved, restored = args.work / "state.pt", None
    if args.init and not saved.exists():
        shape, weights = load(args.init, torch.device("cpu"), torch.float32)
        restored = json.loads((args.init / "train_state.json").read_text())
    else:
        shape = Shape(vocab_size=-(-tok.get_vocab_size() // 64) * 64)
        if args.tiny:
            shape = replace(
                shape,
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=2,
                num_attention_heads=2,
                head_dim=32,
            )
        weights = init_weights(shape, args.seed, torch.device("cpu"))
    # What was done before decides the seed, so that a continuation sees new data.
    before = (
        torch.load(saved, map_location="cpu")["summary"]
        if saved.exists()
        else restored or {"step": 0, "stage": 0}
    )
    first, stage = int(before["step"]), int(before["stage"])
    corpus = build_corpus(
        tok, books, args.seed + first, args.documents, ctx, args.processes, round(args.hay_weight * 10)
    )
    sizes = {round(share, 2): len(pool.tokens) for share, pool in corpus.hay}
    print(
        f"{time.perf_counter() - clock:.1f}s corpus: {len(corpus.prose.tokens) / 1e6:.1f}M tokens of prose, "
        f"haystacks {sizes}",
        flush=True,
    )
    feed = Feed(
        corpus, stages, (knobs.tokens, knobs.prose_length), args.seed, first, stage, args.processes, ctx
    )
    try:
        trainer = Trainer(
            shape,
            {n: w.to(device) for n, w in weights.items()},
            knobs,
            device,
            device.type == "cuda" and not args.no_compile,
        )
        if saved.exists():
            trainer.restore(saved)
        elif restored:
            trainer.adopt(restored)
        if args.restart:
            trainer.progress = 0.0
        count = sum(w.numel() for w in trainer.weights.values())
        print(
            f"{time.perf_counter() - clock:.1f}s {count / 1e6:.2f}M parameters on {device}, from "
            f"{trainer.summary()}",
            flush=True,
        )
        train(trainer, feed, stages, args, clock + args.minutes * 60 - (0 if args.tiny else 8))
    finally:
        feed.close()
    trainer.save(saved)
    write_model(trainer, tok, args.out)
    print(
        f"{time.perf_counter() - clock:.1f}s written to {args.out}: "
        f"{sorted((f.name, f.stat().st_size) for f in args.out.iterdir())}"
    )


if __name__ == "__main__":
    main()
