"""Chooses the modules of a model that rest in eight bits where the others have four: as few as are needed.

What four bits cost depends on the model, so it is measured, without anybody's data: the model writes a text.
Each sequence begins with a random token, so that much of what the model knows is reached, and goes on with
tokens that are drawn from the model. The mean negative log-probability of such a text grows by the
Kullback-Leibler divergence of the quantised model from the dense one. Packs of more and more bits are made in
turn and run by the engine, until one of them loses at most MOST.
"""

import os
import random
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from penstock.api.llm import LLM
from penstock.arch.formats.recipe import GROUP, Recipe
from penstock.arch.layout import group_layouts
from penstock.memory.device import choose_device
from penstock.step.params import SamplingParams
from penstock.weights.checkpoint.reader import Checkpoint
from penstock.weights.pack.directory import sync_directory
from penstock.weights.pack.quantising import QuantisedCheckpoint, recipe_in
from penstock.weights.pack.writer import write_pack

MOST = 0.1
"""The most that the model's own text may lose, in nats a token. Texts that others wrote lose a third to two
thirds of that, since their tokens are more likely than those that follow a random one."""
SEQUENCES, TOKENS = 64, 63
"""The model's own text: sequences, and tokens of each with the random one."""
SMALL = GROUP // 2
"""Columns that share a scale in all mixes but the first, where no number is asked for."""
KEPT = (("k_proj", "v_proj", "o_proj"), ("down_proj", "w2"), ("up_proj", "w3"))
"""Modules that a mix has in eight bits beside those of the mix before it, those first where four bits cost
most for a byte. Each family has some of them."""


def mixes(checkpoint: Checkpoint, group: int | None) -> list[Recipe]:
    """Return the recipes that are tried for a dense model, those of fewest bits first.

    group: columns that share a scale; None has them chosen, too.
    """
    layouts = group_layouts(checkpoint.spec, checkpoint.names, checkpoint.spec.dtype)
    modules = {
        source.tensor.split(".")[-2]
        for layout in layouts
        for matrix in layout.matrices
        for _, field in matrix.parts
        for source in field.sources
    }
    found, int8 = [Recipe.of("int4", group)], tuple[str, ...]()
    if group is None:
        found.append(Recipe.of("int4", SMALL))
    for more in KEPT:
        int8 += tuple(name for name in more if name in modules)
        found.append(Recipe.of("int4", group or SMALL, int8))
    return [replace(recipe, measured=True) for recipe in found]


def write_mix(
    checkpoint: Checkpoint,
    group: int | None,
    out: Path,
    dtype: str,
    store: Path | None,
    device: str,
    tell: Callable[[str], None],
) -> QuantisedCheckpoint:
    """Write the pack of a dense model into `out`, by the first of its mixes that loses at most MOST, or by
    the last. Return what it was made from.

    Packs are tried in a directory beside `out`, which then takes its place. After an interrupt that directory
    is gone on with, and mixes before its own are not tried again, since they lost too much. None is tried if
    `out` has been begun.

    dtype: of all that stays dense. store: see `write_pack`. device: the name of the one that computes.
    tell: called with what each mix loses.
    Raises what LLM, QuantisedCheckpoint and write_pack raise.
    """
    recipes, trial = mixes(checkpoint, group), out.with_name(f"{out.name}.trial")
    tried = [QuantisedCheckpoint(checkpoint, one, dtype, choose_device(device)) for one in recipes]
    taken = _is_taken(out)
    begun = recipe_in(out if taken else trial)
    tried = tried[recipes.index(begun) if begun in recipes else 0 :]
    source = tried[0] if taken else _tried(tried, trial, dtype, device, tell)
    if not taken and store is None:
        with suppress(OSError):  # Where `out` is a disk of its own the pack is made again.
            os.replace(trial, out)
            sync_directory(out.parent)
    write_pack(source, out, dtype, store)
    shutil.rmtree(trial, ignore_errors=True)
    return source


def _is_taken(out: Path) -> bool:
    """Tell whether there is something where a pack is to be written: a part of it, or other files."""
    try:
        return bool(set(os.listdir(out)) - {"lost+found"})
    except FileNotFoundError:
        return False
    except OSError:
        return True


def _tried(
    sources: Sequence[QuantisedCheckpoint], trial: Path, dtype: str, device: str, tell: Callable[[str], None]
) -> QuantisedCheckpoint:
    """Return the first of these that loses at most MOST, or the last, with its pack in `trial`."""
    with _opened(sources[0].path, dtype, device) as llm:
        texts = own_text(llm)
        before = log_perplexity(llm, texts)
    for source in sources:
        write_pack(source, trial, dtype)
        with _opened(trial, dtype, device) as llm:
            loss = log_perplexity(llm, texts) - before
        tell(
            f"{source.recipe}: {source.bits:.2f} bits a weight; the model's own text loses {loss:.3f} a token"
        )
        if loss <= MOST:
            return source
        if source is not sources[-1]:
            shutil.rmtree(trial)
    tell(f"none of these loses less than {MOST}; --to int8 does")
    return source


def own_text(llm: LLM) -> list[list[int]]:
    """Return SEQUENCES of TOKENS that the model writes, the same each time."""
    draw = random.Random(0)
    starts = [[draw.randrange(llm.spec.vocab_size)] for _ in range(SEQUENCES)]
    drawn = [
        SamplingParams(
            temperature=1, top_k=0, top_p=1, min_p=0, repetition_penalty=1,
            max_tokens=TOKENS - 1, ignore_eos=True, seed=seed,
        )
        for seed in range(SEQUENCES)
    ]  # fmt: skip
    return [start + list(one.tokens) for start, one in zip(starts, llm.generate(starts, drawn), strict=True)]


def log_perplexity(llm: LLM, texts: Sequence[list[int]]) -> float:
    """Return the mean negative log-probability of the tokens of some texts but the first of each, in nats."""
    found = llm.generate(texts, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))
    scores = [score.logprob for one in found for score in one.prompt_logprobs or () if score is not None]
    return -sum(scores) / len(scores)


def _opened(model: Path, dtype: str, device: str) -> LLM:
    """Return a model to write or to read such a text. Few steps are not worth recording."""
    return LLM(
        model, dtype=dtype, device=device, max_length=TOKENS + 1, max_sequences=SEQUENCES, graphs=False,
        prefix_cache=False, progress=False,
    )  # fmt: skip
