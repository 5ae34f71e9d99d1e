"""Measure what a model loses when penstock quantises it: log-perplexity of real texts, and answers about long
texts.

    PYTHONPATH=src python3 benchmarks/quantising.py --recipe int4 --text BOOK.txt --text PLAYS.txt --out FILE
    PYTHONPATH=src python3 benchmarks/quantising.py --recipe int4,32,self_attn,down_proj ...
    PYTHONPATH=src python3 benchmarks/quantising.py --recipe chosen ...

A recipe is a format, perhaps the columns of a group, and the modules that are kept in eight bits; `chosen` is
what `penstock pack --to int4` chooses. Each is packed into a temporary directory. The texts are read from the
letter `--from` on, in windows of 2,048 tokens. The dense model is measured first if FILE does not have it
yet. `lost` is the share of the answers that the dense model gives right and the quantised one does not.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

from recording import Recording

from penstock import LLM
from penstock.arch.formats.recipe import Recipe
from penstock.base.config import SHIPPED_MODEL
from penstock.evals.mix import write_mix
from penstock.evals.perplexity import PerplexityWork, perplexity
from penstock.evals.run import EvalWork, evaluate
from penstock.memory.device import choose_device
from penstock.weights.checkpoint.reader import Checkpoint
from penstock.weights.pack.quantising import QuantisedCheckpoint
from penstock.weights.pack.writer import write_pack

TASKS = ("single", "keys")


def packed(model: Path, recipe: Recipe | None, out: Path, device: str) -> dict[str, object]:
    """Quantise a model into `out`, by a recipe that is chosen if there is None. Returns its bytes before and
    after, and its relative error."""
    begin, tried = time.perf_counter(), list[str]()
    with Checkpoint.open(model) as checkpoint:
        dtype = checkpoint.spec.dtype
        if recipe is None:
            source = write_mix(checkpoint, None, out, dtype, None, device, tried.append)
        else:
            source = QuantisedCheckpoint(checkpoint, recipe, dtype, choose_device(device))
            write_pack(source, out, dtype)
        return {
            "recipe": source.recipe.config(),
            "tried": tried,
            "seconds": time.perf_counter() - begin,
            "bits_of_a_weight": source.bits,
            "dense_bytes": source.dense_bytes,
            "bytes": (out / "weights.bin").stat().st_size,
            "relative_error": source.error,
        }


def measured(model: Path, given: argparse.Namespace) -> dict[str, object]:
    """Return a model's log-perplexity of each text, and the answers that it gave right, as 0 and 1."""
    with LLM(model, device=given.device, progress=False) as llm:
        losses = {}
        for file in given.text:
            text = file.read_text(encoding="utf-8-sig")[given.begin :]
            work = PerplexityWork(text, file.name, tokens=given.tokens)
            losses[file.parent.name] = perplexity(llm, work, model.name, lambda _: None).log_perplexity
        work = EvalWork("ruler", TASKS, given.lengths, given.depths, given.samples, 5, False)
        report = evaluate(llm, work, model.name, print)
        right = sum(cell.score * cell.samples for cell in report.cells)
        missed = sorted({miss.expected for cell in report.cells for miss in cell.misses})
        return {
            "dtype": llm.dtype, "log_perplexity": losses, "tokens_of_each_text": given.tokens,
            "lengths": given.lengths, "right": right, "of": report.prompts, "missed": missed,
        }  # fmt: skip


def main() -> None:
    """Measure the dense model if need be, then one that is quantised, and print and write both."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--model", type=Path, default=SHIPPED_MODEL)
    parser.add_argument("--recipe", default="int4")
    parser.add_argument("--text", type=Path, action="append", required=True)
    parser.add_argument("--from", dest="begin", type=int, default=200_000)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--depths", type=int, default=5)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    given.lengths = tuple(given.lengths)
    recording = Recording(
        given.out, what="what a model loses when penstock quantises it", model=given.model.name
    )
    there = json.loads(given.out.read_text()) if given.out.exists() else {}
    dense = there.get("dense")
    if dense is None:
        dense = measured(given.model, given)
        recording.part("dense", dense)
    recipe = None
    if given.recipe != "chosen":
        format, *more = given.recipe.split(",")
        group = int(more.pop(0)) if more else None
        recipe = Recipe.of(format, group, tuple(more))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "pack"
        facts = packed(given.model, recipe, out, given.device)
        found = facts | measured(out, given)
    before, after = dense["log_perplexity"], found["log_perplexity"]
    found["log_perplexity_change"] = {name: after[name] - before[name] for name in before}
    known = {tuple(one) for one in dense["missed"]}
    found["lost"] = sum(tuple(one) not in known for one in found["missed"]) / dense["right"]
    recording.part(given.recipe, found)
    print(json.dumps({key: value for key, value in found.items() if key != "missed"}, indent=1))


if __name__ == "__main__":
    main()
