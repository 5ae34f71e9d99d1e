"""Run a server among clients that waste its time and memory: record what each crowd of them gets, costs, and
leaves behind.

    PYTHONPATH=src python3 benchmarks/hostile_clients.py --out hostile.json
    PYTHONPATH=src python3 benchmarks/hostile_clients.py --crowds disconnects,malformed --scale 0.1

Crowds: disconnects, behind (who goes behind a second request), slow (who reads a byte a second), malformed,
framing, endless, large, never (who never asks for anything), connections (very many), uploads (who does not
end them). The shipped model on the CPU, in a process of its own. After each crowd the server must answer as
`LLM.generate` does, hold no KV, and have as many tasks and open files as before. Memory is what the process
has when garbage is collected and what malloc keeps is given back; `peak` is the most it had meanwhile.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from recording import environment, need_commit  # noqa: E402

import hostile  # noqa: E402
from hostile import FLAGS, MIB, Rest, Watched  # noqa: E402
from penstock import LLM, SamplingParams  # noqa: E402
from servers import COUNT, STORY, ending  # noqa: E402

LONGER = 200
"""Tokens of what slow readers ask for."""
QUEUE = 120


@dataclass(frozen=True)
class Right:
    """What the model says: to what everybody asks, and to slow readers."""

    short: str
    long: str


def right() -> Right:
    greedy = SamplingParams(temperature=0, max_tokens=COUNT)
    with LLM(None, device="cpu", dtype="float32", max_length=1024, max_sequences=4) as llm:
        short, long = llm.generate(
            [STORY, STORY], [greedy, SamplingParams(temperature=0, max_tokens=LONGER, ignore_eos=True)]
        )
    return Right(short.text, long.text)


def answers(server: Watched, said: Right) -> bool:
    status, _, answer = server.complete()
    return bool(status == 200 and answer["choices"][0]["text"] == said.short)


def crowds(server: Watched, said: Right, before: Rest, scale: float) -> Mapping[str, Callable[[], object]]:
    def many(count: int) -> int:
        return max(round(count * scale), 1)

    def slow() -> object:
        found = hostile.read_slowly(
            server, many(100), 60 * scale, LONGER, said.long, lambda: answers(server, said)
        )
        return asdict(found) | {"rss_each": round((found.rss - before.rss) / many(100))}

    return {
        "disconnects": lambda: hostile.leave_early(server, many(500)),
        "behind": lambda: hostile.leave_behind_another(server, many(50)),
        "slow": slow,
        "malformed": lambda: hostile.send_malformed(server, many(5000)),
        "framing": lambda: hostile.send_broken(server, many(2000)),
        "endless": lambda: {
            kind: hostile.pour(server, kind, max(many(100 * MIB), 40 * MIB)) for kind in hostile.ENDLESS_ONES
        },
        "large": lambda: hostile.send_large(server, many(4 * MIB)),
        "never": lambda: hostile.never_end(server, many(50)),
        "connections": lambda: hostile.come_together(server, many(2000)),
        "uploads": lambda: hostile.hold_uploads(server, many(40), 30 * MIB, many(40) - 4),
    }


def met(server: Watched, crowd: Callable[[], object], said: Right, before: Rest) -> dict[str, Any]:
    server.rss, begun = before.rss, time.monotonic()
    came = crowd()
    took = time.monotonic() - begun
    assert answers(server, said), "the answer afterwards is not the model's"
    after = server.rest(before)
    return {
        "came": came,
        "seconds": took,
        "peak": server.rss - before.rss,
        "left": after.rss - before.rss,
        "after": asdict(after),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--crowds", help="some of them, with commas between; all without it")
    parser.add_argument("--scale", type=float, default=1.0, help="of all counts and sizes")
    parser.add_argument("--out", type=Path, help="where to write a JSON line")
    asked = parser.parse_args()
    need_commit(asked.out)
    said = right()
    with (
        tempfile.TemporaryDirectory() as folder,
        ending(Watched(Path(folder), "--port", "0", "--queue", str(QUEUE), *FLAGS)) as server,
    ):
        server.wait()
        before = server.warm()
        print(
            f"  at rest: {before.rss / MIB:.0f} MiB, {len(before.tasks)} tasks, {before.files} files",
            flush=True,
        )
        all_of_them = crowds(server, said, before, asked.scale)
        names = asked.crowds.split(",") if asked.crowds else list(all_of_them)
        found = {}
        for name in names:
            found[name] = one = met(server, all_of_them[name], said, before)
            print(
                f"  {name:<12} {one['seconds']:6.1f} s  peak {one['peak'] / MIB:+7.1f} MiB  left "
                f"{one['left'] / MIB:+6.1f}  {one['came']}",
                flush=True,
            )
        assert "Traceback" not in server.said(), server.said()
    if asked.out is not None:
        asked.out.write_text(
            json.dumps(
                {
                    "bench": "hostile clients",
                    "rest": asdict(before),
                    "crowds": found,
                    "machine": environment(),
                }
            )
            + "\n"
        )


if __name__ == "__main__":
    main()
