"""Run `penstock serve` under the arrivals of a production service: at a rate that it can just serve, and at
several times that.

    PYTHONPATH=src python3 benchmarks/serving_load.py --out docs/results/cpu_serving_load.json
    PYTHONPATH=src python3 benchmarks/serving_load.py --minutes 0.5
    PYTHONPATH=src python3 benchmarks/serving_load.py --times 1 --device cuda --tensor-parallel 2 --kill

Arrivals and lengths are those of a trace (Azure LLM inference 2023, conversations), its time stretched to the
rate that is asked for and its lengths scaled to what the shipped model does on a CPU; prompts are cut from
novels. How much the server can do is measured first, with as many clients as it computes outputs at a time,
each of which asks again when it has its answer. Then requests come when the trace says, whatever has become
of those before. Each is a stream, and its text is held against what `LLM.generate` says to the same prompt,
greedily or, for some, with a seed. A refusal must be a 429 that says when to come again. With --kill a rank
is killed in the midst of a last run: every request must end with its text or with an error, and the server.

TTFT is from the moment at which a request was due to the first piece of its text, TPOT between pieces of a
text, on average.
"""

import argparse
import asyncio
import csv
import itertools
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import torch
from recording import need_commit, write

from penstock import LLM, SamplingParams

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT.parent / "shared" / "data"
sys.path.insert(0, str(ROOT / "tests"))

from servers import Server, counted, ending, until  # noqa: E402

TEXTS = ("war_and_peace/2600-0.txt", "tinyshakespeare/input.txt")
LENGTH, ROWS, QUEUE = 4096, 8, 24
"""Most tokens of a request, outputs at a time, and outputs that may wait."""
SETTINGS: dict[str, object] = {
    "dtype": "float32",
    "kv_blocks": 300,
    "max_length": LENGTH,
    "max_sequences": ROWS,
}
"""KV for 19,200 tokens: what comes again is not there any more."""
DRAWN = {"temperature": 0.8, "top_p": 0.95}
PATIENCE = 180.0
"""Seconds after the last arrival, after which what has not ended is lost."""


@dataclass(frozen=True)
class Ask:
    """prompt: text. right: what the model says."""

    prompt: str
    tokens: int
    seed: int | None
    right: str

    def body(self) -> bytes:
        settings = {"temperature": 0} if self.seed is None else DRAWN | {"seed": self.seed}
        fields = {
            "model": "shipped",
            "prompt": self.prompt,
            "max_tokens": self.tokens,
            "ignore_eos": True,
            "stream": True,
        }
        return json.dumps(fields | settings | {"stream_options": {"include_usage": True}}).encode()


@dataclass
class Told:
    """What has become of a request. Seconds are of time.perf_counter()."""

    due: float
    sent: float = 0.0
    first: float = 0.0
    last: float = 0.0
    over: float = 0.0
    status: int = 0
    retry_after: str | None = None
    text: str = ""
    prompt_tokens: int = 0
    tokens: int = 0
    ended: bool = False
    failed: str = ""


# ---- what is asked


@dataclass(frozen=True)
class Row:
    """Of the trace. at: seconds since its first one."""

    at: float
    prompt: int
    output: int


def rows_of(trace: Path) -> list[Row]:
    with trace.open() as file:
        lines = list(csv.DictReader(file))
    times = [datetime.fromisoformat(line["TIMESTAMP"][:26]).timestamp() for line in lines]
    return [
        Row(at - times[0], int(line["ContextTokens"]), int(line["GeneratedTokens"]))
        for at, line in zip(times, lines, strict=True)
    ]


def asks_of(rows: Sequence[Row], scale: float, seeded: float, seed: int, **place: Any) -> list[Ask]:
    """Each with its right answer."""
    rng, found = random.Random(seed), []
    with LLM(None, dtype="float32", max_length=LENGTH, max_sequences=ROWS, progress=True, **place) as llm:
        novels = [llm.encode((DATA / name).read_text(encoding="utf-8")[5000:]) for name in TEXTS]
        for row in rows:
            novel, output = rng.choice(novels), max(round(row.output * scale), 1)
            size = min(max(round(row.prompt * scale), 1), LENGTH - output - 64)
            start = rng.randrange(len(novel) - size)
            found.append(
                (
                    llm.decode(novel[start : start + size]),
                    output,
                    rng.randrange(1 << 30) if rng.random() < seeded else None,
                )
            )
        params = [
            SamplingParams(
                max_tokens=output,
                ignore_eos=True,
                **({"temperature": 0} if own is None else DRAWN | {"seed": own}),
            )
            for _, output, own in found
        ]
        answers = llm.generate([prompt for prompt, _, _ in found], params)
    return [
        Ask(prompt, output, own, answer.text)
        for (prompt, output, own), answer in zip(found, answers, strict=True)
    ]


# ---- the client


async def ask(place: tuple[str, int], one: Ask, told: Told) -> None:
    """On a connection of its own."""
    told.sent = time.perf_counter()
    reader, writer = await asyncio.open_connection(*place, limit=1 << 20)
    try:
        body = one.body()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {place[0]}:{place[1]}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        told.status = int(lines[0].split()[1])
        headers = {
            name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])
        }
        told.retry_after = headers.get("retry-after")
        if told.status != 200:
            await reader.read()
            return
        pieces = []
        while (
            line := await reader.readline()
        ):  # Sizes of chunks are lines too, and no event is more than one.
            if line == b"data: [DONE]\n":
                told.ended = True
            elif line.startswith(b"data: {"):
                event = json.loads(line[6:])
                told.failed = event.get("error", {}).get("message", "")
                if event.get("usage"):
                    told.prompt_tokens, told.tokens = (
                        event["usage"]["prompt_tokens"],
                        event["usage"]["completion_tokens"],
                    )
                for choice in event.get("choices", ()):
                    told.last = time.perf_counter()
                    told.first = told.first or told.last
                    pieces.append(choice["text"])
        told.text = "".join(pieces)
    finally:
        told.over = time.perf_counter()
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def saturated(place: tuple[str, int], asks: Sequence[Ask], seconds: float) -> float:
    """Requests a second, when as many as it computes at a time are always there."""
    order, done = itertools.cycle(asks), 0
    begun = time.perf_counter()

    async def client() -> None:
        nonlocal done
        while time.perf_counter() < begun + seconds:
            told = Told(time.perf_counter())
            await ask(place, next(order), told)
            assert told.status == 200, told
            done += 1

    await asyncio.gather(*[client() for _ in range(ROWS)])
    return done / (time.perf_counter() - begun)


def arrivals(rows: Sequence[Row], rate: float, seconds: float, seed: int) -> Iterator[float]:
    """Seconds at which requests come: the trace's, from somewhere in it on, faster or slower."""
    start = random.Random(seed).randrange(len(rows))
    pace = (len(rows) - 1) / rows[-1].at / rate  # Seconds here for one of the trace.
    clock = 0.0
    for number in itertools.count(start):
        before, now = rows[number % len(rows)], rows[(number + 1) % len(rows)]
        if clock >= seconds:
            return
        yield clock
        clock += max(now.at - before.at, 0.0) * pace


@dataclass
class Watching:
    """The server's memory, in bytes, and the share of a core that it and the client have taken, every few
    seconds."""

    server: psutil.Process
    rss: list[int] = field(default_factory=list)
    server_cpu: list[float] = field(default_factory=list)
    client_cpu: list[float] = field(default_factory=list)

    async def watch(self, every: float) -> None:
        client = psutil.Process()
        for process in (self.server, client):
            process.cpu_percent()
        while True:
            self.rss.append(self.server.memory_info().rss)
            await asyncio.sleep(every)
            self.server_cpu.append(self.server.cpu_percent() / 100)
            self.client_cpu.append(client.cpu_percent() / 100)


async def replay(
    place: tuple[str, int], asks: Sequence[Ask], times: Sequence[float], watching: Watching, every: float
) -> list[Told]:
    begun, told, under_way = time.perf_counter() + 0.1, list[Told](), list["asyncio.Task[None]"]()
    watch = asyncio.ensure_future(watching.watch(every))
    for at, one in zip(times, itertools.cycle(asks)):
        if (wait := begun + at - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        told.append(Told(begun + at))
        under_way.append(asyncio.ensure_future(ask(place, one, told[-1])))
    _, late = await asyncio.wait(under_way, timeout=PATIENCE)
    for task in late:
        task.cancel()
    await asyncio.gather(*under_way, return_exceptions=True)
    watch.cancel()
    return told


# ---- what came of it


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """Milliseconds."""
    if not seconds:
        return {}
    ordered = sorted(seconds)
    return {
        name: 1e3 * ordered[min(int(share * len(ordered)), len(ordered) - 1)]
        for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))
    }


def judged(
    told: Sequence[Told], asks: Sequence[Ask], watching: Watching, rate: float, seconds: float
) -> dict[str, Any]:
    served = [one for one in told if one.status == 200]
    pairs = [
        (one, asked) for one, asked in zip(told, itertools.cycle(asks)) if one.status == 200 and one.ended
    ]
    refused = [one for one in told if one.status == 429]
    others = Counter(str(one.status) for one in told if one.status not in (200, 429))
    took = max((one.last for one in served), default=told[-1].due) - told[0].due
    return {
        "rate": rate,
        "seconds": seconds,
        "requests": len(told),
        "served": len(pairs),
        "refused": len(refused),
        "refused_without_retry_after": sum(not (one.retry_after or "").isdigit() for one in refused),
        "lost": len(served) - len(pairs),
        "other_statuses": dict(others),
        "wrong": sum(one.text != asked.right for one, asked in pairs),
        "drawn": sum(asked.seed is not None for _, asked in pairs),
        "ttft_ms": quantiles([one.first - one.due for one, _ in pairs]),
        "tpot_ms": quantiles(
            [(one.last - one.first) / (one.tokens - 1) for one, _ in pairs if one.tokens > 1]
        ),
        "whole_ms": quantiles([one.last - one.due for one, _ in pairs]),
        "prompt_tokens_per_second": sum(one.prompt_tokens for one, _ in pairs) / took,
        "output_tokens_per_second": sum(one.tokens for one, _ in pairs) / took,
        "sent_late_ms": quantiles([one.sent - one.due for one in told]),
        "rss": {
            "first": watching.rss[0],
            "last": watching.rss[-1],
            "most": max(watching.rss),
            "all": watching.rss,
        },
        "cores": {
            "server": statistics.fmean(watching.server_cpu or [0]),
            "client": statistics.fmean(watching.client_cpu or [0]),
        },
    }


def at_rest(server: Server) -> dict[str, float]:
    """When nothing is computed, and nothing held."""

    def rests() -> bool:
        count = counted(server)
        return not (
            count["num_requests_running",] or count["num_requests_waiting",] or count["kv_cache_usage_perc",]
        )

    until(rests)
    count = counted(server)
    return {name: count[name,] for name in ("num_preemptions_total", "request_abandoned_total")}


def row(what: str, text: str) -> None:
    print(f"  {what:<28} {text}", flush=True)


def tell(found: dict[str, Any]) -> None:
    ttft, tpot, rss = found["ttft_ms"], found["tpot_ms"], found["rss"]
    row(
        f"{found['rate']:.2f} requests/s",
        f"{found['requests']} came, {found['served']} served, {found['refused']} refused, {found['lost']} "
        f"lost, {found['wrong']} wrong",
    )
    if ttft and tpot:
        row(
            "",
            f"TTFT {ttft['p50']:,.0f} / {ttft['p99']:,.0f} ms, TPOT {tpot['p50']:.1f} / {tpot['p99']:.1f} "
            "ms (p50 / p99)",
        )
    row(
        "",
        f"{found['output_tokens_per_second']:.0f} output tokens/s, cores {found['cores']['server']:.2f} + "
        f"{found['cores']['client']:.2f}",
    )
    row(
        "",
        f"RSS {rss['first'] / 2**20:.0f} to {rss['last'] / 2**20:.0f} MiB, at most {rss['most'] / 2**20:.0f}",
    )


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def killed(server: Server, asks: Sequence[Ask], times: Sequence[float], after: float) -> dict[str, Any]:
    """A rank is killed in the midst of this load. What has ended before is right; what has not is told so,
    and nothing waits."""
    place = ("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
    children = psutil.Process(server.process.pid).children(recursive=True)
    [follower] = [child for child in children if "penstock.parallel.seat" in " ".join(child.cmdline())]
    killer = threading.Timer(after, follower.kill)
    begun = time.perf_counter()
    killer.start()
    told = asyncio.run(replay(place, asks, times, Watching(psutil.Process(server.process.pid)), 3600.0))
    ended = [(one, asked) for one, asked in zip(told, itertools.cycle(asks)) if one.ended]
    last = max((one.over for one in told if one.status == 200 and not one.ended), default=0.0)
    return {
        "requests": len(told),
        "served": len(ended),
        "wrong": sum(one.text != asked.right for one, asked in ended),
        "told_in_streams": sum(bool(one.failed) for one in told),
        "statuses": dict(Counter(one.status for one in told)),
        "neither_ended_nor_told": sum(one.status == 200 and not one.ended and not one.failed for one in told),
        "last_told_after_seconds": last - begun - after if last else None,
        "server_ended_with": server.ended(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="of each rate")
    parser.add_argument("--times", default="1,3", help="the rate that can be served, so many times")
    parser.add_argument(
        "--rate", type=float, help="requests a second that can be served; measured without it"
    )
    parser.add_argument(
        "--share",
        type=float,
        default=0.75,
        help="of what was measured, that can be served as it comes in bursts",
    )
    parser.add_argument("--calibrate", type=float, default=20.0, help="seconds to measure it for")
    parser.add_argument("--scale", type=float, default=1 / 8, help="of the trace's lengths")
    parser.add_argument(
        "--distinct", type=int, default=600, help="requests, which come again in the same order"
    )
    parser.add_argument(
        "--drawn", type=float, default=0.25, help="share of requests whose answers are drawn, with a seed"
    )
    parser.add_argument("--threads", type=int, default=1, help="of the server's arithmetic")
    parser.add_argument(
        "--every", type=float, default=5.0, help="seconds between two looks at the server's memory"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--kill", type=float, help="kill a rank after so many seconds of a run at the end")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--trace", type=Path, default=DATA / "azure_llm_2023" / "AzureLLMInferenceTrace_conv.csv"
    )
    parser.add_argument("--out", type=Path, help="where to write a JSON line")
    asked = parser.parse_args()
    need_commit(asked.out)

    if not asked.trace.exists():
        parser.error(
            f"there is no trace at {asked.trace}; give one with --trace: lines of "
            "TIMESTAMP,ContextTokens,GeneratedTokens"
        )
    rows = rows_of(asked.trace)
    start = random.Random(asked.seed).randrange(len(rows) - asked.distinct)
    torch.set_num_threads(asked.threads)
    where = {"device": asked.device, "tensor_parallel": asked.tensor_parallel}
    asks = asks_of(rows[start : start + asked.distinct], asked.scale, asked.drawn, asked.seed, **where)
    flags = [part for name, value in (SETTINGS | where).items() for part in (flag_of(name), str(value))]
    result: dict[str, Any] = {
        "bench": "serving load",
        "model": "shipped",
        "trace": asked.trace.name,
        "server": [*flags, "--queue", str(QUEUE)],
    }
    result |= {"scale": asked.scale, "distinct": asked.distinct, "threads": asked.threads, "runs": []}
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--port", "0", "--quiet", "--queue", str(QUEUE), *flags]
        own = {"OMP_NUM_THREADS": str(asked.threads)}
        with ending(Server(Path(folder) / "said.txt", *flags, environment=own)) as server:
            server.wait()
            place = ("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
            rate = asked.rate
            if rate is None:
                result["saturated"] = asyncio.run(saturated(place, asks, asked.calibrate))
                row("saturated", f"{result['saturated']:.2f} requests/s")
                rate = result["saturated"] * asked.share
            for times in map(float, asked.times.split(",")):
                watching = Watching(psutil.Process(server.process.pid))
                when = list(arrivals(rows, rate * times, 60 * asked.minutes, asked.seed + 1))
                told = asyncio.run(replay(place, asks, when, watching, asked.every))
                found = judged(told, asks, watching, rate * times, 60 * asked.minutes) | {
                    "rest": at_rest(server)
                }
                result["runs"].append(found)
                tell(found)
                if asked.out is not None:
                    write(asked.out, result)
            assert "Traceback" not in server.said(), server.said()
            if asked.kill is not None:
                when = list(arrivals(rows, rate, 2 * asked.kill, asked.seed + 2))
                result["killed"] = killed(server, asks, when, asked.kill)
                row("a rank was killed", json.dumps(result["killed"]))
    if asked.out is not None:
        write(asked.out, result)
    bad = [
        name
        for found in result["runs"]
        for name in ("lost", "wrong", "other_statuses", "refused_without_retry_after")
        if found[name]
    ]
    bad += [
        f"{name} after a kill"
        for name in ("wrong", "neither_ended_nor_told")
        if result.get("killed", {}).get(name)
    ]
    sys.exit(f"not as it should be: {', '.join(bad)}" if bad else 0)


if __name__ == "__main__":
    main()
