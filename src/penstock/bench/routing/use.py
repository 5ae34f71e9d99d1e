"""Says for `penstock plan` how decode steps use experts, from a recorded routing."""

from pathlib import Path

from penstock.arch.spec import MoeSpec
from penstock.base.errors import ConfigError
from penstock.bench.routing.recording import Recording
from penstock.bench.routing.replay import SHARES, hit_curve
from penstock.engine.machines import ExpertUse

_POLICY = "slots"


def expert_use(file: Path, moe: MoeSpec, batch: int) -> ExpertUse:
    """Return the hits of a recording by the share of experts with slots, at a batch. Raises ConfigError for a
    file that is no recording, or that has less than two steps of the batch.

    How many experts a layer is asked for is the recording's if its mixture is as large as this one.
    """
    recording = Recording.read(file)
    if recording.tokens < 2 * batch:
        raise ConfigError(
            f"{file} has {recording.tokens:,} tokens, too few for two steps of batch {batch:,}; lower "
            "--batch, or record more"
        )
    layers, experts = len(recording.layers), recording.model.experts
    counts = sorted({max(round(share * experts), 1) for share in SHARES} - {experts})
    curve = hit_curve(recording, batch, [count * layers for count in counts], [_POLICY])
    points = zip((count / experts for count in counts), curve.hits[_POLICY], strict=True)
    alike = (experts, recording.model.top_k) == (moe.experts, moe.top_k)
    return ExpertUse(((0.0, 0.0), *points, (1.0, 1.0)), curve.asked if alike else None, "recorded")
