"""Keeps the block tables of a runner's rows. All of its models read the same ones: a block has one number in
every model's pool."""

import numpy as np
import torch
from torch import Tensor

from penstock.memory.sending import send
from penstock.step.plan import Plan


class BlockTables:
    """Keeps the pages and the host blocks of each row. They are valid up to what the last plan said.

    pages, cold: int32 `[rows, blocks_per_row]`, of the device and of the host.
    cold_changes: how many plans have changed `cold`.
    on_device: int32 `[rows + 1, blocks_per_row]`, the pages as recorded steps read them, with one row for
        padding; None where no steps are recorded.
    """

    def __init__(self, rows: int, blocks_per_row: int, device: torch.device) -> None:
        # Host pages that no row has reached yet are never touched, so a table for the longest context costs
        # what is used.
        self.pages = np.zeros((rows, blocks_per_row), dtype=np.int32)
        self.cold = np.zeros((rows, blocks_per_row), dtype=np.int32)
        self.cold_changes = 0
        self.on_device: Tensor | None = None
        self._device = device

    def keep_on_device(self) -> Tensor:
        """Keep pages on the device as well from now on, and return them: `on_device`. There `note_on_device`
        notes what a plan gives, not `note`."""
        if self.on_device is None:
            rows, blocks = self.pages.shape
            self.on_device = torch.zeros(rows + 1, blocks, dtype=torch.int32, device=self._device)
        return self.on_device

    def note(self, plan: Plan) -> None:
        """Note the blocks that a plan gives its rows."""
        for share in plan.shares:
            if share.new_blocks:
                first = share.first_new_block
                self.pages[share.row, first : first + len(share.new_blocks)] = share.new_blocks
            if share.new_cold:
                first = share.first_new_cold
                self.cold[share.row, first : first + len(share.new_cold)] = share.new_cold
                self.cold_changes += 1

    def note_on_device(self, plan: Plan) -> None:
        """Note the pages that a plan gives its rows in the tables of the device, if there are any, behind
        what has been given to the device."""
        table, counts = self.on_device, [len(share.new_blocks) for share in plan.shares]
        if table is None or not any(counts):
            return
        rows = np.repeat([share.row for share in plan.shares], counts)
        columns = np.concatenate(
            [
                np.arange(share.first_new_block, share.first_new_block + len(share.new_blocks))
                for share in plan.shares
            ]
        )
        pages = np.array([page for share in plan.shares for page in share.new_blocks], dtype=np.int32)
        table[send(rows, self._device), send(columns, self._device)] = send(pages, self._device)
