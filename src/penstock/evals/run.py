"""Asks a model all questions of a run and counts what is right, by task, length and depth."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

from penstock.api.llm import LLM
from penstock.base.errors import RequestError
from penstock.base.units import counted
from penstock.evals.phrases import generated_text
from penstock.evals.prompts import ANSWER_TOKENS, Dress, Haystack
from penstock.evals.report import EvalCell, EvalReport, Miss, wilson
from penstock.evals.tasks import TASKS, EvalTask, Material, Sample
from penstock.step.params import SamplingParams

LENGTHS = (512, 1024, 2048, 4096, 8192, 16_384, 32_768)
"""The lengths where none are asked for, as far as the model has room for them."""
_LETTERS = 16
"""Letters of generated text for each token of the longest prompt: so that stretches of it differ."""
_KEPT = 200
"""Letters of a wrong answer that the report keeps."""


@dataclass(frozen=True, slots=True)
class EvalWork:
    """Holds the settings of an evaluation.

    name: its name in the report. tasks: names of TASKS.
    lengths: tokens of prompt and answer together; None is LENGTHS.
    depths: how many, from the beginning of the text to its end.
    samples: how many for each length and depth.
    raw: leave out the model's chat template.
    text: what to hide things in; None is generated text. source: its name.
    """

    name: str
    tasks: tuple[str, ...]
    lengths: tuple[int, ...] | None
    depths: int
    samples: int
    seed: int
    raw: bool
    source: str = "generated"
    text: str | None = None


def spread(depths: int) -> list[float]:
    """Return so many depths, evenly from 0 to 1. A single one is in the middle."""
    return [index / (depths - 1) for index in range(depths)] if depths > 1 else [0.5]


def evaluate(llm: LLM, work: EvalWork, model: str, tell: Callable[[str], None]) -> EvalReport:
    """Ask everything, and count the answers. Nothing is asked where an error is raised.

    Raises ConfigError if the text is empty. Raises RequestError if model and memory have no room for a
    length, or a length has none for a task.

    model: its name in the report.
    tell: called with each thing that is asked.
    """
    lengths = _lengths(llm, work)
    text = (
        work.text
        if work.text is not None
        else generated_text(random.Random(f"{work.seed} text"), _LETTERS * max(lengths))
    )
    dress = Dress(llm.tokenizer, work.raw)
    material = Material(dress, Haystack(text, dress, max(lengths)))
    for name in work.tasks:  # the shortest that there may be no room in
        _samples(name, TASKS[name], lengths[0], None, work, material)
    begin = perf_counter()
    cells: list[EvalCell] = []
    tokens = 0
    for name in work.tasks:
        depths: list[float | None] = [*spread(work.depths)] if TASKS[name].deep else [None]
        for length in lengths:
            samples = {depth: _samples(name, TASKS[name], length, depth, work, material) for depth in depths}
            prompts = [sample.tokens for some in samples.values() for sample in some]
            tokens += sum(map(len, prompts))
            tell(f"{name}: {counted(len(prompts), 'prompt')} of {counted(len(prompts[0]), 'token')}")
            answers = iter(llm.generate(prompts, SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS)))
            cells += [
                _cell(name, length, depth, [(one, next(answers).text) for one in some])
                for depth, some in samples.items()
            ]
    return EvalReport(
        eval=work.name,
        model=model,
        text=work.source,
        chat=dress.chat,
        dtype=llm.dtype,
        device=llm.device,
        seed=work.seed,
        samples=work.samples,
        prompts=sum(cell.samples for cell in cells),
        prompt_tokens=tokens,
        seconds=perf_counter() - begin,
        cells=tuple(cells),
    )


def _lengths(llm: LLM, work: EvalWork) -> Sequence[int]:
    longest = llm.limits.max_model_len
    lengths = sorted(set(work.lengths or [length for length in LENGTHS if length <= longest]))
    if not lengths or lengths[-1] > longest:
        asked = (
            f"a length of {lengths[-1]:,} tokens was asked for"
            if lengths
            else f"the usual lengths begin at {LENGTHS[0]} tokens"
        )
        raise RequestError(f"{asked}, but model and memory have room for {longest:,}; give shorter --lengths")
    return lengths


def _samples(
    name: str, task: EvalTask, length: int, depth: float | None, work: EvalWork, material: Material
) -> list[Sample]:
    """Make the samples of one cell. They depend on the seed and the cell alone."""
    seeds = (f"{work.seed} {name} {length} {depth} {number}" for number in range(work.samples))
    return [task.make(random.Random(seed), length, depth or 0.0, material) for seed in seeds]


def _cell(task: str, length: int, depth: float | None, answered: Sequence[tuple[Sample, str]]) -> EvalCell:
    scores = [TASKS[task].score(answer, sample) for sample, answer in answered]
    mean = sum(scores) / len(scores)
    wrong = zip(scores, answered, strict=True)
    misses = tuple(Miss(sample.expected, answer[:_KEPT]) for score, (sample, answer) in wrong if score < 1)
    return EvalCell(task, length, depth, len(scores), mean, *wilson(mean, len(scores)), misses)
