"""What the tests of kernels count on: that one of them cannot reach an element beside its tensors and end
well."""

import os

import pytest
import torch
from torch import Tensor

if (
    os.environ.get("TRITON_INTERPRET") != "1"
):  # asked once, when triton is imported; conftest.py sets it where there is no GPU
    pytest.skip("kernels are interpreted where there is no GPU", allow_module_level=True)

import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

import bounds

SIZE = 8


@triton.jit  # type: ignore[untyped-decorator]
def _read(x, out, first, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    ids = tl.arange(0, SIZE)
    tl.store(out + ids, tl.load(x + first + ids))


@triton.jit  # type: ignore[untyped-decorator]
def _one(x, at, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """A single element, in each of the ways."""
    if KIND == "read":
        tl.load(x + at)
    elif KIND == "write":
        tl.store(x + at, 7)
    elif KIND == "add":
        tl.atomic_add(x + at, 7)
    elif KIND == "swap":
        tl.atomic_cas(x + at, 0, 7)


@triton.jit  # type: ignore[untyped-decorator]
def _masked(x, out, first, low, high, stop, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """All that can be done, by those that are from `low` to `high`; of these none if there is a stop."""
    ids = first + tl.arange(0, SIZE)
    mask = (ids >= low) & (ids < high) & (stop == 0)
    value = tl.load(x + ids, mask=mask, other=-1)
    tl.store(out + tl.arange(0, SIZE), value)
    tl.store(x + ids, value + 1, mask=mask)
    tl.atomic_add(x + ids, 1, mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _by_address(table, out, at, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    there = tl.load(table).to(tl.pointer_type(tl.int32))
    tl.store(out + tl.arange(0, SIZE), tl.load(there + at + tl.arange(0, SIZE)))


@triton.jit  # type: ignore[untyped-decorator]
def _wider(x, at):  # type: ignore[no-untyped-def]
    """An element of int32 and the next one, as one of int64."""
    tl.load((x + at).to(tl.pointer_type(tl.int64)))


def inner() -> tuple[Tensor, Tensor]:
    """A tensor, and the middle of it, around which there is room: nothing that is tried here does harm if
    nobody prevents it."""
    whole = torch.arange(100, 100 + 3 * SIZE, dtype=torch.int32)
    return whole, whole[SIZE : 2 * SIZE]


@pytest.mark.parametrize(
    ("kind", "verb"), [("read", "read"), ("write", "written"), ("add", "changed"), ("swap", "changed")]
)
@pytest.mark.parametrize("at", [-1, SIZE])
def test_one_element_outside(kind: str, verb: str, at: int) -> None:
    """It is not touched; those beside it, inside, may be."""
    whole, part = inner()
    before = whole.clone()
    with pytest.raises(InterpreterError, match=rf"OutsideError.*1 of 1 elements are {verb} outside"):
        _one[(1,)](part, at, kind)
    assert torch.equal(whole, before)
    for inside in (0, SIZE - 1):
        _one[(1,)](part, inside, kind)
        _one[(1,)](x=part, at=inside, KIND=kind)
    assert torch.equal(whole[:SIZE], before[:SIZE])
    assert torch.equal(whole[2 * SIZE :], before[2 * SIZE :])


def test_masked_elements_are_not_there() -> None:
    """Wherever they are: some, or all of them."""
    whole, part = inner()
    out = torch.zeros(SIZE, dtype=torch.int32)
    for first in (-3, 0, 5):
        before, wanted = (
            whole.clone(),
            [100 + SIZE + at if 0 <= at < SIZE else -1 for at in range(first, first + SIZE)],
        )
        part.copy_(torch.arange(100 + SIZE, 100 + 2 * SIZE))
        _masked[(1,)](part, out, first, 0, SIZE, 0, SIZE)
        assert out.tolist() == wanted
        assert torch.equal(whole[:SIZE], before[:SIZE])
        assert torch.equal(whole[2 * SIZE :], before[2 * SIZE :])
    before = whole.clone()
    _masked[(1,)](part, out, 1 << 33, 0, SIZE, 0, SIZE)
    _masked[(1,)](part, out, -1, -9, 99, 1, SIZE)
    assert out.tolist() == [-1] * SIZE
    assert torch.equal(whole, before)
    for low, high in ((-1, SIZE), (0, SIZE + 1)):
        with pytest.raises(InterpreterError, match=r"OutsideError.*read"):
            _masked[(1,)](part, out, low, low, high, 0, 2 * SIZE)


def test_a_view_is_what_it_spans() -> None:
    """Not its storage; but what lies between its rows."""
    whole = torch.arange(12 * SIZE, dtype=torch.int32)
    out = torch.zeros(SIZE, dtype=torch.int32)
    rows = whole.view(12, SIZE)[2:5, 1:4]
    start = 2 * SIZE + 1
    assert bounds.span(rows) == (rows.data_ptr(), rows.data_ptr() + 4 * (2 * SIZE + 3))
    for first in (0, 1, SIZE + 3):
        _read[(1,)](rows, out, first, SIZE)
        assert out.tolist() == list(range(start + first, start + first + SIZE))
    for first in (-1, SIZE + 4):
        with pytest.raises(InterpreterError, match=r"OutsideError.*1 of 8 elements"):
            _read[(1,)](rows, out, first, SIZE)
    for none in (whole[3:3], whole.view(12, SIZE)[:, :0]):
        first, end = bounds.span(none)
        assert first == end


def test_half_an_element_outside() -> None:
    _, part = inner()
    _wider[(1,)](part, SIZE - 2)
    for at in (-1, SIZE - 1):
        with pytest.raises(InterpreterError, match="OutsideError"):
            _wider[(1,)](part, at)


def test_what_is_lent_may_be_reached_by_its_address() -> None:
    """As long as it is lent, and nothing around it."""
    whole, part = inner()
    table, out = torch.tensor([part.data_ptr()]), torch.zeros(SIZE, dtype=torch.int32)

    def read(at: int = 0) -> None:
        _by_address[(1,)](table, out, at, SIZE)

    with pytest.raises(InterpreterError, match="OutsideError"):
        read()
    with bounds.lent([bounds.span(whole[:SIZE]), bounds.span(part)]):
        with bounds.lent([bounds.span(whole[-1:])]):
            read()
        assert torch.equal(out, part)
        read(-SIZE)
        assert torch.equal(out, whole[:SIZE])
        read(-1)  # Some of each.
        with pytest.raises(InterpreterError, match=r"OutsideError.*1 of 8 elements"):
            read(1)
    with pytest.raises(InterpreterError, match="OutsideError"):
        read()
    _read[(1,)](part, out, 0, SIZE)
    with pytest.raises(InterpreterError, match="OutsideError"):  # A kernel's tensors are not the next one's.
        read()
