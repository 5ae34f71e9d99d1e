"""What the server costs: 64 streams from `penstock serve` against the same prompts given to the engine in one call.

    PYTHONPATH=src python3 benchmarks/server_overhead.py --out docs/results/cpu_server_overhead.json

Both have one thread to compute with, so that on two cores there is one for the event loop and the client. They take turns, and each round
is compared with what it stood beside, since a shared machine computes now faster, now slower: what is told is the median of these
quotients, with its quartiles. The shipped model's steps are short: with a larger one the share of the server is less.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import quantiles
from urllib.parse import urlsplit

import torch

from penstock import LLM, SamplingParams
from penstock.bench.machine import machine

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from servers import serving

BLOCKS = 64 * 8


def prompts_of(count: int, length: int) -> list[list[int]]:
    return [[5 + (number * 31 + place * 7) % 4000 for place in range(length)] for number in range(count)]


async def streamed(place: tuple[str, int], prompt: Sequence[int], tokens: int) -> None:
    """One stream, read to its end."""
    fields = {"model": "shipped", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": True}
    body = json.dumps(fields).encode()
    reader, writer = await asyncio.open_connection(*place)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    last = b""
    while b"data: [DONE]" not in last:
        piece = await reader.read(1 << 16)
        assert piece, last[-500:]
        last = last[-16:] + piece
    writer.close()


async def all_streamed(place: tuple[str, int], prompts: Sequence[Sequence[int]], tokens: int) -> None:
    await asyncio.gather(*(streamed(place, prompt, tokens) for prompt in prompts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=250)
    parser.add_argument("--prompt", type=int, default=16, help="tokens of each")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    prompts = prompts_of(asked.streams, asked.prompt)
    params = SamplingParams(temperature=0, max_tokens=asked.tokens, ignore_eos=True)
    size = {"max_sequences": asked.streams, "kv_blocks": BLOCKS, "prefix_cache": False}
    torch.set_num_threads(1)
    flags = ("--device", "cpu", "--dtype", "float32", "--max-sequences", str(asked.streams), "--kv-blocks", str(BLOCKS))
    alone, served = list[float](), list[float]()
    with (
        tempfile.TemporaryDirectory() as folder,
        LLM(None, device="cpu", dtype="float32", **size) as llm,
        serving(
            Path(folder), "--port", "0", "--quiet", *flags, "--no-prefix-cache", "--queue", "8", environment={"OMP_NUM_THREADS": "1"}
        ) as server,
    ):
        server.wait()
        url = urlsplit(server.url)
        place = url.hostname or "", url.port or 0
        for turn in range(asked.rounds + 1):
            begin = time.perf_counter()
            if turn % 2:
                llm.generate(prompts, params)
            else:
                asyncio.run(all_streamed(place, prompts, asked.tokens))
            middle = time.perf_counter()
            if turn % 2:
                asyncio.run(all_streamed(place, prompts, asked.tokens))
            else:
                llm.generate(prompts, params)
            first, second = middle - begin, time.perf_counter() - middle
            if turn:  # Not the first, in which everything is met for the first time.
                alone.append(first if turn % 2 else second)
                served.append(second if turn % 2 else first)
                print(f"engine alone {alone[-1]:.2f} s, served {served[-1]:.2f} s", flush=True)
    work = asked.streams * asked.tokens * asked.rounds
    low, middling, high = quantiles([one / other for one, other in zip(alone, served, strict=True)], n=4)
    found = {
        "streams": asked.streams,
        "tokens": asked.tokens,
        "prompt": asked.prompt,
        "alone": {"seconds": alone, "tokens_per_second": work / sum(alone)},
        "served": {"seconds": served, "tokens_per_second": work / sum(served)},
        "share": {"median": middling, "quartiles": [low, high], "of sums": sum(alone) / sum(served)},
        "machine": asdict(machine()),
    }
    print(f"{work / sum(alone):,.0f} tokens/s alone, {work / sum(served):,.0f} served: {middling:.1%} ({low:.1%} to {high:.1%})")
    if asked.out:
        asked.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
