"""How bytes are laid out: the groups of weights, what each holds and where it comes from; the bytes of a KV
block.

A group is the unit in which weights rest and move: one contiguous run. Projections that read the same input
are fused, one below the other, so that a layer needs four matrix products and a group one copy.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from math import prod
from typing import Any

from penstock.arch.families import TensorNames
from penstock.arch.formats.dense import DENSE
from penstock.arch.formats.format import STORED_BYTES, Format, Source, stacked
from penstock.arch.shards import WHOLE, Held, Shard, held, local_spec
from penstock.arch.spec import DTYPE_BYTES, ModelSpec
from penstock.base.errors import ConfigError, UnsupportedModelError

ALIGNMENT = 256
"""Bytes at which every field of a group starts: a multiple of any vector load and of what matrix kernels
want."""
_FP8, _SCALE_BYTES = "float8_e4m3fn", 4


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
class KVLayout:
    """A pool of KV blocks is `[blocks, layers, 2, block_size, kv_heads, head_dim]`: a block is one run, and
    in it a layer's K, then V.

    Rounded to fp8, K is followed by a scale for each head, float32 `[kv_heads]`, and so is V.
    """

    layers: int
    block_size: int
    kv_heads: int
    head_dim: int
    dtype: str
    rounded_from: str | None = None
    """The dtype of the arithmetic, if blocks rest in fp8."""

    @property
    def elements(self) -> int:
        """Numbers in a block's K, or V, of a layer."""
        return self.block_size * self.kv_heads * self.head_dim

    @property
    def layer_bytes(self) -> int:
        if self.rounded_from:
            return 2 * (self.elements + self.kv_heads * _SCALE_BYTES)
        return 2 * self.elements * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        return self.layers * self.layer_bytes

    @property
    def exact(self) -> "KVLayout":
        """Of the same blocks as the arithmetic has them."""
        return replace(self, dtype=self.rounded_from, rounded_from=None) if self.rounded_from else self

    @property
    def in_fp8(self) -> "KVLayout":
        """Of the same blocks rounded to fp8. Raises ConfigError if the scales would lie askew in them."""
        if self.elements % _SCALE_BYTES:
            raise ConfigError(
                f"KV in fp8 needs blocks of a multiple of {_SCALE_BYTES} bytes, but {self.block_size} "
                f"tokens of {self.kv_heads} heads of "
                f"{self.head_dim} are {self.elements}; choose a larger block_size, or host_kv_dtype auto"
            )
        return replace(self, dtype=_FP8, rounded_from=self.dtype)


def kv_layout(spec: ModelSpec, dtype: str, block_size: int, shard: Shard | None = None) -> KVLayout:
    """Of the whole model or of a rank's KV heads; ranks' may differ in bytes. Raises ConfigError for too many
    ranks."""
    return KVLayout(spec.layers, block_size, local_spec(spec, shard or WHOLE).kv_heads, spec.head_dim, dtype)


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
    lay = _Layer(spec, names, dtype, held(spec, shard), first=shard.rank == 0)
    embedding = _matrix(
        "model.embed_tokens.weight", spec.vocab_size, spec.hidden_size, rows=lay.held.vocabulary
    )
    groups = [lay.group(GroupId(GroupKind.EMBEDDING), {"embedding": [embedding]})]
    for layer in range(spec.layers):
        groups.append(lay.attention(layer))
        groups.extend(lay.moe(layer) if spec.is_moe(layer) else [lay.ffn(layer)])
    head = {"norm": [_vector("model.norm.weight", spec.hidden_size)]}
    if not spec.tied_embeddings:
        head["output"] = [
            _matrix("lm_head.weight", spec.vocab_size, spec.hidden_size, rows=lay.held.vocabulary)
        ]
    groups.append(lay.group(GroupId(GroupKind.HEAD), head))
    return tuple(groups)


def _matrix(
    tensor: str, height: int, width: int, *, rows: range | None = None, columns: range | None = None
) -> Source:
    return Source(tensor, (height, width), _part(rows, height), _part(columns, width))


def _vector(tensor: str, length: int, rows: range | None = None) -> Source:
    return Source(tensor, (length,), _part(rows, length))


def _part(taken: range | None, of: int) -> range | None:
    """None for all, however it is said: whole tensors are read in one run."""
    return None if taken == range(of) else taken


def _rows_of(heads: range, dim: int) -> range:
    return range(heads.start * dim, heads.stop * dim)


@dataclass(frozen=True, slots=True)
class _Layer:
    spec: ModelSpec
    names: TensorNames
    dtype: str
    held: Held
    first: bool
    """Whether what is added to a sum over ranks is added here."""

    def group(self, id: GroupId, tensors: dict[str, list[Source]]) -> GroupLayout:
        """Lay tensors out behind each other: matrices as their format has them, vectors as they are."""
        fields, matrices, offset = list[Field](), list[MatrixLayout](), 0
        for name, sources in tensors.items():
            is_matrix = len(sources[0].shape) == 2
            format = self._format(id, sources) if is_matrix else DENSE
            parts = []
            for stored in format.stored(self.dtype, sources):
                label = f"{name}.{stored.name}" if stored.name else name
                field = Field(label, stored.shape, offset, stored.sources, stored.dtype, stored.repack)
                parts.append((stored.name, field))
                offset += -(-field.size // ALIGNMENT) * ALIGNMENT
            fields += [field for _, field in parts]
            if is_matrix:
                outer, inner = stacked("", self.dtype, sources).shape
                matrices.append(MatrixLayout(name, (outer, inner), format, tuple(parts)))
        return GroupLayout(id, tuple(fields), offset, tuple(matrices))

    def _format(self, id: GroupId, sources: Sequence[Source]) -> Format:
        """Return the one format of matrices that are fused."""
        if id.kind in (GroupKind.EMBEDDING, GroupKind.ROUTER, GroupKind.HEAD):
            return DENSE
        formats = {self.spec.format.of(source.tensor) for source in sources}
        if len(formats) > 1:
            names = " and ".join(source.tensor for source in sources)
            raise UnsupportedModelError(f"{names} are read by one product, but rest in several formats")
        return formats.pop()

    def attention(self, layer: int) -> GroupLayout:
        spec, at = self.spec, f"model.layers.{layer}.self_attn"
        queries, keys = _rows_of(self.held.heads, spec.head_dim), _rows_of(self.held.kv_heads, spec.head_dim)
        parts = {"q": (spec.query_size, queries), "k": (spec.kv_size, keys), "v": (spec.kv_size, keys)}
        fields = {
            "norm": [_vector(f"model.layers.{layer}.input_layernorm.weight", spec.hidden_size)],
            "qkv": [
                _matrix(f"{at}.{name}_proj.weight", size, spec.hidden_size, rows=rows)
                for name, (size, rows) in parts.items()
            ],
        }
        if spec.qkv_bias:
            fields["qkv_bias"] = [
                _vector(f"{at}.{name}_proj.bias", size, rows) for name, (size, rows) in parts.items()
            ]
        if spec.qk_norm:
            fields["q_norm"] = [_vector(f"{at}.q_norm.weight", spec.head_dim)]
            fields["k_norm"] = [_vector(f"{at}.k_norm.weight", spec.head_dim)]
        fields["out"] = [_matrix(f"{at}.o_proj.weight", spec.hidden_size, spec.query_size, columns=queries)]
        if spec.out_bias and self.first:
            fields["out_bias"] = [_vector(f"{at}.o_proj.bias", spec.hidden_size)]
        return self.group(GroupId(GroupKind.ATTENTION, layer), fields)

    def ffn(self, layer: int) -> GroupLayout:
        spec, at, inner = self.spec, f"model.layers.{layer}.mlp", self.held.inner
        gate, up, down = f"{at}.gate_proj", f"{at}.up_proj", f"{at}.down_proj"
        fields = {"norm": [self._ffn_norm(layer)]} | self._mlp(gate, up, down, spec.intermediate_size, inner)
        if spec.mlp_bias:
            fields["gate_up_bias"] = [
                _vector(f"{name}.bias", spec.intermediate_size, inner) for name in (gate, up)
            ]
        if spec.mlp_bias and self.first:
            fields["down_bias"] = [_vector(f"{down}.bias", spec.hidden_size)]
        return self.group(GroupId(GroupKind.FFN, layer), fields)

    def moe(self, layer: int) -> list[GroupLayout]:
        spec, names, at, moe = self.spec, self.names, f"model.layers.{layer}", self.spec.moe
        assert moe is not None
        router = {
            "norm": [self._ffn_norm(layer)],
            "router": [_matrix(f"{at}.{names.router}.weight", moe.experts, spec.hidden_size)],
        }
        groups = [self.group(GroupId(GroupKind.ROUTER, layer), router)]
        for expert in range(moe.experts):
            gate, up, down = (
                f"{at}.{name.format(expert=expert)}"
                for name in (names.expert_gate, names.expert_up, names.expert_down)
            )
            fields = self._mlp(gate, up, down, moe.intermediate_size, self.held.expert_inner)
            groups.append(self.group(GroupId(GroupKind.EXPERT, layer, expert), fields))
        return groups

    def _ffn_norm(self, layer: int) -> Source:
        return _vector(f"model.layers.{layer}.post_attention_layernorm.weight", self.spec.hidden_size)

    def _mlp(self, gate: str, up: str, down: str, size: int, inner: range) -> dict[str, list[Source]]:
        hidden = self.spec.hidden_size
        return {
            "gate_up": [_matrix(f"{name}.weight", size, hidden, rows=inner) for name in (gate, up)],
            "down": [_matrix(f"{down}.weight", hidden, size, columns=inner)],
        }
