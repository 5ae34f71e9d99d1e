"""A kernel that stores the noise of tokens, as kernels that draw make it."""

import triton
import triton.language as tl

from penstock.ops.triton.gumbel import noise_of, read_key, run_words, token_words


@triton.jit  # type: ignore[untyped-decorator]
def noise(asked, found, picked, made, others, VOCAB, SIZE: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
    """Grid [VOCAB / SIZE, draws]: words and noise of runs of tokens, and of the same as any tokens."""
    first, draw = tl.program_id(0) * SIZE, tl.program_id(1)
    ids, key = first + tl.arange(0, SIZE), read_key(asked, draw, 8)
    run, each, to = run_words(first, key, SIZE), token_words(ids, key), draw * VOCAB + ids
    tl.store(found + to, run.to(tl.int64))
    tl.store(picked + to, each.to(tl.int64))
    tl.store(made + to, noise_of(run))
    tl.store(others + to, noise_of(each))
