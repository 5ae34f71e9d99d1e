"""MXFP4 as gpt-oss has it, read expert by expert and rank by rank, against what transformers and the formula
say the tensors stand for."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import _convert_moe_packed_tensors

import tiny
from penstock.arch.formats import mxfp4
from penstock.arch.formats.dense import DENSE
from penstock.arch.formats.format import TensorSlice, WeightFormat
from penstock.arch.formats.methods import read_format
from penstock.arch.layout import ALIGNMENT, Field, GroupId, GroupKind, GroupLayout, MatrixLayout
from penstock.arch.spec import MoeSpec
from penstock.arch.stacks import stacked_expert
from penstock.base.errors import CheckpointError
from penstock.weights.checkpoint.reader import Checkpoint
from penstock.weights.streaming.views import group_views
from quantised import E2M1

AT, EXPERTS, HIDDEN, INNER = "model.layers.0.mlp", 5, 96, 160
CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
}  # fmt: skip


def stacks() -> dict[str, Tensor]:
    """All codes, and exponents from the least to the largest whose numbers float32 has."""
    rng = torch.Generator().manual_seed(0)
    found = {}
    for name, height, width in (("gate_up_proj", 2 * INNER, HIDDEN), ("down_proj", HIDDEN, INNER)):
        sizes = EXPERTS, height, width // 32
        at = f"{AT}.experts.{name}"
        found[f"{at}_blocks"] = torch.randint(256, (*sizes, 16), generator=rng).to(torch.uint8)
        exponents = torch.randint(100, 140, sizes, generator=rng)
        exponents[:, 0], exponents[:, 1], exponents[:, -1] = 0, 1, 250
        found[f"{at}_scales"] = exponents.to(torch.uint8)
        found[f"{at}_bias"] = torch.randn(EXPERTS, height, generator=rng).bfloat16()
    return found


def written(name: str, expert: int) -> Tensor:
    """The matrix `[out, in]` by the formula, one number after the other."""
    blocks, scales = (stacks()[f"{AT}.experts.{name}_{part}"][expert] for part in ("blocks", "scales"))
    rows = []
    for row, exponents in zip(blocks.tolist(), scales.tolist(), strict=True):
        numbers = list[float]()
        for block, exponent in zip(row, exponents, strict=True):
            for byte in block:
                numbers += [
                    float(E2M1[byte & 15]) * 2.0 ** (exponent - 127),
                    float(E2M1[byte >> 4]) * 2.0 ** (exponent - 127),
                ]
        rows.append(numbers)
    return torch.tensor(rows, dtype=torch.float64).float()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that holds the stacks besides its own weights."""
    path = tmp_path_factory.mktemp("mxfp4") / "model"
    path.mkdir()
    source = tiny.checkpoint("llama")
    (path / "config.json").write_text((source / "config.json").read_text())
    save_file(
        load_file(source / "model.safetensors") | stacks(), path / "model.safetensors", {"format": "pt"}
    )
    return path


def laid_out(expert: int, inner: range) -> GroupLayout:
    """An expert's group as a family would lay it out."""
    format = read_format({"quantization_config": CONFIG}, "config.json", "bfloat16")
    fields, matrices, offset = list[Field](), list[MatrixLayout](), 0

    def add(name: str, kind: WeightFormat, sources: list[TensorSlice]) -> tuple[tuple[str, Field], ...]:
        nonlocal offset
        parts = []
        for stored in kind.stored("float32", sources):
            field = Field(
                f"{name}.{stored.name}", stored.shape, offset, stored.sources, stored.dtype, stored.repack
            )
            parts.append((stored.name, field))
            offset += -(-field.size // ALIGNMENT) * ALIGNMENT
        fields.extend(field for _, field in parts)
        return tuple(parts)

    moe = MoeSpec(EXPERTS, 2, INNER, True, bias=True)
    tensors = stacked_expert(AT, expert, moe, HIDDEN, format, inner)
    for name in ("gate_up", "down"):
        sources = tensors[name]
        its = format.of(sources[0].tensor)
        assert isinstance(its, mxfp4.StackedFloat4)
        cut = its.cut(sources)
        shape = sum(one.taken[0] for one in sources), sources[0].taken[1]
        matrices.append(MatrixLayout(name, shape, cut, add(name, cut, sources)))
    for name in ("gate_up_bias", "down_bias"):
        add(name, DENSE, tensors[name])
    return GroupLayout(GroupId(GroupKind.EXPERT, 0, expert), tuple(fields), offset, tuple(matrices))


@pytest.mark.parametrize("inner", [range(INNER), range(53), range(53, INNER), range(64, 144)])
@pytest.mark.parametrize("expert", [0, 3, EXPERTS - 1])
def test_expert(expert: int, inner: range, model: Path) -> None:
    tensors, layout = stacks(), laid_out(expert, inner)
    whole = torch.empty(layout.size, dtype=torch.uint8)
    with Checkpoint.open(model) as checkpoint:
        for start in range(0, layout.size, 4 * ALIGNMENT):
            checkpoint.read_piece(layout, start, whole[start : start + 4 * ALIGNMENT])
    views = group_views(layout, whole)
    gate_up, down = (
        _convert_moe_packed_tensors(
            tensors[f"{AT}.experts.{name}_blocks"],
            tensors[f"{AT}.experts.{name}_scales"],
            dtype=torch.float32,
        )[expert].T
        for name in ("gate_up_proj", "down_proj")
    )
    mine = slice(inner.start, inner.stop)
    want = {"gate_up": torch.cat([gate_up[0::2][mine], gate_up[1::2][mine]]), "down": down[:, mine]}
    for name, matrix in want.items():
        assert torch.equal(views.matrices[name].dequantised(matrix), matrix)
    if inner == range(INNER):
        assert torch.equal(gate_up, written("gate_up_proj", expert))
        assert torch.equal(down, written("down_proj", expert))
    bias = tensors[f"{AT}.experts.gate_up_proj_bias"][expert].float()
    assert torch.equal(views.vectors["gate_up_bias."], torch.cat([bias[0::2][mine], bias[1::2][mine]]))
    assert torch.equal(views.vectors["down_bias."], tensors[f"{AT}.experts.down_proj_bias"][expert].float())


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("gate_up_proj_blocks", lambda one: one[:, :-2], "calls for at least 5 of"),
        ("gate_up_proj_blocks", lambda one: one[:4], "calls for at least 5 of"),
        ("gate_up_proj_scales", lambda one: one.flatten(1), "shape"),
        ("down_proj_scales", lambda one: one.index_fill(2, torch.tensor(1), 255), "no numbers"),
        ("down_proj_scales", lambda one: one.float(), "exponents"),
    ],
)
def test_broken_files(name: str, change: object, said: str, model: Path, tmp_path: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    key = f"{AT}.experts.{name}"
    tensors[key] = change(tensors[key]).contiguous()  # type: ignore[operator]
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    layout = laid_out(EXPERTS - 1, range(INNER))
    with Checkpoint.open(tmp_path) as checkpoint, pytest.raises(CheckpointError) as caught:
        checkpoint.read_piece(layout, 0, torch.empty(layout.size, dtype=torch.uint8))
    assert said in str(caught.value)
    assert key in str(caught.value)
    assert str(tmp_path / "model.safetensors") in str(caught.value)


def test_what_is_not_converted() -> None:
    format = read_format({"quantization_config": CONFIG}, "config.json", "bfloat16")
    assert format.of("model.layers.0.self_attn.q_proj.weight") == DENSE
    assert format.of("model.layers.0.mlp.router.weight") == DENSE
    assert format.of("lm_head.weight") == DENSE
    assert format.of("model.layers.7.mlp.experts.down_proj") == mxfp4.StackedFloat4()
    listed = json.loads(json.dumps(CONFIG)) | {"modules_to_not_convert": ["model.layers.7.mlp.experts.*"]}
    other = read_format({"quantization_config": listed}, "config.json", "bfloat16")
    assert other.of("model.layers.7.mlp.experts.down_proj") == DENSE
    assert other.of("model.layers.6.mlp.experts.down_proj") == mxfp4.StackedFloat4()


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_codes_that_are_no_bytes_are_refused(name: str) -> None:
    source = TensorSlice(f"{AT}.experts.{name}", (64, 64))
    codes = mxfp4.StackedFloat4().cut([source]).stored("float32", [source])[0]
    assert codes.repack is not None
    bytes_ = torch.zeros(64, 2, 16, dtype=torch.uint8)
    assert codes.repack([bytes_]).shape == codes.shape
    for wrong in (bytes_.float(), bytes_.bfloat16(), bytes_.int()):
        with pytest.raises(CheckpointError, match=rf"{name} has codes of .*fetch the weights again"):
            codes.repack([wrong])
