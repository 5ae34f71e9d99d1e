"""What penstock does not have, added from outside, and checkpoints of it.

A storage format: int8 numbers with a scale for each row. In a checkpoint the scales of a matrix lie in one
row, `[1, out]`, in float32 and inverted, so that they have to be repacked. A mixer with a plane more.
A mixer with state. A family with every cap and scale.
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import tiny
from penstock.arch import families, reading
from penstock.arch.formats import methods
from penstock.arch.formats.dense import DENSE
from penstock.arch.formats.format import (
    ALL,
    StoredTensor,
    TensorSlice,
    WeightFormat,
    matrix,
    stacked,
    vector,
)
from penstock.arch.layout import group_layouts
from penstock.arch.mixers.attention import Attention
from penstock.arch.mixers.mixer import Mixer, Plane, StateArray
from penstock.arch.shards import Shard, share_heads
from penstock.arch.spec import LayerSpec, ModelSpec, Norms
from penstock.engine import boot
from penstock.models import mixers
from penstock.models.inputs import ColdCache
from penstock.models.mixers import Mixing
from penstock.ops.attention.attend import attend
from penstock.ops.attention.inputs import LayerAttention
from penstock.ops.linear import linear
from penstock.ops.matrix import GroupViews
from penstock.ops.rope import rotate
from penstock.weights.checkpoint.shape import Shape

METHOD = "toy_int8"
SUFFIX = "_inverse_scale"
ROUTERS = "mlp.gate.weight", "sparse_moe.gate.weight"


@dataclass(frozen=True)
class Rows:
    """Makes the scales of the rows that a rank takes of each matrix, one below the other."""

    taken: tuple[range | None, ...]

    def __call__(self, wholes: Sequence[Tensor]) -> Tensor:
        parts = [
            whole[0] if rows is None else whole[0, rows.start : rows.stop]
            for whole, rows in zip(wholes, self.taken, strict=True)
        ]
        return torch.cat(parts).reciprocal()


@dataclass(frozen=True)
class Int8(WeightFormat):
    """Numbers int8 `[out, in]` and scales float32 `[out]`, by which the rows are multiplied."""

    name: str = METHOD
    dense: tuple[str, ...] = ()
    """Parts of the names of matrices that rest dense."""

    def of(self, tensor: str) -> WeightFormat:
        inside = ".layers." in tensor and not tensor.endswith(ROUTERS)
        return self if inside and not any(part in tensor for part in self.dense) else DENSE

    def stored(self, dtype: str, sources: Sequence[TensorSlice]) -> tuple[StoredTensor, ...]:
        values = stacked("values", "int8", sources)
        scales = [TensorSlice(source.tensor + SUFFIX, (1, source.shape[0])) for source in sources]
        rows = Rows(tuple(source.rows for source in sources))
        return values, StoredTensor("scale", (values.shape[0],), "float32", tuple(scales), rows)

    def dequantise(self, parts: Mapping[str, Tensor], rows: slice = ALL) -> Tensor:
        return parts["values"][rows].float() * parts["scale"][rows, None]


@contextmanager
def known() -> Iterator[None]:
    """Penstock reads checkpoints in this format."""
    with patch.dict(
        methods.FORMATS, {METHOD: lambda config, where, dtype: Int8(dense=tuple(config.get("dense", ())))}
    ):
        yield


def checkpoints(name: str, folder: Path, dense: Sequence[str] = ()) -> tuple[Path, Path]:
    """A tiny checkpoint in this format, and a dense one, float32, that is the same model."""
    source = tiny.checkpoint(name)
    few, same = folder / "few", folder / "dense"
    numbers, plain = dict[str, Tensor](), dict[str, Tensor]()
    for file in source.glob("*.safetensors"):
        for tensor, value in load_file(file).items():
            inside = ".layers." in tensor and value.dim() == 2 and not tensor.endswith(ROUTERS)
            if not inside or any(part in tensor for part in dense):
                numbers[tensor] = plain[tensor] = value
                continue
            inverse = 127 / value.float().abs().amax(1)
            int8 = (value.float() * inverse[:, None]).round().to(torch.int8)
            numbers[tensor], numbers[tensor + SUFFIX] = int8, inverse[None].clone()
            plain[tensor] = int8.float() * inverse.reciprocal()[:, None]
    for path, tensors in ((few, numbers), (same, plain)):
        path.mkdir()
        for file in source.glob("*.json"):
            if "safetensors" not in file.name:
                shutil.copy(file, path)
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        config = json.loads((path / "config.json").read_text())
        if path is few:
            config["quantization_config"] = {"quant_method": METHOD, "dense": list(dense)}
        (path / "config.json").write_text(json.dumps(config))
    return few, same


# ---- a mixer


@dataclass(frozen=True)
class Tilted(Mixer):
    """Attention whose values are wider than keys, and which keeps one plane more: its `tilt`, which is
    attended to as values are, and whose mean scales the output."""

    width: int = 20
    tilt: int = 3

    @property
    def output_size(self) -> int:
        return self.heads * self.width

    @property
    def planes(self) -> tuple[Plane, ...]:
        return (
            Plane("k", self.kv_heads, self.head_dim, scored=True),
            Plane("v", self.kv_heads, self.width),
            Plane("tilt", self.kv_heads, self.tilt),
        )

    def weights(self, at: str, hidden: int, shard: Shard) -> dict[str, Sequence[TensorSlice]]:
        heads, kv_heads = share_heads(self.heads // self.kv_heads, self.kv_heads, shard)
        parts = {"q": (self.heads, self.head_dim, heads), "k": (self.kv_heads, self.head_dim, kv_heads)}
        parts |= {"v": (self.kv_heads, self.width, kv_heads), "tilt": (self.kv_heads, self.tilt, kv_heads)}
        fused = [
            matrix(f"{at}.tilted.{name}.weight", count * dim, hidden, rows=rows_of(part, dim))
            for name, (count, dim, part) in parts.items()
        ]
        out = matrix(f"{at}.tilted.out.weight", hidden, self.output_size, columns=rows_of(heads, self.width))
        return {"fused": fused, "out": [out]}

    def local(self, shard: Shard) -> "Tilted":
        heads, kv_heads = share_heads(self.heads // self.kv_heads, self.kv_heads, shard)
        return replace(self, heads=len(heads), kv_heads=len(kv_heads))


def rows_of(heads: range, dim: int) -> range:
    return range(heads.start * dim, heads.stop * dim)


class Joined:
    """Lends tiles with values and tilt beside each other, as attention wants them."""

    def __init__(self, cold: ColdCache) -> None:
        self._cold, self.release = cold, cold.release

    def take(self) -> tuple[Tensor, ...]:
        k, v, tilt = self._cold.take()
        return k, torch.cat((v, tilt), -1)

    def choose(
        self, reader: int, q: Tensor, lse: Tensor, layer: LayerAttention
    ) -> Iterator[tuple[Tensor, ...]]:
        for k, v, tilt in self._cold.choose(reader, q, lse, layer):
            yield k, torch.cat((v, tilt), -1)


def tilted(mixer: Mixer, x: Tensor, weights: GroupViews, cache: tuple[Tensor, ...], mixing: Mixing) -> Tensor:
    assert isinstance(mixer, Tilted)
    inputs, attention = mixing.inputs, mixing.inputs.attention
    sizes = [mixer.query_size, *(plane.numbers for plane in mixer.planes)]
    q, k, v, tilt = linear(x, weights.matrices["fused"]).split(sizes, -1)
    q = rotate(q.view(len(x), mixer.heads, mixer.head_dim), inputs.cos, inputs.sin)
    k = rotate(k.view(len(x), mixer.kv_heads, mixer.head_dim), inputs.cos, inputs.sin)
    v, tilt = (one.reshape(len(x), mixer.kv_heads, -1) for one in (v, tilt))
    paged = slice(None) if attention.cold is None or attention.cold.paged is None else attention.cold.paged
    for plane, values in zip(cache, (k, v, tilt), strict=True):
        plane[attention.blocks, attention.offsets] = values[paged]
    if mixing.cold is not None:
        mixing.cold.send(mixing.layer, (k, v, tilt))
    pages = cache[0], torch.cat((cache[1], cache[2]), -1)
    layer, tiles = LayerAttention(mixer.head_dim**-0.5), None if mixing.cold is None else Joined(mixing.cold)
    seen = attend(q, k, torch.cat((v, tilt), -1), pages, attention, layer, tiles).out
    seen = seen if mixing.wanted is None else seen[mixing.wanted]
    values, tilts = seen[..., : mixer.width], seen[..., mixer.width :]
    return (values * (1 + tilts.mean(-1, keepdim=True))).flatten(1)


def read_tilted(config: reading.ConfigReader) -> ModelSpec:
    """A llama of which the layers from the second on are tilted and normalised after their blocks, too."""
    spec = families.FAMILIES["llama"].read(config)
    first, *others = spec.stack
    norms = Norms("input_layernorm", "after_mixer"), Norms(None, "after_feed_forward")
    stack = [
        LayerSpec(Tilted(spec.heads, spec.kv_heads, spec.head_dim), one.feed_forward, *norms)
        for one in others
    ]
    return replace(spec, stack=(first, *stack))


def read_all_tilted(config: reading.ConfigReader) -> ModelSpec:
    """The same with no other layers."""
    spec = read_tilted(config)
    _, *others = spec.stack
    return replace(spec, stack=(others[0], *others))


@contextmanager
def tilted_known() -> Iterator[None]:
    """Penstock runs models of the families `tilted` and `all_tilted`."""
    known = {"tilted": families.Family(read_tilted), "all_tilted": families.Family(read_all_tilted)}
    with (
        patch.dict(families.FAMILIES, known),
        patch.dict(mixers.FORWARD, {Tilted: tilted}),
    ):
        yield


def tilted_checkpoint(folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """A tiny checkpoint of that family."""
    with tilted_known():
        return made_checkpoint(folder, "tilted", dtype)


# ---- a mixer with state


@dataclass(frozen=True)
class Gated(Mixer):
    """A gated linear recurrence, which keeps nothing of tokens. Of each head a matrix, float32, fades by the
    token's gate and takes up the product of its key and value; a query reads it. Values come from a short
    convolution, which keeps the last two of them."""

    width: int = 20

    @property
    def output_size(self) -> int:
        return self.heads * self.width

    @property
    def planes(self) -> tuple[Plane, ...]:
        return ()

    @property
    def state(self) -> tuple[StateArray, ...]:
        matrices = StateArray("matrices", (self.heads, self.head_dim, self.width), "float32")
        return matrices, StateArray("tail", (2, self.heads, self.width))

    @property
    def projected_size(self) -> int:
        return self.heads * (2 * self.head_dim + self.width + 1)

    @property
    def state_operations(self) -> float:
        return 5 * self.heads * self.head_dim * self.width

    def weights(self, at: str, hidden: int, shard: Shard) -> dict[str, Sequence[TensorSlice]]:
        heads, _ = share_heads(1, self.heads, shard)
        sizes = {"q": self.head_dim, "k": self.head_dim, "v": self.width, "gate": 1}
        fused = [
            matrix(f"{at}.gated.{name}.weight", self.heads * dim, hidden, rows=rows_of(heads, dim))
            for name, dim in sizes.items()
        ]
        mine = rows_of(heads, self.width)
        taps = [vector(f"{at}.gated.tap_{number}.weight", self.output_size, mine) for number in range(3)]
        out = matrix(f"{at}.gated.out.weight", hidden, self.output_size, columns=mine)
        return {"fused": fused, "taps": taps, "out": [out]}

    def local(self, shard: Shard) -> "Gated":
        heads, _ = share_heads(1, self.heads, shard)
        return replace(self, heads=len(heads), kv_heads=len(heads))


def gated(mixer: Mixer, x: Tensor, weights: GroupViews, cache: tuple[Tensor, ...], mixing: Mixing) -> Tensor:
    assert isinstance(mixer, Gated)
    matrices, tail = cache
    inputs, keys = mixing.inputs.state, mixer.heads * mixer.head_dim
    assert inputs is not None
    sizes = [keys, keys, mixer.output_size, mixer.heads]
    q, k, v, gate = linear(x, weights.matrices["fused"]).split(sizes, -1)
    q, k, v = (one.reshape(len(x), mixer.heads, -1) for one in (q, k, v))
    taps, gate = weights.vectors["taps"].view(3, mixer.heads, mixer.width), gate.float().sigmoid()
    out = x.new_empty(len(x), mixer.heads, mixer.width)

    def go_on(part: slice, state: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        """One token of each of some sequences: their states behind it."""
        value = taps[0] * last[:, 0] + taps[1] * last[:, 1] + taps[2] * v[part]
        taken = k[part, :, :, None].float() * value[:, :, None].float() / mixer.head_dim
        state = state * gate[part, :, None, None] + taken
        out[part] = torch.einsum("bhk,bhkv->bhv", q[part].float(), state).to(x.dtype)
        return state, torch.stack((last[:, 1], v[part]), 1)

    some = inputs.singles
    if len(some):
        matrices[some], tail[some] = go_on(slice(len(some)), matrices[some], tail[some])
    for run in inputs.runs:
        row = slice(run.row, run.row + 1)
        state, last = matrices[row], tail[row]
        for at in range(run.first, run.first + run.count):
            state, last = go_on(slice(at, at + 1), state, last)
        matrices[row], tail[row] = state, last
    return (out if mixing.wanted is None else out[mixing.wanted]).flatten(1)


def read_hybrid(config: reading.ConfigReader) -> ModelSpec:
    """A llama whose first and last layers are gated instead of attending."""
    spec = families.FAMILIES["llama"].read(config)
    mixer = Gated(spec.heads, spec.heads, spec.head_dim)
    first, *middle, last = spec.stack
    return replace(spec, stack=(replace(first, mixer=mixer), *middle, replace(last, mixer=mixer)))


@contextmanager
def hybrid_known() -> Iterator[None]:
    """Penstock runs models of the family `hybrid`, on all ranks."""
    with (
        patch.dict(families.FAMILIES, {"hybrid": families.Family(read_hybrid)}),
        patch.dict(mixers.FORWARD, {Gated: gated}),
        patch.object(boot, "follow", told),
    ):
        yield


def told(*arguments: Any) -> None:
    """What another rank does, in a process that has to be told of the families, too."""
    follow = boot.follow
    with hybrid_known(), capped_known():
        follow(*arguments)


def hybrid_checkpoint(folder: Path) -> Path:
    """A tiny checkpoint of that family."""
    with hybrid_known():
        return made_checkpoint(folder, "hybrid")


# ---- caps and scales


def read_capped(config: reading.ConfigReader) -> ModelSpec:
    """A llama with every cap and scale that a spec has, the layers from the second on normalised after their
    blocks."""
    spec = families.FAMILIES["llama"].read(config)
    norms = Norms("input_layernorm", "after_mixer"), Norms("before_feed_forward", "after_feed_forward")
    stack = []
    for number, layer in enumerate(spec.stack):
        assert isinstance(layer.mixer, Attention)
        capped = replace(layer, mixer=replace(layer.mixer, scale=0.3, cap=1.5), scale=0.6)
        stack.append(replace(capped, mixer_norms=norms[0], feed_forward_norms=norms[1]) if number else capped)
    return replace(spec, stack=tuple(stack), embedding_scale=3.0, logits_scale=0.5, logits_cap=2.5)


@contextmanager
def capped_known() -> Iterator[None]:
    """Penstock runs models of the family `capped`, on all ranks."""
    with (
        patch.dict(families.FAMILIES, {"capped": families.Family(read_capped)}),
        patch.object(boot, "follow", told),
    ):
        yield


def capped_checkpoint(folder: Path) -> Path:
    """A tiny checkpoint of that family."""
    with capped_known():
        return made_checkpoint(folder, "capped")


# ---- checkpoints


def made_checkpoint(folder: Path, model_type: str, dtype: torch.dtype = torch.float32) -> Path:
    """A tiny checkpoint of a family that is known: tensors of a tiny llama, and random ones where it has none
    of that name."""
    source = tiny.checkpoint("llama")
    folder.mkdir()
    for file in source.glob("*.json"):
        shutil.copy(file, folder)
    config = json.loads((folder / "config.json").read_text()) | {"model_type": model_type}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: one for file in source.glob("*.safetensors") for name, one in load_file(file).items()}
    shape = Shape.of(config)
    wanted = {
        one.tensor: one.shape
        for group in group_layouts(shape.spec, shape.names, "float32")
        for field in group.fields
        for one in field.sources
    }
    random = torch.Generator().manual_seed(3)
    made = {}
    for name, extents in wanted.items():
        scale = 1.0 if len(extents) == 1 else 2 / extents[-1] ** 0.5
        drawn = torch.randn(extents, generator=random) * scale
        made[name] = (
            tensors[name] if name in tensors else drawn.abs() + 0.5 if len(extents) == 1 else drawn
        ).to(dtype)
    save_file(made, folder / "model.safetensors", {"format": "pt"})
    return folder
