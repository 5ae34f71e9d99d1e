"""Weights of few bits mean what the libraries that write them say: random tensors, with all codes, edges that
divide nothing, negative scales and every order of columns, are compared bit for bit, in float32.

Oracles are compressed-tensors, transformers, and for GPTQ, AWQ and AutoRound formulas of one line in numpy,
which share nothing with the package or with `quantised`. Each matrix is read whole and as ranks cut it.
"""

import functools
from collections.abc import Mapping
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
import transformers
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from compressed_tensors.entrypoints.convert.converters.fp8block_dequantizer import FP8BlockDequantizer
from compressed_tensors.entrypoints.convert.converters.modelopt_nvfp4 import ModelOptNvfp4Converter
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.utils.match import is_match, match_targets
from numpy.typing import NDArray
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.quantization_config import CompressedTensorsConfig, FineGrainedFP8Config

import tiny
from penstock import LLM, SamplingParams
from penstock.arch.formats.dense import DENSE
from penstock.arch.formats.format import matrix
from penstock.arch.formats.integers import Integers
from penstock.arch.formats.methods import read_format
from quantised import SCHEMES, checkpoints

AT = "model.layers.0.self_attn.q_proj."
Tensors = Mapping[str, Tensor]
Draw = torch.Generator


def read(config: Mapping[str, object], tensors: Tensors, height: int, width: int, **cut: range) -> Tensor:
    """The matrix, or a rank's part of it, as the package reads it: float32 `[rows, columns]`."""
    sources = [matrix(f"{AT}weight", height, width, **cut)]
    format = read_format({"quantization_config": config}, "config.json", "float32").of(f"{AT}weight")
    format, parts = format.cut(sources), {}
    for stored in format.stored("float32", sources):
        assert stored.repack is not None
        names = [[source.tensor, *source.also] for source in stored.sources]
        found = [
            next((tensors[f"{one[len(AT) :]}"] for one in some if one[len(AT) :] in tensors), None)
            for some in names
        ]
        parts[stored.name] = stored.repack(found).contiguous()
        assert tuple(parts[stored.name].shape) == stored.shape
        assert parts[stored.name].dtype == getattr(torch, stored.dtype)
    return format.dequantise(parts)


def same(config: Mapping[str, object], tensors: Tensors, wanted: Tensor) -> None:
    """Compares bits, so that also the sign of a zero counts."""
    height, width = wanted.shape
    assert wanted.dtype == torch.float32
    for rows, columns in (
        (None, None),
        (range(3, height - 2), None),
        (None, range(24, width - 8)),
        (None, range(8)),
    ):
        cut = {"rows": rows} if rows else {"columns": columns} if columns else {}
        got = read(config, tensors, height, width, **cut)
        part = wanted[slice(rows.start, rows.stop)] if rows else wanted
        part = part[:, slice(columns.start, columns.stop)] if columns else part
        assert torch.equal(got.view(torch.int32), part.contiguous().view(torch.int32)), cut


def words(seed: Draw, *shape: int) -> Tensor:
    """Words of which every bit is random."""
    return torch.randint(-(2**31), 2**31, shape, generator=seed).int()


def scales(seed: Draw, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Scales of very different sizes, a half of them negative, none 0."""
    sizes = 2.0 ** torch.randint(-12, 4, shape, generator=seed) * (1 + torch.rand(shape, generator=seed))
    return (sizes * torch.where(torch.rand(shape, generator=seed) < 0.5, -1, 1)).to(dtype)


def eights(seed: Draw, *shape: int) -> Tensor:
    """All numbers float8_e4m3fn, but those that are none."""
    codes = torch.randint(0, 254, shape, generator=seed)
    return (codes + (codes >= 127)).to(torch.uint8).view(torch.float8_e4m3fn)


@pytest.fixture(params=range(10 if tiny.THOROUGH else 2))
def seed(request: pytest.FixtureRequest) -> Draw:
    return torch.Generator().manual_seed(request.param)


# ---- formulas: GPTQ, AWQ, AutoRound


def codes_of(packed: Tensor, bits: int, axis: int) -> NDArray[np.int64]:
    """Codes of words along an axis, the first in the low bits."""
    whole = np.repeat(packed.numpy().view(np.uint32).astype(np.int64), 32 // bits, axis)
    shifts = np.arange(whole.shape[axis]) % (32 // bits) * bits
    found: NDArray[np.int64] = whole >> (shifts[:, None] if axis == 0 else shifts) & ((1 << bits) - 1)
    return found


def product(
    codes: NDArray[np.int64], zeros: NDArray[np.int64], scale: Tensor, groups: NDArray[np.int64]
) -> Tensor:
    """W[k, n] = s[g(k), n] * (q[k, n] - z[g(k), n]), transposed."""
    number = (codes - zeros[groups]).astype(np.float32) * scale.float().numpy()[groups]
    return torch.from_numpy(np.ascontiguousarray(number.T))


def groups_of(seed: Draw, width: int, group: int, *, ordered: bool) -> NDArray[np.int64]:
    runs = torch.arange(width) // (group if group > 0 else width)
    found: NDArray[np.int64] = (runs[torch.randperm(width, generator=seed)] if ordered else runs).numpy()
    return found


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("group", "ordered"), [(16, False), (16, True), (128, False), (-1, False), (-1, True), (24, True)]
)
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_gptq(
    seed: Draw, version: str, bits: int, group: int, ordered: bool, symmetric: bool, dtype: torch.dtype
) -> None:
    """Version 1 has one less in each zero point, taken from whole words as GPTQModel takes it."""
    height, width, each = 40, 160, 32 // bits
    groups = groups_of(seed, width, group, ordered=ordered)
    count = int(groups.max()) + 1
    middle = int(("8" if bits == 4 else "80") * each, 16)
    middle -= 2**32 if middle >= 2**31 else 0
    zeros = (
        torch.full((count, height // each), middle).int() if symmetric else words(seed, count, height // each)
    )
    ones = np.uint32(0x11111111 if bits == 4 else 0x01010101)
    stored = (
        torch.from_numpy((zeros.numpy().view(np.uint32) - ones).view(np.int32))
        if version == "gptq"
        else zeros
    )
    scale = scales(seed, count, height, dtype=dtype)
    scale = scale.half().to(dtype)  # What rests is float16.
    tensors = {"qweight": words(seed, width // each, height), "qzeros": stored, "scales": scale}
    tensors |= {"g_idx": torch.from_numpy(groups).int()} if ordered else {}
    config = {
        "quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "desc_act": ordered,
        "checkpoint_format": version,
    }  # fmt: skip
    same(
        config,
        tensors,
        product(codes_of(tensors["qweight"], bits, 0), codes_of(zeros, bits, 1), scale, groups),
    )


@pytest.mark.parametrize("group", [16, 128, -1])
@pytest.mark.parametrize("layout", ["auto_gptq", "gptqmodel"])
def test_auto_round(seed: Draw, layout: str, group: int) -> None:
    """The layout gptqmodel has zero points as they are, the others one less."""
    height, width = 40, 160
    groups = groups_of(seed, width, group, ordered=False)
    scale, zeros = (
        scales(seed, int(groups.max()) + 1, height, dtype=torch.float16),
        words(seed, int(groups.max()) + 1, 5),
    )
    tensors = {"qweight": words(seed, width // 8, height), "qzeros": zeros, "scales": scale}
    config = {
        "quant_method": "auto-round", "bits": 4, "group_size": group, "sym": False, "data_type": "int",
        "packing_format": f"auto_round:{layout}",
    }  # fmt: skip
    real = torch.from_numpy(
        (zeros.numpy().view(np.uint32) + np.uint32(layout == "auto_gptq") * np.uint32(0x11111111)).view(
            np.int32
        )
    )
    same(config, tensors, product(codes_of(tensors["qweight"], 4, 0), codes_of(real, 4, 1), scale, groups))


@pytest.mark.parametrize("group", [16, 24, 128, -1])
@pytest.mark.parametrize("method", ["awq", "auto-round"])
def test_awq(seed: Draw, group: int, method: str) -> None:
    height, width = 40, 160
    groups = groups_of(seed, width, group, ordered=False)
    count = int(groups.max()) + 1
    tensors = {
        "qweight": words(seed, width, height // 8),
        "qzeros": words(seed, count, height // 8),
        "scales": scales(seed, count, height, dtype=torch.float16),
    }
    # Nibble i of a word is column 8w + (0, 2, 4, 6, 1, 3, 5, 7)[i].
    places = np.arange(height) // 8 * 8 + np.argsort([0, 2, 4, 6, 1, 3, 5, 7])[np.arange(height) % 8]
    codes, zeros = (codes_of(tensors[name], 4, 1)[:, places] for name in ("qweight", "qzeros"))
    wanted = product(codes, zeros, tensors["scales"], groups)
    config = {"quant_method": method, "bits": 4, "group_size": group}
    config |= (
        {"zero_point": True, "version": "gemm"}
        if method == "awq"
        else {"sym": False, "packing_format": "auto_round:auto_awq"}
    )
    same(config, tensors, wanted)
    if group in (16, -1):
        converter = AutoAWQConverter(group_size=group, ignore=())
        made = converter.process({f"{AT}{name}": one.clone() for name, one in tensors.items()})
        made = {name.removeprefix(AT): one for name, one in made.items()} | {
            "weight_scale": tensors["scales"].t().float()
        }
        scheme = {
            "num_bits": 4,
            "type": "int",
            "symmetric": False,
            "strategy": "group",
            "group_size": width if group < 0 else group,
        }
        assert torch.equal(decompressed("pack-quantized", scheme, made), wanted)


# ---- compressed-tensors


def decompressed(kind: str, weights: Mapping[str, object], tensors: Tensors) -> Tensor:
    """The weight as compressed-tensors has it."""
    scheme = QuantizationScheme(targets=["Linear"], weights=dict(weights))
    compressor = BaseCompressor.get_value_from_registry(kind)
    made: Tensor = compressor.decompress(dict(tensors), scheme)["weight"]
    return made


def asked(kind: str, weights: Mapping[str, object]) -> dict[str, object]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("height", "width", "group"), [(40, 160, 16), (13, 96, 32), (41, 83, 0), (9, 75, 15)]
)
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_pack_quantized(
    seed: Draw, bits: int, symmetric: bool, height: int, width: int, group: int, kept: torch.dtype
) -> None:
    """With odd widths, and bits behind the last codes that mean nothing."""
    count = -(-width // group) if group else 1
    scale = scales(seed, height, count).to(kept)
    tensors = {
        "weight_packed": words(seed, height, -(-width * bits // 32)),
        "weight_scale": scale,
        "weight_shape": torch.tensor([height, width]),
    }
    if not symmetric:
        tensors["weight_zero_point"] = words(seed, -(-height * bits // 32), count)
    weights: dict[str, object] = {"num_bits": bits, "type": "int", "symmetric": symmetric}
    weights |= {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    kind = "pack-quantized"
    same(
        asked(kind, weights), tensors, decompressed(kind, weights, tensors | {"weight_scale": scale.float()})
    )


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_pack_quantized_in_another_order(seed: Draw, bits: int, symmetric: bool) -> None:
    """Releases until August 2026 write `weight_g_idx`. Columns that are sorted by it are what the library
    reads today."""
    height, width, group = 13, 96, 16
    groups = torch.arange(width)[torch.randperm(width, generator=seed)] // group
    packed, scale = words(seed, height, width * bits // 32), scales(seed, height, width // group)
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group",
        "group_size": group,
    }
    tensors = {"weight_packed": packed, "weight_scale": scale, "weight_shape": torch.tensor([height, width])}
    if not symmetric:
        tensors["weight_zero_point"] = words(seed, -(-height * bits // 32), width // group)
    codes = codes_of(packed, bits, 1)
    sorts = groups.argsort(stable=True).numpy()
    each = 32 // bits
    there = (codes[:, sorts].reshape(height, -1, each) << (np.arange(each) * bits)).sum(-1).astype(np.uint32)
    by_group = tensors | {"weight_packed": torch.from_numpy(there.view(np.int32))}
    wanted = torch.empty(height, width)
    wanted[:, sorts] = decompressed("pack-quantized", weights, by_group)
    same(
        asked("pack-quantized", weights | {"actorder": "group"}),
        tensors | {"weight_g_idx": groups.int()},
        wanted,
    )


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("strategy", ["channel", "tensor", "group"])
@pytest.mark.parametrize("kind", ["int-quantized", "naive-quantized"])
def test_int_quantized(seed: Draw, symmetric: bool, strategy: str, kind: str) -> None:
    height, width = 41, 96
    shape = {"channel": (height, 1), "tensor": (1,), "group": (height, 6)}[strategy]
    tensors = {
        "weight": torch.randint(-128, 128, (height, width), generator=seed).to(torch.int8),
        "weight_scale": scales(seed, *shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = torch.randint(-128, 128, shape, generator=seed).to(torch.int8)
    weights: dict[str, object] = {"num_bits": 8, "type": "int", "symmetric": symmetric, "strategy": strategy}
    weights |= {"group_size": 16} if strategy == "group" else {}
    wanted = decompressed(kind, weights, tensors)
    same(asked(kind, weights), tensors, wanted)
    if strategy == "channel":  # A number for each row may have one dimension.
        flat = {name: one.flatten() if name != "weight" else one for name, one in tensors.items()}
        same(asked(kind, weights), flat, wanted)


@pytest.mark.parametrize("strategy", ["tensor", "channel", "block"])
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_float_quantized(seed: Draw, strategy: str, kept: torch.dtype) -> None:
    height, width = 70, 83
    shape = {"tensor": (1,), "channel": (height, 1), "block": (5, 3)}[strategy]
    scale = scales(seed, *shape).to(kept)
    tensors = {"weight": eights(seed, height, width), "weight_scale": scale}
    weights: dict[str, object] = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
    weights |= {"block_structure": [16, 32]} if strategy == "block" else {}
    kind = "float-quantized"
    wanted = decompressed(kind, weights, tensors | {"weight_scale": scale.float()})
    same(asked(kind, weights), tensors, wanted)
    if strategy == "channel":
        same(asked(kind, weights), tensors | {"weight_scale": scale.flatten()}, wanted)


def test_mxfp8(seed: Draw) -> None:
    height, width = 13, 96
    exponents = torch.randint(8, 240, (height, 3), generator=seed).to(torch.uint8)
    tensors = {"weight": eights(seed, height, width), "weight_scale": exponents}
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
    wanted = decompressed("mxfp8-quantized", weights | {"scale_dtype": "torch.uint8"}, tensors)
    same(asked("mxfp8-quantized", weights), tensors, wanted.float())


@pytest.mark.parametrize("second", [3.7, 1e-3, 5e5, -0.3])
def test_nvfp4(seed: Draw, second: float) -> None:
    """compressed-tensors divides scales by the second one, ModelOpt multiplies them: before codes come in."""
    height, width = 13, 96
    packed, scale = words(seed, height, width // 8).view(torch.uint8), eights(seed, height, width // 16)
    tensors = {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": torch.tensor([second])}
    weights = {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "strategy": "tensor_group",
        "group_size": 16,
    }
    numbers = unpack_fp4_from_uint8(packed, height, width, dtype=torch.float32)
    args = QuantizationScheme(targets=["Linear"], weights=dict(weights)).weights
    wanted = dequantize(numbers, scale.float(), args=args, global_scale=torch.tensor([second]))
    kind = "nvfp4-pack-quantized"
    same(asked(kind, weights), tensors, wanted)
    assert torch.equal(decompressed(kind, weights, tensors), wanted.bfloat16())
    optimised = {"weight": packed, "weight_scale": scale, "weight_scale_2": torch.tensor(second)}
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    blocks = numbers.unflatten(1, (-1, 16)) * (scale.float() * torch.tensor(second)).unsqueeze(-1)
    same(config, optimised, blocks.flatten(1))
    named = {f"{AT}{name}": one for name, one in optimised.items()}
    made = ModelOptNvfp4Converter(targets=["re:.*q_proj"]).process(named)
    mine = {name.removeprefix(AT): one.reshape(1) if one.dim() == 0 else one for name, one in made.items()}
    torch.testing.assert_close(
        read(asked(kind, weights), mine, height, width), blocks.flatten(1), atol=0, rtol=3e-7
    )


def test_mxfp4(seed: Draw) -> None:
    """As compressed-tensors, as gpt-oss in transformers, and as its reader of four-bit experts."""
    height, width = 13, 96
    packed = words(seed, height, width // 8).view(torch.uint8)
    exponents = torch.randint(0, 255, (height, 3), generator=seed).to(torch.uint8)
    exponents[0] = torch.tensor([0, 1, 254])
    tensors = {"weight_packed": packed, "weight_scale": exponents}
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
    kind = "mxfp4-pack-quantized"
    wanted = decompressed(kind, weights | {"scale_dtype": "torch.uint8"}, tensors).float()
    same(asked(kind, weights), tensors, wanted)
    oss = convert_moe_packed_tensors(packed.view(1, height, 3, 16), exponents[None], dtype=torch.float32)
    assert torch.equal(oss[0].t(), wanted)
    experts = Fp8Dequantize(None)._dequantize_one(packed.view(torch.int8), exponents, torch.float32)
    assert torch.equal(experts, wanted)


MODULES = [
    f"model.layers.{layer}.{name}"
    for layer in (0, 1, 11)
    for name in (
        "self_attn.q_proj",
        "self_attn.o_proj",
        "mlp.gate",
        "mlp.gate_proj",
        "mlp.experts.3.down_proj",
    )
]
TARGETS = [
    *MODULES[:7], "lm_head", "Linear", "re:.*mlp.*", "re:.*down_proj$", "re:model.layers.1.*",
    "re:.*mlp.gate$", "re:.*self_attn.(q|k|v)_proj", "re:lm_head", "re:layers.0.*",
    "re:.*layers.(0|11).*proj", "Embedding",
]  # fmt: skip
WAYS: dict[str, dict[str, object]] = {
    "Integers 4": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16, "symmetric": True},
    "Integers 8": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
    "Integers 32": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True},
}


@pytest.mark.parametrize("number", range(200))
def test_which_modules_a_group_means(number: int) -> None:
    """Groups overlap: whole names come first, then patterns by their text, then classes."""
    random = Random(number)
    drawn = random.sample(TARGETS[:-1], random.randrange(1, 9))
    ignored = random.sample(TARGETS, random.randrange(3))
    ignored = [one for one in ignored if one != "Linear"]
    groups = {f"group_{at}": drawn[at::3] for at in range(3)}
    by_target = {
        target: label for label, targets in zip(WAYS, groups.values(), strict=True) for target in targets
    }
    config = {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ignored,
        "config_groups": {
            name: {"targets": targets, "weights": weights}
            for (name, targets), weights in zip(groups.items(), WAYS.values(), strict=True)
        },
    }  # fmt: skip
    format = read_format({"quantization_config": config}, "config.json", "float32")
    linear = torch.nn.Linear(1, 1)
    for module in (*MODULES, "lm_head", "model.embed_tokens"):
        kind = torch.nn.Embedding(1, 1) if "embed" in module else linear
        found = [] if is_match(module, kind, ignored) else match_targets(module, kind, by_target)
        mine = format.of(f"{module}.weight")
        label = f"Integers {mine.checkpoint_group or mine.bits}" if isinstance(mine, Integers) else ""
        assert label.replace(" 16", " 4") == (by_target[found[0]] if found else ""), module


@pytest.mark.parametrize("number", range(200))
def test_which_modules_are_not_converted(number: int) -> None:
    """As transformers reads the list: a beginning up to a dot, an end, or a pattern."""
    random = Random(number)
    some = ["lm_head", "mlp.gate", "model.layers.1", "gate", "model.layers.*.mlp", "layers.0", "q_proj"]
    some += [
        "model.layers.1.self_attn|model.layers.0.mlp",
        "down_proj",
        "model.layers.(0|11)",
        "model.layers.1.",
    ]
    listed = random.sample(some, random.randrange(4))
    key = random.choice(["modules_to_not_convert", "ignored_layers"])
    config = {"quant_method": "fp8", "weight_block_size": [16, 16], key: listed}
    format = read_format({"quantization_config": config}, "config.json", "float32")
    for module in MODULES:
        if not module.endswith("mlp.gate"):  # Routers are never converted.
            wanted = should_convert_module(module, listed)
            assert (format.of(f"{module}.weight") != DENSE) == wanted, module


# ---- FP8 in blocks


@pytest.mark.parametrize("block", [(16, 16), (8, 32), (128, 128)])
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16, torch.uint8, torch.float8_e8m0fnu])
@pytest.mark.parametrize("name", ["weight_scale_inv", "weight_scale", "scale", "qscale_weight"])
def test_fp8_blocks(seed: Draw, block: tuple[int, int], kept: torch.dtype, name: str) -> None:
    """Whole blocks as transformers reads them, edges as compressed-tensors does."""
    config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block)}
    for down, across, over in ((2, 3, 0), (3, 2, 5)):
        height, width = down * block[0] - over, across * block[1] - over
        bytes_of = torch.randint(0, 255, (down, across), generator=seed).to(torch.uint8)
        bytes_of[0, 0] = 0
        scale = bytes_of.view(kept) if kept.itemsize == 1 else scales(seed, down, across).to(kept)
        weight = eights(seed, height, width)
        whole = 2.0 ** (bytes_of.float() - 127) if kept.itemsize == 1 else scale.float()
        if over:
            reader = FP8BlockDequantizer(weight_block_size=block, dtype=torch.float32)
            wanted = reader._create_dequantized_weight(weight, whole)
        else:
            wanted = Fp8Dequantize(None)._dequantize_one(weight, scale, torch.float32)
        for said in ({}, {"scale_fmt": "ue8m0"}) if kept.itemsize == 1 else ({},):
            same(config | said, {"weight": weight, name: scale}, wanted)


def test_fp8_exponents_in_float32(seed: Draw) -> None:
    """Some who announce exponents write powers of two."""
    config = {"quant_method": "fp8", "weight_block_size": [16, 16], "scale_fmt": "ue8m0"}
    weight, scale = eights(seed, 48, 64), 2.0 ** torch.randint(-100, 100, (3, 4), generator=seed)
    wanted = Fp8Dequantize(None)._dequantize_one(weight, scale, torch.float32)
    same(config, {"weight": weight, "weight_scale_inv": scale}, wanted)
    same(config, {"weight": weight, "weight_scale_inv": scale.bfloat16()}, wanted)


@pytest.mark.parametrize("scale", [torch.tensor(0.3), torch.tensor([-0.3]), torch.tensor([[0.3]])])
@pytest.mark.parametrize(
    "config", [{"quant_method": "fp8"}, {"quant_method": "modelopt", "quant_algo": "FP8"}]
)
def test_fp8_of_one_scale(seed: Draw, scale: Tensor, config: Mapping[str, object]) -> None:
    weight = eights(seed, 41, 83)
    same(config, {"weight": weight, "weight_scale": scale}, weight.float() * scale)


# ---- whole checkpoints

WHOLE = [
    "packed", "packed_asymmetric", "packed_channel", "packed_8", "signed", "signed_asymmetric",
    "fp8_channel", "fp8_blocks", "mxfp8", "mxfp4", "fp8", "fp8_128", "fp8_bfloat16", "fp8_exponents",
]  # fmt: skip
"""Those that transformers dequantises in float32. It rounds weights with scales of 16 bits, and NVFP4."""


@functools.cache
def divisible(family: str) -> Path:
    """A model of which groups and blocks divide every matrix: transformers reads no other."""
    path = tiny.folder() / f"divisible_{family}"
    more = {"moe_intermediate_size": 128} if family == "qwen3_moe" else {}
    return tiny.write(tiny.CASES[family], path, hidden_size=128, intermediate_size=256, head_dim=32, **more)


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning:transformers")
@pytest.mark.parametrize(
    ("family", "scheme"),
    [
        *(("llama", scheme) for scheme in WHOLE),
        *(("mixtral", scheme) for scheme in ("packed", "fp8")),
        *(("qwen3_moe", scheme) for scheme in ("fp8", "fp8_channel")),
    ],
)
def test_transformers_says_the_same_of_a_checkpoint(family: str, scheme: str, tmp_path: Path) -> None:
    """Of the same files: config, names and tensors."""
    few, _ = checkpoints(divisible(family), tmp_path, SCHEMES[scheme])
    theirs = SCHEMES[scheme].config["quant_method"] == "fp8"
    asked = FineGrainedFP8Config(dequantize=True) if theirs else CompressedTensorsConfig(run_compressed=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        few, dtype=torch.float32, attn_implementation="eager", quantization_config=asked
    ).eval()
    prompts = tiny.prompts()[1:4]
    with LLM(few, device="cpu", dtype="float32", max_length=64, kernels=False) as llm:
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=tiny.VOCAB)
        found = llm.generate(prompts, params)
    for prompt, one in zip(prompts, found, strict=True):
        wanted = tiny.decode(model, prompt, 4)
        assert list(one.tokens) == wanted.tokens
        for entry, row in zip(one.logprobs, wanted.after_prompt, strict=True):
            assert tiny.distance(tiny.dense(entry), row) < tiny.LIMIT
