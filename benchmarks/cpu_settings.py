"""Time decode steps of models whose weights stream, with --cpu-compute off and auto, in many settings: with
the CPU they must not be slower.

    PYTHONPATH=src python3 benchmarks/cpu_settings.py --out cpu_settings.json
    PYTHONPATH=src python3 benchmarks/cpu_settings.py --shapes 30B-A3B --memory 6GiB --rates 25GB

Each engine is booted once for all numbers of sequences, first without the CPU and then with it. Weights are
random, in MXFP4 or int4; routers choose by themselves. `times` is how many times as fast steps are with the
CPU, by medians; what is below 0.97 is marked. A line ends with the share of the missing experts that the CPU
computed, and the share of all that were in slots.
"""

import argparse
import gc
from collections.abc import Sequence
from pathlib import Path

from recording import Recording

from penstock.arch.formats.recipe import config_in
from penstock.base.config import Config
from penstock.base.units import parse_size
from penstock.bench.shapes import LAYERS_OF, SHAPES
from penstock.bench.speed import measure
from penstock.bench.speed.held import held_link
from penstock.bench.speed.measure import Decoded
from penstock.engine.boot import boot
from penstock.memory.device import give_back
from penstock.weights.checkpoint.shape import Shape

SLOWER = 0.97
CONTEXT, ROUNDS = 256, 2


def shape_of(name: str) -> Shape:
    """Return a shape by its name: gpt-oss in its own format, all others in int4."""
    config = dict(SHAPES[name]) if name in SHAPES else dict(LAYERS_OF[name][0])
    return Shape.of(config if name.startswith("gpt-oss") else config_in("int4", config, name), name)


def timed(
    name: str, memory: str, rate: float | None, batches: Sequence[int], steps: int, use: str
) -> dict[int, Decoded]:
    """Boot an engine, and return what decode steps of so many sequences took."""
    config = Config(
        Path(),
        device="cuda",
        device_memory=memory,
        cpu_compute=use,
        max_sequences=max(batches),
        max_length=CONTEXT + steps + 64,
        prefix_cache=False,
    )
    with held_link("cuda", rate):
        booted = boot(config, shape_of(name), say=lambda _: None)
        try:
            works = {batch: measure.BatchWork(batch, CONTEXT, steps, ROUNDS) for batch in batches}
            return {batch: measure.decode(booted, work) for batch, work in works.items()}
        finally:
            booted.engine.close()
            device = booted.device
            del booted
            gc.collect()
            give_back(device)


def main() -> None:
    """Measure the settings that were asked for, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--shapes", default="gpt-oss-20b,30B-A3B")
    parser.add_argument("--memory", default="6GiB,9GiB")
    parser.add_argument("--rates", default="all,25GB", help="of the link; all: what it has")
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--steps", type=int, default=48)
    given = parser.parse_args()
    batches = [int(batch) for batch in given.batches.split(",")]
    if unknown := set(given.shapes.split(",")) - SHAPES.keys() - LAYERS_OF.keys():
        parser.error(f"no shapes {', '.join(sorted(unknown))}; there are {', '.join([*SHAPES, *LAYERS_OF])}")
    recording = Recording(given.out, context=CONTEXT, steps=given.steps, rounds=ROUNDS)
    for name in given.shapes.split(","):
        for memory in given.memory.split(","):
            for rate in given.rates.split(","):
                held = None if rate == "all" else float(parse_size(rate))
                off, auto = (timed(name, memory, held, batches, given.steps, use) for use in ("off", "auto"))
                for batch in batches:
                    one, other = off[batch].times, auto[batch].times
                    times = one.median / other.median
                    setting = f"{name} {memory} link {rate} batch {batch}"
                    share = auto[batch].experts.cpu_share
                    print(
                        f"{setting}: off {one}; auto {other}; {times:.3f} times as fast"
                        f"{'  SLOWER' if times < SLOWER else ''}; CPU {share:.1%}, "
                        f"hits {off[batch].experts.hit_rate:.1%}",
                        flush=True,
                    )
                    found = {"off": one.median, "off_least": one.least, "off_most": one.most}
                    found |= {"auto": other.median, "auto_least": other.least, "auto_most": other.most}
                    recording.part(setting, found | {"times": times, "by_cpu": share})


if __name__ == "__main__":
    main()
