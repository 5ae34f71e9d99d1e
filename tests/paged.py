"""What decode over pages is asked, on any device: a pool full of NaN, sequences in shuffled blocks, and the
answer in float64."""

import math

import torch
from torch import Tensor

from penstock.ops.attention.inputs import LayerAttention, PlacedRun, QueryRun, Rows
from penstock.ops.triton.attention import paged_decode, paged_run, placed_run
from penstock.ops.triton.tuning import DecodeTuning

# Against the largest value of the answer: that of one rounding, and of the probabilities rounded before they
# meet V.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


def pool_views(
    blocks: int,
    block_size: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    device: str = "cpu",
    layer: int = 1,
) -> tuple[Tensor, Tensor]:
    """One layer of a pool `[blocks, layers, 2, block_size, kv_heads, dim]` in which every number is NaN."""
    pool = torch.full((blocks, 3, 2, block_size, kv_heads, dim), math.nan, dtype=dtype, device=device)
    return pool[:, layer, 0], pool[:, layer, 1]


def fill(
    k_cache: Tensor, v_cache: Tensor, lengths: list[int], rng: torch.Generator, spare: int = 2
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Random tokens in shuffled blocks; table entries past a sequence's end are garbage. Returns the table
    and K, V per sequence."""
    blocks, block_size, kv_heads, dim = k_cache.shape
    free = torch.randperm(blocks, generator=rng).to(k_cache.device)
    width = max(-(-n // block_size) for n in lengths) + spare
    table = torch.full((len(lengths), width + 3), 2**31 - 1, dtype=torch.int32, device=k_cache.device)[
        :, :width
    ]  # rows are farther apart
    keys, values, used = [], [], 0
    for seq, length in enumerate(lengths):
        k, v = (torch.randn(length, kv_heads, dim, generator=rng).to(k_cache) for _ in range(2))
        count = -(-length // block_size)
        mine = free[used : used + count]
        used += count
        table[seq, :count] = mine
        at = torch.arange(length, device=k_cache.device)
        k_cache[mine[at // block_size], at % block_size] = k
        v_cache[mine[at // block_size], at % block_size] = v
        keys.append(k)
        values.append(v)
    return table, keys, values


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> tuple[Tensor, Tensor]:
    """One query `[heads, dim]` over all of K and V `[tokens, kv_heads, dim]`, in float64."""
    if window is not None:
        k, v = k[-window:], v[-window:]
    heads, kv_heads = q.shape[0], k.shape[1]
    if len(k) == 0:
        return torch.zeros_like(q, dtype=torch.float64), torch.full(
            (heads,), -math.inf, dtype=torch.float64, device=q.device
        )
    k, v = (x.double().repeat_interleave(heads // kv_heads, 1) for x in (k, v))
    score = torch.einsum("hd,thd->ht", q.double(), k) * scale
    return torch.einsum("ht,thd->hd", score.softmax(1), v), score.logsumexp(1)


def decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lengths: Tensor, *, scale: float,
    window: int | None, max_length: int, out: Tensor | None = None, arrivals: Tensor | None = None,
    tuning: DecodeTuning | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output and log-sum-exp of `paged_decode`."""
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    rows = Rows(len(q), table, lengths, max_length, arrivals=arrivals)
    layer = LayerAttention(scale, window)
    return paged_decode(q, (k_cache, v_cache), rows, layer, out=out, lse=lse, tuning=tuning), lse


def check_answer(got: Tensor, lse: Tensor, want: Tensor, want_lse: Tensor) -> None:
    """Output and log-sum-exp of one query against the float64 answer."""
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.double(), want, rtol=0, atol=tolerance * float(want.abs().max()))
    loose = 1e-5 if got.dtype == torch.float32 else 1e-4
    torch.testing.assert_close(lse.double(), want_lse, rtol=loose, atol=loose)


def check_decode(
    lengths: list[int],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 16,
    block_size: int = 16,
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    tuning: DecodeTuning | None = None,
    seed: int = 0,
    max_length: int | None = None,
) -> None:
    """Decode one step of sequences of these lengths and compare every row."""
    rng = torch.Generator().manual_seed(seed)
    blocks = sum(-(-n // block_size) for n in lengths) + 2
    k_cache, v_cache = pool_views(blocks, block_size, kv_heads, dim, dtype, device)
    table, keys, values = fill(k_cache, v_cache, lengths, rng)
    qkv = torch.randn(len(lengths), heads + 2 * kv_heads, dim, generator=rng).to(k_cache)
    q = qkv[:, :heads]  # a view of a fused projection
    out = torch.full((len(lengths), heads, dim), math.nan, dtype=dtype, device=device)
    scale = 1.3 / math.sqrt(dim)
    got, lse = decode(
        q, k_cache, v_cache, table, torch.tensor(lengths, dtype=torch.int32, device=device),
        scale=scale, window=window, max_length=max_length or max(*lengths, 1), out=out, tuning=tuning,
    )  # fmt: skip
    assert got is out
    assert lse.dtype == torch.float32
    for seq in range(len(lengths)):
        check_answer(got[seq], lse[seq], *attend(q[seq], keys[seq], values[seq], scale, window))


def check_run(
    tokens: int, start: int, *, heads: int = 4, kv_heads: int = 2, dim: int = 16, block_size: int = 16,
    window: int | None = None,
    dtype: torch.dtype = torch.float32, device: str = "cpu", tuning: DecodeTuning | None = None,
    seed: int = 0,
) -> None:  # fmt: skip
    """The last `tokens` of a sequence, and every one of them against the keys up to itself."""
    rng = torch.Generator().manual_seed(seed)
    k_cache, v_cache = pool_views(
        -(-(start + tokens) // block_size) + 2, block_size, kv_heads, dim, dtype, device
    )
    table, [k], [v] = fill(k_cache, v_cache, [start + tokens], rng)
    q = torch.randn(tokens, heads + 2 * kv_heads, dim, generator=rng).to(k_cache)[:, :heads]
    out = torch.full((tokens + 1, heads, dim), math.nan, dtype=dtype, device=device)
    scale = 1.3 / math.sqrt(dim)
    blocks = table[0, : -(-(start + tokens) // block_size)].to(torch.int64)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    run, layer = QueryRun(0, tokens, start, blocks), LayerAttention(scale, window)
    got = paged_run(q, (k_cache, v_cache), run, layer, out=out[:-1], lse=lse, tuning=tuning)
    for token in range(tokens):
        seen = start + token + 1
        check_answer(got[token], lse[token], *attend(q[token], k[:seen], v[:seen], scale, window))
    assert out[-1].isnan().all(), "what is behind the last token was written"


def check_placed_run(
    tokens: int, start: int, padding: int, *, heads: int = 4, kv_heads: int = 2, dim: int = 16,
    block_size: int = 16,
    window: int | None = None, dtype: torch.dtype = torch.float32, device: str = "cpu",
    max_length: int | None = None,
) -> None:  # fmt: skip
    """As `check_run`, of a run that begins where it is told on the device, with padding behind it that
    answers nothing but zeros."""
    rng = torch.Generator().manual_seed(tokens)
    k_cache, v_cache = pool_views(
        -(-(start + tokens) // block_size) + 2, block_size, kv_heads, dim, dtype, device
    )
    table, [k], [v] = fill(k_cache, v_cache, [start + tokens], rng)
    q = torch.randn(tokens + padding, heads + 2 * kv_heads, dim, generator=rng).to(k_cache)[:, :heads]
    scale, where = 1.3 / math.sqrt(dim), torch.tensor([start, tokens], dtype=torch.int32, device=device)
    bound = start + tokens if max_length is None else max_length
    out, lse = torch.zeros_like(q), torch.full(q.shape[:2], -math.inf, device=q.device)
    run, layer = PlacedRun(table[0], where, bound), LayerAttention(scale, window)
    got = placed_run(q, (k_cache, v_cache), run, layer, out=out, lse=lse)
    for token in range(tokens):
        seen = start + token + 1
        check_answer(got[token], lse[token], *attend(q[token], k[:seen], v[:seen], scale, window))
    assert not got[tokens:].any()
    assert (lse[tokens:] == -math.inf).all()
