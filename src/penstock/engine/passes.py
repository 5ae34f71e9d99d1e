"""Count what each use of a group does in a pass, from the model's shape: bytes that are read, operations, and
what the costs of a step are paid by. The same counts fit the costs to measured steps (`bench.calibration`)
and forecast other models by them (`engine.forecast`)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Self

from penstock.arch import bounds
from penstock.arch.layout import GroupKind, GroupLayout, kv_layout
from penstock.arch.spec import DTYPE_BYTES, ModelSpec


@dataclass(frozen=True, slots=True)
class Step:
    """One pass. tokens: computed in it. rows: tokens whose logits are wanted. By layer: pairs of a query and
    a key that it sees, bytes of KV read, and bytes of KV that come over the link (`far`) where KV rests in
    host memory."""

    tokens: float
    rows: float
    pairs: Callable[[int], float]
    kv: Callable[[int], float]
    far: Callable[[int], float]
    decodes: bool


@dataclass(frozen=True, slots=True)
class UseWork:
    """Counts what one use of a group does, or many together.

    steps, layers, moe_layers: the share of a pass's end, of a dense layer and of one with experts, whose
    fixed costs it bears. weights, experts, kv, activations: bytes. products, expert_products, attention:
    floating-point operations.
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
        """Weights and KV that are read take so many bytes."""
        return self.weights + self.experts + self.kv

    @property
    def operations(self) -> float:
        """All products together take so many operations."""
        return self.products + self.expert_products + self.attention

    @classmethod
    def sum(cls, uses: Sequence["UseWork"]) -> Self:
        """Return all of them together."""
        return cls(*(sum(getattr(use, field.name) for use in uses) for field in fields(cls)))


def decode_step(spec: ModelSpec, dtype: str, batch: int, context: float, near: int = 0) -> Step:
    """One token for each of `batch` sequences of `context` tokens. near: newest tokens of each whose KV need
    not come over the link, since the device's pages hold it as well."""
    near_bytes = near * kv_layout(spec, dtype, 1).layer_bytes

    def pairs(layer: int) -> float:
        return batch * bounds.tokens_seen(spec, context, layer)

    def kv(layer: int) -> float:
        return batch * bounds.kv_layer_bytes_read(spec, dtype, context, layer)

    return Step(batch, batch, pairs, kv, lambda layer: max(kv(layer) - batch * near_bytes, 0), decodes=True)


def prompt_step(
    spec: ModelSpec, dtype: str, batch: int, context: int, step_tokens: int, *, needed: bool = True
) -> Step:
    """The mean of the passes that `batch` prompts of `context` tokens take together, `step_tokens` at a time.
    Keys are read so seldom for each product that only the products count. needed: whether in the last layer
    only those look whose logits are wanted; with KV that passes by, all do."""
    tokens = batch * context
    passes = -(-tokens // step_tokens)

    def pairs(layer: int) -> float:
        return batch * bounds.prompt_pairs(spec, [context], layer, needed=needed) / passes

    def far(layer: int) -> float:
        """Every chunk of a sequence brings what is before it, as far as its window goes."""
        starts = range(step_tokens, context, step_tokens)
        return batch * sum(bounds.kv_layer_bytes_read(spec, dtype, start, layer) for start in starts) / passes

    return Step(tokens / passes, batch / passes, pairs, lambda layer: 0, far, decodes=False)


def pass_work(
    spec: ModelSpec, dtype: str, every: Sequence[GroupLayout], expert: GroupLayout | None, step: Step
) -> list[UseWork]:
    """The work of each use of a pass, in its order (`residency.pass_order`). A router's is also that of its
    experts, which are taken to be chosen evenly. `expert`: the layout of one, if the model has any."""
    return [_use(spec, dtype, every, index, expert, step) for index in range(len(every))]


def _use(
    spec: ModelSpec,
    dtype: str,
    every: Sequence[GroupLayout],
    index: int,
    expert: GroupLayout | None,
    step: Step,
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
        assert expert is not None
        moved = 4 * spec.hidden_size + spec.moe.top_k * (
            3 * spec.moe.intermediate_size + 2 * spec.hidden_size
        )
        chosen = bounds.experts_chosen(spec.moe, tokens) * expert.size
        operations = spec.moe.experts * bounds.matrix_operations(spec, expert, tokens)
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
