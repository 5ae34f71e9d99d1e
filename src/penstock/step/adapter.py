"""Names LoRA adapters, as plans and requests do."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """Describes an adapter that ranks hold.

    name: by which requests ask for it. path: of its directory.
    digest: of its files. KV that was computed with it is known by this, and never by its name.
    slot: where ranks hold it, from 1 on.
    """

    name: str
    path: str
    digest: bytes
    slot: int
