"""What a step must read and compute at least, from the model's shape alone. Divided by measured rates, the times no engine can beat."""

from collections.abc import Sequence
from math import prod

from penstock.arch.layout import GroupKind, GroupLayout, kv_layout
from penstock.arch.spec import ModelSpec


def parameters(layouts: Sequence[GroupLayout]) -> int:
    """Numbers the model is made of."""
    return sum(prod(field.shape) for layout in layouts for field in layout.fields)


def weight_bytes(layouts: Sequence[GroupLayout]) -> int:
    """All weights as they rest in memory."""
    return sum(layout.size for layout in layouts)


def weight_bytes_read(spec: ModelSpec, layouts: Sequence[GroupLayout], rows: int = 1) -> float:
    """Bytes of weights that a step with `rows` sequences reads: every group once, of the experts those that someone chose.

    Of the embedding only `rows` rows are read, unless it is the output matrix too. Tokens are taken to choose experts evenly, so an
    expert is left alone by all of them with probability (1 - top_k / experts) ** rows.
    """
    total = 0.0
    for layout in layouts:
        if layout.id.kind is GroupKind.EXPERT:
            assert spec.moe is not None
            total += layout.size * (1 - (1 - spec.moe.top_k / spec.moe.experts) ** rows)
        elif layout.id.kind is GroupKind.EMBEDDING and not spec.tied_embeddings:
            total += layout.size * min(rows / spec.vocab_size, 1)
        else:
            total += layout.size
    return total


def kv_token_bytes(spec: ModelSpec, dtype: str) -> int:
    """Bytes of KV that one token of one sequence takes."""
    return kv_layout(spec, dtype, 1).block_bytes


def kv_bytes_read(spec: ModelSpec, dtype: str, length: float) -> float:
    """Bytes of KV that a step reads for one sequence of `length` tokens; a layer with a window reads no further than that."""
    layer = kv_layout(spec, dtype, 1).layer_bytes
    return sum(layer * (length if window is None else min(length, window)) for window in spec.windows)


def prefill_operations(spec: ModelSpec, layouts: Sequence[GroupLayout], lengths: Sequence[int]) -> float:
    """Floating-point operations for prompts of these lengths: two for each weight and token, two products of attention for each pair of
    tokens that sees each other, and the output matrix for the last token of each."""
    tokens, matrix = sum(lengths), 0.0
    for layout in layouts:
        if layout.id.kind in (GroupKind.EMBEDDING, GroupKind.HEAD):
            continue
        weights: float = sum(prod(field.shape) for field in layout.fields if len(field.shape) == 2)
        if layout.id.kind is GroupKind.EXPERT:
            assert spec.moe is not None
            weights *= spec.moe.top_k / spec.moe.experts
        matrix += weights
    pairs = sum(_pairs(length, window) for length in lengths for window in spec.windows)
    return 2 * matrix * tokens + 4 * pairs * spec.query_size + 2 * len(lengths) * spec.vocab_size * spec.hidden_size


def _pairs(length: int, window: int | None) -> int:
    """Query and key pairs of a causal sequence in which a query sees `window` tokens."""
    seen = length if window is None else min(window, length)
    return seen * (seen + 1) // 2 + (length - seen) * seen
