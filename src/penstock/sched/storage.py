"""Says where KV rests beside the device."""

from dataclasses import dataclass

from penstock.kv.ledger.disk import DiskLedger
from penstock.kv.ledger.host import HostLedger
from penstock.sched.tiers import Store


@dataclass(frozen=True, slots=True)
class Storage:
    """Says where KV rests beside the device, and when it goes there.

    host: blocks of the host.
    disk: blocks of the disk, which are reached by way of host blocks.
    store: when full blocks of short requests go to the host.
    alike: whether blocks on the host have the bytes of those on the device.
    """

    host: HostLedger | None = None
    disk: DiskLedger | None = None
    store: Store = "off"
    alike: bool = True
