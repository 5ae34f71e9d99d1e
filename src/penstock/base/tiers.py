"""The three places where bytes rest, from the largest and slowest to the smallest and fastest."""

from enum import StrEnum


class Tier(StrEnum):
    DISK = "disk"
    HOST = "host"
    DEVICE = "device"
