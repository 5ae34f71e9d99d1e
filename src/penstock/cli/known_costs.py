"""Finds what steps cost on a device: as `penstock doctor` measured it here, or as it comes with penstock."""

from pathlib import Path

from penstock.engine.costs import StepCosts, costs_file, read_costs

SHIPPED = Path(__file__).parent / "machines"
"""Costs of machines that are known by name."""


def costs_of(cache: Path, device: str, dtype: str) -> StepCosts | None:
    """Return the costs of steps on a device in a dtype, or None where they are not known. Raises ConfigError.

    cache: where `penstock doctor` keeps what it measured. device: the name that torch has for it.
    """
    file = costs_file(cache, device, dtype)
    if file.exists():
        return read_costs(file)
    if dtype not in ("bfloat16", "float16"):
        return None
    return next(
        (found for one in sorted(SHIPPED.glob("*.json")) if (found := read_costs(one)).device == device), None
    )
