"""Divides the memory budget: weights first, then the activations of the largest step; KV blocks get the
rest."""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.arch.layout import GroupKind, GroupLayout
from penstock.arch.spec import DTYPE_BYTES, ModelSpec
from penstock.base.errors import BudgetError
from penstock.base.units import counted, format_size
from penstock.weights.streaming.residency import HOST_SLOTS, padded, piece_of

LEAST_TOKENS = 2048
"""Tokens of KV for which some weights should rather stream, where no length was asked for."""
GROWTH = 512 << 20
"""Bytes of host memory that the process still takes after boot, beside weights."""
CPU_RING_PART = 8
"""The ring through which weights stream from disk takes at most one part in so many of a CPU's room."""
KV_PART = 8
"""KV gets one part in so many of the device where weights stream: enough for several sequences."""
_FEWER = "max_step_tokens or max_sequences"
_FEWER_WITH_ADAPTERS = "max_step_tokens, max_sequences, max_loras or max_lora_rank"
"""Settings that make the largest step smaller: its tokens, or the logits of its sequences; and adapters."""
HEAP = 8 << 20
"""Bytes by which a CPU's heap grows beside the memory of steps."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Holds the division of the device's memory in bytes, and how many KV blocks it has."""

    total: int
    weights: int
    activations: int
    block_bytes: int
    blocks: int
    block_size: int
    state: int = 0
    """Bytes for the state of all sequences that may run."""

    @property
    def kv(self) -> int:
        """Return the bytes of all KV blocks."""
        return self.blocks * self.block_bytes

    @property
    def kv_tokens(self) -> int:
        """Return the tokens that all KV blocks hold."""
        return self.blocks * self.block_size

    @property
    def used(self) -> int:
        """Return the bytes of all parts."""
        return self.weights + self.activations + self.state + self.kv

    def __str__(self) -> str:
        state = f"state of sequences {format_size(self.state)}, " if self.state else ""
        return (
            f"{format_size(self.used)} of {format_size(self.total)} allowed: "
            f"weights {format_size(self.weights)}, activations {format_size(self.activations)}, {state}"
            f"KV {format_size(self.kv)} = {counted(self.blocks, 'block')} of "
            f"{counted(self.block_size, 'token')} ({format_size(self.block_bytes)} each), "
            f"{counted(self.kv_tokens, 'token')}"
        )


@dataclass(frozen=True, slots=True)
class Demand:
    """The device must hold this besides weights.

    activations: bytes of the largest step. block_bytes: of a KV block, of all models. useful_blocks: KV
    blocks that could ever be filled. fixed_blocks: just so many, if asked for. length: the longest sequence
    that was asked for, None if nobody said. draft_weights: bytes of a draft model's weights. state: bytes for
    the state of all sequences that may run. adapters: bytes of `activations` that are for LoRA adapters.
    """

    activations: int
    block_bytes: int
    block_size: int
    useful_blocks: int
    fixed_blocks: int | None = None
    length: int | None = None
    draft_weights: int = 0
    state: int = 0
    adapters: int = 0

    @property
    def beside(self) -> int:
        """Steps and state take so many bytes, beside weights and KV."""
        return self.activations + self.state

    @property
    def beside_parts(self) -> str:
        """Return what takes these bytes, in words."""
        more = {"the state of sequences": self.state, "LoRA adapters": self.adapters}
        return " and ".join(["the largest step", *(what for what, size in more.items() if size)])

    @property
    def least_blocks(self) -> int:
        """Return the KV blocks for which weights should rather stream: those of one sequence."""
        if self.fixed_blocks is not None:
            return self.fixed_blocks
        return min(self.useful_blocks, -(-(self.length or LEAST_TOKENS) // self.block_size))


def memory_of(shares: Sequence[str]) -> list[str]:
    """Return lines that say how the memory of each rank is divided: one where all have the same."""
    if len(set(shares)) > 1:
        return [f"memory of rank {rank} {share}" for rank, share in enumerate(shares)]
    return [f"memory {f'of each of {len(shares)} ranks ' if len(shares) > 1 else ''}{shares[0]}"]


def goes_to_host(kv: int, total: int, resident: int) -> bool:
    """Tell whether so many bytes of KV of one sequence should rest in host memory.

    They do if they fit neither beside all weights and the largest step (`resident`), nor into the part of the
    device that KV has where weights stream.
    """
    return kv > max(total - resident, total // KV_PART)


def weights_room(total: int, layouts: Sequence[GroupLayout], demand: Demand, *, host_is_device: bool) -> int:
    """Return the bytes that weights may take on the device: all of theirs, if the least KV fits beside them.

    Otherwise a fair share of KV is set aside, and the rest is for resident weights and their ring. If that is
    too little for two groups, only the least KV is set aside; if that is too little for one group, a single
    block.

    host_is_device: whether the ring on the way from disk takes part of it as well, as on a CPU.

    Raises BudgetError if not even one group fits.
    """
    sizes = [padded(layout) for layout in layouts]
    free, largest, ring = (
        total - demand.beside - demand.draft_weights,
        max(sizes),
        _least_cpu_ring(layouts) if host_is_device else 0,
    )
    if sum(sizes) <= free - demand.least_blocks * demand.block_bytes:
        return sum(sizes)
    if demand.fixed_blocks is not None:
        choices = [demand.fixed_blocks]
    else:
        fair = min(demand.useful_blocks, max(demand.least_blocks, total // KV_PART // demand.block_bytes))
        choices = [fair, demand.least_blocks, 1]
    rooms = [free - blocks * demand.block_bytes for blocks in choices]
    room = next((room for room in rooms[1:] if room >= largest + ring), rooms[-1])
    if rooms[0] >= 2 * largest + ring:
        room = rooms[0]
    if room < largest + ring:
        way = f" and {format_size(ring)} on its way from disk" if ring else ""
        drafts, or_none = _of_draft(demand)
        fitting = max(free - largest - ring, 0) // demand.block_bytes
        fewer = f"kv_blocks to {fitting:,}" if demand.fixed_blocks and fitting else _fewer(demand)
        raise BudgetError(
            f"the budget of {format_size(total)} is too small for one group of weights, "
            f"{format_size(largest)}{way}, beside {format_size(choices[-1] * demand.block_bytes)} of KV and "
            f"{format_size(demand.beside)} for {demand.beside_parts}{drafts}; "
            f"{_raise_to(total + largest + ring - room)}, or lower {fewer}{or_none}"
        )
    return room


def _of_draft(demand: Demand) -> tuple[str, str]:
    """Return what a refusal says of a draft model: what it takes, and what to try."""
    if not demand.draft_weights:
        return "", ""
    return f", and {format_size(demand.draft_weights)} for the draft model", "; or do without the draft model"


def cpu_ring(room: int, layouts: Sequence[GroupLayout]) -> int:
    """Return the bytes of a CPU's `room` for the ring, and for slots of experts, through which weights
    stream."""
    most = HOST_SLOTS[0] * piece_of(layouts)
    return _least_cpu_ring(layouts) + max(min(most, room // CPU_RING_PART) - 2 * piece_of(layouts), 0)


def _least_cpu_ring(layouts: Sequence[GroupLayout]) -> int:
    """Return the bytes of two pieces and two experts."""
    expert = max((padded(layout) for layout in layouts if layout.id.kind is GroupKind.EXPERT), default=0)
    return 2 * piece_of(layouts) + 2 * expert


def usual_activations(spec: ModelSpec, dtype: str, max_step_tokens: int, max_sequences: int) -> int:
    """Estimate the bytes of the largest step, from measurements on a GPU with models of 70B shape (within 10
    %).

    A layer takes three quarters more than the inputs and outputs of its products. Sampling with a sorted
    vocabulary takes about 19 numbers for each logit, log-probabilities of a prompt two for each of up to 64
    positions.
    """
    layer = least_activations(spec, dtype, max_step_tokens, 0) * 7 // 4
    logits = spec.vocab_size * 4
    return max(layer, 19 * max_sequences * logits, 2 * min(64, max_step_tokens) * logits)


def on_heap(tensors: int, buffers: int) -> int:
    """Return the bytes of a CPU's memory that a step takes.

    Tensors count twice, since freed memory is not always reused by the next step.

    tensors: bytes of tensors at their peak.
    buffers: bytes that libraries keep.
    """
    return 2 * tensors + HEAP + buffers


def least_activations(spec: ModelSpec, dtype: str, max_step_tokens: int, max_sequences: int) -> int:
    """Return the least bytes of the largest step: inputs and outputs of its widest products, and logits.

    In a mixture each token passes through top_k experts: for every pair of a token and an expert there is a
    row of the expert's width and a row of its output.
    """
    inner = max(spec.intermediate_size, spec.shared_size, spec.query_size)
    wide = 2 * spec.hidden_size + 2 * inner
    if spec.moe is not None:
        wide = max(
            wide, 2 * spec.hidden_size + spec.moe.top_k * (spec.moe.intermediate_size + spec.hidden_size)
        )
    return max_step_tokens * wide * DTYPE_BYTES[dtype] + max_sequences * spec.vocab_size * 4


def divide(total: int, weights: int, demand: Demand) -> Budget:
    """Return the budget, with as many KV blocks as fit beside the weights, up to the useful or fixed number.

    weights: bytes.

    Raises BudgetError if not even one block fits, or not the fixed number.
    """
    block_bytes, fixed = demand.block_bytes, demand.fixed_blocks
    fitting = max(total - weights - demand.beside, 0) // block_bytes
    drafts, or_none = _of_draft(demand)
    own = weights - demand.draft_weights
    taken = f"weights take {format_size(own)} and {demand.beside_parts} {format_size(demand.beside)}{drafts}"
    if fixed is not None and fixed > fitting:
        raise BudgetError(
            f"kv_blocks is {fixed}, each of {format_size(block_bytes)}, but of {format_size(total)} "
            f"{taken}, which leaves room for {fitting}; "
            f"{_raise_to(weights + demand.beside + fixed * block_bytes)}, or lower kv_blocks{or_none}"
        )
    if fitting < 1:
        raise BudgetError(
            f"the budget of {format_size(total)} leaves no room for KV: {taken}, and one block needs "
            f"{format_size(block_bytes)}; {_raise_to(weights + demand.beside + block_bytes)}, "
            f"or lower {_fewer(demand)}{or_none}"
        )
    blocks = min(fitting, demand.useful_blocks) if fixed is None else fixed
    return Budget(total, weights, demand.activations, block_bytes, blocks, demand.block_size, demand.state)


def _raise_to(least: int) -> str:
    """Return the way to the least budget that would do."""
    return f"raise device_memory, so that the budget is {-(-least >> 20):,} MiB at least"


def _fewer(demand: Demand) -> str:
    """Return the settings that make what is beside weights and KV smaller."""
    return _FEWER_WITH_ADAPTERS if demand.adapters else _FEWER
