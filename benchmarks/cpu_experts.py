"""Time feed-forwards of experts that are computed on the CPU, where they rest, beside the rate at which this
machine reads its memory.

    PYTHONPATH=src python3 benchmarks/cpu_experts.py --out cpu_experts.json
    PYTHONPATH=src python3 benchmarks/cpu_experts.py --threads 16 --rows 1,8,16 --formats mxfp4
    PYTHONPATH=src python3 benchmarks/cpu_experts.py --cpu-time  one thread, where others use the machine too
    PYTHONPATH=src python3 benchmarks/cpu_experts.py --tiny      the same code over tiny shapes

The read rate is that of all threads, the best of several loops in C that do nothing but read, over memory far
larger than the caches. It is taken before the first format and after each, and the best counts. `share` is
the bytes of weights a second over that rate. Each call computes as many experts as one layer asks for, the
next call others, and all together fill `--gib`. Every format is checked against plain arithmetic before it is
timed. `bound` is the share that the processor's arithmetic allows at most: terms a second of its dot products
of bfloat16, or of its products in float32, measured in the same run; tiles (AMX) may be faster. `--cpu-time`
divides by the seconds that a thread has had of a core, not by those of the clock.
"""

import argparse
import ctypes
import itertools
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from few_bits import FORMATS, random_matrix
from recording import Recording
from torch import Tensor

from penstock.arch.spec import SWIGLU
from penstock.memory.arena import Arena
from penstock.ops.activation import activate
from penstock.ops.matrix import GroupViews, Matrix
from penstock.ops.native.compiler import find_compiler
from penstock.ops.native.experts import ThreadPool, by_dots, takes

DTYPE = torch.bfloat16
MAX_ERROR = 2e-2
"""Of the whole, relative to the largest value: roundings of what is between the products, and of results."""


@dataclass(frozen=True)
class Shape:
    """A layer's experts, and how many of them a token takes."""

    hidden: int
    inner: int
    top_k: int


@dataclass(frozen=True)
class Timed:
    """A format's time in calls of so many `experts` with `rows` rows each: `bytes` of weights an expert.

    rate: bytes of weights a second. most: what arithmetic allows. dots: whether by dot products.
    """

    shape: str
    format: str
    rows: int
    experts: int
    bytes: int
    seconds: float
    rate: float
    most: float
    dots: bool
    error: float


SHAPES = {"gpt-oss": Shape(2880, 2880, 4), "Qwen3-30B-A3B": Shape(2048, 768, 8)}
TINY = {"tiny": Shape(128, 64, 2)}
NAMES = ("mxfp4", "int4", "fp8", "bf16")
_ALIGN = 256
_C = r"""
#include <pthread.h>
#include <stdint.h>
typedef uint64_t vec __attribute__((vector_size(64)));
#if defined(__AVX512F__)
#define WIDTH 64
#else
#define WIDTH 32
#endif
typedef float floats __attribute__((vector_size(WIDTH)));
struct part { const char *from; size_t bytes; int way; vec found; };

static void *read_part(void *about)
{
    struct part *p = about;
    vec a = {0}, b = a, c = a, d = a;
    const vec *at = (const vec *)p->from;
    size_t count = p->bytes / 64, quarter = count / 4;
    if (p->way < 2)
        for (size_t i = 0; i + 4 <= count; i += 4) {
            if (p->way == 1)
                for (int line = 0; line < 4; line++)
                    __builtin_prefetch(at + i + 64 + line, 0, 2);
            a |= at[i], b |= at[i + 1], c |= at[i + 2], d |= at[i + 3];
        }
    else
        for (size_t i = 0; i < quarter; i++)
            a |= at[i], b |= at[quarter + i], c |= at[2 * quarter + i], d |= at[3 * quarter + i];
    p->found = a | b | c | d;
    return 0;
}

#if defined(__AVX512BF16__)
#include <immintrin.h>
#define TERMS 32
typedef __m512i operand;
#define STEP(sum, x, y) _mm512_dpbf16_ps(sum, (__m512bh)(x), (__m512bh)(y))
typedef __m512 sums;
#else
#define TERMS (WIDTH / 4)
typedef floats operand, sums;
#define STEP(sum, x, y) ((sum) + (x) * (y))
#endif

#if defined(__x86_64__)
#define KEPT "+x"
#else
#define KEPT "+w"
#endif

static void *compute_part(void *about)
{
    struct part *p = about;
    operand x = {0}, y = {0};
    sums all[14];
#pragma GCC unroll 14
    for (int k = 0; k < 14; k++)
        all[k] = (sums){0};
    for (size_t i = 0; i < p->bytes; i++) {
        __asm__ volatile("" : KEPT(x), KEPT(y));
#pragma GCC unroll 14
        for (int k = 0; k < 14; k++)
            all[k] = STEP(all[k], x, y);
    }
#pragma GCC unroll 14
    for (int k = 0; k < 14; k++)
        p->found[0] += (uint64_t)((floats)all[k])[0];
    return 0;
}

int terms(void) { return 14 * TERMS; }

int on_threads(int threads, int way, const char *from, size_t bytes)
{
    struct part parts[threads];
    pthread_t ids[threads];
    int found = 0;
    for (int i = 0; i < threads; i++) {
        size_t each = bytes / threads / 256 * 256;
        parts[i] = (struct part){from ? from + i * each : 0, from ? each : bytes, way, {0}};
        if (pthread_create(&ids[i], 0, from ? read_part : compute_part, &parts[i]))
            return -1;
    }
    for (int i = 0; i < threads; i++)
        pthread_join(ids[i], 0), found += (int)parts[i].found[0];
    return found;
}
"""


class Machine:
    """Measures what this machine's threads read, and multiply, a second."""

    def __init__(self, threads: int) -> None:
        """Compile the loops."""
        self._threads = threads
        with tempfile.TemporaryDirectory() as folder:
            source, made = Path(folder, "loops.c"), Path(folder, "loops.so")
            source.write_text(_C)
            flags = [
                "-O3",
                "-march=native",
                "-ffast-math",
                "-shared",
                "-fPIC",
                "-w",
                "-o",
                str(made),
                str(source),
            ]
            subprocess.run([*find_compiler(), *flags, "-lpthread"], check=True)
            self._library = ctypes.CDLL(str(made))
        self._library.on_threads.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]

    def read_rate(self, memory: Tensor) -> float:
        """Return bytes a second, the best of all loops."""
        ways = (lambda way=way: self._run(way, memory.data_ptr(), memory.nbytes) for way in range(3))
        return memory.nbytes / min(best(way, 3) for way in ways)

    def terms_rate(self) -> float:
        """Return terms of products a second."""
        steps = 1 << 21
        terms: int = self._library.terms()
        return self._threads * steps * terms / best(lambda: self._run(0, None, steps), 3)

    def _run(self, way: int, address: int | None, count: int) -> None:
        self._library.on_threads(self._threads, way, address, count)


def clock() -> float:
    """Return the seconds by which all is timed."""
    return time.process_time() if "--cpu-time" in sys.argv else time.perf_counter()


def best(call: Callable[[], object], times: int) -> float:
    """Return the least seconds of a call."""
    found = math.inf
    for _ in range(times):
        start = clock()
        call()
        found = min(found, clock() - start)
    return found


def random_expert(name: str, shape: Shape) -> Mapping[str, Matrix]:
    """Return an expert's random matrices."""
    sizes = {"gate_up": (2 * shape.inner, shape.hidden), "down": (shape.hidden, shape.inner)}
    if name == "bf16":
        return {
            key: Matrix.of((torch.randn(*size) / size[1] ** 0.5).to(DTYPE)) for key, size in sizes.items()
        }
    return {key: random_matrix(FORMATS[name], size, len(key), "cpu") for key, size in sizes.items()}


def copies(first: Mapping[str, Matrix], memory: Tensor) -> list[GroupViews]:
    """Return copies of an expert that fill memory, one behind the other."""
    made, at = list[GroupViews](), 0
    while True:
        matrices = dict[str, Matrix]()
        for key, one in first.items():
            parts = dict[str, Tensor]()
            for name, part in one.parts.items():
                if at + part.nbytes > len(memory):
                    return made
                room = memory[at : at + part.nbytes].view(part.dtype).view(part.shape)
                parts[name] = room.copy_(part)
                at += -(-part.nbytes // _ALIGN) * _ALIGN
            matrices[key] = Matrix(one.format, one.shape, parts)
        made.append(GroupViews(matrices, {}, ()))


def check(x: Tensor, got: Tensor, expert: Mapping[str, Matrix]) -> float:
    """Return the largest error of an expert's output, relative to the largest value."""
    plain = {key: one.dequantised(torch.empty(0)).float() for key, one in expert.items()}
    inner = activate(x.float() @ plain["gate_up"].T, SWIGLU).to(DTYPE).float()
    want = inner @ plain["down"].T
    return float((got.float() - want).abs().max() / want.abs().max())


def seconds_a_call(
    pool: ThreadPool, experts: Sequence[GroupViews], x: Tensor, each: int, rounds: int
) -> float:
    """Return the least seconds of calls of `each` experts, with all rows of x through every one."""
    rows = len(x)
    out, tokens = x.new_empty(each * rows, x.shape[1]), torch.arange(rows, dtype=torch.int32).repeat(each)
    calls = [experts[at : at + each] for at in range(0, len(experts) - each + 1, each)]

    def all_calls() -> None:
        for call in calls:
            pool.feed_forward(x, call, [rows] * each, SWIGLU, out, tokens)

    return best(all_calls, rounds) / len(calls)


def main() -> None:
    """Run what was asked for, print a line for each and write the results."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--formats", default=",".join(NAMES))
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--rows", default="1,8")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    given.threads = 1 if given.cpu_time else given.threads
    shapes = TINY if given.tiny else {name: SHAPES[name] for name in given.shapes.split(",")}
    recording = Recording(given.out, threads=given.threads)
    memory = Arena(1 << 20 if given.tiny else int(given.gib * (1 << 30)), torch.device("cpu")).bytes
    machine, pool = Machine(given.threads), ThreadPool(given.threads, tiles=True)
    terms, rates, found = machine.terms_rate(), [machine.read_rate(memory)], list[Timed]()
    for (label, shape), name in itertools.product(shapes.items(), given.formats.split(",")):
        first = random_expert(name, shape)
        experts = copies(first, memory)
        moved = sum(part.nbytes for one in first.values() for part in one.parts.values())
        for rows in map(int, given.rows.split(",")):
            x = torch.randn(rows, shape.hidden).to(DTYPE)
            if not takes(x, experts[0]):
                sys.exit(f"no kernels for {name}")
            out = torch.empty_like(x)
            pool.feed_forward(x, experts[:1], [rows], SWIGLU, out)
            error = check(x, out, first)
            assert error < MAX_ERROR, (name, rows, error)
            taken = seconds_a_call(pool, experts, x, shape.top_k, given.rounds)
            rate, most = shape.top_k * moved / taken, terms * moved / (3 * shape.hidden * shape.inner * rows)
            by = by_dots(x, first["gate_up"])
            found.append(Timed(label, name, rows, shape.top_k, moved, taken, rate, most, by, error))
        rates.append(machine.read_rate(memory))
    read, tiles = max(rates), pool.by_tiles
    pool.close()
    print(f"{given.threads} threads read {read / 1e9:.1f} GB/s, {min(rates) / 1e9:.1f} at worst")
    print(f"and multiply {terms / 1e9:.0f} G terms/s; tiles: {tiles}")
    for one in found:
        print(
            f"{one.shape:14} {one.format:6} {one.rows:3} rows: {one.rate / 1e9:6.1f} GB/s, share "
            f"{one.rate / read:.2f} (bound {min(1.0, one.most / read):.2f}), {1e6 * one.seconds:.0f} us, "
            f"dots {one.dots}"
        )
    rows_found = [asdict(one) | {"share": one.rate / read, "bound": one.most / read} for one in found]
    recording.part(
        "cpu experts",
        {"read_rate": read, "read_rates": rates, "terms_rate": terms, "tiles": tiles, "rows": rows_found},
    )


if __name__ == "__main__":
    main()
