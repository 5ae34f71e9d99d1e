"""Measure parts of a step that verifies drafts: attention with a tree or a line behind a long past, the move
of the KV that was accepted, and the draw and walk of a tree.

    PYTHONPATH=src python3 benchmarks/draft_parts.py --out draft_parts.json

Shapes are those of an 8B (32 heads of 128, 8 of keys and values) and, for the move, of 80 layers. Each is
launched eight times in a CUDA graph, so that no time of the host is in it, but for draw and walk, which are
timed from the call until the tokens are on the host. Medians of 9 are printed.
"""

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import torch
from recording import Recording

from penstock.arch.layout import KVLayout
from penstock.arch.mixers.mixer import Plane
from penstock.bench.speed.measure import sampling
from penstock.kv.movement.pool import KVPool
from penstock.ops.attention.inputs import LayerAttention, QueryRun, Rows, RunTree
from penstock.ops.triton.attention import paged_decode, paged_run
from penstock.step.plan import MOST_NODES, Admission, BlockId, Row, Share, ShareKind
from penstock.step.tree import depths, sights
from penstock.worker.sampler import Sampler

HEADS, KV_HEADS, DIM, BLOCK, LAYERS = 32, 8, 128, 64, 80
VOCABULARY = 128_256
TIMES, REPEAT = 8, 9
LAYER = LayerAttention(DIM**-0.5)


def timed(work: Callable[[], object]) -> float:
    """Return microseconds of one call within a graph."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(TIMES):
            work()
    found = []
    for _ in range(REPEAT):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / TIMES * 1e3)
    return float(median(found))


def tree_of(count: int) -> tuple[int, ...]:
    """Return the parents of a random tree of so many tokens behind the first."""
    chance = random.Random(count)
    return tuple(chance.randint(max(0, node - 6), node) for node in range(count))


def attention(context: int) -> dict[str, float]:
    """Return the microseconds of a decode row, and of lines and trees of some tokens, behind so many keys."""
    blocks = -(-context // BLOCK) + 1
    k, v = torch.randn(2, 4 * blocks, BLOCK, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    cache = k, v
    table = torch.randperm(4 * blocks, device="cuda")[:blocks]
    q = torch.randn(1 + MOST_NODES, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    rows = Rows(1, table[None].int(), torch.tensor([context], device="cuda", dtype=torch.int32), context)
    found = {"row": timed(partial(paged_decode, q[:1], cache, rows, LAYER))}
    for tokens in (5, 9, 17, 1 + MOST_NODES):
        start, parents = context - tokens, tree_of(tokens - 1)
        line, own = QueryRun(0, tokens, start, table), depths(parents)
        limits = torch.tensor([start + 1 + depth for depth in own], device="cuda", dtype=torch.int32)
        seen = torch.tensor(sights(parents), dtype=torch.uint64).view(torch.int64).cuda()
        tree = replace(line, tree=RunTree(start, tuple(own), limits, {None: seen}))
        some, ends = q[:tokens], torch.arange(start + 1, context + 1, device="cuda", dtype=torch.int32)
        apart = Rows(tokens, table.int().expand(tokens, -1).contiguous(), ends, context)
        found |= {
            f"line of {tokens}": timed(partial(paged_run, some, cache, line, LAYER)),
            f"tree of {tokens}": timed(partial(paged_run, some, cache, tree, LAYER)),
            f"{tokens} rows": timed(partial(paged_decode, some, cache, apart, LAYER)),
        }
    return found


def moved(tokens: int) -> float:
    """Return the microseconds in which the KV of so many tokens is moved in all layers."""
    planes = Plane("k", KV_HEADS, DIM, scored=True), Plane("v", KV_HEADS, DIM)
    pool = KVPool(KVLayout((planes,) * LAYERS, BLOCK, "bfloat16"), 4, torch.device("cuda"))
    sources = torch.arange(BLOCK, BLOCK + 2 * tokens, 2, device="cuda")
    targets = torch.arange(BLOCK, BLOCK + tokens, device="cuda")
    return timed(partial(pool.move, sources, targets))


def drawn(temperature: float) -> float:
    """Return the milliseconds in which a tree of MOST_NODES is drawn, walked, and read."""
    sampler = Sampler(VOCABULARY, 1, torch.device("cuda"))
    sampler.admit(Admission(Row(0), sampling(temperature, 1), (0,), ()))
    logits = torch.randn(1 + MOST_NODES, VOCABULARY, device="cuda")
    draft, parents = tuple(range(5, 5 + MOST_NODES)), tree_of(MOST_NODES)
    share = Share(
        Row(0), 9, (0, *draft), 0, (BlockId(0),), True, 5, ShareKind.VERIFY, parents=parents
    )  # fmt: skip
    found = []
    for _ in range(REPEAT + 2):
        own = logits.clone()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        share.accepted(sampler.sample(own, [share]).read()[0])
        found.append((time.perf_counter() - begin) * 1e3)
    return median(found[2:])


def main() -> None:
    """Measure all parts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    recording = Recording(
        parser.parse_args().out, bench="draft_parts", heads=HEADS, kv_heads=KV_HEADS, dim=DIM
    )
    with torch.inference_mode():
        for context in (2048, 8192, 32768, 131072):
            found = attention(context)
            print(f"{context} keys, us: " + ", ".join(f"{name} {us:.1f}" for name, us in found.items()))
            recording.part(f"{context} keys, us", dict(found))
        us = moved(32)
        print(f"KV of 32 tokens moved in {LAYERS} layers: {us:.1f} us")
        recording.part("moved", {"tokens": 32, "layers": LAYERS, "us": us})
        for temperature in (0.0, 1.0):
            ms = drawn(temperature)
            print(f"a tree of {MOST_NODES} drawn, walked and read at temperature {temperature}: {ms:.2f} ms")
            recording.part(
                f"drawn at {temperature}", {"nodes": MOST_NODES, "vocabulary": VOCABULARY, "ms": ms}
            )


if __name__ == "__main__":
    main()
