"""Plans come to other processes as they were, to the last field; what is not exactly a message is refused."""

import contextlib
import dataclasses
import struct
import subprocess
import sys
import tracemalloc
import types
from dataclasses import dataclass, fields, is_dataclass, make_dataclass
from enum import Enum
from typing import Any, get_args, get_origin, get_type_hints
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.base.errors import DeviceError
from penstock.parallel.codec import Codec
from penstock.step.params import Sampling
from penstock.step.plan import (
    Admission,
    BlockId,
    HostBlockId,
    Order,
    Outcome,
    Plan,
    Route,
    Row,
    Share,
    ShareKind,
    Transfer,
    TransferId,
)
from penstock.step.structure import Structure, StructureKind

PLANS, OUTCOMES = Codec(Plan), Codec(Outcome)
WHOLE = st.one_of(st.integers(0, 40), st.integers(-(2**64), 2**64), st.integers(-(2**130), 2**130))
KINDS = (Plan, Share, Admission, Sampling, Structure, Transfer, Order)
FORM = Structure(StructureKind.CHOICE, '["ä", "b"]')
SAMPLING = Sampling(
    0.7,
    40,
    0.9,
    0.0,
    1.1,
    0.0,
    -0.5,
    ((5, -2.5), (9, float("-inf"))),
    2**80,
    frozenset((3, 700)),
    2,
    None,
    -1,
    FORM,
)


def values(kind: Any) -> st.SearchStrategy[Any]:
    """All that a type can hold: what stands in a field's annotation is in the test as soon as it is in the
    class."""
    while hasattr(kind, "__supertype__"):
        kind = kind.__supertype__
    origin, of = get_origin(kind), get_args(kind)
    if kind is int:
        return WHOLE
    if kind is float:
        return st.floats(allow_nan=False)
    if kind is bool:
        return st.booleans()
    if kind is bytes:
        return st.binary(max_size=40)
    if kind is str:
        return st.text(max_size=40)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return st.sampled_from(kind)
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return st.builds(kind, **{field.name: values(hints[field.name]) for field in fields(kind)})
    if origin is frozenset:
        return st.frozensets(values(of[0]), max_size=5)
    if origin is tuple and of[1:] == (Ellipsis,):
        return st.lists(values(of[0]), max_size=4).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values, of))
    assert origin is types.UnionType
    return st.none() | values(of[0])


@settings(max_examples=60)
@given(values(Plan))
def test_a_plan_comes_as_it_was(plan: Plan) -> None:
    assert PLANS.decode(PLANS.encode(plan)) == plan


@settings(max_examples=40)
@given(values(Outcome))
def test_an_outcome_comes_as_it_was(outcome: Outcome) -> None:
    assert OUTCOMES.decode(OUTCOMES.encode(outcome)) == outcome


def whole_plan(many: int = 50) -> Plan:
    """One with something in every field. many: tokens of a chunk."""
    shares = (
        Share(Row(3), 70, (11,), 2, (BlockId(9),), True, 64),
        Share(
            Row(1),
            0,
            tuple(range(many)),
            0,
            (BlockId(4), BlockId(9000)),
            False,
            90,
            ShareKind.CHUNK,
            tuple(range(1, many + 1)),
            0,
            32,
            32,
            0,
            (HostBlockId(8),),
        ),
    )
    transfers = (
        Transfer(TransferId(5), Route.UP, (BlockId(1),), (HostBlockId(2),)),
        Transfer(TransferId(6), Route.OUT, (), (HostBlockId(2),), (b"k" * 32,)),
    )
    admissions = (Admission(Row(3), SAMPLING, tuple(range(many + 14)), (7, 8)),)
    return Plan(admissions, shares, (Order(BlockId(3), HostBlockId(6)),), transfers, (b"a" * 32, b""))


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Ways to all fields of all dataclasses within."""
    found = []
    if is_dataclass(value):
        for field in fields(value):
            found += [(*path, field.name), *leaves(getattr(value, field.name), (*path, field.name))]
    elif isinstance(value, tuple):
        for place, one in enumerate(value):
            found += leaves(one, (*path, place))
    return found


def other(value: Any) -> Any:
    """Of the same type, and not the same."""
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case None:
            return 1
        case str():
            return value + "x"
        case Enum():
            return next(one for one in type(value) if one is not value)
        case frozenset():
            return value | {99}
        case tuple():
            return value[:-1] if value else (1,)
        case _:
            return dataclasses.replace(
                value, **{fields(value)[0].name: other(getattr(value, fields(value)[0].name))}
            )


def changed(value: Any, path: tuple[Any, ...]) -> Any:
    """With another value at the end of the way."""
    if not path:
        return other(value)
    head, *rest = path
    if isinstance(head, int):
        return (*value[:head], changed(value[head], tuple(rest)), *value[head + 1 :])
    return dataclasses.replace(value, **{head: changed(getattr(value, head), tuple(rest))})


def test_each_field_of_each_part_travels() -> None:
    """Any of them, when it is another, makes another message, and is another after the journey."""
    plan = whole_plan()
    paths = leaves(plan)
    assert {path[-1] for path in paths} == {field.name for kind in KINDS for field in fields(kind)}
    for path in paths:
        if path == ("transfers", 0, "keys"):
            continue  # Nothing tells that it holds bytes. Those of the other transfer do.
        different = changed(plan, path)
        assert different != plan
        assert PLANS.decode(PLANS.encode(different)) == different, path


def test_a_field_that_is_added_is_sent() -> None:
    """And one of a kind that cannot be is refused before there is any message."""
    more = make_dataclass("Share", [("priority", int | None)], bases=(), frozen=True, slots=True)
    plan = make_dataclass(
        "Plan", [("shares", tuple[more, ...]), ("urgent", bool, False)], frozen=True, slots=True
    )  # type: ignore[valid-type]
    codec: Codec[Any] = Codec(plan)
    value = plan((more(3), more(None)), True)
    assert codec.decode(codec.encode(value)) == value
    for kind in (list[int], dict[int, int], object, Any, int | str):
        with pytest.raises(TypeError, match=r"Plan\.extra .* no message can carry"):
            Codec(make_dataclass("Plan", [("extra", kind)], frozen=True, slots=True))


def test_processes_of_another_version_are_refused() -> None:
    """One whose fields have other names, order or types."""

    @dataclass(frozen=True, slots=True)
    class Of:
        one: int
        two: int

    made = Codec(Of).encode(Of(1, 2))
    for members in (
        [("two", int), ("one", int)],
        [("one", int), ("two", int | None)],
        [("one", int)],
        [("one", int), ("zwei", int)],
    ):
        codec: Codec[Any] = Codec(make_dataclass("Of", members, frozen=True, slots=True))
        with pytest.raises(DeviceError, match="another kind or version"):
            codec.decode(made)


def test_what_is_cut_or_longer_or_changed_anywhere_is_refused() -> None:
    message = PLANS.encode(whole_plan())
    for size in range(len(message)):
        with pytest.raises(DeviceError, match="a message between ranks"):
            PLANS.decode(message[:size])
    with pytest.raises(DeviceError, match="a message between ranks"):
        PLANS.decode(message + b"\0")
    for place in range(len(message)):
        with pytest.raises(DeviceError, match="a message between ranks"):
            PLANS.decode(message[:place] + bytes((message[place] ^ 0x10,)) + message[place + 1 :])


def forged(message: bytes, place: int, byte: int) -> bytes:
    """With a head that is right for what was changed, or added behind."""
    body = bytearray(message[20:])
    body[place : place + 1] = bytes((byte,))
    name, digest, _, _ = struct.unpack_from("<4sIQI", message)
    return struct.pack("<4sIQI", name, digest, len(body), crc32(body)) + bytes(body)


def test_a_forged_message_is_refused_or_a_plan_and_takes_no_memory() -> None:
    """One whose checksum is right: nothing else is raised, and no length is believed."""
    message = PLANS.encode(whole_plan(many=6))
    with pytest.raises(DeviceError, match="has 1 bytes too many"):
        PLANS.decode(forged(message, len(message) - 20, 0))
    tracemalloc.start()
    try:
        for place in range(len(message) - 20):
            for byte in (0x00, 0x01, 0x04, 0x08, 0x7F, 0x80, 0xFF):
                with contextlib.suppress(DeviceError):
                    assert isinstance(PLANS.decode(forged(message, place, byte)), Plan)
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()


def test_a_step_of_many_rows_is_small() -> None:
    """In memory that is about what its numbers take."""
    shares = tuple(Share(Row(row), 2000 + row, (50000 + row,), 60, (), True, 1000) for row in range(256))
    assert len(PLANS.encode(Plan((), shares))) < 256 * 25
    prompt = Plan((Admission(Row(0), SAMPLING, tuple(range(100_000)), ()),), ())
    assert len(PLANS.encode(prompt)) < 100_000 * 4 + 500


def test_it_needs_no_torch() -> None:
    code = "import sys, penstock.parallel.codec, penstock.parallel.channel; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
