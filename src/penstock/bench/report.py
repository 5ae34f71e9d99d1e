"""What a benchmark found: for a person, and as one line of JSON."""

import dataclasses
import json
from dataclasses import dataclass
from enum import StrEnum

from penstock.base.units import format_rate, format_size
from penstock.bench.bound import Bound
from penstock.bench.machine import Machine
from penstock.bench.streaming import Streaming
from penstock.bench.times import Times


class Kind(StrEnum):
    DECODE = "decode"
    PREFILL = "prefill"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Another system at the same work. `ratio`: how many times its time is the engine's."""

    system: str
    ms: Times
    tokens_per_second: float
    ratio: float


@dataclass(frozen=True, slots=True)
class Subject:
    """The model that was measured, and how."""

    bench: Kind
    model: str
    weights: str
    """`random`, or `checkpoint` where they are the model's own."""
    parameters: int
    dtype: str
    device: str
    batch: int
    context: int
    """Prompt tokens of each sequence."""
    output: int
    """Timed decode steps of each sequence; 1 for a prefill, whose work ends with the first token."""
    step_tokens: int


@dataclass(frozen=True, slots=True)
class Report:
    """`ms`: of one decode step, or from the first step to every prompt's first token. `of_bound`: the bound's
    time over the median."""

    subject: Subject
    boot_seconds: float
    ms: Times
    tokens_per_second: float
    bound: Bound
    of_bound: float
    streaming: Streaming | None
    baseline: Comparison | None
    machine: Machine

    def line(self) -> str:
        """Everything, as one line of JSON; the subject's fields stand at its top."""
        whole = dataclasses.asdict(self)
        return json.dumps({**whole.pop("subject"), **whole})

    def __str__(self) -> str:
        it, bound, decode = self.subject, self.bound, self.subject.bench is Kind.DECODE
        if decode:
            work = f"decode, batch {it.batch}, {it.context:,} tokens of context"
            least = (
                f"{format_size(bound.weight_bytes)} of weights and {format_size(bound.kv_bytes)} of KV at "
                f"{format_rate(bound.per_second)}"
            )
        else:
            work = f"prefill, {it.batch} x {it.context:,} tokens, at most {it.step_tokens:,} a step"
            least = f"{bound.operations / 1e12:.3g} TFLOP at {bound.per_second / 1e12:.3g} TFLOP/s"
        rows = [
            ("penstock", f"{self.ms}, {self.tokens_per_second:,.1f} tokens/s"),
            ("bound", f"{bound.ms:.3g} ms: {least}"),
            ("of the bound", f"{self.of_bound:.1%}"),
        ]
        if self.streaming:
            rows += self.streaming.rows(self.ms.median)
        elif self.of_bound > 1 and decode:
            rows.append(("", "more than all: some of what is read rests in the processor's caches"))
        if other := self.baseline:
            rows.append(
                (
                    other.system,
                    f"{other.ms}, {other.tokens_per_second:,.1f} tokens/s; penstock is {other.ratio:.2f} "
                    "times as fast",
                )
            )
        head = [
            f"{it.model}: {it.parameters / 1e6:,.4g}M parameters, {it.dtype}, {it.weights} weights, "
            f"{it.device}",
            work,
        ]
        return "\n".join([*head, *(f"  {name:<20} {text}" for name, text in rows)])
