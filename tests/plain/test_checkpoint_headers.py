"""Headers, indexes and JSON files of checkpoints, sound, broken and hostile: read rightly or refused in one
line, and never believed."""

import json
import os
import random
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.errors import CheckpointError
from penstock.memory.disk import DiskFile
from penstock.weights.checkpoint.generation import GenerationDefaults, read_generation
from penstock.weights.checkpoint.safetensors import TensorEntry, parse_header, read_header
from penstock.weights.checkpoint.shards import INDEX, SINGLE, Shards
from penstock.weights.jsonfile import parse_object, read_object
from safetensor_files import entry, sealed, write_tensors

A, B = entry("F32", [2, 3], 0, 24), entry("BF16", [4], 24, 32)


def refusal(call: Callable[[], object]) -> str:
    """The message of the CheckpointError that `call` ends in: one line, not long."""
    with pytest.raises(CheckpointError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 1000
    return message


def header(tensors: object, file_size: int | None = None, data: int = 32) -> dict[str, TensorEntry]:
    """Parse the header of a file with this header object (or text) and `data` bytes behind it."""
    raw = tensors if isinstance(tensors, bytes) else json.dumps(tensors).encode()
    return parse_header(raw, 8 + len(raw) + data if file_size is None else file_size, "file")


def test_sound_header() -> None:
    raw = json.dumps({"__metadata__": {"format": "pt"}, "b": B, "a": A}).encode() + b"   "
    assert header(raw) == {
        "a": TensorEntry("F32", (2, 3), 8 + len(raw), 24),
        "b": TensorEntry("BF16", (4,), 32 + len(raw), 8),
    }


def test_corners_that_are_sound() -> None:
    empty, scalar, packed = entry("F16", [0, 7], 4, 4), entry("I32", [], 0, 4), entry("F4", [4, 2], 4, 8)
    assert {
        name: found.size for name, found in header({"e": empty, "s": scalar, "p": packed}, data=8).items()
    } == {"e": 0, "s": 4, "p": 4}
    assert header({}, data=0) == {}
    assert header({"__metadata__": None}, data=0) == {}


BROKEN = {
    "not an object": (b"[1]", "does not start with"),
    "leading space": (b' {"a": 1}', "does not start with"),
    "not UTF-8": (b'{"\xff": 1}', "is not JSON in UTF-8"),
    "not JSON": (b'{"a": ', "is not JSON in UTF-8"),
    "UTF-16": ('{"a": 1}'.encode("utf-16-le"), "is not JSON in UTF-8"),
    "too deep": (b'{"a":' + b"[" * 200_000, "is not JSON in UTF-8"),
    "number of 5000 digits": (b'{"a":' + b"1" * 5000 + b"}", "is not JSON in UTF-8"),
    "key twice": (b'{"a": 1, "b": 2, "a": 1}', "key 'a' is there twice"),
    "inner key twice": (b'{"a": {"dtype": "F32", "dtype": "F32"}}', "key 'dtype' is there twice"),
    "metadata no object": ({"__metadata__": [1], "a": A, "b": B}, "__metadata__ is"),
    "entry no object": ({"a": 7}, "tensor 'a' is 7; it must be an object"),
    "dtype unknown": ({"a": entry("F33", [6], 0, 24), "b": B}, "tensor 'a' has dtype 'F33'"),
    "dtype missing": ({"a": {"shape": [6], "data_offsets": [0, 24]}, "b": B}, "tensor 'a' has dtype None"),
    "dtype a list": ({"a": entry(["F32"], [6], 0, 24), "b": B}, "tensor 'a' has dtype"),
    "shape missing": ({"a": {"dtype": "F32", "data_offsets": [0, 24]}, "b": B}, "has shape None"),
    "shape negative": ({"a": entry("F32", [-2, -3], 0, 24), "b": B}, "has shape"),
    "shape fraction": ({"a": entry("F32", [2.0, 3], 0, 24), "b": B}, "has shape"),
    "shape bool": ({"a": entry("F32", [True, 6], 0, 24), "b": B}, "has shape"),
    "shape text": ({"a": entry("F32", ["6"], 0, 24), "b": B}, "has shape"),
    "shape huge": (
        {"a": entry("F32", [2**63, 0], 0, 0), "b": entry("BF16", [16], 0, 32)},
        "whole numbers from 0",
    ),
    "shape too many": (
        {"a": entry("F32", [2**40, 2**40, 0], 0, 0), "b": entry("BF16", [16], 0, 32)},
        "more elements than any file",
    ),
    "shape endless": ({"a": entry("F32", [2**60] * 50_000, 0, 24), "b": B}, "more elements than any file"),
    "offsets missing": ({"a": {"dtype": "F32", "shape": [6]}, "b": B}, "has data_offsets None"),
    "offsets three": (
        {"a": {"dtype": "F32", "shape": [6], "data_offsets": [0, 24, 24]}, "b": B},
        "must be two whole numbers",
    ),
    "offsets negative": ({"a": entry("F32", [6], -24, 0), "b": B}, "must be two whole numbers"),
    "offsets bool": (
        {"a": entry("U8", [1], False, True), "b": entry("U8", [31], 1, 32)},
        "must be two whole numbers",
    ),
    "offsets fraction": ({"a": entry("F32", [6], 0, 24.0), "b": B}, "must be two whole numbers"),
    "offsets reversed": ({"a": entry("F32", [6], 24, 0), "b": B}, "but \\[6\\] of F32 takes 24 bytes"),
    "offsets too few": (
        {"a": entry("F32", [6], 0, 20), "b": entry("BF16", [6], 20, 32)},
        "but \\[6\\] of F32 takes 24 bytes",
    ),
    "offsets too many": ({"a": entry("F32", [5], 0, 24), "b": B}, "but \\[5\\] of F32 takes 20 bytes"),
    "half a byte": ({"a": entry("F4", [3], 0, 1), "b": entry("U8", [31], 1, 32)}, "takes 1.5 bytes"),
    "beyond the file": (
        {"a": A, "b": entry("BF16", [40], 24, 104)},
        "cut short or damaged: it has \\d+ bytes, but tensor 'b' ends at",
    ),
    "far beyond": ({"a": A, "b": entry("U8", [2**61], 24, 2**61 + 24)}, "cut short or damaged"),
    "overlap": ({"a": A, "b": entry("BF16", [6], 20, 32)}, "tensor 'b' overlaps"),
    "same place": ({"a": A, "c": A, "b": B}, "overlaps"),
    "hole": ({"a": A, "b": entry("BF16", [2], 28, 32)}, "tensor 'b' leaves 4 bytes before it unused"),
    "hole at the start": ({"a": entry("F32", [7], 4, 32)}, "tensor 'a' leaves 4 bytes before it unused"),
    "hole at the end": ({"a": A}, "but its tensors end at"),
    "no tensors for the data": ({}, "but its tensors end at"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_header_is_refused(name: str) -> None:
    broken, fault = BROKEN[name]
    with pytest.raises(CheckpointError, match=fault):
        header(broken)
    assert refusal(lambda: header(broken)).startswith("file")


def test_messages_stay_short_whatever_the_header_holds() -> None:
    name = "x\n" * 100_000
    assert "'x\\nx" in refusal(lambda: header({name: entry("F32", list(range(100_000)), 0, 24)}))


@pytest.mark.parametrize("size", range(8))
def test_file_too_short_for_a_length(tmp_path: Path, size: int) -> None:
    (tmp_path / "f").write_bytes(b"\x01" * size)
    with DiskFile(tmp_path / "f") as file:
        assert f"has {size} bytes" in refusal(lambda: read_header(file))


@pytest.mark.parametrize("length", [25, 2**31, 2**64 - 1, 2**63 - 8])
def test_header_longer_than_the_file(tmp_path: Path, length: int) -> None:
    (tmp_path / "f").write_bytes(length.to_bytes(8, "little") + b"{" + b" " * 23)
    with DiskFile(tmp_path / "f") as file:
        message = refusal(lambda: read_header(file))
    assert str(length) in message or str(8 + length) in message


def test_header_beyond_the_format_is_not_read(tmp_path: Path) -> None:
    """The file is large enough, but sparse: reading the header would show in memory and in the message."""
    with (tmp_path / "f").open("wb") as out:
        out.write((25_000_001).to_bytes(8, "little"))
        out.truncate(25_000_100)
    with DiskFile(tmp_path / "f") as file:
        assert "25000001 bytes, and 25000000 are allowed" in refusal(lambda: read_header(file))


def test_file_that_shrinks_while_it_is_opened(tmp_path: Path) -> None:
    write_tensors(tmp_path / "f", one())
    with DiskFile(tmp_path / "f") as file:
        os.truncate(tmp_path / "f", 20)
        assert "at byte 20: it ends there" in refusal(lambda: read_header(file))


def test_truncated_file_names_both_sizes(tmp_path: Path) -> None:
    write_tensors(tmp_path / "f", {"a": ("F32", [6], bytes(24)), "z": ("F32", [60], bytes(240))})
    whole = (tmp_path / "f").read_bytes()
    (tmp_path / "f").write_bytes(whole[:-30])
    with DiskFile(tmp_path / "f") as file:
        message = refusal(lambda: read_header(file))
    assert f"it has {len(whole) - 30} bytes, but tensor 'z' ends at {len(whole)}" in message
    assert str(tmp_path / "f") in message


SIZES = st.one_of(
    st.integers(-2, 40),
    st.integers(),
    st.booleans(),
    st.floats(),
    st.none(),
    st.sampled_from([2**31, 2**62, 2**63, 2**64]),
)
ENTRIES = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.one_of(
            st.sampled_from(["F32", "BF16", "U8", "F4", "F64"]), st.text(max_size=4), st.integers()
        ),
        "shape": st.one_of(st.lists(SIZES, max_size=4), SIZES),
        "data_offsets": st.one_of(
            st.lists(SIZES, min_size=2, max_size=2), st.lists(SIZES, max_size=3), SIZES
        ),
    },
)
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8))
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3))
HEADERS = st.dictionaries(
    st.one_of(st.text(max_size=6), st.just("__metadata__")), st.one_of(ENTRIES, JSON), max_size=4
)


@given(
    raw=st.one_of(
        st.binary(max_size=200),
        st.binary(max_size=64).map(lambda data: sealed(b"{" + data)),
        st.builds(
            lambda tensors, data: sealed(json.dumps(tensors).encode(), data), HEADERS, st.binary(max_size=64)
        ),
    )
)
def test_any_file_is_read_or_refused_within_little_memory(raw: bytes) -> None:
    with tempfile.NamedTemporaryFile() as out:
        out.write(raw)
        out.flush()
        tracemalloc.start()
        try:
            with DiskFile(Path(out.name)) as file:
                tensors, message = read_header(file), ""
        except CheckpointError as error:
            tensors, message = {}, str(error)
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
    assert peak < 2 << 20
    assert "\n" not in message
    assert sum(found.size for found in tensors.values()) <= len(raw)
    assert all(found.offset + found.size <= len(raw) for found in tensors.values())


@given(
    st.lists(
        st.tuples(st.sampled_from(["F32", "BF16", "U8", "F64"]), st.lists(st.integers(0, 5), max_size=3)),
        max_size=5,
    ),
    st.randoms(),
)
def test_every_sound_header_is_read(drawn: list[tuple[str, list[int]]], rng: random.Random) -> None:
    width = {"F32": 4, "BF16": 2, "U8": 1, "F64": 8}
    tensors, at = {}, 0
    for number, (dtype, shape) in enumerate(drawn):
        size = width[dtype]
        for extent in shape:
            size *= extent
        tensors[f"t{number}"] = entry(dtype, shape, at, at + size)
        at += size
    names = list(tensors)
    rng.shuffle(names)
    found = header({name: tensors[name] for name in names}, data=at)
    assert {name: (one.dtype, list(one.shape), one.size) for name, one in found.items()} == {
        name: (one["dtype"], one["shape"], one["data_offsets"][1] - one["data_offsets"][0])
        for name, one in tensors.items()
    }


# ---- JSON files --------------------------------------------------------------------------------------------


def test_json_object_is_read(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text('{"größe": [1, {"x": null}]}', encoding="utf-8")
    assert read_object(tmp_path / "c.json", 100) == {"größe": [1, {"x": None}]}


def test_json_that_is_no_object_is_refused() -> None:
    assert "is not a JSON object but [1, 2]" in refusal(lambda: parse_object(b"[1, 2]", "c.json"))
    assert "is not a JSON object but None" in refusal(lambda: parse_object(b"null", "c.json"))


def test_json_too_large_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "c.json").open("wb") as out:
        out.truncate(1 << 30)
    assert "is 1.00 GiB, more than the 9.54 MiB" in refusal(
        lambda: read_object(tmp_path / "c.json", 10_000_000)
    )


def test_json_that_is_not_there(tmp_path: Path) -> None:
    assert "No such file" in refusal(lambda: read_object(tmp_path / "c.json", 100))


@given(st.binary(max_size=100))
def test_any_json_is_read_or_refused(data: bytes) -> None:
    try:
        found, message = parse_object(data, "c.json"), ""
    except CheckpointError as error:
        found, message = {}, str(error)
    assert isinstance(found, dict)
    assert "\n" not in message


# ---- directories -------------------------------------------------------------------------------------------


def one(name: str = "a") -> dict[str, tuple[str, list[int], bytes]]:
    return {name: ("F32", [2], b"12345678")}


def index(path: Path, weight_map: object, **more: object) -> None:
    (path / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map, **more}))


def sharded(path: Path) -> None:
    write_tensors(path / "model-1.safetensors", one("a"))
    write_tensors(path / "model-2.safetensors", one("b"))
    index(path, {"a": "model-1.safetensors", "b": "model-2.safetensors"})


def held(path: Path) -> dict[str, str]:
    """Which file each tensor is in."""
    shards = Shards(path)
    shards.close()
    return {name: stored.file.path.name for name, stored in shards.tensors.items()}


def test_single_file_and_shards(tmp_path: Path) -> None:
    sharded(tmp_path)
    assert held(tmp_path) == {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    write_tensors(tmp_path / SINGLE, one("c"))
    assert held(tmp_path) == {"c": SINGLE}


def test_links_as_in_a_download_cache(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "1f2e"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    sharded(blobs)
    for number, name in enumerate((INDEX, "model-1.safetensors", "model-2.safetensors")):
        (blobs / name).rename(blobs / f"{number:040x}")
        (snapshot / name).symlink_to(f"../../blobs/{number:040x}")
    assert held(snapshot) == {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (blobs / f"{2:040x}").unlink()
    assert "cannot open" in refusal(lambda: Shards(snapshot))


def test_link_to_nowhere_is_named(tmp_path: Path) -> None:
    (tmp_path / SINGLE).symlink_to("gone")
    assert f"cannot open {tmp_path / SINGLE}: No such file" in refusal(lambda: Shards(tmp_path))


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    sharded(tmp_path)
    write_tensors(tmp_path / "model-2.safetensors", one("b") | one("a"))
    message = refusal(lambda: Shards(tmp_path))
    assert "tensor 'a' is in both" in message
    assert "model-1.safetensors" in message
    assert "model-2.safetensors" in message


def test_shard_without_its_tensor(tmp_path: Path) -> None:
    sharded(tmp_path)
    index(tmp_path, {"a": "model-1.safetensors", "b": "model-1.safetensors"})
    assert "says that tensor 'b' is in model-1.safetensors, which does not hold it" in refusal(
        lambda: Shards(tmp_path)
    )
    index(tmp_path, {"a": "model-2.safetensors", "b": "model-1.safetensors"})
    assert "tensor 'a' is in model-2.safetensors, which does not hold it" in refusal(lambda: Shards(tmp_path))


def test_tensor_that_the_index_leaves_out_is_there_all_the_same(tmp_path: Path) -> None:
    sharded(tmp_path)
    write_tensors(tmp_path / "model-2.safetensors", one("b") | one("c"))
    assert held(tmp_path)["c"] == "model-2.safetensors"


def test_missing_shard(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / "model-2.safetensors").unlink()
    assert f"cannot open {tmp_path / 'model-2.safetensors'}: No such file" in refusal(
        lambda: Shards(tmp_path)
    )


@pytest.mark.parametrize(
    "name",
    [
        *("../out.safetensors", "/etc/out.safetensors", "in/out.safetensors", "a\\b.safetensors"),
        *("..", ".", "", "model.bin", 7, None, ["x.safetensors"]),
        *("a\0.safetensors", "\udc80.safetensors", "\ud800.safetensors"),
    ],
)
def test_index_cannot_lead_out_of_the_directory(tmp_path: Path, name: object) -> None:
    inside = tmp_path / "inside"
    (inside / "in").mkdir(parents=True)
    write_tensors(tmp_path / "out.safetensors", one("b"))
    write_tensors(inside / "in" / "out.safetensors", one("b"))
    sharded(inside)
    index(inside, {"a": "model-1.safetensors", "b": name})
    assert "it must be a .safetensors file of the same directory" in refusal(lambda: Shards(inside))


def test_shard_name_that_no_file_can_have(tmp_path: Path) -> None:
    index(tmp_path, {"a": "x" * 5000 + ".safetensors"})
    with pytest.raises(CheckpointError, match="File name too long"):
        Shards(tmp_path)


@pytest.mark.parametrize("weight_map", [None, [], {}, "model.safetensors", [["a", "b"]]])
def test_index_without_a_map(tmp_path: Path, weight_map: object) -> None:
    index(tmp_path, weight_map)
    assert "key 'weight_map' is" in refusal(lambda: Shards(tmp_path))


def test_index_with_a_tensor_twice(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / INDEX).write_text('{"weight_map": {"a": "model-1.safetensors", "a": "model-2.safetensors"}}')
    assert "key 'a' is there twice" in refusal(lambda: Shards(tmp_path))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt", "last.ckpt"])
def test_pickles_are_not_read(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x80\x02")
    message = refusal(lambda: Shards(tmp_path))
    assert f"only pickle files ('{name}'), which are not read" in message
    assert "convert them to safetensors" in message


def test_a_pack_that_has_lost_its_manifest_is_no_pickle(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(bytes(100))
    message = refusal(lambda: Shards(tmp_path))
    assert "weights.bin is of a pack whose manifest.json is not there any more" in message
    assert "pickle" not in message


def test_no_weights(tmp_path: Path) -> None:
    assert "holds no weights that can be read" in refusal(lambda: Shards(tmp_path))
    write_tensors(tmp_path / "model-00001-of-00002.safetensors", one())
    assert "though it has 'model-00001-of-00002.safetensors'" in refusal(lambda: Shards(tmp_path))
    assert "cannot list" in refusal(lambda: Shards(tmp_path / "none"))


def test_files_are_given_back_also_after_a_fault(tmp_path: Path) -> None:
    sharded(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    shards = Shards(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before + 2
    shards.close()
    (tmp_path / "model-2.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError):
        Shards(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


# ---- generation defaults -----------------------------------------------------------------------------------


def defaults(generation: dict[str, object], config: dict[str, object] | None = None) -> GenerationDefaults:
    return read_generation(generation, config or {}, 100, "generation_config.json")


def test_generation_defaults() -> None:
    assert defaults({}) == GenerationDefaults()
    found = defaults(
        {
            "do_sample": True,
            "temperature": 0.6,
            "top_k": 20,
            "top_p": 0.9,
            "min_p": 0.1,
            "repetition_penalty": 1.05,
        }
    )
    assert found == GenerationDefaults(0.6, 20, 0.9, 0.1, 1.05)
    assert defaults({"do_sample": False, "temperature": 0.6, "top_k": 20}) == GenerationDefaults(
        temperature=0.0, top_k=20
    )
    assert defaults({"top_k": -1}).top_k == 0


def test_special_tokens_of_both_files() -> None:
    found = defaults(
        {"eos_token_id": [9, 7], "bos_token_id": 1}, {"eos_token_id": 7, "bos_token_id": 2, "pad_token_id": 3}
    )
    assert (found.eos_tokens, found.bos_token, found.pad_token) == ((9, 7), 1, 3)
    assert defaults({}, {"eos_token_id": [5, 4]}).eos_tokens == (5, 4)


def test_tokens_outside_the_vocabulary_do_not_count() -> None:
    found = defaults({"eos_token_id": [-1, 99, 100], "bos_token_id": None, "pad_token_id": -1})
    assert (found.eos_tokens, found.bos_token, found.pad_token) == ((99,), None, None)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", "hot"),
        ("temperature", -1),
        ("top_p", 2),
        ("top_k", 1.5),
        ("top_k", True),
        ("min_p", -0.1),
        ("repetition_penalty", 0),
    ],
)
def test_impossible_sampling_values(key: str, value: object) -> None:
    message = refusal(lambda: defaults({key: value}))
    assert message.startswith(f"generation_config.json: {key} {value!r}")


@pytest.mark.parametrize("value", [True, "2", 2.0, [1, "2"], [[1]], {"a": 1}])
def test_impossible_tokens(value: object) -> None:
    assert "generation_config.json: key 'eos_token_id' is" in refusal(
        lambda: defaults({"eos_token_id": value})
    )
    assert "config.json: key 'pad_token_id' is" in refusal(lambda: defaults({}, {"pad_token_id": value}))
