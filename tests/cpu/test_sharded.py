"""Several ranks, each with its own part of the weights and of the KV, compute what one does with all: here
they are threads."""

import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import tiny
from members import Meeting, Member, Rank, pass_of
from packs import read_group
from penstock.arch.formats.format import TensorSlice
from penstock.arch.layout import Field, GroupId, GroupKind, GroupLayout, group_layouts
from penstock.arch.shards import Shard
from penstock.arch.spec import Mlp
from penstock.base.errors import CheckpointError, ConfigError, PenstockError
from penstock.models import decoder, moe
from penstock.models.decoder import Decoder
from penstock.weights.checkpoint import tensors as reading
from penstock.weights.checkpoint.reader import Checkpoint
from penstock.weights.pack.directory import PackError
from penstock.weights.pack.reader import Pack, read_manifest
from penstock.weights.pack.writer import write_pack
from penstock.weights.pieces import JOURNAL, MANIFEST, STORE
from penstock.weights.streaming.source import PackSource

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
CLOSE = 1e-5
"""How far logits in float32 may lie apart, over the size of the largest: sums are in another order, and no
more."""
CHANGED = 0.1
"""How far they do if one row of one matrix is another."""
EACH = pytest.mark.parametrize("name", tiny.CASES)


@cache
def alone(name: str, dtype: str = "float32") -> list[Tensor]:
    return pass_of(tiny.checkpoint(name), 0, dtype=dtype)


def apart(got: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    return max(tiny.distance(one, other) for one, other in zip(got, expected, strict=True))


# ---- the arithmetic


def test_the_pass_to_compare_with_is_the_models() -> None:
    prompts = tiny.prompts()[1:4]
    for reference, logits in zip(
        tiny.references("llama")[1:4], split(alone("llama")[0], [5, 13, 20]), strict=True
    ):
        found = logits.double().log_softmax(-1)
        assert reference.prompt in prompts
        assert tiny.distance(found, reference.logprobs[: len(found)]) < tiny.LIMIT


def split(logits: Tensor, counts: Sequence[int]) -> Iterator[Tensor]:
    """The first step's, by request, in the order of positions."""
    samples, rest = logits[: len(counts)], logits[len(counts) :]
    for sample, prompt in zip(samples, torch.split(rest, [count - 1 for count in counts]), strict=True):
        yield torch.cat([prompt, sample[None]])


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        (name, ranks)
        for turn, name in enumerate(tiny.CASES)
        for ranks in ([2, 3] if tiny.THOROUGH else [2 + turn % 2])
    ],
)
def test_ranks_find_what_one_does(name: str, ranks: int) -> None:
    assert apart(pass_of(tiny.checkpoint(name), ranks), alone(name)) < CLOSE


@pytest.mark.parametrize(
    "name", ["llama", "llama_biases", "qwen2", "qwen3_moe", "qwen2_moe", "glm4_moe", "minimax_m2"]
)
def test_as_many_ranks_as_heads(name: str) -> None:
    """Of each two one KV head: where norms cover all heads, only one of them counts its keys."""
    assert apart(pass_of(tiny.checkpoint(name), 4), alone(name)) < CLOSE


@pytest.mark.parametrize("name", ["llama_biases", "llama_tied", "mixtral"])
def test_one_rank_of_one_exchanges_nothing(name: str) -> None:
    assert all(map(torch.equal, pass_of(tiny.checkpoint(name), 1), alone(name)))


@pytest.mark.parametrize("name", ["llama_biases", "qwen3", "qwen2_moe"])
def test_long_chunks_in_pieces(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = alone(name)
    monkeypatch.setattr(decoder, "_WIDE_ROWS", 7)
    monkeypatch.setattr(moe, "_WIDE_ROWS", 7)
    assert apart(pass_of(tiny.checkpoint(name), 2), expected) < CLOSE


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_half_precision(name: str, dtype: str) -> None:
    """As close to float32 as one rank comes, or nearly."""
    exact, one = alone(name), alone(name, dtype)
    got = pass_of(tiny.checkpoint(name), 2, dtype=dtype)

    def typical(logits: Sequence[Tensor]) -> float:
        return float((torch.cat(list(logits)) - torch.cat(exact)).abs().mean())

    assert typical(got) < 1.2 * typical(one)


def test_too_many_ranks() -> None:
    with Checkpoint.open(tiny.checkpoint("llama")) as model:
        for call in (
            lambda: Decoder(model.spec, Shard(0, 5), Member(Meeting(5), 0)),
            lambda: group_layouts(model.spec, model.names, "float32", Shard(4, 5)),
        ):
            with pytest.raises(ConfigError, match="tensor_parallel=5 is more than the model's 4 query heads"):
                call()


# ---- what would be wrong


def shifted(kind: GroupKind, name: str, number: int) -> Callable[[GroupLayout], GroupLayout]:
    """Layouts in which one source of one field takes the rows, or the columns, one before its own; in the
    first group of its kind."""
    done = []

    def move(part: range | None) -> range | None:
        return part and range(part.start - 1, part.stop - 1)

    def change(layout: GroupLayout) -> GroupLayout:
        if layout.id.kind is not kind or done:
            return layout
        fields = []
        for one in layout.fields:
            if one.name == name:
                sources = list(one.sources)
                source = sources[number]
                assert (source.rows is None) != (source.columns is None)
                sources[number] = replace(source, rows=move(source.rows), columns=move(source.columns))
                one = replace(one, sources=tuple(sources))
                done.append(one)
            fields.append(one)
        return replace(layout, fields=tuple(fields))

    return change


CUTS = [
    ("llama_biases", GroupKind.EMBEDDING, "embedding", 0),
    *(("qwen3_windows", GroupKind.ATTENTION, "qkv", number) for number in range(3)),
    *(("qwen3_windows", GroupKind.ATTENTION, "qkv_bias", number) for number in range(3)),
    ("qwen3_windows", GroupKind.ATTENTION, "out", 0),
    *(
        ("llama_biases", GroupKind.FFN, name, number)
        for name in ("gate_up", "gate_up_bias")
        for number in range(2)
    ),
    ("llama_biases", GroupKind.FFN, "down", 0),
    *(
        ("mixtral", GroupKind.EXPERT, name, number)
        for name, number in (("gate_up", 0), ("gate_up", 1), ("down", 0))
    ),
    *(
        ("glm4_moe", GroupKind.ROUTER, name, number)
        for name, number in (("gate_up", 0), ("gate_up", 1), ("down", 0))
    ),
    *(("minimax_m2", GroupKind.ATTENTION, name, 0) for name in ("q_norm", "k_norm")),
    ("llama_biases", GroupKind.HEAD, "output", 0),
    ("llama_tied", GroupKind.EMBEDDING, "embedding", 0),
]


@pytest.mark.parametrize(("name", "kind", "cut", "number"), CUTS)
def test_a_slice_that_is_off_by_one_is_noticed(name: str, kind: GroupKind, cut: str, number: int) -> None:
    changes = [lambda layout: layout, shifted(kind, cut, number)]
    assert apart(pass_of(tiny.checkpoint(name), 2, change=changes), alone(name)) > CHANGED


@pytest.mark.parametrize("bias", ["out_bias", "down_bias"])
def test_a_bias_that_every_rank_adds_is_noticed(bias: str) -> None:
    with Checkpoint.open(tiny.checkpoint("llama_biases")) as model:
        whole = {
            layout.id: layout for layout in group_layouts(model.spec, model.names, "float32", Shard(0, 2))
        }

    def change(layout: GroupLayout) -> GroupLayout:
        found = [one for one in whole[layout.id].fields if one.name == bias]
        added = tuple(replace(one, offset=layout.size) for one in found)
        return replace(layout, fields=layout.fields + added, size=layout.size + 256 * len(added))

    logits = pass_of(tiny.checkpoint("llama_biases"), 2, change=[lambda layout: layout, change])
    assert apart(logits, alone("llama_biases")) > CHANGED


# ---- what is read


def stored(path: Path) -> dict[str, Tensor]:
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


def expected(layout: GroupLayout, tensors: Mapping[str, Tensor], dtype: str) -> Tensor:
    """A group, made of whole tensors."""
    group = torch.zeros(layout.size, dtype=torch.uint8)
    for one in layout.fields:
        parts = [tensors[source.tensor][tuple(slices(source))] for source in one.sources]
        whole = torch.cat(parts).to(DTYPES[dtype]).contiguous()
        assert whole.shape == one.shape
        group[one.offset : one.offset + whole.nbytes] = whole.view(-1).view(torch.uint8)
    return group


def slices(source: TensorSlice) -> Iterator[slice]:
    for extent, part in zip(source.shape, (source.rows, source.columns), strict=False):
        yield slice(part.start, part.stop) if part is not None else slice(extent)


@pytest.mark.parametrize(
    ("name", "gap", "dtype"),
    [
        (name, gap, dtype)
        for row, name in enumerate(["llama_biases", "qwen3_moe_every_second", "llama_float16_file"])
        for column, dtype in enumerate(DTYPES)
        for gap in ([0, 4096] if tiny.THOROUGH else [[0, 4096][(row + column) % 2]])
    ],
)
def test_groups_and_pieces_of_every_rank(
    name: str, gap: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines read one by one or several at once, in stages that hold a few or not even one; pieces that begin
    and end within lines."""
    monkeypatch.setattr(reading, "GAP_BYTES", gap)
    rng, tensors = random.Random(1), stored(tiny.checkpoint(name))
    with Checkpoint.open(tiny.checkpoint(name)) as model:
        for stage, serial in ((reading.STAGE_BYTES, reading.SERIAL), (1000, 70), (100, 10)):
            monkeypatch.setattr(reading, "STAGE_BYTES", stage)
            monkeypatch.setattr(reading, "SERIAL", serial)
            for shard in (Shard(2, 3), Shard(1, 2)):
                for layout in group_layouts(model.spec, model.names, dtype, shard):
                    whole = torch.full((layout.size,), 0xEE, dtype=torch.uint8)
                    model.read_piece(layout, 0, whole)
                    assert torch.equal(whole, expected(layout, tensors, dtype))
                    for _ in range(3):
                        start, length = 256 * rng.randrange(layout.size // 256), 256 * rng.randrange(1, 20)
                        piece = torch.full((length,), 0xEE, dtype=torch.uint8)
                        model.read_piece(layout, start, piece)
                        assert torch.equal(
                            piece,
                            torch.cat([whole, torch.zeros(length, dtype=torch.uint8)])[
                                start : start + length
                            ],
                        )


def test_rows_and_columns_of_one_tensor() -> None:
    source = TensorSlice("model.layers.0.mlp.down_proj.weight", (64, 80), range(3, 50), range(11, 76))
    assert source.taken == (47, 65)
    layout = GroupLayout(
        GroupId(GroupKind.FFN, 0), (Field("down", source.taken, 0, (source,), "float32"),), 12288
    )
    with Checkpoint.open(tiny.checkpoint("llama")) as model:
        found = torch.empty(layout.size, dtype=torch.uint8)
        model.read_piece(layout, 0, found)
    assert torch.equal(found, expected(layout, stored(tiny.checkpoint("llama")), "float32"))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of long rows, of which even three ranks' columns lie a page apart."""
    path = tmp_path_factory.mktemp("wide") / "model"
    return tiny.write(
        tiny.CASES["llama_biases"],
        path,
        head_dim=512,
        intermediate_size=2048,
        num_hidden_layers=1,
        vocab_size=96,
    )


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every request for a file's."""
    sizes: list[int] = []
    real = os.preadv

    def preadv(file: int, buffers: Sequence[memoryview], offset: int) -> int:
        count = real(file, buffers, offset)
        sizes.append(count)
        return count

    monkeypatch.setattr(os, "preadv", preadv)
    return sizes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_reads_its_own_bytes_and_no_others(
    wide: Path, read: list[int], ranks: int, dtype: str
) -> None:
    with Checkpoint.open(wide) as model:
        for rank in range(ranks):
            one = Rank(model, Shard(rank, ranks), Member(Meeting(ranks), rank), dtype)
            held = [
                source
                for layout in one.weights._layouts.values()
                for each in layout.fields
                for source in each.sources
            ]
            read.clear()
            one.load()
            assert sum(read) == 4 * sum(prod(source.taken) for source in held)
            assert sum(read) < 0.6 * 4 * sum(prod(source.shape) for source in held)
            one.weights.close()


def test_short_lines_are_read_many_at_once(read: list[int]) -> None:
    with Checkpoint.open(tiny.checkpoint("llama")) as model:
        one = Rank(model, Shard(1, 2), Member(Meeting(2), 1))
        read.clear()
        one.load()
        sources = [
            source
            for layout in one.weights._layouts.values()
            for each in layout.fields
            for source in each.sources
        ]
        rows = [source for source in sources if source.columns is None]
        columns = [source for source in sources if source.columns is not None]
        assert len(read) == len(sources)
        most = sum(prod(source.taken) for source in rows) + sum(prod(source.shape) for source in columns)
        assert sum(read) < 4 * most
        one.weights.close()


def test_a_tensor_of_another_shape_is_refused_by_every_rank(tmp_path: Path) -> None:
    """Also one that is large enough for what the rank takes."""
    path = tiny.write(tiny.CASES["llama"], tmp_path / "model", num_hidden_layers=1)
    with Checkpoint.open(path) as model:
        wider = replace(
            model.spec, stack=tuple(replace(one, feed_forward=Mlp(78)) for one in model.spec.stack)
        )
        for rank in range(2):
            layout = group_layouts(wider, model.names, "float32", Shard(rank, 2))[2]
            with pytest.raises(
                CheckpointError, match=r"has shape \[80, 64\]; config.json calls for \[78, 64\]"
            ):
                model.read_piece(layout, 0, torch.empty(layout.size, dtype=torch.uint8))


# ---- packs


def refusal(call: Callable[[], object], kind: type[PenstockError] = CheckpointError) -> str:
    with pytest.raises(PenstockError) as caught:
        call()
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    return str(caught.value)


def pack(model: Path, out: Path, shard: Shard | None = None, **more: object) -> bool:
    with Checkpoint.open(model) as checkpoint:
        return write_pack(checkpoint, out, "float32", shard=shard, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["llama_biases", "qwen2", "qwen3_moe"])
def test_a_pack_of_each_rank(name: str, tmp_path: Path) -> None:
    tensors = stored(tiny.checkpoint(name))
    for rank in range(2):
        shard, path = Shard(rank, 2), tmp_path / str(rank)
        assert pack(tiny.checkpoint(name), path, shard)
        assert not pack(tiny.checkpoint(name), path, shard)
        with Pack.open(path, shard) as found:
            assert found.shard == read_manifest(path).shard == shard
            found.verify()
            for layout in found.layouts:
                group = torch.empty(layout.size, dtype=torch.uint8)
                read_group(found, layout.id, group, check=True)
                assert torch.equal(group, expected(layout, tensors, "float32"))


@pytest.mark.parametrize("name", ["llama_tied", "llama_biases", "qwen3_moe"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_weights_that_stream_from_packs(name: str, ranks: int, tmp_path: Path) -> None:
    for rank in range(ranks):
        pack(tiny.checkpoint(name), tmp_path / str(rank), Shard(rank, ranks))
    sources = [PackSource(Pack.open(tmp_path / str(rank), Shard(rank, ranks))) for rank in range(ranks)]
    assert apart(pass_of(tiny.checkpoint(name), ranks, source=sources, part=0.6), alone(name)) < CLOSE


def test_a_pack_of_another_shard_is_refused(tmp_path: Path) -> None:
    """Also where both have the same layout."""
    model = tiny.write(tiny.CASES["llama"], tmp_path / "model", vocab_size=96)
    first, second, whole = tmp_path / "first", tmp_path / "second", tmp_path / "whole"
    pack(model, first, Shard(0, 2))
    pack(model, second, Shard(1, 2))
    pack(model, whole)
    with Pack.open(first, Shard(0, 2)) as one, Pack.open(second, Shard(1, 2)) as other:
        assert [run.fields for run in one.manifest.runs] == [run.fields for run in other.manifest.runs]
        assert (first / STORE).read_bytes() != (second / STORE).read_bytes()
    assert f"{first} is a pack of rank 0 of 2, not of rank 1 of 2" in refusal(
        lambda: Pack.open(first, Shard(1, 2))
    )
    assert "is a pack of rank 0 of 2, not of rank 0 of 4" in refusal(lambda: Pack.open(first, Shard(0, 4)))
    assert "is a pack of rank 1 of 2, not of the whole model" in refusal(lambda: Pack.open(second))
    assert "is a pack of the whole model, not of rank 0 of 2" in refusal(
        lambda: Pack.open(whole, Shard(0, 2))
    )
    assert "another shard (rank 0 of 2)" in refusal(lambda: pack(model, first, Shard(1, 2)), PackError)
    assert "another shard (the whole model)" in refusal(lambda: pack(model, whole, Shard(1, 2)), PackError)
    assert "tensor_parallel=5 is more than" in refusal(
        lambda: pack(model, tmp_path / "none", Shard(0, 5)), ConfigError
    )
    assert not (tmp_path / "none").exists()


def test_an_unfinished_pack_of_another_shard(tmp_path: Path) -> None:
    def stop(count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(tiny.checkpoint("llama"), tmp_path / "pack", Shard(0, 2), progress=stop)
    assert (tmp_path / "pack" / JOURNAL).exists()
    assert "unfinished pack of another" in refusal(
        lambda: pack(tiny.checkpoint("llama"), tmp_path / "pack", Shard(1, 2)), PackError
    )
    assert "unfinished pack of another" in refusal(
        lambda: pack(tiny.checkpoint("llama"), tmp_path / "pack"), PackError
    )
    assert pack(tiny.checkpoint("llama"), tmp_path / "pack", Shard(0, 2))


def test_a_pack_of_one_rank_of_one_is_that_of_the_model(tmp_path: Path) -> None:
    pack(tiny.checkpoint("llama"), tmp_path / "plain")
    pack(tiny.checkpoint("llama"), tmp_path / "one", Shard(0, 1))
    assert (tmp_path / "plain" / MANIFEST).read_bytes() == (tmp_path / "one" / MANIFEST).read_bytes()
