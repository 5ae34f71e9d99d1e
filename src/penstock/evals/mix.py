"""Chooses the modules of a model that rest in eight bits where the others have four: as few as are needed.

What four bits cost depends on the model, so it is measured, without anybody's data: the model writes a text.
Each sequence begins with a random token, so that much of what the model knows is reached, and goes on with
tokens that are drawn from the model. The mean negative log-probability of such a text grows by the
Kullback-Leibler divergence of the quantised model from the dense one. Packs of more and more bits are made
and run by the engine, until one of them loses at most MOST.
"""

import os
import random
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.api.llm import LLM
from penstock.arch.formats.recipe import GROUP, Recipe
from penstock.arch.layout import group_layouts
from penstock.base.errors import PenstockError
from penstock.memory.device import choose_device
from penstock.step.params import SamplingParams
from penstock.weights.checkpoint.reader import Checkpoint
from penstock.weights.pack.directory import sync_directory
from penstock.weights.pack.manifest import place
from penstock.weights.pack.quantising import QuantisedCheckpoint, recipe_in
from penstock.weights.pack.reader import Pack
from penstock.weights.pack.writer import write_pack

MOST = 0.1
"""The most that the model's own text may lose, in nats a token. Texts that others wrote lose a third to two
thirds of that, since their tokens are more likely than those that follow a random one."""
SEQUENCES, TOKENS = 64, 63
"""The model's own text: sequences, and tokens of each with the random one."""
SMALL = GROUP // 2
"""Columns that share a scale in all mixes but the first, where no number is asked for."""
KEPT = (
    (("k_proj", "v_proj", "o_proj"), 0.42),
    (("down_proj", "w2"), 0.28),
    (("mlp.up_proj",), 0.16),
)
"""Modules that a mix has in eight bits beside those of the mix before it, by parts of names of which each
family has some, and what is then left of the first mix's loss, as measured with the shipped model. Those come
first where four bits cost most for a byte. Experts keep gate and up in one format, or a GPU computes them one
by one."""
_LEFT_BY_SMALL = 0.85
"""The same of groups of SMALL columns."""


def mixes(checkpoint: Checkpoint, group: int | None) -> dict[Recipe, float]:
    """Return the recipes that are tried for a dense model, those of fewest bits first, and the part of the
    first one's loss that each is likely to have.

    group: columns that share a scale; None has them chosen, too.
    """
    layouts = group_layouts(checkpoint.spec, checkpoint.names, checkpoint.spec.dtype)
    tensors = [source.tensor for layout in layouts for field in layout.fields for source in field.sources]
    found, int8 = {Recipe.of("int4", group): 1.0}, tuple[str, ...]()
    if group is None:
        found[Recipe.of("int4", SMALL)] = _LEFT_BY_SMALL
    for more, left in KEPT:
        int8 += tuple(part for part in more if any(part in tensor for tensor in tensors))
        found.setdefault(Recipe.of("int4", group or SMALL, int8), left)
    return {replace(recipe, measured=True): left for recipe, left in found.items()}


def write_mix(
    checkpoint: Checkpoint,
    group: int | None,
    out: Path,
    dtype: str,
    store: Path | None,
    device: str,
    telling: "MixProgress",
) -> QuantisedCheckpoint:
    """Write the pack of a dense model into `out`, by a mix that loses at most MOST, or else by the one of
    most bits. Return what it was made from.

    Packs are tried in a directory beside `out`, which then takes its place. After an interrupt that directory
    is gone on with, and mixes before its own are not tried again, since they lost too much. None is tried if
    `out` has been begun.

    dtype: of all that stays dense. store: see `write_pack`. device: the name of the one that computes.
    telling: hears what each mix loses, and how far it all is.
    Raises what LLM, QuantisedCheckpoint and write_pack raise.
    """
    out = Path(os.path.abspath(out))  # "." has no name.
    left, trial, taken = mixes(checkpoint, group), out.with_name(f"{out.name}.trial"), _is_taken(out)
    mine = [QuantisedCheckpoint(checkpoint, recipe, dtype, choose_device(device)) for recipe in left]
    begun = recipe_in(out if taken else trial)
    first = list(left).index(begun) if begun in left else 0
    job = _Trials(mine[first:], list(left.values())[first:], trial, dtype, device, telling)
    source = mine[first] if taken else job.run()
    if not taken and store is None:
        with suppress(OSError):  # Where `out` is a disk of its own the pack is made again.
            os.replace(trial, out)
            sync_directory(out.parent)
    with telling.writing(source, dtype) as progress:
        write_pack(source, out, dtype, store, progress)
    if _is_pack_of(trial, source):  # And not a stranger's directory of that name.
        shutil.rmtree(trial)
    return source


@dataclass(frozen=True, slots=True)
class MixProgress:
    """Tells a user how far a mix is.

    lost: takes a line on what a mix loses.
    begun: takes a line on what is begun, and takes long.
    shown: of what is done and its bytes, a context that yields what is called with bytes as they are done.
    loading: see `LLMArguments.loading`.
    """

    lost: Callable[[str], object]
    begun: Callable[[str], object] = lambda line: None
    shown: Callable[[str, int], AbstractContextManager[Callable[[int], None] | None]] = lambda what, total: (
        nullcontext()
    )
    loading: Callable[[str, int, int], None] | None = None

    def writing(
        self, source: QuantisedCheckpoint, dtype: str
    ) -> AbstractContextManager[Callable[[int], None] | None]:
        """Return the context in which a pack is written."""
        return self.shown("quantising", place(group_layouts(source.spec, source.names, dtype))[-1].end)


def _is_taken(out: Path) -> bool:
    """Tell whether there is something where a pack is to be written: a part of it, or other files."""
    try:
        return bool(set(os.listdir(out)) - {"lost+found"})
    except FileNotFoundError:
        return False
    except OSError:
        return True


def _is_pack_of(path: Path, source: QuantisedCheckpoint) -> bool:
    """Tell whether a directory is a finished pack of just this model, in just this mix."""
    if recipe_in(path) != source.recipe:
        return False
    try:
        with Pack.open(path) as pack:
            return pack.manifest.fingerprint == source.fingerprint().hex()
    except PenstockError:
        return False


@dataclass(frozen=True, slots=True)
class _Trials:
    """Tries mixes in a directory. left: see `mixes`; the others: see `write_mix`."""

    sources: Sequence[QuantisedCheckpoint]
    left: Sequence[float]
    trial: Path
    dtype: str
    device: str
    telling: "MixProgress"

    def run(self) -> QuantisedCheckpoint:
        """Return one of the mixes that loses at most MOST, or the last, with its pack in the directory."""
        self.telling.begun("the model writes a text, by which it is judged what few bits cost")
        with self._opened(self.sources[0].path) as llm:
            texts = own_text(llm)
            before = log_perplexity(llm, texts)
        at = 0
        while True:
            source = self.sources[at]
            with self.telling.writing(source, self.dtype) as progress:
                write_pack(source, self.trial, self.dtype, progress=progress)
            with self._opened(self.trial) as llm:
                loss = log_perplexity(llm, texts) - before
            bits = f"{source.bits:.2f} bits a weight"
            self.telling.lost(f"{source.recipe}: {bits}; the model's own text loses {loss:.3f} a token")
            if loss <= MOST:
                return source
            if source is self.sources[-1]:
                self.telling.lost(f"no mix loses less than {MOST}; --to int8 does")
                return source
            shutil.rmtree(self.trial)
            at = following(self.left, at, loss)

    def _opened(self, model: Path) -> LLM:
        """Return a model to write or to read such a text. Few steps are not worth recording."""
        return LLM(
            model, dtype=self.dtype, device=self.device, max_sequences=SEQUENCES,
            max_length=min(TOKENS + 1, self.sources[0].spec.max_length),
            graphs=False, prefix_cache=False, progress=False, loading=self.telling.loading,
        )  # fmt: skip


def following(left: Sequence[float], at: int, loss: float) -> int:
    """Return which mix is tried after mix `at` lost so much: the next that is likely to lose at most MOST, or
    the last. left: of each mix, see `mixes`."""
    likely = (later for later in range(at + 1, len(left)) if loss * left[later] <= MOST * left[at])
    return next(likely, len(left) - 1)


def own_text(llm: LLM) -> list[list[int]]:
    """Return SEQUENCES of TOKENS that the model writes, or fewer if it was trained for fewer: the same each
    time."""
    draw, tokens = random.Random(0), min(TOKENS, llm.spec.max_length - 1)
    starts = [[draw.randrange(llm.spec.vocab_size)] for _ in range(SEQUENCES)]
    drawn = [
        SamplingParams(
            temperature=1, top_k=0, top_p=1, min_p=0, repetition_penalty=1,
            max_tokens=tokens - 1, ignore_eos=True, seed=seed,
        )
        for seed in range(SEQUENCES)
    ]  # fmt: skip
    return [start + list(one.tokens) for start, one in zip(starts, llm.generate(starts, drawn), strict=True)]


def log_perplexity(llm: LLM, texts: Sequence[list[int]]) -> float:
    """Return the mean negative log-probability of the tokens of some texts but the first of each, in nats."""
    found = llm.generate(texts, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))
    scores = [score.logprob for one in found for score in one.prompt_logprobs or () if score is not None]
    return -sum(scores) / len(scores)
