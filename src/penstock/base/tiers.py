"""The three places where bytes rest, from the largest and slowest to the smallest and fastest."""

from enum import StrEnum


class Tier(StrEnum):
    """The places where bytes rest."""

    DISK = "disk"
    HOST = "host"
    DEVICE = "device"
