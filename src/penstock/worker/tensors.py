"""Holds the tensors of a step, what of its KV moves, and which of its logits are computed together."""

from dataclasses import dataclass

from penstock.kv.movement.carrier import Send
from penstock.kv.movement.chosen import Reader
from penstock.kv.movement.tiles import Tile
from penstock.models.inputs import StepInputs
from penstock.ops.attention.inputs import ColdInputs
from penstock.step.plan import Plan, Share, ShareKind
from penstock.worker.sizes import HEAD_ROWS


@dataclass(frozen=True, slots=True)
class Moves:
    """Moves say which KV a step moves between the device and what is beyond it.

    cold: what its tokens attend to of that.
    tiles: tiles that stream from host memory, as `cold` lists them.
    sends: KV that goes to host blocks.
    readers: rows and runs that attend to the choice of a policy.
    """

    cold: ColdInputs | None = None
    tiles: tuple[Tile, ...] = ()
    sends: tuple[Send, ...] = ()
    readers: tuple[Reader, ...] = ()


NO_MOVES = Moves()


@dataclass(frozen=True, slots=True)
class StepTensors:
    """StepTensors holds the inputs of a step, and says to which share each wanted hidden state belongs.

    First come those after which a token is drawn, by share in order, then those of prompts.

    samples: number of tokens that are drawn.
    prompt_positions: for each share, how many positions report a prompt token's log-probability.
    """

    inputs: StepInputs
    samples: int
    prompt_positions: tuple[int, ...]
    moves: Moves = NO_MOVES


def sampled(plan: Plan) -> list[Share]:
    """Return the shares that yield a token, in their order."""
    return [share for share in plan.shares if share.sample]


def drawn_together(plan: Plan) -> tuple[list[Share], list[list[Share]]]:
    """Return the shares that yield one token, whose logits are in memory at a time, and those that verify a
    draft, of which as many are together as have HEAD_ROWS rows of logits."""
    plain, drafts, rows = list[Share](), list[list[Share]](), HEAD_ROWS
    for share in sampled(plan):
        if share.kind is not ShareKind.VERIFY:
            assert not drafts, "a plan's drafts come last"
            plain.append(share)
            continue
        rows += share.draws
        if rows > HEAD_ROWS:
            drafts.append([])
            rows = share.draws
        drafts[-1].append(share)
    return plain, drafts
