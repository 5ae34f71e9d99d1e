"""Forecasts what more memory and faster links would buy."""

from dataclasses import dataclass, replace
from enum import StrEnum

from penstock.arch.families import TensorNames
from penstock.arch.spec import ModelSpec
from penstock.base.errors import BudgetError
from penstock.engine.forecast import Forecast, forecast

GB = 10**9
MORE = 1.1
"""Factor by which faster links are tried."""


class More(StrEnum):
    """Names what a machine might have more of."""

    DEVICE = "1 GB more device memory"
    HOST = "1 GB more host memory"
    LINK = "a link 10 % faster"
    DISK = "a disk 10 % faster"


@dataclass(frozen=True, slots=True)
class Gain:
    """Says how many tokens/s more of something would add: 0 where it would not help."""

    more: More
    decode: float
    prefill: float


def gains(spec: ModelSpec, names: TensorNames, now: Forecast) -> tuple[Gain, ...]:
    """Return how much more of each tier and link would help."""
    machine, rates = now.machine, now.machine.rates
    others = {
        More.DEVICE: replace(machine, device=machine.device + GB),
        More.LINK: replace(machine, rates=replace(rates, host_to_device=rates.host_to_device * MORE)),
    }
    if machine.host is not None:
        others[More.HOST] = replace(machine, host=machine.host + GB)
    if rates.disk_to_host:
        others[More.DISK] = replace(machine, rates=replace(rates, disk_to_host=rates.disk_to_host * MORE))
    found = []
    for more in More:
        if more not in others:
            continue
        try:
            then = forecast(spec, names, others[more], now.work)
        except BudgetError:  # More host memory takes more of the device for its page tables.
            then = now
        paces = ((then.decode, now.decode), (then.prefill, now.prefill))
        found.append(
            Gain(
                more,
                *(max(after.tokens_per_second - before.tokens_per_second, 0.0) for after, before in paces),
            )
        )
    return tuple(found)
