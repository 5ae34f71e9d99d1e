"""Prepares the rows of a recorded decode step, and finds their likeliest tokens."""

from dataclasses import dataclass
from math import isnan

import torch
from torch import Tensor

from penstock.ops.kernels import triton_kernels
from penstock.ops.rope import RotaryAngles

FIELDS = 7
"""Numbers that describe a row of `given`.

They are its row number, position and token, then a row and a column of a block table, and the block that is
new there, and the first column of its own table: blocks before that are not in pages.
"""
LEAST = torch.iinfo(torch.int64).min
"""Initial value of each entry of `best` in `likeliest`."""
NO_TOKEN = -1
"""Token of a row with a NaN logit."""


@dataclass(frozen=True, slots=True)
class Placed:
    """Placed holds the inputs of each row of a decode step.

    table: the row's blocks, int32 `[rows, blocks]`, as far as it has any, from its first column on.
    tokens: int64 `[rows]`.
    blocks, offsets: block of the new KV and the place in it, int64 `[rows]`.
    slots: the slot mapping, block * block_size + offset, int64 `[rows]`; -1 for padding.
    lengths: tokens of the sequence in these blocks, the new one included, int32 `[rows]`.
    cos, sin: float32 `[rows, dim / 2]`.
    """

    table: Tensor
    tokens: Tensor
    blocks: Tensor
    offsets: Tensor
    slots: Tensor
    lengths: Tensor
    cos: Tensor
    sin: Tensor


def place(given: Tensor, table: Tensor, newest: Tensor, angles: RotaryAngles, block_size: int) -> Placed:
    """Compute the inputs of the rows that int32 `given`, `[FIELDS, rows]`, describes.

    A position of -1 is padding. A token of -1 is the row's newest.

    table: block tables, int32 `[all rows, blocks]`, into which the new blocks are written.
    newest: newest token of each row, int64 `[all rows]`.
    """
    if given.is_cuda and (kernels := triton_kernels("steps")):
        return Placed(*kernels.place(given, table, newest, angles.frequencies, angles.scale, block_size))
    row, position, token, whose, column, page, first = given.long()
    table.index_put_((whose, column), page.int())
    at, blocks_of = position.clamp(min=0), table[row]
    blocks, offsets = blocks_of.gather(1, (at // block_size)[:, None])[:, 0].long(), at % block_size
    slots = torch.where(position < 0, -1, blocks * block_size + offsets)
    tokens = torch.where(token < 0, newest[row], token)
    columns = first[:, None] + torch.arange(table.shape[1], device=table.device)
    pages = blocks_of.gather(1, columns.clamp(max=table.shape[1] - 1))
    lengths = (position + 1 - first * block_size).int()
    return Placed(pages, tokens, blocks, offsets, slots, lengths, *angles.tables(at))


def likeliest(logits: Tensor, rows: Tensor, newest: Tensor, tokens: Tensor, best: Tensor) -> None:
    """Write the argmax of each row of logits `[rows, vocab]` to `tokens`, of equal ones the first.

    A row with a NaN logit gets NO_TOKEN, and 0 in `newest`.

    rows: int32 `[rows]`, the row's index in `newest`.
    newest: int64 `[all rows]`, which gets the tokens as well.
    tokens: int64 `[rows]`.
    best: int64 `[rows or more]`, scratch: all LEAST before and afterwards.
    """
    if logits.is_cuda and (kernels := triton_kernels("steps")):
        kernels.likeliest(logits, rows, newest, tokens, best)
        return
    torch.argmax(logits, -1, out=tokens)
    without_numbers(logits, tokens)
    newest[rows.long()] = tokens.clamp(min=0)


def likeliest_on_host(logits: Tensor) -> Tensor:
    """Return what `likeliest` writes to `tokens`, int64 `[rows]`, for float32 logits of a CPU.

    NumPy's argmax takes a tenth of the time of torch's: 8 us for 49,152 tokens on one core.
    """
    numbers = logits.numpy()
    tokens = numbers.argmax(-1)
    for row, token in enumerate(tokens.tolist()):
        if isnan(numbers[row, token]):
            tokens[row] = NO_TOKEN
    return torch.from_numpy(tokens)


def without_numbers(logits: Tensor, likeliest: Tensor) -> Tensor:
    """Return which rows of logits `[rows, vocab]` have a NaN, bool `[rows]`. Their tokens become NO_TOKEN.

    likeliest: int64 `[rows]`, the argmax of each row. NaN counts as the largest there.
    """
    wrong = logits.gather(-1, likeliest[:, None])[:, 0].isnan()
    likeliest.masked_fill_(wrong, NO_TOKEN)
    return wrong
