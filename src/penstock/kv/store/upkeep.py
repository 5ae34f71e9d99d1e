"""Upkeep of a BlockStore: a journal that stays short, and room for new blocks in segments that are full.

A KV block that was forgotten or damaged leaves a hole in its segment. `Upkeep.tend` removes a segment that
has nothing but holes. Where new segments do not fit any more, it moves the records of the emptiest ones
together into a new one (compaction), which makes their files superfluous.

Why this is safe. The engine's thread calls all. A chore is done by one thread, the keeper's, and taken in
when it is done. A segment is touched only when no operation that is under way reads or writes it.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

from penstock.kv.store.directory import OpenDirectory
from penstock.kv.store.journal import Item, Journal, Kind
from penstock.kv.store.operations import (
    Health,
    Intake,
    IOStatus,
    Move,
    Operation,
    Removal,
    Rewriting,
    attempt,
    move_records,
)
from penstock.kv.store.space import SegmentState, Space
from penstock.memory.tasks import Workers

_STALE = 256
"""Entries of the journal beyond twice its records, before it is worth writing anew."""
_log = logging.getLogger("penstock")


class Upkeep:
    """An Upkeep has the chores of one store: entries of the journal, a new journal, moves and removals."""

    def __init__(
        self,
        there: OpenDirectory,
        space: Space,
        writing: Health,
        intake: Intake,
        keeper: Workers,
    ) -> None:
        """Take `keeper` over."""
        self._journal, self._seal, self._usual_slots = there.journal, there.seal, there.size.slots
        self._space, self._writing, self._intake, self._keeper = space, writing, intake, keeper
        self.chores: list[Operation] = []
        """Chores that are not taken in yet."""
        self.suspects: set[SegmentState] = set()
        """Segments in which nothing may be left."""
        self._stirred = True
        """Whether there may be something for compaction that was not when it was last looked for."""
        self._rewrite_at = 0
        self._closed = False
        self.checksum_failures = self.io_failures = self.compactions = 0

    def tend(self, under_way: Sequence[Operation]) -> None:
        """Begin what makes room, where it is needed, and a new journal where the old one is mostly stale.

        under_way: the store's reads and writes that are not taken in.
        """
        if self._journal is None or self._closed or self._writing.off:
            return
        stale = self._journal.count > max(2 * len(self._space.index) + _STALE, self._rewrite_at)
        if stale and not any(isinstance(chore, Rewriting) for chore in self.chores):
            self.rewrite(self._journal)
        if any(isinstance(chore, Move | Removal) for chore in self.chores):
            return
        for segment in self._idle(self.suspects, under_way):
            if not segment.bad and segment.live == 0:
                self._remove(segment)
            self.suspects.discard(segment)
        if self._stirred and self._space.spare < self._usual_slots // 2 and not self._space.grows:
            self._make_room(self._journal, under_way)

    def take(self) -> None:
        """Take in the chores that are done."""
        for chore in self.chores:
            if chore.task.done and not chore.taken:
                self._take(chore)
        self.chores = [chore for chore in self.chores if not chore.taken]

    def rewrite(self, journal: Journal) -> None:
        """Write the journal anew, its records in the order of use."""
        self._put(Rewriting(()), partial(journal.rewrite, list(self._space.index)))

    def forgotten(self, items: Sequence[Item]) -> None:
        """Note in the journal that these records are forgotten."""
        if items:
            self._stirred = True
            self._note(Kind.FORGOTTEN, items)

    def quarantine(self, segment: SegmentState, item: Item) -> None:
        """Let a record that is not as it was written be found no more. It stays where it is."""
        if item.slot not in segment.bad:
            self.checksum_failures += 1
            line = "KV block %s in %s, slot %d, is not what was written; it is kept, and not used again"
            _log.warning(line, item.key.hex(), segment.file.path, item.slot)
        segment.bad.add(item.slot)
        if self._space.index.get(item.key) == segment.place(item.slot):
            del self._space.index[item.key]
        segment.keys[item.slot] = None
        self._stirred = True
        self._note(Kind.QUARANTINED, [item])

    def stop(self) -> None:
        """Begin no chore any more but a last `rewrite`, and let moves end early."""
        self._closed = True
        for chore in self.chores:
            if isinstance(chore, Move):
                chore.stop = True

    def close(self) -> None:
        """Wait until all chores are done, since what was forgotten must not be there again, and end."""
        for chore in self.chores:
            chore.task.wait()
        self._keeper.close()

    def _take(self, chore: Operation) -> None:
        right = chore.outcome is IOStatus.RIGHT
        if isinstance(chore, Move):
            self._take_move(chore)
            if right:
                self._writing.note(None)
            elif chore.outcome is IOStatus.FAILED:
                self._writing.note(chore.task.fault)
        elif isinstance(chore, Removal) and right:
            self._space.segments.pop(chore.segments[0].file.number, None)
            self._stirred = True
        elif isinstance(chore, Rewriting):
            self._rewrite_at = 0 if right or self._journal is None else self._journal.count + _STALE
        if chore.outcome is IOStatus.FAILED:
            self.io_failures += 1
            for segment in chore.segments:
                segment.troubles += 1
        chore.taken = True

    def _take_move(self, move: Move) -> None:
        target, unwanted = move.segments[0], []
        for source, item, slot in move.moved:
            old, new = source.place(item.slot), target.place(slot)
            if self._space.index.get(item.key) in (old, new):
                self._space.hold(item.key, target, slot, item.seal)
                source.keys[item.slot] = None
            else:
                unwanted.append(replace(item, segment=target.file.number, slot=slot))
        for source, item in move.damaged:
            self.quarantine(source, item)
        for source in move.unread:
            source.troubles += 1
        self.forgotten(unwanted)
        self.io_failures += len(move.unread)
        self.compactions += 1
        self.suspects.update(move.segments)
        self._stirred = True

    def _idle(self, segments: Iterable[SegmentState], under_way: Sequence[Operation]) -> list[SegmentState]:
        """Return those that are full, and that no operation reads or writes."""
        busy = {segment for operation in (*under_way, *self.chores) for segment in operation.segments}
        return [segment for segment in segments if segment.full and segment not in busy]

    def _make_room(self, journal: Journal, under_way: Sequence[Operation]) -> None:
        """Remove a segment that has nothing but what is quarantined, or else move records out of segments."""
        segments = self._space.segments
        idle = self._idle(segments.values(), under_way)
        for segment in idle:
            if segment.live == 0 and segment.troubles == 0:
                self._remove(segment)
                return
        found = self._space.compaction(idle)
        # There may be more when all are idle.
        self._stirred = found is not None or len(idle) < len(segments)
        if found is not None:
            target, sources, records = found
            wanted = [(source, item, slot) for slot, (source, item) in enumerate(records)]
            move = Move((target, *sources), wanted)
            self._put(move, partial(move_records, move, journal, self._seal))
            self._space.use(target, len(records))

    def _remove(self, segment: SegmentState) -> None:
        self._put(Removal((segment,)), partial(segment.file.path.unlink, missing_ok=True))

    def _note(self, kind: Kind, items: Sequence[Item]) -> None:
        if self._journal is not None and not self._closed:
            self._put(Operation(()), partial(self._journal.append, kind, items))

    def _put(self, chore: Operation, work: Callable[[], object]) -> None:
        noted = partial(self.chores.append, chore)
        self._intake.put(self._keeper, chore, partial(attempt, chore, work), noted)
