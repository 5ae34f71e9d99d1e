"""How the memory budget is divided: weights first, then the activations of the largest step, and KV blocks from what is left."""

from dataclasses import dataclass

from penstock.base.errors import BudgetError
from penstock.base.units import format_size


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes on the device, and what they hold."""

    total: int
    weights: int
    activations: int
    block_bytes: int
    blocks: int
    block_size: int

    @property
    def kv(self) -> int:
        return self.blocks * self.block_bytes

    @property
    def kv_tokens(self) -> int:
        return self.blocks * self.block_size

    def __str__(self) -> str:
        return (
            f"{format_size(self.total)}: weights {format_size(self.weights)}, activations {format_size(self.activations)}, "
            f"KV {format_size(self.kv)} = {self.blocks:,} blocks of {self.block_size} tokens ({format_size(self.block_bytes)} each), "
            f"{self.kv_tokens:,} tokens"
        )


def check_weights_fit(total: int, weights: int, layer: int) -> None:
    """Refuse a budget that cannot hold the weights, before any of them is read. `layer`: bytes of the largest group."""
    if layer > total:
        raise BudgetError(
            f"the budget of {format_size(total)} is too small for one layer's weights, {format_size(layer)}; allow more device memory"
        )
    if weights > total:
        raise BudgetError(
            f"the budget of {format_size(total)} is too small for the weights, {format_size(weights)}; "
            f"allow more device memory, or use a smaller model or dtype"
        )


def divide(
    total: int, *, weights: int, activations: int, block_bytes: int, block_size: int, useful_blocks: int, fixed_blocks: int | None = None
) -> Budget:
    """The budget, with as many KV blocks as fit and at most `useful_blocks`, or `fixed_blocks` if they were asked for.

    Raises BudgetError if not even one block fits, or not the fixed number.
    """
    left = total - weights - activations
    fitting = max(left, 0) // block_bytes
    taken = f"weights take {format_size(weights)} and the largest step {format_size(activations)}"
    if fixed_blocks is not None and fixed_blocks > fitting:
        raise BudgetError(
            f"{fixed_blocks} KV blocks of {format_size(block_bytes)} were asked for, but of {format_size(total)} {taken}, "
            f"which leaves room for {fitting}; allow more device memory or fewer blocks"
        )
    if fitting < 1:
        raise BudgetError(
            f"the budget of {format_size(total)} leaves no room for KV: {taken}, and one block needs {format_size(block_bytes)}; "
            f"allow more device memory, or fewer tokens a step"
        )
    blocks = min(fitting, useful_blocks) if fixed_blocks is None else fixed_blocks
    return Budget(total, weights, activations, block_bytes, blocks, block_size)
