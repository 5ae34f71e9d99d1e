"""Manifests of packs, sound, broken and hostile: read rightly or refused in one line, and never believed.
Without torch."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.arch.families import family_of, read_spec
from penstock.arch.layout import GroupLayout, group_layouts
from penstock.arch.spec import DTYPE_BYTES
from penstock.base.errors import CheckpointError
from penstock.weights.pack.manifest import (
    MAX_MANIFEST_BYTES,
    FieldPlace,
    Manifest,
    PackedRun,
    decoded,
    encoded,
    parse,
    place,
    seal,
)
from penstock.weights.pieces import DIGEST_BYTES, PAGE, PIECE_BYTES, join_digests, piece_digest

CONFIG = {
    "model_type": "mixtral",
    "vocab_size": 131,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "num_local_experts": 3,
}


def layouts(**keys: object) -> tuple[GroupLayout, ...]:
    config = CONFIG | keys
    return group_layouts(read_spec(config), family_of(config).names, "bfloat16")


def manifest() -> Manifest:
    return manifest_of(layouts())


def manifest_of(groups: tuple[GroupLayout, ...]) -> Manifest:
    rng = random.Random(4)
    runs = tuple(replace(run, digests=rng.randbytes(DIGEST_BYTES * len(run.pieces))) for run in place(groups))
    return Manifest("ab" * 16, "cd" * 32, "bfloat16", "weights.bin", {"config.json": "ef" * 32}, runs)


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(CheckpointError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 1000
    return message


def changed(change: Callable[[dict[str, Any]], object]) -> bytes:
    """A sealed manifest whose content is changed."""
    body = json.loads(manifest().text())
    del body["checksum"]
    change(body)
    return seal(body)


def test_what_is_written_is_read() -> None:
    assert parse(manifest().text(), "m") == manifest()
    manifest().check(layouts(), "m")
    assert json.loads(manifest().text())["groups"][0]["id"] == "embedding"


def test_runs_are_whole_pages_in_the_order_of_a_pass() -> None:
    runs = place(layouts())
    assert [run.id for run in runs] == [str(layout.id) for layout in layouts()]
    end = 0
    for run, layout in zip(runs, layouts(), strict=True):
        assert (run.offset, run.size) == (end, layout.size)
        assert run.offset % PAGE == 0
        assert run.size <= run.length < run.size + PAGE
        end = run.end
    assert manifest().size == end
    assert end % PAGE == 0


def test_each_piece_has_its_digest() -> None:
    groups = layouts(
        vocab_size=524_288, hidden_size=32, head_dim=8
    )  # an embedding of 32 MiB, and 32.5 with the head's norm
    found = parse(manifest_of(groups).text(), "m")
    assert [len(run.pieces) for run in (found.runs[0], found.runs[1], found.runs[-1])] == [4, 1, 5]
    for run, layout in zip(found.runs, groups, strict=True):
        assert sum(run.piece_length(start) for start in run.pieces) == run.length >= layout.size
        assert b"".join(run.digest(start) for start in run.pieces) == run.digests
        assert all(run.piece_length(start) == PIECE_BYTES for start in run.pieces[:-1])
    assert len({run.digest(start) for run in found.runs for start in run.pieces}) == sum(
        len(run.pieces) for run in found.runs
    )


@given(
    st.lists(st.binary(min_size=DIGEST_BYTES, max_size=DIGEST_BYTES), min_size=1, max_size=5),
    st.integers(0, 6),
)
def test_digests_are_read_in_their_number_only(digests: list[bytes], count: int) -> None:
    joined = b"".join(digests)
    assert decoded(encoded(joined), len(digests)) == joined
    assert count == len(digests) or decoded(encoded(joined), count) is None


def test_the_largest_models_fit() -> None:
    """10**12 parameters in 384 experts for each of 61 layers, in float32."""
    more = {
        "hidden_size": 7168,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_experts": 384,
        "num_experts_per_tok": 8,
    }
    config = (
        CONFIG
        | more
        | {"model_type": "qwen3_moe", "vocab_size": 163_840, "head_dim": 64, "decoder_sparse_step": 1}
    )
    groups = group_layouts(read_spec(config), family_of(config).names, "float32")
    found = manifest_of(groups)
    assert found.size > 4e12
    text = found.text()
    assert len(text) < MAX_MANIFEST_BYTES / 2
    assert parse(text, "m") == found


def test_checksums_depend_on_every_byte_and_on_the_order() -> None:
    one, two = piece_digest(b"a" * 100), piece_digest(b"b" * 100)
    assert len({join_digests(digests) for digests in ([one, two], [two, one], [one], [two], [])}) == 5
    assert piece_digest(b"a\0\0\0") != piece_digest(b"a")
    assert PIECE_BYTES % PAGE == 0


def test_every_flipped_bit_is_found() -> None:
    data = manifest().text()
    rng = random.Random(5)
    for place_of in rng.sample(range(len(data)), 400):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[place_of] ^= 1 << bit
            refusal(lambda damaged=damaged: parse(damaged, "m"))


def test_every_length_but_the_whole_is_found() -> None:
    data = manifest().text()
    for end in range(0, len(data) - 1, 7):
        refusal(lambda end=end: parse(data[:end], "m"))
    assert "damaged" in refusal(lambda: parse(data + b"\n", "m"))
    refusal(lambda: parse(data + data, "m"))


def group(number: int, **keys: object) -> Callable[[dict[str, Any]], object]:
    return lambda body: body["groups"][number].update(keys)


def fields(*values: object) -> Callable[[dict[str, Any]], object]:
    return group(0, fields=list(values))


FIELD = {"name": "embedding", "dtype": "bfloat16", "shape": [131, 24], "offset": 0}
BROKEN: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "another format": (lambda body: body.update(format="zip"), "is no pack's manifest"),
    "a later version": (lambda body: body.update(version=4), "reads 3; install the newer penstock that"),
    "of sampled fingerprints": (
        lambda body: body.update(version=1),
        "version 1; this penstock reads 3; remove the pack, and pack the",
    ),
    "of one dtype": (lambda body: body.update(version=2), "version 2; this penstock reads 3"),
    "version true": (lambda body: body.update(version=True), "has version True"),
    "an unknown key": (lambda body: body.update(more=1), "it has the keys"),
    "a missing key": (lambda body: body.pop("store"), "it has the keys"),
    "dtype": (lambda body: body.update(dtype="int3"), "has dtype 'int3'"),
    "dtype list": (lambda body: body.update(dtype=[]), "has dtype []"),
    "store outside": (lambda body: body.update(store="../x"), "names the store"),
    "store zero": (lambda body: body.update(store="/a\0"), "names the store"),
    "file outside": (lambda body: body.update(files={"../x": "ab" * 32}), "names the files"),
    "file above": (lambda body: body.update(files={"a/../../x": "ab" * 32}), "names the files"),
    "file checksum": (lambda body: body.update(files={"x": "AB" * 32}), "64 hexadecimal digits"),
    "fingerprint": (lambda body: body.update(fingerprint="ab"), "32 hexadecimal digits"),
    "no groups": (lambda body: body.update(groups=[]), "has the groups []"),
    "groups object": (lambda body: body.update(groups={}), "has the groups {}"),
    "group number": (lambda body: body.update(groups=[3]), "group 0 is 3"),
    "group key": (group(0, more=1), "it must be an object of"),
    "id": (group(1, id=""), "has id ''"),
    "id twice": (group(1, id="embedding"), "is there twice"),
    "offset negative": (group(1, offset=-4096), "has offset -4096"),
    "offset real": (group(1, offset=4096.0), "has offset 4096.0"),
    "offset true": (group(1, offset=True), "has offset True"),
    "offset huge": (group(1, offset=10**30), "has offset 1000"),
    "offset odd": (group(1, offset=8448), "no multiple of 4096"),
    "overlap": (group(1, offset=4096), "overlaps the group before it"),
    "hole": (group(1, offset=1 << 40), "unused"),
    "size zero": (group(1, size=0), "has size 0"),
    "size odd": (group(1, size=257), "has size 257"),
    "size huge": (group(0, size=2**63), "has size"),
    "size small": (group(0, size=256), "ends at byte"),
    "digests number": (group(0, digests=0), "has digests 0; it must be those of 1 pieces in base64"),
    "digests none": (group(0, digests=""), "has digests ''"),
    "digests short": (group(0, digests=encoded(bytes(31))), "of 1 pieces in base64"),
    "digests long": (group(0, digests=encoded(bytes(33))), "of 1 pieces in base64"),
    "digests two": (group(0, digests=encoded(bytes(64))), "of 1 pieces in base64"),
    "digests other letters": (group(0, digests="-" * 43 + "="), "of 1 pieces in base64"),
    "digests not ASCII": (group(0, digests="\xe9" * 43 + "="), "of 1 pieces in base64"),
    "digests spaced": (group(0, digests="A" * 42 + "\n="), "of 1 pieces in base64"),
    "digests of two spellings": (group(0, digests="A" * 42 + "B="), "of 1 pieces in base64"),
    "digests of a huge group": (group(-1, size=2**62), f"of {2**39} pieces in base64"),
    "no fields": (fields(), "has fields []"),
    "field number": (fields(1), "has the field 1"),
    "field dtype": (fields(FIELD | {"dtype": "int3"}), "has dtype 'int3'"),
    "field dtype list": (fields(FIELD | {"dtype": []}), "has dtype []"),
    "field shape": (fields(FIELD | {"shape": [-1]}), "more elements"),
    "field shape empty": (fields(FIELD | {"shape": []}), "1 to 4 extents"),
    "field shape huge": (fields(FIELD | {"shape": [2**62, 2**62, 2**62, 2**62]}), "more elements"),
    "field too long": (fields(FIELD | {"shape": [2**60]}), "ends at byte"),
    "field odd": (fields(FIELD | {"offset": 2}), "not aligned"),
    "field twice": (fields(FIELD, FIELD), "overlaps the one before it"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_manifests_are_refused(name: str) -> None:
    change, fault = BROKEN[name]
    message = refusal(lambda: parse(changed(change), "dir/manifest.json"))
    assert message.startswith("dir/manifest.json")
    assert fault in message


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"\xff", b"{}", b'{"format": "penstock pack", "format": 1}', b'{"a":' + b"[" * 100_000],
    ids=range(6),
)
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    refusal(lambda: parse(data, "m"))


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def places(value: object) -> list[tuple[str | int, ...]]:
    """The way to every part of a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [way for key, part in inner for way in ((key,), *((key, *rest) for rest in places(part)))]


@given(
    st.sampled_from(
        places({key: value for key, value in json.loads(manifest().text()).items() if key != "checksum"})
    ),
    _JSON,
)
def test_any_value_anywhere_is_refused_or_right(way: tuple[str | int, ...], value: object) -> None:
    """Whatever takes the place of a part, parsing ends in a manifest that is sound in itself or in a
    CheckpointError."""

    def change(body: dict[str, Any]) -> None:
        at: Any = body
        for step in way[:-1]:
            at = at[step]
        at[way[-1]] = value

    try:
        found = parse(changed(change), "m")
    except CheckpointError:
        return
    end = 0
    for run in found.runs:
        assert (run.offset, run.offset % PAGE) == (end, 0)
        assert isinstance(run.size, int)
        end = run.end
        for field in run.fields:
            elements = 1
            for extent in field.shape:
                elements *= extent
            assert field.offset + elements * DTYPE_BYTES[found.dtype] <= run.size


def test_groups_of_another_model() -> None:
    found = manifest()
    assert "is not group attention.0 that config.json calls for" in refusal(
        lambda: found.check(layouts(num_key_value_heads=3), "m")
    )
    assert "has 11 groups" not in refusal(lambda: found.check(layouts(num_hidden_layers=1), "m"))
    shorter = Manifest(
        found.fingerprint, found.config, found.dtype, found.store, found.files, found.runs[:-1]
    )
    assert f"has {len(found.runs) - 1} groups; config.json calls for {len(found.runs)}" in refusal(
        lambda: shorter.check(layouts(), "m")
    )
    renamed = [
        PackedRun(run.id, run.offset, run.size, (FieldPlace("x", "float32", (1,), 0), *run.fields[1:]))
        for run in found.runs
    ]
    other = Manifest(found.fingerprint, found.config, found.dtype, found.store, found.files, tuple(renamed))
    assert "group 'embedding'" in refusal(lambda: other.check(layouts(), "m"))
