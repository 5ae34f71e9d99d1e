"""Measure what the seals of KV records add to a read: the store's own reads from a disk, sealed, with CRC-32
in place of the seal, and unchecked.

    PYTHONPATH=src python3 benchmarks/seal_cost.py --directory /var/tmp --out seal_cost.json

All records are read by the store's readers, past the page cache, in rounds; the three ways take turns in
each, in an order drawn by lot.
"""

import argparse
import mmap
import random
import statistics
import tempfile
import time
import zlib
from pathlib import Path
from unittest.mock import patch

from recording import need_commit, write

from penstock.kv.store.blocks import BlockStore
from penstock.kv.store.directory import StoreIdentity
from penstock.kv.store.seal import Seal

RECORD, MEMORIES = 1 << 20, 32


def crc32(self: Seal, seal: bytes, key: bytes, data: memoryview) -> bool:
    return zlib.crc32(data, zlib.crc32(key)) >= 0


def unchecked(self: Seal, seal: bytes, key: bytes, data: memoryview) -> bool:
    return True


WAYS = {"sealed": Seal.fits, "crc32": crc32, "unchecked": unchecked}


def read_all(store: BlockStore, keys: list[bytes], memories: list[memoryview]) -> tuple[float, float]:
    """Seconds by the clock and of processors for all records."""
    begin, used = time.perf_counter(), time.process_time()
    for at in range(0, len(keys), MEMORIES):
        for task in [
            store.read(key, memory, lambda: None)
            for key, memory in zip(keys[at : at + MEMORIES], memories, strict=False)
        ]:
            task.result()
    return time.perf_counter() - begin, time.process_time() - used


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--directory", type=Path, default=Path(tempfile.gettempdir()), help="on the disk that is read"
    )
    parser.add_argument("--records", type=int, default=512, help="of 1 MiB")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    need_commit(args.out)
    keys = [number.to_bytes(16, "little") for number in range(args.records)]
    memories = [memoryview(mmap.mmap(-1, RECORD)) for _ in range(MEMORIES)]
    random_, took = random.Random(1), {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        identity = StoreIdentity(b"seal cost", RECORD, secret=bytes(32))
        store = BlockStore.open(Path(folder), identity, (2 * args.records + 256) << 20)
        for key in keys:
            memories[0][:] = random_.randbytes(RECORD)
            store.write(key, memories[0], lambda: None).result()
        store.poll()
        for turn in range(args.rounds + 1):
            for way in random_.sample(sorted(WAYS), len(WAYS)):
                with patch.object(Seal, "fits", WAYS[way]):
                    found = read_all(store, keys, memories)
                if turn:  # the first warms
                    took[way].append(found)
        store.close()
    table = {}
    for way, rounds in took.items():
        clock = sorted(seconds for seconds, _ in rounds)
        table[way] = {
            "GB_per_s": round(args.records * RECORD / statistics.median(clock) / 1e9, 3),
            "seconds": [round(clock[0], 4), round(statistics.median(clock), 4), round(clock[-1], 4)],
            "processor_seconds": round(statistics.median(used for _, used in rounds), 4),
        }
        print(f"{way:10}", table[way], flush=True)
    apart = [sealed / crc - 1 for (sealed, _), (crc, _) in zip(took["sealed"], took["crc32"], strict=True)]
    share = round(statistics.median(apart), 4)
    print(
        f"a sealed read takes {share:+.1%} by the clock beside one with CRC-32 (median of {len(apart)} pairs)"
    )
    if args.out:
        write(
            args.out,
            {"records": args.records, "rounds": args.rounds, "ways": table, "sealed_over_crc32": share},
        )


if __name__ == "__main__":
    main()
