"""What stands around a recorded decode step: the preparation of its rows, and their likeliest tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.ops.kernels import step_kernels
from penstock.ops.rope import RotaryAngles

FIELDS = 6
"""Numbers that describe a row: its number, position and token; and the row and column of a block table that
has a new block, and that block."""
LEAST = torch.iinfo(torch.int64).min
"""The number that `best` of `likeliest` starts from."""
NO_TOKEN = -1
"""The token of a row with a logit that is not a number."""


@dataclass(frozen=True, slots=True)
class Placed:
    """Placed is what a step needs to know of each of its rows.

    table: the row's blocks, int32 `[rows, blocks]`, as far as it has any.
    tokens: int64 `[rows]`.
    blocks, offsets: block of the new KV and the place in it, int64 `[rows]`.
    slots: both as one number, int64 `[rows]`, -1 for padding.
    lengths: tokens of the sequence, the new one included, int32 `[rows]`.
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
    """Compute `Placed` of the rows that int32 `given`, `[FIELDS, rows]`, describes.

    A position of -1 is padding, a token of -1 the row's newest.

    table: block tables, int32 `[all rows, blocks]`, which take the new blocks.
    newest: newest token of each row, int64 `[all rows]`.
    """
    if given.is_cuda and (kernels := step_kernels()):
        return Placed(*kernels.place(given, table, newest, angles.frequencies, angles.scale, block_size))
    row, position, token, whose, column, page = given.long()
    table.index_put_((whose, column), page.int())
    at, pages = position.clamp(min=0), table[row]
    blocks, offsets = pages.gather(1, (at // block_size)[:, None])[:, 0].long(), at % block_size
    slots = torch.where(position < 0, -1, blocks * block_size + offsets)
    tokens = torch.where(token < 0, newest[row], token)
    return Placed(pages, tokens, blocks, offsets, slots, (position + 1).int(), *angles.tables(at))


def likeliest(logits: Tensor, rows: Tensor, newest: Tensor, tokens: Tensor, best: Tensor) -> None:
    """Put the likeliest token of each row of logits `[rows, vocab]`, of equal ones the first, in `tokens`.

    For a row with a logit that is not a number the token is NO_TOKEN, and the newest one 0.

    rows: int32 `[rows]`, where in `newest`, int64 `[all rows]`, the tokens go as well.
    tokens: int64 `[rows]`.
    best: int64 `[rows or more]`, all LEAST, and so again afterwards.
    """
    if logits.is_cuda and (kernels := step_kernels()):
        kernels.likeliest(logits, rows, newest, tokens, best)
        return
    torch.argmax(logits, -1, out=tokens)
    without_numbers(logits, tokens)
    newest[rows.long()] = tokens.clamp(min=0)


def without_numbers(logits: Tensor, likeliest: Tensor) -> Tensor:
    """Return which rows of logits `[rows, vocab]` have one that is not a number, bool `[rows]`.

    Their likeliest tokens become NO_TOKEN: what is not a number counts as the largest.
    """
    wrong = logits.gather(-1, likeliest[:, None])[:, 0].isnan()
    likeliest.masked_fill_(wrong, NO_TOKEN)
    return wrong
