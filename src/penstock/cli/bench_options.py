"""Lists the options of `penstock bench`, and reads their values."""

from functools import partial
from pathlib import Path

import click

from penstock.base.errors import ConfigError
from penstock.base.units import parse_size
from penstock.bench.shapes import SHAPES
from penstock.cli.command import TOKENS, debug_option, option
from penstock.cli.models import download_option
from penstock.cli.options import (
    CPU_COMPUTE,
    DEVICE,
    ENGINE,
    MAX_STEP_TOKENS,
    OUTPUT,
    THREADS,
    beyond_trained,
    check_temperature,
    checked,
    far_kv,
    names_of,
    rate,
    size,
    sizes,
    token_counts,
    weight_format,
)

WORK = "Work"
COUNT = click.IntRange(min=1)
_POLICIES = ["fifo", "lru", "second-use", "prospect", "adaptive", "clairvoyant"]
_SCRATCH = "Random weights beyond device and host memory are read from a file in DIR."
MODEL = (
    option(
        WORK,
        "--shape",
        type=click.Choice(list(SHAPES)),
        help="Random weights in this shape instead of a MODEL.",
    ),
    weight_format(WORK),
)
BATCH = (
    option(
        WORK, "--batch", type=COUNT, default=1, metavar="N", help="Sequences that are computed at once. [1]"
    ),
    option(
        WORK,
        "--context",
        type=TOKENS,
        metavar="N",
        help="Prompt tokens of each. [2048, or what the model has room for]",
    ),
    option(
        WORK,
        "--repeat",
        type=COUNT,
        default=3,
        metavar="N",
        help="Do it all N times, with fresh prompts. [3]",
    ),
    option(
        WORK,
        "--baseline",
        type=click.Choice(["transformers"]),
        help="Measure transformers too, if it is installed.",
    ),
)
BENCH_ENGINE = (
    *DEVICE,
    CPU_COMPUTE,
    option(
        ENGINE,
        "--scratch",
        type=click.Path(file_okay=False, exists=True, path_type=Path),
        metavar="DIR",
        help=_SCRATCH,
    ),
    option(
        ENGINE,
        "--scratch-size",
        callback=size,
        default="16GiB",
        metavar="SIZE",
        help="Most bytes of that file; layers share them. [16GiB]",
    ),
)
WINDOW = (
    option(
        ENGINE,
        "--window",
        callback=size,
        metavar="SIZE",
        help="Size of a sliding window through which all weights pass, for comparison. [none]",
    ),
    option(
        ENGINE,
        "--link-rate",
        callback=rate,
        metavar="SIZE",
        help="Hold the link to a GPU to SIZE bytes/s each way, as that of another machine. [what it has]",
    ),
)
KV_BELOW = far_kv(
    "what the device has no room for; 0: none", "Host memory for KV; given a size, all contexts rest there."
)
REST = (
    MAX_STEP_TOKENS,
    THREADS,
    option(OUTPUT, "--json", is_flag=True, help="Print nothing but the line of JSON."),
    option(
        OUTPUT,
        "--out",
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
        help="Write the line of JSON to FILE, too.",
    ),
    download_option,
    debug_option,
)


def _span(ctx: click.Context, parameter: click.Parameter, value: str) -> tuple[int, int]:
    try:
        least, most = (parse_size(part) for part in value.split(","))
    except (ConfigError, ValueError) as error:
        raise click.BadParameter(
            f"{value!r} is not two token counts; write them like 100,1K", ctx, parameter
        ) from error
    if not 1 <= least <= most:
        raise click.BadParameter(
            f"{value!r} must be a least count of 1 or more, then a most that is not below it; write them "
            "like 100,1K",
            ctx,
            parameter,
        )
    return least, most


CONTEXTS = (
    option(
        WORK,
        "--lengths",
        callback=token_counts,
        metavar="N,N,...",
        help="Prompt tokens: 4096,32K,1M. [4K, 8K, 16K and so on, as there is room]",
    ),
    option(
        WORK, "--output", type=TOKENS, default=8, metavar="N", help="Decode steps to time after each. [8]"
    ),
    option(
        WORK,
        "--repeat",
        type=COUNT,
        default=1,
        metavar="N",
        help="Do it all N times, with fresh prompts. [1]",
    ),
    beyond_trained("--lengths"),
)
REQUESTS = (
    option(
        WORK,
        "--requests",
        type=click.IntRange(1, 1_000_000),
        default=256,
        metavar="N",
        help="Requests, all there from the start. [256]",
    ),
    option(
        WORK,
        "--input",
        "prompt",
        callback=_span,
        metavar="N,N",
        default="100,1024",
        help="Least and most prompt tokens. [100,1024]",
    ),
    option(
        WORK,
        "--output",
        callback=_span,
        metavar="N,N",
        default="100,1024",
        help="Least and most output tokens. [100,1024]",
    ),
    option(
        WORK,
        "--temperature",
        type=float,
        callback=partial(checked, check_temperature),
        default=0.0,
        metavar="T",
        help="Sampling temperature; 0 takes the likeliest tokens. [0]",
    ),
    option(WORK, "--seed", type=int, default=0, metavar="N", help="Seed of lengths and prompts. [0]"),
    option(WORK, "--repeat", type=COUNT, default=1, metavar="N", help="Serve all requests N times. [1]"),
    option(
        WORK,
        "--baseline",
        type=click.Choice(["transformers"]),
        help="Measure transformers too, if it is installed.",
    ),
    option(
        ENGINE, "--max-sequences", type=COUNT, metavar="N", help="Most requests at once. [the device's usual]"
    ),
    option(
        ENGINE,
        "--graphs/--no-graphs",
        default=True,
        help="Replay decode steps as CUDA graphs, on a GPU. [on]",
    ),
    option(
        ENGINE,
        "--kernels/--no-kernels",
        default=True,
        help="Compute by kernels of our own, on a GPU; else by plain torch. [on]",
    ),
)
_ROUTING_HELP = (
    "Let tokens of a mixture take the experts of this routing: uniform, zipf, zipf:S (of rank r as often "
    "as r^-S), or a FILE of `penstock bench experts`. [the routers' own]"
)
ROUTING = (option(WORK, "--routing", metavar="ROUTING", help=_ROUTING_HELP),)
_EXPERT_POLICIES = [
    "static", "ideal", "slots", "slots-shared", "today", "lru", "lfu", "slru", "arc", "s3-fifo"
]  # fmt: skip
_USUAL_POLICIES = "static,today,slots,ideal"
RECORDING = (
    option(
        WORK,
        "--text",
        type=click.Path(path_type=Path),
        metavar="PATH",
        help="The text to read: a file, or a folder's .txt files.",
    ),
    option(
        WORK,
        "--recorded",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Replay a routing that was recorded before, without a model.",
    ),
    option(
        WORK,
        "--sequences",
        type=COUNT,
        default=16,
        metavar="N",
        help="Prompts, spread evenly over the text. [16]",
    ),
    option(WORK, "--prompt", type=TOKENS, default=384, metavar="N", help="Tokens of each prompt. [384]"),
    option(
        WORK, "--output", type=TOKENS, default=128, metavar="N", help="Tokens of each continuation. [128]"
    ),
    option(
        WORK,
        "--slots",
        callback=token_counts,
        metavar="N,N,...",
        help="Numbers of slots, of all layers together. [a 16th to three quarters of all experts]",
    ),
    option(
        WORK,
        "--policies",
        callback=partial(names_of, "policy", _EXPERT_POLICIES),
        default=_USUAL_POLICIES,
        metavar="NAME,...",
        help=f"Policies to compare: {', '.join(_EXPERT_POLICIES)}. [{_USUAL_POLICIES}]",
    ),
    option(
        OUTPUT,
        "--routing-out",
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
        help="Write the recorded routing to FILE.",
    ),
)
HASHES, SERVED = "Without a model", "With a model"
AT_ONCE = 16
_HOST_KV = "Host memory for KV that the device does not hold, also of later requests; 0: none."
CACHES = (
    option(
        HASHES,
        "--rooms",
        callback=sizes,
        default="128GiB,256GiB,512GiB,1TiB,2TiB,4TiB",
        metavar="SIZE,...",
        help="Sizes of the caches. [128GiB to 4TiB]",
    ),
    option(
        HASHES,
        "--block-bytes",
        callback=size,
        default="64MiB",
        metavar="SIZE",
        help="Size of a KV block. [64MiB: 512 tokens of an 8B model]",
    ),
    option(
        HASHES,
        "--policies",
        callback=partial(names_of, "policy", _POLICIES),
        default=",".join(_POLICIES),
        metavar="NAME,...",
        help=f"Eviction policies to compare. [{','.join(_POLICIES)}]",
    ),
    option(
        HASHES,
        "--part",
        type=click.Choice(["whole", "second-half"]),
        default="whole",
        help="Requests that count. [whole]",
    ),
    option(
        HASHES,
        "--cost",
        type=click.IntRange(min=0),
        default=1_000_000,
        metavar="N",
        help="Blocks to measure the cost of `adaptive` with; 0 leaves it out. [1000000]",
    ),
    option(HASHES, "--seed", type=int, default=0, metavar="N", help="Seed of a generated workload. [0]"),
)
REPLAY = (
    option(
        SERVED,
        "--model",
        type=click.Path(path_type=Path),
        metavar="MODEL",
        help="A checkpoint directory, or one with a config.json.",
    ),
    option(SERVED, "--shape", type=click.Choice(list(SHAPES)), help="Random weights in this shape instead."),
    weight_format(SERVED),
    option(
        SERVED,
        "--requests",
        type=COUNT,
        default=100,
        metavar="N",
        help="Requests to serve, from the first of the trace on. [100]",
    ),
    option(
        SERVED,
        "--block-tokens",
        type=TOKENS,
        metavar="N",
        help="Tokens for each block of 512 in the trace. [512, or what the model has room for]",
    ),
    option(
        SERVED,
        "--output",
        type=TOKENS,
        metavar="N",
        help="Tokens of each answer. [as recorded, in proportion]",
    ),
    option(
        SERVED,
        "--speed",
        type=click.FloatRange(min=0, min_open=True),
        metavar="X",
        help="Requests come X times as fast as recorded. [as they are served]",
    ),
    option(SERVED, "--max-sequences", type=COUNT, metavar="N", help=f"Most requests at once. [{AT_ONCE}]"),
    option(
        SERVED,
        "--compare/--no-compare",
        default=True,
        help="Serve the requests again with --kv-store off. [yes]",
    ),
    option(SERVED, "--check-output", is_flag=True, help="Exit with 1 if any answer differs between the two."),
    option(SERVED, "--keep", is_flag=True, help="Start from what --kv-directory has, and leave it there."),
)
REPLAY_KV = far_kv("what the longest request needs", _HOST_KV)
