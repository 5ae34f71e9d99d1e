"""Measure how one key of a server slows another by attacking: how long the other's small chats take, with the
attack and without.

    PYTHONPATH=src python3 benchmarks/two_keys.py --seconds 300 --out two_keys.json

The attacker sends at once, again and again: texts of 1 MB to be cut into tokens, conversations of 34,000
messages, 319 outputs of a prompt, bodies that stall, and conversations that make the model's template burn.
With --kinds it also asks for outputs that do not end, as many as it may have: these take the share of the
machine that is its due. The shipped model on the CPU, in a process of its own, with a template that can burn.
Each answer to the other key must be right.
"""

import argparse
import asyncio
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from recording import environment, need_commit  # noqa: E402

from servers import Server  # noqa: E402

ATTACKER, OTHER = "the attacker's key", "the other key"
CHAT = {
    "model": "shipped",
    "messages": [{"role": "user", "content": "Tell me of a boat."}],
    "max_tokens": 16,
    "temperature": 0,
}
MEGABYTE = {"model": "shipped", "prompt": "Once upon a time there was a boat. " * 30_000}
BURN = "burn"
BURNS = (
    "{% if messages[0].content == 'burn' %}{% set n = namespace(x=3) %}"
    "{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}{% endif %}"
)
"""Before the shipped template."""
ENDLESS = {"model": "shipped", "prompt": "The sea", "max_tokens": 1900, "ignore_eos": True}


def raw(path: str, key: str, body: bytes, length: int | None = None) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\nContent-Type: "
        "application/json\r\nConnection: close\r\n"
    )
    return f"{head}Content-Length: {len(body) if length is None else length}\r\n\r\n".encode() + body


async def asked(place: tuple[str, int], sent: bytes) -> tuple[int, bytes]:
    """Status and body; 0 if the connection ends before."""
    try:
        reader, writer = await asyncio.open_connection(*place)
    except OSError:
        return 0, b""
    try:
        writer.write(sent)
        await writer.drain()
        answer = await reader.read(-1)
    except OSError:
        return 0, b""
    finally:
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return (int(head.split(b" ", 2)[1]) if head.startswith(b"HTTP/1.1 ") else 0), body


async def chats(
    place: tuple[str, int], seconds: float, pause: float
) -> tuple[list[float], list[tuple[int, str]]]:
    """Seconds of each, and what was said."""
    took, said, sent, end = (
        list[float](),
        list[tuple[int, str]](),
        raw("/v1/chat/completions", OTHER, json.dumps(CHAT).encode()),
        time.monotonic() + seconds,
    )
    while time.monotonic() < end:
        begin = time.perf_counter()
        status, body = await asked(place, sent)
        took.append(time.perf_counter() - begin)
        said.append(
            (
                status,
                json.loads(body)["choices"][0]["message"]["content"]
                if status == 200
                else body.decode(errors="replace")[:200],
            )
        )
        await asyncio.sleep(pause)
    return took, said


async def attack(place: tuple[str, int], name: str, sent: bytes, met: Counter[str]) -> None:
    """Until it is cancelled."""
    while True:
        status, _ = await asked(place, sent)
        met[f"{name}: {status or 'closed'}"] += 1
        if status in (0, 429):
            await asyncio.sleep(0.2)


async def attacked(place: tuple[str, int], scale: float, chosen: str) -> None:
    """In a process of its own that leaves the processors to others, as one of another machine would, until it
    is told that it is enough."""
    os.nice(19)
    messages = [{"role": role, "content": "a"} for role in ("user", "assistant")] * 17_000
    kinds = {
        "tokens": (raw("/tokenize", ATTACKER, json.dumps(MEGABYTE).encode()), 300),
        "messages": (
            raw("/v1/chat/completions", ATTACKER, json.dumps(CHAT | {"messages": messages[:-1]}).encode()),
            8,
        ),
        "outputs": (raw("/v1/completions", ATTACKER, json.dumps(ENDLESS | {"n": 319}).encode()), 8),
        "stalled": (raw("/v1/completions", ATTACKER, b"{", 1 << 20), 100),
        "templates": (
            raw(
                "/v1/chat/completions",
                ATTACKER,
                json.dumps(CHAT | {"messages": [{"role": "user", "content": BURN}]}).encode(),
            ),
            40,
        ),
        "endless": (raw("/v1/completions", ATTACKER, json.dumps(ENDLESS).encode()), 40),
    }
    met: Counter[str] = Counter()
    tasks = list[asyncio.Task[None]]()
    for name, (sent, count) in ((name, kinds[name]) for name in chosen.split(",")):
        tasks += [
            asyncio.ensure_future(attack(place, name, sent, met)) for _ in range(max(round(count * scale), 1))
        ]
    await asyncio.to_thread(sys.stdin.read)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    print(json.dumps(met))


async def measured(
    place: tuple[str, int], quiet: float, seconds: float, scale: float, kinds: str
) -> dict[str, Any]:
    await chats(place, quiet / 4, 0.05)  # Warm.
    before, right = await chats(place, quiet, 0.05)
    assert {status for status, _ in right} == {200}, right[:3]
    assert len(set(right)) == 1, "answers differ when nobody attacks"
    attacker = subprocess.Popen(
        [sys.executable, __file__, "--attack", *map(str, place), "--scale", str(scale), "--kinds", kinds],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    await asyncio.sleep(min(8.0, seconds / 4))
    during, said = await chats(place, seconds, 0.05)
    met, _ = await asyncio.to_thread(attacker.communicate, b"")
    wrong = [one for one in said if one != right[0]]
    return {
        "quiet": spread(before),
        "attacked": spread(during),
        "wrong": len(wrong),
        "first_wrong": wrong[:3],
        "attacker": json.loads(met),
    }


def spread(took: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(took, n=100)
    return {"count": len(took), "median_s": statistics.median(took), "p99_s": cuts[98], "most_s": max(took)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=300.0, help="of the attack")
    parser.add_argument("--quiet", type=float, default=60.0, help="seconds without one")
    parser.add_argument("--scale", type=float, default=1.0, help="of the attacker's connections")
    parser.add_argument("--kinds", default="tokens,messages,outputs,stalled,templates", help="of attacks")
    parser.add_argument(
        "--flags", default="--device cpu --dtype float32 --max-sequences 8 --queue 64", help="of the server"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--attack", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.attack:
        asyncio.run(attacked((asked.attack[0], int(asked.attack[1])), asked.scale, asked.kinds))
        return
    need_commit(asked.out)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "keys.txt").write_text(f"{ATTACKER}\n{OTHER}\n")
        model = Path(shutil.copytree(ROOT / "src/penstock/shipped", f"{folder}/shipped"))
        config = json.loads((model / "tokenizer_config.json").read_text())
        config["chat_template"] = BURNS + config["chat_template"]
        (model / "tokenizer_config.json").write_text(json.dumps(config))
        flags = ["--port", "0", "--api-keys", f"{folder}/keys.txt", *asked.flags.split()]
        server = Server(Path(folder) / "log", str(model), *flags)
        try:
            url = urlsplit(server.wait().url)
            found = asyncio.run(
                measured(
                    (url.hostname or "", url.port or 0), asked.quiet, asked.seconds, asked.scale, asked.kinds
                )
            )
        finally:
            server.process.send_signal(signal.SIGKILL)
            server.process.wait()
    found |= {
        "bench": "two_keys",
        "seconds": asked.seconds,
        "ratio_p99": found["attacked"]["p99_s"] / found["quiet"]["p99_s"],
    }
    print(json.dumps(found, indent=1))
    if asked.out:
        asked.out.write_text(json.dumps(found | {"environment": environment()}) + "\n")


if __name__ == "__main__":
    main()
