"""Computes lower bounds of what a step reads and computes (a roofline) from the model's shape alone.

Bytes over a measured bandwidth, or operations over a measured throughput, give a time that no engine can
beat.
"""

from collections.abc import Sequence
from math import prod

from penstock.arch.formats.format import STORED_BYTES
from penstock.arch.layout import GroupKind, GroupLayout, kv_layout
from penstock.arch.spec import ModelSpec, MoeSpec


def parameters(layouts: Sequence[GroupLayout]) -> int:
    """Return the number of parameters of the model."""
    matrices = sum(prod(matrix.shape) for layout in layouts for matrix in layout.matrices)
    return matrices + sum(prod(field.shape) for layout in layouts for field in layout.vectors)


def weight_bytes(layouts: Sequence[GroupLayout]) -> int:
    """Return the bytes of all weights as they rest in memory."""
    return sum(layout.size for layout in layouts)


def experts_chosen(moe: MoeSpec, rows: float) -> float:
    """Return the expected number of experts of a layer that at least one of `rows` tokens chooses.

    Tokens are assumed to choose evenly. Then no token chooses an expert with probability (1 - top_k /
    experts) ** rows.
    """
    left_alone: float = (1 - moe.top_k / moe.experts) ** rows
    return moe.experts * (1 - left_alone)


def weight_bytes_read(spec: ModelSpec, layouts: Sequence[GroupLayout], rows: int = 1) -> float:
    """Return the bytes of weights that a step of `rows` sequences reads.

    Every group is read once, and those experts that a token chose. Of the embedding only `rows` rows are
    read, unless it is the output matrix too (tied embeddings).
    """
    total = 0.0
    for layout in layouts:
        if layout.id.kind is GroupKind.EXPERT:
            assert spec.moe is not None
            total += layout.size * experts_chosen(spec.moe, rows) / spec.moe.experts
        elif layout.id.kind is GroupKind.EMBEDDING and not spec.tied_embeddings:
            total += embedding_bytes_read(spec, layout, rows)
        else:
            total += layout.size
    return total


def embedding_bytes_read(spec: ModelSpec, layout: GroupLayout, tokens: float) -> float:
    """Return the bytes of the embedding that looking up `tokens` tokens reads."""
    return layout.size * min(tokens / spec.vocab_size, 1)


def kv_token_bytes(spec: ModelSpec, dtype: str) -> int:
    """Return the bytes of KV that one token of one sequence takes."""
    return kv_layout(spec, dtype, 1).block_bytes


def kv_bytes_read(spec: ModelSpec, dtype: str, length: float) -> float:
    """Return the bytes of KV that a decode step reads for one sequence of `length` tokens.

    A layer with a sliding window reads no further than that.
    """
    return sum(kv_layer_bytes_read(spec, dtype, length, layer) for layer in range(spec.layers))


def kv_layer_bytes_read(spec: ModelSpec, dtype: str, length: float, layer: int) -> float:
    """Return the bytes of KV that one layer of a decode step reads for one sequence of `length` tokens."""
    planes = spec.stack[layer].mixer.planes
    token = sum(plane.numbers * STORED_BYTES[plane.dtype or dtype] for plane in planes)
    return token * tokens_seen(spec, length, layer)


def state_bytes_moved(spec: ModelSpec, dtype: str, layer: int) -> int:
    """Bytes of a layer's state that a step reads and writes for one sequence."""
    arrays = spec.stack[layer].mixer.state
    return 2 * sum(prod(one.shape) * STORED_BYTES[one.dtype or dtype] for one in arrays)


def tokens_seen(spec: ModelSpec, length: float, layer: int) -> float:
    """Return how many tokens the last token of a sequence of `length` attends to, itself included."""
    return spec.stack[layer].mixer.seen(length)


def prefill_operations(spec: ModelSpec, layouts: Sequence[GroupLayout], lengths: Sequence[int]) -> float:
    """Return the floating-point operations of prefilling prompts of these lengths.

    They are two for each weight and token, attention for each pair of a query and a key that it sees, and the
    output matrix for the last token of each prompt. Tokens before the last one leave only their KV in the
    last layer.
    """
    matrices = sum(needed_operations(spec, layout, sum(lengths), len(lengths)) for layout in layouts)
    attention = sum(
        attention_operations(spec, prompt_pairs(spec, lengths, layer), layer) for layer in range(spec.layers)
    )
    return matrices + attention + output_operations(spec, len(lengths))


def doubles_at(spec: ModelSpec, layouts: Sequence[GroupLayout]) -> float:
    """Return the position at which a token takes twice the operations of the first one.

    There attention takes as many operations as all matrices. Windows are ignored.
    """
    a_pair = sum(attention_operations(spec, 1, layer) for layer in range(spec.layers))
    return sum(matrix_operations(spec, layout, 1) for layout in layouts) / a_pair


def matrix_operations(spec: ModelSpec, layout: GroupLayout, tokens: float) -> float:
    """Return the floating-point operations of a group's matrix products with `tokens` tokens.

    For an expert, the tokens that choose it are counted. Embedding and output matrix count as 0; see
    `output_operations`.
    """
    if layout.id.kind in (GroupKind.EMBEDDING, GroupKind.HEAD):
        return 0
    operations = sum(matrix.format.operations(matrix.shape, tokens) for matrix in layout.matrices)
    if layout.id.kind is GroupKind.ATTENTION:
        operations += tokens * spec.stack[layout.id.layer].mixer.state_operations
    if layout.id.kind is GroupKind.EXPERT:
        assert spec.moe is not None
        operations *= spec.moe.top_k / spec.moe.experts
    return operations


def needed_operations(spec: ModelSpec, layout: GroupLayout, tokens: float, rows: float) -> float:
    """`matrix_operations` with tokens of which `rows` are read when they have passed all layers: in the last
    one the others leave KV, and what they change of state."""
    if layout.id.layer < spec.layers - 1:
        return matrix_operations(spec, layout, tokens)
    mixes = layout.id.kind is GroupKind.ATTENTION
    mixer = spec.stack[-1].mixer
    kept = mixer.kept_operations(spec.hidden_size) + mixer.state_operations if mixes else 0
    return matrix_operations(spec, layout, rows) + kept * (tokens - rows)


def attention_operations(spec: ModelSpec, pairs: float, layer: int) -> float:
    """Return the floating-point operations of one layer's attention over `pairs` pairs of a query and a
    key."""
    return pairs * spec.stack[layer].mixer.pair_operations


def output_operations(spec: ModelSpec, rows: float) -> float:
    """Return the floating-point operations of the logits of `rows` tokens."""
    return 2 * rows * spec.vocab_size * spec.hidden_size


def prompt_pairs(spec: ModelSpec, lengths: Sequence[int], layer: int, *, needed: bool = True) -> float:
    """Return the pairs of a query and a key that it sees, in causal prompts of these lengths.

    needed: whether in the last layer only the last token of each prompt attends.
    """
    if needed and layer == spec.layers - 1:
        return sum(tokens_seen(spec, length, layer) for length in lengths)
    return sum(_pairs(length, spec.windows[layer]) for length in lengths)


def _pairs(length: int, window: int | None) -> int:
    """Return the pairs of a query and a key in a causal sequence with a sliding window of `window` tokens."""
    seen = length if window is None else min(window, length)
    return seen * (seen + 1) // 2 + (length - seen) * seen
