"""Test whether one key of a server can tell by the time of a first token what another has sent: pairs of the
other's prompts and fresh ones.

    PYTHONPATH=src python3 benchmarks/prefix_timing.py --pairs 2000 --out prefix_timing.json PYTHONPATH=src
    python3 benchmarks/prefix_timing.py --pairs 50 --share     what is seen where prefixes are shared

One key sends a prompt; then the other sends the same and a fresh one of as many tokens, in an order drawn by
lot, one token each. The differences of a pair's times are held against chance by Wilcoxon's signed ranks,
two-sided. The shipped model on the CPU, in a process of its own.
"""

import argparse
import http.client
import json
import math
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from recording import environment, need_commit  # noqa: E402

from servers import Server  # noqa: E402

VICTIM, CURIOUS = "the key of one who was there", "the key of one who is curious"
ALPHA = 0.01
"""A smaller share of chance is no chance."""


class Client:
    """One key, on one connection."""

    def __init__(self, url: str, key: str) -> None:
        place = urlsplit(url)
        self._connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=60)
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}

    def seconds(self, tokens: list[int]) -> float:
        """Until the whole answer of one token is there."""
        body = json.dumps({"model": "shipped", "prompt": tokens, "max_tokens": 1, "temperature": 0})
        begin = time.perf_counter()
        self._connection.request("POST", "/v1/completions", body, self._headers)
        answer = self._connection.getresponse()
        said = answer.read()
        took = time.perf_counter() - begin
        assert answer.status == 200, said
        return took


def signed_ranks(apart: list[float]) -> float:
    """The chance, two-sided, of ranks as uneven as these or more if a pair's two are alike; by the normal
    distribution."""
    there = sorted((one for one in apart if one), key=abs)
    count = len(there)
    above = sum(rank for rank, one in enumerate(there, 1) if one > 0)
    mean, deviation = count * (count + 1) / 4, math.sqrt(count * (count + 1) * (2 * count + 1) / 24)
    return math.erfc(abs(above - mean) / deviation / math.sqrt(2)) if count else 1.0


def measured(url: str, pairs: int, length: int) -> dict[str, Any]:
    rng = random.Random(0)
    victim, curious = Client(url, VICTIM), Client(url, CURIOUS)

    def fresh() -> list[int]:
        return [rng.randrange(300, 4000) for _ in range(length)]

    for _ in range(20):
        victim.seconds(fresh())
        curious.seconds(fresh())
    known, unknown = list[float](), list[float]()
    for _ in range(pairs):
        sent, other = fresh(), fresh()
        victim.seconds(sent)
        both = [(sent, known), (other, unknown)]
        rng.shuffle(both)
        for tokens, took in both:
            took.append(curious.seconds(tokens))
    apart = [one - another for one, another in zip(known, unknown, strict=True)]
    return {
        "pairs": pairs,
        "tokens": length,
        "sent_before_s": statistics.median(known),
        "fresh_s": statistics.median(unknown),
        "median_difference_s": statistics.median(apart),
        "p": (p := signed_ranks(apart)),
        "told_apart": p <= ALPHA,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=192, help="of a prompt")
    parser.add_argument("--share", action="store_true", help="let keys find each other's prefixes")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    need_commit(asked.out)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "keys.txt").write_text(f"{VICTIM}\n{CURIOUS}\n")
        flags = [
            "--port",
            "0",
            "--api-keys",
            f"{folder}/keys.txt",
            "--device",
            "cpu",
            "--dtype",
            "float32",
            "--device-memory",
            "600MiB",
        ]
        server = Server(Path(folder) / "log", *flags, *(["--share-prefixes"] if asked.share else []))
        try:
            found = measured(server.wait().url, asked.pairs, asked.tokens)
        finally:
            server.process.send_signal(signal.SIGKILL)
            server.process.wait()
    found |= {"bench": "prefix_timing", "shared": asked.share}
    print(json.dumps(found, indent=1))
    if asked.out:
        asked.out.write_text(json.dumps(found | {"environment": environment()}) + "\n")


if __name__ == "__main__":
    main()
