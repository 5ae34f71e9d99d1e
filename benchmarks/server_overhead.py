"""Measure what the server adds: 64 streams from `penstock serve` against the same prompts given to the engine
in one call.

    PYTHONPATH=src python3 benchmarks/server_overhead.py --out docs/results/cpu_server_overhead.json
    PYTHONPATH=src python3 benchmarks/server_overhead.py --device cuda --shape 0.6B --rounds 6

Both are warmed up first (see penstock.bench.warming). Both have one thread to compute with, so that on two
cores there is one for the event loop and the client. They take turns, and each round is compared with what it
stood beside, since a shared machine computes now faster, now slower: what is told is the median of these
quotients, with its quartiles. The shorter the steps, the more of them is the server's; a step is told as the
seconds of a round over its tokens, prompts included. Events are fewer than tokens where the server had no
time to tell of each step by itself.

On a GPU both engines are there at once, with their own weights and KV; whoever is not asked waits and leaves
the device alone.

A shape's weights are random, in a checkpoint that is written for the run, into TMPDIR. The tokenizer is the
shipped model's, and ids that it does not have mean made-up words, so that nearly every event has a text and
the head is as large as the shape says.
"""

import argparse
import json
import selectors
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import quantiles
from urllib.parse import urlsplit

import torch
from random_checkpoint import write_checkpoint
from recording import need_commit, write

from penstock import LLM, SamplingParams
from penstock.api.llm import SHIPPED_MODEL
from penstock.base.config import DTYPES
from penstock.bench.shapes import SHAPES
from penstock.bench.warming import in_turns

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from servers import serving

BLOCK = 64
"""Tokens of a KV block."""
PART = "45%"
"""Of a GPU's memory, that each of the two may take at most."""
STARTING = 600.0
"""Seconds in which the server must have loaded its model."""
EVENT = b'data: {"id":"cmpl-'


def prompts_of(count: int, length: int) -> list[list[int]]:
    return [[5 + (number * 31 + place * 7) % 4000 for place in range(length)] for number in range(count)]


def all_streamed(place: tuple[str, int], model: str, prompts: Sequence[Sequence[int]], tokens: int) -> int:
    """Have one stream for each prompt, all at once, each over a connection of its own, and read them to their
    ends. Returns their events. The client is a few system calls a stream, so that what is measured is the
    server."""
    with ExitStack() as opened, selectors.DefaultSelector() as selector:
        for prompt in prompts:
            line = opened.enter_context(socket.create_connection(place))
            line.sendall(_request(model, prompt, tokens))
            selector.register(line, selectors.EVENT_READ, bytearray())
        events = 0
        while selector.get_map():
            for key, _ in selector.select():
                last = key.data
                piece = key.fileobj.recv(1 << 16)
                assert piece, bytes(last)
                last += piece
                events += last.count(EVENT)
                if b"data: [DONE]" in last:
                    selector.unregister(key.fileobj)
                # Not so many bytes that what was counted would be counted again.
                del last[: 1 - len(EVENT)]
    return events


def _request(model: str, prompt: Sequence[int], tokens: int) -> bytes:
    fields = {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    body = json.dumps(fields).encode()
    return (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=250)
    parser.add_argument("--prompt", type=int, default=16, help="tokens of each")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--dtype", choices=DTYPES, help="float32 on a CPU, otherwise bfloat16")
    parser.add_argument(
        "--shape", choices=SHAPES, help="random weights in this shape instead of the shipped model"
    )
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    dtype = asked.dtype or ("float32" if asked.device == "cpu" else "bfloat16")
    prompts = prompts_of(asked.streams, asked.prompt)
    params = SamplingParams(temperature=0, max_tokens=asked.tokens, ignore_eos=True)
    settings = {
        "device": asked.device,
        "dtype": dtype,
        "max_sequences": asked.streams,
        "block_size": BLOCK,
        "kv_blocks": asked.streams * -(-(asked.prompt + asked.tokens) // BLOCK),
    }
    if asked.device != "cpu":
        settings["device_memory"] = PART
    flags = [text for name, value in settings.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    torch.set_num_threads(1)
    need_commit(asked.out)
    events = list[int]()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
        model = SHIPPED_MODEL
        if asked.shape:
            model = Path(folder) / asked.shape
            write_checkpoint(model, SHAPES[asked.shape])
        llm = opened.enter_context(LLM(model, **settings, prefix_cache=False))
        flags += ["--port", "0", "--quiet", "--no-prefix-cache", "--queue", "8"]
        server = opened.enter_context(
            serving(Path(folder), str(model), *flags, environment={"OMP_NUM_THREADS": "1"})
        )
        server.wait(STARTING)
        url = urlsplit(server.url)
        place = url.hostname or "", url.port or 0

        def by_itself() -> float:
            begin = time.perf_counter()
            llm.generate(prompts, params)
            return time.perf_counter() - begin

        def by_the_server() -> float:
            begin = time.perf_counter()
            events.append(all_streamed(place, server.name, prompts, asked.tokens))
            return time.perf_counter() - begin

        found = in_turns({"served": by_the_server, "alone": by_itself}, asked.rounds)
        print(f"engine alone {found['alone']}, served {found['served']}", flush=True)
    alone, served = found["alone"].seconds, found["served"].seconds
    come = sum(events[-asked.rounds :])
    work = asked.streams * asked.tokens * asked.rounds
    shares = [one / other for one, other in zip(alone, served, strict=True)]
    low, middling, high = quantiles(shares, n=4) if len(shares) > 1 else shares * 3
    steps = asked.tokens * asked.rounds
    found = {
        "device": asked.device,
        "dtype": dtype,
        "shape": asked.shape,
        "streams": asked.streams,
        "tokens": asked.tokens,
        "prompt": asked.prompt,
        "alone": {
            **found["alone"].record(),
            "tokens_per_second": work / sum(alone),
            "step_seconds": sum(alone) / steps,
        },
        "served": {
            **found["served"].record(),
            "tokens_per_second": work / sum(served),
            "step_seconds": sum(served) / steps,
            "events_per_token": come / work,
        },
        "share": {"median": middling, "quartiles": [low, high], "of sums": sum(alone) / sum(served)},
    }
    print(
        f"{work / sum(alone):,.0f} tokens/s alone, {work / sum(served):,.0f} served: {middling:.1%} "
        f"({low:.1%} to {high:.1%})"
    )
    print(
        f"a step {1e3 * sum(alone) / steps:.3f} ms alone, {1e3 * sum(served) / steps:.3f} served; "
        f"{come / work:.3f} events a token"
    )
    if asked.out:
        write(asked.out, found)


if __name__ == "__main__":
    main()
