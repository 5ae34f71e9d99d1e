"""Lay out bytes: the groups of weights, what each holds and where it comes from; the bytes of a KV block, and
of a row of state.

A group is the unit in which weights rest and move: one contiguous run. Projections that read the same input
are fused, one below the other, so that a layer needs four matrix products and a group one copy.
"""

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import Any

from penstock.arch.families import TensorNames
from penstock.arch.formats.dense import DENSE
from penstock.arch.formats.format import STORED_BYTES, TensorSlice, WeightFormat, matrix, stacked, vector
from penstock.arch.formats.joined import Joined
from penstock.arch.mixers.mixer import Plane, StateArray
from penstock.arch.parts import Held, held, local_spec
from penstock.arch.shards import WHOLE, Shard
from penstock.arch.spec import Mlp, ModelSpec, MoeSpec, Norms
from penstock.arch.stacks import stacked_expert
from penstock.base.errors import ConfigError, UnsupportedModelError

ALIGNMENT = 256
"""Bytes to which every field of a group is aligned. Vector loads and matrix kernels need no more."""
_FP8, _SCALE_BYTES = "float8_e4m3fn", 4
_FLOAT32 = frozenset({"correction"})
"""Vectors that are float32 whatever the activations are. Rounded, they would change which experts are
chosen."""
Tensors = dict[str, Sequence[TensorSlice]]
"""Tensors of a group, by name. The sources of each are joined one below the other."""


class GroupKind(StrEnum):
    """A GroupKind says which part of the model a group is."""

    EMBEDDING = "embedding"
    ATTENTION = "attention"
    FFN = "ffn"
    ROUTER = "router"
    EXPERT = "expert"
    HEAD = "head"


@dataclass(frozen=True, slots=True, order=True)
class GroupId:
    """A GroupId names a group of weights. `layer` and `expert` are -1 where the kind has none."""

    kind: GroupKind
    layer: int = -1
    expert: int = -1

    def __str__(self) -> str:
        parts = [self.kind.value, *(str(number) for number in (self.layer, self.expert) if number >= 0)]
        return ".".join(parts)


@dataclass(frozen=True, slots=True)
class Field:
    """A field is one tensor of a group.

    name: `qkv` for a vector or a dense matrix, `qkv.scale` for a part that a format keeps of a matrix.
    offset: bytes from the group's start.
    sources: slices of the checkpoint, joined one below the other, or read by `repack`.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    sources: tuple[TensorSlice, ...]
    dtype: str
    repack: Callable[[Sequence[Any]], Any] | None = None
    random: range | None = None
    """The field of `StoredTensor`."""

    @property
    def size(self) -> int:
        """Return the bytes of the tensor."""
        return prod(self.shape) * STORED_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class MatrixLayout:
    """A MatrixLayout says where a weight matrix of a group lies.

    shape: `[out, in]` of the matrix, whatever its format stores.
    parts: the format's name of each tensor that it stores, and the field of the group that has it.
    """

    name: str
    shape: tuple[int, int]
    format: WeightFormat
    parts: tuple[tuple[str, Field], ...]


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """A GroupLayout says where the fields of a group lie. `size` is in bytes, a multiple of `ALIGNMENT`."""

    id: GroupId
    fields: tuple[Field, ...]
    size: int
    matrices: tuple[MatrixLayout, ...] = ()

    @property
    def vectors(self) -> tuple[Field, ...]:
        """Return the fields that are no part of a matrix: norms and biases."""
        stored = {field.name for matrix in self.matrices for _, field in matrix.parts}
        return tuple(field for field in self.fields if field.name not in stored)


@dataclass(frozen=True, slots=True)
class MixtureLayout:
    """A MixtureLayout says how many experts a layer has, and in which formats their matrices rest.

    formats: of gate_up and down; None if they differ from expert to expert.
    biases: how many biases lie behind the matrices of an expert: that of gate_up, and where the rank has it
        that of down.
    """

    experts: int
    formats: tuple[WeightFormat, ...] | None
    biases: int = 0

    kernels: str = field(init=False, repr=False, compare=False)
    """The module of `penstock.ops.triton` that computes the layer's experts at once. If empty, a GPU computes
    one after another."""

    def __post_init__(self) -> None:
        modules = {format.expert_kernels for format in self.formats or ()}
        object.__setattr__(self, "kernels", modules.pop() if len(modules) == 1 else "")


@dataclass(frozen=True, slots=True)
class PlaneLayout:
    """A PlaneLayout says where a plane lies among a layer's bytes of a block.

    It is `[block_size, heads, width]` numbers of `dtype`. If they are rounded to fp8, a scale for each head
    follows, float32 `[heads]`.

    offset: bytes from the layer's start.
    size: bytes, scales included.
    rounded: whether they are rounded to fp8.
    """

    plane: Plane
    offset: int
    size: int
    dtype: str
    rounded: bool


@dataclass(frozen=True, slots=True)
class KVLayout:
    """A KVLayout says where KV lies in a block: layer behind layer, and in a layer plane behind plane.

    planes: the planes of each layer's mixer.
    block_size: tokens of a block.
    dtype: dtype of planes that name none.
    rounded_from: dtype of the arithmetic, if blocks rest in fp8.
    """

    planes: tuple[tuple[Plane, ...], ...]
    block_size: int
    dtype: str
    rounded_from: str | None = None

    placed: tuple[tuple[PlaneLayout, ...], ...] = field(init=False, repr=False, compare=False)
    """The planes of each layer, with their places among the layer's bytes."""
    layer_sizes: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Bytes of each layer of a block."""
    layer_offsets: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Bytes from a block's start to each of its layers."""

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
        """Return the number of layers."""
        return len(self.planes)

    @property
    def layer_bytes(self) -> int:
        """Return the bytes of the largest layer of a block."""
        return max(self.layer_sizes)

    @property
    def block_bytes(self) -> int:
        """Return the bytes of a block."""
        return sum(self.layer_sizes)

    @property
    def exact(self) -> "KVLayout":
        """Return the layout of the same blocks in the dtype of the arithmetic."""
        return replace(self, dtype=self.rounded_from, rounded_from=None) if self.rounded_from else self

    @property
    def in_fp8(self) -> "KVLayout":
        """Return the layout of the same blocks rounded to fp8.

        Raises ConfigError if the scales would not be aligned to 4 bytes.
        """
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


@dataclass(frozen=True, slots=True)
class StateLayout:
    """The state of a sequence is one row of bytes. In it one layer lies behind the other, and of a layer one
    array behind the other, each aligned.

    arrays: of each layer's mixer. dtype: of the arithmetic.
    """

    arrays: tuple[tuple[StateArray, ...], ...]
    dtype: str

    @property
    def placed(self) -> tuple[tuple[tuple[int, StateArray], ...], ...]:
        """The arrays of each layer, and where each begins in a row, in bytes, are these."""
        offsets = accumulate((self._size(one) for layer in self.arrays for one in layer), initial=0)
        return tuple(tuple((next(offsets), one) for one in layer) for layer in self.arrays)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row; 0 if no layer has state."""
        return sum(self._size(one) for layer in self.arrays for one in layer)

    def bytes(self, sequences: int) -> int:
        """Return the bytes of the state of so many sequences at once, and of the row of padding."""
        return self.row_bytes * (sequences + 1)

    def dtype_of(self, array: StateArray) -> str:
        """Return the dtype of an array's numbers."""
        return array.dtype or self.dtype

    def _size(self, array: StateArray) -> int:
        return -(-prod(array.shape) * STORED_BYTES[self.dtype_of(array)] // ALIGNMENT) * ALIGNMENT


def state_layout(spec: ModelSpec, dtype: str, shard: Shard | None = None) -> StateLayout:
    """Return the layout of the state of sequences, of the whole model or of a rank's part.

    Raises ConfigError for too many ranks.
    """
    local = local_spec(spec, shard or WHOLE)
    return StateLayout(tuple(layer.mixer.state for layer in local.stack), dtype)


def kv_layout(spec: ModelSpec, dtype: str, block_size: int, shard: Shard | None = None) -> KVLayout:
    """Return the layout of KV blocks of the whole model or of a rank's part; ranks' may differ in bytes.

    Raises ConfigError for too many ranks, and UnsupportedModelError for a model that keeps nothing of tokens.
    """
    local = local_spec(spec, shard or WHOLE)
    layout = KVLayout(tuple(layer.mixer.planes for layer in local.stack), block_size, dtype)
    if not layout.block_bytes:
        raise UnsupportedModelError(
            f"no layer of {spec.family} keeps KV; supported: models of which one layer does"
        )
    return layout


@lru_cache(maxsize=2)
def group_layouts(
    spec: ModelSpec, names: TensorNames, dtype: str, shard: Shard | None = None, first: int = 0
) -> tuple[GroupLayout, ...]:
    """Return the layouts of all groups of the model, in the order in which a pass uses them; of its layers
    from `first` on.

    With tied embeddings the head has no matrix of its own. A shard has the same groups, with the rank's rows
    of `qkv`, `gate_up`, `embedding` and `output`, its columns of `out` and `down`, and all of the norms and
    routers. `out_bias` and `down_bias` are added to a sum over ranks, so only rank 0 has them.

    Raises ConfigError for too many ranks.
    """
    shard = shard or WHOLE
    lay = _Layer(spec, names, dtype, held(spec, shard), shard)
    embedding = matrix(
        "model.embed_tokens.weight", spec.vocab_size, spec.hidden_size, rows=lay.held.vocabulary
    )
    groups = [lay.group(GroupId(GroupKind.EMBEDDING), {"embedding": [embedding]})]
    for layer in range(first, spec.layers):
        groups += [lay.mixer(layer), *lay.feed_forward(layer)]
    head: Tensors = {"norm": [vector("model.norm.weight", spec.hidden_size)]}
    if not spec.tied_embeddings:
        head["output"] = [
            matrix("lm_head.weight", spec.vocab_size, spec.hidden_size, rows=lay.held.vocabulary)
        ]
    groups.append(lay.group(GroupId(GroupKind.HEAD), head))
    return tuple(groups)


def mixture_layouts(layouts: Iterable[GroupLayout]) -> dict[int, MixtureLayout]:
    """Return what each layer that is a mixture has, by the layer's number."""
    formats, biases = dict[int, list[tuple[WeightFormat, ...]]](), dict[int, int]()
    for layout in layouts:
        if layout.id.kind is GroupKind.EXPERT:
            formats.setdefault(layout.id.layer, []).append(tuple(one.format for one in layout.matrices))
            biases[layout.id.layer] = len(layout.vectors)
    return {
        layer: MixtureLayout(
            len(every), every[0] if every.count(every[0]) == len(every) else None, biases[layer]
        )
        for layer, every in formats.items()
    }


@dataclass(frozen=True, slots=True)
class _Layer:
    """Lays out the groups of a layer, as one rank holds them."""

    spec: ModelSpec
    names: TensorNames
    dtype: str
    held: Held
    shard: Shard

    def group(self, id: GroupId, tensors: Tensors, float32: Container[str] = _FLOAT32) -> GroupLayout:
        """Lay tensors out behind each other: matrices as their format stores them, vectors as they are.

        float32: names of tensors that are float32 whatever the activations are, unless of few bits.
        """
        fields, matrices, offset = list[Field](), list[MatrixLayout](), 0
        for name, sources in tensors.items():
            is_matrix = len(sources[0].shape) == 2
            format = self._format(sources) if is_matrix else DENSE
            parts = []
            for stored in format.stored("float32" if name in float32 else self.dtype, sources):
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

    def _format(self, sources: Sequence[TensorSlice]) -> WeightFormat:
        """Return the format of matrices that are read by one product."""
        formats = tuple(self.spec.format.of(source.tensor) for source in sources)
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
        names, hidden, router = self.names, self.spec.hidden_size, moe.router
        tensors = norms | {"router": [matrix(f"{at}.{names.router}.weight", moe.experts, hidden)]}
        if router.bias:
            tensors["router_bias"] = [vector(f"{at}.{names.router}.bias", moe.experts)]
        if router.correction:
            tensors["correction"] = [vector(f"{at}.{names.correction}", moe.experts)]
        if moe.shared is not None:
            gate, up, down = (f"{at}.{names.shared}.{part}_proj" for part in ("gate", "up", "down"))
            tensors |= self._mlp(gate, up, down, moe.shared.intermediate_size, self.held.shared_inner)
        if moe.shared_gate:
            tensors["shared_gate"] = [matrix(f"{at}.{names.shared_gate}.weight", 1, hidden)]
        float32 = _FLOAT32 | ({"router", "router_bias"} if router.float32 else set())
        return [
            self.group(GroupId(GroupKind.ROUTER, layer), tensors, float32),
            *(
                self.group(GroupId(GroupKind.EXPERT, layer, expert), self._expert(at, expert, moe))
                for expert in range(moe.experts)
            ),
        ]

    def _expert(self, at: str, expert: int, moe: MoeSpec) -> Tensors:
        names, inner = self.names, self.held.expert_inner
        if names.stacked:
            found = stacked_expert(f"{at}.mlp", expert, moe, self.spec.hidden_size, self.spec.format, inner)
            if self.shard.rank > 0:
                found.pop("down_bias", None)
            return found
        gate, up, down = (
            f"{at}.{name.format(expert=expert)}"
            for name in (names.expert_gate, names.expert_up, names.expert_down)
        )
        return self._mlp(gate, up, down, moe.intermediate_size, inner)

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
