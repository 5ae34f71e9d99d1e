"""Make README's table of numbers from docs/results.

Run `python tools/numbers_table.py --write` after a file there has changed. A row reads its numbers from one
place of one file, and the conditions of the measurement from the same place where the file has them. Numbers
of both sides are medians. The least and the most of the runs stand beside them where the file has them. A row
says so where a peer was not warm.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
BEGIN, END = "<!-- numbers -->\n", "<!-- /numbers -->"
Json = Any


@dataclass(frozen=True)
class Value:
    """A number of one side as text: the median, and beside it the least, the most and the count of runs."""

    text: str
    spread: str = ""


@dataclass(frozen=True)
class Row:
    work: str
    machine: str
    penstock: Value
    beside: str = ""
    """The peer or the bound that the row compares with."""
    theirs: Value = Value("")
    ratio: str = ""


class Results:
    """Result files of a folder, by name without .json."""

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Json] = {
            path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))
        }

    def __getitem__(self, name: str) -> Json:
        return self._files[name]

    def newest(self, bench: str, part: str, having: str) -> Json | None:
        """Return the newest `part` with the entry `having`, among files that end in `bench`; else None."""
        parts = [
            one
            for name in self._files
            if name.endswith(bench)
            if (one := self[name].get(part)) and having in one
        ]
        return max(parts, key=lambda one: one["environment"]["date"], default=None)


def machine(environment: Json, used: int | None = None) -> str:
    """Return a machine as `1 H200` or `2 cores, AMD EPYC`. used: number of its GPUs in use; default all."""
    if devices := environment["devices"]:
        count, name = used or len(devices), devices[0]["name"].removeprefix("NVIDIA ").split()[0]
        return f"{count} {name}"
    return f"{environment['cores']} cores, {environment['processor'].split(' @')[0]}"


def many(samples: Sequence[float], text: Callable[[float], str]) -> Value:
    least, most = text(min(samples)), text(max(samples))
    return Value(text(statistics.median(samples)), f"{least} to {most}, {len(samples)} runs")


def times(ms: Json, text: Callable[[float], str]) -> Value:
    """Return the value of a record of milliseconds."""
    runs = f"{text(ms['least'])} to {text(ms['most'])}, {ms['count']} runs" if ms["count"] > 1 else "1 run"
    return Value(text(ms["median"]), runs)


def timed(record: Json, text: Callable[[float], str]) -> Value:
    """Return the value of a record of seconds; its runs say whether they were not warm."""
    value = many(record["seconds"], text)
    faults = "".join(
        f", {word}"
        for word, wrong in (("not warm", not record["warm"]), ("still falling", record["falling"]))
        if wrong
    )
    return Value(value.text, value.spread + faults)


def millis(digits: int) -> Callable[[float], str]:
    return lambda one: f"{one:.{digits}f} ms"


def seconds(digits: int) -> Callable[[float], str]:
    return lambda one: f"{one:.{digits}f} s"


def gigabytes(rate: float) -> str:
    return f"{rate / 1e9:.3g} GB/s"


def length(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else f"{tokens:,}"


def rows(results: Results) -> Iterator[Row]:
    yield from transformers_on_cpu(results["cpu_against_transformers"])
    yield from server(results["cpu_server_overhead"], "shipped model")
    yield from beside_llama_cpp(results["cpu_llama_cpp"])
    yield from resident(results)
    two = results["h200_tensor_parallel"]
    for kept in ("h200_few_bits", "h100_few_bits"):
        yield from few_bits(results[kept])
    yield from few_bits(
        results["h200_few_bits_cuts"] | {"bench": results["h200_few_bits_cuts"]["decode"]["now"]}
    )
    streamed_by_two = two["2026-11-28, the ring that is taken"]["stream"]
    far = two["2026-11-28, steps that read KV in host memory recorded"]["kv"]
    yield from two_devices(two["2026-11-28, later"] | {"stream": streamed_by_two, "kv": far})
    served = results["h200_server_overhead"]["2026-11-28, 0.6B, 1,000 tokens, prompts recorded beside rows"]
    yield from server(served, "0.6B shape")
    yield from tiers(results["h200_prefix_tiers"])
    yield from streamed(results)
    yield from long_contexts(results)
    needles = results["h200_retrieval"]
    yield Row(
        "shipped model, hidden facts at 512 to 32,768 tokens",
        machine(needles["machine"]),
        Value(f"{needles['exact']:,} of {needles['of']:,} answers exact"),
    )


def transformers_on_cpu(it: Json) -> Iterator[Row]:
    names = {
        "single": "one request",
        "one by one": f"{it['requests']} requests, peer one by one",
        "padded": f"{it['requests']} requests, peer in one padded batch",
    }
    where = machine(it.get("environment") or it["machine"])
    for name, said in names.items():
        one = it["comparisons"][name]
        work = f"{it['parameters_millions']:.0f}M Llama, {it['dtype']}, {said}"
        if "penstock" in one:
            tokens = one["useful_tokens"]
            ours, theirs = (timed(one[side], seconds(2)) for side in ("penstock", "transformers"))
            rates = [
                f"{tokens / one[side]['median_s']:.1f} tokens/s" for side in ("penstock", "transformers")
            ]
            yield Row(
                work,
                where,
                Value(rates[0], ours.spread),
                "transformers",
                Value(rates[1], theirs.spread),
                f"{one['ratio']:.2f}",
            )
            continue
        ours, theirs = (many(one[f"{side}_seconds"], seconds(2)) for side in ("penstock", "transformers"))
        ours, theirs = (
            Value(f"{one[f'{side}_tokens_per_second']:.1f} tokens/s", value.spread)
            for side, value in (("penstock", ours), ("transformers", theirs))
        )
        yield Row(work + ", not warmed up", where, ours, "transformers", theirs, f"{one['ratio']:.2f}")
    peaks = {side: size / 2**20 for side, size in it["peak_bytes"].items()}
    for side in [name for name in ("one by one", "padded") if name in peaks]:
        value = Value(f"{peaks['penstock']:,.0f} MiB")
        work = (
            f"{it['parameters_millions']:.0f}M Llama, {it['dtype']}, {it['requests']} requests, peak memory"
        )
        yield Row(
            work,
            where,
            value,
            f"transformers, {side}",
            Value(f"{peaks[side]:,.0f} MiB"),
            f"{peaks['penstock'] / peaks[side]:.2f}",
        )


def server(it: Json, model: str) -> Iterator[Row]:
    work = f"{model}, server, {it['streams']} streams of {it['tokens']:,} tokens"
    made, sides = it["streams"] * it["tokens"], list[Value]()
    for side in ("served", "alone"):
        took = it[side]["seconds"]
        value = timed(it[side], seconds(1)) if "warm" in it[side] else many(took, seconds(1))
        sides.append(Value(f"{made / statistics.median(took):,.0f} tokens/s", value.spread))
    yield Row(
        work,
        machine(it.get("environment") or it["machine"]),
        sides[0],
        "engine alone",
        sides[1],
        f"{it['share']['median']:.2f}",
    )


def resident(results: Results) -> Iterator[Row]:
    whole = results["h200_execution"]["2026-11-23, gaps explained"]
    for name in ("8B, batch 1", "8B, batch 64", "0.6B, batch 1"):
        one = whole["decode"][name]
        work = (
            f"{one['model']} shape, decode, batch {one['batch']}, {length(one['context'])} of context, "
            f"{one['dtype']}"
        )
        beside = "memory bound", Value(f"{one['bound']['ms']:.2f} ms")
        yield Row(
            work, machine(one["machine"], 1), times(one["ms"], millis(2)), *beside, f"{one['of_bound']:.2f}"
        )
    one = whole["prefill"]["8B"]
    work = f"{one['model']} shape, prompt of {length(one['context'])}, {one['dtype']}"
    bound = Value(f"{one['bound']['ms']:.0f} ms")
    yield Row(
        work,
        machine(one["machine"], 1),
        times(one["ms"], millis(0)),
        "arithmetic bound",
        bound,
        f"{one['of_bound']:.2f}",
    )
    for one in whole["serve, two rounds of each temperature"].values():
        work = (
            f"{one['model']} shape, {one['requests']} requests, prompts and outputs of 100 to 1,024 tokens, "
            f"temperature {one['temperature']:g}"
        )
        rate, spread = (
            f"{one['output_tokens_per_second']:,.0f} tokens/s",
            times(one["ms"], lambda ms: f"{ms / 1e3:.2f} s").spread,
        )
        bound = Value(f"{one['output_tokens_per_second'] / one['of_bound']:,.0f} tokens/s")
        yield Row(
            work,
            machine(one["machine"], 1),
            Value(rate, spread),
            "memory and arithmetic bound",
            bound,
            f"{one['of_bound']:.2f}",
        )


def beside_llama_cpp(whole: Json) -> Iterator[Row]:
    for threads in ("2 threads", "1 thread"):
        one = whole[threads] if threads in whole else whole[threads + "s"]
        for part, said in (("decode", "decode"), ("prompt", f"prompt of {whole['prompt']}")):
            ours, theirs = (
                Value(
                    f"{rate['median']:,.0f} tokens/s",
                    f"{rate['least']:,.0f} to {rate['most']:,.0f} tokens/s, {len(one['runs'][side])} runs",
                )
                for side in ("penstock", "llama.cpp")
                for rate in (one["tokens_per_second"][f"{side} {part}"],)
            )
            medians = [
                one["tokens_per_second"][f"{side} {part}"]["median"] for side in ("penstock", "llama.cpp")
            ]
            work = f"SmolLM2-135M, GGUF Q4_1, {said}, {threads}"
            where = machine(one["environment"])
            yield Row(work, where, ours, "llama.cpp", theirs, f"{medians[0] / medians[1]:.2f}")


def few_bits(whole: Json) -> Iterator[Row]:
    """Decode, a prompt beside bfloat16, and layers that stream; the last two in int4."""
    where = machine(whole["environment"], 1)
    dense = next((one for one in whole["bench"] if one["bench"] == "prefill" and not one["format"]), None)
    for one in whole["bench"]:
        ours = times(one["ms"], millis(2 if one["ms"]["median"] < 100 else 0))
        # Reports of before named no group; these had 128 columns.
        work = f"{one['model']} shape, {'int4:128' if one['format'] == 'int4' else one['format']}, "
        if one["streaming"]:
            link = one["streaming"]["copied_per_pass"] / one["streaming"]["link_ceiling"] * 1e3
            work += "device 16 GiB, rest in host memory, decode, batch 1"
            beside = "measured link", Value(f"{link:.0f} ms"), f"{link / one['ms']['median']:.2f}"
        elif one["bench"] == "decode":
            work += f"decode, batch {one['batch']}, {length(one['context'])} of context"
            beside = "memory bound", Value(f"{one['bound']['ms']:.2f} ms"), f"{one['of_bound']:.2f}"
        elif one["format"] and dense:
            work += f"prompt of {length(one['context'])}"
            theirs = times(dense["ms"], millis(0))
            beside = "bfloat16", theirs, f"{dense['ms']['median'] / one['ms']['median']:.2f}"
        else:
            continue
        yield Row(work, where, ours, *beside)


def two_devices(whole: Json) -> Iterator[Row]:
    for batch in (1, 64):
        one, two = (whole["decode"][f"batch {batch}, {ranks} ranks"] for ranks in (1, 2))
        work = (
            f"{two['model']} shape, decode, batch {two['batch']}, {length(two['context'])} of context, "
            "tensor parallel 2"
        )
        ratio = f"{one['ms']['median'] / two['ms']['median']:.2f}"
        yield Row(
            work,
            machine(two["machine"]),
            times(two["ms"], millis(2)),
            "1 GPU",
            times(one["ms"], millis(2)),
            ratio,
        )
    one, two = (whole["stream"][f"{ranks} ranks"] for ranks in (1, 2))
    rates = [
        ranks * it["streaming"]["copied_per_pass"] / it["ms"]["median"] * 1e3
        for ranks, it in ((1, one), (2, two))
    ]
    work = "16 layers of 70B shape, most in host memory, decode, host to device, tensor parallel 2"
    sides = [Value(gigabytes(rate)) for rate in rates]
    yield Row(
        work,
        machine(two["machine"]),
        sides[1],
        "1 GPU",
        sides[0],
        f"{rates[1] / rates[0]:.2f}",
    )
    one, two = (
        many([1e3 * step for step in whole["kv"][f"{ranks} ranks"]["steps"]], millis(1)) for ranks in (1, 2)
    )
    yield Row(
        "8B shape, decode, 64K tokens of KV in host memory, tensor parallel 2",
        machine(whole["kv"]["environment"]),
        two,
        "1 GPU",
        one,
        f"{whole['kv']['by means: times as fast']:.2f}",
    )


def tiers(whole: Json) -> Iterator[Row]:
    where, first = machine(whole["environment"]), whole["ttft"]
    tokens = first["lengths"][-1]["tokens"]
    cold = many([one["seconds"] for one in first["cold"]], seconds(2))
    for name, said in (
        ("pages", "in GPU memory"),
        ("host", "in host memory"),
        ("disk, as decided", "on disk, part computed meanwhile"),
    ):
        ours = many([one["seconds"] for one in first[name]], seconds(4 if name != "disk, as decided" else 2))
        work = f"8B shape, TTFT, prefix of {length(tokens)} {said}"
        yield Row(work, where, ours, "computed", cold, f"{first[f'{name}_times']:.3g}")
    copies, block = whole["copies"], whole["copies"]["8.00 MiB"]
    for way, said in (("up", "host to device"), ("down", "device to host"), ("both", "both ways")):
        share, ceiling = block[f"{way}_least_from_64"], copies["ceilings"][way]
        work = f"8B shape, copies of 64 and more KV blocks, {said}, slowest"
        yield Row(
            work,
            where,
            Value(gigabytes(share * ceiling)),
            "large copies",
            Value(gigabytes(ceiling)),
            f"{share:.2f}",
        )


def streamed(results: Results) -> Iterator[Row]:
    whole = results["h200_weight_streaming"]
    host, where = whole["host"], machine(whole["host"].get("environment") or whole["environment"])
    link = (host["link_before"] + host["link_after"]) / 2
    for batch in (1, 16):
        one = host[f"decode_{batch}"]
        work = f"70B-shaped layers, 10 of 16 in host memory, decode, batch {one['batch']}"
        yield Row(
            work,
            where,
            Value(gigabytes(one["rate"])),
            "measured link",
            Value(gigabytes(link)),
            f"{one['of_ceiling']:.2f}",
        )
    for part, said in (("offload", "in host memory"), ("offload_disk", "on disk")):
        if one := results.newest("_weight_streaming", part, "accelerate"):
            ours, theirs = timed(one["penstock"], seconds(3)), timed(one["accelerate"], seconds(2))
            work = (
                f"70B-shaped layers, {one['layers'] - one['layers_kept']} of {one['layers']} {said}, decode, "
                "batch 1"
            )
            yield Row(work, machine(one["environment"]), ours, "accelerate", theirs, f"{one['ratio']:.2f}")
    yield from eighty_layers(results)


def eighty_layers(results: Results) -> Iterator[Row]:
    one = results.newest("_weight_streaming", "machine", "caps")
    assert one is not None
    assert not one["over"], "a run above its caps is no row of the table"
    for name, it in one.items():
        if name.startswith("batch_"):
            work = eighty(one["layers"], *one["caps"].values(), it)
            yield Row(
                work,
                machine(one["environment"]),
                timed(it, seconds(2)),
                *read(it["read_per_pass"], one["disk"], it["median_s"]),
            )


def eighty(layers: int, device: str, host: str, it: Json) -> str:
    what = f"{layers} layers of 70B shape, device {device}, host {host}, rest on disk, decode"
    return f"{what}, batch {it['batch']}, {length(it['context'])} tokens of context each"


def read(size: int, rate: float, took: float) -> tuple[str, Value, str]:
    """Return the disk's time for the bytes that a pass reads, and its ratio to the pass."""
    return (
        f"disk, {size / 2**30:.1f} GiB at {gigabytes(rate)}",
        Value(f"{size / rate:.2f} s"),
        f"{size / rate / took:.2f}",
    )


def long_contexts(results: Results) -> Iterator[Row]:
    whole = results["h200_long_contexts"]
    again, where = whole["again"], machine(whole["again"]["environment"], 1)
    host, device = again["long"]["host"], again["long"]["device"]
    for tokens, theirs in ((256 << 10, ("KV on the device", device)), (512 << 10, None)):
        one = host[f"prefill_{tokens}"]
        work = (
            f"8B shape, prompt of {length(tokens)}, KV in host memory, "
            f"{host['peaks'][str(tokens)] / 2**30:.1f} GiB beside the weights"
        )
        if theirs:
            other = theirs[1][f"prefill_{tokens}"]["seconds"]
            yield Row(
                work,
                where,
                Value(f"{one['seconds']:.1f} s"),
                theirs[0],
                Value(f"{other:.1f} s"),
                f"{other / one['seconds']:.2f}",
            )
        else:
            bound = Value(f"{one['seconds'] * one['of_bound']:.0f} s")
            yield Row(
                work,
                where,
                Value(f"{one['seconds']:.0f} s"),
                "arithmetic bound",
                bound,
                f"{one['of_bound']:.2f}",
            )
    one = host["decode"]
    rates = [gigabytes(one["rate"]), gigabytes(again["long"]["link_before"])]
    ratio = f"{one['rate'] / again['long']['link_before']:.2f}"
    yield Row(
        f"8B shape, decode at {length(512 << 10)}, KV in host memory",
        where,
        Value(rates[0]),
        "measured link",
        Value(rates[1]),
        ratio,
    )
    one = again["million"]
    work = (
        f"1B shape, prompt of {len(one['chunks']) * 16}K, KV in host memory, "
        f"{one['peak_device'] / 2**30:.1f} GiB of the device in all"
    )
    bound = Value(f"{one['bound_s']:.0f} s")
    yield Row(
        work,
        where,
        Value(f"{one['prefill_s']:.0f} s"),
        "arithmetic bound",
        bound,
        f"{one['bound_s'] / one['prefill_s']:.2f}",
    )
    yield from peers_of_long_contexts(results)


def peers_of_long_contexts(results: Results) -> Iterator[Row]:
    new = False
    for part, said in (("peer", "in chunks"), ("peer_at_once", "at once")):
        if not (one := results.newest("_long_contexts", part, "transformers")):
            continue
        new, ours, theirs = True, one["penstock, with its memory"], one["transformers"]
        for what in ("prefill", "decode"):
            work = (
                f"8B shape, {length(one['tokens'])} of context {said}, {what}, {ours['peak'] / 2**30:.1f} "
                "GiB beside the weights"
            )
            sides = [timed(side[what], seconds(2 if what == "prefill" else 3)) for side in (ours, theirs)]
            ratio = f"{ours[f'{what}_ratio']:.2f}"
            yield Row(
                work, machine(one["environment"]), sides[0], "transformers, offloaded cache", sides[1], ratio
            )
    if new:
        return
    whole = results["h200_long_contexts"]["peer"]
    ours, theirs = whole["ours"]["with its memory, in chunks"], whole["in chunks"]
    work = (
        f"8B shape, 64K of context in chunks, decode, {ours['peak'] / 2**30:.1f} GiB beside the weights, not "
        "warmed up"
    )
    sides = [many(ours["decode"]["seconds"], seconds(3)), many(theirs["decode_s"], seconds(3))]
    ratio = statistics.median(theirs["decode_s"]) / statistics.median(ours["decode"]["seconds"])
    yield Row(
        work,
        machine(whole["environment"]),
        sides[0],
        "transformers, offloaded cache",
        sides[1],
        f"{ratio:.1f}",
    )


def table(results: Results) -> str:
    head = ("work", "machine", "penstock", "runs", "compared with", "value", "runs", "ratio")
    lines = [head, ("---",) * len(head)]
    lines += [
        (
            it.work,
            it.machine,
            it.penstock.text,
            it.penstock.spread,
            it.beside,
            it.theirs.text,
            it.theirs.spread,
            it.ratio,
        )
        for it in rows(results)
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def written(readme: str, results: Results) -> str:
    """Return `readme` with the table in its place."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + table(results) + END + after


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write into README.md instead of printing")
    given, results = parser.parse_args(), Results(ROOT / "docs" / "results")
    if given.write:
        README.write_text(written(README.read_text(encoding="utf-8"), results), encoding="utf-8")
    else:
        sys.stdout.write(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
