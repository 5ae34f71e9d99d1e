"""Counts the bytes and operations of each use of a weight group in a pass, from the model's shape.

The same counts fit step costs to measured steps (`bench.doctor.calibration`) and forecast other models from
them (`engine.forecast`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

from penstock.arch import bounds
from penstock.arch.layout import GroupKind, GroupLayout, kv_layout
from penstock.arch.spec import DTYPE_BYTES, ModelSpec


@dataclass(frozen=True, slots=True)
class StepShape:
    """A StepShape holds the numbers of one pass that its cost depends on.

    tokens: computed in the pass.
    rows: tokens that need logits.
    pairs: for a layer, pairs of a query and a key that it sees.
    kv: for a layer, bytes of KV that are read.
    far: for a layer, bytes of KV that come over the link where KV rests in host memory.
    decodes: whether it is a decode step, not a part of prefill.
    verifies: whether it verifies drafts. Such a decode step is never recorded: the host launches its kernels.
    """

    tokens: float
    rows: float
    pairs: Callable[[int], float]
    kv: Callable[[int], float]
    far: Callable[[int], float]
    decodes: bool
    verifies: bool = False


@dataclass(frozen=True, slots=True)
class UseWork:
    """Counts what one use of a weight group does, or several uses together.

    steps, layers, moe_layers: how many steps, dense layers and layers with experts these uses are; each has
        fixed costs. A part of a layer counts as a fraction.
    weights, experts, kv, activations: bytes.
    products, expert_products, attention: floating-point operations.
    """

    steps: float = 0.0
    layers: float = 0.0
    moe_layers: float = 0.0
    weights: float = 0.0
    experts: float = 0.0
    kv: float = 0.0
    activations: float = 0.0
    products: float = 0.0
    expert_products: float = 0.0
    attention: float = 0.0

    @property
    def bytes(self) -> float:
        """Return the bytes of weights and KV that are read."""
        return self.weights + self.experts + self.kv

    @property
    def operations(self) -> float:
        """Return the floating-point operations of all products."""
        return self.products + self.expert_products + self.attention

    @classmethod
    def sum(cls, uses: Sequence["UseWork"]) -> Self:
        """Return the sum of several counts, field by field."""
        return cls(*(sum(getattr(use, field.name) for use in uses) for field in fields(cls)))


def decode_step(spec: ModelSpec, dtype: str, batch: int, context: float, near: int = 0) -> StepShape:
    """Return the shape of a decode step: one token for each of `batch` sequences of `context` tokens.

    near: newest tokens of each sequence that are in pages on the device. Their KV does not cross the link.
    """
    near_bytes = near * kv_layout(spec, dtype, 1).layer_bytes

    def pairs(layer: int) -> float:
        return batch * bounds.tokens_seen(spec, context, layer)

    def kv(layer: int) -> float:
        return batch * bounds.kv_layer_bytes_read(spec, dtype, context, layer)

    return StepShape(
        batch, batch, pairs, kv, lambda layer: max(kv(layer) - batch * near_bytes, 0), decodes=True
    )


def verify_step(
    spec: ModelSpec, dtype: str, batch: int, context: float, tokens: int, near: int = 0
) -> StepShape:
    """Return the shape of a step that verifies drafts: `tokens` tokens, of which all but one are drafted, of
    each of `batch` sequences. All of a sequence attend together, so its KV is read once. near: see
    `decode_step`."""
    one = decode_step(spec, dtype, batch, context, near)
    return replace(
        one,
        tokens=batch * tokens,
        rows=batch * tokens,
        pairs=lambda layer: tokens * one.pairs(layer),
        verifies=True,
    )


def prompt_step(
    spec: ModelSpec, dtype: str, batch: int, context: int, step_tokens: int, *, needed: bool = True
) -> StepShape:
    """Return the mean of the passes that prefill `batch` prompts of `context` tokens.

    Reads of keys are not counted: prefill attention is bound by its products.

    step_tokens: tokens of one pass.
    needed: whether the last layer attends only from tokens that need logits. Where KV streams, all attend.
    """
    tokens = batch * context
    passes = -(-tokens // step_tokens)

    def pairs(layer: int) -> float:
        return batch * bounds.prompt_pairs(spec, [context], layer, needed=needed) / passes

    def far(layer: int) -> float:
        """Return the bytes that chunks fetch: each reads the KV before it, as far as its window goes."""
        starts = range(step_tokens, context, step_tokens)
        return batch * sum(bounds.kv_layer_bytes_read(spec, dtype, start, layer) for start in starts) / passes

    return StepShape(tokens / passes, batch / passes, pairs, lambda layer: 0, far, decodes=False)


@dataclass(frozen=True, slots=True)
class MixtureSize:
    """Holds what is to be known of a layer's experts.

    mean: bytes of an expert; they differ where some rest in other formats. one: the layout of one.
    """

    mean: float
    one: GroupLayout


def mixtures_of(layouts: Iterable[GroupLayout]) -> dict[int, MixtureSize]:
    """Return what is to be known of the experts of each layer that is a mixture, by the layer's number."""
    found = dict[int, list[GroupLayout]]()
    for layout in layouts:
        if layout.id.kind is GroupKind.EXPERT:
            found.setdefault(layout.id.layer, []).append(layout)
    return {
        layer: MixtureSize(sum(one.size for one in experts) / len(experts), experts[0])
        for layer, experts in found.items()
    }


def pass_work(
    spec: ModelSpec,
    dtype: str,
    every: Sequence[GroupLayout],
    mixtures: Mapping[int, MixtureSize],
    step: StepShape,
) -> list[UseWork]:
    """Return the work of each use of a pass, in the order of `residency.pass_order`.

    A router's work includes that of its experts, as if tokens chose them evenly.

    every: the layouts of the groups, in the same order.
    mixtures: of `mixtures_of`.
    """
    return [_use(spec, dtype, every, index, mixtures, step) for index in range(len(every))]


def _use(
    spec: ModelSpec,
    dtype: str,
    every: Sequence[GroupLayout],
    index: int,
    mixtures: Mapping[int, MixtureSize],
    step: StepShape,
) -> UseWork:
    layout, layer, element = every[index], every[index].id.layer, DTYPE_BYTES[dtype]
    if index == 0:
        return UseWork(weights=bounds.embedding_bytes_read(spec, layout, step.tokens))
    if index == len(every) - 1:
        return UseWork(steps=1, weights=layout.size, products=bounds.output_operations(spec, step.rows))
    tokens = step.rows if layer == spec.layers - 1 else step.tokens
    products = bounds.needed_operations(spec, layout, step.tokens, step.rows)
    layers, moe_layers = (0.0, 0.5) if spec.is_moe(layer) else (0.5, 0.0)
    kind = layout.id.kind
    if kind is GroupKind.ATTENTION:
        # Hidden states are read, normed, and added to; queries, keys and values are written, rotated and
        # read; so is what attention gives.
        mixer = spec.stack[layer].mixer
        moved = 4 * spec.hidden_size + 3 * mixer.projected_size + 2 * mixer.output_size
        attention = bounds.attention_operations(spec, step.pairs(layer), layer)
        return UseWork(
            layers=layers,
            moe_layers=moe_layers,
            weights=layout.size,
            kv=step.kv(layer) + step.rows * bounds.state_bytes_moved(spec, dtype, layer),
            activations=element * moved * tokens,
            products=products,
            attention=attention,
        )
    if kind is GroupKind.ROUTER:
        assert spec.moe is not None
        moved = 4 * spec.hidden_size + spec.moe.top_k * (
            3 * spec.moe.intermediate_size + 2 * spec.hidden_size
        )
        if spec.shared_size:
            moved += 3 * spec.shared_size + 3 * spec.hidden_size
        experts = mixtures[layer]
        chosen = bounds.experts_chosen(spec.moe, tokens) * experts.mean
        operations = spec.moe.experts * bounds.matrix_operations(spec, experts.one, tokens)
        return UseWork(
            layers=layers,
            moe_layers=moe_layers,
            weights=layout.size,
            experts=chosen,
            activations=element * moved * tokens,
            products=products,
            expert_products=operations,
        )
    moved = 4 * spec.hidden_size + 3 * spec.intermediate_size
    return UseWork(
        layers=layers,
        moe_layers=moe_layers,
        weights=layout.size,
        activations=element * moved * tokens,
        products=products,
    )
