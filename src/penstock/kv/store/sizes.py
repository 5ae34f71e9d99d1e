"""Count the bytes of disk that a BlockStore takes: plain arithmetic, also for those who only plan one."""

from penstock.memory.disk import DIRECT_ALIGNMENT, in_pages

ENTRY_BYTES = 64
"""Bytes of an entry of the journal, or of a segment's table."""
SLOT_BITS = 24
MOST_SLOTS = 1 << SLOT_BITS
"""Most records of a segment."""
FIXED_BYTES = 64 << 10
"""Bytes of the cap for all that does not grow with it."""
JOURNAL_BYTES = 4 * ENTRY_BYTES
"""Bytes of the journal for a slot: three entries, and one in a new journal beside it."""


def planned_bytes(slots: int, record_bytes: int) -> int:
    """Return the most that a segment takes of the disk.

    A file system says in so many bytes for a page where it is, if it has to for each.
    """
    size = in_pages(slots * ENTRY_BYTES) + slots * in_pages(record_bytes)
    return size + in_pages(size // 256) + DIRECT_ALIGNMENT


def least_cap(record_bytes: int) -> int:
    """Return the smallest cap in bytes of which a store can be made: two segments of one record, and what
    does not grow."""
    return FIXED_BYTES + 2 * (planned_bytes(1, record_bytes) + JOURNAL_BYTES)
