"""What a forward pass reads besides weights and KV, and how it reaches those without knowing where they rest."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from penstock.arch.layout import GroupId
from penstock.ops.attention import AttentionInputs, Tiles


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step on the device. tokens int64 `[tokens]`; cos, sin float32 `[tokens, dim / 2]`; wanted int64 `[rows]`: positions whose
    hidden state leaves the pass."""

    tokens: Tensor
    cos: Tensor
    sin: Tensor
    attention: AttentionInputs
    wanted: Tensor


class Weights(Protocol):
    """Borrowed weights: between `take` and `release` the group's fields may be read on the compute stream, and not after.

    `expect` tells which experts will be taken next, in this order, as soon as it is known.
    """

    def expect(self, experts: Sequence[GroupId]) -> None: ...

    def take(self, group: GroupId) -> Mapping[str, Tensor]: ...

    def release(self, group: GroupId) -> None: ...


class ColdCache(Tiles, Protocol):
    """KV beyond the device: lends each layer's tiles, and is sent what is to rest there."""

    def send(self, layer: int, k: Tensor, v: Tensor) -> None:
        """The step's K and V of a layer, `[tokens, kv_heads, head_dim]`, before it attends."""


LayerCaches = Sequence[tuple[Tensor, Tensor]]
"""K and V of every layer, each a strided view `[blocks, block_size, kv_heads, head_dim]`."""
