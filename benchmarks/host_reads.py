"""Time how fast a GPU's kernels read pinned host memory, by plain loads and by bulk copies through shared
memory, beside its copy engine.

    PYTHONPATH=src python3 benchmarks/host_reads.py --out host_reads.json

Bytes are checked before each way is timed. Bulk copies need compute capability 9.0; kernels are compiled
when this runs. A number is the median of five copies.
"""

import argparse
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import median

import torch
from recording import need_commit, write

SOURCE = r"""
typedef unsigned long long u64;
typedef unsigned int u32;
__device__ u32 shared(const void *at) { return (u32)__cvta_generic_to_shared(at); }
__device__ void expect(u64 *bar, u32 bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :: "r"(shared(bar)), "r"(bytes) : "memory");
}
__device__ void wait(u64 *bar, u32 parity)
{
    asm volatile("{ .reg .pred p;"
                 "again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra again; }"
                 :: "r"(shared(bar)), "r"(parity) : "memory");
}
__device__ void bring(void *to, const void *from, u32 bytes, u64 *bar)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(shared(to)), "l"(from), "r"(bytes), "r"(shared(bar)) : "memory");
}
__device__ void put(void *to, const void *from, u32 bytes)
{
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 :: "l"(to), "r"(shared(from)), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
extern "C" __global__ void bulk(const char *from, char *to, int bytes, int piece, int stages)
{
    extern __shared__ __align__(128) char held[];
    __shared__ u64 bars[16];
    if (threadIdx.x) return;
    for (int s = 0; s < stages; s++)
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(shared(&bars[s])));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    long long pieces = bytes / piece, step = gridDim.x, asked = blockIdx.x, done = 0;
    for (int s = 0; s < stages && asked < pieces; s++, asked += step) {
        expect(&bars[s], piece);
        bring(held + (long long)s * piece, from + asked * piece, piece, &bars[s]);
    }
    for (long long at = blockIdx.x; at < pieces; at += step, done++) {
        int s = done % stages;
        char *here = held + (long long)s * piece;
        wait(&bars[s], (done / stages) & 1);
        put(to + at * piece, here, piece);
        if (asked < pieces) {
            asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
            expect(&bars[s], piece);
            bring(here, from + asked * piece, piece, &bars[s]);
            asked += step;
        }
    }
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
extern "C" __global__ void plain(const int4 *from, int4 *to, int count)
{
    long long at = blockIdx.x * (long long)blockDim.x + threadIdx.x, step = (long long)gridDim.x * blockDim.x;
    for (; at + 7 * step < count; at += 8 * step) {
        int4 some[8];
        #pragma unroll
        for (int i = 0; i < 8; i++) some[i] = __ldcs(from + at + i * step);
        #pragma unroll
        for (int i = 0; i < 8; i++) to[at + i * step] = some[i];
    }
    for (; at < count; at += step) to[at] = from[at];
}
"""
PLAIN = ((8, 512), (16, 512), (32, 512), (64, 256))
"""Blocks and threads."""
BULK = tuple(product((2, 4, 8, 16, 32), ((4096, 8), (8192, 8), (16384, 8), (16384, 12), (32768, 6))))
"""Blocks; bytes of a piece, and pieces in flight of a block."""


def main() -> None:
    """Check and time each way, and print it."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    need_commit(given.out)
    size = given.mib << 20
    host, there = (
        torch.randint(256, (size,), dtype=torch.uint8).pin_memory(),
        torch.empty(size, dtype=torch.uint8, device="cuda"),
    )
    bulk, plain = (
        torch.cuda._compile_kernel(SOURCE, name, compute_capability="90a") for name in ("bulk", "plain")
    )
    found = list[dict[str, object]]()

    def timed(way: str, copy: Callable[[], object]) -> None:
        there.zero_()
        copy()
        torch.cuda.synchronize()
        right, took = torch.equal(there.cpu(), host), list[float]()
        for _ in range(5):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            copy()
            end.record()
            end.synchronize()
            took.append(begin.elapsed_time(end))
        found.append({"way": way, "right": right, "gb_per_second": size / median(took) / 1e6})
        print(f"{way:<48} {found[-1]['gb_per_second']:6.2f} GB/s{'' if right else ', WRONG BYTES'}")

    timed("copy engine", lambda: there.copy_(host, non_blocking=True))
    for blocks, threads in PLAIN:
        call = (blocks, 1, 1), (threads, 1, 1), [host, there, size // 16]
        timed(f"plain, {blocks} blocks of {threads} threads", lambda call=call: plain(*call))  # type: ignore[misc]
    for blocks, (piece, stages) in BULK:
        bulk.set_shared_memory_config(piece * stages)
        call = (blocks, 1, 1), (32, 1, 1), [host, there, size, piece, stages]
        timed(
            f"bulk, {blocks} blocks, {stages} pieces of {piece}",
            lambda call=call, held=piece * stages: bulk(*call, shared_mem=held),  # type: ignore[misc]
        )
    if given.out:
        write(given.out, {"bench": "host reads", "bytes": size, "ways": found})


if __name__ == "__main__":
    main()
