"""Forecasts how fast decoding with drafts is, by how many tokens a pass yields.

How many it yields depends on the text and on what drafts, and is not forecast. What a pass then takes is: it
computes the newest token and those drafted of each sequence, and the draft model has computed one step for
each of these. If not all of a draft holds, the pass takes as long and yields less.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from penstock.arch.families import TensorNames
from penstock.arch.spec import ModelSpec
from penstock.engine.draft import beyond_trained
from penstock.engine.forecast import Forecast, Pace, Pacing, forecast
from penstock.engine.passes import decode_step, verify_step

TOKENS = 1, 2, 4, 8, 12
"""Tokens that a pass yields for each sequence; one is plain decoding."""


@dataclass(frozen=True, slots=True)
class DraftedPace:
    """Describes passes that yield `tokens` tokens for each sequence, all that they compute.

    pace: of the passes, of all sequences together. drafting: seconds of the draft model's steps before each.
    """

    tokens: int
    pace: Pace
    drafting: float

    @property
    def seconds(self) -> float:
        """Return the seconds of a pass with the draft model's steps before it."""
        return self.pace.seconds + self.drafting

    @property
    def tokens_per_second(self) -> float:
        """Return the tokens a second of all sequences together."""
        return self.pace.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class DraftForecast:
    """Says what drafts take, and what they would give.

    weights, kv: bytes of the draft model on the device; 0 without one. left: bytes of the device that are
    left to the target. without: tokens a second where nothing drafts. paces: by tokens that a pass yields,
    the plain one first, as many as a step has room for. warnings: what a boot would say.
    """

    weights: int
    kv: int
    left: int
    without: float
    paces: tuple[DraftedPace, ...]
    warnings: tuple[str, ...]


def speculation(spec: ModelSpec, names: TensorNames, found: Forecast) -> DraftForecast:
    """Return what drafts take and would give where a model is forecast with them."""
    plan, work, draft = found.plan, found.work, found.work.draft
    off = replace(work, settings=replace(work.settings, speculate="off"), draft=None)
    without = forecast(spec, names, found.machine, off).decode.tokens_per_second
    kv = plan.budget.blocks * draft.block_bytes if draft else 0
    weights = draft.weights if draft else 0
    warnings = []
    if draft and (warning := beyond_trained(draft.spec, work.context)):
        warnings.append(warning)
    if draft and plan.outline.far:
        warnings.append(
            "a draft model drafts nothing for requests with KV in host memory: drafts come of look-up alone"
        )
    left = plan.budget.total - weights - kv
    return DraftForecast(weights, kv, left, without, tuple(_paces(found, TOKENS)), tuple(warnings))


def drafted_pace(found: Forecast, drafted: int) -> DraftedPace:
    """Return the pace of passes that verify so many drafted tokens of each sequence, all of which hold."""
    *_, last = _paces(found, (1, 1 + drafted))
    return last


def _paces(found: Forecast, counts: Sequence[int]) -> Iterator[DraftedPace]:
    work, pacing, seconds = found.work, found.pacing, 0.0
    step = _drafting(found)
    for tokens in counts:
        if tokens * work.batch > work.step_tokens:
            return
        shape = verify_step(pacing.spec, work.dtype, work.batch, work.context, tokens, pacing.near)
        pace = found.decode if tokens == 1 else pacing.pace(shape)
        seconds = max(seconds, pace.seconds)  # Costs of steps are measured, and may fall with more rows.
        yield DraftedPace(tokens, replace(pace, seconds=seconds), (tokens - 1) * step)


def _drafting(found: Forecast) -> float:
    """Return the seconds in which the draft model draws a token of each sequence; 0 if it draws none."""
    of_draft, work, machine = found.plan.of_draft, found.work, found.own
    if of_draft is None or found.plan.outline.far:
        return 0.0
    alone = replace(machine, rates=replace(machine.rates, cpu_read=()))
    pacing = Pacing.of(of_draft, alone, replace(work, expert_use=None))
    return pacing.pace(decode_step(pacing.spec, pacing.dtype, work.batch, work.context)).seconds
