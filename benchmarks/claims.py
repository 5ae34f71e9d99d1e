"""Run the benchmarks behind what penstock says of its speed on one GPU, and print each number beside its aim.

    PYTHONPATH=src python3 benchmarks/claims.py --out claims.json
    PYTHONPATH=src python3 benchmarks/claims.py --only gpt-oss --seconds 400

The claims are in claims.toml. Those that one run shows share it. A run that no longer fits into `--seconds`
is left out and named; so is one that the machine has no memory for. Runs go one after another, each in a
process of its own. An aim that holds on another card is shown in brackets. Exits with 1 where a run failed or
an aim was missed.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from recording import Recording

from penstock.bench.machine import machine

ROOT = Path(__file__).resolve().parent.parent
GIB = 1 << 30
Json = dict[str, Any]


@dataclass(frozen=True)
class Claim:
    """Describes a number, the run that shows it, and what it should reach. See claims.toml for the fields."""

    name: str
    run: str
    read: str
    seconds: int
    aim: float | None = None
    most: float | None = None
    beside: str = ""
    memory: int = 0
    host: int = 0
    cards: Sequence[str] = field(default_factory=tuple)

    def met(self, value: float) -> bool:
        """Return whether the number reaches its aim; one without an aim does."""
        return (self.aim is None or value >= self.aim) and (self.most is None or value <= self.most)

    def holds_on(self, card: str) -> bool:
        """Return whether the aim is said of this card."""
        return not self.cards or any(name in card for name in self.cards)


def _ms(result: Json) -> float:
    return float(result["ms"]["median"])


def _disk(result: Json) -> float:
    streaming = result["streaming"]
    return float(streaming["read_per_pass"] / (_ms(result) / 1e3) / streaming["disk_ceiling"])


def _link(result: Json) -> float:
    streaming = result["streaming"]
    return float(streaming["copied_per_pass"] / (_ms(result) / 1e3) / streaming["link_ceiling"])


def _plan(result: Json) -> float:
    forecast = float(result["streaming"]["predicted_ms"])
    return min(forecast, _ms(result)) / max(forecast, _ms(result))


READ: dict[str, Callable[[Json], float]] = {
    "ms": _ms,
    "tokens_per_second": lambda result: float(result["tokens_per_second"]),
    "link": _link,
    "roof": lambda result: float(result["of_bound"]),
    "disk": _disk,
    "plan": _plan,
}
"""How a number is read from the line of JSON that a benchmark prints; `speedup` needs two of these."""


def read_claims(path: Path, only: str) -> list[Claim]:
    """Return the claims whose names `only` finds, and those that they are compared with, in the file's order.

    Raises SystemExit where a claim names what is not there, or what comes after it.
    """
    claims = [Claim(**entry) for entry in tomllib.loads(path.read_text(encoding="utf-8"))["claim"]]
    names = {claim.name: claim for claim in claims}
    if len(names) != len(claims):
        sys.exit(f"{path} has two claims of one name")
    before = set[str]()
    for claim in claims:
        if claim.read not in READ and claim.read != "speedup":
            sys.exit(
                f"{path}: {claim.name!r} reads {claim.read!r}; there are {', '.join([*READ, 'speedup'])}"
            )
        if (claim.read == "speedup") != (claim.beside in before):
            sys.exit(f"{path}: {claim.name!r} is compared with {claim.beside!r}, which is no claim before it")
        before.add(claim.name)
    found = {claim.name for claim in claims if re.search(only, claim.name)}
    needed = found | {names[name].beside for name in found}
    return [claim for claim in claims if claim.name in needed]


def lacking(claim: Claim, device: int, host: int) -> str:
    """Return why a machine of so many bytes cannot run a claim; empty if it can."""
    if claim.memory * GIB > device:
        return f"needs {claim.memory} GiB of GPU memory"
    return f"needs {claim.host} GiB of host memory" if claim.host * GIB > host else ""


def run(words: str, limit: float) -> Json | str:
    """Run `penstock bench` in a process of its own. Returns its line of JSON, or why there is none."""
    command = [sys.executable, "-m", "penstock", "bench", *shlex.split(words), "--json"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return f"took longer than {limit:.0f} s"
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    result: Json = json.loads(lines[-1])
    return result


def value_of(claim: Claim, results: dict[str, Json], runs: dict[str, str]) -> float | None:
    """Return a claim's number; None where a run that it needs has none.

    runs: each claim's run by its name.
    """
    result = results.get(claim.run)
    if claim.read != "speedup":
        return None if result is None else READ[claim.read](result)
    base = results.get(runs[claim.beside])
    return None if result is None or base is None else _ms(base) / _ms(result)


def line(claim: Claim, value: float | None, why: str, card: str) -> str:
    """Return a row of the table."""
    aim = f"≥ {claim.aim:g}" if claim.aim is not None else ""
    if claim.most is not None:
        aim = f"≤ {claim.most:g}"
    if aim and not claim.holds_on(card):
        aim = f"({aim})"
    said = why if value is None else f"{value:.4g}"
    mark = "" if value is None or not claim.holds_on(card) or claim.met(value) else "  missed"
    return f"{claim.name:<64} {claim.read:<18} {aim:>9}  {said}{mark}"


def main() -> int:
    """Run what fits, and return 0 if nothing failed and no aim was missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--claims", type=Path, default=Path(__file__).with_name("claims.toml"))
    parser.add_argument("--only", default="", metavar="REGEX", help="claims whose names this finds")
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no run that would end later")
    parser.add_argument("--out", type=Path, help="file for the results")
    asked = parser.parse_args()
    claims, recording = read_claims(asked.claims, asked.only), Recording(asked.out)
    here = machine()
    card = here.devices[0].name if here.devices else "no GPU"
    device = here.devices[0].memory if here.devices else 0
    runs = {claim.name: claim.run for claim in claims}
    results, whys = dict[str, Json](), dict[str, str]()
    ends = time.monotonic() + asked.seconds
    for claim in claims:
        if claim.run not in results and claim.run not in whys:
            why = lacking(claim, device, psutil.virtual_memory().available)
            if not why and time.monotonic() + claim.seconds > ends:
                why = f"no time: about {claim.seconds} s"
            found = why or run(claim.run, 4 * claim.seconds)
            if isinstance(found, str):
                whys[claim.run] = found
            else:
                results[claim.run] = found
        value = value_of(claim, results, runs)
        print(line(claim, value, whys.get(claim.run, "nothing to compare"), card), flush=True)
        part = asdict(claim) | {"value": value, "result": results.get(claim.run), "why": whys.get(claim.run)}
        recording.part(claim.name, part)
    values = [(claim, value_of(claim, results, runs)) for claim in claims]
    missed = [c for c, value in values if value is not None and c.holds_on(card) and not c.met(value)]
    left = [claim for claim, value in values if value is None]
    print(f"{card}: {len(claims)} claims, {len(missed)} missed, {len(left)} without a number")
    return 1 if missed or left else 0


if __name__ == "__main__":
    sys.exit(main())
