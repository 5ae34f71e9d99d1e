"""Steps that formats share in making their parts of checkpoint tensors, and checks of what these hold."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.base.errors import CheckpointError

if TYPE_CHECKING:  # Torch takes 1.2 s to import; `penstock plan` does without.
    from torch import Tensor


LARGEST = 65504
"""The largest number of float16."""


def below_each_other(tensors: "Sequence[Tensor]") -> "Tensor":
    """Return tensors of equal widths as one, the first at the top."""
    if len(tensors) == 1:
        return tensors[0]
    whole, at = tensors[0].new_empty(sum(map(len, tensors)), *tensors[0].shape[1:]), 0
    for tensor in tensors:
        whole[at : at + len(tensor)] = tensor
        at += len(tensor)
    return whole


def checked_scales(scales: "Tensor", name: str, *, zero: bool = False) -> "Tensor":
    """Return `scales`. Raises CheckpointError, naming tensor `name`, if one of them is no number, or 0 unless
    `zero`."""
    finite = scales.float().isfinite()
    if not bool(finite.all()):
        raise CheckpointError(f"tensor {name} has scales that are infinite or no numbers; download it again")
    if not zero and bool((scales == 0).any()):
        raise CheckpointError(f"tensor {name} has scales of 0, which no quantiser writes; download it again")
    return scales


def within(numbers: "Tensor", dtype: str, name: str, most: float = 1) -> None:
    """Raise CheckpointError, naming tensor `name`, if `dtype`, that of activations, ends before numbers.

    most: what multiplies them at most, such as codes multiply scales.
    """
    if dtype == "float16" and (largest := float(numbers.float().abs().max()) * most) > LARGEST:
        raise CheckpointError(
            f"tensor {name} leads to weights of up to {largest:.4g}, but numbers of float16 end at "
            f"{LARGEST:,}; choose another dtype: bfloat16, float32"
        )


def exactly(values: "Tensor", dtype: str, name: str) -> "Tensor":
    """Return `values` in `dtype`. Raises CheckpointError, naming tensor `name`, if that would round one."""
    kept = values.float()
    kept = {"float32": kept, "float16": kept.half(), "bfloat16": kept.bfloat16()}[dtype]
    if not bool((kept.float() == values.float()).all()):
        raise CheckpointError(
            f"tensor {name} has values that {dtype} cannot hold; {dtype} is what config.json leads to"
        )
    return kept


def places(like: "Tensor", taken: range, each: int, block: int) -> "Tensor":
    """Return which block of `block` lines each run of `each` of the lines `taken` is in: int64, on the device
    of `like`."""
    ones = like.new_ones(-(-len(taken) // each)).long()
    return (taken.start + (ones.cumsum(0) - 1) * each) // block
