"""Checkpoints whose weights are quantised, in every layout that penstock reads, and the same models dense.

A `Scheme` quantises a matrix by rounding, packs it as its quantiser would, and says which matrix in float32
the packed tensors stand for, by the numbers before they were packed.
"""

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.arch.formats.format import matrix
from penstock.arch.formats.methods import read_format
from penstock.arch.layout import group_layouts
from penstock.arch.shards import Shard
from penstock.ops.matrix import Matrix
from penstock.weights.checkpoint.reader import Checkpoint
from penstock.weights.streaming.stream import group_views

Made = tuple[dict[str, Tensor], Tensor]
"""Tensors by what comes after `q_proj.`, and the matrix in float32."""
ROUTERS = "mlp.gate.weight", "sparse_moe.gate.weight", "shared_expert_gate.weight"
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@dataclass(frozen=True)
class Scheme:
    """One layout of quantised weights: what config.json says, and what makes a matrix."""

    config: Mapping[str, object]
    make: Callable[[Tensor, torch.Generator], Made]
    multiple: tuple[int, int] = (1, 1)
    """What rows and columns must be multiples of for the layout to hold them."""


def words(codes: Tensor, bits: int) -> Tensor:
    """int32 `[rows, ceil(width * bits / 32)]` of codes `[rows, width]`, the first in the low bits."""
    each = 32 // bits
    short = -codes.shape[1] % each
    codes = torch.nn.functional.pad(codes.long(), (0, short)).unflatten(1, (-1, each))
    whole = (codes << (torch.arange(each) * bits)).sum(-1)
    return torch.where(whole >= 2**31, whole - 2**32, whole).int()


@dataclass(frozen=True)
class Rounded:
    """Integer codes, zero points and scales of a matrix, `[rows, width]` and `[rows, groups]`."""

    codes: Tensor
    zeros: Tensor
    scales: Tensor
    groups: Tensor
    """The group of each column."""

    @property
    def matrix(self) -> Tensor:
        return (self.codes - self.zeros[:, self.groups]).float() * self.scales[:, self.groups].float()


def rounded(
    weight: Tensor, bits: int, group: int, seed: torch.Generator, dtype: torch.dtype, *,
    symmetric: bool, ordered: bool = False,
) -> Rounded:  # fmt: skip
    """Round to nearest, with some negative scales, and zero points that are the least and the largest.

    ordered: columns belong to groups in any order.
    """
    height, width = weight.shape
    group = group if group > 0 else width
    groups = torch.arange(width) // group
    if ordered:
        groups = groups[torch.randperm(width, generator=seed)]
    most, middle = (1 << bits) - 1, 1 << (bits - 1)
    count = -(-width // group)
    scales, zeros = torch.empty(height, count), torch.full((height, count), middle)
    for at in range(count):
        inside = weight[:, groups == at].float()
        low, high = inside.amin(1).clamp(max=0), inside.amax(1).clamp(min=0)
        spread = torch.maximum(-low, high) * 2 if symmetric else high - low
        scales[:, at] = spread.clamp(min=1e-3) / most
        if not symmetric:
            zeros[:, at] = (-low / scales[:, at]).round().clamp(0, most)
            zeros[at % 16 :: 16, at], zeros[(at + 8) % 16 :: 16, at] = 0, most
    if symmetric:
        scales *= torch.where(torch.rand(scales.shape, generator=seed) < 0.3, -1, 1)
    scales = scales.to(dtype)
    codes = (weight.float() / scales[:, groups].float()).round() + zeros[:, groups]
    return Rounded(codes.clamp(0, most).long(), zeros.long(), scales, groups)


def gptq(
    bits: int, group: int, *, symmetric: bool = True, ordered: bool = False, version: int = 1,
    dtype: torch.dtype = torch.float16,
) -> Scheme:  # fmt: skip
    def make(weight: Tensor, seed: torch.Generator) -> Made:
        one = rounded(weight, bits, group, seed, dtype, symmetric=symmetric, ordered=ordered)
        ones = sum(1 << at for at in range(0, 32, bits))  # Taken from words, not from each code.
        tensors = {
            "qweight": words(one.codes, bits).t().contiguous(),
            "qzeros": words(one.zeros.t(), bits) - (ones if version == 1 else 0),
            "scales": one.scales.t().contiguous(),
        }
        if ordered or bits == 8:  # Others are left out, as some tools do.
            tensors["g_idx"] = one.groups.int()
        return tensors, one.matrix

    config = {
        "quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "desc_act": ordered,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
    }  # fmt: skip
    return Scheme(config, make, (32 // bits, 32 // bits))


def auto_round(group: int) -> Scheme:
    config = {
        "quant_method": "auto-round", "bits": 4, "group_size": group, "sym": True, "data_type": "int",
        "packing_format": "auto_round:auto_gptq",
    }  # fmt: skip
    return Scheme(config, gptq(4, group).make, (8, 8))


def awq(group: int, *, dtype: torch.dtype = torch.float16) -> Scheme:
    def make(weight: Tensor, seed: torch.Generator) -> Made:
        one = rounded(weight, 4, group, seed, dtype, symmetric=False)

        def mixed(codes: Tensor) -> Tensor:
            return words(codes.unflatten(1, (-1, 8))[:, :, list(_AWQ_ORDER)].flatten(1), 4)

        tensors = {
            "qweight": mixed(one.codes.t()),
            "qzeros": mixed(one.zeros.t()),
            "scales": one.scales.t().contiguous(),
        }
        return tensors, one.matrix

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return Scheme(config, make, (8, 1))


def _compressed(kind: str, weights: Mapping[str, object]) -> dict[str, object]:
    group = {"targets": ["Linear"], "weights": {"dynamic": False, **weights}, "input_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$", "re:.*shared_expert_gate$", r"re:.*block_sparse_moe\.gate$"],
        "quantization_status": "compressed",
    }  # fmt: skip


def packed_rows(
    bits: int,
    group: int,
    *,
    symmetric: bool = True,
    ordered: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Scheme:
    def make(weight: Tensor, seed: torch.Generator) -> Made:
        kept = dtype if group > 0 else torch.float32
        one = rounded(weight, bits, group, seed, kept, symmetric=symmetric, ordered=ordered)
        tensors = {
            "weight_packed": words(one.codes, bits),
            "weight_scale": one.scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = words(one.zeros.t(), bits).t().contiguous()
        if ordered:
            tensors["weight_g_idx"] = one.groups.int()
        return tensors, one.matrix

    strategy = {"strategy": "group", "group_size": group} if group > 0 else {"strategy": "channel"}
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, **strategy}
    return Scheme(_compressed("pack-quantized", weights | ({"actorder": "group"} if ordered else {})), make)


def signed(*, symmetric: bool = True) -> Scheme:
    def make(weight: Tensor, seed: torch.Generator) -> Made:
        one = rounded(weight, 8, -1, seed, torch.float32, symmetric=symmetric)
        tensors = {"weight": (one.codes - 128).to(torch.int8), "weight_scale": one.scales}
        tensors |= {} if symmetric else {"weight_zero_point": (one.zeros - 128).to(torch.int8)}
        return tensors, one.matrix

    weights = {"num_bits": 8, "type": "int", "symmetric": symmetric, "strategy": "channel"}
    return Scheme(_compressed("int-quantized", weights), make)


def _scales(weight: Tensor, block: tuple[int, int]) -> Tensor:
    """Scales of blocks, float32, by the largest number of each."""
    height, width = weight.shape
    down, across = block[0] or height, block[1] or width
    rows, columns = -(-height // down), -(-width // across)
    edge = torch.nn.functional.pad(weight.abs(), (0, columns * across - width, 0, rows * down - height))
    return edge.view(rows, down, columns, across).amax((1, 3)).clamp(min=1e-3) / 448


def fp8(
    block: tuple[int, int], *, dtype: torch.dtype = torch.float32, name: str = "weight_scale_inv",
    config: Mapping[str, object] | None = None, flat: bool = False, exponents: torch.dtype | None = None,
) -> Scheme:  # fmt: skip
    def make(weight: Tensor, seed: torch.Generator) -> Made:
        scales = _scales(weight.float(), block)
        if exponents is not None:
            scales = 2.0 ** scales.log2().ceil()
        scales = scales.to(dtype)
        height, width = weight.shape
        down, across = block[0] or height, block[1] or width
        wide = scales.float().repeat_interleave(down, 0)[:height].repeat_interleave(across, 1)[:, :width]
        values = (weight.float() / wide).to(torch.float8_e4m3fn)
        kept = scales.flatten() if flat else scales
        if exponents is not None and exponents.itemsize == 1:
            kept = (scales.float().log2() + 127).to(torch.uint8).view(exponents)
        return {"weight": values, name: kept}, values.float() * wide

    listed = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    listed |= {"weight_block_size": list(block) if all(block) else None}
    listed |= {"scale_fmt": "ue8m0"} if exponents is not None else {}
    return Scheme(config or listed, make)


def _four(weight: Tensor, scales: Tensor, group: int) -> Tensor:
    """Codes of the nearest numbers of four bits, `scales` `[rows, groups]` taken out."""
    scaled = weight.float() / scales.repeat_interleave(group, 1)[:, : weight.shape[1]]
    return (scaled.unsqueeze(-1) - E2M1).abs().argmin(-1)


def mxfp4() -> Scheme:
    def make(weight: Tensor, seed: torch.Generator) -> Made:
        width = weight.shape[1]
        edge = torch.nn.functional.pad(weight.float(), (0, -width % 32))
        most = edge.unflatten(1, (-1, 32)).abs().amax(-1).clamp(min=1e-3)
        exponents = (most / 6).log2().ceil() + 127
        scales = 2.0 ** (exponents - 127)
        codes = _four(weight, scales, 32)
        tensors = {"weight_packed": (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)}
        wide = scales.repeat_interleave(32, 1)[:, :width]
        return tensors | {"weight_scale": exponents.to(torch.uint8)}, E2M1[codes] * wide

    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    return Scheme(_compressed("mxfp4-pack-quantized", weights), make, (1, 32))


def nvfp4(*, modelopt: bool = False) -> Scheme:
    def make(weight: Tensor, seed: torch.Generator) -> Made:
        width = weight.shape[1]
        edge = torch.nn.functional.pad(weight.float(), (0, -width % 16))
        most = edge.unflatten(1, (-1, 16)).abs().amax(-1).clamp(min=1e-3)
        second = most.max() / (6 * 448)
        small = (most / 6 / second).to(torch.float8_e4m3fn)
        codes = _four(weight, small.float() * second, 16)
        both = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
        wide = small.float().repeat_interleave(16, 1)[:, :width]
        if modelopt:
            tensors = {
                "weight": both,
                "weight_scale": small,
                "weight_scale_2": second,
                "input_scale": torch.tensor(1.0),
            }
            return tensors, E2M1[codes] * (wide * second)
        inverse = second.reciprocal()
        tensors = {"weight_packed": both, "weight_scale": small, "weight_global_scale": inverse[None]}
        return tensors, E2M1[codes] * (wide / inverse)

    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    config: dict[str, object] = _compressed("nvfp4-pack-quantized", weights)
    if modelopt:
        config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*mlp.gate"]}
    return Scheme(config, make, (1, 16))


_SCALES = "weight_scale_2", "weight_global_scale", "scales", "weight_scale", "weight_scale_inv", "scale"


def sized(scheme: Scheme, size: float) -> Scheme:
    """The same with all scales multiplied by a power of two, in float32 where their dtype ends before."""

    def make(weight: Tensor, seed: torch.Generator) -> Made:
        tensors, matrix = scheme.make(weight, seed)
        name = next(name for name in _SCALES if name in tensors)
        one = tensors[name]
        if one.itemsize == 1:
            changed = (one.view(torch.uint8) + int(math.log2(size))).view(one.dtype)
        else:
            exact = one.float() * (1 / size if name == "weight_global_scale" else size)
            changed = exact.to(one.dtype)
            changed = exact if not torch.equal(changed.float(), exact) else changed
        return tensors | {name: changed}, matrix * size

    return replace(scheme, make=make)


SCHEMES: dict[str, Scheme] = {
    "gptq": gptq(4, 32),
    "gptq_128": gptq(4, 128),
    "gptq_whole_rows": gptq(4, -1),
    "gptq_asymmetric": gptq(4, 16, symmetric=False),
    "gptq_v2": gptq(4, 32, symmetric=False, version=2),
    "gptq_order": gptq(4, 16, ordered=True),
    "gptq_order_asymmetric": gptq(4, 16, symmetric=False, ordered=True),
    "gptq_8": gptq(8, 32, symmetric=False),
    "auto_round": auto_round(32),
    "awq": awq(32),
    "packed": packed_rows(4, 32),
    "packed_bfloat16": packed_rows(4, 32, dtype=torch.bfloat16),
    "packed_odd": packed_rows(4, 24),
    "packed_channel": packed_rows(4, -1),
    "packed_asymmetric": packed_rows(4, 32, symmetric=False),
    "packed_order": packed_rows(4, 16, ordered=True),
    "packed_8": packed_rows(8, 32, symmetric=False),
    "signed": signed(),
    "signed_asymmetric": signed(symmetric=False),
    "fp8": fp8((16, 16)),
    "fp8_128": fp8((128, 128)),
    "fp8_bfloat16": fp8((16, 32), dtype=torch.bfloat16),
    "fp8_exponents": fp8((16, 16), exponents=torch.uint8),
    "fp8_exponents_typed": fp8((16, 16), exponents=torch.float8_e8m0fnu, name="scale"),
    "fp8_tensor": fp8((0, 0), name="weight_scale", flat=True),
    "fp8_channel": fp8(
        (1, 0), name="weight_scale",
        config=_compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    ),
    "fp8_blocks": fp8(
        (16, 16), name="weight_scale",
        config=_compressed(
            "float-quantized",
            {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": "16x16"},
        ),
    ),
    "mxfp8": fp8(
        (1, 32), name="weight_scale", exponents=torch.uint8,
        config=_compressed(
            "mxfp8-quantized", {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32}
        ),
    ),
    "modelopt_fp8": fp8(
        (0, 0), name="weight_scale", flat=True,
        config={"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head", "*mlp.gate"]},
    ),
    "mxfp4": mxfp4(),
    "nvfp4": nvfp4(),
    "modelopt_nvfp4": nvfp4(modelopt=True),
}  # fmt: skip


ALIKE = (
    "auto_round", "gptq_whole_rows", "gptq_v2", "packed_bfloat16", "packed_channel", "packed_asymmetric",
    "packed_8", "signed_asymmetric", "fp8_bfloat16", "fp8_exponents_typed", "fp8_channel", "fp8_blocks",
    "modelopt_fp8", "modelopt_nvfp4",
)  # fmt: skip
"""At rest these have the codes, scales and zero points of others: a test of what computes with them needs
these others alone, where another reads them all."""


def is_quantised(name: str, value: Tensor, also: tuple[str, ...] = ()) -> bool:
    """Whether quantisers touch a tensor: linear modules inside layers, but routers, and what is in `also`."""
    return name in also or (".layers." in name and value.dim() == 2 and not name.endswith(ROUTERS))


HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def with_ends(scheme: Scheme) -> tuple[Scheme, tuple[str, ...]]:
    """A scheme whose head and embedding are quantised too, as far as the format can say so."""
    if scheme.config["quant_method"] == "gptq":
        return replace(scheme, config=scheme.config | {"lm_head": True}), (HEAD,)
    (group,) = scheme.config["config_groups"].values()  # type: ignore[attr-defined]
    groups = {"config_groups": {"group_0": group | {"targets": ["Linear", "Embedding"]}}}
    left = {"ignore": [name for name in scheme.config["ignore"] if name != "lm_head"]}  # type: ignore[attr-defined]
    return replace(scheme, config=scheme.config | groups | left), (HEAD, EMBEDDING)


def checkpoints(
    source: Path,
    folder: Path,
    scheme: Scheme,
    others: Mapping[str, Scheme | None] | None = None,
    also: tuple[str, ...] = (),
) -> tuple[Path, Path]:
    """A checkpoint quantised as `scheme` has it, and a dense one in float32 that is the same model.

    others: by a part of their names, matrices that are quantised otherwise, or not. also: weights outside of
    layers that are quantised. The config must say so.
    """
    few, same = folder / "few", folder / "dense"
    numbers, plain = dict[str, Tensor](), dict[str, Tensor]()
    seed = torch.Generator().manual_seed(11)
    for file in sorted(source.glob("*.safetensors")):
        for tensor, value in load_file(file).items():
            its = next((one for part, one in (others or {}).items() if part in tensor), scheme)
            if its is None or not is_quantised(tensor, value, also):
                numbers[tensor] = plain[tensor] = value
                continue
            made, matrix = its.make(value, seed)
            at = tensor.removesuffix("weight")
            numbers |= {at + name: one.contiguous() for name, one in made.items()}
            plain[tensor] = matrix
    for path, tensors in ((few, numbers), (same, plain)):
        path.mkdir(parents=True)
        for file in source.glob("*.json"):
            if "safetensors" not in file.name:
                shutil.copy(file, path)
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((few / "config.json").read_text())
    (few / "config.json").write_text(json.dumps(config | {"quantization_config": scheme.config}))
    return few, same


def matrix_of(
    scheme: Scheme, weight: Tensor, seed: int = 3, *, rows: Sequence[range] = (),
    columns: range | None = None, dtype: str = "float32",
) -> tuple[Matrix, Tensor]:  # fmt: skip
    """A matrix as it rests, and in float32 as `scheme` has it.

    rows, columns: a rank's, one run below the other; all by default. dtype: of activations.
    """
    name = "model.layers.0.self_attn.q_proj.weight"
    made, plain = scheme.make(weight, torch.Generator().manual_seed(seed))
    tensors = {name.removesuffix("weight") + part: one for part, one in made.items()}
    runs = rows or (range(len(weight)),)
    sources = [matrix(name, *weight.shape, rows=run, columns=columns) for run in runs]
    plain = torch.cat([plain[run.start : run.stop] for run in runs])
    plain = plain if columns is None else plain[:, columns.start : columns.stop].contiguous()
    format = (
        read_format({"quantization_config": scheme.config}, "config.json", "float32").of(name).cut(sources)
    )
    parts = {}
    for stored in format.stored(dtype, sources):
        assert stored.repack is not None
        read = [
            next((tensors[one] for one in (source.tensor, *source.also) if one in tensors), None)
            for source in stored.sources
        ]
        parts[stored.name] = stored.repack(read).contiguous()
        assert (tuple(parts[stored.name].shape), parts[stored.name].dtype) == (
            stored.shape,
            getattr(torch, stored.dtype),
        )
    return Matrix(format, (plain.shape[0], plain.shape[1]), parts), plain


def matrices(path: Path, shard: Shard | None = None) -> dict[str, torch.Tensor]:
    """Every matrix of a checkpoint, or of a rank's part of it, dequantised, by its group and name."""
    found = {}
    with Checkpoint.open(path) as checkpoint:
        layouts = group_layouts(checkpoint.spec, checkpoint.names, "float32", shard)
        checkpoint.verify(layouts)
        for layout in layouts:
            whole = torch.empty(layout.size, dtype=torch.uint8)
            checkpoint.read_piece(layout, 0, whole)
            for name, matrix in group_views(layout, whole).matrices.items():
                found[f"{layout.id} {name}"] = matrix.dequantised(torch.empty(0))
    return found


def same_matrices(few: Path, dense: Path, ranks: int = 0) -> None:
    """Of the whole and, if there are ranks, of the part of each."""
    for shard in (None, *(Shard(rank, ranks) for rank in range(ranks))):
        mine, theirs = matrices(few, shard), matrices(dense, shard)
        assert mine.keys() == theirs.keys()
        for name, one in mine.items():
            assert torch.equal(one, theirs[name]), (shard, name)
