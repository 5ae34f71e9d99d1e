"""Inputs of steps. Where every sequence has one token in pages, they and the likeliest tokens are those
of the longer ways that serve all steps."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import tiny
from penstock.arch.spec import ModelSpec, RopeSpec
from penstock.ops.attention.inputs import LaterGroups, QueryRun, RunTree
from penstock.ops.embedding import look_up
from penstock.ops.kernels import plain_torch
from penstock.ops.rope import RotaryAngles
from penstock.ops.steps import NO_TOKEN, likeliest_on_host
from penstock.step.plan import UNKNOWN, Admission, BlockId, Plan, Row, Share, ShareKind
from penstock.weights.checkpoint.shape import Shape
from penstock.worker import inputs as worker_inputs
from penstock.worker.inputs import InputBuilder
from penstock.worker.sampler import Sampler
from penstock.worker.tables import BlockTables
from penstock.worker.tensors import StepTensors
from penstock.worker.tiling import batches
from quantised import SCHEMES, matrix_of
from worlds import sampling

CPU, BLOCK = torch.device("cpu"), 8
NEWEST = torch.tensor([40, 41, 42, 43, 0])


def share(row: int, start: int, token: int = UNKNOWN, **more: object) -> Share:
    """A row of a table that says 10 * row, 10 * row + 1 and so on."""
    blocks = tuple(BlockId(10 * row + at) for at in range(start // BLOCK + 1))
    return Share(Row(row), start, (token,), 0, blocks, True, 3, **more)  # type: ignore[arg-type]


def built(spec: ModelSpec, shares: tuple[Share, ...], *, plain: bool) -> StepTensors:
    inputs = InputBuilder(spec, CPU, BlockTables(5, 12, CPU), block_size=BLOCK)
    if plain:
        return inputs.build(Plan((), shares), NEWEST)
    with patch.object(worker_inputs, "_plain", lambda _: False):
        return inputs.build(Plan((), shares), NEWEST)


@pytest.mark.parametrize("model", ["llama", "qwen2_windows", "llama_dynamic"])
@pytest.mark.parametrize(
    "shares",
    [
        (share(2, 0, 7),),
        (share(2, 7, 7),),
        (share(3, 64),),
        (share(3, 65, 9), share(0, 63), share(1, 8), share(2, 70, 5)),
    ],
    ids=["first", "a block full", "a token of before", "several"],
)
def test_inputs_of_rows_in_pages_are_those_of_any_step(model: str, shares: tuple[Share, ...]) -> None:
    spec = Shape.open(tiny.checkpoint(model)).spec
    mine, theirs = (built(spec, shares, plain=plain) for plain in (True, False))
    one, other = mine.inputs, theirs.inputs
    assert one.wanted is None
    assert other.wanted is not None
    assert other.wanted.tolist() == list(range(len(shares)))
    assert (mine.samples, mine.prompt_positions) == (theirs.samples, theirs.prompt_positions)
    rows, others = one.attention.rows, other.attention.rows
    assert rows is not None
    assert others is not None
    for name in ("tokens", "cos", "sin"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    for name in ("blocks", "offsets", "slots"):
        assert torch.equal(getattr(one.attention, name), getattr(other.attention, name)), name
    for name in ("table", "lengths"):
        same: tuple[Tensor, Tensor] = getattr(rows, name), getattr(others, name)
        assert torch.equal(*same), name
        assert same[0].dtype is torch.int32
    assert (rows.count, rows.max_length) == (others.count, others.max_length)
    assert len(rows.groups) == len(others.groups)
    for group, known in zip(rows.groups, others.groups, strict=True):
        assert torch.equal(group.rows, known.rows)
        assert torch.equal(group.blocks, known.blocks)
        assert (group.keys, group.shortest, group.cold) == (known.keys, known.shortest, known.cold)


@pytest.mark.parametrize(
    "other",
    [
        share(1, 20, near=16, cold_start=16),
        share(1, 20, next_prompt_tokens=(3,)),
        replace(share(1, 20), sample=False),
    ],
    ids=["beyond pages", "a prompt is reported", "nothing is sampled"],
)
def test_a_step_of_more_takes_the_longer_way(other: Share) -> None:
    spec = Shape.open(tiny.checkpoint("llama")).spec
    found = built(spec, (share(0, 9, 5), other), plain=True)
    assert found.inputs.wanted is not None
    assert found.samples == 1 + other.sample
    assert found.prompt_positions == (0, len(other.next_prompt_tokens))


def chunk(row: int, start: int, count: int, **more: object) -> Share:
    """A chunk of a row as `share` has it."""
    one = share(row, start + count - 1, kind=ShareKind.CHUNK)
    return replace(one, start=start, tokens=(7,) * count, **more)


def test_short_runs_of_a_step_are_attended_to_together() -> None:
    """Where a kernel reads pages: with the tables of their own rows, in pieces."""
    spec = Shape.open(tiny.checkpoint("llama")).spec
    shares = (share(4, 9), chunk(2, 0, 5), chunk(0, 8, 9), chunk(3, 16, 3))
    with patch.object(worker_inputs, "reads_pages", lambda _: True):
        attention = built(spec, shares, plain=True).inputs.attention
    [batch] = attention.batches
    assert (batch.index, batch.queries, batch.stop) == (range(3), slice(1, 18), 19)
    assert (batch.fresh, batch.longest, batch.ends.tolist()) == (False, 9, [0, 5, 14, 17])
    # Ends, tokens, first queries, rows of the table.
    assert batch.pieces(4).tolist() == [
        [4, 5, 12, 16, 17, 19],
        [4, 1, 4, 4, 1, 3],
        [0, 4, 5, 9, 13, 14],
        [0, 0, 1, 1, 1, 2],
    ]
    assert batch.pieces(4) is batch.pieces(4)
    assert batch.table.tolist() == [[20, 0, 0], [0, 1, 2], [30, 31, 32]]
    assert batch.table.dtype is batch.ends.dtype is batch.pieces(9).dtype is torch.int32
    assert built(spec, shares, plain=True).inputs.attention.batches == ()


def test_what_is_long_or_a_tree_or_beyond_pages_is_attended_to_by_itself() -> None:
    runs = [QueryRun(0, count, 0, NEWEST) for count in (1024, 1023, 1, 2, 5, 3, 2000, 4)]
    assert batches(runs) == [range(1, 6)]
    assert batches(runs[:3]) == [range(1, 3)]
    assert batches(runs[:2]) == batches(runs[5:]) == batches([]) == []
    tree = RunTree(0, (0,), NEWEST, {})
    assert batches([*runs[1:4], replace(runs[4], tree=tree), *runs[4:6]]) == [range(3), range(4, 6)]
    far = replace(runs[4], start=1 << 16)
    assert batches([*runs[1:4], far, *runs[4:6]]) == [range(3), range(4, 6)]
    assert batches([*runs[1:4], replace(far, start=1 << 15), *runs[4:6]]) == [range(6)]
    assert batches([*runs[1:4], replace(runs[4], paged=False), *runs[4:6]]) == [range(3), range(4, 6)]


def test_groups_are_made_once_and_only_if_a_layer_asks() -> None:
    made = list[int]()

    def make() -> list[str]:
        made.append(1)
        return ["one", "other"]

    groups = LaterGroups(make)  # type: ignore[arg-type]
    assert not made
    assert list(groups) == ["one", "other"] == list(groups[0:])
    assert len(groups) == 2
    assert made == [1]


def test_angles_of_one_position_are_those_of_the_table() -> None:
    rope = RopeSpec(10_000.0, 64)
    angles = RotaryAngles(rope, CPU)
    positions = [0, 63, 64, 1, 127, 128, 100_000]
    for position, cos, sin in zip(positions, *angles.tables(torch.tensor(positions)), strict=True):
        one = angles.of_one(position)
        assert torch.equal(one[0], cos[None])
        assert torch.equal(one[1], sin[None])


def test_the_likeliest_is_the_first_of_equal_ones_and_nothing_that_is_no_number() -> None:
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(9, 1000, generator=rng)
    logits[1] = 2.0
    logits[2, 500:] = logits[2].max() + 1
    logits[3, 999] = torch.nan
    logits[4, 0] = -torch.nan
    logits[5] = -torch.inf
    logits[6, 77] = torch.inf
    logits[7] = -1.0
    logits[7, [30, 20]] = torch.tensor([0.0, -0.0])
    want = logits.argmax(-1)
    want[3:5] = NO_TOKEN
    assert want[[1, 2, 5, 6, 7]].tolist() == [0, 500, 0, 77, 20]
    assert torch.equal(likeliest_on_host(logits), want)


def test_greedy_rows_have_their_newest_tokens() -> None:
    """Also in another order than that of rows; a row that is no number leaves 0."""
    sampler, logits = Sampler(50, 4, CPU), torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    shares = [share(row, 9, 1) for row in (3, 0, 2)]
    for one in shares:
        sampler.admit(Admission(one.row, sampling(), (1,), ()))
    logits[1, 7] = torch.nan
    best = logits.argmax(-1).tolist()
    drawn = sampler.sample(logits, shares)
    assert drawn.read() == ([best[0], 0, best[2]], [None] * 3)
    assert drawn.tokens.wrong == {1}
    assert sampler.newest.tolist() == [0, 0, best[2], best[0], 0]


@pytest.mark.parametrize("scheme", [name for name in SCHEMES if "odd" not in name])
def test_few_rows_of_an_embedding_of_few_bits(scheme: str) -> None:
    weight, plain = matrix_of(
        SCHEMES[scheme], torch.randn(64, 256, generator=torch.Generator().manual_seed(2))
    )
    for tokens in (torch.tensor([63]), torch.tensor([5, 0, 63, 5])):
        for dtype in (torch.float32, torch.bfloat16):
            found = look_up(tokens, weight, dtype)
            with plain_torch():
                assert torch.equal(found, look_up(tokens, weight, dtype))
            assert torch.equal(found, plain[tokens].to(dtype))
