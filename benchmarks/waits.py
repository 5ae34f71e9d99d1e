"""Measure how far off forecasts of first tokens are: bursts of requests with prompts of mixed lengths, and
requests that come at random, against `penstock serve` on a CPU.

    PYTHONPATH=src python3 benchmarks/waits.py --out docs/results/cpu_waits.json

The shipped model is served with few rows, so that most of a burst waits for outputs to end, and with as many
as there are requests. Each request is a stream. What is forecast is its header X-Expected-First-Token; what
was is the time from when it was sent to the first event. `off` is the difference as a part of what was. A
first burst teaches the server and is told by itself: then nothing of the kind has been measured. The load
average of each part says what else the machine had to do: what steps take is then not what they took.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from recording import Recording

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from servers import Server, ending  # noqa: E402

BURST = 64
SHORT, MIXED = (16, 40, 64, 100, 160, 240), (16, 40, 100, 240, 400, 700, 1000)
OUTPUTS = (8, 16, 32, 48)
FLAGS = ("--device", "cpu", "--dtype", "float32", "--device-memory", "1GiB", "--queue", "256", "--quiet")


class Wait(NamedTuple):
    """What was forecast for a request, and what was, in seconds."""

    expected: float | None
    actual: float


async def ask(place: tuple[str, int], length: int, output: int, dice: random.Random) -> Wait:
    """Send a request, and read its first event, and the rest."""
    body = json.dumps(
        {
            "model": "shipped",
            "prompt": [dice.randrange(10, 900) for _ in range(length)],
            "max_tokens": output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()
    reader, writer = await asyncio.open_connection(*place)
    begin = time.monotonic()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
    told = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
    assert told[0].startswith("http/1.1 200"), told
    expected = next(line.partition(": ")[2] for line in told if line.startswith("x-expected-first-token"))
    await reader.readuntil(b"data: ")
    actual = time.monotonic() - begin
    await reader.read()
    writer.close()
    return Wait(None if expected == "unknown" else float(expected), actual)


def judged(what: str, waits: Sequence[Wait]) -> dict[str, object]:
    """Return how far off forecasts were, and say it."""
    known = [one for one in waits if one.expected is not None]
    off = sorted(abs(one.actual - one.expected) / one.actual for one in known if one.expected is not None)
    waited = sorted(one.actual for one in waits)
    found: dict[str, object] = {
        "requests": len(waits),
        "forecast": len(known),
        "off_median": median(off) if off else None,
        "off_p90": off[len(off) * 9 // 10] if off else None,
        "within_20_percent": sum(one <= 0.2 for one in off) / len(off) if off else None,
        "seconds_median": median(waited),
        "seconds_most": waited[-1],
        "waits": [list(one) for one in waits],
    }
    told = f"off median {found['off_median']:.3f}, p90 {found['off_p90']:.3f}" if off else "nothing forecast"
    print(
        f"{what}: {len(known)} of {len(waits)} forecast, {told}; waited up to {waited[-1]:.2f} s", flush=True
    )
    return found


async def run(
    place: tuple[str, int], lengths: Sequence[int], bursts: int, dice: random.Random
) -> dict[str, object]:
    """Send bursts, and requests one by one, and judge each kind by itself."""

    def one() -> Awaitable[Wait]:
        return ask(place, dice.choice(lengths), dice.choice(OUTPUTS), dice)

    found: dict[str, object] = {}
    for number in range(bursts + 1):
        waits = await asyncio.gather(*[one() for _ in range(BURST)])
        name = f"burst {number}" if number else "first burst"
        found[name] = judged(name, waits)
    found["alone"] = judged("alone", [await one() for _ in range(32)])
    return found


def main() -> None:
    """Measure, and write what was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="file of results")
    parser.add_argument("--bursts", type=int, default=3)
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 64])
    asked = parser.parse_args()
    recording = Recording(asked.out, bench="waits", model="shipped", burst=BURST)
    for rows in asked.rows:
        for kind, lengths in (("short", SHORT), ("mixed", MIXED)):
            flags = (*FLAGS, "--port", "0", "--max-sequences", str(rows))
            with (
                tempfile.TemporaryDirectory() as folder,
                ending(Server(Path(folder) / "log", *flags)) as server,
            ):
                server.wait()
                address, _, port = server.url.rpartition(":")
                name = f"{rows} rows, {kind} prompts"
                print(name)
                found = asyncio.run(
                    run(
                        (address.removeprefix("http://"), int(port)),
                        lengths,
                        asked.bursts,
                        random.Random(rows),
                    )
                )
                recording.part(
                    name,
                    {
                        "flags": list(flags),
                        "prompt_tokens": list(lengths),
                        "output_tokens": list(OUTPUTS),
                        "load_average": os.getloadavg()[0],
                        **found,
                    },
                )


if __name__ == "__main__":
    main()
