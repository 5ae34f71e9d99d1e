"""Makes steps over blank weights: the largest, to measure memory, and small ones, for their kernels.

Each needs a pool of one block, and leaves nothing behind.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from penstock.ops.attention.gathered import PAST_TILE
from penstock.step.params import Sampling
from penstock.step.plan import MOST_NODES, Admission, BlockId, HostBlockId, Plan, Row, Share, ShareKind
from penstock.worker.inputs import ROW_KEYS
from penstock.worker.sizes import HEAD_ROWS, StepSizes

SORTED = Sampling(1.0, 0, 0.9, 0.0, 1.0, 0.0, 0.0, (), 0, frozenset(), 0, 1, 1)
"""Settings of a draw that sorts the vocabulary."""
_SMALL_STEPS = ((8, 48), (8, 1024), (0, 48))
"""Rows, and tokens of a run."""
_ROWS = (1, 2, 8, 17, 33, 64)
"""Rows of a decode step: one number for each class with kernels of its own."""
_TILED = (1, 2, 4, 8, 16, 32)
"""Rows that read one tile: one number of each class for which a tile has a kernel."""
_RUNS = (16, 512)
"""Tokens of a run behind a past: one number for each class with kernels of its own."""


def small_steps(sizes: StepSizes) -> Iterator[Plan]:
    """Yield steps with kernels that the largest one does not launch.

    They are the rest of a prompt with a cached prefix, short or long, beside few rows or alone.
    """
    for rows, tokens in _SMALL_STEPS:
        yield _mixed_step(sizes, rows, tokens)


def kernel_steps(sizes: StepSizes) -> Iterator[Plan]:
    """Yield a decode step, and a run behind a past, for every class with kernels of its own; and two runs,
    which are attended to together."""
    for rows in _ROWS:
        if rows <= sizes.max_sequences:
            yield _mixed_step(sizes, rows, 0)
    for tokens in _RUNS:
        yield _mixed_step(sizes, 0, tokens)
    if min(sizes.max_sequences, sizes.max_step_tokens // 2, sizes.max_length - 1) > 1:
        shares = [replace(_warm_share(row, 1, 2, sizes.block_size), kind=ShareKind.CHUNK) for row in range(2)]
        yield _step_of(shares)


def long_steps(sizes: StepSizes) -> Iterator[Plan]:
    """Yield steps of requests with one block beyond the device: rows that read its tile side by side, and
    with another between them, so that every class of rows has one; and a run behind it, of whole blocks."""
    size = sizes.block_size
    run = max(size, 2)
    if sizes.max_length < size + run:
        return
    for rows in _TILED:
        yield from _long_rows(sizes, rows, range(rows))
        yield from _long_rows(sizes, rows + 1, {*range(rows + 1)} - {rows // 2})
    yield from _long_rows(sizes, _ROWS[-1], (0,))
    share = _beyond(_warm_share(0, size, run, size), size, size + run)
    yield Plan((Admission(share.row, SORTED, share.tokens, ()),), (share,))


def _long_rows(sizes: StepSizes, rows: int, long: Collection[int]) -> Iterator[Plan]:
    """Yield a step of so many rows, if there can be, of which these are long."""
    size = sizes.block_size
    if rows > sizes.max_sequences:
        return
    shares = [_warm_share(row, size, 1, size) for row in range(rows)]
    yield _step_of([_beyond(share, size, size) if share.row in long else share for share in shares])


def _beyond(share: Share, size: int, stop: int) -> Share:
    """Return a share whose positions up to `stop` rest on the host after the step, and of them its first
    block before it."""
    cold = (HostBlockId(0),) * (stop // size)
    return replace(share, cold_start=size, cold_stop=stop, near=stop, new_cold=cold)


def _mixed_step(sizes: StepSizes, rows: int, tokens: int) -> Plan:
    """Return a step of as many rows of one token, and a run of so many tokens, as the sizes allow."""
    size, longest = sizes.block_size, sizes.max_length
    singles = min(rows, sizes.max_sequences - bool(tokens), sizes.max_step_tokens - bool(tokens))
    shares = [_warm_share(row, min(1, longest - 1), 1, size) for row in range(singles)]
    if tokens:
        count = min(tokens, sizes.max_step_tokens - singles, longest)
        shares.append(_warm_share(singles, min(PAST_TILE, longest - count), count, size))
    return _step_of(shares)


def _step_of(shares: Sequence[Share]) -> Plan:
    return Plan(tuple(Admission(share.row, SORTED, share.tokens, ()) for share in shares), tuple(shares))


def largest_step(sizes: StepSizes, *, past: int, cold: bool = False) -> Plan:
    """Return the step that takes the most memory: as many tokens and sequences as allowed, all sampling.

    The vocabulary is sorted. The tokens are in as few runs as hold them, each of at most max_length. The last
    run has a tile of past, as far as its length allows, and log-probabilities of its prompt. Rows have as
    much past as a device without a paged kernel gathers at a time.

    past: tokens of KV that attention gathers at a time.
    cold: whether the last run and its past rest in host memory.
    """
    max_step_tokens, max_sequences = sizes.max_step_tokens, sizes.max_sequences
    max_length, block_size = sizes.max_length, sizes.block_size
    runs = min(max(-(-(max_step_tokens - max_sequences) // max(max_length - 1, 1)), 1), max_sequences)
    singles = min(max_sequences - runs, max_step_tokens - 1)
    row_past = min(ROW_KEYS // max(singles, 1), past, max_length) - 1
    shares = [_warm_share(row, row_past, 1, block_size) for row in range(singles)]
    whole = [_warm_share(singles + run, 0, max_length, block_size) for run in range(runs - 1)]
    count = min(max_step_tokens - singles - len(whole) * max_length, max_length)
    start = min(past, max_length - count)
    run = _warm_share(singles + len(whole), start, count, block_size)
    run = replace(run, next_prompt_tokens=(0,) * min(count - 1, HEAD_ROWS))
    if cold:
        begin = start - start % block_size
        blocks = (begin + count) // block_size
        stop = blocks * block_size
        run = replace(
            run, start=begin, cold_start=begin, cold_stop=stop, near=stop, new_cold=(HostBlockId(0),) * blocks
        )
    shares += [*whole, run]
    return _step_of(shares)


def draft_step(sizes: StepSizes) -> Plan:
    """Return the step whose draws take the most memory: as many sequences as allowed, of which the last ones
    verify drafts that have as many rows of logits as are in memory at a time."""
    most = min(HEAD_ROWS, sizes.max_step_tokens - sizes.max_sequences)
    drafts = min(sizes.max_sequences, -(-most // (sizes.drafted + 1)))
    count = min(most // max(drafts, 1), sizes.drafted + 1, sizes.max_length)
    drafts = drafts if count > 1 else 0
    singles = sizes.max_sequences - drafts
    shares = [_warm_share(row, 0, 1, sizes.block_size) for row in range(singles)]
    shares += [
        replace(_warm_share(singles + row, 0, count, sizes.block_size), kind=ShareKind.VERIFY)
        for row in range(drafts)
    ]
    return _step_of(shares)


def tree_step(sizes: StepSizes) -> Plan:
    """Return a step that verifies a tree behind another token, as kernels over pages are compiled for."""
    count = min(1 + MOST_NODES, sizes.max_step_tokens, sizes.max_length - 1)
    share = _warm_share(0, 1, count, sizes.block_size)
    if count > 1:
        share = replace(share, kind=ShareKind.VERIFY, parents=(0,) * (count - 1))
    return Plan((Admission(share.row, SORTED, (0, 0), ()),), (share,))


def _warm_share(row: int, start: int, count: int, block_size: int) -> Share:
    blocks = (BlockId(0),) * -(-(start + count) // block_size)
    kind = ShareKind.DECODE if count == 1 else ShareKind.CHUNK
    return Share(
        Row(row), start, (0,) * count, 0, blocks, sample=True, prompt_length=start + count, kind=kind
    )
