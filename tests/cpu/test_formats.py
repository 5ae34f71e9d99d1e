"""A storage format is one file: one that penstock does not have is added from outside, and everything that
handles weights handles it: checkpoints, packs, streaming, ranks, plans and bounds."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import tiny
import toys
from members import pass_of
from packs import read_group
from penstock.api.llm import LLM
from penstock.arch import bounds
from penstock.arch.formats.dense import DENSE
from penstock.arch.layout import GroupKind, group_layouts
from penstock.base.errors import CheckpointError, UnsupportedModelError
from penstock.cli.main import main
from penstock.ops.linear import add_linear, gated, linear
from penstock.ops.matrix import Matrix
from penstock.step.params import SamplingParams
from penstock.weights.checkpoint.reader import Checkpoint
from penstock.weights.pack.reader import Pack
from penstock.weights.pack.writer import write_pack
from penstock.weights.streaming import source
from penstock.weights.streaming.residency import padded
from penstock.weights.streaming.source import RandomSource
from penstock.weights.streaming.views import group_views

GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=5)
Pair = tuple[Path, Path]


@pytest.fixture(autouse=True)
def known() -> Iterator[None]:
    with toys.known():
        yield


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    made: dict[str, Pair] = {}

    def pair(name: str) -> Pair:
        if name not in made:
            made[name] = toys.checkpoints(name, tmp_path_factory.mktemp(name))
        return made[name]

    return pair


def outputs(path: Path, **settings: object) -> list[object]:
    """By plain torch: kernels between products are those of models of few bits alone, and round otherwise."""
    usual = {"device": "cpu", "dtype": "float32", "max_length": 64, "kernels": False}
    with LLM(path, **usual | settings) as llm:  # type: ignore[arg-type]
        assert settings.get("device_memory") is None or llm.booted.weights.stats().streams
        return [(one.tokens, one.logprobs) for one in llm.generate(tiny.prompts()[1:4], GREEDY)]


@pytest.mark.parametrize("name", ["llama", "llama_biases", "qwen3", "mixtral"])
def test_outputs_are_those_of_the_dense_model(pairs: Callable[[str], Pair], name: str) -> None:
    few, dense = pairs(name)
    assert outputs(few) == outputs(dense)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_packs(pairs: Callable[[str], Pair], name: str, tmp_path: Path) -> None:
    few, dense = pairs(name)
    with Checkpoint.open(few) as checkpoint:
        write_pack(checkpoint, tmp_path / "pack", "float32")
        with Pack.open(tmp_path / "pack") as pack:
            for layout in pack.layouts:
                read, packed = (torch.empty(layout.size, dtype=torch.uint8) for _ in range(2))
                checkpoint.read_piece(layout, 0, read)
                read_group(pack, layout.id, packed, check=True)
                assert torch.equal(read, packed)
                for start in range(0, layout.size, 512):
                    piece = torch.empty(512, dtype=torch.uint8)
                    checkpoint.read_piece(layout, start, piece)
                    assert torch.equal(piece[: layout.size - start], read[start : start + 512])
    assert outputs(tmp_path / "pack") == outputs(dense)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_streamed_from_memory(pairs: Callable[[str], Pair], name: str) -> None:
    few, dense = pairs(name)
    streamed = [pass_of(path, 0, part=0.4) for path in (few, dense)]
    resident = pass_of(few, 0)
    for one, other, third in zip(*streamed, resident, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, third)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("part", [1.0, 0.4])
def test_ranks(pairs: Callable[[str], Pair], name: str, part: float) -> None:
    few, dense = pairs(name)
    more = {} if part == 1 else {"part": part}
    for mine, theirs in zip(pass_of(few, 2, **more), pass_of(dense, 2, **more), strict=True):
        assert torch.equal(mine, theirs)


def test_matrices_may_be_excepted(tmp_path: Path) -> None:
    few, dense = toys.checkpoints("llama", tmp_path, dense=["down_proj", "layers.0.self_attn"])
    with Checkpoint.open(few) as checkpoint:
        layouts = {one.id: one for one in group_layouts(checkpoint.spec, checkpoint.names, "float32")}
    formats = {
        (id.kind, id.layer, one.name): one.format for id, group in layouts.items() for one in group.matrices
    }
    assert formats[GroupKind.ATTENTION, 0, "qkv"] == formats[GroupKind.FFN, 1, "down"] == DENSE
    assert formats[GroupKind.ATTENTION, 1, "qkv"] == formats[GroupKind.FFN, 1, "gate_up"] != DENSE
    assert outputs(few) == outputs(dense)


@pytest.mark.parametrize("dense", ["q_proj", "k_proj", "up_proj"])
def test_matrices_that_are_fused_may_rest_in_several_formats(tmp_path: Path, dense: str) -> None:
    few, same = toys.checkpoints("llama", tmp_path, dense=[dense])
    assert outputs(few) == outputs(same)
    for one, other in zip(pass_of(few, 2, part=0.4), pass_of(same, 2, part=0.4), strict=True):
        assert torch.equal(one, other)


def test_bytes_and_operations(pairs: Callable[[str], Pair]) -> None:
    few, dense = pairs("llama")
    with Checkpoint.open(few) as mine, Checkpoint.open(dense) as theirs:
        small, large = (group_layouts(one.spec, one.names, "float32") for one in (mine, theirs))
        assert bounds.parameters(small) == bounds.parameters(large)
        assert bounds.prefill_operations(mine.spec, small, [9]) == bounds.prefill_operations(
            theirs.spec, large, [9]
        )
        for one, other in zip(small, large, strict=True):
            inside = one.id.kind in (GroupKind.ATTENTION, GroupKind.FFN)
            assert one.size < 0.5 * other.size if inside else one == other
        assert mine.fingerprint() != theirs.fingerprint()


def test_plan_counts_what_is_stored(pairs: Callable[[str], Pair], capsys: pytest.CaptureFixture[str]) -> None:
    weights = []
    for path in pairs("llama"):
        assert (
            main(["plan", str(path), "--machine", "cpu", "--dtype", "float32", "--context", "64", "--json"])
            == 0
        )
        weights.append(json.loads(capsys.readouterr().out)["weights"])
        with Checkpoint.open(path) as checkpoint:
            layouts = group_layouts(checkpoint.spec, checkpoint.names, "float32")
        assert weights[-1] == sum(map(padded, layouts))
    assert weights[0] < 0.5 * weights[1]


def test_products() -> None:
    values = torch.randint(-127, 128, (12, 8), dtype=torch.int8)
    scale = torch.rand(12)
    few = Matrix(toys.Int8(), (12, 8), {"values": values, "scale": scale})
    dense = Matrix.of(values.float() * scale[:, None])
    x, onto = torch.randn(5, 8), torch.zeros(5, 12)
    assert few.dense is None
    assert torch.equal(linear(x, few), linear(x, dense))
    assert torch.equal(linear(x, few, torch.ones(12)), linear(x, dense, torch.ones(12)))
    assert torch.equal(gated(x, few), gated(x, dense))
    add_linear(x, few, onto)
    assert torch.equal(onto, linear(x, dense))


def test_random_weights_have_the_dtypes_of_the_format(pairs: Callable[[str], Pair]) -> None:
    with Checkpoint.open(pairs("llama")[0]) as checkpoint:
        layout = group_layouts(checkpoint.spec, checkpoint.names, "bfloat16")[1]
    place = torch.empty(layout.size, dtype=torch.uint8)
    RandomSource("bfloat16").read(layout, 0, place, False)
    qkv = group_views(layout, place).matrices["qkv"]
    assert qkv.parts["values"].dtype == torch.int8
    assert qkv.parts["values"].unique().numel() > 200
    assert 0.01 < qkv.parts["scale"].std() < 0.03


def test_random_numbers_are_made_once_for_all_threads(pairs: Callable[[str], Pair]) -> None:
    """They take 96 MiB while they are made."""
    with Checkpoint.open(pairs("llama")[0]) as checkpoint:
        layout = group_layouts(checkpoint.spec, checkpoint.names, "bfloat16")[1]
    source.random_numbers.cache_clear()
    made = RandomSource("bfloat16", seed=1)
    dtypes = {field.dtype for field in layout.fields if not field.name.endswith("norm")}

    def read(_: int) -> None:
        made.read(layout, 0, torch.empty(layout.size, dtype=torch.uint8), False)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(read, range(32)))
    assert source.random_numbers.cache_info().misses == len(dtypes | {"bfloat16"})


@pytest.mark.parametrize("kind", ["int16", "float32"])
def test_a_tensor_of_another_dtype_is_refused(
    pairs: Callable[[str], Pair], tmp_path: Path, kind: str
) -> None:
    from safetensors.torch import load_file, save_file

    few = tmp_path / "few"
    few.mkdir()
    for file in pairs("llama")[0].iterdir():
        (few / file.name).write_bytes(file.read_bytes())
    tensors = load_file(few / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name] = tensors[name].to(getattr(torch, kind))
    save_file(tensors, few / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{name} has dtype"):
        outputs(few)


def test_an_unknown_method_is_refused_by_name(pairs: Callable[[str], Pair], tmp_path: Path) -> None:
    config = json.loads((pairs("llama")[0] / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "unheard of"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=r"key 'quantization_config'.*toy_int8"):
        Checkpoint.open(tmp_path)
