"""Holds the time that no engine can beat on the machine that was measured."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bound:
    """Holds the least work of a step, and the time it takes at the rate measured for it just before.

    Where several devices share a model, it is the work of each of them, at the rate of one.

    weight_bytes, kv_bytes: bytes that are read.
    operations: floating-point operations.
    per_second: bytes/s for a decode step, operations/s for a prefill.
    ms: the time in milliseconds.
    """

    weight_bytes: float
    kv_bytes: float
    operations: float
    per_second: float
    ms: float


@dataclass(frozen=True, slots=True)
class ServingBound:
    """Holds the least work of many requests, at the rates measured just before.

    weight_bytes: all weights, read once for every token of the longest answer.
    kv_bytes: KV, read for every token that is decoded.
    operations: the arithmetic of prompts.
    """

    weight_bytes: float
    kv_bytes: float
    operations: float
    bytes_per_second: float
    operations_per_second: float

    @property
    def seconds(self) -> float:
        """Return the seconds that the reads and the arithmetic take, one after the other."""
        return (
            self.weight_bytes + self.kv_bytes
        ) / self.bytes_per_second + self.operations / self.operations_per_second
