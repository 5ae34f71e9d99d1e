"""Measures how a mixture routes a text: records what its routers choose, and replays that against slots.

Prompts are windows of the text, spread over it evenly. The model continues each at a temperature above zero.
Then each prompt and its continuation are computed once more, as one prompt, and the routers' choices are
recorded: what a token chooses depends on the tokens before it alone, not on the step that computed it.
"""

import hashlib
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from math import log
from pathlib import Path

import numpy as np

from penstock.api.llm import LLM
from penstock.base.config import Config
from penstock.base.errors import ConfigError, RequestError
from penstock.base.report import JsonLine
from penstock.base.units import counted
from penstock.bench.machine import MachineInfo, machine
from penstock.bench.routing.recorder import Recorder
from penstock.bench.routing.recording import Recording, RoutedModel
from penstock.bench.routing.replay import (
    BATCHES,
    Foretelling,
    HitCurve,
    curve_lines,
    default_slots,
    foretelling,
    hit_curve,
)
from penstock.step.params import SamplingParams

_TEMPERATURE = 0.8
"""Continuations are drawn: greedy ones of small models go in circles, and so do their experts."""


@dataclass(frozen=True, slots=True)
class RoutingWork:
    """Says what is recorded.

    text: the text; source: its name. sequences: prompts, of `prompt` tokens each at most; output: tokens of
    each continuation.
    """

    text: str
    source: str
    sequences: int = 16
    prompt: int = 384
    output: int = 128


@dataclass(frozen=True, slots=True)
class ReplayWork:
    """Says what a recording is replayed against.

    slots: numbers of them, of all layers together; None is parts of all experts. policies: their names.
    """

    slots: tuple[int, ...] | None
    policies: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RoutingReport(JsonLine):
    """Holds the hit curves of a recording.

    layers: those that are mixtures; experts: of each. evenness: how evenly the experts of a layer are used,
    the mean over layers of the entropy of their shares by that of even ones.
    """

    bench: str
    model: RoutedModel
    sequences: int
    prompt_tokens: int
    tokens: int
    layers: int
    experts: int
    top_k: int
    evenness: float
    curves: tuple[HitCurve, ...]
    foretold: Foretelling | None
    machine: MachineInfo

    def __str__(self) -> str:
        text = (
            f"{self.model.name}: {counted(self.layers, 'layer')} of {self.experts} experts, "
            f"{self.top_k} a token; "
            f"{self.tokens:,} tokens of {self.model.text} in {counted(self.sequences, 'sequence')}, "
            f"{self.prompt_tokens:,} of them of prompts; experts are used {self.evenness:.1%} as evenly as "
            "can be"
        )
        blocks = [[text], *(curve_lines(curve, self.layers * self.experts) for curve in self.curves)]
        if self.foretold:
            told = ", ".join(
                f"{recall:.1%} among {wide:g} top-k"
                for wide, recall in zip(self.foretold.wide, self.foretold.recall, strict=True)
            )
            blocks.append([f"The next layer's router foretells its experts a layer ahead: {told}."])
        return "\n".join("\n".join(block) for block in blocks)


def record(
    config: Config, work: RoutingWork, name: str, say: Callable[[str], None] = lambda _: None
) -> Recording:
    """Return what the routers of a model choose. Raises ConfigError for a model without experts, RequestError
    for texts that are too short, and PenstockErrors of a boot."""
    recorder = Recorder()
    with closing(LLM.from_config(config, progress=False, routing=recorder)) as llm:
        spec = llm.spec
        if spec.moe is None:
            raise ConfigError(f"{name} is dense: it has no experts, so there is no routing; name a mixture")
        room = llm.limits.max_model_len - work.output - 1
        prompts = _prompts(llm.encode(work.text), work, min(work.prompt, room))
        what = f"{counted(len(prompts), 'prompt')} of {counted(len(prompts[0]), 'token')}"
        say(f"continuing {what} by {work.output}")
        params = [
            SamplingParams(
                temperature=_TEMPERATURE,
                top_k=0,
                top_p=1.0,
                seed=seed,
                max_tokens=work.output,
                ignore_eos=True,
            )
            for seed in range(len(prompts))
        ]
        whole = [
            [*prompt, *answer.tokens]
            for prompt, answer in zip(prompts, llm.generate(prompts, params), strict=True)
        ]
        parts = []
        again = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        for number, tokens in enumerate(whole, 1):
            with recorder:
                llm.generate([tokens], again)
            parts.append(recorder.taken())
            if number % 8 == 0 or number == len(whole):
                say(f"recorded {number} of {counted(len(whole), 'sequence')}")
    return Recording(
        RoutedModel(
            _shown(name),
            spec.family,
            _fingerprint(config.model),
            spec.moe.experts,
            spec.moe.top_k,
            _shown(work.source),
        ),
        np.array(recorder.layers, np.int32),
        np.array([len(tokens) for tokens in whole], np.int32),
        np.array([len(prompt) for prompt in prompts], np.int32),
        np.concatenate([chosen for chosen, _ in parts]),
        np.concatenate([foretold for _, foretold in parts]),
    )


def replay(
    recording: Recording, work: ReplayWork, say: Callable[[str], None] = lambda _: None
) -> RoutingReport:
    """Return the hit curves of a recording, and how well it is foretold. Raises ConfigError for more slots
    than experts, and for fewer tokens than two steps."""
    layers, experts = len(recording.layers), recording.model.experts
    slots = work.slots or default_slots(recording)
    if not layers <= min(slots) or max(slots) > layers * experts:
        raise ConfigError(
            f"slots are {min(slots):,} to {max(slots):,}; give {layers:,}, one for each layer, to "
            f"{layers * experts:,}, one for each expert"
        )
    curves = []
    for batch in BATCHES:
        if recording.tokens >= 2 * batch:
            say(f"replaying at batch {batch}")
            curves.append(hit_curve(recording, batch, sorted(set(slots)), work.policies))
    return RoutingReport(
        bench="experts",
        model=recording.model,
        sequences=len(recording.lengths),
        prompt_tokens=int(recording.prompts.sum()),
        tokens=recording.tokens,
        layers=layers,
        experts=experts,
        top_k=recording.model.top_k,
        evenness=_evenness(recording),
        curves=tuple(curves),
        foretold=foretelling(recording),
        machine=machine(),
    )


def _prompts(tokens: Sequence[int], work: RoutingWork, length: int) -> list[list[int]]:
    """Return windows of the text, spread evenly; they overlap only where the text is short. Raises
    RequestError for a text, or a room, of less than two tokens."""
    length = min(length, len(tokens))
    if length < 2:
        raise RequestError(
            f"{work.source} has {len(tokens):,} tokens, and the model has room for prompts of {length:,}; "
            "give a longer text, or a lower --output"
        )
    last = len(tokens) - length
    starts = dict.fromkeys(last * at // max(work.sequences - 1, 1) for at in range(work.sequences))
    return [list(tokens[start : start + length]) for start in starts]


def _shown(name: str) -> str:
    """Return a name without what cannot be printed."""
    return "".join(one if one.isprintable() else "?" for one in name)


def _fingerprint(model: Path) -> str:
    """Return a digest of a model's config, and of its files' names and sizes."""
    files = sorted(model.iterdir()) if model.is_dir() else [model]
    digest = hashlib.sha256()
    for file in files:
        if file.name == "config.json":
            digest.update(file.read_bytes())
        elif file.suffix in (".safetensors", ".gguf", ".bin"):
            digest.update(f"{file.name} {file.stat().st_size}\n".encode())
    return digest.hexdigest()


def _evenness(recording: Recording) -> float:
    """Return the mean over layers of the entropy of experts' shares, by that of even ones."""
    experts, found = recording.model.experts, []
    for layer in range(len(recording.layers)):
        used = (
            np.bincount(recording.chosen[:, layer].ravel(), minlength=experts)
            / recording.chosen[:, layer].size
        )
        found.append(-float((used[used > 0] * np.log(used[used > 0])).sum()))
    return sum(found) / len(found) / log(experts) if experts > 1 else 1.0
