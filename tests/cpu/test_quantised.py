"""Weights of few bits, read from checkpoints as quantisers write them: the numbers that they stand for, and
the tokens of the models that they are."""

import functools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from members import pass_of
from penstock.api.llm import LLM
from penstock.arch.formats.dense import DENSE
from penstock.arch.formats.format import FileTensor
from penstock.arch.formats.methods import read_format, with_stored
from penstock.arch.layout import group_layouts
from penstock.arch.shards import Shard
from penstock.base.errors import CheckpointError, UnsupportedModelError
from penstock.step.params import SamplingParams
from penstock.weights.checkpoint.reader import Checkpoint
from penstock.weights.checkpoint.shape import Shape
from penstock.weights.pack.reader import Pack
from penstock.weights.pack.writer import write_pack
from penstock.weights.streaming.source import PackSource, RandomSource
from penstock.weights.streaming.stream import group_views
from quantised import (
    ALIKE,
    EMBEDDING,
    HEAD,
    SCHEMES,
    awq,
    checkpoints,
    fp8,
    gptq,
    matrices,
    matrix_of,
    packed_rows,
    same_matrices,
    sized,
    with_ends,
)

GREEDY = SamplingParams(temperature=0, max_tokens=6)
MIXTURES = ("qwen2_moe", "glm4_moe", "minimax_m2")
"""Those with shared experts, gates, corrections of routers, and heads of which a part is rotated."""
UNLIKE = [name for name in SCHEMES if name not in ALIKE]
ENDS = [name for name, one in SCHEMES.items() if one.config["quant_method"] in ("gptq", "compressed-tensors")]


@functools.cache
def small_mixture() -> Path:
    few = {"num_hidden_layers": 2, "num_local_experts": 4}
    return tiny.write(tiny.CASES["mixtral"], tiny.folder() / "small mixture", **few)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_numbers(scheme: str, tmp_path: Path) -> None:
    few, dense = checkpoints(tiny.checkpoint("llama"), tmp_path, SCHEMES[scheme])
    same_matrices(few, dense)


def outputs(path: Path, **settings: object) -> list[object]:
    with LLM(path, device="cpu", dtype="float32", max_length=64, **settings) as llm:  # type: ignore[arg-type]
        assert settings.get("device_memory") is None or llm.booted.weights.stats().streams
        return [(one.tokens, one.logprobs) for one in llm.generate(tiny.prompts()[1:4], GREEDY)]


@pytest.mark.parametrize(
    ("scheme", "name"),
    [
        *((scheme, "llama_biases") for scheme in UNLIKE),
        *((scheme, "qwen3_moe") for scheme in ("gptq_order", "awq", "packed_8", "mxfp4", "nvfp4")),
        *zip(("fp8", "gptq", "awq", "nvfp4"), (*MIXTURES, "qwen2_moe"), strict=True),
    ],
)
def test_tokens(scheme: str, name: str, tmp_path: Path) -> None:
    """Of a model without experts, the logits that they are drawn from."""
    few, dense = checkpoints(tiny.checkpoint(name), tmp_path, SCHEMES[scheme])
    if name == "llama_biases":
        logits = pass_of(dense, 0, kernels=False)
        close(pass_of(few, 0), logits)
        assert all(map(torch.equal, pass_of(few, 0, kernels=False), logits))
        return
    same = outputs(dense, kernels=False)
    assert outputs(few, kernels=False) == same
    for (mine, its), (theirs, known) in zip(outputs(few), same, strict=True):
        assert mine == theirs
        assert its == pytest.approx(known, abs=1e-4)


@pytest.mark.parametrize(
    ("scheme", "name"),
    [
        *((scheme, "llama") for scheme in SCHEMES if scheme not in ENDS),
        *((scheme, "mixtral") for scheme in UNLIKE),
        *zip(("gptq", "fp8", "nvfp4"), MIXTURES, strict=True),
    ],
)
def test_streamed_and_ranks(scheme: str, name: str, tmp_path: Path) -> None:
    """All are read by ranks, and those that rest unlike others stream and are computed with. For those whose
    ends may be quantised, test_head_and_embedding says so of a model without experts."""
    source = small_mixture() if name == "mixtral" else tiny.checkpoint(name)
    few, dense = checkpoints(source, tmp_path, SCHEMES[scheme])
    if name == "llama":
        same_matrices(few, dense, 2)
        if scheme in UNLIKE:
            close(pass_of(few, 2, kernels=True), pass_of(dense, 2, kernels=False))
        return
    resident = pass_of(few, 0, kernels=True)
    close(resident, pass_of(dense, 0, kernels=False))
    assert all(map(torch.equal, resident, pass_of(few, 0, part=0.4, kernels=True)))
    together = pass_of(dense, 2, kernels=False)
    assert all(map(torch.equal, pass_of(few, 2, part=0.6, kernels=False), together))


def close(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    """But for sums that kernels make in another order."""
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=2e-4, rtol=0)


LISTS = {
    "minimax_m2": ("ignored_layers", ["gate", "e_score_correction_bias", "lm_head"], None),
    "glm4_moe": (
        "modules_to_not_convert",
        ["lm_head", "model.layers.1.mlp.shared_experts", *(f"model.layers.{at}.mlp.gate" for at in range(3))],
        "layers.1.mlp.shared_experts",
    ),
    "qwen2_moe": (
        "modules_to_not_convert",
        ["lm_head", "mlp.gate", "mlp.shared_expert_gate", "model.layers.2.self_attn"],
        "layers.2.self_attn",
    ),
}
"""Lists of modules that stay as they are, as published checkpoints spell them, and what they say more."""


@pytest.mark.parametrize("name", MIXTURES)
def test_lists_of_modules_that_are_not_quantised(name: str, tmp_path: Path) -> None:
    (key, listed, left), scheme = LISTS[name], SCHEMES["fp8"]
    its = replace(scheme, config=scheme.config | {key: listed})
    few, dense = checkpoints(tiny.checkpoint(name), tmp_path, its, {left: None} if left else None)
    mine, theirs = matrices(few), matrices(dense)
    assert all(torch.equal(matrix, theirs[of]) for of, matrix in mine.items())
    assert outputs(few, kernels=False) == outputs(dense, kernels=False)


def test_experts_in_several_formats(tmp_path: Path) -> None:
    """Of one layer all have more bits; of another one has, and one is dense: they stream through the same
    slots, from host memory and from a pack."""
    eight, four = gptq(8, 32, symmetric=False), gptq(4, 32, symmetric=False)
    layer, one, plain = "layers.0.mlp.experts", "layers.1.mlp.experts.2", "layers.1.mlp.experts.4"
    override = {f".*{layer}": {"bits": 8}, f".*{one}": {"bits": 8}, f"-:.*{plain}": {}}
    scheme = replace(four, config=four.config | {"dynamic": override})
    few, dense = checkpoints(
        tiny.checkpoint("qwen3_moe"), tmp_path, scheme, {layer: eight, one: eight, plain: None}
    )
    want = pass_of(dense, 0, kernels=False)
    for part in (0.3, 0.5, 0.7):
        found = pass_of(few, 0, part=part, kernels=False)
        assert all(map(torch.equal, found, want))
    with Checkpoint.open(few) as checkpoint:
        write_pack(checkpoint, tmp_path / "pack", "float32")
    settings = {"device": "cpu", "dtype": "float32", "max_length": 64, "kv_blocks": 40, "kernels": False}
    with LLM(tmp_path / "pack", **settings) as llm:  # type: ignore[arg-type]
        budget = llm.memory.budget
    beside = budget.activations + budget.kv
    device, host = (beside + int(part * budget.weights) for part in (0.5, 0.8))
    with LLM(tmp_path / "pack", **settings, device_memory=device, host_memory=host) as llm:  # type: ignore[arg-type]
        found = [(one.tokens, one.logprobs) for one in llm.generate(tiny.prompts()[1:4], GREEDY)]
        assert llm.memory.weights.read
    assert found == outputs(dense, kernels=False)


@pytest.mark.parametrize(
    ("name", "scheme"),
    [("llama", one) for one in ENDS]
    + [("llama_tied", one) for one in ("packed", "packed_8", "signed", "mxfp8", "mxfp4", "nvfp4")],
)
def test_head_and_embedding(name: str, scheme: str, tmp_path: Path) -> None:
    """Rows of the embedding are looked up and dequantised; a head that it is, or its own, multiplies by few
    bits. Alone, streamed, on ranks that divide the vocabulary, as a pack."""
    its, also = with_ends(SCHEMES[scheme])
    many = tiny.write(tiny.CASES[name], tmp_path / "source", vocab_size=104)
    few, dense = checkpoints(many, tmp_path, its, also=also)
    same_matrices(few, dense, 2)
    if scheme in (*UNLIKE, "fp8_blocks", "fp8_channel"):  # Those that these are like have no ends.
        resident = pass_of(few, 0)
        close(resident, pass_of(dense, 0, kernels=False))
        assert all(map(torch.equal, resident, pass_of(few, 0, part=0.4)))
        together = pass_of(dense, 2, kernels=False)
        close(pass_of(few, 2), together)
        assert all(map(torch.equal, pass_of(few, 2, kernels=False), together))
    with Checkpoint.open(few) as checkpoint:
        layouts = group_layouts(checkpoint.spec, checkpoint.names, "float32")
        ends = [one.format for layout in (layouts[0], layouts[-1]) for one in layout.matrices]
        assert [format != DENSE for format in ends] == [name in also for name in (EMBEDDING, HEAD)][
            : len(ends)
        ]
        if scheme in ALIKE or (name == "llama" and len(also) == 2):  # As a pack with both ends in one.
            return
        write_pack(checkpoint, tmp_path / "pack", "float32")
    assert outputs(tmp_path / "pack", kernels=False) == outputs(dense, kernels=False)


@pytest.mark.parametrize("name", ["llama", "llama_tied"])
def test_embedding_with_one_scale(name: str, tmp_path: Path) -> None:
    """Of FP8, where the config names it among what is converted besides linear modules."""
    whole, blocks = fp8((0, 0), name="weight_scale", flat=True), SCHEMES["fp8"]
    its = replace(blocks, config=blocks.config | {"modules_to_convert": ["embed_tokens"]})
    source = tiny.checkpoint(name)
    few, dense = checkpoints(source, tmp_path, its, {EMBEDDING: whole}, also=(EMBEDDING,))
    for ranks in (0, 2):
        for mine, theirs in zip(
            pass_of(few, ranks, kernels=False), pass_of(dense, ranks, kernels=False), strict=True
        ):
            assert torch.equal(mine, theirs)
    other = its.config | {"modules_to_convert": ["embed_tokens", "ngram_table"]}
    with pytest.raises(UnsupportedModelError, match="modules_to_convert"):
        read_format({"quantization_config": other}, "config.json", "float32")


WHERE_SCALES_ARE = [
    (torch.float32, "weight_scale_inv", None),
    (torch.bfloat16, "scale", None),
    (torch.float32, "qscale_weight", None),
    (torch.float32, "scale", torch.float8_e8m0fnu),
    (torch.float32, "qscale_weight", torch.uint8),
    (torch.float32, "weight_scale", torch.float32),
]
ANNOUNCED = [(16, 16), (128, 128), (16, 16)]


@pytest.mark.parametrize(
    ("at", "announced"), [(at, block) for at in range(3) for block in (ANNOUNCED[at], None)]
)
def test_blocks_follow_from_the_shapes_of_scales(
    at: int, announced: tuple[int, int] | None, tmp_path: Path
) -> None:
    """Whatever config.json says: of experts runs of 8 columns share a scale, of queries rows; keys have one
    scale, the first output projection one for 8 x 32. Alone, on ranks, as a pack."""
    dtype, name, exponents = WHERE_SCALES_ARE[at if announced else at + 3]
    made = [fp8(block, dtype=dtype, name=name, exponents=exponents) for block in BLOCKS]
    few, dense = checkpoints(
        tiny.checkpoint("qwen3_moe"), tmp_path, made[0],
        {"experts": made[1], "q_proj": made[2], "k_proj": made[3], "layers.0.self_attn.o_proj": made[4]},
    )  # fmt: skip
    path = few / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["weight_block_size"] = list(announced) if announced else None
    path.write_text(json.dumps(config))
    mine, theirs = matrices(few), matrices(dense)
    assert all(torch.equal(matrix, theirs[key]) for key, matrix in mine.items())
    with Checkpoint.open(few) as checkpoint:
        listed = checkpoint.config["quantization_config"].get("weight_blocks", {})  # type: ignore[attr-defined]
        for one in ("down", "gate", "up"):
            assert f"model.layers.0.mlp.experts.*.{one}_proj" in listed["1x8"]
        if at != 0:  # Numbers that are right are cut and packed as those of others.
            return
        write_pack(checkpoint, tmp_path / "pack", "float32")
    for one, other in zip(pass_of(few, 2, kernels=False), pass_of(dense, 2, kernels=False), strict=True):
        assert torch.equal(one, other)
    assert outputs(tmp_path / "pack", kernels=False) == outputs(dense, kernels=False)


BLOCKS = [(16, 16), (1, 8), (1, 0), (0, 0), (8, 32)]


def test_experts_of_one_layer_in_several_blocks(tmp_path: Path) -> None:
    whole, rows = fp8((16, 16)), fp8((1, 16))
    few, dense = checkpoints(tiny.checkpoint("qwen3_moe"), tmp_path, whole, {"layers.1.mlp.experts.2.": rows})
    mine, theirs = matrices(few), matrices(dense)
    assert all(torch.equal(matrix, theirs[key]) for key, matrix in mine.items())


@pytest.mark.parametrize(
    ("shape", "grid", "said", "block"),
    [
        ((576, 1408), (5, 11), (128, 128), (128, 128)),
        ((576, 1408), (5, 11), (64, 0), (128, 128)),
        ((576, 1408), (9, 11), (128, 128), (64, 128)),
        ((576, 1408), (1, 44), (128, 128), (576, 32)),
        ((576, 1408), (576,), (128, 128), (1, 1408)),
        ((576, 1408), (576, 1), (1, 0), (1, 0)),
        ((576, 1408), (), (128, 128), (128, 128)),
        ((576, 1408), (1, 1), (128, 128), (128, 128)),
        ((640, 256), (4, 2), (128, 128), (160, 128)),
        ((384, 256), (2, 2), (192, 128), (192, 128)),
        ((384, 256), (2, 2), (128, 128), None),  # 192 and 256 fit.
        ((576, 1408), (7, 11), (128, 128), None),
        ((576, 1408), (0, 11), (128, 128), None),
        ((576, 1408), (5, 2000), (128, 128), None),
        ((576, 1408), (5, 11, 1), (128, 128), None),
        ((576, 1408), (5,), (128, 128), None),
    ],
)  # fmt: skip
def test_which_block_a_scale_has(
    shape: tuple[int, int], grid: tuple[int, ...], said: tuple[int, int], block: tuple[int, int] | None
) -> None:
    config = {"quant_method": "fp8", "weight_block_size": list(said) if all(said) else None}
    if not all(said):
        said = (1, 0)
    name = "model.layers.0.mlp.up_proj"
    tensors = {
        f"{name}.weight": FileTensor("w.safetensors", "float8_e4m3fn", shape),
        f"{name}.scale": FileTensor("s.safetensors", "float32", grid),
    }
    whole = {"quantization_config": config}
    if block is None:
        with pytest.raises(CheckpointError) as caught:
            with_stored(whole, "config.json", tensors, "bfloat16")
        for part in (
            f"s.safetensors: tensor {name}.scale",
            str(list(grid)),
            str(list(shape)),
            "weight_block_size",
        ):
            assert part in str(caught.value)
        return
    format = read_format(with_stored(whole, "config.json", tensors, "bfloat16"), "config.json", "float32").of(
        f"{name}.weight"
    )
    assert format.block == (said if block == said else block)  # type: ignore[attr-defined]


def test_a_file_is_named_that_holds_the_tensor(tmp_path: Path) -> None:
    """Weights and scales may be in several files, and scales have several names."""
    few, _ = checkpoints(tiny.checkpoint("llama"), tmp_path, fp8((16, 16), name="scale"))
    tensors = load_file(few / "model.safetensors")
    (few / "model.safetensors").unlink()
    tensors["model.layers.1.mlp.down_proj.scale"][0, 0] = float("nan")
    parts = {name: f"model-0000{1 + name.endswith('scale')}-of-00002.safetensors" for name in tensors}
    for file in sorted(set(parts.values())):
        save_file({name: one for name, one in tensors.items() if parts[name] == file}, few / file)
    (few / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    with pytest.raises(CheckpointError) as caught:
        outputs(few)
    assert (
        f"{few / 'model-00002-of-00002.safetensors'}: tensor model.layers.1.mlp.down_proj.scale has"
        in str(caught.value)
    )


@pytest.mark.parametrize("scheme", SCHEMES)
def test_random_weights_are_numbers(scheme: str, tmp_path: Path) -> None:
    few, _ = checkpoints(tiny.checkpoint("llama"), tmp_path, SCHEMES[scheme])
    shape = Shape.open(few)
    for layout in group_layouts(shape.spec, shape.names, "float32"):
        whole = torch.empty(layout.size, dtype=torch.uint8)
        RandomSource("float32").read(layout, 0, whole, False)
        for matrix in group_views(layout, whole).matrices.values():
            numbers = matrix.dequantised(torch.empty(0))
            assert numbers.isfinite().all()
            assert 1e-6 < numbers.abs().mean() < 10


@pytest.mark.parametrize(
    ("scheme", "name"),
    [
        ("gptq_asymmetric", "qwen3_moe"),
        ("modelopt_nvfp4", "llama"),
        ("fp8", "llama"),
        ("fp8", "qwen3_moe"),
        ("packed_order", "llama"),
    ],
)
def test_packs(scheme: str, name: str, tmp_path: Path) -> None:
    few, dense = checkpoints(tiny.checkpoint(name), tmp_path, SCHEMES[scheme])
    with Checkpoint.open(few) as checkpoint:
        write_pack(checkpoint, tmp_path / "pack", "float32")
    assert outputs(tmp_path / "pack", kernels=False) == outputs(dense, kernels=False)
    resident, streamed = pass_of(few, 0), pass_of(few, 0, part=0.3)
    assert all(torch.equal(*both) for both in zip(resident, streamed, strict=True))


@pytest.mark.parametrize(
    "scheme", ["gptq_asymmetric", "gptq_order", "nvfp4", "fp8", "fp8_exponents", "packed_odd"]
)
def test_packs_of_ranks(scheme: str, tmp_path: Path) -> None:
    """Each rank of a checkpoint of few bits streams from a pack of its part, as of any other."""
    few, dense = checkpoints(tiny.checkpoint("llama"), tmp_path, SCHEMES[scheme])
    sources = []
    for rank in range(2):
        shard, path = Shard(rank, 2), tmp_path / str(rank)
        with Checkpoint.open(few) as checkpoint:
            assert write_pack(checkpoint, path, "float32", shard=shard)
        pack = Pack.open(path, shard)
        pack.verify()
        sources.append(PackSource(pack))
    found = pass_of(few, 2, source=sources, part=0.6, kernels=False)
    for mine, theirs in zip(found, pass_of(dense, 2, kernels=False), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("scheme", "file"),
    [("gptq_asymmetric", "quantize_config.json"), ("modelopt_nvfp4", "hf_quant_config.json")],
)
def test_settings_beside_the_config(scheme: str, file: str, tmp_path: Path) -> None:
    few, dense = checkpoints(tiny.checkpoint("llama"), tmp_path, SCHEMES[scheme])
    config = json.loads((few / "config.json").read_text())
    settings = config.pop("quantization_config")
    settings.pop("quant_method")
    if file.startswith("hf"):
        settings = {"producer": {"name": "modelopt"}, "quantization": settings}
    (few / "config.json").write_text(json.dumps(config))
    (few / file).write_text(json.dumps(settings))
    assert outputs(few, kernels=False) == outputs(dense, kernels=False)


def broken(tmp_path: Path, scheme: str, change: Callable[[dict[str, torch.Tensor], str], None]) -> str:
    """What is said of a checkpoint of which a tensor of one projection is changed."""
    few, _ = checkpoints(tiny.checkpoint("llama"), tmp_path, SCHEMES[scheme])
    tensors = load_file(few / "model.safetensors")
    change(tensors, "model.layers.1.mlp.down_proj.")
    save_file(
        {name: one.contiguous() for name, one in tensors.items()}, few / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(CheckpointError) as caught:
        outputs(few)
    said = str(caught.value)
    assert str(few / "model.safetensors") in said or "lacks" in said
    assert "model.layers.1.mlp.down_proj" in said
    assert len(said) < 400
    return said


def set_one(name: str, value: float) -> Callable[[dict[str, torch.Tensor], str], None]:
    def change(tensors: dict[str, torch.Tensor], at: str) -> None:
        kind = tensors[at + name].dtype
        flat = tensors[at + name].flatten().float()
        flat[min(3, len(flat) - 1)] = value
        tensors[at + name] = flat.to(kind).view(tensors[at + name].shape)

    return change


def cast(name: str, kind: torch.dtype) -> Callable[[dict[str, torch.Tensor], str], None]:
    def change(tensors: dict[str, torch.Tensor], at: str) -> None:
        tensors[at + name] = tensors[at + name].to(kind)

    return change


def shorter(name: str) -> Callable[[dict[str, torch.Tensor], str], None]:
    def change(tensors: dict[str, torch.Tensor], at: str) -> None:
        tensors[at + name] = tensors[at + name][:-1]

    return change


def without(name: str) -> Callable[[dict[str, torch.Tensor], str], None]:
    def change(tensors: dict[str, torch.Tensor], at: str) -> None:
        del tensors[at + name]

    return change


BROKEN = [
    ("gptq", set_one("scales", float("nan")), "no numbers"),
    ("gptq", set_one("scales", 0), "scales of 0"),
    ("gptq", shorter("scales"), "shape"),
    ("gptq", shorter("qweight"), "shape"),
    ("gptq", cast("qweight", torch.int64), "dtype"),
    ("gptq", lambda tensors, at: tensors[at + "qzeros"].fill_(0x11111111), "zero point of 2"),
    ("gptq", without("qzeros"), "lacks"),
    ("gptq_order", set_one("g_idx", 99), "names group 99"),
    ("gptq_order", set_one("g_idx", -1), "names group -1"),
    ("gptq_order", lambda tensors, at: tensors[at + "g_idx"].zero_(), "uneven"),
    ("gptq_order", without("g_idx"), "lacks"),
    ("gptq_8", lambda tensors, at: tensors[at + "g_idx"].zero_(), "another order"),
    ("awq", set_one("scales", float("inf")), "infinite"),
    ("packed_asymmetric", without("weight_zero_point"), "lacks"),
    ("signed_asymmetric", without("weight_zero_point"), "lacks"),
    ("packed", cast("weight_scale", torch.float64), "dtype"),
    ("packed", shorter("weight_scale"), "shape"),
    ("packed", set_one("weight_shape", 7), "says"),
    ("packed_bfloat16", without("weight_packed"), "lacks"),
    ("fp8", shorter("weight_scale_inv"), "shape"),
    ("fp8", set_one("weight_scale_inv", float("nan")), "no numbers"),
    ("fp8", set_one("weight", float("nan")), "no numbers"),
    ("fp8_exponents", set_one("weight_scale_inv", 255), "no numbers"),
    ("fp8_exponents", cast("weight_scale_inv", torch.float32), "exponents"),
    ("fp8", cast("weight_scale_inv", torch.float8_e4m3fn), "dtype"),
    ("fp8_exponents", cast("weight_scale_inv", torch.int8), "dtype"),
    ("fp8", cast("weight", torch.int8), "dtype"),
    ("mxfp4", set_one("weight_scale", 255), "no numbers"),
    ("nvfp4", set_one("weight_global_scale", 0), "scales of 0"),
    ("nvfp4", cast("weight_scale", torch.uint8), "float8_e4m3fn"),
    ("modelopt_nvfp4", set_one("weight_scale_2", float("inf")), "infinite"),
]


@pytest.mark.parametrize(("scheme", "change", "said"), BROKEN)
def test_broken_files(
    scheme: str, change: Callable[[dict[str, torch.Tensor], str], None], said: str, tmp_path: Path
) -> None:
    assert said in broken(tmp_path, scheme, change)


def test_scales_of_activations_that_weights_need_are_not_passed_over(tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor], at: str) -> None:
        tensors[at + "pre_quant_scale"] = torch.full((80,), 2.0)

    assert "pre_quant_scale" in broken(tmp_path, "modelopt_nvfp4", change)


@pytest.mark.parametrize(
    ("apply", "refused"),
    [
        ([{"targets": ["Linear"], "location": "weight_output"}], False),
        ([{"targets": ["Linear"], "location": "weight_input", "inverse": True}], False),
        ([{"location": "weight_output"}, {"targets": ["re:.*down_proj$"], "location": "input"}], True),
        ([{"location": "k_cache"}], True),
        (["output"], True),
        ("weight_inputs", True),
        (7, True),
    ],
)
def test_rotations_of_activations_are_refused(apply: object, refused: bool, tmp_path: Path) -> None:
    few, dense = checkpoints(tiny.checkpoint("llama"), tmp_path, SCHEMES["packed"])
    config = json.loads((few / "config.json").read_text())
    groups = {"R1": {"type": "hadamard", "apply": apply}}
    config["quantization_config"]["transform_config"] = {"config_groups": groups}
    (few / "config.json").write_text(json.dumps(config))
    if refused:
        with pytest.raises(
            UnsupportedModelError, match=r"transform_config\.config_groups\.R1: key 'apply' is"
        ):
            outputs(few)
    else:
        assert outputs(few, kernels=False) == outputs(dense, kernels=False)


OF_DTYPE = {
    "gptq": lambda dtype: gptq(4, 32, dtype=dtype),
    "gptq_order": lambda dtype: gptq(8, 16, symmetric=False, ordered=True, dtype=dtype),
    "awq": lambda dtype: awq(32, dtype=dtype),
    "packed": lambda dtype: packed_rows(4, 32, dtype=dtype),
}


SMALL, LARGE = 2.0**-22, 2.0**20


@pytest.mark.parametrize(
    ("name", "size", "dtype"),
    [
        *(("gptq", size, torch.bfloat16) for size in (1, SMALL)),
        *(("gptq", size, torch.float32) for size in (SMALL, LARGE)),
        ("gptq", 1, torch.float16),
        *((name, 1, torch.bfloat16) for name in ("gptq_order", "awq", "packed")),
        ("gptq_order", SMALL, torch.bfloat16),
        ("awq", LARGE, torch.float32),
        ("packed", SMALL, torch.float32),
    ],
    ids=str,
)
def test_scales_rest_in_the_dtype_of_the_file(
    name: str, size: float, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Also where the model's dtype, or float16, cannot hold them. Where files have several, in float32."""
    its = sized(OF_DTYPE[name](dtype), size)
    few, dense = checkpoints(tiny.checkpoint("llama"), tmp_path, its)
    config = json.loads((few / "config.json").read_text())
    (few / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    mine, theirs = matrices(few), matrices(dense)
    assert all(torch.equal(matrix, theirs[key]) for key, matrix in mine.items())
    assert dtypes_of_scales(few) == {str(dtype).removeprefix("torch.")}
    if name != "gptq" and size != 1:
        return
    assert all(map(torch.equal, pass_of(few, 2, kernels=False), pass_of(dense, 2, kernels=False)))
    with Checkpoint.open(few) as checkpoint:
        write_pack(checkpoint, tmp_path / "pack", "float32")
    assert outputs(tmp_path / "pack", kernels=False) == outputs(dense, kernels=False)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_beyond_float16_are_refused(scheme: str) -> None:
    """Never infinite in silence: with scales just large enough they are not read, in bfloat16 they are."""
    its, plain = SCHEMES[scheme], torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    its = replace(its, config={**its.config, "stored_scales": "float32"})
    _, numbers = matrix_of(its, plain, dtype="float16")
    large = sized(its, 2.0 ** math.ceil(math.log2(65504 / float(numbers.abs().max()))))
    matrix_of(large, plain, dtype="bfloat16")
    with pytest.raises(CheckpointError, match=r"tensor model.* leads to weights of up to .* float16"):
        matrix_of(large, plain, dtype="float16")


def test_scales_of_several_dtypes_rest_in_float32(tmp_path: Path) -> None:
    small = sized(gptq(4, 32, dtype=torch.bfloat16), 2.0**-40)
    few, dense = checkpoints(tiny.checkpoint("qwen3_moe"), tmp_path, SCHEMES["gptq"], {"experts.3": small})
    mine, theirs = matrices(few), matrices(dense)
    assert all(torch.equal(matrix, theirs[key]) for key, matrix in mine.items())
    assert dtypes_of_scales(few) == {"float32"}


def dtypes_of_scales(path: Path) -> set[str]:
    with Checkpoint.open(path) as checkpoint:
        layouts = group_layouts(checkpoint.spec, checkpoint.names, "float32")
    return {field.dtype for one in layouts for field in one.fields if field.name.endswith(".scale")}


@pytest.mark.parametrize(
    "blocks",
    [7, [], {"": ["a"]}, {"0x16": ["a"]}, {"16x": ["a"]}, {"9" * 5000 + "x1": ["a"]}, {"1x2x3": []},
     {"16x16": "a"}, {"٣x٣": ["a"]}, {"16x16": [7]}],
)  # fmt: skip
def test_blocks_that_are_none_are_refused(blocks: object) -> None:
    config = {"quant_method": "fp8", "weight_blocks": blocks}
    with pytest.raises(UnsupportedModelError, match=r"^config.json: quantization_config.*weight_blocks"):
        read_format({"quantization_config": config}, "config.json", "float32")
