"""The time that no engine can beat on the machine that was measured."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bound:
    """What must be done at least, bytes read or floating-point operations, at the rate measured for it just
    before. Of a model that several devices share: by each of them, at the rate of one."""

    weight_bytes: float
    kv_bytes: float
    operations: float
    per_second: float
    """Bytes for a decode step, operations for a prefill."""
    ms: float
