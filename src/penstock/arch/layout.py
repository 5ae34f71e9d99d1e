"""How bytes are laid out: the groups of weights, what each holds and where it comes from; the bytes of a KV
block.

A group is the unit in which weights rest and move: one contiguous run. Projections that read the same input
are fused, one below the other, so that a layer needs four matrix products and a group one copy.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import Any

from penstock.arch.families import TensorNames
from penstock.arch.formats.dense import DENSE
from penstock.arch.formats.format import STORED_BYTES, Format, Source, matrix, stacked, vector
from penstock.arch.formats.joined import Joined
from penstock.arch.mixers.mixer import Plane
from penstock.arch.parts import Held, held, local_spec
from penstock.arch.shards import WHOLE, Shard
from penstock.arch.spec import Mlp, ModelSpec, MoeSpec, Norms
from penstock.base.errors import ConfigError, UnsupportedModelError

ALIGNMENT = 256
"""Bytes at which every field of a group starts: a multiple of any vector load and of what matrix kernels
want."""
_FP8, _SCALE_BYTES = "float8_e4m3fn", 4
Tensors = dict[str, Sequence[Source]]
"""The tensors of a group by their names: the sources of each, one below the other."""


class GroupKind(StrEnum):
    EMBEDDING = "embedding"
    ATTENTION = "attention"
    FFN = "ffn"
    ROUTER = "router"
    EXPERT = "expert"
    HEAD = "head"


@dataclass(frozen=True, slots=True, order=True)
class GroupId:
    kind: GroupKind
    layer: int = -1
    expert: int = -1

    def __str__(self) -> str:
        parts = [self.kind.value, *(str(number) for number in (self.layer, self.expert) if number >= 0)]
        return ".".join(parts)


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor of a group: its sources, one below the other, or what `repack` makes of them."""

    name: str
    """Of the matrix or vector, and of the part of it that its format keeps here: `qkv`, or `qkv.scale`."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the group's start."""
    sources: tuple[Source, ...]
    dtype: str
    repack: Callable[[Sequence[Any]], Any] | None = None
    random: range | None = None
    """As in `Stored`."""

    @property
    def size(self) -> int:
        """Bytes of the tensor."""
        return prod(self.shape) * STORED_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class MatrixLayout:
    """A weight matrix of a group, in the format that it rests in."""

    name: str
    shape: tuple[int, int]
    """`[out, in]`, whatever is stored of it."""
    format: Format
    parts: tuple[tuple[str, Field], ...]
    """What the format calls each tensor of it, and where that is."""


@dataclass(frozen=True, slots=True)
class GroupLayout:
    id: GroupId
    fields: tuple[Field, ...]
    size: int
    """Bytes, a multiple of ALIGNMENT."""
    matrices: tuple[MatrixLayout, ...] = ()

    @property
    def vectors(self) -> tuple[Field, ...]:
        """The fields that are no part of a matrix: norms and biases."""
        stored = {field.name for matrix in self.matrices for _, field in matrix.parts}
        return tuple(field for field in self.fields if field.name not in stored)


@dataclass(frozen=True, slots=True)
class PlaneLayout:
    """Where a plane lies among a layer's bytes of a block: `[block_size, heads, width]` numbers of `dtype`
    from `offset` on. Rounded to fp8, they are followed by a scale for each head, float32 `[heads]`."""

    plane: Plane
    offset: int
    size: int
    """Bytes, scales included."""
    dtype: str
    rounded: bool


@dataclass(frozen=True, slots=True)
class KVLayout:
    """A KV block is one run of bytes; in it one layer lies behind the other, and of a layer one plane behind
    the other.

    planes: of each layer's mixer. rounded_from: the dtype of the arithmetic, if blocks rest in fp8.
    """

    planes: tuple[tuple[Plane, ...], ...]
    block_size: int
    dtype: str
    rounded_from: str | None = None

    placed: tuple[tuple[PlaneLayout, ...], ...] = field(init=False, repr=False, compare=False)
    """Where the planes of each layer lie among its bytes."""
    layer_sizes: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Bytes of each layer of a block."""
    layer_offsets: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Where each layer of a block begins."""

    def __post_init__(self) -> None:
        kinds = {planes: self._place(planes) for planes in set(self.planes)}
        placed = tuple(kinds[planes] for planes in self.planes)
        sizes = tuple(sum(one.size for one in layer) for layer in placed)
        object.__setattr__(self, "placed", placed)
        object.__setattr__(self, "layer_sizes", sizes)
        object.__setattr__(self, "layer_offsets", tuple(accumulate(sizes, initial=0))[:-1])

    def _place(self, planes: Sequence[Plane]) -> tuple[PlaneLayout, ...]:
        placed, offset = list[PlaneLayout](), 0
        for plane in planes:
            rounded = self.rounded_from is not None and plane.dtype is None
            dtype, numbers = plane.dtype or self.dtype, self.block_size * plane.numbers
            size = numbers + plane.heads * _SCALE_BYTES if rounded else numbers * STORED_BYTES[dtype]
            placed.append(PlaneLayout(plane, offset, size, dtype, rounded))
            offset += size
        return tuple(placed)

    @property
    def layers(self) -> int:
        """How many layers there are."""
        return len(self.planes)

    @property
    def layer_bytes(self) -> int:
        """Bytes of a block's layer, of the largest."""
        return max(self.layer_sizes)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return sum(self.layer_sizes)

    @property
    def exact(self) -> "KVLayout":
        """The layout of the same blocks as the arithmetic has them."""
        return replace(self, dtype=self.rounded_from, rounded_from=None) if self.rounded_from else self

    @property
    def in_fp8(self) -> "KVLayout":
        """The layout of the same blocks rounded to fp8. Raises ConfigError if scales would lie askew in
        them."""
        rounded = replace(self, dtype=_FP8, rounded_from=self.dtype)
        for one in (plane for layer in set(self.planes) for plane in layer if plane.dtype is None):
            if self.block_size * one.numbers % _SCALE_BYTES:
                raise ConfigError(
                    f"KV in fp8 needs blocks of a multiple of {_SCALE_BYTES} bytes, but {self.block_size} "
                    f"tokens of {one.heads} heads of {one.width} are {self.block_size * one.numbers}; "
                    "choose a "
                    "larger block_size, or host_kv_dtype auto"
                )
        return rounded


def kv_layout(spec: ModelSpec, dtype: str, block_size: int, shard: Shard | None = None) -> KVLayout:
    """Return the layout of KV blocks of the whole model or of a rank's part; ranks' may differ in bytes.

    Raises ConfigError for too many ranks.
    """
    local = local_spec(spec, shard or WHOLE)
    return KVLayout(tuple(layer.mixer.planes for layer in local.stack), block_size, dtype)


@lru_cache(maxsize=2)
def group_layouts(
    spec: ModelSpec, names: TensorNames, dtype: str, shard: Shard | None = None
) -> tuple[GroupLayout, ...]:
    """Every group of the model in the order a pass uses them. With tied embeddings the head group has no
    matrix of its own.

    Of a shard: the same groups with the rank's rows of `qkv`, `gate_up`, `embedding` and `output`, its
    columns of `out` and `down`, and norms and routers whole. What is added to a sum over ranks, `out_bias`
    and `down_bias`, only rank 0 has. Raises ConfigError for too many ranks.
    """
    shard = shard or WHOLE
    lay = _Layer(spec, names, dtype, held(spec, shard), shard)
    embedding = matrix(
        "model.embed_tokens.weight", spec.vocab_size, spec.hidden_size, rows=lay.held.vocabulary
    )
    groups = [lay.group(GroupId(GroupKind.EMBEDDING), {"embedding": [embedding]})]
    for layer in range(spec.layers):
        groups += [lay.mixer(layer), *lay.feed_forward(layer)]
    head: Tensors = {"norm": [vector("model.norm.weight", spec.hidden_size)]}
    if not spec.tied_embeddings:
        head["output"] = [
            matrix("lm_head.weight", spec.vocab_size, spec.hidden_size, rows=lay.held.vocabulary)
        ]
    groups.append(lay.group(GroupId(GroupKind.HEAD), head))
    return tuple(groups)


@dataclass(frozen=True, slots=True)
class _Layer:
    spec: ModelSpec
    names: TensorNames
    dtype: str
    held: Held
    shard: Shard

    def group(self, id: GroupId, tensors: Tensors) -> GroupLayout:
        """Lay tensors out behind each other: matrices as their format has them, vectors as they are."""
        fields, matrices, offset = list[Field](), list[MatrixLayout](), 0
        for name, sources in tensors.items():
            is_matrix = len(sources[0].shape) == 2
            format = self._format(id, sources) if is_matrix else DENSE
            parts = []
            for stored in format.stored(self.dtype, sources):
                label = f"{name}.{stored.name}" if stored.name else name
                field = Field(
                    label, stored.shape, offset, stored.sources, stored.dtype, stored.repack, stored.random
                )
                parts.append((stored.name, field))
                offset += -(-field.size // ALIGNMENT) * ALIGNMENT
            fields += [field for _, field in parts]
            if is_matrix:
                outer, inner = stacked("", self.dtype, sources).shape
                matrices.append(MatrixLayout(name, (outer, inner), format, tuple(parts)))
        return GroupLayout(id, tuple(fields), offset, tuple(matrices))

    def _format(self, id: GroupId, sources: Sequence[Source]) -> Format:
        """Return the format of matrices that are read by one product."""
        formats = tuple(self.spec.format.of(source.tensor) for source in sources)
        if id.kind is GroupKind.EMBEDDING and formats[0] != DENSE:
            raise UnsupportedModelError(
                f"{sources[0].tensor} is quantised; supported: embeddings that are not"
            )
        together = formats[0].fuses and len(set(formats)) == 1
        return (formats[0] if together or len(formats) == 1 else Joined(formats=formats)).cut(sources)

    def mixer(self, layer: int) -> GroupLayout:
        spec, at = self.spec.stack[layer], f"model.layers.{layer}"
        tensors = self._norms(spec.mixer_norms, at) | spec.mixer.weights(
            at, self.spec.hidden_size, self.shard
        )
        return self.group(GroupId(GroupKind.ATTENTION, layer), tensors)

    def feed_forward(self, layer: int) -> list[GroupLayout]:
        spec, at = self.spec.stack[layer], f"model.layers.{layer}"
        norms = self._norms(spec.feed_forward_norms, at)
        if isinstance(spec.feed_forward, Mlp):
            return [self._dense(layer, spec.feed_forward, f"{at}.mlp", norms)]
        return self._mixture(layer, spec.feed_forward, at, norms)

    def _dense(self, layer: int, mlp: Mlp, at: str, norms: Tensors) -> GroupLayout:
        size, inner = mlp.intermediate_size, self.held.inner
        gate, up, down = f"{at}.gate_proj", f"{at}.up_proj", f"{at}.down_proj"
        tensors = norms | self._mlp(gate, up, down, size, inner)
        if mlp.bias:
            tensors["gate_up_bias"] = [vector(f"{name}.bias", size, inner) for name in (gate, up)]
        if mlp.bias and self.shard.rank == 0:
            tensors["down_bias"] = [vector(f"{down}.bias", self.spec.hidden_size)]
        return self.group(GroupId(GroupKind.FFN, layer), tensors)

    def _mixture(self, layer: int, moe: MoeSpec, at: str, norms: Tensors) -> list[GroupLayout]:
        names, hidden = self.names, self.spec.hidden_size
        router = norms | {"router": [matrix(f"{at}.{names.router}.weight", moe.experts, hidden)]}
        groups = [self.group(GroupId(GroupKind.ROUTER, layer), router)]
        for expert in range(moe.experts):
            gate, up, down = (
                f"{at}.{name.format(expert=expert)}"
                for name in (names.expert_gate, names.expert_up, names.expert_down)
            )
            tensors = self._mlp(gate, up, down, moe.intermediate_size, self.held.expert_inner)
            groups.append(self.group(GroupId(GroupKind.EXPERT, layer, expert), tensors))
        return groups

    def _norms(self, norms: Norms, at: str) -> Tensors:
        named = {"norm": norms.before, "norm_after": norms.after}
        return {
            name: [vector(f"{at}.{tensor}.weight", self.spec.hidden_size)]
            for name, tensor in named.items()
            if tensor
        }

    def _mlp(self, gate: str, up: str, down: str, size: int, inner: range) -> Tensors:
        hidden = self.spec.hidden_size
        return {
            "gate_up": [matrix(f"{name}.weight", size, hidden, rows=inner) for name in (gate, up)],
            "down": [matrix(f"{down}.weight", hidden, size, columns=inner)],
        }
