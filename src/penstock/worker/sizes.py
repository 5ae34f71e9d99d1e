"""Sizes of steps, and what a model keeps from being recorded as CUDA graphs or shared: plain arithmetic, for
those who record and for those who plan."""

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.arch.layout import MixtureLayout
from penstock.arch.lora import LoraRoom
from penstock.arch.spec import DTYPE_BYTES, ModelSpec, RopeKind
from penstock.ops.row_classes import MOST_TOKENS

HEAD_ROWS = 64
"""Positions with logits in memory at a time, for log-probabilities of a prompt and for drafts."""
_GRAPH_BYTES = 16 << 20
"""Bytes of a recorded step, beside its activations."""
_STREAM_BYTES = 64 << 20
"""Bytes of the stream that steps are recorded on: 32 MiB that cuBLAS takes for each, and partly used
segments."""
_MANY = 32
_RUNS = (512, 256, 128, 64, 32, 16)
"""Tokens of recorded runs. More of them keep a device busy for longer than the host needs."""
_MIXED = (1024, 768, 512, 384, 256, 128, 64, 32)
"""Tokens of recorded steps of rows and short runs."""
_COLD = 8
"""Most rows of recorded steps in which some have KV beyond the device: for more, the device needs longer than
the host."""
_MOST_PASSING = 64 << 20
"""Bytes of activations and block tables that such a step may take."""


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Holds the most tokens and sequences of a step and tokens of a sequence, the tokens of a KV block, and
    the most tokens of a draft, 0 without drafts.

    verifies: whether drafts are verified: not by a model that only makes them.
    """

    max_step_tokens: int
    max_sequences: int
    max_length: int
    block_size: int
    drafted: int = 0
    verifies: bool = True

    def rows(self, spec: ModelSpec) -> int:
        """Return the most rows of a recorded step: one for each sequence, or one for each token where drafts
        are verified. Of a mixture these might ask for more experts than have room."""
        if not self.drafted or not self.verifies or spec.moe is not None:
            return self.max_sequences
        most = min(HEAD_ROWS, self.max_sequences * (1 + self.drafted), self.max_step_tokens)
        return max(self.max_sequences, most)


def graph_blocker(
    spec: ModelSpec,
    *,
    cuda: bool,
    kernels: bool,
    host_decides: bool,
    mixtures: Iterable[MixtureLayout] = (),
) -> str | None:
    """Return why decode steps cannot be recorded as CUDA graphs, or None if they can.

    cuda: whether the device is a CUDA device.
    kernels: whether kernels of ours read pages there.
    host_decides: whether experts, if there are any, come and go, and the host decides which.
    mixtures: of the layers that are one.
    """
    if not kernels:
        return "no kernel of our own reads pages" if cuda else "there is no CUDA device"
    if spec.moe is not None and host_decides:
        return "experts stream, and the host has to know which of them a router chooses"
    if not all(mixture.kernels for mixture in mixtures):
        return "the host launches one expert after another, and has to know which of them a router chooses"
    if spec.rope.kind is RopeKind.DYNAMIC:
        return "frequencies depend on each request's length"
    return None


def prefix_blocker(spec: ModelSpec) -> str | None:
    """Return why KV of equal prefixes cannot be shared, nor kept for later, or None if it can."""
    return "a layer keeps state of a sequence, which is not in KV blocks" if spec.has_state else None


def row_counts(most: int) -> tuple[int, ...]:
    """Return the numbers of rows for which steps are recorded, the largest first.

    Each is at most half as large again as the next, later a quarter.
    """
    counts, count = {most}, 1
    while count < most:
        counts.add(count)
        power = 1 << (count.bit_length() - 1)
        count += max(1, power // (4 if count >= _MANY else 2))
    return tuple(sorted(counts, reverse=True))


def run_counts(spec: ModelSpec, most: int) -> tuple[int, ...]:
    """Return the numbers of tokens for which runs are recorded, the largest first, of steps of at most so
    many.

    There are none of a mixture: padding would choose experts, which may stream, and bits must not depend on
    that. There are none of a model with state either: padding would become part of it.
    """
    return () if spec.moe is not None or spec.has_state else tuple(count for count in _RUNS if count <= most)


def mixed_counts(spec: ModelSpec, dtype: str, most: int, blocks: int) -> tuple[int, ...]:
    """Return the numbers of tokens for which steps of rows and short runs are recorded, the largest first.

    There are none where there are none of `run_counts`.

    most: tokens of a step.
    blocks: KV blocks of the longest sequence.
    """
    if spec.moe is not None or spec.has_state:
        return ()
    each = 2 * _width(spec) * DTYPE_BYTES[dtype] + 4 * blocks
    return tuple(count for count in _MIXED if count <= min(most, _MOST_PASSING // each))


def cold_counts(most: int) -> tuple[int, ...]:
    """Return the numbers of rows for which steps are recorded where some have KV beyond the device, the
    largest first: each is twice the next, or less. most: rows of a decode step."""
    most = min(most, _COLD)
    return tuple(sorted({most, *(1 << power for power in range(most.bit_length()))}, reverse=True))


def cold_bytes(rows: int) -> int:
    """Return an upper bound of the bytes of recorded steps in which rows have KV beyond the device.

    rows: of a decode step.
    """
    return len(cold_counts(rows)) * _GRAPH_BYTES


def shared_counts(most: int) -> tuple[int, ...]:
    """Return those of `row_counts` for which steps are recorded a second time, where a CPU shares them."""
    return tuple(count for count in row_counts(most) if count <= MOST_TOKENS)


def shared_bytes(rows: int) -> int:
    """Return the bytes of the recorded steps that a CPU shares, beside those of all others. rows: most rows
    of a decode step."""
    return len(shared_counts(rows)) * _GRAPH_BYTES


def graph_bytes(
    spec: ModelSpec,
    dtype: str,
    rows: int,
    tokens: int,
    *,
    blocks: int,
    shared: bool = False,
    cold: bool = False,
    lora: LoraRoom | None = None,
) -> int:
    """Return an upper bound of the bytes of recorded steps.

    rows: most rows of a decode step.
    tokens: most tokens of a step with a run.
    blocks: KV blocks of the longest sequence.
    shared: whether a CPU may share steps where weights stream; runs are recorded only where none do.
    cold: whether rows may have KV beyond the device.
    lora: room for adapters. Where there is any, every step is recorded with adapters too.
    """
    runs, mixed = run_counts(spec, tokens), mixed_counts(spec, dtype, tokens, blocks)
    most = max(rows, *runs, *mixed, 0)
    passing = (most * 2 * _width(spec) + rows * spec.vocab_size) * DTYPE_BYTES[dtype]
    passing += most * blocks * 4
    again = max((len(runs) + len(mixed)) * _GRAPH_BYTES, shared_bytes(rows) if shared else 0)
    beside = _STREAM_BYTES + len(row_counts(rows)) * _GRAPH_BYTES + again
    beside += cold_bytes(rows) if cold else 0
    if lora is not None:
        beside += (len(row_counts(rows)) + len(runs)) * _GRAPH_BYTES
        passing += max(rows, *runs, 0) * 3 * lora.slots * (lora.rank * DTYPE_BYTES[dtype] + 1)
    return rows * spec.vocab_size * DTYPE_BYTES[dtype] + passing + beside


def _width(spec: ModelSpec) -> int:
    """Return half of the numbers that a token has in a layer at a time."""
    wide = max(
        2 * max(spec.intermediate_size, spec.shared_size) + spec.hidden_size,
        spec.projected_size + 3 * spec.hidden_size,
    )
    if spec.moe is None:
        return wide
    beside = 3 if spec.shared_size else 2
    chosen = spec.moe.top_k * (spec.moe.intermediate_size + spec.hidden_size)
    return max(wide, chosen + beside * spec.hidden_size)
