"""What ranks hold, in numbers: everything once, KV heads at least once, in the order of ranks; and how
layouts and manifests say it."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.arch.families import family_of, read_spec
from penstock.arch.formats.format import TensorSlice
from penstock.arch.layout import GroupLayout, group_layouts, kv_layout
from penstock.arch.parts import held, local_spec
from penstock.arch.shards import UNIT, WHOLE, Shard, cut, cut_inner, share_heads
from penstock.arch.spec import ModelSpec
from penstock.base.errors import CheckpointError, ConfigError, PenstockError
from penstock.bench.shapes import SHAPES
from penstock.weights.pack.manifest import Manifest, parse, place, seal
from penstock.weights.pieces import DIGEST_BYTES

MOE = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 11, "mlp_only_layers": [1]}
MODELS: dict[str, dict[str, object]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen3": {"num_key_value_heads": 6},
    "mixtral": {"num_local_experts": 3, "num_experts_per_tok": 2},
    "qwen3_moe": MOE | {"attention_bias": True},
}
EACH = pytest.mark.parametrize("family", MODELS)
RANKS = pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])


def spec(family: str = "llama", **keys: object) -> ModelSpec:
    shape = {
        "vocab_size": 23,
        "hidden_size": 12,
        "intermediate_size": 17,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "head_dim": 2,
    }
    return read_spec({"model_type": family, "num_key_value_heads": 3, **shape, **MODELS[family], **keys})


def layouts(family: str, shard: Shard | None = None) -> tuple[GroupLayout, ...]:
    return group_layouts(spec(family), family_of({"model_type": family}).names, "bfloat16", shard)


@dataclass
class Part:
    """What a rank holds, its heads included."""

    heads: range
    kv_heads: range
    inner: range
    expert_inner: range
    vocabulary: range


def all_of(model: ModelSpec, ranks: int) -> list[Part]:
    parts = []
    for rank in range(ranks):
        mine = held(model, Shard(rank, ranks))
        heads = share_heads(model.heads // model.kv_heads, model.kv_heads, Shard(rank, ranks))
        parts.append(Part(*heads, mine.inner, mine.expert_inner, mine.vocabulary))
    return parts


def refusal(call: Callable[[], object], kind: type[PenstockError] = ConfigError) -> str:
    with pytest.raises(PenstockError) as caught:
        call()
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    return str(caught.value)


def check_cut(parts: list[range], count: int) -> None:
    """One behind the other, of lengths that differ by at most one."""
    assert [number for part in parts for number in part] == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(st.integers(0, 300), st.integers(1, 40))
def test_things_are_cut_evenly(count: int, ranks: int) -> None:
    check_cut([cut(count, Shard(rank, ranks)) for rank in range(ranks)], count)


@given(st.data(), st.integers(1, 12), st.integers(1, 9))
def test_each_rank_holds_its_own(data: st.DataObject, kv_heads: int, group: int) -> None:
    ranks = data.draw(st.integers(1, kv_heads * group))
    sizes = {
        "intermediate_size": data.draw(st.integers(ranks, 200)),
        "vocab_size": data.draw(st.integers(ranks, 300)),
    }
    model = spec(num_attention_heads=kv_heads * group, num_key_value_heads=kv_heads, **sizes)
    parts = all_of(model, ranks)
    assert [head for part in parts for head in part.heads] == list(range(model.heads))
    assert {head for part in parts for head in part.kv_heads} == set(range(kv_heads))
    for part in parts:
        # As attention takes it: equally many query heads for each KV head, in order.
        assert part.heads
        assert len(part.heads) % len(part.kv_heads) == 0
        each = len(part.heads) // len(part.kv_heads)
        assert [part.kv_heads[number // each] for number in range(len(part.heads))] == [
            head // group for head in part.heads
        ]
    if ranks <= kv_heads:
        check_cut([part.kv_heads for part in parts], kv_heads)
    else:
        assert {len(part.kv_heads) for part in parts} == {1}
        holders = Counter(part.kv_heads.start for part in parts)
        assert max(holders.values()) - min(holders.values()) <= 1
        for head in holders:
            shares = [len(part.heads) for part in parts if part.kv_heads.start == head]
            assert max(shares) - min(shares) <= 1
    check_cut([part.inner for part in parts], model.intermediate_size)
    check_cut([part.vocabulary for part in parts], model.vocab_size)


@RANKS
def test_experts_are_cut_each(ranks: int) -> None:
    check_cut([part.expert_inner for part in all_of(spec("qwen3_moe"), ranks)], 11)
    assert [part.expert_inner for part in all_of(spec("llama"), ranks)] == [range(0)] * ranks


@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("count", [6, 96, 768, 1408, 2880, 11008, 14336])
def test_inner_rows_are_divided_in_whole_units(count: int, ranks: int) -> None:
    """Where there are a few for each rank. Kernels for few bits take no other rows as fast."""
    parts = [cut_inner(count, Shard(rank, ranks)) for rank in range(ranks)]
    assert [row for part in parts for row in part] == list(range(count))
    sizes = [len(part) for part in parts]
    if count >= 256 * ranks:
        assert all(size % UNIT == 0 for size in sizes)
        assert max(sizes) - min(sizes) in (0, UNIT)
        assert sizes[0] == max(sizes)
    else:
        assert max(sizes) - min(sizes) <= 1


def test_experts_of_gpt_oss_are_divided_in_whole_units() -> None:
    spec = read_spec(SHAPES["gpt-oss-20b"], "its config")
    assert [held(spec, Shard(rank, 2)).expert_inner for rank in range(2)] == [range(1472), range(1472, 2880)]


def test_by_hand() -> None:
    first, second, third = all_of(spec("qwen2"), 3)
    assert (first.heads, first.kv_heads, first.inner, first.vocabulary) == (
        range(3),
        range(1),
        range(5),
        range(7),
    )
    assert (second.heads, second.kv_heads, second.inner, second.vocabulary) == (
        range(3, 4),
        range(1, 2),
        range(5, 11),
        range(7, 15),
    )
    assert (third.heads, third.kv_heads, third.inner, third.vocabulary) == (
        range(4, 6),
        range(1, 2),
        range(11, 17),
        range(15, 23),
    )
    local = local_spec(spec("qwen3_moe"), Shard(2, 3))
    assert (local.heads, local.kv_heads, local.intermediate_size, local.vocab_size) == (2, 1, 6, 8)
    assert local.moe is not None
    assert (local.moe.intermediate_size, local.moe.experts) == (4, 3)
    assert local_spec(spec("qwen3_moe"), WHOLE) == spec("qwen3_moe")


def test_ranks_that_would_have_nothing() -> None:
    assert "tensor_parallel=7 is more than the model's 6 query heads" in refusal(
        lambda: held(spec(), Shard(0, 7))
    )
    assert "4 rows in a feed-forward" in refusal(lambda: held(spec(intermediate_size=4), Shard(4, 5)))
    few = spec("qwen3_moe", moe_intermediate_size=2)
    assert "2 rows in an expert; give a tensor_parallel of at most 2" in refusal(
        lambda: held(few, Shard(0, 3))
    )
    assert "3 tokens in its vocabulary" in refusal(lambda: held(spec(vocab_size=3), Shard(0, 4)))
    # What no layer has need not be enough.
    assert held(spec("mixtral", intermediate_size=6), Shard(5, 6)).expert_inner == range(5, 6)
    assert not held(spec("qwen3_moe", intermediate_size=1, mlp_only_layers=[]), Shard(0, 2)).inner
    for call in (lambda: layouts("llama", Shard(0, 7)), lambda: kv_layout(spec(), "float16", 4, Shard(0, 7))):
        assert "tensor_parallel=7 is" in refusal(call)


@pytest.mark.parametrize(("rank", "ranks"), [(0, 0), (1, 1), (-1, 2), (2, 2), (0, -1)])
def test_no_such_rank(rank: int, ranks: int) -> None:
    assert f"rank {rank} of {ranks} does not exist" in refusal(lambda: Shard(rank, ranks))


# ---- layouts -----------------------------------------------------------------------------------------------


def places(source: TensorSlice) -> set[tuple[int, ...]]:
    """Of every element of the tensor that is taken."""
    cuts = [range(extent) for extent in source.shape]
    if source.rows is not None:
        cuts[0] = source.rows
    if source.columns is not None:
        cuts[1] = source.columns
    found = set(product(*cuts))
    assert len(found) == prod(source.taken)
    return found


@EACH
@RANKS
def test_every_element_is_laid_out_once(family: str, ranks: int) -> None:
    counts: dict[str, Counter[tuple[int, ...]]] = {}
    names = {
        source.tensor: source.shape
        for group in layouts(family)
        for field in group.fields
        for source in field.sources
    }
    for rank in range(ranks):
        for group in layouts(family, Shard(rank, ranks)):
            for field in group.fields:
                for source in field.sources:
                    assert source.shape == names[source.tensor]
                    counts.setdefault(source.tensor, Counter()).update(places(source))
    assert counts.keys() == names.keys()
    model = spec(family)
    for name, count in counts.items():
        assert count.keys() == set(product(*map(range, names[name])))
        times = set(count.values())
        if "norm" in name or name.endswith((".gate.weight", ".mlp.gate.weight")):
            assert times == {ranks}
        elif any(part in name for part in ("k_proj", "v_proj")):
            holders = Counter(head for part in all_of(model, ranks) for head in part.kv_heads)
            assert all(count[place] == holders[place[0] // model.head_dim] for place in count)
        else:
            assert times == {1}, name


@EACH
@RANKS
def test_groups_and_fields_are_those_of_the_whole(family: str, ranks: int) -> None:
    for rank in range(ranks):
        mine, model = layouts(family, Shard(rank, ranks)), local_spec(spec(family), Shard(rank, ranks))
        sums = {"out_bias", "down_bias"} if rank else set()
        for group, whole in zip(mine, layouts(family), strict=True):
            assert group.id == whole.id
            assert [field.name for field in group.fields] == [
                field.name for field in whole.fields if field.name not in sums
            ]
            end = 0
            for field in group.fields:
                assert field.offset == -(-end // 256) * 256
                end = field.offset + 2 * prod(field.shape)
                assert prod(field.shape) == sum(prod(source.taken) for source in field.sources)
            assert group.size == -(-end // 256) * 256
        shapes = {str(group.id): {field.name: field.shape for field in group.fields} for group in mine}
        assert shapes["embedding"]["embedding"] == (model.vocab_size, 12)
        assert shapes["attention.1"]["qkv"] == (model.query_size + 2 * model.kv_heads * model.head_dim, 12)
        assert shapes["attention.1"]["out"] == (12, model.query_size)
        if not model.is_moe(1):
            assert shapes["ffn.1"]["gate_up"] == (2 * model.intermediate_size, 12)
            assert shapes["ffn.1"]["down"] == (12, model.intermediate_size)
        if model.moe is not None:
            assert shapes["expert.0.2"] == {
                "gate_up": (2 * model.moe.intermediate_size, 12),
                "down": (12, model.moe.intermediate_size),
            }
            assert shapes["router.0"]["router"] == (3, 12)


@EACH
def test_one_rank_of_one_is_the_whole_model(family: str) -> None:
    assert layouts(family, WHOLE) == layouts(family)
    sources = [source for group in layouts(family) for field in group.fields for source in field.sources]
    assert {(source.rows, source.columns) for source in sources} == {(None, None)}
    assert kv_layout(spec(family), "float16", 8, WHOLE) == kv_layout(spec(family), "float16", 8)


def test_kv_of_a_rank() -> None:
    found = [kv_layout(spec("qwen3"), "float16", 8, Shard(rank, 4)) for rank in range(4)]
    assert [layout.planes[0][0].heads for layout in found] == [1, 2, 1, 2]
    assert sum(layout.block_bytes for layout in found) == kv_layout(spec("qwen3"), "float16", 8).block_bytes


# ---- manifests ---------------------------------------------------------------------------------------------


def manifest(shard: Shard) -> Manifest:
    runs = place(layouts("qwen3", shard))
    full = tuple(
        type(run)(run.id, run.offset, run.size, run.fields, bytes(DIGEST_BYTES * len(run.pieces)))
        for run in runs
    )
    return Manifest("ab" * 16, "cd" * 32, "bfloat16", "weights.bin", {"config.json": "ef" * 32}, full, shard)


def test_a_manifest_says_of_which_shard_it_is() -> None:
    for shard in (WHOLE, Shard(0, 2), Shard(1, 2), Shard(2, 3)):
        assert parse(manifest(shard).text(), "m") == manifest(shard)
        manifest(shard).check(layouts("qwen3", shard), "m")
    for one, other in pairwise([WHOLE, Shard(0, 2), Shard(1, 3)]):
        assert "is not group" in refusal(
            lambda one=one, other=other: manifest(one).check(layouts("qwen3", other), "m"), CheckpointError
        )
    assert list(json.loads(manifest(WHOLE).text())) == [
        *("format", "version", "fingerprint", "config", "dtype", "store", "files", "groups", "checksum"),
    ]


@pytest.mark.parametrize(
    "value",
    [None, [], [0], [0, 1], [1, 1], [2, 2], [-1, 2], [0, 2, 3], ["0", 2], [0, 2.0], [False, True], {}, 2],
)
def test_a_manifest_of_no_shard(value: object) -> None:
    body = json.loads(manifest(Shard(0, 2)).text())
    del body["checksum"]
    assert parse(seal(body), "m") == manifest(Shard(0, 2))
    body["shard"] = value
    assert "m is of the shard" in refusal(lambda: parse(seal(body), "m"), CheckpointError)
