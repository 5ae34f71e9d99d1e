"""Compare two versions of the server, in turns: streams at once, and the time to the first token.

    PYTHONPATH=src python3 benchmarks/server_before_after.py --before TREE --out
    docs/results/cpu_server_doors.json

TREE holds another version's `src`. A server runs the shipped model on CPUs with one thread, and nothing
else runs. In each of several pairs both versions are started, one after the other, in an order that
alternates. Each is asked --rounds times, after three to warm it: 64 streams of --tokens tokens, then 20
requests one after the other. Prompts are new in each round, so that no prefix is found.

A process is faster or slower than another of the same version by some percent for as long as it lives. So
what is compared is the quotient of two processes' medians; printed are the median of these over all pairs,
and its 95 % interval by resampling pairs. With TREE of the same version it is to be 0.
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from recording import need_commit, write

STREAMS, ALONE, WARM = 64, 20, 3


async def first_token(port: int, prompt: str, tokens: int) -> tuple[float, float]:
    """Return the seconds until the first token of a streamed completion, and until its end."""
    body = json.dumps(
        {
            "model": "m",
            "prompt": prompt,
            "max_tokens": tokens,
            "stream": True,
            "temperature": 0,
            "ignore_eos": True,
        }
    ).encode()
    begun = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        b"Connection: close\r\nContent-Length: " + str(len(body)).encode() + b"\r\n\r\n" + body
    )
    first = 0.0
    while line := await reader.readline():
        if not first and line.startswith(b"data:"):
            first = time.perf_counter() - begun
    writer.close()
    assert first, "an answer without a token"
    return first, time.perf_counter() - begun


async def round_of(port: int, number: int, tokens: int) -> dict[str, float]:
    """Return what one server takes in one round."""
    words = random.Random(number)
    made = [f"Story {words.random():.9f} of {at} in round {number}:" for at in range(STREAMS + ALONE)]
    begun = time.perf_counter()
    burst = await asyncio.gather(*(first_token(port, prompt, tokens) for prompt in made[:STREAMS]))
    rate = STREAMS * tokens / (time.perf_counter() - begun)
    alone = [(await first_token(port, prompt, 1))[0] for prompt in made[STREAMS:]]
    return {
        "tokens/s of streams": rate,
        "TTFT of 64 at once": median(one for one, _ in burst),
        "TTFT alone": median(alone),
    }


def started(tree: Path, port: int) -> subprocess.Popen[bytes]:
    """Start a server of the version in `tree`, on one thread."""
    environment = os.environ | {
        "PYTHONPATH": f"{tree / 'src'}:{os.environ.get('PYTHONPATH', '')}",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
    command = [
        sys.executable,
        "-m",
        "penstock",
        "serve",
        "--name",
        "m",
        "--port",
        str(port),
        "--device",
        "cpu",
    ]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


async def ready(port: int) -> None:
    """Wait until a server answers."""
    for _ in range(600):
        try:
            await first_token(port, "Hello", 1)
        except (OSError, AssertionError):
            await asyncio.sleep(0.2)
        else:
            return
    sys.exit(f"no server answers at port {port}")


def interval(ratios: list[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median, by resampling."""
    rng = random.Random(0)
    medians = sorted(median(rng.choices(ratios, k=len(ratios))) for _ in range(4000))
    return medians[100], medians[3899]


async def measure(tree: Path, port: int, rounds: int, tokens: int, seed: int) -> dict[str, list[float]]:
    """Return what a new process of a version took in each round, by what was measured."""
    server, found = started(tree, port), dict[str, list[float]]()
    try:
        await ready(port)
        for number in range(-WARM, rounds):
            for what, value in (await round_of(port, seed * 1000 + number, tokens)).items():
                if number >= 0:
                    found.setdefault(what, []).append(value)
    finally:
        server.terminate()
        server.wait()
    return found


def main() -> None:
    """Measure, print a line for each comparison and write the results."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--before", type=Path, required=True)
    parser.add_argument("--before-commit", default="")
    parser.add_argument("--after", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument("--port", type=int, default=18471, help="the first of two ports")
    parser.add_argument("--pairs", type=int, default=8, help="pairs of processes")
    parser.add_argument("--rounds", type=int, default=8, help="rounds of each pair")
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    need_commit(given.out)
    pairs: list[dict[str, dict[str, list[float]]]] = []
    trees = {"before": given.before, "after": given.after}
    for pair in range(given.pairs):
        pairs.append({})
        for name in list(trees)[:: 1 if pair % 2 else -1]:
            asked = (given.port + len(pairs[-1]), given.rounds, given.tokens, 2 * pair + len(pairs[-1]))
            pairs[-1][name] = asyncio.run(measure(trees[name], *asked))
        print(
            f"pair {pair + 1}",
            {what: round(quotient(pairs[-1], what), 4) for what in pairs[-1]["after"]},
            flush=True,
        )
    rows = []
    for what in pairs[0]["after"]:
        ratios = [quotient(pair, what) for pair in pairs]
        low, high = interval(ratios)
        change = f"{median(ratios) - 1:+.1%} ({low - 1:+.1%} to {high - 1:+.1%})"
        old, new = (median(median(pair[name][what]) for pair in pairs) for name in trees)
        print(f"{what:24} {old:10.4g} {new:10.4g}  {change}")
        both = [{name: pair[name][what] for name in trees} for pair in pairs]
        rows.append({"what": what, "pairs": both, "ratio": median(ratios), "ratio_95": [low, high]})
    if given.out:
        about = {"before_commit": given.before_commit, "pairs": given.pairs, "rounds": given.rounds}
        write(given.out, about | {"rows": rows})


def quotient(pair: dict[str, dict[str, list[float]]], what: str) -> float:
    """Return what the later version's process took over what the earlier one's did, by their medians."""
    return median(pair["after"][what]) / median(pair["before"][what])


if __name__ == "__main__":
    main()
