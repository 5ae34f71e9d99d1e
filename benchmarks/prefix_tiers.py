"""Measure KV prefixes on three tiers: copies against the link, first tokens from every tier, decoding beside
the copies, and the cost of ledgers.

    python benchmarks/prefix_tiers.py --out results.json                8B shape, random weights, on CUDA
    python benchmarks/prefix_tiers.py --tiny                    the same course on small shapes, on any device

Ceilings are measured beside the work, and every part is checked before it is timed, which also warms it up.
Parts may be run by several commands that write to one file; where there is no git, PENSTOCK_COMMIT says which
commit the sources are of. `--parts` takes a few of: copies, ttft, decode, ledger. The last needs no device.
"""

import argparse
import dataclasses
import gc
import random
import sys
import tempfile
import time
import traceback
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch
from long_contexts import Scale, carrier_of, host, prompt_of, running
from recording import Recording
from weight_streaming import GREEDY, disk_ceiling, link_ceiling, row, sync

from penstock.arch.layout import KVLayout, kv_layout
from penstock.base.units import format_rate, format_size
from penstock.bench.speed.measure import EDGE_STEPS, Laps
from penstock.engine.boot import Booted
from penstock.kv.ledger.blocks import BlockLedger
from penstock.kv.ledger.disk import DiskLedger
from penstock.kv.ledger.host import HostLedger
from penstock.kv.ledger.keys import block_keys, root_key
from penstock.kv.movement.hostpool import HostPool
from penstock.kv.movement.pool import KVPool
from penstock.kv.movement.transfers import Transfers
from penstock.memory.arena import Arena
from penstock.memory.device import total_memory
from penstock.memory.link import more_streams
from penstock.memory.streams import Stream, streams_both_ways
from penstock.sched import arrivals
from penstock.sched.rates import TransferRates
from penstock.sched.rules import PrefixRule, SchedulerLimits
from penstock.sched.scheduler import Scheduler
from penstock.step.plan import BlockId, HostBlockId, Landed, Outcome, Result, Route, Transfer, TransferId
from penstock.weights.checkpoint.shape import Shape

PARTS = ("copies", "ttft", "decode", "ledger")
WAYS = {"up": (Route.UP,), "down": (Route.DOWN,), "both": (Route.UP, Route.DOWN)}
RUNS = (1, 4, 16, 64, 256)
TIERS = ("pages", "host", "disk")
SPARE = 4
"""Pages beyond those of a prefix: another prompt leaves no more of it."""
GIB = 1 << 30


# ---- copies


def way_ceilings(device: torch.device, tiny: bool) -> dict[str, float]:
    """Bytes/s of copies of 1 GiB from registered memory, to it, and in both directions at once, as a sum."""
    size, times, found = (4 << 20) if tiny else GIB, 4 if tiny else 12, {}
    near = [Arena(size, torch.device("cpu"), pinned_for=device) for _ in range(2)]
    far = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
    copies, *unused = streams_both_ways(device)
    up, down = more_streams(device, copies)
    for way, routes in WAYS.items():
        for count in (1, times):
            sync(device)
            begin = time.perf_counter()
            for _ in range(count):
                if Route.UP in routes:
                    up.copy(far[0], near[0].bytes)
                if Route.DOWN in routes:
                    down.copy(near[1].bytes, far[1])
            up.mark().wait()
            down.mark().wait()
            found[way] = count * len(routes) * size / (time.perf_counter() - begin)
    for stream in (up, down, copies, *unused):
        stream.close()
    for arena in near:
        arena.close()
    return found


@dataclass
class Yard:
    """Pages and host blocks, and transfers between them."""

    pages: KVPool
    host: HostPool
    transfers: Transfers
    compute: Stream
    _next: int = 0

    def transfer(self, route: Route, pages: Sequence[int], blocks: Sequence[int]) -> Transfer:
        self._next += 1
        return Transfer(
            TransferId(self._next), route, tuple(map(BlockId, pages)), tuple(map(HostBlockId, blocks))
        )

    def begin(self, transfer: Transfer) -> None:
        self.transfers.begin((transfer,), (), self.pages, self.compute.mark)

    def alone(self, transfer: Transfer) -> float:
        """Seconds of a transfer when nothing else is under way, from its streams' marks."""
        self.begin(transfer)
        reports: tuple[Landed, ...] = ()
        while not reports:
            self.transfers.wait(1.0)
            reports = self.transfers.landed()
        return reports[0].seconds

    def together(self, transfers: Sequence[Transfer]) -> tuple[float, list[float]]:
        """Seconds until all have landed that are queued one after another, and of the host for each."""
        calls, begin = [], time.perf_counter()
        for transfer in transfers:
            before = time.perf_counter()
            self.begin(transfer)
            calls.append(time.perf_counter() - before)
        self.transfers.settle()
        return time.perf_counter() - begin, calls


@contextmanager
def yard(layout: KVLayout, blocks: int, device: torch.device) -> Iterator[Yard]:
    """With random bytes everywhere."""
    copies, out, compute = streams_both_ways(device)
    transfers = Transfers(pool := HostPool(layout, blocks, device), *more_streams(device, copies), compute)
    try:
        pages = KVPool(layout, blocks, device)
        for seed, flat in enumerate((pages.bytes, pool.bytes)):
            noise = torch.randint(
                256,
                (min(len(flat), 64 << 20) - 1,),
                dtype=torch.uint8,
                generator=torch.Generator().manual_seed(seed),
            )
            noise = noise.to(flat.device)
            for start in range(0, len(flat), len(noise)):
                part = flat[start : start + len(noise)]
                part.copy_(noise[: len(part)])
        yield Yard(pages, pool, transfers, compute)
    finally:
        transfers.close()
        out.close()
        copies.close()
        pool.close()


def places(rng: random.Random, blocks: int, count: int, scattered: bool) -> tuple[list[int], list[int]]:
    """So many pages and host blocks: anywhere, or one after another on both sides."""
    if scattered:
        return rng.sample(range(blocks), count), rng.sample(range(blocks), count)
    first, other = (rng.randrange(blocks - count + 1) for _ in range(2))
    return list(range(first, first + count)), list(range(other, other + count))


def expect_right(yard: Yard, rng: random.Random, scattered: bool, count: int) -> None:
    """Transfers both ways at once bring what they name and touch nothing else. Raises AssertionError."""
    half = yard.pages.blocks // 2
    pages, blocks = places(rng, half, count, scattered)
    low, high = (pages, blocks), ([page + half for page in pages], [block + half for block in blocks])
    near, far = (flat.view(2 * half, -1) for flat in (yard.pages.bytes, yard.host.bytes))
    right_near, right_far = near.clone(), far.clone()
    right_near[low[0]] = far[low[1]].to(near.device)
    right_far[high[1]] = near[high[0]].to(far.device)
    yard.together([yard.transfer(Route.UP, *low), yard.transfer(Route.DOWN, *high)])
    assert torch.equal(near, right_near), (
        f"{count} blocks, scattered: {scattered}: the device has other bytes than were sent"
    )
    assert torch.equal(far, right_far), (
        f"{count} blocks, scattered: {scattered}: the host has other bytes than were sent"
    )


def part_copies(scale: Scale, device: torch.device) -> dict[str, object]:
    """Blocks of 8B, and of 512 KiB, in runs of several lengths, against copies of large buffers."""
    found: dict[str, object] = {"ceilings_before": way_ceilings(device, scale.tiny)}
    for name, size in (("8B", scale.block), ("1B", scale.block // 2)):
        spec = Shape.of(scale.shape(name)).spec
        layout = kv_layout(spec, spec.dtype, size)
        total = (1 << 20) if scale.tiny else 4 * GIB
        blocks = 4 * max(RUNS) if scale.tiny else max(total // 2 // layout.block_bytes, 2 * max(RUNS))
        one = found[format_size(layout.block_bytes)] = {"block_bytes": layout.block_bytes, "blocks": blocks}
        with yard(layout, blocks, device) as there:
            for scattered in (True, False):
                expect_right(there, random.Random(1), scattered, min(64, blocks // 4))
            one["runs"] = [
                timed(there, random.Random(run), way, scattered, run, total)
                for way in WAYS
                for scattered in (True, False)
                for run in RUNS
            ]
            for scattered in (True, False):
                expect_right(there, random.Random(2), scattered, min(37, blocks // 4))
    found["ceilings_after"] = way_ceilings(device, scale.tiny)
    ceilings = found["ceilings"] = {
        way: (found["ceilings_before"][way] + found["ceilings_after"][way]) / 2 for way in WAYS
    }
    for one in (one for one in found.values() if "runs" in one):
        for run in one["runs"]:
            ceiling = ceilings[run["way"]]
            run["of_ceiling"], share = run["rate"] / ceiling, ""
            if run["way"] != "both":
                run["alone_of_ceiling"] = run["alone_rate"] / ceiling
                share = f"; alone {run['alone_of_ceiling']:.1%}"
            what = (
                f"{run['way']}, {format_size(one['block_bytes'])}, {run['blocks']} "
                f"{'scattered' if run['scattered'] else 'in a row'}"
            )
            text = (
                f"{format_rate(run['rate'])} of {format_rate(ceiling)} = {run['of_ceiling']:.1%}{share}; "
                f"host {run['call_s'] * 1e6:.0f} us"
            )
            row(what, run["seconds"], text)
        for way in WAYS:
            of_large = [run["of_ceiling"] for run in one["runs"] if run["way"] == way and run["blocks"] >= 64]
            one[f"{way}_least_from_64"] = min(of_large)
            target = 0.90 if way == "both" else 0.95
            row(
                f"{way}, {format_size(one['block_bytes'])}, least from 64 blocks up",
                0.0,
                f"{min(of_large):.1%}, target {target:.0%}",
            )
    return found


def timed(
    there: Yard, rng: random.Random, way: str, scattered: bool, run: int, total: int
) -> dict[str, object]:
    """Transfers of `run` blocks, queued until `total` bytes move each way, but no more than 1024; and one at
    a time, from idle. What a call takes is seen in the first ones, behind which there is room in the device's
    queue."""
    layout, routes = there.pages.layout, WAYS[way]
    times = min(max(total // (run * layout.block_bytes), 4), 1024)

    def some(count: int) -> list[Transfer]:
        half = there.pages.blocks // 2  # What goes up and what goes down have nothing in common.
        found = []
        for _ in range(count):
            for at, route in enumerate(routes):
                pages, blocks = places(rng, half, run, scattered)
                found.append(
                    there.transfer(
                        route, [page + at * half for page in pages], [block + at * half for block in blocks]
                    )
                )
        return found

    there.together(some(2))
    seconds, calls = there.together(some(times))
    found = {"way": way, "scattered": scattered, "blocks": run, "times": times, "seconds": seconds}
    found |= {
        "rate": times * len(routes) * run * layout.block_bytes / seconds,
        "call_s": median(calls[:16]),
        "call_worst_s": max(calls[:16]),
    }
    if way != "both":
        alone = median(there.alone(transfer) for transfer in some(min(times, 16)))
        found |= {"alone_s": alone, "alone_rate": run * layout.block_bytes / alone}
    return found


# ---- first tokens


@dataclass(frozen=True)
class First:
    """Seconds to the first token, what was found where, and all tokens. `loaded`: seconds of copies to the
    device."""

    seconds: float
    tokens: tuple[int, ...]
    cached: int
    host: int
    disk: int
    loaded: float


def first_token(booted: Booted, prompt: Sequence[int], tokens: int = 1) -> First:
    engine = booted.engine
    loaded, seconds, out = engine.stats().tiers.up.seconds, 0.0, []
    begin = time.perf_counter()
    engine.submit(prompt, GREEDY, tokens)
    while engine.busy:
        for event in engine.step():
            if event.token is not None:
                seconds, found = seconds or time.perf_counter() - begin, event
                out.append(event.token)
    settled(booted)
    return First(
        seconds,
        tuple(out),
        found.cached,
        found.cached_host,
        found.cached_disk,
        booted.engine.stats().tiers.up.seconds - loaded,
    )


def settled(booted: Booted) -> None:
    """Nothing is on its way any more."""
    booted.engine.tend(120.0)
    assert not booted.engine.scheduler.tiers.moving, "blocks are still on their way after two minutes"


def forget(booted: Booted, *tiers: str) -> None:
    scheduler = booted.engine.scheduler
    for tier in tiers:
        scheduler.forget() if tier == "disk" else (
            scheduler.ledger if tier == "pages" else scheduler.host
        ).forget()
    settled(booted)


@contextmanager
def loaded_anyway() -> Iterator[None]:
    """Meanwhile blocks are brought, and waited for, whatever it costs to compute them."""
    with (
        patch.object(TransferRates, "copying_pays", lambda *_: True),
        patch.object(TransferRates, "computed_first", lambda *_: 0),
        patch.object(arrivals, "_LEAST_PATIENCE", 60.0),
    ):
        yield


def through(booted: Booted, prompt: Sequence[int], tokens: int, *, anyway: bool) -> dict[str, First]:
    """A prompt that is nowhere, and then on each tier alone. anyway: loaded whether that seems faster or
    not."""
    found = {}
    for tier, gone in (("cold", ()), ("pages", ()), ("host", ("pages",)), ("disk", ("pages", "host"))):
        forget(booted, *gone)
        with loaded_anyway() if anyway else nullcontext():
            found[tier] = first_token(booted, prompt, tokens)
    return found


def expect_same(found: dict[str, First], length: int) -> bool:
    """What was loaded gives what was in pages. Raises AssertionError. Returns whether it is what was computed
    at once, too: in half precision the arithmetic of other chunks may decide otherwise between the likeliest
    tokens."""
    where = {tier: (one.cached, one.host, one.disk) for tier, one in found.items()}
    right = {
        "cold": (0, 0, 0),
        "pages": (length, 0, 0),
        "host": (length, length, 0),
        "disk": (length, 0, length),
    }
    assert where == right, f"found {where} of {length} tokens"
    assert found["pages"].tokens == found["host"].tokens == found["disk"].tokens, f"other tokens: {found}"
    return found["cold"].tokens == found["pages"].tokens


def tier_settings(scale: Scale, directory: Path, length: int, prompts: int) -> dict[str, object]:
    """Pages for one prompt of this length and a little more, host blocks and disk for several."""
    return {
        "max_length": length + 16 * scale.block,
        "max_step_tokens": 8 * scale.k,
        "max_sequences": 4,
        "kv_blocks": length // scale.block + SPARE,
        "host_kv_memory": host(scale, "8B", (length + 4 * scale.block) * prompts),
        "disk_kv_memory": (64 << 20) + 2 * host(scale, "8B", (length + 4 * scale.block) * prompts),
        "kv_directory": directory,
    }


def part_ttft(scale: Scale, device: torch.device, directory: Path) -> dict[str, object]:
    """First tokens of prompts that begin with cached tokens and end with a few others, by the tier that has
    the first."""
    longest, tail = 32 * scale.k, scale.block * 3 // 4
    lengths = sorted({max(longest >> power, scale.block) for power in range(8)})
    repeat, found = 2 if scale.tiny else 3, {"link": link_ceiling(device, scale.tiny)}
    with tempfile.TemporaryDirectory(dir=directory) as place:
        settings = tier_settings(scale, Path(place), longest, repeat + 1)
        with running(scale, "8B", device, **settings) as booted:
            vocab = booted.spec.vocab_size
            first_token(booted, prompt_of(longest + tail, 1, vocab), 4)
            found["lengths"] = [by_length(booted, length, tail, repeat) for length in lengths]
            for tier in TIERS:
                worst = found[f"{tier}_worst_of_cold"] = max(
                    one[f"{tier}_of_cold"] for one in found["lengths"]
                )
                row(f"most of a cold first token that one took, {tier}", 0.0, f"{worst:.2f}, target 1")
            forget(booted, "disk")
            both = [prompt_of(longest + tail, seed, vocab) for seed in (2, 3)]
            found |= at_length(booted, both, longest, found["link"], repeat)
        with running(scale, "8B", device, **settings) as booted:
            first_token(booted, prompt_of(longest + tail, 4, vocab))
            with loaded_anyway():
                again = first_token(booted, both[0])
            assert again.disk == longest, f"{again.disk} tokens of {longest} came from disk after a restart"
            assert again.tokens == tuple(found["tokens"]), "other tokens after a restart"
            found["restarted"] = again.seconds
            row(
                f"{longest:,} tokens on disk, after a restart",
                again.seconds,
                f"{found['cold_s'] / again.seconds:.2f} times as fast as cold",
            )
        file = next(Path(place).rglob("*.segment"))
        found["disk"] = disk_ceiling(file, seconds=0.5 if scale.tiny else 3.0)
    found["disk_rate"] = longest * block_bytes(scale) / scale.block / found["restarted"]
    text = f"{format_rate(found['disk_rate'])} of {format_rate(found['disk'])}"
    row("", found["restarted"], text)
    return found


def block_bytes(scale: Scale) -> int:
    spec = Shape.of(scale.shape("8B")).spec
    return kv_layout(spec, spec.dtype, scale.block).block_bytes


def by_length(booted: Booted, length: int, tail: int, repeat: int) -> dict[str, object]:
    """Cold, and from each tier as the engine decides to."""
    vocab = booted.spec.vocab_size
    same = expect_same(through(booted, prompt_of(length + tail, 10 * length, vocab), 8, anyway=True), length)
    runs = [
        through(booted, prompt_of(length + tail, 10 * length + seed, vocab), 1, anyway=False)
        for seed in range(1, repeat + 1)
    ]
    assert all(one["pages"].tokens == one["host"].tokens for one in runs if one["host"].host == length), (
        f"other tokens: {runs}"
    )
    found: dict[str, object] = {"tokens": length, "as_cold": same, "runs": [_plain(one) for one in runs]}
    cold = found["cold_s"] = median(one["cold"].seconds for one in runs)
    for tier in TIERS:
        seconds = found[f"{tier}_s"] = median(one[tier].seconds for one in runs)
        found[f"{tier}_of_cold"] = seconds / cold
    loaded = "".join(
        f", {tier} {median(getattr(one[tier], tier) for one in runs):,.0f}" for tier in ("host", "disk")
    )
    text = "; ".join(
        f"{tier} {found[f'{tier}_s']:.4f} s = {found[f'{tier}_of_cold']:.2f} of it" for tier in TIERS
    )
    row(f"first token after {length:,}, cold", cold, f"{text}; tokens loaded{loaded}; tokens as cold: {same}")
    forget(booted, "disk")
    return found


def at_length(
    booted: Booted, both: Sequence[Sequence[int]], length: int, link: float, repeat: int
) -> dict[str, object]:
    """The longest prefix, pushed out of the pages by another one, which is pushed out in turn."""
    check = through(booted, both[0], 8, anyway=True)
    found: dict[str, object] = {"as_cold": expect_same(check, length), "tokens": check["cold"].tokens[:1]}
    forget(booted, "disk")
    runs: dict[str, list[First]] = {"cold": [first_token(booted, prompt) for prompt in both]}
    runs["host"] = [first_token(booted, prompt) for _ in range(repeat) for prompt in both]
    runs["pages"] = [first_token(booted, both[1]) for _ in range(2 * repeat)]
    runs["disk"], runs["disk, as decided"] = [], []
    for at in range(repeat):
        for how, some in (("disk", runs["disk"]), ("disk, as decided", runs["disk, as decided"])):
            forget(booted, "pages", "host")
            with loaded_anyway() if how == "disk" else nullcontext():
                some.append(first_token(booted, both[at % 2]))
    for tier in TIERS:
        least = length - SPARE * booted.engine.scheduler.limits.block_size * (tier == "host")
        wrong = [
            one
            for one in runs[tier]
            if one.cached != length or getattr(one, tier, length - one.host - one.disk) < least
        ]
        assert not wrong, f"not from {tier}: {wrong}"
    cold = found["cold_s"] = median(one.seconds for one in runs["cold"])
    for how, some in runs.items():
        seconds = found[f"{how}_s"] = median(one.seconds for one in some)
        found[f"{how}_times"] = cold / seconds
        found[how] = [dataclasses.asdict(one) for one in some]
        row(
            f"first token after {length:,}, {how}",
            seconds,
            f"{cold / seconds:.2f} times as fast; all {[round(one.seconds, 4) for one in some]}",
        )
    copied = median(one.loaded for one in runs["host"])
    block = carrier_of(booted).pool.layout.block_bytes  # type: ignore[union-attr]
    found["up_rate"] = length // booted.engine.scheduler.limits.block_size * block / copied
    text = (
        f"{format_rate(found['up_rate'])} of {format_rate(link)} = {found['up_rate'] / link:.1%}; the rest "
        f"{found['host_s'] - copied:.4f} s"
    )
    row("of which copies to the device", copied, f"{text}; targets: 0.095 s in all, 12 times as fast as cold")
    return found


def _plain(runs: dict[str, First]) -> dict[str, object]:
    return {tier: dataclasses.asdict(one) for tier, one in runs.items()}


# ---- decoding


def landed(booted: Booted) -> None:
    """All that is under way has landed, without a step."""
    transfers = carrier_of(booted).transfers  # type: ignore[union-attr]
    while not all(going.done for going in transfers._going.values()):  # type: ignore[union-attr]
        time.sleep(1e-3)


def stepped(booted: Booted, steps: int, requests: int) -> tuple[list[float], list[int]]:
    """Seconds of decode steps, and their tokens. The first EDGE_STEPS are not timed: they were begun before
    (see measure.time_decode)."""
    seconds, tokens, laps = [], [], Laps()
    for number in range(steps):
        events = booted.engine.step()
        lap = laps.lap()
        seconds += [lap] * (number >= EDGE_STEPS)
        assert len(events) == requests, events
        tokens += [event.token for event in events]
    return seconds, tokens


def part_decode(scale: Scale, device: torch.device, directory: Path) -> dict[str, object]:
    """32 requests of 2K tokens: three engines in step, which keep what they compute nowhere, on the host, and
    on disk as well."""
    batch, context, prefix = (4, 8 * scale.k, 16 * scale.k) if scale.tiny else (32, 2 * scale.k, 32 * scale.k)
    window, rounds, loads, tail = (4, 2, 2, 3) if scale.tiny else (64, 6, 4, 24)
    warm = 2 * scale.block + 8
    needed = batch * (-(-(context + warm + (rounds + 4) * window) // scale.block) + 1)
    settings = {
        "max_length": prefix + context + (rounds + 64) * window,
        "max_step_tokens": 8 * scale.k,
        "max_sequences": batch + 2,
        "kv_blocks": needed + prefix // scale.block + 8,
        "host_kv_memory": host(scale, "8B", needed * scale.block + prefix),
    }
    found: dict[str, object] = {"batch": batch, "context": context, "window": window}
    with ExitStack() as opened:
        place = Path(opened.enter_context(tempfile.TemporaryDirectory(dir=directory)))
        disk = {"disk_kv_memory": (64 << 20) + 2 * settings["host_kv_memory"], "kv_directory": place}
        kinds = {"off": {"kv_store": "off"}, "eager": {}, "eager, disk": disk}
        engines = {
            kind: opened.enter_context(running(scale, "8B", device, **settings, **more))
            for kind, more in kinds.items()
        }
        vocab = engines["off"].spec.vocab_size
        kept = prompt_of(prefix + tail, 99, vocab)
        right = first_token(engines["eager"], kept).tokens
        forget(engines["eager"], "pages")
        begun: dict[str, list[int]] = {}
        for kind, booted in engines.items():
            for seed in range(batch):
                booted.engine.submit(prompt_of(context, seed, vocab), GREEDY)
            while booted.engine.scheduler.waiting or len(events := booted.engine.step()) < batch:
                if booted.engine.scheduler.waiting:
                    booted.engine.step()
            begun[kind] = [event.token for event in events]
        for kind, booted in engines.items():
            for _ in range(4):  # Down to the host first, and then out to the disk.
                begun[kind] += stepped(booted, warm // 4, batch)[1]
                landed(booted)
        assert begun["off"] == begun["eager"] == begun["eager, disk"], "other tokens where blocks are kept"
        moved = {kind: booted.engine.stats().tiers for kind, booted in engines.items()}
        seconds: dict[str, list[list[float]]] = {kind: [] for kind in engines}
        for turn in range(rounds):
            for kind in sorted(engines, reverse=bool(turn % 2)):
                some, tokens = stepped(engines[kind], window, batch)
                seconds[kind].append(some)
                begun[kind] += tokens
                landed(engines[kind])
        found["same_tokens"] = begun["off"] == begun["eager"] == begun["eager, disk"]
        for kind, booted in engines.items():
            rates = [batch * len(some) / sum(some) for some in seconds[kind]]
            tiers, before = booted.engine.stats().tiers, moved[kind]
            every = [second for some in seconds[kind] for second in some]
            one = found[kind] = {
                "tokens_per_s": len(every) * batch / sum(every),
                "by_round": rates,
                "step_s": median(every),
                "step_worst_s": max(every),
                "down_bytes": tiers.down.bytes - before.down.bytes,
                "out_bytes": tiers.outward.bytes - before.outward.bytes,
            }
            one["of_off"] = one["tokens_per_s"] / found["off"]["tokens_per_s"]
            moves = f"{format_size(one['down_bytes'])} down, {format_size(one['out_bytes'])} out"
            rounds_text = ", ".join(f"{rate:,.0f}" for rate in rates)
            text = (
                f"{one['tokens_per_s']:,.0f} tokens/s ({rounds_text}) = {one['of_off']:.1%} of off; {moves}; "
                "target 98%"
            )
            row(f"decode, {batch} requests, {kind}", one["step_s"], text)
        row("", 0.0, f"tokens are the same: {found['same_tokens']}")
        assert found["eager"]["down_bytes"] > 0 < found["eager, disk"]["out_bytes"], (
            "nothing was kept in the windows that were measured"
        )
        found["loading"] = loading(
            engines["eager"], kept, right, prefix, batch, loads, found["eager"]["step_s"]
        )
    return found


@loaded_anyway()
def loading(
    booted: Booted,
    prompt: Sequence[int],
    right: tuple[int, ...],
    prefix: int,
    batch: int,
    loads: int,
    usual: float,
) -> dict[str, object]:
    """Steps of the batch while another prompt comes up from the host. `as_alone`: whether its token is that
    of the prompt computed alone and at once, which arithmetic in half precision does not promise."""
    engine, during, firsts, alike = booted.engine, [], [], []
    for _ in range(loads):
        engine.scheduler.ledger.forget()
        for _ in range(4):
            engine.step()
        landed(booted)
        request = engine.submit(prompt, GREEDY, 1)
        begin, mine = time.perf_counter(), []
        while not mine:
            before = time.perf_counter()
            events = engine.step()
            mine = [event for event in events if event.request == request]
            during.append(time.perf_counter() - before)
            assert len(events) == batch + len(mine), events
        during.pop()  # With the prompt's last tokens.
        firsts.append(time.perf_counter() - begin)
        assert mine[0].cached_host == prefix, f"{mine[0].cached_host} tokens of {prefix} came from the host"
        alike.append((mine[0].token,) == right)
    found = {
        "as_alone": alike,
        "loads": loads,
        "steps": len(during),
        "step_s": median(during),
        "first_token_s": median(firsts),
        "seconds": during,
    }
    found["of_usual"] = usual / found["step_s"]
    row(
        "decode while a prompt is loaded",
        found["step_s"],
        f"{found['of_usual']:.1%} of the rate without; its first token {found['first_token_s']:.4f} s",
    )
    return found


# ---- ledgers


def chains(keys: Iterator[bytes], blocks: int, length: int) -> Iterator[list[bytes]]:
    """Prompts of `length` blocks, and a rest."""
    while blocks > 0:
        yield [next(keys) for _ in range(min(length, blocks))]
        blocks -= length


def fill_host(host: HostLedger, prompts: Iterator[list[bytes]]) -> None:
    for prompt in prompts:
        blocks = host.allocate_near(len(prompt))
        for block, key, parent in zip(blocks, prompt, (None, *prompt), strict=False):
            host.seal(block, key, parent)
        host.release(blocks)


def fill_disk(disk: DiskLedger, prompts: Iterator[list[bytes]]) -> None:
    for prompt in prompts:
        for key, parent in zip(prompt, (None, *prompt), strict=False):
            disk.add(key, parent)


def random_keys(seed: int) -> Iterator[bytes]:
    rng = random.Random(seed)
    while True:
        yield rng.randbytes(16)


def keys_of(root: bytes, prompt: Sequence[int], size: int) -> list[bytes]:
    """Of a prompt's full blocks, but for one that holds its last token."""
    return block_keys(root, prompt[:-1], size)


def planned(
    scheduler: Scheduler, prompt: list[int], keys: list[bytes] | None
) -> list[tuple[float, float, str]]:
    """A request to its end: of each step the seconds of its plan and of its commit, and what it did. keys: if
    they are known before."""
    id, steps = scheduler.submit(prompt, GREEDY, 1), []
    if keys is not None:
        scheduler._requests[id].kv.keys.extend(keys)
    while scheduler.busy:
        begin = time.perf_counter()
        plan = scheduler.plan()
        middle = time.perf_counter()
        results = tuple(Result(0 if share.sample else None) for share in plan.shares)
        reports = tuple(Landed(one.id, 1e-5 * len(one.blocks)) for one in plan.transfers)
        outcome = Outcome(results, reports, 1e-4 * plan.tokens)
        before = time.perf_counter()
        scheduler.commit(plan, outcome)
        did = [f"{one.route.name} {len(one.blocks)}" for one in plan.transfers] + (
            [f"{plan.tokens} tokens"] if plan.shares else []
        )
        steps.append((middle - begin, time.perf_counter() - before, ", ".join(did)))
    return steps


def part_ledger(scale: Scale, device: torch.device) -> dict[str, object]:
    """What the scheduler takes to find a prompt of 32K tokens, and to allocate for it, among a million
    blocks; all of it Python's time."""
    size, total, length = (32, 4096, 32) if scale.tiny else (64, 1_000_000, 512)
    asked, root, found = (
        8 if scale.tiny else 60,
        root_key(b"prefix tiers"),
        {"blocks": total, "request_blocks": length},
    )
    found |= {
        "host_bytes": memory_of(partial(host_index, total, length, [])),
        "disk_bytes": memory_of(partial(disk_index, total, length, [])),
    }
    for tier in ("host", "disk"):
        found[f"{tier}_bytes"] /= total
    begin = time.perf_counter()
    seeds = {"host": range(asked), "disk": range(asked, 2 * asked)}
    prompts = {
        tier: [prompt_of(length * size + 24, seed, 1 << 17) for seed in some] for tier, some in seeds.items()
    }
    keys = {tier: [keys_of(root, prompt, size) for prompt in some] for tier, some in prompts.items()}
    host, disk = host_index(total, length, keys["host"]), disk_index(total, length, keys["disk"])
    found["fill_s"] = time.perf_counter() - begin
    pages = BlockLedger(4 * length)
    limits = SchedulerLimits(size, 8192, 16, 1 << 20)
    scheduler = Scheduler(pages, limits, PrefixRule(root), host=host, store="eager", disk=disk)
    # What `planned` says that things take, so that it is decided to bring all.
    rates = scheduler.tiers.rates
    rates.stepped(rates.work(0, 8192), 8192, 1e-4 * 8192, True)
    for route in (Route.IN, Route.UP):
        rates.moved(route, length, 1e-5 * length)
    assert host.cached == total, "the host is not full"
    assert len(disk) == total, "the disk is not full"
    found["requests"] = requests = {}
    for what, tier, known in (
        ("host", "host", True),
        ("host, keys hashed", "host", False),
        ("disk", "disk", True),
        ("disk, keys hashed", "disk", False),
    ):
        part = slice(0, asked // 2) if known else slice(asked // 2, asked)
        runs = [
            planned(scheduler, prompt, names if known else None)
            for prompt, names in zip(prompts[tier][part], keys[tier][part], strict=True)
        ]
        courses = {tuple(did for *_, did in run) for run in runs}
        expected = ([f"IN {length}"] if tier == "disk" else []) + [f"UP {length}", "24 tokens"]
        assert courses == {tuple(expected)}, f"{what}: {courses}"
        requests[what] = [
            {
                "did": did,
                "plan_s": at(runs, index, 0),
                "plan_worst_s": at(runs, index, 0, max),
                "commit_s": at(runs, index, 1),
            }
            for index, did in enumerate(expected)
        ]
        for one in requests[what]:
            text = (
                f"{one['plan_s'] * 1e3:.2f} ms, worst {one['plan_worst_s'] * 1e3:.2f}; to take in what came: "
                f"{one['commit_s'] * 1e3:.2f} ms"
            )
            row(f"plan among {total:,} blocks, {what}: {one['did']}", one["plan_s"], text + "; target 2 ms")
    again = [
        planned(scheduler, prompts["disk"][at], keys["disk"][at]) for at in (asked - 1, asked - 2, asked - 1)
    ]
    assert [len(run) for run in again] == [1, 1, 1], f"not in pages: {again}"
    requests["pages"] = median(run[0][0] for run in again)
    row(f"plan among {total:,} blocks, in pages", requests["pages"], f"{requests['pages'] * 1e3:.2f} ms")
    requests["names"] = hashing = median(
        elapsed(partial(keys_of, root, prompt, size)) for prompt in prompts["host"][:20]
    )
    row(f"keys of {length:,} blocks, hashed", hashing, f"{hashing * 1e3:.2f} ms")
    for tier in ("host", "disk"):
        row(
            f"memory of a block's place in the ledger, {tier}",
            0.0,
            f"{found[f'{tier}_bytes']:.0f} bytes, its key of 49 included",
        )
    scheduler.check()
    return found


def host_index(total: int, length: int, prompts: Sequence[list[bytes]]) -> HostLedger:
    """Full: these, and others before them."""
    host = HostLedger(total)
    fill_host(host, chains(random_keys(1), total - length * len(prompts), length))
    fill_host(host, iter(prompts))
    return host


def disk_index(total: int, length: int, prompts: Sequence[list[bytes]]) -> DiskLedger:
    disk = DiskLedger(total)
    fill_disk(disk, chains(random_keys(2), total - length * len(prompts), length))
    fill_disk(disk, iter(prompts))
    return disk


def memory_of(make: Callable[[], object]) -> int:
    """Bytes that Python has allocated for it."""
    gc.collect()
    tracemalloc.start()
    made = make()
    gc.collect()
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del made
    return taken


def elapsed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def at(
    runs: list[list[tuple[float, float, str]]],
    index: int,
    which: int,
    of: Callable[[Iterator[float]], float] = median,
) -> float:
    return of(run[index][which] for run in runs)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--directory", type=Path, default=Path("/tmp"), help="where what rests on disk is written"
    )
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    given.directory.mkdir(parents=True, exist_ok=True)
    device, scale = torch.device(given.device), Scale(given.tiny, 64)
    recording, failed = (
        Recording(given.out, bench="prefix_tiers", tiny=given.tiny, host=total_memory(torch.device("cpu"))),
        list[str](),
    )
    work: dict[str, Callable[[], dict[str, object]]] = {
        "copies": lambda: part_copies(scale, device),
        "ttft": lambda: part_ttft(scale, device, given.directory),
        "decode": lambda: part_decode(scale, device, given.directory),
        "ledger": lambda: part_ledger(scale, device),
    }
    for part in given.parts.split(","):
        begin = time.perf_counter()
        try:
            found = work[part]()
        except Exception as fault:  # What the other parts found is not lost for it.
            traceback.print_exc()
            found = {"failed": f"{type(fault).__name__}: {fault}"}
            failed.append(part)
        print(f"  {part}: {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
        recording.part(part, found)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
