"""Measure how much attention policies miss of real contexts, and how much their bounds say that it may be.

A text with a fact hidden in it is read in full, and the fact is asked for. The keys of all layers and the
queries of the answer's tokens are kept. Each policy chooses blocks for these queries as it does while the
engine runs: by its sketches, of 0, 4 and 8 bits a number. The share of attention that lies in the other
blocks is computed of all keys in float64, and compared with the bound, of every layer, head and token. A
bound below the share ends the run.

python benchmarks/missed_attention.py --tokens 8000 --tokens 30000 --json missed.json
"""

import argparse
import json
import random
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

import penstock.models.decoder as decoder
from penstock import LLM, SamplingParams
from penstock.bench.machine import machine
from penstock.ops.attention.attend import Attended
from penstock.ops.policies import Choice, Past, policy_of
from penstock.ops.sketch import SketchLayout, scores, sketch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))
from needles import make_sample  # noqa: E402
from stories import make_story  # noqa: E402

BLOCK, NEAR = 64, 512
"""Tokens of a block, and those before the queries that are on the device and always read."""


def captured(
    tokens: int, depth: float, seed: int, model: Path | None, answer: int
) -> tuple[list[Tensor], list[Tensor], float, bool]:
    """Of each layer the keys `[tokens, kv_heads, dim]` and the answer's queries `[queries, heads, dim]`; the
    scale of scores; whether the answer is right."""
    rng = random.Random(seed)
    text = "\n\n".join(make_story(rng).text for _ in range(400))
    names = ROOT / "src" / "penstock" / "shipped" / "tokenizer.json"
    sample = make_sample(tokens, depth, rng, Tokenizer.from_file(str(names)), text)
    keys: dict[int, list[Tensor]] = {}
    queries: dict[int, list[Tensor]] = {}
    scale, calls = 0.0, 0
    attend = decoder.attend
    with LLM(
        model, max_length=tokens + 512, max_sequences=1, prefix_cache=False, graphs=False, progress=False
    ) as llm:
        layers = llm.spec.layers

        def noting(q: Tensor, k: Tensor, *given: Any, **more: Any) -> Attended:
            nonlocal scale, calls
            layer, calls, scale = calls % layers, calls + 1, given[3].scale
            keys.setdefault(layer, []).append(k.cpu().clone())
            if len(k) == 1:  # Of the prompt's tokens the last layer may compute the last alone.
                queries.setdefault(layer, []).append(q.cpu().clone())
            return attend(q, k, *given, **more)

        decoder.attend = noting
        try:
            completion = llm.chat(sample.messages, SamplingParams(temperature=0, max_tokens=answer))
        finally:
            decoder.attend = attend
    right = sample.answer in completion.text or completion.text in sample.answer
    return (
        [torch.cat(keys[at]) for at in range(layers)],
        [torch.cat(queries[at]) for at in range(layers)],
        scale,
        right,
    )


def measured(
    name: str, bits: int, keys: list[Tensor], queries: list[Tensor], scale: float
) -> dict[str, object]:
    policy = policy_of(name)
    assert policy is not None
    shares, bounds, read, passed = [], [], 0, 0
    for layer, (k, q) in enumerate(zip(keys, queries, strict=True)):
        blocks = (len(k) - len(q) - NEAR) // BLOCK
        far, near = k[: blocks * BLOCK].view(blocks, BLOCK, *k.shape[1:]), k[blocks * BLOCK : len(k) - len(q)]
        layout = SketchLayout(BLOCK, k.shape[1], k.shape[2], str(k.dtype).removeprefix("torch."), bits)
        sketches = sketch(far.contiguous(), layout)
        group = q.shape[1] // k.shape[1]
        wide = far.double().repeat_interleave(group, 2)
        for one in q.split(1):
            exact = torch.einsum("qhd,bthd->qhbt", one.double() * scale, wide).logsumexp(3)
            tail = torch.einsum(
                "qhd,thd->qht", one.double() * scale, near.double().repeat_interleave(group, 1)
            ).logsumexp(2)
            past = Past(
                blocks, BLOCK, len(k), len(k) + 1, partial(scores, one.float() * scale, sketches, layout)
            )
            choice = policy(layer, past) or Choice(
                torch.ones(blocks, dtype=torch.bool), torch.full(one.shape[:2], -torch.inf)
            )
            seen = torch.logaddexp(exact.masked_fill(~choice.keep, -torch.inf).logsumexp(2), tail)
            everything = torch.logaddexp(exact.logsumexp(2), tail)
            share = (exact.masked_fill(choice.keep, -torch.inf).logsumexp(2) - everything).exp()
            bound = choice.missed(seen.float())
            assert (bound >= share * (1 - 1e-5)).all(), (
                f"{name}, {bits} bits, layer {layer}: a bound below the share"
            )
            shares.append(share[0])
            bounds.append(bound[0])
            read += int(choice.keep.sum())
            passed += blocks
    share, bound = torch.stack(shares), torch.stack(bounds).double()
    half = torch.tensor([0.5, 0.9], dtype=torch.float64)
    block_bytes = 2 * BLOCK * keys[0].shape[1] * keys[0].shape[2] * keys[0].dtype.itemsize
    return {
        "policy": name,
        "bits": bits,
        "blocks_read": read / passed,
        "bytes_read": read / passed + layout.bytes / block_bytes,
        "share": _told(share, half),
        "bound": _told(bound, half),
        "bound_below_half": float((bound < 0.5).double().mean()),
        "worst_head": {"share": float(share.amax(1).mean()), "bound": float(bound.amax(1).mean())},
    }


def _told(x: Tensor, at: Tensor) -> dict[str, float]:
    middle, ninth = x.flatten().quantile(at).tolist()
    return {"mean": float(x.mean()), "median": middle, "p90": ninth, "most": float(x.max())}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, help="a checkpoint directory; by default the model that comes with penstock"
    )
    parser.add_argument(
        "--tokens", type=int, action="append", help="of the prompt; may be given again  [8000]"
    )
    parser.add_argument("--answer", type=int, default=16, help="tokens whose queries are looked at")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found: dict[str, object] = {
        "bench": "missed attention",
        "machine": asdict(machine()),
        "block_size": BLOCK,
        "near": NEAR,
        "contexts": [],
    }
    for tokens in args.tokens or [8000]:
        keys, queries, scale, right = captured(tokens, 0.4, args.seed, args.model, args.answer)
        blocks = (len(keys[0]) - NEAR) // BLOCK
        print(f"{len(keys[0]):,} tokens, {len(keys)} layers, answer {'right' if right else 'wrong'}")
        rows = []
        for name in (
            *(f"topk:{max(blocks * part // 32, 1)}" for part in (1, 4, 8, 16, 24)),
            f"window:64,{tokens // 8}",
            f"topk:{blocks}",
        ):
            for bits in (0, 4, 8):
                rows.append(row := measured(name, bits, keys, queries, scale))
                share, bound, worst = row["share"], row["bound"], row["worst_head"]
                assert isinstance(share, dict) and isinstance(bound, dict) and isinstance(worst, dict)  # noqa: PT018
                print(
                    f"{name:14s} {bits} bits  {row['blocks_read']:6.1%} of blocks, {row['bytes_read']:6.1%} "
                    "of bytes  "
                    f"share {share['mean']:.4f} (worst head {worst['share']:.4f})  "
                    f"bound {bound['mean']:.4f} (worst head {worst['bound']:.4f})  below 0.5: "
                    f"{row['bound_below_half']:.0%}",
                    flush=True,
                )
        contexts = found["contexts"]
        assert isinstance(contexts, list)
        contexts.append({"tokens": len(keys[0]), "right": right, "rows": rows})
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
