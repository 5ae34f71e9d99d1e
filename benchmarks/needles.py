"""Ask for facts hidden in long texts: the shipped model should find them as often with its KV streamed as
with all of it on the device.

    python benchmarks/needles.py --out results.json                 every length, 11 depths, 100 prompts each
    python benchmarks/needles.py --samples 1 --depths 3 --lengths 512,1024

One process. For each length the same prompts are answered by an engine with its KV on the device, by one that
has pages for less than half of a prompt, and, of the first depths, by that one again when it has answered all
others.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

from recording import environment, need_commit

from penstock import LLM
from penstock.cli.prompt import SHIPPED_MODEL
from penstock.evals.report import EvalReport
from penstock.evals.run import LENGTHS, EvalWork, evaluate


def asked(llm: LLM, work: EvalWork) -> tuple[EvalReport, float]:
    begin = time.perf_counter()
    return evaluate(llm, work, "shipped", lambda _: None), time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    parser.add_argument("--depths", type=int, default=11)
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    need_commit(given.out)
    found: dict[str, object] = {"machine": environment(), "samples": given.samples, "depths": given.depths}
    differing = 0
    for length in map(int, given.lengths.split(",")):
        work = EvalWork("needle", ("single",), (length,), given.depths, given.samples, 1, False)
        few = EvalWork("needle", ("single",), (length,), given.depths, max(given.samples // 10, 1), 1, False)
        block = min(max(length // 128, 8), 32)
        common = {
            "device": given.device,
            "dtype": given.dtype,
            "block_size": block,
            "max_length": length,
            "progress": False,
        }
        with LLM(SHIPPED_MODEL, **common) as llm:
            resident, near = asked(llm, work)
        pages = length // block * 2 // 5
        chunk = tile = length // 2
        far = {"kv_blocks": pages, "kv_tile": tile, "max_step_tokens": chunk, "host_kv_memory": "4GiB"}
        with LLM(SHIPPED_MODEL, **common, **far) as llm:
            streamed, late = asked(llm, work)
            again, _ = asked(llm, few)
            kv = llm.memory.kv
            left = llm.booted.engine.scheduler.busy
        assert kv is not None, "nothing streamed"
        assert not left, "a request is left"
        first = {(cell.depth): [miss.answer for miss in cell.misses] for cell in streamed.cells}
        same = all({miss.answer for miss in cell.misses} <= set(first[cell.depth]) for cell in again.cells)
        unlike = [
            cell.depth
            for cell, other in zip(resident.cells, streamed.cells, strict=True)
            if cell.score != other.score
        ]
        wrong = sum(cell != other for cell, other in zip(resident.cells, streamed.cells, strict=True))
        differing += len(unlike) + (not same)
        score = [
            sum(cell.score for cell in report.cells) / len(report.cells) for report in (resident, streamed)
        ]
        found[str(length)] = {
            "resident": [cell.score for cell in resident.cells],
            "streamed": [cell.score for cell in streamed.cells],
            "cells_with_other_scores": unlike,
            "cells_with_other_wrong_answers": wrong,
            "again_the_same": same,
            "seconds": [near, late],
            "pages": pages,
            "streamed_bytes": asdict(kv),
        }
        print(
            f"{length:>6} tokens  resident {score[0]:.4f}  streamed {score[1]:.4f}  other scores in "
            f"{len(unlike)} of {given.depths} cells, "
            f"other wrong answers in {wrong}; {near:.0f} s, {late:.0f} s",
            flush=True,
        )
        if given.out is not None:
            given.out.write_text(json.dumps(found, indent=1, default=str) + "\n")
    sys.exit(1 if differing else 0)


if __name__ == "__main__":
    main()
