"""Around a decode step whose inputs lie at fixed addresses: what each of its rows is and where it stands, and
their likeliest tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.ops.kernels import step_kernels
from penstock.ops.rope import RotaryAngles

FIELDS = 6
"""Of each row: its number, its position and its token; and where in whose table its newest page stands, and
which it is."""
LEAST = torch.iinfo(torch.int64).min
"""What `likeliest` starts from."""
NO_TOKEN = -1
"""In the place of a token, where there is none to take: a logit is not a number."""


@dataclass(frozen=True, slots=True)
class Placed:
    """Of each row of a step: its pages int32 `[rows, pages]`, as far as it has any; its token, the page and
    the place in it of its new KV, both as one number, -1 for nobody, all int64 `[rows]`; its length, itself
    included, int32 `[rows]`; cos and sin float32 `[rows, dim / 2]`."""

    table: Tensor
    tokens: Tensor
    blocks: Tensor
    offsets: Tensor
    slots: Tensor
    lengths: Tensor
    cos: Tensor
    sin: Tensor


def place(given: Tensor, table: Tensor, newest: Tensor, angles: RotaryAngles, block_size: int) -> Placed:
    """What a step needs to know of its rows, of int32 `[FIELDS, rows]`: a position of -1 is nobody's, a token
    of -1 the row's newest.

    table: int32 `[all rows, pages]`, which takes the new pages; newest int64 `[all rows]`.
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
    """Puts the likeliest token of each row of logits `[rows, vocab]`, of equal ones the first, into `tokens`
    int64 `[rows]`, and into `newest` int64 `[all rows]` where `rows`, int32, says. best: int64 `[rows or
    more]`, LEAST in all, and so again afterwards.

    Of a row with a logit that is not a number the token is NO_TOKEN, and the newest one 0.
    """
    if logits.is_cuda and (kernels := step_kernels()):
        kernels.likeliest(logits, rows, newest, tokens, best)
        return
    torch.argmax(logits, -1, out=tokens)
    without_numbers(logits, tokens)
    newest[rows.long()] = tokens.clamp(min=0)


def without_numbers(logits: Tensor, likeliest: Tensor) -> Tensor:
    """Which rows of logits `[rows, vocab]` have one that is not a number, bool `[rows]`; their likeliest
    tokens become NO_TOKEN. For what is not a number counts as the largest."""
    wrong = logits.gather(-1, likeliest[:, None])[:, 0].isnan()
    likeliest.masked_fill_(wrong, NO_TOKEN)
    return wrong
