"""How products with matrices of few bits are cut for a GPU, without one."""

from types import SimpleNamespace

import pytest

from penstock.ops.linear import _rows_at_a_time


@pytest.mark.parametrize("tokens", [64, 2048, 16384])
@pytest.mark.parametrize(
    ("height", "inner"), [(4096, 14336), (28672, 4096), (6144, 4096), (96, 4096), (1000, 1 << 22)]
)
def test_pieces_begin_where_libraries_are_fast(height: int, inner: int, tokens: int) -> None:
    """All but a whole matrix are a multiple of 128 rows, and no larger than the activations if that is
    possible."""
    x = SimpleNamespace(is_cuda=True, itemsize=2, nbytes=tokens * inner * 2)
    rows = _rows_at_a_time(x, SimpleNamespace(shape=(height, inner)))  # type: ignore[arg-type]
    assert rows == height or rows % 128 == 0
    room = max(32 << 20, min(128 << 20, x.nbytes))
    assert rows * inner * 2 <= room or rows == 128
    assert rows == height or (rows + 128) * inner * 2 > room
