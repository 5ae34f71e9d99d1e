"""Run `penstock serve --on-demand` with three models and memory for two: clients ask for one and another at
random, so that models are loaded and unloaded all the time.

    PYTHONPATH=src python3 benchmarks/on_demand.py --out docs/results/cpu_on_demand.json
    PYTHONPATH=src python3 benchmarks/on_demand.py --seconds 20

The models are the shipped one and two of random weights, which are written first. Every answer is held
against what `LLM.generate` says to the same prompt with the same settings: greedy ones, and some that are
drawn with a seed. What each client asks for changes slowly: it mostly stays with one model for a while. A
request that has waited for its model says in its headers for how long, and for how long it was expected to.
Before the end all models are unloaded, and the memory of the server's processes is compared with that after
the first loads, unloaded as well.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from random_checkpoint import write_checkpoint
from recording import need_commit, write

from penstock import LLM, SamplingParams
from penstock.api.llm import SHIPPED_MODEL

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from servers import Server, counted, ending, until  # noqa: E402

NAMES = ("shipped", "wide", "deep")
SHAPES = {"wide": {"num_hidden_layers": 8, "intermediate_size": 2048}, "deep": {"num_hidden_layers": 24}}
"""How the random models differ from the shipped one."""
MEMORY = 200 << 20
"""Bytes for each. All have twice that."""
ENGINE = {"device": "cpu", "dtype": "float32", "max_sequences": 4, "max_length": 4096}
BEGINNINGS = (
    "Once upon a time",
    "The little fox",
    "One rainy morning",
    "There was a boat that",
    "The sea said",
    "A girl found a key",
)
STAYS = 0.8
"""The likelihood that a client asks for the same model again."""
PAUSE = 0.4
"""Seconds between two requests of a client, on average."""
CLOSE = 0.2
"""The share of the forecast by which a wait may miss it."""
PERIOD = 1.0
"""Seconds between two looks at the server's memory."""


@dataclass(frozen=True)
class Ask:
    """A request and what its model says to it."""

    model: str
    prompt: str
    tokens: int
    seed: int | None
    right: str

    def body(self) -> dict[str, object]:
        drawn = {"temperature": 0} if self.seed is None else {"temperature": 0.8, "seed": self.seed}
        fields = {"model": self.model, "prompt": self.prompt, "max_tokens": self.tokens}
        return fields | drawn | {"ignore_eos": True}


@dataclass
class Found:
    """What has come of requests. waits: seconds for which one has waited, and the forecast."""

    answered: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    waits: list[tuple[float, float]] = field(default_factory=list)
    wrong: list[object] = field(default_factory=list)
    failed: list[object] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, ask: Ask, seconds: float, status: int, headers: Mapping[str, str], body: Any) -> None:
        with self.lock:
            if status != 200:
                self.failed.append((ask.model, status, body))
                return
            self.answered[ask.model] += 1
            self.seconds.append(seconds)
            if body["choices"][0]["text"] != ask.right:
                self.wrong.append((ask.body(), body["choices"][0]["text"], ask.right))
            if "x-model-wait" in headers:
                self.waits.append((float(headers["x-model-wait"]), float(headers["x-model-wait-forecast"])))


def asks_of(models: Mapping[str, Path], each: int, draw: random.Random) -> dict[str, list[Ask]]:
    """Requests for each model, and the answers of a model that runs alone."""
    asks: dict[str, list[Ask]] = {}
    for name, path in models.items():
        with LLM(path, device_memory=MEMORY, **ENGINE) as llm:  # type: ignore[arg-type]
            asks[name] = []
            for number in range(each):
                prompt = f"{draw.choice(BEGINNINGS)} {number}"
                tokens = draw.choice((4, 16, 48))
                seed = None if draw.random() < 0.5 else draw.randrange(1000)
                how = {"temperature": 0.0} if seed is None else {"temperature": 0.8, "seed": seed}
                params = SamplingParams(max_tokens=tokens, ignore_eos=True, **how)  # type: ignore[arg-type]
                asks[name].append(Ask(name, prompt, tokens, seed, llm.generate(prompt, params)[0].text))
    return asks


def client(server: Server, asks: Mapping[str, Sequence[Ask]], until_: float, seed: int, found: Found) -> None:
    draw = random.Random(seed)
    name = draw.choice(NAMES)
    while time.monotonic() < until_:
        name = name if draw.random() < STAYS else draw.choice(NAMES)
        ask, began = draw.choice(asks[name]), time.monotonic()
        status, headers, body = server.ask("POST", "/v1/completions", ask.body())
        found.note(ask, time.monotonic() - began, status, headers, body)
        time.sleep(draw.expovariate(1 / PAUSE))


def memory_of(server: Server) -> tuple[int, int]:
    """Resident bytes of the server's own process, and of all of its processes that no other one shares."""
    own = psutil.Process(server.process.pid)
    whole = 0
    for one in (own, *own.children(recursive=True)):
        try:
            whole += one.memory_full_info().uss
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return own.memory_info().rss, whole


def unloaded(server: Server) -> tuple[int, int]:
    """The same when all models are unloaded."""
    for name in NAMES:
        server.ask("POST", "/api/generate", {"model": name, "keep_alive": 0})
    stem = psutil.Process(server.process.pid)
    until(lambda: not [one for child in stem.children() for one in child.children()])
    return memory_of(server)


def of_waits(waits: Sequence[tuple[float, float]]) -> dict[str, object]:
    """How near forecasts were."""
    if not waits:
        return {"count": 0}
    errors = [abs(wait - forecast) / max(forecast, 1e-3) for wait, forecast in waits]
    return {
        "count": len(waits),
        "median_wait_s": statistics.median([wait for wait, _ in waits]),
        "median_forecast_s": statistics.median([forecast for _, forecast in waits]),
        "sum_of_waits_over_sum_of_forecasts": sum(w for w, _ in waits) / sum(f for _, f in waits),
        "median_error": statistics.median(errors),
        "share_within_20_percent": sum(error <= CLOSE for error in errors) / len(errors),
    }


def measure(
    server: Server, asks: Mapping[str, Sequence[Ask]], seconds: float, clients: int, seed: int
) -> dict[str, object]:
    found = Found()
    for name in NAMES:  # Every model once, so that what is loaded later is compared with the same.
        ask = asks[name][0]
        found.note(ask, 0.0, *server.ask("POST", "/v1/completions", ask.body()))
    first_waits, found.waits = found.waits, []
    before = unloaded(server)
    end = time.monotonic() + seconds
    threads = [
        threading.Thread(target=client, args=(server, asks, end, seed + number, found))
        for number in range(clients)
    ]
    for thread in threads:
        thread.start()
    own, whole = list[int](), list[int]()
    while any(thread.is_alive() for thread in threads):
        now = memory_of(server)
        own.append(now[0])
        whole.append(now[1])
        time.sleep(PERIOD)
    for thread in threads:
        thread.join()
    after, samples = unloaded(server), counted(server)
    return {
        "requests": dict(found.answered),
        "failed": len(found.failed),
        "wrong": len(found.wrong),
        "first_wrong": found.wrong[:3],
        "first_failed": found.failed[:3],
        "loads": {name: int(samples["model_loads_total", name]) for name in NAMES},
        "request_s": {"median": statistics.median(found.seconds), "most": max(found.seconds)},
        "first_loads": of_waits(first_waits),
        "waits": of_waits(found.waits),
        "rss": {
            "server_unloaded_before": before[0],
            "server_unloaded_after": after[0],
            "server_most": max(own),
            "all_processes_unloaded_before": before[1],
            "all_processes_unloaded_after": after[1],
            "all_processes_most": max(whole),
        },
        "every_wait_and_forecast": [(round(wait, 3), round(forecast, 3)) for wait, forecast in found.waits],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="for which clients ask")
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--asks", type=int, default=12, help="different requests for each model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where to write JSON")
    asked = parser.parse_args()
    need_commit(asked.out)
    draw = random.Random(asked.seed)
    with tempfile.TemporaryDirectory() as folder:
        base = json.loads((SHIPPED_MODEL / "config.json").read_text()) | {"tie_word_embeddings": False}
        models = {"shipped": SHIPPED_MODEL}
        for name, shape in SHAPES.items():
            models[name] = Path(folder) / name
            write_checkpoint(models[name], base | shape)
        asks = asks_of(models, asked.asks, draw)
        flags = [f"{name}={path}" for name, path in models.items()]
        flags += ["--on-demand", "--port", "0", "--quiet", "--device-memory", str(2 * MEMORY)]
        flags += [text for name in NAMES for text in ("--model-memory", f"{name}={MEMORY}")]
        for name in ("device", "dtype", "max_sequences", "max_length"):
            flags += [f"--{name.replace('_', '-')}", str(ENGINE[name])]
        with ending(Server(Path(folder) / "said.txt", *flags)) as server:
            server.wait()
            found = measure(server, asks, asked.seconds, asked.clients, asked.seed)
    result = {"bench": "on demand", "seconds": asked.seconds, "clients": asked.clients, **found}
    print(json.dumps({name: value for name, value in result.items() if name != "every_wait_and_forecast"}))
    if asked.out is not None:
        write(asked.out, result)
    if found["wrong"] or found["failed"]:
        sys.exit("answers were wrong, or none came")


if __name__ == "__main__":
    main()
