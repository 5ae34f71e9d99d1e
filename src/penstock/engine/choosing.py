"""Chooses drafts for `--speculate auto`, by the forecast of a machine that need not be here.

Look-up costs nothing and is always taken. A copy of the model in four bits takes memory that weights would
have: passes take longer with it, also where no draft holds. So it is taken only where weights stream, and
where much more is forecast with it than without, though fewer of its drafts hold than were measured to.
"""

from dataclasses import dataclass, replace

from penstock.arch.families import TensorNames
from penstock.arch.spec import ModelSpec
from penstock.base.errors import BudgetError
from penstock.base.units import format_size
from penstock.engine.acceptance import drafted_pace
from penstock.engine.draft import DraftModel, draft_limit
from penstock.engine.forecast import forecast
from penstock.engine.machines import Machine, Work

DRAFTED, YIELD = 8, 4
"""Tokens that a copy drafts, and those that a pass is taken to yield of them: of drafts that are twice as
long, 9 were measured (`docs/results/cpu_acceptance.json`)."""
GAIN = 1.25
"""Times as many tokens a second as without the copy for which it is taken."""


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """Says which drafts are taken: off, suffix or self, as of Config.speculate.

    why: ends a sentence. by_rates, by_disk: whether rates of links and of the disk have decided.
    """

    speculate: str
    why: str
    by_rates: bool = False
    by_disk: bool = False

    def __str__(self) -> str:
        what = {"off": "none", "suffix": "of look-up", "self": "of look-up, and of a copy in four bits"}
        return f"drafts: {what[self.speculate]}, since {self.why}"


def choose_drafts(
    spec: ModelSpec, names: TensorNames, machine: Machine, work: Work, copy: DraftModel | str
) -> DraftChoice:
    """Return which drafts pay for a model on a machine. copy: the model's in four bits, or why there is
    none."""
    if spec.has_state:
        return DraftChoice(
            "off", f"layers of {spec.family} keep state, which no draft can be taken back from"
        )
    plain = replace(work, settings=replace(work.settings, speculate="off"), draft=None)
    try:
        without = forecast(spec, names, machine, plain)
    except BudgetError:
        return DraftChoice("suffix", "no room for more is forecast")
    if without.everything_resident:
        return DraftChoice("suffix", "all weights stay on the device, where a pass takes little longer")
    if isinstance(copy, str):
        return DraftChoice("suffix", f"there is no copy in four bits: {copy}")
    takes = f"a copy in four bits takes {format_size(copy.weights)}"
    if (limit := draft_limit(work.settings, machine.usable)) is not None and copy.weights > limit:
        return DraftChoice("suffix", f"{takes}, and draft_memory is {format_size(limit)}")
    drafting = replace(work, settings=replace(work.settings, speculate="self"), draft=copy)
    try:
        found = forecast(spec, names, machine, drafting)
    except BudgetError:
        return DraftChoice("suffix", f"{takes}, beside which weights and KV do not fit")
    pace = drafted_pace(found, min(DRAFTED, work.step_tokens // work.batch - 1))
    fast, slow = YIELD * work.batch / pace.seconds, without.decode.tokens_per_second
    said = (
        f"{takes}, and {fast:.3g} tokens/s are forecast with it if passes that verify {DRAFTED} drafted "
        f"tokens yield {YIELD}, {slow:.3g} without"
    )
    disk = without.plan.needs_disk or found.plan.needs_disk
    return DraftChoice("self" if fast >= GAIN * slow else "suffix", said, by_rates=True, by_disk=disk)
