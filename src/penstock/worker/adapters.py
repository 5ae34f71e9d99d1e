"""Holds LoRA adapters on the device, and knows which of them each row is computed with.

Why this is safe. Slots are written on the stream that computes, so behind every step that was begun before,
and before every step that is begun later. A step that runs ahead may still compute a row whose request has
ended: it reads the slot's old adapter, and its results are dropped. No request that has not ended needs a
slot that is written; the engine sees to that.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from penstock.arch.layout import GroupId
from penstock.arch.lora import LoraRoom, lora_places
from penstock.arch.shards import Shard
from penstock.arch.spec import ModelSpec
from penstock.memory.sending import send
from penstock.models.inputs import LoraInputs
from penstock.ops.lora import GroupedRows, Ints, LoraMatrix, LoraRows, RunRows, StackedRows
from penstock.step.plan import Admission, Plan
from penstock.weights.checkpoint.lora import Adapter

_FEW_ROWS = 64
"""Rows up to which it takes longer to call many products than to compute those of all slots."""
_SLOTS_FOR_ONE = 4
"""Slots that may be computed at once for each adapter that is there. For 8 adapters of rank 16 and 16
rows a step of 40 ms on two cores, of 57M parameters, takes 109 ms by adapter and 62 so."""


class RowAdapters:
    """Holds the adapters of a rank in a bank that is allocated once, and the slot of each row."""

    def __init__(self, spec: ModelSpec, shard: Shard, room: LoraRoom, rows: int, like: Tensor) -> None:
        """Begin with empty slots. rows: that a step may have. like: has the device and the dtype."""
        self.spec, self.room, self._places, self._like = spec, room, lora_places(spec, shard), like
        self.bank: dict[GroupId, dict[str, LoraMatrix]] = {}
        heights: dict[tuple[GroupId, str], list[tuple[int, ...]]] = {}
        for place in self._places.values():
            heights.setdefault((place.group, place.matrix), []).append(place.source.taken)
        for (group, name), parts in heights.items():
            matrix = LoraMatrix(
                [height for height, _ in parts], parts[0][1], slots=room.slots, rank=room.rank, like=like
            )
            self.bank.setdefault(group, {})[name] = matrix
        self._of_row = np.zeros(rows + 1, dtype=np.int64)
        self.on_device = torch.zeros(rows + 1, dtype=torch.int64, device=like.device)
        """The slot of each row as recorded steps read it; the last row is for padding."""

    def read(self, path: Path) -> Adapter:
        """Read the adapter in a directory; see Adapter.read."""
        return Adapter.read(path, self.spec, str(self._like.dtype).removeprefix("torch."))

    def put(self, slot: int, adapter: Adapter) -> None:
        """Put an adapter, of the bank's dtype, into a slot."""
        for matrices in self.bank.values():
            for matrix in matrices.values():
                matrix.clear(slot)
        for name, (a, b) in adapter.modules.items():
            place = self._places[name]
            rows, columns = place.source.rows, place.source.columns
            self.bank[place.group][place.matrix].put(
                slot,
                place.part,
                a if columns is None else a[:, columns.start : columns.stop],
                b if rows is None else b[:, rows.start : rows.stop],
            )

    def admit(self, admissions: tuple[Admission, ...]) -> None:
        """Note the slots of rows that requests are given."""
        changed = [one for one in admissions if self._of_row[one.row] != one.adapter]
        if not changed:
            return
        rows, slots = (
            np.array(numbers, dtype=np.int64)
            for numbers in zip(*((one.row, one.adapter) for one in changed), strict=True)
        )
        self.on_device[send(rows, self._like.device)] = send(slots, self._like.device)
        self._of_row[rows] = slots  # Last: what has failed before is done again with the step.

    def needs(self, plan: Plan) -> bool:
        """Tell whether a row of the plan has an adapter."""
        return any(self._of_row[share.row] for share in plan.shares)

    def of(self, plan: Plan) -> LoraInputs | None:
        """Return the adapters of a plan's rows, or None if none has any."""
        if not self.needs(plan):
            return None
        shares = plan.shares
        slots = self._of_row[[share.row for share in shares]]
        drawn = np.repeat(slots, [share.draws for share in shares])
        reported = np.repeat(slots, [len(share.next_prompt_tokens) for share in shares])
        return LoraInputs(
            self.bank,
            self._rows(np.repeat(slots, [len(share.tokens) for share in shares])),
            self._rows(np.concatenate([drawn, reported])),
        )

    def of_rows(self, rows: Tensor) -> LoraInputs:
        """Return the adapters of rows that the device alone knows, `[rows]`."""
        every = StackedRows(self.on_device[rows.long()], self.room.slots)
        return LoraInputs(self.bank, every, every)

    def of_run(self, rows: Tensor) -> LoraInputs:
        """Return the adapter of a run of one request's tokens, whose rows the device alone knows, `[rows]`.
        Of these the first may be all that passes the end of the last layer."""
        every = RunRows(self.on_device[rows.long()])
        return LoraInputs(self.bank, every, every)

    def _rows(self, slots: Ints) -> LoraRows:
        """Return rows of these slots: few rows as recorded steps have them, unless most slots would be
        computed for nothing."""
        several = len(np.unique(slots[slots > 0]))
        if len(slots) <= _FEW_ROWS and _SLOTS_FOR_ONE * several >= self.room.slots and several > 1:
            return StackedRows(send(slots, self._like.device), self.room.slots)
        return GroupedRows(slots, lambda rows: send(rows, self._like.device))
