"""Says what the engine's loop needs of what computes: ranks, and threads of the CPU."""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from penstock.step.adapter import LoadedAdapter
from penstock.step.plan import Landed, Plan, Step

if TYPE_CHECKING:
    from penstock.kv.movement.carrier import Carrier
    from penstock.weights.checkpoint.lora import Adapter


class Ranks(Protocol):
    """Carries out plans on one or several workers."""

    @property
    def carrier(self) -> "Carrier | None":
        """Return the carrier of KV beyond the device, if there is any."""
        ...

    @property
    def ahead(self) -> bool:
        """Tell whether plans should be begun ahead, since `begin` returns before its arithmetic has ended."""
        ...

    def begin(self, plan: Plan) -> Step:
        """Begin a plan, or have it begun on all ranks."""
        ...

    def load_adapter(self, loaded: LoadedAdapter, adapter: "Adapter") -> None:
        """Put a LoRA adapter that was read into its slot, behind all plans that were begun."""
        ...

    def settle(self) -> tuple[Landed, ...]:
        """Wait for all that is under way, after an interrupted step.

        Return the transfers that have landed.
        """
        ...

    def free_kv(self) -> None:
        """Give back the memory of KV blocks, where it can be had again."""
        ...

    def check(self) -> None:
        """Raise the failure of a rank, if it has not been raised before."""
        ...

    def close(self) -> None:
        """Free the devices."""
        ...


class Threads(Protocol):
    """Gives each step its threads of the CPU."""

    now: int
    """Those of the last step."""

    def of(self, rows: int) -> AbstractContextManager[None]:
        """Compute a step of so many rows."""
        ...
